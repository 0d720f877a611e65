"""Record the episodes of a trained agent as a data set, and read data sets for imitation and offline learning.

A data set is a file `*.npz` or, with the extra `offline`, a data set of Minari, which has an id instead of a file name.
In shapes, N is the number of steps, and K is the number of episodes.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import os
import shutil
import warnings
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec

from pytorchrl.agent.data import Arrays
from pytorchrl.agent.env import EnvFactory, VecEnv
from pytorchrl.agent.env.aliases import Action, AnyEnv, AnySpace, AnyWrapper, Info, Observation, ResetResult, StepResult
from pytorchrl.agent.env.common import env_seeds
from pytorchrl.agent.env.spaces import LEAF_SPACES, ObservationReader, RawSpaces, part_at
from pytorchrl.agent.env.spaces import Path as LeafPath
from pytorchrl.agent.env.wrappers import FrameStack
from pytorchrl.agent.seeding import check_seed
from pytorchrl.errors import CheckpointError, ConfigError
from pytorchrl.files.atomic import open_regular, put_in_place
from pytorchrl.play.video import refuse_several_agents, single_environment
from pytorchrl.support.code import import_extra
from pytorchrl.support.tracebacks import brief_errors

if TYPE_CHECKING:
    from pytorchrl.training.training import TrainedAgent

_SUFFIX = ".npz"
_FORMAT = 1
_SHA256 = "sha256"
_OBSERVATIONS, _FINAL = "observations/", "final_observations/"
_UNKNOWN_SEED = -1


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
def record_dataset(
    agent: TrainedAgent, path: str | os.PathLike[str], *, num_episodes: int = 10, deterministic: bool = True,
    seed: int | None = None, overwrite: bool = False, on_episode: Callable[[int, int], object] | None = None,
) -> Dataset:
    """Play whole episodes one after the other in a single test environment, and write them as a data set.

    The policy acts as in `TrainedAgent.evaluate`. The environment is reset with a different seed for each episode, so
    any single episode can be repeated.

    Args:
        agent: The agent that plays.
        path: A file `*.npz`, or, without a suffix, the id of a data set of Minari, such as "cartpole/expert-v0".
        num_episodes: Number of episodes, at least 1.
        deterministic: Whether the policy takes its best action instead of sampling one.
        seed: Seed of the environment and of sampled actions; None: the seed of the experiment.
        overwrite: Whether to replace an existing data set.
        on_episode: Function that is called after each episode with the number of episodes and of steps so far.

    Returns:
        The data set.

    Raises:
        ConfigError: The environments have several agents, the data set exists, the path is not valid or cannot be
            written, or Minari is missing.
        EnvError: The environment raised an exception.
    """
    refuse_several_agents(agent)
    seed = agent.seed if seed is None else check_seed(seed)
    name = os.path.expanduser(path)
    is_file = _is_file(name)
    exists = os.path.lexists(name) if is_file else _minari_path(name).exists()
    if exists and (not overwrite or (is_file and os.path.isdir(name))):
        raise ConfigError(f"{name!r} already exists; choose another name"
                          + ("" if overwrite else " or set overwrite=True (--overwrite)"))
    if is_file:
        try:
            os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{name!r} cannot be written: {error}") from error
    played: list[_Episode] = []
    envs = _recording_envs(agent, functools.partial(_Recorder, seed=seed, played=played, on_episode=on_episode))
    agent.evaluate(num_episodes, deterministic=deterministic, seed=seed, envs=envs)
    env_fn = envs.options.env_fn
    dataset = _joined(played, env_fn.id if isinstance(env_fn, EnvSpec) else env_fn if isinstance(env_fn, str) else "")
    try:
        if is_file:
            _write_npz(dataset, Path(name))
        else:
            assert isinstance(envs.raw_spaces, RawSpaces)  # not a mapping: several agents were refused above
            _write_minari(dataset, name, envs.raw_spaces)
    except OSError as error:
        raise ConfigError(f"{name!r} cannot be written: {error}") from error
    return dataset


@brief_errors
def read_dataset(path: str | os.PathLike[str]) -> Dataset:
    """Read a data set. No code of the data set is executed.

    A file `*.npz` is checked before its arrays are allocated, so a damaged or malicious file takes no more memory than
    its size on the disk. Data sets of Minari are read by Minari, which does not check sizes. An episode of Minari that
    stops without an end, because its collection stopped, is truncated by its last step.

    Args:
        path: A file `*.npz`, or, without a suffix, the id of a local data set of Minari.

    Raises:
        CheckpointError: The data set does not exist, cannot be read, is damaged, or is not a data set.
        ConfigError: The path is not valid, or Minari is missing.
    """
    name = os.path.expanduser(path)
    is_file = _is_file(name)
    if not is_file and not _minari_path(name).exists():
        raise CheckpointError(f"Minari has no local data set {name!r}; a file must end in {_SUFFIX!r}")
    try:
        return _read_npz(name) if is_file else _read_minari(name)
    except Exception as error:  # damaged archives raise errors of many types
        raise CheckpointError(f"{name!r} is not a readable data set: {error}") from error


def _is_file(name: str) -> bool:
    """Return whether the name of a data set is a path; otherwise, the name is the id of a data set of Minari."""
    suffix = os.path.splitext(name)[1]
    if suffix not in ("", _SUFFIX):
        raise ConfigError(f"path must be a file with the suffix {_SUFFIX!r}, or, without a suffix, the id of a data "
                          f"set of Minari, such as 'cartpole/expert-v0'; got {name!r}")
    return bool(suffix)


# ---- playing


@dataclasses.dataclass
class _Episode:
    seed: int
    observations: list[Arrays] = dataclasses.field(default_factory=list)
    actions: list[np.ndarray] = dataclasses.field(default_factory=list)
    rewards: list[float] = dataclasses.field(default_factory=list)
    terminations: list[bool] = dataclasses.field(default_factory=list)
    truncations: list[bool] = dataclasses.field(default_factory=list)


class _Recorder(AnyWrapper):
    """A wrapper that records episodes, and appends each episode to `played` when it ends."""

    def __init__(
        self, env: AnyEnv, seed: int, played: list[_Episode], on_episode: Callable[[int, int], object] | None,
    ) -> None:
        super().__init__(env)
        self._seed, self._played, self._on_episode = seed, played, on_episode
        self._paths = _paths_of(env.observation_space)
        self._num_steps = 0

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> ResetResult:
        """Reset the environment with the seed of the next episode instead of `seed`."""
        (chosen,) = env_seeds(self._seed, False, (0, 0, len(self._played)), 1)
        self._episode = _Episode(chosen)
        obs, info = self.env.reset(seed=chosen, options=options)
        self._episode.observations.append(self._copy(obs))
        return obs, info

    def step(self, action: Action) -> StepResult:
        """Step the environment and record the step."""
        now = self._episode
        now.actions.append(np.array(action, dtype=self.env.action_space.dtype))
        obs, reward, terminated, truncated, info = self.env.step(action)
        now.observations.append(self._copy(obs))
        now.rewards.append(float(reward))
        now.terminations.append(bool(terminated))
        now.truncations.append(bool(truncated))
        if terminated or truncated:
            self._played.append(now)
            self._num_steps += len(now.rewards)
            if self._on_episode is not None:
                self._on_episode(len(self._played), self._num_steps)
        return obs, reward, terminated, truncated, info

    def _copy(self, obs: Observation) -> Arrays:
        """Return the leaves of an observation, copied because environments may reuse their memory."""
        space = self.env.observation_space
        return {name: np.array(part_at(obs, path), dtype=part_at(space, path).dtype)
                for name, path in self._paths.items()}


def _recording_envs(agent: TrainedAgent, recorder: Callable[[AnyEnv], AnyEnv]) -> EnvFactory:
    """Return a factory of a single test environment, to which `recorder` adds the outermost wrapper.

    With frame stacking, this wrapper therefore records the stacked observations.
    """
    factory = single_environment(agent, lambda env: env, None)
    options: VecEnv.Options = factory.options
    stack = [functools.partial(FrameStack, num_frames=options.frame_stack)] if options.frame_stack > 1 else []
    # Errors are raised, because restarting the environment would leave the current episode without an end.
    return factory.with_options(
        frame_stack=1, wrappers=(*options.wrappers, *stack, recorder), on_env_error="raise",
        max_env_restarts=VecEnv.Options.max_env_restarts)


def _paths_of(space: AnySpace) -> dict[str, LeafPath]:
    """Return a mapping from the name of each leaf of a space to the leaf's path; an action mask is a leaf, too."""
    reader = ObservationReader(space)
    paths = {leaf.name: leaf.path for leaf in reader.readings}
    if reader.mask_path is not None:
        paths["/".join(map(str, reader.mask_path))] = reader.mask_path
    return paths


