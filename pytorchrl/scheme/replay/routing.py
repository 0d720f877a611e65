"""Which shard of replay a rollout is added to."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

ROUTINGS = ("round_robin", "random", "least_loaded", "by_stream")
"""In turn, drawn uniformly, the one with the fewest env steps, or always the same one for the same collection worker."""
TORN_BY = ("least_loaded", "random")
"""Routings that a user cannot mean where steps of a collection worker have to stay together, as those of sequences do."""


class Router:
    """Chooses the shard of each rollout.

    Args:
        routing: One of `ROUTINGS`.
        num_shards: Number of shards, whose indices begin with 0.
        seed: Seed of "random", which draws with a generator of its own.
        load: Returns of a shard's index what "least_loaded" compares.
    """

    def __init__(self, routing: str, num_shards: int, seed: int, load: Callable[[int], tuple[int, int]]) -> None:
        self._routing, self._num_shards, self._load = routing, num_shards, load
        self._rng = random.Random(f"routing {seed}")
        self._next = 0

    def choose(self, worker: int, free: Sequence[int], staying: Sequence[int]) -> int | None:
        """Return the shard that a rollout is added to now, or None where it has to wait.

        Args:
            worker: Index of the collection worker that made the rollout.
            free: Indices of the shards that have room for one more add.
            staying: Indices of the shards that are there, or are being replaced. For "by_stream" a shard that is being
                replaced is waited for, while the workers of one that is lost for good are shared out among the others.
        """
        if self._routing == "by_stream":
            own = staying[worker % len(staying)]
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
