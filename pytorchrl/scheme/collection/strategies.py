"""The ways in which a CollectorThread gets rollouts: from the local worker, at a barrier, as they arrive, or as they are needed."""

from __future__ import annotations

import math
import zlib
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from pytorchrl.agent.options import Options as BaseOptions
from pytorchrl.agent.options import option
from pytorchrl.errors import CollectionError, ConfigError, WorkerLostError
from pytorchrl.runtime import Handle, Journal, Runtime
from pytorchrl.scheme.collection.c_worker import CWorker
from pytorchrl.scheme.supervision.supervisor import Supervisor
from pytorchrl.scheme.transport.codecs import decode_array
from pytorchrl.scheme.transport.encoder import Compression, Traffic
from pytorchrl.scheme.transport.messages import Rollout, Weights
from pytorchrl.scheme.transport.requests import Requests
from pytorchrl.scheme.transport.weight_sync import WeightSync

# A waiting thread looks up this often to see whether it should end; results wake it at once.
POLL_INTERVAL_S = 0.1
# While workers are held back until the learner has gone on, which wakes nobody.
_HELD_BACK_INTERVAL_S = 0.01

Deliver = Callable[[list[Rollout]], None]
Due = Callable[[int, int], bool]
"""Whether a worker is to be given new weights: of the version it has, and the env steps it has delivered with it."""


def _numbers_of(rollout: Rollout) -> tuple[int, ...]:
    """Env steps, version, a checksum of actions and rewards, and steps if it was cut short."""
    checksum = 0
    for array in (array for part in rollout.data.parts.values() for array in (part.action, part.reward)):
        checksum = zlib.crc32(np.ascontiguousarray(decode_array(array)).data, checksum)
    return rollout.num_env_steps, rollout.weights_version, checksum, rollout.num_steps if rollout.preempted else 0


class Gather(Protocol):
    """One way of gathering: `step` delivers what it got; `finish` gives what was still asked for."""

    def step(self, deliver: Deliver) -> None:
        """Gather once and hand it on."""

    pushes: int
    """Weights given to single workers so far."""

    @property
    def bytes_out(self) -> int:
        """Bytes of those weights."""

    @property
    def traffic(self) -> Traffic:
        """How they were sent."""

    def push(self, weights: Callable[[], Weights], due: Due, only: int | None = None) -> bool:
        """Attach new weights to the next request of every worker (or of one) for which they are due."""

    def ages(self) -> list[tuple[int, int]]:
        """Version of the weights that each worker was last given, and env steps it has delivered since."""

    def state(self) -> tuple[int, int]:
        """Live workers, and requests in flight."""

    def finish(self, timeout_s: float) -> list[Rollout]:
        """Wait for what is still in flight; dead workers have nothing."""

    def drain(self, deliver: Deliver, deadline: float) -> None:
        """Deliver what is in flight and ask for nothing; workers that give nothing before the deadline are lost."""

    @property
    def restarts(self) -> int:
        """Workers replaced so far."""

    delivered_by_lost: int
    """Env steps in the rollouts of workers that were lost since; nobody else knows them."""


class LocalGather:
    """The local worker collects with the learner's own parameters, so there is nothing to push."""

    def __init__(self, local_worker: CWorker) -> None:
        self._local_worker, self._journal = local_worker, local_worker.journal
        self.pushes = self.bytes_out = self.restarts = self.delivered_by_lost = 0
        self.traffic = Traffic()

    def step(self, deliver: Deliver) -> None:
        """Collect one rollout in the caller's thread."""
        recorded = self._journal.upcoming_of("answer", 0)
        if recorded is not None and recorded[-1]:  # cut short in the run that is replayed: at the same step again
            self._local_worker.preempt_next(recorded[-1])
        rollout = self._local_worker.collect()
        if self._journal.is_kept:
            self._journal.note("answer", 0, *_numbers_of(rollout))
        deliver([rollout])

    def push(self, weights: Callable[[], Weights], due: Due, only: int | None = None) -> bool:
        """Nothing: it shares the learner's parameters."""
        return False

    def ages(self) -> list[tuple[int, int]]:
        """The learner's own version."""
        return [(self._local_worker.version, 0)]

    def state(self) -> tuple[int, int]:
        """There is one, at work only within a step."""
        return 1, 0

    def finish(self, timeout_s: float) -> list[Rollout]:
        """Nothing is ever in flight between two steps."""
        return []

    def drain(self, deliver: Deliver, deadline: float) -> None:
        """Nothing is ever in flight between two steps."""


