"""The storages of several policies as one. T = steps of a rollout, E = environments, C = columns of a policy."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pytorchrl.agent.data import DataKind, RolloutData
from pytorchrl.agent.fit import freshest, given_kind
from pytorchrl.agent.multi.data import MultiActingStep, MultiBatch, MultiRollout, MultiStep, joined, own_names
from pytorchrl.agent.options import Factory, option
from pytorchrl.agent.options import Options as BaseOptions
from pytorchrl.agent.schedules import Schedule
from pytorchrl.agent.seeding import Stream, derive_seed, torch_generator
from pytorchrl.agent.storages.base import Storage
from pytorchrl.agent.storages.replay import ReplayBuffer
from pytorchrl.errors import ConfigError


class MultiAgentStorage(Storage):
    """Holds a storage for each policy, which all take the same rollouts; each draws from the samples of its own policy.

    Attributes:
        storages: Policy -> storage.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(BaseOptions):
        """Options of the storages of several policies; `multi_agent` makes them."""

        policies: dict[str, Any] = option(help="Policy -> factory of its storage.")
        agents: dict[str, tuple[str, ...]] = option(help="Policy -> its agents.")
        size: int = option(help="Of rollouts the steps of each environment, of replay its env steps.", low=1)

        @property
        def gives(self) -> DataKind:
            """The kind of data that the storages provide; if kinds differ, the one that must be freshest."""
            return freshest(map(given_kind, self.policies.values()))

        @property
        def rollout_size(self) -> int:
            """Steps of each environment in a rollout."""
            return int(next(getattr(f.options, "rollout_size", self.size) for f in self.policies.values()))

    @classmethod
    def create_factory(  # type: ignore[override] # of parts, not of options
        cls, policies: Mapping[str, Factory[Any]], agents: Mapping[str, tuple[str, ...]],
    ) -> Factory[MultiAgentStorage]:
        """A factory of these storages; `multi_agent` calls it.

        Raises:
            ConfigError: Some keep transitions and others do not, or their rollouts differ.
        """
        keep = {policy: given_kind(factory).is_kept for policy, factory in policies.items()}
        if len(set(keep.values())) > 1:
            raise ConfigError(f"storages of all policies must keep transitions, or none, got {keep}; use replay for all or none")
        for name in ("size", "rollout_size"):
            values = {policy: getattr(factory.options, name, None) for policy, factory in policies.items()}
            if len(set(values.values())) > 1:
                raise ConfigError(f"{name} of the storages must be the same for all policies, which collect together, got {values}")
        if odd := [factory.cls.__name__ for factory in policies.values() if given_kind(factory).is_kept
                  and (given_kind(factory) is not DataKind.TRANSITIONS or not issubclass(factory.cls, ReplayBuffer))]:
            raise ConfigError(f"replay of several policies is for ReplayBuffer and PERBuffer, got {', '.join(odd)}")
        size = next(iter(policies.values())).options.size
        return Factory(MultiAgentReplay if any(keep.values()) else MultiAgentStorage,
                       cls.Options(policies=dict(policies), agents=dict(agents), size=size))

    def __init__(self, options: Any, *, actor: Any, algorithm: Any, num_envs: int, seed: int, device: str = "cpu") -> None:
        """Arguments as of the storages."""
        self.options, self._num_envs = options, num_envs
        self.gives = options.gives
        self.generator = torch_generator(derive_seed(seed, Stream.BATCHES))
        self.storages: dict[str, Any] = {}
        for index, (policy, factory) in enumerate(options.policies.items()):
            num_agents = len(options.agents[policy])
            own = dataclasses.replace(factory, options=dataclasses.replace(factory.options, size=self._own_size(num_agents)))
            self.storages[policy] = own(
                device=device, actor=actor.actors[policy], algorithm=algorithm.algorithms[policy], num_envs=num_envs * num_agents,
                seed=derive_seed(seed, Stream.BATCHES, index))
        self._normalizing = [policy for policy, algo in algorithm.algorithms.items() if algo.advantage_normalization == "batch"]
        self._held_env_steps = self._held_agent_steps = self._inserted = self._sampled = 0

    def _own_size(self, num_agents: int) -> int:
        size: int = self.options.size
        return size

    @property
    def device(self) -> torch.device:
        """Where batches are wanted."""
        device: torch.device = self._any.device
        return device

    @device.setter
    def device(self, device: torch.device) -> None:
        for storage in self.storages.values():
            storage.device = device

    @property
    def _any(self) -> Any:
        """What is the same for all policies, one tells."""
        return next(iter(self.storages.values()))

    # Collector

    @property
    def num_steps(self) -> int:
        """See `Storage`."""
        return int(self._any.num_steps)

    @property
    def rollout_size(self) -> int:
        """See `Storage`."""
        return int(self._any.rollout_size)

    @property
    def full(self) -> bool:
        """See `Storage`."""
        return bool(self._any.full)

    def start(self, obs: Any, mask: Any = None) -> None:
        """Begin with the observations after a reset: policy -> leaf -> (C, ...), and allowed actions, policy -> (C, n)."""
        for policy, storage in self.storages.items():
            storage.start(obs[policy], None if mask is None else mask[policy])

    def current(self) -> Any:
        """obs, rhs, done, mask to act on, each a mapping from policy."""
        rows = {policy: storage.current() for policy, storage in self.storages.items()}
        return tuple({policy: row[place] for policy, row in rows.items()} for place in range(4))

    def insert_transition(self, acting: MultiActingStep, step: MultiStep) -> None:  # type: ignore[override] # of all policies
        """See `Storage`."""
        for policy, storage in self.storages.items():
            storage.insert_transition(acting.parts[policy], step.parts[policy])

    def get_all_buffer_data(self, copy: bool = True) -> MultiRollout:  # type: ignore[override] # of all policies
        """See `Storage`."""
        return MultiRollout({policy: storage.get_all_buffer_data(copy) for policy, storage in self.storages.items()}, self._num_envs)

    # Learner

    def insert_data_slice(self, rollouts: list[Any], sources: Sequence[Hashable] | None = None) -> None:
        """Take rollouts (`MultiRollout`) to learn from."""
        for policy, storage in self.storages.items():
            own: list[RolloutData] = [rollout.parts[policy] for rollout in rollouts]
            if sources is None:
                storage.insert_data_slice(own)
            else:
                storage.insert_data_slice(own, sources)
        self._held_env_steps = sum(rollout.num_valid() for rollout in rollouts)
        self._held_agent_steps = sum(part.num_valid() for rollout in rollouts for part in rollout.parts.values())
        self._inserted += self._held_env_steps

    def before_gradients(self) -> None:
        """See `Storage`."""
        for storage in self.storages.values():
            storage.before_gradients()

    def advantage_moments(self) -> Any:
        """Policy -> count, mean and sum of squared deviations of its advantages."""
        return {policy: storage.advantage_moments() for policy, storage in self.storages.items()}

    def normalize_by(self, moments: Sequence[Any]) -> None:
        """Normalise by the moments of all workers, of those policies that normalise over the batch."""
        for policy in self._normalizing:
            self.storages[policy].normalize_by([found[policy] for found in moments])

    def to_learn_from(self, policy: str) -> Any:
        """What the policy's algorithm draws its batches from."""
        return self.storages[policy]

    def generate_batches(self, num_mini_batch: int, mini_batch_size: int | None = None, num_epochs: int = 1) -> Iterator[MultiBatch]:
        """Batches of all policies."""
        return self.join({policy: storage.generate_batches(num_mini_batch, mini_batch_size, num_epochs)
                          for policy, storage in self.storages.items()})

    def join(self, batches: Mapping[str, Iterator[Any]]) -> Iterator[MultiBatch]:
        """The first batches of all policies together, then the second ones, and so on, to the end of the longest.

        A policy with fewer samples has fewer batches, and is absent from the last ones.
        """
        going_on = dict(batches)
        drawn = drawn_new = 0  # agents' steps
        while going_on:
            parts: dict[str, Any] = {}
            for policy in list(going_on):
                part = next(going_on[policy], None)
                if part is not None:
                    parts[policy] = part
                if part is None or part.last:
                    del going_on[policy]
            if not parts:
                return
            batch = MultiBatch(parts, tuple(self.storages), last=not going_on)
            samples, new = sum(part.num_samples for part in parts.values()), sum(part.num_new_samples for part in parts.values())
            self._count(batch, (drawn, samples), (drawn_new, new))
            drawn, drawn_new = drawn + samples, drawn_new + new
            self._sampled += batch.num_samples
            yield batch

    def _count(self, batch: MultiBatch, samples: tuple[int, int], new: tuple[int, int]) -> None:
        """Set the env steps of a batch: its share, which over a pass adds up to those that are held."""
        def share(before: int, count: int) -> int:
            env_steps, agent_steps = self._held_env_steps, self._held_agent_steps
            return (before + count) * env_steps // agent_steps - before * env_steps // agent_steps
        batch.num_samples, batch.num_new_samples = share(*samples), share(*new)

    def after_gradients(self, batch: Any, info: dict[str, Any]) -> None:
        """See `Storage`."""

    def reset(self) -> None:
        """See `Storage`."""
        self._held_env_steps = 0
        for storage in self.storages.values():
            storage.reset()

    @property
    def counters(self) -> dict[str, int]:
        """Env steps: `inserted` and `sampled` so far, `resident` now."""
        return {"inserted": self._inserted, "sampled": self._sampled, "resident": self._held_env_steps}

    # Parameters, states

    @property
    def parameters(self) -> dict[str, float]:
        """`policy/name` -> value in force."""
        return joined({policy: storage.parameters for policy, storage in self.storages.items()})

    @parameters.setter
    def parameters(self, values: Mapping[str, float]) -> None:
        for policy, storage in self.storages.items():
            storage.parameters = own_names(values, policy)

    @property
    def schedules(self) -> dict[str, Schedule]:  # type: ignore[override] # those of the policies
        """`policy/name` -> schedule."""
        return joined({policy: storage.schedules for policy, storage in self.storages.items()})

    def follow_schedules(self, env_steps: int, target_steps: int) -> dict[str, float]:
        """See `Storage`."""
        return joined({policy: storage.follow_schedules(env_steps, target_steps) for policy, storage in self.storages.items()})

    def state_dict(self) -> dict[str, Any]:
        """See `Storage`."""
        return {**super().state_dict(), "inserted": self._inserted, "sampled": self._sampled,
                "policies": {policy: storage.state_dict() for policy, storage in self.storages.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Storage`."""
        super().load_state_dict(state)
        self._inserted, self._sampled = state["inserted"], state["sampled"]
        for policy, storage in self.storages.items():
            storage.load_state_dict(state["policies"][policy])


@dataclass(slots=True)
class _Kept:
    """A rollout of which replay still holds a part."""

    start: int
    """Env steps that came before it."""
    valid: dict[str, np.ndarray]
    """Policy -> (T, C) bool."""
    env_steps: int
    """Those still held."""


class MultiAgentReplay(MultiAgentStorage):
    """Replay of several policies.

    Each policy has room for all steps of its agents in `size` env steps, so that all hold the same ones. An env step is
    resident while one of them holds a part of it.

    An id in a batch is that of the policy's own storage, times the number of policies, plus the policy's place.
    """

    def __init__(self, options: Any, **context: Any) -> None:
        super().__init__(options, **context)
        self.has_priorities = any(storage.has_priorities for storage in self.storages.values())  # type: ignore[misc] # of its policies
        self._evicted = 0
        self._kept: deque[_Kept] = deque()

    def _own_size(self, num_agents: int) -> int:
        return int(self.options.size * num_agents)

    def insert_data_slice(self, rollouts: list[Any], sources: Sequence[Hashable] | None = None) -> None:
        """Append rollouts, over the oldest env steps where there is no room."""
        names: Sequence[Hashable] = range(len(rollouts)) if sources is None else sources
        for rollout, source in zip(rollouts, names, strict=True):
            self._kept.append(_Kept(self._inserted, {policy: part.valid.numpy().copy() for policy, part in rollout.parts.items()},
                                    rollout.num_valid()))
            super().insert_data_slice([rollout], [source])
            self._evict()

    def insert_from(self, rollouts: Sequence[Any], sources: Sequence[Hashable]) -> None:
        """See `insert_data_slice`."""
        self.insert_data_slice(list(rollouts), sources)

    def _evict(self) -> None:
        """Count env steps of which no policy holds anything any more."""
        while self._kept:
            oldest = self._kept[0]
            left = self._count_held(oldest)
            self._evicted += oldest.env_steps - left
            oldest.env_steps = left
            if left:
                return
            self._kept.popleft()

    def _count_held(self, kept: _Kept) -> int:
        held = np.zeros(1, np.bool_)
        for policy, valid in kept.valid.items():
            num_steps, num_columns = valid.shape
            num_agents = len(self.options.agents[policy])
            # Rows of a rollout are column after column; see `Ring`.
            rows = kept.start * num_agents + np.arange(num_columns) * num_steps + np.arange(num_steps)[:, None]
            there = valid & (rows >= self.storages[policy].num_rows_given_up)
            held = held | there.reshape(num_steps, -1, num_agents).any(-1)
        return int(np.count_nonzero(held))

    @property
    def num_rows_added(self) -> int:
        """Env steps that came so far."""
        return self._inserted

    def rows_of(self, ids: np.ndarray) -> np.ndarray:
        """(N,) int64, the env steps of these ids, (N,), of batches, counted from 0 as their rollouts came."""
        num_agents = np.array([len(self.options.agents[policy]) for policy in self.storages])
        return ids // len(num_agents) // num_agents[ids % len(num_agents)]

    def keep_notes(self) -> None:
        """See `ReplayBuffer`."""
        for storage in self.storages.values():
            storage.keep_notes()

    def take_notes(self) -> dict[str, np.ndarray]:
        """See `ReplayBuffer`. `<name>` combines all policies, and `<name>/<policy>` covers one policy."""
        notes = {policy: storage.take_notes() for policy, storage in self.storages.items()}
        names = next(iter(notes.values()))
        return {**{name: np.concatenate([own[name] for own in notes.values()]) for name in names},
                **{f"{name}/{policy}": values for policy, own in notes.items() for name, values in own.items()}}

    def to_learn_from(self, policy: str) -> Any:
        """See `MultiAgentStorage`."""
        return _InEnvSteps(self.storages[policy], self.counters)

    def _count(self, batch: MultiBatch, samples: tuple[int, int], new: tuple[int, int]) -> None:
        batch.num_samples = max(part.num_samples for part in batch.parts.values())
        places = {policy: place for place, policy in enumerate(batch.policies)}
        batch.ids = torch.cat([part.ids * len(places) + places[policy] for policy, part in batch.parts.items()])

    def after_gradients(self, batch: MultiBatch, info: dict[str, Any]) -> None:
        """Take the batch's errors as priorities."""
        assert batch.ids is not None
        self.update_priorities(batch.ids.numpy(), info["errors"].detach().cpu().numpy())

    def update_priorities(self, ids: np.ndarray, errors: np.ndarray) -> None:
        """Tell each policy's storage, if it has priorities; not if an error is not finite: nothing was found out then.

        Args:
            ids: (N,) int64, as in batches.
            errors: (N,) float, of either sign.
        """
        places = ids % len(self.storages)
        for place, storage in enumerate(self.storages.values()):
            own = errors[places == place]
            if len(own) and np.isfinite(own).all() and storage.has_priorities:
                storage.update_priorities(ids[places == place] // len(self.storages), own)

    def reset(self) -> None:
        """Forget all transitions."""
        super().reset()
        self._evict()

    @property
    def num_items(self) -> int:
        """Transitions of all policies that can be drawn."""
        return sum(storage.num_items for storage in self.storages.values())

    @property
    def num_bytes(self) -> int:
        """Memory of what is kept for learning."""
        return sum(storage.num_bytes for storage in self.storages.values())

    @property
    def mass(self) -> float:
        """What this storage's share in a draw from several is proportional to, over all policies."""
        return float(sum(storage.mass for storage in self.storages.values()))

    @property
    def counters(self) -> dict[str, int]:
        """Env steps: `inserted`, `evicted`, `resident`; `sampled`: transitions of one policy. `<name>/<policy>`: a policy's own."""
        return {"inserted": self._inserted, "sampled": self._sampled, "evicted": self._evicted,
                "resident": self._inserted - self._evicted,
                **{f"{name}/{policy}": value for policy, storage in self.storages.items()
                   for name, value in storage.counters.items()}}

    def state_dict(self) -> dict[str, Any]:
        """See `Storage`."""
        kept = [(kept.start, {policy: torch.from_numpy(valid) for policy, valid in kept.valid.items()}, kept.env_steps)
                for kept in self._kept]
        return {**super().state_dict(), "kept": kept, "evicted": self._evicted}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Storage`."""
        super().load_state_dict(state)
        self._evicted = state["evicted"]
        self._kept = deque(_Kept(start, {policy: valid.numpy() for policy, valid in arrays.items()}, steps)
                           for start, arrays, steps in state["kept"])


class _InEnvSteps:
    """A policy's replay as its algorithm learns from it: what came into it is counted in env steps."""

    def __init__(self, storage: Any, counters: Mapping[str, int]) -> None:
        self._storage, self.counters = storage, counters

    @property
    def num_learned_from(self) -> int:
        """See `Storage`."""
        number: int = self._storage.num_learned_from
        return number

    @num_learned_from.setter
    def num_learned_from(self, number: int) -> None:
        self._storage.num_learned_from = number

    def generate_batches(self, num_mini_batch: int, mini_batch_size: int | None = None, num_epochs: int = 1) -> Iterator[Any]:
        """See `ReplayBuffer`."""
        batches: Iterator[Any] = self._storage.generate_batches(num_mini_batch, mini_batch_size, num_epochs)
        return batches
