"""Strategies of collection by remote workers.

`Barrier` collects in synchronous rounds. There are two asynchronous strategies: `OnArrival` requests a new rollout
whenever a rollout arrives; `OnDemand` requests a new rollout only if the learner is expected to use it before it is too
old. The local worker needs none of them: it collects in the learner's thread (`LocalCollection`).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from pytorchrl.errors import CollectionError, WorkerLostError
from pytorchrl.runtime import Handle, Runtime
from pytorchrl.scheme.collection.c_worker import CWorker
from pytorchrl.scheme.collection.owed_steps import OwedSteps
from pytorchrl.scheme.collection.protocols import Deliver
from pytorchrl.scheme.collection.resizing import Closed, Elastic
from pytorchrl.scheme.collection.weight_broadcast import WeightBroadcast
from pytorchrl.scheme.ledger import Ledger
from pytorchrl.scheme.options.collection import BarrierOptions, OnArrivalOptions
from pytorchrl.scheme.supervision.supervisor import Supervisor
from pytorchrl.scheme.transport.messages import Rollout
from pytorchrl.scheme.transport.requests import POLL_INTERVAL_S, Requests

# Seconds between two checks whether a delayed request is now allowed. The collector thread must check repeatedly,
# because an update may allow more requests, but does not wake the thread.
_DELAYED_INTERVAL_S = 0.01


class _RemoteCollection(Elastic):
    """The base class of all strategies with remote workers. It makes requests and handles lost workers.

    Args:
        workers: Handles of the remote workers; each replacement is stored at the index of the lost worker.
        runtime: Runtime of the workers.
        supervisor: Supervisor that replaces lost workers.
        ledger: The gradient worker's ledger.
        weights: The object that attaches new weights to requests.
    """

    def __init__(self, workers: list[Handle[CWorker]], runtime: Runtime, supervisor: Supervisor, ledger: Ledger,
                 weights: WeightBroadcast) -> None:
        self._workers, self._runtime, self._supervisor, self._num_asked = workers, runtime, supervisor, len(workers)
        self._journal, self._ledger, self._weights = weights.local_worker.journal, ledger, weights
        self._watch = weights.watch  # measures the delivery of rollouts ("receive"), including waits for queue space
        self._delivered = [0] * len(workers)  # env steps that the current incarnation of each worker delivered
        self.delivered_by_lost = 0
        self._num_requests = [0] * len(workers)  # number of requests to the current incarnation of each worker
        # Other threads use `_in_flight` and `_arrived` only after the collector thread has ended.
        self._in_flight: Requests[Rollout] = Requests(
            runtime, supervisor, self._journal, lambda rollout: rollout.header.collect_s,
            lambda rollout: rollout.numbers, self._forget, self._request_replacement)
        # For each worker, its rollouts of incomplete rounds, oldest first.
        self._arrived: defaultdict[int, deque[Rollout]] = defaultdict(deque)
        self._is_draining = False

    def num_live(self) -> int:
        """Return the number of workers that are not lost."""
        return len(self._workers) - len(self._supervisor.gone)

    def num_in_flight(self) -> int:
        """Return the number of requests whose rollouts have not arrived."""
        return len(self._in_flight)

    def take_send_s(self) -> float:
        """Return 0, because transit times are measured in synchronous rounds only."""
        return 0.0

    def _request(self, index: int, num_steps: int | None = None) -> None:
        self._num_requests[index] += 1
        self._in_flight.add(
            index, self._workers[index].submit(CWorker.collect, self._weights.take(index), num_steps))

    def _refresh_and_request(self, index: int) -> None:
        self._weights.attach_due(index)
        self._request(index)

    def _poll(self, timeout_s: float = POLL_INTERVAL_S) -> Iterator[tuple[int, Rollout]]:
        """Yield (worker index, rollout) for each finished request; wait at most `timeout_s` seconds for one."""
        for index, rollout in self._in_flight.poll(timeout_s):
            self._delivered[index] += rollout.header.num_env_steps
            self._weights.delivered(index, rollout.header.num_env_steps)
            yield index, rollout

    def _book(self, rollouts: list[Rollout]) -> list[Rollout]:
        """Count the env steps of rollouts as collected, and return the rollouts that contain env steps."""
        self._ledger.collect(sum(rollout.header.num_env_steps for rollout in rollouts))
        self._weights.num_rollouts_since += len(rollouts)
        return [rollout for rollout in rollouts if rollout.header.num_env_steps]

    def _deliver(self, rollouts: list[Rollout], deliver: Deliver) -> None:
        with self._watch.part("receive"):
            if valid := self._book(rollouts):
                deliver(valid)

    def _forget(self, index: int) -> None:
        """Reset the counts of a lost worker, and add its count of delivered env steps to `delivered_by_lost`."""
        self._weights.forget(index)
        self._num_requests[index] = 0
        self.delivered_by_lost += self._delivered[index]
        self._delivered[index] = 0

    def _request_replacement(self, index: int) -> None:
        """Make a request to the replacement of a lost worker, with the newest weights."""
        if not self._is_draining and index < self._num_asked:
            self._refresh_and_request(index)

    def drain(self, deliver: Deliver, deadline: float) -> None:
        """Deliver the rollouts in flight and make no new requests; the next call of `step` starts collection again.

        Raises:
            Exception: An error of a worker, or the supervisor's error for a lost worker.
        """
        self._is_draining = True
        try:
            while len(self._in_flight) and self._runtime.now() < deadline:
                for _, rollout in self._poll():
                    self._deliver_late([rollout], deliver)
            for index in sorted(set(self._in_flight.owners())):
                self._in_flight.lose(index, WorkerLostError(f"{self._workers[index].name} delivered nothing before the "
                                                            "end of drain()"))
        finally:
            self._is_draining = False
        self._deliver_late([rollout for rollouts in self._arrived.values() for rollout in rollouts], deliver)
        self._arrived.clear()

    def _deliver_late(self, rollouts: list[Rollout], deliver: Deliver) -> None:
        self._ledger.collect(sum(rollout.header.num_env_steps for rollout in rollouts))
        deliver(rollouts)

    def finish(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` seconds for the rollouts in flight; count their steps as collected in the ledger."""
        outcomes = self._in_flight.finish(timeout_s)
        rollouts = [rollout for arrived in self._arrived.values() for rollout in arrived]
        self._arrived.clear()
        for rollout in [*rollouts, *(outcome.value for outcome in outcomes if outcome.value is not None)]:
            self._ledger.collect(rollout.header.num_env_steps)


