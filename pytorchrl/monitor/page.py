"""Write an HTML page about one or more runs; the page needs no network and no other files.

Every text of a run is escaped by `display.escape`, and the script of the page sets texts only as text. The content
security policy of the page allows only this script.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from pytorchrl.analysis.aggregates import iqm
from pytorchrl.analysis.bootstrap import estimate
from pytorchrl.analysis.grouping import differing, short
from pytorchrl.analysis.plotting import FEWEST_FOR_BAND
from pytorchrl.errors import ConfigError
from pytorchrl.files.atomic import put_in_place
from pytorchrl.files.reading import Record, mapping, number, text
from pytorchrl.monitor.charts import COLORS
from pytorchrl.monitor.findings import dropped_share
from pytorchrl.monitor.run_section import folded_section, full_section, state_of, tiles, wrong
from pytorchrl.monitor.series import AXES, Chart, Group, charts_of, groups_of, to_data
from pytorchrl.monitor.style import policy, report_script, style
from pytorchrl.monitor.tables import Cell, card, clamped, entries, figures, share_of_drops, sorted_table, table, words
from pytorchrl.monitor.view import RunView
from pytorchrl.support.display import escape
from pytorchrl.support.units import clock, compact, score

_BUTTONS = ('<span class="tools"><button type="button" data-reset hidden>reset zoom</button>'
            '<button type="button" data-save="csv" title="download the numbers that the chart shows">CSV</button>'
            '<button type="button" data-save="png" title="download the picture">PNG</button></span>')
# Characters of the parts about single runs in a report about several, so that a page stays below 500 kB.
_MOST_DETAILS = 200_000
# A shorter table of runs needs no filter.
_FEWEST_FOR_FILTER = 8
_DASHES = ("", "8 4", "2 3", "10 3 2 3")


def write_report(
    views: Sequence[RunView], output: Path, groups: Mapping[str, Sequence[Path]] | None = None,
) -> None:
    """Write the HTML page about the given runs to a file; see `report`.

    Raises:
        ConfigError: The file cannot be written.
    """
    try:
        with put_in_place(output) as file:
            file.write(report(views, groups).encode("utf-8"))
    except OSError as error:
        raise ConfigError(f"{str(output)!r} cannot be written: {error}") from error


def report(views: Sequence[RunView], groups: Mapping[str, Sequence[Path]] | None = None, *, note: str = "") -> str:
    """Return the HTML page about the given runs.

    Args:
        views: The runs.
        groups: The directories of the runs of each group, by label; None: runs that differ only in their seeds are a
            group.
        note: HTML next to the title, such as a link back.
    """
    found = groups_of(views, groups)
    charts, statistics, constant = charts_of(found)
    of_many = len(views) > 1
    top = _overview(found) if of_many else _heading(views[0]) + wrong(views[0]) + tiles(views[0])
    below = _runs(found) if of_many else full_section(views[0])
    data = json.dumps(to_data(found, [*charts, *statistics]), separators=(",", ":")).replace("<", "\\u003c")
    # A block of data is not a script, so the content security policy does not concern it.
    block = f'<script id="data" type="application/json">{data}</script>'
    title = f"{len(views)} runs" if of_many else views[0].name
    envs = sorted({group.env for group in found} - {"env"})
    return document(f"{title} on {', '.join(envs)}" if of_many and envs else title,
                    top + _charts(found, charts, statistics, constant) + below + block, report_script(), note=note,
                    style_sheet=style(charts=True))


def document(title: str, body: str, script: str, *, style_sheet: str, note: str = "") -> str:
    """Return a complete HTML page.

    Args:
        title: The title, which is escaped here.
        body: HTML.
        script: The script; the content security policy of the page allows no other script.
        style_sheet: The style sheet.
        note: HTML next to the title.
    """
    return ("<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">"
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f'<meta http-equiv="Content-Security-Policy" content="{escape(policy(script))}">'
            f'<link rel="icon" href="data:,"><title>{escape(title)}</title><style>{style_sheet}</style></head><body>'
            f'<header><h1>{escape(title)}</h1><span>{note}<button id="theme" type="button">light / dark</button></span>'
            f"</header>{body}<script>{script}</script></body></html>\n")


def _heading(view: RunView) -> str:
    what = " on ".join(part for part in (view.algorithm, view.env) if part)
    seed = text(view.run, "seed")
    return f"<p>{escape(what)}{escape(f', seed {seed}') if seed else ''} · {state_of(view)}</p>"


def _overview(groups: Sequence[Group]) -> str:
    """Return what went wrong, the table of groups, and the table of runs."""
    members = [(group, member) for group in groups for member in group.members]
    bad = [(place, member) for place, (_, member) in enumerate(members) if member.view.findings or member.view.problems]
    items = "".join(
        f'<li><a href="#run-{place}">{escape(member.name)}</a>: '
        + escape("; ".join([*(finding.sentence for finding in member.view.findings), *member.view.problems])) + "</li>"
        for place, member in bad)
    red = (f'<div class="wrong"><b>{len(bad)} of {len(members)} runs look wrong</b><ul>{items}</ul></div>'
           if bad else "")
    of_groups = f"<h2>Groups</h2>{_group_table(groups)}" if len(groups) < len(members) else ""
    return f"{red}{of_groups}<h2>Runs</h2>{_run_table(groups)}"


def _group_table(groups: Sequence[Group]) -> str:
    rows = []
    for place, group in enumerate(groups):
        scores = [member.view.return_mean for member in group.members if member.view.return_mean is not None]
        low, high = min(scores, default=None), max(scores, default=None)
        found = estimate(iqm, np.array(scores)[:, None]) if scores else None
        interval = "" if found is None or len(scores) < FEWEST_FOR_BAND else (
            f"{score(float(found.low))} to {score(float(found.high))}")
        middle = None if found is None else float(found.value)
        bad = sum(bool(member.view.findings) for member in group.members)
        rows.append([
            Cell(clamped(group.label, _line_of(place)), None, "label"),
            figures(str(len(group.members)), len(group.members)), figures(score(middle), middle),
            Cell(escape(interval), float(found.low) if interval and found is not None else None, "n"),
            figures(score(low), low), figures(score(high), high),
            figures(_range([member.view.env_steps for member in group.members]),
                    max(member.view.env_steps for member in group.members)),
            Cell(f'<b class="bad">{bad}</b>' if bad else "", bad or None, "n")])
    return sorted_table((("group", False), ("runs", True), ("final return: IQM", True), ("95 % interval", True),
                         ("lowest", True), ("highest", True), ("env steps", True), ("look wrong", True)), rows) + (
        '<p class="dim">The final return of a run is its mean return of the last 100 training episodes. An interval is '
        f"given from {FEWEST_FOR_BAND} runs on; IQM is the interquartile mean.</p>")


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _run_table(groups: Sequence[Group]) -> str:
    """Return the table of runs, with the settings in which they differ."""
    members = [(place, member) for place, group in enumerate(groups) for member in group.members]
    # The names of settings, and whether all runs have a number there.
    settings = [(name, all(_is_number(member.run.settings.get(name)) for _, member in members))
                for name in differing([member.run for _, member in members])]
    header = (("run", False), ("state", False), ("environment", False), ("algorithm", False), ("seed", True),
              ("final return", True), ("evaluation", True), ("looks wrong", False), *settings, ("env steps", True),
              ("time", True), ("steps/s", True), ("lag", True), ("dropped", True))
    several = len({group.env for group in groups}) > 1
    algorithms = len({member.view.algorithm for _, member in members}) > 1
    rows = []
    for number_of, (place, member) in enumerate(members):
        view, lag = member.view, number(member.view.latest, "policy_lag", "mean")
        seconds = number(view.result, "seconds") or number(view.latest, "seconds") or 0.0
        rate = number(view.result, "env_steps_per_s") or number(view.latest, "env_steps_per_s")
        found = ", ".join(finding.word for finding in view.findings)
        rows.append([
            Cell(f'{_swatch(place)}<a href="#run-{number_of}">{escape(member.name)}</a>'), Cell(state_of(view)),
            words(member.run.task if several else ""), words(view.algorithm if algorithms else ""),
            figures(text(view.run, "seed"), number(view.run, "seed")),
            figures(score(view.return_mean), view.return_mean), figures(score(view.eval_return), view.eval_return),
            Cell(f'<b class="bad">{escape(found)}</b>' if found else ""),
            *(_setting(member.run.settings.get(name), is_number=is_number) for name, is_number in settings),
            figures(f"{view.env_steps:,}", view.env_steps), figures(clock(seconds), seconds),
            figures(compact(rate), rate), figures(score(lag), lag),
            share_of_drops(dropped_share(view.latest))])
    search = ('<div class="bar-tools"><input type="search" data-filter="#runs" placeholder="filter runs" '
              'aria-label="filter runs"></div>' if len(members) > _FEWEST_FOR_FILTER else "")
    return f'{search}<div id="runs">{sorted_table(header, rows)}</div>'


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _setting(value: object, *, is_number: bool) -> Cell:
    if is_number and isinstance(value, (int, float)):
        return figures(short(value), float(value))
    return words("" if value is None else short(value))


def _swatch(place: int) -> str:
    return f'<i class="swatch" style="background:var(--c{place % COLORS})"></i>'


def _line_of(place: int) -> str:
    dash = _DASHES[place // COLORS % len(_DASHES)]
    return (f'<svg width="22" height="8" aria-hidden="true"><line x1="0" x2="22" y1="4" y2="4" stroke-width="2" '
            f'style="stroke:var(--c{place % COLORS})" stroke-dasharray="{dash}"/></svg>')


def _charts(
    groups: Sequence[Group], charts: Sequence[Chart], statistics: Sequence[Chart], constant: Sequence[str],
) -> str:
    """Return the controls and the boxes of the charts; the script of the page draws into the boxes."""
    if not charts:
        return '<h2>Curves</h2><p class="none">no records yet</p>'
    keys = "".join(f'<button type="button" data-group="{place}" aria-pressed="true">{_line_of(place)}'
                   f"{escape(group.label)}{f' ({len(group.members)})' if len(group.members) > 1 else ''}</button>"
                   for place, group in enumerate(groups)) if len(groups) > 1 else ""
    axes = "".join(f'<option value="{axis}">{name}</option>' for axis, name in AXES.items())
    singles = ('<label><input type="checkbox" id="singles"> single runs</label>'
               if any(len(group.members) >= FEWEST_FOR_BAND for group in groups) else "")
    controls = (f'<div class="controls"><div class="bar-tools"><label>over <select id="axis">{axes}</select></label>'
                '<label>smoothing <input type="range" id="smoothing" min="0" max="0.3" step="0.01" value="0"></label>'
                f'{singles}<button type="button" data-reset hidden>reset zoom</button></div>'
                f'{f"""<div class="keys">{keys}</div>""" if keys else ""}</div>')
    boxes = [card(chart.title, f'<div data-chart="{place}"{" class=large" if chart.is_main else ""}></div>', _BUTTONS)
             for place, chart in enumerate([*charts, *statistics])]
    main = sum(chart.is_main for chart in charts)
    rest = f'<div class="grid2">{"".join(boxes[main:len(charts)])}</div>' if len(charts) > main else ""
    own = (f'<details><summary>statistics of the algorithm</summary><div class="grid2">{"".join(boxes[len(charts):])}'
           "</div></details>" if statistics else "")
    same = f'<p class="dim">constant: {escape(", ".join(constant))}</p>' if constant else ""
    return (f'<h2>Curves</h2>{controls}<noscript><p class="bad">The charts need JavaScript.</p></noscript>'
            f'{"".join(boxes[:main])}{rest}{same}{own}{_note(groups)}')


def _note(groups: Sequence[Group]) -> str:
    sizes = {len(group.members) for group in groups}
    parts = ["Drag over a chart to zoom, and double-click to see everything."]
    if max(sizes) > 1:
        parts.append("A line of several runs is their interquartile mean for returns, and their mean otherwise.")
    if max(sizes) >= FEWEST_FOR_BAND:
        parts.append(f"From {FEWEST_FOR_BAND} runs on, a band shows the 95 % confidence interval.")
    if any(1 < size < FEWEST_FOR_BAND for size in sizes):
        parts.append(f"With fewer than {FEWEST_FOR_BAND} runs, thin lines show the runs.")
    return f'<p class="dim">{" ".join(parts)}</p>'


def _runs(groups: Sequence[Group]) -> str:
    """Return a folded part about each run, and the settings and versions that all runs share.

    If there are very many runs, only those that look wrong and the first others have such a part.
    """
    members = [(group, member) for group in groups for member in group.members]
    described = [mapping(member.view.run, "scheme") | mapping(member.view.run, "versions") for _, member in members]
    shared = {name: value for name, value in described[0].items()
              if all(name in one and one[name] == value for one in described)}
    left, parts = _MOST_DETAILS, {}
    for place in sorted(range(len(members)), key=lambda place: (not members[place][1].view.findings, place)):
        group, member = members[place]
        part = folded_section(member.view, member.name, place, group.label, _without(described[place], shared))
        left -= len(part)
        if left < 0:
            part = (f'<p id="run-{place}" class="dim"><b>{escape(member.name)}</b> {state_of(member.view)}, details by '
                    f"<code>pytorchrl report {escape(member.view.run_dir)}</code></p>")
        parts[place] = part
    same = (f"<details><summary>settings of the scheme and versions that all runs share</summary>"
            f"{table((), entries(shared))}</details>" if shared else "")
    return f"<h2>Details of each run</h2>{''.join(parts[place] for place in range(len(members)))}{same}"


def _without(values: Record, shared: Record) -> Record:
    return {name: value for name, value in values.items() if name not in shared}
