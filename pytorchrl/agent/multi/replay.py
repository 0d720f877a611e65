"""Replay of an agent with several policies.

T = number of steps of a rollout, C = number of columns of a policy (see `agent.multi.data`), N = number of transitions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from pytorchrl.agent.data import ReplayBatch
from pytorchrl.agent.multi.data import MultiBatch, MultiRollout
from pytorchrl.agent.multi.storage import MultiAgentStorage
from pytorchrl.agent.storages.replay import ReplayBuffer
from pytorchrl.support.untyped import BatchOfKind, Forwarded, StateDict
from pytorchrl.support.work import Work

WORK = Work("storage")


@dataclass(slots=True)
class _Kept:
    """A rollout that still has steps in the replay buffer."""

    start: int
    """Number of env steps inserted before the rollout."""
    valid: dict[str, np.ndarray]
    """For each policy, whether each row is valid, (T, C) bool."""
    env_steps: int
    """Number of env steps of the rollout that are still resident."""


class MultiAgentReplay(MultiAgentStorage):
    """Replay of several policies.

    The storage of each policy has room for `size` transitions of each of the policy's agents, so that all storages keep
    the same env steps. An env step counts as resident while any storage contains a transition of it.

    In a batch, the id of a transition is i * P + p, where i is the transition's id in the storage of its policy, P is
    the number of policies, and p is the index of the policy.
    """

    def __init__(self, options: MultiAgentStorage.Options, **context: Forwarded) -> None:
        super().__init__(options, **context)
        self.has_priorities = any(  # type: ignore[misc] # depends on the policies
            storage.has_priorities for storage in self.storages.values())
        self._evicted = 0
        self._kept: deque[_Kept] = deque()

    def _own_size(self, num_agents: int) -> int:
        return int(self.options.size * num_agents)

    def insert_data_slice(  # type: ignore[override] # takes data of all policies
        self, rollouts: list[MultiRollout], sources: Sequence[Hashable] | None = None,
    ) -> None:
        """Append rollouts; they overwrite the oldest env steps if the replay is full."""
        names: Sequence[Hashable] = range(len(rollouts)) if sources is None else sources
        for rollout, source in zip(rollouts, names, strict=True):
            valid = {policy: part.valid.numpy().copy() for policy, part in rollout.parts.items()}
            self._kept.append(_Kept(self._inserted, valid, rollout.num_valid()))
            super().insert_data_slice([rollout], [source])
            self._evict()

    def insert_from(  # type: ignore[override] # takes data of all policies
        self, rollouts: Sequence[MultiRollout], sources: Sequence[Hashable],
    ) -> None:
        """Append rollouts of the collectors `sources`; see `insert_data_slice`."""
        self.insert_data_slice(list(rollouts), sources)

    def _evict(self) -> None:
        """Count the env steps that all storages have evicted, and forget rollouts that are completely evicted."""
        while self._kept:
            oldest = self._kept[0]
            left = self._count_resident(oldest)
            self._evicted += oldest.env_steps - left
            oldest.env_steps = left
            if left:
                return
            self._kept.popleft()

    def _count_resident(self, kept: _Kept) -> int:
        """Return the number of env steps of a rollout that are still in the storage of any policy."""
        is_resident = np.zeros(1, np.bool_)
        for policy, valid in kept.valid.items():
            num_steps, num_columns = valid.shape
            num_agents = len(self.options.agents[policy])
            # Rows are numbered column by column: all steps of the first column, then all of the second, and so on.
            rows = kept.start * num_agents + np.arange(num_columns) * num_steps + np.arange(num_steps)[:, None]
            there = valid & (rows >= self.storages[policy].num_rows_evicted)
            is_resident = is_resident | there.reshape(num_steps, -1, num_agents).any(-1)
        return int(np.count_nonzero(is_resident))

    @property
    def num_rows_added(self) -> int:
        """Number of env steps inserted so far."""
        return self._inserted

    def rows_of(self, ids: np.ndarray) -> np.ndarray:
        """Return, for each transition, the index of an env step of the same rollout, (N,) int64.

        Env steps are counted in the order of insertion. Any step of the rollout is sufficient, because the caller only
        looks up the version of the weights that collected the rollout.
        """
        num_agents = np.array([len(self.options.agents[policy]) for policy in self.storages])
        return ids // len(num_agents) // num_agents[ids % len(num_agents)]

    @override
    def to_learn_from(self, policy: str) -> _InEnvSteps:
        """Return the storage of a policy, with counters that count env steps."""
        return _InEnvSteps(self.storages[policy], self.counters)

    @override
    def _joined(self, parts: Mapping[str, BatchOfKind], samples: tuple[int, int], new: tuple[int, int],
                last: bool) -> MultiBatch:
        places = {policy: place for place, policy in enumerate(self.storages)}
        ids = torch.cat([part.ids * len(places) + places[policy] for policy, part in parts.items()])
        num_samples = max(part.num_samples for part in parts.values())
        return MultiBatch(dict(parts), tuple(places), num_samples, last=last, ids=ids)

    def after_gradients(self, batch: MultiBatch, info: Mapping[str, object]) -> None:
        """Update the priorities with the TD errors of a batch."""
        errors = info["errors"]
        assert isinstance(errors, Tensor)
        assert batch.ids is not None
        self.update_priorities(batch.ids.numpy(), errors.detach().cpu().numpy())

    def update_priorities(self, ids: np.ndarray, errors: np.ndarray) -> None:
        """Update the priorities of the transitions `ids`, for each policy separately.

        A policy is skipped if its storage has no priorities, or if any error of its transitions is not finite.

        Args:
            ids: (N,) int64, ids from batches.
            errors: (N,) float, TD errors.
        """
        places = ids % len(self.storages)
        for place, storage in enumerate(self.storages.values()):
            own = errors[places == place]
            if len(own) and np.isfinite(own).all() and storage.has_priorities:
                storage.update_priorities(ids[places == place] // len(self.storages), own)

    def reset(self) -> None:
        """Discard all transitions."""
        super().reset()
        self._evict()

    @property
    def num_items(self) -> int:
        """Number of transitions, over all policies, that can be drawn."""
        return sum(storage.num_items for storage in self.storages.values())

    @property
    def num_bytes(self) -> int:
        """Memory allocated for all transitions, in bytes."""
        return sum(storage.num_bytes for storage in self.storages.values())

    @property
    def mass(self) -> float:
        """Weight of this storage in the choice among replay shards: the sum of `mass` over the policies' storages."""
        return float(sum(storage.mass for storage in self.storages.values()))

    @property
    def counters(self) -> dict[str, int]:
        """Numbers of env steps (`inserted`, `evicted` and `resident`) and number of drawn transitions (`sampled`).

        If the policies draw different numbers of transitions for a batch, only the largest number is added to
        `sampled`. The key `<name>/<policy>` contains the counter `<name>` of a single policy's storage.
        """
        return {"inserted": self._inserted, "sampled": self._sampled, "evicted": self._evicted,
                "resident": self._inserted - self._evicted,
                **{f"{name}/{policy}": value for policy, storage in self.storages.items()
                   for name, value in storage.counters.items()}}

    def state_dict(self) -> StateDict:
        """Return the state of all storages, the fields of each `_Kept` rollout, and the count of evicted env steps."""
        kept = [(kept.start, {policy: torch.from_numpy(valid) for policy, valid in kept.valid.items()}, kept.env_steps)
                for kept in self._kept]
        return {**super().state_dict(), "kept": kept, "evicted": self._evicted}

    @override
    def load_state_dict(self, state: StateDict) -> None:
        super().load_state_dict(state)
        self._evicted = state["evicted"]
        self._kept = deque(_Kept(start, {policy: valid.numpy() for policy, valid in arrays.items()}, steps)
                           for start, arrays, steps in state["kept"])


class _InEnvSteps:
    """The replay storage of one policy, with the `counters` of `MultiAgentReplay`.

    The algorithm reads the counters to decide when to update. Options such as `update_every` count env steps, but the
    counters of the policy's own storage count transitions of single agents.
    """

    def __init__(self, storage: ReplayBuffer, counters: Mapping[str, int]) -> None:
        self._storage, self.counters = storage, counters

    @property
    def num_learned_from(self) -> int:
        """Value of the counter `inserted` when the algorithm last requested batches; see `Storage`."""
        return self._storage.num_learned_from

    @num_learned_from.setter
    def num_learned_from(self, number: int) -> None:
        self._storage.num_learned_from = number

    def generate_batches(
        self, num_mini_batch: int, mini_batch_size: int | None = None, num_epochs: int = 1,
    ) -> Iterator[ReplayBatch]:
        """Draw batches from the storage of the policy; see `ReplayBuffer`."""
        return self._storage.generate_batches(num_mini_batch, mini_batch_size, num_epochs)
