"""Means over the gradients of several workers, weighted by the number of samples of each gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from pytorchrl.scheme.transport.messages import Gradients


def mean_gradients(gradients: Sequence[Gradients], factors: Sequence[float] | None = None) -> list[Tensor | None]:
    """Return the mean gradient, weighted by numbers of samples, for each position in `Gradients.vectors`.

    Args:
        gradients: At least one gradient; all have the same number of vectors. They are summed in this order.
        factors: One factor s_i for each gradient i. The mean is the sum of n_i s_i v_i divided by the sum of n_i, where
            the vector v_i was computed from n_i samples. None: all factors are 1.

    Returns:
        One flat float32 tensor for each position; None if no gradient has a vector at this position.
    """
    vectors: list[list[Tensor | None]] = [gradient.vectors for gradient in gradients]
    weights = [gradient.weights(len(own)) for gradient, own in zip(gradients, vectors, strict=True)]
    factors = factors or [1.0] * len(gradients)
    return [_mean([own[place] for own in vectors], [own[place] for own in weights], factors)
            for place in range(len(vectors[0]))]


def _mean(vectors: Sequence[Tensor | None], weights: Sequence[int], factors: Sequence[float]) -> Tensor | None:
    total = sum(weight for vector, weight in zip(vectors, weights, strict=True) if vector is not None)
    mean: Tensor | None = None
    for vector, weight, factor in zip(vectors, weights, factors, strict=True):
        if vector is not None and weight:
            share = weight * factor / total
            scaled = vector if share == 1.0 else vector * share
            mean = scaled if mean is None else mean.add_(scaled)
    return mean


def mean_info(gradients: Sequence[Gradients]) -> dict[str, float]:
    """Return the means of the algorithm's statistics, weighted by the number of samples.

    If there are several policies, a gradient may lack the statistics of a policy. Each mean is computed only over the
    gradients that contain the statistic.
    """
    means = {}
    for name in dict.fromkeys(name for gradient in gradients for name in gradient.info):
        having = [gradient for gradient in gradients if name in gradient.info]
        total = sum(gradient.weight_of(name) for gradient in having)
        means[name] = sum(gradient.info[name] * gradient.weight_of(name) for gradient in having) / total
    return means


class WeightedMeans:
    """Weighted means of named numbers."""

    def __init__(self) -> None:
        self._totals: dict[str, float] = {}
        self._weights: dict[str, float] = {}

    def add(self, numbers: Mapping[str, float], weight: float) -> None:
        """Add numbers by name, all with the same weight."""
        totals, weights = self._totals, self._weights
        for name, value in numbers.items():
            totals[name] = totals.get(name, 0.0) + weight * value
            weights[name] = weights.get(name, 0.0) + weight

    def take(self) -> dict[str, float]:
        """Return the means of the numbers that were added since the last call."""
        means = {name: total / (self._weights[name] or 1.0) for name, total in self._totals.items()}
        self._totals, self._weights = {}, {}
        return means
