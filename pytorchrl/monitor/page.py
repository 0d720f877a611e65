"""Write an HTML page about one or more runs; the page needs no network and no other files.

Every text of a run is escaped by `display.escape`. The content security policy of the page allows only the script of
the page.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from pytorchrl.errors import ConfigError
from pytorchrl.files.atomic import put_in_place
from pytorchrl.files.reading import Record, mapping, number, text
from pytorchrl.monitor.charts import COLORS, bars, curves, histogram, stacked
from pytorchrl.monitor.style import STYLE, TOGGLE, policy
from pytorchrl.monitor.view import Lag, RunView
from pytorchrl.support.display import escape
from pytorchrl.support.units import clock, compact, percent

_MEDIA = {".mp4": "video/mp4", ".webm": "video/webm", ".gif": "image/gif"}
_MOST_MEDIA, _MOST_MEDIA_BYTES = 4, 16 << 20
_MOST_WORKERS, _MOST_EVENTS = 200, 200
# The curves that follow the curve of the training return: (title, keys that lead to the value in a record).
_CURVES = (
    ("evaluation: mean return", ("evaluation", "return_mean")), ("env steps per second", ("env_steps_per_s",)),
    ("policy lag since the start: mean", ("policy_lag", "mean")), ("queued train batches", ("scheme", "queue", "mean")))


def write_report(views: Sequence[RunView], output: Path) -> None:
    """Write the HTML page about the given runs to a file.

    Raises:
        ConfigError: The file cannot be written.
    """
    try:
        with put_in_place(output) as file:
            file.write(report(views).encode("utf-8"))
    except OSError as error:
        raise ConfigError(f"{str(output)!r} cannot be written: {error}") from error


def report(views: Sequence[RunView]) -> str:
    """Return the HTML page about the given runs."""
    names = _labels(views)
    title = names[0] if len(names) == 1 else f"{len(names)} runs"
    sections = [_curves(views, names), *(_run(view, name) for view, name in zip(views, names, strict=True))]
    return document(title, "".join(sections), TOGGLE)


def document(title: str, body: str, script: str, note: str = "") -> str:
    """Return a complete HTML page.

    Args:
        title: The title, which is escaped here.
        body: HTML.
        script: The script; the content security policy of the page allows no other script.
        note: HTML next to the title.
    """
    return ("<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">"
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f'<meta http-equiv="Content-Security-Policy" content="{escape(policy(script))}">'
            f'<link rel="icon" href="data:,"><title>{escape(title)}</title><style>{STYLE}</style></head><body>'
            f'<header><h1>{escape(title)}</h1><span>{note}<button id="theme" type="button">light / dark</button></span>'
            f"</header>{body}<script>{script}</script></body></html>\n")


def table(header: Sequence[str], rows: Iterable[Sequence[str]], numbers: frozenset[int] = frozenset()) -> str:
    """Return an HTML table, in which all texts are escaped.

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


def _labels(views: Sequence[RunView]) -> list[str]:
    names = [view.name for view in views]
    return names if len(set(names)) == len(names) else [str(view.run_dir) for view in views]


def _card(title: str, body: str) -> str:
    return f'<section class="card"><h3>{escape(title)}</h3>{body}</section>'


def _curves(views: Sequence[RunView], names: Sequence[str]) -> str:
    keys = "".join(f'<span class="key"><i style="background:var(--c{place % COLORS})"></i>{escape(name)}</span>'
                   for place, name in enumerate(names))
    wanted = [("training: mean return of the last 100 episodes", ("return_mean",)), *_CURVES]
    found = [(title, [(name, view.curve(*path)) for view, name in zip(views, names, strict=True)])
             for title, path in wanted]
    drawn = [_card(title, curves(lines, title)) for title, lines in found if any(points for _, points in lines)]
    own = [_card(f"algorithm: {name}", curves(
        [(label, view.curve("algorithm", name)) for view, label in zip(views, names, strict=True)], name))
        for name in sorted({name for view in views for name in mapping(view.latest, "algorithm")})]
    more = f'<details><summary>statistics of the algorithm</summary><div class="grid2">{"".join(own)}</div></details>'
    return (f'<h2>Curves over env steps</h2><div class="keys">{keys}</div><div class="grid2">'
            f"{''.join(drawn) or '<p class=none>no records yet</p>'}</div>{more if own else ''}")


