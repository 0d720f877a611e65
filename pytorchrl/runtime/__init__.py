"""Where workers run: Ray actors, threads of one process, or a simulation of both on a virtual clock."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pytorchrl.errors import ConfigError
from pytorchrl.runtime.base import (
    CPU_RESOURCES,
    DEFAULT_RESOURCES,
    Future,
    Handle,
    Outcome,
    Runtime,
    is_default,
)
from pytorchrl.runtime.collective import Collective
from pytorchrl.runtime.faults import FaultPlan
from pytorchrl.runtime.journal import Event, Journal, Part, WorkersPart
from pytorchrl.runtime.threads import ThreadRuntime

RUNTIMES = ("ray", "threads", "simulated")

__all__ = ["CPU_RESOURCES", "DEFAULT_RESOURCES", "RUNTIMES", "Collective", "Event", "FaultPlan", "Future", "Handle",
           "Journal", "Outcome", "Part", "Runtime", "ThreadRuntime", "WorkersPart", "is_default", "make_runtime"]


def make_runtime(name: str, address: str | None = None, schedule_seed: int = 0,
                 costs: Mapping[str, Any] | None = None, faults: FaultPlan | None = None, is_recording: bool = False,
                 replay: Mapping[tuple[str, int], Part] | None = None, placement: str | None = None) -> Runtime:
    """The runtime called `name`: "ray" (started at its first worker; imported only then), "threads" or "simulated".

    Args:
        name: One of `RUNTIMES`.
        address: Of a Ray cluster.
        schedule_seed: Of the simulated schedule.
        costs: Virtual seconds by operation in the simulated runtime; see `Costs`.
        faults: Failures to inject into workers.
        is_recording: Whether workers note what depends on timing.
        replay: Journals by worker and incarnation, to be repeated in the simulated runtime.
        placement: Of Ray's workers; see `RayRuntime`.
    """
    if name == "threads":
        return ThreadRuntime(faults, is_recording)
    if name == "simulated":
        from pytorchrl.runtime.simulated import SimulatedRuntime
        return SimulatedRuntime(schedule_seed, costs, faults, is_recording, replay)
    if name == "ray":
        from pytorchrl.runtime.ray_runtime import RayRuntime
        return RayRuntime(address, faults, is_recording, placement)
    raise ConfigError(f"runtime must be one of {list(RUNTIMES)}, got {name!r}")
