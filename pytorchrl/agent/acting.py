"""Choose actions with a trained agent for single observations, in the same way as evaluations choose them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TypeVar

import numpy as np
from torch import Tensor

from pytorchrl.agent.actors.trunk import ACTOR_GROUP
from pytorchrl.agent.algorithms import Algorithm
from pytorchrl.agent.data import ActingStep, Arrays
from pytorchrl.agent.env.aliases import Action, Observation
from pytorchrl.agent.env.guard import finite_problem, observation_problem
from pytorchrl.agent.env.spaces import (
    ObservationReader,
    RawSpaces,
    action_start,
    mask_flags,
    part_at,
    part_of_observation,
    part_of_space,
)
from pytorchrl.agent.factories import ActorFactory, Agent, AlgorithmFactory
from pytorchrl.agent.multi.data import own_names
from pytorchrl.agent.multi.env import MultiAgentEnvFactory
from pytorchrl.agent.options import PartFactory
from pytorchrl.agent.policy import Policy
from pytorchrl.agent.seeding import Stream, derive_seed
from pytorchrl.errors import ConfigError
from pytorchrl.support.untyped import DataOfAgent

F = TypeVar("F", bound=PartFactory[object])
Chosen = DataOfAgent
"""The result of `act`: an action, or a mapping from agents to actions; with memory, a pair (actions, next memory)."""
MemoryState = DataOfAgent
"""The memory of a policy, or a mapping from agents to memories; None at the start of an episode."""
Mask = DataOfAgent
"""A mask of allowed actions, or a mapping from agents to masks; None if the environment's `info` has no masks."""

POLICY = "policy"
"""Name of the policy of an agent that has only one."""
# Values of algorithm options for acting with a trained agent. A larger `test_epsilon` could add random actions; mixed
# precision or compilation could make the actions less exact.
_EXACT = {"test_epsilon": 0.0, "mixed_precision": False, "compile": False}
# Number of env steps after which every schedule has reached its final value.
_AFTER_TRAINING = 2**62


@dataclasses.dataclass(frozen=True)
class PolicyParts:
    """The parts from which one policy of a trained agent is built."""

    algorithm: AlgorithmFactory
    actor: ActorFactory
    state: Mapping[str, Tensor]
    spaces: RawSpaces

    @property
    def seen_spaces(self) -> RawSpaces:
        """The spaces of the environment, with only those leaves of the observations that the policy sees."""
        options = self.actor.options
        if getattr(options, "obs_groups", None) is None:
            return self.spaces
        part = part_of_space(self.spaces.observation, options.group(ACTOR_GROUP))
        assert part is not None, "groups are not empty"
        return dataclasses.replace(self.spaces, observation=part)

    def build(self, seed: int) -> Algorithm:
        """Build the algorithm for acting, with the trained weights and the final values of all schedules."""
        # The file of the initial weights is not read: it may no longer exist, and `self.state` replaces its weights.
        actor = _with_options(self.actor, {"checkpoint": None})(device="cpu", seed=0)
        algorithm = _with_options(self.algorithm, _EXACT)(device="cpu", actor=actor, seed=seed)
        algorithm.load_acting_state(self.state)
        algorithm.follow_schedules(_AFTER_TRAINING, 1)  # use the final value of annealed exploration
        return algorithm

    def policy(self) -> Policy:
        """Return the policy, with the trained weights, as a `torch.nn.Module`."""
        return Policy(self.build(0).actor, self.seen_spaces)


def _with_options(factory: F, values: Mapping[str, object]) -> F:
    """Return a copy of the factory with the given option values; ignore names that are not options of the factory."""
    known = {name: value for name, value in values.items() if hasattr(factory.options, name)}
    return factory.with_options(**known)


def parts_by_policy(agent: Agent, state: Mapping[str, Tensor]) -> dict[str, PolicyParts]:
    """Return a mapping from each policy to its parts; a single policy has the name `POLICY`.

    Raises:
        ConfigError: The factory of the environments does not state their spaces.
    """
    spaces = agent.play_envs.raw_spaces
    if spaces is None:
        raise ConfigError(f"{agent.play_envs.cls.__name__} does not state the spaces of its environments, so "
                          "observations cannot be read; create its factory with create_factory()")
    if isinstance(spaces, RawSpaces):
        return {POLICY: PolicyParts(agent.algo_factory, agent.actor_factory, state, spaces)}
    algorithms, actors = agent.algo_factory.options.policies, agent.actor_factory.options.policies
    return {policy: PolicyParts(algorithms[policy], actors[policy], own_names(state, policy), own)
            for policy, own in spaces.items()}


