"""Adapters that give the three autoreset modes of vector environments a common interface.

| mode      | a step that ends an episode returns                       | the next step is                             |
|-----------|-----------------------------------------------------------|----------------------------------------------|
| SAME_STEP | the first observation of the new episode, and `final_obs` | a normal step                                |
| NEXT_STEP | the last observation                                      | a reset, which ignores the action            |
| DISABLED  | the last observation; the adapter then calls `reset`      | a normal step, as with SAME_STEP             |
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from typing_extensions import override

from pytorchrl.agent.env.aliases import MASK_LEAF, AnyVectorEnv, Info, Observation
from pytorchrl.agent.env.spaces import ObservationReader
from pytorchrl.errors import ConfigError, EnvError

INFO_KEYS = ("lives", MASK_LEAF)
"""Keys that `VecEnv` reads in the `info` of every step."""
NO_INDEX = np.empty(0, dtype=np.int64)


class ResolvedStep(NamedTuple):
    """A step of a vector environment in which an episode ended or began.

    E = number of environments, K = number of ended episodes whose last observation is not in `observations`.
    """

    observations: Observation
    """Observations from which the next actions are chosen, in the batched form of the vector environment."""
    info: Info
    """The `info` that belongs to `observations`."""
    valid: np.ndarray | None
    """(E,) bool, whether the step of each environment is a transition; None if all steps are transitions."""
    first: np.ndarray
    """(E,) bool, whether each observation is the first of an episode."""
    final_index: np.ndarray
    """(K,) int64, indices of the environments to which the last observations in `final_obs` belong."""
    final_obs: dict[str, np.ndarray]
    """The last observations of the episodes that ended, (K, ...) for each leaf, unless `observations` contains them."""
    last_info_of: Callable[[int], Mapping[str, object]]
    """Function from the index of an environment to the `info` of the last step of its episode."""
    final_mask: np.ndarray | None = None
    """(K, n) bool, the leaf `action_mask` of the last observations; None if the space has no such leaf."""


NO_FINAL_OBS = (
    "expected info['final_obs'] from a vector environment in SAME_STEP mode after the end of an episode, got none")
UNEXPECTED_FINAL_OBS = (
    "expected no info['final_obs'] from a vector environment in NEXT_STEP mode, which is assumed where none is stated; "
    "if it resets environments in the step that ends their episode, set metadata = {'autoreset_mode': "
    "AutoresetMode.SAME_STEP} in its class")


class Autoreset(ABC):
    """The base class of the adapters for autoreset modes."""

    pending: bool = False
    """Whether `resolve` must be called after the next step even if no episode ends in that step."""

    @abstractmethod
    def resolve(self, done: np.ndarray, observations: Observation, info: Info) -> ResolvedStep:
        """Convert the result of a step to a form that is the same for all autoreset modes.

        The caller must call this method if an episode ended in the step (`done`, (E,) bool), or if `pending` was true
        before the step.
        """

    def reset(self) -> None:
        """Discard resets that are pending, if any, because the caller has reset all environments."""


class SameStep(Autoreset):
    """Adapter for a vector environment that resets within the step in which an episode ends."""

    def __init__(self, reader: ObservationReader) -> None:
        self._reader = reader

    @override
    def resolve(self, done: np.ndarray, observations: Observation, info: Info) -> ResolvedStep:
        if "final_obs" not in info:
            raise EnvError(f"{NO_FINAL_OBS}; info has {sorted(info)}")
        index = done.nonzero()[0]
        final = info["final_obs"]
        # Gymnasium returns an object array with None where no episode ended. ALE returns a whole batch, in which only
        # the rows of ended episodes are valid.
        if isinstance(final, np.ndarray) and final.dtype == object:
            rows = [final[i] for i in index.tolist()]
            final_obs = self._reader.read_rows(rows)
            final_mask = self._reader.mask_rows(rows)
        else:
            final_obs = {leaf: array[index] for leaf, array in self._reader.read(final).items()}
            mask = self._reader.mask(final)
            final_mask = None if mask is None else mask[index]
        last_info = info.get("final_info", info)
        return ResolvedStep(observations, info, None, done, index, final_obs, lambda i: _row(last_info, i), final_mask)


class NextStep(Autoreset):
    """Adapter for a vector environment that resets in the step after an episode and ignores that step's action."""

    def __init__(self, num_envs: int) -> None:
        self._previous_done = np.zeros(num_envs, dtype=np.bool_)

    @override
    def resolve(self, done: np.ndarray, observations: Observation, info: Info) -> ResolvedStep:
        if "final_obs" in info:
            raise EnvError(UNEXPECTED_FINAL_OBS)
        first = self._previous_done
        self._previous_done = done
        self.pending = bool(np.count_nonzero(done))
        return ResolvedStep(observations, info, ~first, first, NO_INDEX, {}, lambda i: _row(info, i))

    @override
    def reset(self) -> None:
        self.pending = False
        self._previous_done = np.zeros_like(self._previous_done)


