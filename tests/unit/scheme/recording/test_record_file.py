"""Tests of record files: a record must match its run, its path is checked, and invalid files are rejected."""

from __future__ import annotations

import pytest
import torch

from pytorchrl import PPO, Learner, linear
from pytorchrl.envs.testing import FaultyEnv
from pytorchrl.errors import ConfigError, EnvError
from pytorchrl.files.lines import seal
from tests.unit.scheme.recording.conftest import ALL_ASYNC

HEAD = ('{"format":"pytorchrl record 1","settings":%s,"agent":{},"machine":{},"target_steps":1,'
        '"mixed_precision":{}}')


def test_a_record_with_other_settings_is_refused(runs, make_scheme):
    runs.record(updates=3, runtime="threads", **ALL_ASYNC)
    with pytest.raises(ConfigError,
                       match=r"num_col_workers was 3, now it is 2.*algo_factory: lr was 0.001, now it is 0.01"):
        make_scheme(runtime=None, replay=runs.path, algo=PPO.create_factory(num_epochs=2, num_mini_batch=2, lr=1e-2),
                    **(ALL_ASYNC | {"num_col_workers": 2}))
    with pytest.raises(ConfigError, match="seed was 1, now it is 2"):
        make_scheme(runtime=None, replay=runs.path, seed=2, **ALL_ASYNC)
    assert make_scheme(runtime=None, replay=runs.path, seed=None, **ALL_ASYNC).seed == 1
    with pytest.raises(ConfigError, match="has target_steps=1, got 500; give the same"):
        make_scheme(runtime=None, replay=runs.path, **ALL_ASYNC).start(500)


def test_a_record_from_another_machine_warns(runs, make_scheme):
    runs.record(updates=3, runtime="threads", **ALL_ASYNC)
    runs.rewrite(lambda lines: lines[0]["machine"].update(torch="1.0") is None)
    with pytest.warns(UserWarning, match="made with torch 1.0 instead of"):
        make_scheme(runtime=None, replay=runs.path, **ALL_ASYNC)


def sealed(*lines):
    """Return the contents of a record with these lines, with correct checksums."""
    content, checksum = "", ""
    for line in lines:
        text, checksum = seal(line, checksum)
        content += text
    return content


@pytest.mark.parametrize("content", [None, "", "{}", "[1]", "nonsense\n", "\0\n", HEAD % '{"seed":1}' + "\n"])
def test_files_that_are_no_records_are_refused(make_scheme, tmp_path, content):
    path = tmp_path / "file"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=r"replay .*file"):
        make_scheme(runtime=None, replay=path)


@pytest.mark.parametrize(("lines", "text"), [
    (['{"format": "pytorchrl record 2"}'], "has the format 'pytorchrl record 2'; this version reads .*record 1'"),
    (['{"format": "pytorchrl record 1"}', '{"parts": [1, 2]}'], "not a record"), ([HEAD % "[]"], "got .*"),
    ([HEAD % "{}"], "KeyError.*seed"), ([HEAD % '{"seed":"1"}'], "integer"),
    ([HEAD % '{"seed":1}', '{"parts": [["UWorker",0,[["update"]],[]]]}'], "not enough values"),
    ([HEAD % '{"seed":1}', '{"parts": [["UWorker",0,[["update","x"]],[]]]}'], "is not an event"),
    ([HEAD % '{"seed":1}', '{"parts": [["UWorker",0,[],["x"]]]}'], "integer"),
    ([HEAD % '{"seed":1}', '{"parts": [["UWorker",[],[],[]]]}'], "unhashable"),
    ([HEAD % '{"seed":1}', "{}"], "KeyError.*parts"),
    ([HEAD.replace('"agent":{}', '"agent":{"algo_factory":[]}') % '{"seed":1}'], "expected a JSON object"),
    ([HEAD.replace('"machine":{}', '"machine":null') % '{"seed":1}'], "expected a JSON object")])
def test_invalid_records_with_correct_checksums_are_refused(make_scheme, tmp_path, lines, text):
    path = tmp_path / "file"
    path.write_text(sealed(*lines))
    with pytest.raises(ConfigError, match=rf"replay .*file.*{text}"):
        make_scheme(runtime=None, replay=path)


