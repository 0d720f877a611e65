"""Compare gradients that are computed with and without compilation."""

from __future__ import annotations

import dataclasses
import math
import threading
from types import SimpleNamespace

import pytest
import torch

from pytorchrl.agent.actors.extractors import MLP
from pytorchrl.agent.algorithms import A2C, APPO, PPO, compiled
from pytorchrl.agent.algorithms.compiled import compile_graph
from pytorchrl.agent.algorithms.precision import BatchShape
from pytorchrl.errors import ConfigError, NonFiniteUpdateError

# Torch emits this warning when its compiler is imported.
pytestmark = pytest.mark.compiled


@pytest.mark.slow
def test_compiled_gradient_equals_the_uncompiled_one_for_any_size(build, collect, made_up_steps):
    plain, compiled = pair = [build(PPO, compile=flag) for flag in (False, True)]
    rollout = collect(plain, made_up_steps(4))
    plain.storage.insert_data_slice([rollout])
    plain.storage.before_gradients()
    for num_parts in (4, 3):
        for batch in plain.storage.generate_batches(num_parts):
            expected, wanted = plain.algorithm.compute_gradients(batch)
            gradient, info = compiled.algorithm.compute_gradients(batch)
            torch.testing.assert_close(gradient[0], expected[0], rtol=1e-4, atol=1e-6)
            assert info == pytest.approx(wanted, rel=1e-4, abs=1e-6)
            assert compiled.algorithm.norms_of(gradient) == pytest.approx([float(gradient[0].norm())], rel=1e-6)
            gradient[0].mul_(2)
            assert compiled.algorithm.norms_of(gradient) == pytest.approx([2 * float(expected[0].norm())], rel=1e-4)
            for parts in pair:
                parts.algorithm.apply_gradients([expected[0]])
        for parts in pair:
            parts.algorithm.update_algorithm_parameter("clip_param", 0.001)
    assert torch.equal(plain.algorithm.groups["all"].data, compiled.algorithm.groups["all"].data)
    assert len(compiled.algorithm._compiled._graphs) == 1


@pytest.mark.parametrize("is_compiled", [False, True])
def test_replaced_gradients_are_measured_again(build, collect, made_up_steps, monkeypatch, is_compiled):
    """Check that the norm that came with a gradient is not used for another gradient, or after a change in place."""
    monkeypatch.setattr("pytorchrl.agent.algorithms.compiled.compile_graph", lambda function, *args: function)
    parts = build(PPO, compile=is_compiled)
    parts.storage.insert_data_slice([collect(parts, made_up_steps(4))])
    parts.storage.before_gradients()
    batch, = parts.storage.generate_batches(1)
    gradients, _ = parts.algorithm.compute_gradients(batch)
    gradients[0] = gradients[0] * 100
    assert parts.algorithm.apply_gradients()["grad_norm"] == pytest.approx(float(gradients[0].norm()))
    gradients, _ = parts.algorithm.compute_gradients(batch)
    norm = float(gradients[0].norm())
    assert parts.algorithm.norms_of(gradients) == pytest.approx([norm])
    assert parts.algorithm.norms_of([None, gradients[0] * 2, gradients[0]]) == pytest.approx([2 * norm, norm])
    torch.nn.utils.clip_grad_norm_(parts.algorithm.groups["all"].params, norm / 2)
    gradients[0].mul_(3)
    assert parts.algorithm.norms_of(gradients) == pytest.approx([norm * (3.0 if is_compiled else 1.5)], rel=1e-4)
    gradients, _ = parts.algorithm.compute_gradients(batch)
    gradients[0], before = gradients[0] * math.nan, parts.params.clone()
    with pytest.raises(NonFiniteUpdateError):
        parts.algorithm.apply_gradients()
    assert torch.equal(parts.params, before)


@pytest.mark.parametrize(("algorithm", "options", "expected"), [
    (A2C, {}, []), (PPO, {}, ["clip_param"]), (PPO, {"use_clipped_value_loss": True}, ["clip_param"]),
    (PPO, {"use_clipped_value_loss": True, "clip_param_vf": 0.1}, ["clip_param", "clip_param_vf"])], ids=str)
def test_only_options_that_the_loss_reads_are_inputs_of_its_graph(
        build, collect, made_up_steps, traced_only, algorithm, options, expected):
    """Check that a schedule of another option, such as the learning rate, changes no input."""
    plain, compiled = (build(algorithm, compile=flag, **options) for flag in (False, True))
    plain.storage.insert_data_slice([collect(build(algorithm, seed=5), made_up_steps(4))])
    plain.storage.before_gradients()
    batch, = plain.storage.generate_batches(1)
    for lr, value in ((1e-3, 0.2), (1e-4, 0.01)):
        for parts in (plain, compiled):
            parts.algorithm.update_algorithm_parameter("lr", lr)
            for name in expected:
                parts.algorithm.update_algorithm_parameter(name, value)
        gradient, wanted = (parts.algorithm.compute_gradients(batch)[0][0] for parts in (compiled, plain))
        torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-6)
    (names, _), = compiled.algorithm._compiled._graphs.values()
    assert names == expected


