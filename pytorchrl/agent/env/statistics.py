"""Compute the returns (sums of raw rewards) and lengths of episodes, and write the monitor file."""

from __future__ import annotations

import csv
import io
import json
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np

from pytorchrl.agent.data import Episode
from pytorchrl.errors import ConfigError
from pytorchrl.files.atomic import open_regular
from pytorchrl.files.lines import AppendedFile

APPROXIMATED = "final_obs_approximated"
"""Entry of `info`, (E,) bool: where the last observation of an episode is unknown, and another one takes its place."""
_LONGEST_HEADER = 1 << 16
_MOST_STEPS, _MOST_REWARDS = 256, 65_536
"""Largest numbers of steps and of rewards that have not been added to the returns yet."""


class EpisodeStatistics:
    """The sums of raw rewards and the numbers of valid steps (see `Step.valid`) in E running episodes.

    Args:
        num_envs: E, the number of environments.
        monitor: File to which finished episodes are written; None for no file.
        now: Function that returns the time in seconds.
    """

    def __init__(
        self, num_envs: int, monitor: Monitor | None = None, now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._returns = np.zeros(num_envs, dtype=np.float64)
        # Rewards that `_returns` does not contain yet, one row for each step. An addition at each step would be slow.
        num_rows = max(1, min(_MOST_STEPS, _MOST_REWARDS // num_envs))
        self._rewards = np.zeros((num_rows, num_envs), dtype=np.float64)
        self._rows = list(self._rewards)  # an index into a list is several times as fast as an index into an array
        self._num_pending = 0
        self._num_steps = 0
        # For each environment, the number of steps that are not part of the running episode: steps before the episode,
        # and invalid steps. The length of the episode is `_num_steps` minus this number.
        self._num_before = np.zeros(num_envs, dtype=np.int64)
        self._monitor = monitor
        self._now = now
        self._start = now()

    def reset(self) -> None:
        """Discard all running episodes."""
        self._num_pending = 0
        self._returns[:] = 0.0
        self._num_before[:] = self._num_steps

    def add(self, reward: np.ndarray, valid: np.ndarray | None = None) -> None:
        """Add the rewards of one step, and count the step.

        Args:
            reward: (E,) raw rewards of any numeric dtype.
            valid: (E,) bool, false for steps that are not transitions, such as resets; None if all are transitions.
        """
        self._num_steps += 1
        if valid is not None:
            reward = np.where(valid, reward, 0)
            self._num_before += ~valid
        self._rows[self._num_pending][...] = reward
        self._num_pending += 1
        if self._num_pending == len(self._rows):
            self._add_pending()

    def _add_pending(self) -> None:
        if self._num_pending:
            self._returns += np.add.reduce(self._rewards[:self._num_pending], axis=0)
            self._num_pending = 0

    def finish(
        self, ended: np.ndarray, terminated: np.ndarray, keywords_of: Callable[[int], Mapping[str, object]],
        approximated: np.ndarray | None = None,
    ) -> list[Episode]:
        """Finish the episodes that ended in the latest counted step, and return them.

        Args:
            ended: (E,) bool, whether the episode of each environment ended.
            terminated: (E,) bool, whether the episode was terminated, not truncated.
            keywords_of: Function from the index of an environment to the `info` of the last step of its episode.
            approximated: (E,) bool, see `APPROXIMATED`; None if all last observations are known.
        """
        self._add_pending()
        seconds = self._now() - self._start
        episodes = []
        for index in ended.nonzero()[0].tolist():
            length = self._num_steps - int(self._num_before[index])
            episode = Episode(
                float(self._returns[index]), length, seconds, index, bool(terminated[index]),
                is_approximated=approximated is not None and bool(approximated[index]))
            episodes.append(episode)
            if self._monitor is not None:
                self._monitor.write(episode, keywords_of(index))
        self.discard(ended)
        return episodes

    def discard(self, ended: np.ndarray) -> None:
        """Discard the running episode of each environment where the (E,) bool mask `ended` is True."""
        self._add_pending()
        self._returns[ended] = 0.0
        self._num_before[ended] = self._num_steps

    def write(self, episodes: Iterable[Episode]) -> None:
        """Write finished episodes, which were counted elsewhere, to the monitor file."""
        if self._monitor is not None:
            for episode in episodes:
                self._monitor.write(episode, {})

    def close(self) -> None:
        """Close the monitor file."""
        if self._monitor is not None:
            self._monitor.close()


class Monitor:
    """CSV file of finished episodes, to which rows are appended; existing rows are kept.

    Columns: `r`, the sum of raw rewards; `l`, the number of steps; `t`, the seconds since the environments were
    created; `env`, the index of the environment; `ended`, "terminated" or "truncated"; then one column for each
    of `keywords`.

    Args:
        path: The file.
        keywords: Keys in the `info` of an episode's last step; each key has a column, which contains its values.

    Raises:
        ConfigError: The file exists and has other columns.
        OSError: The file cannot be opened.
    """

    COLUMNS = ("r", "l", "t", "env", "ended")

    def __init__(self, path: Path, keywords: tuple[str, ...] = ()) -> None:
        columns = [*self.COLUMNS, *keywords]
        self._keywords = keywords
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = AppendedFile(path, header=_row(columns))
        if (found := _columns_of(path)) not in (columns, []):
            self._file.close()
            raise ConfigError(f"{path} has columns {found}, not {columns}; use another log_dir or info_keywords")

    def write(self, episode: Episode, info: Mapping[str, object]) -> None:
        """Append the row of one episode; the field of a keyword is empty if `info` lacks the keyword.

        A mapping or an array is written as JSON.

        If the disk is full, the row is lost.
        """
        self._file.append(_row([
            round(episode.env_return, 6), episode.length, round(episode.time_s, 3), episode.env_index,
            "terminated" if episode.terminated else "truncated", *(_field(info.get(key, "")) for key in self._keywords),
        ]))

    def close(self) -> None:
        """Close the file; further calls have no effect."""
        self._file.close()


def _field(value: object) -> object:
    """Return a value of `info` as a field of a CSV file; mappings and lists become JSON."""
    if hasattr(value, "tolist"):  # a number or an array of NumPy
        value = value.tolist()
    return json.dumps(value, default=_field) if isinstance(value, (Mapping, list, tuple)) else value


def _row(fields: Iterable[object]) -> str:
    """Return a line of a CSV file, without the line break."""
    buffer = io.StringIO()
    csv.writer(buffer).writerow(fields)
    return buffer.getvalue().removesuffix("\r\n")


def _columns_of(path: Path) -> list[str]:
    with open_regular(path) as file:
        start = file.read(_LONGEST_HEADER).decode("utf-8", errors="replace")
    try:
        return next(csv.reader(io.StringIO(start, newline="")), [])  # a name of a column may contain line breaks
    except csv.Error:  # for example, a damaged header that contains NUL
        return [start.partition("\n")[0]]
