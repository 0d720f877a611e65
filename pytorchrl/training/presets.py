"""Define default settings for each algorithm and suite of environments; the user's options override them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import cast

import gymnasium as gym

from pytorchrl.agent.actors.extractors import is_image
from pytorchrl.agent.env import EnvFactory
from pytorchrl.agent.env.aliases import AnyEnv, AnySpace
from pytorchrl.agent.multi.env import MultiAgentEnvFactory
from pytorchrl.agent.schedules import linear
from pytorchrl.envs import make_factory
from pytorchrl.envs.suites import suite_of
from pytorchrl.support.code import Code

EnvMaker = str | AnyEnv | Callable[..., object]
"""An id, an environment, or a function that makes one environment."""
EnvSource = EnvMaker | Code
"""The argument `env` of `train`: an id, an environment, or a function that makes one environment, or its name."""

# Defaults of `atari_factory`, repeated here so that --help shows them.
_ATARI = {"backend": "vector", "reward_transform": "sign", "end_on_life_loss": True}

_CONTINUOUS: dict[str, dict[str, object]] = {
    "classic": {"num_envs": 1, "num_steps": 1, "replay_size": 50_000, "gamma": 0.98, "start_steps": 1000,
                "update_every": 1, "num_updates": 1, "mini_batch_size": 128, "hidden_sizes": (64, 64),
                "target_steps": 20_000},
    "mujoco": {"num_envs": 1, "num_steps": 1, "replay_size": 1_000_000, "start_steps": 5000, "update_every": 1,
               "num_updates": 1, "target_steps": 1_000_000},
}
_CONTINUOUS["box2d"] = {**_CONTINUOUS["mujoco"], "target_steps": 500_000}
_DDPG = {"policy": "deterministic", "num_critics": 1}
_MPO = {"policy": "gaussian", "sample_action_num": 20}
_REPLAY_PRESETS: dict[tuple[str, str], Mapping[str, object]] = {
    (name, family): {**common, **own, **(classic if family == "classic" else {})}
    for name, own, classic in (
        ("sac", {}, {"lr_pi": 1e-3}), ("td3", {"policy": "deterministic"}, {"lr_q": 1e-3, "lr_pi": 1e-3}),
        ("ddpg", _DDPG, {"lr_pi": 1e-3}), ("mpo", _MPO, {"lr_q": 1e-3, "lr_pi": 1e-3}))
    for family, common in _CONTINUOUS.items()}
_MEMORY = {"recurrent_net": "lstm", "dueling": True}
_SEQUENCES = {"mini_batch_size": 32, "length": 16, "burn_in": 8, "period": 8}
_DQN = {"num_envs": 1, "num_steps": 4, "update_every": 4}
_REPLAY_PRESETS |= {
    # Those of https://github.com/DLR-RM/rl-baselines3-zoo for BipedalWalker, without its noise that depends on states.
    ("sac", "box2d"): {
        **_CONTINUOUS["box2d"], "num_steps": 64, "update_every": 64, "num_updates": 64, "start_steps": 10_000,
        "gamma": 0.98, "polyak": 0.98, "lr_q": 7.3e-4, "lr_pi": 7.3e-4, "lr_alpha": 7.3e-4},
    # Those of https://github.com/DLR-RM/rl-baselines3-zoo for CartPole, but its 128 updates every 256 steps are spread
    # over these steps, and the learning rate falls: with its constant 2.3e-3, some final policies lose the pole.
    ("dqn", "classic"): {
        **_DQN, "replay_size": 50_000, "start_steps": 1000, "lr": linear(1e-3, 0.0), "mini_batch_size": 64,
        "num_updates": 2, "polyak": 0.0, "target_update_interval": 128, "epsilon_steps": 8000, "final_epsilon": 0.04,
        "hidden_sizes": (256, 256), "target_steps": 100_000},
    ("dqn", "box2d"): {
        **_DQN, "replay_size": 100_000, "start_steps": 1000, "lr": 5e-4, "mini_batch_size": 128, "polyak": 0.995,
        "target_update_interval": 1, "target_steps": 500_000},
    ("dqn", "atari"): {
        **_DQN, "replay_size": 100_000, "start_steps": 80_000, "epsilon_steps": 1_000_000, "final_epsilon": 0.01,
        "target_steps": 10_000_000, **_ATARI},
    # With the R2D2 settings, each collected step is used 8 (Atari) or 16 times on average. With many collectors,
    # `max_replay_ratio=1` limits this average to 1, as in Kapturowski et al. 2019.
    ("r2d2", "classic"): {
        **_MEMORY, "num_envs": 4, "num_steps": 8, "replay_size": 50_000, "start_steps": 1000, "update_every": 32,
        "num_updates": 1,
        "mini_batch_size": 32, "length": 16, "burn_in": 8, "period": 8, "n_step": 3, "gamma": 0.99, "lr": 1e-3,
        "target_update_interval": 100, "recurrent_net": "gru", "recurrent_size": 64, "hidden_sizes": (64,),
        "target_steps": 100_000},
    ("r2d2", "box2d"): {
        **_MEMORY, "num_envs": 8, "num_steps": 40, "replay_size": 200_000, "start_steps": 5000, "update_every": 320,
        "num_updates": 1,
        "lr": 5e-4, "target_update_interval": 400, "recurrent_size": 128, "target_steps": 1_000_000},
    ("r2d2", "atari"): {
        **_MEMORY, "num_envs": 16, "num_steps": 40, "replay_size": 200_000, "start_steps": 80_000, "update_every": 640,
        "num_updates": 1, "target_steps": 10_000_000, **_ATARI, "reward_transform": None, "end_on_life_loss": False},
    ("sac", "atari"): {
        "num_envs": 1, "num_steps": 4, "update_every": 4, "num_updates": 1, "replay_size": 100_000,
        "start_steps": 20_000,
        "lr_q": 3e-4, "mini_batch_size": 64, "polyak": 0.0, "target_update_interval": 2000, "target_steps": 5_000_000,
        **_ATARI},
}
# CleanRL's `max_grad_norm` is 10, for a loss that is twice as large.
_PQN = {"num_steps": 128, "num_epochs": 4, "num_mini_batch": 4, "lr": linear(2.5e-4, 0.0), "gae_lambda": 0.65,
        "norm": "layer", "max_grad_norm": 5.0}
# Additions to the presets of DQN for a distribution of the return, by suite. The range on CartPole is that of
# https://docs.cleanrl.dev/rl-algorithms/c51, and contains the discounted returns of all classic environments. The rates
# on Atari are those of Bellemare et al. 2017 and Dabney et al. 2018. QR-DQN on classic environments has the settings of
# https://github.com/DLR-RM/rl-baselines3-zoo, with a learning rate that falls. If updates are spread over the steps, as
# for DQN, some of its final policies are bad. The losses of all quantiles are added, as in the paper, so
# `max_grad_norm=10` would clip each gradient.
_OF_DISTRIBUTION: Mapping[tuple[object, str], Mapping[str, object]] = {
    ("categorical", "classic"): {
        "num_atoms": 101, "v_min": -100.0, "v_max": 100.0, "start_steps": 500, "lr": 1e-3, "polyak": 0.99,
        "target_update_interval": 1, "epsilon_steps": 10_000, "final_epsilon": 0.05, "hidden_sizes": (120, 84)},
    ("categorical", "box2d"): {"num_atoms": 101, "v_min": -300.0, "v_max": 300.0},
    ("categorical", "atari"): {"lr": 2.5e-4, "adam_eps": 0.01 / 32},
    ("quantile", "classic"): {
        "num_atoms": 10, "max_grad_norm": None, "lr": linear(2.3e-3, 0.0), "update_every": 256, "num_updates": 128},
    ("quantile", "atari"): {"lr": 5e-5, "adam_eps": 0.01 / 32},
}
# The rates of Hessel et al. 2018 (Rainbow), because transitions with high priorities have larger gradients.
_OF_PRIORITIZED: Mapping[tuple[object, str], Mapping[str, object]] = {
    ("categorical", "atari"): {
        "lr": 6.25e-5, "adam_eps": 1.5e-4, "start_steps": 20_000, "target_update_interval": 2000},
}
_presets: dict[tuple[str, str], Mapping[str, object]] = {
    **_REPLAY_PRESETS,
    # 24 prompts with 8 answers each; a run of SortDigits takes a few seconds.
    ("grpo", "tokens"): {
        "num_envs": 192, "group_size": 8, "num_epochs": 2, "lr": 1e-3, "target_steps": 150_000},
    # PPO follows Schulman et al. 2017 and Huang et al. 2022 ("The 37 implementation details of PPO"), with numbers of
    # steps that suit a first run. `model.pt` contains the final policy, so most learning rates decay to zero:
    # the last updates then change this policy only a little.
    ("ppo", "classic"): {
        "num_envs": 8, "num_steps": 128, "num_epochs": 10, "num_mini_batch": 4, "lr": linear(1e-3, 0.0),
        "gamma": 0.98, "gae_lambda": 0.9, "entropy_coef": 0.0, "target_steps": 100_000,
    },
    ("ppo", "box2d"): {
        "num_envs": 16, "num_steps": 1024, "num_epochs": 4, "num_mini_batch": 64, "lr": 3e-4, "gamma": 0.999,
        "gae_lambda": 0.98, "entropy_coef": 0.01, "target_steps": 1_000_000,
    },
    ("ppo", "mujoco"): {
        "num_envs": 1, "num_steps": 2048, "num_epochs": 10, "num_mini_batch": 32, "lr": linear(3e-4, 0.0),
        "entropy_coef": 0.0, "normalize_obs": True, "normalize_reward": True, "target_steps": 1_000_000,
    },
    ("ppo", "atari"): {
        "num_envs": 8, "num_steps": 128, "num_epochs": 4, "num_mini_batch": 4, "lr": linear(2.5e-4, 0.0),
        "clip_param": 0.1, "entropy_coef": 0.01, "target_steps": 10_000_000, **_ATARI,
    },
    ("a2c", "classic"): {
        "num_envs": 8, "num_steps": 8, "gae_lambda": 1.0, "lr": linear(2e-3, 0.0), "entropy_coef": 0.0,
        "target_steps": 500_000,
    },
    ("a2c", "box2d"): {"num_envs": 16, "num_steps": 5, "gae_lambda": 1.0, "target_steps": 1_000_000},
    ("a2c", "mujoco"): {
        "num_envs": 8, "num_steps": 8, "gae_lambda": 1.0, "entropy_coef": 0.0, "normalize_obs": True,
        "normalize_reward": True, "target_steps": 2_000_000,
    },
    ("a2c", "atari"): {"num_envs": 16, "num_steps": 5, "gae_lambda": 1.0, "target_steps": 10_000_000, **_ATARI},
    # Those of CleanRL, as its `pqn.py` and `pqn_atari_envpool.py` have them. On Box2D, the learning rate is four times
    # as large: with that rate and 16 environments, a run of 500,000 steps on LunarLander-v3 reached 39, now 233 to 256.
    ("pqn", "classic"): {
        **_PQN, "num_envs": 4, "epsilon_steps": 250_000, "hidden_sizes": (120, 84), "target_steps": 500_000},
    ("pqn", "box2d"): {
        **_PQN, "num_envs": 4, "lr": linear(1e-3, 0.0), "gamma": 0.995, "epsilon_steps": 250_000,
        "target_steps": 500_000},
    ("pqn", "atari"): {
        **_PQN, "num_envs": 8, "epsilon_steps": 1_000_000, "final_epsilon": 0.01, "target_steps": 10_000_000, **_ATARI},
    # A train batch is a rollout of one collector, also with the architecture `impala`. On Atari it has 500 steps, as in
    # https://github.com/ray-project/rl-experiments.
    ("impala", "classic"): {
        "num_envs": 8, "num_steps": 16, "train_batch_size": None, "lr": linear(2e-3, 0.0), "gamma": 0.98,
        "entropy_coef": 0.0, "target_steps": 200_000,
    },
    ("impala", "box2d"): {
        "num_envs": 16, "num_steps": 32, "lr": linear(1e-3, 0.0), "gamma": 0.99, "target_steps": 2_000_000,
    },
    ("impala", "mujoco"): {
        "num_envs": 8, "num_steps": 64, "lr": linear(5e-4, 0.0), "vtrace_lambda": 0.95, "entropy_coef": 0.0,
        "normalize_obs": True, "normalize_reward": True, "target_steps": 2_000_000,
    },
    ("impala", "atari"): {
        "num_envs": 10, "num_steps": 50, "lr": linear(5e-4, 0.0), "target_steps": 10_000_000, **_ATARI,
    },
    # The MuJoCo settings follow Sample Factory (Petrenko et al. 2020): rollouts of 64 steps and two epochs. With
    # 8 environments, however, a minibatch has 256 steps instead of 1024.
    ("appo", "classic"): {
        "num_envs": 8, "num_steps": 64, "num_epochs": 4, "num_mini_batch": 4, "lr": linear(1e-3, 0.0), "gamma": 0.98,
        "vtrace_lambda": 0.9, "entropy_coef": 0.0, "target_steps": 100_000,
    },
    ("appo", "box2d"): {
        "num_envs": 16, "num_steps": 256, "num_epochs": 4, "num_mini_batch": 16, "gamma": 0.999, "vtrace_lambda": 0.98,
        "target_steps": 1_000_000,
    },
    ("appo", "mujoco"): {
        "num_envs": 8, "num_steps": 64, "num_epochs": 2, "num_mini_batch": 2, "lr": linear(3e-4, 0.0),
        "vtrace_lambda": 0.95, "entropy_coef": 0.0, "normalize_obs": True, "normalize_reward": True,
        "target_steps": 2_000_000,
    },
    ("appo", "atari"): {
        "num_envs": 8, "num_steps": 64, "num_epochs": 1, "num_mini_batch": 1, "lr": linear(5e-4, 0.0),
        "target_steps": 10_000_000, **_ATARI,
    },
}


# Environments that belong to no suite have a kind, which depends on their spaces. The settings of a kind are not tuned
# for a task: they are those of the papers. The learning rate of on-policy algorithms falls to 0 over the run, as in
# Mnih et al. 2016 and Schulman et al. 2017 (Atari), so that the final policy stops exploring. They normalize
# observations that are not images, because nobody knows the units of a new environment, and declared bounds are often
# much wider than the values (MiniGrid declares bytes of 0 to 255, and sends 0 to 10). They do not normalize rewards,
# except for continuous actions: a single reward at the end of a long episode would be clipped.
KINDS: Mapping[str, str] = MappingProxyType({
    "images": "observations of images", "continuous": "continuous actions, no images",
    "vectors": "discrete actions, no images"})
"""Kind of environments -> the spaces that characterize it."""
_STEPS_OF_KIND = {"images": 1_000_000, "continuous": 1_000_000, "vectors": 200_000}
_EXPLORATION = ("start_steps", "epsilon_steps", "final_epsilon")  # tuned for 10 million steps of Atari


def _of_kind(algorithm: str, suite: str, kind: str, without: Sequence[str] = (), **own: object) -> None:
    """Register the settings of a suite for a kind, without the suite's scales of rewards and time."""
    found = {name: value for name, value in _presets[algorithm, suite].items() if name not in (*_ATARI, *without)}
    _presets[algorithm, kind] = {**found, "target_steps": _STEPS_OF_KIND[kind], **own}


