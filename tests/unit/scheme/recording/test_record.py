"""Check that a recorded run, on threads or simulated, is replayed bit for bit, or that the first difference is
reported."""

from __future__ import annotations

import random

import pytest
import torch

from pytorchrl import ASYNC, PPO, SYNC, linear
from pytorchrl.envs.testing import FaultyEnv
from pytorchrl.errors import ConfigError, EnvError, ReplayError
from tests.unit.scheme.recording.conftest import ALL_ASYNC, ASYNC_COLLECTION
from tests.conftest import seeds


@pytest.mark.parametrize("runtime", ["threads", "simulated"])
def test_every_pattern_is_replayed_bit_for_bit(runs, some_pattern, runtime):
    runs.twice(runtime=runtime, updates=6, **some_pattern)


@pytest.mark.parametrize("settings", [
    {"runtime": "threads"}, {"runtime": "threads", "inference_batch": 1}, {"runtime": "threads", **ALL_ASYNC},
    {"runtime": "simulated"}, {"runtime": "simulated", "faults": "kill col.2 @ step 15"},
    {"runtime": "simulated", "inference_batch": 3, "faults": "kill col.1 @ step 15; kill col.3 @ step 25"}])
def test_central_inference_is_replayed_bit_for_bit(runs, settings):
    runs.twice(inference="central", updates=15, **{**ASYNC_COLLECTION, **settings})


def test_a_replay_follows_the_record_and_not_the_schedule_seed(runs, make_scheme):
    """Check that a simulation with another schedule seed ends with different parameters.

    Therefore, only the record can explain why a replay has the same results as its run.
    """
    first, _ = runs.twice(runtime="simulated", schedule_seed=11, updates=8, **ALL_ASYNC)
    scheme = make_scheme(runtime="simulated", schedule_seed=12, **ALL_ASYNC)
    while scheme.version < 8:
        scheme.step()
    assert not torch.equal(scheme.acting_state()["all"], first["state"]["all"])


def random_queue_settings(rng):
    """Return random settings of the sample queue and of the learner's buffers.

    The effects of these settings depend on the order of events.
    """
    settings = {"queue_policy": rng.choice(("block", "drop_oldest", "drop_newest")),
                "queue_size": rng.choice((1, 2, 4)),
                "col_in_flight": rng.choice((1, 2)), "num_passes": rng.choice((1, 2, 3)),
                "minibatch_buffer_size": rng.choice((1, 2, 3)), "buffer": rng.choice(("ring", "ring", "circular")),
                "train_batch_size": rng.choice((None, 20, 40)), "max_policy_lag": rng.choice((None, 6, 20))}
    if settings["buffer"] == "ring":
        settings["ramp"] = rng.choice((None, True, False))
        if settings["max_policy_lag"] is not None:
            settings["on_policy_lag"] = rng.choice(("drop", "wait"))
    if settings.get("on_policy_lag") != "wait":
        settings["max_weight_sync_delay"] = rng.choice((None, 30))
    if rng.random() < 0.5:
        settings |= {"replay_proportion": rng.choice((0.5, 2.0)), "replay_slots": 4}
    return settings


def scenario(seed):
    """Return the settings of a random run with a fault."""
    rng = random.Random(f"record {seed}")
    col, grad = rng.choice((2, 3)), rng.choice((1, 2, 3))
    settings = {"num_col_workers": col, "num_grad_workers": grad, "grad_communication": rng.choice((SYNC, ASYNC)),
                "col_communication": rng.choice((SYNC, ASYNC, ASYNC)), "runtime": "simulated", "schedule_seed": seed,
                "on_worker_failure": rng.choice(("restart", "restart", "ignore", "raise")), "worker_timeout_s": 3.0}
    if settings["col_communication"] is ASYNC:
        settings |= {"col_in_flight": rng.choice((1, 2)), "queue_size": rng.choice((1, 4)),
                     "broadcast_interval": rng.choice((1, 3))}
    elif rng.random() < 0.5:
        settings |= {"col_fraction_workers": 0.5, "fraction_samples": 0.5, "on_straggler": ("cut", "finish")[seed % 2]}
    settings["costs"] = {name: ("exponential",
                                10 ** rng.uniform(-4, -1)) for name in ("message", "step", "grad", "update")}
    if grad > 1 and settings["grad_communication"] is ASYNC and rng.random() < 0.7:
        settings |= {"aggregate": rng.randint(1, grad), "max_grad_lag": rng.choice((0, 1)),
                     "lag_policy": rng.choice(("apply", "scale", "drop")), "updates_per_step": rng.choice((1, 3))}
    worker = rng.choice(("col.1", "col.2", "grad.1" if grad > 1 else "col.1"))
    action = rng.choice(("kill", "kill", "hang", "delay", "nan"))
    if action in ("delay", "nan") and grad > 1 and settings["grad_communication"] is SYNC:
        # These two faults never kill a rank. If a rank were lost in a recorded run, the run would end when the other
        # ranks reached their deadlines.
        settings["distribute_gradients"] = rng.random() < 0.5
    settings["faults"] = {
        "kill": f"kill {worker} p=0.03",
        "hang": f"hang {worker} @ {'grad' if 'grad' in worker else 'step'} {rng.randint(1, 20)}",
        "delay": "delay col.* 2s p=0.05", "nan": "nan grad.* p=0.2"}[action]
    return settings


