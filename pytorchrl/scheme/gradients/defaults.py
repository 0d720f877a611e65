"""Determine collection options whose defaults depend on the agent: batch sizes, `prefetch`, and `routing` to shards."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pytorchrl.agent.data import DataKind
from pytorchrl.agent.fit import provided_kind
from pytorchrl.agent.multi.replay import MultiAgentReplay
from pytorchrl.errors import ConfigError
from pytorchrl.scheme.collection.c_worker_set import CWorkerSetFactory
from pytorchrl.scheme.gradients.microbatch import reason_to_keep_batch
from pytorchrl.scheme.options.collection import Collection, ReplayCollection, SynchronousCollection
from pytorchrl.scheme.replay.storage_options import check_replay, kind_of, rollout_steps

if TYPE_CHECKING:
    from pytorchrl.agent.options import Factory
    from pytorchrl.agent.storages.base import Storage

_PREFETCHED_BATCHES = 4


def resolve_defaults(collection: Collection, agent: CWorkerSetFactory) -> tuple[Collection, list[str]]:
    """Fill in the collection options whose defaults depend on the agent; return all options and a list of warnings.

    Raises:
        ConfigError: The options contradict the agent.
    """
    if isinstance(collection, ReplayCollection):
        return _resolve_replay(collection, agent), []
    if isinstance(collection, SynchronousCollection):
        return _resolve_microbatches(collection, agent)
    return collection, []


def _resolve_replay(collection: ReplayCollection, agent: CWorkerSetFactory) -> ReplayCollection:
    storage, algorithm = agent.storage_factory, agent.algo_factory.options
    check_replay(storage, collection.size)
    _check_priorities(storage, collection)
    is_kept, num_shards = provided_kind(storage).is_kept, collection.num_replay_workers
    size = storage.options.size if is_kept else collection.size
    assert size is not None
    own, rollout = size // num_shards, rollout_steps(storage, agent.train_envs_factory.num_envs)
    batch, starts = collection.train_batch_size, collection.learning_starts
    if batch is None:
        batch = getattr(algorithm, "mini_batch_size", rollout) if is_kept else rollout
    if starts is None:  # if learning started immediately, the first batches would repeat the same few rollouts
        starts = getattr(algorithm, "start_steps", 0) if is_kept else batch
    for is_wrong, text in (
            (own < batch and provided_kind(storage) is not DataKind.SEQUENCES,
             f"size {size} divided among {num_shards} shards is {own} per shard, less than train_batch_size {batch}"),
            (own < rollout, f"a shard must have space for a rollout of {rollout} steps, but size {size} "
                            f"divided among {num_shards} shards is only {own} per shard"),
            (starts > size, f"learning_starts {starts} exceeds size {size}")):
        if is_wrong:
            raise ConfigError(f"{text}; raise size")
    return replace(
        collection, train_batch_size=batch, learning_starts=starts, prefetch=collection.prefetch or _PREFETCHED_BATCHES,
        routing="by_stream" if kind_of(storage) == "sequence" else collection.routing)


def _check_priorities(storage: Factory[Storage], collection: ReplayCollection) -> None:
    """Refuse initial priorities from collection workers if the storage would not use them."""
    if collection.initial_priority != "worker":
        return
    if provided_kind(storage) is DataKind.SEQUENCES:
        raise ConfigError(f"initial_priority='worker' is for single transitions, but {storage.cls.__name__} samples "
                          "sequences; leave initial_priority out")
    if storage.cls is MultiAgentReplay:
        raise ConfigError("initial_priority='worker' is not for several policies, whose transitions start with the "
                          "largest priority so far; leave initial_priority out")
    if not storage.cls.has_priorities:
        raise ConfigError("initial_priority='worker' needs a storage with priorities, such as PERBuffer, got "
                          f"{storage.cls.__name__}")


def _resolve_microbatches(
        collection: SynchronousCollection, agent: CWorkerSetFactory) -> tuple[SynchronousCollection, list[str]]:
    """Return the options, with the default of `prefetch` filled in, and a list of warnings.

    Raises:
        ConfigError: Microbatch options contradict the algorithm.
    """
    algorithm = agent.algo_factory
    reason, name = reason_to_keep_batch(algorithm.options, collection.norm_over), algorithm.cls.__name__
    if collection.norm_over == "microbatch" and reason:
        raise ConfigError(f"norm_over='microbatch' contradicts {name}: {reason}; set num_epochs=1 and "
                          "num_mini_batch=1, or norm_over='batch'")
    if collection.prefetch == 1 and reason:
        raise ConfigError("prefetch=1 has no effect: the train batch is complete before its gradient is "
                          f"computed, because {reason}; leave prefetch out")
    warnings = []
    if collection.norm_over == "microbatch" and getattr(algorithm.options, "advantage_normalization", "none") == "none":
        warnings.append(f"norm_over='microbatch' has no effect with {name}, which normalizes nothing")
    may_overlap = (collection.collects_microbatches and not reason and collection.is_parallel
                   and collection.col_fraction_workers == 1.0)
    prefetch = collection.prefetch
    if prefetch is None and collection.collects_microbatches:
        prefetch = int(may_overlap)
    return replace(collection, prefetch=prefetch), warnings
