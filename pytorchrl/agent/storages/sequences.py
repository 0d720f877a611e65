"""Replay of sequences, for actors with memory: Kapturowski et al. 2019 (R2D2), section 2.3.

Steps are kept once, as in other replay. A sequence is a *window* on the steps of one episode of one environment: `length`
steps to train on, after up to `burn_in` steps that only warm the memory up. A window is known by its first trained row,
which is also its place among the priorities. E = environments, B = windows drawn, H = size of a memory state, W = steps of
warm-up, L = `length`, n = `n_step`.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from pytorchrl.agent.data import DataKind, RolloutData, SequenceBatch
from pytorchrl.agent.options import option
from pytorchrl.agent.schedules import Schedule
from pytorchrl.agent.storages.leaves import Slots, write_extras
from pytorchrl.agent.storages.replay import PERBuffer
from pytorchrl.agent.storages.ring import Ring
from pytorchrl.agent.storages.sequence_batch import Walk, take_sequences
from pytorchrl.errors import ConfigError


class _Window(NamedTuple):
    """Ids of rows, and how many rows lie between them."""

    start: int
    """First row that is trained on."""
    warm: int
    """First row at all."""
    num_warm: int


class Episode:
    """The windows on one environment's episode, as its steps come in.

    Window k begins k * `period` steps after the episode's first step, with a warm-up of up to `burn_in` steps before it.
    The first window that reaches the episode's end is the last one. Where an episode is known from somewhere in the middle
    only, the first window begins `burn_in` steps later, so that its warm-up is whole.

    Args:
        options: Of `SequenceBuffer`.
        from_start: Whether the first step to come is the first of the episode.
    """

    def __init__(self, options: Any, from_start: bool) -> None:
        self._options, self.from_start = options, from_start
        self.num_steps = 0
        # Of windows that cannot be drawn yet, by number: ids of their first row, and of their first trained row.
        self._warm: deque[int] = deque()
        self._start: deque[int] = deque()
        self._num_opened = 0

    def _trained_from(self, k: int) -> int:
        return k * self._options.period + (0 if self.from_start else self._options.burn_in)

    def _warm_from(self, k: int) -> int:
        return max(0, self._trained_from(k) - self._options.burn_in)

    def grow(self, first_id: int, count: int) -> tuple[list[int], list[_Window]]:
        """Take `count` further steps, whose rows have the ids from `first_id` on.

        Returns:
            Ids of those rows before which windows want the memory's state (not of the first step of an episode, where it is
            zero), and the windows that can be drawn now: all steps of their targets are there.
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
        """The episode is over: the windows that can be drawn now, up to the one that reaches its end."""
        length = self._options.length
        return list(self._open(lambda k: k == 0 or self._trained_from(k - 1) + length < self.num_steps))

    def _open(self, is_open: Any) -> Iterator[_Window]:
        while self._start and is_open(self._num_opened):
            k = self._num_opened
            self._num_opened += 1
            yield _Window(self._start.popleft(), self._warm.popleft(), self._trained_from(k) - self._warm_from(k))

    def state_dict(self) -> dict[str, Any]:
        """Everything."""
        return {"from_start": self.from_start, "num_steps": self.num_steps, "warm": list(self._warm),
                "start": list(self._start), "num_opened": self._num_opened}

    @classmethod
    def from_state(cls, options: Any, state: dict[str, Any]) -> Episode:
        """What `state_dict()` was of."""
        episode = cls(options, state["from_start"])
        episode.num_steps, episode._num_opened = state["num_steps"], state["num_opened"]
        episode._warm, episode._start = deque(state["warm"]), deque(state["start"])
        return episode


class _Book:
    """What is known of windows, by the places of their rows; -1 where there is none."""

    def __init__(self, capacity: int) -> None:
        # Of a first trained row: the window's first row, its steps of warm-up, and another window with the same first row.
        self.warm = np.full(capacity, -1, np.int64)
        self.num_warm = np.zeros(capacity, np.int32)
        self.other = np.full(capacity, -1, np.int64)
        # Of a window's first row: the newest window from there, and the slot of the state before it.
        self.newest = np.full(capacity, -1, np.int64)
        self.slot = np.full(capacity, -1, np.int64)


