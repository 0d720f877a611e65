"""Check schemes in the simulated runtime: repeatability, virtual time, stopping and faults."""

from __future__ import annotations

import dataclasses
import threading

import pytest
import torch

from pytorchrl import ASYNC, PPO, Learner
from pytorchrl.agent.synthetic import SyntheticStorage, synthetic_agent
from pytorchrl.errors import ConfigError, InjectedFault, WorkerLostError

ALL_ASYNC = {"num_col_workers": 3, "col_communication": ASYNC, "num_grad_workers": 2, "grad_communication": ASYNC}


@pytest.fixture
def simulate(make_scheme, check_ledger):
    """Return a function that runs a simulated scheme to its end, and returns a dict of results."""
    def run(schedule_seed=0, updates=12, **settings):
        scheme = make_scheme(runtime="simulated", schedule_seed=schedule_seed, **settings)
        while scheme.version < updates:
            scheme.step()
            check_ledger(scheme)
        state, runtime = scheme.acting_state(), scheme.runtime
        final = scheme.stop()
        assert runtime.running == []
        return {"digest": runtime.simulation.digest, "events": list(runtime.simulation.last_events), "ledger": final,
                "parameters": state["all"], "seconds": runtime.now(), "metrics": scheme.metrics()}
    return run


def test_equal_seeds_give_equal_runs(simulate, some_pattern):
    first, again = simulate(7, updates=6, **some_pattern), simulate(7, updates=6, **some_pattern)
    assert torch.equal(first.pop("parameters"), again.pop("parameters"))
    assert first == again  # events, ledger, lags and virtual times are all equal


def test_different_schedule_seeds_give_different_interleavings(simulate, some_pattern):
    digests = {simulate(seed, updates=3, **some_pattern)["digest"] for seed in range(3)}
    # With central synchronous collection and central gradients there is only one thread, so there is only one schedule.
    counts = some_pattern["num_col_workers"], some_pattern["num_grad_workers"]
    has_one_thread = counts == (1, 1) and some_pattern["col_communication"] == "synchronous"
    assert len(digests) == (1 if has_one_thread else 3)


def test_synchronous_training_does_not_depend_on_the_schedule(simulate, make_scheme):
    settings = {"num_col_workers": 3, "num_grad_workers": 2}
    simulated = [simulate(seed, **settings)["parameters"] for seed in range(3)]
    scheme = make_scheme(runtime="threads", **settings)
    while scheme.version < 12:
        scheme.step()
    for parameters in simulated:
        assert torch.equal(parameters, scheme.acting_state()["all"])


def test_decentralized_updates_agree_with_real_ranks(simulate, make_scheme):
    settings = {"num_grad_workers": 2, "distribute_gradients": True}
    simulated = simulate(3, **settings)["parameters"]
    scheme = make_scheme(runtime="threads", **settings)
    while scheme.version < 12:
        scheme.step()
    torch.testing.assert_close(simulated, scheme.acting_state()["all"], atol=1e-6, rtol=1e-6)


def test_virtual_time_follows_from_the_costs(simulate):
    """Check the virtual time of a central, synchronous scheme.

    A rollout of 8 steps is used for 4 gradients and 4 updates, so 12 updates need three rollouts.
    """
    costs = {"step": 0.5, "grad": 2.0, "update": 0.25}
    assert simulate(costs=costs)["seconds"] == pytest.approx(3 * 8 * 0.5 + 12 * 2.25)


def test_a_straggler_delays_synchronous_rounds_and_asynchronous_ones_less(simulate):
    def seconds(slow, **settings):
        costs = {"start": 0, "message": 0, "step": 0.1, "grad": 0, "update": 0,
                 "step@*/CWorker 2": 1.0 if slow else 0.1}
        return simulate(costs=costs, num_col_workers=3, **settings)["seconds"]

    assert seconds(slow=True) == pytest.approx(10 * seconds(slow=False))
    one_in_flight = {"col_communication": ASYNC, "col_in_flight": 1}
    assert seconds(True, **one_in_flight) < 3 * seconds(False, **one_in_flight)


def test_preemption_happens_at_the_expected_time(simulate):
    """Check that the slow collector stops at 2 s, after the two steps that it must take.

    The two fast collectors finish the round after 0.8 s.
    """
    costs = {"start": 0, "message": 0, "step": 0.1, "grad": 0, "update": 0, "step@*/CWorker 3": 1.0}
    settings = {"num_col_workers": 3, "col_fraction_workers": 0.6, "fraction_samples": 0.25}
    result = simulate(costs=costs, **settings)
    assert result["metrics"]["rollouts_preempted"] == result["metrics"]["rollouts"] / 3
    assert result["seconds"] == pytest.approx(3 * 2.0)


