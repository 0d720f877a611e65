"""Optimizers, each of which updates one flat parameter vector. P = number of scalars in the vector."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from pytorchrl.agent.data import map_tensors
from pytorchrl.agent.transfers import cpu_copy
from pytorchrl.errors import ConfigError
from pytorchrl.support.untyped import StateDict
from pytorchrl.support.work import Work

WORK = Work("optimizer")
OPTIMIZERS = ("adam", "adamw", "sgd", "rmsprop", "rmsprop_tf")
OPTIMIZER_HELP = (
    "Optimizer: one of these names, a class of torch.optim, or a function of params and lr that returns an optimizer.")
_ADAM_BETA2 = 0.999
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


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """Settings of the optimizers that are selected by name."""

    adam_eps: float
    """Epsilon of Adam and AdamW, added to the square root of the second moment."""
    adam_beta1: float
    """Decay of the first moment of Adam and AdamW."""
    weight_decay: float
    """Weight decay of AdamW: each step first multiplies the parameters by 1 - lr * weight_decay."""
    momentum: float
    """Momentum of SGD: each step is lr * m, where m is the gradient plus `momentum` times the previous m."""
    rmsprop_eps: float
    """Epsilon of RMSProp, added to the square root of the mean square or, for "rmsprop_tf", inside the root."""
    rmsprop_decay: float
    """Decay of RMSProp's mean square."""


OPTIONS_OF = MappingProxyType({
    "adam_eps": ("adam", "adamw"), "adam_beta1": ("adam", "adamw"), "weight_decay": ("adamw",), "momentum": ("sgd",),
    "rmsprop_eps": ("rmsprop", "rmsprop_tf"),
    "rmsprop_decay": ("rmsprop", "rmsprop_tf")})
"""The names of the optimizers that use each setting. The keys are settings, which are also options of algorithms."""


def make_optimizer(kind: str | Callable[..., Optimizer], like: Tensor, settings: OptimizerSettings) -> VectorOptimizer:
    """Return an optimizer for vectors with the shape, dtype and device of `like` (P,).

    A name selects a `FlatOptimizer`; a function that returns a torch optimizer is wrapped in a `TorchOptimizer`.
    """
    return FlatOptimizer(kind, like, settings) if isinstance(kind, str) else TorchOptimizer(kind, like)


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
    """Optimizer that updates one vector in place by Adam, AdamW, SGD or RMSProp; its moments are plain tensors."""

    def __init__(self, name: str, like: Tensor, settings: OptimizerSettings) -> None:
        """Allocate the moments for vectors with the shape, dtype and device of `like`.

        Args:
            name: "adam" (Kingma & Ba 2015), "adamw" (Loshchilov & Hutter 2019), "sgd" (with momentum if `momentum` is
                not 0), "rmsprop" (epsilon outside the root, initial mean square 0), or "rmsprop_tf" (as in TensorFlow:
                epsilon inside the root, initial mean square 1).
            like: Example vector, (P,) float32.
            settings: Settings of all optimizers; only those of the optimizer `name` are used.
        """
        self.name, self._is_adam = name, name in ("adam", "adamw")
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
