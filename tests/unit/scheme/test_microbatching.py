"""Schemes that differentiate, or also collect, by pieces: sizes, equal results, what is held, what is counted."""

from __future__ import annotations

import logging
import warnings

import pytest
import torch
from torch import nn

from pytorchrl import A2C, ASYNC, PPO, GAEBuffer, MultiAgentVecEnv, OnPolicyActor, Scheme, VecEnv, multi_agent
from pytorchrl.envs.testing import CountingEnv, MatchingGame
from pytorchrl.errors import NonFiniteUpdateError
from pytorchrl.scheme.gradients import microbatch as accumulator

ONE_PASS = {"num_epochs": 1, "num_mini_batch": 1}
ALGORITHMS = {
    "a2c": A2C.create_factory(lr=1e-2),
    "ppo by minibatch": PPO.create_factory(**ONE_PASS, lr=1e-2, advantage_normalization="minibatch"),
    "ppo by batch": PPO.create_factory(**ONE_PASS, lr=1e-2, advantage_normalization="batch"),
    "ppo of several passes": PPO.create_factory(num_epochs=2, num_mini_batch=3, lr=1e-2),
}
PLACES = {
    "central": {}, "parallel collection": {"num_col_workers": 2}, "parallel gradients": {"num_grad_workers": 2},
    "decentralised": {"num_grad_workers": 2, "distribute_gradients": True},
}


class Watch:
    """An algorithm and a storage that write down what reaches them in this process."""

    def __init__(self, cls=A2C):
        watch = self
        self.slices, self.updates, self.items, self.held = [], 0, [], []

        class Watched(cls):
            def compute_gradients(self, batch):
                watch.slices.append(batch.num_samples)
                return super().compute_gradients(batch)

            def apply_gradients(self, gradients=None):
                watch.updates += 1
                return super().apply_gradients(gradients)

        class WatchedBuffer(GAEBuffer):
            def insert_data_slice(self, rollouts):
                watch.items.append(sum(rollout.size for rollout in rollouts))
                super().insert_data_slice(rollouts)

        self.algo, self.storage = Watched, WatchedBuffer


@pytest.fixture
def watch():
    return Watch()


def envs(num_envs=4, **options):
    return VecEnv.create_factory("CartPole-v1", vec_env_size=num_envs, **options)


@pytest.fixture
def train(make_scheme, check_ledger):
    """A function that makes some updates; what the run came to."""
    def run(algo, updates=3, recurrent=None, actor=None, **settings):
        given = settings.pop("envs", None) or envs()
        actor = OnPolicyActor.create_factory(
            given.observation_space, given.action_space, hidden_sizes=(8,), recurrent_net=recurrent, **(actor or {}))
        scheme = make_scheme(envs=given, actor=actor, algo=algo, size=10, **settings)
        infos = []
        for _ in range(updates):
            infos.append(scheme.step())
            check_ledger(scheme)
        metrics, runtime = scheme.metrics(), scheme.runtime
        return {"state": scheme.acting_state(), "infos": infos, "metrics": metrics, "ledger": scheme.stop(),
                "seconds": runtime.now(), "settings": scheme.settings}
    return run


