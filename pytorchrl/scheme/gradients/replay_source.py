"""The connection of a gradient worker and its collector thread to replay shards."""

from __future__ import annotations

import queue
import threading
from dataclasses import replace

from typing_extensions import override

from pytorchrl.agent.algorithms.base import Algorithm
from pytorchrl.errors import LearnerStarvedError
from pytorchrl.runtime import Runtime
from pytorchrl.scheme.collection.c_worker import CWorker
from pytorchrl.scheme.collection.collector_thread import CollectorThread
from pytorchrl.scheme.collection.destination import Destination
from pytorchrl.scheme.counters import WorkerCounters
from pytorchrl.scheme.gradients.train_batch import QueuedRollout, TrainBatch, TrainBatchSource
from pytorchrl.scheme.gradients.worker_stats import WorkerStats
from pytorchrl.scheme.ledger import Ledger
from pytorchrl.scheme.replay.r_worker_set import RWorkerSet
from pytorchrl.scheme.replay.shards import Shards
from pytorchrl.scheme.supervision.supervisor import Supervisor
from pytorchrl.scheme.timing import Times
from pytorchrl.scheme.transport.messages import Rollout
from pytorchrl.support.untyped import BatchOfKind


def make_shards(workers: RWorkerSet, ledger: Ledger, worker: CWorker, collection: CollectorThread.Options,
                supervision: Supervisor.Options) -> Shards:
    """Build the connection to replay shards.

    Args:
        workers: The shards.
        ledger: The gradient worker's ledger.
        worker: The local collection worker, whose storage and algorithm determine the kind and size of batches.
        collection: Options of collection with replay.
        supervision: Options for lost shards.
    """
    storage, num_envs = worker.storage, worker.num_envs
    options = collection if isinstance(collection, RWorkerSet.Options) else RWorkerSet.Options()
    draws_rollouts = storage.draws_rollouts or not storage.provides.is_kept
    rollout = storage.rollout_size * num_envs
    batch_size = getattr(collection, "train_batch_size", None) or (
        getattr(worker.algo.options, "mini_batch_size", None) if storage.provides.is_kept else None) or rollout
    learning_starts = options.learning_starts
    if learning_starts is None:  # if learning started immediately, the first batches would repeat the same few rollouts
        learning_starts = getattr(worker.algo.options, "start_steps", 0) if storage.provides.is_kept else batch_size
    if not storage.provides.is_kept:  # a batch of whole rollouts exceeds `batch_size` by less than a rollout
        batch_steps = batch_size + rollout - 1
    elif storage.draws_rollouts:  # `batch_size` counts sequences, and a rollout contains `num_envs` sequences
        batch_steps = (batch_size + num_envs - 1) * storage.rollout_size
    else:  # a sequence counts as `length` steps, including its padding; a transition counts as one step
        batch_steps = batch_size * getattr(storage.options, "length", 1)
    num_passes = getattr(worker.algo.options, "num_epochs", Algorithm.num_epochs) if draws_rollouts else 1
    return Shards(
        workers, ledger, replace(options, learning_starts=learning_starts), supervision, batch_size=batch_size,
        batch_steps=batch_steps, num_passes=num_passes,
        timeout_s=collection.queue_timeout_s, seed=storage.generator.initial_seed(), version=lambda: worker.version)


class ReplaySource(TrainBatchSource):
    """Take data from replay shards: `draw` returns a sampled batch, `take` returns sampled rollouts as a train batch.

    Args:
        collector: The collector thread, which adds rollouts to the shards.
        shards: The shards.
        worker: The local collection worker.
        stats: The gradient worker's statistics.
    """

    def __init__(self, collector: CollectorThread, shards: Shards, worker: CWorker, stats: WorkerStats) -> None:
        self._collector, self._shards, self._worker, self.stats = collector, shards, worker, stats

    def draw(self) -> BatchOfKind:
        """Wait for the next sampled batch, and return it.

        Raises:
            LearnerStarvedError: No batch arrived in time.
            Exception: The error that ended the collector thread or a shard.
        """
        with self.stats.watch.part("wait"):
            self._collector.ensure_started()
            try:
                batch = self._shards.get(lambda: self._collector.stopped, self._collector.error,
                                         self._worker.storage.parameters)
            except LearnerStarvedError as error:
                raise LearnerStarvedError(f"{error}; collection waits for {self._collector.awaited()}") from None
        self.stats.add_draw(self._shards.take_headers(), self._shards.versions, self._worker.version)
        return batch

    @override
    def take(self) -> TrainBatch:
        """Wait for the next sampled rollouts, and return them as a train batch.

        `is_old` is true for all rollouts, so their steps are not counted again: the shards counted them on arrival.
        """
        return TrainBatch([QueuedRollout(rollout, 0, is_old=True) for rollout in self.draw().messages()])

    @override
    def count(self, counters: WorkerCounters) -> None:
        """Add the numbers of shards, their restarts, their batches and their stale priority updates to `counters`."""
        shards, states = self._shards, self._shards.states
        counters.restarts += shards.restarts
        counters.workers += len(states)
        counters.workers_missing += shards.num_missing
        counters.queued_batches += shards.num_waiting
        counters.queue_peak = max(counters.queue_peak, shards.sampler.peak)
        counters.draws_in_flight += shards.num_pending
        counters.replay_batches_dropped += shards.num_batches_dropped
        counters.stale_priorities += sum(state.contents["stale_priorities"] for state in states)

    @override
    def take_times(self) -> Times:
        """Return the times spent on sampling and on messages to shards since the last call."""
        return self._shards.watch.take()

    @override
    def take_levels(self) -> tuple[int, ...]:
        """Return, for each call of `draw` since the last `take_levels`, how many batches were waiting."""
        return self._shards.take_levels()

    @override
    def close(self, timeout_s: float) -> None:
        self._shards.close(timeout_s)


class ReplayDestination(Destination):
    """Pass the rollouts of a collector thread to replay shards.

    Attributes:
        queue: A queue that stays empty; it exists only because `Destination` requires one.
    """

    def __init__(self, shards: Shards, runtime: Runtime, closing: threading.Event) -> None:
        self._shards, self._runtime, self._closing = shards, runtime, closing
        self.queue: queue.Queue[TrainBatch] = runtime.make_queue(1)

    @override
    def invariant(self) -> bool:
        return self._shards.invariant()

    @override
    def put(self, rollouts: list[Rollout]) -> None:
        """Add rollouts to the shards; block while no shard can accept them, or while learning must catch up."""
        for rollout in rollouts:
            self._shards.add(rollout, self._closing.is_set)

    @override
    def poll(self) -> None:
        """Handle the confirmations that have arrived from the shards."""
        self._shards.poll(0.0)

    @override
    def begin_drain(self) -> None:
        """Let the shards accept rollouts until the end of the drain, even if collection is ahead of learning."""
        self._shards.is_draining = True

    @override
    def put_late(self, rollouts: list[Rollout], deadline: float) -> None:
        """Pass rollouts to the shards during a drain; wait for free space until the deadline."""
        for rollout in rollouts:
            if rollout.header.num_env_steps:
                self._shards.add(rollout, lambda: self._closing.is_set() or self._runtime.now() > deadline)

    @override
    def end_drain(self, deadline: float) -> None:
        """Wait until the shards have confirmed all rollouts; a shard that misses the deadline counts as lost."""
        self._shards.drain(deadline)
        self._shards.is_draining = False
