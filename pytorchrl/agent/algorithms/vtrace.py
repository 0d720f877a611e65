"""What algorithms share that learn from slightly older policies by V-trace. T = steps, E = environments."""

from __future__ import annotations

import torch
from torch import Tensor

from pytorchrl.agent.algorithms.on_policy import OnPolicyAlgorithm, rows_at_once
from pytorchrl.agent.contracts import check_per_sample
from pytorchrl.agent.data import DataKind, Obs, RolloutData


class VTraceAlgorithm(OnPolicyAlgorithm):
    """An on-policy algorithm that takes its targets from a `VTraceBuffer`, so that its data may be a few updates old.

    Collectors compute no values: those of the weights that acted are of no use to the learner.
    """

    learns_from = DataKind.OLDER_ROLLOUTS

    def evaluate_rollout(
        self, rollout: RolloutData, sequence_length: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What V-trace needs to know of the present weights, without gradient.

        Memory is unrolled over sequences from their stored first state, exactly as losses do it. The state before the
        last row, and before final observations, is the stored one: so the sequence that follows would see them.

        Args:
            rollout: T steps of E environments.
            sequence_length: Steps of a sequence, for actors with memory; None: the whole rollout.

        Returns:
            (T, E) log-probabilities of the recorded actions by the policy to learn about; (T + 1, E) values; (K,)
            values of the final observations. All float32 on the CPU.
        """
        length = rows_at_once(rollout.obs)
        if self.actor.is_recurrent:
            length = sequence_length or rollout.num_steps
        logps, values = [], []
        with torch.no_grad(), self._precision():
            for start in range(0, rollout.num_steps, length):
                part = slice(start, min(start + length, rollout.num_steps))
                inputs = self._to_device(
                    {name: leaf[part] for name, leaf in rollout.obs.items()},
                    {name: state[start] for name, state in rollout.rhs.items()},
                    rollout.done[part], None if rollout.mask is None else rollout.mask[part])
                logp, value = self.evaluate_target(*inputs[:3], rollout.action[part].to(self.device), inputs[3])
                for row in (logp, value):
                    check_per_sample(self, "evaluate_target()", row, rollout.reward[part])
                logps.append(logp.float().cpu())
                values.append(value.float().cpu())
        return torch.cat(logps), *self.compute_values(rollout, torch.cat(values))

    def evaluate_target(
        self, obs: Obs, rhs: Obs, done: Tensor, action: Tensor, mask: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the target policy's log-probabilities of the recorded actions, and the current values; each is (L, E).

        The target policy is the actor's policy, unless a subclass chooses another. The method is called without gradient.

        Args:
            obs: Leaf -> (L, E, ...).
            rhs: Network -> (E, H), the memory before the first row; empty without memory.
            done: (L, E) bool, whether a row is the first of its episode.
            action: (L, E, ...).
            mask: (L, E, n) bool, true where an action is allowed, or None.
        """
        logp, _, value = self.actor.evaluate(obs, rhs, done, action, mask)
        return logp, value
