"""Contradictions between settings of several levels, such as collection and gradients.

Each rule is a row of `RULES` or `WARNINGS`. Contradictions within a level are in the level's class of options; see
`check`, which finds all of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

from pytorchrl.errors import Problem
from pytorchrl.runtime import FaultPlan, is_default
from pytorchrl.runtime.faults import POINTS
from pytorchrl.runtime.processes.runtime import platform_problem
from pytorchrl.scheme.options.base import as_keywords
from pytorchrl.scheme.options.collection import ReplayCollection, SynchronousCollection
from pytorchrl.scheme.options.run import Processes, Ray, Simulated, Threads
from pytorchrl.scheme.options.settings import Settings, numbers_problems
from pytorchrl.scheme.options.updates import AsynchronousGradients, DecentralizedGradients
from pytorchrl.scheme.transport.encoder import DATA, GRADS, WEIGHTS, Compression


class Rule(NamedTuple):
    """A rule about several settings."""

    is_broken: Callable[[Settings], bool]
    """Whether settings break the rule."""
    text: Callable[[Settings], str]
    """The mistake in settings that break the rule."""
    remedy: str | Callable[[Settings], str]
    """The way to mend such settings."""
    options: tuple[str, ...]
    """The settings that the rule concerns."""


def rule_problems(settings: Settings) -> list[Problem]:
    """Return a problem for each broken rule."""
    return [*(Problem(rule.text(settings), rule.remedy if isinstance(rule.remedy, str) else rule.remedy(settings),
                      rule.options) for rule in RULES if rule.is_broken(settings)),
            *numbers_problems(settings.collection, settings.gradients)]


def rule_warnings(settings: Settings) -> list[str]:
    """Return a warning for each setting that is allowed but has no effect."""
    return [rule.text(settings) for rule in WARNINGS if rule.is_broken(settings)]


def _is_sent(kind: str, value: object) -> bool:
    return Compression.of(kind, value) is not None


def _kills(settings: Settings) -> bool:
    faults = settings.runtime.faults
    return faults is not None and FaultPlan(faults, 0).kills


def _reached(settings: Settings) -> Iterator[tuple[str, str]]:
    """Yield the name of each worker with each point of its work at which a fault may happen; see `FaultPlan`."""
    num_grad_workers = settings.gradients.num_grad_workers
    parents = range(1, num_grad_workers + 1) if settings.has_parallel_gradients else range(1)
    appliers = parents if isinstance(settings.gradients, DecentralizedGradients) else range(1)
    yield from ((f"GWorker {parent}", "grad") for parent in parents)
    yield from ((f"GWorker {parent}", "update") for parent in appliers)
    for parent, number in zip(parents, settings.collection.numbers(num_grad_workers), strict=False):
        collectors = range(1, number + 1) if settings.has_parallel_collection else range(1)
        yield from ((f"GWorker {parent}/CWorker {index}", "step") for index in collectors)
        shards = range(1, settings.num_replay_workers + 1)
        yield from ((f"GWorker {parent}/RWorker {index}", point) for index in shards for point in POINTS["shard"])


def _names_of_workers(settings: Settings) -> str:
    return ", ".join(dict.fromkeys(name for name, _ in itertools.islice(_reached(settings), _SHOWN_WORKERS)))


def _impossible(settings: Settings) -> list[str]:
    """Return the faults of a scheme whose worker does not exist, or does not reach the fault's point."""
    faults = settings.runtime.faults
    return [] if faults is None else FaultPlan(faults, 0).impossible(_reached(settings))


def _is_lossy_auto(kind: str, value: object) -> bool:
    compression = Compression.of(kind, value)
    return compression is not None and compression.is_auto and not compression.codec.is_lossless


def _decides_by_time(name: str, value: object) -> str:
    return (f"{name}={value!r} decides from measured times which messages are rounded, so a run cannot be recorded or "
            "replayed")


def _without_auto(kind: str, value: object) -> str:
    compression = Compression.of(kind, value)
    assert compression is not None
    return f"give {compression.codec.name!r} or a lossless codec"


def _is_repeated(settings: Settings) -> bool:
    return settings.recording.record is not None or settings.recording.replay is not None


# Texts for error messages: settings that make the workers of a level remote.
_REMOTE_COLLECTION = "num_col_workers >= 2 or col_execution='Parallel'"
_REMOTE_GRADIENTS = "num_grad_workers >= 2 or grad_execution='Parallel'"

_ASYNCHRONOUS_GRADIENTS = ("aggregate", "max_grad_lag", "lag_policy")


def _changed_of_asynchronous_gradients(settings: Settings) -> list[str]:
    gradients = settings.gradients
    if not isinstance(gradients, AsynchronousGradients) or settings.has_parallel_gradients:
        return []
    return [name for name in gradients.changed() if name in _ASYNCHRONOUS_GRADIENTS]


