"""Check the effects of codecs in whole schemes."""

from __future__ import annotations


import numpy as np
import pytest
import torch

from pytorchrl import A2C, ASYNC, PPO, VecEnv
from pytorchrl.errors import ConfigError
from pytorchrl.runtime.costs import Costs
from pytorchrl.runtime import ThreadRuntime
from pytorchrl.runtime.simulated import SimulatedRuntime
from pytorchrl.scheme.transport import codecs
from pytorchrl.scheme.transport.codecs import register_codec
from pytorchrl.scheme.collection.c_worker import CWorker
from pytorchrl.scheme.transport.encoder import Compression
from pytorchrl.scheme.gradients.worker_stats import WorkerStats
from pytorchrl.scheme.transport.messages import Rollout, Weights
from pytorchrl.scheme.transport.requests import Requests
from pytorchrl.scheme.transport.weight_sync import WeightSync
from tests.unit.scheme.conftest import chessboard

# Codec -> its compression ratio, and bounds on its relative error and on the drift of the parameters.
LOSSY = {"fp16": (2, 1e-3, 0.05), "bf16": (2, 4e-3, 0.2), "int8": (3.94, 0.03, 1.0), "topk": (5, 0.8, 1.3)}
GRADS = {"num_grad_workers": 2, "hidden": (64, 64)}


def after(scheme, updates=6):
    while scheme.version < updates:
        scheme.step()
    return scheme.acting_state()["all"], scheme.metrics()


@pytest.mark.every(3)
@pytest.mark.parametrize("codec", ["lz4", "zstd", "auto", "auto:zstd"])
def test_lossless_codecs_change_nothing_but_bytes(make_scheme, codec):
    settings = {"num_col_workers": 2, "num_grad_workers": 2, "size": 64}
    plain, before = after(make_scheme(**settings))
    packed, metrics = after(make_scheme(**settings, compress_data_to_send=codec, compress_weights_to_send=codec,
                                        compress_grads_to_send=f"auto:{codec}" if codec == "zstd" else "lz4"))
    assert torch.equal(plain, packed)
    assert metrics["compress/data/bytes_raw"] + metrics[
        "compress/grads/bytes_raw"] == metrics["bytes_in_raw"] == before["bytes_in_raw"]
    assert metrics[
        "compress/data/bytes_sent"] + metrics["compress/grads/bytes_sent"] == metrics["bytes_in"] < before["bytes_in"]
    assert metrics["compress/data/ratio"] > 1.0
    assert metrics["compress/weights/bytes_sent"] == metrics["bytes_out"] <= before["bytes_out"]


@pytest.mark.parametrize(("codec", "communication"), chessboard(LOSSY, ("synchronous", ASYNC)))
def test_lossy_gradients_are_smaller_and_nearly_equal(make_scheme, codec, communication):
    ratio, error, drift = LOSSY[codec]
    envs = VecEnv.create_factory("CartPole-v1", vec_env_size=2)
    settings = GRADS | {"grad_communication": communication, "runtime": "simulated",
                        "algo": A2C.create_factory(lr=1e-5), "envs": envs}
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
    """Check that workers act with rounded parameters, while the learner's own parameters are not rounded."""
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
    sync = WeightSync(ThreadRuntime(), Compression.of("weights", "bf16"), learner.algo.groups, [handle])
    sync.put(weights)
    handle.runtime.get(handle.submit(CWorker.set_weights, sync.reference), 10.0)
    there = handle.native.worker.algo.acting_state()
    assert torch.equal(there["all"], own.to(torch.bfloat16).float())
    assert not torch.equal(there["all"], own)


def test_weights_are_encoded_once_per_version_and_decoded_by_each_worker(make_scheme, monkeypatch):
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


def test_a_replaced_gradient_worker_starts_without_residuals(make_scheme):
    kept = {}
    settings = {**GRADS, "runtime": "simulated", "compress_grads_to_send": "topk", "faults": "kill grad.2 @ grad 3"}
    scheme = make_scheme(**settings, algo=A2C.create_factory())
    pack = WorkerStats.pack

    def spy(self, vectors, encoder):
        before = {place: array.copy() for place, array in encoder.kept.items()}
        packed = pack(self, vectors, encoder)
        kept.setdefault(encoder, []).append(bool(before))
        return packed
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WorkerStats, "pack", spy)
        _, metrics = after(scheme, 8)
    assert metrics["workers_restarted"] == 1
    assert len(kept) == 3
    assert all(seen == [False] + [True] * (len(seen) - 1) for seen in kept.values())


@pytest.mark.parametrize("codec", ["int8", "topk"])
def test_a_non_finite_gradient_is_still_skipped(make_scheme, codec):
    scheme = make_scheme(**GRADS, runtime="simulated", compress_grads_to_send=codec, faults="nan grad.2 @ grad 3",
                         algo=A2C.create_factory())
    parameters, metrics = after(scheme)
    assert metrics["updates_skipped_nan"] == 1
    assert torch.isfinite(parameters).all()
    encoders = [handle.native.worker.encoder for handle in scheme.update_worker.remote_workers]
    assert all(np.isfinite(encoder.kept[0]).all() and encoder.kept[0].any() for encoder in encoders)


