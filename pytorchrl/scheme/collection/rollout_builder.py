"""Turn the steps in a storage into rollouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from pytorchrl.agent.data import Episode
from pytorchrl.agent.env import check_finite
from pytorchrl.scheme.timing import Stopwatch
from pytorchrl.scheme.transport.encoder import NOT_SENT, Encoder, Traffic
from pytorchrl.scheme.transport.messages import Moments, Rollout
from pytorchrl.untyped import UserPart
from pytorchrl.worker_names import collection_worker

if TYPE_CHECKING:
    from pytorchrl.agent.algorithms.base import Algorithm


class RolloutBuilder:
    """Builds the rollouts of one vector of environments from the steps in its storage.

    Args:
        algo: The algorithm that chose the actions.
        storage: The storage of the steps.
        place: Indices of the gradient worker and of the collection worker, and the incarnation of the latter.
        now: The clock.
        encoder: Encoder of the rollouts, which receives copies of the data; None: rollouts contain the storage's own
            tensors.
        finds_errors: Whether rollouts contain TD errors, for replay.

    Attributes:
        storage: As given.
        incarnation: Incarnation of the collection worker.
        sequence: Number of rollouts started so far.
        collected_steps: Number of env steps in all rollouts so far.
        delivered_steps: Number of env steps in the rollouts that `build` has returned.
    """

    def __init__(self, algo: Algorithm, storage: UserPart, place: tuple[int, int, int], now: Callable[[], float], *,
                 encoder: Encoder | None, finds_errors: bool) -> None:
        self.storage, self._algo, self._now, self._encoder = storage, algo, now, encoder
        self._index_parent, self._index_worker, self.incarnation = place
        self._finds_errors = finds_errors
        self.sequence = self.collected_steps = self.delivered_steps = 0
        self._running = dict[str, np.ndarray]()  # discounted returns of the environments, for the reward normalizers

    def restart(self) -> None:
        """Discard the discounted returns of the current episodes, because the environments have been replaced."""
        self._running = {}

    def count_unfinished(self) -> int:
        """Add the env steps in the storage to `collected_steps`, because no rollout will contain them.

        Returns:
            The number of these env steps.
        """
        num_steps = int(self.storage.get_all_buffer_data(copy=False).num_valid()) if self.storage.num_steps else 0
        self.collected_steps += num_steps
        return num_steps

    def build(self, version: int, episodes: Sequence[Episode], watch: Stopwatch, *, preempted: bool,
              elapsed_s: Callable[[], float] | None, traffic: Mapping[str, Traffic], envs_restarted: int) -> Rollout:
        """Return a rollout of the steps in the storage, which are counted and taken out of the storage.

        Args:
            version: Version of the oldest weights with which the steps were collected.
            episodes: Episodes that ended in these steps.
            watch: Stopwatch that timed the collection of these steps; this method adds its own times.
            preempted: Whether collection ended before the storage was full.
            elapsed_s: Function that returns the seconds since the rollout was started. The time that `watch` has not
                recorded counts as time for storing. None: `watch` has recorded all times.
            traffic: Traffic of the messages that the worker has received since its previous rollout.
            envs_restarted: Number of environments that this incarnation of the worker has replaced so far.

        Raises:
            NonFiniteDataError: An observation or a reward is not finite.
        """
        data = self.storage.get_all_buffer_data(copy=self._encoder is not None)
        num_env_steps, num_steps, size = data.num_valid(), data.num_steps, data.size
        self.collected_steps += num_env_steps
        moments: dict[str, Moments] = {}
        if num_env_steps:
            where = collection_worker(self._index_parent, self._index_worker)
            for policy, part in data.parts.items():
                what = f"{where}, policy {policy!r}" if policy else where
                check_finite({**part.obs, "reward": part.reward}, what)
                if part.final_index.shape[0]:
                    check_finite(part.final_obs, f"{what}, last observations of episodes", env_axis=0)
            with torch.no_grad():
                with watch.part("inference"):
                    self._algo.finish_rollout(data)
                    if self._finds_errors:
                        self.storage.add_errors(data)
                moments = cast("dict[str, Moments]", self._algo.moments_of(data, self._running))
        agent_steps = {policy: part.num_valid() for policy, part in data.parts.items() if policy}
        sent = NOT_SENT
        if self._encoder is not None:
            with watch.part("encode"):
                data, sent = self._encoder.pack(data.to_numpy().map)
        self.delivered_steps += num_env_steps
        if elapsed_s is not None:
            watch.add("store", max(0.0, elapsed_s() - sum(watch.seconds.values())))
        return Rollout(
            data=data, num_env_steps=num_env_steps, collected_steps=self.collected_steps, weights_version=version,
            worker=self._index_worker, sequence=self.sequence, incarnation=self.incarnation, episodes=tuple(episodes),
            moments=moments, agent_steps=agent_steps, timings=watch.seconds,
            num_steps=num_steps, size=size, preempted=preempted, sent=sent, traffic=traffic,
            envs_restarted=envs_restarted)
