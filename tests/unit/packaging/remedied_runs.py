"""Wrong runs, commands, warnings and installations, each with the calls that the message asks for.

They complete `remedied_calls.py`; see `test_remedies.py`.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import json
import logging
import sys
import time
import types
import warnings
from unittest import mock

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

import pytorchrl as prl
from pytorchrl.agent.actors.extractors import CNN, MLP
from pytorchrl.agent.env.deadlines import TimedEnv
from pytorchrl.agent.env.spaces import mask_flags
from pytorchrl.agent.option_values.descriptions import find_by_import
from pytorchrl.cli import main
from pytorchrl.envs.testing import CountingEnv, MatchingGame
from pytorchrl.errors import ConfigError
from pytorchrl.monitor.time_shares import bottleneck
from pytorchrl.scheme import CWorkerSet, GWorkerSet, RWorkerSet
from pytorchrl.scheme.transport.codecs import register_codec
from pytorchrl.training.configuration import load_config
from tests.unit.packaging.remedied_calls import (
    BOX, CARTPOLE, Q_PARTS, TINY, actor_of, envs_of, game, play, q_scheme, run, scheme, step_of, toml)

TOML = "tomllib" if sys.version_info >= (3, 11) else "tomli"


class _Texts(logging.Handler):
    """Handler that keeps the texts of records."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


def loud(call):
    """Make a call; raise an error with the texts of its warnings and of what it logs, if there are any."""
    handler, logger = _Texts(), logging.getLogger("pytorchrl")
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
    finally:
        logger.removeHandler(handler)
    if texts := [*handler.texts, *(str(warning.message) for warning in caught)]:
        raise ConfigError("\n".join(texts))


def command(*words):
    """Run a command; raise an error with what it prints if it fails."""
    with contextlib.redirect_stderr(io.StringIO()) as printed, contextlib.redirect_stdout(io.StringIO()):
        try:
            code = main([str(word) for word in words])
        except SystemExit as ended:
            code = ended.code
    if code:
        raise ConfigError(printed.getvalue())


def ends_with(text, call):
    """Make a call that ends with a `ValueError` that contains a text."""
    with pytest.raises(ValueError, match=text):
        call()


class Slow(CountingEnv):
    """Environment whose steps take a moment."""

    def step(self, action):
        time.sleep(0.01)
        return super().step(action)


class Leaving(prl.PPO):
    """PPO that ends the process."""

    def compute_gradients(self, batch):
        sys.exit("leaving")


class Raising(prl.PPO):
    """PPO that raises an error."""

    def compute_gradients(self, batch):
        raise ValueError("raising")


class Late(MatchingGame):
    """Game that agent_1 leaves after a step; it gets a reward in the step after it left."""

    late = True

    def step(self, actions):
        names, results = self.agents, super().step({"agent_1": 0, **actions})
        obs, rewards, _, truncations, infos = (
            {name: values[name] for name in names} for values in results)
        self.agents = ["agent_0"]
        if self.late:
            rewards["agent_1"] = 1.0
        return obs, rewards, {name: name == "agent_1" for name in names}, truncations, infos


class InTime(Late):
    """Game that gives all rewards while the agent acts."""

    late = False


class NoErrors(prl.DQN):
    """DQN that reports no TD errors."""

    def compute_gradients(self, batch):
        gradients, info = super().compute_gradients(batch)
        return gradients, {name: value for name, value in info.items() if name != "errors"}


class Noisy(prl.PPO):
    """PPO that changes parameters while it computes gradients, on each rank in another way."""

    numbers = itertools.count()

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.number = next(Noisy.numbers)

    def compute_gradients(self, batch):
        with torch.no_grad():
            next(self.actor.parameters()).add_(self.number)
        return super().compute_gradients(batch)


class Norm(nn.Sequential):
    """Extractor with batch normalization."""

    layer = nn.BatchNorm1d

    def __init__(self, space):
        super().__init__(nn.Linear(4, 4), self.layer(4))
        self.out_features = 4


class LayerNorm(Norm):
    """Extractor with layer normalization."""

    layer = nn.LayerNorm


class Sampling(nn.Sequential):
    """Extractor with an operator that only PyTorch has."""

    def __init__(self, space):
        super().__init__(nn.Linear(4, 4))
        self.out_features = 4

    def forward(self, x):
        return super().forward(x) + sampled(x.detach())


class Flat(nn.Flatten):
    """Extractor without parameters."""

    out_features = 1

    def __init__(self, space):
        super().__init__()

    def forward(self, x):
        return x.float().reshape(-1, 1)


class Complex(Sampling):
    """Extractor that uses a complex number."""

    def forward(self, x):
        return torch.real((1 + 0j) * super(Sampling, self).forward(x))


