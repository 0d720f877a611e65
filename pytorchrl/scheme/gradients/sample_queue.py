"""The queue of train batches between asynchronous collection and the learner."""

from __future__ import annotations

import math
import queue
import random
import threading
from collections.abc import Callable, Iterator

from typing_extensions import override

from pytorchrl.runtime import Runtime
from pytorchrl.scheme.collection.c_worker import CWorker
from pytorchrl.scheme.collection.destination import Destination
from pytorchrl.scheme.counters import WorkerCounters
from pytorchrl.scheme.gradients.train_batch import QueuedRollout, TrainBatch
from pytorchrl.scheme.ledger import DropReason, Ledger
from pytorchrl.scheme.options.base import LONG_QUEUE
from pytorchrl.scheme.options.collection import SampleQueueOptions
from pytorchrl.scheme.transport.messages import Rollout
from pytorchrl.scheme.transport.requests import POLL_INTERVAL_S
from pytorchrl.support.terminal import get_logger

# Smallest number of train batches after which a learner warns that it drops most env steps because of their lag.
_CHECKED_BATCHES = 50

logger = get_logger(__name__)


class TrainBatchBuilder:
    """Combines whole rollouts into train batches, in the order of their arrival.

    Old rollouts, drawn uniformly from the latest `replay_slots` rollouts, are mixed with the new rollouts (Espeholt
    et al. 2018, "IMPALA", section 4: replay). Mixing starts once the slots contain enough steps for a train batch.
    From then on, when k new rollouts have arrived, floor(f k) old rollouts have been added; f is `replay_proportion`.

    Args:
        size: Minimum number of steps in a train batch, counted as in `RolloutHeader.size`; None: a train batch
            consists of rollouts that arrived together.
        replay_proportion: Number of old rollouts for each new rollout.
        replay_slots: Number of slots. The slots store the latest rollouts, from which old rollouts are drawn.
        seed: Seed of the random draws.
    """

    def __init__(self, size: int | None, replay_proportion: float, replay_slots: int, seed: int) -> None:
        self._size, self._proportion, self._num_slots = size, replay_proportion, replay_slots
        self._rng = random.Random(f"old rollouts {seed}")
        self._slots: list[Rollout] = []
        # _num_stored: rollouts stored in slots so far; _num_new, _num_old: new and old rollouts since mixing started.
        self._num_stored = self._num_new = self._num_old = 0
        self._pending: list[QueuedRollout] = []
        self._pending_steps = 0

    @property
    def pending_share(self) -> float:
        """Number of steps in the incomplete train batch, as a fraction of the size of a train batch; in [0, 1)."""
        return self._pending_steps / (self._size or 1)

    def clear(self) -> None:
        """Discard the incomplete train batch; keep the stored rollouts, from which old rollouts are drawn."""
        self._pending, self._pending_steps = [], 0

    def add(self, rollouts: list[Rollout], version: int) -> Iterator[TrainBatch]:
        """Add rollouts that arrived together, and yield all train batches that become complete.

        Args:
            rollouts: The rollouts, in order of arrival.
            version: The learner's version when the rollouts arrived.
        """
        if self._size is None and not self._num_slots:
            yield TrainBatch([QueuedRollout(rollout, version) for rollout in rollouts])
            return
        for rollout in rollouts:
            for queued in (QueuedRollout(rollout, version), *self._draw_old(rollout, version)):
                self._pending.append(queued)
                self._pending_steps += queued.rollout.header.size
                if self._pending_steps >= (self._size or 1):
                    complete, self._pending, self._pending_steps = TrainBatch(self._pending), [], 0
                    yield complete

    def _draw_old(self, rollout: Rollout, version: int) -> list[QueuedRollout]:
        """Draw old rollouts to add after a new rollout, then store the new rollout in a slot."""
        if not self._num_slots:
            return []
        drawn: list[QueuedRollout] = []
        if sum(stored.header.size for stored in self._slots) >= (self._size or 1):
            self._num_new += 1
            while self._num_old < int(self._proportion * self._num_new + 1e-9):
                self._num_old += 1
                drawn.append(QueuedRollout(self._rng.choice(self._slots), version, is_old=True))
        self._slots[self._num_stored % self._num_slots:self._num_stored % self._num_slots + 1] = [rollout]
        self._num_stored += 1
        return drawn


