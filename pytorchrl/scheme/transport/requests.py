"""Keep track of the pending calls to one worker set, and return their results."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

from pytorchrl.errors import ReplayError, WorkerDiedError
from pytorchrl.runtime import Future, Journal, Outcome, Runtime

R = TypeVar("R")

ENDS_OF_POLLS = ("update", "parameter", "asked", "ask")
"""Kinds of journal events that occur only between two polls, never during a poll."""

# Interval in seconds at which a waiting thread checks whether it should end; an answer wakes the thread immediately.
POLL_INTERVAL_S = 0.1
# A finished result may be on another node; fetching it may take at most this many seconds.
_FETCH_TIMEOUT_S = 60.0


class WorkerSupervisor(Protocol):
    """Interface of a worker set's supervisor; see `pytorchrl.scheme.supervision.supervisor.Supervisor`."""

    @property
    def gone(self) -> Collection[int]:
        """Indices of the workers that are lost and not (yet) replaced."""

    def called(self, index: int) -> None:
        """Record a call to a worker."""

    def waited_s(self, index: int) -> float:
        """Return the seconds since a worker's oldest pending call or the worker's last answer, whichever was later."""

    def answered(self, index: int, seconds: float, more: bool) -> None:
        """Record a result for which a worker needed `seconds`; `more` is True if the worker has other pending calls."""

    def failed(self, index: int) -> None:
        """Record a call that ended with an error."""

    def lost(self, index: int, error: BaseException, will_be_replaced: bool = False) -> None:
        """Record that a worker is dead or hung; raise an error if it was lost too often, unless `will_be_replaced`."""

    def replaced(self) -> list[int]:
        """Replace the lost workers whose replacement is due; return their indices."""

    def replace(self, index: int) -> None:
        """Replace a lost worker now."""

    def kill(self, index: int) -> None:
        """Kill a worker."""

    def hung(self) -> Sequence[tuple[int, BaseException]]:
        """Return the workers that have not answered for too long, with an error for each."""


