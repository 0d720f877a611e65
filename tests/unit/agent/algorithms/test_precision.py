"""Tests of the trial that decides `mixed_precision="auto"`, and of the batches that it uses."""

from __future__ import annotations

import dataclasses

import gymnasium as gym
import numpy as np
import pytest
import torch

from pytorchrl import APPO, DDPG, DQN, IMPALA, PPO, R2D2, SAC, TD3, OffPolicyActor, OnPolicyActor, QActor
from pytorchrl.agent.algorithms.precision import (
    BatchShape,
    PrecisionTrial,
    compare,
    measure,
    choices_of,
    undecided,
    with_choices,
)
from pytorchrl.errors import ConfigError

BOX, DISCRETE = gym.spaces.Box(-1.0, 1.0, (3,), np.float32), gym.spaces.Discrete(4)
IMAGE = gym.spaces.Box(0, 255, (4, 36, 36), np.uint8)
MEMORY = {"recurrent_net": "gru", "recurrent_size": 8}
# Name -> (class of the algorithm, class of the actor, observation space, action space, options of the actor)
AGENTS = {
    "ppo": (PPO, OnPolicyActor, BOX, DISCRETE, {}), "ppo, images": (PPO, OnPolicyActor, IMAGE, BOX, {}),
    "ppo, memory": (PPO, OnPolicyActor, BOX, DISCRETE, MEMORY), "impala": (IMPALA, OnPolicyActor, BOX, DISCRETE, {}),
    "appo": (APPO, OnPolicyActor, BOX, gym.spaces.MultiDiscrete([2, 3]), {}),
    "dqn": (DQN, QActor, BOX, DISCRETE, {"dueling": True, "noisy": True}),
    "r2d2": (R2D2, QActor, BOX, DISCRETE, MEMORY),
    "r2d2, previous": (R2D2, QActor, BOX, DISCRETE, {**MEMORY, "prev_action_reward": True}),
    "ddpg": (DDPG, OffPolicyActor, BOX, BOX, {"policy": "deterministic"}),
    "td3": (TD3, OffPolicyActor, IMAGE, BOX, {"policy": "deterministic"}),
    "sac": (SAC, OffPolicyActor, BOX, BOX, {}), "sac, discrete": (SAC, OffPolicyActor, BOX, DISCRETE, {}),
}


def parts(name, **options):
    algorithm, actor, observations, actions, of_actor = AGENTS[name]
    return (algorithm.create_factory(mixed_precision="auto", **options),
            actor.create_factory(observations, actions, hidden_sizes=(8,), **of_actor))


class Clock:
    """A clock that only the measured functions advance."""

    now = 0.0

    def __call__(self):
        return self.now

    def takes(self, *seconds):
        """Return a function that takes these times, one per call; the last time is used again for later calls."""
        left = list(seconds)

        def function():
            self.now += left.pop(0) if len(left) > 1 else left[0]
        return function


@pytest.mark.parametrize(("float32", "bfloat16", "is_mixed"), [
    ((1.0,), (0.8,), True), ((1.0,), (1.2,), False),
    ((1.0,), (0.95,), False),  # too small a difference
    ((9.0, 1.0), (0.5, 1.0), False),  # the first call of each, which includes checks, does not count
    ((1.0, 1.0, 9.0), (1.0, 7.0, 0.5), True)])  # the shortest time of each counts
def test_measured_times_decide(float32, bfloat16, is_mixed):
    clock = Clock()
    trial = compare(clock.takes(*float32), clock.takes(*bfloat16), clock)
    assert trial.is_mixed == is_mixed
    assert (trial.float32_s, trial.bfloat16_s) == pytest.approx((min(float32[1:] or float32),
                                                                 min(bfloat16[1:] or bfloat16)))


def test_quick_gradients_are_measured_more_often():
    clock, calls = Clock(), []
    short = clock.takes(0.01)
    compare(lambda: (calls.append(1), short()), clock.takes(0.01), clock)
    assert len(calls) == pytest.approx(15, abs=1)  # 0.3 s of pairs that take 0.02 s


@pytest.mark.parametrize("name", AGENTS)
def test_both_precisions_compute_gradients_of_a_batch_of_the_given_shape(monkeypatch, name):
    found, (algorithm, actor) = [], parts(name)
    original = algorithm.cls.compute_gradients

    def compute_gradients(self, batch):
        gradients, info = original(self, batch)
        assert all(gradient.isfinite().all() for gradient in gradients)
        found.append((self.options.mixed_precision, batch.num_samples, tuple(batch.action.shape[:2])))
        return gradients, info
    monkeypatch.setattr(algorithm.cls, "compute_gradients", compute_gradients)
    monkeypatch.setattr("pytorchrl.agent.algorithms.precision.TRIAL_S", 0.0)
    has_memory = "memory" in name or "r2d2" in name
    shape = BatchShape(6, 5 if has_memory else 1)
    measure(algorithm, actor, shape, "cpu")
    assert [mixed for mixed, *_ in found] == [False, True] * 4
    assert {samples for _, samples, _ in found} == {30 if has_memory else 6}
    assert {rows[:2] if has_memory else rows[:1] for *_, rows in found} == {(5, 6) if has_memory else (6,)}


@pytest.mark.parametrize("name", ["ppo", "dqn", "sac"])
def test_an_undecided_algorithm_computes_in_float32(name):
    gradients = []
    for precisions in ({}, {"": False}, {"": True}):
        algorithm, actor = parts(name)
        algorithm = with_choices(algorithm, {"mixed_precision": precisions})
        built = algorithm(actor=actor(device="cpu", seed=1), seed=1, device="cpu")
        batch = built.example_batch(BatchShape(8))
        batch = dataclasses.replace(batch, obs={"obs": torch.linspace(-1, 1, 24).view(8, 3)}, ret=torch.ones(8))
        gradients.append(torch.cat(built.compute_gradients(batch)[0]).clone())
    auto, float32, bfloat16 = gradients
    assert torch.equal(auto, float32)
    assert not torch.equal(auto, bfloat16)


def test_only_auto_is_decided():
    (auto, _), explicit = parts("dqn"), DQN.create_factory(mixed_precision=False, compile=False)
    for name in ("mixed_precision", "compile"):
        assert (undecided(auto, name), undecided(explicit, name)) == ([""], [])
    assert with_choices(explicit, {"mixed_precision": {"": True}, "compile": {"": True}}) is explicit
    decided = with_choices(auto, {"mixed_precision": {"": True}, "compile": {"": False}})
    assert choices_of(auto) == {"mixed_precision": {}, "compile": {}}
    assert choices_of(decided) == {"mixed_precision": {"": True}, "compile": {"": False}}
    assert choices_of(explicit) == {"mixed_precision": {"": False}, "compile": {"": False}}
    assert (undecided(decided, "mixed_precision"), undecided(decided, "compile")) == ([], [])
    half = with_choices(auto, {"compile": {"": True}})
    assert (half.options.compile, half.options.is_compiled, half.options.mixed_precision) == (True, True, "auto")


def test_a_trial_names_both_times():
    assert str(PrecisionTrial(0.004, 0.0015)) == (
        "networks compute in bfloat16, because a gradient takes 4 ms in float32 and 1.5 ms in bfloat16")


@pytest.mark.parametrize("cls", [PPO, DQN, DDPG, TD3, SAC, R2D2, IMPALA, APPO])
@pytest.mark.parametrize("value", ["Auto", 1, None])
def test_other_values_are_refused(cls, value):
    with pytest.raises(ConfigError, match=r"mixed_precision must be one of \[False, True, 'auto'\]"):
        cls.create_factory(mixed_precision=value)
