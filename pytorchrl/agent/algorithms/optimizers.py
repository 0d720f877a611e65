"""Optimizers, each of which updates one flat parameter vector. P = number of scalars in the vector."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from pytorchrl.agent.data import map_tensors
from pytorchrl.agent.options import Options, option
from pytorchrl.agent.transfers import cpu_copy
from pytorchrl.errors import ConfigError, Problem
from pytorchrl.support.untyped import StateDict
from pytorchrl.support.work import Work

WORK = Work("optimizer")
OPTIMIZERS = ("adam", "adamw", "radam", "sgd", "rmsprop", "rmsprop_tf")
OPTIMIZER_HELP = (
    "Optimizer: one of these names, a class of torch.optim, or a function of params and lr that returns an optimizer.")
_ADAM_BETA2 = 0.999
_SHORTEST_AVERAGE = 5
# The moments of a parameter whose gradient stays 0, such as a weight of a dead ReLU unit, decay to subnormal numbers.
# Intel processors compute with those up to 17 times as slowly. A number below 1e-35 is therefore set to 0 every 64
# steps; in that time, a decay of 0.9 makes it no smaller than 1e-38, the smallest normal number. With a smaller decay,
# it is subnormal for a few steps, and then 0.
_NEGLIGIBLE, _STEPS_PER_CLEANING = 1e-35, 64


class VectorOptimizer(ABC):
    """An optimizer of one vector of P parameters."""

    @abstractmethod
    def step(self, params: Tensor, gradient: Tensor, lr: float, scale: float) -> None:
        """Update `params` (P,) in place with the gradient `scale * gradient`, without changing `gradient` (P,)."""

    @abstractmethod
    def state_dict(self) -> StateDict:
        """Return a copy of the optimizer's state: CPU tensors and plain values."""

    @abstractmethod
    def load_state_dict(self, state: StateDict) -> None:
        """Restore the `state_dict()` of an optimizer of the same kind and size."""


OPTIONS_OF = MappingProxyType({
    "adam_eps": ("adam", "adamw", "radam"), "adam_beta1": ("adam", "adamw", "radam"), "weight_decay": ("adamw",),
    "momentum": ("sgd",),
    "rmsprop_eps": ("rmsprop", "rmsprop_tf"),
    "rmsprop_decay": ("rmsprop", "rmsprop_tf")})
"""The names of the optimizers that use each setting. The keys are names of options."""


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions(Options):
    """The optimizer of an algorithm, and its settings."""

    optimizer: str | Callable[..., Optimizer] = option("adam", help=OPTIMIZER_HELP, choices=OPTIMIZERS)
    adam_eps: float = option(
        1e-5, help="Epsilon of Adam, AdamW and RAdam, added outside the square root.", low=0.0, exclusive=True)
    adam_beta1: float = option(
        0.9, help="Decay of the first moment of Adam, AdamW and RAdam.", low=0.0, high=0.999)
    weight_decay: float = option(
        0.01, help="Weight decay of AdamW: each step subtracts this share of the parameters, times the learning "
                   "rate.", low=0.0)
    momentum: float = option(
        0.0, help="Momentum of SGD: the factor by which the previous step is multiplied before the gradient is "
        "added.", low=0.0, high=1.0)
    rmsprop_eps: float = option(1e-5, help="Epsilon of RMSProp.", low=0.0, exclusive=True)
    rmsprop_decay: float = option(0.99, help="Decay of RMSProp's mean square.", low=0.0, high=1.0)

    def __post_init__(self) -> None:
        """Refuse an optimizer that cannot update a flat vector."""
        super().__post_init__()
        if not isinstance(self.optimizer, str):
            check_optimizer(self.optimizer)

    def contradictions(self) -> Iterator[Problem]:
        """Refuse options that the optimizer does not use."""
        yield from super().contradictions()
        for name, kinds in OPTIONS_OF.items():
            if self.optimizer not in kinds:
                needs = f"optimizer={' or '.join(map(repr, kinds))}, got optimizer={self.optimizer!r}"
                yield from self._without_effect((name,), needs, "optimizer")


