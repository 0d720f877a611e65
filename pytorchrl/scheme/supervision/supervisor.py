"""What becomes of lost workers: replaced, done without, or an error; within a budget, and never in a hurry."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pytorchrl.agent.options import Options as BaseOptions
from pytorchrl.agent.options import option
from pytorchrl.errors import (
    ConfigError,
    CrashLoopError,
    InsufficientResourcesError,
    NoWorkersLeft,
    WorkerDiedError,
    WorkerLostError,
)
from pytorchrl.runtime import Handle, Runtime
from pytorchrl.terminal import get_logger

FAILURE_POLICIES = ("restart", "ignore", "raise")

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
