"""Decide for each message whether encoding it saves time."""

from __future__ import annotations

import math
import statistics
from collections import deque

# Messages that are encoded at first, to time the codec; the first one may be slowed down by a cold start.
_FIRST_ENCODINGS = 3
# Timings in the median, so that a pause of the machine is no trend.
_WINDOW = 5
# While encoding does not pay, the codec is timed again after this many messages at the earliest, for at most this share
# of the time that messages spend on the link.
_MIN_INTERVAL, _BUDGET = 64, 0.01


class AdaptiveCodec:
    """Encode messages while the link is so slow that the bytes saved take longer than the codec.

    Encoding pays if (raw - sent) * s > encode + decode, in seconds, with the link's s seconds per byte; see
    `pytorchrl.scheme.transport.link`. The codec is timed on the messages themselves: on the first three, on each one
    that is encoded, and otherwise so rarely that it takes at most one percent of the time on the link. Nothing depends
    on a clock or on chance, only on the calls of `record`.

    Attributes:
        link_s: Seconds per byte of the link; 0.0 until it was measured, and where sending takes no time.
    """

    def __init__(self) -> None:
        self.link_s = 0.0
        self._codec_s: deque[float] = deque(maxlen=_WINDOW)  # per byte
        self._saved_share = 0.0  # of the bytes, by the last encoding
        self._num_encodings = self._num_plain = 0

    @property
    def pays(self) -> bool:
        """Whether encoding saves time, as far as is known."""
        return bool(self._codec_s) and self._saved_share * self.link_s > statistics.median(self._codec_s)

    def next(self) -> bool:
        """Return whether to encode the next message."""
        is_encoded = self._num_encodings < _FIRST_ENCODINGS or self.pays or self._num_plain >= self._interval
        self._num_plain = 0 if is_encoded else self._num_plain + 1
        return is_encoded

    @property
    def _interval(self) -> float:
        """Messages between two timings while encoding does not pay."""
        lost_s = statistics.median(self._codec_s) - self._saved_share * self.link_s if self._codec_s else 0.0
        return max(_MIN_INTERVAL, lost_s / (_BUDGET * self.link_s)) if self.link_s else math.inf

    def record(self, raw: int, sent: int, codec_s: float) -> None:
        """Record a message that was encoded.

        Args:
            raw: Bytes of its arrays.
            sent: Bytes of them as they cross.
            codec_s: Seconds to encode and decode it.
        """
        if raw:
            self._num_encodings += 1
            self._saved_share = (raw - sent) / raw
            self._codec_s.append(codec_s / raw)