def make_optimizer(like: Tensor, options: OptimizerOptions) -> VectorOptimizer:
    """Return the optimizer of `options` for vectors with the shape, dtype and device of `like` (P,).

    A name selects a `FlatOptimizer`; a function that returns a torch optimizer is wrapped in a `TorchOptimizer`.
    """
    kind = options.optimizer
    return FlatOptimizer(kind, like, options) if isinstance(kind, str) else TorchOptimizer(kind, like)


def check_optimizer(make: Callable[..., Optimizer]) -> None:
    """Raise `ConfigError` unless `make(params, lr=...)` returns an optimizer that can update a flat vector."""
    like = torch.zeros(2)
    try:
        TorchOptimizer(make, like).step(like, torch.ones(2), 0.1, 1.0)
    except Exception as error:
        raise ConfigError(f"optimizer must be one of {list(OPTIMIZERS)}, a class of torch.optim, or a function of "
                          "params and lr that makes an optimizer, such as functools.partial(torch.optim.NAdam, "
                          f"betas=(0.9, 0.99)); {make!r} fails with {error!r}") from error


class FlatOptimizer(VectorOptimizer):
    """Optimizer that updates one vector in place by Adam and its variants, SGD or RMSProp; its moments are tensors."""

    def __init__(self, name: str, like: Tensor, settings: OptimizerOptions) -> None:
        """Allocate the moments for vectors with the shape, dtype and device of `like`.

        Args:
            name: "adam" (Kingma & Ba 2015), "adamw" (Loshchilov & Hutter 2019), "radam" (Liu et al. 2020), "sgd" (with
                momentum if `momentum` is not 0), "rmsprop" (epsilon outside the root, initial mean square 0), or
                "rmsprop_tf" (as in TensorFlow: epsilon inside the root, initial mean square 1).
            like: Example vector, (P,) float32.
            settings: Settings of all optimizers; only those of the optimizer `name` are used.
        """
        self.name, self._is_adam = name, name in ("adam", "adamw", "radam")
        self._eps = settings.adam_eps if self._is_adam else settings.rmsprop_eps
        self._betas = (
            (settings.adam_beta1, _ADAM_BETA2) if self._is_adam else (settings.momentum, settings.rmsprop_decay))
        self._weight_decay = settings.weight_decay if name == "adamw" else 0.0
        self._scratch = torch.empty_like(like)
        self._count = torch.zeros((), device=like.device)  # `num_steps` as a tensor, for torch's Adam kernel
        self.num_steps = 0
        self.moments: dict[str, Tensor] = {}
        if self._is_adam or (name == "sgd" and settings.momentum):
            self.moments["mean"] = torch.zeros_like(like)
        if name != "sgd":
            self.moments["mean_square"] = torch.ones_like(like) if name == "rmsprop_tf" else torch.zeros_like(like)

    @override
    def step(self, params: Tensor, gradient: Tensor, lr: float, scale: float) -> None:
        self.num_steps += 1
        if self.num_steps % _STEPS_PER_CLEANING == 0:
            for moment in self.moments.values():
                moment.copy_(F.hardshrink(moment, _NEGLIGIBLE))
        mean_decay, square_decay = self._betas
        if self.name == "sgd":
            if not self.moments:
                params.add_(gradient, alpha=-lr * scale)
                return
            params.add_(self.moments["mean"].mul_(mean_decay).add_(gradient, alpha=scale), alpha=-lr)
            return
        square = self.moments["mean_square"]
        if self._is_adam:
            scaled = gradient if scale == 1.0 else torch.mul(gradient, scale, out=self._scratch)
            if self.name == "radam":
                self._rectified_step(params, scaled, lr)
                return
            # This kernel of `torch.optim.AdamW` (with fused=True) reads and writes each vector once. Without weight
            # decay, AdamW equals Adam.
            torch._fused_adamw_(
                [params], [scaled], [self.moments["mean"]], [square], [], [self._count.fill_(self.num_steps)],
                lr=lr, beta1=mean_decay, beta2=square_decay, weight_decay=self._weight_decay, eps=self._eps,
                amsgrad=False, maximize=False)
            return
        square.mul_(square_decay).addcmul_(gradient, gradient, value=(1.0 - square_decay) * scale * scale)
        if self.name == "rmsprop":
            params.addcdiv_(gradient, torch.sqrt(square, out=self._scratch).add_(self._eps), value=-lr * scale)
        else:
            root = torch.add(square, self._eps, out=self._scratch).sqrt_()
            params.addcdiv_(gradient, root, value=-lr * scale)

    def _rectified_step(self, params: Tensor, gradient: Tensor, lr: float) -> None:
        """Take a step of RAdam: Liu et al. 2020, algorithm 2.

        Until rho, the length of the average behind the second moment, exceeds 5, as in torch, the step is that of SGD
        with momentum.
        """
        (mean_decay, square_decay), t = self._betas, self.num_steps
        mean = self.moments["mean"].lerp_(gradient, 1 - mean_decay)
        square = self.moments["mean_square"].mul_(square_decay).addcmul_(gradient, gradient, value=1 - square_decay)
        lr = lr / (1 - mean_decay**t)
        share = 1 - square_decay**t
        longest = 2 / (1 - square_decay) - 1
        rho = longest - 2 * t * square_decay**t / share
        if rho <= _SHORTEST_AVERAGE:
            params.add_(mean, alpha=-lr)
            return
        rectification = ((rho - 4) * (rho - 2) * longest / ((longest - 4) * (longest - 2) * rho)) ** 0.5
        root = torch.sqrt(square, out=self._scratch).add_(self._eps)
        params.addcdiv_(mean, root, value=-lr * rectification * share**0.5)

    @override
    def state_dict(self) -> dict[str, Tensor]:
        """Return the number of steps, and CPU copies of the moments."""
        state = {name: cpu_copy(moment) for name, moment in self.moments.items()}
        return {**state, "num_steps": torch.tensor(self.num_steps)}

    @override
    def load_state_dict(self, state: StateDict) -> None:
        for name, moment in self.moments.items():
            moment.copy_(state[name])
        self.num_steps = int(state["num_steps"])


