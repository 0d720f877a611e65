"""Environments for tests, with known contents or with injected faults."""

from __future__ import annotations

import itertools
import threading
import time
from typing import ClassVar, SupportsFloat

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from pytorchrl.agent.env.aliases import Action, AnyEnv, AnyWrapper, Info, ResetResult, StepResult
from pytorchrl.errors import ConfigError
from pytorchrl.support.untyped import Forwarded

AgentsReset = tuple[dict[str, np.ndarray], dict[str, Info]]
"""Observations and infos by agent."""
AgentsStep = tuple[dict[str, np.ndarray], dict[str, float], dict[str, bool], dict[str, bool], dict[str, Info]]
"""Observations, rewards, terminations, truncations and infos by agent."""

_FAULTS = (
    "constructor", "reset", "step", "nan_obs", "inf_obs", "nan_reward", "obs_dtype", "obs_shape", "reward_array",
    "four_values", "hang", "reset_without_seed", "reset_without_info",
)


class CountingEnv(gym.Env[np.ndarray, np.int64]):
    """Environment with unique observations and rewards, so that tests can identify and count its steps.

    Observation: (4,) float32 of (seed % 2**16, episode, t, last action), with t = 0 at reset. Reward: the number of
    steps since the environment was built, counted from 1, plus `offset`. All these numbers are exact in float32 if
    they are below 2**24.

    Args:
        episode_length: Number of steps of an episode.
        truncate: Whether episodes are truncated; otherwise they terminate.
        offset: Number added to rewards, to distinguish environments.
        num_actions: Number of actions.
    """

    def __init__(
        self, episode_length: int = 10, truncate: bool = False, offset: int = 0, num_actions: int = 2,
    ) -> None:
        if episode_length < 1:
            raise ConfigError(f"episode_length must be >= 1, got {episode_length}")
        self.observation_space = spaces.Box(0.0, 2.0**24, (4,), np.float32)
        self.action_space = spaces.Discrete(num_actions)
        self._length, self._truncate, self._offset = episode_length, truncate, offset
        self._seed, self._episode, self._t, self._num_steps = 0, -1, 0, 0

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> ResetResult:
        """Start the next episode."""
        super().reset(seed=seed)
        if seed is not None:
            self._seed = seed % 2**16
        self._episode += 1
        self._t = 0
        return self._observation(0), {}

    def step(self, action: np.int64) -> StepResult:
        """Take one step, and count it."""
        self._t += 1
        self._num_steps += 1
        done = self._t >= self._length
        reward = float(self._num_steps + self._offset)
        return self._observation(int(action)), reward, done and not self._truncate, done and self._truncate, {
            "t": self._t}

    def _observation(self, action: int) -> np.ndarray:
        return np.array([self._seed, self._episode, self._t, action], np.float32)


class ScriptedEnv(gym.Env[np.ndarray, np.int64]):
    """Environment that repeats a script of rewards and ends of episodes, regardless of the actions.

    Observation: (2,) float32 of (episode, t), with t = 0 at reset.

    Args:
        rewards: Reward of each step.
        terminations: Steps, counted from 0 within the script, at which an episode terminates.
        truncations: Steps, counted in the same way, at which an episode is truncated.
    """

    def __init__(
        self, rewards: tuple[float, ...], terminations: tuple[int, ...] = (), truncations: tuple[int, ...] = (),
    ) -> None:
        if not rewards:
            raise ConfigError("rewards must have at least one entry, got none")
        self.observation_space = spaces.Box(0.0, np.inf, (2,), np.float32)
        self.action_space = spaces.Discrete(2)
        self._script = itertools.cycle([
            (float(reward), step in terminations, step in truncations) for step, reward in enumerate(rewards)])
        self._episode, self._t = -1, 0

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> ResetResult:
        """Start the next episode; the script continues where it stopped."""
        super().reset(seed=seed)
        self._episode += 1
        self._t = 0
        return self._observation(), {}

    def step(self, action: np.int64) -> StepResult:
        """Return the next step of the script."""
        self._t += 1
        reward, terminated, truncated = next(self._script)
        return self._observation(), reward, terminated, truncated, {}

    def _observation(self) -> np.ndarray:
        return np.array([self._episode, self._t], np.float32)


class SleepEnv(CountingEnv):
    """A `CountingEnv` with steps of a known duration, like a slow simulator.

    Args:
        step_s: Duration of a step in seconds.
        counting: Arguments of `CountingEnv`.
    """

    def __init__(self, step_s: float = 0.005, **counting: Forwarded) -> None:
        super().__init__(**counting)
        self._step_s = step_s

    def step(self, action: np.int64) -> StepResult:
        """Sleep, and then take one step."""
        time.sleep(self._step_s)
        return super().step(action)


