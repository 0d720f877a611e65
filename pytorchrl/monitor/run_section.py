"""Write the part of a report about one run: its tree, its figures, where it comes from, and its settings."""

from __future__ import annotations

import base64

from pytorchrl.files.reading import Record, count, mapping, number, rows, text
from pytorchrl.monitor.charts import bars, histogram, stacked
from pytorchrl.monitor.tables import RED_SHARE, card, entries, table
from pytorchrl.monitor.view import Lag, RunView
from pytorchrl.support.display import escape
from pytorchrl.support.units import clock, compact, percent, score

_MEDIA = {".mp4": "video/mp4", ".webm": "video/webm", ".gif": "image/gif"}
_MOST_MEDIA, _MOST_MEDIA_BYTES = 4, 16 << 20
_MOST_WORKERS, _MOST_EVENTS = 200, 200
# In a report about several runs, so that it stays small.
_MOST_WORKERS_OF_MANY, _MOST_EVENTS_OF_MANY = 16, 10
# Figures of the run, not settings: arguments of `train` that say where and how the run is shown.
_NOT_SHOWN = ("log_dir", "progress", "tensorboard", "overwrite")


def full_section(view: RunView) -> str:
    """Return everything about a run but its curves, for a report about this run alone."""
    return (f"<h2>Tree</h2>{_tree(view, _MOST_WORKERS)}<h2>Figures</h2>{_cards(view, is_short=False)}"
            f"<h2>Settings and origin</h2>{_settings(view)}"
            f"<details><summary>all settings of the scheme</summary>{table((), entries(mapping(view.run, 'scheme')))}"
            f"</details>{_media(view)}")


def folded_section(view: RunView, name: str, place: int, label: str, own: Record) -> str:
    """Return the part about a run in a report about several runs; a click on its title unfolds it.

    Args:
        view: The run.
        name: Its name in the report.
        place: Its number in the report.
        label: The label of its group.
        own: The settings of its scheme, and the versions, that not all runs share.
    """
    words = "".join(f' <b class="bad">{escape(finding.word)}</b>' for finding in view.findings)
    more = card("differs between runs", table((), entries(own))) if own else ""
    return (f'<details class="run" id="run-{place}"><summary><b>{escape(name)}</b> {state_of(view)} '
            f'<span class="dim">{escape(label)}</span>{words}</summary>{wrong(view)}{tiles(view)}'
            f"{_tree(view, _MOST_WORKERS_OF_MANY)}{_cards(view, is_short=True)}"
            f"{_settings(view, is_short=True)}{more}</details>")


def wrong(view: RunView) -> str:
    """Return a red box with what went wrong in a run, and the damage of its files; empty if there is nothing."""
    sentences = [finding.sentence for finding in view.findings] + list(view.problems)
    if not sentences:
        return ""
    return (f'<div class="wrong"><b>What looks wrong</b><ul>'
            f'{"".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)}</ul></div>')


def tiles(view: RunView) -> str:
    """Return the main figures of a run."""
    seconds = number(view.result, "seconds") or number(view.latest, "seconds") or 0.0
    lag, latest = view.policy_lag, mapping(view.latest, "evaluation")
    found = [(score(view.return_mean),
              f"return of the last {min(100, count(view.latest, 'return_episodes')) or 100} episodes")]
    if view.eval_return is not None:
        spread = number(latest, "return_std")
        found.append((score(view.eval_return) + (f" ± {score(spread)}" if spread is not None else ""),
                      f"evaluation, {count(latest, 'episodes')} episodes"))
    share = f" ({percent(view.env_steps / view.target_steps)})" if view.target_steps else ""
    found += [(f"{view.env_steps:,}", f"of {view.target_steps:,} env steps{share}"), (clock(seconds), "training time"),
              (compact(number(view.latest, "env_steps_per_s")), "env steps per second, latest")]
    if lag is not None:
        found.append((f"{lag.mean:.1f}", "policy lag, mean"))
    parts = (f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for value, name in found)
    return f'<div class="tiles">{"".join(parts)}</div>'


def _tree(view: RunView, most: int) -> str:
    return f'<section class="card">{_flow(view)}{_workers(view, most)}</section>'


def _cards(view: RunView, *, is_short: bool) -> str:
    """Return the boxes about time, lag, ledger and faults; what is empty is left out."""
    bottleneck = f"<p><b>Bottleneck:</b> {escape(view.bottleneck)}</p>" if view.bottleneck else ""
    lags = max((lag for lag, seen in view.lag_histogram if seen), default=0)
    cards = [card("time of each level, at the end" if view.state == "ended" else "time of each level, now",
                  stacked(view.shares) + bottleneck),
             card("ledger, in env steps", _ledger(view))]
    if lags:
        cards.append(card("policy lag, in updates", histogram(view.lag_histogram) + _lags(view)))
    if view.waits and not is_short:
        cards.append(card("who waits for whom", table((), [
            (wait.who, percent(wait.share), wait.whom) for wait in view.waits], frozenset((1,)))))
    if view.events:
        cards.append(card("faults and restarts", _events(view, _MOST_EVENTS_OF_MANY if is_short else _MOST_EVENTS)))
    return f'<div class="grid2">{"".join(cards)}</div>'


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


