"""Check that known defects of other libraries do not occur here.

The tests cover lost and hung workers, threads, errors between processes, waits, non-finite updates, signals
and stopping. The name of a test contains the library and its version, and the docstring describes the defect. Most of
these behaviors are tested more thoroughly in the tests of the modules concerned.
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
    """Check that a deadline ends the wait for a hung worker.

    TorchRL's collector blocks forever on the queue of a child process that never sends a result.
    """
    scheme = make_scheme(**simulated(faults="hang col.2 @ step 6", worker_timeout_s=3.0, on_worker_failure="raise"))
    start = scheme.start() and scheme.runtime.now()
    with pytest.raises(WorkerLostError, match=r"CWorker 2 hangs: no result for"):
        step_on(scheme)
    # The limit for a worker's first result is 5 x 3 s, because the worker must first start
    assert scheme.runtime.now() - start < 15 + 2


def test_rllib_2_60_calls_a_hung_runner_healthy_and_never_replaces_it(make_scheme):
    """Check that a hung worker is replaced.

    RLlib keeps a runner that never answers in its list of healthy runners, and sends it a new call in each iteration.
    """
    scheme = make_scheme(**simulated(faults="hang col.2 @ step 6", worker_timeout_s=3.0))
    hung = scheme.start().local_worker.remote_workers[1]
    step_until(scheme, 80)
    assert scheme.metrics()["workers_restarted"] == 1
    replacement = scheme.update_worker.local_worker.remote_workers[1]
    assert replacement is not hung
    assert replacement.native.worker.collected_steps > 0


def test_rllib_2_60_ends_the_run_with_a_dead_learner(make_scheme, check_ledger):
    """Check that a killed gradient worker is replaced. In RLlib, training ends when the process of one learner dies."""
    scheme = make_scheme(**simulated(num_grad_workers=2, num_col_workers=1, faults="kill grad.2 @ grad 3"))
    step_until(scheme, 12)
    assert scheme.metrics()["workers_restarted"] == 1
    check_ledger(scheme)


def test_gymnasium_1_4_0_returns_a_late_result_from_the_next_call(supervised):
    """Check that a late answer is discarded.

    In Gymnasium, the first `step` after a timeout of `step_wait` returns the result of the previous step.
    """
    requests, runtime, replaced = supervised
    late, fresh = Future("a", "late"), Future("a", "fresh")
    requests.add(0, late)
    runtime.sleep(301)  # the limit for a worker's first result is 5 x 60 s
    assert list(requests.poll(0.0)) == []
    runtime.sleep(1)
    assert list(requests.poll(0.0)) == []
    assert replaced == [0]
    requests.add(0, fresh)
    runtime.done = [late, fresh]
    assert list(requests.poll(0.0)) == [(0, "result of fresh")]


@pytest.fixture
def supervised():
    """Provide (requests, runtime, replaced indices) for one supervised worker, whose answers the test controls."""
    runtime, replaced = SimulatedRuntime(), []
    runtime.done = []
    runtime.wait = lambda futures, timeout_s: [future for future in futures if future in runtime.done]
    runtime.outcome = lambda future, timeout_s: Outcome(future.worker, f"result of {future.native}")
    supervisor = Supervisor([SimpleNamespace(name="a")], replaced.append, runtime)
    yield Requests(runtime, supervisor, Journal(), lambda value: 1.0, lambda value: (), lambda index: None,
                   lambda index: None), runtime, replaced
    runtime.close()


def test_pytorchrl_2021_takes_the_first_of_no_results_after_sixty_seconds(make_scheme):
    """Check that waiting continues if no result arrives within 60 s.

    In this case, PyTorchRL of 2021 (revision 9e45189) takes the first element of an empty list, which raises
    `IndexError`.
    """
    scheme = make_scheme(**simulated(col_communication=ASYNC, faults="delay col.* 130s @ step 6",
                                     worker_timeout_s=1000.0))
    start = scheme.start() and scheme.runtime.now()
    step_until(scheme, 12)
    assert scheme.runtime.now() - start > 60
    assert scheme.metrics()["workers_restarted"] == 0


# Errors that must reach the user


def test_torchrl_0_14_1_does_not_pass_on_the_traceback_of_a_child(make_scheme):
    """Check that the traceback includes the line at which the environment raised the error.

    In TorchRL, the parent learns that a worker failed, but neither why nor where.
    """
    scheme = make_scheme(FaultyEnv, {"fault": "step", "at": 20}, num_col_workers=2)
    error = raises_within(5, EnvError, scheme, "faulty step")
    text = "".join(traceback.format_exception(error))
    assert "RuntimeError: faulty step" in text
    assert "testing.py" in text


def test_torchrl_0_14_1_only_logs_the_error_that_ends_its_collector_thread(make_scheme):
    """Check that the next call raises the error that ended the collector thread.

    In TorchRL, a loop over the Ray collector waits forever after such an error.
    """
    scheme = make_scheme(num_col_workers=2, col_communication=ASYNC)
    scheme.step()

    def fail(*args):
        raise ZeroDivisionError("in the thread")
    scheme.update_worker.local_worker.collector.strategy.step = fail
    error = raises_within(5, ZeroDivisionError, scheme, "in the thread")
    assert any(frame.name == "fail" for frame in traceback.extract_tb(error.__traceback__))


@pytest.mark.parametrize("thread", ["collector", "updater"])
def test_pytorchrl_2021_waits_forever_after_one_of_its_threads_has_died(make_scheme, thread):
    """Check that each later call raises the error that ended a thread.

    PyTorchRL of 2021 (revision 9e45189) only waits for the queue, which no thread fills after the error.
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
    """Check that every error class can be sent between processes.

    In RLlib, the caller only learns that an actor died; the original error is lost.
    """
    classes = [value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, Exception)]
    assert len(classes) > 20
    for cls in classes:
        error = pickle.loads(pickle.dumps(cls("CWorker 2: step 7 raised")))
        assert type(error) is cls
        assert str(error) == "CWorker 2: step 7 raised"


