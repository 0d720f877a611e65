"""The replay shard: a worker that stores a part of the agent's replay data."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from pytorchrl.agent.data import map_tensors
from pytorchrl.agent.factories import ActorFactory, AlgorithmFactory
from pytorchrl.agent.options import PartFactory
from pytorchrl.agent.seeding import Stream, derive_seed
from pytorchrl.scheme.base.worker import Context, Worker
from pytorchrl.scheme.options.replay import RWorkerSetOptions
from pytorchrl.scheme.replay.shard_states import ShardState
from pytorchrl.scheme.replay.storage_options import ShardStorageFactory
from pytorchrl.scheme.transport.encoder import Traffic
from pytorchrl.scheme.transport.messages import Rollout
from pytorchrl.scheme.transport.receive import receive
from pytorchrl.support.untyped import BatchOfKind, MetricsDict, StateDict, UserPart
from pytorchrl.support.worker_names import replay_worker

F = TypeVar("F", bound=PartFactory[object])

# Number of most recent calls of each kind from which the mean duration is computed.
_TIME_WINDOW = 100
_FEWEST_ROLLOUTS = 16
"""Least number of rollouts for whose versions memory is allocated."""


class Versions:
    """The versions of the rows in a shard.

    Each row has two versions: the version of the weights with which it was collected, and the learner's version when
    it was sent to the shard. A row is one stored step of one environment. Rows are numbered from 0 in the order in
    which they are added, and the rows of a rollout are consecutive.
    """

    def __init__(self) -> None:
        # For each rollout: the index of its first row, the version of the weights with which it was collected, and the
        # learner's version when it was sent to the shard.
        self._blocks = np.zeros((3, _FEWEST_ROLLOUTS), np.int64)
        self._begin = self._end = 0

    def add(self, first_row: int, collected: int, sent: int) -> None:
        """Add a rollout whose rows start at `first_row`.

        Args:
            first_row: Index of the rollout's first row, which must be greater than that of every earlier rollout.
            collected: Version of the weights with which the rollout was collected.
            sent: The learner's version when the rollout was sent to the shard.
        """
        if self._end == self._blocks.shape[1]:
            kept = self._blocks[:, self._begin:self._end]
            self._blocks = np.concatenate([kept, np.zeros((3, max(_FEWEST_ROLLOUTS, kept.shape[1])), np.int64)], axis=1)
            self._begin, self._end = 0, kept.shape[1]
        self._blocks[:, self._end] = first_row, collected, sent
        self._end += 1

    def forget(self, first_row: int) -> None:
        """Discard the versions of rollouts whose last row precedes the row `first_row`."""
        firsts = self._blocks[0, self._begin:self._end]
        self._begin += max(0, int(np.searchsorted(firsts, first_row, "right")) - 1)

    def of(self, rows: np.ndarray) -> np.ndarray:
        """Return the versions `collected` and `sent` (see `add`) of each row in `rows` (N,), as (N, 2) int64."""
        blocks = self._blocks[:, self._begin:self._end]
        places = np.searchsorted(blocks[0], rows, "right") - 1
        assert places.min(initial=0) >= 0, "the rollout of a row was never added, or its versions were discarded"
        found: np.ndarray = blocks[1:, places].T
        return found

    def state_dict(self) -> dict[str, Tensor]:
        """Return a copy of all stored versions."""
        return {"blocks": torch.from_numpy(self._blocks[:, self._begin:self._end].copy())}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load a state that `state_dict()` returned."""
        self._blocks = state["blocks"].numpy().copy()
        self._begin, self._end = 0, self._blocks.shape[1]


class Sample(NamedTuple):
    """A shard's response to a request for a batch."""

    batch: BatchOfKind
    """A batch from the shard's storage, or None if the shard is empty."""
    state: ShardState
    versions: np.ndarray
    """(K, 2) int64. For each transition, sequence or rollout in the batch: the version of the weights with which this
    item was collected, and the learner's version when this item was sent to the shard. Both versions of a sequence are
    those of its first step after the burn-in."""


