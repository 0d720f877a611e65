"""The base class of all storages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol, cast

import numpy as np
import torch

from pytorchrl.agent.data import ActingStep, DataKind, Obs, RolloutData, Step
from pytorchrl.agent.moments import mean_and_std
from pytorchrl.agent.names import checked_names
from pytorchrl.agent.options import AgentOptions, Factory, Part, build_options
from pytorchrl.agent.options import Options as BaseOptions
from pytorchrl.agent.seeding import Stream, derive_seed, torch_generator
from pytorchrl.agent.storages.rollout_rows import ActingRow, RolloutRows
from pytorchrl.agent.storages.tensor_rows import TensorRows
from pytorchrl.agent.updatable import Updatable
from pytorchrl.support.tracebacks import brief_errors
from pytorchrl.support.untyped import BatchOfKind, DataOfAgent, OptionsOfSubclass, StateDict, UserPart

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["ActingRow", "Storage", "StorageActor"]


class StorageActor(Protocol):
    """The members of an actor that every storage uses."""

    def initial_states(self, num_proc: int, /) -> Obs:
        """Return a mapping from network to initial memory, (num_proc, memory size); {} for an actor without memory."""


class Storage(Part, Updatable, ABC):
    """The base class of storages, which store transitions of collectors and provide batches for learners.

    A collector writes one row for each step and takes rollouts out of its storage. A learner inserts rollouts into its
    storage and draws batches. If a worker alternates between collecting and learning, one storage serves both purposes.
    Memory is allocated only when the first transition arrives.

    A subclass defines `provides` (the kind of data), a class `Options` with the option `size`, and these members for
    the learner: `insert_data_slice`, `generate_batches`, `reset` and `counters`. A subclass whose options may change
    during training also defines `update_storage_parameter`.

    Attributes:
        options: Checked options.
        actor: The actor of this worker.
        algorithm: The algorithm of this worker.
        num_envs: E, the number of environments of the collector that fills the storage.
        device: Device of the batches.
        generator: CPU generator for all random draws; its state is part of `state_dict`.
    """

    home: ClassVar[str] = "rollouts"
    provides: DataKind
    """Kind of data in the batches, declared or inherited by each class; the algorithm must be able to learn from it.

    If `provides.is_kept` is true, the storage is a replay buffer, and `counters` also contains `evicted`.
    """
    keeps_unfinished: ClassVar[bool] = False
    """Whether a full rollout may leave transitions behind, which a later rollout will contain; see `num_unfinished`."""
    draws_rollouts: ClassVar[bool] = False
    """Whether a replay storage stores and draws whole rollouts."""
    has_priorities: ClassVar[bool] = False
    """Whether sampling depends on TD errors. If so, the storage has `add_errors` and `update_priorities`, and the
    algorithm must have `td_errors`."""
    num_learned_from: int = 0
    """Number of transitions that were inserted when the replay algorithm, which sets it, last requested batches."""
    options: OptionsOfSubclass
    actor: UserPart
    algorithm: UserPart
    device: torch.device
    generator: torch.Generator

    @classmethod
    @brief_errors
    @checked_names
    def create_factory(cls, size: int, **options: object) -> Factory[Self]:
        """Return a factory of this storage; raise `ConfigError` for an invalid option."""
        return Factory(cls, build_options(cls, {"size": size, **options}))

    def __init__(
        self, options: BaseOptions, *, actor: StorageActor, algorithm: object, num_envs: int, seed: int,
        device: str = "cpu",
    ) -> None:
        """Build the storage from checked options; users call `create_factory` instead.

        Args:
            options: Checked options.
            actor: The actor of this worker.
            algorithm: The algorithm of this worker.
            num_envs: E, the number of environments of the collector that fills the storage.
            seed: Seed of the random draws.
            device: Device of the batches.

        Raises:
            ConfigError: The options of algorithm, actor and storage contradict each other.
        """
        self.refuse_contradiction(AgentOptions(
            algorithm=getattr(algorithm, "options", None), actor=getattr(actor, "options", None), storage=options,
            has_memory=getattr(actor, "is_recurrent", None), num_envs=num_envs))
        self.options, self.actor, self.algorithm, self.num_envs = options, actor, algorithm, num_envs
        self.device = torch.device(device)
        self.generator = torch_generator(derive_seed(seed, Stream.BATCHES))
        # Only collectors use these rows, which allocate no memory before the first transition.
        self._rollout_rows = self._make_rows()
        self._start_parameters()

    # Collector

    def _make_rows(self) -> RolloutRows:
        """Return the rows that the collector fills."""
        return RolloutRows(self.rollout_size, self.num_envs, self.actor.initial_states(self.num_envs), self.algorithm)

    @property
    def num_steps(self) -> int:
        """Number of transitions per environment in the current rollout."""
        return self._rollout_rows.num_steps

    @property
    def rollout_size(self) -> int:
        """T, the number of steps per environment in a whole rollout: `size`, unless a subclass overrides this."""
        return int(self.options.size)

    @property
    def full(self) -> bool:
        """Whether the current rollout has all of its `rollout_size` steps."""
        return self._rollout_rows.num_steps >= self._rollout_rows.size

    def start(self, obs: dict[str, np.ndarray], mask: np.ndarray | None = None) -> None:
        """Start a rollout with the observations after a reset, (E, ...) by name, and the action masks (E, n) bool."""
        self._rollout_rows.start(obs, mask)

    def current(self) -> ActingRow:
        """Return the inputs for the next action: observations, memory states, starts of episodes and action masks.

        All of them are (E, ...) views, valid until the next `insert_transition`.
        """
        return self._rollout_rows.current()

    def insert_transition(self, acting: ActingStep, step: Step) -> None:
        """Copy one step of all environments to the next row; only the first call allocates memory."""
        self._rollout_rows.insert(acting, step)

    def get_all_buffer_data(self, copy: bool = True) -> RolloutData:
        """Return the steps of the current rollout, which may be fewer than `rollout_size`.

        The next transition starts a new rollout, which begins with the last observation of the current rollout.

        Args:
            copy: Whether to return copies. If not, the tensors are views, which are valid until the next
                `insert_transition`. Views suffice if the same worker learns before it collects again.
        """
        return self._rollout_rows.take(copy)

    @property
    def keeps_tensors(self) -> bool:
        """Whether the storage can learn from rollouts on a device; see `stay_on_device`."""
        return False

    @property
    def num_unfinished(self) -> int:
        """Number of valid transitions that no rollout has contained yet."""
        return int(self.get_all_buffer_data(copy=False).num_valid()) if self.num_steps else 0

    @property
    def cancels_unfinished(self) -> bool:
        """Whether the transitions that a full rollout leaves behind are discarded, and all environments reset."""
        return False

    def stay_on_device(self) -> None:
        """Fill the rows with tensors of the actor's device: arguments and results of the methods above are tensors."""
        rows = TensorRows(
            self.rollout_size, self.actor.initial_states(self.num_envs), self.actor.options.observation_space)
        self._rollout_rows = cast("RolloutRows", rows)  # it has the same methods

    # Learner

    @abstractmethod
    def insert_data_slice(self, rollouts: list[RolloutData]) -> None:
        """Insert rollouts to learn from."""

    def insert_from(self, rollouts: Sequence[RolloutData], sources: Sequence[Hashable]) -> None:
        """Insert rollouts to learn from; `sources` names each rollout's collector, but most storages ignore it."""
        self.insert_data_slice(list(rollouts))

    def plan_batches(self, num_rollouts: int) -> None:
        """Prepare for train batches that contain `num_rollouts` full rollouts each.

        On-policy storages compute the number of minibatches from `num_rollouts`.
        """

    def before_gradients(self) -> None:
        """Prepare the inserted rollouts for `generate_batches`."""

    def advantage_moments(self) -> tuple[float, float, float]:
        """Return the count (may be 0), the mean and the sum of squared deviations of the valid samples' advantages."""
        return 0, 0.0, 0.0

    def normalize_advantages(self, mean: float, std: float) -> None:
        """Replace each advantage A with (A - mean) / (std + 1e-8)."""

    def normalize_by(self, moments: Sequence[DataOfAgent]) -> None:
        """Normalize the advantages with the combined `advantage_moments` of all workers."""
        self.normalize_advantages(*mean_and_std(moments))

    @abstractmethod
    def generate_batches(
        self, num_mini_batch: int, mini_batch_size: int | None = None, num_epochs: int = 1
    ) -> Iterator[BatchOfKind]:
        """Yield the batches from which gradients are computed."""

    def after_gradients(self, batch: BatchOfKind, info: Mapping[str, object]) -> None:
        """Process the results of a gradient computation, such as TD errors for priorities."""

    def item_errors(self, batch: BatchOfKind, errors: object) -> object:
        """Reduce the TD errors to one error per transition or sequence, (B,), from which the priority is computed."""
        return errors

    @abstractmethod
    def reset(self) -> None:
        """Discard all data; the memory stays allocated."""

    @property
    @abstractmethod
    def counters(self) -> dict[str, int]:
        """Numbers of transitions: `inserted` and `sampled` so far, and `resident`, the number in the storage now."""

    def state_dict(self) -> StateDict:
        """Return the state that a checkpoint needs: the generator and, in a replay buffer, the stored data.

        Tensors must be copies, because a checkpoint is written while the storage is used.
        """
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: StateDict) -> None:
        """Restore a state from `state_dict()`."""
        self.generator.set_state(state["generator"])
