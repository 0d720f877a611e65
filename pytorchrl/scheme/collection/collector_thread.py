"""The thread that collects rollouts for a gradient worker."""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass

from pytorchrl.agent.options import Options as BaseOptions
from pytorchrl.agent.options import option
from pytorchrl.errors import StoppedError, WorkerLostError
from pytorchrl.runtime import Handle, Runtime, ThreadRuntime
from pytorchrl.scheme.base.pause_point import PausePoint
from pytorchrl.scheme.base.worker import ASYNC, Communication, Execution
from pytorchrl.scheme.collection.c_worker import CWorker
from pytorchrl.scheme.collection.protocols import CollectionStrategy, Destination, RoundStrategy
from pytorchrl.scheme.collection.strategies import Barrier, LocalCollection, OnArrival, OnDemand
from pytorchrl.scheme.collection.weight_broadcast import WeightBroadcast
from pytorchrl.scheme.counters import WorkerCounters
from pytorchrl.scheme.ledger import Ledger
from pytorchrl.scheme.supervision.supervisor import Supervisor
from pytorchrl.scheme.timing import Stopwatch, Times
from pytorchrl.scheme.transport.encoder import WEIGHTS, Compression, Traffic, Wanted
from pytorchrl.scheme.transport.messages import Rollout
from pytorchrl.scheme.transport.requests import POLL_INTERVAL_S

# Bound of the queue of a thread that was made without a destination.
_QUEUE_SIZE = 16


class DrainingError(StoppedError):
    """The learner waits for data of a worker that is to be drained. Ends the request, not the worker."""


class RolloutQueue:
    """A destination that only queues rollouts, for a collector thread that is used by itself.

    Attributes:
        queue: The bounded queue; each entry is a list of rollouts that arrived together.
        delays_requests: False.
    """

    def __init__(self, runtime: Runtime, closing: threading.Event) -> None:
        self.queue: queue.Queue[list[Rollout]] = runtime.make_queue(_QUEUE_SIZE)
        self._closing, self.delays_requests = closing, False

    def put(self, rollouts: list[Rollout]) -> None:
        """Queue rollouts; wait while the queue is full, unless collection is closing."""
        while not self._closing.is_set():
            try:
                self.queue.put(rollouts, timeout=POLL_INTERVAL_S)
            except queue.Full:
                continue
            return

    def may_request(self, num_in_flight: int) -> bool:
        """Return True."""
        return True

    def poll(self) -> None:
        """Do nothing."""

    def begin_drain(self) -> None:
        """Discard everything."""
        while not self.queue.empty():
            self.queue.get_nowait()

    def put_late(self, rollouts: list[Rollout], deadline: float) -> None:
        """Discard the rollouts."""

    def end_drain(self, deadline: float) -> None:
        """Discard everything."""
        self.begin_drain()


