"""Test native vector environments, environments in this process and in other processes, and a stub of EnvPool."""

import multiprocessing
import signal
import subprocess
import sys
import tempfile
import traceback
import types

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from pytorchrl.agent.env import VecEnv
from pytorchrl.agent.env.backends import InProcessVectorEnv
from pytorchrl.envs.testing import CountingEnv, FaultyEnv, ScriptedEnv
from pytorchrl.errors import ConfigError, EnvError


@pytest.mark.parametrize(("num_envs", "is_native"), [(1, False), (3, False), (4, True), (16, True)])
def test_auto_uses_a_numpy_vector_for_four_environments_or_more(num_envs, is_native):
    from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv

    env = VecEnv.create_factory("CartPole-v1", vec_env_size=num_envs)(seed=0)
    assert isinstance(env.vector, CartPoleVectorEnv if is_native else SyncVectorEnv)


def test_auto_uses_other_native_vectors_of_any_size():
    class Native(SyncVectorEnv):
        def __init__(self, num_envs):
            super().__init__([CountingEnv] * num_envs)

    gym.register("NativeCounting-v0", entry_point=CountingEnv, vector_entry_point=Native)
    try:
        assert isinstance(VecEnv.create_factory("NativeCounting-v0")(seed=0).vector, Native)
    finally:
        del gym.registry["NativeCounting-v0"]


