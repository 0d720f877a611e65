"""Check when callbacks are called, in all sixteen patterns, what they may change, and what happens to their errors."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace

import pytest

from pytorchrl import ASYNC, SYNC, ConfigError, Learner, Scheme, load, train
from pytorchrl.agent.synthetic import synthetic_agent
from pytorchrl.agent.data import Evaluation
from pytorchrl.callbacks import Callback
from pytorchrl.callbacks.base import Callbacks
from pytorchrl.errors import CallbackError
from tests.conftest import pairwise

TINY = {"num_envs": 2, "num_steps": 16, "num_epochs": 1, "num_mini_batch": 1, "hidden_sizes": (8,), "progress": False,
        "tensorboard": False, "seed": 1}
HOOKS = ("on_start", "on_step", "on_evaluation", "on_record", "on_checkpoint", "on_worker_lost", "on_end", "on_error")


class Spy(Callback):
    """Lists the calls of all hooks."""

    def __init__(self):
        self.calls = []


def _spy(name):
    def hook(self, run, *arguments):
        self.calls.append((name, run.updates, *arguments))
    return hook


for _name in HOOKS:
    setattr(Spy, _name, _spy(_name))


class Fails(Callback):
    """Raises an error in one hook."""


def failing(hook):
    def fail(self, run, *arguments):
        raise ValueError("on purpose")
    return type("Fails", (Fails,), {hook: fail})()


def names(spy):
    return [name for name, *_ in spy.calls]


@pytest.mark.parametrize("pattern", pairwise([
    pytest.param(pattern, id=str(pattern)) for pattern in itertools.product((False, True), repeat=4)]))
def test_hooks_are_called_in_order_in_every_pattern(pattern):
    col, col_async, grad, grad_async = pattern
    agent, spy = synthetic_agent(), Spy()
    scheme = Scheme(*agent, runtime="simulated", seed=1, num_col_workers=3 if col else 1,
                    col_communication=ASYNC if col_async else SYNC, num_grad_workers=2 if grad else 1,
                    grad_communication=ASYNC if grad_async else SYNC)
    with Learner(scheme, 200, log_every=50, progress=False, callbacks=[spy]) as learner:
        learner.train()
        updates = learner.updates
    found = names(spy)
    assert found[0] == "on_start"
    assert found[-1] == "on_end"
    assert found.count("on_start") == found.count("on_end") == 1
    assert found.count("on_record") >= 3
    assert set(found) == {"on_start", "on_step", "on_record", "on_end"}
    assert 0 < found.count("on_step") <= updates
    if not grad_async or grad:
        assert found.count("on_step") == updates
    made = [version for _, version, *_ in spy.calls]
    assert made == sorted(made)
    # A thread of its own may make updates until the scheme has stopped.
    assert spy.calls[-1][2]["updates"] == made[-1] >= updates


def test_evaluations_and_checkpoints_call_hooks(tmp_path):
    spy = Spy()
    train("ppo", "CartPole-v1", target_steps=128, log_dir=tmp_path / "run", eval_every=1000, eval_episodes=2,
          checkpoint_every=64, log_every=64, callbacks=[spy], **TINY)
    found = names(spy)
    assert found.count("on_evaluation") == 1
    assert found.count("on_checkpoint") == 2
    last = found.index("on_evaluation")
    assert found[last:] == ["on_evaluation", "on_record", "on_end"]
    assert spy.calls[last][2].return_mean > 0
    assert "callbacks" not in json.loads((tmp_path / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])


def test_a_run_with_callbacks_can_be_loaded(tmp_path):
    train("ppo", "CartPole-v1", target_steps=64, log_dir=tmp_path / "run", callbacks=[Spy()], **TINY)
    assert load(tmp_path / "run").evaluate(1).lengths


def test_lost_workers_are_counted():
    agent, spy = synthetic_agent(), Spy()
    scheme = Scheme(*agent, runtime="simulated", seed=1, num_col_workers=3, faults="kill col.2 @ step 20")
    with Learner(scheme, 2000, progress=False, callbacks=[spy]) as learner:
        learner.train()
        learner._look(0.0)
    assert sum(count for name, _, *rest in spy.calls if name == "on_worker_lost" for count in rest) == 1


def test_each_evaluation_and_each_loss_is_reported_once():
    spy = Spy()
    callbacks = Callbacks([spy], True, SimpleNamespace(updates=0))
    first, equal = (Evaluation(0, (1.0,), (1,)) for _ in range(2))
    for evaluation in (None, first, first, None, first, equal, equal):
        callbacks.evaluated(evaluation)
    found = [call[2] for call in spy.calls]
    assert len(found) == 2
    assert (found[0] is first, found[1] is equal) == (True, True)
    spy.calls.clear()
    for total in (0, 2, 2, 7, 7, 8):
        callbacks.count_lost(total)
    assert [call[2] for call in spy.calls] == [2, 5, 1]


def test_numbers_are_added_to_the_record(tmp_path):
    class Adds(Callback):
        def on_record(self, run, record):
            return {"steps_times_two": 2.0 * record["env_steps"]}
    train("ppo", "CartPole-v1", target_steps=64, log_every=32, log_dir=tmp_path / "run", callbacks=[Adds()], **TINY)
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert records
    assert all(record["callbacks"] == {"steps_times_two": 2.0 * record["env_steps"]} for record in records)


def test_a_callback_can_stop_the_run():
    class Stops(Callback):
        def on_step(self, run, info):
            if run.updates == 3:
                run.request_stop("enough")
    agent = train("ppo", "CartPole-v1", target_steps=10_000, callbacks=[Stops()], **TINY)
    assert agent.summary["updates"] == 3


def test_a_callback_can_change_a_parameter():
    class Freezes(Callback):
        def on_start(self, run):
            run.update_algorithm_parameter("lr", 0.0)

    def weights(**options):
        return train("ppo", "CartPole-v1", target_steps=64, lr=1e-3, **TINY, **options).acting_state
    frozen, other = weights(callbacks=[Freezes()]), weights()
    start = train("ppo", "CartPole-v1", target_steps=0, lr=1e-3, **TINY).acting_state
    assert all((frozen[name] == start[name]).all() for name in start)
    assert any((other[name] != start[name]).any() for name in start)


@pytest.mark.parametrize("hook", ["on_start", "on_step", "on_record", "on_end"])
def test_an_error_ends_the_run_and_names_the_hook(hook):
    spy = Spy()
    with pytest.raises(CallbackError, match=rf"Fails\.{hook} raised ValueError: on purpose") as caught:
        train("ppo", "CartPole-v1", target_steps=64, callbacks=[failing(hook), spy], **TINY)
    assert isinstance(caught.value.__cause__, ValueError)
    found = names(spy)
    assert found[-1] == "on_end"
    assert ("on_error" in found) is (hook != "on_end")
    if hook != "on_end":
        assert spy.calls[-2][2] is caught.value


@pytest.mark.parametrize("hook", ["on_start", "on_step", "on_record", "on_end"])
def test_an_error_may_only_warn(hook, caplog):
    agent = train("ppo", "CartPole-v1", target_steps=64, callbacks=[failing(hook)], on_callback_error="warn", **TINY)
    assert agent.summary["env_steps"] == 64
    assert f"Fails.{hook} raised ValueError: on purpose; training continues" in caplog.text


def test_an_error_in_a_loop_of_the_user_is_reported_once():
    spy, scheme = Spy(), Scheme(*synthetic_agent(), runtime="simulated", seed=1)
    learner = Learner(scheme, 100, progress=False, callbacks=[spy])

    def loop():
        with learner:
            learner.step()
            raise KeyError("mine")
    with pytest.raises(KeyError, match="mine"):
        loop()
    assert names(spy)[-2:] == ["on_error", "on_end"]
    assert names(spy).count("on_error") == 1


@pytest.mark.parametrize(("options", "message"), [
    ({"callbacks": [Spy]}, "callbacks must be a tuple or list of Callback"),
    ({"callbacks": [print]}, "callbacks must be a tuple or list of Callback"),
    ({"callbacks": Spy()}, "callbacks"),
    ({"on_callback_error": "warn"}, "on_callback_error needs callbacks"),
    ({"callbacks": [Spy()], "on_callback_error": "ignore"}, "on_callback_error must be one of"),
])
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        train("ppo", "CartPole-v1", target_steps=64, **TINY, **options)
