"""Destinations of rollouts: where the collector thread puts the rollouts that it receives."""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod

from typing_extensions import override

from pytorchrl.runtime import Runtime
from pytorchrl.scheme.counters import WorkerCounters
from pytorchrl.scheme.transport.messages import Rollout
from pytorchrl.scheme.transport.requests import POLL_INTERVAL_S
from pytorchrl.support.untyped import Payload

# Capacity, in entries, of a `RolloutQueue`.
QUEUE_SIZE = 16


class Destination(ABC):
    """The receiver of rollouts: a sample queue, or replay.

    The methods are called by the collector thread, or by the learner thread while the collector thread is paused.

    Attributes:
        queue: The queue from which the learner takes its data; a user's own loop may also take entries, or add some.
    """

    queue: queue.Queue[Payload]  # each destination has its own type of entries

    @abstractmethod
    def invariant(self) -> bool:
        """Return whether all queues and requests of the destination are within their limits, after every event."""

    @property
    def delays_requests(self) -> bool:
        """Whether rollouts are requested only while `may_request` returns True."""
        return False

    def may_request(self, num_in_flight: int) -> bool:
        """Return whether another rollout may be requested while `num_in_flight` rollouts are in flight.

        This method is called only if `delays_requests` is True.
        """
        return True

    @abstractmethod
    def put(self, rollouts: list[Rollout]) -> None:
        """Accept rollouts that the ledger counts as in flight; wait for free space, unless collection is closing."""

    def poll(self) -> None:
        """Handle pending responses of replay shards, if there are any, without blocking."""

    @abstractmethod
    def begin_drain(self) -> None:
        """Make room for the rollouts that still arrive during a drain; the learner takes no data meanwhile.

        This method may be called repeatedly during a drain.
        """

    def count(self, counters: WorkerCounters) -> None:
        """Add the destination's counts, such as the number of entries in its queue, to `counters`; by default, none."""

    def put_late(self, rollouts: list[Rollout], deadline: float) -> None:
        """Store rollouts that arrive during a drain. By default, discard them; `GWorker.drain` counts their steps."""

    @abstractmethod
    def end_drain(self, deadline: float) -> None:
        """End a drain after all rollouts have arrived: empty the queue, or wait until replay has stored them."""


class RolloutQueue(Destination):
    """A destination that queues rollouts, for a collector thread without a gradient worker.

    Attributes:
        queue: Queue of at most `QUEUE_SIZE` entries, which are lists of rollouts that arrived together.
        peak: Largest number of entries that the queue has contained after an entry was added.
    """

    def __init__(self, runtime: Runtime, closing: threading.Event) -> None:
        self.queue: queue.Queue[list[Rollout]] = runtime.make_queue(QUEUE_SIZE)
        self._closing = closing
        self.peak = 0

    @override
    def invariant(self) -> bool:
        return self.queue.qsize() <= QUEUE_SIZE

    @override
    def put(self, rollouts: list[Rollout]) -> None:
        while not self._closing.is_set():
            try:
                self.queue.put(rollouts, timeout=POLL_INTERVAL_S)
            except queue.Full:
                continue
            self.peak = max(self.peak, self.queue.qsize())
            return

    @override
    def count(self, counters: WorkerCounters) -> None:
        counters.queued_batches += self.queue.qsize()
        counters.queue_peak = max(counters.queue_peak, self.peak)

    @override
    def begin_drain(self) -> None:
        while not self.queue.empty():
            self.queue.get_nowait()

    @override
    def end_drain(self, deadline: float) -> None:
        self.begin_drain()