def test_simulated_schemes_need_no_ray_and_leave_no_threads(run_forked, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("""
import sys, threading
from pytorchrl import PPO, GAEBuffer, OnPolicyActor, Scheme, VecEnv
from pytorchrl.envs.testing import CountingEnv
envs = VecEnv.create_factory(CountingEnv)
scheme = Scheme(PPO.create_factory(), OnPolicyActor.create_factory(envs.observation_space, envs.action_space),
                GAEBuffer.create_factory(8), envs, runtime="simulated", num_col_workers=2, num_grad_workers=2,
                col_communication="asynchronous", grad_communication="asynchronous")
for _ in range(5):
    scheme.step()
scheme.stop()
assert "ray" not in sys.modules
assert threading.active_count() == 1
""")
    result = run_forked(script, timeout=100)
    assert result.returncode == 0, result.stderr


def test_a_run_with_evaluation_is_reproducible(make_scheme, tmp_path):
    def train(name):
        scheme = make_scheme(runtime="simulated", schedule_seed=4, num_envs=2, **ALL_ASYNC)
        scheme.agent = dataclasses.replace(scheme.agent, test_envs_factory=scheme.agent.train_envs_factory)
        with Learner(scheme, 300, str(tmp_path / name), eval_every=100, eval_episodes=3, progress=False,
                     tensorboard=False) as learner:
            learner.train()
            evaluation = learner.evaluate(num_episodes=4)
            state = scheme.acting_state()["all"]
        return evaluation.returns, state, learner.ledger

    (returns, state, ledger), (returns_again, state_again, ledger_again) = train("a"), train("b")
    assert returns == returns_again
    assert ledger == ledger_again
    assert torch.equal(state, state_again)


# Faults


@pytest.mark.parametrize(("faults", "settings", "error"), [
    ("raise col.2 @ step 5", {"num_col_workers": 2}, InjectedFault),
    ("raise col.0 @ step 5", {}, InjectedFault),
    ("raise col.0 @ step 5", {"col_communication": ASYNC}, InjectedFault),
    ("raise grad.2 @ grad 2", {"num_grad_workers": 2}, InjectedFault),
    ("kill col.2 @ step 5", {"num_col_workers": 2}, WorkerLostError),
    ("kill col.2.1 @ step 5", ALL_ASYNC, WorkerLostError),
    ("kill grad.2 @ grad 2", {"num_grad_workers": 2}, WorkerLostError),
    ("kill grad.2 @ grad 2", ALL_ASYNC, WorkerLostError),
])
def test_a_fault_reaches_the_user_and_stop_is_clean(make_scheme, faults, settings, error):
    scheme = make_scheme(runtime="simulated", faults=faults, on_worker_failure="raise", **settings)

    def train():
        for _ in range(60):
            scheme.step()

    with pytest.raises(error):
        train()
    runtime, final = scheme.runtime, scheme.stop()
    places = sum(final[name] for name in ("in_flight", "queued", "consumed_unique", "resident", "evicted"))
    assert final["collected"] == places + sum(final["dropped"].values())
    assert runtime.running == []


def test_a_hang_takes_virtual_time_only(simulate):
    """Check that a collector that hangs for one hour delays the run by one hour of virtual time."""
    settings = {"num_col_workers": 2, "queue_timeout_s": 1e6, "worker_timeout_s": 1e6}
    assert 3600 < simulate(faults="hang col.1 3600s @ step 3", **settings)["seconds"] < 3700


def test_a_nan_gradient_is_skipped(make_scheme):
    scheme = make_scheme(runtime="simulated", faults="nan grad.0 @ grad 2")
    while scheme.version < 5:
        scheme.step()
    assert scheme.metrics()["updates_skipped_nan"] == 1


@pytest.mark.parametrize("runtime", ["threads", "simulated"])
def test_faults_work_in_every_runtime_of_this_process(make_scheme, runtime):
    scheme = make_scheme(runtime=runtime, faults="raise col.1 @ step 12", num_col_workers=2)
    while scheme.version < 4:  # make all updates of the first round; the fault is in the second round
        scheme.step()
    with pytest.raises(InjectedFault, match="GWorker 0/CWorker 1 at step 12"):
        scheme.step()


@pytest.mark.parametrize(("settings", "message"), [
    ({"faults": "kill col.1 @ step 1"}, "faults kills a worker, but"),
    ({"faults": "kill col.1 @ step 1", "num_col_workers": 2}, "a thread cannot be killed"),
    ({"faults": "stab col.1"}, "action must be one of"), ({"faults": 3}, "faults must be a string or None"),
    ({"schedule_seed": 3}, ": only with runtime=.simulated.; change that, or leave"),
    ({"costs": {"step": 1}}, ": only with runtime=.simulated.; change that, or leave"),
    ({"runtime": "simulated", "schedule_seed": -1}, "schedule_seed"),
    ({"runtime": "simulated", "costs": {"walk": 1}}, "keys are the operations"),
    ({"runtime": "simulated", "address": "local"}, "address=.local.: only with runtime=.ray. and remote workers"),
])
def test_contradictory_options_are_refused(make_scheme, settings, message):
    with pytest.raises(ConfigError, match=message):
        make_scheme(**settings)


def test_a_fault_cannot_kill_the_driver(make_scheme):
    scheme = make_scheme(runtime="simulated", faults="kill grad.0 @ grad 1")
    with pytest.raises(ConfigError, match="part of the driver"):
        scheme.step()


def test_the_user_may_step_from_another_thread_only_if_it_started_there(make_scheme):
    scheme = make_scheme(algo=PPO.create_factory(), runtime="simulated", num_col_workers=2)
    scheme.step()
    errors = []

    def step():
        try:
            scheme.step()
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=step)
    thread.start()
    thread.join()
    assert "is the task that runs" in errors[0]


def test_stop_waits_once_for_a_full_queue(make_scheme):
    """Check that `stop` waits once, not thirty times, if thirty rollouts cannot be enqueued because the queue is full.
    """
    algo, actor, _, envs = synthetic_agent()
    scheme = make_scheme(algo=algo, actor=actor, envs=envs, storage=SyntheticStorage, size=4, runtime="simulated",
                         num_col_workers=30, col_communication=ASYNC, col_in_flight=1, queue_size=1,
                         costs={"grad": 10.0})
    while scheme.version < 10:
        scheme.step()
    runtime, start = scheme.runtime, scheme.runtime.now()
    scheme.stop()
    assert runtime.now() - start < 1.0
