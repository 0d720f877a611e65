"""Gradients of a batch in slices: what is too large for one backward pass is differentiated piece by piece.

B = samples of a batch, L = steps of a sequence, P = scalars of a group's parameter vector.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

REDUCTIONS = ("mean", "sum")


class GradAccumulator:
    """Adds up the gradients of parts of a batch until they are that of the whole.

    Args:
        microbatch_size: Most env steps of a part; None: the batch is one part.
        reduction: What the loss is over its samples. "mean": gradients are weighted by the samples behind them,
            sum(n * g) / sum(n). "sum": they are added.

    Attributes:
        num_samples: Valid samples behind what was added.
        num_parts: Gradients added, those without a sample included.
    """

    def __init__(self, microbatch_size: int | None = None, reduction: str = "mean") -> None:
        if reduction not in REDUCTIONS:
            raise ValueError(f"reduction must be one of {list(REDUCTIONS)}, got {reduction!r}")
        self._microbatch_size, self._reduction = microbatch_size, reduction
        self._gradients: list[Tensor] = []
        self._info: dict[str, float] = {}
        self.num_samples = self.num_parts = 0

    def slices(self, batch: Any, device: torch.device) -> Iterator[Any]:
        """Parts of a batch on `device`, one after the other, of sizes that differ by at most one.

        Rows (B, ...) are cut into parts of up to `microbatch_size` rows. Sequences (L, B, ...) stay whole: as many as fit
        into `microbatch_size` steps, at least one.

        Args:
            batch: A dataclass of tensors and dictionaries of tensors, such as `Batch`; it is only read.
            device: Where the parts are wanted. The batch may lie elsewhere: one part at a time is moved.
        """
        done = getattr(batch, "done", None)
        length = done.shape[0] if done is not None and done.dim() == 2 else None
        axis = 0 if length is None else 1
        count = batch.action.shape[axis]
        size = count if self._microbatch_size is None else max(1, self._microbatch_size // (length or 1))
        num_slices = max(1, -(-count // max(1, size)))
        for part in range(num_slices):
            start, stop = count * part // num_slices, count * (part + 1) // num_slices
            yield _cut(batch, axis, start, stop, device)

    def add(self, gradients: Sequence[Tensor], num_samples: int, info: Mapping[str, float] | None = None) -> None:
        """Add what one part gave; it is copied.

        Args:
            gradients: One (P,) gradient per group, on any device. Kept in float32 or better.
            num_samples: Valid samples behind it, n; a part without any counts for nothing.
            info: Statistics, of which `info` will be the mean.
        """
        self.num_parts += 1
        if not num_samples:
            return
        self.num_samples += num_samples
        share = num_samples / self.num_samples
        if not self._gradients:
            self._gradients = [
                gradient.to(torch.promote_types(gradient.dtype, torch.float32), copy=True) for gradient in gradients]
        else:
            for total, gradient in zip(self._gradients, gradients, strict=True):
                own = gradient.to(total.dtype)
                if self._reduction == "sum":
                    total.add_(own)
                else:  # the running mean cannot overflow where no part does
                    total.lerp_(own, share)
        for name, value in (info or {}).items():
            before = self._info.get(name, 0.0)
            self._info[name] = before + (value - before) * share

    def result(self) -> list[Tensor]:
        """The gradient of the whole, one (P,) vector per group; raises `RuntimeError` where there was no sample."""
        if not self._gradients:
            raise RuntimeError("no gradient was added that has a sample behind it")
        return self._gradients

    def info(self) -> dict[str, float]:
        """Means of the statistics, weighted by samples."""
        return dict(self._info)


def _cut(batch: Any, axis: int, start: int, stop: int, device: torch.device) -> Any:
    """Samples [start, stop) of a batch; the state before a sequence has no axis of time."""
    def cut(value: Tensor, axis: int) -> Tensor:
        return value.narrow(axis, start, stop - start).to(device)

    fields: dict[str, Any] = {}
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


def why_all_is_kept(options: Any, norm_over: str) -> str:
    """Why no rollout of a train batch may be forgotten before its last update; empty if each microbatch may.

    Args:
        options: Of the algorithm.
        norm_over: "batch" or "microbatch", the option of the scheme.
    """
    epochs, parts = getattr(options, "num_epochs", 1), getattr(options, "num_mini_batch", 1)
    if epochs * parts > 1:
        return f"num_epochs={epochs} and num_mini_batch={parts} use the train batch more than once, or in parts drawn from it"
    normalization = getattr(options, "advantage_normalization", "none")
    if normalization != "none" and norm_over == "batch":
        return f"advantage_normalization={normalization!r} needs the whole train batch with norm_over='batch'"
    return ""


class Used(NamedTuple):
    """What is behind a gradient."""

    num_samples: int
    num_new_samples: int
    last: bool


def warn_of_batch_norm(actor: Any) -> None:
    """Warn of layers that normalise over what goes through them at once."""
    if any(isinstance(module, _BatchNorm) for module in actor.modules()):
        warnings.warn("the actor has batch normalisation layers, which normalise over each slice of microbatch_size "
                      "env steps, not over the batch; use layer normalisation, or leave microbatch_size out", stacklevel=2)
