"""Published claims and practices for data of older policies, and what the lag study finds on each of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from tables import LONG as LONG_PROMPT
from tables import WARNINGS, Found, Runs, grid_of, grouped, right_of, shown, slope_of, table, values, warnings_of

from pytorchrl.analysis import compare, mean

Results = Mapping[str, Runs]
"""The lines of each question."""
EQUAL = 0.05
"""Scores that differ by less are called equal."""
HIGH = 16


@dataclass(frozen=True)
class Claim:
    """A published claim.

    Attributes:
        text: The claim.
        source: Authors and year, with a link.
        measure: What is measured here.
        find: Function from the results to the number and its interval.
        value: The number of the claim; None: a number above 0.
        tolerance: Distance from `value` that still agrees with the claim.
        order: The corrections with the higher and with the lower score, if the claim is about two of them.
    """

    text: str
    source: str
    measure: str
    find: Callable[[Results], Found]
    value: float | None = None
    tolerance: float = EQUAL
    order: tuple[str, str] | None = None

    def verdict(self, found: Found) -> str:
        """Return whether the claim holds here, as far as the interval tells."""
        number, low, high = found
        if not np.isfinite([number, low, high]).all():
            return "not decided"
        low_end, high_end = (0.0, np.inf) if self.value is None else (
            self.value - self.tolerance, self.value + self.tolerance)
        if low >= low_end and high <= high_end:
            return "holds"
        return "does not hold" if high <= low_end or low >= high_end else "not decided"


def _scores(question: str, **settings: object) -> Callable[[Results], list[float]]:
    def of(results: Results) -> list[float]:
        names = tuple(settings)
        lines = [line for line in results[question] if line["task"]]
        return values(grouped(lines, *names)[tuple(settings[name] for name in names)])
    return of


def _difference(first: Callable[[Results], list[float]], second: Callable[[Results], list[float]],
                ) -> Callable[[Results], Found]:
    return lambda results: _mean_difference(first(results), second(results))


def _mean_difference(first: list[float], second: list[float]) -> Found:
    found = compare(first, second, statistic=mean, paired=True).difference
    return float(found.value), float(found.low), float(found.high)


def _between(first: str, second: str, lag: int = HIGH, second_lag: int | None = None) -> Callable[[Results], Found]:
    return _difference(_scores("scores", correction=first, lag=lag),
                       _scores("scores", correction=second, lag=lag if second_lag is None else second_lag))


def _slope(correction: str) -> Callable[[Results], Found]:
    return lambda results: slope_of(*grid_of(results["collapse"], correction))


def _lead(first: str) -> Callable[[Results], Found]:
    """Return the lead of a warning before the best of the others, in train batches."""
    def find(results: Results) -> Found:
        leads = {name: lead for name, (_, lead) in warnings_of(results["collapse"]).items()}
        best = max((name for name in WARNINGS if name != first), key=lambda name: float(np.mean(leads[name])))
        return _mean_difference(leads[first], leads[best])
    return find


def _long(policy: str) -> Callable[[Results], list[float]]:
    return lambda results: [right_of(run, LONG_PROMPT)
                            for run in grouped(results["tails"], "policy", "lag")[policy, 4]]


def _order(better: str, worse: str, text: str, source: str) -> Claim:
    return Claim(text, source, f"{better} minus {worse}, lag {HIGH}", _between(better, worse), order=(better, worse))


CLAIMS = (
    Claim("Old data make PPO's clip worse", "[Zheng et al. 2025](https://arxiv.org/abs/2510.01161)",
          f"ppo: lag 0 minus lag {HIGH}", _between("ppo", "ppo", 0, HIGH)),
    Claim("A second-moment bound makes old data as good as new ones",
          "[Zheng et al. 2025](https://arxiv.org/abs/2510.01161)",
          f"m2po at lag {HIGH} minus ppo at lag 0", _between("m2po", "ppo", HIGH, 0), 0.0),
    Claim("An interpolated proximal policy is as good as the exact one",
          "[Li et al. 2025](https://arxiv.org/abs/2512.06547)", f"a3po minus decoupled, lag {HIGH}",
          _between("a3po", "decoupled"), 0.0),
    _order("m2po", "ppo", "On old data, a second-moment bound is better than PPO's clip",
           "[Zheng et al. 2025](https://arxiv.org/abs/2510.01161)"),
    _order("decoupled", "ppo", "On old data, a decoupled objective is better than PPO's",
           "[Fu et al. 2025](https://arxiv.org/abs/2505.24298)"),
    _order("gspo", "ppo", "A clip of the sequence's ratio is better than one of each token's",
           "[Zheng et al. 2025](https://arxiv.org/abs/2507.18071)"),
    _order("cispo", "ppo", "Clipped weights are better than clipped steps",
           "[MiniMax 2025](https://arxiv.org/abs/2506.13585)"),
    _order("tis", "none", "Truncated weights of tokens are better than no correction",
           "[Fang and Khazi 2025](https://www.llmdata.com/blog/mismatch-praxis)"),
    _order("icepop", "tis", "Masked weights are more stable than truncated ones",
           "[Ling Team 2025](https://arxiv.org/abs/2510.18855)"),
    _order("ipo", "icepop", "A mask of probabilities is better than one of ratios",
           "[Prime Intellect 2026](https://docs.primeintellect.ai/prime-rl/ipo)"),
    _order("mis_sequence", "mis", "Masks of whole sequences are more stable than those of tokens",
           "[Liu et al. 2025](https://richardli.xyz/rl-collapse)"),
    _order("mis_sequence", "tis_sequence", "Masked weights of sequences are more stable than truncated ones",
           "[Liu et al. 2025](https://richardli.xyz/rl-collapse)"),
    Claim("The largest learning rate falls as 1 / lag", "[2607.01083](https://arxiv.org/abs/2607.01083)",
          "slope of the boundary, ppo", _slope("ppo"), -1.0, 0.25),
    Claim("The effective sample size warns first", "[2602.17616](https://arxiv.org/abs/2602.17616)",
          "lead over the best other diagnostic, in train batches",
          _lead("ess")),
    Claim("Aligned consecutive gradients warn first", "[2603.01501](https://arxiv.org/abs/2603.01501)",
          "lead over the best other diagnostic, in train batches",
          _lead("cosine")),
    Claim("Without the log-probabilities of the behavior policy, a decoupled objective is worse",
          "[2605.12070](https://arxiv.org/abs/2605.12070)", f"decoupled minus recomputed, lag {HIGH}, 4 passes",
          _difference(_scores("proximal", correction="decoupled", lag=HIGH),
                      _scores("proximal", correction="recomputed", lag=HIGH))),
    Claim("Keys and values of old weights do no harm",
          "[SkyRL](https://github.com/NovaSky-AI/SkyRL/pull/1798)", "keep minus recompute, lag 4",
          _difference(_scores("generation", mode="keep", lag=4), _scores("generation", mode="recompute", lag=4)), 0.0),
    Claim("Nothing need be discarded: old first is as good as dropping",
          "[tinker-cookbook](https://github.com/thinking-machines-lab/tinker-cookbook/pull/822)",
          "oldest minus drop, lag 4, right answers",
          _difference(_scores("tails", policy="oldest", lag=4), _scores("tails", policy="drop", lag=4)), 0.0),
    Claim("Sequences that take long can be cancelled", "[TRL](https://github.com/huggingface/trl/pull/7176)",
          f"cancel minus keep, lag 4, prompts from {LONG_PROMPT} digits", _difference(_long("cancel"), _long("keep")),
          0.0),
)


def claims_table(results: Results) -> str:
    """Return the claims with the numbers found here, and verdicts."""
    rows = []
    for claim in CLAIMS:
        found = claim.find(results)
        rows.append([claim.text, claim.source, claim.measure, shown(found), claim.verdict(found)])
    return table(["claim or practice", "source", "measured here", "found", "verdict"], rows)


def ranking_table(results: Results) -> str:
    """Return the published orders of two corrections, and the differences found here at several lags."""
    lags = (4, 8, HIGH)
    rows, agreeing = [], dict.fromkeys(lags, 0)
    orders = [claim for claim in CLAIMS if claim.order is not None]
    for claim in orders:
        assert claim.order is not None
        found = {lag: _between(*claim.order, lag)(results) for lag in lags}
        for lag, difference in found.items():
            agreeing[lag] += difference[0] > 0
        rows.append([*claim.order, claim.source, *map(shown, found.values())])
    rows.append(["same order here", "", "", *(f"{number} of {len(orders)}" for number in agreeing.values())])
    return table(["better", "worse", "source", *(f"difference here, lag {lag}" for lag in lags)], rows)
