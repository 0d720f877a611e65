"""Define default settings for each algorithm and suite of environments; the user's options override them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from pytorchrl.agent.env import EnvFactory
from pytorchrl.agent.schedules import linear
from pytorchrl.envs import make_factory
from pytorchrl.envs.suites import DEFAULT, suite_of
from pytorchrl.support.untyped import OptionValue

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
_REPLAY_PRESETS: dict[tuple[str, str], Mapping[str, object]] = {
    (name, family): {**common, **own, **(classic if family == "classic" else {})}
    for name, own, classic in (
        ("sac", {}, {"lr_pi": 1e-3}), ("td3", {"policy": "deterministic"}, {"lr_q": 1e-3, "lr_pi": 1e-3}),
        ("ddpg", _DDPG, {"lr_pi": 1e-3}))
    for family, common in _CONTINUOUS.items()}
_MEMORY = {"recurrent_net": "lstm", "dueling": True}
_DQN = {"num_envs": 1, "num_steps": 4, "update_every": 4}
_REPLAY_PRESETS |= {
    ("dqn", "classic"): {
        **_DQN, "replay_size": 50_000, "start_steps": 500, "lr": 1e-3, "mini_batch_size": 64, "num_updates": 2,
        "polyak": 0.99,
        "target_update_interval": 1, "epsilon_steps": 10_000, "hidden_sizes": (120, 84), "target_steps": 40_000},
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
_presets: dict[tuple[str, str], Mapping[str, object]] = {
    **_REPLAY_PRESETS,
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
        "num_envs": 8, "num_steps": 16, "gae_lambda": 1.0, "lr": linear(2e-3, 0.0), "entropy_coef": 0.0,
        "target_steps": 500_000,
    },
    ("a2c", "box2d"): {"num_envs": 16, "num_steps": 5, "gae_lambda": 1.0, "target_steps": 1_000_000},
    ("a2c", "mujoco"): {
        "num_envs": 8, "num_steps": 8, "gae_lambda": 1.0, "entropy_coef": 0.0, "normalize_obs": True,
        "normalize_reward": True, "target_steps": 2_000_000,
    },
    ("a2c", "atari"): {"num_envs": 16, "num_steps": 5, "gae_lambda": 1.0, "target_steps": 10_000_000, **_ATARI},
    # A train batch is a rollout of one collector. On Atari it has 500 steps, as in
    # https://github.com/ray-project/rl-experiments.
    ("impala", "classic"): {
        "num_envs": 8, "num_steps": 16, "lr": linear(2e-3, 0.0), "gamma": 0.98, "entropy_coef": 0.0,
        "target_steps": 200_000,
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


def register(algorithm: str, suite: str, options: Mapping[str, object]) -> None:
    """Register the default options of an algorithm for a suite of environments; the user's options override them.

    An earlier registration is replaced.

    Args:
        algorithm: Name under which the algorithm is registered.
        suite: Name of a suite: "classic", "box2d", "mujoco", "atari", or a suite that the user has registered. The
            presets of "classic" also apply to environments that belong to no suite.
        options: Options of `train`, by name.
    """
    _presets[algorithm, suite] = MappingProxyType(dict(options))


def registered() -> Mapping[tuple[str, str], Mapping[str, object]]:
    """Return all presets, keyed by (name of the algorithm, name of the suite)."""
    return MappingProxyType(_presets)


def preset(
    algorithm: str, env: str | Callable[..., object], options: Mapping[str, object] = MappingProxyType({}),
) -> dict[str, object]:
    """Return the preset for an algorithm and an environment; empty if none is registered.

    The preset omits options that would have no effect together with the user's `options`.
    """
    suite = suite_of(env)
    found = dict(_presets.get((algorithm, DEFAULT if suite is None else suite.name), {}))
    if options.get("epsilon_per_worker"):
        found = {name: value for name, value in found.items() if name not in ("initial_epsilon", "final_epsilon",
                                                                              "epsilon_steps")}
    if options.get("mini_batch_size") is not None:
        found.pop("num_mini_batch", None)
    if options.get("kind") == "batch":  # each rollout is one sequence, so `num_steps` is the length of a sequence
        found |= {"num_steps": found["length"]} if "length" in found else {}
        found = {name: value for name, value in found.items() if name not in ("length", "burn_in", "period")}
    return found


def environments(
    env: str | Callable[..., object], options: Mapping[str, OptionValue], num_test_envs: int,
) -> tuple[EnvFactory, EnvFactory]:
    """Return factories of training and of evaluation environments. To read the spaces, one environment is built."""
    train = make_factory(env, **options)
    return train, train.with_options(vec_env_size=num_test_envs)
