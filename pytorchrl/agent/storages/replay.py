"""Replay: transitions of many rollouts, drawn again and again, uniformly or by priority. B = transitions drawn."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from pytorchrl.agent.contracts import check_draw
from pytorchrl.agent.data import DataKind, Obs, ReplayBatch, RolloutData
from pytorchrl.agent.options import AgentOptions, option
from pytorchrl.agent.options import Options as BaseOptions
from pytorchrl.agent.schedules import Schedule
from pytorchrl.agent.storages.base import Storage
from pytorchrl.agent.storages.ring import Inserted, Ring
from pytorchrl.agent.storages.trees import MinTree, SumTree
from pytorchrl.errors import ConfigError

_FIRST_PRIORITY = 1.0
_ERROR = "error"
"""Name, among the further rows of a rollout, of the absolute TD errors that its collector found, (T, E) float32."""


class ReplayBuffer(Storage):
    """The newest `size` transitions, drawn uniformly and with replacement; n-step returns are computed when drawn.

    Rows that are no transitions (the reset step of NEXT_STEP) take room, and are never drawn.
    """

    home: ClassVar[str] = "replay"
    gives = DataKind.TRANSITIONS

    @dataclass(frozen=True, kw_only=True)
    class Options(BaseOptions):
        """Options of `ReplayBuffer`."""

        size: int = option(help="Transitions in all, over all environments of all collectors.", low=1)
        rollout_size: int = option(50, help="Steps per environment of a collector's rollout, T.", low=1)
        n_step: int = option(1, help="Rewards summed before the bootstrap.", low=1)
        stacked_frames: int | None = option(
            None, help="Pictures stacked in an observation, of which each is kept once; None finds out, 1 keeps stacks.",
            low=1)

    def __init__(
        self, options: Any, *, actor: Any, algorithm: Any, num_envs: int, seed: int, device: str = "cpu",
    ) -> None:
        """Use `create_factory`.

        Args:
            options: Checked options.
            actor: The actor of this worker.
            algorithm: The algorithm of this worker, for its `gamma`.
            num_envs: E, environments of the collector that fills it.
            seed: Of what is drawn.
            device: Where batches are wanted.

        Raises:
            ConfigError: A rollout does not fit in.
        """
        super().__init__(options, actor=actor, algorithm=algorithm, num_envs=num_envs, seed=seed, device=device)
        self._ring = Ring(options.size, options.stacked_frames)
        self._num_sampled = 0
        self._is_draw_checked = False

    @classmethod
    def contradiction(cls, agent: AgentOptions) -> str | None:
        """See `Part`: the replay must hold a whole rollout."""
        options, num_envs = agent.storage, agent.num_envs
        if num_envs is not None and options.size < options.rollout_size * num_envs:
            return (f"size {options.size} is less than a rollout of {num_envs} environments x rollout_size {options.rollout_size}; "
                    f"raise size to {options.rollout_size * num_envs} or more, or lower rollout_size")
        return super().contradiction(agent)

    @property
    def rollout_size(self) -> int:
        """T, the number of steps per environment in a collector's rollout."""
        size: int = self.options.rollout_size
        return size

    # Inserting

    def insert_data_slice(self, rollouts: list[RolloutData], sources: Sequence[Hashable] | None = None) -> None:
        """Append rollouts, over the oldest transitions where there is no room; copies them.

        Args:
            rollouts: Of any lengths.
            sources: Who made each, e.g. (worker, incarnation). Rollouts of one source follow each other in time, and
                n-step windows go on from one to the next. None: the position in the list says it.

        Raises:
            ConfigError: A rollout is larger than `size`.
            ValueError: A rollout has other leaves than the first one, or there are not as many sources.
        """
        sources = range(len(rollouts)) if sources is None else sources
        if len(sources) != len(rollouts):
            raise ValueError(f"got {len(rollouts)} rollouts and {len(sources)} sources")
        for rollout, source in zip(rollouts, sources, strict=True):
            if rollout.num_steps:
                self._insert(rollout, source)

    def insert_from(self, rollouts: Sequence[RolloutData], sources: Sequence[Hashable]) -> None:
        """See `insert_data_slice`."""
        self.insert_data_slice(list(rollouts), sources)

    # Drawing

    @property
    def num_items(self) -> int:
        """Transitions that can be drawn."""
        return self._ring.num_drawable

    @property
    def num_rows_added(self) -> int:
        """Rows that came so far, those that are no transitions included; see `rows_of`."""
        return self._ring.total

    def rows_of(self, ids: np.ndarray) -> np.ndarray:
        """(N,) int64, the rows of these ids, (N,), of batches, counted from 0 as they came."""
        return ids

    @property
    def num_rows_given_up(self) -> int:
        """Rows, those that are no transitions included, that newer ones took the place of."""
        return self._ring.first

    @property
    def mass(self) -> float:
        """What this storage's share in a draw from several is proportional to: the transitions that can be drawn."""
        return float(self._ring.num_drawable)

    def generate_batches(
        self, num_mini_batch: int, mini_batch_size: int | None = None, num_epochs: int = 1
    ) -> Iterator[ReplayBatch]:
        """Draw `num_mini_batch` · `num_epochs` batches; none while nothing can be drawn.

        Args:
            num_mini_batch: Batches.
            mini_batch_size: B.
            num_epochs: How many times that.
        """
        if mini_batch_size is None:
            raise ValueError("replay needs mini_batch_size, the transitions of a batch")
        for left in reversed(range(num_mini_batch * num_epochs)):
            batch = self.sample(mini_batch_size)
            if batch is None:
                return
            batch.last = not left
            yield batch

    def sample(self, batch_size: int) -> ReplayBatch | None:
        """Draw `batch_size` transitions, with replacement; None if there is none."""
        if not self.num_items:
            return None
        drawn = self.draw(batch_size)
        if not self._is_draw_checked:
            check_draw(self, drawn, batch_size, self._ring.columns["drawable"])
            self._is_draw_checked = True
        rows, weight = drawn
        self._ring.columns["used"][rows] = True
        self._ring.note_draw(rows)
        self._num_sampled += batch_size
        return self._batch(self._ring, rows, weight)

    def _batch(self, ring: Ring, rows: np.ndarray, weight: np.ndarray) -> ReplayBatch:
        """The transitions from rows of a ring, (B,) places, with these weights."""
        window = ring.window(rows, self.options.n_step, self.algorithm.gamma)
        following = ring.columns["link"][window.last]
        mask, next_mask = ring.take_mask(rows), ring.take_mask(following)
        return ReplayBatch(
            obs=self._tensors(ring.take(rows)),
            action=self._tensor(ring.columns["action"][rows]),
            ret=self._tensor(window.ret.astype(np.float32)),
            discount=self._tensor(window.discount.astype(np.float32)),
            next_obs=self._tensors(ring.take(following)),
            weight=self._tensor(weight.astype(np.float32)),
            ids=torch.from_numpy(ring.ids(rows)),
            mask=None if mask is None else self._tensor(mask),
            next_mask=None if next_mask is None else self._tensor(next_mask),
            num_samples=len(rows),
        )

    # Parameters, states

    def update_storage_parameter(self, name: str, value: Any) -> None:
        """Change an updatable option; a schedule replaces a number and the other way round.

        Raises:
            KeyError: It is none of the updatable ones.
            ConfigError: The value is not allowed; nothing was changed.
        """
        self._update_option(name, value)

    def reset(self) -> None:
        """Forget all transitions (they count as evicted), keep the memory and what is known of priorities."""
        self._ring.clear()

    @property
    def counters(self) -> dict[str, int]:
        """Valid transitions: `inserted`, `evicted`, `evicted_unused` (never drawn), `resident`; draws: `sampled`."""
        return {**self._ring.counters, "sampled": self._num_sampled}

    @property
    def num_bytes(self) -> int:
        """Memory of what is kept for learning."""
        return self._ring.num_bytes

    def keep_notes(self) -> None:
        """From now on note what `take_notes` tells, which takes time."""
        self._ring.count_hits()

    def take_notes(self) -> dict[str, np.ndarray]:
        """Since the last call, (N,) each.

        Returns:
            `evicted_hits`: how often what can be drawn no more had been drawn; `priority_change`: by how much the priority of
            a transition grew, before it is raised to alpha, when its errors came. Both are counts or sizes by item.
        """
        return {"evicted_hits": self._ring.take_hits(), "priority_change": np.zeros(0)}

    def state_dict(self) -> dict[str, Any]:
        """What is needed to go on exactly as now."""
        return {**super().state_dict(), "parameters": dict(self.parameters), "schedules": self._schedules_state(),
                "contents": _convert(self._contents(), torch.from_numpy, np.ndarray),
                "num_learned_from": self.num_learned_from}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`.

        Raises:
            ConfigError: The state is of a storage of another size.
        """
        self._load_contents(_convert(state["contents"], Tensor.numpy, Tensor))
        self.num_learned_from = state["num_learned_from"]
        self.parameters = dict(state["parameters"])
        self._load_schedules(state["schedules"])
        super().load_state_dict(state)

    # What priorities and sequences change

    def _insert(self, rollout: RolloutData, source: Hashable) -> None:
        """Append a rollout of at least one step."""
        errors = rollout.other.get(_ERROR)
        self._inserted(self._ring.insert(rollout, source)._replace(
            errors=None if errors is None else errors.numpy().T.reshape(-1)))

    def _inserted(self, inserted: Inserted) -> None:
        """Rows were written, and can be drawn where they are valid."""

    def drawable_rows(self) -> np.ndarray:
        """Return all rows that can be drawn, (N,) int64, from the oldest to the newest, in time proportional to `size`."""
        rows: np.ndarray = np.flatnonzero(self._ring.columns["drawable"])
        oldest = np.searchsorted(rows, self._ring.first % self._ring.capacity)
        return np.roll(rows, -int(oldest))

    def draw(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Choose the rows of a batch; a subclass may choose otherwise. The method is called only if a row can be drawn.

        Args:
            count: B, the number of rows.

        Returns:
            Rows, (B,) int64, from `drawable_rows()`, possibly with repetitions; and the weights of their losses, (B,) float.
        """
        ring = self._ring
        if 2 * ring.num_drawable < ring.total - ring.first:
            rows = np.flatnonzero(ring.columns["drawable"])
            rows = rows[self._integers(0, len(rows), count)]
        else:
            rows = self._integers(ring.first, ring.total, count) % ring.capacity
            while len(again := np.flatnonzero(~ring.columns["drawable"][rows])):
                rows[again] = self._integers(ring.first, ring.total, len(again)) % ring.capacity
        return rows, np.ones(count)

    def _contents(self) -> dict[str, Any]:
        return {"ring": self._ring.state_dict(), "num_sampled": self._num_sampled}

    def _load_contents(self, contents: dict[str, Any]) -> None:
        self._ring.load_state_dict(contents["ring"])
        self._num_sampled = contents["num_sampled"]

    # Helpers

    def _integers(self, low: int, high: int, count: int) -> np.ndarray:
        return torch.randint(low, high, (count,), generator=self.generator).numpy()

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def _tensors(self, arrays: dict[str, np.ndarray]) -> Obs:
        return {name: self._tensor(array) for name, array in arrays.items()}


class PERBuffer(ReplayBuffer):
    """Replay in which transitions with a large error are drawn more often (Schaul et al. 2016).

    With d the absolute error: p = (d + epsilon)^alpha, P = p / sum p, w = (N P)^-beta / max w. New ones get the largest d +
    epsilon seen so far, 1 at first; those of rollouts that `add_errors` has seen, their own.
    """

    has_priorities: ClassVar[bool] = True

    @dataclass(frozen=True, kw_only=True)
    class Options(ReplayBuffer.Options):
        """Options of `PERBuffer`."""

        alpha: float = option(0.6, help="How much priorities count; 0 would be uniform.", low=0.0, exclusive=True)
        beta: float | Schedule = option(
            0.4, help="How much weights correct for it; 1 entirely.", low=0.0, exclusive=True, updatable=True)
        epsilon: float = option(1e-6, help="Added to each absolute error.", low=0.0, exclusive=True)
        weight_norm: str = option(
            "batch", help="Whose largest weight becomes 1: the batch's, or that of all that could be drawn.",
            choices=("batch", "buffer"))
        stratified: bool = option(False, help="Draw once from each of B equal parts of the priorities' sum.")

    def __init__(self, options: Any, **context: Any) -> None:
        """Use `create_factory`; see `ReplayBuffer`."""
        super().__init__(options, **context)
        self._max_priority = _FIRST_PRIORITY
        self._num_stale = 0
        self._changes: list[np.ndarray] | None = None

    # Made when first needed: a collector's storage never holds what is drawn from.

    @functools.cached_property
    def _sums(self) -> SumTree:
        return SumTree(self.options.size)

    @functools.cached_property
    def _minima(self) -> MinTree:
        return MinTree(self.options.size)

    @property
    def mass(self) -> float:
        """Sum of p over all transitions that can be drawn."""
        return self._sums.total if self.num_items else 0.0

    @property
    def leaf_min(self) -> float:
        """Smallest p of all transitions that can be drawn; infinite if there is none."""
        return self._minima.smallest if self.num_items else math.inf

    @property
    def counters(self) -> dict[str, int]:
        """As of `ReplayBuffer`, and `stale_priorities`: errors of transitions that were gone when they came."""
        return {**super().counters, "stale_priorities": self._num_stale}

    def after_gradients(self, batch: ReplayBatch, info: dict[str, Any]) -> None:
        """Take the batch's errors as priorities; not if one is not finite: then the update is not made either.

        Args:
            batch: What was drawn.
            info: `errors`, (B,) temporal-difference errors, of either sign.

        Raises:
            ConfigError: The algorithm gives no errors.
        """
        if "errors" not in info:
            raise ConfigError("priorities need an algorithm whose info has errors; use ReplayBuffer instead")
        errors = _array(self.item_errors(batch, info["errors"]))
        if np.isfinite(errors).all():
            self.update_priorities(_array(batch.ids), errors)

    def add_errors(self, rollout: RolloutData) -> None:
        """Let a rollout bring its transitions' first priorities: absolute TD errors by the weights of this algorithm.

        What is n steps ahead ends with the rollout, as it does in replay until the next one comes.

        Args:
            rollout: T >= 1 steps; `other["error"]` (T, E) float32 is added, 0 where there is no transition.
        """
        ring = Ring(rollout.num_steps * rollout.num_envs, stacked_frames=1)
        rows = ring.insert(rollout, None).rows
        rows = rows[ring.columns["drawable"][rows]]
        errors = np.zeros(ring.capacity, np.float32)
        errors[rows] = _array(self.algorithm.td_errors(self._batch(ring, rows, np.ones(len(rows)))))
        rollout.other[_ERROR] = torch.from_numpy(errors.reshape(rollout.num_envs, rollout.num_steps).T.copy())

    def update_priorities(self, ids: np.ndarray, errors: np.ndarray) -> None:
        """Set p of transitions by their errors; those that are gone are passed over and counted.

        Args:
            ids: (N,) int64, from batches; of repeated ones the last counts.
            errors: (N,) float, of either sign.

        Raises:
            ValueError: Lengths differ, an error is not finite, or an id was never given.
        """
        if len(ids) != len(errors):
            raise ValueError(f"got {len(ids)} ids and {len(errors)} priorities")
        if not np.isfinite(errors).all():
            raise ValueError("priorities must be finite")
        rows = ids % self.options.size
        # A row that lost a picture of its stack is as good as gone.
        known = self._ring.resident(ids)
        known[known] = self._ring.columns["drawable"][rows[known]]
        self._num_stale += int(np.count_nonzero(~known))
        if known.any():
            with self._noted(rows[known]):
                self._set_leaves(rows[known], self._priorities(errors[known]) ** self.options.alpha)

    def keep_notes(self) -> None:
        """See `ReplayBuffer`."""
        super().keep_notes()
        self._changes = []

    def take_notes(self) -> dict[str, np.ndarray]:
        """See `ReplayBuffer`."""
        changes, self._changes = self._changes or [], None if self._changes is None else []
        return {**super().take_notes(), "priority_change": np.concatenate([np.zeros(0), *changes])}

    @contextlib.contextmanager
    def _noted(self, rows: np.ndarray) -> Iterator[None]:
        """Note by how much the priorities of rows, (N,) places, some of them perhaps named twice, change within."""
        if self._changes is None:
            yield
            return
        rows, root = np.unique(rows), 1.0 / self.options.alpha
        before = self._sums.get(rows) ** root
        yield
        self._changes.append(self._sums.get(rows) ** root - before)

    def reset(self) -> None:
        """See `ReplayBuffer`; the largest priority seen stays."""
        super().reset()
        self._sums.clear()
        self._minima.clear()

    def _inserted(self, inserted: Inserted) -> None:
        self._set_leaves(inserted.broken, 0.0)
        valid = self._ring.columns["drawable"][inserted.rows]
        priorities: float | np.ndarray = self._max_priority
        if inserted.errors is not None:
            priorities = self._priorities(inserted.errors)
        self._set_leaves(inserted.rows, np.where(valid, priorities ** self.options.alpha, 0.0))

    def _priorities(self, errors: np.ndarray) -> np.ndarray:
        """Priorities (N,) float64 by errors (N,); the largest is remembered. Raises `ValueError` if one is not finite."""
        if not np.isfinite(errors).all():
            raise ValueError("priorities must be finite")
        priorities = np.abs(errors).astype(np.float64) + self.options.epsilon
        self._max_priority = max(self._max_priority, float(priorities.max(initial=0.0)))
        return priorities

    def draw(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Draw rows by priority, with importance weights; see `ReplayBuffer`."""
        share = torch.rand(count, dtype=torch.float64, generator=self.generator).numpy()
        if self.options.stratified:
            share = (np.arange(count) + share) / count
        rows = self._sums.find_prefix(share * self._sums.total)
        leaves = self._sums.get(rows)
        smallest = leaves.min() if self.options.weight_norm == "batch" else self._minima.smallest
        return rows, (leaves / smallest) ** -self.parameters["beta"]  # N and the sum cancel out

    def _set_leaves(self, rows: np.ndarray, leaves: np.ndarray | float) -> None:
        self._sums.set(rows, leaves)
        self._minima.set(rows, np.where(np.asarray(leaves) > 0.0, leaves, np.inf))

    def _contents(self) -> dict[str, Any]:
        rows = np.arange(self.options.size)
        return {**super()._contents(), "leaves": self._sums.get(rows), "max_priority": self._max_priority,
                "num_stale": self._num_stale}

    def _load_contents(self, contents: dict[str, Any]) -> None:
        super()._load_contents(contents)
        self._set_leaves(np.arange(self.options.size), contents["leaves"])
        self._max_priority, self._num_stale = contents["max_priority"], contents["num_stale"]


def _array(values: Any) -> np.ndarray:
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)


def _convert(state: Any, function: Any, kind: type) -> Any:
    """`state` with `function` applied to everything of `kind` in its dictionaries, lists and tuples."""
    if isinstance(state, kind):
        return function(state)
    if isinstance(state, dict):
        return {name: _convert(value, function, kind) for name, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(_convert(value, function, kind) for value in state)
    return state
