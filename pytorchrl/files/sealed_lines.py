"""Add checksums to the JSON lines of a file, so that a reader detects changed, missing, additional and swapped lines.

The last entry of a sealed line, `"sha256"`, is the line's checksum. It is the SHA-256 of two concatenated texts: the
checksum of the previous line (empty for the first sealed line), and the text of the line before this entry. Missing
lines at the end of a file are not detected, because a killed run may end after any line.

Commands that only show runs import this module, so it must not import torch.
"""

from __future__ import annotations

import hashlib
import re

_ENTRY = re.compile(rb'"sha256": "([0-9a-f]{64})"\}')
ENTRY_BYTES = len('"sha256": ""}\n') + 64
"""Size of a checksum at the end of a sealed line, with the line break."""


def seal(line: str, previous: str) -> str:
    """Return a line with its checksum and a line break.

    Args:
        line: The text of a JSON object, without a line break.
        previous: Checksum of the previous line, from `seal_of`; an empty string for the first line.
    """
    start = line.removesuffix("}") + ("" if line == "{}" else ", ")
    return f'{start}"sha256": "{_digest(previous, start.encode("utf-8"))}"}}\n'


def seal_of(line: bytes) -> str:
    """Return the checksum at the end of `line`, or "" if it has none; `line` must include its line break."""
    entry = _ENTRY.fullmatch(line[-ENTRY_BYTES:].removesuffix(b"\n"))
    return "" if entry is None else entry[1].decode("ascii")


def _digest(previous: str, start: bytes) -> str:
    return hashlib.sha256(previous.encode("ascii") + start).hexdigest()


class LineChecker:
    """Verify the checksums of consecutive lines of a file.

    Lines without a checksum, which earlier versions wrote, are accepted only before the first line with a checksum.

    Args:
        at_start: Whether the check starts at the first line of the file. Otherwise, the first line is accepted without
            a check, because its checksum depends on that of the previous line, which is unknown.
    """

    def __init__(self, *, at_start: bool = True) -> None:
        self._previous: str | None = "" if at_start else None
        self._is_sealed = False

    def is_sound(self, line: bytes) -> bool:
        """Return whether the next line, given with its line break, is unchanged and follows the previous line."""
        previous, found = self._previous, seal_of(line)
        if not found:
            return not self._is_sealed
        self._previous, self._is_sealed = found, True
        return previous is None or found == _digest(previous, line[:-ENTRY_BYTES])


def complete_lines(content: bytes) -> list[bytes]:
    """Return the complete lines of a file, each with a line break.

    The last line may be incomplete, because its writer was killed. It is left out, unless it ends with a checksum:
    then only its line break is missing, which this function adds.
    """
    *lines, last = content.split(b"\n")
    if _ENTRY.search(last):
        lines.append(last)
    return [line + b"\n" for line in lines]


def check_sealed(content: bytes) -> list[bytes]:
    """Check the checksums of the complete lines of a file, and return these lines.

    Raises:
        ValueError: A line is damaged, or a line before it is missing; the message names the number of the line, counted
            from 1.
    """
    checker, lines = LineChecker(), complete_lines(content)
    for number, line in enumerate(lines, start=1):
        if not checker.is_sound(line):
            raise ValueError(f"line {number} differs from its checksum, so this line was damaged or changed after it "
                             "was written, or lines before it are missing")
    return lines
