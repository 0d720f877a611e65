"""Tests of the findings: runs that go wrong say so in a sentence, and runs that go right say nothing."""

from __future__ import annotations

import functools
import json
import re

import gymnasium as gym
import numpy as np
import pytest
import torch

from pytorchrl import PPO
from pytorchrl.cli import main
from pytorchrl.envs.testing import FaultyEnv
from pytorchrl.learner.reporting import plain
from pytorchrl.monitor.findings import dropped_share, find
from pytorchrl.training.training import make_learner

pytestmark = pytest.mark.filterwarnings("ignore:queue_size")
ASYNC = {"col_communication": "async", "runtime": "simulated", "num_col_workers": 2}


class SameReturn(gym.Env):
    """An environment whose episodes all have the same return."""

    observation_space, action_space = gym.spaces.Box(-1.0, 1.0, (2,)), gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._steps = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self._steps += 1
        return np.zeros(2, np.float32), 1.0, self._steps == 5, False, {}


class NanLoss(PPO):
    """PPO with a loss that is NaN in some updates."""

    def loss(self, evaluated, batch, parameters, weights):
        loss, info = super().loss(evaluated, batch, parameters, weights)
        self.calls = getattr(self, "calls", 0) + 1
        return loss * (torch.nan if self.calls % 3 == 2 else 1.0), info


WRONG = {  # name of the run -> (algorithm, environment, options, word, what the sentence contains)
    "long queue": ("ppo", "CartPole-v1", {**ASYNC, "queue_size": 6, "target_steps": 1500}, "lag", "lower queue_size"),
    "lag without a queue": ("ppo", "CartPole-v1", {**ASYNC, "num_col_workers": 8, "target_steps": 3000}, "lag",
                            "use fewer collection workers"),
    "V-trace beyond its limit": ("impala", "CartPole-v1", {**ASYNC, "queue_size": 16, "target_steps": 3000}, "lag",
                                 "this algorithm tolerates 8"),
    "dropped by lag": ("ppo", "CartPole-v1", {**ASYNC, "max_policy_lag": 0, "on_policy_lag": "drop",
                                              "target_steps": 1000}, "dropped", "because of policy_lag"),
    "dropped by the queue": ("ppo", "CartPole-v1", {**ASYNC, "queue_policy": "drop_oldest", "num_col_workers": 6,
                                                    "target_steps": 3000}, "dropped", "because of queue_full"),
    "stopped early": ("ppo", "CartPole-v1", {"target_kl": 1e-9, "num_mini_batch": 16, "target_steps": 300}, "dropped",
                      "because of early_stop"),
    "late gradients": ("a2c", "CartPole-v1", {"preset": "a3c", "num_grad_workers": 4, "runtime": "simulated",
                                              "max_grad_lag": 0, "lag_policy": "drop", "target_steps": 600}, "dropped",
                       "because of gradient_lag"),
    "episodes too long": ("ppo", "Pendulum-v1", {"target_steps": 64}, "no episodes", "give max_episode_steps"),
    "constant return": ("ppo", SameReturn, {"target_steps": 400}, "constant return", "the same return, 5,"),
    "NaN": (NanLoss, "CartPole-v1", {"target_steps": 300}, "NaN", "updates were skipped"),
    "no updates": ("dqn", "CartPole-v1", {"start_steps": 5000, "target_steps": 200}, "no updates",
                   "lower start_steps"),
    "broken environments": ("ppo", FaultyEnv, {"env_kwargs": {"fault": "step", "at": 20}, "on_env_error": "restart",
                                               "max_env_restarts": 1000, "target_steps": 200}, "environments",
                            "give on_env_error='raise'"),
}
# What the sentences ask for: names of runs above -> changes of the options, each of which removes the word.
REMEDIES = {
    "long queue": [{"queue_size": 1}, {"algorithm": "appo", "queue_size": None}],
    "lag without a queue": [{"num_col_workers": 2}, {"train_batch_size": 128}],
    "dropped by lag": [{"max_policy_lag": 16}, {"on_policy_lag": "wait"}],
    "dropped by the queue": [{"queue_policy": "block"}, {"num_col_workers": 1}],
    "stopped early": [{"target_kl": 10.0}, {"lr": 1e-9, "target_kl": 1e-3}],
    "late gradients": [{"max_grad_lag": 8}, {"lag_policy": "scale", "max_grad_lag": 1}],
    "episodes too long": [{"target_steps": 900}, {"max_episode_steps": 10}],
    "no updates": [{"start_steps": 50}, {"target_steps": 6000}],
}
REPLAY = {"start_steps": 100, "target_steps": 900, "update_every": 100, "num_updates": 4}  # 400 steps are an episode
RIGHT = {
    "ppo": ("ppo", "CartPole-v1", {}), "a2c": ("a2c", "CartPole-v1", {}),
    "dqn": ("dqn", "CartPole-v1", {"start_steps": 100}), "sac": ("sac", "Pendulum-v1", REPLAY),
    "td3": ("td3", "Pendulum-v1", REPLAY), "ddpg": ("ddpg", "Pendulum-v1", REPLAY),
    "r2d2": ("r2d2", "CartPole-v1", {"start_steps": 100}),
    "ppo async": ("ppo", "CartPole-v1", {**ASYNC}), "impala": ("impala", "CartPole-v1", {**ASYNC}),
    "appo": ("appo", "CartPole-v1", {**ASYNC}),
    "a3c": ("a2c", "CartPole-v1", {"preset": "a3c", "num_grad_workers": 2, "runtime": "simulated"}),
}
SMALL = {"num_envs": 2, "seed": 3, "tensorboard": False}
ON_POLICY = {"num_steps": 16, "num_epochs": 1, "num_mini_batch": 2}


