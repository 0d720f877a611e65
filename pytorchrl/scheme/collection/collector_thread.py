"""The thread that receives rollouts for a gradient worker."""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass
from typing import Any

from pytorchrl.agent.options import Options as BaseOptions
from pytorchrl.agent.options import option
from pytorchrl.errors import LearnerStarvedError, StoppedError, WorkerLostError
from pytorchrl.runtime import Handle, Runtime, ThreadRuntime
from pytorchrl.scheme.base.pause_point import PausePoint
from pytorchrl.scheme.base.worker import ASYNC, Communication, Execution, check_count, check_fraction
from pytorchrl.scheme.collection.c_worker import CWorker
from pytorchrl.scheme.collection.strategies import (
    POLL_INTERVAL_S,
    Barrier,
    Due,
    Gather,
    LocalGather,
    OnArrival,
    OnDemand,
)
from pytorchrl.scheme.gradients.minibatch_buffer import Item, Part
from pytorchrl.scheme.gradients.sample_queue import Feed
from pytorchrl.scheme.gradients.worker_stats import own
from pytorchrl.scheme.ledger import Ledger
from pytorchrl.scheme.replay.shards import Shards
from pytorchrl.scheme.supervision.supervisor import Supervisor
from pytorchrl.scheme.timing import Stopwatch
from pytorchrl.scheme.transport.encoder import WEIGHTS, Compression, Traffic, Wanted
from pytorchrl.scheme.transport.messages import Rollout
from pytorchrl.terminal import get_logger

logger = get_logger(__name__)


