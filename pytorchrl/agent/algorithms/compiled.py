"""Compute a loss and its gradient in one compiled graph. P = number of scalars in the parameter vector."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pytorchrl.agent.algorithms.constants import Constants
from pytorchrl.agent.data import Batch, Parameters
from pytorchrl.errors import ConfigError

LossFunction = Callable[[Batch, Parameters, Tensor], tuple[Tensor, Tensor]]
Fields = tuple[Any, ...]
"""Values of the first fields of `Batch`, in order."""
Gradient = Callable[[Fields, Tensor, Tensor], tuple[Tensor, Tensor]]


class CompiledGradient:
    """A function that computes a gradient and is compiled into a single graph at the first batch.

    The graph contains the forward pass, the loss and the backward pass. It does not use the autograd engine, and writes
    the gradients into one vector.
    The current values of updatable options are inputs of the graph, so neither a change of these values nor a batch of
    another size causes a new compilation.
    """

    def __init__(self, loss: LossFunction, params: list[nn.Parameter], device: torch.device) -> None:
        """Prepare the gradient of `loss(batch, parameters, weights) -> (loss, measured)` with respect to `params`."""
        self._loss, self._params = loss, params
        self._gradients: dict[Hashable, Gradient] = {}
        self._values = Constants(device)

    def __call__(self, batch: Batch, parameters: Mapping[str, float], weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradient (P,), in a new tensor, and the measured values that the loss returned.

        Raises:
            ConfigError: This machine cannot compile the gradient.
        """
        tensors = (
            batch.obs, batch.done, batch.rhs, batch.mask, batch.action, batch.valid, batch.logp, batch.value, batch.ret,
            batch.advantage)
        names = tuple(sorted(parameters))
        leaves = [*batch.obs.values(), *batch.rhs.values(), *tensors[1:2], *tensors[3:]]
        # The key contains everything that the graph depends on. Strides stand for all dimensions but the first; a graph
        # fits any number of rows, except that torch compiles another graph for a single row.
        key = (names, batch.is_normalized, len(batch.done) == 1,
               *[None if leaf is None else (leaf.dtype, leaf.stride()) for leaf in leaves])
        values = self._values.of(*(parameters[name] for name in names))
        if key not in self._gradients:
            try:
                self._gradients[key] = self._compile(names, batch.is_normalized, (tensors, values, weights), leaves)
            except (torch._dynamo.exc.TorchDynamoException, torch._inductor.exc.InductorError) as error:
                raise ConfigError(
                    f"compile=True failed: {error}; install a C++ compiler (g++), or set compile=False") from error
        return self._gradients[key](tensors, values, weights)

    def _compile(self, names: tuple[str, ...], is_normalized: bool, arguments: tuple[Fields, Tensor, Tensor],
                 leaves: list[Tensor | None]) -> Gradient:
        import torch._dynamo
        import torch._inductor.exc  # imported only here, because these imports take seconds

        torch._dynamo.config.trace_autograd_ops = True  # allows `torch.autograd.grad` in the graph
        for leaf in leaves:
            if leaf is not None:
                torch._dynamo.maybe_mark_dynamic(leaf, 0)

        def gradient(tensors: Fields, values: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
            fields = (*tensors, 0, 0, False, is_normalized)
            loss, measured = self._loss(Batch(*fields), dict(zip(names, values.unbind(), strict=True)), weights)
            grads = torch.autograd.grad(loss, self._params, materialize_grads=True)
            return torch.cat([grad.reshape(-1) for grad in grads]), measured

        # torch caches compiled graphs by code object. Functions with the same code object would evict each other's
        # graphs, so each function gets a new code object.
        gradient.__code__ = gradient.__code__.replace()
        compiled = torch.compile(gradient, fullgraph=True, options={
            # Compute tanh from a single exp. On CPUs, this is four times as fast as the default; errors are below 1e-7.
            "cpp.use_decompose_tanh": True,
            "guard_filter_fn": torch.compiler.keep_tensor_guards_unsafe,
        })
        if not hasattr(compiled, "aot_compile") or torch._inductor.config.force_disable_caches:
            compiled(*arguments)  # compile now, so that errors are raised here
            return compiled
        # A call of `compiled` checks whether the graph fits, which takes 25 us; the keys of the graphs make this check
        # unnecessary.
        unchecked: Gradient = compiled.aot_compile((arguments, {})).fn
        return unchecked
