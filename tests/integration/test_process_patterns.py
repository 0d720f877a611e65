"""Tests of schemes whose workers are processes on this machine, without Ray.

In every pattern, the ledger accounts for all steps, and the scheme stops and leaves no process. Deterministic schemes
compute the same parameters as with threads.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback

import pytest
import torch

from pytorchrl import ASYNC, PPO, SYNC, GAEBuffer, OnPolicyActor, Scheme, VecEnv
from pytorchrl.agent.synthetic import synthetic_agent
from pytorchrl.envs.testing import CountingEnv, FaultyEnv
from pytorchrl.errors import EnvError, StartError, WorkerLostError
from pytorchrl.scheme.gradients.g_worker import GWorker
from tests.conftest import pairwise, result_of
from tests.integration.conftest import child_processes, resize_under_load
from tests.integration.test_ray_patterns import PATTERNS, FiledEnv, FixedPath

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def nothing_left(quick_processes):
    """Check that no process, no thread and no shared memory is left after a test."""
    torch.set_num_threads(1)
    threads, processes, segments = set(threading.enumerate()), child_processes(), shared_memory()
    yield
    deadline = time.monotonic() + 5
    while (left := child_processes().keys() - processes.keys()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left, child_processes()
    assert [thread.name for thread in set(threading.enumerate()) - threads if thread.is_alive()] == []
    assert shared_memory() <= segments


def shared_memory():
    """Return the files in shared memory; semaphores of Python's multiprocessing belong to other programs."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp")}


@pytest.fixture
def make_scheme(nothing_left):
    """Return a function that makes small schemes of worker processes; they are stopped after the test."""
    schemes = []

    def make(env_fn=CountingEnv, env_kwargs=None, **settings):
        envs = VecEnv.create_factory(env_fn, env_kwargs, 2)
        algo = settings.pop("algo", None) or PPO.create_factory(num_epochs=2, num_mini_batch=2, lr=1e-3)
        scheme = Scheme(
            algo, OnPolicyActor.create_factory(envs.observation_space, envs.action_space, hidden_sizes=(8,)),
            GAEBuffer.create_factory(8), envs, envs if settings.pop("evaluates", False) else None,
            **({"runtime": "processes", "seed": 1} | settings))
        schemes.append(scheme)
        return scheme
    yield make
    for scheme in schemes:
        scheme.stop()


def stop_in_balance(scheme):
    """Stop a scheme within 10 seconds, and check that its ledger balances."""
    start = time.monotonic()
    ledger = scheme.stop()
    assert time.monotonic() - start <= 10
    assert ledger["in_flight"] == ledger["queued"] == 0
    kept = ledger["consumed_unique"] + ledger["resident"] + ledger["evicted"]
    assert ledger["collected"] == kept + sum(ledger["dropped"].values()), ledger
    return ledger


def _step_on(scheme):
    """Call `step` for 20 seconds, unless it raises an error."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        scheme.step()


def workers_of(scheme):
    """Return the process ids of a scheme's workers; the names of their processes begin with those of the workers."""
    found = {}
    for pid in child_processes():
        with open(f"/proc/{pid}/comm", encoding="ascii") as file:
            if (name := file.read().strip()).startswith("GWorker"):
                found[pid] = name
    return found


@pytest.mark.parametrize("pattern", pairwise(PATTERNS))
def test_pattern(make_scheme, tmp_path, pattern):
    scheme = make_scheme(FiledEnv, {"directory": str(tmp_path)}, **pattern)
    for file in tmp_path.iterdir():  # delete the files of the environment that was built to read its spaces
        file.unlink()
    for _ in range(6):
        scheme.step()
    assert scheme.version >= 6
    assert bool(workers_of(scheme)) == (max(pattern["num_col_workers"], pattern["num_grad_workers"]) > 1)
    ledger = stop_in_balance(scheme)
    assert ledger["collected"] == sum(file.stat().st_size for file in tmp_path.iterdir())
    assert ledger["collected"] == ledger["consumed_unique"] + ledger["dropped"]["shutdown"]


@pytest.mark.parametrize("settings", [
    pytest.param({"num_col_workers": 2, "compress_data_to_send": True}, marks=pytest.mark.thorough),
    {"num_grad_workers": 2, "compress_grads_to_send": "bf16", "compress_weights_to_send": True},
    {"num_grad_workers": 2, "distribute_gradients": True},
], ids=["2 collectors", "2 gradient workers", "decentralized"])
def test_processes_and_threads_compute_equal_parameters(make_scheme, settings):
    """Check that the same seed gives bit-for-bit equal parameters after 12 updates with processes and with threads."""
    states = []
    for runtime in ("threads", "processes"):
        scheme = make_scheme("CartPole-v1", runtime=runtime, **settings)
        for _ in range(12):
            scheme.step()
        states.append(scheme.acting_state()["all"])
        scheme.stop()
    assert torch.equal(*states)


