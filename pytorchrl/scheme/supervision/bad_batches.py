"""Report batches whose loss or gradient is not finite, and save them on request."""

from __future__ import annotations

import dataclasses
import io
import itertools
import math
import os
import pickle
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from pytorchrl.agent.algorithms.base import Algorithm
from pytorchrl.agent.data import Batch
from pytorchrl.agent.transfers import cpu_copy
from pytorchrl.errors import CheckpointError
from pytorchrl.support.terminal import get_logger
from pytorchrl.support.untyped import BatchOfKind, StateDict

# Largest number of files that a worker writes: enough to recognize a common cause, but too few to fill a disk.
_MAX_FILES = 5

logger = get_logger(__name__)


class BadBatches:
    """Checks whether the gradients of a gradient worker are finite, and saves batches with non-finite gradients.

    `read_bad_batch` reads the file of a batch.

    Args:
        directory: Directory for bad batches, created when the first batch is saved; None: no batches are saved.
        index_worker: Index of the gradient worker.
        algo: The gradient worker's algorithm.
    """

    def __init__(self, directory: str | None, index_worker: int, algo: Algorithm) -> None:
        self._directory = None if directory is None else Path(directory)
        self._index, self._algo = index_worker, algo
        self._num_files = 0

    def find_fault(self, batch: Batch, gradients: Sequence[Tensor | None], info: Mapping[str, float],
                   version: int) -> str:
        """Return "" if all gradients are finite; otherwise describe the fault and, if configured, save the batch.

        Args:
            batch: The batch from which the gradients were computed.
            gradients: The gradient of each parameter group, as a vector; its values are NaN if the loss is not finite.
            info: The algorithm's statistics.
            version: Version of the parameters.
        """
        norms = self._algo.norms_of(gradients)
        if all(map(math.isfinite, norms)):
            return ""
        norm = next(norm for norm in norms if not math.isfinite(norm))
        loss = "".join(f"{name} {value:g}, " for name, value in info.items() if name.split("/")[0] == "loss")
        return (f"GWorker {self._index} at version {version}: {loss}norm of its gradient {norm:g}, batch "
                f"{self._keep(batch, info, version)}")

    def _keep(self, batch: Batch, info: Mapping[str, float], version: int) -> str:
        """Save the batch; return a text that names its file or says why the batch was not saved."""
        if self._directory is None:
            return "not saved (keep_bad_batches is None)"
        if self._num_files == _MAX_FILES:
            return f"not saved: {self._directory} has {_MAX_FILES} batches of this worker"
        content = io.BytesIO()  # in memory, because torch.save reports a full disk without an error number
        torch.save({
            "format": 2, "worker": self._index, "version": version, "info": dict(info), "batch": _plain(batch),
            "gradient_state": self._algo.gradient_state()}, content)
        try:
            path = self._write(f"gworker{self._index}_version{version}", content.getbuffer())
        except OSError as error:
            logger.warning("a bad batch of GWorker %d could not be saved: %s", self._index, error)
            return f"could not be saved: {error}"
        self._num_files += 1
        return f"saved to {path}"

    def _write(self, name: str, content: memoryview) -> Path:
        """Write a new file; add a number to its name if a file with this name exists."""
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


_KIND = "kind"
"""Entry of the plain form of a batch that names its class, as "module:Class"."""


def read_bad_batch(path: Path) -> tuple[Batch, StateDict]:
    """Read a batch that was saved because its loss or gradient was not finite.

    Returns:
        The batch, and the contents of the file: `worker`, `version`, `info` and `gradient_state`, which the algorithm
        loads.

    Raises:
        CheckpointError: The file cannot be read, or is not the file of a batch.
    """
    try:
        file = torch.load(path, weights_only=True)
        names = ("worker", "version", "info", "gradient_state")
        return cast("Batch", _restored(file["batch"])), {name: file[name] for name in names}
    except (OSError, RuntimeError, pickle.UnpicklingError, EOFError, LookupError, TypeError, ValueError,
            CheckpointError) as error:
        raise CheckpointError(f"{str(path)!r} is not a batch that keep_bad_batches has saved: {error}") from error


def _plain(batch: BatchOfKind) -> dict[str, object]:
    """Return the class and the fields of a batch with copied tensors; a view would save the whole underlying tensor."""
    def copy(value: object) -> object:
        if isinstance(value, Mapping):
            return {name: copy(part) for name, part in value.items()}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return _plain(value)
        return cpu_copy(value) if isinstance(value, Tensor) else value
    kind = type(batch)
    return {_KIND: f"{kind.__module__}:{kind.__qualname__}",
            **{field.name: copy(getattr(batch, field.name)) for field in dataclasses.fields(batch)}}


def _restored(value: object) -> object:
    """Return the batch whose plain form `_plain` has returned; its class must have been imported."""
    if not isinstance(value, Mapping):
        return value
    parts = {name: _restored(part) for name, part in value.items() if name != _KIND}
    if _KIND not in value:
        return parts
    module, _, name = str(value[_KIND]).partition(":")
    kind = getattr(sys.modules.get(module), name, None)
    if not isinstance(kind, type) or not dataclasses.is_dataclass(kind):
        raise CheckpointError(f"its class {value[_KIND]!r} is no batch that this process has imported")
    return kind(**parts)
