"""Let oneDNN compute the large matrix products of compiled graphs on processors on which it is faster than MKL.

This module imports the compiler, which takes seconds, so it is imported only before something is compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol, cast

import torch
from torch import Tensor, fx
from torch._inductor import ir, mkldnn_ir
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.lowering import register_lowering

# Numbers of multiplications from which oneDNN is faster, even if it needs a transposed copy of a matrix. On one core of
# a Zen 5, the products of 64, 128 and 256 x 256 matrices take 14, 29 and 150 us with oneDNN, and 7, 42 and 310 us with
# MKL, which does not use all AVX-512 instructions of AMD's processors.
_LEAST_MULTIPLICATIONS = 2_000_000


class _Library(Protocol):
    """Declaration and implementations of operations, as torch's class, which has no types."""

    def define(self, schema: str) -> object: ...

    def impl(self, name: str, function: Callable[[Tensor, Tensor], Tensor], key: str) -> object: ...


_make_library: Callable[[str, str], _Library] = torch.library.Library
_library = _make_library("pytorchrl", "FRAGMENT")
_onednn_product: Callable[..., ir.IRNode] = mkldnn_ir.LinearUnary.create
_library.define("matrix_product(Tensor a, Tensor b_transposed) -> Tensor")


def _multiply(a: Tensor, b_transposed: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(a, b_transposed, None, "none", [], "")


def _shape_of_product(a: Tensor, b_transposed: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], b_transposed.shape[0])


_library.impl("matrix_product", _multiply, "CPU")
_library.impl("matrix_product", _shape_of_product, "Meta")


@register_lowering(torch.ops.pytorchrl.matrix_product.default, type_promotion_kind=None)
def _lower(a: ir.TensorBox, b_transposed: ir.TensorBox) -> object:
    """Return a call of oneDNN's product in the code that the compiler writes."""
    return ir.TensorBox.create(_onednn_product(a, b_transposed, None, "none", [], ""))


def onednn_is_faster(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether oneDNN multiplies large float32 matrices faster: on AMD's processors with AVX-512.

    This depends on the processor only, and nothing is timed, so that two runs on one machine compute alike.
    """
    has_onednn: Callable[[], bool] = torch.backends.mkldnn.is_available
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not has_onednn():
        return False
    return cpuinfo.exists() and "AuthenticAMD" in cpuinfo.read_text(encoding="utf-8")


class LargeProducts(CustomGraphPass):
    """A step of the compiler that replaces matrix products of float32 by oneDNN's if they are large."""

    def __call__(self, graph: fx.Graph) -> None:
        """Replace the products in `graph`."""
        for node in list(graph.nodes):
            if node.op != "call_function" or node.target is not torch.ops.aten.mm.default:
                continue
            a, b = cast("tuple[fx.Node, fx.Node]", node.args)
            if _is_large(a, b):
                with graph.inserting_before(node):
                    product = _inserted(graph, a, b)
                product.meta.update(node.meta)
                node.replace_all_uses_with(product)
                graph.erase_node(node)

    def uuid(self) -> object:
        """Return what the cache of compiled graphs compares."""
        return get_hash_for_files((__file__,))


def _is_large(a: fx.Node, b: fx.Node) -> bool:
    """Return whether the product of two matrices is large; that of matrices whose size is not known is not."""
    first, second = a.meta["val"], b.meta["val"]
    sizes = (*first.shape, second.shape[1])
    return first.dtype == torch.float32 and all(isinstance(size, int) for size in sizes) and (
        sizes[0] * sizes[1] * sizes[2] >= _LEAST_MULTIPLICATIONS)


def _inserted(graph: fx.Graph, a: fx.Node, b: fx.Node) -> fx.Node:
    """Insert oneDNN's product of two matrices; it takes the second one transposed and contiguous."""
    permute = torch.ops.aten.permute.default
    transposed = cast("fx.Node", b.args[0]) if b.target is permute else None
    if transposed is None or not transposed.meta["val"].is_contiguous():
        view = graph.call_function(permute, (b, [1, 0]))
        view.meta["val"] = b.meta["val"].permute(1, 0)
        transposed = graph.call_function(
            torch.ops.aten.clone.default, (view,), {"memory_format": torch.contiguous_format})
        transposed.meta["val"] = view.meta["val"].clone(memory_format=torch.contiguous_format)
    return graph.call_function(torch.ops.pytorchrl.matrix_product.default, (a, transposed))
