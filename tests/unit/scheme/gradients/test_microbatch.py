"""Tests of adding up the gradients of microbatches: weights, reductions, copies and errors."""

from __future__ import annotations

import math

import pytest
import torch

from pytorchrl.agent.data import Batch, ReplayBatch
from pytorchrl.errors import ArgumentError, CallOrderError
from pytorchrl.scheme.counters import WorkerCounters
from pytorchrl.scheme.gradients.microbatch import GradAccumulator, differentiate

CPU = torch.device("cpu")


def vectors(*numbers):
    return [torch.tensor([float(number)]) for number in numbers]


def test_a_mean_is_weighted_by_samples():
    total = GradAccumulator(4, "mean")
    total.add(vectors(1), 3, {"loss": 1.0})
    total.add(vectors(5), 1, {"loss": 9.0})
    assert total.result() == vectors(2.0)  # weighted by 3 and 1 samples; the plain mean is 3
    assert total.info() == {"loss": 3.0}
    assert (total.num_samples, total.num_parts) == (4, 2)


def test_a_sum_is_not_weighted():
    total = GradAccumulator(4, "sum")
    total.add(vectors(1), 3)
    total.add(vectors(5), 1)
    assert total.result() == vectors(6.0)


def test_groups_are_added_separately():
    total = GradAccumulator()
    total.add([torch.tensor([1.0, 2.0]), torch.tensor([10.0])], 1)
    total.add([torch.tensor([3.0, 4.0]), torch.tensor([30.0])], 1)
    assert [vector.tolist() for vector in total.result()] == [[2.0, 3.0], [20.0]]


def test_added_gradients_are_copied():
    """Check that gradients are copied: an algorithm may return a view that its next backward pass overwrites."""
    view, total = torch.tensor([1.0]), GradAccumulator()
    total.add([view], 1)
    view.fill_(7.0)
    assert total.result() == vectors(1.0)
    total.add([view], 1)
    assert view.item() == 7.0


def test_a_single_gradient_is_returned_bit_for_bit():
    vector = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    total = GradAccumulator()
    total.add([vector], 7)
    assert torch.equal(total.result()[0], vector)


def test_half_precision_is_added_in_float32():
    total = GradAccumulator()
    for _ in range(1000):
        total.add([torch.tensor([1.0 + 2**-7], dtype=torch.bfloat16)], 1)
    assert total.result()[0].dtype == torch.float32
    assert total.result()[0].item() == pytest.approx(1.0 + 2**-7, rel=1e-6)


def test_large_gradients_do_not_overflow():
    total = GradAccumulator()
    for _ in range(3):
        total.add([torch.tensor([1e38])], 1000)
    assert total.result()[0].item() == pytest.approx(1e38)


def test_a_gradient_without_samples_is_ignored():
    total = GradAccumulator()
    total.add(vectors(math.nan), 0, {"loss": math.nan})
    with pytest.raises(CallOrderError, match="no slice with a valid sample"):
        total.result()
    total.add(vectors(2), 5, {"loss": 1.0})
    total.add(vectors(math.nan), 0, {"loss": math.nan})
    assert total.result() == vectors(2.0)
    assert total.info() == {"loss": 1.0}
    assert total.num_parts == 3


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_non_finite_gradient_makes_the_sum_non_finite(number):
    total = GradAccumulator()
    for value in (1.0, number, 2.0, 3.0):
        total.add(vectors(value), 1)
    assert not torch.isfinite(total.result()[0]).any()


def test_gradients_are_clipped_after_adding():
    """Check that the mean gradient is clipped, not the gradient of each slice.

    Slices of 3 and 1 steps have the gradients 1 and 5, so the mean gradient is 2. It is clipped to the maximum norm,
    1.5. If each slice were clipped, the update would be (3 * 1 + 1 * 1.5) / 4.
    """
    from pytorchrl import A2C, OnPolicyActor, VecEnv
    from pytorchrl.envs.testing import CountingEnv

    envs = VecEnv.create_factory(CountingEnv)
    actor = OnPolicyActor.create_factory(envs.observation_space, envs.action_space)(device="cpu", seed=0)
    algorithm = A2C.create_factory(optimizer="sgd", lr=1.0, max_grad_norm=1.5)(actor=actor, seed=0)
    before = algorithm.groups["all"].data.clone()
    direction = torch.zeros_like(before)
    direction[3] = 1.0
    total = GradAccumulator(3, algorithm.loss_reduction)
    total.add([direction], 3)
    total.add([5 * direction], 1)
    assert algorithm.apply_gradients(total.result())["grad_norm"] == pytest.approx(2.0)
    torch.testing.assert_close(before - algorithm.groups["all"].data, 1.5 * direction, rtol=1e-5, atol=1e-6)


def rows(count):
    column = torch.arange(count)
    return Batch(obs={"obs": column.float()[:, None]}, done=column > 0, rhs={}, mask=None, action=column, valid=None,
                 logp=column.float(), value=column.float(), ret=column.float(), advantage=column.float(),
                 num_samples=count, last=True)


@pytest.mark.parametrize(("count", "size", "expected"), [
    (1200, 1000, [600, 600]), (4000, 1000, [1000] * 4), (2500, 1000, [833, 833, 834]), (1000, 1000, [1000]),
    (1400, 1000, [700, 700]), (10, None, [10]), (3, 1, [1, 1, 1]), (3, 7, [3])])
def test_sizes_of_slices(count, size, expected):
    slices = list(GradAccumulator(size).slices(rows(count), CPU))
    assert sorted(part.num_samples for part in slices) == expected
    assert torch.cat([part.action for part in slices]).tolist() == list(range(count))
    assert all(len(part.obs["obs"]) == part.num_samples for part in slices)


def test_batches_from_replay_can_be_sliced():
    column = torch.arange(5)
    batch = ReplayBatch(obs={"obs": column}, action=column, ret=column, discount=column, next_obs={"obs": column},
                        weight=column, ids=column, num_samples=5)
    slices = list(GradAccumulator(2).slices(batch, CPU))
    assert [part.num_samples for part in slices] == [1, 2, 2]
    assert torch.cat([part.ids for part in slices]).tolist() == [0, 1, 2, 3, 4]
    assert all(torch.equal(part.next_obs["obs"], part.ids) and part.mask is None for part in slices)


def test_an_unknown_reduction_is_refused():
    with pytest.raises(ArgumentError, match=r"reduction must be one of \['mean', 'sum'\], got 'max'"):
        GradAccumulator(3, "max")


@pytest.mark.parametrize("microbatch_size", [None, 2])
def test_replay_batches_are_moved_to_the_device_of_the_algorithm(microbatch_size):
    """Check the device of all tensors that the algorithm receives; the device "meta" stands in for a GPU."""
    seen = []

    class Algorithm:
        device, loss_reduction = torch.device("meta"), "sum"

        def prepare_batch(self, batch):
            return batch

        def compute_gradients(self, batch):
            seen.extend({leaf.device.type for leaf in (batch.obs["obs"], batch.action, batch.weight,
                                                       batch.next_obs["obs"])})
            return vectors(1), {"loss": 1.0}
    rows = torch.zeros(4)
    batch = ReplayBatch(obs={"obs": rows}, action=rows, ret=rows, discount=rows, next_obs={"obs": rows}, weight=rows,
                        ids=torch.arange(4), mask=None, next_mask=None, num_samples=4)
    differentiate(Algorithm(), batch, microbatch_size, WorkerCounters())
    assert set(seen) == {"meta"}
    assert batch.weight.device.type == "cpu"  # the caller's batch is not moved
