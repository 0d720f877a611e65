import random
import subprocess
import sys
import threading

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv

from pytorchrl.agent.env import EnvFactory, VecEnv
from pytorchrl.agent.env.wrappers import FrameStack
from pytorchrl.envs.testing import CountingEnv, FaultyEnv
from pytorchrl.errors import ConfigError, EnvError, NonFiniteDataError, SpaceError


class SeedEnv(gym.Env):
    """Shows the seed of its first reset, in two halves."""

    observation_space = spaces.Box(0, 2**16, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.seed = self.seed if seed is None else seed
        return np.array(divmod(self.seed, 2**16), np.float32), {}

    def step(self, action):
        return np.zeros(2, np.float32), 0.0, False, False, {}


class EchoEnv(gym.Env):
    """Its info and observation show the action that arrived."""

    observation_space = spaces.Dict({
        "value": spaces.Box(-np.inf, np.inf, (2,), np.float64), "action_mask": spaces.MultiBinary(3)})

    def __init__(self, action_space):
        self.action_space = action_space

    def observation(self, action):
        value = np.broadcast_to(np.asarray(action, np.float64).ravel(), (2,)).copy()
        return {"value": value, "action_mask": np.array([1, 0, 1], np.int8)}

    def reset(self, *, seed=None, options=None):
        return self.observation(0.0), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        return self.observation(action), 0.0, False, False, {}


class InfoMaskEnv(CountingEnv):
    """Allows the action whose number is the step's, and only it."""

    def info(self):
        return {"action_mask": np.eye(2, dtype=np.int8)[self._t % 2]}

    def reset(self, **kwargs):
        return super().reset(**kwargs)[0], self.info()

    def step(self, action):
        *rest, _ = super().step(action)
        return *rest, self.info()


class MutatingEnv(CountingEnv):
    def __init__(self, shared):
        super().__init__(offset=len(shared))
        shared.append(1)


def test_factory_knows_spaces_and_survives_pickling():
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


def test_probe_is_closed_and_of_one_environment():
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


def test_all_environments_of_all_workers_have_different_seeds_and_keep_them():
    factory = VecEnv.create_factory(SeedEnv, vec_env_size=4)
    places = [
        {"index_grad_worker": g, "index_col_worker": c, "mode": mode, "incarnation": i, "seed": seed}
        for g in (0, 1) for c in (0, 1, 2) for mode in ("train", "test") for i in (0, 1) for seed in (0, 1)]
    found = [seeds_of(factory, **place) for place in places]
    flat = [seed for seeds in found for seed in seeds]
    assert len(set(flat)) == len(flat) == 4 * len(places)
    assert found == [seeds_of(factory, **place) for place in places]
    assert max(flat) < 2**31


def test_no_seed_draws_one_and_a_second_reset_goes_on():
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


def test_generators_of_others_stay_untouched():
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
def test_actions_arrive_as_the_environment_wants_them(space, action, arrives):
    env = VecEnv.create_factory(EchoEnv, {"action_space": space})(seed=0)
    env.reset()
    np.testing.assert_allclose(env.step(action).obs["value"][0], np.broadcast_to(arrives, (2,)))


def test_bad_actions_are_refused():
    env = VecEnv.create_factory(EchoEnv, {"action_space": spaces.Box(-2, 2, (2,))}, 3)(seed=0)
    env.reset()
    bad = np.zeros((3, 2), np.float32)
    bad[1, 0] = np.nan
    with pytest.raises(NonFiniteDataError, match=r"GWorker 0/CWorker 0, step 0.*environments \[1\]"):
        env.step(bad)
    with pytest.raises(EnvError, match=r"expected actions of shape \(3, 2\), got \(3,\)"):
        env.step(np.zeros(3, np.float32))


def test_action_mask_is_lifted_out_of_the_observation():
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
    """Says the same in its observations."""

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
def test_action_mask_belongs_to_the_observation(autoreset, env, cut):
    env = VecEnv.create_factory(env, {"episode_length": 9 if cut else 3}, 2, autoreset=autoreset, **cut)(seed=0)
    obs, mask = env.reset()
    ended, ends = np.zeros(2, dtype=bool), 0
    for _ in range(8):
        expected = np.eye(2, dtype=bool)[obs["obs"][:, 2].astype(int) % 2]
        if autoreset == "next_step":  # the action after an end is ignored, so everything is allowed
            expected[ended] = True
        np.testing.assert_array_equal(mask, expected)
        step = env.step(np.zeros(2, np.int64))
        if len(step.final_index):
            last = next(leaf for leaf in step.final_obs.values())[:, 2].astype(int)
            assert (last == 3).all()
            np.testing.assert_array_equal(step.final_mask, np.eye(2, dtype=bool)[last % 2])
            ends += 1
        obs, mask = step.obs, step.mask
        ended = step.terminated  # at a time limit a learner looks at what would have been allowed
    assert ends == (2 if autoreset == "same_step" else 0)


def test_where_no_action_is_allowed_in_the_end_all_are():
    class Nothing(LeafMaskEnv):
        def step(self, action):
            obs, reward, terminated, *rest = super().step(action)
            return {**obs, "action_mask": obs["action_mask"] * (not terminated)}, reward, terminated, *rest

    env = VecEnv.create_factory(Nothing, {"episode_length": 2}, autoreset="same_step")(seed=0)
    env.reset()
    env.step(np.zeros(1, np.int64))
    assert env.step(np.zeros(1, np.int64)).final_mask.tolist() == [[True, True]]


def test_action_mask_of_info_survives_a_masked_reset():
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


def test_action_mask_that_vanishes_is_an_error():
    class Vanishing(InfoMaskEnv):
        def step(self, action):
            return *super().step(action)[:4], {}

    env = VecEnv.create_factory(Vanishing)(seed=0)
    env.reset()
    with pytest.raises(EnvError, match="action_mask"):
        env.step(np.zeros(1, np.int64))


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


def test_frame_stack_joins_the_last_observations():
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


def test_frame_stack_stacks_pictures_along_their_channels():
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
        assert env.observation_space["obs"].shape == (6, 8, 9) or env.observation_space["obs"].shape == (8, 9, 6)
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
        """Loses one of three lives every second step; over after six."""

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


@pytest.mark.parametrize("autoreset", ["same_step", "next_step"])
def test_a_new_game_with_fewer_lives_is_no_lost_life(autoreset):
    class Bonus(CountingEnv):
        """Gains a life every step."""

        def reset(self, **kwargs):
            return super().reset(**kwargs)[0], {"lives": 1}

        def step(self, action):
            *rest, _ = super().step(action)
            return *rest, {"lives": 1 + self._t}

    env = VecEnv.create_factory(
        Bonus, {"episode_length": 3, "truncate": True}, end_on_life_loss=True, autoreset=autoreset)(seed=0)
    env.reset()
    steps = [env.step(np.array([0])) for _ in range(10)]
    assert not any(step.terminated[0] for step in steps)
    assert sum(step.truncated[0] for step in steps) >= 2


def test_test_mode_uses_test_env_kwargs():
    factory = VecEnv.create_factory(CountingEnv, {"offset": 1}, test_env_kwargs={"offset": 100})
    for mode, reward in (("train", 2.0), ("test", 101.0)):
        env = factory(seed=0, mode=mode)
        env.reset()
        assert env.step(np.array([0])).reward.tolist() == [reward]
    with pytest.raises(ConfigError, match="mode"):
        factory(mode="evaluate")


def test_spaces_that_differ_between_workers_are_refused():
    sizes = iter([2, 3])
    factory = VecEnv.create_factory(lambda: CountingEnv(num_actions=next(sizes)))
    with pytest.raises(EnvError, match=r"GWorker 0/CWorker 1: expected spaces.*Discrete\(2\), got.*Discrete\(3\)"):
        factory(index_col_worker=1)


def test_spaces_that_cannot_be_used_are_named():
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
    ({"env_fn": "ALE/Pong-v6"}, "'ALE/Pong-v5'"),
    ({"env_fn": "no_such_module_here:Env-v0"}, "no_such_module_here"),
    ({"env_fn": CountingEnv()}, "env_fn must be"),
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
    """An environment that declares neither space."""


class HalfSpaceless(gym.Env):
    """An environment that declares a shape instead of a space."""

    observation_space = spaces.Discrete(2)
    action_space = (2,)


class SpacelessVector(gym.vector.VectorEnv):
    """A vector environment without spaces."""

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
def test_faults_before_the_first_step_surface_when_the_factory_is_made(fault, match):
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


def test_a_native_vector_that_breaks_its_contract_is_named():
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


def test_optional_packages_are_named_with_their_extra():
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
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["atari", "box2d", "mujoco", "envpool"]
