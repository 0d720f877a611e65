"""Tests of reading runs and their scores."""

from __future__ import annotations

import hashlib
import json

import pytest

from pytorchrl.analysis import group_runs, read_curve, read_run, read_scores
from pytorchrl.errors import ConfigError


def test_scores_have_a_row_per_seed_and_a_column_per_task(make_run):
    runs = [make_run(f"{env}-{seed}", env=env, seed=seed, final=seed * 10.0 + len(env))
            for env in ("long", "at") for seed in (2, 1)]
    found = read_scores(group_runs(list(map(read_run, runs))))["ppo"]
    assert found.tasks == ("at", "long")
    assert found.seeds == ((1, 2), (1, 2))
    assert found.values.tolist() == [[12.0, 14.0], [22.0, 24.0]]


def test_runs_are_scored_at_the_same_number_of_env_steps(make_run):
    runs = [read_run(make_run("a", final=100.0, steps=100)), read_run(make_run("b", final=95.0, steps=95))]
    groups = {"a": runs[:1], "b": runs[1:]}
    assert [float(of.values[0, 0]) for of in read_scores(groups).values()] == [95.0, 95.0]
    assert [float(of.values[0, 0]) for of in read_scores(groups, at=50).values()] == [50.0, 50.0]
    assert [float(of.values[0, 0]) for of in read_scores(groups, score="area", at=50).values()] == [25.0, 25.0]


def test_runs_of_any_lengths_are_scored_where_the_shortest_ends(make_run):
    """Check the scores, and that they say where they were taken: one task has runs of 50 and 100 steps."""
    long, short = read_run(make_run("long", final=10.0)), read_run(make_run("short", steps=50, final=3.0))
    pong = [read_run(make_run(f"pong-{seed}", env="Pong", seed=seed, steps=80)) for seed in (1, 2)]
    found = read_scores({"a": [long, short, *pong]})["a"]
    assert found.values[:, 0].tolist() == [5.0, 3.0]
    assert (found.tasks, found.at, found.ends) == (("CartPole-v1", "Pong"), (50.0, 80.0), ((50.0, 100.0), (80.0, 80.0)))
    found = read_scores({"a": [long], "b": [short]}, at=20)
    assert {label: (own.values.tolist(), own.at, own.ends) for label, own in found.items()} == {
        "a": ([[2.0]], (20,), ((50.0, 100.0),)), "b": ([[1.2]], (20,), ((50.0, 100.0),))}


@pytest.mark.parametrize("score", ["last", "area"])
def test_no_run_is_scored_before_its_first_record(make_run, score):
    early, late = make_run("early"), make_run("late")
    lines = (late / "metrics.jsonl").read_text().splitlines(keepends=True)
    (late / "metrics.jsonl").write_text("".join(lines[1:]))
    groups = {"a": [read_run(early)], "b": [read_run(late)]}
    with pytest.raises(ConfigError, match="first record of a run on CartPole-v1 is at 10 env_steps, after 1"):
        read_scores(groups, score=score, at=1)
    assert read_scores(groups, at=10)["b"].values.tolist() == [[1.0]]


def test_groups_are_paired_if_their_tasks_have_the_same_distinct_seeds(make_run):
    def scores(name, seeds):
        runs = [read_run(make_run(f"{name}-{index}", seed=seed)) for index, seed in enumerate(seeds)]
        return read_scores({name: runs})[name]
    first = scores("a", (1, 2))
    assert first.is_paired_with(scores("b", (2, 1)))
    assert not first.is_paired_with(scores("c", (1, 3)))
    assert not first.is_paired_with(scores("d", (1, 2, 3)))
    assert not scores("e", (1, 1)).is_paired_with(scores("f", (1, 1)))
    assert not scores("g", (None,)).is_paired_with(scores("h", (None,)))


def test_groups_that_cannot_be_compared_are_refused(make_run):
    long, short = read_run(make_run("long")), read_run(make_run("short", steps=50))
    assert read_scores({"a": [long, short]}, at=50)["a"].values.shape == (2, 1)
    with pytest.raises(ConfigError, match="ends at 50 env_steps, before 70"):
        read_scores({"a": [long, short]}, at=70)
    other = read_run(make_run("other", env="Pong"))
    with pytest.raises(ConfigError, match="same tasks; 'a' has CartPole-v1, and 'b' has Pong"):
        read_scores({"a": [long], "b": [other]})
    read_scores({"a": [long]})
    with pytest.raises(ConfigError, match=r"different numbers of runs on its tasks \(CartPole-v1: 2, Pong: 1\)"):
        read_scores({"a": [long, short, other]})
    assert read_scores({"a": [long, other]})["a"].values.shape == (1, 2)
    with pytest.raises(ConfigError, match="score must be one of last, area; got 'best'"):
        read_scores({"a": [long]}, score="best")


def test_a_damaged_description_is_refused(make_run):
    run_dir = make_run("a")
    (run_dir / "run.json").write_text("{")
    with pytest.raises(ConfigError, match=r"run\.json' cannot be read"):
        read_run(run_dir)


@pytest.mark.parametrize(("change", "message"), [
    (lambda content: content.replace(b"100.0", b"101.0"),
     r"metrics\.jsonl' differs from its checksum in result\.json, .*; delete result\.json to use the records that it"),
    (lambda content: content[:-10], r"metrics\.jsonl' is shorter than when its run ended, so its last records are"),
    (lambda content: content + b'{"env_steps": 110.0, "return_mean": 11.0}\n', "differs from its checksum")])
def test_records_that_changed_after_the_run_ended_are_refused(make_run, change, message):
    run_dir = make_run("a")
    path, result = run_dir / "metrics.jsonl", run_dir / "result.json"
    content = path.read_bytes()
    result.write_text(json.dumps({"env_steps": 100, "records": {
        "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}}))
    assert read_curve(run_dir, "env_steps", "return_mean")[1][-1] == 10.0
    path.write_bytes(change(content))
    with pytest.raises(ConfigError, match=message):
        read_curve(run_dir, "env_steps", "return_mean")
    result.unlink()
    assert len(read_curve(run_dir, "env_steps", "return_mean")[1]) >= 10


def test_a_line_that_is_not_json_is_refused(make_run):
    path = make_run("a") / "metrics.jsonl"
    path.write_bytes(path.read_bytes().replace(b"{", b"(", 3))
    with pytest.raises(ConfigError, match=r"metrics\.jsonl:1 is not JSON"):
        read_curve(path.parent, "env_steps", "return_mean")
