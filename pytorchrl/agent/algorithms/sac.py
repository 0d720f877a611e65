"""Soft actor-critic: Haarnoja et al. 2018 and, for discrete actions, Christodoulou 2019."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from pytorchrl.agent.actors.off_policy_actor import OffPolicyActor, critic_scores
from pytorchrl.agent.actors.small_policy import SmallOffPolicy
from pytorchrl.agent.actors.squashed import LOG_STD_CLIP
from pytorchrl.agent.algorithms.actor_critic import OffPolicyActorCritic
from pytorchrl.agent.algorithms.registry import algorithm
from pytorchrl.agent.contracts import overrides
from pytorchrl.agent.data import ActingStep, Arrays, Obs, ReplayBatch
from pytorchrl.agent.options import AgentOptions, option
from pytorchrl.agent.schedules import Schedule
from pytorchrl.agent.storages import PERBuffer, ReplayBuffer
from pytorchrl.errors import Problem


@algorithm("sac", storage=ReplayBuffer, prioritized_storage=PERBuffer)
class SAC(OffPolicyActorCritic):
    """Maximum-entropy reinforcement learning: the policy maximizes Q plus alpha times the policy's entropy.

    The actions a and a' are drawn from the policy at o and o', within [-1, 1]; their log-densities are logp and logp'.
    The target is y = R + DISC * (min_i Q'_i(o', a') - alpha logp'), where alpha = exp(log_alpha), and Q' are the target
    networks. The storage provides the n-step return R, the discount DISC and the weight w of each sample.

    There are three losses. L_q = 1/2 sum_i mean w (Q_i - y)^2 trains the critics, with the stored actions.
    L_pi = mean(alpha logp - min_i Q_i(o, a)) trains the policy. L_alpha = -log_alpha * (mean logp + target_entropy)
    trains log_alpha. For discrete actions, a and a' are not drawn: terms that depend on them are expected values under
    the policy. With `critic_subset`, the minimum in y is over a random subset of the critics, and that in L_pi is
    replaced by the mean. The policy and alpha change in updates whose number is a multiple of `policy_delay`.

    Attributes:
        log_alpha: (), log of the entropy's weight; trained as the parameter group `alpha` if `learn_alpha` is set.
        target_entropy: The entropy that the policy approaches while alpha is learned.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(OffPolicyActorCritic.Options):
        """Options of `SAC`."""

        lr_q: float | Schedule = option(1e-3, help="Learning rate of the critics.", low=0.0, updatable=True)
        lr_pi: float | Schedule = option(3e-4, help="Learning rate of the policy.", low=0.0, updatable=True)
        lr_alpha: float | Schedule = option(1e-3, help="Learning rate of log alpha.", low=0.0, updatable=True)
        initial_alpha: float = option(1.0, help="Initial weight of the entropy.", low=0.0, exclusive=True)
        learn_alpha: bool = option(True, help="Learn the weight of the entropy so that the entropy approaches its "
                                              "target.")
        target_entropy: float | None = option(
            None, help="Target of the entropy; None means minus the number of dimensions of an action, or "
                       "target_entropy_scale * log(n) for n discrete actions.")
        target_entropy_scale: float = option(
            0.89, help="Target of the entropy for discrete actions, as a share of the largest possible entropy.",
            low=0.0, high=1.0)

        def contradictions(self) -> Iterator[Problem]:
            """Refuse options that would have no effect, such as options for learning alpha if alpha is fixed."""
            yield from super().contradictions()
            if self.target_entropy is not None:
                yield from self._without_effect(
                    ("target_entropy_scale",), f"target_entropy=None, got {self.target_entropy}", "target_entropy")
            if not self.learn_alpha:
                yield from self._without_effect(
                    ("target_entropy", "lr_alpha", "target_entropy_scale"), "learn_alpha=True", "learn_alpha")

    actor_options: ClassVar[Mapping[str, tuple[object, ...]]] = {**OffPolicyActorCritic.actor_options,
                                                                 "policy": ("stochastic",)}
    target_groups: ClassVar[tuple[str, ...]] = ("q",)
    undecayed_groups: ClassVar[tuple[str, ...]] = ("alpha",)  # decay would draw alpha to 1
    log_alpha: Tensor

    def __init__(self, options: SAC.Options, *, actor: OffPolicyActor, seed: int, device: str = "cpu") -> None:
        """Build the algorithm; see `Algorithm` for the arguments."""
        super().__init__(options, actor=actor, seed=seed, device=device)
        size = actor.action_size
        target = options.target_entropy_scale * math.log(size) if actor.is_discrete else -float(size)
        self.target_entropy: float = target if options.target_entropy is None else options.target_entropy
        """The target entropy; if the option `target_entropy` is None, `losses` lowers it where masks forbid actions."""
        is_small = not overrides(self, SAC, "choose", "acting_step") and SmallOffPolicy.suits(actor)
        self._small = SmallOffPolicy(actor) if is_small else None

    @classmethod
    @override
    def contradiction(cls, agent: AgentOptions) -> str | None:
        """Return a message if options contradict each other.

        `target_entropy_scale` needs discrete actions, because it scales log(n), the largest entropy of n actions.
        """
        scale, space = agent.algorithm.target_entropy_scale, getattr(agent.actor, "action_space", None)
        if scale != SAC.Options.target_entropy_scale and space is not None and not isinstance(space,
                                                                                              gym.spaces.Discrete):
            return f"target_entropy_scale={scale} is for Discrete actions, got {space}; give target_entropy instead"
        return super().contradiction(agent)

    def trained_parameters(self) -> dict[str, dict[str, nn.Parameter]]:
        """Return the parameter groups; if alpha is learned, log alpha is an additional group. See `Algorithm`."""
        log_alpha = torch.tensor(math.log(self.options.initial_alpha), device=self.device)
        groups = super().trained_parameters()
        if not self.options.learn_alpha:
            self.log_alpha = log_alpha
            return groups
        self.log_alpha = parameter = nn.Parameter(log_alpha)
        return {**groups, "alpha": {"log_alpha": parameter}}

    # Acting

    @override
    def choose(self, obs: Obs, done: Tensor, deterministic: bool, mask: Tensor | None) -> Tensor:
        return self.actor.act(obs, deterministic, mask, self.generator)

    @override
    def choose_small(self, obs: Arrays, deterministic: bool) -> ActingStep | None:
        if self._small is None or (outputs := self._small.outputs(obs)) is None:
            return None
        u, log_std = outputs[:, :self.actor.action_size], outputs[:, self.actor.action_size:]
        if not deterministic:
            noise = torch.empty(u.shape).normal_(generator=self.generator).numpy()
            low, high = LOG_STD_CLIP
            u = u + np.exp(np.minimum(np.maximum(log_std, low), high)) * noise
        return self._small.step(np.tanh(u))

    # Learning

    @override
    def losses(self, batch: ReplayBatch) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
        alpha = self.log_alpha.detach().exp()
        batch = self.inputs(batch)
        terms = self._discrete_terms if self.actor.is_discrete else self._continuous_terms
        target, scores, policy_loss, entropy = terms(batch, alpha)
        loss_q, errors = self.critic_loss(batch, scores, target)
        losses = {"q": loss_q, "pi": policy_loss}
        if self.options.learn_alpha:
            losses["alpha"] = self.log_alpha * (entropy - self._target_entropy_of(batch))
        q = batch.mean(self.actor.estimate.mean(scores.detach())).mean()
        return losses, {"q": q, "alpha": alpha, "entropy": entropy}, errors

    def _target_entropy_of(self, batch: ReplayBatch) -> float | Tensor:
        if batch.mask is None or self.options.target_entropy is not None:
            return self.target_entropy
        allowed = batch.mask.sum(-1)
        # A row that forbids all actions is treated as if it allowed all of them, because log(0) is minus infinity.
        allowed = torch.where(allowed == 0, self.actor.action_size, allowed)
        return self.options.target_entropy_scale * batch.mean(allowed.log())

    def _continuous_terms(self, batch: ReplayBatch, alpha: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the target (B,), the critics' values (num_critics, B), the policy loss and the entropy.

        For distributions, the target has the shape (B, m), and the values have the shape (num_critics, B, k).
        """
        actor, generator, obs, next_obs = self.actor, self.update_generator, batch.obs, batch.next_obs
        with torch.no_grad():
            next_action, next_logp = actor.sample_log_prob(next_obs, generator)
        scores, next_scores = self.both_scores(obs, next_obs, batch.action, next_action)
        target = actor.estimate.target(
            self.smallest(next_scores), batch.ret, batch.discount, bonus=-alpha * next_logp)
        action, logp = actor.sample_log_prob(obs, generator)
        policy_loss = logp.new_zeros(())
        if self.needs("pi"):
            with self.fixed_moments():
                values = actor.estimate.mean(critic_scores(actor.critics, obs, action))
            policy_loss = batch.mean(alpha * logp - self._preferred(values))
        return target, scores, policy_loss, -batch.mean(logp.detach())

    def _discrete_terms(self, batch: ReplayBatch, alpha: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the same terms as `_continuous_terms`, but for discrete actions."""
        actor, obs, next_obs = self.actor, batch.obs, batch.next_obs
        all_scores, next_scores = self.both_scores(obs, next_obs)
        with torch.no_grad():
            next_logp = actor.log_probs(next_obs, batch.next_mask)
            target = actor.estimate.target(_expectation(next_logp, self.smallest(next_scores)), batch.ret,
                                           batch.discount, bonus=alpha * _entropy(next_logp))
        scores = actor.estimate.of_action(all_scores, batch.action[None])
        logp = actor.log_probs(obs, batch.mask)
        entropy = _entropy(logp)
        policy_loss = -batch.mean(alpha * entropy + _expectation(logp, self._preferred(all_scores.detach())))
        return target, scores, policy_loss, batch.mean(entropy.detach())

    def _preferred(self, scores: Tensor) -> Tensor:
        """Return the values (B,) or (B, n) that the policy maximizes, of the scores (num_critics, B) or more axes."""
        return scores.mean(0) if self.maximizes_mean else scores.amin(0)


def _expectation(logp: Tensor, values: Tensor) -> Tensor:
    """Return the mean (B,) of values (B, n) under distributions with the log-probabilities (B, n)."""
    return (logp.exp() * values).sum(-1)


def _entropy(logp: Tensor) -> Tensor:
    """Return the entropies (B,) of distributions with the log-probabilities (B, n); forbidden actions add 0."""
    return -(logp.exp() * logp).sum(-1)
