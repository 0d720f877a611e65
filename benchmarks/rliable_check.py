"""Compare the statistics of `pytorchrl.analysis` with those of rliable, on random scores and on the published scores.

    python -m venv rliable && rliable/bin/pip install rliable
    PYTHONPATH=. rliable/bin/python benchmarks/rliable_check.py [--fixture FILE.json]

The script needs rliable, which is best installed into a separate virtual environment. It prints one line of JSON per
pair of scores: the largest difference of point estimates, and the number of ends of percentile intervals that differ by
more than the error of two bootstraps with that many resamples. `--fixture` writes the scores and the results of rliable
to a file, which the unit tests read (`tests/unit/analysis/rliable.json`).
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
from results import print_result
from rliable import library, metrics

ROOT = Path(__file__).parent.parent
RESAMPLES = 5000
THRESHOLDS = (0.5, 1.0)
# The scores of a random policy, and scores near the best possible ones.
REFERENCES = {"CartPole-v1": (20, 500), "Pendulum-v1": (-1250, -150), "Acrobot-v1": (-500, -75),
              "LunarLander-v3": (-200, 270), "HalfCheetah-v5": (-280, 5000)}


def analysis() -> Any:
    """Return `pytorchrl.analysis`, without torch, which rliable's environment lacks."""
    package = types.ModuleType("pytorchrl")
    package.__path__ = [str(ROOT / "pytorchrl")]
    sys.modules.setdefault("pytorchrl", package)
    return importlib.import_module("pytorchrl.analysis")


def scores() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return pairs of scores of shape (runs, tasks): random ones, and the published ones (evaluated, in training)."""
    rng = np.random.default_rng(5)
    runs = json.loads((ROOT / "docs/benchmarks/scores.json").read_text())
    real = []
    for name in ("eval_return", "train_return"):
        columns = [[(run[name] - low) / (high - low) for run in runs if run["task"] == task]
                   for task, (low, high) in REFERENCES.items()]
        real.append(np.array(columns).T)
    return {"random": (rng.lognormal(size=(7, 6)).round(6), rng.normal(1, 1, size=(5, 6)).round(6)),
            "random, 26 tasks": (rng.normal(0.9, 1, size=(10, 26)).round(6), rng.normal(1, 1, size=(3, 26)).round(6)),
            "ties": (rng.integers(4, size=(6, 3)) / 2.0, rng.integers(4, size=(6, 3)) / 2.0),
            "published": (real[0].round(6), real[1].round(6))}


def by_rliable(first: np.ndarray, second: np.ndarray) -> dict[str, Any]:
    """Return the results of rliable: name -> (point estimate, low, high)."""
    single = {"iqm": metrics.aggregate_iqm, "median": metrics.aggregate_median, "mean": metrics.aggregate_mean,
              "optimality_gap": metrics.aggregate_optimality_gap,
              **{f"profile at {tau}": functools.partial(library.run_score_deviation, tau=tau) for tau in THRESHOLDS}}
    np.random.seed(0)  # noqa: NPY002 - rliable draws from the global generator
    point, interval = library.get_interval_estimates(
        {"x": first}, lambda x: np.array([function(x) for function in single.values()]), reps=RESAMPLES)
    pair_point, pair_interval = library.get_interval_estimates(
        {"x": (first, second)}, lambda a, b: np.array([metrics.probability_of_improvement(a, b)]), reps=RESAMPLES)
    values, ends = [*point["x"], *pair_point["x"]], np.hstack([interval["x"], pair_interval["x"]])
    return {name: [float(value), float(low), float(high)] for name, value, low, high in
            zip([*single, "probability_of_improvement"], values, *ends, strict=True)}


def differences(first: np.ndarray, second: np.ndarray, expected: dict[str, list[float]]) -> dict[str, Any]:
    """Compare the results of `pytorchrl.analysis` with `expected`."""
    ours = analysis()
    largest, wide = 0.0, []
    # Four standard errors of the difference between the tail probabilities of two bootstraps.
    tail, error = 0.025, 4 * (0.025 * 0.975 * 2 / RESAMPLES)**0.5
    for name, (value, low, high) in expected.items():
        samples = (first, second) if name == "probability_of_improvement" else (first,)
        if name.startswith("profile"):
            statistic = functools.partial(ours.performance_profile, thresholds=float(name.split()[-1]))
        else:
            statistic = getattr(ours, name)
        inner, outer = (
            ours.estimate(statistic, *samples, method="percentile", resamples=RESAMPLES, confidence=1 - 2 * of)
            for of in (tail + error, tail - error))
        largest = max(largest, abs(float(np.squeeze(inner.value)) - value))
        slack = 1e-9
        if not outer.low - slack <= low <= inner.low + slack or not inner.high - slack <= high <= outer.high + slack:
            wide.append(name)
    return {"largest_difference": largest, "intervals": len(expected), "intervals_beyond_bootstrap_error": wide}


def main() -> None:
    """Compare, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fixture", type=Path)
    options = parser.parse_args()
    cases = []
    for name, (first, second) in scores().items():
        expected = by_rliable(first, second)
        cases.append({"name": name, "scores": first.tolist(), "baseline": second.tolist(), "rliable": expected})
        print_result({"scores": name, "shape": first.shape, **differences(first, second, expected)}, indent=None)
    if options.fixture:
        text = ",\n".join(json.dumps(case) for case in cases)
        options.fixture.write_text(f'{{"resamples": {RESAMPLES}, "cases": [\n{text}\n]}}\n')


if __name__ == "__main__":
    main()
