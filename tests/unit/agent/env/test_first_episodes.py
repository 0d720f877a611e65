"""Test which errors of an environment end a run, and what workers need to build environments."""

import subprocess
import sys
import threading

import gymnasium as gym
import numpy as np
import pytest

import pytorchrl
from pytorchrl.agent.env import VecEnv
from pytorchrl.envs.testing import CountingEnv
from pytorchrl.errors import EnvError, FactorySerializationError
from pytorchrl.learner.reporting import progress_text


class Failing(CountingEnv):
    """A `CountingEnv` that raises at each of the given steps, counted over its life."""

    def __init__(self, at, episode_length=3):
        super().__init__(episode_length=episode_length)
        self.at, self.count = at, 0

    def step(self, action):
        self.count += 1
        if self.count in self.at:
            raise TimeoutError("the simulator is busy")
        return super().step(action)


def step(envs, number):
    envs.reset()
    for _ in range(number):
        envs.step(np.zeros(envs.num_envs, np.int64))


@pytest.mark.parametrize(("backend", "at"), [("sync", 2), ("sync", 1000), ("async", 2)])
def test_an_error_before_the_end_of_the_first_episode_ends_the_run(backend, at, caplog):
    kwargs = {"at": (at,), "episode_length": 9999}
    envs = VecEnv.create_factory(Failing, kwargs, 2, backend=backend)(seed=1)
    with pytest.raises(EnvError, match=rf"env 0: step raised after {at} steps.*TimeoutError: the simulator is busy.*"
                                       r"no episode of this environment had ended before; set on_env_error='restart'"):
        step(envs, at)
    envs.close()
    assert "restarted" not in caplog.text


def test_the_remedy_restarts_environments_in_their_first_episode():
    envs = VecEnv.create_factory(Failing, {"at": (2,)}, 2, on_env_error="restart")(seed=1)
    step(envs, 2)
    assert envs.num_restarts == 2


@pytest.mark.parametrize(
    "env_kwargs", [{"at": (5,)}, {"at": (1001,), "episode_length": 9999}], ids=["episode", "steps"])
def test_later_errors_restart_the_environment(env_kwargs):
    envs = VecEnv.create_factory(Failing, env_kwargs, 1)(seed=1)
    step(envs, env_kwargs["at"][0])
    assert envs.num_restarts == 1


def test_restarts_are_counted_in_the_progress_line(capsys):
    pytorchrl.train("ppo", Failing, env_kwargs={"at": (30,)}, num_envs=1, num_steps=16, target_steps=64, seed=1)
    assert "envs restarted" in capsys.readouterr().err
    assert "envs restarted" not in progress_text({
        "env_steps": 1, "target_steps": 2, "env_steps_per_s": 3.0, "return_mean": 4.0, "lag": 0.0, "workers": 0,
        "workers_missing": 0, "eval_return": None, "policy_returns": None, "envs_restarted": 0})


def test_what_cannot_be_sent_to_processes_is_refused_before_they_start():
    lock = threading.Lock()

    def build(**_):
        return lock and CountingEnv()

    for name, given in (("env_fn", {"env_fn": build}), ("wrappers", {"wrappers": (lambda env: lock and env,)})):
        with pytest.raises(FactorySerializationError, match=rf"{name} cannot be sent to the processes of backend="
                                                            r"'async'.*or use backend='sync'"):
            VecEnv.create_factory(**{"env_fn": CountingEnv, "backend": "async", **given})
        VecEnv.create_factory(**{"env_fn": CountingEnv, "backend": "sync", **given})(seed=1).close()


SCRIPT = """
import gymnasium as gym
import pytorchrl
from pytorchrl.envs.testing import CountingEnv

class Mine(CountingEnv):
    pass

gym.register("Mine-v0", {entry}, max_episode_steps=4)
if __name__ == "__main__":
    for options in {options}:
        found = pytorchrl.train("ppo", "Mine-v0", num_envs=2, num_steps=16, target_steps=64, seed=1, progress=False,
                                **options)
        assert found.evaluate(2).lengths == (4, 4)
    print("done")
"""


@pytest.mark.parametrize("entry", ["Mine", "'__main__:Mine'"])
def test_ids_that_a_script_registers_work_in_workers(tmp_path, entry):
    run_script(tmp_path, entry, [{"runtime": "processes", "num_col_workers": 2}])


@pytest.mark.thorough
def test_ids_that_a_script_registers_work_in_all_kinds_of_workers(tmp_path):
    run_script(tmp_path, "'__main__:Mine'", [
        {"backend": "async"}, {"runtime": "processes", "num_col_workers": 2, "backend": "async", "eval_every": 32},
        {"num_col_workers": 2}])


def run_script(folder, entry, options):
    path = folder / "script.py"
    path.write_text(SCRIPT.format(entry=entry, options=options))
    found = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=300, check=False)
    assert found.stdout.strip() == "done", found.stderr[-3000:]


def test_the_factory_registers_an_id_that_its_process_does_not_know():
    gym.register("OnlyHere-v0", CountingEnv)
    factory = VecEnv.create_factory("OnlyHere-v0")
    spec = gym.registry.pop("OnlyHere-v0")
    try:
        factory(seed=1).close()
        assert gym.registry["OnlyHere-v0"] == spec
    finally:
        gym.registry.pop("OnlyHere-v0", None)
    assert VecEnv.create_factory("CartPole-v1").spec is None
