"""Test each correction for the lag of data: values and gradients compared with formulas written by hand."""

from __future__ import annotations

import math

import pytest
import torch

from pytorchrl.agent.algorithms import corrections
from pytorchrl.agent.algorithms.corrections import CORRECTIONS, Bounds, CorrectionOptions, Steps, correction
from pytorchrl.errors import ConfigError

CLIP, WEIGHT, LEAST, SHIFT, MOMENT = 0.2, 1.5, 0.7, 0.1, 0.05
BOUNDS = Bounds(CLIP, WEIGHT, LEAST, SHIFT, MOMENT)
# Three sequences, one in each column, of 4, 3 and 1 steps: (log pi, log mu, log p, A, lag) of each step.
ROWS = [
    [(-1.0, -1.1, -1.05, 0.5, 0), (-0.2, -0.9, -0.5, 0.5, 1), (-2.0, -1.2, -1.5, 0.5, 3), (-0.7, -0.7, -0.7, 0.5, 2)],
    [(-0.4, -0.1, -0.3, -1.2, 4), (-0.3, -0.9, -1.0, -1.2, 1), (-3.0, -1.0, -2.5, -1.2, 2)],
    [(-0.05, -0.6, -0.55, 2.0, 5)],
]


def steps_of(rows=ROWS, dtype=torch.float64):
    """Return the rows as padded tensors (4, 3); ratios of padding would be infinite, which must not matter."""
    length = max(map(len, rows))
    padding = (math.nan, math.nan, math.nan, 0.0, 0)
    padded = [[*row, *[padding] * (length - len(row))] for row in rows]
    fields = [torch.tensor([[row[t][k] for row in padded] for t in range(length)], dtype=dtype) for k in range(5)]
    valid = torch.tensor([[t < len(row) for row in rows] for t in range(length)])
    logp = torch.where(valid, fields[0], -1.0).requires_grad_()
    behavior, proximal = (torch.where(valid, field, -1000.0) for field in fields[1:3])
    return Steps.of(logp, behavior, fields[3], valid, proximal=proximal, lag=fields[4].long())


def clip(value, low, high):
    return min(max(value, low), high)


def clipped(ratio, advantage, slope):
    """Return PPO's surrogate, and its derivative if d ratio / d log pi = slope."""
    inside = clip(ratio, 1 - CLIP, 1 + CLIP)
    if ratio * advantage <= inside * advantage:
        return ratio * advantage, slope * advantage
    return inside * advantage, 0.0


def left_out(rows):
    """Return the steps (column, t) that M2PO leaves out, one at a time, the largest first."""
    moments = {(e, t): (step[0] - step[1]) ** 2 for e, row in enumerate(rows) for t, step in enumerate(row)}
    out = set()
    while (rest := [value for key, value in moments.items() if key not in out]) and sum(rest) / len(rest) > MOMENT:
        out.add(max(moments.keys() - out, key=moments.get))
    return out


def weighed(weight, advantage, is_cut):
    """Return the surrogate of a step that is weighed with a stopped gradient, its derivative, and whether it is cut."""
    return weight * advantage, weight * advantage, is_cut


def decoupled(logp, behavior, proximal, advantage):
    weight, ratio = min(math.exp(proximal - behavior), WEIGHT), math.exp(logp - proximal)
    return (*(weight * part for part in clipped(ratio, advantage, ratio)), abs(ratio - 1) > CLIP)


def expected(name, rows):
    """Return (surrogate, derivative by log pi, whether it is cut) of each step (column, t)."""
    found, out = {}, left_out(rows)
    for e, row in enumerate(rows):
        total = math.exp(sum(step[0] - step[1] for step in row))
        mean = math.exp(sum(step[0] - step[1] for step in row) / len(row))
        for t, (logp, behavior, proximal, advantage, lag) in enumerate(row):
            r, is_out = math.exp(logp - behavior), not LEAST <= math.exp(logp - behavior) <= WEIGHT
            is_moved = abs(math.exp(logp) - math.exp(behavior)) > SHIFT
            share, is_last = 1 / max(lag, 1), (e, t) in out
            found[e, t] = {
                "none": (advantage, advantage, False),
                "ppo": (*clipped(r, advantage, r), abs(r - 1) > CLIP),
                "gspo": (*clipped(mean, advantage, mean / len(row)), abs(mean - 1) > CLIP),
                "cispo": weighed(min(r, 1 + CLIP), advantage, r > 1 + CLIP),
                "tis": weighed(min(r, WEIGHT), advantage, r > WEIGHT),
                "tis_sequence": weighed(min(total, WEIGHT), advantage, total > WEIGHT),
                "mis": weighed(r * (r <= WEIGHT), advantage, r > WEIGHT),
                "mis_sequence": weighed(total * (total <= WEIGHT), advantage, total > WEIGHT),
                "icepop": weighed(r * (not is_out), advantage, is_out),
                "ipo": weighed(r * (not is_moved), advantage, is_moved),
                "decoupled": decoupled(logp, behavior, proximal, advantage),
                "a3po": decoupled(logp, behavior, share * behavior + (1 - share) * logp, advantage),
                "m2po": weighed(r * (not is_last), advantage, is_last),
            }[name]
    return found


