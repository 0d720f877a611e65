"""Run evaluations in parallel with training, one at a time, on a separate worker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

from pytorchrl.errors import WorkerDiedError, WorkerLostError
from pytorchrl.runtime import Future, Handle, Runtime
from pytorchrl.scheme.supervision.evaluation import Evaluation, Evaluator
from pytorchrl.scheme.transport.messages import Weights
from pytorchrl.support.terminal import get_logger

_MAX_RETRIES = 2
# Seconds to wait for the call stack of a worker that hangs, and again for the worker to end.
_STACK_TIMEOUT_S = 1.0

logger = get_logger(__name__)


class Evaluations:
    """Runs evaluations, one at a time, on a separate worker.

    Args:
        runtime: The runtime in which the evaluation worker runs.
        parameters: Keyword arguments of `Evaluator`.
        retries: Whether to repeat an evaluation on a new worker, at most twice, if its worker dies. Without retries,
            the death of the worker raises `WorkerLostError`.

    Attributes:
        worker: The evaluation worker; None before the first evaluation.
    """

    def __init__(self, runtime: Runtime, parameters: Mapping[str, object], retries: bool) -> None:
        self._runtime, self._parameters, self._retries = runtime, dict(parameters), retries
        self.worker: Handle[Evaluator] | None = None
        self._running: Future[Evaluation | None] | None = None
        self._request: tuple[Weights, int] | None = None
        self._lost = 0
        self._deadline: float | None = None

    def start(self, weights: Weights, num_episodes: int, timeout_s: float | None = None) -> None:
        """Start an evaluation of `weights` with a time limit in seconds; None: no limit."""
        self._request, self._lost = (weights, num_episodes), 0
        self._deadline = None if timeout_s is None else self._runtime.now() + timeout_s
        self._submit()

    def _submit(self) -> None:
        assert self._request is not None
        if self.worker is None:
            self.worker = self._runtime.start_actor(
                Evaluator, self._parameters, name="Evaluator", resources={"num_cpus": 0})
        self._running = self.worker.submit(Evaluator.evaluate, *self._request)

    def poll(self) -> Evaluation | None:
        """Return the evaluation if it has finished, else None. Each evaluation is returned once."""
        if self._running is None:
            return None
        if not self._runtime.wait([self._running], 0.0):
            if self._deadline is not None and self._runtime.now() > self._deadline:
                self._give_up()
            return None
        return self._take(1.0)

    def wait(self, timeout_s: float) -> Evaluation | None:
        """Wait until the running evaluation ends, and return its result.

        Return None if no evaluation is running, or if the evaluation was interrupted.

        Raises:
            WorkerLostError: The evaluation did not end within `timeout_s` seconds or its own time limit, or its worker
                died and no retries are left.
        """
        evaluation = None
        while evaluation is None and self._running is not None:
            left = timeout_s if self._deadline is None else max(0.0, self._deadline - self._runtime.now())
            if not self._runtime.wait([self._running], min(left, timeout_s)):
                self._give_up()
            evaluation = self._take(timeout_s)
        return evaluation

    def _give_up(self) -> NoReturn:
        """End the worker of an evaluation that takes too long, and raise an error with the worker's stack."""
        worker, self.worker, self._running = self.worker, None, None
        assert worker is not None
        stack = self._runtime.outcome(worker.signal(Evaluator.stack), _STACK_TIMEOUT_S)
        self._runtime.kill(worker, _STACK_TIMEOUT_S)
        place = f"in\n{stack.value}" if stack.value else f"not answering ({stack.error or 'it is still starting'})"
        raise WorkerLostError(f"the evaluation has not ended in time; its worker is {place}")

    def _take(self, timeout_s: float) -> Evaluation | None:
        assert self._running is not None
        future, self._running = self._running, None
        outcome = self._runtime.outcome(future, timeout_s)
        if not isinstance(outcome.error, WorkerDiedError):
            return outcome.unwrap()
        self._lost += 1
        if not self._retries or self._lost > _MAX_RETRIES:
            raise WorkerLostError(str(outcome.error)) from outcome.error
        logger.warning("%s; the evaluation restarts on a new worker", outcome.error)
        self.worker = None
        self._submit()
        return None

    def interrupt(self) -> None:
        """Signal the worker to end its evaluation early."""
        if self.worker is not None:
            self.worker.signal(Evaluator.interrupt)
