"""Check settings, derive seeds and open monitor files for `VecEnv` and `MultiAgentVecEnv`."""

from __future__ import annotations

import copy
import functools
import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pytorchrl.agent.env.aliases import EnvKwargs
from pytorchrl.agent.env.guard import describe
from pytorchrl.agent.env.statistics import Monitor
from pytorchrl.agent.options import Options, option
from pytorchrl.agent.seeding import Stream, check_seed, derive_seed
from pytorchrl.errors import ConfigError, EnvError, Problem
from pytorchrl.support.untyped import OptionValue
from pytorchrl.support.worker_names import collection_worker, in_file_name

# Environments get the upper 31 of a seed's 63 bits, because ALE and EnvPool store seeds as signed 32-bit integers.
_SEED_SHIFT = 32
# float32 has a mantissa of 24 bits, so it stores numbers above this limit with at most six fractional bits.
_LARGE = 2.0**17


@dataclass(frozen=True, kw_only=True)
class CommonEnvOptions(Options):
    """Settings of vectors of environments with one agent or with several agents."""

    env_fn: OptionValue = option(help="A function that builds one environment, or its name.")
    env_kwargs: EnvKwargs = option(default_factory=dict, help="Keyword arguments of every environment.")
    test_env_kwargs: EnvKwargs = option(
        default_factory=dict, help="Keyword arguments that override entries of env_kwargs in evaluations.")
    vec_env_size: int = option(1, help="Number of environments stepped together.", low=1)
    max_episode_steps: int | None = option(None, help="Number of steps after which an episode is truncated.", low=1)
    wrappers: tuple[OptionValue, ...] = option(  # `EnvWrapper`s, checked below
        (), help="Functions that take and return an environment, applied in order.")
    reward_transform: str | float | Callable[[np.ndarray], np.ndarray] | None = option(
        None, help="Transform of rewards for learners: 'sign', 'clip' to [-1, 1], a factor, or a function that takes "
        "and returns the rewards of all environments. Statistics use raw rewards.")
    log_dir: str | os.PathLike[str] | None = option(
        None, help="Folder in which each worker writes its finished episodes to a CSV file.")

    def __post_init__(self) -> None:
        """Check each field, and refuse values that cannot be copied or called."""
        super().__post_init__()
        transform = self.reward_transform
        if isinstance(transform, str) and transform not in ("sign", "clip"):
            raise ConfigError(
                f"reward_transform must be None, 'sign', 'clip', a number or a function, got {transform!r}")
        if self.log_dir is not None and not os.fspath(self.log_dir):
            raise ConfigError("log_dir must be a folder or None, got an empty string")
        for name in ("env_kwargs", "test_env_kwargs"):
            for key, value in getattr(self, name).items():
                try:
                    copy.deepcopy(value)
                except Exception as failure:  # noqa: PERF203 - there are few entries, and the error names one
                    raise ConfigError(
                        f"{name}[{key!r}] cannot be copied ({describe(failure)}), and every environment gets its own "
                        "copy; create it in the environment's constructor") from failure
        for wrapper in self.wrappers:
            if not callable(wrapper):
                raise ConfigError(f"wrappers must be functions that take and return an environment, got {wrapper!r}")

    def training_problems(self) -> Iterator[Problem]:
        """Yield the contradictions that matter only to environments of training, not to those of evaluations."""
        yield from ()


def is_training_mode(mode: str) -> bool:
    """Return whether `mode` is "train"; raise `ConfigError` unless it is "train" or "test"."""
    if mode not in ("train", "test"):
        raise ConfigError(f"mode must be 'train' or 'test', got {mode!r}")
    return mode == "train"


def env_seeds(seed: int | None, is_training: bool, path: tuple[int, ...], num_envs: int) -> list[int]:
    """Return one seed for each environment of a vector environment.

    Args:
        seed: Seed of the experiment; None draws a random seed.
        is_training: Whether the environments are for training; test environments get other seeds.
        path: Index of the gradient worker, index of the collection worker, and incarnation of the collection worker (0
            for the first worker with these indices).
        num_envs: Number of environments.
    """
    root = secrets.randbits(63) if seed is None else check_seed(seed)
    stream = Stream.ENV if is_training else Stream.EVALUATION
    return [derive_seed(root, stream, *path, index) >> _SEED_SHIFT for index in range(num_envs)]


def reward_function(
    transform: str | float | Callable[[np.ndarray], np.ndarray] | None,
) -> Callable[[np.ndarray], np.ndarray] | None:
    """Return the function that transforms raw rewards (E,) for learning; None if `transform` is None."""
    if transform is None:
        return None
    if callable(transform):
        return functools.partial(_transformed, transform)
    if transform == "sign":
        return np.sign
    if transform == "clip":
        return lambda reward: np.clip(reward, -1, 1)
    scale = np.float32(transform)
    return lambda reward: reward * scale


def _transformed(transform: Callable[[np.ndarray], np.ndarray], reward: np.ndarray) -> np.ndarray:
    """Return the result of the user's function for rewards (E,).

    Raises:
        EnvError: The function returns something else than an array of the same shape.
    """
    found = np.asarray(transform(reward.copy()))
    if found.shape != reward.shape or found.dtype.kind not in "fiub":
        raise EnvError(f"reward_transform must return numbers of the shape {reward.shape}, one reward for each "
                       f"environment, got {found.dtype} {found.shape}")
    return found


def open_monitor(
    log_dir: str | os.PathLike[str] | None, mode: str, index_grad_worker: int, index_col_worker: int,
    keywords: tuple[str, ...] = (),
) -> Monitor | None:
    """Open the monitor file of a worker in `log_dir`; return None if `log_dir` is None."""
    if log_dir is None:
        return None
    worker = in_file_name(collection_worker(index_grad_worker, index_col_worker))
    return Monitor(Path(log_dir) / f"monitor_{mode}_{worker}.csv", keywords)


def is_large(leaf: np.ndarray) -> bool:
    """Return whether a float leaf has a value above `_LARGE` in magnitude, for which float32 is too coarse."""
    # The largest value is converted to a Python float, because float16 cannot represent `_LARGE`.
    return leaf.dtype.kind == "f" and float(np.abs(leaf).max(initial=0.0)) > _LARGE
