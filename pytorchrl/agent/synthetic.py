"""A synthetic agent without real environments and networks, for observing and counting the work of a scheme.

An env step is only a unique number, the step number. The only parameter is the number of updates. With the simulated
runtime, and with costs that were measured in a real run, this agent predicts how a scheme of any size behaves.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from pytorchrl.agent.algorithms.base import Algorithm, copy_tensors
from pytorchrl.agent.data import ActingStep, Arrays, Batch, BatchStorage, DataKind, RolloutData, Step
from pytorchrl.agent.env.vec_env import EnvFactory, VecEnv
from pytorchrl.agent.options import Factory, build_options, option
from pytorchrl.agent.options import Options as BaseOptions
from pytorchrl.agent.storages.base import ActingRow, Storage
from pytorchrl.errors import NonFiniteUpdateError
from pytorchrl.support.untyped import StateDict

_NONE = torch.zeros(0)


class SyntheticEnvs(VecEnv):
    """Environments whose episodes never end.

    The reward of a step is its step number, which is unique among the steps of all workers and their replacements.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(BaseOptions):
        """Options of `SyntheticEnvs`."""

        vec_env_size: int = option(
            VecEnv.Options.vec_env_size, help="Number of environments stepped together.", low=1)

    def __init__(self, options: Options, *, index_grad_worker: int = 0, index_col_worker: int = 0, mode: str = "train",
                 seed: int | None = None, num_threads: int = 1, incarnation: int = 0) -> None:
        self.observation_space: dict[str, gym.Space[object]] = {}
        self.action_space = gym.spaces.Discrete(1)
        self._num_envs = options.vec_env_size
        self._first = ((index_grad_worker << 12 | index_col_worker) << 12 | incarnation) << 28
        self._num_steps = 0

    @classmethod
    def create_factory(  # type: ignore[override] # there is no env_fn
        cls, vec_env_size: int = Options.vec_env_size,
    ) -> EnvFactory:
        """Return a factory of environment vectors of size `vec_env_size`."""
        return EnvFactory(cls, build_options(cls, {"vec_env_size": vec_env_size}), observation_space={},
                          action_space=gym.spaces.Discrete(1))

    @property
    def num_restarts(self) -> int:
        """The number of restarts, which is always 0."""
        return 0

    def reset(self) -> tuple[Arrays, None]:
        """Return empty observations and no mask."""
        return {}, None

    def step(self, action: np.ndarray) -> Step:
        """Return one step of E environments; the rewards are the step numbers, and no episode ends."""
        numbers = self._first + self._num_steps + np.arange(self._num_envs)
        self._num_steps += self._num_envs
        no = np.zeros(self._num_envs, bool)
        return Step(
            obs={}, reward=numbers, terminated=no, truncated=no, valid=~no, first=no,
            final_index=np.zeros(0, np.int64), final_obs={}, mask=None, episodes=[])

    def close(self) -> None:
        """Do nothing."""


class SyntheticActor(nn.Module):
    """An actor that has no parameters and makes no decisions."""

    is_recurrent = False
    reward_moments = None

    @classmethod
    def create_factory(cls) -> Factory[SyntheticActor]:
        """Return a factory of this actor."""
        return Factory(cls, BaseOptions())

    def __init__(self, options: BaseOptions, *, device: str = "cpu", seed: int = 0) -> None:
        super().__init__()

    def moments_of(self, rollout: RolloutData, returns: Tensor | None = None) -> dict[str, object]:
        """Return no moments, because there is no normalizer."""
        return {}

    def merge_moments(self, moments: Mapping[str, object]) -> None:
        """Do nothing, because there is no normalizer."""


