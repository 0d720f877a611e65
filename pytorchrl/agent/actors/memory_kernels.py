"""Unroll a memory over sequences on a CPU, and backpropagate through time by hand.

A step of a small memory computes so little that the calls of torch's operators take nearly all of its time, and
autograd calls as many again for the gradient. Here, the gates of all steps are kept. The backward pass therefore
computes the factors that do not depend on later steps for all steps at once, and the gradient of the weights by a single
product. The remaining operations of a step are NumPy's, which take a third of the time of a call of torch. Products of
matrices are torch's, which chooses the number of threads.

L = steps, B = sequences, S = units, k = number of gates, G = k * S.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual
from typing_extensions import override

Loop = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""`Memory.loop`, which computes the outputs and the last state with autograd."""
Resets = list["np.ndarray | None"]
"""The rows (B,) bool whose state is reset before each step; None for no row."""

_DTYPES = (torch.float32, torch.float64)
_MAX_ELEMENTS = 2**15
"""Largest size of the gates of a step. For larger ones, torch uses several threads and calls take little of the time."""
_HALF = 0.5  # sigmoid(x) = tanh(x / 2) / 2 + 1 / 2


@dataclass(frozen=True, slots=True)
class Gradients:
    """The gradients of the arguments of a kernel."""

    projected: Tensor
    """(L, B, G)."""
    recurrent: Tensor
    """(L, B, G), of the product of the previous output and its weights."""
    state: tuple[np.ndarray, ...]
    """The parts (B, S) of the state before the first step."""


class Kernel(Protocol):
    """The forward pass of a memory over L steps, and what its backward pass needs.

    Arrays have the shape (L, k, B, S), so that each gate of a step is contiguous: NumPy takes half of the time then.
    """

    outputs: np.ndarray
    """(L, B, S)."""
    previous: np.ndarray
    """(L, B, S), the output before each step; zeros after a reset."""
    last: tuple[np.ndarray, ...]
    """The parts (B, S) of the state after the last step."""

    def __init__(
        self, projected: np.ndarray, state: Sequence[np.ndarray], resets: Resets, weight: Tensor, bias: Tensor,
    ) -> None:
        """Compute the forward pass.

        Args:
            projected: (L, k, B, S), the product of the inputs and their weights; overwritten.
            state: The parts (B, S) of the state before the first step.
            resets: The rows that are reset before each step.
            weight: (G, S), the weights of the previous output.
            bias: (G,).
        """

    def backward(self, outputs: np.ndarray, last: Sequence[np.ndarray], resets: Resets, weight: Tensor) -> Gradients:
        """Return the gradients.

        Args:
            outputs: (L, B, S), the gradient of the outputs.
            last: The parts (B, S) of the gradient of the last state.
            resets: As in the forward pass.
            weight: As in the forward pass.
        """


