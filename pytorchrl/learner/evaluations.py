"""Run evaluations of a scheme while it trains."""

from __future__ import annotations

from collections.abc import Callable

from pytorchrl.errors import StoppedError, WorkerLostError
from pytorchrl.scheme import Evaluation, Scheme
from pytorchrl.support.terminal import get_logger

logger = get_logger(__name__)

_TIMEOUT_S = 600.0


class Evaluations:
    """Evaluations of one scheme, at most one at a time. A failed evaluation is logged, and training continues.

    Args:
        scheme: The scheme.
        timeout_s: Time limit of an evaluation in seconds. None: `wait` and `play` wait at most ten minutes, and there
            is no other limit.

    Attributes:
        last: The newest result; None before the first evaluation has finished.
    """

    def __init__(self, scheme: Scheme, timeout_s: float | None = None) -> None:
        self._scheme, self._timeout_s = scheme, timeout_s
        self._is_running = False
        self.last: Evaluation | None = None

    @property
    def is_running(self) -> bool:
        """Whether an evaluation was started, and its end has not yet been noticed by `poll` or `wait`."""
        return self._is_running

    def start(self, num_episodes: int) -> None:
        """Start an evaluation that runs while training continues."""
        self._scheme.start_evaluation(num_episodes, self._timeout_s)
        self._is_running = True

    def poll(self) -> bool:
        """Return whether the running evaluation has finished since the last call; if so, its result is in `last`."""
        return self._finish(self._scheme.poll_evaluation)

    def wait(self) -> bool:
        """Wait for the running evaluation, if there is one; return whether there is a new result in `last`."""
        return self._finish(lambda: self._scheme.wait_evaluation(self._timeout_s or _TIMEOUT_S))

    def play(self, num_episodes: int) -> Evaluation:
        """Evaluate, wait for the result and return it, without changing `last`.

        Raises:
            StoppedError: The scheme was stopped during the evaluation.
        """
        self._scheme.start_evaluation(num_episodes, self._timeout_s)
        evaluation = self._scheme.wait_evaluation(self._timeout_s or _TIMEOUT_S)
        if evaluation is None:
            raise StoppedError("the scheme was stopped during an evaluation")
        return evaluation

    def keep(self, evaluation: Evaluation) -> None:
        """Store a result in `last`."""
        self._is_running, self.last = False, evaluation

    def _finish(self, find: Callable[[], Evaluation | None]) -> bool:
        evaluation = None
        try:
            evaluation = find() if self._is_running else None
        except Exception as error:
            if isinstance(error, WorkerLostError) and self._scheme.settings["on_worker_failure"] == "raise":
                raise
            self._is_running = False
            logger.warning("an evaluation failed, so there is no result: %s", error)
        if evaluation is None:
            return False
        self.keep(evaluation)
        return True
