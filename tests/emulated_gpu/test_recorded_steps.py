"""Check that steps of environments that are recorded into CUDA graphs equal unrecorded ones, bit for bit."""

from __future__ import annotations

import copy
import functools
import re

import numpy as np
import pytest
import torch

from pytorchrl import Scheme, VecEnv
from pytorchrl.agent.env.tensors import vec_env
from pytorchrl.agent.env.tensors.recording import RecordedStep
from pytorchrl.agent.env.tensors.vec_env import TensorVecEnv
from pytorchrl.envs.tensors.classic import (
    TorchAcrobot,
    TorchCartPole,
    TorchMountainCar,
    TorchMountainCarContinuous,
    TorchPendulum,
)
from pytorchrl.envs.tensors.maze import TorchPointMaze
from pytorchrl.envs.tensors.memory import TorchRecall
from pytorchrl.training.composition import compose
from tests.emulated_gpu.tensor_task import TensorTask
from tests.emulated_gpu.tensor_vector import TensorVector
from tests.emulated_gpu.test_tensor_envs import assert_equal, collector_of, stepped, weights_of
from tests.emulated_gpu.waits import Waits

pytestmark = pytest.mark.gpu
NUM_ENVS = 4
GPU = "cuda:0"
CLASSES = [TorchCartPole, TorchPendulum, TorchAcrobot, TorchMountainCar, TorchMountainCarContinuous, TorchPointMaze,
           TorchRecall]
RECORDED = functools.partial(TensorVecEnv, records=True)


class Task(TensorTask):
    """Declares that it can be recorded."""

    is_recordable = True


class NextStep(TensorVector):
    """Copies values into the tensors of its attributes instead of binding the attributes."""

    is_recordable = True

    def __setattr__(self, name, value):
        if isinstance(self.__dict__.get(name), torch.Tensor):
            self.__dict__[name].copy_(value)
        else:
            super().__setattr__(name, value)


def actions_of(envs, rng):
    space = envs.action_space
    drawn = rng.integers(0, space.n, NUM_ENVS) if hasattr(space, "n") else rng.uniform(
        -1, 1, envs.action_shape).astype(np.float32)
    return torch.from_numpy(drawn).to(GPU)


def tensors_of(step):
    """Return copies of all tensors of a step, by name."""
    leaves = {f"{name}/{key}": leaf for name in ("obs", "final_obs") for key, leaf in getattr(step, name).items()}
    rest = {name: value for name, value in step._asdict().items() if isinstance(value, torch.Tensor)}
    return {name: leaf.clone() for name, leaf in (leaves | rest).items()}


def compare(function, num_steps=40, between=lambda envs, t: None, **options):
    """Compare recorded steps with others; return the environments whose steps are recorded."""
    factory = VecEnv.create_factory(function, vec_env_size=NUM_ENVS, **options)
    # An object exists once, so the recorded steps get a copy of it.
    other = VecEnv.create_factory(copy.deepcopy(function), vec_env_size=NUM_ENVS, **options)
    plain, own = both = factory(seed=3, kind=TensorVecEnv), other(seed=3, kind=RECORDED)
    assert_equal(plain.reset()[0], own.reset()[0])
    rng, num_ended, num_valid = np.random.default_rng(0), 0, 0
    for t in range(num_steps):
        action = actions_of(plain, rng)
        first, second = (tensors_of(envs.step(action)) for envs in both)
        assert_equal(first, second)
        num_ended, num_valid = num_ended + int(first["ended"].sum()), num_valid + int(first["valid"].sum())
        for envs in both:
            between(envs, t)
    assert num_ended > NUM_ENVS
    return own


@pytest.mark.parametrize("options", [{}, {"reward_transform": "sign"}, {"reward_transform": 0.1}], ids=str)
@pytest.mark.parametrize("cls", CLASSES)
def test_steps_of_environments_in_torch_equal_unrecorded_ones(recordings, caplog, cls, options):
    own = compare(functools.partial(cls, device=GPU, max_episode_steps=7), **options)
    assert len(recordings) == 1
    assert "could not be recorded" not in caplog.text
    action = actions_of(own, np.random.default_rng(1))
    with Waits() as waits:
        own.step(action)
    assert (waits.reads, waits.writes, waits.launched) == (0, 0, 2), waits.names


