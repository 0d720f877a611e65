"""Describe how to build gradient workers and the workers below them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pytorchrl.errors import ConfigError, FactoryError
from pytorchrl.scheme.collection.c_worker_set import CWorkerSetFactory
from pytorchrl.scheme.numerics import Numerics
from pytorchrl.scheme.options.base import as_keywords, build, check_execution
from pytorchrl.scheme.options.collection import Collection
from pytorchrl.scheme.options.gradients import GWorkerSetOptions
from pytorchrl.scheme.options.run import ProcessOptions, SupervisorOptions
from pytorchrl.scheme.options.settings import collection_of, numbers_problems
from pytorchrl.scheme.options.updates import UWorkerOptions
from pytorchrl.scheme.replay.r_worker_set import RWorkerSetFactory
from pytorchrl.scheme.transport.encoder import GRADS, Compression
from pytorchrl.support.problems import raise_all

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class GWorkerRecipe:
    """The recipe from which the update worker builds its gradient workers.

    Attributes:
        options: Options of the set of gradient workers.
        collection: Options that control how each gradient worker collects its data.
        col_workers_factory: Factory of the collection workers.
        replay_workers_factory: Factory of the replay shards; None: no replay shards.
        supervision: Options for lost workers.
        seed: Seed of the experiment.
        num_threads: Number of PyTorch threads of each remote worker.
        numerics: Settings of the processes of remote workers; None does not change them.
        compress_weights_to_send: Codec of weights that gradient workers send to remote collection workers.
        compression: Codec of gradients; None: they are not compressed.
    """

    options: GWorkerSetOptions
    collection: Collection
    col_workers_factory: CWorkerSetFactory
    replay_workers_factory: RWorkerSetFactory | None = None
    supervision: SupervisorOptions = field(default_factory=SupervisorOptions)
    seed: int = 0
    num_threads: int = ProcessOptions.num_threads
    numerics: Numerics | None = None
    compress_weights_to_send: bool | str = UWorkerOptions.compress_weights_to_send
    compression: Compression | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Look up the codec of `compression` here, because a user's codec may be unknown in the workers' processes."""
        object.__setattr__(self, "compression", Compression.of(GRADS, self.options.compress_grads_to_send))

    @classmethod
    def from_arguments(cls, col_workers_factory: object, of_workers: Mapping[str, object],
                       of_collection: Mapping[str, object], replay_workers_factory: object = None) -> Self:
        """Build a recipe from the factories of the levels below and from keywords.

        Args:
            col_workers_factory: Result of `CWorkerSet.create_factory`.
            of_workers: Options of the set of gradient workers, by name.
            of_collection: Options of collection, by name, in addition to those in the factories. `col_execution` and
                `col_communication` must be among them.
            replay_workers_factory: Result of `RWorkerSet.create_factory`; None: no replay shards.

        Raises:
            ConfigError: An option is unknown, has an invalid value, or would have no effect; or options contradict each
                other.
            FactoryError: A factory is not the result of `create_factory`.
        """
        if not isinstance(col_workers_factory, CWorkerSetFactory):
            raise _not_a_factory("col_workers_factory", "CWorkerSet", col_workers_factory)
        given = {**as_keywords(col_workers_factory.options), **of_collection}
        shards = None
        if replay_workers_factory is not None:
            if not isinstance(replay_workers_factory, RWorkerSetFactory):
                raise _not_a_factory("replay_workers_factory", "RWorkerSet", replay_workers_factory)
            shards = replay_workers_factory
            given = {**as_keywords(shards.options), **given}
        check_execution("col", str(given["col_execution"]), col_workers_factory.options.num_workers)
        collection = collection_of(given)
        recipe = cls(build(GWorkerSetOptions, of_workers), collection,
                     replace(col_workers_factory, options=collection), shards)
        recipe.check()
        return recipe

    def check(self) -> None:
        """Raise `ConfigError` if the options of the worker sets contradict each other."""
        raise_all(numbers_problems(self.collection, self.options))
        col, shards = self.col_workers_factory, self.replay_workers_factory
        if shards is not None and (shards.algo_factory, shards.actor_factory, shards.storage_factory) != (
                col.algo_factory, col.actor_factory, col.storage_factory):
            raise ConfigError("replay_workers_factory and col_workers_factory have different agents; give both the "
                              "same factories of algorithm, actor and storage")


def _not_a_factory(name: str, owner: str, got: object) -> FactoryError:
    return FactoryError(f"{name} must be the result of {owner}.create_factory(...), got {got!r}")
