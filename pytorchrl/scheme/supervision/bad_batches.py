"""Batches whose loss or gradient is not finite: who saw them is told, and the batch is kept where asked."""

from __future__ import annotations

import dataclasses
import io
import itertools
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pytorchrl.agent.algorithms.base import Algorithm
from pytorchrl.agent.data import Batch
from pytorchrl.errors import ConfigError
from pytorchrl.terminal import get_logger

# Enough to see what they have in common, too few to fill a disk.
_MAX_FILES = 5

logger = get_logger(__name__)


def check_directory(name: str, value: object) -> str:
    """The absolute path of a directory that exists or can be made, else raise `ConfigError`; makes nothing."""
    if not isinstance(value, (str, os.PathLike)) or not isinstance(os.fspath(value), str) or not os.fspath(value):
        raise ConfigError(f"{name} must be a directory or None, got {value!r}")
    path = Path(os.path.abspath(os.path.expanduser(os.fspath(value))))
    nearest = path
    try:
        while not _is_there(nearest):
            nearest = nearest.parent
    except (OSError, ValueError) as error:  # a file on the way, too long, a zero byte
        raise ConfigError(f"{name} {str(path)!r} cannot be a directory: {error}") from error
    if not nearest.is_dir():
        raise ConfigError(f"{name} must be a directory, got {str(path)!r}, but {str(nearest)!r} is none")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(f"{name} {str(path)!r} cannot be written: {str(nearest)!r} is read-only for this user")
    return str(path)


def _is_there(path: Path) -> bool:
    """Like `lexists`, but whatever else is wrong with the path is raised."""
    try:
        os.lstat(path)
    except FileNotFoundError:
        return False
    return True


class BadBatches:
    """Looks at each gradient that a worker computes.

    A file is as `save_model` makes it, so `torch.load(path, weights_only=True)` reads it; `Batch(**file["batch"])` is the
    batch again.

    Args:
        directory: Where to keep bad batches, made when the first one comes; None keeps none.
        index_worker: Of the GWorker.
        algo: Its algorithm.
    """

    def __init__(self, directory: str | None, index_worker: int, algo: Algorithm) -> None:
        self._directory = None if directory is None else Path(directory)
        self._index, self._algo = index_worker, algo
        self._num_files = 0

    def find_fault(self, batch: Batch, gradients: Sequence[Tensor | None], info: Mapping[str, float], version: int) -> str:
        """What is not finite in a gradient of this worker alone, and where its batch is; empty if all is well.

        Args:
            batch: What it was computed from.
            gradients: One (P,) vector per group; those of a loss that is not finite are NaN.
            info: The algorithm's statistics.
            version: Of the parameters.
        """
        norms = [float(torch.linalg.vector_norm(gradient)) for gradient in gradients if gradient is not None]
        if all(map(math.isfinite, norms)):
            return ""
        norm = next(norm for norm in norms if not math.isfinite(norm))
        loss = "".join(f"{name} {value:g}, " for name, value in info.items() if name.split("/")[0] == "loss")
        return (f"GWorker {self._index} at version {version}: {loss}norm of its gradient {norm:g}, batch "
                f"{self._keep(batch, info, version)}")

    def _keep(self, batch: Batch, info: Mapping[str, float], version: int) -> str:
        """Write the batch, and say what became of it."""
        if self._directory is None:
            return "not kept (keep_bad_batches names no directory)"
        if self._num_files == _MAX_FILES:
            return f"not kept: {self._directory} has {_MAX_FILES} of this worker"
        content = io.BytesIO()  # by way of memory: torch tells a full disk in words of its own, without a number
        torch.save({
            "format": 1, "worker": self._index, "version": version, "info": dict(info), "batch": _plain(batch),
            "acting_state": self._algo.acting_state()}, content)
        try:
            path = self._write(f"gworker{self._index}_version{version}", content.getbuffer())
        except OSError as error:
            logger.warning("a bad batch of GWorker %d could not be kept: %s", self._index, error)
            return f"could not be kept: {error}"
        self._num_files += 1
        return f"kept in {path}"

    def _write(self, name: str, content: memoryview) -> Path:
        """Write a new file, whose name gets a number if earlier files have it."""
        assert self._directory is not None
        self._directory.mkdir(parents=True, exist_ok=True)
        names = (f"{name}{'' if number == 1 else f'_{number}'}.pt" for number in itertools.count(1))
        path = next(self._directory / name for name in names if not os.path.lexists(self._directory / name))
        with open(path, "xb") as file:
            try:
                file.write(content)
                file.flush()
            except BaseException:
                path.unlink()
                raise
        return path


def _plain(batch: Any) -> dict[str, Any]:
    """Copies of its tensors, without the larger ones that they may be views of, and its numbers."""
    def copy(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: copy(part) for name, part in value.items()}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return _plain(value)
        return value.detach().cpu().clone() if isinstance(value, Tensor) else value
    return {field.name: copy(getattr(batch, field.name)) for field in dataclasses.fields(batch)}
