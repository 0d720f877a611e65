"""Test that all three autoreset modes produce the same transitions, and that these match the environment's script."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, VectorEnv

from pytorchrl.agent.env import VecEnv
from pytorchrl.agent.env.autoreset import autoreset_mode_of
from pytorchrl.envs.testing import CountingEnv, ScriptedEnv
from pytorchrl.errors import ConfigError, EnvError
from tests.unit.agent.env.small_envs import SameMemory, vector_of

SCRIPT = {"rewards": (1.0, 2.0, 3.0, 4.0, 5.0), "terminations": (1, 3), "truncations": (3, 4)}


def transitions(env, num_steps):
    """Return, for each environment, a list of (*obs, action, reward, terminated, truncated, *next obs)."""
    found = [[] for _ in range(env.num_envs)]
    obs, _ = env.reset()
    obs = obs["obs"].copy()
    for _ in range(num_steps):
        action = (obs[:, 1] % 2).astype(np.int64)
        step = env.step(action)
        final = dict(zip(step.final_index.tolist(), step.final_obs.get("obs", []), strict=True))
        for e in range(env.num_envs):
            if step.valid[e]:
                true_next = final.get(e, step.obs["obs"][e])
                found[e].append((
                    *obs[e].tolist(), int(action[e]), float(step.reward[e]), bool(step.terminated[e]),
                    bool(step.truncated[e]), *true_next.tolist()))
        obs = step.obs["obs"].copy()
    env.close()
    return found


def modes_of(env_fn, kwargs):
    def build(source, **options):
        return VecEnv.create_factory(source, kwargs, 3, **options)(seed=5)

    return {
        "same_step": build(env_fn, autoreset="same_step"),
        "next_step": build(env_fn, autoreset="next_step"),
        "disabled": build(vector_of(env_fn, AutoresetMode.DISABLED)),
        "native same_step": build(vector_of(env_fn, AutoresetMode.SAME_STEP)),
        "native next_step": build(vector_of(env_fn, AutoresetMode.NEXT_STEP)),
    }


@pytest.mark.parametrize(("env_fn", "kwargs"), [
    (ScriptedEnv, SCRIPT), (CountingEnv, {"episode_length": 4}), (CountingEnv, {"episode_length": 1}),
    (CountingEnv, {"episode_length": 3, "truncate": True}),
])
def test_all_modes_give_the_same_transitions(env_fn, kwargs):
    found = {name: transitions(env, 40) for name, env in modes_of(env_fn, kwargs).items()}
    expected = found.pop("same_step")
    assert len(expected[0]) == 40
    for name, got in found.items():
        for e in range(3):
            assert len(got[e]) >= 20, name
            assert got[e] == expected[e][:len(got[e])], name


def test_scripted_transitions_match_the_script():
    rows = transitions(VecEnv.create_factory(ScriptedEnv, SCRIPT, 1)(seed=0), 10)[0]
    # Each row is (episode, t, action, reward, terminated, truncated, next episode, next t). In the script, step 3 is
    # both terminated and truncated; such a step counts as terminated only.
    assert rows[:6] == [
        (0, 0, 0, 1, False, False, 0, 1),
        (0, 1, 1, 2, True, False, 0, 2),
        (1, 0, 0, 3, False, False, 1, 1),
        (1, 1, 1, 4, True, False, 1, 2),
        (2, 0, 0, 5, False, True, 2, 1),
        (3, 0, 0, 1, False, False, 3, 1),
    ]


def test_same_step_shows_the_new_episode_and_keeps_the_last_observation():
    env = VecEnv.create_factory(CountingEnv, {"episode_length": 2}, 2, autoreset="same_step")(seed=0)
    env.reset()
    step = env.step(np.zeros(2, np.int64))
    assert not step.first.any()
    assert step.final_index.size == 0
    step = env.step(np.ones(2, np.int64))
    assert env.autoreset_mode is AutoresetMode.SAME_STEP
    assert step.valid.all()
    assert step.first.all()
    assert step.obs["obs"][:, 1:].tolist() == [[1, 0, 0]] * 2
    assert step.final_index.tolist() == [0, 1]
    assert step.final_obs["obs"][:, 1:].tolist() == [[0, 2, 1]] * 2
    assert step.final_obs["obs"].dtype == np.float32


def test_next_step_shows_the_last_observation_then_an_invalid_row():
    env = VecEnv.create_factory(CountingEnv, {"episode_length": 2}, 1, autoreset="next_step")(seed=0)
    env.reset()
    env.step(np.array([0]))
    end = env.step(np.array([1]))
    assert (end.valid[0], end.first[0], end.final_index.size) == (True, False, 0)
    assert end.obs["obs"][0, 1:].tolist() == [0, 2, 1]
    fake = env.step(np.array([1]))
    assert (fake.valid[0], fake.first[0], fake.reward[0], fake.terminated[0]) == (False, True, 0.0, False)
    assert fake.obs["obs"][0, 1:].tolist() == [1, 0, 0]
    assert fake.episodes == []
    after = env.step(np.array([1]))
    assert (after.valid[0], after.first[0]) == (True, False)


def test_reset_after_an_episode_end_cancels_the_invalid_row():
    env = VecEnv.create_factory(CountingEnv, {"episode_length": 1}, 1, autoreset="next_step")(seed=0)
    env.reset()
    env.step(np.array([0]))
    env.reset()
    assert env.step(np.array([0])).valid.all()


def test_masked_reset_does_not_affect_other_episodes():
    # SyncVectorEnv removes the reset mask from `options`. Gymnasium's statistics wrapper then finds no mask, and resets
    # the statistics of all environments.
    lengths = iter([1, 2, 5])  # the factory probes the first environment
    factory = VecEnv.create_factory(vector_of(lambda: CountingEnv(next(lengths)), AutoresetMode.DISABLED), {}, 2)
    env = factory(seed=0)
    env.reset()
    episodes = [episode for _ in range(5) for episode in env.step(np.zeros(2, np.int64)).episodes]
    assert [(e.env_index, e.length, e.env_return) for e in episodes] == [(0, 2, 3.0), (0, 2, 7.0), (1, 5, 15.0)]


class Minimal(VectorEnv):
    """Native vector environment that does not declare its autoreset mode."""

    def __init__(self, num_envs=1):
        self.num_envs = num_envs
        self.single_observation_space = gym.spaces.Box(-1, 1, (1,), np.float32)
        self.single_action_space = gym.spaces.Discrete(2)
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed=None, options=None):
        return np.zeros((self.num_envs, 1), np.float32), {}

    def step(self, actions):
        done = np.ones(self.num_envs, bool)
        return np.zeros((self.num_envs, 1), np.float32), np.ones(self.num_envs), done, done.copy(), {}


class Declared(Minimal):
    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012 - as Gymnasium declares it


def test_autoreset_mode_in_shared_metadata_is_ignored(monkeypatch):
    monkeypatch.setitem(VectorEnv.metadata, "autoreset_mode", AutoresetMode.SAME_STEP)
    assert autoreset_mode_of(Minimal()) is AutoresetMode.NEXT_STEP
    assert autoreset_mode_of(Declared()) is AutoresetMode.SAME_STEP


def test_a_second_vector_does_not_change_the_mode_of_the_first():
    cart = VecEnv.create_factory("CartPole-v1", vec_env_size=4)
    atari = VecEnv.create_factory("ALE/Pong-v5", autoreset="next_step")(seed=0)
    other = VecEnv.create_factory("ALE/Pong-v5")(seed=0)
    assert atari.autoreset_mode is AutoresetMode.NEXT_STEP
    assert other.autoreset_mode is AutoresetMode.SAME_STEP
    assert cart(seed=0).autoreset_mode is AutoresetMode.NEXT_STEP


def test_an_autoreset_mode_that_a_native_vector_lacks_is_refused():
    with pytest.raises(ConfigError, match=r"autoreset='same_step'.*NextStep.*backend='sync'"):
        VecEnv.create_factory("CartPole-v1", backend="vector", autoreset="same_step")
    assert VecEnv.create_factory("CartPole-v1", autoreset="same_step")(seed=0).autoreset_mode is AutoresetMode.SAME_STEP


def test_same_step_without_final_observations_is_an_error():
    env = VecEnv.create_factory(Declared)(seed=0)
    env.reset()
    with pytest.raises(EnvError, match="final_obs"):
        env.step(np.array([0]))


@pytest.mark.parametrize(("backend", "num_envs", "in_dict"), [
    ("sync", 2, False), ("sync", 2, True), ("async", 1, True), ("async", 1, False)])
def test_last_observation_survives_a_reset_that_reuses_its_memory(backend, num_envs, in_dict):
    envs = VecEnv.create_factory(
        SameMemory, {"in_dict": in_dict}, num_envs, backend=backend, autoreset="same_step")(seed=1)
    try:
        envs.reset()
        steps = [envs.step(np.zeros(num_envs, np.int64)) for _ in range(3)]
        assert steps[-1].truncated.all()
        (last,), (first,) = steps[-1].final_obs.values(), steps[-1].obs.values()
        assert last.tolist() == [[3.0]] * num_envs
        assert first.tolist() == [[0.0]] * num_envs
    finally:
        envs.close()


class OneMemory(VectorEnv):
    """Vector environment that counts steps, and returns the same arrays after each step; episodes have 3 steps."""

    def __init__(self, mode, num_envs=2):
        self.num_envs, self.metadata = num_envs, {"autoreset_mode": mode}
        self.single_observation_space = gym.spaces.Dict({
            "count": gym.spaces.Box(0, 9, (1,), np.float32), "action_mask": gym.spaces.MultiBinary(2)})
        self.single_action_space = gym.spaces.Discrete(2)
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, num_envs)
        self._observations, self._last = (
            {"count": np.zeros((num_envs, 1), np.float32), "action_mask": np.ones((num_envs, 2), np.int8)}
            for _ in range(2))

    def reset(self, *, seed=None, options=None):
        self._observations["count"][:], self._observations["action_mask"][:] = 0, 1
        return self._observations, {}

    def step(self, actions):
        self._observations["count"] += 1
        self._observations["action_mask"][:] = self._observations["count"] % 2 == [0, 1]
        ended = self._observations["count"][:, 0] == 3
        info = {}
        for leaf, rows in self._observations.items():
            self._last[leaf][:] = rows
        if ended.any() and self.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP:
            info = {"final_obs": self._last}
            self.reset()
        return self._observations, np.ones(self.num_envs), np.zeros(self.num_envs, bool), ended, info


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
def test_last_observations_and_masks_are_copies(mode):
    envs = VecEnv.create_factory(lambda num_envs: OneMemory(mode, num_envs), vec_env_size=2)(seed=0)
    envs.reset()
    steps = [envs.step(np.zeros(2, np.int64)) for _ in range(4)]  # the fourth step overwrites the third step's arrays
    assert steps[2].final_index.tolist() == [0, 1]
    assert steps[2].final_obs["count"].tolist() == [[3.0], [3.0]]
    assert steps[2].final_mask.tolist() == [[False, True]] * 2


def test_stacked_frames_are_copies_if_an_environment_reuses_its_memory():
    envs = VecEnv.create_factory(SameMemory, frame_stack=2)(seed=1)
    first, _ = envs.reset()
    seen = [first["obs"].tolist(), *(envs.step(np.zeros(1, np.int64)).obs["obs"].tolist() for _ in range(2))]
    assert seen == [[[0.0, 0.0]], [[0.0, 1.0]], [[1.0, 2.0]]]
