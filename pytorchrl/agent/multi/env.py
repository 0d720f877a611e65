"""`MultiAgentVecEnv`: environments of several agents (PettingZoo's parallel API), stepped together."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from gymnasium.spaces import Discrete

from pytorchrl.agent.data import Arrays, Episode, Step
from pytorchrl.agent.env.autoreset import NO_INDEX
from pytorchrl.agent.env.common import (
    check_common_options,
    env_seeds,
    is_training_mode,
    open_monitor,
    reward_function,
)
from pytorchrl.agent.env.guard import describe, observation_problem
from pytorchrl.agent.env.spaces import MASK_LEAF, ObservationReader, action_start, flatten_action_space
from pytorchrl.agent.env.statistics import EpisodeStatistics
from pytorchrl.agent.env.vec_env import EnvFactory, VecEnv
from pytorchrl.agent.multi.data import SEPARATOR, MultiStep
from pytorchrl.agent.names import checked_names
from pytorchrl.agent.options import Options as BaseOptions
from pytorchrl.agent.options import build_options, option
from pytorchrl.errors import ConfigError, EnvError, NonFiniteDataError, PyTorchRLError, install_hint
from pytorchrl.tracebacks import brief_errors

_SINGLE_POLICY, _OWN_POLICIES = "shared", "independent"
_METHODS = ("reset", "step", "observation_space", "action_space", "possible_agents")


class _Columns:
    """The agents of one policy in all environments, as columns; see `agent.multi.data`."""

    def __init__(self, agents: Sequence[str], observation_space: Any, action_space: Any, num_envs: int) -> None:
        self.places = {agent: place for place, agent in enumerate(agents)}
        self.num_columns = num_envs * len(agents)
        self.reader = ObservationReader(observation_space)
        self.raw_observation_space, self.action_space = observation_space, flatten_action_space(action_space)
        self.start, self.raw_action_space = action_start(action_space), action_space
        self.obs: Arrays = {leaf: np.zeros((self.num_columns, *(space.shape or ())), space.dtype)
                            for leaf, space in self.reader.space.items()}
        self.mask = self.reader.all_allowed(observation_space, self.num_columns)

    def column(self, env: int, agent: str) -> int:
        """Where an agent of an environment is."""
        return env * len(self.places) + self.places[agent]

    def write(self, columns: list[int], observations: list[Any], infos: list[Any], is_first_reset: bool) -> None:
        """Put observations where they belong; what is there of others stays. Whether there are masks is known from the first reset."""
        for leaf, rows in self.reader.read_rows(observations).items():
            self.obs[leaf][columns] = rows
        masks = self.masks(observations, infos)
        if masks is not None:
            if self.mask is None:
                if not is_first_reset:
                    raise EnvError(f"info['{MASK_LEAF}'] of {list(self.places)} came after the first reset, which had none of them; "
                                   f"put '{MASK_LEAF}' into the observation space, where it is known before agents come")
                self.mask = np.ones((self.num_columns, masks.shape[1]), np.bool_)
            self.mask[columns] = masks

    def masks(self, observations: list[Any], infos: list[Any]) -> np.ndarray | None:
        """(K, n) bool, allowed actions, if there are such."""
        if self.reader.has_mask:
            return np.stack([np.asarray(self.reader.mask(observation)) for observation in observations])
        given = [info[MASK_LEAF] for info in infos if isinstance(info, Mapping) and MASK_LEAF in info]
        if given and len(given) < len(infos):
            raise EnvError(f"info['{MASK_LEAF}'] must be there for all agents of a policy, or for none")
        return np.asarray(given).astype(np.bool_) if given else None


class MultiAgentVecEnv(VecEnv):
    """E environments of several agents, in this process. A policy decides for one agent or for more.

    Agents may die before the others, and come later: a step of theirs is valid where they act. An agent that ends, while
    the others go on, has a last observation like one whose environment ends. A new episode starts at once where no agent is
    left.

    Args:
        options: See `MultiAgentVecEnv.Options`.
        index_grad_worker: As of `VecEnv`.
        index_col_worker: As of `VecEnv`.
        mode: "train", or "test": raw rewards and `test_env_kwargs`.
        seed: As of `VecEnv`.
        num_threads: As of `VecEnv`.
        incarnation: As of `VecEnv`.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(BaseOptions):
        """Settings of environments of several agents."""

        env_fn: Any = option(
            help="Function of keyword arguments that builds one environment of PettingZoo's parallel API, or the module of one, "
            "such as 'mpe2.simple_spread_v3'.")
        env_kwargs: dict[str, Any] = option(default_factory=dict, help="Keyword arguments of every environment.")
        test_env_kwargs: dict[str, Any] = option(
            default_factory=dict, help="Keyword arguments that replace those of env_kwargs when testing.")
        vec_env_size: int = option(1, help="Number of environments stepped together.", low=1)
        max_episode_steps: int | None = option(None, help="Steps after which all agents are truncated.", low=1)
        wrappers: tuple[Any, ...] = option((), help="Functions from environment to environment, applied in order.")
        reward_transform: str | float | None = option(
            None, help="What learners see of a reward: its 'sign', 'clip' to [-1, 1], or times a number; statistics stay raw.")
        log_dir: str | None = option(None, help="Folder for one monitor CSV a worker, of finished episodes.")
        agents: dict[str, tuple[str, ...]] = option(
            default_factory=dict, help="Policy -> its agents; create_factory finds them by policy_of.")

        def __post_init__(self) -> None:
            """Check what single fields cannot tell."""
            super().__post_init__()
            if not (isinstance(self.env_fn, str) or callable(self.env_fn)):
                raise ConfigError(f"env_fn must be a function or the module of an environment, got {self.env_fn!r}; pass the "
                                  "function, not what it returns")
            check_common_options(self)

    @classmethod
    @brief_errors
    @checked_names
    def create_factory(
        cls, env_fn: Any, env_kwargs: dict[str, Any] | None = None, vec_env_size: int = 1, *,
        policy_of: Callable[[str], str] | Mapping[str, str] | str | None = None, **options: Any,
    ) -> MultiAgentEnvFactory:
        """A factory of vectors of such environments; builds one at once to learn its agents and their spaces.

        Args:
            env_fn: Function of keyword arguments, or the name of a module with `parallel_env`.
            env_kwargs: Those keyword arguments.
            vec_env_size: E.
            policy_of: Policy of an agent: a function of its name, or a mapping; "shared" (or None): one policy of that name
                decides for all; "independent": each agent has a policy of its own, of the agent's name.
            options: Further fields of `MultiAgentVecEnv.Options`.

        Raises:
            ConfigError: A wrong option; a missing package (names the extra); agents of one policy have different spaces.
            EnvError: The environment raises, or breaks its contract.
        """
        given = {"env_fn": env_fn, "env_kwargs": dict(env_kwargs) if isinstance(env_kwargs, Mapping) else env_kwargs or {}, "vec_env_size": vec_env_size, **options}
        if "agents" in options:
            raise ConfigError("agents are found by policy_of; leave them out")
        built = build_options(cls, given)
        env = _build(built, built.env_kwargs, "the environment")
        try:
            agents = _agents_by_policy(list(env.possible_agents), policy_of)
            _check_spaces(env, agents)
        finally:
            env.close()
        built = dataclasses.replace(built, agents=agents)
        probe = cls(dataclasses.replace(built, vec_env_size=1, log_dir=None), seed=0)
        try:
            probe.reset()
        finally:
            probe.close()
        return MultiAgentEnvFactory(
            cls, built, observation_space=probe.observation_space, action_space=probe.action_space)

    def __init__(self, options: Any, *, index_grad_worker: int = 0, index_col_worker: int = 0, mode: str = "train",
                 seed: int | None = None, num_threads: int = 1, incarnation: int = 0) -> None:
        is_training = is_training_mode(mode)
        self.num_envs = options.vec_env_size
        self._where = f"worker g{index_grad_worker}-c{index_col_worker}"
        self._first_seeds: list[int] | None = env_seeds(
            seed, is_training, (index_grad_worker, index_col_worker, incarnation), self.num_envs)
        kwargs = options.env_kwargs | ({} if is_training else options.test_env_kwargs)
        self._games = [_build(options, kwargs, f"{self._where}, env {index}") for index in range(self.num_envs)]
        self._columns = {
            policy: _Columns(agents, self._games[0].observation_space(agents[0]), self._games[0].action_space(agents[0]), self.num_envs)
            for policy, agents in options.agents.items()}
        self._policy_of = {agent: policy for policy, agents in options.agents.items() for agent in agents}
        self.observation_space = {policy: columns.reader.space for policy, columns in self._columns.items()}  # type: ignore[misc]
        self.action_space = {policy: columns.action_space for policy, columns in self._columns.items()}  # type: ignore[assignment]
        self._transform = reward_function(options.reward_transform if is_training else None)
        self._max_steps = options.max_episode_steps
        # The return of an episode sums over all agents; the returns of the policies are further columns.
        self._statistics = EpisodeStatistics(self.num_envs, open_monitor(
            options.log_dir, mode, index_grad_worker, index_col_worker,
            tuple(f"r{SEPARATOR}{policy}" for policy in self._columns)))
        self._agent_returns: list[dict[str, float]] = [{} for _ in range(self.num_envs)]
        self._lengths = np.zeros(self.num_envs, np.int64)
        self._checked: set[str] = set()
        self._closed = False

    @property
    def num_restarts(self) -> int:
        """0: what an environment raises ends the run."""
        return 0

    def reset(self) -> Any:
        """Start new episodes everywhere.

        Returns:
            Policy -> leaf -> (C, ...), and policy -> (C, n) bool or None.
        """
        self._statistics.reset()
        for index in range(self.num_envs):
            self._begin(index, None if self._first_seeds is None else self._first_seeds[index])
        self._first_seeds = None
        return ({policy: columns.obs for policy, columns in self._columns.items()},
                {policy: columns.mask for policy, columns in self._columns.items()})

    def step(self, action: Any) -> Any:
        """Make one step in every environment.

        Args:
            action: Policy -> (C, ...), int64 counting from 0, or float32; of agents that are not there it is ignored.
        """
        results = {policy: _Result(columns) for policy, columns in self._columns.items()}
        team = np.zeros(self.num_envs)
        ended, terminated = np.zeros(self.num_envs, np.bool_), np.zeros(self.num_envs, np.bool_)
        for index in range(self.num_envs):
            team[index], ended[index], terminated[index] = self._step_one(index, action, results)
        self._statistics.add(team)
        policy_returns = {index: self._policy_returns(index) for index in np.flatnonzero(ended).tolist()}
        found = self._statistics.finish(ended, terminated, lambda index: {
            f"r{SEPARATOR}{policy}": value for policy, value in policy_returns[index].items()})
        episodes: list[Episode] = [episode._replace(policy_returns=policy_returns[episode.env_index]) for episode in found]
        for index in policy_returns:
            self._begin(index, None, results)
        return MultiStep({policy: result.step(self._transform) for policy, result in results.items()}, episodes)

    def _step_one(self, index: int, action: Any, results: dict[str, _Result]) -> tuple[float, bool, bool]:
        """Step one environment: the reward of all agents, and whether the episode is over and all ended by themselves."""
        env = self._games[index]
        acting = [str(agent) for agent in env.agents]
        actions = {agent: self._action_of(index, agent, action) for agent in acting}
        try:
            obs, rewards, terminations, truncations, infos = env.step(actions)
        except Exception as failure:  # noqa: BLE001 - raised again with where it happened
            self._fail("step", index, failure)
        self._lengths[index] += 1
        is_cut = self._lengths[index] == self._max_steps
        team, going_on, all_terminated = 0.0, {str(agent) for agent in env.agents}, True
        for agent in acting:
            if agent not in rewards or agent not in terminations or agent not in truncations:
                raise EnvError(f"{self._where}, env {index}: agent {agent!r} acted, and step gives no reward, termination and "
                               "truncation of it; give all three for every agent that acted")
            result = results[self._policy_of[agent]]
            terminated = bool(terminations[agent])
            truncated = not terminated and (bool(truncations[agent]) or is_cut or agent not in going_on)
            result.transition(self._column(index, agent), rewards[agent], terminated, truncated)
            all_terminated &= terminated
            team += float(rewards[agent])
            own = self._agent_returns[index]
            own[agent] = own.get(agent, 0.0) + float(rewards[agent])
            if terminated or truncated:
                # An environment may not show an agent what comes after its death; then it is the last that it saw.
                result.finish(self._column(index, agent), obs.get(agent), infos.get(agent, {}))
                going_on.discard(agent)
        is_over = is_cut or not going_on
        if not is_over:
            self._show(index, obs, infos, going_on, set(acting), results)
        return team, is_over, all_terminated

    def _show(self, index: int, obs: Mapping[str, Any], infos: Mapping[str, Any], agents: set[str], acting: set[str],
              results: dict[str, _Result] | None) -> None:
        """Take the observations of the agents that go on, or come."""
        if unknown := agents - self._policy_of.keys():
            raise EnvError(f"{self._where}, env {index}: {sorted(unknown)} are none of the possible agents {sorted(self._policy_of)}")
        for policy, columns in self._columns.items():
            own = [agent for agent in columns.places if agent in agents]
            if missing := [agent for agent in own if agent not in obs]:
                raise EnvError(f"{self._where}, env {index}: there is no observation of {missing}, which are among the agents")
            for agent in own:
                self._check_observation(index, agent, obs[agent])
            places = [columns.column(index, agent) for agent in own]
            first = columns.column(index, next(iter(columns.places)))
            if columns.mask is not None:  # nobody asks what the dead may do
                columns.mask[first:first + len(columns.places)] = True
            if own:
                columns.write(places, [obs[agent] for agent in own], [infos.get(agent, {}) for agent in own],
                              is_first_reset=self._first_seeds is not None)
            if results is not None:
                results[policy].first[[place for place, agent in zip(places, own, strict=True) if agent not in acting]] = True

    def _begin(self, index: int, seed: int | None, results: dict[str, _Result] | None = None) -> None:
        try:
            result = self._games[index].reset(seed=seed)
            obs, infos = result
        except Exception as failure:  # noqa: BLE001 - raised again with where it happened
            self._fail("reset", index, failure)
        agents = {str(agent) for agent in self._games[index].agents}
        if not agents:
            raise EnvError(f"{self._where}, env {index}: there is no agent after reset")
        self._lengths[index] = 0
        self._agent_returns[index] = {}
        self._show(index, obs, infos, agents, set(), results)

    def _policy_returns(self, index: int) -> dict[str, float]:
        """Policy -> mean over its agents of what they got in the episode; those that never came do not count."""
        own: dict[str, list[float]] = {}
        for agent, value in self._agent_returns[index].items():
            own.setdefault(self._policy_of[agent], []).append(value)
        return {policy: float(np.mean(own[policy])) for policy in self._columns if policy in own}

    def _column(self, index: int, agent: str) -> int:
        return self._columns[self._policy_of[agent]].column(index, agent)

    def _action_of(self, index: int, agent: str, action: Any) -> Any:
        """An agent's action as its environment expects it."""
        policy = self._policy_of[agent]
        columns = self._columns[policy]
        value = action[policy][columns.column(index, agent)]
        if columns.start is not None:
            value = value + columns.start
        space = columns.raw_action_space
        if not np.isfinite(value).all():
            raise NonFiniteDataError(f"{self._where}, env {index}, step {self._lengths[index]}: NaN or infinity in the action of {agent!r}")
        return int(value) if isinstance(space, Discrete) else np.asarray(value, space.dtype)

    def _check_observation(self, index: int, agent: str, observation: Any) -> None:
        if agent in self._checked:
            return
        self._checked.add(agent)
        problem = observation_problem(self._columns[self._policy_of[agent]].raw_observation_space, observation, f"observation of {agent}")
        if problem:
            raise EnvError(f"{self._where}, env {index}: {problem}")

    def _fail(self, call: str, index: int, failure: Exception) -> NoReturn:  # type: ignore[override] # of one environment
        if isinstance(failure, PyTorchRLError):
            raise failure
        raise EnvError(f"{self._where}, env {index}: {call} raised at step {self._lengths[index]}: {describe(failure)}") from failure

    def close(self) -> None:
        """Close the environments and the monitor file; closing twice is fine."""
        if self._closed:
            return
        self._closed = True
        self._statistics.close()
        for env in self._games:
            env.close()


