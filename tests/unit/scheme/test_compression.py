"""What encoders keep and count, and what codecs do to whole schemes."""

from __future__ import annotations

import functools
import time

import numpy as np
import pytest
import torch

from pytorchrl import A2C, ASYNC, PPO, VecEnv
from pytorchrl.errors import ConfigError
from pytorchrl.runtime import ThreadRuntime
from pytorchrl.runtime.simulated import SimulatedRuntime
from pytorchrl.scheme.transport import codecs
from pytorchrl.scheme.transport.codecs import Packed, get_codec, register_codec, unpack
from pytorchrl.scheme.collection.c_worker import CWorker
from pytorchrl.scheme.transport.encoder import Compression, Encoder, Sent, Traffic, metrics_of
from pytorchrl.scheme.gradients.g_worker import GWorker
from pytorchrl.scheme.gradients.worker_stats import Report
from pytorchrl.scheme.transport.messages import Rollout, Weights
from pytorchrl.scheme.transport.weight_sync import Pushes

LOSSY = ("fp16", "bf16", "int8", "topk")
GRADS = {"num_grad_workers": 2, "hidden": (64, 64)}


def encoder_of(name, now=time.perf_counter):
    return Encoder(Compression.of("grads", name), now)


def send(encoder, *arrays, number=0):
    message, sent = encoder.pack(lambda pack: [pack(array, place) for place, array in enumerate(arrays)], number)
    return [unpack(array) for array in message], sent


def gradients(steps, size=2000, seed=0):
    """A drift that is smaller than the noise of each."""
    rng = np.random.default_rng(seed)
    drift = rng.normal(size=size) * 0.02
    return [(drift + rng.normal(size=size) * 0.1).astype(np.float32) for _ in range(steps)]


# Error feedback


@pytest.mark.parametrize("name", ["int8", "topk"])
def test_in_the_long_run_all_of_it_crosses(name):
    """What was decoded and what is kept are together what went in, so the share that is missing goes to nothing."""
    encoder, codec = encoder_of(name), get_codec(name)
    given, decoded, without, missing, missing_without = 0.0, 0.0, 0.0, [], []
    for gradient in gradients(200):
        (arrived,), _ = send(encoder, gradient)
        given, decoded = given + gradient.astype(np.float64), decoded + arrived
        without = without + unpack(codec.pack(gradient))
        np.testing.assert_allclose(decoded + encoder.kept[0], given, atol=1e-4)
        missing.append(np.linalg.norm(given - decoded) / np.linalg.norm(given))
        missing_without.append(np.linalg.norm(given - without) / np.linalg.norm(given))
    assert missing[-1] < 0.5 * missing[0]
    assert missing[-1] < 0.5 * missing_without[-1]


def test_of_equal_gradients_the_mean_of_what_arrives_is_the_gradient():
    gradient = np.linspace(-1, 1, 3000, dtype=np.float32)
    for name, most in (("int8", 1e-4), ("topk", 0.1)):
        encoder, total = encoder_of(name), 0.0
        for _ in range(100):
            total = total + send(encoder, gradient)[0][0]
        assert np.abs(total / 100 - gradient).max() < most
    # Without feedback, nine in ten values never arrive.
    assert np.count_nonzero(unpack(get_codec("topk").pack(gradient))) == 300


