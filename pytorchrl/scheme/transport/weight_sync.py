"""Weights on their way to the workers of one set."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Container
from dataclasses import replace
from typing import Any

from pytorchrl.runtime import Runtime
from pytorchrl.scheme.transport.encoder import Compression, Encoder, Pack, Sent, Traffic
from pytorchrl.scheme.transport.messages import Weights

# Messages by which trials come later than those of answers.
_DELAY = 4
# Trials whose answers may still be on their way.
_MAX_TRIALS = 16


class Pushes:
    """Weights that are encoded and put once per version, and shared by reference.

    Weights go out with a request. What that and its answer take on their way decides whether to encode them, and whether to
    encode answers: for each, the other one is the same either way, but for trials, which the other is not told of.

    Args:
        runtime: Where the workers run.
        compression: What becomes of weights; None: nothing.
        parameters: Names of vectors of parameters. A lossy codec leaves everything else as it is: normalisers are small, and
            their values may be large.
        num_workers: Who shares a version.

    Attributes:
        traffic: What was pushed.
        bytes_out: Bytes of it.
    """

    def __init__(self, runtime: Runtime, compression: Compression | None, parameters: Container[str], num_workers: int) -> None:
        self._runtime, self._parameters, self._num_workers = runtime, parameters, num_workers
        self._is_lossless = compression is None or compression.codec.is_lossless
        self._encoder = Encoder(compression, runtime.now, delay=_DELAY)
        self._answered: dict[int, int] = {}  # by worker: version of the weights that its last answer was made with
        self._trials: deque[int] = deque(maxlen=_MAX_TRIALS)  # versions
        self._counts: defaultdict[int, list[int]] = defaultdict(lambda: [0, 0])  # by worker, of answers without and with weights
        self._version: int | None = None
        self._reference: Any = None
        self._sent = Sent()
        self.traffic = Traffic()
        self.bytes_out = 0

    def answered(self, worker: int, version: int, way_s: float | None, open_s: float, is_trial: bool) -> float | None:
        """An answer has come: what its way says of weights, if its request brought any.

        Args:
            worker: Whose.
            version: Of the weights that it was made with.
            way_s: Seconds that request and answer were on their way; None if that is not known.
            open_s: Seconds that the worker took to take over the weights.
            is_trial: Whether the answer was sent in the way that seems slower.

        Returns:
            What the way says of the answer: the same, or None where weights were tried out on it, or where most answers of
            this worker are of the other kind, with weights or without, so that theirs cannot be compared with it.
        """
        brings, counts = self._answered.get(worker) != version, self._counts[worker]
        counts[brings] += 1
        said = way_s if counts[brings] >= counts[not brings] else None
        if not brings:
            return said
        self._answered[worker] = version
        if way_s is not None and not is_trial:
            self._encoder.fetched(version, way_s, open_s, self._num_workers)
        return None if version in self._trials else said

    def lost(self, worker: int) -> None:
        """Another worker will be in its place."""
        self._answered.pop(worker, None)
        self._counts.pop(worker, None)

    def has(self, version: int) -> bool:
        """Whether this version was put last."""
        return self._version == version

    def forget(self) -> None:
        """The weights have changed within their version."""
        if self._version is not None and self._version in self._trials:
            self._trials.remove(self._version)
        self._version = None
        self._answered.clear()

    def put(self, weights: Weights) -> None:
        """Put weights for all workers."""
        weights, self._sent = self._encoder.pack(lambda pack: self._pack(weights, pack), weights.version)
        self._version, self._reference = weights.version, self._runtime.put(weights)
        if self._sent.is_trial:
            self._trials.append(weights.version)
        if self._sent.is_encoded:
            self.traffic += Traffic(encodes=1, encode_s=self._sent.encode_s, fallbacks=self._sent.fallbacks,
                                    relative_error=self._sent.relative_error)

    def _pack(self, weights: Weights, pack: Pack) -> Weights:
        def packed(state: dict[str, Any]) -> dict[str, Any]:
            return {name: pack(array, 0 if self._is_lossless or name.replace("target_", "") in self._parameters else None)
                    for name, array in state.items()}
        return replace(weights, state=packed(weights.state), learning=packed(weights.learning))

    @property
    def reference(self) -> Any:
        """What was put last, for a request to carry."""
        return self._reference

    def count(self) -> None:
        """It was given to a worker."""
        self.bytes_out += self._sent.sent
        self.traffic += Traffic(messages=1, raw=self._sent.raw, sent=self._sent.sent, encoded=int(self._sent.is_encoded))
