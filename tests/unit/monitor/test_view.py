"""Tests of the view of a run, against hand-made directories."""

from __future__ import annotations

import hashlib
import json

import pytest

from pytorchrl.monitor.view import Lag, Reader, Wait, read_run
from tests.unit.monitor.runs import description, make_run, record, row, two_workers, usual_records


def age(run_dir, seconds):
    return Reader(run_dir).read((run_dir / "metrics.jsonl").stat().st_mtime + seconds)


def test_rates_cover_the_last_ten_seconds(tmp_path):
    view = read_run(make_run(tmp_path / "a", usual_records()))
    assert view.rates["collected_steps"] == (4000 - 2000) / 10
    assert view.rates["consumed_steps"] == 4 * (4000 - 2000) / 10
    assert view.rates["gradients"] == view.rates["updates"] == 10.0
    assert view.rates["bytes_in"] == 1000.0
    assert [worker.rate for worker in view.workers] == [10.0, 100.0, 100.0]


def test_several_records_within_the_window_do_not_shorten_it(tmp_path):
    records = [record(seconds, steps) for seconds, steps in ((5, 0), (20, 1000), (24, 5000), (29, 6000), (31, 7600))]
    assert read_run(make_run(tmp_path / "a", records)).rates["collected_steps"] == 600.0


def test_the_first_record_is_compared_with_the_start(tmp_path):
    view = read_run(make_run(tmp_path / "a", usual_records()[:1]))
    assert view.rates["collected_steps"] == 510 / 5
    assert [worker.rate for worker in view.workers] == [10.0, 60.0, 40.0]


def test_counts_that_restart_with_a_resumed_run_give_no_negative_rate(tmp_path):
    records = [*usual_records(), record(31, 4100, grads=10, workers=two_workers(60, 40))]
    view = read_run(make_run(tmp_path / "a", records))
    assert view.rates["gradients"] == 10 / 31
    assert all(worker.rate >= 0 for worker in view.workers)


def test_workers_have_their_totals_restarts_and_lags(tmp_path):
    _, first, second = read_run(make_run(tmp_path / "a", usual_records())).workers
    assert (first.name, first.total, first.restarts, first.lag) == ("GWorker 0/CWorker 1", 2500, 0, Lag(1.0, 2.0, 4.0))
    assert (second.total, second.restarts, second.lag) == (1500, 1, Lag(2.0, 4.0, 8.0))


def test_time_shares_waits_and_the_bottleneck(tmp_path):
    view = read_run(make_run(tmp_path / "a", usual_records()))
    assert view.shares["gradients"] == pytest.approx({"wait": 0.6, "grad": 0.4, "idle": 0.0})
    assert view.waits[0].who == "the update worker"
    assert Wait("gradient workers", "rollouts", pytest.approx(0.6)) in view.waits
    assert Wait("collection workers", "requests from their gradient worker", pytest.approx(0.1)) in view.waits
    assert view.bottleneck == ("75% of the time of collection workers, for which learning waits, is stepping "
                               "environments (collection/environment)")


def test_collection_waits_for_room_in_a_full_queue(tmp_path):
    records = [record(10, 100, queue={"mean": 7.5, "count": 3})]
    waits = read_run(make_run(tmp_path / "a", records)).waits
    assert [wait.whom for wait in waits if wait.who == "collection workers"] == ["room in the queue"]


def test_losses_and_replacements_are_events(tmp_path):
    view = read_run(make_run(tmp_path / "a", usual_records()))
    assert [(event.env_steps, event.text) for event in view.events] == [
        (1500, "1 of 2 workers missing"), (2000, "lost workers restarted: 1 (GWorker 0/CWorker 2)")]


@pytest.mark.parametrize(("records", "result", "seconds", "state"), [
    ((), None, 0, "starting"), (usual_records(), None, 3, "running"), (usual_records(), None, 49, "running"),
    (usual_records(), None, 51, "silent"), (usual_records(), {"env_steps": 4100}, 999, "ended")])
