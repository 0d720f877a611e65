

import random

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from pytorchrl.agent.env import EnvFactory, VecEnv
from pytorchrl.agent.env.wrappers import FrameStack
from pytorchrl.envs.testing import CountingEnv
from pytorchrl.errors import CallOrderError, ConfigError, EnvError, NonFiniteDataError, StoppedError
from tests.unit.agent.env.small_envs import EchoEnv, vector_of


class SeedEnv(gym.Env):
    """Environment whose first observation is its seed, encoded as divmod(seed, 2**16)."""

    observation_space = spaces.Box(0, 2**16, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.seed = self.seed if seed is None else seed
        return np.array(divmod(self.seed, 2**16), np.float32), {}

    def step(self, action):
        return np.zeros(2, np.float32), 0.0, False, False, {}


class MutatingEnv(CountingEnv):
    def __init__(self, shared):
        super().__init__(offset=len(shared))
        shared.append(1)


def test_factory_has_spaces_and_can_be_pickled():
    factory = VecEnv.create_factory("CartPole-v1", vec_env_size=3)
    assert isinstance(factory, EnvFactory)
    assert factory.num_envs == 3
    assert factory.observation_space["obs"].shape == (4,)
    assert factory.action_space == spaces.Discrete(2)
    assert factory(seed=0).reset()[1] is None
    assert "CartPole-v1" in repr(factory)
    copy = cloudpickle.loads(cloudpickle.dumps(factory))
    assert copy.observation_space == factory.observation_space
    np.testing.assert_array_equal(copy(seed=3).reset()[0]["obs"], factory(seed=3).reset()[0]["obs"])


def test_factory_probes_one_environment_and_closes_it():
    log = []

    class Tracked(CountingEnv):
        def __init__(self):
            super().__init__()
            log.append("open")

        def close(self):
            log.append("close")

    factory = VecEnv.create_factory(Tracked, vec_env_size=4)
    assert log == ["open", "close"]
    env = factory(seed=0)
    env.close()
    env.close()
    assert log[2:] == ["open"] * 4 + ["close"] * 4


def seeds_of(factory, **context):
    obs = factory(**context).reset()[0]["obs"].astype(int)
    return [int(a * 2**16 + b) for a, b in obs]


def test_all_environments_have_different_reproducible_seeds():
    factory = VecEnv.create_factory(SeedEnv, vec_env_size=4)
    places = [
        {"index_grad_worker": g, "index_col_worker": c, "mode": mode, "incarnation": i, "seed": seed}
        for g in (0, 1) for c in (0, 1, 2) for mode in ("train", "test") for i in (0, 1) for seed in (0, 1)]
    found = [seeds_of(factory, **place) for place in places]
    flat = [seed for seeds in found for seed in seeds]
    assert len(set(flat)) == len(flat) == 4 * len(places)
    assert found == [seeds_of(factory, **place) for place in places]
    assert max(flat) < 2**31


def test_a_missing_seed_is_random_and_a_second_reset_does_not_reseed():
    factory = VecEnv.create_factory(SeedEnv)
    assert seeds_of(factory) != seeds_of(factory)
    env = VecEnv.create_factory("Pendulum-v1")(seed=0)
    first = env.reset()[0]["obs"].copy()
    assert not np.array_equal(first, env.reset()[0]["obs"])
    with pytest.raises(ConfigError, match="seed"):
        factory(seed=-1)


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_same_seed_same_run(env_id):
    factory = VecEnv.create_factory(env_id, vec_env_size=2)

    def run():
        env = factory(seed=11)
        rows = [env.reset()[0]["obs"].copy()]
        for k in range(20):
            action = np.full(env.action_shape, k % 2).astype(env.action_space.dtype)
            rows.append(env.step(action).obs["obs"].copy())
        return np.stack(rows)

    np.testing.assert_array_equal(run(), run())


def test_global_generators_are_not_changed():
    def states():
        return random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()  # noqa: NPY002

    before = states()
    for env_id in ("CartPole-v1", "Pendulum-v1"):
        env = VecEnv.create_factory(env_id, vec_env_size=2)()
        env.reset()
        env.step(np.zeros(env.action_shape, env.action_space.dtype))
        env.close()
    assert states() == before


def test_keyword_arguments_are_copied_for_each_environment():
    shared = []
    env = VecEnv.create_factory(MutatingEnv, {"shared": shared}, 3)(seed=0)
    env.reset()
    assert env.step(np.zeros(3, np.int64)).reward.tolist() == [1, 1, 1]
    assert shared == []


@pytest.mark.parametrize(("space", "action", "arrives"), [
    (spaces.Discrete(3, start=5), np.array([2]), 7),
    (spaces.MultiDiscrete([3, 3], start=[1, 2]), np.array([[0, 1]]), [1, 3]),
    (spaces.MultiBinary(2), np.array([[0, 1]], np.int64), [0, 1]),
    (spaces.Box(-2, 2, (2,), np.float32), np.array([[0.5, -1.5]], np.float32), [0.5, -1.5]),
    (spaces.Box(-2, 2, (2,), np.float64), np.array([[0.5, -1.5]], np.float32), [0.5, -1.5]),
])
def test_actions_are_converted_to_the_format_of_the_environment(space, action, arrives):
    env = VecEnv.create_factory(EchoEnv, {"action_space": space})(seed=0)
    env.reset()
    np.testing.assert_allclose(env.step(action).obs["value"][0], np.broadcast_to(arrives, (2,)))


@pytest.mark.parametrize("backend", ["sync", "vector"])
@pytest.mark.parametrize("space", [
    spaces.Discrete(3), spaces.Discrete(3, start=4), spaces.MultiDiscrete([3, 3]),
    spaces.MultiDiscrete([3, 3], start=[1, 2]), spaces.MultiDiscrete([3, 3], dtype=np.int32), spaces.MultiBinary(2)],
    ids=str)
def test_environments_that_change_their_actions_do_not_change_those_of_the_caller(backend, space):
    class Subtracting(EchoEnv):
        def step(self, action):
            received = np.array(action)
            action -= 2  # a scalar is not changed in place
            return self.observation(received), 0.0, False, False, {}

    class SubtractingVector(SyncVectorEnv):
        def __init__(self, num_envs, action_space):
            super().__init__([lambda: EchoEnv(action_space)] * num_envs)

        def step(self, actions):
            result = super().step(actions)
            actions -= 2
            return result

    envs = VecEnv.create_factory(Subtracting if backend == "sync" else SubtractingVector, {"action_space": space}, 2)(
        seed=0)
    envs.reset()
    for dtype in (np.int64, space.dtype):
        action = np.ones(envs.action_shape, dtype)
        arrived = envs.step(action).obs["value"]
        assert (action == 1).all()
        assert (arrived == 1 + np.asarray(getattr(space, "start", 0))).all()


def test_bad_actions_are_refused():
    env = VecEnv.create_factory(EchoEnv, {"action_space": spaces.Box(-2, 2, (2,))}, 3)(seed=0)
    env.reset()
    bad = np.zeros((3, 2), np.float32)
    bad[1, 0] = np.nan
    with pytest.raises(NonFiniteDataError, match=r"GWorker 0/CWorker 0, step 0.*environments \[1\]"):
        env.step(bad)
    with pytest.raises(EnvError, match=r"expected actions of shape \(3, 2\), got \(3,\)"):
        env.step(np.zeros(3, np.float32))


@pytest.mark.parametrize("backend", ["auto", "sync", "async", "vector"])
def test_calls_before_reset_and_after_close_are_refused(backend, caplog):
    """Check that a refused call does not reach the environments, and that the environments can be used afterwards."""
    env = VecEnv.create_factory("CartPole-v1", vec_env_size=2, backend=backend)(seed=1)
    action = np.zeros(2, np.int64)
    with pytest.raises(CallOrderError, match=r"CWorker 0: step\(\) was called before reset\(\); call reset\(\) first"):
        env.step(action)
    assert env.num_restarts == 0
    env.reset()
    env.step(action)
    env.close()
    for name, call in (("step", lambda: env.step(action)), ("reset", env.reset)):
        with pytest.raises(StoppedError, match=rf"CWorker 0: {name}\(\) was called after close\(\); build new env"):
            call()
    env.close()
    assert not caplog.records


def lengths(num_steps=40, **options):
    env = VecEnv.create_factory(options.pop("env_fn", "Pendulum-v1"), **options)(seed=0)
    env.reset()
    action = np.zeros(env.action_shape, env.action_space.dtype)
    return [e.length for _ in range(num_steps) for e in env.step(action).episodes]


def test_max_episode_steps_truncates():
    assert lengths(max_episode_steps=7)[:2] == [7, 7]
    assert lengths(env_fn="CartPole-v1", max_episode_steps=5)[:2] == [5, 5]
    assert lengths(env_fn="CartPole-v1", backend="sync", max_episode_steps=5)[:2] == [5, 5]
    assert lengths(env_fn=CountingEnv, env_kwargs={"episode_length": 100}, max_episode_steps=6)[:2] == [6, 6]
    env = VecEnv.create_factory("Pendulum-v1", max_episode_steps=2)(seed=0)
    env.reset()
    env.step(np.zeros((1, 1), np.float32))
    end = env.step(np.zeros((1, 1), np.float32))
    assert (bool(end.terminated[0]), bool(end.truncated[0])) == (False, True)


def test_frame_stack_concatenates_the_last_observations():
    env = VecEnv.create_factory(CountingEnv, {"episode_length": 3}, frame_stack=3)(seed=0)
    assert env.observation_space["obs"].shape == (12,)
    obs, _ = env.reset()
    assert obs["obs"][0, 2::4].tolist() == [0, 0, 0]
    assert env.step(np.array([0])).obs["obs"][0, 2::4].tolist() == [0, 0, 1]
    assert env.step(np.array([0])).obs["obs"][0, 2::4].tolist() == [0, 1, 2]
    end = env.step(np.array([0]))
    assert end.final_obs["obs"][0, 2::4].tolist() == [1, 2, 3]
    assert end.obs["obs"][0, 2::4].tolist() == [0, 0, 0]
    assert VecEnv.create_factory("CartPole-v1", frame_stack=2).observation_space["obs"].shape == (8,)


def test_frame_stack_stacks_images_along_their_channels():
    class Pictures(gym.Env):
        action_space = spaces.Discrete(2)

        def __init__(self, shape):
            self.observation_space = spaces.Box(0, 255, shape, np.uint8)

        def reset(self, *, seed=None, options=None):
            return np.full(self.observation_space.shape, 1, np.uint8), {}

        def step(self, action):
            return np.full(self.observation_space.shape, 2, np.uint8), 0.0, False, False, {}

    for shape in ((8, 9, 3), (3, 8, 9)):
        env = VecEnv.create_factory(Pictures, {"shape": shape}, frame_stack=2)(seed=0)
        env.reset()
        obs = env.step(np.array([0])).obs["obs"]
        assert env.observation_space["obs"].shape == (6, 8, 9)
        assert obs.dtype == np.uint8
        assert obs.shape[1:] == env.observation_space["obs"].shape
    with pytest.raises(ConfigError, match="frame_stack needs a Box"):
        FrameStack(gym.make("Taxi-v4" if "Taxi-v4" in gym.registry else "Taxi-v3"), 2)


def test_wrappers_are_applied_in_order_to_each_environment():
    class Times2(gym.RewardWrapper):
        def reward(self, reward):
            return 2.0 * reward

    class Plus1(gym.RewardWrapper):
        def reward(self, reward):
            return 1.0 + reward

    env = VecEnv.create_factory(CountingEnv, vec_env_size=2, wrappers=(Times2, Plus1))(seed=0)
    env.reset()
    assert env.step(np.zeros(2, np.int64)).reward.tolist() == [3.0, 3.0]


def test_end_on_life_loss_ends_for_the_learner_only():
    class Lives(CountingEnv):
        """Environment that loses one of three lives every second step, and ends after six steps."""

        def info(self):
            return {"lives": 3 - self._t // 2}

        def reset(self, **kwargs):
            return super().reset(**kwargs)[0], self.info()

        def step(self, action):
            *rest, _ = super().step(action)
            return *rest, self.info()

    def run(autoreset, mode, num_steps=14):
        env = VecEnv.create_factory(
            Lives, {"episode_length": 6}, end_on_life_loss=True, autoreset=autoreset)(seed=0, mode=mode)
        env.reset()
        steps = [env.step(np.array([0])) for _ in range(num_steps)]
        steps = [step for step in steps if step.valid[0]][:12]
        assert [e.length for step in steps for e in step.episodes] == [6, 6]
        assert sum(step.final_index.size for step in steps) == (2 if autoreset == "same_step" else 0)
        return [bool(step.terminated[0]) for step in steps], [bool(step.first[0]) for step in steps]

    for autoreset in ("same_step", "next_step"):
        terminated, first = run(autoreset, "train")
        assert terminated == [False, True] * 6
        assert first[1]
        assert first[3]
        assert not first[2]
        assert first[5] is (autoreset == "same_step")
        assert run(autoreset, "test")[0] == ([False] * 5 + [True]) * 2
    env = VecEnv.create_factory(Lives)(seed=0)
    env.reset()
    assert not any(env.step(np.array([0])).terminated[0] for _ in range(5))
    with pytest.raises(EnvError, match=r"info\['lives'\].*end_on_life_loss=False"):
        VecEnv.create_factory(CountingEnv, end_on_life_loss=True)


def with_lives(env_fn, autoreset, **kwargs):
    """Return one environment of which the loss of a life is a termination; "disabled" is a native vector's mode."""
    source = vector_of(env_fn, AutoresetMode.DISABLED) if autoreset == "disabled" else env_fn
    mode = {} if autoreset == "disabled" else {"autoreset": autoreset}
    return VecEnv.create_factory(source, kwargs, end_on_life_loss=True, **mode)(seed=0)


@pytest.mark.parametrize("autoreset", ["same_step", "next_step", "disabled"])
def test_a_new_game_with_fewer_lives_is_not_a_lost_life(autoreset):
    class Bonus(CountingEnv):
        """Environment that gains a life at every step."""

        def reset(self, **kwargs):
            return super().reset(**kwargs)[0], {"lives": 1}

        def step(self, action):
            *rest, _ = super().step(action)
            return *rest, {"lives": 1 + self._t}

    env = with_lives(Bonus, autoreset, episode_length=3, truncate=True)
    env.reset()
    steps = [env.step(np.array([0])) for _ in range(10)]
    assert not any(step.terminated[0] for step in steps)
    assert sum(step.truncated[0] for step in steps) >= 2


@pytest.mark.parametrize("autoreset", ["same_step", "next_step", "disabled"])
def test_a_life_lost_in_the_first_step_of_a_new_game_is_a_termination(autoreset):
    class Fragile(CountingEnv):
        """Environment that starts with three lives and loses one at every step."""

        def reset(self, **kwargs):
            return super().reset(**kwargs)[0], {"lives": 3}

        def step(self, action):
            *rest, _ = super().step(action)
            return *rest, {"lives": 3 - self._t}

    env = with_lives(Fragile, autoreset, episode_length=3, truncate=True)
    env.reset()
    steps = [env.step(np.array([0])) for _ in range(12)]
    ends = [(bool(step.terminated[0]), bool(step.truncated[0])) for step in steps if step.valid[0]]
    assert ends == ([(True, False), (True, False), (False, True)] * 4)[:len(ends)]


def test_test_mode_uses_test_env_kwargs():
    factory = VecEnv.create_factory(CountingEnv, {"offset": 1}, test_env_kwargs={"offset": 100})
    for mode, reward in (("train", 2.0), ("test", 101.0)):
        env = factory(seed=0, mode=mode)
        env.reset()
        assert env.step(np.array([0])).reward.tolist() == [reward]
    with pytest.raises(ConfigError, match="mode"):
        factory(mode="evaluate")
