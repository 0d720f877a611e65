"""Handle requests, weights, drains and saved states for all update strategies with remote gradient workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Concatenate, TypeVar

from typing_extensions import override

from pytorchrl.agent.contracts import check_gradients
from pytorchrl.errors import WorkerLostError
from pytorchrl.runtime import Handle, Journal, Runtime
from pytorchrl.scheme.gradients.g_worker import GWorker
from pytorchrl.scheme.ledger import DropReason
from pytorchrl.scheme.recording.record import checksum_of
from pytorchrl.scheme.supervision.supervisor import Supervisor
from pytorchrl.scheme.transport.encoder import GRADS, WEIGHTS, Compression
from pytorchrl.scheme.transport.messages import Gradients, Weights, WholeState
from pytorchrl.scheme.transport.receive import receive
from pytorchrl.scheme.transport.requests import POLL_INTERVAL_S, Requests
from pytorchrl.scheme.transport.weight_sync import WeightSync
from pytorchrl.scheme.updates.statistics import Statistics
from pytorchrl.scheme.updates.strategy import UpdateStrategy, WorkerState, discard_empty
from pytorchrl.support.untyped import Answer

R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class Collaborators:
    """The components of the worker tree that are passed to a strategy with remote gradient workers."""

    local_worker: GWorker
    """The worker with the current parameters; it computes no gradients."""
    workers: Sequence[Handle[GWorker]]
    """The remote gradient workers, by index; the handle of a replacement overwrites the lost worker's handle."""
    runtime: Runtime
    statistics: Statistics
    supervisor: Supervisor
    """The supervisor of `workers`."""
    journal: Journal
    request_timeout_s: float
    """Seconds that a worker may take to save or restore its state."""
    compress_weights: Compression | None = None


def _numbers_of(answer: object) -> tuple[int, ...]:
    """Return numbers by which a replayed answer is compared with the recorded one.

    For a gradient, they are (weights version, checksum of `info`). For any other answer, the tuple is empty.
    """
    return (answer.weights_version, checksum_of(answer.info)) if isinstance(answer, Gradients) else ()


def _seconds_of(answer: object) -> float | None:
    """Return the seconds of work and waiting that a worker reports with its gradient; None if there is no report."""
    return (sum(answer.report.timings.get("gradients", {}).values())
            if isinstance(answer, Gradients) and answer.report is not None else None)


