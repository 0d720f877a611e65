"""Launch all kernels of a function in one call, by recording them into a CUDA graph.

The kernels of small networks take less time on a GPU than Python needs to launch them one by one. `torch.compile` with
`mode="reduce-overhead"` also records CUDA graphs, but works only in the main thread. Learners and collectors run in
other threads, so this module records the graphs itself.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Hashable
from typing import ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pytorchrl.support.terminal import get_logger

logger = get_logger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

# Kernels are recorded after this number of calls with the same shapes, because the first calls compile and tune them.
_NUM_WARM_UP_CALLS = 3
# Largest number of graphs of a function; each graph is for different shapes of the arguments.
_MAX_GRAPHS = 8
# guards the global generator of a device, which all recordings use: only one thread records at a time
_RECORDING = threading.Lock()


class CudaRecorder:
    """Records the kernels of functions into CUDA graphs, which launch them again without running Python code.

    All graphs share one memory pool.

    Args:
        device: Device of the kernels.
        generator: The generator of random numbers that the functions use; None if they draw no random numbers.
    """

    def __init__(self, device: torch.device, generator: torch.Generator | None = None) -> None:
        self.device, self._generator = device, generator
        self._first: torch.cuda.CUDAGraph | None = None

    def record(self, function: Callable[[], R]) -> tuple[R, Callable[[], None]]:
        """Record the kernels that `function` launches.

        Returns:
            The result of `function`, and a function that launches the same kernels again. The kernels read their inputs
            from the same memory as before, and overwrite the result.

        Raises:
            RuntimeError: The function does something that cannot be recorded, such as waiting for a result.
        """
        graph, pool = torch.cuda.CUDAGraph(), None if self._first is None else self._first.pool()
        if self._generator is not None:
            graph.register_generator_state(self._generator)
        with _RECORDING, torch.cuda.device(self.device):
            stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            # The mode is "thread_local", because other threads may allocate memory on the device during the recording.
            with torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
                result = function()
        # Later graphs share the pool of the first. This is safe, because graphs run in turn and results are copied.
        self._first = self._first or graph
        return result, graph.replay


class Recorded:
    """A function whose kernels are recorded after it has been called a few times with arguments of the same shapes.

    Later calls with these shapes launch the recorded kernels. If recording fails, a warning says why, and no
    further shapes are recorded. Calls with shapes that are not recorded run the function itself.

    Args:
        function: A function that computes tensors from its arguments and from memory at fixed addresses. After it has
            been recorded, it is not called again, so it must not have other effects, such as counting its calls.
        recorder: Records the kernels.
    """

    def __init__(self, function: Callable[..., object], recorder: CudaRecorder) -> None:
        self._function, self._recorder = function, recorder
        self._calls: Counter[Hashable] = Counter()
        self._graphs: dict[Hashable, tuple[list[object], object, Callable[[], None]]] = {}
        self._has_failed = False

    def __call__(self, *args: object) -> object:
        """Return the result of the function, in new tensors."""
        leaves, spec = pytree.tree_flatten(args)
        key = tuple([(leaf.shape, leaf.dtype, leaf.stride()) if isinstance(leaf, Tensor) else leaf for leaf in leaves])
        if key not in self._graphs and not self._record(key, leaves, spec):
            return self._function(*args)
        inputs, result, replay = self._graphs[key]
        _copy(leaves, inputs)
        replay()
        return pytree.tree_map_only(Tensor, Tensor.clone, result)

    def _record(self, key: Hashable, leaves: list[object], spec: pytree.TreeSpec) -> bool:
        """Record the function if it has had enough calls with these shapes; return whether it has been recorded."""
        self._calls[key] += 1
        if self._has_failed or self._calls[key] <= _NUM_WARM_UP_CALLS or len(self._graphs) == _MAX_GRAPHS:
            return False
        inputs = [
            torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=self._recorder.device)
            if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        try:
            _copy(leaves, inputs)
            own_args = pytree.tree_unflatten(inputs, spec)
            result, replay = self._recorder.record(lambda: self._function(*own_args))
        except RuntimeError as error:
            self._has_failed = True
            logger.warning("compile=True launches kernels one at a time, which is slower, because they could not be "
                           "recorded into a CUDA graph: %s", str(error).splitlines()[0])
            return False
        self._graphs[key] = inputs, result, replay
        return True


def recorded(function: Callable[P, R], device: torch.device,
             generator: torch.Generator | None = None) -> Callable[P, R]:
    """Return a function with the same results as `function`; on a CUDA device, its kernels are recorded.

    Args:
        function: See `Recorded`; it is called with positional arguments only.
        device: Device on which the function computes.
        generator: See `CudaRecorder`.
    """
    if device.type != "cuda":
        return function
    return cast("Callable[P, R]", Recorded(function, CudaRecorder(device, generator)))


def _copy(leaves: list[object], inputs: list[object]) -> None:
    for leaf, own in zip(leaves, inputs, strict=True):
        if isinstance(leaf, Tensor) and isinstance(own, Tensor):
            own.copy_(leaf, non_blocking=True)
