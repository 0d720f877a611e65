"""Compose an agent with several policies from the parts of each policy."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

from pytorchrl.agent.actors.base import Actor
from pytorchrl.agent.algorithms.base import Algorithm
from pytorchrl.agent.factories import ActorFactory, AlgorithmFactory, StorageFactory
from pytorchrl.agent.fit import check_policies, provided_kind
from pytorchrl.agent.multi.actor import MultiAgentActor
from pytorchrl.agent.multi.algorithm import MultiAgentAlgorithm
from pytorchrl.agent.multi.env import MultiAgentEnvFactory
from pytorchrl.agent.multi.replay import MultiAgentReplay
from pytorchrl.agent.multi.storage import MultiAgentStorage
from pytorchrl.agent.options import Factory
from pytorchrl.agent.storages.base import Storage
from pytorchrl.errors import ConfigError
from pytorchrl.support.tracebacks import brief_errors
from pytorchrl.support.untyped import DataOfAgent, UserPart

T = TypeVar("T")


@brief_errors
def multi_agent(
    envs: MultiAgentEnvFactory, algorithms: Factory[Algorithm] | Mapping[str, Factory[Algorithm]],
    actors: Callable[..., Factory[Actor]] | Factory[Actor] | Mapping[str, Factory[Actor]],
    storages: Factory[Storage] | Mapping[str, Factory[Storage]], *,
    trainable: Collection[str] | None = None, checkpoint: str | None = None,
) -> tuple[AlgorithmFactory, ActorFactory, StorageFactory]:
    """Return factories of algorithm, actor and storage for several policies, in the order of `Scheme`'s arguments.

        envs = MultiAgentVecEnv.create_factory(
            "mpe2.simple_speaker_listener_v4", vec_env_size=8, policy_of=lambda agent: agent)
        agent = multi_agent(
            envs, PPO.create_factory(), OnPolicyActor.create_factory, GAEBuffer.create_factory(size=128))
        scheme = Scheme(*agent, envs)

    Args:
        envs: A factory from `MultiAgentVecEnv.create_factory`.
        algorithms: Mapping from policies to factories, or one factory for all; policies never share parameters.
        actors: Mapping from policies to factories, one factory for all, or a function that returns a factory for an
            observation space and an action space.
        storages: Mapping from policies to factories, or one factory for all. Their `size` is a number of env steps.
        trainable: Policies that learn; None for all. The parameter `policy/trainable` can change during training.
        checkpoint: Saved model of all policies, from which the weights and normalizers are initialized.

    Raises:
        ConfigError: A policy lacks a factory, a factory is for an unknown policy, or the factories do not fit together.
    """
    if not isinstance(envs, MultiAgentEnvFactory):
        raise ConfigError(f"envs must be a factory such as MultiAgentVecEnv.create_factory(...), got {envs!r}")
    if callable(actors) and not isinstance(actors, (Factory, Mapping)):
        make = actors
        observation_spaces: Mapping[str, object] = envs.observation_space
        action_spaces: DataOfAgent = envs.action_space  # a mapping from policy to space, unlike in other factories
        actors = {policy: make(observation_spaces[policy], action_spaces[policy]) for policy in envs.policies}
    of_actor = _by_policy("actors", actors, envs.policies)
    of_algorithm = _by_policy("algorithms", algorithms, envs.policies)
    of_storage = _by_policy("storages", storages, envs.policies)
    check_policies(of_algorithm, of_actor, of_storage)
    keeps = any(provided_kind(factory).is_kept for factory in of_storage.values())
    storage = (MultiAgentReplay if keeps else MultiAgentStorage).create_factory(of_storage, envs.agents)
    algorithm = MultiAgentAlgorithm.create_factory(
        of_algorithm, envs.agents, None if trainable is None else tuple(trainable))
    # A `MultiAgentActor` has the members of `Actor` that workers use, although it does not derive from `Actor`.
    actor: Factory[UserPart] = MultiAgentActor.create_factory(of_actor, envs.agents, checkpoint)
    return algorithm, actor, storage


def _by_policy(
    name: str, parts: Factory[T] | Mapping[str, Factory[T]] | Callable[..., Factory[T]], policies: tuple[str, ...],
) -> dict[str, Factory[T]]:
    """Return the factory of each policy; if `parts` is one factory, all policies use it."""
    if isinstance(parts, Factory):
        parts = dict.fromkeys(policies, parts)
    if (not isinstance(parts, Mapping) or set(parts) != set(policies)
            or not all(isinstance(part, Factory) for part in parts.values())):
        raise ConfigError(f"{name} must be a factory for each of the policies {list(policies)}, got {parts!r}")
    return {policy: parts[policy] for policy in policies}
