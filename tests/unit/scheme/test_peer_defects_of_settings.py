"""Check that known defects of other libraries in settings and in stopping do not occur here."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from pytorchrl import ASYNC, PPO, Learner
from pytorchrl.envs.testing import SleepEnv
from pytorchrl.errors import DeviceError
from pytorchrl.files.run_directory import prepare_log_dir
from pytorchrl.runtime import DEFAULT_RESOURCES
from pytorchrl.scheme.collection.c_worker import CWorker

pytestmark = pytest.mark.timeout(60)


# Stopping


def test_pytorchrl_2021_never_ends_a_collection_that_it_preempts(make_scheme):
    """Check that a preempted rollout ends with the current step.

    In PyTorchRL of 2021 (revision 9e45189), `break` only leaves the inner of two loops, so collection continues.
    """
    scheme = make_scheme(num_col_workers=2, num_envs=2, size=50)
    worker = scheme.start().local_worker.remote_workers[0].native.worker
    step, made = worker.envs.step, []

    def step_and_preempt(action):
        made.append(action)
        if len(made) == 10:
            worker.preempt(1, 5)
        return step(action)
    worker.envs.step = step_and_preempt
    rollout = CWorker.collect(worker)
    assert rollout.header.preempted
    assert len(made) == 10
    assert rollout.header.num_env_steps == 20


def test_pytorchrl_2021_has_an_unbounded_queue(make_scheme):
    """Check that collection waits if the queue is full.

    If the learner is slow, PyTorchRL of 2021 (revision 9e45189) continues to collect until memory runs out.
    """
    scheme = make_scheme(num_col_workers=2, col_communication=ASYNC, queue_size=2, col_in_flight=1,
                         algo=PPO.create_factory(num_epochs=1, num_mini_batch=1))
    scheme.step()
    worker, deadline = scheme.update_worker.local_worker, time.monotonic() + 5
    while worker.inqueue.qsize() < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.5)  # enough time for about a thousand rollouts
    assert worker.inqueue.qsize() == 2
    # One rollout was used, two are queued, one waits to be enqueued, and each worker may have received two more
    # requests.
    assert sum(handle.native.worker.collected_steps for handle in worker.remote_workers) <= 16 * (1 + 2 + 1 + 4)


def test_pytorchrl_2021_sleeps_without_checking_whether_to_stop(make_scheme):
    """Check that `stop` returns quickly and ends all threads.

    PyTorchRL of 2021 (revision 9e45189) neither wakes nor joins its threads, so they outlive `stop`.
    """
    before = set(threading.enumerate())
    scheme = make_scheme(SleepEnv, {"step_s": 0.001}, num_col_workers=2, col_communication=ASYNC, queue_size=1)
    scheme.step()
    threads = set(threading.enumerate()) - before
    assert any(thread.name.startswith("CollectorThread") for thread in threads)
    deadline = time.monotonic() + 5
    while not scheme.update_worker.local_worker.inqueue.qsize() and time.monotonic() < deadline:
        time.sleep(0.01)  # wait until the queue is full, so that collection waits for the learner
    start = time.monotonic()
    scheme.stop()
    assert time.monotonic() - start < 4
    assert [thread.name for thread in threads if thread.is_alive()] == []


def test_torchrl_0_14_1_loses_both_files_if_a_save_is_interrupted(make_scheme, tmp_path, monkeypatch):
    """Check that an interrupted save keeps the old model, because a save renames only one file.

    TorchRL renames two files. If it is interrupted between the two renames, both the old and the new model are lost.
    """
    with Learner(make_scheme(), 16, tmp_path, progress=False, tensorboard=False) as learner:
        learner.train()
        old = (tmp_path / "model.pt").read_bytes()

        def interrupted(*args):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
        monkeypatch.setattr(os, "replace", interrupted)
        found = signal.signal(signal.SIGINT, signal.default_int_handler)  # the test runner may ignore SIGINT
        try:
            with pytest.raises(KeyboardInterrupt):
                learner.save_model()
        finally:
            signal.signal(signal.SIGINT, found)
        monkeypatch.undo()
    assert (tmp_path / "model.pt").read_bytes() == old
    assert [path.name for path in tmp_path.glob(".*")] == []


# Settings


def test_ray_2_60_lets_an_impossible_request_wait_forever(run_forked):
    """Check that an impossible resource request raises an error before Ray is started.

    Ray keeps such a request pending, and Ray Train retries it without limit.
    """
    script = (
        "import sys, time\n"
        "from pytorchrl import PPO, GAEBuffer, OnPolicyActor, Scheme, VecEnv\n"
        "from pytorchrl.errors import InsufficientResourcesError\n"
        "envs = VecEnv.create_factory('CartPole-v1')\n"
        "actor = OnPolicyActor.create_factory(envs.observation_space, envs.action_space)\n"
        "scheme = Scheme(PPO.create_factory(), actor, GAEBuffer.create_factory(16), envs, num_col_workers=2,\n"
        "                col_worker_resources={'num_gpus': 64}, col_device='cuda')\n"
        "start = time.monotonic()\n"
        "try:\n"
        "    scheme.start()\n"
        "except InsufficientResourcesError as error:\n"
        "    assert 'num_gpus=64' in str(error)\n"
        "    assert 'ray' not in sys.modules\n"
        "    sys.exit(0 if time.monotonic() - start < 5 else 'late')\n"
        "sys.exit('started')\n")
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    result = run_forked("-c", script, env={**environment, "OMP_NUM_THREADS": "1"})
    assert result.returncode == 0, result.stderr


def test_pytorchrl_2021_shares_one_dictionary_of_resources_between_sets(make_scheme):
    """Check that the resources of one worker set do not affect another set, and that the default cannot be changed.

    In PyTorchRL of 2021 (revision 9e45189), both worker sets change the same dictionary.
    """
    default = dict(DEFAULT_RESOURCES)
    with pytest.raises(TypeError):
        DEFAULT_RESOURCES["num_cpus"] = 7
    mine = {"num_cpus": 2}
    tree = {"num_col_workers": 2, "num_grad_workers": 2, "runtime": "ray"}  # these schemes are never started
    schemes = [make_scheme(col_worker_resources=mine, **tree), make_scheme(**tree)]
    mine["num_cpus"] = 3
    assert [scheme.settings["col_worker_resources"] for scheme in schemes] == [{"num_cpus": 2}, default]
    assert [scheme.settings["grad_worker_resources"] for scheme in schemes] == [default, default]


@pytest.mark.parametrize("device", ["cuda:99", "gpu"])
def test_pytorchrl_2021_ignores_the_device_if_there_is_no_gpu(make_scheme, device):
    """Check that an unavailable device raises an error that lists the available devices.

    PyTorchRL of 2021 (revision 9e45189) silently trains on the CPU.
    """
    with pytest.raises(DeviceError, match=r"device must be one of the devices visible to torch, \['cpu'"):
        make_scheme(device=device).start()


@pytest.mark.parametrize("num_grad_workers", [1, 2])
def test_pytorchrl_2021_ignores_an_unknown_hyper_parameter(make_scheme, num_grad_workers):
    """Check that an unknown hyper-parameter raises an error that lists the known names.

    PyTorchRL of 2021 (revision 9e45189) silently ignores it.
    """
    scheme = make_scheme(num_grad_workers=num_grad_workers)
    scheme.step()
    with pytest.raises(KeyError, match=r"learning_rate.*lr"):
        scheme.update_algorithm_parameter("learning_rate", 1e-5)


def test_pytorchrl_2021_removes_any_directory_given_for_logs(tmp_path):
    """Check that the directory of an earlier run is renamed, and that no file is deleted.

    PyTorchRL of 2021 (revision 9e45189) deletes the whole directory before it writes logs there.
    """
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter").write_text("years of work")
    prepare_log_dir(tmp_path / "thesis", overwrite=True)
    (tmp_path / "thesis" / "run.json").write_text("{}")
    prepare_log_dir(tmp_path / "thesis", overwrite=True)
    assert (tmp_path / "thesis.1" / "chapter").read_text() == "years of work"
