"""The base class of callbacks, and the object through which a learner calls them."""

from __future__ import annotations

import contextlib
import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from torch import Tensor

from pytorchrl.agent.data import Evaluation
from pytorchrl.callbacks.time_limit import time_limit
from pytorchrl.errors import CallbackError, ContractError
from pytorchrl.support.terminal import get_logger
from pytorchrl.support.tracebacks import USER_ERRORS, reraise_of_signal

logger = get_logger(__name__)

_OF_STABLE_BASELINES = ("on_training_start", "on_training_end", "on_rollout_start", "on_rollout_end")


class TrainingRun(Protocol):
    """The interface of a learner that callbacks use."""

    log_dir: Path | None
    """Directory of the run; None if no files are written."""

    @property
    def description(self) -> Mapping[str, object]:
        """All settings of the run, as in `run.json`, which need not be written; available after the start."""

    @property
    def env_steps(self) -> int:
        """Number of env steps that have reached the learner."""

    @property
    def updates(self) -> int:
        """Number of updates."""

    @property
    def return_mean(self) -> float | None:
        """Mean return of the last 100 training episodes; None before an episode has ended."""

    def request_stop(self, reason: str) -> None:
        """End training after the current step, as if `target_steps` had been reached."""

    def update_algorithm_parameter(self, name: str, value: float) -> None:
        """Change one of the algorithm's updatable parameters in every worker."""

    def save_model(self, name: str, *, evaluated: bool = False) -> str:
        """Write the agent to `log_dir/name.pt`; if `evaluated`, with the weights of the last evaluation."""


