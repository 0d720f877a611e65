"""CUDA graphs of the emulated GPU: lists of operations, which are filled by `torch.cuda.graph`."""

from __future__ import annotations

import functools
import itertools

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

# Operations that a GPU cannot do while a graph is recorded, because their kernels wait for a value of the GPU. Others,
# see `waits`, wait only with certain arguments.
WAITING = frozenset(f"aten::{name}" for name in (
    "_local_scalar_dense", "item", "is_nonzero", "nonzero", "argwhere", "masked_select", "equal", "allclose",
    "bincount", "unique_dim", "unique_dim_consecutive", "unique_consecutive", "_unique", "_unique2",
    "_linalg_check_errors"))
COPYING = frozenset(("aten::copy_", "aten::_to_copy", "aten::to"))


def replace():
    """Replace the class `torch.cuda.CUDAGraph`, and functions of its memory."""
    torch.cuda.CUDAGraph = CUDAGraph
    torch.cuda.graph_pool_handle = functools.partial(next, zip(itertools.repeat(0), itertools.count(1)))
    torch._C._cuda_endAllocateToPool = _end_allocation
    torch._C._host_emptyCache = lambda: None


class CUDAGraph:
    """A graph with those methods of torch's class that `torch.cuda.graph` and this project call.

    Attributes:
        num_replays: Number of replays of all graphs so far.
    """

    num_replays = 0

    def __init__(self, keep_graph=False):
        self._generators, self._capture, self._operations = [], None, []

    def register_generator_state(self, generator):
        if generator.device.type != "cuda":
            raise RuntimeError("a graph can only have generators of a GPU")
        self._generators.append(generator)

    def pool(self):
        return 0, 0

    def capture_begin(self, pool=None, capture_error_mode="global", **options):
        if torch.cuda.current_stream() is torch.cuda.default_stream():
            raise RuntimeError("CUDA graphs must be captured on a non-default stream")
        self._capture = Capture([*self._generators, *torch.cuda.default_generators])
        self._capture.__enter__()

    def capture_end(self):
        capture, self._capture = self._capture, None
        capture.__exit__(None, None, None)
        capture.undo()
        if capture.has_failed:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        self._operations = capture.operations

    @torch.no_grad()
    def replay(self):
        CUDAGraph.num_replays += 1
        with _disable_current_modes():  # no Python code sees the operations of a graph that a GPU replays
            self._run()

    def _run(self):
        for function, args, kwargs, results in self._operations:
            for own, new in zip(results, _tensors_in(function(*args, **kwargs)), strict=True):
                if own is not new and own.data_ptr() != new.data_ptr():
                    own.copy_(new)


class Capture(TorchDispatchMode):
    """Lists the operations on GPUs, and refuses those that a GPU refuses while it records a graph."""

    def __init__(self, generators):
        super().__init__()
        self.operations, self.has_failed = [], False
        self._overwritten = []
        self._states = [(generator, generator.get_state()) for generator in generators]

    def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
        kwargs, name = kwargs or {}, function._schema.name
        with self:  # in inference mode, operations that consist of others arrive here as a whole
            result = function.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        given = _tensors_in((args, kwargs))
        if given and given[0].is_cuda and waits(name, args, kwargs):
            self._refuse(f"{name} waits for the GPU")
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Generator) and not self._has(leaf):
                self._refuse(f"{name} draws from a generator that is not registered with the graph")
        self._overwritten += [(tensor, tensor.clone()) for tensor in _written(function, args, kwargs)]
        result = function(*args, **kwargs)
        results = _tensors_in(result)
        if name in COPYING and len({tensor.device for tensor in [*given, *results]}) > 1:
            self._refuse(f"{name} copies between devices")
        if any(tensor.is_cuda for tensor in [*given, *results]):
            self.operations.append((function, args, kwargs, results))
        return result

    def undo(self):
        """Restore tensors and generators, because recording computes nothing."""
        for tensor, before in reversed(self._overwritten):
            tensor.copy_(before)
        for generator, state in self._states:
            generator.set_state(state)

    def _refuse(self, reason):
        self.has_failed = True
        raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing: {reason}")

    def _has(self, generator):
        """Return whether a generator is registered. Operations get a new object for the same generator."""
        if generator.device.type != "cuda":
            return True  # the operation itself refuses it, or is one of the CPU
        offset = generator.get_offset()
        before = [own.get_offset() for own, _ in self._states]
        generator.set_offset(offset + 4)
        after = [own.get_offset() for own, _ in self._states]
        generator.set_offset(offset)
        return before != after


def waits(name, args, kwargs):
    """Return whether the kernel of an operation on GPUs waits, according to the sources of torch."""
    if name in ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"):
        indices = _tensors_in(args[1])
        is_masked = any(index.dtype in (torch.bool, torch.uint8) for index in indices)
        return is_masked and not (len(indices) == 1 and name != "aten::index" and args[2].is_cpu)
    if name in ("aten::masked_fill", "aten::masked_fill_", "aten::index_fill", "aten::index_fill_"):
        return isinstance(args[-1], torch.Tensor) and args[-1].is_cuda
    if name == "aten::repeat_interleave":
        return "output_size" not in kwargs
    if name == "aten::histc":
        return len(args) < 4 or args[2] == args[3]
    return name in WAITING


def _end_allocation(device, pool):
    raise RuntimeError("endAllocatePool: not currently recording to mempool_id")


def _tensors_in(tree):
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _written(function, args, kwargs):
    """Return the tensors on GPUs that an operation overwrites."""
    declared = function._schema.arguments
    named = {argument.name: value for argument, value in zip(declared, args, strict=False)} | kwargs
    return [tensor for argument in declared if argument.alias_info is not None and argument.alias_info.is_write
            for tensor in _tensors_in(named.get(argument.name)) if tensor.is_cuda]
