"""Prioritized experience replay (Schaul et al. 2016). N = transitions that can be drawn, B = transitions drawn."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from pytorchrl.agent.data import ReplayBatch, RolloutData
from pytorchrl.agent.options import option
from pytorchrl.agent.schedules import Schedule
from pytorchrl.agent.storages.replay import ERROR, ReplayBuffer
from pytorchrl.agent.storages.ring import Inserted, Ring
from pytorchrl.agent.storages.trees import MinTree, SumTree
from pytorchrl.errors import ConfigError, ContractError, NonFiniteDataError
from pytorchrl.support.untyped import Forwarded, StateDict

_FIRST_PRIORITY = 1.0


class PERBuffer(ReplayBuffer):
    """Replay that draws transitions with larger TD errors more often (Schaul et al. 2016).

    For N transitions that can be drawn, a transition with absolute TD error d has the priority p = (d + epsilon)^alpha,
    the probability P = p / sum p, and the importance weight w = (N P)^-beta / max w. If `add_errors` did not compute
    the TD error of a new transition, its d + epsilon is set to the largest d + epsilon so far (initially 1).
    """

    has_priorities: ClassVar[bool] = True

    @dataclass(frozen=True, kw_only=True)
    class Options(ReplayBuffer.Options):
        """Options of `PERBuffer`."""

        alpha: float = option(
            0.6, low=0.0, exclusive=True, help="Exponent of priorities; near 0, sampling is almost uniform.")
        beta: float | Schedule = option(
            0.4, low=0.0, exclusive=True, updatable=True,
            help="Exponent of importance weights; 1 fully corrects for non-uniform sampling.")
        epsilon: float = option(1e-6, help="Constant added to each absolute TD error.", low=0.0, exclusive=True)
        weight_norm: str = option(
            "batch", help="Set of transitions whose largest weight is scaled to 1: the batch, or the whole buffer.",
            choices=("batch", "buffer"))
        stratified: bool = option(
            False, help="Whether to draw one transition from each of B equal segments of the sum of priorities.")

    options: Options

    def __init__(self, options: Options, **context: Forwarded) -> None:
        """Build the storage; see `ReplayBuffer` for the arguments."""
        super().__init__(options, **context)
        self._max_priority = _FIRST_PRIORITY
        self._num_stale = 0

    # The trees are created on first use, because a collector's storage does not need them. Without shards, and with
    # `weight_norm="batch"`, nothing reads the minima.

    @functools.cached_property
    def priority_sums(self) -> SumTree:
        """Sum tree with the priority p of each row of the ring buffer."""
        return SumTree(self.options.size)

    @functools.cached_property
    def priority_minima(self) -> MinTree:
        """Minimum tree with the priority p of each row of the ring buffer."""
        minima = MinTree(self.options.size)
        rows = np.arange(self.ring.num_used)
        minima.set(rows, _positive(self.priority_sums.get(rows)))
        return minima

    @property
    def mass(self) -> float:
        """Sum of the priorities p of all transitions that can be drawn."""
        return self.priority_sums.total if self.num_items else 0.0

    @property
    def min_priority(self) -> float:
        """Smallest priority p of all transitions that can be drawn; infinity if no transition can be drawn."""
        return self.priority_minima.smallest if self.num_items else math.inf

    @property
    def counters(self) -> dict[str, int]:
        """Counters of `ReplayBuffer`, and `stale_priorities`, the number of TD errors that came too late to be used."""
        return {**super().counters, "stale_priorities": self._num_stale}

    def after_gradients(self, batch: ReplayBatch, info: Mapping[str, object]) -> None:
        """Update the priorities of a batch from its TD errors.

        If any error is not finite, all priorities stay unchanged; the update of the parameters is skipped, too.

        Args:
            batch: The batch from which the gradients were computed.
            info: Contains `errors`, (B,) TD errors, signed or absolute.

        Raises:
            ConfigError: `info` contains no errors.
        """
        if "errors" not in info:
            raise ConfigError("PERBuffer needs an algorithm whose info contains TD errors; use ReplayBuffer instead")
        errors = _array(self.item_errors(batch, info["errors"]))
        if np.isfinite(errors).all():
            self.update_priorities(_array(batch.ids), errors)

    def add_errors(self, rollout: RolloutData) -> None:
        """Compute the absolute TD errors of a rollout with the current weights, for the initial priorities.

        N-step returns near the end of the rollout contain fewer rewards, because the later steps are not known yet.

        Args:
            rollout: T >= 1 steps. The method adds `other["error"]`, (T, E) float32, which is 0 in rows without a
                transition.
        """
        ring = Ring(rollout.num_steps * rollout.num_envs, stacked_frames=1)
        rows = ring.insert(rollout, None).rows
        rows = rows[ring.columns["drawable"][rows]]
        errors = np.zeros(ring.capacity, np.float32)
        if len(rows):
            errors[rows] = _array(self.algorithm.td_errors(self._batch(ring, rows, np.ones(len(rows)))))
        rollout.other[ERROR] = torch.from_numpy(errors.reshape(rollout.num_envs, rollout.num_steps).T.copy())

    def update_priorities(self, ids: np.ndarray, errors: np.ndarray) -> None:
        """Set priorities from TD errors; count and discard the errors of transitions that can no longer be drawn.

        Args:
            ids: (N,) int64 ids from batches; for a repeated id, the last error is used.
            errors: (N,) float, TD errors, signed or absolute.

        Raises:
            ContractError: The lengths differ.
            NonFiniteDataError: An error is not finite.
            ArgumentError: An id was never assigned to a row.
        """
        if len(ids) != len(errors):
            raise ContractError(f"expected one error for each id, got {len(ids)} ids and {len(errors)} errors")
        if not np.isfinite(errors).all():
            raise NonFiniteDataError("TD errors must be finite")
        rows = ids % self.options.size
        # Discard errors of evicted rows, and of rows that cannot be drawn because frames of their stacks were evicted.
        known = self.ring.resident(ids)
        known[known] = self.ring.columns["drawable"][rows[known]]
        self._num_stale += int(np.count_nonzero(~known))
        if known.any():
            self._set_leaves(rows[known], self._priorities(errors[known]) ** self.options.alpha)

    @override
    def reset(self) -> None:
        """Evict all transitions, but keep the largest priority so far."""
        super().reset()
        self.priority_sums.clear()
        self.__dict__.pop("priority_minima", None)

    def _inserted(self, inserted: Inserted) -> None:
        if len(inserted.broken):
            self._set_leaves(inserted.broken, 0.0)
        valid = self.ring.columns["drawable"][inserted.rows]
        priorities: float | np.ndarray = self._max_priority
        if inserted.errors is not None:
            priorities = self._priorities(inserted.errors)
        self._set_leaves(inserted.rows, np.where(valid, priorities ** self.options.alpha, 0.0))

    @override
    def _prioritize(self, rows: np.ndarray, is_drawable: bool) -> None:
        self._set_leaves(rows, self._max_priority ** self.options.alpha if is_drawable else 0.0)

    def _priorities(self, errors: np.ndarray) -> np.ndarray:
        """Return |error| + epsilon, (N,) float64, for N errors, and update the largest value so far.

        Raises:
            NonFiniteDataError: An error is not finite.
        """
        if not np.isfinite(errors).all():
            raise NonFiniteDataError("TD errors must be finite")
        priorities = np.abs(errors).astype(np.float64) + self.options.epsilon
        self._max_priority = max(self._max_priority, float(priorities.max(initial=0.0)))
        return priorities

    @override
    def draw(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Draw rows by priority, with importance weights."""
        share = self._uniform.take(count)
        if self.options.stratified:
            share = (np.arange(count) + share) / count
        rows = self.priority_sums.find_prefix(share * self.priority_sums.total)
        leaves = self.priority_sums.get(rows)
        smallest = leaves.min() if self.options.weight_norm == "batch" else self.priority_minima.smallest
        return rows, (leaves / smallest) ** -self.parameters["beta"]  # N and the sum of priorities cancel out

    def _set_leaves(self, rows: np.ndarray, leaves: np.ndarray | float) -> None:
        self.priority_sums.set(rows, leaves)
        if "priority_minima" in self.__dict__:
            self.priority_minima.set(rows, _positive(leaves))

    def _contents(self) -> StateDict:
        # If nothing was ever inserted, there are no priorities, and reading `priority_sums` would allocate the tree.
        num_used = self.ring.num_used
        leaves = self.priority_sums.get(np.arange(num_used)) if num_used else np.zeros(0)
        return {**super()._contents(), "leaves": leaves, "max_priority": self._max_priority,
                "num_stale": self._num_stale}

    def _load_contents(self, contents: StateDict) -> None:
        super()._load_contents(contents)
        for name in ("priority_sums", "priority_minima"):
            self.__dict__.pop(name, None)
        if len(contents["leaves"]):
            self._set_leaves(np.arange(len(contents["leaves"])), contents["leaves"])
        self._max_priority, self._num_stale = contents["max_priority"], contents["num_stale"]


def _positive(leaves: np.ndarray | float) -> np.ndarray:
    """Return priorities as values of the tree of minima: infinity instead of 0, which marks a row without an item."""
    return np.where(np.asarray(leaves) > 0.0, leaves, np.inf)


def _array(values: object) -> np.ndarray:
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