def test_batches_of_another_layout_have_their_own_graphs(build, collect, made_up_steps, traced_only):
    plain, compiled = pair = [build(A2C, compile=flag, actor={"hidden_sizes": ()}) for flag in (False, True)]
    plain.storage.insert_data_slice([collect(plain, made_up_steps(4))])
    plain.storage.before_gradients()
    whole, = plain.storage.generate_batches(1)
    single = next(plain.storage.generate_batches(whole.num_samples))
    part = next(plain.storage.generate_batches(4))
    strided = dataclasses.replace(whole, ret=torch.stack([whole.ret, -whole.ret], 1)[:, 0])
    assert (len(single.done), len(part.done), strided.ret.stride()) == (1, 8, (2,))
    for batch, count in ((whole, 1), (single, 2), (strided, 3), (whole, 3), (part, 3)):
        gradients = [parts.algorithm.compute_gradients(batch)[0][0] for parts in pair]
        torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-6)
        assert len(compiled.algorithm._compiled._graphs) == count


@pytest.mark.parametrize("rows_at_once", [8, 7, 5, 16])
def test_a_large_batch_is_differentiated_in_parts(
        build, collect, made_up_steps, traced_only, monkeypatch, rows_at_once):
    """Compare with the gradient of the whole batch, whose advantages are normalized before it is divided."""
    monkeypatch.setattr(compiled, "ROWS_AT_ONCE", rows_at_once)
    plain, parted = (build(PPO, compile=flag) for flag in (False, True))
    plain.storage.insert_data_slice([collect(plain, made_up_steps(4))])
    plain.storage.before_gradients()
    whole, = plain.storage.generate_batches(1)
    assert len(whole.done) == 32
    expected, wanted = plain.algorithm.compute_gradients(whole)
    gradient, info = parted.algorithm.compute_gradients(whole)
    torch.testing.assert_close(gradient[0], expected[0], rtol=1e-4, atol=1e-6)
    assert info == pytest.approx(wanted, rel=1e-4, abs=1e-6)
    assert parted.algorithm.norms_of(gradient) == pytest.approx([float(gradient[0].norm())], rel=1e-6)
    assert len(parted.algorithm._compiled._graphs) == 1


def test_a_batch_of_many_whole_parts_has_a_graph_of_fixed_size(build, collect, made_up_steps, monkeypatch):
    """Check which sizes the compiler is told to be variable: with fixed sizes, it may choose faster products."""
    resized = []
    monkeypatch.setattr(compiled, "compile_graph", lambda function, device, sizes, *args: resized.append(
        len(sizes)) or function)
    parts = build(PPO, compile=True)
    parts.storage.insert_data_slice([collect(parts, made_up_steps(4))])
    parts.storage.before_gradients()
    whole, = parts.storage.generate_batches(1)
    for rows_at_once, is_fixed in ((8, True), (5, False), (32, True), (64, False)):
        monkeypatch.setattr(compiled, "ROWS_AT_ONCE", rows_at_once)
        parts.algorithm._compiled._graphs.clear()
        parts.algorithm.compute_gradients(whole)
        assert (resized.pop() == 0) is is_fixed
    assert not resized


def test_already_normalized_advantages_are_not_changed(build, collect, made_up_steps, traced_only):
    plain, compiled = (build(PPO, compile=flag) for flag in (False, True))
    plain.storage.insert_data_slice([collect(plain, made_up_steps(4))])
    plain.storage.before_gradients()
    batch, = plain.storage.generate_batches(1)
    part = dataclasses.replace(batch, advantage=3 * batch.advantage, is_normalized=True)
    gradients = []
    for given in (batch, part, plain.algorithm.prepare_batch(batch)):
        expected, _ = plain.algorithm.compute_gradients(given)
        gradient, _ = compiled.algorithm.compute_gradients(given)
        torch.testing.assert_close(gradient[0], expected[0], rtol=1e-4, atol=1e-6)
        gradients.append(expected[0].clone())
    assert not torch.allclose(gradients[0], gradients[1], rtol=1e-3)
    torch.testing.assert_close(gradients[0], gradients[2], rtol=1e-4, atol=1e-6)


