"""Hindsight experience replay (Andrychowicz et al. 2017): learn from the goals that an episode reached by accident.

C = capacity of the ring in rows, T = steps of a rollout, E = environments, B = rows drawn, N = relabeled rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Mapping
from typing import NamedTuple

import numpy as np

from pytorchrl.agent.storages.ring import Inserted, Ring
from pytorchrl.errors import ContractError

GoalFunction = Callable[[np.ndarray, np.ndarray, Mapping[str, object]], object]
"""A function of achieved goals (N, ...), desired goals (N, ...) and an empty `info` that returns N values."""
ACHIEVED, DESIRED = "achieved_goal", "desired_goal"
"""The leaves of an observation that contain the goal that is achieved in its state, and the goal of its episode."""
STRATEGIES = ("future", "final", "episode")
"""The steps whose achieved goals replace the goal of step t of an episode: t and later ones, the last one, or all."""
_MOST_WRONG = 0.1
"""Largest share of a batch's steps whose stored reward may differ from the function's: float32 rounds goals, so a
reward with a threshold may differ for the few goals at the threshold."""


class Episodes:
    """Tables that find any stored step of a finished episode in constant time.

    When an episode ends, its steps get consecutive *positions*, which count modulo 2 C. Positions are not used again
    too early: the steps that get positions while an episode is stored are among the C rows before its end and the C
    rows after it.

    The tables depend only on the contents of the ring, so `rebuild` restores them, and checkpoints do not contain them.
    """

    def __init__(self, capacity: int) -> None:
        """Allocate tables for a ring of `capacity` rows."""
        self._position = np.zeros(capacity, np.int32)
        self._last = np.full(capacity, -1, np.int32)  # position of the last step of a row's episode; -1: not finished
        self._first = np.zeros(2 * capacity, np.int32)  # position of the last step -> that of the first stored step
        self._row = np.zeros(2 * capacity, np.int32)
        self._next = 0
        self._num_evicted = 0
        self._running: dict[Hashable, list[deque[int]]] = {}

    @property
    def num_bytes(self) -> int:
        """Allocated memory in bytes."""
        return self._position.nbytes + self._last.nbytes + self._first.nbytes + self._row.nbytes

    def insert(self, ring: Ring, inserted: Inserted, source: Hashable) -> None:
        """Add the rollout that was just inserted into the ring; see `Ring.insert` for `source`."""
        self._forget(np.concatenate([np.arange(self._num_evicted, ring.first) % ring.capacity, inserted.broken]))
        self._num_evicted = ring.first
        self._last[inserted.rows] = -1
        num_envs, before = len(inserted.continued), self._running.pop(source, [])
        valid = ring.columns["valid"][inserted.rows].reshape(num_envs, -1)
        ended = _ended(ring, inserted.rows).reshape(num_envs, -1)
        base, num_steps = ring.total - valid.size, valid.shape[1]
        running = [before[e] if inserted.continued[e] and e < len(before) else deque() for e in range(num_envs)]
        for e, ids in enumerate(running):
            while ids and ids[0] < ring.first:
                ids.popleft()
            first, begin = base + e * num_steps, 0
            for t in np.flatnonzero(ended[e] | ~valid[e]).tolist():
                if valid[e, t]:
                    ids.extend(range(first + begin, first + t + 1))
                    self._finish(ring, np.array(ids) % ring.capacity)
                ids.clear()
                begin = t + 1
            ids.extend(range(first + begin, first + num_steps))
        self._running[source] = running
        self._running = {other: self._running[other] for other in ring.sources if other in self._running}

    def rebuild(self, ring: Ring) -> None:
        """Fill the empty tables from the rows of a ring."""
        self._num_evicted = ring.first
        if not ring.columns:
            return
        rows = np.arange(ring.first, ring.total) % ring.capacity
        rows = rows[ring.columns["valid"][rows]]
        ended, link = _ended(ring, rows), ring.columns["link"][rows]
        before = np.full(ring.capacity, -1)
        goes_on = ~ended & (link >= 0)
        goes_on &= ring.ids(link) > ring.ids(rows)  # always true, unless a file is damaged; links never form a circle
        before[link[goes_on]] = rows[goes_on]
        steps = before.tolist()
        for row in rows[ended].tolist():
            self._finish(ring, np.array(_until(row, steps)))
        for source, ids in ring.heads.items():
            last = ids % ring.capacity
            goes_on = (ids >= ring.first) & ring.columns["valid"][last] & ~_ended(ring, last)
            self._running[source] = [
                deque(ring.ids(np.array(_until(row, steps))).tolist() if is_running else ())
                for row, is_running in zip(last.tolist(), goes_on.tolist(), strict=True)]

    def are_finished(self, rows: np.ndarray) -> np.ndarray:
        """Return whether the episodes of stored rows have ended, (B,) bool, so that their steps can be drawn."""
        return self._last[rows] >= 0

    def draw(self, rows: np.ndarray, strategy: str, share: np.ndarray) -> np.ndarray:
        """Return a step of the same episode for each of N rows, as its row, (N,) int64.

        Args:
            rows: (N,) rows of finished episodes.
            strategy: One of `STRATEGIES`.
            share: (N,) numbers in [0, 1), which choose among the steps that the strategy allows.
        """
        size, last = len(self._row), self._last[rows].astype(np.int64)
        if strategy == "final":
            return self._row[last].astype(np.int64)
        first = self._position[rows] if strategy == "future" else self._first[last]
        number = (last - first) % size + 1
        return self._row[(first + (share * number).astype(np.int64)) % size].astype(np.int64)

    def _finish(self, ring: Ring, rows: np.ndarray) -> None:
        """Give positions to the stored steps of an episode that has ended; `rows` contains their places in the ring."""
        rows = rows[~ring.columns["broken"][rows]]
        if not len(rows):
            return
        positions = (self._next + np.arange(len(rows))) % len(self._row)
        self._next = (self._next + len(rows)) % len(self._row)
        self._row[positions], self._position[rows] = rows, positions
        self._last[rows], self._first[positions[-1]] = positions[-1], positions[0]

    def _forget(self, rows: np.ndarray) -> None:
        """Let the episodes of rows that were evicted, in order of time, begin after these rows."""
        rows = rows[self._last[rows] >= 0]
        self._first[self._last[rows]] = (self._position[rows] + 1) % len(self._row)


def _ended(ring: Ring, rows: np.ndarray) -> np.ndarray:
    found: np.ndarray = ring.columns["terminated"][rows] | ring.columns["truncated"][rows]
    return found & ring.columns["valid"][rows]


def _until(row: int, before: list[int]) -> list[int]:
    """Return the rows of an episode up to `row`, oldest first; `before` maps a row to the previous one or -1."""
    found = []
    while row >= 0:
        found.append(row)
        row = before[row]
    return found[::-1]


class Relabeled(NamedTuple):
    """New goals for some of B drawn rows."""

    ring: Ring
    goal_of: np.ndarray
    """(B,) int64, for each drawn row, the index of its new goal; -1 if it keeps its goal."""
    goals: np.ndarray
    """(N, ...), the new goals."""
    reward: GoalFunction
    terminated: GoalFunction | None

    def outcome(self, rows: np.ndarray, drawn: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return rewards (K,) float32 and terminations (K,) bool of K steps, given the goals of their transitions.

        Args:
            rows: (K,) rows of the steps.
            drawn: (K,) indices, in [0, B), of the transitions that contain these steps.
        """
        column, goal_of = self.ring.columns, self.goal_of[drawn]
        reward, terminated = column["reward"][rows], column["terminated"][rows]
        new = np.flatnonzero(goal_of >= 0)
        if not len(new):  # functions of users need not accept empty arrays
            return reward, terminated
        achieved, desired = achieved_after(self.ring, rows[new]), self.goals[goal_of[new]]
        reward[new] = values_of(self.reward, achieved, desired, "goal_reward")
        if self.terminated is not None:
            terminated[new] = values_of(self.terminated, achieved, desired, "goal_terminated")
        return reward, terminated

    def write(self, obs: dict[str, np.ndarray]) -> None:
        """Replace the goals of B observations, in place."""
        new = self.goal_of >= 0
        obs[DESIRED][new] = self.goals[self.goal_of[new]]


