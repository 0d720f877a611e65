"""Stop the workers of a scheme that is garbage-collected before its `stop()` is called."""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref

from pytorchrl.runtime import Runtime, SimulatedRuntime
from pytorchrl.scheme.options.base import ASYNC
from pytorchrl.scheme.options.settings import Settings
from pytorchrl.scheme.updates.u_worker import UWorker


def stop_if_dropped(scheme: object, settings: Settings, worker: UWorker,
                    runtime: Runtime) -> weakref.finalize[..., object]:
    """Return a finalizer that stops the threads and processes of `scheme` when `scheme` is garbage-collected.

    The finalizer does nothing if no work runs in the background: in a simulated run, or if collection is synchronous
    and there are no remote workers.

    Args:
        scheme: The scheme, which has been started.
        settings: The settings of the scheme.
        worker: The root of the worker tree.
        runtime: The runtime of the workers. Neither the runtime nor the tree may refer to the scheme, because a
            reference would prevent its garbage collection.
    """
    is_active = settings.has_remote_workers or settings.flat()["col_communication"] == ASYNC
    if not is_active or isinstance(runtime, SimulatedRuntime):
        return weakref.finalize(scheme, lambda: None)
    finalizer = weakref.finalize(scheme, _dropped, worker, runtime)
    finalizer.atexit = False  # at the exit of the program, daemon threads and processes end by themselves
    return finalizer


def _dropped(worker: UWorker, runtime: Runtime) -> None:
    # The garbage collector may run in any thread, even in a thread that `worker.stop()` would have to join.
    threading.Thread(target=_stop, args=(worker, runtime), name="DroppedScheme", daemon=True).start()
    warnings.warn("a scheme or learner was dropped while its workers were running, and is stopped; call stop(), or use "
                  "a `with` block", ResourceWarning, stacklevel=2)


def _stop(worker: UWorker, runtime: Runtime) -> None:
    with contextlib.suppress(Exception):  # no caller is left that could receive the error
        worker.stop()
    runtime.close()
