"""Compare flat optimizers with those of torch."""

from __future__ import annotations

import copy
import functools
import io

import pytest
import torch

from pytorchrl.agent.algorithms import PPO
from pytorchrl.agent.algorithms.optimizers import FlatOptimizer, OptimizerOptions, make_optimizer
from pytorchrl.errors import ConfigError

SETTINGS = OptimizerOptions().replaced(
    adam_eps=1e-5, adam_beta1=0.9, weight_decay=0.1, momentum=0.9, rmsprop_eps=1e-4, rmsprop_decay=0.9)
NAMED = {
    "adam": functools.partial(torch.optim.Adam, eps=1e-5),
    "adamw": functools.partial(torch.optim.AdamW, eps=1e-5, weight_decay=0.1),
    "radam": functools.partial(torch.optim.RAdam, eps=1e-5),
    "sgd": functools.partial(torch.optim.SGD, momentum=0.9),
    "rmsprop": functools.partial(torch.optim.RMSprop, alpha=0.9, eps=1e-4)}
CLASSES = {
    "NAdam": functools.partial(torch.optim.NAdam, betas=(0.8, 0.99)), "RAdam": torch.optim.RAdam,
    "Adagrad": torch.optim.Adagrad,
    "Adadelta": torch.optim.Adadelta, "Adamax": torch.optim.Adamax, "ASGD": functools.partial(torch.optim.ASGD, t0=5),
    "Rprop": torch.optim.Rprop, "AMSGrad": lambda params, lr: torch.optim.Adam(params, lr, amsgrad=True),
    "Nesterov": functools.partial(torch.optim.SGD, momentum=0.9, nesterov=True, weight_decay=0.01)}


def gradients(count=20, size=50):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator) for _ in range(count)]


@pytest.mark.parametrize(("kind", "make"), [
    *((name, make) for name, make in NAMED.items()), *((make, make) for make in CLASSES.values())],
    ids=[*NAMED, *CLASSES])
