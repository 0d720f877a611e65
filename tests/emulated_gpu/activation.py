"""Give a build of torch for the CPU two GPUs in host memory: devices "cuda:0" and "cuda:1" that compute on the CPU.

`device.cpp` has the tensors, the kernels and the generators. `streams.py` and `graphs.py` replace those parts of
`torch.cuda` that need a driver. The classes `torch.cuda.graph`, `torch.cuda.stream` and `torch.cuda.device` stay.

Emulated: the devices of tensors, and the errors if tensors or generators of different devices meet, or if NumPy gets a
tensor of a GPU; pinned memory; autograd and autocast; the current stream and device of each thread; CUDA graphs, which
refuse operations that wait for the GPU, compute nothing while they are recorded, and are replayed in the same memory.

Not emulated: kernels that still run after the call that launched them; `torch.compile`, which returns the function as
it is; NCCL, cuDNN, a limit of memory, speed, and the rounding of a GPU. Missing waits are found nevertheless while
`order.h` checks the order of the work, which the fixture `fault_of_order` of `conftest.py` lets it do.
"""

from __future__ import annotations

import ctypes
import sys


def activate(library):
    """Load the library that `build.py` has built, and let `torch.cuda` use its devices.

    The library must be loaded before torch, which asks only once whether there is a GPU.
    """
    if "torch" in sys.modules:
        raise RuntimeError("torch was imported before the emulated GPU, which it therefore does not see")
    devices = ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    import torch

    from tests.emulated_gpu import graphs, streams
    streams.replace(devices)
    graphs.replace()
    torch.compile = lambda function=None, **options: function


def check():
    """Use each part of the emulated GPU once; raise an error if one of them does not fit torch."""
    import torch

    device = torch.device("cuda:1")
    module = torch.nn.Linear(3, 2).to(device)
    loss = module(torch.ones(4, 3, device=device)).square().sum()
    loss.backward()
    drawn = torch.rand(5, device=device, generator=torch.Generator(device))
    weight = module.weight.grad
    if not (weight.device == drawn.device == device and weight.cpu().pin_memory().is_pinned() and loss.item() >= 0.0):
        raise RuntimeError("tensors are not where they should be")
    graph, own = torch.cuda.CUDAGraph(), torch.zeros(2, device="cuda:0")
    with torch.cuda.graph(graph, stream=torch.cuda.Stream("cuda:0")):
        double = (own + 1) * 2
    own.fill_(3.0)
    graph.replay()
    if double.tolist() != [8.0, 8.0]:
        raise RuntimeError("a graph is replayed wrong")


if __name__ == "__main__":
    activate(sys.argv[1])
    check()
