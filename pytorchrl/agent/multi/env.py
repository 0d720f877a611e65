"""`MultiAgentVecEnv`: a vector of environments with several agents (PettingZoo's parallel API).

C = number of columns of a policy, one column for each of its agents in each environment; see `agent.multi.data`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from pytorchrl.agent.data import Arrays, Episode
from pytorchrl.agent.env.aliases import Action, EnvFn, EnvKwargs, Observation
from pytorchrl.agent.env.common import (
    CommonEnvOptions,
    env_seeds,
    is_training_mode,
    open_monitor,
    reward_function,
)
from pytorchrl.agent.env.guard import Form, close_and_log, describe, observation_problem, outcome_problem
from pytorchrl.agent.env.spaces import RawSpaces
from pytorchrl.agent.env.statistics import EpisodeStatistics
from pytorchrl.agent.env.vec_env import EnvFactory, VecEnv
from pytorchrl.agent.multi.building import (
    ParallelEnv,
    PolicyOf,
    agents_by_policy,
    build_parallel_env,
    check_agent_spaces,
)
from pytorchrl.agent.multi.columns import ColumnsStep, PolicyColumns, column_name
from pytorchrl.agent.multi.data import SEPARATOR, MultiStep
from pytorchrl.agent.names import checked_names
from pytorchrl.agent.options import build_options, option
from pytorchrl.errors import ConfigError, EnvError, NonFiniteDataError, PyTorchRLError
from pytorchrl.support.terminal import get_logger
from pytorchrl.support.threads import State
from pytorchrl.support.tracebacks import USER_ERRORS, brief_errors, reraise_of_signal
from pytorchrl.support.untyped import OptionValue
from pytorchrl.support.work import Work
from pytorchrl.support.worker_names import collection_worker

logger = get_logger(__name__)
# Most steps in a row in which no agent of an environment may act.
_MOST_IDLE = 1000

WORK = Work("ours", calls="environment")


class MultiAgentVecEnv(VecEnv):
    """E environments with several agents, stepped one after the other in this process.

    Each policy controls one or more agents. An agent may join an episode late and leave it early. A step is a valid
    transition only for agents that act in it. When an agent leaves, its last observation is returned in `final_obs`.
    When the last agents leave, the environment is reset in the same step.

    Args:
        options: Checked options; see `MultiAgentVecEnv.Options`.
        index_grad_worker: Index of the gradient worker; see `VecEnv`.
        index_col_worker: Index of the collection worker; see `VecEnv`.
        mode: "train" or "test". In "test" mode, rewards are raw, and `test_env_kwargs` apply.
        seed: Seed of the experiment; None draws a random seed.
        num_threads: Not used, because all environments run in one thread.
        incarnation: Number of earlier workers in the same place; see `VecEnv`.

    Attributes:
        environments: The E environments.
        observation_space: Spaces of the observations, by policy and leaf.
        action_space: Spaces of the actions, by policy; discrete actions count from 0.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(CommonEnvOptions):
        """Settings of environments with several agents."""

        env_fn: OptionValue = option(  # a function or a string, checked below
            help="Function of keyword arguments that builds one environment with PettingZoo's parallel API, or the "
            "name of a module with `parallel_env`, such as 'mpe2.simple_spread_v3'.")
        agents: dict[str, tuple[str, ...]] = option(
            default_factory=dict, help="Policy -> agents of the policy, which create_factory derives from policy_of.")

        def __post_init__(self) -> None:
            """Check each field and the combinations of fields."""
            super().__post_init__()
            if not (isinstance(self.env_fn, str) or callable(self.env_fn)):
                raise ConfigError(f"env_fn must be a function or the module of an environment, got {self.env_fn!r}; "
                                  "pass the function, not its result")

    @classmethod
    @brief_errors
    @checked_names
    def create_factory(
        cls, env_fn: EnvFn, env_kwargs: EnvKwargs | None = None, vec_env_size: int = Options.vec_env_size, *,
        policy_of: PolicyOf = None, **options: OptionValue,
    ) -> MultiAgentEnvFactory:
        """Build one environment to find the agents and their spaces, and return a factory of vectors of environments.

        Args:
            env_fn: A function that builds an environment from keyword arguments, or the name of a module with
                `parallel_env`.
            env_kwargs: Keyword arguments of the environments.
            vec_env_size: E, the number of environments.
            policy_of: Function or mapping from the name of an agent to its policy. With "shared" (or None), one policy
                called "shared" controls all agents; with "independent", each agent has a separate policy, named
                after the agent.
            options: Further fields of `MultiAgentVecEnv.Options`.

        Raises:
            ConfigError: An option is invalid, a package is missing (the message names the extra that installs it),
                or agents of a policy have different spaces.
            EnvError: The environment raises an exception, or violates PettingZoo's parallel API.
        """
        if "agents" in options:
            raise ConfigError("agents are derived from policy_of; leave agents out")
        kwargs = dict(env_kwargs) if isinstance(env_kwargs, Mapping) else env_kwargs or {}
        built = build_options(cls, {"env_fn": env_fn, "env_kwargs": kwargs, "vec_env_size": vec_env_size, **options})
        env = build_parallel_env(built.env_fn, built.env_kwargs, built.wrappers, "the environment")
        try:
            agents = agents_by_policy(list(env.possible_agents), policy_of)
            check_agent_spaces(env, agents)
        finally:
            close_and_log(env.close, "the environment")
        built = dataclasses.replace(built, agents=agents)
        probe = cls(dataclasses.replace(built, vec_env_size=1, log_dir=None), seed=0)
        try:
            probe.reset()
        finally:
            probe.close()
        return MultiAgentEnvFactory(
            cls, built, observation_space=probe.observation_space, action_space=probe.action_space,
            raw_spaces=probe.raw_spaces)

    def __init__(
        self, options: Options, *, index_grad_worker: int = 0, index_col_worker: int = 0, mode: str = "train",
        seed: int | None = None, num_threads: int = 1, incarnation: int = 0,
    ) -> None:
        is_training = is_training_mode(mode)
        self.num_envs = options.vec_env_size
        self._where = collection_worker(index_grad_worker, index_col_worker)
        self._seeds_of = functools.partial(
            env_seeds, is_training=is_training, path=(index_grad_worker, index_col_worker, incarnation),
            num_envs=self.num_envs)
        self.seeds = self._seeds_of(seed)
        self._state = State.NEW
        kwargs = options.env_kwargs | ({} if is_training else options.test_env_kwargs)
        self.environments: list[ParallelEnv] = [
            build_parallel_env(options.env_fn, kwargs, options.wrappers, f"{self._where}, env {index}")
            for index in range(self.num_envs)]
        env = self.environments[0]
        self._columns = {
            policy: PolicyColumns(
                agents, env.observation_space(agents[0]), env.action_space(agents[0]), self.num_envs)
            for policy, agents in options.agents.items()}
        self._policy_of = {agent: policy for policy, agents in options.agents.items() for agent in agents}
        # Unlike in `VecEnv`, each of these attributes is a mapping, with an entry for each policy.
        self.observation_space = {
            policy: columns.observation_space  # type: ignore[misc]
            for policy, columns in self._columns.items()}
        self.action_space = {  # type: ignore[assignment]
            policy: columns.action_space for policy, columns in self._columns.items()}
        self._transform = reward_function(options.reward_transform if is_training else None)
        self._max_steps = options.max_episode_steps
        # An episode's return is the sum of all agents' returns; the monitor file has an extra column for each policy.
        self._statistics = EpisodeStatistics(self.num_envs, open_monitor(
            options.log_dir, mode, index_grad_worker, index_col_worker,
            tuple(f"r{SEPARATOR}{policy}" for policy in self._columns)))
        self._agent_returns: list[dict[str, float]] = [{} for _ in range(self.num_envs)]
        self._lengths = np.zeros(self.num_envs, np.int64)
        self._has_named_lost = False
        # Form of the latest observation of each agent, and types of its latest reward, flags and info. Results that
        # differ from them are checked.
        self._forms: dict[str, Form] = {}
        self._kinds: dict[str, tuple[type, ...]] = {}
        # For each environment: the number of steps in a row in which the masks of its agents allowed no action.
        self._idle = [0] * self.num_envs

    @property
    def raw_spaces(self) -> dict[str, RawSpaces]:
        """The spaces of each policy's agents, before they are flattened; available only after the first reset."""
        return {policy: columns.raw_spaces for policy, columns in self._columns.items()}

    @property
    def num_restarts(self) -> int:
        """The number of restarts: always 0, because an exception in an environment ends the run."""
        return 0

    def reset(self) -> tuple[dict[str, Arrays], dict[str, np.ndarray | None]]:  # type: ignore[override] # two mappings
        """Start new episodes in all environments.

        Returns:
            Observations (C, ...) by policy and leaf, and bool action masks (C, n) by policy; None for a policy whose
            agents have no masks.

        Raises:
            StoppedError: The environments are closed.
        """
        if self._state is State.STOPPED:
            self._refuse("reset")
        self._statistics.reset()
        for index in range(self.num_envs):
            self._begin(index, self.seeds[index] if self._state is State.NEW else None)
        self._state = State.RUNNING
        return ({policy: columns.obs for policy, columns in self._columns.items()},
                {policy: columns.mask for policy, columns in self._columns.items()})

    def step(self, action: Mapping[str, np.ndarray]) -> MultiStep:  # type: ignore[override] # takes mappings
        """Take one step in every environment.

        Args:
            action: Actions (C, ...) by policy. Continuous actions are float32; other actions are int64 and count
                from 0. Actions of absent agents are ignored.

        Raises:
            CallOrderError: `reset` has not been called.
            StoppedError: The environments are closed.
        """
        if self._state is not State.RUNNING:
            self._refuse("step")
        results = {policy: ColumnsStep(columns) for policy, columns in self._columns.items()}
        team = np.zeros(self.num_envs)
        ended, terminated = np.zeros(self.num_envs, np.bool_), np.zeros(self.num_envs, np.bool_)
        for index in range(self.num_envs):
            team[index], ended[index], terminated[index] = self._step_one(index, action, results)
        self._statistics.add(team)
        policy_returns = {index: self._policy_returns(index) for index in np.flatnonzero(ended).tolist()}
        found = self._statistics.finish(ended, terminated, lambda index: {
            f"r{SEPARATOR}{policy}": value for policy, value in policy_returns[index].items()})
        episodes: list[Episode] = [
            episode._replace(policy_returns=policy_returns[episode.env_index]) for episode in found]
        for index in policy_returns:
            self._begin(index, None, results)
        return MultiStep({policy: result.step(self._transform) for policy, result in results.items()}, episodes)

    def _step_one(
        self, index: int, action: Mapping[str, np.ndarray], results: dict[str, ColumnsStep],
    ) -> tuple[float, bool, bool]:
        """Step one environment.

        Returns:
            The sum of the rewards of all agents, whether the episode is over, and whether all agents that acted in
            this step terminated.
        """
        env = self.environments[index]
        acting = [str(agent) for agent in env.agents]
        self._check_turn(index, acting)
        actions = {agent: self._action_of(index, agent, action) for agent in acting}
        try:
            obs, rewards, terminations, truncations, infos = env.step(actions)
        except USER_ERRORS as failure:
            self._fail_in("step", index, failure)
        self._lengths[index] += 1
        is_cut = self._lengths[index] == self._max_steps
        team, remaining, all_terminated = 0.0, {str(agent) for agent in env.agents}, True
        for agent in acting:
            if agent not in rewards or agent not in terminations or agent not in truncations:
                raise EnvError(
                    f"{self._where}, env {index}: agent {agent!r} acted, but step returned no reward, termination or "
                    "truncation for it; return all three for every agent that acted")
            outcome = rewards[agent], terminations[agent], truncations[agent], infos.get(agent, {})
            self._check_outcome(index, agent, outcome)
            result = results[self._policy_of[agent]]
            terminated = bool(terminations[agent])
            truncated = not terminated and (bool(truncations[agent]) or is_cut or agent not in remaining)
            column = self._column(index, agent)
            is_waiting = self._columns[self._policy_of[agent]].waiting[column]
            record = result.add_waiting if is_waiting else result.add_transition
            record(column, rewards[agent], terminated, truncated)
            all_terminated &= terminated
            team += float(rewards[agent])
            own = self._agent_returns[index]
            own[agent] = own.get(agent, 0.0) + float(rewards[agent])
            if terminated or truncated:
                # If the environment returned no last observation of the agent, the previous observation is used.
                last = obs.get(agent)
                if last is not None:
                    self._check_observation(index, agent, last)
                result.add_end(self._column(index, agent), last, infos.get(agent, {}))
                remaining.discard(agent)
        if lost := {str(agent): reward for agent, reward in rewards.items() if str(agent) not in acting and reward}:
            self._name_lost(index, lost)
        is_over = is_cut or not remaining
        if not is_over:
            self._observe(index, obs, infos, remaining, set(acting), results)
        return team, is_over, all_terminated

    def _check_turn(self, index: int, acting: Sequence[str]) -> None:
        """Raise `EnvError` if, for many steps, no agent of an environment could act, because the run would not end."""
        is_idle = all(self._columns[self._policy_of[agent]].waiting[self._column(index, agent)] for agent in acting)
        self._idle[index] = self._idle[index] + 1 if is_idle else 0
        if self._idle[index] >= _MOST_IDLE:
            raise EnvError(f"{self._where}, env {index}: in {_MOST_IDLE:,} steps in a row, the action masks allowed no "
                           "action of any agent; return a mask that allows an action of the agent whose turn it is")

    def _observe(
        self, index: int, obs: Mapping[str, Observation], infos: Mapping[str, object], agents: set[str],
        acting: set[str], results: dict[str, ColumnsStep] | None,
    ) -> None:
        """Store the observations of `agents`, the agents that are present after a step or reset.

        An observation is marked as the first of an episode if its agent did not act in the step (is not in `acting`).
        """
        if unknown := agents - self._policy_of.keys():
            raise EnvError(f"{self._where}, env {index}: {sorted(unknown)} are not among possible_agents, which are "
                           f"{sorted(self._policy_of)}")
        for policy, columns in self._columns.items():
            own = [agent for agent in columns.places if agent in agents]
            if missing := [agent for agent in own if agent not in obs]:
                raise EnvError(f"{self._where}, env {index}: expected observations of all agents, "
                               f"got no observation of {missing}")
            for agent in own:
                self._check_observation(index, agent, obs[agent])
            own_columns = [columns.column(index, agent) for agent in own]
            columns.allow_all(index)
            if own:
                columns.write(own_columns, [obs[agent] for agent in own], [infos.get(agent, {}) for agent in own],
                              is_first_reset=self._state is State.NEW)
            if results is not None:
                new = [column for column, agent in zip(own_columns, own, strict=True) if agent not in acting]
                results[policy].first[new] = True

    def _name_lost(self, index: int, rewards: Mapping[str, object]) -> None:
        """Log, once, the rewards of agents that did not act in a step; they belong to no transition."""
        if not self._has_named_lost:
            self._has_named_lost = True
            logger.warning(
                "%s, env %d: step %d returned rewards of agents that did not act in it: %s; they are neither learned "
                "nor part of returns; return them in the last step in which the agent acts", self._where, index,
                self._lengths[index], dict(sorted(rewards.items())))

    def _begin(self, index: int, seed: int | None, results: dict[str, ColumnsStep] | None = None) -> None:
        """Start an episode in one environment, and store its first observations."""
        if seed is not None:
            self._seed_spaces(index, seed)
        try:
            obs, infos = self.environments[index].reset(seed=seed)
        except USER_ERRORS as failure:
            self._fail_in("reset", index, failure)
        agents = {str(agent) for agent in self.environments[index].agents}
        if not agents:
            raise EnvError(f"{self._where}, env {index}: reset left no agents; it must set `agents`")
        self._lengths[index] = 0
        self._agent_returns[index] = {}
        self._observe(index, obs, infos, agents, set(), results)

    def _seed_spaces(self, index: int, seed: int) -> None:
        """Seed the spaces of all agents of one environment, because the environment may draw from them."""
        env = self.environments[index]
        spaces = [space_of(agent) for agent in self._policy_of for space_of in (
            env.observation_space, env.action_space)]
        for space, own in zip(spaces, np.random.SeedSequence(seed).generate_state(len(spaces)), strict=True):
            space.seed(int(own) >> 1)

    def _policy_returns(self, index: int) -> dict[str, float]:
        """Return, for each policy, the mean return of its agents that acted in the episode."""
        own: dict[str, list[float]] = {}
        for agent, value in self._agent_returns[index].items():
            own.setdefault(self._policy_of[agent], []).append(value)
        return {policy: float(np.mean(own[policy])) for policy in self._columns if policy in own}

    def _column(self, index: int, agent: str) -> int:
        return self._columns[self._policy_of[agent]].column(index, agent)

    def _action_of(self, index: int, agent: str, action: Mapping[str, np.ndarray]) -> Action:
        """Return the action of an agent in the form that its environment expects."""
        policy = self._policy_of[agent]
        columns = self._columns[policy]
        value = action[policy][columns.column(index, agent)]
        if not np.isfinite(value).all():
            raise NonFiniteDataError(f"{self._where}, env {index}, step {self._lengths[index]}: NaN or infinity in the "
                                     f"action of {agent!r}")
        return columns.as_env_action(value)

    def _check_observation(self, index: int, agent: str, observation: Observation) -> None:
        """Raise `EnvError` if an observation of an agent does not fit the agent's space."""
        if agent in self._forms and self._forms[agent].fits(observation):
            return
        space = self._columns[self._policy_of[agent]].raw_observation_space
        problem = observation_problem(space, observation, f"observation of {agent}")
        if problem:
            raise EnvError(f"{self._where}, env {index}: {problem}")
        self._forms[agent] = Form(observation)

    def _check_outcome(self, index: int, agent: str, outcome: tuple[object, object, object, object]) -> None:
        """Raise `EnvError` if a reward, flag or info of an agent has a wrong type."""
        kinds = tuple(map(type, outcome))
        if kinds == self._kinds.get(agent):
            return
        if problem := outcome_problem(*outcome):
            raise EnvError(f"{self._where}, env {index}: step, agent {agent!r}: {problem}")
        self._kinds[agent] = kinds

    def _fail_in(self, call: str, index: int, failure: BaseException) -> NoReturn:
        """Raise `failure` as an `EnvError` that names the environment."""
        reraise_of_signal(failure)
        if isinstance(failure, PyTorchRLError):
            raise failure
        raise EnvError(f"{self._where}, env {index}: {call} raised at step {self._lengths[index]}: "
                       f"{describe(failure)}") from failure

    def close(self) -> None:
        """Close the environments and the monitor file; further calls have no effect."""
        if self._state is State.STOPPED:
            return
        self._state = State.STOPPED
        self._statistics.close()
        for index, env in enumerate(self.environments):
            close_and_log(env.close, f"{self._where}, env {index}")


@dataclass(frozen=True, repr=False)
class MultiAgentEnvFactory(EnvFactory):
    """Factory of environments with several agents; its spaces are mappings from policies to spaces."""

    @property
    def agents(self) -> dict[str, tuple[str, ...]]:
        """The names of the agents that each policy controls."""
        return dict(self.options.agents)

    @property
    def policies(self) -> tuple[str, ...]:
        """Names of the policies."""
        return tuple(self.options.agents)

    def row_name(self, policy: str, row: int) -> str:
        """Return the environment and the agent of a column of a policy, for error messages."""
        return column_name(self.agents[policy], row)
