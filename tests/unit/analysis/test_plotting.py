"""Tests of figures: the labels of curves, keys, axes and formats."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest

from pytorchrl.analysis import STATISTICS
from pytorchrl.analysis.drawing import Canvas
from pytorchrl.analysis.plotting import Picture, labels, plot_comparison, plot_groups, plot_runs
from pytorchrl.errors import ConfigError


@pytest.fixture
def figures(monkeypatch):
    """Return a list to which each plot adds its figure, in place of writing a file."""
    pytest.importorskip("matplotlib")
    found = []
    monkeypatch.setattr(Canvas, "save", lambda canvas: found.append(canvas.lay_out()))
    return found


@pytest.fixture
def curves(tmp_path):
    """Return a function that writes runs with rising returns, which end at 3, 6, 9 and so on, and returns their paths.

    The last run has the factor `last` in place of its number.
    """
    def make(count, *, last=None, steps=(0, 10, 20, 30)):
        for run in range(count):
            factor = last if last is not None and run == count - 1 else run + 1
            records = [{"env_steps": step, "seconds": step / 7, "return_mean": factor * (step + 1) / 10}
                       for step in steps]
            (tmp_path / str(run)).mkdir(exist_ok=True)
            (tmp_path / str(run) / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
        return [tmp_path / str(run) for run in range(count)]
    return make


@pytest.mark.parametrize(("paths", "expected"), [
    (["runs/ppo"], ["ppo"]), (["runs/ppo", "runs/a2c"], ["ppo", "a2c"]),
    (["runs/ppo/seed1", "runs/a2c/seed1"], ["ppo/seed1", "a2c/seed1"]),
    (["here/ppo/seed1", "there/ppo/seed1", "runs/dqn"], ["here/ppo/seed1", "there/ppo/seed1", "runs/dqn"]),
    (["seed1", "runs/seed1"], ["seed1", "runs/seed1"]), (["runs/ppo", "runs/ppo"], ["ppo", "ppo"])])
def test_curves_have_uniquelabels_with_the_names_of_runs(paths, expected):
    assert labels([Path(path) for path in paths]) == expected


@pytest.mark.parametrize(("name", "start"), [
    ("curve.png", b"\x89PNG"), ("curve.svg", b"<?xml"), ("curve.PDF", b"%PDF"), ("curve", b"\x89PNG")])
def test_the_name_of_a_figure_determines_its_format(tmp_path, name, start):
    pytest.importorskip("matplotlib")
    records = [{"env_steps": steps, "return_mean": float(steps)} for steps in (10, 20)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    plot_runs([tmp_path], tmp_path / name)
    content = (tmp_path / name).read_bytes()
    assert content.startswith(start)
    plot_runs([tmp_path], tmp_path / name)
    assert (tmp_path / name).read_bytes() == content  # equal runs give equal files, without dates
    with pytest.raises(ConfigError, match=r"ends in \.png, \.pdf, \.svg; got .*curve\.jpg"):
        plot_runs([tmp_path], tmp_path / "curve.jpg")


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
def test_fewer_than_four_runs_are_drawn_as_curves_that_determine_the_axis(figures, curves, num_runs, bands, lines):
    plot_groups({"runs": curves(num_runs)}, Path("plot.png"))
    (axes,) = figures[0].axes
    assert (len(axes.collections), len(axes.lines)) == (bands, lines)
    largest = 3.1 * num_runs
    low, high = axes.get_ylim()
    assert -0.1 * largest < low < 0.1
    assert largest < high < (1.1 if num_runs < 4 else 1.4) * largest


def test_a_band_extends_the_axis_by_a_quarter_of_the_range_of_the_runs_at_most(figures, curves):
    plot_groups({"runs": curves(4, last=200)}, Path("plot.png"), statistic=STATISTICS["mean"])
    (axes,) = figures[0].axes
    band = axes.collections[0].get_paths()[0].vertices[:, 1]
    assert band.min() < -300.0  # the runs end at 3, 6, 9 and 620
    low, high = axes.get_ylim()
    assert -210.0 < low < -180.0
    assert 640.0 < high < 820.0


# Sizes of the grid: groups, and runs of each. The labels have 120 characters.
SIZES = [(1, 1), (2, 10), (11, 3), (24, 2)]
LABEL = "ppo hidden_sizes=256,256 feature_extractor=project.networks:Residual lr=0.0001 num_envs=16 entropy_coef=0.01 "


@pytest.mark.parametrize(("groups", "runs"), SIZES)
def test_axes_take_most_of_the_width_and_nothing_overlaps(figures, curves, groups, runs):
    """Measure the boxes of axes, key and letters after drawing: with labels of 120 characters and short ones."""
    run_dirs, rng = curves(runs), np.random.default_rng(0)
    for label in (f"{LABEL}{{}}".ljust(122, "x"), "lr={}"):
        names = [label.format(f"{number:02d}") for number in range(groups)]
        plot_groups(dict.fromkeys(names, run_dirs), Path("plot.png"), picture=Picture(" ".join(names[:2]), (5, 3)))
        drawn = [(figures[-1], 1)]
        if len(names[0]) > 60:
            plot_comparison({name: rng.normal(size=(runs, 1)) for name in names}, Path("plot.png"))
            drawn.append((figures[-1], 2))
        for figure, rows in drawn:
            figure.draw_without_rendering()
            width = figure.bbox.width
            *top, bottom = figure.axes
            shares = [sum(axes.get_window_extent().width for axes in row) / width for row in (top, [bottom]) if row]
            assert len(shares) == rows
            assert min(shares) >= 0.6, (label, shares)
            title, *texts = [text.get_window_extent() for text in figure.texts]
            if rows == 2:
                texts.insert(0, title)
            assert len(texts) >= (groups if groups > 1 or rows == 2 else 0)
            edge = bottom.get_tightbbox().y0
            for box in texts:
                assert box.x0 >= 0, label
                assert box.x1 <= width, label
                assert box.y0 >= 0, label
                assert box.y1 <= edge, label
            marks = [text.get_window_extent() for text in bottom.texts]
            for boxes in (texts, marks):
                assert not any(first.overlaps(second) for first, second in itertools.combinations(boxes, 2)), label
            assert len(marks) == (groups if rows == 1 and (groups > 10 or len(names[0]) > 60) else 0), label


def test_letters_stand_in_the_key_and_at_the_lines_in_the_same_order(figures, curves):
    names = [LABEL + text for text in ("one", "two")]
    plot_groups(dict(zip(names, ([run] for run in curves(2)), strict=True)), Path("plot.png"))
    (axes,) = figures[0].axes
    assert [(text.get_text(), text.xy) for text in axes.texts] == [
        ("A", (30.0, pytest.approx(3.1))), ("B", (30.0, pytest.approx(6.2)))]
    assert [text.get_color() for text in axes.texts] == [line.get_color() for line in axes.lines]
    shown = [text.get_text() for text in figures[0].texts]
    assert shown.index("A") < shown.index("B")
    assert "".join(shown).replace(" ", "").startswith(("A" + LABEL + "one").replace(" ", ""))


def test_logarithmic_axes_title_and_size(figures, curves):
    run_dirs = curves(4)
    plot_groups({"a": run_dirs}, Path("plot.svg"), picture=Picture("A $title", (4, 3), "xy"))
    (axes,) = figures[0].axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert axes.lines[0].get_xdata()[0] == 10.0  # the record at 0 env steps is left out
    assert len(axes.lines[0].get_xdata()) == 1000
    assert axes.get_ylim()[0] > 0.2
    assert any(label.get_text() for label in axes.get_xticklabels())
    assert figures[0].get_suptitle() == r"A \$title"
    assert figures[0].get_size_inches()[0] == 4
    assert 3.0 < figures[0].get_size_inches()[1] < 3.5  # with the note below
    plot_groups({"a": run_dirs}, Path("plot.svg"), x="seconds", picture=Picture(log="y"))
    (axes,) = figures[1].axes
    assert (axes.get_xscale(), axes.get_yscale(), axes.get_xlabel()) == ("linear", "log", "time (s)")
    assert figures[1].get_suptitle() == ""


def test_wrong_pictures_are_refused(figures, curves):
    run_dirs = curves(1, last=-1)
    for wrong, message in [
            (lambda: Picture(size=(7, 0)), "from 2 to 40 inches"), (lambda: Picture(size=(50, 3)), r"got \(50, 3\)"),
            (lambda: Picture(size=(3,)), "a width and a height"), (lambda: Picture(log="z"), "one of x, y, xy"),
            (lambda: plot_comparison({"a": np.ones((2, 1))}, Path("a.png"), picture=Picture(log="x")), "got log='x'"),
            (lambda: plot_runs(run_dirs, Path("a.png"), picture=Picture(log="y")), "must be above 0 .* is -3.1 in"),
            (lambda: plot_runs(run_dirs, Path("a.png"), x="return_mean", picture=Picture(log="x")), "never above 0"),
            (lambda: plot_runs(run_dirs, Path("a.png"), x="return_mean"), "decreases .* choose env_steps, sec")]:
        with pytest.raises(ConfigError, match=message):
            wrong()
    assert figures == []
    plot_runs(run_dirs, Path("a.png"), picture=Picture(log="x"))  # as the errors advise
    plot_runs(run_dirs, Path("a.png"), x="seconds")
    assert len(figures) == 2


def test_many_groups_have_no_lines_of_single_runs_and_letters_in_one_column(figures, curves):
    long = curves(3, steps=(0, 10, 20, 31))[2:]
    run_dirs = curves(2)  # which end at 30
    for groups, lines in ((10, 3 * 9 + 1), (11, 11)):
        plot_groups({"long": long, **{str(group): run_dirs for group in range(1, groups)}}, Path("a.png"))
        (axes,) = figures[-1].axes
        assert len(axes.lines) == lines
        assert len({text.xy[0] for text in axes.texts}) == (groups > 10)
        assert any("thin lines" in text.get_text() for text in figures[-1].texts) == (groups < 11)


def test_the_profile_of_few_runs_has_no_band(figures):
    for runs, bands in ((3, 0), (4, 2)):
        plot_comparison({"a": np.arange(runs)[:, None], "b": np.ones((runs, 1))}, Path("a.png"))
        assert len(figures[-1].axes[-1].collections) == bands