# These algorithms learn from data sets, so `target_steps` is a number of updates. A data set replaces `replay_size`.
_presets |= {("bc", "classic"): {"replay_size": 50_000, "lr": 1e-3, "target_steps": 5000},
             ("iql", "classic"): {**_CONTINUOUS["classic"], "lr_q": 1e-3, "lr_v": 1e-3, "lr_pi": 1e-3}}
_presets |= {
    # 10 epochs, as for continuous actions, and a minibatch for each environment. With the 4 epochs of 4 minibatches
    # that suit millions of steps, a run of 200,000 steps would make only 3,000 updates. The learning rate is that of
    # https://github.com/lcswillems/rl-starter-files for MiniGrid: a third of it learns too little in 10,000 steps.
    ("ppo", "vectors"): {
        "num_envs": 8, "num_steps": 128, "num_epochs": 10, "num_mini_batch": 8, "lr": linear(1e-3, 0.0)},
    ("impala", "vectors"): {"num_envs": 8, "num_steps": 32, "train_batch_size": None, "lr": linear(5e-4, 0.0)},
    ("appo", "vectors"): {"num_envs": 8, "num_steps": 64, "lr": linear(3e-4, 0.0)},
    # The sequences of the paper (80 steps, of which 40 are burn-in) would give 200,000 steps too few updates.
    ("r2d2", "vectors"): {
        **_MEMORY, "num_envs": 4, "num_steps": 16, "replay_size": 100_000, "start_steps": 5000, "update_every": 64,
        "num_updates": 1, "mini_batch_size": 32, "length": 40, "burn_in": 20, "period": 20,
        "target_update_interval": 400},
}
for _name in ("ppo", "impala", "appo"):
    _of_kind(_name, "mujoco", "continuous")
    _of_kind(_name, "atari", "images", normalize_obs=True)
    _of_kind(_name, "vectors", "vectors", normalize_obs=True)