class _Result:
    """What one step gives the columns of a policy."""

    def __init__(self, columns: _Columns) -> None:
        self._columns = columns
        count = columns.num_columns
        self._reward = np.zeros(count, np.float32)
        self._terminated, self._truncated, self._valid, self.first = (np.zeros(count, np.bool_) for _ in range(4))
        self._ended: list[int] = []
        self._last: list[Arrays] = []
        self._last_masks: list[np.ndarray] = []

    def transition(self, column: int, reward: float, terminated: bool, truncated: bool) -> None:
        """An agent has acted."""
        self._reward[column], self._valid[column] = reward, True
        self._terminated[column], self._truncated[column] = terminated, truncated

    def finish(self, column: int, observation: Any, info: Any) -> None:
        """An agent's episode is over; its last observation, or None, and what came with it."""
        columns = self._columns
        self._ended.append(column)
        self._last.append({leaf: rows[column:column + 1].copy() for leaf, rows in columns.obs.items()} if observation is None
                          else columns.reader.read_rows([observation]))
        if columns.mask is not None:
            masks = None if observation is None else columns.masks([observation], [info])
            unknown = columns.mask[column] if observation is None else np.ones_like(columns.mask[column])
            allowed = unknown if masks is None else masks[0]
            self._last_masks.append(allowed | ~allowed.any())

    def step(self, transform: Callable[[np.ndarray], np.ndarray] | None) -> Step:
        """It, for the storage."""
        reward = self._reward if transform is None else np.asarray(transform(self._reward), np.float32)
        final_obs = {leaf: np.concatenate([last[leaf] for last in self._last]) for leaf in self._columns.obs} if self._ended else {}
        return Step(
            obs=self._columns.obs, reward=reward, terminated=self._terminated, truncated=self._truncated, valid=self._valid,
            first=self.first, final_index=np.array(self._ended, np.int64) if self._ended else NO_INDEX, final_obs=final_obs,
            mask=self._columns.mask, episodes=[], final_mask=np.stack(self._last_masks) if self._last_masks else None)


