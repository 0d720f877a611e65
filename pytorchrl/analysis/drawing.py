"""Lay out a picture of matplotlib: title, axes, and a key of the groups below them, which never takes their space."""

from __future__ import annotations

import dataclasses
import functools
import math
import string
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pytorchrl.errors import ConfigError
from pytorchrl.files.atomic import put_in_place
from pytorchrl.support.code import import_extra
from pytorchrl.support.terminal import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Dashes = Literal["-"] | tuple[int, tuple[float, ...]]
Style = tuple[str, Dashes]
"""The color and the dashes of a line."""
FORMATS = {"": "png", ".png": "png", ".pdf": "pdf", ".svg": "svg"}
"""The format of a file, by the ending of its name."""
# Colors that people with any of the common kinds of color blindness can tell apart on white (Okabe and Ito, 2008),
# without their yellow, and dashes for each further group of the same color.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DASHES: tuple[Dashes, ...] = (
    "-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)), (0, (10, 2)), (0, (3, 1.2, 1, 1.2, 1, 1.2)))
# Lengths in inches.
_MARGIN, _HANDLE, _MARK, _GAP = 0.12, 0.42, 0.22, 0.3
# Sizes of text in points, and the distance of two lines as a multiple of the size.
_TITLE, _LABEL, _TICKS, _KEY, _NOTE, _SPACING = 11.0, 10.0, 9.0, 8.0, 7.0, 1.45
_POINTS, _DPI, _LINE = 72.0, 200, 1.6  # points per inch, pixels per inch of a PNG file, points of a line's width
_APART = 1.15  # distance of two letters at the ends of lines, as a multiple of their size
_HINTING = 1.04  # letters are moved to whole pixels, which makes texts wider than their outlines


