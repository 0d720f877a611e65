"""Replay of whole rollouts, for on-policy algorithms that correct for the age of their data. T = steps, E = environments."""

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
    """Rollouts drawn from replay, to make batches of."""

    rollouts: list[Any]
    """`RolloutData`, or `MultiRollout` of several policies, as they were collected: with the log-probabilities of the policy that
    acted."""
    ids: Tensor
    """(K,) int64: of each rollout how many env steps had come before it."""
    num_samples: int
    """Env steps in them."""
    last: bool = False
    """Whether no further batch is drawn before new data come."""

    def messages(self) -> list[Rollout]:
        """Return the rollouts in the form in which a gradient worker takes them."""
        return [Rollout(data=data, num_env_steps=data.num_valid(), size=data.size, collected_steps=0, weights_version=0,
                        worker=place, sequence=0) for place, data in enumerate(self.rollouts)]


@dataclass(slots=True)
class _Kept:
    """A rollout in replay."""

    id: int
    """Env steps that came before it."""
    data: Any
    num_env_steps: int
    num_hits: int = 0
    """How often it was drawn."""


class RolloutReplay:
    """The newest whole rollouts of no more than `size` env steps together, drawn uniformly and with replacement.

    It is what shards keep of an agent whose own storage keeps nothing, such as `VTraceBuffer`: that one makes batches of what
    is drawn. It has no collector's half, and needs to know neither actor nor algorithm.

    Args:
        options: Checked options.
        seed: Of what is drawn.
        context: What else storages are made with; not used.

    Attributes:
        parameters: None that could be updated.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(BaseOptions):
        """Options of `RolloutReplay`."""

        size: int = option(help="Env steps in all, over all environments of all collectors.", low=1)

    @classmethod
    def create_factory(cls, size: int) -> Factory[RolloutReplay]:
        """A factory of this storage; raises `ConfigError` for a wrong option."""
        return Factory(cls, build_options(cls, {"size": size}))

    def __init__(self, options: Any, *, seed: int, **context: Any) -> None:
        self.options = options
        self.generator = torch_generator(derive_seed(seed, Stream.BATCHES))
        self.parameters: Mapping[str, float] = {}
        self._kept: deque[_Kept] = deque()
        self._num_bytes = 0
        self._counters = dict.fromkeys(("inserted", "evicted", "evicted_unused", "sampled"), 0)
        self._hits_gone: list[int] | None = None

    def insert_data_slice(self, rollouts: list[Any], sources: Sequence[Hashable] | None = None) -> None:
        """Append rollouts; the oldest ones go, whole, until there is room. Copies them.

        Args:
            rollouts: `RolloutData` or `MultiRollout`, of any lengths.
            sources: Who made each; no matter.

        Raises:
            ConfigError: A rollout has more env steps than `size`.
        """
        for rollout in rollouts:
            num_env_steps = rollout.num_valid()
            if num_env_steps > self.options.size:
                raise ConfigError(f"a rollout of {num_env_steps} env steps does not fit into replay of size {self.options.size}; "
                                  "raise size or collect shorter rollouts")
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
        if self._hits_gone is not None:
            self._hits_gone.append(gone.num_hits)

    def generate_batches(self, num_mini_batch: int, mini_batch_size: int, num_epochs: int = 1) -> Iterator[RolloutBatch]:
        """Draw `num_mini_batch` · `num_epochs` batches; none while there is no rollout.

        Args:
            num_mini_batch: Batches.
            mini_batch_size: Size of each, at least, see `RolloutData.size`: rollouts are drawn one after the other until then.
            num_epochs: How many times that.
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
            yield RolloutBatch([kept.data.map(Tensor.clone) for kept in drawn], torch.tensor([kept.id for kept in drawn]),
                               num_env_steps, last=not left)

    # What it holds

    @property
    def num_items(self) -> int:
        """Rollouts."""
        return len(self._kept)

    @property
    def mass(self) -> float:
        """What this storage's share in a draw from several is proportional to: its rollouts."""
        return float(len(self._kept))

    @property
    def num_bytes(self) -> int:
        """Memory of what is kept."""
        return self._num_bytes

    @property
    def _num_resident(self) -> int:
        return self._counters["inserted"] - self._counters["evicted"]

    @property
    def counters(self) -> dict[str, int]:
        """Env steps: `inserted`, `evicted`, `evicted_unused` (of rollouts never drawn), `resident`, and drawn ones: `sampled`."""
        return {**self._counters, "resident": self._num_resident}

    @property
    def num_rows_added(self) -> int:
        """Env steps that came so far."""
        return self._counters["inserted"]

    def rows_of(self, ids: np.ndarray) -> np.ndarray:
        """(N,) int64, the first env steps of the rollouts of these ids, (N,), of batches, counted from 0 as they came."""
        return ids

    def keep_notes(self) -> None:
        """See `ReplayBuffer`."""
        self._hits_gone = []

    def take_notes(self) -> dict[str, np.ndarray]:
        """See `ReplayBuffer`; there are no priorities."""
        gone, self._hits_gone = self._hits_gone or [], None if self._hits_gone is None else []
        return {"evicted_hits": np.array(gone, np.int64), "priority_change": np.zeros(0)}

    def reset(self) -> None:
        """Forget all rollouts; they count as evicted."""
        while self._kept:
            self._evict()

    # State

    def state_dict(self) -> dict[str, Any]:
        """What is needed to go on exactly as now."""
        return {"generator": self.generator.get_state(), "kept": [dataclasses.asdict(kept) for kept in self._kept],
                "counters": dict(self._counters)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`.

        Raises:
            ConfigError: The state holds more than `size` env steps.
        """
        found = [_Kept(**{**kept, "data": _rollout_of(kept["data"])}) for kept in state["kept"]]
        held = sum(kept.num_env_steps for kept in found)
        if held > self.options.size:
            raise ConfigError(f"replay of size {self.options.size} cannot go on from one that holds {held} env steps; use the "
                              "same size, or start anew")
        self._kept, self._num_bytes, self._counters = deque(), 0, dict(state["counters"])
        for kept in found:
            self._keep(kept)
        self.generator.set_state(state["generator"])


def _rollout_of(plain: dict[str, Any]) -> Any:
    """A rollout from its fields, copied."""
    if "parts" in plain:
        return MultiRollout({policy: _rollout_of(part) for policy, part in plain["parts"].items()}, plain["num_envs"])
    return RolloutData(**plain).map(Tensor.clone)
