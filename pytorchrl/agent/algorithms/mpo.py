"""Maximum a posteriori policy optimization: Abdolmaleki et al. 2018 ("MPO"), and 2018b ("Relative entropy ...").

B = transitions of a batch, M = actions per observation, D = dimensions of an action, n = discrete actions.
Equation numbers are those of Abdolmaleki et al. 2018 (arXiv:1806.06920).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import gymnasium as gym
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor, nn
from typing_extensions import override

from pytorchrl.agent.actors.off_policy_actor import OffPolicyActor, critic_scores
from pytorchrl.agent.algorithms.duals import best_temperature, dual, gaussian_divergences, inverse_softplus
from pytorchrl.agent.algorithms.registry import algorithm
from pytorchrl.agent.algorithms.replay import POLYAK_HELP, TARGET_UPDATE_INTERVAL_HELP, ReplayAlgorithm
from pytorchrl.agent.data import Obs, ReplayBatch
from pytorchrl.agent.noise import standard_normal
from pytorchrl.agent.options import AgentOptions, option
from pytorchrl.agent.schedules import Schedule
from pytorchrl.agent.storages import PERBuffer, ReplayBuffer
from pytorchrl.errors import Problem

_LEAST_DUAL = -18.0
"""Least value of a dual parameter, whose softplus is 1.5e-8: dual variables stay above 0, as in Acme."""
_FOR_BOX = ("kl_mean_constraint", "kl_var_constraint", "sample_action_num", "per_dim_constraining", "init_alpha_var")


@algorithm("mpo", storage=ReplayBuffer, prioritized_storage=PERBuffer)
class MPO(ReplayAlgorithm):
    """Policy improvement by weighted regression, with two bounds on the change of the policy.

    The critics learn the values of the target policy pi': y = R + DISC * mean_j min_i Q'_i(o', a'_j), where a'_j are M
    draws from pi'. The loss is 1/2 sum_i mean w (Q_i - y)^2, with the weights w of the storage.

    E-step (section 4.1): M actions a_j ~ pi'(.|o) get the weights w_j = softmax_j(q_j / eta), with
    q_j = min_i Q'_i(o, a_j). The temperature eta minimizes the dual, which keeps the mean divergence from pi' at
    `dual_constraint`. M-step (section 4.2): the policy maximizes sum_j w_j log pi(a_j|o), with bounds on the divergence
    of its means and of its standard deviations from pi' (appendix D.3), whose multipliers alpha are learned.

    A policy "gaussian" is not squashed: its draws are clipped to the bounds for critics and environments, but their
    log-densities are those of the draws themselves. For discrete actions, sums over all actions replace the draws.

    Attributes:
        duals: The parameters of eta and of each alpha, whose softplus is the value; the parameter group `dual`.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(ReplayAlgorithm.Options):
        """Options of `MPO`."""

        lr_q: float | Schedule = option(3e-4, help="Learning rate of the critics.", low=0.0, updatable=True)
        lr_pi: float | Schedule = option(1e-4, help="Learning rate of the policy.", low=0.0, updatable=True)
        lr_dual: float | Schedule = option(1e-2, help="Learning rate of eta and alpha.", low=0.0, updatable=True)
        dual_constraint: float = option(
            0.1, help="Divergence of the weights of actions from the target policy.", low=0.0, exclusive=True)
        kl_mean_constraint: float = option(
            0.01, help="Largest divergence by a change of means, for a Box.", low=0.0, exclusive=True)
        kl_var_constraint: float = option(
            1e-4, help="Largest divergence by a change of standard deviations, for a Box.", low=0.0, exclusive=True)
        kl_constraint: float = option(
            0.01, help="Largest divergence of a policy over discrete actions.", low=0.0, exclusive=True)
        sample_action_num: int = option(64, help="Actions drawn for each observation, M, for a Box.", low=1)
        per_dim_constraining: bool = option(
            False, help="Bound the divergence in each dimension of an action, by its share of the constraint.")
        dual_solver: str = option(
            "gradient", help="gradient (a step of eta in each update) or exact (the best eta for each batch, found by "
                             "SciPy).", choices=("gradient", "exact"))
        init_temperature: float = option(10.0, help="Initial eta.", low=0.0, exclusive=True)
        init_alpha_mean: float = option(
            10.0, help="Initial alpha of the means or, for discrete actions, of the policy.", low=0.0, exclusive=True)
        init_alpha_var: float = option(
            1000.0, help="Initial alpha of the standard deviations, for a Box.", low=0.0, exclusive=True)
        alpha_max: float | None = option(None, help="Largest alpha; None means no limit.", low=0.0, exclusive=True)
        polyak: float = option(0.0, help=POLYAK_HELP, low=0.0, high=1.0)
        target_update_interval: int = option(100, help=TARGET_UPDATE_INTERVAL_HELP, low=1)
        max_grad_norm: float | None = option(
            40.0, help="Largest global norm of a group's gradient; None means no limit.", low=0.0, exclusive=True,
            updatable=True)

        def contradictions(self) -> Iterator[Problem]:
            """Refuse an initial temperature that is not used, and an exact solver in compiled losses."""
            yield from super().contradictions()
            if self.dual_solver == "exact":
                yield from self._without_effect(("init_temperature",), "dual_solver='gradient'", "dual_solver")
                if self.is_compiled:
                    yield Problem("compile=True does not support dual_solver='exact', which SciPy computes",
                                  "set dual_solver='gradient' or compile=False", ("compile", "dual_solver"))

    actor_class: ClassVar[type[nn.Module]] = OffPolicyActor
    actor_options: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **ReplayAlgorithm.actor_options, "policy": ("gaussian", "stochastic")}
    target_groups: ClassVar[tuple[str, ...]] = ("q", "pi")
    actor: OffPolicyActor
    duals: dict[str, nn.Parameter]

    @classmethod
    @override
    def contradiction(cls, agent: AgentOptions) -> str | None:
        """Return a message if an option is for another kind of actions."""
        space = getattr(agent.actor, "action_space", None)
        if space is not None:
            is_discrete = isinstance(space, gym.spaces.Discrete)
            unused = [name for name in (_FOR_BOX if is_discrete else ("kl_constraint",))
                      if getattr(agent.algorithm, name) != getattr(MPO.Options, name)]
            if unused:
                needs = "a Box of" if is_discrete else "Discrete"
                return f"{', '.join(unused)} needs {needs} actions, got {space}; leave it out"
        return super().contradiction(agent)

    def trained_parameters(self) -> dict[str, dict[str, nn.Parameter]]:
        """Return the parameter groups: `q`, `pi` and, for eta and alpha, `dual`. See `Algorithm`."""
        options, size = self.options, self.actor.action_size
        shape = (size,) if options.per_dim_constraining else ()
        initial = {"alpha": options.init_alpha_mean} if self.actor.is_discrete else {
            "alpha_mean": options.init_alpha_mean, "alpha_var": options.init_alpha_var}
        limit = math.inf if options.alpha_max is None else options.alpha_max
        self.duals = {name: nn.Parameter(torch.full(shape, inverse_softplus(min(value, limit)), device=self.device))
                      for name, value in initial.items()}
        if options.dual_solver == "gradient":
            start = torch.tensor(inverse_softplus(options.init_temperature), device=self.device)
            self.duals["temperature"] = nn.Parameter(start)
        return {**super().trained_parameters(), "dual": dict(self.duals)}

    @override
    def choose(self, obs: Obs, done: Tensor, deterministic: bool, mask: Tensor | None) -> Tensor:
        return self.actor.act(obs, deterministic, mask, self.generator)

    # Learning

    @override
    def losses(self, batch: ReplayBatch) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
        obs, next_obs = self.actor.normalize(batch.obs), self.actor.normalize(batch.next_obs)
        with torch.no_grad():  # policy evaluation: eq. 11, with n-step returns in place of Retrace
            _, prior, q = self._actions(next_obs, batch.next_mask)
            target = batch.ret + batch.discount * (prior.exp() * q).sum(0)
            draws, prior, q = self._actions(obs, batch.mask)
        scores = self.actor.get_q_scores(batch.obs, batch.action)
        deltas = scores - target
        eta, dual_loss = self._temperature(q, prior)
        weights = torch.softmax(prior + q / eta.detach(), 0)  # eq. 7
        fit, divergences = (self._discrete_step if self.actor.is_discrete else self._gaussian_step)(
            obs, batch.mask, draws, prior, weights)
        policy_loss = -fit.mean()
        measures = {"q": scores.detach().mean(), "temperature": eta.detach()}
        for name, (divergence, bound) in divergences.items():  # eq. 10 and appendix D.3
            alpha = F.softplus(self.duals[name])
            policy_loss = policy_loss + (alpha.detach() * divergence).sum()
            dual_loss = dual_loss + (alpha * (bound - divergence.detach())).sum()
            measures |= {name: alpha.detach().mean(), name.replace("alpha", "kl"): divergence.detach().sum()}
        losses = {"q": 0.5 * (batch.weight * deltas.square()).mean(-1).sum(), "pi": policy_loss, "dual": dual_loss}
        return losses, measures, deltas.detach().abs().mean(0)

    def _actions(self, obs: Obs, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return actions of the target policy, their log-probabilities and their values, the last two (M, B).

        The actions are M draws (M, B, D) before they are bounded, each with the probability 1 / M. For a Discrete
        space, they are all n actions with their probabilities, and the first result is empty.
        """
        actor = self.actor
        if actor.is_discrete:
            prior = actor.log_probs(obs, mask, self.targets["pi"])
            return prior.new_empty(0), prior.t(), critic_scores(self.targets["q"], obs).amin(0).t()
        mean, log_std = actor.gaussian(obs, self.targets["pi"])
        count, size = self.options.sample_action_num, len(mean)
        like = mean.new_empty((count, *mean.shape))
        draws = mean + log_std.exp() * standard_normal(like, self.update_generator)
        repeated = {leaf: rows.expand(count, *rows.shape).flatten(0, 1) for leaf, rows in obs.items()}
        q = critic_scores(self.targets["q"], repeated, actor.bounded(draws).flatten(0, 1)).amin(0).view(count, size)
        return draws, torch.full_like(q, -math.log(count)), q

    def _temperature(self, q: Tensor, prior: Tensor) -> tuple[Tensor, Tensor]:
        """Return eta () and the dual's value (), which is 0 if SciPy has already minimized it."""
        if self.options.dual_solver == "exact":
            values, logp = (part.double().cpu().numpy() for part in (q, prior))
            return q.new_tensor(best_temperature(values, logp, self.options.dual_constraint)), q.new_zeros(())
        eta = F.softplus(self.duals["temperature"])
        return eta, dual(eta, q, prior, self.options.dual_constraint)

    def _gaussian_step(
        self, obs: Obs, mask: Tensor | None, draws: Tensor, prior: Tensor, weights: Tensor,
    ) -> tuple[Tensor, dict[str, tuple[Tensor, float]]]:
        """Return the weighted log-likelihoods (B,), and the divergence and its bound for each alpha.

        The first likelihood moves the means, with the standard deviations of the target policy; the second one moves
        the standard deviations, with its means (appendix D.3). Log-densities lack their constants.
        """
        options = self.options
        with torch.no_grad():
            old_mean, old_log_std = self.actor.gaussian(obs, self.targets["pi"])
        mean, log_std = self.actor.gaussian(obs)
        of_mean = -0.5 * ((draws - mean) / old_log_std.exp()).square()
        of_std = -0.5 * ((draws - old_mean) / log_std.exp()).square() - log_std
        fit = (weights.unsqueeze(-1) * (of_mean + of_std)).sum((0, -1))
        kl_mean, kl_var = gaussian_divergences(old_mean, old_log_std, mean, log_std)
        share = 1.0
        if options.per_dim_constraining:
            share = 1 / self.actor.action_size
        else:
            kl_mean, kl_var = kl_mean.sum(), kl_var.sum()
        return fit, {"alpha_mean": (kl_mean, share * options.kl_mean_constraint),
                     "alpha_var": (kl_var, share * options.kl_var_constraint)}

    def _discrete_step(
        self, obs: Obs, mask: Tensor | None, draws: Tensor, prior: Tensor, weights: Tensor,
    ) -> tuple[Tensor, dict[str, tuple[Tensor, float]]]:
        """Return the same values as `_gaussian_step`, with one divergence KL(pi' || pi)."""
        logp = self.actor.log_probs(obs, mask).t()
        divergence = (prior.exp() * (prior - logp)).sum(0).mean()
        return (weights * logp).sum(0), {"alpha": (divergence, self.options.kl_constraint)}

    @override
    def apply_gradients(self, gradients: list[Tensor] | None = None) -> dict[str, float]:
        """Update the weights, and then keep eta and alpha above 0, and alpha up to `alpha_max`."""
        info = super().apply_gradients(gradients)
        limit = self.options.alpha_max
        with torch.no_grad():
            for name, parameter in self.duals.items():
                highest = None if limit is None or name == "temperature" else inverse_softplus(limit)
                parameter.clamp_(_LEAST_DUAL, highest)
        return info
