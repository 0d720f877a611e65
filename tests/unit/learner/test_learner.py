"""Tests of `Learner` with a fake scheme, which has no workers."""

from __future__ import annotations

import json
import math
import pickle
import time
from types import SimpleNamespace
from pathlib import Path

import pytest

from pytorchrl.files.atomic import put_in_place
from pytorchrl import PPO
from pytorchrl.errors import ConfigError, EnvError, LedgerError, PyTorchRLError, StartError, StoppedError
from pytorchrl.learner.learner import Learner
from tests.unit.learner.fake_learners import make, records


def test_train_makes_the_updates_that_reach_the_target(fake_scheme):
    learner = make(fake_scheme(), 95)
    summary = learner.train()
    assert summary["updates"] == 10
    assert learner.env_steps == 100
    assert learner.done()


def test_constructor_starts_nothing(fake_scheme, tmp_path):
    scheme = fake_scheme()
    make(scheme, log_dir=tmp_path / "run")
    assert scheme.calls == []
    assert list((tmp_path / "run").iterdir()) == []


def test_done_changes_nothing(fake_scheme):
    scheme = fake_scheme()
    learner = make(scheme)
    assert [learner.done() for _ in range(3)] == [False] * 3
    assert (scheme.calls, scheme.version) == ([], 0)


def test_target_zero_starts_and_makes_no_update(fake_scheme):
    scheme = fake_scheme()
    with make(scheme, 0) as learner:
        assert learner.train()["updates"] == 0
    assert scheme.calls == [("start", 0), ("stop",)]


@pytest.mark.parametrize("options", [
    {"target_steps": -1}, {"target_steps": 1.5}, {"target_steps": "2"}, {"target_steps": True},
    {"target_steps": None}, {"eval_every": 0}, {"eval_every": -5}, {"eval_episodes": 0}, {"log_every": 0},
    {"log_every": 0.5}, {"progress": 1}, {"log_dir": 3},
])
def test_wrong_options_are_refused_by_name(fake_scheme, options):
    name = next(iter(options))
    with pytest.raises(ConfigError, match=name):
        make(fake_scheme(), **options)


@pytest.mark.parametrize(("options", "message"), [
    ({"log_dir": ""}, "log_dir must be a directory"), ({"overwrite": True}, "needs a log_dir"),
    ({"eval_episodes": 5}, "needs eval_every"),
])
def test_options_without_effect_are_refused(fake_scheme, options, message):
    with pytest.raises(ConfigError, match=message):
        make(fake_scheme(), **options)


def test_unknown_option_suggests_the_nearest_name(fake_scheme):
    with pytest.raises(ConfigError, match="did you mean 'eval_every'"):
        make(fake_scheme(), eval_evry=10)


def test_evaluation_without_test_environments_is_refused(fake_scheme):
    with pytest.raises(ConfigError, match="test_envs_factory"):
        make(fake_scheme(can_test=False), eval_every=10)


def test_summary_has_exactly_the_published_fields(fake_scheme):
    with make(fake_scheme()) as learner:
        summary = learner.train()
    assert set(summary) == {
        "env_steps", "seconds", "env_steps_per_s", "updates", "return_mean", "return_episodes", "policy_lag",
        "findings", "ledger", "seed", "scheme", "log_dir"}
    assert set(summary["policy_lag"]) == {"mean", "max", "p50", "p90"}
    assert (summary["return_mean"], summary["return_episodes"], summary["seed"]) == (5.5, 10, 7)
    assert summary["env_steps_per_s"] == pytest.approx(summary["env_steps"] / summary["seconds"])


def test_return_mean_covers_the_last_hundred_episodes(fake_scheme):
    learner = make(fake_scheme(steps_per_update=1), 300)
    summary = learner.train()
    assert (summary["return_mean"], summary["return_episodes"]) == (250.5, 100)


def test_return_mean_without_an_episode_is_none_not_zero(fake_scheme):
    learner = make(fake_scheme(), 0)
    assert learner.train()["return_mean"] is None


