"""Unroll a memory over sequences on a CPU, and backpropagate through time by hand.

A step of a small memory computes so little that the calls of torch's operators take nearly all of its time, and
autograd calls as many again for the gradient. Here, the gates of all steps are kept. The backward pass therefore
computes the factors that do not depend on later steps for all steps at once, and the gradient of the weights by one
product. The remaining operations of a step are NumPy's, which take a third of the time of a call of torch. Products of
matrices are torch's, which chooses the number of threads.

L = steps, B = sequences, S = units, k = number of gates, G = k * S.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual
from typing_extensions import override

Loop = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""`Memory.loop`, which computes the outputs and the last state with autograd."""
_Gradients = tuple[Tensor, Tensor, tuple[np.ndarray, ...]]

_DTYPES = (torch.float32, torch.float64)
_MAX_ELEMENTS = 2**15
"""Most numbers in the gates of a step. For more, torch uses several threads, and calls take little of the time."""
_HALF = 0.5  # sigmoid(x) = tanh(x / 2) / 2 + 1 / 2


class Kernel:
    """The forward pass of a memory over L steps, and the gradient.

    Arrays have the shape (L, k, B, S), so that each gate of a step is contiguous: NumPy takes half of the time then.

    Attributes:
        outputs: (L, B, S).
        previous: (L, B, S), the output before each step; zeros after a reset.
        last: The parts (B, S) of the state after the last step.
    """

    scales: ClassVar[tuple[float, ...]]
    """The factor of the argument of tanh for each gate: 1/2 for a sigmoid."""

    def __init__(
        self, projected: np.ndarray, state: Sequence[np.ndarray], done: np.ndarray, weight: Tensor, bias: Tensor,
    ) -> None:
        """Compute the forward pass.

        Args:
            projected: (L, k, B, S), the product of the inputs and their weights; overwritten.
            state: The parts (B, S) of the state before the first step.
            done: (L, B) bool, whether the state is reset before a step.
            weight: (G, S), the weights of the previous output.
            bias: (G,).
        """
        length, num_gates, num_rows, size = projected.shape
        is_any = np.logical_or.reduce(done, 1).tolist()
        self._resets = [row if some else None for row, some in zip(done, is_any, strict=True)]
        self._gates, self._weight = projected, weight
        self.outputs = np.empty((length, num_rows, size), projected.dtype)
        scale = torch.tensor(self.scales, dtype=weight.dtype).repeat_interleave(size)
        self._scale = np.repeat(scale.view(num_gates, 1, size).numpy(), num_rows, 1)
        self._bias = (bias * scale).view(num_gates, 1, size).numpy()
        self._scaled = (weight * scale.unsqueeze(1)).t().contiguous()
        self._product = weight.new_empty(num_rows, len(weight))
        self._by_gate = self._product.numpy().reshape(num_rows, num_gates, size).transpose(1, 0, 2)
        self._added = np.empty_like(self._scale)
        self.last = self._forward(state)
        self.previous = self._before(state[0], self.outputs)

    def _forward(self, state: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
        """Compute `outputs` and what `backward` needs; return the parts of the last state."""
        raise NotImplementedError

    def backward(self, outputs: np.ndarray, last: Sequence[np.ndarray]) -> _Gradients:
        """Return the gradients.

        Args:
            outputs: (L, B, S), the gradient of the outputs.
            last: The parts (B, S) of the gradient of the last state.

        Returns:
            The gradients of `projected`, and of the product of the previous output and its weights, both (L, B, G), and
            the parts (B, S) of the gradient of `state`.
        """
        raise NotImplementedError

    def _add_recurrence(self, before: Tensor, gates: np.ndarray) -> None:
        """Add the product of the previous output (B, S) and its scaled weights to the gates (k, B, S) of a step."""
        torch.mm(before, self._scaled, out=self._product)
        self._added[...] = self._by_gate
        np.add(gates, self._added, out=gates)

    def _gradient(self) -> tuple[Tensor, np.ndarray]:
        """Return a tensor (L, B, G), and a view (L, k, B, S) of it."""
        length, num_gates, num_rows, size = self._gates.shape
        gradient = self._weight.new_empty(length, num_rows, num_gates * size)
        return gradient, gradient.numpy().reshape(length, num_rows, num_gates, size).transpose(0, 2, 1, 3)

    def _before(self, initial: np.ndarray, steps: np.ndarray) -> np.ndarray:
        """Return the values (L, B, S) before each step: those of the step before, and zeros after a reset."""
        before = np.concatenate((initial[None], steps[:-1]))
        for row, first in zip(before, self._resets, strict=True):
            if first is not None:
                row[first] = 0
        return before


class GRUKernel(Kernel):
    """h = n + z (h' - n), where [r, z] = sigmoid(p + W h' + b) and n = tanh(p + r (W h' + b)); see `GRU`."""

    scales = (_HALF, _HALF, 1.0)

    @override
    def _forward(self, state: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
        hidden, half = state[0], self._scale[:2]
        self._candidate, gates = self._gates[:, 2].copy(), self._gates
        gates *= self._scale
        gates[:, 2] = 0
        gates += self._bias
        rows, before = torch.from_numpy(self.outputs).unbind(0), torch.from_numpy(hidden)
        for t, first in enumerate(self._resets):
            if first is not None:
                hidden = _without(hidden, first)
                before = torch.from_numpy(hidden)
            gate, candidate, output = gates[t], self._candidate[t], self.outputs[t]
            sigmoids = gate[:2]
            self._add_recurrence(before, gate)
            np.tanh(sigmoids, out=sigmoids)
            np.multiply(sigmoids, half, out=sigmoids)
            np.add(sigmoids, half, out=sigmoids)
            np.multiply(gate[0], gate[2], out=output)
            np.add(candidate, output, out=candidate)
            np.tanh(candidate, out=candidate)
            np.subtract(hidden, candidate, out=output)
            np.multiply(output, gate[1], out=output)
            np.add(output, candidate, out=output)
            hidden, before = output, rows[t]
        return (hidden,)

    @override
    def backward(self, outputs: np.ndarray, last: Sequence[np.ndarray]) -> _Gradients:
        reset, update, recurrent = (self._gates[:, gate] for gate in range(3))
        # Each gradient is that of the output, times a factor that does not depend on later steps.
        of_candidate = (1 - update) * (1 - self._candidate * self._candidate)
        factors = np.empty_like(self._gates)
        np.multiply(of_candidate * recurrent, reset * (1 - reset), out=factors[:, 0])
        np.multiply(self.previous - self._candidate, update * (1 - update), out=factors[:, 1])
        np.multiply(of_candidate, reset, out=factors[:, 2])
        gradient, by_gate = self._gradient()
        of_hidden, of_outputs, rows = torch.from_numpy(np.array(last[0])), np.array(outputs), gradient.unbind(0)
        carried, kept = of_hidden.numpy(), np.empty_like(last[0])
        for t in reversed(range(len(outputs))):
            of_output, factor = of_outputs[t], factors[t]
            np.add(of_output, carried, out=of_output)
            for part in factor:
                np.multiply(part, of_output, out=part)
            by_gate[t] = factor
            torch.mm(rows[t], self._weight, out=of_hidden)
            np.multiply(of_output, update[t], out=kept)
            np.add(carried, kept, out=carried)
            if (first := self._resets[t]) is not None:
                carried[first] = 0
        projected = gradient.clone()
        np.multiply(of_candidate, of_outputs, out=projected[..., 2 * outputs.shape[-1]:].numpy())
        return projected, gradient, (carried,)


class LSTMKernel(Kernel):
    """c = f c' + i g and h = o tanh(c), where [i, f, o] = sigmoid(a), g = tanh(a), a = p + W h' + b; see `LSTM`."""

    scales = (_HALF, _HALF, 1.0, _HALF)

    @override
    def _forward(self, state: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
        hidden, cell = state
        gates, scale, shift = self._gates, self._scale, 1 - self._scale
        gates *= scale
        gates += self._bias
        self._cells, self._squashed = np.empty_like(self.outputs), np.empty_like(self.outputs)
        rows, before, written = torch.from_numpy(self.outputs).unbind(0), torch.from_numpy(hidden), np.empty_like(cell)
        for t, first in enumerate(self._resets):
            if first is not None:
                before, cell = torch.from_numpy(_without(before.numpy(), first)), _without(cell, first)
            gate, new, squashed = gates[t], self._cells[t], self._squashed[t]
            self._add_recurrence(before, gate)
            np.tanh(gate, out=gate)
            np.multiply(gate, scale, out=gate)
            np.add(gate, shift, out=gate)
            write, forget, candidate, shown = gate
            np.multiply(forget, cell, out=new)
            np.multiply(write, candidate, out=written)
            np.add(new, written, out=new)
            np.tanh(new, out=squashed)
            np.multiply(shown, squashed, out=self.outputs[t])
            cell, before = new, rows[t]
        self._previous_cells = self._before(state[1], self._cells)
        return before.numpy(), cell

    @override
    def backward(self, outputs: np.ndarray, last: Sequence[np.ndarray]) -> _Gradients:
        write, forget, candidate, shown = (self._gates[:, gate] for gate in range(4))
        # Each gradient is that of the output or of the cell, times a factor that does not depend on later steps.
        factors = np.empty_like(self._gates)
        np.multiply(candidate, write * (1 - write), out=factors[:, 0])
        np.multiply(self._previous_cells, forget * (1 - forget), out=factors[:, 1])
        np.multiply(write, 1 - candidate * candidate, out=factors[:, 2])
        np.multiply(self._squashed, shown * (1 - shown), out=factors[:, 3])
        to_cell = shown * (1 - self._squashed * self._squashed)
        gradient, by_gate = self._gradient()
        of_state, of_cell, rows = torch.from_numpy(np.array(last[0])), np.array(last[1]), gradient.unbind(0)
        of_hidden, added = of_state.numpy(), np.empty_like(last[0])
        for t in reversed(range(len(outputs))):
            factor = factors[t]
            np.add(of_hidden, outputs[t], out=of_hidden)
            np.multiply(of_hidden, to_cell[t], out=added)
            np.add(of_cell, added, out=of_cell)
            for part in factor[:3]:
                np.multiply(part, of_cell, out=part)
            np.multiply(factor[3], of_hidden, out=factor[3])
            by_gate[t] = factor
            torch.mm(rows[t], self._weight, out=of_state)
            np.multiply(of_cell, forget[t], out=of_cell)
            if (first := self._resets[t]) is not None:
                of_hidden[first] = of_cell[first] = 0
        return gradient, gradient, (of_hidden, of_cell)


def suits(projected: Tensor, state: Tensor, weight: Tensor) -> bool:
    """Return whether kernels can take the place of the loop over L steps.

    The tensors must have one dtype, which mixed precision violates, and be on the CPU. The gates of a step must not be
    so many that torch would use several threads. Nothing may trace or transform the operations: neither
    `torch.compile`, `torch.export` and `torch.jit.trace`, nor `torch.func` and forward derivatives.
    """
    return (
        not torch.compiler.is_compiling() and not torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        and not torch._C._are_functorch_transforms_active() and type(projected) is Tensor and projected.is_cpu
        and projected.dtype in _DTYPES and projected.dtype == state.dtype == weight.dtype
        and projected.shape[1:].numel() <= _MAX_ELEMENTS
        and all(unpack_dual(tensor).tangent is None  # type: ignore[no-untyped-call]
                for tensor in (projected, state, weight)))


class _Context(Protocol):
    """The members of the context of an autograd function that `_Unrolled` uses."""

    kernel: Kernel
    loop: Loop
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor) -> None:
        """Keep tensors, and refuse a backward pass if they were changed in place."""


class _Unrolled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, kind: type[Kernel], loop: Loop, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        projected, state, done, weight, bias = (tensor.detach() for tensor in inputs)
        length, num_rows, size = *projected.shape[:2], weight.shape[1]
        by_gate = projected.view(length, num_rows, -1, size).transpose(1, 2).numpy().copy()
        ctx.kernel, ctx.loop = kind(by_gate, _split(state, size), done.numpy(), weight, bias), loop
        ctx.save_for_backward(*inputs)
        return torch.from_numpy(ctx.kernel.outputs), torch.from_numpy(np.concatenate(ctx.kernel.last, 1))

    @staticmethod
    def backward(ctx: _Context, outputs: Tensor, last: Tensor) -> tuple[Tensor | None, ...]:
        inputs, kernel = ctx.saved_tensors, ctx.kernel
        if torch.is_grad_enabled():  # `create_graph`: the arrays of a kernel have no graph
            needed = ctx.needs_input_grad[2:]
            found = iter(torch.autograd.grad(
                ctx.loop(*inputs), [tensor for tensor, is_needed in zip(inputs, needed, strict=True) if is_needed],
                (outputs, last), create_graph=True, allow_unused=True))
            return None, None, *(next(found) if is_needed else None for is_needed in needed)
        projected, recurrent, state = kernel.backward(outputs.numpy(), _split(last, inputs[3].shape[1]))
        flat, previous = recurrent.flatten(0, 1), torch.from_numpy(kernel.previous).flatten(0, 1)
        of_state = torch.from_numpy(np.concatenate(state, 1))
        return None, None, projected, of_state, None, flat.t() @ previous, flat.sum(0)


def unroll(kind: type[Kernel], loop: Loop, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Return the outputs (L, B, S) and the last state (B, H) of a memory; derivatives of gradients use the loop.

    Args:
        kind: The class of the kernel.
        loop: `Memory.loop`.
        inputs: The arguments of `loop`, for which `suits` must return True.
    """
    results: tuple[Tensor, Tensor] = _Unrolled.apply(kind, loop, *inputs)  # type: ignore[no-untyped-call]
    return results


def _split(state: Tensor, size: int) -> list[np.ndarray]:
    """Return contiguous parts (B, S) of states (B, H)."""
    return [np.ascontiguousarray(state.numpy()[:, start:start + size]) for start in range(0, state.shape[1], size)]


def _without(state: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Return a copy of a part (B, S) of a state, with zeros in the rows `first`."""
    state = state.copy()
    state[first] = 0
    return state
