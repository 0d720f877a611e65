"""Codecs, which compress the arrays in messages between workers.

A codec encodes an array as one or more arrays, which pickle protocol 5 sends out of band. An encoded array includes its
codec, so the receiver of a message can decode the array without further information.
"""

from __future__ import annotations

import importlib
import importlib.util
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from pytorchrl.agent.data import RolloutData
from pytorchrl.agent.multi.data import MultiRollout
from pytorchrl.errors import ConfigError, ContractError, install_hint
from pytorchrl.support.untyped import Payload

EncodedArrays = Sequence[np.ndarray]
Encode = Callable[[np.ndarray], EncodedArrays | None]
Decode = Callable[[EncodedArrays, np.dtype, int], np.ndarray]

_MAX_HALF = 65504.0
# Number of values that share a scale. With a single scale for all values, the error of a gradient would be ten to forty
# times as large.
_BLOCK = 256
_TOP_SHARE = 10  # one value in ten is kept
# Level 1 compresses more than lz4. Level -5 would compress less than lz4 and would not be faster than lz4.
_ZSTD_LEVEL = 1


@dataclass(frozen=True, slots=True)
class Codec:
    """A method to encode arrays in fewer bytes.

    Attributes:
        name: Name of the codec in options.
        encode: Function from a flat contiguous array to the arrays that are sent; it returns None if the codec cannot
            represent the values.
        decode: Function that returns the flat array, given the arrays that were sent, a dtype and a number of values.
        is_lossless: Whether arrays of every dtype are restored bit for bit; lossy codecs encode only float32 arrays.
        has_feedback: Whether the sender adds the remainder of an encoding (the values minus the decoded values) to the
            next array before it encodes that array. Such codecs are for gradients only: updates add up gradients
            over time, so a part of a gradient may be sent later.
        package: Package that the codec needs.
        fallback: Codec for arrays that this codec cannot represent; None: such arrays are not encoded.
    """

    name: str
    encode: Encode
    decode: Decode
    is_lossless: bool
    has_feedback: bool = False
    package: str | None = None
    fallback: Codec | None = None

    def pack(self, array: np.ndarray) -> np.ndarray | Packed:
        """Return the encoded array, or the array itself if encoding does not make it smaller or is not supported."""
        if not self.is_lossless and array.dtype != np.float32:
            return array
        if not array.size:
            return array
        flat = np.ascontiguousarray(array).reshape(-1)
        arrays = self.encode(flat)
        if arrays is None:
            return array if self.fallback is None else self.fallback.pack(array)
        own = tuple(np.array(part) if np.may_share_memory(part, flat) else np.ascontiguousarray(part)
                    for part in arrays)
        packed = Packed(self, own, array.dtype.str, array.shape)
        return packed if packed.nbytes < array.nbytes else array


