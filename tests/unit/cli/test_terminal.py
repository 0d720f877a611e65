"""Tests that untrusted text is escaped before it reaches a terminal, and stays unchanged in files."""

from __future__ import annotations

import ast
import csv
import importlib
import io
import json
import logging
import sys
import warnings
from types import FunctionType

import gymnasium as gym
import pytest

import pytorchrl
from pytorchrl import Scheme
from pytorchrl.agent.options import Factory
from pytorchrl.agent.synthetic import SyntheticAlgorithm, synthetic_agent
from pytorchrl.cli import main
from pytorchrl.cli.parsing import Parser
from pytorchrl.envs.testing import CountingEnv, MatchingGame
from pytorchrl.learner.reporting import Progress
from pytorchrl.support.terminal import Lines, get_logger, printable
from tests.unit.packaging.source import MODULES, PACKAGE, nodes_of, reads_source

# Text that clears the screen, returns to the start of the line, starts a new line, and reverses the text direction.
NASTY = "a\x1b[2J\x1b]0;b\x07c\rd\ne\tf\x7fg\x9b31mh\u202ei\u2066j\u2028k"
SHOWN = r"a\x1b[2J\x1b]0;b\x07c\rd\ne\tf\x7fg\x9b31mh\u202ei\u2066j\u2028k"
ONE_LINE, ONE_LINE_SHOWN = NASTY.replace("\n", ""), SHOWN.replace(r"\n", "")
TINY = ["--target-steps", "64", "--num-envs", "1", "--num-steps", "16", "--num-epochs", "1", "--num-mini-batch", "1",
        "--no-tensorboard"]


def run(capsys, *arguments):
    """Return the exit code, stdout and stderr of a command, and check that both outputs are printable."""
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    for line in (captured.out + captured.err).split("\n"):
        assert line.isprintable(), repr(line)
    return code, captured.out, captured.err


class Nasty(CountingEnv):
    """An environment that raises an error with `text` in the third step, or puts `text` into each info."""

    def __init__(self, text=NASTY, fails=True):
        super().__init__(episode_length=4)
        self._text, self._fails = text, fails

    def step(self, action):
        observation, reward, terminated, truncated, _ = super().step(action)
        if self._fails and self._num_steps == 3:
            raise RuntimeError(self._text)
        return observation, reward, terminated, truncated, {self._text: 1.5}


@pytest.fixture
def register(monkeypatch):
    """Return a function that registers an environment under an id until the test ends."""
    def register_(env_id, entry_point, **kwargs):
        monkeypatch.setitem(gym.registry, env_id, gym.envs.registration.EnvSpec(id=env_id, entry_point=entry_point,
                                                                                kwargs=kwargs))
    return register_


@pytest.mark.parametrize(("text", "shown"), [
    ("plain text, läuft gut: 你好 \N{SNOWMAN}", "plain text, läuft gut: 你好 \N{SNOWMAN}"), (NASTY, SHOWN), ("", ""),
    ("\0", r"\x00"), ("\ud800", r"\ud800"),
    ("no\N{NO-BREAK SPACE}break", r"no\xa0break"), (ValueError("a\nb"), r"a\nb"), (7, "7")])
def test_unprintable_characters_are_escaped_as_by_repr(text, shown):
    assert printable(text) == shown
    assert printable(shown) == shown


def test_an_error_of_an_environment_is_printed_on_one_line_below_its_frames(capsys, register):
    register("Nasty-v0", Nasty)
    code, out, err = run(capsys, "train", "ppo", "--env", "Nasty-v0", *TINY, "--no-progress", "--on-env-error", "raise")
    assert (code, out) == (2, "")
    assert SHOWN in err.splitlines()[-1]
    assert err.splitlines()[0] == "Traceback (most recent call last):"
    assert all(line.isprintable() for line in err.split("\n"))


