"""Sample batches from replay shards, in the learner thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike

from pytorchrl.agent.data import map_tensors
from pytorchrl.errors import WorkerDiedError, WorkerLostError
from pytorchrl.runtime import Future, Handle, Runtime
from pytorchrl.scheme.replay.r_worker import RWorker, Sample
from pytorchrl.scheme.replay.shard_states import ShardState, ShardStates
from pytorchrl.scheme.timing import Stopwatch
from pytorchrl.scheme.transport.requests import POLL_INTERVAL_S
from pytorchrl.support.untyped import BatchOfKind


class _Request(NamedTuple):
    """A request to a shard for a batch."""

    shard: int
    incarnation: int
    future: Future[Sample]
    asked: float


class Sampler:
    """Receives batches from replay shards, and sends new priorities to the shards.

    Only the learner thread uses a sampler. Batches are requested in advance. For each request, a shard is drawn with a
    probability proportional to the sum of its items' sampling weights, as last reported by the shard. At most
    `max_requests` batches are in flight or waiting; a waiting batch has arrived, but has not been taken.

    Args:
        handles: Handles of the shards. The handle of a replacement is stored at the index of the lost shard.
        runtime: The runtime of the shards.
        states: The states of the shards, shared with the `Inserter` of rollouts.
        batch_size: Number of transitions or sequences in a batch; for whole rollouts, the total `RolloutData.size` that
            a batch must reach.
        num_passes: Number of passes of the learner over a batch. `states.trained` counts the env steps of a batch once
            for each pass.
        max_requests: Largest number of batches in flight or waiting.
        may_request: Function that returns whether one more batch may be requested, given the number of env steps added
            to the shards and the number of batches in flight or waiting.
        timeout_s: Seconds after which a shard that has not sampled a batch is considered hung.
        seed: Seed for drawing shards.

    Attributes:
        versions: (K, 2) int64, two versions of the weights for each of the K items in the latest batch taken; see
            `Sample`.
        num_waiting: Number of further batches that had arrived when the latest batch was taken.
        num_pending: Number of batches that were in flight when the latest batch was taken.
        peak: Largest number of batches that have waited at the same time so far.
        watch: Stopwatch that measures how long it takes to request a batch ("draw"), to receive a batch that has
            arrived ("fetch"), and to send priorities ("priorities").
    """

    def __init__(self, handles: Sequence[Handle[RWorker]], runtime: Runtime, states: ShardStates, *,  # noqa: PLR0913
                 batch_size: int, num_passes: int, max_requests: int, may_request: Callable[[int, int], bool],
                 timeout_s: float, seed: int) -> None:
        self._handles, self._runtime, self._states = handles, runtime, states
        self._batch_size, self._num_passes, self._max_requests = batch_size, num_passes, max_requests
        self._may_request, self._timeout_s = may_request, timeout_s
        self._rng = np.random.default_rng(seed)
        self.watch = Stopwatch(runtime.now)
        self.versions = np.zeros((0, 2), np.int64)
        self.num_waiting = self.num_pending = self.peak = 0
        self._levels: list[int] = []
        self._requests: deque[_Request] = deque()
        self._current: _Request | None = None  # the request for the latest batch taken
        # For each shard, the pairs (ids, errors) to send once the shard has confirmed the previous priorities.
        self._unsent: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in handles]
        self._updates: list[tuple[int, Future[ShardState]] | None] = [None] * len(handles)

    def invariant(self) -> bool:
        """Return whether at most `max_requests` batches are in flight or waiting, which holds after every event."""
        return len(self._requests) <= self._max_requests

    @property
    def num_requested(self) -> int:
        """Number of batches that are in flight or waiting to be taken."""
        return len(self._requests)

    def poll(self, parameters: Mapping[str, float]) -> BatchOfKind | None:
        """Request batches in advance, and return the batch of the oldest request.

        The method waits briefly for this batch. It returns None if the batch has not arrived by then, or if its shard
        is lost or empty.

        Args:
            parameters: Current values of the storage's parameters, by name.
        """
        self._request(parameters)
        if not self._requests:
            self._states.changed.wait(POLL_INTERVAL_S)
            self._states.changed.clear()
            return None
        batch = self._take()
        if batch is not None:
            self._count_levels()
        return batch

    def _request(self, parameters: Mapping[str, float]) -> None:
        states, incarnations, added = self._states.snapshot()
        masses = np.array([state.mass for state in states])
        total = masses.sum()
        if not total > 0.0:
            return
        smallest = min(state.smallest for state in states)
        while len(self._requests) < self._max_requests and self._may_request(added, len(self._requests)):
            with self.watch.part("draw"):
                index = int(self._rng.choice(len(masses), p=masses / total))
                self._requests.append(_Request(index, incarnations[index], self._handles[index].submit(
                    RWorker.sample, self._batch_size, smallest, dict(parameters)), self._runtime.now()))

    def _count_levels(self) -> None:
        futures = [request.future for request in self._requests]
        self.num_waiting = len(self._runtime.wait(futures, 0.0)) if futures else 0
        self.num_pending = len(futures) - self.num_waiting
        self._levels.append(self.num_waiting)
        self.peak = max(self.peak, self.num_waiting + 1)  # the batch that was taken had been waiting, too

    def take_levels(self) -> tuple[int, ...]:
        """Return, for each batch taken since the last `take_levels`, how many other batches had arrived already."""
        levels, self._levels = tuple(self._levels), []
        return levels

    def _take(self) -> BatchOfKind | None:
        """Return the batch of the oldest request; None if it has not arrived, or if its shard is lost or empty."""
        request = self._requests[0]
        if not self._runtime.wait([request.future], POLL_INTERVAL_S):
            if self._runtime.now() - request.asked > self._timeout_s:
                self._states.suspend(request.shard, request.incarnation, WorkerLostError(
                    f"{self._handles[request.shard].name} hangs: no batch for {self._timeout_s:.1f} s"))
                self._requests.popleft()
            return None
        self._requests.popleft()
        with self.watch.part("fetch"):
            return self._receive(request)

    def _receive(self, request: _Request) -> BatchOfKind | None:
        """Return the batch that answers a request, as tensors; None if the shard is lost or empty.

        The answer also contains the current state of the shard, which this method stores.
        """
        outcome = self._runtime.outcome(request.future, POLL_INTERVAL_S)
        if isinstance(outcome.error, WorkerDiedError):
            self._states.suspend(request.shard, request.incarnation, outcome.error)
            return None
        batch, state, versions = outcome.unwrap()
        self._states.update(request.shard, request.incarnation, state)
        if batch is not None:
            batch = map_tensors(batch, _as_tensor)
            self._current, self.versions = request, versions
            self._states.train(batch.num_samples * self._num_passes)
        return batch

    def update_priorities(self, ids: ArrayLike, errors: ArrayLike) -> None:
        """Send new priorities to the shard from which the latest batch was taken, without blocking.

        At most one message with priorities is in flight to each shard. Until the shard has confirmed the message,
        further priorities are collected, and then sent in the next message.

        Args:
            ids: (B,) int64, ids of the items.
            errors: (B,) float32, absolute TD errors.
        """
        request = self._current
        assert request is not None, "update_priorities() needs a batch from poll() first"
        with self.watch.part("priorities"):
            if request.incarnation == self._states.incarnation(request.shard):
                self._unsent[request.shard].append((np.asarray(ids), np.asarray(errors, np.float32)))
            self.send_priorities()

    def _send_priorities(self, index: int) -> None:
        """Send waiting priorities to a shard, if the shard has confirmed the previous priorities."""
        update = self._updates[index]
        if update is not None:
            incarnation, future = update
            if incarnation != self._states.incarnation(index):
                self._unsent[index].clear()
            elif not self._runtime.wait([future], 0.0):
                return
            else:
                outcome = self._runtime.outcome(future, POLL_INTERVAL_S)
                if isinstance(outcome.error, WorkerDiedError):
                    self._states.suspend(index, incarnation, outcome.error)
                    self._unsent[index].clear()
                else:
                    self._states.update(index, incarnation, outcome.unwrap())
            self._updates[index] = None
        if self._unsent[index]:
            ids, errors = (np.concatenate(parts) for parts in zip(*self._unsent[index], strict=True))
            self._unsent[index].clear()
            self._updates[index] = (self._states.incarnation(index), self._handles[index].submit(
                RWorker.update_priorities, ids, errors))

    def drain(self, deadline: float) -> int:
        """Wait for the batches and priorities in flight, discard the batches, and return how many were discarded.

        Args:
            deadline: Time at which to stop waiting, in seconds on the clock of the runtime (`Runtime.now`).
        """
        num_discarded = 0
        while self._requests and self._runtime.now() < deadline:
            batch = self._take()
            if batch is not None:
                num_discarded += 1
                self._states.train(-batch.num_samples * self._num_passes)
        while self.send_priorities() and self._runtime.now() < deadline:
            self._runtime.wait([update[1] for update in self._updates if update is not None], POLL_INTERVAL_S)
        return num_discarded

    def send_priorities(self) -> bool:
        """Send waiting priorities to the shards that have confirmed the previous priorities.

        Returns:
            Whether any priorities are unconfirmed.
        """
        for index in range(len(self._handles)):
            self._send_priorities(index)
        return any(update is not None for update in self._updates)

    def forget_requests(self) -> list[int]:
        """Discard all unanswered requests, and return the index of each request's shard."""
        shards = [request.shard for request in self._requests]
        self._requests.clear()
        return shards


def _as_tensor(value: object) -> object:
    """Copy an array to a tensor, because the array may be in read-only shared memory; return other values unchanged."""
    return torch.from_numpy(np.array(value)) if isinstance(value, np.ndarray) else value
