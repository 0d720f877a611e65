"""Draw the view of a run in a terminal with rich (extra `cli`).

Narrow terminals show the blocks below each other, and wide ones side by side. Every text of a run is escaped by
`printable` and passed to rich as plain text, never as markup.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pytorchrl.monitor.view import Lag, RunView, WorkerView
from pytorchrl.support.code import import_extra
from pytorchrl.support.terminal import printable
from pytorchrl.support.units import clock, compact, percent

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

_WIDE = 130
# Colors of the states of a run, and of the parts of a bar that shows how workers spend their time.
_STATE = {"running": "bold green", "ended": "bold blue", "silent": "bold red", "starting": "bold yellow"}
_PARTS = ("cyan", "green", "yellow", "magenta", "blue", "bright_cyan", "bright_green", "bright_magenta")


def check_rich() -> None:
    """Raise `ConfigError`, which names the extra `cli`, if rich is not installed."""
    import_extra("rich", "cli", "watch")


def frame(view: RunView, width: int, height: int) -> RenderableType:
    """Return the contents of a terminal with `width` columns and `height` lines.

    If not all workers fit, gradient workers are preferred, then replaced workers, then the slowest workers.
    """
    from rich.console import Group
    from rich.table import Table

    wide = width >= _WIDE
    sentences = [*view.problems, *(f"{finding.word}: {finding.sentence}" for finding in view.findings)]
    problems = [_folded(sentence, "bold red") for sentence in sentences]
    head: list[RenderableType] = [_title(view), *problems, _progress(view, width), _bottleneck(view)]
    right: list[RenderableType] = [_shares(view, width // 2 if wide else width), _waits(view), _facts(view)]
    used = 14 + (0 if wide else 16) + sum(1 + len(sentence) // width for sentence in sentences)
    left: list[RenderableType] = [_flow(view), _workers(view, max(4, height - used))]
    if not wide:
        return Group(*head, *left, *right)
    columns = Table.grid(expand=True, padding=(0, 2))
    columns.add_column(ratio=1)
    columns.add_column(ratio=1)
    columns.add_row(Group(*left), Group(*right))
    return Group(*head, columns)


def _plain(text: str, style: str = "") -> Text:
    from rich.text import Text

    return Text(printable(text), style=style, no_wrap=True, overflow="ellipsis")


def _folded(text: str, style: str) -> Text:
    from rich.text import Text

    return Text(printable(text), style=style, overflow="fold")


def _table(*columns: tuple[str, str], title: str = "") -> Table:
    """Return an empty table; each column is given as (header, alignment), with "left" or "right" as alignment."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), title=title or None, title_justify="left",
                  title_style="bold", header_style="dim", show_header=any(header for header, _ in columns))
    for header, justify in columns:
        table.add_column(header, justify="right" if justify == "right" else "left", no_wrap=True, overflow="ellipsis")
    return table


def _title(view: RunView) -> Text:
    from rich.text import Text

    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(printable(view.name), style="bold")
    what = " on ".join(part for part in (view.algorithm, view.env) if part)
    line.append(f"  {printable(what)}" if what else "")
    line.append(f"  {view.state}", style=_STATE[view.state])
    if view.state in ("running", "silent") and view.age_s is not None:
        line.append(f", last record {clock(view.age_s)} ago", style="dim")
    return line


def _progress(view: RunView, width: int) -> Text:
    from rich.text import Text

    steps, target, rate = view.env_steps, view.target_steps, view.rates.get("collected_steps")
    share = min(1.0, steps / target) if target else 0.0
    returns = "-" if view.return_mean is None else f"{view.return_mean:.1f}"
    figures = f" {min(steps, target):,}/{target:,} steps {share:.0%}  {compact(rate)} steps/s  return {returns}"
    if view.eval_return is not None:
        figures += f"  eval {view.eval_return:.1f}"
    if view.state == "running" and rate:
        figures += f"  left {clock(max(0, target - steps) / rate)}"
    size = max(5, min(40, width - len(figures)))
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append("━" * round(size * share), style="green")
    line.append("━" * (size - round(size * share)), style="dim")
    line.append(figures)
    return line


def _bottleneck(view: RunView) -> Text:
    from rich.text import Text

    line = Text("bottleneck: ", style="bold")
    line.append(printable(view.bottleneck or "not known before the first updates"), style="not bold")
    return line