class _RemoteGather:
    """What the barrier and the free-running way share: requests, the weights that go with them, lost workers.

    Args:
        workers: The remote workers; replacements take the place of lost ones.
        runtime: Where they run.
        supervisor: Decides about lost workers.
        journal: That of the GWorker.
        refresh: Called with a worker's index before it is asked again: the moment for new weights.
        compress: What becomes of weights on their way.
        parameters: Names of vectors of parameters among them.
    """

    def __init__(self, workers: Sequence[Handle[CWorker]], runtime: Runtime, supervisor: Supervisor, journal: Journal,
                 refresh: Callable[[int], object], *, compress: Compression | None = None, parameters: Container[str] = ()) -> None:
        self._workers, self._runtime, self._supervisor, self._refresh = workers, runtime, supervisor, refresh
        self._journal = journal
        self._delivered = [0] * len(workers)  # env steps, by the present incarnation
        self.delivered_by_lost = 0
        # Weights wait here for their worker's next request, which carries them.
        self._outbox: list[object | None] = [None] * len(workers)
        # -1: not even the first weights, so that equal starts do not rest on equal initialisation everywhere.
        self._versions = [-1] * len(workers)
        self._steps_since_push = [0] * len(workers)
        self.pushes = 0
        self._weight_sync = WeightSync(runtime, compress, parameters, workers)
        self._num_requests = [0] * len(workers)
        # Touched by the collecting thread only, or after it has ended.
        self._in_flight: Requests[Rollout] = Requests(
            runtime, supervisor, journal, lambda rollout: rollout.collect_s, _numbers_of, self._forget, self._ask_replacement)
        # Of rounds that are not complete yet, by worker, oldest first.
        self._arrived: defaultdict[int, deque[Rollout]] = defaultdict(deque)
        self._is_draining = False

    @property
    def bytes_out(self) -> int:
        """Bytes of the weights given to workers so far."""
        return self._weight_sync.bytes_out

    @property
    def traffic(self) -> Traffic:
        """How they were sent."""
        return self._weight_sync.traffic

    def ages(self) -> list[tuple[int, int]]:
        """Version last given to each worker, and env steps since."""
        return list(zip(self._versions, self._steps_since_push, strict=True))

    def state(self) -> tuple[int, int]:
        """Live workers, and requests in flight."""
        return len(self._workers) - len(self._supervisor.gone), len(self._in_flight)

    def push(self, weights: Callable[[], Weights], due: Due, only: int | None = None) -> bool:
        """Put the weights once, and attach them to the next request of each worker that is due."""
        candidates = range(len(self._workers)) if only is None else (only,)
        chosen = [index for index in candidates if due(self._versions[index], self._steps_since_push[index])]
        if not chosen:
            return False
        snapshot = weights()
        if not self._weight_sync.has(snapshot.version):
            self._weight_sync.put(snapshot)
        for index in chosen:
            self._outbox[index], self._versions[index] = self._weight_sync.reference, snapshot.version
            self._steps_since_push[index] = 0
        return True

    def _request(self, index: int) -> None:
        weights, self._outbox[index] = self._outbox[index], None
        self._num_requests[index] += 1
        if weights is not None:
            self.pushes += 1
            self._weight_sync.count()
        # The reference is resolved on the way: the worker receives a `Weights`.
        self._in_flight.add(index, self._workers[index].submit(CWorker.collect, weights))  # type: ignore[arg-type]

    @property
    def restarts(self) -> int:
        """Workers replaced so far."""
        return self._supervisor.restarts

    def _poll(self, timeout_s: float = POLL_INTERVAL_S) -> Iterator[tuple[int, Rollout]]:
        """(worker, rollout) of each request that is finished, after at most a moment."""
        for index, rollout in self._in_flight.poll(timeout_s):
            self._delivered[index] += rollout.num_env_steps
            self._steps_since_push[index] += rollout.num_env_steps
            yield index, rollout

    def _forget(self, index: int) -> None:
        """A worker is lost: what takes its place knows nothing."""
        self._outbox[index], self._versions[index], self._num_requests[index] = None, -1, 0
        self._steps_since_push[index] = 0
        self.delivered_by_lost += self._delivered[index]
        self._delivered[index] = 0

    def _ask_replacement(self, index: int) -> None:
        """Ask a new worker for what its place owes, with the newest weights."""
        if not self._is_draining:
            self._refresh(index)
            self._request(index)

    def drain(self, deliver: Deliver, deadline: float) -> None:
        """Deliver what is in flight and ask for nothing; the next step begins as the first one did.

        Raises:
            Exception: Whatever a worker raised; what the supervisor makes of a lost one.
        """
        self._is_draining = True
        try:
            while len(self._in_flight) and self._runtime.now() < deadline:
                for _, rollout in self._poll():
                    deliver([rollout])
            for index in sorted(set(self._in_flight.owners())):
                self._in_flight.lose(index, WorkerLostError(f"{self._workers[index].name} gave nothing until the end of drain()"))
        finally:
            self._is_draining = False
        deliver([rollout for rollouts in self._arrived.values() for rollout in rollouts])
        self._arrived.clear()

    def finish(self, timeout_s: float) -> list[Rollout]:
        """Results of all requests still in flight, without asking again."""
        outcomes = self._in_flight.finish(timeout_s)
        arrived = [rollout for rollouts in self._arrived.values() for rollout in rollouts]
        self._arrived.clear()
        return [*arrived, *(outcome.value for outcome in outcomes if outcome.value is not None)]


