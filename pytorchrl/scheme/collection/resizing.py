"""Change the number of collection workers of a gradient worker during a run.

Workers with the largest indices leave, and new workers have the next indices. A leaving worker receives no further
requests, delivers the rollouts that were requested earlier, and is then closed, so no step is lost. A new worker starts
like the replacement of a lost worker: its first request contains the newest weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from pytorchrl.scheme.ledger import DropReason, Ledger

if TYPE_CHECKING:
    from pytorchrl.runtime import Handle
    from pytorchrl.scheme.collection.c_worker import CWorker
    from pytorchrl.scheme.collection.protocols import ElasticStrategy
    from pytorchrl.scheme.collection.recipe import CWorkerRecipe
    from pytorchrl.scheme.collection.weight_broadcast import WeightBroadcast
    from pytorchrl.scheme.supervision.supervisor import Supervisor
    from pytorchrl.scheme.transport.messages import Rollout
    from pytorchrl.scheme.transport.requests import Requests

NOT_ELASTIC = ("num_col_workers cannot change, because collection is central: the gradient worker's process collects; "
               "start with num_col_workers >= 2, or with col_execution='Parallel' for one remote worker")
"""Message of the error for a change of `num_col_workers` in a scheme in which this number is fixed."""
Closed = tuple[int, int] | None
"""The result of `CWorker.close`; None if the worker did not respond."""


class _Request(NamedTuple):
    num_col_workers: int | tuple[int, ...]
    resources: Mapping[str, float] | None


class ElasticSet(Protocol):
    """A set of collection workers whose number may change; see `CWorkerSet`."""

    index_parent: int

    def remote_workers(self) -> list[Handle[CWorker]]:
        """Return the list of the workers' handles; `follow` changes this list."""

    def recipe_for(self, num_col_workers: int | tuple[int, ...]) -> CWorkerRecipe:
        """Return a copy of the recipe that builds this set, with another value of `num_col_workers`."""

    def close_from(self, place: int) -> list[Closed]:
        """Close the workers in `remote_workers()` from index `place` on; return the result of each `CWorker.close`."""

    def follow(self, num_col_workers: int | tuple[int, ...], resources: Mapping[str, float] | None = None) -> None:
        """Start or kill workers until their number matches the new value of the option `num_col_workers`."""


class Resizing:
    """Queue of requests to change the number of collection workers; the collecting thread applies the changes.

    Args:
        workers: The set of collection workers.
        strategy: The strategy that makes requests to the workers.
        supervisor: The supervisor of the workers.
        plan: Function that adapts the sizes of batches to a new number of workers.
    """

    def __init__(self, workers: ElasticSet, strategy: ElasticStrategy, supervisor: Supervisor,
                 plan: Callable[[int], object]) -> None:
        self._workers, self._strategy, self._supervisor, self._plan = workers, strategy, supervisor, plan
        self._requests: deque[_Request] = deque()

    def request(self, num_col_workers: int | tuple[int, ...], resources: Mapping[str, float] | None) -> None:
        """Request a new number of workers, which takes effect in `apply`; any thread may call this method.

        Args:
            num_col_workers: New value of the option `num_col_workers`, which applies to all gradient workers.
            resources: Resources of each new worker; None: the resources of the earlier workers.
        """
        request = _Request(num_col_workers, resources)
        self._requests.append(request)
        self._strategy.limit(self._number(request))

    def _number(self, request: _Request) -> int:
        return self._workers.recipe_for(request.num_col_workers).num_workers_of(self._workers.index_parent)

    def apply(self) -> None:
        """Apply the requested changes in order; stop before a change that removes workers with unfinished requests.

        The collecting thread calls this method between two polls or, if collection is synchronous, between two train
        batches.
        """
        while self._requests:
            number = self._number(self._requests[0])
            if not self._strategy.release(number):
                return
            closed = self._workers.close_from(number)
            self._workers.follow(*self._requests.popleft())
            self._supervisor.resized()
            self._strategy.resized(number, closed)
            self._plan(number)


class Elastic(ABC):
    """Base class of strategies that can add and remove remote workers during a run; see `ElasticStrategy`."""

    _workers: list[Handle[CWorker]]
    _supervisor: Supervisor
    _ledger: Ledger
    _weights: WeightBroadcast
    _in_flight: Requests[Rollout]
    _arrived: defaultdict[int, deque[Rollout]]
    _delivered: list[int]
    _num_requests: list[int]
    _num_asked: int
    """Number of workers that receive requests: workers from this index on are leaving."""
    delivered_by_lost: int

    @abstractmethod
    def _request_replacement(self, index: int) -> None:
        """Make the first requests to a worker that was added or that replaces a lost worker."""

    def _asked(self) -> list[int]:
        """Return the indices of the workers that receive requests: they are neither lost nor leaving."""
        return [index for index in range(self._num_asked) if index not in self._supervisor.gone]

    def limit(self, number: int) -> None:
        """Make no more requests to workers with an index of `number` or higher, until the next call of `release`."""
        self._num_asked = min(self._num_asked, number)

    def release(self, number: int) -> bool:
        """Request rollouts from workers 0 to `number` - 1 only, regardless of earlier calls of `limit`.

        Return whether all other workers have delivered the rollouts that were requested from them.
        """
        self._num_asked = number
        return all(index < number for index in (*self._in_flight.owners(), *self._arrived))

    def resized(self, number: int, closed: Sequence[Closed]) -> None:
        """Forget the workers from index `number` on, and make requests to new workers; see `ElasticStrategy`."""
        before = len(self._delivered)
        for delivered, counts in zip(self._delivered[number:], closed, strict=True):
            self.delivered_by_lost += book_closed(self._ledger, delivered, counts)
        more = max(0, number - before)
        self._delivered = [*self._delivered[:number], *[0] * more]
        self._num_requests = [*self._num_requests[:number], *[0] * more]
        self._weights.resize(number)
        for index in range(before, number):
            self._request_replacement(index)


def book_closed(ledger: Ledger, delivered: int, counts: Closed) -> int:
    """Count the undelivered steps of a closed worker as dropped; return how many steps the worker has collected.

    Args:
        ledger: The gradient worker's ledger.
        delivered: Number of steps that the worker has delivered.
        counts: The result of `CWorker.close`; None: only the delivered steps are known.
    """
    if counts is None:
        return delivered
    made, undelivered = counts
    ledger.collect(undelivered)
    ledger.drop(undelivered, "in_flight", DropReason.SHUTDOWN)
    return made
