"""Run small policies of DDPG, TD3 and SAC in NumPy, which takes a third of the time that torch takes."""

from __future__ import annotations

import numpy as np

from pytorchrl.agent.actors.off_policy_actor import OffPolicyActor, PolicyNet
from pytorchrl.agent.actors.small_network import SmallNetwork, normalized
from pytorchrl.agent.contracts import overrides
from pytorchrl.agent.data import OBS_LEAF, ActingStep, Arrays


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
            not overrides(actor, OffPolicyActor, "act", "to_env", "normalise") and not actor.is_discrete
            and type(policy) is PolicyNet and actor.low.device.type == "cpu" and actor.options.log_std_bound == "clip"
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