def test_stop_is_idempotent_and_returns_the_final_ledger(fake_scheme):
    scheme = fake_scheme()
    learner = make(scheme)
    learner.train()
    first = learner.stop()
    assert learner.stop() == first
    assert first["dropped"]["shutdown"] == 5
    assert scheme.calls.count(("stop",)) == 1
    assert learner.summary()["ledger"] == first


def test_stop_reports_a_ledger_that_does_not_balance(fake_scheme):
    scheme = fake_scheme()
    learner = make(scheme)
    learner.train()
    scheme.lost = 3
    with pytest.raises(LedgerError, match="3 of 105 env steps"):
        learner.stop()
    assert learner.stopped


@pytest.mark.parametrize("wrong", [
    {"resident": -3, "consumed_unique": 103}, {"dropped": {"shutdown": 8, "nan": -3}},
])
def test_stop_reports_negative_counts(fake_scheme, wrong):
    scheme = fake_scheme()
    ledger = scheme.ledger
    learner = make(scheme)
    learner.train()
    scheme.ledger = lambda: {**ledger(), **wrong}
    with pytest.raises(LedgerError):
        learner.stop()


def test_metrics_before_the_start_are_zeros_and_start_nothing(fake_scheme, capsys):
    scheme = fake_scheme()
    learner = make(scheme)
    metrics = learner.get_metrics()
    learner.print_info()
    assert (metrics["updates"], metrics["policy_lag"]["max"], metrics["scheme"]) == (0, 0, {})
    assert json.loads(capsys.readouterr().out)["updates"] == 0
    assert scheme.calls == []


@pytest.mark.parametrize("call", [Learner.step, Learner.train, Learner.start, Learner.evaluate])
def test_use_after_stop_is_refused(fake_scheme, call):
    learner = make(fake_scheme())
    learner.stop()
    with pytest.raises(StoppedError):
        call(learner)


def test_learner_does_not_pickle_and_says_why(fake_scheme):
    with pytest.raises(TypeError, match="owns running workers"):
        pickle.dumps(make(fake_scheme()))


def test_context_manager_stops_also_after_an_error_and_keeps_the_error(fake_scheme):
    scheme = fake_scheme()
    with pytest.raises(ZeroDivisionError), make(scheme):
        raise ZeroDivisionError
    assert scheme.calls == [("stop",)]


def test_an_error_in_a_step_stops_the_scheme_and_reaches_the_user(fake_scheme):
    def fail(scheme):
        if scheme.version == 3:
            raise PyTorchRLError("worker 2 broke")
    scheme = fake_scheme(on_step=fail)
    with pytest.raises(PyTorchRLError, match="worker 2 broke"):
        make(scheme).train()
    assert scheme.calls[-1] == ("stop",)


def train_by_steps(learner):
    with learner:
        while True:
            learner.step()


@pytest.mark.parametrize("train", [Learner.train, train_by_steps])
def test_an_error_saves_the_model_first(fake_scheme, tmp_path, train):
    def fail(scheme):
        if scheme.version == 3:
            raise PyTorchRLError("worker 2 broke")
    scheme = fake_scheme(on_step=fail)
    with pytest.raises(PyTorchRLError, match="worker 2 broke"):
        train(make(scheme, 100, tmp_path, log_every=50))
    assert [name for name, *_ in scheme.calls[-2:]] == ["save_model", "stop"]
    assert (tmp_path / "model.pt").exists()


def test_an_error_before_the_first_update_saves_no_model(fake_scheme, tmp_path):
    def fail(scheme):
        raise PyTorchRLError("worker 2 broke")
    with pytest.raises(PyTorchRLError, match="worker 2 broke"):
        make(fake_scheme(on_step=fail), 100, tmp_path).train()
    assert not (tmp_path / "model.pt").exists()


