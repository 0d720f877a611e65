"""Describe how to build collection workers: factories of the agent's parts, options of the workers, and a seed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pytorchrl.agent.options import Factory, Options, option
from pytorchrl.agent.seeding import Stream, derive_seed
from pytorchrl.errors import ConfigError
from pytorchrl.runtime import DEFAULT_RESOURCES
from pytorchrl.scheme.base.worker import PARALLEL, Execution
from pytorchrl.scheme.base.worker_set import check_resources
from pytorchrl.scheme.transport.encoder import DATA, Compression

if TYPE_CHECKING:
    from pytorchrl.agent.actors.base import Actor
    from pytorchrl.agent.algorithms.base import Algorithm
    from pytorchrl.agent.env import EnvFactory, VecEnv
    from pytorchrl.agent.storages.base import Storage

INITIAL_PRIORITIES = ("max", "worker")
INFERENCE = ("worker", "central")


@dataclass(frozen=True, kw_only=True)
class CWorkerOptions(Options):
    """Options of the collection workers of each gradient worker."""

    num_col_workers: int | tuple[int, ...] = option(
        1, low=1, help="Collection workers of each gradient worker, or a tuple with one number for each gradient "
        "worker. By default, a single worker runs in the gradient worker's process; 2 or more are always remote.")
    col_execution: Execution | None = option(
        None, help="Where collection runs: \"Central\" in the gradient worker's process, \"Parallel\" in remote "
        "workers, even if there is only one. None: \"Central\" for one collection worker, \"Parallel\" for several.")
    compress_data_to_send: bool | str = option(
        False, help="Codec of rollouts: False, True (\"lz4\"), \"lz4\", \"zstd\", or \"auto\", which uses lz4 if that "
        "saves time.")
    col_worker_resources: Mapping[str, float] = option(
        default_factory=lambda: dict(DEFAULT_RESOURCES),
        help="Ray resources of each remote collection worker. The default includes a share of a GPU only for workers "
        "that compute on a GPU, and is reduced to the available resources.")
    col_device: str | None = option(
        None, help="Device of collection workers that have their own copy of the actor: \"cpu\", \"cuda\" (the GPU "
        "that Ray assigned to the worker) or \"cuda:N\"; None: the CPU or, with central inference, the learner's "
        "device.")
    col_num_threads: int | None = option(
        None, low=1, help="PyTorch threads of each remote collection worker; None: num_threads.")

    inference: str = option(
        "worker", choices=INFERENCE, help="Where the actions of asynchronous collection are chosen: by each collection "
        "worker for its own environments (\"worker\"), or by one actor in the gradient worker's process for the "
        "environments of all collection workers, which then only step environments (\"central\").")
    inference_batch: int | None = option(
        None, low=1, help="With central inference, the number of collection workers whose actions are chosen together; "
        "None: half of them, so that one half steps while actions are chosen for the other.")

    def __post_init__(self) -> None:
        """Refuse invalid resources, unusable codecs (unknown, not installed or lossy), and options without effect."""
        super().__post_init__()
        check_resources("col_worker_resources", self.col_worker_resources)
        Compression.of(DATA, self.compress_data_to_send)
        if not self.infers_centrally:
            self._refuse_changed(["inference_batch"], "inference='central'")
            return
        if self.compress_data_to_send:
            raise ConfigError("inference='central' contradicts compress_data_to_send: rollouts are assembled in the "
                              "process that uses them, and never sent; leave one of the two options out")
        if self.inference_batch is not None and self.inference_batch > min(self.numbers()):
            raise ConfigError(f"inference_batch must not exceed the number of collection workers, got "
                              f"{self.inference_batch} > {min(self.numbers())}")

    @property
    def infers_centrally(self) -> bool:
        """Whether one actor chooses the actions of all collection workers of a gradient worker."""
        return self.inference == "central"

    @property
    def num_workers(self) -> int:
        """The largest number of collection workers that any gradient worker has."""
        return max(self.numbers())

    @property
    def is_parallel(self) -> bool:
        """Whether the collection workers are remote."""
        return self.num_workers > 1 if self.col_execution is None else self.col_execution is PARALLEL

    def numbers(self, num_parents: int = 1) -> tuple[int, ...]:
        """Return how many collection workers each of the `num_parents` gradient workers has."""
        given = self.num_col_workers
        return given if isinstance(given, tuple) else (given,) * num_parents


@dataclass(frozen=True, kw_only=True)
class ReplayCWorkerOptions(CWorkerOptions):
    """Options of collection workers that feed replay shards."""

    initial_priority: str = option(
        "max", choices=INITIAL_PRIORITIES, help="Initial priority of a transition in prioritized replay: \"max\" is "
        "the largest priority so far, \"worker\" is the transition's TD error under the weights that collected it.")


@dataclass(frozen=True)
class CWorkerRecipe:
    """The recipe from which each gradient worker builds its collection workers.

    Attributes:
        options: Options of the workers.
        algo_factory, actor_factory, storage_factory, train_envs_factory: Factories of the agent's parts.
        seed: Seed of the experiment.
        num_threads: PyTorch threads of each remote worker, unless `col_num_threads` is set.
        num_parents: Number of gradient workers that build a set of collection workers from this recipe.
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
        """Look up the codec of `compression` here, because a user's codec may be unknown in the workers' processes."""
        object.__setattr__(self, "compression", Compression.of(DATA, self.options.compress_data_to_send))

    @property
    def finds_errors(self) -> bool:
        """Whether collection workers compute TD errors, which become the initial priorities in replay."""
        return isinstance(self.options, ReplayCWorkerOptions) and self.options.initial_priority == "worker"

    def make_storage(self, device: str, actor: Actor, algorithm: Algorithm, path: tuple[int, int, int]) -> Storage:
        """Return a storage for one collection worker.

        Args:
            device: Device of the actor.
            actor: The actor whose networks choose the worker's actions.
            algorithm: The algorithm that chooses the worker's actions with this actor.
            path: Indices of the gradient worker and of the collection worker, and the incarnation of the latter.
        """
        return self.storage_factory(device=device, actor=actor, algorithm=algorithm,
                                    num_envs=self.train_envs_factory.num_envs,
                                    seed=derive_seed(self.seed, Stream.BATCHES, *path))

    def env_maker(self, path: tuple[int, int, int], num_threads: int | None) -> Callable[..., VecEnv]:
        """Return a function that takes `seed` and builds the environments of one collection worker.

        Args:
            path: See `make_storage`.
            num_threads: Number of threads that a native vector environment may use; None means 1.
        """
        index_parent, index_worker, incarnation = path
        return functools.partial(
            self.train_envs_factory, index_grad_worker=index_parent, index_col_worker=index_worker, mode="train",
            incarnation=incarnation, num_threads=num_threads or 1)

    def num_workers_of(self, index_parent: int) -> int:
        """Return the number of collection workers of the gradient worker with this index."""
        numbers = self.options.numbers(self.num_parents)
        return numbers[min(max(0, index_parent - 1), len(numbers) - 1)]

    def place_of(self, index_parent: int, index_worker: int) -> tuple[int, int]:
        """Return a worker's index among the collection workers of the whole tree, and the number of these workers."""
        numbers = self.options.numbers(self.num_parents)
        return sum(numbers[:max(0, index_parent - 1)]) + max(0, index_worker - 1), sum(numbers)
