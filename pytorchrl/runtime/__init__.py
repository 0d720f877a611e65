"""Run workers as Ray actors, as processes or threads of this machine, or in a simulation with a virtual clock."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

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
from pytorchrl.runtime.collective import Collective as Collective  # not public, so `__all__` leaves it out
from pytorchrl.runtime.faults import FaultPlan
from pytorchrl.runtime.journal import Event as Event
from pytorchrl.runtime.journal import Journal as Journal
from pytorchrl.runtime.journal import Section as Section
from pytorchrl.runtime.journal import WorkersPart as WorkersPart
from pytorchrl.runtime.processes.runtime import ProcessRuntime
from pytorchrl.runtime.ray.runtime import RayRuntime
from pytorchrl.runtime.simulated import SimulatedRuntime
from pytorchrl.runtime.threads import ThreadRuntime
from pytorchrl.support.untyped import OptionValue

RUNTIMES: Mapping[str, type[Runtime]] = MappingProxyType(
    {runtime.name: runtime for runtime in (RayRuntime, ProcessRuntime, ThreadRuntime, SimulatedRuntime)})
"""Classes of runtimes by name."""

__all__ = [
    "CPU_RESOURCES", "DEFAULT_RESOURCES", "RUNTIMES", "FaultPlan", "Future", "Handle", "Outcome", "ProcessRuntime",
    "RayRuntime", "Runtime", "SimulatedRuntime", "ThreadRuntime", "is_default", "make_runtime", "options_of_runtime",
]


def make_runtime(options: Runtime.Options, *, seed: int = 0, is_recording: bool = False,
                 replay: Mapping[tuple[str, int], Section] | None = None) -> Runtime:
    """Return the runtime that the type of `options` selects.

    Ray is imported and started only when the first worker starts.

    Args:
        options: An instance of the class `Options` of one of the runtimes in `RUNTIMES`, or of a subclass.
        seed: Seed of the experiment; it also determines when injected faults with a probability occur.
        is_recording: Whether workers record the order of timing-dependent events.
        replay: Journals to replay, for the simulated runtime only. A key is the name of a worker and the number of
            times that this worker had been replaced.

    Raises:
        ConfigError: `options` are not those of a runtime, or contradict the other arguments.
    """
    if isinstance(options, SimulatedRuntime.Options):
        return SimulatedRuntime(options, seed=seed, is_recording=is_recording, replay=replay)
    if replay is not None:
        raise ConfigError(f"a record is replayed in the simulated runtime only, got {type(options).__qualname__}")
    if isinstance(options, RayRuntime.Options):
        return RayRuntime(options, seed=seed, is_recording=is_recording)
    if isinstance(options, ProcessRuntime.Options):
        return ProcessRuntime(options, seed=seed, is_recording=is_recording)
    if isinstance(options, ThreadRuntime.Options):
        return ThreadRuntime(options, seed=seed, is_recording=is_recording)
    raise ConfigError(f"options must be the Options of one of the runtimes {list(RUNTIMES)}, got {options!r}")


def options_of_runtime(name: str, settings: Mapping[str, OptionValue]) -> Runtime.Options:
    """Return the options of the runtime `name`, with the values in `settings` and defaults for all other options.

    Raises:
        ConfigError: The name or a value is not allowed.
    """
    if name not in RUNTIMES:
        raise ConfigError(f"runtime must be one of {list(RUNTIMES)}, got {name!r}")
    options = RUNTIMES[name].Options()
    return dataclasses.replace(options, **{
        field.name: settings[field.name] for field in dataclasses.fields(options) if field.name in settings})
