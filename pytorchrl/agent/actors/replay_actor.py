"""The base class of actors for replay algorithms, and the Q networks that these actors use.

The Q networks have PyTorch's default initialization.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor, nn

from pytorchrl.agent.actors.base import Actor
from pytorchrl.agent.actors.blocks import Simba, vector_network
from pytorchrl.agent.actors.critic_layers import CriticLayers, CriticOptions
from pytorchrl.agent.actors.extractors import ACTIVATIONS, linear
from pytorchrl.agent.actors.resnets import FixupCNN
from pytorchrl.agent.actors.return_distributions import DistributionOptions, value_estimate
from pytorchrl.agent.actors.trunk import LeafSpaces, NetworkOptions, Trunk, TrunkOptions
from pytorchrl.agent.data import Obs
from pytorchrl.agent.noise import NoiseSource, standard_normal
from pytorchrl.agent.options import option

_NOISE_SCALE = 0.5
"""Initial sigma of a noisy layer, before division by sqrt(number of inputs): Fortunato et al. 2018, section 3.2."""


class ReplayActor(Actor):
    """The base class of actors of replay algorithms.

    The networks of an actor share no layers. Observations are dictionaries from leaves to tensors (B, ...). No method
    changes its inputs in place.

    Attributes:
        estimate: What the outputs of the value networks describe: the mean of the return, or its distribution.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(DistributionOptions, TrunkOptions):
        """Options of all actors of replay algorithms."""

        hidden_sizes: tuple[int, ...] = option((256, 256), help="Units of each fully connected layer.", low=1)
        activation: str = option("relu", help="Activation after each hidden layer.", choices=tuple(ACTIVATIONS))

    def __init__(self, options: ReplayActor.Options, device: str | torch.device) -> None:
        """Store the arguments. A subclass then sets the attributes that its networks need and calls `build`."""
        super().__init__(options, device)
        self.estimate = value_estimate(options)

    @abstractmethod
    def networks(self) -> dict[str, nn.Module]:
        """Return all trained networks, by parameter group."""

    @abstractmethod
    def random_actions(self, num_envs: int, mask: Tensor | None, generator: torch.Generator) -> Tensor:
        """Draw actions (E, ...) uniformly from those that `mask` (E, n) allows; `to_env` converts them afterwards."""

    def to_env(self, action: Tensor) -> Tensor:
        """Convert stored actions (E, ...) to the actions that environments receive."""
        return action

    def remember(self, obs: Obs, rhs: Obs, done: Tensor) -> tuple[Obs, Obs]:
        """Let the memory of the policy process observations; without memory, return the observations and {}.

        Args:
            obs: Leaf -> (E, ...), as environments return them.
            rhs: The memory (E, H) before these observations, by name.
            done: (E,) bool, whether an observation is the first of its episode.

        Returns:
            The input of the policy, in place of the observations; and the memory after them.
        """
        return obs, {}


def replay_trunk(
    options: NetworkOptions, generator: torch.Generator, hidden_sizes: tuple[int, ...] | None = None,
    num_previous: int = 0, spaces: LeafSpaces | None = None,
) -> Trunk:
    """Return a trunk whose extractor has PyTorch's default initialization.

    An extractor that the user provides keeps its own initial weights.

    Args:
        options: Options of the actor.
        generator: CPU generator for the initial weights.
        hidden_sizes: Units of each fully connected layer; None means `options.hidden_sizes`.
        num_previous: Number of additional inputs of the memory; see `Trunk`.
        spaces: Spaces of the leaves that the trunk processes; None means all leaves.
    """
    trunk = Trunk(options, generator, num_previous, spaces=spaces, hidden_sizes=hidden_sizes)
    if isinstance(options.feature_extractor, str):
        default_init(trunk.extractor, generator)  # the memory, if any, keeps its orthogonal weights
    return trunk


def default_init(module: nn.Module, generator: torch.Generator) -> None:
    """Draw the parameters of linear and convolutional layers as PyTorch does, uniformly within +-1 / sqrt(inputs).

    Here, `inputs` is the number of inputs of one unit. The layers of a `FixupCNN` or a `Simba` do not change, because
    they need a special initialization.
    """
    if isinstance(module, (FixupCNN, Simba)):
        return
    if isinstance(module, (nn.Linear, nn.Conv2d)):
        bound = 1 / math.sqrt(module.weight[0].numel())
        for parameter in module.parameters(recurse=False):
            nn.init.uniform_(parameter, -bound, bound, generator=generator)
    for child in module.children():
        default_init(child, generator)


def replay_linear(inputs: int, outputs: int, generator: torch.Generator) -> nn.Linear:
    """Return a linear layer with PyTorch's default initialization."""
    layer = linear(inputs, outputs, generator=generator)
    default_init(layer, generator)
    return layer


class NoisyLinear(nn.Module):
    """Linear layer with factorized Gaussian noise on its parameters: Fortunato et al. 2018, equations 9 to 11."""

    def __init__(self, inputs: int, outputs: int, generator: torch.Generator) -> None:
        super().__init__()
        bound = 1 / math.sqrt(inputs)
        self.weight = nn.Parameter(torch.empty(outputs, inputs).uniform_(-bound, bound, generator=generator))
        self.bias = nn.Parameter(torch.empty(outputs).uniform_(-bound, bound, generator=generator))
        self.weight_sigma = nn.Parameter(torch.full((outputs, inputs), _NOISE_SCALE * bound))
        self.bias_sigma = nn.Parameter(torch.full((outputs,), _NOISE_SCALE * bound))

    def forward(self, x: Tensor, generator: NoiseSource | None = None) -> Tensor:
        """Return (B, outputs) for `x` (B, inputs). All rows share one draw of noise; no generator means no noise."""
        mean = F.linear(x, self.weight, self.bias)
        if generator is None:
            return mean
        outputs, inputs = self.weight.shape
        noise = standard_normal(self.weight.new_empty(inputs + outputs), generator)
        noise_in, noise_out = torch.split(noise.sign() * noise.abs().sqrt(), [inputs, outputs])
        # The noise of the weights is weight_sigma * outer(noise_out, noise_in). To avoid this large matrix, multiply
        # the inputs by noise_in, and the outputs by noise_out.
        return mean + F.linear(x * noise_in, self.weight_sigma, self.bias_sigma) * noise_out