def test_a_model_that_cannot_be_saved_after_an_error_does_not_hide_the_error(fake_scheme, tmp_path, caplog):
    def fail(scheme):
        if scheme.version == 3:
            raise PyTorchRLError("worker 2 broke")
    scheme = fake_scheme(on_step=fail)
    scheme.save_model = lambda path: (_ for _ in ()).throw(PyTorchRLError("all ranks are lost"))
    with pytest.raises(PyTorchRLError, match="worker 2 broke"):
        make(scheme, 100, tmp_path).train()
    assert "saving the model after a failure also failed: all ranks are lost" in caplog.text
    assert scheme.calls[-1] == ("stop",)


def test_records_are_written_at_intervals_and_at_the_end(fake_scheme, tmp_path):
    with make(fake_scheme(), 100, tmp_path, log_every=30) as learner:
        learner.train()
    assert [record["env_steps"] for record in records(tmp_path)] == [30, 60, 90, 100]
    # The statistics of a record are means since the previous record.
    assert [record["algorithm"]["loss"] for record in records(tmp_path)] == [2.0, 5.0, 8.0, 10.0]


def test_a_record_that_is_due_exactly_at_the_end_is_written_once(fake_scheme, tmp_path):
    with make(fake_scheme(), 60, tmp_path, log_every=30) as learner:
        learner.train()
    assert [record["env_steps"] for record in records(tmp_path)] == [30, 60]


def test_metrics_keep_the_last_statistics_of_the_algorithm(fake_scheme, tmp_path):
    """Check that metrics contain the statistics of the latest record until the next update starts new means."""
    with make(fake_scheme(), 100, tmp_path, log_every=30) as learner:
        assert learner.get_metrics()["algorithm"] == {}  # no update has been made
        found = []
        while not learner.done():
            learner.step()
            found.append(learner.get_metrics()["algorithm"]["loss"])
        # The third, sixth and ninth updates are recorded, and new means start after them.
        assert found == [1.0, 1.5, 2.0, 4.0, 4.5, 5.0, 7.0, 7.5, 8.0, 10.0]
        learner.train()
        assert learner.get_metrics()["algorithm"] == records(tmp_path)[-1]["algorithm"] != {}
    assert learner.get_metrics()["algorithm"]["loss"] == 10.0


def test_a_record_without_a_new_update_has_no_statistics(fake_scheme, tmp_path):
    with make(fake_scheme(), 30, tmp_path, log_every=30, eval_every=30) as learner:
        learner.train()
    assert [set(record["algorithm"]) for record in records(tmp_path)] == [{"loss", "entropy"}, set()]


def test_non_finite_numbers_are_recorded_as_null(fake_scheme, tmp_path):
    scheme = fake_scheme()
    step = scheme.step
    scheme.step = lambda: {**step(), "loss": math.nan, "grad_norm": math.inf}
    with make(scheme, 10, tmp_path) as learner:
        learner.train()
    assert records(tmp_path)[-1]["algorithm"] == {"loss": None, "entropy": 0.5, "grad_norm": None}


def test_run_file_has_settings_seed_and_versions(fake_scheme, tmp_path):
    with make(fake_scheme(), 10, tmp_path, recipe={"algorithm": "ppo"}) as learner:
        learner.train()
    run = json.loads((tmp_path / "run.json").read_text())
    assert (run["seed"], run["recipe"], run["target_steps"]) == (7, {"algorithm": "ppo"}, 10)
    assert {"python", "torch", "numpy"} <= set(run["versions"])
    assert run["scheme"] == fake_scheme().settings
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["ledger"]["dropped"]["shutdown"] == 5


def test_model_is_saved_at_the_end_and_by_name(fake_scheme, tmp_path):
    with make(fake_scheme(), 10, tmp_path) as learner:
        learner.train()
        assert learner.save_model("best") == str(tmp_path / "best.pt")
    assert {(tmp_path / name).read_bytes() for name in ("model.pt", "best.pt")} == {b"model"}


