"""Tests that large matrix products of compiled graphs are computed by oneDNN, and right."""

from __future__ import annotations

import pytest
import torch

# Torch emits a warning when its compiler is imported.
pytestmark = pytest.mark.compiled


def products(a, b, c):
    """Return products of large matrices in each layout, and of matrices that are small or of another type."""
    return [a @ b, a @ b.t(), a.t() @ b, a.t() @ b.t(), a @ a, c @ c.t(), a.double() @ b.double(), (a[:, :9] @ b[:9])]


@pytest.fixture(scope="module")
def found():
    """Return the results of `products` without and with compilation, and the number of oneDNN's products."""
    from pytorchrl.agent.algorithms.matrix_products import LargeProducts

    counts = []

    class Counted(LargeProducts):
        def __call__(self, graph):
            super().__call__(graph)
            counts.append(sum(node.target is torch.ops.pytorchrl.matrix_product.default for node in graph.nodes))

    generator = torch.Generator().manual_seed(1)
    matrices = [torch.randn(size, size, generator=generator) for size in (160, 160, 40)]
    compiled = torch.compile(products, fullgraph=True, options={
        "cpp_wrapper": True, "post_grad_custom_post_pass": Counted(), "fx_graph_cache": False})
    return products(*matrices), compiled(*matrices), counts


def test_only_large_products_of_float32_are_replaced(found):
    assert found[2] == [5]


def test_products_are_right_in_each_layout(found):
    expected, computed, _ = found
    for right, result in zip(expected, computed, strict=True):
        assert result.dtype == right.dtype
        torch.testing.assert_close(result, right, rtol=1e-4, atol=1e-4)


def test_products_whose_size_is_not_known_are_left_alone():
    from pytorchrl.agent.algorithms.matrix_products import LargeProducts

    graph = torch.fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    graph.output(graph.call_function(torch.ops.aten.mm.default, (a, b)))
    fake = torch._subclasses.FakeTensorMode(shape_env=torch.fx.experimental.symbolic_shapes.ShapeEnv())
    with fake:
        for node in (a, b):
            node.meta["val"] = torch.empty(512, 512)
    size = fake.shape_env.create_unbacked_symint()
    a.meta["val"] = fake.from_tensor(torch.empty(512, 512)).new_empty(size, 512)
    LargeProducts()(graph)
    assert [node.target for node in graph.nodes if node.op == "call_function"] == [torch.ops.aten.mm.default]


@pytest.mark.parametrize(("vendor", "capability", "is_faster"), [
    ("AuthenticAMD", "AVX512", True), ("GenuineIntel", "AVX512", False), ("AuthenticAMD", "AVX2", False)])
def test_the_processor_decides(monkeypatch, tmp_path, vendor, capability, is_faster):
    from pytorchrl.agent.algorithms import matrix_products

    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nvendor_id\t: {vendor}\n", encoding="utf-8")
    assert matrix_products.onednn_is_faster(tmp_path / "cpuinfo") is is_faster
    assert not matrix_products.onednn_is_faster(tmp_path / "none")
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not matrix_products.onednn_is_faster(tmp_path / "cpuinfo")


@pytest.mark.parametrize(("version", "processor", "is_replaced"), [
    (torch.__version__, True, True), (torch.__version__, False, False), ("2.12.1", True, False),
    ("2.130.0", True, False)])
def test_the_version_of_torch_and_the_processor_decide(monkeypatch, version, processor, is_replaced):
    from pytorchrl.agent.algorithms import compiled, matrix_products

    found = []
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(matrix_products, "onednn_is_faster", lambda: processor)
    monkeypatch.setattr(torch, "compile", lambda function, *, options, **_: found.append(options) or function)
    compiled.compile_graph(lambda x: x, torch.device("cpu"), [])
    assert [isinstance(options.get("post_grad_custom_post_pass"), matrix_products.LargeProducts)
            for options in found] == [is_replaced] * len(found)
    assert found
