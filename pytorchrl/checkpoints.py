"""Write and read checkpoints, which are files in the subdirectory `checkpoints/` of a run's directory.

step-000000123456.pt    a dictionary of plain values and tensors; its name contains the number of env steps

A file is written completely or not at all. `read` executes no code from a file, and detects damaged files by
checksums.
"""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import torch

from pytorchrl.errors import CheckpointError
from pytorchrl.run_directory import put_in_place
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
        left.unlink()
    with put_in_place(directory / f"step-{env_steps:012d}.pt") as file:
        _save(checkpoint, file)
        size = file.tell()
    folder = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    for old in paths(directory)[_KEPT:]:
        old.unlink()
    return size


def _save(checkpoint: Mapping[str, object], file: IO[bytes]) -> None:
    try:
        torch.save(dict(checkpoint), file)
    except RuntimeError as error:  # torch raises this error if the disk is full
        raise OSError(str(error)) from error


def paths(directory: Path) -> list[Path]:
    """Return the paths of all checkpoints, newest first."""
    found = [path for path in directory.iterdir() if _NAME.fullmatch(path.name)] if directory.is_dir() else []
    return sorted(found, key=lambda path: int(path.stem.removeprefix("step-")), reverse=True)


def read(path: Path) -> StateDict:
    """Read a checkpoint.

    Raises:
        CheckpointError: The file is missing or damaged, or is not a checkpoint.
    """
    try:
        with zipfile.ZipFile(path) as archive:  # torch itself does not verify checksums
            damaged = archive.testzip()
        if damaged is not None:
            raise CheckpointError(f"checkpoint {str(path)!r} is damaged: the checksum of {damaged} is wrong")
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{str(path)!r} cannot be read as a checkpoint: {error}") from error
    if not isinstance(checkpoint, dict):
        raise CheckpointError(f"{str(path)!r} is not a checkpoint")
    return checkpoint


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