@torch.library.custom_op("own_of_tests::sampled", mutates_args=())
def sampled(x: torch.Tensor) -> torch.Tensor:
    """Return twice a tensor; an operator that no other library has."""
    return 2 * x


sampled.register_fake(torch.empty_like)


def half(arrays, dtype, size):
    return arrays[0]


def whole(arrays, dtype, size):
    return np.resize(arrays[0], size)


def sent_by(name, decode):
    """Encode and decode an array with a codec of one's own."""
    register_codec(name, lambda flat: [flat[:3]], decode, is_lossless=True).pack(np.zeros(6, np.float32)).decode()


def steps(number, **options):
    def repeat(built):
        for _ in range(number):
            built.step()
    run(repeat, **options)


@mock.patch("pytorchrl.scheme.updates.decentralized.DecentralizedUpdates.check_interval", 2)
def ranks(**options):
    """Make updates, and compare the parameters of two ranks."""
    steps(4, num_grad_workers=2, distribute_gradients=True, runtime="simulated", **options)


def waiting(queue_timeout_s, build=scheme, **options):
    """Make a step with two slow collectors that may take this long."""
    built = build(num_col_workers=2, runtime="threads", train_envs_factory=envs_of(Slow),
                  queue_timeout_s=queue_timeout_s, **options)
    try:
        built.step()
    finally:
        built.stop()


def trees(storage):
    """Describe collectors with a storage, and replay shards with another one."""
    parts = list(q_scheme().agent.as_dict().values())[:4]
    return GWorkerSet.create_factory(
        1, CWorkerSet.create_factory(1, *parts), col_communication="asynchronous",
        replay_workers_factory=RWorkerSet.create_factory(2, *parts[:2], storage))


def in_package(name):
    """Name an environment of a package that registers ids of a known form."""
    package = types.ModuleType("panda_gym")
    gym.register("PandaReach-v3", CountingEnv)
    try:
        with mock.patch.dict(sys.modules, {"panda_gym": package}):
            play(name)
    finally:
        del gym.registry["PandaReach-v3"]


def timed(*calls):
    """Call methods of an environment with a timeout."""
    env = TimedEnv(CountingEnv, 30.0)
    for call in calls:
        call(env)


def large(observations, actions=2, **options):
    """Make a factory of actors for this many observations and actions."""
    return actor_of(**{"hidden_sizes": (4,), **options}, envs=types.SimpleNamespace(
        observation_space={"obs": gym.spaces.Discrete(observations)}, action_space=gym.spaces.Discrete(actions)))


def without(package, call):
    """Make a call while a package cannot be imported."""
    with mock.patch.dict(sys.modules, {package: None}):
        call()


def elsewhere(call):
    """Make a call on a platform without anonymous shared memory."""
    with mock.patch("pytorchrl.runtime.processes.runtime.is_supported", return_value=False):
        call()


