"""The base class of SAC, TD3 and DDPG, with the options of their ensemble of critics.

B = transitions of a batch, or sequences of L steps for actors with memory; n = discrete actions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from pytorchrl.agent.actors.critic_layers import CriticLayers
from pytorchrl.agent.actors.memory import MEMORIES
from pytorchrl.agent.actors.off_policy_actor import OffPolicyActor, critic_scores
from pytorchrl.agent.actors.return_distributions import DISTRIBUTIONS, QUANTILE, value_estimate
from pytorchrl.agent.algorithms.replay import ReplayAlgorithm
from pytorchrl.agent.algorithms.unrolling import unrolled
from pytorchrl.agent.data import Obs, ReplayBatch, SequenceBatch
from pytorchrl.agent.modes import DROPOUT, NORMALIZATION
from pytorchrl.agent.noise import standard_normal
from pytorchrl.agent.options import AgentOptions, option
from pytorchrl.errors import Problem

POLICY_DELAY_HELP = "Number of updates of the critics per update of the policy"


class OffPolicyActorCritic(ReplayAlgorithm):
    """The base class of algorithms that learn a policy and several critics, the parameter groups `pi` and `q`.

    By default, the target uses the smallest value of all target critics. With `critic_subset`, it uses the smallest
    value of a random subset of them, and the policy maximizes the mean value of all critics: Chen et al. 2021 (REDQ),
    algorithm 1. Without `target_networks`, targets are computed with the trained networks: Bhatt et al. 2024 (CrossQ).

    If the critics learn distributions of the return, the target is the distribution of the critic with the smallest
    mean (categorical), or consists of the atoms of all critics without the `drop_atoms` largest ones per critic
    (quantile), and the policy maximizes the mean of all atoms: Kuznetsov et al. 2020 (TQC), equations 9 to 13.

    With memory (`recurrent_net` of the actor), the losses cover the steps of sequences; see `unrolling`.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(ReplayAlgorithm.Options):
        """Options of all algorithms with a policy and critics."""

        critic_subset: int | None = option(
            None, help="Number of critics, drawn at random in each update, whose smallest value is the target; the "
                       "policy then maximizes the mean of all critics. None means all critics.", low=1)
        policy_delay: int = option(1, help=f"{POLICY_DELAY_HELP}.", low=1)
        target_networks: bool = option(
            True, help="Compute targets with slowly changing copies of the networks; otherwise, with the networks "
                       "themselves, which then process o and o' in one batch, as in CrossQ.")
        drop_atoms: int = option(
            2, help="Number of the largest atoms per critic that targets leave out, against overestimation; for "
                    "critics with distribution=\"quantile\" (TQC).", low=0)

        def contradictions(self) -> Iterator[Problem]:
            """Refuse options of target networks if there are none."""
            yield from super().contradictions()
            if not self.target_networks:
                yield from self._without_effect(
                    ("polyak", "target_update_interval"), "target_networks=True", "target_networks")

    actor_class = OffPolicyActor
    actor_options: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "recurrent_net": (None, *MEMORIES), "distribution": DISTRIBUTIONS}
    actor: OffPolicyActor

    @classmethod
    @override
    def contradiction(cls, agent: AgentOptions) -> str | None:
        """Return a message if the critics do not fit: their number, atoms, rows or memory."""
        subset, number = agent.algorithm.critic_subset, getattr(agent.actor, "num_critics", None)
        if subset is not None and number is not None and subset > number:
            return (f"critic_subset must be at most the number of critics, num_critics={number}, got {subset}; give "
                    f"num_critics={subset} or more")
        if agent.has_memory and not agent.algorithm.target_networks:
            return ("target_networks=False, with which critics process o and o' in one batch, does not support the "
                    "sequences of an actor with memory; set target_networks=True or recurrent_net=None")
        if getattr(agent.actor, "critic_norm", None) == "batch" and agent.algorithm.mini_batch_size == 1:
            return "critic_norm='batch' needs mini_batch_size of at least 2, got 1; give 256"
        return _atom_problem(agent) or super().contradiction(agent)

    def __init__(
        self, options: OffPolicyActorCritic.Options, *, actor: OffPolicyActor, seed: int, device: str = "cpu",
    ) -> None:
        """Build the algorithm; see `Algorithm` for the arguments."""
        super().__init__(options, actor=actor, seed=seed, device=device)
        # As in the authors' code of DroQ, dropout is active in target critics, too.
        self.mode.also(module.dropout for target in self.targets.values() for module in target.modules()
                       if isinstance(module, CriticLayers) and isinstance(module.dropout, DROPOUT))
        self._norms = [module for module in actor.critics.modules() if isinstance(module, NORMALIZATION)]

    def inputs(self, batch: ReplayBatch | SequenceBatch) -> ReplayBatch:
        """Return the transitions of a batch, whose observations are inputs of the networks.

        Observations are normalized. Sequences, from which actors with memory learn, become an `UnrolledBatch`, in which
        each axis (B,) of transitions is replaced by (L, B). `mean` of the result takes the mean over valid transitions.
        """
        actor = self.actor
        if isinstance(batch, SequenceBatch):
            return unrolled(batch, actor.normalize(batch.obs), actor.networks(), self.targets)
        return dataclasses.replace(
            batch, obs=actor.normalize(batch.obs), next_obs=actor.normalize(batch.next_obs))

    @override
    def groups_with_targets(self) -> tuple[str, ...]:
        return self.target_groups if self.options.target_networks else ()

    def both_scores(self, obs: Obs, next_obs: Obs, *actions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the critics' values of transitions, and the target critics' values of what follows, (num_critics, B).

        For a Discrete space, the values are those of all actions, (num_critics, B, n); for distributions with k atoms,
        their shape is (num_critics, B, k). No gradient flows through the second result. Without target networks, the
        critics process both in one batch, so that batch normalization sees both distributions.

        Args:
            obs: Normalized observations, leaf -> (B, ...).
            next_obs: Normalized next observations, leaf -> (B, ...).
            *actions: The stored actions (B, ...) and the next actions (B, D); empty for a Discrete space.
        """
        critics = self.actor.critics
        if self.options.target_networks:
            with torch.no_grad():
                next_scores = critic_scores(self.targets["q"], next_obs, *actions[1:])
            return critic_scores(critics, obs, *actions[:1]), next_scores
        joint = {leaf: torch.cat((rows, next_obs[leaf])) for leaf, rows in obs.items()}
        action = [torch.cat([part.flatten(1) for part in actions])] if actions else []
        scores, next_scores = critic_scores(critics, joint, *action).chunk(2, 1)
        return scores, next_scores.detach()

    @contextmanager
    def fixed_moments(self) -> Iterator[None]:
        """Let batch normalization in the critics use its running moments, without learning, within a `with` block.

        The loss of the policy is computed in this way, as in CrossQ, because actions of the policy have another
        distribution than those in the storage.
        """
        before = [norm.training for norm in self._norms]
        for norm in self._norms:
            norm.training = False
        yield
        for norm, training in zip(self._norms, before, strict=True):
            norm.training = training

    def smallest(self, scores: Tensor) -> Tensor:
        """Return the smallest value of each row, (B,) or (B, n), over all critics or over a random subset of them.

        For distributions, the result is a cautious distribution (B, m); see `ValueEstimate.smallest`.

        Args:
            scores: Values of the target critics, (num_critics, B), (num_critics, B, n) or (num_critics, B, k).
        """
        subset = self.options.critic_subset
        if subset is not None:
            # The places of the largest of independent draws are a uniformly random subset.
            chosen = standard_normal(scores.new_empty(len(scores)), self.update_generator).topk(subset).indices
            scores = scores.index_select(0, chosen)
        return self.actor.estimate.smallest(scores, self.options.drop_atoms)

    @property
    def maximizes_mean(self) -> bool:
        """Whether the policy maximizes the mean of all critics, as in REDQ and TQC."""
        return self.options.critic_subset is not None or self.actor.options.distribution == QUANTILE

    def critic_loss(self, batch: ReplayBatch, outputs: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss () of the critics, a sum over critics of means over samples, and the absolute errors (B,).

        Args:
            batch: The transitions, with a weight (B,) of each.
            outputs: Outputs of the critics for the stored actions, (num_critics, B) or (num_critics, B, k).
            target: Target of all critics, (B,) or (B, m).
        """
        estimate = self.actor.estimate
        losses = estimate.loss(outputs, target)
        errors = estimate.errors(outputs.detach(), target, losses.detach()).mean(0)
        return batch.mean(batch.weight * losses).sum(), errors

    @override
    def is_due(self, group: str) -> bool:
        """Return whether the next update changes `group`; the policy and alpha change every `policy_delay` updates."""
        delay: int = self.options.policy_delay
        return group not in ("pi", "alpha") or (self.num_updates_made + 1) % delay == 0


def _atom_problem(agent: AgentOptions) -> str | None:
    """Return a message if `drop_atoms` has no effect, or would drop all atoms."""
    drop, kind = agent.algorithm.drop_atoms, getattr(agent.actor, "distribution", None)
    if agent.actor is None:
        return None
    if kind != QUANTILE:
        return None if "drop_atoms" not in agent.algorithm.changed() else (
            f"drop_atoms needs an actor with distribution={QUANTILE!r}, got distribution={kind!r}; leave drop_atoms "
            "out")
    number = value_estimate(agent.actor).num_atoms
    if number is not None and drop >= number:
        return (f"drop_atoms must be below the number of atoms of a critic, num_atoms={number}, got {drop}; give "
                f"drop_atoms=0, or more atoms")
    return None
