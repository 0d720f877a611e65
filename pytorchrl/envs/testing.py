"""Environments for tests: their contents are known in advance, or they fail on command."""

from __future__ import annotations

import itertools
import time
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from pytorchrl.errors import ConfigError

_FAULTS = (
    "constructor", "reset", "step", "nan_obs", "inf_obs", "nan_reward", "obs_dtype", "obs_shape", "reward_array",
    "four_values", "reset_without_seed", "reset_without_info",
)


class CountingEnv(gym.Env[np.ndarray, np.int64]):
    """Every observation and reward is unique, so that steps can be counted wherever they turn up.

    Observation: (4,) float32 of (seed % 2**16, episode, t, last action), with t = 0 at reset. Reward: the number of
    steps made since the environment was built, from 1, plus `offset`; all below 2**24 are exact in float32.

    Args:
        episode_length: Steps after which an episode ends.
        truncate: Whether it is truncated then, else terminated.
        offset: Added to rewards; tells environments apart.
        num_actions: Size of the action space.
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

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Begin the next episode."""
        super().reset(seed=seed)
        if seed is not None:
            self._seed = seed % 2**16
        self._episode += 1
        self._t = 0
        return self._observation(0), {}

    def step(self, action: np.int64) -> Any:
        """Count one step."""
        self._t += 1
        self._num_steps += 1
        done = self._t >= self._length
        reward = float(self._num_steps + self._offset)
        return self._observation(int(action)), reward, done and not self._truncate, done and self._truncate, {
            "t": self._t}

    def _observation(self, action: int) -> np.ndarray:
        return np.array([self._seed, self._episode, self._t, action], np.float32)


class ScriptedEnv(gym.Env[np.ndarray, np.int64]):
    """Plays given rewards and ends, over and over; whatever is done.

    Observation: (2,) float32 of (episode, t), t = 0 at reset.

    Args:
        rewards: Reward of each step.
        terminations: Numbers of the steps, counted from 0 within the script, that end an episode by themselves.
        truncations: Numbers of the steps that cut one.
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

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Begin the next episode; the script goes on."""
        super().reset(seed=seed)
        self._episode += 1
        self._t = 0
        return self._observation(), {}

    def step(self, action: np.int64) -> Any:
        """Play the script's next step."""
        self._t += 1
        reward, terminated, truncated = next(self._script)
        return self._observation(), reward, terminated, truncated, {}

    def _observation(self) -> np.ndarray:
        return np.array([self._episode, self._t], np.float32)


class SleepEnv(CountingEnv):
    """A `CountingEnv` whose steps take a known time, like a slow simulator.

    Args:
        step_s: Seconds that a step sleeps.
        counting: Arguments of `CountingEnv`.
    """

    def __init__(self, step_s: float = 0.005, **counting: Any) -> None:
        super().__init__(**counting)
        self._step_s = step_s

    def step(self, action: np.int64) -> Any:
        """Sleep, then count one step."""
        time.sleep(self._step_s)
        return super().step(action)


class FaultyEnv(CountingEnv):
    """A `CountingEnv` that goes wrong in one way.

    Args:
        fault: "constructor", "reset" or "step" raise a RuntimeError; "nan_obs", "inf_obs" and "nan_reward" return such
            numbers; "obs_dtype", "obs_shape", "reward_array", "four_values", "reset_without_seed" and
            "reset_without_info" break the contract of environments.
        at: Number of the step, or of the reset, counted from 0 since the environment was built, from which it happens.
        counting: Arguments of `CountingEnv`.
    """

    def __init__(self, fault: str, at: int = 0, **counting: Any) -> None:
        if fault not in _FAULTS:
            raise ConfigError(f"fault must be one of {list(_FAULTS)}, got {fault!r}")
        if fault == "constructor":
            raise RuntimeError("faulty constructor")
        super().__init__(**counting)
        self._fault, self._at, self._num_resets = fault, at, 0
        if fault == "reset_without_seed":
            self.reset = self._reset_without_seed  # type: ignore[method-assign, assignment]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Begin an episode, or fail."""
        observation, info = super().reset(seed=seed, options=options)
        is_due = self._num_resets >= self._at
        self._num_resets += 1
        if is_due and self._fault == "reset":
            raise RuntimeError("faulty reset")
        return observation if is_due and self._fault == "reset_without_info" else (observation, info)

    def step(self, action: np.int64) -> Any:
        """Count one step, or fail."""
        is_due = self._num_steps >= self._at
        observation, reward, terminated, truncated, info = super().step(action)
        fault = self._fault if is_due else ""
        if fault == "step":
            raise RuntimeError("faulty step")
        if fault == "four_values":
            return observation, reward, terminated or truncated, info
        if fault in ("nan_obs", "inf_obs"):
            observation[1] = np.nan if fault == "nan_obs" else np.inf
        if fault == "obs_dtype":
            observation = observation.astype(np.complex64)
        if fault == "obs_shape":
            observation = observation[:2]
        value: Any = {"nan_reward": np.nan, "reward_array": np.array([reward])}.get(fault, reward)
        return observation, value, terminated, truncated, info

    def _reset_without_seed(self) -> Any:
        return super().reset()


