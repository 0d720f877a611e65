"""Devices of the levels of the worker tree, and the resources that follow from them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from pytorchrl.errors import DeviceError
from pytorchrl.runtime import CPU_RESOURCES, is_default
from pytorchrl.scheme.base.worker import ASYNC, CENTRAL, PARALLEL

CPU, CUDA = "cpu", "cuda"
_LEVELS = {"grad": "gradient", "col": "collection"}


def check_device(device: object, gpus: Sequence[int] | None = None, name: str = "device") -> str:
    """Return the device of a name in this process; never fall back to another one.

    Args:
        device: "cpu", "cuda:k" (GPU k of torch), "cuda" (the current GPU, or the first one assigned to the worker), or
            None for "cpu".
        gpus: Indices of the GPUs assigned to the calling worker; None: all that torch sees.
        name: Name of the option.

    Returns:
        "cpu" or "cuda:k".

    Raises:
        DeviceError: The device does not exist, or is assigned to another worker.
    """
    if device is None:
        return CPU
    own = range(torch.cuda.device_count()) if gpus is None else gpus
    seen = [CPU, *(f"cuda:{gpu}" for gpu in own)]
    if device == CUDA and own:
        return f"cuda:{torch.cuda.current_device() if gpus is None else own[0]}"
    if not isinstance(device, str) or device not in seen:
        raise DeviceError(f"{name} must be one that torch sees here, {seen}, got {device!r}; {_remedy(device, gpus)}")
    return device


def _remedy(device: object, gpus: Sequence[int] | None) -> str:
    if str(device).startswith(CUDA) and not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        return (f"this torch ({torch.__version__}) is built without CUDA: install one that is built with it, or give "
                "'cpu'")
    if gpus is not None:
        return ("the list has the GPUs that Ray gave this worker: 'cuda' is the first of them, and num_gpus in its "
                "resources asks for more")
    return "give one of these"


def check_devices(options: Mapping[str, Any]) -> list[str]:
    """Return the problems of the devices and resources of remote workers.

    Args:
        options: Options of the scheme; executions, runtime and `device` are settled.

    Raises:
        DeviceError: A name is not that of a device, or this process lacks a device that it needs.
    """
    for level in _LEVELS:
        name, device = f"{level}_device", options[f"{level}_device"]
        if device is not None and not (isinstance(device, str) and re.fullmatch(r"cpu|cuda(:\d+)?", device)):
            raise DeviceError(f"{name} must be None, 'cpu', 'cuda' or 'cuda:k', got {device!r}")
    problems = [text for wrong, text in (
        (options["grad_device"] is not None and options["grad_execution"] is CENTRAL,
         f"grad_device={options['grad_device']!r} is for remote gradient workers; the local one is the learner, whose "
         "option is device; give num_grad_workers >= 2, or leave it out"),
        (options["col_device"] is not None and options["col_execution"] is CENTRAL
         and options["col_communication"] is not ASYNC,
         f"col_device={options['col_device']!r} is for collection workers with an actor of their own; the local one "
         "acts with that of its gradient worker; give num_col_workers >= 2 or col_communication='asynchronous', or "
         "leave it out"),
    ) if wrong]
    if not problems:
        devices_of(options)
        problems = [text for level in _LEVELS for text in _check_resources(options, level)]
    return problems


def devices_of(options: Mapping[str, Any]) -> dict[str, str]:
    """Return the devices of remote gradient workers ("grad") and of collection workers with their own actor ("col").

    Workers of Ray resolve "cuda" themselves; for workers of this process it is resolved here.

    Raises:
        DeviceError: This process lacks a device that it needs.
    """
    found, on_ray = {"grad": options["grad_device"], "col": options["col_device"] or CPU}, options["runtime"] == "ray"
    if found["grad"] is None:
        found["grad"] = CUDA if on_ray and options["device"] != CPU else options["device"]
    are_here = dict.fromkeys(_LEVELS, not on_ray)
    are_here["col"] |= PARALLEL not in (options["grad_execution"], options["col_execution"])
    return {level: check_device(device, name=f"{level}_device") if are_here[level] else device
            for level, device in found.items()}


def resources_of(options: Mapping[str, Any], level: str) -> Mapping[str, float]:
    """Return the resources of each remote worker of a level; by default a share of a GPU only if it uses one."""
    resources: Mapping[str, float] = options[f"{level}_worker_resources"]
    return CPU_RESOURCES if is_default(resources) and not _gpus_used(options, level) else resources


def _gpus_used(options: Mapping[str, Any], level: str) -> dict[str, str]:
    """Return option -> device for the CUDA devices in a process of a level's remote workers."""
    devices = devices_of(options)
    used = {f"{level}_device": devices[level]}
    if level == "grad" and options["col_execution"] is CENTRAL and options["col_communication"] is ASYNC:
        used["col_device"] = devices["col"]  # it collects in a thread
    return {name: device for name, device in used.items() if device != CPU}


def _check_resources(options: Mapping[str, Any], level: str) -> Iterator[str]:
    """Yield contradictions between devices and shares of GPUs of a level's remote workers."""
    name = f"{level}_worker_resources"
    if options[f"{level}_execution"] is CENTRAL:
        return
    resources, used = options[name], _gpus_used(options, level)
    share = resources.get("num_gpus", 0)
    if not used and share and not is_default(resources):
        yield (f"{name} asks for num_gpus={share:g}, and {_LEVELS[level]} workers compute on the CPU; give "
               f"{level}_device='cuda', or leave num_gpus out")
    for option, device in used.items() if options["runtime"] == "ray" else ():
        place = int(device.partition(":")[2] or 0)
        if not share:
            yield (f"{option} is {device!r}, and {name} asks for no GPU, so that Ray would show none; add a share such "
                   f"as num_gpus=0.25, or give {option}='cpu'")
        elif place >= max(1, share):
            yield (f"{option}={device!r} is GPU {place}, counted from 0, of those that Ray gives each worker, and "
                   f"{name} asks for num_gpus={share:g}; 'cuda' is the first that it is given")
