"""Check that each kind of agent trains on a GPU, saves itself for any device, and learns the same as on the CPU."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch

from pytorchrl import Scheme
from tests.emulated_gpu.agents import AGENTS, COMPILED, settings_on

pytestmark = pytest.mark.gpu

GPU = "cuda:0"


@contextlib.contextmanager
def started(case, device):
    """Yield a scheme, and stop it at the end."""
    scheme = Scheme(*case.agent, **settings_on(case, device))
    scheme.start()
    try:
        yield scheme
    finally:
        ledger = scheme.stop()
    assert ledger["in_flight"] == ledger["queued"] == 0


def train(scheme, num_updates):
    """Run updates, and return a copy of the parameters and buffers with which the agent acts."""
    for _ in range(num_updates):
        info = scheme.step()
        assert all(math.isfinite(value) for value in info.values() if isinstance(value, float)), info
    return {name: tensor.detach().cpu().clone() for name, tensor in scheme.acting_state().items()}


def tensors_in(state):
    """Return all tensors in nested dictionaries, lists and objects of data classes."""
    if isinstance(state, torch.Tensor):
        return [state]
    if isinstance(state, dict):
        state = list(state.values())
    elif hasattr(state, "__dataclass_fields__"):
        state = list(vars(state).values())
    return [tensor for part in state for tensor in tensors_in(part)] if isinstance(state, (list, tuple)) else []


def assert_trains(case, path, num_updates):
    with started(case, GPU) as scheme:
        before = train(scheme, 0)
        after = train(scheme, num_updates)
        worker = scheme.update_worker.local_worker
        assert {str(group.data.device) for group in worker.algo.groups.values()} == {GPU}
        assert {str(tensor.device) for tensor in worker.actor.state_dict().values()} == {GPU}
        checkpoint = scheme.checkpoint()
        scheme.save_model(path)
    saved = tensors_in(checkpoint)
    assert all(torch.isfinite(tensor).all() for tensor in after.values())
    assert any(not torch.equal(after[name], before[name]) for name in after)
    assert saved
    assert {tensor.device.type for tensor in saved} == {"cpu"}
    resumed = Scheme(*case.agent, **settings_on(case, GPU))
    resumed.resume(checkpoint)
    train(resumed, 2)
    resumed.stop()
    loaded = tensors_in(torch.load(path, weights_only=True))
    assert loaded
    assert {tensor.device.type for tensor in loaded} == {"cpu"}


@pytest.mark.parametrize("name", AGENTS)
def test_every_agent_trains_on_a_gpu(tmp_path, name):
    assert_trains(AGENTS[name], str(tmp_path / "model"), 4)


@pytest.mark.parametrize("name", COMPILED)
def test_every_recorded_agent_trains_on_a_gpu(tmp_path, caplog, name):
    """Check agents for so many updates that their functions are recorded into CUDA graphs, and replayed."""
    assert_trains(COMPILED[name], str(tmp_path / "model"), 8)
    assert "could not be recorded" not in caplog.text


# agents whose results differ by rounding
ROUNDED = ("PPO, LSTM", "PPO, intrinsic rewards", "SAC, residual blocks", "IMPALA, images, asynchronous")


@pytest.mark.parametrize("name", AGENTS)
def test_every_agent_learns_the_same_as_on_the_cpu(monkeypatch, same_numbers, fault_of_order, devices, name):
    """Check that no result depends on where tensors are, or on how early the GPU does what it was told to do."""
    # The kernels of the CPU round differently; their own tests compare them with the loop that GPUs use.
    monkeypatch.setattr("pytorchrl.agent.actors.memory.suits", lambda *tensors: False)
    learned, num_late = {}, devices.emulated_gpu_num_late()
    for device in (GPU, "cpu"):
        with started(AGENTS[name], device) as scheme:
            learned[device] = train(scheme, 4)
    assert fault_of_order() == ""
    torch.testing.assert_close(learned[GPU], learned["cpu"], rtol=0.0, atol=2e-6 if name in ROUNDED else 0.0)
    if AGENTS[name].copies_ahead:
        assert devices.emulated_gpu_num_late() > num_late