@dataclass(frozen=True, slots=True)
class Packed:
    """An encoded array."""

    codec: Codec
    arrays: tuple[np.ndarray, ...]
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the encoded array in bytes."""
        return sum(array.nbytes for array in self.arrays)

    def decode(self) -> np.ndarray:
        """Return the decoded array, which is writable and shares no memory with the message.

        Raises:
            ContractError: The function `decode` of the codec returned an array of another size or dtype.
        """
        size = int(np.prod(self.shape, dtype=np.int64))
        array = self.codec.decode(self.arrays, np.dtype(self.dtype), size)
        if array.dtype.str != self.dtype or array.size != size:
            raise ContractError(f"codec {self.codec.name!r} decodes {size} values of {self.dtype} as {array.size} of "
                             f"{array.dtype.str}; correct its decode function")
        is_own = array.flags.writeable and not any(np.may_share_memory(array, part) for part in self.arrays)
        return (array if is_own else array.copy()).reshape(self.shape)


def decode_array(array: np.ndarray | Packed) -> np.ndarray:
    """Return a writable decoded array if the array is encoded, else the array itself."""
    return array.decode() if isinstance(array, Packed) else array


def num_bytes(data: Payload) -> int:
    """Return the size in bytes of all arrays, encoded or not, in a rollout or a sequence; None counts as 0."""
    if isinstance(data, (RolloutData, MultiRollout)):
        sizes: list[int] = []
        data.map(lambda array: sizes.append(array.nbytes))
        return sum(sizes)
    return sum(array.nbytes for array in data if array is not None)


# Lossless codecs


def _encode_lz4(flat: np.ndarray) -> EncodedArrays:
    return [np.frombuffer(importlib.import_module("lz4.frame").compress(flat.data), np.uint8)]


def _decode_lz4(arrays: EncodedArrays, dtype: np.dtype, size: int) -> np.ndarray:
    raw = importlib.import_module("lz4.frame").decompress(arrays[0].data, return_bytearray=True)
    return np.frombuffer(raw, dtype)


_zstd = threading.local()  # threads must not share zstandard objects


def _encode_zstd(flat: np.ndarray) -> EncodedArrays:
    if not hasattr(_zstd, "compressor"):
        _zstd.compressor = importlib.import_module("zstandard").ZstdCompressor(level=_ZSTD_LEVEL)
    return [np.frombuffer(_zstd.compressor.compress(flat.data), np.uint8)]


def _decode_zstd(arrays: EncodedArrays, dtype: np.dtype, size: int) -> np.ndarray:
    if not hasattr(_zstd, "decompressor"):
        _zstd.decompressor = importlib.import_module("zstandard").ZstdDecompressor()
    out = np.empty(size, dtype)
    with _zstd.decompressor.stream_reader(arrays[0].data) as reader:
        if reader.readinto(out.view(np.uint8)) != out.nbytes:
            raise ValueError("a zstd frame is truncated")
    return out


def _encode_none(flat: np.ndarray) -> None:
    """Return None, so that the array is sent without encoding."""


def _decode_none(arrays: EncodedArrays, dtype: np.dtype, size: int) -> np.ndarray:
    return arrays[0]


# Lossy codecs for float32. Non-finite values remain non-finite, so that the update is skipped, just as it would be
# without a codec.


def _tensor(array: np.ndarray) -> Tensor:
    """Return the array as a tensor that shares its memory; copy the array first if it is read-only."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _encode_half(dtype: torch.dtype, flat: np.ndarray) -> EncodedArrays | None:
    values = _tensor(flat)
    half = values.to(dtype)
    if bool((half.isinf() & values.isfinite()).any()):
        return None
    return [half.view(torch.int16).numpy()]


def _decode_half(half: torch.dtype, arrays: EncodedArrays, dtype: np.dtype, size: int) -> np.ndarray:
    return _tensor(arrays[0]).view(half).float().numpy()


