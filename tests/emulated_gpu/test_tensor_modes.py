"""Check vector environments of Gymnasium over tensors on a GPU: all modes, kinds of observations and odd rollouts."""

from __future__ import annotations

import functools
import logging
import os

import pytest
import torch

from pytorchrl import Scheme, VecEnv, train
from pytorchrl.agent.env.tensors import vec_env
from pytorchrl.agent.env.tensors.vec_env import TensorVecEnv
from pytorchrl.errors import CheckpointError, EnvError
from pytorchrl.training.composition import compose
from tests.emulated_gpu.tensor_vector import TensorVector
from tests.emulated_gpu.test_tensor_envs import REPLAY, assert_equal, collector_of, stepped, weights_of

pytestmark = pytest.mark.gpu
PPO = ("ppo", {"num_steps": 8})
SAC = ("sac", REPLAY)
DQN = ("dqn", {**REPLAY, "n_step": 3})


@pytest.fixture
def schemes():
    """Return a function that builds a scheme, which is stopped after the test."""
    made = []

    def make(algorithm, env=None, device="cuda:0", **options):
        env = {"is_discrete": algorithm == "dqn", **(env or {})}
        agent, settings, _ = compose(algorithm, functools.partial(TensorVector, **env), {
            "num_envs": 4, "target_steps": 10_000, **options})
        made.append(Scheme(agent.algo_factory, agent.actor_factory, agent.storage_factory, agent.train_envs_factory,
                           **{"device": device, "seed": 1, "runtime": "simulated", **settings}))
        return made[-1]
    yield make
    for scheme in made:
        scheme.stop()


@pytest.fixture
def compare(schemes, monkeypatch):
    """Return a function that compares a run on the device with one that copies every step, bit for bit."""
    def both(*args, versions=6, **options):
        direct = stepped(schemes(*args, **options), versions)
        assert isinstance(collector_of(direct).envs, TensorVecEnv)
        with monkeypatch.context() as patch:
            patch.setattr(vec_env, "reason_for_host", lambda *envs: "this test wants it")
            copied = stepped(schemes(*args, **options), versions)
        assert not isinstance(collector_of(copied).envs, TensorVecEnv)
        assert_equal(weights_of(direct), weights_of(copied))
        assert direct.ledger() == copied.ledger()
    return both


@pytest.mark.parametrize("kind", ["vector", "float64", "image", "stack", "nested"])
@pytest.mark.parametrize("mode", ["NEXT_STEP", "SAME_STEP"])
@pytest.mark.parametrize(("algorithm", "options"), [PPO, SAC, DQN])
def test_modes_and_observations(compare, algorithm, options, mode, kind):
    if algorithm == "sac" and kind in ("image", "stack"):
        pytest.skip("DQN and PPO test images")
    compare(algorithm, {"mode": mode, "kind": kind}, versions=4, **options)


@pytest.mark.parametrize(("algorithm", "options"), [
    ("ppo", {"microbatch_size": 7}), ("ppo", {"advantage_normalization": "batch"}), ("ppo", {"mixed_precision": True}),
    ("ppo", {"recompute_advantages": True}), ("ppo", {"num_steps": 1, "num_mini_batch": 1}),
    ("sac", {"replay_size": 48}), ("dqn", {"replay_size": 48, "prioritized": True}),
], ids=str)
def test_options(compare, algorithm, options):
    base = {"ppo": PPO, "sac": SAC, "dqn": DQN}[algorithm][1]
    compare(algorithm, {"mode": "SAME_STEP"}, **{**base, **options})


@pytest.mark.parametrize("mode", ["NEXT_STEP", "SAME_STEP"])
@pytest.mark.parametrize(("algorithm", "options"), [PPO, SAC, DQN])
def test_episodes_of_one_step(compare, algorithm, options, mode):
    """In NEXT_STEP mode, rollouts in which all environments are reset contain no transition, and are left out."""
    compare(algorithm, {"mode": mode, "limit": 1}, versions=8, **options)


def test_an_interrupted_worker_returns_an_empty_rollout(schemes):
    worker = collector_of(stepped(schemes("ppo", **PPO[1]), 2))
    worker.interrupt()
    assert worker.collect().header.num_env_steps == 0


def test_environments_on_another_gpu_are_copied(schemes, caplog):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with caplog.at_level(logging.WARNING):
        scheme = stepped(schemes("ppo", {"device": "cuda:1"}, **PPO[1]), 2)
    assert type(collector_of(scheme).envs) is VecEnv
    assert "copied from cuda:1 to the host in every step, because the actor uses cuda:0" in caplog.text


