"""What every storage can do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pytorchrl.agent.data import ActingStep, Arrays, Batch, RolloutData, Step

if TYPE_CHECKING:
    from pytorchrl.agent.algorithms import Algorithm

ActingRow = tuple[Arrays, Arrays, np.ndarray, "np.ndarray | None"]
"""obs, rhs, done, mask of the row to act on, each (E, ...)."""


class Storage(ABC):
    """Holds transitions between acting and learning.

    A collector fills its storage row by row and takes the rollout out; a learner puts rollouts in and draws batches.
    One object may do both when collector and learner take turns. Memory is allocated at the first transition only.
    """

    @classmethod  # noqa: B027 - a storage that says nothing fits all
    def check_algorithm(cls, algorithm: type[Algorithm]) -> None:
        """Raise `ConfigError` if this storage does not fit that class of algorithm."""

    @abstractmethod
    def start(self, obs: dict[str, np.ndarray], mask: np.ndarray | None) -> None:
        """Begin with the observations after a reset: row 0 of the very first rollout."""

    @abstractmethod
    def current(self) -> ActingRow:
        """The row to act on, as views that stay valid until the next `insert_transition`."""

    @abstractmethod
    def insert_transition(self, acting: ActingStep, step: Step) -> None:
        """Copy what was decided and what came of it into the next row."""

    @property
    @abstractmethod
    def full(self) -> bool:
        """Whether the rollout is complete."""

    @abstractmethod
    def get_all_buffer_data(self, copy: bool = True) -> RolloutData:
        """What was collected since the last call; the next transition starts a new rollout."""

    @abstractmethod
    def insert_data_slice(self, rollouts: list[RolloutData]) -> None:
        """Take rollouts to learn from."""

    @abstractmethod
    def before_gradients(self) -> None:
        """Prepare what was inserted for `generate_batches`."""

    @abstractmethod
    def generate_batches(
        self, num_mini_batch: int, mini_batch_size: int | None = None, num_epochs: int = 1
    ) -> Iterator[Batch]:
        """Batches to compute gradients on."""

    @abstractmethod
    def after_gradients(self, batch: Batch, info: dict[str, float]) -> None:
        """Learn what a batch's gradients said about it (priorities); never moves data."""

    @abstractmethod
    def reset(self) -> None:
        """Forget everything that is held, keep the memory."""

    @property
    @abstractmethod
    def counters(self) -> dict[str, int]:
        """Transitions by what became of them: `inserted`, `resident`, `sampled`."""

    def state_dict(self) -> dict[str, Any]:
        """What is needed to go on exactly as now: the generator of the batches."""
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self.generator.set_state(state["generator"])

    generator: torch.Generator
