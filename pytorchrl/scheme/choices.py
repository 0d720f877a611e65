"""Replace "auto" in the options `mixed_precision` and `compile` of each algorithm."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING

from pytorchrl.agent.algorithms.compile_rule import is_worth_compiling
from pytorchrl.agent.algorithms.precision import BatchShape, Choices, measure, policies_of, undecided, with_choices
from pytorchrl.agent.fit import provided_kind
from pytorchrl.scheme.devices import CPU, check_device
from pytorchrl.scheme.options.collection import Collection, SynchronousCollection
from pytorchrl.support.terminal import get_logger

if TYPE_CHECKING:
    from pytorchrl.agent.factories import ActorFactory, Agent, AlgorithmFactory, StorageFactory
    from pytorchrl.scheme.options.settings import Settings

logger = get_logger(__name__)


def decide_choices(agent: Agent, settings: Settings, target_steps: int) -> Agent:
    """Return the agent with each `mixed_precision="auto"` and `compile="auto"` replaced by True or False.

    The precision is measured: it is bfloat16 if that is faster by at least a tenth. Gradients in both precisions are
    timed in this process, on the device that computes the gradients during the run, and the times are logged. Whether
    to compile follows from a rule without measurements; see `compile_rule`.

    Args:
        agent: The agent.
        settings: Settings of the scheme.
        target_steps: Env steps of the whole experiment.

    Raises:
        DeviceError: This process cannot use the device.
    """
    precisions, compiled = dict[str, bool](), dict[str, bool]()
    device = settings.process.device
    if settings.has_parallel_gradients:
        device = settings.gradients.grad_device or device
    for policy in undecided(agent.algo_factory, "mixed_precision"):
        trial = measure(policies_of(agent.algo_factory)[policy], policies_of(agent.actor_factory)[policy],
                        _shape_of(agent, settings, policy),
                        check_device(device, name="the device on which mixed_precision='auto' measures"))
        logger.info("mixed_precision='auto'%s: %s", f" of policy {policy!r}" if policy else "", trial)
        precisions[policy] = trial.is_mixed
    for policy in undecided(agent.algo_factory, "compile"):
        # The costs of compilation were measured for one process that computes the gradients of one policy on a CPU.
        is_measured = not policy and not settings.has_parallel_gradients and device == CPU
        shape = functools.partial(_shape_of, agent, settings, policy)
        compiled[policy] = is_measured and is_worth_compiling(agent, shape, target_steps)
    return apply_choices(agent, {"mixed_precision": precisions, "compile": compiled})


def apply_choices(agent: Agent, choices: Choices) -> Agent:
    """Return a copy in which each option that is "auto" has its value in `choices`, if there is one."""
    return replace(agent, algo_factory=with_choices(agent.algo_factory, choices))


def _shape_of(agent: Agent, settings: Settings, policy: str) -> BatchShape:
    """Return the shape of the batches from which the gradients of a policy are computed."""
    return batch_shape(policies_of(agent.algo_factory)[policy], policies_of(agent.actor_factory)[policy],
                       policies_of(agent.storage_factory)[policy],
                       agent.train_envs_factory.num_envs * _num_agents(agent, policy), settings.collection)


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