def test_only_the_traceback_of_debug_has_several_lines(capsys, register):
    register("Nasty-v0", Nasty, text=ONE_LINE)
    _, _, err = run(capsys, "train", "ppo", "--env", "Nasty-v0", *TINY, "--no-progress", "--debug", "--on-env-error",
                    "raise")
    lines = err.split("\n")
    assert lines[0] == "Traceback (most recent call last):"
    assert f"RuntimeError: {ONE_LINE_SHOWN}" in lines


@pytest.mark.parametrize("arguments", [
    ("train", "ppo", "--env", NASTY), ("train", "ppo", "--env", "CartPole-v1", "--nonsense", NASTY),
    ("train", "ppo", "--env", "CartPole-v1", "--lr", NASTY), ("train", NASTY), (NASTY,), ("enjoy", NASTY),
    ("plot", NASTY),
    ("train", "ppo", "--env", "CartPole-v1", "--info-keywords", NASTY),
    ("train", "ppo", "--env", "CartPole-v1", f"--{NASTY}=1"),
], ids=["id", "argument", "value", "algorithm", "command", "enjoy", "plot", "info", "flag"])
def test_command_line_arguments_are_echoed_escaped(capsys, arguments):
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert "pytorchrl: error: " in err


def test_an_error_of_the_parser_is_printed_on_one_line(capsys):
    with pytest.raises(SystemExit, match="2"):
        Parser(prog="pytorchrl", usage="pytorchrl").error(NASTY)
    assert capsys.readouterr().err.splitlines()[-1] == f"pytorchrl: error: {SHOWN}"


def test_internal_errors_and_warnings_are_printed_on_one_line(capsys, monkeypatch):
    def fail(arguments):
        warnings.warn_explicit(NASTY, UserWarning, "plot.py", 1, module="pytorchrl.cli.plot")
        raise RuntimeError(NASTY)
    of_package = FunctionType(fail.__code__, {**globals(), "__name__": "pytorchrl.cli.plot"})
    monkeypatch.setattr("pytorchrl.cli.plot.run", of_package)
    code, _, err = run(capsys, "plot", "x")
    assert code == 1
    assert err.splitlines() == [f"pytorchrl: warning: {SHOWN}", f"pytorchrl: error: internal error, RuntimeError: "
                                                                f"{SHOWN}; --debug shows where"]


