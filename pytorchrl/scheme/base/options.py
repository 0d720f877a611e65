"""Options that several classes share; each option is declared once."""

from __future__ import annotations

from dataclasses import dataclass

from pytorchrl.agent.options import Options, option


@dataclass(frozen=True, kw_only=True)
class QueueOptions(Options):
    """The capacity of the queue in front of an asynchronous learner."""

    queue_size: int = option(
        16, low=1, help="Largest number of train batches that wait for an asynchronous learner; with replay workers, "
        "the largest number of batches, over all shards, that are requested or waiting.")


@dataclass(frozen=True, kw_only=True)
class PrefetchOptions(Options):
    """The number of batches that are prepared in advance."""

    prefetch: int | None = option(
        None, low=0, help="Number of microbatches (0 or 1) that remote collection workers collect in advance, while "
        "the gradient of another one is computed; None: 1 where possible. With replay workers, the number of batches "
        "requested from each shard in advance; None: 4.")