@pytest.mark.parametrize("name", ["int8", "topk"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_changes_nothing_that_is_kept(name, bad):
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


def test_each_vector_keeps_its_own_and_missing_ones_are_passed():
    report, encoder = Report(time.monotonic), encoder_of("topk")
    first, second = (torch.from_numpy(gradient) for gradient in gradients(2))
    report.pack([first, None, second], encoder, 1)
    assert sorted(encoder.kept) == [0, 2]
    kept = {place: array.copy() for place, array in encoder.kept.items()}
    assert not np.array_equal(kept[0], kept[2])
    packed = report.pack([None, first, None], encoder, 2)
    assert [type(vector) for vector in packed] == [type(None), Packed, type(None)]
    assert all(np.array_equal(encoder.kept[place], array) for place, array in kept.items())
    assert report.counters["bytes_raw"] == report.traffic["grads"].raw == 3 * 4 * 2000
    assert report.counters["bytes_sent"] == report.traffic["grads"].sent == 3 * 8 * 200


def test_what_is_sent_as_it_is_belongs_to_the_message():
    """The algorithm goes on using its gradient's memory."""
    gradient = torch.ones(300)
    for name in (False, "topk", "lz4"):
        (vector,) = Report(time.monotonic).pack([gradient], encoder_of(name), 1)
        before = unpack(vector).copy()
        gradient += 1
        assert np.array_equal(unpack(vector), before)


def test_once_it_does_not_pay_all_that_was_kept_crosses():
    first, second = gradients(2)
    encoder = encoder_of("auto:topk")
    (arrived,), sent = send(encoder, first)
    assert sent.is_encoded
    encoder._choice.next = lambda: False
    (rest,), sent = send(encoder, second)
    assert not sent.is_encoded
    np.testing.assert_allclose(arrived + rest, first + second, rtol=1e-5, atol=1e-6)
    assert not encoder.kept
    (alone,), _ = send(encoder, second)
    assert np.array_equal(alone, second)


# What is counted


@pytest.mark.parametrize("name", LOSSY)
def test_relative_error_is_that_of_the_whole_message(name):
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


def test_times_are_those_of_the_clock():
    ticks = iter(range(100))
    _, sent = send(encoder_of("lz4", lambda: next(ticks)), np.zeros(100))
    assert sent.encode_s == 1


def test_totals():
    first = Traffic.of(Sent(100, 50, True, 0.5, 2, 0.25)) + Traffic(decodes=1, decode_s=0.125)
    second = Traffic.of(Sent(100, 100))
    assert (first + second).relative_error == 0.25
    metrics = metrics_of([{"grads": first, "data": second}, {"grads": second}, {}])
    assert metrics == {
        "compress/grads/bytes_raw": 200, "compress/grads/bytes_sent": 150, "compress/grads/ratio": 200 / 150,
        "compress/grads/encoded_share": 0.5, "compress/grads/encode_time_ms": 500.0, "compress/grads/decode_time_ms": 125.0,
        "compress/grads/fallbacks": 2, "compress/grads/relative_error": 0.25}


# Options


@pytest.mark.parametrize(("kind", "value", "name", "is_auto"), [
    ("data", True, "lz4", False), ("data", "zstd", "zstd", False), ("data", "auto", "lz4", True), ("weights", "auto", "lz4", True),
    ("grads", "auto", "bf16", True), ("grads", "auto:topk", "topk", True), ("weights", "auto:fp16", "fp16", True)])
def test_values(kind, value, name, is_auto):
    compression = Compression.of(kind, value)
    assert (compression.codec.name, compression.is_auto) == (name, is_auto)
    assert Compression.of(kind, compression) is compression


@pytest.mark.parametrize("value", [False, "none"])
def test_off(value):
    assert Compression.of("grads", value) is None


@pytest.mark.parametrize(("value", "package"), [(True, "lz4"), ("auto", "lz4"), ("zstd", "zstandard"), ("auto:zstd", "zstandard")])
def test_a_codec_whose_package_is_missing_is_refused(monkeypatch, value, package):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf"compress_data_to_send={value!r} needs the package {package}.*pip install .*lz4"):
        Compression.of("data", value)
    assert Compression.of("grads", "bf16").codec.package is None


# Through schemes


def after(scheme, updates=6):
    while scheme.version < updates:
        scheme.step()
    return scheme.acting_state()["all"], scheme.metrics()


@pytest.mark.parametrize("codec", ["lz4", "zstd", "auto", "auto:zstd"])
def test_lossless_codecs_change_nothing_but_bytes(make_scheme, codec):
    settings = {"num_col_workers": 2, "num_grad_workers": 2, "size": 64}
    plain, before = after(make_scheme(**settings))
    packed, metrics = after(make_scheme(**settings, compress_data_to_send=codec, compress_weights_to_send=codec,
                                        compress_grads_to_send=f"auto:{codec}" if codec == "zstd" else "lz4"))
    assert torch.equal(plain, packed)
    assert metrics["compress/data/bytes_raw"] + metrics["compress/grads/bytes_raw"] == metrics["bytes_in_raw"] == before["bytes_in_raw"]
    assert metrics["compress/data/bytes_sent"] + metrics["compress/grads/bytes_sent"] == metrics["bytes_in"] < before["bytes_in"]
    assert metrics["compress/data/ratio"] > 1.0
    assert metrics["compress/weights/bytes_sent"] == metrics["bytes_out"] <= before["bytes_out"]


@pytest.mark.parametrize(("codec", "ratio", "error", "drift"), [
    ("fp16", 2, 1e-3, 0.05), ("bf16", 2, 4e-3, 0.2), ("int8", 3.94, 0.03, 1.0), ("topk", 5, 0.8, 1.3)])
@pytest.mark.parametrize("communication", ["synchronous", ASYNC])
def test_lossy_gradients_are_smaller_and_nearly_the_same(make_scheme, codec, ratio, error, drift, communication):
    envs = VecEnv.create_factory("CartPole-v1", vec_env_size=2)
    settings = GRADS | {"grad_communication": communication, "runtime": "simulated", "algo": A2C.create_factory(lr=1e-5), "envs": envs}
    start = make_scheme(**settings).acting_state()["all"]
    plain, before = after(make_scheme(**settings))
    packed, metrics = after(make_scheme(**settings, compress_grads_to_send=codec))
    assert not torch.equal(plain, packed)
    assert (plain - packed).norm() < drift * (plain - start).norm()
    assert metrics["compress/grads/ratio"] == pytest.approx(ratio, rel=0.01)
    assert metrics["bytes_in"] < before["bytes_in"]
    assert 0 < metrics["compress/grads/relative_error"] < error
    assert metrics["compress/grads/decode_time_ms"] is not None
    assert metrics["compress/grads/fallbacks"] == 0
    assert "compress/data/ratio" not in metrics


def test_compress_weights_to_send(make_scheme):
    """Workers act with rounded parameters; what the learner has is not rounded, and normalisers never are."""
    settings = {"num_col_workers": 3, "hidden": (64, 64), "algo": PPO.create_factory(num_epochs=1, num_mini_batch=1)}
    _, before = after(make_scheme(**settings))
    scheme = make_scheme(**settings, compress_weights_to_send="bf16")
    own, metrics = after(scheme)
    assert metrics["weight_pushes"] == before["weight_pushes"] == 18
    assert metrics["bytes_out"] < 0.51 * before["bytes_out"]
    assert metrics["compress/weights/ratio"] == pytest.approx(2.0, rel=0.01)
    learner = scheme.update_worker.local_worker
    weights = learner.get_weights()
    handle = learner.remote_workers[0]
    pushes = Pushes(ThreadRuntime(), Compression.of("weights", "bf16"), learner.algo.groups, 1)
    pushes.put(weights)
    handle.runtime.get(handle.submit(CWorker.set_weights, pushes.reference), 10.0)
    there = handle.native.worker.algo.acting_state()
    assert torch.equal(there["all"], own.to(torch.bfloat16).float())
    assert not torch.equal(there["all"], own)


def test_only_vectors_of_parameters_are_rounded():
    state = {"all": np.full(9, 1.001, np.float32), "obs_moments.0.shift": np.full(9, 1.001, np.float32),
             "count": np.full(9, 1.001)}
    learning = {"target_all": np.full(9, 1.001, np.float32), "target_all.scale": np.full(9, 1.001, np.float32)}
    pushes = Pushes(ThreadRuntime(), Compression.of("weights", "bf16"), ("all",), 2)
    pushes.put(Weights(3, state, {}, learning))
    packed = {name for part in (pushes.reference.state, pushes.reference.learning) for name, array in part.items()
              if isinstance(array, Packed)}
    assert packed == {"all", "target_all"}
    pushes.count()
    assert pushes.traffic.raw == Weights(3, state, {}, learning).num_bytes
    assert pushes.bytes_out == pushes.traffic.sent == pushes.traffic.raw - 2 * 18
    pushes = Pushes(ThreadRuntime(), Compression.of("weights", "lz4"), (), 2)
    pushes.put(Weights(3, {"all": np.zeros(99, np.float32), "count": np.zeros(99)}))
    assert all(isinstance(array, Packed) for array in pushes.reference.state.values())


def test_weights_are_encoded_once_a_version_and_decoded_by_each(make_scheme, monkeypatch):
    encoded, decoded = [], []
    codec = codecs._codecs["zstd"]
    monkeypatch.setitem(codecs._codecs, "zstd", codecs.Codec(
        "zstd", lambda flat: (encoded.append(flat.size), codec.encode(flat))[1],
        lambda arrays, dtype, size: (decoded.append(size), codec.decode(arrays, dtype, size))[1], is_lossless=True))
    _, metrics = after(make_scheme(num_grad_workers=3, hidden=(64, 64), compress_weights_to_send="zstd", size=4))
    size = max(encoded)
    assert metrics["weight_pushes"] == 18
    assert encoded.count(size) == 6
    assert decoded.count(size) == 18
    assert metrics["compress/weights/decode_time_ms"] > 0


def test_a_replaced_gradient_worker_starts_with_nothing_kept(make_scheme):
    kept = {}
    settings = {**GRADS, "runtime": "simulated", "compress_grads_to_send": "topk", "faults": "kill grad.2 @ grad 3"}
    scheme = make_scheme(**settings, algo=A2C.create_factory())
    pack = Report.pack

    def spy(self, vectors, encoder, number):
        before = {place: array.copy() for place, array in encoder.kept.items()}
        packed = pack(self, vectors, encoder, number)
        kept.setdefault(encoder, []).append(bool(before))
        return packed
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Report, "pack", spy)
        _, metrics = after(scheme, 8)
    assert metrics["workers_restarted"] == 1
    assert len(kept) == 3
    assert all(seen == [False] + [True] * (len(seen) - 1) for seen in kept.values())


