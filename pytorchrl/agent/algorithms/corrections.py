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
from pytorchrl.agent.schedules import Schedule
from pytorchrl.errors import ConfigError, Problem


class Steps(NamedTuple):
    """The steps of a batch; all tensors have the shape (B,), or (L, B) for B sequences of at most L steps."""

    logp: Tensor
    """log pi(a|o), with gradient."""
    behavior: Tensor
    """log mu(a|o)."""
    log_ratio: Tensor
    """log pi - log mu, with gradient; 0 where steps are not valid."""
    ratio: Tensor
    """pi / mu, with gradient; 1 where steps are not valid."""
    advantage: Tensor
    """A."""
    valid: Tensor | None
    """bool; false for padding. None if all steps are valid."""
    proximal: Tensor | None = None
    """log p(a|o), for corrections that need it."""
    lag: Tensor | None = None
    """int64, the number of updates between mu and pi, for corrections that need it."""

    @classmethod
    def of(cls, logp: Tensor, behavior: Tensor, advantage: Tensor, valid: Tensor | None = None, *,
           proximal: Tensor | None = None, lag: Tensor | None = None) -> Steps:
        """Return steps with their ratios; see the fields for the arguments."""
        log_ratio = difference(logp, behavior, valid)
        return cls(logp, behavior, log_ratio, log_ratio.exp(), advantage, valid, proximal, lag)

    def relative(self, to: Tensor) -> Tensor:
        """Return pi / exp(to), with gradient; 1 where steps are not valid."""
        return difference(self.logp, to, self.valid).exp()

    def over_sequence(self, values: Tensor) -> Tensor:
        """Return the sum of the valid entries of each sequence (L, B), at each of its steps."""
        valid = values if self.valid is None else torch.where(self.valid, values, 0.0)
        return valid.sum(0, keepdim=True).expand_as(values)


def difference(first: Tensor, second: Tensor, valid: Tensor | None) -> Tensor:
    """Return the difference of log-probabilities; it is 0 for padding, because infinity times 0 would be NaN."""
    found = first - second
    return found if valid is None else torch.where(valid, found, 0.0)


class Bounds(NamedTuple):
    """The bounds of a correction; see `CorrectionOptions`."""

    clip_param: float | Tensor
    max_weight: float
    min_weight: float
    max_shift: float
    max_moment: float


Corrected = tuple[Tensor, Tensor]
"""The surrogate of each step, and whether the step is clipped, truncated or masked (float, 0 or 1)."""
Correction = Callable[[Steps, Bounds], Corrected]


@dataclass(frozen=True)
class RegisteredCorrection:
    """A registered correction.

    Attributes:
        function: The correction.
        source: Authors and year.
        needs_proximal: Whether it uses `Steps.proximal`.
        needs_lag: Whether it uses `Steps.lag`.
        of_sequence: Whether it needs whole sequences.
        of_batch: Whether it compares all steps of a minibatch.
        bounds: The fields of `Bounds` that it uses, with their defaults.
    """

    function: Correction
    source: str
    needs_proximal: bool
    needs_lag: bool
    of_sequence: bool
    of_batch: bool
    bounds: Mapping[str, float]


_entries: dict[str, RegisteredCorrection] = {}
CORRECTIONS = MappingProxyType(_entries)
"""All corrections by name."""


def correction(
    name: str, source: str = "", *, needs_proximal: bool = False, needs_lag: bool = False, of_sequence: bool = False,
    of_batch: bool = False, **bounds: float,
) -> Callable[[Correction], Correction]:
    """Register the decorated function as a correction with this name; see `RegisteredCorrection` for the arguments.

    Raises:
        ConfigError: A bound does not exist, or the default of `clip_param` is not that of all corrections.
    """
    if unknown := bounds.keys() - set(Bounds._fields):
        raise ConfigError(f"bounds must be some of {', '.join(Bounds._fields)}, got {', '.join(sorted(unknown))}")
    if bounds.get("clip_param", DEFAULT_CLIP) != DEFAULT_CLIP:
        raise ConfigError(f"the default of clip_param is {DEFAULT_CLIP} for all corrections, got "
                          f"{bounds['clip_param']}; give the algorithm's option clip_param another value")

    def register(function: Correction) -> Correction:
        _entries[name] = RegisteredCorrection(
            function, source, needs_proximal, needs_lag, of_sequence, of_batch, MappingProxyType(bounds))
        return function

    return register