class Hindsight:
    """The choice of new goals for drawn transitions.

    Args:
        strategy: One of `STRATEGIES`.
        share: Probability with which a drawn transition of a finished episode gets a new goal.
        reward: Function of rewards.
        terminated: Function of terminations; None keeps the stored terminations.
    """

    def __init__(self, strategy: str, share: float, reward: GoalFunction, terminated: GoalFunction | None) -> None:
        self._strategy, self._share, self._reward, self._terminated = strategy, share, reward, terminated
        self._episodes: Episodes | None = None
        self._is_checked = False

    @property
    def num_bytes(self) -> int:
        """Allocated memory in bytes."""
        return 0 if self._episodes is None else self._episodes.num_bytes

    def insert(self, ring: Ring, inserted: Inserted, source: Hashable) -> None:
        """Add the rollout that was just inserted into the ring; only the first call allocates memory."""
        if self._episodes is None:
            self._episodes = Episodes(ring.capacity)
        self._episodes.insert(ring, inserted, source)

    def rebuild(self, ring: Ring) -> None:
        """Read the episodes from a ring whose state was loaded."""
        self._episodes = Episodes(ring.capacity)
        self._episodes.rebuild(ring)

    def draw(self, ring: Ring, rows: np.ndarray, uniform: np.ndarray) -> Relabeled:
        """Draw new goals, the goals that were achieved after steps of the same episodes.

        Args:
            ring: The ring.
            rows: (B,) drawn rows.
            uniform: (B,) float64 random numbers in [0, 1). A number below `share` gives its row a new goal; divided by
                `share`, it is uniform in [0, 1) again, and chooses the goal.

        Raises:
            ContractError: A function returns other values than one number for each goal, or values that differ from
                the stored ones for the goals of the episodes.
        """
        assert self._episodes is not None
        if not self._is_checked:
            self._check(ring, rows)
            self._is_checked = True
        new = np.flatnonzero((uniform < self._share) & self._episodes.are_finished(rows))
        goal_of = np.full(len(rows), -1)
        goal_of[new] = np.arange(len(new))
        steps = self._episodes.draw(rows[new], self._strategy, uniform[new] / self._share)
        return Relabeled(ring, goal_of, achieved_after(ring, steps), self._reward, self._terminated)

    def _check(self, ring: Ring, rows: np.ndarray) -> None:
        """Compare the values of the functions with the stored ones, for the original goals of drawn rows."""
        achieved, desired = achieved_after(ring, rows), ring.observations[f"obs/{DESIRED}"].take(rows)
        stored = {"goal_reward": ("reward", self._reward), "goal_terminated": ("terminated", self._terminated)}
        for name, (column, function) in stored.items():
            if function is None:
                continue
            found, own = values_of(function, achieved, desired, name), ring.columns[column][rows]
            wrong = ~np.isclose(found, own, rtol=1e-3, atol=1e-4)
            if np.count_nonzero(wrong) > _MOST_WRONG * len(rows):
                k = np.flatnonzero(wrong)[0]
                raise ContractError(
                    f"{name} returned {float(found[k]):g} for achieved_goal {achieved[k].tolist()!s:.80} and "
                    f"desired_goal {desired[k].tolist()!s:.80}, but the {column} of this step was {float(own[k]):g}; "
                    "return what the environment with its wrappers returns for these goals (without goal_reward, "
                    "this is its compute_reward)")


def achieved_after(ring: Ring, rows: np.ndarray) -> np.ndarray:
    """Return the goals that were achieved after the steps in `rows` (N,), (N, ...)."""
    return ring.observations[f"obs/{ACHIEVED}"].take(ring.columns["link"][rows])


def values_of(function: GoalFunction, achieved: np.ndarray, desired: np.ndarray, name: str) -> np.ndarray:
    """Return the N values of a function of goals as an array (N,).

    Raises:
        ContractError: The function `name` returns another shape, or something else than numbers.
    """
    found = np.asarray(function(achieved, desired, {}))
    if found.shape != achieved.shape[:1] or found.dtype.kind not in "fiub":
        raise ContractError(
            f"{name} must return one number for each of N goals: for goals of shape {achieved.shape}, expected an "
            f"array of shape {achieved.shape[:1]}, got {found.dtype} {found.shape}; take norms along the last "
            "axis, such as numpy.linalg.norm(achieved - desired, axis=-1)")
    return found