def cartpole(**options):
    """Run one CartPole for 300 steps; return (class of the vector environment, autoreset mode, rows of results)."""
    env = VecEnv.create_factory("CartPole-v1", **options)(seed=5)
    rows = [(env.reset()[0]["obs"].tolist(),)]
    for k in range(300):
        step = env.step(np.array([k // 3 % 2]))
        rows.append((step.obs["obs"].tolist(), step.reward.tolist(), step.terminated.tolist(), step.truncated.tolist(),
                     step.valid.tolist(), step.first.tolist(), step.final_index.tolist(), dict(step.final_obs),
                     [(episode.env_return, episode.length, episode.terminated) for episode in step.episodes]))
    return type(env.vector), env.autoreset_mode, rows


def test_one_environment_gives_the_results_of_the_native_vector():
    """Check that the backend for one environment returns the same results as the native vector environment.

    By default, the autoreset mode is SAME_STEP.
    """
    cls, mode, rows = cartpole(autoreset="next_step", max_episode_steps=20)
    native_cls, native_mode, native_rows = cartpole(backend="vector", max_episode_steps=20)
    assert cls is not native_cls
    assert mode is native_mode is AutoresetMode.NEXT_STEP
    assert rows == native_rows
    assert sum(len(row[-1]) for row in rows[1:]) > 10
    assert cartpole()[1] is AutoresetMode.SAME_STEP


def test_auto_uses_sync_if_the_native_vector_is_missing_or_unsuitable():
    for env_id, options in (("Pendulum-v1", {}), ("CartPole-v1", {"vec_env_size": 8, "backend": "sync"}),
                            ("CartPole-v1", {"vec_env_size": 8, "frame_stack": 2})):
        assert isinstance(VecEnv.create_factory(env_id, **options)(seed=0).vector, SyncVectorEnv)


def test_spec_and_id_of_the_newest_version_are_accepted():
    assert VecEnv.create_factory(gym.spec("Pendulum-v1")).observation_space["obs"].shape == (3,)


def test_native_cartpole_has_one_generator_for_all_environments():
    two, three = (VecEnv.create_factory("CartPole-v1", vec_env_size=n, backend="vector")(seed=0).reset()[0]["obs"]
                  for n in (2, 3))
    assert two.dtype == np.float32
    assert not np.array_equal(two, three[:2])


def test_native_vectors_get_the_arguments_of_their_signature():
    seen = {}

    def make(num_envs, autoreset_mode="NextStep", num_threads=0, reward_clipping=True):
        seen.update(mode=autoreset_mode, num_threads=num_threads, reward_clipping=reward_clipping)
        return SyncVectorEnv([CountingEnv] * num_envs, autoreset_mode=autoreset_mode)

    env = VecEnv.create_factory(make, vec_env_size=2)(seed=0, num_threads=3)
    assert seen == {"mode": AutoresetMode.SAME_STEP, "num_threads": 3, "reward_clipping": False}
    assert env.autoreset_mode is AutoresetMode.SAME_STEP
    assert len({seed % 2**16 for seed in env.seeds} & set(env.reset()[0]["obs"][:, 0].astype(int))) == 2
    VecEnv.create_factory(make, {"num_threads": 5, "autoreset_mode": "NextStep"})
    assert (seen["num_threads"], seen["mode"]) == (5, "NextStep")


def run(env, num_steps=14):
    rows = []
    obs, _ = env.reset()
    for k in range(num_steps):
        step = env.step(np.full(env.num_envs, k % 2))
        rows.append([step.obs["obs"].tolist(), step.reward.tolist(), step.terminated.tolist(), step.valid.tolist(),
                     step.first.tolist(), {k: v.tolist() for k, v in step.final_obs.items()},
                     [tuple(e[:2]) for e in step.episodes]])
    env.close()
    return obs["obs"].tolist(), rows


@pytest.mark.parametrize("autoreset", ["same_step", "next_step"])
def test_async_gives_the_results_of_sync_and_leaves_no_processes(autoreset):
    before = set(multiprocessing.active_children())
    options = {"env_kwargs": {"episode_length": 4}, "vec_env_size": 2, "autoreset": autoreset}
    env = VecEnv.create_factory(CountingEnv, **options, backend="async")(seed=3)
    assert isinstance(env.vector, AsyncVectorEnv)
    started = set(multiprocessing.active_children()) - before
    assert len(started) == 2
    found = run(env)
    env.close()
    assert not any(process.is_alive() for process in started)
    assert set(multiprocessing.active_children()) == before
    assert found == run(VecEnv.create_factory(CountingEnv, **options, backend="sync")(seed=3))


def faulty_elsewhere():
    """Build an environment in the main process; raise in any other process.

    The function is pickled by value, like functions of users' scripts.
    """
    if multiprocessing.parent_process() is not None:
        raise RuntimeError("no license here")
    return CountingEnv()


faulty_elsewhere.__module__ = "__main__"


@pytest.mark.parametrize(("env_fn", "kwargs", "match", "line"), [
    (FaultyEnv, {"fault": "step", "at": 1},
     r"GWorker 0/CWorker 0, env 0: step raised after 2 steps.*faulty step; number of other environments "
     "that failed: 1", "raise RuntimeError("),
    # Since cloudpickle 3.1.3, a function pickled by value has no file name, so tracebacks lack its source code.
    (faulty_elsewhere, {}, "env 0: the constructor raised: RuntimeError: no license here",
     f"line {faulty_elsewhere.__code__.co_firstlineno + 6}, in faulty_elsewhere"),
])
def test_failures_in_processes_raise_and_leave_no_processes(env_fn, kwargs, match, line):
    before = set(multiprocessing.active_children())
    env = VecEnv.create_factory(env_fn, kwargs, 2, backend="async", on_env_error="raise")(seed=3)
    with pytest.raises(EnvError, match=match) as caught:
        run(env)
    text = "".join(traceback.format_exception(caught.value))
    assert line in text, "the error must contain the traceback of the process"
    env.close()
    assert set(multiprocessing.active_children()) == before


class Stubborn(CountingEnv):
    def __init__(self):
        super().__init__()
        if multiprocessing.parent_process() is not None:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)


@pytest.mark.parametrize("kind", [CountingEnv, Stubborn])
def test_a_killed_process_is_an_error_and_close_still_returns(kind, monkeypatch):
    monkeypatch.setattr("pytorchrl.agent.env.backends._TERMINATION_S", 0.2 if kind is Stubborn else 60)
    before = set(multiprocessing.active_children())
    env = VecEnv.create_factory(kind, vec_env_size=2, backend="async")(seed=3)
    env.reset()
    env.vector.processes[1].kill()
    env.vector.processes[1].join()
    with pytest.raises(EnvError, match="GWorker 0/CWorker 0, environments 0 to 1: step raised"):
        env.step(np.zeros(2, np.int64))
    env.close()
    assert set(multiprocessing.active_children()) == before


def test_processes_of_environments_need_no_torch():
    script = ("import sys, pytorchrl.agent.env.single, pytorchrl.envs.testing; "
              "sys.exit('torch' in sys.modules)")
    assert subprocess.run([sys.executable, "-c", script], timeout=60, check=False).returncode == 0


class FakePool:
    """Stub of an EnvPool pool: single-environment spaces, NEXT_STEP mode, and seeds as a constructor argument."""

    def __init__(self, num_envs, seed, num_threads, max_episode_steps=3):
        self.observation_space = gym.spaces.Box(-1, 1, (1,), np.float64)
        self.action_space = gym.spaces.Discrete(2)
        self.num_envs, self.seed, self.num_threads, self.limit = num_envs, seed, num_threads, max_episode_steps
        self.t, self.closed = np.zeros(num_envs, int), False

    def reset(self):
        self.t[:] = 0
        return self.t[:, None] * 0.1, {"env_id": np.arange(self.num_envs), "players": {"id": 0}}

    def step(self, action):
        fresh = self.t >= self.limit
        self.t = np.where(fresh, 0, self.t + 1)
        reward = np.where(fresh, 0, 1).astype(np.float32)
        return self.t[:, None] * 0.1, reward, np.zeros(self.num_envs, bool), self.t >= self.limit, {}

    def close(self):
        self.closed = True


@pytest.fixture
def fake_envpool(monkeypatch):
    def make(task, env_type, **kwargs):
        assert env_type == "gymnasium"
        return FakePool(**kwargs)

    module = types.SimpleNamespace(make=make, list_all_envs=lambda: ["Task-v0"])
    monkeypatch.setitem(sys.modules, "envpool", module)


@pytest.mark.usefixtures("fake_envpool")
def test_envpool_has_different_seeds_and_marks_reset_rows_invalid():
    factory = VecEnv.create_factory("Task-v0", vec_env_size=2, backend="envpool")
    assert factory.observation_space["obs"].dtype == np.float32
    env = factory(seed=0, num_threads=2)
    pool = env.vector.pool
    assert len(set(pool.seed)) == 2
    assert (pool.num_threads, env.autoreset_mode) == (2, AutoresetMode.NEXT_STEP)
    env.reset()
    steps = [env.step(np.zeros(2, np.int64)) for _ in range(5)]
    assert [step.valid.all() for step in steps] == [True, True, True, False, True]
    assert [tuple(e[:2]) for e in steps[2].episodes] == [(3.0, 3)] * 2
    env.close()
    assert pool.closed
    short = VecEnv.create_factory("Task-v0", backend="envpool", max_episode_steps=2)(seed=0)
    assert short.vector.pool.limit == 2


@pytest.mark.usefixtures("fake_envpool")
@pytest.mark.parametrize(("options", "match"), [
    ({"env_fn": "Other-v0"}, "has no task 'Other-v0'"),
    ({"env_fn": "Task-v0", "env_kwargs": {"bogus": 1}}, "rejects {'bogus': 1}"),
    ({"env_fn": "Task-v0", "autoreset": "same_step"}, "next_step"),
    ({"env_fn": "Task-v0", "frame_stack": 2}, "need single environments"),
    ({"env_fn": CountingEnv}, "needs the id"),
])
def test_envpool_refuses_unsupported_options(options, match):
    with pytest.raises(ConfigError, match=match):
        VecEnv.create_factory(**options, backend="envpool")


class Informed(ScriptedEnv):
    """Environment with several kinds of `info` entries, one of which is missing in some steps."""

    def reset(self, **kwargs):
        observation, info = super().reset(**kwargs)
        return observation, {**info, "episode_number": self._episode}

    def step(self, action):
        *result, info = super().step(action)
        return *result, {**info, "t": self._t, **({"rare": np.full(2, self._t)} if self._t % 3 == 0 else {})}


class Boxed(Informed):
    """Environment whose observation is a nested dictionary that contains the last action in several forms."""

    def __init__(self, *args):
        super().__init__(*args)
        self.action_space = gym.spaces.Box(-1, 1, (3,), np.float32)
        self.observation_space = gym.spaces.Dict({
            "a": gym.spaces.Box(-9, 9, (3,), np.float32), 7: gym.spaces.Discrete(5),
            "b": gym.spaces.Tuple([gym.spaces.MultiBinary(3), gym.spaces.Dict({"c": gym.spaces.Box(-9, 9, ())})])})

    def reset(self, **kwargs):
        return self._nested(np.zeros(3, np.float32)), super().reset(**kwargs)[1]

    def step(self, action):
        return self._nested(action), *super().step(action)[1:]

    def _nested(self, action):
        return {"b": [action > 0, {"c": float(action[1])}], 7: self._t % 5, "a": action}


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP])
@pytest.mark.parametrize("env", [ScriptedEnv, Informed, Boxed])
@pytest.mark.parametrize("num_envs", [1, 3])
def test_environments_in_process_behave_like_those_of_gymnasium(num_envs, env, mode):
    makers = [lambda index=index: env((0.5 * index, 1.0, -2.0), (index % 2,), (2,)) for index in range(num_envs)]
    mine, theirs = (
        vector(makers, copy=False, autoreset_mode=mode) for vector in (InProcessVectorEnv, SyncVectorEnv))
    assert_same(mine.reset(seed=1), theirs.reset(seed=1))
    actions = theirs.action_space
    actions.seed(0)
    ends = 0
    for _ in range(20):
        action = actions.sample()
        result = mine.step(action)
        assert_same(result, theirs.step(action))
        ends += int((result[2] | result[3]).sum())
    assert ends > 5


