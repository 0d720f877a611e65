"""Replace environments that raise exceptions, up to a limit, and truncate their episodes.

If a step raises an exception, `RestartingEnv` returns the latest observation, with truncated=True and `info[CUT]` set
to True; this step is not a transition. The next reset closes the environment and builds a new one. An environment is
also replaced if a reset raises an exception, except for the first reset. While an environment has not proved that it
works, an exception ends the run instead, because it is probably a mistake that a new environment would repeat.

Worker processes of `backend="async"` import this module, so it must not import torch.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from pytorchrl.agent.env.aliases import Action, AnyEnv, AnyWrapper, Info, Observation, ResetResult, StepResult
from pytorchrl.agent.env.guard import GuardedEnv, hint_for, traceback_of
from pytorchrl.errors import EnvError, PyTorchRLError
from pytorchrl.support.terminal import Lines, get_logger

logger = get_logger(__name__)

CUT = "pytorchrl_cut"
"""Key of `info` that marks a step in which the environment raised an exception."""
RESTARTS = "pytorchrl_restarts"
"""Key of `info` under which an environment's process reports its faults to the worker."""
WINDOW = 1000
"""Length, in vector steps, of the sliding window within which restarts are counted and limited."""
# An environment has proved that it works once an episode has ended, or after this number of steps.
_TRIAL_STEPS = 1000
# Environments get the upper 31 bits of a seed, because ALE and EnvPool store seeds as signed 32-bit integers.
_SEED_SHIFT = 33


class EnvFault(NamedTuple):
    """The reason for replacing an environment, as text, because not every exception can be pickled."""

    message: str
    trace: str

    @classmethod
    def of(cls, error: EnvError) -> EnvFault:
        """Create a fault from an error whose cause is the environment's own exception."""
        return cls(str(error), traceback_of(error.__cause__ or error))


