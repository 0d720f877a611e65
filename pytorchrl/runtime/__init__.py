"""Where workers run: Ray actors, or threads of one process."""

from __future__ import annotations

from pytorchrl.errors import ConfigError
from pytorchrl.runtime.base import DEFAULT_RESOURCES, BoundedQueue, Future, Handle, Outcome, Runtime
from pytorchrl.runtime.threads import ThreadRuntime

RUNTIMES = ("ray", "threads")

__all__ = ["DEFAULT_RESOURCES", "RUNTIMES", "BoundedQueue", "Future", "Handle", "Outcome", "Runtime", "ThreadRuntime",
           "make_runtime"]


def make_runtime(name: str, address: str | None = None) -> Runtime:
    """The runtime called `name`: "ray" (started at its first worker; imported only then) or "threads"."""
    if name == "threads":
        return ThreadRuntime()
    if name == "ray":
        from pytorchrl.runtime.ray_runtime import RayRuntime
        return RayRuntime(address)
    raise ConfigError(f"runtime must be one of {list(RUNTIMES)}, got {name!r}")
