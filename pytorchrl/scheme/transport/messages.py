"""Messages between workers: immutable dataclasses of data and statistics."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from pytorchrl.agent.data import Episode, weights_of_gradients
from pytorchrl.agent.moments import Moments as Moments
from pytorchrl.runtime import WorkersPart
from pytorchrl.scheme.counters import CounterSnapshot
from pytorchrl.scheme.ledger import LedgerSnapshot
from pytorchrl.scheme.timing import Seconds, Times
from pytorchrl.scheme.transport.codecs import decode_array
from pytorchrl.scheme.transport.encoder import Sent, Traffic
from pytorchrl.support.untyped import Payload, StateDict

Parameters = tuple[dict[str, float], dict[str, float]]
"""Current values of the algorithm's parameters, and of the storage's parameters."""
States = Mapping[str, Payload]
"""Name -> numpy array or `Packed`; an algorithm receives plain arrays only."""


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights and other state after `version` updates, for collection workers and gradient workers."""

    version: int
    """Number of updates applied so far."""
    state: States
    """Acting state of the algorithm: flat parameter vectors and normalizers. It is never modified."""
    parameters: dict[str, float] = field(default_factory=dict)
    """Current values of the algorithm's parameters, including parameters that follow a schedule or were set by
    `update_algorithm_parameter`."""
    learning: States = field(default_factory=dict)
    """Additional state for gradient workers, such as target networks."""
    storage_parameters: dict[str, float] = field(default_factory=dict)
    """Current values of the storage's parameters."""

    @property
    def checksum(self) -> int:
        """CRC-32 checksum of all arrays in `state` and `learning`."""
        arrays = {**{f"learning {name}": array for name, array in self.learning.items()}, **self.state}
        return functools.reduce(lambda checksum, name: zlib.crc32(arrays[name].tobytes(), checksum), sorted(arrays), 0)

    @property
    def num_bytes(self) -> int:
        """Total size in bytes of all arrays in `state` and `learning`, after encoding if they are encoded."""
        return sum(array.nbytes for part in (self.state, self.learning) for array in part.values())


@dataclass(frozen=True, slots=True)
class WholeState:
    """The state of a worker that applies updates: parameters, normalizers, target networks, optimizers and counters."""

    version: int
    """Number of updates applied so far."""
    algorithm: StateDict
    """The algorithm's `state_dict()`."""


@dataclass(frozen=True, slots=True)
class RolloutHeader:
    """Everything that is known about a rollout besides its data: its source, its size and its statistics."""

    num_env_steps: int
    """Number of valid transitions in the data."""
    size: int
    """Number of vector steps times number of environments, which counts toward the size of a train batch. Unlike
    `num_env_steps`, `size` includes steps in which an environment is reset, so all full rollouts have the same size."""
    collected_steps: int
    """Number of env steps that this incarnation of the worker has taken so far."""
    weights_version: int
    """Version of the weights at the start of the rollout."""
    worker: int
    sequence: int
    """Number of the rollout, counted from 1 for each worker and incarnation."""
    incarnation: int = 0
    episodes: tuple[Episode, ...] = ()
    moments: dict[str, Moments] = field(default_factory=dict)
    """Moments for the normalizers, by name."""
    steps_by_version: Mapping[int, int] = field(default_factory=dict)
    """Number of env steps by the version of the weights that chose their actions; empty if all have
    `weights_version`."""
    agent_steps: dict[str, int] = field(default_factory=dict)
    """With several policies: policy -> number of steps of its agents."""
    timings: dict[str, float] = field(default_factory=dict)
    """Seconds by part of the worker's work; see `timing.PARTS`."""
    num_steps: int = 0
    """Number of steps of the vector of environments."""
    cancelled_steps: int = 0
    """Number of env steps that the worker discarded at the end of the rollout; they are part of `collected_steps`."""
    preempted: bool = False
    """Whether the worker was stopped before the rollout was full."""
    envs_restarted: int = 0
    """Number of restarts so far of environments of this incarnation of the worker, because they raised an error."""
    sent: Sent = field(default_factory=Sent)
    """Size and encoding of the arrays."""
    traffic: Mapping[str, Traffic] = field(default_factory=dict)
    """Traffic by kind of message: weights that the worker has decoded since its previous rollout, and this rollout if a
    shard has decoded it."""

    @property
    def collect_s(self) -> float:
        """Seconds that the worker needed for the rollout."""
        return sum(self.timings.values())

    @property
    def source(self) -> tuple[int, int]:
        """The worker's index and incarnation (higher after each replacement), which identify the environments."""
        return self.worker, self.incarnation


