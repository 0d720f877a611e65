"""Rollouts with numbered steps, and shards that store these rollouts."""

from __future__ import annotations

import numpy as np

from pytorchrl.agent.data import RolloutData
from pytorchrl.agent.synthetic import synthetic_agent
from pytorchrl.runtime.simulated import SimulatedRuntime
from pytorchrl.scheme.replay.r_worker_set import RWorkerSet
from pytorchrl.scheme.transport.messages import Rollout, RolloutHeader

SIZE = 10
"""Number of steps of a rollout."""


def rollout(number, worker=1):
    """Return rollout `number`, whose rewards are the numbers of its `SIZE` steps."""
    steps = (number * SIZE + np.arange(SIZE, dtype=np.int64)).reshape(SIZE, 1)
    no = np.zeros((SIZE, 1), bool)
    data = RolloutData(obs={}, done=no, rhs={}, mask=None, action=np.zeros(0), reward=steps, terminated=no,
                       truncated=no, valid=~no, final_index=np.zeros((0, 2), np.int64), final_obs={})
    return Rollout(data, RolloutHeader(num_env_steps=SIZE, size=SIZE, collected_steps=SIZE, weights_version=0,
                                       worker=worker, sequence=number))


def start_shards(number, capacity=1000, costs=None):
    """Start a set of shards in a simulated runtime, and return (runtime, shards)."""
    runtime = SimulatedRuntime(SimulatedRuntime.Options(schedule_seed=0, costs={"message": 0.0} | (costs or {})))
    algo, actor, storage, _ = synthetic_agent(SIZE, capacity=capacity)
    workers = RWorkerSet.create_factory(number, algo, actor, storage)(0, runtime=runtime)
    workers.wait_ready()
    return runtime, workers
