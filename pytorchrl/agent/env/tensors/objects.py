"""Turn objects that step many environments at once into vector environments of Gymnasium.

Simulators of robots define such objects, but only some of them derive the objects from Gymnasium's `VectorEnv`. All of
them reset an environment in the step that ends its episode. N = number of environments.

| results of `step` | examples |
|---|---|
| observations, reward, terminated, truncated, extras | Isaac Lab, mjlab |
| observations, reward, dones, extras | rsl_rl, Genesis |

`reset` returns observations, or observations and extras. An object with a method `get_observations`, as in rsl_rl, may
lack `reset`. With four results, `extras["time_outs"]` says which episodes were cut off by a time limit.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import cast

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from torch import Tensor

from pytorchrl.agent.env.aliases import Action, AnySpace, EnvObject, Info, Observation
from pytorchrl.agent.env.single import unwrapped
from pytorchrl.agent.env.statistics import APPROXIMATED
from pytorchrl.agent.env.tensors.inspection import copied, copy_into
from pytorchrl.errors import EnvError
from pytorchrl.support.terminal import get_logger

logger = get_logger(__name__)

FINAL_OBS = "final_obs"
"""Entry of `extras` with the last observations of the episodes that ended, in the rows of their environments."""
UNKNOWN_END = (
    "step: an episode was cut off, but the environment returns the first observation of the next episode and no last "
    f"one in extras[{FINAL_OBS!r}], so the value of the last state is unknown; add it, or set "
    "truncation='approximate', which takes the value of the state before the last step instead")
"""Text of the error if an episode was cut off and its last observation is unknown."""
_OTHER_NAMES = ("final_observation", "terminal_observation")


class ObjectVector(VectorEnv[Observation, Action, Observation]):
    """An object that steps N environments at once, in the form of Gymnasium; see the table of this module.

    Observations are tensors, or arrays that NumPy understands, in dictionaries of any depth. If the object does not
    state its spaces, they are read off its first observations and its number of actions, `num_actions`.

    The object resets an environment in the step that ends its episode, so the last observation of the episode is known
    only if `extras` contains it (`FINAL_OBS`). Otherwise, `truncation="approximate"` uses the observation before the
    last step instead, for which memory for one copy of the observations is needed.

    Args:
        env: The object.
        truncation: See the option of `VecEnv`.

    Attributes:
        given: The object.
        stays_on_device: Whether `step` must not read flags of the device; whether last observations are unknown is then
            reported by the entry `APPROXIMATED` of `info` alone.
    """

    def __init__(self, env: EnvObject, truncation: str) -> None:
        self.stays_on_device = False
        self.given, self._is_approximate = env, truncation == "approximate"
        self._base = base = unwrapped(env)
        self.num_envs = int(base.num_envs)
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self._has_warned = False
        self._before: Observation = None  # a copy of the latest observations
        self.single_observation_space = self._space("observation")
        self.single_action_space = self._space("action")
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)

    @property
    def device(self) -> torch.device:
        """Device of the tensors that the object takes and returns."""
        return torch.device(getattr(self._base, "device", None) or "cpu")

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Observation, Info]:
        """Start new episodes in all environments."""
        obs, extras = self._reset(seed)
        self._keep(obs)
        return obs, extras

    def step(self, actions: Action) -> tuple[Observation, Observation, Observation, Observation, Info]:
        """Step all environments; those whose episode ends return the first observation of the next episode.

        Raises:
            EnvError: The result has another form than this module describes, or an episode was cut off and its last
                observation is unknown.
        """
        result = self.given.step(actions)
        if not isinstance(result, tuple) or len(result) not in (4, 5):
            raise EnvError(
                f"step: expected (observations, reward, terminated, truncated, extras) or (observations, reward, "
                f"dones, extras), got {_kind(result)}")
        obs, reward, *ends, extras = result
        if not isinstance(extras, Mapping):
            raise EnvError(f"step: expected a dictionary as extras, got {_kind(extras)}; return {{}}")
        if len(ends) == 2:
            terminated, truncated = self._flags("terminated", ends[0]), self._flags("truncated", ends[1])
        else:
            dones, cut = self._flags("dones", ends[0]), extras.get("time_outs")
            truncated = dones & (False if cut is None else self._flags("extras['time_outs']", cut))
            terminated = dones & ~truncated
        info = dict(extras)
        for name in _OTHER_NAMES:
            if name in info:
                info[FINAL_OBS] = info[name]
        if FINAL_OBS not in info and self.stays_on_device:  # whether an episode has ended is found out later
            info |= {FINAL_OBS: copied(self._before) if self._is_approximate else obs,
                     APPROXIMATED: truncated & ~terminated}
        elif FINAL_OBS not in info and bool((terminated | truncated).any()):
            info |= self._approximated(obs, truncated & ~terminated)
        self._keep(obs)
        return obs, reward, terminated, truncated, info

    def close(self, **options: object) -> None:
        """Close the object, if it can be closed."""
        close = getattr(self.given, "close", None)
        if callable(close):
            close()

    def _reset(self, seed: int | None = None) -> tuple[Observation, Info]:
        """Reset the object with a seed in the way that it supports; return its observations and its extras."""
        reset = getattr(self.given, "reset", None)
        result = None
        if callable(reset):
            names = _parameters(reset)
            if seed is not None and not names & {"seed", "kwargs"}:
                self._seed(seed)
                seed = None
            result = reset() if seed is None else reset(seed=seed)
        if hasattr(self.given, "get_observations"):  # in rsl_rl, `reset` may return something else, or not exist
            result = self.given.get_observations()
        if isinstance(result, tuple) and len(result) == 2 and (result[1] is None or isinstance(result[1], Mapping)):
            return result[0], dict(result[1] or {})
        return result, {}

    def _seed(self, seed: int) -> None:
        if callable(method := getattr(self.given, "seed", None)):
            method(seed)
        else:
            logger.warning("%s takes no seed, neither in reset(seed=) nor by seed(), so that a run with the same seed "
                           "may differ", type(self._base).__name__)

    def _space(self, name: str) -> AnySpace:
        """Return the space of one environment's observations or actions."""
        for attribute in (f"single_{name}_space", f"{name}_space"):
            space = _as_space(getattr(self._base, attribute, None))
            if space is None:
                continue
            shape = space.shape or ()
            if name == "action" and len(shape) > 1 and shape[0] == self.num_envs and "single" not in attribute:
                raise EnvError(
                    f"{type(self._base).__name__}: action_space is that of all {self.num_envs} environments, {space}; "
                    "set single_action_space to the space of one environment")
            return space
        if name == "observation":
            # The first reset of an object may need a seed, for example to build its random generator.
            return _space_of(self._reset(seed=0)[0], self.num_envs)
        number = getattr(self._base, "num_actions", None)
        if not isinstance(number, (int, np.integer)):
            raise EnvError(
                f"{type(self._base).__name__} states no actions: it has neither single_action_space, a space of "
                "Gymnasium, nor num_actions, the number of continuous actions; set one of them")
        return spaces.Box(-np.inf, np.inf, (int(number),), np.float32)

    def _keep(self, obs: Observation) -> None:
        """Keep a copy of the latest observations; on a device, at the same place as the previous ones."""
        if self._is_approximate and self.stays_on_device and self._before is not None:
            copy_into(self._before, obs)
        elif self._is_approximate:
            self._before = copied(obs)

    def _approximated(self, obs: Observation, cut: Observation) -> Info:
        """Return entries of `info` with observations in place of the unknown last ones, given those after the step.

        The values of the last observations matter only in the rows where `cut` is true.
        """
        if not bool(cut.any()):
            return {FINAL_OBS: obs, APPROXIMATED: cut}
        if not self._is_approximate:
            raise EnvError(UNKNOWN_END)
        if not self._has_warned:
            self._has_warned = True
            logger.warning("%s: the values of episodes that are cut off are those of the state before the last step; "
                           "the statistic episodes_approximated counts these episodes", type(self._base).__name__)
        return {FINAL_OBS: self._before, APPROXIMATED: cut}

    def _flags(self, name: str, values: Observation) -> Observation:
        """Return flags (N,) as booleans; whole numbers must be 0 or 1.

        Raises:
            EnvError: The values are no such flags, or are on another device than the object's.
        """
        if isinstance(values, Tensor):
            self._check_device(name, values)
        else:
            values = np.asarray(values)
        shape = tuple(values.shape)
        if shape != (self.num_envs,):
            remedy = f"; return {name}[:, 0]" if shape == (self.num_envs, 1) else ""
            raise EnvError(f"step: expected {name} of shape ({self.num_envs},), got {_kind(values)}{remedy}")
        if values.dtype in (torch.bool, np.bool_):
            return values
        is_whole = np.dtype(_numpy_dtype(values)).kind in "iu"
        if not is_whole or not bool(((values == 0) | (values == 1)).all()):
            hint = (", and the results as (observations, reward, terminated, truncated, extras), with privileged "
                    "observations in a dictionary") if name == "terminated" else ""
            raise EnvError(f"step: expected {name} as flags, got {_kind(values)}; return bool, or integers that are 0 "
                           f"or 1{hint}")
        return values.to(torch.bool) if isinstance(values, Tensor) else values.astype(np.bool_)

    def _check_device(self, name: str, tensor: Tensor) -> None:
        device = self.device
        if tensor.device.type != device.type or (
                None not in (device.index, tensor.device.index) and tensor.device != device):
            raise EnvError(f"step: {name} is on {tensor.device}, but the environments are on {device}; return tensors "
                           "of one device, the one that the attribute `device` names")


