"""Networks over vectors: fully connected layers, or the residual blocks of SimBa (Lee et al. 2025). B = rows."""

from __future__ import annotations

from collections.abc import Mapping

import gymnasium as gym
import torch
from torch import Tensor, nn

from pytorchrl.agent.actors.extractors import MLP, linear, module_list, num_features

BLOCKS = ("mlp", "simba")
"""Kinds of networks over vectors; see `vector_network`."""
_EXPANSION = 4
"""Number of hidden units of a residual block, as a multiple of its width: Lee et al. 2025, section 4.2."""


class SimbaBlock(nn.Module):
    """Residual block over vectors: x + W2 relu(W1 norm(x)), with a layer norm, and biases that are not shown."""

    def __init__(self, width: int, generator: torch.Generator | None = None) -> None:
        """Build the layers. Weights are normal with the variance 2 / inputs (He et al. 2015), and biases are 0."""
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.expand = _he_normal(width, _EXPANSION * width, generator)
        self.contract = _he_normal(_EXPANSION * width, width, generator)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output (B, width) for `x` (B, width)."""
        out: Tensor = x + self.contract(torch.relu(self.expand(self.norm(x))))
        return out


class Simba(nn.Module):
    """The network of SimBa, Lee et al. 2025, section 4.2: a linear layer, residual blocks and a last layer norm.

    The input is a leaf (converted to vectors as by `MLP`) or vectors of a given size. The paper also normalizes
    observations, which is the actor's option `normalize_obs`.
    """

    def __init__(
        self, space: gym.Space[object] | int, hidden_sizes: tuple[int, ...], generator: torch.Generator | None = None,
    ) -> None:
        """Build one block for each element of `hidden_sizes`, which are all equal to the width."""
        super().__init__()
        width = hidden_sizes[0]
        self.encode = MLP(space, ())
        self.first = linear(self.encode.out_features, width, 1.0, generator)
        self.blocks = module_list(SimbaBlock(width, generator) for _ in hidden_sizes)
        self.norm = nn.LayerNorm(width)
        self.out_features = width

    def forward(self, x: Tensor) -> Tensor:
        """Return features (B, out_features) of a leaf (B, ...)."""
        x = self.first(self.encode.forward(x))
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.norm(x)
        return out


def _he_normal(inputs: int, outputs: int, generator: torch.Generator | None) -> nn.Linear:
    layer = linear(inputs, outputs, generator=generator)
    nn.init.kaiming_normal_(layer.weight, nonlinearity="relu", generator=generator)
    return layer


def vector_network(
    space: gym.Space[object] | int, hidden_sizes: tuple[int, ...], activation: str, block: str,
    generator: torch.Generator | None = None, norm: str | None = None,
) -> MLP | Simba:
    """Return a network over a leaf, or over vectors of a given size.

    Args:
        space: Space of the leaf, or size of the vectors.
        hidden_sizes: Units of each layer or, for residual blocks, their width, once for each block; () means that the
            features are the encoded leaf.
        activation: Name of the activation function after each layer; residual blocks have ReLU.
        block: "mlp" for fully connected layers, or "simba" for residual blocks.
        generator: CPU generator for the initial weights.
        norm: Normalization of fully connected layers; see `MLP`.
    """
    if block == "simba" and hidden_sizes:
        return Simba(space, hidden_sizes, generator)
    return MLP(space, hidden_sizes, activation, generator, norm)


class DictNet(nn.Module):
    """One extractor for each leaf, followed by a ReLU network over the concatenated features of all leaves."""

    def __init__(
        self,
        extractors: Mapping[str, nn.Module],
        hidden_sizes: tuple[int, ...] = (256, 256),
        generator: torch.Generator | None = None,
        block: str = BLOCKS[0],
        norm: str | None = None,
    ) -> None:
        """Build the network from `extractors`, a mapping from each leaf to a module with `out_features`.

        `block` and `norm` are those of the network over the concatenated features; see `vector_network`.
        """
        super().__init__()
        self._leaves = list(extractors)
        # This is a list, not a ModuleDict, because the name of a leaf may contain a dot, unlike the name of a module.
        self.extractors = nn.ModuleList(extractors.values())
        self.joint = vector_network(
            sum(map(num_features, extractors.values())), hidden_sizes, "relu", block, generator, norm)
        self.out_features = self.joint.out_features

    def forward(self, obs: dict[str, Tensor]) -> Tensor:
        """Return features (B, out_features) of B observations; `obs` maps each leaf to a tensor (B, ...)."""
        features = [net(obs[leaf]) for leaf, net in zip(self._leaves, self.extractors, strict=True)]
        return self.joint.forward(torch.cat(features, -1))
