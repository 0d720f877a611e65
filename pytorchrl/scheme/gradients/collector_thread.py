"""The thread that receives rollouts for a gradient worker."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from pytorchrl.errors import CollectionError, StoppedError
from pytorchrl.runtime import Handle, Runtime, ThreadRuntime
from pytorchrl.scheme.base.worker import ASYNC, Communication, Execution, check_count, check_fraction
from pytorchrl.scheme.collection.c_worker import CWorker
from pytorchrl.scheme.gradients.gather import POLL_INTERVAL_S, Barrier, Gather, LocalGather, OnArrival
from pytorchrl.scheme.ledger import Ledger
from pytorchrl.scheme.messages import Rollout
from pytorchrl.scheme.supervisor import Supervisor


class CollectorThread(threading.Thread):
    """Receives rollouts from the collection workers and queues them for its GWorker.

    Synchronous collection calls `step()` from the GWorker's thread: one round each, the queue is empty between rounds.
    Asynchronous collection starts the thread, which steps until it is closed; the bounded queue is its back-pressure.

    Args:
        index_worker: Index of its GWorker.
        local_worker: Local worker that acts as parameter server.
        remote_workers: Workers that collect; empty where the local one does.
        col_fraction_workers: Share of workers that ends a synchronous round.
        col_communication: "synchronous" or "asynchronous".
        col_execution: "Central" or "Parallel".
        broadcast_interval: Updates after which a collection worker is given new weights; 1 where synchronous.
        runtime: Where the remote workers run.
        ledger: The GWorker's account.
        fraction_samples: Share of its rollout that a worker told to stop collects all the same.
        col_in_flight: Requests that each worker always has; asynchronous collection.
        queue_size: Bound of the queue, in rollouts (asynchronous) or rounds.
        queue_timeout_s: How long `get` waits for data before it raises.
        supervisor: Decides about lost workers; None raises.

    Attributes:
        stopped: Whether it has been told to end.
        queue: Bounded queue of items, each a list of rollouts.
        index_worker, local_worker, remote_workers, broadcast_interval: As given.
        num_workers: Number of remote workers.
        num_sent_since_broadcast: Rollouts received since the last broadcast of weights.
    """

    def __init__(self, index_worker: int, local_worker: CWorker, remote_workers: list[Handle[CWorker]],  # noqa: PLR0913
                 col_fraction_workers: float = 1.0, col_communication: Communication | str = "synchronous",
                 col_execution: Execution | str = "Central", broadcast_interval: int = 1, *,
                 runtime: Runtime | None = None, ledger: Ledger | None = None, fraction_samples: float = 0.25,
                 col_in_flight: int = 2, queue_size: int = 16, queue_timeout_s: float = 300.0,
                 supervisor: Supervisor | None = None) -> None:
        super().__init__(name=f"CollectorThread {index_worker}", daemon=True)
        self.index_worker, self.local_worker, self.remote_workers = index_worker, local_worker, remote_workers
        self.num_workers = len(remote_workers)
        self.broadcast_interval = check_count("broadcast_interval", broadcast_interval)
        self.num_sent_since_broadcast = 0
        self._runtime = runtime or ThreadRuntime()
        self._ledger, self._journal = ledger or Ledger(), local_worker.journal
        self._queue_timeout_s = queue_timeout_s
        self._asynchronous = Communication(col_communication) is ASYNC
        self.queue = self._runtime.make_queue(check_count("queue_size", queue_size))
        self._closing = self._runtime.make_event()
        self._failure: BaseException | None = None
        self._gather: Gather
        supervisor = supervisor or Supervisor(remote_workers, lambda place: None, self._runtime, "raise")
        if not remote_workers:
            self._gather = LocalGather(local_worker)
        elif self._asynchronous:
            self._gather = OnArrival(remote_workers, self._runtime, supervisor, self._journal,
                                     self.broadcast_new_weights_if_due, col_in_flight=check_count("col_in_flight", col_in_flight))
        else:
            steps = max(1, round(check_fraction("fraction_samples", fraction_samples) * local_worker.storage.options.size))
            self._gather = Barrier(
                remote_workers, self._runtime, supervisor, self._journal, self.broadcast_new_weights_if_due, min_steps=steps,
                fraction_workers=check_fraction("col_fraction_workers", col_fraction_workers), timeout_s=queue_timeout_s)
        Execution(col_execution)

    @property
    def stopped(self) -> bool:
        """Whether it has been told to end."""
        return self._closing.is_set()

    def run(self) -> None:
        """Collect until closed. An exception ends the thread, and `get` raises it."""
        try:
            while not self.stopped:
                self.step()
        except BaseException as failure:  # noqa: BLE001 - re-raised to the owner by get()
            self._failure = failure
            self._journal.fail(failure)

    def step(self) -> None:
        """Collect data from the workers and put it in the queue: one round, or one poll where asynchronous."""
        if not self._asynchronous:
            self.broadcast_new_weights_if_due()
        self._gather.step(self._deliver)

    def ask_ahead(self, num_rounds: int) -> None:
        """Let the remote workers begin so many synchronous rounds, which later steps take; the local one has no time."""
        if isinstance(self._gather, Barrier):
            self.broadcast_new_weights_if_due()
            self._gather.ask(num_rounds)

    def should_broadcast(self) -> bool:
        """Whether some worker's weights are `broadcast_interval` or more updates old."""
        return any(self._due(version) for version in self._gather.versions())

    def broadcast_new_weights(self) -> None:
        """Give the local worker's weights to every remote worker whose own are older, with its next request."""
        self._push(lambda version: version < self.local_worker.version)

    def broadcast_new_weights_if_due(self, only: int | None = None) -> None:
        """Give new weights to those workers (or to one) for which `broadcast_interval` updates have passed."""
        self._push(self._due, only)

    @property
    def weight_pushes(self) -> int:
        """Weights given to single workers so far."""
        return self._gather.pushes

    @property
    def restarts(self) -> int:
        """Lost collection workers that were replaced."""
        return self._gather.restarts

    @property
    def delivered_by_lost(self) -> int:
        """Env steps in the rollouts of collection workers that were lost since."""
        return self._gather.delivered_by_lost

    def _due(self, version: int) -> bool:
        return version < 0 or self.local_worker.version - version >= self.broadcast_interval

    def _push(self, due: Callable[[int], bool], only: int | None = None) -> None:
        with self._journal.reading():
            if self._gather.push(self.local_worker.get_weights, due, only):
                self.num_sent_since_broadcast = 0

    def _deliver(self, rollouts: list[Rollout]) -> None:
        """Book what arrived and queue it as one item; wait where the queue is full."""
        num_steps = sum(rollout.num_env_steps for rollout in rollouts)
        self._ledger.collect(num_steps)
        self.num_sent_since_broadcast += len(rollouts)
        item = [rollout for rollout in rollouts if rollout.num_env_steps]
        if not item:
            return
        # Booked before it is put: the learner may have used it before put() returns.
        self._ledger.move(num_steps, "in_flight", "queued")
        with self._journal.reading():
            version = self.local_worker.version
        while not self.stopped:  # what is not put, stop() books as dropped
            if self.queue.put((item, version), POLL_INTERVAL_S):
                return

    def get(self) -> tuple[list[Rollout], int]:
        """The oldest item and the version when it was queued.

        Raises:
            StoppedError: The thread has been closed.
            CollectionError: Nothing came within `queue_timeout_s`.
            Exception: Whatever ended the thread.
        """
        if not self._asynchronous:
            while self.queue.empty() and not self.stopped:  # a rollout may hold no valid step at all
                self.step()
            try:
                return self.queue.get(0.0)
            except queue.Empty:
                raise StoppedError(f"collection of GWorker {self.index_worker} has been stopped") from None
        if self.ident is None:
            self._runtime.start_thread(self)
        deadline = self._runtime.now() + self._queue_timeout_s
        while self._runtime.now() < deadline:
            if self.stopped:
                raise StoppedError(f"collection of GWorker {self.index_worker} has been stopped")
            try:
                return self.queue.get(POLL_INTERVAL_S)
            except queue.Empty:
                pass
            # A dead thread never puts again, so empty() is exact here. Raised outside the handler: its cause stays.
            if self._failure is not None and self.queue.empty():
                raise self._failure
        raise CollectionError(
            f"GWorker {self.index_worker} got no data for {self._queue_timeout_s:.1f} s from {self.num_workers} "
            "collection workers; raise queue_timeout_s if a rollout takes longer")

    def interrupt(self) -> None:
        """Signal: end what the workers are collecting at their next step; no data comes any more."""
        self._closing.set()
        self._journal.release()
        self.local_worker.interrupt()
        for handle in self.remote_workers:
            handle.signal(CWorker.interrupt)

    def close(self, timeout_s: float) -> None:
        """End the thread and wait for the requests in flight; what they bring is booked as dropped."""
        self.interrupt()
        self._runtime.join_thread(self, timeout_s)
        for rollout in self._gather.finish(timeout_s):
            self._ledger.collect(rollout.num_env_steps)