class Player:
    """One policy of a trained agent. It chooses actions as evaluations do, with the algorithm's `acting_step`.

    Args:
        parts: The parts of the policy.
        seed: Seed of sampled actions.

    Attributes:
        reader: Reader that converts observations of the environment to the leaves that the policy sees.
    """

    def __init__(self, parts: PolicyParts, seed: int) -> None:
        self._algorithm, self._spaces, self._whole = parts.build(seed), parts.seen_spaces, parts.spaces.observation
        self.reader = ObservationReader(self._spaces.observation, parts.spaces.keep_float64)
        whole = ObservationReader(self._whole, parts.spaces.keep_float64).space
        # Leaves that only critics see. Actions do not depend on them, so they are zeros.
        self._unseen = {leaf: np.zeros((1, *(space.shape or ())), space.dtype)
                        for leaf, space in whole.items() if leaf not in self.reader.space}
        self._start, self._values = action_start(parts.spaces.action), self.reader.value_check()

    def initial_memory(self, count: int) -> Arrays:
        """Return the initial memory of `count` episodes, name -> (count, H); empty if the policy has no memory."""
        return {name: state.numpy() for name, state in self._algorithm.actor.initial_states(count).items()}

    def choose(
        self, leaves: Arrays, memory: Arrays, first: np.ndarray, mask: np.ndarray | None, deterministic: bool = True,
    ) -> ActingStep:
        """Choose the actions of E environments; see `Algorithm.acting_step`."""
        if self._unseen:
            leaves = {**leaves, **{leaf: zero.repeat(len(first), 0) for leaf, zero in self._unseen.items()}}
        return self._algorithm.acting_step(leaves, memory, first, deterministic=deterministic, mask=mask)

    def act(
        self, obs: Observation, memory: Arrays | None, mask: np.ndarray | None, deterministic: bool,
    ) -> tuple[Action, Arrays]:
        """Return the action for one observation of an environment, and the memory after the observation.

        The observation may lack leaves that only critics see.

        Raises:
            ConfigError: The observation does not fit the observation space or is not finite, or the mask does not fit
                the action space or is missing.
        """
        obs = part_of_observation(self._spaces.observation, self._whole, obs)
        if problem := observation_problem(self._spaces.observation, obs, "obs"):
            raise ConfigError(f"act received an observation that does not fit the observation space; {problem}")
        leaves = self.reader.read_rows([obs])
        if problem := self._values.problem(leaves) or finite_problem(leaves, 0):
            raise ConfigError(f"act received an observation that does not fit the observation space; {problem}")
        if mask is None and self._spaces.has_mask_in_info:
            raise ConfigError("act needs the mask that belongs to the observation, because the environment returns "
                              "masks in info, and a forbidden action could be chosen without it; pass "
                              "mask=info['action_mask']")
        try:
            allowed = self.reader.mask_rows([obs]) if mask is None else mask_flags([mask], self._spaces.action)
        except ConfigError as failure:
            raise ConfigError(f"act received a wrong mask; {failure}") from None
        step = self.choose(leaves, self.initial_memory(1) if memory is None else memory,
                           np.array([memory is None]), allowed, deterministic)
        return self.for_environment(step.clipped_action)[0], step.rhs

    def for_environment(self, actions: np.ndarray) -> np.ndarray:
        """Convert the policy's actions (E, ...) to actions of the environment, in the dtype of the action space.

        A policy counts discrete actions from 0, so the `start` of the space is added to them.
        """
        actions = actions if self._start is None else actions + self._start
        return actions.astype(self._spaces.action.dtype, copy=False)


class Acting:
    """The policies of a trained agent.

    Args:
        agent: The factories of the agent.
        state: The acting state of the agent.
        seed: Seed of sampled actions.

    Attributes:
        parts: The parts of each policy, by its name.
        players: The player of each policy, by its name.
    """

    def __init__(self, agent: Agent, state: Mapping[str, Tensor], seed: int) -> None:
        self.parts = parts_by_policy(agent, state)
        self.players = {policy: Player(parts, derive_seed(seed, Stream.ACTING, index))
                        for index, (policy, parts) in enumerate(self.parts.items())}
        envs = agent.play_envs
        self._policy_of: dict[str, str] | None = None
        if isinstance(envs, MultiAgentEnvFactory):
            self._policy_of = {agent: policy for policy, agents in envs.agents.items() for agent in agents}
        self._has_memory = any(player.initial_memory(1) for player in self.players.values())

    def act(self, obs: Observation, memory: MemoryState, mask: Mask, deterministic: bool) -> Chosen:
        """Return the actions for one observation, and the next memory if a policy has memory; see `TrainedAgent`.

        Raises:
            ConfigError: With several policies, `obs` is no mapping or names an agent that has no policy.
        """
        if self._policy_of is None:
            action, after = self.players[POLICY].act(obs, memory, mask, deterministic)
            return (action, after) if self._has_memory else action
        if not isinstance(obs, Mapping) or (unknown := [agent for agent in obs if agent not in self._policy_of]):
            raise ConfigError(f"obs must be a mapping from agents to observations, with some of the agents "
                              f"{list(self._policy_of)}, got {unknown if isinstance(obs, Mapping) else type(obs)}")
        chosen = {
            agent: self.players[self._policy_of[agent]].act(
                own, (memory or {}).get(agent), (mask or {}).get(agent), deterministic)
            for agent, own in obs.items() if not self._waits(agent, own, (mask or {}).get(agent))}
        actions = {agent: action for agent, (action, _) in chosen.items()}
        return (actions, {agent: after for agent, (_, after) in chosen.items()}) if self._has_memory else actions

    def _waits(self, agent: str, obs: Observation, mask: Mask) -> bool:
        """Return whether the mask of an agent allows no action, so that the agent waits for its turn."""
        assert self._policy_of is not None
        path = self.players[self._policy_of[agent]].reader.mask_path
        given = mask if path is None or mask is not None else part_at(obs, path)
        return given is not None and not np.any(given)
