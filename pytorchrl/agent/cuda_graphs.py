"""Launch all kernels of a function in one call, by recording them into a CUDA graph.

The kernels of small networks take less time on a GPU than Python needs to launch them one by one. `torch.compile` with
`mode="reduce-overhead"` also records CUDA graphs, but works only in the main thread. Learners and collectors run in
other threads, so this module records the graphs itself.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from pytorchrl.support.terminal import get_logger

logger = get_logger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

# Kernels are recorded after this number of calls with the same shapes, because the first calls compile and tune them.
_NUM_WARM_UP_CALLS = 3
# Largest number of graphs of a function; each graph is for different shapes of the arguments.
_MAX_GRAPHS = 8
# torch marks most operations that wait for a value of the GPU with one of these tags.
_TAGS = frozenset({"data_dependent_output", "dynamic_output_shape", "cudagraph_unsafe"})
# Operations that copy single numbers between devices; in others, a number of the CPU is an argument of the kernel.
_COPIES = frozenset({"aten::_to_copy", "aten::copy_", "aten::copy"})
# guards the global generator of a device, which all recordings use: only one thread records at a time
_RECORDING = threading.Lock()


class _StreamsOfThread(threading.local):
    """The stream of each device on which a thread records.

    Graphs share the memory of their pool, and the workspaces of cuBLAS, only if they are recorded on the same stream.
    Graphs of two threads must not share them, because the threads may launch their graphs at the same time.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def of(self, device: torch.device) -> torch.cuda.Stream:
        """Return the calling thread's stream of a device."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]


_STREAMS = _StreamsOfThread()


class CudaRecorder:
    """Records the kernels of functions into CUDA graphs, which launch them again without running Python code.

    All graphs share one memory pool.

    Args:
        device: Device of the kernels.
        generator: The generator of random numbers that the functions use; None if they draw no random numbers.
    """

    def __init__(self, device: torch.device, generator: torch.Generator | None = None) -> None:
        self.device, self._generator = device, generator
        # This is safe although graphs overwrite each other's memory, because graphs run in turn and results are copied.
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, function: Callable[[], R]) -> tuple[R, Callable[[], None]]:
        """Record the kernels that `function` launches.

        Returns:
            The result of `function`, and a function that launches the same kernels again. The kernels read their inputs
            from the same memory as before, and overwrite the result.

        Raises:
            RuntimeError: The function does something that cannot be recorded, such as waiting for a result. The calling
                thread can then launch kernels and draw random numbers as before.
        """
        graph = torch.cuda.CUDAGraph()
        state = None if self._generator is None else self._generator.clone_state()
        if self._generator is not None:
            graph.register_generator_state(self._generator)
        with _RECORDING, torch.cuda.device(self.device):
            before = torch.cuda.current_stream()
            try:
                # "thread_local", because other threads may allocate memory on the device during the recording
                with torch.cuda.graph(graph, self._pool, _STREAMS.of(self.device), capture_error_mode="thread_local"):
                    result = function()
            except BaseException:
                # torch leaves the other stream in use; torch 2.11 also the pool, in which it would keep all memory that
                # other streams have used, and the generator, which would then refuse to draw
                torch.cuda.set_stream(before)
                with contextlib.suppress(RuntimeError):  # the pool is not in use
                    torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)
                if self._generator is not None and state is not None:
                    self._generator.graphsafe_set_state(state)
                raise
        return result, graph.replay


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the first operation that cannot be recorded, because it waits for the device or copies to another one."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self.found: str | None = None

    def __torch_dispatch__(self, operation: torch._ops.OpOverload, types: Sequence[type],
                           args: Sequence[object] = (), kwargs: Mapping[str, object] | None = None) -> object:
        with self:  # In inference mode, operations that consist of others arrive here as a whole.
            result = operation.decompose(*args, **(kwargs or {}))
        if result is not NotImplemented:
            return result
        result = operation(*args, **(kwargs or {}))
        name = operation._schema.name
        devices = {leaf.device.type for leaf in pytree.tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)
                   and (leaf.dim() > 0 or leaf.device.type == self._device.type or name in _COPIES)}
        if self.found is None and self._device.type in devices and (
                len(devices) > 1 or self._waits(operation, args, kwargs or {})):
            self.found = name
        return result

    def _waits(self, operation: torch._ops.OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
        """Return whether an operation on tensors of the device waits for one of their values."""
        declared = operation._schema.arguments
        given = {argument.name: argument.default_value for argument in declared if argument.has_default_value()}
        given |= dict(zip([argument.name for argument in declared], args, strict=False)) | dict(kwargs)
        match operation._schema.name.removeprefix("aten::").strip("_"):
            case "index" | "index_put" | "index_put_impl" as name:
                indices = [index for index in pytree.tree_leaves(given["indices"]) if isinstance(index, Tensor)]
                # `masked_fill` writes a number that the program knows, so nobody need count the places
                is_fill = len(indices) == 1 and name != "index" and self._is_known(given["values"])
                return not is_fill and any(index.dtype in (torch.bool, torch.uint8) for index in indices)
            case "masked_fill" | "index_fill":
                return not self._is_known(given["value"])
            case "histc":  # computes the range that is not given
                return given["min"] == given["max"]
            case "repeat_interleave":
                return given["output_size"] is None
            case "linalg_check_errors":
                return True
        return any(tag.name in _TAGS for tag in operation.tags)

    def _is_known(self, value: object) -> bool:
        """Return whether the program knows a value without waiting for the device."""
        return not isinstance(value, Tensor) or value.device.type != self._device.type


class Recorded:
    """A function whose kernels are recorded after it has been called a few times with arguments of the same shapes.

    Later calls with these shapes launch the recorded kernels. If recording fails, a warning says why, and all later
    calls run the function itself, as do calls with shapes that are not recorded.

    Args:
        function: A function that computes tensors from its arguments and from memory at fixed addresses. After it has
            been recorded, it is not called again, so it must not have other effects, such as counting its calls.
        recorder: Records the kernels.
        is_compiled: Whether the function is a compiled graph. The operations of other functions are watched in the last
            call before the recording, because a recording that fails may leave memory and generators unusable. Compiled
            graphs contain no operations that wait, and cannot be watched.
        copies_result: Whether results are copies. If not, the next call overwrites a recorded result.
        name: Name of the function, for the warning; by default, it is not named.

    Attributes:
        has_failed: Whether nothing is recorded any more, because the function cannot be recorded.
    """

    def __init__(
        self, function: Callable[..., object], recorder: CudaRecorder, *, is_compiled: bool = False,
        copies_result: bool = True, name: str = "",
    ) -> None:
        self._function, self._recorder, self._is_compiled = function, recorder, is_compiled
        self._copies_result, self._name = copies_result, name
        self._calls: Counter[Hashable] = Counter()
        self._graphs: dict[Hashable, tuple[list[object], object, Callable[[], None]]] = {}
        self.has_failed = False

    def __call__(self, *args: object) -> object:
        """Return the result of the function."""
        leaves, spec = pytree.tree_flatten(args)
        key = tuple([(leaf.shape, leaf.dtype, leaf.stride()) if isinstance(leaf, Tensor) else leaf for leaf in leaves])
        if key not in self._graphs and not self._record(key, leaves, spec):
            is_last = not self.has_failed and self._calls[key] == _NUM_WARM_UP_CALLS
            return self._watched(args) if is_last and not self._is_compiled else self._function(*args)
        inputs, result, replay = self._graphs[key]
        _copy(leaves, inputs)
        replay()
        return pytree.tree_map_only(Tensor, Tensor.clone, result) if self._copies_result else result

    def _record(self, key: Hashable, leaves: list[object], spec: pytree.TreeSpec) -> bool:
        """Record the function if it has had enough calls with these shapes; return whether it has been recorded."""
        self._calls[key] += 1
        if self.has_failed or self._calls[key] <= _NUM_WARM_UP_CALLS or len(self._graphs) == _MAX_GRAPHS:
            return False
        inputs = [
            torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=self._recorder.device)
            if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        try:
            _copy(leaves, inputs)
            own_args = pytree.tree_unflatten(inputs, spec)
            result, replay = self._recorder.record(lambda: self._function(*own_args))
        except RuntimeError as error:
            self.give_up(str(error).splitlines()[0])
            return False
        self._graphs[key] = inputs, result, replay
        return True

    def _watched(self, args: tuple[object, ...]) -> object:
        """Call the function, and record nothing if it does something that cannot be recorded."""
        device = self._recorder.device
        args = pytree.tree_map_only(Tensor, lambda leaf: leaf.to(device), args)  # as in a recording
        with _Watch(device) as watch:
            result = self._function(*args)
        if watch.found is not None:
            self.give_up(f"the operation {watch.found} waits for a value of the GPU, or copies between devices")
        return result

    def give_up(self, reason: str) -> None:
        """Record nothing any more; a warning gives the reason."""
        self.has_failed = True
        self._graphs.clear()  # After a failed recording, they may draw the same random numbers as other calls.
        logger.warning("compile=True launches kernels%s one at a time, which is slower, because they could not be "
                       "recorded into a CUDA graph: %s", f" of {self._name}" if self._name else "", reason)


def recorded(function: Callable[P, R], device: torch.device,
             generator: torch.Generator | None = None, *, is_compiled: bool = False) -> Callable[P, R]:
    """Return a function with the same results as `function`; on a CUDA device, its kernels are recorded.

    Args:
        function: See `Recorded`; it is called with positional arguments only.
        device: Device on which the function computes.
        generator: See `CudaRecorder`.
        is_compiled: See `Recorded`.
    """
    if device.type != "cuda":
        return function
    return cast("Callable[P, R]", Recorded(function, CudaRecorder(device, generator), is_compiled=is_compiled))


def _copy(leaves: list[object], inputs: list[object]) -> None:
    for leaf, own in zip(leaves, inputs, strict=True):
        if isinstance(leaf, Tensor) and isinstance(own, Tensor):
            own.copy_(leaf, non_blocking=True)
