"""Check, mostly on the virtual clock, that each second of a worker counts as a part of its work or as idle time."""

from __future__ import annotations

from pytorchrl.scheme.base.worker import Context

import itertools

import pytest

from pytorchrl import A2C, ASYNC, PPO, GAEBuffer, OnPolicyActor, Scheme, VecEnv
from pytorchrl.agent.synthetic import synthetic_agent
from pytorchrl.envs.testing import CountingEnv
from pytorchrl.runtime import ThreadRuntime
from pytorchrl.scheme.collection.c_worker import CWorker
from pytorchrl.scheme.collection.c_worker_set import CWorkerSet
from pytorchrl.scheme.gradients.worker_stats import WorkerStats, timed
from pytorchrl.scheme.timing import PARTS, Stopwatch, WindowStat, add_seconds, with_idle

COSTS = {"start": 0, "message": 0.25, "step": 0.5, "grad": 2.0, "update": 0.25}


@pytest.fixture
def run():
    """Return a function that runs a simulated scheme of the synthetic agent, with rollouts of 4 steps, and returns its
    metrics."""
    schemes = []

    def run_(updates=20, agent=None, **settings):
        scheme = Scheme(*synthetic_agent(4, **(agent or {})),
                        **{"seed": 1, "runtime": "simulated", "costs": COSTS} | settings)
        schemes.append(scheme)
        while scheme.version < updates:
            scheme.step()
        return scheme.metrics()
    yield run_
    for scheme in schemes:
        scheme.stop()


def took(level):
    """Return the parts that took any time."""
    return {part: seconds for part, seconds in level.items() if seconds}


def test_timed_methods_are_timed_like_blocks():
    now = [0.0]

    class Part:
        stats = WorkerStats(lambda: now[0])

        @timed("middle")
        def work(self, seconds, inner=0.0, *, raises=False):
            now[0] += seconds
            if inner:
                self.work_inside(inner)
            if raises:
                raise ValueError("broken")
            return seconds

        @timed("inner")
        def work_inside(self, seconds):
            now[0] += seconds

    part, watch = Part(), Part.stats.watch
    with watch.part("outer"):
        assert part.work(1.0, 2.0) == 1.0
        now[0] += 4
        with pytest.raises(ValueError, match="broken"):
            part.work(8.0, raises=True)
    assert watch.seconds == {"outer": 4, "middle": 9, "inner": 2}
    assert watch.counts == {"outer": 1, "middle": 2, "inner": 1}


def test_a_nested_part_interrupts_the_outer_one():
    now = [0.0]
    booked = []
    watch = Stopwatch(lambda: now[0], lambda part, seconds: booked.append((part, seconds)))
    with watch.part("outer"):
        now[0] += 1
        with watch.part("inner"):
            now[0] += 2
            with watch.part("outer"):
                now[0] += 4
            watch.add("third", 0.5)
        now[0] += 8
    assert watch.seconds == {"outer": 13, "inner": 1.5, "third": 0.5}
    assert sum(watch.seconds.values()) == now[0]
    assert watch.counts == {"outer": 2, "inner": 1}
    assert booked == [("outer", 4), ("inner", 1.5), ("outer", 9)]


def test_a_part_that_raises_is_timed():
    now = [0.0]
    watch = Stopwatch(lambda: now[0])

    def fail():
        with watch.part("outer"), watch.part("inner"):
            now[0] += 1
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert watch.seconds == {"inner": 1, "outer": 0}
    with watch.part("outer"):
        now[0] += 1
    assert watch.seconds["outer"] == 1