class RWorker(Worker):
    """A replay shard: a worker that stores a share of the agent's replay data.

    The storage is built when the first rollout arrives; before that, the shard allocates no memory for data.

    Args:
        index_worker: Index of the shard in its set.
        index_parent: Index of the gradient worker to which the shard belongs.
        algo_factory, actor_factory, storage_factory: Factories of the agent's parts.
        num_replay_workers: Number of shards, each with an equal share of the storage's size. A single shard runs in the
            gradient worker's process; several shards are remote.
        seed: Seed of the experiment.
        context: Runtime, incarnation and number of threads of the shard; None: the defaults.
    """

    def __init__(self, index_worker: int, index_parent: int = 0, *, algo_factory: AlgorithmFactory,
                 actor_factory: ActorFactory, storage_factory: ShardStorageFactory,
                 num_replay_workers: int = RWorkerSetOptions.num_replay_workers, seed: int = 0,
                 context: Context | None = None) -> None:
        context = context or Context()
        super().__init__(index_worker, context.num_threads)
        runtime, incarnation = context.runtime, context.incarnation
        self._algo_factory, self._actor_factory = algo_factory, actor_factory
        self._storage_factory = share_of(storage_factory, max(0, index_worker - 1), num_replay_workers)
        self._seed = derive_seed(seed, Stream.BATCHES, index_parent, index_worker, incarnation)
        self._point = runtime.points(replay_worker(index_parent, index_worker), incarnation)
        self._now = runtime.now
        self._times: dict[str, deque[float]] = {}
        self._is_remote = num_replay_workers > 1
        self._storage: UserPart = None  # `ReplayBuffer`, `RolloutReplay`, `MultiAgentReplay`, or a user's own storage
        self._num_envs = 0  # number of environments of a collection worker; set when the first rollout arrives
        self._answers = 0
        self._traffic = Traffic()
        self._versions = Versions()

    def add(self, rollout: Rollout, version: int) -> ShardState:
        """Add a rollout, and evict the oldest items if the storage is full.

        Args:
            rollout: The rollout.
            version: Version of the learner's weights when the rollout was sent to this shard.
        """
        with self._timed("add"):
            self._add(rollout, version)
        return self._state()

    def _add(self, rollout: Rollout, version: int) -> None:
        self._pass_point("add")
        if self._storage is None:
            self._storage = self._build(rollout.data.num_envs)
        rollout, self._traffic = receive(rollout, self._now)
        self._versions.add(self._storage.num_rows_added, rollout.header.weights_version, version)
        self._storage.insert_data_slice([rollout.data], sources=[rollout.header.source])
        self._versions.forget(self._storage.num_rows_added - self._storage.options.size)

    def sample(self, size: int, smallest: float, parameters: Mapping[str, float]) -> Sample:
        """Sample a batch.

        Args:
            size: Number of transitions or sequences; for whole rollouts, the minimum number of steps.
            smallest: The smallest sampling weight of all items in all shards.
            parameters: Current values of the storage's parameters, by name.
        """
        with self._timed("sample"):
            batch, versions = self._sample(size, smallest, parameters)
        return Sample(batch, self._state(), versions)

    def _sample(self, size: int, smallest: float, parameters: Mapping[str, float]) -> tuple[BatchOfKind, np.ndarray]:
        self._pass_point("sample")
        batch, versions = None, np.zeros((0, 2), np.int64)
        if self._storage is not None:
            self._storage.parameters = {**self._storage.parameters, **parameters}
            batch = next(self._storage.generate_batches(1, size), None)
            if batch is not None:
                versions = self._versions.of(self._storage.rows_of(batch.ids.numpy()))
                batch = self._for_learner(batch, smallest)
        return batch, versions

    def _for_learner(self, batch: BatchOfKind, smallest: float) -> BatchOfKind:
        """Return a batch as the learner receives it, with numpy arrays if the shard is remote.

        With `weight_norm="buffer"`, importance weights are relative to the largest weight in all shards, instead of
        the largest weight in this shard.
        """
        if getattr(self._storage.options, "weight_norm", None) == "buffer":
            own = self._storage.min_priority  # `smallest` may be out of date and thus exceed `own`
            factor = (min(smallest, own) / own) ** self._storage.parameters["beta"]
            batch = replace(batch, weight=batch.weight * factor)
        return map_tensors(batch, lambda tensor: tensor.numpy()) if self._is_remote else batch

    def update_priorities(self, ids: np.ndarray, errors: np.ndarray) -> ShardState:
        """Update the priorities of items. Updates for evicted items are counted and ignored.

        Args:
            ids: (B,) int64, item ids from a batch. If an id occurs several times, its last error takes effect.
            errors: (B,) float32, absolute TD errors.
        """
        with self._timed("priority"):
            self._pass_point("priorities")
            if self._storage is not None:
                self._storage.update_priorities(ids, errors)
        return self._state()

    def state(self) -> StateDict | None:
        """Return the shard's contents as plain values and tensors, or None if no rollout was added."""
        return None if self._storage is None else {
            "num_envs": self._num_envs, "storage": self._storage.state_dict(), "versions": self._versions.state_dict()}

    def restore(self, state: StateDict) -> ShardState:
        """Load the `state()` of another shard."""
        self._storage = self._build(state["num_envs"])
        self._storage.load_state_dict(state["storage"])
        self._versions.load_state_dict(state["versions"])
        return self._state()

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        """Record the duration of the `with` block, in milliseconds, for calls of the kind `name`, such as "sample"."""
        start = self._now()
        yield
        self._times.setdefault(name, deque(maxlen=_TIME_WINDOW)).append(1e3 * (self._now() - start))

    def _pass_point(self, name: str) -> None:
        """Inject the fault that the option `faults` plans for this operation, if any; see `Runtime.points`."""
        if self._point is not None:
            self._point(name)

    def _build(self, num_envs: int) -> UserPart:
        self._num_envs = num_envs
        actor = self._actor_factory(device="cpu", seed=0)
        algorithm = self._algo_factory(device="cpu", actor=actor, seed=0)
        return self._storage_factory(
            device="cpu", actor=actor, algorithm=algorithm, num_envs=num_envs, seed=self._seed)

    def _state(self) -> ShardState:
        self._answers += 1
        if self._storage is None:
            return ShardState(self._answers)
        storage, counters = self._storage, self._storage.counters
        times_ms = {name: statistics.fmean(times) for name, times in self._times.items()}
        return ShardState(
            self._answers, counters["resident"], counters["evicted"], storage.mass,
            getattr(storage, "min_priority", 1.0), describe(storage), times_ms, self._traffic)


