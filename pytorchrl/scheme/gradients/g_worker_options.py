"""Options that control the batches of a gradient worker."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TypeVar

from pytorchrl.agent.options import Options, option
from pytorchrl.scheme.supervision.bad_batches import check_directory

OptionsT = TypeVar("OptionsT", bound=Options)


@dataclass(frozen=True, kw_only=True)
class GWorkerOptions(Options):
    """Options that control the batches of each gradient worker."""

    train_batch_size: int | None = option(
        None, low=1, help="Least number of steps in a train batch, including steps in which an environment is reset. "
        "A train batch consists of whole rounds (synchronous collection) or whole rollouts (asynchronous collection); "
        "None: a single round or rollout. With replay workers, the number of transitions or sequences sampled for an "
        "update (None: the algorithm's mini_batch_size); if whole rollouts are sampled, the least number of steps "
        "(`VTraceBuffer`) or sequences (`RolloutSequenceBuffer`) that they contain.")
    keep_bad_batches: str | os.PathLike[str] | None = option(
        None, help="Directory in which each gradient worker saves its first batches whose loss or gradient is not "
        "finite; None: such batches are not saved.")

    def __post_init__(self) -> None:
        """Make `keep_bad_batches` an absolute path; raise `ConfigError` if the path cannot be a writable directory."""
        super().__post_init__()
        if self.keep_bad_batches is not None:
            object.__setattr__(self, "keep_bad_batches", check_directory("keep_bad_batches", self.keep_bad_batches))


def options_of(owner: type[OptionsT], collection: Options) -> OptionsT:
    """Return `collection` if it is an instance of `owner`; otherwise, return an `owner` with default values.

    The caller can therefore read the options that `owner` defines, whatever class of options `collection` has.
    """
    return collection if isinstance(collection, owner) else owner()
