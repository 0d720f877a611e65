"""Buffers of items, train batches and windows by themselves: which item comes when, against tables worked out by hand."""

from __future__ import annotations

import itertools
import queue

import pytest

from pytorchrl.runtime import ThreadRuntime
from pytorchrl.scheme.gradients.minibatch_buffer import CircularBuffer, Item, MinibatchBuffer, Part, TrainBatches
from pytorchrl.scheme.transport.messages import Rollout
from pytorchrl.scheme.window_stat import WindowStat


def make_rollout(number, num_steps=50, num_resets=0):
    return Rollout(data=None, num_env_steps=num_steps - num_resets, size=num_steps, collected_steps=0, weights_version=number, worker=1, sequence=number)


def make_item(number, num_steps=50):
    return Item([Part(make_rollout(number, num_steps), number)])


class Endless:
    """A queue that is never empty."""

    def __init__(self, num_items=None):
        self.items = itertools.islice(map(make_item, itertools.count()), num_items)

    def get(self, block=True, timeout=None):
        try:
            return next(self.items)
        except StopIteration:
            raise queue.Empty from None

    def empty(self):
        return False


def emitted(buffer, count):
    """What `get` gives, as in the tables."""
    return " ".join(f"{item.version}{'*' * released}" for item, released in (buffer.get() for _ in range(count)))


@pytest.mark.parametrize(("size", "passes", "ramp", "items"), [
    (1, 4, False, "0 0 0 0* 1 1 1 1* 2"),
    (3, 2, False, "0 1 2 0* 1* 2* 3 4 5 3* 4* 5*"),
    (3, 4, False, "0 1 2 0 1 2 0 1 2 0* 1* 2* 3 4 5"),
    (2, 3, True, "0* 1 2 1* 2 3 2* 3 4 3* 4 5 4*"),
    (3, 4, True, "0* 1 2 3 1* 2 3 4 2* 3 4 5 3* 4 5 6 4* 5 6 7"),
    (4, 2, True, "0* 1 2 3 4 1* 2* 3* 4* 5 6 7 8 5*"),
])
def test_the_order_of_items(size, passes, ramp, items):
    buffer = MinibatchBuffer(Endless(), size, 1.0, passes, 1 if ramp else passes)
    assert emitted(buffer, len(items.split())) == items


def test_from_the_ramp_on_new_items_come_at_equal_intervals():
    buffer = MinibatchBuffer(Endless(), 3, 1.0, 4, 1)
    first_uses = [number for number in range(100) if buffer.get()[0].uses == 1]
    assert set(map(int.__sub__, first_uses[4:], first_uses[3:])) == {4}


def test_with_an_empty_queue_other_slots_serve():
    """As the seed would have waited for the queue at the second slot."""
    source = ThreadRuntime().make_queue(4)
    buffer = MinibatchBuffer(source, 2, 0.0, 3, 3)
    source.put(make_item(0))
    assert emitted(buffer, 2) == "0 0"
    source.put(make_item(1))
    assert emitted(buffer, 4) == "1 0* 1 1*"
    with pytest.raises(queue.Empty):
        buffer.get()


@pytest.mark.parametrize(("size", "ramp", "updates"), [(1, False, 40), (3, True, 34)])
def test_uses_of_ten_items(size, ramp, updates):
    buffer = MinibatchBuffer(Endless(10), size, 0.0, 4, 1 if ramp else 4)
    used = [buffer.get()[0] for _ in range(updates)]
    assert len(set(used)) == 10
    with pytest.raises(queue.Empty):
        buffer.get()


def test_it_waits_for_the_queue_as_long_as_it_was_told():
    waits = []

    class Empty:
        def get(self, block=True, timeout=None):
            waits.append(timeout)
            raise queue.Empty

        def empty(self):
            return True
    with pytest.raises(queue.Empty):
        MinibatchBuffer(Empty(), 3, 7.0, 1, 1).get()
    assert waits == [7.0]


def test_a_discarded_item_is_not_used_again():
    buffer = MinibatchBuffer(Endless(), 2, 0.0, 3, 3)
    item, _ = buffer.get()
    assert (buffer.discard(item), buffer.discard(item), buffer.uses_left) == (2, 0, 0)
    assert emitted(buffer, 6) == "1 2 1 2 1* 2*"
    circular = CircularBuffer(2, 3, 1)
    circular.add(item)
    assert (circular.get()[0], circular.discard(item), circular.discard(item)) == (item, 2, 0)
    with pytest.raises(queue.Empty):
        circular.get()


