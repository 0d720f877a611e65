"""Storage of groups of episodes, whose advantages are relative to their group. T = steps, S = episodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
from typing_extensions import override

from pytorchrl.agent.data import DataKind, RolloutData
from pytorchrl.agent.env import EnvFactory
from pytorchrl.agent.names import checked_names
from pytorchrl.agent.options import AgentOptions, Factory, build_options, option
from pytorchrl.agent.options import Options as BaseOptions
from pytorchrl.agent.storages.group_rows import GroupRows
from pytorchrl.agent.storages.on_policy import VanillaOnPolicyBuffer
from pytorchrl.agent.storages.returns import Estimates
from pytorchrl.agent.storages.rollout_rows import RolloutRows
from pytorchrl.support.tracebacks import brief_errors

if TYPE_CHECKING:
    from typing_extensions import Self

    from pytorchrl.agent.factories import StorageFactory

_SMALL = 1e-4
ORDERS = ("completed", "started")


class GroupBuffer(VanillaOnPolicyBuffer):
    """Storage of groups of episodes that begin with the same observations, such as answers to the same prompt.

    The advantage of all steps of an episode is its return minus the mean return of its group: Shao et al. 2024 (GRPO),
    section 4.1.2. A rollout contains whole groups, and a group waits for its last member. Episodes that have not ended
    when a rollout is full become part of later rollouts, unless `cancels_unfinished` is set.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(BaseOptions):
        """Options of `GroupBuffer`."""

        size: int | None = option(
            None, low=1, help="Number of groups in a rollout; None means those of all environments of a collector.")
        group_size: int | None = option(
            None, low=2, help="Number of episodes of a group; None means the group_size of the environments.")
        order: str = option(
            "completed", choices=ORDERS,
            help="Order in which groups leave: that in which they are completed, so that short episodes leave early, "
                 "or that in which they started, so that rollouts have episodes of all lengths in their shares.")
        cancels_unfinished: bool = option(
            False, help="Whether all environments start again when a rollout is full, so that it is never older than "
                        "its weights; steps of unfinished groups are then dropped, for the reason cancelled.")
        scale_advantages: bool = option(
            True, help="Divide advantages by the standard deviation of the returns of their group, as in GRPO. False "
                       "avoids that groups with nearly equal returns count more (Liu et al. 2025, Dr. GRPO).")

        @property
        def rollout_size(self) -> int:
            """Number of steps of each environment in a rollout; 1, because it is not known in advance."""
            return 1

    provides = DataKind.GROUPS
    keeps_unfinished = True
    options: Options  # type: ignore[assignment] # it has no `sequence_length`

    @classmethod
    @override
    @brief_errors
    @checked_names
    def create_factory(cls, size: int | None = None, **options: object) -> Factory[Self]:
        """Return a factory of this storage; raise `ConfigError` for an invalid option."""
        return Factory(cls, build_options(cls, {"size": size, **options}))

    @override
    def _make_rows(self) -> RolloutRows:
        size, group_size = self.options.size, self.options.group_size
        assert size is not None, "for_environments has set it"
        assert group_size is not None, "contradiction has refused it"
        self._groups = GroupRows(
            size, group_size, self.num_envs, self.actor.initial_states(self.num_envs), self.algorithm,
            in_order=self.options.order == "started")
        return cast("RolloutRows", self._groups)  # it has the same methods

    @property
    @override
    def full(self) -> bool:
        return self._groups.is_full

    @property
    @override
    def rollout_size(self) -> int:
        return self.options.rollout_size

    @property
    @override
    def num_unfinished(self) -> int:
        return self._groups.num_unfinished

    @property
    @override
    def cancels_unfinished(self) -> bool:
        return self.options.cancels_unfinished

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
        # In float64, the mean of equal returns is equal to them, and rounding is not scaled up to an advantage.
        returns = discounted.sum(0, dtype=np.float64).reshape(-1, self.options.group_size)
        advantage = returns - returns.mean(1, keepdims=True)
        if self.options.scale_advantages:
            advantage /= returns.std(1, ddof=1, keepdims=True) + _SMALL
        return _repeated(advantage, reward.shape), _repeated(returns, reward.shape)

    @classmethod
    @override
    def contradiction(cls, agent: AgentOptions) -> str | None:
        """Return a message if the size of a group is not known."""
        if agent.storage.group_size is not None:
            return None
        return ("GroupBuffer needs group_size, the number of consecutive episodes that begin with the same "
                "observations; give it, or use TokenEnv, which has one")


def for_environments(storage: StorageFactory, envs: EnvFactory) -> StorageFactory:
    """Return a storage's factory; that of a `GroupBuffer` gets the groups of the environments unless it has others."""
    kind = getattr(storage, "cls", None)  # the user may have passed anything
    if not (isinstance(kind, type) and issubclass(kind, GroupBuffer) and hasattr(envs, "options")):
        return storage
    options = storage.options
    group_size = options.group_size or getattr(envs.options, "group_size", None)
    size = options.size or max(1, envs.num_envs // (group_size or 1))
    return storage.with_options(group_size=group_size, size=size)


def _repeated(values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return a value of each episode, (groups, group_size), at each of its steps, (T, S)."""
    return np.broadcast_to(values.reshape(-1).astype(np.float32), shape).copy()
