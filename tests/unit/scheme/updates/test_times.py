"""Check the times and rates of the worker tree."""

from __future__ import annotations

from pytorchrl.scheme.updates.times import Rates, TreeTimes


class Clock:
    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


def test_rates_cover_the_last_ten_seconds():
    clock = Clock()
    rates = Rates(clock, ("steps",))
    for steps in range(10, 310, 10):
        clock.now_s += 1.0
        rates.add((steps if clock.now_s < 20 else 5 * steps,))
    assert rates.metrics() == {"steps_per_s": 50.0}


def test_rates_are_reset_at_a_restart():
    clock = Clock()
    rates = Rates(clock, ("steps",))
    clock.now_s = 1.0
    rates.restart((1000,))
    clock.now_s = 3.0
    rates.add((1004,))
    assert rates.metrics() == {"steps_per_s": 2.0}


def test_the_remaining_time_of_a_level_is_idle():
    clock, parts = Clock(), []
    times = TreeTimes(clock, lambda *part: parts.append(part))
    with times.timed("wait"):
        clock.now_s += 3.0
    times.add_part(*parts.pop())
    clock.now_s += 1.0
    with times.timed("apply"):
        clock.now_s += 2.0
    times.add_part(*parts.pop())
    times.add_seconds({"gradients": {"grad": 2.5}})
    seconds = times.seconds(num_collectors=2, num_grad_workers=1)
    assert (seconds["update"]["wait"], seconds["update"]["apply"], seconds["update"]["idle"]) == (3.0, 2.0, 1.0)
    assert (seconds["gradients"]["grad"], seconds["gradients"]["idle"]) == (2.5, 3.5)
    assert seconds["collection"]["idle"] == 12.0


def test_times_of_operations_are_means():
    times = TreeTimes(Clock(), print)
    times.add_step(1.0)
    times.add_step(2.0)
    metrics = times.metrics()
    assert metrics["step_time_ms"] == 1500.0
    assert metrics["apply_time_ms"] is None
