"""The recipe of collection workers: their agent, options and seed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pytorchrl.agent.options import Factory, Options, option
from pytorchrl.runtime import DEFAULT_RESOURCES
from pytorchrl.scheme.base.worker import PARALLEL, Execution
from pytorchrl.scheme.base.worker_set import check_resources
from pytorchrl.scheme.transport.encoder import DATA, Compression

if TYPE_CHECKING:
    from pytorchrl.agent.actors.base import Actor
    from pytorchrl.agent.algorithms.base import Algorithm
    from pytorchrl.agent.env import EnvFactory
    from pytorchrl.agent.storages.base import Storage

INITIAL_PRIORITIES = ("max", "worker")


@dataclass(frozen=True, kw_only=True)
class CWorkerOptions(Options):
    """Options of the collection workers of each gradient worker."""

    num_col_workers: int | tuple[int, ...] = option(
        1, low=1, help="Collection workers of each gradient worker, or a tuple with a number for each. 1 collects "
                       "in the gradient "
        "worker's process, 2 or more are remote.")
    col_execution: Execution | None = option(
        None, help="Place of collection: \"Central\" is the gradient worker's process, \"Parallel\" makes all "
                   "collection workers "
        "remote, also a single one. None: by their number.")
    compress_data_to_send: bool | str = option(
        False, help="Codec of rollouts: False, True (\"lz4\"), \"lz4\", \"zstd\", or \"auto\", which uses lz4 "
                    "while that saves time.")
    col_worker_resources: Mapping[str, float] = option(
        default_factory=lambda: dict(DEFAULT_RESOURCES),
        help="Ray resources of each remote collection worker. The default includes a share of a GPU only for "
             "workers that "
        "compute on one, and shrinks to what is available.")
    col_device: str | None = option(
        None, help="Device of collection workers with an actor of their own: \"cpu\", \"cuda\" (the GPU that Ray "
                   "assigned to the "
        "worker) or \"cuda:N\"; None: the CPU.")
    col_num_threads: int | None = option(
        None, low=1, help="PyTorch threads of each collection worker in a process of its own; None: num_threads.")

    def __post_init__(self) -> None:
        """Refuse codecs that are unknown, not installed or lossy, and wrong resources."""
        super().__post_init__()
        check_resources("col_worker_resources", self.col_worker_resources)
        Compression.of(DATA, self.compress_data_to_send)

    @property
    def num_workers(self) -> int:
        """Largest number of collection workers of a gradient worker."""
        return max(self.numbers())

    @property
    def is_parallel(self) -> bool:
        """Whether the collection workers are remote."""
        return self.num_workers > 1 if self.col_execution is None else self.col_execution is PARALLEL

    def numbers(self, num_parents: int = 1) -> tuple[int, ...]:
        """Return the number of collection workers of each gradient worker that computes gradients."""
        given = self.num_col_workers
        return given if isinstance(given, tuple) else (given,) * num_parents


@dataclass(frozen=True, kw_only=True)
class ReplayCWorkerOptions(CWorkerOptions):
    """Options of collection workers that feed replay shards."""

    initial_priority: str = option(
        "max", choices=INITIAL_PRIORITIES, help="First priority of a transition in a storage with priorities: "
                                                "\"max\", the largest "
        "so far, or \"worker\", its TD error under the weights that collected it.")


@dataclass(frozen=True)
class CWorkerRecipe:
    """The recipe of the collection workers of each gradient worker.

    Attributes:
        options: Options of the workers.
        algo_factory, actor_factory, storage_factory, train_envs_factory: The agent.
        seed: Seed of the experiment.
        num_threads: PyTorch threads of each remote worker, unless `col_num_threads` is set.
        num_parents: Number of gradient workers that have such a set.
        compression: Codec of rollouts; None: they are not compressed.
    """

    options: CWorkerOptions
    algo_factory: Factory[Algorithm]
    actor_factory: Factory[Actor]
    storage_factory: Factory[Storage]
    train_envs_factory: EnvFactory
    seed: int = 0
    num_threads: int | None = 1
    num_parents: int = 1
    compression: Compression | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Look up the codec now: a user's codec may be registered in this process only."""
        object.__setattr__(self, "compression", Compression.of(DATA, self.options.compress_data_to_send))

    @property
    def finds_errors(self) -> bool:
        """Whether rollouts contain TD errors under the weights that collected them, as first priorities in replay."""
        return isinstance(self.options, ReplayCWorkerOptions) and self.options.initial_priority == "worker"

    def num_workers_of(self, index_parent: int) -> int:
        """Return the number of remote collection workers of a gradient worker, if they are parallel."""
        numbers = self.options.numbers(self.num_parents)
        return numbers[min(max(0, index_parent - 1), len(numbers) - 1)]

    def place_of(self, index_parent: int, index_worker: int) -> tuple[int, int]:
        """Return the place of a worker among the collection workers of all gradient workers, and their number."""
        numbers = self.options.numbers(self.num_parents)
        return sum(numbers[:max(0, index_parent - 1)]) + max(0, index_worker - 1), sum(numbers)
