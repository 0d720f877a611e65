"""Change the number of collection workers of a gradient worker during a run.

Workers with the largest indices leave, and new workers have the next indices. A leaving worker receives no further
requests, delivers the rollouts that were requested earlier, and is then closed, so no step is lost. A new worker starts
like the replacement of a lost worker: its first request contains the newest weights.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pytorchrl.scheme.collection.c_worker import CWorker
    from pytorchrl.scheme.collection.c_worker_set import CWorkerSet
    from pytorchrl.scheme.collection.env_worker import EnvAnswer, EnvWorker
    from pytorchrl.scheme.collection.strategies import RemoteStrategy
    from pytorchrl.scheme.supervision.supervisor import Supervisor
    from pytorchrl.scheme.transport.messages import Rollout

NOT_ELASTIC = ("num_col_workers cannot change, because collection is central: the gradient worker's process collects; "
               "start with num_col_workers >= 2, or with col_execution='Parallel' for one remote worker")
"""Message of the error for a change of `num_col_workers` in a scheme in which this number is fixed."""


class _Request(NamedTuple):
    num_col_workers: int | tuple[int, ...]
    resources: Mapping[str, float] | None


class Resizing:
    """Queue of requests to change the number of collection workers; the collecting thread applies the changes.

    Args:
        workers: The set of collection workers.
        strategy: The strategy that makes requests to the workers.
        supervisor: The supervisor of the workers.
        plan: Function that adapts the sizes of batches to a new number of workers.

    Attributes:
        peak: Largest number of requests that have waited at the same time; the collecting thread updates it.
    """

    def __init__(self, workers: CWorkerSet,
                 strategy: RemoteStrategy[CWorker, Rollout] | RemoteStrategy[EnvWorker, EnvAnswer],
                 supervisor: Supervisor, plan: Callable[[int], object]) -> None:
        self._workers, self._strategy, self._supervisor, self._plan = workers, strategy, supervisor, plan
        self._requests: deque[_Request] = deque()
        self.peak = 0

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
            self.peak = max(self.peak, len(self._requests))
            number = self._number(self._requests[0])
            if not self._strategy.release(number):
                return
            closed = self._workers.close_from(number)
            self._workers.follow(*self._requests.popleft())
            self._supervisor.resized()
            self._strategy.resized(number, closed)
            self._plan(number)