# An error names at most this many workers (each with several points).
_SHOWN_WORKERS = 12
_COLLECTION = ("num_col_workers", "col_execution")
_GRADIENTS = ("num_grad_workers", "grad_execution")
_RECORDS = ("record", "replay")

RULES = (
    # Recording
    Rule(lambda s: _is_repeated(s) and _is_lossy_auto(WEIGHTS, s.updates.compress_weights_to_send),
         lambda s: _decides_by_time("compress_weights_to_send", s.updates.compress_weights_to_send),
         lambda s: _without_auto(WEIGHTS, s.updates.compress_weights_to_send), ("compress_weights_to_send", *_RECORDS)),
    Rule(lambda s: _is_repeated(s) and _is_lossy_auto(GRADS, s.gradients.compress_grads_to_send),
         lambda s: _decides_by_time("compress_grads_to_send", s.gradients.compress_grads_to_send),
         lambda s: _without_auto(GRADS, s.gradients.compress_grads_to_send), ("compress_grads_to_send", *_RECORDS)),
    Rule(lambda s: _is_repeated(s) and isinstance(s.collection, ReplayCollection),
         lambda s: "a run with num_replay_workers cannot be recorded or replayed",
         "leave out num_replay_workers, or record and replay", ("num_replay_workers", *_RECORDS)),
    # Remote workers
    Rule(lambda s: not s.has_parallel_collection and not is_default(s.collection.col_worker_resources),
         lambda s: "col_worker_resources is for remote collection workers, but there are none",
         f"give {_REMOTE_COLLECTION}, or leave col_worker_resources out", ("col_worker_resources", *_COLLECTION)),
    Rule(lambda s: not s.has_parallel_gradients and not is_default(s.gradients.grad_worker_resources),
         lambda s: "grad_worker_resources is for remote gradient workers, but there are none",
         f"give {_REMOTE_GRADIENTS}, or leave grad_worker_resources out", ("grad_worker_resources", *_GRADIENTS)),
    Rule(lambda s: isinstance(s.runtime, Ray) and s.runtime.address is not None and not s.has_remote_workers,
         lambda s: "address is for a Ray cluster, but a scheme without remote workers does not use one",
         "leave address out", ("address", *_COLLECTION, *_GRADIENTS, "num_replay_workers")),
    Rule(lambda s: isinstance(s.runtime, Ray) and s.runtime.placement is not None
         and not (s.has_parallel_gradients and (s.has_parallel_collection or s.num_replay_workers > 1)),
         lambda s: "placement='colocate' places each gradient worker on the same node as its own remote workers",
         "give num_grad_workers >= 2 and num_col_workers (or num_replay_workers) >= 2, or leave placement out",
         ("placement", *_COLLECTION, *_GRADIENTS, "num_replay_workers")),
    Rule(lambda s: _kills(s) and not s.has_remote_workers and not isinstance(s.runtime, Simulated | Threads),
         lambda s: "faults kill a worker, but there is no remote worker, and a thread cannot be killed",
         "use remote workers, or remove the kill from faults", ("faults", *_COLLECTION, *_GRADIENTS)),
    Rule(lambda s: bool(_impossible(s)),
         lambda s: f"faults has {', '.join(map(repr, _impossible(s)))}, which cannot happen: no worker with this name "
                   f"reaches this point; the workers are {_names_of_workers(s)}",
         "name one of them; 'update' is a point of GWorker 0, or of each gradient worker with distribute_gradients",
         ("faults", *_COLLECTION, *_GRADIENTS)),
    Rule(lambda s: s.collection.col_num_threads is not None and not (s.has_parallel_collection and s.has_processes),
         lambda s: f"col_num_threads={s.collection.col_num_threads} is for collection workers in separate processes",
         f"give {_REMOTE_COLLECTION}, and runtime='ray' or runtime='processes'",
         ("col_num_threads", *_COLLECTION, "runtime")),
    Rule(lambda s: isinstance(s.runtime, Processes) and bool(platform_problem()), lambda s: platform_problem(),
         "", ("runtime",)),
    # Gradients
    Rule(lambda s: bool(_changed_of_asynchronous_gradients(s)),
         lambda s: ", ".join(f"{name}={getattr(s.gradients, name)!r}" for name in _changed_of_asynchronous_gradients(s))
         + " is for grad_communication='asynchronous' with num_grad_workers >= 2, and would be ignored",
         "leave it out", (*_ASYNCHRONOUS_GRADIENTS, *_GRADIENTS)),
    Rule(lambda s: isinstance(s.gradients, AsynchronousGradients) and s.has_parallel_gradients
         and s.gradients.aggregate > s.gradients.num_grad_workers,
         lambda s: f"aggregate must be from 1 to num_grad_workers ({s.gradients.num_grad_workers}), got "
                   f"{as_keywords(s.gradients)['aggregate']}", "lower aggregate", ("aggregate", *_GRADIENTS)),
    Rule(lambda s: isinstance(s.gradients, DecentralizedGradients) and s.gradients.num_grad_workers < 2,
         lambda s: "distribute_gradients=True needs num_grad_workers >= 2",
         "give that, or leave distribute_gradients out", ("distribute_gradients", "num_grad_workers")),
    # Compression
    Rule(lambda s: isinstance(s.gradients, DecentralizedGradients)
         and _is_sent(GRADS, s.gradients.compress_grads_to_send),
         lambda s: f"compress_grads_to_send={s.gradients.compress_grads_to_send!r} contradicts "
                   "distribute_gradients=True: gradient workers sum gradients among themselves in float32, and send no "
                   "encoded gradients",
         "leave one of the two out", ("compress_grads_to_send", "distribute_gradients")),
    Rule(lambda s: not s.has_parallel_gradients and not isinstance(s.gradients, DecentralizedGradients)
         and _is_sent(GRADS, s.gradients.compress_grads_to_send),
         lambda s: f"compress_grads_to_send={s.gradients.compress_grads_to_send!r} needs {_REMOTE_GRADIENTS}: central "
                   "gradients are not sent",
         "give that, or leave compress_grads_to_send out", ("compress_grads_to_send", *_GRADIENTS)),
    Rule(lambda s: not s.has_parallel_collection and _is_sent(DATA, s.collection.compress_data_to_send),
         lambda s: f"compress_data_to_send={s.collection.compress_data_to_send!r} needs {_REMOTE_COLLECTION}: rollouts "
                   "of the local worker are not sent",
         "give that, or leave compress_data_to_send out", ("compress_data_to_send", *_COLLECTION)),
    Rule(lambda s: _is_sent(WEIGHTS, s.updates.compress_weights_to_send) and not s.has_parallel_collection
         and (isinstance(s.gradients, DecentralizedGradients) or not s.has_parallel_gradients),
         lambda s: f"compress_weights_to_send={s.updates.compress_weights_to_send!r} needs remote workers: otherwise "
                   "weights are not sent",
         f"give {_REMOTE_COLLECTION}, or give {_REMOTE_GRADIENTS} without distribute_gradients",
         ("compress_weights_to_send", *_COLLECTION, *_GRADIENTS, "distribute_gradients")),
    # Central inference
    Rule(lambda s: s.collection.infers_centrally and not s.has_parallel_collection,
         lambda s: f"inference='central' needs {_REMOTE_COLLECTION}: otherwise there is no worker that steps "
                   "environments in another process", "give that, or leave inference out", ("inference", *_COLLECTION)),
    Rule(lambda s: s.collection.infers_centrally and _is_sent(WEIGHTS, s.updates.compress_weights_to_send)
         and not s.has_parallel_gradients,
         lambda s: "compress_weights_to_send contradicts inference='central': the actor is in the same process as the "
                   "learner, so weights are not sent",
         "leave one of them out", ("inference", "compress_weights_to_send", *_GRADIENTS)),
    # Stragglers
    Rule(lambda s: isinstance(s.collection, SynchronousCollection) and s.collection.on_straggler == "finish"
         and s.collection.train_batch_size is not None and isinstance(s.gradients, DecentralizedGradients)
         and not s.has_parallel_collection,
         lambda s: "on_straggler='finish' contradicts train_batch_size for gradient workers that collect themselves: a "
                   "worker that is preempted before it has train_batch_size steps starts another rollout, so the "
                   "workers would not contribute equally many steps",
         "leave one of the two out", ("on_straggler", "train_batch_size", "distribute_gradients", *_COLLECTION)),
    # Prefetch
    Rule(lambda s: isinstance(s.collection, SynchronousCollection) and s.collection.prefetch == 1
         and s.collection.collects_microbatches and not s.has_parallel_collection,
         lambda s: f"prefetch=1 needs {_REMOTE_COLLECTION}: the local worker cannot collect while the learner computes",
         "give that, or leave prefetch out", ("prefetch", *_COLLECTION)),
)
"""Rules that concern several levels."""

WARNINGS = (
    Rule(lambda s: isinstance(s.collection, SynchronousCollection) and s.collection.col_fraction_workers < 1.0
         and not s.has_parallel_collection and not isinstance(s.gradients, DecentralizedGradients),
         lambda s: "col_fraction_workers < 1 has no effect with num_col_workers=1", "", ()),
)
