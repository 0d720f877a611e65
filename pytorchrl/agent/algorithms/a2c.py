"""Advantage actor-critic, the synchronous variant of A3C (Mnih et al. 2016). B = samples of a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from pytorchrl.agent.algorithms.on_policy import ADVANTAGE_NORMALIZATION_HELP, OnPolicyAlgorithm
from pytorchrl.agent.algorithms.optimizers import OPTIMIZER_HELP, OPTIMIZERS
from pytorchrl.agent.algorithms.registry import algorithm
from pytorchrl.agent.algorithms.rollouts import NUM_MINI_BATCH_HELP
from pytorchrl.agent.data import Batch, Evaluated, LossParameters
from pytorchrl.agent.options import option
from pytorchrl.agent.schedules import Schedule
from pytorchrl.agent.storages import GAEBuffer


@algorithm("a2c", storage=GAEBuffer)
class A2C(OnPolicyAlgorithm):
    """Policy gradient with a value baseline; one optimizer updates the whole actor.

    With the advantage A, the value V, the return R and the entropy H of the policy pi:
    loss = -mean log pi(a|o) A + value_loss_coef * mean (V - R)^2 / 2 - entropy_coef * mean H.
    """

    nearest_with_lag = "IMPALA"

    @dataclass(frozen=True, kw_only=True)
    class Options(OnPolicyAlgorithm.Options):
        """Options of `A2C`; some defaults differ from those of `OnPolicyAlgorithm`."""

        lr: float | Schedule = option(7e-4, help="Learning rate.", low=0.0, updatable=True)
        optimizer: str | Callable[..., Optimizer] = option("rmsprop_tf", help=OPTIMIZER_HELP, choices=OPTIMIZERS)
        num_epochs: int = option(OnPolicyAlgorithm.num_epochs, help="Passes over each rollout.", low=1)
        num_mini_batch: int = option(OnPolicyAlgorithm.num_mini_batch, help=NUM_MINI_BATCH_HELP, low=1)
        advantage_normalization: str = option(
            OnPolicyAlgorithm.advantage_normalization, help=ADVANTAGE_NORMALIZATION_HELP,
            choices=("minibatch", "batch", "none"))

    @override
    def terms(
        self, evaluated: Evaluated, batch: Batch, parameters: LossParameters,
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        return {
            "policy_loss": -evaluated.logp * batch.advantage,
            "value_loss": 0.5 * (evaluated.value - batch.ret).square(),
            "entropy": evaluated.entropy,
        }, {}
