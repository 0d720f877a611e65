"""What becomes of lost workers: replaced, done without, or an error; within a budget, and never in a hurry."""

from __future__ import annotations

import math
import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pytorchrl.agent.options import Options as BaseOptions
from pytorchrl.agent.options import option
from pytorchrl.errors import (
    ConfigError,
    CrashLoopError,
    InsufficientResourcesError,
    NoWorkersLeft,
    ReplayError,
    WorkerDiedError,
    WorkerLostError,
)
from pytorchrl.runtime import Future, Handle, Journal, Outcome, Runtime
from pytorchrl.terminal import get_logger

R = TypeVar("R")

FAILURE_POLICIES = ("restart", "ignore", "raise")

ENDS_OF_POLLS = ("update", "parameter", "asked", "ask")
"""Events that come between two polls, never within one."""

# A finished result may lie on another node; fetching it takes no longer than this.
_FETCH_TIMEOUT_S = 60.0
# A worker may be replaced so often within this time.
_MAX_RESTARTS, _WINDOW_S = 10, 600.0
# So many losses in a row without a result in between are no accident.
_MAX_FRUITLESS = 3
_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 0.5, 30.0
# So many replacements start at the same time: each imports torch and builds environments, on the cores of those that work.
_MAX_STARTING = 4
# A worker hangs if it takes this many times as long as the longest call so far; its start counts in its own first call.
_HANG_FACTOR, _FIRST_CALL_FACTOR = 10.0, 5.0

logger = get_logger(__name__)


def check_policy(value: object) -> str:
    """Return a policy for lost workers, or raise `ConfigError`."""
    if value not in FAILURE_POLICIES:
        raise ConfigError(f"on_worker_failure must be one of {list(FAILURE_POLICIES)}, got {value!r}")
    return str(value)