def _run(view: RunView, name: str) -> str:
    what = " on ".join(part for part in (view.algorithm, view.env) if part)
    bottleneck = f"<p><b>Bottleneck:</b> {escape(view.bottleneck)}</p>" if view.bottleneck else ""
    cards = [
        _card("figures", table((), _figures(view))),
        _card("time of each level, at the end" if view.state == "ended" else "time of each level, now",
              stacked(view.shares) + bottleneck),
        _card("policy lag, in updates", histogram(view.lag_histogram) + _lags(view)),
        _card("ledger, in env steps", _ledger(view)),
        _card("who waits for whom", table((), [
            (wait.who, percent(wait.share), wait.whom) for wait in view.waits]) if view.waits else
            '<p class="none">nobody</p>'),
        _card("faults and restarts", _events(view)),
    ]
    problems = "".join(f'<p class="silent">{escape(problem)}</p>' for problem in view.problems)
    return (f"<h2>{escape(name)}</h2><p>{escape(what)} <b class=\"{view.state}\">{view.state}</b></p>{problems}"
            f'<section class="card"><h3>tree</h3>{_flow(view)}{_workers(view)}</section><br>'
            f'<div class="grid2">{"".join(cards)}</div>{_media(view)}{_settings(view)}')


def _figures(view: RunView) -> list[tuple[str, str]]:
    seconds = number(view.result, "seconds") or number(view.latest, "seconds") or 0.0
    rows = [("env steps", f"{view.env_steps:,} of {view.target_steps:,}"), ("training time", clock(seconds)),
            ("env steps per second, latest", compact(view.rates.get("collected_steps"))),
            ("mean return", "-" if view.return_mean is None else f"{view.return_mean:.2f}")]
    if view.eval_return is not None:
        rows.append(("mean return, evaluation", f"{view.eval_return:.2f}"))
    return [*rows, ("seed", text(view.run, "seed")), ("started", text(view.run, "started"))]


def _flow(view: RunView) -> str:
    """Return the worker tree as HTML: boxes from left to right, with the rates of steps, gradients and weights."""
    rates, workers = view.rates, view.metric("workers")
    collectors = f"{workers - view.metric('workers_missing')} of {workers} remote" if workers else "in this process"
    queued, size, mean, peak = view.queue
    nodes = [("collection workers", collectors)]
    if view.setting("num_replay_workers"):
        nodes.append(("replay", f"{view.setting('num_replay_workers')} shards, {queued} batches wait, peak {peak}"))
    elif view.setting("col_communication") == "asynchronous":
        average = "" if mean is None else f", mean {mean:.1f}"
        nodes.append(("queue", f"{queued} of {size}{average}, peak {peak}"))
    number_of = max(1, sum(not worker.is_collector for worker in view.workers))
    nodes += [("gradient workers", str(number_of)), ("update worker", f"{compact(rates.get('updates'))} updates/s")]
    data = f"{compact(rates.get('collected_steps'))} steps/s →"
    edges = [data, f"{compact(rates.get('consumed_steps'))} steps/s used →"][-(len(nodes) - 2):]
    edges = edges if len(nodes) == 4 else [data]
    edges.append(f"{compact(rates.get('gradients'))} gradients/s →")
    parts = []
    for place, (title, figure) in enumerate(nodes):
        parts.append(f'<div class="node"><b>{escape(title)}</b><br>{escape(figure)}</div>')
        if place < len(edges):
            back = f"← {compact(rates.get('weight_pushes'))} weights/s" if place == 0 else ""
            parts.append(f'<div class="edge">{escape(edges[place])}<br>{escape(back)}</div>')
    return f'<div class="flow">{"".join(parts)}</div>'


def _lag_cells(lag: Lag | None) -> tuple[str, str, str]:
    return ("", "", "") if lag is None else (f"{lag.mean:.2f}", f"{lag.p90:g}", f"{lag.max:g}")