@dataclass(frozen=True, repr=False)
class MultiAgentEnvFactory(EnvFactory):
    """A recipe for such environments, which knows their agents; spaces are mappings from policy."""

    @property
    def agents(self) -> dict[str, tuple[str, ...]]:
        """Policy -> its agents."""
        return dict(self.options.agents)

    @property
    def policies(self) -> tuple[str, ...]:
        """Names of the policies."""
        return tuple(self.options.agents)


def _build(options: Any, kwargs: dict[str, Any], where: str) -> Any:
    """One environment, wrapped as asked."""
    env_fn = _parallel_env_of(options.env_fn) if isinstance(options.env_fn, str) else options.env_fn
    try:
        env = env_fn(**copy.deepcopy(kwargs))
        for wrapper in options.wrappers:
            env = wrapper(env)
    except Exception as failure:
        raise EnvError(f"{where}: the constructor raised: {describe(failure)}") from failure
    if lacking := [name for name in _METHODS if not hasattr(env, name)]:
        raise ConfigError(f"env_fn must return an environment of PettingZoo's parallel API, got {type(env).__name__} without "
                          f"{', '.join(lacking)}")
    if hasattr(env, "agent_iter"):
        raise ConfigError(f"{type(env).__name__} is of PettingZoo's turn-based API; give its parallel_env, or wrap it with "
                          "pettingzoo.utils.aec_to_parallel")
    return env


