"""Record `pytorchrl watch` during a run, and draw its screens beside the learning curve as an animated SVG.

    python docs/_ext/recording.py docs/_static/recording.svg

The script trains PPO on CartPole-v1 with three collection processes, one of which is killed on the way. Meanwhile,
`watch` runs in a pseudo-terminal. Each screen that it draws becomes a frame of the picture; the points of the curve are
the env steps and the return on that screen. The extra `cli` is needed.

The picture is animated by CSS alone. It begins with its last frame, which is also what a reader sees whose system asks
for reduced motion, or whose viewer does not animate.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate, groupby, pairwise
from pathlib import Path

from rich.ansi import AnsiDecoder
from rich.color import Color
from rich.style import Style
from rich.text import Text

COLUMNS, LINES = 100, 25
TRAIN = ("train", "ppo", "CartPole-v1", "--num-col-workers", "3", "--col-communication", "async", "--runtime",
         "processes", "--seed", "1", "--log-every-s", "0.15", "--no-progress")
INTERVAL_S = 0.3
MOST_FRAMES = 48
# Seconds of the animation: for each frame, and for the last one, with which it begins.
FRAME_S, STILL_S = 0.4, 3.0

# Sizes in pixels: a cell of the terminal, the window, and the chart inside the window.
CELL, LINE, FONT = 7.2, 16, 12
PAD, BAR = 18, 34
CHART = 310
WIDTH = round(COLUMNS * CELL + CHART + 3 * PAD)
HEIGHT = BAR + LINES * LINE + PAD
LEFT, RIGHT = round(COLUMNS * CELL) + 2 * PAD + 34, WIDTH - PAD - 8
TOP, BOTTOM = BAR + 40, HEIGHT - 52

# Colors of the terminal by their number in ANSI; the last one is that of text without a color.
PALETTE = ("#3b4552", "#ff7b72", "#56d364", "#e3b341", "#6cb6ff", "#d2a8ff", "#39c5cf", "#dbe2ea",
           "#7d8a99", "#ff7b72", "#56d364", "#e3b341", "#6cb6ff", "#d2a8ff", "#76e3ea", "#ffffff")
TEXT, DIM, GROUND, EDGE, CURVE = "#dbe2ea", "#8d99a6", "#0f141a", "#2b3440", "#56d364"
# Glyphs that are drawn as rectangles, because fonts leave gaps between them: top and height of the rectangle in a line,
# and its opacity.
BLOCKS = {"█": (2, LINE - 4, 1.0), "░": (2, LINE - 4, 0.25), "━": (LINE / 2 - 1.5, 3, 1.0)}


@dataclass(frozen=True)
class Screen:
    """One screen of the terminal."""

    lines: tuple[Text, ...]
    env_steps: int
    return_mean: float | None


def record(run_dir: Path, target_steps: int) -> str:
    """Train, and return everything that `watch` writes to its terminal meanwhile."""
    environment = {name: value for name, value in os.environ.items()
                   if name not in ("NO_COLOR", "COLUMNS", "LINES")} | {"TERM": "xterm-256color"}
    command = [sys.executable, "-m", "pytorchrl"]
    training = subprocess.Popen([*command, *TRAIN, "--target-steps", str(target_steps), "--faults",
                                 f"kill col.3 @ step {target_steps // 70}", "--log-dir", str(run_dir)],
                                stdout=subprocess.DEVNULL)
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    watcher = subprocess.Popen([*command, "watch", "--wait", "--interval", str(INTERVAL_S), str(run_dir)],
                               stdin=slave, stdout=slave, stderr=slave, env=environment)
    os.close(slave)
    found = b""
    try:
        while part := os.read(master, 65536):
            found += part
    except OSError:  # the terminal was closed, because `watch` has ended
        pass
    if training.wait() or watcher.wait():
        raise SystemExit(f"training ended with {training.returncode}, watch with {watcher.returncode}")
    return found.decode()


def screens(output: str) -> list[Screen]:
    """Return the screens that show env steps, without repetitions, from what a full-screen program has written."""
    found: list[Screen] = []
    drawn = output.replace("\r", "").partition("\x1b[?1049h")[2].partition("\x1b[?1049l")[0]
    for part in drawn.split("\x1b[H"):
        lines = [AnsiDecoder().decode_line(line) for line in part.split("\n")]
        progress = re.search(r"([\d,]+)/[\d,]+ steps .* return (\S+)", "\n".join(line.plain for line in lines))
        if progress and (not found or list(found[-1].lines) != lines):
            returns = None if progress[2] == "-" else float(progress[2])
            found.append(Screen(tuple(lines), int(progress[1].replace(",", "")), returns))
    return found


def thinned(found: Sequence[Screen]) -> list[Screen]:
    """Return at most `MOST_FRAMES` screens, evenly spaced, with the first and the last one."""
    most = min(MOST_FRAMES, len(found))
    return [found[round(place * (len(found) - 1) / max(1, most - 1))] for place in range(most)]


def runs_of(line: Text) -> Iterator[tuple[int, str, Style]]:
    """Yield the parts of a line: column, text, style.

    A part has one style. It ends at two spaces and around blocks, so that a font of another width shifts no column.
    """
    styles = [Style()] * len(line.plain)
    for span in line.spans:
        if isinstance(span.style, Style):
            for place in range(span.start, min(span.end, len(styles))):
                styles[place] += span.style
    ends = {place for found in re.finditer("  +|█+|░+|━+", line.plain) for place in found.span()}
    keys = list(zip(accumulate(place in ends for place in range(len(styles))), styles, strict=True))
    for _, group in groupby(range(len(styles)), keys.__getitem__):
        places = list(group)
        text = line.plain[places[0]:places[-1] + 1]
        if text.strip():
            yield places[0] + len(text) - len(text.lstrip()), text.strip(), styles[places[0]]


def color_of(style: Style) -> str:
    color: Color | None = style.color
    if color is None or color.number is None:
        return DIM if style.dim else TEXT
    return PALETTE[color.number % len(PALETTE)]


def drawn_line(line: Text) -> str:
    """Return the elements of a line whose upper left corner is at (0, 0)."""
    parts = []
    for column, text, style in runs_of(line):
        x, color = f"{column * CELL:.4g}", color_of(style)
        if text[0] in BLOCKS:
            top, height, opacity = BLOCKS[text[0]]
            faint = "" if opacity == 1 and not style.dim else f' opacity="{opacity if opacity < 1 else 0.35}"'
            parts.append(f'<rect x="{x}" y="{top:g}" width="{len(text) * CELL:.4g}" height="{height:g}" '
                         f'fill="{color}"{faint}/>')
        else:
            look = (f' fill="{color}"' if color != TEXT else "") + (' font-weight="600"' if style.bold else "")
            parts.append(f'<text x="{x}" y="12" textLength="{len(text) * CELL:.4g}"{look}>{escape(text)}</text>')
    return "".join(parts)


def film(frames: Sequence[Screen]) -> str:
    """Return all frames side by side; a line that occurs several times is defined once."""
    counts: dict[str, int] = {}
    for frame in frames:
        for line in frame.lines:
            text = drawn_line(line)
            counts[text] = counts.get(text, 0) + 1
    names = {text: f"l{number}" for number, text in enumerate(text for text, count in counts.items() if count > 1)}
    defined = "".join(f'<g id="{name}">{text}</g>' for text, name in names.items() if text)
    width = round(COLUMNS * CELL)
    strip = ""
    for number, frame in enumerate(frames):
        for row, line in enumerate(frame.lines[:LINES]):
            text, place = drawn_line(line), f"{number * width} {row * LINE}"
            x, y = place.split()
            if text in names and text:
                strip += f'<use href="#{names[text]}" x="{x}" y="{y}"/>'
            elif text:
                strip += f'<g transform="translate({place})">{text}</g>'
    return (f"<defs>{defined}</defs>"
            f'<svg x="{PAD}" y="{BAR}" width="{width}" height="{LINES * LINE}" overflow="hidden">'
            f'<g class="film">{strip}</g></svg>')


def keyframes(name: str, declarations: Sequence[str], timing: str) -> str:
    """Return CSS that shows the last of the declarations for `STILL_S`, and then each of them for `FRAME_S`."""
    whole = STILL_S + FRAME_S * len(declarations)
    starts = [(STILL_S + FRAME_S * number) / whole for number in range(len(declarations))]
    # The end of the still, just before the first frame, so that nothing moves backwards.
    held = f"0%,{100 * starts[0] - 0.01:.2f}%{{{declarations[-1]}}}"
    steps = "".join(f"{100 * start:.2f}%{{{one}}}" for start, one in zip(starts, declarations, strict=True))
    return (f"@keyframes {name}{{{held}{steps}100%{{{declarations[-1]}}}}}"
            f".{name}{{{declarations[-1]};animation:{name} {whole:g}s {timing} infinite}}")


def chart(frames: Sequence[Screen], target_steps: int, events: Sequence[tuple[int, str]]) -> tuple[str, str]:
    """Return the elements of the chart, and the CSS that draws its curve along with the frames."""
    scored = [frame for frame in frames if frame.return_mean is not None]
    highest = max(frame.return_mean or 0 for frame in scored)
    top = next(size for size in (50, 100, 200, 500, 1000) if highest <= size)

    def place(steps: float, returns: float) -> tuple[float, float]:
        return (LEFT + (RIGHT - LEFT) * min(1, steps / target_steps), BOTTOM - (BOTTOM - TOP) * returns / top)

    points = [place(frame.env_steps, frame.return_mean or 0) for frame in scored]
    lengths = [0.0]
    for (x, y), (x2, y2) in pairwise(points):
        lengths.append(lengths[-1] + ((x2 - x) ** 2 + (y2 - y) ** 2) ** 0.5)
    first = len(frames) - len(scored)
    drawn = [0.0] * first + [length / (lengths[-1] or 1) for length in lengths]
    at = [points[0]] * first + points
    parts = [f'<text x="{LEFT - 34}" y="{BAR + 13}" class="s">mean return of the last 100 episodes</text>']
    for number in range(6):
        _, y = place(0, top * number / 5)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{RIGHT}" stroke="{EDGE}"/>'
                     f'<text x="{LEFT - 8}" y="{y + 4:.1f}" class="s" text-anchor="end">{top * number // 5}</text>')
    for number in range(4):
        x, _ = place(target_steps * number / 3, 0)
        label = f"{target_steps * number / 3 / 1000:.3g}k" if number else "0"
        parts.append(f'<text x="{x:.1f}" y="{BOTTOM + 18}" class="s" text-anchor="middle">{label}</text>')
    parts.append(f'<text x="{(LEFT + RIGHT) / 2:g}" y="{BOTTOM + 38}" class="s" text-anchor="middle">env steps</text>')
    style = ""
    for steps, text in events[:1]:
        x, _ = place(steps, 0)
        since = ["opacity:1" if frame.env_steps >= steps else "opacity:0" for frame in frames]
        style += keyframes("event", since, "step-end")
        parts.append(f'<g class="event"><path d="M{x:.1f} {TOP}V{BOTTOM}" stroke="{PALETTE[3]}" '
                     f'stroke-dasharray="4 4"/><text x="{x + 7:.1f}" y="{BOTTOM - 10}" class="s" '
                     f'style="fill:{PALETTE[3]}">{escape(text)}</text></g>')
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    parts.append(f'<path d="{path}" pathLength="1" stroke-dasharray="1 1" class="curve" fill="none" '
                 f'stroke="{CURVE}" stroke-width="2.2" stroke-linejoin="round"/>'
                 f'<circle r="4" fill="{CURVE}" class="dot"/>')
    style += keyframes("curve", [f"stroke-dashoffset:{1 - length:.4f}" for length in drawn], "linear")
    style += keyframes("dot", [f"transform:translate({x:.1f}px,{y:.1f}px)" for x, y in at], "linear")
    return "".join(parts), style


def picture(frames: Sequence[Screen], target_steps: int, events: Sequence[tuple[int, str]]) -> str:
    """Return the SVG of a recording."""
    width = round(COLUMNS * CELL)
    curve, style = chart(frames, target_steps, events)
    style += keyframes("film", [f"transform:translateX({-width * number}px)" for number in range(len(frames))],
                       "step-end")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img" fill="{TEXT}" font-size="{FONT}" font-family="ui-monospace,SFMono-Regular,Menlo,Consolas,'
        f"DejaVu Sans Mono,monospace\"><title>pytorchrl watch during a run, beside the learning curve</title><style>"
        f"text{{white-space:pre}}.s{{fill:{DIM};font:12px system-ui,sans-serif}}{style}"
        "@media (prefers-reduced-motion:reduce){*{animation:none!important}}</style>"
        f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="9" fill="{GROUND}" stroke="{EDGE}"/>'
        f'<text x="{PAD}" y="22"><tspan fill="{DIM}">$</tspan> pytorchrl watch runs/cartpole</text>'
        f'<path d="M{width + 2 * PAD - 8} 14V{HEIGHT - 14}" stroke="{EDGE}"/>'
        f"{film(frames)}{curve}</svg>\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path, help="path of the SVG file")
    parser.add_argument("--steps", type=int, default=120_000, help="env steps of the run [120000]")
    options = parser.parse_args()
    from pytorchrl.monitor.view import read_run

    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "cartpole"
        found = thinned(screens(record(run_dir, options.steps)))
        events = [(event.env_steps, event.text) for event in read_run(run_dir).events]
    options.picture.write_text(picture(found, options.steps, events), encoding="utf-8")
    print(f"{options.picture}: {len(found)} frames, {options.picture.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
