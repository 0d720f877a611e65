"""A set of workers of the same class: a local worker and remote workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Generic, TypeVar, cast

from pytorchrl.errors import RayDiedError, StartError, StartTimeoutError, WorkerDiedError, WorkerLostError
from pytorchrl.runtime import Handle
from pytorchrl.scheme.base.worker import Context, Worker
from pytorchrl.scheme.transport.link import measure_links
from pytorchrl.support.threads import Stoppable
from pytorchrl.support.untyped import OptionValue

W = TypeVar("W", bound=Worker)

# Time limit in seconds for workers to start, import torch and build environments. It increases with the number of
# workers, because many workers may start at the same time on few cores.
_START_TIMEOUT_S = 60.0
_START_TIMEOUT_PER_WORKER_S = 10.0


class WorkerSet(Stoppable, Generic[W]):
    """A local worker, which is worker 0 in this process, and N remote workers.

    If there are remote workers, they do the work of the set; otherwise, the local worker does it. A set that a program
    builds itself, and not as a part of a `Scheme`, must be stopped: call `stop`, or use a `with` block.

    Args:
        worker_class: Class of the workers.
        worker_params: Keyword arguments for all workers.
        remote_config: Resources of each remote worker.
        num_remote: Number of remote workers, N.
        name: Prefix of the workers' names in errors and logs.
        local_params: Further keyword arguments for the local worker, among them its `context`.
        remote_params: Further keyword arguments for remote workers.
        context: The context of the remote workers. Its `incarnation` is that of the first worker at each index; each
            replacement increases this number by 1.
        first_index: Index of the first remote worker; the following workers have the following indices.

    Attributes:
        worker_class: As given.
        remote_config: As given; `resize` may change the resources.
    """

    kind: ClassVar[str] = "workers"
    """Name of the workers in messages about their start."""
    remote_class: type[Worker] | None = None
    """Class of the remote workers; None: `worker_class`. The annotated type of `remote_workers()` is not affected."""
    local_works = True
    """Whether the local worker does the work of a set without remote workers."""

    def __init__(self, worker_class: type[W], worker_params: Mapping[str, OptionValue],  # noqa: PLR0913
                 remote_config: Mapping[str, float], num_remote: int, *, name: str,
                 local_params: Mapping[str, OptionValue], remote_params: Mapping[str, OptionValue],
                 context: Context, first_index: int = 1) -> None:
        self.worker_class, self._params = worker_class, dict(worker_params)
        self.remote_config = dict(remote_config)
        self._context, self._runtime = context, context.runtime
        self._local = worker_class(index_worker=0, **self._params, **local_params)
        self._name, self._remote_params = name, dict(remote_params)
        self._first_index = first_index
        # Incarnation of the latest worker at each index, including indices that `resize` has removed.
        self._incarnations = [context.incarnation] * num_remote
        self._links_s: list[float] = []  # for each remote worker, the seconds to send a byte; empty until measured
        self._remote: list[Handle[W]] = [self._start(place) for place in range(num_remote)]
        self._starting = [handle.submit(worker_class.ready) for handle in self._remote]

    @property
    def worker_params(self) -> Mapping[str, object]:
        """Keyword arguments of all workers."""
        return self._params

    @property
    def num_workers(self) -> int:
        """Number of workers that do the work of the set: the remote workers or, if there are none, the local worker.

        `len(remote_workers())` is the number of remote workers.
        """
        return len(self._remote) or int(self.local_works)

    def incarnation(self, place: int) -> int:
        """Return the incarnation of worker `place` of `remote_workers()`; each replacement increases it by 1."""
        return self._incarnations[place]

    @property
    def incarnations(self) -> list[int]:
        """Incarnation of the latest worker at each index of `remote_workers()`; see `incarnation`.

        Indices that `resize` has removed are included.
        """
        return list(self._incarnations)

    def restore_incarnations(self, saved: Sequence[int]) -> None:
        """Set the incarnations to those of an earlier run; replacements then continue the numbering of that run."""
        self._incarnations = [*saved, *self._incarnations[len(saved):]]

    def _start(self, place: int) -> Handle[W]:
        index = self._first_index + place
        params = {"index_worker": index, **self._params, **self._remote_params,
                  "context": replace(self._context, incarnation=self._incarnations[place])}
        remote_class = cast("type[W]", self.remote_class or self.worker_class)
        return self._runtime.start_actor(
            remote_class, params, name=f"{self._name}{index}", resources=self.remote_config)

    def replace(self, place: int) -> None:
        """Replace worker `place` of `remote_workers()`: kill it, and start a worker with an incarnation 1 higher."""
        self._runtime.kill(self._remote[place])
        self._incarnations[place] += 1
        self._remote[place] = self._start(place)
        # Only `wait_ready` measures the speed of messages, while all workers are idle. The replacement therefore uses
        # the value that was measured for the lost worker.
        self._send_link(place)

    def resize(self, num_remote: int, resources: Mapping[str, float] | None = None) -> None:
        """Start or kill remote workers until there are `num_remote`; workers with the largest indices are killed.

        If a new worker has the index of an earlier worker, its incarnation is greater by 1, so that the new worker does
        not repeat the random numbers of the earlier worker.

        Args:
            num_remote: New number of remote workers.
            resources: Resources of each worker that is started from now on; None: the resources do not change.
        """
        if resources is not None:
            self.remote_config = dict(resources)
        for handle in self._remote[num_remote:]:
            self._runtime.kill(handle)
        del self._remote[num_remote:]
        for place in range(len(self._remote), num_remote):
            if place < len(self._incarnations):
                self._incarnations[place] += 1
            else:
                self._incarnations.append(self._context.incarnation)
            self._remote.append(self._start(place))
            self._send_link(place)

    def local_worker(self) -> W:
        """Return worker 0, an object of this process."""
        return self._local

    def remote_workers(self) -> list[Handle[W]]:
        """Return the list of handles of the remote workers; later calls of `replace` and `resize` change this list."""
        return self._remote

    def wait_ready(self) -> None:
        """Wait until every remote worker is built.

        With the codec "auto", which encodes messages only if this saves time, the method also measures the speed of the
        link to each worker, while the workers are still idle.

        Raises:
            StartTimeoutError: A worker did not start in time.
            StartError: A worker died while it was starting.
            Exception: The error that the constructor of a worker raised.
        """
        deadline = _START_TIMEOUT_S + _START_TIMEOUT_PER_WORKER_S * len(self._starting)
        for outcome in self._runtime.get_started(self.kind, self._starting, deadline):
            if isinstance(outcome.error, (WorkerDiedError, RayDiedError)):
                raise StartError(str(outcome.error))
            if isinstance(outcome.error, WorkerLostError):
                raise StartTimeoutError(f"{outcome.worker} did not start within {deadline:.0f} s; the machine may be "
                                        "too busy, or a constructor may hang")
            outcome.unwrap()
        self._starting = []
        if self._remote and self._local.encoder is not None and self._local.encoder.needs_link:
            self._links_s = measure_links(self._runtime, self._remote)
            for place in range(len(self._remote)):
                self._send_link(place)

    def _send_link(self, place: int) -> None:
        if self._links_s:  # a worker added after the measurement gets the mean time of all links
            known = self._links_s[place:place + 1] or self._links_s
            self._remote[place].submit(self.worker_class.set_link, sum(known) / len(known))

    def stop(self) -> object:
        """Kill all remote workers; a subclass also ends the work of the local worker."""
        for handle in self._remote:
            self._runtime.kill(handle)
        return None
