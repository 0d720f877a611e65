"""Checkpoints of a run: files in `checkpoints/` of its directory, each of them whole or not there.

step-000000123456.pt    a dictionary of plain values and tensors, named by env steps

Nothing in such a file is executed when it is read, and one that was damaged is found out: every part has a checksum.
"""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from pytorchrl.errors import CheckpointError
from pytorchrl.run_directory import put_in_place
from pytorchrl.terminal import get_logger

# One more than is needed, for the newest may be damaged.
_KEPT = 2
_NAME = re.compile(r"step-(\d{12,})\.pt")

logger = get_logger(__name__)


def write(directory: Path, env_steps: int, checkpoint: Mapping[str, Any]) -> int:
    """Write a checkpoint beside its place, put it there in one step, and remove all but the newest two.

    Only one process at a time may do so; what others, which were killed, left half written is removed.

    Args:
        directory: Made if missing.
        env_steps: Of the run so far.
        checkpoint: Plain values and tensors.

    Returns:
        Its bytes.

    Raises:
        OSError: It cannot be written; what was there is as before.
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


def _save(checkpoint: Mapping[str, Any], file: Any) -> None:
    try:
        torch.save(dict(checkpoint), file)
    except RuntimeError as error:  # torch says so of a full disk
        raise OSError(str(error)) from error


def paths(directory: Path) -> list[Path]:
    """The checkpoints there are, newest first."""
    found = [path for path in directory.iterdir() if _NAME.fullmatch(path.name)] if directory.is_dir() else []
    return sorted(found, key=lambda path: int(_NAME.fullmatch(path.name)[1]), reverse=True)  # type: ignore[index] # they match


def read(path: Path) -> dict[str, Any]:
    """A checkpoint.

    Raises:
        CheckpointError: It is missing, damaged, or none.
    """
    try:
        with zipfile.ZipFile(path) as archive:  # torch itself does not look at checksums
            damaged = archive.testzip()
        if damaged is not None:
            raise CheckpointError(f"checkpoint {str(path)!r} is damaged: the checksum of {damaged} is wrong")
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{str(path)!r} cannot be read as a checkpoint: {error}") from error
    if not isinstance(checkpoint, dict):
        raise CheckpointError(f"{str(path)!r} is no checkpoint")
    return checkpoint


def newest(directory: Path) -> dict[str, Any] | None:
    """The newest checkpoint that can be read; None if there is none at all. Newer ones are told of, and renamed: `.damaged`.

    Raises:
        CheckpointError: There are some, and none can be read.
    """
    problem: CheckpointError | None = None
    damaged: list[Path] = []
    for path in paths(directory):
        try:
            checkpoint = read(path)
        except CheckpointError as error:  # noqa: PERF203 - there are two
            logger.warning("%s", error)
            problem = problem or error
            damaged.append(path)
        else:
            for newer in damaged:  # or they would count among the newest two of the run that goes on
                newer.replace(newer.with_name(f"{newer.name}.damaged"))
            return checkpoint
    if problem is not None:
        raise CheckpointError(f"no checkpoint of {str(directory)!r} can be read ({problem}); to begin anew, use another log_dir, "
                              "or overwrite=True in place of resume=True") from problem
    return None
