"""The actor of DQN, R2D2 and PQN: a network that estimates the values of all actions of a Discrete space."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import gymnasium as gym
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor, nn
from typing_extensions import override

from pytorchrl.agent.actors.distributions import check_mask, masked
from pytorchrl.agent.actors.extractors import NORMS
from pytorchrl.agent.actors.replay_actor import DiscreteQNet, ReplayActor
from pytorchrl.agent.actors.trunk import MemoryOptions
from pytorchrl.agent.contracts import check_attributes, check_output
from pytorchrl.agent.data import PREVIOUS, Obs
from pytorchrl.agent.options import option
from pytorchrl.errors import Problem
from pytorchrl.support.problems import error_of


class QActor(ReplayActor):
    """An actor that chooses the action with the highest value of a Q network.

    With memory (`recurrent_net`), values also depend on earlier observations. Algorithms then call `unroll` for both
    acting and learning. Without memory, they call `act` for acting and `get_q_scores` for learning.

    Attributes:
        q: The network, which maps normalized observations to values (B, n) or, with a `distribution`, (B, n, k).
        num_actions: The number n of actions.
    """

    action_spaces: ClassVar[tuple[type[gym.Space[object]], ...]] = (gym.spaces.Discrete,)
    network_options: ClassVar[tuple[str, ...]] = (
        *ReplayActor.network_options, "dueling", "noisy", "norm", "recurrent_net", "recurrent_size")

    @dataclass(frozen=True, kw_only=True)
    class Options(MemoryOptions, ReplayActor.Options):
        """Options of `QActor`."""

        dueling: bool = option(
            False, help="Use one head for the value of a state and another for the advantages of actions.")
        noisy: bool = option(
            False, help="Add noise with a learned scale to the parameters of the heads, to explore without epsilon.")
        norm: str | None = option(
            None, help="Normalization before the activations of fully connected layers, and of convolutions of cnn: "
                       "layer, or None.",
            choices=NORMS)
        prev_action_reward: bool = option(
            False, help="Add the previous action and reward to the inputs of the memory; both are 0 at the start of an "
                        "episode.")

        def __post_init__(self) -> None:
            """Refuse a norm for an extractor that has no layers to normalize."""
            super().__post_init__()
            is_bare = not self.hidden_sizes and len(self.observation_space) == 1 and self._has_vector_networks()
            if self.norm is not None and (is_bare or not isinstance(self.feature_extractor, str)):
                raise error_of([Problem(
                    f"norm={self.norm!r} needs hidden layers of this library, got feature_extractor="
                    f"{self.feature_extractor!r} and hidden_sizes={self.hidden_sizes}",
                    "leave norm out, or normalize in an extractor of your own", ("norm", "feature_extractor"))])

        def contradictions(self) -> Iterator[Problem]:
            """Refuse an input of a memory that does not exist, and a norm for residual blocks."""
            yield from super().contradictions()
            if self.block == "simba":
                yield from self._without_effect(
                    ("norm",), "block='mlp', because residual blocks have layer norms of their own", "block")
            if self.prev_action_reward and self.recurrent_net is None:
                yield Problem("prev_action_reward=True needs recurrent_net='gru' or 'lstm', got None",
                              options=("prev_action_reward", "recurrent_net"))

    def __init__(self, options: QActor.Options, device: str | torch.device = "cpu", seed: int = 0) -> None:
        """Build the network from `seed`, then load the checkpoint if one is given.

        Raises:
            CheckpointError: The checkpoint cannot be read or contains a different network.
        """
        super().__init__(options, device)
        self.num_actions = int(options.action_space.n)
        self.build(seed)

    def build_networks(self, generator: torch.Generator) -> None:
        """Build `q`; a subclass may build a different module.

        `q.forward(obs, mask, generator)` returns the values of all actions, (B, n) float32, from normalized
        observations, leaf -> (B, ...). `mask` is (B, n) bool or None; `generator` draws the noise of the network, and
        None means no noise. If the option `distribution` is set, `q` returns (B, n, k), where k is
        `self.estimate.num_atoms`.
        """
        options = self.options
        self.is_recurrent = options.recurrent_net is not None
        self.q: nn.Module = DiscreteQNet(
            options, self.num_actions, generator, dueling=options.dueling, noisy=options.noisy,
            num_previous=self.num_actions + 1 if options.prev_action_reward else 0, num_atoms=self.estimate.num_atoms)

    @override
    def check_networks(self) -> None:
        check_attributes(self, q="a module that returns the values of all actions, (B, n), from (obs, mask, generator)")
        if not self.is_recurrent:
            check_output(self, "q(obs, mask, generator)", self.q(self.example_obs(), None, None), self.num_actions,
                         self.estimate.num_atoms)

    def networks(self) -> dict[str, nn.Module]:
        """Return the Q network, which is the parameter group `q`."""
        return {"q": self.q}

    @override
    def random_actions(self, num_envs: int, mask: Tensor | None, generator: torch.Generator) -> Tensor:
        """Draw random allowed actions, (E,) int64."""
        return best_action(torch.rand(num_envs, self.num_actions, generator=generator, device=self.device), mask)

    def acting_networks(self) -> dict[str, nn.Module]:
        """Return the Q network, which is the parameter group `q`."""
        return {"q": self.q}

    def initial_states(self, num_envs: int) -> Obs:
        """Return the memory at the start of an episode: {"q": zeros (E, H)}, or {} without memory.

        E is `num_envs`, and H is the size of the memory's state. The state of an LSTM is its output, followed by its
        cell state. With `prev_action_reward`, the result also contains zeros (E, n + 1) under the key `PREVIOUS`: the
        previous action (one-hot, n actions) and the previous reward.
        """
        if not self.is_recurrent:
            return {}
        assert isinstance(self.q, DiscreteQNet)
        memory = self.q.trunk.memory
        assert memory is not None
        sizes = {"q": memory.state_size}
        if self.options.prev_action_reward:
            sizes[PREVIOUS] = self.num_actions + 1
        return {name: torch.zeros(num_envs, size, device=self.device) for name, size in sizes.items()}

    def unroll(
        self, obs: Obs, rhs: Obs, done: Tensor, mask: Tensor | None = None, generator: torch.Generator | None = None,
    ) -> tuple[Tensor, Obs]:
        """Compute the values of all actions for one step or for L steps.

        Args:
            obs: Leaf -> (B, ...) or (L, B, ...).
            rhs: {"q": (B, H)}, the memory before the first row; empty without memory. With `prev_action_reward`, `rhs`
                also contains `PREVIOUS`, (B, n + 1) or (L, B, n + 1), the action and reward before each row.
            done: (B,) or (L, B) bool, whether a row is the first of its episode.
            mask: (B, n) or (L, B, n) bool, true where an action is allowed.
            generator: Generator of the noise of a noisy network; None means no noise.

        Returns:
            Values (B, n) or (L, B, n), and the memory after the last row, (B, H) with the key "q"; {} without memory.
        """
        assert isinstance(self.q, DiscreteQNet)
        outputs, state = self.q.unroll(self.normalize(obs), rhs.get("q"), done, mask, generator, rhs.get(PREVIOUS))
        return self.estimate.mean(outputs), {} if state is None else {"q": state}

    def with_action(self, rhs: Obs, action: Tensor) -> Obs:
        """Add the chosen actions (B,) to the states that `unroll` returned, if actions are an input of the memory.

        The rewards of these actions are added later by `show_reward`, after the environments have taken the step.
        """
        if not self.options.prev_action_reward:
            return rhs
        return {**rhs, PREVIOUS: F.pad(F.one_hot(action, self.num_actions).float(), (0, 1))}

    def get_q_scores(
        self, obs: Obs, action: Tensor | None = None, mask: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Return the values (B, n) of all actions, or the values (B,) of given actions; means of distributions.

        Args:
            obs: Leaf -> (B, ...).
            action: (B,) int64, or None for all actions.
            mask: (B, n) bool, true where an action is allowed.
            generator: Generator of the noise of a noisy network; None means no noise.
        """
        outputs = self.q(self.normalize(obs), mask, generator)
        return self.estimate.mean(outputs if action is None else self.estimate.of_action(outputs, action))

    def act(self, obs: Obs, mask: Tensor | None = None, generator: torch.Generator | None = None) -> Tensor:
        """Return the best allowed action of each row, (B,) int64; see `get_q_scores` for the arguments.

        Raises:
            NonFiniteDataError: A row of the mask allows no action.
        """
        if mask is not None:
            check_mask(mask)
        return best_action(self.get_q_scores(obs, None, mask, generator), mask)

    @override
    def best_actions(self, obs: Obs, rhs: Obs, mask: Tensor | None) -> tuple[Tensor, Obs]:
        """Return the actions with the highest values, without the noise of a noisy network.

        With `prev_action_reward`, the returned memory contains these actions, but not their rewards. The caller must
        add the rewards with `show_reward` after the environments have taken the step.
        """
        if not self.is_recurrent:
            return self.to_env(self.act(obs, mask)), {}
        continues = torch.zeros(next(iter(obs.values())).shape[0], dtype=torch.bool, device=self.device)
        scores, states = self.unroll(obs, rhs, continues, mask)
        action = best_action(scores, mask)
        return action, self.with_action(states, action)


def best_action(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Return the allowed action with the highest score for each row of `scores` (..., n), as an int64 tensor (...)."""
    return masked(scores, mask).argmax(-1)
