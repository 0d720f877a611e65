"""Test the environments and options that `VecEnv` rejects, and its error messages."""

import threading

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from pytorchrl.agent.env import VecEnv
from pytorchrl.envs.testing import CountingEnv, FaultyEnv
from pytorchrl.errors import ConfigError, EnvError, SpaceError
from tests.unit.agent.env.small_envs import EchoEnv


def test_spaces_that_differ_between_workers_are_refused():
    sizes = iter([2, 3])
    factory = VecEnv.create_factory(lambda: CountingEnv(num_actions=next(sizes)))
    with pytest.raises(EnvError, match=r"GWorker 0/CWorker 1: expected spaces.*Discrete\(2\), got.*Discrete\(3\)"):
        factory(index_col_worker=1)


def test_unsupported_spaces_are_reported():
    class Texts(CountingEnv):
        def __init__(self):
            super().__init__()
            self.observation_space = spaces.Text(4)

        def reset(self, *, seed=None, options=None):
            return "word", {}

    with pytest.raises(SpaceError, match="'obs' is a Text"):
        VecEnv.create_factory(Texts)
    with pytest.raises(SpaceError, match="action space is Tuple"):
        VecEnv.create_factory(EchoEnv, {"action_space": spaces.Tuple((spaces.Discrete(2),))})


@pytest.mark.parametrize(("options", "match"), [
    ({"env_fn": "CartPole-v9"}, "did you mean 'CartPole-v1'"),
    ({"env_fn": "CartPol-v1"}, "did you mean 'CartPole-v1'"),
    ({"env_fn": "Qqqq"}, "Is its package imported.*'module:id', where the module registers the id"),
    ({"env_fn": "ALE/Pong-v6"}, "'ALE/Pong-v5'"),
    ({"env_fn": "no_such_module_here:Env-v0"}, "no_such_module_here"),
    ({"env_fn": 3}, "env_fn must be"),
    ({"env_fn": lambda: 3}, "must return a gymnasium.Env, got int"),
    ({"env_fn": lambda num_envs: CountingEnv()}, "VectorEnv of that size"),
    ({"env_fn": CountingEnv, "vec_env_size": 0}, "vec_env_size must be a whole number >= 1, got 0"),
    ({"env_fn": CountingEnv, "backend": "asynch"}, "did you mean 'async'"),
    ({"env_fn": CountingEnv, "backend": "vector"}, "backend='vector' needs a native"),
    ({"env_fn": CountingEnv, "autoreset": "never"}, "autoreset must be one of"),
    ({"env_fn": CountingEnv, "reward_transform": "tanh"}, "reward_transform must be"),
    ({"env_fn": CountingEnv, "reward_transform": float("nan")}, "must be finite"),
    ({"env_fn": CountingEnv, "max_episode_steps": 0}, "max_episode_steps must be a whole number >= 1"),
    ({"env_fn": CountingEnv, "wrappers": (3,)}, "wrappers must be functions"),
    ({"env_fn": CountingEnv, "log_dir": ""}, "log_dir"),
    ({"env_fn": CountingEnv, "info_keywords": ("r",)}, "differ from the columns"),
    ({"env_fn": CountingEnv, "frame_stacks": 2}, "did you mean 'frame_stack'"),
    ({"env_fn": "CartPole-v1", "backend": "vector", "frame_stack": 2}, "need single environments"),
    ({"env_fn": lambda num_envs: None, "frame_stack": 2}, "builds a vector environment"),
    ({"env_fn": CountingEnv, "env_kwargs": 5}, "env_kwargs must be a dict of strings to any values, got 5"),
    ({"env_fn": CountingEnv, "env_kwargs": {"mutex": threading.Lock()}},
     r"env_kwargs\['mutex'\] cannot be copied .*; create it in the environment"),
    ({"env_fn": CountingEnv, "test_env_kwargs": {"mutex": threading.Lock()}},
     r"test_env_kwargs\['mutex'\] cannot be copied"),
])
def test_bad_settings_are_refused_before_anything_starts(options, match):
    with pytest.raises(ConfigError, match=match):
        VecEnv.create_factory(**options)


class Spaceless(gym.Env):
    """Environment that declares neither an observation space nor an action space."""

class HalfSpaceless(gym.Env):
    """Environment that declares a shape instead of an action space."""

    observation_space = spaces.Discrete(2)
    action_space = (2,)


class SpacelessVector(gym.vector.VectorEnv):
    """Vector environment without spaces."""

    def __init__(self, num_envs):
        self.num_envs = num_envs


@pytest.mark.parametrize(("env_fn", "match"), [
    (Spaceless, "GWorker 0/CWorker 0, env 0: Spaceless has no observation_space; "
                "set self.observation_space to a gymnasium.Space in its constructor"),
    (HalfSpaceless, r"HalfSpaceless has action_space \(2,\); set self.action_space to a gymnasium.Space"),
    (SpacelessVector, "SpacelessVector has no single_observation_space; set"),
])
def test_environments_without_spaces_are_refused(env_fn, match):
    options = {} if env_fn is SpacelessVector else {"frame_stack": 2, "max_episode_steps": 3}
    with pytest.raises(EnvError, match=match):
        VecEnv.create_factory(env_fn, **options)


