"""Storage of groups of episodes, whose advantages are relative to their group. T = steps, S = episodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
from typing_extensions import override

from pytorchrl.agent.data import DataKind, RolloutData
from pytorchrl.agent.env.tokens import TokenEnv
from pytorchrl.agent.options import AgentOptions, option
from pytorchrl.agent.options import Options as BaseOptions
from pytorchrl.agent.storages.group_rows import GroupRows
from pytorchrl.agent.storages.on_policy import VanillaOnPolicyBuffer
from pytorchrl.agent.storages.returns import Estimates
from pytorchrl.agent.storages.rollout_rows import RolloutRows

_SMALL = 1e-4


class GroupBuffer(VanillaOnPolicyBuffer):
    """Storage of groups of episodes that begin with the same observations, such as answers to the same prompt.

    The advantage of all steps of an episode is its return minus the mean return of its group: Shao et al. 2024 (GRPO),
    section 4.1.2. A rollout contains whole groups, and a group waits for its last member.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(BaseOptions):
        """Options of `GroupBuffer`."""

        size: int = option(help="Number of groups in a rollout.", low=1)
        group_size: int = option(TokenEnv.Options.group_size, help="Number of episodes of a group.", low=2)
        scale_advantages: bool = option(
            True, help="Divide advantages by the standard deviation of the returns of their group, as in GRPO. False "
                       "avoids that groups with nearly equal returns count more (Liu et al. 2025, Dr. GRPO).")

    provides = DataKind.GROUPS
    keeps_unfinished = True
    options: Options  # type: ignore[assignment] # it has no `sequence_length`

    @override
    def _make_rows(self) -> RolloutRows:
        self._groups = GroupRows(self.options.size, self.options.group_size, self.num_envs,
                                 self.actor.initial_states(self.num_envs), self.algorithm)
        return cast("RolloutRows", self._groups)  # it has the same methods

    @property
    @override
    def full(self) -> bool:
        return self._groups.is_full

    @property
    @override
    def rollout_size(self) -> int:
        return 1

    @property
    @override
    def num_unfinished(self) -> int:
        return self._groups.num_unfinished

    @property
    @override
    def keeps_tensors(self) -> bool:
        return False

    @property
    @override
    def sequence_length(self) -> None:
        return None

    @override
    def plan_batches(self, num_rollouts: int) -> None:
        pass

    @override
    def estimate(self, rollout: RolloutData, recompute: bool = False) -> Estimates:
        """Return the advantages of a rollout's steps, and the returns of their episodes, (T, S) float32 each."""
        reward, valid = rollout.reward.numpy(), rollout.valid.numpy()
        ages = valid.cumsum(0) - 1  # number of earlier valid steps
        discounted = np.where(valid, reward * self.algorithm.gamma ** ages, 0.0)
        returns = discounted.sum(0, dtype=np.float32).reshape(-1, self.options.group_size)
        advantage = returns - returns.mean(1, keepdims=True)
        if self.options.scale_advantages:
            advantage /= returns.std(1, ddof=1, keepdims=True) + _SMALL
        return _repeated(advantage, reward.shape), _repeated(returns, reward.shape)

    @classmethod
    @override
    def contradiction(cls, agent: AgentOptions) -> str | None:
        return None


def _repeated(values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return a value of each episode, (groups, group_size), at each of its steps, (T, S)."""
    return np.broadcast_to(values.reshape(-1), shape).copy()
