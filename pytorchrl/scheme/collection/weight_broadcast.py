"""When each remote collection worker receives new weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pytorchrl.runtime import Handle, Runtime
from pytorchrl.scheme.collection.c_worker import CWorker
from pytorchrl.scheme.timing import Stopwatch
from pytorchrl.scheme.transport.encoder import Compression, Traffic
from pytorchrl.scheme.transport.weight_sync import WeightSync

Due = Callable[[int, int], bool]
"""Whether a worker should receive new weights: from the version that it has, and the env steps that it delivered with
it."""


class WeightBroadcast:
    """Attaches the local worker's weights to the next requests of the remote workers for which they are due.

    Args:
        local_worker: Parameter server of the workers.
        workers: The remote workers; replacements take the places of lost workers.
        runtime: Where the workers run.
        watch: Times the publishing of weights ("push").
        broadcast_interval: Updates after which a worker receives new weights.
        max_weight_sync_delay: Env steps of a worker after which it receives the newest weights; replaces
            `broadcast_interval`.
        compression: Codec of the weights; None: they are not compressed.

    Attributes:
        local_worker, watch: As given.
        num_sent: Number of weights sent so far; weights for two workers count twice.
        num_rollouts_since: Number of rollouts received since weights were last attached.
    """

    def __init__(self, local_worker: CWorker, workers: Sequence[Handle[CWorker]], runtime: Runtime, watch: Stopwatch, *,
                 broadcast_interval: int = 1, max_weight_sync_delay: int | None = None,
                 compression: Compression | None = None) -> None:
        self.local_worker, self.watch, self._journal = local_worker, watch, local_worker.journal
        self._interval, self._max_delay = broadcast_interval, max_weight_sync_delay
        self._sync = WeightSync(runtime, compression, getattr(local_worker.algo, "groups", ()), workers)
        self._attached: list[Any] = [None] * len(workers)  # references, until the worker's next request
        # -1: workers receive even the first weights, so that equal starts do not depend on equal initialization
        # everywhere.
        self._versions = [-1] * len(workers)
        self._steps = [0] * len(workers)  # env steps delivered since the worker's weights were attached
        self.num_sent = self.num_rollouts_since = 0

    @property
    def bytes_out(self) -> int:
        """Bytes of the weights sent so far."""
        return self._sync.bytes_out

    @property
    def traffic(self) -> Traffic:
        """Totals of the weights sent so far."""
        return self._sync.traffic

    def versions(self) -> list[int]:
        """Return the version of the weights that each worker was last sent; -1 if none."""
        return list(self._versions)

    def is_due(self) -> bool:
        """Return whether any worker should receive new weights."""
        return any(self._due(version, steps) for version, steps in zip(self._versions, self._steps, strict=True))

    def attach_newer(self) -> None:
        """Attach the weights to the next request of each worker whose weights are older."""
        self._attach(lambda version, steps: version < self.local_worker.version)

    def attach_due(self, only: int | None = None) -> None:
        """Attach the weights to the next request of each worker (or of one) for which they are due."""
        self._attach(self._due, only)

    def _due(self, version: int, steps: int) -> bool:
        age = self.local_worker.version - version
        if self._max_delay is None:
            return version < 0 or age >= self._interval
        return version < 0 or (age > 0 and steps >= self._max_delay)

    def _attach(self, due: Due, only: int | None = None) -> None:
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

    def take(self, index: int) -> Any:
        """Return a reference to the weights for a worker's next request; None if the worker keeps those that it has.

        The worker receives the `Weights` that the reference stands for.
        """
        weights, self._attached[index] = self._attached[index], None
        if weights is not None:
            self.num_sent += 1
            self._sync.count()
        return weights

    def delivered(self, index: int, num_env_steps: int) -> None:
        """Count the env steps of a rollout that a worker delivered."""
        self._steps[index] += num_env_steps

    def forget(self, index: int) -> None:
        """Forget what a lost worker received: its replacement needs weights."""
        self._attached[index], self._versions[index], self._steps[index] = None, -1, 0