class GRUKernel(Kernel):
    """h = n + z (h' - n), where [r, z] = sigmoid(p + W h' + b) and n = tanh(p + r (W h' + b)); see `GRU`."""

    def __init__(  # noqa: D107 - see `Kernel`
        self, projected: np.ndarray, state: Sequence[np.ndarray], resets: Resets, weight: Tensor, bias: Tensor,
    ) -> None:
        length, _, num_rows, size = projected.shape
        (hidden,) = state
        scale, half = _blocks(weight, size, _HALF, _HALF, 1.0), np.full((2, num_rows, size), _HALF, hidden.dtype)
        gates = np.empty_like(projected)
        gates[:] = (bias * scale).view(3, 1, size).numpy()
        gates[:, :2] += _HALF * projected[:, :2]
        self._gates, self._candidate = gates, projected[:, 2]
        self.outputs = np.empty((length, num_rows, size), hidden.dtype)
        weights = (weight * scale.unsqueeze(1)).t().contiguous()
        product, by_gate = _product(weight, num_rows, size)
        added, before = np.empty_like(gates[0]), torch.from_numpy(hidden)
        for first, row, sigmoids, r, z, of_state, candidate, output, after in zip(
                resets, gates, gates[:, :2], gates[:, 0], gates[:, 1], gates[:, 2], self._candidate, self.outputs,
                torch.from_numpy(self.outputs).unbind(0), strict=True):
            if first is not None:
                hidden = _without(hidden, first)
                before = torch.from_numpy(hidden)
            torch.mm(before, weights, out=product)
            added[...] = by_gate
            np.add(row, added, out=row)
            np.tanh(sigmoids, out=sigmoids)
            np.multiply(sigmoids, half, out=sigmoids)
            np.add(sigmoids, half, out=sigmoids)
            np.multiply(r, of_state, out=output)
            np.add(candidate, output, out=candidate)
            np.tanh(candidate, out=candidate)
            np.subtract(hidden, candidate, out=output)
            np.multiply(output, z, out=output)
            np.add(output, candidate, out=output)
            hidden, before = output, after
        self.last = (hidden,)
        self.previous = _previous(state[0], self.outputs, resets)

    @override
    def backward(self, outputs: np.ndarray, last: Sequence[np.ndarray], resets: Resets, weight: Tensor) -> Gradients:
        reset, update, of_state = (self._gates[:, gate] for gate in range(3))
        # Each gradient is that of the output, times a factor that does not depend on later steps.
        of_candidate = (1 - update) * (1 - self._candidate * self._candidate)
        factors = np.empty_like(self._gates)
        np.multiply(of_candidate * of_state, reset * (1 - reset), out=factors[:, 0])
        np.multiply(self.previous - self._candidate, update * (1 - update), out=factors[:, 1])
        np.multiply(of_candidate, reset, out=factors[:, 2])
        gradient, by_gate = _gradient(factors, weight)
        of_hidden, of_outputs = torch.from_numpy(np.array(last[0])), np.array(outputs)
        carried, kept = of_hidden.numpy(), np.empty_like(last[0])
        for first, of_output, factor, r, z, n, target, row, share in _reversed(
                resets, of_outputs, factors, factors[:, 0], factors[:, 1], factors[:, 2], by_gate, gradient.unbind(0),
                update):
            np.add(of_output, carried, out=of_output)
            np.multiply(r, of_output, out=r)
            np.multiply(z, of_output, out=z)
            np.multiply(n, of_output, out=n)
            target[...] = factor
            torch.mm(row, weight, out=of_hidden)
            np.multiply(of_output, share, out=kept)
            np.add(carried, kept, out=carried)
            if first is not None:
                carried[first] = 0
        projected = gradient.clone()
        np.multiply(of_candidate, of_outputs, out=projected[..., 2 * weight.shape[1]:].numpy())
        return Gradients(projected, gradient, (carried,))


