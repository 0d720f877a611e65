"""Groups of gradient workers that average their gradients among themselves."""

from __future__ import annotations

import math
import pickle
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from pytorchrl.errors import CallOrderError
from pytorchrl.runtime import Collective, Runtime
from pytorchrl.scheme.ledger import LedgerSnapshot
from pytorchrl.scheme.transport.messages import Moments

T = TypeVar("T")

Vectors = list[Tensor | None]
"""One flat gradient per parameter group. With several policies, one per policy; None if a policy has no gradient."""
MomentsOfData = Moments | dict[str, Moments]
"""Moments (count, mean, M2) of a worker's samples; with several policies, a mapping from policy to moments."""


class GradientGroup:
    """Ranks that average their gradients after every batch, so that all of them apply the same update.

    Args:
        ranks: The connection between the ranks.

    Attributes:
        num_votes: Number of ranks that passed `votes=True` to the latest call of `mean`.
    """

    def __init__(self, ranks: Collective) -> None:
        self._ranks = ranks
        self.num_votes = 0

    def mean(self, gradients: Sequence[Tensor | None], weights: Sequence[int],
             sizes: Sequence[int] | None = None, votes: bool = False) -> Vectors:
        """Return the mean of each gradient g over all ranks, weighted by the numbers of samples n: sum(n g) / sum(n).

        Args:
            gradients: Flat float32 vectors, which are not changed; None for a gradient that this rank does not have.
            weights: The number of valid samples, n, that contributed to each gradient of this rank.
            sizes: Number of scalars in each gradient; required if a gradient is None.
            votes: Whether this rank votes for a joint action, such as an exchange; `num_votes` counts these votes.

        Returns:
            New vectors on `Collective.device`, bit-identical on all ranks; None for a gradient that no rank has.
        """
        device = self._ranks.device
        sizes = sizes or [0 if gradient is None else gradient.numel() for gradient in gradients]
        counted = [0 if gradient is None else weight for gradient, weight in zip(gradients, weights, strict=True)]
        weighted = [torch.zeros(size, device=device) if gradient is None else gradient.to(device) * weight
                    for gradient, weight, size in zip(gradients, counted, sizes, strict=True)]
        total = self._ranks.sum(torch.cat(
            [*weighted, torch.tensor([*counted, int(votes)], dtype=torch.float32, device=device)]))
        sums, (*counts, voted) = torch.split(total[:-len(counted) - 1],
                                              list(sizes)), total[-len(counted) - 1:].tolist()
        self.num_votes = int(voted)
        return [vector / count if count else None for vector, count in zip(sums, counts, strict=True)]

    def gather_moments(self, moments: MomentsOfData) -> list[MomentsOfData]:
        """Return the moments of each rank's samples, in rank order."""
        if isinstance(moments, Mapping):
            columns = [self._gather_moments(own) for own in moments.values()]
            return [dict(zip(moments, row, strict=True)) for row in zip(*columns, strict=True)]
        return list(self._gather_moments(moments))

    def _gather_moments(self, moments: Moments) -> list[Moments]:
        count, mean, squares = (float(value) for value in moments)
        found = self._ranks.gather(torch.tensor([count, mean, squares], dtype=torch.float64))
        return [(own[0], own[1], own[2]) for own in (tensor.tolist() for tensor in found)]

    def gather_objects(self, value: T) -> list[T]:
        """Return the values of all ranks, in the order of the ranks; each value is sent as a pickle."""
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = [int(size) for size in self._ranks.gather(torch.tensor([len(data)]))]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[:len(data)] = data
        found = self._ranks.gather(padded)
        return [pickle.loads(own[:size].numpy().tobytes()) for own, size in zip(found, sizes, strict=True)]

    def close(self) -> None:
        """Leave the group. Any thread may call this method, even repeatedly."""
        self._ranks.close()


