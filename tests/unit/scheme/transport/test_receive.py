"""Check how received messages are decoded."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from pytorchrl.agent.data import RolloutData
from pytorchrl.scheme.ledger import LedgerSnapshot
from pytorchrl.scheme.transport.codecs import get_codec
from pytorchrl.scheme.transport.encoder import Traffic
from pytorchrl.scheme.transport.messages import Gradients, Rollout, Weights
from pytorchrl.scheme.transport.receive import copied, receive, receive_tensor


def ticking():
    return itertools.count().__next__


def gradients(*vectors):
    return Gradients(vectors=list(vectors), num_samples=1, num_new_samples=1, weights_version=0, worker=1, sequence=1,
                     info={},
                     ledger=LedgerSnapshot())


def test_vectors_become_new_tensors_and_decoding_is_counted():
    array = np.ones(300, np.float32)
    received, traffic = receive(gradients(get_codec("bf16").pack(array), None, array), ticking())
    assert [type(vector) for vector in received.vectors] == [torch.Tensor, type(None), torch.Tensor]
    assert traffic == Traffic(decodes=1, decode_s=1)
    received.vectors[2] += 1
    assert array.sum() == 300


def test_local_messages_are_not_changed():
    vector = torch.ones(3)
    received, traffic = receive(gradients(vector), ticking())
    assert received.vectors[0] is vector
    assert traffic == Traffic()
    weights = Weights(1, {"all": np.ones(3, np.float32)})
    assert receive(weights, ticking()) == (weights, Traffic())


def test_both_states_of_weights_are_decoded():
    packed = get_codec("bf16").pack(np.ones(300, np.float32))
    received, traffic = receive(Weights(1, {"all": packed}, learning={"target_all": packed}), ticking())
    assert received.state["all"].sum() == received.learning["target_all"].sum() == 300.0
    assert traffic.decodes == 1


def test_a_copied_rollout_shares_no_memory_unless_it_was_received():
    """Check data of the local worker, which are tensors, and arrays of another process, which are copies already."""
    own, received = (RolloutData(
        obs={}, done=make(np.zeros((3, 1), bool)), rhs={}, mask=None, action=make(np.zeros((2, 1))),
        reward=make(np.ones((2, 1), np.float32)), terminated=make(np.zeros((2, 1), bool)),
        truncated=make(np.zeros((2, 1), bool)), valid=make(np.ones((2, 1), bool)),
        final_index=make(np.zeros((0, 2), np.int64)), final_obs={}) for make in (torch.from_numpy, np.array))
    copy = copied(Rollout(own, None))
    own.reward.zero_()
    assert copy.data.reward.tolist() == [[1.0], [1.0]]
    message = Rollout(received, None)
    assert copied(message) is message


def test_read_only_memory_is_copied():
    array = np.ones(3, np.float32)
    array.flags.writeable = False
    receive_tensor(array).add_(1)
    assert array.sum() == 3
