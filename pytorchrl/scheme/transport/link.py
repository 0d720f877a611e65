"""Measure how fast the links to remote workers are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from pytorchrl.runtime import Future, Handle, Runtime
from pytorchrl.scheme.transport.encoder import Encoder

P = TypeVar("P", bound="Peer")

# Bytes of the probes. Ray sends smaller ones another way, not through shared memory.
_SMALL, _LARGE = 2**18, (2**20, 2**24)
# A difference of this many seconds between a large and the small probe is well above the noise of a call.
_ENOUGH_S = 0.02
# Probes of each size, of which the fastest counts: the first one of a size, or a disturbed one, takes longer, never
# shorter. A slow link, on which a probe takes this many seconds, gets one.
_REPEATS, _SLOW_S = 3, 0.5
# A worker that does not answer is lost or hung, which its next request finds out.
_TIMEOUT_S = 30.0


class Peer:
    """One end of a link: answers probes, and knows the link's speed.

    Attributes:
        encoder: Encoder of the messages that it sends to its parent; None if it sends none that may be encoded.
    """

    encoder: Encoder | None = None

    def echo(self, payload: np.ndarray) -> np.ndarray:
        """Return a copy of a probe."""
        return payload.copy()

    def set_link(self, seconds_per_byte: float) -> None:
        """Take over the measured speed of the link to the parent."""
        if self.encoder is not None:
            self.encoder.set_link(seconds_per_byte)


def measure_links(runtime: Runtime, workers: Sequence[Handle[P]]) -> list[float]:
    """Return the seconds per byte of the link to each worker, one way, including the copy that a reader makes.

    All links are measured at the same time, as workers use them in training; the workers must be idle. Probes of two
    sizes are compared, so that the fixed time of a call is left out. A worker that gives no answer has the value 0.0.

    Args:
        runtime: The runtime of the workers.
        workers: Handles of the workers.
    """
    first = _round_trips(runtime, workers, _SMALL)  # opens connections
    answering = [worker for worker, seconds in zip(workers, first, strict=True) if seconds is not None]
    small = _fastest(runtime, answering, _SMALL)
    found = [0.0] * len(answering)
    for size in _LARGE:
        large = _fastest(runtime, answering, size)
        extra = [max(0.0, slow - fast) for slow, fast in zip(large, small, strict=True)]
        found = [seconds / 2 / (size - _SMALL) for seconds in extra]
        if max(extra, default=0.0) >= _ENOUGH_S:
            break
    measured = iter(found)
    return [0.0 if seconds is None else next(measured) for seconds in first]


def _fastest(runtime: Runtime, workers: Sequence[Handle[P]], size: int) -> list[float]:
    """Return the shortest of some round trips, by worker; of a slow link there is only one."""
    rounds: list[list[float]] = []
    while len(rounds) < _REPEATS and (not rounds or max(rounds[0], default=0.0) < _SLOW_S):
        rounds.append([_TIMEOUT_S if seconds is None else seconds for seconds in _round_trips(runtime, workers, size)])
    return [min(times) for times in zip(*rounds, strict=True)]


def _round_trips(runtime: Runtime, workers: Sequence[Handle[P]], size: int) -> list[float | None]:
    """Return the seconds from sending a probe until its answer was copied, by worker; None without an answer."""
    payload, start = np.ones(size, np.uint8), runtime.now()
    times: list[float | None] = [None] * len(workers)
    pending: dict[Future[np.ndarray], int] = {
        worker.submit(Peer.echo, payload): index for index, worker in enumerate(workers)}
    while pending and runtime.now() - start < _TIMEOUT_S:
        for future in runtime.wait(list(pending), _TIMEOUT_S):
            outcome, index = runtime.outcome(future, _TIMEOUT_S), pending.pop(future)
            if outcome.value is not None:
                outcome.value.copy()
                times[index] = runtime.now() - start
    return times
