from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from pytorchrl.agent.actors.memory import GRU, LSTM

L, B, F, H = 11, 3, 5, 4
KINDS = [(GRU, nn.GRU), (LSTM, nn.LSTM)]


def _generator(seed=0):
    return torch.Generator().manual_seed(seed)


def _case(kind):
    memory = kind(F, H, _generator())
    with torch.no_grad():
        for bias in (memory.inputs.bias, memory.recurrence.bias):
            bias.normal_(generator=_generator(7))
    x = torch.randn(L, B, F, generator=_generator(1))
    state = torch.randn(B, memory.state_size, generator=_generator(2))
    done = torch.rand(L, B, generator=_generator(3)) < 0.3
    assert done.any()
    assert not done.all()
    return memory, x, state, done


@pytest.mark.parametrize(("kind", "reference"), KINDS)
def test_unroll_with_resets_equals_single_steps(kind, reference):
    memory, x, state, done = _case(kind)
    before = state.clone()
    outputs, last = memory(x, state, done)
    for t in range(L):
        output, state = memory(x[t], state, done[t])
        torch.testing.assert_close(output, outputs[t], atol=1e-6, rtol=0)
    torch.testing.assert_close(state, last, atol=1e-6, rtol=0)
    assert torch.equal(before, torch.randn(B, memory.state_size, generator=_generator(2)))


@pytest.mark.parametrize(("kind", "reference"), KINDS)
def test_unroll_equals_torch_on_each_segment_between_resets(kind, reference):
    memory, x, state, done = _case(kind)
    net = reference(F, H)
    net.load_state_dict({
        "weight_ih_l0": memory.inputs.weight, "bias_ih_l0": memory.inputs.bias,
        "weight_hh_l0": memory.recurrence.weight, "bias_hh_l0": memory.recurrence.bias})
    outputs, last = memory(x, state, done)
    for b in range(B):
        starts = [0, *[t for t in range(1, L) if done[t, b]], L]
        for first, end in itertools.pairwise(starts):
            piece = torch.zeros_like(state[b]) if done[first, b] else state[b]
            parts = [part.view(1, 1, H) for part in piece.split(H)]
            expected, final = net(x[first:end, b : b + 1], tuple(parts) if kind is LSTM else parts[0])
            torch.testing.assert_close(outputs[first:end, b : b + 1], expected, atol=1e-6, rtol=0)
        final = torch.cat(final, -1) if kind is LSTM else final
        torch.testing.assert_close(last[b], final.flatten(), atol=1e-6, rtol=0)


@pytest.mark.parametrize(("kind", "reference"), KINDS)
def test_no_gradient_crosses_a_reset(kind, reference):
    memory, x, state, _ = _case(kind)
    done = torch.zeros(L, B, dtype=torch.bool)
    done[6] = True
    x.requires_grad_()
    memory(x, state, done)[0][6:].sum().backward()
    assert not x.grad[:6].any()
    assert x.grad[6:].any()


@pytest.mark.parametrize(("kind", "reference"), KINDS)
def test_reset_clears_a_non_finite_state(kind, reference):
    memory, x, state, _ = _case(kind)
    output, _ = memory(x[0], torch.full_like(state, float("nan")), torch.ones(B, dtype=torch.bool))
    torch.testing.assert_close(output, memory(x[0], torch.zeros_like(state), torch.zeros(B, dtype=torch.bool))[0])


@pytest.mark.parametrize(("kind", "reference"), KINDS)
def test_weights_start_orthogonal_with_gain_one_and_zero_bias(kind, reference):
    memory = kind(F, H, _generator())
    for layer in (memory.inputs, memory.recurrence):
        singular = torch.linalg.svdvals(layer.weight.detach())
        torch.testing.assert_close(singular, torch.ones_like(singular), atol=1e-5, rtol=0)
        assert not layer.bias.any()
