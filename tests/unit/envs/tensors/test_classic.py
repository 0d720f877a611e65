"""Tests that the tasks of classic control in torch equal those of Gymnasium, step by step and over several episodes."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch

NUM_ENVS = 6
# Name -> largest allowed difference of observations and rewards. Both compute the same formulas, here in float32 with
# a relative error of 6e-8 in each operation. Angles of the pendulum grow to 80, and speeds of the acrobot to 28; a step
# of the acrobot evaluates its formulas four times. The last reward of MountainCarContinuous is about 100.
TOLERANCES = {"CartPole-v1": (1e-6, 0.0), "Pendulum-v1": (1e-5, 1e-4), "Acrobot-v1": (1e-4, 0.0),
              "MountainCar-v0": (2e-7, 0.0), "MountainCarContinuous-v0": (2e-7, 1e-5)}
# Name -> the steps of the test, and the least number of terminated and truncated episodes in them.
ENDS = {"CartPole-v1": (600, 50, 0), "Pendulum-v1": (450, 0, 12), "Acrobot-v1": (1050, 5, 2),
        "MountainCar-v0": (450, 4, 6), "MountainCarContinuous-v0": (1050, 6, 2)}


def policy(name, obs, draws):
    """Return actions: random ones in odd rows, and ones that reach the end of the task in even rows."""
    drive = {"CartPole-v1": lambda: obs[:, 2] + obs[:, 3], "Acrobot-v1": lambda: obs[:, 5] * 0 - obs[:, 4],
             "Pendulum-v1": lambda: obs[:, 2]}.get(name, lambda: obs[:, 1])()
    random = torch.rand(NUM_ENVS, generator=draws) * 2.0 - 1.0
    push = torch.where(torch.arange(NUM_ENVS) % 2 == 0, drive.sign(), random)
    if name in ("Pendulum-v1", "MountainCarContinuous-v0"):
        return (1.2 * push).unsqueeze(1)  # partly out of bounds, so that both clip
    return (push > 0).long() * (1 if name == "CartPole-v1" else 2)


@pytest.mark.parametrize("name", TOLERANCES)
def test_steps_equal_those_of_gymnasium_from_equal_states(name):
    env = gym.make_vec(f"pytorchrl/Torch{name}", num_envs=NUM_ENVS)
    twins = [gym.make(name, disable_env_checker=True) for _ in range(NUM_ENVS)]
    obs, _ = env.reset(seed=1)
    draws = torch.Generator().manual_seed(1)
    for twin in twins:
        twin.reset(seed=1)
    counts = np.zeros(2, np.int64)
    (obs_error, reward_error), (num_steps, *least) = TOLERANCES[name], ENDS[name]
    for _ in range(num_steps):
        actions = policy(name, obs, draws)
        for twin, state in zip(twins, env.state.double().numpy(), strict=True):
            twin.unwrapped.state = state
        obs, reward, terminated, truncated, extras = env.step(actions)
        for row, twin in enumerate(twins):
            expected = twin.step(actions[row].numpy() if actions.dim() > 1 else int(actions[row]))
            np.testing.assert_allclose(extras["final_obs"][row], expected[0], rtol=0.0, atol=obs_error)
            np.testing.assert_allclose(float(reward[row]), expected[1], rtol=0.0, atol=reward_error)
            assert (bool(terminated[row]), bool(truncated[row])) == expected[2:4]
            if expected[2] or expected[3]:
                counts += expected[2:4]
                twin.reset()
            else:
                assert torch.equal(obs[row], extras["final_obs"][row])
    assert all(counts >= least), counts


@pytest.mark.parametrize("name", TOLERANCES)
def test_spaces_and_first_states_equal_those_of_gymnasium(name):
    env, twin = gym.make_vec(f"pytorchrl/Torch{name}", num_envs=4096), gym.make(name, disable_env_checker=True)
    assert env.single_observation_space == twin.observation_space
    assert env.single_action_space == twin.action_space
    assert env.spec.max_episode_steps == twin.spec.max_episode_steps
    env.reset(seed=1)
    starts = []
    for seed in range(200):
        twin.reset(seed=seed)
        starts.append(twin.unwrapped.state)
    low, high = np.min(starts, axis=0), np.max(starts, axis=0)
    margin = 0.05 * (high - low)
    found_low, found_high = env.state.min(dim=0).values.numpy(), env.state.max(dim=0).values.numpy()
    np.testing.assert_array_less(np.abs(found_low - low), margin + 1e-9)
    np.testing.assert_array_less(np.abs(found_high - high), margin + 1e-9)
