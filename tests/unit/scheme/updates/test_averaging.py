"""Check that means over gradients are weighted by numbers of samples."""

from __future__ import annotations

import pytest
import torch

from pytorchrl.scheme.ledger import LedgerSnapshot
from pytorchrl.scheme.transport.messages import Gradients
from pytorchrl.scheme.updates.averaging import WeightedMeans, mean_gradients, mean_info


def gradients(vectors, num_samples, info=None, samples=None):
    return Gradients(
        vectors=[None if vector is None else torch.tensor(vector) for vector in vectors], num_samples=num_samples,
        num_new_samples=num_samples, weights_version=0, worker=1, sequence=1, info=info or {}, ledger=LedgerSnapshot(),
        samples=samples or {})


def values(vectors):
    return [None if vector is None else vector.tolist() for vector in vectors]


def test_a_mean_is_weighted_by_samples():
    assert values(mean_gradients([gradients([[4.0]], 1), gradients([[8.0]], 3)])) == [[7.0]]


def test_a_factor_scales_a_gradient_but_not_its_weight():
    assert values(mean_gradients([gradients([[4.0]], 1), gradients([[8.0]], 3)], [0.0, 0.5])) == [[3.0]]


def test_a_vector_that_some_workers_lack_is_averaged_over_the_others():
    one = gradients([[4.0], None], 2, samples={"a": 2, "b": 0})
    two = gradients([[8.0], None], 3, samples={"a": 2, "b": 1})
    assert values(mean_gradients([one, two])) == [[6.0], None]


def test_gradients_are_not_changed():
    parts = [gradients([[4.0]], 1), gradients([[8.0]], 1)]
    mean_gradients(parts)
    assert [values(part.vectors) for part in parts] == [[[4.0]], [[8.0]]]


def test_statistics_of_a_policy_are_averaged_over_workers_with_data():
    one = gradients([[1.0]], 4, {"loss/a": 1.0, "loss/b": 3.0}, {"a": 1, "b": 3})
    two = gradients([[1.0]], 4, {"loss/a": 4.0}, {"a": 2, "b": 0})
    assert mean_info([one, two]) == {"loss/a": 3.0, "loss/b": 3.0}


def test_weighted_means_are_reset_when_they_are_returned():
    means = WeightedMeans()
    means.add({"loss": 1.0, "unweighted": 5.0}, 0)
    means.add({"loss": 1.0}, 1)
    means.add({"loss": 4.0}, 2)
    assert means.take() == {"loss": pytest.approx(3.0), "unweighted": 0.0}
    assert means.take() == {}


def test_a_vector_without_samples_is_ignored_even_if_not_finite():
    one = gradients([[4.0], [float("nan")]], 2, samples={"a": 2, "b": 0})
    two = gradients([[8.0], [3.0]], 4, samples={"a": 2, "b": 2})
    assert values(mean_gradients([one, two])) == [[6.0], [3.0]]
