"""Check that the workers of one machine share its GPUs, without changing what they compute."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from pytorchrl import A2C, ASYNC, IMPALA, GAEBuffer, OnPolicyActor, Scheme, VecEnv, VTraceBuffer
from tests.emulated_gpu.streams import NAME

pytestmark = pytest.mark.gpu(count=2)

SEEN, GPUS = "TEST_SEEN_DEVICES", {"cuda:0", "cuda:1"}
RUNTIMES = ["threads", "simulated", "processes"]


def see(task, device):
    """Note that a task uses a device; all processes of a test note it in the same folder."""
    Path(os.environ[SEEN], f"{task} {device}").touch()


class NotingA2C(A2C):
    """A2C that notes the devices on which gradients are computed."""

    def compute_gradients(self, batch):
        found = super().compute_gradients(batch)
        see("grad", found[0][0].device)
        return found


class NotingActor(OnPolicyActor):
    """An actor that notes the devices on which it chooses actions."""

    def act(self, *args, **kwargs):
        action, *others = super().act(*args, **kwargs)
        see("act", action.device)
        return action, *others


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Return a function that runs a scheme and returns its final parameters and the devices that it used."""
    if torch.cuda.get_device_name(0) == NAME:  # worker processes need the same devices
        folders = [str(Path(__file__).with_name("child")), os.environ.get("PYTHONPATH")]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, folders)))
    folders = iter(range(100))

    def make(runtime, algorithm=NotingA2C, storage=GAEBuffer, num_updates=4, **settings):
        folder = tmp_path / str(next(folders))
        folder.mkdir()
        monkeypatch.setenv(SEEN, str(folder))
        envs = VecEnv.create_factory("CartPole-v1", vec_env_size=2)
        actor = NotingActor.create_factory(envs.observation_space, envs.action_space, hidden_sizes=(8,))
        scheme = Scheme(algorithm.create_factory(), actor, storage.create_factory(8), envs, runtime=runtime, seed=1,
                        **settings)
        try:
            while scheme.version < num_updates:
                scheme.step()
            state = scheme.acting_state()
        finally:
            scheme.stop()
        found = {task: {path.name.split()[1] for path in folder.glob(f"{task} *")} for task in ("grad", "act")}
        return state, found
    return make


def assert_equal(state, expected):
    for name, tensor in expected.items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("settings", [{}, {"distribute_gradients": True}], ids=str)
def test_gradient_workers_share_the_gpus_and_compute_the_same(run, runtime, settings):
    state, found = run(runtime, num_grad_workers=2, grad_device="cuda", **settings)
    assert found["grad"] == GPUS
    expected, found = run(runtime, num_grad_workers=2, grad_device="cuda:1", **settings)
    assert found["grad"] == {"cuda:1"}
    assert_equal(state, expected)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_collection_workers_share_the_gpus_and_act_the_same(run, runtime):
    state, found = run(runtime, num_col_workers=2, device="cuda:1", col_device="cuda")
    assert found == {"grad": {"cuda:1"}, "act": GPUS}
    expected, found = run(runtime, num_col_workers=2, device="cuda:1", col_device="cuda:0")
    assert found == {"grad": {"cuda:1"}, "act": {"cuda:0"}}
    assert_equal(state, expected)


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("settings", [
    {}, {"num_col_workers": 2, "col_device": "cuda"}, {"num_col_workers": 2, "inference": "central"}], ids=str)
def test_asynchronous_workers_use_all_gpus(run, runtime, settings):
    _, found = run(runtime, IMPALA, VTraceBuffer, num_grad_workers=2, grad_device="cuda", col_communication=ASYNC,
                   **settings)
    assert found["act"] == ({"cpu"} if not settings else GPUS)