class Barrier(_RemoteGather):
    """One rollout from each worker, all with the same weights.

    Args:
        workers, runtime, supervisor, journal, refresh, weights_options: See `_RemoteGather`.
        fraction_workers: Share of workers that must have finished before the rest are told to stop; of those that are left,
            where lost ones are not replaced.
        min_steps: Steps in each environment that a worker told to stop collects all the same.
        timeout_s: How long a round may take.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(BaseOptions):
        """Options of synchronous collection."""

        col_fraction_workers: float = option(
            1.0, low=0.0, high=1.0, exclusive=True, help="Share of the collection workers whose rollouts must be complete before a "
            "synchronous round stops the others. It applies to the workers of one gradient worker, or to the gradient workers "
            "themselves if they collect and average without a central worker.")
        fraction_samples: float = option(
            0.25, low=0.0, high=1.0, exclusive=True, help="Least share of its rollout that a stopped worker collects.")

        def __post_init__(self) -> None:
            """Refuse a share of rollouts that are never stopped."""
            super().__post_init__()
            if self.col_fraction_workers == 1.0:
                self._refuse_changed(["fraction_samples"], "col_fraction_workers < 1, because no worker is stopped otherwise")

    def __init__(self, workers: Sequence[Handle[CWorker]], runtime: Runtime, supervisor: Supervisor, journal: Journal,
                 refresh: Callable[[int], object], *, fraction_workers: float, min_steps: int,
                 timeout_s: float = 300.0, **weights_options: Any) -> None:
        super().__init__(workers, runtime, supervisor, journal, refresh, **weights_options)
        self._timeout_s = timeout_s
        self._fraction_workers, self._min_steps = fraction_workers, min_steps
        self._num_asked = 0  # rounds that were asked for and not delivered
        self._send_s = 0.0

    def ask(self, num_rounds: int) -> None:
        """Ask all for so many rounds, which as many calls of `step` will deliver."""
        for _ in range(num_rounds):
            self._num_asked += 1
            for index in range(len(self._workers)):
                if index not in self._supervisor.gone:
                    self._request(index)

    def step(self, deliver: Deliver) -> None:
        """Ask all unless it was done before, wait for all, deliver one round in worker order.

        A round waits for the replacement of a lost worker, whose rollout is then made with the same weights.

        Raises:
            CollectionError: It took longer than the timeout.
        """
        deadline = self._runtime.now() + self._timeout_s
        is_awaited = not self._num_asked
        if is_awaited:
            self.ask(1)
        while (missing := self._missing()) or self._supervisor.is_replacing:
            for index, rollout in self._poll():
                self._arrived[index].append(rollout)
            missing = self._missing()
            if missing and self._runtime.now() > deadline:
                names = ", ".join(self._workers[index].name for index in missing)
                raise CollectionError(f"no rollout from {names} within {self._timeout_s:.1f} s; raise queue_timeout_s "
                                      "if one takes longer")
            if len(self._arrived) >= self._num_enough and self._journal.upcoming() is None:  # else it is known who is cut short
                for index in missing:
                    self._workers[index].signal(CWorker.preempt, self._num_requests[index], self._min_steps)
        send_s = self._in_flight.take_send_s()
        self._send_s += send_s if is_awaited else 0.0
        self._num_asked -= 1
        done = [self._arrived[index].popleft() for index in sorted(self._arrived)]
        for index in [index for index, rollouts in self._arrived.items() if not rollouts]:
            del self._arrived[index]
        deliver(done)

    def drain(self, deliver: Deliver, deadline: float) -> None:
        """See `_RemoteGather`; rounds that were asked for are none any more."""
        super().drain(deliver, deadline)
        self._num_asked = 0

    def take_send_s(self) -> float:
        """See `Requests`; of rounds that were not asked for ahead, whose answers nobody sees come."""
        seconds, self._send_s = self._send_s, 0.0
        return seconds

    @property
    def _num_enough(self) -> int:
        """Workers that end a round."""
        gone = 0 if self._supervisor.is_replacing else len(self._supervisor.gone)
        return math.ceil(self._fraction_workers * (len(self._workers) - gone) - 1e-9)

    def _missing(self) -> list[int]:
        """Workers that were asked and have nothing for the oldest round yet."""
        return [index for index in dict.fromkeys(self._in_flight.owners()) if index not in self._arrived]

    def _ask_replacement(self, index: int) -> None:
        for _ in range(self._num_asked - len(self._arrived.get(index, ()))):
            super()._ask_replacement(index)

    def _request(self, index: int) -> None:
        recorded = self._journal.upcoming_of("answer", index)
        if recorded is not None and recorded[-1]:  # cut short in the run that is replayed: at the same step again
            self._workers[index].submit(CWorker.preempt, self._num_requests[index] + 1, recorded[-1])
        super()._request(index)


class OnArrival(_RemoteGather):
    """Workers never wait: each is asked again as soon as its result is handed on.

    Args:
        workers, runtime, supervisor, journal, refresh, weights_options: See `_RemoteGather`.
        col_in_flight: Requests that each worker always has.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(BaseOptions):
        """Options of asynchronous collection."""

        col_in_flight: int = option(2, low=1, help="Requests in flight to each asynchronous collection worker.")
        broadcast_interval: int = option(
            1, low=1, help="Updates after which an asynchronous collection worker receives new weights.")
        max_weight_sync_delay: int | None = option(
            None, low=1, help="Env steps of a collection worker after which it receives the newest weights; replaces broadcast_interval.")

        def __post_init__(self) -> None:
            """Refuse two rules for the same weights."""
            super().__post_init__()
            if self.max_weight_sync_delay is not None and self.broadcast_interval != 1:
                raise ConfigError("max_weight_sync_delay replaces broadcast_interval; give one of them")

    def __init__(self, workers: Sequence[Handle[CWorker]], runtime: Runtime, supervisor: Supervisor, journal: Journal,
                 refresh: Callable[[int], object], *, col_in_flight: int, **weights_options: Any) -> None:
        super().__init__(workers, runtime, supervisor, journal, refresh, **weights_options)
        self._col_in_flight, self._started = col_in_flight, False

    def step(self, deliver: Deliver) -> None:
        """One poll: take all finished results, oldest request first; hand on, refresh weights, ask again."""
        if not self._started:
            self._started = True
            for _ in range(self._col_in_flight):
                for index in range(len(self._workers)):
                    if index not in self._supervisor.gone:
                        self._refresh(index)
                        self._request(index)
        for index, rollout in self._poll():
            deliver([rollout])
            self._refresh(index)
            self._request(index)

    def drain(self, deliver: Deliver, deadline: float) -> None:
        """See `_RemoteGather`."""
        super().drain(deliver, deadline)
        self._started = False

    def _ask_replacement(self, index: int) -> None:
        for _ in range(self._col_in_flight):
            super()._ask_replacement(index)


