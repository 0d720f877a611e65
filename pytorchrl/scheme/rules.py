"""Check combinations of settings of several levels, such as collection and gradients, before any worker starts.

Each rule is a row of `RULES` or `WARNINGS`, with the condition under which settings break the rule and the text of the
error or warning. Rules for a single level are in the level's `Options` classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

from pytorchrl.errors import ConfigError
from pytorchrl.runtime import FaultPlan, is_default
from pytorchrl.runtime.processes.runtime import platform_problem
from pytorchrl.scheme.gradients.placement import Placement
from pytorchrl.scheme.options.base import as_keywords, raise_all
from pytorchrl.scheme.options.collection import Collection, ReplayCollection, SynchronousCollection
from pytorchrl.scheme.options.run import Processes, Ray, RuntimeKind, Simulated, Threads
from pytorchrl.scheme.options.settings import Settings
from pytorchrl.scheme.options.updates import AsynchronousGradients, DecentralisedGradients, GradientKind
from pytorchrl.scheme.supervision.supervisor import Supervisor
from pytorchrl.scheme.transport.encoder import DATA, GRADS, WEIGHTS, Compression

T = TypeVar("T")


class Rule(NamedTuple):
    """A rule: the condition under which settings break it, and the text of the error or warning."""

    is_broken: Callable[[Settings], bool]
    text: Callable[[Settings], str]


def checked_settings(given: Mapping[str, object], *, collection: Collection | None = None,
                     gradients: GradientKind | None = None, runtime: RuntimeKind | str | None = None,
                     supervision: Supervisor.Options | None = None,
                     for_storage: Mapping[str, object] = {}) -> Settings:
    """Return the settings of a scheme, checked against all rules.

    Args:
        given: Keyword arguments of `Scheme`.
        collection: Options of collection; None: built from `given`.
        gradients: Options for computing gradients; None: built from `given`.
        runtime: Options of the runtime, or its name. None: "simulated" in a replay, "ray" with remote workers,
            otherwise "threads".
        supervision: Options for the handling of lost workers; None: built from `given`.
        for_storage: Keyword arguments of `Scheme` that belong to a replay storage.

    Raises:
        ConfigError: Settings are invalid or contradict each other. The message lists all problems.
    """
    settings, problems = Settings.from_keywords(
        given, collection=collection, gradients=gradients, runtime=runtime, supervision=supervision)
    problems += [f"{name} must be True, False or None, got {for_storage[name]!r}"
                 for name in ("prioritized", "stratified") if not isinstance(for_storage.get(name), bool | None)]
    if settings is None or not settings.num_shards:
        problems += [f"{name}={value} is for replay workers; give num_replay_workers, or leave it out"
                     for name, value in for_storage.items() if value is not None]
    if settings is not None:
        problems += problems_of(settings)
    raise_all(problems)
    assert settings is not None
    return settings


def problems_of(settings: Settings) -> list[str]:
    """Return a message for each contradiction between settings."""
    placement = Placement(settings.collection, settings.gradients, settings.process.device, settings.on_ray)
    return [rule.text(settings) for rule in RULES if rule.is_broken(settings)] + placement.problems()


def warnings_of(settings: Settings) -> list[str]:
    """Return a warning for each setting that is allowed but has no effect."""
    return [rule.text(settings) for rule in WARNINGS if rule.is_broken(settings)]


def _is_sent(kind: str, value: object) -> bool:
    return Compression.of(kind, value) is not None


def _kills(settings: Settings) -> bool:
    faults = settings.runtime.faults
    return faults is not None and FaultPlan(faults, 0).kills


def _is_lossy_auto(kind: str, value: object) -> bool:
    compression = Compression.of(kind, value)
    return compression is not None and compression.is_auto and not compression.codec.is_lossless


def _decides_by_time(name: str, kind: str, value: object) -> str:
    compression = Compression.of(kind, value)
    assert compression is not None
    return (f"{name}={value!r} decides from measured times which messages are rounded, so a run cannot be recorded or "
            f"replayed; give {compression.codec.name!r} or a lossless codec")


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


RULES = (
    # Recording
    Rule(lambda s: _is_repeated(s) and _is_lossy_auto(WEIGHTS, s.updates.compress_weights_to_send),
         lambda s: _decides_by_time("compress_weights_to_send", WEIGHTS, s.updates.compress_weights_to_send)),
    Rule(lambda s: _is_repeated(s) and _is_lossy_auto(GRADS, s.gradients.compress_grads_to_send),
         lambda s: _decides_by_time("compress_grads_to_send", GRADS, s.gradients.compress_grads_to_send)),
    Rule(lambda s: _is_repeated(s) and isinstance(s.collection, ReplayCollection),
         lambda s: "a run with num_replay_workers cannot be recorded or replayed; leave out num_replay_workers, or "
                   "record and replay"),
    # Remote workers
    Rule(lambda s: not s.has_parallel_collection and not is_default(s.collection.col_worker_resources),
         lambda s: "col_worker_resources is for remote collection workers, but there are none; give "
                   f"{_REMOTE_COLLECTION}, or leave col_worker_resources out"),
    Rule(lambda s: not s.has_parallel_gradients and not is_default(s.gradients.grad_worker_resources),
         lambda s: "grad_worker_resources is for remote gradient workers, but there are none; give "
                   f"{_REMOTE_GRADIENTS}, or leave grad_worker_resources out"),
    Rule(lambda s: isinstance(s.runtime, Ray) and s.runtime.address is not None and not s.has_remote_workers,
         lambda s: "address is for a Ray cluster, but a scheme without remote workers does not use one; leave it out"),
    Rule(lambda s: isinstance(s.runtime, Ray) and s.runtime.placement is not None
         and not (s.has_parallel_gradients and (s.has_parallel_collection or s.num_shards > 1)),
         lambda s: "placement='colocate' places each gradient worker on the same node as its own remote workers; give "
                   "num_grad_workers >= 2 and num_col_workers (or num_replay_workers) >= 2, or leave it out"),
    Rule(lambda s: _kills(s) and not s.has_remote_workers and not isinstance(s.runtime, Simulated),
         lambda s: "faults kill a worker, but there is no remote worker, and a thread cannot be killed; use remote "
                   "workers, or remove the kill from faults"),
    Rule(lambda s: _kills(s) and s.has_remote_workers and isinstance(s.runtime, Threads),
         lambda s: "faults kill a worker, but a thread cannot be killed; give runtime='ray', "
                   "runtime='processes' or runtime='simulated'"),
    Rule(lambda s: s.collection.col_num_threads is not None and not (s.has_parallel_collection and s.has_processes),
         lambda s: f"col_num_threads={s.collection.col_num_threads} is for collection workers in separate processes; "
                   f"give {_REMOTE_COLLECTION}, and runtime='ray' or runtime='processes'"),
    Rule(lambda s: isinstance(s.runtime, Processes) and bool(platform_problem()), lambda s: platform_problem()),
    # Gradients
    Rule(lambda s: bool(_changed_of_asynchronous_gradients(s)),
         lambda s: ", ".join(f"{name}={getattr(s.gradients, name)!r}" for name in _changed_of_asynchronous_gradients(s))
         + " is for grad_communication='asynchronous' with num_grad_workers >= 2, and would be ignored; leave it out"),
    Rule(lambda s: isinstance(s.gradients, AsynchronousGradients) and s.has_parallel_gradients
         and s.gradients.aggregate > s.gradients.num_grad_workers,
         lambda s: f"aggregate must be from 1 to num_grad_workers ({s.gradients.num_grad_workers}), got "
                   f"{as_keywords(s.gradients)['aggregate']}"),
    Rule(lambda s: isinstance(s.gradients, DecentralisedGradients) and s.gradients.num_grad_workers < 2,
         lambda s: "distribute_gradients=True needs num_grad_workers >= 2"),
    # Compression
    Rule(lambda s: isinstance(s.gradients, DecentralisedGradients)
         and _is_sent(GRADS, s.gradients.compress_grads_to_send),
         lambda s: f"compress_grads_to_send={s.gradients.compress_grads_to_send!r} contradicts "
                   "distribute_gradients=True: gradient workers sum gradients among themselves in float32, and send "
                   "no encoded gradients; leave one of the two out"),
    Rule(lambda s: not s.has_parallel_gradients and _is_sent(GRADS, s.gradients.compress_grads_to_send),
         lambda s: f"compress_grads_to_send={s.gradients.compress_grads_to_send!r} needs "
                   f"{_REMOTE_GRADIENTS}: central gradients are not sent"),
    Rule(lambda s: not s.has_parallel_collection and _is_sent(DATA, s.collection.compress_data_to_send),
         lambda s: f"compress_data_to_send={s.collection.compress_data_to_send!r} needs "
                   f"{_REMOTE_COLLECTION}: rollouts of the local worker are not sent"),
    Rule(lambda s: _is_sent(WEIGHTS, s.updates.compress_weights_to_send) and not s.has_parallel_collection
         and (isinstance(s.gradients, DecentralisedGradients) or not s.has_parallel_gradients),
         lambda s: f"compress_weights_to_send={s.updates.compress_weights_to_send!r} needs remote workers: otherwise "
                   f"weights are not sent; give {_REMOTE_COLLECTION}, or give {_REMOTE_GRADIENTS} without "
                   "distribute_gradients"),
    # Central inference
    Rule(lambda s: s.collection.infers_centrally and not s.has_parallel_collection,
         lambda s: f"inference='central' needs {_REMOTE_COLLECTION}: otherwise there is no worker that steps "
                   "environments in another process"),
    Rule(lambda s: s.collection.infers_centrally and _is_sent(WEIGHTS, s.updates.compress_weights_to_send)
         and not s.has_parallel_gradients,
         lambda s: "compress_weights_to_send contradicts inference='central': the actor is in the same process as the "
                   "learner, so weights are not sent; leave one of them out"),
    # Stragglers
    Rule(lambda s: isinstance(s.collection, SynchronousCollection) and s.collection.on_straggler == "finish"
         and s.collection.train_batch_size is not None and isinstance(s.gradients, DecentralisedGradients)
         and not s.has_parallel_collection,
         lambda s: "on_straggler='finish' contradicts train_batch_size for gradient workers that collect themselves: a "
                   "worker that is preempted before it has train_batch_size steps starts another rollout, so the "
                   "workers would not contribute equally many steps; leave one of the two out"),
    # Prefetch
    Rule(lambda s: isinstance(s.collection, SynchronousCollection) and s.collection.prefetch == 1
         and not s.has_parallel_collection,
         lambda s: f"prefetch=1 needs {_REMOTE_COLLECTION}: the local worker cannot collect while the learner "
                   "computes"),
)
"""Rules that concern several levels."""

WARNINGS = (
    Rule(lambda s: isinstance(s.collection, SynchronousCollection) and s.collection.col_fraction_workers < 1.0
         and not s.has_parallel_collection and not isinstance(s.gradients, DecentralisedGradients),
         lambda s: "col_fraction_workers < 1 has no effect with num_col_workers=1"),
)


def check_scheme(scheme: T) -> T:
    """Return `scheme`; raise `ConfigError` if it is not a scheme, for example if it is a factory."""
    if not hasattr(scheme, "settings"):
        raise ConfigError(f"scheme must be a Scheme, such as Scheme(algorithm, actor, storage, envs), got {scheme!r}")
    return scheme
