"""Central inference: workers step environments, and one actor chooses the actions for all of them in batches.

The design follows SEED RL (Espeholt et al. 2020). Each request asks a worker for one step, and each worker has at
most one request at a time. The worker sends the step to the process of the gradient worker, which builds the rollouts.
As soon as enough workers wait for actions, the actor chooses their actions together, while the other workers step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import numpy as np
import torch
from typing_extensions import override

from pytorchrl.agent.data import ActingStep, Arrays, Episode
from pytorchrl.agent.multi.data import MultiActingStep
from pytorchrl.runtime import Handle, Runtime
from pytorchrl.scheme.collection.c_worker import CWorker, RolloutBuilder
from pytorchrl.scheme.collection.env_worker import EnvAnswer, EnvWorker
from pytorchrl.scheme.collection.strategies import Closed, Deliver, RemoteStrategy
from pytorchrl.scheme.collection.weight_broadcast import WeightBroadcast
from pytorchrl.scheme.counters import WorkerCounters
from pytorchrl.scheme.ledger import DropReason, Ledger
from pytorchrl.scheme.supervision.supervisor import Supervisor
from pytorchrl.scheme.timing import Stopwatch
from pytorchrl.scheme.transport.encoder import WEIGHTS
from pytorchrl.scheme.transport.messages import Rollout

T = TypeVar("T")

Decisions: TypeAlias = ActingStep | MultiActingStep


@dataclass(frozen=True)
class Inference:
    """The objects that a `CWorkerSet` builds for central inference.

    Attributes:
        actor: The worker, without environments, that chooses the actions of all environment workers.
        new_builder: Function that takes the index of a worker in the list of remote workers, and returns a new
            `RolloutBuilder` for the current incarnation of that worker.
        batch: Number of workers whose actions are chosen together; None: half of the live workers.
    """

    actor: CWorker
    new_builder: Callable[[int], RolloutBuilder]
    batch: int | None


class _Stream:
    """Collects the steps of one incarnation of an environment worker, and builds rollouts from the steps."""

    def __init__(self, builder: RolloutBuilder, now: Callable[[], float]) -> None:
        self.builder, self._now = builder, now
        self._acting: Decisions | None = None  # the decisions whose step has not arrived yet
        self._envs_restarted = 0
        self._begin()

    def _begin(self) -> None:
        self._watch, self._episodes = Stopwatch(self._now), list[Episode]()
        self._version: int | None = None
        self.builder.sequence += 1

    @property
    def has_steps(self) -> bool:
        """Whether the storage contains steps that are not in a rollout yet."""
        return bool(self.builder.storage.num_steps)

    @property
    def is_full(self) -> bool:
        """Whether the storage contains all steps of a rollout."""
        return bool(self.builder.storage.full)

    def acted(self, acting: Decisions, version: int, seconds: float) -> np.ndarray | Arrays:
        """Store the decisions until the resulting step arrives, and return the actions for the environments.

        Args:
            acting: Decisions of the algorithm.
            version: Version of the weights.
            seconds: This worker's share of the time for computing the decisions.
        """
        self._acting = acting
        if self._version is None:
            self._version = version
        self._watch.add("inference", seconds)
        return acting.clipped_action

    def add(self, answer: EnvAnswer) -> None:
        """Store the step of `answer`; if the worker only reset its environments, store the first observations."""
        start = self._now()
        with torch.inference_mode():
            if answer.first is not None:
                self.builder.restart()
                self.builder.storage.start(*answer.first)
            elif answer.step is not None:
                self.builder.storage.insert_transition(self._acting, answer.step)
                self._episodes.extend(answer.step.episodes)
        self._envs_restarted = answer.envs_restarted
        self._watch.add("environment", answer.seconds)
        self._watch.add("store", self._now() - start)

    def take(self, actor: CWorker) -> Rollout:
        """Return the steps in the storage as a rollout, and start the next rollout."""
        assert self._version is not None, "a rollout has at least one step"
        with torch.no_grad(), actor.acting_stream():
            rollout = self.builder.build(
                self._version, self._episodes, self._watch, preempted=not self.is_full, elapsed_s=None,
                traffic={WEIGHTS: actor.take_weights_traffic()}, envs_restarted=self._envs_restarted)
        self._begin()
        return rollout


class CentralInference(RemoteStrategy[EnvWorker, EnvAnswer]):
    """Asynchronous collection in which one actor chooses the actions of all workers; see the module's docstring.

    Weights may change within a rollout; the rollout's version is that of the oldest weights that chose its actions.

    Args:
        workers, runtime, supervisor, ledger: See `RemoteStrategy`.
        weights: The object that sends new weights to the actor; the environment workers need no weights.
        inference: The actor and the builders of rollouts.
    """

    def __init__(self, workers: list[Handle[EnvWorker]], runtime: Runtime, supervisor: Supervisor, ledger: Ledger,
                 weights: WeightBroadcast, inference: Inference) -> None:
        super().__init__(
            workers, runtime, supervisor, ledger, weights, lambda answer: answer.seconds, EnvAnswer.numbers)
        self._actor, self._new_builder, self._batch = inference.actor, inference.new_builder, inference.batch
        self._streams = {place: self._new_stream(place) for place in range(len(workers))}  # one for each live worker
        self._unstarted = list(self._streams)  # workers that have no request and do not wait for an action
        self._waiting: list[int] = []  # workers that wait for an action, in the order in which their steps arrived
        self._left: dict[int, _Stream] = {}  # workers that are leaving and have delivered all their steps
        self._num_batches = self._num_rows = self._lag = 0

    @property
    @override
    def _most_requests(self) -> int:
        return 1

    def _new_stream(self, place: int) -> _Stream:
        return _Stream(self._new_builder(place), self._runtime.now)

    def step(self, deliver: Deliver) -> None:
        """Poll once: store the steps that have arrived, deliver full rollouts, and choose the next actions."""
        self._start_workers()
        self._act_if_enough_wait()
        for place, answer in self._poll():
            stream = self._add(place, answer)
            if stream.is_full:
                rollout = stream.take(self._actor)
                self._weights.delivered(0, rollout.header.num_env_steps)
                self._deliver([rollout], deliver)
                self._let_go()
            self._act_if_enough_wait()

    def _start_workers(self) -> None:
        for place in self._unstarted:
            self._in_flight.add(place, self._workers[place].submit(EnvWorker.step, None))
        self._unstarted = []

    def _add(self, place: int, answer: EnvAnswer) -> _Stream:
        stream = self._streams[place]
        if answer.first is not None:  # new environments
            unfinished = stream.builder.discard_unfinished()
            self._ledger.collect(unfinished)
            self._ledger.drop(unfinished, "in_flight", DropReason.SHUTDOWN)
        stream.add(answer)
        self._waiting.append(place)
        return stream

    # Acting

    def _act_if_enough_wait(self) -> None:
        """Choose actions for the waiting workers if there are enough of them for a batch."""
        num_live = len(self._streams)
        batch = min(self._batch or (num_live + 1) // 2, num_live)
        if not self._is_draining and self._waiting and len(self._waiting) >= batch:
            self._act()

    def _act(self) -> None:
        self._update_weights()
        places, self._waiting = self._waiting, []
        streams = [self._streams[place] for place in places]
        start = self._runtime.now()
        with torch.inference_mode(), self._actor.acting_stream():
            obs, rhs, done, mask = _concatenated([stream.builder.storage.current() for stream in streams])
            acting = self._actor.algo.acting_step(obs, rhs, done, mask=mask)
        seconds = (self._runtime.now() - start) / len(places)
        self._num_batches += 1
        self._num_rows += len(places) * self._actor.num_envs
        self._lag += self._weights.local_worker.version - self._actor.version
        for place, stream, own in zip(places, streams, _split(acting, len(places)), strict=True):
            action = stream.acted(own, self._actor.version, seconds)
            self._in_flight.add(place, self._workers[place].submit(EnvWorker.step, action))

    def _update_weights(self) -> None:
        # This thread may have to wait for the lock of the parameters until an update ends. It therefore takes the lock
        # only if new weights are due, or if the order of reads and updates of the parameters is recorded or replayed.
        if self._journal.is_kept or self._weights.is_due():
            self._weights.attach_due()
            if (weights := self._weights.take(0)) is not None:
                self._actor.set_weights(weights)

    # Lost workers

    @override
    def _forget(self, place: int) -> None:
        """Drop the unfinished rollout of the lost worker with index `place`."""
        stream = self._streams.pop(place)
        num_steps = stream.builder.count_unfinished()
        self._ledger.collect(num_steps)
        self._ledger.drop(num_steps, "in_flight", DropReason.WORKER_LOST)
        self.delivered_by_lost += stream.builder.collected_steps
        # With one live worker less, the workers that wait for actions may now be enough for a batch. Choose the actions
        # immediately, so that this batch does not depend on the next answer: in a replay, the next answer may arrive in
        # a different poll than in the recorded run.
        self._act_if_enough_wait()

    @override
    def _request_replacement(self, place: int) -> None:
        if place >= self._num_asked:
            return
        self._streams[place] = self._new_stream(place)
        self._unstarted.append(place)
        if not self._is_draining:
            self._start_workers()

    # Changes of the number of workers

    @override
    def release(self, number: int) -> bool:
        """Let workers with index >= `number` leave once their rollouts are complete; return whether all have left."""
        self._num_asked = number
        self._let_go()
        return all(place < number for place in self._streams)

    def _let_go(self) -> None:
        """Stop choosing actions for the workers that are leaving and have delivered all their steps."""
        busy = {*self._in_flight.owners(), *(place for place, stream in self._streams.items() if stream.has_steps)}
        for place in [place for place in self._streams if place >= self._num_asked and place not in busy]:
            self._left[place] = self._streams.pop(place)
            for places in (self._waiting, self._unstarted):
                if place in places:
                    places.remove(place)

    @override
    def resized(self, number: int, closed: Sequence[Closed]) -> None:
        """Adapt to a new number of workers; the next call of the method `step` starts the new workers."""
        for place, counts in enumerate(closed, start=number):
            if place in self._left:
                stream = self._left.pop(place)
                self._book_closed(stream.builder.collected_steps, counts)
        for place in range(number):
            if place not in self._streams and place not in self._supervisor.gone:
                self._streams[place] = self._new_stream(place)
                self._unstarted.append(place)

    # Drain and end

    @override
    def drain(self, deliver: Deliver, deadline: float) -> None:
        """Deliver the unfinished rollouts without completing them; the next call of `step` resumes collection.

        Raises:
            Exception: An error of a worker, or the supervisor's error for a lost worker.
        """
        self._await_all(self._add, deadline)
        self._deliver_late(
            [stream.take(self._actor) for _, stream in sorted(self._streams.items()) if stream.has_steps], deliver)

    @override
    def finish(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` seconds for the requested steps, then discard all unfinished rollouts.

        The ledger counts the env steps of these rollouts as collected.
        """
        places = self._in_flight.owners()
        for place, outcome in zip(places, self._in_flight.finish(timeout_s), strict=True):
            if outcome.value is not None:
                self._streams[place].add(outcome.value)
        for stream in self._streams.values():
            self._ledger.collect(stream.builder.count_unfinished())

    # Statistics

    def count(self, counters: WorkerCounters) -> None:
        """Add to `counters` the number of inference batches, the number of environments in them, and their lags.

        The lag of a batch is the number of updates that were missing in the actor's weights.
        """
        counters.inference_batches += self._num_batches
        counters.inference_rows += self._num_rows
        counters.inference_lag += self._lag


