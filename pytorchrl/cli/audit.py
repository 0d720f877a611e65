"""Implement `pytorchrl audit ROWS`: show the lag of logged rows, and what each correction would do with them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from pytorchrl.agent.algorithms.corrections import CORRECTIONS
from pytorchrl.cli.output import show, show_in_red, show_table, wrapped
from pytorchrl.cli.parsing import Parser
from pytorchrl.play.audit import audit, read_rows


def run(arguments: Sequence[str]) -> int:
    """Print the audit of a file; return 1 if a diagnostic alarms, otherwise 0."""
    parser = Parser(prog="pytorchrl audit", usage="pytorchrl audit ROWS [flags]",
                    description="Read rows that a trainer has logged, one sequence on each line of JSON, and show how "
                                "old they are and what each correction for lag would do. Exit codes: 0 no alarm, "
                                "1 an alarm, 2 a row is wrong.")
    parser.add_argument("rows", metavar="ROWS", type=Path, help="file of JSON lines; see the page audit")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument("--debug", action="store_true", help="show tracebacks of errors")
    given = parser.parse(arguments)
    found = audit(read_rows(given.rows.expanduser()))
    if given.json:
        show(json.dumps(dataclasses.asdict(found)))
        return int(bool(found.alarms))
    show(f"{found.rows:,} rows, {found.tokens:,} tokens, {found.batches:,} batches", "")
    if found.lags:
        show_table(("lag in updates", "mean", "p50", "p90", "max"), [
            (cause, *(f"{lag[name]:.2f}".removesuffix(".00") for name in ("mean", "p50", "p90", "max")))
            for cause, lag in found.lags.items()])
    else:
        show("the lag is unknown, because the rows have no versions")
    show("", *(f"{name.replace('_', ' ')}: {value:.4g}" for name, value in found.diagnostics.items()))
    if "mismatch" not in found.diagnostics:
        show("the mismatch is unknown, because no token is known to be without lag")
    show("")
    show_table(("correction", "cut", "without gradient", "mean weight"), [
        (name, "-", "-", "-") if CORRECTIONS[name].needs_lag and "total" not in found.lags else
        (name, f"{effect['cut']:.1%}", f"{effect['without_gradient']:.1%}", f"{effect['weight']:.4g}")
        for name, effect in found.corrections.items()])
    if found.alarms:
        show("")
    for alarm in found.alarms:
        show_in_red(*wrapped(f"alarm: {alarm}", 7))
    return int(bool(found.alarms))
