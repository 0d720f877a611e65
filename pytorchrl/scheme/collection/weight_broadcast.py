"""Decide when each remote collection worker receives new weights, and send them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pytorchrl.runtime import Handle, Runtime
from pytorchrl.scheme.collection.c_worker import CWorker
from pytorchrl.scheme.timing import Stopwatch
from pytorchrl.scheme.transport.encoder import Compression, Traffic
from pytorchrl.scheme.transport.weight_sync import WeightSync
from pytorchrl.support.untyped import Payload

IsDue = Callable[[int, int], bool]
"""A function that returns whether a worker should receive new weights, given the version of its weights and the number
of env steps that it has delivered since these weights were attached."""


class WeightBroadcast:
    """Send the local worker's weights to remote workers.

    If a remote worker is due for new weights, they are attached to the next request that the worker receives.

    Args:
        local_worker: The worker whose weights are sent.
        workers: Handles of the remote workers; each replacement is stored at the index of the lost worker.
        runtime: Runtime of the workers.
        watch: Stopwatch that measures the time to encode and store weights ("push").
        broadcast_interval: Number of updates after which a worker is due for new weights.
        max_weight_sync_delay: Number of env steps that a worker collects until it is due for newer weights; replaces
            `broadcast_interval`. None: `broadcast_interval` applies.
        compression: Codec of the weights; None: no compression.

    Attributes:
        local_worker, watch: As given.
        num_sent: Number of weight messages so far; weights that are sent to two workers count twice.
        num_rollouts_since: Number of rollouts received since weights were last attached.
    """

    def __init__(self, local_worker: CWorker, workers: Sequence[Handle[CWorker]], runtime: Runtime, watch: Stopwatch, *,
                 broadcast_interval: int, max_weight_sync_delay: int | None,
                 compression: Compression | None) -> None:
        self.local_worker, self.watch, self._journal = local_worker, watch, local_worker.journal
        self._interval, self._max_delay = broadcast_interval, max_weight_sync_delay
        self._sync = WeightSync(runtime, compression, getattr(local_worker.algo, "groups", ()), workers)
        self._attached: list[Payload] = [None] * len(workers)  # reference to weights for each worker's next request
        # Version -1 makes each worker due for weights at the start, because workers' initial weights may differ.
        self._versions = [-1] * len(workers)
        self._steps = [0] * len(workers)  # env steps that each worker has delivered since weights were attached for it
        self.num_sent = self.num_rollouts_since = 0

    @property
    def bytes_out(self) -> int:
        """Number of bytes of weights sent so far."""
        return self._sync.bytes_out

    @property
    def traffic(self) -> Traffic:
        """Total traffic of weights so far."""
        return self._sync.traffic

    def versions(self) -> list[int]:
        """Return, for each worker, the version of the latest weights sent to it; -1 if none were sent."""
        return list(self._versions)

    def is_due(self) -> bool:
        """Return whether any worker is due for new weights."""
        return any(self._due(version, steps) for version, steps in zip(self._versions, self._steps, strict=True))

    def attach_newer(self) -> None:
        """Attach the local worker's weights to the next request to each worker that has older weights."""
        self._attach(lambda version, steps: version < self.local_worker.version)

    def attach_due(self, only: int | None = None) -> None:
        """Attach the local worker's weights to the next request to each worker that is due for new weights.

        Args:
            only: Index of the worker to consider; None: consider all workers.
        """
        self._attach(self._due, only)

    def _due(self, version: int, steps: int) -> bool:
        age = self.local_worker.version - version
        if self._max_delay is None:
            return version < 0 or age >= self._interval
        return version < 0 or (age > 0 and steps >= self._max_delay)

    def _attach(self, due: IsDue, only: int | None = None) -> None:
        with self._journal.reading():
            start = self.watch.now()
            places = range(len(self._versions)) if only is None else (only,)
            if chosen := [place for place in places if due(self._versions[place], self._steps[place])]:
                weights = self.local_worker.get_weights()
                if not self._sync.has(weights.version):
                    self._sync.put(weights)
                for place in chosen:
                    self._attached[place] = self._sync.reference
                    self._versions[place], self._steps[place] = weights.version, 0
                self.num_rollouts_since = 0
                self.watch.count("push", self.watch.now() - start)

    def take(self, index: int) -> Payload:
        """Return the weights to send with a worker's next request, and detach them; None if none are attached.

        The result is a reference. The runtime resolves this reference, so the worker receives the `Weights`.
        """
        weights, self._attached[index] = self._attached[index], None
        if weights is not None:
            self.num_sent += 1
            self._sync.count()
        return weights

    def delivered(self, index: int, num_env_steps: int) -> None:
        """Count the env steps of a rollout that a worker delivered."""
        self._steps[index] += num_env_steps

    def resize(self, number: int) -> None:
        """Adapt to a new number of workers; new workers receive weights with their first requests."""
        more = max(0, number - len(self._versions))
        self._attached = [*self._attached[:number], *[None] * more]
        self._versions = [*self._versions[:number], *[-1] * more]
        self._steps = [*self._steps[:number], *[0] * more]

    def forget(self, index: int) -> None:
        """Reset the data about a lost worker, so that the replacement receives weights with its first request."""
        self._attached[index], self._versions[index], self._steps[index] = None, -1, 0
