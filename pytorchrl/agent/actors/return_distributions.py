"""Describe what a value network estimates: the mean of the return, or its distribution.

An estimate has the shape of the network's outputs: (...) for a mean, and (..., k) for a distribution with k atoms.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor, nn
from typing_extensions import override

from pytorchrl.agent.options import Options, option
from pytorchrl.errors import Problem

CATEGORICAL, QUANTILE = "categorical", "quantile"
DISTRIBUTIONS = (None, CATEGORICAL, QUANTILE)
"""Values of the option `distribution`."""
_DEFAULT_ATOMS = {CATEGORICAL: 51, QUANTILE: 200}


@dataclass(frozen=True, kw_only=True)
class DistributionOptions(Options):
    """Options of actors whose value networks may estimate the distribution of the return."""

    distribution: str | None = option(
        None, help="What values describe: None (the mean of the return), categorical (probabilities of fixed returns, "
                   "C51) or quantile (quantiles of the return, QR-DQN).",
        choices=DISTRIBUTIONS)
    num_atoms: int | None = option(
        None, help="Number of returns that describe a distribution; None means 51 for categorical and 200 for "
                   "quantile.", low=2)
    v_min: float = option(-10.0, help="Smallest return of a categorical distribution.")
    v_max: float = option(10.0, help="Largest return of a categorical distribution.")

    def contradictions(self) -> Iterator[Problem]:
        """Refuse options without a distribution that they describe, and an empty range of returns."""
        yield from super().contradictions()
        if self.distribution is None:
            yield from self._without_effect(
                ("num_atoms",), "distribution='categorical' or 'quantile', got None", "distribution")
        if self.distribution != CATEGORICAL:
            yield from self._without_effect(
                ("v_min", "v_max"), f"distribution='categorical', got {self.distribution!r}", "distribution")
        if self.v_min >= self.v_max:
            yield Problem(f"v_min must be below v_max, got {self.v_min} and {self.v_max}",
                          "give the smallest and the largest return that an episode can have", ("v_min", "v_max"))


def value_estimate(options: DistributionOptions) -> ValueEstimate:
    """Return the estimate that `options` describe."""
    if options.distribution is None:
        return ValueEstimate()
    num_atoms = options.num_atoms or _DEFAULT_ATOMS[options.distribution]
    if options.distribution == QUANTILE:
        return Quantiles(num_atoms)
    return Categories(num_atoms, options.v_min, options.v_max)


class ValueEstimate(nn.Module):
    """The mean of the return, which has no axis of atoms; its subclasses are distributions of the return.

    Attributes:
        num_atoms: The number k of atoms of a distribution; None for a mean.
    """

    num_atoms: int | None = None

    def mean(self, outputs: Tensor) -> Tensor:
        """Return the mean of the return for each estimate."""
        return outputs

    def means_in_numpy(self, outputs: np.ndarray) -> np.ndarray:
        """Return the means (..., n) of the outputs (..., n k) of a network for n actions."""
        return outputs

    def of_action(self, outputs: Tensor, action: Tensor) -> Tensor:
        """Return the estimates of `action` (...), given those of all n actions, (..., n), or (..., n, k) with k atoms.

        Axes of length 1 are broadcast: actions (1, B) choose from the estimates (num_critics, B, n) of several critics.
        """
        axis, index = (-1, action[..., None]) if self.num_atoms is None else (-2, action[..., None, None])
        return torch.take_along_dim(outputs, index, axis).squeeze(axis)

    def atoms(self, outputs: Tensor) -> Tensor:
        """Return the possible returns (..., k); a mean is a single one."""
        return outputs.unsqueeze(-1)

    def project(self, outputs: Tensor, atoms: Tensor) -> Tensor:
        """Return the target for an estimate, if the atoms of `outputs` were moved to `atoms` (..., k)."""
        return atoms.squeeze(-1)

    def smallest(self, outputs: Tensor, drop_atoms: int) -> Tensor:
        """Return one cautious estimate (...) from those of C critics, (C, ...); for a mean, the smallest.

        `drop_atoms` concerns quantiles only.
        """
        return outputs.amin(0)

    def target(self, outputs: Tensor, ret: Tensor, discount: Tensor, bonus: Tensor | None = None) -> Tensor:
        """Return the target R + DISC * (Z + bonus), where `outputs` describe Z, the return after the first n steps.

        Args:
            outputs: Estimates of the chosen action by the target network.
            ret: R, the n-step return, (...).
            discount: DISC, the discount of the return after n steps, (...).
            bonus: (...), added to the return after n steps, such as the entropy of SAC; None means 0.
        """
        atoms = self.atoms(outputs) if bonus is None else self.atoms(outputs) + bonus.unsqueeze(-1)
        return self.project(outputs, ret.unsqueeze(-1) + discount.unsqueeze(-1) * atoms)

    def mean_of_target(self, target: Tensor) -> Tensor:
        """Return the mean of the return for each target."""
        return target

    def loss(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Return the loss (...) of each estimate; for a mean, half the squared error."""
        return 0.5 * (outputs - target).square()

    def errors(self, outputs: Tensor, target: Tensor, losses: Tensor) -> Tensor:
        """Return the absolute TD errors (...), given the losses; for a distribution, they are the losses."""
        return (outputs - target).abs()


