"""Check that N synchronous gradient workers on slices of a batch make the same update as one worker on the batch."""

from __future__ import annotations

import dataclasses
import functools

import gymnasium as gym
import numpy as np
import pytest
import torch

from pytorchrl import A2C, PPO, VecEnv
from pytorchrl.agent.seeding import Stream, derive_seed
from pytorchrl.scheme.gradients.g_worker import GWorker
from pytorchrl.scheme.updates import synchronous

SEED, NUM_ENVS, NUM_UPDATES = 1, 6, 5


class PreparedEnv(gym.Env):
    """An environment whose observations, rewards and episode ends depend only on its number, not on the actions.

    The last entry of an observation is the action that `_obedient` takes.
    """

    def __init__(self, numbers):
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (4,), np.float32)
        self.action_space = gym.spaces.Discrete(2)
        self._numbers = numbers

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            # The seed of the environment that is probed for its spaces is not in `numbers`.
            self._series = np.random.default_rng(self._numbers.get(seed, 0))
        return self._observe(), {}

    def step(self, action):
        reward, end = self._series.normal() * 3 + 1, self._series.random()
        return self._observe(), float(reward), end < 0.1, end > 0.95, {}

    def _observe(self):
        return np.append(self._series.normal(size=3), self._series.integers(2)).astype(np.float32)


def _obedient(algorithm):
    """Return a subclass of the algorithm that takes the action in the last entry of the observation."""
    class Obedient(algorithm):
        def acting_step(self, obs, rhs, done, deterministic=False, mask=None):
            acting = super().acting_step(obs, rhs, done, deterministic, mask)
            action = obs["obs"][:, -1].astype(np.int64)
            return acting._replace(action=action, clipped_action=action)
    return Obedient


class Predicting(A2C):
    """A2C with an auxiliary loss: the mean of the features predicts the first entry of the observation."""

    def terms(self, evaluated, batch, parameters):
        terms, measures = super().terms(evaluated, batch, parameters)
        return {**terms, "prediction": (evaluated.features.mean(-1) - batch.obs["obs"][..., 0]).square()}, measures

    def loss_weights(self, parameters):
        return {**super().loss_weights(parameters), "prediction": 5.0}


ALGORITHMS = {
    "auxiliary loss": (Predicting, {"lr": 1e-2}),
    "ppo": (PPO, {"num_epochs": 3, "num_mini_batch": 1, "lr": 1e-3}),
    "a2c": (A2C, {"lr": 1e-2}),
}


def _train(make_scheme, num_workers, algorithm, normalization, **settings):
    """Train with `num_workers` gradient workers that share six environments.

    Returns:
        The parameters before and after training.
    """
    each = NUM_ENVS // num_workers
    numbers = {}
    for worker in range(num_workers):
        index_grad_worker = 0 if num_workers == 1 else worker + 1
        for env in range(each):
            numbers[derive_seed(SEED, Stream.ENV, index_grad_worker, 0, 0, env) >> 32] = worker * each + env
    assert len(numbers) == NUM_ENVS
    kind, options = ALGORITHMS[algorithm]
    scheme = make_scheme(
        # Steps that only reset an environment are not valid, so workers have different numbers of samples.
        envs=VecEnv.create_factory(PreparedEnv, {"numbers": numbers}, each, autoreset="next_step"), size=12,
        hidden=(16,),
        algo=_obedient(kind).create_factory(**options, advantage_normalization=normalization), seed=SEED,
        num_grad_workers=num_workers, **settings)
    start = scheme.acting_state()["all"]
    differed = False
    for _ in range(NUM_UPDATES):
        scheme.step()
        differed |= len({handle.native.worker.storage.advantage_moments()[0]
                         for handle in scheme.update_worker.remote_workers}) > 1
    assert differed or num_workers == 1, "the slices should differ in size, to show that the mean is weighted"
    end = scheme.acting_state()["all"]
    scheme.stop()
    return start, end


def _relative(a, b):
    return float((a - b).norm() / b.norm()), float(((a - b).abs() / (b.abs() + 1e-3)).max())


@pytest.mark.every(3)
@pytest.mark.parametrize("settings", [{}, {"distribute_gradients": True}], ids=["averaged", "all-reduced"])
@pytest.mark.parametrize("normalization", ["none", "batch"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("num_workers", [pytest.param(2, marks=pytest.mark.thorough), 3])
def test_worker_slices_make_the_update_of_the_whole_batch(make_scheme, num_workers, algorithm, normalization, settings):
    start, whole = _train(make_scheme, 1, algorithm, normalization)
    start_of_slices, slices = _train(make_scheme, num_workers, algorithm, normalization, **settings)
    assert torch.equal(start, start_of_slices)
    assert _relative(whole, start)[0] > 1e-3  # training changed the parameters
    assert _relative(slices, whole)[0] <= 1e-6
    assert _relative(slices, whole)[1] <= 1e-4  # the largest error of a parameter, relative to its size plus 1e-3


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_normalizing_each_slice_separately_would_differ(make_scheme, algorithm, monkeypatch):
    """Check that the update differs from that of the whole batch if each worker normalizes over its own slice only."""
    _, whole = _train(make_scheme, 1, algorithm, "batch")
    collect_and_grad = GWorker.collect_and_grad

    @functools.wraps(collect_and_grad)
    def by_itself(self, *args, advantage_moments=None, **kwargs):
        return collect_and_grad(self, *args, **kwargs)
    monkeypatch.setattr(GWorker, "collect_and_grad", by_itself)
    _, slices = _train(make_scheme, 2, algorithm, "batch")
    assert _relative(slices, whole)[0] > 1e-5


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_mean_that_ignores_sizes_would_differ(make_scheme, algorithm, monkeypatch):
    """Check that the update differs from that of the whole batch if the mean of gradients ignores sample counts."""
    _, whole = _train(make_scheme, 1, algorithm, "none")
    mean_gradients = synchronous.mean_gradients
    monkeypatch.setattr(synchronous, "mean_gradients", lambda parts: mean_gradients(
        [dataclasses.replace(part, num_samples=1, samples=dict.fromkeys(part.samples, 1)) for part in parts]))
    _, slices = _train(make_scheme, 2, algorithm, "none")
    assert _relative(slices, whole)[0] > 1e-5
