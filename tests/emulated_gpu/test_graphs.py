"""Check which functions are recorded into CUDA graphs, that they compute the same, and what a failure leaves."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete

from pytorchrl import PPO, OnPolicyActor
from pytorchrl.agent import cuda_graphs
from pytorchrl.agent.cuda_graphs import recorded

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda:0")


def of_numbers(*numbers):
    return torch.tensor(numbers, device=GPU)


def first_row():
    return torch.zeros(1, dtype=torch.long, device=GPU)


def written(x, value):
    x = x.clone()
    x[x > 0] = value
    return x


WAITING = {
    "item": lambda x: x * x.sum().item(), "bool": lambda x: x if x.any() else -x,
    "list": lambda x: x + x.tolist()[0][0], "mask": lambda x: x[x > 0], "mask of bytes": lambda x: x[(x > 0).byte()],
    "mask and row": lambda x: x[x[:, 0] > 0, first_row()],
    "writing a value of the GPU": lambda x: written(x, x.sum()),
    "writing with mask and row": lambda x: x.clone().index_put_((x[:, 0] > 0, first_row()), torch.tensor(1.0)),
    "filling with a value of the GPU": lambda x: x.masked_fill(x > 0, x.sum()),
    "filling a row with a value of the GPU": lambda x: x.index_fill(0, first_row(), x.sum()),
    "masked_select": lambda x: x.masked_select(x > 0), "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 0)[0], "argwhere": torch.argwhere,
    "unique": lambda x: x.unique(), "unique_consecutive": lambda x: x.unique_consecutive(),
    "unique rows": lambda x: x.unique(dim=0), "bincount": lambda x: x.flatten().long().abs().bincount(),
    "histc": lambda x: x.histc(4), "repeat_interleave": lambda x: x.repeat_interleave(x[:, 0].long().abs(), 0),
    "one_hot": lambda x: torch.nn.functional.one_hot(x.long().abs()), "equal": lambda x: x * torch.equal(x, x),
    "allclose": lambda x: x * torch.allclose(x, x), "inv": lambda x: torch.linalg.inv(x.T @ x),
    "to the CPU": lambda x: x.sum(0).cpu(), "number to the CPU": lambda x: x.sum().cpu(),
    "from the CPU": lambda x: x + torch.ones(2).to(GPU), "number from the CPU": lambda x: x + torch.tensor(2.0).to(GPU),
}
NOT_WAITING = {
    "rows": lambda x: x[first_row()], "writing a number": lambda x: written(x, 2.0),
    "writing a row": lambda x: x.clone().index_put_((first_row(),), x[0]),
    "filling with a number": lambda x: x.masked_fill(x > 0, 2.0),
    "filling with a number of the CPU": lambda x: x.masked_fill(x > 0, torch.tensor(2.0)),
    "numbers of the CPU": lambda x: x * torch.tensor(2.0), "where": lambda x: torch.where(x > 0, x, 0.0),
    "histc": lambda x: x.histc(4, -1, 1), "sort": lambda x: x.sort(0)[0], "topk": lambda x: x.topk(1)[0],
    "repeat_interleave": lambda x: x.repeat_interleave(torch.full((3,), 2, device=GPU), 0, output_size=6),
    "one_hot": lambda x: torch.nn.functional.one_hot(x.long().clamp(0, 1), 2),
}


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(("function", "is_recorded"), [
    *(pytest.param(function, False, id=f"waits: {name}") for name, function in WAITING.items()),
    *(pytest.param(function, True, id=f"does not wait: {name}") for name, function in NOT_WAITING.items())])
def test_only_functions_that_do_not_wait_are_recorded(recordings, caplog, mode, function, is_recorded):
    wrapped, stream = recorded(function, GPU), torch.cuda.current_stream()
    for number in range(6):
        x = of_numbers([1.0, -2.0], [0.5, 0.0], [-1.0, 3.0]) + 0.25 * number
        with mode():
            torch.testing.assert_close(wrapped(x), function(x), rtol=0, atol=0)
    assert len(recordings) == is_recorded
    assert ("could not be recorded" in caplog.text) is not is_recorded
    assert torch.cuda.current_stream() == stream


class NoisyActor(OnPolicyActor):
    """An actor whose actions cannot be recorded if `waits` is set."""

    waits = False

    def policy_features(self, obs, rhs, done):
        features, states = super().policy_features(obs, rhs, done)
        if self.waits:
            features = features[torch.ones(len(features), dtype=torch.bool, device=features.device)]
        return features, states


def actions_of(compile_, monkeypatch, *, waits=False, is_watched=True):
    """Return the actions of some steps, first without and then with other shapes in between."""
    actor = NoisyActor.create_factory(Box(-1, 1, (3,), np.float32), Discrete(5))(device=GPU, seed=0)
    algorithm = PPO.create_factory(compile=compile_)(device=GPU, actor=actor, seed=0)
    monkeypatch.setattr(NoisyActor, "waits", waits)
    if compile_ and not is_watched:
        algorithm._recorded_act._is_compiled = True
    found, rng = [], np.random.default_rng(0)
    for num_envs in (*[4] * 8, *[2, 4] * 6):
        obs = {"obs": rng.normal(size=(num_envs, 3)).astype(np.float32)}
        found.append(algorithm.acting_step(obs, {}, np.zeros(num_envs, bool)).action)
    return np.concatenate(found)


@pytest.mark.parametrize(
    ("waits", "is_watched", "num_recordings"), [(False, True, 2), (True, True, 0), (True, False, 1)],
    ids=["recorded", "seen before the recording", "failed recording"])
def test_recorded_actions_draw_the_same_numbers(monkeypatch, recordings, waits, is_watched, num_recordings):
    """Check that neither the watched call nor a recording, nor one that fails, draws other numbers."""
    expected = actions_of(False, monkeypatch)
    assert np.array_equal(actions_of(True, monkeypatch, waits=waits, is_watched=is_watched), expected)
    assert len(recordings) == num_recordings


def test_a_failed_recording_leaves_what_other_functions_need(recordings, caplog):
    """Check that, after a failed recording, another function of the thread can be recorded and draws new numbers."""
    generator, stream = torch.Generator(GPU).manual_seed(1), torch.cuda.current_stream()
    expected = [torch.rand(3, device=GPU, generator=generator) for _ in range(7)]
    generator.manual_seed(1)
    waiting, other = (recorded(function, GPU, generator) for function in (
        lambda x: x[x > 0], lambda x: x + torch.rand(3, device=GPU, generator=generator)))
    waiting._is_compiled = True
    x = torch.zeros(3, device=GPU)
    for _ in range(5):
        assert len(waiting(x)) == 0
    assert "could not be recorded" in caplog.text
    assert torch.equal(torch.stack([other(x) for _ in range(7)]), torch.stack(expected))
    assert len(recordings) == 2
    assert torch.cuda.current_stream() == stream


def test_a_function_that_fails_in_a_later_recording_uses_no_graphs(recordings, caplog):
    """Check that graphs recorded before are dropped, so that no two of their draws are equal."""
    generator = torch.Generator(GPU).manual_seed(1)

    def draw(x):
        drawn = torch.rand(3, device=GPU, generator=generator)
        return drawn[drawn >= 0] if len(x) == 2 else drawn
    function = recorded(draw, GPU, generator)
    function._is_compiled = True
    found = [function(torch.zeros(rows, device=GPU)) for rows in (*[1] * 5, *[2] * 5, *[1] * 3)]
    assert len(torch.stack(found).unique()) == 3 * len(found)
    assert len(recordings) == 2


def test_each_thread_records_on_one_stream(monkeypatch):
    made, stream = [], torch.cuda.Stream

    def counted(device):
        made.append(stream(device))
        return made[-1]
    monkeypatch.setattr(torch.cuda, "Stream", counted)
    monkeypatch.setattr(cuda_graphs, "_STREAMS", cuda_graphs._StreamsOfThread())
    for factor in (1.0, 2.0):
        function = recorded(lambda x, factor=factor: x * factor, GPU)
        for rows in (1, 2):
            for _ in range(5):
                assert function(torch.ones(rows, device=GPU)).tolist() == [factor] * rows
    assert len(made) == 1