class ReturnDistribution(ValueEstimate):
    """A distribution of the return, described by k atoms."""

    num_atoms: int

    def __init__(self, num_atoms: int) -> None:
        super().__init__()
        self.num_atoms = num_atoms

    @override
    def errors(self, outputs: Tensor, target: Tensor, losses: Tensor) -> Tensor:
        return losses


class Categories(ReturnDistribution):
    """Probabilities of k fixed returns z_i with equal distances: C51, Bellemare et al. 2017.

    The outputs (..., k) are logits. A target consists of probabilities (..., k).
    """

    support: Tensor
    """The k returns z_i, from `v_min` to `v_max`."""

    def __init__(self, num_atoms: int, v_min: float, v_max: float) -> None:
        super().__init__(num_atoms)
        self._low, self._high, self._gap = v_min, v_max, (v_max - v_min) / (num_atoms - 1)
        self.register_buffer("support", torch.linspace(v_min, v_max, num_atoms), persistent=False)

    @override
    def mean(self, outputs: Tensor) -> Tensor:
        return (outputs.softmax(-1) * self.support).sum(-1)

    @override
    def means_in_numpy(self, outputs: np.ndarray) -> np.ndarray:
        logits = outputs.reshape(*outputs.shape[:-1], -1, self.num_atoms)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        means: np.ndarray = (weights * self.support.numpy()).sum(-1) / weights.sum(-1)
        return means

    @override
    def atoms(self, outputs: Tensor) -> Tensor:
        return self.support.expand(outputs.shape)

    @override
    def project(self, outputs: Tensor, atoms: Tensor) -> Tensor:
        """Return the probabilities of the z_i after a projection, Bellemare et al. 2017, equation 7.

        Each atom outside [v_min, v_max] moves to the bound. An atom between z_i and z_(i+1) gives its probability to
        both, the larger part to the nearer one; an atom at z_i gives all to z_i.
        """
        place = (atoms.clamp(self._low, self._high) - self._low) / self._gap
        left = place.floor().clamp(0, self.num_atoms - 2)
        # The place of NaN would be no index; the shares remain NaN, so that the update is refused.
        probabilities, share, index = outputs.softmax(-1), place - left, left.nan_to_num(0.0).long()
        target = torch.zeros_like(probabilities).scatter_add(-1, index, probabilities * (1 - share))
        return target.scatter_add(-1, index + 1, probabilities * share)

    @override
    def smallest(self, outputs: Tensor, drop_atoms: int) -> Tensor:
        """Return the distributions of the critic with the smallest mean."""
        critic = self.mean(outputs).argmin(0, keepdim=True)
        return torch.take_along_dim(outputs, critic.unsqueeze(-1), 0).squeeze(0)

    @override
    def mean_of_target(self, target: Tensor) -> Tensor:
        return (target * self.support).sum(-1)

    @override
    def loss(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Return the Kullback-Leibler divergences (...) from the target to the estimate.

        They have the gradient of the cross-entropy of Bellemare et al. 2017, but are 0 where nothing is to learn.
        """
        return (torch.xlogy(target, target) - target * outputs.log_softmax(-1)).sum(-1)


class Quantiles(ReturnDistribution):
    """Estimates of k quantiles of the return: QR-DQN, Dabney et al. 2018.

    The outputs (..., k) are the quantiles at (i - 1/2) / k for i = 1 to k. A target consists of any number of equally
    likely returns (..., m).
    """

    levels: Tensor
    """The probabilities (i - 1/2) / k."""

    def __init__(self, num_atoms: int) -> None:
        super().__init__(num_atoms)
        self.register_buffer("levels", (torch.arange(num_atoms) + 0.5) / num_atoms, persistent=False)

    @override
    def mean(self, outputs: Tensor) -> Tensor:
        return outputs.mean(-1)

    @override
    def means_in_numpy(self, outputs: np.ndarray) -> np.ndarray:
        means: np.ndarray = outputs.reshape(*outputs.shape[:-1], -1, self.num_atoms).mean(-1)
        return means

    @override
    def atoms(self, outputs: Tensor) -> Tensor:
        return outputs

    @override
    def project(self, outputs: Tensor, atoms: Tensor) -> Tensor:
        """Return the moved atoms, because quantiles are not bound to fixed returns."""
        return atoms

    @override
    def smallest(self, outputs: Tensor, drop_atoms: int) -> Tensor:
        """Return the atoms of all critics, (..., C (k - drop_atoms)), without the largest C drop_atoms of them.

        Kuznetsov et al. 2020 (TQC), equation 10.
        """
        pooled = outputs.movedim(0, -2).flatten(-2)
        return pooled.sort(-1).values[..., :pooled.shape[-1] - len(outputs) * drop_atoms]

    @override
    def mean_of_target(self, target: Tensor) -> Tensor:
        return target.mean(-1)

    @override
    def loss(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Return the quantile Huber losses (...): Dabney et al. 2018, equation 10, with kappa = 1.

        With the errors u_ij = target_j - output_i, a loss is the sum over i of the mean over j of
        |level_i - 1{u_ij < 0}| * huber(u_ij).
        """
        # Compiled code and GPUs compute the k m errors faster than they sort, but a CPU would have to store the errors.
        if outputs.is_cpu and not torch.compiler.is_compiling():
            return self._loss_of_sorted(outputs, target)
        errors, levels = target.unsqueeze(-2) - outputs.unsqueeze(-1), self.levels.unsqueeze(-1)
        with torch.no_grad():
            slopes = errors.clamp(-1.0, 1.0)  # of the Huber loss, which is slope * (u - slope / 2)
            weighted = torch.where(errors < 0, 1 - levels, levels) * slopes
        return (weighted * (errors - 0.5 * slopes)).mean(-1).sum(-1)

    def _loss_of_sorted(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Return the same losses as `loss`, from sums over sorted targets t_j: in k log m steps instead of k m.

        Let P(x) = sum_j max(x - t_j, 0) and Q(x) = 1/2 sum_j max(x - t_j, 0)^2. They follow from the number of targets
        below x, their sum and the sum of their squares. Since huber(v) = (v^2 - max(v - 1, 0)^2) / 2 for v >= 0, the
        targets below an output x add Q(x) - Q(x - 1) to the loss, with the derivative P(x) - P(x - 1). The same holds
        for the targets above x, with max(t_j - x, 0) and x + 1.
        """
        with torch.no_grad():
            size = target.shape[-1]
            # float64, because differences of sums of squares would lose too many digits in float32
            targets = target.double().sort(-1).values.expand(*outputs.shape[:-1], size).contiguous()
            x = torch.stack((outputs, outputs - 1, outputs + 1), -2).double()
            places = torch.searchsorted(targets, x.flatten(-2))
            sums, squares = (F.pad(part.cumsum(-1), (1, 0)) for part in (targets, targets.square()))
            count, of_sums, of_squares = (
                part.view_as(x) for part in (places, sums.gather(-1, places), squares.gather(-1, places)))
            p_below = x * count - of_sums
            q_below = 0.5 * (x * (x * count - 2 * of_sums) + of_squares)
            total, total_squares = sums[..., -1:, None], squares[..., -1:, None]
            p_above = p_below - (x * size - total)
            q_above = 0.5 * (x * (x * size - 2 * total) + total_squares) - q_below
            value, slope = ((1 - self.levels) * (low[..., 0, :] - low[..., 1, :])
                            + self.levels * (high[..., 0, :] - high[..., 2, :])
                            for low, high in ((q_below, q_above), (p_below, -p_above)))
        return ((value + slope * (outputs - outputs.detach())).sum(-1) / size).to(target.dtype)
