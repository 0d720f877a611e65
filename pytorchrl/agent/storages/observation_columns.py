"""Columns of observations in a ring buffer. Each column stores one leaf of the observations.

C = capacity in rows, N = observations per call, K = frames per stack, T = steps, E = environments.

A `PlainColumn` stores observations unchanged. A `StackedColumn` is for stacked frames, and stores each frame once.

Every observation has a number, its *place*. The place of an observation in a row is the number of the row, in [0, C).
An *extra* observation belongs to no row: it is the last observation of an episode, or the last observation of a
collector's newest rollout. The place of extra observation k is the negative number -(k + 1).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TypedDict, cast

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from pytorchrl.agent.transfers import on_device
from pytorchrl.errors import ConfigError
from pytorchrl.files.atomic import saved_int
from pytorchrl.support.untyped import StateDict

_FIRST_EXTRAS = 64
_GROWTH = 1.5


class SlotState(TypedDict):
    """State of a `SlotPool`."""

    free: np.ndarray
    """Free slots, (N,) int64; the last one is taken first."""
    capacity: int


class SlotPool:
    """Allocator of slot numbers 0, 1, 2, ...; released numbers are reused, and the pool grows when none is free."""

    def __init__(self) -> None:
        """Create an empty pool."""
        self._free: list[int] = []  # the last slot is taken first
        self.capacity = 0
        """Number of slots, including free slots."""

    @property
    def taken(self) -> np.ndarray:
        """Slots in use, in ascending order, (N,) int64."""
        return np.setdiff1d(np.arange(self.capacity), np.array(self._free, dtype=np.int64))

    def take(self, count: int) -> np.ndarray:
        """Allocate `count` free slots and return their numbers, (count,) int64."""
        missing = count - len(self._free)
        if missing > 0:
            grown = max(_FIRST_EXTRAS, self.capacity + missing, int(_GROWTH * self.capacity))
            self._free = [*reversed(range(self.capacity, grown)), *self._free]
            self.capacity = grown
        keep = len(self._free) - count
        taken = np.array(self._free[keep:][::-1], dtype=np.int64)
        del self._free[keep:]
        return taken

    def release(self, numbers: np.ndarray) -> None:
        """Release the slots `numbers`, (N,) int64."""
        self._free.extend(numbers.tolist())

    def state_dict(self) -> SlotState:
        """Return a copy of the whole state."""
        return {"free": np.array(self._free, dtype=np.int64), "capacity": self.capacity}

    def load_state_dict(self, state: SlotState, num_written: int) -> None:
        """Restore a state from `state_dict()`.

        Args:
            state: The state.
            num_written: Number of rows in the arrays that hold the slots' data; each slot in use needs a row.

        Raises:
            ValueError: The free slots are not distinct numbers below the capacity, or a slot in use has no row.
        """
        free, capacity = state["free"].tolist(), saved_int(state["capacity"])
        if capacity > len(free) + num_written:
            raise ValueError(f"a pool of {capacity} slots has {len(free)} free ones, but only {num_written} have data")
        if len(set(free)) < len(free) or not set(free) <= set(range(capacity)):
            raise ValueError(f"the free slots of a pool must be distinct numbers in [0, {capacity}), got {free!r:.80}")
        self._free, self.capacity = free, capacity
        if (self.taken >= num_written).any():
            raise ValueError(f"slot {self.taken[-1]} of a pool is in use, but only {num_written} slots have data")


def write_extras(array: np.ndarray, numbers: np.ndarray, values: np.ndarray, fill: int = 0) -> np.ndarray:
    """Write `values` to the rows `numbers` of `array`; return `array` or, if it has too few rows, a larger copy."""
    try:
        array[numbers] = values
    except IndexError:
        needed = int(numbers.max()) + 1
        larger = np.zeros((max(_FIRST_EXTRAS, needed, int(_GROWTH * len(array))), *array.shape[1:]), array.dtype)
        if fill:
            larger[len(array):] = fill
        larger[:len(array)] = array
        larger[numbers] = values
        return larger
    return array


def _like(own: np.ndarray, saved: np.ndarray) -> np.ndarray:
    """Return a copy of a saved array; raise `ValueError` if its rows differ from those of `own` in shape or dtype."""
    if (saved.shape[1:], saved.dtype) != (own.shape[1:], own.dtype):
        raise ValueError(f"expected rows of shape {own.shape[1:]} and dtype {own.dtype}, got {saved.shape[1:]} and "
                         f"{saved.dtype}")
    return np.array(saved)


def write_rows(column: np.ndarray, start: int, values: np.ndarray) -> None:
    """Write values (E, T, ...) to consecutive rows from `start` on, environment by environment.

    After the last row of the column, writing continues at row 0.
    """
    num_envs, num_steps = values.shape[:2]
    count, capacity = num_envs * num_steps, len(column)
    end = start + count
    if end <= capacity:
        if num_envs == 1:  # the next two cases are faster special cases of the third one
            column[start:end] = values[0]
        elif num_steps == 1:
            column[start:end] = values[:, 0]
        else:
            column[start:end].reshape(values.shape)[...] = values
        return
    flat = values.reshape(count, *values.shape[2:])
    column[start:] = flat[:capacity - start]
    column[:end - capacity] = flat[capacity - start:]


class ObservationColumn(ABC):
    """Storage of one leaf of the observations, for all rows and for extra observations, which belong to no row."""

    @property
    def depth(self) -> int:
        """Number of later rows that may need the data of a row."""
        return 0

    @abstractmethod
    def write(self, start: int, obs: np.ndarray, places: np.ndarray, previous: np.ndarray, cut: np.ndarray) -> None:
        """Store the observations of a rollout: T·E observations in rows, and the last E as extra observations.

        Args:
            start: Number of the first row; the rows of an environment are consecutive.
            obs: Observations, (T+1, E, ...).
            places: (T+1, E) int64, the place of each observation: a row or, in the last step, an extra observation.
            previous: (E,) int64. For an environment that continues its previous rollout: the (negative) place of the
                last observation of that rollout, which is also the first observation of this one. Otherwise: 0.
            cut: (T+1, E) bool, true at step t if the final observation of an episode lies between the observations of
                steps t - 1 and t.
        """

    @abstractmethod
    def write_finals(self, obs: np.ndarray, places: np.ndarray, before: np.ndarray) -> None:
        """Store the last observations of N episodes.

        Args:
            obs: Observations, (N, ...).
            places: (N,) int64, the negative numbers under which these extra observations are stored.
            before: (N,) int64, for each episode, the row of the observation one step before the last.
        """

    @abstractmethod
    def take(self, places: np.ndarray) -> np.ndarray:
        """Return a copy (N, ...) of observations.

        Args:
            places: (N,) int64, the rows of the observations, or the negative numbers of extra observations.
        """

    def free(self, places: np.ndarray) -> None:
        """Release the data of N observations; see `take` for `places`."""

    def broken(self, rows: np.ndarray, start: int, count: int) -> np.ndarray:
        """Return, for each of N rows, whether the row needs data of evicted rows, (N,) bool.

        Args:
            rows: (N,) int64, numbers of the rows.
            start: Number of the first evicted row.
            count: Number of evicted rows.
        """
        return np.zeros(len(rows), dtype=np.bool_)

    @abstractmethod
    def state_dict(self, num_rows: int) -> StateDict:
        """Return a copy of the state with only the first `num_rows` rows; the other rows have not been written yet."""

    @abstractmethod
    def load_state_dict(self, state: StateDict) -> None:
        """Restore a state from `state_dict()`."""

    @property
    @abstractmethod
    def num_extras(self) -> int:
        """Number of extra observations for which memory is allocated."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Allocated memory in bytes."""


