"""Ring buffer of transitions for replay. C = capacity in rows, T = steps, E = environments, B = rows drawn.

Rows are numbered 0, 1, 2, ... in order of insertion. The number of a row is its *id*, and its *place* is id mod C. The
rows `first` to `total - 1` are resident. In a rollout, the rows of one environment are consecutive. The *link* of a row
is the place of the next observation: the next row or, at the end of an episode or rollout, an extra observation (see
`observation_columns`). A *source* is a collector; its rollouts are consecutive in time. If a rollout continues the
source's previous rollout, the two are linked, and the extra observation between them is released.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from pytorchrl.agent.data import HostRows, RolloutData
from pytorchrl.agent.recursion import as_values
from pytorchrl.agent.storages.observation_columns import (
    DeviceColumn,
    ObservationColumn,
    PlainColumn,
    SlotPool,
    StackedColumn,
    num_stacked_frames,
    numpy_dtype,
    write_rows,
)
from pytorchrl.errors import ArgumentError, CheckpointError, ConfigError
from pytorchrl.files.atomic import saved_int
from pytorchrl.support.untyped import StateDict

_NO_ROWS = np.zeros(0, dtype=np.int64)
_UNUSED = np.zeros((0, 0), dtype=np.bool_)
_DTYPES = {"reward": np.float32, "link": np.int64} | dict.fromkeys(
    ("terminated", "truncated", "valid", "drawable", "broken", "used"), np.bool_)
MASK = "mask"
"""Name of the column of action masks; columns of observations are called `obs/<leaf>`."""


class RolloutColumns(NamedTuple):
    """Views of the tensors of one rollout, as NumPy arrays."""

    leaves: dict[str, np.ndarray]
    """Observations and action masks by column, (T+1, E, ...); for a rollout on a device, tensors there."""
    columns: dict[str, np.ndarray]
    """The other columns, (E, T, ...)."""
    done: np.ndarray
    """(T+1, E) bool; whether an observation is the first of its episode."""


class RolloutReader:
    """Reads rollouts as NumPy columns.

    A collector in the same process passes the same tensors, with new contents, for each full rollout. If tensors are
    read for the second time in a row, their views are kept, because creating them takes longer than copying a short
    rollout. Views of other tensors are not kept, because these would keep the memory of received rollouts allocated.
    """

    def __init__(self, in_sequences: bool) -> None:
        """Prepare for rollouts; with `in_sequences`, `done` is also one of the columns, without its last row."""
        self._in_sequences = in_sequences
        self._previous: weakref.ref[Tensor] | None = None  # the rewards of the previous rollout
        self._kept: tuple[list[object], RolloutColumns] | None = None  # names and tensors of a rollout, and its views

    def read(self, rollout: RolloutData) -> tuple[RolloutColumns, bool]:
        """Return views of a rollout, and whether these are the views of an earlier rollout, with new contents."""
        sources: list[object] = [
            *rollout.obs, *rollout.obs.values(), rollout.action, rollout.reward, rollout.terminated, rollout.truncated,
            rollout.valid, rollout.done, rollout.mask]
        if self._kept is not None:
            kept, views = self._kept
            if len(sources) == len(kept) and all(map(operator.is_, sources, kept)):
                return views, True
        if rollout.host is not None:
            return self._on_device(rollout, rollout.host), False
        leaves = {f"obs/{name}": leaf.numpy() for name, leaf in rollout.obs.items()}
        if rollout.mask is not None:
            leaves[MASK] = rollout.mask.numpy()
        columns = {name: getattr(rollout, name).numpy().swapaxes(0, 1) for name in (
            "action", "reward", "terminated", "truncated", "valid")}
        done = rollout.done.numpy()
        if self._in_sequences:
            columns["done"] = done[:-1].T
        views = RolloutColumns(leaves, columns, done)
        is_repeated = self._previous is not None and self._previous() is rollout.reward
        self._kept = (sources, views) if is_repeated else None
        self._previous = weakref.ref(rollout.reward)
        return views, False

    def _on_device(self, rollout: RolloutData, host: HostRows) -> RolloutColumns:
        """Return the columns of a rollout on a device; its observations stay there."""
        columns = {name: getattr(host, name).swapaxes(0, 1) for name in (
            "action", "reward", "terminated", "truncated", "valid")}
        leaves = cast("dict[str, np.ndarray]", {f"obs/{name}": leaf for name, leaf in rollout.obs.items()})
        return RolloutColumns(leaves, columns, host.done)


class Inserted(NamedTuple):
    """Result of inserting a rollout."""

    rows: np.ndarray
    """(T·E,) int64, places of the written rows."""
    broken: np.ndarray
    """(N,) int64, places of resident rows that can no longer be drawn, because older frames of their stacks were
    evicted."""
    continued: np.ndarray
    """(E,) bool, whether each environment continues from the end of the collector's previous rollout."""
    errors: np.ndarray | None = None
    """(T·E,) float, absolute TD errors of the rows if the collector computed them, else None."""


