"""Tests of the lines of charts: groups, positions, constant numbers and sizes."""

from __future__ import annotations

import json

import pytest

from pytorchrl.monitor.series import charts_of, curves_of, groups_of, to_data
from pytorchrl.monitor.view import read_run
from tests.unit.monitor.runs import description, make_run, usual_records


def views(path, count, records=usual_records):
    return [read_run(make_run(path / str(place), records(), {**description(), "seed": place}))
            for place in range(count)]


def test_runs_that_differ_only_in_seeds_are_one_group(tmp_path):
    (group,) = groups_of(views(tmp_path, 3))
    assert [member.name for member in group.members] == ["0", "1", "2"]
    assert group.env == "CartPole-v1"


def test_runs_with_equal_names_are_told_apart_by_their_paths(tmp_path):
    runs = [read_run(make_run(tmp_path / name / "run", usual_records())) for name in "ab"]
    assert [member.name for group in groups_of(runs) for member in group.members] == [
        str(tmp_path / name / "run") for name in "ab"]


def test_a_damaged_description_does_not_stop_a_report(tmp_path):
    run = make_run(tmp_path / "a", usual_records())
    (run / "run.json").write_text("{")
    view = read_run(run)
    assert view.problems
    assert [group.env for group in groups_of([view])] == ["env"]


def test_positions_never_decrease(tmp_path):
    records = usual_records()
    records[2]["seconds"] = 1.0
    (view,) = [read_run(make_run(tmp_path / "a", records))]
    assert [x for x, _ in curves_of(view, ("return_mean",))["seconds"]] == [5, 15, 30]
    assert len(curves_of(view, ("return_mean",))["env_steps"]) == 4


def test_runs_without_a_common_position_are_drawn_one_by_one(tmp_path):
    first, second = usual_records()[:2], usual_records()[2:]
    runs = [read_run(make_run(tmp_path / str(place), some, {**description(), "seed": place}))
            for place, some in enumerate((first, second))]
    charts, _, _ = charts_of(groups_of(runs))
    assert [line["label"] for line in charts[0].lines] == ["0", "1"]


@pytest.mark.parametrize("count", [1, 40])
def test_the_data_of_a_page_are_small(tmp_path, count):
    def many():
        return [{**usual_records()[-1], "env_steps": at, "seconds": at / 3, "return_mean": at / 7,
                 "algorithm": dict.fromkeys("abcdefgh", at / 11)} for at in range(300)]
    groups = groups_of(views(tmp_path, count, many))
    charts, statistics, _ = charts_of(groups)
    data = to_data(groups, [*charts, *statistics])
    assert len(statistics) == 8
    assert len(json.dumps(data)) < 250_000
    assert len({chart["file"] for chart in data["charts"]}) == len(data["charts"])