def describe(storage: UserPart) -> MetricsDict:
    """Return the statistics of a replay storage; with several policies, also those of each policy (`<name>/<policy>`).

    Args:
        storage: A `ReplayBuffer`, a `RolloutReplay`, or a `MultiAgentReplay`, which has one storage for each policy.

    Returns:
        A dictionary with the following entries.
        `added`: number of transitions added so far (env steps for `MultiAgentReplay`); `sampled`: number of transitions
        sampled so far; `items`: number of items that can be sampled; `bytes`: memory of the storage in bytes; `mass`:
        sampling weight of the shard; `min_priority`: smallest priority (None without items); `stale_priorities`: number
        of TD errors that arrived for evicted items; `evicted_unused`: number of items evicted without being sampled.
    """
    counters, smallest = storage.counters, getattr(storage, "min_priority", 1.0)
    alpha = getattr(storage.options, "alpha", 1.0)  # priorities were raised to this power before they were stored
    found = {"added": counters["inserted"], "sampled": counters["sampled"], "items": storage.num_items,
             "bytes": storage.num_bytes, "mass": storage.mass,
             "min_priority": smallest ** (1.0 / alpha) if math.isfinite(smallest) else None,
             "stale_priorities": counters.get("stale_priorities", 0),
             "evicted_unused": counters.get("evicted_unused", 0)}
    policies = {policy: describe(own) for policy, own in getattr(storage, "storages", {}).items()}
    if policies:  # `storage` lacks these statistics, so combine those of its policies
        found["min_priority"] = min(
            (own["min_priority"] for own in policies.values() if own["min_priority"] is not None), default=None)
        for name in ("stale_priorities", "evicted_unused"):
            found[name] = sum(own[name] for own in policies.values())
    return found | {f"{name}/{policy}": value for policy, own in policies.items() for name, value in own.items()}


def share_of(storage_factory: F, index: int, num_replay_workers: int) -> F:
    """Return a factory for the storage of shard `index` (0, 1, ...), whose size is an equal share of the total size.

    If the total size is not divisible by the number of shards, the first shards are larger by one env step.
    """
    size = storage_factory.options.size
    share = size // num_replay_workers + (index < size % num_replay_workers)
    return storage_factory.with_options(size=share)
