from __future__ import annotations

import numpy as np
import pytest
import torch

from pytorchrl.agent.data import RolloutData
from pytorchrl.errors import ConfigError
from pytorchrl.scheme import codecs

_RNG = np.random.default_rng(0)
_ARRAYS = {
    "float32": _RNG.normal(size=(7, 3)).astype(np.float32),
    "special": np.array([np.nan, -np.nan, np.inf, -np.inf, -0.0, 0.0, 1e-45], np.float32),
    "float64": _RNG.normal(size=5),
    "uint8 images": _RNG.integers(0, 255, (4, 2, 8, 8), dtype=np.uint8),
    "bool": np.array([[True, False]]),
    "int64": np.array([-(2**63), 2**63 - 1]),
    "empty": np.zeros((0, 4), np.float32),
    "no axes": np.array(3.0, np.float32),
    "not contiguous": np.arange(24, dtype=np.float32).reshape(4, 6)[:, ::2].T,
    "big endian": np.arange(3, dtype=">f4"),
}


@pytest.mark.parametrize("array", _ARRAYS.values(), ids=_ARRAYS.keys())
def test_round_trip_is_bit_exact(array):
    packed = codecs.compress(array)
    again = codecs.decompress(packed)
    assert (again.dtype, again.shape) == (array.dtype, array.shape)
    assert again.tobytes() == array.tobytes()
    assert packed.nbytes == len(packed.frame)


def test_decompressed_arrays_can_be_written():
    again = codecs.decompress(codecs.compress(np.zeros(3, np.float32)))
    again += 1
    assert again.tolist() == [1, 1, 1]


def _rollout():
    return RolloutData(
        obs={"obs": torch.zeros(5, 2, 4), "image": torch.zeros(5, 2, 300, dtype=torch.uint8)},
        done=torch.zeros(5, 2, dtype=torch.bool), rhs={}, mask=None, action=torch.arange(8).view(4, 2),
        reward=torch.rand(4, 2), terminated=torch.zeros(4, 2, dtype=torch.bool),
        truncated=torch.zeros(4, 2, dtype=torch.bool), valid=torch.ones(4, 2, dtype=torch.bool),
        final_index=torch.zeros(0, 2, dtype=torch.int64), final_obs={"obs": torch.zeros(0, 4)},
        other={"logp": torch.rand(4, 2)})


def test_rollout_round_trip_and_sizes():
    data = _rollout().to_numpy()
    packed = codecs.compress_rollout(data)
    assert codecs.is_compressed(packed)
    assert not codecs.is_compressed(data)
    assert codecs.num_bytes(packed) < codecs.num_bytes(data)
    again = codecs.decompress_rollout(packed)
    assert codecs.num_bytes(again) == codecs.num_bytes(data)
    compared = []
    for name in ("obs", "other", "final_obs"):
        for leaf, array in getattr(data, name).items():
            compared.append((array, getattr(again, name)[leaf]))
    compared += [(getattr(data, name), getattr(again, name)) for name in (
        "done", "action", "reward", "terminated", "truncated", "valid", "final_index")]
    for before, after in compared:
        assert before.dtype == after.dtype
        np.testing.assert_array_equal(before, after)
    assert again.mask is None


def test_compression_without_its_package_is_refused(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"compress_data_to_send=True needs the package lz4.*pytorchrl\[compress\]"):
        codecs.require_lz4("compress_data_to_send")
