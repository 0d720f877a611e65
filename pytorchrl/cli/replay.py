"""Implement `pytorchrl replay RUN_DIR`: make one update of a run again, or find where two runs begin to differ."""

from __future__ import annotations

import argparse
import dataclasses
import json
import pdb
from collections.abc import Sequence
from pathlib import Path

import torch

from pytorchrl.agent.algorithms import Algorithm
from pytorchrl.agent.data import Batch
from pytorchrl.cli.output import show, show_in_red, show_table, wrapped
from pytorchrl.cli.parsing import Parser
from pytorchrl.cli.saved_agent import add_run_dir, count
from pytorchrl.play.replay import Difference, Update, first_difference, replay_batch, replay_update
from pytorchrl.support.code import make_importable


def run(arguments: Sequence[str]) -> int:
    """Print the update or the difference; return 1 if the update is not finite or the runs differ, otherwise 0."""
    given = _parse(arguments)
    if given.trust:
        make_importable()
    if given.against is not None:
        found = first_difference(given.run_dir, given.against, trust=given.trust)
        if given.json:
            show(json.dumps(dataclasses.asdict(found)))
        else:
            _show_difference(found)
        return int(found.until is not None or found.update is not None)
    stop = _debugger if given.pdb else None
    if given.bad is not None:
        update = replay_batch(given.run_dir, given.bad, trust=given.trust, stop=stop)
    else:
        update = replay_update(given.run_dir, given.update, trust=given.trust, stop=stop)
    if given.out is not None:
        torch.save(dict(update.tensors()), given.out)
    if given.json:
        show(json.dumps(_as_dict(update)))
    else:
        _show_update(update, given.out)
    return int(not update.is_finite)


def _debugger(algorithm: Algorithm, batch: Batch) -> None:  # the arguments are for the person in the debugger
    show("the debugger stops before `algorithm` computes the gradient of `batch`; `next` and `step` lead into its code")
    pdb.set_trace()


def _as_dict(update: Update) -> dict[str, object]:
    return {
        "update": update.number, "is_finite": update.is_finite, "info": update.info,
        "gradients": [{"samples": int(gradient.batch.num_samples), "info": gradient.info, "origin": gradient.origin}
                      for gradient in update.gradients],
        "change": {name: float((after - update.before[name]).norm()) for name, after in update.after.items()},
        "error": None if update.error is None else str(update.error)}


def _show_update(update: Update, out: Path | None) -> None:
    show(f"update {update.number:,}", "")
    for index, gradient in enumerate(update.gradients):
        number = f" {index + 1} of {len(update.gradients)}" if len(update.gradients) > 1 else ""
        show(f"batch{number}: {gradient.batch.num_samples:,} samples",
             *wrapped(", ".join(f"{name} {value:.6g}" for name, value in gradient.info.items()), 2))
        if gradient.origin:
            show_in_red(*wrapped(gradient.origin, 2))
    show("")
    show_table(("parameter", "shape", "norm", "norm of the gradient", "norm of the change"), [
        (name, " x ".join(map(str, before.shape)), f"{before.norm():.6g}",
         f"{update.applied[name].norm():.6g}" if name in update.applied else "-",
         f"{(update.after[name] - before).norm():.6g}" if name in update.after else "-")
        for name, before in update.before.items()])
    if update.info:
        show("", *wrapped(", ".join(f"{name} {value:.6g}" for name, value in update.info.items()), 2))
    if update.error is not None:
        show_in_red("", *wrapped(f"the run ends here: {update.error}", 2))
    if out is not None:
        show("", f"wrote {out}")


def _show_difference(found: Difference) -> None:
    if found.options:
        show("the runs have different options:", *(f"  {text}" for text in found.options), "")
    if found.equal:
        show(f"equal checkpoints after {', '.join(f'{version:,}' for version in found.equal)} updates")
    if found.until is not None:
        show(f"first different checkpoint after {found.until:,} updates, in {found.state}")
    if found.update is not None:
        numbers = "" if found.values is None else f": {found.values[0]!r} and {found.values[1]!r}"
        show_in_red(f"the runs differ first in update {found.update:,}",
                    *wrapped(f"in {found.tensor}, {found.count[0]:,} of {found.count[1]:,} values{numbers}", 2))
    elif found.unrepeated:
        show_in_red(*wrapped(
            f"all {found.remade:,} updates from the last equal checkpoint are equal when they are made again, but the "
            f"checkpoint of {' and of '.join(found.unrepeated)} is not reached: the difference came from the machine, "
            "or from outside the run", 2))
    elif found.until is None:
        show("the runs do not differ")
    show(f"{found.remade:,} updates of each run were made again")


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="pytorchrl replay", usage="pytorchrl replay RUN_DIR (--update N | --bad FILE | --against RUN_DIR) [flags]",
        description="Make one update of a run again, in this process and bit for bit, and show what it did; or find "
        "the first update and the first tensor in which two runs differ. Exit codes: 0 the update is finite or the "
        "runs are equal, 1 it is not or they differ, 2 the run cannot be repeated.")
    add_run_dir(parser)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--update", type=count, metavar="N", help="number of the update, from 1")
    which.add_argument("--bad", metavar="FILE", type=Path, help="batch that keep_bad_batches has saved")
    which.add_argument("--against", metavar="RUN_DIR", help="directory of a second run, to find the first difference")
    parser.add_argument("--pdb", action="store_true", help="stop in Python's debugger before the gradient is computed")
    parser.add_argument("--out", metavar="FILE", type=Path, help="write all tensors of the update to this file [none]")
    parser.add_argument("--trust", action="store_true",
                        help="import and execute code that the run names, such as a function that builds environments")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument("--debug", action="store_true", help="show tracebacks of errors")
    given = parser.parse(arguments)
    if given.against is not None and (given.pdb or given.out is not None):
        parser.error("--pdb and --out concern one update; give them with --update or --bad")
    return given
