"""The ways in which gradients become updates: each is one class with `step`, chosen once when building.

That of gradient workers which average among themselves is `DecentralisedRound`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pytorchrl.errors import ConfigError, DeadlockError, ReplayError, WorkerLostError
from pytorchrl.runtime import Handle, Journal, Runtime
from pytorchrl.scheme.collection.strategies import POLL_INTERVAL_S
from pytorchrl.scheme.gradients.g_worker import GWorker
from pytorchrl.scheme.ledger import DropReason
from pytorchrl.scheme.recording.record import checksum_of
from pytorchrl.scheme.supervision.supervisor import Supervisor
from pytorchrl.scheme.transport.encoder import GRADS, WEIGHTS, Compression
from pytorchrl.scheme.transport.messages import Gradients, Moments, Weights, WholeState
from pytorchrl.scheme.transport.receive import receive
from pytorchrl.scheme.transport.requests import ENDS_OF_POLLS, Requests
from pytorchrl.scheme.transport.weight_sync import WeightSync
from pytorchrl.scheme.updates.averaging import mean_gradients, mean_info
from pytorchrl.scheme.updates.statistics import Accounts

LAG_POLICIES = ("apply", "scale", "drop")


class Round(Protocol):
    """One way of making updates."""

    def step(self) -> None:
        """Make one update and book it."""

    def rest(self) -> None:
        """The user takes over for a while: ask for whatever can be worked at meanwhile."""

    def finish(self, timeout_s: float) -> None:
        """Wait for gradients still in flight and book them as dropped."""

    def drain(self, timeout_s: float) -> None:
        """Nothing is in flight or queued anywhere after it; the next step goes on."""

    @property
    def is_between_items(self) -> bool:
        """Whether the next step begins with new data, as far as workers do so together."""

    def state(self) -> tuple[WholeState, list[dict[str, Any] | None]]:
        """What is to be saved once it is drained: the algorithm's state, and of each worker `GWorker.state`; None: it is lost."""

    def restore(self, whole: WholeState, workers: Sequence[dict[str, Any] | None]) -> None:
        """Go on from what another has saved, before the first step."""

    def begin_anew(self, seed: int) -> None:
        """See `GWorker.begin_anew`; it has been drained."""


def take_empty(accounts: Accounts, parts: Sequence[Gradients]) -> list[Gradients]:
    """Book the gradients that have nothing to learn from; the others.

    Raises:
        CollectionError: There have been too many of them in a row.
    """
    useful = []
    for part in parts:
        if part.is_empty:
            accounts.empty(part)
        else:
            useful.append(part)
    accounts.check_not_empty()
    return useful


def book(accounts: Accounts, parts: Sequence[Gradients], version: int, info: Mapping[str, float],
         applied: Mapping[str, float] | None) -> None:
    """Book an update from these gradients, of parameters of this version; or none, if `applied` is None.

    The decision is made on the mean, never by a worker for itself: whoever takes part in an update decides alike.

    Raises:
        NonFiniteUpdateError: Too many in a row were skipped.
    """
    if applied is None:
        accounts.skip(parts)
    else:
        accounts.apply(parts, version, {**info, **applied})


def _numbers_of(answer: Any) -> tuple[int, ...]:
    """What of a gradient is the same whenever the run is repeated."""
    return (answer.weights_version, checksum_of(answer.info)) if isinstance(answer, Gradients) else ()


def _seconds_of(answer: Any) -> float | None:
    """How long a gradient took its worker, waiting for data included; None for other answers."""
    return sum(answer.timings.get("gradients", {}).values()) if isinstance(answer, Gradients) else None


class HeldMoments:
    """What normalisers learn from an item waits here until the item is used up: until then they stand still."""

    def __init__(self) -> None:
        self._held: list[dict[str, Moments]] = []

    def of(self, parts: Sequence[Gradients], used_up: bool) -> tuple[dict[str, Moments], ...]:
        """Keep the moments that came with `parts`; all that are held if their item is used up, else none."""
        self._held += [moments for part in parts for moments in part.moments]
        if not used_up:
            return ()
        held, self._held = tuple(self._held), []
        return held

    def forget(self) -> None:
        """The item was given up."""
        self._held = []


