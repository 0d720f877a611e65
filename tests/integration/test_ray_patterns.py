"""Tests of schemes on real Ray workers.

In every pattern, the ledger accounts for all steps, and the scheme stops. Deterministic schemes compute the same
parameters on Ray as with threads.
"""

from __future__ import annotations

import itertools
import os
import time
import traceback

import pytest
import torch

from pytorchrl import ASYNC, CENTRAL, PARALLEL, PPO, SYNC
from pytorchrl.envs.testing import CountingEnv, FaultyEnv, SleepEnv
from pytorchrl.errors import EnvError, InsufficientResourcesError, WorkerLostError
from pytorchrl.scheme.collection.c_worker import CWorker
from pytorchrl.scheme.gradients.g_worker import GWorker
from tests.conftest import RAY_CPUS, pairwise
from tests.integration.conftest import resize_under_load

pytestmark = [pytest.mark.ray, pytest.mark.timeout(120)]

PATTERNS = [
    pytest.param(  # two remote gradient workers, or else two remote collection workers
        {"num_col_workers": 2 if col and not grad else 1, "col_execution": PARALLEL if col else CENTRAL,
         "num_grad_workers": 2 if grad else 1, "col_communication": ASYNC if col_async else SYNC,
         "grad_communication": ASYNC if grad_async else SYNC},
        id=f"{'parallel' if col else 'central'}-{'async' if col_async else 'sync'}_"
           f"{'parallel' if grad else 'central'}-{'async' if grad_async else 'sync'}")
    for col, col_async, grad, grad_async in itertools.product((False, True), repeat=4)
]


def _step_on(scheme):
    """Call `step` 1000 times, so that every injected fault occurs."""
    for _ in range(1000):
        scheme.step()


