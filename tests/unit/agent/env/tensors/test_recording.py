"""Check when steps of environments are recorded, with a recorder that calls the function again.

Graphs need a GPU: `tests/emulated_gpu/test_recorded_steps.py` compares recorded steps with others.
"""

from __future__ import annotations

import types
from typing import ClassVar

import pytest
import torch
from gymnasium.vector import VectorWrapper

from pytorchrl import VecEnv
from pytorchrl.agent.env.tensors import recording
from pytorchrl.agent.env.tensors.objects import ObjectVector
from pytorchrl.agent.env.tensors.recording import RecordedStep, is_recordable
from pytorchrl.agent.env.tensors.vec_env import TensorVecEnv
from pytorchrl.envs.tensors.classic import TorchCartPole
from tests.emulated_gpu.tensor_task import TensorTask

CPU = torch.device("cpu")


class Recorder:
    """Notes generators and recordings; a replay calls the function again, and writes into the recorded result."""

    found: ClassVar[list] = []

    def __init__(self, device, generator):
        self.device = device
        self.found.append(generator)

    def record(self, function):
        self.found.append("recorded")
        result = function()
        return result, lambda: result.copy_(function())


@pytest.fixture
def found(monkeypatch):
    monkeypatch.setattr(recording, "CudaRecorder", Recorder)
    monkeypatch.setattr(Recorder, "found", [])
    return Recorder.found


class Env:
    def __init__(self):
        self.factor, self.others = 2.0, {}

    def step(self, actions):
        return self.factor * actions


def test_steps_are_recorded_after_three_calls_and_again_after_an_attribute_is_set(found):
    env, actions = Env(), torch.ones(3)
    step = RecordedStep(env.step, env, CPU)
    for _ in range(6):
        assert step(actions).tolist() == [2.0] * 3
    assert found == [None, "recorded"]
    env.factor, env.others["factor"] = 3.0, 1.0
    results = [step(actions) for _ in range(6)]
    assert [result.tolist() for result in results] == [[3.0] * 3] * 6
    assert found == [None, "recorded"] * 2
    assert results[4] is results[5]  # they are not copied


@pytest.mark.parametrize("number", [1, 2, 3, 4])
@pytest.mark.parametrize("attribute", ["factor", "count"])
def test_steps_that_bind_an_attribute_are_not_recorded(found, caplog, attribute, number):
    class Binds(Env):
        num_calls: ClassVar[list] = []

        def step(self, actions):
            self.num_calls.append(1)
            if len(self.num_calls) == number:
                setattr(self, attribute, 4.0)
            return super().step(actions)

    env = Binds()
    step = RecordedStep(env.step, env, CPU)
    for _ in range(8):
        step(torch.ones(3))
    assert len(env.num_calls) == 8 + 1 * (number == 4)  # this recorder calls the function when it records
    assert caplog.text.count("kernels of Binds.step one at a time") == 1
    assert f"step binds the attribute {attribute!r}" in caplog.text


def test_tensors_that_are_changed_in_place_are_recorded(found, caplog):
    class Moves(Env):
        in_place = False

        def __init__(self):
            super().__init__()
            self.place = torch.zeros(3)

        def step(self, actions):
            if self.in_place:
                self.place.copy_(self.place + actions)
            else:
                self.place = self.place + actions
            return self.place.clone()

    for in_place in (False, True):
        env = Moves()
        env.in_place = in_place
        step = RecordedStep(env.step, env, CPU)
        for _ in range(5):
            step(torch.ones(3))
        assert ("; change tensors in place, such as by copy_" in caplog.text) is not in_place
        caplog.clear()
    assert found == [None, None, "recorded"]


class Declared(TensorTask):
    is_recordable = True


class Plain(VectorWrapper):
    pass


class Wrapped(VectorWrapper):
    is_recordable = True


def test_only_what_is_declared_can_be_recorded():
    envs = TorchCartPole(2)
    objects = [ObjectVector(cls(2, "cpu"), "exact") for cls in (Declared, TensorTask)]
    assert [is_recordable(env) for env in (envs, Plain(envs), Wrapped(envs), *objects)] == [
        True, False, True, True, False]
    envs.is_recordable = False
    assert not is_recordable(envs)


@pytest.mark.parametrize("wrap", [Wrapped, lambda env: env])
def test_attributes_of_all_layers_and_the_generator_are_found(found, wrap):
    envs = wrap(TorchCartPole(2))
    step = RecordedStep(lambda actions: actions + 1, envs, CPU)
    for _ in range(5):
        step(torch.ones(2))
    envs.unwrapped.new = 1
    step(torch.ones(2))
    assert found == [None, "recorded", None]  # a generator of the CPU cannot be used by a graph


def test_generators_of_a_device_are_passed_on(found, monkeypatch):
    monkeypatch.setattr(torch, "Generator", types.SimpleNamespace)
    env = Env()
    env.generator = types.SimpleNamespace(device=torch.device("cuda:0"))
    RecordedStep(env.step, env, CPU)
    assert found == [env.generator]


def test_steps_on_a_cpu_are_not_recorded():
    factory = VecEnv.create_factory(TorchCartPole, vec_env_size=2)
    envs = factory(seed=1, kind=lambda *args, **options: TensorVecEnv(*args, records=True, **options))
    assert envs._advance == envs._stepped
