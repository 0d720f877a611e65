"""Check each codec against brute force and against small cases that were computed by hand."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from pytorchrl.agent.data import RolloutData
from pytorchrl.errors import ConfigError, ContractError
from pytorchrl.scheme.transport import codecs
from pytorchrl.scheme.transport.codecs import Packed, get_codec, register_codec, decode_array

_RNG = np.random.default_rng(0)
_LOSSLESS = ("lz4", "zstd")
_LOSSY = ("fp16", "bf16", "int8", "topk")
_ARRAYS = {
    "float32": _RNG.normal(size=(7, 3)).astype(np.float32),
    "special": np.array([np.nan, -np.nan, np.inf, -np.inf, -0.0, 0.0, 1e-45], np.float32),
    "zeros": np.zeros((100, 3), np.float32),
    "float64": np.repeat(_RNG.normal(size=5), 20),
    "uint8 images": np.repeat(_RNG.integers(0, 255, (4, 2, 1, 8), dtype=np.uint8), 8, axis=2),
    "bool": np.array([[True, False]] * 50),
    "int64": np.array([-(2**63), 2**63 - 1] * 30),
    "float16": np.ones(90, np.float16),
    "complex": np.ones(90, np.complex64),
    "empty": np.zeros((0, 4), np.float32),
    "no axes": np.array(3.0, np.float32),
    "not contiguous": np.zeros((40, 60), np.float32)[:, ::2].T,
    "big endian": (np.arange(300) // 100).astype(">f4"),
}
GRADIENTS = {
    "normal": _RNG.normal(size=5003).astype(np.float32) * 1e-3,
    "heavy tails": (_RNG.standard_t(2, size=4096) * 10.0 ** _RNG.integers(-6, 2, 4096)).astype(np.float32),
    "mostly zeros": np.where(_RNG.random(3000) < 0.6, 0.0, _RNG.normal(size=3000)).astype(np.float32),
    "one": np.array([0.5], np.float32),
    "matrix": _RNG.normal(size=(30, 40)).astype(np.float32),
}


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@pytest.mark.parametrize("name", ["none", *_LOSSLESS])
@pytest.mark.parametrize("array", _ARRAYS.values(), ids=_ARRAYS.keys())
def test_round_trip_is_bit_exact(array, name):
    packed = get_codec(name).pack(array)
    assert same(decode_array(packed), array)
    assert packed.nbytes <= array.nbytes


@pytest.mark.parametrize("name", _LOSSLESS)
@pytest.mark.parametrize("key", ["zeros", "uint8 images", "bool", "int64", "float64", "big endian", "not contiguous"])
def test_lossless_codecs_shrink_compressible_data(name, key):
    packed = get_codec(name).pack(_ARRAYS[key])
    assert isinstance(packed, Packed)
    assert packed.nbytes == sum(array.nbytes for array in packed.arrays) < _ARRAYS[key].nbytes


@pytest.mark.parametrize("name", [*_LOSSLESS, *_LOSSY])
def test_decoded_arrays_are_writable_and_share_no_memory(name):
    array = np.arange(4000, dtype=np.float32) // 100
    before = array.copy()
    packed = get_codec(name).pack(array)
    first, second = packed.decode(), packed.decode()
    first += 1
    assert same(packed.decode(), second)
    assert same(array, before)


@pytest.mark.parametrize("name", [*_LOSSLESS, *_LOSSY])
def test_packed_arrays_are_pickled_out_of_band_with_their_codec(name):
    """Check that packed arrays can be pickled as Ray sends them: in separate buffers, read-only on arrival."""
    array = np.arange(4000, dtype=np.float32) // 100
    packed, buffers = get_codec(name).pack(array), []
    stream = pickle.dumps(packed, protocol=5, buffer_callback=buffers.append)
    assert len(stream) < 700
    assert sum(len(buffer.raw()) for buffer in buffers) == packed.nbytes
    arrived = pickle.loads(stream, buffers=[bytes(buffer.raw()) for buffer in buffers])
    assert not arrived.arrays[0].flags.writeable
    again = arrived.decode()
    assert same(again, packed.decode())
    again += 1
    assert arrived.codec.name == name


@pytest.mark.parametrize("name", _LOSSY)
@pytest.mark.parametrize("key", ["float64", "uint8 images", "bool", "int64", "float16", "empty", "big endian"])
def test_lossy_codecs_change_only_float32(name, key):
    assert get_codec(name).pack(_ARRAYS[key]) is _ARRAYS[key]


# Errors of lossy codecs, compared with brute force


def brute_half(values, dtype):
    return torch.tensor(values).to(dtype).to(torch.float32).numpy()


def brute_int8(values):
    flat, out = values.reshape(-1), []
    for start in range(0, flat.size, 256):
        block = flat[start:start + 256].astype(np.float64)
        scale = np.abs(block).max() / 127
        out.append(np.round(block / scale) * scale if scale else 0 * block)
    return np.concatenate(out).reshape(values.shape)


def brute_topk(values):
    flat = values.reshape(-1)
    keep = np.argsort(-np.abs(flat), kind="stable")[:-(-flat.size // 10)]
    out = np.zeros_like(flat)
    out[keep] = flat[keep]
    return out.reshape(values.shape)


@pytest.mark.parametrize("values", GRADIENTS.values(), ids=GRADIENTS.keys())
@pytest.mark.parametrize(("name", "dtype", "relative"), [("fp16", torch.float16, 2**-11), ("bf16", torch.bfloat16,
    2**-8)])
def test_half_precision(values, name, dtype, relative):
    packed = get_codec(name).pack(values)
    assert packed.nbytes == values.nbytes / 2
    again = decode_array(packed)
    assert same(again, brute_half(values, dtype))
    normal = np.abs(values) > 2**-14
    assert (np.abs(again - values)[normal] <= relative * np.abs(values)[normal]).all()


@pytest.mark.parametrize("values", GRADIENTS.values(), ids=GRADIENTS.keys())
def test_int8_in_blocks(values):
    packed = get_codec("int8").pack(values)
    again = decode_array(packed)
    if values.size > 2:
        assert packed.nbytes == values.size + 4 * -(-values.size // 256)
    largest = np.repeat(np.abs(np.pad(values.reshape(-1), (0, -values.size % 256)).reshape(-1, 256)).max(1),
                        256)[:values.size]
    assert (np.abs(again - values).reshape(-1) <= 0.5001 * largest / 127).all()
    step = largest.reshape(values.shape) / 127
    # The brute-force version may round a tie in the other direction.
    assert (np.abs(again - brute_int8(values)) <= 1.0001 * step).all()
    assert np.isclose(again, brute_int8(values), rtol=1e-4, atol=1e-30).mean() > 0.999


@pytest.mark.parametrize("values", GRADIENTS.values(), ids=GRADIENTS.keys())
def test_top_tenth(values):
    packed = get_codec("topk").pack(values)
    again = decode_array(packed)
    if values.size == 1:
        assert packed is values  # packing would take eight bytes instead of four
        return
    assert packed.arrays[0].dtype == np.int32
    assert packed.nbytes == 8 * -(-values.size // 10)
    if "zeros" not in values:
        assert np.count_nonzero(again) == -(-values.size // 10)
    assert np.linalg.norm(values - again) == pytest.approx(np.linalg.norm(values - brute_topk(values)))
    kept = again != 0
    assert same(again[kept], values[kept])


def test_top_tenth_of_few_and_of_equal_values():
    for size in range(1, 60):
        values = np.random.default_rng(size).integers(-2, 3, size).astype(np.float32)
        arrays = get_codec("topk").encode(values)
        places, kept = arrays
        assert len(set(places.tolist())) == len(places) == -(-size // 10), size
        assert sorted(np.abs(kept)) == sorted(np.abs(values))[-len(places):], size
        assert same(kept, values[places]), size


def test_golden_small_cases():
    values = np.array([1.0, -0.5, 0.003, 0.0, 254.0], np.float32)
    assert [array.tolist() for array in get_codec("int8").encode(values)] == [[0, 0, 0, 0, 127], [2.0]]
    assert [array.tolist() for array in get_codec("int8").encode(values[:2])] == [[127, -64], [np.float32(1 / 127)]]
    assert [array.tolist() for array in get_codec("topk").encode(values)] == [[4], [254.0]]
    assert [array.tolist() for array in get_codec("topk").encode(np.arange(-9, 3, dtype=np.float32))] == [[0, 1],
        [-9.0, -8.0]]
    bf16 = get_codec("bf16").encode(np.array([1.0, -2.0, 3.14159274, np.inf], np.float32))
    assert bf16[0].view(np.uint16).tolist() == [0x3F80, 0xC000, 0x4049, 0x7F80]
    fp16 = get_codec("fp16").encode(np.array([1.0, 65504.0, 2.0**-24], np.float32))
    assert fp16[0].view(np.uint16).tolist() == [0x3C00, 0x7BFF, 0x0001]


@pytest.mark.parametrize("name", _LOSSY)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("size", [3, 300])
def test_non_finite_values_stay_non_finite(name, bad, size):
    values = np.ones(size, np.float32)
    values[size // 2] = bad
    again = decode_array(get_codec(name).pack(values))
    assert not np.isfinite(again).all()
    assert values[size // 2] is not again[size // 2]


@pytest.mark.parametrize("tiny", [1e-45, 1e-40, 1e-37])
def test_int8_of_tiny_values_is_finite(tiny):
    values = np.linspace(-tiny, tiny, 300, dtype=np.float32)
    again = decode_array(get_codec("int8").pack(values))
    assert np.isfinite(again).all()
    assert np.abs(again - values).max() <= 0.51 * np.finfo(np.float32).tiny


@pytest.mark.parametrize("large", [65520.0, 1e30])
def test_fp16_falls_back_to_bf16_for_large_values(large):
    values = np.array([1.0, large, 3.0], np.float32)
    packed = get_codec("fp16").pack(values)
    assert packed.codec.name == "bf16"
    np.testing.assert_allclose(decode_array(packed), values, rtol=2**-8)
    assert get_codec("fp16").pack(np.float32([65504.0, 1.0])).codec.name == "fp16"


def test_bf16_does_not_encode_values_that_would_become_infinite():
    values = np.array([1.0, np.finfo(np.float32).max], np.float32)
    assert get_codec("bf16").pack(values) is values
    assert get_codec("fp16").pack(values) is values


# User-defined codecs


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(codecs, "_codecs", dict(codecs._codecs))


def _every_other(flat):
    return [flat[::2]]


def _twice(arrays, dtype, size):
    return np.repeat(arrays[0], 2)[:size].astype(dtype)


def test_a_user_defined_codec_encodes_and_decodes(registry):
    codec = register_codec("halves", _every_other, _twice, is_lossless=False)
    assert get_codec("halves") is codec
    assert "halves" in codecs.codec_names()
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    packed = codec.pack(array)
    assert packed.nbytes == 12
    assert packed.decode().tolist() == [[0, 0, 2], [2, 4, 4]]
    # The packed arrays are not views of the sender's array. They include the codec, so a receiver does not have to
    # register it.
    array[:] = 7
    codecs._codecs.pop("halves")
    assert pickle.loads(pickle.dumps(packed)).decode().tolist() == [[0, 0, 2], [2, 4, 4]]
    assert register_codec("halves", _every_other, _twice, is_lossless=True).is_lossless


def test_own_codecs_may_return_views_and_read_only_arrays(registry):
    """Check codecs whose arrays share memory with the input, are not contiguous, or are read-only."""
    def read_only(array):
        array.flags.writeable = False
        return array
    views = register_codec("views", lambda flat: [flat[:3]], _twice, is_lossless=False)
    spaced = register_codec("spaced", lambda flat: [np.repeat(flat[::2], 3)[::3]], _twice, is_lossless=False)
    shared = register_codec("shared", lambda flat: [flat[:1].copy()], lambda arrays, dtype, size: np.broadcast_to(
        arrays[0], size), is_lossless=False)
    given = register_codec("given", lambda flat: [flat[:1].copy()], lambda arrays, dtype, size: read_only(
        np.full(size, arrays[0])), is_lossless=False)
    kept = register_codec("kept", lambda flat: [flat.astype(np.float32), flat[:0]],
                          lambda arrays, dtype, size: arrays[0].view(dtype), is_lossless=True)
    for codec in (views, spaced, shared, given):
        array = np.full(6, 3.0, np.float32)
        packed = codec.pack(array)
        array[:] = 0.0
        assert all(part.flags.c_contiguous for part in packed.arrays)
        decoded = packed.decode()
        assert decoded.tolist() == [3.0] * 6
        decoded += 1.0  # does not change what another reader decodes
        assert packed.decode().tolist() == [3.0] * 6
    small = Packed(kept, (np.ones(3, np.float32),), "<f4", (3,))
    small.decode()[:] = 7.0
    assert small.decode().tolist() == [1.0] * 3
    assert isinstance(kept.pack(np.ones(3, np.float32)), np.ndarray)  # encoding does not make the array smaller


def test_arrays_in_any_order_of_memory_are_restored(registry):
    array = np.asfortranarray(np.arange(600, dtype=np.float32).reshape(20, 30) // 50)
    for name in ("lz4", "int8", "bf16"):
        np.testing.assert_allclose(decode_array(get_codec(name).pack(array)), array, atol=0.05)


def test_a_codec_that_decodes_wrong_data_is_detected(registry):
    wrong_size = register_codec("a", _every_other, lambda arrays, dtype, size: arrays[0], is_lossless=True)
    with pytest.raises(ContractError, match="codec 'a' decodes 4 values of <f4 as 2 of <f4"):
        wrong_size.pack(np.arange(4, dtype=np.float32)).decode()
    too_long = register_codec("c", _every_other, lambda arrays, dtype, size: np.zeros(size + 1, dtype),
                              is_lossless=True)
    with pytest.raises(ContractError, match="decodes 6 values of <f4 as 7 of <f4"):
        too_long.pack(np.ones(6, np.float32)).decode()
    wrong_dtype = register_codec("b", _every_other, lambda arrays, dtype, size: np.zeros(size), is_lossless=True)
    with pytest.raises(ContractError, match="codec 'b' decodes 4 values of <f4 as 4 of <f8"):
        wrong_dtype.pack(np.arange(4, dtype=np.float32)).decode()


@pytest.mark.parametrize("name", ["lz4", "none", "auto", "auto:x", "", 3])
def test_names_in_use_are_refused(registry, name):
    with pytest.raises(ConfigError, match="a codec's name must be new"):
        register_codec(name, _every_other, _twice, is_lossless=True)


def test_lossless_codecs_cannot_have_feedback(registry):
    with pytest.raises(ConfigError, match="has_feedback"):
        register_codec("x", _every_other, _twice, is_lossless=True, has_feedback=True)


# Rollouts


def _rollout():
    return RolloutData(
        obs={"obs": torch.zeros(5, 2, 4), "image": torch.zeros(5, 2, 300, dtype=torch.uint8)},
        done=torch.zeros(5, 2, dtype=torch.bool), rhs={}, mask=None, action=torch.arange(8).view(4, 2),
        reward=torch.rand(4, 2), terminated=torch.zeros(4, 2, dtype=torch.bool),
        truncated=torch.zeros(4, 2, dtype=torch.bool), valid=torch.ones(4, 2, dtype=torch.bool),
        final_index=torch.zeros(0, 2, dtype=torch.int64), final_obs={"obs": torch.zeros(0, 4)},
        other={"logp": torch.rand(4, 2)})


@pytest.mark.parametrize("name", _LOSSLESS)
def test_rollout_round_trip_and_sizes(name):
    data = _rollout().to_numpy()
    packed = data.map(get_codec(name).pack)
    assert codecs.num_bytes(packed) < codecs.num_bytes(data)
    again = packed.map(codecs.decode_array)
    assert codecs.num_bytes(again) == codecs.num_bytes(data)
    compared = [(getattr(data, group)[leaf], array) for group in ("obs", "other", "final_obs")
                for leaf, array in getattr(again, group).items()]
    compared += [(getattr(data, name), getattr(again, name)) for name in (
        "done", "action", "reward", "terminated", "truncated", "valid", "final_index")]
    assert len(compared) == 11
    assert all(same(before, after) for before, after in compared)
    assert again.mask is None
