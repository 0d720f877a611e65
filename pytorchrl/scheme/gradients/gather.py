"""The three ways in which a CollectorThread gets rollouts: from the local worker, at a barrier, or as they arrive."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

from pytorchrl.errors import CollectionError
from pytorchrl.runtime import Future, Handle, Runtime
from pytorchrl.scheme.collection.c_worker import CWorker
from pytorchrl.scheme.messages import Rollout, Weights

# A waiting thread looks up this often to see whether it should end; results wake it at once.
POLL_INTERVAL_S = 0.1
# A finished result may lie on another node; fetching it takes no longer than this.
FETCH_TIMEOUT_S = 60.0

Deliver = Callable[[list[Rollout]], None]


class Gather(Protocol):
    """One way of gathering: `step` delivers what it got; `finish` gives what was still asked for."""

    def step(self, deliver: Deliver) -> None:
        """Gather once and hand it on."""

    pushes: int
    """Weights given to single workers so far."""

    def push(self, weights: Callable[[], Weights], due: Callable[[int], bool], only: int | None = None) -> bool:
        """Attach new weights to the next request of every worker (or of one) for which `due(its version)`."""

    def versions(self) -> list[int]:
        """Version of the weights that each worker was last given."""

    def finish(self, timeout_s: float) -> list[Rollout]:
        """Wait for what is still in flight; dead workers have nothing."""


class LocalGather:
    """The local worker collects with the learner's own parameters, so there is nothing to push."""

    def __init__(self, local_worker: CWorker) -> None:
        self._local_worker = local_worker
        self.pushes = 0

    def step(self, deliver: Deliver) -> None:
        """Collect one rollout in the caller's thread."""
        deliver([self._local_worker.collect()])

    def push(self, weights: Callable[[], Weights], due: Callable[[int], bool], only: int | None = None) -> bool:
        """Nothing: it shares the learner's parameters."""
        return False

    def versions(self) -> list[int]:
        """The learner's own version."""
        return [self._local_worker.version]

    def finish(self, timeout_s: float) -> list[Rollout]:
        """Nothing is ever in flight between two steps."""
        return []


class _RemoteGather:
    """What the barrier and the free-running way share: requests, and the weights that go with them."""

    def __init__(self, workers: Sequence[Handle[CWorker]], runtime: Runtime) -> None:
        self._workers, self._runtime = workers, runtime
        # Weights wait here for their worker's next request, which carries them.
        self._outbox: list[object | None] = [None] * len(workers)
        # -1: not even the first weights, so that equal starts do not rest on equal initialisation everywhere.
        self._versions = [-1] * len(workers)
        self.pushes = 0
        self._num_requests = [0] * len(workers)
        # Requests in order of dispatch. Touched by the collecting thread only, or after it has ended.
        self._in_flight: dict[Future[Rollout], int] = {}
        self._arrived: dict[int, Rollout] = {}  # of a round that is not complete yet
        self._reference: tuple[int, object] | None = None

    def versions(self) -> list[int]:
        """Version last given to each worker."""
        return list(self._versions)

    def push(self, weights: Callable[[], Weights], due: Callable[[int], bool], only: int | None = None) -> bool:
        """Put the weights once, and attach them to the next request of each worker that is due."""
        candidates = range(len(self._workers)) if only is None else (only,)
        chosen = [index for index in candidates if due(self._versions[index])]
        if not chosen:
            return False
        snapshot = weights()
        if self._reference is None or self._reference[0] != snapshot.version:
            self._reference = (snapshot.version, self._runtime.put(snapshot))
        for index in chosen:
            self._outbox[index], self._versions[index] = self._reference[1], snapshot.version
        return True

    def _request(self, index: int) -> None:
        weights, self._outbox[index] = self._outbox[index], None
        self._num_requests[index] += 1
        self.pushes += weights is not None
        # The reference is resolved on the way: the worker receives a `Weights`.
        future = self._workers[index].submit(CWorker.collect, weights)  # type: ignore[arg-type]
        self._in_flight[future] = index

    def finish(self, timeout_s: float) -> list[Rollout]:
        """Results of all requests still in flight, without asking again."""
        outcomes = self._runtime.get_all(list(self._in_flight), timeout_s)
        rollouts = [*self._arrived.values(), *(outcome.value for outcome in outcomes if outcome.value is not None)]
        self._in_flight.clear()
        self._arrived = {}
        return rollouts


class Barrier(_RemoteGather):
    """One rollout from each worker, all with the same weights.

    Args:
        workers: The remote workers.
        runtime: Where they run.
        fraction_workers: Share of workers that must have finished before the rest are told to stop.
        min_steps: Steps in each environment that a worker told to stop collects all the same.
        timeout_s: How long a round may take.
    """

    def __init__(self, workers: Sequence[Handle[CWorker]], runtime: Runtime, fraction_workers: float,
                 min_steps: int, timeout_s: float = 300.0) -> None:
        super().__init__(workers, runtime)
        self._timeout_s = timeout_s
        self._enough = math.ceil(fraction_workers * len(workers) - 1e-9)
        self._min_steps = min_steps

    def step(self, deliver: Deliver) -> None:
        """Ask all, wait for all, deliver one round in worker order; raise `CollectionError` after the timeout."""
        deadline = self._runtime.now() + self._timeout_s
        for index in range(len(self._workers)):
            self._request(index)
        done = self._arrived
        while self._in_flight:
            for future in self._runtime.wait(list(self._in_flight), POLL_INTERVAL_S):
                index = self._in_flight.pop(future)
                done[index] = self._runtime.get(future, FETCH_TIMEOUT_S)
            if self._in_flight and self._runtime.now() > deadline:
                missing = ", ".join(self._workers[index].name for index in self._in_flight.values())
                raise CollectionError(f"no rollout from {missing} within {self._timeout_s:.1f} s; raise queue_timeout_s "
                                      "if one takes longer")
            if len(done) >= self._enough:
                for index in self._in_flight.values():
                    self._workers[index].signal(CWorker.preempt, self._num_requests[index], self._min_steps)
        self._arrived = {}
        deliver([done[index] for index in sorted(done)])


class OnArrival(_RemoteGather):
    """Workers never wait: each is asked again as soon as its result is handed on.

    Args:
        workers: The remote workers.
        runtime: Where they run.
        col_in_flight: Requests that each worker always has.
        refresh: Called with a worker's index before it is asked again: the moment for new weights.
    """

    def __init__(self, workers: Sequence[Handle[CWorker]], runtime: Runtime, col_in_flight: int,
                 refresh: Callable[[int], object]) -> None:
        super().__init__(workers, runtime)
        self._col_in_flight, self._refresh = col_in_flight, refresh

    def step(self, deliver: Deliver) -> None:
        """One poll: take all finished results, oldest request first; hand on, refresh weights, ask again."""
        if not self._in_flight:
            for _ in range(self._col_in_flight):
                for index in range(len(self._workers)):
                    self._refresh(index)
                    self._request(index)
        for future in self._runtime.wait(list(self._in_flight), POLL_INTERVAL_S):
            index = self._in_flight.pop(future)
            deliver([self._runtime.get(future, FETCH_TIMEOUT_S)])
            self._refresh(index)
            self._request(index)
