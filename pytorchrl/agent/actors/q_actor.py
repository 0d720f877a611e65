"""The actor of DQN: a network that values every action of a Discrete space."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import gymnasium as gym
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor, nn

from pytorchrl.agent.actors.distributions import check_mask
from pytorchrl.agent.actors.memory import MEMORIES
from pytorchrl.agent.actors.replay_actor import DiscreteQNet, ReplayActor
from pytorchrl.agent.contracts import check_attributes, check_output
from pytorchrl.agent.data import PREVIOUS, Obs
from pytorchrl.agent.options import option
from pytorchrl.errors import ConfigError

_LOWEST = torch.finfo(torch.float32).min


class QActor(ReplayActor):
    """Takes the action with the highest value.

    With memory (`recurrent_net`) values depend on the observations before: `unroll` takes the memory's state, and is what
    acts and learns. Without, `act` and `get_q_scores` are all there is.

    Attributes:
        q: The network, from normalised observations to values (B, n).
    """

    action_spaces: ClassVar[tuple[type[gym.Space[object]], ...]] = (gym.spaces.Discrete,)
    network_options: ClassVar[tuple[str, ...]] = (
        *ReplayActor.network_options, "dueling", "noisy", "recurrent_net", "recurrent_size")

    @dataclass(frozen=True, kw_only=True)
    class Options(ReplayActor.Options):
        """Settings of the actor."""

        dueling: bool = option(False, help="Separate heads for the value and for advantages of actions.")
        noisy: bool = option(False, help="Noise on the parameters of the heads, whose size is learned; explores by itself.")
        recurrent_net: str | None = option(None, help="Memory after the extractor; R2D2 learns with it.", choices=(None, *MEMORIES))
        recurrent_size: int | None = option(None, help="Units of the memory; None: gru 256, lstm 512.", low=1)
        prev_action_reward: bool = option(
            False, help="Show the memory the action and the reward of the step before, too; zeros where an episode begins.")

        def __post_init__(self) -> None:
            """Refuse options of the memory if there is none."""
            super().__post_init__()
            if self.recurrent_size is not None and self.recurrent_net is None:
                raise ConfigError(f"recurrent_size={self.recurrent_size} needs recurrent_net='gru' or 'lstm', got None")
            if self.prev_action_reward and self.recurrent_net is None:
                raise ConfigError("prev_action_reward=True needs recurrent_net='gru' or 'lstm', got None")

    def __init__(self, options: QActor.Options, device: str | torch.device = "cpu", seed: int = 0) -> None:
        """Build the network from `seed`, then load the checkpoint if there is one.

        Raises:
            CheckpointError: The checkpoint cannot be read or holds another network.
        """
        super().__init__(options, device)
        self.num_actions = int(options.action_space.n)
        self.build(seed)

    def build_networks(self, generator: torch.Generator) -> None:
        """Build `q`; a subclass may build another module.

        `q.forward(obs, mask, generator)` returns the values of all actions, (B, n) float32, from normalised observations,
        leaf -> (B, ...). `mask` is (B, n) bool or None; `generator` draws the noise of the network, and None means no noise.
        """
        options = self.options
        self.is_recurrent = options.recurrent_net is not None
        self.q: nn.Module = DiscreteQNet(
            options, self.num_actions, generator, dueling=options.dueling, noisy=options.noisy,
            num_previous=self.num_actions + 1 if options.prev_action_reward else 0)

    def check_networks(self) -> None:
        """See `Actor`."""
        check_attributes(self, q="a module that returns the values of all actions, (B, n), from (obs, mask, generator)")
        if not self.is_recurrent:
            check_output(self, "q(obs, mask, generator)", self.q(self.example_obs(), None, None), self.num_actions)

    def networks(self) -> dict[str, nn.Module]:
        """The Q network, group `q`."""
        return {"q": self.q}

    def random_actions(self, num_envs: int, mask: Tensor | None, generator: torch.Generator) -> Tensor:
        """See `ReplayActor`; return (E,) int64."""
        return best_action(torch.rand(num_envs, self.num_actions, generator=generator, device=self.device), mask)

    def acting_networks(self) -> dict[str, nn.Module]:
        """The same."""
        return {"q": self.q}

    def initial_states(self, num_envs: int) -> Obs:
        """{"q": zeros (E, H)}; an LSTM's vector is its output and its cell. Empty without memory.

        With `prev_action_reward` also `PREVIOUS`, zeros (E, n + 1).
        """
        if not self.is_recurrent:
            return {}
        assert isinstance(self.q, DiscreteQNet)
        memory = self.q.trunk.memory
        assert memory is not None
        sizes = {"q": memory.state_size, **({PREVIOUS: self.num_actions + 1} if self.options.prev_action_reward else {})}
        return {name: torch.zeros(num_envs, size, device=self.device) for name, size in sizes.items()}

    def unroll(
        self, obs: Obs, rhs: Obs, done: Tensor, mask: Tensor | None = None, generator: torch.Generator | None = None,
    ) -> tuple[Tensor, Obs]:
        """Values of all actions, (B, n) or (L, B, n), of one step or of L of them, and the memory after the last one.

        Args:
            obs: Leaf -> (B, ...) or (L, B, ...).
            rhs: {"q": (B, H)}, the memory before the first row; empty without memory. With `prev_action_reward` also `PREVIOUS`,
                (B, n + 1) or (L, B, n + 1), of the step before each row.
            done: (B,) or (L, B) bool, whether a row is the first of its episode.
            mask: (B, n) or (L, B, n) bool, true where an action is allowed.
            generator: Of a noisy network's noise; None leaves it out.
        """
        assert isinstance(self.q, DiscreteQNet)
        scores, state = self.q.unroll(self.normalise(obs), rhs.get("q"), done, mask, generator, rhs.get(PREVIOUS))
        return scores, {} if state is None else {"q": state}

    def with_action(self, rhs: Obs, action: Tensor) -> Obs:
        """What `unroll` gave, with the actions (B,) then taken if the memory is shown them; `show_reward` adds what they brought."""
        if not self.options.prev_action_reward:
            return rhs
        return {**rhs, PREVIOUS: F.pad(F.one_hot(action, self.num_actions).float(), (0, 1))}

    def get_q_scores(
        self, obs: Obs, action: Tensor | None = None, mask: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Values of all actions (B, n), or of those given (B,).

        Args:
            obs: Leaf -> (B, ...).
            action: (B,) int64.
            mask: (B, n) bool, true where an action is allowed.
            generator: Of a noisy network's noise; None leaves it out.
        """
        scores: Tensor = self.q(self.normalise(obs), mask, generator)
        return scores if action is None else scores.gather(-1, action.unsqueeze(-1)).squeeze(-1)

    def act(self, obs: Obs, mask: Tensor | None = None, generator: torch.Generator | None = None) -> Tensor:
        """The best allowed action of each row, (B,) int64; arguments as of `get_q_scores`.

        Raises:
            NonFiniteDataError: A row of the mask allows no action.
        """
        if mask is not None:
            check_mask(mask)
        return best_action(self.get_q_scores(obs, None, mask, generator), mask)


def best_action(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Index (...) of the highest score (..., n) among allowed actions."""
    return (scores if mask is None else scores.masked_fill(~mask, _LOWEST)).argmax(-1)
