"""Tests of the measurements of a run, such as env steps, rates and means."""

from __future__ import annotations

import pytest

from pytorchrl.learner.measurements import Measurements
from pytorchrl.learner.targets import Target


@pytest.fixture
def scheme(fake_scheme):
    return fake_scheme()


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