class SequenceBuffer(PERBuffer):
    """Prioritised replay of sequences with the memory's state as it was stored when acting.

    With d the absolute errors of a window's trained steps, p = (eta max d + (1 - eta) mean d + epsilon)^alpha; eta is
    `priority_eta`. All else is as of `PERBuffer`.

    A window can be drawn once the steps of its n-step targets have come, or its episode is over; then it may be shorter, and
    is padded. It goes as soon as one of its steps is overwritten. What a source leaves off in the middle of a window
    (because its worker is lost) is not drawn.
    """

    gives = DataKind.SEQUENCES

    @dataclass(frozen=True, kw_only=True)
    class Options(PERBuffer.Options):
        """Options of `SequenceBuffer`."""

        n_step: int = option(5, help="Rewards summed before the bootstrap.", low=1)
        alpha: float = option(0.9, help="How much priorities count; 0 would be uniform.", low=0.0, exclusive=True)
        beta: float | Schedule = option(
            0.6, help="How much weights correct for it; 1 entirely.", low=0.0, exclusive=True, updatable=True)
        length: int = option(80, help="Steps of a sequence that are trained on.", low=1)
        burn_in: int = option(40, help="Steps before them, at most, that only warm the memory up.", low=0)
        period: int = option(40, help="Steps of an environment from the start of a sequence to that of the next.", low=1)
        priority_eta: float = option(
            0.9, help="Share of the largest error in the priority of a sequence; the rest is that of the mean.", low=0.0,
            high=1.0)

        def __post_init__(self) -> None:
            """Refuse sequences with gaps between them."""
            super().__post_init__()
            if self.period > self.length:
                raise ConfigError(f"period must not exceed length, got {self.period} > {self.length}: steps in between would "
                                  "never be learned from")

    def __init__(self, options: Any, *, actor: Any, num_envs: int, **context: Any) -> None:
        """Use `create_factory`; see `ReplayBuffer`.

        Raises:
            ConfigError: No window fits in.
        """
        self.check_size(options, num_envs, 1)
        super().__init__(options, actor=actor, num_envs=num_envs, **context)
        self._ring = Ring(options.size, options.stacked_frames, in_sequences=True)
        self._slots = Slots()
        self._states = {name: np.zeros((0, state.shape[1]), np.float32) for name, state in actor.initial_states(1).items()}
        self._episodes: dict[Hashable, list[Episode | None]] = {}

    @classmethod
    def check_size(cls, options: Any, num_envs: int, num_sources: int, share: int | None = None) -> None:
        """Refuse a size into which no window fits before its first step is overwritten.

        Args:
            options: Of this storage.
            num_envs: Environments of each source.
            num_sources: Collectors whose rollouts come in turns.
            share: Steps of the storage; None: the options' `size`.

        Raises:
            ConfigError: It is too small; the message says what would do.
        """
        size = options.size if share is None else share
        least = options.burn_in + options.length
        if size < least:
            raise ConfigError(f"a shard must hold burn_in + length = {least} steps, got {size}; raise size, or shorten them")
        # The steps of a window, of its last targets, and of the rollouts that it begins and ends in.
        rollouts = -(-(least + options.n_step - 2) // options.rollout_size) + 1
        needed = rollouts * options.rollout_size * num_envs * num_sources
        if size < needed:
            raise ConfigError(
                f"a shard of size {size} overwrites a sequence of burn_in {options.burn_in} + length {options.length} before it "
                f"is complete: {num_sources} collectors x {num_envs} environments x {rollouts} rollouts of "
                f"{options.rollout_size} steps are {needed}; raise size to that, or shorten sequences or rollouts")

    # Inserting

    @functools.cached_property
    def _book(self) -> _Book:
        return _Book(self.options.size)

    def _insert(self, rollout: RolloutData, source: Hashable) -> None:
        ring, first, base = self._ring, self._ring.first, self._ring.total
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
        self._offer(windows)

    def _follow(self, episode: Episode | None, runs: Sequence[_Run], first_id: int) -> tuple[
            Episode | None, list[int], list[_Window]]:
        """Go on with an environment's episode, None if there is none, over what a rollout has of it."""
        wanted: list[int] = []
        windows: list[_Window] = []
        for run in runs:
            if run.is_valid:
                if run.is_first or episode is None:
                    episode = Episode(self.options, run.is_first)
                states, found = episode.grow(first_id + run.begin, run.end - run.begin)
                wanted += states
                windows += found
            if episode is not None and (run.is_last or not run.is_valid):
                windows += episode.finish()
                episode = None
        return episode, wanted, windows

    def _keep_states(self, rollout: RolloutData, ids: list[int], first_id: int, e: int) -> None:
        """Keep the states before the rows of these ids, of environment `e` of a rollout, whose rows there begin at `first_id`."""
        if not ids or not self._states:
            return
        slots = self._slots.take(len(ids))
        self._book.slot[np.array(ids) % self._ring.capacity] = slots
        for name, states in self._states.items():
            self._states[name] = write_extras(states, slots, rollout.rhs[name].numpy()[np.array(ids) - first_id, e])

    def _offer(self, windows: list[_Window]) -> None:
        """Let windows be drawn, those of which something has gone already excepted."""
        ring, book = self._ring, self._book
        whole = [window for window in windows
                 if window.warm >= ring.first and not ring.columns["broken"][window.warm % ring.capacity]]
        for window in whole:
            start, warm = window.start % ring.capacity, window.warm % ring.capacity
            book.warm[start], book.num_warm[start] = warm, window.num_warm
            book.other[start], book.newest[warm] = book.newest[warm], start
        starts = np.array([window.start for window in whole], np.int64) % ring.capacity
        ring.make_drawable(starts)
        self._set_leaves(starts, self._max_priority ** self.options.alpha)

    def _drop(self, rows: np.ndarray) -> None:
        """Give up all windows that begin at these rows, (N,) places, and the states before them."""
        if not len(rows):
            return
        book, dropped = self._book, []
        at = book.newest[rows]
        while len(at := at[at >= 0]):
            dropped.append(at)
            at = book.other[at]
        book.newest[rows] = -1
        for starts in dropped:
            self._ring.make_drawable(starts, False)
            self._set_leaves(starts, 0.0)
        slots = book.slot[rows]
        self._slots.give_back(slots[slots >= 0])
        book.slot[rows] = -1

    # Drawing

    def sample(self, batch_size: int) -> SequenceBatch | None:  # type: ignore[override] # its batches are sequences
        """Draw `batch_size` sequences, with replacement; None if there is none."""
        if not self.num_items:
            return None
        ring = self._ring
        starts, weight = self.draw(batch_size)
        ring.note_draw(starts)
        batch = take_sequences(
            ring, self._walk(starts, int(self._book.num_warm[starts].max())), self._states_before(self._book.warm[starts]), weight,
            ring.ids(starts), self.algorithm.gamma, self._tensor)
        self._num_sampled += batch.num_samples
        return batch

    def _walk(self, starts: np.ndarray, burn_in: int) -> Walk:
        """Follow windows, by the places of their first trained rows, so that these are all at row `burn_in`.

        A warm-up is only shorter than another's where it begins with its episode, so that what a memory makes of the rows
        before does not matter.
        """
        column, book = self._ring.columns, self._book
        shape = (burn_in + self.options.length + self.options.n_step, len(starts))
        places, is_step = np.zeros(shape, np.int64), np.zeros(shape, np.bool_)
        at, begin = book.warm[starts], burn_in - book.num_warm[starts]
        goes_on = np.ones(len(starts), np.bool_)
        for i in range(len(places)):
            places[i] = at
            row = np.maximum(at, 0)
            here = is_step[i] = (i >= begin) & goes_on & (at >= 0) & column["valid"][row]
            # The observation after an episode's last step is its last one, wherever that is.
            goes_on = (i < begin) | (here & ~(column["terminated"][row] | column["truncated"][row]))
            at = np.where(here, column["link"][row], at)
        return Walk(places, is_step, burn_in, self.options.n_step)

    def _states_before(self, warm: np.ndarray) -> dict[str, np.ndarray]:
        """Net -> (B, H), the states before windows' first rows, (B,) places; zero at the start of an episode."""
        slots = self._book.slot[warm]
        known = slots >= 0
        found = {name: np.zeros((len(warm), states.shape[1]), np.float32) for name, states in self._states.items()}
        for name, states in self._states.items():
            found[name][known] = states[slots[known]]
        return found

    # Priorities, states

    def item_errors(self, batch: Any, errors: Any) -> np.ndarray:
        """Of each sequence eta times the largest absolute error of its valid steps, plus (1 - eta) times their mean.

        Args:
            batch: What was drawn.
            errors: (L, B), of either sign.

        Returns:
            (B,) float.
        """
        valid, eta = batch.valid.cpu().numpy(), self.options.priority_eta
        absolute = np.where(valid, np.abs(np.asarray(errors)), 0.0)
        mean: np.ndarray = absolute.sum(0) / valid.sum(0)
        return eta * absolute.max(0) + (1.0 - eta) * mean

    def reset(self) -> None:
        """See `PERBuffer`."""
        super().reset()
        self._slots, self._episodes = Slots(), {}
        self.__dict__.pop("_book", None)

    @property
    def num_bytes(self) -> int:
        """See `ReplayBuffer`."""
        return super().num_bytes + sum(states.nbytes for states in self._states.values())

    def _contents(self) -> dict[str, Any]:
        episodes = [(source, [None if episode is None else episode.state_dict() for episode in episodes])
                    for source, episodes in self._episodes.items()]
        return {**super()._contents(), "book": {name: array.copy() for name, array in vars(self._book).items()},
                "slots": self._slots.state_dict(), "states": {name: states.copy() for name, states in self._states.items()},
                "episodes": episodes}

    def _load_contents(self, contents: dict[str, Any]) -> None:
        super()._load_contents(contents)
        for name, array in contents["book"].items():
            getattr(self._book, name)[:] = array
        self._slots.load_state_dict(contents["slots"])
        self._states = {name: np.array(states) for name, states in contents["states"].items()}
        self._episodes = {source: [None if state is None else Episode.from_state(self.options, state) for state in states]
                          for source, states in contents["episodes"]}


class _Run(NamedTuple):
    """Rows of an environment in a rollout: valid ones of one episode, or one that is not valid."""

    begin: int
    end: int
    is_valid: bool
    is_first: bool
    """Whether an episode begins with the first row."""
    is_last: bool
    """Whether it ends with the last row."""


def _runs(rollout: RolloutData) -> list[list[_Run]]:
    """The rows of each environment of a rollout, in order."""
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
