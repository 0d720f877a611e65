"""Defects of other libraries, by name and version: the same stimulus, and what happens here instead.

Lost and hung workers, threads, errors between processes, waits, updates that are not finite, signals, stopping. Each
test says in its docstring what was seen elsewhere; most behaviours are tested in breadth beside their own modules.
"""

from __future__ import annotations

import inspect
import multiprocessing
import pickle
import threading
import traceback
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pytorchrl import A2C, ASYNC, PPO, GAEBuffer, VecEnv, errors
from pytorchrl.envs.testing import CountingEnv, FaultyEnv
from pytorchrl.errors import EnvError, WeightsError, WorkerLostError
from pytorchrl.runtime import Future, Journal, Outcome
from pytorchrl.runtime.simulated import SimulatedRuntime
from pytorchrl.scheme.transport.messages import Weights
from pytorchrl.scheme.supervision.supervisor import Supervisor
from pytorchrl.scheme.transport.requests import Requests
from tests.unit.scheme.peers import simulated, step_until, step_on, raises_within

pytestmark = pytest.mark.timeout(60)


# Workers that hang or die


def test_torchrl_0_14_1_waits_for_a_silent_worker_without_limit(make_scheme):
    """Its collector blocks on the queue of a child process that will never send. Here there is a deadline."""
    scheme = make_scheme(**simulated(faults="hang col.2 @ step 6", worker_timeout_s=3.0, on_worker_failure="raise"))
    start = scheme.start() and scheme.runtime.now()
    with pytest.raises(WorkerLostError, match=r"CWorker 2 hangs: no result for"):
        step_on(scheme)
    assert scheme.runtime.now() - start < 15 + 2  # before a first result five times as long, for start-up counts


def test_rllib_2_60_calls_a_hung_runner_healthy_and_never_replaces_it(make_scheme):
    """A runner that answers nothing stays in its list of healthy ones and gets a new call each iteration.

    Here: replaced.
    """
    scheme = make_scheme(**simulated(faults="hang col.2 @ step 6", worker_timeout_s=3.0))
    hung = scheme.start().local_worker.remote_workers[1]
    step_until(scheme, 80)
    assert scheme.metrics()["workers_restarted"] == 1
    replacement = scheme.update_worker.local_worker.remote_workers[1]
    assert replacement is not hung
    assert replacement.native.worker.collected_steps > 0


def test_rllib_2_60_ends_the_run_with_a_dead_learner(make_scheme, check_ledger):
    """One learner's process dies, and training is over. Here another gradient worker takes its place."""
    scheme = make_scheme(**simulated(num_grad_workers=2, num_col_workers=1, faults="kill grad.2 @ grad 3"))
    step_until(scheme, 12)
    assert scheme.metrics()["workers_restarted"] == 1
    check_ledger(scheme)


def test_gymnasium_1_4_0_gives_the_late_result_of_a_call_that_timed_out_to_the_next_call(supervised):
    """After `step_wait` times out, the next `step` returns the previous step's result.

    Here a late answer finds nobody.
    """
    requests, runtime, replaced = supervised
    late, fresh = Future("a", "late"), Future("a", "fresh")
    requests.add(0, late)
    runtime.sleep(301)  # before a first result, the limit is five times the sixty seconds
    assert list(requests.poll(0.0)) == []
    runtime.sleep(1)
    assert list(requests.poll(0.0)) == []
    assert replaced == [0]
    requests.add(0, fresh)
    runtime.done = [late, fresh]
    assert list(requests.poll(0.0)) == [(0, "result of fresh")]


@pytest.fixture
def supervised():
    """The calls of one supervised worker whose answers a test gives: (requests, runtime, indices replaced)."""
    runtime, replaced = SimulatedRuntime(), []
    runtime.done = []
    runtime.wait = lambda futures, timeout_s: [future for future in futures if future in runtime.done]
    runtime.outcome = lambda future, timeout_s: Outcome(future.worker, f"result of {future.native}")
    supervisor = Supervisor([SimpleNamespace(name="a")], replaced.append, runtime)
    yield Requests(runtime, supervisor, Journal(), lambda value: 1.0, lambda value: (), lambda index: None,
                   lambda index: None), runtime, replaced
    runtime.close()


def test_pytorchrl_2021_takes_the_first_of_no_results_after_sixty_seconds(make_scheme):
    """Revision 9e45189 indexes what came within 60 s, also if nothing did: `IndexError`. Here waiting goes on."""
    scheme = make_scheme(**simulated(col_communication=ASYNC, faults="delay col.* 130s @ step 6",
                                     worker_timeout_s=1000.0))
    start = scheme.start() and scheme.runtime.now()
    step_until(scheme, 12)
    assert scheme.runtime.now() - start > 60
    assert scheme.metrics()["workers_restarted"] == 0


