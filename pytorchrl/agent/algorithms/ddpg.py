"""Deterministic policy gradients: DDPG (Lillicrap et al. 2016) and TD3 (Fujimoto et al. 2018).

E = number of environments, D = size of an action.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from pytorchrl.agent.actors.off_policy_actor import OffPolicyActor, critic_scores
from pytorchrl.agent.actors.small_policy import SmallOffPolicy
from pytorchrl.agent.algorithms.actor_critic import POLICY_DELAY_HELP, OffPolicyActorCritic
from pytorchrl.agent.algorithms.registry import algorithm
from pytorchrl.agent.contracts import overrides
from pytorchrl.agent.data import ActingStep, Arrays, Obs, ReplayBatch
from pytorchrl.agent.noise import standard_normal
from pytorchrl.agent.options import option
from pytorchrl.agent.schedules import Schedule
from pytorchrl.agent.storages import PERBuffer, ReplayBuffer
from pytorchrl.agent.transfers import cpu_copy
from pytorchrl.errors import Problem
from pytorchrl.support.untyped import StateDict

_OU_OPTIONS = ("ou_theta", "ou_sigma", "ou_dt")
_SMALLEST = 1e-6
"""Smallest mean of |Q| by which `bc_alpha` is divided."""
NOISES = ("gaussian", "ou", "none")
"""Values of the option `noise`."""


class OrnsteinUhlenbeck:
    """Ornstein-Uhlenbeck noise x (Lillicrap et al. 2016, DDPG): x <- x - theta x dt + sigma sqrt(dt) N(0, 1).

    At the start of an episode, x is 0.

    Attributes:
        state: (E, D), the current x of each environment; empty before the first draw.
    """

    def __init__(self, theta: float, sigma: float, dt: float) -> None:
        self._pull, self._push = theta * dt, sigma * math.sqrt(dt)
        self.state = torch.zeros(0)

    def draw(self, num_envs: int, size: int, done: Tensor, generator: torch.Generator) -> Tensor:
        """Return the next noise, (E, D) float32; `done`, (E,) bool, is true where an episode starts."""
        if self.state.shape != (num_envs, size):
            self.state = torch.zeros(num_envs, size, device=done.device)
        start = self.state.masked_fill(done.unsqueeze(-1), 0.0)
        step = torch.empty_like(start).normal_(generator=generator)
        self.state = start * (1 - self._pull) + step * self._push
        return self.state


@algorithm("ddpg", storage=ReplayBuffer, prioritized_storage=PERBuffer)
class DDPG(OffPolicyActorCritic):
    """Deterministic policy gradient: the critics estimate the policy's action values Q, and the policy maximizes Q.

    The target is y = R + DISC * min_j Q'_j(o', mu'(o')), where mu' and Q' are the target networks. The storage provides
    the n-step return R, the discount DISC and the weight w of each sample. The losses are
    L_q = 1/2 sum_j mean w (Q_j - y)^2 for the critics, and L_pi = -mean Q_1(o, mu(o)) for the policy.
    With `bc_alpha`, the policy also stays close to the stored actions a (TD3+BC, Fujimoto and Gu 2021, equation 5):
    L_pi = -lambda mean Q_1(o, mu(o)) + mean (mu(o) - a)^2, where lambda = bc_alpha / mean abs(Q_1(o, mu(o))) has no
    gradient.
    With `critic_subset`, the minimum is over a random subset of the critics, and the policy maximizes their mean.
    Lillicrap et al. use one critic (`num_critics=1`). For exploration, noise is added to the actions, whose range is
    scaled to [-1, 1]. The unit of the noise is therefore half the range of an action.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(OffPolicyActorCritic.Options):
        """Options of `DDPG`."""

        lr_q: float | Schedule = option(1e-3, help="Learning rate of the critics.", low=0.0, updatable=True)
        lr_pi: float | Schedule = option(1e-4, help="Learning rate of the policy.", low=0.0, updatable=True)
        noise: str = option(
            "gaussian", help="Exploration noise on actions: gaussian, ou (Ornstein-Uhlenbeck) or none.", choices=NOISES)
        noise_std: float | Schedule = option(
            0.1, help="Standard deviation of Gaussian noise, in units of half the range of an action.", low=0.0,
            updatable=True)
        ou_theta: float = option(
            0.15, help="Theta of Ornstein-Uhlenbeck noise, the rate at which the noise decays to 0.", low=0.0)
        ou_sigma: float = option(0.2, help="Sigma of Ornstein-Uhlenbeck noise, its scale.", low=0.0)
        ou_dt: float = option(1.0, help="Time step of Ornstein-Uhlenbeck noise.", low=0.0, exclusive=True)
        bc_alpha: float | None = option(
            None, help="Weight of Q in the policy's loss, in which the squared distance to the stored actions then has "
            "the weight 1, as in TD3+BC; None: no such distance.", low=0.0, exclusive=True)

        def contradictions(self) -> Iterator[Problem]:
            """Refuse options that the chosen noise does not use."""
            yield from super().contradictions()
            if self.noise != "ou":
                yield from self._without_effect(_OU_OPTIONS, f"noise='ou', got noise={self.noise!r}", "noise")
            if self.noise != "gaussian":
                yield from self._without_effect(("noise_std",), f"noise='gaussian', got noise={self.noise!r}", "noise")

    actor_options: ClassVar[Mapping[str, tuple[object, ...]]] = {**OffPolicyActorCritic.actor_options,
                                                                 "policy": ("deterministic",)}
    action_spaces: ClassVar[tuple[type[gym.Space[object]], ...]] = (gym.spaces.Box,)
    target_groups: ClassVar[tuple[str, ...]] = ("q", "pi")

    def __init__(self, options: DDPG.Options, *, actor: OffPolicyActor, seed: int, device: str = "cpu") -> None:
        """Build the algorithm; see `Algorithm` for the arguments."""
        super().__init__(options, actor=actor, seed=seed, device=device)
        self._drift = OrnsteinUhlenbeck(options.ou_theta, options.ou_sigma, options.ou_dt)
        is_small = not overrides(self, DDPG, "choose", "acting_step") and SmallOffPolicy.suits(actor)
        self._small = SmallOffPolicy(actor) if is_small and options.noise != "ou" else None

    # Acting

    @override
    def choose(self, obs: Obs, done: Tensor, deterministic: bool, mask: Tensor | None) -> Tensor:
        action = self.actor.act(obs, deterministic, mask)
        if deterministic or self.options.noise == "none":
            return action
        if self.options.noise == "ou":
            noise = self._drift.draw(len(done), self.actor.action_size, done, self.generator).view_as(action)
        else:
            noise = torch.empty_like(action).normal_(0.0, self.parameters["noise_std"], generator=self.generator)
        return (action + noise).clamp_(-1.0, 1.0)

    @override
    def choose_small(self, obs: Arrays, deterministic: bool) -> ActingStep | None:
        if self._small is None or (outputs := self._small.outputs(obs)) is None:
            return None
        action = np.tanh(outputs)
        if not deterministic and self.options.noise == "gaussian":
            std = self.parameters["noise_std"]
            action += torch.empty(action.shape).normal_(0.0, std, generator=self.generator).numpy()
            action = np.minimum(np.maximum(action, -1.0), 1.0)
        return self._small.step(action)

    # Learning

    def target_actions(self, next_obs: Obs) -> Tensor:
        """Return the actions (B, D) at the next observations; the targets are computed from these actions.

        Args:
            next_obs: The normalized observations, one tensor (B, ...) for each leaf.
        """
        return torch.tanh(self.targets.get("pi", self.actor.policy)(next_obs))

    @override
    def losses(self, batch: ReplayBatch) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
        actor, batch = self.actor, self.inputs(batch)
        obs, next_obs = batch.obs, batch.next_obs
        with torch.no_grad():
            next_action = self.target_actions(next_obs)
        scores, next_scores = self.both_scores(obs, next_obs, batch.action, next_action)
        target = actor.estimate.target(self.smallest(next_scores), batch.ret, batch.discount)
        loss_q, errors = self.critic_loss(batch, scores, target)
        loss_pi = self._policy_loss(batch) if self.needs("pi") else loss_q.new_zeros(())
        return {"q": loss_q, "pi": loss_pi}, {"q": batch.mean(actor.estimate.mean_of_target(target))}, errors

    def _policy_loss(self, batch: ReplayBatch) -> Tensor:
        actor = self.actor
        action = torch.tanh(actor.policy(batch.obs))
        with self.fixed_moments():
            value = critic_scores(actor.critics if self.maximizes_mean else actor.critics[:1], batch.obs, action)
        value = actor.estimate.mean(value).mean(0)
        if self.options.bc_alpha is None:
            return -batch.mean(value)
        scale = self.options.bc_alpha / batch.mean(value.detach().abs()).clamp(min=_SMALLEST)
        distance = (action - batch.action.reshape(action.shape)).square().mean(-1)
        return batch.mean(distance) - scale * batch.mean(value)

    # States

    @override
    def state_dict(self) -> StateDict:
        """Return the state, including the state of the Ornstein-Uhlenbeck noise."""
        return {**super().state_dict(), "noise": cpu_copy(self._drift.state)}

    @override
    def load_state_dict(self, state: StateDict) -> None:
        super().load_state_dict(state)
        self._drift.state = state["noise"].to(self.device, copy=True)


