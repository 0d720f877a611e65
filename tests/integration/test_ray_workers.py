"""Test what environments on Ray workers may do: exit, raise `SystemExit` or `KeyboardInterrupt`, or be restarted."""

from __future__ import annotations

import os
import stat
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


@pytest.mark.parametrize(("way", "error"), [
    pytest.param("raise", "flaky simulator", marks=pytest.mark.thorough), ("SystemExit", "SystemExit: 3")])
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
import ray  # before the library, and without its settings, which Ray reads from the environment during its import
import glob, json, os
import gymnasium
from pytorchrl import PPO, GAEBuffer, OnPolicyActor, Scheme, VecEnv

class Writing(gymnasium.Env):
    observation_space, action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,)), gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        with open(f"file{os.getpid()}", "w") as file:
            file.write("x")
        return self.observation_space.low, {}

    def step(self, action):
        return self.observation_space.low, 1.0, True, False, {}

os.umask(0o027)
envs = VecEnv.create_factory(Writing, vec_env_size=1)
first, second = (Scheme(
    PPO.create_factory(num_epochs=1, num_mini_batch=1),
    OnPolicyActor.create_factory(envs.observation_space, envs.action_space), GAEBuffer.create_factory(4), envs,
    seed=seed, num_col_workers=2, col_worker_resources={"num_cpus": 0}) for seed in (1, 2))
first.step()
second.step()
sessions = glob.glob(f"/tmp/prl-*/r/session_*_{os.getpid()}")
first.stop()
for _ in range(3):
    second.step()
version = second.version
second.stop()
print("result:", json.dumps({
    "sessions": len(sessions), "version": version, "restarted": second.metrics()["workers_restarted"],
    "is_initialized": ray.is_initialized(), "umask": os.umask(0)}))
"""


def test_two_schemes_share_a_ray_instance(run_with_ray, tmp_path):
    """Check two schemes after an import of Ray; files of their environments have the permissions that are usual."""
    assert result_of(run_with_ray("-c", TWO, timeout=160)) == {
        "sessions": 1, "version": 4, "restarted": 0, "is_initialized": False, "umask": 0o027}
    modes = [stat.S_IMODE(os.stat(path).st_mode) for path in tmp_path.glob("file*")]
    assert modes == [0o640] * 5  # of the script and of four workers
