"""Returns and lengths of episodes, of raw rewards, and the monitor file."""

from __future__ import annotations

import csv
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from pytorchrl.agent.data import Episode
from pytorchrl.errors import ConfigError


class EpisodeStatistics:
    """Sums raw rewards over the valid steps of E running episodes.

    Args:
        num_envs: E.
        monitor: Where finished episodes are written, if anywhere.
        now: A clock in seconds.
    """

    def __init__(
        self, num_envs: int, monitor: Monitor | None = None, now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._returns = np.zeros(num_envs, dtype=np.float64)
        self._lengths = np.zeros(num_envs, dtype=np.int64)
        self._monitor = monitor
        self._now = now
        self._start = now()

    def reset(self) -> None:
        """Forget all running episodes."""
        self._returns[:] = 0.0
        self._lengths[:] = 0

    def add(self, reward: np.ndarray, valid: np.ndarray | None = None) -> None:
        """Count one step; `reward` is (E,) of any number type, `valid` (E,) bool, None if all are."""
        if valid is None:
            self._returns += reward
            self._lengths += 1
        else:
            self._returns += np.where(valid, reward, 0)
            self._lengths += valid

    def finish(
        self, ended: np.ndarray, terminated: np.ndarray, keywords_of: Callable[[int], Mapping[str, Any]],
    ) -> list[Episode]:
        """Close the episodes that ended in the step counted last.

        Args:
            ended: (E,) bool.
            terminated: (E,) bool, which of them ended by themselves.
            keywords_of: Gives the `info` of an environment's last step.
        """
        seconds = self._now() - self._start
        episodes = []
        for index in np.flatnonzero(ended).tolist():
            episode = Episode(
                float(self._returns[index]), int(self._lengths[index]), seconds, index, bool(terminated[index]))
            episodes.append(episode)
            if self._monitor is not None:
                self._monitor.write(episode, keywords_of(index))
        self._returns[ended] = 0.0
        self._lengths[ended] = 0
        return episodes

    def forget(self, cut: np.ndarray) -> None:
        """Start anew where `cut` (E,) bool: a fault ended those episodes, so their sums say nothing of the policy."""
        self._returns[cut] = 0.0
        self._lengths[cut] = 0

    def close(self) -> None:
        """Close the monitor file."""
        if self._monitor is not None:
            self._monitor.close()


class Monitor:
    """One CSV file of finished episodes; rows are appended, nothing is ever deleted.

    Columns: `r` sum of raw rewards, `l` steps, `t` seconds since the environments were created, `env` index,
    `ended` "terminated" or "truncated", then the keywords, taken from the last step's `info`.

    Raises:
        ConfigError: The file exists and has other columns.
    """

    COLUMNS = ("r", "l", "t", "env", "ended")

    def __init__(self, path: Path, keywords: tuple[str, ...] = ()) -> None:
        columns = [*self.COLUMNS, *keywords]
        self._keywords = keywords
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists() or path.stat().st_size == 0
        if not is_new:
            with path.open(newline="", encoding="utf-8") as file:
                found = next(csv.reader(file), [])
            if found != columns:
                raise ConfigError(f"{path} has columns {found}, not {columns}; use another log_dir or info_keywords")
        # Line by line, so that a killed worker leaves whole rows.
        self._file: TextIO = path.open("a", newline="", encoding="utf-8", buffering=1)
        self._writer = csv.writer(self._file)
        if is_new:
            self._writer.writerow(columns)

    def write(self, episode: Episode, info: Mapping[str, Any]) -> None:
        """Append one episode; a keyword that `info` lacks stays empty."""
        self._writer.writerow([
            round(episode.env_return, 6), episode.length, round(episode.seconds, 3), episode.env_index,
            "terminated" if episode.terminated else "truncated", *(info.get(key, "") for key in self._keywords),
        ])

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        self._file.close()