class RingBuffer:
    """A ring of slots, each of which contains a train batch and the number of its remaining uses.

    Successive calls of `get` visit the slots in turn. If a slot is empty, it is filled from the queue, or skipped if
    the queue is empty, too.

    Args:
        fetch: Function that returns the next train batch in the queue, or None if the queue is empty.
        size: Number of slots.
        num_passes: Number of uses of a train batch.
        init_passes: Number of uses of the first train batch. Each later train batch has one more use than the train
            batch before it, up to `num_passes`. With `init_passes=1`, the slots therefore become empty at different
            times, and new train batches are needed at equal intervals, not all at once.
    """

    def __init__(self, fetch: Callable[[], TrainBatch | None], size: int, num_passes: int, init_passes: int) -> None:
        self._fetch = fetch
        self._num_passes, self._passes = num_passes, init_passes
        self._slots: list[TrainBatch | None] = [None] * size
        self._left = [0] * size
        self._current = 0

    @property
    def uses_left(self) -> int:
        """Total number of remaining uses in all slots."""
        return sum(self._left)

    def get(self) -> tuple[TrainBatch, bool]:
        """Return the train batch to use next, and whether this use is its last.

        Raises:
            queue.Empty: All slots and the queue are empty.
        """
        for offset in range(len(self._slots)):
            slot = (self._current + offset) % len(self._slots)
            if self._left[slot] or self._fill(slot):
                break
        else:
            raise queue.Empty
        batch = self._slots[slot]
        assert batch is not None
        self._left[slot] -= 1
        self._current = (slot + 1) % len(self._slots)
        batch.uses += 1
        if not self._left[slot]:
            self._slots[slot] = None
        return batch, not self._left[slot]

    def _fill(self, slot: int) -> bool:
        """Fill a slot from the queue; return whether the queue had a train batch."""
        self._slots[slot] = self._fetch()
        if self._slots[slot] is None:
            return False
        self._left[slot] = self._passes
        self._passes = min(self._passes + 1, self._num_passes)
        return True

    def clear(self) -> None:
        """Empty all slots."""
        self._slots = [None] * len(self._slots)
        self._left = [0] * len(self._left)

    def discard(self, batch: TrainBatch) -> int:
        """Remove a train batch; return the number of its remaining uses."""
        for slot, kept in enumerate(self._slots):
            if kept is batch:
                left, self._left[slot], self._slots[slot] = self._left[slot], 0, None
                return left
        return 0


class CircularBuffer:
    """Keeps the newest train batches; `get` draws one of them uniformly at random.

    Args:
        size: Number of train batches that are kept.
        num_passes: Number of uses of a train batch, unless a newer train batch replaces it earlier.
        seed: Seed of the random draws.
    """

    def __init__(self, size: int, num_passes: int, seed: int) -> None:
        self._size, self._num_passes = size, num_passes
        self._rng = random.Random(f"circular buffer {seed}")
        self._left: dict[TrainBatch, int] = {}  # remaining uses of each train batch, oldest first
        self._last: TrainBatch | None = None

    @property
    def uses_left(self) -> int:
        """Total number of remaining uses of all train batches."""
        return sum(self._left.values())

    def add(self, batch: TrainBatch) -> tuple[TrainBatch, int] | None:
        """Add a train batch; if the buffer is full, evict the oldest train batch.

        Returns:
            The evicted train batch and the number of its remaining uses; None if no train batch was evicted.
        """
        removed = None
        if len(self._left) == self._size:
            oldest = next(iter(self._left))
            removed = oldest, self._left.pop(oldest)
        self._left[batch] = self._num_passes
        return removed

    def get(self) -> tuple[TrainBatch, bool]:
        """Return a train batch drawn at random, and whether this use is its last.

        No train batch is drawn twice in a row, unless it is the only one.

        Raises:
            queue.Empty: There is no train batch.
        """
        batches = list(self._left)
        if not batches:
            raise queue.Empty
        batch = self._rng.choice([batch for batch in batches if batch is not self._last] or batches)
        self._last = batch
        batch.uses += 1
        self._left[batch] -= 1
        is_last = not self._left[batch]
        if is_last:
            del self._left[batch]
        return batch, is_last

    def clear(self) -> None:
        """Remove all train batches."""
        self._left.clear()

    def discard(self, batch: TrainBatch) -> int:
        """Remove a train batch; return the number of its remaining uses."""
        return self._left.pop(batch, 0)


