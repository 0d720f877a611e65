"""Sample batches from replay shards, in the learning thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from pytorchrl.agent.data import map_tensors
from pytorchrl.errors import WorkerDiedError, WorkerLostError
from pytorchrl.runtime import Future, Handle, Runtime
from pytorchrl.scheme.replay.r_worker import RWorker, Sample
from pytorchrl.scheme.replay.shard_states import ShardState, ShardStates
from pytorchrl.scheme.timing import Stopwatch
from pytorchrl.scheme.transport.requests import POLL_INTERVAL_S


class _Request(NamedTuple):
    """A batch that was requested from a shard."""

    shard: int
    incarnation: int
    future: Future[Sample]
    asked: float


class Sampler:
    """Requests batches from shards ahead of use, and sends them priorities. Used by the learning thread only.

    No batch is requested that will not be used: at most `max_requests` are pending or waiting. A shard is chosen in
    proportion to its mass in the last known state.

    Args:
        handles: Handles of the shards; replacements take the place of lost ones.
        runtime: The runtime of the shards.
        states: Shared with the inserter.
        batch_size: Transitions or sequences of a batch; of whole rollouts their least size, see `RolloutData.size`.
        num_passes: Passes of the learner over a batch; each counts as trained.
        max_requests: Largest number of batches requested or waiting.
        may_request: Whether one more batch may be requested, given the env steps added and the batches requested.
        timeout_s: Seconds after which a shard that has not sampled a batch is considered hung.
        seed: Seed of the choice of shards.

    Attributes:
        versions: (K, 2) int64, versions of the last batch; see `Sample`.
        num_waiting, num_pending: Batches that had arrived, and that were in flight, when the last one was taken.
        watch: Times of requesting a batch ("draw"), of receiving one that has arrived ("fetch"), and of sending
            priorities ("priorities").
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
        self.num_waiting = self.num_pending = 0
        self._levels: list[int] = []
        self._requests: deque[_Request] = deque()
        self._current: _Request | None = None  # of the batch that was taken last
        # (ids, priorities) that wait for the shard's answer to the last ones, by shard.
        self._unsent: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in handles]
        self._updates: list[tuple[int, Future[ShardState]] | None] = [None] * len(handles)

    @property
    def num_requested(self) -> int:
        """Batches requested or waiting."""
        return len(self._requests)

    def poll(self, parameters: Mapping[str, float]) -> Any | None:
        """Request batches, and return the oldest one requested; None if it has not arrived after a moment.

        Args:
            parameters: Parameters of the storage, by name, with their present values.
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

    def take_levels(self) -> tuple[int, ...]:
        """Return the number of waiting batches after each one taken since the last call."""
        levels, self._levels = tuple(self._levels), []
        return levels

    def _take(self) -> Any | None:
        """Return the batch of the oldest request; None if it has not arrived or its shard was lost."""
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

    def _receive(self, request: _Request) -> Any | None:
        """Receive a shard's answer: its batch, copied if it comes from another process, and the shard's state."""
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

    def update_priorities(self, ids: Any, errors: Any) -> None:
        """Send the shard of the last batch new priorities; never wait.

        A shard gets one message at a time: errors that come before its answer are sent together.

        Args:
            ids: (B,) int64, ids of the items.
            errors: (B,) float32, absolute TD errors.
        """
        request = self._current
        assert request is not None, "a batch comes first"
        with self.watch.part("priorities"):
            if request.incarnation == self._states.incarnation(request.shard):
                self._unsent[request.shard].append((np.asarray(ids), np.asarray(errors, np.float32)))
            self.send_priorities()

    def _send_priorities(self, index: int) -> None:
        """Send a shard its waiting priorities, unless it has not answered the last ones yet."""
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
        """Wait for requests and priorities in flight, until the deadline; return the number of discarded batches."""
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
        """Send waiting priorities to shards that have confirmed the last ones; return whether any are unconfirmed."""
        for index in range(len(self._handles)):
            self._send_priorities(index)
        return any(update is not None for update in self._updates)

    def forget_requests(self) -> list[int]:
        """Forget the requests that were not answered, and return their shards."""
        shards = [request.shard for request in self._requests]
        self._requests.clear()
        return shards


def _as_tensor(value: Any) -> Any:
    """Return an array, which may be read-only shared memory, as a tensor in memory of its own."""
    return torch.from_numpy(np.array(value)) if isinstance(value, np.ndarray) else value
