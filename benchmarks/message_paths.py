"""Trace rollouts, gradients, weights, errors and checkpoints, and count the files and functions that they visit.

    python benchmarks/message_paths.py
    python benchmarks/message_paths.py --tree ../before

A call counts if one of its arguments, or its result, is the message or contains the message. A rollout is traced until
its data is removed. Some calls do not count: methods of the message and of a train batch, wrappers that only time a
call, and calls in the runtime and the agent. The agent's storage is an exception and counts as one file. For each
message, the script prints as JSON the files in the order of the first visit, the number of functions, and how often the
message returns to a file that it has left. The counts do not depend on the machine.

An error is an exception in the `step` of an environment of a remote worker. It visits each file in which it is raised,
or raised again. A checkpoint is the state of the algorithm, traced from the gradient worker to the file on the disk.
For these two, calls in the whole package count.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from results import print_result

HERE = Path(__file__).resolve().parents[1]
SOURCES = ("pytorchrl/scheme/", "pytorchrl/agent/storages/", "pytorchrl/agent/synthetic.py")
CONTAINERS = ("Item", "Part", "TrainBatch", "QueuedRollout")
# Number of updates after which the first message of each kind has been used.
UPDATES = 8
ASYNC = {"col_communication": "asynchronous"}
PATHS: dict[str, tuple[str, dict[str, Any]]] = {
    "rollout, parallel and asynchronous": ("Rollout", {"num_col_workers": 2, **ASYNC}),
    "rollout, parallel and synchronous": ("Rollout", {"num_col_workers": 2}),
    "rollout, central and synchronous": ("Rollout", {}),
    "gradient, parallel and synchronous": ("Gradients", {"num_grad_workers": 2}),
    "weights, parallel and asynchronous": ("Weights", {"num_col_workers": 2, **ASYNC}),
}


class Tracer:
    """Profile function that records all calls that handle the first message of a class.

    Args:
        kind: Name of the message's class.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._key: tuple[Any, ...] | None = None
        self._kept: dict[int, Any] = {}  # id -> data of the message; the references prevent the reuse of ids
        self._lock = threading.Lock()
        self.visits: list[tuple[str, str]] = []

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Record a call or the return from a call; Python calls this profile function in all threads."""
        name = frame.f_code.co_filename
        file = next((name[name.index(source):] for source in SOURCES if source in name), None)
        if file is None or event not in ("call", "return") or frame.f_code.co_name.startswith("<"):
            return
        code = frame.f_code
        values = [frame.f_locals.get(name) for name in code.co_varnames[:code.co_argcount + code.co_kwonlyargcount]]
        is_method = code.co_varnames[:1] == ("self",) and type(values[0]).__name__ in (self._kind, *CONTAINERS)
        if is_method or code.co_name == "call":
            return
        with self._lock:
            if any(self._carries(value) for value in (values if event == "call" else [argument])):
                file = "storage" if file.startswith("pytorchrl/agent/") else file
                self.visits.append((file, code.co_qualname if sys.version_info >= (3, 11) else code.co_name))

    def _carries(self, value: Any, depth: int = 5) -> bool:
        if id(value) in self._kept:
            return True
        if type(value).__name__ == self._kind:
            return self._is_message(value)
        if depth and isinstance(value, (list, tuple)) and len(value) < 100:
            return any(self._carries(part, depth - 1) for part in value)
        parts = [getattr(value, name, None) for name in ("parts", "rollouts", "rollout", "value")] \
            if depth and type(value).__name__ in (*CONTAINERS, "Outcome") else []
        return any(self._carries(part, depth - 1) for part in parts if part is not None)

    def _is_message(self, message: Any) -> bool:
        if self._kind == "Rollout" and message.data is None:
            return False
        source = getattr(message, "header", message)
        key = tuple(getattr(source, name, None) for name in ("worker", "incarnation", "sequence", "version"))
        if self._key is None:
            self._key = key
        if key != self._key:
            return False
        for part in ([message.data] if self._kind == "Rollout" else []):
            self._kept[id(part)] = part
        return True

    def result(self) -> dict[str, Any]:
        """Return the files, the number of functions, and how often the message returned to a file that it had left."""
        files: list[str] = []
        returns, last = 0, None
        for file, _ in self.visits:
            if file != last:
                returns += file in files
                files.extend([] if file in files else [file])
            last = file
        return {"files": files, "num_files": len(files), "functions": len(set(self.visits)), "returns": returns}


def trace(kind: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the files and functions that one message visits in a scheme in the simulated runtime."""
    from pytorchrl import Scheme
    from pytorchrl.agent.synthetic import synthetic_agent

    scheme = Scheme(*synthetic_agent(size=4), runtime="simulated", seed=1, **settings)
    tracer = Tracer(kind)
    threading.setprofile(tracer)
    try:
        sys.setprofile(tracer)
        for _ in range(UPDATES):
            scheme.step()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type] # None removes the profile function
        scheme.stop()
    return tracer.result()