def test_a_failed_save_keeps_the_existing_model(fake_scheme, tmp_path):
    def fail(path):
        with put_in_place(Path(path)) as file:
            file.write(b"half a mod")
            raise OSError(28, "No space left on device")
    scheme = fake_scheme()
    with make(scheme, 10, tmp_path) as learner:
        learner.train()
        scheme.save_model = fail
        with pytest.raises(OSError, match="No space"):
            learner.save_model()
    assert (tmp_path / "model.pt").read_bytes() == b"model"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "metrics.jsonl", "model.pt", "result.json", "run.json"]


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".", "a\0", "-x", "x" * 101, None])
def test_names_of_models_cannot_leave_the_run_directory(fake_scheme, tmp_path, name):
    with pytest.raises(ConfigError, match="name"):
        make(fake_scheme(), 10, tmp_path).save_model(name)


def test_saving_needs_a_log_dir(fake_scheme):
    with pytest.raises(ConfigError, match="log_dir"):
        make(fake_scheme()).save_model()


def test_evaluations_run_during_training_and_are_recorded(fake_scheme, tmp_path, monkeypatch):
    monkeypatch.setattr("pytorchrl.learner.learner._LOOK_INTERVAL_S", 0.0)
    scheme = fake_scheme()
    with make(scheme, 100, tmp_path, eval_every=40, eval_episodes=2) as learner:
        learner.train()
    assert scheme.calls.count(("start_evaluation", 2)) == 3
    evaluated = [record["evaluation"] for record in records(tmp_path) if "evaluation" in record]
    assert evaluated[0] == {"version": 4, "episodes": 2, "return_mean": 4.0, "return_std": 0.0, "length_mean": 3.0}


def evaluated_versions(path):
    return list(dict.fromkeys(record["evaluation"]["version"] for record in records(path) if "evaluation" in record))


def test_evaluations_occur_at_multiples_and_after_the_last_update(fake_scheme, tmp_path):
    scheme = fake_scheme()
    with make(scheme, 60, tmp_path, eval_every=20) as learner:
        learner.train()
    assert evaluated_versions(tmp_path) == [2, 4, 6]
    # The model is saved before the final evaluation, which could fail.
    assert [name for name, *_ in scheme.calls[-3:]] == ["save_model", "start_evaluation", "stop"]


def test_an_evaluation_that_is_due_while_one_runs_is_skipped(fake_scheme, tmp_path):
    scheme = fake_scheme()
    scheme.poll_evaluation = lambda: scheme.evaluations.pop() if scheme.version >= 5 else None
    scheme.wait_evaluation = lambda timeout_s: scheme.evaluations.pop()
    with make(scheme, 95, tmp_path, eval_every=20) as learner:
        learner.train()
    assert evaluated_versions(tmp_path) == [2, 6, 8, 10]


def test_a_failed_evaluation_does_not_end_training(fake_scheme, tmp_path, caplog):
    scheme, polls = fake_scheme(), []
    original = scheme.poll_evaluation

    def poll():
        polls.append(scheme.version)
        if len(polls) == 1:
            raise EnvError("test environment broke")
        return original()
    scheme.poll_evaluation = poll
    with make(scheme, 60, tmp_path, eval_every=20) as learner:
        learner.train()
    assert learner.env_steps == 60
    assert "an evaluation failed, so there is no result: test environment broke" in caplog.text
    assert evaluated_versions(tmp_path)[-1] == 6


def test_a_dry_run_evaluates_nothing(fake_scheme):
    scheme = fake_scheme()
    with make(scheme, 0, eval_every=20) as learner:
        learner.train()
    assert [name for name, *_ in scheme.calls] == ["start", "stop"]


def test_evaluate_waits_for_the_requested_episodes(fake_scheme):
    with make(fake_scheme()) as learner:
        learner.train()
        assert learner.evaluate(5).returns == (10.0,) * 5


@pytest.mark.parametrize("number", [0, -1, 1.5, "2", True, None])
def test_evaluate_refuses_invalid_numbers_of_episodes(fake_scheme, number):
    with pytest.raises(ConfigError, match="num_episodes"):
        make(fake_scheme()).evaluate(number)


