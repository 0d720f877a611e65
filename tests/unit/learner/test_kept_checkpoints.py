"""Tests of the checkpoints that a run keeps, and of the loss that a damaged checkpoint causes."""

from __future__ import annotations

import json
import logging

import pytest

from pytorchrl.learner import checkpoints
from pytorchrl.learner.checkpoints import CheckpointFiles, Written
from pytorchrl.errors import CheckpointError, ConfigError
from pytorchrl.files.tensors import save
from pytorchrl.learner.options import LearnerOptions
from pytorchrl.agent.data import Evaluation
from tests.unit.learner.test_checkpoints import files, interrupt_after, make


@pytest.fixture
def open_files(tmp_path):
    """Return a function that makes the `CheckpointFiles` of a run, as another process would."""
    return lambda **options: CheckpointFiles(tmp_path / "checkpoints", LearnerOptions(
        target_steps=1000, log_dir=tmp_path, eval_every=1, **options))


def write(run, env_steps):
    run.write(Written(env_steps, env_steps), {"scheme": {}, "learner": {}})


def kept(path):
    return [checkpoints.env_steps_of(path) for path in checkpoints.paths(path / "checkpoints")]


@pytest.mark.parametrize(("options", "expected"), [
    ({}, [1000, 900]), ({"keep_checkpoints": 1}, [1000]), ({"keep_checkpoints": 4}, [1000, 900, 800, 700]),
    ({"keep_checkpoint_every": 250}, [1000, 900, 800, 500, 300]),  # 300 and 800 follow 250 and 750
    ({"keep_checkpoints": 1, "keep_checkpoint_every": 1}, list(range(1000, 0, -100))),
    ({"keep_checkpoints": 1, "keep_best_checkpoint": True}, [1000, 600]),
    ({"keep_checkpoints": 1, "keep_best_checkpoint": True, "keep_checkpoint_every": 500}, [1000, 600, 500]),
], ids=str)
@pytest.mark.parametrize("is_reopened", [False, True])
def test_options_decide_which_checkpoints_are_kept(open_files, tmp_path, options, expected, is_reopened):
    returns = {200: 1.0, 500: float("nan"), 600: 5.0, 800: 4.0, 900: 5.0}
    run = open_files(**options)
    for env_steps in range(100, 1001, 100):
        if is_reopened:
            run = open_files(**options)
        if env_steps in returns:
            run.rate(env_steps - 5, returns[env_steps])
        assert run._newest is None or all(version > run._newest.version for version, _ in run._evaluated)
        write(run, env_steps)
        assert all(version > run._newest.version for version, _ in run._evaluated)
    assert kept(tmp_path) == expected


def test_an_evaluation_belongs_to_the_first_checkpoint_with_its_weights(open_files, tmp_path):
    run = open_files(keep_best_checkpoint=True)
    best = tmp_path / "checkpoints" / "best.json"
    run.rate(0, 2.0)
    assert not best.exists()
    found = []
    for env_steps, *evaluations in ((100, (100, 3.0)), (200, (201, 4.0)), (300, (250, 5.0), (300, 3.5)), (400,)):
        write(run, env_steps)
        for evaluation in evaluations:
            run.rate(*evaluation)
        value = json.loads(best.read_text())
        found.append((value["env_steps"], value["return_mean"]))
    assert found == [(100, 3.0), (100, 3.0), (300, 5.0), (300, 5.0)]


def test_a_resumed_run_knows_the_version_of_its_newest_checkpoint(open_files, tmp_path):
    write(open_files(keep_best_checkpoint=True), 200)
    run = CheckpointFiles(tmp_path / "checkpoints", LearnerOptions(
        target_steps=1000, log_dir=tmp_path, eval_every=1, keep_best_checkpoint=True), Written(200, 200))
    run.rate(200, 1.0)
    assert json.loads((tmp_path / "checkpoints" / "best.json").read_text())["env_steps"] == 200


@pytest.mark.parametrize("text", ["", "{", "[]", '{"env_steps": "x", "return_mean": 1}', '{"env_steps": 300}',
                                  '{"env_steps": 500, "return_mean": 9.0}', '{"sha256": "0", "env_steps": 200}'])
