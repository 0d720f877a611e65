"""Check the factories of an agent against each other and against the settings."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from pytorchrl.agent.algorithms.base import Algorithm
from pytorchrl.agent.env import VecEnv
from pytorchrl.agent.factories import Agent
from pytorchrl.agent.fit import check_fit, provided_kind
from pytorchrl.agent.options import Factory
from pytorchrl.agent.storages.base import Storage
from pytorchrl.errors import ConfigError, FactoryError, FactorySerializationError, SpaceError
from pytorchrl.scheme.options.base import as_keywords
from pytorchrl.scheme.options.collection import AsynchronousCollection, ReplayCollection, SynchronousCollection
from pytorchrl.scheme.options.replay import SPLITS_SEQUENCES
from pytorchrl.scheme.options.settings import Settings
from pytorchrl.scheme.replay.storage_options import kind_of
from pytorchrl.support.untyped import UserPart

_LARGE_BYTES = 10 * 2**20
_LARGEST_BYTES = 512 * 2**20
# Smallest major compute capability of GPUs that multiply bfloat16 matrices in hardware.
_BFLOAT16_CAPABILITY = 8


def check_parts(agent: Agent, settings: Settings) -> list[str]:
    """Check that the parts of an agent fit together and match the settings.

    Returns:
        The warning messages.

    Raises:
        FactoryError: A part is not a factory of the right kind.
        FactorySerializationError: A part cannot be sent to remote workers.
        SpaceError: The spaces of the actor or of the test environments differ from those of the training environments.
        ConfigError: Parts contradict each other or the settings.
    """
    kinds: dict[str, tuple[type, str]] = {
        "algo_factory": (Algorithm, "PPO"), "actor_factory": (nn.Module, "OnPolicyActor"),
        "storage_factory": (Storage, "GAEBuffer"), "train_envs_factory": (VecEnv, "VecEnv"),
        "test_envs_factory": (VecEnv, "VecEnv")}
    factories: dict[str, Factory[object]] = {}
    for name, part in agent.as_dict().items():
        if name == "test_envs_factory" and part is None:
            continue
        kind, example = kinds[name]
        if not isinstance(part, Factory) or not issubclass(part.cls, kind):
            raise FactoryError(f"{name} must be a factory such as {example}.create_factory(...), got {part!r}")
        factories[name] = part
    _check_policies(agent, settings)
    check_fit(agent.algo_factory, agent.actor_factory, agent.storage_factory, agent.train_envs_factory.num_envs)
    _check_spaces(agent)
    _check_sequences(agent, settings)
    _check_kept(agent, settings)
    _check_batch(agent, settings)
    _check_inference(agent, settings)
    warnings = _precision_warnings(agent, settings)
    if settings.has_processes and (settings.has_parallel_collection or settings.has_parallel_gradients):
        for name, factory in factories.items():
            size = _pickled_bytes(name, factory)
            if size > _LARGE_BYTES:
                warnings.append(f"{name} is {size / 2**20:.0f} MB when pickled, and is sent to every worker; load "
                                "large data inside the function that workers call")
    return warnings


def _check_policies(agent: Agent, settings: Settings) -> None:
    """Raise `ConfigError` unless the algorithm, actor, storage and training environments have the same policies.

    If there are several policies and several replay shards, also refuse `weight_norm="buffer"`, because this option
    makes importance weights depend on the priorities in all shards.
    """
    names = ("algo_factory", "actor_factory", "storage_factory")
    policies = {name: tuple(getattr(getattr(agent, name).options, "policies", ())) for name in names}
    policies["train_envs_factory"] = tuple(getattr(agent.train_envs_factory.options, "agents", ()))
    if len(set(policies.values())) > 1:
        shown = ", ".join(f"{name} {list(own) if own else 'none'}" for name, own in policies.items())
        raise ConfigError(f"all parts must have the same policies, got {shown}; make them with multi_agent(...)")
    of_policies = getattr(agent.storage_factory.options, "policies", {})
    if settings.num_shards > 1 and any(
            getattr(factory.options, "weight_norm", None) == "buffer" for factory in of_policies.values()):
        raise ConfigError("weight_norm='buffer' with several policies needs a single replay shard, because it depends "
                          "on all priorities in the replay; give num_replay_workers=1 or weight_norm='batch'")


def _check_spaces(agent: Agent) -> None:
    """Raise `SpaceError` unless the actor and the test environments have the training environments' spaces."""
    train, test = agent.train_envs_factory, agent.test_envs_factory
    for name in ("observation_space", "action_space"):
        of_actor, of_envs = getattr(agent.actor_factory.options, name, None), getattr(train, name)
        if of_actor is not None and _layout(of_actor) != _layout(of_envs):
            raise SpaceError(f"actor_factory was made for {name} {of_actor}, but train_envs_factory has {of_envs}; "
                             f"create the actor with the {name} of the environments")
        if test is not None and getattr(test, name) != of_envs:
            raise SpaceError(f"{name} differs: training environments have {of_envs}, test environments "
                             f"{getattr(test, name)}")


def _layout(space: object) -> object:
    if isinstance(space, Mapping):
        return {column: _layout(part) for column, part in space.items()}
    return type(space), getattr(space, "shape", None), str(getattr(space, "n", None)), str(getattr(space, "nvec", None))


