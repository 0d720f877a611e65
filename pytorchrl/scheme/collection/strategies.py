"""Strategies of collection, and their base classes.

`LocalCollection` collects in the learner thread. The other strategies request rollouts from remote workers. `Barrier`
collects in synchronous rounds. There are two asynchronous strategies: `OnArrival` requests a new rollout whenever a
rollout arrives; `OnDemand` requests a new rollout only if the learner is expected to use it before it is too old. A
third asynchronous strategy, `CentralInference`, has a module of its own.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeAlias, TypeVar

from typing_extensions import override

from pytorchrl.errors import CollectionError, WorkerLostError
from pytorchrl.runtime import Handle, Runtime
from pytorchrl.scheme.collection.c_worker import CWorker
from pytorchrl.scheme.collection.owed_steps import OwedSteps
from pytorchrl.scheme.collection.weight_broadcast import WeightBroadcast
from pytorchrl.scheme.ledger import DropReason, Ledger
from pytorchrl.scheme.options.base import MANY_IN_FLIGHT
from pytorchrl.scheme.options.collection import BarrierOptions, OnArrivalOptions
from pytorchrl.scheme.supervision.supervisor import Supervisor
from pytorchrl.scheme.timing import Stopwatch
from pytorchrl.scheme.transport.messages import Rollout
from pytorchrl.scheme.transport.receive import copied
from pytorchrl.scheme.transport.requests import POLL_INTERVAL_S, Requests

W = TypeVar("W")
A = TypeVar("A")

Deliver = Callable[[list[Rollout]], object]
Closed = tuple[int, int] | None
"""The result of `CWorker.close`; None if the worker did not respond."""

# Seconds between two checks whether a delayed request is now allowed. The collector thread must check repeatedly,
# because an update may allow more requests, but does not wake the thread.
DELAYED_INTERVAL_S = 0.005


class CollectionStrategy(ABC):
    """A strategy that collects rollouts for a gradient worker.

    Args:
        ledger: The gradient worker's ledger.
        watch: Stopwatch that measures the delivery of rollouts ("receive"), including waits for queue space.

    Attributes:
        delivered_by_lost: Number of env steps that workers delivered before they were lost. The strategy counts them,
            because a lost worker cannot report its own count.
    """

    def __init__(self, ledger: Ledger, watch: Stopwatch) -> None:
        self._ledger, self._watch = ledger, watch
        self.delivered_by_lost = 0

    @abstractmethod
    def step(self, deliver: Deliver) -> None:
        """Collect one round, or poll the workers once; then call `deliver` with the rollouts that have arrived.

        The ledger counts the steps of these rollouts as in flight until they are queued, stored or dropped.
        """

    def _book(self, rollouts: list[Rollout]) -> list[Rollout]:
        """Count the env steps of rollouts as collected, and return the rollouts that contain env steps."""
        self._book_collected(rollouts)
        return [rollout for rollout in rollouts if rollout.header.num_env_steps]

    def _book_collected(self, rollouts: list[Rollout]) -> None:
        cancelled = sum(rollout.header.cancelled_steps for rollout in rollouts)
        self._ledger.collect(sum(rollout.header.num_env_steps for rollout in rollouts) + cancelled)
        self._ledger.drop(cancelled, "in_flight", DropReason.CANCELLED)

    def _deliver(self, rollouts: list[Rollout], deliver: Deliver) -> None:
        with self._watch.part("receive"):
            if valid := self._book(rollouts):
                deliver(valid)

    def invariant(self) -> bool:
        """Return whether no worker has too many requests, which holds after every event."""
        return True  # without remote workers, there are no requests

    @abstractmethod
    def num_live(self) -> int:
        """Return the number of workers that are not lost."""

    def num_in_flight(self) -> int:
        """Return the number of requests that remote workers have not yet answered."""
        return 0

    def take_send_s(self) -> float:
        """Return the seconds that messages of synchronous rounds were in transit since this method's last call."""
        return 0.0

    def stop_requests(self) -> None:
        """Make no new requests until the end of the next drain, which follows soon; any thread may call this."""

    @abstractmethod
    def drain(self, deliver: Deliver, deadline: float) -> None:
        """Deliver the rollouts in flight and make no new requests; workers still busy at the deadline count as lost.

        The next call of `step` starts collection again.

        Raises:
            Exception: An error of a worker, or the supervisor's error for a lost worker.
        """

    def finish(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` seconds for the rollouts in flight; count their steps, but discard the rollouts."""


class RoundStrategy(CollectionStrategy):
    """A strategy that collects in rounds; the learner waits for each round."""

    @abstractmethod
    def _collect(self) -> list[Rollout]:
        """Collect a round, and return its rollouts."""

    @override
    def step(self, deliver: Deliver) -> None:
        self._deliver(self._collect(), deliver)

    def collect(self) -> list[Rollout]:
        """Collect a round, and return the rollouts that contain valid steps.

        The ledger counts these steps as in flight until the caller books them as queued or dropped.

        Raises:
            CollectionError: The round took longer than the timeout.
        """
        rollouts = self._collect()
        with self._watch.part("receive"):
            return self._book(rollouts)

    def request_ahead(self, num_steps: int) -> None:
        """Start enough rounds to collect at least `num_steps` steps; later calls of `collect` return these rounds.

        Steps are counted as in `RolloutHeader.size`. If the local worker collects, no round can be started in advance.
        """


class LocalCollection(RoundStrategy):
    """Collection by the local worker, in the learner thread and with the learner's own parameters.

    Args:
        local_worker: The local worker.
        ledger: The gradient worker's ledger.
        watch: Stopwatch that measures how long the delivery of rollouts takes.
        owed: Counter of the steps that a preempted rollout lacks and that must be collected later.
    """

    def __init__(self, local_worker: CWorker, ledger: Ledger, watch: Stopwatch, owed: OwedSteps) -> None:
        super().__init__(ledger, watch)
        self._local_worker, self._journal, self._owed = local_worker, local_worker.journal, owed

    @override
    def _collect(self) -> list[Rollout]:
        """Collect one rollout.

        If the previous rollout was preempted and must be finished, its missing steps are collected first. The result
        then begins with a rollout of these steps.
        """
        # The first rollout is copied, because the second rollout will overwrite its memory.
        rests = [copied(self._collect_one())] if self._owed.of(0) else []
        return [*rests, self._collect_one()]

    def _collect_one(self) -> Rollout:
        recorded = self._journal.upcoming_of("answer", 0)
        # If the recorded rollout was preempted, the replayed rollout must end at the same step.
        if recorded is not None and recorded[-1]:
            self._local_worker.preempt_next(recorded[-1])
        rollout = self._local_worker.collect(num_steps=self._owed.of(0))
        self._owed.receive(0, rollout.header)
        if self._journal.is_kept:
            self._journal.note("answer", 0, *rollout.numbers)
        return rollout

    @override
    def num_live(self) -> int:
        return 1

    @override
    def drain(self, deliver: Deliver, deadline: float) -> None:
        """Forget the steps that a preempted rollout lacks, so that they are not collected later.

        `deliver` is not called, because no rollout is in flight.
        """
        self._owed.cancel()


class RemoteStrategy(CollectionStrategy, Generic[W, A]):
    """A strategy with remote workers, whose number may change between two calls of `step`.

    Workers are added and removed only at the end of the list of workers.

    Args:
        workers: Handles of the remote workers; each replacement is stored at the index of the lost worker.
        runtime: Runtime of the workers.
        supervisor: Supervisor that replaces lost workers.
        ledger: The gradient worker's ledger.
        weights: The object that attaches new weights to requests.
        seconds_of: Function that returns the working time that an answer reports; see `Requests`.
        numbers_of: Function that returns the numbers by which a replay checks an answer; see `Requests`.
    """

    def __init__(self, workers: list[Handle[W]], runtime: Runtime, supervisor: Supervisor, ledger: Ledger,
                 weights: WeightBroadcast, seconds_of: Callable[[A], float],
                 numbers_of: Callable[[A], tuple[int, ...]]) -> None:
        super().__init__(ledger, weights.watch)
        self._workers, self._runtime, self._supervisor, self._weights = workers, runtime, supervisor, weights
        self._journal = weights.local_worker.journal
        self._num_asked = len(workers)  # workers from this index on are leaving
        # Owner: the collector thread; other threads use `_in_flight` only after it has ended. See `invariant`.
        self._in_flight: Requests[A] = Requests(
            runtime, supervisor, self._journal, seconds_of, numbers_of, self._forget, self._request_replacement)
        self._is_draining = False

    @override
    def invariant(self) -> bool:
        return self._in_flight.at_most(self._most_requests)

    @property
    @abstractmethod
    def _most_requests(self) -> int:
        """Largest number of requests that a worker may have."""

    @abstractmethod
    def _forget(self, index: int) -> None:
        """Reset the counts of a lost worker, and add its count of delivered env steps to `delivered_by_lost`."""

    def _request_replacement(self, index: int) -> None:
        """Make the first requests to a worker that was added or replaces a lost worker, unless `step` makes them."""

    @override
    def num_live(self) -> int:
        return len(self._workers) - len(self._supervisor.gone)

    @override
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @override
    def _book(self, rollouts: list[Rollout]) -> list[Rollout]:
        self._weights.num_rollouts_since += len(rollouts)
        return super()._book(rollouts)

    @override
    def stop_requests(self) -> None:
        self._is_draining = True

    def _poll(self, timeout_s: float = POLL_INTERVAL_S) -> Iterator[tuple[int, A]]:
        """Yield (worker index, answer) for each finished request; wait at most `timeout_s` seconds for one."""
        return self._in_flight.poll(timeout_s)

    def _await_all(self, handle: Callable[[int, A], object], deadline: float) -> None:
        """Call `handle` with all answers in flight; workers that have not answered by the deadline count as lost."""
        self._is_draining = True
        try:
            while len(self._in_flight) and self._runtime.now() < deadline:
                for index, answer in self._poll():
                    handle(index, answer)
            for index in sorted(set(self._in_flight.owners())):
                self._in_flight.lose(index, WorkerLostError(f"{self._workers[index].name} delivered nothing before the "
                                                            "end of drain()"))
        finally:
            self._is_draining = False

    def _deliver_late(self, rollouts: list[Rollout], deliver: Deliver) -> None:
        self._book_collected(rollouts)
        deliver(rollouts)

    # Changes of the number of workers

    def limit(self, number: int) -> None:
        """Make no more requests to workers with an index of `number` or higher, until the next call of `release`.

        Any thread may call this method, even while the collector thread waits for space in the sample queue.
        """
        self._num_asked = min(self._num_asked, number)

    @abstractmethod
    def release(self, number: int) -> bool:
        """Request rollouts from workers 0 to `number` - 1 only, regardless of earlier calls of `limit`.

        Return whether all other workers have delivered the rollouts that were requested from them.
        """

    @abstractmethod
    def resized(self, number: int, closed: Sequence[Closed]) -> None:
        """Adapt to the list of workers after workers were added or removed.

        Args:
            number: New number of workers.
            closed: For each removed worker, the result of `CWorker.close`, or None if the worker did not respond.
        """

    def _book_closed(self, delivered: int, counts: Closed) -> None:
        """Count the undelivered steps of a closed worker as dropped, and add all its steps to `delivered_by_lost`.

        Args:
            delivered: Number of steps that the worker has delivered.
            counts: The result of `CWorker.close`; None: only the delivered steps are known.
        """
        num_steps, undelivered = counts or (delivered, 0)
        self._ledger.collect(undelivered)
        self._ledger.drop(undelivered, "in_flight", DropReason.SHUTDOWN)
        self.delivered_by_lost += num_steps


class _RemoteCollection(RemoteStrategy[CWorker, Rollout]):
    """The base class of the strategies that request rollouts from collection workers.

    Args:
        workers, runtime, supervisor, ledger, weights: See `RemoteStrategy`.
    """

    def __init__(self, workers: list[Handle[CWorker]], runtime: Runtime, supervisor: Supervisor, ledger: Ledger,
                 weights: WeightBroadcast) -> None:
        super().__init__(workers, runtime, supervisor, ledger, weights, lambda rollout: rollout.header.collect_s,
                         lambda rollout: rollout.numbers)
        self._delivered = [0] * len(workers)  # env steps that the current incarnation of each worker delivered
        self._num_requests = [0] * len(workers)  # number of requests to the current incarnation of each worker
        # For each worker, its rollouts of incomplete rounds, oldest first. Other threads use this attribute only after
        # the collector thread has ended.
        self._arrived: defaultdict[int, deque[Rollout]] = defaultdict(deque)

    def _asked(self) -> list[int]:
        """Return the indices of the workers that receive requests: not lost, not leaving, and none during a drain."""
        places = range(0 if self._is_draining else self._num_asked)
        return [index for index in places if index not in self._supervisor.gone]

    def _request(self, index: int, num_steps: int | None = None) -> None:
        self._num_requests[index] += 1
        self._in_flight.add(
            index, self._workers[index].submit(CWorker.collect, self._weights.take(index), num_steps))

    def _refresh_and_request(self, index: int) -> None:
        self._weights.attach_due(index)
        self._request(index)

    @override
    def _poll(self, timeout_s: float = POLL_INTERVAL_S) -> Iterator[tuple[int, Rollout]]:
        for index, rollout in super()._poll(timeout_s):
            self._delivered[index] += rollout.header.num_env_steps
            self._weights.delivered(index, rollout.header.num_env_steps)
            yield index, rollout

    @override
    def _forget(self, index: int) -> None:
        self._weights.forget(index)
        self._num_requests[index] = 0
        self.delivered_by_lost += self._delivered[index]
        self._delivered[index] = 0

    def _request_from_new(self, index: int, num_requests: int) -> None:
        """Make requests to a worker that was added or replaces a lost worker, with the newest weights."""
        if not self._is_draining and index < self._num_asked:
            for _ in range(num_requests):
                self._refresh_and_request(index)

    @override
    def drain(self, deliver: Deliver, deadline: float) -> None:
        self._await_all(lambda _, rollout: self._deliver_late([rollout], deliver), deadline)
        self._deliver_late([rollout for rollouts in self._arrived.values() for rollout in rollouts], deliver)
        self._arrived.clear()

    @override
    def finish(self, timeout_s: float) -> None:
        outcomes = self._in_flight.finish(timeout_s)
        rollouts = [rollout for arrived in self._arrived.values() for rollout in arrived]
        self._arrived.clear()
        self._book_collected([*rollouts, *(outcome.value for outcome in outcomes if outcome.value is not None)])

    @override
    def release(self, number: int) -> bool:
        self._num_asked = number
        return all(index < number for index in (*self._in_flight.owners(), *self._arrived))

    @override
    def resized(self, number: int, closed: Sequence[Closed]) -> None:
        before = len(self._delivered)
        for delivered, counts in zip(self._delivered[number:], closed, strict=True):
            self._book_closed(delivered, counts)
        more = max(0, number - before)
        self._delivered = [*self._delivered[:number], *[0] * more]
        self._num_requests = [*self._num_requests[:number], *[0] * more]
        self._weights.resize(number)
        for index in range(before, number):
            self._request_replacement(index)


class Barrier(_RemoteCollection, RoundStrategy):
    """Collection in synchronous rounds. In a round, each worker collects one rollout with the same weights.

    With `on_straggler="finish"`, a preempted worker collects the rest of its rollout at the start of the next round.

    Args:
        workers, runtime, supervisor, ledger, weights: See `RemoteStrategy`.
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

    @property
    @override
    def _most_requests(self) -> int:
        return self._num_pending  # one for each round

    @override
    def request_ahead(self, num_steps: int) -> None:
        self._weights.attach_due()
        self._request_rounds(-(-num_steps // (self._num_asked * self._rollout_size)))

    def _request_rounds(self, num_rounds: int) -> None:
        for _ in range(num_rounds):
            self._num_pending += 1
            for index in self._asked():
                self._request(index)

    @override
    def _collect(self) -> list[Rollout]:
        """Return the rollouts of one round, ordered by worker; start a round unless one was started in advance.

        If a worker is lost, the round waits for a rollout of the replacement, collected with the same weights.

        Raises:
            CollectionError: The round took longer than the timeout.
        """
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

    @override
    def drain(self, deliver: Deliver, deadline: float) -> None:
        """Deliver the rollouts of all rounds in flight, including rounds started in advance.

        Steps that are missing from preempted rollouts are not collected later.
        """
        self._move_rests()
        super().drain(deliver, deadline)
        self._owed.cancel()
        self._num_pending = 0

    @override
    def finish(self, timeout_s: float) -> None:
        self._move_rests()
        super().finish(timeout_s)

    def _move_rests(self) -> None:
        """Move the received rests of preempted rollouts to `_arrived`, where the base class looks for rollouts."""
        for index, rollout in self._rests.items():
            self._arrived[index].appendleft(rollout)
        self._rests.clear()

    @override
    def resized(self, number: int, closed: Sequence[Closed]) -> None:
        self._owed.cancel(number)  # steps missing from preempted rollouts of removed workers are not collected later
        super().resized(number, closed)

    @override
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

    @override
    def _request_replacement(self, index: int) -> None:
        self._request_from_new(index, self._num_pending - len(self._arrived.get(index, ())))

    @override
    def _request(self, index: int, num_steps: int | None = None) -> None:
        recorded = self._journal.upcoming_of("answer", index)
        # If the recorded rollout was preempted, the replayed rollout must end at the same step.
        if recorded is not None and recorded[-1]:
            self._workers[index].submit(CWorker.preempt, self._num_requests[index] + 1, recorded[-1])
        super()._request(index, num_steps or self._owed.of(index))


class OnArrival(_RemoteCollection):
    """Asynchronous collection in which each worker always has `col_in_flight` requests, so that no worker waits.

    Args:
        workers, runtime, supervisor, ledger, weights: See `RemoteStrategy`.
        options: Options of asynchronous collection.
    """

    Options: TypeAlias = OnArrivalOptions

    def __init__(self, workers: list[Handle[CWorker]], runtime: Runtime, supervisor: Supervisor, ledger: Ledger,
                 weights: WeightBroadcast, options: OnArrival.Options) -> None:
        super().__init__(workers, runtime, supervisor, ledger, weights)
        self._col_in_flight, self._is_started = options.col_in_flight or MANY_IN_FLIGHT, False

    @property
    @override
    def _most_requests(self) -> int:
        return self._col_in_flight

    def step(self, deliver: Deliver) -> None:
        """Poll once: deliver finished rollouts, oldest request first, and request a new rollout after each delivery."""
        if not self._is_started and not self._is_draining:
            self._is_started = True
            for _ in range(self._col_in_flight):
                for index in self._asked():
                    self._refresh_and_request(index)
        for index, rollout in self._poll():
            self._deliver([rollout], deliver)
            if index < self._num_asked and not self._is_draining:
                self._refresh_and_request(index)

    @override
    def drain(self, deliver: Deliver, deadline: float) -> None:
        super().drain(deliver, deadline)
        self._is_started = False

    @override
    def _request_replacement(self, index: int) -> None:
        self._request_from_new(index, self._col_in_flight if self._is_started else 0)


class OnDemand(_RemoteCollection):
    """Asynchronous collection in which rollouts are requested only if they will not be too old at their first use.

    The learner's progress determines when a request is made. The journal therefore contains each request, so that a
    replay can make the same requests in the same order.

    Args:
        workers, runtime, supervisor, ledger, weights: See `RemoteStrategy`.
        options: Options of asynchronous collection; a worker has at most `col_in_flight` requests.
        may_request: Function that returns whether another rollout may be requested, given the number of rollouts in
            flight.
    """

    def __init__(self, workers: list[Handle[CWorker]], runtime: Runtime, supervisor: Supervisor, ledger: Ledger,
                 weights: WeightBroadcast, options: OnArrival.Options, may_request: Callable[[int], bool]) -> None:
        super().__init__(workers, runtime, supervisor, ledger, weights)
        self._col_in_flight, self._may_request = options.col_in_flight or MANY_IN_FLIGHT, may_request
        self._num_made = 0
        self._latest: defaultdict[int, int] = defaultdict(int)  # number of the latest request to each worker

    @property
    @override
    def _most_requests(self) -> int:
        return self._col_in_flight

    def step(self, deliver: Deliver) -> None:
        """Poll once: deliver finished rollouts, and make all allowed requests after each delivery."""
        is_delayed = self._make_requests()
        for _, rollout in self._poll(DELAYED_INTERVAL_S if is_delayed else POLL_INTERVAL_S):
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
            self._num_made += 1
            self._latest[index] = self._num_made
        return False

    def _next_in_record(self) -> int | None:
        """If the next event of the recorded run is a request, return the index of its worker; otherwise, None."""
        event = self._journal.upcoming()
        return event[1] if event is not None and event[0] == "ask" else None

    def _free(self) -> list[int]:
        """Return the live workers with fewer than `col_in_flight` requests, in the order in which to ask them.

        Workers with few requests come first, and among those, workers that have not been asked for a long time. All
        workers therefore contribute, even if the limits allow only some of them to collect at the same time.
        """
        counts = Counter(self._in_flight.owners())
        return sorted((index for index in self._asked() if counts[index] < self._col_in_flight),
                      key=lambda index: (counts[index], self._latest[index]))
