"""The replay shards of one gradient worker.

The collector thread inserts rollouts, and the learner thread samples batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import ArrayLike

from pytorchrl.errors import LearnerStarvedError, StoppedError, WorkerLostError
from pytorchrl.scheme.ledger import Ledger
from pytorchrl.scheme.options.base import LONG_QUEUE
from pytorchrl.scheme.replay.inserter import Inserter
from pytorchrl.scheme.replay.r_worker import RWorker
from pytorchrl.scheme.replay.r_worker_set import RWorkerSet
from pytorchrl.scheme.replay.sampler import Sampler
from pytorchrl.scheme.replay.shard_states import ShardState, ShardStates
from pytorchrl.scheme.supervision.supervisor import Supervisor
from pytorchrl.scheme.timing import Stopwatch
from pytorchrl.scheme.transport.messages import Rollout, RolloutHeader
from pytorchrl.scheme.transport.requests import POLL_INTERVAL_S
from pytorchrl.support.untyped import BatchOfKind, StateDict

_PREFETCH = 4


class Shards:
    """The connection of a gradient worker to its replay shards.

    The collector thread inserts rollouts, and waits while the replay ratio is below `min_replay_ratio`. The learning
    thread samples batches, and waits while another batch would exceed `max_replay_ratio`. The ledger counts env steps
    as resident once their shard has confirmed them.

    Args:
        workers: The shards.
        ledger: The gradient worker's ledger.
        options: Options of the shards.
        supervision: Options for lost shards; None: the defaults.
        batch_size: Number of transitions or sequences in a batch; for whole rollouts, the total `RolloutData.size` that
            a batch must reach.
        batch_steps: Largest number of env steps in a batch; None: `batch_size`.
        num_passes: Number of passes of the learner over a batch. `trained` counts the env steps of a batch once for
            each pass.
        timeout_s: Time limit in seconds for the arrival of a batch, and for all shards to return their contents for a
            checkpoint.
        seed: Seed for drawing the shards from which batches are sampled, and for random routing.
        version: Function that returns the current version of the learner's weights.

    Attributes:
        sampler: The sampler, for the learner thread only.
        is_draining: Whether a drain is in progress. During a drain, collection does not wait for the learner, even if
            the replay ratio is below `min_replay_ratio`.
        num_batches_dropped: Number of batches that were sampled but not used.
    """

    Options = RWorkerSet.Options

    def __init__(self, workers: RWorkerSet, ledger: Ledger, options: RWorkerSet.Options,  # noqa: PLR0913
                 supervision: Supervisor.Options | None = None, *, batch_size: int, batch_steps: int | None = None,
                 num_passes: int, timeout_s: float, seed: int = 0, version: Callable[[],
                     int] = lambda: 0) -> None:
        self._runtime, self._handles, self._timeout_s, self._version = (
            workers.runtime, workers.remote_workers(), timeout_s, version)
        self._batch_steps = (batch_steps or batch_size) * num_passes
        self._learning_starts = options.learning_starts or 0
        self._min_ratio, self._max_ratio = options.min_replay_ratio or 0.0, options.max_replay_ratio
        supervision = supervision or Supervisor.Options()
        self._supervisor = Supervisor(self._handles, workers.replace, self._runtime, supervision, seed % 2**32)
        self._states = ShardStates(len(self._handles), self._runtime.make_event(), self._runtime.make_event())
        self._inserter = Inserter(
            self._handles, self._runtime, self._supervisor, self._states, ledger, routing=options.routing,
            add_in_flight=options.add_in_flight, seed=seed)
        self.sampler = Sampler(
            self._handles, self._runtime, self._states, batch_size=batch_size, num_passes=num_passes,
            max_requests=min((options.prefetch or _PREFETCH) * len(self._handles), options.queue_size or LONG_QUEUE),
            may_request=self._may_request, timeout_s=supervision.worker_timeout_s, seed=seed)
        self.is_draining = False
        self.num_batches_dropped = 0

    def invariant(self) -> bool:
        """Return whether the invariants of the inserter, the sampler and their shared states hold."""
        return self._inserter.invariant() and self.sampler.invariant() and self._states.invariant()

    # Methods for the collector thread

    def add(self, rollout: Rollout, is_stopped: Callable[[], bool]) -> None:
        """Send a rollout to a shard; wait while no shard can accept it, or while learning must catch up.

        Args:
            rollout: The rollout, which the ledger counts as in flight.
            is_stopped: Function that returns whether to stop waiting.
        """
        while not is_stopped():
            self.poll(0.0)
            if self._learning_lags():
                self._states.learned.wait(POLL_INTERVAL_S)
                self._states.learned.clear()
            elif self._inserter.add(rollout, self._version()):
                return
            else:
                self.poll(POLL_INTERVAL_S)

    def _learning_lags(self) -> bool:
        """Return whether collection must wait until learning has caught up.

        The result is False if all shards are empty, because learning then waits for collection.
        """
        counted = self._states.added - self._learning_starts
        return (not self.is_draining and counted > 0
                and self._states.trained + self._batch_steps <= self._min_ratio * counted
                and any(state.mass > 0.0 for state in self.states))

    def poll(self, timeout_s: float) -> None:
        """Process the confirmations of shards that have added a rollout, and replace lost shards.

        If no confirmation has arrived, the method waits up to `timeout_s` seconds for the first.

        Raises:
            Exception: An error of a shard, or the supervisor's error for a lost shard.
        """
        self._inserter.poll(timeout_s)

    def drain(self, deadline: float) -> None:
        """Wait until the shards have confirmed all rollouts and priorities, and discard the batches that arrive.

        No thread may add rollouts or sample batches during the drain. A shard that does not answer before the deadline
        counts as lost.
        """
        while self._inserter.owners and self._runtime.now() < deadline:
            self.poll(POLL_INTERVAL_S)
        self.num_batches_dropped += self.sampler.drain(deadline)
        for index in sorted({*self._inserter.owners, *self.sampler.forget_requests()}):
            name = self._handles[index].name
            self._inserter.lose(index, WorkerLostError(f"{name} did not respond before the end of drain()"))

    def close(self, timeout_s: float) -> None:
        """Stop the shards. The collector thread and the learner thread must have ended.

        The method waits up to `timeout_s` seconds for the shards to confirm their rollouts. The ledger still counts
        rollouts without a confirmation as in flight.
        """
        self._inserter.finish(timeout_s)
        for handle in self._handles:
            self._runtime.kill(handle)

    # Methods for the learner thread

    def get(self, is_stopped: Callable[[], bool], failure: Callable[[], BaseException | None],
            parameters: Mapping[str, float]) -> BatchOfKind:
        """Wait for the batch of the oldest request, and return it.

        Args:
            is_stopped: Function that returns whether to stop waiting.
            failure: Function that returns the error that ended the collector thread, or None.
            parameters: Current values of the storage's options that can change during training, by name.

        Raises:
            StoppedError: `is_stopped` returned True.
            LearnerStarvedError: No batch arrived within `timeout_s` seconds. Until learning starts, each rollout that
                is added restarts the timeout.
            Exception: The error that ended the collector thread, or an error of a shard.
        """
        deadline, added = self._runtime.now() + self._timeout_s, self._states.added
        while self._runtime.now() < deadline:
            if added != self._states.added <= self._learning_starts:  # rollouts were added; learning has not started
                deadline, added = self._runtime.now() + self._timeout_s, self._states.added
            if is_stopped():
                raise StoppedError("replay has been stopped")
            if (error := failure()) is not None:
                raise error
            if (batch := self.sampler.poll(parameters)) is not None:
                return batch
        raise LearnerStarvedError(
            f"no batch from replay for {self._timeout_s:.1f} s: {self.added} env steps were added, learning starts at "
            f"{self._learning_starts}, and {self.sampler.num_requested} batches are requested; raise queue_timeout_s "
            "if collection or sampling takes longer")

    def _may_request(self, added: int, num_requested: int) -> bool:
        """Return whether one more batch may be requested.

        The condition is that learning has started, and that the batch keeps the replay ratio within `max_replay_ratio`.
        """
        if added < self._learning_starts:
            return False
        if self._max_ratio is None:
            return True
        requested = self._states.trained + num_requested * self._batch_steps
        return requested + self._batch_steps <= self._max_ratio * (added - self._learning_starts)

    def update_priorities(self, ids: ArrayLike, errors: ArrayLike) -> None:
        """Send the item ids (B,) and absolute TD errors (B,) of the latest batch to the shard that drew the batch.

        This method does not block.
        """
        self.sampler.update_priorities(ids, errors)

    def take_headers(self) -> list[RolloutHeader]:
        """Return the headers of the rollouts added since the last call."""
        return self._states.take_headers()

    def take_levels(self) -> tuple[int, ...]:
        """Return the value of `num_waiting` for each batch that `get` returned since the last call of `take_levels`."""
        return self.sampler.take_levels()

    @property
    def versions(self) -> np.ndarray:
        """Weight versions for each of the K items in the latest batch, (K, 2) int64; see `Sample.versions`.

        Column 0: the version with which the item was collected. Column 1: the learner's version when the item was sent
        to its shard.
        """
        return self.sampler.versions

    @property
    def watch(self) -> Stopwatch:
        """Stopwatch of the learner thread; see `Sampler`."""
        return self.sampler.watch

    # Methods for both threads

    @property
    def states(self) -> list[ShardState]:
        """The last known state of each shard."""
        return self._states.current

    @property
    def num_waiting(self) -> int:
        """Number of further batches that had arrived from shards when the latest batch was taken."""
        return self.sampler.num_waiting

    @property
    def num_pending(self) -> int:
        """Number of batches that were in flight when the latest batch was taken."""
        return self.sampler.num_pending

    @property
    def added(self) -> int:
        """Number of env steps in the rollouts that shards have added and confirmed."""
        return self._states.added

    @property
    def trained(self) -> int:
        """Number of env steps in all batches taken, multiplied by the number of passes over each batch."""
        return self._states.trained

    @property
    def num_adding(self) -> int:
        """Number of rollouts in flight to the shards."""
        return len(self._inserter.owners)

    @property
    def is_idle(self) -> bool:
        """Whether no rollouts, batches or priorities are in flight."""
        return not (self.num_adding or self.sampler.num_requested or self.sampler.send_priorities())

    @property
    def num_missing(self) -> int:
        """Number of shards that are lost and have not been replaced."""
        return len(self._supervisor.gone)

    @property
    def restarts(self) -> int:
        """Number of restarts of lost shards so far."""
        return self._supervisor.restarts

    def state(self) -> StateDict:
        """Return the state of all shards for a checkpoint; call `drain` first.

        The contents of a lost shard are None. A shard counts as lost if it does not answer within the constructor's
        `timeout_s` seconds.
        """
        calls = {index: handle.submit(RWorker.state) for index, handle in enumerate(self._handles)
                 if index not in self._supervisor.gone}
        contents: list[StateDict | None] = [None] * len(self._handles)
        for index, outcome in zip(calls, self._runtime.get_all(list(calls.values()), self._timeout_s), strict=True):
            if isinstance(outcome.error, WorkerLostError):
                self._inserter.lose(index, outcome.error)
            else:
                contents[index] = outcome.unwrap()
        return {"shards": contents, "added": self.added, "trained": self.trained}

    def restore(self, state: StateDict) -> None:
        """Restore the shards from the return value of `state()`; call this method before any rollout is added."""
        self._states.added, self._states.trained = state["added"], state["trained"]
        calls = {index: self._handles[index].submit(RWorker.restore, own)
                 for index, own in enumerate(state["shards"]) if own is not None}
        for index, outcome in zip(calls, self._runtime.get_all(list(calls.values()), self._timeout_s), strict=True):
            self._inserter.restore(index, outcome.unwrap())
