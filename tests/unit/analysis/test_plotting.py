"""Tests of figures: the labels of curves, legends and formats."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from pytorchrl.analysis.plotting import labels, plot_comparison, plot_groups, plot_runs


@pytest.mark.parametrize(("paths", "expected"), [
    (["runs/ppo"], ["ppo"]), (["runs/ppo", "runs/a2c"], ["ppo", "a2c"]),
    (["runs/ppo/seed1", "runs/a2c/seed1"], ["ppo/seed1", "a2c/seed1"]),
    (["here/ppo/seed1", "there/ppo/seed1", "runs/dqn"], ["here/ppo/seed1", "there/ppo/seed1", "runs/dqn"]),
    (["seed1", "runs/seed1"], ["seed1", "runs/seed1"]), (["runs/ppo", "runs/ppo"], ["ppo", "ppo"])])
def test_curves_have_uniquelabels_with_the_names_of_runs(paths, expected):
    assert labels([Path(path) for path in paths]) == expected


@pytest.mark.parametrize(("name", "start"), [("curve.png", b"\x89PNG"), ("curve.svg", b"<?xml"), ("curve", b"\x89PNG")])
def test_the_name_of_a_figure_determines_its_format(tmp_path, name, start):
    pytest.importorskip("matplotlib")
    records = [{"env_steps": steps, "return_mean": float(steps)} for steps in (10, 20)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    plot_runs([tmp_path], tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(start)


def test_legends_show_labels_that_begin_with_an_underscore(tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "metrics.jsonl").write_text('{"env_steps": 1, "return_mean": 2.0}\n', encoding="utf-8")
    plot_groups({"_one": [tmp_path], "two": [tmp_path, tmp_path]}, tmp_path / "groups.svg")
    texts = texts_of(tmp_path / "groups.svg")
    assert [texts.count(text) for text in ("_one", "two (2 runs)")] == [1, 1]
    scores = np.arange(3.0)[:, None]
    plot_comparison({"_one": scores, "two": scores}, tmp_path / "comparison.svg")
    texts = texts_of(tmp_path / "comparison.svg")
    assert [texts.count(text) for text in ("_one", "two")] == [2, 2]  # at the axis, and in the legend


def texts_of(path):
    """Return the texts of an SVG file of matplotlib, which draws texts as paths, each after a comment with the text."""
    return re.findall("<!-- (.*?) -->", path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(("num_runs", "bands", "lines"), [(1, 0, 1), (2, 0, 3), (3, 0, 4), (4, 1, 1)])
def test_fewer_than_four_runs_are_drawn_as_curves_that_determine_the_axis(
        tmp_path, monkeypatch, num_runs, bands, lines):
    pytest.importorskip("matplotlib")
    figures = []
    monkeypatch.setattr("pytorchrl.analysis.plotting._save", lambda figure, output: figures.append(figure))
    for run in range(num_runs):
        (tmp_path / str(run)).mkdir()
        records = [{"env_steps": step, "return_mean": 0.1 * step * (1 + run % 2)} for step in (1, 2, 3)]
        (tmp_path / str(run) / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    plot_groups({"runs": [tmp_path / str(run) for run in range(num_runs)]}, tmp_path / "plot.png")
    (axes,) = figures[0].axes
    assert (len(axes.collections), len(axes.lines)) == (bands, lines)
    if num_runs < 4:
        low, high = axes.get_ylim()
        largest = 0.3 * min(num_runs, 2)
        assert 0.0 < low < 0.1
        assert largest < high < 1.1 * largest
