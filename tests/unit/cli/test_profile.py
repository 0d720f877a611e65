"""Tests of `pytorchrl profile` in this process."""

from __future__ import annotations

import json

import gymnasium as gym
import pytest

from pytorchrl.cli import main
from pytorchrl.envs.testing import FaultyEnv, SleepEnv
from pytorchrl.scheme.timing import PARTS
from pytorchrl.support.work import KINDS


@pytest.fixture
def sleep_env():
    gym.register("Sleep-v0", SleepEnv)
    yield "Sleep-v0"
    del gym.registry["Sleep-v0"]


def run(capsys, *arguments):
    code = main(["profile", "ppo", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_environments_that_sleep_are_the_bottleneck(capsys, sleep_env):
    code, out, err = run(capsys, "--env", sleep_env, "--env-kwargs", '{"step_s": 0.05}', "--num-envs", 2, "--num-steps",
                         8,
                         "--num-epochs", 1, "--num-mini-batch", 1, "--seconds", 0.5, "--json", "--seed", 3)
    assert (code, err) == (0, "")
    found = json.loads(out.splitlines()[-1])
    assert set(found) == {"seconds", "env_steps", "env_steps_per_s", "updates", "time_s", "shares", "bottleneck",
                          "share", "work_shares",
                          "sentence", "option", "advice", "seed", "scheme"}
    assert (found["bottleneck"], found["seed"]) == ("collection/environment", 3)
    assert found["option"] in ("num_col_workers", "backend")
    assert found["share"] == found["shares"]["collection"]["environment"] > 0.5
    assert {level: set(parts) for level, parts in found["time_s"].items()} == {
        level: {*parts, "idle"} for level, parts in PARTS.items()}
    assert set(found["work_shares"]) == set(KINDS)
    assert sum(found["work_shares"].values()) == pytest.approx(1.0)
    assert found["work_shares"]["environment"] > 0.5
    assert found["seconds"] >= 0.5
    assert found["updates"] >= 1


def test_a_heavy_network_is_the_bottleneck_and_target_steps_is_ignored(capsys):
    code, out, err = run(capsys, "--env", "CartPole-v1", "--hidden-sizes", "1024,1024", "--num-envs", 8, "--num-steps",
                         32,
                         "--num-epochs", 8, "--num-mini-batch", 1, "--target-steps", 64, "--seconds", 0.2)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert "steps/s" in lines[0]
    assert lines[2].startswith("level")
    assert "work            share" in lines
    assert [line.split()[0] for line in lines[lines.index("work            share") + 1:][:5]] == list(KINDS)
    assert "(gradients/grad)." in lines[-2]
    assert lines[-2].startswith("Bottleneck: ")
    assert lines[-1].startswith("Try: ")


def test_work_in_virtual_time_is_not_sampled(capsys):
    code, out, _ = run(capsys, "--env", "CartPole-v1", "--num-envs", 2, "--num-steps", 8, "--num-epochs", 1,
                       "--num-mini-batch", 1, "--seconds", 0.1, "--json", "--runtime", "simulated")
    assert code == 0
    assert json.loads(out.splitlines()[-1])["work_shares"] == {}


@pytest.mark.parametrize(("flags", "message"), [
    (["--seconds", "0"], "a number of seconds above 0, got '0'"), (["--seconds", "nan"], "got 'nan'"),
    (["--seconds", "soon"], "got 'soon'"), (["--lr", "-1"], "lr must be a number >= 0.0"),
    (["--second", "1"], "did you mean --seconds?"),
])
def test_wrong_flags_are_refused(capsys, flags, message):
    code, out, err = run(capsys, "--env", "CartPole-v1", *flags)
    assert (code, out) == (2, "")
    assert message in err


def test_an_environment_that_never_worked_is_refused(capsys):
    gym.register("Faulty-v0", FaultyEnv)
    try:
        code, out, err = run(capsys, "--env", "Faulty-v0", "--env-kwargs", '{"fault": "step", "at": 9}',
                             "--on-env-error", "raise",
                             "--seconds", 1)
    finally:
        del gym.registry["Faulty-v0"]
    assert (code, out) == (2, "")
    assert "faulty step" in err


def test_train_has_no_flag_seconds(capsys):
    assert main(["train", "ppo", "--env", "CartPole-v1", "--seconds", "1"]) == 2
    assert "unknown flag '--seconds'" in capsys.readouterr().err


def test_help(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0
    assert "usage: pytorchrl profile ppo" in out
    assert "--seconds" in out
    assert main(["profile", "--help"]) == 0
    assert "usage: pytorchrl profile ALGORITHM ENV" in capsys.readouterr().out
