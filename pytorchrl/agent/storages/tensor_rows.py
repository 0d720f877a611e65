"""The rows of a rollout on a device, which the host reads once, when the rollout is complete; see `rollout_rows`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from pytorchrl.agent.data import Episode, HostRows, Obs, RolloutData, TensorActing, TensorStep
from pytorchrl.agent.env.aliases import AnySpace
from pytorchrl.agent.env.values import num_categories
from pytorchrl.agent.transfers import on_device, on_host
from pytorchrl.errors import CallOrderError

TensorRow = tuple[Obs, Obs, Tensor, None]
"""Inputs for the next action: observations, memory states and starts of episodes, each (E, ...), and no masks."""


class TensorRows:
    """T + 1 rows of observations and T rows of transitions on a device, in memory that is allocated once.

    The class has the methods of `RolloutRows`, for tensors. Last observations of episodes take as much memory as
    observations, because their number is known only when the host reads the rollout.

    Args:
        size: T, steps per environment.
        rhs: The initial memory (E, H) of each network, by name of the network.
        spaces: The space of each leaf of the observations.
    """

    def __init__(self, size: int, rhs: Obs, spaces: Mapping[str, AnySpace]) -> None:
        self.size, self._initial_rhs, self._spaces = size, rhs, spaces
        self._categories: Obs = {}  # the numbers of categories of those leaves that have categories
        self._columns: dict[str, Tensor] = {}  # the columns of transitions, (T, E, ...)
        self._obs: Obs = {}
        self._final_obs: Obs = {}
        self._t = self._number = 0
        self._taken = False
        self._start = time.monotonic()

    @property
    def num_steps(self) -> int:
        """Number of transitions per environment in the current rollout."""
        return 0 if self._taken else self._t

    def start(self, obs: Obs, mask: None = None) -> None:
        """Start a rollout after a reset of all environments, with their first observations in row 0."""
        self._t, self._taken = 0, False
        self._number += 1
        if not self._obs:
            first = next(iter(obs.values()))
            self._device, num_envs, rows = first.device, len(first), self.size + 1
            self._obs = {name: leaf.new_zeros(rows, *leaf.shape) for name, leaf in obs.items()}
            self._categories = {
                name: torch.from_numpy(np.asarray(num_categories(space), np.int64)).to(self._device)
                for name, space in self._spaces.items() if not isinstance(space, gym.spaces.Box)}
            self._done = torch.zeros(rows, num_envs, dtype=torch.bool, device=self._device)
            self._rhs = {name: state.new_zeros(rows, *state.shape) for name, state in self._initial_rhs.items()}
        for name, leaf in obs.items():
            self._obs[name][0] = leaf
        for name, state in self._rhs.items():
            state[0] = self._initial_rhs[name]
        self._done[0] = True

    def current(self) -> TensorRow:
        """Return the newest row, which contains the inputs for the next action."""
        t = self._t
        return ({name: leaf[t] for name, leaf in self._obs.items()},
                {name: state[t] for name, state in self._rhs.items()}, self._done[t], None)

    def insert(self, acting: TensorActing, step: TensorStep) -> None:
        """Append one step, which fills the next row of transitions and the next row of observations.

        Raises:
            CallOrderError: The rollout has all of its steps.
        """
        if self._taken:
            self._begin_next()
        t = self._t
        if t >= self.size:
            raise CallOrderError(f"the rollout already has {self.size} steps; call get_all_buffer_data() first")
        row: dict[str, Tensor] = {
            "action": acting.action, "reward": step.reward, "terminated": step.terminated, "truncated": step.truncated,
            "valid": step.valid, "ended": step.ended, "episode_return": step.episode_return,
            "episode_length": step.episode_length, "approximated": step.approximated,
            **{f"other/{name}": rows for name, rows in acting.other.items()}}
        if not self._columns:
            self._columns = {name: value.new_zeros(self.size, *value.shape) for name, value in row.items()}
        for name, leaf in step.final_obs.items():
            if name not in self._final_obs:
                self._final_obs[name] = leaf.new_zeros(self.size, *leaf.shape)
        _copy_together([
            *((self._columns[name][t], value) for name, value in row.items()),
            *((self._final_obs[name][t], leaf) for name, leaf in step.final_obs.items()),
            *((self._obs[name][t + 1], leaf) for name, leaf in step.obs.items()),
            *((self._rhs[name][t + 1], state) for name, state in acting.rhs.items()),
            (self._done[t + 1], step.first)])
        self._t = t + 1

    def take(self, copy: bool) -> RolloutData:
        """Return the current rollout, as copies if `copy` is true, else as views; the host reads it here, once.

        Raises:
            CallOrderError: No transition was inserted.
        """
        if not self._columns:
            raise CallOrderError("there is no rollout before the first transition; insert a transition first")
        if self._taken:
            self._begin_next()
        t = self._t
        self._taken = True
        self._number += 1
        column = {name: rows[:t] for name, rows in self._columns.items()}
        obs = {name: leaf[:t + 1] for name, leaf in self._obs.items()}
        final_obs = {name: leaf[:t] for name, leaf in self._final_obs.items()}
        host = self._read(column, obs, final_obs)
        index = on_device(torch.from_numpy(host.final_index), self._device)
        rows = tuple(index.T)
        rollout = RolloutData(
            obs=obs, done=self._done[:t + 1], rhs={name: state[:t + 1] for name, state in self._rhs.items()}, mask=None,
            action=column["action"], reward=column["reward"], terminated=column["terminated"],
            truncated=column["truncated"], valid=column["valid"], final_index=index,
            final_obs={name: leaf[rows] for name, leaf in final_obs.items()},
            other={name[len("other/"):]: rows for name, rows in column.items() if name.startswith("other/")}, host=host)
        return rollout.map(Tensor.clone) if copy else rollout

    def _read(self, column: dict[str, Tensor], obs: Obs, final_obs: Obs) -> HostRows:
        """Copy all that the host needs of the current rollout, in one transfer."""
        names = ("action", "reward", "terminated", "truncated", "valid", "ended", "episode_return", "episode_length",
                 "approximated")
        ended = column["ended"]
        sound = [column["reward"].isfinite().all()]
        sound += [_are_sound(leaf, self._categories.get(name)) for name, leaf in obs.items()]
        sound += [_are_sound(leaf, self._categories.get(name), ended) for name, leaf in final_obs.items()]
        tensors = on_host(*(column[name] for name in names), self._done[:len(ended) + 1], torch.stack(sound).all())
        *arrays, done, is_sound = [tensor.numpy() for tensor in tensors]
        read = dict(zip(names, arrays, strict=True))
        index = np.argwhere(read["ended"])
        seconds = time.monotonic() - self._start
        episodes = [
            Episode(float(read["episode_return"][t, e]), int(read["episode_length"][t, e]), seconds, e,
                    bool(read["terminated"][t, e]), is_approximated=bool(read["approximated"][t, e]))
            for t, e in index.tolist()]
        return HostRows(
            done=done, action=read["action"], reward=read["reward"], terminated=read["terminated"],
            truncated=read["truncated"], valid=read["valid"],
            final_index=index if final_obs else index[:0], is_sound=bool(is_sound), number=self._number,
            episodes=episodes)

    def _begin_next(self) -> None:
        """Start the next rollout by copying the last row of the previous rollout to row 0."""
        last, self._t, self._taken = self._t, 0, False
        for rows in (*self._obs.values(), *self._rhs.values(), self._done):
            rows[0] = rows[last]


def _copy_together(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy the second tensor of each pair into the first one, with one launch for all tensors of a dtype."""
    groups: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
    for pair in pairs:
        groups.setdefault(pair[0].dtype, []).append(pair)
    for group in groups.values():
        targets, sources = zip(*group, strict=True)
        torch._foreach_copy_(targets, sources)


def _are_sound(leaf: Tensor, categories: Tensor | None, rows: Tensor | None = None) -> Tensor:
    """Return whether all values of a leaf, or of its `rows` (T, E), are finite or in their space, as a tensor ()."""
    if categories is not None:
        values = leaf.long()
        sound = (values >= 0) & (values < categories)
    else:
        sound = leaf.isfinite()
    return sound.all() if rows is None else (sound | ~rows.view(*rows.shape, *[1] * (leaf.dim() - 2))).all()
