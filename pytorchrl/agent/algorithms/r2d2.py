"""Recurrent replay distributed DQN: Kapturowski et al. 2019.

B = number of sequences, W = steps of the burn-in, L = steps after the burn-in, n = option `n_step` of the storage.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from pytorchrl.agent.actors.distributions import check_mask
from pytorchrl.agent.actors.memory import MEMORIES
from pytorchrl.agent.actors.q_actor import QActor, best_action
from pytorchrl.agent.actors.replay_actor import DiscreteQNet
from pytorchrl.agent.algorithms.dqn import DQN
from pytorchrl.agent.algorithms.epsilon import EPSILON_PER_WORKER_HELP
from pytorchrl.agent.algorithms.registry import algorithm
from pytorchrl.agent.algorithms.replay import START, TARGET_UPDATE_INTERVAL_HELP
from pytorchrl.agent.data import ActingStep, Arrays, DataKind, Obs, SequenceBatch
from pytorchrl.agent.options import option
from pytorchrl.agent.storages import RolloutSequenceBuffer, SequenceBuffer
from pytorchrl.agent.transfers import on_host

RESCALING_EPS = 1e-3
"""Epsilon of value rescaling: Kapturowski et al. 2019, section 2.3."""


def rescale(x: Tensor, eps: float = RESCALING_EPS) -> Tensor:
    """Return h(x) = sign(x) (sqrt(|x| + 1) - 1) + eps x, which compresses values (Pohlen et al. 2018, section 3.2)."""
    return x / ((x.abs() + 1).sqrt() + 1) + eps * x


def unrescale(x: Tensor, eps: float = RESCALING_EPS) -> Tensor:
    """Return the inverse of `rescale`: sign(x) (((sqrt(1 + 4 eps (|x| + 1 + eps)) - 1) / (2 eps))^2 - 1).

    For small |x|, this formula would lose precision by cancellation. An equal expression without cancellation is
    computed instead: sign(x) y (y + 2), where s = sqrt(1 + 4 eps (|x| + 1 + eps)) and
    y = 2 |x| (1 - 2 eps / (s + 1 + 2 eps)) / (s + 1).
    """
    root = (1 + 4 * eps * (x.abs() + 1 + eps)).sqrt()
    y = 2 * x * (1 - 2 * eps / (root + 1 + 2 * eps)) / (root + 1)
    return y * (y.abs() + 2)


@algorithm("r2d2", storage=SequenceBuffer, rollout_storage=RolloutSequenceBuffer)
class R2D2(DQN):
    """DQN with memory, trained on sequences of steps.

    Each sequence begins with the state that the memory had during acting. From this state, the online network and the
    target network both process the first W steps of the sequence, the burn-in, without gradient.

    The storage provides a weight w for each sequence. For each of the L steps after the burn-in, the storage also
    provides the return R of the next m steps (m <= `n_step`) and the discount DISC. The TD error is
    delta = h(R + DISC * h^-1(Q_target(o_{t+m}, a*))) - Q(o_t, a_t), where h is `rescale`, or the identity without
    `value_rescaling`. The action a* is argmax_a Q(o_{t+m}, a) with `double`, otherwise argmax_a Q_target(o_{t+m}, a).
    With `loss="mse"`, the loss is the sum of w * delta^2 / 2 over the valid steps, divided by their number.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(DQN.Options):
        """Options of `R2D2`.

        The kind of memory and a dueling network are options of the actor. The lengths of the sequences are options of
        the storage.
        """

        adam_eps: float = option(
            1e-3, help="Epsilon of Adam, AdamW and RAdam, added outside the square root.", low=0.0, exclusive=True)
        gamma: float = option(0.997, help="Discount of rewards.", low=0.0, high=1.0)
        loss: str = option(
            "mse", help="Loss of a TD error: mse (half the square) or huber (half the square up to 1, linear beyond).",
            choices=("huber", "mse"))
        epsilon_per_worker: bool = option(True, help=EPSILON_PER_WORKER_HELP)
        mini_batch_size: int = option(64, help="Sequences per batch.", low=1)
        target_update_interval: int = option(2500, help=TARGET_UPDATE_INTERVAL_HELP, low=1)
        value_rescaling: bool = option(
            True, help="Learn rescaled values, which grow like the square root of Q, instead of clipping rewards.")
        max_grad_norm: float | None = option(
            80.0, help="Largest global norm of a gradient; None means no limit.", low=0.0, exclusive=True,
            updatable=True)

    learns_from = DataKind.SEQUENCES
    actor_options: ClassVar[Mapping[str, tuple[object, ...]]] = {**DQN.actor_options, "recurrent_net": tuple(MEMORIES)}

    def __init__(self, options: R2D2.Options, *, actor: QActor, seed: int, device: str = "cpu") -> None:
        """Build the algorithm; see `Algorithm` for the arguments."""
        super().__init__(options, actor=actor, seed=seed, device=device)
        if options.loss == "mse":
            self._loss = actor.estimate.loss  # half the square, or the loss of a distribution

    # Acting

    @override
    def acting_step(
        self, obs: Arrays, rhs: Arrays, done: np.ndarray, deterministic: bool = False, mask: np.ndarray | None = None,
    ) -> ActingStep:
        """Choose the actions of E environments.

        The memory processes each observation, even if the action is random.
        """
        with torch.inference_mode():
            allowed = None if mask is None else self._on_device(mask)
            if allowed is not None:
                check_mask(allowed)
            scores, states = self.actor.unroll(
                {name: self._on_device(leaf) for name, leaf in obs.items()},
                {name: self._on_device(state) for name, state in rhs.items()}, self._on_device(done), allowed,
                None if deterministic else self.generator)
            if self.parameters[START] > 0 and not deterministic:
                action = self.random_actions(len(done), allowed)
            else:
                action = self._explore(len(done), deterministic, allowed, lambda: best_action(scores, allowed))
            states = self.actor.with_action(states, action)
            if not action.is_cpu:
                action, *rows = on_host(action, *states.values())
                states = dict(zip(states, rows, strict=True))
            chosen = action.numpy()
            return ActingStep(chosen, chosen, {name: state.numpy() for name, state in states.items()}, {})

    # Learning

    @override
    def losses(  # type: ignore[override] # batches contain sequences
        self, batch: SequenceBatch,
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
        """Compute the losses.

        The absolute TD errors have shape (L, B), and are 0 for steps that are not valid.
        """
        actor, length = self.actor, len(batch.action)
        burn_in, rest = slice(0, batch.burn_in), slice(batch.burn_in, None)
        obs, state = actor.normalize(batch.obs), batch.rhs.get("q")
        with torch.no_grad():
            online, target_state = state, state
            if batch.burn_in:
                _, online = self._unroll(actor.q, obs, state, batch, burn_in)
                _, target_state = self._unroll(self.targets["q"], obs, state, batch, burn_in)
            next_outputs, _ = self._unroll(self.targets["q"], obs, target_state, batch, rest)
        every, _ = self._unroll(actor.q, obs, online, batch, rest)
        estimate = actor.estimate
        outputs = estimate.of_action(every[:length], batch.action)
        with torch.no_grad():
            target = self._targets(batch, every, next_outputs)
        count = batch.valid.sum()
        loss = self._loss(outputs, target)
        error = estimate.errors(outputs.detach(), target, loss.detach())
        measures = {"q": torch.where(batch.valid, estimate.mean(outputs.detach()), 0.0).sum() / count}
        return ({"q": torch.where(batch.valid, batch.weight * loss, 0.0).sum() / count}, measures,
                torch.where(batch.valid, error, 0.0))

    def _targets(self, batch: SequenceBatch, online: Tensor, outputs: Tensor) -> Tensor:
        """Return the targets (L, B), or (L, B, k) for a distribution with k atoms.

        Args:
            batch: The batch.
            online: The online network's outputs for the L + n observations after the burn-in, (L + n, B, actions), or
                (L + n, B, actions, k).
            outputs: The target network's outputs for the same observations, with the same shape.
        """
        estimate, mask = self.actor.estimate, None if batch.mask is None else batch.mask[batch.burn_in:]
        best = best_action(estimate.mean(online if self.options.double else outputs), mask)
        row, chosen = batch.next_row - batch.burn_in, estimate.of_action(outputs, best)
        after = torch.take_along_dim(chosen, row.view(*row.shape, *(1,) * (chosen.dim() - 2)), 0)
        if not self.options.value_rescaling:
            return estimate.target(after, batch.ret, batch.discount)
        atoms = batch.ret.unsqueeze(-1) + batch.discount.unsqueeze(-1) * unrescale(estimate.atoms(after))
        return estimate.project(after, rescale(atoms))

    def _unroll(self, net: nn.Module, obs: Obs, state: Tensor | None, batch: SequenceBatch,
                rows: slice) -> tuple[Tensor, Tensor | None]:
        """Return the values that `net` computes for the observations in `rows`, and its memory after these rows.

        Args:
            net: The online or the target network.
            obs: Normalized observations of the batch.
            state: The memory before the first of these rows.
            batch: The batch.
            rows: The rows to process; a sequence has W + L + n rows of observations.

        Returns:
            Values of shape (number of rows, B, actions), or (number of rows, B, actions, k) for distributions, and the
            memory.
        """
        assert isinstance(net, DiscreteQNet)
        return net.unroll({name: leaf[rows] for name, leaf in obs.items()}, state, batch.done[rows],
                          None if batch.mask is None else batch.mask[rows], self.update_generator,
                          None if batch.previous is None else batch.previous[rows])