def _parallel_env_of(name: str) -> Callable[..., Any]:
    try:
        module = importlib.import_module(name)
    except ImportError as failure:
        raise ConfigError(f"{name} cannot be imported ({failure}); {_import_hint(name, failure)}") from failure
    except Exception as failure:
        raise EnvError(f"importing {name} raised: {describe(failure)}") from failure
    if not hasattr(module, "parallel_env"):
        turns = " (it is of PettingZoo's turn-based API; wrap it with pettingzoo.utils.aec_to_parallel)" if hasattr(module, "env") else ""
        raise ConfigError(f"{name} has no parallel_env{turns}; give a module such as 'mpe2.simple_spread_v3', or a function")
    maker: Callable[..., Any] = module.parallel_env
    return maker


def _import_hint(name: str, failure: ImportError) -> str:
    """What to do where a module cannot be imported."""
    missing = failure.name if isinstance(failure, ModuleNotFoundError) else None
    package, _, module = name.rpartition(".")
    if missing is not None and not f"{name}.".startswith(f"{missing}."):
        return f"install the package that has {missing}"
    if missing == name and package:  # the package itself is there
        names = [info.name for info in pkgutil.iter_modules(getattr(importlib.import_module(package), "__path__", []))]
        if near := difflib.get_close_matches(module, names, n=1):
            return f"did you mean '{package}.{near[0]}'?"
    return f"for PettingZoo's environments: {install_hint('pettingzoo')}"


