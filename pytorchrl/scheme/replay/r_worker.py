"""A replay shard."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from pytorchrl.agent.actors.base import Actor
from pytorchrl.agent.algorithms.base import Algorithm
from pytorchrl.agent.data import map_tensors
from pytorchrl.agent.options import Factory
from pytorchrl.agent.seeding import Stream, derive_seed
from pytorchrl.runtime import Runtime, ThreadRuntime
from pytorchrl.scheme.base.worker import Worker
from pytorchrl.scheme.replay.shard_states import ShardState
from pytorchrl.scheme.replay.versions import Versions
from pytorchrl.scheme.transport.encoder import Traffic
from pytorchrl.scheme.transport.messages import Rollout
from pytorchrl.scheme.transport.receive import receive
from pytorchrl.worker_names import replay_worker

# Calls in the mean of a call's time.
_TIME_WINDOW = 100


class Sample(NamedTuple):
    """The answer of a shard to a request for a batch."""

    batch: Any
    """A batch of the shard's storage; None if the shard is empty."""
    state: ShardState
    versions: np.ndarray
    """(K, 2) int64, for each transition, sequence or rollout in the batch: the version of the weights that collected it
    (its first trained step), and the learner's version when it was sent to the shard."""


class RWorker(Worker):
    """Keeps a share of an agent's replay, in the agent's own storage.

    The storage is built with the first rollout, so that an unused shard costs nothing.

    Args:
        index_worker: Index in its set.
        index_parent: Index of its gradient worker.
        algo_factory, actor_factory, storage_factory: The agent.
        num_shards: Number of shards, which share the storage's size equally. One shard runs in the learner's process;
            several are remote.
        seed: Seed of the experiment.
        incarnation: Number of workers that had its place before.
        num_threads: Torch threads of its process; None leaves them as they are.
        runtime: The runtime that it runs in.
    """

    def __init__(self, index_worker: int, index_parent: int = 0, *, algo_factory: Factory[Algorithm],  # noqa: PLR0913
                 actor_factory: Factory[Actor], storage_factory: Factory[Any], num_shards: int = 1,
                 seed: int = 0, incarnation: int = 0, num_threads: int | None = None,
                 runtime: Runtime | None = None) -> None:
        super().__init__(index_worker)
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        runtime = runtime or ThreadRuntime()
        self._algo_factory, self._actor_factory = algo_factory, actor_factory
        self._storage_factory = share_of(storage_factory, max(0, index_worker - 1), num_shards)
        self._seed = derive_seed(seed, Stream.BATCHES, index_parent, index_worker, incarnation)
        self._point = runtime.points(replay_worker(index_parent, index_worker), incarnation)
        self._now = runtime.now
        self._times: dict[str, deque[float]] = {}
        self._is_remote = num_shards > 1
        self._storage: Any = None  # `ReplayBuffer`, `RolloutReplay`, `MultiAgentReplay`, or a user's own storage
        self._num_envs = 0  # of each collection worker; known with the first rollout
        self._answers = 0
        self._traffic = Traffic()
        self._versions = Versions()

    def add(self, rollout: Rollout, version: int) -> ShardState:
        """Add a rollout; the oldest items make room for it.

        Args:
            rollout: The rollout.
            version: The learner's version when the rollout was sent.
        """
        with self._timed("add"):
            self._add(rollout, version)
        return self._state()

    def _add(self, rollout: Rollout, version: int) -> None:
        self._pass_point("add")
        if self._storage is None:
            self._storage = self._build(rollout.data.num_envs)
        rollout, self._traffic = receive(rollout, self._now)
        self._versions.add(self._storage.num_rows_added, rollout.weights_version, version)
        self._storage.insert_data_slice([rollout.data], sources=[rollout.source])
        self._versions.forget(self._storage.num_rows_added - self._storage.options.size)

    def sample(self, size: int, smallest: float, parameters: Mapping[str, float]) -> Sample:
        """Sample a batch.

        Args:
            size: Transitions or sequences; of whole rollouts their least size, see `RolloutData.size`.
            smallest: The smallest weight with which any shard samples an item.
            parameters: Parameters of the storage, by name, with their present values.
        """
        with self._timed("sample"):
            batch, versions = self._sample(size, smallest, parameters)
        return Sample(batch, self._state(), versions)

    def _sample(self, size: int, smallest: float, parameters: Mapping[str, float]) -> tuple[Any, np.ndarray]:
        self._pass_point("sample")
        batch, versions = None, np.zeros((0, 2), np.int64)
        if self._storage is not None:
            self._storage.parameters = {**self._storage.parameters, **parameters}
            batch = next(self._storage.generate_batches(1, size), None)
            if batch is not None:
                versions = self._versions.of(self._storage.rows_of(batch.ids.numpy()))
                batch = self._for_learner(batch, smallest)
        return batch, versions

    def _for_learner(self, batch: Any, smallest: float) -> Any:
        """Return the batch with importance weights relative to the largest of all shards instead of this shard's."""
        if getattr(self._storage.options, "weight_norm", None) == "buffer":
            own = self._storage.min_priority  # the present one, which may be smaller than the last one reported
            batch.weight *= (min(smallest, own) / own) ** self._storage.parameters["beta"]
        return map_tensors(batch, lambda tensor: tensor.numpy()) if self._is_remote else batch

    def update_priorities(self, ids: np.ndarray, errors: np.ndarray) -> ShardState:
        """Set the priorities of items; those of evicted items are counted and ignored.

        Args:
            ids: (B,) int64, ids of a batch; of equal ids the last one counts.
            errors: (B,) float32, absolute TD errors.
        """
        with self._timed("priority"):
            self._pass_point("priorities")
            if self._storage is not None:
                self._storage.update_priorities(ids, errors)
        return self._state()

    def state(self) -> dict[str, Any] | None:
        """Return the contents as plain values and tensors; None if no rollout was added."""
        return None if self._storage is None else {
            "num_envs": self._num_envs, "storage": self._storage.state_dict(), "versions": self._versions.state_dict()}

    def restore(self, state: dict[str, Any]) -> ShardState:
        """Continue from the `state()` of another shard."""
        self._storage = self._build(state["num_envs"])
        self._storage.load_state_dict(state["storage"])
        self._versions.load_state_dict(state["versions"])
        return self._state()

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        """Time the block as a call of this kind."""
        start = self._now()
        yield
        self._times.setdefault(name, deque(maxlen=_TIME_WINDOW)).append(1e3 * (self._now() - start))

    def _pass_point(self, name: str) -> None:
        """Pass a point at which faults may be injected."""
        if self._point is not None:
            self._point(name)

    def _build(self, num_envs: int) -> Any:
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


