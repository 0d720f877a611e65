"""Write traced policies to files in the export formats, and read these files to check them."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.export import ExportedProgram

from pytorchrl.agent.policy import Policy
from pytorchrl.errors import ConfigError, ExportError
from pytorchrl.export.graph import graph_of, run_graph
from pytorchrl.export.inputs import Inputs, describe, example_inputs, output_names
from pytorchrl.support.code import import_extra
from pytorchrl.support.terminal import silenced

DESCRIPTION = "policy"
"""Key in the metadata of an exported file under which the description of the policy is stored."""

OpenPolicy = Callable[[Inputs], list[np.ndarray]]
"""An exported policy: a function from inputs to the action and the entries of the next memory."""


@dataclass(frozen=True)
class Traced:
    """A policy whose computation was recorded as a graph.

    Attributes:
        program: The graph.
        inputs: The names of its inputs.
        outputs: The names of its outputs.
        description: The description for the metadata of files.
    """

    program: ExportedProgram
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    description: dict[str, object]


def trace(name: str, policy: Policy) -> Traced:
    """Record the computation of a policy for batches of any size.

    Raises:
        ExportError: `torch.export` cannot trace the networks.
    """
    inputs = example_inputs(policy)
    args, kwargs = inputs.arguments()
    with silenced("torch.onnx"), torch.no_grad():
        try:
            program = torch.export.export(
                policy, args, kwargs, dynamic_shapes=inputs.dynamic_shapes(), strict=False).run_decompositions({})
        except Exception as error:
            reason = str(error).partition("\n")[0].rstrip(". ")  # `from error` keeps the other lines
            raise ExportError(f"torch.export cannot trace the policy {name!r}: {reason}; its networks must not use the "
                              "values of tensors in Python, and must accept batches of any size") from error
        return Traced(program, tuple(inputs.named()), tuple(output_names(policy)), describe(name, policy, inputs))


# PyTorch


def _write_torch(traced: Traced, path: Path) -> None:
    torch.export.save(traced.program, path, extra_files={f"{DESCRIPTION}.json": json.dumps(traced.description)})


def _open_torch(path: Path) -> OpenPolicy:
    module = torch.export.load(path).module()

    def compute(inputs: Inputs) -> list[np.ndarray]:
        args, kwargs = inputs.arguments()
        returned = module(*args, **kwargs)
        action, memory = returned if inputs.memory else (returned, {})
        return [action.numpy(), *(state.numpy() for state in memory.values())]
    return compute


# ONNX


def _write_onnx(traced: Traced, path: Path) -> None:
    made = torch.onnx.export(
        traced.program, dynamo=True, verbose=False, input_names=list(traced.inputs), output_names=list(traced.outputs))
    assert made is not None  # `None` is returned only if a path is given
    made.model.metadata_props[DESCRIPTION] = json.dumps(traced.description)
    made.save(path, external_data=False)


def _open_onnx(path: Path) -> OpenPolicy:
    runtime = importlib.import_module("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = 1
    session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    used = {entry.name for entry in session.get_inputs()}

    def compute(inputs: Inputs) -> list[np.ndarray]:
        found: list[np.ndarray] = session.run(
            None, {name: array for name, array in inputs.named().items() if name in used})
        return found
    return compute


# Safetensors


def _write_safetensors(traced: Traced, path: Path) -> None:
    graph, tensors = graph_of(traced.program, traced.inputs)
    description = {**traced.description, **graph}
    save = importlib.import_module("safetensors.torch").save
    path.write_bytes(save(tensors, {DESCRIPTION: json.dumps(description)}))


def _open_safetensors(path: Path) -> OpenPolicy:
    with importlib.import_module("safetensors").safe_open(path, "pt") as file:
        description = json.loads(file.metadata()[DESCRIPTION])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - `file` is not a mapping

    def compute(inputs: Inputs) -> list[np.ndarray]:
        named = {name: torch.as_tensor(array) for name, array in inputs.named().items()}
        return [tensor.numpy() for tensor in run_graph(description, {**tensors, **named})]
    return compute


@dataclass(frozen=True)
class Format:
    """A format of exported files.

    Attributes:
        suffix: Suffix of its files.
        packages: Packages that are needed to write and check a file.
        write: Function that writes a traced policy to a path.
        open: Function that reads a file and returns the policy.
    """

    suffix: str
    packages: tuple[str, ...]
    write: Callable[[Traced, Path], None]
    open: Callable[[Path], OpenPolicy]


FORMATS = {
    "onnx": Format(".onnx", ("onnx", "onnxscript", "onnxruntime"), _write_onnx, _open_onnx),
    "torch": Format(".pt2", (), _write_torch, _open_torch),
    "safetensors": Format(".safetensors", ("safetensors",), _write_safetensors, _open_safetensors),
}
"""The formats, by name."""


def format_of(name: str) -> Format:
    """Return the format called `name`.

    Raises:
        ConfigError: There is no such format, or its packages are not installed.
    """
    if name not in FORMATS:
        raise ConfigError(f"the format must be one of {list(FORMATS)}, got {name!r}")
    for package in FORMATS[name].packages:
        import_extra(package, "export", f"exporting to {name}")
    return FORMATS[name]


def write(traced: Traced, form: Format, path: Path) -> OpenPolicy:
    """Write a policy to a file, read the file, and return the policy that it contains."""
    # Torch's exporters emit warnings that users cannot act on.
    with silenced("torch.onnx"):
        form.write(traced, path)
        return form.open(path)
