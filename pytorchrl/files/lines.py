"""Append lines to a file, and protect the lines of records of runs with checksums.

A line is appended completely or not at all. If the disk is full, lines are lost, but the run continues.

The last entry of a sealed line, `"sha256"`, is the line's checksum. It is the SHA-256 of two concatenated texts: the
checksum of the previous line (empty for the first line), and the text of the line before this entry. A reader thus
detects changed, missing, additional and swapped lines. Missing lines at the end of a file are not detected, because a
killed run may end after any line.

Commands that only show runs import this module, so it must not import torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path

from pytorchrl.errors import CheckpointError
from pytorchrl.files.atomic import open_no_follow, open_regular, sha256_of
from pytorchrl.support.terminal import get_logger

logger = get_logger(__name__)

_CHUNK_BYTES = 1 << 16
_ENTRY = re.compile(rb'"sha256": "([0-9a-f]{64})"\}')
_ENTRY_BYTES = len('"sha256": ""}') + 64


def seal(line: str, previous: str) -> tuple[str, str]:
    """Return a line with its checksum and a line break, and the checksum.

    Args:
        line: The text of a JSON object, without a line break.
        previous: Checksum of the previous line; an empty string for the first line.
    """
    start = line.removesuffix("}") + ("" if line == "{}" else ", ")
    checksum = hashlib.sha256((previous + start).encode("utf-8")).hexdigest()
    return f'{start}"sha256": "{checksum}"}}\n', checksum


def check_sealed(content: bytes) -> list[bytes]:
    """Check the checksums of the complete lines of a file, and return these lines without their line breaks.

    The last line may be incomplete, because its writer was killed. It is left out, unless only its line break is
    missing.

    Raises:
        ValueError: A line is damaged, or a line before it is missing; the message names the number of the line, counted
            from 1.
    """
    *lines, last = content.split(b"\n")
    if _ENTRY.search(last):
        lines.append(last)
    previous = b""
    for number, line in enumerate(lines, start=1):
        entry = _ENTRY.fullmatch(line, max(0, len(line) - _ENTRY_BYTES))
        if entry is None or entry[1] != hashlib.sha256(previous + line[:entry.start()]).hexdigest().encode("ascii"):
            raise ValueError(f"line {number} differs from its checksum or has none, so this line was damaged or "
                             "changed after it was written, or lines before it are missing")
        previous = entry[1]
    return lines


class AppendedFile:
    """A text file to which lines are appended.

    If a line cannot be written, a warning is logged and the line is lost, but later lines can be appended. An
    incomplete last line, which a killed process left, is removed. New files have mode 0666 & ~umask, and symbolic links
    are not followed. If somebody removes the file, a warning is logged, and a new file begins.

    Args:
        path: The file, created if missing.
        resumed: The `state` of the file at the checkpoint from which the run is resumed; lines that were added later
            are removed. None: all complete lines are kept.
        header: First line of a new file; None: a new file is empty.

    Raises:
        OSError: The file cannot be opened, or is not a regular file.
        CheckpointError: The lines before the checkpoint are damaged or missing.
    """

    def __init__(
        self, path: Path, resumed: Mapping[str, object] | None = None, *, header: str | None = None,
    ) -> None:
        self._path, self._lost, self._header = path, 0, header
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
        except OSError:
            self.close()
            raise
        if header is not None and not self._size:
            self.append(header)

    @property
    def state(self) -> dict[str, object]:
        """The size of the file in bytes and its SHA-256, to be passed as `resumed` when the run is resumed."""
        if self._hash is None:
            self._hash = _hash(self._path, self._size)
        return {"bytes": self._size, "sha256": self._hash.hexdigest()}

    def append(self, line: str) -> None:
        """Append a line. When the method returns, the line is in the file completely, or is lost with a warning."""
        assert self._descriptor is not None, "the file is closed"
        left = data = f"{line}\n".encode()
        try:
            if not os.fstat(self._descriptor).st_nlink:
                left = data = self._begin_again() + data
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
        if self._hash is not None:
            self._hash.update(data)

    def _begin_again(self) -> bytes:
        """Create the file again, because it was removed, and return its header."""
        assert self._descriptor is not None
        self._path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = open_no_follow(os.fspath(self._path), os.O_RDWR | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, self._descriptor)
        os.close(descriptor)
        self._size, self._hash = 0, hashlib.sha256()
        logger.warning("%s was removed; its earlier lines are lost, and a new file begins", self._path)
        return b"" if self._header is None else f"{self._header}\n".encode()

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