@dataclass(frozen=True, slots=True)
class Meeting:
    """The address at which ranks connect to form a group."""

    generation: int
    """Number of the group: 1, 2, ..."""
    address: str
    port: int
    size: int
    """Number of ranks."""
    timeout_s: float
    """Seconds without a response after which an exchange fails."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A gradient worker that may become a rank of the next group."""

    version: int
    """Number of updates applied to the worker's parameters."""
    incarnation: int
    ledger: LedgerSnapshot
    address: str
    """Address at which ranks connect if this worker is the first rank of the group."""
    port: int


class ProcessGroup:
    """A gradient worker's connection to a group of ranks, and the worker's moments that were not shared yet.

    The moments are statistics of rollouts, which all ranks merge into their normalizers. Groups are numbered; the
    number of a group is its generation. A signal to leave a group names the generation. If the signal arrives before
    the worker joins this group, the worker leaves it right after joining. Groups of later generations are not affected.

    Args:
        device: Device of the worker's gradients; None: the CPU.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self._lock = threading.Lock()  # guards the next three attributes, because another thread may call `leave`
        self._group: GradientGroup | None = None
        self._generation, self._left = 0, 0.0
        self._unshared: list[dict[str, Moments]] = []

    @property
    def is_member(self) -> bool:
        """Whether the worker has ever joined a group; the value remains True after the worker leaves the group."""
        return self._group is not None

    def join(self, runtime: Runtime, meeting: Meeting, place: int) -> None:
        """Join a group as rank `place`.

        Raises:
            RankLostError: Not all ranks connected.
        """
        group = GradientGroup(runtime.join_ranks(
            meeting.address, meeting.port, place, meeting.size, meeting.timeout_s, meeting.generation,
            self._device))
        with self._lock:
            self._group, self._generation = group, meeting.generation
            is_over = self._generation <= self._left
        if is_over:
            group.close()

    def leave(self, generation: float = math.inf) -> None:
        """Leave the current group if its number is at most `generation`. This makes an exchange in progress fail.

        If the worker later joins a group whose number is at most `generation`, it leaves that group immediately.
        """
        with self._lock:
            self._left = max(self._left, generation)
            group = self._group if self._generation <= self._left else None
        if group is not None:
            group.close()

    def mean(self, gradients: Vectors, weights: Sequence[int], sizes: Sequence[int], shares: bool) -> Vectors:
        """Return the mean of each gradient over all ranks; see `GradientGroup.mean`.

        A rank passes `shares=True` if it has moments to send. If any rank does so, all ranks must then call `shared`.
        """
        return self._joined().mean(gradients, weights, sizes, shares)

    def _joined(self) -> GradientGroup:
        if self._group is None:
            raise CallOrderError("distribute_gradients=True averages among the ranks of a group; call join_group() "
                                 "first")
        return self._group

    def gather_moments(self, moments: MomentsOfData) -> list[MomentsOfData]:
        """Return the moments of each rank's samples, in rank order."""
        return self._joined().gather_moments(moments)

    def has_unshared(self, moments: Sequence[dict[str, Moments]]) -> bool:
        """Return whether this worker has moments to send to the other ranks: stored moments, or those in `moments`."""
        return bool(self._unshared or moments)

    def store(self, moments: Sequence[dict[str, Moments]]) -> None:
        """Store moments of rollouts until they are shared with the other ranks."""
        self._unshared += moments

    def discard(self) -> None:
        """Discard the moments of rollouts that `shared` has not sent yet, because the rollouts were discarded, too."""
        self._unshared = []

    def shared(self, shares: bool) -> tuple[dict[str, Moments], ...]:
        """Exchange moments (see `share`) if any rank passed `shares=True` to the latest call of `mean`.

        Args:
            shares: Whether this rank sends its stored moments.

        Returns:
            The moments that ranks sent, in the order of the ranks; empty if nothing was exchanged.
        """
        return self.share(shares) if self._joined().num_votes else ()

    def share(self, shares: bool = True) -> tuple[dict[str, Moments], ...]:
        """Send the stored moments if `shares` is True, wait until all ranks call this, and return all sent moments."""
        group, own = self._joined(), list[dict[str, Moments]]()
        if shares:  # even if the exchange fails, moments are not sent again: other ranks may have received them
            own, self._unshared = self._unshared, []
        return tuple(moments for found in group.gather_objects(own) for moments in found)
