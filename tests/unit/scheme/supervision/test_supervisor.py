"""Check that lost workers are replaced, are ignored, or end the run with an error; most tests use the virtual clock."""

from __future__ import annotations

import dataclasses
import numpy as np
import pytest

from pytorchrl import ASYNC, SYNC
from pytorchrl.agent.synthetic import SyntheticStorage, synthetic_agent
from pytorchrl.errors import ConfigError, CrashLoopError, NoWorkersLeft, WorkerLostError
from pytorchrl.runtime import Handle
from pytorchrl.runtime.simulated import SimulatedRuntime
from pytorchrl.scheme.supervision.supervisor import Supervisor

COSTS = {"start": 1.0, "message": 0.0, "step": 0.1, "grad": 0.1, "update": 0.0}


class Watched(SyntheticStorage):
    """A storage that records all data given to learners, in one list for all workers of a test."""

    given: list = []  # noqa: RUF012 - each test starts with a new list

    def insert_data_slice(self, rollouts):
        super().insert_data_slice(rollouts)
        self.given.extend(self.inserted[-len(rollouts):])


@pytest.fixture
def run(make_scheme, check_ledger, monkeypatch):
    """Return a function that runs a scheme of the synthetic agent, and returns a dict of results."""
    def run_(updates=12, **settings):
        monkeypatch.setattr(Watched, "given", [])
        algo, actor, _, envs = synthetic_agent()
        scheme = make_scheme(algo=algo, actor=actor, envs=envs, storage=Watched, size=4,
                             **({"runtime": "simulated", "costs": COSTS} | settings))
        while scheme.version < updates:
            scheme.step()
            check_ledger(scheme)
        runtime, metrics = scheme.runtime, scheme.metrics()
        final = scheme.stop()
        places = sum(final[name] for name in ("in_flight", "queued", "consumed_unique"))
        assert final["collected"] == places + sum(final["dropped"].values())
        steps = np.concatenate(Watched.given)
        assert len(set(steps.tolist())) == len(steps)  # no step was used twice
        return {"runtime": runtime, "metrics": metrics, "ledger": final, "steps": steps}
    return run_


def incarnations(steps):
    """Return {(gradient worker, collection worker, incarnation)} of the workers that collected the given steps."""
    return {(int(step) >> 52, int(step) >> 40 & 0xFFF, int(step) >> 28 & 0xFFF) for step in steps}


@pytest.mark.parametrize("col_communication", [SYNC, ASYNC])
def test_a_killed_collector_is_replaced_by_the_next_incarnation(run, col_communication):
    result = run(num_col_workers=2, col_communication=col_communication, faults="kill col.2 @ step 6")
    assert result["metrics"]["workers_restarted"] == 1
    assert incarnations(result["steps"]) == {(0, 1, 0), (0, 2, 0), (0, 2, 1)}


@pytest.mark.parametrize("grad_communication", [SYNC, ASYNC])
@pytest.mark.parametrize("num_col_workers", [1, 2])
def test_a_killed_gradient_worker_is_replaced_with_its_collectors(run, grad_communication, num_col_workers):
    result = run(num_grad_workers=2, num_col_workers=num_col_workers, grad_communication=grad_communication,
                 faults="kill grad.2 @ grad 3")
    assert result["metrics"]["workers_restarted"] == 1
    of_second = {place[1:] for place in incarnations(result["steps"]) if place[0] == 2}
    first = 1 if num_col_workers > 1 else 0
    collectors = range(first, first + num_col_workers)
    assert of_second == {(index, number) for index in collectors for number in (0, 64)}


def test_steps_of_a_lost_gradient_worker_count_as_lost(run):
    settings = {"num_grad_workers": 2, "num_col_workers": 2, "col_communication": ASYNC, "grad_communication": ASYNC,
                "costs": COSTS | {"grad": 2.0}}  # gradients are so slow that the queue fills
    result = run(faults="kill grad.1 @ grad 3", **settings)
    assert result["ledger"]["dropped"]["worker_lost"] > 0
    clean = run(**settings)
    assert clean["ledger"]["dropped"]["worker_lost"] == 0


