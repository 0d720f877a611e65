"""Check the callbacks of this library; trackers and searches are replaced by objects that record their calls."""

from __future__ import annotations

import csv
import json
import sys
from types import SimpleNamespace

import pytest

from pytorchrl import ConfigError, train
from pytorchrl.callbacks import (
    Callback,
    CsvLog,
    MlflowLog,
    OptunaPruning,
    SaveBestModel,
    StopAtScore,
    StopOnPlateau,
    TuneReport,
    WandbLog,
)
from pytorchrl.scheme import Evaluation

TINY = {"num_envs": 2, "num_steps": 16, "num_epochs": 1, "num_mini_batch": 1, "hidden_sizes": (8,), "progress": False,
        "tensorboard": False, "seed": 1}


class Run:
    """A learner whose figures a test sets."""

    def __init__(self, log_dir="runs"):
        self.log_dir, self.return_mean, self.env_steps, self.reasons, self.saved = log_dir, None, 0, [], []

    def request_stop(self, reason):
        self.reasons.append(reason)

    def save_model(self, name, *, evaluated):
        assert evaluated
        self.saved.append((name, self.env_steps))


def evaluation(value):
    return Evaluation(0, (value,), (1,))


def test_the_best_model_is_saved_also_after_a_resume():
    run, callback = Run(), SaveBestModel()
    assert callback.on_record(run, {}) is None
    for run.env_steps, value in enumerate((1.0, 3.0, 2.0, 3.0, 4.0)):
        callback.on_evaluation(run, evaluation(value))
    assert run.saved == [("best", 0), ("best", 1), ("best", 4)]
    assert callback.on_record(run, {}) == {"best_return": 4.0}
    resumed = SaveBestModel("top")
    resumed.load_state(callback.state())
    resumed.on_evaluation(run, evaluation(4.0))
    resumed.on_evaluation(run, evaluation(5.0))
    assert run.saved[3:] == [("top", 4)]


@pytest.mark.parametrize("callback", [SaveBestModel(), CsvLog()])
def test_callbacks_that_write_need_a_directory(callback):
    with pytest.raises(ConfigError, match="needs a log_dir"):
        train("ppo", "CartPole-v1", target_steps=64, callbacks=[callback], **TINY)


def test_a_run_stops_at_a_score():
    run, trained, evaluated = Run(), StopAtScore(10), StopAtScore(10, evaluated=True)
    for run.return_mean in (None, 9.9):
        trained.on_record(run, {})
    evaluated.on_evaluation(run, evaluation(9.9))
    run.return_mean = 10.0
    evaluated.on_record(run, {})
    trained.on_evaluation(run, evaluation(10.0))
    assert not run.reasons
    trained.on_record(run, {})
    evaluated.on_evaluation(run, evaluation(10.0))
    assert run.reasons == ["the training episodes reached the score 10", "an evaluation reached the score 10"]


def test_a_run_stops_on_a_plateau_also_after_a_resume():
    run, callback = Run(), StopOnPlateau(100, min_improvement=1.0)
    for run.env_steps, run.return_mean in ((0, None), (50, 1.0), (60, 2.0), (100, 2.1), (199, 3.0)):
        callback.on_record(run, {})
    resumed = StopOnPlateau(100, min_improvement=1.0)
    resumed.load_state(callback.state())
    resumed.on_record(run, {})  # 99 env steps after the best mean return, so this is too early
    assert not run.reasons
    run.env_steps = 200
    resumed.on_record(run, {})
    assert run.reasons == ["the mean return has not improved for 100 env steps"]
    run.env_steps, run.return_mean = 210, 3.2  # an improvement
    resumed.on_record(run, {})
    run.env_steps = 309
    resumed.on_record(run, {})
    assert len(run.reasons) == 1
    assert resumed.state() == {"best": 3.2, "best_at": 210}