def describe(storage: Any) -> dict[str, Any]:
    """Return the statistics of a replay storage; with several policies, also `<name>/<policy>` for each.

    Args:
        storage: A `ReplayBuffer`, a `RolloutReplay`, or a `MultiAgentReplay`, whose `storages` belong to its policies.

    Returns:
        `added` and `sampled`: transitions since the storage was created; `items`: items that can be sampled; `bytes`:
        memory of the storage; `mass`: the weight with which the shard is chosen; `min_priority`: the smallest priority
        (None: no item); `stale_priorities`: errors that arrived for evicted items; `evicted_unused`: items that were
        evicted without being sampled.
    """
    counters, smallest = storage.counters, getattr(storage, "min_priority", 1.0)
    alpha = getattr(storage.options, "alpha", 1.0)  # stored priorities are raised to this power
    found = {"added": counters["inserted"], "sampled": counters["sampled"], "items": storage.num_items,
             "bytes": storage.num_bytes, "mass": storage.mass,
             "min_priority": smallest ** (1.0 / alpha) if math.isfinite(smallest) else None,
             "stale_priorities": counters.get("stale_priorities", 0),
             "evicted_unused": counters.get("evicted_unused", 0)}
    policies = {policy: describe(own) for policy, own in getattr(storage, "storages", {}).items()}
    if policies:  # only the storages of the policies count these
        found["min_priority"] = min(
            (own["min_priority"] for own in policies.values() if own["min_priority"] is not None), default=None)
        for name in ("stale_priorities", "evicted_unused"):
            found[name] = sum(own[name] for own in policies.values())
    return found | {f"{name}/{policy}": value for policy, own in policies.items() for name, value in own.items()}


def share_of(storage_factory: Factory[Any], index: int, num_shards: int) -> Factory[Any]:
    """Return the storage's factory for shard `index`, from 0: equal sizes, or larger by one for the first shards."""
    size = storage_factory.options.size
    share = size // num_shards + (index < size % num_shards)
    return replace(storage_factory, options=replace(storage_factory.options, size=share))