def test_wrong_keyword_arguments_of_an_environment_are_an_env_error():
    with pytest.raises(EnvError, match=r"env 0: the constructor raised.*'bogus'"):
        VecEnv.create_factory(CountingEnv, {"bogus": 1})
    with pytest.raises(EnvError, match="the constructor raised"):
        VecEnv.create_factory("CartPole-v1", {"bogus": 1})


@pytest.mark.parametrize(("fault", "match"), [
    ("constructor", "the constructor raised: RuntimeError: faulty constructor"),
    ("reset", r"reset raised after 0 steps, seed \d+: RuntimeError: faulty reset"),
    ("reset_without_seed", r"TypeError.*'seed'; reset must accept seed="),
    ("reset_without_info", r"expected \(observation, info\), got an array float32 \(4,\); return both"),
])
def test_faults_before_the_first_step_raise_when_the_factory_is_created(fault, match):
    with pytest.raises(EnvError, match=f"GWorker 0/CWorker 0, env 0.*{match}") as caught:
        VecEnv.create_factory(FaultyEnv, {"fault": fault})
    if fault in ("constructor", "reset"):
        assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize(("fault", "match"), [
    ("step", r"step raised after \d steps, seed \d+: RuntimeError: faulty step"),
    ("four_values", r"expected \(observation, reward, terminated, truncated, info\), got a tuple of 4; split"),
    ("obs_shape", r"expected float32 \(4,\), got float32 \(2,\); correct"),
    ("obs_dtype", r"expected float32 \(4,\), got complex64 \(4,\); return"),
    ("reward_array", r"expected a number as reward, got an array float64 \(1,\); return float"),
])
def test_faulty_steps_name_worker_and_environment(fault, match, at):
    env = VecEnv.create_factory(
        FaultyEnv, {"fault": fault, "at": at}, 2, on_env_error="raise")(seed=0, index_grad_worker=2)
    env.reset()
    for _ in range(at):
        env.step(np.zeros(2, np.int64))
    with pytest.raises(EnvError, match=f"GWorker 2/CWorker 0, env 0: .*{match}") as caught:
        env.step(np.zeros(2, np.int64))
    if fault == "step":
        assert isinstance(caught.value.__cause__, RuntimeError)
    env.close()


def test_fault_at_a_later_reset_names_its_environment():
    env = VecEnv.create_factory(
        FaultyEnv, {"fault": "reset", "at": 1, "episode_length": 2}, 1, on_env_error="raise")(seed=0)
    env.reset()
    env.step(np.array([0]))
    with pytest.raises(EnvError, match="env 0: reset raised after 2 steps"):
        env.step(np.array([0]))


def test_contract_violations_of_a_native_vector_are_reported():
    class Wrong(gym.vector.VectorEnv):
        def __init__(self, num_envs, fault):
            self.num_envs, self.fault = num_envs, fault
            self.single_observation_space = spaces.Box(-1, 1, (1,), np.float32)
            self.single_action_space = spaces.Discrete(2)
            self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, num_envs)
            self.action_space = gym.vector.utils.batch_space(self.single_action_space, num_envs)

        def reset(self, *, seed=None, options=None):
            return np.zeros((self.num_envs, 2 if self.fault == "reset" else 1), np.float32), {}

        def step(self, actions):
            if self.fault == "raise":
                raise RuntimeError("native trouble")
            reward = np.zeros((self.num_envs, 1)) if self.fault == "reward" else np.zeros(self.num_envs)
            done = np.zeros(self.num_envs, bool)
            return np.zeros((self.num_envs, 1), np.float32), reward, done, done.copy(), {}

    match = r"GWorker 0/CWorker 0: reset: .*expected float32 \(1, 1\), got float32 \(1, 2\)"
    with pytest.raises(EnvError, match=match):
        VecEnv.create_factory(Wrong, {"fault": "reset"})
    for fault, match in (("reward", r"expected reward of shape \(2,\)"),
                         ("raise", r"environments 0 to 1: step raised at step 0.*native trouble")):
        env = VecEnv.create_factory(Wrong, {"fault": fault}, 2)(seed=0)
        env.reset()
        with pytest.raises(EnvError, match=match):
            env.step(np.zeros(2, np.int64))


def test_errors_for_missing_packages_name_the_extra(run_forked):
    script = """
import sys
sys.modules["ale_py"] = sys.modules["Box2D"] = sys.modules["mujoco"] = sys.modules["envpool"] = None
from pytorchrl.envs import make_factory
from pytorchrl.errors import ConfigError, install_hint
for env_id, options, extra in (
        ("ALE/Pong-v5", {}, "atari"), ("LunarLander-v3", {}, "box2d"), ("HalfCheetah-v5", {}, "mujoco"),
        ("CartPole-v1", {"backend": "envpool"}, "envpool")):
    try:
        make_factory(env_id, 1, **options)
    except ConfigError as error:
        assert install_hint(extra) in str(error), error
        print(extra)
make_factory("CartPole-v1", 2)
"""
    done = run_forked("-c", script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["atari", "box2d", "mujoco", "envpool"]