@pytest.mark.parametrize("seed", seeds((0, 1, 7, 19, 21), 25))
def test_random_runs_with_learner_buffers_are_replayed(runs, seed):
    """Check that a replay drops the same items, uses the same slots and calls the same workers as the recorded run.

    The settings of the learner's buffers are random; the usual seeds include every value of each. The reports of an
    update may differ in the number of dropped train batches, because the collector thread continues while an update is
    reported.
    """
    rng = random.Random(f"buffers {seed}")
    settings = {"num_col_workers": rng.choice((2, 3)), "col_communication": ASYNC, "grad_communication": ASYNC,
                "num_grad_workers": rng.choice((1, 1, 2)), **random_queue_settings(rng)}
    where = {"runtime": "simulated", "schedule_seed": seed, "costs": {
        name: ("exponential", 10 ** rng.uniform(-4, -1)) for name in ("message", "step", "grad", "update")}}
    if rng.random() < 0.5:
        settings["faults"] = rng.choice(("kill col.1 p=0.01", "nan grad.* p=0.1", "delay col.* 2s p=0.05"))
    if rng.random() < 0.2 and "kill" not in settings.get("faults", ""):
        where = {"runtime": "threads"}
    first, again = runs.twice(updates=20, **settings, **where)
    if settings["num_grad_workers"] == 1:
        assert again["numbers"] == first["numbers"]


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.thorough), 5])
def test_ranks_sum_in_the_same_order(runs, size):
    """Check that a run and its replay sum the gradients of the ranks in the same order.

    With four or more ranks, the reduction that is built into gloo would not add the gradients in rank order.
    """
    runs.twice(runtime="threads", num_grad_workers=size, distribute_gradients=True, updates=6)


@pytest.mark.parametrize("communication", [SYNC, ASYNC])
def test_moments_of_advantages_are_replayed_after_losses(runs, communication):
    """Check that a replay is exact if a worker is lost after sending the moments of its advantages.

    The other workers use these moments, although the lost worker computes no gradient.
    """
    algo = PPO.create_factory(num_epochs=1, num_mini_batch=2, lr=1e-3, advantage_normalization="batch")
    for number in (2, 3):
        runs.path = f"{runs.path}{number}"
        runs.twice(runtime="simulated", algo=algo, num_grad_workers=2, num_col_workers=2,
                   col_communication=communication, updates=6, faults=f"kill grad.1 @ grad {number}")


@pytest.mark.parametrize("settings", [
    {"runtime": "threads", "num_col_workers": 3}, {"runtime": "simulated", "num_col_workers": 3},
    {"runtime": "simulated", "num_col_workers": 3, "faults": "kill col.2 p=0.03"},
    {"runtime": "simulated", "num_grad_workers": 3, "distribute_gradients": True}])
def test_rests_of_preempted_rollouts_are_replayed(runs, settings):
    if settings["runtime"] == "simulated":
        settings = {**settings, "costs": {"step": ("exponential", 0.1)}}
    runs.twice(updates=12, col_fraction_workers=0.6, fraction_samples=0.25, on_straggler="finish", **settings)


@pytest.mark.parametrize("seed", seeds((0, 5, 6, 12, 14, 21, 24, 26, 27, 30, 32, 34, 37, 48, 51), 60))
def test_random_runs_with_faults_are_replayed(runs, seed):
    """Check that random runs with faults are replayed.

    Workers are lost, hang, and are replaced or ignored. Rounds are preempted, updates are skipped, and some runs end
    with an error. The usual seeds include every value of each setting, every pair of communications with one and with
    several gradient workers, and every kind of fault with each communication.
    """
    runs.twice(updates=8, **scenario(seed))


