"""A maze in torch, in which a point must move to a goal; each episode has another goal."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor
from typing_extensions import override

from pytorchrl.envs.tensors.base import TensorEnv

U_MAZE = ("#####", "#...#", "###.#", "#...#", "#####")
"""A maze with one bent corridor."""
Goals = TypeVar("Goals", np.ndarray, Tensor)
_MOST_SPEED, _REACH = 0.2, 0.45


class TorchPointMaze(TensorEnv):
    """Accelerate a point through a maze to a goal. State: position, velocity and goal, two numbers each.

    Observation: a dictionary of "observation" (position and velocity), "achieved_goal" (position) and "desired_goal".
    Action: the acceleration along each axis, in [-1, 1]. The length of a square of the maze is 1, and walls stop the
    point along the axis on which it hits them. The reward of a step is 1 if the point is within 0.45 of the goal, and
    the episode then terminates; otherwise, the reward is 0.

    Args:
        num_envs: Number of environments.
        maze: Rows of the maze, with "#" for a wall and "." for a free square; walls enclose the maze.
        is_dense: Whether the reward of a step is minus the distance to the goal instead.
        device: Device of all tensors.
        max_episode_steps: Number of steps after which an episode is truncated; None: episodes are not truncated.
        compiled: See `TensorEnv`.
    """

    single_action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    num_draws = 6

    def __init__(
        self, num_envs: int = 1, *, maze: tuple[str, ...] = U_MAZE, is_dense: bool = False,
        device: str | torch.device = "cpu", max_episode_steps: int | None = None,
        compiled: bool = False,
    ) -> None:
        self._is_dense = is_dense
        self._walls = torch.tensor([[square == "#" for square in row] for row in maze], device=device)
        self._free = torch.tensor([(x + 0.5, y + 0.5) for y, row in enumerate(maze) for x, square in enumerate(row)
                                   if square == "."], device=device)
        side = float(max(self._walls.shape))
        place, speed = [side] * 2, [_MOST_SPEED] * 2
        goal = spaces.Box(0.0, side, (2,), np.float32)
        self.single_observation_space = spaces.Dict({
            "observation": spaces.Box(np.array([0.0, 0.0, *np.negative(speed)], np.float32),
                                      np.array([*place, *speed], np.float32)),
            "achieved_goal": goal, "desired_goal": goal})
        super().__init__(num_envs, device=device, max_episode_steps=max_episode_steps, compiled=compiled)

    @override
    def start(self, draws: Tensor) -> Tensor:
        number = len(self._free)
        first = (draws[:, 0] * number).long()
        other = (first + 1 + (draws[:, 1] * (number - 1)).long()) % number  # the goal is in another square
        position, goal = self._free[first] + 0.5 * draws[:, 2:4] - 0.25, self._free[other] + 0.5 * draws[:, 4:] - 0.25
        return torch.cat((position, torch.zeros_like(position), goal), 1)

    @override
    def dynamics(self, state: Tensor, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, y, *_, goal_x, goal_y = state.unbind(1)
        speed_x, speed_y = (state[:, 2:4] + 0.05 * actions.clamp(-1.0, 1.0)).clamp(-_MOST_SPEED, _MOST_SPEED).unbind(1)
        speed_x = speed_x * ~self._is_wall(x + speed_x, y)
        x = x + speed_x
        speed_y = speed_y * ~self._is_wall(x, y + speed_y)
        y = y + speed_y
        distance = torch.hypot(x - goal_x, y - goal_y)
        is_reached = distance <= _REACH
        reward = -distance if self._is_dense else is_reached.to(state.dtype)
        return torch.stack((x, y, speed_x, speed_y, goal_x, goal_y), 1), reward, is_reached

    def compute_reward(self, achieved_goal: Goals, desired_goal: Goals, info: object) -> Goals:
        """Return the rewards of N steps, (N,), after which the point is at `achieved_goal`; both goals are (N, 2)."""
        distance = _distance(achieved_goal, desired_goal)
        return -distance if self._is_dense else distance <= _REACH

    @staticmethod
    def compute_terminated(achieved_goal: Goals, desired_goal: Goals, info: object) -> Goals:
        """Return whether the goals of N steps are reached, (N,) bool; see `compute_reward`."""
        return _distance(achieved_goal, desired_goal) <= _REACH

    @override
    def observe(self, state: Tensor) -> dict[str, Tensor]:
        return {"observation": state[:, :4], "achieved_goal": state[:, :2], "desired_goal": state[:, 4:]}

    def _is_wall(self, x: Tensor, y: Tensor) -> Tensor:
        return self._walls[y.long(), x.long()]


def _distance(achieved: Goals, desired: Goals) -> Goals:
    return ((achieved - desired) ** 2).sum(-1) ** 0.5
