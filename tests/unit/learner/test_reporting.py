"""Tests of records, means, rates and the progress line."""

from __future__ import annotations

import functools
import io
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from pytorchrl.agent.data import Episode
from pytorchrl.learner.reporting import (
    EpisodeWindow,
    Means,
    Progress,
    RateWindow,
    Recorder,
    commit,
    origin,
    plain,
    progress_text,
    red,
    start_progress,
    to_json,
)
from pytorchrl.monitor.findings import RunFinding


class Terminal(io.StringIO):
    def isatty(self):
        return True


STATUS = {"env_steps": 500, "target_steps": 2000, "env_steps_per_s": 100.0, "return_mean": 21.5, "lag": 0.5,
          "workers": 4, "workers_missing": 0}


@pytest.mark.parametrize("text", ["\n", "\r", "\x1b[31m", "\u202e", "\x7f", "\x00", "\ud800", "<script>", "\u2028"])
def test_a_record_is_one_line_of_printable_ascii(text):
    line = to_json({f"key{text}": f"value{text}"})
    assert re.fullmatch(r"[ -~]+", line)
    assert json.loads(line) == {f"key{text}": f"value{text}"}


def test_records_are_bounded():
    record = plain({f"{i}": "x" * 5000 for i in range(20_000)})
    assert len(record) == 10_000
    assert len(record["0"]) == 1000


@pytest.mark.parametrize(("value", "expected"), [
    (math.nan, None), (math.inf, None), (-math.inf, None), (np.float32(0.5), 0.5), (np.float64(np.nan), None),
    (np.int64(3), 3), (np.bool_(True), True), ((1, 2.0), [1, 2.0]), (None, None), (True, True),
])
def test_plain_values(value, expected):
    assert plain(value) == expected


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_gets_every_number(tmp_path):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    recorder = Recorder(tmp_path, tensorboard=True)
    recorder.write({"env_steps": 10, "algorithm": {"loss": 0.25, "kl": math.nan}, "seed": None})
    recorder.close()
    events = event_accumulator.EventAccumulator(str(tmp_path)).Reload()
    assert set(events.Tags()["scalars"]) == {"env_steps", "algorithm/loss"}
    assert [(event.step, event.value) for event in events.Scalars("algorithm/loss")] == [(10, 0.25)]


def test_without_tensorboard_json_lines_are_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    recorder = Recorder(tmp_path, tensorboard=True)
    recorder.write({"env_steps": 10})
    recorder.close()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_rate_is_computed_over_the_window():
    rate = RateWindow(seconds=10.0)
    assert rate.rate == 0.0
    for second in range(30):
        rate.add(float(second), 100 * second if second < 20 else 1900)  # no steps arrive after 20 seconds
    assert rate.rate == 0.0
    rate.add(30.0, 2900)
    assert rate.rate == pytest.approx(100.0)


def test_means_cover_only_existing_values():
    means = Means()
    means.add({"a": 1.0, "b": 5.0})
    means.add({"a": 3.0})
    assert means.take() == {"a": 2.0, "b": 5.0}
    assert means.take() == {}


def test_means_continue_from_a_checkpoint():
    means, again = Means(), Means()
    means.add({"a": 1.0, "b": 5.0})
    again.restore(json.loads(json.dumps(means.state())))
    for each in (means, again):
        each.add({"a": 3.0})
    assert again.take() == means.take() == {"a": 2.0, "b": 5.0}
    again.restore(means.state())
    assert again.peek() == means.peek() == {"a": 2.0, "b": 5.0}


def test_the_last_means_are_shown_until_there_are_new_values():
    means = Means()
    assert means.peek() == {}
    means.add({"a": 1.0, "b": 5.0})
    assert means.peek() == means.take() == means.peek() == {"a": 1.0, "b": 5.0}
    assert means.take() == {}
    assert means.peek() == {"a": 1.0, "b": 5.0}
    means.add({"a": 4.0})
    assert means.peek() == {"a": 4.0}


def test_progress_line_shows_steps_rate_return_lag_and_time_left():
    line = progress_text({**STATUS, "eval_return": 30.0})
    for part in ("500/2,000 steps", "25%", "100 steps/s", "return 21.5", "eval 30.0", "lag 0.5 updates", "left 0:15"):
        assert part in line
    assert not {"workers", "dropped"} & set(line.split())


