"""Implicit Q-learning (Kostrikov et al. 2022), which learns from data without asking for values of other actions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from pytorchrl.agent.actors.value_actor import ValueActor
from pytorchrl.agent.algorithms.registry import algorithm
from pytorchrl.agent.algorithms.replay import ReplayAlgorithm
from pytorchrl.agent.data import Obs, ReplayBatch
from pytorchrl.agent.options import option
from pytorchrl.agent.schedules import Schedule
from pytorchrl.agent.storages import PERBuffer, ReplayBuffer


@algorithm("iql", storage=ReplayBuffer, prioritized_storage=PERBuffer)
class IQL(ReplayAlgorithm):
    """Implicit Q-learning: values of the best actions in the data, and a policy that prefers these actions.

    All losses use only recorded actions a. With the target networks Q', let q = min_j Q'_j(o, a). The storage provides
    the n-step return R, the discount DISC and the weight w of each sample. There are three losses:

    - L_v = mean w abs(expectile - 1(u < 0)) u^2, where u = q - V(o), for the value network (equation 5). The larger the
      expectile, the closer V is to the value of the best recorded action.
    - L_q = 1/2 sum_j mean w (Q_j(o, a) - R - DISC V(o'))^2 for the critics (equation 6).
    - L_pi = -mean min(exp(beta (q - V(o))), max_weight) log pi(a|o) for the policy (equation 7). For beta = 0, this is
      behavior cloning.

    The densities of continuous actions are those of the squashed Gaussian, in which the policy also acts; the authors'
    code uses a Gaussian that is not squashed.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(ReplayAlgorithm.Options):
        """Options of `IQL`."""

        lr_q: float | Schedule = option(3e-4, help="Learning rate of the critics.", low=0.0, updatable=True)
        lr_pi: float | Schedule = option(3e-4, help="Learning rate of the policy.", low=0.0, updatable=True)
        lr_v: float | Schedule = option(3e-4, help="Learning rate of the value network.", low=0.0, updatable=True)
        expectile: float = option(
            0.7, low=0.5, high=1.0, help="Expectile of the recorded actions' values that the value network learns: 0.5 "
            "is their mean, and near 1 it is the largest one.")
        advantage_beta: float = option(
            3.0, low=0.0, help="Factor of advantages in the exponent of the policy's weights; 0 clones the behavior.")
        max_weight: float = option(
            100.0, low=0.0, exclusive=True, help="Largest weight of a sample in the policy's loss.")

    actor_class: ClassVar[type[nn.Module]] = ValueActor
    actor_options: ClassVar[Mapping[str, tuple[object, ...]]] = {**ReplayAlgorithm.actor_options,
                                                                 "policy": ("stochastic",)}
    target_groups: ClassVar[tuple[str, ...]] = ("q",)
    actor: ValueActor

    @override
    def choose(self, obs: Obs, done: Tensor, deterministic: bool, mask: Tensor | None) -> Tensor:
        return self.actor.act(obs, deterministic, mask, self.generator)

    @override
    def losses(self, batch: ReplayBatch) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
        actor, options = self.actor, self.options
        obs, next_obs = actor.normalize(batch.obs), actor.normalize(batch.next_obs)
        with torch.no_grad():
            q = actor.scores_of(self.targets["q"], obs, batch.action).amin(0)
            target = batch.ret + batch.discount * actor.value(next_obs).squeeze(-1)
        value = actor.value(obs).squeeze(-1)
        advantage = q - value
        weight = (options.advantage_beta * advantage.detach()).exp().clamp(max=options.max_weight)
        deltas = actor.scores_of(actor.critics, obs, batch.action) - target
        losses = {
            "q": 0.5 * (batch.weight * deltas.square()).mean(-1).sum(),
            "pi": -(weight * actor.log_prob(obs, batch.action, batch.mask)).mean(),
            "v": (batch.weight * expectile_loss(advantage, options.expectile)).mean()}
        measures = {"q": q.mean(), "value": value.detach().mean(), "weight": weight.mean()}
        return losses, measures, deltas.detach().abs().mean(0)


def expectile_loss(errors: Tensor, expectile: float) -> Tensor:
    """Return abs(expectile - 1(u < 0)) u^2 for each error u (...,) of a prediction: positive errors weigh more."""
    return torch.where(errors < 0, 1 - expectile, expectile) * errors.square()
