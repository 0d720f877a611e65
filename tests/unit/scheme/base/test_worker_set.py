"""Tests of the number, resources and seeds of the workers that a worker set starts."""

from __future__ import annotations

import itertools

from pytorchrl.runtime import CPU_RESOURCES, ThreadRuntime


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
