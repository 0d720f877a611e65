"""Run directories, records and the progress line."""

from __future__ import annotations

import io
import json
import math
import os
import re
import sys

import numpy as np
import pytest

from pytorchrl.errors import ConfigError
from pytorchrl.reporting import (
    Means,
    Progress,
    RateWindow,
    Recorder,
    plain,
    prepare_log_dir,
    progress_text,
    to_json,
    write_json,
)

STATUS = {"env_steps": 500, "target_steps": 2000, "env_steps_per_s": 100.0, "return_mean": 21.5, "lag": 0.5,
          "workers": 4, "workers_missing": 0}


def test_log_dir_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="must be a directory, got the file"):
        prepare_log_dir(tmp_path / "file", overwrite=False)
    with pytest.raises(ConfigError, match="cannot be written"):
        prepare_log_dir(tmp_path / "file" / "below", overwrite=False)


def test_log_dir_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
    # A superuser may write everywhere, so the refusal of the file system is made here.
    def refuse(*_arguments, **_options):
        raise PermissionError(13, "Permission denied")
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ConfigError, match=r"cannot be written: .*Permission denied"):
        prepare_log_dir(tmp_path, overwrite=False)


def test_log_dir_with_nul_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be written"):
        prepare_log_dir(f"{tmp_path}/a\0b", overwrite=False)


@pytest.mark.parametrize("name", ["a b", "läuft", "日本", "a/b/c"])
def test_log_dir_is_made_whatever_its_name(tmp_path, name):
    path = prepare_log_dir(tmp_path / name, overwrite=False)
    assert path.is_dir()
    assert list(path.iterdir()) == []


def test_an_earlier_run_is_refused_or_renamed_never_removed(tmp_path):
    run = tmp_path / "run"
    for content in ("first", "second"):
        write_json(prepare_log_dir(run, overwrite=True) / "run.json", content)
    with pytest.raises(ConfigError, match="holds a run already"):
        prepare_log_dir(run, overwrite=False)
    assert json.loads((run / "run.json").read_text()) == "second"
    assert json.loads((tmp_path / "run.1" / "run.json").read_text()) == "first"
    prepare_log_dir(run, overwrite=True)
    assert json.loads((tmp_path / "run.2" / "run.json").read_text()) == "second"


def test_overwrite_leaves_files_alone_that_are_no_run(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    prepare_log_dir(tmp_path, overwrite=True)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


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


def test_a_full_disk_ends_recording_but_not_the_run(tmp_path, caplog):
    recorder = Recorder(tmp_path, tensorboard=False)
    recorder._file.close()
    recorder._file = open("/dev/full", "w")  # noqa: SIM115 - closed by the recorder
    recorder.write({"env_steps": 1})
    recorder.write({"env_steps": 2})
    recorder.close()
    assert "no longer written" in caplog.text


def test_files_of_a_run_are_private_and_follow_no_link(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "metrics.jsonl").symlink_to(victim)
    with pytest.raises(OSError, match="metrics"):
        Recorder(tmp_path, tensorboard=False)
    assert victim.read_text() == "mine"
    write_json(tmp_path / "run.json", {})
    assert (tmp_path / "run.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_gets_every_number(tmp_path):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    recorder = Recorder(tmp_path)
    recorder.write({"env_steps": 10, "algorithm": {"loss": 0.25, "kl": math.nan}, "seed": None})
    recorder.close()
    events = event_accumulator.EventAccumulator(str(tmp_path)).Reload()
    assert set(events.Tags()["scalars"]) == {"env_steps", "algorithm/loss"}
    assert [(event.step, event.value) for event in events.Scalars("algorithm/loss")] == [(10, 0.25)]


def test_without_tensorboard_json_lines_are_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    recorder = Recorder(tmp_path)
    recorder.write({"env_steps": 10})
    recorder.close()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_rate_is_that_of_the_window():
    rate = RateWindow(seconds=10.0)
    assert rate.rate == 0.0
    for second in range(30):
        rate.add(float(second), 100 * second if second < 20 else 1900)  # a stall after 20 seconds
    assert rate.rate == 0.0
    rate.add(30.0, 2900)
    assert rate.rate == pytest.approx(100.0)


def test_means_are_taken_over_the_values_there_were():
    means = Means()
    means.add({"a": 1.0, "b": 5.0})
    means.add({"a": 3.0})
    assert means.take() == {"a": 2.0, "b": 5.0}
    assert means.take() == {}


def test_the_last_means_are_shown_until_there_are_new_values():
    means = Means()
    assert means.peek() == {}
    means.add({"a": 1.0, "b": 5.0})
    assert means.peek() == means.take() == means.peek() == {"a": 1.0, "b": 5.0}
    assert means.take() == {}
    assert means.peek() == {"a": 1.0, "b": 5.0}
    means.add({"a": 4.0})
    assert means.peek() == {"a": 4.0}


def test_progress_line_says_steps_rate_return_lag_and_time_left():
    line = progress_text({**STATUS, "eval_return": 30.0})
    for part in ("500/2,000 steps", "25%", "100 steps/s", "return 21.5", "eval 30.0", "lag 0.5", "left 0:15"):
        assert part in line
    assert "workers" not in line


def test_progress_line_shows_missing_workers():
    assert progress_text({**STATUS, "workers_missing": 1}).endswith("workers 3/4")


def test_progress_line_before_anything_is_known():
    line = progress_text({**STATUS, "env_steps": 0, "env_steps_per_s": 0.0, "return_mean": None})
    assert "return -" in line
    assert "left --:--" in line


def test_lines_outside_a_terminal_come_ever_more_rarely(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("pytorchrl.reporting.time.monotonic", lambda: now[0])
    stream = io.StringIO()
    progress = Progress(stream)
    for _ in range(400):
        progress.show(STATUS)
        now[0] += 0.25
    lines = stream.getvalue().splitlines()
    assert 5 <= len(lines) <= 12
    progress.show(STATUS, last=True)
    assert len(stream.getvalue().splitlines()) == len(lines) + 1


class Terminal(io.StringIO):
    def isatty(self):
        return True


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
