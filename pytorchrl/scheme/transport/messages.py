"""Messages between workers: frozen, typed, each with the numbers that belong to it."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pytorchrl.agent.data import Episode, weights_of_gradients
from pytorchrl.agent.moments import Moments as Moments
from pytorchrl.runtime import WorkersPart
from pytorchrl.scheme.counters import WorkerCounters
from pytorchrl.scheme.ledger import LedgerSnapshot
from pytorchrl.scheme.timing import Seconds, Times
from pytorchrl.scheme.transport.encoder import Sent, Traffic

Parameters = tuple[dict[str, float], dict[str, float]]
"""Present values of the algorithm's parameters, and of the storage's."""
States = Mapping[str, Any]
"""Name -> numpy array or `Packed`; an algorithm receives plain arrays only."""


@dataclass(frozen=True, slots=True)
class Weights:
    """The state of one version, for collection and gradient workers."""

    version: int
    """Number of updates applied so far."""
    state: States
    """Acting state of the algorithm: flat parameter vectors and normalisers. Never written after it was made."""
    parameters: dict[str, float] = field(default_factory=dict)
    """Present values of the algorithm's parameters, scheduled or changed ones among them."""
    learning: States = field(default_factory=dict)
    """Further state for gradient workers, such as target networks."""
    storage_parameters: dict[str, float] = field(default_factory=dict)
    """Present values of the storage's parameters."""

    @property
    def checksum(self) -> int:
        """CRC-32 of all numbers of both states, bit for bit."""
        arrays = {**{f"learning {name}": array for name, array in self.learning.items()}, **self.state}
        return functools.reduce(lambda checksum, name: zlib.crc32(arrays[name].tobytes(), checksum), sorted(arrays), 0)

    @property
    def num_bytes(self) -> int:
        """Bytes of both states as they cross."""
        return sum(array.nbytes for part in (self.state, self.learning) for array in part.values())


@dataclass(frozen=True, slots=True)
class WholeState:
    """The state of a worker that applies updates: parameters, normalisers, targets, optimisers and counters."""

    version: int
    """Number of updates applied so far."""
    algorithm: dict[str, Any]
    """The algorithm's `state_dict()`."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """The answer of a collection worker to one request."""

    data: Any
    """`RolloutData` or `MultiRollout` of tensors, numpy arrays or `Packed`; None in a header without data."""
    num_env_steps: int
    """Valid transitions in `data`."""
    size: int
    """Steps of the vector times environments, by which the rollout fills a batch. A step in which an environment is
    reset counts here and not in `num_env_steps`, so that a batch of two rollouts is two rollouts."""
    collected_steps: int
    """All env steps that this incarnation of the worker has made so far."""
    weights_version: int
    """Version of the weights at the start of the rollout."""
    worker: int
    sequence: int
    """1, 2, ... for each worker and incarnation."""
    incarnation: int = 0
    episodes: tuple[Episode, ...] = ()
    moments: dict[str, Moments] = field(default_factory=dict)
    """Moments for the normalisers, by name."""
    agent_steps: dict[str, int] = field(default_factory=dict)
    """With several policies: policy -> steps of its agents."""
    timings: dict[str, float] = field(default_factory=dict)
    """Seconds by part of the worker's work; see `timing.PARTS`."""
    num_steps: int = 0
    """Steps of the vector of environments."""
    preempted: bool = False
    """Whether the worker was told to stop before the rollout was full."""
    envs_restarted: int = 0
    """Environments that this incarnation of the worker has replaced so far because they raised."""
    sent: Sent = field(default_factory=Sent)
    """Size and encoding of the arrays."""
    traffic: Mapping[str, Traffic] = field(default_factory=dict)
    """By kind: weights that the worker has decoded since its last rollout, and this rollout if a shard has decoded
    it."""

    @property
    def collect_s(self) -> float:
        """Seconds that the rollout took its worker."""
        return sum(self.timings.values())

    @property
    def source(self) -> tuple[int, int]:
        """(worker, incarnation), whose environments go on from one rollout to the next."""
        return self.worker, self.incarnation


@dataclass(frozen=True, slots=True)
class Gradients:
    """The answer of a gradient worker to one request."""

    vectors: Any
    """One flat float32 vector (tensor, array or `Packed`) per group; None if the worker applied them itself. With
    several policies one vector per policy, which is None for a policy without a gradient."""
    num_samples: int
    """Env steps in the batch; with one policy, its weight in a mean."""
    num_new_samples: int
    """Env steps that no earlier gradient used."""
    weights_version: int
    """Version of the weights that the gradient was computed with."""
    worker: int
    sequence: int
    info: dict[str, float]
    """The algorithm's statistics."""
    ledger: LedgerSnapshot
    last: bool = False
    """Whether the worker's data are used up, so that the next request starts with new data."""
    lags: tuple[tuple[int, int, int], ...] = ()
    """(worker, lag when queued, lag at first use) of each rollout that came into use from a queue."""
    drawn_lags: tuple[np.ndarray, ...] = ()
    """(K, 2) int64, (lag when sent to replay, lag when sampled) of each item, one array per batch."""
    episodes: tuple[Episode, ...] = ()
    moments: tuple[dict[str, Moments], ...] = ()
    """Moments of the rollouts that came into use, sent with the last gradient made from them."""
    timings: Seconds = field(default_factory=dict)
    """Seconds of the worker and of the rollouts that came into use, since the last message."""
    times: Times = field(default_factory=dict)
    """Times of the operations below the update worker since the last message; see `timing.OPERATIONS`."""
    shards: tuple[Mapping[str, Any], ...] = ()
    """Statistics of each replay shard."""
    counters: WorkerCounters = field(default_factory=WorkerCounters)
    """Totals and current numbers of the worker and of the workers below it."""
    traffic: Mapping[str, Traffic] = field(default_factory=dict)
    """Totals of the messages, by kind."""
    incarnation: int = 0
    part: WorkersPart | None = None
    """(sender, incarnation, events of its journal since the last message)."""
    fault: str = ""
    """A message if the loss or the worker's own gradient is not finite: the worker, the values and the batch's file."""
    skipped: bool = False
    """Whether the worker left out the update, if it applies the mean itself; all ranks then do."""
    queue_levels: tuple[int, ...] = ()
    """Items in the queue (with shards: waiting batches) after each one taken since the last message."""
    samples: dict[str, int] = field(default_factory=dict)
    """Policy -> valid samples behind its vectors, in the order of `vectors`; their weight in a mean. The policy of an
    agent with only one is called `""`; if not given, its samples are `num_samples`."""

    checksum: int | None = None
    """Checksum of the worker's parameters after an update that it applied itself, if it was requested."""

    def __post_init__(self) -> None:
        """Fill in the samples of an agent with one policy."""
        if not self.samples:
            object.__setattr__(self, "samples", {"": self.num_samples})

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to learn from: no sample, or none of a policy that learns."""
        has_samples = any(self.samples.values())
        return not has_samples or (self.vectors is not None and all(vector is None for vector in self.vectors))

    def weight_of(self, statistic: str) -> int:
        """Return the samples behind a statistic: with several policies those of the policy that its name ends with."""
        return self.samples.get(statistic.rpartition("/")[2], self.num_samples)

    def weights(self, num_vectors: int) -> list[int]:
        """Return the samples behind each vector."""
        return weights_of_gradients(self.samples, num_vectors)
