"""Train replay algorithms without a scheme, in a short loop with arrays as storage."""

from __future__ import annotations

import statistics

import gymnasium as gym
import numpy as np
import pytest
import torch

from pytorchrl import linear
from pytorchrl.agent.actors import OffPolicyActor, QActor
from pytorchrl.agent.algorithms import DDPG, DQN, SAC, TD3
from pytorchrl.agent.data import ReplayBatch

torch.set_num_threads(1)  # small networks are slower with several threads


class Transitions:
    """A storage of one-step transitions, from which batches are sampled uniformly."""

    def __init__(self, gamma, seed, size):
        self.gamma, self.size, self.count, self.rng = gamma, size, 0, np.random.default_rng(seed)
        self.num_learned_from, self.columns = 0, None

    @property
    def counters(self):
        return {"inserted": self.count}

    def insert(self, *row):
        if self.columns is None:
            self.columns = [np.empty((self.size, *np.shape(value)), np.asarray(value).dtype) for value in row]
        for column, value in zip(self.columns, row, strict=True):
            column[self.count] = value
        self.count += 1

    def generate_batches(self, num_mini_batch, mini_batch_size):
        for _ in range(num_mini_batch):
            ids = self.rng.integers(self.count, size=mini_batch_size)
            obs, action, reward, terminated, next_obs = (torch.from_numpy(column[ids]) for column in self.columns)
            yield ReplayBatch(
                obs={"obs": obs}, action=action, ret=reward, discount=self.gamma * (1 - terminated),
                next_obs={"obs": next_obs}, weight=torch.ones(mini_batch_size), ids=torch.from_numpy(ids))