for _suite, _kind in (("mujoco", "continuous"), ("atari", "images"), ("box2d", "vectors")):
    _of_kind("a2c", _suite, _kind, lr=linear(7e-4, 0.0), normalize_obs=True)
for _name in ("sac", "td3", "ddpg", "mpo"):
    _of_kind(_name, "mujoco", "continuous")
for _name in ("dqn", "r2d2", "sac"):
    _of_kind(_name, "atari", "images", _EXPLORATION, start_steps=10_000)
for _name in ("td3", "ddpg"):
    _of_kind(_name, "mujoco", "images", replay_size=100_000)
_of_kind("sac", "atari", "vectors", start_steps=5000)
_of_kind("dqn", "atari", "vectors", _EXPLORATION, start_steps=1000, epsilon_steps=20_000)
_of_kind("pqn", "atari", "images", _EXPLORATION, normalize_obs=True)
_of_kind("pqn", "atari", "vectors", _EXPLORATION, normalize_obs=True, lr=linear(1e-3, 0.0), epsilon_steps=50_000)
_of_kind("r2d2", "vectors", "vectors")


def register(algorithm: str, suite: str, options: Mapping[str, object]) -> None:
    """Register the default options of an algorithm for a suite of environments; the user's options override them.

    An earlier registration is replaced.

    Args:
        algorithm: Name under which the algorithm is registered.
        suite: Name of a suite ("classic", "box2d", "mujoco", "atari", or a suite that the user has registered), or a
            key of `KINDS`, for environments that belong to no suite.
        options: Options of `train`, by name.
    """
    _presets[algorithm, suite] = MappingProxyType(dict(options))


