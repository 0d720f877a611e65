"""Compute the gradients of train batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias, cast

import torch

from pytorchrl.agent.contracts import check_gradients
from pytorchrl.agent.data import Batch, ReplayBatch, weights_of_gradients
from pytorchrl.scheme.collection.c_worker import CWorker
from pytorchrl.scheme.collection.collector_thread import CollectorThread
from pytorchrl.scheme.gradients import microbatch as micro
from pytorchrl.scheme.gradients.batch_plan import BatchPlan
from pytorchrl.scheme.gradients.batch_source import BatchSource
from pytorchrl.scheme.gradients.microbatch import GradAccumulator
from pytorchrl.scheme.gradients.process_group import ProcessGroup, Vectors
from pytorchrl.scheme.gradients.worker_stats import WorkerStats, timed
from pytorchrl.scheme.ledger import Ledger
from pytorchrl.scheme.replay.shards import Shards
from pytorchrl.scheme.supervision.bad_batches import BadBatches
from pytorchrl.support.untyped import MetricsDict

GetData: TypeAlias = Callable[[], Batch]
Compute: TypeAlias = Callable[[Batch, bool], tuple[Vectors, dict[str, float]]]


class GradientComputer:
    """The part of a gradient worker that computes the gradients of train batches, whole or in microbatches.

    Args:
        worker: The local collection worker, with the algorithm and the storage.
        source: Source of batches.
        plan: Sizes of train batches and microbatches.
        collector: The collector thread, from which microbatches are requested in advance.
        shards: The connection to replay shards; None without replay shards.
        ledger: The gradient worker's ledger.
        stats: The gradient worker's statistics.
        group: The group of ranks that average gradients.
        bad_batches: The object that finds and saves batches whose loss or gradient is not finite.
        point: Function that returns whether to inject a fault into a gradient; None: no faults.

    Attributes:
        batch: The batch for the next gradient; None if no batch is waiting.
        grads: The latest gradients; None before gradients are computed for the first time.
        used: Counts of the samples that the latest gradient used.
        fault: "" if the latest loss and gradient of this worker (before averaging) are finite; otherwise, a text that
            states which values are not finite.
        num_computed: Number of gradients computed.
    """

    def __init__(self, worker: CWorker, source: BatchSource, plan: BatchPlan, collector: CollectorThread,  # noqa: PLR0913
                 shards: Shards | None, ledger: Ledger, stats: WorkerStats, group: ProcessGroup,
                 bad_batches: BadBatches, point: Callable[[str], bool] | None) -> None:
        self._worker, self._source, self._plan, self._collector = worker, source, plan, collector
        self._algo, self._storage, self._shards = worker.algo, worker.storage, shards
        self._ledger, self.stats, self._group, self._bad_batches, self._point = ledger, stats, group, bad_batches, point
        self.batch: Batch | None = None
        self.grads: Vectors | None = None
        self.used = micro.Used(0, 0, True)
        self.fault = ""
        self.num_computed = 0

    def differentiate_taken(self, distribute_gradients: bool, get_data: GetData,
                            compute: Compute) -> tuple[Vectors, dict[str, float]]:
        """Compute the gradients and statistics of the batch in the attribute `batch`; set the attribute to None.

        Args:
            distribute_gradients: Whether to average the gradients over all gradient workers.
            get_data: Function that returns the next microbatch: `GWorker.get_data`, which a subclass may override.
            compute: Function that computes the gradients of a batch: `GWorker.compute_gradients`, which a subclass may
                override.
        """
        assert self.batch is not None
        batch = self.batch
        self.fault = ""
        if not (any(batch.samples.values()) or batch.num_samples):
            # The batch is empty, but other ranks may have data and expect this rank to take part in the exchange.
            grads: Vectors = self._mean_of_ranks([None] * len(self._algo.gradient_sizes), batch.samples, batch.last) \
                if distribute_gradients else []
            info: dict[str, float] = {}
            self.used = micro.Used(0, 0, batch.last)
        elif self._plan.is_streamed:
            grads, info = self._accumulate_microbatches(batch, distribute_gradients, get_data, compute)
        else:
            grads, info = compute(batch, distribute_gradients)
            self.used = micro.Used(batch.num_samples, batch.num_new_samples, batch.last, batch.samples)
            self._source.used(batch.num_new_samples)
            self._update_replay(batch, info)
        if self.fault:
            self._source.cancel_uses()
        self._ledger.move(self.used.num_new_samples, "queued", "sent")
        if self.used.last:
            self._source.end_pass()
        self.grads, self.batch = grads, None  # None, so that the steps of the batch are not counted twice
        return grads, info

    def _accumulate_microbatches(self, batch: Batch, distribute_gradients: bool, get_data: GetData,
                                 compute: Compute) -> tuple[Vectors, dict[str, float]]:
        """Accumulate the gradients of a train batch, with only one microbatch in memory at a time."""
        total = GradAccumulator(self._plan.microbatch_size, self._algo.loss_reduction)
        num_new, size, wanted = 0, 0, self._plan.train_batch_size or 0
        rounds = self._collector.rounds
        while True:
            num_new, size = num_new + batch.num_new_samples, size + self._source.size
            micro.log_microbatch(total.num_parts + 1, size, wanted)
            is_enough = size >= wanted
            if self._plan.prefetch and not is_enough and rounds is not None:
                rounds.request_ahead(self._plan.microbatch_size or wanted)
            grads, info = compute(batch, False)
            self._update_replay(batch, info)
            total.add(grads, batch.num_samples, info, batch.samples)
            self._source.used(batch.num_new_samples)
            del batch
            self.batch = None  # delete all references, to free the memory before the next microbatch is collected
            self._source.release()
            if is_enough:
                break
            batch = get_data()
        self.used = micro.Used(total.num_samples, num_new, True, total.samples)
        grads = total.result()
        if distribute_gradients:
            self._source.used(-num_new)  # the steps count as unused if averaging fails
            grads = self._mean_of_ranks(grads, total.samples, True)
            self._source.used(num_new)
        return grads, micro.decided(self._algo, total.info())

    def _update_replay(self, batch: Batch, info: MetricsDict) -> None:
        """Update the priorities in replay with the TD errors in `info`, and remove these errors from `info`."""
        if self._shards is None:
            self._storage.after_gradients(batch, info)
        errors = info.pop("errors", None)
        if self._shards is not None and self._storage.has_priorities and errors is not None and not self.fault:
            drawn = cast("ReplayBatch", batch)
            self._shards.update_priorities(drawn.ids, self._storage.item_errors(drawn, errors))

    @timed("grad")
    def compute(self, batch: Batch, distribute_gradients: bool) -> tuple[Vectors, dict[str, float]]:
        """Compute the gradients of one batch; see `GWorker.compute_gradients`."""
        grads, info = micro.differentiate(self._algo, batch, self._plan.microbatch_size, self.stats.counters,
                                          self._plan.is_streamed, self._source.staging)
        if (num_updates := self._source.updates_since_first_use) is not None:
            self.stats.add_gradient(batch.num_samples, num_updates)
        if self._source.check is not None:
            check_gradients(self._algo, "compute_gradients()", grads)
        if self._point is not None and self._point("grad"):
            grads = not_finite(grads)
        fault = self._bad_batches.find_fault(batch, grads, info, self._worker.version)
        self.fault = self.fault or fault
        if distribute_gradients:
            grads = self._mean_of_ranks(grads, batch.samples, batch.last)
        self.num_computed, self.grads = self.num_computed + 1, grads
        return grads, info

    @timed("average")
    def _mean_of_ranks(self, grads: Vectors, samples: Mapping[str, int], last: bool) -> Vectors:
        return self._group.mean(grads, weights_of_gradients(samples, len(grads)), self._algo.gradient_sizes,
                                shares=last and self._group.has_unshared(self.stats.moments))


def not_finite(vectors: Vectors) -> Vectors:
    """Return NaN vectors with the shapes of the gradients, to inject a fault."""
    return [None if vector is None else torch.full_like(vector, torch.nan) for vector in vectors]