class DiscreteQNet(nn.Module):
    """Network for the values of all actions of a Discrete space: a trunk and one linear head (two if dueling).

    A value is one number, or k numbers if it is a distribution with k = `num_atoms` atoms. The shapes of values below
    then end with an axis of k numbers, such as (B, n, k) in place of (B, n).
    """

    def __init__(self, options: NetworkOptions, num_actions: int, generator: torch.Generator, *, dueling: bool = False,
                 noisy: bool = False, num_previous: int = 0, spaces: LeafSpaces | None = None,
                 num_atoms: int | None = None) -> None:
        super().__init__()
        self.trunk = replay_trunk(options, generator, num_previous=num_previous, spaces=spaces)
        build = NoisyLinear if noisy else replay_linear
        size = num_atoms or 1
        self.advantage_head = build(self.trunk.out_features, num_actions * size, generator)
        self.value_head = build(self.trunk.out_features, size, generator) if dueling else None
        self._noisy, self._num_atoms = noisy, num_atoms

    def forward(self, obs: Obs, mask: Tensor | None = None, generator: torch.Generator | None = None) -> Tensor:
        """Return the values (B, n) of all actions.

        Args:
            obs: Leaf -> (B, ...), normalized; with memory, what `remembered` returns.
            mask: (B, n) bool, true for the actions over which a dueling network averages the advantages.
            generator: Generator of the noise of noisy layers; None means no noise.
        """
        return self._values(self.trunk.encode(obs), mask, generator)

    def unroll(
        self, obs: Obs, state: Tensor | None, done: Tensor | None, mask: Tensor | None = None,
        generator: torch.Generator | None = None, previous: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the values of all actions for one step or for L steps.

        Args:
            obs: Leaf -> (B, ...) or (L, B, ...), normalized.
            state: (B, H), the memory before the first row; None without memory.
            done: (B,) or (L, B) bool, whether a row is the first of its episode; None without memory.
            mask: (B, n) or (L, B, n) bool, true for the actions over which a dueling network averages the
                advantages.
            generator: Generator of the noise of noisy layers; None means no noise.
            previous: (B, n + 1) or (L, B, n + 1), the previous action (one-hot) and reward; None if they are not an
                input of the memory.

        Returns:
            Values (B, n) or (L, B, n), and the memory after the last row, (B, H); None without memory.
        """
        features, state = self.trunk.forward(obs, state, done, previous)
        return self._values(features, mask, generator), state

    def _values(self, features: Tensor, mask: Tensor | None, generator: torch.Generator | None) -> Tensor:
        noise = (generator,) if self._noisy else ()
        q: Tensor = self.advantage_head(features, *noise).float()  # with mixed precision, heads return bfloat16
        axis = -1  # the axis of actions
        if self._num_atoms is not None:
            q, axis = q.view(*q.shape[:-1], -1, self._num_atoms), -2
            mask = None if mask is None else mask.unsqueeze(-1)
        if self.value_head is None:
            return q
        if mask is None:
            mean = q.mean(axis, keepdim=True)
        else:  # avoid a division by zero: the mask of a terminal observation may allow no action
            mean = torch.where(mask, q, 0.0).sum(axis, keepdim=True) / mask.sum(axis, keepdim=True).clamp(min=1)
        value: Tensor = self.value_head(features, *noise).float()
        return (value if self._num_atoms is None else value.unsqueeze(axis)) + q - mean


class ContinuousQNet(nn.Module):
    """Network for the value of one action: an extractor, then layers over its features and the action."""

    def __init__(self, options: NetworkOptions, action_size: int, generator: torch.Generator, *,
                 spaces: LeafSpaces | None = None, critic: CriticOptions | None = None,
                 num_atoms: int | None = None) -> None:
        super().__init__()
        # `layers` has the hidden layers
        self.trunk = replay_trunk(options, generator, hidden_sizes=(), spaces=spaces)
        critic, inputs = critic or CriticOptions(), self.trunk.out_features + action_size
        sizes = options.hidden_sizes if critic.critic_hidden_sizes is None else critic.critic_hidden_sizes
        self.layers = (vector_network(inputs, sizes, options.activation, options.block, generator) if critic.is_plain
                       else CriticLayers(inputs, sizes, options.activation, critic, generator))
        default_init(self.layers, generator)
        self.head = replay_linear(self.layers.out_features, num_atoms or 1, generator)
        self._is_distribution = num_atoms is not None

    def forward(self, obs: Obs, action: Tensor) -> Tensor:
        """Return the values (B,) of actions (B, ...) in [-1, 1], or (B, k) if they are distributions with k atoms.

        The leaves (B, ...) in `obs` are normalized. With memory, `obs` is what `remembered` returns, and there may be
        two axes (L, B) in place of (B,).
        """
        features = self.trunk.encode(obs)
        hidden = self.layers.forward(torch.cat((features, action.reshape(*features.shape[:-1], -1)), -1))
        value: Tensor = self.head(hidden)
        value = value.float()  # with mixed precision, the head returns bfloat16
        return value if self._is_distribution else value.squeeze(-1)
