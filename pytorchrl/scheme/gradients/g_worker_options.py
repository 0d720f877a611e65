"""Options of a gradient worker for the data of one gradient."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TypeVar

from pytorchrl.agent.options import Options, option
from pytorchrl.scheme.supervision.bad_batches import check_directory

OptionsT = TypeVar("OptionsT", bound=Options)


@dataclass(frozen=True, kw_only=True)
class GWorkerOptions(Options):
    """Options of each gradient worker for the data of one gradient."""

    train_batch_size: int | None = option(
        None, low=1, help="Least number of steps of a train batch: whole rounds if collection is synchronous, whole "
        "rollouts if it is asynchronous; None: one. Steps in which an environment is reset count. With replay workers, "
        "transitions or sequences drawn for an update, None: the algorithm's mini_batch_size; for replay of whole "
        "rollouts, the least number of their steps (`VTraceBuffer`) or sequences (`RolloutSequenceBuffer`).")
    keep_bad_batches: str | os.PathLike[str] | None = option(
        None, help="Directory for the first batches of each gradient worker whose loss or gradient is not finite; None "
        "keeps none.")

    def __post_init__(self) -> None:
        """Refuse a directory that cannot be made; keep its absolute path."""
        super().__post_init__()
        if self.keep_bad_batches is not None:
            object.__setattr__(self, "keep_bad_batches", check_directory("keep_bad_batches", self.keep_bad_batches))


def options_of(owner: type[OptionsT], collection: Options) -> OptionsT:
    """Return the options as those of an owner; the owner's defaults if this kind of collection has none of them."""
    return collection if isinstance(collection, owner) else owner()