class PointMass(gym.Env):
    """Environment in which a point is pushed to 0 within five steps, with actions in [-1, 3].

    The mean return of random actions is -10.2, and that of the best policy is -0.13.
    """

    observation_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = gym.spaces.Box(-1, 3, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps, self.x = 0, self.np_random.uniform(-2, 2, 1).astype(np.float32)
        return self.x, {}

    def step(self, action):
        self.steps, self.x = self.steps + 1, (self.x + 0.5 * (action - 1)).astype(np.float32)
        return self.x, -float(self.x[0] ** 2), False, self.steps == 5, {}


gym.register("PointMass-v0", PointMass)


def train(env_id, algorithm_factory, actor_class, actor_options, steps, seed=1):
    """Train an algorithm, and return it."""
    env = gym.make(env_id)
    actor = actor_class.create_factory(env.observation_space, env.action_space, **actor_options)(seed=seed)
    algorithm = algorithm_factory(actor=actor, seed=seed)
    storage = Transitions(algorithm.gamma, seed, steps)
    obs, first = env.reset(seed=seed)[0], True
    for step in range(1, steps + 1):
        acting = algorithm.acting_step({"obs": obs[None]}, {}, np.array([first]))
        next_obs, reward, terminated, truncated, _ = env.step(acting.clipped_action[0])
        storage.insert(obs, acting.action[0], np.float32(reward), np.float32(terminated), next_obs)
        first = terminated or truncated
        obs = env.reset()[0] if first else next_obs
        if step % algorithm.update_every == 0:
            algorithm.follow_schedules(step, steps)
            for batch in algorithm.batches(storage):
                algorithm.apply_gradients(algorithm.compute_gradients(batch)[0])
    return algorithm


def evaluate(algorithm, env_id, episodes=10):
    """Return the mean return of the deterministic policy."""
    env, total = gym.make(env_id), 0.0
    for episode in range(episodes):
        obs, ended, first = env.reset(seed=10_000 + episode)[0], False, True
        while not ended:
            acting = algorithm.acting_step({"obs": obs[None]}, {}, np.array([first]), deterministic=True)
            obs, reward, terminated, truncated, _ = env.step(acting.clipped_action[0])
            ended, first, total = terminated or truncated, False, total + float(reward)
    return total / episodes


CARTPOLE = {
    "start_steps": 500, "lr": 1e-3, "mini_batch_size": 64, "update_every": 4, "num_updates": 2, "polyak": 0.99,
    "target_update_interval": 1, "epsilon_steps": 3000}
DETERMINISTIC = {"policy": "deterministic"}
CONTINUOUS = {
    "sac": (SAC, {"lr_pi": 1e-3}, {}), "td3": (TD3, {"lr_q": 1e-3, "lr_pi": 1e-3}, DETERMINISTIC),
    "ddpg": (DDPG, {"lr_pi": 1e-3}, {**DETERMINISTIC, "num_critics": 1})}


def test_dqn_learns_to_balance_a_pole():
    algorithm = train("CartPole-v1", DQN.create_factory(**CARTPOLE), QActor, {"hidden_sizes": (64, 64)}, 7000)
    assert evaluate(algorithm, "CartPole-v1") >= 195


@pytest.mark.every(3)
@pytest.mark.parametrize("name", CONTINUOUS)
def test_continuous_control_learns_to_stop_a_point(name):
    cls, options, actor = CONTINUOUS[name]
    factory = cls.create_factory(
        gamma=0.9, start_steps=200, update_every=1, num_updates=1, mini_batch_size=64, polyak=0.98, **options)
    algorithm = train("PointMass-v0", factory, OffPolicyActor, {"hidden_sizes": (32,), **actor}, 800)
    assert evaluate(algorithm, "PointMass-v0", 30) >= -2.0


@pytest.mark.learning
@pytest.mark.timeout(1800)
def test_dqn_solves_cartpole_with_plain_networks():
    """Check the median of three seeds, with 128 updates after every 256 steps and a decreasing learning rate.

    Of the seeds 1 to 6, five end with a return of 500 and one with 332. With `CARTPOLE` and `epsilon_steps=10_000`, the
    median was 185. It was 112 for an implementation that shares no code with this package. So neither implementation
    keeps a good policy with these options, although three of six seeds of each reach 500 on the way.
    """
    factory = DQN.create_factory(
        gamma=0.99, start_steps=500, lr=linear(2.3e-3, 0.0), mini_batch_size=64, update_every=256, num_updates=128,
        polyak=0.0, target_update_interval=128, epsilon_steps=6400, final_epsilon=0.04)
    returns = [evaluate(train("CartPole-v1", factory, QActor, {"hidden_sizes": (120, 84)}, 40_000, seed), "CartPole-v1")
               for seed in (1, 2, 3)]
    assert statistics.median(returns) >= 475, returns


@pytest.mark.learning
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("actor", [{"dueling": True}, {"noisy": True}], ids=["dueling", "noisy"])
def test_dqn_solves_cartpole(actor):
    options = {"initial_epsilon": 0.0, "final_epsilon": 0.0} if "noisy" in actor else {"epsilon_steps": 10_000}
    factory = DQN.create_factory(**{**CARTPOLE, **options}, gamma=0.99)
    algorithm = train("CartPole-v1", factory, QActor, {"hidden_sizes": (120, 84), **actor}, 40_000)
    assert evaluate(algorithm, "CartPole-v1") >= 475


@pytest.mark.learning
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", CONTINUOUS)
def test_continuous_control_swings_a_pendulum_up(name):
    cls, options, actor = CONTINUOUS[name]
    factory = cls.create_factory(
        gamma=0.98, start_steps=1000, update_every=1, num_updates=1, mini_batch_size=128, **options)
    algorithm = train("Pendulum-v1", factory, OffPolicyActor, {"hidden_sizes": (64, 64), **actor}, 20_000)
    assert evaluate(algorithm, "Pendulum-v1") >= -200


@pytest.mark.learning
@pytest.mark.timeout(1800)
def test_discrete_sac_solves_cartpole():
    """Check the median of three seeds, with high learning rates and target networks that follow quickly.

    Of the seeds 1 to 10, nine end with a return of 500 and one with 471. With learning rates of 1e-3, `polyak=0.995`
    and 30,000 steps, the seeds 1 to 6 end with returns of 225 to 271: the policy keeps the pole up, but the cart drifts
    off the track, which ends 29 of 30 episodes of the seeds 1 to 3. With the latter options, an implementation that
    shares no code with this package ends with returns of 169 to 228.
    """
    factory = SAC.create_factory(
        lr_q=4e-3, lr_pi=4e-3, start_steps=1000, update_every=2, num_updates=1, mini_batch_size=64, polyak=0.95,
        target_entropy_scale=0.3)
    returns = [evaluate(train("CartPole-v1", factory, OffPolicyActor, {"hidden_sizes": (64, 64)}, 20_000, seed),
                        "CartPole-v1") for seed in (1, 2, 3)]
    assert statistics.median(returns) >= 400, returns
