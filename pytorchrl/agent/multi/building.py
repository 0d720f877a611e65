"""Build environments with several agents (PettingZoo's parallel API), and group their agents by policy."""

from __future__ import annotations

import copy
import difflib
import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from pytorchrl.agent.env.aliases import Action, AnySpace, EnvKwargs, Observation
from pytorchrl.agent.env.guard import describe
from pytorchrl.agent.env.single import TURN_BASED
from pytorchrl.agent.multi.data import SEPARATOR
from pytorchrl.errors import ConfigError, EnvError, install_hint
from pytorchrl.support.tracebacks import USER_ERRORS, reraise_of_signal

_SINGLE_POLICY, _OWN_POLICIES = "shared", "independent"
_METHODS = ("reset", "step", "observation_space", "action_space", "possible_agents")


class ParallelEnv(Protocol):
    """Environment with PettingZoo's parallel API; the keys of all mappings are agents."""

    possible_agents: Sequence[str]
    agents: Sequence[str]

    def observation_space(self, agent: str) -> AnySpace:
        """Return the observation space of an agent."""

    def action_space(self, agent: str) -> AnySpace:
        """Return the action space of an agent."""

    def reset(self, seed: int | None = None) -> tuple[Mapping[str, Observation], Mapping[str, object]]:
        """Start an episode; return observations and infos."""

    def step(self, actions: Mapping[str, Action]) -> tuple[
        Mapping[str, Observation], Mapping[str, float], Mapping[str, bool], Mapping[str, bool], Mapping[str, object],
    ]:
        """Take a step; return observations, rewards, terminations, truncations and infos."""

    def close(self) -> None:
        """Release all resources."""


PolicyOf = Callable[[str], str] | Mapping[str, str] | str | None
"""Function or mapping from agent to policy, or "independent", "shared" or None; None means "shared"."""


def build_parallel_env(
    env_fn: str | Callable[..., ParallelEnv], kwargs: EnvKwargs,
    wrappers: Sequence[Callable[[ParallelEnv], ParallelEnv]], where: str,
) -> ParallelEnv:
    """Build one environment with its wrappers and a copy of the keyword arguments.

    Args:
        env_fn: Function that builds the environment, or the name of a module with a function `parallel_env`.
        kwargs: Keyword arguments of the function.
        wrappers: Functions that take an environment and return a wrapped one, applied in order.
        where: Name of the worker and index of the environment, for error messages.

    Raises:
        ConfigError: The module cannot be imported, or its environment does not have the parallel API.
        EnvError: The constructor raised an exception.
    """
    make = _parallel_env_of(env_fn) if isinstance(env_fn, str) else env_fn
    try:
        env = make(**copy.deepcopy(kwargs))
        for wrapper in wrappers:
            env = wrapper(env)
    except USER_ERRORS as failure:
        reraise_of_signal(failure)
        raise EnvError(f"{where}: the constructor raised: {describe(failure)}") from failure
    if hasattr(env, "agent_iter"):
        raise ConfigError(f"{type(env).__name__} has PettingZoo's turn-based API; {TURN_BASED}")
    if lacking := [name for name in _METHODS if not hasattr(env, name)]:
        raise ConfigError(f"env_fn must return an environment of PettingZoo's parallel API, got {type(env).__name__} "
                          f"without {', '.join(lacking)}")
    return env


def _parallel_env_of(name: str) -> Callable[..., ParallelEnv]:
    """Return the function `parallel_env` of the module `name`."""
    try:
        module = importlib.import_module(name)
    except ImportError as failure:
        raise ConfigError(f"{name} cannot be imported ({failure}); {_import_hint(name, failure)}") from failure
    except USER_ERRORS as failure:
        reraise_of_signal(failure)
        raise EnvError(f"importing {name} raised: {describe(failure)}") from failure
    if not hasattr(module, "parallel_env"):
        if hasattr(module, "env"):
            raise ConfigError(f"{name} has no parallel_env, because it has PettingZoo's turn-based API; {TURN_BASED}")
        raise ConfigError(f"{name} has no parallel_env; use a module such as 'mpe2.simple_spread_v3', or a function")
    maker: Callable[..., ParallelEnv] = module.parallel_env
    return maker


