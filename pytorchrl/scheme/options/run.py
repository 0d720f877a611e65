"""Options of a run as a whole: its runtime, process, lost workers and record."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, TypeAlias

from pytorchrl.agent.options import Options, option
from pytorchrl.errors import ConfigError, Problem
from pytorchrl.runtime import RUNTIMES, ProcessRuntime, RayRuntime, SimulatedRuntime, ThreadRuntime
from pytorchrl.scheme.devices import check_device
from pytorchrl.scheme.options.base import Kind

FAILURE_POLICIES = ("restart", "ignore", "raise")


def _absolute(name: str, path: str | os.PathLike[str] | None) -> str | None:
    """Make the path in the option `name` absolute; keep None, and raise `ConfigError` for an empty path."""
    if path is None:
        return None
    if not os.fspath(path):
        raise ConfigError(f"{name} must be the path of a file or None, got {path!r}")
    return os.path.abspath(os.path.expanduser(os.fspath(path)))


@dataclass(frozen=True, kw_only=True)
class RuntimeName(Options):
    """The option that chooses a runtime by its name; `Scheme` also accepts an object with the runtime's options."""

    runtime: str | None = option(
        None, choices=(None, *RUNTIMES), help="Runtime of the workers: processes of Ray, processes on this machine "
        "without Ray, threads of this process, or a simulation, which runs one worker at a time on a virtual clock and "
        "repeats a run exactly. None: Ray if there are remote workers, else threads.")


@dataclass(frozen=True, kw_only=True)
class ProcessOptions(Options):
    """Options of the learner's process; all of them but the device also apply to the workers."""

    device: str | None = option(
        None, check=check_device, help="Device of the learner: \"cpu\", \"cuda\" or \"cuda:N\"; None is the CPU.")
    num_threads: int = option(1, low=1, help="Torch threads of every worker, including the learner.")
    deterministic_kernels: bool = option(
        False, help="Use only kernels of GPUs that repeat their results bit for bit. Some of them are slower, and an "
        "operation without such a kernel raises an error. False keeps torch's settings. The option applies to the "
        "processes of all workers; in your program, until the scheme stops.")
    tf32: bool = option(
        False, help="Let GPUs round the factors of float32 products and convolutions to TF32, which saves time on GPUs "
        "with a compute capability of 8.0 or higher. The relative error of a factor is up to 5e-4 instead of 6e-8. "
        "The option applies to the same processes as deterministic_kernels.")
    seed: int | None = option(
        None, low=0, high=2**63 - 1, help="Seed of all random numbers of the run; None draws a random seed.")

    def seed_or(self, recorded: int | None) -> int:
        """Return the seed of the run.

        It is the option `seed`, if given. Otherwise it is `recorded` or, if `recorded` is None, a random number.

        Args:
            recorded: The seed of the recorded run that is replayed; None: no run is replayed.
        """
        given = recorded if self.seed is None else self.seed
        return secrets.randbits(32) if given is None else given


@dataclass(frozen=True, kw_only=True)
class Ray(Kind, RayRuntime.Options):
    """Runtime in which remote workers are processes of a Ray cluster."""

    chosen: ClassVar[tuple[str, ...]] = ("with runtime='ray' and remote workers",)


@dataclass(frozen=True, kw_only=True)
class Processes(Kind, ProcessRuntime.Options):
    """Runtime in which remote workers are processes on this machine, without Ray."""

    chosen: ClassVar[tuple[str, ...]] = ("with runtime='processes'",)


@dataclass(frozen=True, kw_only=True)
class Threads(Kind, ThreadRuntime.Options):
    """Runtime in which all workers are threads of this process."""

    chosen: ClassVar[tuple[str, ...]] = ("with runtime='threads'",)


@dataclass(frozen=True, kw_only=True)
class Simulated(Kind, SimulatedRuntime.Options):
    """Runtime in which all workers run in this process, one at a time, on a virtual clock."""

    chosen: ClassVar[tuple[str, ...]] = ("with runtime='simulated'",)


RuntimeKind: TypeAlias = Ray | Processes | Threads | Simulated
RUNTIME_KINDS: Mapping[str, type[RuntimeKind]] = {
    "ray": Ray, "processes": Processes, "threads": Threads, "simulated": Simulated}


@dataclass(frozen=True, kw_only=True)
class SupervisorOptions(Options):
    """Options for the handling of lost workers."""

    on_worker_failure: str = option(
        "restart", choices=FAILURE_POLICIES, help="Reaction to a lost remote worker: \"restart\" starts a "
        "replacement with the newest weights, \"ignore\" continues with the other workers, \"raise\" ends the run.")
    worker_timeout_s: float = option(
        60.0, low=0.0, exclusive=True, help="Seconds without a result after which a worker is considered hung; ten "
        "times the longest call so far, if that is longer. A replacement may wait this long for free resources.")


@dataclass(frozen=True, kw_only=True)
class RecordOptions(Options):
    """Options for recording and replaying a run."""

    record: str | os.PathLike[str] | None = option(
        None, check=partial(_absolute, "record"),
        help="New file in which to record the events that, together with the seed, determine the run, such "
        "as the order in which messages arrive. It is written up to four times a second.")
    replay: str | os.PathLike[str] | None = option(
        None, check=partial(_absolute, "replay"),
        help="File that `record` wrote. The run is repeated bit for bit, to its end, in the simulated "
        "runtime; the first event that cannot be repeated raises an error.")

    def contradictions(self) -> Iterator[Problem]:
        """Refuse to record a run that is replayed."""
        yield from super().contradictions()
        if self.record is not None and self.replay is not None:
            yield Problem("record and replay exclude each other", "leave one out", ("record", "replay"))
