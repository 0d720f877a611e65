"""Receive messages: decode their arrays into writable memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from pytorchrl.agent.data import RolloutData
from pytorchrl.agent.multi.data import MultiRollout
from pytorchrl.scheme.transport.codecs import Packed, decode_array
from pytorchrl.scheme.transport.encoder import Traffic
from pytorchrl.scheme.transport.messages import Gradients, Rollout, Weights

M = TypeVar("M", Rollout, Weights, Gradients)


def receive(message: M, now: Callable[[], float]) -> tuple[M, Traffic]:
    """Return a message with decoded arrays, and its traffic, which includes the time for decoding.

    The data of a rollout and the vectors of gradients become tensors that share no memory with the message. Encoded
    arrays of `Weights` become numpy arrays. Messages within a process are returned unchanged.

    Args:
        message: The message as it was sent.
        now: The clock.
    """
    start = now()
    received, is_encoded = _received(message)
    return received, Traffic(decodes=1, decode_s=now() - start) if is_encoded else Traffic()


def receive_tensor(array: np.ndarray | Packed) -> Tensor:
    """Return an array, encoded or not, as a new tensor. An array from shared memory is read-only, so it is copied."""
    return torch.from_numpy(array.decode() if isinstance(array, Packed) else np.array(array))


def is_made_of(data: RolloutData | MultiRollout, kind: type) -> bool:
    """Return whether the arrays of a rollout have the type `kind`, such as `Tensor` or `np.ndarray`."""
    return isinstance(next(iter(data.parts.values())).reward, kind)


def copied(rollout: Rollout) -> Rollout:
    """Return a rollout with copied data, unless the data come from another process and therefore are copies already."""
    return replace(rollout, data=rollout.data.map(Tensor.clone)) if is_made_of(rollout.data, Tensor) else rollout


def _received(message: M) -> tuple[M, bool]:
    """Return the message with decoded arrays, and whether any array was encoded."""
    if isinstance(message, Rollout):
        if is_made_of(message.data, Tensor):
            return message, False
        return replace(message, data=message.data.map(receive_tensor)), message.header.sent.is_encoded
    if isinstance(message, Weights):
        arrays = [*message.state.values(), *message.learning.values()]
        if not any(isinstance(array, Packed) for array in arrays):
            return message, False
        state, learning = ({name: decode_array(array) for name, array in part.items()}
                           for part in (message.state, message.learning))
        return replace(message, state=state, learning=learning), True
    if not message.vectors:
        return message, False
    vectors = [part if part is None or isinstance(part, Tensor) else receive_tensor(part) for part in message.vectors]
    return replace(message, vectors=vectors), any(isinstance(part, Packed) for part in message.vectors)
