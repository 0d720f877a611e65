"""Algorithm of an agent with several policies.

E = number of environments, C = number of columns of a policy (see `agent.multi.data`), P = number of scalar parameters
of a policy.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from pytorchrl.agent.algorithms.base import Algorithm
from pytorchrl.agent.data import Arrays, DataKind
from pytorchrl.agent.factories import AlgorithmFactory
from pytorchrl.agent.fit import freshest, learned_kind
from pytorchrl.agent.multi.data import SEPARATOR, MultiActingStep, MultiBatch, MultiRollout, joined, own_names
from pytorchrl.agent.options import Factory, option
from pytorchrl.agent.options import Options as BaseOptions
from pytorchrl.agent.schedules import Schedule
from pytorchrl.agent.seeding import Stream, derive_seed
from pytorchrl.errors import ConfigError, NonFiniteUpdateError, Problem, UnknownParameterError, WeightsError
from pytorchrl.support.untyped import MetricsDict, OptionValue, StateDict
from pytorchrl.support.work import Work

if TYPE_CHECKING:
    from pytorchrl.agent.multi.actor import MultiAgentActor
    from pytorchrl.agent.multi.storage import MultiAgentStorage

WORK = Work(methods={"finish_rollout": "network", "apply_gradients": "optimizer"})
_SHARED = ("num_epochs", "num_mini_batch", "mini_batch_size", "start_steps", "update_every", "num_updates")
"""Options that determine when updates happen and how many samples they use; all policies must have the same values."""
TRAINABLE = "trainable"
"""Second half of the name `policy/trainable`; this parameter is 1 if the policy learns, and 0 if it only acts."""


class MultiAgentAlgorithm(Algorithm):
    """One algorithm for each policy, updated together.

    Each policy has one gradient, a vector that concatenates the gradients of the policy's parameter groups. The
    gradient is None if the batch has no samples of the policy, or if the policy is not trainable; in both cases, the
    parameters and optimizer moments of the policy stay unchanged. Names of statistics end with the policy, as in
    `loss/hunter`; names of parameters and states begin with the policy, as in `hunter/lr`.

    Attributes:
        algorithms: The algorithm of each policy, by the name of the policy.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(BaseOptions):
        """Options of `MultiAgentAlgorithm`; `multi_agent` sets them."""

        policies: dict[str, Factory[Algorithm]] = option(help="Policy -> factory of its algorithm.")
        agents: dict[str, tuple[str, ...]] = option(help="Policy -> its agents.")
        trainable: tuple[str, ...] = option(help="Policies that learn; the others only act.")

        def contradictions(self) -> Iterator[Problem]:
            """Yield the reasons for which the algorithms cannot be updated together."""
            yield from super().contradictions()
            for policy, factory in self.policies.items():
                yield from map(Problem, _problems_of(policy, factory))
            for name in _SHARED:
                values = {policy: getattr(factory.options, name, None) for policy, factory in self.policies.items()}
                if len(set(values.values())) > 1:
                    yield Problem(
                        f"{name} must be the same for all policies, which are updated together, got {values}",
                        options=(name,))
            if len({factory.cls.loss_reduction for factory in self.policies.values()}) > 1:
                yield Problem("loss_reduction must be the same for all policies, got \"sum\" and \"mean\"")
            if unknown := sorted(set(self.trainable) - set(self.policies)):
                yield Problem(f"trainable has {unknown}, which are not among the policies {list(self.policies)}")
            if not self.trainable:
                yield Problem("trainable is empty, so there would be no updates",
                              f"name some of {list(self.policies)}")

        def __getattr__(self, name: str) -> OptionValue:
            """Return the common value of all policies for `name`, which must be one of the options in `_SHARED`."""
            if name in _SHARED:
                return getattr(next(iter(self.policies.values())).options, name)
            raise AttributeError(f"the algorithms of several policies have no common option {name!r}")

        @property
        def advantage_normalization(self) -> str:
            """Widest `advantage_normalization` of any policy; from wide to narrow: "batch", "minibatch", "none"."""
            found = {getattr(factory.options, "advantage_normalization", Algorithm.advantage_normalization)
                     for factory in self.policies.values()}
            return next(kind for kind in ("batch", "minibatch", "none") if kind in found)

        @property
        def mixed_precision(self) -> bool:
            """Whether any algorithm computes in bfloat16."""
            return any(getattr(factory.options, "mixed_precision", None) is True for factory in self.policies.values())

        @property
        def learns_from(self) -> DataKind:
            """Kind of data to learn from; if policies need different kinds, the kind with the freshest data."""
            return freshest(map(learned_kind, self.policies.values()))

    actor: MultiAgentActor

    def __init__(self, options: Options, *, actor: MultiAgentActor, seed: int, device: str = "cpu") -> None:
        """Build the algorithms of all policies; see `Algorithm` for the arguments."""
        self.options, self.actor, self.device = options, actor, torch.device(device)
        self.learns_from = options.learns_from
        factories: Mapping[str, AlgorithmFactory] = options.policies
        self.algorithms: dict[str, Algorithm] = {
            policy: factory(device=device, actor=actor.actors[policy], seed=derive_seed(seed, Stream.ACTING, index))
            for index, (policy, factory) in enumerate(factories.items())}
        self.groups = joined({policy: algo.groups for policy, algo in self.algorithms.items()})
        self.advantage_normalization = options.advantage_normalization
        self.loss_reduction = next(  # type: ignore[misc] # depends on the policies
            iter(self.algorithms.values())).loss_reduction
        for name in ("num_epochs", "num_mini_batch"):
            if hasattr(options, name):
                setattr(self, name, getattr(options, name))
        self._trainable = {policy: float(policy in options.trainable) for policy in self.algorithms}

    @classmethod
    def create_factory(  # type: ignore[override] # takes factories, not options
        cls, policies: Mapping[str, Factory[Algorithm]], agents: Mapping[str, tuple[str, ...]],
        trainable: tuple[str, ...] | None = None,
    ) -> Factory[MultiAgentAlgorithm]:
        """Return a factory of a `MultiAgentAlgorithm` for these policies; `multi_agent` calls this method."""
        return Factory(cls, cls.Options(
            policies=dict(policies), agents=dict(agents),
            trainable=tuple(policies if trainable is None else trainable)))

    # Acting

    @override
    def take_place(self, index: int, num_collectors: int) -> None:
        """Make the algorithms of all policies act as collector `index`."""
        for algo in self.algorithms.values():
            algo.take_place(index, num_collectors)

    def acting_step(  # type: ignore[override] # takes mappings from policies
        self, obs: Mapping[str, Arrays], rhs: Mapping[str, Arrays], done: Mapping[str, np.ndarray] | np.ndarray,
        deterministic: bool = False, mask: Mapping[str, np.ndarray | None] | None = None,
    ) -> MultiActingStep:
        """Choose the actions of all agents of E environments.

        Args:
            obs: Observations: policy -> leaf -> (C, ...). The C rows belong to the agents of the policy in all
                environments.
            rhs: States of recurrent networks: policy -> network -> (C, H), where H is the size of a state.
            done: Whether each observation is the first of an episode: policy -> (C,) bool, or an (E,) bool array
                that applies to all agents of each environment.
            deterministic: Whether to choose the best actions instead of sampling or exploring.
            mask: Whether each of n actions is allowed: policy -> (C, n) bool; None allows all actions.
        """
        if not isinstance(done, Mapping):
            done = {policy: np.repeat(done, len(agents)) for policy, agents in self.options.agents.items()}
        return MultiActingStep({
            policy: algo.acting_step(
                obs[policy], rhs[policy], done[policy], deterministic, None if mask is None else mask[policy])
            for policy, algo in self.algorithms.items()})

    @override
    def finish_rollout(self, rollout: MultiRollout) -> None:  # type: ignore[override] # takes data of all policies
        """Complete the rollouts of all policies."""
        for policy, part in rollout.parts.items():
            self.algorithms[policy].finish_rollout(part)

    @override
    def moments_of(  # type: ignore[override] # takes data of all policies
        self, rollout: MultiRollout, running: dict[str, StateDict],
    ) -> dict[str, object]:
        """Return the moments for the normalizers of all policies, by `policy/name`."""
        return joined({policy: self.algorithms[policy].moments_of(part, running.setdefault(policy, {}))
                       for policy, part in rollout.parts.items()})

    # Learning

    def batches(self, storage: MultiAgentStorage) -> Iterator[MultiBatch]:  # type: ignore[override] # several policies
        """Yield a batch for each update."""
        return storage.join({
            policy: algo.batches(storage.to_learn_from(policy)) for policy, algo in self.algorithms.items()})

    @override
    def prepare_batch(self, batch: MultiBatch) -> MultiBatch:
        """Return the batch after the algorithm of each policy has prepared its part."""
        return dataclasses.replace(batch, parts={
            policy: self.algorithms[policy].prepare_batch(part) for policy, part in batch.parts.items()})

    @override
    def compute_gradients(  # type: ignore[override] # takes data of all policies
        self, batch: MultiBatch,
    ) -> tuple[list[Tensor | None], MetricsDict]:
        """Compute the gradients of all policies.

        Returns:
            The gradient of each policy, (P,) or None; and the statistics. With replay, the statistics contain the
            absolute TD errors as `errors`, in the order of `batch.ids`; errors of policies without a gradient are NaN.
        """
        vectors: list[Tensor | None] = []
        info: MetricsDict = {}
        errors: list[Tensor] = []
        for policy, algo in self.algorithms.items():
            part = batch.parts.get(policy)
            vector = None
            if part is not None and part.num_samples:
                found: MetricsDict = {}
                if self._trainable[policy]:
                    gradients, found = algo.compute_gradients(part)  # type: ignore[arg-type] # `part` fits `algo`
                    vector = gradients[0] if len(gradients) == 1 else torch.cat(gradients)
                if batch.ids is not None:
                    errors.append(found.pop("errors", torch.full((part.num_samples,), math.nan)))
                info.update({f"{name}{SEPARATOR}{policy}": value for name, value in found.items()})
            vectors.append(vector)
        self._gradients = vectors
        return vectors, info if batch.ids is None else {**info, "errors": torch.cat(errors)}

    @property
    def gradient_sizes(self) -> list[int]:
        """The number P of scalar parameters of each policy."""
        return [sum(algo.gradient_sizes) for algo in self.algorithms.values()]

    def apply_gradients(  # type: ignore[override] # a gradient per policy
        self, gradients: list[Tensor | None] | None = None,
    ) -> dict[str, float]:
        """Take one optimizer step for each policy that has a gradient.

        Args:
            gradients: The gradient of each policy, (P,) or None; by default, the gradients that the latest
                call of `compute_gradients` returned.

        Raises:
            CallOrderError: `gradients` is None, and `compute_gradients` was not called before.
            NonFiniteUpdateError: A gradient contains NaN or infinity; no policy was changed.
        """
        vectors: list[Tensor | None] = self.last_gradients() if gradients is None else gradients
        for policy, vector in zip(self.algorithms, vectors, strict=True):
            if vector is not None and not math.isfinite(norm := float(torch.linalg.vector_norm(vector))):
                raise NonFiniteUpdateError(f"the norm of the gradient of {policy!r} is {norm}; the update was skipped")
        info: dict[str, float] = {}
        for (policy, algo), vector in zip(self.algorithms.items(), vectors, strict=True):
            if vector is not None:
                own = algo.apply_gradients(list(torch.split(vector, algo.gradient_sizes)))
                info.update({f"{name}{SEPARATOR}{policy}": value for name, value in own.items()})
        return info

    # Parameters

    def update_algorithm_parameter(self, name: str, value: object) -> None:
        """Set a parameter: `policy/name` for one policy, or `name` for all policies that have a parameter `name`.

        `policy/trainable` (True or False) determines whether the policy learns.

        Raises:
            UnknownParameterError: No policy has such a parameter.
            ConfigError: A policy does not allow the value, or no policy would learn; nothing was changed.
        """
        found = [policy for policy in self.algorithms if name.startswith(policy + SEPARATOR)]
        own = name[len(found[0]) + 1:] if found else name
        if own == TRAINABLE:
            if not isinstance(value, (bool, int, float)) or value not in (0, 1):
                raise ConfigError(f"{name} must be True or False, got {value!r}")
            trainable = {**self._trainable, **dict.fromkeys(found or self.algorithms, float(value))}
            if not any(trainable.values()):
                raise ConfigError(f"{name}={value!r} would leave no trainable policy; keep at least one trainable")
            self._trainable = trainable
            return
        if not _update([self.algorithms[policy] for policy in found or self.algorithms], own, value):
            raise UnknownParameterError(
                f"no policy has a parameter {name!r} that can change; use {', '.join(self.updatable)}")

    @property
    def updatable(self) -> list[str]:
        """Names of the parameters that can change during training."""
        return [f"{policy}{SEPARATOR}{name}"
                for policy, algo in self.algorithms.items() for name in (*algo.updatable, TRAINABLE)]

    @property
    def parameters(self) -> dict[str, float]:
        """The current values of the parameters of all policies, by `policy/name`."""
        return joined({policy: {**algo.parameters, TRAINABLE: self._trainable[policy]}
                       for policy, algo in self.algorithms.items()})

    @parameters.setter
    def parameters(self, values: Mapping[str, float]) -> None:
        trainable = {}
        for policy, algo in self.algorithms.items():
            own = own_names(values, policy)
            trainable[policy] = own.pop(TRAINABLE)
            algo.parameters = own
        self._trainable = trainable

    @property
    def schedules(self) -> dict[str, Schedule]:  # type: ignore[override] # named by policy
        """The parameter schedules of all policies, by `policy/name`."""
        return joined({policy: algo.schedules for policy, algo in self.algorithms.items()})

    @override
    def follow_schedules(self, env_steps: int, target_steps: int) -> dict[str, float]:
        """Set the scheduled parameters of all policies, and return their values by `policy/name`."""
        return joined({
            policy: algo.follow_schedules(env_steps, target_steps) for policy, algo in self.algorithms.items()})

    def _load_parameters(self, saved: Mapping[str, float]) -> None:
        """Restore saved parameters of all policies; raise `WeightsError` if they do not fit."""
        if unknown := [name for name in saved if name.partition(SEPARATOR)[0] not in self.algorithms]:
            raise WeightsError(f"the state has the parameters {unknown}, but the policies are {list(self.algorithms)}")
        super()._load_parameters(saved)

    def _may_be_none(self, name: str) -> bool:
        policy, _, own = name.partition(SEPARATOR)
        return self.algorithms[policy]._may_be_none(own)

    # States

    @override
    def reseed(self, seed: int) -> None:
        """Reset the random generators of all policies."""
        for index, algo in enumerate(self.algorithms.values()):
            algo.reseed(derive_seed(seed, Stream.ACTING, index))

    @override
    def learning_state(self) -> dict[str, Tensor]:
        """Return the learning states of all policies."""
        return joined({policy: algo.learning_state() for policy, algo in self.algorithms.items()})

    @override
    def load_learning_state(self, state: Mapping[str, Tensor | np.ndarray]) -> None:
        """Copy a `learning_state()` into the algorithms of all policies."""
        for policy, algo in self.algorithms.items():
            algo.load_learning_state(own_names(state, policy))

    @override
    def state_dict(self) -> StateDict:
        """Return the states of all policies, and whether each policy is trainable."""
        return {"policies": {policy: algo.state_dict() for policy, algo in self.algorithms.items()},
                TRAINABLE: dict(self._trainable)}

    @override
    def load_state_dict(self, state: StateDict) -> None:
        for policy, algo in self.algorithms.items():
            algo.load_state_dict(state["policies"][policy])
        self._trainable = dict(state[TRAINABLE])

    @override
    def acting_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of the acting states of all policies."""
        for policy, algo in self.algorithms.items():
            for name, tensor in algo.acting_tensors():
                yield f"{policy}{SEPARATOR}{name}", tensor


def _update(algorithms: list[Algorithm], name: str, value: object) -> bool:
    """Set a parameter of all algorithms that have it, or of none if one refuses it; return whether any has it."""
    before = [(algo, algo.options, algo.schedules, algo.parameters) for algo in algorithms]  # updates replace these
    is_known = False
    for algo in algorithms:
        try:
            algo.update_algorithm_parameter(name, value)
            is_known = True
        except UnknownParameterError:  # noqa: PERF203 - another policy may have this parameter
            continue
        except ConfigError:
            for changed, options, schedules, parameters in before:
                changed.options, changed.schedules, changed.parameters = options, schedules, parameters
            raise
    return is_known


def _problems_of(policy: str, factory: Factory[Algorithm]) -> Iterator[str]:
    """Yield an error text for each option of a policy's algorithm that cannot be used with several policies."""
    options = factory.options
    if getattr(options, "target_kl", None) is not None:
        yield (f"target_kl={options.target_kl} of policy {policy!r} would end the updates from a rollout for all "
               "policies; leave target_kl out")
    if getattr(options, "intrinsic_reward", None) is not None:
        yield (f"intrinsic_reward={options.intrinsic_reward!r} of policy {policy!r} is for a single policy; leave "
               "intrinsic_reward out")
    if hasattr(options, "num_mini_batch") and getattr(options, "mini_batch_size", None) is not None:
        yield (f"mini_batch_size={options.mini_batch_size} of policy {policy!r} would give the policies different "
               "numbers of updates, but they are updated together; set num_mini_batch")
