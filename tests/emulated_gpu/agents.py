"""Small agents that differ in one or two properties each, for tests that train them on a GPU."""

from __future__ import annotations

import functools
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete

from pytorchrl import (
    A2C,
    APPO,
    ASYNC,
    DDPG,
    DQN,
    IMPALA,
    MPO,
    PPO,
    PQN,
    R2D2,
    SAC,
    TD3,
    GAEBuffer,
    OffPolicyActor,
    OnPolicyActor,
    PERBuffer,
    QActor,
    ReplayBuffer,
    SequenceBuffer,
    VecEnv,
    VTraceBuffer,
)

BOX, IMAGE = Box(-1, 1, (3,), np.float32), Box(0, 255, (1, 36, 36), np.uint8)
OBS = {"box": BOX, "float64": Box(-1, 1, (3,), np.float64), "image": IMAGE, "number": Discrete(5),
       "dict": Dict({"a": BOX, "i": IMAGE, "n": Discrete(5), "m": MultiDiscrete([2, 3]), "b": MultiBinary(3)})}
ACTIONS = {"number": Discrete(4), "numbers": MultiDiscrete([2, 3]), "bits": MultiBinary(3),
           "real": Box(-2, 2, (2,), np.float32)}
LSTM = {"recurrent_net": "lstm", "recurrent_size": 8}
GRU = {"recurrent_net": "gru", "recurrent_size": 8}


class Random(gym.Env):
    """An environment with random observations, and episodes of seven steps."""

    def __init__(self, obs, action, mask):
        self.observation_space, self.action_space, self._mask, self._steps = OBS[obs], ACTIONS[action], mask, 0

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self._steps = 0
        return self.observation_space.sample(), self._info()

    def step(self, action):
        self._steps += 1
        return self.observation_space.sample(), float(self._steps % 3), self._steps >= 7, False, self._info()

    def _info(self):
        allowed = self.np_random.integers(0, 2, getattr(self.action_space, "n", 1))
        allowed[0] = 1
        return {"action_mask": allowed.astype(np.int8)} if self._mask else {}


class Case(NamedTuple):
    """An agent to train.

    Attributes:
        agent: The factories of the agent.
        settings: Arguments of the scheme.
    """

    agent: tuple
    settings: dict

    @property
    def copies_ahead(self):
        """Whether batches come from replay or a queue, or are divided, so that the next is copied during an update."""
        is_replay = issubclass(self.agent[2].cls, (ReplayBuffer, SequenceBuffer))
        return is_replay or "microbatch_size" in self.settings or "col_communication" in self.settings


def on_policy(obs, action, algorithm=PPO, *, mask=False, actor=(), settings=(), **options):
    """Return the case of an algorithm that learns from rollouts."""
    envs, kind = _envs(obs, action, mask), QActor if algorithm is PQN else OnPolicyActor
    storage = VTraceBuffer if algorithm in (IMPALA, APPO) else GAEBuffer
    return Case((
        algorithm.create_factory(**options),
        kind.create_factory(envs.observation_space, envs.action_space, **_sizes(obs), **dict(actor)),
        storage.create_factory(12), envs), dict(settings))


def replay(obs, action, algorithm, storage=None, *, mask=False, actor=(), settings=(), **options):
    """Return the case of an algorithm that learns from a replay storage."""
    envs, kind = _envs(obs, action, mask), QActor if algorithm in (DQN, R2D2) else OffPolicyActor
    return Case((
        algorithm.create_factory(start_steps=20, mini_batch_size=8, update_every=4, num_updates=1, **options),
        kind.create_factory(envs.observation_space, envs.action_space, **_sizes(obs), **dict(actor)),
        storage or ReplayBuffer.create_factory(200, rollout_size=4), envs), dict(settings))


def _envs(obs, action, mask):
    return VecEnv.create_factory(functools.partial(Random, obs, action, mask), vec_env_size=2)


def _sizes(obs):
    return {} if obs == "image" else {"hidden_sizes": (8,)}


def prioritized(**options):
    return PERBuffer.create_factory(200, rollout_size=4, **options)


def sequences(**options):
    return SequenceBuffer.create_factory(200, rollout_size=10, length=6, burn_in=2, period=3, **options)


REMOTE = {"num_col_workers": 2, "col_communication": ASYNC}
SHARDS = {**REMOTE, "num_replay_workers": 2}
DETERMINISTIC = {"policy": "deterministic"}