class SampleQueue(Destination):
    """A queue of train batches; the collector thread calls `put`, and the learner thread calls `take`.

    The order in which the threads run determines which train batches are dropped. If the run is recorded, the
    journal notes which thread made each access, so a replay repeats this order and drops the same train batches.

    Args:
        worker: The local collection worker, whose version is the learner's version.
        runtime: Runtime that creates the queue and the events.
        ledger: The gradient worker's ledger.
        closing: Event that is set to end collection.
        options: Options of the queue.
        train_batch_size: Minimum number of steps in a train batch, counted as in `RolloutHeader.size`; None: a train
            batch consists of rollouts that arrived together.
        most_in_flight: Function that returns the largest number of requests in flight to all workers.

    Attributes:
        queue: Bounded queue of train batches.
        num_dropped: Number of train batches dropped before their first use.
        peak: Largest number of train batches that the queue has contained so far.
        passes_cancelled: Number of cancelled uses of train batches, not including the train batches in `num_dropped`.
    """

    def __init__(self, worker: CWorker, runtime: Runtime, ledger: Ledger, closing: threading.Event,
                 options: SampleQueueOptions, train_batch_size: int | None = None,
                 most_in_flight: Callable[[], int] = lambda: 1) -> None:
        self._worker, self._journal, self._ledger, self._closing = worker, worker.journal, ledger, closing
        self._options, self._most_in_flight = options, most_in_flight
        self._size = options.queue_size or LONG_QUEUE
        # The collector thread puts, the learner gets; see `invariant`.
        self.queue: queue.Queue[TrainBatch] = runtime.make_queue(self._size)
        self._arrived, self._freed = runtime.make_event(), runtime.make_event()
        seed = worker.storage.generator.initial_seed()  # the seed differs between gradient workers
        self._builder = TrainBatchBuilder(train_batch_size, options.replay_proportion, options.replay_slots, seed)
        size, ramp = options.minibatch_buffer_size, options.ramp
        self._buffer: RingBuffer | CircularBuffer
        if options.buffer == "circular":
            self._buffer = CircularBuffer(size, options.num_passes, seed)
        else:
            is_ramped = size > 1 if ramp is None else ramp
            self._buffer = RingBuffer(self._fetch, size, options.num_passes, 1 if is_ramped else options.num_passes)
        self.num_dropped = self.passes_cancelled = self.peak = 0
        self._levels: list[int] = []
        self._updates_per_use = worker.algo.num_epochs * worker.algo.num_mini_batch
        self._in_use_since: int | None = None  # learner's version at the latest `take`; None while the learner waits
        self._num_checked = self._num_steps = self._num_used = 0  # counts of `_count_used`
        self._has_warned = False
        self._has_waited = True  # whether the learner had to wait for the train batch that it uses
        rollout_steps = getattr(worker.storage.options, "size", 1) * worker.num_envs * (1.0 + options.replay_proportion)
        self._batches_per_rollout = min(1.0, rollout_steps / train_batch_size) if train_batch_size else 1.0

    @override
    def invariant(self) -> bool:
        return self.queue.qsize() <= self._size

    # Called by the collector thread

    @property
    @override
    def delays_requests(self) -> bool:
        return self._options.delays_requests

    @override
    def put(self, rollouts: list[Rollout]) -> None:
        """Enqueue the train batches that these rollouts complete; with `queue_policy="block"`, wait for space."""
        # The ledger must count the steps as queued before the learner can use them.
        self._ledger.move(sum(rollout.header.num_env_steps for rollout in rollouts), "in_flight", "queued")
        with self._journal.reading():
            version = self._worker.version
        for batch in self._builder.add(rollouts, version):
            if self._options.delays_by_lag:  # sort as in a synchronous round: the order must not depend on arrival
                batch.rollouts.sort(key=lambda queued: (queued.rollout.header.sequence, queued.rollout.header.worker))
            self._put(batch)

    def _put(self, batch: TrainBatch) -> None:
        while self._options.queue_policy == "block" and self.queue.full() and not self._closing.is_set():
            self._freed.clear()
            if self.queue.full():
                self._freed.wait(POLL_INTERVAL_S)
        if self._closing.is_set():  # discard the batch; `Ledger.drop_all` will count its steps as dropped
            return
        with self._journal.reading():
            if not self.queue.full():
                self.queue.put_nowait(batch)
            elif self._options.queue_policy == "drop_oldest":
                self._drop(self.queue.get_nowait())
                self.queue.put_nowait(batch)
            else:
                self._drop(batch)
            self.peak = max(self.peak, self.queue.qsize())
        self._arrived.set()

    def _drop(self, batch: TrainBatch) -> None:
        self.num_dropped += 1
        self._ledger.drop(batch.num_new_steps, "queued", DropReason.QUEUE_FULL)

    def clear(self) -> None:
        """Discard all train batches, without changing the ledger: the caller must count their steps as dropped.

        The learner must not take train batches at the same time.
        """
        with self._journal.lock:
            while not self.queue.empty():
                self.queue.get_nowait()
                self.num_dropped += 1
            self.passes_cancelled += self._buffer.uses_left
            self._buffer.clear()
            self._builder.clear()
            self._in_use_since = None
        self._freed.set()

    @override
    def begin_drain(self) -> None:
        """Discard all train batches, so that a collector thread that waits for space can pause."""
        self.clear()

    @override
    def end_drain(self, deadline: float) -> None:
        """Discard all train batches at the end of a drain (`GWorker.drain`), without waiting; ignore `deadline`."""
        self.clear()

    @override
    def may_request(self, num_in_flight: int) -> bool:
        """Return whether a rollout that is requested now would be used soon enough, after `num_in_flight` others.

        With `queue_policy="block"`, fewer than `queue_size` train batches may be requested or queued. But if the
        learner had to wait for its train batch, or is waiting, there is no such limit: collection is then too slow,
        not learning. If requests are delayed by the lag, too, at most `max_policy_lag` updates may remain
        before the rollout is first used: those from the train batches in the buffer and the queue, and from the
        rollouts in flight.
        """
        with self._journal.lock:
            # Count only complete train batches, because the new rollout becomes part of the incomplete one.
            coming = self._builder.pending_share + num_in_flight * self._batches_per_rollout
            ahead = math.floor(coming + 1e-9) + self.queue.qsize()
            # A train batch that has just arrived may still be queued, although the learner waits for it.
            is_starved = (self._in_use_since is None or self._has_waited) and self.queue.qsize() <= 1
            updates = (ahead * self._options.num_passes + self._buffer.uses_left) * self._updates_per_use
            if self._in_use_since is not None:
                updates += max(0, self._updates_per_use - (self._worker.version - self._in_use_since))
        has_space = (self._options.queue_policy != "block" or ahead < self._size
                     or (is_starved and num_in_flight < self._most_in_flight()))
        is_new_enough = not self._options.delays_by_lag or updates <= (self._options.max_policy_lag or 0)
        return has_space and is_new_enough

    # Called by the learner thread

    @property
    def is_ready(self) -> bool:
        """Whether `take` would return without waiting."""
        return self._buffer.uses_left > 0 or not self.queue.empty()

    def following(self) -> TrainBatch | None:
        """Return the oldest train batch in the queue without taking it; None if the queue is empty."""
        try:
            return self.queue.queue[0]
        except IndexError:
            return None

    def take(self, timeout_s: float) -> TrainBatch:
        """Return the train batch to use next.

        Raises:
            queue.Empty: No usable train batch arrived within `timeout_s` seconds, or collection is closing.
        """
        self._arrived.clear()
        if not self.is_ready:
            self._in_use_since = None
            self._arrived.wait(timeout_s)
            if not self.is_ready:
                raise queue.Empty
        with self._journal.writing():
            if self._closing.is_set():  # the journal no longer records accesses, so leave the queue as it is
                raise queue.Empty
            batch = self._next()
            self._has_waited = self._in_use_since is None
            self._in_use_since = self._worker.version
        self._freed.set()
        return batch

    def _next(self) -> TrainBatch:
        while True:
            if isinstance(self._buffer, CircularBuffer):
                self._move_to(self._buffer)
            batch, _ = self._buffer.get()
            self._levels.append(self.queue.qsize())
            max_lag = self._options.max_policy_lag
            if max_lag is None or self._admit(batch, self._worker.version - max_lag):
                return batch

    def _fetch(self) -> TrainBatch | None:
        """Return the next train batch in the queue, or None if the queue is empty.

        If requests are delayed by the lag, return the train batch with the oldest version, or the first of several
        train batches with this version.
        """
        if self.queue.empty():
            return None
        if not self._options.delays_by_lag:
            return self.queue.get_nowait()
        batches = [self.queue.get_nowait() for _ in range(self.queue.qsize())]
        oldest = min(batches, key=lambda batch: batch.version)
        for batch in batches:
            if batch is not oldest:
                self.queue.put_nowait(batch)
        return oldest

    def _move_to(self, buffer: CircularBuffer) -> None:
        """Move all train batches from the queue to the buffer; a full buffer removes its oldest train batches."""
        while not self.queue.empty():
            removed = buffer.add(self.queue.get_nowait())
            if removed is not None and removed[0].uses:
                self.passes_cancelled += removed[1]
            elif removed is not None:
                self._drop(removed[0])

    def _admit(self, batch: TrainBatch, oldest_version: int) -> bool:
        """Remove rollouts of weights older than `oldest_version` from a batch; return whether to use the batch."""
        if batch.uses > 1:
            if batch.version >= oldest_version:
                return True
            self.passes_cancelled += 1 + self._buffer.discard(batch)
            return False
        new_steps = batch.num_new_steps
        batch.rollouts = [
            queued for queued in batch.rollouts if queued.rollout.header.weights_version >= oldest_version]
        self._ledger.drop(new_steps - batch.num_new_steps, "queued", DropReason.POLICY_LAG)
        self._count_used(new_steps, batch.num_new_steps)
        if not batch.rollouts:
            self._buffer.discard(batch)
            self.num_dropped += 1
        return bool(batch.rollouts)

    def _count_used(self, num_steps: int, num_used: int) -> None:
        """Warn once if more than half of the env steps are dropped because of their lag.

        Args:
            num_steps: Number of new env steps in a train batch.
            num_used: Number of these steps that are used.
        """
        self._num_checked += 1
        self._num_steps, self._num_used = self._num_steps + num_steps, self._num_used + num_used
        if self._num_checked >= _CHECKED_BATCHES and 2 * self._num_used < self._num_steps and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%d of %d env steps were dropped, because their policy lag exceeded max_policy_lag=%d updates; raise "
                "max_policy_lag, or give on_policy_lag='wait', which delays collection instead",
                self._num_steps - self._num_used, self._num_steps, self._options.max_policy_lag)

    def discard(self, batch: TrainBatch) -> None:
        """Cancel the remaining uses of a train batch."""
        with self._journal.lock:
            self.passes_cancelled += self._buffer.discard(batch)

    def take_levels(self) -> tuple[int, ...]:
        """Return the number of queued train batches at each `take` since the last `take_levels`."""
        levels, self._levels = tuple(self._levels), []
        return levels

    @override
    def count(self, counters: WorkerCounters) -> None:
        """Add to `counters` the numbers of queued and dropped train batches and of cancelled uses, and the peak."""
        counters.queued_batches += self.queue.qsize()
        counters.queue_peak = max(counters.queue_peak, self.peak)
        counters.dropped_train_batches += self.num_dropped
        counters.passes_cancelled += self.passes_cancelled
