"""The base class of algorithms, which manages parameter groups, optimizer steps, schedules and saved states.

E = environments, P = scalars of a group's parameter vector, H = size of a network's memory.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from pytorchrl.agent.actors.normalizers import discounted_sums
from pytorchrl.agent.algorithms.optimizers import OptimizerOptions, make_optimizer
from pytorchrl.agent.data import ActingStep, Arrays, Batch, BatchStorage, DataKind, Obs, RolloutData, TensorActing
from pytorchrl.agent.env.spaces import LEAF_SPACES
from pytorchrl.agent.fit import check_actor
from pytorchrl.agent.flat import FlatParameters
from pytorchrl.agent.modes import NetworkMode
from pytorchrl.agent.moments import Moments
from pytorchrl.agent.names import checked_names
from pytorchrl.agent.options import AgentOptions, Factory, Part, build_options, option
from pytorchrl.agent.recursion import as_values
from pytorchrl.agent.seeding import Stream, derive_seed, torch_generator
from pytorchrl.agent.transfers import cpu_copy
from pytorchrl.agent.updatable import Updatable
from pytorchrl.errors import CallOrderError, NonFiniteUpdateError, WeightsError
from pytorchrl.support.tracebacks import brief_errors
from pytorchrl.support.untyped import BatchOfKind, DataOfAgent, MetricsDict, StateDict, UserPart

if TYPE_CHECKING:
    from typing_extensions import Self

ActOnDevice = Callable[[Obs, Obs, Tensor], TensorActing]
"""A function of observations, memory states and starts of episodes, as in `Algorithm.acting_step`, but of tensors."""


class Algorithm(Part, Updatable, ABC):
    """The base class of algorithms, which choose actions, compute gradients from batches and update weights.

    `groups` contains the trained parameters; each group has one vector and one optimizer. The learning rate of a group
    is the option `lr_<group>` if there is one, and otherwise `lr`.
    """

    home: ClassVar[str] = "algorithm"

    @dataclass(frozen=True, kw_only=True)
    class Options(OptimizerOptions):
        """Options of every algorithm."""

        max_grad_norm: float | None = option(
            0.5, help="Largest global norm of a gradient; None means no limit.", low=0.0, exclusive=True,
            updatable=True)
        gamma: float = option(0.99, help="Discount of rewards.", low=0.0, high=1.0)

    undecayed_groups: ClassVar[tuple[str, ...]] = ()
    """Parameter groups without weight decay, because they are not weights of networks."""
    learns_from: DataKind
    """The kind of data that the algorithm learns from; the storage must provide this kind.

    Each class of algorithm declares or inherits this attribute.
    """
    nearest_with_lag: ClassVar[str | None] = None
    """For an algorithm that needs data of its newest policy, the most similar algorithm that accepts older data."""
    actor_class: ClassVar[type[nn.Module]]
    """The class of actors that the algorithm can train; subclasses of it are also supported.

    Each class of algorithm declares or inherits this attribute.
    """
    actor_options: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    """The supported values of options of the actor, by name; error messages suggest the first value. Other options
    may have any value."""
    action_spaces: ClassVar[tuple[type[gym.Space[object]], ...]] = LEAF_SPACES
    """Kinds of action space that the algorithm supports if its class of actor also supports them."""
    advantage_normalization: str = "none"
    num_epochs: int = 1
    """Number of uses of each batch; an algorithm without this option uses it once."""
    num_mini_batch: int = 1
    """Into how many minibatches each pass divides a batch; an algorithm without this option does not divide it."""
    loss_reduction: ClassVar[str] = "mean"
    """Whether the loss is the "mean" or the "sum" over the valid samples; gradients of microbatches are combined
    accordingly."""
    actor: UserPart
    version: int = 0
    """Number of updates that led to the current weights, which the worker sets."""
    applies_at_once: bool = False
    """Whether each gradient is applied before the next one is computed, as in central schemes. If it is True,
    `compute_gradients` may return zeros for groups that the next update does not change."""
    _gradients: DataOfAgent = None  # see `last_gradients`
    _known_norms: Sequence[tuple[Tensor, int, float]] = ()  # see `_keep_norms`

    @classmethod
    @brief_errors
    @checked_names
    def create_factory(cls, **options: object) -> Factory[Self]:
        """Return a factory of this algorithm; raise `ConfigError` for an unknown option or an invalid value."""
        return Factory(cls, build_options(cls, options))

    def __init__(self, options: Algorithm.Options, *, actor: nn.Module, seed: int, device: str = "cpu") -> None:
        """Build the algorithm; factories from `create_factory` call this constructor.

        Args:
            options: Checked options.
            actor: The actor to train.
            seed: Seed of the random numbers for actions.
            device: Device of the actor.

        Raises:
            ConfigError: The algorithm cannot train this actor, or its options contradict the actor's options.
        """
        of_actor = getattr(actor, "options", None)
        check_actor(type(self), type(actor), of_actor)
        self.refuse_contradiction(AgentOptions(
            algorithm=options, actor=of_actor, has_memory=getattr(actor, "is_recurrent", None)))
        self.options = options
        self.actor, self.device = actor, torch.device(device)
        self.mode = NetworkMode(actor)
        self.generator = torch_generator(derive_seed(seed, Stream.ACTING), self.device)
        self.groups = {name: FlatParameters(params) for name, params in self.trained_parameters().items()}
        undecayed = options.replaced(weight_decay=0.0)
        self._optimizers = {
            name: make_optimizer(group.data, undecayed if name in self.undecayed_groups else options)
            for name, group in self.groups.items()}
        self.gamma: float = options.gamma
        self._start_parameters()

    def trained_parameters(self) -> dict[str, dict[str, nn.Parameter]]:
        """Return the trained parameters by group and name. By default, one group `all` contains all parameters."""
        return {"all": dict(self.actor.named_parameters())}

    # Acting

    def take_place(self, index: int, num_collectors: int) -> None:
        """Tell the algorithm that it acts in collector `index` (from 0) of `num_collectors` in the worker tree.

        An algorithm may then explore differently in each collector. By default, this call has no effect.
        """

    @abstractmethod
    def acting_step(
        self, obs: Arrays, rhs: Arrays, done: np.ndarray, deterministic: bool = False, mask: np.ndarray | None = None,
    ) -> ActingStep:
        """Choose the actions of E environments.

        Args:
            obs: Observations, a mapping from leaf to (E, ...); never changed.
            rhs: The memory of each network before these observations, (E, H), where H is the size of the memory.
            done: (E,) bool, whether an observation is the first of its episode.
            deterministic: Whether to choose the best actions instead of sampling or exploring.
            mask: (E, n) bool, true where an action is allowed; None allows all actions.

        Returns:
            Actions; the memory after these observations; and, in `other`, more values to store with the transitions.
        """

    @property
    def act_on_device(self) -> ActOnDevice | None:
        """A function that chooses the same actions as `acting_step`, from tensors on the algorithm's device.

        Its result is on the device, too; the host reads nothing. None if only `acting_step` can choose actions.
        """
        return None

    @abstractmethod
    def finish_rollout(self, rollout: RolloutData) -> None:
        """Add to a rollout the values that must be computed with the weights that chose its actions.

        The collector calls this method once for each rollout, before the weights change.
        """

    def moments_of(self, rollout: RolloutData, running: StateDict) -> dict[str, object]:
        """Return the moments of a rollout for the actor's normalizers.

        Args:
            rollout: The rollout; only its valid steps are counted.
            running: State that the collector keeps between rollouts. If rewards are normalized, its entry `returns`
                (E,) contains the discounted return G of each environment. This method updates G in place for each step
                of the rollout: G <- gamma * G + r.

        Returns:
            A tuple (count, mean, M2) for each normalizer, by name. M2 is the sum of squared deviations from the mean.
        """
        if self.actor.reward_moments is None:
            return dict(self.actor.moments_of(rollout))
        if "returns" not in running:
            zeros = rollout.reward.new_zeros(rollout.num_envs, dtype=torch.float64)
            running["returns"] = as_values(zeros)
        returns = discounted_sums(rollout, self.gamma, running["returns"])
        return dict(self.actor.moments_of(rollout, torch.as_tensor(returns)))

    def take_moments(self) -> dict[str, Moments]:
        """Return the moments of a new train batch, which only learners compute; by default, there are none."""
        return {}

    def merge_moments(self, found: Mapping[str, Moments]) -> None:
        """Merge the moments of `moments_of` or `take_moments`, exactly once; see `Actor.merge_moments`."""
        self.actor.merge_moments(found)

    # Learning

    @abstractmethod
    def batches(self, storage: BatchStorage) -> Iterator[Batch]:
        """Return the batches that are due after the storage has received new data, one batch for each update."""

    def prepare_batch(self, batch: BatchOfKind) -> BatchOfKind:
        """Compute values that depend on all samples of a batch, such as normalized advantages; return the new batch.

        If gradients are accumulated over parts of a batch, this method is called before the batch is split. By default,
        it returns `batch` itself.
        """
        return batch

    @abstractmethod
    def compute_gradients(self, batch: Batch) -> tuple[list[Tensor], MetricsDict]:
        """Compute the gradient of the loss over a batch's valid samples, without changing any state.

        Returns:
            A flat gradient for each group, (P,) float32, valid until the next call; and the loss and its terms by name,
            to which an algorithm that learns from replay adds the tensor `errors` of TD errors.
            If the loss is not finite, all elements of the gradient are NaN, so `apply_gradients` refuses this gradient
            and every mean over workers that includes this gradient.
        """

    def apply_gradients(self, gradients: list[Tensor] | None = None) -> dict[str, float]:
        """Clip each group's gradient by its global norm, and take an optimizer step for each group that `is_due`.

        Args:
            gradients: One gradient (P,) for each group, averaged over workers; never changed. None means the gradients
                from the latest call of `compute_gradients`.

        Returns:
            `grad_norm` before clipping, and `lr`; if there are several groups, both names end with `_<group>`.

        Raises:
            CallOrderError: `gradients` is None, and `compute_gradients` has not been called yet.
            NonFiniteUpdateError: A gradient contains NaN or infinity; nothing was changed.
        """
        gradients = self.last_gradients() if gradients is None else gradients
        steps = []
        for (name, group), gradient, norm in zip(self.groups.items(), gradients, self.norms_of(gradients), strict=True):
            group.check(gradient)
            if not math.isfinite(norm):
                raise NonFiniteUpdateError(f"the norm of the gradient is {norm}; the update was not made")
            # Gradients of other workers are on the CPU.
            steps.append((name, group, gradient.to(group.data.device), norm))
        limit, info = self.parameters.get("max_grad_norm", math.inf), {}
        for name, group, gradient, norm in steps:
            if not self.is_due(name):
                continue
            lr = self.parameters.get(f"lr_{name}", self.parameters.get("lr", 0.0))
            scale = 1.0 if norm <= limit else limit / (norm + 1e-6)
            frozen = group.frozen()
            self._optimizers[name].step(group.data, gradient, lr, scale)
            group.restore_frozen(frozen)
            suffix = f"_{name}" if len(steps) > 1 else ""
            info[f"grad_norm{suffix}"], info[f"lr{suffix}"] = norm, lr
        return info

    def norms_of(self, gradients: Sequence[Tensor | None]) -> list[float]:
        """Return the Euclidean norm of each gradient that is not None."""
        given = [gradient for gradient in gradients if gradient is not None]
        known = [next((norm for own, version, norm in self._known_norms
                       if own is gradient and own._version == version), None) for gradient in given]
        rest = [torch.linalg.vector_norm(gradient) for gradient, norm in zip(given, known, strict=True) if norm is None]
        measured = iter(torch.stack(rest).tolist() if rest else ())  # a single wait for the device
        return [next(measured) if norm is None else norm for norm in known]

    def _keep_norms(self, gradients: Sequence[Tensor], norms: Sequence[float]) -> None:
        """Keep the norms of gradients, which came from the device together with other numbers, for `norms_of`."""
        # A tensor whose `_version` is the same has not been changed in place.
        self._known_norms = [
            (gradient, gradient._version, norm) for gradient, norm in zip(gradients, norms, strict=True)]

    def last_gradients(self) -> DataOfAgent:
        """Return the gradients from the latest `compute_gradients`; raise `CallOrderError` if there are none."""
        if self._gradients is None:
            raise CallOrderError("apply_gradients() without arguments applies the gradients of the latest "
                                 "compute_gradients(batch), which has not been called yet; call it first, or pass "
                                 "gradients")
        return self._gradients

    @property
    def gradient_sizes(self) -> list[int]:
        """Number of scalars in each vector that `compute_gradients` returns."""
        return [len(group) for group in self.groups.values()]

    def is_due(self, group: str) -> bool:
        """Return whether the next update changes this group; by default, always."""
        return True

    # Parameters that change during training

    def update_algorithm_parameter(self, name: str, value: object) -> None:
        """Set an option that may change during training.

        A number or a new `Schedule` replaces the schedule that the option follows, if there is one.

        Raises:
            UnknownParameterError: There is no such option, or it cannot change.
            ConfigError: The value is not allowed; nothing was changed.
        """
        self._update_option(name, value)

    # States

    def reseed(self, seed: int) -> None:
        """Reset the random generators to the state that they have in a new algorithm with this seed."""
        self.generator.manual_seed(derive_seed(seed, Stream.ACTING))

    def acting_state(self) -> dict[str, Tensor]:
        """Return CPU copies of all tensors that acting needs."""
        return {name: cpu_copy(tensor) for name, tensor in self.acting_tensors()}

    def load_acting_state(self, state: Mapping[str, Tensor | np.ndarray]) -> None:
        """Copy an `acting_state()` or a `state_dict()` of the actor, with tensors or arrays as values, into the actor.

        Target networks, optimizers, schedules and generators do not change.

        Raises:
            WeightsError: Names or shapes do not fit; nothing was changed.
        """
        if state.keys() & self.groups.keys():
            copy_tensors(dict(self.acting_tensors()), state, "acting state")
        else:
            copy_tensors(self.actor.state_dict(), state, "state of the actor")

    def learning_state(self) -> dict[str, Tensor]:
        """Return CPU copies of all tensors that gradients depend on but acting does not, such as target networks."""
        return {name: cpu_copy(tensor) for name, tensor in self._learning_tensors()}

    def load_learning_state(self, state: Mapping[str, Tensor | np.ndarray]) -> None:
        """Copy a `learning_state()` into this algorithm; raise `WeightsError` if it does not fit."""
        copy_tensors(dict(self._learning_tensors()), state, "gradient state")

    def gradient_state(self) -> StateDict:
        """Return everything on which gradients depend: `acting` state, `learning` state and current `parameters`."""
        return {"acting": self.acting_state(), "learning": self.learning_state(), "parameters": dict(self.parameters)}

    def load_gradient_state(self, state: StateDict) -> None:
        """Copy a `gradient_state()` into this algorithm; raise `WeightsError` if it does not fit."""
        self.load_learning_state(state["learning"])
        self.load_acting_state(state["acting"])
        self._load_parameters(state["parameters"])

    def state_dict(self) -> StateDict:
        """Return the state for exact resumption: gradient state, schedules, optimizers and random generator."""
        return {
            "gradient": self.gradient_state(),
            "schedules": self.schedules_state(),
            "optimizers": {name: optimizer.state_dict() for name, optimizer in self._optimizers.items()},
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: StateDict) -> None:
        """Restore a `state_dict()`; raise `WeightsError` if it does not fit."""
        self.load_gradient_state(state["gradient"])
        self.load_schedules(state["schedules"])
        for name, optimizer in self._optimizers.items():
            optimizer.load_state_dict(state["optimizers"][name])
        self.generator.set_state(state["generator"])

    # Helpers

    def _learning_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor of the learning state as (name, tensor), without copying; by default, yield nothing."""
        yield from ()

    def acting_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each parameter vector and each buffer of the acting state as (name, tensor), without copying."""
        for name, group in self.groups.items():
            yield name, group.data
        yield from self.actor.state_buffers().items()


def copy_tensors(live: Mapping[str, Tensor], state: Mapping[str, Tensor | np.ndarray], noun: str) -> None:
    """Copy a state into existing tensors.

    Args:
        live: The tensors to overwrite, by name.
        state: A tensor or array of the same shape for each name. An array may use shared memory, because its values
            are copied.
        noun: The name of the state in error messages.

    Raises:
        WeightsError: Names or shapes do not fit; nothing was changed.
    """
    if live.keys() != state.keys():
        raise WeightsError(f"{noun} has {sorted(state)}, but this actor needs {sorted(live)}; both sides must build "
                           "the same actor")
    for name, tensor in live.items():
        if tensor.shape != state[name].shape:
            raise WeightsError(
                f"{name} of the {noun} has shape {tuple(state[name].shape)}, but this actor needs "
                f"{tuple(tensor.shape)}; both sides must build the same actor")
    with torch.no_grad():
        for name, tensor in live.items():
            value = state[name]
            if isinstance(value, np.ndarray) and tensor.device.type == "cpu":
                np.copyto(tensor.detach().numpy(), value)  # torch would warn about read-only arrays
            else:
                tensor.copy_(torch.as_tensor(np.array(value)) if isinstance(value, np.ndarray) else value)
