"""Choose float32 or bfloat16 for each algorithm whose option `mixed_precision` is "auto"."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from pytorchrl.agent.algorithms.precision import BatchShape, measure, policies_of, undecided, with_precisions
from pytorchrl.agent.fit import provided_kind
from pytorchrl.scheme.devices import check_device
from pytorchrl.scheme.options.collection import Collection, SynchronousCollection
from pytorchrl.support.terminal import get_logger

if TYPE_CHECKING:
    from pytorchrl.agent.factories import ActorFactory, Agent, AlgorithmFactory, StorageFactory
    from pytorchrl.scheme.options.settings import Settings

logger = get_logger(__name__)


def decide_precisions(agent: Agent, settings: Settings) -> Agent:
    """Return the agent with each `mixed_precision="auto"` replaced by True or False, and log the measured times.

    The value is True if bfloat16 is faster by at least a tenth. Gradients in both precisions are timed in this process,
    on the device that computes the gradients during the run.

    Raises:
        DeviceError: This process cannot use the device.
    """
    decisions = {}
    for policy in undecided(agent.algo_factory):
        device = settings.process.device
        if settings.has_parallel_gradients:
            device = settings.gradients.grad_device or device
        algorithm, actor = policies_of(agent.algo_factory)[policy], policies_of(agent.actor_factory)[policy]
        shape = batch_shape(algorithm, actor, policies_of(agent.storage_factory)[policy],
                            agent.train_envs_factory.num_envs * _num_agents(agent, policy), settings.collection)
        trial = measure(algorithm, actor, shape,
                        check_device(device, name="the device on which mixed_precision='auto' measures"))
        logger.info("mixed_precision='auto'%s: %s", f" of policy {policy!r}" if policy else "", trial)
        decisions[policy] = trial.is_mixed
    return apply_precisions(agent, decisions)


def apply_precisions(agent: Agent, precisions: Mapping[str, bool]) -> Agent:
    """Return a copy in which each policy with `mixed_precision="auto"` gets its value from `precisions`."""
    return replace(agent, algo_factory=with_precisions(agent.algo_factory, precisions))


def _num_agents(agent: Agent, policy: str) -> int:
    """Return the number of agents that a policy controls in each environment."""
    return len(agent.algo_factory.options.agents[policy]) if policy else 1


def batch_shape(algorithm: AlgorithmFactory, actor: ActorFactory, storage: StorageFactory, columns: int,
                collection: Collection) -> BatchShape:
    """Return the shape of the batches from which gradients are computed.

    Args:
        algorithm: Factory of the algorithm.
        actor: Factory of the actor.
        storage: Factory of the storage.
        columns: Number of environments of a collection worker, times the number of agents that the policy controls.
        collection: Options of the collection of rollouts.
    """
    options, of_storage = algorithm.options, storage.options
    has_memory = bool(actor.cls.has_memory(actor.options))
    if provided_kind(storage).is_kept:
        length = getattr(of_storage, "length", None) or of_storage.rollout_size
        return BatchShape(options.mini_batch_size, getattr(of_storage, "burn_in", 0) + length if has_memory else 1)
    workers = min(collection.numbers()) if isinstance(collection, SynchronousCollection) else 1
    steps = collection.train_batch_size or of_storage.size * columns * workers
    parts = -(-steps // options.mini_batch_size) if options.mini_batch_size else options.num_mini_batch
    size = -(-steps // parts)
    size = min(size, getattr(collection, "microbatch_size", None) or size)
    length = min(size, getattr(of_storage, "sequence_length", None) or of_storage.size) if has_memory else 1
    return BatchShape(size // length, length)