def test_a_killed_collector_loses_one_rollout_at_most(run):
    """Check that only one rollout is lost if a collector with two requests in flight is killed.

    The collector is killed while it collects its third rollout.
    """
    result = run(num_col_workers=2, col_communication=ASYNC, broadcast_interval=1, faults="kill col.1 @ step 11")
    first = sorted(int(step) & 0xFFFFFFF for step in result["steps"] if incarnations([step]) == {(0, 1, 0)})
    assert first == list(range(8))


@pytest.mark.parametrize("settings", [
    {"num_col_workers": 2}, {"num_col_workers": 2, "col_communication": ASYNC},
    {"num_grad_workers": 2}, {"num_grad_workers": 2, "grad_communication": ASYNC},
    {"num_grad_workers": 2, "num_col_workers": 2, "col_communication": ASYNC, "grad_communication": ASYNC},
])
def test_workers_on_threads_are_also_replaced(make_scheme, check_ledger, monkeypatch, settings):
    monkeypatch.setattr("pytorchrl.scheme.supervision.supervisor._FIRST_BACKOFF_S", 0.05)
    scheme = make_scheme(**settings)
    scheme.step()
    level = scheme.update_worker if scheme.update_worker.remote_workers else scheme.update_worker.local_worker
    handle = level.remote_workers[0]
    handle.runtime.kill(handle)
    while not scheme.metrics()["workers_restarted"]:
        scheme.step()
    after = scheme.version
    while scheme.version < after + 4:
        scheme.step()
        check_ledger(scheme)
    assert level.remote_workers[0] is not handle


@pytest.mark.parametrize("col_communication", [SYNC, ASYNC])
def test_few_replacements_start_at_the_same_time(run, monkeypatch, col_communication):
    starting, most = set(), []
    replace, answered = Supervisor.replace, Supervisor.answered

    def counted(self, index):
        replace(self, index)
        starting.add(index)
        most.append(len(starting))

    def finished(self, index, seconds, more):
        answered(self, index, seconds, more)
        starting.discard(index)
    monkeypatch.setattr(Supervisor, "replace", counted)
    monkeypatch.setattr(Supervisor, "answered", finished)
    result = run(num_col_workers=12, col_communication=col_communication, faults="kill col.* @ step 6", updates=60)
    assert result["metrics"]["workers_restarted"] == 12
    assert max(most) == 4


@pytest.mark.parametrize("col_communication", [SYNC, ASYNC])
@pytest.mark.parametrize("fault", ["kill col.2 @ step 6", "kill grad.1 @ grad 3"])
def test_a_replacement_has_time_to_start(run, col_communication, fault):
    """Check that a replacement may take longer to start than the time limit of a call.

    For example, importing torch takes a long time on a busy machine.
    """
    result = run(num_col_workers=2, num_grad_workers=2, col_communication=col_communication, grad_communication=ASYNC,
                 faults=fault, worker_timeout_s=3.0, updates=60,
                 costs=COSTS | {"start": 2.0, "start@*/CWorker 2": 10.0})
    assert result["metrics"]["workers_restarted"] == (2 if "col" in fault else 1)


@pytest.mark.parametrize("col_communication", [SYNC, ASYNC])
def test_a_hung_collector_is_replaced(run, col_communication):
    result = run(num_col_workers=2, col_communication=col_communication, faults="hang col.2 @ step 6",
                 worker_timeout_s=3.0,
                 updates=60)
    assert result["metrics"]["workers_restarted"] == 1
    assert (0, 2, 1) in incarnations(result["steps"])


def test_the_deadline_grows_with_the_longest_rollout(run):
    """Check that the deadline is ten times the duration of the longest rollout.

    A rollout takes 10 s, so the deadline is about 100 s. A delay of 50 s exceeds `worker_timeout_s`, but not the
    deadline. A delay of 150 s exceeds both.
    """
    costs = COSTS | {"step": 2.5}
    patient = run(num_col_workers=2, costs=costs, faults="delay col.2 50s @ step 6", worker_timeout_s=3.0, updates=4)
    assert patient["metrics"]["workers_restarted"] == 0
    strict = run(num_col_workers=2, costs=costs, faults="delay col.2 150s @ step 6", worker_timeout_s=3.0, updates=4)
    assert strict["metrics"]["workers_restarted"] == 1


def test_a_full_queue_is_not_a_hang(run):
    """Check that collectors do not count as hung if a slow learner has not yet taken their answers."""
    result = run(num_col_workers=2, col_communication=ASYNC, queue_size=1, costs=COSTS | {"grad": 500.0},
                 worker_timeout_s=1.0,
                 updates=4)
    assert result["metrics"]["workers_restarted"] == 0


