"""Check batches whose gradient is not finite: the message, and the file that the worker writes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from pytorchrl.agent.data import Batch
from pytorchrl.agent.multi.data import MultiBatch
from pytorchrl.errors import CheckpointError
from pytorchrl.scheme.supervision.bad_batches import BadBatches, read_bad_batch

GOOD, BAD = torch.tensor([3.0, 4.0]), torch.tensor([3.0, float("nan")])


def norms_of(gradients):
    return [float(gradient.norm()) for gradient in gradients if gradient is not None]


ALGORITHM = SimpleNamespace(gradient_state=lambda: {"acting": {"all": torch.arange(3.0)}}, norms_of=norms_of)


def make_batch():
    rewards = torch.arange(100.0)
    return Batch(obs={"obs": rewards[:4]}, done=None, rhs={}, mask=None, action=rewards[:4], valid=None,
                 logp=rewards[:4], value=rewards[:4], ret=rewards[4:8], advantage=rewards[:4])


@pytest.mark.parametrize("gradients", [[GOOD], [GOOD, None], [None], []])
def test_finite_gradients_are_not_reported(tmp_path, gradients):
    assert BadBatches(str(tmp_path / "bad"), 1, ALGORITHM).find_fault(make_batch(), gradients, {}, 0) == ""
    assert not list(tmp_path.iterdir())


def test_the_message_names_worker_version_losses_and_norm():
    info = {"loss": 0.5, "loss/hunter": float("inf"), "entropy": 2.0}
    fault = BadBatches(None, 3, ALGORITHM).find_fault(make_batch(), [GOOD, BAD], info, 7)
    assert fault == ("GWorker 3 at version 7: loss 0.5, loss/hunter inf, norm of its gradient nan, batch not saved "
                     "(keep_bad_batches is None)")


def test_five_batches_are_saved_under_different_names(tmp_path):
    batches = BadBatches(str(tmp_path), 2, ALGORITHM)
    faults = [batches.find_fault(make_batch(), [BAD], {"loss": 1.0}, version) for version in (4, 4, 4, 5, 6, 7, 8)]
    names = {"gworker2_version4.pt", "gworker2_version4_2.pt", "gworker2_version4_3.pt", "gworker2_version5.pt",
             "gworker2_version6.pt"}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert [f"saved to {tmp_path}" in fault for fault in faults] == [True] * 5 + [False] * 2
    assert f"not saved: {tmp_path} has 5 " in faults[-1]


def test_a_file_contains_only_the_batch(tmp_path):
    BadBatches(str(tmp_path), 0, ALGORITHM).find_fault(make_batch(), [BAD], {"loss": 1.0}, 3)
    batch, file = read_bad_batch(tmp_path / "gworker0_version3.pt")
    assert (file["worker"], file["version"], file["info"]) == (0, 3, {"loss": 1.0})
    assert file["gradient_state"]["acting"]["all"].tolist() == [0.0, 1.0, 2.0]
    assert isinstance(batch, Batch)
    assert batch.ret.tolist() == [4.0, 5.0, 6.0, 7.0]
    # Only the batch is stored, not the 100 numbers that it is a view of
    assert batch.ret.untyped_storage().nbytes() == 4 * 4


def test_a_batch_of_several_policies_is_restored(tmp_path):
    whole = MultiBatch(parts={"hunter": make_batch(), "prey": make_batch()}, policies=("hunter", "prey"), num_samples=8)
    BadBatches(str(tmp_path), 0, ALGORITHM).find_fault(whole, [BAD], {}, 3)
    batch, _ = read_bad_batch(tmp_path / "gworker0_version3.pt")
    assert (type(batch), batch.num_samples, batch.policies) == (MultiBatch, 8, ("hunter", "prey"))
    assert batch.parts["prey"].ret.tolist() == [4.0, 5.0, 6.0, 7.0]


@pytest.mark.parametrize(("content", "message"), [
    ({}, "KeyError|'batch'"), ({"batch": {"kind": "os:system"}}, "os:system"),
    ({"batch": {"kind": "subprocess:Popen", "args": "ls"}}, "is no batch"), ("text", "")])
def test_other_files_are_refused(tmp_path, content, message):
    torch.save(content, tmp_path / "file.pt")
    with pytest.raises(CheckpointError, match=f"is not a batch that keep_bad_batches has saved: .*({message})"):
        read_bad_batch(tmp_path / "file.pt")


def test_an_incomplete_file_is_removed(tmp_path, monkeypatch):
    keeper = BadBatches(str(tmp_path), 1, None)

    class Full:
        def __init__(self, file):
            self._file = file

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self._file.close()

        def write(self, content):
            self._file.write(content[:3])
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("builtins.open", lambda *args, _open=open, **options: Full(_open(*args, **options)))
    with pytest.raises(OSError, match="No space left"):
        keeper._write("gworker1_version0", memoryview(b"content"))
    assert not list(tmp_path.iterdir())
