"""Describe a traced program as JSON, so that a few lines of plain torch can run it.

The description is a list of operations. Each operation has a `name` for its result, an operator `op` such as
`aten.addmm.default`, and arguments. `{"value": name}` stands for an input, a stored tensor or an earlier result, and
`{"torch": name}` stands for an attribute of torch, such as a dtype.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias, TypedDict, Union

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

from pytorchrl.errors import ExportError

Encoded: TypeAlias = Union[bool, int, float, str, "list[Encoded]", "dict[str, str]", None]
"""An argument of an operation, as a value of JSON."""


class Operation(TypedDict):
    """One operation of a graph: the name of its result, an operator of torch, and the arguments."""

    name: str
    op: str
    args: list[Encoded]
    kwargs: dict[str, Encoded]


class Graph(TypedDict):
    """The description of a traced program: its operations, in order, and the names of its results."""

    operations: list[Operation]
    results: list[str]


_OF_TORCH = (torch.dtype, torch.layout, torch.memory_format)
_NAMESPACES = ("aten", "prims", "operator")


def graph_of(program: ExportedProgram, inputs: Sequence[str]) -> tuple[Graph, dict[str, Tensor]]:
    """Return the description of a program, and its tensors by name.

    Args:
        program: The program.
        inputs: Names of the program's inputs.

    Raises:
        ExportError: The program contains an operation that cannot be described.
    """
    signature = program.graph_signature
    stored = {**signature.inputs_to_parameters, **signature.inputs_to_buffers,
              **signature.inputs_to_lifted_tensor_constants}
    names = {**stored, **dict(zip(signature.user_inputs, inputs, strict=True))}
    live = _live_nodes(program.graph)
    found = {**program.constants, **program.state_dict}
    tensors = {stored[node.name]: found[stored[node.name]].detach().clone().contiguous()
               for node in live if node.name in stored}
    operations = [
        Operation(name=node.name, op=_name_of(node.target), args=[_encoded(value, names) for value in node.args],
                  kwargs={key: _encoded(value, names) for key, value in node.kwargs.items()})
        for node in live if node.op == "call_function"]
    outputs = [names.get(str(name), str(name)) for name in signature.user_outputs]
    return Graph(operations=operations, results=outputs), tensors


def run_graph(graph: Graph, tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the results of the program that `graph` describes, for the stored tensors and inputs in `tensors`."""
    values: dict[str, object] = dict(tensors)

    def decoded(item: Encoded) -> object:
        if isinstance(item, list):
            return [decoded(one) for one in item]
        if not isinstance(item, dict):
            return item
        return values[item["value"]] if "value" in item else getattr(torch, item["torch"])
    for operation in graph["operations"]:
        values[operation["name"]] = _function(operation["op"])(
            *map(decoded, operation["args"]), **{key: decoded(item) for key, item in operation["kwargs"].items()})
    return [result for name in graph["results"] if isinstance(result := values[name], Tensor)]


def _live_nodes(graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes on which the results depend, in the order of the graph."""
    needed: set[fx.Node] = set()
    found = []
    for node in reversed(graph.nodes):
        if node.op == "output" or node in needed:
            needed.update(node.all_input_nodes)
            found.append(node)
    return found[::-1]


def _name_of(target: object) -> str:
    name = str(target) if isinstance(target, torch._ops.OpOverload) else f"operator.{getattr(target, '__name__', '')}"
    is_known = name.split(".")[0] in _NAMESPACES and (
        not name.startswith("operator.") or getattr(operator, name.split(".")[1], None) is target)
    if not is_known:
        raise ExportError(f"the policy computes {target}, which a safetensors file cannot describe; export it to torch "
                          "or onnx")
    return name


def _function(name: str) -> Callable[..., object]:
    namespace, *path = name.split(".")
    found: object = operator if namespace == "operator" else getattr(torch.ops, namespace)
    for part in path:
        found = getattr(found, part)
    assert callable(found), name  # a function or an overload of an operator
    return found


def _encoded(item: object, names: Mapping[str, str]) -> Encoded:
    if isinstance(item, fx.Node):
        return {"value": names.get(item.name, item.name)}
    if isinstance(item, (list, tuple)):
        return [_encoded(one, names) for one in item]
    if isinstance(item, _OF_TORCH):
        return {"torch": str(item).removeprefix("torch.")}
    if isinstance(item, torch.device):
        return str(item)
    if item is None or isinstance(item, (bool, int, float, str)):
        return item
    raise ExportError(f"the policy has an operation with the argument {item!r}, which a safetensors file cannot "
                      "describe; export it to torch or onnx")
