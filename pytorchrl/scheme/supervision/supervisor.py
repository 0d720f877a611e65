"""React to lost workers: replace them (after a pause, within a budget), continue without them, or raise an error."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import TypeAlias

from pytorchrl.errors import (
    CrashLoopError,
    InsufficientResourcesError,
    NoWorkersLeft,
    RayDiedError,
    WorkerDiedError,
    WorkerLostError,
)
from pytorchrl.runtime import Handle, Runtime
from pytorchrl.scheme.options.run import SupervisorOptions
from pytorchrl.support.terminal import get_logger

# Largest number of restarts of one worker, and the number of seconds within which they are counted.
_MAX_RESTARTS, _WINDOW_S = 10, 600.0
# A worker that is lost this many times in a row, without a result in between, is in a crash loop, which ends the run.
_MAX_FRUITLESS = 3
# A worker that is lost `_MAX_SHORT_LIVES` times in a row, each time after fewer than `_FEW_RESULTS` results, is also in
# a crash loop.
_MAX_SHORT_LIVES, _FEW_RESULTS = 5, 5
# The error about a crash loop lists at most this number of the worker's earlier errors.
_MAX_SHOWN = 3
_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 0.5, 30.0
# At most this many replacements start at the same time. The number is small, because each one imports torch and
# builds environments on cores that other workers are using.
_MAX_STARTING = 4
# A worker is considered hung if its call takes longer than the timeout and longer than `_HANG_FACTOR` times the longest
# call so far. A worker's first call must also wait until the worker has started. For a first call, the timeout is
# therefore multiplied by `_FIRST_CALL_FACTOR`, and the duration of the longest call so far includes such waits.
_HANG_FACTOR, _FIRST_CALL_FACTOR = 10.0, 5.0

logger = get_logger(__name__)


class Supervisor:
    """Find hung workers in one set of workers, and replace lost workers.

    A lost worker is replaced after a pause, which is 0.5 s at first and doubles each time the worker is lost, up to
    30 s. The run ends if a worker is lost too often:

    - three times in a row without a result in between,
    - five times in a row, each time after fewer than five results, or
    - more than ten times in ten minutes.

    The run also ends if a replacement waits too long for free resources.

    Each worker is in one of four states:

    - starting (in `_untried`): it has not returned any result yet,
    - working (in none of the sets): it has returned a result since it was started,
    - due (in `gone` and `_due`): it is lost, and will be replaced at the stored time, or
    - missing (in `gone` only): it is lost and will not be replaced.

    A call that takes too long (`hung`) makes its worker lost. `Requests` then discards the calls of this worker, so a
    result that arrives late is neither returned nor counted. Between two calls of methods,
    `not gone & _untried and _due.keys() <= gone and not gone & _since.keys()`.

    Args:
        workers: Handles of the set; the handle of a replacement overwrites the lost worker's handle in this list.
        replace: Function that kills the worker at an index of `workers` and starts a replacement.
        runtime: The runtime of the workers, which provides the clock.
        options: Options for the handling of lost workers; None: the defaults.
        seed: Seed of the random variation of pauses.
        hang_timeout_s: Seconds without a result after which a worker is considered hung; None: `worker_timeout_s`. The
            wait for resources is always limited by `worker_timeout_s`.

    Attributes:
        restarts_by_index: For the index of each worker, the number of restarts so far.
        gone: Indices of the workers that are lost and not (yet) replaced.
    """

    Options: TypeAlias = SupervisorOptions

    def __init__(self, workers: Sequence[Handle[object]],
                 replace: Callable[[int], object], runtime: Runtime, options: Options | None = None, seed: int = 0, *,
                 hang_timeout_s: float | None = None) -> None:
        self._workers, self._replace, self._runtime = workers, replace, runtime
        self._options = options or self.Options()
        self._timeout_s = self._options.worker_timeout_s if hang_timeout_s is None else hang_timeout_s
        self._rng = random.Random(f"pauses {seed}")
        self._history: list[deque[tuple[float, str]]] = [deque() for _ in workers]  # (time when lost, error)
        self._fruitless, self._results = [0] * len(workers), [0] * len(workers)
        self._lives: list[list[int]] = [[] for _ in workers]  # for each worker: number of results before each failure
        self._since: dict[int, float] = {}
        self._longest_s = self._longest_start_s = 0.0
        self._due: dict[int, float] = {}
        self._untried = set(range(len(workers)))  # workers that have not returned any result yet
        self.gone: set[int] = set()
        self.restarts_by_index: Counter[int] = Counter()

    @property
    def restarts(self) -> int:
        """Number of restarts so far."""
        return self.restarts_by_index.total()

    @property
    def ignores_lost(self) -> bool:
        """Whether the run continues without replacing lost workers."""
        return self._options.on_worker_failure == "ignore"

    def called(self, index: int) -> None:
        """Start the time limit of a worker's call; do nothing if an earlier call is pending."""
        self._since.setdefault(index, self._runtime.now())

    def waited_s(self, index: int) -> float:
        """Return the seconds that a worker has spent on its oldest pending call, to be compared with the time limit.

        The time starts with the call or, if the worker was still busy with an earlier call, when that call ended.
        """
        return self._runtime.now() - self._since[index]

    def awaited(self) -> str:
        """List the workers that have pending calls or are lost, as in "CWorker 1 (2.5 s), CWorker 2 (lost)".

        The seconds are the waiting times of the pending calls.
        """
        now = self._runtime.now()
        since = {index: f"{now - moment:.1f} s" for index, moment in dict(self._since).items()}
        waits = since | dict.fromkeys(set(self.gone), "lost")
        return ", ".join(f"{self._workers[index].name} ({waits[index]})" for index in sorted(waits)) or "no worker"

    def answered(self, index: int, seconds: float, more: bool) -> None:
        """Record that a worker returned a result.

        Args:
            index: Index of the worker.
            seconds: Seconds that the worker needed for the result.
            more: Whether the worker has other unanswered calls, whose time limit starts now.
        """
        self._longest_s = max(self._longest_s, seconds)
        self._fruitless[index] = 0
        self._results[index] += 1
        if index in self._untried and index in self._since:
            self._longest_start_s = max(self._longest_start_s, self.waited_s(index))
        self._untried.discard(index)
        if more:
            self._since[index] = self._runtime.now()
        else:
            self._since.pop(index, None)

    def failed(self, index: int) -> None:
        """Record a call that ended with an error, and stop timing it: a worker that reports an error is not hung."""
        self._since.pop(index, None)

    def lost(self, index: int, error: BaseException, will_be_replaced: bool = False) -> None:
        """Record that a worker is dead or hung.

        Args:
            index: Index of the worker.
            error: The error that shows that the worker is dead or hung.
            will_be_replaced: Whether the worker is certain to be replaced, as in a replayed run. If so, it may be
                lost any number of times.

        Raises:
            WorkerLostError: `on_worker_failure` is "raise", or a process of Ray itself has ended.
            CrashLoopError: The worker was lost too often.
            NoWorkersLeft: `on_worker_failure` is "ignore", and no worker is left.
        """
        if isinstance(error, RayDiedError):
            raise error
        name = self._workers[index].name
        self._since.pop(index, None)
        self._untried.discard(index)
        self.gone.add(index)
        if self._options.on_worker_failure == "raise":
            raise WorkerLostError(str(error)) from error
        if self.ignores_lost:
            if not isinstance(error, WorkerDiedError):
                self.kill(index)
            if len(self.gone) == len(self._workers):
                number = len(self._workers)
                raise NoWorkersLeft(f"all {number} workers are lost; {name} was lost last: {error}") from error
            left = len(self._workers) - len(self.gone)
            logger.warning("%s; continuing with %d of %d workers", error, left, len(self._workers))
            return
        now, history = self._runtime.now(), self._history[index]
        while history and now - history[0][0] > _WINDOW_S:
            history.popleft()
        self._fruitless[index] += 1
        self._lives[index] = [*self._lives[index][1 - _MAX_RESTARTS:], self._results[index]]
        self._results[index] = 0
        latest = self._lives[index][-_MAX_SHORT_LIVES:]
        is_short_lived = len(latest) == _MAX_SHORT_LIVES and max(latest) < _FEW_RESULTS
        if not will_be_replaced and (
                self._fruitless[index] >= _MAX_FRUITLESS or is_short_lived or len(history) >= _MAX_RESTARTS):
            raise CrashLoopError(
                f"{name} was lost {self._fruitless[index]} times in a row without a result, and replaced "
                f"{len(history)} times in {_WINDOW_S / 60:.0f} minutes; before each loss, it had returned "
                f"{', '.join(map(str, self._lives[index]))} results; the last time: {error}; before: "
                f"{'; '.join(f'{text} ({now - moment:.0f} s ago)' for moment, text in list(history)[-_MAX_SHOWN:])}"
            ) from error
        pause = min(_LONGEST_BACKOFF_S, _FIRST_BACKOFF_S * 2 ** len(history)) * self._rng.uniform(0.75, 1.25)
        history.append((now, str(error)))
        self._due[index] = now + pause
        logger.warning("%s; it will be replaced in %.1f s", error, pause)

    def replaced(self) -> list[int]:
        """Replace lost workers whose replacement is due, and return their indices.

        Replacements wait while four or more workers are starting.
        """
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
        self.restarts_by_index[index] += 1

    def resized(self) -> None:
        """Adapt to the new length of `workers`, after workers were added or removed at the end of the list."""
        before, number = len(self._history), len(self._workers)
        self._untried.update(range(before, number))
        self._history = [*self._history[:number], *(deque() for _ in range(before, number))]
        self._fruitless = [*self._fruitless[:number], *[0] * (number - before)]
        self._results = [*self._results[:number], *[0] * (number - before)]
        self._lives = [*self._lives[:number], *([] for _ in range(before, number))]
        for index in range(number, before):
            self._since.pop(index, None)
            self._due.pop(index, None)
            self._untried.discard(index)
            self.gone.discard(index)

    def kill(self, index: int) -> None:
        """Kill a worker."""
        self._runtime.kill(self._workers[index])

    @property
    def is_replacing(self) -> bool:
        """Whether any replacement is pending."""
        return bool(self._due)

    def deadline_s(self, index: int) -> float:
        """Return the seconds that a worker may take for its next answer."""
        if index in self._untried:
            return max(_FIRST_CALL_FACTOR * self._timeout_s, _HANG_FACTOR * max(self._longest_start_s, self._longest_s))
        return max(self._timeout_s, _HANG_FACTOR * self._longest_s)

    def hung(self) -> list[tuple[int, WorkerLostError]]:
        """Return the workers that have not answered for too long, with an error for each.

        Raises:
            InsufficientResourcesError: A worker has not started because resources are missing.
        """
        now = self._runtime.now()
        for index in self._untried & self._since.keys():
            waited = now - self._since[index]
            if waited > self._options.worker_timeout_s and (lack := self._runtime.lacks_room(self._workers[index])):
                raise InsufficientResourcesError(
                    f"{self._workers[index].name} has waited {waited:.0f} s for resources: {lack}; add a machine, "
                    "request less, raise worker_timeout_s, or continue without lost workers "
                    "(on_worker_failure='ignore')")
        return [(index, WorkerLostError(f"{self._workers[index].name} hangs: no result for {now - since:.1f} s"))
                for index, since in self._since.items() if now - since > self.deadline_s(index)]