def test_a_lost_worker_is_lost_again_at_the_same_event(runs):
    """Check that the loss of a worker that the user killed is replayed at the same event."""
    killed = []

    def kill(scheme):
        if scheme.version > 5 and not killed:
            handle = scheme._worker.local_worker.remote_workers[1]
            killed.append(handle.runtime.kill(handle))
    settings = {"queue_size": 2, **ASYNC_COLLECTION}
    first = runs.record(between=kill, updates=40, runtime="simulated", costs={"grad": 0.2}, **settings)
    assert [event for part in runs.lines() for event in part[2] if event[0] in ("lost", "replaced")
            ] == [["lost", 1], ["replaced", 1]]
    again = runs.replay(**settings)
    assert first["restarts"] == again["restarts"] == 1
    assert torch.equal(first["state"]["all"], again["state"]["all"])


def test_an_error_is_raised_again_at_the_same_point(runs):
    settings = {"env_fn": FaultyEnv, "env_kwargs": {"fault": "step", "at": 20}, **ALL_ASYNC}
    first, again = runs.twice(runtime="threads", updates=1000, **settings)
    assert isinstance(first["error"], EnvError)
    assert str(again["error"]) == str(first["error"])


@pytest.mark.every(2)
@pytest.mark.parametrize("workers", [
    ALL_ASYNC, ASYNC_COLLECTION, {"num_grad_workers": 2}, {"num_col_workers": 2},
    {"num_grad_workers": 2, "distribute_gradients": True},
], ids=["all-async", "async-collection", "parallel", "parallel-collection", "decentralized"])
@pytest.mark.parametrize("name", ["lr", "entropy_coef"])
def test_changes_by_the_user_are_replayed_at_the_same_update(runs, workers, name):
    """Check that a user's change of a parameter is replayed at the same update.

    Two other actions must not affect the replay: in both runs, a second change raises an error, and the recorded
    run reads the weights after each step.
    """
    algo = PPO.create_factory(num_epochs=2, num_mini_batch=2, lr=linear(1e-2, 0.0))

    def change(scheme):
        if scheme.version == 5:
            scheme.update_algorithm_parameter(name, 1e-4)
            with pytest.raises(ConfigError):
                scheme.update_algorithm_parameter(name, -1.0)

    def look_and_change(scheme):
        scheme.acting_state()
        change(scheme)
    first = runs.record(updates=8, between=look_and_change, algo=algo, runtime="threads", **workers)
    again = runs.replay(between=change, algo=algo, **workers)
    assert torch.equal(first["state"]["all"], again["state"]["all"])
    with pytest.raises(ReplayError, match=f"the record has parameter {name} 0.0001, the replay"):
        runs.replay(algo=algo, **workers)
    with pytest.raises(ReplayError, match=f"the record has .*, the replay has parameter {name} 0.0001"):
        runs.replay(between=lambda scheme: scheme.update_algorithm_parameter(name,
                                                                             1e-4) if scheme.version == 3 else None,
                    algo=algo, **workers)


def test_parameter_changes_are_refused_with_a_gradient_thread(make_scheme, tmp_path):
    """Check that parameters cannot be changed in a recorded run if a thread computes gradients.

    Such a change could occur while a gradient is being computed.
    """
    scheme = make_scheme(record=tmp_path / "run", grad_communication=ASYNC)
    scheme.step()
    with pytest.raises(ConfigError, match=r"entropy_coef cannot be changed while a run .* is recorded"):
        scheme.update_algorithm_parameter("entropy_coef", 0.1)


def test_a_killed_run_is_replayed_to_the_end_of_its_record(runs, monkeypatch):
    """Check that a record with an incomplete last line is replayed up to its last complete entry."""
    monkeypatch.setattr("pytorchrl.scheme.recording.record._WRITE_INTERVAL_S", 0.0)
    first = runs.record(updates=12, runtime="threads", **ALL_ASYNC)
    with open(runs.path, encoding="utf-8") as file:
        whole = file.read()
    cut = whole[:whole.rindex('["UWorker"') + 9]
    with open(runs.path, "w", encoding="utf-8") as file:
        file.write(cut)
    with pytest.warns(UserWarning, match="has no last line, because its run was killed or the file was cut off"):
        again = runs.replay(**ALL_ASYNC)
    assert first["version"] - 2 <= again["version"] < first["version"]


