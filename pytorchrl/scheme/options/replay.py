"""Options of replay shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from pytorchrl.agent.options import option
from pytorchrl.errors import Problem
from pytorchrl.scheme.options.base import PrefetchOptions, QueueOptions, check_resources

ROUTINGS = ("round_robin", "random", "least_loaded", "by_stream")
"""Routing strategies, in this order: each shard in turn, a random shard, the shard with the fewest env steps, and a
fixed shard for each collection worker."""
SPLITS_SEQUENCES = ("least_loaded", "random")
"""Routings that are refused for sequences, which need all steps of a collection worker in the same shard."""
FREE = {"num_cpus": 0}
"""Default Ray resources of a shard. A shard reserves no CPU, because it is idle between calls."""


@dataclass(frozen=True, kw_only=True)
class RWorkerSetOptions(QueueOptions, PrefetchOptions):
    """Options of a gradient worker's replay shards, and of the messages between the worker and its shards."""

    num_replay_workers: int = option(
        1, low=1, help="Replay shards of each gradient worker, each with an equal share of the storage's size. A "
        "single shard is a thread of the gradient worker's process; several shards are remote.")
    replay_worker_resources: Mapping[str, float] = option(
        default_factory=lambda: dict(FREE), check=partial(check_resources, "replay_worker_resources"),
        help="Ray resources of each remote replay shard.")
    size: int | None = option(
        None, low=1, help="Total capacity of all shards in env steps. It must be set for replay of whole rollouts; "
        "for other storages, it replaces the storage's own option `size`.")

    learning_starts: int | None = option(
        None, low=0, help="Env steps that must be in replay before learning starts; None: the algorithm's "
        "start_steps, or train_batch_size for replay of whole rollouts.")
    add_in_flight: int = option(
        2, low=1, help="Largest number of rollouts in flight to each shard, at which collection waits.")
    routing: str = option(
        "round_robin", choices=ROUTINGS, help="How the shard of a rollout is chosen: each shard in turn, a random "
        "shard, the shard with the fewest env steps, or a fixed shard for each collection worker. Sequences that "
        "span rollouts always use a fixed shard.")
    min_replay_ratio: float | None = option(
        None, low=0.0, exclusive=True, help="Smallest ratio of env steps consumed to env steps collected; below "
        "it, collection waits for learning. None: no limit. `train` sets it to num_updates * mini_batch_size / "
        "update_every unless it is given.")
    max_replay_ratio: float | None = option(
        None, low=0.0, exclusive=True, help="Largest ratio of env steps consumed to env steps collected; above it, "
        "learning waits for collection. None: no limit. `train` sets it to twice that number unless it is given.")

    def contradictions(self) -> Iterator[Problem]:
        """Refuse resources for a local shard, and `min_replay_ratio` > `max_replay_ratio`."""
        yield from super().contradictions()
        if self.num_replay_workers == 1 and dict(self.replay_worker_resources) != FREE:
            yield Problem(
                "replay_worker_resources is for remote shards, but with num_replay_workers=1 the shard is a thread of "
                "the gradient worker's process", "set num_replay_workers to 2 or more, or leave "
                "replay_worker_resources out", ("replay_worker_resources", "num_replay_workers"))
        low, high = self.min_replay_ratio, self.max_replay_ratio
        if low is not None and high is not None and low > high:
            yield Problem(f"min_replay_ratio {low} exceeds max_replay_ratio {high}; collection and learning would wait "
                          "for each other", "lower min_replay_ratio", ("min_replay_ratio", "max_replay_ratio"))
