"""Check the factories of an agent against each other and against the settings."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from gymnasium.spaces import Box
from torch import nn

from pytorchrl.agent.actors.on_policy_actor import OnPolicyActor
from pytorchrl.agent.algorithms.base import Algorithm
from pytorchrl.agent.algorithms.compiled import MEMORY_NEEDS_GPU
from pytorchrl.agent.algorithms.corrections import CORRECTIONS
from pytorchrl.agent.algorithms.precision import policies_of
from pytorchrl.agent.data import DataKind
from pytorchrl.agent.env import VecEnv
from pytorchrl.agent.env.common import CommonEnvOptions
from pytorchrl.agent.env.single import GivenEnv
from pytorchrl.agent.env.tokens import TokenEnv
from pytorchrl.agent.factories import Agent
from pytorchrl.agent.fit import check_fit, learned_kind, provided_kind
from pytorchrl.agent.options import Factory, PartFactory
from pytorchrl.agent.storages.base import Storage
from pytorchrl.agent.storages.goals import goal_problems
from pytorchrl.errors import FactoryError, FactorySerializationError, Problem, SpaceError
from pytorchrl.scheme.devices import CPU
from pytorchrl.scheme.gradients.dataset_source import dataset_of, dataset_problems
from pytorchrl.scheme.options.base import as_keywords
from pytorchrl.scheme.options.collection import AsynchronousCollection, ReplayCollection, SynchronousCollection
from pytorchrl.scheme.options.replay import SPLITS_SEQUENCES
from pytorchrl.scheme.options.settings import Settings
from pytorchrl.scheme.replay.storage_options import kind_of, needs_order
from pytorchrl.support.problems import problems_in
from pytorchrl.support.untyped import UserPart

# In units of the standard deviation of the first actions: the distance from 0 of bounds that 97.5 % of these actions do
# not reach, and the width of bounds of which they explore only a hundredth.
_FARTHEST, _WIDEST = 1.96, 400.0
# A longer queue causes a warning, in train batches. PPO on CartPole-v1 learned less with 4 than with 1 or 2.
_LONGEST_QUEUE = 4
_LARGE_BYTES = 10 * 2**20
_LARGEST_BYTES = 512 * 2**20
# Smallest major compute capability of GPUs that multiply bfloat16 matrices in hardware.
_BFLOAT16_CAPABILITY = 8


def factory_problems(agent: Agent) -> list[Problem]:
    """Return a problem for each part of an agent that is not a factory of the right kind."""
    kinds: dict[str, tuple[type, str]] = {
        "algo_factory": (Algorithm, "PPO"), "actor_factory": (nn.Module, "OnPolicyActor"),
        "storage_factory": (Storage, "GAEBuffer"), "train_envs_factory": (VecEnv, "VecEnv"),
        "test_envs_factory": (VecEnv, "VecEnv")}
    problems = []
    for name, part in agent.as_dict().items():
        kind, example = kinds[name]
        if name == "test_envs_factory" and part is None:
            continue
        if not isinstance(part, Factory) or not issubclass(part.cls, kind):
            problems.append(Problem(
                f"{name} must be a factory such as {example}.create_factory(...), got {part!r}", error=FactoryError))
    return problems


def agent_problems(agent: Agent, settings: Settings) -> list[Problem]:
    """Return the contradictions between the parts of an agent, and between the parts and the settings."""
    if policies := list(_policy_problems(agent, settings)):
        return policies
    fit = problems_in(check_fit, agent.algo_factory, agent.actor_factory, agent.storage_factory,
                      agent.train_envs_factory.num_envs)
    of_data = () if fit else dataset_problems(agent, settings.collection)
    envs = agent.train_envs_factory.options
    of_envs = envs.training_problems() if isinstance(envs, CommonEnvOptions) else ()
    return [*fit, *of_data, *of_envs, *_given_env_problems(agent, settings), *_space_problems(agent),
            *_context_problems(agent), *_sequence_problems(agent, settings), *_kept_problems(agent, settings),
            *_batch_problems(agent, settings), *_correction_problems(agent, settings),
            *_memory_problems(agent, settings),
            *_inference_problems(agent, settings), *_pickle_problems(agent, settings),
            *goal_problems(agent.storage_factory, agent.train_envs_factory)]


def _given_env_problems(agent: Agent, settings: Settings) -> Iterator[Problem]:
    """Refuse several uses of an environment that is given as an object."""
    train, test = (getattr(envs, "options", None) for envs in (agent.train_envs_factory, agent.test_envs_factory))
    given = getattr(train, "env_fn", None)
    if not isinstance(given, GivenEnv):
        return
    if settings.has_remote_workers:
        yield Problem("several workers or processes cannot share an environment that is given as an object",
                      given.remedy, ("num_col_workers", "num_grad_workers"))
    tested = getattr(test, "env_fn", None)
    if isinstance(tested, GivenEnv) and tested.env is given.env:
        yield Problem("training and evaluation cannot share an environment that is given as an object", given.remedy,
                      ("test_envs_factory",))


def agent_warnings(agent: Agent, settings: Settings) -> list[str]:
    """Return a warning for each option or factory of the agent that makes training slow, or unlikely to succeed."""
    sizes = {name: _pickled_bytes(name, factory) for name, factory in _sent(agent, settings).items()}
    of_actions = _action_warnings(agent) if dataset_of(settings.collection) is None else []  # data show good actions
    return _lag_warnings(agent, settings) + _precision_warnings(agent, settings) + of_actions + [
        f"{name} is {size / 2**20:.0f} MB when pickled, and is sent to every worker; load large data inside the "
        "function that workers call" for name, size in sizes.items() if size > _LARGE_BYTES]


def _policy_problems(agent: Agent, settings: Settings) -> Iterator[Problem]:
    """Yield a problem unless the algorithm, actor, storage and training environments have the same policies.

    If there are several policies and several replay shards, also refuse `weight_norm="buffer"`, because this option
    makes importance weights depend on the priorities in all shards.
    """
    names = ("algo_factory", "actor_factory", "storage_factory")
    policies = {name: tuple(getattr(getattr(agent, name).options, "policies", ())) for name in names}
    policies["train_envs_factory"] = tuple(getattr(agent.train_envs_factory.options, "agents", ()))
    if len(set(policies.values())) > 1:
        shown = ", ".join(f"{name} {list(own) if own else 'none'}" for name, own in policies.items())
        yield Problem(f"all parts must have the same policies, got {shown}", "make them with multi_agent(...)")
    of_policies = getattr(agent.storage_factory.options, "policies", {})
    if settings.num_replay_workers > 1 and any(
            getattr(factory.options, "weight_norm", None) == "buffer" for factory in of_policies.values()):
        yield Problem("weight_norm='buffer' with several policies needs a single replay shard, because it depends on "
                      "all priorities in the replay", "give num_replay_workers=1 or weight_norm='batch'",
                      ("weight_norm", "num_replay_workers"))


def _context_problems(agent: Agent) -> Iterator[Problem]:
    """Refuse a decoder whose context is shorter than the sequences of the environments."""
    envs, context = agent.train_envs_factory.options, getattr(agent.actor_factory.options, "context", None)
    if isinstance(envs, TokenEnv.Options) and context is not None and context < (needed := envs.needed_context()):
        yield Problem(f"context={context} is smaller than the {needed} tokens of the longest prompt and its answer",
                      f"give context={needed}", ("context",))


def _space_problems(agent: Agent) -> Iterator[Problem]:
    """Yield a problem unless the actor and the test environments have the training environments' spaces."""
    train, test = agent.train_envs_factory, agent.test_envs_factory
    for name in ("observation_space", "action_space"):
        of_actor, of_envs = getattr(agent.actor_factory.options, name, None), getattr(train, name)
        if of_actor is not None and _layout(of_actor) != _layout(of_envs):
            yield Problem(f"actor_factory was made for {name} {of_actor}, but train_envs_factory has {of_envs}",
                          f"create the actor with the {name} of the environments", (name,), SpaceError)
        if test is not None and getattr(test, name) != of_envs:
            yield Problem(f"{name} differs: training environments have {of_envs}, test environments "
                          f"{getattr(test, name)}", "give environments with equal spaces", (name,), SpaceError)


