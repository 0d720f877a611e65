"""Make updates of runs again, and find the first difference of two runs."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

import pytorchrl
from pytorchrl import PPO
from pytorchrl.cli import main
from pytorchrl.errors import CheckpointError, ConfigError, NonFiniteUpdateError
from pytorchrl.learner import checkpoints
from pytorchrl.training.training import Training, learner_of
from pytorchrl.play.replay import first_difference, replay_batch, replay_update

ENV = "CartPole-v1"
SMALL = {"target_steps": 600, "num_envs": 2, "progress": False, "compile": False, "hidden_sizes": (8,)}
ON_POLICY = {"num_steps": 32, "num_epochs": 2, "num_mini_batch": 2}
KEPT = {"checkpoint_every": 150, "keep_checkpoints": 9}


class NotFiniteBatches(PPO):
    """PPO whose batches contain NaN from update 10 on."""

    def batches(self, storage):
        for batch in super().batches(storage):
            advantage = batch.advantage * 0 / (0 if self.version >= 9 else 1)
            yield dataclasses.replace(batch, advantage=advantage)


class NotFiniteOnce(PPO):
    """PPO that divides zero by zero if its generator draws the same number as at first in update 10."""

    first = None

    def compute_gradients(self, batch):
        if self.version == 9:
            drawn = float(torch.rand((), generator=self.generator))
            type(self).first = type(self).first or drawn
            zero = batch.advantage * 0
            batch = dataclasses.replace(batch, advantage=zero / (zero + (drawn != self.first)))
        return super().compute_gradients(batch)


class Flipped(PPO):
    """PPO whose gradient of one update, by default 17, has one wrong bit."""

    wrong = 17

    def compute_gradients(self, batch):
        gradients, info = super().compute_gradients(batch)
        if self.version == self.wrong - 1:
            gradients[0].view(torch.int32)[5] ^= 1 << 20
        return gradients, info


class FlippedLate(Flipped):
    """The same after thousands of updates."""

    wrong = 7214


class NotFinite(PPO):
    """PPO that divides zero by zero from update 10 on."""

    def compute_gradients(self, batch):
        if self.version >= 9:
            zero = batch.advantage * 0
            batch = dataclasses.replace(batch, advantage=zero / zero)
        return super().compute_gradients(batch)


def train(algorithm, directory, **options):
    """Train a small run with checkpoints; return its directory."""
    pytorchrl.train(algorithm, ENV, log_dir=directory, **{"seed": 1, **SMALL, **options})
    return directory


def saved(directory):
    """Return the parameters in each checkpoint of a run, by the number of updates."""
    found = [checkpoints.read(path)["scheme"]["state"] for path in checkpoints.paths(directory / "checkpoints")]
    return {state["version"]: state["algorithm"]["gradient"]["acting"] for state in found}


def flat(parameters):
    return torch.cat([value.reshape(-1) for value in parameters.values()])


def is_at(acting, update):
    """Return whether an update ends with the parameters in an acting state."""
    groups = {name: [value for key, value in update.after.items() if key.startswith(f"{name}.")] for name in acting}
    vectors = {name: torch.cat([value.reshape(-1) for value in values]) for name, values in groups.items() if values}
    vectors = vectors or {name: flat(update.after) for name in acting}
    return bool(vectors) and all(torch.equal(vector, acting[name]) for name, vector in vectors.items())


def forget(directory):
    """Remove all checkpoints but the newest; return the number of updates before it."""
    for path in checkpoints.paths(directory / "checkpoints")[1:]:
        path.unlink()
    version, = saved(directory)
    return version


RESUMED = {
    "on policy": ("ppo", ON_POLICY), "replay buffer": ("dqn", {"start_steps": 100}),
    "asynchronous": ("ppo", {**ON_POLICY, "num_col_workers": 2, "col_communication": "async", "runtime": "simulated"}),
}


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_is_repeated_with_its_checkpoints_and_targets(tmp_path, name):
    algorithm, options = RESUMED[name]
    options = {**KEPT, **options, "lr": pytorchrl.linear(1e-3, 1e-4)}
    for target_steps in (200, 400, 600):
        directory = train(algorithm, tmp_path / "run", **options, target_steps=target_steps, resume=True)
    kept = saved(directory)
    version = forget(directory)
    for number in {min(kept), version}:
        found = replay_update(directory, number)
        assert (found.number, is_at(kept[number], found)) == (number, True)
    whole = train(algorithm, tmp_path / "whole", **options)
    difference = first_difference(directory, whole)
    assert difference.unrepeated == []
    assert difference.update < version
    assert difference.tensor


@pytest.mark.parametrize("name", ["on policy", "asynchronous"])
def test_a_run_that_was_interrupted_between_checkpoints_is_repeated(tmp_path, name):
    def stopping(learner, after):
        while learner.updates < after:
            learner.step()
            if learner.updates == after - 2:
                learner.save_checkpoint()
        learner.save_checkpoint()
        learner.stop()
        return learner.updates

    directory = tmp_path / "run"
    trained = {"seed": 1, **SMALL, **RESUMED[name][1], **KEPT, "log_dir": directory}
    ends = []
    for after in (6, 22, 30):
        learner, _ = learner_of(Training("ppo", ENV, {**trained, "resume": True}))
        ends.append(stopping(learner, after))
    kept = saved(directory)
    assert set(ends) <= kept.keys()
    assert len(set(ends)) == 3
    assert is_at(kept[forget(directory)], replay_update(directory, max(kept)))


RUNS = {
    "on policy": ("ppo", {**ON_POLICY, **KEPT}),
    "replay buffer": ("dqn", {"start_steps": 100, **KEPT}),
    "two groups": ("sac", {"start_steps": 100, **KEPT}),
    "parallel gradients": ("ppo", {**ON_POLICY, **KEPT, "num_grad_workers": 2, "runtime": "threads"}),
    "parallel collection": ("ppo", {**ON_POLICY, **KEPT, "num_col_workers": 2, "runtime": "threads"}),
    "asynchronous": ("appo", {"num_steps": 32, **KEPT, "num_col_workers": 2, "col_communication": "asynchronous",
                              "runtime": "simulated"}),
}


@pytest.mark.parametrize("name", RUNS)
def test_an_update_is_made_again_bit_for_bit(tmp_path, name):
    algorithm, options = RUNS[name]
    run = train(algorithm, tmp_path / "run", **options)
    found = saved(run)
    assert len(found) >= 3
    first, second = sorted(found)[:2]
    update = replay_update(run, second)
    assert (update.number, update.is_finite) == (second, True)
    assert is_at(found[second], update)
    assert not torch.equal(flat(update.after), flat(update.before))
    # before the first checkpoint, the run is made again from its start
    update = replay_update(run, first)
    assert is_at(found[first], update)
    assert update.gradients[0].batch.num_samples > 0


def test_checkpoints_that_were_removed_are_made_again(tmp_path):
    whole = train("ppo", tmp_path / "whole", **ON_POLICY, **KEPT)
    found = saved(whole)
    newest = max(found)
    for path in checkpoints.paths(whole / "checkpoints")[1:]:
        path.unlink()
    update = replay_update(whole, newest)
    assert torch.equal(flat(update.after), found[newest]["all"])


def test_a_recorded_run_is_made_again(tmp_path):
    run = train("appo", tmp_path / "run", num_steps=32, num_col_workers=2, col_communication="asynchronous",
                runtime="threads", record=tmp_path / "record.jsonl")
    last = pytorchrl.load(run).acting_state["all"]
    number = json.loads((run / "result.json").read_text())["updates"]
    assert torch.equal(flat(replay_update(run, number).after), last)
    (tmp_path / "record.jsonl").rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="which is missing; put the file back"):
        replay_update(run, 1)
    (tmp_path / "elsewhere").rename(tmp_path / "record.jsonl")
    assert replay_update(run, 1).number == 1


def test_runs_that_cannot_be_repeated_are_refused(tmp_path):
    options = {"num_steps": 32, "num_col_workers": 2, "col_communication": "asynchronous"}
    run = train("appo", tmp_path / "run", **options, runtime="threads")
    with pytest.raises(ConfigError, match=r"was asynchronous, .* train with record="):
        replay_update(run, 3)
    for name, more in (("record", {"runtime": "threads", "record": tmp_path / "record.jsonl"}),
                       ("simulated", {"runtime": "simulated"})):
        assert replay_update(train("appo", tmp_path / name, **options, **more), 3).number == 3
    with pytest.raises(CheckpointError):
        replay_update(tmp_path / "nothing", 3)


def test_an_update_after_the_end_is_refused(tmp_path):
    run = train("ppo", tmp_path / "run", **ON_POLICY)
    with pytest.raises(ConfigError, match="so it has no update 41; choose an update from 1 to 40"):
        replay_update(run, 41)
    assert replay_update(run, 40).number == 40


def test_files_of_the_run_are_not_changed(tmp_path):
    run = train("ppo", tmp_path / "run", **ON_POLICY, **KEPT)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    replay_update(run, 20)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_the_debugger_stops_at_the_update_only(tmp_path):
    run = train("ppo", tmp_path / "run", **ON_POLICY)
    stops = []
    replay_update(run, 7, stop=lambda algo, batch: stops.append((algo.version, batch.num_samples)))
    assert stops == [(6, 32)]


@pytest.mark.parametrize("number", [9, 10])
def test_the_first_operation_with_nan_is_named(tmp_path, number):
    with pytest.raises(NonFiniteUpdateError):
        train(NotFinite, tmp_path / "run", **ON_POLICY, keep_bad_batches=tmp_path / "bad")
    update = replay_update(tmp_path / "run", number)
    if number == 9:
        assert update.is_finite
        return
    assert not update.is_finite
    assert update.after == {}
    assert isinstance(update.error, NonFiniteUpdateError)
    assert "the first NaN is the result of div in " in update.gradients[0].origin
    assert "test_replay.py" in update.gradients[0].origin
    assert update.gradients[0].origin.endswith("batch = dataclasses.replace(batch, advantage=zero / zero)")
    kept = replay_batch(tmp_path / "run", tmp_path / "bad" / "gworker0_version9.pt")
    assert (kept.number, kept.is_finite) == (10, False)
    assert kept.gradients[0].origin == update.gradients[0].origin


def test_nan_in_a_batch_is_named(tmp_path):
    with pytest.raises(NonFiniteUpdateError):
        train(NotFiniteBatches, tmp_path / "run", **ON_POLICY)
    assert replay_update(tmp_path / "run", 10).gradients[0].origin == "the batch contains NaN in 'advantage'"


def test_the_search_for_nan_draws_the_same_numbers(tmp_path):
    train(NotFiniteOnce, tmp_path / "run", **ON_POLICY)
    assert "result of div in " in replay_update(tmp_path / "run", 10).gradients[0].origin


def test_other_files_are_no_bad_batches(tmp_path):
    run = train("ppo", tmp_path / "run", **ON_POLICY)
    with pytest.raises(CheckpointError, match="is not a batch that keep_bad_batches has saved"):
        replay_batch(run, run / "model.pt")


def test_equal_runs_have_no_difference(tmp_path):
    runs = [train("ppo", tmp_path / name, **ON_POLICY, **KEPT) for name in ("one", "two")]
    found = first_difference(*runs)
    assert (found.update, found.until, found.remade, found.options) == (None, None, 0, [])
    assert found.equal == sorted(saved(runs[0]))


def test_a_wrong_bit_is_found(tmp_path):
    good = train(PPO, tmp_path / "good", **ON_POLICY, **KEPT)
    wrong = train(Flipped, tmp_path / "wrong", **ON_POLICY, **KEPT)
    found = first_difference(good, wrong)
    assert found.update == 17
    assert found.tensor == "gradient: policy.extractor.layers.0.weight"
    assert found.count == (1, 32)
    assert found.values[0] != found.values[1]
    assert found.remade == 17 - max(found.equal)  # nothing but the stretch from the last equal checkpoint
    assert found.until == min(version for version in saved(good) if version >= 17)


@pytest.mark.thorough
@pytest.mark.timeout(1200)
def test_a_wrong_bit_in_one_of_ten_thousand_updates_is_found(tmp_path):
    # A rollout has 16 steps and makes 4 updates, so there is a checkpoint every 500 updates.
    settings = {"num_steps": 8, "num_epochs": 2, "num_mini_batch": 2, "target_steps": 40_000,
                "checkpoint_every": 2000, "keep_checkpoints": 20}
    good, wrong = train(PPO, tmp_path / "good", **settings), train(FlippedLate, tmp_path / "wrong", **settings)
    assert sorted(saved(good)) == list(range(500, 10_001, 500))
    found = first_difference(good, wrong)
    assert (found.update, found.tensor) == (7214, "gradient: policy.extractor.layers.0.weight")
    assert max(found.equal) == 7000
    assert found.remade == 214


def test_a_fault_of_the_machine_is_told_from_one_that_recurs(tmp_path, monkeypatch, caplog):
    good = train(PPO, tmp_path / "good", **ON_POLICY, **KEPT)
    with monkeypatch.context() as patch:
        patch.setattr(PPO, "compute_gradients", _flipping(PPO.compute_gradients))
        wrong = train(PPO, tmp_path / "wrong", **ON_POLICY, **KEPT)
    found = first_difference(good, wrong)
    assert found.update is None
    assert found.unrepeated == [str(wrong)]
    assert found.until == min(version for version in saved(good) if version >= 17)
    replay_update(good, found.until)
    assert "is not repeated exactly" not in caplog.text
    replay_update(wrong, found.until)
    assert f"parameters after {found.until} updates differ from those in step-" in caplog.text


def _flipping(compute):
    def flipped(self, batch):
        gradients, info = compute(self, batch)
        if self.version == 16:
            gradients[0].view(torch.int32)[5] ^= 1 << 20
        return gradients, info
    return flipped


def test_options_that_differ_are_named(tmp_path):
    one = train("ppo", tmp_path / "one", **ON_POLICY)
    two = train("ppo", tmp_path / "two", **ON_POLICY, entropy_coef=0.02, keep_bad_batches=tmp_path / "bad")
    found = first_difference(one, two)
    assert found.options == ["entropy_coef: 0.0 and 0.02"]
    assert (found.update, found.tensor.partition(":")[0]) == (1, "gradient")


def test_the_command_shows_an_update_and_a_difference(tmp_path, capsys):
    one = train("ppo", tmp_path / "one", **ON_POLICY, **KEPT)
    two = train("ppo", tmp_path / "two", **ON_POLICY, **KEPT, seed=2)
    assert main(["replay", str(one), "--update", "7", "--out", str(tmp_path / "out.pt")]) == 0
    text = capsys.readouterr().out
    assert "update 7" in text
    assert "policy_head.weight" in text
    tensors = torch.load(tmp_path / "out.pt", weights_only=True)
    assert torch.equal(tensors["parameter: policy_head.weight"], replay_update(one, 7).after["policy_head.weight"])
    assert main(["replay", str(one), "--update", "7", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["gradients"][0]["samples"] == 32
    assert main(["replay", str(one), "--against", str(two)]) == 1
    assert "seed: 1 and 2" in capsys.readouterr().out
    assert main(["replay", str(one), "--against", str(two), "--pdb"]) == 2
    assert main(["replay", str(one), "--update", "0"]) == 2
