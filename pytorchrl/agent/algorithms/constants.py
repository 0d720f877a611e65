"""Cache the numbers that a loss needs, such as the weights of its terms, as a tensor."""

from __future__ import annotations

import torch
from torch import Tensor


class Constants:
    """A cache for a tensor of constant numbers.

    Building a tensor takes as long as the forward pass of a small layer, so `of` builds one only if the numbers change.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._numbers: tuple[float, ...] = ()
        self._tensor = torch.empty(0, device=device)

    def of(self, *numbers: float) -> Tensor:
        """Return the n numbers as a float32 tensor of shape (n,), which the caller must not modify."""
        if numbers != self._numbers:
            self._numbers, self._tensor = numbers, torch.tensor(numbers, device=self._device)
        return self._tensor