@pytest.mark.parametrize("codec", ["int8", "topk"])
def test_a_gradient_that_is_not_finite_is_still_left_out(make_scheme, codec):
    scheme = make_scheme(**GRADS, runtime="simulated", compress_grads_to_send=codec, faults="nan grad.2 @ grad 3", algo=A2C.create_factory())
    parameters, metrics = after(scheme)
    assert metrics["updates_skipped_nan"] == 1
    assert torch.isfinite(parameters).all()
    encoders = [handle.native.worker.encoder for handle in scheme.update_worker.remote_workers]
    assert all(np.isfinite(encoder.kept[0]).all() and encoder.kept[0].any() for encoder in encoders)


@pytest.fixture
def far_away(monkeypatch):
    """A function that makes a link of virtual time for each byte, both ways, and codecs that take a little for each message.

    Given bytes a second, and seconds to decode an array, of one codec or of all.
    """
    call, pack, unpack = SimulatedRuntime._call, codecs.Codec.pack, codecs.Packed.unpack
    runtimes = []

    def set_(rate, decode_s, slow_codec=None):
        def slow_call(self, actor, method, args, kwargs):
            runtimes[:] = [self]
            self.sleep(sum(weights.num_bytes for weights in args if isinstance(weights, Weights)) / rate)
            value, error = call(self, actor, method, args, kwargs)
            if isinstance(value, Rollout):
                self.sleep(value.sent.sent / rate)
            elif getattr(value, "vectors", None):
                self.sleep(codecs.num_bytes(value.vectors) / rate)
            return value, error

        def slow_pack(self, array):
            if runtimes:
                runtimes[0].sleep(1e-6)
            return pack(self, array)

        def slow_unpack(self):
            runtimes[0].sleep(decode_s if slow_codec in (None, self.codec.name) else 0.0)
            return unpack(self)
        runtimes.clear()
        monkeypatch.setattr(SimulatedRuntime, "_call", slow_call)
        monkeypatch.setattr(codecs.Codec, "pack", slow_pack)
        monkeypatch.setattr(codecs.Packed, "unpack", slow_unpack)
    return set_


