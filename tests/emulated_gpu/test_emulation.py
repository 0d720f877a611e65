"""Check what other tests expect of a GPU: the errors, generators and graphs of torch, as on a real one."""

from __future__ import annotations

import copy
import threading

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda:0")


def recorded(function, *, generator=None):
    """Record a function into a CUDA graph; return its result and the graph."""
    graph = torch.cuda.CUDAGraph()
    if generator is not None:
        graph.register_generator_state(generator)
    with torch.cuda.graph(graph, stream=torch.cuda.Stream(GPU)):
        result = function()
    return result, graph


@pytest.fixture
def default_stream():
    """Make the default stream current again after a test in which a recording fails."""
    yield torch.cuda.default_stream(GPU)
    torch.cuda.set_stream(torch.cuda.default_stream(GPU))


def test_tensors_of_two_devices_do_not_meet():
    for operation in (torch.add, torch.mm, torch.minimum):
        with pytest.raises(RuntimeError, match="two devices"):
            operation(torch.ones(2, 2, device=GPU), torch.ones(2, 2))


@pytest.mark.gpu(count=2)
def test_tensors_of_two_gpus_do_not_meet():
    with pytest.raises(RuntimeError, match="two devices"):
        torch.ones(2, device="cuda:0") + torch.ones(2, device="cuda:1")
    with torch.cuda.device(1):
        assert torch.ones(2, device="cuda").device == torch.device("cuda:1")
    assert torch.ones(2, device="cuda").device == GPU


def test_numbers_meet_tensors_of_any_device():
    assert (torch.ones(2, device=GPU) * torch.tensor(3.0)).tolist() == [3.0, 3.0]


def test_numpy_gets_only_tensors_of_the_cpu():
    with pytest.raises(TypeError, match=r"can't convert cuda:0 device type tensor to numpy"):
        torch.ones(2, device=GPU).numpy()
    assert np.array_equal(torch.ones(2, device=GPU).cpu().numpy(), np.ones(2))


def test_a_generator_has_a_device():
    with pytest.raises(RuntimeError, match="Expected a 'cuda' device type for generator but found 'cpu'"):
        torch.rand(2, device=GPU, generator=torch.Generator())
    generator = torch.Generator(GPU).manual_seed(1)
    state, drawn = generator.get_state(), torch.rand(4, device=GPU, generator=generator)
    assert not torch.equal(drawn, torch.rand(4, device=GPU, generator=generator))
    assert state.numel() == 16
    generator.set_state(state)
    assert torch.equal(drawn, torch.rand(4, device=GPU, generator=generator))
    with pytest.raises(RuntimeError, match="wrong size"):
        generator.set_state(torch.Generator().get_state())


def test_pinned_memory_is_known():
    batch = torch.ones(8)
    assert batch.pin_memory().is_pinned()
    assert batch.pin_memory()[3:].is_pinned()
    assert not batch.is_pinned()


def test_views_share_memory_and_copies_do_not():
    whole = torch.zeros(4, 6, device=GPU)
    views = [whole[1:3], whole.view(6, 4), whole.t(), whole.unfold(1, 2, 2), whole.view(torch.int32), whole.flatten(),
             *whole.split(2), *whole.unbind(1)]
    assert {view.untyped_storage().data_ptr() for view in views} == {whole.untyped_storage().data_ptr()}
    copied = copy.deepcopy(whole)
    whole.fill_(1.0)
    assert copied.device == GPU
    assert copied.sum().item() == 0.0
    assert all(view.device == GPU and view.any() for view in views)


def test_each_thread_has_a_current_stream():
    found, stream = [], torch.cuda.Stream(GPU)
    with torch.cuda.stream(stream):
        thread = threading.Thread(target=lambda: found.append(torch.cuda.current_stream(GPU)))
        thread.start()
        thread.join()
        assert torch.cuda.current_stream(GPU) == stream
    assert found == [torch.cuda.default_stream(GPU)] == [torch.cuda.current_stream(GPU)]


def test_a_graph_computes_only_when_it_is_replayed():
    given, total = torch.ones(3, device=GPU), torch.zeros(3, device=GPU)

    def add():
        total.add_(given)
        return total * 2
    doubled, graph = recorded(add)
    assert total.tolist() == [0.0] * 3
    for expected in (5.0, 10.0):
        given.fill_(5.0)
        graph.replay()
        assert total.tolist() == [expected] * 3
        assert doubled.tolist() == [2 * expected] * 3


def test_each_replay_draws_new_numbers_from_a_registered_generator():
    generator = torch.Generator(GPU).manual_seed(3)
    drawn, graph = recorded(lambda: torch.rand(4, device=GPU, generator=generator), generator=generator)
    found = []
    for _ in range(3):
        graph.replay()
        found.append(drawn.clone())
    generator.manual_seed(3)
    expected = [torch.rand(4, device=GPU, generator=generator) for _ in range(3)]
    assert torch.equal(torch.stack(found), torch.stack(expected))


@pytest.mark.parametrize("function", [
    lambda: torch.ones(1, device=GPU).item(), lambda: bool(torch.ones(1, device=GPU).any()),
    lambda: torch.ones(2, device=GPU).nonzero(), lambda: torch.ones(2, device=GPU).cpu(),
    lambda: torch.ones(2).to(GPU), lambda: torch.rand(2, device=GPU, generator=torch.Generator(GPU)),
], ids=["item", "bool", "nonzero", "to the CPU", "to the GPU", "unregistered generator"])
def test_a_graph_cannot_have_operations_that_wait(default_stream, function):
    with pytest.raises(RuntimeError):
        recorded(function)


def test_a_recording_that_fails_leaves_its_stream_current(default_stream):
    """Check that a failed recording is as harmful as on a GPU: `torch.cuda.graph` does not restore the stream."""
    with pytest.raises(RuntimeError, match="previous error during capture"):
        recorded(lambda: torch.ones(1, device=GPU).item())
    assert torch.cuda.current_stream(GPU) != default_stream
