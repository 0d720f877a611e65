"""Tests of several policies on the command line, in this process."""

from __future__ import annotations

import json
import sys

import pytest

from pytorchrl.cli import main
from pytorchrl.errors import install_hint

TINY = ["--target-steps", "64", "--num-envs", "2", "--num-steps", "16", "--num-epochs", "1", "--num-mini-batch", "2",
        "--hidden-sizes", "8", "--no-tensorboard", "--no-progress", "--seed", "1"]


@pytest.fixture
def game(tmp_path, monkeypatch):
    """Return the name of a top-level module whose environments have two agents."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "game_of_test.py").write_text("from pytorchrl.envs.testing import MatchingGame as "
                                                          "parallel_env\n")
    monkeypatch.syspath_prepend(tmp_path / "modules")
    yield "game_of_test"
    sys.modules.pop("game_of_test", None)


def run(capsys, *arguments):
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_train_enjoy_and_plot_work_on_one_run(capsys, game, tmp_path):
    run_dir = tmp_path / "run"
    code, out, err = run(capsys, "train", "ppo", "--env", game, *TINY, "--policies", "independent", "--log-dir",
                         run_dir)
    assert (code, err) == (0, "")
    assert "(agent_0 " in out
    assert ", agent_1 " in out
    code, out, _ = run(capsys, "enjoy", run_dir, "--episodes", 3)
    assert code == 0
    assert "(agent_0 " in out
    played = json.loads(run(capsys, "enjoy", run_dir, "--episodes", 3, "--json")[1])
    assert sum(played["policy_return_means"].values()) == pytest.approx(played["return_mean"])
    code, out, err = run(capsys, "plot", run_dir, "--y", "policies/agent_1/return_mean", "-o", tmp_path / "curve.png")
    assert (code, err) == (0, "")
    assert (tmp_path / "curve.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    code, _, err = run(capsys, "enjoy", run_dir, "--video", tmp_path / "films")
    assert code == 2
    assert "only single-agent environments can be recorded" in err


def test_one_policy_acts_for_all_agents_by_default(capsys, game):
    for flags, policies in (([], {"shared"}), (["--policies", '{"agent_0": "a", "agent_1": "b"}'], {"a", "b"})):
        code, out, _ = run(capsys, "train", "ppo", "--env", game, *TINY, *flags, "--json")
        assert code == 0
        assert set(json.loads(out)["policy_return_means"]) == policies


def test_runs_of_one_agent_do_not_mention_policies(capsys):
    code, out, _ = run(capsys, "train", "ppo", "--env", "CartPole-v1", *TINY)
    assert code == 0
    assert "(" not in out.splitlines()[-1]


def test_profile(capsys, game):
    code, out, err = run(capsys, "profile", "ppo", "--env", game, *TINY, "--policies", "shared", "--seconds", 0.2)
    assert (code, err) == (0, "")
    assert "Bottleneck: " in out


@pytest.mark.parametrize(("env", "flags", "message"), [
    ("CartPole-v1", ["--policies", "independent"], "policies must be left out for 'CartPole-v1'"),
    ("mpe2/simple_spread_v3", [], "'mpe2.simple_spread_v3'"),
    ("no_such_package.game", [], install_hint("pettingzoo")),
    ("json.decoder", [], "json.decoder has no parallel_env"),
    ("game_of_test", ["--policies", "alone"], "--policies: expected none or shared|independent or a JSON object"),
    ("game_of_test", ["--policies", '{"agent_0"'], "--policies: expected a JSON object"),
    ("game_of_test", ["--policies", '{"agent_0": 1}'], "policies must map each of"),
    ("game_of_test", ["--policy-of", "shared"], "did you mean --policies?"),
    ("game_of_test", ["--autoreset", "next_step"], "several agents have no option autoreset"),
])
def test_contradictions_are_refused(capsys, game, env, flags, message):
    code, out, err = run(capsys, "train", "ppo", "--env", env, *TINY, *flags)
    assert (code, out) == (2, "")
    assert message in err


def test_help_explains_policy_options(capsys):
    out = " ".join(run(capsys, "train", "ppo", "--help-all")[1].split())
    assert "--policies none|shared|independent|JSON" in out
    assert "mpe2.simple_spread_v3" in out
