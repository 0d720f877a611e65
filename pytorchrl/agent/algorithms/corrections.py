"""Corrections for the lag of data: losses that learn from actions of older policies.

Symbols: pi is the current policy; mu is the policy that drew an action (the behavior policy); p is the policy just
before the first update with the data (the proximal policy); A is the advantage; sg() stops the gradient. A correction
returns the surrogate of each step, whose mean is maximized. Steps are single actions, or tokens of an answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from pytorchrl.agent.options import Options, option
from pytorchrl.errors import ConfigError, Problem
from pytorchrl.support.untyped import Numeric, UserPart


class Steps(NamedTuple):
    """The steps of a batch; all tensors have the shape (B,), or (L, B) for B sequences of at most L steps."""

    logp: Tensor
    """log pi(a|o), with gradient."""
    behavior: Tensor
    """log mu(a|o)."""
    proximal: Tensor
    """log p(a|o); the same as `behavior` unless the correction needs it."""
    advantage: Tensor
    """A."""
    valid: Tensor
    """bool; false for padding."""
    lag: Tensor
    """Number of updates between mu and pi, int64."""

    def ratio(self, of: Tensor | None = None, to: Tensor | None = None) -> Tensor:
        """Return exp(of - to), by default pi / mu; 1 where steps are not valid."""
        log_ratio = (self.logp if of is None else of) - (self.behavior if to is None else to)
        return torch.where(self.valid, log_ratio, 0.0).exp()


class Bounds(NamedTuple):
    """The bounds of a correction; see `CorrectionOptions` and `PPO.Options.clip_param`."""

    clip_param: Numeric
    max_weight: UserPart
    min_weight: UserPart
    max_shift: UserPart
    max_moment: UserPart


Corrected = tuple[Tensor, Tensor]
"""The surrogate of each step, and whether the step is clipped, truncated or masked (float, 0 or 1)."""
Correction = Callable[[Steps, Bounds], Corrected]


@dataclass(frozen=True)
class Entry:
    """A registered correction.

    Attributes:
        function: The correction.
        source: Authors and year.
        needs_proximal: Whether it uses `Steps.proximal`.
        needs_lag: Whether it uses `Steps.lag`.
        of_sequence: Whether it needs whole sequences.
        bounds: The fields of `Bounds` that it uses, with their defaults; `clip_param` is an option of the algorithm.
    """

    function: Correction
    source: str
    needs_proximal: bool
    needs_lag: bool
    of_sequence: bool
    bounds: Mapping[str, float | None]


_entries: dict[str, Entry] = {}
CORRECTIONS = MappingProxyType(_entries)
"""All corrections by name."""


def correction(
    name: str, source: str = "", *, needs_proximal: bool = False, needs_lag: bool = False, of_sequence: bool = False,
    **bounds: float | None,
) -> Callable[[Correction], Correction]:
    """Register the decorated function as a correction with this name; see `Entry` for the arguments."""
    if unknown := bounds.keys() - set(Bounds._fields):
        raise ConfigError(f"bounds must be some of {', '.join(Bounds._fields)}, got {', '.join(sorted(unknown))}")

    def register(function: Correction) -> Correction:
        _entries[name] = Entry(function, source, needs_proximal, needs_lag, of_sequence, MappingProxyType(bounds))
        return function

    return register


def _clipped(ratio: Tensor, advantage: Tensor, clip: Numeric) -> Corrected:
    """Return PPO's clipped surrogate, and whether the ratio is clipped."""
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(1.0 - clip, 1.0 + clip) * advantage)
    return surrogate, ((ratio.detach() - 1.0).abs() > clip).float()


def _over_sequence(values: Tensor, valid: Tensor) -> Tensor:
    """Return the sum of the valid entries of each sequence (L, B), at each of its steps."""
    return torch.where(valid, values, 0.0).sum(0, keepdim=True).expand_as(values)


@correction("none", "Williams 1992")
def none(steps: Steps, bounds: Bounds) -> Corrected:
    """Ignore the lag: pi / sg(pi) * A, whose gradient is A * grad log pi."""
    return steps.ratio(to=steps.logp.detach()) * steps.advantage, torch.zeros_like(steps.logp)


