"""Run workers as processes on this machine, without Ray. The processes exchange data through shared memory."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from weakref import WeakValueDictionary

import cloudpickle

from pytorchrl.errors import ConfigError, InsufficientResourcesError, WorkerDiedError, WorkerLostError
from pytorchrl.runtime.base import Future, FutureByName, Handle, Outcome, R, Runtime, T, W, is_default
from pytorchrl.runtime.machine import FORKED_WORKER_BYTES, check_machine, this_machine
from pytorchrl.runtime.processes import start
from pytorchrl.runtime.processes.channel import Shared
from pytorchrl.runtime.processes.remote_calls import RemoteCall, RemoteCalls
from pytorchrl.runtime.processes.shared_memory import is_supported
from pytorchrl.runtime.processes.start import ForkServer, new_address
from pytorchrl.runtime.processes.worker import CALL, SIGNAL, START, Start
from pytorchrl.runtime.threads import ThreadRuntime
from pytorchrl.support.terminal import get_logger

logger = get_logger(__name__)

# Limit on open files that this process requests from the system. Each worker needs a connection, and each block of
# shared memory in use needs one or two file descriptors.
_NUM_FILES = 65536


class ProcessRuntime(Runtime):
    """Runtime whose workers are processes on this machine.

    Args:
        options: Options of the runtime; None: the defaults.
        seed: Seed of the experiment, which also determines when randomly injected faults occur.
        is_recording: Whether workers record the order of timing-dependent events.

    Raises:
        ConfigError: This platform lacks anonymous shared memory.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(Runtime.Options):
        """Options of the processes runtime."""

    name = "processes"
    options: Options

    def __init__(self, options: Options | None = None, *, seed: int = 0, is_recording: bool = False) -> None:
        super().__init__(options, seed=seed, is_recording=is_recording)
        if problem := platform_problem():
            raise ConfigError(problem)
        self._seed = seed
        self._server: ForkServer | None = None
        self._calls = RemoteCalls()
        self._threads: ThreadRuntime | None = None

    def __reduce__(self) -> tuple[partial[ProcessRuntime], tuple[Options]]:
        server = None if self._server is None else self._server.address
        return partial(_joined, server=server, seed=self._seed, is_recording=self.is_recording), (self.options,)

    def _connect(self) -> ForkServer:
        if self._server is not None and self._server.has_ended:
            logger.warning("%s has ended, and with it all workers; a new one is started", self._server.name)
            self._server.close()
            self._server = None
        if self._server is None:
            if start.here is None:
                self._tell("starting worker processes ...")
            _allow_files()
            self._server = ForkServer(start.here)
            _runtimes[self._server.address] = self
        return self._server

    def _tell(self, text: str) -> None:
        logger.info("%s", text)
        if self.announce is not None:
            self.announce(text)

    def start_actor(self, cls: type[W], params: Mapping[str, object], *, name: str,
                    resources: Mapping[str, float]) -> Handle[W]:
        """Start `cls(**params)` in a new process, with one torch thread per requested CPU, but at least one thread."""
        address, server = new_address(), self._connect()
        # Unlike pickle, cloudpickle also sends classes of the user's script, which other processes cannot import.
        pickled = cloudpickle.dumps((cls, dict(params)), protocol=5)
        server.fork(address, name)
        self._calls.call(address, name, START, "", Start(
            pickled, list(sys.path), os.getcwd(), max(1, int(resources.get("num_cpus", 1)))))
        return Handle(self, name, address)

    def submit(self, handle: Handle[W], method: str, args: tuple[object, ...],
               kwargs: Mapping[str, object]) -> FutureByName:
        """Enqueue a method call on a worker. If an argument is a result of `put`, the method gets the stored value."""
        return self._send(handle, CALL, method, args, kwargs)

    def signal(self, handle: Handle[W], method: str, args: tuple[object, ...],
               kwargs: Mapping[str, object]) -> FutureByName:
        """Run a short call in the worker's thread that receives messages, so that it runs even during another call."""
        return self._send(handle, SIGNAL, method, args, kwargs)

    def _send(self, handle: Handle[W], kind: int, method: str, args: tuple[object, ...],
              kwargs: Mapping[str, object]) -> FutureByName:
        return Future(handle.name, self._calls.call(handle.native, handle.name, kind, method, (args, dict(kwargs))))

    def wait(self, futures: Sequence[Future[R]], timeout_s: float) -> list[Future[R]]:
        """Wait at most `timeout_s` seconds for an outcome, and return all futures that have one."""
        calls: list[RemoteCall] = [future.native for future in futures]
        self._calls.wait(lambda: any(call.is_over for call in calls), timeout_s)
        return [future for future in futures if future.native.is_over]

    def outcome(self, future: Future[R], timeout_s: float) -> Outcome[R]:
        """Return the outcome of a call; arrays in its value are read-only, because processes share them."""
        call: RemoteCall = future.native
        if not call.is_over and not self._calls.wait(lambda: call.is_over, timeout_s):
            return Outcome(future.worker, error=WorkerLostError(
                f"{future.worker} did not answer within {timeout_s:.1f} s"))
        outcome: Outcome[R] = call.outcome()
        if isinstance(outcome.error, WorkerDiedError) and self._server is not None and self._server.has_ended:
            return Outcome(future.worker, error=WorkerDiedError(
                f"{outcome.error}, because {self._server.name} has ended, and with it all workers"))
        return outcome

    def get_started(self, kind: str, futures: Sequence[Future[R]], timeout_s: float) -> list[Outcome[R]]:
        """Return the outcomes of the first calls to new workers; while waiting, log how many workers have started."""
        deadline, pending = self.now() + timeout_s, list(futures)
        while pending and self.now() < deadline:
            self._tell(f"started {len(futures) - len(pending)} of {len(futures)} {kind} ...")
            started = set(self.wait(pending, deadline - self.now()))
            pending = [future for future in pending if future not in started]
        if futures and not pending:
            self._tell(f"started {len(futures)} of {len(futures)} {kind}")
        return self.get_all(futures, max(0.0, deadline - self.now()))

    def put(self, value: T) -> T:
        """Store a value in shared memory; a small value is sent in each message instead."""
        return Shared(value)  # type: ignore[return-value] # the reader receives the value

    def kill(self, handle: Handle[W], timeout_s: float = 5.0) -> bool:
        """Kill a worker's process; return whether the process ended within `timeout_s` seconds."""
        if self._server is None or not self._server.has_ended:
            self._connect().kill(handle.native)
        return self._calls.wait(lambda: not self._calls.is_alive(handle.native), timeout_s)

    def in_process(self) -> Runtime:
        """Return a runtime whose workers are threads."""
        if self._threads is None:
            self._threads = ThreadRuntime(is_recording=self.is_recording)
            self._threads.faults = self.faults
        return self._threads

    def close(self) -> None:
        """Kill the worker processes, and close the connections to them."""
        if self._threads is not None:
            self._threads.close()
        server, self._server = self._server, None
        if server is not None:
            server.close()
        self._calls.close()

    def fit_resources(self, requests: Sequence[tuple[str, int, Mapping[str, float]]]) -> list[dict[str, float]]:
        """Return the resources of one worker of each kind; refuse requests that exceed this machine's resources.

        The machine's memory must always suffice for the minimum memory of all workers together. Other resources are
        checked if they are requested explicitly, except "object_store_memory", which is never checked. Nothing is
        reserved: the workers share the cores, memory and GPUs of this machine.

        Raises:
            InsufficientResourcesError: This machine has less than the workers request.
        """
        machine = this_machine()
        check_machine(requests, machine, FORKED_WORKER_BYTES)
        for name, count, resources in requests:
            for key, amount in resources.items() if count and not is_default(resources) else ():
                present = {"memory": machine.memory_bytes}.get(key, 0)
                if key not in ("num_cpus", "num_gpus", "object_store_memory") and count * amount > present:
                    raise InsufficientResourcesError(
                        f"{count} {name} request {key}={amount:g} each, {count * amount:g} together; this machine has "
                        f"{present:g}; request less or use fewer workers")
        return [dict(resources) for _, _, resources in requests]