class RaisingEnv(gym.Wrapper[Any, Any, Any, Any]):
    """Any environment, some of whose steps raise; which, its seed decides.

    Args:
        env: The environment; `wrappers=(functools.partial(RaisingEnv, probability=0.001),)` puts this around each.
        probability: Of a step to raise a RuntimeError instead.
    """

    def __init__(self, env: gym.Env[Any, Any], probability: float) -> None:
        super().__init__(env)
        self._probability = probability
        self._generator = np.random.default_rng(0)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Begin an episode."""
        if seed is not None:
            self._generator = np.random.default_rng(seed)
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        """Step the environment, or raise without doing so."""
        if self._generator.random() < self._probability:
            raise RuntimeError("raised at random")
        return self.env.step(action)


class MatchingGame:
    """A game of several agents (PettingZoo's parallel API) that is learned within seconds, and whose best score is known.

    At each step every agent has a symbol, drawn anew, which all see. An agent gets 1 if its action is the symbol of the agent
    after it. Observation: (num_agents * num_symbols,) float32, the symbols one-hot.

    Args:
        num_agents: Agents, called "agent_0" and so on.
        num_symbols: Symbols, and actions.
        episode_length: Steps after which an episode is cut.
    """

    metadata: ClassVar[dict[str, Any]] = {"name": "matching_game"}

    def __init__(self, num_agents: int = 2, num_symbols: int = 3, episode_length: int = 8) -> None:
        self.possible_agents = [f"agent_{index}" for index in range(num_agents)]
        self.agents: list[str] = []
        self._num_symbols, self._length, self._t = num_symbols, episode_length, 0
        self._generator = np.random.default_rng(0)
        self._space = spaces.Box(0.0, 1.0, (num_agents * num_symbols,), np.float32)

    def observation_space(self, agent: str) -> spaces.Box:
        """Of each agent."""
        return self._space

    def action_space(self, agent: str) -> spaces.Discrete:
        """Of each agent."""
        return spaces.Discrete(self._num_symbols)

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Begin the next episode."""
        if seed is not None:
            self._generator = np.random.default_rng(seed)
        self.agents, self._t = list(self.possible_agents), 0
        self._draw()
        return self._observe(), {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, int]) -> Any:
        """Compare actions with symbols, and draw new ones."""
        rewards = {agent: float(actions[agent] == self._symbols[(index + 1) % len(self._symbols)])
                   for index, agent in enumerate(self.possible_agents)}
        self._t += 1
        self._draw()
        over, obs = self._t >= self._length, self._observe()
        if over:
            self.agents = []
        return (obs, rewards, dict.fromkeys(rewards, False), dict.fromkeys(rewards, over), {agent: {} for agent in rewards})

    def close(self) -> None:
        """Nothing is held."""

    def _draw(self) -> None:
        self._symbols = self._generator.integers(self._num_symbols, size=len(self.possible_agents))

    def _observe(self) -> dict[str, np.ndarray]:
        shown = np.eye(self._num_symbols, dtype=np.float32)[self._symbols].reshape(-1)
        return {agent: shown.copy() for agent in self.possible_agents}


class ComingAndGoing:
    """A game (PettingZoo's parallel API) in which agents come late and die early; what they see and get is known in advance.

    Observation: (4,) float32 of (seed % 2**16, episode, t, number of the agent), t = 0 at reset. Reward: 100 times the number
    of the agent, plus t after the step.

    Args:
        lives: Of each agent ("agent_0" and so on) the t at which it is there first, and the t at which it ends.
        truncate: Whether agents are truncated, else they terminate.
        masks: Whether infos tell which actions are allowed: that of t % 3 is not.
    """

    metadata: ClassVar[dict[str, Any]] = {"name": "coming_and_going"}

    def __init__(self, lives: tuple[tuple[int, int], ...] = ((0, 6), (0, 3), (2, 6)), truncate: bool = False, masks: bool = False) -> None:
        self.possible_agents = [f"agent_{index}" for index in range(len(lives))]
        self.agents: list[str] = []
        self._lives, self._truncate, self._masks = dict(zip(self.possible_agents, lives, strict=True)), truncate, masks
        self._seed, self._episode, self._t = 0, -1, 0

    def observation_space(self, agent: str) -> spaces.Box:
        """Of each agent."""
        return spaces.Box(0.0, 2.0**24, (4,), np.float32)

    def action_space(self, agent: str) -> spaces.Discrete:
        """Of each agent."""
        return spaces.Discrete(3)

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Begin the next episode."""
        if seed is not None:
            self._seed = seed % 2**16
        self._episode, self._t = self._episode + 1, 0
        self.agents = self._there()
        return self._observe(self.agents), self._infos(self.agents)

    def step(self, actions: dict[str, int]) -> Any:
        """Go on by one step; agents come and end."""
        if set(actions) != set(self.agents):
            raise RuntimeError(f"expected actions of {self.agents}, got those of {sorted(actions)}")
        acting, self._t = self.agents, self._t + 1
        ended = {agent: self._t >= self._lives[agent][1] for agent in acting}
        self.agents = self._there()
        rewards = {agent: 100.0 * self.possible_agents.index(agent) + self._t for agent in acting}
        no, shown = dict.fromkeys(acting, False), sorted({*acting, *self.agents})
        return (self._observe(shown), rewards, no if self._truncate else ended, ended if self._truncate else no, self._infos(shown))

    def close(self) -> None:
        """Nothing is held."""

    def _there(self) -> list[str]:
        return [agent for agent, (first, end) in self._lives.items() if first <= self._t < end]

    def _observe(self, agents: list[str]) -> dict[str, np.ndarray]:
        return {agent: np.array([self._seed, self._episode, self._t, self.possible_agents.index(agent)], np.float32)
                for agent in agents}

    def _infos(self, agents: list[str]) -> dict[str, dict[str, Any]]:
        allowed = np.arange(3) != self._t % 3
        return {agent: {"action_mask": allowed} if self._masks else {} for agent in agents}
