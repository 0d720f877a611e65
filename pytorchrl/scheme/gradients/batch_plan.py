"""Sizes of train batches and microbatches."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pytorchrl.scheme.collection.c_worker import CWorker
from pytorchrl.scheme.collection.collector_thread import CollectorThread
from pytorchrl.scheme.collection.strategies import Barrier
from pytorchrl.scheme.gradients import microbatch as micro
from pytorchrl.scheme.gradients.microbatch import GradAccumulator
from pytorchrl.scheme.options.base import options_of
from pytorchrl.scheme.options.gradients import GWorkerOptions


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """Sizes of a gradient worker's train batches and microbatches.

    Attributes:
        train_batch_size: Least number of steps in a train batch. None: a train batch consists of one rollout or, if
            collection is synchronous, of one rollout from each worker.
        microbatch_size: Largest number of env steps in one backward pass; None: no limit.
        is_streamed: Whether each microbatch is discarded once its gradient has been computed.
        prefetch: Number of microbatches that are requested while a gradient is computed.
        least_steps: Least number of steps per environment in a rollout that is preempted (ended early).
    """

    train_batch_size: int | None
    microbatch_size: int | None
    is_streamed: bool = False
    prefetch: int = 0
    least_steps: int = 0


def plan_batches(collection: CollectorThread.Options, worker: CWorker, num_remote: int) -> BatchPlan:
    """Determine the sizes of batches, and prepare the storage for them.

    Args:
        collection: Options of collection.
        worker: The local collection worker, whose storage stores the train batches.
        num_remote: Number of remote collection workers.
    """
    train = options_of(GWorkerOptions, collection).train_batch_size
    size = options_of(GradAccumulator.Options, collection).microbatch_size
    is_sync, barrier = isinstance(collection, Barrier.Options), options_of(Barrier.Options, collection)
    storage = worker.storage
    plan_passes(collection, worker, num_remote)
    least_steps = round(barrier.fraction_samples * storage.rollout_size)
    if size is None:
        return BatchPlan(train_batch_size=train, microbatch_size=None, least_steps=least_steps)
    storage.device = torch.device("cpu")  # a whole train batch may not fit on the algorithm's device
    streamed = options_of(GradAccumulator.CollectOptions, collection)
    is_streamed = train is not None and not micro.reason_to_keep_batch(worker.algo.options, streamed.norm_over)
    can_prefetch = is_streamed and is_sync and num_remote > 0 and barrier.col_fraction_workers == 1.0
    return BatchPlan(
        train_batch_size=train, microbatch_size=size, is_streamed=is_streamed, least_steps=least_steps,
        prefetch=int(can_prefetch) if streamed.prefetch is None else streamed.prefetch)


def plan_passes(collection: CollectorThread.Options, worker: CWorker, num_remote: int) -> None:
    """Tell the storage how many rollouts a train batch contains; see `plan_batches` for the arguments.

    In synchronous collection, this number depends on the number of workers, so this function is called again when the
    number of workers changes.
    """
    train = options_of(GWorkerOptions, collection).train_batch_size
    size = options_of(GradAccumulator.Options, collection).microbatch_size
    is_sync = isinstance(collection, Barrier.Options)
    worker.storage.plan_batches(micro.num_rollouts(
        worker.storage.rollout_size * worker.num_envs, train, (max(1, num_remote), size) if is_sync else None))