def test_a_worker_killed_while_the_queue_is_full_is_replaced(make_scheme, check_ledger):
    algo, actor, _, envs = synthetic_agent()
    scheme = make_scheme(algo=algo, actor=actor, envs=envs, storage=SyntheticStorage, size=4, runtime="simulated",
                         costs=COSTS | {"grad": 5.0}, num_col_workers=2, col_communication=ASYNC, queue_size=2)
    worker = scheme.start().local_worker
    while not worker.inqueue.full():
        scheme.step()
    scheme.runtime.kill(worker.remote_workers[0])
    while not scheme.metrics()["workers_restarted"]:
        scheme.step()
        check_ledger(scheme)
    assert scheme.metrics()["queue_peak"] == 2
    scheme.stop()


def test_ignoring_continues_with_the_other_workers(run):
    result = run(num_col_workers=3, on_worker_failure="ignore", faults="kill col.2 @ step 6")
    assert result["metrics"]["workers_restarted"] == 0
    late = {place[1] for place in incarnations(result["steps"][-24:])}
    assert late == {1, 3}


@pytest.mark.parametrize(("settings", "expected"), [
    ({"num_col_workers": 3}, (3, 0)),
    ({"num_col_workers": 3, "faults": "kill col.2 @ step 6", "on_worker_failure": "ignore"}, (3, 1)),
    ({"num_col_workers": 3, "faults": "kill col.2 @ step 6"}, (3, 0)),
    ({"num_grad_workers": 3, "num_col_workers": 2, "grad_communication": ASYNC}, (9, 0)),
    ({"num_grad_workers": 3, "num_col_workers": 2, "faults": "kill grad.2 @ grad 3", "on_worker_failure": "ignore"},
     (9, 3)),
    ({"num_grad_workers": 3, "num_col_workers": 2, "faults": "kill grad.2 @ grad 3; kill col.1.2 @ step 6",
      "on_worker_failure": "ignore"}, (9, 4)),
    ({"num_grad_workers": 3, "num_col_workers": 2, "faults": "kill grad.2 @ grad 3"}, (9, 0)),
    ({}, (0, 0)),
], ids=["all", "collector", "replaced", "tree", "branch", "both", "branch replaced", "central"])
def test_metrics_count_missing_workers(run, settings, expected):
    metrics = run(updates=24, **settings)["metrics"]
    assert (metrics["workers"], metrics["workers_missing"]) == expected


def test_an_ignored_worker_that_hangs_is_ended(make_scheme):
    scheme = make_scheme(runtime="simulated", num_col_workers=3, on_worker_failure="ignore",
                         faults="hang col.2 @ step 6",
                         costs=COSTS, worker_timeout_s=3.0)
    while scheme.version < 8:
        scheme.step()
    assert scheme.runtime.running == ["GWorker 0/CWorker 1", "GWorker 0/CWorker 3"]


def test_losing_the_last_ignored_worker_ends_the_run(run):
    with pytest.raises(NoWorkersLeft, match="all 2 workers are lost"):
        run(num_col_workers=2, on_worker_failure="ignore", faults="kill col.1 @ step 6; kill col.2 @ step 14")


@pytest.mark.parametrize("settings", [{"num_col_workers": 2}, {"num_grad_workers": 2}])
def test_a_lost_worker_raises_if_configured(run, settings):
    faults = "kill col.1 @ step 6" if "num_col_workers" in settings else "kill grad.1 @ grad 3"
    with pytest.raises(WorkerLostError, match=r"Worker 1 has been killed"):
        run(on_worker_failure="raise", faults=faults, **settings)


@pytest.mark.parametrize("num_col_workers", [1, 2])
def test_a_killed_rank_is_replaced_with_its_collectors(run, num_col_workers):
    result = run(num_grad_workers=2, num_col_workers=num_col_workers, distribute_gradients=True,
                 faults="kill grad.1 @ grad 3")
    assert result["metrics"]["workers_restarted"] == result["metrics"]["regroups"] == 1
    assert {place[2] for place in incarnations(result["steps"]) if place[0] == 1} == {0, 64}


