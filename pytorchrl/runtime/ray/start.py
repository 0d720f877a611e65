"""Start a local Ray instance that neither other users nor other machines can reach.

Ray has no options for this, so `ray.init` runs with a few of Ray's functions replaced.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

from pytorchrl.runtime.ray.processes import without_unused_processes

LOOPBACK = "127.0.0.1"
_PRIVATE = 0o077
# Environment variable that contains the umask of the driver. Ray's processes start with a stricter umask. Workers set
# the driver's umask again, so that files that an environment writes have the usual permissions.
_UMASK = "PYTORCHRL_UMASK"


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
def replaced(module: ModuleType | None, name: str, function: Callable[..., object]) -> Iterator[None]:
    """Replace a function of a module during the `with` block; do nothing if the module lacks the function."""
    found = getattr(module, name, None)
    if found is not None:
        setattr(module, name, function)
    try:
        yield
    finally:
        if found is not None:
            setattr(module, name, found)
