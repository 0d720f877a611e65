"""Mutations of the paths on a GPU, for `mutation_table.py`, whose tests run on the emulated GPU.

They stand for the mistakes that a processor forgives, and a GPU does not. `GPU` has entries like those of `KINDS`.
"""

from __future__ import annotations

_MATRIX = "emulated_gpu/test_matrix.py"
_SAME = f"{_MATRIX} -k same_as_on_the_cpu"
_STAGING = "emulated_gpu/test_staging.py"

GPU: dict[str, list[tuple[str, str, list[tuple[str, str]]]]] = {
    "a missing copy": [
        ("agent/storages/on_policy.py", _SAME, [
            ('return samples if self.device.type == "cpu" else samples.to(self.device)', "return samples")]),
        ("agent/algorithms/replay.py", _SAME, [
            ("self._on_device(leaf) for", "torch.from_numpy(leaf) for")]),
    ],
    "a generator of the CPU": [
        ("agent/seeding.py", _SAME, [("torch.Generator(device=device)", "torch.Generator()")]),
    ],
    "a function that waits and is recorded": [
        ("agent/algorithms/corrections.py", f"{_MATRIX} -k recorded", [
            ("log_ratio, log_ratio.exp(),",
             "log_ratio, log_ratio.exp() if log_ratio.max().item() < 1e9 else log_ratio,")]),
    ],
    "a graph with old inputs, results or random numbers": [
        ("agent/cuda_graphs.py", f"{_MATRIX} {_STAGING} -k recorded", [
            ("own.copy_(leaf, non_blocking=True)", "pass"),
            ("graph.register_generator_state(self._generator)", "pass"),
            ("pytree.tree_map_only(Tensor, Tensor.clone, result)", "result")]),
    ],
    "a batch that is used before it is copied": [
        ("scheme/gradients/staging.py", _SAME, [("self._copy.wait()", "pass")]),
    ],
    "a buffer that is written again before it is copied": [
        ("scheme/gradients/staging.py", _STAGING, [("                last.wait()", "                pass")]),
    ],
    "memory that outlives its buffer": [
        ("scheme/gradients/staging.py", _STAGING, [
            ("copy.record_stream(torch.cuda.current_stream(copy.device))", "pass")]),
    ],
    "the wrong stream": [
        ("scheme/gradients/staging.py", _SAME, [
            ("done.record(self._stream)", "done.record(torch.cuda.default_stream(self._device))")]),
        ("agent/cuda_graphs.py", "scheme/test_gpu.py -k could_not_be_recorded", [
            ("torch.cuda.set_stream(before)", "pass")]),
    ],
    "weights or states on the wrong device": [
        ("agent/actors/base.py", _SAME, [("        self.to(self.device)\n", "")]),
        ("agent/algorithms/base.py", f"{_MATRIX} -k trains_on_a_gpu", [
            ("cpu_copy(tensor) for name, tensor in self._learning_tensors()",
             "tensor.detach().clone() for name, tensor in self._learning_tensors()")]),
    ],
}
