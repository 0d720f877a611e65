"""The base class of algorithms that use V-trace to learn from older policies' rollouts. T = steps, E = environments."""

from __future__ import annotations

from torch import Tensor

from pytorchrl.agent.algorithms.on_policy import OnPolicyAlgorithm
from pytorchrl.agent.data import DataKind, Obs, RolloutData


class VTraceAlgorithm(OnPolicyAlgorithm):
    """The base class of on-policy algorithms that learn from a `VTraceBuffer`, whose data may be a few updates old.

    Collectors compute no values, because the learner needs values that are computed with its own weights.
    """

    learns_from = DataKind.OLDER_ROLLOUTS

    def evaluate_rollout(
        self, rollout: RolloutData, sequence_length: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Evaluate a rollout for V-trace with the current weights; gradients are disabled.

        For actors with memory, each sequence is unrolled from the stored memory state of its first step, exactly as in
        the loss. The values of `obs[T]` and of `final_obs` are computed with the memory states stored for them.

        Args:
            rollout: T steps of E environments.
            sequence_length: Steps per sequence, for actors with memory; None means the whole rollout.

        Returns:
            Log-probabilities (T, E) of the recorded actions under the target policy, values (T + 1, E), and values (K,)
            of the K observations in `rollout.final_obs`; all float32 on the device of the rewards.
        """
        logp, value = self.evaluate_steps(rollout, self.evaluate_target, sequence_length, "evaluate_target")
        return logp, *self.compute_values(rollout, value)

    def evaluate_target(
        self, obs: Obs, rhs: Obs, done: Tensor, action: Tensor, mask: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the target policy's log-probabilities of the recorded actions, and the current values; each is (L, E).

        The target policy is the actor's policy, unless a subclass chooses a different one. Gradients are disabled.

        Args:
            obs: Observations (L, E, ...) of L consecutive steps in E environments, by leaf.
            rhs: Memory (E, H) before the first of these steps, by network; empty without memory.
            done: (L, E) bool, whether an observation is the first of its episode.
            action: Recorded actions (L, E, ...).
            mask: (L, E, n) bool, true where an action is allowed, or None.
        """
        logp, _, value = self.actor.evaluate(obs, rhs, done, action, mask)
        return logp, value
