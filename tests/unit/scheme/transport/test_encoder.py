"""Check the state and the counters of encoders, and the options of codecs."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
import torch

from pytorchrl.errors import ConfigError
from pytorchrl.scheme.transport.adaptive_codec import AdaptiveCodec
from pytorchrl.scheme.transport.codecs import Packed, decode_array, get_codec
from pytorchrl.scheme.transport.encoder import Compression, Encoder, Sent, Traffic, metrics_of
from pytorchrl.scheme.gradients.worker_stats import WorkerStats

LOSSY = ("fp16", "bf16", "int8", "topk")
GRADS = {"num_grad_workers": 2, "hidden": (64, 64)}


def encoder_of(name, now=time.perf_counter):
    return Encoder(Compression.of("grads", name), now)


def send(encoder, *arrays):
    message, sent = encoder.pack(lambda pack: [pack(array, place) for place, array in enumerate(arrays)])
    return [decode_array(array) for array in message], sent


def gradients(steps, size=2000, seed=0):
    """Return random gradients with a constant drift that is smaller than the noise."""
    rng = np.random.default_rng(seed)
    drift = rng.normal(size=size) * 0.02
    return [(drift + rng.normal(size=size) * 0.1).astype(np.float32) for _ in range(steps)]


# Error feedback


@pytest.mark.parametrize("name", ["int8", "topk"])
def test_decoded_and_kept_values_add_up_to_the_encoded_values(name):
    """Check that the decoded values and the kept values add up to all encoded values.

    The share of the values that were not yet sent must shrink over time.
    """
    encoder, codec = encoder_of(name), get_codec(name)
    given, decoded, without, missing, missing_without = 0.0, 0.0, 0.0, [], []
    for gradient in gradients(200):
        (arrived,), _ = send(encoder, gradient)
        given, decoded = given + gradient.astype(np.float64), decoded + arrived
        without = without + decode_array(codec.pack(gradient))
        np.testing.assert_allclose(decoded + encoder.kept[0], given, atol=1e-4)
        missing.append(np.linalg.norm(given - decoded) / np.linalg.norm(given))
        missing_without.append(np.linalg.norm(given - without) / np.linalg.norm(given))
    assert missing[-1] < 0.5 * missing[0]
    assert missing[-1] < 0.5 * missing_without[-1]


def test_the_mean_of_decoded_equal_gradients_is_the_gradient():
    gradient = np.linspace(-1, 1, 3000, dtype=np.float32)
    for name, most in (("int8", 1e-4), ("topk", 0.1)):
        encoder, total = encoder_of(name), 0.0
        for _ in range(100):
            total = total + send(encoder, gradient)[0][0]
        assert np.abs(total / 100 - gradient).max() < most
    # Without feedback, nine in ten values never arrive.
    assert np.count_nonzero(decode_array(get_codec("topk").pack(gradient))) == 300


@pytest.mark.parametrize("name", ["int8", "topk"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_non_finite_gradient_does_not_change_residuals(name, bad):
    first, second = gradients(2)
    spoilt = first.copy()
    spoilt[7] = bad
    with_bad, without = encoder_of(name), encoder_of(name)
    for encoder in (with_bad, without):
        send(encoder, first)
    before = with_bad.kept[0].copy()
    (arrived,), _ = send(with_bad, spoilt)
    assert not np.isfinite(arrived).all()
    assert np.array_equal(with_bad.kept[0], before)
    assert before.any()
    assert np.array_equal(send(with_bad, second)[0][0], send(without, second)[0][0])


def test_each_vector_has_its_own_residual_and_missing_ones_are_skipped():
    stats, encoder = WorkerStats(time.monotonic), encoder_of("topk")
    first, second = (torch.from_numpy(gradient) for gradient in gradients(2))
    stats.pack([first, None, second], encoder)
    assert sorted(encoder.kept) == [0, 2]
    kept = {place: array.copy() for place, array in encoder.kept.items()}
    assert not np.array_equal(kept[0], kept[2])
    packed = stats.pack([None, first, None], encoder)
    assert [type(vector) for vector in packed] == [type(None), Packed, type(None)]
    assert all(np.array_equal(encoder.kept[place], array) for place, array in kept.items())
    assert stats.counters.bytes_raw == stats.traffic["grads"].raw == 3 * 4 * 2000
    assert stats.counters.bytes_sent == stats.traffic["grads"].sent == 3 * 8 * 200


def test_unencoded_gradients_are_copied_into_the_message():
    """Check that a message does not change when the algorithm reuses the memory of its gradient."""
    gradient = torch.ones(300)
    for name in (False, "topk", "lz4"):
        (vector,) = WorkerStats(time.monotonic).pack([gradient], encoder_of(name))
        before = decode_array(vector).copy()
        gradient += 1
        assert np.array_equal(decode_array(vector), before)


def test_residuals_are_sent_once_encoding_does_not_pay():
    """Check that the first message that is not encoded includes all kept values.

    Without a measured link, only the first three messages are encoded.
    """
    *first, fourth, fifth = gradients(5)
    encoder, arrived = encoder_of("auto:topk"), []
    for gradient in first:
        (received,), sent = send(encoder, gradient)
        arrived.append(received)
        assert sent.is_encoded
    assert encoder.kept
    (rest,), sent = send(encoder, fourth)
    assert not sent.is_encoded
    np.testing.assert_allclose(sum(arrived) + rest, sum(first) + fourth, rtol=1e-5, atol=1e-5)
    assert not encoder.kept
    (alone,), _ = send(encoder, fifth)
    assert np.array_equal(alone, fifth)


# Counters


@pytest.mark.parametrize("name", LOSSY)
def test_relative_error_covers_the_whole_message(name):
    first, second = gradients(2)
    second *= 50
    arrived, sent = send(encoder_of(name), first, second)
    whole, back = np.concatenate([first, second]), np.concatenate(arrived)
    assert sent.relative_error == pytest.approx(np.linalg.norm(whole - back) / np.linalg.norm(whole), rel=1e-3)
    assert sent.relative_error < (0.8 if name == "topk" else 0.01)
    assert sent.raw == 16000
    assert sent.sent < 8001


def test_lossless_codecs_have_no_error():
    assert send(encoder_of("lz4"), *gradients(1))[1].relative_error is None


def test_arrays_that_do_not_fit_are_counted():
    encoder, large = encoder_of("fp16"), np.array([1e6, 1.0], np.float32)
    arrived, sent = send(encoder, large, np.ones(5, np.float32), np.array([3.4e38, 1], np.float32))
    np.testing.assert_allclose(arrived[0], large, rtol=2**-8)
    assert arrived[2].tolist() == [np.float32(3.4e38), 1.0]
    assert (sent.fallbacks, sent.sent) == (2, 4 + 10 + 8)
    assert send(encoder, np.ones(5, np.float32))[1].fallbacks == 0


def test_times_are_measured_with_the_given_clock():
    ticks = iter(range(100))
    _, sent = send(encoder_of("lz4", lambda: next(ticks)), np.zeros(100))
    assert sent.encode_s == 1


def test_auto_shares_the_time_of_encoding_among_readers(monkeypatch):
    """Check the time per reader: a quarter of the encoding, and the whole decoding; each takes one second."""
    recorded, ticks = [], itertools.count()
    monkeypatch.setattr(AdaptiveCodec, "record", lambda self, raw, sent, codec_s: recorded.append((raw, codec_s)))
    encoder = Encoder(Compression.of("grads", "auto:lz4"), lambda: float(next(ticks)), num_readers=4)
    send(encoder, np.zeros(100, np.float32))
    assert recorded == [(400, 1.25)]


def test_auto_times_decoding_only_sometimes(monkeypatch):
    """Check that the sender decodes its first three messages, and later one in 64."""
    timed, sent, array = [], [], np.zeros(100, np.float32)
    monkeypatch.setattr("pytorchrl.scheme.transport.encoder.decode_array", lambda array: timed.append(len(sent)))
    encoder = Encoder(Compression.of("grads", "auto:lz4"), time.perf_counter)
    encoder.set_link(1e9)  # so slow that every message is encoded
    while len(sent) < 130:
        sent.append(encoder.pack(lambda pack: pack(array))[1].is_encoded)
    assert all(sent)
    assert timed == [0, 1, 2, 64, 128]


def test_totals_are_summed_over_messages():
    first = Traffic.of(Sent(100, 50, True, 0.5, 2, 0.25)) + Traffic(decodes=1, decode_s=0.125)
    second = Traffic.of(Sent(100, 100))
    assert (first + second).relative_error == 0.25
    metrics = metrics_of([{"grads": first, "data": second}, {"grads": second}, {}])
    assert metrics == {
        "compress/grads/bytes_raw": 200, "compress/grads/bytes_sent": 150, "compress/grads/ratio": 200 / 150,
        "compress/grads/encoded_share": 0.5, "compress/grads/encode_time_ms": 500.0,
        "compress/grads/decode_time_ms": 125.0,
        "compress/grads/fallbacks": 2, "compress/grads/relative_error": 0.25}


# Options


@pytest.mark.parametrize(("kind", "value", "name", "is_auto"), [
    ("data", True, "lz4", False), ("data", "zstd", "zstd", False), ("data", "auto", "lz4", True), ("weights", "auto",
        "lz4", True),
    ("grads", "auto", "bf16", True), ("grads", "auto:topk", "topk", True), ("weights", "auto:fp16", "fp16", True)])
def test_compression_values_select_codecs(kind, value, name, is_auto):
    compression = Compression.of(kind, value)
    assert (compression.codec.name, compression.is_auto) == (name, is_auto)
    assert Compression.of(kind, compression) is compression


@pytest.mark.parametrize("value", [False, "none"])
def test_compression_can_be_turned_off(value):
    assert Compression.of("grads", value) is None


@pytest.mark.parametrize(("value", "package"), [(True, "lz4"), ("auto", "lz4"), ("zstd", "zstandard"), ("auto:zstd",
    "zstandard")])
def test_a_codec_whose_package_is_missing_is_refused(monkeypatch, value, package):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError,
                       match=rf"compress_data_to_send={value!r} needs the package {package}.*pip install .*lz4"):
        Compression.of("data", value)
    assert Compression.of("grads", "bf16").codec.package is None


