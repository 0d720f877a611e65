"""Options of updates, and the three kinds of gradients: synchronous, asynchronous and decentralized."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from pytorchrl.agent.options import Options, option
from pytorchrl.errors import Problem
from pytorchrl.scheme.options.base import SYNC, Communication, Kind, check_codec
from pytorchrl.scheme.options.gradients import GWorkerSetOptions
from pytorchrl.scheme.transport.encoder import WEIGHTS

LAG_POLICIES = ("apply", "scale", "drop")


@dataclass(frozen=True, kw_only=True)
class UWorkerOptions(Options):
    """Options of the update worker."""

    updates_per_step: int = option(
        1, low=1, help="Number of updates that one call of `step()` makes; it returns mean statistics over these "
        "updates.")
    compress_weights_to_send: bool | str = option(
        False, check=check_codec(WEIGHTS),
        help="Codec of weights sent to workers: False, True (\"lz4\"), a name (\"lz4\", \"zstd\"; lossy: "
        "\"fp16\", \"bf16\"), \"auto\" (\"lz4\" while that saves time) or \"auto:<name>\".")


@dataclass(frozen=True, kw_only=True)
class AsynchronousUpdatesOptions(Options):
    """Options of asynchronous gradients.

    The lag of a gradient is the number of updates between the weights with which it was computed and the current
    weights.
    """

    aggregate: int = option(
        1, low=1, help="Number of asynchronous gradients, from different gradient workers, that are averaged into "
        "one update.")
    max_grad_lag: int | None = option(
        None, low=0, help="Largest lag, in updates, at which an asynchronous gradient is applied unchanged; "
        "None: no limit.")
    lag_policy: str = option(
        "apply", choices=LAG_POLICIES, help="Treatment of a gradient whose lag l exceeds max_grad_lag = m: "
        "\"apply\" applies it unchanged and counts it, \"scale\" multiplies it by (1 + m) / (1 + l), \"drop\" "
        "drops it.")

    def contradictions(self) -> Iterator[Problem]:
        """Refuse a `lag_policy` that has no effect because `max_grad_lag` is None."""
        yield from super().contradictions()
        if self.max_grad_lag is None and self.lag_policy != "apply":
            yield Problem(f"lag_policy={self.lag_policy!r} needs max_grad_lag, got None",
                          "set the largest acceptable lag", ("lag_policy", "max_grad_lag"))

    def is_late(self, lag: int) -> bool:
        """Return whether a lag exceeds `max_grad_lag`."""
        return self.max_grad_lag is not None and lag > self.max_grad_lag

    def factor(self, lag: int) -> float:
        """Return the factor by which a gradient with this lag is multiplied; 0 means that it is dropped."""
        if self.max_grad_lag is None or lag <= self.max_grad_lag or self.lag_policy == "apply":
            return 1.0
        return (1 + self.max_grad_lag) / (1 + lag) if self.lag_policy == "scale" else 0.0


@dataclass(frozen=True, kw_only=True)
class GradientPattern(Options):
    """Keywords of `Scheme` that select synchronous, asynchronous or decentralized gradients."""

    grad_communication: Communication = option(
        SYNC, help="Coordination of gradient workers: \"synchronous\" makes one update from the gradients of all "
        "workers, \"asynchronous\" applies each gradient when it arrives.")
    distribute_gradients: bool = option(
        False, help="Whether gradient workers average gradients among themselves (with gloo, or with NCCL if each has "
        "a GPU of its own), and each applies the update.")


@dataclass(frozen=True, kw_only=True)
class SynchronousGradients(GWorkerSetOptions, Kind):
    """Options of synchronous gradients: each update applies the mean gradient of all workers."""

    chosen: ClassVar[tuple[str, ...]] = (
        "with grad_communication='synchronous'", "without distribute_gradients")


@dataclass(frozen=True, kw_only=True)
class AsynchronousGradients(GWorkerSetOptions, AsynchronousUpdatesOptions, Kind):
    """Options of asynchronous gradients, which are applied without waiting for all workers.

    If the only gradient worker is local, a separate thread makes the updates.
    """

    chosen: ClassVar[tuple[str, ...]] = (
        "with grad_communication='asynchronous'", "without distribute_gradients")


@dataclass(frozen=True, kw_only=True)
class DecentralizedGradients(GWorkerSetOptions, Kind):
    """Options of decentralized gradients: all gradient workers exchange gradients, and each applies the mean."""

    chosen: ClassVar[tuple[str, ...]] = ("with distribute_gradients=True",)


GradientKind: TypeAlias = SynchronousGradients | AsynchronousGradients | DecentralizedGradients
GRADIENT_KINDS = (SynchronousGradients, AsynchronousGradients, DecentralizedGradients)