def _encode_int8(flat: np.ndarray) -> EncodedArrays:
    """Encode the values as int8, with one scale for each block of values: value = int8 * scale.

    See Dettmers et al. 2022, 8-bit optimizers.
    """
    rows = np.zeros((-(-flat.size // _BLOCK), _BLOCK), np.float32)
    rows.reshape(-1)[:flat.size] = flat
    values = torch.from_numpy(rows)
    scales = (values.abs().amax(1, keepdim=True) / 127.0).clamp_(min=torch.finfo(torch.float32).tiny)
    # If a block contains NaN, its scale is NaN. If it contains an infinity, its scale is infinite and its codes are 0.
    # In both cases, all values of the block decode to NaN.
    codes = (values / scales).round_().nan_to_num_(0.0).clamp_(-127, 127)
    return [codes.to(torch.int8).view(-1).numpy()[:flat.size], scales.view(-1).numpy()]


def _decode_int8(arrays: EncodedArrays, dtype: np.dtype, size: int) -> np.ndarray:
    codes, scales = arrays
    rows = np.zeros((len(scales), _BLOCK), np.float32)
    rows.reshape(-1)[:size] = codes
    with np.errstate(invalid="ignore"):  # no warning for 0 * inf, which is NaN
        rows *= scales[:, None]
    return rows.reshape(-1)[:size]


def _encode_topk(flat: np.ndarray) -> EncodedArrays | None:
    """Encode the ten percent of the values that have the largest magnitudes, and their indices.

    See Lin et al. 2018, Deep gradient compression. To save time, `np.argpartition` is not called with all values;
    instead, a histogram of the magnitudes is computed first. Without the sign bit, the bits of a float form an integer
    that increases with the magnitude and is largest for NaN; the upper 16 bits of this integer are the number of the
    bin. The histogram shows which bin contains the smallest magnitude to keep. All values in higher bins are kept, and
    `np.argpartition` selects only among the values in this bin.
    """
    if flat.size > np.iinfo(np.int32).max:
        return None
    number = -(-flat.size // _TOP_SHARE)
    bits = flat.view(np.uint32) & np.uint32(0x7FFFFFFF)
    upper = (bits >> np.uint32(16)).astype(np.uint16)
    at_least = np.cumsum(np.bincount(upper, minlength=2**15)[::-1])  # cumulative counts, from the highest bin down
    border = 2**15 - 1 - int(np.searchsorted(at_least, number))
    above, tied = np.flatnonzero(upper > border), np.flatnonzero(upper == border)
    missing = number - len(above)
    tied = tied[np.argpartition(bits[tied], len(tied) - missing)[len(tied) - missing:]]
    places = np.concatenate([above, tied])
    return [places.astype(np.int32), flat[places]]


def _decode_topk(arrays: EncodedArrays, dtype: np.dtype, size: int) -> np.ndarray:
    out = np.zeros(size, np.float32)
    out[arrays[0]] = arrays[1]
    return out


# The registry of codecs

_BF16 = Codec("bf16", partial(_encode_half, torch.bfloat16), partial(_decode_half, torch.bfloat16), is_lossless=False)
_BUILT_IN = {codec.name: codec for codec in (
    Codec("none", _encode_none, _decode_none, is_lossless=True),
    Codec("lz4", _encode_lz4, _decode_lz4, is_lossless=True, package="lz4"),
    Codec("zstd", _encode_zstd, _decode_zstd, is_lossless=True, package="zstandard"),
    Codec("fp16", partial(_encode_half, torch.float16), partial(_decode_half, torch.float16), is_lossless=False,
          fallback=_BF16),
    _BF16,
    Codec("int8", _encode_int8, _decode_int8, is_lossless=False, has_feedback=True),
    Codec("topk", _encode_topk, _decode_topk, is_lossless=False, has_feedback=True))}
_codecs = dict(_BUILT_IN)


def register_codec(name: str, encode: Encode, decode: Decode, *, is_lossless: bool,
                   has_feedback: bool = False) -> Codec:
    """Register your own codec, so that options accept its name, and return the codec.

    Messages contain the codec, so its functions must be picklable. A codec that you registered earlier under the same
    name is replaced.

    Args:
        name: Name of the codec in options.
        encode: Function from a flat contiguous array to the arrays that are sent. It returns None if the codec cannot
            represent the values, which are then sent without encoding.
        decode: Function that returns the flat array, given the arrays that were sent (read-only), the dtype and the
            number of values. The flat array is copied if it is read-only, or shares memory with the arrays that were
            sent.
        is_lossless: Whether arrays of every dtype are restored bit for bit. Lossy codecs receive only float32
            arrays, and no arrays of rollouts.
        has_feedback: Whether the sender adds the remainder of an encoding (the values minus the decoded values) to the
            next array before it encodes that array. Such codecs are for gradients only.

    Raises:
        ConfigError: The name belongs to a built-in codec, is empty or "auto", or contains a colon; or the codec is
            lossless and has feedback.
    """
    if not isinstance(name, str) or not name or ":" in name or name == "auto" or name in _BUILT_IN:
        raise ConfigError(f"a codec's name must be new, contain no colon, and not be 'auto', got {name!r}; existing "
                          f"codecs are {codec_names()}")
    if is_lossless and has_feedback:
        raise ConfigError(f"codec {name!r} is lossless, so has_feedback has no remainder to add; leave one of the two "
                          "out")
    _codecs[name] = Codec(name, encode, decode, is_lossless, has_feedback)
    return _codecs[name]


def codec_names() -> list[str]:
    """Return the names of all codecs."""
    return list(_codecs)


def get_codec(name: str) -> Codec:
    """Return the codec with this name; raise `KeyError` if there is none."""
    return _codecs[name]


def check_installed(codec: Codec, option: str) -> None:
    """Raise `ConfigError` if a codec's package is not installed."""
    if codec.package is not None and importlib.util.find_spec(codec.package) is None:
        raise ConfigError(f"{option} needs the package {codec.package}; install it with: {install_hint('compress')}")
