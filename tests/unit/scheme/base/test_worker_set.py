"""Tests of the number, resources and seeds of the workers that a worker set starts."""

from __future__ import annotations

import itertools

import subprocess
import sys
import textwrap

import pytest

from pytorchrl import ASYNC, DQN, PARALLEL, PPO, GAEBuffer, OnPolicyActor, QActor, ReplayBuffer, Scheme, VecEnv
from pytorchrl.envs.testing import CountingEnv
from pytorchrl.runtime import CPU_RESOURCES, ThreadRuntime
from pytorchrl.scheme import CWorkerSet, GWorkerSet, RWorkerSet
from pytorchrl.scheme.gradients.g_worker import GWorker
from pytorchrl.scheme.updates.u_worker import UWorker

ENVS = VecEnv.create_factory(CountingEnv, vec_env_size=2)
SPACES = (ENVS.observation_space, ENVS.action_space)
AGENT = (PPO.create_factory(), OnPolicyActor.create_factory(*SPACES, hidden_sizes=(8,)), GAEBuffer.create_factory(8),
         ENVS)
Q_AGENT = (DQN.create_factory(), QActor.create_factory(*SPACES, hidden_sizes=(8,)), ReplayBuffer.create_factory(64))


def test_numbers_of_workers_and_executions(make_scheme):
    for num_col, num_grad in itertools.product((1, 3), (1, 2)):
        scheme = make_scheme(num_col_workers=num_col, num_grad_workers=num_grad)
        root = scheme.start()
        assert len(root.remote_workers) == (num_grad if num_grad > 1 else 0)
        workers = [handle.native.worker for handle in root.remote_workers] or [root.local_worker]
        assert [len(worker.remote_workers) for worker in workers] == [num_col if num_col > 1 else 0] * num_grad
        assert scheme.settings["col_execution"] == ("Parallel" if num_col > 1 else "Central")
        assert scheme.settings["grad_execution"] == ("Parallel" if num_grad > 1 else "Central")
        if num_grad > 1:
            assert root.local_worker.local_worker.envs is None  # this worker only provides parameters


def test_resources_reach_the_workers(make_scheme, monkeypatch):
    asked = {}
    start_actor = ThreadRuntime.start_actor
    monkeypatch.setattr(ThreadRuntime, "start_actor", lambda self, cls, params, *, name, resources: (
        asked.__setitem__(name, dict(resources)), start_actor(self, cls, params, name=name, resources=resources))[1])
    make_scheme(num_col_workers=2, num_grad_workers=2, col_worker_resources={"num_cpus": 0.25},
                grad_worker_resources={"num_cpus": 0.5, "memory": 1000}).start()
    assert asked["GWorker 1"] == asked["GWorker 2"] == {"num_cpus": 0.5, "memory": 1000}
    collectors = [asked[f"GWorker {grad}/CWorker {col}"] for grad in (1, 2) for col in (1, 2)]
    assert collectors == [{"num_cpus": 0.25}] * 4
    asked.clear()
    make_scheme(num_col_workers=2).start()
    assert asked["GWorker 0/CWorker 1"] == dict(CPU_RESOURCES)


def test_workers_have_different_seeds(make_scheme, recorder):
    """Check that all environments of a tree have different seeds."""
    scheme = make_scheme(recorder.env_fn, storage=recorder.storage, num_envs=2, num_col_workers=2, num_grad_workers=2)
    scheme.step()
    assert len({seed for seed, *_ in recorder.inserted}) == 2 * 2 * 2


def _collectors(number):
    return CWorkerSet.create_factory(number, *AGENT)


def test_the_number_of_workers_is_the_one_that_was_given():
    """A local worker counts if it does the work of its set."""
    sets = [(number, GWorkerSet.create_factory(number, _collectors(1))()) for number in (1, 2)]
    sets += [(number, GWorkerSet(number, 0, None, "Central", "synchronous", _collectors(1), 1.0, {}))
             for number in (1, 2)]
    sets += [(number, RWorkerSet.create_factory(number, *Q_AGENT)()) for number in (1, 2)]
    sets += [(1, CWorkerSet.create_factory(1, *AGENT)())]
    for col_execution, col_communication in (("Central", ASYNC), (PARALLEL, ASYNC), (PARALLEL, "synchronous")):
        number = 3 if col_execution == PARALLEL else 1
        workers = GWorkerSet.create_factory(
            1, _collectors(number), col_execution=col_execution, col_communication=col_communication)()
        sets += [(number, workers.local_worker().col_workers), (1, workers)]
    for number, workers in sets:
        assert workers.num_workers == number, workers
    stored = GWorkerSet.create_factory(2, _collectors(1))()  # its local worker only stores the parameters
    assert stored.local_worker().col_workers.num_workers == 0
    for _, workers in [*sets, (2, stored)]:
        workers.stop()


def test_sets_that_are_built_by_hand_are_stopped_by_a_with_block():
    """The fixture `no_thread_left` checks that their threads end."""
    with GWorkerSet.create_factory(2, _collectors(2), col_execution=PARALLEL, col_communication=ASYNC)(
            runtime=ThreadRuntime()) as workers:
        workers.wait_ready()
        for handle in workers.remote_workers():
            workers._runtime.get(handle.submit(GWorker.step), 30.0)
    ledgers = workers.stop()
    assert [ledger.collected > 0 for ledger in ledgers] == [False, True, True]
    assert all(ledger.collected == sum(ledger.dropped.values()) + ledger.sent for ledger in ledgers)
    assert workers.stop() == ledgers
    with CWorkerSet.create_factory(2, *AGENT)() as collectors:
        assert collectors.stop() == collectors.stop() == (0, 0)
    with RWorkerSet.create_factory(2, *Q_AGENT)() as shards:
        shards.wait_ready()
    with UWorker(GWorkerSet.create_factory(2, _collectors(1)), grad_execution=PARALLEL) as root:
        root.step()
    assert root.stop().consumed_unique > 0
    with Scheme(*AGENT, seed=1) as scheme:
        scheme.step()
    assert scheme.ledger()["consumed_unique"] > 0
    worker = GWorker(0, _collectors(1), ASYNC)
    worker.step()
    with pytest.raises(ZeroDivisionError), worker:
        1 // 0  # noqa: B018 - raises the error
    assert worker.collector.stopped


def test_a_program_ends_well_although_its_workers_run():
    """Python must not end the threads within computations of PyTorch, because this would abort the process."""
    done = subprocess.run([sys.executable, "-W", "error", "-c", textwrap.dedent("""
        from pytorchrl import ASYNC, PARALLEL, Scheme
        from pytorchrl.scheme import GWorkerSet
        from pytorchrl.scheme.gradients.g_worker import GWorker
        from pytorchrl.scheme.updates.u_worker import UWorker
        from tests.unit.scheme.base.test_worker_set import AGENT, _collectors

        learner = Scheme(*AGENT, num_col_workers=2, col_communication=ASYNC, grad_communication=ASYNC,
                         runtime="threads", seed=1)
        learner.step()
        root = UWorker(GWorkerSet.create_factory(1, _collectors(2), col_execution=PARALLEL, col_communication=ASYNC))
        root.step()
        worker = GWorker(0, _collectors(1), ASYNC)
        worker.step()
        workers = [GWorkerSet.create_factory(2, _collectors(2), col_execution=PARALLEL)() for _ in range(2)]
        print("end")
    """)], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")
