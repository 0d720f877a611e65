"""Compute the gradient of a batch that is too large for one backward pass, one slice after the other.

In shapes, B is the number of samples in a batch, L the number of steps in a sequence, and P the number of scalars in
the vector of a parameter group.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from pytorchrl.agent.algorithms.base import Algorithm
from pytorchrl.agent.data import map_tensors, weights_of_gradients
from pytorchrl.agent.multi.data import MultiBatch
from pytorchrl.errors import ArgumentError, CallOrderError
from pytorchrl.scheme.counters import WorkerCounters
from pytorchrl.scheme.gradients.staging import Staging
from pytorchrl.scheme.options.gradients import MicrobatchCollectionOptions, MicrobatchOptions
from pytorchrl.support.terminal import get_logger
from pytorchrl.support.untyped import BatchOfKind, FieldValue, UserPart

REDUCTIONS = ("mean", "sum")
_CPU = torch.device("cpu")

logger = get_logger(__name__)


class GradAccumulator:
    """Combine the gradients of the slices of a batch into the gradient of the whole batch.

    Args:
        microbatch_size: Largest number of env steps in a slice; None: the batch is one slice.
        reduction: How the loss combines its samples. "mean": the result is the mean of the gradients g, weighted by
            their numbers of samples n: sum(n * g) / sum(n). "sum": the result is the sum of the gradients.

    Attributes:
        num_samples: Number of valid samples in the slices so far.
        num_parts: Number of slices so far, including slices without a valid sample.
        samples: For each policy, the number of valid samples in the slices so far.
    """

    Options: TypeAlias = MicrobatchOptions
    CollectOptions: TypeAlias = MicrobatchCollectionOptions

    def __init__(self, microbatch_size: int | None = None, reduction: str = "mean") -> None:
        if reduction not in REDUCTIONS:
            raise ArgumentError(f"reduction must be one of {list(REDUCTIONS)}, got {reduction!r}")
        self._microbatch_size, self._reduction = microbatch_size, reduction
        self._gradients: list[Tensor | None] = []
        self._weights: list[int] = []  # number of valid samples that contributed to each gradient
        self._info: dict[str, float] = {}
        self._info_weights: dict[str, int] = {}
        self.num_samples = self.num_parts = 0
        self.samples: dict[str, int] = {}

    def slices(self, batch: BatchOfKind, device: torch.device | None = None) -> Iterator[BatchOfKind]:
        """Divide a batch into slices whose sizes differ by at most one, and yield the slices.

        Rows (B, ...) are divided into slices of at most `microbatch_size` rows. Sequences (L, B, ...) are not cut: a
        slice contains at most as many sequences as fit into `microbatch_size` steps, but at least one.

        Args:
            batch: A dataclass of tensors and dictionaries of tensors, such as `Batch`; it is not changed. In a
                `MultiBatch`, the batch of each policy is divided into the same number of slices: the number of env
                steps divided by `microbatch_size`, rounded up.
            device: Device of the slices. If the batch is on another device, the slices are moved one at a time. None:
                the slices share the memory of the batch.
        """
        if isinstance(batch, MultiBatch):
            num_slices = 1 if self._microbatch_size is None else max(1, -(-batch.num_samples // self._microbatch_size))
            for part in range(num_slices):
                yield dataclasses.replace(batch, parts={
                    policy: _cut(own, *_bounds(own, part, num_slices), device) for policy, own in batch.parts.items()})
            return
        length = _length(batch)
        count = batch.action.shape[0 if length is None else 1]
        size = count if self._microbatch_size is None else max(1, self._microbatch_size // (length or 1))
        num_slices = max(1, -(-count // max(1, size)))
        for part in range(num_slices):
            yield _cut(batch, *_bounds(batch, part, num_slices), device)

    def add(self, gradients: Sequence[Tensor | None], num_samples: int, info: Mapping[str, float] | None = None,
            samples: Mapping[str, int] | None = None) -> None:
        """Add copies of the gradients and statistics of a slice.

        Args:
            gradients: One (P,) gradient per group, on any device; gradients are accumulated in float32 or float64. With
                several policies, one gradient per policy; None for a policy without a gradient.
            num_samples: Number of valid samples in the slice, n; a slice without valid samples has no weight. With
                several policies, the number of env steps.
            info: Statistics of the slice; the method `info` returns their means.
            samples: With several policies, the number of valid samples that contributed to each policy's gradient.
        """
        self.num_parts += 1
        self.num_samples += num_samples
        samples = {"": num_samples} if samples is None else samples
        weights = weights_of_gradients(samples, len(gradients))
        for policy, count in samples.items():
            self.samples[policy] = self.samples.get(policy, 0) + count
        if not self._gradients:
            self._gradients, self._weights = [None] * len(gradients), [0] * len(gradients)
        for index, (gradient, weight) in enumerate(zip(gradients, weights, strict=True)):
            if gradient is not None and weight:
                self._add(index, gradient, weight)
        for name, value in (info or {}).items():
            weight = samples.get(name.rpartition("/")[2], num_samples)
            if weight:
                before, self._info_weights[name] = self._info.get(name, 0.0), self._info_weights.get(name, 0) + weight
                self._info[name] = before + (value - before) * (weight / self._info_weights[name])

    def _add(self, index: int, gradient: Tensor, weight: int) -> None:
        total = self._gradients[index]
        self._weights[index] += weight
        if total is None:
            self._gradients[index] = gradient.to(torch.promote_types(gradient.dtype, torch.float32), copy=True)
        elif self._reduction == "sum":
            total.add_(gradient.to(total.dtype))
        else:  # unlike a sum, a running mean overflows only if the gradient of a slice overflows
            total.lerp_(gradient.to(total.dtype), weight / self._weights[index])

    def result(self) -> list[Tensor | None]:
        """Return the gradient of each parameter group.

        With several policies, return the gradient of each policy instead; None for a policy without valid samples.

        Raises:
            CallOrderError: No slice had a valid sample.
        """
        if self.samples.keys() <= {""} and not any(self._weights):
            raise CallOrderError("no slice with a valid sample was added; call add() with such a slice first")
        return self._gradients

    def info(self) -> dict[str, float]:
        """Return the means of the statistics, weighted by the numbers of samples."""
        return dict(self._info)


def log_microbatch(number: int, num_samples: int, target: int) -> None:
    """Log at debug level that the gradient of a microbatch is being computed.

    Args:
        number: Number of the microbatch in its update, from 1.
        num_samples: Number of samples in the microbatches up to and including this one.
        target: Number of samples in the update.
    """
    logger.debug("Computing gradients for microbatch %d (%d/%d samples)", number, num_samples, target)


def log_update(microbatch_size: int | None, num_samples: int) -> None:
    """If microbatches are used, log at debug level that the accumulated gradients are being applied."""
    if microbatch_size is not None and num_samples:
        logger.debug("Applying accumulated gradients (%d samples)", num_samples)


def differentiate(algo: UserPart, batch: BatchOfKind, microbatch_size: int | None, counters: WorkerCounters,
                  is_part: bool = False,
                  staging: Staging | None = None) -> tuple[list[Tensor | None], dict[str, float]]:
    """Compute the gradients and the statistics of a batch, in one or several backward passes.

    Args:
        algo: The algorithm.
        batch: A batch of the kind that the algorithm learns from, on any device.
        microbatch_size: Largest number of env steps in a backward pass; None: no limit.
        counters: Counters in which `backward_passes` is increased and `microbatch_steps` is set.
        is_part: Whether the batch is itself a microbatch, which the caller has already logged. If not, this function
            logs each slice of the batch.
        staging: The object that copies the batch to the algorithm's device. If the batch is divided, each slice is
            copied during the backward pass of the previous slice. None: data are copied just before they are used.
    """
    counters.microbatch_steps = batch.num_samples
    if microbatch_size is None:
        counters.backward_passes += 1
        if staging is not None:
            batch = staging.on_device(batch)
        elif algo.device != _CPU:  # batches from replay are in host memory
            batch = map_tensors(batch, lambda tensor: tensor.to(algo.device))
        gradients, info = algo.compute_gradients(batch)
        return gradients, info
    accumulator = GradAccumulator(microbatch_size, algo.loss_reduction)
    parts = accumulator.slices(algo.prepare_batch(batch), algo.device if staging is None else None)
    for number, part in enumerate(parts if staging is None else staging.ahead(parts), start=1):
        if not is_part:
            log_microbatch(number, _count_samples(accumulator) + _count_samples(part), _count_samples(batch))
        gradients, info = algo.compute_gradients(part if staging is None else staging.on_device(part))
        accumulator.add(gradients, part.num_samples, info, part.samples)
    counters.backward_passes += accumulator.num_parts
    return accumulator.result(), decided(algo, accumulator.info())


def _count_samples(batch: BatchOfKind) -> int:
    """Return the number of samples of all policies in `batch`, which is a batch of data or a `GradAccumulator`."""
    return sum(batch.samples.values())


def decided(algo: UserPart, info: dict[str, float]) -> dict[str, float]:
    """Return `info` after replacing "skip_remaining", if present, by a decision based on the whole batch.

    The decision is whether to skip the remaining batches of a rollout. All values in `info` are means over slices, and
    the mean of the slices' decisions may be neither 0 nor 1. Therefore, the algorithm decides again, from the means.
    """
    if "skip_remaining" in info:
        info["skip_remaining"] = float(algo.skip_remaining(info))
    return info


def _length(batch: BatchOfKind) -> int | None:
    """Return the length L of a batch of sequences (L, B, ...); None for a batch of rows (B, ...)."""
    done = getattr(batch, "done", None)
    return done.shape[0] if done is not None and done.dim() == 2 else None


def _bounds(batch: BatchOfKind, part: int, num_parts: int) -> tuple[int, int, int]:
    """Return (axis, start, stop) of slice `part` of a batch, which is cut into `num_parts` slices of similar sizes."""
    axis = 0 if _length(batch) is None else 1
    count = batch.action.shape[axis]
    return axis, count * part // num_parts, count * (part + 1) // num_parts


def _cut(batch: BatchOfKind, axis: int, start: int, stop: int, device: torch.device | None) -> BatchOfKind:
    """Return the samples [start, stop) of a batch along `axis`.

    The initial recurrent memory `rhs` has no time axis, so it is always cut along axis 0.
    """
    def cut(value: Tensor, axis: int) -> Tensor:
        part = value.narrow(axis, start, stop - start)
        return part if device is None else part.to(device)

    fields: dict[str, FieldValue] = {}
    for field in dataclasses.fields(batch):
        value, own_axis = getattr(batch, field.name), 0 if field.name == "rhs" else axis
        if isinstance(value, Tensor):
            value = cut(value, own_axis)
        elif isinstance(value, Mapping):
            value = {name: cut(leaf, own_axis) for name, leaf in value.items()}
        fields[field.name] = value
    valid = fields.get("valid")
    fields["num_samples"] = stop - start if valid is None else int(valid.sum())
    return type(batch)(**fields)


def reason_to_keep_batch(options: object, norm_over: str) -> str:
    """Return why the whole train batch has to be kept until its last update, or "" if microbatches may be discarded.

    Args:
        options: The algorithm's options.
        norm_over: Data over which values such as advantages are normalized, "batch" or "microbatch".
    """
    epochs = getattr(options, "num_epochs", Algorithm.num_epochs)
    parts = getattr(options, "num_mini_batch", Algorithm.num_mini_batch)
    if (size := getattr(options, "mini_batch_size", None)) is not None:
        return f"mini_batch_size={size} draws minibatches from the whole train batch"
    if epochs * parts > 1:
        return (f"num_epochs={epochs} and num_mini_batch={parts} use the train batch more than once, or draw "
                "minibatches from it")
    normalization = getattr(options, "advantage_normalization", Algorithm.advantage_normalization)
    if normalization != "none" and norm_over == "batch":
        return f"advantage_normalization={normalization!r} needs the whole train batch with norm_over='batch'"
    return ""


def num_rollouts(rollout: int, wanted: int | None, rounds: tuple[int, int | None] | None) -> int:
    """Return the number of full rollouts in a train batch.

    With synchronous collection, each worker collects one rollout per round. A microbatch consists of whole rounds, and
    a train batch consists of whole microbatches.

    Args:
        rollout: Number of env steps in a full rollout.
        wanted: Least number of env steps in a train batch. None: one round with synchronous collection, one rollout
            with asynchronous collection.
        rounds: With synchronous collection, the pair (number of rollouts in a round, least number of env steps in a
            microbatch); the second number is None without microbatches. None with asynchronous collection.
    """
    per_round, microbatch = rounds or (1, None)
    together = -(-(microbatch or 1) // (rollout * per_round)) if wanted else 1  # rounds per microbatch
    return per_round * together * -(-(wanted or 1) // (rollout * per_round * together))


class Used(NamedTuple):
    """Counts of the samples that a gradient used."""

    num_samples: int
    num_new_samples: int
    last: bool
    samples: Mapping[str, int] = MappingProxyType({})
    """With several policies, the number of valid samples of each policy."""
