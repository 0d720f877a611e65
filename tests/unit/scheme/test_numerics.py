"""Tests of the settings of torch with which the processes of a scheme compute."""

from __future__ import annotations

import os
import warnings

import pytest
import torch

from pytorchrl import (
    A2C,
    DQN,
    PPO,
    R2D2,
    SAC,
    GAEBuffer,
    OffPolicyActor,
    OnPolicyActor,
    QActor,
    ReplayBuffer,
    Scheme,
    SequenceBuffer,
    VecEnv,
)
from pytorchrl.errors import ConfigError
from tests.conftest import result_of

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
BOTH = {"deterministic_kernels": True, "tf32": True}


def settings():
    """Return the settings of torch that a scheme may change."""
    import torch  # not a global name, whose submodule `cudnn` could not be sent to processes

    cudnn = torch.backends.cudnn
    return {"threads": torch.get_num_threads(), "deterministic": torch.are_deterministic_algorithms_enabled(),
            "cudnn": (cudnn.deterministic, cudnn.benchmark), "convolutions": cudnn.allow_tf32,
            "products": torch.get_float32_matmul_precision()}


@pytest.fixture(autouse=True)
def unchanged(monkeypatch):
    """Check that torch has the same settings after the test, and restore the environment variable."""
    monkeypatch.setenv(WORKSPACE, ":0:0")
    before = settings()
    yield
    assert settings() == before


@pytest.fixture
def make(stopped):
    """Return a function that makes a scheme with a small agent."""
    def make_scheme(name="ppo", *, kind=None, **options):
        envs = VecEnv.create_factory("Pendulum-v1" if name == "sac" else "CartPole-v1", vec_env_size=2)
        spaces = envs.observation_space, envs.action_space
        replay = {"start_steps": 20, "mini_batch_size": 8}
        algorithm, actor, storage = {
            "ppo": (PPO.create_factory(num_epochs=2, num_mini_batch=2), kind or OnPolicyActor,
                    GAEBuffer.create_factory(8)),
            "a2c": (A2C.create_factory(), OnPolicyActor, GAEBuffer.create_factory(8)),
            "dqn": (DQN.create_factory(**replay), QActor, ReplayBuffer.create_factory(200, rollout_size=5)),
            "sac": (SAC.create_factory(**replay), OffPolicyActor, ReplayBuffer.create_factory(200, rollout_size=5)),
            "r2d2": (R2D2.create_factory(**replay), QActor, SequenceBuffer.create_factory(
                200, rollout_size=5, length=4, burn_in=1, period=2))}[name]
        memory = {"recurrent_net": "lstm", "recurrent_size": 4} if name in ("a2c", "r2d2") else {}
        return stopped(Scheme(algorithm, actor.create_factory(*spaces, hidden_sizes=(8,), **memory), storage, envs,
                              **{"seed": 1} | options))
    return make_scheme


def test_settings_hold_in_the_program_until_the_scheme_stops(make):
    before = settings()
    assert before["convolutions"] is True  # torch's default, with which float32 is not exact on a GPU
    scheme = make(**BOTH, num_threads=2)
    assert settings() == before
    scheme.start()
    assert settings() == {"threads": 2, "deterministic": True, "cudnn": (True, False), "convolutions": True,
                          "products": "high"}
    assert os.environ[WORKSPACE] == ":4096:8"
    scheme.stop()
    assert settings() == before


def test_float32_is_exact_by_default_and_kernels_are_left_as_they_are(make, monkeypatch):
    before = settings()
    scheme = make()
    scheme.start()
    assert settings() == before | {"convolutions": False, "products": "highest"}
    assert os.environ[WORKSPACE] == ":0:0"


def test_schemes_at_the_same_time_leave_the_settings_of_the_program(make):
    before = settings()
    first, second = make(**BOTH, num_threads=2), make(num_threads=3)
    first.start()
    second.start()
    first.stop()
    assert settings() == before | {"threads": 3, "convolutions": False}
    first = make(**BOTH, num_threads=2)
    first.start()
    assert settings()["products"] == "high"
    first.stop()
    assert settings() == before | {"threads": 3, "convolutions": False}
    second.stop()
    assert settings() == before


class SettingsSeen(OnPolicyActor):
    """An actor that only processes with both settings can build, apart from the program."""

    program = os.getpid()

    def __init__(self, options, *, device, seed):
        if os.getpid() != self.program:
            found = settings()
            assert found["deterministic"] is found["convolutions"] is True
            assert found["products"] == "high"
            assert os.environ[WORKSPACE] == ":4096:8"
        super().__init__(options, device=device, seed=seed)


@pytest.mark.parametrize("workers", [
    {"num_col_workers": 2}, {"num_grad_workers": 2}, {"num_grad_workers": 2, "num_col_workers": 2}], ids=str)
def test_every_process_of_a_worker_has_the_settings(make, quick_processes, workers):
    scheme = make(kind=SettingsSeen, **workers, **BOTH, runtime="processes", on_worker_failure="raise")
    assert scheme.has_remote_workers
    scheme.step()
    scheme.stop()


@pytest.mark.parametrize("name", ["ppo", "a2c", "dqn", "sac", "r2d2"])
def test_deterministic_kernels_do_not_change_results_on_the_cpu(make, name):
    found = []
    for chosen in ({}, {"deterministic_kernels": True}):
        scheme = make(name, runtime="simulated", **chosen)
        while scheme.version < 4:
            scheme.step()
        found.append(scheme.acting_state())
        scheme.stop()
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(leaf, found[1][key]) for key, leaf in found[0].items())


def test_it_may_be_too_late_for_deterministic_kernels(make, monkeypatch):
    before = settings()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    scheme = make(**BOTH, num_threads=2)
    with pytest.raises(ConfigError, match=f"{WORKSPACE}=:4096:8 before.*set this variable before Python starts"):
        scheme.start()
    assert settings() == before
    monkeypatch.setenv(WORKSPACE, ":16:8")  # the other value that torch accepts
    make(**BOTH).start()
    assert os.environ[WORKSPACE] == ":16:8"


def test_a_warning_against_the_older_kind_of_settings_is_not_shown(make, monkeypatch):
    """Check with a function that warns like those of torch 2.9; warnings are errors in tests."""
    set_precision, given = torch.set_float32_matmul_precision, []

    def warn(precision):
        given.append(precision)
        warnings.warn("Please use the new API settings to control TF32 behavior, such as", UserWarning, stacklevel=2)
        set_precision(precision)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", warn)
    make().start()
    assert given == ["highest"]


NEW_KIND = """
import json, torch
from pytorchrl import PPO, GAEBuffer, OnPolicyActor, Scheme, VecEnv

parts = [torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn]
torch.backends.fp32_precision = "tf32"
found = [[part.fp32_precision for part in parts]]
envs = VecEnv.create_factory("CartPole-v1")
scheme = Scheme(PPO.create_factory(), OnPolicyActor.create_factory(envs.observation_space, envs.action_space),
                GAEBuffer.create_factory(8), envs)
scheme.start()
found.append([part.fp32_precision for part in parts])
found.append([torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32])  # raise errors if kinds differ
scheme.stop()
found.append([part.fp32_precision for part in parts])
print("result:", json.dumps(found))
"""


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="torch has only the older kind of settings")
def test_the_newer_kind_of_settings_of_tf32_does_not_collide_with_the_older_one(run_forked):
    result = run_forked("-c", NEW_KIND)
    assert result_of(result) == [["tf32"] * 3, ["ieee"] * 3, ["highest", False], ["tf32"] * 3]