class TorchOptimizer(VectorOptimizer):
    """A `torch.optim.Optimizer` that updates one vector.

    The optimizer sees all parameters of a group as one tensor (P,), so it cannot treat layers separately.
    """

    def __init__(self, make: Callable[..., Optimizer], like: Tensor) -> None:
        """Build the optimizer for vectors with the shape, dtype and device of `like`.

        Args:
            make: Function that returns the optimizer; it is called with a list of one parameter, and with `lr`.
            like: Example vector, (P,) float32.
        """
        self._param = nn.Parameter(like.detach())
        self._gradient = torch.empty_like(like)
        self._optimizer = make([self._param], lr=1e-3)
        if not isinstance(self._optimizer, Optimizer):
            raise TypeError(f"it returns {self._optimizer!r}")

    @override
    def step(self, params: Tensor, gradient: Tensor, lr: float, scale: float) -> None:
        self._param.data = params
        self._param.grad = torch.mul(gradient, scale, out=self._gradient)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()

    @override
    def state_dict(self) -> StateDict:
        return _on_cpu(self._optimizer.state_dict())

    @override
    def load_state_dict(self, state: StateDict) -> None:
        self._optimizer.load_state_dict(_on_cpu(dict(state)))  # a copy, because torch keeps references to the state


def _on_cpu(state: StateDict) -> StateDict:
    """Return a copy of a state, with its tensors on the CPU."""
    return map_tensors(state, lambda leaf: cpu_copy(leaf) if isinstance(leaf, Tensor) else leaf)
