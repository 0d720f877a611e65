"""Tests that workers use only the devices that Ray assigns; the GPUs are simulated, so no real GPU is needed."""

from __future__ import annotations

import pytest
import torch

from tests.conftest import process_environment, result_of, run_process

pytestmark = [pytest.mark.ray, pytest.mark.timeout(170)]

# The script starts a Ray cluster with four simulated GPUs. In each worker, torch sees only the GPUs of that worker.
SCRIPT = """
import json, os, shutil, sys, tempfile
os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="1")
import ray
directory = tempfile.mkdtemp(prefix="prl-devices-", dir="/tmp")
from pytorchrl import PPO, GAEBuffer, OnPolicyActor, Scheme, VecEnv
from pytorchrl.errors import DeviceError, PyTorchRLError
from pytorchrl.runtime.ray.runtime import RayRuntime
from pytorchrl.runtime.ray.start import without_unused_processes
from pytorchrl.scheme.devices import check_device

class Worker:
    def __init__(self, runtime):
        self.runtime = runtime

    def look(self, device):
        import torch
        shown = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        torch.cuda.device_count = lambda: len(shown)
        own = self.runtime.own_gpus()
        try:
            return shown, own, check_device(device, own)
        except DeviceError as error:
            return shown, own, str(error)

with without_unused_processes(ray):
    ray.init(address="local", num_cpus=2, num_gpus=4, include_dashboard=False, log_to_driver=False,
             logging_level="ERROR", object_store_memory=100 * 2**20, _temp_dir=directory)
result, runtime = {}, RayRuntime()
runtime._connect()
result["driver"] = runtime.own_gpus()
for share in (0, 0.25, 2):
    resources = {"num_cpus": 0, "num_gpus": share}
    handle = runtime.start_actor(Worker, {"runtime": runtime}, name="Worker", resources=resources)
    result[str(share)] = runtime.get(handle.submit(Worker.look, "cuda"), 60)
    runtime.kill(handle)
runtime.close()

envs = VecEnv.create_factory("CartPole-v1", vec_env_size=2)
scheme = Scheme(
    PPO.create_factory(), OnPolicyActor.create_factory(envs.observation_space, envs.action_space),
    GAEBuffer.create_factory(16), envs,
    num_col_workers=2, col_device="cuda", col_worker_resources={"num_gpus": 0.5}, seed=1)
try:
    scheme.step()
except PyTorchRLError as error:
    result["error"] = type(error).__name__, str(error)
scheme.stop()
ray.shutdown()
shutil.rmtree(directory, ignore_errors=True)
print("result:", json.dumps(result))
"""


@pytest.fixture(scope="module")
def result(tmp_path_factory, forked_python, ray_python):
    environment = process_environment(FORK_EXECUTABLE=ray_python)
    return result_of(run_process(
        forked_python, tmp_path_factory.mktemp("devices"), "-c", SCRIPT, timeout=160, env=environment))


def test_the_driver_has_the_gpus_that_torch_sees(result):
    assert result["driver"] is None


@pytest.mark.parametrize(("share", "count"), [("0.25", 1), ("2", 2)])
def test_a_worker_has_its_assigned_gpus_and_cuda_is_the_first(result, share, count):
    shown, own, device = result[share]
    assert len(shown) == count
    assert own == list(range(count))
    assert device == "cuda:0"


def test_a_worker_without_assigned_gpus_has_none(result):
    shown, own, error = result["0"]
    assert shown == own == []
    assert "device must be one of the devices visible to torch, ['cpu'], got 'cuda'" in error


def test_a_gpu_that_torch_lacks_is_reported_before_the_first_step(result):
    """Check the error if Ray assigns a share of a GPU, but torch sees no GPU, for example in a build without CUDA."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    kind, text = result["error"]
    assert kind == "DeviceError"
    assert "col_device must be one of the devices visible to torch, ['cpu'], got 'cuda'" in text
