"""Copy batches from host memory to a GPU while the learner computes with earlier batches."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar, cast

import torch
from torch import Tensor

from pytorchrl.agent.data import map_tensors
from pytorchrl.scheme.timing import Stopwatch

D = TypeVar("D")

# In a shared buffer, each tensor starts at a multiple of this number of bytes, like torch's own tensors on a GPU.
_ALIGNMENT = 512
# Number of page-locked buffers: while one buffer is copied to the device, the next batch is written to the other.
_NUM_BUFFERS = 2


class CudaCopy:
    """A copy of a buffer to a CUDA device, which may still be in progress."""

    def __init__(self, copy: Tensor, done: torch.cuda.Event) -> None:
        self._copies, self._done = [copy], done

    def wait(self) -> None:
        """Block until the copy is complete."""
        self._done.synchronize()

    def take(self) -> Tensor:
        """Return the copy, a uint8 tensor on the device, for use on the calling thread's current stream.

        The caller must have called `wait`, and may call this method only once.
        """
        copy = self._copies.pop()  # so that the copy is freed after its use, although `Staging` keeps `self`
        # The memory belongs to the copier's stream. Without this call, it could be overwritten as soon as Python
        # releases the tensor, while kernels of the current stream still read it.
        copy.record_stream(torch.cuda.current_stream(copy.device))
        return copy


class CudaCopier:
    """Starts copies of page-locked memory to a CUDA device on a separate stream, while the device may compute."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def allocate(self, num_bytes: int) -> Tensor:
        """Return a buffer (num_bytes,) uint8 in page-locked memory, which can be copied while the device computes."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def start(self, buffer: Tensor) -> CudaCopy:
        """Start copying a buffer or a part of a buffer, which must not change before the copy is complete."""
        with torch.cuda.stream(self._stream):
            copy = buffer.to(self._device, non_blocking=True)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._stream)
        return CudaCopy(copy, done)


class Staged(Generic[D]):
    """Data whose tensors are being copied to the device together, as parts of one buffer.

    Args:
        data: The data in host memory; see `map_tensors`.
        offsets: Offset of each tensor in the buffer, in bytes.
        copy: The copy of the buffer.
    """

    def __init__(self, data: D, offsets: list[int], copy: CudaCopy) -> None:
        self._data, self._offsets, self._copy = data, offsets, copy

    def get(self) -> D:
        """Wait for the copy to be complete, and return the data with its tensors on the device."""
        self._copy.wait()
        whole, offsets = self._copy.take(), iter(self._offsets)

        def part(leaf: Tensor) -> Tensor:
            if leaf.device.type != "cpu":
                return leaf
            start = next(offsets)
            return whole[start:start + _num_bytes(leaf)].view(leaf.dtype).view(leaf.shape)
        return map_tensors(self._data, part)


class Staging:
    """Copies batches to the learner's device through page-locked memory, on a separate stream.

    All tensors of a batch are copied as one buffer, which is reused only after this copy is complete. Any thread may
    call `start`; only the learner thread may call `ahead` and `on_device`.

    Args:
        copier: The object that starts copies of buffers.
        now: Function that returns the time in seconds.

    Attributes:
        watch: Stopwatch of the operations "load" (writing a batch into a buffer and starting its copy) and "load_wait"
            (waiting, in the learner, until a batch is on the device).
    """

    def __init__(self, copier: CudaCopier, now: Callable[[], float]) -> None:
        self._copier, self._now = copier, now
        self._buffers: deque[tuple[Tensor, CudaCopy | None]] = deque(
            [(torch.empty(0, dtype=torch.uint8), None)] * _NUM_BUFFERS)
        self._started: deque[tuple[object, Staged[object]]] = deque(maxlen=_NUM_BUFFERS)
        self._lock = threading.Lock()  # guards the buffers: the holder takes one, writes it and puts it back
        self.watch = Stopwatch(now)

    def start(self, data: D) -> Staged[D]:
        """Start to copy all tensors of `data` that are in host memory; later changes to the tensors are not copied."""
        began, leaves, offsets, size = self._now(), _leaves(data), list[int](), 0
        for leaf in leaves:
            offsets.append(size)
            size += -(-_num_bytes(leaf) // _ALIGNMENT) * _ALIGNMENT
        with self._lock:
            buffer, last = self._buffers.popleft()
            if last is not None:
                last.wait()
            if len(buffer) < size:
                buffer = self._copier.allocate(size)
            for leaf, offset in zip(leaves, offsets, strict=True):
                buffer[offset:offset + _num_bytes(leaf)].view(leaf.dtype).view(leaf.shape).copy_(leaf)
            copy = self._copier.start(buffer[:size])
            self._buffers.append((buffer, copy))
        self.watch.count("load", self._now() - began)
        return Staged(data, offsets, copy)

    def ahead(self, batches: Iterator[D]) -> Iterator[D]:
        """Yield the batches unchanged, but start to copy them early, so that `on_device` waits less.

        Before this method yields a batch, it starts to copy the following batch to the device.
        """
        current = self._begun(next(batches, None))
        while current is not None:
            following = self._begun(next(batches, None))
            yield current
            current = following

    def _begun(self, batch: D | None) -> D | None:
        if batch is not None and _leaves(batch):
            self._started.append((batch, self.start(batch)))
        return batch

    def on_device(self, batch: D) -> D:
        """Return the batch with all tensors on the device; start the copy first, unless `ahead` has started it."""
        if not _leaves(batch):
            return batch
        began = self._now()
        staged = self._staged(batch).get()
        self.watch.count("load_wait", self._now() - began)
        return staged

    def _staged(self, batch: D) -> Staged[D]:
        for place, (started, staged) in enumerate(self._started):
            if started is batch:
                del self._started[place]
                return cast("Staged[D]", staged)
        return self.start(batch)


def staging_for(device: torch.device, now: Callable[[], float]) -> Staging | None:
    """Return a `Staging` for a learner on a CUDA device, or None for any other device."""
    return Staging(CudaCopier(device), now) if device.type == "cuda" else None


def _leaves(data: object) -> list[Tensor]:
    """Return the tensors of `data` that are in host memory, in the order in which `map_tensors` visits them."""
    found: list[Tensor] = []

    def add(leaf: Tensor) -> Tensor:
        if leaf.device.type == "cpu":
            found.append(leaf)
        return leaf
    map_tensors(data, add)
    return found


def _num_bytes(leaf: Tensor) -> int:
    return leaf.numel() * leaf.element_size()
