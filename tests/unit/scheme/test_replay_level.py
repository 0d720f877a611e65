"""Check whole schemes with replay shards between collection and gradients, and check which settings are rejected."""

from __future__ import annotations

import pytest

from pytorchrl import ASYNC, PPO
from pytorchrl.errors import ConfigError, InjectedFault

APEX = {"num_col_workers": 3, "col_communication": ASYNC, "grad_communication": ASYNC, "num_replay_workers": 2,
        "train_batch_size": 8}


@pytest.fixture
def make_level(make_replay_scheme):
    """Return a function that makes a scheme of the synthetic agent with replay shards."""
    return lambda agent=None, **settings: make_replay_scheme({"size": 4, "capacity": 400} | (agent or {}),
                                                             **(APEX | settings))


def make_updates(scheme, count):
    while scheme.version < count:
        scheme.step()


@pytest.mark.parametrize("settings", [
    {}, {"num_replay_workers": 1}, {"num_col_workers": 1}, {"grad_communication": "synchronous"},
    {"num_grad_workers": 2},
    {"num_grad_workers": 2, "grad_communication": "synchronous"}, {"runtime": "threads"},
    {"runtime": "threads", "num_replay_workers": 1, "num_col_workers": 1}],
    ids=["apex", "one-shard", "one-collector", "learner-in-turn", "gorila", "parallel", "threads", "threads-all-local"])
def test_updates_use_sampled_batches(make_level, check_ledger, settings):
    scheme = make_level(**settings)
    make_updates(scheme, 20)
    ledger = check_ledger(scheme)
    assert ledger["resident"] > 0
    assert ledger["consumed_unique"] == ledger["queued"] == 0
    assert ledger["consumed"] >= 20 * 8
    final = scheme.stop()
    assert final["in_flight"] == 0
    assert final["collected"] == final["resident"] + final["evicted"] + sum(final["dropped"].values())


def test_learning_starts_with_the_steps_of_all_shards(make_level):
    scheme = make_level(learning_starts=100)
    scheme.step()
    assert scheme.ledger()["resident"] >= 100


def test_learning_starts_follows_the_algorithm_if_not_given(make_level, monkeypatch):
    scheme = make_level()
    assert scheme.settings["learning_starts"] == 0
    assert scheme.settings["prefetch"] == 4


def test_ratios_bound_how_often_a_step_is_used(make_level):
    def used(updates, **settings):
        scheme = make_level(**settings)
        make_updates(scheme, updates)
        ledger = scheme.ledger()
        return ledger["consumed"] / (ledger["resident"] + ledger["evicted"])
    slow_learner, fast_learner = {"grad": 0.5, "step": 0.005}, {"grad": 1e-4, "step": 1e-2}
    assert used(5, costs=slow_learner) < 0.1
    assert used(5, costs=slow_learner, min_replay_ratio=1.0) > 0.5
    assert used(30, costs=fast_learner) > 2.0
    assert used(30, costs=fast_learner, max_replay_ratio=0.5) <= 0.5


def test_a_lost_shard_is_replaced_and_its_steps_count_as_lost(make_level, check_ledger):
    scheme = make_level(faults="kill shard.1 @ sample 5")
    make_updates(scheme, 60)
    assert scheme.metrics()["workers_restarted"] == 1
    assert check_ledger(scheme)["dropped"]["worker_lost"] > 0


@pytest.mark.parametrize("faults",
                         ["kill col.2 @ step 9", "delay shard.2 0.1s p=0.3", "kill shard.* p=0.02; kill col.* p=0.01"])
def test_the_ledger_balances_under_faults(make_level, check_ledger, faults):
    scheme = make_level(faults=faults)
    for _ in range(8):
        make_updates(scheme, scheme.version + 8)
        check_ledger(scheme)
    final = scheme.stop()
    places = sum(final[name] for name in ("in_flight", "queued", "consumed_unique", "resident", "evicted"))
    assert final["collected"] == places + sum(final["dropped"].values())


def test_a_shards_error_is_raised_by_the_next_call(make_level):
    scheme = make_level(faults="raise shard.2 @ add 3")
    with pytest.raises(InjectedFault, match="injected into GWorker 0/RWorker 2 at add 3"):
        make_updates(scheme, 1000)


def test_equal_schedules_give_equal_runs(make_level):
    def run(seed):
        scheme = make_level(schedule_seed=seed)
        make_updates(scheme, 15)
        digest, ledger = scheme.runtime.simulation.digest, scheme.ledger()
        scheme.stop()
        return digest, str(ledger)
    assert run(3) == run(3) != run(4)


OF_REPLAY = ": only with num_replay_workers; change that, or leave .* out"
OF_QUEUE = ": only without num_replay_workers; change that, or leave .* out"


@pytest.mark.parametrize(("settings", "text"), [
    ({"num_replay_workers": 0}, "num_replay_workers must be a whole number >= 1, got 0"),
    ({"num_replay_workers": None, "routing": "by_stream"}, f"routing='by_stream'{OF_REPLAY}"),
    ({"num_replay_workers": None, "learning_starts": 5},
     f"learning_starts=5{OF_REPLAY}.*; give start_steps of the algorithm instead"),
    ({"col_communication": "synchronous"}, "num_replay_workers needs col_communication='asynchronous'"),
    ({"num_passes": 2}, f"num_passes=2{OF_QUEUE}"),
    ({"queue_policy": "drop_oldest"}, f"queue_policy='drop_oldest'{OF_QUEUE}"),
    ({"routing": "any"}, r"routing must be one of \['round_robin', 'random', 'least_loaded', 'by_stream'\], got 'any'"),
    ({"num_replay_workers": None, "routing": "random"}, f"routing='random'{OF_REPLAY}"),
    ({"add_in_flight": 0}, "add_in_flight must be a whole number >= 1, got 0"),
    ({"min_replay_ratio": 0.0}, r"min_replay_ratio must be a number > 0.0 or None, got 0\.0"),
    ({"min_replay_ratio": 4.0, "max_replay_ratio": 2.0}, "min_replay_ratio 4.0 exceeds max_replay_ratio 2.0"),
    ({"train_batch_size": 512}, "size 400 divided among 2 shards is 200 per shard, less than train_batch_size 512"),
    ({"learning_starts": 20000}, "learning_starts 20000 exceeds size 400"),
    ({"record": "run.jsonl"}, "a run with num_replay_workers cannot be recorded"),
    ({"num_replay_workers": 1, "replay_worker_resources": {"num_cpus": 1}},
     "replay_worker_resources is for remote shards"),
])
def test_unused_or_invalid_settings_are_refused(make_level, settings, text):
    with pytest.raises(ConfigError, match=text):
        make_level(**settings)


def test_storages_of_on_policy_rollouts_are_refused(make_scheme):
    with pytest.raises(ConfigError, match=r"replay cannot use the rollouts with advantages of GAEBuffer, .*; "
                                          r"choose a storage whose data may be older: .*\bPERBuffer, .*VTraceBuffer"):
        make_scheme(algo=PPO.create_factory(), num_replay_workers=2, col_communication=ASYNC)


@pytest.mark.parametrize("settings", [{"address": "10.0.0.1:6379"}, {"faults": "kill shard.1 @ add 3"}])
def test_shards_can_be_remote_workers(make_level, settings):
    assert make_level(num_col_workers=1, runtime="ray", **settings).settings["num_replay_workers"] == 2
    with pytest.raises(ConfigError, match=r"without remote workers does not use one|there is no remote worker"):
        make_level(num_col_workers=1, num_replay_workers=1, runtime="ray", **settings)
