"""Do one job at a time in a background thread."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Background:
    """A background thread that runs one job at a time. Python does not exit before the job has ended."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, job: Callable[[], None]) -> None:
        """Wait for the previous job, as `wait` does, and start the next one."""
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(job,), name=self._name)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the job has ended. If the job raised an error, raise it; later calls do not raise it again."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:  # noqa: BLE001 - `wait` raises it in the thread that started the job
            self._error = error
