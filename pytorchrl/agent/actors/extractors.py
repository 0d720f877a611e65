"""Feature extractors, which map an observation leaf (B, ...) of any dtype to features (B, out_features) float32.

Every extractor is a module that is built from a space and has an attribute `out_features`. The initial weights of
layers are orthogonal with gain sqrt(2); initial biases are 0. Weights are drawn from the given generator, not from
torch's global one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TypeGuard, TypeVar, cast

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor, nn

from pytorchrl.agent.env.images import MIN_IMAGE_SIZE, has_image_values
from pytorchrl.errors import SpaceError

HIDDEN_GAIN = math.sqrt(2.0)
"""Gain of orthogonal initialization for hidden layers."""
_FEW_OUTPUTS = 8
"""A compiled graph computes a layer with at most this number of outputs as sums, instead of a matrix product."""

# tanh and ReLU work in place, which saves one allocation per layer. Their inputs may be overwritten, because their
# gradients can be computed from their outputs.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh_, "relu": torch.relu_, "elu": F.elu, "gelu": F.gelu, "silu": F.silu,
}
"""Activation functions by name."""
NORMS = (None, "layer")
"""Normalizations before the activations: none, or layer normalization (Ba et al. 2016)."""
_NOT_IN_PLACE: dict[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]] = {
    torch.tanh_: torch.tanh, torch.relu_: torch.relu,
}

Layer = TypeVar("Layer", nn.Linear, nn.Conv2d)
M = TypeVar("M", bound=nn.Module)


class _Linear(nn.Linear):
    def reset_parameters(self) -> None:
        """Do nothing, because `orthogonal` initializes the layer from a given generator."""

    def forward(self, x: Tensor) -> Tensor:
        """Return `F.linear` of the inputs (..., in_features), in the form that is fastest in compiled graphs."""
        layer = _compiled_linear if torch.compiler.is_compiling() and x.is_cpu else F.linear
        return layer(x, self.weight, self.bias)


class _Conv2d(nn.Conv2d):
    def reset_parameters(self) -> None:
        """Do nothing, because `orthogonal` initializes the layer from a given generator."""


def module_list(modules: Iterable[M]) -> Sequence[M]:
    """Return a `ModuleList`, with the type of a sequence: torch does not declare the class of its modules."""
    return cast("Sequence[M]", nn.ModuleList(modules))


def num_features(extractor: nn.Module) -> int:
    """Return the attribute `out_features` of an extractor."""
    size = extractor.out_features
    assert not isinstance(size, nn.Module)
    return int(size)


def linear(inputs: int, outputs: int, gain: float = HIDDEN_GAIN, generator: torch.Generator | None = None) -> nn.Linear:
    """Return a linear layer with an orthogonal weight and a bias of 0."""
    return orthogonal(_Linear(inputs, outputs), gain, generator)


def is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether a call of a module is exactly `F.linear` with two parameters, the weight and the bias.

    This is false for layers with hooks, and for layers that recompute a weight or bias, such as those with weight
    normalization.
    """
    if not isinstance(module, nn.Linear) or type(module).forward not in (nn.Linear.forward, _Linear.forward):
        return False
    hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    return not any(hooks) and {name for name, _ in module.named_parameters(recurse=False)} >= {"weight", "bias"}


def conv(
    inputs: int, outputs: int, kernel_size: int, generator: torch.Generator | None = None, *, stride: int = 1,
    padding: int = 0, bias: bool = True,
) -> nn.Conv2d:
    """Return a convolution with an orthogonal weight and, if `bias` is true, a bias of 0."""
    layer = _Conv2d(inputs, outputs, kernel_size, stride=stride, padding=padding, bias=bias)
    return orthogonal(layer, HIDDEN_GAIN, generator)


def orthogonal(layer: Layer, gain: float, generator: torch.Generator | None) -> Layer:
    """Initialize the weight of a layer orthogonally, set its bias, if any, to 0, and return the layer."""
    nn.init.orthogonal_(layer.weight, gain, generator=generator)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


def is_image(space: gym.Space[object]) -> bool:
    """Return whether a leaf is an image, for which `feature_extractor="auto"` selects a convolutional network.

    An image is a Box (C, H, W) with H and W of at least 16 pixels. Its values are unsigned bytes, or floats whose
    bounds are 0 and 1 everywhere.
    """
    return (isinstance(space, gym.spaces.Box) and len(space.shape) == 3 and min(space.shape[1:]) >= MIN_IMAGE_SIZE
            and has_image_values(space))


def image_shape(space: gym.Space[object], min_size: int, leaf: str = "obs") -> tuple[int, int, int]:
    """Return the shape (C, H, W) of an image leaf.

    Raises:
        SpaceError: The space is not a Box with three axes, or its images are too small; the message contains `leaf`.
    """
    if not isinstance(space, gym.spaces.Box) or len(space.shape) != 3:
        raise SpaceError(f"leaf {leaf!r}: a convolutional extractor needs a Box of shape (C, H, W), got {space}; use "
                         "'mlp'")
    channels, height, width = space.shape
    if min(height, width) < min_size:
        raise SpaceError(
            f"leaf {leaf!r}: this extractor needs images of at least {min_size} x {min_size} pixels, got "
            f"{height} x {width}; use 'mlp'")
    return channels, height, width


