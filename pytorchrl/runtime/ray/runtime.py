"""Run workers as Ray actors. Only this module imports Ray, and only when the first remote worker starts.

Ray is told never to restart actors or retry calls: a restarted actor would have lost its state, and a retried call
would collect data a second time. If a call fails, its `Outcome` contains the error, so that no other module has to
handle exceptions of Ray.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import torch

from pytorchrl.agent.options import option
from pytorchrl.errors import (
    InsufficientResourcesError,
    RayConnectionError,
    RayDiedError,
    StartError,
    WorkerDiedError,
    WorkerLostError,
)
from pytorchrl.runtime.base import Future, FutureByName, Handle, Outcome, R, Runtime, T, W, is_default
from pytorchrl.runtime.collective import propose_address
from pytorchrl.runtime.machine import check_machine, no_gpu, sharing_of, this_machine
from pytorchrl.runtime.ray.connection import Connection
from pytorchrl.runtime.ray.host import Answer, Enclosed, make_host
from pytorchrl.runtime.ray.resource_fitting import RAY_KEYS, group_of, room_for, shown, shrunk_to
from pytorchrl.runtime.ray.start import LOOPBACK
from pytorchrl.runtime.threads import ThreadRuntime
from pytorchrl.support.terminal import get_logger
from pytorchrl.support.untyped import Untyped

logger = get_logger(__name__)

FromRay: TypeAlias = Untyped
"""An object of Ray (its module, an actor, a reference or a placement group), which lacks a useful static type."""

# Shared values up to this size (in bytes) are sent with each request. Reading a value from the object store instead
# would take 0.7 ms, ten times as long as sending the value. The limit must be below 100 KiB, because Ray itself moves
# larger arguments to the object store.
_MAX_ENCLOSED_BYTES = 90_000
# Interval in seconds at which a wait checks whether a process of Ray has ended.
_LOOK_INTERVAL_S = 0.25


class RayRuntime(Runtime):
    """Runtime whose workers are Ray actors.

    Args:
        options: Options of the runtime; None: the defaults.
        seed: Seed of the experiment, which also determines when randomly injected faults occur.
        is_recording: Whether workers record the order of timing-dependent events.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(Runtime.Options):
        """Options of the Ray runtime."""

        address: str | None = option(
            None, help="Address of a Ray cluster, such as \"10.0.0.1:6379\". None: the cluster that this process "
            "already uses, else the cluster at RAY_ADDRESS, else a local cluster, which the run starts.")
        placement: str | None = option(
            None, choices=(None, "colocate"),
            help="None: Ray spreads all workers over the nodes. \"colocate\": each remote gradient worker runs on one "
            "node with its own collection workers and replay shards.")

    name = "ray"
    options: Options

    def __init__(self, options: Options | None = None, *, seed: int = 0, is_recording: bool = False) -> None:
        super().__init__(options, seed=seed, is_recording=is_recording)
        self._seed = seed
        self._ray: FromRay = None
        self._host: FromRay = None
        self._connection: Connection | None = None  # None: not connected yet, or the user has connected this process
        # For each actor, its requested resources, and a reference that is ready once the actor's process runs.
        self._actors: dict[FromRay, tuple[dict[str, float], FromRay]] = {}
        # With "colocate", the total resources of a gradient worker and the workers that it starts; otherwise empty.
        self._bundle: dict[str, float] = {}
        # The placement group of each gradient worker, by the worker's name. A replacement of the worker reuses it.
        self._groups: dict[str, FromRay] = {}
        self._threads: ThreadRuntime | None = None

    def __reduce__(self) -> tuple[partial[RayRuntime], tuple[Options]]:
        """Pickle the constructor's arguments without `address`, because the receiving process already uses Ray."""
        return partial(RayRuntime, seed=self._seed,
                       is_recording=self.is_recording), (replace(self.options, address=None),)

    def _connect(self) -> FromRay:
        if self._ray is not None:
            return self._ray
        if self._starts_a_local_ray():  # announce before Ray is imported, which takes seconds
            self._tell("starting Ray ...")
        # Ray reads RAY_AUTH_MODE when it is imported. If the variable were set later, Ray's processes would expect a
        # token that this process does not send.
        if "ray" not in sys.modules:
            os.environ.setdefault("RAY_AUTH_MODE", "token")
        elif "RAY_AUTH_MODE" not in os.environ:
            logger.info("ray was imported before the first scheme that uses it; without RAY_AUTH_MODE=token in the "
                        "environment, its calls are not authenticated")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")
        # Without this setting, a call to Ray after `close` would start a Ray instance with Ray's own defaults. Such a
        # call can happen if a start was interrupted.
        os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
        # Ray's native handler of SIGTERM would abort the process. This setting does not affect Python's signal handlers
        # or the stacks that faulthandler prints after a crash.
        os.environ.setdefault("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", "1")
        try:
            import ray as ray_module
        except ImportError as error:
            raise StartError(f"runtime='ray' needs Ray, which cannot be imported ({error}); install the package `ray`, "
                             "or give runtime='processes'") from error

        ray: FromRay = ray_module

        if ray.is_initialized():
            self._check_is_wanted(ray.get_runtime_context().gcs_address, ray.util.get_node_ip_address())
            self._connection = Connection.share()
        else:
            address = self.options.address or os.environ.get("RAY_ADDRESS")
            if address in (None, "local"):
                self._connection = Connection.start(ray, self._tell)
            else:
                self._tell(f"joining the Ray cluster at {address} ...")
                self._connection = Connection.join(ray, address)
        self._host = ray.remote(concurrency_groups={"control": 1})(make_host(ray))
        self._ray = ray
        return ray

    def _check_is_wanted(self, running: str, own_ip: str) -> None:
        """Raise `RayConnectionError` if the option `address` names a different Ray cluster than this process uses.

        The address of the cluster in use is `running`.
        """
        wanted = self.options.address
        if wanted is None or wanted in ("auto", "local") or wanted.startswith("ray://"):
            return
        if _place_of(wanted, own_ip) != _place_of(running, own_ip):
            raise RayConnectionError(
                f"address={wanted!r}, but this process already uses the Ray cluster at {running!r}; call "
                "ray.shutdown() before the first step, or leave address out to use that cluster")

    def _starts_a_local_ray(self) -> bool:
        ray = sys.modules.get("ray")
        is_running = self._ray is not None or (ray is not None and ray.is_initialized())
        return not is_running and (self.options.address or os.environ.get("RAY_ADDRESS")) in (None, "local")

    def _tell(self, text: str) -> None:
        logger.info("%s", text)
        if self.announce is not None:
            self.announce(text)

    def start_actor(self, cls: type[W], params: Mapping[str, object], *, name: str,
                    resources: Mapping[str, float]) -> Handle[W]:
        """Start `cls(**params)` as an actor; Ray neither restarts the actor nor retries its calls.

        Raises:
            RayDiedError: One of Ray's own processes has ended.
        """
        self._connect()
        if self._problem:
            raise RayDiedError(self._problem)
        options = dict(resources)
        options.pop("object_store_memory", None)  # the object store belongs to the node, not to an actor
        group = self._group_of(name)
        asked = self._bundle if name in self._groups else {} if group else {
            RAY_KEYS.get(key, key): amount for key, amount in options.items()}
        custom = {key: options.pop(key) for key in list(options) if key not in ("num_cpus", "num_gpus", "memory")}
        actor = self._host.options(
            max_restarts=0, max_task_retries=0, scheduling_strategy="SPREAD" if group is None else group,
            resources=custom or None,
            **options).remote(cls, dict(params))
        self._actors[actor] = asked, actor.up.remote()
        return Handle(self, name, actor)

    def _group_of(self, name: str) -> FromRay:
        """Return the scheduling strategy that binds an actor to its placement group; None if it has no group."""
        if self.options.placement != "colocate":
            return None
        # In the process of a gradient worker, the current group is the group of that worker.
        group = self._ray.util.get_current_placement_group()
        if self._bundle and name.startswith("GWorker"):
            if name not in self._groups:
                self._groups[name] = self._ray.util.placement_group([self._bundle], strategy="STRICT_PACK")
            group = self._groups[name]
        strategies = self._ray.util.scheduling_strategies
        return group and strategies.PlacementGroupSchedulingStrategy(group, 0, placement_group_capture_child_tasks=True)

    def lacks_room(self, handle: Handle[W]) -> str:
        """Return a description of the shortage if an actor waits because no node has enough free resources; else "".

        The description contains the resources that the actor requests, and the free resources of the nodes.
        """
        if self._problem:
            return ""
        asked, up = self._actors[handle.native]
        group = self._groups.get(handle.name)
        if self._ray.wait([up], timeout=0)[0] or (group is not None and group.wait(1)):
            return ""
        nodes = self._ray._private.state.available_resources_per_node().values()
        if any(all(node.get(key, 0.0) >= amount for key, amount in asked.items()) for node in nodes):
            return ""
        free = "; ".join(shown({key: node.get(key, 0.0) for key in asked}) for node in nodes)
        return f"it requests {shown(asked)}, but the {len(nodes)} nodes have only {free} free"

    def submit(self, handle: Handle[W], method: str, args: tuple[object, ...],
               kwargs: Mapping[str, object]) -> FutureByName:
        """Enqueue a call of an actor's method; arguments that `put` returned are replaced by the stored values."""
        return Future(handle.name, None if self._problem else handle.native.call.remote(method, *args, **kwargs))

    def signal(self, handle: Handle[W], method: str, args: tuple[object, ...],
               kwargs: Mapping[str, object]) -> FutureByName:
        """Run a short call in the actor's concurrency group "control", even while the actor runs another call."""
        return Future(handle.name, None if self._problem else handle.native.signal.remote(method, *args, **kwargs))

    def wait(self, futures: Sequence[Future[R]], timeout_s: float) -> list[Future[R]]:
        """Wait at most `timeout_s` seconds for an outcome, and return all futures that have one."""
        references = [future.native for future in futures]
        if timeout_s:
            if not self._finished(references, 1, timeout_s):
                return []
            if len(futures) == 1:
                return list(futures)
        done = set(self._finished(references, len(references), 0.0))
        return [future for future in futures if future.native in done]

    def _finished(self, references: list[T], count: int, timeout_s: float) -> list[T]:
        """Wait until `count` calls have ended or `timeout_s` seconds have passed; return the calls that have ended.

        If a process of Ray has ended, return all calls, because none of them can continue.
        """
        deadline = self.now() + timeout_s
        while not self._problem:
            left = max(0.0, deadline - self.now())
            ready: list[T] = self._ray.wait(
                references, num_returns=count, timeout=min(left, self._look_interval_s), fetch_local=False)[0]
            if len(ready) >= count or left <= self._look_interval_s:
                return ready
        return references

    @property
    def _problem(self) -> str:
        """A sentence about a process of Ray that has ended; "" if none has ended."""
        return "" if self._connection is None else self._connection.problem

    @property
    def _look_interval_s(self) -> float:
        """Seconds between two checks that the processes of Ray are alive; infinite if they are not checked."""
        return math.inf if self._connection is None or not self._connection.is_watched else _LOOK_INTERVAL_S

    def outcome(self, future: Future[R], timeout_s: float) -> Outcome[R]:
        """Return the outcome of a call; arrays in its value are read-only, because processes share them."""
        exceptions, deadline = self._ray.exceptions, self.now() + timeout_s
        while not self._problem and future.native is not None:
            left = max(0.0, deadline - self.now())
            try:
                value = self._ray.get(future.native, timeout=min(left, self._look_interval_s))
                return value.outcome(future.worker) if isinstance(value, Answer) else Outcome(future.worker, value)
            except exceptions.RayTaskError as error:
                cause = error.cause if isinstance(getattr(error, "cause", None), BaseException) else error
                cause.__cause__ = None if cause is error else error  # the text of `error` contains the traceback
                return Outcome(future.worker, error=cause)
            except exceptions.GetTimeoutError:
                if left <= self._look_interval_s:
                    return Outcome(future.worker, error=WorkerLostError(
                        f"{future.worker} did not answer within {timeout_s:.1f} s"))
            except exceptions.RayError as error:
                lost = WorkerDiedError(f"{future.worker} is lost: {type(error).__name__}: {_reason(error)}")
                lost.__cause__ = error
                return Outcome(future.worker, error=lost)
        return Outcome(future.worker, error=RayDiedError(self._problem))

    def get_started(self, kind: str, futures: Sequence[Future[R]], timeout_s: float) -> list[Outcome[R]]:
        """Wait until new workers have answered their first calls, and return the outcomes of these calls.

        While waiting, the method announces how many workers have started.
        """
        deadline, references, num_up = self.now() + timeout_s, [future.native for future in futures], 0
        while num_up < len(references):
            self._tell(f"started {num_up} of {len(references)} {kind} ...")
            ready = self._finished(references, num_up + 1, max(0.0, deadline - self.now()))
            if len(ready) <= num_up:  # the deadline has passed
                break
            num_up = len(self._finished(references, len(references), 0.0))
        else:
            if references:
                self._tell(f"started {num_up} of {num_up} {kind}")
        return self.get_all(futures, max(0.0, deadline - self.now()))

    def put(self, value: T) -> T:
        """Return an object that can be passed to calls in place of the value; the value is pickled only once.

        A large value is stored in this node's object store. A small value is sent with each call.

        Raises:
            RayDiedError: One of Ray's own processes has ended.
        """
        ray, buffers = self._connect(), list[pickle.PickleBuffer]()
        pickled = ray.cloudpickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        if len(pickled) + sum(buffer.raw().nbytes for buffer in buffers) <= _MAX_ENCLOSED_BYTES:
            enclosed: FromRay = Enclosed(pickled, [bytes(buffer.raw()) for buffer in buffers])
            return enclosed
        if self._problem:
            raise RayDiedError(self._problem)
        return ray.put(value)

    def kill(self, handle: Handle[W], timeout_s: float = 5.0) -> bool:
        """Kill the actor's process; return whether the process ended within `timeout_s` seconds."""
        self._actors.pop(handle.native, None)
        if self._problem:
            return True
        self._ray.kill(handle.native, no_restart=True)
        return isinstance(self.outcome(self.submit(handle, "call", ("ready",), {}), timeout_s).error, WorkerDiedError)

    def in_process(self) -> Runtime:
        """Return a runtime whose workers are threads, without Ray."""
        if self._threads is None:
            self._threads = ThreadRuntime(is_recording=self.is_recording)
            self._threads.faults = self.faults
        return self._threads

    def own_gpus(self) -> list[int] | None:
        """Return the torch indices of the GPUs that Ray assigned to this actor; None outside an actor."""
        ray = sys.modules.get("ray")
        if ray is None or not ray.is_initialized() or ray.get_runtime_context().get_actor_id() is None:
            return None
        given, num_seen = ray.get_gpu_ids(), torch.cuda.device_count()
        if len(given) >= num_seen:
            return list(range(num_seen))
        names = os.environ.get("CUDA_VISIBLE_DEVICES")
        return sorted(int(gpu) if names is None else names.split(",").index(str(gpu)) for gpu in given)

    def meeting_place(self) -> tuple[str, int]:
        """Return an address of this node (the loopback address if Ray runs on one machine only) and a free TCP port."""
        return propose_address(is_local=self._connect().util.get_node_ip_address() == LOOPBACK)

    def close(self) -> None:
        """Kill the actors; then disconnect from Ray, unless the connection is shared or was opened by the user."""
        if self._threads is not None:
            self._threads.close()
        if self._ray is None:
            return
        if not self._problem:
            for actor in self._actors:
                self._ray.kill(actor, no_restart=True)
            for group in self._groups.values():
                self._ray.util.remove_placement_group(group)
        self._actors.clear()
        self._groups.clear()
        if self._connection is not None:
            self._connection.leave(self._ray)
        self._ray = self._host = self._connection = None

    def fit_resources(self, requests: Sequence[tuple[str, int, Mapping[str, float]]]) -> list[dict[str, float]]:
        """Return the resources to request for one worker of each kind; default resources are reduced where necessary.

        Raises:
            InsufficientResourcesError: The cluster, or the machine if Ray runs on one machine, has too few resources.
        """
        if self._starts_a_local_ray():
            check_machine(requests, this_machine())  # before Ray starts, which takes seconds
        nodes = [node["Resources"] for node in self._connect().nodes() if node["Alive"]]
        total: dict[str, float] = {}
        for node in nodes:
            for key, amount in node.items():
                total[key] = total.get(key, 0.0) + amount
        spare = {**dict.fromkeys(total, 0.0), **self._ray.available_resources()}
        for name, count, resources in requests:
            if is_default(resources):
                continue
            for key, amount in resources.items():
                ray_key = RAY_KEYS.get(key, key)
                most = max((node.get(ray_key, 0.0) for node in nodes), default=0.0)
                spare[ray_key] = spare.get(ray_key, 0.0) - count * amount
                if amount > most or spare[ray_key] < -1e-9:
                    raise InsufficientResourcesError(
                        f"{count} {name} request {key}={amount:g} each, {count * amount:g} together; the largest node "
                        f"has {most:g}, the cluster {total.get(ray_key, 0.0):g} ({spare[ray_key] + count * amount:g} "
                        "not yet requested); request less or use fewer workers")
        share = self._shares(requests, nodes, spare)
        fitted = [shrunk_to(share, resources) if is_default(resources) else dict(resources) for _, _,
                  resources in requests]
        if any(fit.get(key, 0) < resources.get(key, 0) for (_, count, resources),
               fit in zip(requests, fitted, strict=True)
               for key in RAY_KEYS if count):
            logger.info("default requests of workers are reduced to the resources of the cluster: %s", fitted)
        if self.options.placement == "colocate":
            self._bundle = group_of(requests, fitted, nodes)
        return fitted

    def _shares(self, requests: Sequence[tuple[str, int, Mapping[str, float]]], nodes: Sequence[Mapping[str, float]],
                spare: Mapping[str, float]) -> dict[str, float]:
        """Return the largest amount of each resource that every worker with default resources can get.

        Raises:
            InsufficientResourcesError: Such a worker needs a GPU, but none is free.
        """
        share = {}
        for key in ("num_cpus", "num_gpus", "memory"):
            count = sum(sharing_of(requests, key).values())
            num_places = requests[0][1] if self.options.placement == "colocate" else max(1, count)
            share[key] = room_for(key, nodes, spare, num_places, max(1, count / num_places))
        if (sharing := sharing_of(requests, "num_gpus")) and not share["num_gpus"]:
            present, free = sum(node.get("GPU", 0.0) for node in nodes), max(0.0, spare.get("GPU", 0.0))
            raise no_gpu(sharing, f"the cluster has {present:g}, of which {free:g} are free")
        return share


def _place_of(address: str, own_ip: str) -> tuple[str, str]:
    """Return the host (resolved, if possible) and port of "host:port"; a loopback address becomes `own_ip`."""
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError):  # a host name that cannot be resolved is compared as text
        host = socket.gethostbyname(host)
    return own_ip if host.startswith("127.") else host, port


def _reason(error: BaseException) -> str:
    """Return why an actor is lost: the first line of Ray's message or, if the actor did not start, the last line."""
    lines = str(error).splitlines()
    return f"its start failed: {lines[-1]}" if "creation task" in lines[0] and len(lines) > 1 else lines[0]
