"""Compare the actions of an exported policy with those of the agent, on random observations and in played episodes.

B is the number of observations in a step. A policy with memory receives the steps in order.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from gymnasium import spaces

from pytorchrl.agent.acting import POLICY, Player
from pytorchrl.agent.data import PREVIOUS, Arrays, show_reward
from pytorchrl.agent.env import EnvFactory, VecEnv
from pytorchrl.agent.env.aliases import MASK_LEAF, AnySpace, Observation
from pytorchrl.agent.env.common import reward_function
from pytorchrl.agent.env.spaces import ObservationReader, Path, RawSpaces, part_at
from pytorchrl.agent.multi.data import MultiStep
from pytorchrl.agent.multi.env import MultiAgentVecEnv
from pytorchrl.agent.policy import Policy
from pytorchrl.export.formats import OpenPolicy
from pytorchrl.export.inputs import Inputs, mask_size, sample

_TOLERANCE = 1e-5
"""Allowed difference of continuous actions, relative to the largest action if that is above 1."""
_ROWS = 10
"""Number of sequences of random observations for a policy with memory."""


@dataclass(frozen=True)
class Observed:
    """One step: B observations, and the actions that the agent chose.

    Attributes:
        obs: Observations (B, ...) as the environment returns them.
        mask: (B, n) bool, if `info` contains masks; else None.
        first: (B,) bool, whether an observation is the first of its episode.
        action: (B, ...), the best actions of the agent, as the environment accepts them.
        reward: (B,), the rewards of these actions, if the policy's memory receives rewards as inputs; else None.
    """

    obs: Observation
    mask: np.ndarray | None
    first: np.ndarray
    action: np.ndarray
    reward: np.ndarray | None = None


@dataclass(frozen=True)
class PolicyComparison:
    """The result of comparing an exported policy with the agent.

    Attributes:
        num_observations: Number of compared observations.
        num_different: Number of observations with a different action.
        largest_difference: Largest absolute difference of actions.
    """

    num_observations: int
    num_different: int
    largest_difference: float


def compare(open_policy: OpenPolicy, policy: Policy, steps: list[Observed]) -> PolicyComparison:
    """Compare an exported policy's actions with those in `steps`.

    Integer actions must be equal. Float actions may differ by rounding errors.
    """
    names = list(policy.initial_memory(1))
    memory: Arrays = {}
    total, different, largest = 0, 0, 0.0
    for step in steps:
        count = len(step.first)
        if any(len(state) != count for state in memory.values()) or not memory:
            memory = {name: state.numpy() for name, state in policy.initial_memory(count).items()}
        memory = {name: np.where(step.first[:, None], np.float32(0), state) for name, state in memory.items()}
        action, *states = open_policy(Inputs(step.obs, memory, step.mask))
        memory = {name: np.array(state) for name, state in zip(names, states, strict=True)}
        if step.reward is not None:
            show_reward(memory, step.reward)
        errors = np.abs(action.astype(np.float64) - step.action).reshape(count, -1).max(axis=1)
        scale = max(1.0, float(np.abs(step.action).max())) if step.action.dtype.kind == "f" else 0.0
        total += count
        different += int(np.count_nonzero(~(errors <= _TOLERANCE * scale)))  # NaN counts as different
        largest = float(np.maximum(largest, errors.max()))
    return PolicyComparison(total, different, largest)


# Random observations


def random_steps(player: Player, spaces_: RawSpaces, count: int, seed: int) -> list[Observed]:
    """Draw `count` observations from the observation space; return them and the actions that the agent chooses.

    For a policy with memory, the observations form sequences, in which new episodes start at random steps.
    """
    rng = np.random.default_rng(seed)
    memory = player.initial_memory(count)
    rows = min(_ROWS, count) if memory else count
    memory = player.initial_memory(rows)
    steps = []
    for index in range(math.ceil(count / rows)):
        obs = sample(spaces_.observation, rows, int(rng.integers(2**31)))
        mask = _random_mask(player.reader, spaces_, rows, rng)
        if mask is not None and player.reader.mask_path is not None:
            part_at(obs, player.reader.mask_path[:-1])[MASK_LEAF] = mask.astype(
                part_at(spaces_.observation, player.reader.mask_path).dtype)
        first = rng.random(rows) < (0.1 if index else 1.0)
        chosen = player.choose(player.reader.read(obs), memory, first, mask)
        memory = chosen.rhs
        reward = rng.standard_normal(rows).astype(np.float32) if PREVIOUS in memory else None
        if reward is not None:
            show_reward(memory, reward)
        steps.append(Observed(obs, mask if spaces_.has_mask_in_info else None, first,
                              player.for_environment(chosen.clipped_action), reward))
    return steps


def _random_mask(
    reader: ObservationReader, spaces_: RawSpaces, rows: int, rng: np.random.Generator,
) -> np.ndarray | None:
    """Return masks (rows, n) that allow at least one action, or None if the environment has no masks."""
    if reader.mask_path is not None:
        size = math.prod(part_at(spaces_.observation, reader.mask_path).shape)
    else:
        size = mask_size(spaces_.action) if spaces_.has_mask_in_info else 0
    if not size:
        return None
    if not isinstance(spaces_.action, spaces.Discrete):  # a mask must allow a value of each MultiDiscrete component
        return np.ones((rows, size), np.bool_)
    mask = rng.random((rows, size)) < 0.5
    mask[np.arange(rows), rng.integers(size, size=rows)] = True
    return mask


# Observations of whole episodes


class _OnePolicy:
    """Adapter that gives environments with one policy the interface of environments with several policies."""

    def __init__(self, envs: VecEnv) -> None:
        self._envs = envs

    def reset(self) -> tuple[dict[str, Arrays], dict[str, np.ndarray | None]]:
        obs, mask = self._envs.reset()
        return {POLICY: obs}, {POLICY: mask}

    def step(self, action: Mapping[str, np.ndarray]) -> MultiStep:
        step = self._envs.step(action[POLICY])
        return MultiStep({POLICY: step}, step.episodes)

    def close(self) -> None:
        self._envs.close()


def played_steps(
    players: Mapping[str, Player], factory: EnvFactory, count: int, seed: int,
) -> dict[str, list[Observed]]:
    """Play greedily until each policy has received `count` observations; return the steps of each policy."""
    transform = reward_function(factory.options.reward_transform)
    made = factory(mode="test", seed=seed)
    envs = made if isinstance(made, MultiAgentVecEnv) else _OnePolicy(made)
    steps: dict[str, list[Observed]] = {policy: [] for policy in players}
    try:
        obs, mask = envs.reset()
        sizes = {policy: len(next(iter(leaves.values()))) for policy, leaves in obs.items()}
        first = {policy: np.ones(size, np.bool_) for policy, size in sizes.items()}
        memory = {policy: player.initial_memory(sizes[policy]) for policy, player in players.items()}
        for _ in range(math.ceil(count / min(sizes.values()))):
            actions = {}
            for policy, player in players.items():
                chosen = player.choose(obs[policy], memory[policy], first[policy], mask[policy])
                memory[policy], actions[policy] = chosen.rhs, chosen.clipped_action
                # `restored` copies the observations, because environments may write later ones into the same arrays.
                steps[policy].append(Observed(
                    restored(player.reader, obs[policy], mask[policy]),
                    None if player.reader.has_mask or mask[policy] is None else np.array(mask[policy]),
                    first[policy], player.for_environment(chosen.clipped_action)))
            result = envs.step(actions)
            for policy in players:
                if PREVIOUS in memory[policy]:
                    reward = result.parts[policy].reward
                    reward = reward if transform is None else transform(reward)
                    show_reward(memory[policy], reward)
                    steps[policy][-1] = dataclasses.replace(steps[policy][-1], reward=reward)
            obs, mask, first = result.obs, result.mask, result.first
    finally:
        envs.close()
    return steps


def restored(reader: ObservationReader, leaves: Arrays, mask: np.ndarray | None) -> Observation:
    """Return copies of the environment's observations (B, ...), rebuilt from the `leaves` that `reader` returned."""
    readings = {leaf.path: leaf for leaf in reader.readings}

    def restore(space: AnySpace, path: Path) -> Observation:
        if isinstance(space, spaces.Dict):
            return {key: restore(child, (*path, key)) for key, child in space.items()}
        if isinstance(space, spaces.Tuple):
            return tuple(restore(child, (*path, index)) for index, child in enumerate(space.spaces))
        if path == reader.mask_path:
            assert mask is not None
            return mask.astype(space.dtype)
        leaf = readings[path]
        values = np.moveaxis(leaves[leaf.name], 1, -1) if leaf.has_channels_last else leaves[leaf.name]
        values = values if leaf.start is None else values + leaf.start
        return np.array(values, space.dtype, order="C")
    return restore(reader.raw_space, ())