def _agents_by_policy(agents: Sequence[str], policy_of: Any) -> dict[str, tuple[str, ...]]:
    if not agents:
        raise ConfigError("the environment has no possible_agents")
    if others := [agent for agent in agents if not isinstance(agent, str)]:
        raise ConfigError(f"agents must be named by texts, got {others[0]!r} among possible_agents; a wrapper can name them")
    name_of = _policy_function(policy_of, agents)
    found: dict[str, tuple[str, ...]] = {}
    for agent in agents:
        policy = name_of(agent)
        if not isinstance(policy, str) or not policy or SEPARATOR in policy:
            raise ConfigError(f"policy_of must give a name without {SEPARATOR!r} for each of {list(agents)}, got {policy!r} for {agent!r}")
        found[policy] = (*found.get(policy, ()), agent)
    return found


def _policy_function(policy_of: Any, agents: Sequence[str]) -> Callable[[str], Any]:
    """From what may be given as `policy_of` to a function from agent to policy."""
    if policy_of in (None, _SINGLE_POLICY):
        return lambda _agent: _SINGLE_POLICY
    if policy_of == _OWN_POLICIES:
        return str
    if isinstance(policy_of, Mapping):
        if unknown := [agent for agent in policy_of if agent not in agents]:
            raise ConfigError(f"policy_of must be about the agents {list(agents)}, got {unknown}")
        return lambda agent: policy_of.get(agent, "")
    if not callable(policy_of):
        raise ConfigError(f"policy_of must be {_SINGLE_POLICY!r}, {_OWN_POLICIES!r}, a mapping from agent to policy or a function, got "
                          f"{policy_of!r}")
    function: Callable[[str], Any] = policy_of
    return function


def _check_spaces(env: Any, agents: Mapping[str, tuple[str, ...]]) -> None:
    for policy, own in agents.items():
        for what in ("observation_space", "action_space"):
            try:
                spaces = {agent: getattr(env, what)(agent) for agent in own}
            except Exception as failure:
                raise EnvError(f"{what}(agent) of {type(env).__name__} raised: {describe(failure)}; it must return the "
                               f"gymnasium.Space of each of {list(own)}") from failure
            if any(space != spaces[own[0]] for space in spaces.values()):
                raise ConfigError(f"agents of one policy must have one {what}, those of {policy!r} have {spaces}; policy_of must "
                                  f"give them policies of their own ({_OWN_POLICIES!r}, or a mapping), or a wrapper pad them")
