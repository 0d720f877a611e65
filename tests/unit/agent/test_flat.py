from __future__ import annotations

import pytest
import torch
from torch import nn

from pytorchrl.agent.flat import FlatParameters
from pytorchrl.errors import WeightsError


def _net():
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def test_parameters_keep_values_and_share_memory_with_the_vector():
    net = _net()
    before = [p.detach().clone() for p in net.parameters()]
    flat = FlatParameters(dict(net.named_parameters()))
    assert torch.equal(flat.data, torch.cat([p.reshape(-1) for p in before]))
    assert len(flat) == 3 * 4 + 4 + 4 * 2 + 2
    assert flat.names == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert flat.shapes["1.weight"] == (2, 4)
    flat.data.fill_(2.0)
    assert all(bool((p == 2).all()) for p in net.parameters())
    net[1].bias.data.fill_(5.0)
    assert flat.data[-2:].tolist() == [5.0, 5.0]


def test_backward_accumulates_into_the_gradient_vector():
    net = _net()
    flat = FlatParameters(net.parameters())
    x = torch.randn(7, 3, generator=torch.Generator().manual_seed(0))
    expected = torch.autograd.grad(net(x).square().sum(), list(net.parameters()))
    net(x).square().sum().backward()
    assert torch.allclose(flat.grad, torch.cat([g.reshape(-1) for g in expected]))
    net(x).square().sum().backward()
    assert torch.allclose(flat.grad, 2 * torch.cat([g.reshape(-1) for g in expected]))
    flat.zero_grad()
    assert not flat.grad.any()
    assert all(p.grad is not None and not p.grad.any() for p in net.parameters())


def test_optimizer_over_the_parameters_updates_the_vector():
    net = _net()
    flat = FlatParameters(net.parameters())
    before = flat.data.clone()
    flat.grad.fill_(1.0)
    torch.optim.SGD(flat.params, lr=0.5).step()
    assert torch.allclose(flat.data, before - 0.5)


def test_a_vector_of_another_size_is_refused():
    flat = FlatParameters(_net().parameters())
    with pytest.raises(WeightsError, match=r"\(25,\).*26 scalars"):
        flat.split(flat.data[:-1])


def test_split_returns_views_by_name():
    net = _net()
    flat = FlatParameters(dict(net.named_parameters()))
    parts = flat.split(flat.data)
    assert torch.equal(parts["0.weight"], net[0].weight)
    assert parts["0.weight"].data_ptr() == net[0].weight.data_ptr()


def test_shared_parameter_is_stored_once():
    layer = nn.Linear(2, 2)
    assert len(FlatParameters([*layer.parameters(), *layer.parameters()])) == 6


def test_empty_group_and_wrong_dtype_raise():
    with pytest.raises(WeightsError, match="at least one"):
        FlatParameters([])
    with pytest.raises(WeightsError, match="float64"):
        FlatParameters(nn.Linear(2, 2).double().parameters())


def test_parameters_on_another_device_raise():
    """Check parameters such as those that an actor makes after its networks were moved to the device."""
    layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2, device="meta")])
    with pytest.raises(WeightsError, match=r"'1.weight' must be on cpu, got meta; .*build_networks"):
        FlatParameters(dict(layers.named_parameters()))