def _workers(view: RunView, most: int) -> str:
    if not view.workers:
        return '<p class="none">no figures by worker in these records</p>'
    rows = [(worker.name, compact(worker.rate), f"{worker.total:,}",
             "env steps" if worker.is_collector else "gradients",
             *_lag_cells(worker.lag), str(worker.restarts)) for worker in view.workers[:most]]
    drawn = table(("worker", "per s", "total", "of", "lag mean", "p90", "max", "restarts"), rows,
                  frozenset((1, 2, 4, 5, 6, 7)))
    hidden = len(view.workers) - len(rows)
    more = f'<p class="dim">and {hidden} more workers</p>' if hidden else ""
    name = "worker" if len(view.workers) == 1 else "workers"
    return f'<details class="wide rows"><summary>{len(view.workers)} {name}</summary>{drawn}{more}</details>'


def _lags(view: RunView) -> str:
    lags = (("policy", view.policy_lag), ("gradients", view.grad_lag))
    rows = [(name, *_lag_cells(lag)) for name, lag in lags if lag]
    return table(("lag", "mean", "p90", "max"), rows, frozenset((1, 2, 3))) if rows else ""


def _ledger(view: RunView) -> str:
    """Return a bar for each entry of the ledger; steps that were dropped are red if they are many."""
    ledger = mapping(view.result, "ledger") or mapping(view.latest, "ledger")
    collected = number(ledger, "collected") or 0.0
    found = [(name, value) for name in ledger if name != "dropped" and (value := number(ledger, name))]
    found += [(f"dropped: {name}", value) for name, value in
              ((name, number(ledger, "dropped", name)) for name in mapping(ledger, "dropped")) if value]
    bar = [(name, value / collected if collected and name != "consumed" else 0.0, value) for name, value in found]
    parts = []
    for name, share, value in bar:
        is_drop = name.startswith("dropped")
        more = f" ({percent(share)})" if is_drop else ", with repeated uses" if name == "consumed" else ""
        parts.append((name, share, f"{value:,.0f}{more}", is_drop and share > RED_SHARE))
    return bars(parts)


def _events(view: RunView, most: int) -> str:
    totals = (f"Workers restarted: {view.metric('workers_restarted')}, environments restarted: "
              f"{view.metric('envs_restarted')}, updates skipped: {view.metric('updates_skipped_nan')}.")
    rows = [(f"{event.env_steps:,}", clock(event.seconds), event.text) for event in view.events[-most:]]
    return f"<p>{escape(totals)}</p>" + (
        table(("env steps", "time", "event"), rows, frozenset((0, 1))) if rows else "")


def _settings(view: RunView, *, is_short: bool = False) -> str:
    """Return the options that the user gave, those of the preset unless `is_short`, and where the run comes from."""
    given, preset = options_of(view)
    body = table((), entries(given)) if given else '<p class="none">none</p>'
    if not mapping(view.run, "recipe"):
        body = '<p class="none">composed in Python</p>'
    more = f"<details><summary>options of the preset</summary>{table((), entries(preset))}</details>" if preset else ""
    more = "" if is_short else more
    origin = card("origin", _origin(view, with_versions=not is_short))
    return f'<div class="grid2">{card("options given", body + more)}{origin}</div>'


def options_of(view: RunView) -> tuple[Record, Record]:
    """Return the options of `train` that the user gave, and those that come from the preset."""
    options = {name: value for name, value in mapping(view.run, "recipe", "options").items() if name not in _NOT_SHOWN}
    names = rows(view.run, "recipe", "given") or list(options)
    return ({name: value for name, value in options.items() if name in names},
            {name: value for name, value in options.items() if name not in names})


def _origin(view: RunView, *, with_versions: bool) -> str:
    """Return command, commit, machine, start and versions of a run."""
    machine = mapping(view.run, "origin", "machine")
    cores, gpus = count(machine, "cores"), [str(gpu) for gpu in rows(machine, "gpus")]
    where = ", ".join(filter(None, [text(machine, "name"), f"{cores} core{'s' * (cores > 1)}" if cores else "",
                                    *(f"{gpus.count(gpu)} {gpu}" for gpu in dict.fromkeys(gpus))]))
    found = [("directory", str(view.run_dir)), ("seed", text(view.run, "seed")), ("started", text(view.run, "started")),
             ("commit", text(view.run, "origin", "commit")), ("machine", where)]
    command = text(view.run, "origin", "command")
    shown = f"<p><code>{escape(command)}</code></p>" if command else ""
    versions = f"<details><summary>versions</summary>{table((), entries(mapping(view.run, 'versions')))}</details>"
    return shown + table((), [(name, value) for name, value in found if value]) + versions * with_versions


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
            parts.append(card(name, shown))
    except OSError:
        return ""
    return f'<h3>videos</h3><div class="grid2">{"".join(parts)}</div>' if parts else ""


def state_of(view: RunView) -> str:
    """Return the state of a run, such as "running", as HTML."""
    return f'<b class="{view.state}">{view.state}</b>'
