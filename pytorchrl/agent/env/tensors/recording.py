"""Record the step of environments on a GPU into a CUDA graph, which launches all kernels of the step in one call."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from pytorchrl.agent.cuda_graphs import CudaRecorder, Recorded
from pytorchrl.agent.data import TensorStep
from pytorchrl.agent.env.aliases import EnvObject

RECORDABLE = "is_recordable"
"""Attribute with which environments promise that their `step` can be recorded. It then reads no tensor on the host, and
changes tensors in place instead of binding attributes. It draws random numbers only from the attribute `generator`."""


class RecordedStep:
    """A function that steps environments; after a few calls, its kernels are recorded into a CUDA graph.

    A graph reads the memory and the numbers that the attributes of the environments had when it was recorded. If an
    attribute is bound anew between two steps, another graph is therefore recorded. Environments whose `step` binds an
    attribute are not recorded, and a warning names the attribute. The elements of lists and dictionaries are not
    watched.

    Args:
        step: Function of actions (E, ...) that steps the environments and computes their accounts. It changes no
            state of Python, and its result is valid until the next call.
        env: The environments, of which `is_recordable` is true.
        device: Device of the environments.
    """

    def __init__(self, step: Callable[[Tensor], TensorStep], env: EnvObject, device: torch.device) -> None:
        self._step, self._device, self._layers = step, device, _layers(env)
        self._begin()

    def __call__(self, actions: Tensor) -> TensorStep:
        """Return the result of a step, in memory that the next step may overwrite."""
        if self._recorded.has_failed:
            return self._step(actions)
        if self._ids != self._found():
            self._begin()
        result = cast("TensorStep", self._recorded(actions))
        if self._ids != (found := self._found()):
            names = [name for layer in self._layers for name in vars(layer)]
            pairs = zip(names, found, self._ids, strict=False)  # a new attribute is the last one of its layer
            name = next((name for name, new, old in pairs if new != old), names[-1])
            self._recorded.give_up(f"step binds the attribute {name!r}; change tensors in place, such as by copy_")
        return result

    def _begin(self) -> None:
        """Forget graphs, and remember the attributes."""
        self._values = [value for layer in self._layers for value in vars(layer).values()]
        self._ids = self._found()
        env = self._layers[-1]
        generator = getattr(_declaring(self._layers[0]), "generator", None)
        is_usable = isinstance(generator, torch.Generator) and generator.device.type != "cpu"
        self._recorded = Recorded(
            self._step, CudaRecorder(self._device, generator if is_usable else None), copies_result=False,
            is_compiled=bool(getattr(env, "is_compiled", False)), name=f"{type(env).__name__}.step")

    def _found(self) -> list[int]:
        """Return the identities of the values of all attributes; no new value has the identity of one in `_values`."""
        return [id(value) for layer in self._layers for value in vars(layer).values()]


def is_recordable(env: EnvObject) -> bool:
    """Return whether environments, or the wrapper around them, declare that `step` can be recorded."""
    return inspect.getattr_static(_declaring(env), RECORDABLE, False) is True


def _declaring(env: EnvObject) -> EnvObject:
    """Return the user's object that an `ObjectVector` steps; other environments are returned as they are."""
    from pytorchrl.agent.env.tensors.objects import ObjectVector

    return env.given if isinstance(env, ObjectVector) else env


def _layers(env: EnvObject) -> list[EnvObject]:
    """Return the layers of environments that have attributes, from the outermost wrapper to the environment itself."""
    found: list[EnvObject] = []
    while hasattr(env, "__dict__") and not any(env is layer for layer in found):
        found.append(env)
        inner = vars(env).get("given", vars(env).get("env"))
        if not callable(getattr(inner, "step", None)):
            break
        env = inner
    return found
