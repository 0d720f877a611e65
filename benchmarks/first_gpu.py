"""Run on a GPU what has not run on one, in ten minutes, and print what happened.

    python benchmarks/first_gpu.py [--minutes 9.5] [--logs build/first_gpu] [--steps tests,waits]
    python benchmarks/first_gpu.py --emulated

| step | what it does |
|---|---|
| `machine` | names the GPUs and versions, and copies and multiplies a matrix |
| `tests` | runs the tests for GPUs that neither compile nor record anything |
| `recorded_tests` | runs the tests that record CUDA graphs |
| `compiled_tests` | runs the other tests that compile losses |
| `failed_capture` | records a CUDA graph of an actor that waits for the GPU, which fails, and uses the GPU afterwards |
| `waits` | counts how often lines of code wait for the GPU in three updates of PPO, SAC and DQN |
| `exactness` | trains twice on images with `deterministic_kernels=True`, and compares float32 and TF32 with the CPU |
| `benchmark` | runs `gpu.py` in the time that is left |

After the failure in `failed_capture`, the same stream must be in use, actions must go on, and the memory that torch
reserves must not grow over 200 staged batches. In `exactness`, both runs must lead to equal parameters, and the values
of images in float32 may differ from those of the CPU by a ten-thousandth of their norm.

Each step runs in a process of its own, and is ended when its time is over. After each step, the script prints whether
the step passed, its seconds and its figures; its whole output is in a file of the folder `--logs`. At the end, the
script prints one JSON object. The exit code is 0 if no step failed. `--emulated` uses the GPU of `tests/emulated_gpu`,
which computes on the CPU; steps that cannot run there are named.

Besides torch and NumPy, the script needs these packages, which are pure Python: gymnasium, farama-notifications,
cloudpickle, typing-extensions, pytest, pytest-timeout, pluggy, iniconfig, packaging, pygments. Neither this project nor
Ray need be installed. If MuJoCo is installed, the benchmark includes SAC. For a machine without a network, run the
first line elsewhere with the names of all these packages, copy the folder `wheels` with the repository, and run the
other lines on the machine:

    python -m pip download --no-deps --only-binary=:all: -d wheels gymnasium farama-notifications cloudpickle pytest ...
    python -m pip install --no-index --no-deps --target site wheels/*.whl
    PYTHONPATH=site python benchmarks/first_gpu.py
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "pytorchrl"
NEEDED = ("torch", "numpy", "gymnasium", "cloudpickle", "pytest", "pytest_timeout")
GPU = "cuda:0"
RESULT = "RESULT "
# Longest time of one test, in seconds.
TEST_LIMIT = 60
# Seconds that a process has to end, after it was asked to or killed.
GRACE = 5.0


class CannotRunError(Exception):
    """A step, or a part of it, cannot run on the emulated GPU."""


# Steps that run in a process of this script


def machine(emulated: bool) -> dict[str, Any]:
    """Return the GPUs and versions, after a first use of the GPU."""
    import torch

    product = torch.ones(256, 256).pin_memory().to(GPU, non_blocking=True) @ torch.ones(256, 256, device=GPU)
    assert product.cpu().eq(256).all()
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return {"torch": torch.__version__, "cuda": torch.version.cuda, "python": sys.version.split()[0],
            "nccl": torch.distributed.is_available() and torch.distributed.is_nccl_available(),
            "cudnn": None if emulated else torch.backends.cudnn.version(),
            "gpus": [f"{device.name}, {device.total_memory >> 20} MiB, {device.major}.{device.minor}"
                     for device in devices]}


def failed_capture(emulated: bool) -> dict[str, Any]:
    """Let a recording fail, and use the GPU afterwards."""
    import dataclasses

    import numpy as np
    import torch
    from gymnasium.spaces import Box

    from pytorchrl import PPO, OnPolicyActor
    from pytorchrl.scheme.gradients.staging import staging_for

    class WaitingActor(OnPolicyActor):
        """An actor that waits for the GPU in each action."""

        def policy_features(self, obs: Any, rhs: Any, done: Any) -> Any:
            features, states = super().policy_features(obs, rhs, done)
            return (features.clamp(-1, 1) if float(features.abs().max()) > 1e6 else features), states

    space = Box(-1.0, 1.0, (8,), np.float32)
    factory = dataclasses.replace(OnPolicyActor.create_factory(space, space), cls=WaitingActor)
    algorithm = PPO.create_factory(compile=True)(device=GPU, actor=factory(device=GPU, seed=0), seed=0)
    # Otherwise, the wait would be found before the recording, which would not be begun.
    algorithm._recorded_act._is_compiled = True
    stream, obs = torch.cuda.current_stream(), {"obs": np.zeros((4, 8), np.float32)}
    actions = [algorithm.acting_step(obs, {}, np.zeros(4, bool)).action for _ in range(10)]
    assert torch.cuda.current_stream() == stream, "another stream is in use after the recording failed"
    assert algorithm._recorded_act.has_failed, "the recording did not fail"
    assert len(np.unique(actions)) == 10 * 4 * 8, "actions repeat after the recording failed"
    staging, reserved = staging_for(torch.device(GPU), time.monotonic), []
    for number, batch in enumerate(staging.ahead({"obs": torch.ones(1 << 22)} for _ in range(200))):
        assert staging.on_device(batch)["obs"].sum().item() == 1 << 22
        if not emulated and number % 20 == 19:
            reserved.append(torch.cuda.memory_reserved() >> 20)
    assert emulated or reserved[-1] <= reserved[0], f"torch reserves more and more memory (MiB): {reserved}"
    return {"reserved_mib": reserved or "not on the emulated GPU"}


def waits(emulated: bool) -> dict[str, Any]:
    """Count the waits for the GPU in three updates of three algorithms, by lines of code."""
    import torch

    if emulated:
        raise CannotRunError("the emulated GPU never waits")
    return {name: waits_of(algorithm, torch) for name, algorithm in agents().items()}


def agents() -> dict[str, Any]:
    """Return the arguments of a scheme for PPO, SAC and DQN."""
    from pytorchrl import DQN, PPO, SAC, GAEBuffer, OffPolicyActor, OnPolicyActor, QActor, ReplayBuffer, VecEnv

    pendulum, pole = (VecEnv.create_factory(name, vec_env_size=4) for name in ("Pendulum-v1", "CartPole-v1"))
    replay = {"start_steps": 64, "mini_batch_size": 32}
    storage = ReplayBuffer.create_factory(1000, rollout_size=4)
    return {
        "ppo": (PPO.create_factory(num_epochs=2, num_mini_batch=2),
                OnPolicyActor.create_factory(pole.observation_space, pole.action_space),
                GAEBuffer.create_factory(16), pole),
        "sac": (SAC.create_factory(**replay),
                OffPolicyActor.create_factory(pendulum.observation_space, pendulum.action_space), storage, pendulum),
        "dqn": (DQN.create_factory(**replay),
                QActor.create_factory(pole.observation_space, pole.action_space), storage, pole)}


def waits_of(agent: Any, torch: Any) -> dict[str, Any]:
    """Return the waits of three updates, with the collection between them."""
    from pytorchrl import Scheme

    lines: collections.Counter[str] = collections.Counter()

    def count(message: Any, *others: Any) -> None:
        if "synchronizing CUDA operation" in str(message):
            own = [frame for frame in traceback.extract_stack() if Path(frame.filename).is_relative_to(PACKAGE)]
            lines[f"{Path(own[-1].filename).relative_to(PACKAGE)}:{own[-1].lineno}" if own else "elsewhere"] += 1
    scheme = Scheme(*agent, runtime="simulated", seed=1, device=GPU)
    try:
        while scheme.version < 4:
            scheme.step()
        first, steps = scheme.version, scheme.env_steps
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = count
            torch.cuda.set_sync_debug_mode("warn")
            while scheme.version < first + 3:
                scheme.step()
            torch.cuda.set_sync_debug_mode("default")
        return {"updates": scheme.version - first, "env_steps": scheme.env_steps - steps, "waits": lines.total(),
                "lines": dict(lines.most_common())}
    finally:
        scheme.stop()


def exactness(emulated: bool) -> dict[str, Any]:
    """Train twice on images with deterministic kernels, and compare the outputs of a network with those of the CPU."""
    import torch
    from gpu import random_batch, spaces_of_images

    from pytorchrl import PPO, OnPolicyActor
    from pytorchrl.scheme.numerics import Numerics

    if emulated:  # it has been in use since this process began
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    first, second = parameters_after_images(), parameters_after_images()
    assert torch.equal(first, second), f"two runs differ by up to {(first - second).abs().max().item():.2g}"

    def built(device: str) -> Any:
        actor = OnPolicyActor.create_factory(*spaces_of_images())(device=device, seed=1)
        return PPO.create_factory()(actor=actor, device=device, seed=1)

    def values(algorithm: Any, device: str) -> Any:
        with torch.inference_mode():
            return algorithm.actor.get_value({"obs": images.to(device)}, {}, done.to(device))[0]["value"].float().cpu()
    torch.manual_seed(1)
    own, images, done = built("cpu"), random_batch(64, "cpu")[0], torch.zeros(64, dtype=torch.bool)
    expected, errors = values(own, "cpu"), {}
    for name, tf32 in (("float32", False), ("tf32", True)):
        Numerics(False, tf32).apply()
        algorithm = built(GPU)
        algorithm.load_gradient_state(own.gradient_state())
        errors[name] = ((values(algorithm, GPU) - expected).norm() / expected.norm()).item()
    assert errors["float32"] < 1e-4, errors
    return {"relative_errors": errors}


def parameters_after_images() -> Any:
    """Return the parameters on the CPU after a few updates of PPO on images, with deterministic kernels."""
    import gymnasium
    from gpu import spaces_of_images

    from pytorchrl import PPO, GAEBuffer, OnPolicyActor, Scheme, VecEnv

    class Images(gymnasium.Env):  # type: ignore[misc] # the base class may have no types
        """An environment with random images and episodes of 20 steps."""

        observation_space, action_space = spaces_of_images()

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            super().reset(seed=seed)
            self.step_number = 0
            return self.image(), {}

        def step(self, action: Any) -> Any:
            self.step_number += 1
            return self.image(), float(action == 1), self.step_number == 20, False, {}

        def image(self) -> Any:
            return self.np_random.integers(0, 256, self.observation_space.shape, self.observation_space.dtype)

    envs = VecEnv.create_factory(Images, vec_env_size=4)
    scheme = Scheme(
        PPO.create_factory(num_epochs=2, num_mini_batch=2),
        OnPolicyActor.create_factory(envs.observation_space, envs.action_space), GAEBuffer.create_factory(16), envs,
        runtime="simulated", seed=1, device=GPU, deterministic_kernels=True)
    try:
        while scheme.version < 8:
            scheme.step()
        return scheme.acting_state()["all"].cpu()
    finally:
        scheme.stop()


# Steps that run other programs


def tests_command(selection: str) -> Callable[[argparse.Namespace, float], list[str]]:
    """Return a function that returns a command which runs a selection of the tests for GPUs."""
    def command(options: argparse.Namespace, limit_s: float) -> list[str]:
        plugin = ["-p", "tests.emulated_gpu.plugin"] if options.emulated else []
        return [sys.executable, "-m", "pytest", *plugin, "-v", "-rfE", "--tb=short", "-p", "no:cacheprovider",
                "--color=no", "--timeout", str(TEST_LIMIT), "-m", "gpu", "-k", selection,
                "tests/unit/scheme/test_gpu.py", "tests/emulated_gpu/test_emulation.py"]
    return command


def tests_figures(output: str) -> dict[str, Any]:
    """Return the numbers of results of pytest, with the tests that failed or did not end."""
    ends = re.findall(r"^(tests/\S+::.*?) (PASSED|FAILED|ERROR|SKIPPED)\b", output, re.MULTILINE)
    figures: dict[str, Any] = dict(collections.Counter(end.lower() for _, end in ends))
    failed = re.findall(r"^((?:FAILED|ERROR) tests/.*)$", output, re.MULTILINE)
    last = output.rstrip().splitlines()[-1:]
    if last and re.match(r"tests/\S+::", last[0]) and not re.search(r" (PASSED|SKIPPED)\b", last[0]):
        failed.append(f"did not end: {last[0]}")
    return figures | ({"failures": failed} if failed else {})


def benchmark_command(options: argparse.Namespace, limit_s: float) -> list[str]:
    """Return the command that measures rates on the GPU, which ends before `limit_s`."""
    second = "ppo-cartpole" if importlib.util.find_spec("mujoco") is None else "sac-halfcheetah"
    return [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--minutes", str(max(0.01, (limit_s - GRACE) / 60)),
            "--tasks", f"learner-pong,{second}", *(["--emulated", "--tiny"] if options.emulated else [])]


def benchmark_figures(output: str) -> dict[str, Any]:
    """Return the rates; raise an error if a measurement has failed for another reason than lack of time."""
    found = json.loads(output[output.index("\n{\n"):])
    failed = {cell: reason for cell, reason in found["left_out"].items()
              if not re.match(r"it took longer|\w+ is not installed", reason)}
    assert not failed, failed
    return {"seconds_of_each": found["seconds"], **found["rows"], "left_out": found["left_out"]}


# The plan


class Step(NamedTuple):
    """A step of the plan.

    Attributes:
        share: Its largest part of the whole time; a step also gets what earlier steps have left.
        function: A function of this script that returns the figures, and raises an error if the step fails.
        command, figures: In place of `function`: a function that returns the command of another program, and one that
            returns the figures from its output.
    """

    share: float
    function: Callable[[bool], dict[str, Any]] | None = None
    command: Callable[[argparse.Namespace, float], list[str]] | None = None
    figures: Callable[[str], dict[str, Any]] | None = None


STEPS = {
    "machine": Step(0.06, machine),
    "tests": Step(0.19, command=tests_command("not compile and not record"), figures=tests_figures),
    "recorded_tests": Step(0.1, command=tests_command("record"), figures=tests_figures),
    "compiled_tests": Step(0.2, command=tests_command("compile and not record"), figures=tests_figures),
    "failed_capture": Step(0.05, failed_capture),
    "waits": Step(0.05, waits),
    "exactness": Step(0.05, exactness),
    "benchmark": Step(0.3, command=benchmark_command, figures=benchmark_figures),
}


def run(name: str, options: argparse.Namespace, limit_s: float) -> dict[str, Any]:
    """Run a step in a process of its own; return how it ended, its seconds and its figures."""
    step, log = STEPS[name], options.logs / f"{name}.txt"
    command = [sys.executable, __file__, "--one", name, *(["--emulated"] if options.emulated else [])]
    if step.command is not None:
        command = step.command(options, limit_s)
    environment = {"OMP_NUM_THREADS": "1", **os.environ,
                   "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    start, code = time.monotonic(), None
    with open(log, "w", encoding="utf-8") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, env=environment,
                                   start_new_session=True)
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(limit_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # a process that waits for a driver may not end
            process.wait(GRACE)
    output = log.read_text(encoding="utf-8", errors="replace")
    result: dict[str, Any] = {"step": name, "result": "passed" if code == 0 else "failed"}
    try:
        figures = (step.figures or figures_of_function)(output)
    except (AssertionError, ValueError) as error:
        result["result"], figures = "failed", {"error": str(error)}
    if code is None:
        figures["error"] = f"it was ended after {limit_s:.0f} s"
    if "cannot_run" in figures:
        result["result"] = "cannot run"
    if result["result"] == "failed":
        figures["output"] = output.strip().splitlines()[-12:]
    return {**result, "seconds": round(time.monotonic() - start, 1), **figures}


def figures_of_function(output: str) -> dict[str, Any]:
    """Return the figures that a function of this script has printed."""
    found = [line for line in output.splitlines() if line.startswith(RESULT)]
    return dict(json.loads(found[-1].removeprefix(RESULT))) if found else {}


def call(name: str, emulated: bool) -> None:
    """Run the function of a step in this process, and print its figures."""
    function = STEPS[name].function
    assert function is not None
    try:
        figures = function(emulated)
    except CannotRunError as reason:
        figures = {"cannot_run": str(reason)}
    print(f"{RESULT}{json.dumps(figures)}", flush=True)


def show(result: dict[str, Any], number: int, total: int) -> None:
    """Print how a step ended."""
    lines = result.get("output", [])
    figures = {name: value for name, value in result.items() if name not in ("step", "result", "seconds", "output")}
    print(f"{number}/{total} {result['step']}: {result['result']}, {result['seconds']} s, {json.dumps(figures)}",
          flush=True)
    for line in lines:
        print(f"    {line}", flush=True)


def use_gpu(emulated: bool) -> None:
    """Let torch see an emulated GPU if asked; exit if torch sees no GPU."""
    if emulated:
        from tests.emulated_gpu.activation import activate
        from tests.emulated_gpu.build import build

        activate(build())
    import torch

    if not torch.cuda.is_available():
        sys.exit(f"torch {torch.__version__} sees no GPU, so nothing was run; run this script on a machine with a CUDA "
                 "device, or try it with --emulated")


def main() -> None:
    """Run all steps, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.5, help="time in which everything must end")
    parser.add_argument("--steps", default=",".join(STEPS), help="steps, separated by commas")
    parser.add_argument("--logs", type=Path, default=ROOT / "build" / "first_gpu", help="folder of the steps' output")
    parser.add_argument("--emulated", action="store_true", help="use an emulated GPU, to try the script")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    start = time.monotonic()
    sys.path.insert(0, str(ROOT))
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        sys.exit(f"{', '.join(missing)} must be installed; see --help for machines without a network")
    use_gpu(options.emulated)
    if options.one is not None:
        call(options.one, options.emulated)
        return
    from results import print_result

    names = options.steps.split(",")
    options.logs.mkdir(parents=True, exist_ok=True)
    results, planned = [], 0.0
    for number, name in enumerate(names, 1):
        # A step may use its own share and what earlier steps have left, but not the last seconds, in which it is ended.
        planned += 60 * options.minutes * STEPS[name].share
        limit_s = max(1.0, planned - GRACE - (time.monotonic() - start))
        results.append(run(name, options, limit_s))
        show(results[-1], number, len(names))
    print_result({"emulated": options.emulated, "minutes": round((time.monotonic() - start) / 60, 2),
                  "steps": results})
    sys.exit(any(result["result"] == "failed" for result in results))


if __name__ == "__main__":
    main()