@pytest.mark.parametrize("seed", seeds(4, 60))
def test_a_record_that_is_cut_off_anywhere_is_replayed_to_its_end(runs, monkeypatch, seed):
    """Check that a replay of such a record ends with the parameters that the run had at that update, and stops.

    The settings are random, and so is the place where the record ends, often within a line.
    """
    monkeypatch.setattr("pytorchrl.scheme.recording.record._WRITE_INTERVAL_S", 0.0)
    rng = random.Random(f"cut {seed}")
    settings = scenario(seed)
    if settings["col_communication"] is settings["grad_communication"] is ASYNC and rng.random() < 0.5:
        settings |= random_queue_settings(rng)
        settings.pop("broadcast_interval")
    states = {0: None}

    def note(scheme):
        states[scheme.version] = None if settings.get("distribute_gradients") else scheme.acting_state()
    runs.record(updates=12, between=note, **settings)
    with open(runs.path, encoding="utf-8") as file:
        lines = list(file)
    whole = rng.randint(1, len(lines) - 1)
    rest = lines[whole][:rng.choice((0, rng.randint(0, len(lines[whole]) - 2)))]
    with open(runs.path, "w", encoding="utf-8") as file:
        file.write("".join(lines[:whole]) + rest)
    with pytest.warns(UserWarning, match="has no last line"):
        again = runs.replay(**settings)
    state = states.get(again["version"])  # a step may make several updates
    assert state is None or all(torch.equal(state[name], value) for name, value in again["state"].items())


def test_a_replayed_run_cannot_continue_after_its_end(runs, make_scheme):
    runs.record(updates=3, runtime="threads", **ALL_ASYNC)
    scheme = make_scheme(runtime=None, replay=runs.path, **ALL_ASYNC)
    while not scheme.replay_is_over:
        scheme.step()
    with pytest.raises(ReplayError, match="ends after 3 updates"):
        scheme.step()


@pytest.mark.parametrize("workers", [{}, {"grad_communication": ASYNC}, ALL_ASYNC], ids=["sync", "thread", "all"])
def test_a_replay_ends_where_a_run_with_skipped_updates_ended(runs, workers):
    first = runs.record(runtime="simulated", schedule_seed=5, faults="nan grad.* p=0.5", updates=6, **workers)
    again = runs.replay(faults="nan grad.* p=0.5", **workers)
    assert first["version"] == again["version"]


def test_a_record_without_updates_ends_immediately(runs, make_scheme):
    make_scheme(record=runs.path).start().stop()
    scheme = make_scheme(runtime=None, replay=runs.path)
    assert scheme.replay_is_over
    with pytest.raises(ReplayError, match="ends after 0 updates"):
        scheme.step()


@pytest.mark.parametrize("workers", [{}, ALL_ASYNC], ids=["sync", "all"])
def test_an_interrupted_run_ends_at_its_last_update(runs, make_scheme, workers):
    scheme = make_scheme(record=runs.path, **workers)
    for _ in range(4):
        scheme.step()
    scheme._worker.updater.before_step = _interrupt
    with pytest.raises(KeyboardInterrupt):
        scheme.step()
    scheme.stop()
    assert runs.replay(**workers)["version"] == 4


def _interrupt():
    raise KeyboardInterrupt


def test_an_error_that_does_not_recur_is_reported(runs, monkeypatch):
    """Check that a replay ends with an error if the recorded error, such as a lack of memory, does not occur again."""
    right = PPO.compute_gradients

    calls = iter(range(10**6))

    def compute(self, batch):
        if next(calls) == 9:
            raise EnvError("out of memory, say")
        return right(self, batch)
    with monkeypatch.context() as patch:
        patch.setattr(PPO, "compute_gradients", compute)
        assert runs.record()["error"] is not None
    with pytest.raises(ReplayError, match="after 9 updates did not occur again"):
        runs.replay()


def test_replacements_are_not_limited_in_a_replay(runs):
    """Check that a replay does not limit replacements.

    No time passes in a replay, so the usual limit, ten restarts of a worker in ten minutes, would soon be exceeded.
    """
    settings = {"num_col_workers": 2, "faults": "kill col.2 p=0.02", "size": 4,
                "algo": PPO.create_factory(num_epochs=1, num_mini_batch=1, lr=1e-3)}
    first = runs.record(runtime="simulated", costs={"grad": 120.0}, updates=130, **settings)
    assert first["error"] is None
    assert first["restarts"] > 11
    assert runs.replay(**settings)["restarts"] == first["restarts"]


def test_an_error_of_the_collector_thread_is_raised_in_a_replay(runs, monkeypatch):
    runs.record(runtime="threads", **ASYNC_COLLECTION)
    monkeypatch.setattr("pytorchrl.scheme.transport.messages.Rollout.numbers", property(lambda rollout: 1 / 0))
    with pytest.raises(ZeroDivisionError):
        runs.replay(**ASYNC_COLLECTION)


def test_a_replay_may_be_stopped_before_its_end(runs, make_scheme, check_ledger):
    runs.record(updates=12, runtime="threads", **ALL_ASYNC)
    scheme = make_scheme(runtime=None, replay=runs.path, **ALL_ASYNC)
    for _ in range(5):
        scheme.step()
    scheme.stop()
    check_ledger(scheme)
