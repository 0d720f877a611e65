"""The storage of algorithms that learn from slightly older policies. T = steps, E = environments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from pytorchrl.agent.data import DataKind, RolloutData
from pytorchrl.agent.options import option
from pytorchrl.agent.storages.on_policy import RolloutLearner, VanillaOnPolicyBuffer
from pytorchrl.agent.storages.returns import vtrace


class VTraceLearner(RolloutLearner, Protocol):
    """The members of an algorithm that `VTraceBuffer` uses; see `VTraceAlgorithm`."""

    def evaluate_rollout(
        self, rollout: RolloutData, sequence_length: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return log-probabilities (T, E), values (T + 1, E) and values of final observations (K,)."""


class VTraceBuffer(VanillaOnPolicyBuffer):
    """Rollouts with V-trace targets and advantages, which correct for the policy having moved on since they were made.

    Rollouts come with log-probabilities alone. Values, and the policy's own log-probabilities, are computed by the
    learner's weights when it opens an item, once for all batches.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(VanillaOnPolicyBuffer.Options):
        """Options of `VTraceBuffer`."""

        rho_bar: float = option(
            1.0, help="Largest importance weight of a temporal difference.", low=0.0, exclusive=True)
        c_bar: float = option(
            1.0, help="Largest importance weight of what comes back from later steps.", low=0.0, exclusive=True)
        vtrace_lambda: float = option(1.0, help="Bias-variance trade-off of the targets.", low=0.0, high=1.0)

    gives = DataKind.OLDER_ROLLOUTS
    algorithm: VTraceLearner

    def estimate(self, rollout: RolloutData, anew: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Advantages and targets of a rollout by the present weights, (T, E) each."""
        options = self.options
        logp, value, final_value = self.algorithm.evaluate_rollout(rollout, options.sequence_length)
        if not anew:  # a clipped value loss counts from the values when the item was opened
            rollout.other["value"] = value
        return vtrace(
            rollout, logp, value, final_value, self.algorithm.gamma, rho_bar=options.rho_bar, c_bar=options.c_bar,
            vtrace_lambda=options.vtrace_lambda, reward=self.rewards_of(rollout))
