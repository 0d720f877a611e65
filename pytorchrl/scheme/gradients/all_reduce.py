"""Averaging gradients among the gradient workers themselves."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pytorchrl.runtime import Collective
from pytorchrl.scheme.messages import Moments


def propose_address() -> tuple[str, int]:
    """An address of this host and a TCP port that is free there now."""
    with socket.socket() as probe, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
        probe.bind(("", 0))
        try:
            route.connect(("10.255.255.255", 1))  # sends nothing; tells which of our addresses others reach us by
            address = route.getsockname()[0]
        except OSError:  # no network at all: every rank is on this host
            address = "127.0.0.1"
        return address, probe.getsockname()[1]


class GradientGroup:
    """The ranks that average their gradients after every batch; each then applies the same update.

    Args:
        ranks: What connects them.
    """

    def __init__(self, ranks: Collective) -> None:
        self._ranks = ranks

    def mean(self, gradients: Sequence[Tensor | None], weights: Sequence[int],
             sizes: Sequence[int] | None = None) -> list[Tensor | None]:
        """Mean of each gradient over all ranks, weighted by the samples behind it: sum(n * g) / sum(n).

        Args:
            gradients: Flat float32 vectors, not changed; None where this rank has none.
            weights: Valid samples behind each of this rank's gradients, n.
            sizes: Scalars of each; None: those of the gradients, which are all there.

        Returns:
            New vectors, equal on all ranks to the bit; None where no rank has one.
        """
        sizes = sizes or [0 if gradient is None else gradient.numel() for gradient in gradients]
        own = [0 if gradient is None else weight for gradient, weight in zip(gradients, weights, strict=True)]
        weighted = [torch.zeros(size) if gradient is None else gradient.cpu() * weight
                    for gradient, weight, size in zip(gradients, own, sizes, strict=True)]
        total = self._ranks.sum(torch.cat([*weighted, torch.tensor(own, dtype=torch.float32)]))
        sums, counts = torch.split(total[:-len(own)], list(sizes)), total[-len(own):].tolist()
        return [vector / count if count else None for vector, count in zip(sums, counts, strict=True)]

    def gather_all(self, moments: Any) -> list[Any]:
        """(count, mean, M2) of every rank's samples, in rank order; of several policies a mapping from policy to that."""
        if isinstance(moments, Mapping):
            columns = [self.gather_all(own) for own in moments.values()]
            return [dict(zip(moments, row, strict=True)) for row in zip(*columns, strict=True)]
        parts = self._ranks.gather(torch.tensor([float(value) for value in moments], dtype=torch.float64))
        return [tuple(part.tolist()) for part in parts]

    def gather_moments(self, moments: Sequence[dict[str, Moments]]) -> tuple[dict[str, Moments], ...]:
        """The normalisers' moments of all ranks, in rank order.

        Every rank must bring equally many, with equal names and shapes, as ranks that consumed one item each do.
        """
        gathered: list[list[dict[str, Moments]]] = [[] for _ in range(self._ranks.size)]
        for part in moments:
            merged: list[dict[str, Moments]] = [{} for _ in range(self._ranks.size)]
            for name in sorted(part):
                columns = [self._ranks.gather(torch.as_tensor(value, dtype=torch.float64)) for value in part[name]]
                for rank in range(self._ranks.size):
                    merged[rank][name] = tuple(column[rank] for column in columns)  # type: ignore[assignment]
            for rank in range(self._ranks.size):
                gathered[rank].append(merged[rank])
        return tuple(part for rank in gathered for part in rank)

    def close(self) -> None:
        """Leave the group. Idempotent."""
        self._ranks.close()

