"""One semantics for the three ways in which vector environments start new episodes.

| mode      | a done step returns                                  | the next step                           |
|-----------|------------------------------------------------------|-----------------------------------------|
| SAME_STEP | the new episode's first observation, `final_obs` too | is an ordinary one                      |
| NEXT_STEP | the last observation                                 | ignores its action: no transition       |
| DISABLED  | the last observation; the adapter resets at once     | is an ordinary one (then as SAME_STEP)  |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from pytorchrl.agent.env.spaces import MASK_LEAF, ObservationReader
from pytorchrl.errors import EnvError

NO_INDEX = np.empty(0, dtype=np.int64)


class Settled(NamedTuple):
    """A vector step in which an episode ended or began; E environments, K ends that `observations` do not show."""

    observations: Any
    """What the policy sees next, batched as the vector environment batches."""
    info: dict[str, Any]
    """`info` that belongs to `observations`."""
    valid: np.ndarray | None
    """(E,) bool; None if every row is a transition."""
    first: np.ndarray
    """(E,) bool."""
    final_index: np.ndarray
    """(K,) int64."""
    final_obs: dict[str, np.ndarray]
    """Leaf -> (K, ...)."""
    last_info_of: Callable[[int], Mapping[str, Any]]
    """Environment -> `info` of its episode's last step."""
    final_mask: np.ndarray | None = None
    """(K, n) bool, what the leaf `action_mask` of the last observations says, if there is one."""


class Autoreset(Protocol):
    """What `VecEnv` needs to know of an autoreset mode."""

    pending: bool
    """Whether the next step has to be settled even if nothing is done in it."""

    def settle(self, done: np.ndarray, observations: Any, info: dict[str, Any]) -> Settled:
        """Tell what a step in which `done` (E,) bool holds, or that was pending, means."""

    def reset(self) -> None:
        """All environments were reset from outside."""


class SameStep:
    """The vector environment resets within the step that ends an episode."""

    def __init__(self, reader: ObservationReader) -> None:
        self.pending = False
        self._reader = reader

    def settle(self, done: np.ndarray, observations: Any, info: dict[str, Any]) -> Settled:
        """See `Autoreset`."""
        if "final_obs" not in info:
            raise EnvError(
                "expected info['final_obs'] from a vector environment in SAME_STEP mode after an end, got none; "
                f"it has {sorted(info)}")
        index = np.flatnonzero(done)
        final = info["final_obs"]
        # Gymnasium gives an object array with holes, ALE a dense batch in which only the rows that ended count.
        if isinstance(final, np.ndarray) and final.dtype == object:
            rows = [final[i] for i in index]
            final_obs = self._reader.read_rows(rows)
            final_mask = np.stack([self._reader.mask(row) for row in rows]) if self._reader.has_mask else None  # type: ignore[misc]
        else:
            final_obs = {leaf: array[index] for leaf, array in self._reader.read(final).items()}
            final_mask = self._reader.mask(final)
            final_mask = None if final_mask is None else final_mask[index]
        last_info = info.get("final_info", info)
        return Settled(observations, info, None, done, index, final_obs, lambda i: _row(last_info, i), final_mask)

    def reset(self) -> None:
        """See `Autoreset`."""


class NextStep:
    """The vector environment resets in the step after the end and ignores that step's action."""

    def __init__(self, num_envs: int) -> None:
        self.pending = False
        self._previous_done = np.zeros(num_envs, dtype=np.bool_)

    def settle(self, done: np.ndarray, observations: Any, info: dict[str, Any]) -> Settled:
        """See `Autoreset`."""
        first = self._previous_done
        self._previous_done = done
        self.pending = bool(np.count_nonzero(done))
        return Settled(observations, info, ~first, first, NO_INDEX, {}, lambda i: _row(info, i))

    def reset(self) -> None:
        """See `Autoreset`."""
        self.pending = False
        self._previous_done = np.zeros_like(self._previous_done)


class MaskedReset:
    """The vector environment leaves resets to its caller, who makes them at once."""

    def __init__(self, reader: ObservationReader, envs: VectorEnv[Any, Any, Any]) -> None:
        self.pending = False
        self._reader = reader
        self._envs = envs

    def settle(self, done: np.ndarray, observations: Any, info: dict[str, Any]) -> Settled:
        """See `Autoreset`."""
        index = np.flatnonzero(done)
        # Indexing with an array copies, so that the vector environment may write the new observations into the same memory.
        final_obs = {leaf: array[index] for leaf, array in self._reader.read(observations).items()}
        mask = self._reader.mask(observations)
        final_mask = None if mask is None else mask[index]
        # Both copies: the receiver takes the mask out of the dictionary, wrappers look for it there.
        observations, reset_info = self._envs.reset(options={"reset_mask": done.copy()})
        new_info = dict(info)
        if MASK_LEAF in info and MASK_LEAF in reset_info:
            new_info[MASK_LEAF] = np.where(done[:, None], reset_info[MASK_LEAF], info[MASK_LEAF])
        return Settled(observations, new_info, None, done, index, final_obs, lambda i: _row(info, i), final_mask)

    def reset(self) -> None:
        """See `Autoreset`."""


def make_autoreset(mode: AutoresetMode, reader: ObservationReader, envs: VectorEnv[Any, Any, Any]) -> Autoreset:
    """The adapter for `mode`."""
    if mode is AutoresetMode.SAME_STEP:
        return SameStep(reader)
    if mode is AutoresetMode.NEXT_STEP:
        return NextStep(envs.num_envs)
    return MaskedReset(reader, envs)


def autoreset_mode_of(envs: gym.vector.VectorEnv[Any, Any, Any]) -> AutoresetMode:
    """The mode of a vector environment that took no argument for it.

    Its own attribute counts, then metadata of its own class. `VectorEnv.metadata` is one dictionary shared by all
    classes that define none, and some write their mode into it, so it says nothing. The rest is NEXT_STEP, Gymnasium's
    default.
    """
    mode = getattr(envs, "autoreset_mode", None)
    if mode is None and envs.metadata is not VectorEnv.metadata:
        mode = envs.metadata.get("autoreset_mode")
    return AutoresetMode.NEXT_STEP if mode is None else AutoresetMode(mode)


def _row(info: Mapping[str, Any], index: int) -> dict[str, Any]:
    """One environment's entries of a vector environment's `info`."""
    return {
        key: value[index] for key, value in info.items()
        if not key.startswith("_") and isinstance(value, np.ndarray) and value.ndim and len(value) > index
    }
