"""Options of gradient workers and their batches."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pytorchrl.agent.options import Options, option
from pytorchrl.errors import ConfigError, Problem
from pytorchrl.runtime import DEFAULT_RESOURCES
from pytorchrl.scheme.options.base import PARALLEL, Execution, PrefetchOptions, check_codec, check_resources
from pytorchrl.scheme.transport.encoder import GRADS

NORM_OVER = ("batch", "microbatch")


def check_directory(name: str, value: object) -> str:
    """Return the absolute path of a directory that exists or can be created, else raise `ConfigError`."""
    if not isinstance(value, (str, os.PathLike)) or not isinstance(os.fspath(value), str) or not os.fspath(value):
        raise ConfigError(f"{name} must be a directory or None, got {value!r}")
    path = Path(os.path.abspath(os.path.expanduser(os.fspath(value))))
    nearest = path
    try:
        while not _is_there(nearest):
            nearest = nearest.parent
    except (OSError, ValueError) as error:  # e.g. a parent is a file, a name is too long, or there is a null byte
        raise ConfigError(f"{name} {str(path)!r} cannot be a directory: {error}") from error
    if not nearest.is_dir():
        raise ConfigError(f"{name} must be a directory, got {str(path)!r}, but {str(nearest)!r} is not a directory")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(f"{name} {str(path)!r} cannot be written: this user may not write to {str(nearest)!r}")
    return str(path)


def _is_there(path: Path) -> bool:
    """Return whether a path exists, as `os.path.lexists` does, but raise every error except `FileNotFoundError`."""
    try:
        os.lstat(path)
    except FileNotFoundError:
        return False
    return True


@dataclass(frozen=True, kw_only=True)
class GWorkerSetOptions(Options):
    """Options of the gradient workers."""

    num_grad_workers: int = option(
        1, low=1, help="Number of gradient workers. By default, a single worker runs in the update worker's "
        "process; 2 or more are always remote.")
    grad_execution: Execution | None = option(
        None, help="Where gradients are computed: \"Central\" in the update worker's process, \"Parallel\" in "
        "remote workers, even if there is only one. None: \"Central\" for one gradient worker, \"Parallel\" for "
        "several.")
    grad_worker_resources: Mapping[str, float] = option(
        default_factory=lambda: dict(DEFAULT_RESOURCES),
        check=partial(check_resources, "grad_worker_resources"),
        help="Ray resources of each remote gradient worker. The default includes a share of a GPU only for workers "
        "that compute on a GPU, and is reduced to the available resources.")
    grad_device: str | None = option(
        None, help="Device of remote gradient workers: \"cpu\", \"cuda\" (on Ray, the GPU that is assigned to the "
        "worker; otherwise, the workers take turns among all GPUs) or \"cuda:N\"; None: \"cuda\" if device is a GPU "
        "and the workers run on Ray, else device.")
    compress_grads_to_send: bool | str = option(
        False, check=check_codec(GRADS),
        help="Codec of gradients: False, True (\"lz4\"), \"lz4\", \"zstd\", the lossy codecs \"fp16\", "
        "\"bf16\", \"int8\" and \"topk\", \"auto\" (bf16 if that saves time) or \"auto:<name>\".")

    @property
    def num_workers(self) -> int:
        """Number of gradient workers."""
        return self.num_grad_workers

    @property
    def is_parallel(self) -> bool:
        """Whether the gradient workers are remote."""
        return self.num_grad_workers > 1 if self.grad_execution is None else self.grad_execution is PARALLEL


@dataclass(frozen=True, kw_only=True)
class GWorkerOptions(Options):
    """Options that control the batches of each gradient worker."""

    train_batch_size: int | None = option(
        None, low=1, help="Least number of steps in a train batch, including steps in which an environment is reset. "
        "A train batch consists of whole rounds (synchronous collection) or whole rollouts (asynchronous collection); "
        "None: a single round or rollout. With replay shards, the number of transitions or sequences sampled for an "
        "update (None: the algorithm's mini_batch_size); if whole rollouts are sampled, the least number of steps "
        "(`VTraceBuffer`) or sequences (`RolloutSequenceBuffer`) that they contain.")
    check_data: str = option(
        "first", choices=("first", "always"), help="Data whose shapes and dtypes are checked: the first batch of an "
        "on-policy storage, or every rollout, batch, gradient and message with weights, to find an own class that "
        "returns wrong ones.")
    keep_bad_batches: str | os.PathLike[str] | None = option(
        None, check=partial(check_directory, "keep_bad_batches"),
        help="Directory in which each gradient worker saves its first batches whose loss or gradient is not "
        "finite; None: such batches are not saved.")


@dataclass(frozen=True, kw_only=True)
class MicrobatchOptions(Options):
    """Options for batches that are too large for one backward pass."""

    microbatch_size: int | None = option(
        None, low=1, help="Largest number of env steps in one backward pass; the gradient of a larger batch is "
        "computed in slices, with the same result. With train_batch_size and synchronous collection, data are also "
        "collected in microbatches, and a microbatch that the algorithm uses only once is discarded once its "
        "gradient has been computed. None: no limit.")


@dataclass(frozen=True, kw_only=True)
class MicrobatchCollectionOptions(MicrobatchOptions, PrefetchOptions):
    """Options for train batches that are collected in microbatches."""

    norm_over: str = option(
        "batch", choices=NORM_OVER, help="Data over which an algorithm normalizes values such as advantages if a "
        "train batch is collected in microbatches: \"batch\" keeps the whole train batch in host memory, "
        "\"microbatch\" does not.")

    def contradictions(self) -> Iterator[Problem]:
        """Refuse to prefetch more than one microbatch."""
        yield from super().contradictions()
        if self.prefetch not in (None, 0, 1):
            yield Problem(f"prefetch must be 0, 1 or None, got {self.prefetch!r}", options=("prefetch",))
