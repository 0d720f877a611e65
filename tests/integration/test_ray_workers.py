"""Test what environments on Ray workers may do: exit, raise `SystemExit` or `KeyboardInterrupt`, or be restarted."""

from __future__ import annotations

import os
import sys

import gymnasium
import pytest

from pytorchrl.errors import CrashLoopError, WorkerError
from tests.conftest import result_of

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]


class Ending(gymnasium.Env):
    """An environment that ends in one of several ways at step 20, and at each later multiple of 20."""

    observation_space, action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,)), gymnasium.spaces.Discrete(2)

    def __init__(self, way):
        self.way, self.num_steps = way, 0

    def reset(self, *, seed=None, options=None):
        return self.observation_space.low, {}

    def step(self, action):
        self.num_steps += 1
        if self.num_steps % 20 == 0:
            if self.way == "exit":
                os._exit(3)
            if self.way == "SystemExit":
                sys.exit(3)
            if self.way == "KeyboardInterrupt":
                raise KeyboardInterrupt
            raise ValueError("flaky simulator")
        return self.observation_space.low, 1.0, self.num_steps % 5 == 0, False, {}


def make_steps(scheme, count):
    for _ in range(count):
        scheme.step()


def test_an_environment_that_ends_the_program_is_an_error(make_scheme):
    scheme = make_scheme(Ending, {"way": "KeyboardInterrupt"}, num_envs=1, num_col_workers=2)
    with pytest.raises(WorkerError, match=r"GWorker 0/CWorker \d raised KeyboardInterrupt\(\), which would end"):
        make_steps(scheme, 20)
    assert scheme.metrics()["workers_restarted"] == 0


@pytest.mark.parametrize(("way", "error"), [("raise", "flaky simulator"), ("SystemExit", "SystemExit: 3")])
def test_restarts_of_environments_are_logged_in_the_program(make_scheme, caplog, capfd, way, error):
    scheme = make_scheme(Ending, {"way": way}, num_envs=1, num_col_workers=2)
    while not scheme.metrics().get("envs_restarted"):
        scheme.step()
    [text, *_] = [message for message in caplog.messages if error in message]
    assert text.startswith("GWorker 0/CWorker ")
    assert "Traceback" in text
    assert error not in capfd.readouterr().out


@pytest.mark.chaos
def test_a_worker_that_exits_again_and_again_ends_the_run(make_scheme):
    scheme = make_scheme(Ending, {"way": "exit"}, num_envs=1, num_col_workers=2)
    with pytest.raises(CrashLoopError, match=r"before each loss, it had returned \d, \d, \d, \d, \d results"):
        make_steps(scheme, 1000)


TWO = """
import json
from pytorchrl import PPO, GAEBuffer, OnPolicyActor, Scheme, VecEnv
envs = VecEnv.create_factory("CartPole-v1", vec_env_size=1)
first, second = (Scheme(
    PPO.create_factory(), OnPolicyActor.create_factory(envs.observation_space, envs.action_space),
    GAEBuffer.create_factory(8), envs, seed=seed, num_col_workers=2, col_worker_resources={"num_cpus": 0})
    for seed in (1, 2))
first.step()
second.step()
first.stop()
for _ in range(3):
    second.step()
version = second.version
second.stop()
import ray
print("result:", json.dumps([version, second.metrics()["workers_restarted"], ray.is_initialized()]))
"""


def test_two_schemes_share_a_ray_instance(run_with_ray):
    assert result_of(run_with_ray("-c", TWO, timeout=160)) == [4, 0, False]
