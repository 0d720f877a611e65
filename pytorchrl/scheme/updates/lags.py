"""Count lags; a lag is the number of updates between the production and the use of data."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

import numpy as np

from pytorchrl.files.atomic import saved_int
from pytorchrl.scheme.transport.messages import Gradients, Report

_PHASES = ("collect", "queue", "replay")
_CAUSES = ("generation", "queue", "first_use", "passes")
"""Causes of the lag of env steps, and `first_use`, the sum of the first two."""


class Lags:
    """Histograms of the lags of rollouts and gradients since the start of the run. This class is not thread-safe."""

    def __init__(self) -> None:
        self._policy: Counter[int] = Counter()
        # Key: phase in `_PHASES`. Value: number of updates during the phase, summed over all rollouts and replay items.
        self._phases: Counter[str] = Counter()
        self._gradients: Counter[int] = Counter()
        # Env steps by the lag at their first use and by its parts, and samples by the updates since their first use.
        self._steps: dict[str, Counter[int]] = {cause: Counter() for cause in _CAUSES}
        # Key: gradient worker and collection worker. Data from replay are not counted here.
        self._by_worker: defaultdict[tuple[int, int], Counter[int]] = defaultdict(Counter)

    def receive(self, gradient_worker: int, report: Report) -> None:
        """Count the lags of the data from which a gradient worker computed gradients."""
        for worker, lag_queued, lag_used in report.lags:
            self._policy[lag_used] += 1
            self._by_worker[gradient_worker, worker][lag_used] += 1
            self._phases["collect"] += lag_queued
            self._phases["queue"] += lag_used - lag_queued
        for (generation, queue), steps in report.step_lags.items():
            for cause, lag in zip(_CAUSES, (generation, queue, generation + queue), strict=False):
                self._steps[cause][lag] += steps
        self._steps["passes"].update(report.pass_lags)
        for lags in report.drawn_lags:
            sent, drawn = lags.T.tolist()
            self._policy.update(drawn)
            self._phases.update(collect=sum(sent), replay=sum(drawn) - sum(sent))

    def apply(self, gradients: Gradients, version: int) -> None:
        """Count the lag of a gradient that is applied to weights of this version."""
        self._gradients[version - gradients.weights_version] += 1

    def metrics(self) -> dict[str, object]:
        """Return summaries and histograms of the lags, by name of the metric."""
        num_lags = max(1, self._policy.total())
        return {"policy_lag": summary(self._policy),
                **{f"policy_lag_{phase}_mean": self._phases[phase] / num_lags for phase in _PHASES},
                "policy_lag_histogram": binned(self._policy), "grad_lag": summary(self._gradients),
                "step_lag": {cause: summary(histogram) for cause, histogram in self._steps.items()}}

    def of_worker(self, parent: int, worker: int) -> dict[str, float] | None:
        """Return summary statistics of the lags of one collection worker's rollouts; None if no lag was counted.

        Data from replay are left out, because their lags are counted only for all workers together.

        Args:
            parent: Index of the gradient worker.
            worker: Index of its collection worker.
        """
        histogram = self._by_worker.get((parent, worker))
        return summary(histogram) if histogram else None

    def state(self) -> dict[str, dict[int, int] | dict[str, int]]:
        """Return the state for a checkpoint."""
        return {"lags": dict(self._policy), "lag_parts": dict(self._phases), "grad_lags": dict(self._gradients),
                **{f"step_lags_{cause}": dict(histogram) for cause, histogram in self._steps.items()}}

    def restore(self, state: Mapping[str, Mapping[int, int] | Mapping[str, int]]) -> None:
        """Restore a saved state."""
        self._policy = _restored(state["lags"])
        self._phases = Counter({str(phase): saved_int(count) for phase, count in state["lag_parts"].items()})
        self._gradients = _restored(state["grad_lags"])
        self._steps = {cause: _restored(state[f"step_lags_{cause}"]) for cause in _CAUSES}


def _restored(histogram: Mapping[int, int] | Mapping[str, int]) -> Counter[int]:
    """Convert a saved histogram to a counter; raise an error if a count is not a positive integer."""
    found = Counter({int(lag): saved_int(count) for lag, count in histogram.items()})
    if found and min(found.values()) < 1:
        raise ValueError(f"a histogram of lags must have positive counts, got {histogram!r:.100}")
    return found


def summary(histogram: Mapping[int, int]) -> dict[str, float]:
    """Return the mean, maximum, median and 90 % quantile (nearest rank) of a histogram; 0 if the histogram is empty."""
    if not histogram:
        return {"mean": 0.0, "max": 0, "p50": 0, "p90": 0}
    values = np.array(sorted(histogram))
    counts = np.array([histogram[int(value)] for value in values])
    cumulated = counts.cumsum()
    p50, p90 = (int(values[np.searchsorted(cumulated, q * cumulated[-1])]) for q in (0.5, 0.9))
    return {"mean": float((values * counts).sum() / cumulated[-1]), "max": int(values[-1]), "p50": p50, "p90": p90}


def binned(histogram: Mapping[int, int]) -> list[tuple[int, int]]:
    """Return (smallest lag, count) of each non-empty bin, in order.

    The bins are 0, 1, 2 to 3, 4 to 7, 8 to 15, and so on, so that their number stays small for lags of any size.
    """
    bins: Counter[int] = Counter()
    for lag, count in histogram.items():
        bins[1 << (lag.bit_length() - 1) if lag > 0 else 0] += count
    return sorted(bins.items())
