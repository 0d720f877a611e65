"""Check callbacks in situations that people reported for other libraries; tests/reports.md names the reports."""

from __future__ import annotations

import json
import signal
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pytorchrl import load, train
from pytorchrl.callbacks import Callback, MlflowLog, SaveBestModel, StopAtScore, StopOnPlateau, WandbLog
from pytorchrl.callbacks.base import Callbacks
from pytorchrl.errors import CallbackError, ConfigError
from pytorchrl.scheme import Evaluation
from pytorchrl.scheme.supervision.evaluation import Evaluator

TINY = {"num_envs": 2, "num_steps": 16, "num_epochs": 1, "num_mini_batch": 1, "hidden_sizes": (8,), "progress": False,
        "tensorboard": False, "seed": 1}


class Plain(Callback):
    """A callback without a state."""


def group(*callbacks):
    return Callbacks(callbacks, True, SimpleNamespace(log_dir="runs"))


@pytest.mark.parametrize("changed", [
    lambda best, plateau: (best, plateau), lambda best, plateau: (plateau, best),
    lambda best, plateau: (Plain(), best, plateau), lambda best, plateau: (plateau, Plain(), best, SaveBestModel("b"))],
    ids=["same", "other order", "one more", "all changes"])
def test_callbacks_keep_their_states_if_a_resumed_run_has_others(changed):
    best, plateau = SaveBestModel(), StopOnPlateau(100)
    best.best = 7.0
    plateau.load_state({"best": 3.0, "best_at": 50.0})
    states = group(best, plateau, Plain()).state()
    assert [saved["callback"] for saved in states] == ["SaveBestModel", "StopOnPlateau"]
    new_best, new_plateau = SaveBestModel(), StopOnPlateau(100)
    callbacks = changed(new_best, new_plateau)
    group(*callbacks).load_state(states)
    assert new_best.best == 7.0
    assert new_plateau.state() == {"best": 3.0, "best_at": 50.0}
    assert all(one.best == -np.inf for one in callbacks if isinstance(one, SaveBestModel) and one is not new_best)


def test_states_of_several_callbacks_of_a_class_keep_their_order_and_a_lost_state_is_named(caplog):
    saved = [SaveBestModel("a"), SaveBestModel("b")]
    saved[0].best, saved[1].best = 1.0, 2.0
    states = group(*saved, StopOnPlateau(5)).state()
    fresh = [SaveBestModel("a"), SaveBestModel("b")]
    group(*fresh).load_state(states)
    assert [one.best for one in fresh] == [1.0, 2.0]
    assert "StopOnPlateau" in caplog.text


class Wandb:
    """The package wandb, as far as `WandbLog` uses it: rows whose step is not above the last step are dropped."""

    def __init__(self, last_step=-1):
        self.rows, self.exit_code, self.last_step, self.axes = [], None, last_step, []

    def init(self, **settings):
        return self

    def define_metric(self, name, step_metric):
        self.axes.append((name, step_metric))

    def log(self, numbers, step=None):
        self.last_step, is_kept = max(self.last_step, step or 0), step is None or step >= self.last_step
        self.rows += [numbers] if is_kept else []

    def finish(self, exit_code=0):
        self.exit_code = exit_code


class Stops(Callback):
    """Ends the run in its second step, by an error or a signal."""

    def __init__(self, how):
        self.how, self.num_steps, self.calls = how, 0, []

    def on_step(self, run, info):
        self.num_steps += 1
        if self.num_steps == 2:
            self.how()

    def on_error(self, run, error):
        self.calls.append("on_error")

    def on_end(self, run, summary):
        self.calls.append("on_end")


def _fail():
    raise ValueError("on purpose")


@pytest.mark.parametrize(("how", "raised"), [
    (_fail, Exception), (lambda: signal.raise_signal(signal.SIGINT), KeyboardInterrupt),
    (lambda: signal.raise_signal(signal.SIGTERM), SystemExit)], ids=["error", "SIGINT", "SIGTERM"])
def test_a_tracker_learns_of_a_failure_before_the_end(how, raised, monkeypatch):
    wandb, stops = Wandb(), Stops(how)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with pytest.raises(raised):
        train("ppo", "CartPole-v1", target_steps=320, callbacks=[stops, WandbLog()], **TINY)
    assert stops.calls == ["on_error", "on_end"]
    assert wandb.exit_code == 1


def test_a_tracker_takes_the_records_of_a_run_that_resumes_behind_its_last_step(monkeypatch):
    wandb = Wandb(last_step=1_000)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    train("ppo", "CartPole-v1", target_steps=128, log_every=64, callbacks=[WandbLog(id="a", resume="must")], **TINY)
    assert [row["env_steps"] for row in wandb.rows] == [64, 128]
    assert wandb.axes == [("*", "env_steps")]
    assert wandb.exit_code == 0