def test_a_crash_loop_ends_the_run(run):
    with pytest.raises(CrashLoopError, match="lost 3 times in a row without a result"):
        run(num_col_workers=2, faults="kill col.1 p=1.0")


def test_a_new_collector_has_the_newest_weights_before_its_first_step(make_scheme):
    scheme = make_scheme(runtime="simulated", num_col_workers=2, col_communication=ASYNC, broadcast_interval=1000,
                         faults="kill col.1 @ step 30", costs=COSTS)
    while scheme.version < 1:
        scheme.step()
    while not scheme.metrics()["workers_restarted"]:
        scheme.step()
    version = scheme.version
    while scheme.version < version + 12:
        scheme.step()
    handles = scheme.update_worker.local_worker.remote_workers
    assert handles[0].native.worker.version > 0  # the replacement received weights, although no broadcast was due
    assert handles[1].native.worker.version == 0


@pytest.mark.parametrize(("name", "value"), [
    ("on_worker_failure", "retry"), ("on_worker_failure", None), ("worker_timeout_s", 0),
    ("worker_timeout_s", float("inf")),
    ("worker_timeout_s", "60"),
])
def test_wrong_options_are_refused(make_scheme, name, value):
    with pytest.raises(ConfigError, match=name):
        make_scheme(**{name: value})


# The supervisor without a scheme


@pytest.fixture
def supervisor():
    """Provide a supervisor of two workers on a virtual clock; `filled` lists the indices of the workers that it
    replaced."""
    runtime, replaced = SimulatedRuntime(), []
    made = Supervisor([Handle(runtime, "a", None), Handle(runtime, "b", None)], replaced.append, runtime)
    made.runtime, made.filled = runtime, replaced
    yield made
    runtime.close()


def lose_and_wait(supervisor, index=0):
    """Report the loss of a worker, and return the seconds until it is replaced."""
    start = supervisor.runtime.now()
    supervisor.lost(index, WorkerLostError("gone"))
    while not supervisor.replaced():
        supervisor.runtime.sleep(0.01)
    return supervisor.runtime.now() - start


def test_pauses_between_restarts_double_up_to_half_a_minute(supervisor):
    pauses = []
    for _ in range(10):
        pauses.append(lose_and_wait(supervisor))
        for _ in range(5):
            supervisor.called(0)
            supervisor.answered(0, 1.0, more=False)
    for number, pause in enumerate(pauses):
        nominal = min(30.0, 0.5 * 2**number)
        assert 0.75 * nominal - 0.02 <= pause <= 1.25 * nominal + 0.02
    assert supervisor.filled == [0] * 10
    assert supervisor.restarts == 10
    with pytest.raises(CrashLoopError, match="replaced 10 times in 10 minutes"):
        supervisor.lost(0, WorkerLostError("gone"))


def test_each_worker_has_its_own_budget_of_ten_minutes(supervisor):
    for _ in range(9):
        lose_and_wait(supervisor)
        for _ in range(5):
            supervisor.answered(0, 1.0, more=False)
    assert lose_and_wait(supervisor, 1) < 0.7
    supervisor.runtime.sleep(700)
    assert lose_and_wait(supervisor) < 0.7


def test_losses_spread_over_more_than_ten_minutes_do_not_end_the_run(supervisor):
    """Check a worker that is lost every 101 s: the five earlier losses of the last 600 s determine the pause."""
    for number in range(14):
        nominal = 0.5 * 2**min(number, 5)
        pause = lose_and_wait(supervisor)
        assert 0.75 * nominal - 0.02 <= pause <= 1.25 * nominal + 0.02
        for _ in range(5):
            supervisor.answered(0, 1.0, more=False)
        supervisor.runtime.sleep(101.0 - pause)
    assert supervisor.restarts == 14


def test_only_losses_without_results_in_between_are_a_crash_loop(supervisor):
    lose_and_wait(supervisor)
    lose_and_wait(supervisor)
    supervisor.answered(0, 1.0, more=False)
    lose_and_wait(supervisor)
    lose_and_wait(supervisor)
    with pytest.raises(CrashLoopError, match="3 times in a row"):
        supervisor.lost(0, WorkerLostError("gone"))


