"""Proximal policy optimization (Schulman et al. 2017)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from typing_extensions import override

from pytorchrl.agent.actors import OnPolicyActor
from pytorchrl.agent.algorithms.corrected import CorrectedAlgorithm
from pytorchrl.agent.algorithms.corrections import CORRECTIONS
from pytorchrl.agent.algorithms.on_policy import OnPolicyAlgorithm
from pytorchrl.agent.algorithms.registry import algorithm
from pytorchrl.agent.algorithms.rnd import RND, IntrinsicOptions
from pytorchrl.agent.data import Batch, Evaluated, LossParameters
from pytorchrl.agent.moments import Moments
from pytorchrl.agent.options import option
from pytorchrl.agent.storages import GAEBuffer
from pytorchrl.errors import Problem

_KL_TOLERANCE = 1.5
"""The remaining batches of a rollout are skipped once the KL divergence exceeds this multiple of `target_kl`."""


@algorithm("ppo", storage=GAEBuffer)
class PPO(CorrectedAlgorithm):
    """Proximal policy optimization: the clipped surrogate objective, a value loss and an entropy bonus.

    The probability ratio of an action a is r = exp(log pi(a|o) - logp), where logp is the log-probability with which
    a was drawn. Let c be clip_param, A the advantage, V the value, R the return, and H the entropy. The loss is
    mean(-min(r * A, clip(r, 1 - c, 1 + c) * A)) + value_loss_coef * mean((V - R)^2) / 2 - entropy_coef * mean(H).
    """

    nearest_with_lag = "APPO"

    @dataclass(frozen=True, kw_only=True)
    class Options(CorrectedAlgorithm.Options, IntrinsicOptions, OnPolicyAlgorithm.Options):
        """Options of `PPO`."""

        use_clipped_value_loss: bool = option(
            False, help="Clip the change of a value during the updates from one rollout to at most clip_param_vf.")
        clip_param_vf: float | None = option(
            None, help="Largest change of a value during the updates from one rollout; None means clip_param.", low=0.0,
            exclusive=True, updatable=True)
        target_kl: float | None = option(
            None, help="Skip the remaining batches of a rollout once the KL divergence exceeds 1.5 times this value.",
            low=0.0, exclusive=True, updatable=True)
        recompute_advantages: bool = option(False, help="Recompute values and advantages before each epoch.")
        dual_clip: float | None = option(
            None, help="Largest loss of a sample with a negative advantage, as a multiple of the advantage's absolute "
            "value; None: no limit.", low=1.0,
            exclusive=True)

        def contradictions(self) -> Iterator[Problem]:
            """Yield contradictions, and options without an effect."""
            yield from super().contradictions()
            if not self.use_clipped_value_loss:
                yield from self._without_effect(("clip_param_vf",), "use_clipped_value_loss=True",
                                                "use_clipped_value_loss")
            if CORRECTIONS[self.correction].of_sequence:
                yield Problem(
                    f"correction={self.correction!r} needs whole sequences, but minibatches of PPO consist of steps",
                    "choose a correction of single steps, or GRPO", ("correction",))
            if self.correction != "ppo":
                yield from self._without_effect(("dual_clip",), "correction='ppo'", "correction")
            if self.recompute_advantages and self.advantage_normalization == "batch":
                yield Problem(
                    'recompute_advantages=True needs advantage_normalization "minibatch" or "none", got "batch", whose '
                    "moments are computed once, before the first epoch",
                    options=("recompute_advantages", "advantage_normalization"))

        @override
        def _used_bounds(self) -> set[str]:
            return super()._used_bounds() | ({"clip_param"} if self.use_clipped_value_loss else set())

    def __init__(self, options: PPO.Options, *, actor: OnPolicyActor, seed: int, device: str = "cpu") -> None:
        """Build the algorithm; see `Algorithm` for the arguments."""
        super().__init__(options, actor=actor, seed=seed, device=device)
        self.recompute_advantages = options.recompute_advantages

    @override
    def terms(
        self, evaluated: Evaluated, batch: Batch, parameters: LossParameters,
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Compute the terms of the loss.

        The additional measures are `kl` and `clip_fraction`, which is 1 for a sample whose ratio is clipped, else 0.
        """
        value = evaluated.value
        surrogate, measures = self.corrected(self.steps_of(evaluated, batch), parameters)
        if self.options.dual_clip is not None:
            bounded = torch.maximum(surrogate, self.options.dual_clip * batch.advantage)
            surrogate = torch.where(batch.advantage < 0, bounded, surrogate)
        error = (value - batch.ret).square()
        if self.options.use_clipped_value_loss:
            limit = parameters.get("clip_param_vf", parameters["clip_param"])
            clipped = batch.value + (value - batch.value).clamp(-limit, limit)
            error = torch.maximum(error, (clipped - batch.ret).square())
        terms = {"policy_loss": -surrogate, "value_loss": 0.5 * error, "entropy": evaluated.entropy}
        if self.intrinsic is None:
            return terms, measures
        own_terms, own_measures = self.intrinsic.terms(evaluated, batch)
        return {**terms, **own_terms}, {**measures, **own_measures}

    @override
    def loss_weights(self, parameters: Mapping[str, float]) -> dict[str, float]:
        own = {} if self.intrinsic is None else self.intrinsic.loss_weights(parameters)
        return {**super().loss_weights(parameters), **own}

    @override
    def compute_gradients(self, batch: Batch) -> tuple[list[Tensor], dict[str, float]]:
        """Compute the gradient.

        With `target_kl`, `info["skip_remaining"]` is 1.0 if the KL divergence is too large, else 0.0.
        """
        gradients, info = super().compute_gradients(batch)
        if "target_kl" in self.parameters:
            info["skip_remaining"] = float(self.skip_remaining(info))
        return gradients, info

    def skip_remaining(self, info: Mapping[str, float]) -> bool:
        """Return whether the KL divergence is so large that the remaining batches of the rollout must be skipped.

        Args:
            info: Statistics of one gradient, or their means over several workers; only `kl` is used.
        """
        return info["kl"] > _KL_TOLERANCE * self.parameters.get("target_kl", float("inf"))

    # The intrinsic reward

    @override
    def trained_parameters(self) -> dict[str, dict[str, nn.Parameter]]:
        """Return one group `all`: the parameters of the actor, then the trained ones of the intrinsic reward."""
        acting = super().trained_parameters()["all"]
        self._num_acting = sum(parameter.numel() for parameter in set(acting.values()))
        if self.options.intrinsic_reward is None:
            return {"all": acting}
        self.intrinsic = RND(self.actor, self.options)
        own = {f"rnd.{name}": value for name, value in self.intrinsic.named_parameters() if value.requires_grad}
        return {"all": {**acting, **own}}

    @override
    def take_moments(self) -> dict[str, Moments]:
        return {} if self.intrinsic is None else self.intrinsic.take_moments()

    @override
    def merge_moments(self, found: Mapping[str, Moments]) -> None:
        super().merge_moments(found)
        if self.intrinsic is not None:
            self.intrinsic.merge_moments(found)

    @override
    def reseed(self, seed: int) -> None:
        super().reseed(seed)
        if self.intrinsic is not None:
            self.intrinsic.forget_sums()

    @override
    def acting_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of the acting state, to which the intrinsic reward does not belong."""
        yield "all", self.groups["all"].data[:self._num_acting]
        yield from self.actor.state_buffers().items()

    @override
    def _learning_tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from super()._learning_tensors()
        if self.intrinsic is not None:
            yield "rnd", self.groups["all"].data[self._num_acting:]
            yield from self.intrinsic.learning_tensors()
