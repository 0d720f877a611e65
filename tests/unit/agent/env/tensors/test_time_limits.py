"""Test that time limits do not reduce values, in each form of vectors of environments."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode

from pytorchrl import PPO, GAEBuffer, OnPolicyActor, Scheme, VecEnv
from tests.unit.agent.env.tensors import stand_ins

GAMMA, NUM_STEPS = 0.99, 50


def endless(num_envs, observation_of):
    """Return methods of `Walk` for a task without an end, and with a time limit.

    Args:
        num_envs: Number of environments.
        observation_of: Function from the numbers of steps (N,) to numbers (N,), the only ones in the observations.
    """
    def observations(walk):
        return torch.stack([observation_of(walk.steps).float()] * 3, 1)

    def advance(walk, actions):
        reward = observation_of(walk.steps).float()
        walk.steps = walk.steps + 1
        return reward, torch.zeros(num_envs, dtype=torch.bool), walk.steps >= NUM_STEPS

    return observations, advance


def learned_values(kind, places, num_updates=400, **options):
    """Return the values that PPO learns in four environments, of the observations that contain these numbers."""
    torch.manual_seed(0)
    envs = VecEnv.create_factory(kind, vec_env_size=4, **options)
    scheme = Scheme(
        PPO.create_factory(gamma=GAMMA, num_epochs=10, num_mini_batch=1, use_clipped_value_loss=False, lr=1.0,
                           max_grad_norm=None),
        OnPolicyActor.create_factory(envs.observation_space, envs.action_space, hidden_sizes=()),
        GAEBuffer.create_factory(NUM_STEPS, gae_lambda=1.0), envs, seed=1)
    worker = scheme.start().local_worker
    for _ in range(num_updates):
        scheme.step()
    leaf = next(iter(envs.observation_space))
    obs = {leaf: torch.tensor([[place] * 3 for place in places], dtype=torch.float32)}
    values = worker.actor.get_value(obs, {}, torch.zeros(len(places)))[0]["value"].tolist()
    scheme.stop()
    return values


@pytest.fixture
def change_task(monkeypatch):
    """Return a function that gives the stand-ins the task of `endless`."""
    def change(observation_of):
        for name, method in zip(("observations", "advance"), endless(4, observation_of), strict=True):
            monkeypatch.setattr(stand_ins.Walk, name, method)

    return change


EXACT = [
    stand_ins.FiveResults, stand_ins.FourResults, stand_ins.Groups, stand_ins.ManiSkillForm, stand_ins.TensorVector,
    functools.partial(stand_ins.TensorVector, mode=AutoresetMode.NEXT_STEP),
    functools.partial(stand_ins.TensorVector, mode=AutoresetMode.DISABLED),
    functools.partial(stand_ins.FiveResults, in_place=True), functools.partial(stand_ins.FiveResults, device=None),
]


@pytest.mark.parametrize("kind", EXACT)
def test_the_value_of_a_reward_of_one_is_that_without_a_limit(kind, change_task):
    change_task(lambda steps: torch.ones(len(steps)))
    assert learned_values(kind, [1.0]) == pytest.approx([1 / (1 - GAMMA)], rel=2e-3)


def test_the_value_of_the_state_before_the_last_step_is_off_where_states_differ(change_task):
    change_task(lambda steps: steps % 2)  # the reward is 0 and 1 in turns
    expected = [GAMMA / (1 - GAMMA**2), 1 / (1 - GAMMA**2)]
    assert learned_values(stand_ins.FiveResults, [0.0, 1.0]) == pytest.approx(expected, rel=2e-3)
    # The bias is that of rsl_rl, which adds the same value to the last reward.
    found = learned_values(stand_ins.NoFinal, [0.0, 1.0], truncation="approximate")
    assert np.subtract(found, expected) == pytest.approx([1.83, 1.85], abs=0.1)


def test_a_limit_that_is_returned_as_a_termination_reduces_the_value(change_task):
    class Terminated(stand_ins.FiveResults):
        def step(self, actions):
            obs, reward, terminated, truncated, extras = super().step(actions)
            return obs, reward, truncated, terminated, extras

    change_task(lambda steps: torch.ones(len(steps)))
    returns = (1 - GAMMA ** np.arange(1, NUM_STEPS + 1)) / (1 - GAMMA)
    assert learned_values(Terminated, [1.0]) == pytest.approx([returns.mean()], rel=2e-3)