# Errors on their way to the user


def test_torchrl_0_14_1_does_not_pass_on_the_traceback_of_a_child(make_scheme):
    """The parent hears that a worker failed, not why or where. Here the traceback ends where the environment raised."""
    scheme = make_scheme(FaultyEnv, {"fault": "step", "at": 20}, num_col_workers=2)
    error = raises_within(5, EnvError, scheme, "faulty step")
    text = "".join(traceback.format_exception(error))
    assert "RuntimeError: faulty step" in text
    assert "testing.py" in text


def test_torchrl_0_14_1_only_logs_what_ends_its_collector_thread(make_scheme):
    """Whoever iterates over its Ray collector then waits for ever. Here the next call raises it."""
    scheme = make_scheme(num_col_workers=2, col_communication=ASYNC)
    scheme.step()

    def fail(*args):
        raise ZeroDivisionError("in the thread")
    scheme.update_worker.local_worker.collector.strategy.step = fail
    error = raises_within(5, ZeroDivisionError, scheme, "in the thread")
    assert any(frame.name == "fail" for frame in traceback.extract_tb(error.__traceback__))


@pytest.mark.parametrize("thread", ["collector", "updater"])
def test_pytorchrl_2021_waits_for_ever_after_one_of_its_threads_has_died(make_scheme, thread):
    """Revision 9e45189 looks at the queue only, which nobody fills any more.

    Here the thread's error is raised, each time.
    """
    settings = {"num_col_workers": 2,
                "col_communication": ASYNC} if thread == "collector" else {"grad_communication": ASYNC}
    scheme = make_scheme(**settings)
    scheme.step()

    def fail(*args, **kwargs):
        raise ZeroDivisionError(f"in the {thread}")
    worker = scheme.update_worker.local_worker
    if thread == "collector":
        worker.collector.step = fail
    else:
        worker.algo.compute_gradients = fail
    raises_within(5, ZeroDivisionError, scheme, f"in the {thread}")
    raises_within(1, ZeroDivisionError, scheme, f"in the {thread}")


def test_rllib_2_60_turns_every_error_of_a_worker_into_sys_exit():
    """The caller sees that an actor died; what was raised is gone. Here every class of ours crosses a process whole."""
    classes = [value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, Exception)]
    assert len(classes) > 20
    for cls in classes:
        error = pickle.loads(pickle.dumps(cls("CWorker 2: step 7 raised")))
        assert type(error) is cls
        assert str(error) == "CWorker 2: step 7 raised"


def test_gymnasium_1_4_0_has_an_error_that_does_not_pickle():
    """One of its exceptions takes more arguments than it passes on. None of ours has a constructor of its own."""
    classes = [value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, Exception)]
    assert [cls.__name__ for cls in classes if "__init__" in vars(cls) or "__new__" in vars(cls)] == []


def test_stable_baselines3_2_9_2_reports_an_error_of_a_subprocess_as_a_bare_eof_error():
    """The pipe's end is all one hears. Here it is an `EnvError` with worker, environment and text."""
    before = set(multiprocessing.active_children())
    envs = VecEnv.create_factory(FaultyEnv, {"fault": "step", "at": 1}, 2, backend="async",
                                 on_env_error="raise")(seed=1)
    envs.reset()
    envs.step(np.zeros(2, np.int64))
    with pytest.raises(EnvError, match=r"env 0: step raised.*RuntimeError: faulty step"):
        envs.step(np.zeros(2, np.int64))
    envs.close()
    assert set(multiprocessing.active_children()) == before


def test_stable_baselines3_2_9_2_waits_for_a_hung_environment_without_limit(make_scheme):
    """`SubprocVecEnv` reads from a pipe for ever. Here the worker that holds the environment has a deadline."""
    released = threading.Event()

    class Hangs(CountingEnv):
        def step(self, action):
            if self._num_steps == 20:
                released.wait(50)
            return super().step(action)
    scheme = make_scheme(Hangs, num_col_workers=2, worker_timeout_s=0.5, on_worker_failure="raise")
    try:
        raises_within(10, WorkerLostError, scheme, "hangs: no result for")
    finally:
        released.set()


