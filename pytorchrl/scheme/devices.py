"""Resolve the names of the devices that this process may use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from pytorchrl.errors import DeviceError

CPU, CUDA = "cpu", "cuda"
OPTIONS = ("device", "grad_device", "col_device")
"""Settings that are devices."""


def check_device(device: object, gpus: Sequence[int] | None = None, name: str = "device",
                 number: int | None = None) -> str:
    """Return the full name of a device, such as "cuda:0"; raise an error if this process cannot use the device.

    Args:
        device: "cpu", "cuda:k" (GPU k of torch), "cuda", or None for "cpu". "cuda" is the first GPU assigned to the
            worker, if any are assigned to it; otherwise, remote workers take turns among all GPUs, and the learner uses
            the current GPU.
        gpus: Indices of the GPUs assigned to the calling worker; None: all GPUs that torch sees.
        name: Name of the option, for error messages.
        number: Number of the remote worker among all workers of its kind, counted from 0; None: the learner.

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
        if gpus is not None:
            return f"cuda:{own[0]}"
        return f"cuda:{torch.cuda.current_device() if number is None else number % len(own)}"
    if not isinstance(device, str) or device not in seen:
        raise DeviceError(f"{name} must be one of the devices visible to torch, {seen}, got {device!r}; "
                          f"{_remedy(device, gpus)}")
    return device


def kinds_of(settings: Mapping[str, object]) -> dict[str, str]:
    """Return the kind of device, "cpu" or "cuda", of each setting that is a device; see `OPTIONS`."""
    defaults = {"grad_device": settings.get("device")}
    devices = {name: settings.get(name) or defaults.get(name) or CPU for name in OPTIONS}
    return {name: str(device).partition(":")[0] for name, device in devices.items()}


def _remedy(device: object, gpus: Sequence[int] | None) -> str:
    if str(device).startswith(CUDA) and not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        return f"this torch ({torch.__version__}) was built without CUDA: install a build with CUDA, or give 'cpu'"
    if gpus is not None:
        return ("the list has only the GPUs that Ray assigned to this worker: 'cuda' is the first of them, and a "
                "larger num_gpus in the worker's resources requests more")
    return "give one of these devices"
