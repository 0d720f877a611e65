"""Replay of whole rollouts, for on-policy algorithms that correct for the age of their data."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from pytorchrl.agent.data import RolloutData
from pytorchrl.agent.multi.data import MultiRollout
from pytorchrl.agent.options import Factory, build_options, option
from pytorchrl.agent.options import Options as BaseOptions
from pytorchrl.agent.seeding import Stream, derive_seed, torch_generator
from pytorchrl.errors import ConfigError
from pytorchrl.scheme.transport import codecs
from pytorchrl.scheme.transport.messages import Rollout, RolloutHeader
from pytorchrl.support.untyped import StateDict

AnyRollout: TypeAlias = RolloutData | MultiRollout
"""A rollout of one policy or of several policies."""

@dataclass(frozen=True, slots=True)
class RolloutBatch:
    """Rollouts sampled from replay; the learner divides these rollouts into its own batches."""

    rollouts: list[AnyRollout]
    """Rollouts as the collection workers sent them, with the log-probabilities of the policy that acted."""
    ids: Tensor
    """(K,) int64, the number of env steps that were added before each rollout."""
    num_samples: int
    """Number of env steps in the rollouts."""
    last: bool = False
    """Whether no further batch will be sampled before new data arrive."""

    def messages(self) -> list[Rollout]:
        """Return each rollout as a message that a gradient worker can process."""
        return [Rollout(data, RolloutHeader(num_env_steps=data.num_valid(), size=data.size, collected_steps=0,
                                            weights_version=0, worker=place, sequence=0))
                for place, data in enumerate(self.rollouts)]


@dataclass(slots=True)
class _Kept:
    """A rollout in replay."""

    id: int
    """Number of env steps that were added before the rollout."""
    data: AnyRollout
    num_env_steps: int
    num_hits: int = 0
    """Number of times that the rollout was sampled."""


class RolloutReplay:
    """A replay buffer of the newest whole rollouts, which are sampled uniformly with replacement.

    Shards use this storage if the agent's own storage, such as `VTraceBuffer`, is not a replay buffer. Collection
    workers and the learner still use the agent's own storage: the learner uses that storage to make batches from the
    sampled rollouts. `RolloutReplay` needs neither the actor nor the algorithm.

    Args:
        options: Checked options.
        seed: Seed of sampling.
        context: Other arguments that storages receive; they are ignored.

    Attributes:
        parameters: An empty mapping, because this storage has no parameters.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(BaseOptions):
        """Options of `RolloutReplay`."""

        size: int = option(help="Capacity in env steps, over all environments of all collection workers.", low=1)

    @classmethod
    def create_factory(cls, size: int) -> Factory[RolloutReplay]:
        """Return a factory of this storage; raise `ConfigError` if `size` is below 1."""
        return Factory(cls, build_options(cls, {"size": size}))

    def __init__(self, options: Options, *, seed: int, **context: object) -> None:
        self.options = options
        self.generator = torch_generator(derive_seed(seed, Stream.BATCHES))
        self.parameters: Mapping[str, float] = {}
        self._kept: deque[_Kept] = deque()
        self._num_bytes = 0
        self._counters = dict.fromkeys(("inserted", "evicted", "evicted_unused", "sampled"), 0)

    def insert_data_slice(self, rollouts: list[AnyRollout], sources: Sequence[Hashable] | None = None) -> None:
        """Copy rollouts into replay, and evict the oldest whole rollouts to free space.

        Args:
            rollouts: Rollouts of any length.
            sources: Not used.

        Raises:
            ConfigError: A rollout has more env steps than `size`.
        """
        for rollout in rollouts:
            num_env_steps = rollout.num_valid()
            if num_env_steps > self.options.size:
                raise ConfigError(f"a rollout of {num_env_steps} env steps does not fit into replay of size "
                                  f"{self.options.size}; increase size or collect shorter rollouts")
            while self._num_resident + num_env_steps > self.options.size:
                self._evict()
            if num_env_steps:
                self._keep(_Kept(self.num_rows_added, rollout.map(Tensor.clone), num_env_steps))
                self._counters["inserted"] += num_env_steps

    def _keep(self, kept: _Kept) -> None:
        self._kept.append(kept)
        self._num_bytes += codecs.num_bytes(kept.data)

    def _evict(self) -> None:
        gone = self._kept.popleft()
        self._num_bytes -= codecs.num_bytes(gone.data)
        self._counters["evicted"] += gone.num_env_steps
        self._counters["evicted_unused"] += 0 if gone.num_hits else gone.num_env_steps

    def generate_batches(self, num_mini_batch: int, mini_batch_size: int,
                         num_epochs: int = 1) -> Iterator[RolloutBatch]:
        """Yield `num_mini_batch` * `num_epochs` batches, or no batch if replay is empty.

        Args:
            num_mini_batch: Number of batches per epoch.
            mini_batch_size: Rollouts are sampled until the sum of their `RolloutData.size` is at least this number.
            num_epochs: Number of epochs.
        """
        for left in reversed(range(num_mini_batch * num_epochs if self._kept else 0)):
            drawn: list[_Kept] = []
            num_env_steps = size = 0
            while size < mini_batch_size:
                kept = self._kept[int(torch.randint(len(self._kept), (), generator=self.generator))]
                kept.num_hits += 1
                num_env_steps += kept.num_env_steps
                size += kept.data.size
                drawn.append(kept)
            self._counters["sampled"] += num_env_steps
            yield RolloutBatch([kept.data.map(Tensor.clone) for kept in drawn],
                               torch.tensor([kept.id for kept in drawn]),
                               num_env_steps, last=not left)

    # Contents

    @property
    def num_items(self) -> int:
        """Number of rollouts."""
        return len(self._kept)

    @property
    def mass(self) -> float:
        """Number of rollouts. A shard is drawn with a probability proportional to this number."""
        return float(len(self._kept))

    @property
    def num_bytes(self) -> int:
        """Memory of the rollouts in bytes."""
        return self._num_bytes

    @property
    def _num_resident(self) -> int:
        return self._counters["inserted"] - self._counters["evicted"]

    @property
    def counters(self) -> dict[str, int]:
        """Env steps `inserted`, `evicted`, `evicted_unused` (evicted but never sampled), `resident` and `sampled`."""
        return {**self._counters, "resident": self._num_resident}

    @property
    def num_rows_added(self) -> int:
        """Number of env steps added so far."""
        return self._counters["inserted"]

    def rows_of(self, ids: np.ndarray) -> np.ndarray:
        """Return the row number of each rollout in a batch, (N,) int64, given the `ids` of the batch.

        A rollout's row number is the number of env steps inserted before the rollout. The ids are these numbers.
        """
        return ids

    def reset(self) -> None:
        """Evict all rollouts."""
        while self._kept:
            self._evict()

    # State

    def state_dict(self) -> StateDict:
        """Return the state from which another storage can continue exactly as this storage would."""
        return {"generator": self.generator.get_state(), "kept": [dataclasses.asdict(kept) for kept in self._kept],
                "counters": dict(self._counters)}

    def load_state_dict(self, state: StateDict) -> None:
        """Load a state that `state_dict()` returned.

        Raises:
            ConfigError: The state contains more than `size` env steps.
        """
        found = [_Kept(**{**kept, "data": _rollout_of(kept["data"])}) for kept in state["kept"]]
        resident = sum(kept.num_env_steps for kept in found)
        if resident > self.options.size:
            raise ConfigError(f"replay of size {self.options.size} cannot load a state of {resident} env steps; use "
                              "the same size, or start a new run")
        self._kept, self._num_bytes, self._counters = deque(), 0, dict(state["counters"])
        for kept in found:
            self._keep(kept)
        self.generator.set_state(state["generator"])


def _rollout_of(plain: StateDict) -> AnyRollout:
    """Build a rollout from a mapping of its fields, and copy the tensors."""
    if "parts" in plain:
        parts = {policy: RolloutData(**part).map(Tensor.clone) for policy, part in plain["parts"].items()}
        return MultiRollout(parts, plain["num_envs"])
    return RolloutData(**plain).map(Tensor.clone)
