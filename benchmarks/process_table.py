"""The processes of this machine, as /proc shows them (Linux only)."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Process:
    """A process that is no zombie.

    Attributes:
        parent: Id of its parent.
        session: Id of its session.
    """

    parent: int
    session: int


def read_text(path: str) -> str:
    """Return the contents of a file of /proc; "" if the process has ended."""
    with contextlib.suppress(OSError):
        return Path(path).read_bytes().decode(errors="replace")
    return ""


def process(pid: int) -> Process | None:
    """Return a process; None if it has ended or is a zombie."""
    fields = read_text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return Process(int(fields[1]), int(fields[3])) if fields and fields[0] not in "ZX" else None


def running_processes() -> dict[int, Process]:
    """Return all processes of this machine, by id."""
    found = ((int(name), process(int(name))) for name in os.listdir("/proc") if name.isdigit())
    return {pid: entry for pid, entry in found if entry is not None}


def descendants(pids: Iterable[int], table: Mapping[int, Process]) -> set[int]:
    """Return the given processes that are in the table of `running_processes`, and all their descendants."""
    found, level = set[int](), set(pids) & table.keys()
    while level:
        found |= level
        level = {pid for pid, entry in table.items() if entry.parent in level} - found
    return found


def command_of(pid: int) -> list[str]:
    """Return the command and the arguments of a process; [] if it has ended."""
    return [part for part in read_text(f"/proc/{pid}/cmdline").split("\0") if part]


def name_of(pid: int) -> str:
    """Return the name of the main thread of a process."""
    return read_text(f"/proc/{pid}/comm").strip()


def environment_of(pid: int) -> list[str]:
    """Return the variables of a process, as "name=value", with which it was started."""
    return read_text(f"/proc/{pid}/environ").split("\0")


def ray_directories(pids: Iterable[int]) -> set[Path]:
    """Return the directories of the Ray instances of this package that processes name in their command lines."""
    return {Path(name) for pid in pids for name in re.findall(r"/tmp/prl-\w+", " ".join(command_of(pid)))}
