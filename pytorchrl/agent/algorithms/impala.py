"""Importance weighted actor-learner architecture (Espeholt et al. 2018)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch.optim import Optimizer

from pytorchrl.agent.algorithms.a2c import A2C
from pytorchrl.agent.algorithms.optimizers import OPTIMIZER_HELP, OPTIMIZERS
from pytorchrl.agent.algorithms.registry import algorithm
from pytorchrl.agent.algorithms.vtrace import VTraceAlgorithm
from pytorchrl.agent.options import option
from pytorchrl.agent.schedules import Schedule
from pytorchrl.agent.storages import VTraceBuffer
from pytorchrl.errors import Problem


@algorithm("impala", storage=VTraceBuffer)
class IMPALA(VTraceAlgorithm, A2C):
    """A2C's loss with the advantages A and targets v of a `VTraceBuffer`.

    With the value V and the entropy H of the policy pi:
    loss = -mean log pi(a|o) A + value_loss_coef * mean (V - v)^2 / 2 - entropy_coef * mean H.

    In Espeholt et al. 2018, the loss is the sum over T * B = 640 samples. The loss of this class is the mean, so its
    gradients are 640 times smaller. To repeat the paper's settings, divide its largest gradient norm by 640 and its
    epsilon of RMSProp by 640^2: max_grad_norm = 40 / 640, and rmsprop_eps = 0.01 / 640^2. One difference remains: the
    optimizer "rmsprop_tf" starts its running mean of squared gradients at 1, but to repeat the paper, it would have to
    start at 1 / 640^2. The first thousand updates are therefore smaller than the paper's.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(A2C.Options):
        """Options of `IMPALA`; some defaults differ from those of `A2C`."""

        lr: float | Schedule = option(5e-4, help="Learning rate.", low=0.0, updatable=True)
        optimizer: str | Callable[..., Optimizer] = option(
            VTraceAlgorithm.Options.optimizer, help=OPTIMIZER_HELP, choices=OPTIMIZERS)
        max_grad_norm: float | None = option(
            40.0, help="Largest global norm of a gradient; None means no limit.", low=0.0, exclusive=True,
            updatable=True)

        def contradictions(self) -> Iterator[Problem]:
            """Refuse the normalization of advantages."""
            yield from super().contradictions()
            if self.advantage_normalization != "none":
                yield Problem(
                    f'IMPALA needs advantage_normalization="none", got "{self.advantage_normalization}", because '
                    "subtracting the mean from advantages of an older policy pushes the current policy away from it "
                    "without limit", "use APPO, whose clipping bounds this effect", ("advantage_normalization",))
