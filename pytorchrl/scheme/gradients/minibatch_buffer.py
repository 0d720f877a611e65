"""Items between the queue and the learner: made of rollouts, held in a ring or a circular buffer, and used several times."""

from __future__ import annotations

import queue
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from pytorchrl.scheme.transport.messages import Rollout


class Part(NamedTuple):
    """One rollout of an item."""

    rollout: Rollout
    version_queued: int
    """The learner's version when it arrived."""
    is_old: bool = False
    """Whether it has been in an earlier item; its steps are accounted for there."""


@dataclass(eq=False, slots=True)
class Item:
    """Rollouts that the learner is given together."""

    parts: list[Part]
    uses: int = 0
    """Times it was given to the learner."""

    @property
    def size(self) -> int:
        """Steps in it as batches count them, see `Rollout.size`."""
        return sum(part.rollout.size for part in self.parts)

    @property
    def num_steps(self) -> int:
        """Env steps in it, old rollouts included."""
        return sum(part.rollout.num_env_steps for part in self.parts)

    @property
    def num_new_steps(self) -> int:
        """Env steps of rollouts that are in no other item before it."""
        return sum(part.rollout.num_env_steps for part in self.parts if not part.is_old)

    def count_new(self, start: int, end: int) -> int:
        """Env steps that are used for the first time where steps `start` to `end` of a pass are drawn.

        Old rollouts were counted with an earlier item. Batches mix them with new ones, so that each counts its share.
        """
        if self.uses > 1 or start == end:
            return 0
        new, total = self.num_new_steps, self.num_steps
        return end * new // total - start * new // total

    @property
    def version(self) -> int:
        """Of the oldest weights behind it."""
        return min(part.rollout.weights_version for part in self.parts)


class TrainBatches:
    """Makes items of rollouts: whole ones, never trimmed, in the order in which they come.

    Old rollouts are drawn uniformly from the last `replay_slots` and mixed in (Espeholt et al. 2018, "IMPALA", section 4:
    replay). Once as many are kept as a train batch holds, floor(f k) old ones have followed after k further new ones.

    Args:
        size: Steps of an item, at least, counted as in `Rollout.size`; None makes an item of whatever arrives at once.
        replay_proportion: f, old rollouts for each new one.
        replay_slots: New rollouts that are kept to be drawn.
        seed: Of what is drawn.
    """

    def __init__(self, size: int | None = None, replay_proportion: float = 0.0, replay_slots: int = 0,
                 seed: int = 0) -> None:
        self._size, self._proportion, self._num_slots = size, replay_proportion, replay_slots
        self._rng = random.Random(f"old rollouts {seed}")
        self._slots: list[Rollout] = []
        self._kept = self._mixing_since = self._num_old = 0
        self._open: list[Part] = []
        self._open_steps = 0

    @property
    def share_open(self) -> float:
        """How much of an item there is that is not complete yet, below 1."""
        return self._open_steps / (self._size or 1)

    def clear(self) -> None:
        """Give up the item that is not complete; rollouts that are kept to be drawn stay."""
        self._open, self._open_steps = [], 0

    def add(self, rollouts: list[Rollout], version: int) -> Iterator[Item]:
        """Take rollouts that arrived when the learner had this version; the items that they complete."""
        if self._size is None and not self._num_slots:
            yield Item([Part(rollout, version) for rollout in rollouts])
            return
        for rollout in rollouts:
            for part in (Part(rollout, version), *self._old_ones(rollout, version)):
                self._open.append(part)
                self._open_steps += part.rollout.size
                if self._open_steps >= (self._size or 1):
                    item, self._open, self._open_steps = Item(self._open), [], 0
                    yield item

    def _old_ones(self, rollout: Rollout, version: int) -> list[Part]:
        """Those that follow a new rollout, which is kept from now on itself."""
        if not self._num_slots:
            return []
        drawn: list[Part] = []
        if sum(kept.size for kept in self._slots) >= (self._size or 1):
            self._mixing_since += 1
            while self._num_old < int(self._proportion * self._mixing_since + 1e-9):
                self._num_old += 1
                drawn.append(Part(self._rng.choice(self._slots), version, is_old=True))
        self._slots[self._kept % self._num_slots:self._kept % self._num_slots + 1] = [rollout]
        self._kept += 1
        return drawn


class ItemQueue(Protocol):
    """The reading end of a `queue.Queue`, from which a `MinibatchBuffer` takes items."""

    def get(self, block: bool = True, timeout: float | None = None) -> Item:
        """Take the next item, or raise `queue.Empty`; see `queue.Queue.get`."""

    def empty(self) -> bool:
        """Return whether the queue holds no item now."""


