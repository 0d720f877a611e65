"""Load train batches from the sample queue onto the learner's device in a separate thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple

from pytorchrl.agent.data import Obs
from pytorchrl.scheme.gradients.staging import Staged, Staging
from pytorchrl.scheme.gradients.train_batch import TrainBatch
from pytorchrl.scheme.transport.encoder import Traffic
from pytorchrl.scheme.transport.messages import Rollout
from pytorchrl.scheme.transport.receive import receive


class _Loaded(NamedTuple):
    """Rollouts whose data have been decoded, and whose observations are being copied to the device."""

    sent: list[Rollout]
    received: list[Rollout]
    observations: Staged[list[Obs]]
    traffic: list[Traffic]


class Loader:
    """Decodes train batches and copies their observations to the device, while the learner uses an earlier train batch.

    Observations make up nearly all of a rollout's data. All other data stay in host memory, where the storage computes
    returns.

    Args:
        staging: Object that copies the observations.
        following: Function that returns the train batch that the learner will probably take next, or None while this
            batch does not exist.
        now: Function that returns the current time in seconds.
    """

    def __init__(self, staging: Staging, following: Callable[[], TrainBatch | None], now: Callable[[], float]) -> None:
        self._staging, self._following, self._now = staging, following, now
        self._thread = ThreadPoolExecutor(1, "LoaderThread")
        self._begun: tuple[TrainBatch, Future[_Loaded]] | None = None

    def load(self, batch: TrainBatch) -> Traffic:
        """Replace the rollouts of a new train batch by decoded rollouts whose observations are on the device.

        Returns:
            The counts of messages and bytes of the decoded rollouts.

        Raises:
            Exception: A rollout could not be decoded or copied.
        """
        began = self._now()
        future = self._begin(batch) if self._begun is None or self._begun[0] is not batch else self._begun[1]
        loaded, self._begun = future.result(), None
        observations = loaded.observations.get()
        self._staging.watch.count("load_wait", self._now() - began)
        on_device = {id(sent): replace(received, data=replace(received.data, obs=obs))
                     for sent, received, obs in zip(loaded.sent, loaded.received, observations, strict=True)}
        # The queue may have removed rollouts that became too old after loading began.
        batch.rollouts = [queued._replace(rollout=on_device[id(queued.rollout)]) for queued in batch.rollouts]
        return sum(loaded.traffic, Traffic())

    def look_ahead(self) -> None:
        """Start to load the following train batch, unless a train batch is being loaded or the queue is empty."""
        if self._begun is None and (following := self._following()) is not None:
            self._begun = following, self._begin(following)

    def _begin(self, batch: TrainBatch) -> Future[_Loaded]:
        return self._thread.submit(self._load, [queued.rollout for queued in batch.rollouts])

    def _load(self, sent: list[Rollout]) -> _Loaded:
        pairs = [receive(rollout, self._now) for rollout in sent]
        received = [rollout for rollout, _ in pairs]
        observations = self._staging.start([rollout.data.obs for rollout in received])
        return _Loaded(sent, received, observations, [traffic for _, traffic in pairs])

    def close(self) -> None:
        """End the thread; wait for the train batch that is being loaded, if there is one."""
        self._thread.shutdown()
