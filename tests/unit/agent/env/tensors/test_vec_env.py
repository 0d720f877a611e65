"""Compare environments whose tensors stay on their device with the same environments read by the host.

The device is the CPU here. `tests/emulated_gpu/test_tensor_envs.py` has the tests with a device of their own.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode

from pytorchrl import VecEnv
from pytorchrl.agent.env.tensors.vec_env import TensorVecEnv, class_for, reason_for_host
from pytorchrl.errors import CallOrderError, EnvError, StoppedError
from tests.emulated_gpu.tensor_task import TensorTask
from tests.emulated_gpu.waits import Waits
from tests.unit.agent.env.tensors import stand_ins

NUM_ENVS = 4


def pair(function=None, **options):
    """Return equal environments that return arrays and tensors."""
    factory = VecEnv.create_factory(function or task, vec_env_size=NUM_ENVS, **options)
    return factory(seed=3), factory(seed=3, kind=TensorVecEnv)


def task(num_envs, **options):
    return TensorTask(num_envs, "cpu", **options)


def next_step(num_envs):
    envs = stand_ins.TensorVector(num_envs, AutoresetMode.NEXT_STEP)
    envs.device = torch.device("cpu")
    return envs


def actions_of(envs, rng):
    space = envs.action_space
    if hasattr(space, "n"):
        return rng.integers(0, space.n, NUM_ENVS)
    return rng.uniform(-1, 1, envs.action_shape).astype(np.float32)


@pytest.mark.parametrize(("function", "options"), [
    (task, {}), (task, {"env_kwargs": {"is_discrete": True}}), (task, {"reward_transform": "sign"}),
    (task, {"reward_transform": 0.1}), (task, {"reward_transform": "clip"}), (next_step, {}),
])
def test_steps_equal_those_that_the_host_reads(function, options):
    host, device = pair(function, **options)
    rng, episodes, found = np.random.default_rng(0), [], []
    first, tensors = host.reset()[0], device.reset()[0]
    for _ in range(40):
        assert {name: leaf.tolist() for name, leaf in first.items()} == {
            name: leaf.tolist() for name, leaf in tensors.items()}
        action = actions_of(host, rng)
        step, other = host.step(action), device.step(torch.from_numpy(action))
        for name in ("reward", "terminated", "truncated", "valid", "first"):
            assert np.array_equal(getattr(step, name), getattr(other, name).numpy()), name
        for number, index in enumerate(step.final_index):
            for name, leaf in other.final_obs.items():
                assert np.array_equal(step.final_obs[name][number], leaf[index].numpy())
        episodes += [(episode.env_return, episode.length, episode.env_index) for episode in step.episodes]
        found += [(float(other.episode_return[index]), int(other.episode_length[index]), index)
                  for index in other.ended.nonzero()[:, 0].tolist()]
        first, tensors = step.obs, other.obs
    assert episodes
    assert found == pytest.approx(episodes)
    host.close()
    device.close()


def test_a_step_reads_nothing():
    _, envs = pair()
    envs.reset()
    action = torch.zeros(envs.action_shape)
    with Waits("cpu") as waits:
        for _ in range(10):
            envs.step(action)
    assert waits.reads == 0, waits.names


def test_an_environment_may_change_the_actions():
    class Spoils(TensorTask):
        def step(self, action):
            action.fill_(0.0)
            return super().step(action)

    factory = VecEnv.create_factory(lambda num_envs: Spoils(num_envs, "cpu"), vec_env_size=NUM_ENVS)
    envs = factory(seed=1, kind=TensorVecEnv)
    envs.reset()
    action = torch.ones(envs.action_shape)
    envs.step(action)
    assert bool((action == 1).all())


def test_the_order_of_calls_is_checked():
    _, envs = pair()
    with pytest.raises(CallOrderError, match="before reset"):
        envs.step(torch.zeros(envs.action_shape))
    envs.close()
    with pytest.raises(StoppedError):
        envs.reset()


def test_unknown_ends_are_refused_once_the_host_knows():
    factory = VecEnv.create_factory(task, {"has_final": False}, NUM_ENVS)
    envs = factory(seed=1, kind=TensorVecEnv)
    envs.reset()
    for _ in range(8):
        step = envs.step(torch.zeros(envs.action_shape))
        if bool(step.approximated.any()):
            break
    assert bool(step.approximated.any())
    episode = stand_ins_episode(step)
    with pytest.raises(EnvError, match="truncation='approximate'"):
        envs.log([episode])


def stand_ins_episode(step):
    """Return the first episode that ended in a step with an unknown end."""
    from pytorchrl.agent.data import Episode

    index = int(step.approximated.nonzero()[0, 0])
    return Episode(float(step.episode_return[index]), int(step.episode_length[index]), 0.0, index, terminated=False,
                   is_approximated=True)


def test_only_environments_on_a_device_need_a_reason():
    factory = VecEnv.create_factory(task, vec_env_size=NUM_ENVS)
    assert factory.device is None
    assert class_for(factory, torch.device("cpu")) is None
    assert reason_for_host(factory, None) == "the actor uses arrays"


def test_unknown_last_observations_are_approximated_by_those_before_the_step():
    factory = VecEnv.create_factory(task, {"has_final": False}, NUM_ENVS, truncation="approximate")
    envs, found = factory(seed=1, kind=TensorVecEnv), 0
    before = {name: leaf.clone() for name, leaf in envs.reset()[0].items()}
    for _ in range(20):
        step = envs.step(torch.full(envs.action_shape, 0.1))
        found += int(step.approximated.sum())
        for name, leaf in before.items():
            assert torch.equal(step.final_obs[name], leaf), name
        before = {name: leaf.clone() for name, leaf in step.obs.items()}
    assert found


def test_a_reset_starts_new_accounts():
    _, envs = pair()
    envs.reset()
    action = torch.zeros(envs.action_shape)
    assert envs.step(action).episode_length.tolist() == [1] * NUM_ENVS
    envs.reset()
    step = envs.step(action)
    assert step.episode_length.tolist() == [1] * NUM_ENVS
    assert torch.equal(step.episode_return, step.reward.double())


def test_the_reward_of_a_reset_is_not_counted():
    class Rewards(stand_ins.TensorVector):
        device = torch.device("cpu")

        def step(self, action):
            obs, reward, *rest = super().step(action)
            return obs, torch.ones_like(reward), *rest

    factory = VecEnv.create_factory(lambda num_envs: Rewards(num_envs, AutoresetMode.NEXT_STEP), vec_env_size=NUM_ENVS)
    envs, num_resets = factory(seed=1, kind=TensorVecEnv), 0
    envs.reset()
    for _ in range(40):
        step = envs.step(torch.ones(envs.action_shape))
        num_resets += int((~step.valid).sum())
        assert torch.equal(step.episode_return, step.episode_length.double())
    assert num_resets
