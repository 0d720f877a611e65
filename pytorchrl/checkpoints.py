"""Write and read checkpoints, which are files in the subdirectory `checkpoints/` of a run's directory.

step-000000123456.pt    a dictionary of plain values and tensors; its name contains the number of env steps

Files are written and read as `sealed_files` describes.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from pathlib import Path

from pytorchrl.errors import CheckpointError
from pytorchrl.sealed_files import read_sealed, save
from pytorchrl.terminal import get_logger
from pytorchrl.untyped import StateDict

# Number of checkpoints to keep: one more than needed, because the newest may be damaged.
_KEPT = 2
_NAME = re.compile(r"step-(\d{12,})\.pt")

logger = get_logger(__name__)


def write(directory: Path, env_steps: int, checkpoint: Mapping[str, object]) -> int:
    """Write a checkpoint to a temporary file, rename it atomically, and remove all but the newest two checkpoints.

    Only one process at a time may write; incomplete files of killed processes are removed.

    Args:
        directory: Directory of checkpoints, created if missing.
        env_steps: Env steps of the run so far.
        checkpoint: Plain values and tensors.

    Returns:
        The size of the file in bytes.

    Raises:
        OSError: The file cannot be written; earlier checkpoints are unchanged.
    """
    directory.mkdir(exist_ok=True)
    for left in directory.glob(".step-*"):
        with contextlib.suppress(OSError):  # for example, a directory with such a name
            left.unlink()
    path = directory / f"step-{env_steps:012d}.pt"
    save(path, checkpoint)
    for old in paths(directory)[_KEPT:]:
        old.unlink()
    return path.stat().st_size


def paths(directory: Path) -> list[Path]:
    """Return the paths of all checkpoints, newest first."""
    found = [path for path in directory.iterdir() if _NAME.fullmatch(path.name)] if directory.is_dir() else []
    return sorted(found, key=lambda path: int(path.stem.removeprefix("step-")), reverse=True)


def read(path: Path) -> dict[str, object]:
    """Read a checkpoint.

    Raises:
        CheckpointError: The file is missing or damaged, is not a checkpoint, or was renamed.
    """
    found = read_sealed(path, "checkpoint")
    learner = found.get("learner")
    if isinstance(learner, dict) and (name := _NAME.fullmatch(path.name)) and learner.get("env_steps") != int(name[1]):
        raise CheckpointError(f"checkpoint {str(path)!r} was renamed: it contains {learner.get('env_steps')} env steps")
    return found


def newest(directory: Path) -> StateDict | None:
    """Return the newest readable checkpoint, or None if there are no checkpoints.

    Newer checkpoints that cannot be read get the suffix `.damaged`, and a warning is logged.

    Raises:
        CheckpointError: There are checkpoints, but none can be read.
    """
    problem: CheckpointError | None = None
    damaged: list[Path] = []
    for path in paths(directory):
        try:
            checkpoint = read(path)
        except CheckpointError as error:  # noqa: PERF203 - there are few checkpoints
            logger.warning("%s", error)
            problem = problem or error
            damaged.append(path)
        else:
            for newer in damaged:  # otherwise, `write` would keep them instead of readable files
                newer.replace(newer.with_name(f"{newer.name}.damaged"))
            return checkpoint
    if problem is not None:
        raise CheckpointError(f"no checkpoint of {str(directory)!r} can be read ({problem}); to start a new run, use "
                              "another log_dir, or overwrite=True instead of resume=True") from problem
    return None
