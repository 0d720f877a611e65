"""Protocols for strategies of collection and for destinations of rollouts."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from pytorchrl.scheme.transport.messages import Rollout

Deliver = Callable[[list[Rollout]], object]


class CollectionStrategy(Protocol):
    """A strategy that collects rollouts for a gradient worker.

    Attributes:
        delivered_by_lost: Number of env steps that workers delivered before they were lost. The strategy counts them,
            because a lost worker cannot report its own count.
    """

    delivered_by_lost: int

    def step(self, deliver: Deliver) -> None:
        """Collect one round, or poll the workers once; then call `deliver` with the rollouts that have arrived.

        The ledger counts the steps of these rollouts as in flight until they are queued, stored or dropped.
        """

    def num_live(self) -> int:
        """Return the number of workers that are not lost."""

    def num_in_flight(self) -> int:
        """Return the number of requests that remote workers have not yet answered with a rollout."""

    def take_send_s(self) -> float:
        """Return the seconds that messages of synchronous rounds were in transit since this method's last call."""

    def drain(self, deliver: Deliver, deadline: float) -> None:
        """Deliver the rollouts in flight and make no new requests; workers still busy at the deadline count as lost."""

    def finish(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` seconds for the rollouts in flight; count their steps, but discard the rollouts."""


class ElasticStrategy(Protocol):
    """A strategy whose number of remote workers may change between two calls of `step`.

    Workers are added and removed only at the end of the list of workers.
    """

    def limit(self, number: int) -> None:
        """Make no more requests to workers with an index of `number` or higher, until the next call of `release`.

        Any thread may call this method, even while the collector thread waits for space in the sample queue.
        """

    def release(self, number: int) -> bool:
        """Request rollouts from workers 0 to `number` - 1 only, regardless of earlier calls of `limit`.

        Return whether all other workers have delivered the rollouts that were requested from them.
        """

    def resized(self, number: int, closed: Sequence[tuple[int, int] | None]) -> None:
        """Adapt to the list of workers after workers were added or removed.

        Args:
            number: New number of workers.
            closed: For each removed worker, the result of `CWorker.close`, or None if the worker did not respond.
        """


class RoundStrategy(CollectionStrategy, Protocol):
    """A strategy that collects in rounds; the learner waits for each round."""

    def collect(self) -> list[Rollout]:
        """Collect a round, and return the rollouts that contain valid steps.

        The ledger counts these steps as in flight until the caller books them as queued or dropped.
        """

    def request_ahead(self, num_steps: int) -> None:
        """Start enough rounds to collect at least `num_steps` steps; later calls of `collect` return these rounds.

        Steps are counted as in `RolloutHeader.size`. If the local worker collects, this method does nothing.
        """


class Destination(Protocol):
    """The receiver of rollouts: a sample queue, or replay.

    The methods are called by the collector thread, or by the learner's thread while the collector thread is paused.
    """

    @property
    def queue(self) -> queue.Queue[Any]:  # each destination has its own type of entries
        """The queue from which the learner takes its data; a user's own loop may also take entries, or add some."""

    @property
    def delays_requests(self) -> bool:
        """Whether rollouts are requested only while `may_request` returns True."""

    def put(self, rollouts: list[Rollout]) -> None:
        """Accept rollouts that the ledger counts as in flight; wait for free space, unless collection is closing."""

    def may_request(self, num_in_flight: int) -> bool:
        """Return whether another rollout may be requested while `num_in_flight` rollouts are in flight.

        This method is called only if `delays_requests` is True.
        """

    def poll(self) -> None:
        """Handle pending responses of replay shards, if there are any, without blocking."""

    def begin_drain(self) -> None:
        """Make room for the rollouts that still arrive during a drain; the learner takes no data meanwhile.

        This method may be called repeatedly during a drain.
        """

    def put_late(self, rollouts: list[Rollout], deadline: float) -> None:
        """Accept rollouts that arrive during a drain: replay stores them, but a sample queue discards them."""

    def end_drain(self, deadline: float) -> None:
        """End a drain after all rollouts have arrived: empty the queue, or wait until replay has stored them."""
