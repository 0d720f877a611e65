"""All settings of a scheme, which are given as objects of options or as flat keywords.

A level is a part of a scheme, such as collection. An object contains all options of one level; a flat keyword is a
keyword argument that sets one option. `Scheme` accepts both forms; run.json and the command line use flat keywords. An
option has the same name in both forms, and is declared once, in an `Options` class.

A kind is one variant of a level, such as asynchronous collection. Each kind is a class that contains the variant's
options. Some flat keywords, such as `col_communication`, choose the kind for a level.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar, TypeAlias

from pytorchrl.agent.declarations import Declaration
from pytorchrl.agent.names import Known, refuse_unknown
from pytorchrl.agent.options import Options, option
from pytorchrl.runtime import RUNTIMES, ProcessRuntime, RayRuntime, Runtime, SimulatedRuntime, ThreadRuntime
from pytorchrl.scheme.base.levels import Kind, Reader, as_keywords, own_names
from pytorchrl.scheme.base.options import PrefetchOptions, QueueOptions
from pytorchrl.scheme.base.worker import ASYNC, SYNC, Communication, Execution
from pytorchrl.scheme.collection.c_worker_set import CWorkerSet
from pytorchrl.scheme.collection.collector_thread import CollectorThread
from pytorchrl.scheme.collection.strategies import Barrier, OnArrival
from pytorchrl.scheme.devices import check_device
from pytorchrl.scheme.gradients.g_worker import GWorker
from pytorchrl.scheme.gradients.g_worker_set import GWorkerSet
from pytorchrl.scheme.gradients.kinds import (
    COLLECTION_KINDS,
    Collection,
    CollectionPattern,
    ReplayCollection,
    SynchronousCollection,
    collection_kind,
)
from pytorchrl.scheme.gradients.microbatch import GradAccumulator
from pytorchrl.scheme.gradients.queue_options import SampleQueueOptions
from pytorchrl.scheme.keywords import SchemeKeywords
from pytorchrl.scheme.recording.record import Record
from pytorchrl.scheme.replay.r_worker_set import RWorkerSet
from pytorchrl.scheme.supervision.supervisor import Supervisor
from pytorchrl.scheme.updates.asynchronous import AsynchronousUpdates
from pytorchrl.scheme.updates.kinds import (
    GRADIENT_KINDS,
    AsynchronousGradients,
    DecentralisedGradients,
    GradientPattern,
    Gradients,
    gradient_kind,
)
from pytorchrl.scheme.updates.u_worker import UWorker


@dataclass(frozen=True, kw_only=True)
class RuntimeName(Options):
    """The option that chooses a runtime by its name; `Scheme` also accepts an object with the runtime's options."""

    runtime: str | None = option(
        None, choices=(None, *RUNTIMES), help="Runtime of the workers: processes of Ray, processes on this machine "
        "without Ray, threads of this process, or a simulation, which runs one worker at a time on a virtual clock and "
        "repeats a run exactly. None: Ray if there are remote workers, else threads.")


@dataclass(frozen=True, kw_only=True)
class ProcessOptions(Options):
    """Options of the learner's process; the number of threads and the seed also apply to the workers."""

    device: str | None = option(None, help="Device of the learner: \"cpu\", \"cuda\" or \"cuda:N\"; None is the CPU.")
    num_threads: int = option(1, low=1, help="Torch threads of every worker, including the learner.")
    seed: int | None = option(
        None, low=0, high=2**63 - 1, help="Seed of all random numbers of the run; None draws a random seed.")

    def seed_or(self, recorded: int | None) -> int:
        """Return the seed of the run.

        It is the option `seed`, if given. Otherwise it is `recorded` or, if `recorded` is None, a random number.

        Args:
            recorded: The seed of the recorded run that is replayed; None: no run is replayed.
        """
        given = recorded if self.seed is None else self.seed
        return secrets.randbits(32) if given is None else given


@dataclass(frozen=True, kw_only=True)
class Ray(Kind, RayRuntime.Options):
    """Runtime in which remote workers are processes of a Ray cluster."""

    title: ClassVar[str] = "the Ray runtime"
    chosen_by: ClassVar[str] = "runtime='ray' and remote workers"


@dataclass(frozen=True, kw_only=True)
class Processes(Kind, ProcessRuntime.Options):
    """Runtime in which remote workers are processes on this machine, without Ray."""

    title: ClassVar[str] = "the processes runtime"
    chosen_by: ClassVar[str] = "runtime='processes'"


@dataclass(frozen=True, kw_only=True)
class Threads(Kind, ThreadRuntime.Options):
    """Runtime in which all workers are threads of this process."""

    title: ClassVar[str] = "the threads runtime"
    chosen_by: ClassVar[str] = "runtime='threads'"


