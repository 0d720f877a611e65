"""Make tables and learning curves of the documentation from the results of other benchmarks.

    python benchmarks/report.py docs/benchmarks/scores.json
    python benchmarks/report.py docs/benchmarks/roofline.jsonl
    python benchmarks/report.py docs/benchmarks/compile.jsonl
    python benchmarks/report.py docs/benchmarks/one_core.jsonl

From the results of `scores.py`, the script writes `scores.md` (the table), `scores_short.md` (that of the first page)
and one SVG file per task; from the lines that `roofline.py` and `compile_choice.py` have printed, it writes
`roofline.md` and `compile.md`; from the rounds of the programs in `one_core.jsonl`, it writes `one_core.md`. The files
are next to the given file.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
from matplotlib import pyplot as plt

from pytorchrl.analysis import estimate, mean

ENV_NAMES = {"pendulum": "Pendulum-v1", "halfcheetah": "HalfCheetah-v5", "cartpole": "CartPole-v1", "pong": "Pong"}


def table(tasks: dict[str, list[dict[str, Any]]]) -> str:
    """Return a Markdown table with one row per task."""
    rows = ["| task | env steps | seeds | evaluation return by seed | mean [95 % interval] | while training "
            "| published | minutes per run |",
            "|---|---|---|---|---|---|---|---|"]
    for task, runs in tasks.items():
        evals = [run["eval_return"] for run in runs]
        rows.append(
            f"| {task} | {runs[0]['env_steps']:,} | {len(runs)} | {', '.join(f'{value:.0f}' for value in evals)} "
            f"| {_mean(evals)} | {_mean([run['train_return'] for run in runs])} "
            f"| {runs[0]['published']} | {statistics.fmean(run['seconds'] for run in runs) / 60:.1f} |")
    return "\n".join(rows) + "\n"


def short_table(tasks: dict[str, list[dict[str, Any]]]) -> str:
    """Return a Markdown table with the mean scores, their intervals and the published scores."""
    rows = ["| task | env steps | return, mean of 3 seeds [95 % interval] | published |", "|---|---|---|---|"]
    for task, runs in tasks.items():
        assert len(runs) == 3
        rows.append(f"| {task} | {runs[0]['env_steps']:,} | {_mean([run['eval_return'] for run in runs])} "
                    f"| {runs[0]['published']} |")
    return "\n".join(rows) + "\n"


def _mean(scores: list[float]) -> str:
    """Return the mean over seeds with its confidence interval."""
    return f"{estimate(mean, scores):.0f}"


def roofline_table(lines: list[dict[str, Any]]) -> str:
    """Return a Markdown table with one row per task and precision of training."""
    rows = ["| task | precision | env steps per core-second | products alone | environments alone | both | "
            "share of the products | share of both |",
            "|---|---|---|---|---|---|---|---|"]
    for line in lines:
        if line["dtype"] != line["training"]:  # training cannot compute its products in this dtype
            continue
        algorithm, env = line["task"].split("-")
        rates = [f"{line[name]:,.0f}" for name in ("ours", "products", "environment", "both")]
        rows.append(f"| {algorithm.upper()}, {ENV_NAMES[env]} | {line['dtype']} | {' | '.join(rates)} "
                    f"| {line['share_of_products']:.0%} | {line['share_of_both']:.0%} |")
    return "\n".join(rows) + "\n"


def compile_table(lines: list[dict[str, Any]]) -> str:
    """Return a Markdown table with one row per round of `compile_choice.py`: the runs of a case with the same seed.

    Runs that make the same choice are the same program, whether `train` has made the choice or it was given.
    """
    rows = ["| task | env steps | choice of `train` | with this choice | with the other choice | SBX "
            "| equal times at |",
            "|---|---|---|---|---|---|---|"]
    names = ("case", "target_steps", "cache", "commit", "seed")
    rounds: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        rounds[tuple(line[name] for name in names)].append(line)
    cases = list(dict.fromkeys(line["case"] for line in lines))
    for (case, steps, cache, *_), runs in sorted(rounds.items(), key=lambda item: cases.index(item[0][0])):
        choice, = {run["is_compiled"] for run in runs if run["variant"] == "default"}
        cells = [", ".join(_seconds(run) for run in runs if run.get("is_compiled") == value)
                 for value in (choice, not choice, None)]
        equal = break_even(runs)
        algorithm, env = case.split("-")
        rows.append(f"| {algorithm.upper()}, {ENV_NAMES[env]}{', warm cache' if cache == 'warm' else ''} | {steps:,} "
                    f"| {'compiled' if choice else 'not compiled'} | {' | '.join(cells)} "
                    f"| {f'{equal:,.0f}' if equal else ''} |")
    return "\n".join(rows) + "\n"


def break_even(runs: list[dict[str, Any]]) -> float | None:
    """Return the number of env steps at which compiled and other runs of a round would have taken equally long.

    When the compiled run stops, it is behind by the difference of the processor times. Then it catches up in each env
    step. The result is None unless both kinds ran in turns and were stopped early.

    Args:
        runs: Lines of one round.
    """
    turns = [run for run in runs if run.get("together") and "s_per_step" in run]
    kinds = [[run for run in turns if run.get("is_compiled") is value] for value in (True, False)]
    if not all(kinds):
        return None
    (compiled, step), (other, other_step) = (
        [statistics.fmean(run[name] for run in kind) for name in ("cpu_s", "s_per_step")] for kind in kinds)
    stopped = statistics.fmean(run["stopped_at"] for kind in kinds for run in kind)
    return stopped + (compiled - other) / (other_step - step)


def _seconds(run: dict[str, Any]) -> str:
    """Return the processor time of a whole run, with a tilde if it is estimated from a part of the run."""
    return f"{'~' if run.get('stopped_at', math.inf) < run['target_steps'] else ''}{run['whole_cpu_s']:.0f} s"


def one_core_table(lines: list[dict[str, Any]]) -> str:
    """Return a Markdown table with one row per task: the median rate of each program over the rounds.

    In brackets are the smallest and the largest ratio of this library's rate and the other one of the same round.
    """
    rows = ["| env steps per second | pytorchrl | in bfloat16 | Stable-Baselines3 | SBX | compiled script |",
            "|---|---|---|---|---|---|"]
    for task in dict.fromkeys(line["task"] for line in lines):
        rounds = [line["rates"] for line in lines if line["task"] == task]
        algorithm, env = task.split("-")
        mixed = [rates["pytorchrl, bfloat16"] for rates in rounds if "pytorchrl, bfloat16" in rates]
        cells = [f"{statistics.median(rates['pytorchrl'] for rates in rounds):,.0f}",
                 f"{statistics.median(mixed):,.0f}" if mixed else ""]
        for name in ("stable-baselines3", "sbx", "script"):
            ratios = [rates["pytorchrl"] / rates[name] for rates in rounds]
            ends = "\u2013".join(dict.fromkeys(f"{ratio:.1f}" for ratio in (min(ratios), max(ratios))))
            cells.append(f"{statistics.median(rates[name] for rates in rounds):,.0f} ({ends}\u00d7)")
        rows.append(f"| {algorithm.upper()}, {ENV_NAMES[env]} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


TABLES = {"roofline": roofline_table, "compile": compile_table, "one_core": one_core_table}
"""Name of a file of results -> function that returns its table."""


def draw(task: str, runs: list[dict[str, Any]], path: Path) -> None:
    """Draw the mean return of the last 100 training episodes over env steps, with one line per seed."""
    mpl.rcParams["svg.hashsalt"] = task
    figure, axes = plt.subplots(figsize=(5, 3))
    for run in runs:
        axes.plot(*zip(*run["curve"], strict=True), label=f"seed {run['seed']}", linewidth=1.2)
    axes.set(title=task, xlabel="env steps", ylabel="return")
    axes.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    """Read the results, and write the table and the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="file with results")
    source = parser.parse_args().source
    if source.suffix == ".jsonl":
        lines = [json.loads(line) for line in source.read_text().splitlines()]
        source.with_suffix(".md").write_text(TABLES[source.stem](lines))
        return
    tasks: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for run in json.loads(source.read_text()):
        tasks[run["task"]].append(run)
    (source.parent / "scores.md").write_text(table(tasks))
    (source.parent / "scores_short.md").write_text(short_table(tasks))
    for task, runs in tasks.items():
        draw(task, runs, source.parent / f"{task.replace('/', '-').lower()}.svg")


if __name__ == "__main__":
    main()