def _clipped(ratio: Tensor, advantage: Tensor, clip: float | Tensor) -> Corrected:
    """Return PPO's clipped surrogate, and whether the ratio is clipped."""
    inside = torch.clamp(ratio, 1.0 - clip, 1.0 + clip)  # type: ignore[arg-type] # both are numbers, or both tensors
    surrogate = torch.minimum(ratio * advantage, inside * advantage)
    return surrogate, ((ratio.detach() - 1.0).abs() > clip).float()


DEFAULT_CLIP = 0.2
"""The default of `clip_param`."""


@correction("none", "Williams 1992")
def none(steps: Steps, bounds: Bounds) -> Corrected:
    """Ignore the lag: pi / sg(pi) * A, whose gradient is A * grad log pi."""
    return steps.relative(steps.logp.detach()) * steps.advantage, torch.zeros_like(steps.advantage)


@correction("ppo", "Schulman et al. 2017, equation 7", clip_param=DEFAULT_CLIP)
def ppo(steps: Steps, bounds: Bounds) -> Corrected:
    """Clip the ratio r = pi / mu: min(r * A, clip(r, 1 - c, 1 + c) * A)."""
    return _clipped(steps.ratio, steps.advantage, bounds.clip_param)


@correction("gspo", "Zheng et al. 2025, equations 5 and 7", of_sequence=True, clip_param=DEFAULT_CLIP)
def gspo(steps: Steps, bounds: Bounds) -> Corrected:
    """Clip the geometric mean of the ratios of a sequence, s = exp(mean(log pi - log mu)), as PPO clips r."""
    lengths = steps.over_sequence(torch.ones_like(steps.advantage)).clamp(min=1.0)
    mean = steps.over_sequence(steps.log_ratio) / lengths
    return _clipped(mean.exp(), steps.advantage, bounds.clip_param)


@correction("cispo", "MiniMax 2025, equations 4 and 5", clip_param=DEFAULT_CLIP)
def cispo(steps: Steps, bounds: Bounds) -> Corrected:
    """Weigh each step by sg(min(r, 1 + c)), with r = pi / mu: the weight is clipped, and no step loses its gradient."""
    ratio = steps.ratio.detach()
    weight = ratio.clamp(max=1.0 + bounds.clip_param)
    return weight * none(steps, bounds)[0], (ratio > weight).float()


@correction("tis", "Yao et al. 2025", max_weight=2.0)
def tis(steps: Steps, bounds: Bounds) -> Corrected:
    """Truncated importance sampling: weigh each step by sg(min(r, w)), with r = pi / mu."""
    ratio = steps.ratio.detach()
    return ratio.clamp(max=bounds.max_weight) * none(steps, bounds)[0], (ratio > bounds.max_weight).float()


@correction("tis_sequence", "Yao et al. 2025; Liu et al. 2025", of_sequence=True, max_weight=2.0)
def tis_sequence(steps: Steps, bounds: Bounds) -> Corrected:
    """Truncated importance sampling of whole sequences: r is the product of the ratios of all steps."""
    ratio = steps.over_sequence(steps.log_ratio.detach()).exp()
    return ratio.clamp(max=bounds.max_weight) * none(steps, bounds)[0], (ratio > bounds.max_weight).float()


@correction("mis", "Liu et al. 2025", max_weight=2.0)
def mis(steps: Steps, bounds: Bounds) -> Corrected:
    """Masked importance sampling: weigh each step by sg(r), with r = pi / mu, and leave out steps with r > w."""
    ratio = steps.ratio.detach()
    is_cut = ratio > bounds.max_weight
    return ratio.masked_fill(is_cut, 0.0) * none(steps, bounds)[0], is_cut.float()


@correction("mis_sequence", "Liu et al. 2025", of_sequence=True, max_weight=2.0)
def mis_sequence(steps: Steps, bounds: Bounds) -> Corrected:
    """Masked importance sampling of whole sequences: r is the product of the ratios of all steps."""
    ratio = steps.over_sequence(steps.log_ratio.detach()).exp()
    is_cut = ratio > bounds.max_weight
    return ratio.masked_fill(is_cut, 0.0) * none(steps, bounds)[0], is_cut.float()


