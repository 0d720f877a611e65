"""Storage of an agent with several policies.

T = number of steps of a rollout, E = number of environments, C = number of columns of a policy (see
`agent.multi.data`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from typing_extensions import override

from pytorchrl.agent.algorithms.base import Algorithm
from pytorchrl.agent.data import Arrays, Batch, DataKind, ReplayBatch, RolloutData
from pytorchrl.agent.factories import StorageFactory
from pytorchrl.agent.fit import freshest, provided_kind
from pytorchrl.agent.multi.data import MultiActingStep, MultiBatch, MultiRollout, MultiStep, joined, own_names
from pytorchrl.agent.multi.turns import in_turns
from pytorchrl.agent.options import Factory, option
from pytorchrl.agent.options import Options as BaseOptions
from pytorchrl.agent.schedules import Schedule
from pytorchrl.agent.seeding import Stream, derive_seed, torch_generator
from pytorchrl.agent.storages.base import Storage
from pytorchrl.agent.storages.replay import ReplayBuffer
from pytorchrl.errors import ConfigError
from pytorchrl.support.untyped import DataOfAgent, StateDict, UserPart
from pytorchrl.support.work import Work

if TYPE_CHECKING:
    from typing_extensions import Self

    from pytorchrl.agent.multi.actor import MultiAgentActor

WORK = Work("storage")


class PolicyAlgorithms(Protocol):
    """The attributes of `MultiAgentAlgorithm` that storages use."""

    algorithms: dict[str, Algorithm]


class MultiAgentStorage(Storage):
    """Several storages in one: each policy has its own storage, which receives the policy's part of every rollout.

    Attributes:
        storages: The storage of each policy, by the name of the policy.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(BaseOptions):
        """Options of the storages of several policies; `multi_agent` sets them."""

        policies: dict[str, Factory[Storage]] = option(help="Policy -> factory of its storage.")
        agents: dict[str, tuple[str, ...]] = option(help="Policy -> its agents.")
        size: int = option(help="Steps per environment in a rollout; for replay, the capacity in env steps.", low=1)

        @property
        def provides(self) -> DataKind:
            """Kind of data that the storages provide; of several kinds, the one for which data must be the freshest."""
            return freshest(map(provided_kind, self.policies.values()))

        @property
        def rollout_size(self) -> int:
            """T, the number of steps per environment in a rollout."""
            return int(next(getattr(f.options, "rollout_size", self.size) for f in self.policies.values()))

    @classmethod
    def create_factory(  # type: ignore[override] # takes factories, not options
        cls, policies: Mapping[str, Factory[Storage]], agents: Mapping[str, tuple[str, ...]],
    ) -> Factory[Self]:
        """Return a factory that builds the storages of all policies; `multi_agent` calls this method.

        Raises:
            ConfigError: Some policies have a replay storage but others do not, a replay storage is of an unsupported
                class, or the storages differ in `size` or `rollout_size`.
        """
        keep = {policy: provided_kind(factory).is_kept for policy, factory in policies.items()}
        if len(set(keep.values())) > 1:
            raise ConfigError(
                f"either all storages must be replay storages, or none, got {keep}; "
                "use replay for all policies or for none")
        for name in ("size", "rollout_size"):
            values = {policy: getattr(factory.options, name, None) for policy, factory in policies.items()}
            if len(set(values.values())) > 1:
                raise ConfigError(
                    f"{name} of the storages must be the same for all policies, which collect together, got {values}")
        unsupported = [
            factory.cls.__name__ for policy, factory in policies.items()
            if keep[policy]
            and (provided_kind(factory) is not DataKind.TRANSITIONS or not issubclass(factory.cls, ReplayBuffer))]
        if unsupported:
            raise ConfigError(
                f"replay of several policies supports ReplayBuffer and PERBuffer, got {', '.join(unsupported)}")
        size = next(iter(policies.values())).options.size
        return Factory(cls, cls.Options(policies=dict(policies), agents=dict(agents), size=size))

    def __init__(
        self, options: Options, *, actor: MultiAgentActor, algorithm: PolicyAlgorithms, num_envs: int, seed: int,
        device: str = "cpu",
    ) -> None:
        """Build the storages of all policies; see `Storage` for the arguments."""
        self.options, self._num_envs = options, num_envs
        self.provides = options.provides
        self.generator = torch_generator(derive_seed(seed, Stream.BATCHES))
        self.storages: dict[str, UserPart] = {}  # replay buffers have more methods than `Storage`
        factories: Mapping[str, StorageFactory] = options.policies
        for index, (policy, factory) in enumerate(factories.items()):
            num_agents = len(options.agents[policy])
            self.storages[policy] = factory.with_options(size=self._own_size(num_agents))(
                device=device, actor=actor.actors[policy], algorithm=algorithm.algorithms[policy],
                num_envs=num_envs * num_agents, seed=derive_seed(seed, Stream.BATCHES, index))
        self._normalizing = [
            policy for policy, algo in algorithm.algorithms.items() if algo.advantage_normalization == "batch"]
        self._resident_env_steps = self._resident_agent_steps = self._inserted = self._sampled = 0
        self._waiting: dict[str, list[np.ndarray]] = {}  # for each step of the rollout, the agents that wait after it

    def _own_size(self, num_agents: int) -> int:
        """Return the value of the option `size` for the storage of a policy with `num_agents` agents."""
        size: int = self.options.size
        return size

    @property
    def device(self) -> torch.device:
        """Device of the batches."""
        return self._any.device

    @device.setter
    def device(self, device: torch.device) -> None:
        for storage in self.storages.values():
            storage.device = device

    @property
    def _any(self) -> Storage:
        """The first storage, for properties that are equal in all storages."""
        return next(iter(self.storages.values()))

    # Collector

    @property
    @override
    def num_steps(self) -> int:
        return self._any.num_steps

    @property
    @override
    def rollout_size(self) -> int:
        return self._any.rollout_size

    @property
    @override
    def full(self) -> bool:
        return self._any.full

    def start(  # type: ignore[override] # takes data of all policies
        self, obs: Mapping[str, Arrays], mask: Mapping[str, np.ndarray | None] | None = None,
    ) -> None:
        """Start a rollout with the observations and action masks after a reset.

        Args:
            obs: For each policy, a mapping from the leaves of the observation space to arrays (C, ...). Each array has
                C rows, one for each agent of the policy in each environment.
            mask: For each policy, its action masks (C, n) bool for n actions, or None.
        """
        self._waiting = {}
        for policy, storage in self.storages.items():
            storage.start(obs[policy], None if mask is None else mask[policy])

    def current(self) -> DataOfAgent:
        """Return the inputs for the next action (see `Storage.current`), each as a mapping from policy to arrays."""
        rows = {policy: storage.current() for policy, storage in self.storages.items()}
        return tuple({policy: row[place] for policy, row in rows.items()} for place in range(4))

    @override
    def insert_transition(self, acting: MultiActingStep, step: MultiStep) -> None:  # type: ignore[override] # mappings
        """Copy one step to the storages of all policies."""
        for policy, storage in self.storages.items():
            own = step.parts[policy]
            storage.insert_transition(acting.parts[policy], own)
            if own.waiting is not None:  # in earlier steps of the rollout, no agent may have waited
                rows = self._waiting.setdefault(policy, [])
                rows.extend([np.zeros_like(own.waiting)] * (storage.num_steps - 1 - len(rows)))
                rows.append(own.waiting)

    @override
    def get_all_buffer_data(self, copy: bool = True) -> MultiRollout:  # type: ignore[override] # data of all policies
        """Return the current rollout of all policies; see `in_turns` for agents that take turns."""
        parts = {policy: storage.get_all_buffer_data(copy) for policy, storage in self.storages.items()}
        for policy, waiting in self._waiting.items():
            parts[policy] = in_turns(parts[policy], waiting)
        self._waiting = {}
        return MultiRollout(parts, self._num_envs)

    # Learner

    def insert_data_slice(  # type: ignore[override] # takes data of all policies
        self, rollouts: list[MultiRollout], sources: Sequence[Hashable] | None = None,
    ) -> None:
        """Insert rollouts to learn from."""
        for policy, storage in self.storages.items():
            own: list[RolloutData] = [rollout.parts[policy] for rollout in rollouts]
            if sources is None:
                storage.insert_data_slice(own)
            else:
                storage.insert_data_slice(own, sources)
        self._resident_env_steps = sum(rollout.num_valid() for rollout in rollouts)
        self._resident_agent_steps = sum(part.num_valid() for rollout in rollouts for part in rollout.parts.values())
        self._inserted += self._resident_env_steps

    @override
    def before_gradients(self) -> None:
        """Prepare the rollouts of all policies for `generate_batches`."""
        for storage in self.storages.values():
            storage.before_gradients()

    def advantage_moments(self) -> dict[str, tuple[float, float, float]]:  # type: ignore[override] # mappings
        """Return, by policy, the number of advantages, their mean, and the sum of squared deviations from the mean."""
        return {policy: storage.advantage_moments() for policy, storage in self.storages.items()}

    def normalize_by(self, moments: Sequence[Mapping[str, tuple[float, float, float]]]) -> None:
        """Normalize the advantages of all policies for which the option `advantage_normalization` is "batch".

        `moments` contains the results of all workers' `advantage_moments`; they are combined for the normalization.
        """
        for policy in self._normalizing:
            self.storages[policy].normalize_by([found[policy] for found in moments])

    def to_learn_from(self, policy: str) -> UserPart:
        """Return the storage from which the algorithm of a policy draws its batches."""
        return self.storages[policy]

    def generate_batches(
        self, num_mini_batch: int, mini_batch_size: int | None = None, num_epochs: int = 1,
    ) -> Iterator[MultiBatch]:
        """Yield batches of all policies."""
        return self.join({policy: storage.generate_batches(num_mini_batch, mini_batch_size, num_epochs)
                          for policy, storage in self.storages.items()})

    def join(self, batches: Mapping[str, Iterator[Batch | ReplayBatch]]) -> Iterator[MultiBatch]:
        """Yield the first batches of all policies together, then the second batches, and so on.

        A policy with fewer samples has fewer batches, and is absent from the last joint batches.
        """
        remaining = dict(batches)
        drawn = drawn_new = 0  # agents' steps in earlier batches, with repetitions (`drawn`) and without (`drawn_new`)
        while remaining:
            parts: dict[str, Batch | ReplayBatch] = {}
            for policy in list(remaining):
                part = next(remaining[policy], None)
                if part is not None:
                    parts[policy] = part
                if part is None or part.last:
                    del remaining[policy]
            if not parts:
                return
            samples = sum(part.num_samples for part in parts.values())
            new = sum(part.num_new_samples for part in parts.values())
            batch = self._joined(parts, (drawn, samples), (drawn_new, new), last=not remaining)
            drawn, drawn_new = drawn + samples, drawn_new + new
            self._sampled += batch.num_samples
            yield batch

    def _joined(self, parts: dict[str, Batch | ReplayBatch], samples: tuple[int, int], new: tuple[int, int],
                last: bool) -> MultiBatch:
        """Return a joint batch, whose `num_samples` and `num_new_samples` count env steps.

        The arguments count steps of agents, which are converted to env steps. Rounding errors do not accumulate: over
        one pass over the rollouts, the sum of `num_samples` is exactly the number of env steps in the rollouts.

        Args:
            parts: Policy -> batch of the policy.
            samples: Number of agents' steps in all earlier batches, and number of agents' steps in this batch.
            new: The same two numbers without repetitions: a step counts only in the first batch that contains it.
            last: Whether this is the last batch.
        """
        def share(before: int, count: int) -> int:
            env_steps, agent_steps = self._resident_env_steps, self._resident_agent_steps
            return (before + count) * env_steps // agent_steps - before * env_steps // agent_steps
        return MultiBatch(parts, tuple(self.storages), share(*samples), share(*new), last)

    @override
    def reset(self) -> None:
        """Discard the data of all policies."""
        self._resident_env_steps = 0
        for storage in self.storages.values():
            storage.reset()

    @property
    def counters(self) -> dict[str, int]:
        """Numbers of env steps: `inserted` so far, `sampled` so far, and `resident` (stored now)."""
        return {"inserted": self._inserted, "sampled": self._sampled, "resident": self._resident_env_steps}

    # Parameters, states

    @property
    def parameters(self) -> dict[str, float]:
        """The current values of the parameters of all policies, by `policy/name`."""
        return joined({policy: storage.parameters for policy, storage in self.storages.items()})

    @parameters.setter
    def parameters(self, values: Mapping[str, float]) -> None:
        for policy, storage in self.storages.items():
            storage.parameters = own_names(values, policy)

    @property
    def schedules(self) -> dict[str, Schedule]:  # type: ignore[override] # named by policy
        """The schedules of the parameters of all policies, by `policy/name`."""
        return joined({policy: storage.schedules for policy, storage in self.storages.items()})

    @override
    def follow_schedules(self, env_steps: int, target_steps: int) -> dict[str, float]:
        """Set the scheduled parameters of all policies, and return their values by `policy/name`."""
        return joined({
            policy: storage.follow_schedules(env_steps, target_steps) for policy, storage in self.storages.items()})

    @override
    def state_dict(self) -> StateDict:
        """Return the states of all storages, and the counters."""
        return {**super().state_dict(), "inserted": self._inserted, "sampled": self._sampled,
                "policies": {policy: storage.state_dict() for policy, storage in self.storages.items()}}

    @override
    def load_state_dict(self, state: StateDict) -> None:
        super().load_state_dict(state)
        self._inserted, self._sampled = state["inserted"], state["sampled"]
        for policy, storage in self.storages.items():
            storage.load_state_dict(state["policies"][policy])
