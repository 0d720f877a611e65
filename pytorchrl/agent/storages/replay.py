"""Uniform experience replay. B = transitions drawn, T = steps of a rollout, E = environments."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from pytorchrl.agent.contracts import check_draw
from pytorchrl.agent.data import DataKind, Obs, ReplayBatch, RolloutData, map_tensors
from pytorchrl.agent.options import AgentOptions, option
from pytorchrl.agent.options import Options as BaseOptions
from pytorchrl.agent.seeding import UniformDraws
from pytorchrl.agent.storages.base import Storage, StorageActor
from pytorchrl.agent.storages.hindsight import STRATEGIES, GoalFunction, Hindsight, Relabeled
from pytorchrl.agent.storages.ring import Inserted, Ring
from pytorchrl.errors import ArgumentError, ConfigError, Problem
from pytorchrl.files.atomic import saved_int
from pytorchrl.support.untyped import StateDict

ERROR = "error"
"""Name in `RolloutData.other` of the absolute TD errors that the collector computed, (T, E) float32."""
_BLOCK = 4096
"""Number of random numbers that are drawn at once; see `UniformDraws`."""


class ReplayBuffer(Storage):
    """Replay of the newest `size` transitions, drawn uniformly with replacement.

    N-step returns are computed when a batch is drawn. Rows without a transition (reset steps of gymnasium's autoreset
    mode NEXT_STEP) are stored, but never drawn.

    Attributes:
        ring: The stored rows.
    """

    home: ClassVar[str] = "replay"
    provides = DataKind.TRANSITIONS

    @dataclass(frozen=True, kw_only=True)
    class Options(BaseOptions):
        """Options of `ReplayBuffer`."""

        size: int = option(help="Number of stored transitions, over all environments of all collectors.", low=1)
        rollout_size: int = option(50, help="Steps per environment of a collector's rollout, T.", low=1)
        n_step: int = option(1, help="Number of rewards summed before the bootstrap.", low=1)
        stacked_frames: int | None = option(
            None, low=1,
            help="Number of frames stacked in an observation; each frame is stored once. None detects stacks, 1 stores "
            "observations unchanged.")
        relabel: str | None = option(
            None, choices=(None, *STRATEGIES),
            help="Hindsight experience replay: the goal of a drawn transition becomes a goal that was achieved by this "
            "or a later step of its episode (future), the last step (final), or any step (episode). None keeps goals.")
        relabel_share: float = option(
            0.8, low=0.0, high=1.0, exclusive=True,
            help="Share of drawn transitions whose goal is replaced; with k new goals for each original one, it is "
            "k / (k + 1).")
        goal_reward: GoalFunction | None = option(
            None, help="Function of achieved goals, desired goals and an empty info that returns the rewards to learn "
            "from. None calls the environment's compute_reward.")
        goal_terminated: GoalFunction | None = option(
            None, help="Function of achieved goals, desired goals and an empty info that returns whether episodes "
            "terminate. None keeps terminations as they are stored.")

        def contradictions(self) -> Iterator[Problem]:
            """Refuse options of new goals without `relabel`."""
            yield from super().contradictions()
            if self.relabel is None:
                yield from self._without_effect(
                    ("relabel_share", "goal_reward", "goal_terminated"), "relabel", "relabel")

    options: Options

    def __init__(
        self, options: Options, *, actor: StorageActor, algorithm: object, num_envs: int, seed: int,
        device: str = "cpu",
    ) -> None:
        """Build the storage from checked options; users call `create_factory` instead.

        Args:
            options: Checked options.
            actor: The actor of this worker.
            algorithm: The algorithm of this worker, which must have `gamma`.
            num_envs: E, the number of environments of the collector that fills the storage.
            seed: Seed of the random draws.
            device: Device of the batches.

        Raises:
            ConfigError: A rollout is larger than `size`, or `relabel` lacks a function of rewards.
        """
        super().__init__(options, actor=actor, algorithm=algorithm, num_envs=num_envs, seed=seed, device=device)
        self.ring = Ring(options.size, options.stacked_frames)
        self._hindsight = None if options.relabel is None else Hindsight(
            options.relabel, options.relabel_share, _reward_of(options), options.goal_terminated)
        self._num_sampled = 0
        self._is_draw_checked = False
        self._is_on_cpu = self.device.type == "cpu"

    @classmethod
    def contradiction(cls, agent: AgentOptions) -> str | None:
        """Return an error message if the buffer cannot store a whole rollout or replace goals, otherwise None."""
        options, num_envs = agent.storage, agent.num_envs
        if options.relabel is not None and cls.provides is not DataKind.TRANSITIONS:
            return (f"relabel={options.relabel!r} is for single transitions, but {cls.__name__} provides "
                    f"{cls.provides.value}, whose stored memory states depend on the original goals; leave relabel out")
        if num_envs is not None and options.size < options.rollout_size * num_envs:
            return (f"size {options.size} is less than a rollout of {num_envs} environments x rollout_size "
                    f"{options.rollout_size}; raise size to {options.rollout_size * num_envs} or more, or lower "
                    "rollout_size")
        return super().contradiction(agent)

    @property
    def generator(self) -> torch.Generator:
        """CPU generator of all random draws; see `Storage`."""
        return self._uniform.generator

    @generator.setter
    def generator(self, generator: torch.Generator) -> None:
        # float64, because the 2^24 float32 numbers in [0, 1) are too few to draw from millions of rows equally often
        self._uniform = UniformDraws(generator, torch.float64, _BLOCK)

    @property
    def rollout_size(self) -> int:
        """T, the number of steps per environment in a collector's rollout."""
        return self.options.rollout_size

    # Inserting

    @property
    @override
    def keeps_tensors(self) -> bool:
        return (self.provides is DataKind.TRANSITIONS and self.options.stacked_frames in (None, 1)
                and self.options.relabel is None)

    @override
    def stay_on_device(self) -> None:
        super().stay_on_device()
        self.ring.device = self.device

    def insert_data_slice(self, rollouts: list[RolloutData], sources: Sequence[Hashable] | None = None) -> None:
        """Append copies of rollouts; evict the oldest transitions if the storage is full.

        Args:
            rollouts: Rollouts of any lengths.
            sources: The collector of each rollout, such as (worker, incarnation). Rollouts of one source are
                consecutive in time, and n-step windows continue from one rollout to the next. If None, a rollout's
                position in the list is its source.

        Raises:
            ConfigError: A rollout is larger than `size`.
            ArgumentError: The names, shapes or dtypes of the data differ from those of the first rollout, or `rollouts`
                and `sources` differ in length.
        """
        sources = range(len(rollouts)) if sources is None else sources
        if len(sources) != len(rollouts):
            raise ArgumentError(
                f"expected one source for each rollout, got {len(rollouts)} rollouts and {len(sources)} sources")
        for rollout, source in zip(rollouts, sources, strict=True):
            if rollout.num_steps:
                self._insert(rollout, source)

    def insert_from(self, rollouts: Sequence[RolloutData], sources: Sequence[Hashable]) -> None:
        """Append rollouts; `sources` contains the collector of each rollout, see `insert_data_slice`."""
        self.insert_data_slice(list(rollouts), sources)

    # Drawing

    @property
    def num_items(self) -> int:
        """Number of transitions that can be drawn."""
        return self.ring.num_drawable

    @property
    def num_rows_added(self) -> int:
        """Number of rows inserted so far, including rows without a transition; see `rows_of`."""
        return self.ring.total

    def rows_of(self, ids: np.ndarray) -> np.ndarray:
        """Return the row number of each transition in a batch, (N,) int64, given the `ids` of the batch.

        Rows are numbered from 0 in order of insertion. Here, the ids are row numbers; a subclass may use other ids.
        """
        return ids

    @property
    def num_rows_evicted(self) -> int:
        """Number of evicted rows, including rows without a transition."""
        return self.ring.first

    @property
    def mass(self) -> float:
        """Weight of this storage when one of several shards is drawn: the number of transitions that can be drawn."""
        return float(self.ring.num_drawable)

    def generate_batches(
        self, num_mini_batch: int, mini_batch_size: int | None = None, num_epochs: int = 1
    ) -> Iterator[ReplayBatch]:
        """Draw `num_mini_batch` · `num_epochs` batches; draw none while the storage is empty.

        Args:
            num_mini_batch: Number of batches per epoch.
            mini_batch_size: B, the number of transitions in a batch.
            num_epochs: Number of epochs.

        Raises:
            ArgumentError: `mini_batch_size` is None.
        """
        if mini_batch_size is None:
            raise ArgumentError("replay needs mini_batch_size, the number of transitions in a batch")
        for left in reversed(range(num_mini_batch * num_epochs)):
            batch = self.sample(mini_batch_size)
            if batch is None:
                return
            yield batch if left else replace(batch, last=True)

    def sample(self, batch_size: int) -> ReplayBatch | None:
        """Draw `batch_size` transitions with replacement; return None if no transition can be drawn."""
        if not self.num_items:
            return None
        drawn = self.draw(batch_size)
        if not self._is_draw_checked:
            check_draw(self, drawn, batch_size, self.ring.columns["drawable"])
            self._is_draw_checked = True
        rows, weight = drawn
        self.ring.columns["used"][rows] = True
        self._num_sampled += batch_size
        new_goals = None if self._hindsight is None else self._hindsight.draw(
            self.ring, rows, self._uniform.take(batch_size))
        return self._batch(self.ring, rows, weight, new_goals)

    def _batch(
        self, ring: Ring, rows: np.ndarray, weight: np.ndarray, new_goals: Relabeled | None = None,
    ) -> ReplayBatch:
        """Return a batch of the transitions in the rows `rows` (B,) of `ring`, with importance weights (B,)."""
        window = ring.window(
            rows, self.options.n_step, self.algorithm.gamma, None if new_goals is None else new_goals.outcome)
        following = ring.columns["link"][window.last]
        mask, next_mask = ring.take_mask(rows), ring.take_mask(following)
        obs, next_obs = ring.take(rows), ring.take(following)
        if new_goals is not None:
            new_goals.write(obs)
            new_goals.write(next_obs)
        return ReplayBatch(
            obs=self._tensors(obs),
            action=self._tensor(ring.columns["action"][rows]),
            ret=self._tensor(window.ret.astype(np.float32, copy=False)),
            discount=self._tensor(window.discount.astype(np.float32)),
            next_obs=self._tensors(next_obs),
            weight=self._tensor(weight.astype(np.float32, copy=False)),
            ids=torch.from_numpy(ring.ids(rows)),
            mask=None if mask is None else self._tensor(mask),
            next_mask=None if next_mask is None else self._tensor(next_mask),
            num_samples=len(rows),
        )

    # Parameters, states

    def update_storage_parameter(self, name: str, value: object) -> None:
        """Set an updatable option to a number or a schedule.

        Raises:
            UnknownParameterError: The option is not updatable.
            ConfigError: The value is not allowed; nothing was changed.
        """
        self._update_option(name, value)

    def reset(self) -> None:
        """Evict all transitions; the memory stays allocated."""
        self.ring.clear()

    @property
    def counters(self) -> dict[str, int]:
        """Numbers of transitions: `inserted`, `evicted` and `sampled` so far, and `resident` now.

        `evicted_unused` is the number of evicted transitions that were never drawn.
        """
        return {**self.ring.counters, "sampled": self._num_sampled}

    @property
    def num_bytes(self) -> int:
        """Memory allocated for transitions, in bytes."""
        return self.ring.num_bytes + (0 if self._hindsight is None else self._hindsight.num_bytes)

    def state_dict(self) -> StateDict:
        """Return the state that an exact continuation needs, including the stored transitions."""
        return {**super().state_dict(), "parameters": dict(self.parameters), "schedules": self.schedules_state(),
                "contents": map_tensors(self._contents(), torch.as_tensor),
                "num_learned_from": self.num_learned_from}

    def load_state_dict(self, state: StateDict) -> None:
        """Restore a state from `state_dict()`.

        Raises:
            ConfigError: The state was saved by a storage of another size.
        """
        self._load_contents(map_tensors(state["contents"], np.asarray))
        self.num_learned_from = saved_int(state["num_learned_from"])
        self._load_parameters(state["parameters"])
        self.load_schedules(state["schedules"])
        super().load_state_dict(state)

    # Prioritized replay and replay of sequences override some of the following methods.

    def _insert(self, rollout: RolloutData, source: Hashable) -> None:
        """Append a rollout of at least one step."""
        if rollout.host is not None and self.ring.device is None:  # it was collected before the buffer moved
            rollout = replace(rollout.map(Tensor.cpu), host=None)
        inserted, errors = self.ring.insert(rollout, source), rollout.other.get(ERROR)
        if self._hindsight is not None:
            self._hindsight.insert(self.ring, inserted, source)
        if errors is not None:
            inserted = inserted._replace(errors=errors.numpy().T.reshape(-1))
        self._inserted(inserted)

    def _inserted(self, inserted: Inserted) -> None:
        """Process rows after they were inserted; a subclass may set their priorities here."""

    def _prioritize(self, rows: np.ndarray, is_drawable: bool) -> None:
        """Process rows of sequences that can be drawn from now on, or no longer; a subclass may set priorities here."""

    def drawable_rows(self) -> np.ndarray:
        """Return all rows that can be drawn, (N,) int64, oldest first; this takes time proportional to `size`."""
        rows: np.ndarray = np.flatnonzero(self.ring.columns["drawable"])
        oldest = np.searchsorted(rows, self.ring.first % self.ring.capacity)
        return np.roll(rows, -int(oldest))

    def draw(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Choose the rows of a batch, given that at least one row can be drawn; a subclass may override this method.

        Args:
            count: B, the number of rows.

        Returns:
            Rows, (B,) int64, from `drawable_rows()`, possibly repeated; and the weights of their losses, (B,) float.
        """
        ring = self.ring
        if 2 * ring.num_drawable < ring.total - ring.first:
            rows = np.flatnonzero(ring.columns["drawable"])
            rows = rows[self._integers(0, len(rows), count)]
        else:
            rows = self._integers(ring.first, ring.total, count) % ring.capacity
            if ring.num_drawable < ring.total - ring.first:
                while len(again := np.flatnonzero(~ring.columns["drawable"][rows])):
                    rows[again] = self._integers(ring.first, ring.total, len(again)) % ring.capacity
        return rows, np.ones(count, np.float32)

    def _contents(self) -> StateDict:
        return {"ring": self.ring.state_dict(), "num_sampled": self._num_sampled}

    def _load_contents(self, contents: StateDict) -> None:
        self.ring.load_state_dict(contents["ring"])
        if self._hindsight is not None:
            self._hindsight.rebuild(self.ring)
        self._num_sampled = saved_int(contents["num_sampled"])

    # Helpers

    def _integers(self, low: int, high: int, count: int) -> np.ndarray:
        return low + (self._uniform.take(count) * (high - low)).astype(np.int64)

    def _tensor(self, array: np.ndarray) -> Tensor:
        tensor = torch.as_tensor(array)
        # observations that are already on a device stay there
        return tensor if self._is_on_cpu or not tensor.is_cpu else tensor.to(self.device)

    def _tensors(self, arrays: dict[str, np.ndarray]) -> Obs:
        return {name: self._tensor(array) for name, array in arrays.items()}


def _reward_of(options: ReplayBuffer.Options) -> GoalFunction:
    if options.goal_reward is None:
        raise ConfigError("relabel needs goal_reward here, because only a scheme finds the environment's "
                          "compute_reward; give goal_reward")
    return options.goal_reward