def test_a_circular_buffer_draws_uniformly_but_never_twice_in_a_row():
    buffer, drawn = CircularBuffer(4, 10_000, 5), []
    items = [make_item(number) for number in range(4)]
    for item in items:
        assert buffer.add(item) is None
    drawn = [buffer.get()[0] for _ in range(6000)]
    assert all(a is not b for a, b in itertools.pairwise(drawn))
    pairs = {(a, b): 0 for a in items for b in items if a is not b}
    for pair in itertools.pairwise(drawn):
        pairs[pair] += 1
    assert min(pairs.values()) > 400  # 500 each, standard deviation 21
    again = CircularBuffer(4, 10_000, 5)
    for item in items:
        again.add(item)
    assert [again.get()[0] for _ in range(6000)] == drawn


def test_a_circular_buffer_uses_items_up_and_replaces_the_oldest():
    buffer = CircularBuffer(2, 2, 1)
    first, second, third = make_item(0), make_item(1), make_item(2)
    assert buffer.add(first) is None
    assert buffer.get() == (first, False)
    assert buffer.add(second) is None
    assert buffer.add(third) == (first, 1)  # the oldest, used once
    assert buffer.uses_left == 4
    uses = [buffer.get() for _ in range(4)]
    assert [item for item, released in uses if released] == [uses[2][0], uses[3][0]]
    assert {item.uses for item in (second, third)} == {2}
    with pytest.raises(queue.Empty):
        buffer.get()


@pytest.mark.parametrize(("rollout", "expected"), [(50, 500), (60, 540), (512, 512)])
def test_a_train_batch_has_whole_rollouts_and_enough_of_them(rollout, expected):
    batches = TrainBatches(500)
    items = [item for number in range(60) for item in batches.add([make_rollout(number, rollout)], 3)]
    assert {item.num_steps for item in items} == {expected}
    versions = [part.rollout.weights_version for item in items for part in item.parts]
    assert versions == list(range(len(versions)))  # each once, in order, with its own
    assert batches.share_open == (60 * rollout - len(items) * expected) / 500


def test_resets_take_no_further_rollout_into_a_train_batch():
    """Steps in which environments are reset fill it, and are no env steps."""
    items = list(TrainBatches(100).add([make_rollout(number, num_resets=number) for number in range(6)], 3))
    assert [(item.size, item.num_steps) for item in items] == [(100, 99), (100, 95), (100, 91)]


def test_without_a_size_what_arrives_together_is_an_item():
    (item,) = TrainBatches().add([make_rollout(1), make_rollout(2)], 4)
    assert [(part.rollout.weights_version, part.version_queued) for part in item.parts] == [(1, 4), (2, 4)]


@pytest.mark.parametrize(("proportion", "kinds"), [(0.5, "NNRNNRNNRNNR"), (2.0, "NRRNRRNRRNRR"), (1.0, "NRNRNRNRNRNR"), (0.3, "NNNNRNNNRNNNR")])
def test_old_rollouts_are_mixed_in(proportion, kinds):
    """Counted from when as many are kept as make a train batch, two here."""
    batches = TrainBatches(100, proportion, 4, seed=3)
    parts = [part for number in range(200) for item in batches.add([make_rollout(number)], 0) for part in item.parts]
    assert [part.is_old for part in parts[:2]] == [False, False]
    assert "".join("NR"[part.is_old] for part in parts[2:2 + len(kinds)]) == kinds
    newest, drawn = -1, set()
    for part in parts:
        number = part.rollout.weights_version
        if part.is_old:
            assert newest - 4 <= number < newest  # kept when the newest came, which it was not itself
            drawn.add(newest - number)
        else:
            assert number == newest + 1
            newest = number
    assert drawn == {1, 2, 3, 4}


def test_the_steps_of_old_rollouts_are_not_new():
    item = Item([Part(make_rollout(0, 30), 1), Part(make_rollout(4, 20), 1, is_old=True)])
    assert (item.num_steps, item.num_new_steps, item.version) == (50, 30, 0)


def test_a_window():
    stat = WindowStat("x", 4)
    assert stat.stats() == {"count": 0, "mean": None, "std": None, "quantiles": None}
    for number in range(1, 7):
        stat.push(number)
    stats = stat.stats()
    assert (stats["count"], stats["mean"]) == (6, 4.5)
    assert stats["std"] == pytest.approx(1.11803, abs=1e-5)
    assert stats["quantiles"] == pytest.approx([3, 3.3, 4.5, 5.7, 6])
