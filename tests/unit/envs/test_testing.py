import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from pytorchrl.agent.env import VecEnv
from pytorchrl.envs import testing
from pytorchrl.errors import ConfigError


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("env", [
    testing.CountingEnv(), testing.ScriptedEnv(rewards=(1.0, 2.0), terminations=(1,)),
    testing.SleepEnv(step_s=0.0), testing.FaultyEnv(fault="step", at=10**6),
    testing.HangingEnv(at=10**6),
])
def test_test_environments_follow_the_gymnasium_api(env):
    assert isinstance(env, gym.Env)
    env.reset(seed=1)
    env.reset()
    for _ in range(25):
        obs, reward, terminated, truncated, info = env.step(env.action_space.sample())
        assert env.observation_space.contains(obs)
        assert isinstance(reward, float)
        assert isinstance(info, dict)
        if terminated or truncated:
            env.reset()
    if not isinstance(env, (testing.CountingEnv, testing.ScriptedEnv)):
        check_env(env)


def test_counting_env_observes_seed_episode_step_and_action():
    env = VecEnv.create_factory(testing.CountingEnv, {"episode_length": 2, "offset": 1000}, 2)(seed=0)
    obs, _ = env.reset()
    seeds = [seed % 2**16 for seed in env.seeds]
    assert obs["obs"].tolist() == [[seed, 0, 0, 0] for seed in seeds]
    step = env.step(np.array([0, 1]))
    assert step.obs["obs"].tolist() == [[seeds[0], 0, 1, 0], [seeds[1], 0, 1, 1]]
    rewards = [step.reward[0]] + [env.step(np.array([0, 1])).reward[0] for _ in range(3)]
    assert rewards == [1001, 1002, 1003, 1004]


def test_scripted_env_repeats_its_script_over_episodes():
    env = testing.ScriptedEnv(rewards=(1.0, 2.0, 3.0), terminations=(0,), truncations=(2,))
    env.reset()
    steps = [env.step(0)[1:4] for _ in range(4)]
    assert steps == [(1.0, True, False), (2.0, False, False), (3.0, False, True), (1.0, True, False)]
    with pytest.raises(ConfigError, match="rewards"):
        testing.ScriptedEnv(rewards=())


def test_sleep_env_sleeps_for_the_given_time(monkeypatch):
    slept = []
    monkeypatch.setattr(testing.time, "sleep", slept.append)
    env = testing.SleepEnv(step_s=0.25, episode_length=3)
    env.reset()
    env.step(0)
    assert slept == [0.25]


def test_faulty_env_fails_at_the_given_step_and_refuses_unknown_faults():
    env = testing.FaultyEnv(fault="step", at=2)
    env.reset()
    env.step(0)
    env.step(0)
    with pytest.raises(RuntimeError, match="faulty step"):
        env.step(0)
    with pytest.raises(ConfigError, match="fault must be one of"):
        testing.FaultyEnv(fault="typo")


@pytest.mark.parametrize("call", ["step", "reset", "render", "close"])
def test_hanging_env_hangs_in_one_call(call):
    hung = []

    class Hung(testing.HangingEnv):
        def hang(self):
            hung.append(self._num_steps)
    env = Hung(call, at=2)
    calls = {"step": lambda: env.step(0), "reset": env.reset, "render": env.render, "close": env.close}
    for _ in range(3):
        for other in calls.values():
            other()
    assert hung == [2 if call in ("render", "close", "reset") else 1]