@pytest.fixture
def far_away(monkeypatch):
    """Return a function that adds virtual time for sending messages in both directions, and for decoding.

    Its arguments are the bytes per second of the link, the seconds to decode an array, and the name of the only codec
    that is slow (None: all codecs).
    """
    call, pack, decode = SimulatedRuntime._call, codecs.Codec.pack, codecs.Packed.decode
    runtimes = []

    def set_(rate, decode_s, slow_codec=None):
        monkeypatch.setattr(Costs, "has_bytes", True)  # otherwise, the runtime knows that its messages take no time

        def slow_call(self, actor, method, args, kwargs):
            runtimes[:] = [self]
            if method == "interrupt":  # ends the tasks, so that nothing may wait
                return call(self, actor, method, args, kwargs)
            self.sleep(sum(weights.num_bytes for weights in args if isinstance(weights, Weights)) / rate)
            self.sleep(2 * sum(probe.nbytes for probe in args if isinstance(probe, np.ndarray)) / rate)
            value, error = call(self, actor, method, args, kwargs)
            if isinstance(value, Rollout):
                self.sleep(value.header.sent.sent / rate)
            elif getattr(value, "vectors", None):
                self.sleep(codecs.num_bytes(value.vectors) / rate)
            return value, error

        def slow_pack(self, array):
            if runtimes:
                runtimes[0].sleep(1e-6)
            return pack(self, array)

        def slow_decode(self):
            runtimes[0].sleep(decode_s if slow_codec in (None, self.codec.name) else 0.0)
            return decode(self)
        runtimes.clear()
        monkeypatch.setattr(SimulatedRuntime, "_call", slow_call)
        monkeypatch.setattr(codecs.Codec, "pack", slow_pack)
        monkeypatch.setattr(codecs.Packed, "decode", slow_decode)
    return set_


AUTO = {
    "data": {"num_col_workers": 2, "compress_data_to_send": "auto", "compress_weights_to_send": "auto:bf16"},
    "grads": {"num_grad_workers": 2, "compress_grads_to_send": "auto", "compress_weights_to_send": "auto:bf16"},
    "async": {"num_grad_workers": 2, "grad_communication": ASYNC, "compress_grads_to_send": "auto:topk"}}


# A codec saves time only with the slow link and without a time for decoding. By default, each kind of message is tested
# with that link and with one of the others.
@pytest.mark.parametrize(("name", "rate", "decode_s"), [
    pytest.param(name, rate, decode_s, marks=[] if (rate, decode_s) in (
        (1e5, 0.0), (1e5, 1.0) if name == "grads" else (1e12, 0.0)) else [pytest.mark.thorough])
    for name in AUTO for rate in (1e5, 1e12) for decode_s in (0.0, 1.0)])
def test_auto_follows_the_link(make_scheme, far_away, name, rate, decode_s):
    far_away(rate, decode_s)
    settings = {**AUTO[name], "runtime": "simulated", "costs": {"message": 0.0}, "hidden": (32,),
                "algo": A2C.create_factory(),
                "size": 16 if name == "data" else 2}
    parameters, metrics = after(make_scheme(**settings), 24)
    shares = [value for name, value in metrics.items() if name.endswith("encoded_share")]
    assert len(shares) == sum(name.startswith("compress") for name in settings)
    assert all(share > 0.8 if rate < 1e6 and not decode_s else share < 0.3 for share in shares)
    if "num_col_workers" not in settings:  # decisions depend on the virtual clock only, so they repeat
        far_away(rate, decode_s)
        again, same = after(make_scheme(**settings), 24)
        assert torch.equal(parameters, again)
        assert same == metrics


@pytest.mark.parametrize(("kind", "good", "settings"), [
    ("data", "lz4", {"num_col_workers": 2}), ("grads", "bf16", {"num_grad_workers": 2})], ids=["data", "grads"])
@pytest.mark.parametrize("slow", ["weights", "answers"])
def test_auto_decides_separately_per_direction(make_scheme, far_away, kind, good, settings, slow):
    """Check that "auto" decides separately for the two directions of a link.

    In one direction, zstd takes longer to decode than it saves; in the other direction, another codec saves time.
    """
    far_away(1e5, 0.005 if slow == "weights" else 0.02, slow_codec="zstd")
    codec_of = {"weights": "zstd", kind: good} if slow == "weights" else {"weights": "bf16", kind: "zstd"}
    options = {f"compress_{name}_to_send": f"auto:{codec}" for name, codec in codec_of.items()}
    _, metrics = after(make_scheme(**settings, **options, runtime="simulated", costs={"message": 0.0}, hidden=(32,),
                                   algo=A2C.create_factory(), size=64 if kind == "data" else 4), 24)
    for name, codec in codec_of.items():
        share = metrics[f"compress/{name}/encoded_share"]
        assert share < 0.3 if codec == "zstd" else share > 0.8, (name, codec)


