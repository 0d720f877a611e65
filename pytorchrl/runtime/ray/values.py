"""Define classes for remote tracebacks and for values that are pickled once but sent often, without importing Ray."""

from __future__ import annotations

import pickle
from collections.abc import Callable


class Enclosed:
    """Small value that is sent in many requests, but pickled only once. Its arrays are read-only after unpickling."""

    def __init__(self, pickled: bytes, buffers: list[bytes]) -> None:
        self._pickled, self._buffers = pickled, buffers

    def __reduce__(self) -> tuple[Callable[[bytes, list[bytes]], object], tuple[bytes, list[bytes]]]:
        return _deserialize, (self._pickled, self._buffers)


def _deserialize(pickled: bytes, buffers: list[bytes]) -> object:
    return pickle.loads(pickled, buffers=buffers)


class RemoteTraceback(Exception):  # noqa: N818 - the cause of an error, not an error itself
    """Traceback from a worker's process, as text."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"
