"""Check how weights are encoded and stored for the workers of a set."""

from __future__ import annotations

import numpy as np
import pytest

from pytorchrl.runtime import ThreadRuntime
from pytorchrl.scheme.transport import weight_sync
from pytorchrl.scheme.transport.codecs import Packed
from pytorchrl.scheme.transport.encoder import Compression, Encoder
from pytorchrl.scheme.transport.messages import Weights
from pytorchrl.scheme.transport.weight_sync import WeightSync


def test_only_parameter_vectors_are_rounded():
    state = {"all": np.full(9, 1.001, np.float32), "obs_moments.0.shift": np.full(9, 1.001, np.float32),
             "count": np.full(9, 1.001)}
    learning = {"target_all": np.full(9, 1.001, np.float32), "target_all.scale": np.full(9, 1.001, np.float32)}
    sync = WeightSync(ThreadRuntime(), Compression.of("weights", "bf16"), ("all",), [None, None])
    sync.put(Weights(3, state, {}, learning))
    packed = {name for part in (sync.reference.state, sync.reference.learning) for name, array in part.items()
              if isinstance(array, Packed)}
    assert packed == {"all", "target_all"}
    sync.count()
    assert sync.traffic.raw == Weights(3, state, {}, learning).num_bytes
    assert sync.bytes_out == sync.traffic.sent == sync.traffic.raw - 2 * 18
    sync = WeightSync(ThreadRuntime(), Compression.of("weights", "lz4"), (), [None, None])
    sync.put(Weights(3, {"all": np.zeros(99, np.float32), "count": np.zeros(99)}))
    assert all(isinstance(array, Packed) for array in sync.reference.state.values())


@pytest.mark.parametrize(("links", "share"), [([1e-9] * 4, 0.1), ([1e-9, 1e-5, 1e-5, 1e-5], 1.0)],
                         ids=["near", "mostly far"])
def test_statistics_count_all_readers_of_weights(monkeypatch, links, share):
    monkeypatch.setattr(weight_sync, "measure_links", lambda runtime, workers: links)
    sync, encoded = WeightSync(ThreadRuntime(), Compression.of("weights", "auto:bf16"), ("all",), [None] * 4), 0
    for version in range(60):
        sync.put(Weights(version, {"all": np.ones(1000, np.float32)}))
        encoded += isinstance(sync.reference.state["all"], Packed)
    assert encoded / 60 <= share if share < 1 else encoded == 60


def test_the_codec_is_chosen_for_the_mean_of_all_links(monkeypatch):
    links, readers = [], []
    monkeypatch.setattr(weight_sync, "measure_links", lambda runtime, workers: [1.0, 2.0, 6.0])
    monkeypatch.setattr(Encoder, "set_link", lambda self, seconds: links.append(seconds))
    monkeypatch.setattr(weight_sync, "Encoder", lambda *args, **how: readers.append(how) or Encoder(*args, **how))
    sync = WeightSync(ThreadRuntime(), Compression.of("weights", "auto:lz4"), ("all",), [None] * 3)
    for version in range(2):
        sync.put(Weights(version, {"all": np.zeros(1000, np.float32)}))
    assert (links, readers) == ([3.0], [{"num_readers": 3}])
    assert (sync.traffic.encodes, sync.traffic.messages) == (2, 0)
    for _ in range(3):
        sync.count()
    assert (sync.traffic.encodes, sync.traffic.messages, sync.traffic.encoded) == (2, 3, 3)


def test_links_are_measured_once_and_only_for_auto(monkeypatch):
    measured = []
    monkeypatch.setattr(weight_sync, "measure_links", lambda runtime, workers: measured.append(workers) or [0.0])
    for option in ("lz4", "auto:lz4"):
        sync = WeightSync(ThreadRuntime(), Compression.of("weights", option), (), ["worker"])
        for version in range(3):
            sync.put(Weights(version, {"all": np.zeros(99, np.float32)}))
    assert measured == [["worker"]]


def test_weights_that_changed_within_their_version_are_stored_again():
    sync = WeightSync(ThreadRuntime(), None, (), [None])
    sync.put(Weights(2, {"all": np.zeros(9, np.float32)}))
    assert sync.has(2)
    assert not sync.has(3)
    sync.forget()
    assert not sync.has(2)
