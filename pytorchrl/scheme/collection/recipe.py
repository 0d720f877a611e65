"""Describe how to build collection workers: factories of the agent's parts, options of the workers, and a seed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pytorchrl.agent.algorithms.precision import is_compiled
from pytorchrl.agent.env.tensors.vec_env import class_for
from pytorchrl.agent.seeding import Stream, derive_seed
from pytorchrl.scheme.numerics import Numerics
from pytorchrl.scheme.options.collection import CWorkerOptions, ReplayCWorkerOptions
from pytorchrl.scheme.options.gradients import GWorkerOptions
from pytorchrl.scheme.options.run import ProcessOptions
from pytorchrl.scheme.transport.encoder import DATA, Compression

if TYPE_CHECKING:
    import torch

    from pytorchrl.agent.actors.base import Actor
    from pytorchrl.agent.algorithms.base import Algorithm
    from pytorchrl.agent.env import EnvFactory, VecEnv
    from pytorchrl.agent.factories import ActorFactory, AlgorithmFactory, StorageFactory
    from pytorchrl.agent.storages.base import Storage


@dataclass(frozen=True)
class CWorkerRecipe:
    """The recipe from which each gradient worker builds its collection workers.

    Attributes:
        options: Options of the workers.
        algo_factory, actor_factory, storage_factory, train_envs_factory: Factories of the agent's parts.
        seed: Seed of the experiment.
        num_threads: PyTorch threads of each remote worker, unless `col_num_threads` is set.
        numerics: Settings of the processes of remote workers; None does not change them.
        num_parents: Number of gradient workers that build a set of collection workers from this recipe.
        compression: Codec of rollouts; None: they are not compressed.
    """

    options: CWorkerOptions
    algo_factory: AlgorithmFactory
    actor_factory: ActorFactory
    storage_factory: StorageFactory
    train_envs_factory: EnvFactory
    seed: int = 0
    num_threads: int | None = ProcessOptions.num_threads
    numerics: Numerics | None = None
    num_parents: int = 1
    compression: Compression | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Look up the codec of `compression` here, because a user's codec may be unknown in the workers' processes."""
        object.__setattr__(self, "compression", Compression.of(DATA, self.options.compress_data_to_send))

    @property
    def finds_errors(self) -> bool:
        """Whether collection workers compute TD errors, which become the initial priorities in replay."""
        return isinstance(self.options, ReplayCWorkerOptions) and self.options.initial_priority == "worker"

    @property
    def checks_data(self) -> bool:
        """Whether collection workers check the dtypes of all weights that they receive."""
        return isinstance(self.options, GWorkerOptions) and self.options.check_data == "always"

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

    def can_stay_on_device(self, algorithm: Algorithm, storage: Storage) -> bool:
        """Return whether an algorithm and a storage can use tensors of environments without the host."""
        return algorithm.act_on_device is not None and storage.keeps_tensors and not self.finds_errors

    def env_maker(self, path: tuple[int, int, int], num_threads: int | None,
                  device: torch.device | None = None) -> Callable[..., VecEnv]:
        """Return a function that takes `seed` and builds the environments of one collection worker.

        Args:
            path: See `make_storage`.
            num_threads: Number of threads that a native vector environment may use; None means 1.
            device: Device on which the worker can use tensors of environments; None: it uses arrays.
        """
        index_parent, index_worker, incarnation = path
        make = functools.partial(
            self.train_envs_factory, index_grad_worker=index_parent, index_col_worker=index_worker, mode="train",
            incarnation=incarnation, num_threads=num_threads or 1)
        kind = class_for(self.train_envs_factory, device)
        # as with the function that chooses actions, `compile=True` decides whether steps are recorded into CUDA graphs
        return make if kind is None else functools.partial(
            make, kind=functools.partial(kind, records=is_compiled(self.algo_factory)))

    def num_workers_of(self, index_parent: int) -> int:
        """Return the number of collection workers of the gradient worker with this index."""
        numbers = self.options.numbers(self.num_parents)
        return numbers[min(max(0, index_parent - 1), len(numbers) - 1)]

    def place_of(self, index_parent: int, index_worker: int) -> tuple[int, int]:
        """Return a worker's index among the collection workers of the whole tree, and the number of these workers."""
        numbers = self.options.numbers(self.num_parents)
        return sum(numbers[:max(0, index_parent - 1)]) + max(0, index_worker - 1), sum(numbers)
