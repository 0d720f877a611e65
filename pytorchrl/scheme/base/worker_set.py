"""A set of equal workers: one local to its parent, and the remote ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from pytorchrl.errors import StartError, StartTimeoutError, WorkerLostError
from pytorchrl.runtime import Handle, Runtime
from pytorchrl.scheme.base.worker import Worker

W = TypeVar("W", bound=Worker)

# Seconds for one worker to start, import torch and build its environments; workers start side by side on few cores.
_START_TIMEOUT_S = 60.0
_START_TIMEOUT_PER_WORKER_S = 10.0


class WorkerSet(Generic[W]):
    """Worker 0 in this process, workers 1..N elsewhere.

    Args:
        worker_class: Class of all its workers.
        worker_params: Keyword arguments of the class, for all workers.
        remote_config: Resources that each remote worker asks for.
        num_workers: Number of remote workers, N; 1 means none (the local worker does the work).
        runtime: Where the remote workers run.
        name: Prefix of the workers' names in errors and logs.
        local_params: Keyword arguments that only the local worker gets.
        remote_params: Keyword arguments that only remote workers get.

    Attributes:
        worker_class, worker_params, remote_config, num_workers: As given.
    """

    def __init__(self, worker_class: type[W], worker_params: Mapping[str, Any], remote_config: Mapping[str, float],
                 num_workers: int, *, runtime: Runtime, name: str, local_params: Mapping[str, Any],
                 remote_params: Mapping[str, Any]) -> None:
        self.worker_class, self.worker_params = worker_class, dict(worker_params)
        self.remote_config, self.num_workers = dict(remote_config), num_workers
        self._runtime = runtime
        self._local = worker_class(index_worker=0, **self.worker_params, **local_params)
        self._remote: list[Handle[W]] = []
        for index in range(1, num_workers + 1):
            self._remote.append(runtime.start_actor(
                worker_class, {"index_worker": index, **self.worker_params, **remote_params},
                name=f"{name}{index}", resources=self.remote_config))
        self._starting = [handle.submit(worker_class.ready) for handle in self._remote]

    def local_worker(self) -> W:
        """Worker 0, an object of this process."""
        return self._local

    def remote_workers(self) -> list[Handle[W]]:
        """Handles of workers 1..N, in order."""
        return list(self._remote)

    def wait_ready(self) -> None:
        """Wait until every remote worker is built; raise its constructor's error, or `StartTimeoutError`."""
        deadline = _START_TIMEOUT_S + _START_TIMEOUT_PER_WORKER_S * len(self._starting)
        for outcome in self._runtime.get_all(self._starting, deadline):
            if isinstance(outcome.error, WorkerLostError):
                raise StartTimeoutError(f"{outcome.worker} did not start within {deadline:.0f} s: {outcome.error}"
                                        ) if "no answer" in str(outcome.error) else StartError(str(outcome.error))
            outcome.unwrap()
        self._starting = []

    def kill_remote(self) -> None:
        """End all remote workers at once."""
        for handle in self._remote:
            self._runtime.kill(handle)
