"""Test that mistakes in the first episodes of a vector of environments are named, and correct ones are not."""

from __future__ import annotations

import functools

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode

from pytorchrl import VecEnv
from tests.unit.agent.env.tensors import stand_ins


class Long(stand_ins.FiveResults):
    """Episodes of 12 steps that are cut off, or terminated if `terminates`."""

    terminates = False
    reward = None

    def advance(self, actions):
        reward, _, _ = super().advance(actions)
        limit = self.steps >= 12
        if self.reward is not None:
            reward = torch.full((self.num_envs,), self.reward)
        return reward, limit if self.terminates else limit & False, limit & (not self.terminates)


class LimitTerminates(Long):
    terminates = True


class Constant(Long):
    reward = 0.5


class KeepsFinal(Long):
    """The first observation of an episode is the last one of the previous episode."""

    def step(self, actions):
        obs, *rest, extras = super().step(actions)
        ended = rest[1] | rest[2]
        return torch.where(ended[:, None], extras["final_obs"], obs), *rest, extras


class NeverResets(Long):
    def begin(self, mask=None):
        if mask is None:
            super().begin()


def findings(kind, caplog, num_steps=200, **options):
    caplog.clear()
    env = VecEnv.create_factory(kind, vec_env_size=4, **options)(seed=1)
    env.reset()
    generator = np.random.default_rng(0)
    for _ in range(num_steps):
        env.step(generator.integers(0, 2, 4))
    env.close()
    return caplog.messages


@pytest.mark.parametrize(("kind", "message"), [
    (LimitTerminates, "20 of 20 episodes ended after 12 steps, the length of the longest one, and all as terminated"),
    (Constant, "all rewards so far are 0.5, in 20 episodes of which none was terminated"),
    (KeepsFinal, "after the end of an episode, step returns its last observation, which is also in"),
    (NeverResets, "every episode after the first one has a single step, so the environments do not seem to be reset"),
])
def test_what_looks_wrong_is_said_once(kind, message, caplog):
    found = [text for text in findings(kind, caplog) if message in text]
    assert len(found) == 1
    assert found[0].startswith(f"GWorker 0/CWorker 0: {kind.__name__}: ")


class OnlyTerminates(stand_ins.NoFinal):
    """The last observations are not returned, and not needed."""

    def advance(self, actions):
        reward, terminated, truncated = super().advance(actions)
        return reward, terminated | truncated, truncated & False


@pytest.mark.parametrize("kind", [
    OnlyTerminates, Long, stand_ins.FiveResults, stand_ins.Groups, stand_ins.FourResults, stand_ins.TensorVector,
    functools.partial(stand_ins.TensorVector, mode=AutoresetMode.NEXT_STEP),
    functools.partial(stand_ins.TensorVector, mode=AutoresetMode.DISABLED),
    lambda num_envs: gym.make_vec("CartPole-v1", num_envs, "vector_entry_point"),
])
def test_nothing_is_said_about_correct_environments(kind, caplog):
    assert findings(kind, caplog) == []


def test_observations_that_never_change_are_no_finding(caplog):
    class Still(Long):
        def observations(self):
            return torch.zeros(self.num_envs, 3)

    assert findings(Still, caplog) == []
