"""Learn from a data set instead of collecting steps: check the agent, and insert the data set into its storage."""

from __future__ import annotations

from collections.abc import Iterator

from typing_extensions import override

from pytorchrl.agent.data import Batch, DataKind
from pytorchrl.agent.dataset import read_dataset, rollout_of
from pytorchrl.agent.env import EnvFactory
from pytorchrl.agent.factories import Agent
from pytorchrl.agent.fit import algorithms_for, learned_kind
from pytorchrl.errors import CheckpointError, Problem, StoppedError
from pytorchrl.scheme.collection.c_worker import CWorker
from pytorchrl.scheme.collection.collector_thread import CollectorThread
from pytorchrl.scheme.gradients.train_batch import QueuedRollout, TrainBatch, TrainBatchSource
from pytorchrl.scheme.options.base import options_of
from pytorchrl.scheme.options.collection import Collection, DatasetOptions
from pytorchrl.scheme.transport.messages import Rollout, RolloutHeader
from pytorchrl.support.problems import error_of, problems_in

# Batches that are drawn before the learner asks for a train batch again; no option, because it changes nothing.
_BATCHES = 100
# Options of replay algorithms that relate updates to collected steps.
_PACE = ("start_steps", "update_every", "num_updates")


def dataset_of(collection: Collection) -> str | None:
    """Return the path or the id of the data set that replaces collection; None if steps are collected."""
    found = options_of(DatasetOptions, collection).dataset
    return None if found is None else str(found)


class DatasetSource(TrainBatchSource):
    """The data set in place of collection: the first train batch contains all of its steps, later ones are empty.

    The ledger counts no env steps, because nothing is collected. The storage must be a replay buffer, which keeps the
    steps. A resumed run has them in its checkpoint.

    Args:
        dataset: Path or id of the data set.
        envs: Factory of environments with the spaces of the data set.
        worker: The local collection worker, with the algorithm, the actor and the storage.
        collector: The collector thread, which never starts; it knows whether the worker stops.
    """

    def __init__(self, dataset: str, envs: EnvFactory, worker: CWorker, collector: CollectorThread) -> None:
        self._dataset, self._envs, self._worker, self._collector = dataset, envs, worker, collector
        self._num_batches = _BATCHES

    @override
    def take(self) -> TrainBatch:
        """Return a train batch.

        Raises:
            StoppedError: The gradient worker was stopped.
            CheckpointError, ConfigError: The data set has changed since the scheme was built, and cannot be used now.
        """
        worker = self._worker
        if self._collector.stopped:
            raise StoppedError(f"GWorker {self._collector.index_worker} has been stopped")
        if worker.storage.counters["inserted"]:
            self._num_batches = _BATCHES
            return TrainBatch([], uses=1)
        self._num_batches = 1  # moments for normalizers are merged after the last batch of a train batch
        rollout = rollout_of(read_dataset(self._dataset), self._envs, worker.actor.from_env)
        header = RolloutHeader(
            num_env_steps=0, size=rollout.size, collected_steps=0, weights_version=worker.version, worker=0, sequence=1,
            moments=worker.algo.moments_of(rollout, {}))
        return TrainBatch([QueuedRollout(Rollout(rollout, header), worker.version)], uses=1)

    @override
    def own_batches(self) -> Iterator[Batch]:
        """Return batches of random transitions."""
        drawn: Iterator[Batch] = self._worker.storage.generate_batches(
            self._num_batches, self._worker.algo.mini_batch_size)
        return drawn

    @override
    def take_levels(self) -> tuple[int, ...]:
        """Return no numbers, because no train batch waits in a queue."""
        return ()


def dataset_problems(agent: Agent, collection: Collection) -> Iterator[Problem]:
    """Yield the contradictions between an agent and the data set that replaces collection, which is read and checked.

    If there is no data set, refuse an algorithm that needs one.
    """
    dataset, algorithm = dataset_of(collection), agent.algo_factory
    if dataset is None:
        if getattr(algorithm.cls, "needs_dataset", False):
            yield Problem(f"{algorithm.cls.__name__} learns from a data set, but there is none",
                          "give dataset=..., for example a file of `pytorchrl dataset`", ("dataset",))
        return
    if hasattr(algorithm.options, "policies"):
        yield Problem("a data set contains the steps of a single agent, but there are several policies",
                      "leave dataset out", ("dataset", "policies"))
        return
    if (kind := learned_kind(algorithm, agent.actor_factory)) is not DataKind.TRANSITIONS:
        fits = ("leave recurrent_net out" if learned_kind(algorithm) is DataKind.TRANSITIONS
                else f"use {algorithms_for(DataKind.TRANSITIONS)}")
        yield Problem(f"{algorithm.cls.__name__} learns from {kind.value}, but a dataset provides "
                      f"{DataKind.TRANSITIONS.value}", fits, ("dataset",))
        return
    changed = [name for name in _PACE if name in algorithm.options.changed()]
    if changed:
        yield Problem(f"{', '.join(changed)} would have no effect, because nothing is collected if there is a dataset",
                      f"leave out {', '.join(changed)}, or dataset", ("dataset", *changed))
    yield from problems_in(_check_data, dataset, agent)


def _check_data(dataset: str, agent: Agent) -> None:
    """Raise `ConfigError` if a data set cannot be read, does not fit the environments, or is too large for replay."""
    try:
        data = read_dataset(dataset)
    except CheckpointError as error:
        raise error_of([Problem(str(error), "write data sets with `pytorchrl dataset`", ("dataset",))]) from error
    rollout_of(data, agent.train_envs_factory, agent.actor_factory(device="cpu", seed=0).from_env)
    if (size := agent.storage_factory.options.size) < (number := len(data.rewards)):
        raise error_of([Problem(f"size {size} is less than the {number:,} steps of the dataset",
                                f"raise size to {number} or more", ("dataset", "size"))])
