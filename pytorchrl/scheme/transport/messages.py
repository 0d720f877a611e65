"""What crosses between workers: frozen, typed, with the numbers that belong to it inside."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pytorchrl.agent.data import Episode
from pytorchrl.agent.moments import Moments as Moments
from pytorchrl.runtime import WorkersPart
from pytorchrl.scheme.ledger import LedgerSnapshot
from pytorchrl.scheme.timing import Seconds, Times
from pytorchrl.scheme.transport.encoder import Sent, Traffic

Parameters = tuple[dict[str, float], dict[str, float]]
"""Values in force of the algorithm's parameters, and of the storage's."""


@dataclass(frozen=True, slots=True)
class Weights:
    """What collectors and gradient workers need to go on from a version."""

    version: int
    """Number of updates applied so far."""
    state: dict[str, Any]
    """Acting state of the algorithm: flat parameter vectors, normalisers; arrays or their packed form. Never written after it
    was made."""
    parameters: dict[str, float] = field(default_factory=dict)
    """Values of scheduled or changed algorithm parameters in force at this version."""
    learning: dict[str, Any] = field(default_factory=dict)
    """For gradient workers, what they need beyond the acting state: target networks and the like."""
    storage_parameters: dict[str, float] = field(default_factory=dict)
    """As `parameters`, of the storage."""

    @property
    def checksum(self) -> int:
        """Of all numbers of both states, bit for bit."""
        arrays = {**{f"learning {name}": array for name, array in self.learning.items()}, **self.state}
        return functools.reduce(lambda checksum, name: zlib.crc32(arrays[name].tobytes(), checksum), sorted(arrays), 0)

    @property
    def num_bytes(self) -> int:
        """Bytes of the states that cross."""
        return sum(array.nbytes for part in (self.state, self.learning) for array in part.values())


@dataclass(frozen=True, slots=True)
class WholeState:
    """What workers go on from that apply the same updates each: parameters, normalisers, targets, optimisers, counters."""

    version: int
    """Number of updates applied so far."""
    algorithm: dict[str, Any]
    """The algorithm's `state_dict()`."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """What a CWorker sends for one request."""

    data: Any
    """`RolloutData` of numpy arrays, or of their packed form."""
    num_env_steps: int
    """Valid transitions in `data`."""
    size: int
    """Steps by which it fills a batch: those of its vector times environments. A step in which an environment is reset is one
    of them and none of `num_env_steps`, so that a batch of two rollouts is two rollouts."""
    collected_steps: int
    """All env steps that this incarnation of the worker has made so far."""
    weights_version: int
    """Version of the weights at its start."""
    worker: int
    sequence: int
    """1, 2, ... by worker and incarnation."""
    incarnation: int = 0
    episodes: tuple[Episode, ...] = ()
    moments: dict[str, Moments] = field(default_factory=dict)
    """For the normalisers, by name."""
    agent_steps: dict[str, int] = field(default_factory=dict)
    """Of several policies: policy -> steps that its agents made."""
    timings: dict[str, float] = field(default_factory=dict)
    """Seconds by part of the work that it took its worker, see `timing.PARTS`."""
    num_steps: int = 0
    """Steps of its vector of environments."""
    preempted: bool = False
    """Whether it was told to stop before it was full."""
    envs_restarted: int = 0
    """Environments that this incarnation of the worker has replaced so far because they raised."""
    sent: Sent = field(default_factory=Sent)
    """How its arrays were."""
    traffic: Mapping[str, Traffic] = field(default_factory=dict)
    """By kind, what its worker has decoded of weights since its last one, and what a shard took to decode it."""

    @property
    def collect_s(self) -> float:
        """Seconds that it took its worker."""
        return sum(self.timings.values())

    @property
    def source(self) -> tuple[int, int]:
        """Whose steps go on from one rollout to the next: worker and incarnation."""
        return self.worker, self.incarnation


@dataclass(frozen=True, slots=True)
class Gradients:
    """What a GWorker sends for one request."""

    vectors: Any
    """One flat float32 array per group, or their packed form; None if it applied them itself. Of several policies one a
    policy, None for a policy that has no gradient."""
    num_samples: int
    """Env steps behind it; its weight in a mean, where there is one policy."""
    num_new_samples: int
    """Those that no earlier gradient used."""
    weights_version: int
    """Version of the weights that it was computed with."""
    worker: int
    sequence: int
    info: dict[str, float]
    """The algorithm's statistics."""
    ledger: LedgerSnapshot
    last: bool = False
    """Whether its data is used up, so that the next request starts with new data."""
    lags: tuple[tuple[int, int, int], ...] = ()
    """(worker, lag when queued, lag at first use) of each rollout that came into use from a queue."""
    drawn_lags: tuple[np.ndarray, ...] = ()
    """(K, 2) int64, (lag when sent to replay, lag when drawn) of each transition, sequence or rollout, one array a draw."""
    episodes: tuple[Episode, ...] = ()
    moments: tuple[dict[str, Moments], ...] = ()
    """Of the rollouts that came into use, with the last gradient made from them."""
    timings: Seconds = field(default_factory=dict)
    """Of its own work and of the rollouts that came into use, since the last message."""
    times: Times = field(default_factory=dict)
    """Times since the last message of the operations below the update worker; see `timing.OPERATIONS`."""
    shards: tuple[Mapping[str, Any], ...] = ()
    """Statistics of each replay shard."""
    counters: dict[str, int] = field(default_factory=dict)
    """Totals by name: weight pushes, bytes."""
    traffic: Mapping[str, Traffic] = field(default_factory=dict)
    """Totals of what crossed, by kind."""
    incarnation: int = 0
    part: WorkersPart | None = None
    """(sender, incarnation, what its journal noted since the last message)."""
    fault: str = ""
    """What is not finite in its loss or its own gradient, who says so, and where the batch is kept; else empty."""
    skipped: bool = False
    """Where it applied the mean itself: whether it left the update out, as all ranks then did."""
    queue_levels: tuple[int, ...] = ()
    """Items in the queue (with shards: waiting batches) whenever one was taken since the last message."""
    samples: dict[str, int] = field(default_factory=dict)
    """Of several policies: policy -> valid samples behind its vector, in the order of `vectors`: its weight in a mean."""

    checksum: int | None = None
    """Of its parameters after the update, where it applied that itself and was asked for it."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to learn from: no sample behind it, or none of a policy that learns."""
        has_samples = any(self.samples.values()) if self.samples else self.num_samples > 0
        return not has_samples or (self.vectors is not None and all(vector is None for vector in self.vectors))

    def weight_of(self, statistic: str) -> int:
        """Samples behind a statistic: of several policies those of the one that its name ends with."""
        return self.samples.get(statistic.rpartition("/")[2], self.num_samples)

    def weights(self, num_vectors: int) -> list[int]:
        """Samples behind each vector."""
        return list(self.samples.values()) or [self.num_samples] * num_vectors
