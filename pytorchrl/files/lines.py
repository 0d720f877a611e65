"""Append lines to a file, each completely or not at all; if the disk is full, lines are lost, but the run continues."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from pytorchrl.errors import CheckpointError
from pytorchrl.files.atomic import open_no_follow, open_regular, sha256_of
from pytorchrl.files.sealed_lines import ENTRY_BYTES, seal, seal_of
from pytorchrl.support.terminal import get_logger

logger = get_logger(__name__)

_CHUNK_BYTES = 1 << 16


class AppendedFile:
    """A text file to which lines are appended.

    If a line cannot be written, a warning is logged and the line is lost, but later lines can be appended. An
    incomplete last line, which a killed process left, is removed. New files have mode 0666 & ~umask, and symbolic links
    are not followed.

    Args:
        path: The file, created if missing.
        resumed: The `state` of the file at the checkpoint from which the run is resumed; lines that were added later
            are removed. None: all complete lines are kept.
        sealed: Whether each line is a JSON object, to which a checksum is added; see `sealed_lines`.

    Raises:
        OSError: The file cannot be opened, or is not a regular file.
        CheckpointError: The lines before the checkpoint are damaged or missing.
    """

    def __init__(self, path: Path, resumed: Mapping[str, object] | None = None, *, sealed: bool = False) -> None:
        self._path, self._is_sealed, self._lost = path, sealed, 0
        has_lines = path.exists()
        # If the file already has lines, their hash is computed only when it is needed.
        self._hash = None if has_lines else hashlib.sha256()
        if resumed is not None and has_lines:
            self._hash = check_appended(path, resumed)
        descriptor = open_no_follow(os.fspath(path), os.O_RDWR | os.O_CREAT | os.O_APPEND)
        self._descriptor: int | None = descriptor
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(f"{os.fspath(path)!r} is not a regular file")
            self._size = int(str(resumed["bytes"])) if resumed is not None and has_lines else _end_of_lines(
                descriptor, status.st_size)
            if self._size != status.st_size:
                os.ftruncate(descriptor, self._size)
            start = max(0, self._size - ENTRY_BYTES)
            self._last_seal = seal_of(os.pread(descriptor, self._size - start, start))
        except OSError:
            self.close()
            raise

    @property
    def state(self) -> dict[str, object]:
        """The size of the file in bytes and its SHA-256, to be passed as `resumed` when the run is resumed."""
        if self._hash is None:
            self._hash = _hash(self._path, self._size)
        return {"bytes": self._size, "sha256": self._hash.hexdigest()}

    @property
    def is_empty(self) -> bool:
        """Whether the file contains nothing."""
        return not self._size

    def append(self, line: str) -> None:
        """Append a line. When the method returns, the line is in the file completely, or is lost with a warning."""
        assert self._descriptor is not None, "the file is closed"
        line = seal(line, self._last_seal) if self._is_sealed else line + "\n"
        left = data = line.encode("utf-8")
        try:
            while left:
                left = left[os.write(self._descriptor, left):]
        except OSError as error:
            with contextlib.suppress(OSError):  # removes the part of the line that was written
                os.ftruncate(self._descriptor, self._size)
            if not self._lost:
                logger.warning("%s cannot be written (%s); lines are lost until it can be written again", self._path,
                               error)
            self._lost += 1
            return
        if self._lost:
            logger.warning("%s is written again; %d lines are missing", self._path, self._lost)
            self._lost = 0
        self._size += len(data)
        self._last_seal = seal_of(data)
        if self._hash is not None:
            self._hash.update(data)

    def close(self) -> None:
        """Close the file; idempotent."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def check_appended(path: Path, state: Mapping[str, object]) -> hashlib._Hash:
    """Check that a file starts with the lines that `AppendedFile.state` described, and return the hash of these lines.

    Raises:
        CheckpointError: These lines are damaged or missing.
    """
    try:
        found, expected = _hash(path, int(str(state["bytes"]))), state["sha256"]
    except OSError as error:
        raise CheckpointError(f"{str(path)!r} cannot be read: {error}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"the checkpoint does not say which lines {str(path)!r} had: {error!r}") from error
    if found.hexdigest() != expected:
        raise CheckpointError(f"the lines of {str(path)!r} differ from those at the checkpoint, so the file was "
                              "damaged or changed; restore it, or move it away to resume with an empty file")
    return found


def _hash(path: Path, size: int) -> hashlib._Hash:
    with open_regular(path) as file:
        return sha256_of(file, size)


def _end_of_lines(descriptor: int, size: int) -> int:
    """Return the number of bytes up to the end of the last complete line of a file of `size` bytes."""
    while size:
        start = max(0, size - _CHUNK_BYTES)
        if end := os.pread(descriptor, size - start, start).rfind(b"\n") + 1:
            return start + end
        size = start
    return 0