def _flow(view: RunView) -> Table:
    """Return the worker tree, update worker first, with rates: gradients, steps and weight transfers per second."""
    rates = view.rates
    table = _table(("", "left"), ("", "left"), title="tree")
    updates = compact(rates.get("updates"))
    table.add_row(_plain("update worker"), _plain(f"{updates} updates/s, {view.metric('grads_held')} gradients wait"))
    table.add_row(_plain("│ ▲"), _plain(f"{compact(rates.get('gradients'))} gradients/s"
                                        f"{_lag_text(view.grad_lag, ', lag ')}", "cyan"))
    number = max(1, sum(not worker.is_collector for worker in view.workers))
    table.add_row(_plain(f"gradient workers ({number})"),
                  _plain(f"{compact(rates.get('consumed_steps'))} steps/s used, with repeated uses"))
    queued, size, mean, peak = view.queue
    if view.setting("num_replay_workers"):
        table.add_row(_plain(f"│ ▲ replay ({view.setting('num_replay_workers')} shards)"),
                      _plain(f"{view.metric('draws_in_flight')} draws in flight, {queued} batches wait, peak {peak}",
                             "cyan"))
    elif view.setting("col_communication") == "asynchronous":
        average = "" if mean is None else f", mean {mean:.1f}"
        table.add_row(_plain("│ ▲ queue"), _plain(f"{_bar(queued, size)} {queued}/{size}{average}, peak {peak}",
                                                  "cyan"))
    table.add_row(_plain("│ ▲"), _plain(f"{compact(rates.get('collected_steps'))} steps/s, "
                                        f"{compact(rates.get('bytes_in'))}B/s", "cyan"))
    table.add_row(_plain("▼ │"), _plain(f"{compact(rates.get('weight_pushes'))} weights/s, "
                                        f"{compact(rates.get('bytes_out'))}B/s", "cyan"))
    missing, workers = view.metric("workers_missing"), view.metric("workers")
    present = f"{workers - missing} of {workers} remote workers" if workers else "in the same process"
    table.add_row(_plain("collection workers"), _plain(
        f"{present}, {view.metric('requests_in_flight')} requests in flight", "bold red" if missing else ""))
    return table


def _bar(level: int, size: int) -> str:
    cells = 8
    full = min(cells, round(cells * level / size)) if size else 0
    return "█" * full + "░" * (cells - full)


def _lag_text(lag: Lag | None, before: str = "") -> str:
    return "" if lag is None else f"{before}{lag.mean:.1f} mean, {lag.p90:g} p90, {lag.max:g} max"


def _workers(view: RunView, most: int) -> Table:
    table = _table(("worker", "left"), ("per s", "right"), ("total", "right"), ("lag mean", "right"),
                   ("p90", "right"), ("max", "right"), ("restarts", "right"))
    shown = _fitting(view.workers, most)
    for worker in shown:
        lag = worker.lag
        lags = (f"{lag.mean:.1f}", f"{lag.p90:g}", f"{lag.max:g}") if lag else ("", "", "")
        name = f"  {worker.name.rpartition('/')[2]}" if worker.is_collector else worker.name
        style = "yellow" if worker.restarts else "bold red" if worker.is_collector and worker.rate == 0 else ""
        table.add_row(_plain(name, style), _plain(compact(worker.rate)), _plain(f"{worker.total:,}"),
                      *map(_plain, lags), _plain(str(worker.restarts or "")))
    if len(shown) < len(view.workers):
        table.add_row(_plain(f"… and {len(view.workers) - len(shown)} more", "dim"))
    return table


def _fitting(workers: Sequence[WorkerView], most: int) -> list[WorkerView]:
    """Return at most `most` workers to show, in the given order.

    If not all fit, gradient workers are preferred, then replaced workers, then the slowest workers.
    """
    order = sorted(range(len(workers)), key=lambda place: (
        workers[place].is_collector, -workers[place].restarts, workers[place].rate or 0.0))
    kept = set(order[:most])
    return [worker for place, worker in enumerate(workers) if place in kept]


def _shares(view: RunView, width: int) -> Table:
    from rich.text import Text

    table = _table(("", "left"), ("", "left"), title="time of each level")
    cells = max(10, min(48, width - 46))
    for level, parts in view.shares.items():
        found = sorted(((part, share) for part, share in parts.items() if share >= 0.01), key=lambda one: -one[1])
        line = Text(no_wrap=True, overflow="ellipsis")
        for place, (part, share) in enumerate(found):
            style = "bright_black" if part in ("idle", "wait") else _PARTS[place % len(_PARTS)]
            line.append("█" * round(cells * share), style=style)
        for place, (part, share) in enumerate(found[:3]):
            style = "bright_black" if part in ("idle", "wait") else _PARTS[place % len(_PARTS)]
            line.append(f" {printable(part)} {share:.0%}", style=style)
        table.add_row(_plain(level), line)
    return table


def _waits(view: RunView) -> Table:
    table = _table(("", "left"), title="who waits for whom")
    for wait in view.waits[:4]:
        verb = "waits" if wait.who.startswith("the ") else "wait"
        table.add_row(_plain(f"{wait.who} {verb} {percent(wait.share)} of the time for {wait.whom}"))
    if not view.waits:
        table.add_row(_plain("nobody", "dim"))
    return table


def _facts(view: RunView) -> Table:
    table = _table(("", "left"), ("", "left"), title="run")
    table.add_row(_plain("policy lag"), _plain(_lag_text(view.policy_lag) or "-"))
    table.add_row(_plain("dropped"), _plain(", ".join(
        f"{name} {steps:,}" for name, steps in view.dropped.items()) or "0 steps"))
    restarted = view.metric("workers_restarted")
    faults = (f"workers restarted: {restarted}, environments restarted: {view.metric('envs_restarted')}, "
              f"updates skipped: {view.metric('updates_skipped_nan')}")
    table.add_row(_plain("faults"), _plain(faults, "yellow" if restarted else ""))
    for event in view.events[-3:]:
        table.add_row(_plain(f"  at {compact(event.env_steps)}"), _plain(event.text, "yellow"))
    return table
