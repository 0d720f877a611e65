"""Tests that the queues of all runtimes behave like `queue.Queue`: the same calls have the same results and errors."""

from __future__ import annotations

import queue
import threading

import pytest

from pytorchrl.runtime import ThreadRuntime
from pytorchrl.runtime.simulated import SimulatedRuntime

CALLS = {
    "first in, first out": [("put", "a"), ("put", "b"), ("get",), ("get",)],
    "sizes": [("qsize",), ("empty",), ("full",), ("put", "a"), ("qsize",), ("empty",), ("full",), ("put", "b"),
              ("qsize",), ("full",)],
    "put without room": [("put", "a"), ("put", "b"), ("put", "c", False), ("put_nowait", "c"), ("put", "c", True, 0.01),
                         ("put", "c", True, 0), ("get",), ("put", "c", False), ("get",), ("get",)],
    "get without an item": [("get", False), ("get_nowait",), ("get", True, 0.01), ("get", True, 0.0),
                            ("get", False, 5)],
    "without waiting": [("put_nowait", "a"), ("get_nowait",), ("put_nowait", "b"), ("get", False)],
    "a timeout of less than 0": [("put", "a", True, -1), ("get", True, -1), ("put", "a", False, -1),
                                 ("get", False, -1)],
    "tasks": [("put", "a"), ("get",), ("task_done",), ("join",), ("task_done",)],
}


def answer(items, name, *args):
    """Return the result of a call, or the type and message of its error."""
    try:
        return getattr(items, name)(*args)
    except (queue.Empty, queue.Full, ValueError) as error:
        return type(error), str(error)


@pytest.fixture(params=[ThreadRuntime, SimulatedRuntime])
def runtime(request):
    runtime = request.param()
    yield runtime
    runtime.close()


@pytest.mark.parametrize("maxsize", [2, 0])
@pytest.mark.parametrize("calls", CALLS.values(), ids=CALLS)
def test_queue_calls_behave_like_the_standard_library(runtime, calls, maxsize):
    expected, found = queue.Queue(maxsize), runtime.make_queue(maxsize)
    assert isinstance(found, queue.Queue)
    assert found.maxsize == maxsize
    assert [answer(found, *call) for call in calls] == [answer(expected, *call) for call in calls]


def test_arguments_are_named_as_in_the_standard_library(runtime):
    items = runtime.make_queue(1)
    items.put(item="a", block=True, timeout=1.0)
    assert items.get(block=True, timeout=1.0) == "a"


class Helper(threading.Thread):
    """A thread that makes one call and stores the result."""

    def __init__(self, function, *args):
        super().__init__(name="helper", daemon=True)
        self.function, self.args, self.result = function, args, "none yet"

    def run(self):
        self.result = self.function(*self.args)


def test_without_a_timeout_both_ends_wait_for_each_other(runtime):
    items = runtime.make_queue(1)
    getter = Helper(items.get)
    runtime.start_thread(getter)
    items.put("a")
    assert runtime.join_thread(getter, 60.0)
    assert getter.result == "a"
    items.put("b")
    putter = Helper(items.put, "c")
    runtime.start_thread(putter)
    assert items.get() == "b"
    assert runtime.join_thread(putter, 60.0)
    assert items.get_nowait() == "c"


def test_join_waits_until_every_item_is_done(runtime):
    items = runtime.make_queue(2)
    items.put("a")
    items.get()
    waiting = Helper(items.join)
    runtime.start_thread(waiting)
    items.task_done()
    assert runtime.join_thread(waiting, 60.0)
    assert waiting.result is None
