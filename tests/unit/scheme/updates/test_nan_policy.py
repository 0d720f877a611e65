"""Check updates whose loss or gradient is not finite: all workers skip and count them, and keep their batches on
request."""

from __future__ import annotations

import logging
import math
import re

import pytest
import torch

from pytorchrl import ASYNC, PPO, Learner, OnPolicyActor, VecEnv
from pytorchrl.agent.data import Batch
from pytorchrl.cli import main
from pytorchrl.envs.testing import CountingEnv
from pytorchrl.errors import NonFiniteUpdateError
from pytorchrl.scheme.supervision.bad_batches import BadBatches, read_bad_batch

SCHEMES = {
    "central": {}, "sync": {"num_grad_workers": 2},
    "async": {"num_grad_workers": 2, "grad_communication": ASYNC},
    "decentralized": {"num_grad_workers": 2, "distribute_gradients": True},
}
IN_A_THREAD = {"grad_communication": ASYNC}
KINDS = ["nan loss", "inf loss", "nan gradient", "inf gradient"]


class BadPPO(PPO):
    """PPO with some losses or gradients that are not finite.

    `bad(n)` names the fault of the worker's n-th gradient, counted from 1.
    """

    def __init__(self, options, **context):
        super().__init__(options, **context)
        self.bad = lambda number: None
        self.number, self.bad_batches = 0, []

    def compute_gradients(self, batch):
        self.number += 1
        kind = self.bad(self.number)
        gradients, info = super().compute_gradients(batch)
        if kind is not None:
            self.bad_batches.append(batch)
        if kind in ("nan gradient", "inf gradient"):  # only one element is not finite; the loss stays finite
            assert math.isfinite(info["loss"])
            gradients[0][3] = float(kind[:3])
        return gradients, info

    def loss(self, *args):
        loss, measured = super().loss(*args)
        kind = self.bad(self.number)
        # The added constant makes the loss non-finite, but does not affect the gradient.
        if kind in ("nan loss", "inf loss"):
            loss = loss + float(kind[:3])
            measured = torch.cat([loss.detach().unsqueeze(0), measured[1:]])
        return loss, measured


def at(*numbers, kind="nan loss"):
    """Return a function that returns `kind` for the given numbers, and None for all others."""
    return lambda number: kind if number in numbers else None


def every(first, kind="nan loss"):
    """Return a function that returns `kind` for numbers from `first` on, and None for smaller numbers."""
    return lambda number: kind if number >= first else None


@pytest.fixture
def make_bad(make_scheme):
    """Return a function that makes schemes of `BadPPO`, by default with two epochs of two batches per rollout of 16
    steps."""
    def make(*bad, num_epochs=2, num_mini_batch=2, **settings):
        """Make a scheme; `bad` has one function per gradient worker, in the order of the workers."""
        scheme = make_scheme(
            algo=BadPPO.create_factory(num_epochs=num_epochs, num_mini_batch=num_mini_batch, lr=1e-3), **settings)
        for algo, numbers in zip(computing(scheme), bad, strict=True):
            algo.bad = numbers
        return scheme
    return make


def grad_workers(scheme):
    root = scheme.update_worker
    return [handle.native.worker for handle in root.remote_workers] or [root.local_worker]


def computing(scheme):
    """Return the algorithms of the gradient workers."""
    return [worker.algo for worker in grad_workers(scheme)]


def applying(scheme):
    """Return the workers that apply updates."""
    return grad_workers(scheme) if scheme.settings["distribute_gradients"] else [scheme.update_worker.local_worker]


def state(scheme):
    """Return copies of all state that an update may change, one copy for each worker that applies updates."""
    return [
        {"parameters": worker.algo.groups["all"].data.clone(), "version": torch.tensor(worker.actor_version),
         **{name: part.clone() for name, part in worker.algo._optimizers["all"].state_dict().items()}}
        for worker in applying(scheme)]


def step_on(scheme):
    """Call `scheme.step` 100 times, more often than any of these tests needs."""
    for _ in range(100):
        scheme.step()


def equal(ours, theirs):
    return all(torch.equal(a[name], b[name]) for a, b in zip(ours, theirs, strict=True) for name in a)


