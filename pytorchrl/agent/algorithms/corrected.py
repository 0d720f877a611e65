"""The base class of on-policy algorithms that correct for the lag of their data. T = steps, E = environments."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from pytorchrl.agent.algorithms.corrections import CORRECTIONS, CorrectionOptions, RegisteredCorrection, Steps
from pytorchrl.agent.algorithms.on_policy import OnPolicyAlgorithm
from pytorchrl.agent.algorithms.rollouts import RolloutAlgorithm
from pytorchrl.agent.data import VERSION, Batch, Evaluated, LossParameters, Obs, RolloutData

PROXIMAL, LAG = "proximal", "lag"
"""Entries of `RolloutData.other` and of `Batch.other`: log-probabilities just before the first update with the data,
and the number of updates since an action was chosen."""


class CorrectedAlgorithm(OnPolicyAlgorithm):
    """The base class of algorithms whose policy loss is a correction for the lag of their data; see `corrections`."""

    @dataclass(frozen=True, kw_only=True)
    class Options(CorrectionOptions, RolloutAlgorithm.Options):
        """Options of algorithms with a correction."""

    @property
    def _correction(self) -> RegisteredCorrection:
        return CORRECTIONS[self.options.correction]

    @property
    @override
    def sample_values(self) -> tuple[str, ...]:
        own = ((VERSION, self._correction.needs_lag), (PROXIMAL, self._correction.needs_proximal))
        return (*super().sample_values, *(name for name, is_needed in own if is_needed))

    @override
    def finish_rollout(self, rollout: RolloutData) -> None:
        super().finish_rollout(rollout)
        if self._correction.needs_lag and rollout.versions is None:
            rollout.other[VERSION] = torch.full_like(rollout.reward, self.version, dtype=torch.int32)

    @override
    def prepare_rollout(self, rollout: RolloutData, sequence_length: int | None = None) -> None:
        """Add `proximal` (T, E), the log-probabilities with the current weights, if the correction needs them."""
        if self._correction.needs_proximal:
            rollout.other[PROXIMAL], = self.evaluate_steps(
                rollout, self._logp_of, sequence_length, "evaluate_actions")

    def _logp_of(self, obs: Obs, rhs: Obs, done: Tensor, action: Tensor, mask: Tensor | None) -> tuple[Tensor, ...]:
        return self.actor.evaluate_actions(obs, rhs, done, action, mask)[:1]

    @override
    def prepare_batch(self, batch: Batch) -> Batch:
        """Add the lag of each step if the correction needs it; see `OnPolicyAlgorithm.prepare_batch`."""
        batch = super().prepare_batch(batch)
        if VERSION not in batch.other:
            return batch
        other = {name: value for name, value in batch.other.items() if name != VERSION}
        return dataclasses.replace(batch, other={**other, LAG: self.version - batch.other[VERSION]})

    @staticmethod
    def steps_of(evaluated: Evaluated, batch: Batch) -> Steps:
        """Return the inputs of a correction."""
        return Steps.of(evaluated.logp, batch.logp, batch.advantage, batch.valid,
                        proximal=batch.other.get(PROXIMAL), lag=batch.other.get(LAG))

    def corrected(self, steps: Steps, parameters: LossParameters) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the surrogate of each step, and measures: an estimate of the KL divergence, and whether a step is cut.

        A step is cut if its ratio or weight is clipped or truncated, or if it is left out.
        """
        surrogate, is_cut = self.options.corrected(steps, parameters["clip_param"])
        with torch.no_grad():
            kl = steps.ratio - 1.0 - steps.log_ratio  # the estimator "k3" of http://joschu.net/blog/kl-approx.html
        return surrogate, {"kl": kl, "clip_fraction": is_cut}