def test_update_algorithm_parameter_reaches_the_scheme(fake_scheme):
    scheme = fake_scheme()
    make(scheme).update_algorithm_parameter("lr", 0.1)
    assert scheme.calls == [("start", 100), ("update_algorithm_parameter", "lr", 0.1)]


def test_print_info_writes_the_metrics(fake_scheme, capsys):
    learner = make(fake_scheme())
    learner.train()
    learner.print_info()
    assert json.loads(capsys.readouterr().out)["env_steps"] == 100


def test_step_adds_little_time_to_the_update(fake_scheme):
    scheme = fake_scheme(steps_per_update=1)
    info = dict.fromkeys(("loss", "policy_loss", "value_loss", "entropy", "kl", "clip_fraction", "lr", "n"), 0.5)
    scheme.step = lambda: info
    learner = make(scheme, 10**9)
    learner.start()
    best = min(_seconds(learner.step, 2000) for _ in range(5)) / 2000
    assert best < 20e-6


def _seconds(call, times):
    start = time.perf_counter()
    for _ in range(times):
        call()
    return time.perf_counter() - start


UNSAVED = "nothing is saved, because there is no log_dir"
HEAD = "seed 7, cpu, 1 worker with 1 environment, 100 parameters"


def test_startup_messages_are_shown_before_the_progress_line(fake_scheme, capsys):
    with Learner(fake_scheme(), 100, progress=True) as learner:
        learner.start()
        assert capsys.readouterr().err.splitlines() == [UNSAVED, "starting ...", HEAD]
        learner.train()
    with Learner(fake_scheme(), 100, progress=False) as learner:
        capsys.readouterr()
        learner.train()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("compiles", [True, False])
def test_progress_is_shown_before_the_first_update(fake_scheme, capsys, compiles):
    shown = []
    scheme = fake_scheme(on_step=lambda scheme: shown.append(capsys.readouterr().err.splitlines()))
    scheme.agent.algo_factory.options = SimpleNamespace(is_compiled=compiles)
    with Learner(scheme, 100, progress=True) as learner:
        learner.train()
    compiling = ["the first updates compile the losses, which takes up to a minute"]
    assert shown[0][:-1] == [UNSAVED, "starting ...", HEAD, *(compiling if compiles else [])]
    assert shown[0][-1] == "  0/100 steps    0%  0 steps/s  return -  left --:--  lag 0.5 updates"


def test_a_failed_start_shows_its_messages_and_its_error(fake_scheme, capsys):
    def fail():
        raise StartError("no room")
    with pytest.raises(StartError, match="no room"), Learner(fake_scheme(on_start=fail), 100, progress=True) as learner:
        learner.train()
    assert capsys.readouterr().err.splitlines() == [UNSAVED, "starting ..."]


def test_a_numbered_run_has_its_name(fake_scheme, tmp_path):
    with make(fake_scheme(), 10, f"{tmp_path}/", run_name="mine") as learner:
        learner.train()
    assert learner.log_dir == tmp_path / "mine-1"
    assert learner.summary()["log_dir"] == f"{tmp_path}/mine-1"


@pytest.mark.parametrize("log_dir", [None, "a"])
def test_a_name_without_a_directory_of_runs_is_refused(fake_scheme, tmp_path, log_dir):
    path = None if log_dir is None else str(tmp_path / log_dir)
    with pytest.raises(ConfigError, match="run_name='mine' needs log_dir to be a directory of runs, "
                                          "got"):
        Learner(fake_scheme(), 10, path, run_name="mine")
    assert not list(tmp_path.iterdir())


def test_a_learner_accepts_only_a_scheme():
    with pytest.raises(ConfigError, match=r"scheme must be a Scheme, such as Scheme\(algorithm, .*got "
                                          r"PPO.create_factory\(\)"):
        Learner(PPO.create_factory(), 10)