@pytest.mark.parametrize(("function", "options"), [
    (Task, {}), (functools.partial(Task, is_discrete=True), {}),
    (functools.partial(Task, has_final=False), {"truncation": "approximate"}),
    (NextStep, {}), (functools.partial(NextStep, kind="nested"), {}), (functools.partial(NextStep, kind="image"), {}),
    (functools.partial(TorchCartPole, device=GPU, max_episode_steps=7, compiled=True), {})], ids=str)
def test_steps_of_other_environments_equal_unrecorded_ones(recordings, caplog, function, options):
    compare(function, **options)
    assert len(recordings) == 1
    assert "could not be recorded" not in caplog.text


def test_resets_and_seeds_are_seen_by_a_graph(recordings):
    """A reset starts new episodes and accounts, and a generator that is seeded again draws the same numbers again."""
    found = []

    def between(envs, t):
        if t in (8, 20):
            envs.reseed(5)
            found.append(envs.reset()[0]["obs"].clone())
    compare(functools.partial(TorchCartPole, device=GPU, max_episode_steps=7), between=between)
    assert len(recordings) == 1
    assert torch.equal(torch.stack(found), found[0].expand(4, -1, -1))


def test_undeclared_environments_are_not_recorded(recordings, caplog):
    for function in (TensorTask, functools.partial(NextStep, mode="SAME_STEP")):
        NextStep.is_recordable = False
        try:
            own = compare(function)
        finally:
            NextStep.is_recordable = True
        assert own._advance == own._stepped
    assert recordings == []
    assert "could not be recorded" not in caplog.text


class Reads(Task):
    """Reads a flag on the host."""

    def step(self, action):
        result = super().step(action)
        return (*result[:4], {**result[4], "log": {"ends": int(result[2].sum())}})


class DrawsElsewhere(Task):
    """Draws random numbers from another generator."""

    def __init__(self, num_envs):
        super().__init__(num_envs)
        self.generator, self.source = torch.Generator(GPU), self.generator

    def step(self, action):
        self.point += 0.01 * torch.empty_like(self.point).normal_(generator=self.source)
        return super().step(action)


class Binds(Task):
    """Binds an attribute in each step, or only in the one that is recorded."""

    def __init__(self, num_envs, when):
        super().__init__(num_envs)
        self.when, self.calls, self.push = when, [], torch.zeros(num_envs, 2, device=GPU)

    def step(self, action):
        self.calls.append(0)
        if self.when in (None, len(self.calls)):
            self.push = self.push + action
        return super().step(0.5 * action + 0.01 * self.push)


class Counts(Task):
    """Adds an attribute in its second step, and counts on the host."""

    def step(self, action):
        self.num_steps = getattr(self, "num_steps", 0) + 1
        return super().step(action)


@pytest.mark.parametrize(("function", "reason"), [
    (Reads, "kernels of Reads.step one at a time.*the operation aten::(item|_local_scalar_dense) waits for a value"),
    (DrawsElsewhere, "kernels of DrawsElsewhere.step .*(generator|capture)"),
    (functools.partial(Binds, when=None), "kernels of Binds.step .* step binds the attribute 'push'"),
    (functools.partial(Binds, when=4), "step binds the attribute 'push'"),
    (Counts, "step binds the attribute 'num_steps'")], ids=["reads", "draws", "binds", "binds later", "counts"])
def test_environments_that_break_their_promise_are_stepped_one_by_one(caplog, function, reason):
    own = compare(function)
    assert isinstance(own._advance, RecordedStep)
    assert own._advance._recorded._graphs == {}
    assert len(caplog.records) == 1
    assert re.search(reason, caplog.text), caplog.text


class Windy(Task):
    """Is pushed by a wind, a number of Python."""

    wind = 0.0

    def step(self, action):
        self.point += self.wind
        return super().step(action)


def test_an_attribute_that_is_set_between_steps_is_seen(recordings):
    def between(envs, t):
        if t in (10, 20):
            envs.vector.unwrapped.given.wind = 0.01 * t
    compare(Windy, between=between)
    assert len(recordings) == 3


def test_closed_environments_keep_no_graph():
    own = compare(Task)
    own.close()
    assert own._advance == own._stepped


