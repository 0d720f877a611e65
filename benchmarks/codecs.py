"""Codecs on real arrays, and whether `auto` finds out which way is faster.

    python benchmarks/codecs.py [--seconds 0.3] [--messages 600] [--only cartpole]

Arrays are those of PPO after some updates: gradients, weights and rollouts, on CartPole-v1 (MLP of 64-64) and, if ale-py is
there, on Space Invaders (Nature CNN, 4 frames of 84 x 84; the policy is hardly trained). Each codec is timed in this process
on one thread.

Then messages come from a Ray worker as they do in training: without a codec, with it, and as `auto` decides, in turn, a worker
each. A message takes from its request until it is decoded, on this machine's own "unlimited" link; slower links add what its
bytes take at their rate, computed. `auto_over_best` is the mean time of `auto` over that of the faster of the other two, with
its standard error over ten parts of the run. `codec_share` is what encoding and decoding take of a message.

Progress on stderr; prints one JSON object; asserts nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

LINKS = {"unlimited": float("inf"), "1 Gbit/s": 1.25e8, "100 Mbit/s": 1.25e7}
CODECS = ("lz4", "zstd", "fp16", "bf16", "int8", "topk")


def messages(task: str) -> dict[str, list[np.ndarray]]:
    """Kind -> arrays of one message, after ten updates."""
    from pytorchrl import PPO, GAEBuffer, OnPolicyActor, Scheme, VecEnv

    if task == "cartpole":
        envs: Any = VecEnv.create_factory("CartPole-v1", vec_env_size=8)
    else:
        from pytorchrl.envs import atari_factory
        envs = atari_factory("ALE/SpaceInvaders-v5", 8)
    hidden: dict[str, Any] = {"hidden_sizes": (64, 64)} if task == "cartpole" else {}
    scheme = Scheme(PPO.create_factory(num_epochs=1, num_mini_batch=1),
                    OnPolicyActor.create_factory(envs.observation_space, envs.action_space, **hidden),
                    GAEBuffer.create_factory(128 if task == "cartpole" else 32), envs, seed=1)
    while scheme.version < 10:
        scheme.step()
    worker = scheme.update_worker.local_worker
    worker.get_data()
    gradients = [vector.numpy().copy() for vector in worker.get_grads()[0] if vector is not None]
    weights = list(worker.get_weights().state.values())
    rollout: list[np.ndarray] = []
    worker.local_worker.collect().data.map(lambda tensor: rollout.append(tensor.numpy().copy()))
    scheme.stop()
    return {"rollout": rollout, "gradient": gradients, "weights": weights}


def seconds_of(function: Callable[[], Any], at_least: float) -> float:
    """Median of its times, over that many seconds and five times at least."""
    times: list[float] = []
    while len(times) < 5 or sum(times) < at_least:
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def table(arrays: list[np.ndarray], kind: str, at_least: float) -> dict[str, Any]:
    """Codec -> ratio, speeds in raw MB/s, relative error."""
    from pytorchrl.scheme.codecs import get_codec, num_bytes, unpack
    from pytorchrl.scheme.compression import is_for

    kinds, raw, rows = {"rollout": "data", "gradient": "grads", "weights": "weights"}, num_bytes(arrays), {}
    for name in CODECS:
        codec = get_codec(name)
        if not is_for(kinds[kind], codec):
            continue
        packed = [codec.pack(array) for array in arrays]
        encode, decode = (seconds_of(lambda f=f, xs=xs: [f(x) for x in xs], at_least) for f, xs in (
            (codec.pack, arrays), (unpack, packed)))
        floats = [(array, unpack(own)) for array, own in zip(arrays, packed, strict=True) if array.dtype == np.float32]
        errors = sum(float(np.square(array - back, dtype=np.float64).sum()) for array, back in floats)
        squares = sum(float(np.square(array, dtype=np.float64).sum()) for array, _ in floats)
        rows[name] = {"ratio": raw / num_bytes(packed), "encode_mb_s": raw / encode / 1e6, "decode_mb_s": raw / decode / 1e6,
                      "relative_error": (errors / squares) ** 0.5 if squares else 0.0}
    return {"bytes": raw, "codecs": rows}


class Sender:
    """Makes the same message again and again, encoded as its option says."""

    def __init__(self, arrays: list[np.ndarray], kind: str, option: str | bool) -> None:
        import torch

        from pytorchrl.scheme.compression import Compression, Encoder
        torch.set_num_threads(1)
        self.arrays, self.encoder = arrays, Encoder(Compression.of(kind, option), time.perf_counter)

    def send(self, sequence: int, fetched: tuple[int, float] | None) -> tuple[list[Any], Any]:
        """A message and how it was sent; `fetched` is what the one before took on its way."""
        if fetched is not None:
            self.encoder.fetched(*fetched)
        return self.encoder.pack(
            lambda pack: [pack(array, place) for place, array in enumerate(self.arrays)], sequence)


def over_link(arrays: list[np.ndarray], kind: str, name: str, rate: float, number: int) -> dict[str, Any]:
    """Milliseconds a message by way, the share that was encoded, and `auto` over the better of the two others."""
    import ray

    from pytorchrl.scheme.codecs import own_tensor

    options: dict[str, str | bool] = {"none": False, name: name, "auto": f"auto:{name}"}
    senders = {way: ray.remote(num_cpus=0)(Sender).remote(arrays, kind, option) for way, option in options.items()}
    ms: dict[str, list[float]] = {way: [] for way in options}
    encoded = dict.fromkeys(options, 0)
    codec_s: dict[str, float] = dict.fromkeys(options, 0.0)
    fetched: dict[str, tuple[int, float] | None] = dict.fromkeys(options)
    for sequence in range(number + 1):  # the first brings code and connections
        for way, sender in senders.items():
            start = time.perf_counter()
            reference = sender.send.remote(sequence, fetched[way])
            ray.wait([reference], fetch_local=False)
            made = time.perf_counter()
            message, sent = ray.get(reference)
            come = time.perf_counter()
            for array in message:
                own_tensor(array)
            end, transfer = time.perf_counter(), sent.sent / rate
            fetched[way] = sequence, come - made + transfer
            if sequence:
                ms[way].append(1e3 * (end - start + transfer))
                encoded[way] += sent.is_encoded
                codec_s[way] += sent.encode_s + (end - come) * sent.is_encoded
    for sender in senders.values():
        ray.kill(sender)
    best = min(("none", name), key=lambda way: sum(ms[way]))
    parts = [sum(auto) / sum(other) for auto, other in zip(tenths(ms["auto"]), tenths(ms[best]), strict=True)]
    return {**{way: {"ms": statistics.mean(times), "encoded_share": encoded[way] / number,
                     "codec_share": 1e3 * codec_s[way] / sum(times)} for way, times in ms.items()},
            "best": best, "auto_over_best": sum(ms["auto"]) / sum(ms[best]),
            "standard_error": statistics.stdev(parts) / len(parts) ** 0.5}


def tenths(values: list[float]) -> list[list[float]]:
    """Ten parts of a list, one after the other."""
    return [values[len(values) * part // 10:len(values) * (part + 1) // 10] for part in range(10)]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=0.3, help="of timing each codec at least")
    parser.add_argument("--messages", type=int, default=600, help="over each link, each way, at least 10")
    parser.add_argument("--only", choices=("cartpole", "spaceinvaders"))
    arguments = parser.parse_args()
    import ray
    import torch
    torch.set_num_threads(1)
    ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level="ERROR", num_cpus=2)
    tasks = [arguments.only] if arguments.only else ["cartpole", "spaceinvaders"]
    result: dict[str, Any] = {}
    for task in tasks:
        try:
            found = messages(task)
        except ImportError as error:
            print(f"{task} is left out: {error}", file=sys.stderr)
            continue
        result[task] = {kind: table(arrays, kind, arguments.seconds) for kind, arrays in found.items()}
        for kind, option, name in (("rollout", "data", "lz4"), ("gradient", "grads", "bf16"), ("weights", "weights", "bf16")):
            rows = result[task][kind]["links"] = {}
            for link, rate in LINKS.items():
                rows[link] = over_link(found[kind], option, name, rate, arguments.messages)
                print(task, kind, link, json.dumps(rows[link]), file=sys.stderr, flush=True)
    ray.shutdown()
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
