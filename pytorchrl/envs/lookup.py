"""Find the suite, such as Atari, to which an environment id belongs, and return a factory of the environments."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Mapping

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec

from pytorchrl.agent.env.aliases import EnvFn
from pytorchrl.agent.env.tokens import TokenEnv, TokenTask
from pytorchrl.agent.env.vec_env import EnvFactory, VecEnv
from pytorchrl.agent.multi.building import PolicyOf
from pytorchrl.agent.multi.env import MultiAgentVecEnv
from pytorchrl.envs import atari, box2d, classic, mujoco, tasks  # noqa: F401 - importing a suite registers it
from pytorchrl.envs.suites import VEC_ENV_SIZE, suite_of
from pytorchrl.errors import ConfigError
from pytorchrl.support.untyped import OptionValue


def make_factory(
    env_id: EnvFn, vec_env_size: int = VEC_ENV_SIZE, *, policy_of: PolicyOf = None, **options: OptionValue,
) -> EnvFactory:
    """Return the factory for an id, with the settings of the id's suite, such as Atari's preprocessing for `ALE/...`.

    Args:
        env_id: A Gymnasium id, or anything else that `VecEnv.create_factory` accepts; for several agents, the name of a
            module with `parallel_env` (PettingZoo), such as "mpe2.simple_spread_v3".
        vec_env_size: Number of environments.
        policy_of: The policy that controls each agent; see `MultiAgentVecEnv.create_factory`. If `env_id` is a
            function, a value other than None declares that its environments have several agents.
        options: Further options. If the id belongs to a suite, the suite's own function (such as `atari_factory`)
            receives them; otherwise, `VecEnv.create_factory` or `MultiAgentVecEnv.create_factory` does.

    Raises:
        ConfigError: The id is unknown (the message names the closest id), an option is invalid, or a package is missing
            (the message names the extra).
    """
    if isinstance(env_id, type) and issubclass(env_id, TokenTask):
        return TokenEnv.create_factory(env_id, vec_env_size=vec_env_size, **options)
    found = suite_of(env_id)
    if isinstance(env_id, str) and found is None and names_module(env_id):
        return _of_several_agents(env_id, vec_env_size, policy_of, options)
    name = env_id.id if isinstance(env_id, EnvSpec) else env_id
    if isinstance(name, str):
        if policy_of is not None:
            raise ConfigError(
                f"policy_of must be left out for {name!r}, whose environments have one agent, got {policy_of!r}; name "
                "environments of several agents by their module, such as 'mpe2.simple_spread_v3'")
        if found is not None:
            return found.make_factory(env_id, vec_env_size, **options)
    if policy_of is not None:
        return _of_several_agents(env_id, vec_env_size, policy_of, options)
    return VecEnv.create_factory(env_id, vec_env_size=vec_env_size, **options)


def _of_several_agents(
    env_fn: EnvFn, vec_env_size: int, policy_of: PolicyOf, options: Mapping[str, OptionValue],
) -> EnvFactory:
    """Return a factory of multi-agent environments."""
    known = {field.name for field in dataclasses.fields(MultiAgentVecEnv.Options)}
    if others := sorted(set(options) - known):
        raise ConfigError(f"environments of several agents have no option {', '.join(others)}; "
                          "use only options of MultiAgentVecEnv")
    return MultiAgentVecEnv.create_factory(env_fn, vec_env_size=vec_env_size, policy_of=policy_of, **options)


def names_module(name: str) -> bool:
    """Return whether `name` is the name of a module, such as "mpe2.simple_spread_v3", and not an id of Gymnasium."""
    if name in gym.registry or not all(part.isidentifier() for part in name.split(".")):
        return False
    try:
        return "." in name or importlib.util.find_spec(name) is not None
    except ValueError:  # raised for a loaded module without a spec, such as __main__
        return True