@pytest.mark.parametrize("settings", [
    pytest.param({}, id="apex", marks=pytest.mark.thorough), pytest.param({"num_grad_workers": 2}, id="gorila")])
def test_replay_shards(nothing_left, settings):
    scheme = Scheme(*synthetic_agent(), seed=1, runtime="processes", num_col_workers=2, num_replay_workers=2,
                    col_communication=ASYNC, size=2000, **settings)
    for _ in range(20):
        scheme.step()
    shards = [name for name in workers_of(scheme).values() if "/RW" in name]
    assert len(shards) == 2 * settings.get("num_grad_workers", 1)
    ledger = stop_in_balance(scheme)
    assert ledger["consumed_unique"] + ledger["resident"] > 0


@pytest.mark.parametrize("settings", [
    pytest.param({"faults": "kill col.2 @ step 40", "num_col_workers": 2, "col_communication": ASYNC},
                 marks=pytest.mark.thorough),
    pytest.param({"faults": "kill col.2 @ step 40", "num_col_workers": 2}, marks=pytest.mark.thorough),
    pytest.param({"faults": "kill grad.1 @ grad 6", "num_grad_workers": 2}, marks=pytest.mark.thorough),
    {"faults": "kill grad.1 @ grad 6; kill col.2.1 @ step 60", "num_grad_workers": 2, "grad_communication": ASYNC,
     "num_col_workers": 2, "col_communication": ASYNC},
    {"faults": "kill col.2 @ step 40", "num_col_workers": 2, "col_communication": ASYNC, "inference": "central"},
], ids=["collector-async", "collector", "gradients", "gradients-async-with-collectors",
        "central-inference"])
def test_a_worker_that_is_killed_is_replaced(make_scheme, tmp_path, monkeypatch, settings):
    """Check that a worker that the fault plan kills (SIGKILL) is replaced with its own workers, and the run goes on.

    The record of the run is replayed bit for bit in this process.
    """
    scheme = make_scheme(FixedPath, record=tmp_path / "run", **settings)
    num_kills, start = settings["faults"].count("kill"), time.monotonic()
    while scheme.metrics()["workers_restarted"] < num_kills:
        scheme.step()
        assert time.monotonic() - start < 60
    version = scheme.version
    while scheme.version < version + 20:
        scheme.step()
    assert scheme.metrics()["workers_restarted"] == num_kills
    num_grad = settings.get("num_grad_workers", 0)
    number = num_grad + settings.get("num_col_workers", 0) * max(1, num_grad)
    while len(workers_of(scheme)) != number:  # the replacement may still be starting its own workers
        scheme.step()
        assert time.monotonic() - start < 60
    stop_in_balance(scheme)
    monkeypatch.setattr(FixedPath, "step_s", 0.0)
    check_replay(scheme, make_scheme(FixedPath, runtime=None, replay=tmp_path / "run", **settings), version + 20)


def check_replay(scheme, replay, least):
    """Replay a recorded run of at least `least` updates, and compare the parameters."""
    while not replay.replay_is_over:
        replay.step()
    recorded, repeated = (each._worker.local_worker.get_weights() for each in (scheme, replay))
    assert recorded.version == repeated.version >= least
    assert recorded.state["all"].tobytes() == repeated.state["all"].tobytes()
    stop_in_balance(replay)


@pytest.mark.parametrize("policy", ["restart", pytest.param("ignore", marks=pytest.mark.thorough)])
def test_ranks_continue_after_one_is_killed(make_scheme, policy):
    scheme = make_scheme(num_grad_workers=3, distribute_gradients=True, faults="kill grad.2 @ grad 10",
                         on_worker_failure=policy)
    while scheme.version < 25:
        scheme.step()
    metrics = scheme.metrics()
    assert metrics["regroups"] == 1
    assert metrics["workers_restarted"] == (policy == "restart")
    live = [handle for index, handle in enumerate(scheme.update_worker.remote_workers)
            if policy == "restart" or index != 1]
    weights = [handle.runtime.get(handle.submit(GWorker.get_weights), 20.0) for handle in live]
    assert len({each.state["all"].tobytes() for each in weights}) == 1
    stop_in_balance(scheme)


def test_a_stopped_worker_is_reported_as_lost(make_scheme):
    scheme = make_scheme(FixedPath, num_col_workers=2, col_communication=ASYNC, on_worker_failure="raise",
                         worker_timeout_s=0.5)
    for _ in range(10):
        scheme.step()
    os.kill(next(iter(workers_of(scheme))), signal.SIGSTOP)
    with pytest.raises(WorkerLostError, match="hangs: no result for"):
        _step_on(scheme)
    stop_in_balance(scheme)