class Talkative(ScriptedEnv):
    """Environment whose infos contain lives, an action mask and another entry."""

    def step(self, action):
        observation, reward, terminated, truncated, _ = super().step(action)
        return observation, reward, terminated, truncated, {
            "lives": 3, "action_mask": np.ones(2, np.bool_), "speed": 0.5}


def test_only_entries_that_are_read_are_combined_except_at_the_end_of_an_episode():
    makers = [lambda: Talkative((0.5, 1.0, -2.0), (1,), (2,))] * 2
    env = InProcessVectorEnv(makers, copy=False, autoreset_mode=AutoresetMode.SAME_STEP)
    env.info_keys = ("lives", "action_mask")
    env.reset(seed=0)
    keys = []
    for _ in range(6):
        _, _, terminated, truncated, info = env.step(env.action_space.sample())
        if (terminated | truncated).any():
            assert set(info["final_info"]) >= {"lives", "action_mask", "speed"}
        else:
            keys.append({key for key in info if not key.startswith("_")})
    assert keys
    assert all(found == {"lives", "action_mask"} for found in keys)


def assert_same(mine, theirs):
    assert type(mine) is type(theirs)
    if isinstance(mine, dict):
        assert mine.keys() == theirs.keys()
        for key in mine:
            assert_same(mine[key], theirs[key])
    elif isinstance(mine, (tuple, list)) or (isinstance(mine, np.ndarray) and mine.dtype == object):
        assert len(mine) == len(theirs)
        for one, other in zip(mine, theirs, strict=True):
            assert_same(one, other)
    elif isinstance(mine, np.ndarray):
        assert mine.dtype == theirs.dtype
        np.testing.assert_array_equal(mine, theirs)
    else:
        assert mine == theirs


