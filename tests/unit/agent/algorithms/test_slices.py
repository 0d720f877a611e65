"""Compare the gradients of a sliced batch with one backward pass over the whole batch, for every kind of batch."""

from __future__ import annotations

import contextlib

import pytest
import torch

from pytorchrl.agent.algorithms import A2C, PPO
from pytorchrl.scheme.gradients.microbatch import GradAccumulator

CPU = torch.device("cpu")
ACTORS = {"feed-forward": {}, "gru": {"recurrent_net": "gru"}, "lstm": {"recurrent_net": "lstm"}}
STEPS = {"plain": {}, "masked": {"masked": True}, "ragged": {"next_step": True},
         "masked and ragged": {"masked": True, "next_step": True}}


def in_slices(algorithm, batch, microbatch_size):
    """Compute gradients slice by slice; return (gradients, info, sizes of the slices)."""
    total = GradAccumulator(microbatch_size, algorithm.loss_reduction)
    sizes = []
    for part in total.slices(algorithm.prepare_batch(batch), CPU):
        gradients, info = algorithm.compute_gradients(part)
        total.add(gradients, part.num_samples, info)
        sizes.append(part.num_samples)
    assert sum(sizes) == total.num_samples == batch.num_samples
    return total.result(), total.info(), sizes


def in_one(algorithm, batch):
    gradients, info = algorithm.compute_gradients(batch)
    return [gradient.clone() for gradient in gradients], info


@contextlib.contextmanager
def float64(parts, monkeypatch):
    """Convert parameters and gradients to float64, and compute in float64 within the `with` block."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    for group in parts.algorithm.groups.values():
        group.data, group.grad = group.data.double(), group.grad.double()
        data, grad = group.split(group.data), group.split(group.grad)
        for name, param in zip(group.names, group.params, strict=True):
            param.grad = None
            param.data = data[name]
            param.grad = grad[name]
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def doubled(batch):
    """Return a copy of the batch with its floating-point tensors in float64."""
    def convert(value):
        if isinstance(value, dict):
            return {name: convert(leaf) for name, leaf in value.items()}
        is_real = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.double() if is_real else value
    return type(batch)(**{name: convert(getattr(batch, name)) for name in type(batch).__slots__})


@pytest.fixture
def make_batch(build, collect, made_up_steps):
    """Return a function that builds the parts of a worker, and one batch of two rollouts of different lengths."""
    def make(cls, kind="feed-forward", steps=None, num_steps=5, **options):
        parts = build(cls, num_envs=4, size=7, actor=ACTORS[kind], num_epochs=1, num_mini_batch=1, **options)
        source = made_up_steps(4, **(steps or {}))
        rollouts = [collect(parts, source), collect(parts, source, num_steps=num_steps)]
        parts.storage.insert_data_slice(rollouts)
        parts.storage.before_gradients()
        batch, = parts.storage.generate_batches(1)
        return parts, batch
    return make


@pytest.mark.every(3)
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize(("cls", "normalization", "kind"), [
    (PPO, "minibatch", "feed-forward"), (PPO, "minibatch", "gru"), (PPO, "minibatch", "lstm"),
    (PPO, "batch", "feed-forward"), (PPO, "batch", "gru"), (A2C, "none", "feed-forward"), (A2C, "none", "gru"),
    *[pytest.param(*case, "lstm", marks=pytest.mark.thorough) for case in ((PPO, "batch"), (A2C, "none"))]])
def test_any_slicing_gives_the_gradient_of_the_whole_batch(make_batch, cls, kind, steps, normalization):
    parts, batch = make_batch(cls, kind, STEPS[steps], advantage_normalization=normalization)
    whole, whole_info = in_one(parts.algorithm, batch)
    num_cuts = set()
    for microbatch_size in (9, 17, batch.num_samples - 1, batch.num_samples + 99):
        gradients, info, sizes = in_slices(parts.algorithm, batch, microbatch_size)
        num_cuts.add(len(sizes))
        torch.testing.assert_close(gradients, whole, rtol=1e-6, atol=1e-6)
        assert info == pytest.approx(whole_info, rel=1e-5, abs=1e-5)
    assert len(num_cuts) > 2


@pytest.mark.every(3)
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("kind", ["feed-forward", "gru"])
@pytest.mark.parametrize("cls", [PPO, A2C])
def test_in_float64_gradients_agree_to_twelve_digits(make_batch, monkeypatch, cls, kind, steps):
    parts, batch = make_batch(cls, kind, STEPS[steps], advantage_normalization="minibatch")
    with float64(parts, monkeypatch):
        batch = doubled(batch)
        whole, whole_info = in_one(parts.algorithm, batch)
        for microbatch_size in (5, 17):
            gradients, info, _ = in_slices(parts.algorithm, batch, microbatch_size)
            scale = float(whole[0].abs().max())
            torch.testing.assert_close(gradients, whole, rtol=1e-12, atol=1e-12 * scale)
            assert gradients[0].dtype == torch.float64
            assert info == pytest.approx(whole_info, rel=1e-11, abs=1e-12)


def test_normalizing_each_slice_separately_would_differ(make_batch):
    """Check that gradients differ if advantages are normalized in each slice instead of in the whole batch."""
    parts, batch = make_batch(PPO)
    whole, _ = in_one(parts.algorithm, batch)
    parts.algorithm.prepare_batch = lambda batch: batch
    gradients, *_ = in_slices(parts.algorithm, batch, 10)
    assert not torch.allclose(gradients[0], whole[0], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("cls", [PPO, A2C])
def test_updates_with_and_without_slices_are_equal(make_batch, cls):
    vectors = []
    for microbatch_size in (None, 6):
        parts, batch = make_batch(cls, max_grad_norm=0.01)
        gradients, *_ = in_slices(parts.algorithm, batch, microbatch_size)
        assert parts.algorithm.apply_gradients(gradients)["grad_norm"] > 0.01  # the gradient is clipped
        vectors.append(parts.algorithm.groups["all"].data.clone())
    torch.testing.assert_close(vectors[0], vectors[1], rtol=1e-6, atol=1e-6)


def test_a_prepared_batch_is_normalized_once(make_batch):
    parts, batch = make_batch(PPO)
    prepared = parts.algorithm.prepare_batch(batch)
    assert prepared.is_normalized
    assert not batch.is_normalized
    assert float(prepared.advantage.mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(prepared.advantage.std()) == pytest.approx(1.0, abs=1e-5)
    again = parts.algorithm.prepare_batch(prepared)
    assert torch.equal(again.advantage, prepared.advantage)


def test_batches_without_advantage_normalization_are_not_changed(make_batch):
    parts, batch = make_batch(A2C, advantage_normalization="none")
    assert parts.algorithm.prepare_batch(batch) is batch


def test_sequences_are_never_split(make_batch):
    _, batch = make_batch(PPO, "gru", STEPS["ragged"])
    for microbatch_size, columns in ((1, 1), (7, 1), (14, 2), (15, 2), (21, 3), (1000, 8)):
        slices = list(GradAccumulator(microbatch_size).slices(batch, CPU))
        widths = [part.done.shape[1] for part in slices]
        assert max(widths) == min(columns, 8)
        assert max(widths) - min(widths) <= 1
        assert sum(widths) == 8
        for part in slices:
            assert part.done.shape[0] == batch.done.shape[0] == 7
            assert {state.shape[0] for state in part.rhs.values()} == {part.done.shape[1]}
            assert part.num_samples == int(part.valid.sum())