def assert_same(first, second, exact=False):
    tolerance = 0.0 if exact else 2e-6
    assert first["ledger"] == second["ledger"]
    torch.testing.assert_close(first["state"], second["state"], rtol=tolerance, atol=tolerance)
    for one, other in zip(first["infos"], second["infos"], strict=True):
        assert one == (other if exact else pytest.approx(other, rel=1e-4, abs=1e-5))


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
    """The worked examples, at a tenth of their size: rounds are never trimmed, and slices are even."""
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
def test_steps_in_which_environments_are_reset_fill_batches(make_scheme, watch, settings, items):
    """Three rollouts of 8 steps of 2 environments are a train batch of 48, although they hold fewer transitions."""
    scheme = make_scheme(num_envs=2, size=8, algo=watch.algo.create_factory(), storage=watch.storage,
                         envs=VecEnv.create_factory(CountingEnv, {"episode_length": 5}, 2, autoreset="next_step"), **settings)
    for updates in range(1, 5):
        scheme.step()
        assert watch.items[:updates * items] == [48 // items] * (updates * items)
    assert 24 * scheme.version < scheme.stop()["consumed_unique"] < 48 * scheme.version


def test_train_batch_size_alone_collects_whole_rounds(make_scheme, watch):
    scheme = make_scheme(num_envs=2, size=8, algo=watch.algo.create_factory(), storage=watch.storage,
                         envs=VecEnv.create_factory(CountingEnv, {"episode_length": 10**6}, 2), train_batch_size=33)
    scheme.step()
    assert watch.items == watch.slices == [48]


def test_the_local_workers_rollouts_are_not_overwritten_by_the_next(make_scheme, recorder):
    """Its rounds lie in the same memory, one after the other: every step that was made is drawn once."""
    scheme = make_scheme(recorder.env_fn, storage=recorder.storage, algo=A2C.create_factory(), train_batch_size=100)
    del recorder.made[:]  # by the probe
    for _ in range(3):
        scheme.step()
    assert len(recorder.drawn) == len(set(recorder.drawn)) == scheme.ledger()["consumed_unique"] >= 300
    assert sorted(recorder.inserted) == sorted(recorder.drawn)


# The same result


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("algo", ALGORITHMS)
def test_slices_change_nothing(train, algo, place):
    whole = train(ALGORITHMS[algo], **PLACES[place])
    parts = train(ALGORITHMS[algo], **PLACES[place], microbatch_size=7)
    assert_same(whole, parts)
    assert parts["metrics"]["backward_passes"] >= 2 * whole["metrics"]["backward_passes"]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("algo", ALGORITHMS)
def test_pieces_change_nothing(train, algo, place):
    settings = {**PLACES[place], "train_batch_size": 160}
    whole = train(ALGORITHMS[algo], **settings)
    pieces = train(ALGORITHMS[algo], **settings, microbatch_size=30)
    assert_same(whole, pieces)
    assert pieces["metrics"]["backward_passes"] > whole["metrics"]["backward_passes"]


@pytest.mark.parametrize("settings", [{"microbatch_size": 15}, {"microbatch_size": 15, "train_batch_size": 100}], ids=str)
@pytest.mark.parametrize("algo", ["a2c", "ppo by minibatch"])
def test_actors_with_memory(train, algo, settings):
    whole = train(ALGORITHMS[algo], recurrent="gru", train_batch_size=settings.get("train_batch_size"))
    parts = train(ALGORITHMS[algo], recurrent="gru", **settings)
    assert_same(whole, parts)
    assert parts["metrics"]["backward_passes"] >= 4 * whole["metrics"]["backward_passes"]


def test_asynchronous_collection_can_be_differentiated_in_slices(make_scheme, watch):
    scheme = make_scheme(num_col_workers=2, col_communication=ASYNC, algo=watch.algo.create_factory(), microbatch_size=5)
    for _ in range(4):
        scheme.step()
    assert max(watch.slices) <= 5
    assert watch.updates == 4


def test_clipping_is_felt_once_an_update(train):
    algo = A2C.create_factory(max_grad_norm=0.05, optimizer="sgd", lr=0.1)
    whole, pieces = (train(algo, train_batch_size=160, microbatch_size=size) for size in (None, 30))
    assert_same(whole, pieces)
    assert all(info["grad_norm"] > 0.05 for info in pieces["infos"])  # of the whole, before it was clipped


def test_a_loss_that_is_a_sum(make_scheme, train):
    """Gradients of slices are added, not averaged."""
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


def test_target_kl_is_decided_by_the_whole_batch(train):
    """A slice above the limit does not end the passes; the mean over all of them does."""
    settings = {"num_epochs": 6, "num_mini_batch": 1, "lr": 3e-3, "target_kl": 1e-4}
    whole, parts = (train(PPO.create_factory(**settings), updates=12, microbatch_size=size) for size in (None, 7))
    assert_same(whole, parts)
    skipped = [info["skip_remaining"] for info in parts["infos"]]
    assert set(skipped) == {0.0, 1.0}


# What is logged


def lines_of(caplog):
    return [record.message for record in caplog.records if record.name == accumulator.__name__ and record.levelno == logging.DEBUG]


def test_each_microbatch_that_is_forgotten_is_a_line(make_scheme, plain_a2c, caplog):
    """However many slices it is cut into."""
    scheme = make_scheme(CountingEnv, {"episode_length": 10**6}, num_envs=2, size=20, algo=plain_a2c, train_batch_size=100,
                         microbatch_size=30)
    with caplog.at_level(logging.DEBUG, accumulator.__name__):
        scheme.step()
    assert scheme.metrics()["backward_passes"] == 6
    assert lines_of(caplog) == [
        "Computing gradients for microbatch 1 (40/100 samples)", "Computing gradients for microbatch 2 (80/100 samples)",
        "Computing gradients for microbatch 3 (120/100 samples)", "Applying accumulated gradients (120 samples)"]


def test_each_slice_of_a_batch_is_a_line(make_scheme, caplog):
    scheme = make_scheme(CountingEnv, {"episode_length": 10**6}, num_envs=2, size=20, microbatch_size=10,
                         algo=PPO.create_factory(num_epochs=1, num_mini_batch=2))
    with caplog.at_level(logging.DEBUG, accumulator.__name__):
        scheme.step()
    assert lines_of(caplog) == [
        "Computing gradients for microbatch 1 (10/20 samples)", "Computing gradients for microbatch 2 (20/20 samples)",
        "Applying accumulated gradients (20 samples)"]


def test_slices_of_several_policies_count_their_agents_samples(caplog):
    envs = MultiAgentVecEnv.create_factory(MatchingGame, vec_env_size=2, policy_of="independent")
    agent = multi_agent(envs, PPO.create_factory(num_epochs=1, num_mini_batch=1), OnPolicyActor.create_factory, GAEBuffer.create_factory(8))
    scheme = Scheme(*agent, envs, seed=1, microbatch_size=8)
    with caplog.at_level(logging.DEBUG, accumulator.__name__):
        scheme.step()
    scheme.stop()
    assert lines_of(caplog)[:2] == ["Computing gradients for microbatch 1 (16/32 samples)", "Computing gradients for microbatch 2 (32/32 samples)"]


def test_without_microbatches_nothing_is_logged(make_scheme, caplog):
    with caplog.at_level(logging.DEBUG, accumulator.__name__):
        make_scheme().step()
    assert lines_of(caplog) == []


# What is held


def test_microbatches_are_forgotten_where_nothing_needs_them(train, watch):
    train(watch.algo.create_factory(), updates=2, storage=watch.storage, train_batch_size=400, microbatch_size=40)
    assert len(watch.items) >= 2 * 400 / 80
    assert max(watch.items) < 40 + 40  # a microbatch, and less than one round more
    assert max(watch.slices) <= 40


def test_nothing_of_a_microbatch_is_held_while_the_next_is_collected(make_scheme, monkeypatch):
    worker = (scheme := make_scheme(algo=ALGORITHMS["a2c"], train_batch_size=100, microbatch_size=16)).start().local_worker
    held = []
    monkeypatch.setattr(worker.collector.rounds, "collect", lambda right=worker.collector.rounds.collect: (
        held.append((worker.storage.counters["resident"], worker._batch, worker.batch_source.size)), right())[1])
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
def test_the_train_batch_is_kept_where_it_is_needed_again(train, options, norm_over, is_kept):
    watch = Watch(PPO)
    train(watch.algo.create_factory(**{name: value for name, value in (ONE_PASS | options).items() if value is not None}), updates=1, storage=watch.storage, train_batch_size=160,
          microbatch_size=30, norm_over=norm_over)
    assert len(watch.items) == (1 if is_kept else 4)
    assert sum(watch.items) == 160
    assert max(watch.slices) <= 30


@pytest.mark.parametrize("normalization", ["minibatch", "batch"])
def test_norm_over_changes_what_advantages_are_normalised_over(train, normalization):
    algo = PPO.create_factory(**ONE_PASS, advantage_normalization=normalization)
    settings = {"train_batch_size": 160, "microbatch_size": 30}
    batch, microbatch = (train(algo, updates=1, **settings, norm_over=norm) for norm in ("batch", "microbatch"))
    assert batch["ledger"] == microbatch["ledger"]
    assert not torch.allclose(batch["state"]["all"], microbatch["state"]["all"], rtol=1e-5, atol=1e-5)
    again = train(algo, updates=1, **settings, norm_over="microbatch")
    assert_same(microbatch, again, exact=True)


def test_norm_over_microbatch_with_parallel_gradients(train):
    """Each gradient worker normalises over its own microbatches, whatever the others have."""
    algo = PPO.create_factory(**ONE_PASS, advantage_normalization="batch", lr=1e-2)
    settings = {"train_batch_size": 160, "microbatch_size": 30, "norm_over": "microbatch"}
    assert_same(train(algo, **PLACES["parallel gradients"], **settings), train(algo, **PLACES["decentralised"], **settings))


def test_norm_over_without_effect_warns(make_scheme):
    with pytest.warns(UserWarning, match="norm_over='microbatch' has no effect with A2C"):
        make_scheme(algo=A2C.create_factory(), train_batch_size=40, microbatch_size=10, norm_over="microbatch")


# Prefetch


@pytest.mark.parametrize("runtime", ["threads", "simulated"])
@pytest.mark.parametrize("rollouts", [1, 3], ids=["one round a microbatch", "several"])
def test_prefetch_changes_no_bit(train, runtime, rollouts):
    settings = {"runtime": runtime, "num_col_workers": 2, "train_batch_size": 600, "microbatch_size": 70 * rollouts}
    without, ahead, again = (train(ALGORITHMS["a2c"], **settings, prefetch=prefetch) for prefetch in (0, 1, 1))
    assert_same(without, ahead, exact=True)
    assert_same(ahead, again, exact=True)
    # Nothing is in flight between two updates: what is collected is used.
    assert ahead["ledger"]["collected"] == ahead["ledger"]["consumed_unique"]


def test_prefetch_collects_while_a_microbatch_is_differentiated(train):
    """Two rounds a microbatch of 10 virtual seconds each, and gradients of 30: the longer of the two counts."""
    costs = {"start": 0, "message": 0, "step": 1.0, "grad": 30.0, "update": 0}
    settings = {"runtime": "simulated", "costs": costs, "num_col_workers": 2, "updates": 1,
                "envs": VecEnv.create_factory(CountingEnv, {"episode_length": 10**6}, 4),
                "train_batch_size": 640, "microbatch_size": 160}
    without, ahead = (train(ALGORITHMS["a2c"], **settings, prefetch=prefetch) for prefetch in (0, 1))
    assert without["seconds"] == pytest.approx(4 * (20 + 30))
    assert ahead["seconds"] == pytest.approx(20 + 4 * 30)


@pytest.mark.parametrize(("settings", "expected"), [
    ({"num_col_workers": 2}, 1), ({}, 0), ({"num_col_workers": 2, "col_fraction_workers": 0.5}, 0),
    ({"num_col_workers": 2, "algo": ALGORITHMS["ppo by batch"]}, 0)])
def test_prefetch_is_on_where_there_is_something_to_overlap(make_scheme, settings, expected):
    scheme = make_scheme(**({"algo": ALGORITHMS["a2c"]} | settings), train_batch_size=64, microbatch_size=16)
    assert scheme.settings["prefetch"] == expected


@pytest.mark.parametrize("policy", ["restart", "ignore"])
@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_worker_lost_while_collecting_by_pieces(train, policy, prefetch):
    result = train(ALGORITHMS["a2c"], runtime="simulated", num_col_workers=3, train_batch_size=600, microbatch_size=300,
                   prefetch=prefetch, on_worker_failure=policy, faults="kill col.2 @ step 34")
    ledger = result["ledger"]
    assert ledger["collected"] == ledger["consumed_unique"] >= 3 * 600
    assert result["metrics"]["workers_restarted"] == (policy == "restart")
    assert result["metrics"]["updates"] == 3


def test_workers_that_are_late_are_stopped_in_rounds_by_pieces_too(train):
    result = train(ALGORITHMS["a2c"], runtime="simulated", num_col_workers=3, train_batch_size=300, microbatch_size=100,
                   col_fraction_workers=0.6, costs={"step@*/CWorker 3": 1.0})
    assert result["metrics"]["rollouts_preempted"] == result["metrics"]["rollouts"] / 3


# The account


def test_steps_are_queued_until_the_update_is_made(make_scheme, check_ledger, monkeypatch):
    scheme = make_scheme(algo=ALGORITHMS["a2c"], train_batch_size=100, microbatch_size=20)
    worker = scheme.start().local_worker
    seen = []
    monkeypatch.setattr(worker, "compute_gradients", lambda *args, right=worker.compute_gradients: (
        seen.append(worker.ledger.snapshot().queued), right(*args))[1])
    scheme.step()
    assert len(seen) >= 4
    assert seen == sorted(set(seen))  # each piece adds to those before it
    ledger = check_ledger(scheme)
    assert ledger["queued"] == 0
    assert ledger["consumed_unique"] == ledger["collected"] == seen[-1]


def test_one_bad_piece_drops_the_steps_of_the_whole_update(make_scheme, check_ledger):
    scheme = make_scheme(algo=ALGORITHMS["a2c"], runtime="simulated", train_batch_size=100, microbatch_size=20,
                         faults="nan grad.0 @ grad 2")
    before = scheme.acting_state()["all"]
    assert scheme.step() == {}
    assert torch.equal(scheme.acting_state()["all"], before)
    dropped = check_ledger(scheme)["dropped"]["nan"]
    assert dropped == scheme.ledger()["collected"] >= 100
    scheme.step()
    ledger = check_ledger(scheme)
    assert ledger["dropped"]["nan"] == dropped
    assert ledger["consumed_unique"] == ledger["collected"] - dropped > 0


def test_the_bad_piece_is_the_one_that_is_kept(make_scheme, tmp_path):
    scheme = make_scheme(algo=ALGORITHMS["a2c"], runtime="simulated", train_batch_size=100, microbatch_size=20,
                         faults="nan grad.0 p=1.0", keep_bad_batches=tmp_path)
    for _ in range(5):
        scheme.step()
    with pytest.raises(NonFiniteUpdateError, match="kept in"):
        scheme.step()
    files = sorted(tmp_path.iterdir())
    assert 0 < torch.load(files[0], weights_only=True)["batch"]["num_samples"] < 40


def test_an_error_in_the_middle_leaves_its_steps_to_the_shutdown(make_scheme):
    class Fails(A2C):
        num_calls = 0

        def compute_gradients(self, batch):
            Fails.num_calls += 1
            if Fails.num_calls == 4:
                raise RuntimeError("out of luck")
            return super().compute_gradients(batch)

    scheme = make_scheme(algo=Fails.create_factory(), train_batch_size=200, microbatch_size=16)
    with pytest.raises(RuntimeError, match="out of luck"):
        scheme.step()
    ledger = scheme.stop()
    assert ledger["collected"] == ledger["dropped"]["shutdown"] >= 40
    assert ledger["consumed_unique"] == 0


def test_normalisers_move_between_updates_only(train):
    """Ranks that took different numbers of rollouts still agree on what normalisers have seen."""
    settings = {"envs": envs(2, autoreset="next_step"), "actor": {"normalize_obs": True}, "train_batch_size": 77,
                "microbatch_size": 20}
    for place in PLACES.values():
        result = train(ALGORITHMS["a2c"], updates=6, **settings, **place)
        count, = (value for name, value in result["state"].items() if name.endswith("count"))
        assert count == result["ledger"]["consumed_unique"] > 6 * 57


# Recorded and repeated


@pytest.mark.parametrize("settings", [
    {"num_col_workers": 3}, {"num_col_workers": 2, "num_grad_workers": 2},
    {"num_col_workers": 2, "num_grad_workers": 2, "grad_communication": ASYNC}], ids=str)
def test_a_recorded_run_is_repeated(make_scheme, tmp_path, settings):
    common = {**settings, "algo": ALGORITHMS["a2c"], "train_batch_size": 100, "microbatch_size": 40}
    path = str(tmp_path / "run.record")
    first = make_scheme(**common, record=path)
    for _ in range(6):
        first.step()
    ledger = first.ledger()["consumed_unique"]
    state = first.acting_state()
    first.stop()
    again = make_scheme(**common, runtime=None, replay=path)
    while not again.replay_is_over:
        again.step()
    torch.testing.assert_close(again.acting_state(), state, rtol=0, atol=0)
    assert again.ledger()["consumed_unique"] == ledger


def test_a_record_of_other_pieces_is_refused(make_scheme, tmp_path):
    path = str(tmp_path / "run.record")
    first = make_scheme(algo=ALGORITHMS["a2c"], microbatch_size=7, record=path)
    first.step()
    first.stop()
    with pytest.raises(ValueError, match="microbatch_size was 7, now it is 8"):
        make_scheme(algo=ALGORITHMS["a2c"], microbatch_size=8, runtime=None, replay=path)


# Networks whose slices are not independent


class BatchNormed(OnPolicyActor):
    """An actor that normalises over whatever batch it is given."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.norm = nn.BatchNorm1d(3)


def test_batch_normalisation_warns():
    given = envs()
    actor = BatchNormed.create_factory(given.observation_space, given.action_space)
    for microbatch_size, expected in ((None, 0), (8, 1)):
        scheme = Scheme(A2C.create_factory(), actor, GAEBuffer.create_factory(8), given, seed=1,
                        microbatch_size=microbatch_size)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            scheme.start()
        scheme.stop()
        assert ["batch normalisation" in str(each.message) for each in seen] == [True] * expected
