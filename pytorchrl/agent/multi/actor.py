"""Actor with several policies. C = number of environments * number of agents of a policy, H = size of a memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pytorchrl.agent.actors.base import Actor, load_checkpoint
from pytorchrl.agent.env.aliases import AnySpace
from pytorchrl.agent.factories import ActorFactory
from pytorchrl.agent.moments import Moments
from pytorchrl.agent.multi.data import joined, own_names
from pytorchrl.agent.options import Factory, option
from pytorchrl.agent.options import Options as BaseOptions
from pytorchrl.agent.seeding import Stream, derive_seed


class MultiAgentActor(nn.Module):
    """One actor for each policy.

    Attributes:
        options: Checked options.
        actors: The actor of each policy.
        device: Device of the actors.
        is_recurrent: Whether any actor has memory.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(BaseOptions):
        """Options of `MultiAgentActor`; `multi_agent` sets them."""

        policies: dict[str, Factory[Actor]] = option(help="Policy -> factory of its actor.")
        agents: dict[str, tuple[str, ...]] = option(help="Policy -> its agents.")
        checkpoint: str | None = option(
            None, help="Saved model of all policies, from which weights and normalizers are loaded.")

        @property
        def observation_space(self) -> dict[str, dict[str, AnySpace]]:
            """The observation spaces: policy -> leaf -> space."""
            return {policy: factory.options.observation_space for policy, factory in self.policies.items()}

        @property
        def action_space(self) -> dict[str, AnySpace]:
            """The action space of each policy."""
            return {policy: factory.options.action_space for policy, factory in self.policies.items()}

    def __init__(self, options: Options, *, device: str = "cpu", seed: int = 0) -> None:
        super().__init__()
        self.options, self.device = options, torch.device(device)
        factories: Mapping[str, ActorFactory] = options.policies
        self.actors: dict[str, Actor] = {
            policy: factory(device=device, seed=derive_seed(seed, Stream.INIT, index))
            for index, (policy, factory) in enumerate(factories.items())}
        # The actors are in a list, because the names of policies may contain dots, but the names of modules must not.
        self._modules_in_order = nn.ModuleList(self.actors.values())
        self.is_recurrent = any(actor.is_recurrent for actor in self.actors.values())
        if options.checkpoint is not None:
            load_checkpoint(self, options.checkpoint)

    def acting_networks(self) -> dict[str, nn.Module]:
        """Return all networks that acting needs, by parameter group."""
        return joined({policy: actor.acting_networks() for policy, actor in self.actors.items()})

    def state_buffers(self) -> dict[str, Tensor]:
        """Return the buffers of all actors (such as normalizers) by name, without copying them."""
        return joined({policy: actor.state_buffers() for policy, actor in self.actors.items()})

    def initial_states(self, num_envs: int) -> dict[str, dict[str, Tensor]]:
        """Return the initial memory of each network with memory: policy -> network -> zeros (C, H)."""
        return {policy: actor.initial_states(num_envs * len(self.options.agents[policy]))
                for policy, actor in self.actors.items()}

    def merge_moments(self, found: Mapping[str, Moments]) -> None:
        """Update the normalizers of observations and rewards with a rollout's moments; see `Algorithm.moments_of`."""
        for policy, actor in self.actors.items():
            actor.merge_moments(own_names(found, policy))

    @classmethod
    def create_factory(cls, policies: Mapping[str, Factory[Actor]], agents: Mapping[str, tuple[str, ...]],
                       checkpoint: str | None = None) -> Factory[MultiAgentActor]:
        """Return a factory of multi-agent actors; `multi_agent` calls this method."""
        return Factory(cls, cls.Options(policies=dict(policies), agents=dict(agents), checkpoint=checkpoint))
