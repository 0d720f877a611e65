"""Options for the data of a gradient worker."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TypeVar

from pytorchrl.agent.options import Options, option
from pytorchrl.scheme.supervision.bad_batches import check_directory

OptionsT = TypeVar("OptionsT", bound=Options)


@dataclass(frozen=True, kw_only=True)
class GWorkerOptions(Options):
    """Options for the data of each gradient worker."""

    train_batch_size: int | None = option(
        None, low=1, help="Least number of steps in a train batch, including steps in which an environment is reset. "
        "A train batch consists of whole rounds (synchronous collection) or whole rollouts (asynchronous collection); "
        "None: a single round or rollout. With replay workers, the number of transitions or sequences sampled for an "
        "update (None: the algorithm's mini_batch_size); with replay of whole rollouts, their least number of steps "
        "(`VTraceBuffer`) or sequences (`RolloutSequenceBuffer`).")
    keep_bad_batches: str | os.PathLike[str] | None = option(
        None, help="Directory for the first batches of each gradient worker with a loss or gradient that is not "
        "finite; None: they are not kept.")

    def __post_init__(self) -> None:
        """Refuse a directory that cannot be created, and make its path absolute."""
        super().__post_init__()
        if self.keep_bad_batches is not None:
            object.__setattr__(self, "keep_bad_batches", check_directory("keep_bad_batches", self.keep_bad_batches))


def options_of(owner: type[OptionsT], collection: Options) -> OptionsT:
    """Return the options if they include those of an owner, else the owner's default options."""
    return collection if isinstance(collection, owner) else owner()
