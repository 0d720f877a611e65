"""Check that a run resumes on another GPU bit for bit, and on another kind of device with a warning."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from pytorchrl import Scheme
from pytorchrl.errors import ConfigError
from tests.unit.scheme.checkpointed import AGENTS, SYNCHRONOUS, differences, flat, go_on, through_a_file

pytestmark = pytest.mark.gpu(count=2)


@pytest.fixture
def make():
    """Return a function that makes simulated schemes, which are stopped after the test."""
    schemes = []

    def make_(agent, **settings):
        schemes.append(Scheme(*AGENTS[agent](), **{"runtime": "simulated", "seed": 1} | settings))
        return schemes[-1]
    yield make_
    for scheme in schemes:
        scheme.stop()


def placed(settings, device):
    """Return the settings with all levels on a device."""
    return {**settings, "device": device} | (
        {"grad_device": device} if "num_grad_workers" in settings else {}) | (
        {"col_device": device} if "num_col_workers" in settings else {})


def interrupted(make, agent, device, settings):
    scheme = make(agent, **placed(settings, device))
    scheme.start(target_steps=600)
    go_on(scheme, 6)
    return scheme, through_a_file(scheme.checkpoint())


def resumed(make, agent, device, settings, checkpoint):
    scheme = make(agent, **placed(settings, device))
    scheme.resume(checkpoint)
    scheme.start(target_steps=600)
    return scheme


def of_run(checkpoint):
    """Return a checkpoint without the devices in its settings."""
    settings = {name: value for name, value in checkpoint["settings"].items() if not name.endswith("device")}
    return {**checkpoint, "settings": settings}


@pytest.mark.parametrize("agent", AGENTS)
@pytest.mark.parametrize("settings", [SYNCHRONOUS["central"], SYNCHRONOUS["2 of each"], SYNCHRONOUS["ranks"]], ids=str)
def test_a_run_resumes_on_another_gpu_bit_for_bit(make, caplog, agent, settings):
    straight, checkpoint = interrupted(make, agent, "cuda:0", settings)
    other = resumed(make, agent, "cuda:1", settings, checkpoint)
    np.testing.assert_equal(go_on(other, 3), go_on(straight, 3))
    assert differences(of_run(straight.checkpoint()), of_run(other.checkpoint())) == []
    assert "bit for bit" not in caplog.text


@pytest.mark.parametrize("agent", AGENTS)
@pytest.mark.parametrize(("before", "after"), [("cuda:0", "cpu"), ("cpu", "cuda:1")])
@pytest.mark.parametrize("settings", [SYNCHRONOUS["central"], SYNCHRONOUS["2 of each"]], ids=str)
def test_a_run_resumes_on_another_kind_of_device_with_a_warning(make, caplog, agent, before, after, settings):
    straight, checkpoint = interrupted(make, agent, before, settings)
    state, ledger = straight.acting_state(), straight.ledger()
    other = resumed(make, agent, after, settings, checkpoint)
    assert (other.version, other.ledger()) == (straight.version, ledger)
    assert all(torch.equal(other.acting_state()[name], tensor) for name, tensor in state.items())
    kinds = f"device was '{before.split(':')[0]}', now it is '{after.split(':')[0]}'"
    assert f"draws other random numbers, so it does not continue bit for bit: {kinds}" in caplog.text
    infos = go_on(other, 3)
    assert all(math.isfinite(value) for info in infos for value in info.values())
    assert {tensor.device.type for tensor in other.acting_state().values()} == {"cpu"}


def test_a_record_repeats_on_another_gpu_and_not_on_the_cpu(make, tmp_path):
    file = tmp_path / "run.jsonl"
    scheme = make("ppo, normalized", device="cuda:0", record=file)
    go_on(scheme, 6)
    scheme.stop()
    again = make("ppo, normalized", device="cuda:1", replay=file)
    while not again.replay_is_over:
        again.step()
    with pytest.raises(ConfigError, match=r"is from another run: device was 'cuda:0', now it is 'cpu'"):
        make("ppo, normalized", replay=file).step()


@pytest.mark.parametrize("agent", ["ppo, normalized", "sac", "two policies, dqn"])
def test_files_of_a_gpu_load_without_it(make, tmp_path, agent):
    """Check that models and checkpoints contain no tensor of a GPU, which torch would not load without this GPU."""
    scheme, checkpoint = interrupted(make, agent, "cuda:1", {})
    scheme.update_worker.save_model(str(tmp_path / "model.pt"))
    model = torch.load(tmp_path / "model.pt", weights_only=True)
    tensors = [leaf for leaf in [*flat(checkpoint).values(), *flat(model).values()] if isinstance(leaf, torch.Tensor)]
    assert len(tensors) > 10
    assert {str(tensor.device) for tensor in tensors} == {"cpu"}
