"""Look at the first episodes of a vector of environments for mistakes that raise no error, but prevent learning."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from gymnasium.vector import AutoresetMode
from torch import Tensor

from pytorchrl.agent.env.aliases import Info, Observation
from pytorchrl.agent.env.statistics import APPROXIMATED

_MOST_STEPS = 20_000
_FEWEST_EPISODES = 20
# A limit of time ends at least this share of the episodes, and at least three; few episodes share another length.
_SHARE_AT_LIMIT = 0.1
_SHORTEST_LIMIT = 10  # steps; several episodes of a shorter length are common
_FEWEST_CASES = 3


class Inspection:
    """Counts of the first episodes, and what they reveal. N = number of environments.

    It ends with as many episodes as there are environments, and at least 20 episodes.

    Args:
        num_envs: N.
        mode: The autoreset mode of the environments.

    Attributes:
        is_over: Whether no further step needs to be inspected.
    """

    def __init__(self, num_envs: int, mode: AutoresetMode) -> None:
        self.is_over = False
        self._resets_later = mode is AutoresetMode.NEXT_STEP
        self._resets_at_once = mode is AutoresetMode.SAME_STEP
        self._first: Observation = None  # a copy of the first observations
        self._lengths = np.zeros(num_envs, np.int64)
        self._previous = np.zeros(num_envs, np.int64)  # lengths of the previous episodes
        self._ended = np.zeros(num_envs, np.bool_)  # whether an episode ended in the latest step
        self._num_steps = self._num_episodes = self._num_cut = self._longest = self._num_longest = 0
        self._num_single = self._num_longer = 0  # episodes after a longer one: of a single step, and of more
        self._num_kept = self._num_replaced = 0  # ends after which the observation was the last one, and another one
        self._reward: float | None = None  # the only reward so far
        self._has_rewards = False  # whether there were different rewards

    def reset(self, obs: Observation) -> None:
        """Begin new episodes, given the first observations."""
        self._first = copied(obs)
        self._lengths[:] = 0
        self._ended[:] = False

    def step(self, obs: Observation, reward: Observation, terminated: Observation, truncated: Observation,
             info: Info) -> Iterator[str]:
        """Count a step of all environments; yield what looks wrong, at most once."""
        self._num_steps += 1
        if not all(isinstance(part, np.ndarray) and part.shape == self._ended.shape and part.dtype.kind in kinds
                   for part, kinds in ((reward, "fiu"), (terminated, "b"), (truncated, "b"))):
            self.is_over = True  # an error is raised for these
            return
        self._lengths += 1
        if self._resets_later:
            self._lengths[self._ended] = 0
        if not self._has_rewards:
            of_steps = reward[~self._ended] if self._resets_later else reward
            if self._reward is None:
                self._reward = float(reward[0])
            self._has_rewards = bool((of_steps != self._reward).any())
        self._ended = ended = terminated | truncated
        if ended.any():
            self._count(ended, terminated, truncated)
            final = info.get("final_obs")
            is_known = final is not None and not has_objects(final) and APPROXIMATED not in info
            if self._resets_at_once and is_known:
                self._compare(ended.nonzero()[0][:_FEWEST_CASES], obs, final)
            self._lengths[ended] = 0
        if self._num_episodes >= max(_FEWEST_EPISODES, len(ended)) or self._num_steps >= _MOST_STEPS:
            self.is_over = True
            yield from self._findings()

    def _count(self, ended: np.ndarray, terminated: np.ndarray, truncated: np.ndarray) -> None:
        lengths, before = self._lengths[ended], self._previous[ended]
        self._num_episodes += len(lengths)
        self._num_cut += int((truncated & ~terminated).sum())
        if (longest := int(lengths.max())) > self._longest:
            self._longest, self._num_longest = longest, 0
        self._num_longest += int((lengths == self._longest).sum())
        self._num_single += int(((lengths == 1) & (before > 1)).sum())
        self._num_longer += int(((lengths > 1) & (before > 0)).sum())
        # An episode of a single step is not remembered, so that all that follow a longer one are counted.
        self._previous[ended] = np.where((lengths == 1) & (before > 1), before, lengths)

    def _compare(self, rows: np.ndarray, obs: Observation, final: Observation) -> None:
        for row in rows.tolist():
            pairs = list(_pairs(row, obs, final, self._first))
            is_final = all(np.array_equal(new, last) for new, last, _ in pairs)
            is_first = all(np.array_equal(new, first) for new, _, first in pairs)
            self._num_kept += is_final and not is_first
            self._num_replaced += not is_final

    def _findings(self) -> Iterator[str]:
        num = self._num_episodes
        if self._num_kept >= _FEWEST_CASES and not self._num_replaced:
            yield ("after the end of an episode, step returns its last observation, which is also in "
                   "info['final_obs'], and not the first observation of the next episode; reset before the observation "
                   "is computed, and return a copy of the last one as final_obs")
        if self._num_single >= _FEWEST_CASES and not self._num_longer:
            yield ("every episode after the first one has a single step, so the environments do not seem to be reset "
                   "when an episode ends; reset them in this step")
        if not self._num_cut and self._longest >= _SHORTEST_LIMIT and (
                self._num_longest >= max(_FEWEST_CASES, _SHARE_AT_LIMIT * num)):
            yield (f"{self._num_longest} of {num} episodes ended after {self._longest} steps, the length of the "
                   "longest one, and all as terminated; if this is a time limit, return them as truncated, because "
                   "the value of a state does not end with the time")
        if not self._has_rewards and (self._num_cut == num or not num):
            yield (f"all rewards so far are {self._reward:g}, in {num} episodes of which none was terminated; check "
                   "the rewards unless they are that rare")


def has_objects(final: Observation) -> bool:
    """Return whether last observations are an array of objects, as Gymnasium's own vector environments return them."""
    return isinstance(final, np.ndarray) and final.dtype.kind == "O"


def _pairs(row: int, *parts: Observation) -> Iterator[tuple[np.ndarray, ...]]:
    """Yield the arrays at the same place of several observations, each for one environment."""
    if isinstance(parts[0], Mapping):
        for name in parts[0]:
            yield from _pairs(row, *[part[name] for part in parts])
    elif isinstance(parts[0], tuple):
        for index in range(len(parts[0])):
            yield from _pairs(row, *[part[index] for part in parts])
    else:
        yield tuple([part[row] for part in parts])


def copied(obs: Observation) -> Observation:
    """Return a copy of nested observations, whose leaves are tensors or arrays."""
    if hasattr(obs, "items"):
        return {name: copied(part) for name, part in obs.items()}
    if isinstance(obs, tuple):
        return tuple(map(copied, obs))
    return obs.clone() if isinstance(obs, Tensor) else np.array(obs)


def copy_into(target: Observation, obs: Observation) -> None:
    """Copy nested observations of tensors into others of the same form."""
    for name in target if hasattr(target, "items") else range(len(target)) if isinstance(target, tuple) else ():
        copy_into(target[name], obs[name])
    if isinstance(target, Tensor):
        target.copy_(obs)
