"""Tests that the files of a run are read while they are being written, and that their contents are not trusted."""

from __future__ import annotations

import json
import os

import pytest

from pytorchrl.errors import ConfigError
from pytorchrl.files.reading import Records, check_run, count, item, mapping, number, read_object, rows, text


def append(path, data):
    with open(path / "metrics.jsonl", "a") as file:
        file.write(data)


def test_an_incomplete_line_is_read_when_it_is_complete(tmp_path):
    records = Records(tmp_path)
    assert records.read() == []
    append(tmp_path, '{"a": 1}\n{"a"')
    assert records.read() == [{"a": 1}]
    assert records.read() == []
    append(tmp_path, ': 2}\n')
    assert records.read() == [{"a": 2}]
    assert not records.has_restarted


def test_reading_begins_again_if_the_file_was_replaced_or_cut(tmp_path):
    records = Records(tmp_path)
    append(tmp_path, '{"a": 1}\n{"a": 2}\n')
    assert len(records.read()) == 2
    (tmp_path / "new").write_text('{"a": 1}\n{"a": 9}\n{"a": 10}\n')
    os.replace(tmp_path / "new", tmp_path / "metrics.jsonl")
    assert records.read() == [{"a": 1}, {"a": 9}, {"a": 10}]
    assert records.has_restarted
    (tmp_path / "metrics.jsonl").write_text('{"a": 1}\n')
    assert records.read() == [{"a": 1}]


def test_only_the_end_of_a_long_file_is_read_on_request(tmp_path):
    lines = [json.dumps({"number": number, "text": "x" * 1000}) for number in range(3000)]
    append(tmp_path, "\n".join(lines) + "\n")
    found = [one["number"] for one in Records(tmp_path, only_latest=True).read()]
    assert found == list(range(found[0], 3000))
    assert 900 < len(found) < 1100
    assert len(Records(tmp_path).read()) == 3000


@pytest.mark.parametrize("line", ["[1]", "3", "not json", "", "[" * 100_000])
def test_lines_that_are_not_objects_are_skipped(tmp_path, line):
    append(tmp_path, f'{line}\n{{"a": 1}}\n')
    assert Records(tmp_path).read() == [{"a": 1}]
    (tmp_path / "run.json").write_text(line)
    assert read_object(tmp_path / "run.json") == {}


def test_values_of_other_types_count_as_missing():
    record = {"a": {"b": 2.5}, "text": "x", "list": [1], "inf": float("inf"), "yes": True}
    assert (number(record, "a", "b"), count(record, "a", "b"), item(record, "a", "b", "c")) == (2.5, 2, None)
    assert [number(record, name) for name in ("text", "list", "inf", "yes", "none")] == [None] * 5
    assert (text(record, "list"), mapping(record, "text"), rows(record, "a"), rows(record, "list")) == ("", {}, [], [1])


def test_a_directory_without_a_run_is_refused(tmp_path):
    (tmp_path / "runs" / "a").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"contains no run: run\.json is missing"):
        check_run(tmp_path / "runs")
    (tmp_path / "runs" / "a" / "run.json").write_text("{}")
    with pytest.raises(ConfigError, match="is a directory of runs; name one of them"):
        check_run(tmp_path / "runs")
    check_run(tmp_path / "runs" / "a")