def _check_sequences(agent: Agent, settings: Settings) -> None:
    """Refuse a replay buffer that is too small for a sequence, or a `routing` that splits sequences over shards.

    Nothing is checked if each sequence of the storage lies within one rollout.
    """
    storage: Factory[UserPart] = agent.storage_factory
    if kind_of(storage) != "sequence":
        return
    num_shards = settings.num_shards or 1
    sources = -(-settings.collection.num_workers // num_shards)
    storage.cls.check_size(
        storage.options, agent.train_envs_factory.num_envs, sources, storage.options.size // num_shards)
    if isinstance(settings.collection, ReplayCollection) and settings.collection.routing in SPLITS_SEQUENCES:
        raise ConfigError(f"routing={settings.collection.routing!r} would split sequences that span several rollouts "
                          "over different shards; leave it out")


def _check_kept(agent: Agent, settings: Settings) -> None:
    """If the storage is a replay buffer, refuse options for data that are discarded after use, such as `num_passes`."""
    is_kept, collection = provided_kind(agent.storage_factory).is_kept, settings.collection
    if not is_kept or isinstance(collection, ReplayCollection):
        return
    keeper = agent.storage_factory.cls.__name__
    names = {"minibatch_buffer_size", "num_passes", "ramp", "buffer", "replay_proportion", "microbatch_size"}
    for name in collection.changed():
        if name in names:
            raise ConfigError(f"{name}={getattr(collection, name)} is for rollouts that are used and discarded; "
                              f"{keeper} stores them and samples from them, so leave {name} out")


def _check_inference(agent: Agent, settings: Settings) -> None:
    """With central inference, refuse exploration that differs between workers or continues in each environment."""
    if not settings.collection.infers_centrally:
        return
    for factory in (agent.algo_factory, *getattr(agent.algo_factory.options, "policies", {}).values()):
        if getattr(factory.options, "epsilon_per_worker", False):
            raise ConfigError("epsilon_per_worker=True contradicts inference='central', where one actor with one "
                              "epsilon acts for all workers; give epsilon_per_worker=False")
        if getattr(factory.options, "noise", None) == "ou":
            raise ConfigError("noise='ou' contradicts inference='central', where the environments in a batch change, "
                              "although the noise of each environment must continue; give noise='gaussian'")


def _precision_warnings(agent: Agent, settings: Settings) -> list[str]:
    mixed = getattr(agent.algo_factory.options, "mixed_precision", False)
    device = settings.process.device or "cpu"
    if mixed is True and device == "cpu" and torch.backends.cpu.get_cpu_capability() == "AVX2":
        return ["mixed_precision=True is slow on this processor: without AVX-512, it computes bfloat16 several times "
                "slower than float32; leave it out"]
    if mixed is True and device != "cpu" and torch.cuda.get_device_capability(device)[0] < _BFLOAT16_CAPABILITY:
        return [f"mixed_precision=True is slow on {device}: a GPU with a compute capability below "
                f"{_BFLOAT16_CAPABILITY}.0 only emulates bfloat16; leave it out"]
    return []


def _check_batch(agent: Agent, settings: Settings) -> None:
    """Check `num_mini_batch`, `mini_batch_size` and `replay_slots` against the number of steps in a train batch.

    Raises:
        ConfigError: `num_mini_batch` or `mini_batch_size` is larger than the number of steps in a train batch, or
            `replay_slots` rollouts together contain at most as many steps as one train batch.
    """
    storage, collection = agent.storage_factory, settings.collection
    size, num_envs = getattr(storage.options, "size", None), agent.train_envs_factory.num_envs
    if provided_kind(storage).is_kept or size is None:
        return
    workers = min(collection.numbers()) if isinstance(collection, SynchronousCollection) else 1
    batch, wanted = size * num_envs * workers, collection.train_batch_size or 0
    options = agent.algo_factory.options
    name = "num_mini_batch" if getattr(options, "mini_batch_size", None) is None else "mini_batch_size"
    if (parts := getattr(options, name, 1)) > max(batch, wanted):
        raise ConfigError(f"{name} must not exceed the batch: batch {batch} = {workers} collection workers "
                          f"x {num_envs} environments x {size} steps, {name} {parts}")
    slots = collection.replay_slots if isinstance(collection, AsynchronousCollection) else 0
    if slots and slots * batch <= (wanted or batch):
        raise ConfigError(f"replay_slots {slots} x rollout {batch} = {slots * batch} must exceed train_batch_size "
                          f"{wanted or batch}")


def _pickled_bytes(name: str, factory: Factory[object]) -> int:
    """Return the size of a pickled factory in bytes.

    Raises:
        FactorySerializationError: An option cannot be pickled (the message names it), or the factory is too large.
    """
    import cloudpickle

    try:
        size = len(cloudpickle.dumps(factory))
    except Exception as error:
        culprits = [option for option, value in as_keywords(factory.options).items() if not _can_be_pickled(value)]
        raise FactorySerializationError(
            f"{name} cannot be sent to a worker: {', '.join(culprits) or 'it'} cannot be pickled ({error}); "
            "create locks, open files and GPU tensors inside the function that workers call, not outside") from error
    if size > _LARGEST_BYTES:
        raise FactorySerializationError(f"{name} is {size / 2**20:.0f} MB when pickled, but at most "
                                        f"{_LARGEST_BYTES // 2**20} MB can be sent; load large data inside the "
                                        "function that workers call")
    return size


def _can_be_pickled(value: object) -> bool:
    import cloudpickle

    try:
        cloudpickle.dumps(value)
    except Exception:  # noqa: BLE001 - a user's class may raise anything when it is pickled
        return False
    return True
