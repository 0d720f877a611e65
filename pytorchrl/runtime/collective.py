"""Ranks that exchange tensors among themselves."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor, distributed
from torch.distributed import distributed_c10d

from pytorchrl.errors import RankLostError

_gloo: Any = distributed  # its stores and groups are bound from C++ and have no types
_options: Any = distributed_c10d

# Ranks that all want to meet do so within this time.
_MEETING_TIMEOUT_S = 30.0
# A rank that waits for others looks this often whether it was told to leave; their answers wake it at once.
_LOOK_INTERVAL = timedelta(seconds=0.05)


class Collective(Protocol):
    """A fixed set of ranks; every rank makes the same calls in the same order.

    A call raises `RankLostError` if a rank is gone, or if this one was told to leave.
    """

    size: int
    """Number of ranks."""

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of all ranks' tensors, equal on all ranks to the bit; `tensor` may be overwritten."""

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's tensor, of equal shapes, in rank order."""

    def close(self) -> None:
        """Leave, from any thread; a call that another thread is making ends. Idempotent."""


class GlooCollective:
    """Ranks of any processes, connected by gloo.

    Args:
        address: Host of rank 0, where the ranks meet.
        port: Free TCP port there.
        rank: The caller's place, 0 .. size - 1.
        size: Number of ranks.
        timeout_s: After this many seconds without an answer from a rank, every call raises.
        in_order: Whether sums are made in rank order, as the simulated runtime makes them; gloo's own order is faster.
        generation: How often ranks have met, this time included: those of another meeting are not met.

    Raises:
        RankLostError: Not all ranks came.
    """

    def __init__(self, address: str, port: int, rank: int, size: int, timeout_s: float, in_order: bool = False,
                 generation: int = 1) -> None:
        self.size, self._in_order, self._timeout = size, in_order, timedelta(seconds=timeout_s)
        meeting = timedelta(seconds=min(timeout_s, _MEETING_TIMEOUT_S))
        self._left = threading.Event()
        self._busy = threading.Lock()  # held by a call; whoever has it may let go of the group
        try:
            store = _gloo.TCPStore(address, port, size, is_master=rank == 0, timeout=meeting)
            # The group belongs to this object, not to the process: the user's own default group stays free.
            self._group: Any = _gloo.ProcessGroupGloo(_gloo.PrefixStore(f"gradients {generation}", store), rank, size, meeting)
        except RuntimeError as error:
            raise RankLostError(f"rank {rank} did not meet the others: {_first_line(error)}") from error

    def sum(self, tensor: Tensor) -> Tensor:
        """All-reduce in place, unless in order."""
        if self._in_order:
            return torch.stack(self.gather(tensor)).sum(0)
        options = _options.AllreduceOptions()
        options.timeout = self._timeout
        self._run(lambda group: group.allreduce([tensor], options))
        return tensor

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """All-gather."""
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        options = _options.AllgatherOptions()
        options.timeout = self._timeout
        self._run(lambda group: group.allgather([parts], [tensor], options))
        return parts

    def _run(self, start: Callable[[Any], Any]) -> None:
        with self._busy:
            problem, work = "it has left", None
            try:
                if not self._left.is_set():
                    work = start(self._group)
                    if self._wait(work):
                        return
            except RuntimeError as error:
                problem = _first_line(error)
            self._left.set()
            # As long as anybody refers to a group its connections stay, and others go on waiting for this rank. Letting go of
            # one at work takes until its work ends, which it does once the others have let go, or are gone.
            is_at_work, let_go = work is not None, [work, self._group]
            del work
            self._group = None
            if is_at_work:
                threading.Thread(target=let_go.clear, name="LeavingThread", daemon=True).start()
            else:
                let_go.clear()
        raise RankLostError(f"an exchange among {self.size} gradient workers broke off: {problem}")

    def _wait(self, work: Any) -> bool:
        """Whether it was completed, before this rank was told to leave."""
        while not self._left.is_set():
            try:
                work.wait(_LOOK_INTERVAL)
            except RuntimeError:
                if not work.is_completed():
                    continue
                work.wait()  # raises what it failed with, if it did
            return True
        return False

    def close(self) -> None:
        """See `Collective`."""
        self._left.set()
        if self._busy.acquire(blocking=False):
            self._group = None
            self._busy.release()


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