class FaultyEnv(CountingEnv):
    """A `CountingEnv` with one fault.

    Args:
        fault: "constructor", "reset" and "step" raise a RuntimeError; "hang" never returns from a step; "nan_obs",
            "inf_obs" and "nan_reward" return NaN or infinity; "obs_dtype", "obs_shape", "reward_array", "four_values",
            "reset_without_seed" and "reset_without_info" violate the contract of environments.
        at: Index of the first step or reset with the fault, counted from 0 since the environment was built.
        counting: Arguments of `CountingEnv`.
    """

    def __init__(self, fault: str, at: int = 0, **counting: Forwarded) -> None:
        if fault not in _FAULTS:
            raise ConfigError(f"fault must be one of {list(_FAULTS)}, got {fault!r}")
        if fault == "constructor":
            raise RuntimeError("faulty constructor")
        super().__init__(**counting)
        self._fault, self._at, self._num_resets = fault, at, 0
        if fault == "reset_without_seed":
            self.reset = self._reset_without_seed  # type: ignore[method-assign, assignment]

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> ResetResult:
        """Start an episode, and inject the fault if it is due.

        Raises:
            RuntimeError: The fault is due, and it is an error.
        """
        observation, info = super().reset(seed=seed, options=options)
        is_due = self._num_resets >= self._at
        self._num_resets += 1
        if is_due and self._fault == "reset":
            raise RuntimeError("faulty reset")
        return observation if is_due and self._fault == "reset_without_info" else (observation, info)

    def step(self, action: np.int64) -> StepResult:
        """Take and count one step, and inject the fault if it is due.

        Raises:
            RuntimeError: The fault is due, and it is an error.
        """
        is_due = self._num_steps >= self._at
        observation, reward, terminated, truncated, info = super().step(action)
        fault = self._fault if is_due else ""
        if fault == "step":
            raise RuntimeError("faulty step")
        if fault == "hang":
            threading.Event().wait()
        if fault == "four_values":
            return observation, reward, terminated or truncated, info  # type: ignore[return-value] # on purpose
        if fault in ("nan_obs", "inf_obs"):
            observation[1] = np.nan if fault == "nan_obs" else np.inf
        if fault == "obs_dtype":
            observation = observation.astype(np.complex64)
        if fault == "obs_shape":
            observation = observation[:2]
        rewards: dict[str, SupportsFloat] = {"nan_reward": np.nan, "reward_array": np.array([reward])}
        return observation, rewards.get(fault, reward), terminated, truncated, info

    def _reset_without_seed(self) -> ResetResult:
        return super().reset()


class HangingEnv(CountingEnv):
    """A `CountingEnv` in which one call never returns, unless a subclass overrides `hang`.

    Args:
        call: Name of the method that hangs: "step", "reset", "render" or "close".
        at: Number of the call that hangs, counted from 1.
        episode_length: Number of steps of an episode.
    """

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012 - Gymnasium defines it so

    def __init__(self, call: str = "step", at: int = 30, episode_length: int = 5) -> None:
        super().__init__(episode_length)
        self.render_mode = "rgb_array"
        self._call, self._at, self._num_calls = call, at, 0

    def hang(self) -> None:
        """Never return."""
        threading.Event().wait()

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> ResetResult:
        """Start the next episode, or hang."""
        self._count("reset")
        return super().reset(seed=seed, options=options)

    def step(self, action: np.int64) -> StepResult:
        """Take one step, or hang."""
        self._count("step")
        return super().step(action)

    def render(self) -> np.ndarray:
        """Return a black image, or hang."""
        self._count("render")
        return np.zeros((4, 4, 3), np.uint8)

    def close(self) -> None:
        """Do nothing, or hang."""
        self._count("close")
        super().close()

    def _count(self, call: str) -> None:
        self._num_calls += call == self._call
        if call == self._call and self._num_calls == self._at:
            self.hang()


class RaisingEnv(AnyWrapper):
    """Wrapper that raises errors at random steps of an environment; the seed passed to `reset` determines the steps.

    Args:
        env: The environment. In `VecEnv`, set `wrappers=(functools.partial(RaisingEnv, probability=0.001),)`.
        probability: Probability that a step raises a RuntimeError.
    """

    def __init__(self, env: AnyEnv, probability: float) -> None:
        super().__init__(env)
        self._probability = probability
        self._generator = np.random.default_rng(0)

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> ResetResult:
        """Start an episode."""
        if seed is not None:
            self._generator = np.random.default_rng(seed)
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Action) -> StepResult:
        """Step the environment, or raise an error without stepping it.

        Raises:
            RuntimeError: A random number is below the probability.
        """
        if self._generator.random() < self._probability:
            raise RuntimeError("raised at random")
        return self.env.step(action)


