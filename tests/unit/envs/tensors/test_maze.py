"""Tests of the point maze: walls, goals and rewards, compared with a simulation of one point in plain Python."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from pytorchrl.envs.tensors.maze import U_MAZE, TorchPointMaze

WIDE = ("######", "#.#..#", "#....#", "######")


def stepped(maze, state, action):
    """Return the state of one point after a step, and its distance to the goal."""
    x, y, speed_x, speed_y, goal_x, goal_y = map(float, state)
    speeds = [min(max(speed + 0.05 * min(max(push, -1.0), 1.0), -0.2), 0.2)
              for speed, push in zip((speed_x, speed_y), map(float, action), strict=True)]
    if maze[int(y)][int(x + speeds[0])] == "#":
        speeds[0] = 0.0
    x += speeds[0]
    if maze[int(y + speeds[1])][int(x)] == "#":
        speeds[1] = 0.0
    y += speeds[1]
    return [x, y, *speeds, goal_x, goal_y], math.hypot(x - goal_x, y - goal_y)


@pytest.mark.parametrize("is_dense", [False, True])
@pytest.mark.parametrize("maze", [U_MAZE, WIDE])
def test_steps_equal_those_of_one_point(maze, is_dense):
    env = TorchPointMaze(16, maze=maze, is_dense=is_dense, max_episode_steps=60)
    env.reset(seed=1)
    draws = torch.Generator().manual_seed(1)
    num_hits = num_ends = 0
    push = torch.zeros(16, 2)
    for step in range(300):
        if step % 10 == 0:
            push = torch.rand(16, 2, generator=draws) * 3.0 - 1.5
        before = env.state.clone()
        _, reward, terminated, _, extras = env.step(push)
        num_ends += int(terminated.sum())
        for row, state in enumerate(before):
            expected, distance = stepped(maze, state, push[row])
            num_hits += expected[2] == 0.0
            final = {name: part[row].numpy() for name, part in extras["final_obs"].items()}
            np.testing.assert_allclose(final["observation"], expected[:4], rtol=0.0, atol=1e-6)
            np.testing.assert_allclose(final["achieved_goal"], expected[:2], rtol=0.0, atol=1e-6)
            np.testing.assert_array_equal(final["desired_goal"], state[4:])
            assert bool(terminated[row]) == (distance <= 0.45)
            assert float(reward[row]) == pytest.approx(-distance if is_dense else float(distance <= 0.45), abs=1e-6)
    assert num_hits > 100
    assert num_ends >= 2


def test_every_free_square_is_a_start_and_a_goal_and_the_two_differ():
    env = TorchPointMaze(2000, maze=WIDE)
    state = env.start(torch.rand(2000, 6, generator=torch.Generator().manual_seed(1)))
    free = {(x, y) for y, row in enumerate(WIDE) for x, square in enumerate(row) if square == "."}
    starts, goals = [tuple(row) for row in state[:, :2].long().tolist()], [
        tuple(row) for row in state[:, 4:].long().tolist()]
    assert set(starts) == set(goals) == free
    assert all(start != goal for start, goal in zip(starts, goals, strict=True))
    assert {(start, goal) for start, goal in zip(starts, goals, strict=True)} == {
        (start, goal) for start in free for goal in free if start != goal}
    assert not state[:, 2:4].any()


def test_the_largest_random_number_is_a_free_square():
    env = TorchPointMaze(1)
    state = env.start(torch.full((1, 6), 1.0 - 2.0**-24))
    assert U_MAZE[int(state[0, 1])][int(state[0, 0])] == U_MAZE[int(state[0, 5])][int(state[0, 4])] == "."