@pytest.mark.parametrize(("changed", "shown", "hidden"), [
    ({"batch_lag": 1.25}, "lag 1.2 batches", "updates"), ({"batch_lag": 0.0}, "lag 0.0 batches", "updates"),
    ({"lag": 0.0}, "return 21.5", "lag"),  # without a lag, as in synchronous collection
    ({"dropped_share": 0.255}, "dropped 26%", "%%"), ({"dropped_share": 0.009}, "return 21.5", "dropped"),
    ({"env_steps": 2345}, "2,000/2,000 steps  100%", "2,345"),
    ({"env_steps": 1000}, "1,000/2,000 steps   50%", "left -"),
    ({"target_steps": 0, "env_steps": 0}, "0/0 steps", "nan"),
])
def test_progress_line_shows_lag_and_drops_where_they_exist_and_no_more_than_the_target(changed, shown, hidden):
    line = progress_text({**STATUS, **changed})
    assert shown in line
    assert hidden not in line


FOUND = (RunFinding("lag", "the data are old"), RunFinding("NaN", "updates were skipped"))


@pytest.mark.parametrize("has_rich", [True, False])
def test_findings_are_red_words_in_a_terminal_and_sentences_once_and_at_the_end(monkeypatch, has_rich):
    if not has_rich:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = Terminal()
    progress = Progress(stream)
    progress.show(STATUS)
    assert "lag " in stream.getvalue()
    for found in (FOUND[:1], FOUND[:1], FOUND):
        progress.show({**STATUS, "findings": found})
    progress.show({**STATUS, "findings": FOUND}, last=True)
    assert stream.getvalue().count("the data are old") == stream.getvalue().count("updates were skipped") == 1
    assert "lag, NaN: " in stream.getvalue()
    assert "31m" in stream.getvalue()  # red
    progress.close()
    progress.close()
    assert stream.getvalue().count("the data are old") == stream.getvalue().count("updates were skipped") == 2
    assert stream.getvalue().endswith("\x1b[31mthe data are old\x1b[0m\n\x1b[31mupdates were skipped\x1b[0m\n")


def test_findings_outside_a_terminal_have_no_color(monkeypatch):
    stream = io.StringIO()
    progress = Progress(stream)
    progress.show({**STATUS, "findings": FOUND[:1]})
    progress.close()
    first, line, last = stream.getvalue().splitlines()
    assert first == last == "the data are old"
    assert line.startswith("lag:  ")
    assert "\x1b" not in stream.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    assert red("text") == "text"


def test_the_range_of_returns_covers_the_whole_run():
    window = EpisodeWindow(size=2)
    assert window.return_range is None
    for value in (3.0, -1.0, 2.0, 2.0):
        window.extend([Episode(value, 1, 0.0, 0, terminated=True)])
    assert window.return_range == {"min": -1.0, "max": 3.0}
    again = EpisodeWindow(size=2)
    again.restore(json.loads(json.dumps(window.state())))
    assert (again.return_range, again.return_mean) == (window.return_range, 2.0)
    empty = EpisodeWindow()
    empty.restore(EpisodeWindow().state())
    assert empty.return_range is None


def test_progress_line_shows_missing_workers():
    assert progress_text({**STATUS, "workers_missing": 1}).endswith("workers 3/4")


def test_progress_line_before_anything_is_known():
    line = progress_text({**STATUS, "env_steps": 0, "env_steps_per_s": 0.0, "return_mean": None})
    assert "return -" in line
    assert "left --:--" in line


