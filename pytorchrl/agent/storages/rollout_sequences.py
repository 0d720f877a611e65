"""Replay of whole rollouts, for actors with memory. T = steps, E = environments, B = sequences."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
from typing_extensions import override

from pytorchrl.agent.data import Arrays, DataKind, RolloutData, SequenceBatch
from pytorchrl.agent.options import option
from pytorchrl.agent.storages.replay import ReplayBuffer
from pytorchrl.agent.storages.ring import Ring
from pytorchrl.agent.storages.sequence_batch import Walk, take_sequences
from pytorchrl.support.untyped import Forwarded, StateDict


class _Kept(NamedTuple):
    """A rollout that is stored in the ring buffer; the rows of each environment are consecutive."""

    first: int
    """Id of the first row of the rollout."""
    num_steps: int
    """T, steps per environment."""
    num_envs: int
    """E, the number of environments."""
    states: Arrays
    """The memory state of each network before the first row of each environment, (E, H) float32."""

    @property
    def rows(self) -> np.ndarray:
        """Ids of the rows of the rollout, (T, E) int64."""
        return self.first + np.arange(self.num_envs) * self.num_steps + np.arange(self.num_steps)[:, None]


class RolloutSequenceBuffer(ReplayBuffer):
    """Replay of the newest whole rollouts, for actors with memory. Rollouts are drawn uniformly, with replacement.

    In a drawn rollout, the T steps of each environment form one sequence of a `SequenceBatch`. The memory begins with
    the state that was stored when the rollout was collected, and is reset at the start of each episode. There is no
    burn-in: the loss covers all steps. The true last observation of an episode has a separate row, which the loss does
    not cover. Near the end of the rollout, the target of a step sums fewer than `n_step` rewards, and bootstraps from
    the rollout's last observation.

    An old rollout is always evicted as a whole, even if a new rollout needs only a part of its space. A rollout without
    env steps is not stored.
    """

    provides = DataKind.SEQUENCES
    draws_rollouts: ClassVar[bool] = True

    @dataclass(frozen=True, kw_only=True)
    class Options(ReplayBuffer.Options):
        """Options of `RolloutSequenceBuffer`."""

        n_step: int = option(
            5, help="Largest number of rewards summed before the bootstrap; sums end with the rollout.", low=1)

    options: Options

    def __init__(self, options: Options, **context: Forwarded) -> None:
        """Build the storage; see `ReplayBuffer` for the arguments."""
        super().__init__(options, **context)
        self.ring = Ring(options.size, options.stacked_frames, in_sequences=True)
        self._kept: deque[_Kept] = deque()

    def _insert(self, rollout: RolloutData, source: Hashable) -> None:
        if not rollout.num_valid():
            return
        ring = self.ring
        while self._kept and rollout.size <= ring.capacity < ring.total - ring.first + rollout.size:
            gone = self._kept.popleft()
            ring.evict(gone.num_steps * gone.num_envs)
        kept = _Kept(ring.total, rollout.num_steps, rollout.num_envs, {
            name: states[0].numpy().copy() for name, states in rollout.rhs.items()})
        # Each rollout is inserted under its own source. Consecutive rollouts of the same source would share an
        # observation, and could not be evicted independently.
        ring.insert(rollout, source=kept.first)
        ring.make_drawable(self._place(kept))  # one row per rollout, so `num_items` and `mass` count rollouts
        self._kept.append(kept)

    def _place(self, kept: _Kept) -> np.ndarray:
        """Return the index, in the ring buffer, of the first row of the rollout `kept`; shape (1,)."""
        return np.array([kept.first]) % self.ring.capacity

    def sample(self, batch_size: int) -> SequenceBatch | None:  # type: ignore[override] # batches contain sequences
        """Draw rollouts until they contain at least `batch_size` sequences; return None if the storage is empty."""
        if not self._kept:
            return None
        drawn: list[_Kept] = []
        num_sequences = 0
        while num_sequences < batch_size:
            drawn.append(self._kept[int(self._integers(0, len(self._kept), 1)[0])])
            num_sequences += drawn[-1].num_envs
        states = {name: np.concatenate([kept.states[name] for kept in drawn]) for name in drawn[0].states}
        ids = np.concatenate([kept.rows[0] for kept in drawn])
        batch = take_sequences(
            self.ring, self._walk(drawn), states, np.ones(len(ids)), ids, self.algorithm.gamma, self._tensor)
        self._num_sampled += batch.num_samples
        return batch

    def _walk(self, drawn: list[_Kept]) -> Walk:
        """Return the rows of the sequences in the rollouts `drawn`, in order of time.

        Each step has one row. At the end of an episode, the last observation has an additional row.
        """
        column, capacity, n_step = self.ring.columns, self.ring.capacity, self.options.n_step
        found = []
        for kept in drawn:
            rows = kept.rows % capacity
            link = column["link"][rows]
            # If a step ends an episode, the next step begins with the first observation of a new episode. The last
            # observation of the old episode then needs an additional row, which shifts the rows of all later steps.
            own = np.repeat(np.arange(kept.num_steps)[:, None], kept.num_envs, 1)
            own[1:] += np.cumsum(link[:-1] != rows[1:], 0)
            found.append((rows, link, own))
        length = max(int(own[-1].max()) for *_, own in found) + 1
        places = np.zeros((length + n_step, sum(kept.num_envs for kept in drawn)), np.int64)
        is_step = np.zeros(places.shape, np.bool_)
        begin = 0
        for rows, link, own in found:
            columns = np.arange(begin, begin + rows.shape[1])
            begin += rows.shape[1]
            places[:, columns] = link[-1]
            places[own + 1, columns] = link
            places[own, columns] = rows
            is_step[own, columns] = column["valid"][rows]
        return Walk(places, is_step, 0, n_step)

    @override
    def reset(self) -> None:
        super().reset()
        self._kept.clear()

    @property
    def num_bytes(self) -> int:
        """Memory allocated for transitions and memory states, in bytes."""
        return super().num_bytes + sum(states.nbytes for kept in self._kept for states in kept.states.values())

    def _contents(self) -> StateDict:
        return {**super()._contents(), "kept": [kept._asdict() for kept in self._kept]}

    def _load_contents(self, contents: StateDict) -> None:
        super()._load_contents(contents)
        self._kept = deque(_Kept(**kept) for kept in contents["kept"])