def test_pytorchrl_2021_takes_every_exception_for_the_end_of_an_epoch(make_scheme):
    """Revision 9e45189 catches whatever the next mini-batch raises, and asks for new data.

    Here only the end is the end.
    """
    class Broken(GAEBuffer):
        def generate_batches(self, *args, **kwargs):
            yield from list(super().generate_batches(*args, **kwargs))[:1]
            raise ZeroDivisionError("a bug in the storage")
    scheme = make_scheme(storage=Broken)
    scheme.step()
    raises_within(5, ZeroDivisionError, scheme, "a bug in the storage")


# Weights, gradients and what is not finite


def test_pytorchrl_2021_loads_the_version_number_as_weights(make_scheme):
    """`CWorker.set_weights` of revision 9e45189 unpacks its message in the wrong order.

    Here a message names its parts.
    """
    scheme = make_scheme(num_col_workers=2)
    scheme.step()
    worker = scheme.update_worker.local_worker.remote_workers[0].native.worker
    weights = worker.get_weights()
    state = {name: np.full_like(value, 0.25) for name, value in weights.state.items()}
    worker.set_weights(Weights(17, state, dict(weights.parameters)))
    assert worker.version == 17
    assert torch.equal(worker.algo.acting_state()["all"], torch.full_like(worker.algo.acting_state()["all"], 0.25))


def test_pytorchrl_2021_never_awaits_the_call_that_sets_weights(make_scheme, monkeypatch):
    """Revision 9e45189 drops the call's result, so that nobody hears when it fails. Here weights go with a request."""
    scheme = make_scheme(num_col_workers=2)
    scheme.step()
    local = scheme.update_worker.local_worker.local_worker
    get_weights = local.get_weights
    monkeypatch.setattr(local, "get_weights", lambda: Weights(
        get_weights().version, {"all": np.zeros(3, np.float32)}, dict(get_weights().parameters)))
    raises_within(5, WeightsError, scheme, "all")


@pytest.mark.parametrize("workers", [{"num_grad_workers": 2}, {"num_grad_workers": 2, "distribute_gradients": True}],
                         ids=["by the learner", "among themselves"])
def test_pytorchrl_2021_divides_reduced_gradients_by_the_number_of_collectors(make_scheme, workers):
    """Revision 9e45189 sums over gradient workers, then divides by the collection workers.

    Here it is the samples' mean.
    """
    scheme = make_scheme(algo=PPO.create_factory(num_epochs=1, num_mini_batch=1, lr=1.0, optimizer="sgd",
                                                 max_grad_norm=None),
                         num_col_workers=3, **workers)
    before = scheme.acting_state()["all"]
    computed = []
    for handle in scheme.update_worker.remote_workers:
        algo = handle.native.worker.algo

        def compute(batch, compute=algo.compute_gradients):
            grads, info = compute(batch)
            computed.append((grads[0].clone(), batch.num_samples))
            return grads, info
        algo.compute_gradients = compute
    scheme.step()
    assert len(computed) == 2
    mean = sum(grad * num for grad, num in computed) / sum(num for _, num in computed)
    assert torch.allclose(before - scheme.acting_state()["all"], mean, atol=1e-5)
    assert mean.abs().max() > 1e-3


class BadA2C(A2C):
    """A2C whose gradient has one bad number."""

    value: float | None = None

    def compute_gradients(self, batch):
        gradients, info = super().compute_gradients(batch)
        if self.value is not None:
            gradients[0][3] = self.value
        return gradients, info


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_rllib_2_60_applies_gradients_that_are_not_finite(make_scheme, value):
    """`torch_skip_nan_gradients=True` applies the NaN; without it, infinity makes a weight -3.4e35.

    Here none is applied.
    """
    scheme = make_scheme(algo=BadA2C.create_factory())
    scheme.step()
    before, algo = scheme.acting_state()["all"], scheme.update_worker.local_worker.algo
    algo.value = value
    assert scheme.step() == {}
    assert torch.equal(scheme.acting_state()["all"], before)
    assert (scheme.version, scheme.metrics()["updates_skipped_nan"]) == (1, 1)
    algo.value = None
    scheme.step()
    assert torch.isfinite(scheme.acting_state()["all"]).all()


def test_habitat_lab_reduces_the_nan_of_one_rank_into_all(make_scheme):
    """DD-PPO, issue 2226: one rank's NaN is in every parameter after the all-reduce. Here no rank makes that update."""
    scheme = make_scheme(algo=BadA2C.create_factory(), num_grad_workers=2, distribute_gradients=True)
    scheme.step()
    algos = [handle.native.worker.algo for handle in scheme.update_worker.remote_workers]
    before = [algo.acting_state()["all"].clone() for algo in algos]
    algos[1].value = float("nan")
    assert scheme.step() == {}
    assert all(torch.equal(algo.acting_state()["all"], state) for algo, state in zip(algos, before, strict=True))
