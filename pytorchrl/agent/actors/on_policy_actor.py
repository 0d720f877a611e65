"""The actor of on-policy algorithms: a feature extractor, an optional memory, a policy head and a value head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor, nn
from typing_extensions import override

from pytorchrl.agent.actors.base import Actor
from pytorchrl.agent.actors.distributions import Gaussian, distribution_of
from pytorchrl.agent.actors.extractors import ACTIVATIONS, is_image, is_linear, linear
from pytorchrl.agent.actors.trunk import ACTOR_GROUP, CRITIC_GROUP, GroupOptions, MemoryOptions, Trunk
from pytorchrl.agent.contracts import NUM_EXAMPLES, check_attributes, check_features, check_output, overrides, violation
from pytorchrl.agent.data import Evaluated, Obs
from pytorchrl.agent.options import option
from pytorchrl.errors import Problem
from pytorchrl.support.untyped import OptionValue, UserPart

_VALUE_GAIN = 1.0


class OnPolicyActor(Actor):
    """Policy and value networks with orthogonal initialization, and the normalizers of observations and rewards.

    The methods have these arguments in common, which they never change:

    - `obs` maps each leaf to a tensor (B, ...), or (L, B, ...) for sequences.
    - `done` is true where a row is the first of its episode. Without memory, it may be None.
    - `rhs` maps the name of each network with memory to its state (B, H). Without memory, it is empty.

    Call `act` within `torch.inference_mode()`. The actor does not enter this mode itself, because entering it takes
    longer than running a small network.

    A subclass that builds other networks defines `build_networks` and `policy_features`. It also defines
    `value_features`, unless it sets `is_shared` to True.

    Attributes:
        distribution: Distribution of actions, parameterized by the outputs of the policy head.
        is_shared: Whether the value head is applied to the policy's features instead of those of `value_features`.
    """

    network_options: ClassVar[tuple[str, ...]] = (
        *Actor.network_options, "recurrent_net", "recurrent_size", "shared_policy_value_network", "policy_gain",
        "obs_groups")
    is_shared: bool = False

    @dataclass(frozen=True, kw_only=True)
    class Options(MemoryOptions, GroupOptions):
        """Options of `OnPolicyActor`."""

        action_space: OptionValue = option(  # checked and replaced by `flatten_action_space`
            help="Discrete, MultiDiscrete, MultiBinary, or a Box of floats.")
        hidden_sizes: tuple[int, ...] = option(
            (64, 64), help="Units of each fully connected layer over vectors.", low=1)
        activation: str = option("tanh", help="Activation after each hidden layer.", choices=tuple(ACTIVATIONS))
        shared_policy_value_network: bool | None = option(
            None, help="Whether the policy and the value share the extractor and the memory; None means yes if any "
                       "leaf is an image and there are no obs_groups, otherwise no.")
        policy_gain: float = option(
            0.01, low=0.0, exclusive=True,
            help="Gain of the initial weights of the policy head. A small gain makes the initial policy almost uniform "
                 "(or a Gaussian with a mean near 0); with a gain of 1.0, learning is faster if there are few updates.")
        log_std_init: float = option(0.0, help="Initial log standard deviation of a Gaussian policy.")
        normalize_reward: bool = option(
            False, help="Divide rewards by the running standard deviation of discounted returns.")

        def __post_init__(self) -> None:
            """Flatten the spaces; refuse a space of actions that has no distribution."""
            super().__post_init__()
            distribution_of(self.action_space)

        def contradictions(self) -> Iterator[Problem]:
            """Refuse a shared network if the policy and the value see different leaves."""
            yield from super().contradictions()
            if self.shared_policy_value_network and self.obs_groups is not None:
                yield Problem("shared_policy_value_network=True contradicts obs_groups, because a shared network sees "
                              "the same leaves for the policy and for the value", "leave one of them out",
                              ("shared_policy_value_network", "obs_groups"))

    def __init__(self, options: OnPolicyActor.Options, device: str | torch.device = "cpu", seed: int = 0) -> None:
        """Build the networks from `seed`, then load the checkpoint if one is given.

        Raises:
            CheckpointError: The checkpoint cannot be read or contains a different network.
        """
        super().__init__(options, device)
        self.distribution = distribution_of(options.action_space)
        if isinstance(self.distribution, Gaussian):
            nn.init.constant_(self.distribution.log_std, options.log_std_init)
        self.build(seed)
        # Modules and parameters are also stored in plain tuples, because looking them up in modules is slow: with
        # small networks, the lookups would take up to a third of the time of `act`.
        self._trunks: tuple[UserPart, UserPart] = (
            getattr(self, "policy", None), getattr(self, "value", None))
        self._heads = (self.policy_head, self.value_head, self.distribution)
        self._linear = tuple(
            (head.weight, head.bias) if is_linear(head) else None for head in (self.policy_head, self.value_head))

    # ---- networks

    def build_networks(self, generator: torch.Generator) -> None:
        """Build extractors, memories and heads from the options; a subclass may build other networks.

        The method sets these attributes:

        - `policy_head`, a module that maps features (B, F) to (B, `distribution.num_outputs`);
        - `value_head`, a module that maps features (B, F) to (B, 1);
        - the modules that `policy_features` and `value_features` use;
        - `is_shared = True` if the value head is applied to the policy's features;
        - `is_recurrent = True` if the networks have memory; the subclass then also defines `initial_states`.
        """
        options, shared = self.options, self.options.shared_policy_value_network
        self.is_recurrent = options.recurrent_net is not None
        self.is_shared = shared if shared is not None else (
            options.obs_groups is None and any(map(is_image, options.observation_space.values())))
        self.policy = Trunk(options, generator, spaces=options.group(ACTOR_GROUP))
        self.value = None if self.is_shared else Trunk(options, generator, spaces=options.group(CRITIC_GROUP))
        self.policy_head: nn.Module = linear(
            self.policy.out_features, self.distribution.num_outputs, options.policy_gain, generator)
        self.value_head: nn.Module = linear((self.value or self.policy).out_features, 1, _VALUE_GAIN, generator)

    def policy_features(self, obs: Obs, rhs: Obs, done: Tensor | None) -> tuple[Tensor, Obs]:
        """Compute the input of the policy head; gradients flow through the features.

        Args:
            obs: Leaf -> (B, ...), or (L, B, ...) for sequences of an actor with memory; normalized.
            rhs: The memory (B, H) of each network before the first row, by name; empty without memory.
            done: (B,) or (L, B) bool, whether a row is the first of its episode; the memory is reset before such a
                row.

        Returns:
            Features (B, F) or (L, B, F), and the memory after the last row, by name; {} without memory.
        """
        features, state = self._trunks[0].forward(obs, rhs.get("policy"), done)
        return features, {} if state is None else {"policy": state}

    def value_features(self, obs: Obs, rhs: Obs, done: Tensor | None) -> tuple[Tensor, Obs]:
        """Return the input of the value head, and the memory of the value network; see `policy_features`.

        The method is not called if `is_shared` is True.
        """
        features, state = self._trunks[1].forward(obs, rhs.get("value"), done)
        return features, {} if state is None else {"value": state}

    @override
    def check_networks(self) -> None:
        check_attributes(self, policy_head="a module from features (B, F) to (B, distribution.num_outputs)",
                         value_head="a module from features (B, F) to (B, 1)")
        if not self.is_shared and not overrides(self, OnPolicyActor, "value_features") and not hasattr(self, "value"):
            raise violation(self, "build_networks()", "networks for policy_features() alone",
                            "a method value_features() too, or is_shared = True if the value head is "
                            "applied to the policy's features")
        if not overrides(self, OnPolicyActor, "policy_features") and not hasattr(self, "policy"):
            raise violation(
                self, "build_networks()", "no network for policy_features()", "a method policy_features() too")
        self._trunks = (getattr(self, "policy", None), getattr(self, "value", None))
        obs, done = self.example_obs(), torch.ones(NUM_EXAMPLES, dtype=torch.bool, device=self.device)
        rhs = self.initial_states(NUM_EXAMPLES)
        policy = check_features(self, "policy_features()", self.policy_features(obs, rhs, done), rhs)
        check_output(self, "policy_head", self.policy_head(policy), self.distribution.num_outputs)
        value = policy if self.is_shared else check_features(
            self, "value_features()", self.value_features(obs, rhs, done), rhs)
        check_output(self, "value_head", self.value_head(value), 1)

    # ---- acting

    def initial_states(self, num_envs: int) -> Obs:
        """Return the initial memory: zeros (E, H) for each network with memory; empty without memory.

        The state of an LSTM is [output, cell state].
        """
        if not self.is_recurrent:
            return {}
        trunks = {"policy": self.policy} | ({} if self.value is None else {"value": self.value})
        return {
            name: torch.zeros(num_envs, trunk.memory.state_size, device=self.device)
            for name, trunk in trunks.items() if trunk.memory is not None
        }

    def act(
        self,
        obs: Obs,
        rhs: Obs,
        done: Tensor | None,
        deterministic: bool = False,
        mask: Tensor | None = None,
        generator: torch.Generator | None = None,
        with_value: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Obs]:
        """Choose actions. Log-probabilities are computed later, for the whole rollout at once, which is faster.

        Args:
            obs: Leaf -> (E, ...).
            rhs: The memory (E, H) of each network before these observations, by name.
            done: (E,) bool, whether an observation is the first of its episode.
            deterministic: Whether to choose the most likely actions instead of sampling.
            mask: (E, n) bool, true where an action is allowed. None allows all actions: an actor does not know
                whether its environments have masks.
            generator: Generator for sampling.
            with_value: Whether to compute values.

        Returns:
            Actions (E, ...) as drawn; actions for the environment; `dist_params` (E, P), from which
            `log_prob_from_params` computes log-probabilities later; values (E,), or None; and the memory after
            these observations. Values are None if `with_value` is false, or if the value network is separate and has no
            memory, because its values can be computed later for the whole rollout at once.

        Raises:
            NonFiniteDataError: A row of the mask allows no action.
        """
        distribution = self._heads[2]
        if mask is not None:
            distribution.check_mask(mask)
        obs = self.normalize(obs)
        params, latent, rhs_next = self._policy_params(obs, rhs, done)
        value = None
        if self.is_shared:
            value = self._value_of(latent) if with_value else None
        elif self.is_recurrent:
            latent, states = self.value_features(obs, rhs, done)
            value = self._value_of(latent) if with_value else None
            rhs_next = {**rhs_next, **states}
        action = distribution.mode(params, mask) if deterministic else distribution.sample(params, mask, generator)
        return action, distribution.clip(action), params, value, rhs_next

    @override
    def policy_states(self, num_envs: int) -> Obs:
        """Return the initial memory of the policy network, but not that of a separate value network."""
        states = self.initial_states(num_envs)
        if overrides(self, OnPolicyActor, "act", "policy_features", "initial_states"):
            return states
        return {name: state for name, state in states.items() if name == "policy"}

    @override
    def best_actions(self, obs: Obs, rhs: Obs, mask: Tensor | None) -> tuple[Tensor, Obs]:
        """Return the most likely actions, clipped to the bounds of a Box."""
        continues = torch.zeros(next(iter(obs.values())).shape[0], dtype=torch.bool, device=self.device)
        if overrides(self, OnPolicyActor, "act"):
            _, action, _, _, rhs = self.act(obs, rhs, continues, True, mask)
            return action, rhs
        params, _, rhs = self._policy_params(self.normalize(obs), rhs, continues)
        distribution = self._heads[2]
        return distribution.clip(distribution.mode(params, mask)), rhs

    @override
    def keep_policy(self) -> None:
        """Remove the value network."""
        super().keep_policy()
        self._linear = (None, None)  # call the heads as modules: `torch.export` needs this
        if not overrides(self, OnPolicyActor, "build_networks", "act", "policy_features"):
            self.value, self.value_head = None, nn.Identity()

    def networks(self) -> dict[str, nn.Module]:
        """Return the whole actor as the parameter group `all`; algorithms that learn from replay call this method."""
        return self.acting_networks()

    def to_env(self, action: Tensor) -> Tensor:
        """Convert stored actions (E, ...) to the actions that environments receive: clip them to the bounds."""
        return self.distribution.clip(action)

    def log_prob_from_params(self, dist_params: Tensor, action: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the log-probabilities (...,) of actions `(..., *shape)`, given `dist_params` (..., P) from `act`."""
        return self.distribution.log_prob(dist_params, action, mask)

    def get_action(
        self,
        obs: Obs,
        rhs: Obs,
        done: Tensor | None,
        deterministic: bool = False,
        mask: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Obs, Tensor, Tensor]:
        """Choose actions; see `act` for the arguments.

        Returns:
            Actions (E, ...) as drawn, clipped actions, log-probabilities (E,), the memory after these observations,
            entropies (E,), and `dist_params` (E, P).
        """
        action, clipped, params, _, rhs = self.act(obs, rhs, done, deterministic, mask, generator)
        logp, entropy = self.distribution.log_prob_entropy(params, action, mask)
        return action, clipped, logp, rhs, entropy, params

    # ---- learning

    def evaluate(
        self, obs: Obs, rhs: Obs, done: Tensor | None, action: Tensor, mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return log-probability, entropy and value, each (B,) or (L, B) float32, from one forward pass.

        Args:
            obs: Leaf -> (B, ...) or (L, B, ...).
            rhs: The memory (B, H) of each network before the first row, by name; empty without memory.
            done: (B,) or (L, B) bool, whether a row is the first of its episode.
            action: (B, ...) or (L, B, ...), as drawn.
            mask: (B, n) or (L, B, n) bool, true where an action is allowed.
        """
        evaluated = self.evaluate_all(obs, rhs, done, action, mask)
        return evaluated.logp, evaluated.entropy, evaluated.value

    def evaluate_all(
        self, obs: Obs, rhs: Obs, done: Tensor | None, action: Tensor, mask: Tensor | None = None,
    ) -> Evaluated:
        """Return all outputs that a loss may need, from one forward pass; see `evaluate` for the arguments."""
        obs = self.normalize(obs)
        params, latent, _ = self._policy_params(obs, rhs, done)
        value_latent = latent if self.is_shared else self.value_features(obs, rhs, done)[0]
        logp, entropy = self._heads[2].log_prob_entropy(params, action, mask)
        features = latent.float()  # under mixed precision, features are bfloat16, but a user's `terms` receives float32
        value_features = features if value_latent is latent else value_latent.float()
        return Evaluated(logp, entropy, self._value_of(value_latent), params, features, value_features)

    def evaluate_actions(
        self, obs: Obs, rhs: Obs, done: Tensor | None, action: Tensor, mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Obs]:
        """Return log-probability (B,), entropy (B,), `dist_params` (B, P) and the memory after the last row.

        Only the layers of the policy are computed; see `evaluate` for the arguments.
        """
        params, _, rhs_next = self._policy_params(self.normalize(obs), rhs, done)
        logp, entropy = self.distribution.log_prob_entropy(params, action, mask)
        return logp, entropy, params, {**rhs, **rhs_next}

    def get_value(self, obs: Obs, rhs: Obs, done: Tensor | None) -> tuple[Obs, Obs]:
        """Return {"value": (B,) or (L, B)}, and the memory `rhs` after the last row.

        In the returned `rhs`, only the memory of the network that computes the values is updated.
        """
        latent, states = self.latent_of_value(obs, rhs, done)
        return {"value": self._value_of(latent)}, {**rhs, **states} if states else rhs

    def latent_of_value(self, obs: Obs, rhs: Obs, done: Tensor | None) -> tuple[Tensor, Obs]:
        """Return the inputs (B, F) or (L, B, F) of the value head, and the memory after the last row of its network."""
        features_of = self.policy_features if self.is_shared else self.value_features
        return features_of(self.normalize(obs), rhs, done)

    # ---- heads

    def _policy_params(self, obs: Obs, rhs: Obs, done: Tensor | None) -> tuple[Tensor, Tensor, Obs]:
        latent, states = self.policy_features(obs, rhs, done)
        head, _, distribution = self._heads
        layer = self._linear[0]
        outputs = head(latent) if layer is None else F.linear(latent, *layer)
        return distribution.params_of(outputs), latent, states

    def _value_of(self, latent: Tensor) -> Tensor:
        layer = self._linear[1]
        outputs: Tensor = self._heads[1](latent) if layer is None else F.linear(latent, *layer)
        return outputs.squeeze(-1).float()