def test_missing_last_observations_are_refused(schemes):
    """Without them, the value of the next episode's first state would be taken; no step of the rollout is delivered."""
    scheme = schemes("ppo", {"mode": "SAME_STEP", "has_final": False}, truncation="approximate", **PPO[1])
    scheme.start()
    worker = collector_of(scheme)
    with pytest.raises(EnvError, match=r"expected info\['final_obs'\] .* SAME_STEP .* got none"):
        worker.collect()
    assert worker.close() == (32, 32)


class WrongMode(TensorVector):
    """States the wrong mode."""

    def __init__(self, num_envs):
        super().__init__(num_envs, mode="SAME_STEP")
        self.metadata = {}


def test_last_observations_in_the_wrong_mode_are_refused(schemes):
    agent, settings, _ = compose("ppo", WrongMode, {
        "num_envs": 4, "num_steps": 8, "target_steps": 10_000, "device": "cuda:0"})
    scheme = Scheme(agent.algo_factory, agent.actor_factory, agent.storage_factory, agent.train_envs_factory,
                    **settings, seed=1)
    with pytest.raises(EnvError, match="expected no info"):
        stepped(scheme, 1)
    scheme.stop()


class AnyDevice(TensorVector):
    """Is on the device that the environment variable names."""

    def __init__(self, num_envs, kind):
        super().__init__(num_envs, device=os.environ[PLACE], kind=kind, is_discrete=True)


PLACE = "TENSOR_VECTOR_DEVICE"


@pytest.mark.parametrize("kind", ["vector", "nested", "stack"])
@pytest.mark.parametrize(("before", "after"), [("cuda:0", "cpu"), ("cpu", "cuda:0")])
def test_replay_moves_to_another_device(before, after, kind, monkeypatch):
    """Stacks in host memory are stored frame by frame, which a ring on a device cannot continue."""
    def scheme_on(device):
        monkeypatch.setenv(PLACE, device)
        agent, settings, _ = compose("dqn", functools.partial(AnyDevice, kind=kind), {
            "num_envs": 4, "target_steps": 10_000, "device": device, "runtime": "simulated", **DQN[1]})
        return Scheme(agent.algo_factory, agent.actor_factory, agent.storage_factory, agent.train_envs_factory,
                      **settings, seed=1)
    scheme = stepped(scheme_on(before), 4)
    checkpoint = scheme.checkpoint()
    scheme.stop()
    resumed = scheme_on(after)
    resumed.resume(checkpoint)
    if kind == "stack" and before == "cpu":
        with pytest.raises(CheckpointError, match="resume with environments on the CPU"):
            stepped(resumed, 8)
    else:
        collected = collector_of(stepped(resumed, 8)).storage.sample(32)
        assert {leaf.device.type for leaf in collected.next_obs.values()} == {torch.device(after).type}
    resumed.stop()


@pytest.mark.parametrize("mode", ["NEXT_STEP", "SAME_STEP"])
def test_files_equal_those_of_copied_steps(mode, tmp_path, monkeypatch, caplog):
    """Evaluations, which copy, do not warn; their environments are on the device too."""
    rows = []
    for name in ("direct", "copied"):
        if rows:
            assert "to the host" not in caplog.text
            monkeypatch.setattr(vec_env, "reason_for_host", lambda *envs: "this test wants it")
        train("ppo", functools.partial(TensorVector, mode=mode), num_envs=4, device="cuda:0", target_steps=160, seed=1,
              log_dir=tmp_path / name, eval_every=80, eval_episodes=2, progress=False, **PPO[1])
        text = (tmp_path / name / "monitor_train_GWorker_0_CWorker_0.csv").read_text().splitlines()[1:]
        rows.append([[part for place, part in enumerate(line.split(",")) if place != 2] for line in text])
    assert rows[0] == rows[1]
    assert len(rows[0]) > 20


class WrongCategory(TensorVector):
    """Returns a category outside its space in the step `wrong`, which may be the last step of an episode."""

    def __init__(self, num_envs, wrong, **options):
        super().__init__(num_envs, kind="nested", **options)
        self.wrong = wrong

    def _obs(self):
        obs = super()._obs()
        return {**obs, "time": torch.where(self.time == self.wrong, 25, obs["time"])}


@pytest.mark.parametrize(("mode", "wrong", "row"), [
    ("NEXT_STEP", 2, "env"), ("SAME_STEP", 2, "env"), ("SAME_STEP", 5, "last observation")])
def test_categories_outside_their_space_are_named(mode, wrong, row):
    agent, settings, _ = compose("ppo", functools.partial(WrongCategory, wrong=wrong, mode=mode), {
        "num_envs": 4, "num_steps": 8, "target_steps": 10_000, "device": "cuda:0"})
    scheme = Scheme(agent.algo_factory, agent.actor_factory, agent.storage_factory, agent.train_envs_factory,
                    **settings, seed=1)
    with pytest.raises(EnvError, match=rf"{row} \d: observation leaf 'time' has the value 25, which is not in Disc"):
        stepped(scheme, 1)
    scheme.stop()