@pytest.mark.parametrize("rate", [1e5, 1e12])
@pytest.mark.parametrize("settings", [
    {"num_col_workers": 2, "compress_data_to_send": "auto", "compress_weights_to_send": "auto:bf16"},
    {"num_grad_workers": 2, "compress_grads_to_send": "auto", "compress_weights_to_send": "auto:bf16"},
    {"num_grad_workers": 2, "grad_communication": ASYNC, "compress_grads_to_send": "auto:topk"}], ids=["data", "grads", "async"])
@pytest.mark.parametrize("decode_s", [0.0, 1.0])
def test_auto_follows_the_link(make_scheme, far_away, settings, rate, decode_s):
    far_away(rate, decode_s)
    settings = {**settings, "runtime": "simulated", "costs": {"message": 0.0}, "hidden": (32,), "algo": A2C.create_factory(),
                "size": 16 if "num_col_workers" in settings else 2}
    parameters, metrics = after(make_scheme(**settings), 48)
    shares = [value for name, value in metrics.items() if name.endswith("encoded_share")]
    assert len(shares) == sum(name.startswith("compress") for name in settings)
    assert all(share > 0.8 if rate < 1e6 and not decode_s else share < 0.3 for share in shares)
    if "num_col_workers" not in settings:  # it follows from the virtual clock
        far_away(rate, decode_s)
        again, same = after(make_scheme(**settings), 48)
        assert torch.equal(parameters, again)
        assert same == metrics


