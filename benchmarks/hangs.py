"""Let a call of an environment hang during training, and measure when it is named; print the outcomes as JSON.

    python benchmarks/hangs.py [--limit 1.0] [--calls step ...] [--runtimes ray ...]

One of two environments hangs in its thirtieth `step`, in a `reset`, in `render` (called by a wrapper in each step) or
in `close`, for longer than the run. For each call, runtime and value of `on_env_error`, a new process trains PPO with
`env_timeout_s=--limit`. `named_s` is the time from the beginning of the hang until a line of the program's output names
the call, and `late_s` is `named_s` minus the limit. `has_stack` says whether the output shows the function that hangs,
`goes_on` whether five more updates were made, and `error` is the class of the error that ended training, if any did.
The ledger must balance after `stop()`, which takes `stop_s`. The script asserts nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from results import print_result

from pytorchrl.envs.testing import HangingEnv

CALLS = ("step", "reset", "render", "close")
RUNTIMES: dict[str, dict[str, Any]] = {
    "central": {},
    "collector thread": {"col_communication": "asynchronous"},
    "threads": {"num_col_workers": 2, "col_communication": "asynchronous", "runtime": "threads"},
    "processes": {"num_col_workers": 2, "col_communication": "asynchronous", "runtime": "processes"},
    "ray": {"num_col_workers": 2, "col_communication": "asynchronous", "runtime": "ray",
            "col_worker_resources": {"num_cpus": 0}},
}
REACTIONS = ("restart", "raise")
HANG_S = 120.0
GIVE_UP_S = 90.0


class SlowSimulator(HangingEnv):
    """An environment of which one call hangs once, in one process only; the time of the hang is written to a file."""

    def __init__(self, call: str, at: int, file: str) -> None:
        super().__init__(call, at)
        self._file = file

    def hang(self) -> None:
        """Take longer than the run, unless another environment has done so."""
        with contextlib.suppress(FileExistsError):
            with open(self._file, "x", encoding="ascii") as file:
                file.write(str(time.time()))
            self.simulator_that_hangs()

    def simulator_that_hangs(self) -> None:
        time.sleep(HANG_S)


class Rendering(gym.Wrapper[np.ndarray, np.int64, np.ndarray, np.int64]):
    """Wrapper that renders each step, like a wrapper that records a video."""

    def step(self, action: np.int64) -> tuple[np.ndarray, Any, bool, bool, dict[str, Any]]:
        """Step the environment, and render it."""
        result = self.env.step(action)
        self.env.render()
        return result


def run_case(call: str, runtime: str, reaction: str, limit: float, file: str) -> None:
    """Train until the environment has hung, make five more updates, and print the outcome."""
    import logging

    from pytorchrl import PPO, GAEBuffer, OnPolicyActor, Scheme, VecEnv
    from pytorchrl.errors import PyTorchRLError

    logging.basicConfig(level=logging.WARNING)
    at = {"step": 30, "reset": 6, "render": 30, "close": 1}[call]
    kwargs = {"call": "none", "at": at, "file": file}  # the environment that finds the spaces must not hang
    factory = VecEnv.create_factory(SlowSimulator, kwargs, 2, wrappers=(Rendering,), env_timeout_s=limit,
                                    on_env_error=reaction)
    factory.options.env_kwargs["call"] = call
    scheme = Scheme(
        PPO.create_factory(num_epochs=1, num_mini_batch=1),
        OnPolicyActor.create_factory(factory.observation_space, factory.action_space, hidden_sizes=(4,)),
        GAEBuffer.create_factory(8), factory, seed=1, **RUNTIMES[runtime])
    error, extra, start = "", 0, time.monotonic()
    try:
        while extra < 5 and time.monotonic() - start < GIVE_UP_S:
            scheme.step()
            extra += call == "close" or bool(scheme.metrics().get("envs_restarted"))
    except PyTorchRLError as failure:
        error = type(failure).__name__
        sys.stderr.write(f"{failure}\n")
        sys.stderr.flush()
    start = time.monotonic()
    ledger = scheme.stop()
    sys.stdout.write(json.dumps({
        "goes_on": extra == 5, "error": error, "stop_s": round(time.monotonic() - start, 2),
        "ledger_exact": ledger["collected"] == ledger["consumed_unique"] + sum(ledger["dropped"].values())}) + "\n")
    sys.stdout.flush()
    os._exit(0)  # the thread of the environment still hangs


def measure(call: str, runtime: str, reaction: str, limit: float) -> dict[str, Any]:
    """Run one case in a new process, and note when its output names the call."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "began"
        process = subprocess.Popen(
            [sys.executable, __file__, "--limit", str(limit), "--case", call, runtime, reaction, str(file)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert process.stdout is not None
        named, lines = None, list[str]()
        for line in process.stdout:
            if named is None and f"{call if call != 'render' else 'step'} has not returned within" in line:
                named = time.time()
            lines.append(line)
        process.wait()
        began = float(file.read_text()) if file.exists() else None
    found = next((json.loads(line) for line in reversed(lines) if line.startswith("{")), {"output": lines[-5:]})
    named_s = None if named is None or began is None else named - began
    return {"call": call, "runtime": runtime, "on_env_error": reaction, **found,
            "named_s": None if named_s is None else round(named_s, 2),
            "late_s": None if named_s is None else round(named_s - limit, 2),
            "has_stack": any("simulator_that_hangs" in line for line in lines)}


def main() -> None:
    """Measure all cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=float, default=1.0, help="env_timeout_s, in seconds")
    parser.add_argument("--calls", nargs="+", default=CALLS, choices=CALLS, help="calls that hang")
    parser.add_argument("--runtimes", nargs="+", default=list(RUNTIMES), choices=RUNTIMES, help="runtimes of workers")
    parser.add_argument("--case", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        run_case(*options.case[:3], options.limit, options.case[3])
    rows = []
    for call, runtime, reaction in itertools.product(options.calls, options.runtimes, REACTIONS):
        rows.append(measure(call, runtime, reaction, options.limit))
        sys.stderr.write(json.dumps(rows[-1]) + "\n")
    late = [row["late_s"] for row in rows if row["late_s"] is not None]
    print_result({"limit_s": options.limit, "cases": len(rows), "named": len(late),
                  "with_stack": sum(row["has_stack"] for row in rows),
                  "max_late_s": max(late, default=None), "rows": rows})


if __name__ == "__main__":
    main()
