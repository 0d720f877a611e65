"""Load exported files in a process that cannot import the library, and compare their actions with recorded ones.

The first argument is a pickle: file -> steps, each (obs, is_first, mask, action, reward). The script prints a JSON
object: file -> number of actions, number of different actions, and number of distinct actions.
"""

from __future__ import annotations

import importlib
import json
import operator
import pickle
import sys
from pathlib import Path

import numpy as np
import torch

def map_leaves(function, obs):
    if isinstance(obs, dict):
        return {key: map_leaves(function, value) for key, value in obs.items()}
    return function(obs)


def named(obs, path=()):
    if isinstance(obs, dict):
        return {name: leaf for key, value in obs.items() for name, leaf in named(value, (*path, key)).items()}
    return {"/".join(path) or "obs": obs}


def open_torch(path):
    files = {"policy.json": ""}
    module = torch.export.load(path, extra_files=files).module()

    def compute(obs, memory, mask):
        states = ({name: torch.as_tensor(state) for name, state in memory.items()},) if memory else ()
        returned = module(map_leaves(torch.as_tensor, obs), *states,
                          **({} if mask is None else {"mask": torch.as_tensor(mask)}))
        action, after = returned if memory else (returned, {})
        return action.numpy(), {name: state.numpy() for name, state in after.items()}
    return compute, json.loads(files["policy.json"])


def open_onnx(path):
    import onnxruntime

    session = onnxruntime.InferenceSession(path)

    def compute(obs, memory, mask):
        inputs = {**named(obs), **{f"memory/{name}": state for name, state in memory.items()},
                  **({} if mask is None else {"mask": mask})}
        action, *states = session.run(None, inputs)
        return action, dict(zip(memory, states, strict=True))
    return compute, json.loads(session.get_modelmeta().custom_metadata_map["policy"])


def open_safetensors(path):
    import safetensors

    with safetensors.safe_open(path, "pt") as file:
        description = json.loads(file.metadata()["policy"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - `file` is not a mapping

    def function(name):
        namespace, *parts = name.split(".")
        found = operator if namespace == "operator" else getattr(torch.ops, namespace)
        for part in parts:
            found = getattr(found, part)
        return found

    def compute(obs, memory, mask):
        inputs = {**named(obs), **{f"memory/{name}": state for name, state in memory.items()},
                  **({} if mask is None else {"mask": mask})}
        values = {**tensors, **{name: torch.as_tensor(array) for name, array in inputs.items()}}

        def decoded(item):
            if isinstance(item, list):
                return [decoded(one) for one in item]
            if isinstance(item, dict):
                return values[item["value"]] if "value" in item else getattr(torch, item["torch"])
            return item
        for step in description["operations"]:
            values[step["name"]] = function(step["op"])(
                *decoded(step["args"]), **{key: decoded(item) for key, item in step["kwargs"].items()})
        action, *states = [values[name].numpy() for name in description["results"]]
        return action, dict(zip(memory, states, strict=True))
    return compute, description


OPEN = {".pt2": open_torch, ".onnx": open_onnx, ".safetensors": open_safetensors}


def check(path, steps):
    compute, description = OPEN[Path(path).suffix](path)
    shapes = {entry["name"].removeprefix("memory/"): entry["shape"][1:]
              for entry in description["inputs"] if entry["name"].startswith("memory/")}
    memory, different, chosen = None, 0, set()
    for obs, is_first, mask, action, reward in steps:
        if is_first:
            memory = {name: np.zeros((1, *shape), np.float32) for name, shape in shapes.items()}
        batch = map_leaves(lambda leaf: np.asarray(leaf)[None], obs)
        found, memory = compute(batch, memory, None if mask is None else mask[None])
        if "q/previous" in memory:
            memory["q/previous"] = memory["q/previous"].copy()
            memory["q/previous"][:, -1] = reward
        is_exact = np.asarray(action).dtype.kind != "f"
        different += not np.allclose(found[0], action, rtol=0, atol=0 if is_exact else 1e-5)
        chosen.add(str(action))
    return len(steps), different, len(chosen)


def main():
    sys.modules["pytorchrl"] = None  # importing it now raises an ImportError
    torch.set_num_threads(1)
    found = {path: check(path, steps) for path, steps in pickle.loads(Path(sys.argv[1]).read_bytes()).items()}
    try:
        importlib.import_module("pytorchrl")
    except ImportError:
        sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
