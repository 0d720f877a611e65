"""Measure codecs on real arrays, and check whether `auto` uses a codec exactly when that is faster.

    python benchmarks/codecs.py [--seconds 0.3] [--messages 600] [--only cartpole] [--links unlimited,...]
    [--namespaces]

The arrays are gradients, weights and rollouts of PPO after ten updates, on CartPole-v1 (MLP of 64-64) and, if ale-py is
installed, on Space Invaders (Nature CNN, 4 frames of 84 x 84). Each codec is timed in this process on one thread.

Then Ray workers send gradients and rollouts, and receive weights, with the same code as in training. There are three
variants: without a codec, always with a codec, and with `auto`. Each variant has its own worker, and the variants
alternate in random order. The time of a message is measured from its request until it is decoded. The link "unlimited"
is the connection within this machine; for a slower link, the worker also sleeps for the time that the bytes would need.
With `--namespaces` (Linux, as root), the workers run on a second node of a Ray cluster, in a separate network
namespace. The kernel limits the rate of the link to this namespace in both directions, so the workers need not sleep.

`auto_over_best` is the mean time with `auto` divided by the mean time of the faster of the other two variants;
`standard_error` is its standard error over ten sections of the run. `codec_share` is the share of a message's time that
encoding and decoding take.

The script shows its progress on stderr, prints one JSON object, and asserts nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from results import print_result

from pytorchrl.scheme.transport.link import Peer as LinkEnd

LINKS = {"unlimited": float("inf"), "1 Gbit/s": 1.25e8, "100 Mbit/s": 1.25e7}
SPACE, NEAR, FAR, PORT = "prl-codecs", "10.77.0.1", "10.77.0.2", 6397
CODECS = ("lz4", "zstd", "fp16", "bf16", "int8", "topk")


def messages(task: str) -> dict[str, list[np.ndarray]]:
    """Return the arrays of one message of each kind, after ten updates."""
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
    """Return the median duration of a call of `function`, measured over at least `at_least` seconds and five calls."""
    times: list[float] = []
    while len(times) < 5 or sum(times) < at_least:
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def table(arrays: list[np.ndarray], kind: str, at_least: float) -> dict[str, Any]:
    """Return the compression ratio, the speeds in MB/s of uncompressed data, and the relative error of each codec."""
    from pytorchrl.scheme.transport.codecs import decode_array, get_codec, num_bytes
    from pytorchrl.scheme.transport.encoder import is_for

    kinds, raw, rows = {"rollout": "data", "gradient": "grads", "weights": "weights"}, num_bytes(arrays), {}
    for name in CODECS:
        codec = get_codec(name)
        if not is_for(kinds[kind], codec):
            continue
        packed = [codec.pack(array) for array in arrays]
        encode, decode = (seconds_of(lambda f=f, xs=xs: [f(x) for x in xs], at_least) for f, xs in (
            (codec.pack, arrays), (decode_array, packed)))
        floats = [(array, decode_array(own)) for array, own in zip(arrays, packed, strict=True)
                  if array.dtype == np.float32]
        errors = sum(float(np.square(array - back, dtype=np.float64).sum()) for array, back in floats)
        squares = sum(float(np.square(array, dtype=np.float64).sum()) for array, _ in floats)
        rows[name] = {"ratio": raw / num_bytes(packed), "encode_mb_s": raw / encode / 1e6,
                      "decode_mb_s": raw / decode / 1e6,
                      "relative_error": (errors / squares) ** 0.5 if squares else 0.0}
    return {"bytes": raw, "codecs": rows}


class Peer(LinkEnd):
    """A worker that sends the same message repeatedly, or receives weights; `option` selects the codec for sending.

    For each message in either direction, the worker sleeps for the time that the bytes would need on the link.
    """

    def __init__(self, arrays: list[np.ndarray], kind: str, option: str | bool, rate: float) -> None:
        import torch

        from pytorchrl.scheme.transport.encoder import Compression, Encoder
        torch.set_num_threads(1)
        self.arrays, self._rate = arrays, rate
        self.encoder = Encoder(None if kind == "weights" else Compression.of(kind, option), time.perf_counter)

    def echo(self, payload: np.ndarray) -> np.ndarray:
        """Sleep for the time that `payload` would need for a round trip over the link, and return it."""
        time.sleep(2 * payload.nbytes / self._rate)
        return super().echo(payload)

    def send(self) -> tuple[list[Any], Any, float]:
        """Return an encoded message, its traffic statistics, and the seconds that encoding took."""
        start = time.perf_counter()
        message, sent = self.encoder.pack(lambda pack: [pack(array, place) for place, array in enumerate(self.arrays)])
        seconds = time.perf_counter() - start
        time.sleep(sent.sent / self._rate)
        return message, sent, seconds

    def take(self, weights: Any) -> tuple[float, float]:
        """Receive weights; return the seconds that decoding or copying took, twice.

        The caller uses the first number. `Requests` reads the last element of each result as the seconds of work.
        """
        from pytorchrl.scheme.transport.receive import receive_tensor

        time.sleep(weights.num_bytes / self._rate)
        start = time.perf_counter()
        for array in weights.state.values():
            receive_tensor(array)
        seconds = time.perf_counter() - start
        return seconds, seconds


class Namespaces:
    """A Ray cluster of two nodes. The second node is in a network namespace, and a link connects the two nodes."""

    def __init__(self) -> None:
        ip = ["ip", "netns", "exec", SPACE, "ip"]
        for command in (
                ["ip", "netns", "add", SPACE], ["ip", "link", "add", "prl0", "type", "veth", "peer", "name", "prl1",
                                                "netns", SPACE],
                ["ip", "address", "add", f"{NEAR}/24", "dev", "prl0"], ["ip", "link", "set", "prl0", "up"],
                [*ip, "address", "add", f"{FAR}/24", "dev", "prl1"], [*ip, "link", "set", "prl1", "up"], [*ip, "link",
                    "set", "lo", "up"]):
            subprocess.run(command, check=True)
        start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=2",
                 "--disable-usage-stats"]
        self._nodes = [subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for command in (
            [*start, "--head", f"--node-ip-address={NEAR}", f"--port={PORT}", "--include-dashboard=false"],
            ["ip", "netns", "exec", SPACE, *start, f"--address={NEAR}:{PORT}", f"--node-ip-address={FAR}",
             '--resources={"far": 100}'])]

    def connect(self) -> None:
        """Connect this process to the cluster once both nodes are up."""
        import ray

        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(Exception):  # the cluster may not be up yet
                if not ray.is_initialized():
                    ray.init(address=f"{NEAR}:{PORT}", log_to_driver=False, logging_level="ERROR",
                             _node_ip_address=NEAR)
            if ray.is_initialized() and ray.cluster_resources().get("far"):
                return
            if time.monotonic() > deadline:
                raise SystemExit("the nodes did not connect to each other within a minute")
            time.sleep(0.5)

    def limit(self, rate: float) -> None:
        """Limit the link to `rate` bytes per second in both directions."""
        for where, device in (([], "prl0"), (["ip", "netns", "exec", SPACE], "prl1")):
            subprocess.run([*where, "tc", "qdisc", "del", "dev", device, "root"], check=False,
                           stderr=subprocess.DEVNULL)
            if rate < float("inf"):
                # The burst is the number of bytes that the link sends in one millisecond, but at least a few packets.
                burst = max(16_000, int(rate / 1000))
                subprocess.run([*where, "tc", "qdisc", "add", "dev", device, "root", "tbf", "rate",
                                f"{int(8 * rate)}bit",
                                "burst", f"{burst}b", "latency", "400ms"], check=True)

    def stop(self) -> None:
        """Stop both nodes, and remove the link."""
        for node in reversed(self._nodes):
            node.terminate()
            node.wait(30)
        subprocess.run(["ip", "netns", "delete", SPACE], check=False)


@contextlib.contextmanager
def ray_for(namespaces: bool) -> Iterator[Namespaces | None]:
    """Start Ray and yield None or, if `namespaces` is true, start two Ray nodes and yield their `Namespaces`."""
    if namespaces:
        # Ray reads this variable during its import. Connections need no token, because only this machine can open them.
        os.environ["RAY_AUTH_MODE"] = "disabled"
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


class Line:
    """The messages of one variant to or from its worker, sent by the same code as in training."""

    def __init__(self, arrays: list[np.ndarray], kind: str, option: str | bool, rate: float,
                 resources: dict[str, float]) -> None:
        from pytorchrl.runtime import Journal
        from pytorchrl.runtime.ray.runtime import RayRuntime
        from pytorchrl.scheme.supervision.supervisor import Supervisor
        from pytorchrl.scheme.transport.encoder import Compression
        from pytorchrl.scheme.transport.link import measure_links
        from pytorchrl.scheme.transport.requests import Requests
        from pytorchrl.scheme.transport.weight_sync import WeightSync

        self._kind, self._runtime = kind, RayRuntime()
        self._state = {str(place): array for place, array in enumerate(arrays)}
        self._handle = self._runtime.start_actor(Peer, {"arrays": arrays, "kind": kind, "option": option, "rate": rate},
                                                 name="peer", resources={"num_cpus": 0, **resources})
        supervisor = Supervisor([self._handle], lambda index: None, self._runtime,
                                Supervisor.Options(on_worker_failure="raise", worker_timeout_s=300.0))
        self._requests: Requests[Any] = Requests(
            self._runtime, supervisor, Journal(), lambda answer: answer[-1], lambda answer: (), lambda index: None,
            lambda index: None)
        self._weight_sync = WeightSync(
            self._runtime, Compression.of("weights",
                                          option) if kind == "weights" else None, self._state, [self._handle])
        self.link_s, self.probe_s = 0.0, 0.0
        if str(option).startswith("auto"):
            # This call returns once the worker has started.
            self._runtime.get(self._handle.submit(Peer.echo, np.zeros(1, np.uint8)), 300.0)
            start = time.perf_counter()
            self.link_s, = measure_links(self._runtime, [self._handle])
            self.probe_s = time.perf_counter() - start
            self._handle.submit(Peer.set_link, self.link_s)
        self.ms: list[float] = []
        self.codec_s, self.encoded = 0.0, 0

    def exchange(self, sequence: int) -> None:
        """Exchange one message, and measure the time.

        The exchange of the first message is not measured, because it also loads code and opens connections.
        """
        start = time.perf_counter()
        codec_s, encoded = self._push(sequence) if self._kind == "weights" else self._pull()
        if sequence:
            self.ms.append(1e3 * (time.perf_counter() - start))
            self.codec_s += codec_s
            self.encoded += encoded

    def _answer(self, future: Any) -> Any:
        self._requests.add(0, future)
        answers: list[Any] = []
        while not answers:
            answers = [answer for _, answer in self._requests.poll(1.0)]
        return answers[0]

    def _pull(self) -> tuple[float, bool]:
        from pytorchrl.scheme.transport.receive import receive_tensor

        message, sent, _ = self._answer(self._handle.submit(Peer.send))
        come = time.perf_counter()
        for array in message:
            receive_tensor(array)
        return sent.encode_s + (time.perf_counter() - come) * sent.is_encoded, sent.is_encoded

    def _push(self, sequence: int) -> tuple[float, bool]:
        from pytorchrl.scheme.transport.messages import Weights

        before = self._weight_sync.traffic
        self._weight_sync.put(Weights(sequence, self._state))
        self._weight_sync.count()
        decode_s, _ = self._answer(self._handle.submit(Peer.take, self._weight_sync.reference))
        after = self._weight_sync.traffic
        encoded = after.encoded > before.encoded
        return after.encode_s - before.encode_s + decode_s * encoded, encoded

    def stop(self) -> None:
        """Stop the worker."""
        self._runtime.kill(self._handle)


def over_link(
        arrays: list[np.ndarray], kind: str, name: str, rate: float, number: int, resources: dict[str, float],
) -> dict[str, Any]:
    """Return the milliseconds per message and the share of encoded messages of each variant, and `auto_over_best`."""
    lines = {way: Line(arrays, kind, option, rate, resources)
             for way, option in {"none": False, name: name, "auto": f"auto:{name}"}.items()}
    rng = random.Random(0)
    for sequence in range(number + 1):
        # The order is random, because the position of a variant in the order affects its time.
        for line in rng.sample(list(lines.values()), len(lines)):
            line.exchange(sequence)
    for line in lines.values():
        line.stop()
    best = min(("none", name), key=lambda way: sum(lines[way].ms))
    parts = [sum(auto) / sum(other) for auto, other in zip(tenths(lines["auto"].ms), tenths(lines[best].ms),
                                                           strict=True)]
    import scipy.stats  # imported here, so that the measured processes do not load it

    return {**{way: {"ms": statistics.mean(line.ms), "encoded_share": line.encoded / number,
                     "codec_share": 1e3 * line.codec_s / sum(line.ms)} for way, line in lines.items()},
            "link_mb_s": 1e-6 / lines["auto"].link_s if lines["auto"].link_s else None,
            "probe_ms": 1e3 * lines["auto"].probe_s,
            "best": best, "auto_over_best": sum(lines["auto"].ms) / sum(lines[best].ms),
            "standard_error": float(scipy.stats.sem(parts))}


def tenths(values: list[float]) -> list[list[float]]:
    """Split a list into ten consecutive sections."""
    return [values[len(values) * part // 10:len(values) * (part + 1) // 10] for part in range(10)]


def measure(arguments: argparse.Namespace, cluster: Namespaces | None) -> dict[str, Any]:
    """Return the measurements of codecs and links for all tasks."""
    tasks = [arguments.only] if arguments.only else ["cartpole", "spaceinvaders"]
    result: dict[str, Any] = {}
    for task in tasks:
        try:
            found = messages(task)
        except ImportError as error:
            print(f"{task} is left out: {error}", file=sys.stderr)
            continue
        result[task] = {kind: table(arrays, kind, arguments.seconds) for kind, arrays in found.items()}
        for kind, option, name in (("rollout", "data", "lz4"), ("gradient", "grads", "bf16"),
                                   ("weights", "weights", "bf16")):
            rows = result[task][kind]["links"] = {}
            for link in arguments.links:
                rate = LINKS[link]
                if cluster is not None:
                    cluster.limit(rate)
                rows[link] = over_link(found[kind], option, name, rate if cluster is None else float("inf"),
                                       arguments.messages,
                                       {} if cluster is None else {"far": 1})
                print(task, kind, link, json.dumps(rows[link]), file=sys.stderr, flush=True)
    return result


def main() -> None:
    """Parse the command line, measure, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=0.3, help="minimum seconds to time each codec")
    parser.add_argument("--messages", type=int, default=600, help="messages of each variant per link, at least 10")
    parser.add_argument("--only", choices=("cartpole", "spaceinvaders"))
    parser.add_argument("--links", type=lambda text: text.split(","), default=list(LINKS),
                        help="some of " + ", ".join(LINKS))
    parser.add_argument("--namespaces", action="store_true", help="use links between network namespaces; needs root")
    arguments = parser.parse_args()
    if unknown := set(arguments.links) - set(LINKS):
        parser.error(f"--links {', '.join(sorted(unknown))}: there are {', '.join(LINKS)}")
    import torch
    torch.set_num_threads(1)
    with ray_for(arguments.namespaces) as cluster:
        result = measure(arguments, cluster)
    print_result(result)


if __name__ == "__main__":
    main()
