"""Check that observations around 1e9 with a spread of about 1 keep this spread until they reach the networks."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch

from pytorchrl import DQN, PPO, GAEBuffer, OnPolicyActor, QActor, ReplayBuffer, Scheme, VecEnv
from pytorchrl.agent.actors import MLP

LARGE, REWARD = 1e9, 1e6


class Clock(gym.Env):
    """An environment whose observations and rewards are far from 0, with a small spread."""

    action_space = gym.spaces.Discrete(2)

    def __init__(self, dtype=np.float64, low=-np.inf, offset=LARGE):
        self.observation_space = gym.spaces.Box(low, np.inf if low == -np.inf else int(2 * LARGE), (2,), dtype)
        self.offset = offset

    def _observe(self):
        return (self.offset + self.np_random.integers(-3, 4, 2)).astype(self.observation_space.dtype)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._num_steps = 0
        return self._observe(), {}

    def step(self, action):
        self._num_steps += 1
        return self._observe(), REWARD + float(self.np_random.standard_normal()), False, self._num_steps == 10, {}


@pytest.fixture
def train():
    """Return a function that runs `steps` steps of a scheme and returns the actor."""
    schemes = []

    def run(algo, make_actor, storage, envs, **settings):
        steps = settings.pop("steps", 6)
        actor = make_actor(envs.observation_space, envs.action_space, hidden_sizes=(4,), **settings.pop("actor", {}))
        scheme = Scheme(algo, actor, storage, envs, seed=1, **settings)
        schemes.append(scheme)
        for _ in range(steps):
            scheme.step()
        return scheme._worker.local_worker.actor
    yield run
    for scheme in schemes:
        scheme.stop()


PPO_PARTS = (PPO.create_factory(num_epochs=1, num_mini_batch=1), OnPolicyActor.create_factory,
             GAEBuffer.create_factory(40))
DQN_PARTS = (DQN.create_factory(start_steps=0, mini_batch_size=8), QActor.create_factory,
             ReplayBuffer.create_factory(200, rollout_size=40))


@pytest.mark.parametrize("kwargs", [{}, {"dtype": np.int64, "low": 0}], ids=["float64", "int64"])
@pytest.mark.parametrize("parts", [PPO_PARTS, DQN_PARTS], ids=["PPO", "DQN"])
def test_the_spread_around_a_large_number_is_learned_and_kept(train, parts, kwargs):
    envs = VecEnv.create_factory(Clock, kwargs, 2)
    actor = train(*parts, envs, actor={"normalize_obs": True}, steps=45)
    moments = actor.obs_moments[0]
    # The integers from -3 to 3 have a standard deviation of 2.
    assert moments.scale.cpu().numpy() == pytest.approx([0.5, 0.5], rel=0.15)
    dtype = torch.float64 if not kwargs else torch.int64
    values = torch.tensor([[LARGE - 2, LARGE], [LARGE, LARGE + 2]], dtype=dtype, device=actor.device)
    seen = actor.normalize({"obs": values})["obs"]
    assert seen.dtype == torch.float32
    assert (seen[1] - seen[0]).tolist() == pytest.approx([1.0, 1.0], rel=0.15)


def test_merged_moments_of_workers_equal_those_of_all_data(train):
    envs = VecEnv.create_factory(Clock, {}, 2)
    actor = train(*PPO_PARTS, envs, actor={"normalize_obs": True, "normalize_reward": True}, num_col_workers=3,
                  compress_data_to_send="lz4", compress_weights_to_send="bf16", runtime="simulated")
    moments = actor.obs_moments[0]
    assert float(moments.count) == 3 * 6 * 80
    deviation = (moments.m2 / moments.count).sqrt()
    assert deviation.tolist() == pytest.approx([2.0, 2.0], rel=0.1)
    assert moments.mean.tolist() == pytest.approx([LARGE, LARGE], abs=0.3)
    assert float(actor.reward_moments.scale) < 1 / REWARD


@pytest.mark.parametrize(("offset", "keep", "dtype"), [
    (LARGE, None, np.float64), (LARGE, True, np.float64), (LARGE, False, np.float32), (10.0, None, np.float32),
    (10.0, True, np.float64)])
def test_float64_is_kept_if_float32_would_round_or_if_requested(train, monkeypatch, offset, keep, dtype):
    envs = VecEnv.create_factory(Clock, {"offset": offset}, 2, keep_float64=keep)
    assert envs.observation_space["obs"].dtype == dtype
    seen, forward = set(), MLP.forward

    def watch(network, x):
        seen.add(x.dtype)
        return forward(network, x)

    monkeypatch.setattr(MLP, "forward", watch)
    train(*PPO_PARTS, envs)
    env = envs(seed=1)
    obs, _ = env.reset()
    env.close()
    assert obs["obs"].dtype == dtype
    assert seen == {torch.float32}  # networks receive float32 even without normalization


def test_a_float32_environment_is_not_changed():
    factory = VecEnv.create_factory(Clock, {"dtype": np.float32}, 2)
    assert factory.observation_space["obs"].dtype == np.float32
    assert factory.options.keep_float64 is None


@pytest.mark.filterwarnings("error")
def test_float16_is_compared_with_a_bound_beyond_its_range():
    factory = VecEnv.create_factory(Clock, {"dtype": np.float16, "offset": 10.0}, 2)
    assert factory.options.keep_float64 is None
