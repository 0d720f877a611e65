"""Compare the kernels that unroll memories with the loop over steps, which autograd differentiates."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from pytorchrl.agent.actors import memory_kernels
from pytorchrl.agent.actors.memory import GRU, LSTM

F, H = 5, 4
KINDS = (GRU, LSTM)
both = pytest.mark.parametrize("kind", KINDS)


def draw(seed, *shape, dtype=torch.float64):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make(kind, length=11, rows=3, dtype=torch.float64, size=H):
    """Return a memory, inputs, a state and starts of episodes, with some at the first and the last step."""
    memory = kind(F, size, torch.Generator().manual_seed(0)).to(dtype)
    with torch.no_grad():
        for bias in (memory.inputs.bias, memory.recurrence.bias):
            bias.copy_(draw(7, len(bias)))
    done = torch.rand(length, rows, generator=torch.Generator().manual_seed(3)) < 0.3
    done[0], done[0, 0], done[-1, -1] = False, rows > 1, True
    x, state = draw(1, length, rows, F, dtype=dtype), draw(2, rows, memory.state_size, dtype=dtype)
    return memory, x.requires_grad_(), state.requires_grad_(), done


def loop(memory, x, state, done):
    projected = nn.functional.linear(x, memory.inputs.weight, memory.inputs.bias)
    return memory.loop(projected, state, done, memory.recurrence.weight, memory.recurrence.bias)


def gradients(memory, x, state, results, **how):
    """Return the gradients of a function of outputs and last state whose derivatives differ between all entries."""
    outputs, last = results
    total = (outputs * draw(4, *outputs.shape, dtype=outputs.dtype)).sum() + (last.sin() * 3).sum()
    return torch.autograd.grad(total, (x, state, *memory.parameters()), **how)


def is_kernel(outputs):
    return outputs.grad_fn.name() == "_UnrolledBackward"


@both
@pytest.mark.parametrize(("length", "rows"), [(11, 3), (1, 2), (6, 1)])
def test_kernels_compute_the_same_outputs_and_gradients_as_the_loop(kind, length, rows):
    memory, x, state, done = make(kind, length, rows)
    results, expected = memory(x, state, done), loop(memory, x, state, done)
    assert is_kernel(results[0])
    torch.testing.assert_close(results, expected, atol=1e-13, rtol=1e-12)
    torch.testing.assert_close(
        gradients(memory, x, state, results), gradients(memory, x, state, expected), atol=1e-13, rtol=1e-12)


@both
def test_kernels_are_as_accurate_as_the_loop_in_float32(kind):
    # Sequences of 128 steps with 64 units, as presets of PPO have them.
    memory, x, state, done = make(kind, 128, 4, torch.float32, 64)
    wide = copy.deepcopy(memory).double()
    exact_inputs = [tensor.detach().double().requires_grad_() for tensor in (x, state)]
    exact_results = loop(wide, *exact_inputs, done)
    exact = [*exact_results, *gradients(wide, *exact_inputs, exact_results)]

    def largest_errors(results):
        assert results[0].dtype == torch.float32
        found = [*results, *gradients(memory, x, state, results)]
        return torch.stack([(own - one).abs().max() / one.abs().max() for own, one in zip(found, exact, strict=True)])

    of_kernel, of_loop = largest_errors(memory(x, state, done)), largest_errors(loop(memory, x, state, done))
    assert (of_kernel < 1e-5).all()
    assert (of_kernel < 4 * of_loop + 1e-6).all(), (of_kernel, of_loop)


@both
def test_gradients_equal_finite_differences(kind):
    memory, x, state, done = make(kind, 5, 2)
    assert torch.autograd.gradcheck(lambda x, state, *_: memory(x, state, done), (x, state, *memory.parameters()))


@both
def test_gradients_of_gradients_are_those_of_the_loop(kind):
    # Kernels keep arrays that autograd does not know, so a second derivative of the kernels would be wrong silently.
    memory, x, state, done = make(kind, 4, 2)
    results = memory(x, state, done)
    assert is_kernel(results[0])
    found = gradients(memory, x, state, results, create_graph=True)
    expected = gradients(memory, x, state, loop(memory, x, state, done), create_graph=True)
    torch.testing.assert_close(found, expected, atol=1e-13, rtol=1e-12)
    second, other = ([torch.autograd.grad(sum(part.square().sum() for part in parts), (x, state))]
                     for parts in (found, expected))
    torch.testing.assert_close(second, other, atol=1e-12, rtol=1e-11)
    assert torch.autograd.gradgradcheck(
        lambda x, state, *_: memory(x, state, done), (x, state, *memory.parameters()))


@both
def test_a_second_backward_pass_adds_the_same_gradients(kind):
    memory, x, state, done = make(kind)
    outputs, last = memory(x, state, done)
    given, of_last = torch.ones_like(outputs), torch.ones_like(last)
    torch.autograd.backward((outputs, last), (given, of_last), retain_graph=True)
    once = [tensor.grad.clone() for tensor in (x, state, *memory.parameters())]
    torch.autograd.backward((outputs, last), (given, of_last))
    for tensor, gradient in zip((x, state, *memory.parameters()), once, strict=True):
        torch.testing.assert_close(tensor.grad, 2 * gradient)
    assert (given == 1).all()
    assert (of_last == 1).all()


@both
def test_kernels_change_none_of_their_inputs_and_outputs_may_be_changed(kind):
    memory, x, state, done = make(kind)
    before = [tensor.clone() for tensor in (x, state, done, *memory.parameters())]
    results = memory(x, state, done)
    expected = gradients(memory, x, state, results, retain_graph=True)
    assert all(map(torch.equal, (x, state, done, *memory.parameters()), before))
    with torch.no_grad():
        results[0].zero_()
        results[1].zero_()
    outputs, last = results
    total = (outputs * draw(4, *outputs.shape)).sum() + (3 * last).sum()
    unchanged = memory(x, state, done)
    other = (unchanged[0] * draw(4, *outputs.shape)).sum() + (3 * unchanged[1]).sum()
    inputs = (x, state, *memory.parameters())
    torch.testing.assert_close(torch.autograd.grad(total, inputs), torch.autograd.grad(other, inputs))
    assert len(expected) == len(inputs)


@both
def test_a_change_of_the_weights_before_the_backward_pass_is_refused(kind):
    memory, x, state, done = make(kind)
    outputs, _ = memory(x, state, done)
    with torch.no_grad():
        memory.recurrence.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outputs.sum().backward()


@both
def test_gradients_of_frozen_weights_of_one_result_and_of_strided_gradients_are_right(kind):
    memory, x, state, done = make(kind)
    memory.recurrence.requires_grad_(False)
    outputs, last = memory(x, state.detach(), done)
    assert is_kernel(outputs)
    wanted = loop(memory, x, state.detach(), done)
    for own, one in zip((outputs, last), wanted, strict=True):  # `sum` has a gradient with strides of zero
        torch.testing.assert_close(torch.autograd.grad(own.sum(), x, retain_graph=True),
                                   torch.autograd.grad(one.sum(), x, retain_graph=True))
    torch.testing.assert_close(torch.autograd.grad(outputs.transpose(0, 1).cumsum(0)[1].sum(), x),
                               torch.autograd.grad(wanted[0].transpose(0, 1).cumsum(0)[1].sum(), x))


@both
def test_a_gradient_that_is_not_finite_does_not_cross_a_reset(kind):
    memory, x, state, done = make(kind, dtype=torch.float32)
    done[6] = True
    outputs, _ = memory(x, state, done)
    outputs[6:].backward(torch.full_like(outputs[6:], float("nan")))
    assert x.grad[6:].isnan().all()
    assert not x.grad[:6].any()


# Each of the following violates an assumption of the kernels, so the loop must be used.


def same_as_the_loop(memory, results, x, state, done, **tolerance):
    torch.testing.assert_close(results, loop(memory, x, state, done), **tolerance)


@pytest.fixture
def no_kernel(monkeypatch):
    """Let each use of a kernel fail."""
    def fail(*args):
        raise AssertionError("a kernel was used")

    for name in ("GRUKernel", "LSTMKernel"):
        monkeypatch.setattr(getattr(memory_kernels, name), "__init__", fail)


@both
def test_without_gradients_the_kernels_compute_the_same(kind):
    memory, x, state, done = make(kind)
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            same_as_the_loop(memory, memory(x, state, done), x, state, done)


@both
@pytest.mark.usefixtures("no_kernel")
def test_mixed_precision_uses_the_loop(kind):
    memory, x, state, done = make(kind, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        outputs, last = memory(x, state, done)
        expected = loop(memory, x, state, done)
    assert outputs.dtype == last.dtype == torch.float32
    torch.testing.assert_close((outputs, last), expected)


@both
@pytest.mark.usefixtures("no_kernel")
def test_weights_of_half_precision_use_the_loop(kind):
    memory, x, state, done = make(kind, dtype=torch.bfloat16)
    outputs, _ = memory(x, state, done)
    assert outputs.dtype == torch.bfloat16
    same_as_the_loop(memory, memory(x, state, done), x, state, done)


@both
@pytest.mark.usefixtures("no_kernel")
def test_a_state_of_another_dtype_reaches_the_loop_which_refuses_it(kind):
    memory, x, state, done = make(kind)
    with pytest.raises(RuntimeError, match="must have the same dtype"):
        memory(x, state.float(), done)


@both
@pytest.mark.usefixtures("no_kernel")
def test_other_devices_use_the_loop(kind):
    memory, x, state, done = make(kind)
    outputs, last = memory.to("meta")(x.to("meta"), state.to("meta"), done.to("meta"))
    assert outputs.shape == (11, 3, H)
    assert last.shape == state.shape
    assert outputs.device.type == "meta"


@both
@pytest.mark.usefixtures("no_kernel")
def test_steps_with_many_gates_use_the_loop(kind, monkeypatch):
    memory, x, state, done = make(kind)
    monkeypatch.setattr(memory_kernels, "_MAX_ELEMENTS", 3 * H * memory.num_gates - 1)
    same_as_the_loop(memory, memory(x, state, done), x, state, done)


@both
@pytest.mark.usefixtures("no_kernel")
def test_a_cell_of_a_subclass_is_used(kind):
    class Own(kind):
        def cell(self, projected, state, weight, bias):
            return super().cell(2 * projected, state, weight, bias)

    memory, x, state, done = make(Own)
    outputs, _ = memory(x, state, done)
    other, _ = kind.loop(memory, nn.functional.linear(x, memory.inputs.weight, memory.inputs.bias), state, done,
                         memory.recurrence.weight, memory.recurrence.bias)
    torch.testing.assert_close(outputs, other)


@both
@pytest.mark.usefixtures("no_kernel")
def test_compiled_and_exported_memories_use_the_loop(kind):
    memory, x, state, done = make(kind, 3, 2, torch.float32)
    torch._dynamo.reset()
    compiled = torch.compile(memory, backend="eager", fullgraph=True)
    same_as_the_loop(memory, compiled(x, state, done), x, state, done)
    with torch.no_grad():
        exported = torch.export.export(memory, (x.detach(), state.detach(), done)).module()
    same_as_the_loop(memory, exported(x, state, done), x, state, done)


@both
@pytest.mark.usefixtures("no_kernel")
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:.*torch.jit.s:DeprecationWarning")
def test_traced_memories_use_the_loop(kind):
    memory, x, state, done = make(kind, 3, 2, torch.float32)
    traced = torch.jit.trace(memory, (x.detach(), state.detach(), done), check_trace=False)
    done = ~done
    same_as_the_loop(memory, traced(x, state, done), x, state, done)


@both
@pytest.mark.usefixtures("no_kernel")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_transforms_and_forward_derivatives_use_the_loop(kind):
    memory, x, state, done = make(kind, 4, 2)
    many = torch.stack([x.detach(), 2 * x.detach()])
    outputs = torch.func.vmap(lambda one: memory(one, state, done)[0])(many)
    torch.testing.assert_close(outputs, torch.stack([loop(memory, one, state, done)[0] for one in many]))
    gradient = torch.func.grad(lambda one: memory(one, state, done)[0].sum())(x.detach())
    torch.testing.assert_close(gradient, torch.autograd.grad(loop(memory, x, state, done)[0].sum(), x)[0])
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x.detach(), torch.ones_like(x))
        derivative = torch.autograd.forward_ad.unpack_dual(memory(dual, state, done)[0].sum()).tangent
    torch.testing.assert_close(derivative, gradient.sum())


@both
@pytest.mark.usefixtures("no_kernel")
def test_subclasses_of_tensors_use_the_loop(kind):
    class Named(torch.Tensor):
        pass

    memory, x, state, done = make(kind)
    outputs, _ = memory(x.detach().as_subclass(Named), state, done)
    assert type(outputs) is Named
    torch.testing.assert_close(outputs.as_subclass(torch.Tensor), loop(memory, x, state, done)[0])
