"""Determine collection options whose defaults depend on the agent: batch sizes, `prefetch`, and `routing` to shards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pytorchrl.agent.algorithms.base import Algorithm
from pytorchrl.agent.data import DataKind
from pytorchrl.agent.fit import provided_kind
from pytorchrl.agent.multi.replay import MultiAgentReplay
from pytorchrl.errors import Problem
from pytorchrl.scheme.gradients.microbatch import reason_to_keep_batch
from pytorchrl.scheme.options.base import FEW_IN_FLIGHT, LONG_QUEUE, MANY_IN_FLIGHT, SHORT_QUEUE
from pytorchrl.scheme.options.collection import (
    AsynchronousCollection,
    Collection,
    ReplayCollection,
    SynchronousCollection,
)
from pytorchrl.scheme.replay.storage_options import check_replay, needs_order, rollout_steps
from pytorchrl.support.problems import problems_in, raise_all

if TYPE_CHECKING:
    from pytorchrl.agent.factories import Agent, AlgorithmFactory, StorageFactory
    from pytorchrl.scheme.collection.recipe import CWorkerRecipe

_PREFETCHED_BATCHES = 4


def resolve_defaults(collection: Collection, agent: Agent | CWorkerRecipe) -> tuple[Collection, list[str]]:
    """Fill in the collection options whose defaults depend on the agent; return all options and a list of warnings.

    Raises:
        ConfigError: The options contradict the agent.
    """
    raise_all(default_problems(collection, agent))
    if isinstance(collection, SynchronousCollection):
        return _resolve_microbatches(collection, agent)
    keeps = isinstance(collection, ReplayCollection) or provided_kind(agent.storage_factory).is_kept \
        or collection.buffer == "circular"
    values: dict[str, object] = {"queue_size": collection.queue_size or (LONG_QUEUE if keeps else SHORT_QUEUE)}
    if not collection.infers_centrally:
        values["col_in_flight"] = collection.col_in_flight or (MANY_IN_FLIGHT if keeps else FEW_IN_FLIGHT)
    if isinstance(collection, AsynchronousCollection):
        lag_policy = "wait" if collection.delays_by_lag else "drop"
        values["on_policy_lag"] = None if collection.max_policy_lag is None else lag_policy
    else:
        _, batch, starts = _sizes(collection, agent)
        values |= {
            "train_batch_size": batch, "learning_starts": starts,
            "prefetch": collection.prefetch or _PREFETCHED_BATCHES,
            "routing": "by_stream" if needs_order(agent.storage_factory) else collection.routing}
    return collection.replaced(**values), []


def default_problems(collection: Collection, agent: Agent | CWorkerRecipe) -> list[Problem]:
    """Return the contradictions between options of collection, including those filled in, and the agent."""
    if isinstance(collection, ReplayCollection):
        return list(_replay_problems(collection, agent))
    if isinstance(collection, SynchronousCollection):
        return list(_microbatch_problems(collection, agent.algo_factory))
    return []


def _replay_problems(collection: ReplayCollection, agent: Agent | CWorkerRecipe) -> Iterator[Problem]:
    storage, number = agent.storage_factory, collection.num_replay_workers
    found = problems_in(check_replay, storage, collection.size)
    yield from found
    yield from _priority_problems(storage, collection)
    if found:
        return
    size, batch, starts = _sizes(collection, agent)
    own, rollout = size // number, rollout_steps(storage, agent.train_envs_factory.num_envs)
    for is_wrong, text, names in (
            (own < batch and provided_kind(storage) is not DataKind.SEQUENCES,
             f"size {size} divided among {number} shards is {own} per shard, less than train_batch_size {batch}",
             ("num_replay_workers", "train_batch_size")),
            (own < rollout, f"a shard must have space for a rollout of {rollout} steps, but size {size} "
                            f"divided among {number} shards is only {own} per shard", ("num_replay_workers",)),
            (starts > size, f"learning_starts {starts} exceeds size {size}", ("learning_starts",))):
        if is_wrong:
            yield Problem(text, "raise size", ("size", *names))


def _sizes(collection: ReplayCollection, agent: Agent | CWorkerRecipe) -> tuple[int, int, int]:
    """Return the total size of the shards, and the values of `train_batch_size` and `learning_starts`."""
    storage, algorithm = agent.storage_factory, agent.algo_factory.options
    is_kept = provided_kind(storage).is_kept
    size = storage.options.size if is_kept else collection.size
    assert size is not None
    rollout = rollout_steps(storage, agent.train_envs_factory.num_envs)
    batch, starts = collection.train_batch_size, collection.learning_starts
    if batch is None:
        batch = getattr(algorithm, "mini_batch_size", rollout) if is_kept else rollout
    if starts is None:  # if learning started immediately, the first batches would repeat the same few rollouts
        starts = getattr(algorithm, "start_steps", 0) if is_kept else batch
    return size, batch, starts


def _priority_problems(storage: StorageFactory, collection: ReplayCollection) -> Iterator[Problem]:
    """Refuse initial priorities from collection workers if the storage would not use them."""
    if collection.initial_priority != "worker":
        return
    text = ""
    if provided_kind(storage) is DataKind.SEQUENCES:
        text = f"is for single transitions, but {storage.cls.__name__} samples sequences"
    elif storage.cls is MultiAgentReplay:
        text = "is not for several policies, whose transitions start with the largest priority so far"
    elif not storage.cls.has_priorities:
        text = f"needs a storage with priorities, such as PERBuffer, got {storage.cls.__name__}"
    if text:
        yield Problem(f"initial_priority='worker' {text}", "leave initial_priority out",
                      ("initial_priority", "prioritized"))


def _microbatch_problems(collection: SynchronousCollection, algorithm: AlgorithmFactory) -> Iterator[Problem]:
    """Refuse microbatch options that contradict the algorithm."""
    reason = reason_to_keep_batch(algorithm.options, collection.norm_over)
    if not reason or not collection.collects_microbatches:
        return
    if collection.norm_over == "microbatch":
        yield Problem(f"norm_over='microbatch' contradicts {algorithm.cls.__name__}: {reason}",
                      "set num_epochs=1 and num_mini_batch=1, or norm_over='batch'", ("norm_over",))
    if collection.prefetch == 1:
        yield Problem(f"prefetch=1 has no effect: the train batch is complete before its gradient is computed, because "
                      f"{reason}", "leave prefetch out", ("prefetch",))


def _resolve_microbatches(
        collection: SynchronousCollection, agent: Agent | CWorkerRecipe) -> tuple[SynchronousCollection, list[str]]:
    """Return the options, with the default of `prefetch` filled in, and a list of warnings."""
    algorithm = agent.algo_factory
    reason, name = reason_to_keep_batch(algorithm.options, collection.norm_over), algorithm.cls.__name__
    warnings = []
    normalization = getattr(algorithm.options, "advantage_normalization", Algorithm.advantage_normalization)
    if collection.norm_over == "microbatch" and normalization == "none":
        warnings.append(f"norm_over='microbatch' has no effect with {name}, which normalizes nothing")
    may_overlap = (collection.collects_microbatches and not reason and collection.is_parallel
                   and collection.col_fraction_workers == 1.0)
    prefetch = collection.prefetch
    if prefetch is None and collection.collects_microbatches:
        prefetch = int(may_overlap)
    return collection.replaced(prefetch=prefetch), warnings