def _workers(view: RunView) -> str:
    if not view.workers:
        return '<p class="none">no figures by worker in these records</p>'
    rows = [(worker.name, compact(worker.rate), f"{worker.total:,}",
             "env steps" if worker.is_collector else "gradients",
             *_lag_cells(worker.lag), str(worker.restarts)) for worker in view.workers[:_MOST_WORKERS]]
    drawn = table(("worker", "per s", "total", "of", "lag mean", "p90", "max", "restarts"), rows,
                  frozenset((1, 2, 4, 5, 6, 7)))
    hidden = len(view.workers) - len(rows)
    more = f'<p class="dim">and {hidden} more workers</p>' if hidden else ""
    return f'<details open class="wide rows"><summary>{len(view.workers)} workers</summary>{drawn}{more}</details>'


def _lags(view: RunView) -> str:
    lags = (("policy", view.policy_lag), ("gradients", view.grad_lag))
    rows = [(name, *_lag_cells(lag)) for name, lag in lags if lag]
    return table(("lag", "mean", "p90", "max"), rows, frozenset((1, 2, 3))) if rows else ""


def _ledger(view: RunView) -> str:
    ledger = mapping(view.result, "ledger") or mapping(view.latest, "ledger")
    collected = number(ledger, "collected") or 0.0
    names = [name for name, value in ledger.items() if name != "dropped" and number(value) is not None]
    rows = [(name, number(ledger, name) or 0.0) for name in names]
    rows += [(f"dropped: {name}", number(value) or 0.0) for name, value in mapping(ledger, "dropped").items()]
    return bars([(name, value / collected if collected and name != "consumed" else 0.0, f"{value:,.0f}")
                 for name, value in rows]) or '<p class="none">no data</p>'


def _events(view: RunView) -> str:
    totals = (f"Workers restarted: {view.metric('workers_restarted')}, environments restarted: "
              f"{view.metric('envs_restarted')}, updates skipped: {view.metric('updates_skipped_nan')}.")
    rows = [(f"{event.env_steps:,}", clock(event.seconds), event.text) for event in view.events[-_MOST_EVENTS:]]
    return f"<p>{escape(totals)}</p>" + (
        table(("env steps", "time", "event"), rows, frozenset((0, 1))) if rows else "")


def _settings(view: RunView) -> str:
    """Return the versions and the settings as HTML; nested values are shown as JSON."""
    def rows(values: Record) -> list[tuple[str, str]]:
        return [(name, value if isinstance(value, str) else json.dumps(value)) for name, value in values.items()]
    given = mapping(view.run, "recipe", "options")
    return ('<div class="grid2">' + _card("versions", table((), rows(mapping(view.run, "versions"))))
            + _card("options given", table((), rows(given)) if given else '<p class="none">composed in Python</p>')
            + "</div><details><summary>all settings of the scheme</summary>"
            + table((), rows(mapping(view.run, "scheme"))) + "</details>")


def _media(view: RunView) -> str:
    """Return the newest videos in the run's directory as HTML with embedded data; empty if there are none."""
    try:
        found = sorted((path for path in view.run_dir.rglob("*") if path.suffix.lower() in _MEDIA and path.is_file()
                        and not path.is_symlink() and path.stat().st_size <= _MOST_MEDIA_BYTES),
                       key=lambda path: path.stat().st_mtime)[-_MOST_MEDIA:]
        parts = []
        for path in found:
            kind, name = _MEDIA[path.suffix.lower()], str(path.relative_to(view.run_dir))
            source = f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"
            shown = f'<img src="{source}" alt="{escape(name)}">' if kind == "image/gif" else (
                f'<video controls muted src="{source}"></video>')
            parts.append(_card(name, shown))
    except OSError:
        return ""
    return f'<h3>videos</h3><div class="grid2">{"".join(parts)}</div>' if parts else ""


def state_of(view: RunView) -> str:
    """Return the state of a run, such as "running", as HTML."""
    return f'<b class="{view.state}">{view.state}</b>'


