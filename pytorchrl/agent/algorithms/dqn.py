"""Deep Q-learning (Mnih et al. 2015), double (van Hasselt et al. 2016) and distributional (Bellemare et al. 2017)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor, nn
from typing_extensions import override

from pytorchrl.agent.actors.q_actor import QActor, best_action
from pytorchrl.agent.actors.return_distributions import DISTRIBUTIONS
from pytorchrl.agent.algorithms.epsilon import EpsilonGreedy, EpsilonOptions
from pytorchrl.agent.algorithms.registry import algorithm
from pytorchrl.agent.algorithms.replay import (
    NUM_UPDATES_HELP,
    POLYAK_HELP,
    TARGET_UPDATE_INTERVAL_HELP,
    UPDATE_EVERY_HELP,
    ReplayAlgorithm,
)
from pytorchrl.agent.contracts import check_per_sample
from pytorchrl.agent.data import ReplayBatch
from pytorchrl.agent.options import AgentOptions, option
from pytorchrl.agent.schedules import Schedule
from pytorchrl.agent.storages import PERBuffer, ReplayBuffer


@algorithm("dqn", storage=ReplayBuffer, prioritized_storage=PERBuffer)
class DQN(EpsilonGreedy, ReplayAlgorithm):
    """Q-learning: the actor learns the values of actions, and acts epsilon-greedily.

    The TD error is delta = R + DISC * Q_target(o', a*) - Q(o, a), with the n-step return R and the discount DISC from
    the storage. The action a* is argmax_a Q(o', a) if the option `double` is set, and otherwise argmax_a
    Q_target(o', a). The loss is the mean of w * l(delta), with the weights w from the storage and the function l that
    the option `loss` selects.

    If the actor has the option `distribution`, it learns the distribution of the return instead of Q, the mean: the
    target is the distribution of R + DISC * Z_target(o', a*), and `return_distributions` defines the loss of a sample,
    which also takes the place of abs(delta) for priorities.

    Epsilon follows a schedule; see `EpsilonGreedy`.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(EpsilonOptions, ReplayAlgorithm.Options):
        """Options of `DQN`; dueling and noisy networks are options of the actor."""

        lr: float | Schedule = option(1e-4, help="Learning rate.", low=0.0, updatable=True)
        double: bool = option(True, help="Choose the target's action with the online network, not the target network.")
        loss: str = option(
            "huber", help="Loss of a TD error: huber (quadratic up to 1, linear beyond) or mse.",
            choices=("huber", "mse"))
        update_every: int = option(4, help=UPDATE_EVERY_HELP, low=1)
        num_updates: int = option(1, help=NUM_UPDATES_HELP, low=1)
        mini_batch_size: int = option(32, help="Transitions per batch.", low=1)
        polyak: float = option(0.0, help=POLYAK_HELP, low=0.0, high=1.0)
        target_update_interval: int = option(1000, help=TARGET_UPDATE_INTERVAL_HELP, low=1)
        max_grad_norm: float | None = option(
            10.0, help="Largest global norm of a gradient; None means no limit.", low=0.0, exclusive=True,
            updatable=True)

    actor_class: ClassVar[type[nn.Module]] = QActor
    actor_options: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **ReplayAlgorithm.actor_options, "distribution": DISTRIBUTIONS}
    target_groups: ClassVar[tuple[str, ...]] = ("q",)
    actor: QActor

    @classmethod
    def contradiction(cls, agent: AgentOptions) -> str | None:
        """Refuse a `loss` of TD errors if the actor learns a distribution, which has a loss of its own."""
        kind = getattr(agent.actor, "distribution", None)
        if kind is not None and agent.algorithm is not None and "loss" in agent.algorithm.changed():
            return (f"loss={agent.algorithm.loss!r} needs an actor with distribution=None, got distribution={kind!r}, "
                    "which has a loss of its own; leave loss or distribution out")
        return super().contradiction(agent)

    def __init__(self, options: DQN.Options, *, actor: QActor, seed: int, device: str = "cpu") -> None:
        """Build the algorithm; see `Algorithm` for the arguments."""
        super().__init__(options, actor=actor, seed=seed, device=device)
        self._loss: Callable[[Tensor, Tensor], Tensor] = functools.partial(
            F.huber_loss if options.loss == "huber" else F.mse_loss, reduction="none")
        if actor.estimate.num_atoms is not None:
            self._loss = actor.estimate.loss

    # Learning

    def target_values(self, batch: ReplayBatch) -> Tensor:
        """Return the targets (B,) float32 for the values of the batch's actions; gradients are disabled.

        If the actor learns distributions with k atoms, the targets are (B, k), as `actor.estimate.target` returns them.
        A subclass may define other targets. `batch.ret` and `batch.discount` cover up to n steps, `self.targets["q"]`
        is the target network, and `actor.normalize` converts observations to inputs of the networks.
        """
        actor, generator = self.actor, self.update_generator
        next_obs, estimate = actor.normalize(batch.next_obs), actor.estimate
        outputs: Tensor = self.targets["q"](next_obs, batch.next_mask, generator)
        choosing = actor.q(next_obs, batch.next_mask, generator) if self.options.double else outputs
        best = best_action(estimate.mean(choosing), batch.next_mask)
        return estimate.target(estimate.of_action(outputs, best), batch.ret, batch.discount)

    @override
    def losses(self, batch: ReplayBatch) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
        with torch.no_grad():
            target = self.target_values(batch)
        actor, estimate = self.actor, self.actor.estimate
        outputs = estimate.of_action(actor.q(actor.normalize(batch.obs), batch.mask, self.update_generator),
                                     batch.action)
        if not self._is_loss_checked:
            check_per_sample(self, "target_values()", target, outputs,
                             "one number" if estimate.num_atoms is None else "the atoms of a distribution")
        loss = self._loss(outputs, target)
        score = estimate.mean(outputs.detach())
        return {"q": (batch.weight * loss).mean()}, {"q": score.mean()}, estimate.errors(
            outputs.detach(), target, loss.detach())