class MinibatchBuffer:
    """A ring of slots, each with an item and the number of uses that it has left.

    The slot whose turn it is gives its item if uses are left, and is filled from the queue if not; with the queue empty it
    is the turn of the next one. Items come in step with one another, each used at `size` different moments.

    Args:
        queue: Where items come from.
        size: Slots.
        timeout_s: How long to wait for the queue where no slot has an item.
        num_passes: Uses of an item.
        init_passes: Uses of the first item; each later one has one more, up to `num_passes`. From 1 on the slots run out
            one after the other, so that new items come at equal intervals.
    """

    def __init__(self, queue: ItemQueue, size: int, timeout_s: float, num_passes: int, init_passes: int) -> None:
        self._queue, self._timeout_s = queue, timeout_s
        self._num_passes, self._passes = num_passes, init_passes
        self._slots: list[Item | None] = [None] * size
        self._left = [0] * size
        self._current = 0

    @property
    def is_ready(self) -> bool:
        """Whether `get` would not have to wait."""
        return any(self._left) or not self._queue.empty()

    @property
    def uses_left(self) -> int:
        """Of all items that it holds."""
        return sum(self._left)

    def get(self) -> tuple[Item, bool]:
        """The next item to use, and whether this is its last use; raises `queue.Empty` after the timeout."""
        slot = self._next_slot()
        item = self._slots[slot]
        assert item is not None
        self._left[slot] -= 1
        self._current = (slot + 1) % len(self._slots)
        item.uses += 1
        if not self._left[slot]:
            self._slots[slot] = None
        return item, not self._left[slot]

    def _next_slot(self) -> int:
        for offset in range(len(self._slots)):
            slot = (self._current + offset) % len(self._slots)
            if self._left[slot] or self._fill(slot, 0.0):
                return slot
        if not self._fill(self._current, self._timeout_s):
            raise queue.Empty
        return self._current

    def _fill(self, slot: int, timeout_s: float) -> bool:
        if not timeout_s and self._queue.empty():
            return False
        try:
            self._slots[slot] = self._queue.get(timeout_s > 0, timeout_s)
        except queue.Empty:
            return False
        self._left[slot] = self._passes
        self._passes = min(self._passes + 1, self._num_passes)
        return True

    def clear(self) -> None:
        """Give up all that it holds."""
        self._slots = [None] * len(self._slots)
        self._left = [0] * len(self._left)

    def discard(self, item: Item) -> int:
        """Give up what is left of an item; the number of uses."""
        for slot, held in enumerate(self._slots):
            if held is item:
                left, self._left[slot], self._slots[slot] = self._left[slot], 0, None
                return left
        return 0


class CircularBuffer:
    """Holds the newest items; which one is used next is drawn uniformly.

    Args:
        size: Items that it holds.
        num_passes: Uses of an item, unless newer ones take its place before.
        seed: Of what is drawn.
    """

    def __init__(self, size: int, num_passes: int, seed: int) -> None:
        self._size, self._num_passes = size, num_passes
        self._rng = random.Random(f"circular buffer {seed}")
        self._left: dict[Item, int] = {}  # oldest first
        self._last: Item | None = None

    @property
    def is_ready(self) -> bool:
        """Whether it holds an item with uses left."""
        return bool(self._left)

    @property
    def uses_left(self) -> int:
        """Of all items that it holds."""
        return sum(self._left.values())

    def add(self, item: Item) -> tuple[Item, int] | None:
        """Take a new item; the oldest and the uses that it had left, if it had to go."""
        replaced = None
        if len(self._left) == self._size:
            oldest = next(iter(self._left))
            replaced = oldest, self._left.pop(oldest)
        self._left[item] = self._num_passes
        return replaced

    def get(self) -> tuple[Item, bool]:
        """An item drawn from those with uses left, another than the last one if there is another; whether that is its last use.

        Raises:
            queue.Empty: There is none.
        """
        items = list(self._left)
        if not items:
            raise queue.Empty
        item = self._rng.choice([item for item in items if item is not self._last] or items)
        self._last = item
        item.uses += 1
        self._left[item] -= 1
        released = not self._left[item]
        if released:
            del self._left[item]
        return item, released

    def clear(self) -> None:
        """Give up all that it holds."""
        self._left.clear()

    def discard(self, item: Item) -> int:
        """Give up what is left of an item; the number of uses."""
        return self._left.pop(item, 0)
