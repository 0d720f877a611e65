"""Measure the speed of the links to remote workers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pytorchrl.runtime import Future, Handle, Runtime
from pytorchrl.scheme.transport.encoder import Encoder

# Sizes of the probes (test messages) in bytes. Even the small probe is large enough for Ray to use shared memory.
_SMALL, _LARGE = 2**18, (2**20, 2**24)
# If a large probe takes at least this many seconds longer than the small probe, the difference is not due to chance.
_ENOUGH_S = 0.02
# Number of probes of each size. Only the fastest probe counts, because other load can only slow a probe down. If the
# first probe of any worker takes at least `_SLOW_S` seconds, no probe is repeated.
_REPEATS, _SLOW_S = 3, 0.5
# Seconds to wait for an answer. A worker that does not answer is lost or hung; the next request to this worker detects
# the loss.
_TIMEOUT_S = 30.0


class Peer:
    """A worker that answers probes of its link to the parent worker, and stores the link's speed.

    Attributes:
        encoder: Encoder of the messages to the parent worker; None if these messages are never encoded.
    """

    encoder: Encoder | None = None

    def echo(self, payload: np.ndarray) -> np.ndarray:
        """Return a copy of a probe, so that the round trip includes the time to copy the received data."""
        return payload.copy()

    def set_link(self, seconds_per_byte: float) -> None:
        """Store the measured seconds per byte of the link to the parent."""
        if self.encoder is not None:
            self.encoder.set_link(seconds_per_byte)


def measure_links(runtime: Runtime, workers: Sequence[Handle[Peer]]) -> list[float]:
    """Return the time in seconds that each worker's link takes to transfer one byte in one direction.

    The time includes the copy of the data by the receiver. All links are measured at the same time, because
    training uses them at the same time; the workers must be idle. The result is computed from the difference between
    probes of two sizes, so it does not include the fixed overhead of a call. The result for a worker that does not
    answer is 0.0. If the runtime only passes references, all results are 0.0.

    Args:
        runtime: The runtime of the workers.
        workers: Handles of the workers.
    """
    if not runtime.moves_bytes:
        return [0.0] * len(workers)
    first = _round_trips(runtime, workers, _SMALL)  # this round trip opens connections, and shows which workers answer
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


def _fastest(runtime: Runtime, workers: Sequence[Handle[Peer]], size: int) -> list[float]:
    """Probe each worker `_REPEATS` times, or once if any link is slow; return the shortest round trips in seconds."""
    rounds: list[list[float]] = []
    while len(rounds) < _REPEATS and (not rounds or max(rounds[0], default=0.0) < _SLOW_S):
        rounds.append([_TIMEOUT_S if seconds is None else seconds for seconds in _round_trips(runtime, workers, size)])
    return [min(times) for times in zip(*rounds, strict=True)]


def _round_trips(runtime: Runtime, workers: Sequence[Handle[Peer]], size: int) -> list[float | None]:
    """Send a probe of `size` bytes to each worker, and return the round-trip times in seconds.

    A round trip ends when the answer has been copied. The time of a worker that does not answer is None.
    """
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