def registered() -> Mapping[tuple[str, str], Mapping[str, object]]:
    """Return all presets, keyed by (name of the algorithm, name of the suite)."""
    return MappingProxyType(_presets)


def is_registered(algorithm: str, suite: str) -> bool:
    """Return whether there is a preset for an algorithm and a suite or kind of environments."""
    return (algorithm, suite) in _presets


def kind_of(envs: EnvFactory) -> str:
    """Return the kind of environments, a key of `KINDS`."""
    observations, actions = [envs.observation_space], [envs.action_space]
    if isinstance(envs, MultiAgentEnvFactory):  # then the spaces are mappings from policies
        observations = list(cast("Mapping[str, dict[str, AnySpace]]", envs.observation_space).values())
        actions = list(cast("Mapping[str, AnySpace]", envs.action_space).values())
    if any(is_image(leaf) for leaves in observations for leaf in leaves.values()):
        return "images"
    return "continuous" if all(isinstance(space, gym.spaces.Box) for space in actions) else "vectors"


def suite_or_kind(algorithm: str, env: EnvMaker, envs: Callable[[], EnvFactory | None] | None = None) -> str:
    """Return the suite of the environments if it has a preset for the algorithm, otherwise their kind.

    Args:
        algorithm: Name of the algorithm.
        env: An id, an environment, or a function that makes one environment.
        envs: Function that returns the factory of the environments, or None if it cannot be built; it is called only if
            the kind matters. None: one environment is built to read its spaces.
    """
    suite = suite_of(env)
    if suite is not None and is_registered(algorithm, suite.name):
        return suite.name
    if not any(is_registered(algorithm, kind) for kind in KINDS):
        return ""
    factory = make_factory(env) if envs is None else envs()
    kind = "vectors" if factory is None else kind_of(factory)
    if is_registered(algorithm, kind):
        return kind
    # The algorithm has no preset for such spaces, and maybe cannot be used with them.
    return next(other for other in KINDS if is_registered(algorithm, other))


