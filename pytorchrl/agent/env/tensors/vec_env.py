"""`TensorVecEnv`: environments whose tensors stay on their device; the host reads nothing while it steps them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import cast

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from torch import Tensor
from typing_extensions import override

from pytorchrl.agent.data import Arrays, Episode, Obs, TensorStep
from pytorchrl.agent.env.aliases import MASK_LEAF, Observation
from pytorchrl.agent.env.autoreset import NO_FINAL_OBS, UNEXPECTED_FINAL_OBS
from pytorchrl.agent.env.backends import reset_vector
from pytorchrl.agent.env.spaces import LeafReading, part_at
from pytorchrl.agent.env.statistics import APPROXIMATED
from pytorchrl.agent.env.tensors.host import HostVector, final_observations
from pytorchrl.agent.env.tensors.objects import UNKNOWN_END, ObjectVector
from pytorchrl.agent.env.tensors.recording import RecordedStep, is_recordable
from pytorchrl.agent.env.vec_env import EnvFactory, VecEnv
from pytorchrl.errors import EnvError
from pytorchrl.support.terminal import get_logger
from pytorchrl.support.threads import State
from pytorchrl.support.tracebacks import USER_ERRORS

logger = get_logger(__name__)


def class_for(envs: EnvFactory, device: torch.device | None) -> type[TensorVecEnv] | None:
    """Return `TensorVecEnv` if the environments of a factory can be stepped without the host, else None.

    If they are on a device, but their results must be copied to the host in every step, a warning says why.

    Args:
        envs: The factory.
        device: Device on which the caller can use tensors; None: the caller can use only arrays.
    """
    if envs.device is None:
        return None
    reason = reason_for_host(envs, device)
    if reason is None:
        return TensorVecEnv
    logger.warning("the observations are copied from %s to the host in every step, because %s", envs.device, reason)
    return None


def reason_for_host(envs: EnvFactory, device: torch.device | None) -> str | None:
    """Return why the results of environments on a device must be copied to the host; None if they need not be."""
    options = envs.options
    if device is None or str(device) != envs.device:
        return f"the actor uses {'arrays' if device is None else device}"
    raw = envs.raw_spaces
    if envs.cls is not VecEnv:
        return f"{envs.cls.__name__} reads them there"
    if getattr(raw, "has_mask_in_info", False) or _has_mask(getattr(raw, "observation", None)):
        return "action masks are checked there"
    if callable(options.reward_transform):
        return "reward_transform is a function of arrays"
    if envs.autoreset_mode is AutoresetMode.DISABLED:
        return "it resets them"
    if options.end_on_life_loss or options.info_keywords:
        return f"{'end_on_life_loss' if options.end_on_life_loss else 'info_keywords'} reads info"
    return None


def _has_mask(space: object) -> bool:
    return isinstance(space, spaces.Dict) and any(
        name == MASK_LEAF or _has_mask(child) for name, child in space.spaces.items())


class TensorVecEnv(VecEnv):
    """E environments on a device, stepped together; see `VecEnv` for the arguments that are not described here.

    `reset` and `step` return tensors, and the actions are tensors. Only shapes, dtypes and devices are checked in each
    step; the values are checked once a rollout, when the host reads it.

    Args:
        options: See `VecEnv`.
        records: Whether steps on a GPU are recorded into a CUDA graph if the environments allow it; see `RecordedStep`.
        **place: See `VecEnv`.
    """

    def __init__(self, options: VecEnv.Options, *, records: bool = False, **place: object) -> None:
        super().__init__(options, **place)  # type: ignore[arg-type] # the arguments of `VecEnv`
        assert isinstance(self.vector, HostVector)
        self._tensors = self.vector.env
        self._unknown_end: str | None = NO_FINAL_OBS
        if isinstance(self._tensors, ObjectVector):
            self._tensors.stays_on_device = True
            self._unknown_end = UNKNOWN_END if options.truncation == "exact" else None
        self.device = self.vector.find_device()
        self._dtypes = {leaf.name: _torch_dtype(self.observation_space[leaf.name].dtype)
                        for leaf in self._reader.readings}
        self._readers: list[tuple[LeafReading, Callable[[Tensor], Tensor]]] = [
            (leaf, self._reading(leaf)) for leaf in self._reader.readings]
        size = self.num_envs
        self._every = torch.ones(size, dtype=torch.bool, device=self.device)
        self._start = None if self._action_start is None else torch.as_tensor(self._action_start, device=self.device)
        self._of_action = _torch_dtype(self._action_dtype)
        self._none_ended = ~self._every
        # A recorded step reads these tensors at the same address in each call, so they are changed in place.
        self._was_done = self._none_ended.clone()
        self._returns = torch.zeros(size, dtype=torch.float64, device=self.device)
        self._lengths = torch.zeros(size, dtype=torch.int64, device=self.device)
        self._no_return, self._no_length = self._returns[0].clone(), self._lengths[0].clone()
        transform = options.reward_transform if self._transform is not None else None
        self._of_reward = _reward_function(transform)
        can_record = records and self._every.is_cuda and is_recordable(self._tensors)
        self._advance: Callable[[Tensor], TensorStep] = RecordedStep(
            self._stepped, self._tensors, self._every.device) if can_record else self._stepped

    @override
    def reset(self) -> tuple[Obs, None]:  # type: ignore[override] # tensors
        """Start new episodes in all environments; return the observations, leaf -> (E, ...), and no masks."""
        if self._state is State.STOPPED:
            self._refuse("reset")
        seeds = self.seeds if self._state is State.NEW else None
        try:
            observations, _ = reset_vector(self._tensors, seeds)
        except USER_ERRORS as failure:
            self._fail("reset", failure)
        self._state = State.RUNNING
        for account in (self._was_done, self._returns, self._lengths):
            account.zero_()
        return self._leaves("reset", observations), None

    @override
    def step(self, action: Tensor) -> TensorStep:  # type: ignore[override] # tensors
        """Take one step in every environment.

        Args:
            action: (E, ...) on the device; continuous actions are float32, and other actions are int64, from 0.

        Returns:
            The result, which is valid until the next step.

        Raises:
            EnvError: An environment raised an exception, or returned tensors of another shape, dtype or device.
        """
        if self._state is not State.RUNNING:
            self._refuse("step")
        try:
            step = self._advance(action)
        except USER_ERRORS as failure:
            self._fail("step", failure)
        self._num_steps += 1
        return step

    def _stepped(self, action: Tensor) -> TensorStep:
        """Return the result of `step`; this function changes tensors, but no other state."""
        if self._start is not None:
            action = action + self._start
        elif action.dtype is self._of_action:
            action = action.clone()  # the environments may change it, but the stored action must stay the same
        observations, reward, terminated, truncated, info = self._tensors.step(action.to(self._of_action))
        self._check("reward", reward, "f")
        reward = reward.float()
        self._check("terminated", terminated, "b")
        self._check("truncated", truncated, "b")
        obs = self._leaves("step", observations)
        done, given = terminated | truncated, final_observations(info)
        if self.autoreset_mode is AutoresetMode.SAME_STEP:
            valid, first, counted = self._every, done, reward
            # Without last observations, no episode may have ended; `log` finds out.
            approximated = done if given is None else info.get(APPROXIMATED, self._none_ended)
            final_obs = {} if given is None else self._leaves("step, last observations", given)
        else:
            if given is not None:
                raise EnvError(f"{self._where}, step: {UNEXPECTED_FINAL_OBS}")
            valid, first, final_obs, approximated = ~self._was_done, self._was_done.clone(), {}, self._none_ended
            counted, done = torch.where(valid, reward, 0.0), done & valid
            self._was_done.copy_(done)
        returns, lengths = self._returns + counted, self._lengths + valid
        torch.where(done, self._no_return, returns, out=self._returns)
        torch.where(done, self._no_length, lengths, out=self._lengths)
        return TensorStep(
            obs, reward if self._of_reward is None else self._of_reward(reward), terminated,
            truncated & ~terminated, valid, first, final_obs, done, returns, lengths, approximated)

    @override
    def close(self) -> None:
        self._advance = self._stepped  # frees the memory of graphs
        super().close()

    def log(self, episodes: Iterable[Episode]) -> None:
        """Write finished episodes to the monitor file, if there is one; the host reads them once a rollout.

        Raises:
            EnvError: The last observation of an episode is unknown, and not approximated by an option.
        """
        episodes = list(episodes)
        if self._unknown_end is not None and any(episode.is_approximated for episode in episodes):
            raise EnvError(f"{self._where}: {self._unknown_end}")
        self._statistics.write(episodes)

    def check_rollout(self, obs: Arrays, final_obs: Arrays) -> None:
        """Check the categories of a rollout: observations, leaf -> (T + 1, E, ...), and last ones, leaf -> (K, ...).

        Raises:
            EnvError: A category is outside its space.
        """
        for t in range(len(next(iter(obs.values())))):
            self._check_values({name: leaf[t] for name, leaf in obs.items()})
        if final_obs and (problem := self._values.problem(final_obs, "last observation {}".format)):
            raise EnvError(f"{self._where}, {problem}")

    def _leaves(self, call: str, observations: Observation) -> Obs:
        """Return nested observations as leaves in the form that actors receive."""
        leaves = {}
        for leaf, read in self._readers:
            try:
                value = part_at(observations, leaf.path)
            except (KeyError, IndexError, TypeError) as failure:
                raise EnvError(f"{self._where}, {call}: the observations have no leaf {leaf.name!r}") from failure
            if not isinstance(value, Tensor) or value.device != self.device:
                raise EnvError(f"{self._where}, {call}: expected {leaf.name!r} as a tensor on {self.device}, got "
                               f"{_found(value)}")
            value = read(value)
            expected = (self.num_envs, *(self.observation_space[leaf.name].shape or ()))
            if value.shape != expected:
                raise EnvError(f"{self._where}, {call}: expected {leaf.name!r} of shape {expected}, got "
                               f"{tuple(value.shape)}")
            leaves[leaf.name] = value
        return leaves

    def _reading(self, leaf: LeafReading) -> Callable[[Tensor], Tensor]:
        """Return the function that converts a leaf (E, ...) to the form that actors receive."""
        dtype = self._dtypes[leaf.name]
        start = None if leaf.start is None else torch.as_tensor(leaf.start, device=self.device)

        def read(value: Tensor) -> Tensor:
            if start is not None:
                value = value - start
            value = value.to(dtype)
            return value.movedim(-1, 1) if leaf.has_channels_last else value
        return read

    def _check(self, name: str, value: object, kind: str) -> None:
        """Raise `EnvError` unless a result is a tensor (E,) of floats ("f") or bools ("b") on the device."""
        shape = (self.num_envs,)
        if isinstance(value, Tensor) and value.shape == shape and value.device == self.device and (
                value.is_floating_point() if kind == "f" else value.dtype is torch.bool):
            return
        kinds = "floats" if kind == "f" else "bool"
        raise EnvError(f"{self._where}, step: expected {name} as {kinds} of shape {shape} on {self.device}, got "
                       f"{_found(value)}")


def _found(value: object) -> str:
    return (f"{value.dtype} {tuple(value.shape)} on {value.device}" if isinstance(value, Tensor)
            else f"a {type(value).__name__}")


def _torch_dtype(dtype: object) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


def _reward_function(transform: object) -> Callable[[Tensor], Tensor] | None:
    """Return the function that transforms raw rewards (E,) on a device; None if there is none."""
    if transform is None:
        return None
    if transform == "sign":
        return torch.sign
    if transform == "clip":
        return lambda reward: reward.clamp(-1, 1)
    scale = float(cast("float", transform))
    return lambda reward: reward * scale
