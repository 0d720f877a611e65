"""Check the link speeds that are measured with probes."""

from __future__ import annotations

import numpy as np
import pytest

from pytorchrl.runtime.simulated import SimulatedRuntime
from pytorchrl.runtime import ThreadRuntime
from pytorchrl.scheme.base.worker import Worker
from pytorchrl.scheme.transport import link
from pytorchrl.scheme.transport.encoder import Compression, Encoder
from pytorchrl.scheme.transport.link import measure_links


class Far(Worker):
    """A worker at the end of a simulated link, with a fixed latency per call."""

    def __init__(self, index_worker, runtime, rate, latency_s=0.25):
        super().__init__(index_worker)
        self._sleep, self._rate, self._latency_s = runtime.sleep, rate, latency_s
        self.sizes = []
        self.encoder = Encoder(Compression.of("data", "auto"), runtime.now)

    def echo(self, payload):
        self.sizes.append(payload.nbytes)
        self._sleep(self._latency_s + 2 * payload.nbytes / self._rate)
        return super().echo(payload)


def workers_at(runtime, *rates):
    return [runtime.start_actor(Far, {"index_worker": index, "runtime": runtime, "rate": rate}, name=str(index),
                                resources={})
            for index, rate in enumerate(rates)]


@pytest.fixture
def simulated():
    # With the default of "byte", 0, links are not measured. The workers of these tests simulate slower links.
    runtime = SimulatedRuntime(SimulatedRuntime.Options(costs={"message": 0.0, "byte": 1e-15}))
    yield runtime
    runtime.close()


def test_the_rate_of_each_link_is_found_for_any_call_latency(simulated):
    assert measure_links(simulated, workers_at(simulated, 1e7)) == pytest.approx([1e-7])
    assert measure_links(simulated, workers_at(simulated, 1e7, 4e7)) == pytest.approx([1e-7, 0.25e-7], rel=0.01)


def test_slow_links_get_few_and_small_probes(simulated):
    slow, fast = workers_at(simulated, 1e6), workers_at(simulated, 1e12)
    measure_links(simulated, slow)
    measure_links(simulated, fast)
    assert slow[0].native.worker.sizes == [link._SMALL, link._SMALL, link._LARGE[0]]
    assert max(fast[0].native.worker.sizes) == link._LARGE[-1]


def test_the_same_process_is_a_fast_link():
    runtime = ThreadRuntime()
    worker = runtime.start_actor(Worker, {"index_worker": 1}, name="near", resources={})
    (seconds,) = measure_links(runtime, [worker])
    assert 0.0 <= seconds < 1e-7
    runtime.close()


def test_unresponsive_workers_are_skipped(simulated):
    """Check that lost and hung workers do not prevent the measurement of other links."""
    lost, near, hung = workers_at(simulated, 1e7, 1e7, 1.0)
    simulated.kill(lost)
    assert measure_links(simulated, [lost, near, hung]) == pytest.approx([0.0, 1e-7, 0.0])
    assert simulated.now() < 100.0


def test_an_echo_is_a_copy():
    payload = np.zeros(3, np.uint8)
    assert not np.shares_memory(Worker(0).echo(payload), payload)
    Worker(0).set_link(1.0)  # has no effect, because this worker has no encoder
