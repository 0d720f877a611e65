"""Tests of grouping runs by their settings, and of the labels of the groups."""

from __future__ import annotations

import dataclasses
import json

import pytest

from pytorchrl import PPO, GAEBuffer, Learner, OnPolicyActor, Scheme, VecEnv, train
from pytorchrl.agent.schedules import linear
from pytorchrl.analysis import group_runs, read_run
from pytorchrl.analysis.grouping import short
from pytorchrl.errors import ConfigError
from pytorchrl.learner.options import LearnerOptions

# Settings of a scheme with its defaults, and of one with asynchronous workers, as `run.json` has them.
DEFAULT = {"col_communication": "synchronous", "num_col_workers": 1, "col_execution": "Central", "col_in_flight": None,
           "queue_size": None, "runtime": "threads", "grad_communication": "synchronous", "num_grad_workers": 1,
           "grad_execution": "Central", "num_replay_workers": None, "max_policy_lag": None}
ASYNC = {**DEFAULT, "col_communication": "asynchronous", "num_col_workers": 2, "col_execution": "Parallel",
         "col_in_flight": 1, "queue_size": 1, "runtime": "ray"}


def groups_of(*run_dirs, by=None):
    """Return the names of the runs of each group, by its label, in which * stands for the multiplication sign."""
    groups = group_runs(list(map(read_run, run_dirs)), by)
    return {label.replace("\N{MULTIPLICATION SIGN}", "*"): [run.path.name for run in runs]
            for label, runs in groups.items()}


def test_runs_that_differ_only_by_seed_and_files_are_one_group(make_run):
    runs = [make_run(f"a-{seed}", seed=seed, lr=1e-3, progress=seed == 1) for seed in (1, 2)]
    assert groups_of(*runs) == {"ppo": ["a-1", "a-2"]}


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(LearnerOptions)])
def test_options_of_the_learner_without_effect_on_training_make_no_groups(make_run, name):
    runs = [make_run("a"), make_run("b", **({} if name == "log_dir" else {name: 3}))]
    if name == "target_steps":  # schedules depend on it
        assert groups_of(*runs) == {"ppo": ["a"], "ppo target_steps=3": ["b"]}
    elif name not in ("callbacks", "on_callback_error", "callback_timeout_s"):  # run.json does not contain these
        assert groups_of(*runs) == {"ppo": ["a", "b"]}


def test_groups_are_named_after_the_settings_in_which_runs_differ(make_run):
    runs = [make_run(f"{lr}-{seed}", seed=seed, lr=lr, gamma=0.9) for lr in (0.1, 0.2) for seed in (1, 2)]
    assert groups_of(*runs) == {"ppo lr=0.1": ["0.1-1", "0.1-2"], "ppo lr=0.2": ["0.2-1", "0.2-2"]}
    runs.append(make_run("scheme", lr=0.1, gamma=0.9, num_col_workers=2))
    assert list(groups_of(*runs)) == ["ppo lr=0.1", "ppo lr=0.2", "ppo *2 lr=0.1"]


def test_presets_of_algorithms_and_environments_do_not_make_groups(make_run):
    runs = [make_run("a", lr=0.1), make_run("b", lr=0.2, env="Pong"), make_run("c", algorithm="dqn", size=5)]
    assert groups_of(*runs) == {"ppo": ["a", "b"], "dqn": ["c"]}


def test_settings_that_make_groups_can_be_chosen(make_run):
    runs = [make_run("a", lr=0.1, gamma=0.9), make_run("b", lr=0.1, gamma=0.8), make_run("c", lr=0.3, gamma=0.8)]
    assert groups_of(*runs, by=["gamma"]) == {"gamma=0.9": ["a"], "gamma=0.8": ["b", "c"]}
    with pytest.raises(ConfigError, match="no run has the setting 'gama'; the settings are algorithm, gamma, lr"):
        groups_of(*runs, by=["gama"])


# Options and settings of further runs, beside a default run -> their labels, and that of the default run.
LABELS = {
    "an asynchronous run": ([({"num_col_workers": 2, "col_communication": "asynchronous"}, ASYNC)], "ppo async *2"),
    "only the communication": ([({"col_communication": "asynchronous"}, {**ASYNC, "num_col_workers": 1})],
                               "ppo async *1"),
    "workers of both kinds": ([({"num_col_workers": 2, "num_grad_workers": 3, "runtime": "ray"},
                                {**ASYNC, "col_communication": "synchronous", "num_grad_workers": 3})],
                              "ppo sync *2 grad sync *3 runtime=ray"),
    "shards, whose ratios follow": ([({"num_replay_workers": 2, "min_replay_ratio": 0.5}, DEFAULT)], "ppo replay *2"),
    "the ratio alone": ([({"min_replay_ratio": 0.5}, DEFAULT)], "ppo min_replay_ratio=0.5"),
    "an own bound of the queue": ([({"queue_size": 4}, {**DEFAULT, "queue_size": 4})], "ppo queue_size=4"),
    "a default that was given": ([({"num_col_workers": 1, "max_policy_lag": None}, DEFAULT)], None),
    "None where others have a number": ([({"max_policy_lag": None}, {**DEFAULT, "max_policy_lag": None}),
                                         ({"max_policy_lag": 8}, {**DEFAULT, "max_policy_lag": 8})],
                                        "ppo max_policy_lag=8"),
    "another machine": ([({}, {**DEFAULT, "runtime": "ray"})], None),
}