def test_a_resumed_run_of_mlflow_accepts_changed_options(monkeypatch):
    logged = {"target_steps": "64", "gamma": "0.98"}

    def log_params(given):
        for name, value in given.items():
            if logged.setdefault(name, value) != value:  # as the server of MLflow does
                raise ValueError(f"INVALID_PARAMETER_VALUE: {name}")
    mlflow = SimpleNamespace(
        start_run=lambda **settings: SimpleNamespace(data=SimpleNamespace(params=dict(logged))), log_params=log_params,
        log_dict=lambda *arguments: None, log_metrics=lambda *arguments, step: None, active_run=lambda: None)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    train("ppo", "CartPole-v1", target_steps=128, callbacks=[MlflowLog(run_id="a")], **TINY)
    assert logged["target_steps"] == "64"
    assert logged["num_epochs"] == "1"


def test_the_best_model_has_the_weights_that_were_evaluated(tmp_path, monkeypatch):
    """The evaluation is held up until training has made further updates."""
    evaluated, goes_on = {}, threading.Event()

    def evaluate(self, weights, num_episodes, deterministic=True):
        goes_on.wait(10)
        evaluated[weights.version] = {name: np.array(value) for name, value in weights.state.items()}
        return Evaluation(weights.version, (float(-weights.version),), (1,))
    monkeypatch.setattr(Evaluator, "evaluate", evaluate)

    class LetsGo(Callback):
        def on_step(self, run, info):
            if run.updates >= 6:
                goes_on.set()
    train("ppo", "CartPole-v1", target_steps=640, eval_every=64, log_dir=tmp_path / "run",
          callbacks=[LetsGo(), SaveBestModel()], **TINY)
    best = load(tmp_path / "run", model="best")
    expected = evaluated[min(evaluated)]
    assert all(torch.equal(best.acting_state[name], torch.as_tensor(value)) for name, value in expected.items())
    last = load(tmp_path / "run")
    assert any(not torch.equal(last.acting_state[name], torch.as_tensor(value)) for name, value in expected.items())


class Adds(Callback):
    """Adds what it is given to the records."""

    def __init__(self, found):
        self.found = found

    def on_record(self, run, record):
        return self.found


def test_numbers_of_numpy_and_torch_are_recorded_as_numbers(tmp_path):
    found = {"a": np.float32(0.5), "b": torch.tensor(2.0, requires_grad=True), "c": torch.tensor([3]),
             "d": np.array([[4]]), "e": True}
    train("ppo", "CartPole-v1", target_steps=64, log_dir=tmp_path, callbacks=[Adds(found), Adds(None)], **TINY)
    last = json.loads((tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    assert last["callbacks"] == {"a": 0.5, "b": 2.0, "c": 3, "d": 4, "e": True}


@pytest.mark.parametrize(("found", "message"), [
    ({"a": "text"}, "'a' is 'text'"), ({"a": np.zeros(2)}, "'a' is array"), ({"a": None}, "'a' is None"),
    ([1.0], r"a mapping from names to numbers, or None; it returned \[1.0\]")], ids=str)
def test_other_values_of_callbacks_are_refused(found, message):
    with pytest.raises(CallbackError, match=rf"Adds.on_record raised ContractError: it must return .*{message}"):
        train("ppo", "CartPole-v1", target_steps=64, callbacks=[Adds(found)], **TINY)


class Misspelled(Callback):
    """Has methods that nothing calls, a method of its own, and one of the right name."""

    def on_strat(self, run):
        pass

    def _on_step(self):
        pass

    def on_something_else(self):
        pass

    def _on_no_account(self):
        pass

    def on_end(self, run, summary):
        pass


def test_methods_of_callbacks_that_are_not_called_are_named(caplog):
    group(Misspelled(), SaveBestModel(), StopOnPlateau(5))
    found = [record.getMessage() for record in caplog.records]
    assert [text.split(";")[0] for text in found] == [
        f"Misspelled.{name} is not called during training" for name in ("on_strat", "_on_step", "on_something_else")]
    assert [text.partition("did you mean ")[2] for text in found] == ["'on_start'?", "'on_step'?", ""]
    assert "on_checkpoint" in found[2]


@pytest.mark.parametrize("callback", [SaveBestModel, lambda: StopAtScore(1.0, evaluated=True)],
                         ids=["SaveBestModel", "StopAtScore"])
def test_callbacks_that_wait_for_evaluations_are_refused_without_them(callback, tmp_path):
    options = {"target_steps": 64, "log_dir": tmp_path / "run", **TINY}
    with pytest.raises(ConfigError, match=r"would have no effect, .*; give eval_every, or leave the callback out"):
        train("ppo", "CartPole-v1", callbacks=[callback()], **options)
    assert not (tmp_path / "run" / "run.json").exists()
    train("ppo", "CartPole-v1", callbacks=[callback()], eval_every=32, eval_episodes=1, **options)
    train("ppo", "CartPole-v1", callbacks=[StopAtScore(1e9)], **{**options, "log_dir": None})
