"""A guard that refuses reads of tensors by the host, for tests of code that must not wait for a GPU."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Operations that need a value on the host: `item()`, `if tensor`, and those whose result has an unknown size.
READS = frozenset(f"aten::{name}" for name in (
    "_local_scalar_dense", "item", "is_nonzero", "nonzero", "masked_select", "equal", "unique_dim", "_unique2"))
METHODS = ("numpy", "cpu", "tolist", "item", "__array__", "__bool__", "__float__", "__int__", "__index__")


class HostReadError(Exception):
    pass


class _Refuse(TorchDispatchMode):
    def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
        name = function._schema.name
        has_mask = name.startswith("aten::index") and isinstance(args[1], (list, tuple)) and any(
            isinstance(index, Tensor) and index.dtype is torch.bool for index in args[1])
        if name in READS or has_mask:
            raise HostReadError(name)
        return function(*args, **(kwargs or {}))


@contextmanager
def no_host_reads():
    """Raise `HostReadError` for each read of a tensor by the host."""
    def refuse(name):
        def method(*args, **kwargs):
            raise HostReadError(name)
        return method

    with ExitStack() as stack:
        for name in METHODS:
            stack.enter_context(mock.patch.object(Tensor, name, refuse(name)))
        stack.enter_context(_Refuse())
        yield