NAMES = ("none", "ppo", "gspo", "cispo", "tis", "tis_sequence", "mis", "mis_sequence", "icepop", "ipo", "decoupled",
         "a3po", "m2po")


def test_every_shipped_correction_is_compared_below():
    shipped = [name for name, entry in CORRECTIONS.items() if entry.function.__module__.startswith("pytorchrl")]
    assert tuple(shipped) == NAMES
    assert all(entry.source and entry.function.__doc__ for entry in CORRECTIONS.values())


@pytest.mark.parametrize("name", NAMES)
def test_a_correction_equals_its_formula(name):
    steps = steps_of()
    surrogate, is_cut = CORRECTIONS[name].function(steps, BOUNDS)
    surrogate[steps.valid].sum().backward()
    wanted = expected(name, ROWS)
    if name == "gspo":  # the surrogate of each step depends on all log-probabilities of its sequence
        wanted = {(e, t): (value, sum(wanted[e, k][1] for k in range(len(ROWS[e]))), cut)
                  for (e, t), (value, _, cut) in wanted.items()}
    for (e, t), (value, slope, cut) in wanted.items():
        assert surrogate[t, e].item() == pytest.approx(value), (e, t)
        assert steps.logp.grad[t, e].item() == pytest.approx(slope), (e, t)
        assert bool(is_cut[t, e]) == cut, (e, t)
    assert not steps.logp.grad[~steps.valid].any()
    cuts = [cut for _, _, cut in wanted.values()]
    assert name == "none" or (any(cuts) and not all(cuts))  # the rows reach both cases


@pytest.mark.parametrize("name", ["ppo", "gspo", "decoupled", "m2po"])
def test_the_gradient_of_a_correction_without_stopped_gradients_equals_finite_differences(name):
    def value_of(logp):
        steps = steps_of()
        steps = Steps.of(logp, *steps[1:2], steps.advantage, steps.valid, proximal=steps.proximal, lag=steps.lag)
        return CORRECTIONS[name].function(steps, BOUNDS)[0][steps.valid].sum()

    logp = steps_of().logp.detach().requires_grad_()
    assert torch.autograd.gradcheck(value_of, (logp,), eps=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_without_lag_the_gradient_is_that_of_the_policy(name):
    """With pi = mu = p, each correction has the gradient A * grad log pi; GSPO has its mean over the sequence."""
    steps = steps_of([[(step[1], step[1], step[1], step[3], 0) for step in row] for row in ROWS])
    CORRECTIONS[name].function(steps, BOUNDS)[0][steps.valid].sum().backward()
    for e, row in enumerate(ROWS):
        for t, step in enumerate(row):
            assert steps.logp.grad[t, e].item() == pytest.approx(step[3])


@pytest.mark.parametrize("name", [name for name in NAMES if not CORRECTIONS[name].of_sequence])
def test_a_correction_of_single_steps_accepts_a_flat_batch(name):
    steps = steps_of([[step] for row in ROWS for step in row])
    flat = Steps.of(steps.logp[0], steps.behavior[0], steps.advantage[0], proximal=steps.proximal[0], lag=steps.lag[0])
    for joint, own in zip(CORRECTIONS[name].function(steps, BOUNDS), CORRECTIONS[name].function(flat, BOUNDS),
                          strict=True):
        assert torch.equal(joint[0], own)


def test_a_user_can_register_a_correction(monkeypatch):
    monkeypatch.setitem(corrections._entries, "half", None)  # removed after the test

    @correction("half", "this test", max_weight=0.5)
    def half(steps, bounds):
        """Weigh all steps by the largest weight."""
        return bounds.max_weight * steps.advantage, torch.zeros_like(steps.logp)

    steps = steps_of()
    for given, factor in ((None, 0.5), (0.25, 0.25)):
        options = CorrectionOptions(correction="half", max_weight=given)
        assert torch.equal(options.corrected(steps, 0.2)[0], factor * steps.advantage)


def test_unknown_names_and_bounds_without_an_effect_are_refused():
    with pytest.raises(ConfigError, match=r"correction must be one of none, ppo, .*, got 'ppoo'"):
        CorrectionOptions(correction="ppoo")
    with pytest.raises(ConfigError, match="max_shift needs correction=ipo"):
        CorrectionOptions(correction="tis", max_shift=0.1)
    with pytest.raises(ConfigError, match=r"bounds must be some of .* got max_wait"):
        correction("slow", max_wait=1.0)
    with pytest.raises(ConfigError, match=r"the default of clip_param is 0\.2 for all corrections, got 0\.4; give the"):
        correction("wide", clip_param=0.4)
    assert CorrectionOptions(correction="icepop", min_weight=0.1, max_weight=3.0).max_weight == 3.0
