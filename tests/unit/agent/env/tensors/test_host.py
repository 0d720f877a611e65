"""Test that arrays share the memory of tensors on the CPU, and that tensors of other devices are copied by name."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from pytorchrl import VecEnv
from pytorchrl.agent.env.tensors.host import HostVector
from pytorchrl.agent.env.tensors.vec_env import class_for
from pytorchrl.envs.testing import CountingEnv
from pytorchrl.errors import EnvError
from tests.unit.agent.env.tensors import stand_ins


def test_nothing_is_copied_on_the_cpu():
    class Recorded(stand_ins.FiveResults):
        actions = last = None

        def step(self, actions):
            self.actions = actions
            self.last = super().step(actions)
            return self.last

    env = Recorded(4)
    vector = VecEnv.create_factory(env)(seed=1).vector
    vector.reset(seed=1)
    actions = np.ones(4, np.int64)
    results = vector.step(actions)
    assert env.actions.data_ptr() == actions.ctypes.data
    for tensor, array in zip(env.last[:4], results[:4], strict=True):
        assert tensor.data_ptr() == array.ctypes.data


def test_user_vectors_of_gymnasium_keep_a_seed_for_each_environment():
    class Seeded(CountingEnv):
        def reset(self, *, seed=None, options=None):
            self.seen = seed
            return super().reset(seed=seed, options=options)

    for given in (SyncVectorEnv([Seeded] * 3), lambda num_envs: SyncVectorEnv([Seeded] * num_envs)):
        env = VecEnv.create_factory(given, vec_env_size=3)(seed=7)
        env.reset()
        assert [one.seen for one in env.vector.unwrapped.envs] == env.seeds


@pytest.mark.parametrize("is_given", [False, True])
def test_a_failure_ends_the_processes_of_a_vector_unless_it_is_given(is_given):
    def make(num_envs=2):
        return AsyncVectorEnv([CountingEnv] * num_envs, context="spawn")

    env = VecEnv.create_factory(make() if is_given else make, vec_env_size=2)(seed=1)
    env.reset()
    env._failed = True
    env.close()
    inner = env.vector.unwrapped
    assert inner.closed != is_given
    inner.close()


def test_masks_of_resets_are_tensors_where_results_are():
    env = HostVector(stand_ins.TensorVector(3, AutoresetMode.DISABLED), "worker", "Walk", AutoresetMode.DISABLED)
    seen = []
    env.env.walk.begin = seen.append
    env.reset(seed=1)
    env.reset(options={"reset_mask": np.array([True, False, True])})
    assert seen[0] is None
    assert seen[1].equal(torch.tensor([True, False, True]))


def test_arrays_of_another_device_are_copied_and_this_is_said_once(caplog):
    class OnDevice(np.ndarray):
        device = "gpu:0"

        def __dlpack_device__(self):
            return 2, 0

    class Elsewhere(stand_ins.TensorVector):
        def obs(self):
            return super().obs().view(OnDevice)

    env = HostVector(Elsewhere(2, AutoresetMode.DISABLED, device=None), "worker", "Walk", AutoresetMode.DISABLED)
    env.reset()
    env.reset(options={"reset_mask": np.array([True, False])})
    assert caplog.messages == ["worker: the observations of Walk are copied from gpu:0 to the host in every step"]


@pytest.mark.gpu
def test_tensors_of_a_gpu_are_copied_and_this_is_said(caplog):
    class OnGpu(stand_ins.FiveResults):
        def __init__(self, num_envs, **options):
            super().__init__(num_envs, **options)
            self.device = torch.device("cuda")

        def out(self, name, value):
            return value.cuda()

        def advance(self, actions):
            assert actions.device.type == "cuda"
            return super().advance(actions.cpu())

    factory = VecEnv.create_factory(OnGpu, vec_env_size=4)
    assert class_for(factory, torch.device("cpu")) is None
    assert "copied from cuda:0 to the host in every step, because the actor uses cpu" in caplog.text
    env = factory(seed=1)
    expected = VecEnv.create_factory(stand_ins.FiveResults, vec_env_size=4)(seed=1)
    assert np.array_equal(env.reset()[0]["obs"], expected.reset()[0]["obs"])
    for _ in range(10):
        step, other = (envs.step(np.ones(4, np.int64)) for envs in (env, expected))
        assert np.array_equal(step.obs["obs"], other.obs["obs"])
        assert np.array_equal(step.final_obs["obs"], other.final_obs["obs"]) if len(step.final_index) else True

    class Mixed(OnGpu):
        def step(self, actions):
            obs, reward, terminated, truncated, extras = super().step(actions)
            return obs, reward, terminated, truncated.cpu(), extras

    env = VecEnv.create_factory(Mixed, vec_env_size=4)(seed=1)
    env.reset()
    with pytest.raises(EnvError, match="truncated is on cpu, but the environments are on cuda"):
        env.step(np.ones(4, np.int64))


def test_make_vec_keeps_the_dtype_of_actions():
    env = VecEnv.create_factory(lambda num_envs: gym.make_vec("Pendulum-v1", num_envs), vec_env_size=2)(seed=1)
    env.reset()
    assert env.step(np.zeros((2, 1), np.float32)).reward.shape == (2,)