class HeldError(StoppedError):
    """The learner waits for data, and is to be drained before it gets any. Ends the request, not the worker."""


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
        queue_size: Bound of the queue, in items.
        queue_timeout_s: How long `get` waits for data before it does what `on_starved` says.
        on_starved: "raise", "warn" (once, and wait on) or "wait"; asynchronous collection.
        max_weight_sync_delay: Env steps after which a worker is given new weights, in place of `broadcast_interval`.
        on_policy_lag: "drop" or "wait"; see `Feed`.
        supervisor: Decides about lost workers; None raises.
        shards: Replay, where rollouts go instead of the queue.
        compress_weights_to_send: What becomes of weights on their way to remote workers.
        feed_options: Further options of `Feed`.

    Attributes:
        stopped: Whether it has been told to end.
        failure: What has ended it, if something has.
        queue: The bounded `queue.Queue` of items.
        feed: What lies between the two threads.
        watch: Times of passing rollouts on ("receive") and of publishing weights ("push").
        index_worker, local_worker, remote_workers, broadcast_interval: As given.
        num_workers: Number of remote workers.
        num_sent_since_broadcast: Rollouts received since the last broadcast of weights.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(BaseOptions):
        """Options for waiting on collection."""

        queue_timeout_s: float = option(
            300.0, low=0.0, exclusive=True, help="Seconds that a learner waits for data before it raises an error, or reacts as "
            "on_starved says.")

    def __init__(self, index_worker: int, local_worker: CWorker, remote_workers: list[Handle[CWorker]],  # noqa: PLR0913
                 col_fraction_workers: float = 1.0, col_communication: Communication | str = "synchronous",
                 col_execution: Execution | str = "Central", broadcast_interval: int = 1, *,
                 runtime: Runtime | None = None, ledger: Ledger | None = None, fraction_samples: float = 0.25,
                 col_in_flight: int = 2, queue_size: int = 16, queue_timeout_s: float = 300.0,
                 on_starved: str = "raise", max_weight_sync_delay: int | None = None, on_policy_lag: str = "drop",
                 supervisor: Supervisor | None = None, shards: Shards | None = None,
                 compress_weights_to_send: Wanted = False, **feed_options: Any) -> None:
        super().__init__(name=f"CollectorThread {index_worker}", daemon=True)
        self.index_worker, self.local_worker, self.remote_workers = index_worker, local_worker, remote_workers
        self.num_workers = len(remote_workers)
        self.broadcast_interval = check_count("broadcast_interval", broadcast_interval)
        self.num_sent_since_broadcast = 0
        self._runtime = runtime or ThreadRuntime()
        self._ledger, self._journal = ledger or Ledger(), local_worker.journal
        self._queue_timeout_s, self._on_starved, self._max_sync_delay = queue_timeout_s, on_starved, max_weight_sync_delay
        self._asynchronous = Communication(col_communication) is ASYNC
        self._closing = self._runtime.make_event()
        self.watch = Stopwatch(self._runtime.now)
        self.feed = Feed(local_worker, self._runtime, self._ledger, self._closing, on_policy_lag=on_policy_lag,
                         queue_size=check_count("queue_size", queue_size), **feed_options)
        self.queue = self.feed.queue
        self._shards = shards
        self.failure: BaseException | None = None
        self._pause_point = PausePoint(self._runtime)
        # Numbers of drains that were announced and made: signals may come late.
        self._drain_announced = self._drains = 0
        self._gather: Gather
        supervisor = supervisor or Supervisor(
            remote_workers, lambda place: None, self._runtime, Supervisor.Options(on_worker_failure="raise"))
        weights_options: Any = {"compress": Compression.of(WEIGHTS, compress_weights_to_send),
                                "parameters": getattr(local_worker.algo, "groups", ())}
        if not remote_workers:
            self._gather = LocalGather(local_worker)
        elif self._asynchronous and on_policy_lag == "wait":
            self._gather = OnDemand(remote_workers, self._runtime, supervisor, self._journal, self.broadcast_new_weights_if_due,
                                    col_in_flight=check_count("col_in_flight", col_in_flight), may_ask=self.feed.may_ask,
                                    **weights_options)
        elif self._asynchronous:
            self._gather = OnArrival(remote_workers, self._runtime, supervisor, self._journal,
                                     self.broadcast_new_weights_if_due, col_in_flight=check_count("col_in_flight", col_in_flight),
                                     **weights_options)
        else:
            steps = max(1, round(check_fraction("fraction_samples", fraction_samples) * local_worker.storage.rollout_size))
            self._gather = Barrier(
                remote_workers, self._runtime, supervisor, self._journal, self.broadcast_new_weights_if_due, min_steps=steps,
                fraction_workers=check_fraction("col_fraction_workers", col_fraction_workers), timeout_s=queue_timeout_s,
                **weights_options)
        Execution(col_execution)

    @property
    def stopped(self) -> bool:
        """Whether it has been told to end."""
        return self._closing.is_set()

    def run(self) -> None:
        """Collect until closed. An exception ends the thread, and `get` raises it."""
        try:
            while not self.stopped:
                self._pause_point.pause_if_requested(lambda: self.stopped)
                if not self.stopped:
                    self.step()
        except BaseException as failure:  # noqa: BLE001 - re-raised to the owner by get()
            self.failure = failure
            self._journal.fail(failure)

    def step(self) -> None:
        """Collect data from the workers and put it in the queue: one round, or one poll where asynchronous."""
        if not self._asynchronous:
            self.broadcast_new_weights_if_due()
        if self._shards is not None:
            self._shards.poll(0.0)
        self._gather.step(self._deliver)

    def ask_ahead(self, num_steps: int) -> None:
        """Let the remote workers begin the synchronous rounds without which there are no such number of steps, see `Rollout.size`.

        Later steps take them, and may have to make more; the local worker has no time for it.
        """
        if isinstance(self._gather, Barrier):
            self.broadcast_new_weights_if_due()
            largest_round = self.num_workers * self.local_worker.num_envs * self.local_worker.storage.rollout_size
            self._gather.ask(-(-num_steps // largest_round))

    def should_broadcast(self) -> bool:
        """Whether it is time to give some worker new weights."""
        return any(self._due(*age) for age in self._gather.ages())

    def broadcast_new_weights(self) -> None:
        """Give the local worker's weights to every remote worker whose own are older, with its next request."""
        self._push(lambda version, num_steps: version < self.local_worker.version)

    def broadcast_new_weights_if_due(self, only: int | None = None) -> None:
        """Give new weights to those workers (or to one) for which it is time."""
        self._push(self._due, only)

    @property
    def weight_pushes(self) -> int:
        """Weights given to single workers so far."""
        return self._gather.pushes

    @property
    def bytes_out(self) -> int:
        """Bytes of those weights."""
        return self._gather.bytes_out

    @property
    def weights_traffic(self) -> Traffic:
        """How they were sent."""
        return self._gather.traffic

    @property
    def num_missing(self) -> int:
        """Collection workers that are lost and not replaced (yet)."""
        return max(0, self.num_workers - self._gather.state()[0])

    @property
    def requests_in_flight(self) -> int:
        """The number of rollouts that were requested from remote workers and have not arrived."""
        return self._gather.state()[1]

    @property
    def restarts(self) -> int:
        """Lost collection workers that were replaced."""
        return self._gather.restarts

    @property
    def delivered_by_lost(self) -> int:
        """Env steps in the rollouts of collection workers that were lost since."""
        return self._gather.delivered_by_lost

    def take_send_s(self) -> float:
        """Seconds that requests and rollouts of synchronous rounds were on their way since the last call."""
        return self._gather.take_send_s() if isinstance(self._gather, Barrier) else 0.0

    def _due(self, version: int, num_steps: int) -> bool:
        age = self.local_worker.version - version
        if self._max_sync_delay is None:
            return version < 0 or age >= self.broadcast_interval
        return version < 0 or (age > 0 and num_steps >= self._max_sync_delay)

    def _push(self, due: Due, only: int | None = None) -> None:
        with self._journal.reading():
            start = self._runtime.now()
            if self._gather.push(self.local_worker.get_weights, due, only):
                self.num_sent_since_broadcast = 0
                self.watch.count("push", self._runtime.now() - start)

    def _deliver(self, rollouts: list[Rollout]) -> None:
        """Count rollouts that arrived together and pass them on; wait while the queue or the shards are full."""
        with self.watch.part("receive"):
            self._hand_on(rollouts)

    def _hand_on(self, rollouts: list[Rollout]) -> None:
        num_steps = sum(rollout.num_env_steps for rollout in rollouts)
        self._ledger.collect(num_steps)
        self.num_sent_since_broadcast += len(rollouts)
        rollouts = [rollout for rollout in rollouts if rollout.num_env_steps]
        if self._shards is not None:
            for rollout in rollouts:
                self._shards.add(rollout, lambda: self.stopped)
        elif rollouts:
            # Booked before it is put: the learner may have used it before put() returns.
            self._ledger.move(num_steps, "in_flight", "queued")
            self.feed.put(rollouts)

    def get(self) -> Item:
        """The item to use next; `uses` tells how often it has been given, this time included.

        Raises:
            StoppedError: The thread has been closed.
            LearnerStarvedError: Nothing came within `queue_timeout_s`, and `on_starved` is "raise".
            HeldError: It is to be drained; asynchronous collection.
            Exception: Whatever ended the thread.
        """
        if not self._asynchronous:
            while not self.feed.is_ready and not self.stopped:  # a rollout may hold no valid step at all
                self.step()
            try:
                return self.feed.take(0.0)
            except queue.Empty:
                raise StoppedError(f"collection of GWorker {self.index_worker} has been stopped") from None
        self.ensure_started()
        deadline = self._runtime.now() + self._queue_timeout_s
        while True:
            if self.stopped:
                raise StoppedError(f"collection of GWorker {self.index_worker} has been stopped")
            if self.is_held:
                raise HeldError(f"GWorker {self.index_worker} is to be drained")
            try:
                return self.feed.take(POLL_INTERVAL_S)
            except queue.Empty:
                pass
            # A dead thread never puts again, so this is exact. Raised outside the handler: its cause stays.
            if self.failure is not None and not self.feed.is_ready:
                raise self.failure
            if self._runtime.now() >= deadline and self._on_starved != "wait":
                deadline = float("inf")
                self._tell_starved()

    def get_rounds(self, microbatch: int, target: int) -> Item:
        """Whole synchronous rounds as one item: microbatches of such a size at least, until it is `target`; see `Rollout.size`."""
        earlier: list[Part] = []
        goal = microbatch
        while True:
            item = self.get()
            newest, item.parts = item.parts, [*earlier, *item.parts]
            if item.size >= goal:
                if item.size >= target:
                    return item
                goal = item.size + microbatch
            # The local worker hands out its storage's own rows, which its next rollout overwrites.
            earlier += [part._replace(rollout=own(part.rollout)) for part in newest]

    def ensure_started(self) -> None:
        """Begin to collect, if it has not begun, or go on after a drain."""
        if self.ident is None:
            self._runtime.start_thread(self)
        elif not self.is_held:
            self._pause_point.resume()

    @property
    def is_held(self) -> bool:
        """Whether it is to be drained."""
        return self._drain_announced > self._drains

    def hold(self, number: int) -> None:
        """Signal: drain number so and so, from 1, is to come; a learner that waits for data gives up waiting."""
        self._drain_announced = max(self._drain_announced, number)

    def why_no_data(self) -> BaseException | None:
        """What keeps data from coming: the error that ended the thread, or that it is to be drained."""
        return HeldError("to be drained") if self.is_held and self.failure is None else self.failure

    def drain(self, number: int, timeout_s: float) -> None:
        """Collect nothing more until data are asked for again; wait for what is in flight, and empty the queue.

        Rollouts that come still are in flight in the ledger, or in replay. The learner takes nothing meanwhile.

        Raises:
            WorkerLostError: The thread did not come to rest in time.
            Exception: Whatever ended the thread, or ends a worker.
        """
        self.hold(number)
        deadline = self._runtime.now() + timeout_s
        if self._shards is not None:
            self._shards.is_draining = True
        while self._asynchronous and not self._pause_point.request(self.is_alive, POLL_INTERVAL_S):
            self.feed.clear()  # it may wait for room
            if self._runtime.now() > deadline:
                raise WorkerLostError(f"{self.name} did not come to rest within {timeout_s:.1f} s")
        if self.failure is not None:
            raise self.failure
        self._gather.drain(lambda rollouts: self._deliver_late(rollouts, deadline), deadline)
        if self._shards is not None:
            self._shards.drain(deadline)
            self._shards.is_draining = False
        self.feed.clear()
        self._drains = number

    def _deliver_late(self, rollouts: list[Rollout], deadline: float) -> None:
        """Book what arrives while draining; replay takes it, the queue does not."""
        for rollout in rollouts:
            self._ledger.collect(rollout.num_env_steps)
            if self._shards is not None and rollout.num_env_steps:
                self._shards.add(rollout, lambda: self.stopped or self._runtime.now() > deadline)

    def _tell_starved(self) -> None:
        alive, num_asked = self._gather.state()
        text = (f"no item for {self._queue_timeout_s:.1f} s: {alive} of {self.num_workers} collectors alive, {num_asked} "
                "requests in flight")
        if self._on_starved == "raise":
            raise LearnerStarvedError(f"{text}; raise queue_timeout_s if a rollout takes longer")
        logger.warning("GWorker %d goes on waiting: %s", self.index_worker, text)

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
