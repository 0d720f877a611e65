"""Let the host read and write vector environments whose results are tensors or arrays of other libraries."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorWrapper
from torch import Tensor

from pytorchrl.agent.env.aliases import Action, AnyVectorEnv, Info, Observation
from pytorchrl.agent.env.guard import Form, observation_problem
from pytorchrl.agent.env.tensors.inspection import Inspection, has_objects
from pytorchrl.errors import EnvError
from pytorchrl.support.terminal import get_logger

logger = get_logger(__name__)

_OLD_FINAL_OBS = "final_observation"  # the name of "final_obs" before Gymnasium 1.1
_CHECKED = ("final_obs", _OLD_FINAL_OBS)  # entries that must be on the device of the environments
_CPU = 1  # the number of the CPU in DLPack
_NARROW = (torch.float16, torch.bfloat16)


class HostVector(VectorWrapper):
    """Wrapper that returns NumPy arrays instead of tensors, and passes NumPy actions as tensors.

    On the CPU, arrays and tensors share memory, and nothing is copied. Environments that return NumPy arrays are
    stepped directly.

    Args:
        env: The vector environment.
        where: Name of the worker, for log messages.
        name: Name of the class of the environments, for log messages.
        mode: The autoreset mode of the environments.
        is_given: Whether the environments belong to the user, and are not closed.
    """

    def __init__(
        self, env: AnyVectorEnv, where: str, name: str, mode: AutoresetMode, *, is_given: bool = False,
    ) -> None:
        super().__init__(env)
        self._where, self._name, self.is_given = where, name, is_given
        self._inspection: Inspection | None = Inspection(env.num_envs, mode)
        self._form, self._final_form = Form(None), Form(None)
        self._device: torch.device | None = None  # device of the actions; None: actions stay arrays
        self._is_known = False  # whether the device is known

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Observation, Info]:
        """Reset the environments; see Gymnasium."""
        mask = None if options is None else options.get("reset_mask")
        if mask is not None and self._device is not None:
            options = {**(options or {}), "reset_mask": torch.from_numpy(mask).to(self._device)}
        obs, info = self.env.reset(seed=seed, options=options)
        if not self._is_known:
            self._is_known = True
            self._find_device(_first_leaf(obs))
        found = self._read("observations", obs)
        if self._inspection is not None and mask is None:
            self._inspection.reset(found)
        return found, self._read_info(info)

    def step(self, actions: Action) -> tuple[Observation, Observation, Observation, Observation, Info]:
        """Step the environments; see Gymnasium.

        Raises:
            EnvError: The result has another form, or is on another device than the environments.
        """
        if self._device is not None:
            actions = torch.from_numpy(actions).to(self._device)
        result: object = self.env.step(actions)
        if not isinstance(result, tuple) or len(result) != 5:
            got = f"a tuple of {len(result)}" if isinstance(result, tuple) else f"a {type(result).__name__}"
            raise EnvError(f"step: expected (observations, reward, terminated, truncated, info), got {got}")
        obs, reward, terminated, truncated = map(
            self._read, ("observations", "reward", "terminated", "truncated"), result)
        info = self._read_info(result[4])
        if self._inspection is not None and isinstance(info, dict):
            self._inspect(self._inspection, obs, reward, terminated, truncated, info)
        return obs, reward, terminated, truncated, info

    def find_device(self) -> torch.device | None:
        """Return the device that the environments name in their attribute `device`; None if they name none."""
        device = getattr(self.env.unwrapped, "device", None)
        if device is None:
            return None
        return torch.empty(0, device=device).device  # with the index, which a declared device, such as "cuda", may lack

    def close(self, **options: object) -> None:
        """Close the environments, unless they belong to the user."""
        if not self.is_given:
            self.env.close(**options)

    def _find_device(self, leaf: Observation) -> None:
        """Find the device of the environments, given a leaf of their observations, and say if it is not the host."""
        place = ""
        if isinstance(leaf, Tensor):
            declared = self.find_device()  # then `EnvFactory` says so
            self._device = leaf.device if declared is None else declared
            place = "" if self._device.type == "cpu" or declared is not None else str(self._device)
        elif hasattr(leaf, "__dlpack_device__") and leaf.__dlpack_device__()[0] != _CPU:
            place = str(getattr(leaf, "device", "a device"))
        if place:
            logger.warning("%s: the observations of %s are copied from %s to the host in every step", self._where,
                           self._name, place)

    def _read_info(self, info: object) -> Info:
        if not isinstance(info, Mapping):
            return info  # type: ignore[return-value] # `VectorResults` refuses it
        read = {str(name): self._read(name, value, is_checked=name in _CHECKED) for name, value in info.items()}
        final = final_observations(read)
        if final is not None:
            read["final_obs"] = final
        # Gymnasium's own vector environments return an array of objects.
        if final is not None and not has_objects(final) and not self._final_form.fits(final):
            if problem := observation_problem(self.env.observation_space, final, "final_obs"):
                raise EnvError(f"step: {problem}; final_obs has a row for each environment, also for those whose "
                                "episodes go on")
            self._final_form = Form(final)
        return read

    def _inspect(self, inspection: Inspection, obs: Observation, *rest: Observation) -> None:
        if not self._form.fits(obs):
            if problem := observation_problem(self.env.observation_space, obs):
                raise EnvError(f"step: {problem}")
            self._form = Form(obs)
        for finding in inspection.step(obs, *rest):
            logger.warning("%s: %s: %s", self._where, self._name, finding)
        if inspection.is_over:
            self._inspection = None

    def _read(self, name: object, value: Observation, *, is_checked: bool = True) -> Observation:
        """Return a result as an array, or as arrays in dictionaries and tuples.

        Raises:
            EnvError: A tensor is on another device than the environment's.
        """
        if isinstance(value, np.ndarray) or value is None:
            return value
        if isinstance(value, Tensor):
            if is_checked and self._device is not None and value.device != self._device and value.dim():
                raise EnvError(f"{name} is on {value.device}, but the environments are on {self._device}; return "
                               "tensors of one device, the one that the attribute `device` names")
            value = value.detach()
            return (value.float() if value.dtype in _NARROW else value).cpu().numpy()
        if hasattr(value, "items"):
            return {key: self._read(f"{name}/{key}", part, is_checked=is_checked) for key, part in value.items()}
        if isinstance(value, tuple):
            return tuple([
                self._read(f"{name}/{index}", part, is_checked=is_checked) for index, part in enumerate(value)])
        return np.asarray(value) if hasattr(value, "__dlpack__") else value


def final_observations(info: Mapping[str, Observation]) -> Observation:
    """Return the last observations of episodes in `info`; None if there are none."""
    return info["final_obs"] if "final_obs" in info else info.get(_OLD_FINAL_OBS)


def _first_leaf(value: Observation) -> Observation:
    """Return the first array or tensor of a nested observation."""
    parts = list(value.values()) if hasattr(value, "values") and not isinstance(value, Tensor) else (
        value if isinstance(value, tuple) else ())
    return _first_leaf(parts[0]) if len(parts) else value