def preset(
    algorithm: str, suite: str, options: Mapping[str, object] = MappingProxyType({}),
) -> dict[str, object]:
    """Return the preset for an algorithm and a suite or kind of environments; empty if none is registered.

    The preset omits options that would have no effect together with the user's `options`.
    """
    found = dict(_presets.get((algorithm, suite), {}))
    if algorithm == "dqn":
        kind = (options.get("distribution"), suite)
        found |= _OF_DISTRIBUTION.get(kind, {})
        found |= _OF_PRIORITIZED.get(kind, {}) if options.get("prioritized") else {}
    if options.get("kind") == "batch":  # each rollout is one sequence, so `num_steps` is the length of a sequence
        found |= {"num_steps": found["length"]} if "length" in found else {}
    without = set(_names_without_effect(options, suite))
    found = {name: value for name, value in found.items() if name not in without}
    if options.get("recurrent_net") and algorithm in ("sac", "td3", "ddpg"):
        found |= _SEQUENCES
    return found


def _names_without_effect(options: Mapping[str, object], suite: str) -> Iterator[str]:
    """Yield the options of a preset that would have no effect, or a wrong one, together with the user's `options`."""
    if options.get("epsilon_per_worker"):
        yield from ("initial_epsilon", "final_epsilon", "epsilon_steps")
    if options.get("mini_batch_size") is not None:
        yield "num_mini_batch"
    if options.get("target_networks") is False:
        yield from ("polyak", "target_update_interval")
    if options.get("block") == "simba":
        yield "norm"  # residual blocks have layer norms of their own
    if not isinstance(options.get("feature_extractor", ""), str):
        yield "norm"  # which normalizes the library's layers only
        if suite in KINDS:
            yield "normalize_obs"  # the user's own network may read codes, which it would look up or compare
    if options.get("preset") != "impala":  # whose train batches have 500 steps, unless a preset here says otherwise
        yield "train_batch_size"
    if options.get("kind") == "batch":
        yield from ("length", "burn_in", "period")


