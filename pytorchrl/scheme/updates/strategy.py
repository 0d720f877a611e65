"""The base class of update strategies, and code that several strategies use."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from pytorchrl.scheme.transport.messages import Gradients, Moments, WholeState
from pytorchrl.scheme.updates.statistics import Statistics
from pytorchrl.support.untyped import StateDict

WorkerState = StateDict
"""The result of `GWorker.state`: plain values and tensors by name."""


class UpdateStrategy(ABC):
    """A strategy that turns gradients into updates; it is chosen when the worker tree is built."""

    @abstractmethod
    def step(self) -> None:
        """Make one update and record it."""

    def send_requests(self) -> None:
        """Send the requests for the next step in advance, if there are any, so that workers compute in the meantime."""

    def finish(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` seconds for gradients in flight; each one that arrives is recorded as dropped."""

    def finish_collection(self) -> bool:
        """Collect no more data before the next drain; return whether steps may use data that were collected already.

        The default does nothing. Several gradient workers have different amounts of data, but wait for each other.
        """
        return False

    @property
    def is_used_up(self) -> bool:
        """Whether `step` does nothing, because all data have been used since `finish_collection`."""
        return False

    def prepare_drain(self) -> None:
        """End a step that another thread makes and that is waiting for data, because `drain` will be called next."""

    @abstractmethod
    def drain(self, timeout_s: float) -> None:
        """Finish or discard all work, so that nothing is in flight or queued; the next step resumes work."""

    @property
    def is_between_train_batches(self) -> bool:
        """Whether all workers have used up their train batches, so that each starts a new one in the next step.

        The default is True, for strategies whose workers use up their train batches at different times: a caller that
        waited for all of these workers could wait forever.
        """
        return True

    @abstractmethod
    def state(self) -> tuple[WholeState, list[WorkerState | None]]:
        """Return the algorithm's state and the workers' states (None for lost workers); call this after a drain."""

    @abstractmethod
    def restore(self, whole: WholeState, workers: Sequence[WorkerState | None]) -> None:
        """Restore a saved state, before the first step."""

    @abstractmethod
    def reseed(self, seed: int) -> None:
        """Reseed the worker tree after a drain; see `GWorker.reseed`."""

    @abstractmethod
    def resize(self, num_col_workers: int | tuple[int, ...], resources: Mapping[str, float] | None) -> None:
        """Change the number of collection workers of each gradient worker; see `GWorker.resize`.

        If the calling thread also calls `step`, call this method between two steps. If another thread calls `step`,
        this method may be called at any time.
        """

    def forget_weights(self) -> None:
        """Let the next requests contain the weights again, even if the version of the weights has not changed."""

    def pull_weights(self, timeout_s: float) -> None:
        """If remote workers apply the updates, copy the newest weights of such a worker to the local worker."""


def discard_empty(statistics: Statistics, gradients: Sequence[Gradients]) -> list[Gradients]:
    """Record empty gradients (see `Gradients.is_empty`) in the statistics, and return the other gradients.

    Raises:
        CollectionError: Too many gradients in a row were empty.
    """
    useful = []
    for gradient in gradients:
        if gradient.is_empty:
            statistics.empty(gradient)
        else:
            useful.append(gradient)
    statistics.check_not_empty()
    return useful


def record_update(statistics: Statistics, gradients: Sequence[Gradients], version: int, info: Mapping[str, float],
                  applied: Mapping[str, float] | None) -> None:
    """Record an update from these gradients, or a skipped update if `applied` is None.

    All workers that apply an update use the same mean gradient, so either all of them skip the update, or none does.

    Raises:
        NonFiniteUpdateError: Too many updates in a row were skipped.
    """
    if applied is None:
        statistics.skip(gradients)
    else:
        statistics.apply(gradients, version, {**info, **applied})


class PendingMoments:
    """Moments of collected data, stored until the train batch is used up; they then update the normalizers."""

    def __init__(self) -> None:
        self._pending: list[dict[str, Moments]] = []

    def add(self, gradients: Sequence[Gradients]) -> None:
        """Add the moments (`Gradients.moments`) that arrived with these gradients."""
        self._pending += [moments for gradient in gradients for moments in gradient.moments]

    def take(self) -> tuple[dict[str, Moments], ...]:
        """Return and remove all moments; call this when their train batch is used up."""
        pending, self._pending = tuple(self._pending), []
        return pending

    def discard(self) -> None:
        """Remove all moments; call this when their train batch is dropped."""
        self._pending = []
