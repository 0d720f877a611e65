"""Storage for algorithms that learn from rollouts of slightly outdated policies. T = steps, E = environments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from pytorchrl.agent.data import DataKind, RolloutData
from pytorchrl.agent.options import option
from pytorchrl.agent.storages.on_policy import RolloutLearner, VanillaOnPolicyBuffer
from pytorchrl.agent.storages.returns import Estimates, vtrace


class VTraceLearner(RolloutLearner, Protocol):
    """The members of an algorithm that `VTraceBuffer` uses; see `VTraceAlgorithm`."""

    def evaluate_rollout(
        self, rollout: RolloutData, sequence_length: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return log-probabilities (T, E), values (T + 1, E), and values (K,) of the K rows of `rollout.final_obs`."""


class VTraceBuffer(VanillaOnPolicyBuffer):
    """Storage of rollouts with V-trace targets and advantages, which correct for the policy updates since collection.

    Rollouts arrive with log-probabilities, but without values. The learner computes values and the current policy's
    log-probabilities with its own weights, once for all minibatches of a train batch.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(VanillaOnPolicyBuffer.Options):
        """Options of `VTraceBuffer`."""

        rho_bar: float = option(
            1.0, help="Largest importance weight of a temporal difference.", low=0.0, exclusive=True)
        c_bar: float = option(
            1.0, help="Largest importance weight of corrections from later steps.", low=0.0, exclusive=True)
        vtrace_lambda: float = option(1.0, help="Bias-variance trade-off of the targets.", low=0.0, high=1.0)

    provides = DataKind.OLDER_ROLLOUTS
    options: Options
    algorithm: VTraceLearner

    def estimate(self, rollout: RolloutData, recompute: bool = False) -> Estimates:
        """Compute a rollout's advantages and V-trace targets with the current weights, (T, E) float32 each."""
        options = self.options
        logp, value, final_value = self.algorithm.evaluate_rollout(rollout, options.sequence_length)
        if not recompute:  # keep the values from before the first update with this rollout, for value clipping
            rollout.other["value"] = value
        return vtrace(
            rollout, logp, value, final_value, self.algorithm.gamma, rho_bar=options.rho_bar, c_bar=options.c_bar,
            vtrace_lambda=options.vtrace_lambda, reward=self.rewards_of(rollout))