class LSTMKernel(Kernel):
    """c = f c' + i g and h = o tanh(c), where [i, f, o] = sigmoid(a), g = tanh(a), a = p + W h' + b; see `LSTM`."""

    def __init__(  # noqa: D107 - see `Kernel`
        self, projected: np.ndarray, state: Sequence[np.ndarray], resets: Resets, weight: Tensor, bias: Tensor,
    ) -> None:
        length, _, num_rows, size = projected.shape
        hidden, cell = state
        scale = _blocks(weight, size, _HALF, _HALF, 1.0, _HALF)
        factor = np.repeat(scale.view(4, 1, size).numpy(), num_rows, 1)
        summand, gates = 1 - factor, projected
        gates += bias.view(4, 1, size).numpy()
        gates *= factor
        self._gates = gates
        self._cells, self._squashed, self.outputs = (
            np.empty((length, num_rows, size), hidden.dtype) for _ in range(3))
        weights = (weight * scale.unsqueeze(1)).t().contiguous()
        product, by_gate = _product(weight, num_rows, size)
        added, written, before = np.empty_like(gates[0]), np.empty_like(cell), torch.from_numpy(hidden)
        for first, row, i, f, g, o, new, squashed, output, after in zip(
                resets, gates, *(gates[:, gate] for gate in range(4)), self._cells, self._squashed, self.outputs,
                torch.from_numpy(self.outputs).unbind(0), strict=True):
            if first is not None:
                before, cell = torch.from_numpy(_without(before.numpy(), first)), _without(cell, first)
            torch.mm(before, weights, out=product)
            added[...] = by_gate
            np.add(row, added, out=row)
            np.tanh(row, out=row)
            np.multiply(row, factor, out=row)
            np.add(row, summand, out=row)
            np.multiply(f, cell, out=new)
            np.multiply(i, g, out=written)
            np.add(new, written, out=new)
            np.tanh(new, out=squashed)
            np.multiply(o, squashed, out=output)
            cell, before = new, after
        self.last = (before.numpy(), cell)
        self.previous, self._previous_cells = (
            _previous(*rows, resets) for rows in zip(state, (self.outputs, self._cells), strict=True))

    @override
    def backward(self, outputs: np.ndarray, last: Sequence[np.ndarray], resets: Resets, weight: Tensor) -> Gradients:
        write, forget, candidate, shown = (self._gates[:, gate] for gate in range(4))
        # Each gradient is that of the output or of the cell, times a factor that does not depend on later steps.
        factors = np.empty_like(self._gates)
        np.multiply(candidate, write * (1 - write), out=factors[:, 0])
        np.multiply(self._previous_cells, forget * (1 - forget), out=factors[:, 1])
        np.multiply(write, 1 - candidate * candidate, out=factors[:, 2])
        np.multiply(self._squashed, shown * (1 - shown), out=factors[:, 3])
        to_cell = shown * (1 - self._squashed * self._squashed)
        gradient, by_gate = _gradient(factors, weight)
        of_state, of_cell, added = torch.from_numpy(np.array(last[0])), np.array(last[1]), np.empty_like(last[0])
        of_hidden = of_state.numpy()
        for first, of_output, share, factor, i, f, g, o, target, row, kept in _reversed(
                resets, outputs, to_cell, factors, *(factors[:, gate] for gate in range(4)), by_gate,
                gradient.unbind(0), forget):
            np.add(of_hidden, of_output, out=of_hidden)
            np.multiply(of_hidden, share, out=added)
            np.add(of_cell, added, out=of_cell)
            np.multiply(i, of_cell, out=i)
            np.multiply(f, of_cell, out=f)
            np.multiply(g, of_cell, out=g)
            np.multiply(o, of_hidden, out=o)
            target[...] = factor
            torch.mm(row, weight, out=of_state)
            np.multiply(of_cell, kept, out=of_cell)
            if first is not None:
                of_hidden[first] = of_cell[first] = 0
        return Gradients(gradient, gradient, (of_hidden, of_cell))


def suits(projected: Tensor, state: Tensor, weight: Tensor) -> bool:
    """Return whether kernels can take the place of the loop over L steps.

    The tensors must have one dtype, which mixed precision violates, and be on the CPU. The gates of a step must not be
    so many that torch would use several threads. Nothing may trace or transform the operations: neither
    `torch.compile`, `torch.export` and `torch.jit.trace`, nor `torch.func` and forward derivatives.
    """
    return (
        not torch.compiler.is_compiling() and not torch.jit.is_tracing()
        and not torch._C._are_functorch_transforms_active() and type(projected) is Tensor and projected.is_cpu
        and projected.dtype in _DTYPES and projected.dtype == state.dtype == weight.dtype
        and projected.shape[1:].numel() <= _MAX_ELEMENTS
        and all(unpack_dual(tensor).tangent is None for tensor in (projected, state, weight)))


