"""Options of the three ways to make updates from gradients: synchronous, asynchronous and decentralised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from pytorchrl.agent.options import Options, option
from pytorchrl.scheme.base.levels import Kind, Reader, as_keywords, raise_all
from pytorchrl.scheme.base.worker import ASYNC, SYNC, Communication
from pytorchrl.scheme.gradients.g_worker_set import GWorkerSet
from pytorchrl.scheme.updates.asynchronous import AsynchronousUpdates


@dataclass(frozen=True, kw_only=True)
class GradientPattern(Options):
    """Keywords of `Scheme` that select synchronous, asynchronous or decentralised gradients."""

    grad_communication: Communication = option(
        SYNC, help="Coordination of gradient workers: \"synchronous\" makes one update from the gradients of all "
        "workers, \"asynchronous\" applies each gradient when it arrives.")
    distribute_gradients: bool = option(
        False, help="Whether gradient workers average gradients among themselves (with gloo, or with NCCL if each has "
        "a GPU of its own), and each applies the update.")


@dataclass(frozen=True, kw_only=True)
class SynchronousGradients(GWorkerSet.Options, Kind):
    """Options of synchronous gradients: each update applies the mean gradient of all workers."""

    title: ClassVar[str] = "synchronous gradients"
    chosen_by: ClassVar[str] = "grad_communication='synchronous'"


@dataclass(frozen=True, kw_only=True)
class AsynchronousGradients(GWorkerSet.Options, AsynchronousUpdates.Options, Kind):
    """Options of asynchronous gradients, which are applied without waiting for all workers.

    If the only gradient worker is local, a separate thread makes the updates.
    """

    title: ClassVar[str] = "asynchronous gradients"
    chosen_by: ClassVar[str] = "grad_communication='asynchronous'"


@dataclass(frozen=True, kw_only=True)
class DecentralisedGradients(GWorkerSet.Options, Kind):
    """Options of decentralised gradients: all gradient workers exchange gradients, and each applies the mean."""

    title: ClassVar[str] = "decentralised gradients"
    chosen_by: ClassVar[str] = "distribute_gradients=True"


Gradients: TypeAlias = SynchronousGradients | AsynchronousGradients | DecentralisedGradients
GRADIENT_KINDS = (SynchronousGradients, AsynchronousGradients, DecentralisedGradients)


def gradient_kind(reader: Reader) -> type[Gradients]:
    """Return the class of gradient options that the keywords in `reader` select; add problems to `reader.problems`."""
    pattern = reader.read(GradientPattern)
    if pattern is None:
        return SynchronousGradients
    is_asynchronous = pattern.grad_communication is ASYNC
    if pattern.distribute_gradients and is_asynchronous:
        reader.problems.append("distribute_gradients=True contradicts grad_communication='asynchronous': gradient "
                               "workers that average among themselves wait for each other; leave one of the two out")
    if pattern.distribute_gradients:
        return DecentralisedGradients
    return AsynchronousGradients if is_asynchronous else SynchronousGradients


def gradients_of(given: Mapping[str, object], options: GWorkerSet.Options) -> Gradients:
    """Return the options of gradients: `options`, merged with the keywords in `given`, which take precedence.

    The keywords also select the class of the returned object: synchronous, asynchronous or decentralised gradients.

    Raises:
        ConfigError: An option has a wrong value or no effect. The message lists all problems.
    """
    known = {name for kind in (GradientPattern, *GRADIENT_KINDS) for name in kind.declarations()}
    reader = Reader({**as_keywords(options), **{name: value for name, value in given.items() if name in known}})
    gradients = reader.with_execution(reader.choose(gradient_kind(reader), GRADIENT_KINDS), "grad")
    raise_all(reader.problems)
    found: Gradients = gradients
    return found
