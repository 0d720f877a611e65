"""Sources of a gradient worker's batches: synchronous rounds, a queue, or replay shards."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import cast

from typing_extensions import override

from pytorchrl.agent.contracts import DataCheck
from pytorchrl.agent.data import Batch
from pytorchrl.errors import DrainingError, LearnerStarvedError, StoppedError
from pytorchrl.runtime import Runtime
from pytorchrl.scheme.collection.c_worker import CWorker
from pytorchrl.scheme.collection.collector_thread import CollectorThread
from pytorchrl.scheme.counters import WorkerCounters
from pytorchrl.scheme.gradients.loader import Loader
from pytorchrl.scheme.gradients.process_group import MomentsOfData, ProcessGroup
from pytorchrl.scheme.gradients.replay_source import ReplaySource
from pytorchrl.scheme.gradients.sample_queue import SampleQueue
from pytorchrl.scheme.gradients.staging import Staging
from pytorchrl.scheme.gradients.train_batch import QueuedRollout, TrainBatch, TrainBatchSource
from pytorchrl.scheme.gradients.worker_stats import WorkerStats, timed
from pytorchrl.scheme.ledger import DropReason, Ledger
from pytorchrl.scheme.timing import Times
from pytorchrl.scheme.transport.encoder import DATA
from pytorchrl.scheme.transport.messages import Rollout
from pytorchrl.scheme.transport.receive import copied, receive
from pytorchrl.scheme.transport.requests import POLL_INTERVAL_S
from pytorchrl.support.terminal import get_logger

logger = get_logger(__name__)


class RoundSource(TrainBatchSource):
    """Synchronous collection in the learner thread; a train batch consists of one or several rounds.

    Train batches that a user has added to the queue are used first.

    Args:
        collector: Collector of the rounds.
        by_hand: Queue to which users may add train batches.
        ledger: The gradient worker's ledger.
        stats: The gradient worker's statistics.
        goal: Minimum number of steps (`RolloutHeader.size`) of a train batch, which consists of whole microbatches.
            None: a train batch is one round.
        microbatch: Minimum number of steps of a microbatch, which consists of whole rounds. None: the value of `goal`,
            so that a train batch is one microbatch.
    """

    def __init__(self, collector: CollectorThread, by_hand: SampleQueue, ledger: Ledger, stats: WorkerStats,
                 goal: int | None = None, microbatch: int | None = None) -> None:
        self._collector, self._by_hand, self._ledger, self.stats = collector, by_hand, ledger, stats
        self._goal, self._step = goal, microbatch or goal or 0
        self._num_taken = 0

    @override
    @timed("wait")
    def take(self) -> TrainBatch:
        """Return the next train batch: one that a user has queued, or newly collected rounds.

        Raises:
            StoppedError: Collection was stopped.
            CollectionError: A round took too long.
        """
        self._collector.apply_resizes()
        batch = self._take_round()
        kept: list[QueuedRollout] = []
        next_check = self._step
        while self._goal is not None:
            newest, batch.rollouts = batch.rollouts, [*kept, *batch.rollouts]
            if batch.size >= next_check:
                if batch.size >= self._goal:
                    break
                next_check = batch.size + self._step
            # Copy the latest rollouts, because the local worker's next rollout will overwrite their memory.
            kept += [queued._replace(rollout=copied(queued.rollout)) for queued in newest]
            batch = self._take_round()
        return batch

    def _take_round(self) -> TrainBatch:
        rounds = self._collector.rounds
        rollouts: list[Rollout] = []
        assert rounds is not None, "collection is asynchronous"
        while not rollouts:  # a round may have no valid step
            if not self._collector.stopped and self._by_hand.is_ready:
                return self._by_hand.take(0.0)
            if not self._collector.stopped:
                rollouts = rounds.collect()
            # If collection was stopped during the round, its rollouts are discarded. The ledger counts their steps as
            # in flight until `GWorker.stop` drops them.
            if self._collector.stopped:
                raise StoppedError(f"collection of GWorker {self._collector.index_worker} has been stopped")
        self._ledger.move(sum(rollout.header.num_env_steps for rollout in rollouts), "in_flight", "queued")
        self._num_taken += 1
        version = self._collector.local_worker.version
        return TrainBatch([QueuedRollout(rollout, version) for rollout in rollouts], uses=1)

    @override
    def take_levels(self) -> tuple[int, ...]:
        """Return how many train batches were waiting at each `take` since the last `take_levels`.

        The result begins with a 0 for each collected round, because a round never waits in a queue. Users can also add
        train batches to a queue by hand; the other numbers are the lengths of this queue, one number for each train
        batch that was taken from it.
        """
        rounds, self._num_taken = (0,) * self._num_taken, 0
        return rounds + self._by_hand.take_levels()


class QueueSource(TrainBatchSource):
    """Asynchronous collection: the collector thread fills a sample queue, from which train batches are taken.

    Args:
        collector: The collector thread.
        samples: The sample queue.
        runtime: Runtime that provides the clock.
        stats: The gradient worker's statistics.
        timeout_s: Seconds without data after which the learner reacts according to `on_starved`.
        on_starved: "raise", "warn" (once) or "wait".
    """

    def __init__(self, collector: CollectorThread, samples: SampleQueue, runtime: Runtime, stats: WorkerStats,
                 timeout_s: float, on_starved: str) -> None:
        self._collector, self._samples, self._runtime, self.stats = collector, samples, runtime, stats
        self._timeout_s, self._on_starved = timeout_s, on_starved

    @override
    @timed("wait")
    def take(self) -> TrainBatch:
        """Start collection if necessary, then wait for the next train batch and return it.

        Raises:
            StoppedError: Collection was stopped.
            DrainingError: The worker is about to be drained.
            LearnerStarvedError: No data arrived within the timeout, and `on_starved` is "raise".
            Exception: The error that ended the collector thread.
        """
        self._collector.ensure_started()
        deadline = self._runtime.now() + self._timeout_s
        while True:
            if self._collector.stopped:
                raise StoppedError(f"collection of GWorker {self._collector.index_worker} has been stopped")
            if self._collector.is_draining:
                raise DrainingError(f"GWorker {self._collector.index_worker} is about to be drained")
            try:
                return self._samples.take(POLL_INTERVAL_S)
            except queue.Empty:
                if not self._samples.is_ready:
                    self._collector.check_remaining()
            # A thread that has failed adds no data, so an empty queue stays empty. The error is raised outside the
            # `except` block, so that its traceback does not show `queue.Empty`.
            if self._collector.failure is not None and not self._samples.is_ready:
                raise self._collector.failure
            if self._runtime.now() >= deadline and self._on_starved != "wait":
                deadline = float("inf")
                self._starve()

    def _starve(self) -> None:
        counters = WorkerCounters()
        self._collector.count(counters)
        text = (f"no train batch for {self._timeout_s:.1f} s: {counters.workers - counters.workers_missing} of "
                f"{counters.workers} collection workers alive, {counters.requests_in_flight} requests in flight; "
                f"waiting for {self._collector.awaited()}")
        if self._on_starved == "raise":
            raise LearnerStarvedError(f"{text}; raise queue_timeout_s if a rollout takes longer")
        logger.warning("GWorker %d is still waiting: %s", self._collector.index_worker, text)

    @override
    def cancel_uses(self, batch: TrainBatch) -> None:
        self._samples.discard(batch)

    @override
    def take_levels(self) -> tuple[int, ...]:
        return self._samples.take_levels()


class BatchSource:
    """Load train batches into the storage, and provide the batches from which gradients are computed.

    Args:
        worker: The local collection worker, with the storage and the algorithm.
        source: Source of train batches.
        ledger: The gradient worker's ledger.
        stats: The gradient worker's statistics.
        group: The gradient worker's connection to a group of ranks. In a group, advantages may be normalized over the
            data of all ranks together.
        is_streamed: Whether `source` returns the data of one update as several train batches (microbatches). If so,
            advantages are not normalized over several workers.
        is_local: Whether the local worker collects. If so, rollouts already contain tensors.
        loader: Loader that copies train batches to the device in advance; None: train batches stay in host memory.
        staging: See the attribute `staging`.
        draws_ahead: Whether to draw the next batch, and to start copying it to the device, before the gradient of the
            current batch is computed.

    Attributes:
        check: The check of every rollout and every batch; None: they are not checked, and neither are gradients.
        staging: Object that copies batches to the learner's device; None if nothing is copied in advance.
        is_loaded: Whether a train batch was loaded into the storage, and no pass over it has started since then.
    """

    def __init__(self, worker: CWorker, source: TrainBatchSource, ledger: Ledger, stats: WorkerStats,  # noqa: PLR0913
                 group: ProcessGroup, *, is_streamed: bool = False, is_local: bool = False,
                 loader: Loader | None = None, staging: Staging | None = None, draws_ahead: bool = False) -> None:
        self._worker, self._source, self._ledger, self.stats, self._group = worker, source, ledger, stats, group
        self._loader, self.staging, self._draws_ahead = loader, staging, draws_ahead
        self._algo, self._storage, self._is_streamed = worker.algo, worker.storage, is_streamed
        self._is_local = is_local
        self.check: DataCheck | None = None
        self._batches: Iterator[Batch] | None = None
        self.is_loaded = False
        self._current: TrainBatch | None = None
        self._unused_steps = 0  # env steps of the current train batch that no gradient has used
        self._drawn_steps = 0  # env steps of the current train batch that are in batches returned by `next`
        self._evicted = 0  # env steps evicted from replay so far

    @property
    def updates_since_first_use(self) -> int | None:
        """Number of updates since the first use of the current train batch; None for data from replay."""
        is_kept = self._storage.provides.is_kept
        return None if self._current is None or is_kept else self._worker.version - self._current.version_used

    @property
    def size(self) -> int:
        """Number of steps in the current train batch (`RolloutHeader.size`); 0 without a train batch."""
        return 0 if self._current is None else self._current.size

    @timed("copy")
    def next(self) -> Batch:
        """Return the next batch of the current train batch; if no batch is left, load the next train batch first.

        With replay, the storage provides no batch before learning starts. Until then, this method keeps loading train
        batches.
        """
        if isinstance(self._source, ReplaySource) and self._storage.provides.is_kept:
            batch = cast("Batch", self._source.draw())
        else:
            found = None if self._batches is None else next(self._batches, None)
            while found is None:
                if not self.is_loaded:
                    self.load()
                found = next(self.start_pass(None), None)
            assert self._current is not None
            batch = found
            before, self._drawn_steps = self._drawn_steps, self._drawn_steps + batch.num_new_samples
            num_new = self._current.count_new(before, self._drawn_steps)
            if num_new != batch.num_new_samples:
                batch = replace(batch, num_new_samples=num_new)
        if self.check is not None:
            self.check.check("generate_batches()", batch)
        return batch

    @timed("copy")
    def load(self) -> None:
        """Wait for the next train batch, and insert it into the storage."""
        current = self._current = self._source.take()
        self._unused_steps = self._drawn_steps = 0
        if current.uses == 1:
            current.version_used = self._worker.version
            for queued in current.rollouts:
                if not queued.is_old:
                    self.stats.add_rollout(queued.rollout.header, queued.version_queued, self._worker.version)
            self._unused_steps = current.num_new_steps
            self._decode(current)  # at later uses, the train batch already contains tensors
        if self._loader is not None:
            self._loader.look_ahead()
        if self.check is not None:
            for queued in current.rollouts:
                self.check.check("get_all_buffer_data()", queued.rollout.data)
        self._storage.insert_from([queued.rollout.data for queued in current.rollouts],
                                  [queued.rollout.header.source for queued in current.rollouts])
        self._storage.before_gradients()
        if moments := self._algo.take_moments():
            self.stats.moments.append(moments)
        self.is_loaded = True
        if self._storage.provides.is_kept:
            self._book_as_resident()

    def _decode(self, batch: TrainBatch) -> None:
        if self._loader is not None:
            self.stats.traffic[DATA] += self._loader.load(batch)
            return
        with self.stats.watch.part("decode"):
            if not self._is_local:
                for place, queued in enumerate(batch.rollouts):
                    received, traffic = receive(queued.rollout, self.stats.watch.now)
                    self.stats.traffic[DATA] += traffic
                    batch.rollouts[place] = queued._replace(rollout=received)

    def _book_as_resident(self) -> None:
        """Count the train batch's steps as "resident" (in replay), and the steps that they replaced as "evicted"."""
        evicted = self._storage.counters["evicted"]
        self._ledger.move(self._unused_steps, "queued", "resident")
        self._unused_steps = 0
        self._ledger.move(evicted - self._evicted, "resident", "evicted")
        self._evicted = evicted

    @timed("copy")
    def start_pass(self, advantage_moments: Sequence[MomentsOfData] | None) -> Iterator[Batch]:
        """Return an iterator over the batches of the train batch in the storage.

        Args:
            advantage_moments: The moments of each gradient worker's advantages. They are used to normalize advantages
                over the data of all these workers. None: advantages are normalized over this worker's data or, in a
                group, over the data of all ranks.
        """
        if self._is_streamed:
            advantage_moments = None
        elif self._group.is_member and self._algo.advantage_normalization == "batch":
            with self.stats.watch.part("average"):
                advantage_moments = self._group.gather_moments(self._storage.advantage_moments())
        if advantage_moments is not None:
            self._storage.normalize_by(advantage_moments)
        own = self._source.own_batches()
        self._batches = self._algo.batches(self._storage) if own is None else own
        if self.staging is not None and self._draws_ahead:
            self._batches = self.staging.ahead(self._batches)
        self.is_loaded = False
        return self._batches

    def used(self, num_new_steps: int) -> None:
        """Count `num_new_steps` steps of the current train batch as used by a gradient."""
        self._unused_steps -= num_new_steps

    def end_pass(self) -> None:
        """End the pass over the current train batch, even if some of its batches have not been used."""
        self._batches = None

    def release(self) -> None:
        """Discard the current train batch and all references to it, to free its memory for the next train batch."""
        self._batches = self._current = None
        self._storage.reset()

    def cancel_uses(self) -> None:
        """Cancel all later passes over the current train batch."""
        if self._current is not None:
            self._source.cancel_uses(self._current)

    def skip_remaining(self, reason: DropReason) -> None:
        """Do not load the current train batch again; if a pass over it has started, end this pass.

        When a pass is ended, the steps that no gradient has used are counted as dropped. If the train batch has been
        loaded for a pass that has not started yet, this pass still takes place.
        """
        self.cancel_uses()
        if self._batches is not None:
            self._batches = None
            self._drop_unused(reason)

    def abandon(self, reason: DropReason) -> None:
        """Give up the current train batch if a pass over it has started; otherwise, do nothing.

        Giving up means to end the pass, to count the unused steps as dropped and to cancel all later passes. If the
        pass has not started yet, the train batch is kept, because all of its steps can still be used.
        """
        if not self.is_loaded:
            self.cancel_uses()
            self._batches = None
            self._drop_unused(reason)

    def _drop_unused(self, reason: DropReason) -> None:
        self._ledger.drop(self._unused_steps, "queued", reason)
        self._unused_steps = 0

    def clear(self) -> None:
        """Discard the current train batch without changing the ledger."""
        self._batches = self._current = None
        self.is_loaded, self._unused_steps = False, 0

    def restored(self) -> None:
        """Read the number of evicted steps from the storage, which was restored from a checkpoint."""
        self._evicted = self._storage.counters.get("evicted", 0)

    def count(self, counters: WorkerCounters) -> None:
        """Add the counts of the source and the storage to `counters`."""
        self._source.count(counters)
        if self._storage.provides.is_kept:
            counters.stale_priorities += self._storage.counters.get("stale_priorities", 0)

    def take_times(self) -> Times:
        """Return the durations of the source's operations and of copies to the device since the last call."""
        return {**self._source.take_times(), **({} if self.staging is None else self.staging.watch.take())}

    def take_levels(self) -> tuple[int, ...]:
        """Return how many train batches were waiting at each `take` of the source since the last `take_levels`."""
        return self._source.take_levels()

    def close(self, timeout_s: float) -> None:
        """End the loader's thread, and close the source."""
        if self._loader is not None:
            self._loader.close()
        self._source.close(timeout_s)
