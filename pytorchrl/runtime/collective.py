"""Exchange tensors among ranks with collective operations, without a server."""

from __future__ import annotations

import os
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
from torch import Tensor, distributed
from torch.distributed import distributed_c10d
from typing_extensions import override

from pytorchrl.errors import RankLostError
from pytorchrl.support.untyped import Untyped

# torch's groups and options are bound from C++, and the types that torch states for them are incomplete.
_gloo: Untyped = distributed
_options: Untyped = distributed_c10d

# Seconds within which all ranks of a group must connect.
_MEETING_TIMEOUT_S = 30.0
# Interval at which a waiting rank checks whether `close` was called; an answer from another rank wakes it immediately.
_LOOK_INTERVAL = timedelta(seconds=0.05)
# Seconds between two checks whether a sum over GPUs is complete. A sum takes between 50 microseconds and a few
# milliseconds.
_NCCL_LOOK_INTERVAL_S = 2e-5
_CPU = torch.device("cpu")
_LOOPBACK = "127.0.0.1"


class Collective(ABC):
    """Fixed group of ranks, which all make the same calls in the same order.

    A call raises `RankLostError` if another rank is lost, or if this rank has left the group.
    """

    size: int
    """Number of ranks."""
    device: torch.device
    """Device of the tensors that `sum` adds; `gather` takes tensors in host memory."""

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of all ranks' tensors, which is bit-identical on all ranks; `tensor` may be overwritten.

        By default, the tensors are added in rank order.
        """
        return torch.stack(self.gather(tensor)).sum(0)

    @abstractmethod
    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks in rank order; their shapes must be equal."""

    @abstractmethod
    def close(self) -> None:
        """Leave the group and abort a call in progress; any thread may call this method, also more than once."""


class GlooCollective(Collective):
    """Group of ranks in one or several processes, connected by gloo.

    Args:
        address: Host of rank 0, to which all ranks connect.
        port: Free TCP port of that host.
        rank: Rank of the caller, from 0 to size - 1.
        size: Number of ranks.
        timeout_s: Seconds that a call waits for an answer from another rank before it raises an error.
        in_order: Whether to add tensors in rank order, which is slower than gloo's own order. A recorded run needs rank
            order, so that repeating the run in the simulated runtime yields equal sums.
        generation: Number of this group among the groups that use the same port, counted from 1.
        gpu: Identity of the caller's GPU; "" without a GPU.

    Attributes:
        store: The key-value store of torch through which the ranks connect to each other.
        gpus: The identity of each rank's GPU; empty if a rank has none.

    Raises:
        RankLostError: Not all ranks connected in time.
    """

    def __init__(self, address: str, port: int, rank: int, size: int, timeout_s: float, in_order: bool = False,
                 generation: int = 1, gpu: str = "") -> None:
        self.device, names = _CPU, [f"gpu {generation} {each}" for each in range(size)]
        self.size, self._in_order, self._timeout = size, in_order, timedelta(seconds=timeout_s)
        meeting = timedelta(seconds=min(timeout_s, _MEETING_TIMEOUT_S))
        self._left = threading.Event()
        self._busy = threading.Lock()  # guards the group: only the holder may use or release it
        try:
            self.store = make_store(address, port, rank, size, meeting)
            if gpu:
                self.store.set(names[rank], gpu)
            # This is not the default process group of torch, which remains available to the user.
            self._group: Untyped = _gloo.ProcessGroupGloo(
                _gloo.PrefixStore(f"gradients {generation}", self.store), rank, size, gloo_options(address, meeting))
            # All ranks have connected, so each rank with a GPU has stored the GPU's identity.
            self.gpus: list[str] = [
                self.store.get(name).decode() for name in names] if gpu and self.store.check(names) else []
        except RuntimeError as error:
            raise RankLostError(f"rank {rank} could not connect to the other ranks: {_first_line(error)}") from error

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of all ranks' tensors; unless `in_order` is set, the sum overwrites `tensor`."""
        if self._in_order:
            return super().sum(tensor)
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

    def _run(self, start: Callable[[Untyped], distributed.Work]) -> None:
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
            # Other ranks wait for this rank until its connections close, that is, until no reference to the group is
            # left. During an operation, releasing the last reference blocks until the other ranks have left or died,
            # so a separate thread releases the references. Nobody waits for this thread: it only runs the destructors
            # of the group, and ends when the other ranks have left or died, or together with the process.
            is_running, references = work is not None, [work, self._group]
            del work
            self._group = None
            if is_running:
                threading.Thread(target=references.clear, name="LeavingThread", daemon=True).start()
            else:
                references.clear()
        raise RankLostError(f"an exchange among {self.size} gradient workers was aborted: {problem}")

    def _wait(self, work: distributed.Work) -> bool:
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

    @override
    def close(self) -> None:
        self._left.set()
        if self._busy.acquire(blocking=False):
            self._group = None
            self._busy.release()


