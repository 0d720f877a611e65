"""Numbers that a loss takes as a tensor."""

from __future__ import annotations

import torch
from torch import Tensor


class Constants:
    """A tensor of numbers, made anew only when they have changed: making one takes as long as a small layer."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._numbers: tuple[float, ...] = ()
        self._tensor = torch.empty(0, device=device)

    def of(self, *numbers: float) -> Tensor:
        """(n,) float32; only to be read."""
        if numbers != self._numbers:
            self._numbers, self._tensor = numbers, torch.tensor(numbers, device=self._device)
        return self._tensor
