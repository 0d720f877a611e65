"""Compile losses together with their gradients. P = number of scalars in a parameter vector, B = rows of a batch."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import ParamSpec, TypeVar, cast

import torch
from torch import Tensor, nn

from pytorchrl.agent.cuda_graphs import recorded
from pytorchrl.agent.data import Batch, LossParameters, ReplayBatch
from pytorchrl.agent.noise import DrawnNoise, NoiseSource
from pytorchrl.agent.transfers import on_device
from pytorchrl.errors import ConfigError, Problem
from pytorchrl.support.problems import error_of
from pytorchrl.support.untyped import FieldValue

P = ParamSpec("P")
R = TypeVar("R")

LossFunction = Callable[[Batch, LossParameters, Tensor], tuple[Tensor, Tensor]]
LossesFunction = Callable[[ReplayBatch, NoiseSource], tuple[dict[str, Tensor], dict[str, Tensor], Tensor]]
Fields = tuple[FieldValue, ...]
"""Values of the first eleven fields of `Batch`, in order."""
GradientFunction = Callable[[Fields, Tensor, Tensor], tuple[Tensor, Tensor]]
GradientsFunction = Callable[[Fields, list[Tensor]], tuple[list[Tensor], Tensor, Tensor]]

MEMORY_NEEDS_GPU = Problem(
    "compile=True with an actor with memory is for gradients on a GPU, which runs all steps of a sequence as one graph",
    "set compile=False or recurrent_net=None, or compute gradients on a GPU", ("compile", "recurrent_net"))
# Largest number of rows that a CPU differentiates at once. The layers of a small network then stay in the processor's
# cache: with two layers of 64 units, a gradient over 8192 rows takes less than half of the time.
ROWS_AT_ONCE = 1024

_NOT_FOR_LOSSES = frozenset({"ids", "num_samples", "num_new_samples", "last"})
_is_training = operator.attrgetter("training")


class Constants:
    """A cache for a tensor of constant numbers.

    Building a tensor takes as long as the forward pass of a small layer, so `of` builds one only if the numbers change.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._numbers: tuple[float, ...] = ()
        self._tensor = torch.empty(0, device=device)

    def of(self, *numbers: float) -> Tensor:
        """Return the n numbers as a float32 tensor of shape (n,), which the caller must not modify."""
        if numbers != self._numbers:
            self._numbers, self._tensor = numbers, on_device(torch.tensor(numbers), self._device)
        return self._tensor


