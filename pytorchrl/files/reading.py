"""Read the files of a run while the run may still be writing them.

Files may be missing, and the last line may be incomplete, because the run is still writing them or was killed.
The contents are untrusted: a value of an unexpected type is treated as missing.
"""

from __future__ import annotations

import hashlib
import math
import os
from pathlib import Path

from pytorchrl.errors import ConfigError
from pytorchrl.files.atomic import open_regular, parse_value, read_json
from pytorchrl.files.run_directory import METRICS_FILE, RUN_FILE, check_description, no_run

Record = dict[str, object]
"""One line of `metrics.jsonl`, or the contents of `run.json` or `result.json`."""

_TAIL_BYTES = 1 << 20
# If a file is larger than this, only its last part is read, so that a huge file does not fill the memory.
_MOST_BYTES = 256 << 20


def check_run(run_dir: Path) -> None:
    """Raise `ConfigError` unless `run_dir` contains `run.json`, which every run writes at its start."""
    try:
        if not (run_dir / RUN_FILE).is_file():
            raise ConfigError(no_run(run_dir, RUN_FILE))
    except OSError as error:
        raise ConfigError(f"{str(run_dir)!r} contains no run: {error}") from error


def read_object(path: Path) -> Record:
    """Return the contents of `run.json` or `result.json`; empty if the file is missing or invalid."""
    return read_checked(path)[0]


def read_checked(path: Path) -> tuple[Record, str]:
    """Return the JSON object in a file, and an error message; the message is empty if the file is sound or missing."""
    try:
        found = mapping(read_json(path))
        if path.name == RUN_FILE:
            check_description(found)
        elif number(found, "env_steps") is None:
            raise ValueError("it is not the result of a run: it contains no number 'env_steps'")
    except (OSError, ValueError) as error:
        return {}, f"{str(path)!r} cannot be read: {error}" if os.path.lexists(path) else ""
    return found, ""


def problem_of_records(result: Record, num_bytes: int, sha256: str | None) -> str:
    """Return how `metrics.jsonl` differs from the file at the end of the run; "" if it does not, or if it is unknown.

    Args:
        result: Contents of `result.json`, which describe the file at the end of the run; empty before the end.
        num_bytes: Size of the complete lines in bytes.
        sha256: The checksum of these lines; None: unknown.
    """
    if num_bytes < count(result, "records", "bytes"):
        return "is shorter than when its run ended, so its last records are missing"
    expected = text(result, "records", "sha256")
    if expected and sha256 not in (None, expected):
        return "differs from its checksum in result.json, so it was damaged or changed after its run ended"
    return ""


class Records:
    """The records of a run; each call of `read` returns the records that were written since the previous call.

    If the file was replaced or became shorter, for example because the run was resumed, `read` starts over.

    Args:
        run_dir: The directory of the run.
        only_latest: Whether the first call may skip all but the last megabyte, for callers that do not draw curves.
    """

    def __init__(self, run_dir: Path, *, only_latest: bool = False) -> None:
        self._path, self._only_latest = run_dir / METRICS_FILE, only_latest
        self._inode, self._offset = -1, 0
        self.written_at: float | None = None
        """Time of the latest write, in seconds since the epoch by the clock of the file system; None: no file."""
        self.has_restarted = False
        """Whether the latest call of `read` started over; if so, the records of earlier calls are not valid."""
        self.num_bytes = 0
        """Size of the file in bytes at the latest call of `read`, without an incomplete last line."""
        self.num_damaged = 0
        """Number of lines that are not JSON objects."""
        self._hash: hashlib._Hash | None = None  # of all complete lines; None if the first lines were skipped

    @property
    def sha256(self) -> str | None:
        """The checksum of all complete lines; None if there is no file, or its first lines were skipped."""
        return None if self._hash is None else self._hash.hexdigest()

    def read(self) -> list[Record]:
        """Return the new complete records, in order; damaged lines are counted and left out."""
        try:
            with open_regular(self._path) as file:
                status = os.fstat(file.fileno())
                self.written_at = status.st_mtime
                self.has_restarted = status.st_ino != self._inode or status.st_size < self._offset
                if self.has_restarted:
                    self._inode = status.st_ino
                    most = _TAIL_BYTES if self._only_latest else _MOST_BYTES
                    self._offset, self.num_damaged = max(0, status.st_size - most), 0
                    self._hash = None if self._offset else hashlib.sha256()
                file.seek(self._offset)
                data = file.read(min(status.st_size - self._offset, _MOST_BYTES))
        except OSError:
            self.num_bytes = 0
            return []
        *lines, incomplete = data.split(b"\n")
        data = data.removesuffix(incomplete)
        if self.has_restarted and self._offset:  # reading began in the middle of the first line
            del lines[:1]
        if self._hash is not None:
            self._hash.update(data)
        self._offset += len(data)
        self.num_bytes = self._offset
        found = [_record(line) for line in lines]
        self.num_damaged += sum(record is None for record in found)
        return [record for record in found if record is not None]


def _record(line: bytes) -> Record | None:
    """Return the record in a line; None if the line is damaged."""
    try:
        found = parse_value(line, METRICS_FILE)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def item(record: object, *path: str) -> object:
    """Return the value at a path of keys in nested objects; None if there is no value."""
    for key in path:
        record = record.get(key) if isinstance(record, dict) else None
    return record


def number(record: object, *path: str) -> float | None:
    """Return the finite number at a path of keys; None if there is no such number."""
    value = item(record, *path)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        found = float(value)
    except OverflowError:  # the whole number has hundreds of digits
        return None
    return found if math.isfinite(found) else None


def count(record: object, *path: str) -> int:
    """Return the number at a path of keys, truncated to a whole number; 0 if there is no number."""
    return int(number(record, *path) or 0)


def text(record: object, *path: str) -> str:
    """Return the string or number at a path of keys, converted to a string; "" if there is neither."""
    value = item(record, *path)
    return str(value) if isinstance(value, (str, int, float)) else ""


def mapping(record: object, *path: str) -> Record:
    """Return the JSON object at a path of keys; empty if there is no object."""
    value = item(record, *path)
    return value if isinstance(value, dict) else {}


def rows(record: object, *path: str) -> list[object]:
    """Return the list at a path of keys; empty if there is no list."""
    value = item(record, *path)
    return value if isinstance(value, list) else []