def test_labels_say_what_the_user_changed(make_run):
    for number, (name, (others, expected)) in enumerate(LABELS.items()):
        runs = [make_run(f"{number}/default", scheme=DEFAULT, lr=0.1)]
        runs += [make_run(f"{number}/{index}", scheme=scheme, lr=0.1, **options)
                 for index, (options, scheme) in enumerate(others)]
        found = list(groups_of(*runs))
        assert found[-1] == (expected or found[0]), name
        assert (len(found) == 1) == (expected is None), name
        assert "execution" not in str(found), name


def test_options_that_train_left_to_an_agent_count_with_their_defaults(make_run):
    """Check that a run with `clip_param=0.2`, which is the default, is in one group with a default run."""
    runs = [make_run("a"), make_run("b", clip_param=0.2), make_run("c", clip_param=0.3)]
    for run in runs:
        description = json.loads((run / "run.json").read_text())
        clip = description["recipe"]["options"].get("clip_param", 0.2)
        description["agent"] = {"algo_factory": {"__factory__": "pytorchrl:PPO", "options": {"clip_param": clip}}}
        (run / "run.json").write_text(json.dumps(description))
    assert groups_of(*runs) == {"ppo clip_param=0.2": ["a", "b"], "ppo clip_param=0.3": ["c"]}


def test_runs_of_train_are_named_after_the_arguments_of_train(tmp_path):
    common = {"target_steps": 32, "num_envs": 2, "num_steps": 16, "num_epochs": 1, "hidden_sizes": (4,), "seed": 1,
              "progress": False, "tensorboard": False}
    for name, options in {"default": {}, "own": {"lr": linear(1e-3, 0.0), "num_col_workers": 1}, "workers": {
            "num_col_workers": 2, "col_communication": "asynchronous", "runtime": "simulated"}}.items():
        train("ppo", "CartPole-v1", log_dir=tmp_path / name, **{"lr": 1e-3, **common, **options})
    assert groups_of(*map(tmp_path.joinpath, ("default", "own", "workers"))) == {
        "ppo lr=0.001": ["default"], "ppo sync *1 lr=linear:0.001:0": ["own"],
        "ppo async *2 lr=0.001 runtime=simulated": ["workers"]}


def test_settings_that_are_asked_for_show_their_defaults(make_run):
    runs = [make_run("a", scheme=DEFAULT), make_run("b", scheme=ASYNC)]
    assert list(groups_of(*runs, by=["num_col_workers", "runtime"])) == ["*1 runtime=threads", "*2 runtime=ray"]
    with pytest.raises(ConfigError, match="no run has the setting 'queue'; the settings are algorithm, col_comm"):
        groups_of(*runs, by=["queue"])
    many = make_run("many", scheme={f"setting_{number}": number for number in range(40)})
    with pytest.raises(ConfigError, match="no run has the setting 'setting_99'; did you mean setting_9 or "):
        groups_of(many, by=["setting_99"])
    with pytest.raises(ConfigError, match="no run has the setting 'xyz'; 41 settings stand in"):
        groups_of(many, by=["xyz"])


@pytest.mark.parametrize(("value", "text"), [
    (None, "none"), (True, "yes"), (3, "3"), (1e-5, "1e-05"), (0.0001, "0.0001"), ([64, 64], "64,64"), ([], "empty"),
    ({"schedule": ["linear", 0.001, 0.0]}, "linear:0.001:0"), ({"__code__": "module:Outer.Name"}, "Outer.Name"),
    ({"a": [1]}, '{"a": [1]}'), ("tanh", "tanh")])
def test_values_have_short_texts(value, text):
    assert short(value) == text


def test_runs_composed_in_python_are_grouped_by_the_options_of_their_parts(tmp_path):
    def trained(name, **options):
        envs = VecEnv.create_factory("CartPole-v1")
        actor = OnPolicyActor.create_factory(envs.observation_space, envs.action_space, hidden_sizes=(4,))
        scheme = Scheme(PPO.create_factory(num_epochs=1, num_mini_batch=1, **options), actor,
                        GAEBuffer.create_factory(8), envs, seed=1)
        with Learner(scheme, target_steps=8, log_dir=tmp_path / name, progress=False) as learner:
            learner.train()
        return read_run(tmp_path / name)
    runs = [trained("a", lr=1e-3), trained("b", lr=1e-2), trained("c", lr=1e-3)]
    groups = group_runs(runs)
    assert {label: [run.path.name for run in group] for label, group in groups.items()} == {
        "ppo lr=0.001": ["a", "c"], "ppo lr=0.01": ["b"]}
    assert {run.task for run in runs} == {"CartPole-v1"}


def test_a_scheme_composed_in_python_has_no_derived_settings_in_its_label(make_run):
    runs = []
    for name, scheme in (("a", DEFAULT), ("b", ASYNC), ("c", {**DEFAULT, "runtime": "processes"})):
        runs.append(make_run(name, scheme=scheme))
        description = json.loads((runs[-1] / "run.json").read_text())
        description["recipe"] = {}
        description["agent"] = {"algo_factory": {"__factory__": "pytorchrl:PPO", "options": {}}}
        (runs[-1] / "run.json").write_text(json.dumps(description))
    assert list(groups_of(*runs[:2])) == ["ppo sync *1", "ppo async *2"]
    assert list(groups_of(runs[0], runs[2])) == ["ppo runtime=threads", "ppo runtime=processes"]