class MaskedReset(Autoreset):
    """Adapter for a vector environment without autoreset; the adapter resets environments when episodes end."""

    def __init__(self, reader: ObservationReader, envs: AnyVectorEnv) -> None:
        self._reader = reader
        self._envs = envs

    @override
    def resolve(self, done: np.ndarray, observations: Observation, info: Info) -> ResolvedStep:
        """Reset the environments whose episodes ended, and convert the step."""
        index = done.nonzero()[0]
        # Indexing with an array copies the rows, so the vector environment may overwrite `observations` when it resets.
        final_obs = {leaf: array[index] for leaf, array in self._reader.read(observations).items()}
        mask = self._reader.mask(observations)
        final_mask = None if mask is None else mask[index]
        # Pass a copy of `done`, because the vector environment might change the mask, and `done` is returned below.
        observations, reset_info = self._envs.reset(options={"reset_mask": done.copy()})
        new_info = _merged(info, reset_info, done)
        return ResolvedStep(observations, new_info, None, done, index, final_obs, lambda i: _row(info, i), final_mask)


def make_autoreset(mode: AutoresetMode, reader: ObservationReader, envs: AnyVectorEnv) -> Autoreset:
    """Return the adapter for `mode`."""
    if mode is AutoresetMode.SAME_STEP:
        return SameStep(reader)
    if mode is AutoresetMode.NEXT_STEP:
        return NextStep(envs.num_envs)
    return MaskedReset(reader, envs)


def autoreset_mode_of(envs: AnyVectorEnv) -> AutoresetMode:
    """Return the autoreset mode of a vector environment whose constructor has no argument for the mode.

    The mode is the attribute `autoreset_mode`, else the entry in the metadata of the class, else NEXT_STEP, which is
    Gymnasium's default. Metadata that a class inherits from `VectorEnv` are ignored: all such classes share one
    dictionary, and a different class may have added the entry. The vector environments of ManiSkill state no mode, but
    have the attribute `auto_reset`.

    Raises:
        ConfigError: The vector environment does not reset environments, and only a method of its own could do so.
    """
    mode = getattr(envs, "autoreset_mode", None)
    if mode is None and envs.metadata is not VectorEnv.metadata:
        mode = envs.metadata.get("autoreset_mode")
    resets_at_once = getattr(envs, "auto_reset", None)
    if mode is None and resets_at_once is not None:
        if not resets_at_once:
            raise ConfigError(f"{type(envs).__name__} has auto_reset=False, so no episode would begin after the first; "
                              "build it with auto_reset=True")
        mode = AutoresetMode.SAME_STEP
    return AutoresetMode.NEXT_STEP if mode is None else AutoresetMode(mode)


def _merged(info: Info, reset_info: Info, done: np.ndarray) -> Info:
    """Return `info` with the entries `INFO_KEYS` of `reset_info` for the environments that were reset.

    As in Gymnasium, the entry `_key` says which environments have the entry `key`; by default, all have it.
    """
    merged = dict(info)
    for key in INFO_KEYS:
        if key in reset_info:
            value = np.asarray(reset_info[key])
            rows = done.reshape(-1, *[1] * (value.ndim - 1))
            merged[key] = np.where(rows, value, info.get(key, value))
        had, has = (found.get(f"_{key}", np.full(len(done), key in found)) for found in (info, reset_info))
        merged[f"_{key}"] = np.where(done, has, had)
    return merged


def _row(info: Mapping[str, object], index: int) -> dict[str, object]:
    """Return the entries of one environment in the `info` of a vector environment; nested entries stay nested.

    As in Gymnasium, the entry `_key` says which environments have the entry `key`; by default, all have it.
    """
    row: dict[str, object] = {}
    for key, value in info.items():
        given = info.get(f"_{key}")
        if (key.startswith("_") and key[1:] in info) or (isinstance(given, np.ndarray) and not given[index]):
            continue
        if isinstance(value, Mapping):
            row[key] = _row(value, index)
        elif isinstance(value, np.ndarray) and value.ndim and len(value) > index:
            row[key] = value[index]
    return row
