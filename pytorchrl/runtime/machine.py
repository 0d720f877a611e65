"""Refuse workers for which this machine lacks resources, before any worker starts."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from pytorchrl.errors import InsufficientResourcesError
from pytorchrl.runtime.base import is_default
from pytorchrl.support.cores import usable_cores

WORKER_BYTES = 180 * 10**6
"""Minimum private memory of a remote worker in bytes: Python, torch and Ray, with a small network and CartPole.

Measured on Linux with torch's CPU build: 179 to 180 MB for collection workers and for gradient workers.
"""
FORKED_WORKER_BYTES = 16 * 10**6
"""Minimum private memory in bytes of a worker process without Ray, which shares all other memory with other workers.

Measured in the same way as `WORKER_BYTES`.
"""
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True)
class Machine:
    """The CPUs, GPUs and memory of a machine."""

    num_cpus: int
    num_gpus: int
    memory_bytes: int


def this_machine(limits: Sequence[str] = _LIMITS) -> Machine:
    """Return the CPUs that this process may use, and the GPUs and the memory of this machine or its container.

    Args:
        limits: Files in which Linux control groups, version 2 or 1, state the memory limit of a container in bytes.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in limits:
        with contextlib.suppress(OSError, ValueError):  # the file does not exist, or contains "max"
            memory = min(memory, int(Path(path).read_text(encoding="ascii")))
    return Machine(usable_cores(), torch.cuda.device_count(), memory)


def check_machine(requests: Sequence[tuple[str, int, Mapping[str, float]]], machine: Machine,
                  worker_bytes: int = WORKER_BYTES) -> None:
    """Refuse workers if a machine lacks memory for them, or lacks the CPUs or GPUs that they request explicitly.

    More workers than cores are allowed: workers that request the default resources share the cores.

    Args:
        requests: (name, number of workers, resources of one worker) for each kind of remote worker of a scheme.
        machine: The only machine on which the workers can run.
        worker_bytes: Minimum private memory of a worker in bytes.

    Raises:
        InsufficientResourcesError: The message states the requested and available resources, and what to do.
    """
    _check_memory(requests, machine, worker_bytes)
    sharing = sharing_of(requests, "num_gpus")
    if sharing and not machine.num_gpus:
        raise no_gpu(sharing, "this machine has none")
    for key, present in (("num_cpus", machine.num_cpus), ("num_gpus", machine.num_gpus)):
        asked = [(name, count, resources[key]) for name, count, resources in requests
                 if not is_default(resources) and resources.get(key)]
        if sum(count * amount for _, count, amount in asked) > present:
            wanted = " and ".join(f"{count} {name} x {key}={amount:g}" for name, count, amount in asked)
            raise InsufficientResourcesError(
                f"{wanted} were requested; this machine has {present}; request less or use fewer workers")


def _check_memory(requests: Sequence[tuple[str, int, Mapping[str, float]]], machine: Machine,
                  worker_bytes: int) -> None:
    num_workers, most = sum(count for _, count, _ in requests), machine.memory_bytes // worker_bytes
    if num_workers > most:
        wanted = " and ".join(f"{count} {name}" for name, count, _ in requests if count)
        raise InsufficientResourcesError(
            f"{wanted} were requested, each a process of {worker_bytes / 1e6:.0f} MB or more, together "
            f"{num_workers * worker_bytes / 1e9:.0f} GB; this machine has {machine.memory_bytes / 1e9:.1f} GB of "
            f"memory, enough for {most}, and {machine.num_cpus} CPU cores; use fewer workers, about one per core, with "
            "more environments each (vec_env_size, --num-envs), or give the address of a cluster")


def sharing_of(requests: Sequence[tuple[str, int, Mapping[str, float]]], key: str) -> dict[str, int]:
    """Return, for each kind of worker, the number of workers whose default requests contain the resource `key`."""
    return {name: count for name, count, resources in requests if count and is_default(resources) and key in resources}


def no_gpu(sharing: Mapping[str, int], present: str) -> InsufficientResourcesError:
    """Return the error that is raised if workers need a share of a GPU and none is free.

    Args:
        sharing: Number of workers that need a share, by kind of worker.
        present: Text that says which GPUs there are, or that there are none.
    """
    wanted = " and ".join(f"{count} {name}" for name, count in sharing.items())
    return InsufficientResourcesError(f"{wanted} each need a share of a GPU, but {present}; set their device to 'cpu', "
                                      "or use nodes with GPUs")