@pytest.mark.parametrize(("make", "message"), [
    (lambda: StopAtScore(float("nan")), "score must be a finite number, got nan"),
    (lambda: StopAtScore("high"), "score must be a finite number, got 'high'"),
    (lambda: StopOnPlateau(0), "patience must be a finite number >= 1, got 0"),
    (lambda: StopOnPlateau(5, -1.0), "min_improvement must be a finite number >= 0"),
])
def test_wrong_arguments_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_csv_file_has_all_numbers_of_all_records(tmp_path):
    class Late(Callback):
        def on_record(self, run, record):
            return {"late": 1.5} if run.env_steps > 64 else None
    train("ppo", "CartPole-v1", target_steps=128, log_every=32, log_dir=tmp_path / "run", callbacks=[Late(), CsvLog()],
          **TINY)
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    with open(tmp_path / "run/metrics.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["env_steps"]) for row in rows] == [record["env_steps"] for record in records]
    assert [row["policy_lag/mean"] for row in rows] == [str(record["policy_lag"]["mean"]) for record in records]
    assert rows[0]["callbacks/late"] == ""
    assert rows[-1]["callbacks/late"] == "1.5"


WANDB = ["init", "define_metric", "log", "finish"]
MLFLOW = ["set_experiment", "start_run", "log_params", "log_dict", "log_metrics", "end_run", "active_run"]
# Options that the tracker must get: given, of the preset, and defaults.
EXPECTED = {"algorithm": "ppo", "env": "CartPole-v1", "target_steps": 128, "num_epochs": TINY["num_epochs"],
            "gae_lambda": 0.9, "optimizer": "adam", "queue_size": None, "col_communication": "synchronous"}


@pytest.fixture
def fake(monkeypatch):
    """Return a function that installs a package made of recorded calls, and returns the list of calls."""
    def install(name, methods):
        calls = []

        def record(method):
            def call(*args, **kwargs):
                calls.append((method, args, kwargs))
                return package
            return call
        package = SimpleNamespace(**{method: record(method) for method in methods}, data=SimpleNamespace(params={}))
        monkeypatch.setitem(sys.modules, name, package)
        return calls
    return install


def run_with(tmp_path, callback):
    return train("ppo", "CartPole-v1", target_steps=128, log_every=64, log_dir=tmp_path / "run", callbacks=[callback],
                 **TINY)


def test_records_are_sent_to_wandb(tmp_path, fake):
    calls = fake("wandb", WANDB)
    run_with(tmp_path, WandbLog(project="p", mode="offline"))
    assert [name for name, *_ in calls] == ["init", "define_metric", "log", "log", "finish"]
    init = calls[0][2]
    assert (init["project"], init["mode"], init["name"]) == ("p", "offline", "run")
    assert {name: init["config"][name] for name in EXPECTED} == EXPECTED
    assert calls[1][1:] == (("*",), {"step_metric": "env_steps"})
    assert [call[1][0]["env_steps"] for call in calls[2:4]] == [64, 128]
    assert calls[2][1][0]["ledger/collected"] == 64


def test_records_are_sent_to_mlflow(tmp_path, fake):
    calls = fake("mlflow", MLFLOW)
    run_with(tmp_path, MlflowLog("e", run_name="r"))
    names = [name for name, *_ in calls if name != "log_params"]
    assert names == ["set_experiment", "start_run", "log_dict", "log_metrics", "log_metrics", "active_run", "end_run"]
    assert calls[1][2] == {"run_name": "r"}
    assert [call[2] for call in calls if call[0] == "log_metrics"] == [{"step": 64}, {"step": 128}]
    sent = [call[1][0] for call in calls if call[0] == "log_params"]
    assert max(map(len, sent)) <= 100
    found = {name: value for some in sent for name, value in some.items()}
    assert len(found) == sum(map(len, sent))
    assert {name: found[name] for name in EXPECTED} == {
        name: value if isinstance(value, str) else json.dumps(value) for name, value in EXPECTED.items()}


def test_trackers_get_all_options_and_a_name_without_a_directory_too(fake):
    wandb, mlflow = fake("wandb", WANDB), fake("mlflow", MLFLOW)
    options = {**TINY, "tensorboard": True, "target_steps": 64, "callbacks": [WandbLog(), MlflowLog()]}
    agent = train("ppo", "CartPole-v1", **options)
    config = wandb[0][2]["config"]
    names = {f"ppo-CartPole-v1-seed={agent.seed}"}
    assert {wandb[0][2]["name"], mlflow[0][2]["run_name"]} == names
    # Every option of every part is there, with the value that applies.
    for factory in (agent.agent.algo_factory, agent.agent.actor_factory, agent.agent.storage_factory):
        assert set(factory.options.declarations()) <= set(config)
    assert {name: config[name] for name in EXPECTED} == {**EXPECTED, "target_steps": 64}
    assert config["vec_env_size"] == TINY["num_envs"]
    assert config["test_envs_factory/vec_env_size"] == 8
    parameters = {name for call in mlflow if call[0] == "log_params" for name in call[1][0]}
    assert parameters == set(config)


def test_records_are_sent_to_tune(tmp_path, fake):
    calls = fake("ray.tune", ["report"])
    run_with(tmp_path, TuneReport())
    assert calls
    assert all(call[1][0]["return_mean"] > 0 for call in calls)


@pytest.mark.parametrize(("callback", "package"), [(WandbLog(), "wandb"), (MlflowLog(), "mlflow"),
                                                   (TuneReport(), "ray.tune")])
def test_a_missing_package_is_an_error_before_anything_starts(monkeypatch, callback, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=f"needs the extra `{package.split('.')[-1]}`: pip install"):
        train("ppo", "CartPole-v1", target_steps=64, callbacks=[callback], **TINY)


def test_a_pruned_trial_stops_the_run():
    reports, run = [], Run()
    trial = SimpleNamespace(report=lambda value, step: reports.append((value, step)),
                            should_prune=lambda: len(reports) == 2)
    callback = OptunaPruning(trial)
    for run.env_steps, run.return_mean in ((10, None), (20, 1.0), (20, 1.0), (30, 2.0)):
        callback.on_record(run, {})
    assert reports == [(1.0, 20), (2.0, 30)]
    assert callback.pruned
    assert run.reasons == ["Optuna pruned the trial"]


def test_a_pruned_run_raises_the_exception_of_optuna(monkeypatch):
    class TrialPruned(Exception):  # noqa: N818 - the name of Optuna
        pass
    monkeypatch.setitem(sys.modules, "optuna", SimpleNamespace(TrialPruned=TrialPruned))
    callback = OptunaPruning(SimpleNamespace(report=lambda value, step: None, should_prune=lambda: True))
    callback.raise_if_pruned()
    run = Run()
    run.return_mean = 1.0
    callback.on_record(run, {})
    with pytest.raises(TrialPruned):
        callback.raise_if_pruned()
