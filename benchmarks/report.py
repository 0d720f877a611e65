"""Make tables and learning curves of the documentation from the results of other benchmarks.

    python benchmarks/report.py docs/benchmarks/scores.jsonl
    python benchmarks/report.py docs/benchmarks/roofline.jsonl
    python benchmarks/report.py docs/benchmarks/compile.jsonl
    python benchmarks/report.py docs/benchmarks/one_core.jsonl
    python benchmarks/report.py docs/benchmarks/pairs.jsonl
    python benchmarks/report.py docs/benchmarks/shelf.jsonl

From the results of `scores.py`, the script writes `scores.md` (the table), `scores_short.md` (that of the first page)
and one SVG file per environment; from the lines that `roofline.py` and `compile_choice.py` have printed, it writes
`roofline.md` and `compile.md`; from the rounds of the programs in `one_core.jsonl`, it writes `one_core.md`; from the
groups of `pairs.py`, `pairs.md`; and from the lines of `shelf.py`, `shelf.md`. The files are next to the given file.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

mpl.use("svg")
from matplotlib import pyplot as plt
from matplotlib.ticker import EngFormatter, ScalarFormatter
from pairs import SWITCHES
from scores import CASES

from pytorchrl.analysis import estimate, iqm, mean
from pytorchrl.analysis.aggregates import Statistic

ENV_NAMES = {"pendulum": "Pendulum-v1", "halfcheetah": "HalfCheetah-v5", "cartpole": "CartPole-v1", "pong": "Pong"}


Runs = list[dict[str, Any]]
"""Runs that differ only in their seeds."""


def scores_table(lines: Runs) -> str:
    """Return a table with a row for each case of `scores.py`, by environment, with the highest scores first.

    The last column compares algorithms after equal processor time, the median over the algorithms of an environment. If
    a run ended before, this is its last evaluation.
    """
    rows = ["| environment | algorithm | env steps | seeds | return, interquartile mean [95 % interval] "
            "| lowest to highest | published | minutes per run | return after equal processor time |",
            "|---|---|---|---|---|---|---|---|---|"]
    for env, cases in sorted(_by_env(lines).items()):
        equal = statistics.median(_minutes(runs) for runs in cases.values())
        for name, runs in _ranked(cases):
            evals = _returns(runs)
            is_timed = all("cpu_s" in run for run in runs) and len(cases) > 1
            after = statistics.fmean(_after(run, 60 * equal) for run in runs) if is_timed else 0.0
            rows.append(
                f"| {env} | {name.partition('-')[0]} | {runs[0]['env_steps']:,} | {len(runs)} | {_score(iqm, evals)} "
                f"| {min(evals):,.0f} to {max(evals):,.0f} | {CASES[name].published} | {_minutes(runs):.1f} "
                f"| {f'{after:,.0f} ({equal:.1f} min)' if is_timed else ''} |")
    return "\n".join(rows) + "\n"


def short_table(lines: Runs) -> str:
    """Return a table with the mean scores of PPO, their intervals and the published scores."""
    rows = ["| task | env steps | return, mean of 3 seeds [95 % interval] | published |", "|---|---|---|---|"]
    for env, cases in sorted(_by_env(lines).items()):
        for runs in cases.values():
            if runs[0]["algorithm"] == "ppo":
                assert len(runs) == 3
                published = CASES[runs[0]["case"]].published
                rows.append(f"| {env} | {runs[0]['env_steps']:,} | {_score(mean, _returns(runs))} | {published} |")
    return "\n".join(rows) + "\n"


def _by_env(lines: Runs) -> dict[str, dict[str, Runs]]:
    """Return the runs by environment and case, both in the order of the lines."""
    found: dict[str, dict[str, Runs]] = {}
    for run in lines:
        found.setdefault(run["env"], {}).setdefault(run["case"], []).append(run)
    return found


def _returns(runs: Runs) -> list[float]:
    return [run["eval_return"] for run in runs]


def _ranked(cases: dict[str, Runs]) -> list[tuple[str, Runs]]:
    """Return the cases with their runs, the highest score first."""
    return sorted(cases.items(), key=lambda case: -iqm(_returns(case[1])))


def _minutes(runs: Runs) -> float:
    """Return the mean minutes of the processor; of the clock, for runs in which only these were measured."""
    return statistics.fmean(run.get("cpu_s") or run["seconds"] for run in runs) / 60


def _after(run: dict[str, Any], seconds: float) -> float:
    """Return the return of the evaluations after some seconds of the processor, interpolated linearly."""
    _, times, returns = zip(*run["curve"], strict=True)
    return float(np.interp(seconds, times, returns))


def _score(statistic: Statistic, scores: list[float]) -> str:
    """Return a statistic over seeds, with its confidence interval if there are several seeds."""
    return f"{estimate(statistic, scores):,.0f}" if len(scores) > 1 else f"{scores[0]:,.0f}"


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


def pairs_table(lines: list[dict[str, Any]]) -> str:
    """Return the tables of `docs/combinations.md` for the groups of `pairs.py`.

    The first table shows each switch alone, with a column for each algorithm and kind of actions; the second one shows
    pairs of switches that both train alone. The letters in the tables stand for the reasons of refusals below them.
    """
    runs = list(dict.fromkeys((line["algorithm"], line["actions"]) for line in lines))
    names = [name for name, _ in runs]
    found = {(line["algorithm"], line["actions"], *case): line for line in lines for case in line["cases"]}
    switches = list(SWITCHES)
    reasons: dict[str, str] = {}

    def mark(line: dict[str, Any] | None) -> str:
        """Return the cell of a case: empty if there is none."""
        if line is None or line["outcome"] == "trains":
            return "✓" if line else ""
        return reasons.setdefault(line["reason"], _letters(len(reasons)))

    def both(*pair: str) -> str:
        """Return the marks of all runs in which a pair is tried, and each of its switches trains alone."""
        alone = [run for run in runs if all(mark(found.get((*run, switch))) == "✓" for switch in pair)]
        return " ".join(dict.fromkeys(mark(found.get((*run, *pair))) for run in alone if (*run, *pair) in found))

    heads = [name if names.count(name) == 1 else f"{name}, {'Box' if kind == 'continuous' else 'Discrete'}"
             for name, kind in runs]
    rows = [f"| switch | {' | '.join(heads)} |", f"|---{'|---' * len(runs)}|"]
    rows += [f"| {switch} | {' | '.join(mark(found.get((*run, switch))) for run in runs)} |" for switch in switches]
    numbers = [f"{number}" for number in range(1, len(switches))]
    rows += ["", f"| | {' | '.join(numbers)} |", f"|---{'|---' * len(numbers)}|"]
    rows += [f"| {number} {switch} | {' | '.join(both(other, switch) for other in switches[:number - 1])} |"
             for number, switch in enumerate(switches, 1)]
    counts = {outcome: sum(len(line["cases"]) for line in lines if line["outcome"] == outcome)
              for outcome in ("trains", "refused")}
    summary = f"Of {len(found):,} cases, {counts['trains']:,} train and resume, and {counts['refused']:,} are refused."
    notes = ["| mark | reason of the refusal |", "|---|---|"]
    notes += [f"| {letter} | {reason} |" for reason, letter in reasons.items()]
    return "\n".join([summary, "", *rows, "", *notes]) + "\n"


def _letters(number: int) -> str:
    """Return a, b, ..., z, aa, ab, ... for 0, 1, ..., 25, 26, 27, ..."""
    return ("" if number < 26 else _letters(number // 26 - 1)) + chr(ord("a") + number % 26)


def shelf_table(lines: list[dict[str, Any]]) -> str:
    """Return two Markdown tables from the lines of `shelf.py`: beside the nearest relatives, and other libraries."""
    rows = ["| algorithm | beside | products | time | time, compiled |", "|---|---|---|---|---|"]
    others = ["| algorithm | beside | ratio of the rates | compiled |", "|---|---|---|---|"]
    for case in dict.fromkeys(line["case"] for line in lines if "programs" in line):
        found = [line for line in lines if line["case"] == case]
        if case.endswith("-peers"):
            ratios = {key: value for line in found for key, value in line["ratios"].items()}
            for other in dict.fromkeys(key.partition(" / ")[2] for key in ratios):
                cells = [_ratio(value) for key, value in ratios.items() if key.endswith(f" / {other}")]
                others.append(f"| {case.removesuffix('-peers')} | {other} | {' | '.join(cells)} |")
            continue
        times = ["", ""]
        for line in found:
            median, low, high = next(iter(line["ratios"].values()))
            times["compiled" in next(iter(line["ratios"]))] = _ratio([1 / median, 1 / high, 1 / low])
        mine, relative = next(line["programs"] for line in found if "gflop" in str(line)).items()
        name = relative[0].partition(" ")[0]
        rows.append(f"| {case} | {name} | {mine[1]['gflop'] / relative[1]['gflop']:.2f} | {' | '.join(times)} |")
    return "\n".join([*rows, "", *others]) + "\n"


def _ratio(values: list[float]) -> str:
    median, low, high = values
    return f"{median:.2f} ({low:.2f}\u2013{high:.2f})"


TABLES = {"shelf": shelf_table, "roofline": roofline_table, "compile": compile_table, "one_core": one_core_table,
          "scores": scores_table, "pairs": pairs_table}
"""Name of a file of results -> function that returns its table."""


def draw(env: str, cases: dict[str, Runs], path: Path) -> None:
    """Draw the mean return over env steps: of each seed for one algorithm, otherwise the mean of each algorithm.

    If processor times were measured, a second figure shows the return over them. The scale is logarithmic if some runs
    are much longer than others.
    """
    mpl.rcParams["svg.hashsalt"] = env
    timed = all("cpu_s" in run for runs in cases.values() for run in runs)
    figure, axes = plt.subplots(ncols=2 if timed else 1, figsize=(10 if timed else 6, 3), squeeze=False,
                                sharey=True, layout="constrained")
    styles = mpl.cycler(linestyle=["-", "--", ":"]) * mpl.cycler(color=mpl.color_sequences["tab10"])
    for index, label in enumerate(("env steps", "minutes of the processor")[:2 if timed else 1]):
        axis = axes[0, index]
        axis.set_prop_cycle(styles)
        for name, runs in _ranked(cases):
            times = [[point[index] / (60 if index else 1) for point in run["curve"]] for run in runs]
            returns = [[point[2] for point in run["curve"]] for run in runs]
            if len(cases) == 1:
                for run, at, values in zip(runs, times, returns, strict=True):
                    axis.plot(at, values, linewidth=1.2, label=f"seed {run['seed']}")
                continue
            at = np.linspace(max(found[0] for found in times), min(found[-1] for found in times), 100)
            values = np.array([np.interp(at, *curve) for curve in zip(times, returns, strict=True)])
            line, = axis.plot(at, values.mean(0), linewidth=1.2, label=name.partition("-")[0])
            axis.fill_between(at, values.min(0), values.max(0), alpha=0.1, color=line.get_color())
        ends = [run["curve"][-1][index] for runs in cases.values() for run in runs]
        axis.set(xlabel=label, xscale="log" if max(ends) > 3 * min(ends) else "linear")
        axis.xaxis.set_major_formatter(ScalarFormatter() if index else EngFormatter(sep=""))
    axes[0, 0].set(ylabel="return")
    figure.suptitle(env, fontsize=11)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize=8)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    """Read the results, and write the table and the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="file with results")
    source = parser.parse_args().source
    lines = [json.loads(line) for line in source.read_text().splitlines()]
    source.with_suffix(".md").write_text(TABLES[source.stem](lines))
    if source.stem == "scores":
        (source.parent / "scores_short.md").write_text(short_table(lines))
        for env, cases in _by_env(lines).items():
            draw(env, cases, source.parent / f"{re.sub('[/, ]+', '-', env).lower()}.svg")


if __name__ == "__main__":
    main()