@algorithm("td3", storage=ReplayBuffer, prioritized_storage=PERBuffer)
class TD3(DDPG):
    """DDPG with less overestimation of values: two critics, delayed policy updates, and noise on the target's actions.

    The target's action is clip(mu'(o') + clip(e, -c, c), -1, 1), where c is `noise_clip`, and e ~ N(0, target_noise^2)
    is drawn for each sample and dimension. The policy changes in updates whose number is a multiple of `policy_delay`.
    The target networks change in updates whose number is a multiple of both `policy_delay` and
    `target_update_interval`.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(DDPG.Options):
        """Options of `TD3`."""

        lr_q: float | Schedule = option(3e-4, help="Learning rate of the critics.", low=0.0, updatable=True)
        lr_pi: float | Schedule = option(3e-4, help="Learning rate of the policy.", low=0.0, updatable=True)
        policy_delay: int = option(2, help=f"{POLICY_DELAY_HELP} and the target networks.", low=1)
        target_noise: float = option(
            0.2, help="Standard deviation of the noise on the target's actions, in units of half the range of an "
                      "action.", low=0.0)
        noise_clip: float = option(
            0.5, help="Largest noise on the target's actions, in units of half the range of an action.", low=0.0)

    @override
    def target_actions(self, next_obs: Obs) -> Tensor:
        """Return the noisy actions for the targets."""
        action, clip = super().target_actions(next_obs), self.options.noise_clip
        noise = standard_normal(action, self.update_generator) * self.options.target_noise
        return (action + noise.clamp_(-clip, clip)).clamp_(-1.0, 1.0)

    def _move_targets(self) -> None:
        if self.num_updates_made % self.options.policy_delay == 0:
            super()._move_targets()
