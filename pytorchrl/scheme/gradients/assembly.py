"""Assemble the parts of a gradient worker."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch

from pytorchrl.agent.contracts import DataCheck
from pytorchrl.agent.modes import DROPOUT, NORMALIZATION, NetworkMode
from pytorchrl.agent.storages.on_policy import VanillaOnPolicyBuffer
from pytorchrl.errors import ConfigError
from pytorchrl.runtime import Runtime
from pytorchrl.scheme.collection.c_worker import CWorker
from pytorchrl.scheme.collection.c_worker_set import CWorkerSet
from pytorchrl.scheme.collection.collector_thread import CollectorSetup, CollectorThread
from pytorchrl.scheme.collection.destination import Destination
from pytorchrl.scheme.collection.resizing import Resizing
from pytorchrl.scheme.collection.strategies import OnArrival, RemoteStrategy
from pytorchrl.scheme.gradients.batch_plan import BatchPlan, plan_batches, plan_passes
from pytorchrl.scheme.gradients.batch_source import BatchSource, QueueSource, RoundSource
from pytorchrl.scheme.gradients.dataset_source import DatasetSource, dataset_of
from pytorchrl.scheme.gradients.gradient_computer import GradientComputer
from pytorchrl.scheme.gradients.loader import Loader
from pytorchrl.scheme.gradients.process_group import ProcessGroup
from pytorchrl.scheme.gradients.recipe import GWorkerRecipe
from pytorchrl.scheme.gradients.replay_source import ReplayDestination, ReplaySource, make_shards
from pytorchrl.scheme.gradients.sample_queue import SampleQueue
from pytorchrl.scheme.gradients.staging import Staging, staging_for
from pytorchrl.scheme.gradients.train_batch import TrainBatchSource
from pytorchrl.scheme.gradients.worker_stats import WorkerStats
from pytorchrl.scheme.ledger import Ledger
from pytorchrl.scheme.options.base import MANY_IN_FLIGHT, options_of
from pytorchrl.scheme.options.collection import SampleQueueOptions
from pytorchrl.scheme.options.gradients import GWorkerOptions
from pytorchrl.scheme.replay.r_worker_set import RWorkerSet
from pytorchrl.scheme.replay.shards import Shards
from pytorchrl.scheme.supervision.bad_batches import BadBatches
from pytorchrl.scheme.supervision.supervisor import Supervisor


@dataclass(frozen=True, kw_only=True)
class GWorkerParts:
    """The parts of a gradient worker.

    Attributes:
        ledger: Ledger of the collection workers' env steps.
        stats: Statistics for the next message to the update worker.
        group: The group of ranks that average gradients.
        plan: Sizes of train batches and microbatches.
        shards: The connection to replay shards; None without replay shards.
        collector: The collector thread.
        source: The source of batches.
        gradients: The object that computes the gradients of batches.
    """

    ledger: Ledger
    stats: WorkerStats
    group: ProcessGroup
    plan: BatchPlan
    shards: Shards | None
    collector: CollectorThread
    source: BatchSource
    gradients: GradientComputer


def assemble(index_worker: int, recipe: GWorkerRecipe, col_workers: CWorkerSet, replay_workers: RWorkerSet | None,
             runtime: Runtime, point: Callable[[str], bool] | None) -> GWorkerParts:
    """Build the parts of a gradient worker.

    Args:
        index_worker: Index of the gradient worker.
        recipe: The recipe of the gradient worker, with all options.
        col_workers: Set of collection workers.
        replay_workers: Set of replay shards; None: no replay shards.
        runtime: The gradient worker's runtime, which provides the clock.
        point: Function that returns whether to inject a fault at a named point of the code; None: no faults.
    """
    collection = recipe.collection
    worker, remote, col_runtime = col_workers.local_worker(), col_workers.remote_workers(), col_workers.runtime
    ledger, stats, group = Ledger(), WorkerStats(runtime.now), ProcessGroup(worker.algo.device)
    plan = plan_batches(collection, worker, len(remote))
    check_layers(worker, recipe.options.is_parallel, isinstance(collection, OnArrival.Options), warns=index_worker == 0)
    closing = runtime.make_event()
    in_flight = options_of(OnArrival.Options, collection).col_in_flight or MANY_IN_FLIGHT
    samples = SampleQueue(
        worker, col_runtime, ledger, closing, options_of(SampleQueueOptions, collection),
        plan.train_batch_size if isinstance(collection, OnArrival.Options) else None,
        lambda: in_flight * max(1, len(remote)))
    destination, shards = cast("Destination", samples), None
    if replay_workers is not None:
        shards = make_shards(replay_workers, ledger, worker, collection, recipe.supervision)
        destination = ReplayDestination(shards, runtime, closing)
    collector = CollectorThread(
        index_worker, worker, remote, setup=CollectorSetup(
            options=collection, destination=destination, closing=closing, runtime=col_runtime, ledger=ledger,
            compress_weights_to_send=recipe.compress_weights_to_send if collection.is_parallel else False,
            inference=col_workers.inference,
            supervisor=Supervisor(remote, col_workers.replace, col_runtime, recipe.supervision, seed=index_worker)))
    if col_workers.is_parallel and isinstance(strategy := collector.strategy, RemoteStrategy):
        collector.resizing = Resizing(col_workers, strategy, collector.supervisor,
                                      lambda number: plan_passes(collection, worker, number))
    batches: TrainBatchSource
    if shards is not None:
        batches = ReplaySource(collector, shards, worker, stats)
    elif (dataset := dataset_of(collection)) is not None:
        batches = DatasetSource(dataset, recipe.col_workers_factory.train_envs_factory, worker, collector)
    elif isinstance(collection, SampleQueueOptions):
        batches = QueueSource(collector, samples, col_runtime, stats, collection.queue_timeout_s, collection.on_starved)
    else:
        step = None if plan.train_batch_size is None else plan.microbatch_size or plan.train_batch_size
        batches = RoundSource(collector, samples, ledger, stats, step if plan.is_streamed else plan.train_batch_size,
                              step)
    staging, loader = _staging(worker, batches, samples, plan, runtime)
    options = options_of(GWorkerOptions, collection)
    source = BatchSource(
        worker, batches, ledger, stats, group, is_streamed=plan.is_streamed, is_local=not remote, loader=loader,
        # With priorities, no batch is drawn ahead, because a draw depends on the TD errors of the previous batch.
        staging=staging, draws_ahead=worker.storage.provides.is_kept and not worker.storage.has_priorities)
    if options.check_data == "always":
        source.check = DataCheck(worker.storage)
    keep = None if options.keep_bad_batches is None else os.fspath(options.keep_bad_batches)
    bad_batches = BadBatches(keep, index_worker, worker.algo)
    return GWorkerParts(
        ledger=ledger, stats=stats, group=group, plan=plan, shards=shards, collector=collector, source=source,
        gradients=GradientComputer(worker, source, plan, collector, shards, ledger, stats, group, bad_batches, point))


def _staging(worker: CWorker, batches: TrainBatchSource, samples: SampleQueue, plan: BatchPlan,
             runtime: Runtime) -> tuple[Staging | None, Loader | None]:
    """Return the objects that copy batches, and rollouts that wait in the queue, to an accelerator; None: no copies."""
    staging = staging_for(worker.algo.device, runtime.now)
    if staging is not None and worker.storage.provides.is_kept and not isinstance(batches, ReplaySource):
        worker.storage.device = torch.device("cpu")  # `staging` copies batches to the learner's device
    elif staging is not None and isinstance(batches, QueueSource) and plan.microbatch_size is None \
            and isinstance(worker.storage, VanillaOnPolicyBuffer):
        return staging, Loader(staging, samples.following, runtime.now)
    return staging, None


def check_layers(worker: CWorker, is_parallel: bool, is_asynchronous: bool, *, warns: bool) -> None:
    """Warn about dropout and batch normalization that has no effect, and refuse it where it would be wrong.

    Args:
        worker: The local collection worker, with the algorithm.
        is_parallel: Whether gradients are computed by several workers.
        is_asynchronous: Whether collection is asynchronous.
        warns: Whether to warn.

    Raises:
        ConfigError: Several workers would learn different moments of batches, or a record could not be replayed.
    """
    for policy, algorithm in getattr(worker.algo, "algorithms", {"": worker.algo}).items():
        mode: NetworkMode | None = getattr(algorithm, "mode", None)
        if mode is None:  # an algorithm without networks
            continue
        norms, name = mode.layers(NORMALIZATION), type(algorithm).__name__
        whose = f"the actor of policy {policy!r}" if policy else "the actor"
        if not algorithm.learns_from.is_kept:
            if warns and (idle := mode.layers(DROPOUT) + norms):
                warnings.warn(
                    f"{' and '.join(idle)} in {whose} stay in evaluation mode in {name}, so that learning and acting "
                    "use the same policy: dropout has no effect, and moments of batches are not learned; use layer "
                    "normalization or normalize_obs=True instead", stacklevel=2)
        elif norms and is_parallel:
            raise ConfigError(
                f"{' and '.join(norms)} in {whose} learn moments of batches where gradients are computed, so parallel "
                "gradient workers would have different networks; use layer normalization, or "
                "one gradient worker (num_grad_workers=1 without grad_execution)")
        elif norms and is_asynchronous and worker.journal.is_kept:
            raise ConfigError(
                f"{' and '.join(norms)} in {whose} learn moments of batches between two updates, so a record of "
                "asynchronous collection could not be replayed exactly; use layer normalization, or do not record")
