"""Record the episodes of a trained agent as a data set, for imitation and offline learning.

`agent/dataset.py` reads data sets, and describes their files. In shapes, N is the number of steps, and K is the number
of episodes.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import shutil
import warnings
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec

from pytorchrl.agent.data import Arrays
from pytorchrl.agent.dataset import (
    FINAL,
    FORMAT,
    OBSERVATIONS,
    SHA256,
    Dataset,
    checksum,
    import_minari,
    is_file,
    minari_path,
    paths_of,
    read_dataset,
)
from pytorchrl.agent.env import EnvFactory, VecEnv
from pytorchrl.agent.env.aliases import Action, AnyEnv, AnySpace, AnyWrapper, Info, Observation, ResetResult, StepResult
from pytorchrl.agent.env.common import env_seeds
from pytorchrl.agent.env.spaces import Path as LeafPath
from pytorchrl.agent.env.spaces import RawSpaces, part_at
from pytorchrl.agent.env.wrappers import FrameStack
from pytorchrl.agent.seeding import check_seed
from pytorchrl.errors import ConfigError
from pytorchrl.files.atomic import put_in_place
from pytorchrl.play.video import refuse_several_agents, single_environment
from pytorchrl.support.tracebacks import brief_errors

if TYPE_CHECKING:
    from pytorchrl.training.training import TrainedAgent

__all__ = ["Dataset", "read_dataset", "record_dataset"]


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
    is_npz = is_file(name)
    exists = os.path.lexists(name) if is_npz else minari_path(name).exists()
    if exists and (not overwrite or (is_npz and os.path.isdir(name))):
        raise ConfigError(f"{name!r} already exists; choose another name"
                          + ("" if overwrite else " or set overwrite=True (--overwrite)"))
    if is_npz:
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
        if is_npz:
            _write_npz(dataset, Path(name))
        else:
            assert isinstance(envs.raw_spaces, RawSpaces)  # not a mapping: several agents were refused above
            _write_minari(dataset, name, envs.raw_spaces)
    except OSError as error:
        raise ConfigError(f"{name!r} cannot be written: {error}") from error
    return dataset


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
        self._paths = paths_of(env.observation_space)
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
        "format": np.array(FORMAT), "env": np.array(dataset.env),
        **{field.name: getattr(dataset, field.name) for field in dataclasses.fields(Dataset)[2:-1]},
        **{OBSERVATIONS + leaf: array for leaf, array in dataset.observations.items()},
        **{FINAL + leaf: array for leaf, array in dataset.final_observations.items()}}
    arrays[SHA256] = np.array(checksum(arrays))
    with put_in_place(path) as file, zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            # `ZipInfo` has a fixed modification time, so equal data sets are written as identical files.
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asarray(array, order="C"), (1, 0), allow_pickle=False)


# ---- Minari


def _write_minari(dataset: Dataset, dataset_id: str, raw: RawSpaces) -> None:
    minari = import_minari()
    paths = {path: name for name, path in paths_of(raw.observation).items()}
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
    if (existing := minari_path(dataset_id)).exists():
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
