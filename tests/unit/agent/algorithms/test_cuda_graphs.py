"""Check, with a recorder that calls the function again, that recorded functions compute the same as unrecorded ones."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

from pytorchrl.agent import cuda_graphs
from pytorchrl.agent.algorithms import PPO
from pytorchrl.agent.cuda_graphs import Recorded, recorded

CPU = torch.device("cpu")


def tensors_of(result):
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]


class AgainRecorder:
    """Recorder on the CPU: a replay calls the function again and writes into the tensors of the recorded result."""

    device = CPU

    def __init__(self, device=CPU, generator=None):
        self.num_recorded = self.num_replays = 0

    def record(self, function):
        self.num_recorded += 1
        result = function()
        own = tensors_of(result)
        for leaf in own:
            leaf.fill_(9)  # recording computes nothing

        def replay():
            self.num_replays += 1
            for leaf, new in zip(own, tensors_of(function()), strict=True):
                leaf.copy_(new)
        return result, replay


def scaled(parts, factor):
    """Compute nested results from a number and from tensors in a dictionary, one of which may be None."""
    total = parts["x"] * factor
    return {"sum": total if parts["y"] is None else total + parts["y"]}, [parts["x"].sum(0)]


def arguments(seed, rows=3, **others):
    rng = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(rows, 2, generator=rng), "y": torch.randn(rows, 2, generator=rng)} | others, 2.0


def assert_same(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.fixture
def recorder():
    return AgainRecorder()


def test_a_function_is_recorded_after_three_calls_and_then_only_replayed(recorder):
    function = Recorded(scaled, recorder)
    for seed in range(8):
        assert_same(function(*arguments(seed)), scaled(*arguments(seed)))
    assert (recorder.num_recorded, recorder.num_replays) == (1, 5)


def test_results_are_copies(recorder):
    function = Recorded(scaled, recorder)
    for seed in range(4):
        found = function(*arguments(seed))
    function(*arguments(9))
    assert_same(found, scaled(*arguments(3)))


@pytest.mark.parametrize("other", [
    arguments(1, rows=4), arguments(1, y=None), (arguments(1)[0], 3.0),
    arguments(1, x=torch.randn(3, 4)[:, ::2]), arguments(1, x=torch.zeros(3, 2, dtype=torch.float64)),
], ids=["rows", "absent", "number", "strides", "dtype"])
def test_other_shapes_and_values_have_graphs_of_their_own(recorder, other):
    function = Recorded(scaled, recorder)
    for _ in range(5):
        assert_same(function(*arguments(0)), scaled(*arguments(0)))
        assert_same(function(*other), scaled(*other))
    assert recorder.num_recorded == 2


def test_recorded_inputs_have_the_strides_of_the_arguments(recorder):
    seen = []

    def strides(x):
        seen.append(x.stride())
        return x.sum()
    function = Recorded(strides, recorder)
    for _ in range(5):
        function(torch.randn(3, 4)[:, ::2])
    assert set(seen) == {(4, 2)}


def test_the_number_of_graphs_is_limited(recorder):
    function = Recorded(scaled, recorder)
    for rows in range(1, 12):
        for seed in range(5):
            assert_same(function(*arguments(seed, rows)), scaled(*arguments(seed, rows)))
    assert recorder.num_recorded == 8


def test_a_function_that_cannot_be_recorded_is_called_as_before(recorder, caplog):
    def refuse(function):
        recorder.num_recorded += 1
        raise RuntimeError("operation not permitted when stream is capturing\nmore")
    recorder.record = refuse
    function = Recorded(scaled, recorder)
    with caplog.at_level(logging.WARNING):
        for seed in range(8):
            assert_same(function(*arguments(seed)), scaled(*arguments(seed)))
    assert recorder.num_recorded == 1
    [message] = [record.getMessage() for record in caplog.records]
    assert message.endswith("could not be recorded into a CUDA graph: operation not permitted when stream is capturing")


@pytest.mark.parametrize(("function", "operation"), [
    (lambda x: x * x.sum().item(), "aten::_local_scalar_dense"), (lambda x: x[x > 0], "aten::index"),
    (lambda x: x.to("meta"), "aten::_to_copy"), (lambda x: x.masked_fill(x > 0, x.sum()), "aten::masked_fill")],
    ids=["item", "mask", "copy", "fill"])
def test_a_function_that_waits_is_never_recorded(recorder, caplog, function, operation):
    """Check that the recording is not even begun, because one that fails may leave memory and generators unusable."""
    watched, compiled = Recorded(function, recorder), Recorded(function, AgainRecorder(), is_compiled=True)
    x = torch.tensor([1.0, 2.0])
    for _ in range(6):
        result = watched(x)
        assert result.is_meta or torch.equal(result, function(x))
    assert recorder.num_recorded == 0
    [message] = [record.getMessage() for record in caplog.records]
    assert f"the operation {operation} waits" in message
    for _ in range(4):
        compiled(x)
    assert compiled._recorder.num_recorded == 1


def test_overlapping_arguments_are_not_recorded(recorder, caplog):
    function = Recorded(scaled, recorder)
    wide = arguments(0, x=torch.ones(1, 2).expand(3, 2))
    for _ in range(5):
        assert_same(function(*wide), scaled(*wide))
    assert "CUDA graph" in caplog.text


def test_nothing_is_recorded_on_other_devices():
    assert recorded(scaled, CPU) is scaled
    assert recorded(scaled, torch.device("meta")) is scaled


def test_acting_can_be_recorded(build, recorder):
    """Check that recorded acting with the current weights chooses the same actions, and that masks are not recorded."""
    plain, other = build(PPO), build(PPO)
    other.algorithm._recorded_act = Recorded(other.algorithm._act, recorder)
    rng, done = np.random.default_rng(0), np.zeros(4, bool)
    for parts in (plain, other):
        parts.algorithm._small_policy = None
    for deterministic in (True, True, True, True, True, False):
        obs = {"obs": rng.normal(size=(4, 3)).astype(np.float32)}
        expected, found = (parts.algorithm.acting_step(obs, {}, done, deterministic) for parts in (plain, other))
        assert np.array_equal(found.action, expected.action)
        assert np.array_equal(found.other["dist_params"], expected.other["dist_params"])
        for parts in (plain, other):
            parts.params.mul_(1.1)
    assert (recorder.num_recorded, recorder.num_replays) == (1, 2)
    for _ in range(5):
        other.algorithm.acting_step(obs, {}, done, True, np.ones((4, 2), bool))
    assert (recorder.num_recorded, recorder.num_replays) == (1, 2)


def test_only_compiled_acting_on_a_gpu_is_recorded(build):
    assert build(PPO).algorithm._recorded_act is None


@pytest.mark.compiled
def test_compiled_gradients_can_be_recorded(build, collect, made_up_steps, traced_only, monkeypatch):
    recorders = []

    def recorded_on_cpu(function, device, is_compiled):
        recorders.append(AgainRecorder())
        return Recorded(function, recorders[-1], is_compiled=is_compiled)
    monkeypatch.setattr("pytorchrl.agent.algorithms.compiled.recorded", recorded_on_cpu)
    plain, compiled = (build(PPO, compile=flag) for flag in (False, True))
    plain.storage.insert_data_slice([collect(plain, made_up_steps(4))])
    plain.storage.before_gradients()
    for batch in plain.storage.generate_batches(4, num_epochs=2):
        expected, wanted = plain.algorithm.compute_gradients(batch)
        gradient, info = compiled.algorithm.compute_gradients(batch)
        torch.testing.assert_close(gradient[0], expected[0], rtol=1e-4, atol=1e-6)
        assert info == pytest.approx(wanted, rel=1e-4, abs=1e-6)
        for parts in (plain, compiled):
            parts.algorithm.apply_gradients([expected[0]])
    assert [recorder.num_recorded for recorder in recorders] == [1]
    assert recorders[0].num_replays == 5


class Graph:
    """A graph that notes which methods are called."""

    def __init__(self):
        self.calls = Graph.made

    def register_generator_state(self, generator):
        self.calls.append(("generator", generator))

    def replay(self):
        self.calls.append("replay")


class Generator:
    """A generator that notes to which state it is set."""

    def clone_state(self):
        return "state"

    def graphsafe_set_state(self, state):
        Graph.made.append(state)


@pytest.fixture
def calls(monkeypatch):
    """Return a list with the calls of torch's interface for graphs, which only a GPU provides."""
    found = Graph.made = []

    class Context:
        def __init__(self, *args, **kwargs):
            found.append((*args[1:], *kwargs.values()))

        def __enter__(self):
            found.append("begin")

        def __exit__(self, *error):
            found.append("end")
    for name, part in {"CUDAGraph": Graph, "graph": Context, "Stream": lambda device: f"stream of {device}",
                       "current_stream": lambda: "usual", "set_stream": found.append, "current_device": lambda: 1,
                       "graph_pool_handle": lambda: "pool", "device": lambda device: torch.device("cpu")}.items():
        monkeypatch.setattr(f"torch.cuda.{name}", part)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *args: found.append(args), raising=False)
    monkeypatch.setattr(cuda_graphs, "_STREAMS", cuda_graphs._StreamsOfThread())
    return found


def test_a_gpu_records_on_a_stream_of_its_own(calls):
    generator = Generator()
    recorder = cuda_graphs.CudaRecorder(torch.device("cuda:1"), generator)
    for _ in range(2):
        result, replay = recorder.record(lambda: calls.append("function") or 7)
        replay()
        assert result == 7
    assert calls == [("generator", generator), ("pool", "stream of cuda:1", "thread_local"), "begin", "function", "end",
                     "replay"] * 2


def test_a_failed_recording_restores_what_torch_leaves(calls):
    """Check that stream, pool and generator are restored; the pool and the generator remain in use in torch 2.11."""
    recorder = cuda_graphs.CudaRecorder(torch.device("cuda:1"), Generator())
    with pytest.raises(ZeroDivisionError):
        recorder.record(lambda: 1 / 0)
    assert calls[2:] == ["begin", "end", "usual", (1, "pool"), "state"]
