"""Data sets of episodes: read them, check them against the spaces of an environment, and convert them to rollouts.

A data set is a file `*.npz` or, with the extra `offline`, a data set of Minari, which has an id instead of a file name.
In shapes, N is the number of steps, and K is the number of episodes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from pytorchrl.agent.data import Arrays, RolloutData
from pytorchrl.agent.env import EnvFactory
from pytorchrl.agent.env.aliases import AnySpace
from pytorchrl.agent.env.common import reward_function
from pytorchrl.agent.env.spaces import (
    LEAF_SPACES,
    ObservationReader,
    RawSpaces,
    action_start,
    mask_flags,
    part_at,
)
from pytorchrl.agent.env.spaces import Path as LeafPath
from pytorchrl.errors import CheckpointError, ConfigError
from pytorchrl.files.atomic import open_regular
from pytorchrl.support.code import import_extra
from pytorchrl.support.tracebacks import brief_errors

SUFFIX = ".npz"
"""Suffix of the files of data sets."""
FORMAT = 1
"""Version of the format of files."""
SHA256 = "sha256"
"""Name of the array in a file that contains the checksum of the others."""
OBSERVATIONS, FINAL = "observations/", "final_observations/"
"""Prefixes of the names of arrays in a file: the observations before each action, and after each episode."""
_UNKNOWN_SEED = -1
_ROUNDING = 1e-5
"""Relative distance by which a continuous action may exceed its bounds because of rounding."""


@dataclasses.dataclass(frozen=True, eq=False)
class Dataset:
    """The steps of whole episodes, one episode after the other.

    Attributes:
        observations: For each leaf, its values (N, ...) before each action, as the environment returned them. The leaf
            of a plain space is called `"obs"`; names in nested spaces are joined, as in `"camera/left"`.
        final_observations: For each leaf, its values (K, ...) after the last action of each episode.
        actions: (N, ...) actions, as the environment accepts them.
        rewards: (N,) float64, the raw rewards.
        terminations: (N,) bool, whether the step ended the episode in a terminal state.
        truncations: (N,) bool, whether the step ended the episode for another reason, such as a time limit.
        lengths: (K,) int64, the number of steps of each episode.
        seeds: (K,) int64, the seed with which the environment was reset for each episode; -1 if it is unknown.
        env: Gymnasium id of the environment; empty if a function made it.

    Raises:
        ConfigError: The shapes, dtypes or ends of episodes contradict each other, a number is not finite, or a name
            contains characters that cannot be printed.
    """

    observations: Arrays
    final_observations: Arrays
    actions: np.ndarray
    rewards: np.ndarray
    terminations: np.ndarray
    truncations: np.ndarray
    lengths: np.ndarray
    seeds: np.ndarray
    env: str = ""

    def __post_init__(self) -> None:
        """Check that the arrays are consistent."""
        for name in (*self.observations, self.env):
            if not name.isprintable():
                raise ConfigError(f"names must consist of printable characters, got {name!r:.100}")
        num_steps, num_episodes = len(np.atleast_1d(self.rewards)), len(np.atleast_1d(self.lengths))
        for name, count, dtype in (
                ("lengths", num_episodes, np.int64), ("seeds", num_episodes, np.int64),
                ("rewards", num_steps, np.float64), ("terminations", num_steps, np.bool_),
                ("truncations", num_steps, np.bool_)):
            _check(name, getattr(self, name), (count,), np.dtype(dtype))
        _check("actions", self.actions, (num_steps, *self.actions.shape[1:]))
        if not self.observations or self.observations.keys() != self.final_observations.keys():
            raise ConfigError(f"observations and final_observations must have the same leaves, at least one, got "
                              f"{list(self.observations)} and {list(self.final_observations)}")
        for leaf, array in self.observations.items():
            _check(f"observations {leaf!r}", array, (num_steps, *array.shape[1:]))
            _check(f"final_observations {leaf!r}", self.final_observations[leaf], (num_episodes, *array.shape[1:]),
                   array.dtype)
        # In a malicious file, the sum of int64 lengths could overflow, so each length is checked first.
        if not num_episodes or self.lengths.min() < 1 or self.lengths.max() > num_steps \
                or sum(self.lengths.tolist()) != num_steps:
            raise ConfigError(f"lengths must be at least 1 and add up to the {num_steps} steps of the data set, got "
                              f"{num_episodes} lengths: {self.lengths[:10].tolist()}")
        is_last = np.zeros(num_steps, dtype=np.bool_)
        is_last[self.starts + self.lengths - 1] = True
        if not np.array_equal(self.terminations | self.truncations, is_last):
            raise ConfigError("the last step of each episode, and no other step, must be a termination or a truncation")

    @property
    def starts(self) -> np.ndarray:
        """The index of the first step of each of the K episodes; (K,) int64."""
        return np.cumsum(self.lengths) - self.lengths

    @property
    def returns(self) -> np.ndarray:
        """The sum of the rewards of each of the K episodes; (K,) float64."""
        return np.add.reduceat(self.rewards, self.starts)

    def next_observations(self, leaf: str = "obs") -> np.ndarray:
        """Return the observations (N, ...) of one leaf after each action."""
        following = np.roll(self.observations[leaf], -1, axis=0)
        following[self.starts + self.lengths - 1] = self.final_observations[leaf]
        return following


def _check(name: str, array: np.ndarray, shape: tuple[int, ...], dtype: np.dtype[np.generic] | None = None) -> None:
    """Raise `ConfigError` unless an array has this shape and dtype, and is finite; without a dtype, any number fits."""
    fits = array.dtype.kind in "biuf" and array.dtype.isnative if dtype is None else array.dtype == dtype
    if array.shape != shape or not fits:
        raise ConfigError(f"{name} must have the shape {shape} and the dtype {dtype or 'of numbers'}, got "
                          f"{array.shape} and {array.dtype}")
    if array.dtype.kind == "f" and not (finite := np.isfinite(array)).all():
        index = tuple(np.argwhere(~finite)[0].tolist())
        raise ConfigError(f"{name} must be finite, got {array[index]} at {list(index)}")


@brief_errors
def read_dataset(path: str | os.PathLike[str]) -> Dataset:
    """Read a data set. No code of the data set is executed.

    A file `*.npz` is checked before its arrays are allocated, so a damaged or malicious file takes no more memory than
    its size on the disk. Data sets of Minari are read by Minari, which does not check sizes. An episode of Minari that
    stops without an end, because its collection stopped, is truncated by its last step.

    Args:
        path: A file `*.npz`; a directory, whose files `*.npz` are read one after the other, in the order of their
            names; or, without a suffix, the id of a local data set of Minari.

    Raises:
        CheckpointError: The data set does not exist, cannot be read, is damaged, or is not a data set.
        ConfigError: The path is not valid, Minari is missing, or the files of a directory do not fit together.
    """
    name = os.path.expanduser(path)
    if os.path.isdir(name):
        if not (files := sorted(Path(name).glob(f"*{SUFFIX}"))):
            raise CheckpointError(f"the directory {name!r} contains no file *{SUFFIX}")
        return joined([read_dataset(file) for file in files])
    is_npz = is_file(name)
    if not is_npz and not minari_path(name).exists():
        raise CheckpointError(f"Minari has no local data set {name!r}; a file must end in {SUFFIX!r}")
    try:
        return _read_npz(name) if is_npz else _read_minari(name)
    except Exception as error:  # damaged archives raise errors of many types
        raise CheckpointError(f"{name!r} is not a readable data set: {error}") from error


def is_file(name: str) -> bool:
    """Return whether the name of a data set is a path; otherwise, the name is the id of a data set of Minari.

    Raises:
        ConfigError: The name has another suffix.
    """
    suffix = os.path.splitext(name)[1]
    if suffix not in ("", SUFFIX):
        raise ConfigError(f"path must be a file with the suffix {SUFFIX!r}, or, without a suffix, the id of a data "
                          f"set of Minari, such as 'cartpole/expert-v0'; got {name!r}")
    return bool(suffix)


def joined(parts: Sequence[Dataset]) -> Dataset:
    """Return the episodes of several data sets, one data set after the other.

    Raises:
        ConfigError: The data sets differ in their leaves, or in the shapes or dtypes of their arrays.
    """
    def layout(part: Dataset) -> dict[str, str]:
        arrays = {"actions": part.actions, **part.observations}
        return {name: f"{array.dtype} {array.shape[1:]}" for name, array in arrays.items()}

    first, *others = parts
    for other in others:
        if layout(other) != layout(first):
            raise ConfigError(f"data sets must have the same leaves, shapes and dtypes to be read together, got "
                              f"{layout(first)} and {layout(other)}")
    observations, final = ({leaf: np.concatenate([getattr(part, name)[leaf] for part in parts])
                            for leaf in first.observations} for name in ("observations", "final_observations"))
    actions, rewards, terminations, truncations, lengths, seeds = (
        np.concatenate([getattr(part, field.name) for part in parts]) for field in dataclasses.fields(Dataset)[2:-1])
    return Dataset(observations, final, actions, rewards, terminations, truncations, lengths, seeds,
                   first.env if {part.env for part in others} <= {first.env} else "")


# ---- rollouts


def rollout_of(data: Dataset, envs: EnvFactory, from_env: Callable[[Tensor], Tensor]) -> RolloutData:
    """Return all steps of a data set as one rollout of a single environment, as if a collector had collected them.

    Args:
        data: The data set.
        envs: Factory of environments with the spaces of the data; its `reward_transform` is applied to the rewards.
        from_env: Function from actions of the environment, counted from 0, to the actions that storages store.

    Raises:
        ConfigError: The data do not fit the spaces of the environments.
    """
    raw = envs.raw_spaces
    if not isinstance(raw, RawSpaces):
        raise ConfigError("a data set contains the steps of a single agent, but the environments have several policies")
    reader = ObservationReader(raw.observation, raw.keep_float64)
    masks = [name for name, path in paths_of(raw.observation).items() if path == reader.mask_path and path]
    _check_leaves(data.observations, {**reader.recorded, **dict.fromkeys(masks)})
    _check_actions(data.actions, raw.action)
    start = action_start(raw.action)
    actions = torch.as_tensor(np.array(data.actions if start is None else data.actions - start))
    actions = from_env(actions.float() if isinstance(raw.action, spaces.Box) else actions.long())
    rows = {leaf: np.concatenate((array, data.final_observations[leaf][-1:]))
            for leaf, array in data.observations.items()}
    obs, final = reader.read_recorded(rows), reader.read_recorded(data.final_observations)
    if problem := reader.value_check().problem(obs, "step {} of the data set".format):
        raise ConfigError(problem)
    last, num_steps = data.starts + data.lengths - 1, len(data.rewards)
    done = np.zeros((num_steps + 1, 1), np.bool_)
    done[np.append(data.starts, num_steps)] = True
    transform = reward_function(envs.options.reward_transform)
    rewards = np.asarray(data.rewards if transform is None else transform(data.rewards), np.float32)

    def column(array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array))[:, None]

    return RolloutData(
        obs={leaf: column(array) for leaf, array in obs.items()}, done=torch.from_numpy(done), rhs={},
        mask=column(mask_flags(rows[masks[0]], raw.action)) if masks else None, action=actions[:, None],
        reward=column(rewards), terminated=column(data.terminations),
        truncated=column(data.truncations & ~data.terminations), valid=torch.ones((num_steps, 1), dtype=torch.bool),
        final_index=torch.from_numpy(np.stack((last, np.zeros_like(last)), 1)),
        final_obs={leaf: torch.from_numpy(np.ascontiguousarray(array)) for leaf, array in final.items()},
        final_mask=torch.from_numpy(mask_flags(data.final_observations[masks[0]], raw.action)) if masks else None)


def _check_leaves(found: Arrays, expected: Mapping[str, AnySpace | None]) -> None:
    """Raise `ConfigError` unless observations have the leaves of an environment, and their shapes and kinds of dtypes.

    A leaf whose expected space is None is a mask of actions, which `mask_flags` checks.
    """
    if found.keys() != expected.keys():
        raise ConfigError(f"the data set has the observations {sorted(found)}, but those of the environment are "
                          f"{sorted(expected)}; record it in an environment with the same wrappers")
    for leaf, space in expected.items():
        if space is None:
            continue
        array, dtype = found[leaf], np.dtype(space.dtype or np.int64)
        if array.shape[1:] != space.shape or (array.dtype.kind == "f") != (dtype.kind == "f"):
            raise ConfigError(f"observations {leaf!r} of the data set have the shape {array.shape[1:]} and the dtype "
                              f"{array.dtype}, but the environment has {space}; train in an environment with the same "
                              "spaces as the recorded one")


def _check_actions(actions: np.ndarray, space: AnySpace) -> None:
    """Raise `ConfigError` unless recorded actions (N, ...) belong to the action space of an environment."""
    low, high = _bounds(space)
    is_continuous = isinstance(space, spaces.Box)
    if actions.shape[1:] != space.shape or (actions.dtype.kind == "f") != is_continuous:
        kind = "continuous" if actions.dtype.kind == "f" else "discrete"
        raise ConfigError(f"the data set has {kind} actions of the shape {actions.shape[1:]}, but the environment has "
                          f"{space}; give the environment in which the data set was recorded")
    slack = _ROUNDING * np.maximum(1.0, np.abs(actions)) if is_continuous else 0
    if (wrong := (actions < low - slack) | (actions > high + slack)).any():
        index = tuple(np.argwhere(wrong)[0].tolist())
        raise ConfigError(f"action {list(index)} of the data set is {actions[index]}, which is not in {space}; clip "
                          "the actions, or give the environment in which the data set was recorded")


def _bounds(space: AnySpace) -> tuple[np.ndarray, np.ndarray]:
    """Return the lowest and the highest action of a space, with the shape of an action."""
    if isinstance(space, spaces.Box):
        return space.low, space.high
    if isinstance(space, spaces.Discrete):
        return np.asarray(space.start), np.asarray(space.start + space.n - 1)
    if isinstance(space, spaces.MultiDiscrete):
        return np.asarray(space.start), np.asarray(space.start + space.nvec - 1)
    return np.asarray(0), np.asarray(1)


# ---- npz


def _read_npz(name: str) -> Dataset:
    with open_regular(name) as file, zipfile.ZipFile(file) as archive:
        size, members = os.fstat(file.fileno()).st_size, archive.infolist()
        if (total := sum(member.file_size for member in members)) > size:
            raise ValueError(f"its {len(members)} arrays have {total:,} bytes, but the file has only {size:,}; arrays "
                             "must not be compressed")
        arrays = {member.filename.removesuffix(".npy"): _read_array(archive, member) for member in members}
    if (found := int(arrays.get("format", np.array(0)))) != FORMAT:
        raise ValueError(f"it has the format {found}, expected {FORMAT}")
    if str(arrays.pop(SHA256, "")) != checksum(arrays):
        raise ValueError("its arrays differ from their checksum, so the file was damaged or changed")
    del arrays["format"]
    observations = {leaf: arrays.pop(OBSERVATIONS + leaf) for leaf in _leaves(arrays, OBSERVATIONS)}
    final = {leaf: arrays.pop(FINAL + leaf) for leaf in _leaves(arrays, FINAL)}
    expected = {field.name for field in dataclasses.fields(Dataset)[2:]}
    if arrays.keys() != expected:
        raise ValueError(f"its arrays must be those of observations, and {sorted(expected)}; got {sorted(arrays)}")
    return Dataset(observations, final, env=str(arrays.pop("env")), **arrays)


def checksum(arrays: Arrays) -> str:
    """Return the SHA-256 of the names, dtypes, shapes and values of arrays."""
    found = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        found.update(f"{name!r} {array.dtype.str} {arrays[name].shape}\n".encode("utf-8", "surrogatepass"))
        found.update(array.reshape(-1).view(np.uint8).data)
    return found.hexdigest()


def _leaves(arrays: Arrays, prefix: str) -> list[str]:
    return [name.removeprefix(prefix) for name in arrays if name.startswith(prefix)]


def _read_array(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    """Read the array in a member of the archive, after checking that the member has the size that its header states."""
    with archive.open(member) as file:
        if (version := np.lib.format.read_magic(file)) != (1, 0):
            raise ValueError(f"{member.filename!r} has the version {version} of the format of arrays, expected (1, 0)")
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        found, expected = member.file_size - file.tell(), math.prod(shape) * dtype.itemsize
        if dtype.kind not in "biufU" or min(shape, default=0) < 0 or found != expected:
            raise ValueError(f"{member.filename!r} must contain {expected:,} bytes of numbers, {shape} of {dtype}, got "
                             f"{found:,} bytes")
        file.seek(0)
        return np.lib.format.read_array(file, allow_pickle=False)


# ---- Minari


def import_minari() -> ModuleType:
    """Return the package Minari; raise `ConfigError` if it is missing."""
    return import_extra("minari", "offline", f"a data set whose name does not end in {SUFFIX!r} belongs to Minari and")


def minari_path(dataset_id: str) -> Path:
    """Return the directory in which Minari stores a data set, even if the data set does not exist.

    Raises:
        ConfigError: The id is not valid, or Minari is missing.
    """
    minari = import_minari()
    try:
        minari.dataset.minari_dataset.parse_dataset_id(dataset_id)
    except (TypeError, ValueError) as error:  # Minari raises `TypeError` for an id without a version
        raise ConfigError(f"{dataset_id!r} is neither a directory nor an id of Minari, such as 'cartpole/expert-v0'; a "
                          f"file must end in {SUFFIX!r}") from error
    return Path(minari.storage.get_dataset_path(dataset_id))


def _read_minari(dataset_id: str) -> Dataset:
    found = import_minari().load_dataset(dataset_id)
    if not isinstance(found.action_space, LEAF_SPACES):
        raise ValueError(f"its action space must be a Box, Discrete, MultiDiscrete or MultiBinary, got "
                         f"{found.action_space}")
    episodes = list(found.iterate_episodes())
    metadata = list(found.storage.get_episode_metadata([one.id for one in episodes]))
    paths = paths_of(found.observation_space)
    rows = {leaf: [np.asarray(part_at(one.observations, path)) for one in episodes] for leaf, path in paths.items()}
    lengths = np.array([len(one.rewards) for one in episodes], dtype=np.int64)
    terminations = np.concatenate([one.terminations for one in episodes]).astype(np.bool_)
    truncations = np.concatenate([one.truncations for one in episodes]).astype(np.bool_)
    last = np.cumsum(lengths) - 1
    truncations[last] |= ~terminations[last]
    return Dataset(
        observations={leaf: np.concatenate([array[:-1] for array in arrays]) for leaf, arrays in rows.items()},
        final_observations={leaf: np.stack([array[-1] for array in arrays]) for leaf, arrays in rows.items()},
        actions=np.concatenate([one.actions for one in episodes]),
        rewards=np.concatenate([one.rewards for one in episodes]).astype(np.float64),
        terminations=terminations, truncations=truncations, lengths=lengths,
        seeds=np.array([one.get("seed", _UNKNOWN_SEED) for one in metadata], dtype=np.int64),
        env="" if found.env_spec is None else found.env_spec.id)


def paths_of(space: AnySpace) -> dict[str, LeafPath]:
    """Return a mapping from the name of each leaf of a space to the leaf's path; an action mask is a leaf, too."""
    reader = ObservationReader(space)
    paths = {leaf.name: leaf.path for leaf in reader.readings}
    if reader.mask_path is not None:
        paths["/".join(map(str, reader.mask_path))] = reader.mask_path
    return paths