@correction("icepop", "Ling Team 2025 (Ring-1T)", min_weight=0.5, max_weight=5.0)
def icepop(steps: Steps, bounds: Bounds) -> Corrected:
    """Weigh each step by sg(r), with r = pi / mu, and leave out steps whose r is outside of [m, w]."""
    ratio = steps.ratio.detach()
    is_cut = (ratio < bounds.min_weight) | (ratio > bounds.max_weight)
    return ratio.masked_fill(is_cut, 0.0) * none(steps, bounds)[0], is_cut.float()


@correction("ipo", "Prime Intellect 2026", max_shift=0.3)
def ipo(steps: Steps, bounds: Bounds) -> Corrected:
    """Weigh each step by sg(r), with r = pi / mu, and leave out steps with |pi - mu| > d."""
    probabilities = steps.logp.detach().exp(), steps.behavior.exp()
    is_cut = (probabilities[0] - probabilities[1]).abs() > bounds.max_shift
    return steps.ratio.detach().masked_fill(is_cut, 0.0) * none(steps, bounds)[0], is_cut.float()


@correction("decoupled", "Hilton et al. 2022, section 2; Fu et al. 2025, equation 5", needs_proximal=True,
            clip_param=DEFAULT_CLIP, max_weight=5.0)
def decoupled(steps: Steps, bounds: Bounds) -> Corrected:
    """Clip pi / p around the proximal policy as PPO does, and weigh each step by min(p / mu, w)."""
    assert steps.proximal is not None
    weight = difference(steps.proximal, steps.behavior, steps.valid).exp().clamp(max=bounds.max_weight)
    surrogate, is_clipped = _clipped(steps.relative(steps.proximal), steps.advantage, bounds.clip_param)
    return weight * surrogate, is_clipped


@correction("a3po", "Li et al. 2025", needs_lag=True, clip_param=DEFAULT_CLIP, max_weight=5.0)
def a3po(steps: Steps, bounds: Bounds) -> Corrected:
    """Decoupled PPO with an approximation: log p = log mu / d + (1 - 1 / d) * sg(log pi), where d is the lag."""
    assert steps.lag is not None
    share = 1.0 / steps.lag.clamp(min=1).float()
    proximal = share * steps.behavior + (1.0 - share) * steps.logp.detach()
    return decoupled(steps._replace(proximal=proximal), bounds)


@correction("m2po", "Zheng et al. 2025, section 4", of_batch=True, max_moment=0.04)
def m2po(steps: Steps, bounds: Bounds) -> Corrected:
    """Leave out the steps with the largest (log r)^2 until the mean of the others is at most m; else r * A."""
    moment = steps.log_ratio.detach().square()
    last = moment if steps.valid is None else torch.where(steps.valid, moment, math.inf)
    ordered, order = last.flatten().sort()
    means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1, device=ordered.device)
    is_kept = torch.empty_like(ordered, dtype=torch.bool).scatter_(0, order, means <= bounds.max_moment)
    is_cut = ~is_kept.view_as(moment)
    return (steps.ratio * steps.advantage).masked_fill(is_cut, 0.0), is_cut.float()


def _known(name: object) -> object:
    if name not in CORRECTIONS:
        raise ConfigError(f"correction must be one of {', '.join(CORRECTIONS)}, got {name!r}")
    return name


@dataclass(frozen=True, kw_only=True)
class CorrectionOptions(Options):
    """Options of algorithms that can correct for the lag of their data; None means the default of the correction."""

    correction: str = option(
        "ppo", help="Correction for data of older policies: a name in `CORRECTIONS`, or one of your own.", check=_known)
    clip_param: float | Schedule = option(
        DEFAULT_CLIP, low=0.0, exclusive=True, updatable=True,
        help="Largest deviation of the probability ratio from 1 that the loss rewards.")
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
            if name not in self._used_bounds():
                users = " or ".join(key for key, entry in CORRECTIONS.items() if name in entry.bounds)
                yield from self._without_effect((name,), f"correction={users}", "correction")

    def _used_bounds(self) -> set[str]:
        """Return the names of the bounds that have an effect."""
        return {*CORRECTIONS[self.correction].bounds}

    def corrected(self, steps: Steps, clip_param: float | Tensor) -> Corrected:
        """Return the result of the correction for the steps of a batch."""
        entry = CORRECTIONS[self.correction]
        given = {name: getattr(self, name) for name in Bounds._fields[1:]}
        bounds = {name: entry.bounds.get(name, math.nan) if value is None else value for name, value in given.items()}
        return entry.function(steps, Bounds(clip_param, **bounds))
