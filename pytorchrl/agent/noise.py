"""Draw the random noise that losses use; a compiled loss receives noise that was drawn before the call."""

from __future__ import annotations

import torch
from torch import Tensor


class DrawnNoise:
    """Noise that is drawn before a loss is computed. The loss uses it in place of a random generator.

    Attributes:
        draws: The tensors, in the order in which the loss uses them.
        num_used: Number of tensors that the loss has used.
    """

    def __init__(self, draws: list[Tensor]) -> None:
        self.draws, self.num_used = draws, 0


class NoiseRecorder:
    """A source of noise that draws from a generator and records the shape of each draw.

    Attributes:
        generator: The generator of the noise.
        shapes: The shapes of all draws so far.
    """

    def __init__(self, generator: torch.Generator) -> None:
        self.generator, self.shapes = generator, list[torch.Size]()


NoiseSource = torch.Generator | DrawnNoise | NoiseRecorder


def standard_normal(like: Tensor, source: NoiseSource | None) -> Tensor:
    """Return standard normal noise with the shape, dtype and device of `like`.

    Args:
        like: A tensor, whose values do not matter.
        source: The source of the noise; None means torch's global generator.
    """
    if isinstance(source, DrawnNoise):
        source.num_used += 1
        return source.draws[source.num_used - 1]
    if isinstance(source, NoiseRecorder):
        source.shapes.append(like.shape)
        source = source.generator
    return torch.empty_like(like).normal_(generator=source)
