"""Finds the suite of an id."""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec

from pytorchrl.agent.env.vec_env import EnvFactory, VecEnv
from pytorchrl.agent.multi.env import MultiAgentVecEnv
from pytorchrl.envs import atari, box2d, mujoco  # noqa: F401 - importing a suite registers it
from pytorchrl.envs.suites import suite_of
from pytorchrl.errors import ConfigError


def make_factory(env_id: Any, vec_env_size: int = 8, *, policy_of: Any = None, **options: Any) -> EnvFactory:
    """The factory for an id, prepared as its suite needs: `ALE/...` ids get Atari's preprocessing.

    Args:
        env_id: A Gymnasium id, or anything else that `VecEnv.create_factory` takes; the name of a module with `parallel_env`
            (PettingZoo), such as "mpe2.simple_spread_v3", for an environment of several agents.
        vec_env_size: Number of environments.
        policy_of: Of several agents: as of `MultiAgentVecEnv.create_factory`. Where `env_id` is a function, anything but None
            says that its environments have several.
        options: Further arguments of the suite's function, of `VecEnv.create_factory` or of `MultiAgentVecEnv.create_factory`.

    Raises:
        ConfigError: An unknown id (names the nearest), a wrong option, or a missing package (names the extra).
    """
    found = suite_of(env_id)
    if isinstance(env_id, str) and found is None and names_module(env_id):
        return _of_several_agents(env_id, vec_env_size, policy_of, options)
    name = env_id.id if isinstance(env_id, EnvSpec) else env_id
    if isinstance(name, str):
        if policy_of is not None:
            raise ConfigError(f"policy_of must be left out for {name!r}, whose environments have one agent, got {policy_of!r}; those of "
                              "several are named by a module, such as 'mpe2.simple_spread_v3'")
        if found is not None:
            return found.make_factory(env_id, vec_env_size, **options)
    if policy_of is not None:
        return _of_several_agents(env_id, vec_env_size, policy_of, options)
    return VecEnv.create_factory(env_id, vec_env_size=vec_env_size, **options)


def _of_several_agents(env_fn: Any, vec_env_size: int, policy_of: Any, options: dict[str, Any]) -> EnvFactory:
    known = {field.name for field in dataclasses.fields(MultiAgentVecEnv.Options)}
    if others := sorted(set(options) - known):
        raise ConfigError(f"environments of several agents have no {', '.join(others)}; leave that out")
    return MultiAgentVecEnv.create_factory(env_fn, vec_env_size=vec_env_size, policy_of=policy_of, **options)


def names_module(name: str) -> bool:
    """Whether it is the name of a module, such as "mpe2.simple_spread_v3"; what Gymnasium knows by a name goes first."""
    if name in gym.registry or not all(part.isidentifier() for part in name.split(".")):
        return False
    try:
        return "." in name or importlib.util.find_spec(name) is not None
    except ValueError:  # it is loaded, and does not say from where, such as __main__
        return True
