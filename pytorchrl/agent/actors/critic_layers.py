"""Fully connected layers of critics, with dropout, layer normalization or batch renormalization.

B = rows of a batch, F = features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from typing_extensions import override

from pytorchrl.agent.actors.extractors import MLP
from pytorchrl.agent.options import Options, option

NORMS = (None, "layer", "batch")
"""Values of the option `critic_norm`."""
# Constants of Bhatt et al. 2024 (CrossQ); the largest corrections are those of Ioffe 2017.
_MOMENTUM, _EPSILON, _LARGEST_SCALE, _LARGEST_SHIFT = 0.01, 1e-3, 3.0, 5.0
# Odd numbers: the golden ratio, which spreads counters, and the factors of MurmurHash3, as signed numbers of 32 bits.
_HASH = (0x9E3779B9 - 2**32, 0x85EBCA6B - 2**32, 0xC2B2AE35 - 2**32)
WARM_UP = 100_000
"""Number of training passes in which batch renormalization is batch normalization."""


@dataclass(frozen=True, kw_only=True)
class CriticOptions(Options):
    """Options of the fully connected layers of critics."""

    critic_hidden_sizes: tuple[int, ...] | None = option(
        None, help="Units of each fully connected layer of the critics; None means those of hidden_sizes.", low=1)
    critic_norm: str | None = option(
        None, help="Normalization in the critics: layer (before each activation), or batch (batch renormalization of "
                   "the inputs and after each activation).", choices=NORMS)
    critic_dropout: float = option(
        0.0, help="Probability with which dropout sets an output of a critic's hidden layer to 0, before layer "
                  "normalization; also in the target critics.", low=0.0, high=0.9)

    @property
    def is_plain(self) -> bool:
        """Whether the layers have neither normalization nor dropout."""
        return self.critic_norm is None and not self.critic_dropout


class BatchRenorm(_NormBase):
    """Batch renormalization of features (B, F): Ioffe 2017, algorithm 1, with the constants of CrossQ.

    In training mode, the outputs are weight * ((x - m) / s * r + d) + bias, where m and s are the mean and the standard
    deviation of the batch. The corrections r = clip(s / S, 1/3, 3) and d = clip((m - M) / S, -5, 5), through which no
    gradient flows, use the running mean M and the root S of the running variance. In the first `WARM_UP` passes, r is 1
    and d is 0. In evaluation mode, the outputs are weight * (x - M) / S + bias. As in CrossQ, variances are averaged
    instead of standard deviations. All variances are biased, and increased by 1e-3.
    """

    running_mean: Tensor
    """(F,), M."""
    running_var: Tensor
    """(F,), the square of S without the 1e-3."""
    num_batches_tracked: Tensor
    """(), int64, the number of training passes."""

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features, eps=_EPSILON, momentum=_MOMENTUM)

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized features (B, F); in training mode, also update the running moments."""
        x = x.to(self.weight.dtype)  # with mixed precision, linear layers return bfloat16
        mean, variance, count = self.running_mean, self.running_var, self.num_batches_tracked
        if not self.training:
            return F.batch_norm(x, mean, variance, self.weight, self.bias, False, 0.0, self.eps)
        with torch.no_grad():
            own_mean = x.mean(0)
            own_variance = (x - own_mean).square().mean(0)  # on CPUs, much faster than `torch.var_mean`
            root = (variance + self.eps).sqrt()
            scale = ((own_variance + self.eps).sqrt() / root).clamp(1 / _LARGEST_SCALE, _LARGEST_SCALE)
            shift = ((own_mean - mean) / root).clamp(-_LARGEST_SHIFT, _LARGEST_SHIFT)
            scale, shift = torch.where(count < WARM_UP, 1.0, scale), torch.where(count < WARM_UP, 0.0, shift)
            mean.lerp_(own_mean, _MOMENTUM)
            variance.lerp_(own_variance, _MOMENTUM)
            count.add_(1)
        return F.batch_norm(
            x, None, None, self.weight * scale, self.weight * shift + self.bias, True, 0.0, self.eps)


class Dropout(_DropoutNd):
    """Dropout whose random numbers are hashes of a counter, which starts at a random number in each pass.

    On a CPU, compiled code draws random numbers one by one, but computes these hashes for many numbers at once, and is
    eight times as fast. The hash is that of MurmurHash3 without its last step, because only the upper bits matter.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` with dropped numbers in training mode, otherwise `x`."""
        return x * self.mask(x) if self.training else x

    def mask(self, x: Tensor) -> Tensor:
        """Draw factors with the shape and dtype of `x`: 0 with probability p, and otherwise 1 / (1 - p)."""
        start = torch.randint(-2**31, 2**31, (1,), dtype=torch.int32, device=x.device)
        bits = start + torch.arange(x.numel(), dtype=torch.int32, device=x.device) * _HASH[0]  # modulo 2^32
        bits = (bits ^ ((bits >> 16) & 0xFFFF)) * _HASH[1]
        bits = (bits ^ ((bits >> 13) & 0x7FFFF)) * _HASH[2]
        kept = bits >= round(self.p * 2**32) - 2**31
        return kept.view(x.shape).to(x.dtype) * (1 / (1 - self.p))


class CriticLayers(MLP):
    """Fully connected layers with dropout and normalization.

    Each layer is linear -> dropout -> layer normalization -> activation, as in Hiraoka et al. 2022 (DroQ), or linear ->
    dropout -> activation -> batch renormalization, after a batch renormalization of the inputs, as in Bhatt et al. 2024
    (CrossQ).
    """

    def __init__(self, inputs: int, hidden_sizes: tuple[int, ...], activation: str, options: CriticOptions,
                 generator: torch.Generator) -> None:
        is_batch = options.critic_norm == "batch"
        super().__init__(inputs, hidden_sizes, activation, generator, None if is_batch else options.critic_norm)
        self.dropout = Dropout(options.critic_dropout) if options.critic_dropout else nn.Identity()
        self.batch_norms = nn.ModuleList(map(BatchRenorm, (inputs, *hidden_sizes)) if is_batch else ())

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Return features (B, out_features) of inputs (B, inputs)."""
        if self.batch_norms:
            x = self.batch_norms[0](x)
        for i, layer in enumerate(self.layers):
            x = self.dropout(layer(x))
            x = self._activation(self.norms[i](x) if self.norms else x)
            x = self.batch_norms[i + 1](x) if self.batch_norms else x
        return x