class PlainColumn(ObservationColumn):
    """Column of observations that are stored unchanged."""

    def __init__(self, capacity: int, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> None:
        """Allocate `capacity` rows."""
        self.rows = np.zeros((capacity, *shape), dtype)
        self._extras = np.zeros((0, *shape), dtype)

    @override
    def write(self, start: int, obs: np.ndarray, places: np.ndarray, previous: np.ndarray, cut: np.ndarray) -> None:
        write_rows(self.rows, start, obs[:-1].swapaxes(0, 1))
        self._extras = write_extras(self._extras, -1 - places[-1], obs[-1])

    @override
    def write_finals(self, obs: np.ndarray, places: np.ndarray, before: np.ndarray) -> None:
        self._extras = write_extras(self._extras, -1 - places, obs)

    @override
    def take(self, places: np.ndarray) -> np.ndarray:
        obs = self.rows.take(places, axis=0, mode="clip")
        extra = (places < 0).nonzero()[0]
        if len(extra):
            obs[extra] = self._extras[-1 - places[extra]]
        return obs

    @override
    def state_dict(self, num_rows: int) -> StateDict:
        return {"rows": self.rows[:num_rows].copy(), "extras": self._extras.copy()}

    @override
    def load_state_dict(self, state: StateDict) -> None:
        self.rows[:len(state["rows"])] = state["rows"]
        self._extras = _like(self._extras, state["extras"])

    @property
    def num_extras(self) -> int:
        """Number of extra observations for which memory is allocated."""
        return len(self._extras)

    @property
    def num_bytes(self) -> int:
        """Allocated memory in bytes."""
        return self.rows.nbytes + self._extras.nbytes


class DeviceColumn(ObservationColumn):
    """Column of observations on a device; places and the saved state are on the host."""

    def __init__(self, capacity: int, shape: tuple[int, ...], dtype: np.dtype[np.generic],
                 device: torch.device) -> None:
        """Allocate `capacity` rows on the device."""
        empty = torch.from_numpy(np.zeros((0, *shape), dtype)).to(device)
        self.rows = empty.new_zeros(capacity, *shape)
        self._extras = empty

    @override
    def write(self, start: int, obs: np.ndarray, places: np.ndarray, previous: np.ndarray, cut: np.ndarray) -> None:
        tensors = torch.as_tensor(obs).to(self.rows.device)
        self.rows[self._index(places[:-1])] = tensors[:-1]
        self._write_extras(places[-1], tensors[-1])

    @override
    def write_finals(self, obs: np.ndarray, places: np.ndarray, before: np.ndarray) -> None:
        self._write_extras(places, torch.as_tensor(obs).to(self.rows.device))

    @override
    def take(self, places: np.ndarray) -> np.ndarray:
        obs = self.rows[self._index(np.maximum(places, 0))]
        extra = (places < 0).nonzero()[0]
        if len(extra):
            obs[self._index(extra)] = self._extras[self._index(-1 - places[extra])]
        return cast("np.ndarray", obs)

    @override
    def state_dict(self, num_rows: int) -> dict[str, np.ndarray]:
        return {"rows": self.rows[:num_rows].cpu().numpy(), "extras": self._extras.cpu().numpy()}

    @override
    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        self.rows[:len(state["rows"])] = torch.from_numpy(state["rows"]).to(self.rows.device)
        like = np.zeros((0, *self._extras.shape[1:]), numpy_dtype(self._extras))
        self._extras = torch.from_numpy(_like(like, state["extras"])).to(self.rows.device)

    @property
    def num_extras(self) -> int:
        """Number of extra observations for which memory is allocated."""
        return len(self._extras)

    @property
    def num_bytes(self) -> int:
        """Allocated memory of the device in bytes."""
        return self.rows.nbytes + self._extras.nbytes

    def _write_extras(self, places: np.ndarray, values: Tensor) -> None:
        numbers = -1 - places
        needed, own = int(numbers.max()) + 1, len(self._extras)
        if needed > own:
            larger = self._extras.new_zeros(max(_FIRST_EXTRAS, needed, int(_GROWTH * own)), *self._extras.shape[1:])
            larger[:own] = self._extras
            self._extras = larger
        self._extras[self._index(numbers)] = values

    def _index(self, places: np.ndarray) -> Tensor:
        return on_device(torch.from_numpy(places), self.rows.device)


def numpy_dtype(values: np.ndarray | Tensor) -> np.dtype[np.generic]:
    """Return NumPy's dtype for the values of an array or a tensor."""
    return values.dtype if isinstance(values, np.ndarray) else torch.empty(0, dtype=values.dtype).numpy().dtype


class StackedColumn(ObservationColumn):
    """Column of stacks of the newest K frames, in which each frame is stored only once.

    A row stores the newest frame of its stack, and the numbers of all K frames. A number n below the capacity C
    denotes the newest frame of row n, C denotes a black frame, and a larger number denotes an extra frame.

    Usually, the older frames of a stack are the newest frames of earlier rows. Where they are not, for example at the
    start of an episode, they are stored as extra frames. Each extra frame is owned by one observation, and is released
    together with this observation.

    A row is `broken` if a frame of its stack was evicted with an earlier row.
    """

    def __init__(self, capacity: int, shape: tuple[int, ...], dtype: np.dtype[np.generic], num_frames: int) -> None:
        """Allocate `capacity` rows for stacks of `shape` (K·c, ...): K = `num_frames` frames with c channels each."""
        self._shape, self._num_frames = shape, num_frames
        self._black = capacity
        frame_size = int(np.prod(shape)) // num_frames
        self.frames = np.zeros((capacity, frame_size), dtype)
        self._extra_frames = np.zeros((1, frame_size), dtype)  # row 0 is a black frame, which all stacks share
        self._numbers = PlainColumn(capacity, (num_frames,), np.dtype(np.int32))  # of the frames of each stack
        self.slots = SlotPool()
        self.slots.take(1)
        self.owners = np.full(len(self._extra_frames), self._black, dtype=np.int64)  # `_black`: no owner

    @property
    @override
    def depth(self) -> int:
        """Number of later rows that may need the data of a row: K - 1 for stacks of K frames."""
        return self._num_frames - 1

    @override
    def write(self, start: int, obs: np.ndarray, places: np.ndarray, previous: np.ndarray, cut: np.ndarray) -> None:
        stacks = self._split(obs)
        write_rows(self.frames, start, stacks[:-1, :, -1].swapaxes(0, 1))
        newest = np.concatenate([places[:-1], self._keep(stacks[-1, :, -1], places[-1])[None]])
        base = cut.copy()
        base[0] = True
        for t in range(1, len(stacks)):
            base[t] |= ~_follows(stacks[t - 1], stacks[t])
        frames = np.zeros((*base.shape, self._num_frames), dtype=np.int32)
        known = np.flatnonzero(previous)
        if len(known):
            frames[0, known] = self._inherit_frames(previous[known], newest[0, known], places[0, known])
        fresh = base.copy()
        fresh[0, known] = False
        frames[fresh] = self._whole(stacks[fresh], newest[fresh], places[fresh])
        self._numbers.write(start, _follow_on(frames, newest, base), places, previous, cut)

    @override
    def write_finals(self, obs: np.ndarray, places: np.ndarray, before: np.ndarray) -> None:
        stacks = self._split(obs)
        newest = self._keep(stacks[:, -1], places)
        fresh = ~_follows(self._split(self.take(before)), stacks)
        frames = np.concatenate([self._numbers.rows[before, 1:], newest[:, None].astype(np.int32)], axis=1)
        frames[fresh] = self._whole(stacks[fresh], newest[fresh], places[fresh])
        self._numbers.write_finals(frames, places, before)

    @override
    def take(self, places: np.ndarray) -> np.ndarray:
        numbers = self._numbers.take(places).reshape(-1)
        images = self.frames.take(numbers, axis=0, mode="clip")
        other = np.flatnonzero(numbers >= self._black)
        if len(other):
            images[other] = self._extra_frames[numbers[other] - self._black]
        return images.reshape(len(places), *self._shape)

    @override
    def free(self, places: np.ndarray) -> None:
        frames = self._numbers.take(places)
        row, column = np.nonzero(frames > self._black)
        extra = frames[row, column] - self._black
        owned = np.unique(extra[self.owners[extra] == places[row]])
        if len(owned):
            self.owners[owned] = self._black
            self.slots.release(owned)

    @override
    def broken(self, rows: np.ndarray, start: int, count: int) -> np.ndarray:
        # Extra frames need no check: every later stack with an extra frame also contains the newest frame of the
        # observation that owns the extra frame, and this newest frame is checked.
        frames = self._numbers.rows[rows]
        return ((frames < self._black) & ((frames - start) % self._black < count)).any(axis=1)

    @override
    def state_dict(self, num_rows: int) -> StateDict:
        numbers = self._numbers.state_dict(num_rows)
        return {
            "frames": self.frames[:num_rows].copy(), "row_frames": numbers["rows"], "extra_stacks": numbers["extras"],
            "extra_frames": self._extra_frames.copy(), "owners": self.owners.copy(), "slots": self.slots.state_dict()}

    @override
    def load_state_dict(self, state: StateDict) -> None:
        self.frames[:len(state["row_frames"])] = state["frames"]
        self._numbers.load_state_dict({"rows": state["row_frames"], "extras": state["extra_stacks"]})
        self._extra_frames = _like(self._extra_frames, state["extra_frames"])
        self.owners = _like(self.owners, state["owners"])
        self.slots.load_state_dict(state["slots"], len(self.owners))

    @property
    def num_extras(self) -> int:
        """Number of extra observations for which memory is allocated."""
        return self._numbers.num_extras

    @property
    def num_bytes(self) -> int:
        """Allocated memory in bytes."""
        return self._numbers.num_bytes + self.frames.nbytes + self._extra_frames.nbytes + self.owners.nbytes

    def _split(self, obs: np.ndarray) -> np.ndarray:
        """Reshape stacks (..., K·c, H, W) to (..., K, c·H·W)."""
        leading = obs.shape[:obs.ndim - len(self._shape)]
        return np.ascontiguousarray(obs).reshape(*leading, self._num_frames, -1)

    def _keep(self, images: np.ndarray, owners: np.ndarray) -> np.ndarray:
        """Store extra frames (N, pixels), owned by the observations at `owners` (N,); return their numbers, (N,)."""
        extra = self.slots.take(len(images))
        self._extra_frames = write_extras(self._extra_frames, extra, images)
        self.owners = write_extras(self.owners, extra, owners, fill=self._black)
        return extra + self._black

    def _whole(self, stacks: np.ndarray, newest: np.ndarray, owners: np.ndarray) -> np.ndarray:
        """Store the older frames of stacks as extra frames, except black frames and repeated frames.

        A repeated frame is equal to the next newer frame of its stack, and gets the same number.

        Args:
            stacks: (N, K, pixels).
            newest: (N,) numbers of the newest frames.
            owners: (N,) places of the observations that own the stored frames.

        Returns:
            (N, K) numbers of all frames. A black frame has number C, the capacity.
        """
        frames = np.empty(stacks.shape[:2], dtype=np.int32)
        frames[:, -1] = newest
        for k in range(self._num_frames - 2, -1, -1):
            frames[:, k] = np.where((stacks[:, k] == stacks[:, k + 1]).all(axis=1), frames[:, k + 1], self._black)
            other = np.flatnonzero((frames[:, k] == self._black) & stacks[:, k].any(axis=1))
            frames[other, k] = self._keep(stacks[other, k], owners[other])
        return frames

    def _inherit_frames(self, extras: np.ndarray, newest: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Transfer frames from N extra observations to the rows that replace them, and return the rows' frame numbers.

        Each row now owns the older frames that its extra observation owned, and stores the newest frame itself.

        Args:
            extras: (N,) places of the extra observations, which are the last observations of the previous rollout.
            newest: (N,) numbers of the newest frames of the rows.
            rows: (N,) numbers of the rows.

        Returns:
            (N, K) numbers of frames.
        """
        frames = self._numbers.take(extras)
        own = frames == frames[:, -1:]
        row, column = np.nonzero((frames > self._black) & ~own)
        extra = frames[row, column] - self._black
        moved = self.owners[extra] == extras[row]
        self.owners[extra[moved]] = rows[row[moved]]
        return np.where(own, newest[:, None], frames)


def _follows(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Return, for N pairs of stacks (N, K, pixels), whether `after` is `before` shifted by one frame, (N,) bool."""
    size = before.shape[2]
    older, newer = before.reshape(len(before), -1)[:, size:], after.reshape(len(after), -1)[:, :-size]
    if size * before.itemsize % 8 == 0:  # comparing eight bytes at once is five times as fast
        older, newer = older.view(np.uint64), newer.view(np.uint64)
    return (older == newer).all(axis=1)


def _follow_on(frames: np.ndarray, newest: np.ndarray, base: np.ndarray) -> np.ndarray:
    """Return the frame numbers of all stacks of a rollout, (T+1, E, K).

    Args:
        frames: (T+1, E, K) frame numbers of the stacks for which `base` is true; other entries are not used.
        newest: (T+1, E) numbers of the newest frames.
        base: (T+1, E) bool, true at step 0, and where a stack is not the previous stack shifted by one frame.
    """
    num_rows, num_envs, num_frames = frames.shape
    row, env = np.arange(num_rows)[:, None], np.arange(num_envs)[None]
    start = np.maximum.accumulate(np.where(base, row, 0), axis=0)
    since, result = row - start, np.empty_like(frames)
    for age in range(num_frames):
        older = frames[start, env, num_frames - 1 - np.maximum(age - since, 0)]
        result[..., num_frames - 1 - age] = np.where(age < since, newest[np.maximum(row - age, 0), env], older)
    return result


def num_stacked_frames(leaf: np.ndarray, done: np.ndarray, wanted: int | None) -> int:
    """Return the number of frames stacked in each observation; 1 if observations are to be stored unchanged.

    Args:
        leaf: One leaf of the observations of a rollout, (T + 1, E, ...).
        done: (T + 1, E) bool, whether an observation is the first of its episode.
        wanted: Number of frames; None detects stacks of uint8 images, which shift by one frame per step.

    Raises:
        ConfigError: The observations are not stacks of `wanted` frames.
    """
    if leaf.ndim != 5 or wanted == 1:
        return 1
    num_frames, channels = wanted or leaf.shape[2], leaf.shape[2]
    if channels % num_frames:
        raise ConfigError(f"stacked_frames must divide the {channels} channels of images, got {num_frames}")
    if wanted is None and (leaf.dtype != np.uint8 or num_frames < 2):
        return 1
    size = channels // num_frames
    goes_on = ~done[1:]
    moved_on = (leaf[1:, :, :-size] == leaf[:-1, :, size:]).all(axis=(2, 3, 4))
    if wanted is None:
        return num_frames if goes_on.any() and moved_on[goes_on].mean() > 0.5 else 1
    if goes_on.any() and not moved_on[goes_on].any():
        raise ConfigError(f"stacked_frames={wanted}, but stacks do not shift by one frame per step; "
                          "leave stacked_frames out")
    return num_frames
