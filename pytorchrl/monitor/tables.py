"""Write the tables of the monitor's pages; a sorted table is sorted by a click on a column's name (see `tables.js`)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pytorchrl.files.reading import Record
from pytorchrl.support.display import escape
from pytorchrl.support.units import percent

RED_SHARE = 0.5
"""The share of dropped env steps above which it is red."""


class Cell(NamedTuple):
    """A cell of a sorted table.

    Attributes:
        html: The content, in which all texts are escaped.
        value: The number by which rows are sorted; None: the text of the cell is used, or the number is missing.
        kind: Class of the cell in the style sheet: "n" a number, "label" a long text.
    """

    html: str
    value: float | None = None
    kind: str = ""


def words(text: object) -> Cell:
    """Return a cell that shows a text."""
    return Cell(escape(text))


def figures(text: str, value: float | None) -> Cell:
    """Return a cell that shows a number; None: "-"."""
    return Cell("-" if value is None else escape(text), value, "n")


def clamped(text: str, before: str = "") -> str:
    """Return HTML that shows at most two lines of a text, and all of it at the pointer; `before` is HTML before it."""
    return f'<div class="clamp" title="{escape(text)}">{before}{escape(text)}</div>' if text else ""


def share_of_drops(share: float) -> Cell:
    """Return a cell with the share of dropped env steps, which is red if it is more than half; empty if it is 0."""
    return Cell(f'<span{" class=bad" * (share > RED_SHARE)}>{percent(share)}</span>' if share else "", share, "n")


def sorted_table(header: Sequence[tuple[str, bool]], rows: Iterable[Sequence[Cell]]) -> str:
    """Return a table that can be sorted; a column that is empty in all rows is left out, unless it is the first.

    Args:
        header: Name of each column, and whether it has numbers; a column without a name cannot be sorted.
        rows: The cells of each row.
    """
    found = list(rows)
    kept = [place for place in range(len(header))
            if not place or any(row[place].html not in ("", "-") for row in found)]
    head = "".join(f"<th{' class=n data-n=1' if is_number else ''}>"
                   + (f'<button type="button">{escape(name)}</button>' if name else "") + "</th>"
                   for name, is_number in (header[place] for place in kept))
    body = "".join("<tr>" + "".join(_cell(row[place]) for place in kept) + "</tr>" for row in found)
    return ('<div class="scroll wide"><table class="sorted">'
            f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>")


def _cell(cell: Cell) -> str:
    kind = f' class="{cell.kind}"' if cell.kind else ""
    number = "" if cell.value is None else f"{cell.value:.10g}"
    return f'<td{kind}{f""" data-v="{number}" """.rstrip() if cell.kind == "n" else ""}>{cell.html}</td>'


def table(header: Sequence[str], rows: Iterable[Sequence[str]], numbers: frozenset[int] = frozenset()) -> str:
    """Return a table, in which all texts are escaped.

    Args:
        header: The column names; empty for a table without a header.
        rows: The texts of each row.
        numbers: Indices of the columns that are aligned to the right.
    """
    def line(tag: str, cells: Sequence[str]) -> str:
        return "<tr>" + "".join(f'<{tag}{" class=n" if place in numbers else ""}>{escape(cell)}</{tag}>'
                                for place, cell in enumerate(cells)) + "</tr>"
    head = f"<thead>{line('th', header)}</thead>" if header else ""
    return f'<div class="scroll"><table>{head}<tbody>{"".join(line("td", row) for row in rows)}</tbody></table></div>'


def entries(values: Record) -> list[tuple[str, str]]:
    """Return the rows of a table of settings; nested values are shown as JSON."""
    return [(name, value if isinstance(value, str) else json.dumps(value)) for name, value in values.items()]


def card(title: str, body: str, tools: str = "") -> str:
    """Return a box with a title; `tools` are buttons next to the title."""
    return f'<section class="card"><div class="head"><h3>{escape(title)}</h3>{tools}</div>{body}</section>'