class SyntheticAlgorithm(Algorithm):
    """An algorithm whose only parameter is the number of updates: each update adds a gradient of 1."""

    @dataclass(frozen=True, kw_only=True)
    class Options(BaseOptions):
        """Options of `SyntheticAlgorithm`."""

        num_epochs: int = option(Algorithm.num_epochs, help="Passes over each rollout.", low=1)
        num_mini_batch: int = option(
            Algorithm.num_mini_batch, help="Minibatches per pass, with one update each.", low=1)
        learns_from: DataKind = option(DataKind.OLDER_ROLLOUTS, help="Kind of data that the storage provides.")

    actor_class = SyntheticActor
    advantage_normalization = "none"
    gamma = 1.0

    def __init__(self, options: Options, *, actor: SyntheticActor, seed: int, device: str = "cpu") -> None:
        self.options, self.actor, self.device = options, actor, torch.device(device)
        self.learns_from = options.learns_from
        self.num_epochs, self.num_mini_batch = options.num_epochs, options.num_mini_batch
        self.schedules, self.parameters = {}, {}
        self.count = torch.zeros(1, dtype=torch.float64)

    def acting_state(self) -> dict[str, Tensor]:
        """Return the number of updates, which takes the place of parameters."""
        return {"count": self.count.clone()}

    def load_acting_state(self, state: Mapping[str, Tensor | np.ndarray]) -> None:
        """Restore the number of updates."""
        copy_tensors({"count": self.count}, state, "acting state")

    def learning_state(self) -> dict[str, Tensor]:
        """Return an empty state."""
        return {}

    def reseed(self, seed: int) -> None:
        """Do nothing, because there are no random draws."""

    def state_dict(self) -> StateDict:
        """Return the number of updates, which takes the place of parameters."""
        return self.acting_state()

    def load_state_dict(self, state: StateDict) -> None:
        """Restore the number of updates."""
        self.load_acting_state(state)

    def acting_step(self, obs: Arrays, rhs: Arrays, done: np.ndarray, deterministic: bool = False,
                    mask: np.ndarray | None = None) -> ActingStep:
        """Return the action 0 for each environment."""
        action = np.zeros(len(done), np.int64)
        return ActingStep(action, action, {}, {})

    def finish_rollout(self, rollout: RolloutData) -> None:
        """Add nothing to the rollout."""

    def batches(self, storage: BatchStorage) -> Iterator[Batch]:
        """Return batches that contain every step once per pass."""
        return storage.generate_batches(num_mini_batch=self.num_mini_batch, num_epochs=self.num_epochs)

    def compute_gradients(self, batch: Batch) -> tuple[list[Tensor], dict[str, float]]:
        """Return a gradient of 1."""
        self._gradients = gradients = [torch.ones(1, dtype=torch.float64)]
        return gradients, {"loss": 0.0}

    @property
    def gradient_sizes(self) -> list[int]:
        """Number of scalars in each gradient; there is one gradient, of one scalar."""
        return [1]

    def apply_gradients(self, gradients: list[Tensor] | None = None) -> dict[str, float]:
        """Increase the only parameter, which counts updates, by the gradient, which is 1.

        Raises:
            CallOrderError: `gradients` is None, and `compute_gradients` has not been called yet.
            NonFiniteUpdateError: The gradient is not finite.
        """
        (gradient,) = self.last_gradients() if gradients is None else gradients
        if not math.isfinite(float(gradient)):
            raise NonFiniteUpdateError("the gradient is not finite")
        self.count += gradient
        return {}