class Callback:
    """Code that a learner calls when certain events occur in a run; a subclass overrides the methods that it needs.

    All methods are called in the thread that calls `Learner.step`, between two updates. The first argument is the
    learner. Through it, a callback can end training, or change a parameter of the algorithm.
    """

    needs_evaluations: bool = False
    """Whether the callback has no effect in a run without evaluations, so that such a run refuses it."""

    def check(self, run: TrainingRun) -> None:
        """Check, before anything starts, that the callback fits the run; raise `ConfigError` if it does not."""

    def on_start(self, run: TrainingRun) -> None:
        """Respond to the start or resumption of a run, after all workers have started and before the first update."""

    def on_step(self, run: TrainingRun, info: Mapping[str, float]) -> None:
        """Respond to a step, that is, to `updates_per_step` updates.

        Args:
            run: The learner.
            info: The algorithm's statistics of these updates.
        """

    def on_evaluation(self, run: TrainingRun, evaluation: Evaluation) -> None:
        """Respond to the result of an evaluation, before the record that contains this result is written."""

    def on_record(self, run: TrainingRun, record: Mapping[str, object]) -> Mapping[str, float] | None:
        """Respond to a record, before it is written to `metrics.jsonl`.

        Args:
            run: The learner.
            record: The metrics of the record; see `Learner.get_metrics`.

        Returns:
            Numbers by name, which are added to the record under the key `callbacks`; or None to add nothing.
        """

    def on_checkpoint(self, run: TrainingRun) -> None:
        """Respond to a checkpoint that has just been written."""

    def on_worker_lost(self, run: TrainingRun, count: int) -> None:
        """Respond to the loss and replacement of workers; called at most a few times per second.

        Args:
            run: The learner.
            count: Number of workers that were lost and replaced since the last call.
        """

    def on_end(self, run: TrainingRun, summary: Mapping[str, object]) -> None:
        """Respond to the end or failure of a run, after all workers have stopped; not called if the start failed.

        Args:
            run: The learner.
            summary: The figures of the run; see `Learner.summary`.
        """

    def on_error(self, run: TrainingRun, error: BaseException) -> None:
        """Respond to an error or a signal that ends training; called before `on_end`."""

    def state(self) -> dict[str, float]:
        """Return numbers that a resumed run needs; they are stored in checkpoints."""
        return {}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Restore the numbers that `state` returned; called before `on_start` if a run is resumed."""


class Callbacks:
    """The callbacks of one learner; for each event, they are called one after the other.

    Args:
        callbacks: The callbacks, in the order in which they are called.
        is_fatal: Whether an error in a callback ends the run; otherwise, it is logged.
        run: The learner.
        timeout_s: Longest time of one call in seconds; a longer call counts as an error. None: no limit.

    Attributes:
        stop_reason: The reason given in the first call of `request_stop`; None if there was no call.
    """

    def __init__(self, callbacks: Sequence[Callback], is_fatal: bool, run: TrainingRun,
                 timeout_s: float | None = None) -> None:
        self._callbacks, self._is_fatal, self._run = tuple(callbacks), is_fatal, run
        self._timeout_s = timeout_s
        self._evaluation: Evaluation | None = None
        self._num_lost = 0
        self._reported: BaseException | None = None
        self.stop_reason: str | None = None
        for callback in self._callbacks:
            _name_uncalled(callback)
            with _exits_named(callback, "check"):
                callback.check(run)

    def __bool__(self) -> bool:
        """Return whether there are callbacks."""
        return bool(self._callbacks)

    @property
    def waiting_for_evaluations(self) -> list[str]:
        """The names of the classes of callbacks that have no effect without evaluations."""
        return [type(callback).__name__ for callback in self._callbacks if callback.needs_evaluations]

    def respond_to(self, hook: str) -> bool:
        """Return whether any callback overrides the method with the name `hook`."""
        return any(getattr(getattr(callback, hook), "__func__", None) is not getattr(Callback, hook)
                   for callback in self._callbacks)

    def call(self, hook: str, *arguments: object) -> list[object]:
        """Call a method of all callbacks, and return the results.

        Raises:
            CallbackError: A callback raised an error, and `is_fatal` is true. All other callbacks are called first.
        """
        results, first = [], None
        for callback in self._callbacks:
            try:
                with time_limit(self._timeout_s, f"{type(callback).__name__}.{hook}"):
                    result = getattr(callback, hook)(self._run, *arguments)
                    results.append(_added_numbers(result) if hook == "on_record" else result)
            except USER_ERRORS as error:  # noqa: PERF203 - every callback is called
                reraise_of_signal(error)
                text = f"{type(callback).__name__}.{hook} raised {type(error).__name__}: {error}"
                if not self._is_fatal:
                    logger.warning("%s; training continues, because on_callback_error='warn'", text)
                elif first is None:
                    first = CallbackError(text)
                    first.__cause__ = error
        if first is not None:
            raise first
        return results

    def report(self, error: BaseException) -> None:
        """Call `on_error`, unless `error` was the last error reported. Errors in `on_error` itself are only logged."""
        if error is self._reported:
            return
        self._reported = error
        try:
            self.call("on_error", error)
        except CallbackError as another:
            logger.warning("%s, while it responded to an error", another)

    def state(self) -> list[dict[str, object]]:
        """Return the class name and the state of each callback that has a state, for a checkpoint."""
        states: list[dict[str, object]] = []
        for callback in self._callbacks:
            with _exits_named(callback, "state"):
                if state := callback.state():
                    states.append({"callback": type(callback).__name__, "state": state})
        return states

    def load_state(self, states: Sequence[Mapping[str, object]]) -> None:
        """Restore the states of callbacks from a checkpoint.

        The first state of a class belongs to the first callback of this class, and so on. The run that resumes may
        therefore have further callbacks, or another order. A state that no callback takes is logged.
        """
        left = [(saved["callback"], saved["state"]) for saved in states]
        for callback in self._callbacks:
            name = type(callback).__name__
            if (place := next((i for i, (owner, _) in enumerate(left) if owner == name), None)) is not None:
                state = left.pop(place)[1]
                assert isinstance(state, Mapping)  # the learner has checked the checkpoint
                with _exits_named(callback, "load_state"):
                    callback.load_state(state)
        if left:
            logger.warning("the checkpoint contains states of callbacks that this run does not have: %s",
                           ", ".join(str(owner) for owner, _ in left))

    def evaluated(self, evaluation: Evaluation | None) -> None:
        """Call `on_evaluation` if there is an evaluation that has not been reported yet."""
        if evaluation is not None and evaluation is not self._evaluation:
            self._evaluation = evaluation
            self.call("on_evaluation", evaluation)

    def recorded(self, record: Mapping[str, object]) -> Mapping[str, object]:
        """Call `on_record`, and return the record with the numbers that callbacks add."""
        added: dict[str, object] = {}
        for found in self.call("on_record", record):
            if isinstance(found, Mapping):
                added.update(found)
        return {**record, "callbacks": added} if added else record

    def count_lost(self, num_lost: int) -> None:
        """Call `on_worker_lost` if the total number of lost workers has increased."""
        if num_lost > self._num_lost:
            new, self._num_lost = num_lost - self._num_lost, num_lost
            self.call("on_worker_lost", new)


def _name_uncalled(callback: Callback) -> None:
    """Warn of methods that look like methods of `Callback` under another name, because nothing calls them."""
    hooks = [name for name in vars(Callback) if name.startswith("on_")]
    own = [name for kind in type(callback).__mro__ if not issubclass(Callback, kind) for name in vars(kind)]
    for name in dict.fromkeys(own):
        # Stable-Baselines3 calls methods such as `_on_step`. Other private methods belong to the callback itself.
        if name in hooks or not name.removeprefix("_").startswith("on_") or (
                name.startswith("_") and name[1:] not in {*hooks, *_OF_STABLE_BASELINES}):
            continue
        near = difflib.get_close_matches(name.removeprefix("_"), hooks, n=1)
        meant = f"did you mean {near[0]!r}?" if near else f"the methods of callbacks are {', '.join(hooks)}"
        logger.warning("%s.%s is not called during training; %s", type(callback).__name__, name, meant)


def _added_numbers(found: object) -> dict[str, float]:
    """Return the numbers that `on_record` returned as Python's numbers.

    Raises:
        ContractError: The result is not a mapping, or a value is not a number.
    """
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise ContractError(f"it must return a mapping from names to numbers, or None; it returned {found!r:.100}")
    return {str(name): _number(name, value) for name, value in found.items()}


def _number(name: object, value: object) -> float:
    number: object = value
    if isinstance(value, (Tensor, np.ndarray, np.generic)) and math.prod(value.shape) == 1:
        number = value.item()
    if not isinstance(number, (int, float)):
        raise ContractError(f"it must return numbers by name; {name!r} is {value!r:.100}")
    return number


@contextlib.contextmanager
def _exits_named(callback: Callback, method: str) -> Iterator[None]:
    """Raise a `CallbackError` instead of a `SystemExit` that a callback's `method` raises in the `with` block."""
    try:
        yield
    except SystemExit as error:
        reraise_of_signal(error)
        raise CallbackError(f"{type(callback).__name__}.{method} raised SystemExit: {error}") from error