class Barrier(_RemoteCollection):
    """Collection in synchronous rounds. In a round, each worker collects one rollout with the same weights.

    With `on_straggler="finish"`, a preempted worker collects the rest of its rollout at the start of the next round.

    Args:
        workers, runtime, supervisor, ledger, weights: See `_RemoteCollection`.
        options: Options of synchronous collection.
        timeout_s: Time limit of a round, in seconds.
    """

    Options: TypeAlias = BarrierOptions

    def __init__(self, workers: list[Handle[CWorker]], runtime: Runtime, supervisor: Supervisor, ledger: Ledger,
                 weights: WeightBroadcast, options: Barrier.Options, timeout_s: float) -> None:
        super().__init__(workers, runtime, supervisor, ledger, weights)
        rollout_size = weights.local_worker.storage.rollout_size
        self._timeout_s, self._rollout_size = timeout_s, weights.local_worker.num_envs * rollout_size
        self._fraction_workers = options.col_fraction_workers
        self._min_steps = max(1, round(options.fraction_samples * rollout_size))
        self._owed = OwedSteps(rollout_size, options.finishes_stragglers)
        self._rests: dict[int, Rollout] = {}  # worker index -> rest of a preempted rollout, once received
        self._num_pending = 0  # rounds that have been requested but not delivered
        self._send_s = 0.0

    def request_ahead(self, num_steps: int) -> None:
        """Start enough rounds to collect at least `num_steps` steps; later calls of `collect` return these rounds."""
        self._weights.attach_due()
        self._request_rounds(-(-num_steps // (self._num_asked * self._rollout_size)))

    def _request_rounds(self, num_rounds: int) -> None:
        for _ in range(num_rounds):
            self._num_pending += 1
            for index in self._asked():
                self._request(index)

    def step(self, deliver: Deliver) -> None:
        """Collect one round and deliver it."""
        self._deliver(self._collect(), deliver)

    def collect(self) -> list[Rollout]:
        """Return the rollouts of one round, ordered by worker; start a round unless one was started in advance.

        If a worker is lost, the round waits for a rollout of the replacement, collected with the same weights.

        Raises:
            CollectionError: The round took longer than the timeout.
        """
        rollouts = self._collect()
        with self._watch.part("receive"):
            return self._book(rollouts)

    def _collect(self) -> list[Rollout]:
        self._weights.attach_due()
        deadline = self._runtime.now() + self._timeout_s
        is_awaited = not self._num_pending
        if is_awaited:
            self._request_rounds(1)
        while (missing := self._missing()) or self._supervisor.is_replacing:
            for index, rollout in self._poll():
                self._add(index, rollout)
            missing = self._missing()
            if missing and self._runtime.now() > deadline:
                names = ", ".join(self._workers[index].name for index in missing)
                raise CollectionError(f"no rollout from {names} within {self._timeout_s:.1f} s; raise queue_timeout_s "
                                      "if a rollout takes longer")
            # A replayed run does not preempt here: `_request` repeats the preemptions of the recorded run.
            if len(self._arrived) >= self._num_enough and self._journal.upcoming() is None:
                for index in missing:
                    self._workers[index].signal(CWorker.preempt, self._num_requests[index], self._min_steps)
        send_s = self._in_flight.take_send_s()
        self._send_s += send_s if is_awaited else 0.0
        self._num_pending -= 1
        rollouts = [*self._rests.values(), *(self._arrived[index].popleft() for index in sorted(self._arrived))]
        self._rests.clear()
        for index in [index for index, arrived in self._arrived.items() if not arrived]:
            del self._arrived[index]
        # The sort is stable, so the rest of a worker's previous rollout stays before its rollout of this round.
        return sorted(rollouts, key=lambda rollout: rollout.header.worker)

    def _add(self, index: int, rollout: Rollout) -> None:
        """Store a rollout.

        With `on_straggler="finish"`, a preempted worker first collects the rest of its rollout in the next round. When
        this rest arrives, request the worker's next rollout, which belongs to the same round.
        """
        if self._owed.receive(index, rollout.header):
            self._rests[index] = rollout
            self._request(index)
        else:
            self._arrived[index].append(rollout)

    def drain(self, deliver: Deliver, deadline: float) -> None:
        """Deliver the rollouts of all rounds in flight, including rounds started in advance; see `_RemoteCollection`.

        Steps that are missing from preempted rollouts are not collected later.
        """
        self._move_rests()
        super().drain(deliver, deadline)
        self._owed.cancel()
        self._num_pending = 0

    def finish(self, timeout_s: float) -> None:
        """Wait for the rollouts in flight, and count their steps; see `_RemoteCollection`."""
        self._move_rests()
        super().finish(timeout_s)

    def _move_rests(self) -> None:
        """Move the received rests of preempted rollouts to `_arrived`, where the base class looks for rollouts."""
        for index, rollout in self._rests.items():
            self._arrived[index].appendleft(rollout)
        self._rests.clear()

    def resized(self, number: int, closed: Sequence[Closed]) -> None:
        """Forget the workers from index `number` on, and make requests to new workers; see `ElasticStrategy`.

        Steps that are missing from preempted rollouts of the forgotten workers are not collected later.
        """
        self._owed.cancel(number)
        super().resized(number, closed)

    def take_send_s(self) -> float:
        """Return the seconds that requests and rollouts spent in transit since the last call of this method.

        Rounds that were started in advance do not count, because the learner does not wait for their rollouts.
        """
        seconds, self._send_s = self._send_s, 0.0
        return seconds

    @property
    def _num_enough(self) -> int:
        """Number of workers that must finish a round before the other workers are preempted."""
        gone = 0 if self._supervisor.is_replacing else len(self._supervisor.gone)
        return math.ceil(self._fraction_workers * (len(self._workers) - gone) - 1e-9)

    def _missing(self) -> list[int]:
        """Return the indices of the workers whose rollouts for the oldest round have not arrived."""
        return [index for index in dict.fromkeys(self._in_flight.owners()) if index not in self._arrived]

    def _request_replacement(self, index: int) -> None:
        for _ in range(self._num_pending - len(self._arrived.get(index, ()))):
            super()._request_replacement(index)

    def _request(self, index: int, num_steps: int | None = None) -> None:
        recorded = self._journal.upcoming_of("answer", index)
        # If the recorded rollout was preempted, the replayed rollout must end at the same step.
        if recorded is not None and recorded[-1]:
            self._workers[index].submit(CWorker.preempt, self._num_requests[index] + 1, recorded[-1])
        super()._request(index, num_steps or self._owed.of(index))


class OnArrival(_RemoteCollection):
    """Asynchronous collection in which each worker always has `col_in_flight` requests, so that no worker waits.

    Args:
        workers, runtime, supervisor, ledger, weights: See `_RemoteCollection`.
        options: Options of asynchronous collection.
    """

    Options: TypeAlias = OnArrivalOptions

    def __init__(self, workers: list[Handle[CWorker]], runtime: Runtime, supervisor: Supervisor, ledger: Ledger,
                 weights: WeightBroadcast, options: OnArrival.Options) -> None:
        super().__init__(workers, runtime, supervisor, ledger, weights)
        self._col_in_flight, self._is_started = options.col_in_flight, False

    def step(self, deliver: Deliver) -> None:
        """Poll once: deliver finished rollouts, oldest request first, and request a new rollout after each delivery."""
        if not self._is_started:
            self._is_started = True
            for _ in range(self._col_in_flight):
                for index in self._asked():
                    self._refresh_and_request(index)
        for index, rollout in self._poll():
            self._deliver([rollout], deliver)
            if index < self._num_asked:
                self._refresh_and_request(index)

    def drain(self, deliver: Deliver, deadline: float) -> None:
        """Deliver the rollouts in flight; see `_RemoteCollection`."""
        super().drain(deliver, deadline)
        self._is_started = False

    def _request_replacement(self, index: int) -> None:
        for _ in range(self._col_in_flight if self._is_started else 0):
            super()._request_replacement(index)


class OnDemand(_RemoteCollection):
    """Asynchronous collection in which rollouts are requested only if they will not be too old at their first use.

    The learner's progress determines when a request is made. The journal therefore contains each request, so that a
    replay can make the same requests in the same order.

    Args:
        workers, runtime, supervisor, ledger, weights: See `_RemoteCollection`.
        options: Options of asynchronous collection; a worker has at most `col_in_flight` requests.
        may_request: Function that returns whether another rollout may be requested, given the number of rollouts in
            flight.
    """

    def __init__(self, workers: list[Handle[CWorker]], runtime: Runtime, supervisor: Supervisor, ledger: Ledger,
                 weights: WeightBroadcast, options: OnArrival.Options, may_request: Callable[[int], bool]) -> None:
        super().__init__(workers, runtime, supervisor, ledger, weights)
        self._col_in_flight, self._may_request = options.col_in_flight, may_request

    def step(self, deliver: Deliver) -> None:
        """Poll once: deliver finished rollouts, and make all allowed requests after each delivery."""
        is_delayed = self._make_requests()
        for _, rollout in self._poll(_DELAYED_INTERVAL_S if is_delayed else POLL_INTERVAL_S):
            self._deliver([rollout], deliver)
            self._make_requests()

    def _make_requests(self) -> bool:
        """Make all allowed requests; return whether a free worker must wait, because no request is allowed yet."""
        while free := self._free():
            index = self._next_in_record() if self._journal.upcoming() else free[0]
            if index is None or (not self._journal.upcoming() and not self._may_request(len(self._in_flight))):
                return True
            self._journal.note("ask", index)
            self._refresh_and_request(index)
        return False

    def _next_in_record(self) -> int | None:
        """If the next event of the recorded run is a request, return the index of its worker; otherwise, None."""
        event = self._journal.upcoming()
        return event[1] if event is not None and event[0] == "ask" else None

    def _free(self) -> list[int]:
        """Return the live workers with fewer than `col_in_flight` requests, sorted by their number of requests."""
        counts = Counter(self._in_flight.owners())
        return sorted((index for index in self._asked() if counts[index] < self._col_in_flight),
                      key=lambda index: counts[index])

    def _request_replacement(self, index: int) -> None:
        """Do nothing, because the next call of `step` treats a replacement like any other free worker."""
