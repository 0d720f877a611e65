"""Residual extractors for images: the IMPALA network, with and without Fixup initialization."""

from __future__ import annotations

import math
from collections.abc import Callable

import gymnasium as gym
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor, nn

from pytorchrl.agent.actors.extractors import (
    conv,
    image_input,
    image_shape,
    largest_byte,
    linear,
    module_list,
    unchanged,
)
from pytorchrl.support.untyped import Untyped

CHANNELS = (16, 32, 32)
"""Number of channels in each of the three stages of `ImpalaCNN`."""
_NUM_BLOCKS = 2 * len(CHANNELS)


class ResidualBlock(nn.Module):
    """Residual block of two 3 x 3 convolutions: x + conv(relu(conv(relu(x))))."""

    def __init__(self, channels: int, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.conv1 = conv(channels, channels, 3, generator, padding=1)
        self.conv2 = conv(channels, channels, 3, generator, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output (B, C, H, W) for features (B, C, H, W)."""
        return x + self.conv2(torch.relu_(self.conv1(torch.relu(x))))


class FixupBlock(nn.Module):
    """Residual block that is initially the identity: Zhang et al. 2019 (Fixup initialization), section 3.

    The last convolution has an initial weight of 0, and the initial weight of the first convolution is scaled by
    L^(-1/2) for L blocks. A scalar bias is added before and after each convolution, and the output of the last
    convolution is multiplied by a scalar.
    """

    def __init__(self, channels: int, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.biases = nn.Parameter(torch.zeros(4))
        self.scale = nn.Parameter(torch.ones(()))
        self.conv1 = conv(channels, channels, 3, generator, padding=1, bias=False)
        self.conv2 = conv(channels, channels, 3, generator, padding=1, bias=False)
        with torch.no_grad():
            self.conv1.weight.mul_(1 / math.sqrt(_NUM_BLOCKS))
            self.conv2.weight.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """Return the output (B, C, H, W) for features (B, C, H, W)."""
        before1, after1, before2, after2 = self.biases.unbind()
        hidden = torch.relu(self.conv1(torch.relu(x) + before1) + after1)
        return x + self.conv2(hidden + before2) * self.scale + after2


class ImpalaCNN(nn.Module):
    """Three stages, each with a convolution, pooling and two residual blocks, followed by a linear layer.

    See Espeholt et al. 2018 (IMPALA), figure 3, right. With `norm="layer"`, the outputs of the linear layer are
    normalized.
    """

    MIN_SIZE = 8
    """Minimum height and width in pixels."""
    block: type[nn.Module] = ResidualBlock

    def __init__(
        self, space: gym.Space[object], out_features: int = 256, generator: torch.Generator | None = None,
        norm: str | None = None,
    ) -> None:
        super().__init__()
        channels, height, width = image_shape(space, self.MIN_SIZE)
        self._largest = largest_byte(space)
        self.stages = nn.ModuleList()
        for outputs in CHANNELS:
            blocks = (self.block(outputs, generator), self.block(outputs, generator))
            self.stages.append(nn.ModuleList([conv(channels, outputs, 3, generator, padding=1), *blocks]))
            channels, height, width = outputs, (height + 1) // 2, (width + 1) // 2
        self.head = linear(channels * height * width, out_features, generator=generator)
        self.norms = module_list([] if norm is None else [nn.LayerNorm(out_features)])
        self.out_features = out_features

    def forward(self, x: Tensor) -> Tensor:
        """Return features (B, out_features) of images (B, C, H, W); see `image_input` for unsigned bytes."""
        x, scale = image_input(x, self._largest)
        stage: Untyped  # torch declares the members of a ModuleList as Module
        for stage in self.stages:
            convolution, block1, block2 = stage
            x = F.conv2d(x, convolution.weight * scale, convolution.bias, padding=1)
            x = block2(block1(F.max_pool2d(x, 3, stride=2, padding=1)))
            scale = 1.0
        normalize: Callable[[Tensor], Tensor] = self.norms[0] if self.norms else unchanged
        return torch.relu_(normalize(F.linear(torch.relu_(x.flatten(1)), self.head.weight, self.head.bias)))


class FixupCNN(ImpalaCNN):
    """`ImpalaCNN` with Fixup blocks, which need no normalization at any depth."""

    block = FixupBlock
