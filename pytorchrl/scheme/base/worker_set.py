"""A set of equal workers: one local to its parent, and the remote ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Generic, TypeVar

from pytorchrl.errors import StartError, StartTimeoutError, WorkerLostError
from pytorchrl.runtime import Handle, Runtime
from pytorchrl.scheme.base.worker import Worker
from pytorchrl.scheme.transport.link import measure_links

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
        first_index: Of the remote workers.
        first_incarnation: Of the remote workers; replacements count on from it.

    Attributes:
        worker_class, worker_params, remote_config, num_workers: As given.
    """

    kind: ClassVar[str] = "workers"
    """Name of the workers in messages while they start."""

    def __init__(self, worker_class: type[W], worker_params: Mapping[str, Any], remote_config: Mapping[str, float],  # noqa: PLR0913
                 num_workers: int, *, runtime: Runtime, name: str, local_params: Mapping[str, Any],
                 remote_params: Mapping[str, Any], first_index: int = 1, first_incarnation: int = 0) -> None:
        self.worker_class, self.worker_params = worker_class, dict(worker_params)
        self.remote_config, self.num_workers = dict(remote_config), num_workers
        self._runtime = runtime
        self._local = worker_class(index_worker=0, **self.worker_params, **local_params)
        self._name, self._remote_params = name, dict(remote_params)
        self._first_index, self._incarnations = first_index, [first_incarnation] * num_workers
        self._links_s: list[float] = []  # seconds per byte, once measured
        self._remote: list[Handle[W]] = [self._start(place) for place in range(num_workers)]
        self._starting = [handle.submit(worker_class.ready) for handle in self._remote]

    def _start(self, place: int) -> Handle[W]:
        index = self._first_index + place
        params = {"index_worker": index, **self.worker_params, **self._remote_params,
                  "incarnation": self._incarnations[place]}
        return self._runtime.start_actor(
            self.worker_class, params, name=f"{self._name}{index}", resources=self.remote_config)

    def replace(self, place: int) -> None:
        """Another worker in a place of `remote_workers()`, of the next incarnation; what is there is killed."""
        self._runtime.kill(self._remote[place])
        self._incarnations[place] += 1
        self._remote[place] = self._start(place)
        self._tell_link(place)  # of the worker before, for the links are in use now

    def local_worker(self) -> W:
        """Worker 0, an object of this process."""
        return self._local

    def remote_workers(self) -> list[Handle[W]]:
        """Handles of workers 1..N, in order: the list itself, in which replacements take the place of lost workers."""
        return self._remote

    def wait_ready(self) -> None:
        """Wait until every remote worker is built; raise its constructor's error, or `StartTimeoutError`."""
        deadline = _START_TIMEOUT_S + _START_TIMEOUT_PER_WORKER_S * len(self._starting)
        for outcome in self._runtime.get_started(self.kind, self._starting, deadline):
            if isinstance(outcome.error, WorkerLostError):
                raise StartTimeoutError(f"{outcome.worker} did not start within {deadline:.0f} s: {outcome.error}"
                                        ) if "no answer" in str(outcome.error) else StartError(str(outcome.error))
            outcome.unwrap()
        self._starting = []
        if self._remote and self._local.encoder is not None and self._local.encoder.is_adaptive:
            self._links_s = measure_links(self._runtime, self._remote)
            for place in range(len(self._remote)):
                self._tell_link(place)

    def _tell_link(self, place: int) -> None:
        if self._links_s:
            self._remote[place].submit(self.worker_class.set_link, self._links_s[place])

    def kill_remote(self) -> None:
        """End all remote workers at once."""
        for handle in self._remote:
            self._runtime.kill(handle)