class SyntheticStorage(Storage):
    """A storage that contains only the unique number of each env step.

    Attributes:
        inserted: Unique numbers of all steps that the learner received, in order, one array per rollout.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(BaseOptions):
        """Options of `SyntheticStorage`."""

        size: int = option(help="Steps of each environment in a rollout.", low=1)
        # `SyntheticStorage` itself has no attribute `provides`: if an algorithm and a storage do not fit, the error
        # message suggests all storage classes that have `provides`, and a synthetic storage would not help the user.
        provides: ClassVar[DataKind] = DataKind.OLDER_ROLLOUTS

    def __init__(self, options: Options, *, device: str, actor: object, algorithm: object, num_envs: int,
                 seed: int) -> None:
        self.options, self.provides = options, options.provides
        self.generator = torch.Generator().manual_seed(seed % 2**63)
        self._done = np.zeros(num_envs, bool)
        self._rows: list[np.ndarray] = []
        self._drawn_from = np.zeros(0, np.int64)
        self.inserted: list[np.ndarray] = []

    @property
    def num_steps(self) -> int:
        """Number of stored steps of each environment."""
        return len(self._rows)

    @property
    def full(self) -> bool:
        """Whether the rollout is complete."""
        return len(self._rows) >= self.rollout_size

    def start(self, obs: Arrays, mask: np.ndarray | None = None) -> None:
        """Ignore the observations."""

    def current(self) -> ActingRow:
        """Return empty observations, an empty memory, `done` (E,) with only false entries, and no mask."""
        return {}, {}, self._done, None

    def insert_transition(self, acting: ActingStep, step: Step) -> None:
        """Store `step.reward`, (E,): the environments return step numbers as rewards."""
        self._rows.append(step.reward)

    def get_all_buffer_data(self, copy: bool = True) -> RolloutData:
        """Return a rollout whose rewards (T, E) int64 are the step numbers, and remove it from the storage."""
        rows, self._rows = self._rows, []
        numbers = torch.from_numpy(np.array(rows, np.int64).reshape(len(rows), len(self._done)))
        no = torch.zeros(numbers.shape, dtype=torch.bool)
        return RolloutData(
            obs={}, done=no, rhs={}, mask=None, action=_NONE, reward=numbers, terminated=no, truncated=no, valid=~no,
            final_index=torch.zeros((0, 2), dtype=torch.int64), final_obs={})

    def insert_data_slice(self, rollouts: list[RolloutData]) -> None:
        """Store the step numbers of `rollouts`; batches are drawn from these steps until the next call."""
        parts = [np.asarray(rollout.reward).reshape(-1) for rollout in rollouts]
        self.inserted += parts
        self._drawn_from = np.concatenate(parts)

    def generate_batches(self, num_mini_batch: int, mini_batch_size: int | None = None,
                         num_epochs: int = 1) -> Iterator[Batch]:
        """Yield minibatches of nearly equal size; every pass has the same order."""
        parts = np.array_split(self._drawn_from, min(num_mini_batch, len(self._drawn_from)))
        for number in range(num_epochs):
            for index, part in enumerate(parts):
                yield Batch(
                    obs={}, done=_NONE, rhs={}, mask=None, action=torch.from_numpy(part), valid=None, logp=_NONE,
                    value=_NONE, ret=_NONE, advantage=_NONE, num_samples=len(part),
                    num_new_samples=len(part) if number == 0 else 0,
                    last=number == num_epochs - 1 and index == len(parts) - 1)

    def reset(self) -> None:
        """Discard the stored steps."""
        self._rows = []

    @property
    def counters(self) -> dict[str, int]:
        """Numbers of steps: `inserted` so far, `resident` (stored now), and `sampled`, which is always 0."""
        return {"inserted": sum(map(len, self.inserted)), "resident": len(self._drawn_from), "sampled": 0}


@dataclass(frozen=True, slots=True)
class SyntheticReplayBatch(Batch):
    """A batch from replay; the actions in the batch are step numbers."""

    ids: Tensor = _NONE
    """(B,) int64, for each step the number of steps inserted before it."""


class SyntheticReplay(SyntheticStorage):
    """A replay of step numbers; it yields batches once it has received `learning_starts` steps."""

    @dataclass(frozen=True, kw_only=True)
    class Options(SyntheticStorage.Options):
        """Options of `SyntheticReplay`; `size` is the capacity of the replay in steps."""

        rollout_size: int = option(4, help="Steps of each environment in a rollout.", low=1)
        learning_starts: int = option(0, help="Steps that must be inserted before the first draw.", low=0)
        provides: ClassVar[DataKind] = DataKind.TRANSITIONS

    def __init__(self, options: Options, *, device: str, actor: object, algorithm: object, num_envs: int,
                 seed: int) -> None:
        super().__init__(options, device=device, actor=actor, algorithm=algorithm, num_envs=num_envs, seed=seed)
        self.recorded_errors: list[tuple[np.ndarray, np.ndarray]] = []

    def state_dict(self) -> StateDict:
        """Return the state, with the step numbers of all inserted steps and the step numbers of the stored steps."""
        return {**super().state_dict(), "inserted": [torch.from_numpy(part) for part in self.inserted],
                "drawn_from": torch.from_numpy(self._drawn_from)}

    def load_state_dict(self, state: StateDict) -> None:
        """Restore the step numbers from the result of `state_dict`."""
        super().load_state_dict(state)
        self.inserted = [part.numpy() for part in state["inserted"]]
        self._drawn_from = state["drawn_from"].numpy()

    @property
    def rollout_size(self) -> int:
        """Number of steps of each environment in a rollout."""
        size: int = self.options.rollout_size
        return size

    def insert_data_slice(self, rollouts: list[RolloutData], sources: Sequence[Hashable] | None = None) -> None:
        """Append steps; if the capacity is exceeded, evict the oldest steps."""
        kept = self._drawn_from
        super().insert_data_slice(rollouts)
        self._drawn_from = np.concatenate([kept, self._drawn_from])[-self.options.size:]

    def generate_batches(self, num_mini_batch: int, mini_batch_size: int | None = None,
                         num_epochs: int = 1) -> Iterator[Batch]:
        """Yield the same batch `num_mini_batch` times.

        If `mini_batch_size` is None, the batch contains all stored steps. Otherwise, it contains the oldest
        `mini_batch_size` steps; if fewer are stored, the stored steps are repeated.
        """
        if self.counters["inserted"] < self.options.learning_starts:
            return
        kept = self._drawn_from
        self._drawn_from = kept if mini_batch_size is None else np.resize(kept, mini_batch_size)
        batches = list(super().generate_batches(1)) * num_mini_batch
        self._drawn_from = kept
        ids = np.arange(self.num_rows_added - len(kept), self.num_rows_added)
        ids = ids if mini_batch_size is None else np.resize(ids, mini_batch_size)
        for number, batch in enumerate(batches, start=1):
            fields = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
            yield SyntheticReplayBatch(
                **{**fields, "num_new_samples": 0, "last": number == num_mini_batch}, ids=torch.from_numpy(ids))

    @property
    def num_rows_added(self) -> int:
        """Number of steps inserted so far."""
        return self.counters["inserted"]

    def rows_of(self, ids: np.ndarray) -> np.ndarray:
        """Return `ids`, because the ids in a batch are row numbers; see `ReplayBuffer`."""
        return ids

    @property
    def mass(self) -> float:
        """Sum of the priorities of all stored steps, each of which has priority 1."""
        return float(len(self._drawn_from))

    @property
    def num_items(self) -> int:
        """Number of stored steps."""
        return len(self._drawn_from)

    @property
    def num_bytes(self) -> int:
        """Memory that the step numbers use, in bytes."""
        return self._drawn_from.nbytes

    def update_priorities(self, ids: np.ndarray, errors: np.ndarray) -> None:
        """Record the ids and the TD errors, so that tests can read them."""
        self.recorded_errors.append((ids, errors))

    @property
    def counters(self) -> dict[str, int]:
        """Numbers of steps: `inserted` and `evicted` so far, `resident` (stored now), and `sampled` (always 0)."""
        found = super().counters
        return {**found, "evicted": found["inserted"] - found["resident"]}


def synthetic_agent(size: int = 4, num_envs: int = 1, num_epochs: int = 1, num_mini_batch: int = 1,
                    capacity: int | None = None, learning_starts: int = 0) -> Iterable[Factory[object]]:
    """Return factories of the algorithm, actor, storage and environments, in the order of `Scheme`'s arguments.

    Args:
        size: Steps of each environment in a rollout.
        num_envs: Number of environments per worker.
        num_epochs: Passes over each rollout.
        num_mini_batch: Minibatches per pass.
        capacity: Capacity of a replay in steps; None means a storage of rollouts instead of a replay.
        learning_starts: Steps that must be inserted into a replay before the first draw.
    """
    storage: Factory[SyntheticStorage] = SyntheticStorage.create_factory(size)
    if capacity is not None:
        storage = SyntheticReplay.create_factory(capacity, rollout_size=size, learning_starts=learning_starts)
    algorithm = SyntheticAlgorithm.create_factory(
        num_epochs=num_epochs, num_mini_batch=num_mini_batch, learns_from=storage.options.provides)
    return (algorithm, SyntheticActor.create_factory(), storage, SyntheticEnvs.create_factory(num_envs))
