"""State of replay shards as their gradient worker knows it, shared by its collector thread and its learning thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from pytorchrl.errors import WorkerLostError
from pytorchrl.scheme.transport.encoder import Traffic
from pytorchrl.scheme.transport.messages import Rollout

Statistic = Any
"""A statistic of a shard: a number, None if it is not known yet, or a mapping of numbers (JSON)."""

_NO_CONTENTS: Mapping[str, Statistic] = MappingProxyType({
    "added": 0, "sampled": 0, "items": 0, "bytes": 0, "mass": 0.0, "min_priority": None, "stale_priorities": 0,
    "evicted_unused": 0})


class ShardState(NamedTuple):
    """The state of a shard, which it sends with each of its answers."""

    answers: int = 0
    """Calls answered so far; of two states, the one with more answers is the newer one."""
    resident: int = 0
    """Env steps in the shard."""
    evicted: int = 0
    """Env steps that newer ones have replaced since the shard started."""
    mass: float = 0.0
    """Sum of the weights with which its items are sampled."""
    smallest: float = float("inf")
    """The smallest of those weights."""
    contents: Mapping[str, Statistic] = _NO_CONTENTS
    """Statistics of the shard's storage; see `r_worker.describe`."""
    times_ms: Mapping[str, float] = MappingProxyType({})
    """Mean milliseconds of the last 100 calls of each kind."""
    traffic: Traffic = Traffic()
    """The decoding of the rollout that was added last."""

    def statistics(self) -> dict[str, Statistic]:
        """Return metrics of the shard: contents, and mean times of its calls in ms (None: not called yet)."""
        times = {f"{name}_time_ms": self.times_ms.get(name) for name in ("add", "sample", "priority")}
        return {**self.contents, **times}


class ShardStates:
    """The last known state of each shard, and the counts that insertion and sampling share. Thread-safe.

    Args:
        num_shards: Number of shards.
        changed: Event to set whenever a shard has confirmed a rollout or was reset.

    Attributes:
        changed: As given; a waiting sampler clears it.
        added: Env steps that shards have confirmed. Written by the inserter.
        trained: Env steps drawn, times the passes over a batch. Written by the sampler.
        lost: (shard, incarnation, error) of shards that the sampler has found lost; the inserter handles them.
    """

    def __init__(self, num_shards: int, changed: threading.Event) -> None:
        self._lock, self.changed = threading.Lock(), changed
        self._states = [ShardState() for _ in range(num_shards)]
        self._incarnations = [0] * num_shards
        self._headers: deque[Rollout] = deque()
        self.added = self.trained = 0
        self.lost: deque[tuple[int, int, WorkerLostError]] = deque()

    def __len__(self) -> int:
        return len(self._states)

    @property
    def current(self) -> list[ShardState]:
        """The last known state of each shard."""
        with self._lock:
            return list(self._states)

    def incarnation(self, index: int) -> int:
        """Return how often a shard was lost."""
        return self._incarnations[index]

    def snapshot(self) -> tuple[list[ShardState], list[int], int]:
        """Return the states and the incarnations of all shards, and the env steps added, at one moment."""
        with self._lock:
            return list(self._states), list(self._incarnations), self.added

    def update(self, index: int, incarnation: int, state: ShardState) -> None:
        """Store a shard's state if it is the newest one of the present incarnation."""
        with self._lock:
            if incarnation == self._incarnations[index] and state.answers > self._states[index].answers:
                self._states[index] = state

    def confirm(self, header: Rollout) -> None:
        """Count a rollout that a shard has added, and keep it without its data for the learner's statistics."""
        with self._lock:
            self.added += header.num_env_steps
            self._headers.append(header)

    def train(self, num_steps: int) -> None:
        """Count env steps that learning was given; fewer than 0 if it did not use them."""
        with self._lock:
            self.trained += num_steps

    def take_headers(self) -> list[Rollout]:
        """Return the rollouts added since the last call, without their data."""
        with self._lock:
            headers, self._headers = list(self._headers), deque()
            return headers

    def suspend(self, index: int, incarnation: int, error: WorkerLostError) -> None:
        """Stop sampling from a shard that is lost, and leave the rest to the inserter."""
        with self._lock:
            if incarnation == self._incarnations[index]:
                self._states[index] = ShardState(self._states[index].answers + 2**32)
        self.lost.append((index, incarnation, error))

    def reset(self, index: int) -> None:
        """Start a new incarnation of a shard, which is empty."""
        with self._lock:
            self._incarnations[index] += 1
            self._states[index] = ShardState()