def test_a_damaged_record_is_refused(runs, make_scheme):
    runs.record(updates=3, runtime="threads", **ALL_ASYNC)
    with open(runs.path, "r+b") as file:
        content = file.read()
        file.seek(content.index(b"UWorker"))
        file.write(b"V")
    with pytest.raises(ConfigError, match=r"run\.jsonl' cannot be read: line \d differs from its checksum"):
        make_scheme(runtime=None, replay=runs.path, **ALL_ASYNC)


def test_a_record_is_never_overwritten_and_its_path_is_checked(make_scheme, tmp_path):
    (tmp_path / "there").write_text("precious")
    with pytest.raises(ConfigError, match="already exists"):
        make_scheme(record=tmp_path / "there").start()
    assert (tmp_path / "there").read_text() == "precious"
    with pytest.raises(ConfigError, match="cannot be written"):
        make_scheme(record=tmp_path / "there" / "file").start()
    make_scheme(record=tmp_path / "new folder" / "file").start()
    assert (tmp_path / "new folder" / "file").exists()
    for wrong in (3, "", True):
        with pytest.raises(ConfigError, match=r"record must be (a string, a path or None|the path of a file)"):
            make_scheme(record=wrong)


def test_a_start_that_fails_leaves_no_record(make_scheme, tmp_path):
    class WorksOnce:
        made = 0

        def __call__(self):
            WorksOnce.made += 1
            return FaultyEnv("constructor" if WorksOnce.made > 1 else "step", at=10**6)
    scheme = make_scheme(WorksOnce(), record=tmp_path / "run", **ALL_ASYNC)
    with pytest.raises(EnvError):
        scheme.step()
    assert not (tmp_path / "run").exists()


def test_a_full_disk_ends_the_record_but_not_the_run(make_scheme, caplog, tmp_path):
    scheme = make_scheme(record=tmp_path / "run")
    scheme.start()
    scheme._worker._record._file.close()
    scheme._worker._record._file = open("/dev/full", "w", buffering=1)  # noqa: SIM115 - closed by the record
    scheme.step()
    scheme.stop()
    assert "cannot be written" in caplog.text


def test_contradictions_are_refused(make_scheme, runs):
    runs.record(updates=2)
    for settings, text in (
            ({"runtime": "threads"}, "leave out runtime='threads'"),
            ({"runtime": None, "record": "x"}, "leave one out"),
            ({"runtime": None, "schedule_seed": 3}, "schedule_seed would be ignored"),
            ({"runtime": None, "costs": {"step": 1.0}}, "costs would be ignored")):
        with pytest.raises(ConfigError, match=text):
            make_scheme(replay=runs.path, **settings)


def test_a_record_is_small(runs):
    """Check that a record takes less than 100 bytes per event, regardless of the size of rollouts and gradients."""
    runs.record(updates=40, runtime="threads", hidden=(256, 256), **ALL_ASYNC)
    events = sum(len(part[2]) for part in runs.lines())
    with open(runs.path, encoding="utf-8") as file:
        size = len(file.read()) - len(file.name)
    assert events > 100
    assert size / events < 100


def test_a_learner_replays_to_the_end_of_the_record(make_scheme, tmp_path):
    """Check that a `Learner` replays a run to the end of its record, with a learning rate that follows a schedule."""
    algo = PPO.create_factory(num_epochs=2, num_mini_batch=2, lr=linear(1e-2, 0.0))
    results = []
    for settings in ({"record": tmp_path / "run.jsonl", "runtime": "threads"},
                     {"replay": tmp_path / "run.jsonl", "runtime": None}):
        scheme = make_scheme(algo=algo, **ALL_ASYNC, **settings)
        with Learner(scheme, 600, progress=False) as learner:
            learner.train()
            results.append((learner.updates, scheme.acting_state()["all"]))
    assert results[0][0] == results[1][0] > 10
    assert torch.equal(results[0][1], results[1][1])
