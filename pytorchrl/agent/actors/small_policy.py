"""Compute the actions of small policies in NumPy, in a third of torch's time. E is the number of environments."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from pytorchrl.agent.actors.distributions import Categorical, Gaussian
from pytorchrl.agent.actors.off_policy_actor import OffPolicyActor, PolicyNet
from pytorchrl.agent.actors.on_policy_actor import OnPolicyActor
from pytorchrl.agent.actors.small_network import SmallNetwork, normalized
from pytorchrl.agent.actors.trunk import Trunk
from pytorchrl.agent.contracts import overrides
from pytorchrl.agent.data import OBS_LEAF, ActingStep, Arrays

_NOISE_STEPS = 64
"""Least number of steps for which one call of the generator draws noise."""
_NOISE_ROWS = 512
"""Least number of rows of noise, one row for each environment and step, that one call of the generator draws."""


class SmallPolicy:
    """The fully connected policy of an actor, computed in NumPy, which is faster than torch for small batches.

    See `SmallNetwork`, which computes the outputs of the policy.
    """

    def __init__(self, actor: OnPolicyActor, with_value: bool = True) -> None:
        """Create NumPy views of the parameters of `actor`, for which `suits` must return True.

        With memory, the value network makes a step, too, and `with_value` tells whether actions come with values.
        """
        self._network = SmallNetwork(actor.policy, actor.policy_head, actor.options.activation)
        self._value: SmallNetwork | None = None
        self._max_rows, self._with_value = self._network.max_rows, with_value
        if actor.is_recurrent:
            assert actor.value is not None
            self._value = SmallNetwork(actor.value, actor.value_head, actor.options.activation)
            self._max_rows = min(self._max_rows, self._value.max_rows)
        self._normalize = _normalizer(actor)
        self._noise: list[np.ndarray] = []  # noise of the next steps, in reverse order
        distribution = actor.distribution
        self._log_std: np.ndarray | None = None
        if isinstance(distribution, Gaussian):
            self._log_std = self._log_stds = distribution.log_std.detach().numpy()
            self._shape = (-1, *distribution.action_shape)
            self._low, self._high = distribution.low.flatten().numpy(), distribution.high.flatten().numpy()

    @staticmethod
    def suits(actor: OnPolicyActor) -> bool:
        """Return whether this class can compute the policy of `actor`.

        The policy must be an MLP, with or without memory, and have a `Categorical` or `Gaussian` distribution. The
        value network must not use the policy's features, and must have the same structure if there is memory.
        """
        def supports(name: str) -> bool:
            return SmallNetwork.supports(getattr(actor, name, None), getattr(actor, f"{name}_head", None),
                                         actor.options.activation, actor.is_recurrent)

        return (
            not overrides(actor, OnPolicyActor, "act", "policy_features") and not actor.is_shared
            and supports("policy") and type(actor.distribution) in (Categorical, Gaussian)
            and (not actor.is_recurrent or (
                not overrides(actor, OnPolicyActor, "value_features", "initial_states") and supports("value"))))

    @property
    def noise(self) -> Tensor:
        """Noise for the n network outputs in the next k steps, (k, E, n) float32, saved with the generator's state."""
        return torch.from_numpy(np.array(self._noise[::-1], np.float32))

    @noise.setter
    def noise(self, noise: Tensor) -> None:
        self._noise = list(noise.numpy())[::-1]

    def act(
        self, obs: Arrays, rhs: Arrays, done: np.ndarray, deterministic: bool, generator: torch.Generator,
    ) -> ActingStep | None:
        """Choose the actions of E environments as the actor does; return None if E is so large that torch is faster."""
        values = obs[OBS_LEAF]
        num_envs = len(values)
        if num_envs > self._max_rows:
            return None
        if num_envs == 1:
            values = values[0]  # adding two vectors is faster in NumPy than broadcasting a vector to a matrix
        if self._normalize is not None:
            values = self._normalize(values)
        other: Arrays = {}
        if self._value is None:
            params = self._network(values)
            rhs = {}
        else:
            params, policy_state = self._network.step(values, rhs["policy"], done)
            value, value_state = self._value.step(values, rhs["value"], done)
            rhs = {"policy": policy_state, "value": value_state}
            if self._with_value:
                other["value"] = value.reshape(num_envs)
        noise = None if deterministic else self._draw(num_envs, params.shape[-1], generator)
        if self._log_std is None:  # the argmax of the logits plus Gumbel noise is a draw from their softmax
            action = clipped = (params if noise is None else params + noise).argmax(-1, keepdims=num_envs == 1)
        else:
            action = params if noise is None else params + noise * np.exp(self._log_std)
            clipped = np.maximum(action, self._low)
            np.minimum(clipped, self._high, out=clipped)
            action, clipped = action.reshape(self._shape), clipped.reshape(self._shape)
            if self._log_stds.shape != params.shape:
                self._log_stds = np.broadcast_to(self._log_std, params.shape)
            params = np.concatenate((params, self._log_stds), -1)
        other["dist_params"] = params[None] if num_envs == 1 else params
        return ActingStep(action, clipped, rhs, other)

    def _draw(self, num_envs: int, num_outputs: int, generator: torch.Generator) -> np.ndarray:
        """Return the noise of one step, (E, n) for n network outputs, or (n,) for a single environment."""
        if not self._noise or len(self._noise[-1]) != num_envs:
            # Noise for many steps is drawn at once, because each draw is slow.
            noise = torch.empty(max(_NOISE_STEPS, _NOISE_ROWS // num_envs), num_envs, num_outputs)
            if self._log_std is None:
                noise.exponential_(generator=generator).log_().neg_()
            else:
                noise.normal_(generator=generator)
            self.noise = noise
        drawn = self._noise.pop()
        return drawn[0] if num_envs == 1 else drawn


def _normalizer(actor: OnPolicyActor) -> Callable[[np.ndarray], np.ndarray] | None:
    """Return a function that converts observations as `actor.normalize` does; None if they do not change."""
    is_own = overrides(actor, OnPolicyActor, "normalize")
    if not is_own and not actor.options.normalize_obs:
        return None

    def in_torch(values: np.ndarray) -> np.ndarray:
        with torch.inference_mode():  # a user's `normalize` may have parameters
            found = actor.normalize({OBS_LEAF: torch.from_numpy(np.atleast_2d(values))})[OBS_LEAF].numpy()
        return found if values.ndim > 1 else found[0]

    if is_own or len(actor.obs_moments) != 1:
        return in_torch
    in_numpy = actor.obs_moments[0].in_numpy()
    return lambda values: in_numpy(values) if values.dtype == np.float32 else in_torch(values)


def small_value(actor: OnPolicyActor) -> SmallNetwork | None:
    """Return a faster form of the value network; None if it is no MLP, has memory, or shares layers with the policy."""
    trunk, head, activation = getattr(actor, "value", None), actor.value_head, actor.options.activation
    if actor.is_shared or overrides(actor, OnPolicyActor, "get_value", "value_features"):
        return None
    if not isinstance(trunk, Trunk) or not SmallNetwork.supports(trunk, head, activation):
        return None
    return SmallNetwork(trunk, head, activation)


class SmallOffPolicy:
    """The fully connected policy of an actor with continuous actions, computed in NumPy; see `SmallNetwork`."""

    def __init__(self, actor: OffPolicyActor) -> None:
        """Create NumPy views of the parameters of `actor`, for which `suits` must return True."""
        assert isinstance(actor.policy, PolicyNet)
        self._network = SmallNetwork(actor.policy.trunk, actor.policy.head, actor.options.activation)
        self._actor, self._low, self._high = actor, actor.low.numpy(), actor.high.numpy()

    @staticmethod
    def suits(actor: OffPolicyActor) -> bool:
        """Return whether this class supports `actor`: the policy must be an MLP on the CPU, without memory."""
        policy = getattr(actor, "policy", None)
        return (
            not overrides(actor, OffPolicyActor, "act", "to_env", "normalize") and not actor.is_discrete
            and type(policy) is PolicyNet and actor.low.device.type == "cpu" and actor.options.log_std_bound == "clip"
            and actor.options.policy != "gaussian"
            and SmallNetwork.supports(policy.trunk, policy.head, actor.options.activation))

    def outputs(self, obs: Arrays) -> np.ndarray | None:
        """Return the policy's outputs (E, k); None if torch is faster (for large E), or if `obs` has several leaves.

        Args:
            obs: Observations of E environments; an array (E, ...) for each leaf of the observation space.
        """
        values = obs.get(OBS_LEAF)
        if values is None or len(values) > self._network.max_rows:
            return None
        return self._network(normalized(self._actor, values))

    def step(self, action: np.ndarray) -> ActingStep:
        """Return an `ActingStep` with actions (E, ...) in [-1, 1] and the same actions scaled to the Box's bounds."""
        action = action.reshape(-1, *self._low.shape)
        scaled = self._low + 0.5 * (action + 1) * (self._high - self._low)
        return ActingStep(action, np.minimum(np.maximum(scaled, self._low), self._high), {}, {})