def _concatenated(rows: Sequence[T]) -> T:
    """Concatenate the actor's inputs from several workers along the first axis of each array.

    Args:
        rows: For each worker, a structure of tuples, mappings, arrays and None; all structures are alike.
    """
    first = rows[0]
    if first is None or len(rows) == 1:
        return first
    if isinstance(first, tuple):
        return tuple(_concatenated(parts) for parts in zip(*rows, strict=True))  # type: ignore[return-value]
    if isinstance(first, Mapping):
        return {name: _concatenated([row[name] for row in rows])  # type: ignore[index,return-value]
                for name in first}
    return np.concatenate(rows)  # type: ignore[arg-type,return-value]


def _split(value: T, number: int) -> list[T]:
    """Split the decisions for several workers into the decisions for each worker; the inverse of `_concatenated`.

    Args:
        value: Decisions that contain arrays; the first axis of each array runs over the environments of all workers.
        number: Number of workers, which all have the same number of environments.
    """
    if number == 1:
        return [value]
    if isinstance(value, MultiActingStep):
        return [MultiActingStep(parts) for parts in _split(value.parts, number)]  # type: ignore[misc]
    if isinstance(value, tuple):
        columns = [_split(part, number) for part in value]
        return [type(value)(*parts) for parts in zip(*columns, strict=True)]
    if isinstance(value, Mapping):
        by_name = {name: _split(part, number) for name, part in value.items()}
        return [{name: parts[place] for name, parts in by_name.items()} for place in range(number)]  # type: ignore[misc]
    return np.split(value, number)  # type: ignore[call-overload]
