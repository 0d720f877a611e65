"""Action distributions, which draw actions and compute log-probabilities, entropies and KL divergences.

An actor has one `Distribution` object, which the action space determines. Its methods take the parameters of a whole
batch of distributions as one tensor, `params` (..., P): logits, or means and log standard deviations.

Masks are (..., n) bool, true where an action is allowed. The logit of a forbidden action is replaced by the lowest
finite float. The action's probability p is then exactly 0, and p log p is 0; with minus infinity, p log p would be NaN.
"""

from __future__ import annotations

import math

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor, nn
from typing_extensions import override

from pytorchrl.agent.env.spaces import INTEGER_BOX
from pytorchrl.errors import NonFiniteDataError, SpaceError

_LOWEST = torch.finfo(torch.float32).min
_HALF_LOG_TWO_PI = 0.5 * math.log(2 * math.pi)


class Distribution(nn.Module):
    """The base class of the distributions; `...` in shapes stands for any leading axes, such as (B,) or (L, B)."""

    num_outputs: int
    """Number of outputs of the policy head."""
    mask_size: int | None = None
    """Width n of a mask, or None if the distribution does not support masks."""

    def params_of(self, outputs: Tensor) -> Tensor:
        """Return the parameters (..., P) float32 for outputs (..., num_outputs) of the policy head."""
        return outputs.float()

    def check_mask(self, mask: Tensor) -> None:
        """Raise `NonFiniteDataError` unless every row of a mask (..., n) allows at least one action."""
        check_mask(mask)

    def sample(self, params: Tensor, mask: Tensor | None, generator: torch.Generator | None) -> Tensor:
        """Draw one action for each row, `(..., *action_shape)` int64 or float32."""
        raise NotImplementedError

    def mode(self, params: Tensor, mask: Tensor | None) -> Tensor:
        """Return the most likely action of each row, `(..., *action_shape)` int64 or float32."""
        raise NotImplementedError

    def log_prob_entropy(self, params: Tensor, action: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the log-probability (or log-density) of `action`, and the entropy; each is (...,) float32."""
        raise NotImplementedError

    def log_prob(self, params: Tensor, action: Tensor, mask: Tensor | None) -> Tensor:
        """Return the log-probability (or log-density) of `action`, (...,) float32."""
        return self.log_prob_entropy(params, action, mask)[0]

    def kl(self, params: Tensor, other: Tensor, mask: Tensor | None) -> Tensor:
        """Return KL(p || q), where p has the parameters `params`, and q has the parameters `other`; (...,) float32."""
        raise NotImplementedError

    def clip(self, action: Tensor) -> Tensor:
        """Return the action that the environment receives; the base class returns `action` unchanged."""
        return action


def distribution_of(space: gym.Space[object]) -> Distribution:
    """Return the distribution for an action space.

    Raises:
        SpaceError: No distribution fits the space.
    """
    if isinstance(space, gym.spaces.Discrete):
        return Categorical(int(space.n))
    if isinstance(space, gym.spaces.MultiDiscrete):
        return MultiCategorical(space.nvec)
    if isinstance(space, gym.spaces.MultiBinary):
        return Bernoulli(tuple(space.shape))
    if isinstance(space, gym.spaces.Box) and np.issubdtype(space.dtype, np.floating):
        return Gaussian(space)
    raise SpaceError(
        f"the action space must be Discrete, MultiDiscrete, MultiBinary or a Box of floats, got {space}; "
        f"{INTEGER_BOX if isinstance(space, gym.spaces.Box) else 'wrap the environment with TransformAction'}")


def check_mask(mask: Tensor) -> None:
    """Refuse a mask (..., n) with a row that allows no action; compiled and exported graphs skip this check.

    Raises:
        NonFiniteDataError: A row allows no action, so the row's probabilities are undefined.
    """
    if torch.compiler.is_compiling():  # the check depends on data, so a traced graph cannot contain it
        return
    if not bool(mask.any(-1).all()):
        rows = (~mask.any(-1)).nonzero().flatten().tolist()
        raise NonFiniteDataError(
            "the action mask forbids every action, or every action of one MultiDiscrete component, in rows "
            f"{rows[:8]}; allow at least one action there")


def inner_bounds(space: gym.spaces.Box) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest float32 actions within the bounds of a Box, `(*action_shape,)` each.

    The nearest float32 of a float64 bound may be outside the Box: float32(0.1) is above 0.1.
    """
    infinity = np.float32(np.inf)
    with np.errstate(over="ignore"):  # a bound beyond the range of float32 becomes infinite at first
        low, high = space.low.astype(np.float32), space.high.astype(np.float32)
    low = np.where(low < space.low, np.nextafter(low, infinity), low)
    high = np.where(high > space.high, np.nextafter(high, -infinity), high)
    return torch.from_numpy(low), torch.from_numpy(high)


def _sample_logits(logits: Tensor, mask: Tensor | None, generator: torch.Generator | None) -> Tensor:
    # argmax(logits + Gumbel noise) is a draw from the softmax of the logits, and -log(Exponential(1)) is Gumbel noise.
    noisy = logits - torch.empty_like(logits).exponential_(generator=generator).log_()
    if mask is not None:
        noisy = noisy.masked_fill_(~mask, _LOWEST)
    return noisy.argmax(-1)


def masked(logits: Tensor, mask: Tensor | None) -> Tensor:
    """Return logits (..., n), or other numbers, with the lowest finite float in place of those that a mask forbids."""
    return logits if mask is None else logits.masked_fill(~mask, _LOWEST)


class Categorical(Distribution):
    """A distribution over n actions, which are numbered from 0. Params: logits (..., n).

    If a Discrete space has a `start` other than 0, the environments add it to these numbers.
    """

    def __init__(self, n: int) -> None:
        super().__init__()
        self.num_outputs = self.mask_size = n

    def sample(self, params: Tensor, mask: Tensor | None, generator: torch.Generator | None) -> Tensor:
        """Draw actions (...,) int64."""
        return _sample_logits(params, mask, generator)

    def mode(self, params: Tensor, mask: Tensor | None) -> Tensor:
        """Return the allowed action with the highest logit, (...,) int64."""
        return masked(params, mask).argmax(-1)

    @override
    def log_prob_entropy(self, params: Tensor, action: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies under the softmax over the allowed actions."""
        log_probs = F.log_softmax(masked(params, mask), -1)
        log_prob = log_probs.gather(-1, action.unsqueeze(-1)).squeeze(-1)
        return log_prob, -(log_probs.exp() * log_probs).sum(-1)

    @override
    def log_prob(self, params: Tensor, action: Tensor, mask: Tensor | None) -> Tensor:
        """Return log-probabilities under the softmax over the allowed actions."""
        log_probs = F.log_softmax(masked(params, mask), -1)
        return log_probs.gather(-1, action.unsqueeze(-1)).squeeze(-1)

    @override
    def kl(self, params: Tensor, other: Tensor, mask: Tensor | None) -> Tensor:
        """Return KL(p || q) of the softmaxes over the allowed actions."""
        log_p, log_q = (F.log_softmax(masked(logits, mask), -1) for logits in (params, other))
        return (log_p.exp() * (log_p - log_q)).sum(-1)


class MultiCategorical(Distribution):
    """D independent categorical distributions, called components. Params: the concatenated logits of all components.

    Log-probabilities and entropies are summed over the components. All components are computed as one tensor
    (..., D, max n), where max n is the largest number of actions of a component; smaller components are padded with
    forbidden actions.
    """

    index: Tensor
    """(D * max n,) int64; for each entry of the padded logits, its position in the params; 0 for padding."""
    present: Tensor
    """(D, max n) bool, false for padding."""

    def __init__(self, nvec: np.ndarray) -> None:
        super().__init__()
        self.action_shape = tuple(nvec.shape)
        sizes = torch.as_tensor(np.asarray(nvec).reshape(-1), dtype=torch.int64)
        self.num_outputs = self.mask_size = int(sizes.sum())
        columns = torch.arange(int(sizes.max()))
        present = columns < sizes.unsqueeze(-1)
        first = torch.cumsum(sizes, 0) - sizes
        index = torch.where(present, first.unsqueeze(-1) + columns, 0).reshape(-1)
        self.register_buffer("index", index, persistent=False)
        self.register_buffer("present", present, persistent=False)

    def check_mask(self, mask: Tensor) -> None:
        """Raise `NonFiniteDataError` unless every row of a mask (..., n) allows an action in each component."""
        check_mask(self._split(mask, mask)[1].any(-1).all(-1, keepdim=True))

    def _split(self, params: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        shape = (*params.shape[:-1], *self.present.shape)
        # `finish_rollout` passes `params` on the CPU, even if this module is on another device.
        index, present = self.index.to(params.device), self.present.to(params.device)
        logits = params.index_select(-1, index).view(shape)
        if mask is None:
            return logits, present.expand(shape)
        return logits, mask.index_select(-1, index).view(shape) & present

    def sample(self, params: Tensor, mask: Tensor | None, generator: torch.Generator | None) -> Tensor:
        """Draw actions `(..., *action_shape)` int64."""
        drawn = _sample_logits(*self._split(params, mask), generator)
        return drawn.view(*params.shape[:-1], *self.action_shape)

    def mode(self, params: Tensor, mask: Tensor | None) -> Tensor:
        """Return the most likely allowed action of each component, `(..., *action_shape)` int64."""
        return masked(*self._split(params, mask)).argmax(-1).view(*params.shape[:-1], *self.action_shape)

    @override
    def log_prob_entropy(self, params: Tensor, action: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies, summed over the D components."""
        log_probs = F.log_softmax(masked(*self._split(params, mask)), -1)
        action = action.reshape(*log_probs.shape[:-1], 1)
        return log_probs.gather(-1, action).sum((-2, -1)), -(log_probs.exp() * log_probs).sum((-2, -1))

    @override
    def kl(self, params: Tensor, other: Tensor, mask: Tensor | None) -> Tensor:
        """Return KL(p || q), summed over the D components."""
        log_p, log_q = (F.log_softmax(masked(*self._split(logits, mask)), -1) for logits in (params, other))
        return (log_p.exp() * (log_p - log_q)).sum((-2, -1))


class Bernoulli(Distribution):
    """n independent bits. Params: logits (..., n); the probability that a bit is 1 is the sigmoid of its logit.

    Log-probabilities and entropies are summed over the bits.
    """

    def __init__(self, action_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.action_shape = action_shape
        self.num_outputs = math.prod(action_shape)

    def sample(self, params: Tensor, mask: Tensor | None, generator: torch.Generator | None) -> Tensor:
        """Draw actions `(..., *action_shape)` int64."""
        _refuse_mask(mask)
        drawn = torch.bernoulli(params.sigmoid(), generator=generator).long()
        return drawn.view(*params.shape[:-1], *self.action_shape)

    def mode(self, params: Tensor, mask: Tensor | None) -> Tensor:
        """Return the more likely value of each bit (0 if both are equally likely), `(..., *action_shape)` int64."""
        _refuse_mask(mask)
        return (params > 0).long().view(*params.shape[:-1], *self.action_shape)

    @override
    def log_prob_entropy(self, params: Tensor, action: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies, summed over the bits."""
        _refuse_mask(mask)
        bits = action.reshape(params.shape).float()
        softplus = F.softplus(params)
        return (bits * params - softplus).sum(-1), (softplus - params * params.sigmoid()).sum(-1)

    @override
    def kl(self, params: Tensor, other: Tensor, mask: Tensor | None) -> Tensor:
        """Return KL(p || q), summed over the bits."""
        _refuse_mask(mask)
        return (params.sigmoid() * (params - other) - F.softplus(params) + F.softplus(other)).sum(-1)


class Gaussian(Distribution):
    """n independent normal distributions. Params: means, then log standard deviations, (..., 2n).

    Actions are stored as drawn; the environment receives a copy that is clipped to the bounds. The log standard
    deviations are parameters of this module and do not depend on the observation; the actor initializes them.
    """

    low: Tensor
    """(*action_shape,) float32 lower bounds; see `inner_bounds`."""
    high: Tensor
    """(*action_shape,) float32 upper bounds; see `inner_bounds`."""

    def __init__(self, space: gym.spaces.Box) -> None:
        super().__init__()
        self.action_shape = tuple(space.shape)
        self.num_outputs = math.prod(self.action_shape)
        self.log_std = nn.Parameter(torch.zeros(self.num_outputs))
        low, high = inner_bounds(space)
        self.register_buffer("low", low, persistent=False)
        self.register_buffer("high", high, persistent=False)

    @override
    def params_of(self, outputs: Tensor) -> Tensor:
        """Return the means, followed by the log standard deviations."""
        means = outputs.float()
        return torch.cat((means, self.log_std.expand_as(means)), -1)

    def sample(self, params: Tensor, mask: Tensor | None, generator: torch.Generator | None) -> Tensor:
        """Draw actions (..., *action_shape) float32."""
        _refuse_mask(mask)
        mean, log_std = params.chunk(2, -1)
        drawn = torch.empty_like(mean).normal_(generator=generator).mul_(log_std.exp()).add_(mean)
        return drawn.view(*params.shape[:-1], *self.action_shape)

    def mode(self, params: Tensor, mask: Tensor | None) -> Tensor:
        """Return the means, (..., *action_shape) float32."""
        _refuse_mask(mask)
        return params[..., : self.num_outputs].reshape(*params.shape[:-1], *self.action_shape)

    @override
    def log_prob_entropy(self, params: Tensor, action: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return log-densities and entropies, summed over the n dimensions."""
        _refuse_mask(mask)
        mean, log_std = params.chunk(2, -1)
        errors = (action.reshape(mean.shape) - mean) * (-log_std).exp()
        log_stds = log_std.sum(-1)
        constant = self.num_outputs * _HALF_LOG_TWO_PI
        return -0.5 * (errors * errors).sum(-1) - log_stds - constant, log_stds + (constant + 0.5 * self.num_outputs)

    @override
    def kl(self, params: Tensor, other: Tensor, mask: Tensor | None) -> Tensor:
        """Return KL(p || q), summed over the n dimensions."""
        _refuse_mask(mask)
        (mean, log_std), (other_mean, other_log_std) = params.chunk(2, -1), other.chunk(2, -1)
        precision = (-2.0 * other_log_std).exp()
        squares = ((2.0 * log_std).exp() + (mean - other_mean).square()) * precision
        return (other_log_std - log_std + 0.5 * squares - 0.5).sum(-1)

    def clip(self, action: Tensor) -> Tensor:
        """Return the action clipped to the bounds, as a new tensor."""
        return torch.clamp(action, self.low, self.high)


def _refuse_mask(mask: Tensor | None) -> None:
    if mask is not None:
        raise SpaceError("action masks need a Discrete or MultiDiscrete action space")
