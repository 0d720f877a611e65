"""Tests of the ledger under faults, for each architecture and random schedules.

The ledger counts each step in exactly one state.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from pytorchrl import A2C, OnPolicyActor, Scheme, VanillaOnPolicyBuffer, VecEnv
from pytorchrl.agent.synthetic import SyntheticStorage, synthetic_agent
from pytorchrl.envs.testing import CountingEnv

KILLED_COLLECTOR, KILLED_SHARD, KILLED_LEARNER = "kill col.* p=0.004", "kill shard.* p=0.02", "kill grad.* p=0.05"
LOST_RANKS = "kill grad.1 @ grad 6; kill grad.3 @ update 14; kill grad.2 @ grad 20"
SLOW_LEARNER, TWICE = {"grad": 0.4}, "kill col.1 @ step 30; kill col.2 @ step 70"
TWO_COLLECTORS = {"num_col_workers": 2}

CASES = {
    "a3c, collector": ("a3c", {**TWO_COLLECTORS, "updates_per_step": 3, "faults": KILLED_COLLECTOR}),
    "a3c, gradient worker": ("a3c", {"num_grad_workers": 3, "updates_per_step": 3, "faults": KILLED_LEARNER}),
    "a3c, both, late ones dropped": ("a3c",
                                     {**TWO_COLLECTORS, "num_grad_workers": 3, "updates_per_step": 3, "max_grad_lag": 0,
                                             "lag_policy": "drop", "faults": f"{KILLED_COLLECTOR}; {KILLED_LEARNER}"}),
    "ddppo, ranks": ("ddppo", {"num_grad_workers": 3, "faults": LOST_RANKS}),
    "ddppo, ranks with collectors": ("ddppo", {**TWO_COLLECTORS, "num_grad_workers": 3, "faults": f"{LOST_RANKS}; "
                                               f"{KILLED_COLLECTOR}"}),
    "rapid, ranks": ("rapid", {"num_grad_workers": 3, "train_batch_size": 10, "faults": LOST_RANKS}),
    "rapid, ranks that use items again": ("rapid", {"num_grad_workers": 3, "num_passes": 2, "minibatch_buffer_size": 2,
                                                    "faults": f"{LOST_RANKS}; {KILLED_COLLECTOR}"}),
    "microbatch, collector": ("microbatch", {"num_col_workers": 3, "train_batch_size": 32, "microbatch_size": 10,
                                             "faults": KILLED_COLLECTOR}),
    "microbatch, collector, ahead": ("microbatch",
                                     {"num_col_workers": 3, "train_batch_size": 32, "microbatch_size": 10,
                                      "prefetch": 1,
                                                    "faults": KILLED_COLLECTOR}),
    "apex, collector": ("apex", {"num_replay_workers": 2, "train_batch_size": 8, "faults": KILLED_COLLECTOR}),
    "apex, shard": ("apex", {"num_replay_workers": 3, "train_batch_size": 8, "faults": KILLED_SHARD}),
    "apex, gradient worker": ("apex", {"num_replay_workers": 2, "num_grad_workers": 2, "train_batch_size": 8,
                                       "faults": f"{KILLED_LEARNER}; {KILLED_SHARD}"}),
    "apex, slow shard": ("apex", {"num_replay_workers": 2, "train_batch_size": 8, "faults": "delay shard.2 3s p=0.1"}),
    "apex, hung shard": ("apex", {"num_replay_workers": 2, "train_batch_size": 8, "worker_timeout_s": 2.0,
                                  "faults": "hang shard.2 @ add 9"}),
    "apex, slow adds": ("apex",
                        {"num_replay_workers": 2, "train_batch_size": 8, "add_in_flight": 1, "faults": KILLED_COLLECTOR,
                                 "costs": {"add": 0.5}}),
    "impala, central inference": ("impala", {"num_col_workers": 3, "inference": "central", "train_batch_size": 10,
                                             "faults": KILLED_COLLECTOR}),
    "impala, central inference, gradient worker": (
        "impala", {"num_grad_workers": 2, "inference": "central", "train_batch_size": 10,
                   "faults": f"{KILLED_COLLECTOR}; {KILLED_LEARNER}"}),
    "apex, central inference": ("apex", {"num_replay_workers": 2, "inference": "central", "train_batch_size": 8,
                                         "faults": KILLED_COLLECTOR}),
    **{f"{name}, {what}": (name, {"train_batch_size": 10, **settings}) for name in ("impala", "appo") for what,
       settings in {
        "collector": {"faults": KILLED_COLLECTOR},
        "gradient worker": {"num_grad_workers": 2, "faults": KILLED_LEARNER},
        "full queue": {"queue_size": 1, "costs": SLOW_LEARNER, "faults": TWICE},
        "full queue, oldest dropped": {"queue_size": 1, "queue_policy": "drop_oldest", "costs": SLOW_LEARNER,
                                       "faults": TWICE},
        "full queue, newest dropped": {"queue_size": 1, "queue_policy": "drop_newest", "costs": SLOW_LEARNER},
        "old data dropped": {"max_policy_lag": 1, "on_policy_lag": "drop", "queue_size": 16, "num_passes": 3,
                             "minibatch_buffer_size": 2, "faults": KILLED_COLLECTOR},
    }.items()},
}


@pytest.fixture
def make():
    """Return a function that makes the simulated scheme of a case.

    The agent is synthetic, except with microbatches, which need real gradients.
    """
    schemes = []

    def make_(name, settings, seed):
        if name == "microbatch":
            envs = VecEnv.create_factory(CountingEnv, None, 2)
            agent = (A2C.create_factory(),
                     OnPolicyActor.create_factory(envs.observation_space, envs.action_space, hidden_sizes=(4,)),
                     VanillaOnPolicyBuffer.create_factory(4), envs)
        else:
            agent = synthetic_agent(4, capacity=200 if name == "apex" else None)
        rng = random.Random(seed)
        costs = {cost: ("exponential", 10 ** rng.uniform(-4, -1)) for cost in ("step", "message", "grad", "update",
                                                                               "add", "sample")}
        schemes.append(getattr(Scheme, name)(*agent, **{
            "seed": seed, "schedule_seed": seed, "runtime": "simulated", **settings,
            "costs": costs | settings.get("costs", {})}))
        return schemes[-1]
    yield make_
    for scheme in schemes:
        scheme.stop()


# IMPALA and APPO are equal but for the algorithm, which is synthetic here, so each has every second of these cases.
OTHERS = [*[name for name in CASES if name.startswith("impala, ")][3::2],
          *[name for name in CASES if name.startswith("appo, ")][::2]]


@pytest.mark.parametrize("case", [
    pytest.param(name, marks=[pytest.mark.thorough] if name in OTHERS else []) for name in CASES])
def test_every_step_is_in_one_place(make, check_ledger, case, monkeypatch):
    given = []
    insert = SyntheticStorage.insert_data_slice

    def watch(storage, rollouts):
        given.extend(rollout.reward.reshape(-1) for rollout in rollouts)
        insert(storage, rollouts)
    monkeypatch.setattr(SyntheticStorage, "insert_data_slice", watch)
    name, settings = CASES[case]
    faults = settings.get("faults", "")
    # In A3C, the ledger does not include the steps of a gradient that a lost worker had not finished.
    loses_steps = name != "a3c" and ("shard" in faults.replace("delay shard", "") or "grad" in faults)

    def have_faults_occurred():
        dropped = total["queue_full"] + total["policy_lag"] + total["gradient_lag"]
        return (bool(total["restarts"]) == ("kill" in faults or "hang" in faults)
                and (total["worker_lost"] > 0 or not loses_steps) and (dropped > 0 or "dropped" not in case))
    total: Counter[str] = Counter()
    for seed in range(2):
        if seed and have_faults_occurred():
            break
        given.clear()
        scheme = make(name, settings, seed)
        for number in range(12 if name == "apex" else 9):
            target = scheme.version + 4
            while scheme.version < target:
                scheme.step()
                check_ledger(scheme)
            if number == 6:
                ledger = scheme.drain()
                assert ledger["in_flight"] == ledger["queued"] == 0
        total["restarts"] += scheme.metrics()["workers_restarted"]
        final = scheme.stop()
        assert check_ledger(scheme) == final
        assert final["in_flight"] == final["queued"] == 0
        assert (final["resident"] > 0) == (name == "apex")
        total.update(final["dropped"])
        if settings.get("num_passes", 1) == 1:  # with several passes, a rollout is inserted several times
            times = Counter(int(step) for part in given for step in part)
            assert not times or max(times.values()) == 1
    assert have_faults_occurred(), total
