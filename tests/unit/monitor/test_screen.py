"""Tests of the frames in a terminal: both layouts, many workers, and hostile names."""

from __future__ import annotations

import io

import pytest

from pytorchrl.monitor.live import show_once
from pytorchrl.monitor.screen import frame
from pytorchrl.monitor.view import read_run
from tests.unit.monitor.runs import description, hostile_run, make_run, record, row, usual_records


def shown(run_dir, width):
    stream = io.StringIO()
    show_once(run_dir, width=width, stream=stream)
    return stream.getvalue()


@pytest.mark.parametrize("width", [80, 200])
def test_a_frame_shows_the_tree_and_fits(tmp_path, width):
    text = shown(make_run(tmp_path / "a", usual_records(), result={"env_steps": 4000}), width)
    assert max(map(len, text.splitlines())) <= width
    words = " ".join(text.split())
    for part in ("a ppo on CartPole-v1 ended", "4,000/10,000 steps 40%", "bottleneck: 75% of the time",
                 "2/8, mean 1.0, peak 5", "CWorker 2 100 1,500 2.0 4 8 1", "who waits for whom", "worker_lost 3",
                 "the update worker waits 90% of the time for gradients", "1.5 mean, 3 p90, 9 max",
                 "lost workers restarted: 1 (GWorker 0/CWorker 2)"):
        assert part in words


def test_a_frame_shows_how_many_batches_of_shards_wait(tmp_path):
    text = shown(make_run(tmp_path / "a", usual_records(), description(num_replay_workers=3)), 200)
    assert "0 draws in flight, 2 batches wait, peak 5" in text


def test_wide_terminals_show_blocks_side_by_side(tmp_path):
    run_dir = make_run(tmp_path / "a", usual_records())

    def line_of(width, words):
        return next(place for place, line in enumerate(shown(run_dir, width).splitlines()) if words in line)
    assert line_of(200, "time of each level") == line_of(200, "tree")
    assert line_of(80, "time of each level") > line_of(80, "CWorker 2")


def test_a_small_terminal_shows_replaced_and_slow_workers(tmp_path):
    from rich.console import Console

    workers = [row(f"GWorker 0/CWorker {number}", 10 * number, restarts=int(number == 90)) for number in range(1, 101)]
    view = read_run(make_run(tmp_path / "a", [record(10, 1000, workers=workers)]))
    stream = io.StringIO()
    Console(file=stream, width=80).print(frame(view, 80, 40))
    text = stream.getvalue()
    assert "CWorker 90 " in text
    assert "CWorker 1 " in text
    assert "CWorker 100 " not in text
    assert "… and 91 more" in text


@pytest.mark.parametrize("width", [80, 200])
def test_hostile_texts_are_escaped(tmp_path, width):
    text = shown(hostile_run(tmp_path / "a"), width)
    assert all(line.isprintable() for line in text.splitlines())
    assert "onerror=alert(1)" in text
    assert r"\x1b[2J" in shown(hostile_run(tmp_path / "b"), 400)
    assert "[red]" in shown(hostile_run(tmp_path / "c"), 400)


@pytest.mark.parametrize("records", [(), [{}], [{"scheme": 3, "ledger": {"dropped": 3}}]])
def test_a_run_without_figures_is_shown(tmp_path, records):
    assert "not known before the first updates" in shown(make_run(tmp_path / "a", records, run={}), 80)
