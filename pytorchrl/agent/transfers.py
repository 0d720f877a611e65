"""Copy tensors between host memory and a GPU so that the program waits for the GPU as rarely as possible."""

from __future__ import annotations

import torch
from torch import Tensor


def on_host(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return tensors in host memory, after a single copy from the device; those in host memory are not copied."""
    for tensor in tensors:
        if not tensor.is_cpu:
            return _copied(tensors)
    return tensors


def _copied(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    places = [place for place, tensor in enumerate(tensors) if not tensor.is_cpu]
    # In a buffer that starts with the largest elements, each tensor begins at a multiple of its element size.
    places.sort(key=lambda place: -tensors[place].element_size())
    parts = [tensors[place].contiguous().view(-1).view(torch.uint8) for place in places]
    pieces = torch.split(torch.cat(parts).cpu(), [len(part) for part in parts])
    found = list(tensors)
    for place, piece in zip(places, pieces, strict=True):
        found[place] = piece.view(tensors[place].dtype).view(tensors[place].shape)
    return tuple(found)


def cpu_copy(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor in host memory, without gradient, which shares no memory with the tensor."""
    return tensor.detach().to("cpu", copy=True)


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of host memory on a device, without waiting until the device has done its earlier work.

    The driver has read pageable memory when the call returns. If the tensor is in page-locked memory, the caller must
    not change it before the copy is complete.
    """
    return tensor.to(device, non_blocking=True)