class NcclCollective(Collective):
    """Group of ranks that each have a GPU of their own: NCCL adds tensors on the GPUs, and gloo does everything else.

    Args:
        gloo: Gloo group of the same ranks.
        group: NCCL group of the same ranks.
        device: The GPU of the caller.
        timeout_s: Seconds after which a sum, or `connect`, fails.
    """

    def __init__(self, gloo: GlooCollective, group: Untyped, device: torch.device, timeout_s: float) -> None:
        self.size, self.device, self._gloo, self._timeout_s = gloo.size, device, gloo, timeout_s
        self._group, self._left = group, threading.Event()
        self._busy = threading.Lock()  # guards the group: only the holder may use or release it

    def connect(self) -> None:
        """Connect the GPUs of all ranks by a first sum; call this method once, before `sum`.

        NCCL connects the ranks within the first call, which waits forever if a rank has died. Therefore, a separate
        thread makes this call. If the ranks do not connect in time, nobody waits for this thread any more.

        Raises:
            RankLostError: The GPUs did not connect in time, because a rank was lost.
        """
        problems, group = [f"the GPUs are not connected after {self._timeout_s:g} s"], self._group

        def add() -> None:
            try:
                problems[:] = [self._add(group.allreduce, torch.zeros(1, device=self.device))]
            except RuntimeError as error:
                problems[:] = [_first_line(error)]

        thread = threading.Thread(target=add, name="ConnectingThread", daemon=True)
        with self._busy:
            thread.start()
            thread.join(self._timeout_s)
            if not (problem := problems[0]):
                return
            self._left.set()
            self._gloo.close()
            # While NCCL connects, aborting the group may wait, too.
            threading.Thread(target=group.abort, name="LeavingThread", daemon=True).start()
            self._group = None
        raise RankLostError(f"the GPUs of {self.size} gradient workers could not be connected: {problem}")

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of all ranks' tensors, computed in place. Each tensor must be on the GPU of its rank.

        Raises:
            RankLostError: The sum was aborted, because a rank was lost.
        """
        # If a rank is lost, NCCL waits forever, but gloo raises an error. Therefore, the ranks first wait for each
        # other with gloo.
        self._gloo.gather(torch.zeros(1))
        with self._busy:
            try:
                problem = "this rank has left the group" if self._left.is_set() else self._add(
                    self._group.allreduce, tensor)
            except RuntimeError as error:
                problem = _first_line(error)
            if not problem:
                return tensor
            self._abort()
        raise RankLostError(f"a sum over the GPUs of {self.size} gradient workers was aborted: {problem}")

    def _add(self, allreduce: Callable[[list[Tensor]], distributed.Work], tensor: Tensor) -> str:
        """Sum the ranks' tensors in place; return why the sum could not be completed, or "" if it is complete."""
        work, deadline = allreduce([tensor]), time.monotonic() + self._timeout_s
        while not work.is_completed():
            if self._left.is_set():
                return "this rank has left the group"
            if time.monotonic() > deadline:
                return f"it is not complete after {self._timeout_s:g} s"
            time.sleep(_NCCL_LOOK_INTERVAL_S)
        # Make the current CUDA stream wait for the sum. Without a timeout, this call would not raise the error of a
        # failed sum.
        work.wait(timedelta(seconds=self._timeout_s))
        return ""

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks in rank order; gloo gathers them."""
        return self._gloo.gather(tensor)

    @override
    def close(self) -> None:
        self._left.set()
        self._gloo.close()
        if self._busy.acquire(blocking=False):
            self._abort()
            self._busy.release()

    def _abort(self) -> None:
        """Leave the NCCL group and the gloo group; only the holder of the lock `_busy` may call this method."""
        self._left.set()
        self._gloo.close()
        if self._group is not None:
            self._group.abort()
            self._group = None


def join_ranks(
        address: str, port: int, rank: int, size: int, timeout_s: float, in_order: bool = False, generation: int = 1,
        device: torch.device = _CPU) -> GlooCollective | NcclCollective:
    """Join a group of ranks; see `GlooCollective`. NCCL adds tensors if each rank has a GPU of its own.

    Args:
        address: See `GlooCollective`.
        port: See `GlooCollective`.
        rank: See `GlooCollective`.
        size: See `GlooCollective`.
        timeout_s: See `GlooCollective`; also the time after which a sum over GPUs, or connecting them, fails.
        in_order: See `GlooCollective`; if true, gloo adds the tensors, because NCCL has an order of its own.
        generation: See `GlooCollective`.
        device: Device of the caller's gradients.
    """
    gloo = GlooCollective(address, port, rank, size, timeout_s, in_order, generation, identity_of(device))
    if in_order or not suits_nccl(gloo.gpus):
        return gloo
    ranks = NcclCollective(gloo, make_nccl(gloo.store, rank, size, generation), device, timeout_s)
    ranks.connect()
    return ranks


def propose_address(*, is_local: bool) -> tuple[str, int]:
    """Return an address of this host, and a TCP port that is currently free.

    Args:
        is_local: Whether all ranks are on this host; the address is then the loopback address.
    """
    with socket.socket() as probe, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
        if is_local:
            probe.bind((_LOOPBACK, 0))
            return probe.getsockname()
        probe.bind(("", 0))
        try:
            # Connecting a UDP socket sends nothing, but selects the address at which other hosts reach this host.
            route.connect(("10.255.255.255", 1))
            address = route.getsockname()[0]
        except OSError:  # this host has no network, so all ranks must be on this host
            address = _LOOPBACK
        return address, probe.getsockname()[1]


def make_store(address: str, port: int, rank: int, size: int, timeout: timedelta) -> Untyped:
    """Return the key-value store of torch through which the ranks of a group connect to each other.

    If `address` is the loopback address, rank 0 listens only on it; otherwise, on all addresses of its host.

    Raises:
        RuntimeError: The store cannot be reached at this address and port.
    """
    if rank or address != _LOOPBACK:
        return _gloo.TCPStore(address, port, size, is_master=rank == 0, timeout=timeout)
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((address, port))
        except OSError as error:
            raise RuntimeError(f"port {port} of {address}: {error}") from error
        listening.listen(size + 1)
        # The store closes this descriptor.
        return _gloo.TCPStore(address, port, size, is_master=True, timeout=timeout, master_listen_fd=listening.detach())


def gloo_options(address: str, timeout: timedelta) -> Untyped:
    """Return the options of a gloo group; if `address` is the loopback address, ranks listen only on this address."""
    options = _gloo.ProcessGroupGloo._Options()
    options._timeout = timeout
    options._devices = [_gloo.ProcessGroupGloo.create_device(hostname=address) if address == _LOOPBACK else
                        _gloo.ProcessGroupGloo.create_default_device()]
    return options


def suits_nccl(gpus: Sequence[str]) -> bool:
    """Return whether ranks on these GPUs (`GlooCollective.gpus`) can use NCCL: there are several, all different."""
    return len(gpus) > 1 and len(set(gpus)) == len(gpus)


def identity_of(device: torch.device) -> str:
    """Return an identifier of a GPU, unique across all hosts; "" for other devices, or if torch lacks NCCL."""
    if device.type != "cuda" or not distributed.is_nccl_available():
        return ""
    return str(torch.cuda.get_device_properties(device).uuid)


def make_nccl(store: Untyped, rank: int, size: int, generation: int) -> Untyped:
    """Return an NCCL group; its ranks connect at their first sum, see `NcclCollective.connect`."""
    # By default, torch ends the process after an error or a timeout of NCCL. `NcclCollective` handles both instead.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    options = _options.ProcessGroupNCCL.Options()
    options._timeout = timedelta(days=365)
    return _options.ProcessGroupNCCL(_gloo.PrefixStore(f"gpus {generation}", store), rank, size, options)


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
