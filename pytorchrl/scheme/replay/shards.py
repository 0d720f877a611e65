"""Replay as one GWorker sees it: two threads, one adds rollouts to shards, the other learns from what it draws."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from pytorchrl.agent.data import map_tensors
from pytorchrl.agent.options import option
from pytorchrl.errors import ConfigError, LearnerStarvedError, StoppedError, WorkerDiedError, WorkerLostError
from pytorchrl.runtime import Future, Journal
from pytorchrl.scheme.base.options import PrefetchOptions, QueueOptions
from pytorchrl.scheme.collection.strategies import POLL_INTERVAL_S
from pytorchrl.scheme.ledger import DropReason, Ledger
from pytorchrl.scheme.replay.r_worker import Drawn, RWorker, ShardState
from pytorchrl.scheme.replay.r_worker_set import RWorkerSet
from pytorchrl.scheme.replay.routing import ROUTINGS, Router
from pytorchrl.scheme.supervision.supervisor import Supervisor
from pytorchrl.scheme.timing import Stopwatch
from pytorchrl.scheme.transport.encoder import DATA
from pytorchrl.scheme.transport.messages import Rollout
from pytorchrl.scheme.transport.requests import Requests


class _Draw(NamedTuple):
    """A batch that was asked for."""

    shard: int
    incarnation: int
    future: Future[Drawn]
    asked: float


class Shards:
    """Adds, draws and priorities of one GWorker's shards.

    Nothing is drawn that is not wanted, and nothing drawn is thrown away: a batch is asked for only while fewer than
    `prefetch` a shard, and `queue_size` in all, are on their way or wait. A shard is drawn in proportion to its mass, as it last said. What replay
    holds is booked when a shard has confirmed it.

    Args:
        workers: The shards.
        ledger: The GWorker's account.
        on_worker_failure: What becomes of lost shards; see `Supervisor`.
        batch_size: Transitions of a batch, or sequences, or of rollouts the least size, see `RolloutData.size`.
        batch_steps: Env steps of a batch, at most; None: `batch_size`.
        num_passes: How often learning goes over a batch; each counts as consumed.
        queue_size: Batches asked for or waiting, in all.
        learning_starts: Env steps that must have come, over all shards, before anything is drawn.
        prefetch: Batches asked for or waiting, a shard.
        add_in_flight: Adds that a shard has not confirmed; a rollout waits for room.
        routing: Which shard a rollout is added to, one of `routing.ROUTINGS`.
        min_ratio: Env steps consumed for one collected since learning began: collection waits for learning below it.
        max_ratio: The same, learning waits for collection above it; None bounds nothing.
        timeout_s: How long learning waits for a batch before it raises, and how long all shards have to save what they hold.
        worker_timeout_s: A shard that takes longer to draw is taken for hung.
        seed: Seed of the draws from shards, and of random routing.
        version: Tells the learner's version.

    Attributes:
        versions: Of what is in the last batch; see `Drawn`.
        num_waiting, num_underway: Numbers of batches that had arrived, and that were in flight, when one was last taken.
        watch: Times in the learning thread of requesting a batch ("draw"), of receiving one that has arrived ("fetch"), and
            of sending errors to the shards ("priorities").
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(QueueOptions, PrefetchOptions):
        """Options of the replay level of each gradient worker."""

        learning_starts: int | None = option(
            None, low=0, help="Env steps that must be in replay before learning begins; None: the algorithm's start_steps, or "
            "train_batch_size for replay of whole rollouts.")
        add_in_flight: int = option(2, low=1, help="Rollouts in flight to each shard before collection waits.")
        routing: str = option(
            "round_robin", choices=ROUTINGS, help="Shard that a rollout is added to: each in turn, a random one, the one with the fewest "
            "env steps, or a fixed one for each collection worker (always so for sequences that span rollouts).")
        min_replay_ratio: float | None = option(
            None, low=0.0, exclusive=True, help="Env steps consumed per env step collected, below which collection waits for learning; "
            "None: never.")
        max_replay_ratio: float | None = option(
            None, low=0.0, exclusive=True, help="Env steps consumed per env step collected, above which learning waits for collection; "
            "None: never.")

        def __post_init__(self) -> None:
            """Refuse a lower bound above the upper one."""
            super().__post_init__()
            low, high = self.min_replay_ratio, self.max_replay_ratio
            if low is not None and high is not None and low > high:
                raise ConfigError(f"min_replay_ratio {low} exceeds max_replay_ratio {high}; collection and learning would wait for each "
                                  "other; lower min_replay_ratio")

    def __init__(self, workers: RWorkerSet, ledger: Ledger, on_worker_failure: str = "restart", *, batch_size: int,  # noqa: PLR0913
                 learning_starts: int = 0, prefetch: int = 4, add_in_flight: int = 2, routing: str = "round_robin",
                 min_ratio: float | None = None, max_ratio: float | None = None, timeout_s: float = 300.0,
                 worker_timeout_s: float = 60.0, seed: int = 0, batch_steps: int | None = None, num_passes: int = 1,
                 queue_size: int = 16, version: Callable[[], int] = lambda: 0) -> None:
        self._runtime, self._handles, self._ledger = workers.runtime, workers.remote_workers(), ledger
        self._batch_size, self._learning_starts, self._timeout_s = batch_size, learning_starts, timeout_s
        self._worker_timeout_s = worker_timeout_s
        self._batch_steps, self._num_passes = (batch_steps or batch_size) * num_passes, num_passes
        self._version, self.versions = version, np.zeros((0, 2), np.int64)
        self.num_waiting = self.num_underway = 0
        self._levels: list[int] = []
        self.watch = Stopwatch(self._runtime.now)
        self._max_draws = min(prefetch * len(self._handles), queue_size)
        self._max_adds = add_in_flight
        self._min_ratio, self._max_ratio = min_ratio or 0.0, max_ratio
        self._ignores = on_worker_failure == "ignore"
        self._rng = np.random.default_rng(seed)
        self._changed = self._runtime.make_event()
        self.is_draining = False
        """Whether learning rests, so that collection need not wait for it."""
        self.items_dropped = 0
        """Batches that were drawn and not used."""
        # Both threads read and write, each in a moment.
        self._lock = threading.Lock()
        self._states = [ShardState() for _ in self._handles]
        self._incarnations = [0] * len(self._handles)
        self._added = self._trained = 0
        self._headers: deque[Rollout] = deque()
        self._lost: deque[tuple[int, int, WorkerLostError]] = deque()
        # Of the collecting thread.
        self._supervisor = Supervisor(
            self._handles, workers.replace, self._runtime, on_worker_failure, worker_timeout_s, seed % 2**32)
        self._adds: Requests[ShardState] = Requests(
            self._runtime, self._supervisor, Journal(), lambda state: 0.0, lambda state: (), self._lose, lambda index: None)
        self._on_their_way: list[deque[Rollout]] = [deque() for _ in self._handles]
        self._evicted, self._resident = [0] * len(self._handles), [0] * len(self._handles)
        self._router = Router(routing, len(self._handles), seed, lambda index: (
            self._states[index].resident, len(self._on_their_way[index])))
        # Of the learning thread.
        self._draws: deque[_Draw] = deque()
        self._current: _Draw | None = None
        self._found_out: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in self._handles]
        self._telling: list[tuple[int, Future[ShardState]] | None] = [None] * len(self._handles)

    # The collecting thread

    def add(self, rollout: Rollout, is_stopped: Callable[[], bool]) -> None:
        """Send a rollout, in flight in the ledger, to a shard; wait while none has room, or learning is to catch up."""
        while not is_stopped():
            self.poll(0.0)
            place = None if self._learning_lags() else self._place(rollout)
            if place is not None:
                self._on_their_way[place].append(rollout)
                self._adds.add(place, self._handles[place].submit(RWorker.add, rollout, self._version()))
                return
            self.poll(POLL_INTERVAL_S)

    def _place(self, rollout: Rollout) -> int | None:
        free = [index for index, adds in enumerate(self._on_their_way)
                if len(adds) < self._max_adds and index not in self._supervisor.gone]
        staying = [index for index in range(len(self._handles)) if not (self._ignores and index in self._supervisor.gone)]
        return self._router.choose(rollout.worker, free, staying)

    def _learning_lags(self) -> bool:
        """Whether collection is to wait for learning; never where there is nothing to draw, or it would wait for ever."""
        counted = self._added - self._learning_starts
        return (not self.is_draining and counted > 0
                and self._trained + self._batch_steps <= self._min_ratio * counted
                and any(state.mass > 0.0 for state in self.states))

    def poll(self, timeout_s: float) -> None:
        """Take the confirmations that are there, once one is; book what they say. Lost shards are replaced.

        Raises:
            Exception: Whatever a shard raised; what the supervisor makes of a lost one.
        """
        while self._lost:  # as the learning thread has found
            index, incarnation, error = self._lost.popleft()
            if incarnation == self._incarnations[index]:
                self._adds.lose(index, error)
        for index, state in self._adds.poll(timeout_s):
            self._confirm(index, state)

    def _confirm(self, index: int, state: ShardState) -> None:
        rollout = self._on_their_way[index].popleft()
        steps, evicted = rollout.num_env_steps, state.evicted - self._evicted[index]
        self._ledger.move(steps, "in_flight", "resident")
        self._ledger.move(evicted, "resident", "evicted")
        self._evicted[index] = state.evicted
        self._resident[index] += steps - evicted
        with self._lock:
            self._added += steps
            self._headers.append(replace(rollout, data=None, traffic={**rollout.traffic, DATA: state.traffic}))
        self._take(index, self._incarnations[index], state)
        self._changed.set()

    def _lose(self, index: int) -> None:
        """A shard is lost with all that it held; what was drawn from it, or is found out about that, is for nobody."""
        self._ledger.drop(sum(rollout.num_env_steps for rollout in self._on_their_way[index]), "in_flight",
                          DropReason.WORKER_LOST)
        self._ledger.drop(self._resident[index], "resident", DropReason.WORKER_LOST)
        self._on_their_way[index].clear()
        self._evicted[index] = self._resident[index] = 0
        with self._lock:
            self._incarnations[index] += 1
            self._states[index] = ShardState()
        self._changed.set()

    def drain(self, deadline: float) -> None:
        """Wait until shards have confirmed all that they were sent and told; batches that come are for nobody.

        Both threads rest meanwhile. A shard that does not answer before the deadline is lost.
        """
        while len(self._adds) and self._runtime.now() < deadline:
            self.poll(POLL_INTERVAL_S)
        while self._draws and self._runtime.now() < deadline:
            batch = self._take_draw()
            if batch is not None:
                self.items_dropped += 1
                self._trained -= batch.num_samples * self._num_passes
        while self._is_telling() and self._runtime.now() < deadline:
            self._runtime.wait([told[1] for told in self._telling if told is not None], POLL_INTERVAL_S)
        for index in sorted({*self._adds.owners(), *(draw.shard for draw in self._draws)}):
            self._adds.lose(index, WorkerLostError(f"{self._handles[index].name} gave no answer until the end of drain()"))
        self._draws.clear()

    def state(self) -> dict[str, Any]:
        """What all shards hold, once they are drained; None for one that is lost, as it is if it gives no answer in `timeout_s`."""
        calls = {index: handle.submit(RWorker.state) for index, handle in enumerate(self._handles)
                 if index not in self._supervisor.gone}
        held: list[Any] = [None] * len(self._handles)
        for index, outcome in zip(calls, self._runtime.get_all(list(calls.values()), self._timeout_s), strict=True):
            if isinstance(outcome.error, WorkerLostError):
                self._adds.lose(index, outcome.error)
            else:
                held[index] = outcome.unwrap()
        return {"shards": held, "added": self._added, "trained": self._trained}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what other shards held; nothing has been added yet."""
        self._added, self._trained = state["added"], state["trained"]
        calls = {index: self._handles[index].submit(RWorker.restore, own)
                 for index, own in enumerate(state["shards"]) if own is not None}
        for index, outcome in zip(calls, self._runtime.get_all(list(calls.values()), self._timeout_s), strict=True):
            held = outcome.unwrap()
            self._evicted[index], self._resident[index] = held.evicted, held.resident
            self._take(index, self._incarnations[index], held)

    def _is_telling(self) -> bool:
        """Whether a shard is still to be told, or to confirm, what learning found."""
        for index in range(len(self._handles)):
            self._tell(index)
        return any(told is not None for told in self._telling)

    @property
    def num_missing(self) -> int:
        """Shards that are lost and not replaced (yet)."""
        return len(self._supervisor.gone)

    @property
    def restarts(self) -> int:
        """Lost shards that were replaced."""
        return self._supervisor.restarts

    def close(self, timeout_s: float) -> None:
        """End the shards, once both threads have ended; what none confirms in time stays in flight."""
        owners = self._adds.owners()
        for index, outcome in zip(owners, self._adds.finish(timeout_s), strict=True):
            if outcome.value is not None:
                self._confirm(index, outcome.value)
        for handle in self._handles:
            self._runtime.kill(handle)

    # Both

    def _take(self, index: int, incarnation: int, state: ShardState) -> None:
        """What a shard says of itself, if it is the newest word of the one that is there now."""
        with self._lock:
            if incarnation == self._incarnations[index] and state.answers > self._states[index].answers:
                self._states[index] = state

    @property
    def states(self) -> list[ShardState]:
        """What each shard last said."""
        with self._lock:
            return list(self._states)

    # The learning thread

    def get(self, is_stopped: Callable[[], bool], failure: Callable[[], BaseException | None],
            parameters: Mapping[str, float]) -> Any:
        """The next batch, in the order in which they were asked for.

        Args:
            is_stopped: Whether to give up.
            failure: What has ended the collecting thread, if something has.
            parameters: Of the storage, by name, as they are now.

        Raises:
            StoppedError: `is_stopped`.
            LearnerStarvedError: There was none within `timeout_s`; until learning starts: no step came into replay either.
            Exception: `failure`, or whatever a shard raised.
        """
        deadline, added = self._runtime.now() + self._timeout_s, self._added
        while self._runtime.now() < deadline:
            if added != self._added <= self._learning_starts:  # however slowly it fills up
                deadline, added = self._runtime.now() + self._timeout_s, self._added
            if is_stopped():
                raise StoppedError("replay has been stopped")
            if (error := failure()) is not None:
                raise error
            self._ask(parameters)
            if not self._draws:
                self._changed.wait(POLL_INTERVAL_S)
                self._changed.clear()
            elif (batch := self._take_draw()) is not None:
                self._look_at_draws()
                return batch
        raise LearnerStarvedError(
            f"no batch from replay for {self._timeout_s:.1f} s: {self._added} env steps have come, learning starts at "
            f"{self._learning_starts}; {len(self._draws)} batches are asked for; raise queue_timeout_s if that takes longer")

    def _ask(self, parameters: Mapping[str, float]) -> None:
        """Ask for as many batches as may be on their way."""
        with self._lock:
            states, added = list(self._states), self._added
            incarnations = list(self._incarnations)
        masses = np.array([state.mass for state in states])
        total = masses.sum()
        if added < self._learning_starts or not total > 0.0:
            return
        smallest = min(state.smallest for state in states)
        while len(self._draws) < self._max_draws and self._may_ask(added):
            with self.watch.part("draw"):
                index = int(self._rng.choice(len(masses), p=masses / total))
                self._draws.append(_Draw(index, incarnations[index], self._handles[index].submit(
                    RWorker.sample, self._batch_size, smallest, dict(parameters)), self._runtime.now()))

    def _look_at_draws(self) -> None:
        """Count the batches that have arrived and those in flight, after one was taken."""
        draws = [draw.future for draw in self._draws]
        self.num_waiting = len(self._runtime.wait(draws, 0.0)) if draws else 0
        self.num_underway = len(draws) - self.num_waiting
        self._levels.append(self.num_waiting)

    def take_levels(self) -> tuple[int, ...]:
        """Return the number of waiting batches after each `get` since the last call."""
        levels, self._levels = tuple(self._levels), []
        return levels

    def _may_ask(self, added: int) -> bool:
        if self._max_ratio is None:
            return True
        asked = self._trained + len(self._draws) * self._batch_steps
        return asked + self._batch_steps <= self._max_ratio * (added - self._learning_starts)

    def _take_draw(self) -> Any:
        """Return the batch of the oldest draw; None if it has not arrived or its shard was lost."""
        draw = self._draws[0]
        if not self._runtime.wait([draw.future], POLL_INTERVAL_S):
            if self._runtime.now() - draw.asked > self._worker_timeout_s:
                self._report(draw.shard, draw.incarnation, WorkerLostError(
                    f"{self._handles[draw.shard].name} hangs: no batch for {self._worker_timeout_s:.1f} s"))
                self._draws.popleft()
            return None
        self._draws.popleft()
        with self.watch.part("fetch"):
            return self._fetch(draw)

    def _fetch(self, draw: _Draw) -> Any:
        """Receive a shard's answer: its batch, copied if it comes from another process, and the shard's state."""
        outcome = self._runtime.outcome(draw.future, POLL_INTERVAL_S)
        if isinstance(outcome.error, WorkerDiedError):
            self._report(draw.shard, draw.incarnation, outcome.error)
            return None
        batch, state, versions = outcome.unwrap()
        self._take(draw.shard, draw.incarnation, state)
        if batch is not None:
            batch = map_tensors(batch, _as_tensor)
            self._current, self.versions = draw, versions
            with self._lock:
                self._trained += batch.num_samples * self._num_passes
        return batch

    def _report(self, index: int, incarnation: int, error: WorkerLostError) -> None:
        """A shard is lost; the collecting thread sees to it. Until then nothing is drawn from it."""
        with self._lock:
            if incarnation == self._incarnations[index]:
                self._states[index] = ShardState(self._states[index].answers + 2**32)
        self._lost.append((index, incarnation, error))

    def learned(self, ids: Any, errors: Any) -> None:
        """Tell the shard of the last batch the absolute TD errors (B,) of its transitions, by id (B,). Never waits.

        A shard is told once it has confirmed the last message; meanwhile messages become one.
        """
        draw = self._current
        assert draw is not None, "get() comes first"
        with self.watch.part("priorities"):
            if draw.incarnation == self._incarnations[draw.shard]:
                self._found_out[draw.shard].append((np.asarray(ids), np.asarray(errors, np.float32)))
            for index in range(len(self._handles)):
                self._tell(index)

    def _tell(self, index: int) -> None:
        telling = self._telling[index]
        if telling is not None:
            incarnation, future = telling
            if incarnation != self._incarnations[index]:
                self._found_out[index].clear()
            elif not self._runtime.wait([future], 0.0):
                return
            else:
                outcome = self._runtime.outcome(future, POLL_INTERVAL_S)
                if isinstance(outcome.error, WorkerDiedError):
                    self._report(index, incarnation, outcome.error)
                    self._found_out[index].clear()
                else:
                    self._take(index, incarnation, outcome.unwrap())
            self._telling[index] = None
        if self._found_out[index]:
            ids, errors = (np.concatenate(parts) for parts in zip(*self._found_out[index], strict=True))
            self._found_out[index].clear()
            self._telling[index] = (self._incarnations[index], self._handles[index].submit(
                RWorker.update_priorities, ids, errors))

    def take_headers(self) -> list[Rollout]:
        """Rollouts that came into replay since the last call, without their data."""
        with self._lock:
            headers, self._headers = list(self._headers), deque()
            return headers


def _as_tensor(value: Any) -> Any:
    """A tensor of its own for an array, which may be read-only shared memory."""
    return torch.from_numpy(np.array(value)) if isinstance(value, np.ndarray) else value
