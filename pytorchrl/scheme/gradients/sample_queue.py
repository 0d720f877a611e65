"""What lies between the two threads of a gradient worker: the queue, and the buffer from which items are used."""

from __future__ import annotations

import math
import queue
import threading
from dataclasses import dataclass

from pytorchrl.agent.options import option
from pytorchrl.errors import ConfigError
from pytorchrl.runtime import Runtime
from pytorchrl.scheme.base.options import QueueOptions
from pytorchrl.scheme.collection.c_worker import CWorker
from pytorchrl.scheme.collection.strategies import POLL_INTERVAL_S
from pytorchrl.scheme.gradients.minibatch_buffer import CircularBuffer, Item, MinibatchBuffer, TrainBatches
from pytorchrl.scheme.ledger import DropReason, Ledger
from pytorchrl.scheme.transport.messages import Rollout

QUEUE_POLICIES = ("block", "drop_oldest", "drop_newest")
STARVED_POLICIES = ("raise", "warn", "wait")
LAG_POLICIES = ("drop", "wait")
BUFFERS = ("ring", "circular")


class _OldestFirst:
    """A view of the queue that returns the item of the oldest version; its one reader must block writers meanwhile."""

    def __init__(self, items: queue.Queue[Item]) -> None:
        self._items = items
        self.empty = items.empty

    def get(self, block: bool = True, timeout: float | None = None) -> Item:
        """Return the item made with the oldest weights; among several, the one that arrived first."""
        items = [self._items.get(block, timeout), *(self._items.get_nowait() for _ in range(self._items.qsize()))]
        oldest = min(items, key=lambda item: item.version)
        for item in items:
            if item is not oldest:
                self._items.put_nowait(item)
        return oldest


