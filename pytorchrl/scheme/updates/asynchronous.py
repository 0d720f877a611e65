"""Asynchronous updates: gradients of remote gradient workers are applied without waiting for all workers."""

from __future__ import annotations

from collections import deque
from typing import TypeAlias

from pytorchrl.errors import DeadlockError, ReplayError
from pytorchrl.scheme.gradients.g_worker import GWorker
from pytorchrl.scheme.ledger import DropReason
from pytorchrl.scheme.options.updates import AsynchronousUpdatesOptions
from pytorchrl.scheme.transport.messages import Gradients, Moments
from pytorchrl.scheme.transport.requests import ENDS_OF_POLLS, POLL_INTERVAL_S
from pytorchrl.scheme.updates.averaging import mean_gradients, mean_info
from pytorchrl.scheme.updates.remote import Collaborators, RemoteUpdates
from pytorchrl.scheme.updates.strategy import PendingMoments, discard_empty, record_update


class AsynchronousUpdates(RemoteUpdates):
    """Updates from the gradients that have arrived so far. Requests stay in flight between two calls of `step`.

    A gradient that arrives is either dropped, or waits until enough gradients for an update have arrived. Before `step`
    waits for further gradients, it sends new requests with the newest weights to all workers whose gradients were
    applied or dropped. A worker whose gradient waits for an update receives its next request only after this update,
    so that its next gradient is computed with the updated weights. Gradients that arrive at the same time are handled
    in the order of their requests.

    Args:
        tree: The components of the worker tree that the updates use.
        options: Number of gradients per update, and treatment of late gradients.

    Attributes:
        error: The first error of a worker. `step` first uses the gradients that arrived before or with this error, and
            then raises the error.
    """

    Options: TypeAlias = AsynchronousUpdatesOptions

    def __init__(self, tree: Collaborators, options: Options) -> None:
        super().__init__(tree)
        self._options = options
        self._moments = [PendingMoments() for _ in self._workers]
        # Owner of the next three attributes: the thread that makes updates. `invariant` relates them to `in_flight`.
        self._ready: deque[tuple[int, Gradients]] = deque()  # ready gradients, in the order of their requests
        # The gradients for the next update, by index of the worker, each with the factor for its lag.
        self._waiting: dict[int, tuple[Gradients, float]] = {}
        # The workers that get the next requests, and whether each of them skips the remaining passes over its data.
        self._to_request: dict[int, bool] = {}
        self.error: Exception | None = None
        self._started = False
        self._has_updated = True  # whether an update was made after the last call of _take_ready()

    def step(self) -> None:
        """Make one update from the next gradients.

        Raises:
            Exception: The error of a worker. The gradients that arrived with the error are used first.
        """
        self.start()
        while len(self._waiting) < max(1, self._num_needed):  # `_num_needed` is 0 if all workers are lost
            if self._ready:
                self._handle(*self._ready.popleft())
                continue
            self.send_requests()
            if self.error is not None:
                raise self.error
            with self._statistics.timed("wait"):
                self._take_ready()
        self._update()

    def invariant(self) -> bool:
        """Return whether each worker is in exactly one place, which holds after `send_requests` unless `error` is set.

        The worker has a request in flight, its gradient is ready, its gradient waits for an update, or it is lost.
        """
        places = [*self.in_flight.owners(), *self.ready, *self.waiting, *self.supervisor.gone]
        return sorted(places) == list(range(len(self._workers)))

    def start(self) -> None:
        """Plan a request to every worker that is not lost. Later calls do nothing until the next drain."""
        if not self._started:
            self._started = True
            self._to_request = {
                index: False for index in range(len(self._workers)) if index not in self.supervisor.gone}

    @property
    def ready(self) -> list[int]:
        """Indices of the workers whose gradients are ready but not yet handled, in the order of their requests."""
        return [index for index, _ in self._ready]

    @property
    def waiting(self) -> list[int]:
        """Indices of the workers whose gradients wait for the other gradients of their update."""
        return list(self._waiting)

    @property
    def _num_needed(self) -> int:
        """Number of gradients per update: `aggregate`, or the number of workers if that is smaller.

        A lost worker is included only if it will be replaced.
        """
        gone = 0 if self.supervisor.is_replacing else len(self.supervisor.gone)
        return min(self._options.aggregate, len(self._workers) - gone)

    def send_requests(self) -> None:
        """Send new requests to all workers whose gradients were applied or dropped."""
        if self._to_request and not self._has_updated:
            # Mark in the journal where the last call of `_take_ready` ended, because no event "update" marks the end.
            # When the recorded run is repeated, each call can thus take the same gradients as before.
            self._journal.note("asked", next(iter(self._to_request)))
        to_request, self._to_request = self._to_request, {}
        for index, skip in to_request.items():
            self._request(index, skip)

    def _take_ready(self) -> None:
        """Wait until a gradient is ready, and take all ready gradients; store the first error for `step`."""
        self._has_updated = False
        timeout_s, replaying = POLL_INTERVAL_S, self._journal.upcoming() is not None
        while True:
            num_open = len(self.in_flight)
            try:
                for index, gradients in self.in_flight.poll(timeout_s):
                    self._statistics.receive(gradients)
                    self._ready.append((index, self._receive(gradients)))
                break
            except (ReplayError, DeadlockError):  # after these errors, the run cannot continue
                raise
            except Exception as error:  # noqa: BLE001 - `step` uses the gradients that arrived, then raises the error
                self.error = self.error or error
                was_last = replaying and (self._journal.upcoming() or ENDS_OF_POLLS)[0] in ENDS_OF_POLLS
                if was_last or len(self.in_flight) == num_open:
                    break
                timeout_s = 0.0  # take only answers that have already arrived

    def _handle(self, index: int, gradients: Gradients) -> None:
        """Keep a gradient for the next update, or drop it if it is empty or too old (`Options.factor` returns 0)."""
        if not discard_empty(self._statistics, [gradients]):
            self._moments[index].add([gradients])
            self._to_request[index] = False
            return
        lag = self._local.actor_version - gradients.weights_version
        factor = self._options.factor(lag)
        if self._options.is_late(lag):
            self._statistics.counters.grads_late += 1
        if factor:
            self._waiting[index] = (gradients, factor)
            return
        self._statistics.drop(gradients, DropReason.GRADIENT_LAG)
        self._moments[index].add([gradients])
        skip = bool(gradients.info.get("skip_remaining"))
        if gradients.last or skip:
            self._moments[index].discard()
        self._to_request[index] = skip

    def _update(self) -> None:
        """Apply the mean of the waiting gradients, and plan new requests to their workers.

        Gradients are summed in the order of the workers' indices, so that the sum does not depend on the order of
        arrival. The new requests are sent in the order in which `_handle` accepted the gradients.
        """
        order = list(self._waiting)
        gradients, factors = zip(*(self._waiting[index] for index in sorted(order)), strict=True)
        self._waiting, self._has_updated = {}, True
        skips = {gradient.worker - 1: bool(gradient.info.get("skip_remaining")) for gradient in gradients}
        moments: list[dict[str, Moments]] = []
        for index, gradient in zip(sorted(order), gradients, strict=True):
            self._moments[index].add([gradient])
            if gradient.last or skips[index]:
                moments.extend(self._moments[index].take())
        version = self._local.actor_version
        with self._statistics.timed("decode"):
            mean = mean_gradients(gradients, factors)
        with self._statistics.timed("apply"):
            applied = self._local.apply_gradients(mean, moments=tuple(moments))
        if applied is None:
            self.forget_weights()  # the version is the same, but normalizers and scheduled parameters have changed
        self._to_request.update((index, skips[index]) for index in order)
        record_update(self._statistics, gradients, version, mean_info(gradients), applied)

    def _request(self, index: int, skip: bool) -> None:
        self.in_flight.add(index, self._workers[index].submit(
            GWorker.collect_and_grad, self._weights_for(index), skip_remaining=skip))

    def _on_replaced(self, index: int) -> None:
        super()._on_replaced(index)
        self._moments[index] = PendingMoments()
        if not self._is_draining:
            self._request(index, skip=False)

    def drain(self, timeout_s: float) -> None:
        """Drop the gradients that were not applied, then drain as `RemoteUpdates` does.

        The next step sends requests to all workers again.
        """
        self._drop_gradients()
        super().drain(timeout_s)
        self._to_request, self._started = {}, False

    def finish(self, timeout_s: float) -> None:
        """Drop all gradients that were not applied, including gradients in flight, and record them as dropped."""
        self._drop_gradients()
        super().finish(timeout_s)

    def _drop_gradients(self) -> None:
        waiting = [gradients for gradients, _ in self._waiting.values()]
        for gradients in [*(gradients for _, gradients in self._ready), *waiting]:
            self._statistics.drop(gradients, DropReason.SHUTDOWN)
        self._ready.clear()
        self._waiting.clear()
        for pending in self._moments:  # the workers drop the train batches to which these moments belong
            pending.discard()
