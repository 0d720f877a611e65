"""Averaging gradients among the gradient workers themselves."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pytorchrl.runtime import Collective


class GradientGroup:
    """The ranks that average their gradients after every batch; each then applies the same update.

    Args:
        ranks: What connects them.

    Attributes:
        num_raised: How many ranks raised their hand with the last mean.
    """

    def __init__(self, ranks: Collective) -> None:
        self._ranks = ranks
        self.num_raised = 0

    def mean(self, gradients: Sequence[Tensor | None], weights: Sequence[int],
             sizes: Sequence[int] | None = None, raises_hand: bool = False) -> list[Tensor | None]:
        """Mean of each gradient over all ranks, weighted by the samples behind it: sum(n * g) / sum(n).

        Args:
            gradients: Flat float32 vectors, not changed; None where this rank has none.
            weights: Valid samples behind each of this rank's gradients, n.
            sizes: Scalars of each; None: those of the gradients, which are all there.
            raises_hand: Counted along, for what ranks agree upon; see `num_raised`.

        Returns:
            New vectors, equal on all ranks to the bit; None where no rank has one.
        """
        sizes = sizes or [0 if gradient is None else gradient.numel() for gradient in gradients]
        own = [0 if gradient is None else weight for gradient, weight in zip(gradients, weights, strict=True)]
        weighted = [torch.zeros(size) if gradient is None else gradient.cpu() * weight
                    for gradient, weight, size in zip(gradients, own, sizes, strict=True)]
        total = self._ranks.sum(torch.cat([*weighted, torch.tensor([*own, int(raises_hand)], dtype=torch.float32)]))
        sums, (*counts, raised) = torch.split(total[:-len(own) - 1], list(sizes)), total[-len(own) - 1:].tolist()
        self.num_raised = int(raised)
        return [vector / count if count else None for vector, count in zip(sums, counts, strict=True)]

    def gather_all(self, moments: Any) -> list[Any]:
        """(count, mean, M2) of every rank's samples, in rank order; of several policies a mapping from policy to that."""
        if isinstance(moments, Mapping):
            columns = [self.gather_all(own) for own in moments.values()]
            return [dict(zip(moments, row, strict=True)) for row in zip(*columns, strict=True)]
        parts = self._ranks.gather(torch.tensor([float(value) for value in moments], dtype=torch.float64))
        return [tuple(part.tolist()) for part in parts]

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's value, which may be of any kind and size, in rank order."""
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = [int(size) for size in self._ranks.gather(torch.tensor([len(data)]))]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[:len(data)] = data
        parts = self._ranks.gather(padded)
        return [pickle.loads(part[:size].numpy().tobytes()) for part, size in zip(parts, sizes, strict=True)]

    def close(self) -> None:
        """Leave the group, from any thread. Idempotent."""
        self._ranks.close()