def ppo(env="pytorchrl/TorchCartPole-v1", **options):
    env_kwargs = {"device": GPU, "max_episode_steps": 12} if isinstance(env, str) else {}
    agent, settings, _ = compose("ppo", env, {
        "num_envs": NUM_ENVS, "num_steps": 8, "target_steps": 10_000, "env_kwargs": env_kwargs, "compile": True,
        "device": GPU, **options})
    return Scheme(agent.algo_factory, agent.actor_factory, agent.storage_factory, agent.train_envs_factory,
                  **{"seed": 1, "runtime": "simulated", **settings})


@pytest.fixture
def twice(monkeypatch):
    """Return a function that calls another one with recorded and with unrecorded steps, and returns both results."""
    def call(function):
        found = [function()]
        with monkeypatch.context() as patch:
            patch.setattr(vec_env, "is_recordable", lambda env: False)
            return [*found, function()]
    return call


@pytest.mark.parametrize("options", [
    {}, {"normalize_obs": True, "normalize_reward": True}, {"recurrent_net": "gru", "num_mini_batch": 2}], ids=str)
def test_runs_and_their_resumption_equal_unrecorded_ones(twice, recordings, options):
    def run():
        scheme = stepped(ppo(**options), 6)
        is_recorded = isinstance(collector_of(scheme).envs._advance, RecordedStep)
        checkpoint, before = scheme.checkpoint(), weights_of(scheme)
        scheme.stop()
        resumed = ppo(**options)
        resumed.resume(checkpoint)
        after = weights_of(stepped(resumed, 12))
        resumed.stop()
        return is_recorded, before, after
    (is_recorded, *first), (is_other, *second) = twice(run)
    assert (is_recorded, is_other) == (True, False)
    for ours, theirs in zip(first, second, strict=True):
        assert_equal(ours, theirs)


@pytest.mark.parametrize("compile_", [False, "auto"])
def test_steps_are_recorded_only_if_compilation_is_wanted(recordings, compile_):
    scheme = stepped(ppo(compile=compile_), 4)
    assert not isinstance(collector_of(scheme).envs._advance, RecordedStep)
    scheme.stop()
    assert recordings == []


@pytest.mark.parametrize(("name", "options"), [("sac", {}), ("dqn", {})])
def test_replay_records_steps(twice, name, options):
    def run():
        agent, settings, _ = compose(name, functools.partial(Task, is_discrete=name == "dqn"), {
            "num_envs": NUM_ENVS, "target_steps": 10_000, "compile": True, "device": GPU, "start_steps": 20,
            "update_every": 4, "num_updates": 2, "mini_batch_size": 16, **options})
        scheme = stepped(Scheme(agent.algo_factory, agent.actor_factory, agent.storage_factory,
                                agent.train_envs_factory, **{"seed": 1, "runtime": "simulated", **settings}), 30)
        is_recorded = isinstance(collector_of(scheme).envs._advance, RecordedStep)
        weights = weights_of(scheme)
        scheme.stop()
        return is_recorded, weights
    (is_recorded, first), (is_other, second) = twice(run)
    assert (is_recorded, is_other) == (True, False)
    assert_equal(first, second)


def test_steps_that_the_host_takes_in_the_same_environments_are_seen_by_a_graph(recordings):
    """An object exists once, so evaluations reset and step it without the graph, between the graph's replays."""
    def between(envs, t):
        if t % 10 == 9:
            envs.vector.reset(seed=t)
            envs.vector.step(np.ones(envs.action_shape, np.int64))
    compare(TorchCartPole(NUM_ENVS, device=GPU, max_episode_steps=7), between=between)
    assert len(recordings) == 1


def test_an_interrupted_worker_stops_before_its_next_step():
    scheme = stepped(ppo(), 4)
    worker = collector_of(scheme)
    worker.preempt_next(3)
    assert worker.collect().header.num_env_steps == 3 * NUM_ENVS
    worker.interrupt()
    assert worker.collect().header.num_env_steps == 0
    scheme.stop()


@pytest.mark.parametrize("runtime", ["threads", "simulated"])
def test_two_collectors_record_their_own_graphs(recordings, runtime):
    scheme = ppo(runtime=runtime, num_col_workers=2, col_device=GPU)
    stepped(scheme, 8)
    scheme.stop()
    assert len({id(function) for function in recordings}) >= 4  # acting and stepping of both
    assert all(tensor.isfinite().all() for tensor in weights_of(scheme).values()) if runtime == "simulated" else True