def _joined(played: Sequence[_Episode], env: str) -> Dataset:
    def stacked(rows: list[Arrays]) -> Arrays:
        return {leaf: np.stack([row[leaf] for row in rows]) for leaf in rows[0]}

    return Dataset(
        observations=stacked([row for one in played for row in one.observations[:-1]]),
        final_observations=stacked([one.observations[-1] for one in played]),
        actions=np.stack([action for one in played for action in one.actions]),
        rewards=np.array([reward for one in played for reward in one.rewards], dtype=np.float64),
        terminations=np.array([ended for one in played for ended in one.terminations], dtype=np.bool_),
        truncations=np.array([ended for one in played for ended in one.truncations], dtype=np.bool_),
        lengths=np.array([len(one.rewards) for one in played], dtype=np.int64),
        seeds=np.array([one.seed for one in played], dtype=np.int64), env=env)


# ---- npz


def _write_npz(dataset: Dataset, path: Path) -> None:
    arrays = {
        "format": np.array(_FORMAT), "env": np.array(dataset.env),
        **{field.name: getattr(dataset, field.name) for field in dataclasses.fields(Dataset)[2:-1]},
        **{_OBSERVATIONS + leaf: array for leaf, array in dataset.observations.items()},
        **{_FINAL + leaf: array for leaf, array in dataset.final_observations.items()}}
    arrays[_SHA256] = np.array(_checksum(arrays))
    with put_in_place(path) as file, zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            # `ZipInfo` has a fixed modification time, so equal data sets are written as identical files.
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asarray(array, order="C"), (1, 0), allow_pickle=False)


