"""Fixtures for tests of schemes: small schemes on threads, the sixteen patterns, and checks of ledgers and threads."""

from __future__ import annotations

import itertools
import threading
import time

import numpy as np
import pytest
import torch

from pytorchrl import A2C, ASYNC, PPO, SYNC, GAEBuffer, OnPolicyActor, Scheme, VecEnv
from pytorchrl.agent.synthetic import synthetic_agent
from pytorchrl.envs.testing import CountingEnv
from tests.conftest import pairwise

PATTERNS = [
    pytest.param(
        {"num_col_workers": 3 if col else 1, "col_communication": ASYNC if col_async else SYNC,
         "num_grad_workers": 2 if grad else 1, "grad_communication": ASYNC if grad_async else SYNC},
        id=f"{'parallel' if col else 'central'}-{'async' if col_async else 'sync'}_"
           f"{'parallel' if grad else 'central'}-{'async' if grad_async else 'sync'}")
    for col, col_async, grad, grad_async in itertools.product((False, True), repeat=4)
]


def chessboard(rows, columns):
    """Return all pairs of values for `parametrize`: those on the white squares unmarked, the others `thorough`.

    The default run then has each value of both lists, with every second value of the other list.
    """
    return [pytest.param(row, column, marks=[pytest.mark.thorough] if (i + j) % 2 else [])
            for i, row in enumerate(rows) for j, column in enumerate(columns)]


def pytest_generate_tests(metafunc):
    """Run each test that has an argument `pattern` or `some_pattern` in the sixteen patterns.

    By default, a test that has the argument `some_pattern` runs in five of them, which contain each pair of settings.
    """
    if "pattern" in metafunc.fixturenames:
        metafunc.parametrize("pattern", PATTERNS)
    if "some_pattern" in metafunc.fixturenames:
        metafunc.parametrize("some_pattern", pairwise(PATTERNS))


@pytest.fixture(autouse=True)
def one_torch_thread():
    """Start each test with one torch thread, and check that the test does not change this number."""
    torch.set_num_threads(1)
    yield
    assert torch.get_num_threads() == 1


@pytest.fixture(autouse=True)
def no_thread_left():
    """Check that no thread started by a test is still running after the test."""
    before = set(threading.enumerate())
    yield
    left = wait_for_end_of(set(threading.enumerate()) - before)
    assert not left


def wait_for_end_of(threads, patience_s=2.0):
    """Return the names of the threads that are still alive after `patience_s` seconds."""
    deadline = time.monotonic() + patience_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [thread.name for thread in threads if thread.is_alive()]


@pytest.fixture
def stopped():
    """Return a function that returns the given scheme, which is stopped after the test."""
    schemes = []

    def keep(scheme):
        schemes.append(scheme)
        return scheme
    yield keep
    for scheme in schemes:
        scheme.stop()


@pytest.fixture
def make_scheme(stopped):
    """Return a function that makes schemes on threads; all of them are stopped after the test."""
    def make(env_fn=CountingEnv, env_kwargs=None, *, num_envs=2, size=8, algo=None, storage=GAEBuffer, hidden=(8,),
             envs=None, actor=None, test_envs=None, **settings):
        envs = envs or VecEnv.create_factory(env_fn, env_kwargs, num_envs)
        return stopped(Scheme(
            algo or PPO.create_factory(num_epochs=2, num_mini_batch=2, lr=1e-3),
            actor or OnPolicyActor.create_factory(envs.observation_space, envs.action_space, hidden_sizes=hidden),
            storage.create_factory(size), envs, test_envs, **({"runtime": "threads", "seed": 1} | settings)))
    return make


@pytest.fixture
def make_replay_scheme(stopped):
    """Return a function that makes simulated schemes from options of the synthetic agent and settings of the scheme.

    All schemes are stopped after the test.
    """
    return lambda agent, **settings: stopped(
        Scheme(*synthetic_agent(**agent), **({"seed": 1, "runtime": "simulated"} | settings)))


@pytest.fixture
def one_batch():
    """Return a factory of PPO that makes one update from each train batch."""
    return PPO.create_factory(num_epochs=1, num_mini_batch=1, lr=1e-3)


@pytest.fixture
def plain_a2c():
    """Return a factory of A2C with default options."""
    return A2C.create_factory()


def check_ledger(scheme):
    """Check that the ledger balances now, and return it."""
    ledger = scheme.ledger()
    places = [ledger[name] for name in ("in_flight", "queued", "consumed_unique", "resident", "evicted")]
    assert ledger["collected"] == sum(places) + sum(ledger["dropped"].values()), ledger
    assert min(places) >= 0, ledger
    return ledger


@pytest.fixture(name="check_ledger")
def check_ledger_fixture():
    """Return the function `check_ledger(scheme)`."""
    return check_ledger


class Recorder:
    """Three lists of env steps: those taken, those inserted into a storage, and those sampled.

    An env step is identified by (seed of the environment, episode, t).
    """

    def __init__(self):
        recorder = self
        self.made, self.drawn, self.inserted = [], [], []

        class RecordedEnv(CountingEnv):
            def step(self, action):
                recorder.made.append((self._seed, self._episode, self._t))
                return super().step(action)

        class RecordedBuffer(GAEBuffer):
            def insert_data_slice(self, rollouts):
                for rollout in rollouts:
                    obs = rollout.obs["obs"][:rollout.num_steps][rollout.valid]
                    recorder.inserted.extend(_keys(obs))
                super().insert_data_slice(rollouts)

            def generate_batches(self, *args, **kwargs):
                for batch in super().generate_batches(*args, **kwargs):
                    if batch.num_new_samples:
                        recorder.drawn.extend(_keys(batch.obs["obs"]))
                    yield batch

        self.env_fn, self.storage = RecordedEnv, RecordedBuffer


def _keys(observations):
    return [tuple(int(number) for number in row[:3]) for row in np.asarray(observations.cpu())]


@pytest.fixture
def recorder():
    """Return a `Recorder`; pass its `env_fn` and `storage` to `make_scheme`."""
    return Recorder()


@pytest.fixture
def all_collectors():
    """Return a function that lists the pairs (GWorker, handle of its CWorker) of a scheme that runs on threads."""
    def find(scheme):
        root = scheme.update_worker
        grad_workers = [handle.native.worker for handle in root.remote_workers] or [root.local_worker]
        return [(worker, handle) for worker in grad_workers for handle in worker.remote_workers]
    return find
