"""Tests of the classification of work, and of the sampler that measures its shares."""

from __future__ import annotations

import importlib
import math
import signal
import sys
import threading
import time
from types import ModuleType, SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch

from pytorchrl.profile import work_shares

from pytorchrl import PPO, GAEBuffer, OnPolicyActor, Scheme, VecEnv
from pytorchrl.agent.actors.extractors import is_image
from pytorchrl.profile.work_shares import WorkSampler, kind_of
from pytorchrl.support.work import KINDS, Work
from tests.unit.packaging.source import MODULES, name_of


class Probe:
    """A callable that records the kind of work during each of its calls."""

    def __init__(self):
        self.kinds = []

    def __call__(self):
        self.kinds.append(kind_of(sys._getframe()))


class ProbingSpace(gym.spaces.Box):
    """A space that records the kind of work when its shape is read."""

    def __init__(self, probe):
        super().__init__(0, 1, (1,))
        self.probe = probe

    @property
    def shape(self):
        if hasattr(self, "probe"):
            self.probe()
        return (1,)


class ProbedEnv(gym.Env):
    """An environment of a user, which records the kind of work in its own functions and in those that it calls."""

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    probe = staticmethod(lambda: None)

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.probe()
        torch.nn.Identity().apply(lambda module: self.probe())
        is_image(ProbingSpace(self.probe))  # a function of actors, whose work is otherwise "network"
        return np.zeros(2, np.float32), 1.0, False, False, {}


@pytest.fixture
def train():
    """Return a function that makes some updates of a small agent, in which parts may be replaced."""
    def train_(env=ProbedEnv, *, algorithm=PPO, actor=OnPolicyActor):
        envs = VecEnv.create_factory(env)
        scheme = Scheme(
            algorithm.create_factory(num_epochs=1, num_mini_batch=1),
            actor.create_factory(envs.observation_space, envs.action_space), GAEBuffer.create_factory(8), envs, seed=1)
        try:
            for _ in range(3):
                scheme.step()
        finally:
            scheme.stop()
    return train_


def test_functions_of_an_environment_and_those_that_it_calls_are_environment(train):
    class OwnEnv(ProbedEnv):
        probe = Probe()

    train(OwnEnv)
    assert set(OwnEnv.probe.kinds) == {"environment"}
    assert len(OwnEnv.probe.kinds) >= 3 * 24


def test_an_actor_and_a_loss_are_network(train):
    acting, losing = Probe(), Probe()

    class ProbedActor(OnPolicyActor):
        def policy_features(self, obs, rhs, done):
            acting()
            return super().policy_features(obs, rhs, done)

    class ProbedPPO(PPO):
        def terms(self, evaluated, batch, parameters):
            losing()
            return super().terms(evaluated, batch, parameters)

    train(actor=ProbedActor, algorithm=ProbedPPO)
    assert set(acting.kinds) == set(losing.kinds) == {"network"}


@pytest.mark.parametrize(("module", "owner", "method", "kind"), [
    ("pytorchrl.agent.algorithms.optimizers", "FlatOptimizer", "step", "optimizer"),
    ("pytorchrl.agent.storages", "GAEBuffer", "insert_transition", "storage"),
    ("pytorchrl.agent.storages", "GAEBuffer", "generate_batches", "storage"),
    ("pytorchrl.agent.algorithms", "PPO", "compute_values", "network"),
    ("pytorchrl.agent.algorithms", "PPO", "acting_step", "ours"),
    ("pytorchrl.agent.env", "VecEnv", "step", "ours"),
    ("pytorchrl.scheme.collection.c_worker", "CWorker", "collect", "ours"),
])
def test_methods_of_each_part_have_a_kind(train, module, owner, method, kind):
    found, code = [], getattr(getattr(sys.modules[module], owner), method).__code__

    def profiler(frame, event, argument):
        if event == "call" and frame.f_code is code:
            found.append(kind_of(frame))
    sys.setprofile(profiler)
    try:
        train()
    finally:
        sys.setprofile(None)
    assert found
    assert set(found) == {kind}


def declarations():
    """Return all modules of the package, and for each module that declares its work, its constant `WORK`."""
    names = [name_of(path) for path in MODULES if path.name != "__main__.py"]
    modules = [importlib.import_module(name.removesuffix(".__init__")) for name in names]
    return modules, {module.__name__: module.WORK for module in modules if "WORK" in vars(module)}


def test_every_kind_and_function_that_is_declared_exists():
    modules, found = declarations()
    assert all(isinstance(work, Work) for work in found.values())
    kinds = {kind for work in found.values() for kind in (work.kind, work.calls, *work.methods.values())}
    assert kinds - {None} == set(KINDS)
    for name, work in found.items():
        classes = [cls for module in modules if f"{module.__name__}.".startswith(f"{name}.")
                   for cls in vars(module).values() if isinstance(cls, type) and cls.__module__ == module.__name__]
        assert {method for method in work.methods if not any(method in vars(cls) for cls in classes)} == set(), name


def test_parts_of_an_agent_and_of_the_worker_tree_declare_their_work():
    _, found = declarations()
    assert {f"pytorchrl.{name}" for name in (
        "agent.actors", "agent.algorithms", "agent.env", "agent.storages", "envs", "scheme")} <= set(found)


@pytest.mark.parametrize(("module", "function", "role"), [
    ("pytorchrl.kinds", "f", (None, None)), ("pytorchrl.kinds.near", "f", ("storage", None)),
    ("pytorchrl.kinds.near.own", "f", (None, "network")), ("pytorchrl.kinds.near.own", "g", ("optimizer", None)),
    ("pytorchrl.kinds.near.without", "f", ("storage", None)), ("pytorchrl.kinds.near.no.such", "f", ("storage", None)),
    ("kinds.near", "f", None)])
