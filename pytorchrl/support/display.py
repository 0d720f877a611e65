"""Show objects: as a title and rows of text in a terminal, and as a table in a notebook.

All texts are escaped. The HTML needs no other file, and has no colors of its own, so it is readable on a light and on a
dark page. Its styles stand in the elements, because some notebooks remove style sheets.
"""

from __future__ import annotations

import base64
import html
import os
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar
from urllib.parse import quote

from pytorchrl.support.terminal import printable

Row = tuple[str, Sequence[str]]
"""The name of a row and its items, such as "lr=0.001"."""
WIDTH = 80
"""The largest width of a `repr`, in columns."""
_MOST_ITEMS, _LONGEST_ITEM = 50, 100
_IMAGES: dict[str, str] = {".png": "image/png", ".svg": "image/svg+xml"}
_CELL = "text-align:left;vertical-align:top;padding:.1em 1em .1em 0;color:inherit;background:none;border:0"


def escape(text: object) -> str:
    """Escape text for HTML and SVG: control and format characters become visible, and `&<>"'` become entities."""
    return html.escape(printable(text), quote=True)


def figure(value: float) -> str:
    """Return a number with four significant digits, or with one decimal if its absolute value is at least 1000."""
    return f"{value:.1f}" if abs(value) >= 1000 else f"{value:.4g}"


def in_notebook() -> bool:
    """Return whether this process runs the code of a notebook, whose outputs can be HTML."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and getattr(ipython.get_ipython(), "kernel", None) is not None


def shortened(text: str) -> str:
    """Return a text on one line; if it has more than 100 characters, its end is replaced by "..."."""
    line = printable(" ".join(text.split("\n")))
    return line if len(line) <= _LONGEST_ITEM else f"{line[:_LONGEST_ITEM - 3]}..."


def wrapped(start: str, items: Sequence[str], end: str = "") -> str:
    """Return `start`, the items with commas between them, and `end`, in lines of at most 80 columns.

    Lines are broken after commas, and within an item only if it is longer than a line. All lines but the first are
    indented by the length of `start`. If there are more than 50 items, the others are counted.
    """
    more = len(items) - _MOST_ITEMS
    shown = [*map(printable, items[:_MOST_ITEMS]), *([f"and {more} more"] if more > 0 else [])]
    lines, room = [""], WIDTH - len(start)
    for item in [*(f"{item}," for item in shown[:-1]), f"{shown[-1]}{end}"]:
        if len(lines[-1]) + 1 + len(item) <= room:
            lines[-1] += f" {item}" if lines[-1] else item
        else:
            lines += textwrap.wrap(item, room, break_on_hyphens=False)
    return start + f"\n{' ' * len(start)}".join(line for line in lines if line)


class Displayed:
    """The base class of objects that a terminal and a notebook show as a title and rows."""

    def _rows(self) -> list[Row]:
        """Return the rows; a row without items is not shown."""
        raise NotImplementedError

    def __repr__(self) -> str:
        """Return the title and the rows, in lines of at most 80 columns."""
        return table_text(type(self).__name__, self._rows())

    def _repr_html_(self) -> str:
        """Return the HTML that notebooks show."""
        rows = "".join(f'<tr><th style="{_CELL};font-weight:normal;opacity:.7">{escape(name)}</th>'
                       f'<td style="{_CELL}">{escape(", ".join(items))}</td></tr>'
                       for name, items in self._rows() if items)
        return (f'<div style="color:inherit"><b>{escape(type(self).__name__)}</b><table style="margin:0;border:0;'
                f'border-collapse:collapse;overflow-wrap:anywhere"><tbody>{rows}</tbody></table></div>')


def table_text(title: str, rows: Sequence[Row]) -> str:
    """Return a title and rows as text, in lines of at most 80 columns; rows without items are left out."""
    shown = [(printable(name), items) for name, items in rows if items]
    width = max((len(name) for name, _ in shown), default=0)
    return "\n".join([title, *(wrapped(f"  {name:<{width}}  ", items) for name, items in shown)])


@dataclass(frozen=True, repr=False)
class WrittenFile(os.PathLike[str]):
    """A file that was written. A notebook shows a picture in place, and a link to any other file.

    Attributes:
        path: Path of the file.
    """

    path: Path
    largest_bytes: ClassVar[int] = 4 << 20
    """The size up to which a notebook shows a picture in place."""

    def __fspath__(self) -> str:
        """Return the path, so that the object can be used wherever a path can."""
        return str(self.path)

    def __repr__(self) -> str:
        """Return a text that names the file."""
        return f"wrote {printable(self.path)}"

    def _link(self) -> str:
        """Return the address of the file: relative if it is below the working directory, which notebooks can open."""
        path = self.path.absolute()
        return quote(str(path.relative_to(Path.cwd()))) if path.is_relative_to(Path.cwd()) else path.as_uri()

    def _repr_html_(self) -> str:
        kind = _IMAGES.get(self.path.suffix.lower())
        if kind is None or not self.path.is_file() or self.path.stat().st_size > self.largest_bytes:
            return f'wrote <a href="{escape(self._link())}" target="_blank">{escape(self.path)}</a>'
        content = base64.b64encode(self.path.read_bytes()).decode("ascii")
        return f'<img alt="{escape(self.path)}" style="max-width:100%" src="data:{kind};base64,{content}">'
