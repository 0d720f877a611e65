"""Tests of schemes that compute gradients, and optionally collect, in microbatches: sizes, results and memory."""

from __future__ import annotations

import pytest
import torch

from pytorchrl import A2C, ASYNC, PPO, VecEnv
from pytorchrl.envs.testing import CountingEnv
from tests.unit.scheme.gradients.conftest import ONE_PASS, ALGORITHMS, PLACES, Watch, assert_same


# Sizes


@pytest.mark.parametrize(("workers", "size", "micro", "train_steps", "microbatches", "slices", "passes"), [
    (3, 20, 100, 1000, [120] * 9, [60, 60], 18),
    (1, 400, 100, 1000, [400] * 3, [100] * 4, 12),
    (1, 250, 100, 1000, [250] * 4, [83, 83, 84], 12),
    (1, 100, 100, 100, [100], [100], 1),
    (1, 70, 100, 100, [140], [70, 70], 2),
])
def test_sizes_of_microbatches_and_slices(make_scheme, watch, workers, size, micro, train_steps, microbatches, slices,
                                          passes):
    """Check examples from the documentation; most of them are scaled down to a tenth of their size.

    Microbatches consist of whole rounds, and slices have nearly equal sizes.
    """
    scheme = make_scheme(CountingEnv, {"episode_length": 10**6}, num_envs=1, size=size, num_col_workers=workers,
                         algo=watch.algo.create_factory(), storage=watch.storage, train_batch_size=train_steps,
                         microbatch_size=micro)
    scheme.step()
    assert watch.items == microbatches
    assert len(watch.slices) == passes == scheme.metrics()["backward_passes"]
    for start in range(0, passes, len(slices)):
        assert sorted(watch.slices[start:start + len(slices)]) == slices
    assert watch.updates == 1
    assert scheme.metrics()["microbatch_steps"] == microbatches[-1]
    ledger = scheme.ledger()
    assert ledger["collected"] == ledger["consumed_unique"] == ledger["consumed"] == sum(microbatches)