class MatchingGame:
    """Game for several agents (PettingZoo's parallel API) with a known best score, which can be learned in seconds.

    At each step, a new symbol is drawn for every agent, and all agents see all symbols. The reward of an agent is 1 if
    its action equals the symbol of the next agent, and 0 otherwise. Observation: (num_agents * num_symbols,) float32,
    the one-hot encodings of all symbols.

    Args:
        num_agents: Number of agents, with the names "agent_0", "agent_1", ...
        num_symbols: Number of symbols, and of actions.
        episode_length: Number of steps after which an episode is truncated.
    """

    metadata: ClassVar[Info] = {"name": "matching_game"}

    def __init__(self, num_agents: int = 2, num_symbols: int = 3, episode_length: int = 8) -> None:
        self.possible_agents = [f"agent_{index}" for index in range(num_agents)]
        self.agents: list[str] = []
        self._num_symbols, self._length, self._t = num_symbols, episode_length, 0
        self._generator = np.random.default_rng(0)
        self._space = spaces.Box(0.0, 1.0, (num_agents * num_symbols,), np.float32)

    def observation_space(self, agent: str) -> spaces.Box:
        """Return the observation space, the same for each agent."""
        return self._space

    def action_space(self, agent: str) -> spaces.Discrete:
        """Return the action space, the same for each agent."""
        return spaces.Discrete(self._num_symbols)

    def reset(self, seed: int | None = None, options: Info | None = None) -> AgentsReset:
        """Start the next episode."""
        if seed is not None:
            self._generator = np.random.default_rng(seed)
        self.agents, self._t = list(self.possible_agents), 0
        self._draw()
        return self._observe(), {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, int]) -> AgentsStep:
        """Reward actions that equal the symbol of the next agent, and draw new symbols."""
        rewards = {agent: float(actions[agent] == self._symbols[(index + 1) % len(self._symbols)])
                   for index, agent in enumerate(self.possible_agents)}
        self._t += 1
        self._draw()
        over, obs = self._t >= self._length, self._observe()
        if over:
            self.agents = []
        infos: dict[str, Info] = {agent: {} for agent in rewards}
        return obs, rewards, dict.fromkeys(rewards, False), dict.fromkeys(rewards, over), infos

    def close(self) -> None:
        """Do nothing; there are no resources to release."""

    def _draw(self) -> None:
        self._symbols = self._generator.integers(self._num_symbols, size=len(self.possible_agents))

    def _observe(self) -> dict[str, np.ndarray]:
        shown = np.eye(self._num_symbols, dtype=np.float32)[self._symbols].reshape(-1)
        return {agent: shown.copy() for agent in self.possible_agents}


class ChangingAgents:
    """Game (PettingZoo's parallel API) with known observations and rewards; agents may join late or leave early.

    Observation: (4,) float32 of (seed % 2**16, episode, t, number of the agent), with t = 0 at reset. Reward: 100 times
    the number of the agent, plus the value of t after the step.

    Args:
        lives: For each agent ("agent_0", "agent_1", ...), the values of t at which the agent joins and leaves.
        truncate: Whether agents are truncated; otherwise they terminate.
        masks: Whether infos contain action masks, which forbid action t % 3.
    """

    metadata: ClassVar[Info] = {"name": "changing_agents"}

    def __init__(
        self, lives: tuple[tuple[int, int], ...] = ((0, 6), (0, 3), (2, 6)), truncate: bool = False,
        masks: bool = False,
    ) -> None:
        self.possible_agents = [f"agent_{index}" for index in range(len(lives))]
        self.agents: list[str] = []
        self._lives = dict(zip(self.possible_agents, lives, strict=True))
        self._truncate, self._masks = truncate, masks
        self._seed, self._episode, self._t = 0, -1, 0

    def observation_space(self, agent: str) -> spaces.Box:
        """Return the observation space, the same for each agent."""
        return spaces.Box(0.0, 2.0**24, (4,), np.float32)

    def action_space(self, agent: str) -> spaces.Discrete:
        """Return the action space, the same for each agent."""
        return spaces.Discrete(3)

    def reset(self, seed: int | None = None, options: Info | None = None) -> AgentsReset:
        """Start the next episode."""
        if seed is not None:
            self._seed = seed % 2**16
        self._episode, self._t = self._episode + 1, 0
        self.agents = self._present()
        return self._observe(self.agents), self._infos(self.agents)

    def step(self, actions: dict[str, int]) -> AgentsStep:
        """Take one step; afterwards, agents may leave or join.

        Raises:
            RuntimeError: `actions` are not those of the agents that take part.
        """
        if set(actions) != set(self.agents):
            raise RuntimeError(f"expected actions of {self.agents}, got actions of {sorted(actions)}")
        acting, self._t = self.agents, self._t + 1
        ended = {agent: self._t >= self._lives[agent][1] for agent in acting}
        self.agents = self._present()
        rewards = {agent: 100.0 * self.possible_agents.index(agent) + self._t for agent in acting}
        no, shown = dict.fromkeys(acting, False), sorted({*acting, *self.agents})
        terminated, truncated = (no, ended) if self._truncate else (ended, no)
        return self._observe(shown), rewards, terminated, truncated, self._infos(shown)

    def close(self) -> None:
        """Do nothing; there are no resources to release."""

    def _present(self) -> list[str]:
        return [agent for agent, (first, end) in self._lives.items() if first <= self._t < end]

    def _observe(self, agents: list[str]) -> dict[str, np.ndarray]:
        return {agent: np.array([self._seed, self._episode, self._t, self.possible_agents.index(agent)], np.float32)
                for agent in agents}

    def _infos(self, agents: list[str]) -> dict[str, Info]:
        allowed = np.arange(3) != self._t % 3
        return {agent: {"action_mask": allowed} if self._masks else {} for agent in agents}