def replay_ratios(given: Mapping[str, object], options: Mapping[str, object]) -> dict[str, object]:
    """Return bounds of the replay ratio with which shards use each step as often as replay without shards.

    Without shards, `num_updates` batches are used for every `update_every` env steps. This is the smallest replay ratio
    of shards, and twice as much is the largest.

    Args:
        given: Options of the user. If they contain `min_replay_ratio`, the result is empty.
        options: All options of the run, with presets and defaults.
    """
    # The number of env steps of a sequence; without memory, a transition has one.
    length = "num_steps" if options.get("kind") == "batch" else "length" if options.get("recurrent_net") else ""
    every, *numbers = options.get("update_every"), options.get("num_updates"), (
        options.get("train_batch_size") or options.get("mini_batch_size")), (options.get(length) or 1)
    if "min_replay_ratio" in given or not all(isinstance(number, int) and number > 0 for number in (every, *numbers)):
        return {}  # also without such options, and with wrong values, which are refused later
    ratio = math.prod(cast("list[int]", numbers)) / cast("int", every)
    largest = given.get("max_replay_ratio", 2 * ratio)
    return {"min_replay_ratio": min(ratio, largest) if isinstance(largest, int | float) else ratio,
            "max_replay_ratio": largest}


def without_collection(preset: Mapping[str, object], num_steps: int) -> dict[str, object]:
    """Return a preset of a replay algorithm for a data set of `num_steps` steps, in place of collection."""
    return {**without_pace(preset), "num_envs": 1, "num_steps": 1, "replay_size": num_steps}


def without_pace(options: Mapping[str, object]) -> dict[str, object]:
    """Return options without those that relate updates to collected steps."""
    return {name: value for name, value in options.items()
            if name not in ("start_steps", "update_every", "num_updates")}


def for_one_environment(preset: Mapping[str, object]) -> dict[str, object]:
    """Return a preset with one environment in place of several, and as many steps in total, if it sets both numbers."""
    num_envs, num_steps = preset.get("num_envs"), preset.get("num_steps")
    if not isinstance(num_envs, int):
        return dict(preset)
    steps = {"num_steps": num_steps * num_envs} if isinstance(num_steps, int) else {}
    return {**preset, "num_envs": 1, **steps}
