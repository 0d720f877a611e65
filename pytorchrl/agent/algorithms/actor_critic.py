"""The base class of SAC, TD3 and DDPG, with the options of their ensemble of critics.

B = transitions of a batch, or sequences of L steps for actors with memory; n = discrete actions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from typing_extensions import override

from pytorchrl.agent.actors.memory import MEMORIES
from pytorchrl.agent.actors.off_policy_actor import OffPolicyActor
from pytorchrl.agent.algorithms.replay import ReplayAlgorithm
from pytorchrl.agent.algorithms.unrolling import unrolled
from pytorchrl.agent.data import ReplayBatch, SequenceBatch
from pytorchrl.agent.noise import standard_normal
from pytorchrl.agent.options import AgentOptions, option

POLICY_DELAY_HELP = "Number of updates of the critics per update of the policy"


class OffPolicyActorCritic(ReplayAlgorithm):
    """The base class of algorithms that learn a policy and several critics, the parameter groups `pi` and `q`.

    By default, the target uses the smallest value of all target critics. With `critic_subset`, it uses the smallest
    value of a random subset of them, and the policy maximizes the mean value of all critics: Chen et al. 2021 (REDQ),
    algorithm 1.

    With memory (`recurrent_net` of the actor), the losses cover the steps of sequences; see `unrolling`.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(ReplayAlgorithm.Options):
        """Options of all algorithms with a policy and critics."""

        critic_subset: int | None = option(
            None, help="Number of critics, drawn at random in each update, whose smallest value is the target; the "
                       "policy then maximizes the mean of all critics. None means all critics.", low=1)
        policy_delay: int = option(1, help=f"{POLICY_DELAY_HELP}.", low=1)

    actor_class = OffPolicyActor
    actor_options: ClassVar[Mapping[str, tuple[object, ...]]] = {"recurrent_net": (None, *MEMORIES)}
    actor: OffPolicyActor

    @classmethod
    @override
    def contradiction(cls, agent: AgentOptions) -> str | None:
        """Return a message if the subset would be larger than the number of critics."""
        subset, number = agent.algorithm.critic_subset, getattr(agent.actor, "num_critics", None)
        if subset is not None and number is not None and subset > number:
            return (f"critic_subset must be at most the number of critics, num_critics={number}, got {subset}; give "
                    f"num_critics={subset} or more")
        return super().contradiction(agent)

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

    def smallest(self, scores: Tensor) -> Tensor:
        """Return the smallest value of each row, (B,) or (B, n), over all critics or over a random subset of them.

        Args:
            scores: Values of the target critics, (num_critics, B) or (num_critics, B, n).
        """
        subset = self.options.critic_subset
        if subset is not None:
            # The places of the largest of independent draws are a uniformly random subset.
            chosen = standard_normal(scores.new_empty(len(scores)), self.update_generator).topk(subset).indices
            scores = scores.index_select(0, chosen)
        return scores.amin(0)

    @override
    def is_due(self, group: str) -> bool:
        """Return whether the next update changes `group`; only every `policy_delay`-th update changes the policy."""
        delay: int = self.options.policy_delay
        return group == "q" or (self.num_updates_made + 1) % delay == 0
