"""Send weights to the workers of one worker set."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace

from pytorchrl.runtime import Handle, Runtime
from pytorchrl.scheme.transport.encoder import Compression, Encoder, Pack, Sent, Traffic
from pytorchrl.scheme.transport.link import Peer, measure_links
from pytorchrl.scheme.transport.messages import States, Weights
from pytorchrl.support.untyped import Payload


class WeightSync:
    """The newest weights, which are encoded and stored once per version, and sent by reference.

    Args:
        runtime: The runtime of the workers.
        compression: Codec of weights; None sends weights without encoding.
        parameters: Names of the parameter vectors. A lossy codec encodes only these vectors, because normalizers are
            small arrays whose values may be large.
        workers: Handles of the workers that read each version.

    Attributes:
        traffic: Counts, bytes and times of all messages with weights so far.
        bytes_out: Total bytes of weights sent to all workers, after encoding.
    """

    def __init__(self, runtime: Runtime, compression: Compression | None, parameters: Container[str],
                 workers: Sequence[Handle[Peer]]) -> None:
        self._runtime, self._parameters, self._workers = runtime, parameters, workers
        self._is_lossless = compression is None or compression.codec.is_lossless
        self._encoder = Encoder(compression, runtime.now, num_readers=len(workers))
        self._needs_link = self._encoder.needs_link
        self._version: int | None = None
        self._reference: Payload = None
        self._sent = Sent()
        self.traffic = Traffic()
        self.bytes_out = 0

    def has(self, version: int) -> bool:
        """Return whether the stored weights have this version."""
        return self._version == version

    def forget(self) -> None:
        """Discard the stored weights, so that `has` returns False until the next call of `put`."""
        self._version = None

    def put(self, weights: Weights) -> None:
        """Store weights for all workers.

        With "auto" compression, the first call also measures the speed of the links, so the workers must be idle.
        """
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
        def place(name: str) -> int | None:
            return 0 if self._is_lossless or name.replace("target_", "") in self._parameters else None

        def packed(state: States) -> States:
            return {name: pack(array, place(name)) for name, array in state.items()}
        return replace(weights, state=packed(weights.state), learning=packed(weights.learning))

    @property
    def reference(self) -> Payload:
        """Reference to the stored weights, which is sent with a request."""
        return self._reference

    def count(self) -> None:
        """Record that the weights are sent to one more worker."""
        self.bytes_out += self._sent.sent
        sent = self._sent
        self.traffic += Traffic(messages=1, raw=sent.raw, sent=sent.sent, encoded=int(sent.is_encoded))
