"""Rollouts of agents that take turns. T = steps of a rollout, C = columns of a policy, one for each agent and env.

An agent whose action mask allows no action waits: it is absent in that step. Its transition goes from one of its turns
to the next one. The reward is the sum of the rewards in between, and the step in which an episode ends while the agent
waits ends the transition.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from pytorchrl.agent.data import Obs, RolloutData
from pytorchrl.errors import ConfigError

FEWEST_STEPS = 4
"""Fewest steps of a rollout, because a turn is dropped if its transition does not end in the same rollout."""


@dataclass
class _Column:
    """The transitions of one agent in one environment, from turn to turn."""

    rows: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    terminated: list[bool] = field(default_factory=list)
    truncated: list[bool] = field(default_factory=list)
    ends: dict[int, int] = field(default_factory=dict)
    """Step in which an episode ends -> index of the transition."""
    next_row: int = 0
    """Row of the observation after the last transition."""


def in_turns(rollout: RolloutData, waiting: Sequence[np.ndarray]) -> RolloutData:
    """Return a rollout in which the turns of each column follow each other, in its first rows; other rows are invalid.

    Args:
        rollout: T steps, of which those of waiting agents are invalid.
        waiting: For each step, (C,) bool, whether each agent waits after the step.

    Raises:
        ConfigError: The policy has memory, or the rollout is too short.
    """
    if rollout.rhs:
        raise ConfigError("agents take turns, so policies must not have memory, which would not see the steps of the "
                          "other agents; set recurrent_net=None")
    num_steps, count = rollout.reward.shape
    if num_steps < FEWEST_STEPS:
        raise ConfigError(f"agents take turns, so rollouts must have at least {FEWEST_STEPS} steps, got {num_steps}; "
                          "raise num_steps")
    reward, terminated, truncated, valid, done = (values.numpy() for values in (
        rollout.reward, rollout.terminated, rollout.truncated, rollout.valid, rollout.done))
    columns = [_turns_of(*(values[:, c] for values in (reward, terminated, truncated, valid, np.stack(waiting))))
               for c in range(count)]
    order, kept = np.full((num_steps + 1, count), num_steps), np.zeros((num_steps, count), np.bool_)
    first, sums = np.zeros_like(done), np.zeros_like(reward)
    ended, cut = np.zeros_like(terminated), np.zeros_like(truncated)
    place: dict[tuple[int, int], int] = {}
    for c, column in enumerate(columns):
        number, rows = len(column.rows), [*column.rows, column.next_row]
        order[:number + 1, c], kept[:number, c], sums[:number, c] = rows, True, column.rewards
        ended[:number, c], cut[:number, c] = column.terminated, column.truncated
        starts = np.concatenate([[0], np.cumsum(done[:, c])])
        first[:number + 1, c] = np.diff([0, *(starts[row + 1] for row in rows)]) > 0
        first[0, c] = True  # the previous rollout of this column does not end with the observation before this one
        place |= {(step, c): index for step, index in column.ends.items()}
    finals = sorted((place[t, c], c, k) for k, (t, c) in enumerate(rollout.final_index.tolist()) if (t, c) in place)
    index = torch.tensor([k for _, _, k in finals], dtype=torch.int64)
    at, column_of = torch.from_numpy(order), torch.arange(count).expand(num_steps + 1, count)

    def picked(values: Tensor) -> Tensor:
        return values[at[:len(values)], column_of[:len(values)]]

    def all_picked(leaves: Obs) -> Obs:
        return {name: picked(leaf) for name, leaf in leaves.items()}

    return dataclasses.replace(
        rollout, obs=all_picked(rollout.obs), done=torch.from_numpy(first), action=picked_rows(rollout.action, order),
        mask=None if rollout.mask is None else picked(rollout.mask), reward=torch.from_numpy(sums),
        terminated=torch.from_numpy(ended), truncated=torch.from_numpy(cut), valid=torch.from_numpy(kept),
        final_index=torch.tensor([pair[:2] for pair in finals], dtype=torch.int64).reshape(-1, 2),
        final_obs={name: leaf[index] for name, leaf in rollout.final_obs.items()},
        other={name: picked_rows(leaf, order) for name, leaf in rollout.other.items()},
        final_mask=None if rollout.final_mask is None else rollout.final_mask[index])


def picked_rows(values: Tensor, order: np.ndarray) -> Tensor:
    """Return the rows `order` (T + 1, C) of values (T, C, ...), in which row T does not exist, as (T, C, ...)."""
    count = len(values)
    rows = torch.from_numpy(np.minimum(order[:count], count - 1))
    return values[rows, torch.arange(rows.shape[1]).expand_as(rows)]


def _turns_of(reward: np.ndarray, terminated: np.ndarray, truncated: np.ndarray, valid: np.ndarray,
              waiting: np.ndarray) -> _Column:
    """Return the complete transitions of one column, given its arrays (T,)."""
    found = _Column()
    begun: int | None = None  # the row of the turn whose transition has not ended
    total = 0.0
    for t in range(len(reward)):
        if valid[t]:
            begun, total = t, 0.0
        if begun is None:
            continue
        total += float(reward[t])
        is_over = bool(terminated[t] or truncated[t])
        if is_over or not waiting[t]:
            if is_over:
                found.ends[t] = len(found.rows)
            found.rows.append(begun)
            found.rewards.append(total)
            found.terminated.append(bool(terminated[t]))
            found.truncated.append(bool(truncated[t]))
            found.next_row, begun = t + 1, None
    return found
