"""Check that `sys.exit()` in code of a user ends a run with an error that names the code, never silently."""

from __future__ import annotations

import signal
import sys

import gymnasium as gym
import numpy as np
import pytest
import torch

import pytorchrl
from pytorchrl import ASYNC, PPO, GAEBuffer, Learner, OnPolicyActor, Scheme, VecEnv
from pytorchrl.callbacks import Callback
from pytorchrl.envs.testing import CountingEnv
from pytorchrl.errors import CallbackError, EnvError, PyTorchRLError, WorkerError
from pytorchrl.support.tracebacks import as_error
from tests.unit.agent.env.small_envs import ExitingEnv


class ExitingNetwork(torch.nn.Module):
    """A feature extractor that ends the program at its fifth forward pass."""

    def __init__(self, space):
        super().__init__()
        self.layer, self.out_features, self._count = torch.nn.Linear(4, 4), 4, 0

    def forward(self, x):
        self._count += 1
        if self._count > 5:
            sys.exit(0)
        return self.layer(x)


def make(env_fn=CountingEnv, env_kwargs=None, network=None, **settings):
    envs = VecEnv.create_factory(env_fn, env_kwargs or {}, 2, **settings.pop("envs", {}))
    return Scheme(
        PPO.create_factory(num_epochs=1, num_mini_batch=1),
        OnPolicyActor.create_factory(envs.observation_space, envs.action_space, hidden_sizes=(4,),
                                     **({} if network is None else {"feature_extractor": network})),
        GAEBuffer.create_factory(8), envs, envs, seed=1, **settings)


RUNTIMES = {
    "in process": {},
    "threads": {"num_col_workers": 1, "col_communication": ASYNC, "runtime": "threads"},
    "processes": {"num_col_workers": 1, "col_communication": ASYNC, "runtime": "processes"},
}


@pytest.fixture(autouse=True)
def quick(request):
    """Make worker processes forks of a process that has imported torch."""
    callspec = getattr(request.node, "callspec", None)
    if callspec is not None and callspec.params.get("runtime") == "processes":
        request.getfixturevalue("quick_processes")


def run(scheme):
    try:
        for _ in range(200):
            scheme.step()
    finally:
        scheme.stop()


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize(("call", "at"), [("step", 20), ("reset", 3)])
@pytest.mark.parametrize("policy", ["raise", "restart"])
def test_an_environment_that_exits_raises_an_error_that_names_it(runtime, call, at, policy):
    scheme = make(ExitingEnv, {"call": call, "at": at}, envs={"on_env_error": policy}, **RUNTIMES[runtime])
    with pytest.raises(EnvError, match=rf"env [01]: {call} raised after \d+ steps.*SystemExit: 0; an environment must"):
        run(scheme)


def test_an_environment_that_exits_once_is_restarted():
    scheme = make(ExitingEnv, {"call": "step", "at": 20}, envs={"on_env_error": "restart", "max_env_restarts": 1000})
    for _ in range(5):
        scheme.step()
    assert scheme.metrics()["envs_restarted"] >= 2
    scheme.stop()


@pytest.mark.parametrize(("backend", "options"), [
    ("sync", {}), ("sync", {"env_timeout_s": 60.0}), ("async", {"env_timeout_s": 60.0})])
def test_every_way_of_stepping_names_the_environment(backend, options):
    envs = VecEnv.create_factory(ExitingEnv, {"call": "step", "at": 3}, 2, backend=backend, on_env_error="raise",
                                 **options)
    env = envs(seed=1)
    env.reset()
    for _ in range(3):
        env.step(np.zeros(2, np.int64))
    with pytest.raises(EnvError, match=r"env 0: step raised after 4 steps.*SystemExit: 0"):
        env.step(np.zeros(2, np.int64))
    env.close()


def test_a_constructor_that_exits_is_an_error():
    with pytest.raises(EnvError, match=r"env 0: the constructor raised: SystemExit: 0; an environment must not call"):
        VecEnv.create_factory(ExitingEnv, {"call": "constructor"})