def test_a_worker_that_never_lives_long_ends_the_run(supervisor):
    for results in (3, 5, 4, 0, 4, 2):  # only the second of these lives was long
        for _ in range(results):
            supervisor.answered(0, 1.0, more=False)
        lose_and_wait(supervisor)
    for _ in range(4):
        supervisor.answered(0, 1.0, more=False)
    with pytest.raises(CrashLoopError, match="it had returned 3, 5, 4, 0, 4, 2, 4 results; the last time: exit"):
        supervisor.lost(0, WorkerLostError("exit"))


def test_a_worker_may_start_ten_times_as_slowly_as_another_worker(supervisor):
    """Check that the limit of a worker's first result is ten times the longest wait for a first result so far.

    On a busy machine, a worker would otherwise be lost three times in a row at its start, which ends the run.
    """
    supervisor.called(0)
    supervisor.called(1)
    supervisor.runtime.sleep(200)  # the limit of a first result is 300 s
    supervisor.answered(1, 1.0, more=False)
    supervisor.called(1)
    supervisor.runtime.sleep(70)
    assert [index for index, _ in supervisor.hung()] == [1]  # the limit of any other result is still 60 s
    supervisor.answered(1, 1.0, more=False)
    supervisor.runtime.sleep(1700)
    assert supervisor.hung() == []
    supervisor.runtime.sleep(100)
    assert [index for index, _ in supervisor.hung()] == [0]


def test_deadlines_depend_on_the_longest_call_and_start_so_far(supervisor):
    """Check deadlines after a long and a short call, and after a slow and a fast start of a worker."""
    for seconds in (20.0, 1.0):
        supervisor.answered(1, seconds, more=False)
    assert supervisor.deadline_s(1) == 200.0
    for seconds in (250, 10):
        lose_and_wait(supervisor, 1)
        supervisor.called(1)
        supervisor.runtime.sleep(seconds)
        supervisor.answered(1, 1.0, more=False)
    assert supervisor.deadline_s(0) == pytest.approx(2500.0)


def test_the_time_limit_of_a_replacement_begins_with_its_own_call(supervisor):
    supervisor.called(0)
    supervisor.runtime.sleep(50)
    lose_and_wait(supervisor)
    supervisor.called(0)
    supervisor.runtime.sleep(290)  # the limit of a first result is 300 s
    assert supervisor.hung() == []
    supervisor.runtime.sleep(20)
    assert [index for index, _ in supervisor.hung()] == [0]


def test_the_deadline_is_that_of_the_oldest_unanswered_call(supervisor):
    supervisor.called(0)
    supervisor.runtime.sleep(5)
    supervisor.answered(0, 1.0, more=False)
    supervisor.called(0)
    supervisor.runtime.sleep(40)
    supervisor.called(0)
    supervisor.runtime.sleep(19)
    assert supervisor.hung() == []
    supervisor.runtime.sleep(2)
    (index, error), = supervisor.hung()
    assert index == 0
    assert "a hangs: no result for 61.0 s" in str(error)
    supervisor.answered(0, 1.0, more=True)
    assert supervisor.hung() == []


# Evaluation


@pytest.mark.parametrize("waits", [True, False])
def test_a_lost_evaluation_is_restarted(make_scheme, waits):
    scheme = make_scheme(runtime="simulated", num_col_workers=2)
    scheme.agent = dataclasses.replace(scheme.agent, test_envs_factory=scheme.agent.train_envs_factory)
    scheme.start_evaluation(4)
    scheme.runtime.kill(scheme.evaluations.worker)
    evaluation = scheme.wait_evaluation(10.0) if waits else None
    while evaluation is None:
        scheme.step()
        evaluation = scheme.poll_evaluation()
    assert len(evaluation.returns) == 4


@pytest.mark.parametrize(("policy", "losses"), [("raise", 1), ("restart", 3)])
def test_an_evaluation_that_is_lost_too_often_raises(make_scheme, policy, losses):
    scheme = make_scheme(runtime="simulated", on_worker_failure=policy)
    scheme.agent = dataclasses.replace(scheme.agent, test_envs_factory=scheme.agent.train_envs_factory)
    scheme.start_evaluation(4)
    for _ in range(losses - 1):
        scheme.runtime.kill(scheme.evaluations.worker)
        assert scheme.poll_evaluation() is None
    scheme.runtime.kill(scheme.evaluations.worker)
    with pytest.raises(WorkerLostError, match="Evaluator has been killed"):
        scheme.wait_evaluation(10.0)
