"""Exchange tensors among ranks with collective operations, without a server."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, distributed
from torch.distributed import distributed_c10d

from pytorchrl.errors import RankLostError

FromTorch: TypeAlias = Any  # stores, groups and options are bound from C++ and have no types
_gloo: FromTorch = distributed
_options: FromTorch = distributed_c10d

# Seconds within which all ranks of a group must connect.
_MEETING_TIMEOUT_S = 30.0
# Interval at which a waiting rank checks whether `close` was called; an answer from another rank wakes it immediately.
_LOOK_INTERVAL = timedelta(seconds=0.05)


class Collective(Protocol):
    """Fixed group of ranks, which all make the same calls in the same order.

    A call raises `RankLostError` if another rank is lost, or if this rank has left the group.
    """

    size: int
    """Number of ranks."""

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of all ranks' tensors, which is bit-identical on all ranks; `tensor` may be overwritten."""

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks in rank order; their shapes must be equal."""

    def close(self) -> None:
        """Leave the group and abort a call in progress; any thread may call this method. Idempotent."""


class GlooCollective:
    """Group of ranks in one or several processes, connected by gloo.

    Args:
        address: Host of rank 0, to which all ranks connect.
        port: Free TCP port of that host.
        rank: Rank of the caller, from 0 to size - 1.
        size: Number of ranks.
        timeout_s: Seconds that a call waits for an answer from another rank before it raises an error.
        in_order: Whether to add tensors in rank order, as the simulated runtime does; gloo's own order is faster.
        generation: Number of this group among the groups that use the same port, counted from 1.

    Raises:
        RankLostError: Not all ranks connected in time.
    """

    def __init__(self, address: str, port: int, rank: int, size: int, timeout_s: float, in_order: bool = False,
                 generation: int = 1) -> None:
        self.size, self._in_order, self._timeout = size, in_order, timedelta(seconds=timeout_s)
        meeting = timedelta(seconds=min(timeout_s, _MEETING_TIMEOUT_S))
        self._left = threading.Event()
        self._busy = threading.Lock()  # held during a call; only its holder may release the group
        try:
            store = _gloo.TCPStore(address, port, size, is_master=rank == 0, timeout=meeting)
            # This is not the default process group of torch, which remains available to the user.
            self._group: FromTorch = _gloo.ProcessGroupGloo(
                _gloo.PrefixStore(f"gradients {generation}", store), rank, size, meeting)
        except RuntimeError as error:
            raise RankLostError(f"rank {rank} could not connect to the other ranks: {_first_line(error)}") from error

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of all ranks' tensors, computed in place by all-reduce unless the order is fixed."""
        if self._in_order:
            return torch.stack(self.gather(tensor)).sum(0)
        options = _options.AllreduceOptions()
        options.timeout = self._timeout
        self._run(lambda group: group.allreduce([tensor], options))
        return tensor

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks in rank order, by all-gather."""
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        options = _options.AllgatherOptions()
        options.timeout = self._timeout
        self._run(lambda group: group.allgather([parts], [tensor], options))
        return parts

    def _run(self, start: Callable[[FromTorch], FromTorch]) -> None:
        with self._busy:
            problem, work = "this rank has left the group", None
            try:
                if not self._left.is_set():
                    work = start(self._group)
                    if self._wait(work):
                        return
            except RuntimeError as error:
                problem = _first_line(error)
            self._left.set()
            # While a reference to the group exists, its connections stay open and other ranks wait for this rank.
            # Releasing the group during an operation blocks until the operation ends, that is, until the other ranks
            # have left or died.
            is_running, references = work is not None, [work, self._group]
            del work
            self._group = None
            if is_running:
                threading.Thread(target=references.clear, name="LeavingThread", daemon=True).start()
            else:
                references.clear()
        raise RankLostError(f"an exchange among {self.size} gradient workers was aborted: {problem}")

    def _wait(self, work: FromTorch) -> bool:
        """Wait for an operation; return whether it completed before this rank left the group."""
        while not self._left.is_set():
            try:
                work.wait(_LOOK_INTERVAL)
            except RuntimeError:
                if not work.is_completed():
                    continue
                work.wait()  # `wait` raises the error of a failed operation
            return True
        return False

    def close(self) -> None:
        """Leave the group; see `Collective`."""
        self._left.set()
        if self._busy.acquire(blocking=False):
            self._group = None
            self._busy.release()


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
