"""The mode of networks, training or evaluation, which dropout and batch normalization obey.

There is one rule. Networks are in evaluation mode: in collection, in central inference, in evaluations, in `act`, in
exported policies, and in the losses of on-policy algorithms, so that all of them compute the same outputs. There is one
exception: while an algorithm that learns from replay computes its gradients, the networks that it trains are in
training mode. Its target networks stay in evaluation mode, except for the dropout of the option `critic_dropout`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from pytorchrl.agent.seeding import global_draws, torch_generator

DROPOUT: type[nn.Module] = _DropoutNd
NORMALIZATION: type[nn.Module] = _NormBase
"""Batch normalization and similar layers, which learn moments of their inputs in training mode."""
# The attribute of an actor with the modules that were in training mode when its first algorithm was built.
_MODULES = "_modules_in_training_mode"
# Modules of these packages compute the same outputs in both modes, except for modules of the types in `_EXCEPTIONS`.
_SAME_IN_BOTH = ("pytorchrl.", *(f"torch.nn.modules.{name}" for name in (
    "activation", "container", "conv", "flatten", "linear", "normalization", "pooling", "sparse")))
_EXCEPTIONS = (nn.MultiheadAttention, nn.RReLU)


class NetworkMode:
    """Puts an actor into evaluation mode, and for gradients of an algorithm with replay into training mode.

    A module that is in evaluation mode when the actor's first algorithm is built, such as a frozen network, always
    stays in it.

    Args:
        actor: The actor.
    """

    def __init__(self, actor: nn.Module) -> None:
        modules: list[nn.Module] | None = getattr(actor, _MODULES, None)
        if modules is None:
            modules = [module for module in actor.modules() if module.training and _depends_on_mode(module)]
            setattr(actor, _MODULES, modules)
        self._modules = list(modules)
        actor.eval()
        for module in actor.modules():
            if isinstance(module, nn.RNNBase) and not module.dropout:
                module.training = True  # cuDNN cannot differentiate its networks in evaluation mode
        self._draws = not all(isinstance(module, NORMALIZATION) for module in modules)
        self._buffers = [buffer for module in modules for buffer in module.buffers(recurse=False)]
        self._before: list[Tensor] | None = None  # the buffers before the first gradient since the last update

    def also(self, modules: Iterable[nn.Module]) -> None:
        """Put more modules into training mode for gradients: layers of target networks that have no buffers."""
        self._modules += modules

    def layers(self, kind: type[nn.Module]) -> list[str]:
        """Return the names of the types of layers of this kind that training mode would affect."""
        return sorted({type(module).__name__ for module in self._modules if isinstance(module, kind)})

    def learning(self, generator: torch.Generator) -> AbstractContextManager[None]:
        """Put the trained networks into training mode within a `with` block.

        Args:
            generator: Generator of the seed for random numbers that layers draw on the CPU, such as those of dropout.
        """
        return self._learning(generator) if self._modules else nullcontext()

    @contextmanager
    def _learning(self, generator: torch.Generator) -> Iterator[None]:
        if self._before is None:
            self._before = [buffer.clone() for buffer in self._buffers]
        for module in self._modules:
            module.training = True
        try:
            if self._draws:
                seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
                with global_draws(torch_generator(seed)):
                    yield
            else:
                yield
        finally:
            for module in self._modules:
                module.training = isinstance(module, nn.RNNBase) and not module.dropout

    def updated(self) -> None:
        """Keep the moments of batches of the gradients since the last update, because this update succeeded."""
        self._before = None

    def undo(self) -> None:
        """Restore the moments of batches of the time before the last update."""
        if self._before is not None:
            for buffer, before in zip(self._buffers, self._before, strict=True):
                buffer.copy_(before)


def _depends_on_mode(module: nn.Module) -> bool:
    """Return whether a module may compute other outputs in training mode; this is unknown for a class of the user."""
    if isinstance(module, nn.RNNBase):
        return bool(module.dropout)
    is_named = isinstance(module, (*_EXCEPTIONS, NORMALIZATION, DROPOUT))
    return is_named or not type(module).__module__.startswith(_SAME_IN_BOTH)