def encoded_size(space: gym.Space[object]) -> int:
    """Return the length n of the vectors that the `encoder` of a space returns.

    Raises:
        SpaceError: `encoder` does not support the space.
    """
    if isinstance(space, gym.spaces.Discrete):
        return int(space.n)
    if isinstance(space, gym.spaces.MultiDiscrete):
        return int(space.nvec.sum())
    if isinstance(space, (gym.spaces.Box, gym.spaces.MultiBinary)):
        return math.prod(space.shape)
    raise SpaceError(f"an observation leaf must be Box, Discrete, MultiDiscrete or MultiBinary, got {space}")


def encoder(space: gym.Space[object]) -> Callable[[Tensor], Tensor]:
    """Return a function that converts a leaf (B, ...) to vectors (B, n) float32.

    Categories are encoded one-hot, and unsigned bytes are divided by the upper bound of their space, which is 255 for
    pixels; the values of other leaves do not change.
    """
    # Python's numbers are read off the space here, because compiled graphs cannot contain numbers of NumPy.
    if isinstance(space, gym.spaces.Discrete):
        return functools.partial(_one_hot, int(space.n))
    if isinstance(space, gym.spaces.MultiDiscrete):
        return functools.partial(_one_hot_columns, space.nvec.reshape(-1).tolist())
    return functools.partial(_flat, largest_byte(space))


def _one_hot(size: int, x: Tensor) -> Tensor:
    return (x.unsqueeze(-1) == torch.arange(size, device=x.device)).float()


def _one_hot_columns(sizes: list[int], x: Tensor) -> Tensor:
    return torch.cat([_one_hot(size, column) for size, column in zip(sizes, x.flatten(1).unbind(-1), strict=True)], -1)


def _flat(largest: float, x: Tensor) -> Tensor:
    x = x.reshape(x.shape[0], -1)
    return x.float() / largest if x.dtype == torch.uint8 else x.float()


def largest_byte(space: gym.Space[object]) -> float:
    """Return the largest value of a space of unsigned bytes, at least 1, by which its values are divided."""
    return max(1.0, float(space.high.max())) if isinstance(space, gym.spaces.Box) else 1.0


