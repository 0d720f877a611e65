"""Fixtures of the tests on a GPU."""

from __future__ import annotations

import pytest

from pytorchrl.agent.algorithms import cuda_graphs


@pytest.fixture
def recordings(monkeypatch):
    """Return a list with an entry for each recording of a CUDA graph that is begun."""
    begun, record = [], cuda_graphs.CudaRecorder.record

    def counted(recorder, function):
        begun.append(function)
        return record(recorder, function)
    monkeypatch.setattr(cuda_graphs.CudaRecorder, "record", counted)
    return begun
