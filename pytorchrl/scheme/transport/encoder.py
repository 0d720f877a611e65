"""Encode messages: parse the options for compression, encode a sender's messages, and sum their sizes and times."""

from __future__ import annotations

import difflib
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Protocol, TypeVar

import numpy as np

from pytorchrl.errors import ConfigError
from pytorchrl.scheme.transport.adaptive_codec import AdaptiveCodec
from pytorchrl.scheme.transport.codecs import Codec, Packed, check_installed, codec_names, decode_array, get_codec

T = TypeVar("T")

DATA, WEIGHTS, GRADS = KINDS = ("data", "weights", "grads")
"""Names of rollouts, weights and gradients in options and metrics."""

# The codec that "auto" uses for each kind of message.
_AUTO = {DATA: "lz4", WEIGHTS: "lz4", GRADS: "bf16"}
_REASONS_REFUSED = {
    DATA: "is lossy: log-probabilities and values computed by the collector would no longer match the data",
    WEIGHTS: "is for gradients: it adds each remainder to the next gradient, whereas weights are sent whole each time"}
# Measuring the error of an encoding takes as long as the encoding, so only one message in 64 is measured, starting with
# the first.
_LOOK_INTERVAL = 64
# The sender itself decodes this number of messages, starting with the first, to measure how long decoding takes.
_FIRST_TIMED = 3