def _compiled_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return `F.linear(x, weight, bias)`, computed in the form that is fastest for the size of the layer.

    A layer with few outputs, such as a head, is computed in float32, by elementwise products and sums. The compiler
    fuses these operations with the preceding activation, and computes their gradients without matrix products. In
    bfloat16, a matrix product with one output column would take as long as a product with 16 columns.

    In float32, the bias is added after the product, so that the compiler fuses this addition with the activation. The
    addition is written as a subtraction, because the compiler would turn a sum into `addmm`, which copies the bias to
    each row before it multiplies. A layer with more outputs than inputs multiplies by a transposed, contiguous copy of
    the weight. The copy makes the gradient of the weight faster: with MKL, 5 us instead of 24 us for 256 rows, 64
    outputs and 4 inputs.
    """
    if x.dim() == 2 and weight.shape[0] <= _FEW_OUTPUTS:
        return (x.float().unsqueeze(1) * weight).sum(-1) + bias
    if x.dim() != 2:
        return F.linear(x, weight, bias)
    transposed = weight.t() if weight.shape[1] >= weight.shape[0] else weight.t().contiguous()
    if torch.is_autocast_enabled(x.device.type) or torch.compiler.is_exporting():
        return torch.addmm(bias, x, transposed)
    return torch.mm(x, transposed) - (-bias)


class MLP(nn.Module):
    """Fully connected layers. The input is a leaf (converted to vectors by `encoder`) or vectors of a given size."""

    def __init__(
        self,
        space: gym.Space[object] | int,
        hidden_sizes: tuple[int, ...] = (64, 64),
        activation: str = "tanh",
        generator: torch.Generator | None = None,
        norm: str | None = None,
    ) -> None:
        """Build the layers; if `hidden_sizes` is empty, the features are the encoded leaf.

        With `norm="layer"`, layer normalization precedes each activation.
        """
        super().__init__()
        size = space if isinstance(space, int) else encoded_size(space)
        # Vectors of floats, by far the most common kind of leaf, need no encoding.
        is_vector = isinstance(space, int) or (
            isinstance(space, gym.spaces.Box) and space.dtype == np.float32 and len(space.shape) == 1)
        self._encode = None if is_vector or isinstance(space, int) else encoder(space)
        self.encodes = not is_vector
        layers = []
        for hidden_size in hidden_sizes:
            layers.append(linear(size, hidden_size, generator=generator))
            size = hidden_size
        self.layers = module_list(layers)
        self.norms = module_list(nn.LayerNorm(size) for size in hidden_sizes if norm is not None)
        self.out_features = size
        self._activation = ACTIVATIONS[activation]
        self.look_up_weights()

    def look_up_weights(self, once: bool = False) -> None:
        """Make `forward` call the layers as modules, or look up their parameters once.

        Args:
            once: Whether to look up the parameters now and only now, which makes small networks twice as fast, unless
                layers have hooks or recompute their weights. `torch.export` would not find the parameters' names.
        """
        is_plain = once and not self.norms and all(map(is_linear, self.layers))
        self._weights: list[tuple[Tensor, Tensor]] | None = (
            [(layer.weight, layer.bias) for layer in self.layers] if is_plain else None)

    def forward(self, x: Tensor) -> Tensor:
        """Return features (B, out_features) of a leaf (B, ...)."""
        if self._encode is not None:
            x = self._encode(x)
        activation, weights = self._activation, self._weights
        if weights is None:
            activation = _NOT_IN_PLACE.get(activation, activation)  # a hook may keep the outputs of a layer
            norms: Sequence[Callable[[Tensor], Tensor]] = self.norms or [unchanged] * len(self.layers)
            for module, norm in zip(self.layers, norms, strict=True):
                x = activation(norm(module(x)))
            return x
        layer = _compiled_linear if torch.compiler.is_compiling() and x.is_cpu else F.linear
        for weight, bias in weights:
            x = activation(layer(x, weight, bias))
        return x


def unchanged(x: Tensor) -> Tensor:
    """Return `x` itself: the normalization of networks without one."""
    return x


def image_input(x: Tensor, largest: float) -> tuple[Tensor, float]:
    """Return images (B, C, H, W) as float32 in channels-last layout, and a factor for the first layer's weight.

    Dividing the weight by the `largest` byte, instead of every pixel, gives the same features and saves a pass over the
    images. On CPUs, convolutions are about twice as fast in channels-last layout as in the default layout.
    """
    scale = 1 / largest if x.dtype == torch.uint8 else 1.0
    return x.contiguous(memory_format=torch.channels_last).float(), scale


class CNN(nn.Module):
    """The network of Mnih et al. 2015 (DQN, Methods) for images (C, H, W).

    Three convolutions (32 filters of 8 x 8 with stride 4, 64 of 4 x 4 with stride 2, 64 of 3 x 3 with stride 1) precede
    one linear layer. With `norm="layer"`, layer normalization precedes each ReLU, as in Gallici et al. 2025 (PQN).
    """

    MIN_SIZE = 36
    """Minimum height and width in pixels."""

    def __init__(
        self, space: gym.Space[object], out_features: int = 512, generator: torch.Generator | None = None,
        norm: str | None = None,
    ) -> None:
        super().__init__()
        channels, height, width = image_shape(space, self.MIN_SIZE)
        self._largest = largest_byte(space)
        self.conv1 = conv(channels, 32, 8, generator, stride=4)
        self.conv2 = conv(32, 64, 4, generator, stride=2)
        self.conv3 = conv(64, 64, 3, generator)
        first = [(size - 8) // 4 + 1 for size in (height, width)]
        second = [(size - 4) // 2 + 1 for size in first]
        third = [size - 2 for size in second]
        self.head = linear(64 * math.prod(third), out_features, generator=generator)
        shapes = [32, *first], [64, *second], [64, *third], [out_features]
        self.norms = module_list(nn.LayerNorm(shape) for shape in shapes if norm is not None)
        self.out_features = out_features

    def forward(self, x: Tensor) -> Tensor:
        """Return features (B, out_features) of images (B, C, H, W); see `image_input` for unsigned bytes."""
        x, scale = image_input(x, self._largest)
        norm1, norm2, norm3, norm4 = self.norms or (unchanged,) * 4
        x = torch.relu_(norm1(F.conv2d(x, self.conv1.weight * scale, self.conv1.bias, stride=4)))
        x = torch.relu_(norm2(F.conv2d(x, self.conv2.weight, self.conv2.bias, stride=2)))
        x = torch.relu_(norm3(F.conv2d(x, self.conv3.weight, self.conv3.bias)))
        return torch.relu_(norm4(F.linear(x.flatten(1), self.head.weight, self.head.bias)))


class Embedding(nn.Module):
    """A learned vector for each value of a Discrete leaf."""

    def __init__(
        self, space: gym.Space[object] | int, out_features: int = 256, generator: torch.Generator | None = None,
    ) -> None:
        """Build the table of vectors; `space` is a Discrete space or the size of the vocabulary."""
        super().__init__()
        if not isinstance(space, (int, gym.spaces.Discrete)):
            raise SpaceError(f"Embedding needs a Discrete leaf or the size of a vocabulary, got {space}")
        self.vocabulary = space if isinstance(space, int) else int(space.n)
        self.out_features = out_features
        self.table = nn.Parameter(torch.empty(self.vocabulary, out_features).normal_(generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        """Return features (B, out_features) of integers (B,).

        Raises:
            IndexError: An integer is negative or not less than the size of the vocabulary.
        """
        # Compiled graphs skip this check; for some devices, the compiler generates its own check of the indices.
        if not torch.compiler.is_compiling() and bool(((x < 0) | (x >= self.vocabulary)).any()):
            raise IndexError(f"an index must be from 0 to {self.vocabulary - 1}, got {int(x.min())} to {int(x.max())}")
        return F.embedding(x.long(), self.table)
