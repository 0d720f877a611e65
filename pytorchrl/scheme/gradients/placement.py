"""Devices of workers, and the resources that remote workers request from Ray."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from pytorchrl.errors import DeviceError, Problem
from pytorchrl.runtime import CPU_RESOURCES, is_default
from pytorchrl.scheme.devices import CPU, CUDA, check_device
from pytorchrl.scheme.options.collection import Collection, SynchronousCollection
from pytorchrl.support.problems import problems_in

_NAMES = {"grad": "gradient", "col": "collection"}


class GradientLevel(Protocol):
    """The options of gradient workers that determine their devices; see `GWorkerSet.Options`."""

    @property
    def is_parallel(self) -> bool:
        """Whether gradient workers are remote."""

    @property
    def grad_device(self) -> str | None:
        """Device of remote gradient workers."""

    @property
    def grad_worker_resources(self) -> Mapping[str, float]:
        """Ray resources of each remote gradient worker."""


@dataclass(frozen=True)
class Placement:
    """The devices and resources of all workers, derived from options and checked for contradictions.

    Args:
        collection: Options of collection.
        gradients: Options of the gradient workers.
        device: Device of the learner; None: the CPU.
        on_ray: Whether remote workers run on Ray.
    """

    collection: Collection
    gradients: GradientLevel
    device: str | None
    on_ray: bool

    def problems(self) -> list[Problem]:
        """Return a problem for each device that does not exist, and for each device or resource without an effect."""
        found = [
            Problem(f"{name} must be None, 'cpu', 'cuda' or 'cuda:k', got {device!r}", "", (name,), DeviceError)
            for name, device in (("grad_device", self.gradients.grad_device),
                                 ("col_device", self.collection.col_device))
            if device is not None and not re.fullmatch(r"cpu|cuda(:\d+)?", device)]
        if found:
            return found
        if self.gradients.grad_device is not None and not self.gradients.is_parallel:
            found.append(Problem(
                f"grad_device={self.gradients.grad_device!r} is for remote gradient workers; the local one uses the "
                "device of the learner, which the option device sets",
                "give num_grad_workers >= 2, or leave grad_device out",
                ("grad_device", "num_grad_workers", "grad_execution")))
        if self.collection.col_device is not None and not self._acts_by_itself:
            found.append(Problem(
                f"col_device={self.collection.col_device!r} is for collection workers with an actor of their own; the "
                "local one uses the actor of its gradient worker", "give num_col_workers >= 2 or "
                "col_communication='asynchronous', or leave col_device out",
                ("col_device", "num_col_workers", "col_execution", "col_communication", "num_replay_workers")))
        # Without valid devices, it is not known whether workers need a GPU.
        return (found or list(problems_in(self.devices))
                or [*self._resource_problems("grad"), *self._resource_problems("col")])

    @property
    def _acts_by_itself(self) -> bool:
        """Whether collection has its own actors, which are copies of the gradient worker's actor.

        If the value is False, the gradient worker's actor itself chooses the actions.
        """
        return self.collection.is_parallel or not isinstance(self.collection, SynchronousCollection)

    @property
    def _acts_at_learner(self) -> bool:
        """Whether an actor in the gradient worker's process chooses the actions for its remote collection workers."""
        return self.collection.infers_centrally

    def devices(self) -> dict[str, str]:
        """Return the devices of remote gradient workers ("grad") and of collection workers with an actor ("col").

        For workers on Ray, "cuda" stands for the GPU that Ray assigns to the worker. For other remote workers, "cuda"
        stands for all GPUs, among which the workers take turns; see `check_device`.

        Raises:
            DeviceError: This process lacks a device that its workers would use.
        """
        grad = self.gradients.grad_device
        if grad is None:
            grad = CUDA if self.on_ray and self.device not in (None, CPU) else self.device or CPU
        at_learner = grad if self.gradients.is_parallel else self.device or CPU
        col = self.collection.col_device or (at_learner if self._acts_at_learner else CPU)
        col_is_here = not self.on_ray or not (
            self.gradients.is_parallel or (self.collection.is_parallel and not self._acts_at_learner))
        if not self.on_ray:
            check_device(grad, name="grad_device")
        if col_is_here:
            check_device(col, name="col_device")
        return {"grad": grad, "col": col}

    def resources(self, level: str) -> Mapping[str, float]:
        """Return the resources that each remote worker of `level` ("grad" or "col") requests.

        The default resources contain no GPU if the workers do not use one.
        """
        resources = self._requested(level)
        return CPU_RESOURCES if is_default(resources) and not self._gpus_used(level) else resources

    def _requested(self, level: str) -> Mapping[str, float]:
        return self.gradients.grad_worker_resources if level == "grad" else self.collection.col_worker_resources

    def _gpus_used(self, level: str) -> dict[str, str]:
        """Return the CUDA devices that a remote worker's process uses, keyed by the option that sets the device."""
        devices = self.devices()
        used = {f"{level}_device": devices[level]}
        if level == "col" and self._acts_at_learner:
            return {}  # these workers only step environments
        if level == "grad" and self._acts_by_itself and (self._acts_at_learner or not self.collection.is_parallel):
            used["col_device"] = devices["col"]  # actions are chosen in a thread of the same process
        return {name: device for name, device in used.items() if device != CPU}

    def _resource_problems(self, level: str) -> Iterator[Problem]:
        """Yield problems if workers of `level` request a GPU but do not use it, or use a GPU but do not request it."""
        if not (self.gradients.is_parallel if level == "grad" else self.collection.is_parallel):
            return
        name, resources, used = f"{level}_worker_resources", self._requested(level), self._gpus_used(level)
        share = resources.get("num_gpus", 0)
        if not used and share and not is_default(resources):
            yield Problem(f"{name} requests num_gpus={share:g}, but {_NAMES[level]} workers compute on the CPU",
                          f"give {level}_device='cuda', or leave num_gpus out", (name, f"{level}_device", "device"))
        for option, device in used.items() if self.on_ray else ():
            place = int(device.partition(":")[2] or 0)
            if not share:
                yield Problem(f"{option} is {device!r}, and {name} requests no GPU, so Ray would assign none",
                              f"add a share such as num_gpus=0.25, or give {option}='cpu'", (option, name))
            elif place >= max(1, share):
                yield Problem(
                    f"{option}={device!r} is GPU {place}, counted from 0, of the GPUs that Ray assigns to each worker, "
                    f"and {name} asks for num_gpus={share:g}; 'cuda' is the first assigned GPU",
                    f"give {option}='cuda'", (option, name))
