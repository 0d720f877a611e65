"""Numbers that a loss receives as a tensor."""

from __future__ import annotations

import torch
from torch import Tensor


class Constants:
    """A cached tensor of numbers.

    Building a tensor takes as long as computing a small layer, so the tensor is rebuilt only if the numbers change.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._numbers: tuple[float, ...] = ()
        self._tensor = torch.empty(0, device=device)

    def of(self, *numbers: float) -> Tensor:
        """Return the numbers as a tensor (n,) float32, which the caller must not change."""
        if numbers != self._numbers:
            self._numbers, self._tensor = numbers, torch.tensor(numbers, device=self._device)
        return self._tensor
