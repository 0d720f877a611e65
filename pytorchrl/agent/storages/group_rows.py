"""The collector's side of `GroupBuffer`: episodes grow row by row, and complete groups of them become rollouts.

E = environments, S = episodes in a rollout, T = steps of the longest of them.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import torch

from pytorchrl.agent.contracts import check_acting_step
from pytorchrl.agent.data import ActingStep, Arrays, Obs, RolloutData, Step, show_reward
from pytorchrl.agent.storages.rollout_rows import ActingRow
from pytorchrl.errors import CallOrderError, ConfigError, EnvError

_FIRST_LENGTH = 32
"""Initial number of steps for which there is space in each row; it doubles when it is exhausted."""


class GroupRows:
    """One growing episode for each environment, and the groups of episodes that are complete.

    Episodes are numbered in the order in which they start; those that start in the same step have the order of their
    environments. `group_size` consecutive episodes are a group. A group waits for its last member, while other groups
    go on. Groups leave in the order in which they become complete, or in the order in which they started.

    Steps that are not valid and lead to a first observation belong to no episode, and are not stored: those of rows
    that wait, and resets.
    """

    def __init__(self, num_groups: int, group_size: int, num_envs: int, rhs: Obs, algorithm: object = None,
                 in_order: bool = False) -> None:
        """Prepare for rollouts of `num_groups` groups, which leave in the order of their starts if `in_order` is set.

        See `RolloutRows` for the other arguments.
        """
        self.size, self._group_size, self._num_envs, self._algorithm = num_groups, group_size, num_envs, algorithm
        self._in_order = in_order
        self._rhs: Arrays = {name: state.cpu().numpy() for name, state in rhs.items()}
        self._every = np.arange(num_envs)
        self._columns: Arrays = {}
        self.num_steps = 0
        self._ready: dict[int, list[_Episode]] = {}  # complete groups, in the order in which they became complete
        self._num_taken = 0

    @property
    def is_full(self) -> bool:
        """Whether as many groups may leave as a rollout contains."""
        return len(self._ready) >= self.size and len(self._leaving()) == self.size

    def _leaving(self) -> list[int]:
        """Return the numbers of the groups that the next rollout contains, at most `size` of them."""
        if self._in_order:
            next_ = range(self._num_taken, self._num_taken + self.size)
            return list(itertools.takewhile(self._ready.__contains__, next_))
        return list(itertools.islice(self._ready, self.size))

    @property
    def num_unfinished(self) -> int:
        """Number of valid steps that no rollout has contained yet."""
        if not self._columns:
            return 0
        ended = [episode for group in self._ready.values() for episode in group]
        ended += [episode for group in self._open.values() for episode in group.values()]
        running = sum(int(self._columns["valid"][:end, row].sum()) for row, end in enumerate(self._place))
        return running + sum(episode.num_valid for episode in ended)

    def start(self, obs: Arrays, mask: np.ndarray | None) -> None:
        """Discard all episodes, and begin new ones after a reset of all environments.

        Raises:
            ConfigError: The environments have action masks.
        """
        if mask is not None:
            raise ConfigError("GroupBuffer does not store action masks, which these environments have; use GAEBuffer")
        self._obs = {name: leaf.copy() for name, leaf in obs.items()}
        # The memory stays, which says to the actor which versions of its weights the discarded episodes used.
        self._first = np.ones(self._num_envs, np.bool_)
        self._place = np.zeros(self._num_envs, np.int64)  # number of stored steps of the running episodes
        self._number = np.zeros(self._num_envs, np.int64)  # of the running episodes
        self._num_started = self._num_taken = self.num_steps = 0
        self._open: dict[int, dict[int, _Episode]] = {}
        self._ready = {}

    def current(self) -> ActingRow:
        """Return the inputs for the next action."""
        return self._obs, self._rhs, self._first, None

    def insert(self, acting: ActingStep, step: Step) -> None:
        """Append one step to each episode, and move the episodes that have ended into their groups.

        Raises:
            EnvError: The members of a group began with different observations.
        """
        if not self._columns:
            self._allocate(acting, step)
        stored = step.valid | ~step.first
        rows = self._every[stored]
        begun = rows[self._place[rows] == 0]
        self._number[begun] = np.arange(self._num_started, self._num_started + len(begun))
        self._num_started += len(begun)
        place = self._place[rows]
        if len(place) and place.max() + 1 >= len(self._columns["reward"]):
            self._columns = {name: np.concatenate((column, np.zeros_like(column)))
                             for name, column in self._columns.items()}
        for name, value in self._values(acting, step).items():
            self._columns[name][place, rows] = value[rows]
        self._place[rows] += 1
        if len(ended := np.flatnonzero(step.terminated | step.truncated)):
            self._finish(ended)
        self._obs, self._first = {name: leaf.copy() for name, leaf in step.obs.items()}, step.first
        show_reward(acting.rhs, step.reward)
        self._rhs = acting.rhs
        self.num_steps += 1

    def _values(self, acting: ActingStep, step: Step) -> Arrays:
        return {**{f"obs/{name}": leaf for name, leaf in self._obs.items()}, "action": acting.action,
                "reward": step.reward, "terminated": step.terminated, "truncated": step.truncated,
                "valid": step.valid, **{f"other/{name}": row for name, row in acting.other.items()}}

    def _allocate(self, acting: ActingStep, step: Step) -> None:
        check_acting_step(self._algorithm, acting, self._num_envs)
        self._columns = {name: np.zeros((_FIRST_LENGTH, *value.shape), value.dtype)
                         for name, value in self._values(acting, step).items()}

    def _finish(self, rows: np.ndarray) -> None:
        lengths = self._place[rows]
        self._place[rows] = 0
        columns = {name: column[:lengths.max(), rows] for name, column in self._columns.items()}
        steps = np.arange(lengths.max())[:, None]
        for column in columns.values():
            column[steps >= lengths] = 0
        num_valid, starts = columns["valid"].sum(0).tolist(), (columns["valid"].argmax(0) + 1).tolist()
        for row, (number, length) in enumerate(zip(self._number[rows].tolist(), lengths.tolist(), strict=True)):
            group_number, member = divmod(number, self._group_size)
            group = self._open.setdefault(group_number, {})
            group[member] = _Episode(columns, row, length, num_valid[row], starts[row])
            if len(group) == self._group_size:
                del self._open[group_number]
                self._ready[group_number] = [group[member] for member in range(self._group_size)]
                _check_start(self._ready[group_number])

    def take(self, copy: bool) -> RolloutData:
        """Return the groups that may leave, at most `size` of them, as a rollout of S episodes, (T, S).

        Episodes that are shorter than T are padded with steps that are not valid. The rollout has no memory, because
        all episodes are whole. It is always a copy.

        Raises:
            CallOrderError: No transition was inserted.
        """
        if not self._columns:
            raise CallOrderError("there is no rollout before the first transition; insert a transition first")
        episodes = [episode for number in self._leaving() for episode in self._ready.pop(number)]
        self._num_taken += len(episodes) // self._group_size
        self.num_steps = 0
        longest = max((episode.length for episode in episodes), default=0)
        rows = {name: np.zeros((longest + name.startswith("obs/"), len(episodes), *column.shape[2:]), column.dtype)
                for name, column in self._columns.items()}
        ended_together: dict[int, list[int]] = {}
        for place, episode in enumerate(episodes):
            ended_together.setdefault(id(episode.columns), []).append(place)
        for places in ended_together.values():
            own = [episodes[place].row for place in places]
            for name, column in episodes[places[0]].columns.items():
                rows[name][:len(column), places] = column[:len(rows[name]), own]
        done = torch.zeros(longest + 1, len(episodes), dtype=torch.bool)
        done[:1] = True
        tensors = {name: torch.from_numpy(array) for name, array in rows.items()}
        obs, other = ({name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}
                      for start in ("obs/", "other/"))
        return RolloutData(
            obs=obs, done=done, rhs={}, mask=None, action=tensors["action"], reward=tensors["reward"],
            terminated=tensors["terminated"], truncated=tensors["truncated"], valid=tensors["valid"],
            final_index=torch.zeros(0, 2, dtype=torch.int64),
            final_obs={name: leaf.flatten(0, 1)[:0] for name, leaf in obs.items()}, other=other)


class _Episode(NamedTuple):
    """An episode that has ended.

    Attributes:
        columns: The steps (T, R, ...) of all R episodes that ended in the same step of the environments; 0 after an
            episode's last step.
        row: Index of this episode among them.
        length: Number of its steps.
        num_valid: Number of its valid steps.
        start: Number of its steps up to the first valid one.
    """

    columns: Arrays
    row: int
    length: int
    num_valid: int
    start: int

    def beginning(self, name: str) -> np.ndarray:
        """Return a part of the observations up to the first valid step."""
        return self.columns[name][:self.start, self.row]


def _check_start(group: list[_Episode]) -> None:
    """Raise `EnvError` if the members of a group began with different observations, up to their first valid step."""
    for name in group[0].columns:
        if name.startswith("obs/"):
            first = group[0].beginning(name)
            wanted = first.tobytes()
            for episode in group:
                if (found := episode.beginning(name)).tobytes() != wanted:
                    raise EnvError(
                        f"the {len(group)} episodes of a group must begin with the same observations, the prompt; got "
                        f"{first.tolist()} and {found.tolist()}; give GroupBuffer the group_size of the environments")