class ExitingVector(gym.vector.VectorEnv):
    """A native vector environment whose step ends the program."""

    single_observation_space = gym.spaces.Box(0.0, 1.0, (2,), np.float32)
    single_action_space = gym.spaces.Discrete(2)
    metadata = {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP}  # noqa: RUF012 - Gymnasium defines it so

    def __init__(self, num_envs=1):
        self.num_envs = num_envs
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed=None, options=None):
        return np.zeros((self.num_envs, 2), np.float32), {}

    def step(self, actions):
        sys.exit("the licence has expired")


def test_a_native_vector_environment_that_exits_raises_an_error():
    env = VecEnv.create_factory(ExitingVector, vec_env_size=2)(seed=1)
    env.reset()
    with pytest.raises(EnvError, match=r"environments 0 to 1: step raised.*SystemExit: the licence has expired"):
        env.step(np.zeros(2, np.int64))


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_network_that_exits_raises_an_error_that_names_it(runtime):
    scheme = make(network=ExitingNetwork, **RUNTIMES[runtime])
    with pytest.raises(WorkerError, match=r"SystemExit\(0\) was raised.*must not call sys.exit") as caught:
        run(scheme)
    if runtime != "processes":
        assert f"in forward ({__file__}:" in str(caught.value)
    assert isinstance(caught.value.__cause__, SystemExit)


class ExitingCallback(Callback):
    """A callback of which one method ends the program."""

    def __init__(self, hook):
        setattr(self, hook, self._exit)

    def _exit(self, *_):
        sys.exit(0)


@pytest.mark.parametrize("hook", ["check", "on_start", "on_step", "on_record", "on_end", "state", "on_checkpoint"])
def test_a_callback_that_exits_raises_an_error_that_names_it(tmp_path, hook):
    with (pytest.raises(CallbackError, match=rf"ExitingCallback\.{hook} raised SystemExit: 0"),
          Learner(make(), target_steps=64, log_dir=tmp_path, checkpoint_every=32, progress=False, tensorboard=False,
                  callbacks=(ExitingCallback(hook),)) as learner):
        learner.train()


def test_training_ends_with_an_error_and_saves_the_model(tmp_path):
    with pytest.raises(PyTorchRLError, match="SystemExit: 0"):
        pytorchrl.train("ppo", ExitingEnv, env_kwargs={"call": "step", "at": 30}, num_envs=1, num_steps=8,
                        num_mini_batch=1, target_steps=200, log_dir=tmp_path, progress=False, seed=1)
    assert pytorchrl.load(tmp_path).acting_state["all"].isfinite().all()


def test_the_command_line_reports_code_that_exits(run_forked, tmp_path):
    (tmp_path / "leaving.py").write_text(
        "import sys\nfrom pytorchrl.envs.testing import CountingEnv\n"
        "class Leaving(CountingEnv):\n"
        "    def step(self, action):\n"
        "        if self._num_steps > 40:\n"
        "            sys.exit(0)\n"
        "        return super().step(action)\n")
    (tmp_path / "registered.py").write_text(
        "import gymnasium\ngymnasium.register('Leaving-v0', entry_point='leaving:Leaving')\n")
    done = run_forked("-m", "pytorchrl", "train", "ppo", "--env", "registered:Leaving-v0", "--num-envs", "1",
                      "--num-steps", "8", "--target-steps", "2000", "--no-progress", timeout=170)
    assert done.returncode == 1
    assert "CWorker 0, env 0: step raised after 42 steps" in done.stderr
    assert "SystemExit: 0; an environment must not call sys.exit()" in done.stderr


class SignallingEnv(CountingEnv):
    """A `CountingEnv` that receives SIGUSR1 in its tenth step."""

    def step(self, action):
        if self._num_steps == 10:
            signal.raise_signal(signal.SIGUSR1)
        return super().step(action)


def end(number, frame):
    sys.exit(12)


def test_the_exit_of_a_signal_handler_is_not_an_error():
    scheme = make(SignallingEnv, envs={"on_env_error": "restart"})
    found = signal.signal(signal.SIGUSR1, end)
    try:
        with pytest.raises(SystemExit) as ended:
            run(scheme)
    finally:
        signal.signal(signal.SIGUSR1, found)
    assert ended.value.code == 12


def test_other_errors_are_returned_as_they_are():
    failure = ValueError()
    assert as_error(failure, "somewhere") is failure
    assert str(as_error(SystemExit(3), "the start")).startswith("the start: SystemExit(3) was raised; code that runs")
