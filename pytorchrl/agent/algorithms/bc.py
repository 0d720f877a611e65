"""Behavior cloning (Pomerleau 1991): supervised learning of the actions of a data set."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from pytorchrl.agent.actors.on_policy_actor import OnPolicyActor
from pytorchrl.agent.algorithms.registry import algorithm
from pytorchrl.agent.algorithms.replay import ReplayAlgorithm
from pytorchrl.agent.data import Obs, ReplayBatch
from pytorchrl.agent.options import AgentOptions, option
from pytorchrl.agent.schedules import Schedule
from pytorchrl.agent.storages import ReplayBuffer
from pytorchrl.errors import Problem

# Options that other algorithms need for targets of values, which behavior cloning does not learn.
_OF_VALUES = ("gamma", "polyak", "target_update_interval")


@algorithm("bc", storage=ReplayBuffer)
class BC(ReplayAlgorithm):
    """Behavior cloning: the policy maximizes the probability of the recorded actions, L = -mean log pi(a|o).

    Rewards are not used. Any space of actions is possible. For a Box, the policy is a Gaussian whose standard
    deviations do not depend on the observation, so its mean minimizes the squared distance to the actions, weighted by
    the learned variance of each dimension. The value network of the actor does not change. PPO and the other on-policy
    algorithms can continue from the saved model (option `checkpoint` of the actor).
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(ReplayAlgorithm.Options):
        """Options of `BC`."""

        lr: float | Schedule = option(1e-4, help="Learning rate.", low=0.0, updatable=True)

        def contradictions(self) -> Iterator[Problem]:
            """Refuse options of algorithms that learn values."""
            yield from super().contradictions()
            yield from self._without_effect(_OF_VALUES, "an algorithm that learns values, unlike BC")

    needs_dataset: ClassVar[bool] = True
    actor_class: ClassVar[type[nn.Module]] = OnPolicyActor
    actor_options: ClassVar[Mapping[str, tuple[object, ...]]] = {**ReplayAlgorithm.actor_options,
                                                                 "normalize_reward": (False,)}
    target_groups: ClassVar[tuple[str, ...]] = ()
    actor: OnPolicyActor

    @classmethod
    @override
    def contradiction(cls, agent: AgentOptions) -> str | None:
        """Return a message if the storage sums rewards, which are not used."""
        n_step = getattr(agent.storage, "n_step", ReplayBuffer.Options.n_step)
        if n_step != ReplayBuffer.Options.n_step:
            return f"n_step={n_step} would have no effect, because {cls.__name__} uses no rewards; leave n_step out"
        return super().contradiction(agent)

    @override
    def choose(self, obs: Obs, done: Tensor, deterministic: bool, mask: Tensor | None) -> Tensor:
        return self.actor.act(obs, {}, done, deterministic, mask, self.generator, with_value=False)[0]

    @override
    def random_actions(self, num_envs: int, mask: Tensor | None) -> Tensor:
        """Draw actions (E, ...) of a policy whose outputs are all 0."""
        distribution = self.actor.distribution
        params = distribution.params_of(torch.zeros(num_envs, distribution.num_outputs, device=self.device))
        return distribution.sample(params, mask, self.generator)

    @override
    def losses(self, batch: ReplayBatch) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
        """Compute the loss; negative log-probabilities (B,) take the place of TD errors."""
        logp, entropy, _, _ = self.actor.evaluate_actions(batch.obs, {}, None, batch.action, batch.mask)
        return {"all": -(batch.weight * logp).mean()}, {"entropy": entropy.detach().mean()}, -logp.detach()