def platform_problem() -> str:
    """Return why this platform cannot run worker processes; "" if it can."""
    if is_supported():
        return ""
    return (f"runtime='processes' needs Linux, because only Linux has anonymous shared memory, got {sys.platform}; "
            "give runtime='ray' or runtime='threads'")


_runtimes: WeakValueDictionary[str, ProcessRuntime] = WeakValueDictionary()
"""Address of a fork server -> the runtime with which this process uses the server. Unpickling a runtime that uses the
same server returns the runtime in this dictionary."""


def _joined(options: ProcessRuntime.Options, *, server: str | None, seed: int, is_recording: bool) -> ProcessRuntime:
    """Unpickle a runtime: return this process's existing runtime for the fork server `server`, else a new runtime.

    `server` is the address of the fork server; it is None if the pickled runtime had not used a fork server yet.
    """
    runtime = _runtimes.get(server or "")
    if runtime is None:
        runtime = ProcessRuntime(options, seed=seed, is_recording=is_recording)
        if start.here is not None and start.here.server == server:
            runtime._connect()
    return runtime


def _allow_files() -> None:
    """Raise the limit on open files of this process, as far as the system allows without privileges."""
    import resource  # only Unix has this module

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _NUM_FILES if hard == resource.RLIM_INFINITY else min(_NUM_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
