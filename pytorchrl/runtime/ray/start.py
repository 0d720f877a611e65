"""Start a local Ray instance that neither other users nor other machines can reach, and without unused processes.

The unused processes are the server of the dashboard, for which `ray.init` waits more than a second, the monitor of the
autoscaler, and the monitor of log files. Without these Python processes, a Ray instance with two workers needs a
quarter less CPU time to start, and 250 MB less memory. `ray.init` has no options for all this, so it runs with a few of
Ray's functions replaced.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

LOOPBACK = "127.0.0.1"
_PRIVATE = 0o077
# Environment variable that contains the umask of the driver. Ray's processes start with a stricter umask. Workers set
# the driver's umask again, so that files that an environment writes have the usual permissions.
_UMASK = "PYTORCHRL_UMASK"
# Methods of Ray that start the unused processes. Ray calls the first method even with `include_dashboard=False`, and
# the last method even with `log_to_driver=False`.
_UNUSED = ("start_api_server", "start_monitor", "start_log_monitor")


@contextlib.contextmanager
def private_start(ray: ModuleType) -> Iterator[None]:
    """Make `ray.init` in the `with` block start only the processes that a run needs, and protect these processes.

    Other users cannot reach the processes: a strict umask makes the files of the processes private, and only this
    user can read the token that authenticates calls. Ray's folders are an exception: each worker makes them accessible
    to all users, so the directory that contains these folders must be private.

    Other machines cannot reach the processes, because Ray uses the loopback address. By default, Ray would replace this
    address with the machine's address in the network; `resolve_ip_for_localhost` is replaced to prevent this.

    Args:
        ray: The module `ray`. If its version lacks a function to be replaced, this replacement is omitted.
    """
    make_private(token_path())
    before = os.umask(_PRIVATE)
    os.environ[_UMASK] = str(before)
    try:
        with without_handlers_of(ray), without_unused_processes(ray), \
                replaced(getattr(ray._private, "services", None), "resolve_ip_for_localhost", lambda host: host):
            yield
    finally:
        os.umask(before)
        del os.environ[_UMASK]


def restore_umask() -> None:
    """Replace the strict umask that a worker process inherits from `private_start` with the driver's umask."""
    if _UMASK in os.environ:
        os.umask(int(os.environ[_UMASK]))


def token_path() -> Path:
    """Return the file in which Ray keeps the token that authenticates all calls of this user."""
    return Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")


def make_private(path: Path) -> None:
    """Remove other users' permissions for a file, because Ray may have made its token file readable by everybody."""
    with contextlib.suppress(OSError):  # the file does not exist yet, or belongs to another user
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & _PRIVATE:
            path.chmod(mode & ~_PRIVATE)


@contextlib.contextmanager
def without_handlers_of(ray: ModuleType) -> Iterator[None]:
    """Prevent Ray from installing SIGTERM handlers when it starts; they would change the process's exit code."""
    with replaced(ray._private.utils, "set_sigterm_handler", lambda handler: None):
        yield


@contextlib.contextmanager
def replaced(owner: ModuleType | type | None, name: str, function: Callable[..., object]) -> Iterator[None]:
    """Replace a function of a module or class during the `with` block; do nothing if `owner` lacks the function."""
    found = getattr(owner, name, None)
    if found is not None:
        setattr(owner, name, function)
    try:
        yield
    finally:
        if found is not None:
            setattr(owner, name, found)


@contextlib.contextmanager
def without_unused_processes(ray: ModuleType) -> Iterator[None]:
    """Prevent `ray.init` in the `with` block from starting processes that only dashboards, autoscalers and logs need.

    Args:
        ray: The module `ray`. If a version of Ray lacks one of the methods that start these processes, the method is
            ignored.
    """
    node = getattr(getattr(ray._private, "node", None), "Node", None)
    with contextlib.ExitStack() as stack:
        for name in _UNUSED:
            stack.enter_context(replaced(node, name, lambda self, **options: None))
        yield
