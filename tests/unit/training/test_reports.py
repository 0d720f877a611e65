"""Try what people reported about runs of other libraries; tests/reports.md names the reports."""

from __future__ import annotations

import gc
import os
import random
import threading

import gymnasium as gym
import numpy as np
import pytest
import torch

from pytorchrl import ConfigError, VecEnv, train

TINY = {"num_envs": 2, "num_steps": 16, "num_epochs": 1, "num_mini_batch": 1, "hidden_sizes": (8,), "progress": False,
        "tensorboard": False}


def weights_of(seed, **options):
    return train("ppo", "CartPole-v1", target_steps=96, seed=seed, **TINY, **options).acting_state


def are_equal(first, second):
    return all(torch.equal(first[name], second[name]) for name in first)


def test_trials_in_threads_are_as_reproducible_as_one_after_the_other():
    found = {}
    threads = [threading.Thread(target=lambda seed=seed: found.update({seed: weights_of(seed)})) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(are_equal(found[seed], weights_of(seed)) for seed in range(2))
    assert not are_equal(found[0], found[1])


def test_runs_one_after_the_other_keep_no_files_threads_or_random_state():
    def resources():
        gc.collect()
        return len(os.listdir("/proc/self/fd")), set(threading.enumerate())

    def random_state():
        return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()  # noqa: NPY002
    weights_of(0)
    before, drawn = resources(), random_state()
    for seed in range(3):
        train("ppo", "CartPole-v1", target_steps=32, seed=seed, **TINY).evaluate(1, deterministic=False)
    assert resources() == before
    assert random_state() == drawn


class Reusing(gym.Env):
    """Returns the same array and the same info in every call, and overwrites both."""

    action_space = gym.spaces.Discrete(2)

    def __init__(self, is_nested):
        box = gym.spaces.Box(-10, 10, (2,), np.float32)
        self.observation_space = gym.spaces.Dict(a=gym.spaces.Tuple((box, box))) if is_nested else box
        self.array, self.info, self.is_nested = np.zeros(2, np.float32), {}, is_nested

    def reset(self, *, seed=None, options=None):
        return self.show(-7)

    def step(self, action):
        obs, info = self.show(self.number + 1 if self.number > 0 else 1)
        return obs, 1.0, self.number == 3, False, info

    def show(self, number):
        self.number = self.array[:] = self.info["number"] = number
        return ({"a": (self.array, self.array)} if self.is_nested else self.array), self.info


@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("autoreset", ["same_step", "next_step"])
def test_the_last_observation_and_info_survive_a_reset_that_overwrites_them(autoreset, is_nested, tmp_path):
    factory = VecEnv.create_factory(Reusing, {"is_nested": is_nested}, 2, autoreset=autoreset, log_dir=str(tmp_path),
                                    info_keywords=("number",))
    envs = factory(seed=0)
    envs.reset()
    step = [envs.step(np.zeros(2, np.int64)) for _ in range(3)][-1]
    last = step.final_obs if autoreset == "same_step" else step.obs
    assert {value for array in last.values() for value in array.ravel().tolist()} == {3.0}
    envs.close()
    (file,) = tmp_path.iterdir()
    assert [line.rpartition(",")[2] for line in file.read_text(encoding="utf-8").splitlines()] == ["number", "3", "3"]


@pytest.mark.parametrize(("inner", "outer", "length"), [(10, 3, 3), (10, None, 10), (10, 50, 10)])
def test_the_shortest_of_nested_time_limits_ends_episodes(inner, outer, length):
    def make():
        return gym.wrappers.TimeLimit(gym.make("Pendulum-v1"), inner)
    agent = train("ppo", make, target_steps=32, max_episode_steps=outer, seed=0, **TINY)
    assert set(agent.evaluate(2).lengths) == {length}


@pytest.mark.parametrize(("options", "message"), [
    ({"replay_size": 7, "num_envs": 3}, "size 7 is less than a rollout of 3 environments x rollout_size 4"),
    ({"replay_size": 8, "mini_batch_size": 64}, None), ({"replay_size": 8, "n_step": 10}, None),
    ({"replay_size": 10, "start_steps": 100}, None)], ids=str)
def test_replays_of_odd_sizes_train_or_are_refused(options, message):
    options = {"num_envs": 1, "start_steps": 4, "mini_batch_size": 4, "hidden_sizes": (8,), **options}

    def run():
        return train("dqn", "CartPole-v1", target_steps=120, seed=0, progress=False, **options)
    if message is None:
        ledger = run().summary["ledger"]
        assert ledger["resident"] <= options["replay_size"]
        assert ledger["collected"] == ledger["resident"] + ledger["evicted"]
    else:
        with pytest.raises(ConfigError, match=message):
            run()