class ValueTracer(Tracer):
    """Profile function that records all calls that handle a value, or a mapping or sequence that contains the value."""

    def __init__(self, name: str) -> None:
        super().__init__("")
        self._name = name

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Record a call or the return from a call in any file of the package."""
        name = frame.f_code.co_filename
        if "/pytorchrl/" in name and event in ("call", "return") and not frame.f_code.co_name.startswith("<"):
            code = frame.f_code
            values = [frame.f_locals.get(name) for name in code.co_varnames[:code.co_argcount + code.co_kwonlyargcount]]
            if any(self._carries(value) for value in (values if event == "call" else [argument])):
                with self._lock:
                    self.visits.append((name[name.rindex("/pytorchrl/") + 1:], code.co_name))

    def _carries(self, value: Any, depth: int = 6) -> bool:
        if isinstance(value, dict):
            return self._name in value or (depth > 0 and any(
                self._carries(part, depth - 1) for part in value.values()))
        if isinstance(value, (list, tuple)):
            return depth > 0 and len(value) < 100 and any(self._carries(part, depth - 1) for part in value)
        return depth > 0 and type(value).__name__ == "WholeState" and self._carries(value.algorithm, depth - 1)


def trace_checkpoint() -> dict[str, Any]:
    """Return the files and functions that the state of the algorithm visits while a learner writes a checkpoint."""
    from pytorchrl import Learner, Scheme
    from pytorchrl.agent.synthetic import SyntheticAlgorithm, synthetic_agent

    tracer, state = ValueTracer("traced"), SyntheticAlgorithm.state_dict
    SyntheticAlgorithm.state_dict = lambda self: {**state(self), "traced": 1}  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder, Learner(
            Scheme(*synthetic_agent(size=4), seed=1), 1000, folder, checkpoint_every=1000, progress=False) as learner:
        learner.step()
        threading.setprofile(tracer)
        sys.setprofile(tracer)
        try:
            learner.save_checkpoint()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type] # None removes the profile function
            SyntheticAlgorithm.state_dict = state  # type: ignore[method-assign]
    return tracer.result()


def trace_error() -> dict[str, Any]:
    """Return the files and functions through which an error of an environment reaches the caller of `Scheme.step`."""
    from pytorchrl import PPO, GAEBuffer, OnPolicyActor, Scheme, VecEnv
    from pytorchrl.envs.testing import CountingEnv, FaultyEnv
    from pytorchrl.errors import EnvError

    visits: list[tuple[str, str]] = []
    seen: set[int] = set()

    def look(frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        if "/pytorchrl/" not in name or "/envs/" in name:
            return look
        if event == "exception":
            error = argument[1]
            chain = []
            while error is not None and len(chain) < 10:
                chain.append(error)
                error = error.__cause__ or error.__context__
            if any("faulty step" in str(part) or id(part) in seen for part in chain):
                seen.update(map(id, chain))
                visits.append((name[name.rindex("/pytorchrl/") + 1:], frame.f_code.co_name))
        return look

    spaces = VecEnv.create_factory(CountingEnv, vec_env_size=1)
    envs = VecEnv.create_factory(FaultyEnv, {"fault": "step", "at": 3}, vec_env_size=1, on_env_error="raise")
    scheme = Scheme(
        PPO.create_factory(), OnPolicyActor.create_factory(spaces.observation_space, spaces.action_space),
        GAEBuffer.create_factory(8), envs, num_col_workers=2, runtime="threads", seed=1)
    threading.settrace(look)
    sys.settrace(look)
    try:
        scheme.step()
    except EnvError:
        pass  # the traced error
    finally:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type] # None removes the trace function
        scheme.stop()
    tracer = Tracer("")
    tracer.visits = visits
    return tracer.result()


def main() -> None:
    """Print the visited files and functions in this source tree or another one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, help="root of another source tree; its own benchmarks are not used")
    tree = parser.parse_args().tree
    if tree is not None:
        environment = {**os.environ, "PYTHONPATH": str(tree.resolve())}
        raise SystemExit(subprocess.run([sys.executable, __file__], env=environment, check=False).returncode)
    found = {name: trace(*path) for name, path in PATHS.items()}
    print_result({**found, "error": trace_error(), "checkpoint": trace_checkpoint()})


if __name__ == "__main__":
    if str(HERE) not in os.environ.get("PYTHONPATH", "").split(os.pathsep) and "PYTHONPATH" not in os.environ:
        sys.path.insert(0, str(HERE))
    main()