def last_bad(settings, bad):
    """Return the functions for `make_bad`, one per gradient worker.

    Worker 1 is good and worker 2 is bad; without remote workers, the only worker is bad.
    """
    return [at(), bad] if "num_grad_workers" in settings else [bad]


@pytest.mark.every(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settings", SCHEMES.values(), ids=SCHEMES)
def test_a_non_finite_update_changes_nothing_and_is_counted(make_bad, check_ledger, settings, kind):
    """Check that an update that is not finite changes nothing.

    RLlib 2.60 applies a NaN gradient even with `torch_skip_nan_gradients=True`. Without this option, it also applies
    an infinite gradient.
    """
    # Gradient 3 is the second use of its eight samples, and gradient 6 is the first use of its samples.
    scheme = make_bad(*last_bad(settings, at(3, 6, kind=kind)), **settings)
    skipped, since = 0, 0
    while since < 4:
        before, version = state(scheme), scheme.version
        info = scheme.step()
        check_ledger(scheme)
        if scheme.metrics()["updates_skipped_nan"] == skipped:
            assert scheme.metrics()["updates"] == scheme.version == version + 1
            assert not equal(before, state(scheme))
            assert math.isfinite(info["loss"])
            since += skipped == 2
        else:
            skipped += 1
            assert scheme.metrics()["updates_skipped_nan"] == skipped
            assert scheme.metrics()["updates"] == scheme.version == version
            assert equal(before, state(scheme))
            assert info == {}
        assert torch.isfinite(scheme.acting_state()["all"]).all()
    assert skipped == 2
    if "grad_communication" not in settings:
        assert scheme.metrics()["grad_lag"]["max"] == 0
    together = "num_grad_workers" in settings and "grad_communication" not in settings
    final = scheme.stop()
    assert final["dropped"]["nan"] == (16 if together else 8)
    assert final["collected"] == final["consumed_unique"] + sum(final["dropped"].values())
    scheme._final.check()


def test_a_nan_of_one_rank_is_not_reduced_into_the_parameters_of_all(make_bad):
    """Check that all ranks skip the update if one rank's gradient is NaN. In habitat-lab's DD-PPO, the NaN reaches the
    parameters of all ranks (issue 2226)."""
    scheme = make_bad(at(), at(3), at(), num_grad_workers=3, distribute_gradients=True)
    for number in range(1, 7):
        before = state(scheme)
        scheme.step()
        after = state(scheme)
        assert equal(before, after) == (number == 3)
        assert all(equal([after[0]], [rank]) for rank in after[1:])
        assert all(torch.isfinite(rank["parameters"]).all() for rank in after)
    assert scheme.version == 5


def test_steps_of_a_skipped_gradient_stay_dropped_despite_later_passes(make_bad):
    scheme = make_bad(at(1))
    for _ in range(4):
        scheme.step()
    ledger = scheme.ledger()
    assert (ledger["collected"], ledger["consumed_unique"], ledger["dropped"]["nan"]) == (16, 8, 8)
    assert ledger["consumed"] == 8 + 16


@pytest.mark.parametrize("settings", [
    SCHEMES["central"], IN_A_THREAD, SCHEMES["sync"], SCHEMES["decentralized"],
    {**SCHEMES["async"], "runtime": "simulated"}], ids=["central", "thread", "sync", "decentralized", "async"])
def test_the_sixth_consecutive_skipped_update_raises(make_bad, tmp_path, settings):
    num_workers = settings.get("num_grad_workers", 1)
    scheme = make_bad(*[every(5)] * num_workers, keep_bad_batches=str(tmp_path), **settings)
    with pytest.raises(NonFiniteUpdateError, match="6 updates in a row could not be made") as caught:
        step_on(scheme)
    asynchronous = scheme.settings["grad_communication"] == ASYNC
    good = 4 * num_workers if asynchronous else 4
    metrics, message = scheme.metrics(), str(caught.value)
    assert (metrics["updates_skipped_nan"], metrics["updates"], scheme.version) == (6, good, good)
    worker = rf"GWorker {min(1, num_workers - 1)} at version 4" if not asynchronous else r"GWorker \d at version \d"
    assert re.search(f"{worker}: loss nan, norm of its gradient nan", message)
    assert "lower lr" in message
    assert f"saved to {tmp_path}/gworker" in message
    with pytest.raises(NonFiniteUpdateError, match="6 updates in a row"):
        scheme.step()
    assert torch.isfinite(scheme.acting_state()["all"]).all()
    final = scheme.stop()
    scheme._final.check()
    assert final["in_flight"] == final["queued"] == 0


@pytest.mark.parametrize("settings", [SCHEMES["central"], SCHEMES["sync"], SCHEMES["decentralized"]],
                         ids=["central", "sync", "decentralized"])
def test_a_finite_update_resets_the_count(make_bad, settings):
    scheme = make_bad(*last_bad(settings, at(*range(2, 7), *range(8, 13))), **settings)
    for _ in range(14):
        scheme.step()
    assert scheme.metrics()["updates_skipped_nan"] == 10
    assert scheme.version == 4


def test_the_message_covers_only_the_current_series_of_skipped_updates(make_bad):
    scheme = make_bad(lambda number: None if number in (1, 3) else "inf loss")
    with pytest.raises(NonFiniteUpdateError, match="6 updates in a row") as caught:
        step_on(scheme)
    assert "version 2: loss inf" in str(caught.value)
    assert "version 1:" not in str(caught.value)
    assert "and 3 more" in str(caught.value)


def test_only_non_finite_asynchronous_gradients_are_skipped(make_bad):
    """Check that the good worker's gradients are applied.

    Each of them resets the number of updates skipped in a row.
    """
    scheme = make_bad(at(), every(1), runtime="simulated", **SCHEMES["async"])
    for _ in range(40):
        scheme.step()
    skipped = scheme.metrics()["updates_skipped_nan"]
    assert skipped > 10
    assert scheme.version == 40 - skipped
    good, bad = computing(scheme)
    assert good.number >= scheme.version
    assert bad.number >= skipped


@pytest.mark.parametrize("settings", SCHEMES.values(), ids=SCHEMES)
def test_normalizers_use_train_batches_with_skipped_gradients(make_bad, settings):
    envs = VecEnv.create_factory(CountingEnv, None, 2)
    actor = OnPolicyActor.create_factory(
        envs.observation_space, envs.action_space, hidden_sizes=(8,), normalize_obs=True, normalize_reward=True)
    num_workers = settings.get("num_grad_workers", 1)
    scheme = make_bad(*[every(2)] * num_workers, envs=envs, actor=actor, num_epochs=1, num_mini_batch=1, **settings)
    per_update = 16 if scheme.settings["grad_communication"] == ASYNC else 16 * num_workers
    counts = []
    for _ in range(4):
        scheme.step()
        counts.append(float(scheme.acting_state()["reward_moments.count"]))
    assert counts == [per_update * number for number in range(1, 5)]
    assert scheme.metrics()["updates_skipped_nan"] >= 2


def test_only_the_first_skipped_update_is_logged(make_bad, caplog):
    scheme = make_bad(at(2, 4))
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            scheme.step()
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["an update was skipped"]
    assert "GWorker 0 at version 1: loss nan" in caplog.text


def test_a_learner_continues_and_shows_the_count(make_bad):
    scheme = make_bad(at(2, 3, 9, 16))
    with Learner(scheme, target_steps=64, progress=False) as learner:
        learner.train()
        metrics = learner.get_metrics()
    assert metrics["scheme"]["updates_skipped_nan"] == 4
    assert metrics["scheme"]["samples_skipped_nan"] == 4 * 8
    ledger = metrics["ledger"]
    assert ledger["dropped"]["nan"] == 8 + 8
    # Training ends when all batches of the last rollout are used; no data are collected to replace skipped updates.
    assert (ledger["collected"], ledger["consumed"]) == (64, 2 * 64 - 4 * 8)
    assert math.isfinite(metrics["algorithm"]["loss"])


# Batches that are kept


@pytest.mark.parametrize("settings", SCHEMES.values(), ids=SCHEMES)
def test_the_worker_with_a_bad_batch_saves_it(make_bad, tmp_path, settings):
    folder = tmp_path / "made" / "when needed"
    scheme = make_bad(*last_bad(settings, at(3, kind="inf gradient")), keep_bad_batches=folder, **settings)
    while not scheme.metrics()["updates_skipped_nan"]:
        assert not list(folder.glob("*")) or "grad_communication" in settings
        scheme.step()
    path, = folder.iterdir()
    saved = torch.load(path, weights_only=True)
    index, version = len(computing(scheme)), saved["version"]
    index = 0 if index == 1 else index
    assert path.name == f"gworker{index}_version{version}.pt"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    assert [found.stat().st_mode for found in (path, folder)] == [found.stat().st_mode for found in (
        tmp_path / "other" / "file", tmp_path / "other")]  # permissions follow the umask
    assert (saved["format"], saved["worker"], version) == (2, index, 2) or "grad_communication" in settings
    seen, = computing(scheme)[-1].bad_batches
    kept, _ = read_bad_batch(path)
    assert isinstance(kept, Batch)
    for name in ("action", "logp", "value", "ret", "advantage", "done"):
        assert torch.equal(getattr(kept, name), getattr(seen, name).cpu())
    assert torch.equal(kept.obs["obs"], seen.obs["obs"].cpu())
    assert kept.num_samples == seen.num_samples == len(kept.action)
    assert math.isfinite(saved["info"]["loss"])
    assert saved["gradient_state"]["acting"]["all"].shape == scheme.acting_state()["all"].shape


def test_no_batch_is_saved_by_default(make_bad, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scheme = make_bad(every(1))
    with pytest.raises(NonFiniteUpdateError, match=r"not saved \(keep_bad_batches is None\)"):
        step_on(scheme)
    assert not list(tmp_path.iterdir())


def test_every_worker_saves_up_to_five_batches(make_bad, tmp_path):
    """Check that batches of the same version have different file names, and that existing files are not overwritten."""
    (tmp_path / "gworker1_version0.pt").write_text("of an earlier run")
    scheme = make_bad(every(1), at(), keep_bad_batches=str(tmp_path), **SCHEMES["sync"])
    with pytest.raises(NonFiniteUpdateError, match=r"gworker1_version0_2\.pt"):
        step_on(scheme)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "gworker1_version0.pt", *(f"gworker1_version0_{number}.pt" for number in range(2, 7))]
    assert (tmp_path / "gworker1_version0.pt").read_text() == "of an earlier run"


def test_a_file_contains_the_batch_but_not_its_whole_rollout(make_bad, tmp_path):
    scheme = make_bad(at())
    scheme.step()
    algo, = computing(scheme)
    whole = torch.zeros(10**6)
    batch = Batch({"obs": whole[:2]}, whole[:2], {}, None, whole[:2], None, *[whole[2:4]] * 4)
    nan = [torch.full((3,), math.nan)]
    assert str(tmp_path) in BadBatches(str(tmp_path), 0, algo).find_fault(batch, nan, {}, 7)
    assert (tmp_path / "gworker0_version7.pt").stat().st_size < 100_000


def test_a_failure_to_save_a_batch_is_only_logged(make_bad, tmp_path, caplog):
    scheme = make_bad(every(2), keep_bad_batches=str(tmp_path / "later"))
    scheme.step()
    (tmp_path / "later").write_text("in the way")
    with pytest.raises(NonFiniteUpdateError, match=r"could not be saved: .*later"):
        step_on(scheme)
    assert "a bad batch of GWorker 0 could not be saved: [Errno" in caplog.text


def test_the_command_line_has_the_option_keep_bad_batches(capsys, tmp_path):
    assert main(["train", "ppo", "--help-all"]) == 0
    assert "--keep-bad-batches TEXT|none" in capsys.readouterr().out.replace("none|TEXT", "TEXT|none")
    (tmp_path / "file").touch()
    assert main(["train", "ppo", "--env", "CartPole-v1", "--keep-bad-batches", str(tmp_path / "file" / "below")]) == 2
    assert "keep_bad_batches" in capsys.readouterr().err