def test_the_state_of_a_run(tmp_path, records, result, seconds, state):
    view = age(make_run(tmp_path / "a", records, result=result), seconds)
    assert view.state == state
    assert view.age_s == (None if not records else pytest.approx(seconds, abs=1e-3))
    assert view.env_steps == (4100 if result else 4000 if records else 0)


def test_a_reader_adds_new_records(tmp_path):
    records = usual_records()
    run_dir = make_run(tmp_path / "a", records[:2])
    reader = Reader(run_dir, only_latest=True)
    assert reader.read().env_steps == 1500
    make_run(tmp_path / "b", records[2:])
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.write((tmp_path / "b" / "metrics.jsonl").read_text())
    view = reader.read()
    assert (view.env_steps, len(view.records)) == (4000, 4)
    assert view.curve("return_mean") == [(500, 15.0), (1500, 25.0), (2000, 30.0), (4000, 40.0)]


def finish(run_dir, env_steps=4000):
    """Write the result of a run, with the size and the checksum of its records."""
    content = (run_dir / "metrics.jsonl").read_bytes()
    records = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (run_dir / "result.json").write_text(json.dumps({"env_steps": env_steps, "records": records}))


@pytest.mark.parametrize(("change", "problem"), [
    (lambda content: content, None), (lambda content: content + b'{"env_steps": 50', None),
    (lambda content: content.replace(b"40.0", b"41.0"), "differs from its checksum in result.json"),
    (lambda content: content + b'{"env_steps": 5000}\n', "differs from its checksum in result.json"),
    (lambda content: content[:-1], "is shorter than when its run ended, so its last records are missing"),
    (lambda content: content.replace(b"{", b"", 1), "is damaged: lines that are no records were left out: 1")])
@pytest.mark.parametrize("parts", [1, 2])
def test_records_that_changed_after_the_run_ended_are_a_problem(tmp_path, change, problem, parts):
    run_dir = make_run(tmp_path / "a", usual_records())
    finish(run_dir)
    path, reader = run_dir / "metrics.jsonl", Reader(run_dir)
    content = change(path.read_bytes())
    path.write_bytes(content[:len(content) // parts])
    reader.read()
    with open(path, "ab") as file:
        file.write(content[len(content) // parts:])
    found = reader.read().problems
    assert [text.removeprefix(f"'{path}' ").partition(",")[0] for text in found] == (
        [] if problem is None else [problem.partition(",")[0]])


def test_records_whose_start_was_skipped_are_no_problem(tmp_path):
    run_dir = make_run(tmp_path / "a", [{"env_steps": steps, "text": "x" * 1000} for steps in range(2000)])
    finish(run_dir)
    reader = Reader(run_dir, only_latest=True)
    assert len(reader.read().records) == 500
    assert reader.read().problems == ()


@pytest.mark.parametrize("broken", [
    {}, {"scheme": 3}, {"scheme": {"by_worker": [3, {"worker": []}], "time_s": {"update": {"wait": "x"}}}},
    {"policy_lag": [], "seconds": "x", "ledger": {"dropped": 3}, "scheme": {"policy_lag_histogram": [[1], ["a", 2]]}}])
def test_a_record_of_another_form_is_no_error(tmp_path, broken):
    view = read_run(make_run(tmp_path / "a", [broken, broken], run={"scheme": [], "recipe": "x"}))
    assert view.env_steps == 0
    assert view.bottleneck == ""
    assert view.lag_histogram == ()


def test_names_come_from_the_description(tmp_path):
    view = read_run(make_run(tmp_path / "a", [record(1, 10, workers=[row("GWorker 0/CWorker 0", 10)])], description()))
    assert (view.name, view.algorithm, view.env, view.target_steps) == ("a", "ppo", "CartPole-v1", 10_000)
    assert view.queue == (2, 8, 1.0, 5)
    assert view.lag_histogram == ((0, 5), (1, 3), (2, 2))
    assert view.workers[1].lag is None
