"""Let programs take turns, so that a change of the machine's speed affects all of them alike.

A program is a process. It prints a line of JSON when it is ready and at the end of each turn, and waits for a line of
the standard input before each turn. This module imports nothing but the standard library, because the interpreter of
another library may run it.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any


def answer(result: Mapping[str, Any]) -> None:
    """Print the result of a turn, as the program that had it."""
    print("\n" + json.dumps(result), flush=True)


class Child:
    """A running program, as the process that gives the turns.

    Args:
        command: The program and its arguments.
        options: Further arguments of `subprocess.Popen`.
    """

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        """Start the program."""
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options)

    def read(self) -> dict[str, Any]:
        """Return the next result; other lines of the program are ignored.

        Raises:
            SystemExit: The program has ended instead.
        """
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise SystemExit(f"a program ended with status {self._process.wait()}: {self._process.args}")

    def turn(self, request: str = "") -> dict[str, Any]:
        """Give the program a turn, with a line of text that it receives, and return its result."""
        assert self._process.stdin is not None
        print(request, file=self._process.stdin, flush=True)
        return self.read()

    def end(self) -> None:
        """End the program."""
        self._process.communicate()