class Feed:
    """Items on their way from the collecting thread, which calls `put`, to the learning one, which calls `take`.

    What becomes of an item depends on who comes first. Each change is a turn of its thread in the journal, and what a
    thread does next follows from what it found in its turns, so that a replayed run repeats it.

    Args:
        worker: The local collection worker, whose version counts.
        runtime: Owner of queue and events.
        ledger: The GWorker's account.
        closing: Set once the collector is to end.
        queue_size: Bound of the queue, in items.
        train_batch_size: Steps of an item, at least, see `Rollout.size`; None makes an item of whatever arrives at once.
        queue_policy: Where the queue is full: "block" waits, "drop_oldest" and "drop_newest" give an item up.
        minibatch_buffer_size: Items held at once.
        num_passes: Uses of an item; each is one update for every epoch and mini-batch of the algorithm.
        ramp: Whether the first items get 1, 2, ... uses; None: if `minibatch_buffer_size` > 1.
        buffer: "ring" or "circular".
        replay_proportion, replay_slots: Old rollouts for each new one, and rollouts kept for that; see `TrainBatches`.
        max_policy_lag: Updates by which a rollout may be old at its first use, and an item at a later one; None: any.
        on_policy_lag: "drop" gives up what is older; "wait" also asks no worker for what would be.

    Attributes:
        queue: The bounded queue of items.
        dropped_items: Items given up before use.
        passes_cancelled: Later uses of items given up.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(QueueOptions):
        """Options of the train batches between asynchronous collection and its learner."""

        queue_policy: str = option(
            "block", choices=QUEUE_POLICIES, help="Reaction to a full queue: \"block\" makes collection wait, \"drop_oldest\" and "
            "\"drop_newest\" drop a train batch.")
        on_starved: str = option(
            "raise", choices=STARVED_POLICIES, help="Reaction of an asynchronous learner without data for queue_timeout_s: \"raise\" "
            "an error, \"warn\" once and go on waiting, or \"wait\".")
        minibatch_buffer_size: int = option(
            1, low=1, help="Train batches that an asynchronous learner uses in turn, each num_passes times.")
        num_passes: int = option(
            1, low=1, help="Uses of a train batch; each makes one update per epoch and mini-batch of the algorithm.")
        ramp: bool | None = option(
            None, help="Whether the first train batches are used 1, 2, ... times, so that new ones are needed at equal intervals; "
            "None: if minibatch_buffer_size > 1.")
        buffer: str = option(
            "ring", choices=BUFFERS, help="\"ring\" uses train batches in turn; \"circular\" keeps the newest minibatch_buffer_size "
            "train batches and draws from them.")
        replay_proportion: float = option(
            0.0, low=0.0, help="Old rollouts mixed into train batches per new rollout.")
        replay_slots: int = option(0, low=0, help="Newest rollouts that are kept for replay_proportion.")
        max_policy_lag: int | None = option(
            None, low=0, help="Largest age, in updates, of a rollout's weights at its first use by an asynchronous learner, and of a "
            "train batch's weights at later uses; None: any.")
        on_policy_lag: str = option(
            "drop", choices=LAG_POLICIES, help="Reaction to max_policy_lag: \"drop\" drops rollouts that are older, \"wait\" also "
            "delays requests for rollouts that would be older.")

        def __post_init__(self) -> None:
            """Refuse options that contradict each other."""
            super().__post_init__()
            is_circular, waits = self.buffer == "circular", self.on_policy_lag == "wait"
            problems = [text for wrong, text in (
                ((self.replay_proportion > 0) != bool(self.replay_slots),
                 f"replay_proportion={self.replay_proportion} and replay_slots={self.replay_slots!r} go together; give both or none"),
                (self.ramp is not None and is_circular, f"ramp={self.ramp} is for buffer='ring'; buffer='circular' would ignore it"),
                (waits and self.max_policy_lag is None, "on_policy_lag='wait' needs max_policy_lag, got None"),
                (waits and is_circular,
                 "on_policy_lag='wait' counts future uses, which buffer='circular' does not know; give on_policy_lag='drop'"),
            ) if wrong]
            if problems:
                raise ConfigError("; ".join(problems))

    def __init__(self, worker: CWorker, runtime: Runtime, ledger: Ledger, closing: threading.Event, *,  # noqa: PLR0913
                 queue_size: int = 16, train_batch_size: int | None = None, queue_policy: str = "block",
                 minibatch_buffer_size: int = 1, num_passes: int = 1, ramp: bool | None = None, buffer: str = "ring",
                 replay_proportion: float = 0.0, replay_slots: int = 0, max_policy_lag: int | None = None,
                 on_policy_lag: str = "drop") -> None:
        self._worker, self._journal, self._ledger, self._closing = worker, worker.journal, ledger, closing
        self.queue: queue.Queue[Item] = runtime.make_queue(queue_size)
        self._arrived, self._room = runtime.make_event(), runtime.make_event()
        seed = worker.storage.generator.initial_seed()  # another for each place in the tree
        self._batches = TrainBatches(train_batch_size, replay_proportion, replay_slots, seed)
        self._queue_policy, self._num_passes, self._max_lag = queue_policy, num_passes, max_policy_lag
        if ramp is None:
            ramp = minibatch_buffer_size > 1
        self._buffer: MinibatchBuffer | CircularBuffer
        if buffer == "circular":
            self._buffer = CircularBuffer(minibatch_buffer_size, num_passes, seed)
        else:
            source = _OldestFirst(self.queue) if on_policy_lag == "wait" else self.queue
            self._buffer = MinibatchBuffer(source, minibatch_buffer_size, 0.0, num_passes, 1 if ramp else num_passes)
        self.dropped_items = self.passes_cancelled = 0
        self._levels: list[int] = []
        self._updates_per_use = getattr(worker.algo, "num_epochs", 1) * getattr(worker.algo, "num_mini_batch", 1)
        self._in_use_since: int | None = None  # version; None: the learner waits
        rollout_steps = getattr(worker.storage.options, "size", 1) * worker.num_envs * (1.0 + replay_proportion)
        self._items_per_rollout = min(1.0, rollout_steps / train_batch_size) if train_batch_size else 1.0

    # The collecting thread

    def put(self, rollouts: list[Rollout]) -> None:
        """Queue the items that these rollouts complete; wait for room where the policy says so, unless it closes."""
        with self._journal.reading():
            version = self._worker.version
        for item in self._batches.add(rollouts, version):
            self._put(item)

    def _put(self, item: Item) -> None:
        while self._queue_policy == "block" and self.queue.full() and not self._closing.is_set():
            self._room.clear()
            if self.queue.full():
                self._room.wait(POLL_INTERVAL_S)
        if self._closing.is_set():  # it stays queued, and is given up with all that is
            return
        with self._journal.reading():
            if not self.queue.full():
                self.queue.put_nowait(item)
            elif self._queue_policy == "drop_oldest":
                self._drop(self.queue.get_nowait())
                self.queue.put_nowait(item)
            else:
                self._drop(item)
        self._arrived.set()

    def _drop(self, item: Item) -> None:
        self.dropped_items += 1
        self._ledger.drop(item.num_new_steps, "queued", DropReason.QUEUE_FULL)

    def clear(self) -> None:
        """Give up everything, used or not; its steps stay queued in the ledger. For a learner that takes nothing meanwhile."""
        with self._journal.lock:
            while not self.queue.empty():
                self.queue.get_nowait()
                self.dropped_items += 1
            self.passes_cancelled += self._buffer.uses_left
            self._buffer.clear()
            self._batches.clear()
            self._in_use_since = None
        self._room.set()

    def may_ask(self, num_asked: int) -> bool:
        """Whether a rollout asked for now would not be too old at its first use, behind `num_asked` that were asked for.

        It counts the updates still owed to whatever is ahead of it.
        """
        if self._max_lag is None:
            return True
        with self._journal.lock:
            # Its own item is not ahead of it.
            items = math.floor(self._batches.share_open + num_asked * self._items_per_rollout + 1e-9) + self.queue.qsize()
            owed = (items * self._num_passes + self._buffer.uses_left) * self._updates_per_use
            if self._in_use_since is not None:
                owed += max(0, self._updates_per_use - (self._worker.version - self._in_use_since))
        return owed <= self._max_lag

    # The learning thread

    @property
    def is_ready(self) -> bool:
        """Whether there is anything to take."""
        return self._buffer.is_ready or not self.queue.empty()

    def take(self, timeout_s: float) -> Item:
        """The item to use next; raises `queue.Empty` if there is none within `timeout_s`, or it closes."""
        self._arrived.clear()
        if not self.is_ready:
            self._in_use_since = None
            self._arrived.wait(timeout_s)
            if not self.is_ready:
                raise queue.Empty
        with self._journal.writing():
            if self._closing.is_set():  # turns are not noted any more
                raise queue.Empty
            item = self._next()
            self._in_use_since = self._worker.version
        self._room.set()
        return item

    def _next(self) -> Item:
        while True:
            if isinstance(self._buffer, CircularBuffer):
                self._move_to(self._buffer)
            item, _ = self._buffer.get()
            self._levels.append(self.queue.qsize())
            if self._max_lag is None or self._admit(item, self._worker.version - self._max_lag):
                return item

    def _move_to(self, buffer: CircularBuffer) -> None:
        """Everything that is queued; what has to go for it was used, or not."""
        while not self.queue.empty():
            replaced = buffer.add(self.queue.get_nowait())
            if replaced is not None and replaced[0].uses:
                self.passes_cancelled += replaced[1]
            elif replaced is not None:
                self._drop(replaced[0])

    def _admit(self, item: Item, oldest_version: int) -> bool:
        """Whether an item may be used now: at its first use without what is too old, later as a whole or not at all."""
        if item.uses > 1:
            if item.version >= oldest_version:
                return True
            self.passes_cancelled += 1 + self._buffer.discard(item)
            return False
        kept = [part for part in item.parts if part.rollout.weights_version >= oldest_version]
        new_steps = item.num_new_steps
        item.parts = kept
        self._ledger.drop(new_steps - item.num_new_steps, "queued", DropReason.POLICY_LAG)
        if not kept:
            self._buffer.discard(item)
            self.dropped_items += 1
        return bool(kept)

    def discard(self, item: Item) -> None:
        """Give up the later uses of an item."""
        with self._journal.lock:
            self.passes_cancelled += self._buffer.discard(item)

    def take_levels(self) -> tuple[int, ...]:
        """Items in the queue after each `take` since the last call."""
        levels, self._levels = tuple(self._levels), []
        return levels
