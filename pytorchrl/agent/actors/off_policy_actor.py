"""The actor of DDPG, TD3, SAC and MPO: a policy and critics that share no layers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor, nn
from typing_extensions import override

from pytorchrl.agent.actors.critic_layers import CriticOptions
from pytorchrl.agent.actors.distributions import Categorical, check_mask, inner_bounds, masked
from pytorchrl.agent.actors.q_actor import best_action
from pytorchrl.agent.actors.replay_actor import (
    ContinuousQNet,
    DiscreteQNet,
    ReplayActor,
    replay_linear,
    replay_trunk,
)
from pytorchrl.agent.actors.squashed import LOG_STD_BOUNDS, bound_log_std, squashed_draw, squashed_sample
from pytorchrl.agent.actors.trunk import (
    ACTOR_GROUP,
    CRITIC_GROUP,
    GroupOptions,
    LeafSpaces,
    MemoryOptions,
    NetworkOptions,
    Trunk,
    remembered,
)
from pytorchrl.agent.contracts import NUM_EXAMPLES, check_attributes, check_output, overrides, violation
from pytorchrl.agent.data import Obs
from pytorchrl.agent.options import option
from pytorchrl.errors import ConfigError, Problem, SpaceError

_MEMORY = "pi"
"""Name of the memory of the policy, and of its parameter group. Critics have no memory while the policy acts."""


class OffPolicyActor(ReplayActor):
    """A policy, and critics that estimate the values of actions.

    For a Box, actions are in [-1, 1] until `to_env` scales them for the environment. For a Discrete space, the policy
    is categorical, and each critic returns the values of all actions.

    With `recurrent_net`, the policy and each critic have a memory of their own, between the extractor and the other
    layers. Networks then take the outputs of their memories in place of observations; see `remember`.

    Attributes:
        policy: The policy network.
        critics: `num_critics` Q networks.
        is_discrete: Whether the action space is Discrete.
        is_deterministic: Whether the policy network returns actions instead of the parameters of a distribution.
        action_size: The number D of dimensions of an action or, for a Discrete space, the number n of actions.
    """

    low: Tensor
    """Lower bounds of a Box, float32 and within the Box, with the shape of an action."""
    high: Tensor
    """Upper bounds of a Box, float32 and within the Box, with the shape of an action."""

    action_spaces: ClassVar[tuple[type[gym.Space[object]], ...]] = (gym.spaces.Box, gym.spaces.Discrete)
    network_options: ClassVar[tuple[str, ...]] = (
        *ReplayActor.network_options, "num_critics", "obs_groups", "critic_hidden_sizes", "critic_norm",
        "critic_dropout", "recurrent_net", "recurrent_size")

    @dataclass(frozen=True, kw_only=True)
    class Options(CriticOptions, MemoryOptions, GroupOptions, ReplayActor.Options):
        """Options of `OffPolicyActor`."""

        policy: str = option(
            "stochastic", help="stochastic for SAC (a squashed Gaussian, or categorical if actions are discrete), "
                               "gaussian for MPO (a Gaussian whose draws are clipped), or deterministic for DDPG and "
                               "TD3.",
            choices=("stochastic", "gaussian", "deterministic"))
        num_critics: int = option(2, help="Number of Q networks.", low=1)
        log_std_bound: str = option(
            "clip", help="How log standard deviations are bounded: clip (to [-20, 2]) or tanh (into [-5, 2]).",
            choices=LOG_STD_BOUNDS)

        def __post_init__(self) -> None:
            """Refuse a policy that the action space does not support, and options that would have no effect."""
            super().__post_init__()
            space = self.action_space
            is_box = isinstance(space, gym.spaces.Box)
            is_gaussian = is_box and self.policy != "deterministic"
            if not is_box and self.policy == "deterministic":
                raise ConfigError("policy='deterministic' needs a Box of actions, got a Discrete space; use QActor and "
                                  "DQN")
            if not is_box and self.policy == "gaussian":
                raise ConfigError("policy='gaussian' needs a Box of actions, got a Discrete space; leave it out")
            self._check_critics(is_box)
            if self.log_std_bound != "clip" and not is_gaussian:
                raise ConfigError(
                    f"log_std_bound={self.log_std_bound!r} needs policy='stochastic' or 'gaussian' and a Box of "
                    "actions, because no other policy has a standard deviation; leave it out")

        def contradictions(self) -> Iterator[Problem]:
            """Refuse layers that residual blocks do not have, and batch normalization of padded sequences."""
            yield from super().contradictions()
            if self.block == "simba":
                yield from self._without_effect(
                    ("critic_norm", "critic_dropout"),
                    "block='mlp', because residual blocks have layer norms of their own", "block")
            if self.recurrent_net is not None and self.critic_norm == "batch":
                yield Problem("critic_norm='batch' does not support the sequences of critics with memory, because "
                              "padding would count in its moments", "give critic_norm='layer'",
                              ("critic_norm",))

        @override
        def _has_vector_networks(self) -> bool:
            # Critics of a Box have layers over the features and the action.
            return super()._has_vector_networks() or isinstance(self.action_space, gym.spaces.Box)

        def _check_critics(self, is_box: bool) -> None:
            """Refuse options of the critics' layers if there are no such layers."""
            found = [name for name in self.changed() if name in CriticOptions.declarations()]
            if found and not is_box:
                raise ConfigError(f"{', '.join(found)} needs a Box of actions, because critics of Discrete actions "
                                  f"have the layers of the policy; leave {', '.join(found)} out")
            sizes = self.hidden_sizes if self.critic_hidden_sizes is None else self.critic_hidden_sizes
            if self.distribution is not None and not is_box:
                raise ConfigError(f"distribution={self.distribution!r} needs a Box of actions, got a Discrete space; "
                                  "use QActor and DQN")
            if not sizes and (self.critic_norm == "layer" or self.critic_dropout):
                raise ConfigError("critic_norm='layer' and critic_dropout need hidden layers in the critics, got none; "
                                  "give critic_hidden_sizes")

    @classmethod
    @override
    def action_space_problem(cls, space: gym.Space[object]) -> str | None:
        """Return a description of the space that the actor needs, or None if the actor supports `space`.

        A Box must have finite bounds with a finite distance, because `to_env` scales actions from [-1, 1] to them.
        """
        problem = super().action_space_problem(space)
        if problem is None and isinstance(space, gym.spaces.Box):
            with np.errstate(over="ignore", invalid="ignore"):
                span = space.high.astype(np.float32) - space.low.astype(np.float32)
            if not np.isfinite(span).all():
                return "a Box with finite bounds and a finite distance between them"
        return problem

    def __init__(self, options: OffPolicyActor.Options, device: str | torch.device = "cpu", seed: int = 0) -> None:
        """Build the networks from `seed`, then load the checkpoint if one is given.

        Raises:
            CheckpointError: The checkpoint cannot be read or contains a different network.
        """
        super().__init__(options, device)
        space = options.action_space
        self.is_discrete = isinstance(space, gym.spaces.Discrete)
        self.is_deterministic = options.policy == "deterministic"
        if self.is_discrete:
            self.action_size = int(space.n)
        else:
            self.action_size = math.prod(space.shape)
            low, high = inner_bounds(space)
            self.register_buffer("low", low, persistent=False)
            self.register_buffer("high", high, persistent=False)
        self._categorical = Categorical(self.action_size) if self.is_discrete else None
        self.build(seed)

    def build_networks(self, generator: torch.Generator) -> None:
        """Build `policy` and `critics`; a subclass may build different modules.

        The modules receive normalized observations, a dictionary with a tensor (B, ...) for each leaf, and return
        float32. `critics` is a ModuleList.

        For a Box, `policy(obs)` returns actions (B, D) before tanh if the policy is deterministic. Otherwise, it
        returns means and then log standard deviations, (B, 2 D). Each `critic(obs, action)` returns values (B,) or, if
        the option `distribution` is set, (B, k), where k is `self.estimate.num_atoms`.

        For a Discrete space, `policy(obs)` returns logits (B, n), and each `critic(obs)` returns values (B, n).

        With memory, `is_recurrent` is True, and the modules are a `PolicyNet` and `ContinuousQNet` or `DiscreteQNet`.
        """
        options, size = self.options, self.action_size
        self.is_recurrent = options.recurrent_net is not None
        self.policy: nn.Module = PolicyNet(options, self.num_outputs, generator, spaces=options.group(ACTOR_GROUP))
        seen = options.group(CRITIC_GROUP)
        self.critics = nn.ModuleList(
            DiscreteQNet(options, size, generator, spaces=seen) if self.is_discrete else
            ContinuousQNet(options, size, generator, spaces=seen, critic=options, num_atoms=self.estimate.num_atoms)
            for _ in range(options.num_critics))

    @property
    def num_outputs(self) -> int:
        """The number of outputs of the policy network for one observation."""
        return self.action_size if self.is_discrete or self.is_deterministic else 2 * self.action_size

    @override
    def check_networks(self) -> None:
        check_attributes(self, policy=f"a module that returns (B, {self.num_outputs}) from observations",
                         critics="a ModuleList of networks that return values")
        if self.is_recurrent:
            for network in (self.policy, *self.critics):
                if not isinstance(network, (PolicyNet, ContinuousQNet, DiscreteQNet)):
                    raise violation(self, "build_networks()", f"a {type(network).__name__} for recurrent_net",
                                    "networks whose memory can be unrolled: PolicyNet, ContinuousQNet or DiscreteQNet")
            return
        obs = self.example_obs()
        check_output(self, "policy(obs)", self.policy(obs), self.num_outputs)
        for critic in self.critics:
            if self.is_discrete:
                check_output(self, "critics[i](obs)", critic(obs), self.action_size)
            else:
                action = torch.zeros((NUM_EXAMPLES, *self.low.shape), device=self.device)
                check_output(self, "critics[i](obs, action)", critic(obs, action), self.estimate.num_atoms)

    def networks(self) -> dict[str, nn.Module]:
        """Return the critics and the policy, which are the parameter groups `q` and `pi`."""
        return {"q": self.critics, "pi": self.policy}

    def acting_networks(self) -> dict[str, nn.Module]:
        """Return the policy network, which is the parameter group `pi`."""
        return {"pi": self.policy}

    @override
    def random_actions(self, num_envs: int, mask: Tensor | None, generator: torch.Generator) -> Tensor:
        """Draw random allowed actions: for a Box, (E, ...) float32 in [-1, 1], else (E,) int64."""
        if self.is_discrete:
            return best_action(torch.rand(num_envs, self.action_size, generator=generator, device=self.device), mask)
        return torch.empty((num_envs, *self.low.shape), device=self.device).uniform_(-1.0, 1.0, generator=generator)

    def to_env(self, action: Tensor) -> Tensor:
        """Return actions (E, ...) for environments; actions of a Box are scaled from [-1, 1] to the bounds."""
        if self.is_discrete:
            return action
        scaled = self.low + 0.5 * (action + 1) * (self.high - self.low)
        return torch.clamp(scaled, self.low, self.high)  # rounding may move an action out of bounds

    @override
    def from_env(self, action: Tensor) -> Tensor:
        """Return stored actions (N, ...) for actions of an environment; actions of a Box are scaled to [-1, 1]."""
        if self.is_discrete:
            return action
        low, high = self.low.to(action.device), self.high.to(action.device)
        scaled = 2 * (action - low) / (high - low) - 1
        return torch.where(high > low, scaled, 0.0).clamp(-1.0, 1.0)

    def act(
        self, obs: Obs, deterministic: bool = False, mask: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Return actions: for a Box, (E, ...) float32 in [-1, 1], otherwise (E,) int64.

        Args:
            obs: Leaf -> (E, ...); with memory, what `remember` returns.
            deterministic: Whether to return the mode (for a Gaussian, the squashed or clipped mean) instead of a
                sample.
            mask: (E, n) bool, true where an action is allowed. None allows all actions: an actor does not know
                whether its environments have masks.
            generator: Generator for sampling.

        Raises:
            NonFiniteDataError: A row of the mask allows no action.
            SpaceError: There is a mask, but the action space is not Discrete.
        """
        outputs = self.policy(self.normalize(obs))
        if self._categorical is not None:
            if mask is not None:
                check_mask(mask)
            if deterministic:
                return self._categorical.mode(outputs, mask)
            return self._categorical.sample(outputs, mask, generator)
        if mask is not None:
            raise SpaceError(f"action masks need a Discrete action space, got {self.options.action_space}; leave the "
                             "mask out")
        if self.is_deterministic:
            return torch.tanh(outputs).view(-1, *self.low.shape)
        mean, log_std = self._gaussian(outputs)
        u = mean if deterministic else squashed_draw(mean, log_std, generator)[0]
        return self.bounded(u).view(-1, *self.low.shape)

    def bounded(self, u: Tensor) -> Tensor:
        """Return draws u (..., D) of the Gaussian within [-1, 1]: clipped if the policy is "gaussian", else tanh(u)."""
        return u.clamp(-1.0, 1.0) if self.options.policy == "gaussian" else torch.tanh(u)

    @override
    def initial_states(self, num_envs: int) -> Obs:
        """Return the memory of the policy at the start of an episode, {"pi": zeros (E, H)}; {} without memory."""
        memory = self._memory_trunk.memory if self.is_recurrent else None
        return {} if memory is None else {_MEMORY: torch.zeros(num_envs, memory.state_size, device=self.device)}

    @override
    def remember(self, obs: Obs, rhs: Obs, done: Tensor) -> tuple[Obs, Obs]:
        if not self.is_recurrent:
            return obs, {}
        features, state = self._memory_trunk.forward(self.normalize(obs), rhs[_MEMORY], done)
        assert state is not None
        return remembered({self._memory_trunk: features}), {_MEMORY: state}

    @property
    def _memory_trunk(self) -> Trunk:
        assert isinstance(self.policy, PolicyNet)
        return self.policy.trunk

    @override
    def best_actions(self, obs: Obs, rhs: Obs, mask: Tensor | None) -> tuple[Tensor, Obs]:
        """Return the deterministic actions of `act`, scaled to the bounds if the space is a Box."""
        continues = torch.zeros(next(iter(obs.values())).shape[0], dtype=torch.bool, device=self.device)
        obs, states = self.remember(obs, rhs, continues)
        return self.to_env(self.act(obs, deterministic=True, mask=mask)), states

    @override
    def keep_policy(self) -> None:
        """Remove the critics (not needed to act) unless a subclass overrides `build_networks` or `act`."""
        super().keep_policy()
        if not overrides(self, OffPolicyActor, "build_networks", "act"):
            self.critics = nn.ModuleList()

    def sample_log_prob(self, obs: Obs, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """Return reparameterized samples (B, D) of the squashed Gaussian, in [-1, 1], and their log-densities (B,).

        Args:
            obs: Leaf -> (B, ...), normalized.
            generator: Generator for sampling.
        """
        return squashed_sample(*self._gaussian(self.policy(obs)), generator)

    def gaussian(self, obs: Obs, policy: nn.Module | None = None) -> tuple[Tensor, Tensor]:
        """Return means and log standard deviations (B, D) of a Gaussian policy, before actions are bounded.

        Args:
            obs: Leaf -> (B, ...), normalized.
            policy: A copy of the policy network, such as a target network; None means the network itself.
        """
        return self._gaussian((self.policy if policy is None else policy)(obs))

    def log_probs(self, obs: Obs, mask: Tensor | None, policy: nn.Module | None = None) -> Tensor:
        """Return log-probabilities (B, n) of a categorical policy; about -3.4e38, not -inf, for forbidden actions.

        Args:
            obs: Leaf -> (B, ...), normalized.
            mask: (B, n) bool, true where an action is allowed.
            policy: A copy of the policy network, such as a target network; None means the network itself.
        """
        return F.log_softmax(masked((self.policy if policy is None else policy)(obs), mask), -1)

    def get_q_scores(self, obs: Obs, action: Tensor | None = None) -> Tensor:
        """Return each critic's values: (num_critics, B) for given actions, or (num_critics, B, n) for all actions.

        The value of a distribution is its mean.

        Args:
            obs: Leaf -> (B, ...).
            action: (B, ...) in [-1, 1], or (B,) int64; None means all actions of a Discrete space.
        """
        return self.estimate.mean(self.scores_of(self.critics, self.normalize(obs), action))

    def scores_of(self, critics: nn.Module, obs: Obs, action: Tensor | None) -> Tensor:
        """Return the outputs of `critics`, such as target networks, for normalized observations; see `get_q_scores`."""
        if not self.is_discrete:
            assert action is not None, "a Box has infinitely many actions"
            return critic_scores(critics, obs, action)
        scores = critic_scores(critics, obs)
        return scores if action is None else self.estimate.of_action(scores, action[None])

    def _gaussian(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = outputs.chunk(2, -1)
        return mean, bound_log_std(log_std, self.options.log_std_bound)


class PolicyNet(nn.Module):
    """Policy network: a feature extractor and one linear head."""

    def __init__(self, options: NetworkOptions, num_outputs: int, generator: torch.Generator, *,
                 spaces: LeafSpaces | None = None) -> None:
        super().__init__()
        self.trunk = replay_trunk(options, generator, spaces=spaces)
        self.head = replay_linear(self.trunk.out_features, num_outputs, generator)

    def forward(self, obs: Obs) -> Tensor:
        """Map normalized observations, leaf -> (B, ...), to outputs (B, num_outputs) float32.

        With memory, `obs` is what `remembered` returns, and there may be two axes (L, B) in place of (B,).
        """
        outputs: Tensor = self.head(self.trunk.encode(obs))
        return outputs.float()  # with mixed precision, the head returns bfloat16


def critic_scores(critics: nn.Module, obs: Obs, *action: Tensor) -> Tensor:
    """Return the outputs of all `critics`: (num_critics, B), or (num_critics, B, n) for Discrete spaces.

    For distributions with k atoms, the shape is (num_critics, B, k).
    """
    return torch.stack([critic(obs, *action) for critic in critics])  # type: ignore[attr-defined] # a ModuleList
