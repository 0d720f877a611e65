"""Recurrent memory between the extractor and the heads. B = environments, L = steps, F = features, H = state size.

The state of each memory is one flat vector, for a GRU and for an LSTM, so storages handle all states in the same way.
If an observation is the first of its episode, the state is set to zero before that observation is processed.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor, nn
from typing_extensions import override

from pytorchrl.agent.actors.extractors import linear
from pytorchrl.agent.actors.memory_kernels import GRUKernel, Kernel, LSTMKernel, suits, unroll


class Memory(nn.Module):
    """The base class of recurrent cells."""

    num_gates: int
    """Number of blocks of `size` rows in the weights."""
    num_parts: int
    """Number of vectors of length `size` in the state."""

    def __init__(self, in_features: int, size: int, generator: torch.Generator | None = None) -> None:
        """Initialize the weights orthogonally with gain 1, and the biases with 0."""
        super().__init__()
        self.size = self.out_features = size
        self.state_size = size * self.num_parts
        self.inputs = linear(in_features, size * self.num_gates, 1.0, generator)
        self.recurrence = linear(size, size * self.num_gates, 1.0, generator)

    def cell(self, projected: Tensor, state: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """Compute one step.

        Args:
            projected: (B, num_gates * size), the result of `inputs(x)`.
            state: (B, H) before the step.
            weight: (num_gates * size, size), the weights of the previous output.
            bias: (num_gates * size,), the bias of the previous output.

        Returns:
            The output (B, size) and the next state (B, H).
        """
        raise NotImplementedError

    def forward(self, x: Tensor, state: Tensor, done: Tensor) -> tuple[Tensor, Tensor]:
        """Compute one step or L steps.

        Args:
            x: (B, F) or (L, B, F) features.
            state: (B, H) before the first row; not changed.
            done: (B,) or (L, B) bool, whether a row is the first of its episode.

        Returns:
            Outputs (B, size) or (L, B, size), and the state (B, H) after the last row.
        """
        # The product of inputs and weights does not depend on previous steps, so it is computed once for all steps.
        projected = F.linear(x, self.inputs.weight, self.inputs.bias)
        weight, bias = self.recurrence.weight, self.recurrence.bias
        if x.dim() == 2:
            return self.cell(projected, state.masked_fill(done.unsqueeze(-1), 0.0), weight, bias)
        kernel = _KERNELS.get(type(self))
        if kernel is not None and suits(projected, state, weight):
            return unroll(kernel, self.loop, (projected, state, done, weight, bias))
        return self.loop(projected, state, done, weight, bias)

    def loop(
        self, projected: Tensor, state: Tensor, done: Tensor, weight: Tensor, bias: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Compute L steps one after the other; the reference for the kernels, which are faster on a CPU.

        Args:
            projected: (L, B, num_gates * size), the result of `inputs(x)`.
            state: (B, H) before the first step.
            done: (L, B) bool, whether a step is the first of its episode.
            weight: (num_gates * size, size), the weights of the previous output.
            bias: (num_gates * size,), the bias of the previous output.
        """
        outputs = []
        for row, first in zip(projected.unbind(0), done.unsqueeze(-1).unbind(0), strict=True):
            output, state = self.cell(row, state.masked_fill(first, 0.0), weight, bias)
            outputs.append(output)
        return torch.stack(outputs), state


class GRU(Memory):
    """Gated recurrent unit, with the equations of `torch.nn.GRU`. The state is the output."""

    num_gates, num_parts = 3, 1

    @override
    def cell(self, projected: Tensor, state: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        gates = F.linear(state, weight, bias).to(state.dtype)
        projected = projected.to(state.dtype)
        size = 2 * self.size
        reset, update = torch.sigmoid(projected[:, :size] + gates[:, :size]).chunk(2, -1)
        candidate = torch.tanh(projected[:, size:] + reset * gates[:, size:])
        state = torch.lerp(candidate, state, update)
        return state, state


class LSTM(Memory):
    """Long short-term memory, with the equations of `torch.nn.LSTM`. The state is [output, cell state]."""

    num_gates, num_parts = 4, 2

    @override
    def cell(self, projected: Tensor, state: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        hidden, cell = state.chunk(2, -1)
        gates = (projected + F.linear(hidden, weight, bias)).to(state.dtype)
        write, forget, candidate, output = gates.chunk(4, -1)
        cell = torch.sigmoid(forget) * cell + torch.sigmoid(write) * torch.tanh(candidate)
        hidden = torch.sigmoid(output) * torch.tanh(cell)
        return hidden, torch.cat((hidden, cell), -1)


_KERNELS: dict[type[Memory], type[Kernel]] = {GRU: GRUKernel, LSTM: LSTMKernel}
MEMORIES: dict[str, type[Memory]] = {"gru": GRU, "lstm": LSTM}
"""Name -> class of the memory."""
DEFAULT_SIZES = {"gru": 256, "lstm": 512}
"""Name -> size of the memory if the option `recurrent_size` is None."""
