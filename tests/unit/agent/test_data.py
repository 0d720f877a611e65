import pytest
import torch

from pytorchrl.agent.data import Batch, ReplayBatch, SequenceBatch, weights_of_gradients

EMPTY = torch.empty(0)


def batches():
    rows = {"obs": {}, "action": EMPTY, "ret": EMPTY}
    drawn = {**rows, "discount": EMPTY, "weight": EMPTY, "ids": EMPTY}
    yield Batch(
        **rows, done=EMPTY, rhs={}, mask=None, valid=None, logp=EMPTY, value=EMPTY, advantage=EMPTY, num_samples=7)
    yield ReplayBatch(**drawn, next_obs={}, num_samples=7)
    yield SequenceBatch(**drawn, done=EMPTY, rhs={}, next_row=EMPTY, valid=EMPTY, burn_in=0, num_samples=7)


@pytest.mark.parametrize("batch", list(batches()), ids=lambda batch: type(batch).__name__)
def test_single_policy_batch_has_samples_like_a_multi_policy_batch(batch):
    assert batch.samples == {"": 7}
    assert not hasattr(batch, "__dict__")  # the shared base class defines empty slots


def test_gradients_are_weighted_by_the_samples_of_their_policy():
    assert weights_of_gradients({"": 7}, 3) == [7, 7, 7]
    assert weights_of_gradients({"hunter": 4, "prey": 0}, 2) == [4, 0]
    assert weights_of_gradients({"shared": 4}, 1) == [4]