class CentralRound:
    """The local GWorker computes the gradient and applies it."""

    def __init__(self, local_worker: GWorker, accounts: Accounts) -> None:
        self._local, self._accounts = local_worker, accounts
        self._held = HeldMoments()
        self._drains = 0
        self.is_between_items = True

    def step(self) -> None:
        """One update; batches without anything to learn from make none. None at all if it is to be drained."""
        while not self._step() and not self._local.collector.is_held:
            pass

    def _step(self) -> bool:
        with self._accounts.part("wait"):
            gradients = self._local.collect_and_grad()
        self._accounts.receive(gradients)
        if not take_empty(self._accounts, [gradients]):
            return False
        version, skip = self._local.actor_version, bool(gradients.info.get("skip_remaining"))
        self.is_between_items = gradients.last or skip
        moments = self._held.of([gradients], used_up=self.is_between_items)
        with self._accounts.part("apply"):
            applied = self._local.apply_gradients(gradients.vectors, moments=moments)
        book(self._accounts, [gradients], version, gradients.info, applied)
        if skip:
            self._local.skip_remaining()
        return True

    def hold(self) -> None:
        """Signal: it is to be drained; an update that waits for data is not made."""
        self._local.hold(self._drains + 1)

    def drain(self, timeout_s: float) -> None:
        """See `Round`."""
        self._drains += 1
        self._accounts.take_account(0, *self._local.drain(self._drains, timeout_s))
        self._held.forget()
        self.is_between_items = True

    def state(self) -> tuple[WholeState, list[dict[str, Any] | None]]:
        """See `Round`."""
        return self._local.whole_state(), [self._local.state()]

    def restore(self, whole: WholeState, workers: Sequence[dict[str, Any] | None]) -> None:
        """See `Round`."""
        self._local.local_worker.load_whole_state(whole)
        for state in workers:
            if state is not None:
                self._local.restore(state)

    def begin_anew(self, seed: int) -> None:
        """See `Round`."""
        self._local.begin_anew(seed)

    def rest(self) -> None:
        """Nothing goes on between two steps."""

    def finish(self, timeout_s: float) -> None:
        """Nothing is in flight between two steps."""