class Restarts:
    """Counts, logs and limits the restarts of one worker's environments.

    Args:
        limit: Number of restarts allowed within `WINDOW` steps.
        now: Function that returns the number of the current step of the vector environment.
        from_start: Whether environments are replaced even before they have proved that they work.
        logs: Whether this object logs restarts. In a process of `backend="async"`, it does not: `RememberingEnv`
            reports restarts to the worker, which logs them.

    Attributes:
        total: Number of restarts so far.
        unreported: Faults that have not yet been reported to the worker; empty if `logs` is true.
    """

    def __init__(self, limit: int, now: Callable[[], int] = int, logs: bool = True, from_start: bool = True) -> None:
        self.limit, self.now, self.from_start = limit, now, from_start
        self.total = 0
        self.unreported: list[EnvFault] = []
        self._logs = logs
        self._steps: deque[int] = deque()
        self._logged: set[str] = set()  # tracebacks, without the text of the exception

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the limit, but not the counts, because each process counts the restarts of its own environments."""
        return Restarts, (self.limit, int, self._logs, self.from_start)

    def spend(self, fault: EnvFault, cause: BaseException | None) -> None:
        """Count a restart that the caller is about to make.

        Args:
            fault: The reason for the restart.
            cause: The exception that the environment raised; None if it was raised in another process.

        Raises:
            EnvError: The limit is reached. The `__cause__` of this error is `cause`, or a RuntimeError with the text of
                the traceback if `cause` is None.
        """
        now, steps = self.now(), self._steps
        while steps and steps[0] <= now - WINDOW:
            steps.popleft()
        if len(steps) >= self.limit:
            raise EnvError(
                f"{fault.message}; not restarted, because environments of this worker were restarted {len(steps)} "
                f"times within its last {WINDOW} steps (max_env_restarts={self.limit}), {self.total} times in total"
            ) from cause or RuntimeError(f"in the environment's process:\n{fault.trace}")
        steps.append(now)
        self.total += 1
        if self._logs:
            place = fault.trace.rpartition("\n")[0]
            trace = "" if place in self._logged else f"\n{fault.trace}"
            self._logged.add(place)
            logger.warning("%s; restarted at step %d of the worker, restart %d of its environments%s",
                           fault.message, now, self.total, Lines(trace))
        else:
            self.unreported.append(fault)


class RestartingEnv(GuardedEnv):
    """A `GuardedEnv` that rebuilds its environment with another seed if the environment raises an exception.

    If the environment returns invalid results, an error is raised instead, because a new environment would do the same.

    Args:
        env: The first environment.
        where: Worker and environment index, for error messages.
        rebuild: Function that builds a new environment.
        restarts: The restart budget, shared by the environments of one process.

    Attributes:
        last_observation: Function that returns a copy of the latest observation. The owner of this object must set
            it, because only the owner stores observations.
    """

    last_observation: Callable[[], Observation]

    def __init__(
        self, env: AnyEnv, where: str, rebuild: Callable[[], AnyEnv], restarts: Restarts,
    ) -> None:
        super().__init__(env, where)
        self.restarts = restarts
        self._rebuild = rebuild
        self._first_seed: int | None = None
        self._is_started = False
        self._is_open = True
        self._is_proved = restarts.from_start
        self._fault: EnvError | None = None
        self._num_restarts = 0

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> ResetResult:
        """Start an episode; if the environment has raised an exception, or raises one now, replace the environment.

        Raises:
            EnvError: The first reset raised an exception, the result of a reset is wrong, or no restart is left.
        """
        self._first_seed = seed if seed is not None else self._first_seed
        fault, self._fault = self._fault, None
        while True:
            if fault is not None:
                self.restarts.spend(EnvFault.of(fault), fault.__cause__)
            try:
                if fault is not None:
                    seed = self._replace()
                result = super().reset(seed=seed, options=options)
            except EnvError as error:
                if not self._is_started or not _is_fault(error):
                    raise
                fault = self._restartable(error)
            else:
                self._is_started = True
                return result

    def close(self) -> None:
        """Close the environment; further calls have no effect."""
        if self._is_open:
            self._is_open = False
            super().close()

    def _step_failed(self, failure: BaseException) -> StepResult:
        error = self._error("step", failure)
        error.__cause__ = failure
        if not _is_fault(error):
            raise error
        self._fault = self._restartable(error)
        return self.last_observation(), 0.0, False, True, {CUT: True}

    def _restartable(self, error: EnvError) -> EnvError:
        """Return the error of the environment; raise it if the environment has not proved that it works."""
        if self._is_proved or self._has_ended or self._num_steps > _TRIAL_STEPS:
            self._is_proved = True  # also after the environment is replaced, and its steps are counted anew
            return error
        raise EnvError(
            f"{error}; it ends the run, because no episode of this environment had ended before; "
            "set on_env_error='restart' to restart environments even then") from error.__cause__

    def _replace(self) -> int:
        """Close the environment, build a new one, and return the seed for its reset."""
        self.close()
        self._num_restarts += 1
        # The seed depends only on the first seed and the number of restarts, so that runs are reproducible.
        self._seed = int(np.random.SeedSequence(self._first_seed, spawn_key=(self._num_restarts,)).generate_state(
            1, np.uint64)[0] >> np.uint64(_SEED_SHIFT))
        env = self._rebuild()
        expected = self.observation_space, self.action_space
        self.env, self._is_open = env, True
        self._num_steps, self._kinds = 0, ()
        if (env.observation_space, env.action_space) != expected:
            raise EnvError(f"{self._where}: expected spaces {expected[0]}, {expected[1]} after a restart, "
                           f"got {env.observation_space}, {env.action_space}; "
                           "all environments of env_fn must have the same spaces")
        return self._seed


class RememberingEnv(AnyWrapper):
    """Wrapper of a `RestartingEnv` in a separate process; it stores the latest observation, and reports restarts."""

    def __init__(self, env: RestartingEnv) -> None:
        super().__init__(env)
        self._restarts = env.restarts
        self._restarts.now = lambda: self._num_steps
        self._num_steps = 0
        self._last: Observation = None
        env.last_observation = lambda: self._last

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> ResetResult:
        """Reset the environment, and report restarts in `info`."""
        self._num_steps += 1
        observation, info = self.env.reset(seed=seed, options=options)
        self._last = copy.deepcopy(observation)
        if self._restarts.unreported:
            info = {**info, RESTARTS: tuple(self._restarts.unreported)}
            self._restarts.unreported.clear()
        return observation, info

    def step(self, action: Action) -> StepResult:
        """Step the environment, and store a copy of the observation, because the next step may reuse the memory."""
        self._num_steps += 1
        result = self.env.step(action)
        self._last = copy.deepcopy(result[0])
        return result


def cut_in(info: Info) -> np.ndarray | None:
    """Return which environments raised an exception in the step with this `info`, as (E,) bool; None if none did."""
    last = info.get("final_info", info)
    return last.get(CUT) if isinstance(last, Mapping) else None


def _is_fault(error: EnvError) -> bool:
    """Return whether the environment itself raised the exception and a restart may help.

    A restart does not help if the exception looks like a common violation of the Gymnasium API.
    """
    cause = error.__cause__
    return cause is not None and not isinstance(cause, PyTorchRLError) and not hint_for(cause)