def test_errors_of_environments(make_scheme):
    scheme = make_scheme(FaultyEnv, {"fault": "step", "at": 20}, num_col_workers=2)
    with pytest.raises(EnvError, match="faulty step") as caught:
        _step_on(scheme)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert "testing.py" in traceback.extract_tb(caught.value.__cause__.__traceback__)[-1].filename
    stop_in_balance(scheme)


class DiesEnv(CountingEnv):
    """An environment whose construction kills every process but one."""

    def __init__(self, pid):
        if os.getpid() != pid:
            os.kill(os.getpid(), signal.SIGKILL)
        super().__init__()


def test_a_worker_that_dies_at_the_start_is_an_error(make_scheme):
    scheme = make_scheme(DiesEnv, {"pid": os.getpid()}, num_col_workers=2)
    with pytest.raises(StartError, match="its process has ended"):
        scheme.start()
    stop_in_balance(scheme)


@pytest.mark.thorough
def test_a_recorded_run_is_replayed_bit_for_bit_in_this_process(make_scheme, tmp_path):
    settings = {"num_col_workers": 3, "col_communication": ASYNC}
    scheme = make_scheme(record=tmp_path / "run", **settings)
    while scheme.version < 40:
        scheme.step()
    stop_in_balance(scheme)
    check_replay(scheme, make_scheme(runtime=None, replay=tmp_path / "run", **settings), 40)


def test_evaluation_runs_in_a_process_of_its_own(make_scheme):
    scheme = make_scheme("CartPole-v1", num_col_workers=2, evaluates=True)
    scheme.step()
    scheme.start_evaluation(2)
    evaluation = scheme.wait_evaluation(30.0)
    assert evaluation.version == 1
    assert len(evaluation.returns) == 2
    assert len(workers_of(scheme)) >= 2
    stop_in_balance(scheme)


SCRIPT = """
import os, signal, sys, threading, time
sys.executable = sys.argv[2]
from pytorchrl import PPO, ASYNC, GAEBuffer, OnPolicyActor, Scheme, VecEnv
from pytorchrl.envs.testing import CountingEnv

class OwnEnv(CountingEnv):  # a class of the script, which worker processes cannot import
    pass

envs = VecEnv.create_factory(OwnEnv, vec_env_size=2)
scheme = Scheme(
    PPO.create_factory(), OnPolicyActor.create_factory(envs.observation_space, envs.action_space),
    GAEBuffer.create_factory(8), envs, runtime="processes", seed=1, num_col_workers=2, num_grad_workers=2,
    col_communication=ASYNC, grad_communication=ASYNC)
for _ in range(5):
    scheme.step()
is_over = threading.Event()
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background processes ignore the signal

def interrupt():  # again and again, because Python ignores an interrupt that arrives within a finalizer
    pause = 0.2
    while not is_over.wait(pause):
        os.kill(os.getpid(), signal.SIGINT)
        pause = 10.0

if sys.argv[1] == "interrupted":
    threading.Thread(target=interrupt, daemon=True).start()
try:
    while sys.argv[1] == "interrupted":
        scheme.step()
except KeyboardInterrupt:
    is_over.set()
    scheme.stop()
print("result: 1", flush=True)
if sys.argv[1] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("how", ["interrupted", "killed", "exit"])
def test_nothing_is_left_of_a_script(run_forked, forked_python, how):
    """Check that Ctrl-C, SIGKILL and the end of a script that does not stop its scheme leave nothing."""
    done = run_forked("-c", SCRIPT, how, forked_python)
    assert done.returncode == (-signal.SIGKILL if how == "killed" else 0), done.stderr
    done.returncode = 0
    assert result_of(done) == 1


def test_the_command_line_trains_with_processes(run_forked, forked_python, tmp_path):
    code = (f"import sys; sys.executable = {forked_python!r}; from pytorchrl.cli import main; "
            "sys.exit(main(sys.argv[1:]))")
    done = run_forked("-c", code, "train", "ppo", "--env", "CartPole-v1", "--target-steps", 600, "--num-col-workers",
                      2, "--runtime", "processes", "--log-dir", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "metrics.jsonl").stat().st_size > 0
    assert sys.platform == "linux"


@pytest.mark.parametrize("col_communication", [pytest.param(SYNC, marks=pytest.mark.thorough), ASYNC])
def test_the_number_of_collection_workers_changes_under_load(make_scheme, tmp_path, col_communication):
    more = {"queue_size": 2} if col_communication is ASYNC else {}
    scheme = make_scheme(FiledEnv, {"directory": str(tmp_path), "step_s": 0.002}, num_col_workers=2,
                         col_communication=col_communication, **more)
    for file in tmp_path.iterdir():  # delete the files of the environment that was built to read its spaces
        file.unlink()
    resize_under_load(scheme, tmp_path, numbers=(4, 3))
