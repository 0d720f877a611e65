"""Whether it pays to encode what is sent over a link, found out while sending."""

from __future__ import annotations

import math

# A new figure counts so much in a mean; one above so many times the mean counts as that, unless the one before was, too:
# a pause of a machine is no trend.
_WEIGHT, _MOST = 0.1, 2.0
# Encodings before they are judged: the first one may be that of a cold start.
_FIRST_ENCODINGS = 2
# Messages between two trials of the slower way: at first, and later on; and by how much later trials are, in turn, so that none
# falls into step with what else comes every so many messages.
_FIRST_INTERVAL, _INTERVAL, _STEPS = 8, 64, 7
# Trials may cost this share of all the time that messages took; and the first message that is not encoded so many seconds.
_BUDGET, _FIRST_BUDGET_S = 0.01, 0.25


class _Way:
    """Seconds a byte of one way: an exponential mean."""

    def __init__(self) -> None:
        self.value, self.count = math.inf, 0
        self._last = math.inf

    def add(self, figure: float, nth: int = 0) -> None:
        """A new figure; the nth one of a trial, whose mean is all that counts then."""
        if nth:
            self.value = figure if nth == 1 else self.value + (figure - self.value) / nth
        elif self.count < _FIRST_ENCODINGS:
            self.value = min(self.value, figure)
        else:
            self.value += _WEIGHT * (min(figure, max(_MOST * self.value, self._last)) - self.value)
        self._last = figure
        self.count += 1


class Choice:
    """Decides for each message whether it is encoded: which way takes fewer seconds for a byte, all told.

    The way that seems slower is tried again, ever more rarely: at most once in 64 messages in the end, and only while all
    trials together cost no more than one percent of the whole time. Encoding comes first: what the link then takes for a byte
    is also the most that it would take for each byte of what is not encoded, while a message that is not encoded says
    nothing of the codec. The third message is not encoded, if that costs no more than a quarter of a second: where messages
    take their time whatever their size, nothing else would show it.

    Everything follows from what it is told, in that order: no clock, no chance.

    Args:
        delay: Messages by which all trials come later: those of what goes out with a request and of what comes back for it are
            not to meet, as each is told of the time that both take.

    Attributes:
        is_on: Whether encoding seems to be the faster way.
    """

    def __init__(self, delay: int = 0) -> None:
        self._first = _FIRST_ENCODINGS + delay  # messages
        self._encoded, self._plain = _Way(), _Way()
        self._link = _Way()  # as encoded messages found it
        self.is_on = True
        self._since_trial, self._interval = -delay, _FIRST_INTERVAL
        self._seconds = self._lost = 0.0
        self._raw = 0  # bytes of the last message
        self._made = self._trials = 0
        self._plain_asked = -_FIRST_INTERVAL  # the message that was not encoded, to be told of

    @property
    def _best_plain(self) -> float:
        """Without encoding: as it was, or as the link is now if that is less."""
        return min(self._plain.value, self._link.value) if self.is_on else self._plain.value

    def next(self) -> bool:
        """Whether to encode the next message."""
        self._since_trial += 1
        self._made += 1
        if self._encoded.count < _FIRST_ENCODINGS or self._made <= self._first:
            return True
        extra = abs(self._encoded.value - self._best_plain) * self._raw
        if not self._plain.count and self._made - self._plain_asked >= _FIRST_INTERVAL and extra <= _FIRST_BUDGET_S:
            self._plain_asked = self._made  # again, should nobody tell of it
            return False
        if self._since_trial > self._interval + self._trials % _STEPS and self._lost + extra <= _BUDGET * self._seconds:
            self._since_trial, self._interval = 0, min(2 * self._interval, _INTERVAL)
            self._trials += 1
            return not self.is_on
        return self.is_on

    def tell(self, is_encoded: bool, raw: int, sent: int, codec_s: float, transfer_s: float, nth: int = 0) -> None:
        """A message has come.

        Args:
            is_encoded: Whether it was encoded.
            raw: Its bytes before.
            sent: Its bytes as it crossed.
            codec_s: Seconds of encoding, and of decoding or else copying it.
            transfer_s: Seconds of the way.
            nth: Which telling it is of a message that was a trial when it was made; 0: that was none.
        """
        if not raw:
            return
        self._raw, figure = raw, (codec_s + transfer_s) / raw
        self._seconds += codec_s + transfer_s
        if nth and self._plain.count:
            self._lost += max(0.0, figure - (self._encoded.value if self.is_on else self._plain.value)) * raw
        (self._encoded if is_encoded else self._plain).add(figure, nth)
        if is_encoded:
            self._link.add(transfer_s / max(sent, 1), nth)
        if self._encoded.count >= _FIRST_ENCODINGS:
            self.is_on = self._encoded.value < self._best_plain