def test_lines_outside_a_terminal_become_less_frequent(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("pytorchrl.learner.reporting.time.monotonic", lambda: now[0])
    stream = io.StringIO()
    progress = Progress(stream)
    for _ in range(400):
        progress.show(STATUS)
        now[0] += 0.25
    lines = stream.getvalue().splitlines()
    assert 5 <= len(lines) <= 12
    progress.show({**STATUS, "env_steps": 600}, last=True)
    assert len(stream.getvalue().splitlines()) == len(lines) + 1


def test_the_last_line_is_shown_once_and_again_only_with_new_figures():
    stream = io.StringIO()
    progress = Progress(stream)
    progress.show(STATUS)
    progress.show(STATUS, last=True)
    assert len(stream.getvalue().splitlines()) == 1
    progress.show({**STATUS, "env_steps": 600}, last=True)
    progress.show({**STATUS, "env_steps": 600}, last=True)
    assert [line.split("/")[0].strip() for line in stream.getvalue().splitlines()] == ["500", "600"]


class FakeNotebook:
    """The members of IPython that a notebook has, with the HTML and the text of each display and update."""

    def __init__(self, *, has_kernel=True, fails=False):
        self.shown, self.fails = [], fails
        self.display = SimpleNamespace(display=self._display)
        self._shell = SimpleNamespace(kernel=object()) if has_kernel else SimpleNamespace()

    def get_ipython(self):
        return self._shell

    def _display(self, shown, *, display_id):
        assert display_id is True
        self.update(shown)
        return self

    def update(self, shown):
        if self.fails:
            raise RuntimeError("the notebook is closed")
        self.shown.append((shown._repr_html_(), repr(shown)))


def test_a_notebook_shows_a_bar_that_is_updated_in_place(monkeypatch, capsys):
    notebook = FakeNotebook()
    monkeypatch.setitem(sys.modules, "IPython", notebook)
    progress = start_progress("ppo on <b>&", Path("runs/a-1"))
    progress.announce("starting Ray ...")
    assert "starting Ray" in notebook.shown[-1][0]
    for steps in (0, 500, 3000):
        progress.show({**STATUS, "env_steps": steps})
    progress.show({**STATUS, "env_steps": 2000}, last=True)
    progress.close()
    progress.show(STATUS)
    pages, texts = zip(*notebook.shown, strict=True)
    assert capsys.readouterr() == ("", "")
    assert len(pages) == 7
    shares = re.findall(r'<progress value="([0-9.]+)" max="1"', "".join(pages))
    assert shares == ["0.0000", "0.2500", "1.0000", "1.0000"]
    for page in pages[1:]:
        assert "ppo on &lt;b&gt;&amp;" in page
        assert "saved in runs/a-1" in page
    assert "starting Ray" not in pages[-1]
    assert texts[4] == f"ppo on <b>&\nsaved in runs/a-1\n{progress_text(STATUS)}"


def test_a_notebook_shows_what_goes_wrong_below_the_bar_while_it_does(monkeypatch):
    notebook = FakeNotebook()
    monkeypatch.setitem(sys.modules, "IPython", notebook)
    progress = start_progress(None, None)
    for findings in ([], [RunFinding("NaN", "lower <lr>"), RunFinding("lag", "the data are old")], []):
        progress.show({**STATUS, "findings": findings})
    pages, texts = zip(*notebook.shown[-3:], strict=True)
    assert ["lower &lt;lr&gt;" in page for page in pages] == [False, True, False]
    assert texts[1] == texts[0] + "\nlower <lr>\nthe data are old"
    assert texts[2] == texts[0]


def test_a_notebook_that_fails_does_not_end_the_run(monkeypatch):
    monkeypatch.setitem(sys.modules, "IPython", FakeNotebook(fails=True))
    progress = start_progress(None, None)
    progress.show(STATUS)
    progress.show(STATUS)
    progress.close()


def test_a_terminal_of_ipython_shows_the_line(monkeypatch, capsys):
    notebook = FakeNotebook(has_kernel=False)
    monkeypatch.setitem(sys.modules, "IPython", notebook)
    progress = start_progress("ppo", None)
    progress.show(STATUS)
    assert notebook.shown == []
    assert "500/2,000 steps" in capsys.readouterr().err


@pytest.mark.parametrize("with_rich", [True, False])
def test_the_line_moves_in_a_terminal_with_and_without_rich(monkeypatch, with_rich):
    if not with_rich:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    else:
        pytest.importorskip("rich")
    stream = Terminal()
    progress = Progress(stream)
    progress.show(STATUS)
    progress.show({**STATUS, "env_steps": 1000})
    progress.close()
    text = stream.getvalue()
    assert "500/2,000" in text
    assert "1,000/2,000" in text
    assert "\n" in text
    assert ("\x1b[" in text) == with_rich


def test_a_closed_stream_ends_the_display_only():
    stream = io.StringIO()
    progress = Progress(stream)
    progress.show(STATUS)
    stream.close()
    progress._next_line = 0.0
    progress.show(STATUS)
    progress.close()
    Progress(stream).show(STATUS)


@pytest.mark.parametrize("has_rich", [True, False])
def test_the_progress_line_replaces_startup_messages_in_a_terminal(monkeypatch, has_rich):
    if not has_rich:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    stream = Terminal()
    progress = Progress(stream)
    progress.announce("run in runs/a-1", keep=True)
    progress.announce("starting Ray ...")
    progress.announce("started")
    assert stream.getvalue() == "\rrun in runs/a-1\n\rstarting Ray ...\rstarted         "
    progress.show(STATUS)
    progress.close()
    rest = stream.getvalue().removeprefix("\rrun in runs/a-1\n\rstarting Ray ...\rstarted         ")
    assert rest.startswith("\r       \r" if has_rich else "\r")
    assert "500/2,000 steps" in rest
    assert rest.count("\n") == 1


def test_a_terminal_need_not_break_words(monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    text = "these are more words than fit into one line of it"
    for stream, expected in (
            (Terminal(), "\rstarting\rthese are more words than fit\ninto one line of it\n"),
            (io.StringIO(), f"starting\n{text}\n")):
        progress = Progress(stream)
        progress.announce("starting")
        progress.announce(text, keep=True)
        assert stream.getvalue() == expected


def test_a_narrow_terminal_cuts_only_figures_that_few_runs_have():
    line = progress_text({**STATUS, "target_steps": 1_000_000, "batch_lag": 3.0, "dropped_share": 0.7,
                          "workers_missing": 2, "envs_restarted": 5})
    assert len(line) > 80
    assert "left 2:46:35" in line[:80]


def test_a_failed_start_ends_the_line_in_a_terminal():
    stream = Terminal()
    progress = Progress(stream)
    progress.announce("starting Ray ...")
    progress.close()
    assert stream.getvalue() == "\rstarting Ray ...\n"


def test_outside_a_terminal_each_message_is_a_line():
    stream = io.StringIO()
    progress = Progress(stream)
    progress.announce("starting Ray ...")
    progress.announce("run in runs/a-1", keep=True)
    assert stream.getvalue() == "starting Ray ...\nrun in runs/a-1\n"
    stream.close()
    progress.announce("started")
    progress.show(STATUS)
    progress.close()


def rates_of(arrivals, end, *, seconds=10.0, rise=1000):
    """Return the rate after each quarter of a second, if `rise` steps arrive at each time in `arrivals`."""
    rate, rates = RateWindow(seconds), []
    for tick in range(4 * end + 1):
        rate.add(tick / 4, rise * sum(arrival <= tick / 4 for arrival in arrivals))
        rates.append(rate.rate)
    return rates


def test_the_rate_is_correct_if_rollouts_are_rarer_than_the_window():
    rates = rates_of(range(25, 400, 25), 399)  # 40 steps per second
    assert rates[4 * 25] == 40.0
    assert min(rates[4 * 25:]) > 20.0
    assert max(rates) < 60.0
    assert rates[-1] == pytest.approx(40.0, rel=0.2)


def test_the_rate_of_rare_rollouts_is_0_a_few_intervals_after_a_stall():
    rates = rates_of(range(25, 200, 25), 600)
    assert rates[4 * 200] > 20.0
    assert rates[-1] == 0.0


def test_the_commit_of_a_repository_is_found(tmp_path):
    assert commit(tmp_path) == ""  # no repository
    assert commit(tmp_path / "none") == ""
    git = functools.partial(subprocess.run, check=True, cwd=tmp_path, stdout=subprocess.DEVNULL)
    git(["git", "init", "-q"])
    assert commit(tmp_path) == ""  # no commit
    (tmp_path / "a").write_text("1")
    git(["git", "add", "a"])
    git(["git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "-m", "one"])
    (tmp_path / "new").write_text("untracked files do not count")
    found = commit(tmp_path)
    assert re.fullmatch("[0-9a-f]{40}", found)
    (tmp_path / "a").write_text("2")
    assert commit(tmp_path) == f"{found}-dirty"


@pytest.mark.cpu("names the GPUs of the machine")
@pytest.mark.parametrize(("arguments", "command"), [
    (["/x/bin/pytorchrl", "train", "ppo", "--env", "a b"], "pytorchrl train ppo --env 'a b'"),
    (["/x/pytorchrl/__main__.py", "train"], "pytorchrl train"), (["my.py", "1"], "python my.py 1"), ([""], "python"),
    ([], "python")])
def test_the_origin_names_the_command_and_the_machine(monkeypatch, arguments, command):
    monkeypatch.setattr(sys, "argv", arguments)
    found = origin()
    assert found["command"] == command
    assert found["machine"]["cores"] >= 1
    assert found["machine"]["gpus"] == []


def test_the_origin_of_a_notebook_is_no_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "IPython", FakeNotebook())
    assert origin()["command"] == "a notebook"