class CollectorThread(threading.Thread):
    """Collects rollouts from the collection workers and passes them to the destination of its gradient worker.

    Asynchronous collection runs in the thread, which is started by `ensure_started` and steps until it is closed; a
    destination without room makes it wait. Synchronous collection never starts the thread: the gradient worker's own
    thread collects rounds with `strategy.collect()`, or calls `step()` to put one round into the queue by hand.

    Args:
        index_worker: Index of its gradient worker.
        local_worker: Local worker, the parameter server of the remote ones.
        remote_workers: Workers that collect; empty if the local worker collects.
        col_fraction_workers: Share of the workers that ends a synchronous round.
        col_communication: "synchronous" or "asynchronous".
        col_execution: "Central" or "Parallel".
        broadcast_interval: Updates after which an asynchronous collection worker receives new weights.
        collection: Options that are also `Barrier.Options` or `OnArrival.Options`; they replace the arguments above.
            None: those arguments, and defaults.
        destination: Where rollouts go; None: a queue of its own.
        closing: Event that is set once collection is to end; None: one of its own.
        runtime: Where the remote workers run.
        ledger: The gradient worker's ledger.
        supervisor: Replaces lost workers; None: a lost worker raises an error.
        compress_weights_to_send: Codec of weights that are sent to remote workers.

    Attributes:
        stopped: Whether it was told to end.
        failure: The error that ended it; None if there is none.
        queue: The queue of its destination.
        strategy: How it collects.
        index_worker, local_worker, remote_workers, broadcast_interval: As given.
        num_workers: Number of remote workers.
        supervisor: Watches the remote workers.
        num_sent_since_broadcast: Number of rollouts received since the last broadcast of weights.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(BaseOptions):
        """Options for waiting on collection."""

        queue_timeout_s: float = option(
            300.0, low=0.0, exclusive=True, help="Seconds that a learner waits for data before it raises an error, or "
            "reacts as "
            "on_starved says.")

    def __init__(self, index_worker: int, local_worker: CWorker, remote_workers: list[Handle[CWorker]],  # noqa: PLR0913
                 col_fraction_workers: float = Barrier.Options.col_fraction_workers,
                 col_communication: Communication | str = "synchronous", col_execution: Execution | str = "Central",
                 broadcast_interval: int = OnArrival.Options.broadcast_interval, *,
                 collection: CollectorThread.Options | None = None,
                 destination: Destination | None = None, closing: threading.Event | None = None,
                 runtime: Runtime | None = None,
                 ledger: Ledger | None = None, supervisor: Supervisor | None = None,
                 compress_weights_to_send: Wanted = False) -> None:
        super().__init__(name=f"CollectorThread {index_worker}", daemon=True)
        Execution(col_execution)
        if collection is None:
            collection = _Rounds(col_fraction_workers=col_fraction_workers)
            if Communication(col_communication) is ASYNC:
                collection = _Stream(broadcast_interval=broadcast_interval)
        self.index_worker, self.local_worker, self.remote_workers = index_worker, local_worker, remote_workers
        self.num_workers = len(remote_workers)
        self._runtime = runtime or ThreadRuntime()
        self._closing = self._runtime.make_event() if closing is None else closing
        self._destination = RolloutQueue(self._runtime, self._closing) if destination is None else destination
        self.queue = self._destination.queue
        self._watch = Stopwatch(self._runtime.now)
        self._ledger, self._journal = ledger or Ledger(), local_worker.journal
        self.supervisor = supervisor or Supervisor(remote_workers, lambda place: None, self._runtime,
                                                   Supervisor.Options(on_worker_failure="raise"))
        self._is_async = isinstance(collection, OnArrival.Options)
        self.broadcast_interval, max_delay = 1, None
        if isinstance(collection, OnArrival.Options):
            self.broadcast_interval, max_delay = collection.broadcast_interval, collection.max_weight_sync_delay
        self._weights = WeightBroadcast(
            local_worker, remote_workers, self._runtime, self._watch, broadcast_interval=self.broadcast_interval,
            max_weight_sync_delay=max_delay, compression=Compression.of(WEIGHTS, compress_weights_to_send))
        self.strategy = self._make_strategy(collection)
        self.failure: BaseException | None = None
        self._pause_point = PausePoint(self._runtime)
        # Numbers of the drains that were announced and completed: announcements may come late.
        self._drain_announced = self._drains = 0

    def _make_strategy(self, collection: CollectorThread.Options) -> CollectionStrategy:
        if not self.remote_workers:
            return LocalCollection(self.local_worker, self._ledger, self._watch)
        shared = (self.remote_workers, self._runtime, self.supervisor, self._ledger, self._weights)
        if isinstance(collection, OnArrival.Options):
            if self._destination.delays_requests:
                return OnDemand(*shared, collection, self._destination.may_request)
            return OnArrival(*shared, collection)
        assert isinstance(collection, Barrier.Options), f"{type(collection).__name__} is no kind of collection"
        return Barrier(*shared, collection, collection.queue_timeout_s)

    @property
    def rounds(self) -> RoundStrategy | None:
        """The strategy, if it collects in rounds that the learner waits for."""
        return self.strategy if isinstance(self.strategy, LocalCollection | Barrier) else None

    @property
    def stopped(self) -> bool:
        """Whether it was told to end."""
        return self._closing.is_set()

    def run(self) -> None:
        """Collect until closed. An error ends the thread, and is raised to the learner when it waits for data."""
        try:
            while not self.stopped:
                self._pause_point.pause_if_requested(lambda: self.stopped)
                if not self.stopped:
                    self.step()
        except BaseException as failure:  # noqa: BLE001 - raised to the learner
            self.failure = failure
            self._journal.fail(failure)

    def step(self) -> None:
        """Collect one round, or poll once if collection is asynchronous; pass the rollouts to the destination."""
        self._destination.poll()
        self.strategy.step(self._destination.put)

    def ensure_started(self) -> None:
        """Start the thread, or let it go on after a drain."""
        if self.ident is None:
            self._runtime.start_thread(self)
        elif not self.is_draining:
            self._pause_point.resume()

    # Weights

    def should_broadcast(self) -> bool:
        """Return whether a worker should receive new weights."""
        return self._weights.is_due()

    def broadcast_new_weights(self) -> None:
        """Send the local worker's weights to every remote worker whose weights are older, with its next request."""
        self._weights.attach_newer()

    def weight_versions(self) -> list[int]:
        """Return the version of the weights that each remote worker was last sent; -1 if none."""
        return self._weights.versions()

    @property
    def num_sent_since_broadcast(self) -> int:
        """Number of rollouts received since the last broadcast of weights."""
        return self._weights.num_rollouts_since

    # Statistics

    def counters(self) -> WorkerCounters:
        """Return totals and current numbers of workers and messages."""
        return WorkerCounters(
            weight_pushes=self._weights.num_sent, bytes_out=self._weights.bytes_out, restarts=self.supervisor.restarts,
            collectors=max(1, self.num_workers), workers=self.num_workers,
            workers_missing=max(0, self.num_workers - self.strategy.num_live()),
            requests_in_flight=self.strategy.num_in_flight())

    def take_times(self) -> Times:
        """Return the times of delivering rollouts ("receive") and publishing weights ("push") since the last call."""
        return self._watch.take()

    def take_send_s(self) -> float:
        """Return the seconds that requests and rollouts of synchronous rounds were in transit since the last call."""
        return self.strategy.take_send_s()

    @property
    def weights_traffic(self) -> Traffic:
        """Totals of the weights sent so far."""
        return self._weights.traffic

    @property
    def delivered_by_lost(self) -> int:
        """Env steps in the rollouts of collection workers that were lost later."""
        return self.strategy.delivered_by_lost

    # Drain and end

    @property
    def is_draining(self) -> bool:
        """Whether a drain was announced and is not complete."""
        return self._drain_announced > self._drains

    def announce_drain(self, number: int) -> None:
        """Announce drain `number` (1, 2, ...). A learner that waits for data then raises `DrainingError`."""
        self._drain_announced = max(self._drain_announced, number)

    def error(self) -> BaseException | None:
        """Return the error that keeps data from a learner: the thread's, or `DrainingError`; None without one."""
        if self.failure is None and self.is_draining:
            return DrainingError(f"GWorker {self.index_worker} is to be drained")
        return self.failure

    def drain(self, number: int, timeout_s: float) -> None:
        """Wait for the rollouts in flight and discard what is queued; collection goes on when data are next requested.

        Rollouts that arrive meanwhile go to replay, or stay in flight in the ledger. The learner must take no data
        meanwhile.

        Raises:
            WorkerLostError: The thread did not pause in time.
            Exception: Whatever ended the thread or a worker.
        """
        self.announce_drain(number)
        deadline = self._runtime.now() + timeout_s
        self._destination.begin_drain()
        while self._is_async and not self._pause_point.request(self.is_alive, POLL_INTERVAL_S):
            self._destination.begin_drain()  # the thread may wait for room
            if self._runtime.now() > deadline:
                raise WorkerLostError(f"{self.name} did not pause within {timeout_s:.1f} s")
        if self.failure is not None:
            raise self.failure
        self.strategy.drain(lambda rollouts: self._destination.put_late(rollouts, deadline), deadline)
        self._destination.end_drain(deadline)
        self._drains = number

    def interrupt(self) -> None:
        """Signal the end: the workers stop at their next step, and no more data comes."""
        self._closing.set()
        self._journal.release()
        self.local_worker.interrupt()
        for handle in self.remote_workers:
            handle.signal(CWorker.interrupt)

    def close(self, timeout_s: float) -> None:
        """End the thread and wait for the rollouts in flight, which are dropped in the ledger."""
        self.interrupt()
        self._runtime.join_thread(self, timeout_s)
        self.strategy.finish(timeout_s)


@dataclass(frozen=True, kw_only=True)
class _Rounds(CollectorThread.Options, Barrier.Options):
    """Options of synchronous collection."""


@dataclass(frozen=True, kw_only=True)
class _Stream(CollectorThread.Options, OnArrival.Options):
    """Options of asynchronous collection."""