def test_gymnasium_1_4_0_has_an_error_that_does_not_pickle():
    """Check that no error class of this library defines a constructor.

    The constructor of one of Gymnasium's errors takes more arguments than it passes to its base class, so the error
    cannot be unpickled.
    """
    classes = [value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, Exception)]
    assert [cls.__name__ for cls in classes if "__init__" in vars(cls) or "__new__" in vars(cls)] == []


def test_stable_baselines3_2_9_2_reports_an_error_of_a_subprocess_as_a_bare_eof_error():
    """Check that an error in a subprocess becomes an `EnvError` with the environment and the original message.

    Stable-Baselines3 only reports that the pipe was closed.
    """
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
    """Check that a deadline applies to a worker with a hung environment.

    `SubprocVecEnv` reads from a pipe without a time limit.
    """
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


def test_pytorchrl_2021_treats_every_exception_as_the_end_of_an_epoch(make_scheme):
    """Check that an error in the storage is raised.

    PyTorchRL of 2021 (revision 9e45189) treats every exception in the generation of minibatches as the end of the
    epoch, and requests new data.
    """
    class Broken(GAEBuffer):
        def generate_batches(self, *args, **kwargs):
            yield from list(super().generate_batches(*args, **kwargs))[:1]
            raise ZeroDivisionError("a bug in the storage")
    scheme = make_scheme(storage=Broken)
    scheme.step()
    raises_within(5, ZeroDivisionError, scheme, "a bug in the storage")


# Weights, gradients and numbers that are not finite


def test_pytorchrl_2021_loads_the_version_number_as_weights(make_scheme):
    """Check that `set_weights` loads the version and the parameters of a message correctly.

    `CWorker.set_weights` in PyTorchRL of 2021 (revision 9e45189) unpacks its message in the wrong order. In this
    library, the parts of a message have names.
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
    """Check that an error in setting weights is raised.

    Weights are sent with a request, whose result is always checked. PyTorchRL of 2021 (revision 9e45189) ignores the
    result of the call, so a failure goes unnoticed.
    """
    scheme = make_scheme(num_col_workers=2)
    scheme.step()
    local = scheme.update_worker.local_worker.local_worker
    get_weights = local.get_weights
    monkeypatch.setattr(local, "get_weights", lambda: Weights(
        get_weights().version, {"all": np.zeros(3, np.float32)}, dict(get_weights().parameters)))
    raises_within(5, WeightsError, scheme, "all")


@pytest.mark.parametrize("workers", [{"num_grad_workers": 2}, {"num_grad_workers": 2, "distribute_gradients": True}],
                         ids=["central", "decentralized"])
def test_pytorchrl_2021_divides_reduced_gradients_by_the_number_of_collectors(make_scheme, workers):
    """Check that gradients are averaged over samples.

    PyTorchRL of 2021 (revision 9e45189) sums them over gradient workers, and then divides by the number of collection
    workers.
    """
    scheme = make_scheme(algo=PPO.create_factory(num_epochs=1, num_mini_batch=1, lr=1.0, optimizer="sgd",
                                                 max_grad_norm=None),
                         num_col_workers=3, **workers)
    before = scheme.acting_state()["all"].cpu()
    computed = []
    for handle in scheme.update_worker.remote_workers:
        algo = handle.native.worker.algo

        def compute(batch, compute=algo.compute_gradients):
            grads, info = compute(batch)
            computed.append((grads[0].cpu().clone(), batch.num_samples))
            return grads, info
        algo.compute_gradients = compute
    scheme.step()
    assert len(computed) == 2
    mean = sum(grad * num for grad, num in computed) / sum(num for _, num in computed)
    assert torch.allclose(before - scheme.acting_state()["all"].cpu(), mean, atol=1e-5)
    assert mean.abs().max() > 1e-3


class BadA2C(A2C):
    """A2C that sets one element of the gradient to `value`, unless `value` is None."""

    value: float | None = None

    def compute_gradients(self, batch):
        gradients, info = super().compute_gradients(batch)
        if self.value is not None:
            gradients[0][3] = self.value
        return gradients, info


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_rllib_2_60_applies_non_finite_gradients(make_scheme, value):
    """Check that gradients that are not finite are never applied.

    RLlib applies NaN even with `torch_skip_nan_gradients=True`; without this option, an infinite gradient sets a weight
    to -3.4e35.
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
    """Check that no rank makes an update if one rank's gradient is NaN. In habitat-lab's DD-PPO, the all-reduce spreads
    the NaN to every parameter (issue 2226)."""
    scheme = make_scheme(algo=BadA2C.create_factory(), num_grad_workers=2, distribute_gradients=True)
    scheme.step()
    algos = [handle.native.worker.algo for handle in scheme.update_worker.remote_workers]
    before = [algo.acting_state()["all"].clone() for algo in algos]
    algos[1].value = float("nan")
    assert scheme.step() == {}
    assert all(torch.equal(algo.acting_state()["all"], state) for algo, state in zip(algos, before, strict=True))