@pytest.mark.parametrize(("settings", "items"), [
    ({"train_batch_size": 48}, 1),
    ({"train_batch_size": 48, "microbatch_size": 16}, 3),
    ({"train_batch_size": 48, "num_col_workers": 1, "col_communication": ASYNC}, 1),
], ids=["rounds", "pieces", "asynchronous"])
def test_reset_steps_count_for_the_batch_size(make_scheme, watch, settings, items):
    """Check that 3 rollouts of 8 steps in 2 environments fill a train batch of 48 steps, even if some are resets."""
    scheme = make_scheme(num_envs=2, size=8, algo=watch.algo.create_factory(), storage=watch.storage,
                         envs=VecEnv.create_factory(CountingEnv, {"episode_length": 5}, 2, autoreset="next_step"),
                         **settings)
    for updates in range(1, 5):
        scheme.step()
        assert watch.items[:updates * items] == [48 // items] * (updates * items)
    assert 24 * scheme.version < scheme.stop()["consumed_unique"] < 48 * scheme.version


def test_train_batch_size_alone_collects_whole_rounds(make_scheme, watch):
    scheme = make_scheme(num_envs=2, size=8, algo=watch.algo.create_factory(), storage=watch.storage,
                         envs=VecEnv.create_factory(CountingEnv, {"episode_length": 10**6}, 2), train_batch_size=33)
    scheme.step()
    assert watch.items == watch.slices == [48]


def test_rollouts_of_the_local_worker_are_not_overwritten(make_scheme, recorder):
    """Check that every step is in exactly one batch, although all rounds of the local worker use the same memory."""
    scheme = make_scheme(recorder.env_fn, storage=recorder.storage, algo=A2C.create_factory(), train_batch_size=100)
    del recorder.made[:]  # discard the steps of the probe
    for _ in range(3):
        scheme.step()
    assert len(recorder.drawn) == len(set(recorder.drawn)) == scheme.ledger()["consumed_unique"] >= 300
    assert sorted(recorder.inserted) == sorted(recorder.drawn)


# Equal results


@pytest.mark.every(3)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("algo", ALGORITHMS)
def test_slices_change_nothing(train, algo, place):
    whole = train(ALGORITHMS[algo], **PLACES[place])
    parts = train(ALGORITHMS[algo], **PLACES[place], microbatch_size=7)
    assert_same(whole, parts)
    assert parts["metrics"]["backward_passes"] >= 2 * whole["metrics"]["backward_passes"]


@pytest.mark.every(3)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("algo", ALGORITHMS)
def test_microbatches_change_nothing(train, algo, place):
    settings = {**PLACES[place], "train_batch_size": 160}
    whole = train(ALGORITHMS[algo], **settings)
    pieces = train(ALGORITHMS[algo], **settings, microbatch_size=30)
    assert_same(whole, pieces)
    assert pieces["metrics"]["backward_passes"] > whole["metrics"]["backward_passes"]


@pytest.mark.every(3)
@pytest.mark.parametrize("settings", [{"microbatch_size": 15}, {"microbatch_size": 15, "train_batch_size": 100}],
                         ids=str)
@pytest.mark.parametrize("algo", ["a2c", "ppo by minibatch"])
def test_microbatches_change_nothing_for_recurrent_actors(train, algo, settings):
    whole = train(ALGORITHMS[algo], recurrent="gru", train_batch_size=settings.get("train_batch_size"))
    parts = train(ALGORITHMS[algo], recurrent="gru", **settings)
    assert_same(whole, parts)
    assert parts["metrics"]["backward_passes"] >= 4 * whole["metrics"]["backward_passes"]


def test_slices_work_with_asynchronous_collection(make_scheme, watch):
    scheme = make_scheme(num_col_workers=2, col_communication=ASYNC, algo=watch.algo.create_factory(),
                         microbatch_size=5)
    for _ in range(4):
        scheme.step()
    assert max(watch.slices) <= 5
    assert watch.updates == 4


def test_gradients_are_clipped_once_per_update(train):
    algo = A2C.create_factory(max_grad_norm=0.05, optimizer="sgd", lr=0.1)
    whole, pieces = (train(algo, train_batch_size=160, microbatch_size=size) for size in (None, 30))
    assert_same(whole, pieces)
    assert all(info["grad_norm"] > 0.05 for info in pieces["infos"])  # the norm of the whole gradient before clipping


def test_gradients_of_a_summed_loss_are_added(make_scheme, train):
    """Check that the gradients of slices are added, not averaged, if the loss is a sum."""
    class Sum(A2C):
        loss_reduction = "sum"

        def compute_gradients(self, batch):
            gradients, info = super().compute_gradients(batch)
            return [gradient * batch.num_samples for gradient in gradients], info

    settings = {"optimizer": "sgd", "lr": 1e-4, "max_grad_norm": None}
    whole = train(Sum.create_factory(**settings), train_batch_size=160)
    pieces = train(Sum.create_factory(**settings), train_batch_size=160, microbatch_size=30)
    torch.testing.assert_close(whole["state"], pieces["state"], rtol=1e-5, atol=1e-6)
    norms = [info["grad_norm"] for info in pieces["infos"]]
    assert norms == pytest.approx([info["grad_norm"] for info in whole["infos"]], rel=1e-4)
    assert norms[0] > 50 * train(A2C.create_factory(**settings), train_batch_size=160)["infos"][0]["grad_norm"]


def test_target_kl_uses_the_mean_over_the_whole_batch(train):
    """Check that the mean KL over all slices, not the KL of one slice, decides whether training on the data stops."""
    settings = {"num_epochs": 6, "num_mini_batch": 1, "lr": 3e-3, "target_kl": 1e-4}
    whole, parts = (train(PPO.create_factory(**settings), updates=12, microbatch_size=size) for size in (None, 7))
    assert_same(whole, parts)
    skipped = [info["skip_remaining"] for info in parts["infos"]]
    assert set(skipped) == {0.0, 1.0}


# Data in memory


def test_microbatches_are_discarded_if_nothing_needs_them(train, watch):
    train(watch.algo.create_factory(), updates=2, storage=watch.storage, train_batch_size=400, microbatch_size=40)
    assert len(watch.items) >= 2 * 400 / 80
    assert max(watch.items) < 40 + 40  # less than `microbatch_size` plus one round
    assert max(watch.slices) <= 40


def test_microbatches_are_freed_before_the_next_is_collected(make_scheme, monkeypatch):
    worker = (scheme := make_scheme(algo=ALGORITHMS["a2c"], train_batch_size=100,
                                    microbatch_size=16)).start().local_worker
    held = []
    monkeypatch.setattr(worker.collector.rounds, "collect", lambda right=worker.collector.rounds.collect: (
        held.append((worker.storage.counters["resident"], worker.batch, worker.batch_source.size)), right())[1])
    scheme.step()
    assert len(held) > 5
    assert set(held) == {(0, None, 0)}


@pytest.mark.parametrize(("options", "norm_over", "is_kept"), [
    ({"advantage_normalization": "minibatch"}, "batch", True), ({"advantage_normalization": "batch"}, "batch", True),
    ({"advantage_normalization": "minibatch"}, "microbatch", False),
    ({"advantage_normalization": "batch"}, "microbatch", False), ({"advantage_normalization": "none"}, "batch", False),
    ({"advantage_normalization": "none", "num_epochs": 2}, "batch", True),
    ({"advantage_normalization": "none", "num_mini_batch": 2}, "batch", True),
    ({"advantage_normalization": "none", "num_mini_batch": None, "mini_batch_size": 160}, "batch", True),
])
def test_the_train_batch_is_kept_if_it_is_needed_again(train, options, norm_over, is_kept):
    watch = Watch(PPO)
    train(watch.algo.create_factory(**{name: value for name,
                                       value in (ONE_PASS | options).items() if value is not None}), updates=1,
                                       storage=watch.storage, train_batch_size=160,
          microbatch_size=30, norm_over=norm_over)
    assert len(watch.items) == (1 if is_kept else 4)
    assert sum(watch.items) == 160
    assert max(watch.slices) <= 30


@pytest.mark.parametrize("normalization", ["minibatch", "batch"])
def test_norm_over_changes_the_normalization_of_advantages(train, normalization):
    algo = PPO.create_factory(**ONE_PASS, advantage_normalization=normalization)
    settings = {"train_batch_size": 160, "microbatch_size": 30}
    batch, microbatch = (train(algo, updates=1, **settings, norm_over=norm) for norm in ("batch", "microbatch"))
    assert batch["ledger"] == microbatch["ledger"]
    assert not torch.allclose(batch["state"]["all"], microbatch["state"]["all"], rtol=1e-5, atol=1e-5)
    again = train(algo, updates=1, **settings, norm_over="microbatch")
    assert_same(microbatch, again, exact=True)


def test_norm_over_microbatch_with_parallel_gradients(train):
    """Check that each gradient worker normalizes over its own microbatches, independently of the other workers."""
    algo = PPO.create_factory(**ONE_PASS, advantage_normalization="batch", lr=1e-2)
    settings = {"train_batch_size": 160, "microbatch_size": 30, "norm_over": "microbatch"}
    assert_same(train(algo, **PLACES["parallel gradients"], **settings),
                train(algo, **PLACES["decentralized"], **settings))


def test_norm_over_without_effect_warns(make_scheme):
    with pytest.warns(UserWarning, match="norm_over='microbatch' has no effect with A2C"):
        make_scheme(algo=A2C.create_factory(), train_batch_size=40, microbatch_size=10, norm_over="microbatch")
