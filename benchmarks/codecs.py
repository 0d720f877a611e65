"""Codecs on real arrays, and whether `auto` finds out which way is faster.

    python benchmarks/codecs.py [--seconds 0.3] [--messages 600] [--only cartpole] [--namespaces]

Arrays are those of PPO after some updates: gradients, weights and rollouts, on CartPole-v1 (MLP of 64-64) and, if ale-py is
there, on Space Invaders (Nature CNN, 4 frames of 84 x 84; the policy is hardly trained). Each codec is timed in this process
on one thread.

Then messages come from a Ray worker as they do in training: without a codec, with it, and as `auto` decides, in turn, a worker
each. A message takes from its request until it is decoded, on this machine's own "unlimited" link; slower links add what its
bytes take at their rate, computed. With `--namespaces` (Linux, as root) the workers are on a second node of a Ray cluster, in a
network namespace of its own, behind a link whose rate the kernel limits both ways: then nothing is computed. `auto_over_best`
is the mean time of `auto` over that of the faster of the other two, with its standard error over ten parts of the run.
`codec_share` is what encoding and decoding take of a message.

Progress on stderr; prints one JSON object; asserts nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

LINKS = {"unlimited": float("inf"), "1 Gbit/s": 1.25e8, "100 Mbit/s": 1.25e7}
SPACE, NEAR, FAR, PORT = "prl-codecs", "10.77.0.1", "10.77.0.2", 6397
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


class Namespaces:
    """A Ray cluster of two nodes, the second one in a network namespace, and the link between them."""

    def __init__(self) -> None:
        ip = ["ip", "netns", "exec", SPACE, "ip"]
        for command in (
                ["ip", "netns", "add", SPACE], ["ip", "link", "add", "prl0", "type", "veth", "peer", "name", "prl1", "netns", SPACE],
                ["ip", "address", "add", f"{NEAR}/24", "dev", "prl0"], ["ip", "link", "set", "prl0", "up"],
                [*ip, "address", "add", f"{FAR}/24", "dev", "prl1"], [*ip, "link", "set", "prl1", "up"], [*ip, "link", "set", "lo", "up"]):
            subprocess.run(command, check=True)
        start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=2", "--disable-usage-stats"]
        self._nodes = [subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for command in (
            [*start, "--head", f"--node-ip-address={NEAR}", f"--port={PORT}", "--include-dashboard=false"],
            ["ip", "netns", "exec", SPACE, *start, f"--address={NEAR}:{PORT}", f"--node-ip-address={FAR}", '--resources={"far": 100}'])]

    def connect(self) -> None:
        """Join the cluster, once both nodes are there."""
        import ray

        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(Exception):  # it is not up yet
                if not ray.is_initialized():
                    ray.init(address=f"{NEAR}:{PORT}", log_to_driver=False, logging_level="ERROR", _node_ip_address=NEAR)
            if ray.is_initialized() and ray.cluster_resources().get("far"):
                return
            if time.monotonic() > deadline:
                raise SystemExit("the nodes did not find one another within a minute")
            time.sleep(0.5)

    def limit(self, rate: float) -> None:
        """Bytes a second, both ways."""
        for where, device in (([], "prl0"), (["ip", "netns", "exec", SPACE], "prl1")):
            subprocess.run([*where, "tc", "qdisc", "del", "dev", device, "root"], check=False, stderr=subprocess.DEVNULL)
            if rate < float("inf"):
                burst = max(16_000, int(rate / 1000))  # a millisecond's worth, or some packets
                subprocess.run([*where, "tc", "qdisc", "add", "dev", device, "root", "tbf", "rate", f"{int(8 * rate)}bit",
                                "burst", f"{burst}b", "latency", "400ms"], check=True)

    def stop(self) -> None:
        """End both nodes, and take the link away."""
        for node in reversed(self._nodes):
            node.terminate()
            node.wait(30)
        subprocess.run(["ip", "netns", "delete", SPACE], check=False)


@contextlib.contextmanager
def ray_for(namespaces: bool) -> Iterator[Namespaces | None]:
    """A Ray of this machine, or of two namespaces of it."""
    if namespaces:
        os.environ["RAY_AUTH_MODE"] = "disabled"  # read when Ray is imported; nobody else is in these namespaces
    import ray

    if not namespaces:
        ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level="ERROR", num_cpus=2)
        yield None
        ray.shutdown()
        return
    cluster = Namespaces()
    try:
        cluster.connect()
        yield cluster
        ray.shutdown()
    finally:
        cluster.stop()


def over_link(
        arrays: list[np.ndarray], kind: str, name: str, rate: float, number: int, resources: dict[str, float]) -> dict[str, Any]:
    """Milliseconds a message by way, the share that was encoded, and `auto` over the better of the two others."""
    import ray

    from pytorchrl.scheme.codecs import own_tensor

    options: dict[str, str | bool] = {"none": False, name: name, "auto": f"auto:{name}"}
    senders = {way: ray.remote(num_cpus=0, resources=resources)(Sender).remote(arrays, kind, option) for way, option in options.items()}
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


def measure(arguments: argparse.Namespace, cluster: Namespaces | None) -> dict[str, Any]:
    """Tables and links of all tasks."""
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
                if cluster is not None:
                    cluster.limit(rate)
                rows[link] = over_link(found[kind], option, name, rate if cluster is None else float("inf"), arguments.messages,
                                       {} if cluster is None else {"far": 1})
                print(task, kind, link, json.dumps(rows[link]), file=sys.stderr, flush=True)
    return result


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=0.3, help="of timing each codec at least")
    parser.add_argument("--messages", type=int, default=600, help="over each link, each way, at least 10")
    parser.add_argument("--only", choices=("cartpole", "spaceinvaders"))
    parser.add_argument("--namespaces", action="store_true", help="links between network namespaces; as root")
    arguments = parser.parse_args()
    import torch
    torch.set_num_threads(1)
    with ray_for(arguments.namespaces) as cluster:
        result = measure(arguments, cluster)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