def more_calls(folder):
    """Return tuples: a wrong call, and the calls for which its message asks."""
    made = folder / "more"
    prl.train("ppo", CARTPOLE, log_dir=made, **TINY)
    agents = [prl.train("ppo", CARTPOLE, feature_extractor=net, **TINY) for net in (Sampling, Complex)]
    (made / "videos").symlink_to(folder / "elsewhere")
    enjoy = ("enjoy", made, "--episodes", "1")
    train = ("train", "ppo", "--env", CARTPOLE, "--num-envs", "2", "--num-steps", "16", "--num-mini-batch", "1",
             "--target-steps", "32", "--no-progress")
    plain, swept = folder / "plain.toml", folder / "swept.toml"
    lines = (f'env = "{CARTPOLE}"', "num_envs = 2", "num_steps = 16", "num_mini_batch = 1", "num_epochs = 1",
             "compile = false\n")
    plain.write_text('algorithm = "ppo"\n' + "\n".join(lines))
    swept.write_text(plain.read_text() + "[sweep]\nseed = [1, 2]\n")
    normalizing = actor_of(normalize_obs=True, normalize_reward=True)
    seconds = json.loads((made / "metrics.jsonl").read_text().splitlines()[-1])["scheme"]["time_s"]
    return [
        # Waits
        *((lambda options=options: waiting(0.005, **options), lambda options=options: waiting(30.0, **options))
          for options in ({}, {"col_communication": "asynchronous"},
                          {"build": q_scheme, "col_communication": "asynchronous", "num_replay_workers": 2})),
        # Runs
        (lambda: sent_by("half", half), lambda: sent_by("whole", whole)),
        (lambda: steps(9, algo_factory=prl.PPO.create_factory(num_mini_batch=1, lr=1e30)),
         lambda: steps(9, algo_factory=prl.PPO.create_factory(num_mini_batch=1, lr=1e-3))),
        (lambda: ranks(algo_factory=Noisy.create_factory(num_mini_batch=1)), ranks),
        (lambda: step_of(Leaving), lambda: ends_with("raising", lambda: step_of(Raising))),
        (lambda: run(prl.Scheme.step, algo_factory=NoErrors.create_factory(start_steps=4, mini_batch_size=2),
                     actor_factory=actor_of(cls=prl.QActor), storage_factory=prl.PERBuffer.create_factory(100)),
         lambda: run(prl.Scheme.step, algo_factory=NoErrors.create_factory(start_steps=4, mini_batch_size=2),
                     actor_factory=actor_of(cls=prl.QActor), storage_factory=prl.ReplayBuffer.create_factory(100))),
        (lambda: trees(prl.PERBuffer.create_factory(500)), lambda: trees(Q_PARTS["storage_factory"])),
        (lambda: bottleneck({level: dict.fromkeys(parts, 0.0) for level, parts in seconds.items()}, {}),
         lambda: bottleneck(seconds, {})),
        # Warnings
        (lambda: loud(lambda: game(Late)), lambda: loud(lambda: game(InTime))),
        (lambda: loud(lambda: run(prl.Scheme.step, actor_factory=actor_of(feature_extractor=Norm))),
         lambda: loud(lambda: run(prl.Scheme.step, actor_factory=actor_of(feature_extractor=LayerNorm))),
         lambda: loud(lambda: run(prl.Scheme.step, actor_factory=actor_of(normalize_obs=True)))),
        *((lambda wrapper=wrapper: loud(lambda: play(CountingEnv, {"wrappers": [wrapper]})),
           lambda: loud(lambda: play(CountingEnv)),
           lambda: loud(lambda: run(prl.Scheme.step, actor_factory=normalizing)))
          for wrapper in (gym.wrappers.NormalizeObservation, gym.wrappers.NormalizeReward)),
        # Values
        (lambda: timed(TimedEnv.close, TimedEnv.reset), lambda: timed(TimedEnv.reset, TimedEnv.close)),
        (lambda: mask_flags([[1, 0], [1, 0, 1]]), lambda: mask_flags([[1, 0, 0], [1, 0, 1]])),
        (lambda: CNN(BOX), lambda: MLP(BOX, (4,))),
        (lambda: large(10**9), lambda: large(10**3), lambda: large(10**9, feature_extractor=Flat)),
        (lambda: large(3, 10**9), lambda: large(3, 10**3), lambda: large(3, 10**9, hidden_sizes=(2,))),
        (lambda: in_package("PandaReach-v9"), lambda: in_package("panda_gym:PandaReach-v3")),
        # Commands
        (lambda: command(*enjoy, "--video", "films", "--render", "video"), lambda: command(*enjoy)),
        (lambda: command(*enjoy, "--render", "video"),
         lambda: command(*enjoy, "--render", "video", "--out", folder / "films")),
        (lambda: loud(lambda: play(CARTPOLE, {"env_kwargs": {"render_mode": "rgb_array"}, "wrappers": [
            functools.partial(gym.wrappers.RecordVideo, video_folder=str(folder / "videos"))]})),
         lambda: command(*enjoy, "--video", folder / "other_films")),
        (lambda: command(*train, "--log-dir", folder / "watched", "--watch"),
         lambda: command(*train, "--log-dir", folder / "watched")),
        (lambda: command("profile", "--config", swept, "--seconds", "0.01"),
         lambda: command("profile", "--config", plain, "--seconds", "0.01")),
        *((lambda agent=agent: agent.export(folder / "own.safetensors", to="safetensors", checks=2),
           lambda agent=agent: agent.export(folder / "own.pt2", to="torch", checks=2, overwrite=True))
          for agent in agents),
        (lambda: find_by_import(f"{__name__}:half.<locals>.decode"), lambda: find_by_import(f"{__name__}:half")),
        # Installations
        (lambda: without("lz4", lambda: scheme(num_col_workers=2, compress_data_to_send="lz4")),
         lambda: scheme(num_col_workers=2, compress_data_to_send="lz4")),
        (lambda: without(TOML, lambda: toml(folder, "lr = 1e-3\n")),
         lambda: without(TOML, lambda: load_config(made / "run.json"))),
        *((lambda: elsewhere(lambda: scheme(num_col_workers=2, runtime="processes")),
           lambda runtime=runtime: elsewhere(lambda: scheme(num_col_workers=2, runtime=runtime)))
          for runtime in ("ray", "threads")),
    ]
