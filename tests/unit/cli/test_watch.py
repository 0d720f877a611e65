"""Tests of the commands that look at runs: watch, report, board, and `train --watch`."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
import urllib.request

import pytest

from pytorchrl.cli import main
from pytorchrl.cli.watch import watching
from tests.conftest import process_environment
from tests.unit.monitor.runs import make_run, usual_records


def test_commands_that_read_runs_do_not_import_torch(run_python):
    script = ("import sys, pytorchrl.cli.watch\n"
              "print('numpy' in sys.modules)\n"
              "import pytorchrl.cli.report, pytorchrl.cli.board\n"
              "heavy = ('torch', 'scipy', 'matplotlib', 'ray', 'rich', 'gymnasium')\n"
              "print([name for name in heavy if name in sys.modules])\n")
    assert run_python("-c", script).stdout.split("\n")[:2] == ["False", "[]"]


@pytest.mark.parametrize("width", [80, 200])
def test_one_frame_is_printed(tmp_path, capsys, width):
    run_dir = make_run(tmp_path / "a", usual_records())
    assert main(["watch", str(run_dir), "--once", "--width", str(width)]) == 0
    output = capsys.readouterr().out
    assert "ppo on CartPole-v1" in output
    assert max(map(len, output.splitlines())) <= width


@pytest.mark.parametrize(("arguments", "message"), [
    (["watch", "{none}"], "contains no run"), (["report", "{none}"], "contains no run"),
    (["board", "{none}/x"], "needs a directory of runs"),
    (["watch", "{none}", "--width", "80"], "--width needs --once"),
    (["watch", "{none}", "--interval", "0"], "expected a number of seconds above 0"),
    (["train", "ppo", "--env", "CartPole-v1", "--watch"], "it needs --log-dir"),
    (["train", "ppo", "--env", "CartPole-v1", "--watch", "--log-dir", "{none}/a"], "--watch needs a terminal")])
def test_wrong_arguments_are_refused_before_anything_starts(tmp_path, capsys, arguments, message):
    assert main([argument.replace("{none}", str(tmp_path)) for argument in arguments]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_report_is_written(tmp_path, capsys):
    run_dirs = [str(make_run(tmp_path / name, usual_records())) for name in ("a", "b")]
    assert main(["report", *run_dirs, "--out", str(tmp_path / "page.html")]) == 0
    assert "<title>2 runs on CartPole-v1</title>" in (tmp_path / "page.html").read_text()
    assert main(["report", run_dirs[0]]) == 0
    assert (tmp_path / "a" / "report.html").exists()
    assert capsys.readouterr().out.splitlines() == [f"wrote {tmp_path}/page.html", f"wrote {tmp_path}/a/report.html"]


def test_groups_of_a_report_can_be_named_or_left_out(tmp_path, capsys):
    for name in ("a1", "a2", "b1"):
        make_run(tmp_path / name, usual_records())
    page = tmp_path / "page.html"
    assert main(["report", f"old={tmp_path}/a*", f"new one={tmp_path}/b1", "--out", str(page)]) == 0
    assert '"label":"new one"' in page.read_text()
    assert main(["report", f"{tmp_path}/a1", f"{tmp_path}/a2", "--by", "run", "--out", str(page)]) == 0
    assert '"label":"a2"' in page.read_text()
    assert main(["report", f"{tmp_path}/none*", "--out", str(page)]) == 2
    assert "no run matches" in capsys.readouterr().err


def test_a_board_says_where_it_is_and_ends_with_ctrl_c(tmp_path):
    make_run(tmp_path / "a", usual_records())
    with subprocess.Popen([sys.executable, "-m", "pytorchrl", "board", str(tmp_path), "--port", "0"], text=True,
                          stdout=subprocess.PIPE, env=process_environment()) as process:
        address = process.stdout.readline().split()[0]
        assert "/run/a" in urllib.request.urlopen(f"{address}rows", timeout=60).read().decode()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


class Terminal:
    """A pseudo-terminal in which `pytorchrl watch` runs."""

    def __init__(self, *arguments):
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen([sys.executable, "-m", "pytorchrl", *arguments], stdin=slave, stdout=slave,
                                        stderr=slave, env=process_environment() | {"TERM": "xterm", "COLUMNS": "80"})
        os.close(slave)
        self.text = ""

    def read_until(self, words):
        """Read what the process shows until it contains `words`, or until the process ends."""
        deadline = time.monotonic() + 60
        while words not in self.text and time.monotonic() < deadline:
            if select.select([self.master], [], [], 1.0)[0]:
                try:
                    self.text += os.read(self.master, 65536).decode(errors="replace")
                except OSError:  # the process has ended
                    break
        assert words in self.text

    def end(self):
        code = self.process.wait(100)
        os.close(self.master)
        return code


@pytest.mark.parametrize("end", ["q", "Ctrl-C", "result"])
def test_watching_ends_with_a_key_or_with_the_run(tmp_path, end):
    run_dir = make_run(tmp_path / "a", usual_records()[:2])
    terminal = Terminal("watch", str(run_dir), "--interval", "0.05")
    terminal.read_until("1,500/10,000")
    make_run(run_dir, usual_records())
    terminal.read_until("4,000/10,000")
    if end == "result":
        (run_dir / "result.json").write_text('{"env_steps": 4100}')
    elif end == "q":
        os.write(terminal.master, b"q")
    else:
        terminal.process.send_signal(signal.SIGINT)
    terminal.read_until("\x1b[?1049l")  # the normal screen is back
    assert terminal.end() == 0


def test_training_can_be_watched_in_its_own_terminal(tmp_path, monkeypatch):
    seen = []

    @contextlib.contextmanager
    def watching(run_dir):
        seen.append(run_dir)
        yield
        seen.append((run_dir / "result.json").exists())
    monkeypatch.setattr("pytorchrl.cli.train.check_watching", seen.append)
    monkeypatch.setattr("pytorchrl.cli.train.watching", watching)
    assert main(["train", "a2c", "--env", "CartPole-v1", "--target-steps", "100", "--watch",
                 "--log-dir", str(tmp_path / "a")]) == 0
    assert seen == [str(tmp_path / "a"), tmp_path / "a", True]
    options = json.loads((tmp_path / "a" / "run.json").read_text())["recipe"]["options"]
    assert (options["log_every_s"], options["progress"]) == (1.0, False)


def test_the_view_of_a_training_program_ends_with_the_run(tmp_path, capfd):
    run_dir = make_run(tmp_path / "a", usual_records(), result={"env_steps": 4100})
    with watching(run_dir):
        pass
    assert "4,100/10,000 steps" in capfd.readouterr().out


def test_the_view_of_a_training_program_ends_if_training_fails(tmp_path):
    with pytest.raises(ValueError, match="failed"), watching(make_run(tmp_path / "a", usual_records())):
        raise ValueError("failed")
