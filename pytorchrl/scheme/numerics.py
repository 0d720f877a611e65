"""Settings of torch that decide how exactly a process computes, and whether a GPU repeats its results.

These settings, like the number of torch threads, hold for a whole process. A worker sets them in its process. In the
user's program, they are restored when the scheme stops.
"""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar, cast

import torch

from pytorchrl.errors import ConfigError

if TYPE_CHECKING:
    from pytorchrl.scheme.options.run import ProcessOptions

T = TypeVar("T")

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@dataclass(frozen=True)
class Numerics:
    """Settings of a process that change its results.

    Attributes:
        deterministic_kernels: Whether the kernels of GPUs must compute the same bits in each run; False keeps torch's
            present settings.
        tf32: Whether GPUs may round the factors of float32 products and convolutions to TF32.
    """

    deterministic_kernels: bool
    tf32: bool

    @classmethod
    def of(cls, options: ProcessOptions) -> Numerics:
        """Return the settings that the options of a scheme demand."""
        return cls(options.deterministic_kernels, options.tf32)

    def apply(self) -> None:
        """Set torch's settings in this process.

        Raises:
            ConfigError: The process has used a GPU before, so CUDA no longer reads an environment variable.
        """
        if self.deterministic_kernels:
            _use_deterministic_kernels()
        _ignore_advice()
        torch.set_float32_matmul_precision("high" if self.tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = self.tf32
        for part in _convolutions():
            part.fp32_precision = "tf32" if self.tf32 else "ieee"


class _Program:
    """The user's program, which may run several schemes at the same time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the attributes below and torch's settings
        self._users: weakref.WeakKeyDictionary[object, ProcessOptions] = weakref.WeakKeyDictionary()
        self._restore: Callable[[], None] | None = None

    def enter(self, user: object, options: ProcessOptions) -> None:
        """Use the settings of these options until `leave`, or until another user enters; see `Numerics.apply`."""
        with self._lock:
            restore = self._restore or _restoring()
            self._apply(options)
            self._restore, self._users[user] = restore, options

    def leave(self, user: object) -> None:
        """Use the settings of the last user that has not left; without any, restore those before the first user."""
        with self._lock:
            if self._users.pop(user, None) is None or self._restore is None:
                return
            self._restore()
            if self._users:
                self._apply(list(self._users.values())[-1])
            else:
                self._restore = None

    @staticmethod
    def _apply(options: ProcessOptions) -> None:
        Numerics.of(options).apply()
        torch.set_num_threads(options.num_threads)


PROGRAM = _Program()


class _Part(Protocol):
    """A part of torch with a setting of the new kind."""

    fp32_precision: str


def _use_deterministic_kernels() -> None:
    if os.environ.get(_WORKSPACE) not in (":4096:8", ":16:8"):
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            raise ConfigError(
                f"deterministic_kernels=True needs the environment variable {_WORKSPACE}=:4096:8 before a process uses "
                "a GPU, and this process has already used one; set this variable before Python starts")
        os.environ[_WORKSPACE] = ":4096:8"
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    torch.use_deterministic_algorithms(True)


def _restoring() -> Callable[[], None]:
    """Return a function that restores the present settings.

    Newer versions of torch have two kinds of settings of TF32. If a program has changed those of the new kind only,
    reading those of the old kind raises an error.
    """
    _ignore_advice()
    num_threads, cudnn = torch.get_num_threads(), torch.backends.cudnn
    kernels = cudnn.benchmark, cudnn.deterministic
    algorithms = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    products, convolutions = _read(torch.get_float32_matmul_precision), _read(lambda: bool(cudnn.allow_tf32))
    newer = [(part, part.fp32_precision) for part in [*_products(), *_convolutions()]]

    def restore() -> None:
        torch.set_num_threads(num_threads)
        cudnn.benchmark, cudnn.deterministic = kernels
        if torch.are_deterministic_algorithms_enabled() != algorithms[0]:  # each call imports torch's compiler
            torch.use_deterministic_algorithms(algorithms[0], warn_only=algorithms[1])
        if products is not None:
            torch.set_float32_matmul_precision(products)
        if convolutions is not None:
            cudnn.allow_tf32 = convolutions
        for part, precision in newer:
            part.fp32_precision = precision
    return restore


def _ignore_advice() -> None:
    """Ignore a warning of torch 2.9 and some later versions, which recommends to use only settings of the new kind.

    With these settings alone, torch's own compiler raises errors in the same versions.
    """
    warnings.filterwarnings("ignore", "Please use the new API settings to control TF32")


def _read(setting: Callable[[], T]) -> T | None:
    try:
        return setting()
    except RuntimeError:
        return None


def _products() -> list[_Part]:
    """Return the parts with settings of the new kind for products; older versions of torch have none."""
    return _with_precision(torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None))


def _convolutions() -> list[_Part]:
    """Return the parts with settings of the new kind for cuDNN; older versions of torch have none."""
    return _with_precision(*(getattr(torch.backends.cudnn, name, None) for name in ("conv", "rnn")))


def _with_precision(*parts: object) -> list[_Part]:
    return [cast("_Part", part) for part in parts if hasattr(part, "fp32_precision")]