@pytest.mark.parametrize(("kind", "good", "settings"), [
    ("data", "lz4", {"num_col_workers": 2}), ("grads", "bf16", {"num_grad_workers": 2})], ids=["data", "grads"])
@pytest.mark.parametrize("slow", ["weights", "answers"])
def test_two_autos_on_the_same_way_are_told_apart(make_scheme, far_away, kind, good, settings, slow):
    """zstd takes longer to decode than it saves, while another codec saves more than that, of what comes back or of what goes out."""
    far_away(1e5, 0.005 if slow == "weights" else 0.02, slow_codec="zstd")
    codec_of = {"weights": "zstd", kind: good} if slow == "weights" else {"weights": "bf16", kind: "zstd"}
    options = {f"compress_{name}_to_send": f"auto:{codec}" for name, codec in codec_of.items()}
    _, metrics = after(make_scheme(**settings, **options, runtime="simulated", costs={"message": 0.0}, hidden=(32,),
                                   algo=A2C.create_factory(), size=64 if kind == "data" else 4), 80)
    for name, codec in codec_of.items():
        share = metrics[f"compress/{name}/encoded_share"]
        assert share < 0.3 if codec == "zstd" else share > 0.8, (name, codec)


def weights_pushed(ways, versions=60, is_trial=lambda version: False):
    """(Share of the versions that were encoded, what was found of each answer) for each reader's seconds a byte."""
    pushes = Pushes(ThreadRuntime(), Compression.of("weights", "auto:bf16"), ("all",), len(ways))
    encoded, found = 0, []
    for version in range(versions):
        pushes.put(Weights(version, {"all": np.ones(1000, np.float32)}))
        is_encoded = isinstance(pushes.reference.state["all"], Packed)
        encoded += is_encoded
        found.append((version, is_encoded, [pushes.answered(
            worker, version, (2000 if is_encoded else 4000) * way, 0.001 * is_encoded, is_trial(version))
            for worker, way in enumerate(ways)]))
    return encoded / versions, found


def test_all_readers_of_weights_are_heard():
    assert weights_pushed([1e-9] * 4)[0] < 0.3
    assert weights_pushed([1e-9, 1e-5, 1e-5, 1e-5])[0] > 0.8  # the first to answer is near


def test_trials_are_told_to_one_side_only():
    share, found = weights_pushed([1e-5, 1e-5])
    assert share > 0.8
    assert all((way is None) == (not encoded) for _, encoded, ways in found for way in ways)
    # Where all answers are trials, nothing is known of weights.
    share, found = weights_pushed([1e-9, 1e-9], is_trial=lambda version: True)
    assert share == 1.0


def test_answers_with_weights_and_without_are_not_compared():
    pushes = Pushes(ThreadRuntime(), None, (), 1)
    assert [pushes.answered(0, version, 1.0, 0.0, False) for version in (1, 1, 1, 2, 2, 2, 3)] == [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, None]
    pushes.lost(0)
    assert [pushes.answered(0, version, 1.0, 0.0, False) for version in (3, 4, 5, 5, 6)] == [1.0, 1.0, 1.0, None, 1.0]
    assert pushes.answered(1, 5, 1.0, 0.0, False) == 1.0


def test_weights_sent_anew_within_their_version_count_as_sent():
    pushes = Pushes(ThreadRuntime(), None, (), 1)
    assert [pushes.answered(0, version, 1.0, 0.0, False) for version in (1, 2)] == [1.0, 1.0]
    pushes.forget()
    assert pushes.answered(0, 2, 1.0, 0.0, False) == 1.0
    assert pushes.answered(0, 2, 1.0, 0.0, False) is None


