"""The tables of the lag study, one function per question; each takes the lines of its file of results."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pytorchrl.analysis import estimate, iqm, mean

Line = dict[str, Any]
Runs = list[Line]
Array = npt.NDArray[np.float64]
Found = tuple[float, float, float]
"""A number, and its 95 % interval."""

WARNINGS = {"ess": ("effective sample size", -1), "kl": ("KL divergence", 1), "clipped": ("share clipped", 1),
            "entropy": ("entropy", -1), "cosine": ("cosine of consecutive gradients", 1)}
"""Diagnostic -> its name, and 1 if large values warn, -1 if small ones do."""
FALSE_ALARMS = 0.05
_RESAMPLES = 2000


def grouped(lines: Runs, *names: str) -> dict[tuple[Any, ...], Runs]:
    """Return the lines by the values of some of their settings, each group in the order of the seeds."""
    found: dict[tuple[Any, ...], Runs] = defaultdict(list)
    for line in sorted(lines, key=lambda line: int(line["seed"])):
        found[tuple(line[name] for name in names)].append(line)
    return dict(found)


def values(runs: Runs, name: str = "right") -> list[float]:
    """Return a result of each run."""
    return [float(run[name]) for run in runs]


def cell(scores: Sequence[float], spec: str = ".2f", top: float = 1.0) -> str:
    """Return the interquartile mean of scores with its 95 % interval."""
    return f"{estimate(iqm, scores, bounds=(0.0, top)):{spec}}"


def shown(found: Found) -> str:
    """Return a number with its interval as text."""
    number, low, high = found
    return "not known" if np.isnan(number) else f"{number:.2f} [{low:.2f}, {high:.2f}]"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)) + "\n"


def is_token(line: Line) -> bool:
    """Return whether a run was one on a token task."""
    return bool(line["task"])


def scores_table(lines: Runs, *, tokens: bool = True) -> str:
    """Return the scores of each correction at each lag; the corrections with the highest score at most lag first."""
    chosen = [line for line in lines if is_token(line) == tokens]
    groups, lags = grouped(chosen, "correction", "lag"), sorted({line["lag"] for line in chosen})
    names = sorted({name for name, _ in groups}, key=lambda name: (-float(iqm(values(groups[name, lags[-1]]))), name))
    spec, top = (".2f", 1.0) if tokens else (".0f", 500.0)
    return table(["correction", *(f"lag {lag}" for lag in lags)],
                 [[name, *(cell(values(groups[name, lag]), spec, top) for lag in lags)] for name in names])


def grid_of(lines: Runs, correction: str) -> tuple[list[int], list[float], Array]:
    """Return the lags, the learning rates, and the scores (seeds, lags, rates) of a correction."""
    groups = grouped([line for line in lines if line["correction"] == correction], "lag", "lr")
    lags, rates = sorted({lag for lag, _ in groups}), sorted({lr for _, lr in groups})
    return lags, rates, np.array([[values(groups[lag, lr]) for lr in rates] for lag in lags]).transpose(2, 0, 1)


def boundary(rates: Sequence[float], means: Array, level: float) -> float:
    """Return the learning rate, beyond the best one, at which the mean score falls below `level`; infinity if none."""
    best = int(means.argmax())
    for place in range(best, len(rates) - 1):
        if means[place] >= level > means[place + 1]:
            share = (means[place] - level) / (means[place] - means[place + 1])
            return float(np.exp(np.log(rates[place]) + share * np.log(rates[place + 1] / rates[place])))
    return float("inf")


def boundaries(lags: Sequence[int], rates: Sequence[float], scores: Array) -> tuple[list[float], float]:
    """Return the boundary at each lag, and the slope of its logarithm over that of the lag.

    The score at a boundary is half the best mean score without lag. The slope is that of the least squares line through
    the boundaries of lags from 1, and NaN if fewer than three of these exist.
    """
    means = scores.mean(0)
    found = [boundary(rates, row, float(means[0].max()) / 2) for row in means]
    points = [(lag, rate) for lag, rate in zip(lags, found, strict=True) if lag and np.isfinite(rate)]
    if len(points) < 3:
        return found, float("nan")
    return found, float(np.polyfit(*np.log(points).T, 1)[0])


def slope_of(lags: Sequence[int], rates: Sequence[float], scores: Array) -> Found:
    """Return the slope of `boundaries` and its 95 % interval, by resampling the seeds."""
    rng = np.random.default_rng(0)
    drawn = [boundaries(lags, rates, scores[rng.integers(len(scores), size=len(scores))])[1]
             for _ in range(_RESAMPLES)]
    low, high = np.nanquantile(drawn, [0.025, 0.975])
    return boundaries(lags, rates, scores)[1], float(low), float(high)


def collapse_table(lines: Runs) -> str:
    """Return the largest tolerated learning rate at each lag, and the slope of its logarithm over that of the lag."""
    rows = []
    for name in dict.fromkeys(line["correction"] for line in lines):
        lags, rates, scores = grid_of(lines, name)
        found, _ = boundaries(lags, rates, scores)
        cells = [f"{1e3 * rate:.1f}" if np.isfinite(rate) else f"> {1e3 * rates[-1]:.0f}" for rate in found]
        rows.append([name, *cells, shown(slope_of(lags, rates, scores))])
    return table(["correction", *(f"lag {lag}" for lag in lags), "slope"], rows)


def collapse_of(run: Line) -> int | None:
    """Return the number of the written update at which the return has fallen below half its maximum; None if never."""
    returns = np.array(run["updates"]["return"])
    fallen = np.flatnonzero(returns < np.maximum.accumulate(returns) / 2)
    return int(fallen[0]) if len(fallen) else None


def warnings_of(lines: Runs) -> dict[str, tuple[float, list[float]]]:
    """Return, for each diagnostic, its threshold, and by how many train batches it warned of each collapse.

    With the threshold, 5 % of the runs without a collapse would alarm. A collapse without a warning counts as 0.
    """
    collapses = [(run, collapse_of(run)) for run in lines]
    found = {}
    for name, (_, sign) in WARNINGS.items():
        healthy = [max(sign * value for value in run["updates"][name]) for run, end in collapses if end is None]
        threshold = float(np.quantile(healthy, 1 - FALSE_ALARMS))
        leads = []
        for run, end in collapses:
            if end is not None:
                alarms = np.flatnonzero(sign * np.array(run["updates"][name])[:end] > threshold)
                leads.append(float(end - alarms[0]) * every(run) if len(alarms) else 0.0)
        found[name] = sign * threshold, leads
    return found


def every(run: Line) -> float:
    """Return the distance of written updates, in train batches."""
    return float(run["batches"] / len(run["updates"]["return"]))


def warnings_table(lines: Runs) -> str:
    """Return how early, and how often, each diagnostic warned of a collapse."""
    found = warnings_of(lines)
    rows = [[WARNINGS[name][0], f"{'<' if WARNINGS[name][1] < 0 else '>'} {threshold:.3g}",
             f"{estimate(mean, [float(lead > 0) for lead in leads], bounds=(0.0, 1.0)):.0%}",
             f"{np.median(leads):.0f}", f"{estimate(mean, leads):.1f}"]
            for name, (threshold, leads) in sorted(found.items(), key=lambda item: -float(np.mean(item[1][1])))]
    return table(["diagnostic", "alarm if", "collapses with a warning", "median lead", "mean lead"], rows)


def proximal_table(lines: Runs) -> str:
    """Return the scores with exact and approximated proximal policies, and the errors of the approximations."""
    names = {"decoupled": ("exact", None), "a3po": ("interpolated (A-3PO)", "a3po_error"),
             "recomputed": ("exact, but no weight p / \u03bc", "no_weight_error"),
             "ppo": ("behavior policy (PPO)", "no_weight_error")}
    rows = []
    for (lag, name), runs in sorted(grouped(lines, "lag", "correction").items(),
                                    key=lambda item: (item[0][0], list(names).index(item[0][1]))):
        label, error = names[name]
        errors = [run["errors"] for run in runs]
        rows.append([str(lag), label, cell(values(runs)),
                     f"{estimate(mean, [one['weight'] for one in errors]):.3f}",
                     f"{estimate(mean, [one[error] for one in errors]):.3f}" if error else "0"])
    return table(["lag", "proximal policy", "right answers", "mean of p / \u03bc", "mean error of the weight"], rows)


def shares(prompts: dict[str, int]) -> Array:
    """Return the distribution of lengths that a run was trained on, from 1 digit."""
    counts = np.array([prompts.get(str(length + 1), 0) for length in range(1, max(map(int, prompts)))], np.float64)
    return counts / counts.sum()


def distance(prompts: dict[str, int], longest: int) -> float:
    """Return the Kolmogorov-Smirnov distance of the lengths of prompts from P(n >= m) = 1 / m, cut off at `longest`."""
    at_least = np.array([1.0 / (length + 1) for length in range(1, longest)] + [0.0])
    trained = np.zeros(longest)
    found = shares(prompts)
    trained[:len(found)] = found
    return float(np.abs(trained.cumsum() - (1.0 - at_least)).max())


def right_of(run: Line, least: int) -> float:
    """Return the share of right answers among the prompts of at least `least` digits."""
    counts = [pair for length, pair in run["by_length"].items() if int(length) > least]
    return sum(right for _, right in counts) / sum(number for number, _ in counts)


LONGEST, LONG = 12, 6


def tails_table(lines: Runs) -> str:
    """Return what each way to treat long answers costs, and how far the trained lengths are from those drawn."""
    rows = []
    for (lag, policy), runs in sorted(grouped(lines, "lag", "policy").items()):
        dropped = [sum(run["dropped"].values()) / run["tokens"] for run in runs]
        rows.append([str(lag), policy, f"{estimate(mean, values(runs, 'trained_per_s')):,.0f}",
                     f"{estimate(mean, dropped):.0%}",
                     f"{estimate(mean, [distance(run['prompts'], LONGEST) for run in runs]):.3f}",
                     cell(values(runs)), cell([right_of(run, LONG) for run in runs])])
    return table(["lag", "policy", "trained tokens per simulated second", "dropped", "distance of lengths",
                  "right answers", f"of prompts from {LONG} digits"], rows)


def generation_table(lines: Runs) -> str:
    """Return the errors of log-probabilities, and the scores, for each value of `on_new_weights`."""
    rows = []
    for (lag, mode), runs in sorted(grouped(lines, "lag", "mode").items()):
        errors = [run["errors"]["logp_error"] for run in runs]
        rows.append([str(lag), f"`{mode}`", f"{estimate(mean, errors):.2g}",
                     f"{estimate(mean, [run['lag_mean']['generation'] for run in runs]):.2f}",
                     f"{estimate(mean, [sum(run['dropped'].values()) / run['tokens'] for run in runs]):.0%}",
                     f"{estimate(mean, [run['recomputed'] / run['tokens'] for run in runs]):.2f}",
                     cell(values(runs))])
    return table(["lag", "`on_new_weights`", "mean error of the log-probability", "lag from generation", "dropped",
                  "recomputed per generated token", "right answers"], rows)
