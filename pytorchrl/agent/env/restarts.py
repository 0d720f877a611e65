"""An environment that raises is replaced, and its episode cut, as often as a budget allows.

A step that raises becomes one that is no transition: it returns the last good observation, truncated, and `info[CUT]`.
The reset that follows, in whichever autoreset mode, closes the environment and builds another. So does a later reset
that raises. Worker processes of `backend="async"` import this, so it does without torch.
"""

from __future__ import annotations

import copy
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np

from pytorchrl.agent.env.guard import GuardedEnv, hint_for
from pytorchrl.errors import EnvError, PyTorchRLError
from pytorchrl.terminal import Lines, get_logger

logger = get_logger(__name__)

CUT = "pytorchrl_cut"
"""Key of `info` in the step that raised."""
RESTARTS = "pytorchrl_restarts"
"""Key of `info` under which another process tells its `Fault`s."""
WINDOW = 1000
"""Vector steps within which restarts are limited."""
# The end of a traceback says most, and a log is no place for megabytes.
_TRACEBACK_CHARS = 8000
# Environments see 31 bits of a seed, as the first ones do.
_SEED_SHIFT = 33


class Fault(NamedTuple):
    """Why an environment is replaced, as text: exceptions may not survive the way between processes."""

    message: str
    trace: str

    @classmethod
    def of(cls, error: EnvError) -> Fault:
        """Of an error whose cause is the environment's own exception."""
        lines = traceback.format_exception(error.__cause__ or error)
        return cls(str(error), "".join(lines)[-_TRACEBACK_CHARS:])


class Restarts:
    """Counts, logs and limits the restarts of one worker's environments.

    Args:
        limit: How many are allowed within `WINDOW` steps.
        now: Number of the vector's step.
        logs: Whether each is logged here, or told to the process that does; see `RememberingEnv`.

    Attributes:
        total: Restarts so far.
        untold: Faults since `untold` was last emptied, if they are not logged here.
    """

    def __init__(self, limit: int, now: Callable[[], int] = int, logs: bool = True) -> None:
        self.limit, self.now = limit, now
        self.total = 0
        self.untold: list[Fault] = []
        self._logs = logs
        self._steps: deque[int] = deque()

    def spend(self, fault: Fault, cause: BaseException | None) -> None:
        """Count one restart, which the caller then makes.

        Raises:
            EnvError: There were as many as allowed; from `cause`, or the text of the traceback if it is elsewhere.
        """
        now, steps = self.now(), self._steps
        while steps and steps[0] <= now - WINDOW:
            steps.popleft()
        if len(steps) >= self.limit:
            raise EnvError(
                f"{fault.message}; not restarted, as environments of this worker were restarted {len(steps)} times "
                f"within its last {WINDOW} steps (max_env_restarts={self.limit}), {self.total} times in all"
            ) from cause or RuntimeError(f"in the environment's process:\n{fault.trace}")
        steps.append(now)
        self.total += 1
        if self._logs:
            logger.warning("%s; restarted, at step %d of the worker, restart %d of its environments\n%s",
                           fault.message, now, self.total, Lines(fault.trace))
        else:
            self.untold.append(fault)


class RestartingEnv(GuardedEnv):
    """A `GuardedEnv` that is replaced, with another seed, when it raises; broken contracts are raised as ever.

    Args:
        env: The first environment.
        where: Worker and environment index, for messages.
        rebuild: Makes another one.
        restarts: The budget; environments of one process share it.

    Attributes:
        last_observation: Gives a copy of what the last step or reset returned; set by whoever keeps that.
    """

    last_observation: Callable[[], Any]

    def __init__(
        self, env: gym.Env[Any, Any], where: str, rebuild: Callable[[], gym.Env[Any, Any]], restarts: Restarts,
    ) -> None:
        super().__init__(env, where)
        self.restarts = restarts
        self._rebuild = rebuild
        self._first_seed: int | None = None
        self._is_started = False
        self._is_open = True
        self._fault: EnvError | None = None
        self._num_restarts = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode, in another environment if this one raised or now raises.

        Raises:
            EnvError: The first reset raised; the contract is broken; there were too many restarts.
        """
        self._first_seed = seed if seed is not None else self._first_seed
        fault, self._fault = self._fault, None
        while True:
            if fault is not None:
                self.restarts.spend(Fault.of(fault), fault.__cause__)
            try:
                if fault is not None:
                    seed = self._replace()
                result = super().reset(seed=seed, options=options)
            except EnvError as error:
                if not self._is_started or not _is_fault(error):
                    raise
                fault = error
            else:
                self._is_started = True
                return result

    def close(self) -> None:
        """Close the environment; closing twice is fine."""
        if self._is_open:
            self._is_open = False
            super().close()

    def _step_failed(self, failure: Exception) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        error = self._error("step", failure)
        error.__cause__ = failure
        if not _is_fault(error):
            raise error
        self._fault = error
        return self.last_observation(), 0.0, False, True, {CUT: True}

    def _replace(self) -> int:
        """Close the environment and build another; the seed to reset it with."""
        try:
            self.close()
        except Exception:
            logger.warning("%s: close raised, too", self._where, exc_info=True)
        self._num_restarts += 1
        # A function of the first seed alone, so that runs repeat.
        self._seed = int(np.random.SeedSequence(self._first_seed, spawn_key=(self._num_restarts,)).generate_state(
            1, np.uint64)[0] >> np.uint64(_SEED_SHIFT))
        env = self._rebuild()
        expected = self.observation_space, self.action_space
        self.env, self._is_open = env, True
        self._num_steps, self._form = 0, None
        if (env.observation_space, env.action_space) != expected:
            raise EnvError(f"{self._where}: expected spaces {expected[0]}, {expected[1]} after a restart, "
                           f"got {env.observation_space}, {env.action_space}")
        return self._seed


class RememberingEnv(gym.Wrapper[Any, Any, Any, Any]):
    """What a `RestartingEnv` needs in a process of its own: its last observation, and a way to tell of restarts."""

    def __init__(self, env: RestartingEnv) -> None:
        super().__init__(env)
        self._restarts = env.restarts
        self._restarts.now = lambda: self._num_steps
        self._num_steps = 0
        self._last: Any = None
        env.last_observation = lambda: self._last

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset, and tell of restarts in `info`."""
        self._num_steps += 1
        observation, info = self.env.reset(seed=seed, options=options)
        self._last = copy.deepcopy(observation)
        if self._restarts.untold:
            info = {**info, RESTARTS: tuple(self._restarts.untold)}
            self._restarts.untold.clear()
        return observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step, and keep a copy of the observation: an environment may write the next one into the same memory."""
        self._num_steps += 1
        result = self.env.step(action)
        self._last = copy.deepcopy(result[0])
        return result


def cut_in(info: Mapping[str, Any]) -> np.ndarray | None:
    """(E,) bool, environments whose step raised, or None, from the `info` of a vector step in any autoreset mode."""
    last = info.get("final_info", info)
    return last.get(CUT) if isinstance(last, Mapping) else None


def _is_fault(error: EnvError) -> bool:
    """Whether the environment itself raised; that it breaks its contract is a mistake which another copy repeats."""
    cause = error.__cause__
    return cause is not None and not isinstance(cause, PyTorchRLError) and not hint_for(cause)
