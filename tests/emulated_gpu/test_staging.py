"""Check batches that are copied ahead, and recorded functions, in the order that is worst for them."""

from __future__ import annotations

import pytest
import torch

from pytorchrl.agent.cuda_graphs import recorded
from pytorchrl.scheme.gradients.staging import staging_for

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda:0")


def batch(number):
    return {"obs": torch.full((1000,), float(number)), "done": torch.full((3,), number % 2 == 0)}


def test_a_buffer_is_written_again_only_after_its_copy(fault_of_order):
    """Check more batches than there are buffers, for none of which anything waits meanwhile."""
    staging = staging_for(GPU, lambda: 0.0)
    started = [staging.start(batch(number)) for number in range(5)]
    for number, staged in enumerate(started):
        found = staged.get()
        for name, leaf in batch(number).items():
            assert torch.equal(found[name].cpu(), leaf)
    assert fault_of_order() == ""


def test_a_batch_may_be_dropped_while_it_is_used(fault_of_order):
    """Check that the memory of a batch is not given to the next one while the learner's stream may read it."""
    staging = staging_for(GPU, lambda: 0.0)
    sums = [staging.on_device(given)["obs"].sum() for given in staging.ahead(batch(number) for number in range(4))]
    assert torch.stack(sums).tolist() == [0.0, 1000.0, 2000.0, 3000.0]
    assert fault_of_order() == ""


def test_results_of_a_recorded_function_do_not_change_later():
    double = recorded(lambda given: given * 2, GPU)
    found = [double(torch.full((3,), float(number), device=GPU)) for number in range(8)]
    assert [result.tolist() for result in found] == [[2.0 * number] * 3 for number in range(8)]
