"""Choose the replay shard to which a rollout is added."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

SPLITS_SEQUENCES = ("least_loaded", "random")
"""Routings that are refused for sequences, which need all steps of a collection worker in the same shard."""


class Router:
    """A strategy that chooses the shard of each rollout.

    Args:
        routing: One of `ROUTINGS`.
        num_shards: Number of shards; their indices start at 0.
        seed: Seed of the generator that "random" draws from.
        load: Function that returns the load of a shard, given its index; "least_loaded" chooses the shard with the
            smallest load.
    """

    def __init__(self, routing: str, num_shards: int, seed: int, load: Callable[[int], tuple[int, int]]) -> None:
        self._routing, self._num_shards, self._load = routing, num_shards, load
        self._rng = random.Random(f"routing {seed}")
        self._next = 0

    def choose(self, worker: int, free: Sequence[int], staying: Sequence[int]) -> int | None:
        """Return the index of the shard to which a rollout is added now, or None if the rollout must wait.

        With `routing="by_stream"`, all rollouts of a collection worker go to the same shard, and wait while this shard
        is being replaced. If a shard is lost and will not be replaced, its collection workers are distributed over
        the remaining shards.

        Args:
            worker: Index of the collection worker that collected the rollout.
            free: Indices of the shards that can accept another rollout.
            staying: Indices of the shards that are running or being replaced.
        """
        if self._routing == "by_stream":
            own = worker % self._num_shards
            if own not in staying:
                own = staying[worker // self._num_shards % len(staying)]
            return own if own in free else None
        if not free:
            return None
        if self._routing == "random":
            return self._rng.choice(free)
        if self._routing == "least_loaded":
            return min(free, key=self._load)
        place = min(free, key=lambda index: (index - self._next) % self._num_shards)
        self._next = place + 1
        return place