class Requests(Generic[R]):
    """The pending calls to the workers of one worker set, in the order in which the calls were added.

    Args:
        runtime: The runtime of the workers.
        supervisor: The supervisor of the workers, which decides whether to replace lost workers.
        journal: Record of the order in which answers are taken; in a replayed run, the journal enforces this order.
        seconds_of: Function that returns the working time, in seconds, that a result reports, or None if it reports no
            time. A reported time covers all calls since the worker's previous report.
        numbers_of: Function that returns numbers by which a replayed run checks that a result equals the recorded one.
        on_lost: Function to call with the index of a lost worker, after its pending calls have been discarded.
        on_replaced: Function to call with the index of a worker that was replaced.
    """

    def __init__(self, runtime: Runtime, supervisor: WorkerSupervisor, journal: Journal,
                 seconds_of: Callable[[R], float | None], numbers_of: Callable[[R], tuple[int, ...]],
                 on_lost: Callable[[int], object], on_replaced: Callable[[int], object]) -> None:
        self._runtime, self._supervisor, self._journal = runtime, supervisor, journal
        self._seconds_of, self._numbers_of = seconds_of, numbers_of
        self._on_lost, self._on_replaced = on_lost, on_replaced
        self._open: dict[Future[R], int] = {}
        # For each worker: the total seconds that the caller has waited for the worker since the worker last reported
        # a working time.
        self._asked_s: defaultdict[int, float] = defaultdict(float)
        self._send_s = 0.0

    def __len__(self) -> int:
        return len(self._open)

    def owners(self) -> list[int]:
        """Return the index of the worker of each pending call."""
        return list(self._open.values())

    def at_most(self, limit: int) -> bool:
        """Return whether no worker has more than `limit` pending calls."""
        return all(count <= limit for count in Counter(self._open.values()).values())

    def add(self, index: int, future: Future[R]) -> None:
        """Register `future`, a call that was sent to the worker with this index."""
        self._open[future] = index
        self._supervisor.called(index)

    def poll(self, timeout_s: float) -> Iterator[tuple[int, R]]:
        """Replace lost workers whose replacement is due, and yield (worker index, result) for each finished call.

        The method waits up to `timeout_s` seconds for the first finished call.

        Raises:
            Exception: An error that a worker raised, or the supervisor's error for a lost worker.
        """
        replaying = self._journal.upcoming() is not None
        for future in self._as_recorded(timeout_s) if replaying else self._as_completed(timeout_s):
            if future not in self._open:  # the worker of this call was lost in the meantime
                continue
            index, outcome = self._open[future], self._runtime.outcome(future, _FETCH_TIMEOUT_S)
            if isinstance(outcome.error, WorkerDiedError):
                self._lose(index, outcome.error)
                continue
            if self._journal.is_kept:
                # If `_note` raises a `ReplayError`, the call must stay pending, so that `finish` returns its outcome.
                self._note(index, outcome)
            del self._open[future]
            if outcome.error is not None:
                self._supervisor.failed(index)
            value = outcome.unwrap()
            self._answered(index, self._seconds_of(value))
            yield index, value

    def _answered(self, index: int, seconds: float | None) -> None:
        self._asked_s[index] += self._supervisor.waited_s(index)
        if seconds is not None:
            self._send_s += max(0.0, self._asked_s.pop(index) - seconds)
        self._supervisor.answered(index, seconds or 0.0, more=index in self._open.values())

    def forget_waits(self) -> None:
        """Forget how long the caller has waited for each worker since the worker last reported a working time.

        Otherwise, these waits would count as time in transit (see `take_send_s`) at the worker's next report.
        """
        self._asked_s.clear()

    def take_send_s(self) -> float:
        """Return the seconds that requests and answers spent in transit since the last call of this method.

        The time in transit is the time from a request to its answer, minus the working time that the worker reports.
        The result is correct only if each worker has one call at a time, and the caller waits for the answer.
        """
        seconds, self._send_s = self._send_s, 0.0
        return seconds

    def _note(self, index: int, outcome: Outcome[R]) -> None:
        if outcome.error is None:
            self._journal.note("answer", index, *self._numbers_of(outcome.unwrap()))
        elif not isinstance(outcome.error, ReplayError):  # a new `ReplayError` from `note` would hide this one
            self._journal.note("error", index, type(outcome.error).__name__)

    def _as_completed(self, timeout_s: float) -> list[Future[R]]:
        """Wait for the first finished call, and return all finished calls; also handle hung and lost workers."""
        for index in self._supervisor.replaced():
            self._replaced(index)
        if not self._open:
            self._runtime.sleep(timeout_s)
            return []
        ready = self._wait(list(self._open), timeout_s)
        answering = {self._open[future] for future in ready}
        for index, error in self._supervisor.hung():
            if index not in answering:  # a worker whose answer has arrived is not hung
                self._lose(index, error)
        return ready

    def _wait(self, futures: list[Future[R]], timeout_s: float) -> list[Future[R]]:
        """Return the finished calls; if none has finished, wait up to `timeout_s` seconds for the first."""
        ready = self._runtime.wait(futures, 0.0)
        return ready if ready or not timeout_s else self._runtime.wait(futures, timeout_s)

    def _as_recorded(self, timeout_s: float) -> Iterator[Future[R]]:
        """Yield finished calls in the recorded order; repeat the recorded losses and restarts of workers."""
        num_taken = 0
        while (event := self._journal.upcoming()) is not None:
            kind, index = event[:2]
            if kind == "replaced" and index in self._supervisor.gone:
                self._supervisor.replace(index)
                self._replaced(index)
            elif kind in ENDS_OF_POLLS or index not in self._open.values():
                if num_taken:  # the recorded poll ended before this event
                    return
                self._journal.note("pending answers from", *sorted(set(self._open.values())))
            elif kind == "lost":
                self._supervisor.kill(index)
                self._lose(index, WorkerDiedError(f"worker {index + 1} was lost in the recorded run"))
            else:
                future = next(future for future, owner in self._open.items() if owner == index)
                if not self._wait([future], timeout_s):
                    return
                yield future
            num_taken += 1

    def _replaced(self, index: int) -> None:
        self._journal.note("replaced", index)
        self._on_replaced(index)

    def lose(self, index: int, error: BaseException) -> None:
        """Discard the pending calls to a worker that the caller found to be lost, and notify the supervisor."""
        if index not in self._supervisor.gone:
            self._lose(index, error)

    def _lose(self, index: int, error: BaseException) -> None:
        self._journal.note("lost", index)
        self._open = {future: owner for future, owner in self._open.items() if owner != index}
        self._asked_s.pop(index, None)
        self._on_lost(index)
        self._supervisor.lost(index, error, will_be_replaced=self._journal.upcoming() is not None)

    def finish(self, timeout_s: float) -> list[Outcome[R]]:
        """Remove all pending calls and return their outcomes; a call that exceeds `timeout_s` results in an error."""
        outcomes = self._runtime.get_all(list(self._open), timeout_s)
        self._open.clear()
        return outcomes
