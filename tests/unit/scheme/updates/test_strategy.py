"""Check that empty gradients are counted, and change neither the version nor anything else."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from pytorchrl import ASYNC, PPO, GAEBuffer
from pytorchrl.errors import CollectionError
from pytorchrl.scheme.gradients.process_group import GradientGroup
from pytorchrl.scheme.updates import statistics


def without_samples(batch):
    return dataclasses.replace(batch, valid=torch.zeros_like(batch.done, dtype=torch.bool), num_samples=0,
                               num_new_samples=0)


def with_empty(at, only_of=None):
    """Return a storage class that generates empty batches, which have no valid samples.

    Args:
        at: Indices of batches of a rollout, counted from 0. An empty batch is generated before each of these batches.
        only_of: Number of the only storage that generates empty batches; storages are numbered from 0 in the order of
            their creation. In this storage, an empty batch replaces each batch in `at`. None: all storages generate
            empty batches.
    """
    made = []

    class WithEmpty(GAEBuffer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.number = len(made)
            made.append(self)

        def generate_batches(self, *args, **kwargs):
            for number, batch in enumerate(super().generate_batches(*args, **kwargs)):
                empty = dataclasses.replace(without_samples(batch), last=False)
                if number in at and only_of is None:
                    yield empty
                    yield batch
                elif number in at and self.number == only_of:
                    yield dataclasses.replace(empty, last=batch.last)
                else:
                    yield batch
    return WithEmpty


def parameters(scheme, updates):
    seen = []
    while scheme.version < updates:
        scheme.step()
        seen.append(scheme.version)
    return scheme.acting_state()["all"], seen


@pytest.mark.parametrize("settings", [
    {}, {"num_grad_workers": 2}, {"num_grad_workers": 2, "distribute_gradients": True}, {"num_col_workers": 2}],
    ids=["central", "parallel", "decentralized", "collectors"])
def test_empty_gradients_only_change_their_count(make_scheme, check_ledger, settings):
    plain, _ = parameters(make_scheme(**settings), 8)
    scheme = make_scheme(storage=with_empty({0, 2}), **settings)
    found, versions = parameters(scheme, 8)
    assert torch.equal(found, plain)
    assert versions == list(range(1, 9))  # each step makes one update, despite the empty gradients
    metrics, places = scheme.metrics(), settings.get("num_grad_workers", 1)
    assert metrics["grads_empty"] == 4 * places
    assert metrics["updates_skipped_nan"] == metrics["grads_held"] == 0
    assert metrics["grads_received"] == metrics["grads_applied"] + metrics["grads_empty"]
    check_ledger(scheme)


def test_empty_asynchronous_gradients_are_counted(make_scheme, check_ledger):
    scheme = make_scheme(storage=with_empty({0, 3}), num_grad_workers=2, grad_communication=ASYNC, runtime="simulated")
    while scheme.version < 40:
        scheme.step()
    metrics = scheme.metrics()
    assert metrics["grads_empty"] >= 18  # two empty gradients per four applied gradients; a few gradients are in flight
    assert metrics["grads_received"] == sum(metrics[f"grads_{name}"] for name in ("applied", "held", "dropped",
                                                                                  "empty"))
    check_ledger(scheme)


@pytest.mark.parametrize("settings", [
    {}, {"num_grad_workers": 2}, {"num_grad_workers": 2, "distribute_gradients": True},
    {"num_grad_workers": 2, "grad_communication": ASYNC}, {"col_communication": ASYNC, "grad_communication": ASYNC}],
    ids=["central", "parallel", "decentralized", "asynchronous", "in a thread"])
def test_only_empty_gradients_are_an_error(make_scheme, settings, monkeypatch):
    monkeypatch.setattr(statistics, "_MAX_EMPTY_IN_A_ROW", 50)

    class Empty(GAEBuffer):
        def generate_batches(self, *args, **kwargs):
            for batch in super().generate_batches(*args, **kwargs):
                yield without_samples(batch)
    scheme = make_scheme(storage=Empty, runtime="simulated", **settings)
    with pytest.raises(CollectionError, match="gradients in a row had no sample to learn from"):
        scheme.step()
    final = scheme.stop()
    assert final["collected"] == final["consumed_unique"] + sum(final["dropped"].values())


def test_occasional_empty_gradients_are_no_error(make_scheme, monkeypatch):
    monkeypatch.setattr(statistics, "_MAX_EMPTY_IN_A_ROW", 3)
    scheme = make_scheme(storage=with_empty({0, 2}))
    parameters(scheme, 12)
    assert scheme.metrics()["grads_empty"] == 6


@pytest.mark.parametrize("decentralized", [False, True])
def test_an_empty_gradient_of_one_worker_is_ignored(make_scheme, check_ledger, decentralized):
    """Check that an update uses only the other workers' gradients if one worker has an empty gradient."""
    settings = {"num_grad_workers": 2, "distribute_gradients": decentralized, "algo": PPO.create_factory(
        num_epochs=1, num_mini_batch=1, lr=1e-2)}
    scheme = make_scheme(storage=with_empty({0}, only_of=1), **settings)
    before = scheme.acting_state()["all"].clone()
    scheme.step()
    assert scheme.version == 1
    assert not torch.equal(scheme.acting_state()["all"], before)
    assert scheme.metrics()["grads_empty"] == 1
    assert scheme.metrics()["grads_applied"] == 1
    check_ledger(scheme)


def test_the_mean_of_missing_gradients_of_all_ranks_is_none():
    class Alone:
        size, device = 1, torch.device("cpu")

        def sum(self, tensor):
            return tensor
    group = GradientGroup(Alone())
    assert group.mean([None], [0], [3]) == [None]
    assert torch.equal(group.mean([torch.ones(3), 2 * torch.ones(1)], [4, 4])[0], torch.ones(3))
