"""Let the host read and write vector environments whose results are tensors or arrays of other libraries."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from gymnasium.vector import VectorWrapper
from torch import Tensor

from pytorchrl.agent.env.aliases import Action, AnyVectorEnv, Info, Observation
from pytorchrl.errors import EnvError
from pytorchrl.support.terminal import get_logger

logger = get_logger(__name__)

_OLD_FINAL_OBS = "final_observation"  # the name of "final_obs" before Gymnasium 1.1
_NARROW = (torch.float16, torch.bfloat16)


class HostVector(VectorWrapper):
    """Wrapper that returns NumPy arrays instead of tensors, and passes NumPy actions as tensors.

    On the CPU, arrays and tensors share memory, and nothing is copied. Environments that return NumPy arrays are
    stepped directly.

    Args:
        env: The vector environment.
        where: Name of the worker, for log messages.
        is_given: Whether the environments belong to the user, and are not closed.
    """

    def __init__(self, env: AnyVectorEnv, where: str, *, is_given: bool = False) -> None:
        super().__init__(env)
        self._where, self._is_given = where, is_given
        self._device: torch.device | None = None  # device of the actions; None: actions stay arrays

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Observation, Info]:
        """Reset the environments; see Gymnasium."""
        mask = None if options is None else options.get("reset_mask")
        if mask is not None and self._device is not None:
            options = {**(options or {}), "reset_mask": torch.from_numpy(mask).to(self._device)}
        obs, info = self.env.reset(seed=seed, options=options)
        tensor = _first_tensor(obs)
        if tensor is not None:
            declared = self.find_device()
            self._device = tensor.device if declared is None else declared
            if self._device.type != "cpu":
                logger.warning("%s: the observations of %s are copied from %s to the host in every step", self._where,
                               type(self.env.unwrapped).__name__, self._device)
        return self._read("observations", obs), self._read_info(info)

    def step(self, actions: Action) -> tuple[Observation, Observation, Observation, Observation, Info]:
        """Step the environments; see Gymnasium."""
        if self._device is not None:
            actions = torch.from_numpy(actions).to(self._device)
        obs, reward, terminated, truncated, info = self.env.step(actions)
        return (self._read("observations", obs), self._read("reward", reward), self._read("terminated", terminated),
                self._read("truncated", truncated), self._read_info(info))

    def find_device(self) -> torch.device | None:
        """Return the device that the environments name in their attribute `device`; None if they name none."""
        device = getattr(self.env.unwrapped, "device", None)
        if device is None:
            return None
        device = torch.device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        return device

    def close(self, **options: object) -> None:
        """Close the environments, unless they belong to the user."""
        if not self._is_given:
            self.env.close(**options)

    def _read_info(self, info: object) -> Info:
        if not isinstance(info, Mapping):
            return info  # type: ignore[return-value] # `VectorResults` refuses it
        read = {str(name): self._read(name, value) for name, value in info.items()}
        if (final := final_observations(read)) is not None:
            read["final_obs"] = final
        return read

    def _read(self, name: object, value: Observation) -> Observation:
        """Return a result as an array, or as arrays in dictionaries and tuples.

        Raises:
            EnvError: A tensor is on another device than the environment's.
        """
        if isinstance(value, np.ndarray) or value is None:
            return value
        if isinstance(value, Tensor):
            if self._device is not None and value.device != self._device and value.dim():
                raise EnvError(f"{name} is on {value.device}, but the environments are on {self._device}; return "
                               "tensors of one device, the one that the attribute `device` names")
            value = value.detach()
            return (value.float() if value.dtype in _NARROW else value).cpu().numpy()
        if hasattr(value, "items"):
            return {key: self._read(f"{name}/{key}", part) for key, part in value.items()}
        if isinstance(value, tuple):
            return tuple([self._read(f"{name}/{index}", part) for index, part in enumerate(value)])
        return np.asarray(value) if hasattr(value, "__dlpack__") else value


def final_observations(info: Mapping[str, Observation]) -> Observation:
    """Return the last observations of episodes in `info`; None if there are none."""
    return info["final_obs"] if "final_obs" in info else info.get(_OLD_FINAL_OBS)


def _first_tensor(value: Observation) -> Tensor | None:
    """Return the first tensor of a nested observation; None if there is none."""
    if isinstance(value, Tensor):
        return value
    parts = value.values() if hasattr(value, "values") else value if isinstance(value, tuple) else ()
    return next((tensor for part in parts if (tensor := _first_tensor(part)) is not None), None)
