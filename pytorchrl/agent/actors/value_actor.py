"""The actor of IQL: a policy, critics of actions, and a network for the values of observations."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from typing_extensions import override

from pytorchrl.agent.actors.off_policy_actor import OffPolicyActor, PolicyNet
from pytorchrl.agent.actors.squashed import squashed_log_prob_of
from pytorchrl.agent.actors.trunk import CRITIC_GROUP
from pytorchrl.agent.contracts import check_attributes, check_output, overrides
from pytorchrl.agent.data import Obs


class ValueActor(OffPolicyActor):
    """An `OffPolicyActor` with a value network, which estimates the value of an observation without an action.

    The value network sees the same leaves as the critics.

    Attributes:
        value: The value network; it maps normalized observations, leaf -> (B, ...), to (B, 1).
    """

    @override
    def build_networks(self, generator: torch.Generator) -> None:
        """Build `policy` and `critics` like `OffPolicyActor`, and `value`; a subclass may build different modules."""
        super().build_networks(generator)
        self.value: nn.Module = PolicyNet(self.options, 1, generator, spaces=self.options.group(CRITIC_GROUP))

    @override
    def check_networks(self) -> None:
        super().check_networks()
        check_attributes(self, value="a module that returns (B, 1) from observations")
        check_output(self, "value(obs)", self.value(self.example_obs()), 1)

    @override
    def networks(self) -> dict[str, nn.Module]:
        """Return the critics, the policy and the value network: the parameter groups `q`, `pi` and `v`."""
        return {**super().networks(), "v": self.value}

    @override
    def keep_policy(self) -> None:
        """Remove the critics and the value network, unless a subclass overrides `build_networks` or `act`."""
        super().keep_policy()
        if not overrides(self, ValueActor, "build_networks", "act"):
            self.critics, self.value = nn.ModuleList(), nn.Identity()

    def log_prob(self, obs: Obs, action: Tensor, mask: Tensor | None) -> Tensor:
        """Return the log-probabilities (B,) of actions, or their log-densities if the space is a Box.

        Args:
            obs: Leaf -> (B, ...), normalized.
            action: (B, ...) in [-1, 1], or (B,) int64.
            mask: (B, n) bool, true where an action is allowed; None allows all actions.
        """
        if self.is_discrete:
            return self.log_probs(obs, mask).gather(-1, action.unsqueeze(-1)).squeeze(-1)
        return squashed_log_prob_of(action.reshape(len(action), -1), *self._gaussian(self.policy(obs)))