class CompiledGradient:
    """A function that computes a gradient and is compiled into a single graph at the first batch.

    The graph contains the forward pass, the loss and the backward pass, and writes the gradients into one vector. No
    new compilation is needed if the value of an option or the number of rows of a batch (at least two) changes.

    On a CPU, the gradient of a large batch is the mean of the gradients of its parts. If the batch has a multiple of
    `ROWS_AT_ONCE` rows, the graph is compiled for that number, and may use faster products.
    """

    def __init__(self, loss: LossFunction, params: list[nn.Parameter], network: nn.Module,
                 device: torch.device, prepare: Callable[[Batch], Batch], *, has_memory: bool = False) -> None:
        """Prepare the gradient of `loss(batch, parameters, weights)`; see `OnPolicyAlgorithm.loss` for the arguments.

        Args:
            loss: Function that returns the loss (), and a vector of values to report, such as the terms of the loss.
            params: The network parameters with respect to which the gradient is computed.
            network: The network that the loss uses.
            device: Device of the network.
            prepare: Function that computes the values of a batch that depend on all of its samples, before the batch is
                divided; see `Algorithm.prepare_batch`.
            has_memory: Whether the network has memory; see `_graph_of`.
        """
        self._loss, self._params, self._modules = loss, params, list(network.modules())
        self._prepare, self._is_on_cpu = prepare, device.type == "cpu"
        self._has_memory = has_memory
        self._graphs: dict[Hashable, tuple[list[str], GradientFunction]] = {}
        self._values = Constants(device)

    def __call__(self, batch: Batch, parameters: Mapping[str, float], weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradient (P,), and a vector of the values that the loss reports, followed by the gradient's norm.

        Raises:
            ConfigError: This machine cannot compile the gradient.
        """
        num_rows = len(batch.done)
        is_fixed = self._is_on_cpu and num_rows % ROWS_AT_ONCE == 0
        if num_rows <= ROWS_AT_ONCE or not self._is_on_cpu or batch.valid is not None:
            return self._of(batch, parameters, weights, is_fixed)
        gradient, measured = torch.zeros(()), torch.zeros(())
        for part in self._prepare(batch).split(-(-num_rows // ROWS_AT_ONCE)):
            own, values = self._of(part, parameters, weights, is_fixed)
            share = len(part.done) / num_rows
            gradient, measured = gradient + own * share, measured + values * share
        measured[-1] = torch.linalg.vector_norm(gradient)
        return gradient, measured

    def _of(
        self, batch: Batch, parameters: Mapping[str, float], weights: Tensor, is_fixed: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return the result of the graph for a batch; see `__call__`.

        If `is_fixed`, the graph is compiled for the number of rows of this batch.
        """
        tensors = (
            batch.obs, batch.done, batch.rhs, batch.mask, batch.action, batch.valid, batch.logp, batch.value, batch.ret,
            batch.advantage, batch.other)
        leaves = [*batch.obs.values(), *batch.rhs.values(), *batch.other.values(), *tensors[1:2], *tensors[3:10]]
        # One graph supports all batches of two or more rows. A batch of one row needs a graph of its own, because torch
        # treats axes of size 1 as constant.
        num_rows = len(batch.done)
        key = (tuple(sorted(parameters)), batch.is_normalized, num_rows if is_fixed else num_rows == 1,
               _layout(leaves), _modes(self._modules))
        if key not in self._graphs:
            # Without compilation, errors name the user's class. Only the options that the loss reads become inputs of
            # the graph, so that a schedule of another option, such as the learning rate, copies nothing to the device.
            read = set[str]()
            self._loss(batch, ReadNames(parameters, read), weights)
            names = sorted(read & parameters.keys())
            values = self._values.of(*(parameters[name] for name in names))

            def gradient(tensors: Fields, values: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
                fields = (*tensors, 0, 0, False, key[1])
                loss, measured = self._loss(Batch(*fields), dict(zip(names, values.unbind(), strict=True)), weights)
                vector = _flat_gradient(loss, self._params)
                return vector, torch.cat([measured, torch.linalg.vector_norm(vector, keepdim=True)])
            device, resized = weights.device, [] if is_fixed else [leaf for leaf in leaves if leaf is not None]
            self._graphs[key] = names, _graph_of(gradient, self._has_memory, device, resized, tensors, values, weights)
        names, graph = self._graphs[key]
        return graph(tensors, self._values.of(*(parameters[name] for name in names)), weights)


class CompiledLosses:
    """A function that computes the losses of an algorithm that learns from replay, and the gradients of the losses.

    Losses and gradients are compiled into a single graph at the first batch, and at the first batch of each other size.
    """

    def __init__(self, losses: LossesFunction, groups: Mapping[str, Sequence[nn.Parameter]],
                 networks: Iterable[nn.Module], *, has_memory: bool = False) -> None:
        """Prepare the gradients of the losses that `losses(batch, noise)` returns.

        Args:
            losses: Function that returns the same values as `ReplayAlgorithm.losses`, and takes all noise from `noise`.
            groups: For each group, the parameters over which its loss is minimized.
            networks: All networks that the losses use.
            has_memory: Whether the networks have memory; see `_graph_of`.
        """
        self._losses, self._groups, self._has_memory = losses, groups, has_memory
        self._modules = [module for network in networks for module in network.modules()]
        self._names: tuple[str, ...] = ()  # names of the batch's fields that losses use
        self._graphs: dict[Hashable, GradientsFunction] = {}

    def __call__(self, batch: ReplayBatch, draws: list[Tensor],
                 due: tuple[str, ...]) -> tuple[list[Tensor], Tensor, Tensor]:
        """Compute the gradients of the losses over a batch.

        Args:
            batch: B transitions, or sequences of a network with memory.
            draws: The noise of the losses, in the order in which the losses use it.
            due: The groups whose losses are differentiated and returned; the gradients of other groups are 0.

        Returns:
            One gradient (P,) for each group; a vector of the losses, the measures (see `ReplayAlgorithm.losses`) and
            the norms of the gradients; and the absolute TD errors (B,).

        Raises:
            ConfigError: This machine cannot compile the losses.
        """
        if not self._names:
            self._names = tuple(field.name for field in fields(batch) if field.name not in _NOT_FOR_LOSSES)
        names, kind = self._names, type(batch)
        tensors = tuple([getattr(batch, name) for name in names])
        leaves = [leaf for part in tensors for leaf in (part.values() if isinstance(part, dict) else (part,))]
        key = (due, batch.ret.shape, _layout(leaves), _modes(self._modules))
        if key not in self._graphs:
            def gradients(tensors: Fields, draws: list[Tensor]) -> tuple[list[Tensor], Tensor, Tensor]:
                batch = kind(**dict(zip(names, tensors, strict=True)), ids=cast("Tensor", None))
                losses, measures, errors = self._losses(batch, DrawnNoise(draws))
                losses = {name: loss for name, loss in losses.items() if name in due}
                vectors = [
                    _flat_gradient(losses[name], params) if name in losses
                    else torch.cat([torch.zeros_like(param).reshape(-1) for param in params])
                    for name, params in self._groups.items()]
                values = [value.detach() for value in (*losses.values(), *measures.values())]
                norms = [torch.linalg.vector_norm(vector) for vector in vectors]
                return vectors, torch.stack([*values, *norms]), errors.detach()
            self._graphs[key] = _graph_of(gradients, self._has_memory, batch.ret.device, [], tensors, draws)
        return self._graphs[key](tensors, draws)


class ReadNames(Mapping[str, float]):
    """A mapping that records which keys are read, to find losses that cannot be compiled.

    If losses read a value while they are compiled, the value becomes a constant of the graph.

    Attributes:
        names: The keys that have been read.
    """

    def __init__(self, values: Mapping[str, float], names: set[str]) -> None:
        self._values, self.names = values, names

    def __getitem__(self, name: str) -> float:
        """Return a value, and record its key."""
        self.names.add(name)
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over all keys."""
        return iter(self._values)

    def __len__(self) -> int:
        """Return the number of keys."""
        return len(self._values)


class ReadOptions:
    """A view of options that records which options are read; see `ReadNames`."""

    def __init__(self, options: object, names: set[str]) -> None:
        self._options, self._names = options, names

    def __getattr__(self, name: str) -> object:
        """Return the value of an option, and record its name."""
        self._names.add(name)
        return getattr(self._options, name)


def _flat_gradient(loss: Tensor, params: Sequence[nn.Parameter]) -> Tensor:
    trained = [param for param in params if param.requires_grad]
    grads = iter(torch.autograd.grad(loss, trained, materialize_grads=True, retain_graph=True))
    return torch.cat([(next(grads) if param.requires_grad else torch.zeros_like(param)).reshape(-1)
                      for param in params])


def _layout(leaves: Iterable[Tensor | int | None]) -> Hashable:
    """Return a key that is equal for all batches that one compiled graph supports, except for their numbers of rows.

    The key contains the strides of the tensors, not their shapes: the strides of a contiguous tensor determine the
    sizes of all axes except the first.
    """
    return tuple([(leaf.dtype, leaf.stride()) if isinstance(leaf, Tensor) else None for leaf in leaves])


def _modes(modules: Iterable[nn.Module]) -> Hashable:
    """Return a key of the modules' modes (training or evaluation); each compiled graph is valid for only one key."""
    return tuple(map(_is_training, modules))


def _graph_of(function: Callable[P, R], has_memory: bool, device: torch.device, resized: Sequence[Tensor],
              *args: P.args, **kwargs: P.kwargs) -> Callable[P, R]:
    """Return a function that launches the operations of `function` as one graph; see `compile_graph`.

    A compiler would unroll memory, so its code would grow with the length of a sequence. Therefore, the kernels of
    networks with memory are recorded without a compiler, which is possible only on a GPU.
    """
    if not has_memory:
        return recorded(compile_graph(function, device, resized, *args, **kwargs), device, is_compiled=True)
    if device.type != "cuda":
        raise error_of([MEMORY_NEEDS_GPU])
    return recorded(function, device)


def compile_graph(function: Callable[P, R], device: torch.device, resized: Sequence[Tensor], *args: P.args,
                   **kwargs: P.kwargs) -> Callable[P, R]:
    """Compile a function into a single graph for arguments with the same layout as `args`.

    Args:
        function: Function to compile.
        device: Device of the tensors in `args`.
        resized: The tensors in `args` whose first axis may have a different size in later calls. Without any, the graph
            is faster, because it need not look up sizes.
        *args: Example arguments of the function.
        **kwargs: Example keyword arguments of the function.

    Raises:
        ConfigError: This machine cannot compile the function.
    """
    import torch._dynamo
    import torch._inductor.exc  # imported only here, because these imports take seconds

    torch._dynamo.config.trace_autograd_ops = True  # allows `torch.autograd.grad` in the graph
    if hasattr(torch._dynamo.config, "record_runtime_overhead"):
        torch._dynamo.config.record_runtime_overhead = False  # saves 5 us per call
    for tensor in resized:
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    # torch caches compiled graphs by code object. Functions that the same `def` statement creates share a code object,
    # and would evict each other's graphs. Each function therefore gets a new code object.
    function.__code__ = function.__code__.replace()
    is_dynamic = None if resized else False
    options: dict[str, bool | Callable[..., object]] = {
        # Compute tanh from a single exp. On CPUs, this is four times as fast as the default; errors are below 1e-7.
        "cpp.use_decompose_tanh": True,
        # On CPUs, let C++ code instead of Python call the kernels, which makes training with SAC 7 % faster.
        "cpp_wrapper": device.type == "cpu",
        "size_asserts": False,  # not needed, because `_layout` chooses a graph that fits the arguments
    }
    if torch.are_deterministic_algorithms_enabled() and hasattr(torch._inductor.config, "deterministic"):
        options["deterministic"] = True  # torch sets this option only in the thread in which they were enabled
    if device.type == "cpu" and _may_replace_products():
        from pytorchrl.agent.algorithms.matrix_products import LargeProducts, onednn_is_faster

        if onednn_is_faster():
            options["post_grad_custom_post_pass"] = LargeProducts()  # makes updates of SAC 1.7 times as fast
    unguarded = torch.compile(function, fullgraph=True, dynamic=is_dynamic, options={
        **options, "guard_filter_fn": lambda guards: [False] * len(guards)})
    is_worthwhile = device.type == "cpu" and not torch._inductor.config.force_disable_caches  # a GPU replays kernels
    if is_worthwhile and hasattr(unguarded, "aot_compile"):
        # A compiled function checks in each call whether the graph fits the arguments, which takes 25 us. The check is
        # not needed, because `_layout` and `_modes` choose a graph that fits. `aot_compile` omits the check, but raises
        # `PackageError` if the graph cannot be saved to a file, for example because it uses buffers of normalizers.
        with _config_errors(), contextlib.suppress(torch._dynamo.exc.PackageError):
            unchecked: Callable[P, R] = unguarded.aot_compile((args, kwargs)).fn
            return unchecked
    compiled = torch.compile(function, fullgraph=True, dynamic=is_dynamic, options={
        **options, "guard_filter_fn": torch.compiler.keep_tensor_guards_unsafe})

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with _config_errors():
            return compiled(*args, **kwargs)
    return call


def _may_replace_products() -> bool:
    """Return whether torch has the version with whose internal functions `matrix_products` was tried."""
    return torch.__version__.split(".")[:2] == ["2", "13"]


@contextlib.contextmanager
def _config_errors() -> Iterator[None]:
    """Raise `ConfigError` instead of errors of the compiler."""
    try:
        yield
    except (torch._dynamo.exc.TorchDynamoException, torch._inductor.exc.InductorError) as error:
        raise ConfigError(
            f"compile=True failed: {error}; install a C++ compiler (g++) if it is missing, or set compile=False (of "
            "environments: compiled=False)",
        ) from error
