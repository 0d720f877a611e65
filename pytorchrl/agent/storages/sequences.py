"""Replay of sequences for actors with memory: Kapturowski et al. 2019 (R2D2), section 2.3.

Each step is stored only once. A sequence is a *window* of steps in one episode of one environment: up to `burn_in`
steps, which only warm up the memory, and then `length` trained steps, which the loss covers. The row of the
first trained step identifies the window and stores its priority. E = environments, B = windows drawn, H = size of a
memory state, W = steps of burn-in, L = `length`, n = `n_step`.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from typing_extensions import override

from pytorchrl.agent.data import DataKind, RolloutData, SequenceBatch
from pytorchrl.agent.options import option
from pytorchrl.agent.schedules import Schedule
from pytorchrl.agent.storages.base import Storage, StorageActor
from pytorchrl.agent.storages.observation_columns import SlotPool, write_extras
from pytorchrl.agent.storages.per import PERBuffer
from pytorchrl.agent.storages.replay import ReplayBuffer
from pytorchrl.agent.storages.ring import Ring
from pytorchrl.agent.storages.sequence_batch import Walk, take_sequences
from pytorchrl.errors import ConfigError, Problem
from pytorchrl.support.untyped import Forwarded, StateDict


class _Window(NamedTuple):
    """A window (a sequence of steps that is drawn as a whole), described by row ids."""

    start: int
    """Id of the row of the first trained step."""
    warm: int
    """Id of the window's first row, which is a burn-in row if the window has a burn-in."""
    num_warm: int
    """Number of burn-in rows."""


class EpisodeWindows:
    """The windows (sequences of steps, each drawn as a whole) of one episode, found as the steps arrive.

    The trained steps of window k begin k * `period` steps after the first step of the episode. The `burn_in` steps
    before the trained steps are the burn-in of the window; near the start of the episode, there are fewer. The windows
    end with the first window whose trained steps include the last step of the episode.

    If the start of the episode is unknown, the trained steps of window k begin `burn_in` + k * `period` steps after the
    first known step, so that every burn-in is complete.

    Args:
        options: Options of the storage.
        from_start: Whether the next step is the first of the episode.
    """

    def __init__(self, options: UniformSequenceBuffer.Options, from_start: bool) -> None:
        self._options, self.from_start = options, from_start
        self.num_steps = 0
        # These deques describe the windows that cannot be drawn yet: `_warm` contains the row ids of their first steps,
        # and `_start` contains the row ids of their first trained steps.
        self._warm: deque[int] = deque()
        self._start: deque[int] = deque()
        self._num_opened = 0

    def _trained_from(self, k: int) -> int:
        return k * self._options.period + (0 if self.from_start else self._options.burn_in)

    def _warm_from(self, k: int) -> int:
        return max(0, self._trained_from(k) - self._options.burn_in)

    def grow(self, first_id: int, count: int) -> tuple[list[int], list[_Window]]:
        """Add `count` steps with consecutive row ids that begin at `first_id`.

        Returns:
            Two lists. The first contains the ids of the new rows for which the preceding memory state must be stored,
            because a window begins there. The first row of an episode is left out: its preceding state is zero. The
            second list contains the windows that can now be drawn, because all steps of their targets have arrived.
        """
        before, self.num_steps = self.num_steps, self.num_steps + count
        wanted: list[int] = []
        while (offset := self._warm_from(self._num_opened + len(self._warm))) < self.num_steps:
            self._warm.append(first_id + offset - before)
            if (offset or not self.from_start) and self._warm[-1] not in wanted[-1:]:
                wanted.append(self._warm[-1])
        while (offset := self._trained_from(self._num_opened + len(self._start))) < self.num_steps:
            self._start.append(first_id + offset - before)
        steps = self._options.length + self._options.n_step - 1
        return wanted, list(self._open(lambda k: self._trained_from(k) + steps <= self.num_steps))

    def finish(self) -> list[_Window]:
        """Record that the episode has ended, and return its last windows, which can be drawn from now on."""
        length = self._options.length
        return list(self._open(lambda k: k == 0 or self._trained_from(k - 1) + length < self.num_steps))

    def _open(self, is_open: Callable[[int], bool]) -> Iterator[_Window]:
        while self._start and is_open(self._num_opened):
            k = self._num_opened
            self._num_opened += 1
            yield _Window(self._start.popleft(), self._warm.popleft(), self._trained_from(k) - self._warm_from(k))

    def state_dict(self) -> StateDict:
        """Return a copy of the whole state."""
        return {"from_start": self.from_start, "num_steps": self.num_steps, "warm": list(self._warm),
                "start": list(self._start), "num_opened": self._num_opened}

    @classmethod
    def from_state(cls, options: UniformSequenceBuffer.Options, state: StateDict) -> EpisodeWindows:
        """Restore an episode from its `state_dict()`."""
        episode = cls(options, state["from_start"])
        episode.num_steps, episode._num_opened = state["num_steps"], state["num_opened"]
        episode._warm, episode._start = deque(state["warm"]), deque(state["start"])
        return episode