def run(algorithm, env, options, **others):
    sizes = ON_POLICY if algorithm in ("ppo", NanLoss) else {}
    learner, _ = make_learner(algorithm, env, **{"target_steps": 420, **SMALL, **sizes, **options, **others})
    with learner:
        learner.train()
    return learner


def without_numbers(text):
    """Return text without numbers, because those of the last steps are known only when all workers have stopped."""
    return re.sub(r"[\d,.]*\d", "#", text)


def items_of(out):
    """Return the lines of `doctor` with the state of an item, each on one line."""
    return re.sub(r"\n {9}", " ", out).partition("\n\n")[0].split("\n")


@pytest.mark.parametrize("name", WRONG)
def test_a_run_that_goes_wrong_says_so(capsys, monkeypatch, tmp_path, name):
    monkeypatch.setenv("COLUMNS", "80")
    algorithm, env, options, word, text = WRONG[name]
    learner = run(algorithm, env, options, log_dir=tmp_path / "run")
    sentences = learner.summary()["findings"]
    assert any(text in sentence for sentence in sentences), sentences
    assert len(sentences) == 1, sentences
    assert without_numbers(capsys.readouterr().err.splitlines()[-1]) == without_numbers(sentences[0])  # at the end
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["findings"] == sentences
    found = find(learner.get_metrics(), learner.target_steps, has_ended=True)
    assert [finding.word for finding in found] == [word]
    assert main(["doctor", str(tmp_path / "run")]) == 1  # the same sentence from the files
    out = capsys.readouterr().out
    wrong = [item for item in items_of(out) if item.startswith("wrong")]
    assert list(map(without_numbers, wrong)) == [without_numbers(f"wrong    {word}: {sentences[0]}")]
    assert max(map(len, out.splitlines())) <= 80
    assert main(["watch", str(tmp_path / "run"), "--once", "--width", "400"]) == 0
    assert f"{word}: {without_numbers(sentences[0])}" in without_numbers(capsys.readouterr().out)


@pytest.mark.parametrize(("name", "change"), [(name, change) for name, some in REMEDIES.items() for change in some])
def test_the_advice_of_a_finding_helps(name, change):
    algorithm, env, options, word, _ = WRONG[name]
    changed = {key: value for key, value in {**options, **change}.items() if value is not None}
    learner = run(changed.pop("algorithm", algorithm), env, changed, progress=False)
    found = find(learner.get_metrics(), learner.target_steps, has_ended=True)
    assert word not in [finding.word for finding in found], found


