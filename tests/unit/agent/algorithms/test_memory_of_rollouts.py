"""Compare values and probabilities of actors with memory with unrolls from the start of each episode, in float64."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

CELLS = {"gru": nn.GRUCell, "lstm": nn.LSTMCell}


class Reference:
    """The value network, whose memory is a cell of torch, for one environment."""

    def __init__(self, actor, net):
        trunk, self.net = copy.deepcopy(actor.value).double(), net
        self.extractor, self.head, memory = trunk.extractor, copy.deepcopy(actor.value_head).double(), trunk.memory
        self.cell = CELLS[net](memory.inputs.in_features, memory.size).double()
        self.cell.load_state_dict({
            "weight_ih": memory.inputs.weight, "bias_ih": memory.inputs.bias,
            "weight_hh": memory.recurrence.weight, "bias_hh": memory.recurrence.bias})
        self.state = None

    def value(self, obs, is_first=False, keep=True):
        """Return the value of one observation, and keep the memory after it."""
        state = None if is_first else self.state
        after = self.cell(self.extractor(obs.double()[None]), state)
        if keep:
            self.state = after
        return float(self.head(after if self.net == "gru" else after[0]))


@pytest.mark.parametrize("net", CELLS)
@torch.no_grad()
def test_values_also_at_time_limits_equal_an_unroll_of_the_episode(build, collect, made_up_steps, net):
    parts, steps = build(actor={"recurrent_net": net, "recurrent_size": 5}, size=12), made_up_steps(4, seed=1)
    for name, bias in parts.actor.named_parameters():
        if name.endswith("bias"):
            bias.normal_(generator=torch.Generator().manual_seed(len(bias)))
    references = [Reference(parts.actor, net) for _ in range(4)]
    num_finals = 0
    for _ in range(3):  # the memory goes on from rollout to rollout
        rollout = collect(parts, steps)
        num_steps, finals = rollout.num_steps, dict(zip(map(tuple, rollout.final_index.tolist()),
                                                        range(len(rollout.final_index)), strict=True))
        for t in range(num_steps + 1):
            for e, reference in enumerate(references):
                value = reference.value(rollout.obs["obs"][t, e], bool(rollout.done[t, e]), keep=t < num_steps)
                assert float(rollout.other["value"][t, e]) == pytest.approx(value, abs=2e-6)
                if (k := finals.get((t, e))) is not None:
                    value = reference.value(rollout.final_obs["obs"][k], keep=False)
                    assert float(rollout.other["final_value"][k]) == pytest.approx(value, abs=2e-6)
                    num_finals += 1
    assert num_finals > 10


@pytest.mark.parametrize("length", [None, 5])
@pytest.mark.parametrize("net", CELLS)
def test_the_probability_ratio_is_1_before_the_first_update(build, collect, made_up_steps, net, length):
    parts = build(actor={"recurrent_net": net, "recurrent_size": 5}, size=12, storage={"sequence_length": length})
    steps = made_up_steps(4, seed=2)
    collect(parts, steps)
    parts.storage.insert_data_slice([collect(parts, steps)])  # whose first states are not zero
    parts.storage.before_gradients()
    num_samples = 0
    for batch in parts.storage.generate_batches(2):
        logp, _, value = parts.actor.evaluate(batch.obs, batch.rhs, batch.done, batch.action)
        for found, stored in ((logp, batch.logp), (value, batch.value)):
            torch.testing.assert_close(found[batch.valid], stored[batch.valid], atol=2e-6, rtol=0)
        num_samples += batch.num_samples
    assert num_samples == 48
