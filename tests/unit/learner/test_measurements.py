"""Tests of the measurements and evaluations of a run, and of when it is done and its records are due."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pytorchrl.errors import StoppedError, WorkerLostError
from pytorchrl.learner.measurements import Due, EvaluationTimer, Measurements, Target


@pytest.fixture
def scheme(fake_scheme):
    scheme = fake_scheme()
    scheme.settings["on_worker_failure"] = "restart"
    return scheme


def measure(scheme, resumed=None):
    measurements = Measurements(scheme, Target(scheme, 1000))
    measurements.start(100.0, resumed)
    return measurements


def train(scheme, measurements, steps, now=100.0):
    for number in range(steps):
        measurements.add(scheme.step(), now + number + 1)
    measurements.count()


def test_env_steps_count_the_steps_that_reached_the_learner(scheme):
    measurements = measure(scheme)
    train(scheme, measurements, 4)
    assert measurements.ledger["collected"] == 45
    assert measurements.env_steps == 40
    scheme.ledger = lambda: {"collected": 50, "in_flight": 3, "queued": 7}
    measurements.count()
    assert measurements.env_steps == 40


def test_a_record_has_the_means_since_the_last_record(scheme):
    measurements = measure(scheme)
    train(scheme, measurements, 3)
    assert measurements.metrics(None, None)["algorithm"] == {"loss": 2.0, "entropy": 0.5}
    assert measurements.record(None, None)["algorithm"] == {"loss": 2.0, "entropy": 0.5}
    train(scheme, measurements, 2)
    assert measurements.record(None, None)["algorithm"]["loss"] == (4 + 5) / 2
    assert measurements.record(None, None)["algorithm"] == {}


def test_metrics_cover_the_whole_run(scheme):
    measurements = measure(scheme)
    train(scheme, measurements, 6)
    scheme.start_evaluation(2)
    metrics = measurements.metrics(scheme.poll_evaluation(), {"env_steps": 30, "bytes": 5, "seconds": 0.5})
    assert (metrics["env_steps"], metrics["updates"], metrics["seconds"]) == (60, 6, 6.0)
    assert (metrics["return_mean"], metrics["return_episodes"], metrics["length_mean"]) == (3.5, 6, 10.0)
    assert metrics["policy_lag"]["max"] == 2
    assert "policy_lag" not in metrics["scheme"]
    assert metrics["evaluation"]["return_mean"] == 6.0
    assert metrics["checkpoint"] == {"env_steps": 30, "bytes": 5, "seconds": 0.5}
    plain = measurements.metrics(None, None)
    assert not {"evaluation", "checkpoint", "policies"} & set(plain)


def test_a_scheme_that_has_not_started_is_not_queried(scheme):
    def ask():
        raise AssertionError("asking starts it")
    scheme.metrics = ask
    measurements = Measurements(scheme, Target(scheme, 1000))
    assert measurements.of_scheme() == {"policy_lag": {"mean": 0, "max": 0, "p50": 0, "p90": 0}, "updates": 0}
    assert measurements.summary(None)["env_steps_per_s"] == 0.0


def test_a_resumed_run_continues_its_figures(scheme):
    measurements = measure(scheme)
    train(scheme, measurements, 5)
    measurements.take_episodes()
    state = measurements.state(measurements.ended_at)
    assert (state["env_steps"], state["seconds"]) == (50, 5.0)
    again = measure(scheme, state)
    assert (again.env_steps, again.seconds, again.return_mean) == (50, 5.0, 3.0)
    train(scheme, again, 2, now=200.0)
    assert again.env_steps == 70
    assert again.seconds == 202.0 - 100.0 + 5.0


def test_a_summary_has_the_rate_of_the_whole_run(scheme, tmp_path):
    measurements = measure(scheme)
    train(scheme, measurements, 8)
    summary = measurements.summary(tmp_path)
    assert (summary["env_steps"], summary["seconds"], summary["env_steps_per_s"]) == (80, 8.0, 10.0)
    assert (summary["updates"], summary["seed"], summary["log_dir"]) == (8, 7, str(tmp_path))
    assert summary["policy_lag"] == {"mean": 0.5, "max": 2, "p50": 0.0, "p90": 1.0}
    assert measurements.summary(None)["log_dir"] is None


def test_policies_have_their_own_means(scheme):
    measurements = measure(scheme)
    train(scheme, measurements, 3)
    for number, episode in enumerate(scheme.finished):
        episode.policy_returns = {"hunter": float(number), "prey": 2.0 * number}
    metrics = measurements.metrics(None, None)
    assert metrics["policies"] == {"hunter": {"return_mean": 1.0}, "prey": {"return_mean": 2.0}}
    assert measurements.summary(None)["policy_return_means"] == {"hunter": 1.0, "prey": 2.0}


def test_the_progress_line_has_the_newest_evaluation(scheme):
    measurements = measure(scheme)
    train(scheme, measurements, 2)
    assert measurements.status(None)["eval_return"] is None
    scheme.start_evaluation(1)
    status = measurements.status(scheme.poll_evaluation())
    assert (status["eval_return"], status["env_steps"], status["target_steps"]) == (2.0, 20, 1000)
    assert (status["lag"], status["workers"], status["workers_missing"]) == (0.5, 0, 0)


def target_of(steps, communication="synchronous", **options):
    settings = {"col_communication": communication, "grad_communication": communication}
    algorithm = SimpleNamespace(options=SimpleNamespace(**options))
    agent = SimpleNamespace(algo_factory=algorithm)
    return Target(SimpleNamespace(settings=settings, learns_offline=False, agent=agent), steps)


def ledger(collected, consumed_unique, consumed, nan=0):
    return {"collected": collected, "consumed_unique": consumed_unique, "consumed": consumed, "dropped": {"nan": nan}}


def test_a_synchronous_run_ends_after_the_last_use_of_its_rollouts():
    target = target_of(100, num_epochs=2)
    assert not target.is_reached(90, ledger(90, 90, 180), 0)
    assert not target.is_reached(100, ledger(100, 100, 150), 0)
    assert target.is_reached(100, ledger(100, 100, 200), 0)
    assert target.is_reached(100, ledger(100, 100, 150), 50)  # 50 samples of skipped updates count as used
    assert not target.is_reached(100, ledger(100, 80, 160, nan=20), 0)


def test_a_further_rollout_also_ends_a_synchronous_run():
    target = target_of(100, target_kl=0.1, num_epochs=4)
    target.count(100)
    assert not target.is_reached(100, ledger(100, 100, 99), 0)
    target.count(120)
    assert target.is_reached(120, ledger(120, 100, 99), 0)


@pytest.mark.parametrize(("steps", "communication"), [(0, "synchronous"), (100, "asynchronous")])
def test_other_runs_end_at_the_target(steps, communication):
    assert target_of(steps, communication).is_reached(steps, ledger(steps, 0, 0), 0)


def test_the_first_due_event_is_found():
    due = Due(1000, None, 150, 400)
    assert (due.record, due.evaluation, due.checkpoint, due.first) == (5, 150, 400, 5)
    due.after_record(149)
    assert (due.recorded_steps, due.record, due.first) == (149, 154, 150)
    due.after_evaluation(310)
    due.after_checkpoint(810)
    due.after_record(900)
    assert (due.evaluation, due.checkpoint, due.record, due.first) == (450, 1200, 905, 450)
    assert Due(1000, 5000, None, None).first == 1000


def test_a_resumed_run_continues_its_plan():
    due = Due(1000, 100, 150, 400)
    due.resume(400, 330)
    assert (due.recorded_steps, due.record, due.evaluation, due.checkpoint, due.first) == (330, 430, 450, 800, 430)


def test_a_record_is_due_after_some_seconds_with_new_steps():
    now = [0.0]
    due = Due(1000, 100, None, None, 2.0, lambda: now[0])
    assert not due.is_record(10)
    now[0] = 2.0
    assert due.is_record(10)
    due.after_record(10)
    assert not due.is_record(10)
    now[0] = 3.9
    assert not due.is_record(20)
    assert due.is_record(110)
    now[0] = 4.0
    assert due.is_record(20)
    assert not due.is_record(10)


def failing(error):
    def fail(*arguments):
        raise error
    return fail


@pytest.mark.parametrize("take", ["poll", "wait"])
def test_a_result_is_returned_once(scheme, take):
    evaluations = EvaluationTimer(scheme)
    assert not getattr(evaluations, take)()
    scheme.step()
    evaluations.start(3)
    assert evaluations.is_running
    assert evaluations.last is None
    assert getattr(evaluations, take)()
    assert not evaluations.is_running
    assert evaluations.last.returns == (1.0,) * 3
    assert not getattr(evaluations, take)()
    assert evaluations.last.returns == (1.0,) * 3


def test_an_unfinished_evaluation_continues(scheme):
    evaluations = EvaluationTimer(scheme)
    evaluations.start(1)
    result = scheme.evaluations.pop()
    assert not evaluations.poll()
    assert evaluations.is_running
    scheme.evaluations.append(result)
    assert evaluations.poll()
    assert evaluations.last is result


def test_results_requested_by_others_are_not_taken(scheme):
    evaluations = EvaluationTimer(scheme)
    scheme.start_evaluation(1)
    assert not evaluations.poll()
    assert not evaluations.wait()
    assert scheme.poll_evaluation().returns == (0.0,)


def test_a_played_evaluation_is_returned_but_not_stored(scheme):
    evaluations = EvaluationTimer(scheme)
    scheme.step()
    assert evaluations.play(2).returns == (1.0, 1.0)
    assert evaluations.last is None
    scheme.wait_evaluation = lambda timeout_s: None
    with pytest.raises(StoppedError):
        evaluations.play(2)


@pytest.mark.parametrize("error", [ValueError("environment broke"), WorkerLostError("died")], ids=repr)
def test_a_failure_is_logged_and_the_next_evaluation_works(scheme, caplog, error):
    evaluations = EvaluationTimer(scheme)
    evaluations.start(1)
    find, scheme.poll_evaluation = scheme.poll_evaluation, failing(error)
    assert not evaluations.poll()
    assert str(error) in caplog.text
    assert not evaluations.is_running
    assert evaluations.last is None
    scheme.poll_evaluation = find
    evaluations.start(1)
    assert evaluations.poll()


def test_a_lost_worker_ends_a_run_if_failures_raise(scheme):
    scheme.settings["on_worker_failure"] = "raise"
    evaluations = EvaluationTimer(scheme)
    evaluations.start(1)
    scheme.poll_evaluation = failing(WorkerLostError("died"))
    with pytest.raises(WorkerLostError, match="died"):
        evaluations.poll()


def test_the_first_event_that_is_due_is_planned_again_after_each_event():
    due = Due(1000, 10_000, 100, 70)
    assert due.first == 70
    due.after_checkpoint(75)
    assert due.first == 100
    due.after_evaluation(100)
    assert due.first == 140
    due.after_checkpoint(990)
    due.after_evaluation(990)
    assert due.first == 1000
