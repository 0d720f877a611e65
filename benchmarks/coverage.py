"""Measure how often confidence intervals of `pytorchrl.analysis` contain the true value.

    python benchmarks/coverage.py [--trials 400] [--seeds 3,5,10] [--tasks 1,5,20] [--methods t,percentile]
    python benchmarks/coverage.py --table docs/benchmarks/coverage.jsonl

The scores of the tasks have different means and spreads. They are normally distributed, lognormal (skewed) or from two
clusters: 30 % of the runs fail. The true value of a statistic is that of 200,000 runs. For each distribution, number of
seeds, number of tasks and method, the script prints one line of JSON with the percentage of intervals that contain the
true value, for each statistic, for the difference of two groups, and for the probability of improvement. The standard
error of each percentage is about 1.1 with 400 trials. `--table` prints the Markdown table of the documentation from
earlier results.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from results import print_result

from pytorchrl.analysis import STATISTICS, compare, estimate, optimality_gap

Sampler = Callable[[np.random.Generator, tuple[int, int]], np.ndarray]
# Samplers of deviations from the mean, in units of the spread of a task.
DISTRIBUTIONS: dict[str, Sampler] = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "lognormal": lambda rng, shape: rng.lognormal(0.0, 0.5, shape) - 1.0,
    "two clusters": lambda rng, shape: (np.where(rng.random(shape) < 0.3, -1.5, 0.6)
                                        + 0.3 * rng.standard_normal(shape)),
}
RESAMPLES = 1000


def draw(sampler: Sampler, rng: np.random.Generator, seeds: int, tasks: int, shift: float = 0.0) -> np.ndarray:
    """Return scores of shape (seeds, tasks)."""
    return np.linspace(0.2, 1.0, tasks) + shift + np.linspace(0.1, 0.3, tasks) * sampler(rng, (seeds, tasks))


def measure(name: str, seeds: int, tasks: int, method: str, trials: int) -> dict[str, Any]:
    """Return the coverage of each statistic in percent."""
    sampler, large = DISTRIBUTIONS[name], np.random.default_rng(0)
    first = draw(sampler, large, 200_000, tasks, shift=0.1)
    second = draw(sampler, large, 200_000, tasks)
    statistics = {**STATISTICS, "optimality_gap": optimality_gap}
    true = {of: float(statistic(first)) for of, statistic in statistics.items()}
    true["iqm_difference"] = true["iqm"] - float(STATISTICS["iqm"](second))
    true["probability_of_improvement"] = float(((first > second) + 0.5 * (first == second)).mean())
    hits, rng = dict.fromkeys(true, 0), np.random.default_rng(1)
    for trial in range(trials):
        scores, baseline = draw(sampler, rng, seeds, tasks, shift=0.1), draw(sampler, rng, seeds, tasks)
        found = {of: estimate(statistic, scores, method=method, resamples=RESAMPLES, seed=trial)
                 for of, statistic in statistics.items()}
        both = compare(scores, baseline, method=method, resamples=RESAMPLES, seed=trial)
        found |= {"iqm_difference": both.difference, "probability_of_improvement": both.improvement}
        for of, one in found.items():
            hits[of] += bool(one.low <= true[of] <= one.high)
    return {"distribution": name, "seeds": seeds, "tasks": tasks, "method": method, "trials": trials,
            "coverage": {of: round(100 * count / trials, 1) for of, count in hits.items()}}


def table(lines: list[dict[str, Any]]) -> str:
    """Return a Markdown table with one row per distribution, number of seeds and number of tasks."""
    columns = {"iqm": "IQM", "mean": "mean", "median": "median", "optimality_gap": "optimality gap",
               "iqm_difference": "difference of IQM", "probability_of_improvement": "P(improvement)"}
    rows = [f"| scores | seeds | tasks | {' | '.join(columns.values())} | IQM, percentile | mean, percentile |",
            "|---" * (len(columns) + 5) + "|"]
    found = {(line["distribution"], line["seeds"], line["tasks"], line["method"]): line["coverage"] for line in lines}
    for (name, seeds, tasks, method), coverage in found.items():
        if method == "t":
            other = found[name, seeds, tasks, "percentile"]
            values = [*(coverage[column] for column in columns), other["iqm"], other["mean"]]
            rows.append(f"| {name} | {seeds} | {tasks} | {' | '.join(f'{value:.0f}' for value in values)} |")
    return "\n".join(rows)


def main() -> None:
    """Parse the command line, measure, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=400)
    parser.add_argument("--seeds", default="3,5,10")
    parser.add_argument("--tasks", default="1,5,20")
    parser.add_argument("--methods", default="t,percentile")
    parser.add_argument("--distributions", default=",".join(DISTRIBUTIONS))
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    if options.table:
        print(table([json.loads(line) for line in options.table.read_text().splitlines()]))
        return
    lists = (options.distributions.split(","), map(int, options.seeds.split(",")), map(int, options.tasks.split(",")),
             options.methods.split(","))
    for name, seeds, tasks, method in itertools.product(*lists):
        print_result(measure(name, seeds, tasks, method, options.trials), indent=None)


if __name__ == "__main__":
    main()