@pytest.mark.parametrize("decode_s", [0.0, 1.0])
def test_auto_counts_what_shards_take_to_decode(make_replay_scheme, far_away, decode_s):
    far_away(1e5, decode_s)
    scheme = make_replay_scheme({"num_envs": 4, "capacity": 400}, num_col_workers=2, col_communication=ASYNC, grad_communication=ASYNC,
                                num_replay_workers=2, train_batch_size=8, compress_data_to_send="auto", runtime="simulated",
                                costs={"message": 0.0})
    while scheme.metrics()["rollouts"] < 60:
        scheme.step()
    share = scheme.metrics()["compress/data/encoded_share"]
    assert share < 0.3 if decode_s else share > 0.8


def test_of_each_message_is_told_how_long_it_took(make_scheme, monkeypatch):
    told = {CWorker: [], GWorker: []}

    def watch(cls, method):
        call = getattr(cls, method)

        @functools.wraps(call)
        def watched(self, *args, **kwargs):
            told[cls].append(kwargs.get("fetched", args[1] if len(args) > 1 else None))
            return call(self, *args, **kwargs)
        monkeypatch.setattr(cls, method, watched)
    watch(CWorker, "collect")
    watch(GWorker, "collect_and_grad")
    after(make_scheme(num_grad_workers=2, num_col_workers=2, size=4, algo=A2C.create_factory()), 3)
    gradients_told = [message for message in told[GWorker] if message is not None]
    assert sorted(number for number, *_ in gradients_told) == [2, 2]  # for the first ones they had to start
    rollouts_told = [message for messages in told[CWorker] for message in messages]
    assert {number for number, *_ in rollouts_told} == {2}
    assert all(0 <= seconds < 1 for message in gradients_told + rollouts_told for seconds in message[1:])


def test_messages_nobody_asks_about_are_forgotten():
    encoder = encoder_of("auto:lz4")
    for number in range(3000):
        send(encoder, np.zeros(50), number=number)
    assert len(encoder._pending) <= 1024
    encoder.fetched(3, 1.0, 0.0)  # of long ago
    encoder.fetched(2999, 1.0, 0.0)
    assert 2999 not in encoder._pending


@pytest.mark.parametrize("settings", [
    {"num_col_workers": 2, "compress_data_to_send": "auto", "compress_weights_to_send": "bf16", "col_communication": ASYNC},
    {"num_grad_workers": 2, "compress_grads_to_send": "topk", "grad_communication": ASYNC, "hidden": (64, 64)},
    {"num_grad_workers": 2, "compress_grads_to_send": "int8", "hidden": (64, 64)}], ids=["auto", "topk", "int8"])
def test_a_recorded_run_is_repeated(make_scheme, tmp_path, settings):
    scheme = make_scheme(record=tmp_path / "run.record", **settings)
    after(scheme, 12)
    scheme.stop()
    again = make_scheme(runtime=None, replay=tmp_path / "run.record", **settings)
    while not again.replay_is_over:
        again.step()
    assert again.version == scheme.version


def test_a_codec_of_ones_own_in_a_scheme(make_scheme, monkeypatch):
    monkeypatch.setattr(codecs, "_codecs", dict(codecs._codecs))
    with pytest.raises(ConfigError, match="'signs'"):
        make_scheme(**GRADS, compress_grads_to_send="signs")
    register_codec("signs", lambda flat: [np.packbits(flat > 0), np.array([np.abs(flat).mean()], np.float32)],
                   lambda arrays, dtype, size: (2 * np.unpackbits(arrays[0], count=size).astype(dtype) - 1) * arrays[1],
                   is_lossless=False, has_feedback=True)
    with pytest.raises(ConfigError, match="signs is for gradients"):
        make_scheme(**GRADS, compress_weights_to_send="signs")
    _, metrics = after(make_scheme(**GRADS, compress_grads_to_send="signs"))
    assert metrics["compress/grads/ratio"] > 25
    assert metrics["compress/grads/relative_error"] > 0.3


def test_replay_shards_decode_what_they_add(make_replay_scheme):
    scheme = make_replay_scheme({"num_envs": 4, "capacity": 400}, num_col_workers=2, col_communication=ASYNC,
                                grad_communication=ASYNC, num_replay_workers=2, train_batch_size=8, compress_data_to_send="lz4")
    while scheme.version < 30:
        scheme.step()
    metrics = scheme.metrics()
    assert metrics["compress/data/decode_time_ms"] is not None
    assert metrics["compress/data/bytes_raw"] == metrics["bytes_in_raw"]