class RemoteUpdates(UpdateStrategy):
    """The base class of strategies with remote gradient workers.

    The weights of each version are stored once; requests contain a reference to the stored weights.

    Args:
        tree: The components of the worker tree that the strategy uses.

    Attributes:
        supervisor: The supervisor of the gradient workers.
        in_flight: The requests that are not yet answered.
    """

    def __init__(self, tree: Collaborators) -> None:
        self._local, self._workers, self._runtime = tree.local_worker, tree.workers, tree.runtime
        self._statistics, self._journal, self._timeout_s = tree.statistics, tree.journal, tree.request_timeout_s
        self.supervisor = tree.supervisor
        self._statistics.num_workers, self._statistics.missing = len(self._workers), self.supervisor.gone
        self._weight_sync = WeightSync(
            self._runtime, tree.compress_weights, getattr(self._local.algo, "groups", ()), self._workers)
        self._versions = [-1] * len(self._workers)
        self._num_drains, self._is_draining = 0, False
        # Not thread-safe: other threads may use the requests only after the thread that makes updates has ended.
        self.in_flight: Requests[Answer] = Requests(
            self._runtime, self.supervisor, self._journal, _seconds_of, _numbers_of, self._on_lost, self._on_replaced)

    def _weights_for(self, index: int) -> Weights | None:
        """Return the reference to the newest `Weights`, to send with a request; None if the worker has them already."""
        version = self._local.actor_version
        if self._versions[index] == version:
            return None
        if not self._weight_sync.has(version):
            with self._statistics.timed("push"):
                self._weight_sync.put(self._local.get_weights(learning=True))
        self._versions[index] = version
        self._statistics.counters.weight_pushes += 1
        self._weight_sync.count()
        self._statistics.counters.bytes_out = self._weight_sync.bytes_out
        self._statistics.traffic[WEIGHTS] = self._weight_sync.traffic
        return self._weight_sync.reference

    def _receive(self, answer: Answer) -> Answer:
        """Return a worker's answer; if the answer is a gradient, decode its vectors, and check them if required."""
        if not isinstance(answer, Gradients):
            return answer
        with self._statistics.timed("decode"):
            gradients, traffic = receive(answer, self._runtime.now)
        self._statistics.traffic[GRADS] += traffic
        if self._local.batch_source.check is not None and gradients.vectors:
            check_gradients(self._local.algo, f"compute_gradients() in GWorker {gradients.worker}", gradients.vectors)
        return gradients

    @override
    def forget_weights(self) -> None:
        self._versions = [-1] * len(self._workers)
        self._weight_sync.forget()

    def _on_lost(self, index: int) -> None:
        """Record the loss of a worker and of its unused env steps."""
        self._versions[index] = -1
        self._statistics.tree_ledger.lose(index + 1)

    def _on_replaced(self, index: int) -> None:
        """Count the restart of a worker."""
        self._statistics.counters.restarts_by_worker[index + 1] += 1

    def _gather_all(self) -> list[Answer]:
        """Wait for all requests in flight, and return the answers in worker order; raise the first error."""
        done: dict[int, Answer] = {}
        with self._statistics.timed("wait"):
            while len(self.in_flight) or self.supervisor.is_replacing:
                done.update((index, self._receive(answer)) for index, answer in self.in_flight.poll(POLL_INTERVAL_S))
        self._statistics.add_send_s(self.in_flight.take_send_s())
        return [done[index] for index in sorted(done)]

    @override
    def drain(self, timeout_s: float) -> None:
        """Wait for requests in flight, and drain each gradient worker, so that nothing is in flight or queued.

        Workers that do not answer within `timeout_s` seconds are considered lost.

        Raises:
            Exception: The error of a worker, or the supervisor's error for a lost worker.
        """
        deadline = self._runtime.now() + timeout_s
        self._num_drains += 1
        self._is_draining = True
        try:
            for index, handle in enumerate(self._workers):
                if index not in self.supervisor.gone:
                    handle.signal(GWorker.announce_drain, self._num_drains)
                    # A gradient worker waits for its workers for only 80 % of `timeout_s`, so that it can still answer.
                    self.in_flight.add(index, handle.submit(GWorker.drain, self._num_drains, 0.8 * timeout_s))
            while len(self.in_flight) and self._runtime.now() < deadline:
                for index, answer in self.in_flight.poll(POLL_INTERVAL_S):
                    if isinstance(answer, Gradients):
                        self._statistics.receive(answer)
                        if discard_empty(self._statistics, [answer]):
                            self._statistics.drop(answer, DropReason.SHUTDOWN)
                    else:
                        self._statistics.tree_ledger.report(index + 1, *answer)
            for index in sorted(set(self.in_flight.owners())):
                self.in_flight.lose(index, WorkerLostError(
                    f"{self._workers[index].name} did not answer before the timeout of drain()"))
        finally:
            self._is_draining = False
            self.in_flight.forget_waits()

    @override
    def state(self) -> tuple[WholeState, list[WorkerState | None]]:
        return self._whole_state(), self._call_all(GWorker.state, dict.fromkeys(range(len(self._workers)), ()))

    def _whole_state(self) -> WholeState:
        return self._local.whole_state()

    @override
    def restore(self, whole: WholeState, workers: Sequence[WorkerState | None]) -> None:
        self._local.local_worker.load_whole_state(whole)
        self._call_all(GWorker.restore, {index: (state,) for index, state in enumerate(workers) if state is not None})

    @override
    def reseed(self, seed: int) -> None:
        self._call_all(GWorker.reseed, dict.fromkeys(range(len(self._workers)), (seed,)))

    @override
    def resize(self, num_col_workers: int | tuple[int, ...], resources: Mapping[str, float] | None) -> None:
        arguments = (num_col_workers, resources)
        self._call_all(GWorker.resize, dict.fromkeys(range(len(self._workers)), arguments))

    def _call_all(self, method: Callable[Concatenate[GWorker, ...], R],
                  arguments: Mapping[int, tuple[object, ...]]) -> list[R | None]:
        """Call a method of the workers with the given arguments; return the answers in worker order.

        The answer of a worker that is lost is None.
        """
        calls = {index: self._workers[index].submit(method, *own) for index, own in arguments.items()
                 if index not in self.supervisor.gone}
        answers: list[R | None] = [None] * len(self._workers)
        for index, outcome in zip(calls, self._runtime.get_all(list(calls.values()), self._timeout_s), strict=True):
            if isinstance(outcome.error, WorkerLostError):
                self.in_flight.lose(index, outcome.error)
            else:
                answers[index] = outcome.unwrap()
        return answers

    @override
    def finish(self, timeout_s: float) -> None:
        for outcome in self.in_flight.finish(timeout_s):
            if isinstance(outcome.value, Gradients):
                self._statistics.receive(outcome.value)
                self._statistics.drop(outcome.value, DropReason.SHUTDOWN)
