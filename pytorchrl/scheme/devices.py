"""Resolution of the name of a device in this process."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pytorchrl.errors import DeviceError

CPU, CUDA = "cpu", "cuda"


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
