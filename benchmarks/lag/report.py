"""Make the tables and figures of the lag study's page from the results of `study.py`.

    python benchmarks/lag/report.py [docs/benchmarks/lag]

For each file of results, a table with the same name is written next to it, and, with results of all questions,
`claims.md` and `ranking.md`: published claims, and orders of corrections, beside what was found.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib as mpl
import numpy as np
from claims import claims_table, ranking_table
from study import OUT, QUESTIONS, results_of
from tables import (
    Runs,
    collapse_table,
    generation_table,
    grid_of,
    grouped,
    is_token,
    proximal_table,
    scores_table,
    table,
    tails_table,
    values,
    warnings_table,
)

from pytorchrl.analysis import estimate, iqm

mpl.use("svg")
from matplotlib import pyplot as plt

RIGHT = "share of right answers"


def cost_table(results: dict[str, Runs]) -> str:
    """Return the number of runs of each question, and the core hours that they took."""
    names = {"scores": "score against lag", "collapse": "learning rate times lag", "proximal": "proximal policies",
             "tails": "answers that take long", "generation": "weights that change within answers"}
    everything = {**results, "all": [line for lines in results.values() for line in lines]}
    return table(["question", "runs", "core hours"],
                 [[names.get(name, name), f"{len(lines):,}", f"{sum(line['cpu_s'] for line in lines) / 3600:.2f}"]
                  for name, lines in everything.items()])


def tables_of(results: dict[str, Runs]) -> dict[str, str]:
    """Return the tables by the name of their file; those that need results of a question without any are left out."""
    needed: dict[str, list[str]] = {
        "control": ["scores"], "warnings": ["collapse"], "claims": [*QUESTIONS], "ranking": ["scores"], "cost": []}
    made = {
        "scores": lambda: scores_table(results["scores"]),
        "control": lambda: scores_table(results["scores"], tokens=False),
        "collapse": lambda: collapse_table(results["collapse"]),
        "warnings": lambda: warnings_table(results["collapse"]),
        "proximal": lambda: proximal_table(results["proximal"]),
        "tails": lambda: tails_table(results["tails"]),
        "generation": lambda: generation_table(results["generation"]),
        "claims": lambda: claims_table(results),
        "ranking": lambda: ranking_table(results),
        "cost": lambda: cost_table(results),
    }
    found = {name: make() for name, make in made.items() if all(results[each] for each in needed.get(name, [name]))}
    return {name: text for name, text in found.items() if text.count("\n") > 2}


def draw_scores(lines: Runs, path: Path) -> None:
    """Draw the score of each correction over the lag, with intervals; the correction with the best end first."""
    groups = grouped([line for line in lines if is_token(line)], "correction", "lag")
    lags = sorted({lag for _, lag in groups})
    found = {name: [estimate(iqm, values(groups[name, lag]), bounds=(0.0, 1.0)) for lag in lags]
             for name in dict.fromkeys(name for name, _ in groups)}
    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    axis.set_prop_cycle(mpl.cycler(linestyle=["-", "--", ":"]) * mpl.cycler(color=mpl.color_sequences["tab10"][:5]))
    for name, estimates in sorted(found.items(), key=lambda item: -float(item[1][-1].value)):
        line, = axis.plot(range(len(lags)), [each.value for each in estimates], label=name)
        axis.fill_between(range(len(lags)), [each.low for each in estimates], [each.high for each in estimates],
                          alpha=0.1, color=line.get_color())
    axis.set(xlabel="lag in train batches", ylabel=RIGHT, xticks=range(len(lags)), xticklabels=lags)
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    _save(figure, path)


def draw_collapse(lines: Runs, path: Path) -> None:
    """Draw the mean score in the plane of lags and learning rates, for each correction."""
    names = list(dict.fromkeys(line["correction"] for line in lines))
    figure, axes = plt.subplots(ncols=len(names), figsize=(9, 3), sharey=True, layout="constrained", squeeze=False)
    for axis, name in zip(axes[0], names, strict=True):
        lags, rates, scores = grid_of(lines, name)
        image = axis.imshow(scores.mean(0).T, origin="lower", vmin=0, vmax=1, cmap="viridis", aspect="auto")
        axis.set(title=name, xlabel="lag in train batches", xticks=range(len(lags)), xticklabels=lags,
                 yticks=range(len(rates)), yticklabels=[f"{rate:.2g}" for rate in rates])
    axes[0, 0].set(ylabel="learning rate")
    figure.colorbar(image, ax=axes[0], label=RIGHT)
    _save(figure, path)


def draw_lengths(lines: Runs, path: Path, lag: int = 4) -> None:
    """Draw the share of the trained prompts that have at least n digits, for each policy."""
    figure, axis = plt.subplots(figsize=(6, 3.5), layout="constrained")
    groups = grouped([line for line in lines if line["lag"] == lag], "policy")
    longest = max(int(length) for line in lines for length in line["prompts"]) - 1
    sizes = np.arange(1, longest + 1)
    axis.plot(sizes, 1.0 / sizes, color="black", linewidth=3, alpha=0.3, label="drawn")
    for (policy,), runs in groups.items():
        shares = np.zeros(longest)
        for run in runs:
            for length, number in run["prompts"].items():
                shares[int(length) - 2] += number
        axis.plot(sizes, shares[::-1].cumsum()[::-1] / shares.sum(), label=policy)
    axis.set(xlabel="n digits", ylabel="share of prompts with at least n", xscale="log", yscale="log")
    axis.legend(frameon=False, fontsize=8)
    _save(figure, path)


def _save(figure: plt.Figure, path: Path) -> None:
    mpl.rcParams["svg.hashsalt"] = path.name
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    """Read the results, and write the tables and the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=OUT, help="folder of the results")
    folder = parser.parse_args().folder
    results = {name: results_of(name, folder) for name in QUESTIONS}
    for name, text in tables_of(results).items():
        (folder / f"{name}.md").write_text(text, encoding="utf-8")
    for name, draw in (("scores", draw_scores), ("collapse", draw_collapse), ("tails", draw_lengths)):
        if results[name]:
            draw(results[name], folder / f"{name}.svg")


if __name__ == "__main__":
    main()