@correction("ppo", "Schulman et al. 2017, equation 7", clip_param=None)
def ppo(steps: Steps, bounds: Bounds) -> Corrected:
    """Clip the ratio r = pi / mu: min(r * A, clip(r, 1 - c, 1 + c) * A)."""
    return _clipped(steps.ratio(), steps.advantage, bounds.clip_param)


@correction("gspo", "Zheng et al. 2025, equations 5 and 7", of_sequence=True, clip_param=None)
def gspo(steps: Steps, bounds: Bounds) -> Corrected:
    """Clip the geometric mean of the ratios of a sequence, s = exp(mean(log pi - log mu)), as PPO clips r."""
    lengths = _over_sequence(torch.ones_like(steps.logp), steps.valid).clamp(min=1.0)
    mean = _over_sequence(steps.logp - steps.behavior, steps.valid) / lengths
    return _clipped(mean.exp(), steps.advantage, bounds.clip_param)


@correction("cispo", "MiniMax 2025, equations 4 and 5", clip_param=None)
def cispo(steps: Steps, bounds: Bounds) -> Corrected:
    """Weigh each step by sg(min(r, 1 + c)), with r = pi / mu: the weight is clipped, and no step loses its gradient."""
    ratio = steps.ratio().detach()
    weight = ratio.clamp(max=1.0 + bounds.clip_param)
    return weight * none(steps, bounds)[0], (ratio > weight).float()


@correction("tis", "Yao et al. 2025", max_weight=2.0)
def tis(steps: Steps, bounds: Bounds) -> Corrected:
    """Truncated importance sampling: weigh each step by sg(min(r, w)), with r = pi / mu."""
    ratio = steps.ratio().detach()
    return ratio.clamp(max=bounds.max_weight) * none(steps, bounds)[0], (ratio > bounds.max_weight).float()


@correction("tis_sequence", "Yao et al. 2025; Liu et al. 2025", of_sequence=True, max_weight=2.0)
def tis_sequence(steps: Steps, bounds: Bounds) -> Corrected:
    """Truncated importance sampling of whole sequences: r is the product of the ratios of all steps."""
    ratio = _over_sequence(steps.logp.detach() - steps.behavior, steps.valid).exp()
    return ratio.clamp(max=bounds.max_weight) * none(steps, bounds)[0], (ratio > bounds.max_weight).float()


@correction("mis", "Liu et al. 2025", max_weight=2.0)
def mis(steps: Steps, bounds: Bounds) -> Corrected:
    """Masked importance sampling: weigh each step by sg(r), with r = pi / mu, and leave out steps with r > w."""
    ratio = steps.ratio().detach()
    is_cut = ratio > bounds.max_weight
    return ratio.masked_fill(is_cut, 0.0) * none(steps, bounds)[0], is_cut.float()


@correction("mis_sequence", "Liu et al. 2025", of_sequence=True, max_weight=2.0)
def mis_sequence(steps: Steps, bounds: Bounds) -> Corrected:
    """Masked importance sampling of whole sequences: r is the product of the ratios of all steps."""
    ratio = _over_sequence(steps.logp.detach() - steps.behavior, steps.valid).exp()
    is_cut = ratio > bounds.max_weight
    return ratio.masked_fill(is_cut, 0.0) * none(steps, bounds)[0], is_cut.float()


@correction("icepop", "Ling Team 2025 (Ring-1T)", min_weight=0.5, max_weight=5.0)
def icepop(steps: Steps, bounds: Bounds) -> Corrected:
    """Weigh each step by sg(r), with r = pi / mu, and leave out steps whose r is outside of [m, w]."""
    ratio = steps.ratio().detach()
    is_cut = (ratio < bounds.min_weight) | (ratio > bounds.max_weight)
    return ratio.masked_fill(is_cut, 0.0) * none(steps, bounds)[0], is_cut.float()


@correction("ipo", "Prime Intellect 2026", max_shift=0.3)
def ipo(steps: Steps, bounds: Bounds) -> Corrected:
    """Weigh each step by sg(r), with r = pi / mu, and leave out steps with |pi - mu| > d."""
    probabilities = steps.logp.detach().exp(), steps.behavior.exp()
    is_cut = (probabilities[0] - probabilities[1]).abs() > bounds.max_shift
    return steps.ratio().detach().masked_fill(is_cut, 0.0) * none(steps, bounds)[0], is_cut.float()