def _import_hint(name: str, failure: ImportError) -> str:
    """Return the advice that an error message gives if the module `name` cannot be imported."""
    missing = failure.name if isinstance(failure, ModuleNotFoundError) else None
    package, _, module = name.rpartition(".")
    if missing is not None and not f"{name}.".startswith(f"{missing}."):
        return f"install the package that contains {missing}"
    if missing == name and package:  # the package is installed, but has no such module
        names = [info.name for info in pkgutil.iter_modules(getattr(importlib.import_module(package), "__path__", []))]
        if near := difflib.get_close_matches(module, names, n=1):
            return f"did you mean '{package}.{near[0]}'?"
    return f"for PettingZoo's environments: {install_hint('pettingzoo')}"


def agents_by_policy(agents: Sequence[str], policy_of: PolicyOf) -> dict[str, tuple[str, ...]]:
    """Return the agents of each policy.

    Args:
        agents: All agents of the environment.
        policy_of: Function or mapping from agent to policy; "shared" or None for one policy called "shared";
            "independent" for one policy per agent, named after the agent.

    Raises:
        ConfigError: There are no agents, an agent is not a string, or `policy_of` does not return a valid policy for
            each agent.
    """
    if not agents:
        raise ConfigError("the environment has no possible_agents")
    if others := [agent for agent in agents if not isinstance(agent, str)]:
        raise ConfigError(
            f"names of agents must be strings, got {others[0]!r} among possible_agents; a wrapper can rename them")
    name_of = _policy_function(policy_of, agents)
    found: dict[str, tuple[str, ...]] = {}
    for agent in agents:
        policy = name_of(agent)
        if not isinstance(policy, str) or not policy or SEPARATOR in policy:
            raise ConfigError(f"policy_of must map each of {list(agents)} to a name without {SEPARATOR!r}, "
                              f"got {policy!r} for {agent!r}")
        found[policy] = (*found.get(policy, ()), agent)
    return found


def _policy_function(policy_of: PolicyOf, agents: Sequence[str]) -> Callable[[str], object]:
    """Return `policy_of` as a function from agent to policy."""
    if policy_of in (None, _SINGLE_POLICY):
        return lambda _agent: _SINGLE_POLICY
    if policy_of == _OWN_POLICIES:
        return str
    if isinstance(policy_of, Mapping):
        if unknown := [agent for agent in policy_of if agent not in agents]:
            raise ConfigError(f"policy_of must map the agents {list(agents)}, got {unknown}")
        mapping = policy_of
        return lambda agent: mapping.get(agent, "")
    if not callable(policy_of):
        raise ConfigError(f"policy_of must be {_SINGLE_POLICY!r}, {_OWN_POLICIES!r}, a mapping from agent to policy or "
                          f"a function, got {policy_of!r}")
    return policy_of


def check_agent_spaces(env: ParallelEnv, agents: Mapping[str, tuple[str, ...]]) -> None:
    """Raise `ConfigError` unless all agents of each policy have the same spaces.

    Raises:
        EnvError: `observation_space` or `action_space` of the environment raised an exception.
    """
    for policy, own in agents.items():
        for name in ("observation_space", "action_space"):
            try:
                spaces = {agent: getattr(env, name)(agent) for agent in own}
            except USER_ERRORS as failure:
                reraise_of_signal(failure)
                raise EnvError(f"{name}(agent) of {type(env).__name__} raised: {describe(failure)}; it must return the "
                               f"gymnasium.Space of each of {list(own)}") from failure
            if any(space != spaces[own[0]] for space in spaces.values()):
                raise ConfigError(
                    f"agents of one policy must have the same {name}, but those of {policy!r} have {spaces}; assign "
                    f"different policies with policy_of ({_OWN_POLICIES!r}, or a mapping), or pad the spaces in a "
                    "wrapper")
