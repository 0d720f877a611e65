"""Check sets of replay shards: where shards run, how they divide the storage's size, and which options are rejected."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pytorchrl.agent.synthetic import synthetic_agent
from pytorchrl.errors import ConfigError
from pytorchrl.runtime.simulated import SimulatedRuntime
from pytorchrl.scheme.replay.r_worker import RWorker
from pytorchrl.scheme.options.replay import FREE
from pytorchrl.scheme.replay.r_worker_set import RWorkerSet
from tests.unit.scheme.replay.numbered import SIZE, rollout, start_shards


@pytest.fixture
def start():
    """Return a function that starts shards."""
    runtimes = []

    def start_(number, capacity):
        runtime, workers = start_shards(number, capacity)
        runtimes.append(runtime)
        return runtime, workers
    yield start_
    for runtime in runtimes:
        runtime.close()


@pytest.mark.parametrize(("number", "capacity"), [(1, 100), (2, 100), (3, 100), (4, 102)])
def test_shards_share_the_size(start, number, capacity):
    runtime, workers = start(number, capacity)
    sizes = []
    for handle in workers.remote_workers():
        runtime.get(handle.submit(RWorker.add, rollout(0), 0), 5.0)
        sizes.append(handle.native.worker._storage.options.size)
    assert sum(sizes) == capacity
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(("number", "kind"), [(1, torch.Tensor), (2, np.ndarray)])
def test_batches_of_remote_shards_are_arrays(start, number, kind):
    """Check that remote shards return arrays; a single shard runs in the learner's process, and returns tensors."""
    _, workers = start(number, 100)
    handle = workers.remote_workers()[0]
    workers.runtime.get(handle.submit(RWorker.add, rollout(0), 0), 5.0)
    sample = workers.runtime.get(handle.submit(RWorker.sample, 4, 1.0, {}), 5.0)
    assert type(sample.batch.action) is kind
    assert set(np.asarray(sample.batch.action).tolist()) <= set(range(SIZE))


def test_a_shard_without_rollouts_has_no_storage(start):
    runtime, workers = start(2, 100)
    handle = workers.remote_workers()[0]
    sample = runtime.get(handle.submit(RWorker.sample, 4, 1.0, {}), 5.0)
    assert sample.batch is None
    assert (sample.state.resident, sample.state.mass) == (0, 0.0)
    assert runtime.get(handle.submit(RWorker.state), 5.0) is None


def test_remote_shards_request_their_resources():
    asked = {}

    class Noting(SimulatedRuntime):
        def start_actor(self, cls, params, *, name, resources):
            asked[name] = (dict(resources), params["context"].num_threads)
            return super().start_actor(cls, params, name=name, resources=resources)
    algo, actor, storage, _ = synthetic_agent(SIZE, capacity=100)
    runtime = Noting()
    try:
        factory = RWorkerSet.create_factory(2, algo, actor, storage, replay_worker_resources={"num_cpus": 0.5})
        factory(3, runtime=runtime)
    finally:
        runtime.close()
    assert asked == {f"GWorker 3/RWorker {index}": ({"num_cpus": 0.5}, 1) for index in (1, 2)}


@pytest.mark.parametrize(("options", "text"), [
    ({"num_replay_workers": 1, "replay_worker_resources": {"num_cpus": 1}}, "replay_worker_resources is for remote"),
    ({"replay_worker_resources": {"num_cpu": 1}}, "did you mean 'num_cpus'"),
    ({"min_replay_ratio": 2.0, "max_replay_ratio": 1.0}, "min_replay_ratio 2.0 exceeds max_replay_ratio 1.0"),
    ({"routing": "other"}, "routing must be one of"), ({"add_in_flight": 0}, "add_in_flight must be")])
def test_invalid_options_are_refused(options, text):
    with pytest.raises(ConfigError, match=text):
        RWorkerSet.Options(**{"num_replay_workers": 2} | options)


def test_equal_ratios_and_default_resources_are_allowed():
    RWorkerSet.Options(min_replay_ratio=2.0, max_replay_ratio=2.0)
    RWorkerSet.Options(num_replay_workers=1, replay_worker_resources=dict(FREE))
