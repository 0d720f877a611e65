"""The thread that collects rollouts for a gradient worker."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias, cast

from pytorchrl.errors import ConfigError, DrainingError, WorkerLostError
from pytorchrl.runtime import Handle, Runtime, ThreadRuntime
from pytorchrl.scheme.base.pause_point import PausePoint
from pytorchrl.scheme.collection.c_worker import CWorker
from pytorchrl.scheme.collection.central_inference import CentralInference, Inference
from pytorchrl.scheme.collection.destination import Destination, RolloutQueue
from pytorchrl.scheme.collection.env_worker import EnvWorker
from pytorchrl.scheme.collection.owed_steps import OwedSteps
from pytorchrl.scheme.collection.resizing import NOT_ELASTIC, Resizing
from pytorchrl.scheme.collection.strategies import (
    DELAYED_INTERVAL_S,
    Barrier,
    CollectionStrategy,
    LocalCollection,
    OnArrival,
    OnDemand,
    RoundStrategy,
)
from pytorchrl.scheme.collection.weight_broadcast import WeightBroadcast
from pytorchrl.scheme.counters import WorkerCounters
from pytorchrl.scheme.ledger import Ledger
from pytorchrl.scheme.options.base import ASYNC, DEFAULT_EXECUTION, Communication, Execution, options_of
from pytorchrl.scheme.options.collection import (
    AsynchronousCollection,
    Collection,
    CollectionPattern,
    CollectorOptions,
    SynchronousCollection,
)
from pytorchrl.scheme.options.updates import UWorkerOptions
from pytorchrl.scheme.supervision.supervisor import Supervisor
from pytorchrl.scheme.timing import Stopwatch, Times
from pytorchrl.scheme.transport.encoder import WEIGHTS, Compression, Traffic, Wanted
from pytorchrl.scheme.transport.requests import POLL_INTERVAL_S
from pytorchrl.support.threads import WorkThread


@dataclass(frozen=True, kw_only=True)
class CollectorSetup:
    """The options of a collector thread, and the objects to which it is connected.

    Attributes:
        options: Options of collection.
        destination: Receiver of the rollouts: a sample queue, or replay; None: a new queue.
        closing: Event that is set to end collection; None: a new event.
        runtime: Runtime of the remote workers.
        ledger: The gradient worker's ledger.
        supervisor: Supervisor that replaces lost workers; None: a lost worker raises an error.
        compress_weights_to_send: Codec of weights that are sent to remote workers.
        inference: The parts of central inference: one actor chooses the actions, and the remote workers only step
            environments. None: each remote worker chooses its own actions.
    """

    options: Collection
    destination: Destination | None = None
    closing: threading.Event | None = None
    runtime: Runtime = field(default_factory=ThreadRuntime)
    ledger: Ledger = field(default_factory=Ledger)
    supervisor: Supervisor | None = None
    compress_weights_to_send: Wanted = UWorkerOptions.compress_weights_to_send
    inference: Inference | None = None


class CollectorThread(WorkThread):
    """The thread that passes rollouts from collection workers to a gradient worker's sample queue or to replay.

    Asynchronous collection runs in this thread: `ensure_started` starts the thread, which collects until it is closed
    and blocks while the destination is full. Synchronous collection never starts the thread. Instead, the
    gradient worker's thread calls `strategy.collect()` for each round. Without a gradient worker, each call of
    `CollectorThread.step()` collects and enqueues one round.

    Args:
        index_worker: Index of the gradient worker.
        local_worker: The local collection worker, whose weights are sent to the remote workers.
        remote_workers: Handles of the remote workers; empty if the local worker collects.
        col_fraction_workers: Share of the workers that must finish a round before the other workers are preempted.
        col_communication: "synchronous" or "asynchronous".
        col_execution: "Central" or "Parallel".
        broadcast_interval: Number of updates after which an asynchronous collection worker receives new weights.
        setup: Options of collection, and the objects to which the thread is connected, in place of the previous four
            arguments. None: built from these arguments.

    Attributes:
        stopped: Whether collection is ending or has ended.
        failure: The error that ended the thread; None if there was no error.
        queue: The queue of the destination.
        strategy: The strategy of collection.
        index_worker, local_worker, remote_workers, broadcast_interval: As given.
        resizing: The requested changes of the number of remote workers; None: the number is fixed.
        supervisor: The supervisor of the remote workers.
        num_sent_since_broadcast: Number of rollouts received since weights were last attached to a request.
        is_used_up: Whether the learner has used all rollouts since `finish_collection`.
    """

    Options: TypeAlias = CollectorOptions

    def __init__(self, index_worker: int, local_worker: CWorker, remote_workers: list[Handle[CWorker]],
                 col_fraction_workers: float = Barrier.Options.col_fraction_workers,
                 col_communication: Communication | str = CollectionPattern.col_communication,
                 col_execution: Execution | str = DEFAULT_EXECUTION,
                 broadcast_interval: int = OnArrival.Options.broadcast_interval, *,
                 setup: CollectorSetup | None = None) -> None:
        super().__init__(name=f"CollectorThread {index_worker}", daemon=True)
        if setup is None:
            Execution(col_execution)  # the remote workers determine where collection runs
            is_async = Communication(col_communication) is ASYNC
            setup = CollectorSetup(options=AsynchronousCollection(broadcast_interval=broadcast_interval) if is_async
                                   else SynchronousCollection(col_fraction_workers=col_fraction_workers))
        collection = setup.options
        self.index_worker, self.local_worker, self.remote_workers = index_worker, local_worker, remote_workers
        self._runtime = setup.runtime
        self._closing = self._runtime.make_event() if setup.closing is None else setup.closing
        self._destination = setup.destination or RolloutQueue(self._runtime, self._closing)
        self.queue = self._destination.queue
        self._watch = Stopwatch(self._runtime.now)
        self._ledger, self._journal = setup.ledger, local_worker.journal
        self.supervisor = setup.supervisor or Supervisor(
            remote_workers, lambda place: None, self._runtime, Supervisor.Options(on_worker_failure="raise"))
        self._is_async = isinstance(collection, OnArrival.Options)
        self.broadcast_interval, interval, max_delay = 1, 1, None
        if isinstance(collection, OnArrival.Options):
            self.broadcast_interval, max_delay = collection.broadcast_interval, collection.max_weight_sync_delay
            interval = collection.longest_interval
        self._inference = inference = setup.inference
        compression = Compression.of(WEIGHTS, setup.compress_weights_to_send)
        readers, their_runtime = remote_workers, self._runtime
        if inference is not None:  # only the actor in this process receives weights
            their_runtime, compression = self._runtime.in_process(), None
            readers = [Handle(their_runtime, "actor", inference.actor)]
        self._weights = WeightBroadcast(
            local_worker, readers, their_runtime, self._watch, broadcast_interval=interval,
            max_weight_sync_delay=max_delay, compression=compression)
        self.strategy = self._make_strategy(collection)
        self.resizing: Resizing | None = None
        self.failure: BaseException | None = None
        self._pause_point = PausePoint(self._runtime)
        # Numbers of the latest announced drain and of the latest completed drain. Drains are numbered, because an
        # announcement may arrive late, when its drain is already complete.
        self._drain_announced = self._drains = 0
        # Whether no more rollouts are requested until the next drain, and whether all requested rollouts have arrived.
        self._is_finishing = self._has_all = False
        self.is_used_up = False

    def _make_strategy(self, collection: CollectorThread.Options) -> CollectionStrategy:
        if not self.remote_workers:
            owed = OwedSteps(self.local_worker.storage.rollout_size,
                             options_of(Barrier.Options, collection).finishes_stragglers)
            return LocalCollection(self.local_worker, self._ledger, self._watch, owed)
        if self._inference is not None:
            return CentralInference(
                cast("list[Handle[EnvWorker]]", self.remote_workers), self._runtime, self.supervisor, self._ledger,
                self._weights, self._inference)
        shared = (self.remote_workers, self._runtime, self.supervisor, self._ledger, self._weights)
        if isinstance(collection, OnArrival.Options):
            if self._destination.delays_requests:
                return OnDemand(*shared, collection, self._destination.may_request)
            return OnArrival(*shared, collection)
        assert isinstance(collection, Barrier.Options), f"{type(collection).__name__} is not a kind of collection"
        return Barrier(*shared, collection, collection.queue_timeout_s)

    @property
    def rounds(self) -> RoundStrategy | None:
        """The strategy, if collection is synchronous (the learner waits for each round of rollouts); otherwise None."""
        return self.strategy if isinstance(self.strategy, RoundStrategy) else None

    @property
    def num_workers(self) -> int:
        """Number of remote workers."""
        return len(self.remote_workers)

    @property
    def stopped(self) -> bool:
        """Whether collection is ending or has ended."""
        return self._closing.is_set()

    def run(self) -> None:
        """Collect until closed; an error ends the thread, and is raised when the learner waits for data."""
        try:
            while not self.stopped:
                self._pause_point.pause_if_requested(lambda: self.stopped)
                if not self.stopped:
                    self.step()
        except BaseException as failure:  # noqa: BLE001 - raised in the learner thread
            self.failure = failure
            self._journal.fail(failure)

    def step(self) -> None:
        """Collect one round, or poll once in asynchronous collection, and pass the rollouts to the destination."""
        self._has_all = self._is_finishing and not self.strategy.num_in_flight()
        if not self._is_finishing:
            self.apply_resizes()
        self._destination.poll()
        if self._is_local_collection_delayed():
            self._runtime.sleep(DELAYED_INTERVAL_S)
        else:
            self.strategy.step(self._destination.put)

    def _is_local_collection_delayed(self) -> bool:
        """Return whether the local worker must wait before it collects, because its rollout would become too old.

        In a replay, the journal determines when the rollout begins.
        """
        if self.remote_workers or not self._is_async or self._journal.upcoming() is not None:
            return False
        return self._is_finishing or (self._destination.delays_requests and not self._destination.may_request(0))

    def resize(self, num_col_workers: int | tuple[int, ...], resources: Mapping[str, float] | None = None) -> None:
        """Request a change of the number of remote workers; see `Resizing.request`.

        Raises:
            ConfigError: The number is fixed, because the local worker collects.
        """
        if self.resizing is None:
            raise ConfigError(NOT_ELASTIC)
        self.resizing.request(num_col_workers, resources)

    def apply_resizes(self) -> None:
        """Change the number of remote workers as requested; see `Resizing.apply`."""
        if self.resizing is not None and not self.stopped:
            self.resizing.apply()

    def ensure_started(self) -> None:
        """Start the thread if it has not been started, and resume collection if a drain has paused it."""
        if not self.is_draining:
            self._pause_point.resume()
        if self.ident is None:
            self._runtime.start_thread(self)

    # Weights

    def should_broadcast(self) -> bool:
        """Return whether any worker is due for new weights."""
        return self._weights.is_due()

    def broadcast_new_weights(self) -> None:
        """Attach the local worker's weights to the next request to each remote worker whose weights are older."""
        self._weights.attach_newer()

    def weight_versions(self) -> list[int]:
        """Return, for each remote worker, the version of the latest weights sent to it; -1 if none were sent."""
        return self._weights.versions()

    @property
    def num_sent_since_broadcast(self) -> int:
        """Number of rollouts received since weights were last attached to a request."""
        return self._weights.num_rollouts_since

    # Statistics

    def count(self, counters: WorkerCounters) -> None:
        """Add the counts of workers, restarts, weight messages, requests and the destination to `counters`."""
        counters.weight_pushes += self._weights.num_sent
        counters.bytes_out += self._weights.bytes_out
        counters.restarts += self.supervisor.restarts
        for index, restarts in self.supervisor.restarts_by_index.items():
            counters.restarts_by_worker[index + 1] += restarts
        counters.num_collectors += max(1, self.num_workers)
        counters.workers += self.num_workers
        counters.workers_missing += max(0, self.num_workers - self.strategy.num_live())
        counters.requests_in_flight += self.strategy.num_in_flight()
        self._destination.count(counters)
        if isinstance(self.strategy, CentralInference):
            self.strategy.count(counters)

    def awaited(self) -> str:
        """Return the names of the workers whose rollouts are awaited."""
        return self.supervisor.awaited()

    def take_times(self) -> Times:
        """Return the time spent on delivering rollouts ("receive") and sending weights ("push") since the last call."""
        return self._watch.take()

    def take_send_s(self) -> float:
        """Return the seconds that the messages of synchronous rounds spent in transit since the last call."""
        return self.strategy.take_send_s()

    @property
    def weights_traffic(self) -> Traffic:
        """Total traffic of weights so far."""
        return self._weights.traffic

    @property
    def delivered_by_lost(self) -> int:
        """Number of env steps that collection workers delivered before they were lost."""
        return self.strategy.delivered_by_lost

    # Drain and end

    @property
    def is_draining(self) -> bool:
        """Whether an announced drain is not complete yet."""
        return self._drain_announced > self._drains

    def finish_collection(self) -> None:
        """Request no more rollouts until the next drain, so that the learner can use those that still arrive."""
        self._is_finishing, self._has_all = True, self.ident is None
        self.strategy.stop_requests()

    def check_remaining(self) -> None:
        """Raise `DrainingError` if no data will arrive before the next drain; call this if the queue is empty."""
        if self._has_all:
            self.is_used_up = True
            raise DrainingError(f"GWorker {self.index_worker} has used all its data before a drain")

    def announce_drain(self, number: int) -> None:
        """Announce drain `number` (1, 2, ...); a learner that waits for data raises `DrainingError`."""
        self._drain_announced = max(self._drain_announced, number)

    def error(self) -> BaseException | None:
        """Return the error that prevents data from arriving: `failure` or a `DrainingError`; None without an error."""
        if self.failure is None and self.is_draining:
            return DrainingError(f"GWorker {self.index_worker} is about to be drained")
        return self.failure

    def drain(self, number: int, timeout_s: float) -> None:
        """Perform drain `number`: wait for the rollouts in flight, and empty the sample queue if there is one.

        Collection resumes when the learner next asks for data. Rollouts that arrive during the drain are stored in
        replay. Without replay, they are discarded, and the caller must count their steps as dropped in the ledger. The
        learner must not take data during the drain.

        Raises:
            WorkerLostError: The thread did not pause in time.
            Exception: The error that ended the thread or a worker.
        """
        self.announce_drain(number)
        deadline = self._runtime.now() + timeout_s
        self._destination.begin_drain()
        while self._is_async and not self._pause_point.request(self.is_alive, POLL_INTERVAL_S):
            self._destination.begin_drain()  # the thread may be blocked because the destination is full
            if self._runtime.now() > deadline:
                raise WorkerLostError(f"{self.name} did not pause within {timeout_s:.1f} s")
        if self.failure is not None:
            raise self.failure
        self.strategy.drain(lambda rollouts: self._destination.put_late(rollouts, deadline), deadline)
        self._destination.end_drain(deadline)
        self._is_finishing = self._has_all = self.is_used_up = False
        self.apply_resizes()
        self._drains = number

    def interrupt(self) -> None:
        """End collection: workers end their rollouts at the next step, and no more data arrive."""
        self._closing.set()
        self._journal.release()
        self.local_worker.interrupt()
        for handle in self.remote_workers:
            handle.signal(CWorker.interrupt)

    def close(self, timeout_s: float) -> None:
        """End the thread; wait at most `timeout_s` seconds for the rollouts in flight, and discard them."""
        self.interrupt()
        self._runtime.join_thread(self, timeout_s)
        # A worker that hung counts as lost, but it may still be alive. The steps of lost workers are already counted,
        # so kill the worker before it can report them again.
        for index in sorted(self.supervisor.gone):
            self._runtime.kill(self.remote_workers[index], 0.0)
        self.strategy.finish(timeout_s)
