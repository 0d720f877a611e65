"""Trace the value of one option from the user's call to the function that uses it, and count the files on the way.

    python benchmarks/option_path.py
    python benchmarks/option_path.py --tree ../before

A file is on the path if one of its functions has the value as an argument, a local variable or a result, or has an
argument or a result that directly contains the value (a value of a dictionary, an item of a list, or a field of a
dataclass). The trace ends when the option's consumer is called with the value. For each way to give an option, the
script prints as JSON the files in the order of the first visit, and how often the path returns to a file that it has
left. The counts do not depend on the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from results import print_result

HERE = Path(__file__).resolve().parents[1]
# Unusual values, which no other option has.
SHARE, COUNT = 0.9437, 9437
GAE, BROADCAST = ("storages/returns.py", "gae"), ("collection/weight_broadcast.py", "__init__")


class Found(BaseException):
    """Ends the traced call, because the consumer has been called."""


class Tracer:
    """Profile function that records the files in which a value appears.

    Args:
        value: The value.
        consumer: File and name of the function that uses the option; the trace ends when it has the value.
    """

    def __init__(self, value: float, consumer: tuple[str, str]) -> None:
        self._value, self._consumer = value, consumer
        self.visits: list[str] = []
        self.is_found = False

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Record a call or the return from a call; Python calls this profile function in all threads."""
        name = frame.f_code.co_filename
        if self.is_found or "/pytorchrl/" not in name or event not in ("call", "return"):
            return
        values = list(frame.f_locals.values())
        if event == "return":  # a local variable counts only if it is the value itself
            here = any(self._is_value(value) for value in values) or self._contains(argument)
        else:
            here = any(self._contains(value) for value in values)
        if not here:
            return
        file = name[name.rindex("/pytorchrl/") + 1:]
        self.visits.append(file)
        if event == "call" and file.endswith(self._consumer[0]) and frame.f_code.co_name == self._consumer[1]:
            self.is_found = True
            if threading.current_thread() is threading.main_thread():
                raise Found

    def _is_value(self, value: Any) -> bool:
        return (type(value) in (int, float) and value == self._value) or (
            type(value) is str and value == str(self._value))

    def _contains(self, value: Any) -> bool:
        if type(value) is dict:
            return any(map(self._is_value, value.values()))
        if type(value) in (list, tuple):
            return any(map(self._is_value, value))
        fields = getattr(type(value), "__dataclass_fields__", None)
        if fields is not None:
            own = getattr(value, "__dict__", {})
            return any(self._is_value(own.get(name)) for name in fields)
        return self._is_value(value)

    def result(self) -> dict[str, Any]:
        """Return the files, their number, and how often the path returned to a file that it had left."""
        files: list[str] = []
        returns, last = 0, None
        for file in self.visits:
            if file != last:
                returns += file in files
                files.extend([] if file in files else [file])
            last = file
        return {"files": files, "num_files": len(files), "returns": returns, "reached": self.is_found}


def train() -> None:
    """Give `gae_lambda` to `train`."""
    import pytorchrl

    pytorchrl.train("ppo", "CartPole-v1", gae_lambda=SHARE, target_steps=1100, progress=False, seed=1)


def scheme() -> None:
    """Give `broadcast_interval` to `Scheme`."""
    from pytorchrl import Scheme
    from pytorchrl.agent.synthetic import synthetic_agent

    made = Scheme(*synthetic_agent(size=4), runtime="simulated", seed=1, num_col_workers=2,
                  col_communication="asynchronous", broadcast_interval=COUNT)
    try:
        made.step()
    finally:
        made.stop()


def command() -> None:
    """Give `--gae-lambda` on the command line."""
    from pytorchrl.cli import main as run

    run(["train", "ppo", "--env", "CartPole-v1", "--gae-lambda", str(SHARE), "--target-steps", "1100", "--no-progress"])


PATHS: dict[str, tuple[Callable[[], None], float, tuple[str, str]]] = {
    "train(gae_lambda=...)": (train, SHARE, GAE),
    "Scheme(broadcast_interval=...)": (scheme, COUNT, BROADCAST),
    "pytorchrl train --gae-lambda": (command, SHARE, GAE),
}


def trace(name: str) -> dict[str, Any]:
    """Return the path of one option; see `PATHS` for the names."""
    make, value, consumer = PATHS[name]
    tracer = Tracer(value, consumer)
    threading.setprofile(tracer)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            sys.setprofile(tracer)
            make()
    except BaseException:
        if not tracer.is_found:
            raise
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type] # None removes the profile function
    return tracer.result()


def main() -> None:
    """Print the paths of options in this source tree or another one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, help="root of another source tree; its own benchmarks are not used")
    tree = parser.parse_args().tree
    if tree is not None:
        environment = {**os.environ, "PYTHONPATH": str(tree.resolve())}
        raise SystemExit(subprocess.run([sys.executable, __file__], env=environment, check=False).returncode)
    print_result({name: trace(name) for name in PATHS})


if __name__ == "__main__":
    if str(HERE) not in os.environ.get("PYTHONPATH", "").split(os.pathsep) and "PYTHONPATH" not in os.environ:
        sys.path.insert(0, str(HERE))
    main()
