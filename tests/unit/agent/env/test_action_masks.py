"""Test the action masks that a vector environment returns."""

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv

from pytorchrl.agent.env import VecEnv
from pytorchrl.envs.testing import CountingEnv
from pytorchrl.errors import EnvError
from tests.unit.agent.env.small_envs import EchoEnv, vector_of


class InfoMaskEnv(CountingEnv):
    """Environment that allows only action 0 at even steps, and only action 1 at odd steps."""

    def info(self):
        return {"action_mask": np.eye(2, dtype=np.int8)[self._t % 2]}

    def reset(self, **kwargs):
        return super().reset(**kwargs)[0], self.info()

    def step(self, action):
        *rest, _ = super().step(action)
        return *rest, self.info()


def test_action_mask_is_removed_from_the_observation():
    factory = VecEnv.create_factory(EchoEnv, {"action_space": spaces.Discrete(3)}, 2)
    assert set(factory.observation_space) == {"value"}
    env = factory(seed=0)
    obs, mask = env.reset()
    step = env.step(np.zeros(2, np.int64))
    for found in (mask, step.mask):
        assert found.dtype == np.bool_
        assert found.tolist() == [[True, False, True]] * 2
    assert set(obs) == set(step.obs) == {"value"}
    assert obs["value"].dtype == step.obs["value"].dtype == np.float32


class LeafMaskEnv(InfoMaskEnv):
    """Environment with the masks of `InfoMaskEnv` in its observations instead of `info`."""

    def __init__(self, **options):
        super().__init__(**options)
        self.observation_space = spaces.Dict({"obs": self.observation_space, "action_mask": spaces.MultiBinary(2)})

    def reset(self, **kwargs):
        obs, info = super().reset(**kwargs)
        return {"obs": obs, **info}, {}

    def step(self, action):
        obs, *rest, info = super().step(action)
        return {"obs": obs, **info}, *rest, {}


@pytest.mark.parametrize("cut", [{}, {"max_episode_steps": 3}], ids=["terminated", "truncated"])
@pytest.mark.parametrize("env", [InfoMaskEnv, LeafMaskEnv])
@pytest.mark.parametrize("autoreset", ["same_step", "next_step"])
def test_action_mask_matches_the_observation(autoreset, env, cut):
    env = VecEnv.create_factory(env, {"episode_length": 9 if cut else 3}, 2, autoreset=autoreset, **cut)(seed=0)
    obs, mask = env.reset()
    ended, ends = np.zeros(2, dtype=bool), 0
    for _ in range(8):
        expected = np.eye(2, dtype=bool)[obs["obs"][:, 2].astype(int) % 2]
        if autoreset == "next_step":  # the action after a termination is ignored, so all actions are allowed
            expected[ended] = True
        np.testing.assert_array_equal(mask, expected)
        step = env.step(np.zeros(2, np.int64))
        if len(step.final_index):
            last = next(leaf for leaf in step.final_obs.values())[:, 2].astype(int)
            assert (last == 3).all()
            np.testing.assert_array_equal(step.final_mask, np.eye(2, dtype=bool)[last % 2])
            ends += 1
        obs, mask = step.obs, step.mask
        ended = step.terminated  # a truncation does not change the mask, because learners bootstrap with it
    assert ends == (2 if autoreset == "same_step" else 0)


def test_final_mask_without_allowed_actions_allows_all():
    class Nothing(LeafMaskEnv):
        def step(self, action):
            obs, reward, terminated, *rest = super().step(action)
            return {**obs, "action_mask": obs["action_mask"] * (not terminated)}, reward, terminated, *rest

    env = VecEnv.create_factory(Nothing, {"episode_length": 2}, autoreset="same_step")(seed=0)
    env.reset()
    env.step(np.zeros(1, np.int64))
    assert env.step(np.zeros(1, np.int64)).final_mask.tolist() == [[True, True]]


def test_action_mask_in_info_survives_a_masked_reset():
    make = lambda num_envs: SyncVectorEnv(  # noqa: E731
        [lambda: InfoMaskEnv(episode_length=3), lambda: InfoMaskEnv(episode_length=2)][:num_envs],
        autoreset_mode="Disabled")
    env = VecEnv.create_factory(make, vec_env_size=2)(seed=0)
    obs, mask = env.reset()
    for _ in range(8):
        np.testing.assert_array_equal(mask, np.eye(2, dtype=bool)[obs["obs"][:, 2].astype(int) % 2])
        step = env.step(np.zeros(2, np.int64))
        if len(step.final_index):
            expected = np.eye(2, dtype=bool)[step.final_obs["obs"][:, 2].astype(int) % 2]
            np.testing.assert_array_equal(step.final_mask, expected)
        obs, mask = step.obs, step.mask


@pytest.mark.parametrize("mode", ["SameStep", "Disabled"])
@pytest.mark.parametrize("episode_lengths", [(2, 2), (2, 3)], ids=["equal lengths", "different lengths"])
def test_last_step_of_an_episode_needs_no_action_mask(mode, episode_lengths):
    class Ending(InfoMaskEnv):
        """Environment whose `info` contains no mask after an episode's last step."""

        def step(self, action):
            obs, reward, terminated, truncated, info = super().step(action)
            return obs, reward, terminated, truncated, {} if terminated else info

    lengths = iter([2, *episode_lengths])  # the factory probes the first environment
    env = VecEnv.create_factory(vector_of(lambda: Ending(next(lengths)), mode), vec_env_size=2)(seed=0)
    env.reset()
    for _ in range(8):
        step = env.step(np.zeros(2, np.int64))
        np.testing.assert_array_equal(step.mask, np.eye(2, dtype=bool)[step.obs["obs"][:, 2].astype(int) % 2])
        assert step.final_mask is None or step.final_mask.all()


@pytest.mark.parametrize("mode", ["SameStep", "Disabled"])
def test_first_observation_of_every_episode_needs_an_action_mask(mode):
    class Forgetful(InfoMaskEnv):
        """Environment whose `info` contains no mask after the second reset."""

        resets = 0

        def reset(self, **kwargs):
            self.resets += 1
            obs, info = super().reset(**kwargs)
            return obs, info if self.resets == 1 else {}

    lengths = iter([2, 2, 3])
    env = VecEnv.create_factory(vector_of(lambda: Forgetful(next(lengths)), mode), vec_env_size=2)(seed=0)
    env.reset()
    env.step(np.zeros(2, np.int64))
    with pytest.raises(EnvError, match="action_mask"):
        env.step(np.zeros(2, np.int64))


def test_action_mask_that_disappears_is_an_error():
    class Vanishing(InfoMaskEnv):
        def step(self, action):
            return *super().step(action)[:4], {}

    env = VecEnv.create_factory(Vanishing)(seed=0)
    env.reset()
    with pytest.raises(EnvError, match="action_mask"):
        env.step(np.zeros(1, np.int64))
