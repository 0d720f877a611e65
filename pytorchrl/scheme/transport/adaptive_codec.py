"""Decide for each message whether encoding it saves time."""

from __future__ import annotations

import math
import statistics
from collections import deque

# Number of messages to encode at the start, to time the codec. One message is not enough, because the first encoding
# may be slower than later ones.
_FIRST_ENCODINGS = 3
# Number of latest timings of the codec. Their median is used, so that a single delay does not change the decision.
_WINDOW = 5
# While the codec saves no time, at least `_MIN_INTERVAL` messages are sent without encoding before the codec is timed
# again. Timing may take up to the fraction `_BUDGET` of the time that messages spend on the link.
_MIN_INTERVAL, _BUDGET = 64, 0.01


class AdaptiveCodec:
    """Decide for each message whether to encode it, depending on the speeds of the codec and of the link.

    The link is the connection to the reader of the messages; see `pytorchrl.scheme.transport.link`. Encoding saves time
    if (raw - sent) * s > encode + decode. Here, raw is the size of the message's arrays in bytes, sent is their
    size after encoding, s is the seconds per byte of the link, and encode and decode are the seconds that the codec
    needs.

    The first three messages are encoded, to time the codec. After that, messages are encoded as long as this saves
    time. Otherwise, only a few messages are encoded, to time the codec again. The time lost by encoding these messages
    is limited to about one percent of the time on the link. Decisions depend only on `link_s` and the calls of
    `record`, not on a clock or random numbers.

    Attributes:
        link_s: Seconds per byte of the link; 0.0 before the link is measured, and if sending takes no time.
    """

    def __init__(self) -> None:
        self.link_s = 0.0
        self._codec_s: deque[float] = deque(maxlen=_WINDOW)  # latest timings of the codec, in seconds per byte
        self._saved_share = 0.0  # fraction by which the latest encoding reduced the bytes of its message
        self._num_encodings = self._num_plain = 0

    @property
    def saves_time(self) -> bool:
        """Whether encoding saves time, according to the timings so far."""
        return bool(self._codec_s) and self._saved_share * self.link_s > statistics.median(self._codec_s)

    def next(self) -> bool:
        """Return whether to encode the next message."""
        is_encoded = self._num_encodings < _FIRST_ENCODINGS or self.saves_time or self._num_plain >= self._interval
        self._num_plain = 0 if is_encoded else self._num_plain + 1
        return is_encoded

    @property
    def _interval(self) -> float:
        """Number of messages that are sent without encoding before the codec is timed again."""
        lost_s = statistics.median(self._codec_s) - self._saved_share * self.link_s if self._codec_s else 0.0
        return max(_MIN_INTERVAL, lost_s / (_BUDGET * self.link_s)) if self.link_s else math.inf

    def record(self, raw: int, sent: int, codec_s: float) -> None:
        """Record a message that was encoded.

        Args:
            raw: Bytes of the message's arrays before encoding.
            sent: Bytes of the message's arrays after encoding.
            codec_s: Seconds to encode and decode the message.
        """
        if raw:
            self._num_encodings += 1
            self._saved_share = (raw - sent) / raw
            self._codec_s.append(codec_s / raw)
