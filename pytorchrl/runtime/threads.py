"""Run workers as threads of this process, for central schemes and for tests of all other schemes."""

from __future__ import annotations

import concurrent.futures as cf
import contextlib
import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pytorchrl.errors import Problem, WorkerDiedError, WorkerLostError
from pytorchrl.runtime.base import Future, FutureByName, Handle, Outcome, R, Runtime, T, W
from pytorchrl.runtime.faults import FaultPlan
from pytorchrl.support.threads import WorkThread

# Total seconds that `close` waits for all threads to finish their current calls.
_CLOSE_TIMEOUT_S = 5.0


_Call = tuple[cf.Future[object], str, tuple[object, ...], Mapping[str, object]]
"""(future, method, positional arguments, keyword arguments) of a call."""


class _ThreadActor(WorkThread):
    """Thread that builds a worker and then runs its calls in order.

    The thread belongs to its `ThreadRuntime`, and ends after its current call once `end` was called. Errors are the
    outcomes of the calls. `calls` has no limit of its own, because `submit` must not wait: the senders limit it, for
    example to `col_in_flight` requests to each collection worker. The value None in `calls` is not a call; it only
    wakes the thread, which then checks `dead`.

    Attributes:
        peak: Largest number of calls, waiting or taken, when the thread took a call; only the thread updates it.
    """

    def __init__(self, cls: type[object], params: Mapping[str, object], name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._cls, self._params = cls, params
        self.worker: object = None
        self.calls: queue.Queue[_Call | None] = queue.Queue()
        self.dead = threading.Event()
        self.failure: BaseException | None = None
        self.peak = 0

    def run(self) -> None:
        try:
            self.worker = self._cls(**self._params)
        except BaseException as error:  # noqa: BLE001 - every call of this worker reports the error
            self.failure = error
        while not self.dead.is_set():
            if (call := self.calls.get()) is not None:
                self.peak = max(self.peak, self.calls.qsize() + 1)
                self._call(*call)
        self._refuse_rest()

    def end(self) -> None:
        """End the thread after its current call."""
        self.dead.set()
        self.calls.put(None)

    def interrupt(self) -> None:
        """End the thread after its current call, which the worker's method `interrupt`, if it has one, shortens."""
        self.end()
        if hasattr(self.worker, "interrupt"):
            self.worker.interrupt()

    def _call(self, future: cf.Future[object], method: str, args: tuple[object, ...],
              kwargs: Mapping[str, object]) -> None:
        if self.failure is not None:
            _settle(future, error=self.failure)
            return
        try:
            result = getattr(self.worker, method)(*args, **kwargs)
        except BaseException as error:  # noqa: BLE001 - the caller receives the error as a value
            _settle(future, error=error)
        else:
            _settle(future, result=result)

    def _refuse_rest(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                if (call := self.calls.get_nowait()) is not None:
                    _settle(call[0], error=WorkerDiedError(f"{self.name} has been killed"))


def _settle(future: cf.Future[object], result: object = None, error: BaseException | None = None) -> None:
    with contextlib.suppress(cf.InvalidStateError):  # kill() may have set an error already
        future.set_exception(error) if error is not None else future.set_result(result)


class ThreadRuntime(Runtime):
    """Runtime whose workers are threads of this process.

    The workers share memory, so a receiver must copy data that its sender may change.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(Runtime.Options):
        """Options of the threads runtime."""

        def contradictions(self) -> Iterator[Problem]:
            """Refuse injected faults that kill a worker, because a thread cannot be killed."""
            yield from super().contradictions()
            if self.faults is not None and FaultPlan(self.faults, 0).kills:
                yield Problem("the option faults kills a worker, but a thread cannot be killed",
                              "use runtime='ray', runtime='processes' or runtime='simulated'", ("faults", "runtime"))

    name = "threads"
    moves_bytes = False

    def __init__(self, options: Options | None = None, *, seed: int = 0, is_recording: bool = False) -> None:
        super().__init__(options, seed=seed, is_recording=is_recording)
        self._actors: list[_ThreadActor] = []
        self._pending: dict[_ThreadActor, list[cf.Future[object]]] = {}

    def start_actor(self, cls: type[W], params: Mapping[str, object], *, name: str,
                    resources: Mapping[str, float]) -> Handle[W]:
        """Start `cls(**params)` in a thread; `resources` is ignored, because all threads share one process."""
        actor = _ThreadActor(cls, params, name)
        self._actors.append(actor)
        self.start_thread(actor)
        return Handle(self, name, actor)

    def submit(self, handle: Handle[W], method: str, args: tuple[object, ...],
               kwargs: Mapping[str, object]) -> FutureByName:
        """Enqueue a method call on a worker."""
        future: cf.Future[object] = cf.Future()
        actor: _ThreadActor = handle.native
        unfinished = [f for f in self._pending.get(actor, ()) if not f.done()]
        self._pending[actor] = [*unfinished, future]
        if actor.dead.is_set():
            _settle(future, error=WorkerDiedError(f"{handle.name} has been killed"))
        else:
            actor.calls.put((future, method, args, kwargs))
        return Future(handle.name, future)

    def signal(self, handle: Handle[W], method: str, args: tuple[object, ...],
               kwargs: Mapping[str, object]) -> FutureByName:
        """Run the call immediately in the caller's thread, because a signal only sets flags."""
        future: cf.Future[object] = cf.Future()
        actor: _ThreadActor = handle.native
        if actor.worker is None:
            _settle(future, error=actor.failure or (
                WorkerDiedError(f"{handle.name} has been killed") if actor.dead.is_set()
                else WorkerLostError(f"{handle.name} is not built yet")))
        else:
            try:
                _settle(future, result=getattr(actor.worker, method)(*args, **kwargs))
            except Exception as error:  # noqa: BLE001 - the caller receives the error as a value
                _settle(future, error=error)
        return Future(handle.name, future)

    def wait(self, futures: Sequence[Future[R]], timeout_s: float) -> list[Future[R]]:
        """Wait at most `timeout_s` seconds for an outcome, and return all futures that have one."""
        cf.wait([future.native for future in futures], timeout_s, return_when=cf.FIRST_COMPLETED)
        return [future for future in futures if future.native.done()]

    def outcome(self, future: Future[R], timeout_s: float) -> Outcome[R]:
        """Return the outcome of a call, or an error after `timeout_s` seconds."""
        try:
            error = future.native.exception(timeout_s)
        except cf.TimeoutError:
            return Outcome(future.worker, error=WorkerLostError(
                f"{future.worker} did not answer within {timeout_s:.1f} s"))
        return Outcome(future.worker, None if error else future.native.result(), error)

    def put(self, value: T) -> T:
        """Return the value itself, because threads share memory."""
        return value

    def kill(self, handle: Handle[W], timeout_s: float = 5.0) -> bool:
        """Let a worker's thread end after its current call; return whether it ended within `timeout_s` seconds.

        The worker refuses further calls. Its method `interrupt`, if it has one, is called to shorten the current call.
        """
        actor: _ThreadActor = handle.native
        actor.interrupt()
        for future in self._pending.pop(actor, ()):
            _settle(future, error=WorkerDiedError(f"{handle.name} has been killed"))
        if not self.join_thread(actor, timeout_s):
            return False
        actor.worker = None  # free its memory and threads, also on GPUs, although its handle keeps `actor`
        return True

    def close(self) -> None:
        """End all threads, each after its current call."""
        for actor in self._actors:
            actor.end()
        deadline = self.now() + _CLOSE_TIMEOUT_S
        for actor in self._actors:
            self.join_thread(actor, max(0.0, deadline - self.now()))
        self._actors.clear()
        self._pending.clear()
