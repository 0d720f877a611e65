"""Compute one step of a small memory in NumPy. E = environments, S = units, H = size of the state."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pytorchrl.agent.actors.memory import GRU, LSTM, Memory

_ZERO, _HALF = np.zeros((), np.float32), np.full((), 0.5, np.float32)


class SmallMemory:
    """One step of a memory, computed in NumPy; the arrays share memory with the parameters.

    Attributes:
        num_weights: Number of weights of the largest product.
    """

    def __init__(self, memory: Memory) -> None:
        """Create NumPy views of the parameters of a memory for which `supports` returns True."""
        (self._inputs, self._bias), (self._recurrence, self._recurrent_bias) = (
            (layer.weight.detach().numpy().T, layer.bias.detach().numpy())
            for layer in (memory.inputs, memory.recurrence))
        self._size, self._cell = memory.size, _CELLS[type(memory)]
        self.num_weights = max(self._inputs.size, self._recurrence.size)

    @staticmethod
    def supports(memory: object) -> bool:
        """Return whether this class supports a memory."""
        return type(memory) in _CELLS

    def __call__(self, x: np.ndarray, state: np.ndarray, done: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Compute one step.

        Args:
            x: (E, F) features, or (F,) for a single environment.
            state: (E, H) before the step; not changed.
            done: (E,) bool, whether an observation is the first of its episode.

        Returns:
            The output (E, S), or (S,) for features (F,), and the next state (E, H).
        """
        if done.any():
            state = np.where(done[:, None], _ZERO, state)
        if x.ndim == 1:
            state = state[0]
        given = np.dot(x, self._inputs)
        given += self._bias
        recurrent = np.dot(state[..., :self._size], self._recurrence)
        recurrent += self._recurrent_bias
        output, state = self._cell(given, recurrent, state)
        return output, state if x.ndim > 1 else state[None]


def _sigmoid(x: np.ndarray) -> np.ndarray:
    """Return tanh(x / 2) / 2 + 1 / 2, computed in place."""
    x *= _HALF
    np.tanh(x, out=x)
    x *= _HALF
    x += _HALF
    return x


def _gru(given: np.ndarray, recurrent: np.ndarray, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the output and the next state, as `GRU.cell` does."""
    size = state.shape[-1]
    gates = _sigmoid(given[..., :2 * size] + recurrent[..., :2 * size])
    candidate = gates[..., :size] * recurrent[..., 2 * size:]
    candidate += given[..., 2 * size:]
    np.tanh(candidate, out=candidate)
    output = state - candidate
    output *= gates[..., size:]
    output += candidate
    return output, output


def _lstm(given: np.ndarray, recurrent: np.ndarray, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the output and the next state, as `LSTM.cell` does."""
    size = state.shape[-1] // 2
    given += recurrent
    candidate = np.tanh(given[..., 2 * size:3 * size])
    gates = _sigmoid(given)
    candidate *= gates[..., :size]
    cell = gates[..., size:2 * size] * state[..., size:]
    cell += candidate
    output = np.tanh(cell)
    output *= gates[..., 3 * size:]
    return output, np.concatenate((output, cell), -1)


_CELLS: dict[type, Callable[[np.ndarray, np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]] = {
    GRU: _gru, LSTM: _lstm}
