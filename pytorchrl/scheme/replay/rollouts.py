"""Replay of whole rollouts, for on-policy algorithms that correct for the age of their data."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
from pytorchrl.scheme.transport.messages import Rollout


@dataclass(slots=True)
class RolloutBatch:
    """Rollouts sampled from replay, from which the learner makes its batches."""

    rollouts: list[Any]
    """`RolloutData`, or `MultiRollout` with several policies, as collected: with the log-probabilities of the acting
    policy."""
    ids: Tensor
    """(K,) int64, for each rollout the env steps that were added before it."""
    num_samples: int
    """Env steps in the rollouts."""
    last: bool = False
    """Whether it is the last batch before new data arrive."""

    def messages(self) -> list[Rollout]:
        """Return the rollouts in the form in which a gradient worker takes them."""
        return [Rollout(data=data, num_env_steps=data.num_valid(), size=data.size, collected_steps=0, weights_version=0,
                        worker=place, sequence=0) for place, data in enumerate(self.rollouts)]


@dataclass(slots=True)
class _Kept:
    """A rollout in replay."""

    id: int
    """Env steps that were added before it."""
    data: Any
    num_env_steps: int
    num_hits: int = 0
    """Times that it was sampled."""


class RolloutReplay:
    """The newest whole rollouts of at most `size` env steps together, sampled uniformly and with replacement.

    Shards use it for an agent whose own storage keeps no data, such as `VTraceBuffer`, which makes batches of the
    sampled rollouts. It does not collect, and depends on neither actor nor algorithm.

    Args:
        options: Checked options.
        seed: Seed of sampling.
        context: Further arguments of storages, which it ignores.

    Attributes:
        parameters: Empty; it has no parameters.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(BaseOptions):
        """Options of `RolloutReplay`."""

        size: int = option(help="Env steps in all, over all environments of all collection workers.", low=1)

    @classmethod
    def create_factory(cls, size: int) -> Factory[RolloutReplay]:
        """Return a factory of this storage; raise `ConfigError` for a wrong option."""
        return Factory(cls, build_options(cls, {"size": size}))

    def __init__(self, options: Options, *, seed: int, **context: object) -> None:
        self.options = options
        self.generator = torch_generator(derive_seed(seed, Stream.BATCHES))
        self.parameters: Mapping[str, float] = {}
        self._kept: deque[_Kept] = deque()
        self._num_bytes = 0
        self._counters = dict.fromkeys(("inserted", "evicted", "evicted_unused", "sampled"), 0)

    def insert_data_slice(self, rollouts: list[Any], sources: Sequence[Hashable] | None = None) -> None:
        """Copy rollouts into replay, and evict the oldest ones, whole, until there is room.

        Args:
            rollouts: `RolloutData` or `MultiRollout`, of any lengths.
            sources: Not used.

        Raises:
            ConfigError: A rollout has more env steps than `size`.
        """
        for rollout in rollouts:
            num_env_steps = rollout.num_valid()
            if num_env_steps > self.options.size:
                raise ConfigError(f"a rollout of {num_env_steps} env steps does not fit into replay of size "
                                  f"{self.options.size}; raise size or collect shorter rollouts")
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
        """Sample `num_mini_batch` * `num_epochs` batches; none if replay is empty.

        Args:
            num_mini_batch: Number of batches per epoch.
            mini_batch_size: Least size of a batch, see `RolloutData.size`: rollouts are sampled until it is reached.
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
        """Weight of this storage among several shards: its number of rollouts."""
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
        """Env steps `inserted`, `evicted`, `evicted_unused` (in rollouts never sampled), `resident` and `sampled`."""
        return {**self._counters, "resident": self._num_resident}

    @property
    def num_rows_added(self) -> int:
        """Env steps that were added so far."""
        return self._counters["inserted"]

    def rows_of(self, ids: np.ndarray) -> np.ndarray:
        """Return the first env step of each rollout, counted from 0: (N,) int64 for ids (N,) int64 of a batch."""
        return ids

    def reset(self) -> None:
        """Evict all rollouts."""
        while self._kept:
            self._evict()

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return the state from which another storage continues exactly."""
        return {"generator": self.generator.get_state(), "kept": [dataclasses.asdict(kept) for kept in self._kept],
                "counters": dict(self._counters)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`.

        Raises:
            ConfigError: The state holds more than `size` env steps.
        """
        found = [_Kept(**{**kept, "data": _rollout_of(kept["data"])}) for kept in state["kept"]]
        resident = sum(kept.num_env_steps for kept in found)
        if resident > self.options.size:
            raise ConfigError(f"replay of size {self.options.size} cannot continue from one that holds {resident} env "
                              "steps; use the same size, or start a new run")
        self._kept, self._num_bytes, self._counters = deque(), 0, dict(state["counters"])
        for kept in found:
            self._keep(kept)
        self.generator.set_state(state["generator"])


def _rollout_of(plain: dict[str, Any]) -> Any:
    """Return a rollout made from copies of its fields."""
    if "parts" in plain:
        return MultiRollout({policy: _rollout_of(part) for policy, part in plain["parts"].items()}, plain["num_envs"])
    return RolloutData(**plain).map(Tensor.clone)