def test_info_values_are_exact_in_the_monitor_file(capsys, register, tmp_path):
    register("Nasty-v0", Nasty, fails=False)
    code, out, _ = run(capsys, "train", "ppo", "--env", "Nasty-v0", *TINY, "--log-dir", tmp_path / NASTY,
                       "--info-keywords", NASTY)
    assert code == 0
    assert f"saved in {tmp_path}/{SHOWN}; what to do next:" in out
    (monitor,) = (tmp_path / NASTY).glob("monitor_*.csv")
    with open(monitor, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert float(rows[0][NASTY]) == 1.5
    assert json.loads((tmp_path / NASTY / "run.json").read_text())["recipe"]["options"]["info_keywords"] == [NASTY]


class NastyGame(MatchingGame):
    """A game whose agents have control characters in their names."""

    def __init__(self):
        super().__init__()
        self.possible_agents = [f"{agent}{NASTY}" for agent in self.possible_agents]


@pytest.fixture
def nasty_game(tmp_path, monkeypatch):
    """Return the name of a module whose environment is `NastyGame`."""
    name = "nasty_game"
    (tmp_path / f"{name}.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module(name).parallel_env = NastyGame
    yield name
    del sys.modules[name]


def test_names_of_policies_are_escaped_in_progress_and_results_and_exact_in_files(capsys, nasty_game, tmp_path):
    code, out, err = run(capsys, "train", "ppo", "--env", nasty_game, *TINY, "--policies", "independent", "--log-dir",
                         tmp_path / "run")
    assert code == 0, err
    assert f"agent_0{SHOWN}" in out
    assert f"agent_0{SHOWN}" in err
    _, out, _ = run(capsys, "enjoy", tmp_path / "run", "--episodes", 2)
    assert f"agent_0{SHOWN}" in out
    _, out, _ = run(capsys, "enjoy", tmp_path / "run", "--episodes", 2, "--json")
    names = {f"agent_{index}{NASTY}" for index in (0, 1)}
    assert set(json.loads(out)["policy_return_means"]) == names
    assert set(json.loads((tmp_path / "run" / "result.json").read_text())["policy_return_means"]) == names


def test_the_progress_line_is_one_line():
    class Terminal(io.StringIO):
        def isatty(self):
            return True
    status = {"env_steps": 1, "target_steps": 2, "env_steps_per_s": 3.0, "return_mean": 4.0, "lag": 0.0, "workers": 0,
              "workers_missing": 0, "policy_returns": {NASTY: 5.0}}
    for stream in (io.StringIO(), Terminal()):
        progress = Progress(stream)
        progress._live = None
        progress.announce(NASTY, keep=True)
        progress.show(status, last=True)
        printed = stream.getvalue()
        assert f"({SHOWN} 5.0)" in printed
        assert all(line.isprintable() for line in printed.replace("\r", "\n").split("\n"))
        assert printed.replace("\r", "\n").count(SHOWN) == 2


def test_logs_are_escaped_for_any_handler(caplog):
    logger = get_logger("pytorchrl.of_this_test")
    assert get_logger("pytorchrl.of_this_test") is logger
    logger.warning("%s broke: %r, %d times, %s\n%s", NASTY, NASTY, 2, ValueError(NASTY),
                   Lines(f"one\n{ONE_LINE}\nthree"))
    assert caplog.messages == [f"{SHOWN} broke: {NASTY!r}, 2 times, {SHOWN}\none\n{ONE_LINE_SHOWN}\nthree"]
    assert caplog.records[0].args[2] == 2


def test_logs_without_unprintable_text_keep_their_arguments(caplog):
    error = ValueError("plain")
    get_logger("pytorchrl.of_this_test").warning("%s %s", error, "text")
    assert caplog.records[0].args == (error, "text")


def test_the_exception_of_a_log_is_escaped(caplog):
    caplog.handler.setFormatter(logging.Formatter("%(message)s"))
    try:
        raise RuntimeError(ONE_LINE)
    except RuntimeError:
        get_logger("pytorchrl.of_this_test").warning("failed", exc_info=True)
    lines = caplog.text.rstrip("\n").split("\n")
    assert lines[:2] == ["failed", "Traceback (most recent call last):"]
    assert lines[-1] == f"RuntimeError: {ONE_LINE_SHOWN}"


def test_a_restart_is_logged_with_its_traceback(caplog, register):
    register("Nasty-v0", Nasty, text=ONE_LINE)
    pytorchrl.train("ppo", "Nasty-v0", target_steps=16, num_envs=1, num_steps=16, num_mini_batch=1, num_epochs=1,
                    progress=False,
                    on_env_error="restart", max_env_restarts=100)
    text = next(message for message in caplog.messages if "restarted" in message)
    assert f"RuntimeError: {ONE_LINE_SHOWN}" in text.split("\n")
    assert all(line.isprintable() for line in text.split("\n"))


def test_a_warning_of_a_scheme_is_escaped():
    algo, *others = synthetic_agent()
    nasty = Factory(type(NASTY, (SyntheticAlgorithm,), {}), algo.options)
    with pytest.warns(UserWarning, match="has no effect with") as caught:
        Scheme(nasty, *others, runtime="simulated", train_batch_size=8, microbatch_size=4, norm_over="microbatch")
    assert f"has no effect with {SHOWN}, " in str(caught[0].message)


@reads_source
@pytest.mark.parametrize(("name", "homes"), [
    ("print", {"cli/output.py", "learner/reporting.py", "monitor/live.py"}), ("getLogger", {"support/terminal.py"})])
def test_print_and_get_logger_are_each_called_in_their_modules(name, homes):
    found = set()
    for path in MODULES:
        for node in nodes_of(path):
            if isinstance(node, ast.Call) and name in (getattr(node.func, "id", None),
                                                       getattr(node.func, "attr", None)):
                found.add(path.relative_to(PACKAGE).as_posix())
    assert found == homes
