"""Check that tensors arrive unchanged in host memory and on a GPU."""

from __future__ import annotations

import pytest
import torch

from pytorchrl.agent.transfers import cpu_copy, on_device, on_host

ON_GPU = pytest.mark.gpu
DEVICES = ["cpu", pytest.param("cuda:0", marks=ON_GPU)]


def tensors():
    """Return tensors of various dtypes, shapes and strides; sizes in bytes are odd, and some tensors are empty."""
    rng = torch.Generator().manual_seed(0)
    values = torch.randn(5, 3, generator=rng)
    return [values > 0, values.double(), values, values.T, values[:, 1], values[0, 0], values[:0], values.bfloat16(),
            torch.arange(7), torch.arange(3, dtype=torch.uint8), values[:1].expand(4, 3)]


@pytest.mark.parametrize("device", DEVICES)
def test_tensors_come_to_the_host_unchanged(device):
    given = [tensor.to(device) for tensor in tensors()]
    given[2] = given[2].cpu()  # one may be there already
    with torch.inference_mode():
        found = on_host(*given)
    for own, before, expected in zip(found, given, tensors(), strict=True):
        assert own.device.type == "cpu"
        assert (own.dtype, own.shape) == (expected.dtype, expected.shape)
        assert torch.equal(own, expected)
        assert own is before or not before.is_cpu


@pytest.mark.parametrize("device", DEVICES)
def test_a_copy_shares_no_memory(device):
    for expected in tensors():
        tensor = on_device(expected, torch.device(device))
        copied = cpu_copy(tensor)
        assert tensor.device.type == torch.device(device).type
        assert copied.device.type == "cpu"
        assert torch.equal(copied, expected)
        assert not copied.numel() or copied.data_ptr() != tensor.data_ptr()
        assert copied.untyped_storage().nbytes() <= expected.numel() * expected.element_size()
