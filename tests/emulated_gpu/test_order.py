"""Check that the emulated GPU finds programs that do not wait where they must; `test_matrix.py` checks the library."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda:0")


def pinned(value):
    return torch.full((8,), float(value)).pin_memory()


def on_a_stream(stream, function):
    with torch.cuda.stream(stream):
        return function()


@pytest.fixture
def stream():
    return torch.cuda.Stream(GPU)


def read_too_early(stream):
    """Use a copy for which nothing has waited."""
    copy = on_a_stream(stream, lambda: pinned(1).to(GPU, non_blocking=True))
    assert (copy + 0).tolist() == [77.0] * 8


def overwrite_too_early(stream):
    """Write into page-locked memory again although only a stream has waited for its copy."""
    buffer = pinned(1)
    copy = on_a_stream(stream, lambda: buffer.to(GPU, non_blocking=True))
    torch.cuda.current_stream().wait_stream(stream)
    buffer.fill_(2.0)
    copy.record_stream(torch.cuda.current_stream())
    stream.synchronize()


def free_too_early(stream):
    """Free memory of a stream while another stream may use it."""
    copy = on_a_stream(stream, lambda: pinned(1).to(GPU, non_blocking=True))
    stream.synchronize()
    assert (copy + 0).tolist() == [1.0] * 8  # makes the host wait for the copies, but not for what follows
    copy.mul_(2)
    del copy


def read_a_result_too_early(stream):
    """Compute with what another stream computes."""
    given = torch.ones(8, device=GPU)
    stream.wait_stream(torch.cuda.current_stream())
    result = on_a_stream(stream, lambda: given * 2)
    result.add(1)


def overwrite_what_is_read(stream):
    """Overwrite what another stream reads."""
    given = torch.ones(8, device=GPU)
    stream.wait_stream(torch.cuda.current_stream())
    on_a_stream(stream, lambda: given * 2)
    given.zero_()


@pytest.mark.parametrize(("mistake", "expected"), [
    (read_too_early, "uses memory"), (overwrite_too_early, "page-locked memory has changed"),
    (free_too_early, "memory is freed"), (read_a_result_too_early, "uses memory"),
    (overwrite_what_is_read, "overwrites memory")])
def test_a_missing_wait_is_found(fault_of_order, stream, mistake, expected):
    mistake(stream)
    assert expected in fault_of_order()


def test_a_copy_to_the_host_is_late(fault_of_order):
    copy = torch.empty(8, pin_memory=True)
    copy.copy_(torch.ones(8, device=GPU), non_blocking=True)
    assert copy.tolist() == [77.0] * 8
    torch.cuda.synchronize()
    assert copy.tolist() == [1.0] * 8
    assert fault_of_order() == ""


def test_work_that_waits_has_no_fault(fault_of_order, stream):
    buffer = pinned(1)
    stream.wait_stream(torch.cuda.current_stream())
    copy = on_a_stream(stream, lambda: buffer.to(GPU, non_blocking=True))
    copied = stream.record_event()
    torch.cuda.current_stream().wait_event(copied)
    copy.record_stream(torch.cuda.current_stream())
    doubled = copy * 2
    del copy
    copied.synchronize()
    buffer.zero_()
    assert doubled.tolist() == [2.0] * 8
    assert fault_of_order() == ""