@pytest.mark.parametrize("name", RIGHT)
def test_a_run_that_goes_right_prints_no_sentence(capsys, tmp_path, name):
    algorithm, env, options = RIGHT[name]
    learner = run(algorithm, env, options, log_dir=tmp_path / "run")
    assert learner.summary()["findings"] == []
    lines = capsys.readouterr().err.splitlines()
    assert all("steps/s" in line for line in lines[3:] if not line.startswith("started"))
    assert main(["doctor", str(tmp_path / "run")]) == 0
    items = items_of(capsys.readouterr().out)
    assert len(items) == 10
    assert all(item.startswith("ok ") for item in items)


BASE = {"env_steps": 500, "updates": 40, "return_episodes": 30, "return_range": {"min": 1.0, "max": 9.0},
        "ledger": {"collected": 600, "dropped": {"policy_lag": 0, "queue_full": 0, "shutdown": 100}},
        "batch_lag": {"mean": 1.0, "tolerated": 2.0}, "scheme": {"updates_skipped_nan": 0, "envs_restarted": 0,
                                                                  "workers": 4, "workers_missing": 0}}


def changed(**entries):
    record = json.loads(json.dumps(BASE))
    for path, value in entries.items():
        *place, last = path.split("__")
        functools.reduce(dict.__getitem__, place, record)[last] = value
    return record


@pytest.mark.parametrize(("record", "target", "has_ended", "words"), [
    (changed(), 1000, False, []), (changed(), 500, True, []),
    # Each limit, and the value next to it.
    (changed(batch_lag__mean=2.0), 1000, False, []), (changed(batch_lag__mean=2.1), 1000, False, ["lag"]),
    (changed(batch_lag__mean=2.1), 10_000, False, []),  # too early to say
    (changed(batch_lag={"mean": 99.0, "tolerated": None}), 1000, True, []),  # data of any age
    (changed(ledger__dropped__policy_lag=300), 1000, False, []),
    (changed(ledger__dropped__policy_lag=301), 1000, False, ["dropped"]),
    (changed(ledger__dropped__shutdown=500), 1000, True, []),
    (changed(scheme__updates_skipped_nan=1), 10_000, False, ["NaN"]),
    (changed(return_episodes=0, return_range=None), 1001, False, []),
    (changed(return_episodes=0, return_range=None), 1000, False, ["no episodes"]),
    (changed(return_episodes=0, return_range=None), 9999, True, ["no episodes"]),
    (changed(return_range={"min": 1.0, "max": 1.0}), 1000, False, ["constant return"]),
    (changed(return_range={"min": 1.0, "max": 1.0}, return_episodes=19), 1000, True, []),
    (changed(return_range={"min": 20.0, "max": 500.0}), 500, True, []),  # solved: constant, but only in the end
    (changed(updates=1), 250, True, []), (changed(updates=1), 249, True, ["no updates"]),
    (changed(updates=2), 1, True, []), (changed(updates=0), 1001, False, []),
    (changed(updates=0), 1000, False, ["no updates"]),
    (changed(updates=0, scheme__updates_skipped_nan=5), 1000, True, ["NaN"]),
    (changed(scheme__workers_missing=1), 1000, False, []), (changed(scheme__workers_missing=1), 500, True, ["workers"]),
    (changed(scheme__envs_restarted=2), 500, True, []),
    (changed(scheme__envs_restarted=3), 500, True, ["environments"]),
    (changed(scheme__envs_restarted=3, env_steps=3000), 3000, True, []),
    ({}, 100, True, []), ({"env_steps": 0, "ledger": {"collected": 0}}, 0, True, []),  # nothing has happened
    ({"ledger": {"collected": 5}}, 100, False, []), ({"env_steps": "x", "ledger": "y", "scheme": 3}, 5, True, []),
])
def test_findings_of_one_record(record, target, has_ended, words):
    assert [finding.word for finding in find(record, target, has_ended=has_ended)] == words
    assert [finding.word for finding in find(plain(record), target, has_ended=has_ended)] == words


def test_the_share_of_dropped_steps_leaves_out_the_end():
    assert dropped_share(changed(ledger__dropped__queue_full=150)) == 0.25
    assert dropped_share({}) == 0.0
