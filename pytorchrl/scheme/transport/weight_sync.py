"""Send weights to the workers of one set."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace
from typing import Any

from pytorchrl.runtime import Handle, Runtime
from pytorchrl.scheme.transport.encoder import Compression, Encoder, Pack, Sent, Traffic
from pytorchrl.scheme.transport.link import measure_links
from pytorchrl.scheme.transport.messages import Weights


class WeightSync:
    """Weights that are encoded and put once per version, and shared by reference.

    Args:
        runtime: Where the workers run.
        compression: What becomes of weights; None: nothing.
        parameters: Names of vectors of parameters. A lossy codec leaves everything else as it is: normalisers are small, and
            their values may be large.
        workers: The readers of each version.

    Attributes:
        traffic: What was sent.
        bytes_out: Bytes of it.
    """

    def __init__(self, runtime: Runtime, compression: Compression | None, parameters: Container[str],
                 workers: Sequence[Handle[Any]]) -> None:
        self._runtime, self._parameters, self._workers = runtime, parameters, workers
        self._is_lossless = compression is None or compression.codec.is_lossless
        self._encoder = Encoder(compression, runtime.now, num_readers=len(workers))
        self._needs_link = self._encoder.is_adaptive
        self._version: int | None = None
        self._reference: Any = None
        self._sent = Sent()
        self.traffic = Traffic()
        self.bytes_out = 0

    def has(self, version: int) -> bool:
        """Return whether this version was put last."""
        return self._version == version

    def forget(self) -> None:
        """Put the weights again at the next request: they have changed within their version."""
        self._version = None

    def put(self, weights: Weights) -> None:
        """Put weights for all workers. The first ones are put before any request, while the workers are idle."""
        if self._needs_link:
            self._needs_link = False
            links = measure_links(self._runtime, self._workers)
            self._encoder.set_link(sum(links) / len(links))
        weights, self._sent = self._encoder.pack(lambda pack: self._pack(weights, pack))
        self._version, self._reference = weights.version, self._runtime.put(weights)
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
        """The weights that were put last, for a request to carry."""
        return self._reference

    def count(self) -> None:
        """Count one worker that was given the weights."""
        self.bytes_out += self._sent.sent
        self.traffic += Traffic(messages=1, raw=self._sent.raw, sent=self._sent.sent, encoded=int(self._sent.is_encoded))
