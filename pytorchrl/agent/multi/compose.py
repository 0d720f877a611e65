"""From the parts of each policy to those of an agent of several policies."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from pytorchrl.agent.fit import check_policies
from pytorchrl.agent.multi.actor import MultiAgentActor
from pytorchrl.agent.multi.algorithm import MultiAgentAlgorithm
from pytorchrl.agent.multi.env import MultiAgentEnvFactory
from pytorchrl.agent.multi.storage import MultiAgentStorage
from pytorchrl.agent.options import Factory
from pytorchrl.errors import ConfigError
from pytorchrl.tracebacks import brief_errors


@brief_errors
def multi_agent(
    envs: Any, algorithms: Factory[Any] | Mapping[str, Factory[Any]],
    actors: Callable[..., Factory[Any]] | Mapping[str, Factory[Any]], storages: Factory[Any] | Mapping[str, Factory[Any]], *,
    trainable: Collection[str] | None = None, checkpoint: str | None = None,
) -> tuple[Factory[Any], Factory[Any], Factory[Any]]:
    """Factories of algorithm, actor and storage for environments of several agents, in the order in which `Scheme` takes them.

        envs = MultiAgentVecEnv.create_factory("mpe2.simple_speaker_listener_v4", vec_env_size=8, policy_of=lambda agent: agent)
        agent = multi_agent(envs, PPO.create_factory(), OnPolicyActor.create_factory, GAEBuffer.create_factory(size=128))
        scheme = Scheme(*agent, envs)

    Args:
        envs: A factory that `MultiAgentVecEnv.create_factory` made.
        algorithms: Policy -> factory, or one for all. Policies share no parameters in any case.
        actors: Policy -> factory; or a function that makes one of an observation space and an action space.
        storages: Policy -> factory, or one for all. Sizes count env steps.
        trainable: Policies that learn; None: all. `policy/trainable` can be updated while training.
        checkpoint: Saved model of all policies to start from.

    Raises:
        ConfigError: A policy has no part, or one too many, or the parts do not go together.
    """
    if not isinstance(envs, MultiAgentEnvFactory):
        raise ConfigError(f"envs must be a factory such as MultiAgentVecEnv.create_factory(...), got {envs!r}")
    if callable(actors) and not isinstance(actors, (Factory, Mapping)):
        make = actors
        observation_spaces: Any = envs.observation_space
        action_spaces: Any = envs.action_space
        actors = {policy: make(observation_spaces[policy], action_spaces[policy]) for policy in envs.policies}
    of_actor = _by_policy("actors", actors, envs.policies)
    of_algorithm = _by_policy("algorithms", algorithms, envs.policies)
    of_storage = _by_policy("storages", storages, envs.policies)
    check_policies(of_algorithm, of_actor, of_storage)
    storage = MultiAgentStorage.create_factory(of_storage, envs.agents)
    algorithm = MultiAgentAlgorithm.create_factory(of_algorithm, envs.agents, None if trainable is None else tuple(trainable))
    return algorithm, MultiAgentActor.create_factory(of_actor, envs.agents, checkpoint), storage


def _by_policy(name: str, parts: Any, policies: tuple[str, ...]) -> dict[str, Factory[Any]]:
    if isinstance(parts, Factory):
        parts = dict.fromkeys(policies, parts)
    if not isinstance(parts, Mapping) or set(parts) != set(policies) or not all(isinstance(part, Factory) for part in parts.values()):
        raise ConfigError(f"{name} must be a factory for each of the policies {list(policies)}, got {parts!r}")
    return {policy: parts[policy] for policy in policies}