@pytest.mark.usefixtures("fake_envpool")
def test_an_error_in_close_of_a_native_vector_is_only_logged(monkeypatch, caplog):
    def close(pool):
        raise ZeroDivisionError("in close")
    monkeypatch.setattr(FakePool, "close", close)
    VecEnv.create_factory("Task-v0", vec_env_size=2, backend="envpool")(seed=0).close()
    assert "GWorker 0/CWorker 0: close raised ZeroDivisionError\nTraceback" in caplog.text
    assert caplog.text.rstrip().endswith("ZeroDivisionError: in close")


class Drawn(CountingEnv):
    """An environment that can be drawn."""

    def __init__(self):
        super().__init__()
        self.render_mode = "rgb_array"

    def render(self):
        return np.zeros((16, 16, 3), np.uint8)


def clipped(env):
    return gym.wrappers.ClipReward(env, -1.0, 1.0)


def filmed(env):
    return gym.wrappers.RecordVideo(env, f"{tempfile.mkdtemp()}/new", episode_trigger=lambda number: False)


def normalized_vector(num_envs):
    envs = gym.vector.SyncVectorEnv([CountingEnv] * num_envs, autoreset_mode=AutoresetMode.NEXT_STEP)
    return gym.wrappers.vector.NormalizeObservation(envs)


@pytest.mark.parametrize(("env_fn", "wrappers", "warned"), [
    (CountingEnv, (), []),
    (CountingEnv, (gym.wrappers.RecordEpisodeStatistics, clipped), []),
    (CountingEnv, (gym.wrappers.NormalizeObservation,), ["normalize_obs=True"]),
    (CountingEnv, (gym.wrappers.NormalizeReward, clipped), ["normalize_reward=True"]),
    (lambda: gym.wrappers.NormalizeReward(gym.wrappers.NormalizeObservation(CountingEnv())), (),
     ["normalize_obs=True", "normalize_reward=True"]),
    (normalized_vector, (), ["normalize_obs=True"]),
    (Drawn, (filmed,),
     ["RecordVideo counts its files from 0"]),
], ids=["none", "harmless", "observations", "rewards", "both inside", "vector", "videos"])
def test_wrappers_that_give_wrong_scores_or_overwrite_files_are_named(env_fn, wrappers, warned, caplog):
    VecEnv.create_factory(env_fn, vec_env_size=2, wrappers=wrappers)
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == len(warned)
    assert all(word in text for word, text in zip(warned, texts, strict=True))
