"""Count how often a program waits for a GPU, and how many operations it launches."""

from __future__ import annotations

from collections import Counter

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

# Operations that need values of the GPU in host memory, apart from copies.
READING = frozenset(f"aten::{name}" for name in (
    "_local_scalar_dense", "item", "is_nonzero", "nonzero", "masked_select", "equal", "unique_dim", "_unique2"))
COPYING = frozenset(("aten::copy_", "aten::_to_copy", "aten::to"))
# Operations that only allocate memory, or that only change how a tensor is seen.
FREE = ("aten::empty", "aten::new_empty", "aten::detach", "aten::alias", "aten::resolve_")


class Waits(TorchDispatchMode):
    """Counts what the operations within a `with` block do with tensors of a device; replays of graphs count as one.

    Args:
        kind: Type of the device. On "cpu", only reads of single numbers are counted, because nothing else would wait.

    Attributes:
        reads: Number of waits for values of the device: copies to host memory, reads of numbers, sizes that depend on
            values.
        writes: Number of copies to the device for which the program waits until the device has done its earlier work.
        launched: Number of operations that the device computes, and of copies.
        names: How often each of these was counted, by kind and name of the operation.
    """

    def __init__(self, kind="cuda"):
        super().__init__()
        self._kind = kind
        self.names = Counter()

    @property
    def reads(self):
        return self._total("read")

    @property
    def writes(self):
        return self._total("write")

    @property
    def launched(self):
        return self._total("launch")

    def __enter__(self):
        self._num_replays = _num_replays()
        return super().__enter__()

    def __exit__(self, *error):
        self.names["launch", "graph"] = _num_replays() - self._num_replays
        super().__exit__(*error)

    def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
        kwargs, name = kwargs or {}, function._schema.name
        result = function(*args, **kwargs)
        given, found = _tensors_in((args, kwargs)), _tensors_in(result)
        if name in READING:
            if given[0].device.type == self._kind:
                self.names["read", name] += 1
        elif self._kind != "cpu" and any(tensor.device.type == self._kind for tensor in [*given, *found]):
            self._count(name, function._schema, given, found, is_blocking=not _option(function, args, kwargs))
        return result

    def _count(self, name, schema, given, found, is_blocking):
        if name in COPYING:
            source, target = (given[1], given[0]) if name == "aten::copy_" else (given[0], found[0])
            if source is target:
                return
            if is_blocking and source.device.type != target.device.type:
                self.names["read" if source.device.type == self._kind else "write", name] += 1
        elif name == "aten::lift_fresh":  # made from numbers of Python, and copied to the device by torch.tensor
            self.names["write", name] += 1
        elif name.startswith(FREE) or _is_view(schema):
            return
        self.names["launch", name] += 1

    def _total(self, kind):
        return sum(count for (own, _), count in self.names.items() if own == kind)


def _tensors_in(tree):
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _num_replays():
    """Return the number of replays of graphs; it is known only on the emulated GPU."""
    return getattr(torch.cuda.CUDAGraph, "num_replays", 0)


def _option(function, args, kwargs):
    """Return the value of the argument `non_blocking`, if the operation has it."""
    declared = [argument.name for argument in function._schema.arguments]
    return (dict(zip(declared, args, strict=False)) | kwargs).get("non_blocking", False)


def _is_view(schema):
    return any(value.alias_info is not None and not value.alias_info.is_write for value in schema.returns)