def test_an_unknown_best_checkpoint_is_replaced_by_the_next_one(open_files, tmp_path, text):
    first = open_files(keep_best_checkpoint=True)
    first.rate(200, 9.0)
    write(first, 200)
    (tmp_path / "checkpoints" / "best.json").write_text(text)
    run = open_files(keep_best_checkpoint=True, keep_checkpoints=1)
    for env_steps, value in ((600, 1.0), (700, 0.0), (800, 0.0)):
        run.rate(env_steps, value)
        write(run, env_steps)
    assert kept(tmp_path) == [800, 600]


def test_a_run_keeps_the_checkpoint_of_its_best_evaluation(tmp_path):
    """Check that a result that arrives after a checkpoint of the same weights still belongs to this checkpoint."""
    def train(at_end, resume=False):
        with make(tmp_path, resume=resume, eval_every=300, eval_episodes=1, keep_best_checkpoint=True,
                  keep_checkpoints=1, log_every=1000) as learner:
            running = []

            def start(num_episodes, timeout_s):
                running.append(Evaluation(learner.updates, ({1: 5.0, 2: 9.0, 3: 7.0}[learner.env_steps // 300],), (1,)))
            learner.scheme.start_evaluation = start
            learner.scheme.poll_evaluation = lambda: running[-1]
            learner.scheme.wait_evaluation = lambda timeout_s: Evaluation(learner.updates, (at_end,), (1,))
            learner.start()
            while not learner.done():
                learner.step()
                learner._look(0.0)
            learner.scheme.start_evaluation = lambda num_episodes, timeout_s: None
            learner.train()
            return learner.env_steps
    last = train(8.0)
    assert last >= 1000
    assert [steps // 300 for steps in kept(tmp_path)] == [3, 2]
    assert kept(tmp_path)[0] == last
    assert train(10.0, resume=True) == last  # the last evaluation, which follows training, is the best one
    assert json.loads((tmp_path / "checkpoints" / "best.json").read_text())["env_steps"] == last


def test_a_damaged_checkpoint_is_reported_with_its_member_and_what_is_lost(tmp_path, caplog):
    interrupt_after(tmp_path, 950, keep_checkpoints=3)
    newest, second, oldest = checkpoints.paths(tmp_path / "checkpoints")
    raw = bytearray(newest.read_bytes())
    raw[len(raw) // 2] ^= 1
    newest.write_bytes(raw)
    second.write_bytes(second.read_bytes()[:-50])
    with caplog.at_level(logging.WARNING), make(tmp_path, resume=True, keep_checkpoints=3) as learner:
        learner.start()
        assert files(tmp_path) == [oldest.name]
    lost = checkpoints.env_steps_of(newest) - checkpoints.env_steps_of(oldest)
    (text,) = [record.getMessage() for record in caplog.records]
    assert newest.name in text
    assert "is damaged: the checksum of step-" in text or "is damaged: the checksum of archive" in text
    assert f"continues from {oldest.name} instead, so the {lost} env steps in between are lost" in text


@pytest.mark.parametrize("env_steps", [200, 400])
def test_a_renamed_checkpoint_is_refused(tmp_path, env_steps):
    """Check files that were renamed to fewer and to more env steps than they contain."""
    save(tmp_path / "step-000000000300.pt", {"scheme": {}, "learner": {"env_steps": 300}})
    assert checkpoints.read(tmp_path / "step-000000000300.pt")["learner"] == {"env_steps": 300}
    other = tmp_path / f"step-{env_steps:012d}.pt"
    (tmp_path / "step-000000000300.pt").rename(other)
    with pytest.raises(CheckpointError, match=f"{other.name}' was renamed: it contains 300 env steps"):
        checkpoints.read(other)
    other.rename(tmp_path / "mine.pt")  # a name without a number cannot be wrong
    assert checkpoints.read(tmp_path / "mine.pt")["learner"] == {"env_steps": 300}


@pytest.mark.parametrize(("options", "message"), [
    ({"log_dir": None, "keep_checkpoints": 3}, "keep_checkpoints needs a log_dir"),
    ({"log_dir": None, "keep_checkpoint_every": 3}, "keep_checkpoint_every needs a log_dir"),
    ({"keep_checkpoints": 0}, "keep_checkpoints must be a whole number >= 1"),
    ({"keep_checkpoint_every": 0}, "keep_checkpoint_every must be a whole number >= 1"),
    ({"keep_best_checkpoint": True}, "keep_best_checkpoint needs eval_every"),
])
def test_options_without_effect_are_refused(tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        LearnerOptions(**{"target_steps": 100, "log_dir": tmp_path, **options})
