"""Means over the gradients of several workers, weighted by the samples behind them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pytorchrl.scheme.transport.messages import Gradients


def mean_gradients(parts: Sequence[Gradients], factors: Sequence[float] | None = None) -> list[Tensor | None]:
    """Mean of each vector, weighted by the samples behind it, summed in the order given; None of a policy that nobody has.

    Each may have a factor of its own: then it is the sum of n_i s_i g_i over the sum of n_i.
    """
    decoded: list[list[Tensor | None]] = [part.vectors for part in parts]
    weights = [part.weights(len(vectors)) for part, vectors in zip(parts, decoded, strict=True)]
    factors = factors or [1.0] * len(parts)
    return [_mean([row[index] for row in decoded], [row[index] for row in weights], factors) for index in range(len(decoded[0]))]


def _mean(vectors: Sequence[Tensor | None], weights: Sequence[int], factors: Sequence[float]) -> Tensor | None:
    total = sum(weight for vector, weight in zip(vectors, weights, strict=True) if vector is not None)
    mean: Tensor | None = None
    for vector, weight, factor in zip(vectors, weights, factors, strict=True):
        if vector is not None and weight:
            share = weight * factor / total
            scaled = vector if share == 1.0 else vector * share
            mean = scaled if mean is None else mean.add_(scaled)
    return mean


def mean_info(parts: Sequence[Gradients]) -> dict[str, float]:
    """Mean of the algorithm's statistics, weighted by samples; of a policy that is not in all of them, over those it is in."""
    means = {}
    for name in dict.fromkeys(name for part in parts for name in part.info):
        having = [part for part in parts if name in part.info]
        total = sum(part.weight_of(name) for part in having)
        means[name] = sum(part.info[name] * part.weight_of(name) for part in having) / total
    return means