AGENTS = {
    **{f"PPO, observation {obs}, action {action}": on_policy(obs, action, num_epochs=2, num_mini_batch=2)
       for obs in OBS for action in ACTIONS},
    "PPO, mask": on_policy("box", "number", mask=True),
    "PPO, normalizers": on_policy("float64", "real", actor={"normalize_obs": True, "normalize_reward": True}),
    "PPO, LSTM": on_policy("dict", "number", num_mini_batch=1, actor=LSTM),
    "PPO, GRU, two minibatches": on_policy("box", "real", num_mini_batch=2, actor=GRU),
    "PPO, target_kl, recomputed advantages": on_policy("box", "real", target_kl=0.01, recompute_advantages=True),
    "PPO, advantages of the batch": on_policy("box", "real", advantage_normalization="batch"),
    "PPO, optimizer of torch": on_policy("box", "number", optimizer=torch.optim.Adam),
    **{f"PPO, {optimizer}": on_policy("box", "number", optimizer=optimizer)
       for optimizer in ("adamw", "sgd", "rmsprop", "rmsprop_tf")},
    "PPO, bfloat16": on_policy("box", "number", mixed_precision=True),
    "PPO, intrinsic rewards": on_policy("dict", "number", mask=True, intrinsic_reward="rnd", predictor_proportion=0.5),
    "PPO, central inference": on_policy(
        "box", "number", settings={**REMOTE, "inference": "central"}),
    "PPO, microbatches": on_policy("box", "number", settings={"microbatch_size": 5}),
    "PPO, two ranks": on_policy("box", "number", settings={
        "num_grad_workers": 2, "distribute_gradients": True, "grad_device": "DEVICE"}),
    "PPO, two asynchronous gradient workers": on_policy("box", "number", settings={
        "num_grad_workers": 2, "grad_communication": ASYNC, "grad_device": "DEVICE"}),
    "A2C, bits": on_policy("box", "bits", A2C),
    "A2C, GRU": on_policy("box", "number", A2C, actor=GRU),
    "IMPALA, images, asynchronous": on_policy("image", "number", IMPALA, settings=REMOTE),
    "APPO, asynchronous": on_policy("box", "numbers", APPO, target_network=True, settings=REMOTE),
    "SAC": replay("box", "real", SAC),
    "SAC, dict": replay("dict", "real", SAC),
    "SAC, residual blocks": replay("dict", "real", SAC, actor={"block": "simba"}),
    "SAC, discrete": replay("box", "number", SAC),
    "SAC, discrete, mask": replay("dict", "number", SAC, mask=True),
    "SAC, shards": replay("box", "real", SAC, settings=SHARDS),
    "MPO": replay("box", "real", MPO, actor={"policy": "gaussian"}),
    "MPO, discrete, mask": replay("dict", "number", MPO, mask=True),
    "PQN, mask": on_policy("box", "number", PQN, mask=True, actor={"norm": "layer"}, initial_epsilon=0.0,
                           final_epsilon=0.0),
    "DDPG, correlated noise": replay("box", "real", DDPG, actor=DETERMINISTIC, noise="ou"),
    "TD3": replay("box", "real", TD3, actor=DETERMINISTIC),
    # Only a GPU draws random actions that are not used, so an agent with few of them draws other numbers there.
    "DQN, dueling, noisy, images": replay("image", "number", DQN, actor={"noisy": True, "dueling": True},
                                          initial_epsilon=0.0, final_epsilon=0.0),
    "DQN, mask, priorities": replay("box", "number", DQN, prioritized(n_step=3), mask=True),
    "DQN, priorities, shards": replay("box", "number", DQN, prioritized(), settings=SHARDS),
    "C51, dueling, noisy, priorities": replay("box", "number", DQN, prioritized(n_step=3), actor={
        "noisy": True, "dueling": True, "distribution": "categorical"}, initial_epsilon=0.0, final_epsilon=0.0),
    "TQC": replay("box", "real", SAC, actor={"distribution": "quantile", "num_atoms": 9, "num_critics": 3}),
    "R2D2": replay("box", "number", R2D2, sequences(), actor=LSTM | {"prev_action_reward": True}),
}
# Agents whose functions are recorded into CUDA graphs.
COMPILED = {
    "PPO": on_policy("box", "real", compile=True),
    "PPO, mask": on_policy("box", "number", mask=True, compile=True),
    "PPO, bfloat16, images": on_policy("image", "number", compile=True, mixed_precision=True),
    "PPO, intrinsic rewards": on_policy("box", "number", compile=True, intrinsic_reward="rnd"),
    "SAC": replay("box", "real", SAC, compile=True),
    "SAC, discrete, mask": replay("box", "number", SAC, mask=True, compile=True),
    "DQN, noisy": replay("box", "number", DQN, actor={"noisy": True}, compile=True),
    "TD3": replay("box", "real", TD3, actor=DETERMINISTIC, compile=True),
}


def settings_on(case, device):
    """Return the arguments of a scheme whose gradients are computed on a device."""
    return {"runtime": "simulated", "seed": 1, "device": device,
            **{name: device if value == "DEVICE" else value for name, value in case.settings.items()}}