class OnDemand(_RemoteGather):
    """As `OnArrival`, but a worker is asked only for what would not be too old when it is used.

    That depends on how far the learner has come, so each request is noted in the journal.

    Args:
        workers, runtime, supervisor, journal, refresh, weights_options: See `_RemoteGather`.
        col_in_flight: Requests that each worker has at most.
        may_ask: Whether one more request may be made, of the number of those in flight.
    """

    def __init__(self, workers: Sequence[Handle[CWorker]], runtime: Runtime, supervisor: Supervisor, journal: Journal,
                 refresh: Callable[[int], object], *, col_in_flight: int, may_ask: Callable[[int], bool],
                 **weights_options: Any) -> None:
        super().__init__(workers, runtime, supervisor, journal, refresh, **weights_options)
        self._col_in_flight, self._may_ask = col_in_flight, may_ask

    def step(self, deliver: Deliver) -> None:
        """One poll: take all finished results; after each, ask whoever may be asked."""
        held_back = self._ask()
        for _, rollout in self._poll(_HELD_BACK_INTERVAL_S if held_back else POLL_INTERVAL_S):
            deliver([rollout])
            self._ask()

    def _ask(self) -> bool:
        """Ask as long as it is allowed; whether a worker that could do more is held back."""
        while free := self._free():
            index = self._asked_next_in_record() if self._journal.upcoming() else free[0]
            if index is None or (not self._journal.upcoming() and not self._may_ask(len(self._in_flight))):
                return True
            self._journal.note("ask", index)
            self._refresh(index)
            self._request(index)
        return False

    def _asked_next_in_record(self) -> int | None:
        event = self._journal.upcoming()
        return event[1] if event is not None and event[0] == "ask" else None

    def _free(self) -> list[int]:
        """Workers with less than all their requests, those with the fewest first."""
        counts = Counter(self._in_flight.owners())
        live = (index for index in range(len(self._workers)) if index not in self._supervisor.gone)
        return sorted((index for index in live if counts[index] < self._col_in_flight), key=lambda index: counts[index])

    def _ask_replacement(self, index: int) -> None:
        """It is asked like any other."""