class Unrolled(torch.autograd.Function):
    """The outputs (L, B, S) and the last state (B, H) of a memory; see `Memory.loop` for the tensors."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, kind: type[Kernel], loop: Loop, *inputs: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Compute the outputs and the last state."""
        projected, state, done, weight, bias = (tensor.detach() for tensor in inputs)
        size = weight.shape[1]
        resets = [row if is_any else None for row, is_any in zip(done.numpy(), done.any(1).tolist(), strict=True)]
        by_gate = projected.unflatten(2, (-1, size)).transpose(1, 2).clone(memory_format=torch.contiguous_format)
        kernel = kind(by_gate.numpy(), _split(state, size), resets, weight, bias)
        ctx.kernel, ctx.loop, ctx.resets = kernel, loop, resets
        ctx.save_for_backward(*inputs)
        return torch.from_numpy(kernel.outputs.copy()), _joined(kernel.last)

    @staticmethod
    def backward(ctx: Any, outputs: Tensor, last: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Return the gradients; with `create_graph`, those of the loop, which are differentiable."""
        inputs = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _differentiable(ctx, inputs, (outputs, last))
        weight, kernel = inputs[3].detach(), ctx.kernel
        found = kernel.backward(outputs.numpy(), _split(last, weight.shape[1]), ctx.resets, weight)
        recurrent, previous = found.recurrent.flatten(0, 1), torch.from_numpy(kernel.previous).flatten(0, 1)
        return None, None, found.projected, _joined(found.state), None, recurrent.t() @ previous, recurrent.sum(0)


def _differentiable(
    ctx: Any, inputs: tuple[Tensor, ...], gradients: tuple[Tensor, Tensor],
) -> tuple[Tensor | None, ...]:
    """Return the gradients that the loop has, with their graph."""
    needed = ctx.needs_input_grad[2:]
    found = iter(torch.autograd.grad(
        ctx.loop(*inputs), [tensor for tensor, is_needed in zip(inputs, needed, strict=True) if is_needed], gradients,
        create_graph=True, allow_unused=True))
    return None, None, *(next(found) if is_needed else None for is_needed in needed)


def _blocks(like: Tensor, size: int, *values: float) -> Tensor:
    """Return a vector that repeats each of the values `size` times."""
    return torch.tensor(values, dtype=like.dtype).repeat_interleave(size)


def _product(weight: Tensor, num_rows: int, size: int) -> tuple[Tensor, np.ndarray]:
    """Return a tensor (B, G) for products, and a view (k, B, S) of it."""
    product = weight.new_empty(num_rows, len(weight))
    return product, product.numpy().reshape(num_rows, -1, size).transpose(1, 0, 2)


def _gradient(factors: np.ndarray, weight: Tensor) -> tuple[Tensor, np.ndarray]:
    """Return a tensor (L, B, G) for the gradient of gates (L, k, B, S), and a view of it with the shape of the gates."""
    length, num_gates, num_rows, size = factors.shape
    gradient = weight.new_empty(length, num_rows, num_gates * size)
    return gradient, gradient.numpy().reshape(length, num_rows, num_gates, size).transpose(0, 2, 1, 3)


def _split(state: Tensor, size: int) -> list[np.ndarray]:
    """Return contiguous parts (B, S) of states (B, H)."""
    return [part.contiguous().numpy() for part in state.split(size, 1)]


def _joined(parts: Sequence[np.ndarray]) -> Tensor:
    """Return states (B, H) with these parts (B, S)."""
    return torch.from_numpy(np.concatenate(parts, 1))


def _without(state: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Return a copy of a part (B, S) of a state, with zeros in the rows `first`."""
    state = state.copy()
    state[first] = 0
    return state


def _previous(initial: np.ndarray, steps: np.ndarray, resets: Resets) -> np.ndarray:
    """Return the values (L, B, S) before each step: those of the step before, and zeros after a reset."""
    before = np.concatenate((initial[None], steps[:-1]))
    for row, first in zip(before, resets, strict=True):
        if first is not None:
            row[first] = 0
    return before


def _reversed(*rows: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """Iterate over the steps of several sequences, from the last to the first."""
    return zip(*(list(row)[::-1] for row in rows), strict=True)