def test_compiled_gradient_of_appo_uses_the_current_kl_coefficient(build, collect, made_up_steps, traced_only):
    plain, compiled = (build(APPO, compile=flag, kl_coef=0.5) for flag in (False, True))
    plain.storage.insert_data_slice([collect(build(APPO, seed=5), made_up_steps(4))])
    plain.storage.before_gradients()
    (batch,) = plain.storage.generate_batches(1)
    for coefficient in (0.5, 50.0):
        plain.algorithm.kl_coef = compiled.algorithm.kl_coef = coefficient
        expected, wanted = plain.algorithm.compute_gradients(batch)
        gradients, info = compiled.algorithm.compute_gradients(batch)
        for gradient, other in zip(gradients, expected, strict=True):
            torch.testing.assert_close(gradient, other, rtol=1e-4, atol=1e-6)
        assert info == pytest.approx(wanted, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("actor", [{}, {"activation": "relu", "normalize_obs": True}, {"hidden_sizes": ()},
                                   {"activation": "elu"}, {"block": "simba"},
                                   {"shared_policy_value_network": True}], ids=str)
def test_values_of_a_compiled_algorithm_follow_the_weights(build, collect, made_up_steps, actor):
    plain, compiled = (build(PPO, compile=flag, actor=actor) for flag in (False, True))
    rollout = collect(plain, made_up_steps(4))
    moments = plain.algorithm.moments_of(rollout, {})
    for _ in range(2):
        expected, found = (parts.algorithm.compute_values(rollout) for parts in (plain, compiled))
        assert len(expected[1])
        for own, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(own, wanted, rtol=1e-4, atol=1e-5)
        for parts in (plain, compiled):
            parts.actor.merge_moments(moments)
            parts.algorithm.groups["all"].data.mul_(1.5)


@pytest.mark.parametrize(("device", "expected"), [("cpu", "ahead of time"), ("meta", "in the first call")])
def test_only_graphs_for_the_cpu_are_compiled_ahead_of_time(monkeypatch, device, expected):
    """Check that graphs for a GPU are not saved; kernels recorded from them need no check of the arguments anyway."""
    class Compiled:
        def __call__(self):
            return "in the first call"

        def aot_compile(self, example):
            return SimpleNamespace(fn=lambda: "ahead of time")
    monkeypatch.setattr(torch, "compile", lambda function, **options: Compiled())
    assert compile_graph(lambda: None, torch.device(device), [])() == expected


@pytest.mark.parametrize("is_enabled", [True, False])
def test_graphs_are_deterministic_in_every_thread_if_kernels_are(monkeypatch, is_enabled):
    """Check a thread that did not enable deterministic kernels; torch keeps options of its compiler for each thread."""
    import torch._inductor.config

    if not hasattr(torch._inductor.config, "deterministic"):
        pytest.skip("this version of torch has no deterministic mode of the compiler")
    given = []
    monkeypatch.setattr(torch, "compile", lambda function, *, options, **others: given.append(options) or function)
    torch.use_deterministic_algorithms(is_enabled)
    try:
        thread = threading.Thread(target=lambda: compile_graph(lambda: None, torch.device("meta"), []))
        thread.start()
        thread.join()
    finally:
        torch.use_deterministic_algorithms(False)
    assert {options.get("deterministic", False) for options in given} == {is_enabled}


def test_gradients_with_memory_are_compiled_only_on_a_gpu(build):
    """Check the error of an algorithm on the CPU, which may still act for a learner with a GPU."""
    algorithm = build(PPO, compile=True, actor={"recurrent_net": "gru"}).algorithm
    batch = algorithm.example_batch(BatchShape(2, 3))
    with pytest.raises(ConfigError, match=r"actor with memory is for gradients on a GPU.*recurrent_net=None"):
        algorithm.compute_gradients(batch)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_layers_are_written_as_other_products_on_the_cpu_only(device):
    """Check the operations of a graph; the device "meta" stands in for a GPU."""
    found = []

    def backend(graph, example):
        found.extend(node.target for node in graph.graph.nodes)
        return graph.forward
    net = MLP(4, (32, 32)).to(device)
    layers = torch.nn.Sequential(net, *net.layers[1:])
    torch.compile(layers, backend=backend, fullgraph=True)(torch.zeros(2, 4, device=device))
    assert found.count(torch.nn.functional.linear) == (0 if device == "cpu" else 3)
    assert found.count(torch.mm) == (3 if device == "cpu" else 0)


def test_compiling_without_a_compiler_raises_with_a_hint(build, collect, made_up_steps, monkeypatch):
    import torch._inductor.config

    monkeypatch.setattr(torch._inductor.config.cpp, "cxx", (None, "/no/such/compiler"))
    parts = build(A2C, compile=True, actor={"hidden_sizes": ()})
    parts.storage.insert_data_slice([collect(parts, made_up_steps(4))])
    parts.storage.before_gradients()
    with torch._inductor.config.patch(force_disable_caches=True), pytest.raises(ConfigError, match="compile=False"):
        parts.algorithm.compute_gradients(next(parts.storage.generate_batches(1)))


def test_the_graph_of_an_actor_with_normalizers_is_called_without_checks(build, collect, made_up_steps, traced_only):
    plain, compiled = (build(PPO, compile=flag, actor={"normalize_obs": True}) for flag in (False, True))
    rollout = collect(plain, made_up_steps(4))
    plain.storage.insert_data_slice([rollout])
    plain.storage.before_gradients()
    batch, = plain.storage.generate_batches(1)
    for _ in range(2):
        expected, _ = plain.algorithm.compute_gradients(batch)
        gradient, _ = compiled.algorithm.compute_gradients(batch)
        torch.testing.assert_close(gradient[0], expected[0], rtol=1e-4, atol=1e-6)
        for parts in (plain, compiled):  # the graph reads the current moments
            parts.actor.merge_moments(parts.algorithm.moments_of(rollout, {}))
    (_, graph), = compiled.algorithm._compiled._graphs.values()
    assert "compile_graph" not in graph.__qualname__  # the name of the function that checks