class FiledEnv(CountingEnv):
    """An environment that appends one byte to its own file at each step, which takes `step_s` seconds."""

    def __init__(self, directory, step_s=0.0, **options):
        super().__init__(**options)
        self._directory, self._step_s, self._file = directory, step_s, None

    def step(self, action):
        time.sleep(self._step_s)
        if self._file is None:
            name = f"{os.getpid()}-{id(self)}"
            self._file = os.open(os.path.join(self._directory, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(self._file, b".")
        return super().step(action)

    def close(self):
        if self._file is not None:
            os.close(self._file)
            self._file = None


@pytest.mark.parametrize("pattern", pairwise(PATTERNS))
@pytest.mark.every(2)
def test_pattern(make_scheme, stop_in_balance, tmp_path, pattern):
    scheme = make_scheme(FiledEnv, {"directory": str(tmp_path)}, **pattern)
    for file in tmp_path.iterdir():  # delete the files of the environment that was built to read its spaces
        file.unlink()
    for _ in range(6):
        assert scheme.step()["loss"] == pytest.approx(0, abs=1e9)
    assert scheme.version >= 6
    metrics, start = scheme.metrics(), scheme.ledger()
    assert start["collected"] == sum(start[p] for p in ("in_flight", "queued", "consumed_unique")) + sum(
        start["dropped"].values())
    assert start["consumed_unique"] > 0
    if pattern["col_communication"] is SYNC:
        assert metrics["policy_lag"]["max"] == 0
    ledger = stop_in_balance(scheme)
    assert ledger["collected"] == sum(file.stat().st_size for file in tmp_path.iterdir())
    assert ledger["collected"] == ledger["consumed_unique"] + ledger["dropped"]["shutdown"]


@pytest.mark.parametrize("settings", [
    {"num_col_workers": 2, "compress_data_to_send": True},
    pytest.param({"num_grad_workers": 2, "compress_grads_to_send": True}, marks=pytest.mark.thorough),
    {"num_grad_workers": 2, "distribute_gradients": True},
], ids=["2 collectors", "2 gradient workers", "decentralized"])
def test_ray_and_threads_compute_equal_parameters(make_scheme, settings):
    """Check that the same seed gives bit-for-bit equal parameters after 20 updates with Ray and with threads."""
    states = []
    for runtime in ("threads", "ray"):
        algo = PPO.create_factory(num_epochs=2, num_mini_batch=2, lr=lambda remaining: 1e-3 * remaining,
                                  clip_param=[(0, 0.3), (200, 0.1)])
        scheme = make_scheme("CartPole-v1", runtime=runtime, algo=algo, **settings)
        scheme.start(400)
        for _ in range(20):
            scheme.step()
        states.append(scheme.acting_state()["all"])
        if "distribute_gradients" in settings:
            for handle in scheme.update_worker.remote_workers:
                weights = handle.runtime.get(handle.submit(GWorker.get_weights), 20.0)
                assert weights.state["all"].tobytes() == states[-1].numpy().tobytes()
        scheme.stop()
    assert torch.equal(*states)


def _free_cpus(ray, expected):
    """Return the number of free CPUs that Ray reports; wait up to 10 seconds for the expected number."""
    deadline = time.monotonic() + 10
    while (free := ray.available_resources().get("CPU", 0.0)) != expected and time.monotonic() < deadline:
        time.sleep(0.1)
    return free


def test_collectors_and_an_evaluator_have_weights_and_resources(make_scheme, shared_ray, child_processes):
    scheme = make_scheme("CartPole-v1", num_col_workers=2, col_worker_resources={"num_cpus": 0.75}, evaluates=True,
                         algo=PPO.create_factory(num_epochs=1, num_mini_batch=1))
    free = _free_cpus(shared_ray, RAY_CPUS)
    root = scheme.start()
    assert _free_cpus(shared_ray, free - 1.5) == free - 1.5
    for _ in range(3):
        before = root.get_weights()
        scheme.step()
        for handle in root.local_worker.remote_workers:
            weights = handle.runtime.get(handle.submit(CWorker.get_weights), 20.0)
            assert weights.version == before.version
            assert weights.state["all"].tobytes() == before.state["all"].tobytes()
    scheme.start_evaluation(4)
    scheme.step()
    evaluation = scheme.wait_evaluation(60.0)
    assert len(evaluation.returns) == 4
    assert evaluation.version == 3
    assert len([command for command in child_processes().values() if command.startswith("ray::Worker")]) == 3


class SlowFirst(SleepEnv):
    """An environment that is slow in the first worker that builds it.

    The instance that is built to read the spaces is fast.
    """

    def __init__(self, directory):
        try:
            os.close(os.open(os.path.join(directory, "probe"), os.O_CREAT | os.O_EXCL))
            slow = False
        except FileExistsError:
            try:
                os.close(os.open(os.path.join(directory, "first"), os.O_CREAT | os.O_EXCL))
                slow = True
            except FileExistsError:
                slow = False
        super().__init__(step_s=0.05 if slow else 0.0)


def test_rounds_end_early(make_scheme, stop_in_balance, tmp_path):
    """Check that the signal to end a round reaches a worker while it collects."""
    scheme = make_scheme(SlowFirst, {"directory": str(tmp_path)}, num_envs=1, size=60, num_col_workers=2,
                         col_fraction_workers=0.5, fraction_samples=0.1,
                         algo=PPO.create_factory(num_epochs=1, num_mini_batch=1))
    scheme.step()
    start = time.monotonic()
    for _ in range(2):
        scheme.step()
    assert time.monotonic() - start < 4  # complete rounds would take 2 * 60 * 50 ms = 6 s
    assert scheme.metrics()["rollouts_preempted"] >= 2
    ledger = stop_in_balance(scheme)
    assert 3 * 66 <= ledger["consumed_unique"] < 3 * 120


def test_error_of_an_environment(make_scheme, stop_in_balance):
    scheme = make_scheme(FaultyEnv, {"fault": "step", "at": 20}, num_col_workers=2, col_communication=ASYNC)
    with pytest.raises(EnvError, match="faulty step") as caught:
        _step_on(scheme)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert "testing.py" in traceback.extract_tb(caught.value.__cause__.__traceback__)[-1].filename
    stop_in_balance(scheme)


class DiesHere(CountingEnv):
    """An environment that can be built only in the process whose id is `pid`."""

    def __init__(self, pid):
        if os.getpid() != pid:
            raise RuntimeError("not in a worker")
        super().__init__()


def test_error_of_a_constructor(make_scheme, stop_in_balance):
    scheme = make_scheme(DiesHere, {"pid": os.getpid()}, num_grad_workers=2)
    with pytest.raises(EnvError, match="not in a worker"):
        scheme.start()
    stop_in_balance(scheme)


def test_a_killed_collector_raises_if_requested(make_scheme, stop_in_balance, shared_ray):
    scheme = make_scheme(num_col_workers=2, col_communication=ASYNC, on_worker_failure="raise")
    scheme.step()
    shared_ray.kill(scheme.update_worker.local_worker.remote_workers[1].native)
    start = time.monotonic()
    with pytest.raises(WorkerLostError, match="CWorker 2"):
        _step_on(scheme)
    assert time.monotonic() - start < 10
    stop_in_balance(scheme)


@pytest.mark.thorough
@pytest.mark.parametrize("distribute", [
    pytest.param(False, id="averaged"), pytest.param(True, id="decentralized")])
def test_a_killed_gradient_worker_raises_if_requested(make_scheme, stop_in_balance, shared_ray, distribute):
    scheme = make_scheme(num_grad_workers=2, on_worker_failure="raise", distribute_gradients=distribute)
    scheme.step()
    shared_ray.kill(scheme.update_worker.remote_workers[1].native)
    start = time.monotonic()
    with pytest.raises(WorkerLostError):
        _step_on(scheme)
    assert time.monotonic() - start < 10
    stop_in_balance(scheme)


@pytest.mark.parametrize("policy", ["restart", pytest.param("ignore", marks=pytest.mark.thorough)])
def test_ranks_continue_after_one_is_killed(make_scheme, stop_in_balance, policy):
    """Kill a rank while the others wait for its gradient, and check that all live ranks agree bit for bit."""
    scheme = make_scheme(num_grad_workers=3, distribute_gradients=True, faults="kill grad.2 @ grad 10",
                         on_worker_failure=policy,
                         grad_worker_resources={"num_cpus": 0.5})
    while scheme.version < 20:
        scheme.step()
    metrics = scheme.metrics()
    assert metrics["regroups"] == 1
    assert metrics["workers_restarted"] == (policy == "restart")
    live = [handle for index,
            handle in enumerate(scheme.update_worker.remote_workers) if policy == "restart" or index != 1]
    states = [handle.runtime.get(handle.submit(GWorker.whole_state), 20.0) for handle in live]
    assert [state.version for state in states] == [20] * len(live)
    for state in states[1:]:
        for part in ("gradient", "optimizers"):
            assert str(_flat(state.algorithm[part])) == str(_flat(states[0].algorithm[part]))
    stop_in_balance(scheme)


def _flat(state):
    """Return a nested state in which each tensor is replaced by its bytes."""
    return {name: _flat(value) for name, value in state.items()} if isinstance(state, dict) else (
        state.numpy().tobytes() if isinstance(state, torch.Tensor) else state)


class FixedPath(CountingEnv):
    """A `CountingEnv` whose steps take 5 ms, so that a worker is replaced while others continue."""

    step_s = 0.005

    def step(self, action):
        time.sleep(self.step_s)
        return super().step(action)


@pytest.mark.parametrize("settings", [
    pytest.param({"faults": "kill col.2 @ step 40", "num_col_workers": 2}, marks=pytest.mark.thorough),
    pytest.param({"faults": "kill col.2 @ step 40", "num_col_workers": 2, "col_communication": ASYNC},
                 marks=pytest.mark.thorough),
    pytest.param({"faults": "kill grad.1 @ grad 6", "num_grad_workers": 2}, marks=pytest.mark.thorough),
    {"faults": "kill grad.1 @ grad 6; kill col.2.1 @ step 60", "num_grad_workers": 2, "grad_communication": ASYNC,
     "num_col_workers": 2, "col_communication": ASYNC, "col_worker_resources": {"num_cpus": 0}},
], ids=["collector", "collector-async", "gradients", "gradients-async-with-collectors"])
def test_a_worker_that_is_killed_is_replaced(make_scheme, stop_in_balance, tmp_path, monkeypatch, settings):
    """Check that a worker that the fault plan kills (SIGKILL) is replaced, that the run continues, and its record.

    The record is replayed bit for bit in this process.
    """
    scheme = make_scheme(FixedPath, record=tmp_path / "run", **settings)
    number, start = settings["faults"].count("kill"), time.monotonic()
    while scheme.metrics()["workers_restarted"] < number:
        scheme.step()
        assert time.monotonic() - start < 60
    version = scheme.version
    while scheme.version < version + 20:
        scheme.step()
    assert scheme.metrics()["workers_restarted"] == number
    stop_in_balance(scheme)
    monkeypatch.setattr(FixedPath, "step_s", 0.0)
    replay = make_scheme(FixedPath, runtime=None, replay=tmp_path / "run", **settings)
    while not replay.replay_is_over:
        replay.step()
    recorded, repeated = (each._worker.local_worker.get_weights() for each in (scheme, replay))
    assert recorded.version == repeated.version >= version + 20
    assert recorded.state["all"].tobytes() == repeated.state["all"].tobytes()
    stop_in_balance(replay)


@pytest.mark.thorough
@pytest.mark.parametrize("settings", [
    {"num_col_workers": 3, "col_communication": ASYNC, "col_worker_resources": {"num_cpus": 0}},
    {"num_grad_workers": 2, "grad_communication": ASYNC},
], ids=["collection", "gradients"])
def test_a_recorded_run_is_replayed_bit_for_bit_in_this_process(make_scheme, stop_in_balance, tmp_path, settings):
    scheme = make_scheme(record=tmp_path / "run", **settings)
    while scheme.version < 40:
        scheme.step()
    stop_in_balance(scheme)
    replay = make_scheme(runtime=None, replay=tmp_path / "run", **settings)
    while not replay.replay_is_over:
        replay.step()
    recorded, repeated = (each._worker.local_worker.get_weights() for each in (scheme, replay))
    assert recorded.version == repeated.version >= 40
    assert recorded.state["all"].tobytes() == repeated.state["all"].tobytes()
    stop_in_balance(replay)


@pytest.mark.parametrize(("resources", "message"), [
    ({"num_gpus": 1}, "2 collection workers request num_gpus=1 each.*has 0"),
    ({"num_cpus": 1000}, "num_cpus=1000 each"),
    ({"num_cpus": 3}, "num_cpus=3 each, 6 together.*cluster 4"),
    ({"special": 1}, "special=1"),
    ({"memory": 2**60}, "memory="),
], ids=str)
def test_resources_that_the_cluster_lacks(make_scheme, resources, message):
    scheme = make_scheme(num_col_workers=2, col_worker_resources=resources,
                         col_device="cuda" if "num_gpus" in resources else None)
    start = time.monotonic()
    with pytest.raises(InsufficientResourcesError, match=message):
        scheme.start()
    assert time.monotonic() - start < 10


def test_the_number_of_collection_workers_changes_under_load(make_scheme, tmp_path):
    scheme = make_scheme(FiledEnv, {"directory": str(tmp_path), "step_s": 0.005}, num_col_workers=2,
                         col_communication=ASYNC, queue_size=2, col_worker_resources={"num_cpus": 0})
    for file in tmp_path.iterdir():  # delete the files of the environment that was built to read its spaces
        file.unlink()
    resize_under_load(scheme, tmp_path, numbers=(4, 3))