def _read_npz(name: str) -> Dataset:
    with open_regular(name) as file, zipfile.ZipFile(file) as archive:
        size, members = os.fstat(file.fileno()).st_size, archive.infolist()
        if (total := sum(member.file_size for member in members)) > size:
            raise ValueError(f"its {len(members)} arrays have {total:,} bytes, but the file has only {size:,}; arrays "
                             "must not be compressed")
        arrays = {member.filename.removesuffix(".npy"): _read_array(archive, member) for member in members}
    if (found := int(arrays.get("format", np.array(0)))) != _FORMAT:
        raise ValueError(f"it has the format {found}, expected {_FORMAT}")
    if str(arrays.pop(_SHA256, "")) != _checksum(arrays):
        raise ValueError("its arrays differ from their checksum, so the file was damaged or changed")
    del arrays["format"]
    observations = {leaf: arrays.pop(_OBSERVATIONS + leaf) for leaf in _leaves(arrays, _OBSERVATIONS)}
    final = {leaf: arrays.pop(_FINAL + leaf) for leaf in _leaves(arrays, _FINAL)}
    expected = {field.name for field in dataclasses.fields(Dataset)[2:]}
    if arrays.keys() != expected:
        raise ValueError(f"its arrays must be those of observations, and {sorted(expected)}; got {sorted(arrays)}")
    return Dataset(observations, final, env=str(arrays.pop("env")), **arrays)


def _checksum(arrays: Arrays) -> str:
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


def _minari() -> ModuleType:
    return import_extra("minari", "offline", f"a data set whose name does not end in {_SUFFIX!r} belongs to Minari and")


def _minari_path(dataset_id: str) -> Path:
    """Return the directory in which Minari stores a data set, even if the data set does not exist."""
    minari = _minari()
    try:
        minari.dataset.minari_dataset.parse_dataset_id(dataset_id)
    except ValueError as error:
        raise ConfigError(f"{dataset_id!r} is not an id of Minari, such as 'cartpole/expert-v0'; a file must end in "
                          f"{_SUFFIX!r}") from error
    return Path(minari.storage.get_dataset_path(dataset_id))


def _write_minari(dataset: Dataset, dataset_id: str, raw: RawSpaces) -> None:
    minari = _minari()
    paths = {path: name for name, path in _paths_of(raw.observation).items()}
    buffers = []
    for index, (start, length, seed) in enumerate(
            zip(dataset.starts.tolist(), dataset.lengths.tolist(), dataset.seeds.tolist(), strict=True)):
        steps = slice(start, start + length)
        rows = {leaf: np.concatenate([array[steps], dataset.final_observations[leaf][index][None]])
                for leaf, array in dataset.observations.items()}
        buffers.append(minari.data_collector.EpisodeBuffer(
            id=index, seed=seed, observations=_nested(raw.observation, rows, paths), actions=dataset.actions[steps],
            rewards=dataset.rewards[steps], terminations=dataset.terminations[steps],
            truncations=dataset.truncations[steps]))
    if (existing := _minari_path(dataset_id)).exists():
        shutil.rmtree(existing)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # Minari warns about each missing description
        minari.create_dataset_from_buffers(
            dataset_id, buffers, env=dataset.env or None, observation_space=raw.observation, action_space=raw.action,
            jpeg_encoding=False)


def _nested(space: AnySpace, leaves: Arrays, names: dict[LeafPath, str], path: LeafPath = ()) -> Observation:
    """Return the leaves as nested dictionaries and tuples, in the structure of `space`."""
    if isinstance(space, spaces.Dict):
        return {key: _nested(child, leaves, names, (*path, key)) for key, child in space.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_nested(child, leaves, names, (*path, index)) for index, child in enumerate(space.spaces))
    return leaves[names[path]]


def _read_minari(dataset_id: str) -> Dataset:
    found = _minari().load_dataset(dataset_id)
    if not isinstance(found.action_space, LEAF_SPACES):
        raise ValueError(f"its action space must be a Box, Discrete, MultiDiscrete or MultiBinary, got "
                         f"{found.action_space}")
    episodes = list(found.iterate_episodes())
    metadata = list(found.storage.get_episode_metadata([one.id for one in episodes]))
    paths = _paths_of(found.observation_space)
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
