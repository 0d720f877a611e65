"""Averaging gradients among the gradient workers themselves."""

from __future__ import annotations

import socket
from collections.abc import Sequence

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

    def mean(self, gradients: Sequence[Tensor], num_samples: int) -> list[Tensor]:
        """Mean of each gradient over all ranks, weighted by the samples behind it: sum(n * g) / sum(n).

        Args:
            gradients: Flat float32 vectors, one a group of parameters; not changed.
            num_samples: Valid samples behind this rank's gradients, n.

        Returns:
            New vectors, equal on all ranks to the bit; none if no rank has any sample.
        """
        weighted = torch.cat([*(gradient.cpu() * num_samples for gradient in gradients), torch.tensor([float(num_samples)])])
        total = self._ranks.sum(weighted)
        if total[-1] == 0:
            return []
        means = total[:-1] / total[-1]
        return list(torch.split(means, [gradient.numel() for gradient in gradients]))

    def gather_all(self, moments: Moments) -> list[Moments]:
        """(count, mean, M2) of every rank's samples, in rank order."""
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

