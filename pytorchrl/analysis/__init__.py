"""Statistics over runs: aggregates of scores, confidence intervals, comparisons, and summaries of learning curves.

The functions read scores or the directories of runs. SciPy is imported only when a function needs it.
"""

from __future__ import annotations

from pytorchrl.analysis.aggregates import (
    STATISTICS,
    area_under_curve,
    difference,
    iqm,
    mean,
    median,
    normalize,
    optimality_gap,
    performance_profile,
    probability_of_improvement,
)
from pytorchrl.analysis.bootstrap import Estimate, estimate
from pytorchrl.analysis.comparison import Comparison, compare, required_seeds
from pytorchrl.analysis.curves import on_grid, smooth, summarize_curves, without_steps
from pytorchrl.analysis.grouping import group_runs
from pytorchrl.analysis.runs import Run, Scores, read_curve, read_run, read_scores

__all__ = [
    "STATISTICS", "Comparison", "Estimate", "Run", "Scores", "area_under_curve", "compare", "difference", "estimate",
    "group_runs", "iqm", "mean", "median", "normalize", "on_grid", "optimality_gap", "performance_profile",
    "probability_of_improvement", "read_curve", "read_run", "read_scores", "required_seeds", "smooth",
    "summarize_curves", "without_steps",
]