def style_of(place: int) -> Style:
    """Return the color and the dashes of a line, by the position of its group; 42 groups have different styles."""
    return _COLORS[place % len(_COLORS)], _DASHES[place // len(_COLORS) % len(_DASHES)]


def letters(count: int) -> list[str]:
    """Return `count` different names: A to Z, then AA, AB and so on."""
    found = list(string.ascii_uppercase)
    while len(found) < count:
        found += [first + second for first in found[-26:] for second in string.ascii_uppercase]
    return found[:count]


def check_ending(output: Path) -> None:
    """Raise `ConfigError` if the ending of a picture's name is not that of a format."""
    if output.suffix.lower() not in FORMATS:
        raise ConfigError(f"a picture is a file that ends in {', '.join(filter(None, FORMATS))}; got {str(output)!r}")


@dataclasses.dataclass(frozen=True)
class KeyEntry:
    """An entry of the key: the style of its line, a letter or "", and the label of its group."""

    style: Style
    mark: str
    text: str


@dataclasses.dataclass(frozen=True)
class End:
    """The end of a line in the units of its axes, and the letter that is written there."""

    x: float
    y: float
    mark: str
    color: str


class Canvas:
    """A picture of given width, whose height is the given height and that of the key below the axes.

    Args:
        output: Path of the file; the ending of its name is the format.
        size: Width and height in inches, without the key.
        title: Text above the axes, which is wrapped; "": none.

    Raises:
        ConfigError: The ending of `output` is unknown, or matplotlib is missing.
    """

    def __init__(self, output: Path, size: tuple[float, float], title: str) -> None:
        check_ending(output)
        for module in ("matplotlib.figure", "matplotlib.backends.backend_agg"):
            import_extra(module, "plots", "a plot")
        # This avoids pyplot, which would choose a display backend and keep references to all figures.
        from matplotlib.figure import Figure
        self._output, self._size = output, size
        self._key: Sequence[KeyEntry] = ()
        self._note = ""
        self._ends: tuple[Axes, Sequence[End]] | None = None
        self._figure: Figure = Figure(figsize=size, layout="constrained")
        if title:
            self._figure.suptitle("\n".join(wrapped(title, size[0] - 2 * _MARGIN, _TITLE)), fontsize=_TITLE)

    def axes(self, columns: int = 0, heights: tuple[float, float] = (0.0, 1.0)) -> list[Axes]:
        """Add axes, and return them from left to right and top to bottom.

        Args:
            columns: Number of axes in a row above the axes that take the whole width. They share their vertical axis.
            heights: Relative heights of the row and of the wide axes.
        """
        grid = self._figure.add_gridspec(2 if columns else 1, columns or 1, height_ratios=heights[not columns:])
        found: list[Axes] = []
        for column in range(columns):
            found.append(self._figure.add_subplot(grid[0, column], sharey=found[0] if found else None))
            found[-1].tick_params(left=column == 0, labelleft=column == 0)
        found.append(self._figure.add_subplot(grid[-1, :]))
        for axes in found:
            axes.spines[["top", "right"]].set_visible(False)
            axes.tick_params(labelsize=_TICKS)
        return found

    def widest(self, texts: Iterable[str]) -> float:
        """Return the width of the widest text in the key as a fraction of the picture's width."""
        return max(width_of(text, _KEY) for text in texts) / self._size[0]

    def fitted(self, text: str, *, is_upright: bool = False) -> str:
        """Return the label of a horizontal or an upright axis, in lines that are not longer than the axis."""
        return "\n".join(wrapped(text, 0.7 * self._size[is_upright], _LABEL))

    def add_key(self, entries: Sequence[KeyEntry]) -> None:
        """Name the groups below the axes, in as many columns as fit."""
        self._key = entries

    def add_note(self, text: str) -> None:
        """Add a line in small letters below the key; "": none."""
        self._note = text

    def mark_ends(self, axes: Axes, ends: Sequence[End]) -> None:
        """Write a letter at the end of each line, with a distance between letters at similar heights."""
        self._ends = axes, ends

    def save(self) -> None:
        """Write the file.

        Raises:
            ConfigError: The file cannot be written.
        """
        from matplotlib import rc_context
        self.lay_out()
        form = FORMATS[self._output.suffix.lower()]
        dates = {"png": None, "pdf": {"CreationDate": None}, "svg": {"Date": None}}
        try:
            # Type 42 embeds fonts that journals accept. With the salt, an SVG file depends only on what it shows.
            with rc_context({"pdf.fonttype": 42, "svg.hashsalt": "pytorchrl"}), put_in_place(self._output) as file:
                self._figure.savefig(file, format=form, dpi=_DPI, metadata=dates[form])
        except OSError as error:
            raise ConfigError(f"{str(self._output)!r} cannot be written: {error}") from error

    def lay_out(self) -> Figure:
        """Make room for the key, place the key and all letters, and return the figure."""
        from matplotlib.layout_engine import ConstrainedLayoutEngine
        rows = self._rows()
        line = _SPACING / _POINTS
        heights = [_KEY * line * max(len(lines) for _, lines in row) for row in rows]
        note = wrapped(self._note, self._size[0] - 2 * _MARGIN, _NOTE)
        below = sum(heights) + _NOTE * line * len(note) + (1.5 * _MARGIN if rows or note else 0.0)
        width, height = self._size
        self._figure.set_size_inches(width, height + below)
        self._figure.set_layout_engine(ConstrainedLayoutEngine(
            rect=(0, below / (height + below), 1, height / (height + below))))
        top = below - _MARGIN / 2
        for row, used in zip(rows, heights, strict=True):
            for column, (entry, lines) in enumerate(row):
                self._draw_entry(_MARGIN + column * self._column, top, entry, lines)
            top -= used
        self._draw_text(_MARGIN, top, note, _NOTE, "0.35")
        if self._ends is not None:
            self._draw_ends(*self._ends)
        return self._figure

    def _rows(self) -> list[list[tuple[KeyEntry, list[str]]]]:
        """Return the entries of the key in rows, each with its text in lines."""
        if not self._key:
            return []
        available = self._size[0] - 2 * _MARGIN - self._indent
        fit = max(1, int((self._size[0] - _MARGIN) / self._column))
        columns = math.ceil(len(self._key) / math.ceil(len(self._key) / fit))  # rows of similar lengths
        found = [(entry, wrapped(entry.text, available, _KEY)) for entry in self._key]
        return [found[start:start + columns] for start in range(0, len(found), columns)]

    @property
    def _indent(self) -> float:
        """Distance between the left ends of an entry and of its text, in inches."""
        return _HANDLE + (_MARK if any(entry.mark for entry in self._key) else 0.0)

    @property
    def _column(self) -> float:
        """Width of a column of the key, in inches."""
        return self._indent + max(width_of(entry.text, _KEY) for entry in self._key) + _GAP

    def _draw_entry(self, left: float, top: float, entry: KeyEntry, lines: Sequence[str]) -> None:
        """Draw an entry of the key at a position that is given in inches from the lower left corner."""
        from matplotlib.lines import Line2D
        middle, inches = top - _KEY * _SPACING / _POINTS / 2, self._figure.dpi_scale_trans
        self._figure.add_artist(Line2D(
            [left, left + _HANDLE - 0.08], [middle, middle], color=entry.style[0], linestyle=entry.style[1],
            linewidth=_LINE, transform=inches, in_layout=False))
        if entry.mark:
            self._draw_text(left + _HANDLE, top, [entry.mark], _KEY, entry.style[0])
        self._draw_text(left + self._indent, top, lines, _KEY, "black")

    def _draw_text(self, left: float, top: float, lines: Sequence[str], points: float, color: str) -> None:
        for number, text in enumerate(lines):
            self._figure.text(left, top - (number + 0.5) * points * _SPACING / _POINTS, text, fontsize=points,
                              color=color, va="center_baseline", in_layout=False,
                              transform=self._figure.dpi_scale_trans)

    def _draw_ends(self, axes: Axes, ends: Sequence[End]) -> None:
        texts = [axes.annotate(end.mark, (end.x, end.y), (4, 0), textcoords="offset points", va="center_baseline",
                               fontsize=_KEY, color=end.color, annotation_clip=False, weight="bold") for end in ends]
        self._figure.draw_without_rendering()  # only now, the place of the axes is known
        pixels = self._figure.dpi / _POINTS
        found = axes.transData.transform([(end.x, end.y) for end in ends])[:, 1]
        low, high = axes.bbox.y0, axes.bbox.y1
        step = min(_APART * _KEY * pixels, (high - low) / len(ends))
        order = sorted(range(len(ends)), key=lambda place: found[place])
        for number, y in zip(order, spread([found[place] for place in order], step, low, high), strict=True):
            texts[number].set_position((4, (y - found[number]) / pixels))
            texts[number].set_fontsize(step / pixels / _APART)


@functools.lru_cache(maxsize=4096)
def width_of(text: str, points: float) -> float:
    """Return the width of a line of text in inches."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path
    width, _, _ = text_to_path.get_text_width_height_descent(printable(text), FontProperties(size=points), False)
    return float(width) * _HINTING / _POINTS


def wrapped(text: str, width: float, points: float) -> list[str]:
    """Return a text in lines that are at most `width` inches wide; [] if it is empty."""
    text = printable(text)
    most, lines = len(text), [text] if text else []
    while most > 1 and (widest := max(width_of(line, points) for line in lines)) > width:
        most = min(most - 1, int(max(map(len, lines)) * width / widest) + 1)
        lines = textwrap.wrap(text, most)
    return list(map(plain, lines))


def plain(text: str) -> str:
    """Return text as one line of visible characters in which matplotlib finds no formulas."""
    return printable(text).replace("$", r"\$")


def spread(places: Sequence[float], step: float, low: float, high: float) -> list[float]:
    """Move places apart until neighbors have a distance of at least `step`; the sum of squared moves is the smallest.

    Args:
        places: The places in increasing order.
        step: The distance.
        low: Smallest place.
        high: Largest place; it must be at least `low + step * (len(places) - 1)`.

    Returns:
        The new places, in the same order.
    """
    blocks: list[tuple[float, int]] = []  # mean and number of neighboring places, each minus its number times the step
    for number, place in enumerate(places):
        mean, count = place - number * step, 1
        while blocks and blocks[-1][0] > mean:
            before, others = blocks.pop()
            mean, count = (mean * count + before * others) / (count + others), count + others
        blocks.append((mean, count))
    most = high - step * (len(places) - 1)
    starts = [min(max(mean, low), most) for mean, count in blocks for _ in range(count)]
    return [start + number * step for number, start in enumerate(starts)]