class RemoteRound:
    """What all rounds with remote GWorkers share: requests with weights that are put once per version."""

    def __init__(self, local_worker: GWorker, workers: Sequence[Handle[GWorker]], runtime: Runtime,
                 accounts: Accounts, request_timeout_s: float, supervisor: Supervisor, journal: Journal,
                 compress_weights: Compression | None = None) -> None:
        self._local, self._workers, self._runtime, self._accounts = local_worker, workers, runtime, accounts
        self._timeout_s, self._supervisor, self._journal = request_timeout_s, supervisor, journal
        accounts.num_workers, accounts.missing = len(workers), supervisor.gone
        self._weight_sync = WeightSync(runtime, compress_weights, getattr(local_worker.algo, "groups", ()), workers)
        self._versions = [-1] * len(workers)
        self._drains, self._is_draining = 0, False
        # Touched by the thread that steps only, or after it has ended.
        self._in_flight: Requests[Any] = Requests(
            runtime, supervisor, journal, _seconds_of, _numbers_of, self._lost, self._replaced)

    def _weights_for(self, index: int) -> Weights | None:
        """A reference to the newest weights if the worker lacks them; it receives a `Weights`."""
        version = self._local.actor_version
        if self._versions[index] == version:
            return None
        if not self._weight_sync.has(version):
            with self._accounts.part("push"):
                self._weight_sync.put(self._local.get_weights(learning=True))
        self._versions[index] = version
        self._accounts.weight_pushes += 1
        self._weight_sync.count()
        self._accounts.bytes_out, self._accounts.traffic[WEIGHTS] = self._weight_sync.bytes_out, self._weight_sync.traffic
        return self._weight_sync.reference

    def _receive(self, answer: Any) -> Any:
        """Return a worker's answer; the vectors of a gradient are decoded."""
        if not isinstance(answer, Gradients):
            return answer
        with self._accounts.part("decode"):
            gradients, traffic = receive(answer, self._runtime.now)
        self._accounts.traffic[GRADS] += traffic
        return gradients

    def forget_weights(self) -> None:
        """A parameter was changed: every worker gets the weights anew with its next request."""
        self._versions = [-1] * len(self._workers)
        self._weight_sync.forget()

    def _lost(self, index: int) -> None:
        """A worker is lost, with what it held."""
        self._versions[index] = -1
        self._accounts.lose(index + 1)

    def _replaced(self, index: int) -> None:
        """Another worker is in its place."""
        self._accounts.restarts = self._supervisor.restarts

    def _gather_all(self) -> list[Any]:
        """Every request in flight, in worker order; the first error is raised."""
        done: dict[int, Gradients] = {}
        with self._accounts.part("wait"):
            while len(self._in_flight) or self._supervisor.is_replacing:
                done.update((index, self._receive(answer)) for index, answer in self._in_flight.poll(POLL_INTERVAL_S))
        self._accounts.add_send_s(self._in_flight.take_send_s())
        return [done[index] for index in sorted(done)]

    def rest(self) -> None:
        """Nothing is asked for between two steps."""

    def drain(self, timeout_s: float) -> None:
        """Let running requests end, and every worker bring to an end what is below it; those that do not are lost.

        Raises:
            Exception: Whatever ended a worker; what the supervisor makes of a lost one.
        """
        deadline = self._runtime.now() + timeout_s
        self._drains += 1
        self._is_draining = True
        try:
            for index, handle in enumerate(self._workers):
                if index not in self._supervisor.gone:
                    handle.signal(GWorker.hold, self._drains)
                    # What it is busy with below gets most of the time, so that it can still answer itself.
                    self._in_flight.add(index, handle.submit(GWorker.drain, self._drains, 0.8 * timeout_s))
            while len(self._in_flight) and self._runtime.now() < deadline:
                for index, answer in self._in_flight.poll(POLL_INTERVAL_S):
                    if isinstance(answer, Gradients):
                        self._accounts.receive(answer)
                        if take_empty(self._accounts, [answer]):
                            self._accounts.drop(answer, DropReason.SHUTDOWN)
                    else:
                        self._accounts.take_account(index + 1, *answer)
            for index in sorted(set(self._in_flight.owners())):
                self._in_flight.lose(index, WorkerLostError(f"{self._workers[index].name} gave no answer until the end of drain()"))
        finally:
            self._is_draining = False
            self._in_flight.forget_waits()

    @property
    def is_between_items(self) -> bool:
        """Always: where each worker has items of its own, there is no moment that is so for all of them."""
        return True

    def state(self) -> tuple[WholeState, list[dict[str, Any] | None]]:
        """See `Round`."""
        return self._whole(), self._call_all(GWorker.state, dict.fromkeys(range(len(self._workers)), ()))

    def _whole(self) -> WholeState:
        return self._local.whole_state()

    def restore(self, whole: WholeState, workers: Sequence[dict[str, Any] | None]) -> None:
        """See `Round`."""
        self._local.local_worker.load_whole_state(whole)
        self._call_all(GWorker.restore, {index: (state,) for index, state in enumerate(workers) if state is not None})

    def begin_anew(self, seed: int) -> None:
        """See `Round`."""
        self._call_all(GWorker.begin_anew, dict.fromkeys(range(len(self._workers)), (seed,)))

    def _call_all(self, method: Any, arguments: Mapping[int, tuple[Any, ...]]) -> list[Any]:
        """What every worker answers, in order; None of one that is lost, about which the next step decides."""
        calls = {index: self._workers[index].submit(method, *own) for index, own in arguments.items()
                 if index not in self._supervisor.gone}
        answers: list[Any] = [None] * len(self._workers)
        for index, outcome in zip(calls, self._runtime.get_all(list(calls.values()), self._timeout_s), strict=True):
            if isinstance(outcome.error, WorkerLostError):
                self._in_flight.lose(index, outcome.error)
            else:
                answers[index] = outcome.unwrap()
        return answers

    def finish(self, timeout_s: float) -> None:
        """Take what comes within the deadline, and book it as dropped."""
        for outcome in self._in_flight.finish(timeout_s):
            if isinstance(outcome.value, Gradients):
                self._accounts.receive(outcome.value)
                self._accounts.drop(outcome.value, DropReason.SHUTDOWN)


