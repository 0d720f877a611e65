"""Write and read checkpoints, which are files in the subdirectory `checkpoints/` of a run's directory.

step-000000123456.pt    a dictionary of plain values and tensors; its name contains the number of env steps
best.json               the env steps and mean return of the best checkpoint (only with `keep_best_checkpoint`)

The module `pytorchrl.files.tensors` writes and reads the `.pt` files, and detects damage.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, cast

from pytorchrl.errors import CheckpointError, ConfigError
from pytorchrl.files.atomic import read_json
from pytorchrl.files.run_directory import CHECKPOINTS
from pytorchrl.files.tensors import read_sealed, save
from pytorchrl.learner.options import LearnerOptions
from pytorchrl.learner.reporting import write_json
from pytorchrl.support.terminal import get_logger
from pytorchrl.support.untyped import StateDict

_BEST = "best.json"
_NAME = re.compile(r"step-(\d{12,})\.pt")

logger = get_logger(__name__)


class Written(NamedTuple):
    """A checkpoint that has been written."""

    env_steps: int
    version: int
    """Number of updates before the checkpoint."""


class Rated(NamedTuple):
    """The best checkpoint: its env steps, and the highest mean return of its evaluations."""

    env_steps: int
    return_mean: float


class CheckpointFiles:
    """The checkpoint files of one run. The newest files, the best one, and one file per interval of env steps are kept.

    The best checkpoint is the one with the best evaluation. An evaluation counts for the newest checkpoint. But if
    the evaluated weights are newer than this checkpoint, the evaluation counts for the next checkpoint. Only one
    process at a time may use the directory. One thread may call `write` while another thread calls `rate`.

    Args:
        directory: Directory of the checkpoints, created when the first one is written.
        options: Options of the learner, which say which checkpoints are kept.
        newest: The checkpoint from which the run is resumed; None: the run is new.
    """

    def __init__(self, directory: Path, options: LearnerOptions, newest: Written | None = None) -> None:
        self._directory, self._options, self._newest = directory, options, newest
        self._best = _read_best(directory)
        # guards `_newest`, `_best` and `_evaluated`:
        # self._newest is None or all(version > self._newest.version for version, _ in self._evaluated)
        self._lock = threading.Lock()
        self._evaluated: list[tuple[int, float]] = []  # (version, mean return) of weights newer than `_newest`

    def write(self, written: Written, checkpoint: Mapping[str, object]) -> int:
        """Write a checkpoint completely or not at all, and remove the checkpoints that the options do not keep.

        Incomplete files of killed processes are removed, too.

        Args:
            written: Env steps and updates of the run so far.
            checkpoint: Plain values and tensors.

        Returns:
            The size of the file in bytes.

        Raises:
            OSError: The file cannot be written; earlier checkpoints are unchanged.
        """
        self._directory.mkdir(exist_ok=True)
        with self._lock:
            for left in (*self._directory.glob(".step-*"), *self._directory.glob(f".{_BEST}.*")):
                with contextlib.suppress(OSError):  # for example, if `left` is a directory
                    left.unlink()
        path = path_of(self._directory, written.env_steps)
        save(path, checkpoint)
        with self._lock:
            self._newest = written
            self._find_best()
            self._prune()
        return path.stat().st_size

    def rate(self, version: int, return_mean: float) -> None:
        """Record that the weights after `version` updates reached `return_mean` in an evaluation.

        Raises:
            OSError: The file that names the best checkpoint cannot be written.
        """
        if self._options.keep_best_checkpoint and math.isfinite(return_mean):
            with self._lock:
                self._evaluated.append((version, return_mean))
                self._find_best()

    def _find_best(self) -> None:
        """Record the newest checkpoint as the best one if it was evaluated better than the previous best one."""
        if self._newest is None:
            return
        env_steps, own = self._newest
        returns = [return_mean for version, return_mean in self._evaluated if version <= own]
        self._evaluated = [(version, return_mean) for version, return_mean in self._evaluated if version > own]
        if returns and (self._best is None or max(returns) > self._best.return_mean):
            self._best = Rated(env_steps, max(returns))
            write_json(self._directory / _BEST, self._best._asdict())

    def _prune(self) -> None:
        """Remove all checkpoints except those that the options say to keep."""
        found = paths(self._directory)
        kept = _kept(found, self._options.keep_checkpoints, self._options.keep_checkpoint_every)
        if self._options.keep_best_checkpoint and self._best is not None:
            kept.add(path_of(self._directory, self._best.env_steps))
        for path in found:
            if path not in kept:
                path.unlink()


def _read_best(directory: Path) -> Rated | None:
    """Return the best checkpoint so far; None if it is unknown or its file was removed."""
    try:
        found = read_json(directory / _BEST)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning("the best checkpoint is unknown: %s", error)
        return None
    env_steps, return_mean = (found.get(name) for name in Rated._fields) if isinstance(found, dict) else (None, None)
    if not isinstance(env_steps, int) or not isinstance(return_mean, (int, float)):
        return None
    return Rated(env_steps, return_mean) if path_of(directory, env_steps).exists() else None


def _kept(newest_first: Sequence[Path], num_newest: int, every: int | None) -> set[Path]:
    """Return the checkpoints to keep: the `num_newest` newest ones, and one per interval of `every` env steps.

    Each positive multiple of `every` begins an interval. The oldest checkpoint of each interval is kept.
    """
    kept = set(newest_first[:num_newest])
    if every is not None:
        first = {env_steps_of(path) // every: path for path in newest_first}  # of equal keys, the oldest path wins
        kept.update(path for multiple, path in first.items() if multiple)
    return kept


def path_of(directory: Path, env_steps: int) -> Path:
    """Return the path of the checkpoint after a number of env steps."""
    return directory / f"step-{env_steps:012d}.pt"


def paths(directory: Path) -> list[Path]:
    """Return the paths of all checkpoints, newest first."""
    found = [path for path in directory.iterdir() if _NAME.fullmatch(path.name)] if directory.is_dir() else []
    return sorted(found, key=env_steps_of, reverse=True)


def env_steps_of(path: Path) -> int:
    """Return the number of env steps in the name of a checkpoint."""
    return int(path.stem.removeprefix("step-"))


def read(path: Path) -> dict[str, object]:
    """Read a checkpoint.

    Raises:
        CheckpointError: The file is missing or damaged, is not a checkpoint, or was renamed.
    """
    found = read_sealed(path, "checkpoint")
    learner = found.get("learner")
    if not isinstance(learner, dict) or not isinstance(found.get("scheme"), dict):
        raise CheckpointError(f"checkpoint {str(path)!r} lacks the state of a scheme or of a learner")
    env_steps = learner.get("env_steps")
    if type(env_steps) is not int:
        raise CheckpointError(f"checkpoint {str(path)!r} contains {env_steps!r:.100} instead of a number of steps")
    if _NAME.fullmatch(path.name) and env_steps != env_steps_of(path):
        raise CheckpointError(f"checkpoint {str(path)!r} was renamed: it contains {env_steps} env steps")
    return found


class RunState(NamedTuple):
    """The state of a run, as a checkpoint contains it."""

    scheme: StateDict
    """The state of the scheme."""
    learner: StateDict
    """The state of the learner."""


class Newest(NamedTuple):
    """The newest checkpoint that can be read."""

    path: Path
    """The file of the checkpoint."""
    state: RunState
    """Its contents."""
    damaged: tuple[Path, ...]
    """The newer checkpoints, none of which can be read."""


def newest(directory: Path) -> Newest | None:
    """Return the newest readable checkpoint, or None if there are no checkpoints; no file is changed.

    If newer checkpoints cannot be read, a warning says what is lost.

    Raises:
        CheckpointError: There are checkpoints, but none can be read.
    """
    problem: CheckpointError | None = None
    damaged: list[Path] = []
    for path in paths(directory):
        try:
            found = cast("Mapping[str, StateDict]", read(path))
        except CheckpointError as error:  # noqa: PERF203 - there are few checkpoints
            if not os.path.lexists(path):  # another process continues the run, and has removed this file
                continue
            problem = problem or error
            damaged.append(path)
        else:
            if problem is not None:
                logger.warning("%s; the run continues from %s instead, so the %d env steps in between are lost and "
                               "taken again", problem, path.name, env_steps_of(damaged[0]) - env_steps_of(path))
            return Newest(path, RunState(**found), tuple(damaged))
    if problem is not None:
        raise CheckpointError(f"no checkpoint of {str(directory)!r} can be read ({problem}); to start a new run, use "
                              "another log_dir, or overwrite=True instead of resume=True") from problem
    return None


def newest_checkpoint(directory: Path) -> int | None:
    """Return the env steps of the newest checkpoint, read from its name; None if there are no checkpoints."""
    return next(map(env_steps_of, paths(directory)), None)


def write_checkpoint(log_dir: Path, state: RunState) -> None:
    """Write the `last_state()` of a learner as a checkpoint of the run in `log_dir`; all others are kept.

    Raises:
        ConfigError: The checkpoint cannot be written.
    """
    directory = log_dir / CHECKPOINTS
    try:
        directory.mkdir(exist_ok=True)
        save(path_of(directory, state.learner["env_steps"]), state._asdict())
    except OSError as error:
        raise ConfigError(f"the state of the run cannot be written to {str(directory)!r}: {error}") from error


def set_aside(damaged: Iterable[Path]) -> None:
    """Add the suffix `.damaged` to damaged checkpoints, so that they do not count among the checkpoints to keep."""
    for path in damaged:
        path.replace(path.with_name(f"{path.name}.damaged"))