@pytest.mark.parametrize("decode_s", [0.0, 1.0])
def test_auto_counts_the_decoding_time_of_shards(make_replay_scheme, far_away, decode_s):
    far_away(1e5, decode_s)
    scheme = make_replay_scheme({"num_envs": 4, "capacity": 400}, num_col_workers=2, col_communication=ASYNC,
                                grad_communication=ASYNC,
                                num_replay_workers=2, train_batch_size=8, compress_data_to_send="auto",
                                runtime="simulated",
                                costs={"message": 0.0})
    while scheme.metrics()["rollouts"] < 60:
        scheme.step()
    share = scheme.metrics()["compress/data/encoded_share"]
    assert share < 0.3 if decode_s else share > 0.8


@pytest.mark.parametrize("settings", [
    {"num_col_workers": 2, "compress_data_to_send": "auto", "compress_weights_to_send": "bf16",
     "col_communication": ASYNC},
    {"num_grad_workers": 2, "compress_grads_to_send": "topk", "grad_communication": ASYNC, "hidden": (64, 64)},
    {"num_grad_workers": 2, "compress_grads_to_send": "int8", "hidden": (64, 64)}], ids=["auto", "topk", "int8"])
def test_a_recorded_run_is_replayed(make_scheme, tmp_path, settings):
    scheme = make_scheme(record=tmp_path / "run.record", **settings)
    after(scheme, 12)
    scheme.stop()
    again = make_scheme(runtime=None, replay=tmp_path / "run.record", **settings)
    while not again.replay_is_over:
        again.step()
    assert again.version == scheme.version


def test_a_user_defined_codec_works_in_a_scheme(make_scheme, monkeypatch):
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


def test_replay_shards_decode_added_rollouts(make_replay_scheme):
    scheme = make_replay_scheme({"num_envs": 4, "capacity": 400}, num_col_workers=2, col_communication=ASYNC,
                                grad_communication=ASYNC, num_replay_workers=2, train_batch_size=8,
                                compress_data_to_send="lz4")
    while scheme.version < 30:
        scheme.step()
    metrics = scheme.metrics()
    assert metrics["compress/data/decode_time_ms"] is not None
    assert metrics["compress/data/bytes_raw"] == metrics["bytes_in_raw"]


def test_compress_data_to_send(make_scheme):
    plain, packed = make_scheme(num_col_workers=2), make_scheme(num_col_workers=2, compress_data_to_send=True)
    assert torch.equal(after(plain, 6)[0], after(packed, 6)[0])
    plain, packed = plain.metrics(), packed.metrics()
    assert plain["bytes_in"] == plain["bytes_in_raw"] > 0
    assert packed["bytes_in_raw"] == plain["bytes_in_raw"]
    assert packed["bytes_in"] != packed["bytes_in_raw"]


def test_compressed_data_is_smaller(make_scheme):
    scheme = make_scheme(num_col_workers=2, compress_data_to_send=True, size=256)
    scheme.step()
    metrics = scheme.metrics()
    assert metrics["bytes_in"] < 0.8 * metrics["bytes_in_raw"]


def test_compress_grads_to_send(make_scheme, monkeypatch):
    received = []
    receive = Requests.poll

    def poll(self, timeout_s):
        for index, answer in receive(self, timeout_s):
            received.extend(type(vector) for vector in getattr(answer, "vectors", ()))
            yield index, answer
    monkeypatch.setattr(Requests, "poll", poll)
    plain = after(make_scheme(num_grad_workers=2), 4)[0]
    assert set(received) == {np.ndarray}
    received.clear()
    packed = after(make_scheme(num_grad_workers=2, compress_grads_to_send=True, size=32), 4)[0]
    assert set(received) == {codecs.Packed}
    assert torch.equal(after(make_scheme(num_grad_workers=2, size=32), 4)[0], packed)
    assert not torch.equal(plain, packed)


@pytest.mark.parametrize(("settings", "share"), [
    ({"runtime": "threads"}, 0.03), ({"runtime": "simulated"}, 0.03),
    ({"runtime": "simulated", "costs": {"byte": 1e-6}}, 1.0)], ids=["threads", "free", "slow"])
def test_auto_encodes_hardly_any_message_that_is_only_passed_on(make_scheme, settings, share):
    scheme = make_scheme(num_grad_workers=2, compress_grads_to_send="auto", **settings)
    while scheme.version < 100:
        scheme.step()
    assert scheme.metrics()["compress/grads/encoded_share"] == pytest.approx(share, abs=0.011)


def test_each_byte_of_a_simulated_message_takes_time(make_scheme):
    """Compare the times of two runs with the bytes that the messages of one of them contain."""
    times = []
    for byte in (0.0, 1e-6):
        scheme = make_scheme(num_grad_workers=2, runtime="simulated", costs={
            "message": 0.0, "step": 0.0, "grad": 0.0, "update": 0.0, "start": 0.0, "byte@GWorker 1": byte})
        for _ in range(20):
            scheme.step()
        times.append(scheme.runtime.now())
    metrics = scheme.metrics()
    of_worker = (metrics["bytes_in"] + metrics["bytes_out"]) / 2  # the other worker has an equal share
    assert times[0] == 0.0
    assert times[1] == pytest.approx(1e-6 * of_worker, rel=0.05)
