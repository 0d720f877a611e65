"""Options that several parts of a scheme share, so that each has one home."""

from __future__ import annotations

from dataclasses import dataclass

from pytorchrl.agent.options import Options, option


@dataclass(frozen=True, kw_only=True)
class QueueOptions(Options):
    """The bound of a queue in front of an asynchronous learner."""

    queue_size: int = option(
        16, low=1, help="Train batches that may wait for an asynchronous learner; with replay workers, batches "
        "requested or waiting, over all shards.")


@dataclass(frozen=True, kw_only=True)
class PrefetchOptions(Options):
    """The number of batches that are prepared ahead of use."""

    prefetch: int | None = option(
        None, low=0, help="Microbatches (0 or 1) that remote collection workers collect while one is differentiated; "
        "None: 1 where possible. With replay workers, batches requested from each shard ahead of use; None: 4.")
