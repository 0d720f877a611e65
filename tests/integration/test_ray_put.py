"""Tests that Ray workers receive shared values through the object store or within each request."""

from __future__ import annotations

import numpy as np
import pytest

from pytorchrl.runtime.ray.runtime import _MAX_ENCLOSED_BYTES, RayRuntime
from pytorchrl.runtime.ray.host import Enclosed
from pytorchrl.scheme.transport import codecs
from pytorchrl.scheme.transport.codecs import decode_array, register_codec
from pytorchrl.scheme.transport.messages import Weights

pytestmark = [pytest.mark.ray, pytest.mark.timeout(120)]


class Reader:
    """A worker that describes the weights that it receives."""

    def read(self, weights):
        """Return the weights' version, the sum of their decoded values, their encoded bytes, and their class name."""
        values = decode_array(weights.state["all"])
        return weights.version, float(values.sum()), weights.state["all"].nbytes, type(weights).__name__


@pytest.fixture
def readers(shared_ray):
    """Return a runtime and two readers on it."""
    runtime = RayRuntime()
    handles = [runtime.start_actor(Reader, {}, name=f"Reader {index}", resources={"num_cpus": 0}) for index in range(2)]
    yield runtime, handles
    for handle in handles:
        runtime.kill(handle)


def told(runtime, handles, weights):
    reference = runtime.put(weights)
    calls = [handle.submit(Reader.read, reference) for handle in handles]
    return reference, [runtime.outcome(call, 60).unwrap() for call in calls]


def test_weights_arrive_unchanged(readers, monkeypatch):
    """Check small and large weights, weights with a user-defined codec, and weights that are changed after `put`."""
    for number in (10, _MAX_ENCLOSED_BYTES // 4 - 500, _MAX_ENCLOSED_BYTES // 4, 400_000):
        values = np.ones(number, np.float32)
        reference, answers = told(*readers, Weights(3, {"all": values}, {"lr": 0.5}))
        assert answers == [(3, float(number), 4 * number, "Weights")] * 2
        assert isinstance(reference, Enclosed) == (4 * number < _MAX_ENCLOSED_BYTES - 1000)

    # The sender, such as a learner, may change its arrays in place later.
    runtime, handles = readers
    values = np.ones(100, np.float32)
    reference = runtime.put(Weights(1, {"all": values}))
    values[:] = 2.0
    assert runtime.outcome(handles[0].submit(Reader.read, reference), 60).unwrap()[1] == 100.0

    # A user-defined codec whose functions cannot be pickled by name is sent with the weights.
    monkeypatch.setattr(codecs, "_codecs", dict(codecs._codecs))  # restores the registry after the test
    codec = register_codec("test halves", lambda flat: [flat.astype(np.float16)], lambda arrays, dtype,
                           size: arrays[0].astype(dtype),
                           is_lossless=False)
    _, answers = told(*readers, Weights(2, {"all": codec.pack(np.ones(50, np.float32))}))
    assert answers == [(2, 50.0, 100, "Weights")] * 2