def _layout(space: object) -> object:
    if isinstance(space, Mapping):
        return {column: _layout(part) for column, part in space.items()}
    return type(space), getattr(space, "shape", None), str(getattr(space, "n", None)), str(getattr(space, "nvec", None))


def _sequence_problems(agent: Agent, settings: Settings) -> Iterator[Problem]:
    """Refuse a replay buffer that is too small for a sequence, or a `routing` that splits sequences over shards.

    With `relabel`, episodes must not be split, either.
    """
    storage, collection = agent.storage_factory, settings.collection
    if not needs_order(storage):
        return
    if kind_of(storage) == "sequence":
        cls: type[UserPart] = storage.cls  # a storage of sequences has more members than `Storage`
        num_replay_workers = settings.num_replay_workers or 1
        sources = -(-collection.num_workers // num_replay_workers)
        yield from problems_in(cls.check_size, storage.options, agent.train_envs_factory.num_envs, sources,
                               storage.options.size // num_replay_workers)
    if isinstance(collection, ReplayCollection) and collection.routing in SPLITS_SEQUENCES:
        what = "sequences" if kind_of(storage) == "sequence" else "episodes (relabel)"
        yield Problem(f"routing={collection.routing!r} would split {what} that span several rollouts over different "
                      "shards", "leave routing out", ("routing",))


def _kept_problems(agent: Agent, settings: Settings) -> Iterator[Problem]:
    """If the storage is a replay buffer, refuse options for data that are discarded after use, such as `num_passes`."""
    is_kept, collection = provided_kind(agent.storage_factory).is_kept, settings.collection
    if not is_kept or isinstance(collection, ReplayCollection):
        return
    keeper = agent.storage_factory.cls.__name__
    names = {"minibatch_buffer_size", "num_passes", "ramp", "buffer", "replay_proportion", "microbatch_size"}
    for name in collection.changed():
        if name in names:
            yield Problem(f"{name}={getattr(collection, name)} is for rollouts that are used and discarded, but "
                          f"{keeper} stores them and samples from them", f"leave {name} out", (name,))


def _correction_problems(agent: Agent, settings: Settings) -> Iterator[Problem]:
    """Refuse to split minibatches into microbatches if a correction compares all their steps."""
    if getattr(settings.collection, "microbatch_size", None) is None:
        return
    policies = policies_of(agent.algo_factory).values()
    for name in dict.fromkeys(getattr(policy.options, "correction", None) for policy in policies):
        if name is not None and CORRECTIONS[name].of_batch:
            yield Problem(f"correction={name!r} compares all steps of a minibatch, which microbatch_size would split",
                          "leave microbatch_size out", ("correction", "microbatch_size"))


def _memory_problems(agent: Agent, settings: Settings) -> Iterator[Problem]:
    """Refuse `compile=True` for an actor with memory whose gradients are computed on the CPU."""
    device = settings.process.device
    if settings.has_parallel_gradients:
        device = settings.gradients.grad_device or device
    actors = policies_of(agent.actor_factory)
    compiled = [actors[policy] for policy, own in policies_of(agent.algo_factory).items()
                if getattr(own.options, "is_compiled", False)]
    if (device or CPU) == CPU and any(
            hasattr(actor.cls, "has_memory") and actor.cls.has_memory(actor.options) for actor in compiled):
        yield MEMORY_NEEDS_GPU


def _inference_problems(agent: Agent, settings: Settings) -> Iterator[Problem]:
    """With central inference, refuse exploration that differs between workers or continues in each environment."""
    if not settings.collection.infers_centrally:
        return
    if getattr(agent.storage_factory.options, "cancels_unfinished", None):
        yield Problem("cancels_unfinished=True contradicts inference='central', where the environments cannot start "
                      "again when a rollout is full", "leave cancels_unfinished out",
                      ("cancels_unfinished", "inference"))
    for factory in (agent.algo_factory, *getattr(agent.algo_factory.options, "policies", {}).values()):
        if getattr(factory.options, "epsilon_per_worker", None):
            yield Problem("epsilon_per_worker=True contradicts inference='central', where one actor with one epsilon "
                          "acts for all workers", "give epsilon_per_worker=False", ("epsilon_per_worker", "inference"))
        if getattr(factory.options, "noise", None) == "ou":
            yield Problem("noise='ou' contradicts inference='central', where the environments in a batch change, "
                          "although the noise of each environment must continue", "give noise='gaussian'",
                          ("noise", "inference"))


def _action_warnings(agent: Agent) -> list[str]:
    """Return a warning for each policy whose first actions, of mean 0, are nearly all clipped, or nearly all alike."""
    found = []
    actors = getattr(agent.actor_factory.options, "policies", None) or {"": agent.actor_factory}
    for policy, factory in actors.items():
        options = factory.options
        if not issubclass(factory.cls, OnPolicyActor) or not isinstance(space := options.action_space, Box):
            continue
        std = math.exp(options.log_std_init)
        low, high = (bound.astype(np.float64).reshape(-1) / std for bound in (space.low, space.high))
        is_clipped = (low > _FARTHEST) | (high < -_FARTHEST) | (high - low < 1 / _WIDEST)
        is_wide = np.isfinite(high - low) & (high - low > _WIDEST)
        if (bad := np.flatnonzero(is_clipped | is_wide)).size:
            where, first = f"policy {policy!r}: " if policy else "", bad[0]
            found.append(
                f"{where}actions {bad[:8].tolist()} have bounds such as {space.low.reshape(-1)[first]:g} to "
                f"{space.high.reshape(-1)[first]:g}, but the first policy draws them with mean 0 and standard "
                f"deviation {std:g}, so nearly all are {'clipped' if is_clipped[first] else 'alike'}; scale them with "
                "wrappers=(functools.partial(gymnasium.wrappers.RescaleAction, min_action=-1.0, max_action=1.0),)")
    return found


def _lag_warnings(agent: Agent, settings: Settings) -> list[str]:
    """Warn of a long queue if the algorithm does not correct for the age of the data that wait in it."""
    collection, name = settings.collection, agent.algo_factory.cls.__name__
    if (not isinstance(collection, AsynchronousCollection) or collection.max_policy_lag is not None
            or (collection.queue_size or 0) <= _LONGEST_QUEUE or collection.buffer == "circular"
            or learned_kind(agent.algo_factory) is not DataKind.ROLLOUTS):
        return []
    return [f"queue_size={collection.queue_size} lets rollouts wait while the learner uses up to "
            f"{collection.queue_size} train batches, and {name} does not correct for their age, so it learns less; "
            "leave queue_size out, or use APPO or IMPALA, which correct for it"]


def _precision_warnings(agent: Agent, settings: Settings) -> list[str]:
    mixed = getattr(agent.algo_factory.options, "mixed_precision", None)
    device = settings.process.device or "cpu"
    if mixed is True and device == "cpu" and torch.backends.cpu.get_cpu_capability() == "AVX2":
        return ["mixed_precision=True is slow on this processor: without AVX-512, it computes bfloat16 several times "
                "slower than float32; leave it out"]
    if mixed is True and device != "cpu" and torch.cuda.get_device_capability(device)[0] < _BFLOAT16_CAPABILITY:
        return [f"mixed_precision=True is slow on {device}: a GPU with a compute capability below "
                f"{_BFLOAT16_CAPABILITY}.0 only emulates bfloat16; leave it out"]
    return []


def _batch_problems(agent: Agent, settings: Settings) -> Iterator[Problem]:
    """Check `num_mini_batch`, `mini_batch_size` and `replay_slots` against the number of steps in a train batch.

    Minibatches of a `GroupBuffer` consist of whole episodes.
    """
    storage, collection = agent.storage_factory, settings.collection
    size = getattr(storage.options, "size", None)
    if provided_kind(storage).is_kept or size is None:
        return
    workers = min(collection.numbers()) if isinstance(collection, SynchronousCollection) else 1
    factors = {"collection workers": workers}
    if provided_kind(storage) is DataKind.GROUPS:
        factors |= {"groups": size, "episodes": getattr(storage.options, "group_size", None) or 1}
    else:
        factors |= {"environments": agent.train_envs_factory.num_envs, "steps": size}
    batch, wanted = math.prod(factors.values()), collection.train_batch_size or 0
    options = agent.algo_factory.options
    name = "num_mini_batch" if getattr(options, "mini_batch_size", None) is None else "mini_batch_size"
    if (parts := getattr(options, name, 1)) > max(batch, wanted):
        product = " x ".join(f"{number} {factor}" for factor, number in factors.items())
        yield Problem(f"{name} must not exceed the batch: batch {batch} = {product}, {name} {parts}",
                      f"lower {name}, or raise one of the factors",
                      (name, "size", "vec_env_size", "num_col_workers", "train_batch_size"))
    slots = collection.replay_slots if isinstance(collection, AsynchronousCollection) else 0
    if slots and slots * batch <= (wanted or batch):
        yield Problem(f"replay_slots {slots} x rollout {batch} = {slots * batch} must exceed train_batch_size "
                      f"{wanted or batch}", "raise replay_slots, or lower train_batch_size",
                      ("replay_slots", "train_batch_size", "size", "vec_env_size"))


def _sent(agent: Agent, settings: Settings) -> dict[str, PartFactory[object]]:
    """Return the factories that are sent to other processes, by name."""
    if not (settings.has_processes and (settings.has_parallel_collection or settings.has_parallel_gradients)):
        return {}
    return {name: factory for name, factory in agent.as_dict().items() if factory is not None}


def _pickle_problems(agent: Agent, settings: Settings) -> Iterator[Problem]:
    for name, factory in _sent(agent, settings).items():
        yield from problems_in(_pickled_bytes, name, factory)


def _pickled_bytes(name: str, factory: PartFactory[object]) -> int:
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