@dataclass(frozen=True, slots=True)
class Compression:
    """The parsed value of an option `compress_<kind>_to_send`."""

    codec: Codec
    is_auto: bool = False
    """Whether the codec is used only while encoding saves time."""

    @classmethod
    def of(cls, kind: str, value: object) -> Compression | None:
        """Parse the value of the option `compress_<kind>_to_send`; return None if nothing is compressed.

        Args:
            kind: One of `KINDS`.
            value: False, True ("lz4"), a codec's name, "auto" or "auto:<name>"; or a value that this method returned.

        Raises:
            ConfigError: The codec is unknown or not for this kind of message, or its package is not installed.
        """
        if isinstance(value, cls):
            return value
        option = f"compress_{kind}_to_send"
        text = {False: "none", True: "lz4"}[value] if isinstance(value, bool) else value
        if not isinstance(text, str):
            raise ConfigError(f"{option} must be {_allowed(kind)}, got {value!r}")
        is_auto = text == "auto" or text.startswith("auto:")
        name = (text[5:] or _AUTO[kind]) if is_auto else text
        if name not in codec_names() or text == "auto:" or (is_auto and name == "none"):
            near = difflib.get_close_matches(text, [*codec_names(), "auto"], n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{option} must be {_allowed(kind)}, got {value!r}{hint}")
        codec = get_codec(name)
        if not is_for(kind, codec):
            raise ConfigError(f"{option}={value!r}: {name} {_REASONS_REFUSED[kind]}; give {_allowed(kind)}")
        if name == "none":
            return None
        check_installed(codec, f"{option}={value!r}")
        return cls(codec, is_auto)


def is_for(kind: str, codec: Codec) -> bool:
    """Return whether a codec may encode messages of a kind."""
    return codec.is_lossless or kind == GRADS or (kind == WEIGHTS and not codec.has_feedback)


def _allowed(kind: str) -> str:
    names = [name for name in codec_names() if is_for(kind, get_codec(name))]
    return f"False, True (lz4), {', '.join(map(repr, names))}, 'auto' or 'auto:<one of them>'"


@dataclass(frozen=True, slots=True)
class Sent:
    """Size and encoding of one message."""

    raw: int = 0
    """Bytes of the message's arrays before encoding."""
    sent: int = 0
    """Bytes of the message's arrays as they are sent."""
    is_encoded: bool = False
    encode_s: float = 0.0
    """Seconds to encode the message."""
    fallbacks: int = 0
    """Number of arrays that the codec could not represent."""
    relative_error: float | None = None
    """||x - decode(encode(x))|| / ||x||; None if it was not measured."""


NOT_SENT = Sent()
"""Size of a message that stays within its process."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Sums over messages of one kind: their number, their sizes, and the times to encode and decode them."""

    messages: int = 0
    raw: int = 0
    sent: int = 0
    encoded: int = 0
    """Number of messages that were sent in encoded form."""
    encodes: int = 0
    """Number of encodings. Weights that are sent to several workers are encoded only once."""
    encode_s: float = 0.0
    decodes: int = 0
    decode_s: float = 0.0
    fallbacks: int = 0
    relative_error: float | None = None
    """Relative error of the latest message whose error was measured."""

    @classmethod
    def of(cls, sent: Sent) -> Traffic:
        """Return the traffic of one message that is sent to one reader."""
        return cls(1, sent.raw, sent.sent, int(sent.is_encoded), int(sent.is_encoded), sent.encode_s, 0, 0.0,
                   sent.fallbacks, sent.relative_error)

    def __add__(self, later: Traffic) -> Traffic:
        """Return the sum of two totals. The relative error is not summed: the latest measured error is used."""
        if later is NO_TRAFFIC or later == NO_TRAFFIC:  # a common case, because nothing is encoded within a process
            return self
        error = self.relative_error if later.relative_error is None else later.relative_error
        sums = dict(zip(_SUMMED, map(operator.add, _SUMMED_OF(self), _SUMMED_OF(later)), strict=True))
        return Traffic(**sums, relative_error=error)


NO_TRAFFIC = Traffic()
_SUMMED = [field.name for field in fields(Traffic) if field.name != "relative_error"]
_SUMMED_OF = operator.attrgetter(*_SUMMED)


def metrics_of(parts: Iterable[Mapping[str, Traffic]]) -> dict[str, float | None]:
    """Combine the traffic of all workers (`parts`); return the metrics of each kind of message that was encoded."""
    everywhere = list(parts)
    metrics: dict[str, float | None] = {}
    for kind in KINDS:
        own = [part[kind] for part in everywhere if kind in part]
        total = sum(own, Traffic())
        if not total.encodes:
            continue
        errors = [part.relative_error for part in own if part.relative_error is not None]
        found = {
            "bytes_raw": total.raw, "bytes_sent": total.sent, "ratio": total.raw / total.sent if total.sent else None,
            "encoded_share": total.encoded / total.messages if total.messages else None,
            "encode_time_ms": 1e3 * total.encode_s / total.encodes,
            "decode_time_ms": 1e3 * total.decode_s / total.decodes if total.decodes else None,
            "fallbacks": total.fallbacks, "relative_error": max(errors, default=None)}
        metrics |= {f"compress/{kind}/{name}": value for name, value in found.items()}
    return metrics


Wanted = bool | str | Compression
"""Value of an option `compress_<kind>_to_send`; see `Compression.of`."""


class Pack(Protocol):
    """Function that encodes one array of a message."""

    def __call__(self, array: np.ndarray, place: int | None = 0) -> np.ndarray | Packed:
        """Return the array in the form in which it is sent.

        Args:
            array: The array.
            place: Index of the array in the message, for error feedback; None: send the array without encoding.
        """


class Encoder:
    """An encoder for the messages of one sender.

    If the codec has error feedback, the encoder keeps the encoding error (remainder) of each array, and adds it to the
    next array with the same index (Seide et al. 2014, 1-bit SGD; Karimireddy et al. 2019), so that encoding errors do
    not add up. If an array has non-finite values, the remainder does not change. Remainders are saved in checkpoints.
    The replacement of a lost sender starts without remainders.

    Args:
        compression: Codec to use; None sends everything without encoding.
        now: The clock.
        num_readers: Number of readers of each message; each reader decodes the message, which is encoded only once.
    """

    def __init__(self, compression: Compression | None, now: Callable[[], float], num_readers: int = 1) -> None:
        self._codec = None if compression is None else compression.codec
        self._adaptive = AdaptiveCodec() if compression is not None and compression.is_auto else None
        self._now, self._num_readers = now, num_readers
        self.kept: dict[int, np.ndarray] = {}
        """The encoding error to add to each array of the next message, by the array's index in the message."""
        self._encodings = 0
        self._decode_s = 0.0  # seconds of the latest timed decoding
        # State of the current message.
        self._fallbacks, self._squares, self._is_measured = 0, (0.0, 0.0), False

    @property
    def needs_link(self) -> bool:
        """Whether to call `set_link`: with "auto", the encoder decides by the link's speed whether to encode."""
        return self._adaptive is not None

    def set_link(self, seconds_per_byte: float) -> None:
        """Set the speed of the connection. Before this call, "auto" encodes only three messages, to time the codec."""
        if self._adaptive is not None:
            self._adaptive.link_s = seconds_per_byte

    def pack(self, walk: Callable[[Pack], T]) -> tuple[T, Sent]:
        """Build and encode a message; return the message and a `Sent`, which describes its size and encoding.

        Args:
            walk: Function that builds the message; its argument is a function that encodes one array of the message.
        """
        is_encoded = self._codec is not None and (self._adaptive is None or self._adaptive.next())
        self._is_measured = is_encoded and self._encodings % _LOOK_INTERVAL == 0
        self._encodings += is_encoded
        self._fallbacks, self._squares = 0, (0.0, 0.0)
        made: list[np.ndarray | Packed] = []
        raw, start = 0, self._now() if is_encoded else 0.0

        def pack(array: np.ndarray, place: int | None = 0) -> np.ndarray | Packed:
            nonlocal raw
            raw += array.nbytes
            packed: np.ndarray | Packed = array
            if place is not None:
                packed = self._encode(array, place) if is_encoded else self._with_remainder(array, place)
            made.append(packed)
            return packed
        message = walk(pack)
        encode_s = self._now() - start if is_encoded else 0.0
        error, norm = self._squares
        sent = Sent(raw, sum(array.nbytes for array in made), is_encoded, encode_s, self._fallbacks,
                    math.sqrt(error / norm) if norm and math.isfinite(error / norm) else None)
        if self._adaptive is not None and is_encoded:
            if self._is_timed:
                self._decode_s = self._time_decoding(made)
            self._adaptive.record(raw, sent.sent, encode_s / self._num_readers + self._decode_s)
        return message, sent

    @property
    def _is_timed(self) -> bool:
        """Whether the sender itself decodes the current message, to measure how long readers need to decode it."""
        return self._encodings <= _FIRST_TIMED or self._is_measured

    def _time_decoding(self, made: Sequence[np.ndarray | Packed]) -> float:
        start = self._now()
        for array in made:
            decode_array(array)
        return self._now() - start

    def _with_remainder(self, array: np.ndarray, place: int) -> np.ndarray:
        """Add the encoding error that is kept for index `place`, if any, to an array that is sent without encoding."""
        if place not in self.kept:
            return array
        with np.errstate(over="ignore"):
            whole: np.ndarray = array + self.kept[place]
        if np.isfinite(whole).all():
            del self.kept[place]
        return whole

    def _encode(self, array: np.ndarray, place: int) -> np.ndarray | Packed:
        codec = self._codec
        assert codec is not None
        if codec.is_lossless or array.dtype != np.float32 or not array.size:
            return codec.pack(array)
        if codec.has_feedback:
            return self._encode_with_feedback(codec, array, place)
        packed = codec.pack(array)
        self._fallbacks += not (isinstance(packed, Packed) and packed.codec == codec)
        if self._is_measured:
            with np.errstate(invalid="ignore"):
                self._add_error(array, array - decode_array(packed))
        return packed

    def _encode_with_feedback(self, codec: Codec, array: np.ndarray, place: int) -> np.ndarray | Packed:
        with np.errstate(over="ignore", invalid="ignore"):
            whole = array + self.kept[place] if place in self.kept else array
            packed = codec.pack(whole)
            left_out: np.ndarray = whole - decode_array(packed)
        if np.isfinite(left_out).all():
            self.kept[place] = left_out
            self._add_error(whole, left_out)
        return packed

    def _add_error(self, array: np.ndarray, error: np.ndarray) -> None:
        flat, off = array.reshape(-1), error.reshape(-1)
        with np.errstate(over="ignore"):  # no warning if the sum is infinite
            self._squares = self._squares[0] + float(np.dot(off, off)), self._squares[1] + float(np.dot(flat, flat))

