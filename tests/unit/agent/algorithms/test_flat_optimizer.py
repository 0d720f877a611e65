"""Flat optimisers against torch's."""

from __future__ import annotations

import pytest
import torch

from pytorchrl.agent.algorithms.optimizers import FlatOptimizer

SETTINGS = {"adam_eps": 1e-5, "rmsprop_eps": 1e-4, "rmsprop_decay": 0.9}


def gradients(count=20, size=50):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator) for _ in range(count)]


@pytest.mark.parametrize(("name", "make"), [
    ("adam", lambda params: torch.optim.Adam(params, lr=0.01, eps=1e-5)),
    ("sgd", lambda params: torch.optim.SGD(params, lr=0.01)),
    ("rmsprop", lambda params: torch.optim.RMSprop(params, lr=0.01, alpha=0.9, eps=1e-4)),
])
def test_steps_equal_torch(name, make):
    mine, theirs = torch.ones(50), torch.nn.Parameter(torch.ones(50))
    optimizer, other = FlatOptimizer(name, mine, **SETTINGS), make([theirs])
    for gradient in gradients():
        optimizer.step(mine, gradient, lr=0.01, scale=0.5)
        theirs.grad = 0.5 * gradient
        other.step()
    torch.testing.assert_close(mine, theirs.detach(), rtol=1e-5, atol=1e-6)


def test_rmsprop_tf_has_epsilon_inside_the_root_and_starts_at_mean_square_1():
    params, optimizer = torch.zeros(1), FlatOptimizer("rmsprop_tf", torch.zeros(1), **SETTINGS)
    optimizer.step(params, torch.tensor([2.0]), lr=0.1, scale=0.5)
    assert params.item() == pytest.approx(-0.1 / (0.9 + 0.1 + 1e-4) ** 0.5)


@pytest.mark.parametrize("name", ["adam", "sgd", "rmsprop", "rmsprop_tf"])
def test_restored_state_goes_on_alike_and_the_gradient_is_left_alone(name):
    first, second = torch.ones(50), torch.ones(50)
    one, other = FlatOptimizer(name, first, **SETTINGS), FlatOptimizer(name, second, **SETTINGS)
    for index, gradient in enumerate(gradients()):
        if index == 10:
            other.load_state_dict(one.state_dict())
            second.copy_(first)
        before = gradient.clone()
        one.step(first, gradient, lr=0.01, scale=0.5)
        assert torch.equal(gradient, before)
        if index >= 10:
            other.step(second, gradient, lr=0.01, scale=0.5)
    assert torch.equal(first, second)


def test_a_state_is_on_the_cpu_wherever_the_moments_are(monkeypatch):
    """It is sent to processes that lack the device. Here that is one without memory, so the copy is made in its place."""
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self: torch.ones(self.shape))
    state = FlatOptimizer("adam", torch.zeros(3, device="meta"), **SETTINGS).state_dict()
    assert {name: tensor.device.type for name, tensor in state.items()} == dict.fromkeys(("mean", "mean_square", "num_steps"), "cpu")
    monkeypatch.undo()
    optimizer = FlatOptimizer("adam", torch.zeros(3), **SETTINGS)
    optimizer.state_dict()["mean"].add_(1.0)
    assert not optimizer.moments["mean"].any()  # a copy also where they are on the CPU already