def _as_space(given: Observation) -> AnySpace | None:
    """Return a space of Gymnasium; a space of another library, such as mjlab's, is converted. None: it is no space."""
    if isinstance(given, spaces.Space):
        return given
    if isinstance(parts := getattr(given, "spaces", None), Mapping):
        found = {str(name): space for name, part in parts.items() if (space := _as_space(part)) is not None}
        return spaces.Dict(found) if len(found) == len(parts) else None
    if not all(hasattr(given, name) for name in ("shape", "low", "high", "dtype")):
        return None
    dtype = np.dtype(given.dtype)
    low, high = (np.broadcast_to(bound, given.shape).astype(dtype) for bound in (given.low, given.high))
    return spaces.Box(low, high, dtype=dtype)


def _space_of(obs: Observation, num_envs: int) -> AnySpace:
    """Return a space of unbounded numbers for the observations of one environment, read off N observations."""
    if hasattr(obs, "items"):
        return spaces.Dict({str(name): _space_of(part, num_envs) for name, part in obs.items()})
    shape = tuple(getattr(obs, "shape", ()))
    if not shape or shape[0] != num_envs:
        raise EnvError(f"reset: expected observations with {num_envs} rows, one for each environment, got {_kind(obs)}")
    dtype = _numpy_dtype(obs)
    if dtype == np.uint8:
        return spaces.Box(0, 255, shape[1:], np.uint8)
    if dtype.kind == "f":
        return spaces.Box(-np.inf, np.inf, shape[1:], np.float64 if dtype == np.float64 else np.float32)
    raise EnvError(f"reset: the environment states no observation_space, and its observations are {_kind(obs)}; set "
                   "single_observation_space to a space of Gymnasium, or return floats")


def _numpy_dtype(value: Observation) -> np.dtype[np.generic]:
    if isinstance(value, Tensor):
        wide = value.dtype in (torch.bfloat16, torch.float16)
        return np.dtype(np.float32) if wide else torch.empty(0, dtype=value.dtype).numpy().dtype
    return np.asarray(value).dtype


def _parameters(function: object) -> set[str]:
    try:
        return set(inspect.signature(cast("type", function)).parameters)
    except (TypeError, ValueError):
        return set()


def _kind(value: object) -> str:
    if isinstance(value, (Tensor, np.ndarray)):
        return f"{value.dtype} {tuple(value.shape)}"
    return f"a tuple of {len(value)}" if isinstance(value, tuple) else f"a {type(value).__name__}"
