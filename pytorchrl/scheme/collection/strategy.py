"""The base classes of strategies of collection."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

from typing_extensions import override

from pytorchrl.errors import WorkerLostError
from pytorchrl.runtime import Handle, Runtime
from pytorchrl.scheme.collection.weight_broadcast import WeightBroadcast
from pytorchrl.scheme.ledger import DropReason, Ledger
from pytorchrl.scheme.supervision.supervisor import Supervisor
from pytorchrl.scheme.timing import Stopwatch
from pytorchrl.scheme.transport.messages import Rollout
from pytorchrl.scheme.transport.requests import POLL_INTERVAL_S, Requests

W = TypeVar("W")
A = TypeVar("A")

Deliver = Callable[[list[Rollout]], object]
Closed = tuple[int, int] | None
"""The result of `CWorker.close`; None if the worker did not respond."""


class CollectionStrategy(ABC):
    """A strategy that collects rollouts for a gradient worker.

    Args:
        ledger: The gradient worker's ledger.
        watch: Stopwatch that measures the delivery of rollouts ("receive"), including waits for queue space.

    Attributes:
        delivered_by_lost: Number of env steps that workers delivered before they were lost. The strategy counts them,
            because a lost worker cannot report its own count.
    """

    def __init__(self, ledger: Ledger, watch: Stopwatch) -> None:
        self._ledger, self._watch = ledger, watch
        self.delivered_by_lost = 0

    @abstractmethod
    def step(self, deliver: Deliver) -> None:
        """Collect one round, or poll the workers once; then call `deliver` with the rollouts that have arrived.

        The ledger counts the steps of these rollouts as in flight until they are queued, stored or dropped.
        """

    def _book(self, rollouts: list[Rollout]) -> list[Rollout]:
        """Count the env steps of rollouts as collected, and return the rollouts that contain env steps."""
        self._ledger.collect(sum(rollout.header.num_env_steps for rollout in rollouts))
        return [rollout for rollout in rollouts if rollout.header.num_env_steps]

    def _deliver(self, rollouts: list[Rollout], deliver: Deliver) -> None:
        with self._watch.part("receive"):
            if valid := self._book(rollouts):
                deliver(valid)

    @abstractmethod
    def num_live(self) -> int:
        """Return the number of workers that are not lost."""

    def num_in_flight(self) -> int:
        """Return the number of requests that remote workers have not yet answered."""
        return 0

    def take_send_s(self) -> float:
        """Return the seconds that messages of synchronous rounds were in transit since this method's last call."""
        return 0.0

    @abstractmethod
    def drain(self, deliver: Deliver, deadline: float) -> None:
        """Deliver the rollouts in flight and make no new requests; workers still busy at the deadline count as lost.

        The next call of `step` starts collection again.

        Raises:
            Exception: An error of a worker, or the supervisor's error for a lost worker.
        """

    def finish(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` seconds for the rollouts in flight; count their steps, but discard the rollouts."""


class RoundStrategy(CollectionStrategy):
    """A strategy that collects in rounds; the learner waits for each round."""

    @abstractmethod
    def _collect(self) -> list[Rollout]:
        """Collect a round, and return its rollouts."""

    @override
    def step(self, deliver: Deliver) -> None:
        self._deliver(self._collect(), deliver)

    def collect(self) -> list[Rollout]:
        """Collect a round, and return the rollouts that contain valid steps.

        The ledger counts these steps as in flight until the caller books them as queued or dropped.

        Raises:
            CollectionError: The round took longer than the timeout.
        """
        rollouts = self._collect()
        with self._watch.part("receive"):
            return self._book(rollouts)

    def request_ahead(self, num_steps: int) -> None:
        """Start enough rounds to collect at least `num_steps` steps; later calls of `collect` return these rounds.

        Steps are counted as in `RolloutHeader.size`. If the local worker collects, no round can be started in advance.
        """


class RemoteStrategy(CollectionStrategy, Generic[W, A]):
    """A strategy with remote workers, whose number may change between two calls of `step`.

    Workers are added and removed only at the end of the list of workers.

    Args:
        workers: Handles of the remote workers; each replacement is stored at the index of the lost worker.
        runtime: Runtime of the workers.
        supervisor: Supervisor that replaces lost workers.
        ledger: The gradient worker's ledger.
        weights: The object that attaches new weights to requests.
        seconds_of: Function that returns the working time that an answer reports; see `Requests`.
        numbers_of: Function that returns the numbers by which a replay checks an answer; see `Requests`.
    """

    def __init__(self, workers: list[Handle[W]], runtime: Runtime, supervisor: Supervisor, ledger: Ledger,
                 weights: WeightBroadcast, seconds_of: Callable[[A], float],
                 numbers_of: Callable[[A], tuple[int, ...]]) -> None:
        super().__init__(ledger, weights.watch)
        self._workers, self._runtime, self._supervisor, self._weights = workers, runtime, supervisor, weights
        self._journal = weights.local_worker.journal
        self._num_asked = len(workers)  # workers from this index on are leaving
        # Other threads use `_in_flight` only after the collector thread has ended.
        self._in_flight: Requests[A] = Requests(
            runtime, supervisor, self._journal, seconds_of, numbers_of, self._forget, self._request_replacement)
        self._is_draining = False

    @abstractmethod
    def _forget(self, index: int) -> None:
        """Reset the counts of a lost worker, and add its count of delivered env steps to `delivered_by_lost`."""

    def _request_replacement(self, index: int) -> None:
        """Make the first requests to a worker that was added or replaces a lost worker, unless `step` makes them."""

    @override
    def num_live(self) -> int:
        return len(self._workers) - len(self._supervisor.gone)

    @override
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @override
    def _book(self, rollouts: list[Rollout]) -> list[Rollout]:
        self._weights.num_rollouts_since += len(rollouts)
        return super()._book(rollouts)

    def _poll(self, timeout_s: float = POLL_INTERVAL_S) -> Iterator[tuple[int, A]]:
        """Yield (worker index, answer) for each finished request; wait at most `timeout_s` seconds for one."""
        return self._in_flight.poll(timeout_s)

    def _await_all(self, handle: Callable[[int, A], object], deadline: float) -> None:
        """Call `handle` with all answers in flight; workers that have not answered by the deadline count as lost."""
        self._is_draining = True
        try:
            while len(self._in_flight) and self._runtime.now() < deadline:
                for index, answer in self._poll():
                    handle(index, answer)
            for index in sorted(set(self._in_flight.owners())):
                self._in_flight.lose(index, WorkerLostError(f"{self._workers[index].name} delivered nothing before the "
                                                            "end of drain()"))
        finally:
            self._is_draining = False

    def _deliver_late(self, rollouts: list[Rollout], deliver: Deliver) -> None:
        self._ledger.collect(sum(rollout.header.num_env_steps for rollout in rollouts))
        deliver(rollouts)

    # Changes of the number of workers

    def limit(self, number: int) -> None:
        """Make no more requests to workers with an index of `number` or higher, until the next call of `release`.

        Any thread may call this method, even while the collector thread waits for space in the sample queue.
        """
        self._num_asked = min(self._num_asked, number)

    @abstractmethod
    def release(self, number: int) -> bool:
        """Request rollouts from workers 0 to `number` - 1 only, regardless of earlier calls of `limit`.

        Return whether all other workers have delivered the rollouts that were requested from them.
        """

    @abstractmethod
    def resized(self, number: int, closed: Sequence[Closed]) -> None:
        """Adapt to the list of workers after workers were added or removed.

        Args:
            number: New number of workers.
            closed: For each removed worker, the result of `CWorker.close`, or None if the worker did not respond.
        """

    def _book_closed(self, delivered: int, counts: Closed) -> None:
        """Count the undelivered steps of a closed worker as dropped, and add all its steps to `delivered_by_lost`.

        Args:
            delivered: Number of steps that the worker has delivered.
            counts: The result of `CWorker.close`; None: only the delivered steps are known.
        """
        num_steps, undelivered = counts or (delivered, 0)
        self._ledger.collect(undelivered)
        self._ledger.drop(undelivered, "in_flight", DropReason.SHUTDOWN)
        self.delivered_by_lost += num_steps
