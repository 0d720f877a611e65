"""Fixtures of the tests on a GPU, real or emulated."""

from __future__ import annotations

import pytest
import torch

from pytorchrl.agent.actors.small_network import SmallNetwork
from pytorchrl.agent import cuda_graphs
from tests.emulated_gpu import streams


@pytest.fixture
def recordings(monkeypatch):
    """Return a list with an entry for each recording of a CUDA graph that is begun."""
    begun, record = [], cuda_graphs.CudaRecorder.record

    def counted(recorder, function):
        begun.append(function)
        return record(recorder, function)
    monkeypatch.setattr(cuda_graphs.CudaRecorder, "record", counted)
    return begun


@pytest.fixture
def devices():
    """The library of the emulated GPU; skip the test on a real one."""
    if not streams.loaded:
        pytest.skip("only the emulated GPU draws and rounds like the CPU, and knows the order of work")
    return streams.loaded[0]


@pytest.fixture
def same_numbers(devices, monkeypatch):
    """Let the CPU and the emulated GPU draw and compute the same numbers.

    Otherwise, small networks on the CPU are computed by NumPy, which draws numbers for many steps at once, and
    convolutions by oneDNN.
    """
    monkeypatch.setattr(SmallNetwork, "supports", lambda *parts: False)
    devices.emulated_gpu_draw_as_cpu(True)
    torch._C._set_mkldnn_enabled(False)  # `torch.backends.mkldnn.flags` warns
    yield
    torch._C._set_mkldnn_enabled(True)
    devices.emulated_gpu_draw_as_cpu(False)


@pytest.fixture
def fault_of_order(devices):
    """Make copies late, check the order of work, and return a function that ends this and returns the first fault."""
    torch.cuda.synchronize()
    devices.emulated_gpu_check_order(True)
    yield lambda: devices.emulated_gpu_check_order(False).decode()
    devices.emulated_gpu_check_order(False)