StepOutcome = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]
"""See `Ring.window`."""


class Window(NamedTuple):
    """Result of `Ring.window`: B transitions of up to n steps each."""

    last: np.ndarray
    """(B,) int64, place of the last row of each transition."""
    ret: np.ndarray
    """(B,) float64, or float32 if n = 1; discounted sum of the m <= n rewards."""
    discount: np.ndarray
    """(B,) float64, gamma^m, or 0 after a termination."""
    num_steps: np.ndarray
    """(B,) int64, the numbers of steps m."""


@dataclass(slots=True)
class _Head:
    """The last step of each environment in the newest rollout of a source (a collector). All arrays have shape (E,)."""

    ids: np.ndarray
    """Id of the row that contains this step."""
    places: np.ndarray
    """Place of the extra observation after this step; 0 if `final_obs` contains the observation after it."""
    done: np.ndarray
    """Whether the observation after this step is the first of an episode."""
    after: bytes | None = None
    """`done` and the observations after this step, as bytes. None for stacks (their older frames may be evicted), on a
    device, if one of the observations is not an extra one, or after loading a state."""
    number: int = -1
    """Number of the rollout on a device; see `HostRows`."""


class Ring:
    """Ring buffer of transitions, allocated when the first rollout is inserted.

    Attributes:
        device: Device of the observations, which may be set before the first rollout; None: they are arrays.
    """

    def __init__(self, capacity: int, stacked_frames: int | None = None, in_sequences: bool = False) -> None:
        """Create an empty ring.

        Args:
            capacity: C, the number of rows.
            stacked_frames: Number of frames stacked in an observation; each frame is stored once. With None, stacks
                are detected; with 1, observations are stored unchanged.
            in_sequences: Whether rows are drawn in sequences. If so, the ring also stores where episodes begin, and a
                row can be drawn only after `make_drawable`; otherwise every valid row can be drawn immediately.
        """
        self.capacity = capacity
        self._stacked_frames, self._in_sequences = stacked_frames, in_sequences
        self._reader = RolloutReader(in_sequences)
        self.device: torch.device | None = None
        self.first = self.total = 0
        self.num_drawable = 0
        self.observations: dict[str, ObservationColumn] = {}
        self.columns: dict[str, np.ndarray] = {}
        self.counters = dict.fromkeys(("inserted", "evicted", "evicted_unused", "resident"), 0)
        self.extras = SlotPool()
        self._is_loaded = False
        self._heads: dict[Hashable, _Head] = {}
        self._layout: dict[str, tuple[tuple[int, ...], str, int]] = {}
        """Column -> shape, dtype, number of stacked frames (1 if stored unchanged)."""
        self._expected: dict[str, tuple[tuple[int, ...], np.dtype[np.generic]]] = {}
        """Column -> shape and dtype; empty until the first rollout is checked."""

    # Writing

    def insert(self, rollout: RolloutData, source: Hashable) -> Inserted:
        """Append a rollout; evict the oldest rows if the ring is full.

        Args:
            rollout: T >= 1 steps.
            source: Identifier of the collector. If an environment's first observation equals its last observation in
                the collector's previous rollout, the new rows continue the rows of that rollout.

        Raises:
            ConfigError: The rollout has more rows than the ring.
            ArgumentError: The columns of the rollout differ from those of the first rollout.
        """
        (leaves, columns, done), are_known = self._reader.read(rollout)
        num_envs, num_steps = columns["reward"].shape
        count = num_steps * num_envs
        if count > self.capacity:
            raise ConfigError(
                f"a rollout of {num_envs} environments x {num_steps} steps does not fit in a replay of size "
                f"{self.capacity}; raise size or lower rollout_size")
        if not self.columns:
            self._allocate(leaves, columns, done)
        if not (are_known and self._expected):
            self._check(leaves, columns)
        broken = self.evict(self.total + count - self.capacity - self.first)
        start = self.total % self.capacity
        rows = np.arange(start, start + count)
        if start + count > self.capacity:
            rows %= self.capacity
        previous, are_reused = self._previous(
            self._heads.pop(source, None), leaves, done[0], rows[::num_steps], rollout.host)
        heads = previous if are_reused else -1 - self.extras.take(num_envs)
        places = np.empty((num_steps + 1, num_envs), np.int64)
        places[:-1], places[-1] = rows.reshape(num_envs, num_steps).T, heads
        ends = _final_index(rollout) if rollout.final_index.shape[0] else None
        finals = self._write_observations(leaves, rollout, places, previous, ends)
        if not are_reused:
            self._release(previous[previous < 0])
        link, num_ended = places[1:], 0
        if ends is not None:
            link, heads, num_ended = self._end_episodes(link, heads, ends, finals)
        for name, values in (*columns.items(), ("link", link.T)):
            write_rows(self.columns[name], start, values)
        written = rows if start + count > self.capacity else slice(start, start + count)
        self.columns["drawable"][written] = False if self._in_sequences else self.columns["valid"][written]
        self.columns["broken"][written] = self.columns["used"][written] = False
        num_valid = int(np.count_nonzero(columns["valid"]))
        self.num_drawable += 0 if self._in_sequences else num_valid
        start, self.total = self.total, self.total + count
        self._heads[source] = _Head(
            np.arange(start + num_steps - 1, self.total, num_steps), heads, done[-1].copy(),
            None if num_ended or self._has_stacks or self.device is not None else _bytes(leaves, done[-1], -1),
            -1 if rollout.host is None else rollout.host.number)
        self.counters["inserted"] += num_valid
        self.counters["resident"] += num_valid
        return Inserted(rows, broken, previous < 0)

    def make_drawable(self, rows: np.ndarray, drawable: bool = True) -> None:
        """Allow or forbid drawing the rows at the places in `rows`, (N,); no place may occur twice."""
        changed = np.count_nonzero(self.columns["drawable"][rows] != drawable)
        self.columns["drawable"][rows] = drawable
        self.num_drawable += int(changed) if drawable else -int(changed)

    def evict(self, count: int) -> np.ndarray:
        """Evict the `count` oldest rows.

        Returns:
            Places of resident rows that can no longer be drawn, because their frame stacks contain evicted frames.
        """
        if count <= 0:
            return _NO_ROWS
        column, start = self.columns, self.first % self.capacity
        rows: slice | np.ndarray = slice(start, start + count)  # NumPy indexes faster by slices than by arrays
        if start + count > self.capacity:
            rows = np.arange(start, start + count) % self.capacity
        valid, link = column["valid"][rows], column["link"][rows]
        num_valid = int(np.count_nonzero(valid))
        self.counters["evicted"] += num_valid
        self.counters["resident"] -= num_valid
        self.counters["evicted_unused"] += int(np.count_nonzero(valid > column["used"][rows]))
        self.num_drawable -= int(np.count_nonzero(column["drawable"][rows]))
        if self._has_stacks:
            for leaf in self.observations.values():
                leaf.free(np.arange(start, start + count) % self.capacity)
        self._release(link[link < 0])
        self.first += count
        self._heads = {source: head for source, head in self._heads.items() if head.ids[-1] >= self.first}
        return self._break(link[link >= 0], start, count) if self._has_stacks else _NO_ROWS

    def clear(self) -> None:
        """Evict all rows. The memory stays allocated, and the ids of the evicted rows are not used again."""
        if self.columns:
            self.evict(self.total - self.first)
            self.columns["drawable"][:] = False

    # Reading

    def resident(self, ids: np.ndarray) -> np.ndarray:
        """Return whether the row of each id is in the ring, (N,) bool; raise `ArgumentError` for an unassigned id."""
        if len(ids) and (ids.min() < 0 or ids.max() >= self.total):
            raise ArgumentError(f"ids must be in [0, {self.total}), got {ids.min()} to {ids.max()}")
        return ids >= self.first

    def ids(self, places: np.ndarray) -> np.ndarray:
        """Return the ids, (N,) int64, of N resident rows, given their places in the ring."""
        return places if self.total <= self.capacity else self.first + (places - self.first) % self.capacity

    def take(self, places: np.ndarray) -> dict[str, np.ndarray]:
        """Return N observations, leaf -> (N, ...), given their rows, or the negative numbers of extra observations."""
        return {name[4:]: leaf.take(places) for name, leaf in self.observations.items() if name != MASK}

    def take_mask(self, places: np.ndarray) -> np.ndarray | None:
        """Return the action masks of the N observations at `places`, (N, actions) bool; None if no masks are stored."""
        return self.observations[MASK].take(places) if MASK in self.observations else None

    def window(self, rows: np.ndarray, n_step: int, gamma: float, outcome: StepOutcome | None = None) -> Window:
        """Return the n-step transitions that begin at B rows of the ring; `rows` contains the places of these rows.

        A transition has m = n steps, or fewer if the episode or the stored data end earlier. Its return is
        r_t + gamma r_{t+1} + ... + gamma^{m-1} r_{t+m-1}, and its discount is gamma^m (1 - terminated_{t+m-1}).

        Args:
            rows: (B,) places.
            n_step: n, the largest number of steps.
            gamma: Discount of one step.
            outcome: Function that returns the rewards and terminations of K steps, given their places (K,) and the
                indices (K,) of their transitions; None: those that are stored.
        """
        column = self.columns
        outcome = outcome or self._outcome
        num_steps, running = np.ones(len(rows), dtype=np.int64), np.arange(len(rows))
        ret, terminated = outcome(rows, running)
        if n_step == 1:
            return Window(rows, ret, np.where(terminated, 0.0, gamma), num_steps)
        ret, last = ret.astype(np.float64), rows.copy()
        for k in range(1, n_step):
            at = last[running]
            link = column["link"][at]
            on = ~(column["terminated"][at] | column["truncated"][at] | terminated[running]) & (link >= 0)
            on &= column["valid"][np.maximum(link, 0)]
            running, after = running[on], link[on]
            reward, terminated[running] = outcome(after, running)
            ret[running] += gamma**k * reward
            last[running], num_steps[running] = after, k + 1
        return Window(last, ret, np.where(terminated, 0.0, gamma**num_steps), num_steps)

    def _outcome(self, rows: np.ndarray, drawn: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self.columns["reward"][rows], self.columns["terminated"][rows]

    @property
    def sources(self) -> list[Hashable]:
        """Identifiers of the collectors whose newest row is still in the ring."""
        return list(self._heads)

    @property
    def heads(self) -> dict[Hashable, np.ndarray]:
        """For each of `sources`, the ids of each environment's newest row, (E,) int64; some may be evicted."""
        return {source: head.ids for source, head in self._heads.items()}

    @property
    def num_bytes(self) -> int:
        """Allocated memory in bytes."""
        num_bytes = sum(leaf.num_bytes for leaf in self.observations.values())
        return num_bytes + sum(column.nbytes for column in self.columns.values())

    # State

    @property
    def num_used(self) -> int:
        """Number of places in the ring that have been written at least once; all places after them are empty."""
        return min(self.total, self.capacity)

    def state_dict(self) -> StateDict:
        """Return a copy of the whole state."""
        num_rows = self.num_used
        return {
            "capacity": self.capacity, "first": self.first, "total": self.total, "num_drawable": self.num_drawable,
            "counters": dict(self.counters), "extras": self.extras.state_dict(), "layout": dict(self._layout),
            "columns": {name: column[:num_rows].copy() for name, column in self.columns.items()},
            "leaves": {name: leaf.state_dict(num_rows) for name, leaf in self.observations.items()},
            "heads": [(source, head.ids.copy(), head.places.copy(), head.done.copy())
                      for source, head in self._heads.items()]}

    def load_state_dict(self, state: StateDict) -> None:
        """Restore a state from `state_dict()`.

        Raises:
            ConfigError: The saved ring had another capacity, or stacks of frames, which are never stored on a device.
        """
        if state["capacity"] != self.capacity:
            raise ConfigError(f"a replay of size {self.capacity} cannot load the state of one with size "
                              f"{state['capacity']}; use the same size, or start a new run")
        if self.device is not None and any(num_frames > 1 for *_, num_frames in state["layout"].values()):
            raise ConfigError(
                "the saved replay stores each frame of a stack once, on the host, but the environments are on "
                f"{self.device}; resume with environments on the CPU, or start a new run")
        self.first, self.total, self.num_drawable = (
            saved_int(state[name]) for name in ("first", "total", "num_drawable"))
        self.counters = {name: saved_int(state["counters"][name]) for name in self.counters}
        self._make_leaves(state["layout"])
        for name, leaf in self.observations.items():
            leaf.load_state_dict(state["leaves"][name])
        self.extras.load_state_dict(
            state["extras"], min((leaf.num_extras for leaf in self.observations.values()), default=0))
        self.columns = {}
        for name, column in state["columns"].items():
            self.columns[name] = np.zeros((self.capacity, *column.shape[1:]), column.dtype)
            self.columns[name][:len(column)] = column
        self._heads = {source: _Head(np.array(ids), np.array(places), np.array(done))
                       for source, ids, places, done in state["heads"]}
        self._is_loaded = True
        self._check_loaded({name: len(column) for name, column in state["columns"].items()})

    # Internals

    def _check_loaded(self, lengths: dict[str, int]) -> None:
        """Raise `ValueError` if the loaded state contradicts itself; `lengths` contains the lengths of its columns."""
        heads, leaves = self._heads.values(), self.observations.values()
        num_extras = min((leaf.num_extras for leaf in leaves), default=0)
        drawable, link = (self.columns[name] for name in ("drawable", "link")) if self.columns else (_NO_ROWS, _NO_ROWS)
        if not (0 <= self.first <= self.total <= self.first + self.capacity
                and set(lengths.values()) <= {self.num_used}
                and all(self.columns[name].dtype == dtype for name, dtype in _DTYPES.items() if self.columns)
                and self.num_drawable == np.count_nonzero(drawable)
                and np.all((-num_extras <= link) & (link < self.capacity))
                and all(head.ids.dtype == head.places.dtype == np.int64 and head.done.dtype == np.bool_
                        and head.ids.shape == head.places.shape == head.done.shape == (len(head.ids),)
                        and np.all((head.ids >= 0) & (head.ids < self.total))
                        and np.all((-num_extras <= head.places) & (head.places <= 0)) for head in heads)):
            raise ValueError("the saved replay contradicts itself: its counts, columns and links do not fit together")

    def _allocate(self, leaves: dict[str, np.ndarray], columns: dict[str, np.ndarray], done: np.ndarray) -> None:
        layout = {}
        for name, leaf in leaves.items():
            num_frames = num_stacked_frames(leaf, done, self._stacked_frames) if self.device is None else 1
            layout[name] = (tuple(leaf.shape[2:]), numpy_dtype(leaf).str, num_frames)
        if (self._stacked_frames or 1) > 1 and all(num_frames == 1 for *_, num_frames in layout.values()):
            raise ConfigError(f"stacked_frames={self._stacked_frames} needs observations with three axes, got "
                              f"{ {name: shape for name, (shape, *_) in layout.items()} }; "
                              "leave stacked_frames out")
        self._make_leaves(layout)
        self.columns = {name: np.zeros((self.capacity, *values.shape[2:]), values.dtype)
                        for name, values in columns.items()}
        self.columns["link"] = np.zeros(self.capacity, dtype=np.int64)
        for name in ("drawable", "broken", "used"):
            self.columns[name] = np.zeros(self.capacity, dtype=np.bool_)

    def _make_leaves(self, layout: dict[str, tuple[tuple[int, ...], str, int]]) -> None:
        self._layout, self._expected = layout, {}
        self._has_stacks = any(num_frames > 1 for *_, num_frames in layout.values())
        self.observations = {
            name: DeviceColumn(self.capacity, tuple(shape), np.dtype(dtype), self.device) if self.device is not None
            else PlainColumn(self.capacity, tuple(shape), np.dtype(dtype)) if num_frames == 1
            else StackedColumn(self.capacity, tuple(shape), np.dtype(dtype), num_frames)
            for name, (shape, dtype, num_frames) in layout.items()}

    def _check(self, leaves: dict[str, np.ndarray], columns: dict[str, np.ndarray]) -> None:
        if not self._expected:
            self._expected = {name: (tuple(shape), np.dtype(dtype)) for name, (shape, dtype, _) in self._layout.items()}
            self._expected |= {name: (self.columns[name].shape[1:], self.columns[name].dtype) for name in columns
                               if name in self.columns}
        got = {name: (tuple(values.shape[2:]), numpy_dtype(values)) for name, values in {**leaves, **columns}.items()}
        if got != self._expected:
            kind = CheckpointError if self._is_loaded else ArgumentError
            raise kind(f"a rollout must have the columns of the first rollout, {self._expected}, got {got}")

    def _break(self, rows: np.ndarray, start: int, count: int) -> np.ndarray:
        """Forbid drawing the rows whose frame stacks contain evicted frames, and mark these rows as broken.

        Args:
            rows: (N,) places of the rows that follow the evicted rows in time; evicted rows among these are ignored.
            start: Place of the first evicted row.
            count: Number of evicted rows.

        Returns:
            Places of the newly broken rows; rows that earlier calls marked are left out.
        """
        rows, broken = rows[(rows - start) % self.capacity >= count], []
        for _ in range(max(leaf.depth for leaf in self.observations.values())):
            if not len(rows):
                break
            rows = rows[np.any([leaf.broken(rows, start, count) for leaf in self.observations.values()], axis=0)]
            broken.append(rows[~self.columns["broken"][rows]])
            self.columns["broken"][rows] = True
            self.make_drawable(rows, False)
            rows = self.columns["link"][rows]
            rows = rows[rows >= 0]
        return np.concatenate(broken) if broken else np.zeros(0, dtype=np.int64)

    def _previous(
        self, head: _Head | None, leaves: dict[str, np.ndarray], done: np.ndarray, rows: np.ndarray,
        host: HostRows | None,
    ) -> tuple[np.ndarray, bool]:
        """Link environments to the collector's previous rollout; see `_continued`, which handles the rare cases.

        Returns:
            The result of `_continued`, and whether the last observations of the new rollout take these places.
        """
        if head is None or len(head.ids) != len(rows):
            return np.zeros(len(rows), dtype=np.int64), False
        if head.after is None or head.after != _bytes(leaves, done, 0) or head.ids[0] < self.first:
            return self._continued(head, leaves, done, rows, host), False
        self.columns["link"][head.ids % self.capacity] = rows
        return head.places, True

    def _continued(
        self, head: _Head, leaves: dict[str, np.ndarray], done: np.ndarray, rows: np.ndarray, host: HostRows | None,
    ) -> np.ndarray:
        """Link, for each environment, the last row of the collector's previous rollout to the first row of the new one.

        An environment is linked only if its first observation in `leaves` equals the observation after the last step
        of the previous rollout. Observations on a device are not compared; there, the numbers in `host` tell whether
        the rollout continues the previous one. `rows`, (E,), contains the places of the new rollout's first rows.

        Returns:
            (E,) int64, the place of the extra observation that a linked environment no longer needs; 0 if not linked.
        """
        is_next = self.device is None or (host is not None and host.number == head.number + 1)
        if not is_next or not np.count_nonzero(head.places):  # faster than comparisons, in the step after an episode
            return np.zeros(len(rows), dtype=np.int64)
        last = head.ids % self.capacity
        same = (head.ids >= self.first) & (head.places < 0) & (head.done == done) & ~self.columns["broken"][last]
        if not np.count_nonzero(same):
            return np.zeros(len(rows), dtype=np.int64)
        for name, leaf in (self.observations if self.device is None else {}).items():
            equal = leaf.take(head.places) == leaves[name][0]
            if np.count_nonzero(equal) < equal.size:
                same &= equal.reshape(len(equal), -1).all(axis=1)
        self.columns["link"][last[same]] = rows[same]
        return np.where(same, head.places, 0)

    def _write_observations(
        self, leaves: dict[str, np.ndarray], rollout: RolloutData, places: np.ndarray, previous: np.ndarray,
        ends: np.ndarray | None,
    ) -> np.ndarray:
        """Write a rollout's observations; its first rows replace the extra observations at `previous` (0: none).

        Args:
            leaves: Observations by column, (T+1, E, ...).
            rollout: The rollout, whose final observations (the last ones of K episodes) are written, too.
            places: (T+1, E) int64, the place of each observation.
            previous: (E,) int64.
            ends: (2, K) int64, the steps and environments of the final observations; None if there are none.

        Returns:
            (K,) int64, the places of the final observations.
        """
        cut, before, finals = _UNUSED, _NO_ROWS, _NO_ROWS
        if self._has_stacks:
            cut = np.zeros(places.shape, dtype=np.bool_)
        if ends is not None:
            finals = -1 - self.extras.take(ends.shape[1])
            if self._has_stacks:
                cut[ends[0] + 1, ends[1]] = True  # the previous row links to the final observation, not to this row
                before = places[ends[0], ends[1]]
        start = self.total % self.capacity
        for name, leaf in self.observations.items():
            leaf.write(start, leaves[name], places, previous, cut)
            if ends is not None:
                last = rollout.final_mask if name == MASK else rollout.final_obs[name[4:]]
                values = np.ones((len(finals), *leaves[name].shape[2:]), np.bool_) if last is None else as_values(last)
                leaf.write_finals(values, finals, before)
        return finals

    def _end_episodes(
        self, link: np.ndarray, heads: np.ndarray, ends: np.ndarray, finals: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray, int]:
        """Link steps that end episodes to final observations; see `_write_observations` for `ends` and `finals`.

        Args:
            link: (T, E) int64, the place of the observation after each step.
            heads: (E,) int64, the places of the observations after the last steps.
            ends: (2, K) int64.
            finals: (K,) int64.

        Returns:
            The new `link`; the new `heads`, which are 0 where the last step ends an episode; and the number of these.
        """
        link, heads = link.copy(), heads.copy()
        link[ends[0], ends[1]] = finals
        ended = link[-1] != heads
        unused = heads[ended]
        self._release(unused)
        heads[ended] = 0
        return link, heads, len(unused)

    def _release(self, extras: np.ndarray) -> None:
        if len(extras):
            for leaf in self.observations.values():
                leaf.free(extras)
            self.extras.release(-1 - extras)


def _final_index(rollout: RolloutData) -> np.ndarray:
    """Return the steps and environments of the final observations, (2, K) int64."""
    index: np.ndarray = rollout.final_index.numpy() if rollout.host is None else rollout.host.final_index
    return index.T


def _bytes(leaves: dict[str, np.ndarray], done: np.ndarray, step: int) -> bytes:
    """Return `done` (E,) and the observations (T+1, E, ...) of one step as bytes, to compare all at once."""
    return b"".join([done.tobytes(), *[leaf[step].tobytes() for leaf in leaves.values()]])