@correction("decoupled", "Hilton et al. 2022, section 2; Fu et al. 2025, equation 5", needs_proximal=True,
            clip_param=None, max_weight=5.0)
def decoupled(steps: Steps, bounds: Bounds) -> Corrected:
    """Clip pi / p around the proximal policy as PPO does, and weigh each step by min(p / mu, w)."""
    weight = steps.ratio(of=steps.proximal).clamp(max=bounds.max_weight)
    surrogate, is_clipped = _clipped(steps.ratio(to=steps.proximal), steps.advantage, bounds.clip_param)
    return weight * surrogate, is_clipped


@correction("a3po", "Li et al. 2025", needs_lag=True, clip_param=None, max_weight=5.0)
def a3po(steps: Steps, bounds: Bounds) -> Corrected:
    """Decoupled PPO with an approximation: log p = log mu / d + (1 - 1 / d) * sg(log pi), where d is the lag."""
    share = 1.0 / steps.lag.clamp(min=1).float()
    proximal = share * steps.behavior + (1.0 - share) * steps.logp.detach()
    return decoupled(steps._replace(proximal=proximal), bounds)


@correction("m2po", "Zheng et al. 2025, section 4", max_moment=0.04)
def m2po(steps: Steps, bounds: Bounds) -> Corrected:
    """Leave out the steps with the largest (log r)^2 until the mean of the others is at most m; else r * A."""
    moment = torch.where(steps.valid, steps.logp.detach() - steps.behavior, 0.0).square()
    ordered, order = torch.where(steps.valid, moment, math.inf).flatten().sort()
    means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1, device=ordered.device)
    is_kept = torch.empty_like(ordered, dtype=torch.bool).scatter_(0, order, means <= bounds.max_moment)
    is_cut = ~is_kept.view_as(moment)
    return (steps.ratio() * steps.advantage).masked_fill(is_cut, 0.0), is_cut.float()


def _known(name: object) -> object:
    if name not in CORRECTIONS:
        raise ConfigError(f"correction must be one of {', '.join(CORRECTIONS)}, got {name!r}")
    return name


@dataclass(frozen=True, kw_only=True)
class CorrectionOptions(Options):
    """Options of algorithms that can correct for the lag of their data; None means the default of the correction."""

    correction: str = option(
        "ppo", help="Correction for data of older policies: a name in `CORRECTIONS`, or one of your own.", check=_known)
    max_weight: float | None = option(
        None, low=0.0, exclusive=True,
        help="Largest importance weight: larger ones are truncated (tis, decoupled, a3po), or their steps are left out "
             "(mis, icepop). None means 2, or 5 for icepop, decoupled and a3po.")
    min_weight: float | None = option(
        None, low=0.0, help="Smallest importance weight of steps that are not left out (icepop); None means 0.5.")
    max_shift: float | None = option(
        None, low=0.0, exclusive=True,
        help="Largest change of the probability of an action; steps with larger ones are left out (ipo). None: 0.3.")
    max_moment: float | None = option(
        None, low=0.0, exclusive=True,
        help="Largest mean square of the logarithm of the ratio; steps with the largest squares are left out (m2po). "
             "None means 0.04.")

    def contradictions(self) -> Iterator[Problem]:
        """Refuse bounds that the correction does not use."""
        yield from super().contradictions()
        for name in Bounds._fields:
            if name not in CORRECTIONS[self.correction].bounds:
                users = " or ".join(key for key, entry in CORRECTIONS.items() if name in entry.bounds)
                yield from self._without_effect((name,), f"correction={users}", "correction")

    def corrected(self, steps: Steps, clip_param: Numeric) -> Corrected:
        """Return the result of the correction for the steps of a batch."""
        entry = CORRECTIONS[self.correction]
        given = {name: getattr(self, name) for name in Bounds._fields[1:]}
        bounds = {name: entry.bounds.get(name) if value is None else value for name, value in given.items()}
        return entry.function(steps, Bounds(clip_param, **bounds))