def test_the_nearest_declaration_counts(monkeypatch, module, function, role):
    works = {"pytorchrl.kinds": None, "pytorchrl.kinds.near": Work("storage"), "pytorchrl.kinds.near.without": None,
             "pytorchrl.kinds.near.own": Work(calls="network", methods={"g": "optimizer"}),
             "kinds.near": Work("storage")}
    for name, work in works.items():
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        if work is not None:
            sys.modules[name].WORK = work
    own = {"__name__": module, "sys": sys}
    exec(compile(f"def {function}(): return sys._getframe()", f"{module}.py", "exec"), own)
    found = work_shares._role_of(own[function]())
    assert found.is_own == (role is not None)
    assert (found.kind, found.calls if found.kind is None else None) == (role or (None, None))


def test_functions_of_others_do_no_work():
    assert kind_of(None) is None
    assert kind_of(sys._getframe()) is None  # no function of this package is running


def test_a_thread_that_waits_does_no_work():
    own = {"__name__": work_shares.__name__}  # the functions seem to be in a module of this package
    exec(compile("def wait(event): event.wait(30.0)\ndef work(probe): probe()", work_shares.__file__, "exec"), own)
    probe, event = Probe(), threading.Event()
    own["work"](probe)
    assert probe.kinds == ["ours"]
    thread = threading.Thread(target=own["wait"], args=[event])
    thread.start()
    try:
        names = []
        while names[:2] != ["wait", "wait"]:  # `Condition.wait`, called by `Event.wait`
            frame = sys._current_frames()[thread.ident]
            names = [frame.f_code.co_name, getattr(frame.f_back, "f_code", frame.f_code).co_name]
        assert kind_of(frame) is None
    finally:
        event.set()
        thread.join()


def busy(seconds):
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        math.sqrt(2.0)


@pytest.mark.parametrize(("pause", "seconds"), [(time.sleep, 0.05), (busy, 0.01)], ids=["sleeps", "computes"])
def test_an_environment_that_is_slow_has_the_largest_share(train, pause, seconds):
    class SlowEnv(ProbedEnv):
        def step(self, action):
            pause(seconds)
            return super().step(action)
    with WorkSampler() as sampler:
        train(SlowEnv)
    shares = sampler.shares()
    assert tuple(shares) == KINDS
    assert sum(shares.values()) == pytest.approx(1.0)
    assert all(share >= 0 for share in shares.values())
    assert max(shares, key=shares.get) == "environment"


def test_a_long_call_counts_with_its_whole_length(monkeypatch):
    """Check that a call during which no interrupt is handled counts as long as a call with many interrupts."""
    clock, sampler = iter([0.0, 5.0, 5.5, 6.5, 7.0]), WorkSampler()
    kinds = iter(["network", "storage"])
    monkeypatch.setattr(work_shares, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(work_shares, "sys", SimpleNamespace(_current_frames=dict))  # no other thread
    monkeypatch.setattr(work_shares, "kind_of", lambda frame: next(kinds))
    sampler._last = next(clock)
    sampler._sample(signal.SIGALRM, sys._getframe())
    sampler._sample(signal.SIGALRM, sys._getframe())
    # The half second that the first sample itself took does not count.
    assert sampler.seconds == {"environment": 0.0, "network": 5.0, "optimizer": 0.0, "storage": 1.0, "ours": 0.0}


def test_training_goes_on_if_a_sample_takes_longer_than_the_interval(monkeypatch):
    numbers = []
    monkeypatch.setattr(work_shares, "kind_of", lambda frame: time.sleep(3 * work_shares._INTERVAL_S))
    with WorkSampler() as sampler:
        end = time.perf_counter() + 40 * work_shares._INTERVAL_S
        while time.perf_counter() < end:
            numbers.append(0)
    assert signal.getitimer(signal.ITIMER_REAL)[1] == 0.0
    assert sampler.seconds == dict.fromkeys(KINDS, 0.0)
    assert len(numbers) > 1000


def test_nothing_sampled_has_no_shares():
    assert WorkSampler().shares() == {}


def test_handler_and_timer_are_restored():
    calls = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: calls.append(number))
    timer = signal.setitimer(signal.ITIMER_REAL, 100.0, 7.0)
    try:
        handler = signal.getsignal(signal.SIGALRM)
        with WorkSampler():
            assert signal.getsignal(signal.SIGALRM) != handler
        assert signal.getsignal(signal.SIGALRM) is handler
        delay, interval = signal.getitimer(signal.ITIMER_REAL)
        assert 0 < delay <= 100.0
        assert interval == 7.0
        signal.setitimer(signal.ITIMER_REAL, 0)
        with WorkSampler():
            pass
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
        assert calls == []
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *timer)


def test_only_the_main_thread_can_sample():
    found = []
    thread = threading.Thread(target=lambda: found.append(WorkSampler.is_supported()))
    thread.start()
    thread.join()
    assert (WorkSampler.is_supported(), found) == (True, [False])


def test_the_table_lists_all_kinds():
    shares = {"environment": 0.5, "network": 0.25, "optimizer": 0.125, "storage": 0.1, "ours": 0.025}
    assert work_shares.table(shares).splitlines() == [
        "work            share", "environment     50.0%", "network         25.0%", "optimizer       12.5%",
        "storage         10.0%", "ours             2.5%"]