def test_new_times_are_returned_once():
    now = [0.0]
    watch = Stopwatch(lambda: now[0])
    assert watch.take() == {}
    for seconds in (1, 2):
        with watch.part("outer"):
            now[0] += seconds
            watch.add("uncounted", 0.5)
    watch.count("counted", 4.0)
    assert watch.take() == {"outer": (2, 2.0), "counted": (1, 4.0)}
    assert watch.take() == {}
    with watch.part("outer"):
        now[0] += 8
    assert watch.take() == {"outer": (1, 8.0)}
    assert watch.seconds == {"outer": 10.0, "uncounted": 1.0, "counted": 4.0}  # `take` does not reset the totals


def test_idle_is_the_remaining_time():
    total = {"update": {"wait": 1.0}}
    add_seconds(total, {"update": {"wait": 2.0, "apply": 0.5}, "gradients": {"grad": 7.0}})
    found = with_idle(total, {"update": 10.0, "gradients": 6.0})
    assert found["update"] == {"wait": 3.0, "decode": 0.0, "apply": 0.5, "push": 0.0, "idle": 6.5}
    assert found["gradients"]["idle"] == 0.0
    assert {level: tuple(parts) for level, parts in found.items()} == {level: (*parts, "idle") for level,
                                                                       parts in PARTS.items()}


@pytest.mark.parametrize("agent", [{}, {"capacity": 40}], ids=["rollouts", "replay"])
def test_seconds_of_every_level_are_the_sum_over_its_workers(run, some_pattern, agent):
    metrics = run(agent=agent, **some_pattern)
    time_s = metrics["time_s"]
    elapsed = sum(time_s["update"].values())
    grads = some_pattern["num_grad_workers"]
    # The sums would exceed the elapsed time if a part were counted twice, because idle time is never negative.
    assert sum(time_s["gradients"].values()) == pytest.approx(grads * elapsed)
    assert sum(time_s["collection"].values()) == pytest.approx(grads * some_pattern["num_col_workers"] * elapsed)
    assert time_s["collection"]["environment"] == pytest.approx(metrics["rollouts"] * 4 * COSTS["step"])
    assert time_s["gradients"]["grad"] == pytest.approx(metrics["grads_received"] * COSTS["grad"])


def test_times_of_a_central_scheme_match_the_costs(run):
    time_s = run()["time_s"]
    # Each update takes four steps, a gradient and the update itself, all in one thread.
    assert took(time_s["collection"]) == pytest.approx({"environment": 40.0, "idle": 45.0})
    assert took(time_s["gradients"]) == pytest.approx({"wait": 40.0, "grad": 40.0, "idle": 5.0})
    assert took(time_s["update"]) == pytest.approx({"wait": 80.0, "apply": 5.0})


def test_send_times_are_measured_if_a_worker_waits(run):
    time_s = run(num_col_workers=3)["time_s"]
    assert time_s["collection"]["send"] == pytest.approx(20 * 3 * 2 * COSTS["message"])
    assert took(time_s["gradients"]) == pytest.approx({"wait": 20 * 2.5, "grad": 40.0, "idle": 5.0})
    time_s = run(num_grad_workers=2)["time_s"]
    assert time_s["gradients"]["send"] == pytest.approx(20 * 2 * 2 * COSTS["message"])
    time_s = run(num_col_workers=3, col_communication=ASYNC, num_grad_workers=2, grad_communication=ASYNC)["time_s"]
    assert time_s["collection"]["send"] == time_s["gradients"]["send"] == 0.0


def test_send_time_of_gradients_counts_both_requests_of_an_update(make_scheme):
    scheme = make_scheme(runtime="simulated", costs=COSTS, num_grad_workers=2, algo=PPO.create_factory(
        num_epochs=1, num_mini_batch=1, advantage_normalization="batch"))
    for _ in range(5):
        scheme.step()
    assert scheme.metrics()["time_s"]["gradients"]["send"] == pytest.approx(5 * 2 * 4 * COSTS["message"])


