"""Loss and gradient as one compiled graph. P = number of scalars of the parameter vector."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pytorchrl.agent.algorithms.constants import Constants
from pytorchrl.agent.data import Batch
from pytorchrl.errors import ConfigError

LossFunction = Callable[[Batch, Mapping[str, Any], Tensor], tuple[Tensor, Tensor]]
Gradient = Callable[[tuple[Any, ...], Tensor, Tensor], tuple[Tensor, Tensor]]


class CompiledGradient:
    """Compiles, at the first batch, forward pass, loss and backward pass together.

    The backward pass is part of the graph (the autograd engine is not involved), gradients are written side by side
    into one vector, and the parameters in force are an input: when they change, nothing is compiled again. Nor is it
    for batches of another size.
    """

    def __init__(self, loss: LossFunction, params: list[nn.Parameter], device: torch.device) -> None:
        """Prepare the gradient of `loss(batch, parameters, weights) -> (loss, measured)` by `params`."""
        self._loss, self._params = loss, params
        self._gradients: dict[Any, Gradient] = {}
        self._values = Constants(device)

    def __call__(self, batch: Batch, parameters: Mapping[str, float], weights: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient (P,), in a tensor of its own, and what was measured.

        Raises:
            ConfigError: It cannot be compiled here.
        """
        tensors = (
            batch.obs, batch.done, batch.rhs, batch.mask, batch.action, batch.valid, batch.logp, batch.value, batch.ret,
            batch.advantage)
        names = tuple(sorted(parameters))
        # All that the graph depends on besides the shapes and types of tensors, which torch compares itself.
        key = (names, batch.mask is None, batch.valid is None, batch.is_normalized)
        if key not in self._gradients:
            self._gradients[key] = self._compile(names, tensors, batch.is_normalized)
        values = self._values.of(*(parameters[name] for name in names))
        try:
            return self._gradients[key](tensors, values, weights)
        except (torch._dynamo.exc.TorchDynamoException, torch._inductor.exc.InductorError) as error:
            raise ConfigError(
                f"compile=True failed: {error}; install a C++ compiler (g++), or set compile=False") from error

    def _compile(self, names: tuple[str, ...], tensors: tuple[Any, ...], is_normalized: bool) -> Gradient:
        import torch._dynamo
        import torch._inductor.exc  # these take seconds to import, so only who compiles does

        torch._dynamo.config.trace_autograd_ops = True  # lets the graph hold `torch.autograd.grad`
        for value in tensors:
            for tensor in value.values() if isinstance(value, dict) else [value]:
                if tensor is not None:
                    torch._dynamo.maybe_mark_dynamic(tensor, 0)

        def gradient(tensors: tuple[Any, ...], values: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
            fields = (*tensors, 0, 0, False, is_normalized)
            loss, measured = self._loss(Batch(*fields), dict(zip(names, values.unbind(), strict=True)), weights)
            parts = torch.autograd.grad(loss, self._params, materialize_grads=True)
            return torch.cat([part.reshape(-1) for part in parts]), measured

        # torch keeps what it compiled by code object: each of ours needs its own, or they would evict one another.
        gradient.__code__ = gradient.__code__.replace()
        return torch.compile(gradient, fullgraph=True, options={
            # tanh from one exp: four times as fast on CPUs, and within 1e-7.
            "cpp.use_decompose_tanh": True,
            "guard_filter_fn": torch.compiler.keep_tensor_guards_unsafe,
        })
