"""Ranks that exchange tensors among themselves."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor, distributed

_gloo: Any = distributed  # its stores and groups are bound from C++ and have no types


class Collective(Protocol):
    """A fixed set of ranks; every rank makes the same calls in the same order."""

    size: int
    """Number of ranks."""

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of all ranks' tensors, equal on all ranks to the bit; `tensor` may be overwritten."""

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's tensor, in rank order."""

    def close(self) -> None:
        """Leave. Idempotent."""


class GlooCollective:
    """Ranks of any processes, connected by gloo.

    Args:
        address: Host of rank 0, where the ranks meet.
        port: Free TCP port there.
        rank: The caller's place, 0 .. size - 1.
        size: Number of ranks.
        timeout_s: After this many seconds without an answer from a rank, every call raises.
        in_order: Whether sums are made in rank order, as the simulated runtime makes them; gloo's own order is faster.
    """

    def __init__(self, address: str, port: int, rank: int, size: int, timeout_s: float, in_order: bool = False) -> None:
        timeout = timedelta(seconds=timeout_s)
        self.size, self._in_order = size, in_order
        self._store = _gloo.TCPStore(address, port, size, is_master=rank == 0, timeout=timeout)
        # The group belongs to this object, not to the process: the user's own default group stays free.
        self._group: Any = _gloo.ProcessGroupGloo(_gloo.PrefixStore("gradients", self._store), rank, size, timeout)

    def sum(self, tensor: Tensor) -> Tensor:
        """All-reduce in place, unless in order."""
        if self._in_order:
            return torch.stack(self.gather(tensor)).sum(0)
        assert self._group is not None, "the group is closed"
        self._group.allreduce([tensor]).wait()
        return tensor

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """All-gather."""
        assert self._group is not None, "the group is closed"
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        self._group.allgather([parts], [tensor]).wait()
        return parts

    def close(self) -> None:
        """Forget the group; its connections end with it."""
        self._group = None