class _WindowTable:
    """Arrays that describe windows, indexed by rows of the ring buffer; -1 means that no window or state exists."""

    def __init__(self, capacity: int) -> None:
        # These arrays are indexed by the ring index of a window's first trained step, which identifies the window:
        # `warm` contains the ring index of the window's first row, `num_warm` contains the number of burn-in steps, and
        # `other` contains the next older window with the same first row.
        self.warm = np.full(capacity, -1, np.int64)
        self.num_warm = np.zeros(capacity, np.int32)
        self.other = np.full(capacity, -1, np.int64)
        # These arrays are indexed by the ring index of a window's first row: `newest` contains the newest window with
        # that first row, and `slot` contains the index in `_states` of the memory state before that row.
        self.newest = np.full(capacity, -1, np.int64)
        self.slot = np.full(capacity, -1, np.int64)


class UniformSequenceBuffer(ReplayBuffer):
    """Replay of sequences, drawn uniformly, with the memory states that were stored during acting.

    The sequences are called windows. A window can be drawn as soon as all steps of its n-step targets have arrived, or
    its episode has ended. A window that the end of its episode has shortened is padded when it is drawn. A window is
    evicted when its first step is evicted. A window that stays incomplete, because its worker was lost, is never drawn.
    """

    provides = DataKind.SEQUENCES

    @dataclass(frozen=True, kw_only=True)
    class Options(ReplayBuffer.Options):
        """Options of `UniformSequenceBuffer`."""

        length: int = option(80, help="Number of steps of a sequence that the loss covers.", low=1)
        burn_in: int = option(
            40, help="Largest number of steps before the trained steps, which only warm up the memory.", low=0)
        period: int = option(
            40, help="Number of steps between the starts of consecutive sequences of an environment.", low=1)

        def contradictions(self) -> Iterator[Problem]:
            """Refuse a `period` that would leave gaps between sequences."""
            yield from super().contradictions()
            if self.period > self.length:
                yield Problem(f"period must not exceed length, got {self.period} > {self.length}: steps between "
                              "sequences would never be trained on", "lower period", ("period", "length"))

    options: Options

    def __init__(
        self, options: Options, *, actor: StorageActor, num_envs: int, **context: Forwarded,
    ) -> None:
        """Build the storage; see `ReplayBuffer` for the arguments.

        Raises:
            ConfigError: The storage is too small for a window.
        """
        self.check_size(options, num_envs, 1)
        super().__init__(options, actor=actor, num_envs=num_envs, **context)
        self.ring = Ring(options.size, options.stacked_frames, in_sequences=True)
        self.state_slots = SlotPool()
        self._states = {
            name: np.zeros((0, state.shape[1]), np.float32) for name, state in actor.initial_states(1).items()}
        self._episodes: dict[Hashable, list[EpisodeWindows | None]] = {}

    @classmethod
    def check_size(cls, options: Options, num_envs: int, num_sources: int, share: int | None = None) -> None:
        """Raise `ConfigError` if the storage is too small to hold windows until all their steps have arrived.

        Args:
            options: Options of this storage.
            num_envs: Number of environments of each collector.
            num_sources: Number of collectors, whose rollouts arrive in turn.
            share: Capacity of the storage in steps; None means the option `size`.

        Raises:
            ConfigError: The size is too small; the message names the smallest sufficient size.
        """
        size = options.size if share is None else share
        least = options.burn_in + options.length
        if size < least:
            raise ConfigError(
                f"a replay of sequences must store at least burn_in + length = {least} steps, got {size}; raise size, "
                "or lower burn_in or length")
        # The steps of one window and of its n-step targets are spread over at most this many rollouts.
        rollouts = -(-(least + options.n_step - 2) // options.rollout_size) + 1
        needed = rollouts * options.rollout_size * num_envs * num_sources
        if size < needed:
            raise ConfigError(
                f"a replay of size {size} would overwrite a sequence of burn_in {options.burn_in} + length "
                f"{options.length} before the sequence is complete: {num_sources} collectors x {num_envs} environments "
                f"x {rollouts} rollouts of {options.rollout_size} steps need {needed}; raise size to {needed}, or "
                "shorten sequences or rollouts")

    # Inserting

    @functools.cached_property
    def windows(self) -> _WindowTable:
        """Lookup tables of windows; created on first use, because a collector's storage does not need them."""
        return _WindowTable(self.options.size)

    def _insert(self, rollout: RolloutData, source: Hashable) -> None:
        ring, first, base = self.ring, self.ring.first, self.ring.total
        inserted = ring.insert(rollout, source)
        self._drop(np.concatenate([np.arange(first, ring.first) % ring.capacity, inserted.broken]))
        self._inserted(inserted)
        before = self._episodes.get(source, [])
        episodes = [before[e] if inserted.continued[e] and e < len(before) else None for e in range(rollout.num_envs)]
        runs = _runs(rollout)
        windows: list[_Window] = []
        for e in range(rollout.num_envs):
            first_id = base + e * rollout.num_steps
            episodes[e], wanted, found = self._follow(episodes[e], runs[e], first_id)
            self._keep_states(rollout, wanted, first_id, e)
            windows += found
        self._episodes[source] = episodes
        self._episodes = {other: self._episodes[other] for other in ring.sources}
        self._make_windows_drawable(windows)

    def _follow(self, episode: EpisodeWindows | None, runs: Sequence[_Run], first_id: int) -> tuple[
            EpisodeWindows | None, list[int], list[_Window]]:
        """Find windows in the runs of one environment (see `_Run`); `episode` is its unfinished episode, or None.

        Returns:
            The episode that continues after the rollout, or None; the ids of the rows for which the preceding memory
            state must be stored; and the windows that can now be drawn.
        """
        wanted: list[int] = []
        windows: list[_Window] = []
        for run in runs:
            if run.is_valid:
                if run.is_first or episode is None:
                    episode = EpisodeWindows(self.options, run.is_first)
                states, found = episode.grow(first_id + run.begin, run.end - run.begin)
                wanted += states
                windows += found
            if episode is not None and (run.is_last or not run.is_valid):
                windows += episode.finish()
                episode = None
        return episode, wanted, windows

    def _keep_states(self, rollout: RolloutData, ids: list[int], first_id: int, e: int) -> None:
        """Store the memory states before some rows of environment `e`.

        Args:
            rollout: The rollout that contains the rows.
            ids: Ids of the rows.
            first_id: Id of the environment's first row in the rollout.
            e: Index of the environment.
        """
        if not ids or not self._states:
            return
        slots = self.state_slots.take(len(ids))
        self.windows.slot[np.array(ids) % self.ring.capacity] = slots
        for name, states in self._states.items():
            self._states[name] = write_extras(states, slots, rollout.rhs[name].numpy()[np.array(ids) - first_id, e])

    def _make_windows_drawable(self, windows: list[_Window]) -> None:
        """Make windows drawable; skip windows whose first row, or a stacked frame of that row, has been evicted."""
        ring, book = self.ring, self.windows
        whole = [window for window in windows
                 if window.warm >= ring.first and not ring.columns["broken"][window.warm % ring.capacity]]
        for window in whole:
            start, warm = window.start % ring.capacity, window.warm % ring.capacity
            book.warm[start], book.num_warm[start] = warm, window.num_warm
            book.other[start], book.newest[warm] = book.newest[warm], start
        starts = np.array([window.start for window in whole], np.int64) % ring.capacity
        ring.make_drawable(starts)
        self._prioritize(starts, is_drawable=True)

    def _drop(self, rows: np.ndarray) -> None:
        """Discard the windows that begin at `rows` (ring indices), and the memory states before these rows."""
        if not len(rows):
            return
        book, dropped = self.windows, []
        at = book.newest[rows]
        while len(at := at[at >= 0]):
            dropped.append(at)
            at = book.other[at]
        book.newest[rows] = -1
        for starts in dropped:
            self.ring.make_drawable(starts, False)
            self._prioritize(starts, is_drawable=False)
        slots = book.slot[rows]
        self.state_slots.release(slots[slots >= 0])
        book.slot[rows] = -1

    # Drawing

    def sample(self, batch_size: int) -> SequenceBatch | None:  # type: ignore[override] # batches contain sequences
        """Draw `batch_size` sequences with replacement; return None if no sequence can be drawn."""
        if not self.num_items:
            return None
        ring = self.ring
        starts, weight = self.draw(batch_size)
        walk = self._walk(starts, int(self.windows.num_warm[starts].max()))
        states = self._states_before(self.windows.warm[starts])
        batch = take_sequences(ring, walk, states, weight, ring.ids(starts), self.algorithm.gamma, self._tensor)
        self._num_sampled += batch.num_samples
        return batch

    def _walk(self, starts: np.ndarray, burn_in: int) -> Walk:
        """Return the steps of windows as a `Walk`, whose arrays have the shape (time steps, windows).

        `starts` contains the ring index of each window's first trained step. In the arrays, this step has the time
        index `burn_in`. Shorter burn-ins are padded in front; the padding does not affect the memory.
        """
        column, book = self.ring.columns, self.windows
        shape = (burn_in + self.options.length + self.options.n_step, len(starts))
        places, is_step = np.zeros(shape, np.int64), np.zeros(shape, np.bool_)
        at, begin = book.warm[starts], burn_in - book.num_warm[starts]
        goes_on = np.ones(len(starts), np.bool_)
        for i in range(len(places)):
            places[i] = at
            row = np.maximum(at, 0)
            here = is_step[i] = (i >= begin) & goes_on & (at >= 0) & column["valid"][row]
            # After an episode's last step, `at` is the place of the final observation, where the sequence ends.
            goes_on = (i < begin) | (here & ~(column["terminated"][row] | column["truncated"][row]))
            at = np.where(here, column["link"][row], at)
        return Walk(places, is_step, burn_in, self.options.n_step)

    def _states_before(self, warm: np.ndarray) -> dict[str, np.ndarray]:
        """Return the memory states before B rows, as a (B, H) array for each network, by name.

        `warm`, (B,), contains the ring indices of these rows. The state before the first row of an episode is zero.
        """
        slots = self.windows.slot[warm]
        known = slots >= 0
        found = {name: np.zeros((len(warm), states.shape[1]), np.float32) for name, states in self._states.items()}
        for name, states in self._states.items():
            found[name][known] = states[slots[known]]
        return found

    # States

    @override
    def reset(self) -> None:
        """Discard all steps, memory states and windows."""
        super().reset()
        self.state_slots, self._episodes = SlotPool(), {}
        self.__dict__.pop("windows", None)

    @property
    def num_bytes(self) -> int:
        """Memory allocated for steps and memory states, in bytes."""
        return super().num_bytes + sum(states.nbytes for states in self._states.values())

    def _contents(self) -> StateDict:
        episodes = [(source, [None if episode is None else episode.state_dict() for episode in episodes])
                    for source, episodes in self._episodes.items()]
        return {
            **super()._contents(), "book": self._used_windows(),
            "slots": self.state_slots.state_dict(),
            "states": {name: states.copy() for name, states in self._states.items()}, "episodes": episodes}

    def _used_windows(self) -> dict[str, np.ndarray]:
        """Return a copy of the tables of windows, without the entries of rows that have never been used."""
        num_used = self.ring.num_used
        return {name: array[:num_used].copy() for name, array in vars(self.windows).items()} if num_used else {}

    def _load_contents(self, contents: StateDict) -> None:
        super()._load_contents(contents)
        self.__dict__.pop("windows", None)
        for name, array in contents["book"].items():
            getattr(self.windows, name)[:len(array)] = array
        self._states = {name: np.array(states) for name, states in contents["states"].items()}
        self.state_slots.load_state_dict(contents["slots"], min(map(len, self._states.values()), default=0))
        self._episodes = {
            source: [None if state is None else EpisodeWindows.from_state(self.options, state) for state in states]
            for source, states in contents["episodes"]}


class SequenceBuffer(UniformSequenceBuffer, PERBuffer):
    """Prioritized replay of sequences, with the memory states that were stored during acting.

    The priority of a sequence is p = (eta max d + (1 - eta) mean d + epsilon)^alpha, where d are the absolute TD errors
    of its trained steps, and eta is `priority_eta`. In all other respects, this storage is a `PERBuffer` that draws the
    sequences of a `UniformSequenceBuffer`.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(UniformSequenceBuffer.Options, PERBuffer.Options):
        """Options of `SequenceBuffer`."""

        n_step: int = option(5, help="Number of rewards summed before the bootstrap.", low=1)
        alpha: float = option(
            0.9, low=0.0, exclusive=True, help="Exponent of priorities; near 0, sampling is almost uniform.")
        beta: float | Schedule = option(
            0.6, low=0.0, exclusive=True, updatable=True,
            help="Exponent of importance weights; 1 fully corrects for non-uniform sampling.")
        priority_eta: float = option(
            0.9, low=0.0, high=1.0,
            help="Weight of the largest error in the priority of a sequence; the weight of the mean error is 1 minus "
                 "priority_eta.")

    options: Options

    def item_errors(self, batch: SequenceBatch, errors: object) -> np.ndarray:
        """Return one error for each sequence, from which its priority is computed.

        The error is eta max d + (1 - eta) mean d, where d are the absolute TD errors of the valid steps, and eta is
        `priority_eta`.

        Args:
            batch: The drawn batch.
            errors: (L, B) TD errors, signed or absolute.

        Returns:
            One error for each sequence, (B,) float.
        """
        valid, eta = batch.valid.cpu().numpy(), self.options.priority_eta
        absolute = np.where(valid, np.abs(np.asarray(errors)), 0.0)
        mean: np.ndarray = absolute.sum(0) / valid.sum(0)
        return eta * absolute.max(0) + (1.0 - eta) * mean


SEQUENCES_OF: Mapping[type[Storage], type[UniformSequenceBuffer]] = MappingProxyType({
    ReplayBuffer: UniformSequenceBuffer, PERBuffer: SequenceBuffer})
"""Storage of transitions -> the storage that draws sequences in the same way, for actors with memory."""


class _Run(NamedTuple):
    """Consecutive rows of an environment in a rollout: valid rows of one episode, or a single invalid row."""

    begin: int
    end: int
    is_valid: bool
    is_first: bool
    """Whether an episode begins with the first row."""
    is_last: bool
    """Whether the episode ends with the last row."""


def _runs(rollout: RolloutData) -> list[list[_Run]]:
    """Split each environment's rows of a rollout into runs (see `_Run`), in chronological order."""
    valid, first = rollout.valid.numpy(), rollout.done.numpy()[:-1]
    last = rollout.terminated.numpy() | rollout.truncated.numpy()
    begins = first | ~valid
    begins[1:] |= last[:-1] | ~valid[:-1]
    begins[0] = True
    found = []
    for e in range(rollout.num_envs):
        bounds = [*np.flatnonzero(begins[:, e]).tolist(), rollout.num_steps]
        found.append([_Run(begin, end, bool(valid[begin, e]), bool(first[begin, e]), bool(last[end - 1, e]))
                      for begin, end in itertools.pairwise(bounds)])
    return found