@dataclass(frozen=True, kw_only=True)
class Simulated(Kind, SimulatedRuntime.Options):
    """Runtime in which all workers run in this process, one at a time, on a virtual clock."""

    title: ClassVar[str] = "the simulated runtime"
    chosen_by: ClassVar[str] = "runtime='simulated'"


RuntimeKind: TypeAlias = Ray | Processes | Threads | Simulated
RUNTIME_KINDS: Mapping[str, type[RuntimeKind]] = {
    "ray": Ray, "processes": Processes, "threads": Threads, "simulated": Simulated}


class ArchitectureKeywords(SchemeKeywords, total=False):
    """Keywords of the constructors of architectures: `Scheme.apex`, `Scheme.impala` and so on."""

    runtime: RuntimeKind | str | None


LEVELS: Mapping[str, tuple[type[Options], ...]] = {
    "collection": (CollectionPattern, CWorkerSet.Options, CWorkerSet.ReplayOptions, Barrier.Options, OnArrival.Options,
                   CollectorThread.Options),
    "queue": (QueueOptions, SampleQueueOptions),
    "replay": (RWorkerSet.Options,),
    "gradients": (GWorkerSet.Options, GWorker.Options, GradAccumulator.Options, PrefetchOptions,
                  GradAccumulator.CollectOptions),
    "updates": (GradientPattern, UWorker.Options, AsynchronousUpdates.Options),
    "runtime": (RuntimeName, Runtime.Options, RayRuntime.Options, SimulatedRuntime.Options),
    "supervision": (Supervisor.Options,),
    "recording": (Record.Options,),
    "process": (ProcessOptions,),
}
"""The classes of the options of each level, in the order of the documentation."""

_OWNERS: Mapping[str, type[Options]] = {
    name: owner for owners in LEVELS.values() for owner in owners for name in own_names(owner)}
"""The class that declares each option."""
STORAGE_KEYWORDS = ("prioritized", "alpha", "beta", "epsilon", "stratified")
"""Flat keywords that `Scheme` passes on to a replay storage, which declares them."""
_NO_LEVEL = {"num_replay_workers": None}
"""The defaults of options whose default means that their whole level, such as replay, is absent."""


def names_of_level(level: str) -> list[str]:
    """Return the names of the options of `level`, which is a key of `LEVELS`."""
    return [name for owner in LEVELS[level] for name in own_names(owner)]


def declaration_of(name: str) -> Declaration:
    """Return the declaration of the option that is the keyword argument `name` of `Scheme`."""
    return _OWNERS[name].declarations()[name]


def default_of_keyword(name: str) -> object:
    """Return the default of the keyword argument `name` of `Scheme`."""
    return _NO_LEVEL[name] if name in _NO_LEVEL else declaration_of(name).default


