"""Group relative policy optimization (Shao et al. 2024). L = steps of the longest episode, B = episodes of a batch."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from pytorchrl.agent.actors.decoder import DecoderActor
from pytorchrl.agent.algorithms.corrected import CorrectedAlgorithm
from pytorchrl.agent.algorithms.corrections import difference
from pytorchrl.agent.algorithms.generation import ON_NEW_WEIGHTS, Generation
from pytorchrl.agent.algorithms.registry import algorithm
from pytorchrl.agent.data import (
    VERSION,
    Batch,
    DataKind,
    Evaluated,
    LossParameters,
    Obs,
    RolloutData,
    TensorActing,
)
from pytorchrl.agent.env.tokens import TokenEnv
from pytorchrl.agent.options import AgentOptions, option
from pytorchrl.agent.schedules import Schedule
from pytorchrl.agent.storages import GroupBuffer
from pytorchrl.errors import Problem

REFERENCE = "reference"
"""Entry of `RolloutData.other` and of `Batch.other`: log-probabilities of the reference policy."""


@algorithm("grpo", storage=GroupBuffer, actor=DecoderActor, environments=TokenEnv)
class GRPO(CorrectedAlgorithm):
    """Policy gradients with advantages relative to a group of episodes, and without a value.

    The loss is minus the mean over all steps (tokens) of the surrogate of a correction, by default that of `PPO`, minus
    an entropy bonus, plus reference_kl_coef times the divergence from the policy before training.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(CorrectedAlgorithm.Options):
        """Options of `GRPO`."""

        lr: float | Schedule = option(1e-3, help="Learning rate.", low=0.0, updatable=True)
        num_epochs: int = option(1, help="Passes over each rollout.", low=1)
        num_mini_batch: int = option(1, help="Number of minibatches per pass over a rollout.", low=1)
        max_grad_norm: float | None = option(
            1.0, help="Largest global norm of a gradient; None means no limit.", low=0.0, exclusive=True,
            updatable=True)
        entropy_coef: float | Schedule = option(0.005, help="Weight of the entropy bonus.", low=0.0, updatable=True)
        gamma: float = option(1.0, help="Discount of rewards.", low=0.0, high=1.0)
        reference_kl_coef: float = option(
            0.0, help="Weight of the KL divergence from the reference policy, the policy before training; 0 omits it.",
            low=0.0)
        on_new_weights: str = option(
            "finish", choices=ON_NEW_WEIGHTS,
            help="Reaction to new weights while a sequence grows: finish it with the old weights, or use the new ones "
                 "at once and keep the keys and values of the earlier tokens, or recompute them.")

        advantage_normalization = "none"

        def contradictions(self) -> Iterator[Problem]:
            """Refuse a number of steps per minibatch, because minibatches consist of episodes of different lengths."""
            yield from super().contradictions()
            if self.mini_batch_size is not None:
                yield Problem("mini_batch_size has no effect on GRPO, whose minibatches are whole episodes",
                              "give num_mini_batch instead", ("mini_batch_size",))

    learns_from = DataKind.GROUPS
    actor_class = DecoderActor
    actor: DecoderActor

    @classmethod
    @override
    def contradiction(cls, agent: AgentOptions) -> str | None:
        """Return a message if keys and values should be kept, but the actor has none."""
        if getattr(agent.actor, "module", None) is not None and agent.algorithm.on_new_weights == "keep":
            return ("on_new_weights='keep' needs the keys and values of DecoderActor's own decoder, but module is set; "
                    "use on_new_weights='recompute', or leave module out")
        return super().contradiction(agent)

    def __init__(self, options: GRPO.Options, *, actor: DecoderActor, seed: int, device: str = "cpu") -> None:
        """Build the algorithm; see `Algorithm` for the arguments."""
        super().__init__(options, actor=actor, seed=seed, device=device)  # type: ignore[arg-type] # without values
        self._generation = Generation(actor, options.on_new_weights)
        self._reference = copy.deepcopy(actor).requires_grad_(False) if options.reference_kl_coef else None

    # Acting

    @override
    def _choose(
        self, obs: Obs, rhs: Obs, done: Tensor, mask: Tensor | None, deterministic: bool,
    ) -> TensorActing:
        def act(actor: DecoderActor, obs: Obs, rhs: Obs, done: Tensor, mask: Tensor | None) -> TensorActing:
            with self._precision():
                action, clipped_action, dist_params, _, states = actor.act(
                    obs, rhs, done, deterministic, mask, self.generator, with_value=False)
            logp = actor.log_prob_from_params(dist_params, action, mask)
            return TensorActing(action, clipped_action, states, {"logp": logp})

        inputs = self._to_device(obs, rhs, done, mask)
        step, versions = self._generation.choose(act, *inputs, self.version)
        return step._replace(other={**step.other, VERSION: versions})

    @override
    def load_acting_state(self, state: Mapping[str, Tensor | np.ndarray]) -> None:
        self._generation.keep(self.version)
        super().load_acting_state(state)

    @override
    def apply_gradients(self, gradients: list[Tensor] | None = None) -> dict[str, float]:
        self._generation.keep(self.version)
        return super().apply_gradients(gradients)

    @override
    def finish_rollout(self, rollout: RolloutData) -> None:
        """Add `value` (T, S), zeros, which the layout of batches expects."""
        rollout.other["value"] = torch.zeros_like(rollout.reward)

    # Learning

    @property
    @override
    def sample_values(self) -> tuple[str, ...]:
        return super().sample_values if self._reference is None else (*super().sample_values, REFERENCE)

    @override
    def prepare_rollout(self, rollout: RolloutData, sequence_length: int | None = None) -> None:
        super().prepare_rollout(rollout, sequence_length)
        if self._reference is not None:
            rollout.other[REFERENCE], = self.evaluate_steps(
                rollout, self._reference_logp, sequence_length, "evaluate_actions")

    def _reference_logp(
        self, obs: Obs, rhs: Obs, done: Tensor, action: Tensor, mask: Tensor | None,
    ) -> tuple[Tensor, ...]:
        assert self._reference is not None
        return self._reference.evaluate_actions(obs, rhs, done, action, mask)[:1]

    @override
    def terms(
        self, evaluated: Evaluated, batch: Batch, parameters: LossParameters,
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Compute the terms of the loss; see `PPO.terms`.

        With `reference_kl_coef`, `reference_kl` is the estimate p / pi - 1 - log(p / pi) of the divergence KL(pi || p)
        from the reference p: Shao et al. 2024, equation 4.
        """
        steps = self.steps_of(evaluated, batch)
        surrogate, measures = self.corrected(steps, parameters)
        weight = steps.ratio.detach()
        terms = {"policy_loss": -surrogate, "entropy": evaluated.entropy}
        if self._reference is not None:
            log_ratio = difference(batch.other[REFERENCE], evaluated.logp, batch.valid)
            terms["reference_kl"] = log_ratio.exp() - 1.0 - log_ratio
        return terms, {**measures, "weight": weight, "weight_squared": weight.square()}

    @override
    def compute_gradients(self, batch: Batch) -> tuple[list[Tensor], dict[str, float]]:
        """Compute the gradient.

        With the importance weights w of the tokens, `info["effective_sample_size"]` is mean(w)^2 / mean(w^2): the share
        of tokens with equal weights whose mean would be as exact (Kong 1992).
        """
        gradients, info = super().compute_gradients(batch)
        squared = info.pop("weight_squared")
        info["effective_sample_size"] = info.pop("weight") ** 2 / squared if squared else 0.0
        return gradients, info

    @override
    def loss_weights(self, parameters: Mapping[str, float]) -> dict[str, float]:
        weights = {"policy_loss": 1.0, "entropy": -parameters["entropy_coef"]}
        return weights if self._reference is None else {**weights, "reference_kl": self.options.reference_kl_coef}
