"""What every algorithm shares: flat parameter groups, the optimiser step, schedules and states.

E = environments, P = scalars of a group's parameter vector.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pytorchrl.agent.actors.normalisers import discounted_sums
from pytorchrl.agent.algorithms.optimizers import (
    OPTIMIZER_HELP,
    OPTIMIZERS,
    OPTIONS_OF,
    OptimizerSettings,
    check_optimizer,
    make_optimizer,
)
from pytorchrl.agent.data import ActingStep, Arrays, Batch, BatchStorage, DataKind, RolloutData
from pytorchrl.agent.env.spaces import LEAF_SPACES
from pytorchrl.agent.fit import check_actor
from pytorchrl.agent.flat import FlatParameters
from pytorchrl.agent.options import AgentOptions, Factory, Part, build_options, option
from pytorchrl.agent.options import Options as BaseOptions
from pytorchrl.agent.seeding import Stream, derive_seed, torch_generator
from pytorchrl.agent.updatable import Updatable
from pytorchrl.errors import CallOrderError, NonFiniteUpdateError, WeightsError
from pytorchrl.tracebacks import brief_errors

if TYPE_CHECKING:
    from typing_extensions import Self


class Algorithm(Part, Updatable, ABC):
    """Acts, turns batches into gradients, and gradients into better weights.

    What it trains are `groups`, one vector and one optimiser each. The learning rate of a group is the option
    `lr_<group>` if there is one, else `lr`.
    """

    home: ClassVar[str] = "algorithm"

    @dataclass(frozen=True, kw_only=True)
    class Options(BaseOptions):
        """Options of every algorithm."""

        optimizer: str | Callable[..., Optimizer] = option("adam", help=OPTIMIZER_HELP, choices=OPTIMIZERS)
        adam_eps: float = option(1e-5, help="Epsilon outside Adam's root.", low=0.0, exclusive=True)
        weight_decay: float = option(
            0.01, help="Weight decay of AdamW: each step subtracts this share, times the learning rate, of the parameters.", low=0.0)
        momentum: float = option(0.0, help="Momentum of SGD: the share of the previous step in the next one.", low=0.0, high=1.0)
        rmsprop_eps: float = option(1e-5, help="Epsilon of RMSProp.", low=0.0, exclusive=True)
        rmsprop_decay: float = option(0.99, help="Decay of RMSProp's mean square.", low=0.0, high=1.0)
        max_grad_norm: float | None = option(
            0.5, help="Largest global norm of a gradient, None for no limit.", low=0.0, exclusive=True, updatable=True)
        gamma: float = option(0.99, help="Discount.", low=0.0, high=1.0)

        def __post_init__(self) -> None:
            """Refuse an optimiser that cannot update a vector, and settings of optimisers that are not chosen."""
            super().__post_init__()
            if not isinstance(self.optimizer, str):
                check_optimizer(self.optimizer)
            for name, kinds in OPTIONS_OF.items():
                if self.optimizer not in kinds:
                    self._refuse_changed((name,), f"optimizer={' or '.join(map(repr, kinds))}, got optimizer={self.optimizer!r}")

    learns_from: DataKind
    """The kind of data that the algorithm learns from, which its storage must provide. Each class declares or inherits it."""
    actor_class: ClassVar[type[nn.Module]]
    """The class of actor that the algorithm trains, including subclasses. Each class declares or inherits it."""
    actor_options: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Option of the actor -> values that the algorithm supports; errors suggest the first one. Other options may have any value."""
    action_spaces: ClassVar[tuple[type[gym.Space[object]], ...]] = LEAF_SPACES
    """Kinds of action space that the algorithm supports, as far as its class of actor supports them."""
    advantage_normalization: str = "none"
    loss_reduction: ClassVar[str] = "mean"
    """What the loss is over the valid samples of a batch, "mean" or "sum": how gradients of its parts become its own."""
    _gradients: list[Any] | None = None  # of the last `compute_gradients`

    @classmethod
    @brief_errors
    def create_factory(cls, **options: Any) -> Factory[Self]:
        """A factory of this algorithm; raises `ConfigError` for a wrong option."""
        return Factory(cls, build_options(cls, options))

    def __init__(self, options: Any, *, actor: Any, seed: int, device: str = "cpu") -> None:
        """Use `create_factory`.

        Args:
            options: Checked options.
            actor: The actor whose parameters it moves.
            seed: Of the actions drawn.
            device: Where the actor lives.

        Raises:
            ConfigError: The algorithm cannot learn with such an actor, or their options contradict each other.
        """
        of_actor = getattr(actor, "options", None)
        check_actor(type(self), type(actor), of_actor)
        self.refuse_contradiction(AgentOptions(
            algorithm=options, actor=of_actor, has_memory=getattr(actor, "is_recurrent", None)))
        self.options = options
        self.actor, self.device = actor, torch.device(device)
        self.generator = torch_generator(derive_seed(seed, Stream.ACTING), self.device)
        self.groups = {name: FlatParameters(params) for name, params in self.trained_parameters().items()}
        settings = OptimizerSettings(**{name: getattr(options, name) for name in OPTIONS_OF})
        self._optimizers = {name: make_optimizer(options.optimizer, group.data, settings) for name, group in self.groups.items()}
        self.gamma: float = options.gamma
        self._start_parameters()

    def trained_parameters(self) -> dict[str, dict[str, nn.Parameter]]:
        """Group -> name -> parameter; every parameter of the actor in one group, if not overridden."""
        return {"all": dict(self.actor.named_parameters())}

    # Acting

    def take_place(self, index: int, num_collectors: int) -> None:
        """Become collector `index` of `num_collectors`, counted from 0 over the whole tree; most do the same everywhere."""

    @abstractmethod
    def acting_step(
        self, obs: Arrays, rhs: Arrays, done: np.ndarray, deterministic: bool = False, mask: np.ndarray | None = None,
    ) -> ActingStep:
        """Decide for E environments.

        Args:
            obs: Leaf -> (E, ...), only read.
            rhs: Network -> (E, H), the memory before these observations.
            done: (E,) bool, whether an observation is the first of its episode.
            deterministic: Take the best action instead of drawing or exploring.
            mask: (E, n) bool, true where an action is allowed.

        Returns:
            Actions, the memory after, and in `other` what is stored with the transition.
        """

    @abstractmethod
    def finish_rollout(self, rollout: RolloutData) -> None:
        """Complete what was recorded, by the weights that acted. Called once a rollout, in the collector."""

    def moments_of(self, rollout: RolloutData, running: dict[str, Any]) -> dict[str, Any]:
        """What a rollout tells the actor's normalisers.

        Args:
            rollout: Its valid steps count.
            running: The collector's, kept from rollout to rollout: where G <- gamma * G + r stands, (E,).

        Returns:
            Normaliser -> (count, mean, M2).
        """
        if self.actor.reward_moments is None:
            return dict(self.actor.moments_of(rollout))
        returns = discounted_sums(rollout, self.gamma, running.setdefault("returns", np.zeros(rollout.num_envs)))
        return dict(self.actor.moments_of(rollout, torch.from_numpy(returns)))

    # Learning

    @abstractmethod
    def batches(self, storage: BatchStorage) -> Iterator[Batch]:
        """What it learns from once an item of data is in its storage: a batch for each update."""

    def prepare_batch(self, batch: Any) -> Any:
        """What is computed over a batch as a whole, before its parts are differentiated one by one; else the batch."""
        return batch

    @abstractmethod
    def compute_gradients(self, batch: Batch) -> tuple[list[Tensor], dict[str, Any]]:
        """The gradient of the loss over a batch's valid samples, reduced as `loss_reduction` says; changes nothing.

        Returns:
            One flat gradient per group, (P,) float32, valid until the next call; and the loss and its parts. If the
            loss is not finite, the gradient is NaN throughout: it alone, or a mean that it went into, then tells that
            no step is to be made.
        """

    def apply_gradients(self, gradients: list[Tensor] | None = None) -> dict[str, float]:
        """Clip by the global norm of each group and make one optimiser step.

        Args:
            gradients: One (P,) gradient per group, averaged over workers and only read; None takes those of the last
                `compute_gradients`.

        Returns:
            `grad_norm`, before clipping, and `lr`; of several groups with `_<group>` after them.

        Raises:
            CallOrderError: `gradients` is None, and `compute_gradients` was not called yet.
            NonFiniteUpdateError: A gradient holds NaN or infinity; nothing was changed.
        """
        gradients = self.last_gradients() if gradients is None else gradients
        steps = []
        for (name, group), gradient in zip(self.groups.items(), gradients, strict=True):
            group.check(gradient)
            own = gradient.to(group.data.device)  # from workers it comes on the CPU
            norm = float(torch.linalg.vector_norm(own))
            if not math.isfinite(norm):
                raise NonFiniteUpdateError(f"the norm of the gradient is {norm}; the update was not made")
            steps.append((name, group, own, norm))
        limit, info = self.parameters.get("max_grad_norm", math.inf), {}
        for name, group, gradient, norm in steps:
            if not self.is_due(name):
                continue
            lr = self.parameters.get(f"lr_{name}", self.parameters.get("lr", 0.0))
            scale = 1.0 if norm <= limit else limit / (norm + 1e-6)
            self._optimizers[name].step(group.data, gradient, lr, scale)
            mark = f"_{name}" if len(steps) > 1 else ""
            info[f"grad_norm{mark}"], info[f"lr{mark}"] = norm, lr
        return info

    def last_gradients(self) -> list[Any]:
        """Return the gradients of the last `compute_gradients`; raise `CallOrderError` if there was none."""
        if self._gradients is None:
            raise CallOrderError("apply_gradients() without gradients applies those of the last compute_gradients(batch), which "
                                 "was not called yet; call it first, or give gradients")
        return self._gradients

    @property
    def gradient_sizes(self) -> list[int]:
        """Scalars of each vector that `compute_gradients` gives."""
        return [len(group) for group in self.groups.values()]

    def is_due(self, group: str) -> bool:
        """Whether the next update moves this group; always, if not overridden."""
        return True

    # Parameters that change while training

    def update_algorithm_parameter(self, name: str, value: Any) -> None:
        """Set an option that may change while training; a number ends its schedule, a `Schedule` starts one.

        Raises:
            KeyError: There is no such option, or it is fixed.
            ConfigError: The value is not allowed; nothing was changed.
        """
        self._update_option(name, value)

    # States

    def reseed(self, seed: int) -> None:
        """Draw from here on as an algorithm that was just built with this seed."""
        self.generator.manual_seed(derive_seed(seed, Stream.ACTING))

    def acting_state(self) -> dict[str, Tensor]:
        """Copies of what acting needs, on the CPU."""
        return {name: tensor.detach().cpu().clone() for name, tensor in self.acting_tensors()}

    def load_acting_state(self, state: Mapping[str, Tensor | np.ndarray]) -> None:
        """Copy an `acting_state()`, or arrays of it, over the actor; no optimiser, schedule or generator moves.

        Raises:
            WeightsError: Names or shapes do not fit; nothing was changed.
        """
        copy_tensors(dict(self.acting_tensors()), state, "acting state")

    def learning_state(self) -> dict[str, Tensor]:
        """Copies of what computing gradients needs beyond the acting state, on the CPU: target networks and the like."""
        return {name: tensor.detach().cpu().clone() for name, tensor in self._learning_tensors()}

    def load_learning_state(self, state: Mapping[str, Tensor | np.ndarray]) -> None:
        """Copy a `learning_state()`; raises `WeightsError` where it does not fit."""
        copy_tensors(dict(self._learning_tensors()), state, "gradient state")

    def gradient_state(self) -> dict[str, Any]:
        """What computing gradients needs: the `acting` and the `learning` state, and the `parameters` in force."""
        return {"acting": self.acting_state(), "learning": self.learning_state(), "parameters": dict(self.parameters)}

    def load_gradient_state(self, state: Mapping[str, Any]) -> None:
        """Copy a `gradient_state()`; raises `WeightsError` where it does not fit."""
        self.load_learning_state(state["learning"])
        self.load_acting_state(state["acting"])
        self.parameters = dict(state["parameters"])

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on exactly: the `gradient` state, optimiser moments and the acting generator."""
        return {
            "gradient": self.gradient_state(),
            "schedules": self._schedules_state(),
            "optimizers": {name: optimizer.state_dict() for name, optimizer in self._optimizers.items()},
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict()`; raises `WeightsError` where it does not fit."""
        self.load_gradient_state(state["gradient"])
        self._load_schedules(state["schedules"])
        for name, optimizer in self._optimizers.items():
            optimizer.load_state_dict(state["optimizers"][name])
        self.generator.set_state(state["generator"])

    # Helpers

    def _learning_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, live tensor) of the learning state; none where the acting state is all."""
        yield from ()

    def acting_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and live tensor of all groups and of the actor's buffers, which together are the acting state."""
        for name, group in self.groups.items():
            yield name, group.data
        yield from self.actor.state_buffers().items()


def copy_tensors(mine: Mapping[str, Tensor], state: Mapping[str, Tensor | np.ndarray], what: str) -> None:
    """Copy a part of a state over live tensors.

    Args:
        mine: Name -> live tensor.
        state: Name -> tensor, or array, of the same shape. An array may lie in memory that others read: it is copied once
            and never aliased.
        what: What the part is called.

    Raises:
        WeightsError: Names or shapes do not fit; nothing was changed.
    """
    if mine.keys() != state.keys():
        raise WeightsError(f"{what} has {sorted(state)}, this actor needs {sorted(mine)}")
    for name, tensor in mine.items():
        if tensor.shape != state[name].shape:
            raise WeightsError(
                f"{name} of the {what} has shape {tuple(state[name].shape)}, this actor needs "
                f"{tuple(tensor.shape)}; both sides must build the same actor")
    with torch.no_grad():
        for name, tensor in mine.items():
            value = state[name]
            if isinstance(value, np.ndarray) and tensor.device.type == "cpu":
                np.copyto(tensor.detach().numpy(), value)  # torch does not look at arrays that cannot be written
            else:
                tensor.copy_(torch.as_tensor(np.array(value)) if isinstance(value, np.ndarray) else value)