def known_keywords() -> Known:
    """Return the names of all keyword options of `Scheme`, from which error messages suggest the most similar name.

    Each name is mapped to ("scheme", name), as the type `Known` requires.
    """
    return {name: ("scheme", name) for name in (*_OWNERS, *STORAGE_KEYWORDS)}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings of a scheme: one object with the options of collection, one with those of gradients, and so on."""

    collection: Collection
    gradients: Gradients
    updates: UWorker.Options
    runtime: RuntimeKind
    supervision: Supervisor.Options
    recording: Record.Options
    process: ProcessOptions

    @classmethod
    def from_keywords(cls, given: Mapping[str, object], *, collection: Collection | None = None,
                      gradients: Gradients | None = None, runtime: RuntimeKind | str | None = None,
                      supervision: Supervisor.Options | None = None) -> tuple[Settings | None, list[str]]:
        """Build settings from flat keywords and, for some levels, from an object with all options of the level.

        Args:
            given: Flat keywords and their values.
            collection: All options of collection; None: built from the keywords.
            gradients: All options for computing gradients; None: built from the keywords.
            runtime: Options or name of the runtime. None: "simulated" in a replay, "ray" with remote workers,
                otherwise "threads".
            supervision: Options for the handling of lost workers; None: built from the keywords.

        Returns:
            The settings, or None if a value is not allowed; and a list of all problems. A problem is a value that is
            not allowed, an option that has no effect, a keyword for a level whose object of options is given, too, or
            a contradiction within a level.

        Raises:
            ConfigError: A name is unknown.
        """
        refuse_unknown(given, known_keywords(), "Scheme has no option")
        reader = Reader(given)
        if collection is None:
            collection = reader.choose(collection_kind(reader), COLLECTION_KINDS)
        else:
            reader.refuse("collection", ("col_communication", *_names_of(COLLECTION_KINDS)))
        if gradients is None:
            gradients = reader.choose(gradient_kind(reader), GRADIENT_KINDS)
        else:
            reader.refuse("gradients", ("grad_communication", "distribute_gradients", *_names_of(GRADIENT_KINDS)))
        if supervision is None:
            supervision = reader.read(Supervisor.Options)
        else:
            reader.refuse("supervision", _names_of((Supervisor.Options,)))
        updates, recording = reader.read(UWorker.Options), reader.read(Record.Options)
        process = reader.read(ProcessOptions)
        collection = reader.with_execution(collection, "col")
        gradients = reader.with_execution(gradients, "grad")
        if collection is None or gradients is None or recording is None:
            return None, reader.problems
        is_remote = collection.is_parallel or gradients.is_parallel or _num_shards(collection) > 1
        if runtime is None or isinstance(runtime, str):
            kind = _runtime_kind(reader, runtime, is_remote, recording.replay is not None)
            runtime = None if kind is None else reader.choose(kind, tuple(RUNTIME_KINDS.values()))
        else:
            reader.refuse("runtime", _names_of(tuple(RUNTIME_KINDS.values())))
        if updates is None or supervision is None or process is None or runtime is None:
            return None, reader.problems
        process = replace(process, device=check_device(process.device))
        return cls(collection=collection, gradients=gradients, updates=updates, runtime=runtime,
                   supervision=supervision, recording=recording, process=process), reader.problems

    # Properties of the tree

    @property
    def has_parallel_collection(self) -> bool:
        """Whether collection workers are remote."""
        return self.collection.is_parallel

    @property
    def has_parallel_gradients(self) -> bool:
        """Whether gradient workers are remote."""
        return self.gradients.is_parallel

    @property
    def num_shards(self) -> int:
        """Number of replay shards of each gradient worker; 0 without a replay level."""
        return _num_shards(self.collection)

    @property
    def has_remote_workers(self) -> bool:
        """Whether any collection workers, gradient workers or replay shards are remote."""
        return self.has_parallel_collection or self.has_parallel_gradients or self.num_shards > 1

    @property
    def used_runtime(self) -> Runtime.Options:
        """The options of the runtime in use; without remote workers, threads are used instead of Ray or processes."""
        if self.has_remote_workers or isinstance(self.runtime, Simulated):
            return self.runtime
        return ThreadRuntime.Options(faults=self.runtime.faults)

    @property
    def on_ray(self) -> bool:
        """Whether remote workers are Ray processes."""
        return isinstance(self.runtime, Ray)

    @property
    def has_processes(self) -> bool:
        """Whether remote workers are separate processes."""
        return isinstance(self.runtime, Ray | Processes)

    def flat(self) -> dict[str, object]:
        """Return a mapping from each flat keyword of `Scheme` to its value in JSON-serializable form."""
        patterns: dict[str, object] = {
            "col_communication": SYNC if isinstance(self.collection, SynchronousCollection) else ASYNC,
            "grad_communication": ASYNC if isinstance(self.gradients, AsynchronousGradients) else SYNC,
            "distribute_gradients": isinstance(self.gradients, DecentralisedGradients),
            "runtime": next(name for name, kind in RUNTIME_KINDS.items() if isinstance(self.runtime, kind))}
        levels = [getattr(self, field.name) for field in fields(self)]
        values = patterns | {name: value for level in levels for name, value in as_keywords(level).items()}
        return {name: _as_json(values.get(name, default_of_keyword(name))) for name in _OWNERS}


def _as_json(value: object) -> object:
    if isinstance(value, (Execution, Communication, os.PathLike)):
        return str(value)
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, tuple) else value


def _num_shards(collection: Collection) -> int:
    return collection.num_replay_workers if isinstance(collection, ReplayCollection) else 0


def _runtime_kind(reader: Reader, name: str | None, is_remote: bool, is_replay: bool) -> type[RuntimeKind] | None:
    if name is not None and name not in RUNTIME_KINDS:
        reader.problems.append(f"runtime must be one of {list(RUNTIME_KINDS)} or None, got {name!r}")
        return None
    if not is_replay:
        return RUNTIME_KINDS[name or ("ray" if is_remote else "threads")]
    if name not in (None, "simulated"):
        reader.problems.append("a replay always runs in the simulated runtime, even if the recorded run used another "
                               f"one; leave out runtime={name!r}")
    names = ("schedule_seed", "costs", "placement", "address")
    ignored = [option for option in names if reader.given.pop(option, None)]
    reader.problems += [f"{option} would be ignored: the replayed record determines the order of events"
                        for option in ignored]
    return Simulated


def _names_of(kinds: Sequence[type[Options]]) -> list[str]:
    return list(dict.fromkeys(name for kind in kinds for name in kind.declarations()))
