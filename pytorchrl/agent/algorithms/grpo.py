"""Group relative policy optimization (Shao et al. 2024). L = steps of the longest episode, B = episodes of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from pytorchrl.agent.actors.decoder import DecoderActor
from pytorchrl.agent.actors.on_policy_actor import OnPolicyActor
from pytorchrl.agent.algorithms.on_policy import OnPolicyAlgorithm
from pytorchrl.agent.algorithms.registry import algorithm
from pytorchrl.agent.algorithms.rollouts import RolloutAlgorithm
from pytorchrl.agent.data import Batch, DataKind, Evaluated, LossParameters, Obs, RolloutData, TensorActing
from pytorchrl.agent.options import option
from pytorchrl.agent.schedules import Schedule
from pytorchrl.agent.storages import GroupBuffer


@algorithm("grpo", storage=GroupBuffer, actor=DecoderActor)
class GRPO(OnPolicyAlgorithm):
    """Policy gradients with advantages relative to a group of episodes, and without a value.

    The loss is the mean over all steps (tokens) of the clipped surrogate of `PPO`, minus an entropy bonus.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(RolloutAlgorithm.Options):
        """Options of `GRPO`."""

        lr: float | Schedule = option(1e-3, help="Learning rate.", low=0.0, updatable=True)
        num_epochs: int = option(1, help="Passes over each rollout.", low=1)
        num_mini_batch: int = option(1, help="Number of minibatches per pass over a rollout.", low=1)
        max_grad_norm: float | None = option(
            1.0, help="Largest global norm of a gradient; None means no limit.", low=0.0, exclusive=True,
            updatable=True)
        clip_param: float | Schedule = option(
            0.2, help="Largest deviation of the probability ratio from 1 that the loss rewards.", low=0.0,
            exclusive=True, updatable=True)
        entropy_coef: float | Schedule = option(0.005, help="Weight of the entropy bonus.", low=0.0, updatable=True)
        advantage_normalization = "none"

    learns_from = DataKind.GROUPS
    actor_class = OnPolicyActor
    actor: OnPolicyActor
    version: int = 0
    """Number of updates that led to the weights with which the algorithm acts."""

    # Acting

    @override
    def _choose(
        self, obs: Obs, rhs: Obs, done: Tensor, mask: Tensor | None, deterministic: bool,
    ) -> TensorActing:
        step = super()._choose(obs, rhs, done, mask, deterministic)
        logp = self.actor.log_prob_from_params(step.other["dist_params"], step.action, mask)
        version = torch.full(logp.shape, self.version, dtype=torch.int32, device=logp.device)
        return step._replace(other={"logp": logp, "version": version})

    @override
    def finish_rollout(self, rollout: RolloutData) -> None:
        """Add `value` (T, S), zeros, which the layout of batches expects."""
        rollout.other["value"] = torch.zeros_like(rollout.reward)

    # Learning

    @override
    def terms(
        self, evaluated: Evaluated, batch: Batch, parameters: LossParameters,
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Compute the terms of the loss; see `PPO.terms`."""
        clip, advantage = parameters["clip_param"], batch.advantage
        log_ratio = evaluated.logp - batch.logp
        if batch.valid is not None:
            log_ratio = torch.where(batch.valid, log_ratio, 0.0)
        ratio = log_ratio.exp()
        surrogate = torch.minimum(ratio * advantage, ratio.clamp(1.0 - clip, 1.0 + clip) * advantage)
        with torch.no_grad():
            distance = ratio - 1.0
            measures = {"kl": distance - log_ratio, "clip_fraction": (distance.abs() > clip).float()}
        return {"policy_loss": -surrogate, "entropy": evaluated.entropy}, measures

    @override
    def loss_weights(self, parameters: Mapping[str, float]) -> dict[str, float]:
        return {"policy_loss": 1.0, "entropy": -parameters["entropy_coef"]}