# Each update uses four rounds; `awaited` is the number of these rounds that the learner waits for.
@pytest.mark.parametrize(("prefetch", "awaited"), [(0, 4), (1, 1)])
def test_prefetched_rounds_do_not_count_as_send_time(make_scheme, prefetch, awaited):
    scheme = make_scheme(
        CountingEnv, {"episode_length": 10**6}, num_envs=2, size=4,
        algo=A2C.create_factory(advantage_normalization="none"),
        runtime="simulated", costs=COSTS, num_col_workers=2, train_batch_size=64, microbatch_size=16, prefetch=prefetch)
    for _ in range(5):
        scheme.step()
    assert scheme.metrics()["time_s"]["collection"]["send"] == pytest.approx(5 * awaited * 2 * 2 * COSTS["message"])


def test_ranks_wait_for_the_slowest_when_averaging(run):
    metrics = run(num_grad_workers=2, distribute_gradients=True, costs=COSTS | {"step@GWorker 2/*": 1.0})
    time_s = metrics["time_s"]
    # Rank 1 waits, because four steps of rank 2 take 2 s longer
    assert time_s["gradients"]["average"] == pytest.approx(20 * 4 * 0.5)
    assert time_s["gradients"]["grad"] == pytest.approx(2 * 20 * COSTS["grad"])
    assert time_s["gradients"]["apply"] == pytest.approx(2 * 20 * COSTS["update"])
    assert metrics["grad_time_ms"] == pytest.approx(2000.0)


def test_rollouts_contain_their_collection_times(make_scheme):
    class Ticking(ThreadRuntime):
        """A runtime whose clock advances by 1 s with each reading."""

        def __init__(self):
            super().__init__()
            self._ticks = itertools.count()

        def now(self):
            return float(next(self._ticks))

    envs = VecEnv.create_factory(CountingEnv, None, 2)
    recipe = CWorkerSet.create_factory(
        1, PPO.create_factory(), OnPolicyActor.create_factory(
            envs.observation_space, envs.action_space, hidden_sizes=(8,)), GAEBuffer.create_factory(5), envs)
    worker = CWorker(1, recipe, context=Context(runtime=Ticking()))
    first = worker.collect().header
    # Each of these takes one tick: the reset, each of the 5 steps, the actions of each step, the final values, and the
    # encoding of the rollout. All other ticks count as "store".
    assert first.timings == {"environment": 6, "inference": 6, "encode": 1, "store": 9}
    again = worker.collect(worker.get_weights()).header
    assert again.timings == {"decode": 2, "environment": 5, "inference": 6, "encode": 1, "store": 9}
    assert (first.collect_s, again.collect_s) == (22, 23)
    worker.close()


def test_reports_contain_every_part(make_scheme):
    """Check on the real clock that every part that must take time is reported, and that the sums match the elapsed
    time."""
    scheme = make_scheme(num_col_workers=2, num_grad_workers=2)
    for _ in range(8):
        scheme.step()
    time_s = scheme.metrics()["time_s"]
    elapsed = sum(time_s["update"].values())
    assert {"environment", "inference", "store", "encode", "decode", "idle"} <= set(took(time_s["collection"]))
    assert {"wait", "decode", "copy", "grad", "encode", "idle"} <= set(took(time_s["gradients"]))
    assert {"wait", "decode", "apply", "push"} <= set(took(time_s["update"]))
    assert sum(time_s["gradients"].values()) == pytest.approx(2 * elapsed, rel=0.01)
    assert sum(time_s["collection"].values()) == pytest.approx(4 * elapsed, rel=0.01)


def test_statistics_of_a_window():
    stat = WindowStat("x", 4)
    assert stat.stats() == {"count": 0, "mean": None, "std": None, "quantiles": None}
    for number in range(1, 7):
        stat.push(number)
    stats = stat.stats()
    assert (stats["count"], stats["mean"]) == (6, 4.5)
    assert stats["std"] == pytest.approx(1.11803, abs=1e-5)
    assert stats["quantiles"] == pytest.approx([3, 3.3, 4.5, 5.7, 6])