def test_steps_equal_torch(kind, make):
    """Check that steps equal those of torch while the learning rate changes and gradients are clipped."""
    mine, theirs = torch.ones(50), torch.nn.Parameter(torch.ones(50))
    optimizer, other = make_optimizer(mine, SETTINGS.replaced(optimizer=kind)), make([theirs], lr=0.01)
    for index, gradient in enumerate(gradients()):
        lr = 0.01 / (1 + index)
        scale = min(1.0, 5.0 / float(gradient.norm()))
        optimizer.step(mine, gradient, lr=lr, scale=scale)
        theirs.grad = gradient.clone()
        torch.nn.utils.clip_grad_norm_([theirs], 5.0)
        other.param_groups[0]["lr"] = lr
        other.step()
    assert not torch.equal(mine, torch.ones(50))
    torch.testing.assert_close(mine, theirs.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("kind", "cls"), [("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW)])
def test_adam_beta1_is_the_decay_of_the_first_moment(kind, cls):
    mine, theirs = torch.ones(50), torch.nn.Parameter(torch.ones(50))
    optimizer = make_optimizer(mine, SETTINGS.replaced(optimizer=kind, adam_beta1=0.5))
    other = cls([theirs], lr=0.01, betas=(0.5, 0.999), eps=1e-5, weight_decay=0.1 if kind == "adamw" else 0.0)
    for gradient in gradients():
        optimizer.step(mine, gradient, lr=0.01, scale=1.0)
        theirs.grad = gradient
        other.step()
    torch.testing.assert_close(mine, theirs.detach(), rtol=1e-5, atol=1e-6)


def has_subnormal(tensor):
    return bool(((tensor != 0) & (tensor.abs() < torch.finfo(torch.float32).tiny)).any())


@pytest.mark.parametrize("kind", NAMED)
def test_moments_of_zero_gradients_become_zero_instead_of_subnormal(kind):
    """Subnormal moments would make steps many times slower on Intel processors, but would not change parameters."""
    mine, theirs = torch.ones(50), torch.nn.Parameter(torch.ones(50))
    optimizer, other = make_optimizer(mine, SETTINGS.replaced(optimizer=kind)), NAMED[kind]([theirs], lr=0.01)
    for index in range(1500):
        gradient = gradients(1)[0]
        if index > 10:
            gradient[25:] = 0
        optimizer.step(mine, gradient, lr=0.01, scale=1.0)
        theirs.grad = gradient.clone()
        other.step()
        assert not any(map(has_subnormal, optimizer.moments.values())), index
    assert any(map(has_subnormal, other.state[theirs].values()))
    assert all((moment[:25] != 0).all() for moment in optimizer.moments.values())
    torch.testing.assert_close(mine, theirs.detach(), rtol=1e-5, atol=1e-6)


def test_sgd_without_momentum_has_no_state():
    mine, optimizer = torch.ones(2), FlatOptimizer("sgd", torch.ones(2), SETTINGS.replaced(momentum=0.0))
    optimizer.step(mine, torch.tensor([1.0, -2.0]), lr=0.5, scale=0.5)
    assert (mine.tolist(), optimizer.moments) == ([0.75, 1.5], {})


def test_rmsprop_tf_has_epsilon_inside_the_root_and_starts_at_mean_square_1():
    params, optimizer = torch.zeros(1), FlatOptimizer("rmsprop_tf", torch.zeros(1), SETTINGS)
    optimizer.step(params, torch.tensor([2.0]), lr=0.1, scale=0.5)
    assert params.item() == pytest.approx(-0.1 / (0.9 + 0.1 + 1e-4) ** 0.5)


@pytest.mark.parametrize("kind", [*NAMED, "rmsprop_tf", *CLASSES.values()], ids=[*NAMED, "rmsprop_tf", *CLASSES])
def test_restored_state_continues_identically_and_keeps_the_gradient(kind):
    first, second = torch.ones(50), torch.ones(50)
    options = SETTINGS.replaced(optimizer=kind)
    one, other = make_optimizer(first, options), make_optimizer(second, options)
    for index, gradient in enumerate(gradients()):
        if index == 10:
            file = io.BytesIO()
            torch.save(one.state_dict(), file)
            file.seek(0)
            other.load_state_dict(torch.load(file, weights_only=True))
            second.copy_(first)
        before = gradient.clone()
        one.step(first, gradient, lr=0.01, scale=0.5)
        assert torch.equal(gradient, before)
        if index >= 10:
            other.step(second, gradient, lr=0.01, scale=0.5)
    assert torch.equal(first, second)


def test_a_state_is_on_the_cpu_for_moments_on_any_device(monkeypatch):
    """Check that `state_dict` returns tensors on the CPU, even if the moments are on another device.

    A process that receives the state may lack that device. The test replaces `Tensor.to`, because tensors on the
    `meta` device cannot be copied to the CPU.
    """
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device, copy: torch.ones(self.shape, device=device))
    state = FlatOptimizer("adam", torch.zeros(3, device="meta"), SETTINGS).state_dict()
    devices = {name: tensor.device.type for name, tensor in state.items()}
    assert devices == dict.fromkeys(("mean", "mean_square", "num_steps"), "cpu")
    monkeypatch.undo()
    optimizer = FlatOptimizer("adam", torch.zeros(3), SETTINGS)
    optimizer.state_dict()["mean"].add_(1.0)
    assert not optimizer.moments["mean"].any()  # the state is a copy even if the moments are already on the CPU


def test_a_state_is_a_copy_for_every_optimizer():
    params = torch.ones(3)
    optimizer = make_optimizer(params, SETTINGS.replaced(optimizer=torch.optim.Adagrad))
    optimizer.step(params, torch.ones(3), 0.1, 1.0)
    state = optimizer.state_dict()
    before = state["state"][0]["sum"].clone()
    other = make_optimizer(params.clone(), SETTINGS.replaced(optimizer=torch.optim.Adagrad))
    other.load_state_dict(state)
    for one in (optimizer, other):
        one.step(params.clone(), torch.ones(3), 0.1, 1.0)
    assert torch.equal(state["state"][0]["sum"], before)
    assert state["state"][0]["step"] == 1.0


@pytest.mark.parametrize(("optimizer", "message"), [
    (torch.optim.LBFGS, "LBFGS.*fails with TypeError.*closure"), (torch.optim.SparseAdam, "fails with RuntimeError"),
    (torch.nn.Linear, "fails with TypeError"), (lambda params, lr: params, "it returns"),
    (functools.partial(torch.optim.Adam, betas=(2.0, 0.9)), "Invalid beta"),
])
def test_optimizers_that_cannot_update_a_vector_are_refused(optimizer, message):
    with pytest.raises(ConfigError, match=f"(?s)optimizer must be one of .*{message}"):
        PPO.create_factory(optimizer=optimizer)


def test_an_optimizer_class_prints_as_its_name():
    assert "optimizer=<class 'torch.optim.nadam.NAdam'>" in repr(PPO.create_factory(optimizer=torch.optim.NAdam))


@pytest.mark.parametrize(("options", "message"), [
    ({"weight_decay": 0.1}, "weight_decay needs optimizer='adamw', got optimizer='adam'"),
    ({"momentum": 0.9}, "momentum needs optimizer='sgd', got optimizer='adam'"),
    ({"optimizer": torch.optim.SGD, "momentum": 0.9}, "momentum needs optimizer='sgd', got optimizer=<class"),
    ({"optimizer": "sgd", "adam_eps": 1e-3},
     "adam_eps needs optimizer='adam' or 'adamw' or 'radam', got optimizer='sgd'"),
])
def test_settings_of_another_optimizer_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        PPO.create_factory(**options)


def test_an_algorithm_with_a_torch_optimizer_continues_from_its_state(build, collect, learn, made_up_steps):
    options = {"optimizer": functools.partial(torch.optim.NAdam, betas=(0.8, 0.99)), "lr": 1e-2, "max_grad_norm": 0.1}
    straight, steps = build(PPO, **options), made_up_steps(4)
    learn(straight, [collect(straight, steps)])
    other = build(PPO, **options, seed=5)
    other.algorithm.load_state_dict(straight.algorithm.state_dict())
    assert torch.equal(other.params, straight.params)
    other.storage.generator.set_state(straight.storage.generator.get_state())
    rollout = collect(straight, steps)
    for parts in (straight, other):
        learn(parts, [copy.deepcopy(rollout)])
    assert torch.equal(other.params, straight.params)
    plain = build(PPO, **{**options, "optimizer": torch.optim.NAdam})
    learn(plain, [rollout])
    assert not torch.equal(plain.params, straight.params)
