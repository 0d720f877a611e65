"""Build the factories of the tree of workers of an agent."""

from __future__ import annotations

from pytorchrl.agent.factories import Agent
from pytorchrl.scheme.collection.c_worker_set import CWorkerSetFactory
from pytorchrl.scheme.gradients.g_worker_set import GWorkerSet, GWorkerSetFactory
from pytorchrl.scheme.options.collection import Collection, ReplayCollection
from pytorchrl.scheme.replay.r_worker_set import RWorkerSetFactory


def workers_of(agent: Agent, gradients: GWorkerSet.Options, collection: Collection) -> GWorkerSetFactory:
    """Return the factory of an agent's gradient workers and of the workers below them."""
    shards = None
    if isinstance(collection, ReplayCollection):
        shards = RWorkerSetFactory(collection, agent.algo_factory, agent.actor_factory, agent.storage_factory)
    collectors = CWorkerSetFactory(
        collection, agent.algo_factory, agent.actor_factory, agent.storage_factory, agent.train_envs_factory)
    return GWorkerSetFactory(gradients, collection, collectors, shards)


def evaluator_of(agent: Agent, seed: int, num_threads: int | None) -> dict[str, object]:
    """Return the arguments of an agent's `Evaluator`, which uses `num_threads` PyTorch threads."""
    parts = {name: part for name, part in agent.as_dict().items()
             if name in ("algo_factory", "actor_factory", "test_envs_factory")}
    return {"index_worker": 1, **parts, "seed": seed, "num_threads": num_threads}
