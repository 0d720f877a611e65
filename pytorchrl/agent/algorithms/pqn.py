"""Parallelized Q-network: Q(lambda) on rollouts, without replay and target network (Gallici et al. 2025).

T = steps in a rollout, E = environments, B = samples in a batch, n = actions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from pytorchrl.agent.actors.q_actor import QActor, best_action
from pytorchrl.agent.algorithms.base import ActOnDevice
from pytorchrl.agent.algorithms.epsilon import EpsilonGreedy, EpsilonOptions
from pytorchrl.agent.algorithms.optimizers import OPTIMIZER_HELP, OPTIMIZERS
from pytorchrl.agent.algorithms.precision import BatchShape, example_rows
from pytorchrl.agent.algorithms.registry import algorithm
from pytorchrl.agent.algorithms.rollouts import RolloutAlgorithm
from pytorchrl.agent.contracts import overrides
from pytorchrl.agent.data import ActingStep, Arrays, Batch, LossParameters, Obs, RolloutData, TensorActing
from pytorchrl.agent.options import option
from pytorchrl.agent.schedules import Schedule
from pytorchrl.agent.storages import GAEBuffer
from pytorchrl.agent.transfers import on_host


@algorithm("pqn", storage=GAEBuffer)
class PQN(EpsilonGreedy, RolloutAlgorithm):
    """Q-learning from rollouts of parallel environments; the actor acts epsilon-greedily.

    With V(o) = max_a Q(o, a), where a is an allowed action, the target of Q(o_t, a_t) is the lambda-return
    R_t = r_t + gamma * (lambda * R_{t+1} + (1 - lambda) * V(o_{t+1})): Gallici et al. 2025, section 4. At the end of an
    episode and at the end of a rollout, it is R_t = r_t + gamma * V(o'), where o' is the last observation of the
    episode or rollout; a termination also removes V(o'). The storage computes the same number as the sum of advantage
    and V, so its option `gae_lambda` is lambda. All V are computed with the weights that collected the rollout.

    The loss is the mean of (Q(o_t, a_t) - R_t)^2 / 2. There is neither replay nor a target network. Layer
    normalization (`norm="layer"` of the actor) keeps learning stable instead.
    """

    nearest_with_lag = "DQN"

    @dataclass(frozen=True, kw_only=True)
    class Options(EpsilonOptions, RolloutAlgorithm.Options):
        """Options of `PQN`; the normalization of layers and dueling networks are options of the actor."""

        lr: float | Schedule = option(2.5e-4, help="Learning rate.", low=0.0, updatable=True)
        optimizer: str | Callable[..., Optimizer] = option("radam", help=OPTIMIZER_HELP, choices=OPTIMIZERS)
        max_grad_norm: float | None = option(
            10.0, help="Largest global norm of a gradient; None means no limit.", low=0.0, exclusive=True,
            updatable=True)

    actor_class: ClassVar[type[nn.Module]] = QActor
    actor_options: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "recurrent_net": (None,), "noisy": (False,), "distribution": (None,)}

    @override
    def trained_parameters(self) -> dict[str, dict[str, nn.Parameter]]:
        """Return the parameters of the Q network, as the group `q`."""
        return {name: dict(network.named_parameters()) for name, network in self.actor.networks().items()}

    # Acting

    @override
    def acting_step(
        self, obs: Arrays, rhs: Arrays, done: np.ndarray, deterministic: bool = False, mask: np.ndarray | None = None,
    ) -> ActingStep:
        """Choose the actions of E environments; see `Algorithm`. In the result, `other` is empty."""
        if mask is None and (chosen := self.choose_small(obs, deterministic)) is not None:
            return chosen
        with torch.inference_mode():
            inputs = self._to_device({name: torch.from_numpy(leaf) for name, leaf in obs.items()}, {},
                                     torch.from_numpy(done), None if mask is None else torch.from_numpy(mask))
            action = self.choose(inputs[0], inputs[2], deterministic, inputs[3])
            action, clipped_action = on_host(action, self.actor.to_env(action))
        return ActingStep(action.numpy(), clipped_action.numpy(), {}, {})

    def _act_on_device(self, obs: Obs, rhs: Obs, done: Tensor) -> TensorActing:
        action = self.choose(obs, done, False, None)
        return TensorActing(action, self.actor.to_env(action), {}, {})

    @property
    @override
    def act_on_device(self) -> ActOnDevice | None:
        return None if overrides(self, PQN, "acting_step") else self._act_on_device

    def random_actions(self, num_envs: int, mask: Tensor | None) -> Tensor:
        """Draw random actions (E,) from those that `mask` (E, n) allows."""
        return self.actor.random_actions(num_envs, mask, self.generator)

    @override
    def finish_rollout(self, rollout: RolloutData) -> None:
        """Add `value` (T + 1, E) and `final_value` (K,), the values of the best actions, to the rollout.

        K is the number of final observations. The rollout also gets `logp` (T, E), which every storage of rollouts
        expects. It is NaN, because Q-learning uses no probabilities of actions.
        """
        rollout.other["value"], rollout.other["final_value"] = self.compute_values(rollout)
        rollout.other["logp"] = torch.full_like(rollout.reward, torch.nan)

    @override
    def _values_of(self, obs: Obs, rhs: Obs, done: Tensor, mask: Tensor | None) -> Tensor:
        """Return the values (B,) of the best allowed actions."""
        scores = self.actor.get_q_scores(obs, None, mask)
        return self.actor.estimate.of_action(scores, best_action(scores, mask))

    # Learning

    def terms(
        self, q: Tensor, batch: Batch, parameters: LossParameters,
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Compute the terms of the loss for each sample; a subclass may add its own, and weights in `loss_weights`.

        Args:
            q: (B,) float32 values of the actions of the batch, with gradient.
            batch: The samples; `batch.ret` contains the lambda-returns, without gradient.
            parameters: Current value of each updatable option, by name; see `OnPolicyAlgorithm.terms`.

        Returns:
            Two dictionaries from names to tensors (B,). The first contains the terms of the loss, and the second
            contains measures that are only logged.
        """
        return {"td_loss": 0.5 * (q - batch.ret).square()}, {"q": q.detach()}

    @override
    def loss_weights(self, parameters: Mapping[str, float]) -> dict[str, float]:
        return {"td_loss": 1.0}

    @override
    def _evaluate_loss(self, batch: Batch, parameters: LossParameters, weights: Tensor) -> tuple[Tensor, Tensor]:
        with self._precision():
            q = self.actor.get_q_scores(batch.obs, batch.action, batch.mask)
        return self._weighted_sum(self.terms(q, batch, parameters), q, batch, weights)

    def example_batch(self, shape: BatchShape) -> Batch:
        """Return a batch of zeros with random actions, to measure the time of a gradient."""
        count = shape.columns
        zeros = torch.zeros(count, device=self.device)
        return Batch(obs=example_rows(self.actor.example_obs(), count), done=zeros > 0, rhs={}, mask=None,
                     action=self.random_actions(count, None), valid=None, logp=zeros, value=zeros, ret=zeros,
                     advantage=zeros, num_samples=count)