@dataclass(frozen=True, slots=True)
class Rollout:
    """A rollout with its header: the answer of a collection worker to one request."""

    data: Payload
    """`RolloutData` or `MultiRollout` of tensors, numpy arrays or `Packed`."""
    header: RolloutHeader

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers that must be identical in a replayed run.

        They are the number of env steps, the version of the weights, a checksum of the actions and rewards, and
        `num_steps` if the rollout was preempted, otherwise 0.
        """
        checksum = 0
        for array in (array for part in self.data.parts.values() for array in (part.action, part.reward)):
            checksum = zlib.crc32(np.ascontiguousarray(decode_array(array)).data, checksum)
        header = self.header
        return header.num_env_steps, header.weights_version, checksum, header.num_steps if header.preempted else 0


@dataclass(frozen=True, slots=True)
class Report:
    """Statistics of a gradient worker and of the workers below it.

    Except for totals and current values, the statistics cover the time since the worker's previous report.
    """

    counters: CounterSnapshot
    """Totals since the start of each worker, and current values."""
    traffic: Mapping[str, Traffic] = field(default_factory=dict)
    """Totals of the traffic, by kind of message."""
    lags: tuple[tuple[int, int, int], ...] = ()
    """(worker, lag when queued, lag at first use) of each rollout that was taken from the queue."""
    step_lags: Mapping[tuple[int, int], int] = field(default_factory=dict)
    """(lag when queued, lag from then to the first use) -> number of env steps."""
    pass_lags: Mapping[int, int] = field(default_factory=dict)
    """Number of updates since the first use of a train batch -> number of samples of gradients."""
    drawn_lags: tuple[np.ndarray, ...] = ()
    """One (K, 2) int64 array per batch from replay: (lag when sent to replay, lag when sampled) of each of K items."""
    episodes: tuple[Episode, ...] = ()
    timings: Seconds = field(default_factory=dict)
    """Level -> part -> seconds of work. The work of the collection workers is included once their rollouts have been
    taken for training or added to replay."""
    times: Times = field(default_factory=dict)
    """Times of the operations at all levels below the update worker; see `timing.OPERATIONS`."""
    shards: tuple[Mapping[str, object], ...] = ()
    """Current statistics of each replay shard."""
    queue_levels: tuple[int, ...] = ()
    """Number of queued train batches (with shards: waiting batches) after each removal."""


@dataclass(frozen=True, slots=True)
class Gradients:
    """The gradients of one batch, with statistics: the answer of a gradient worker to one request."""

    vectors: Payload
    """One flat float32 vector (tensor, array or `Packed`) per parameter group; None if the worker applied the gradients
    itself. With several policies, one vector per policy, which is None for a policy without a gradient."""
    num_samples: int
    """Number of env steps in the batch. With a single policy, this is the weight of the gradient when gradients are
    averaged."""
    num_new_samples: int
    """Number of env steps in the batch that no earlier gradient used."""
    weights_version: int
    """Version of the weights that the gradient was computed with."""
    worker: int
    sequence: int
    info: dict[str, float]
    """The algorithm's statistics."""
    ledger: LedgerSnapshot
    last: bool = False
    """Whether the worker's data are used up, so that the next request starts with new data."""
    report: Report | None = None
    """Statistics of the worker; None if the update worker requests them separately."""
    moments: tuple[dict[str, Moments], ...] = ()
    """Moments of the rollouts that were used, sent with the last gradient that was computed from these rollouts."""
    incarnation: int = 0
    part: WorkersPart | None = None
    """(sender, incarnation, events of the sender's journal since the previous message); None if nothing is recorded."""
    fault: str = ""
    """Error message if the loss or the worker's own gradient is not finite, else empty. The message names the worker,
    the loss, the gradient's norm, and the file in which the batch was saved."""
    skipped: bool = False
    """Whether the worker skipped the update; False unless the worker applies the mean gradient itself. All ranks skip
    the same updates."""
    samples: dict[str, int] = field(default_factory=dict)
    """Policy -> number of valid samples from which the policy's vectors were computed. This number is the weight of
    these vectors when gradients are averaged. The policies are in the order of `vectors`. A single policy has the name
    `""` and, by default, `num_samples` samples."""
    checksum: int | None = None
    """Checksum of the worker's parameters after an update that it applied itself; None if it was not requested."""

    def __post_init__(self) -> None:
        """If `samples` is empty (the agent has a single policy), set the entry `""` of `samples` to `num_samples`."""
        if not self.samples:
            object.__setattr__(self, "samples", {"": self.num_samples})

    @property
    def has_policies(self) -> bool:
        """Whether the agent has several policies, each with its own number of samples."""
        return "" not in self.samples

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to learn from, because there are no samples or no gradients."""
        has_samples = any(self.samples.values())
        return not has_samples or (self.vectors is not None and all(vector is None for vector in self.vectors))

    def weight_of(self, statistic: str) -> int:
        """Return the number of samples over which a statistic was computed.

        With several policies, the name of a statistic may end with "/" and the name of a policy. In this case, only the
        samples of this policy count.
        """
        return self.samples.get(statistic.rpartition("/")[2], self.num_samples)

    def weights(self, num_vectors: int) -> list[int]:
        """Return, for each of `num_vectors` gradient vectors, the number of samples from which it was computed."""
        return weights_of_gradients(self.samples, num_vectors)
