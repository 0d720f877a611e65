"""The Ray actor that contains a worker, and the answers that it sends.

The pickled class of an actor refers to `Host` by name, so the process of each actor imports this module. The module
does not import Ray; `make_host` receives it as an argument.
"""

from __future__ import annotations

import logging
import pickle
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Generic, TypeAlias

from pytorchrl.runtime.base import Outcome, R
from pytorchrl.runtime.ray.start import restore_umask
from pytorchrl.runtime.remote_errors import SentError
from pytorchrl.support.terminal import Lines, get_logger

LogRecords: TypeAlias = list[tuple[str, int, str]]
"""Name of a logger, level and text of each record."""

# Largest number of log records that an answer contains; older records are dropped.
_MAX_RECORDS = 50


class WorkerLog(logging.Handler):
    """Handler that collects the warnings and errors that this library logs in a worker.

    The worker's next answer contains them, and the caller logs them.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._records: deque[tuple[str, int, str]] = deque(maxlen=_MAX_RECORDS)

    def emit(self, record: logging.LogRecord) -> None:
        """Store a log record as text."""
        self._records.append((record.name, record.levelno, self.format(record)))

    def take(self) -> LogRecords:
        """Return the records since the last call of this method."""
        return [self._records.popleft() for _ in range(len(self._records))]


@dataclass(frozen=True)
class Answer(Generic[R]):
    """Result of a call that has logged warnings or raised an exception. All other calls return only their value.

    Ray does not see exceptions, because it would report a crashed process after `SystemExit` and a cancelled call after
    `KeyboardInterrupt`, and would send the traceback of all others as text.
    """

    value: R | None = None
    error: SentError | None = None
    records: LogRecords = field(default_factory=list)

    def outcome(self, worker: str) -> Outcome[R]:
        """Log the records in the calling process, and return the outcome of the call to `worker`."""
        for name, level, text in self.records:
            get_logger(name).log(level, "%s: %s", worker, Lines(text))
        return Outcome(worker, self.value, None if self.error is None else self.error.received())


class Enclosed:
    """Small value that is sent in many requests, but pickled only once. Its arrays are read-only after unpickling."""

    def __init__(self, pickled: bytes, buffers: list[bytes]) -> None:
        self._pickled, self._buffers = pickled, buffers

    def __reduce__(self) -> tuple[Callable[[bytes, list[bytes]], object], tuple[bytes, list[bytes]]]:
        return _deserialize, (self._pickled, self._buffers)


def _deserialize(pickled: bytes, buffers: list[bytes]) -> object:
    return pickle.loads(pickled, buffers=buffers)


class Host:
    """Ray actor that contains a worker. One thread builds the worker and runs all calls except those of `signal`."""

    def __init__(self, cls: type[object], params: Mapping[str, object]) -> None:
        self._cls, self._params = cls, params
        self._worker: object = None
        # Signals that arrived before the worker was built.
        self._early: list[tuple[str, tuple[object, ...], Mapping[str, object]]] = []
        self._lock = threading.Lock()  # guards `_worker` and `_early`: self._worker is None or not self._early
        self._log = WorkerLog()
        get_logger("pytorchrl").addHandler(self._log)
        restore_umask()

    def up(self) -> None:
        """Do nothing; when a call of this method has returned, the caller knows that the actor's process runs."""

    def call(self, method: str, *args: object, **kwargs: object) -> object:
        """Run a method of the worker; the first call builds the worker."""
        try:
            value = self._run(method, args, kwargs)
        except BaseException as error:  # noqa: BLE001 - the caller receives the error as a value
            return Answer(error=SentError.of(error), records=self._log.take())
        records = self._log.take()
        return Answer(value, records=records) if records else value

    def _run(self, method: str, args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
        if self._worker is None:
            worker = self._cls(**self._params)
            with self._lock:
                self._worker, early, self._early = worker, self._early, []
                for name, early_args, early_kwargs in early:
                    getattr(worker, name)(*early_args, **early_kwargs)
        return getattr(self._worker, method)(*args, **kwargs)

    def signal(self, method: str, *args: object, **kwargs: object) -> object:
        """Run a worker's method even while `call` runs; if no worker is built yet, defer the method and return None."""
        with self._lock:
            if self._worker is None:
                self._early.append((method, args, kwargs))
                return None
        return getattr(self._worker, method)(*args, **kwargs)


def make_host(ray: ModuleType) -> type[Host]:
    """Return a subclass of `Host` whose method `signal` runs in Ray's concurrency group "control"."""
    class Worker(Host):
        signal = ray.method(concurrency_group="control")(Host.signal)

    return Worker