class SyncRound(RemoteRound):
    """One gradient from every remote GWorker, averaged into one update.

    A round is never silently smaller. If a worker is lost, the item that it was working on is lost with it, and the others
    give theirs up too, so that all go on side by side; the round is then made again with the replacement.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._used_up, self._skip, self._was_lost = True, False, False
        self._held = HeldMoments()

    def _lost(self, index: int) -> None:
        super()._lost(index)
        self._was_lost = True

    def _ask(self, method: Any, **kwargs: Any) -> list[Any] | None:
        """What every worker answers, in order; None if one was lost meanwhile."""
        self._was_lost = False
        for index, handle in enumerate(self._workers):
            if index not in self._supervisor.gone:
                self._in_flight.add(index, handle.submit(
                    method, self._weights_for(index), skip_remaining=self._skip, **kwargs))
        answers = self._gather_all()
        for answer in answers:
            if not isinstance(answer, Gradients):
                self._accounts.add_part(answer[1])
        if not self._was_lost:
            return answers
        for answer in answers:
            if isinstance(answer, Gradients):
                self._accounts.receive(answer)
                self._accounts.drop(answer, DropReason.WORKER_LOST)
                self._held.of([answer], used_up=False)
        self._used_up = self._skip = True
        return None

    def _ask_for_gradients(self) -> list[Gradients] | None:
        advantage_moments: list[Moments] | None = None
        if self._used_up and self._local.algo.advantage_normalization == "batch":
            prepared = self._ask(GWorker.prepare)
            if prepared is None:
                return None
            advantage_moments = [moments for moments, _ in prepared]
            self._skip = False
        return self._ask(GWorker.collect_and_grad, advantage_moments=advantage_moments)

    def drain(self, timeout_s: float) -> None:
        """See `RemoteRound`; all begin with new items then."""
        super().drain(timeout_s)
        self._used_up, self._skip = True, False
        self._held.forget()

    @property
    def is_between_items(self) -> bool:
        """See `Round`."""
        return self._used_up

    def step(self) -> None:
        """Weights out, gradients in, one update."""
        while not self._step():
            pass

    def _step(self) -> bool:
        parts = None
        while parts is None:
            parts = self._ask_for_gradients()
        for part in parts:
            self._accounts.receive(part)
        if all(part.is_empty for part in parts):
            take_empty(self._accounts, parts)
            self._held.of(parts, used_up=False)
            self._used_up, self._skip = parts[0].last, False
            return False
        info, version = mean_info(parts), self._local.actor_version
        # Decided once, on the mean, so that all workers agree.
        self._skip = bool(info.get("skip_remaining")) and self._local.algo.skip_remaining(info)
        self._used_up = self._skip or parts[0].last
        moments = self._held.of(parts, self._used_up)
        with self._accounts.part("decode"):
            mean = mean_gradients([part for part in parts if not part.is_empty])
        with self._accounts.part("apply"):
            applied = self._local.apply_gradients(mean, moments=moments)
        book(self._accounts, take_empty(self._accounts, parts), version, info, applied)
        return True


@dataclass(frozen=True)
class LagRule:
    """What becomes of a gradient by its lag, the updates between its weights and those that it would be applied to.

    Attributes:
        max_lag: Up to here every gradient is applied as it is; None: there is no limit.
        policy: Above it: "apply" (as it is, but counted), "scale" or "drop".
    """

    max_lag: int | None = None
    policy: str = "apply"

    def __post_init__(self) -> None:
        if self.policy not in LAG_POLICIES:
            raise ConfigError(f"lag_policy must be one of {list(LAG_POLICIES)}, got {self.policy!r}")
        if self.max_lag is None and self.policy != "apply":
            raise ConfigError(f"lag_policy={self.policy!r} needs max_grad_lag, got None; give the lag that is still good")

    def is_late(self, lag: int) -> bool:
        """Whether a lag is above the limit."""
        return self.max_lag is not None and lag > self.max_lag

    def factor(self, lag: int) -> float:
        """What a gradient of this lag is multiplied by, 0 to drop it: (1 + m) / (1 + lag) above the limit m, if it scales."""
        if not self.is_late(lag) or self.policy == "apply":
            return 1.0
        assert self.max_lag is not None
        return (1 + self.max_lag) / (1 + lag) if self.policy == "scale" else 0.0


class AsyncRound(RemoteRound):
    """One chain (weights, data, gradient) per remote GWorker, in flight also between two steps.

    All gradients that are ready are taken at once and handled in the order in which they were asked for; then all whose
    gradient was applied or dropped are asked again, with the same weights. Who has sent a gradient that is held waits
    for its update: a worker's next gradient sees what its last one did.

    Args:
        args: Those of every round with remote workers.
        aggregate: Gradients of different workers that make an update.
        lag_rule: What becomes of late ones.
    """

    def __init__(self, *args: Any, aggregate: int = 1, lag_rule: LagRule | None = None) -> None:
        super().__init__(*args)
        self._aggregate, self._lag_rule = aggregate, lag_rule or LagRule()
        self._moments = [HeldMoments() for _ in self._workers]
        # Between two calls of step() a worker is in exactly one of: a request in flight, _ready, _held, _to_ask (empty
        # after rest()), and the supervisor's gone.
        self._ready: deque[tuple[int, Gradients]] = deque()  # in order of dispatch
        self._held: dict[int, tuple[Gradients, float]] = {}  # with their factors
        self._to_ask: dict[int, bool] = {}  # in order, and whether what is left of the item is to be skipped
        self._error: Exception | None = None
        self._started = False
        self._has_updated = True  # since gradients were last taken

    def step(self) -> None:
        """Make one update from the next gradients.

        Raises:
            Exception: Whatever ended a worker, once the gradients that came with that news are used.
        """
        if not self._started:
            self._started = True
            self._to_ask = {index: False for index in range(len(self._workers)) if index not in self._supervisor.gone}
        while len(self._held) < self._num_needed:
            if self._ready:
                self._handle(*self._ready.popleft())
                continue
            self.rest()
            if self._error is not None:
                raise self._error
            with self._accounts.part("wait"):
                self._take_ready()
        self._update()

    @property
    def _num_needed(self) -> int:
        """Gradients of an update: no more than there are workers, those to be replaced included."""
        gone = 0 if self._supervisor.is_replacing else len(self._supervisor.gone)
        return min(self._aggregate, len(self._workers) - gone)

    def rest(self) -> None:
        """Ask again everybody whose gradient is done with."""
        if self._to_ask and not self._has_updated:
            # Who repeats the run would else not know that no answer that comes later was there yet.
            self._journal.note("asked", next(iter(self._to_ask)))
        to_ask, self._to_ask = self._to_ask, {}
        for index, skip in to_ask.items():
            self._request(index, skip)

    def _take_ready(self) -> None:
        """Wait until a gradient is there, and take all that are; the first error is kept until they are used."""
        self._has_updated = False
        timeout_s, replaying = POLL_INTERVAL_S, self._journal.upcoming() is not None
        while True:
            num_open = len(self._in_flight)
            try:
                for index, gradients in self._in_flight.poll(timeout_s):
                    self._accounts.receive(gradients)
                    self._ready.append((index, self._receive(gradients)))
                break
            except (ReplayError, DeadlockError):  # the run cannot go on at all
                raise
            except Exception as error:  # noqa: BLE001 - raised by step(), once the good results are used
                self._error = self._error or error
                was_last = replaying and (self._journal.upcoming() or ENDS_OF_POLLS)[0] in ENDS_OF_POLLS
                if was_last or len(self._in_flight) == num_open:
                    break
                timeout_s = 0.0  # what else is there already

    def _handle(self, index: int, gradients: Gradients) -> None:
        if not take_empty(self._accounts, [gradients]):
            self._moments[index].of([gradients], used_up=False)
            self._to_ask[index] = False
            return
        lag = self._local.actor_version - gradients.weights_version
        factor = self._lag_rule.factor(lag)
        if self._lag_rule.is_late(lag):
            self._accounts.grads_late += 1
        if factor:
            self._held[index] = (gradients, factor)
            return
        self._accounts.drop(gradients, DropReason.GRADIENT_LAG)
        self._moments[index].of([gradients], used_up=False)
        skip = bool(gradients.info.get("skip_remaining"))
        if gradients.last or skip:
            self._moments[index].forget()
        self._to_ask[index] = skip

    def _update(self) -> None:
        """Apply the mean of what is held, in worker order; whoever sent it is to be asked again, in order of dispatch."""
        order = list(self._held)
        parts, factors = zip(*(self._held[index] for index in sorted(order)), strict=True)
        self._held, self._has_updated = {}, True
        skips = {part.worker - 1: bool(part.info.get("skip_remaining")) for part in parts}
        moments = tuple(found for index, part in zip(sorted(order), parts, strict=True)
                        for found in self._moments[index].of([part], used_up=part.last or skips[index]))
        version = self._local.actor_version
        with self._accounts.part("decode"):
            mean = mean_gradients(parts, factors)
        with self._accounts.part("apply"):
            applied = self._local.apply_gradients(mean, moments=moments)
        self._to_ask.update((index, skips[index]) for index in order)
        book(self._accounts, parts, version, mean_info(parts), applied)

    def _request(self, index: int, skip: bool) -> None:
        self._in_flight.add(index, self._workers[index].submit(
            GWorker.collect_and_grad, self._weights_for(index), skip_remaining=skip))

    def _replaced(self, index: int) -> None:
        super()._replaced(index)
        self._moments[index] = HeldMoments()
        if not self._is_draining:
            self._request(index, skip=False)

    def drain(self, timeout_s: float) -> None:
        """See `RemoteRound`; gradients that were not applied are given up, and the next step begins as the first did."""
        self._give_up_gradients()
        super().drain(timeout_s)
        self._to_ask, self._started = {}, False

    def finish(self, timeout_s: float) -> None:
        """Book finished and unfinished chains as dropped."""
        self._give_up_gradients()
        super().finish(timeout_s)

    def _give_up_gradients(self) -> None:
        for gradients in [*(gradients for _, gradients in self._ready), *(gradients for gradients, _ in self._held.values())]:
            self._accounts.drop(gradients, DropReason.SHUTDOWN)
        self._ready.clear()
        self._held.clear()
