"""Lossless compression of what crosses between workers: lz4 on raw buffers, never on pickles."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from pytorchrl.agent.data import RolloutData
from pytorchrl.agent.multi.data import MultiRollout
from pytorchrl.errors import ConfigError

R = TypeVar("R", RolloutData, MultiRollout)


def require_lz4(option: str, wanted: bool = True) -> bool:
    """Return `wanted`; raise `ConfigError` if compression is wanted and lz4 is not installed."""
    if wanted and importlib.util.find_spec("lz4") is None:
        raise ConfigError(f"{option}=True needs the package lz4; install it with: pip install 'pytorchrl[compress]'")
    return wanted


@dataclass(frozen=True, slots=True)
class Compressed:
    """One array as an lz4 frame."""

    frame: bytes
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that cross."""
        return len(self.frame)


def compress(array: np.ndarray) -> Compressed:
    """The array as an lz4 frame of its raw buffer."""
    lz4 = importlib.import_module("lz4.frame")
    return Compressed(lz4.compress(np.ascontiguousarray(array).data), array.dtype.str, array.shape)


def decompress(packed: Compressed) -> np.ndarray:
    """The array again, bit for bit, in memory of its own."""
    raw = importlib.import_module("lz4.frame").decompress(packed.frame, return_bytearray=True)
    return np.frombuffer(raw, dtype=packed.dtype).reshape(packed.shape)


def compress_rollout(data: R) -> R:
    """The rollout with each array in its compressed form."""
    return data.map(compress)


def decompress_rollout(data: R) -> R:
    """The rollout's arrays again, bit for bit."""
    return data.map(decompress)


def is_made_of(data: RolloutData | MultiRollout, kind: type) -> bool:
    """Whether a rollout holds tensors, arrays or what `compress` makes."""
    return isinstance(next(iter(data.parts.values())).reward, kind)


def is_compressed(data: RolloutData | MultiRollout) -> bool:
    """Whether `compress_rollout` made it."""
    return is_made_of(data, Compressed)


def num_bytes(data: Any) -> int:
    """Bytes of all arrays of a rollout, or of a sequence of arrays, compressed or not, some of which may be missing."""
    if isinstance(data, (RolloutData, MultiRollout)):
        sizes: list[int] = []
        data.map(lambda array: sizes.append(array.nbytes))
        return sum(sizes)
    return sum(array.nbytes for array in data if array is not None)