class Supervisor:
    """Watches the workers of one set, for the thread that makes requests of them.

    A lost worker is replaced after a pause that doubles from 0.5 s to 30 s. Each worker has a budget of ten
    replacements in ten minutes; three losses in a row without a result end the run, and so does a replacement for which
    there is no room.

    Args:
        workers: Handles of the set; a replacement takes its place in this list.
        replace: Ends the worker at an index of the list and starts another in its place.
        runtime: Owner of the clock.
        policy: "restart", "ignore" (go on with the others) or "raise".
        timeout_s: A worker that gives no result for this long, or for ten times the longest call so far if that is
            more, is taken for hung and killed; five times as long for its first result.
        seed: Of the jitter of pauses.
        room_timeout_s: How long a replacement may wait for room on the machines that there are; None: `timeout_s`.

    Attributes:
        restarts: Workers replaced so far.
        gone: Indices of those that are lost and not replaced (yet).
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(BaseOptions):
        """Options for lost workers."""

        on_worker_failure: str = option(
            "restart", choices=FAILURE_POLICIES, help="Reaction to a lost remote worker: \"restart\" starts a replacement with the newest "
            "weights, \"ignore\" goes on with the others, \"raise\" ends the run.")
        worker_timeout_s: float = option(
            60.0, low=0.0, exclusive=True, help="Seconds after which a worker without a result is considered hung and replaced, or ten times "
            "its longest call so far if that is longer. A replacement may wait this long for free resources.")

    def __init__(self, workers: list[Handle[Any]], replace: Callable[[int], object], runtime: Runtime,
                 policy: str = "restart", timeout_s: float = 60.0, seed: int = 0, room_timeout_s: float | None = None) -> None:
        self._workers, self._replace, self._runtime = workers, replace, runtime
        self._policy, self._timeout_s = check_policy(policy), timeout_s
        self._room_timeout_s = timeout_s if room_timeout_s is None else room_timeout_s
        self._rng = random.Random(f"pauses {seed}")
        self._history: list[deque[float]] = [deque() for _ in workers]
        self._fruitless = [0] * len(workers)
        self._since: dict[int, float] = {}
        self._longest_s = 0.0
        self._due: dict[int, float] = {}
        self._untried = set(range(len(workers)))  # those without a first result
        self.gone: set[int] = set()
        self.restarts = 0

    def asked(self, index: int) -> None:
        """A call was made of a worker; its time runs unless an earlier one is unanswered."""
        self._since.setdefault(index, self._runtime.now())

    def waited_s(self, index: int) -> float:
        """For how long a worker has had to answer a call, or the next one since it answered one."""
        return self._runtime.now() - self._since[index]

    def answered(self, index: int, seconds: float, more: bool) -> None:
        """A worker has given a result that took it `seconds`; if there are `more` unanswered calls, their time runs."""
        self._longest_s = max(self._longest_s, seconds)
        self._fruitless[index] = 0
        self._untried.discard(index)
        if more:
            self._since[index] = self._runtime.now()
        else:
            self._since.pop(index, None)

    def is_untried(self, index: int) -> bool:
        """Whether a worker has given no result yet."""
        return index in self._untried

    def failed(self, index: int) -> None:
        """A call of a worker has ended with an error, which is an answer too: its time does not run."""
        self._since.pop(index, None)

    def lost(self, index: int, error: BaseException, goes_on: bool = False) -> None:
        """A worker is dead or hung.

        Args:
            index: Which.
            error: What is known of it.
            goes_on: Whether it is known that it was replaced, so that no budget has to say so.

        Raises:
            WorkerLostError: The policy is "raise".
            CrashLoopError: It is lost again and again.
            NoWorkersLeft: The policy is "ignore", and it was the last.
        """
        name = self._workers[index].name
        self._since.pop(index, None)
        self._untried.discard(index)
        self.gone.add(index)
        if self._policy == "raise":
            raise WorkerLostError(str(error)) from error
        if self._policy == "ignore":
            if not isinstance(error, WorkerDiedError):
                self.kill(index)
            if len(self.gone) == len(self._workers):
                raise NoWorkersLeft(f"all {len(self._workers)} workers are lost, the last one {name}: {error}") from error
            logger.warning("%s; going on with %d of %d workers", error, len(self._workers) - len(self.gone), len(self._workers))
            return
        now, history = self._runtime.now(), self._history[index]
        while history and now - history[0] > _WINDOW_S:
            history.popleft()
        self._fruitless[index] += 1
        if not goes_on and (self._fruitless[index] >= _MAX_FRUITLESS or len(history) >= _MAX_RESTARTS):
            raise CrashLoopError(
                f"{name} was lost {self._fruitless[index]} times in a row without a result, and replaced {len(history)} "
                f"times in {_WINDOW_S / 60:.0f} minutes; the last time: {error}") from error
        pause = min(_LONGEST_BACKOFF_S, _FIRST_BACKOFF_S * 2 ** len(history)) * self._rng.uniform(0.75, 1.25)
        history.append(now)
        self._due[index] = now + pause
        logger.warning("%s; it is replaced in %.1f s", error, pause)

    def replaced(self) -> list[int]:
        """Replace those whose pause is over, not too many at a time; their indices."""
        now = self._runtime.now()
        places = max(0, _MAX_STARTING - len(self._untried))
        ready = [index for index, moment in self._due.items() if moment <= now][:places]
        for index in ready:
            self.replace(index)
        return ready

    def replace(self, index: int) -> None:
        """Replace a lost worker now."""
        self._due.pop(index, None)
        self._replace(index)
        self._untried.add(index)
        self.gone.discard(index)
        self.restarts += 1

    def kill(self, index: int) -> None:
        """End a worker."""
        self._runtime.kill(self._workers[index])

    @property
    def is_replacing(self) -> bool:
        """Whether a replacement is still to come."""
        return bool(self._due)

    def deadline_s(self, index: int) -> float:
        """How long a worker may take for its next answer."""
        timeout_s = self._timeout_s * (_FIRST_CALL_FACTOR if index in self._untried else 1.0)
        return max(timeout_s, _HANG_FACTOR * self._longest_s)

    def hung(self) -> list[tuple[int, WorkerLostError]]:
        """Those that have not answered for too long, and what to say of them.

        Raises:
            InsufficientResourcesError: One has not come up, for want of room.
        """
        now = self._runtime.now()
        for index in self._untried & self._since.keys():
            waited = now - self._since[index]
            if waited > self._room_timeout_s and (lack := self._runtime.lacks_room(self._workers[index])):
                raise InsufficientResourcesError(
                    f"{self._workers[index].name} has found no room for {waited:.0f} s: {lack}; add a machine, ask for less, "
                    "raise worker_timeout_s, or go on without lost workers (on_worker_failure='ignore')")
        return [(index, WorkerLostError(f"{self._workers[index].name} hangs: no result for {now - since:.1f} s"))
                for index, since in self._since.items() if now - since > self.deadline_s(index)]


class Requests(Generic[R]):
    """The calls that the workers of one set are making, in the order in which they were asked for.

    Args:
        runtime: Where they run.
        supervisor: Decides about lost workers.
        journal: Notes in which order answers are taken; where a run is repeated, it says so.
        seconds_of: What a result says about how long it took its worker, calls that said nothing (None) included.
        numbers_of: What of a result is the same whenever the run is repeated.
        on_lost: Called with the index of a lost worker, whose calls are forgotten: late answers find nobody.
        on_replaced: Called with its index once another worker is in its place.
    """

    def __init__(self, runtime: Runtime, supervisor: Supervisor, journal: Journal,
                 seconds_of: Callable[[R], float | None], numbers_of: Callable[[R], tuple[int, ...]],
                 on_lost: Callable[[int], object], on_replaced: Callable[[int], object]) -> None:
        self._runtime, self._supervisor, self._journal = runtime, supervisor, journal
        self._seconds_of, self._numbers_of = seconds_of, numbers_of
        self._on_lost, self._on_replaced = on_lost, on_replaced
        self._open: dict[Future[R], int] = {}
        self._asked_s: defaultdict[int, float] = defaultdict(float)  # by worker, of answers that said no time
        self._send_s = 0.0
        self.way_s: float | None = None
        """Seconds that the last result and its call were on their way, as far as anybody waited for that: from asking, or the
        answer before, until it came, less what it says that it took its worker, and then to fetch it. When it came is known
        if we were waiting for it; else it was at hand when we looked, and may have come right after the look before. None of a
        worker's first result, for which it had to start."""
        self._looked = self._came = -math.inf
        self._starting: set[int] = set()  # workers whose start is in the calls that have said no time yet

    def __len__(self) -> int:
        return len(self._open)

    def owners(self) -> list[int]:
        """The worker of each call."""
        return list(self._open.values())

    def add(self, index: int, future: Future[R]) -> None:
        """A worker was asked for something."""
        self._open[future] = index
        self._supervisor.asked(index)

    def poll(self, timeout_s: float) -> Iterator[tuple[int, R]]:
        """Replace whom it is time to replace; then (worker, value) of each call that is finished, once one is.

        Raises:
            Exception: Whatever a worker raised; what the supervisor makes of a lost one.
        """
        replaying = self._journal.upcoming() is not None
        for future in self._as_recorded(timeout_s) if replaying else self._as_it_comes(timeout_s):
            if future not in self._open:  # of a worker that is lost since
                continue
            index = self._open.pop(future)
            start = self._runtime.now()
            outcome = self._runtime.outcome(future, _FETCH_TIMEOUT_S)
            fetch_s = self._runtime.now() - start
            if isinstance(outcome.error, WorkerDiedError):
                self._lose(index, outcome.error)
                continue
            if self._journal.is_kept:
                self._note(index, outcome)
            if outcome.error is not None:
                self._supervisor.failed(index)
            value = outcome.unwrap()
            self._answered(index, self._seconds_of(value), fetch_s)
            yield index, value

    def _answered(self, index: int, seconds: float | None, fetch_s: float) -> None:
        self._asked_s[index] += self._supervisor.waited_s(index)
        if self._supervisor.is_untried(index):
            self._starting.add(index)
        if seconds is not None:
            beyond_s = max(0.0, self._asked_s.pop(index) - seconds)
            self._send_s += beyond_s
            late_s = self._runtime.now() - self._came
            self.way_s = None if index in self._starting else max(0.0, beyond_s - late_s) + fetch_s
            self._starting.discard(index)
        self._supervisor.answered(index, seconds or 0.0, more=index in self._open.values())

    def forget_waits(self) -> None:
        """The calls without a time of their own that were answered are no part of what is asked next."""
        self._asked_s.clear()
        self._starting.clear()

    def take_send_s(self) -> float:
        """Seconds from asking to taking answers beyond what those say that they took their workers, since the last call.

        That is the way there and back if each worker has one call at a time, and somebody waits for its answer.
        """
        seconds, self._send_s = self._send_s, 0.0
        return seconds

    def _note(self, index: int, outcome: Outcome[R]) -> None:
        if outcome.error is None:
            self._journal.note("answer", index, *self._numbers_of(outcome.unwrap()))
        elif not isinstance(outcome.error, ReplayError):  # which names the first difference itself
            self._journal.note("error", index, type(outcome.error).__name__)

    def _as_it_comes(self, timeout_s: float) -> list[Future[R]]:
        """The calls that are finished, once one is; hung workers are lost, and lost ones replaced, when it is time."""
        for index in self._supervisor.replaced():
            self._replaced(index)
        if not self._open:
            self._runtime.sleep(timeout_s)
            return []
        ready = self._look_or_wait(list(self._open), timeout_s)
        answering = {self._open[future] for future in ready}
        for index, error in self._supervisor.hung():
            if index not in answering:  # its answer may have waited for us
                self._lose(index, error)
        return ready

    def _look_or_wait(self, futures: list[Future[R]], timeout_s: float) -> list[Future[R]]:
        """The calls that are finished, once one is; notes when that was."""
        ready = self._runtime.wait(futures, 0.0)
        self._came = self._looked
        if not ready and timeout_s:
            ready = self._runtime.wait(futures, timeout_s)
            self._came = self._runtime.now()
        self._looked = self._runtime.now()
        return ready

    def _as_recorded(self, timeout_s: float) -> Iterator[Future[R]]:
        """The calls whose ends come next in the record; what became of workers in between happens again."""
        num_taken = 0
        while (event := self._journal.upcoming()) is not None:
            kind, index = event[:2]
            if kind == "replaced" and index in self._supervisor.gone:
                self._supervisor.replace(index)
                self._replaced(index)
            elif kind in ENDS_OF_POLLS or index not in self._open.values():
                if num_taken:  # it is the turn of others
                    return
                self._journal.note("an answer awaited from", *sorted(set(self._open.values())))
            elif kind == "lost":
                self._supervisor.kill(index)
                self._lose(index, WorkerDiedError(f"worker {index + 1} was lost in the run that is replayed"))
            else:
                future = next(future for future, owner in self._open.items() if owner == index)
                if not self._look_or_wait([future], timeout_s):
                    return
                yield future
            num_taken += 1

    def _replaced(self, index: int) -> None:
        self._journal.note("replaced", index)
        self._on_replaced(index)

    def lose(self, index: int, error: BaseException) -> None:
        """A worker is lost, as somebody else has found."""
        if index not in self._supervisor.gone:
            self._lose(index, error)

    def _lose(self, index: int, error: BaseException) -> None:
        self._journal.note("lost", index)
        self._open = {future: owner for future, owner in self._open.items() if owner != index}
        self._asked_s.pop(index, None)
        self._starting.discard(index)
        self._on_lost(index)
        self._supervisor.lost(index, error, goes_on=self._journal.upcoming() is not None)

    def finish(self, timeout_s: float) -> list[Outcome[R]]:
        """How all of them end within `timeout_s`; none is open any more."""
        outcomes = self._runtime.get_all(list(self._open), timeout_s)
        self._open.clear()
        return outcomes
