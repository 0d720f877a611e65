"""How replay keeps one leaf of the observations: as it is, or pictures of a stack once each.

C = capacity in rows, N = rows or observations in a call, K = pictures of a stack, T = steps, E = environments.

An observation is either that of a row, a place in [0, C), or an *extra* one: the last of an episode that no row shows, or
the last of a rollout, which no row shows before the next rollout comes. Extra observation k has the place -(k + 1).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

_FIRST_EXTRAS = 64
_GROWTH = 1.5


class Slots:
    """Numbers of places that are handed out, given back and handed out again; there are ever more if need be."""

    def __init__(self) -> None:
        """None are in use."""
        self._free = np.zeros(0, dtype=np.int64)
        self.capacity = 0
        """One more than the largest number handed out so far, or to come before the next growth."""

    def take(self, count: int) -> np.ndarray:
        """`count` numbers that are in nobody's use, (count,) int64."""
        missing = count - len(self._free)
        if missing > 0:
            grown = max(_FIRST_EXTRAS, self.capacity + missing, int(_GROWTH * self.capacity))
            self._free = np.concatenate([np.arange(self.capacity, grown)[::-1], self._free])
            self.capacity = grown
        keep = len(self._free) - count
        taken, self._free = self._free[keep:], self._free[:keep]
        return taken[::-1].copy()

    def give_back(self, numbers: np.ndarray) -> None:
        """These are not used any more."""
        self._free = np.concatenate([self._free, numbers])

    def state_dict(self) -> dict[str, Any]:
        """Everything."""
        return {"free": self._free.copy(), "capacity": self.capacity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self._free, self.capacity = np.array(state["free"]), int(state["capacity"])


def write_extras(array: np.ndarray, numbers: np.ndarray, values: np.ndarray, fill: int = 0) -> np.ndarray:
    """Write rows `numbers` of an array that grows where it has no such row; `array` or the larger copy."""
    if len(numbers) and (needed := int(numbers.max()) + 1) > len(array):
        larger = np.zeros((max(_FIRST_EXTRAS, needed, int(_GROWTH * len(array))), *array.shape[1:]), array.dtype)
        if fill:
            larger[len(array):] = fill
        larger[:len(array)] = array
        array = larger
    array[numbers] = values
    return array


def write_rows(column: np.ndarray, start: int, values: np.ndarray) -> None:
    """Write (E, T, ...) values environment by environment from place `start` on, across the end of the ring."""
    count, capacity = values.shape[0] * values.shape[1], len(column)
    end = start + count
    if end <= capacity:
        column[start:end].reshape(values.shape)[...] = values
        return
    flat = values.reshape(count, *values.shape[2:])
    column[start:] = flat[:capacity - start]
    column[:end - capacity] = flat[capacity - start:]


class Leaf(ABC):
    """One leaf of the observations of all rows, and of the extra ones."""

    depth: int = 0
    """How many rows after a row may need a part of it."""

    @abstractmethod
    def write(self, start: int, obs: np.ndarray, places: np.ndarray, previous: np.ndarray, cut: np.ndarray) -> None:
        """Put the observations of a rollout into T·E rows and E extra observations.

        Args:
            start: Place of the first row; those of an environment follow each other.
            obs: (T+1, E, ...).
            places: (T+1, E) of each; those of row T are extra ones.
            previous: (E,) places of the extra observations that row 0 shows again, 0 where there is none.
            cut: (T+1, E) bool, whether a row's observation does not come one step after that of the row before.
        """

    @abstractmethod
    def write_finals(self, obs: np.ndarray, places: np.ndarray, before: np.ndarray) -> None:
        """Put N last observations of episodes, (N, ...), into extra ones at `places`, each one step after `before`."""

    @abstractmethod
    def take(self, places: np.ndarray) -> np.ndarray:
        """Observations at `places`, (N, ...), in memory of their own."""

    def free(self, places: np.ndarray) -> None:  # noqa: B027 - only stacks have anything to do
        """Nobody asks any more for the observations at these places."""

    def broken(self, rows: np.ndarray, start: int, count: int) -> np.ndarray:
        """(N,) bool, whether `rows` need a part of the `count` rows from `start` on, which were freed."""
        return np.zeros(len(rows), dtype=np.bool_)

    def clear(self) -> None:  # noqa: B027 - only stacks have anything to do
        """Nobody asks any more for anything."""

    @abstractmethod
    def state_dict(self, num_rows: int) -> dict[str, Any]:
        """Everything; rows from `num_rows` on were never written."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Memory that it holds."""


class WholeLeaf(Leaf):
    """Observations as they are."""

    def __init__(self, capacity: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        """Allocate `capacity` rows."""
        self._rows = np.zeros((capacity, *shape), dtype)
        self._extras = np.zeros((0, *shape), dtype)

    def write(self, start: int, obs: np.ndarray, places: np.ndarray, previous: np.ndarray, cut: np.ndarray) -> None:
        """See `Leaf`."""
        write_rows(self._rows, start, obs[:-1].swapaxes(0, 1))
        self._extras = write_extras(self._extras, -1 - places[-1], obs[-1])

    def write_finals(self, obs: np.ndarray, places: np.ndarray, before: np.ndarray) -> None:
        """See `Leaf`."""
        self._extras = write_extras(self._extras, -1 - places, obs)

    def take(self, places: np.ndarray) -> np.ndarray:
        """See `Leaf`."""
        obs = self._rows.take(places, axis=0, mode="clip")
        extra = np.flatnonzero(places < 0)
        if len(extra):
            obs[extra] = self._extras[-1 - places[extra]]
        return obs

    def state_dict(self, num_rows: int) -> dict[str, Any]:
        """See `Leaf`."""
        return {"rows": self._rows[:num_rows].copy(), "extras": self._extras.copy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Leaf`."""
        self._rows[:len(state["rows"])] = state["rows"]
        self._extras = np.array(state["extras"])

    @property
    def num_bytes(self) -> int:
        """See `Leaf`."""
        return self._rows.nbytes + self._extras.nbytes


class StackedLeaf(Leaf):
    """Stacks of the last K pictures, of which each picture is kept once.

    A row has a picture of its own, the newest of its stack, and the numbers of all K: below C the picture of that row, C
    a black picture, beyond it extra pictures. What a stack shows that the row before does not have (at the start of an
    episode, padded as it may be) is kept in extra pictures, so that every stack comes back as it was.

    An extra picture belongs to one place, and goes with it. A row whose older pictures went with earlier rows is `broken`.
    """

    def __init__(self, capacity: int, shape: tuple[int, ...], dtype: np.dtype[Any], num_frames: int) -> None:
        """Allocate `capacity` rows of stacks of `shape` (K·c, ...), K = `num_frames`."""
        self._shape, self._num_frames = shape, num_frames
        self._black = capacity
        frame_size = int(np.prod(shape)) // num_frames
        self._frames = np.zeros((capacity, frame_size), dtype)
        self._extra_frames = np.zeros((1, frame_size), dtype)  # number 0 is the black one
        self._row_frames = np.zeros((capacity, num_frames), dtype=np.int32)
        self._extra_stacks = np.zeros((0, num_frames), dtype=np.int32)
        self.clear()

    def clear(self) -> None:
        """See `Leaf`."""
        self._slots = Slots()
        self._slots.take(1)
        self._owners = np.full(len(self._extra_frames), self._black, dtype=np.int64)  # the black picture's: nobody

    @property
    def depth(self) -> int:  # type: ignore[override]
        """K - 1."""
        return self._num_frames - 1

    def write(self, start: int, obs: np.ndarray, places: np.ndarray, previous: np.ndarray, cut: np.ndarray) -> None:
        """See `Leaf`."""
        stacks = self._split(obs)
        write_rows(self._frames, start, stacks[:-1, :, -1].swapaxes(0, 1))
        newest = np.concatenate([places[:-1], self._keep(stacks[-1, :, -1], places[-1])[None]])
        base = cut.copy()
        base[0] = True
        for t in range(1, len(stacks)):
            base[t] |= ~_follows(stacks[t - 1], stacks[t])
        frames = np.zeros((*base.shape, self._num_frames), dtype=np.int32)
        known = np.flatnonzero(previous)
        if len(known):
            frames[0, known] = self._taken_over(previous[known], newest[0, known], places[0, known])
        fresh = base.copy()
        fresh[0, known] = False
        frames[fresh] = self._whole(stacks[fresh], newest[fresh], places[fresh])
        frames = _follow_on(frames, newest, base)
        write_rows(self._row_frames, start, frames[:-1].swapaxes(0, 1))
        self._extra_stacks = write_extras(self._extra_stacks, -1 - places[-1], frames[-1])

    def write_finals(self, obs: np.ndarray, places: np.ndarray, before: np.ndarray) -> None:
        """See `Leaf`."""
        stacks = self._split(obs)
        newest = self._keep(stacks[:, -1], places)
        fresh = ~_follows(self._split(self.take(before)), stacks)
        frames = np.concatenate([self._row_frames[before, 1:], newest[:, None].astype(np.int32)], axis=1)
        frames[fresh] = self._whole(stacks[fresh], newest[fresh], places[fresh])
        self._extra_stacks = write_extras(self._extra_stacks, -1 - places, frames)

    def take(self, places: np.ndarray) -> np.ndarray:
        """See `Leaf`."""
        frames = self._row_frames.take(places, axis=0, mode="clip")
        extra = np.flatnonzero(places < 0)
        if len(extra):
            frames[extra] = self._extra_stacks[-1 - places[extra]]
        numbers = frames.reshape(-1)
        pictures = self._frames.take(numbers, axis=0, mode="clip")
        other = np.flatnonzero(numbers >= self._black)
        if len(other):
            pictures[other] = self._extra_frames[numbers[other] - self._black]
        return pictures.reshape(len(places), *self._shape)

    def free(self, places: np.ndarray) -> None:
        """See `Leaf`."""
        frames = self._stacks_at(places)
        row, column = np.nonzero(frames > self._black)
        extra = frames[row, column] - self._black
        owned = np.unique(extra[self._owners[extra] == places[row]])
        if len(owned):
            self._owners[owned] = self._black
            self._slots.give_back(owned)

    def broken(self, rows: np.ndarray, start: int, count: int) -> np.ndarray:
        """See `Leaf`."""
        # Whoever shows an extra picture of a row shows the row's own, newer one, too: that one says it all.
        frames = self._row_frames[rows]
        return ((frames < self._black) & ((frames - start) % self._black < count)).any(axis=1)

    def state_dict(self, num_rows: int) -> dict[str, Any]:
        """See `Leaf`."""
        return {
            "frames": self._frames[:num_rows].copy(), "row_frames": self._row_frames[:num_rows].copy(),
            "extra_frames": self._extra_frames.copy(), "extra_stacks": self._extra_stacks.copy(),
            "owners": self._owners.copy(), "slots": self._slots.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Leaf`."""
        num_rows = len(state["frames"])
        self._frames[:num_rows], self._row_frames[:num_rows] = state["frames"], state["row_frames"]
        self._extra_frames, self._extra_stacks = np.array(state["extra_frames"]), np.array(state["extra_stacks"])
        self._owners = np.array(state["owners"])
        self._slots.load_state_dict(state["slots"])

    @property
    def num_bytes(self) -> int:
        """See `Leaf`."""
        return sum(array.nbytes for array in (
            self._frames, self._row_frames, self._extra_frames, self._extra_stacks, self._owners))

    def _split(self, obs: np.ndarray) -> np.ndarray:
        """(..., K·c, H, W) -> (..., K, c·H·W)."""
        leading = obs.shape[:obs.ndim - len(self._shape)]
        return np.ascontiguousarray(obs).reshape(*leading, self._num_frames, -1)

    def _stacks_at(self, places: np.ndarray) -> np.ndarray:
        frames = self._row_frames.take(places, axis=0, mode="clip")
        extra = np.flatnonzero(places < 0)
        frames[extra] = self._extra_stacks[-1 - places[extra]]
        return frames

    def _keep(self, pictures: np.ndarray, owners: np.ndarray) -> np.ndarray:
        """Numbers of extra pictures (N, F) that belong to `owners`, (N,) places."""
        extra = self._slots.take(len(pictures))
        self._extra_frames = write_extras(self._extra_frames, extra, pictures)
        self._owners = write_extras(self._owners, extra, owners, fill=self._black)
        return extra + self._black

    def _whole(self, stacks: np.ndarray, newest: np.ndarray, owners: np.ndarray) -> np.ndarray:
        """Numbers of the pictures of stacks (N, K, F) of which only the newest is kept so far, (N, K)."""
        frames = np.empty(stacks.shape[:2], dtype=np.int32)
        frames[:, -1] = newest
        for k in range(self._num_frames - 2, -1, -1):
            frames[:, k] = np.where((stacks[:, k] == stacks[:, k + 1]).all(axis=1), frames[:, k + 1], self._black)
            other = np.flatnonzero((frames[:, k] == self._black) & stacks[:, k].any(axis=1))
            frames[other, k] = self._keep(stacks[other, k], owners[other])
        return frames

    def _taken_over(self, extras: np.ndarray, newest: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Numbers of the pictures that rows show as extra observations did; (N,) each, what comes back (N, K)."""
        frames = self._extra_stacks[-1 - extras]
        own = frames == frames[:, -1:]
        row, column = np.nonzero((frames > self._black) & ~own)
        extra = frames[row, column] - self._black
        moved = self._owners[extra] == extras[row]
        self._owners[extra[moved]] = rows[row[moved]]
        return np.where(own, newest[:, None], frames)


def _follows(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Whether stacks (N, K, F) are those before, moved on by one picture; (N,) bool."""
    size = before.shape[2]
    older, newer = before.reshape(len(before), -1)[:, size:], after.reshape(len(after), -1)[:, :-size]
    if size * before.itemsize % 8 == 0:  # eight bytes at once take a fifth of the time
        older, newer = older.view(np.uint64), newer.view(np.uint64)
    return (older == newer).all(axis=1)


def _follow_on(frames: np.ndarray, newest: np.ndarray, base: np.ndarray) -> np.ndarray:
    """Numbers of all rows' pictures from those of the rows that start anew.

    Args:
        frames: (T+1, E, K), right where `base` is true.
        newest: (T+1, E), the numbers of the newest pictures.
        base: (T+1, E) bool, true in row 0; every other row is the one before it, moved on by one picture.
    """
    num_rows, num_envs, num_frames = frames.shape
    row, env = np.arange(num_rows)[:, None], np.arange(num_envs)[None]
    start = np.maximum.accumulate(np.where(base, row, 0), axis=0)
    since, result = row - start, np.empty_like(frames)
    for age in range(num_frames):
        older = frames[start, env, num_frames - 1 - np.maximum(age - since, 0)]
        result[..., num_frames - 1 - age] = np.where(age < since, newest[np.maximum(row - age, 0), env], older)
    return result
