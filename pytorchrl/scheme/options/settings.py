"""All settings of a scheme, which are given as objects of options or as flat keywords.

A level is a part of a scheme, such as collection. An object contains all options of one level; a flat keyword is a
keyword argument that sets one option. `Scheme` accepts both forms; run.json and the command line use flat keywords. An
option has the same name in both forms, and is declared once, in an `Options` class.

A kind is one variant of a level, such as asynchronous collection. Each kind is a class that contains the variant's
options. Some flat keywords, such as `col_communication`, choose the kind for a level.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

from pytorchrl.agent.declarations import Declaration
from pytorchrl.agent.names import Known, refuse_unknown
from pytorchrl.agent.option_values.descriptions import to_json
from pytorchrl.agent.option_values.text import items_of_call, to_python
from pytorchrl.agent.options import Options
from pytorchrl.errors import Problem
from pytorchrl.runtime import RayRuntime, Runtime, SimulatedRuntime, ThreadRuntime
from pytorchrl.scheme.devices import CPU
from pytorchrl.scheme.options.base import (
    ASYNC,
    CENTRAL,
    PARALLEL,
    SYNC,
    Kind,
    OptionsT,
    PrefetchOptions,
    QueueOptions,
    as_keywords,
    check_execution,
    own_names,
)
from pytorchrl.scheme.options.collection import (
    COLLECTION_KINDS,
    AsynchronousCollection,
    BarrierOptions,
    Collection,
    CollectionPattern,
    CollectorOptions,
    CWorkerOptions,
    DatasetOptions,
    OnArrivalOptions,
    ReplayCollection,
    ReplayCWorkerOptions,
    SampleQueueOptions,
    SynchronousCollection,
)
from pytorchrl.scheme.options.gradients import (
    GWorkerOptions,
    GWorkerSetOptions,
    MicrobatchCollectionOptions,
    MicrobatchOptions,
)
from pytorchrl.scheme.options.replay import RWorkerSetOptions
from pytorchrl.scheme.options.run import (
    RUNTIME_KINDS,
    Processes,
    ProcessOptions,
    Ray,
    RecordOptions,
    RuntimeKind,
    RuntimeName,
    Simulated,
    SupervisorOptions,
)
from pytorchrl.scheme.options.updates import (
    GRADIENT_KINDS,
    AsynchronousGradients,
    AsynchronousUpdatesOptions,
    DecentralizedGradients,
    GradientKind,
    GradientPattern,
    SynchronousGradients,
    UWorkerOptions,
)
from pytorchrl.support.problems import Problems, problems_in
from pytorchrl.support.untyped import OptionsOfSubclass

KindT = TypeVar("KindT", bound=Kind)

LEVELS: Mapping[str, tuple[type[Options], ...]] = {
    "collection": (CollectionPattern, CWorkerOptions, ReplayCWorkerOptions, BarrierOptions, OnArrivalOptions,
                   CollectorOptions, DatasetOptions),
    "queue": (QueueOptions, SampleQueueOptions),
    "replay": (RWorkerSetOptions,),
    "gradients": (GWorkerSetOptions, GWorkerOptions, MicrobatchOptions, PrefetchOptions,
                  MicrobatchCollectionOptions),
    "updates": (GradientPattern, UWorkerOptions, AsynchronousUpdatesOptions),
    "runtime": (RuntimeName, Runtime.Options, RayRuntime.Options, SimulatedRuntime.Options),
    "supervision": (SupervisorOptions,),
    "recording": (RecordOptions,),
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


def items_of_kinds(kinds: Mapping[str, Options | str | None]) -> list[str]:
    """Return "name=value" for each kind that is not None, for the `repr` of a scheme.

    The value of a kind is its class, with the options that differ from their defaults. An execution that follows from
    the number of workers is left out.
    """
    found = []
    for name, kind in kinds.items():
        if isinstance(kind, Options):
            derived = PARALLEL if getattr(kind, "num_workers", 1) > 1 else CENTRAL
            changed = {option: getattr(kind, option) for option in kind.changed()}
            found += items_of_call(f"{name}={type(kind).__name__}", {
                option: value for option, value in changed.items()
                if not (option.endswith("_execution") and value is derived)})
        elif kind is not None:
            found.append(f"{name}={kind!r}")
    return found


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings of a scheme: one object with the options of collection, one with those of gradients, and so on."""

    collection: Collection
    gradients: GradientKind
    updates: UWorkerOptions
    runtime: RuntimeKind
    supervision: SupervisorOptions
    recording: RecordOptions
    process: ProcessOptions

    @classmethod
    def from_keywords(cls, given: Mapping[str, object], *, collection: Collection | None = None,
                      gradients: GradientKind | None = None, runtime: RuntimeKind | str | None = None,
                      supervision: SupervisorOptions | None = None) -> tuple[Settings, Problems]:
        """Build settings from flat keywords and, for some levels, from an object with all options of the level.

        Args:
            given: Flat keywords and their values.
            collection: All options of collection; None: built from the keywords.
            gradients: All options for computing gradients; None: built from the keywords.
            runtime: Options or name of the runtime. None: "simulated" in a replay, "ray" with remote workers,
                otherwise "threads".
            supervision: Options for the handling of lost workers; None: built from the keywords.

        Returns:
            The settings, and the problems. A problem is an unknown name, a value that is not allowed (in the
            settings, the default takes its place), an option that has no effect, a keyword for a level whose object of
            options is given, too, or a contradiction between the options that choose a kind.
        """
        reader = KeywordReader(given)
        reader.drop_unknown("Scheme", known_keywords())
        if collection is None:
            collection = _chosen_collection(reader)
        else:
            reader.refuse("collection", ("col_communication", *_names_of(COLLECTION_KINDS)))
        if gradients is None:
            gradients = _chosen_gradients(reader)
        else:
            reader.refuse("gradients", ("grad_communication", "distribute_gradients", *_names_of(GRADIENT_KINDS)))
        if supervision is None:
            supervision = reader.read(SupervisorOptions)
        else:
            reader.refuse("supervision", _names_of((SupervisorOptions,)))
        updates, recording = reader.read(UWorkerOptions), reader.read(RecordOptions)
        process = reader.read(ProcessOptions)
        process = process.replaced(device=process.device or CPU)
        collection = reader.with_execution(collection, "col")
        gradients = reader.with_execution(gradients, "grad")
        if runtime is None or isinstance(runtime, str):
            is_remote = collection.is_parallel or gradients.is_parallel or _num_replay_workers(collection) > 1
            kind = _runtime_kind(reader, runtime, is_remote, recording.replay is not None)
            runtime = reader.choose(kind, tuple(RUNTIME_KINDS.values()), "runtime", "num_col_workers",
                                    "num_grad_workers", "col_execution", "grad_execution")
        else:
            reader.refuse("runtime", _names_of(tuple(RUNTIME_KINDS.values())))
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
    def num_replay_workers(self) -> int:
        """Number of replay shards of each gradient worker; 0 without a replay level."""
        return _num_replay_workers(self.collection)

    @property
    def has_remote_workers(self) -> bool:
        """Whether any collection workers, gradient workers or replay shards are remote."""
        return self.has_parallel_collection or self.has_parallel_gradients or self.num_replay_workers > 1

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
            "distribute_gradients": isinstance(self.gradients, DecentralizedGradients),
            "runtime": next(name for name, kind in RUNTIME_KINDS.items() if isinstance(self.runtime, kind))}
        levels = [getattr(self, field.name) for field in fields(self)]
        values = patterns | {name: value for level in levels for name, value in as_keywords(level).items()}
        return {name: to_json(values.get(name, default_of_keyword(name)), keep_tuples=False) for name in _OWNERS}


def _num_replay_workers(collection: Collection) -> int:
    return collection.num_replay_workers if isinstance(collection, ReplayCollection) else 0


def misplaced(
        given: Mapping[str, object], chosen: type[KindT], kinds: Sequence[type[KindT]], choices: Sequence[str],
) -> list[Problem]:
    """Return a problem for each given option that the chosen kind lacks, but one of its alternatives has.

    An option that is given with its default value is accepted.

    Args:
        given: Values of the given options, by name.
        chosen: The chosen kind, such as the class of options of asynchronous collection.
        kinds: The chosen kind and its alternatives, such as all kinds of collection.
        choices: Names of the options that choose the kind.
    """
    problems = []
    for name, value in given.items():
        homes = [kind for kind in kinds if name in kind.declarations()]
        if not homes or chosen in homes:
            continue
        declaration = homes[0].declarations()[name]
        stored = declaration.converted(value)
        if problem := declaration.problem(stored):
            problems.append(Problem(problem, options=(name,)))
        elif stored != declaration.default:
            # For each kind with this option, the conditions that the chosen kind lacks; if possible, those in common.
            lacking = [[each for each in home.chosen if each not in chosen.chosen] for home in homes]
            common = [each for each in lacking[0] if all(each in conditions for conditions in lacking)]
            only = " or ".join(" and ".join(conditions) for conditions in ([common] if common else lacking))
            problems.append(Problem(
                f"{name}={to_python(value)}: only {only}",
                f"change that, or leave {name} out{homes[0].instead.get(name, '')}", (name, *choices)))
    return problems


class KeywordReader:
    """Builds options from keyword arguments of `Scheme`, and collects all problems.

    Contradictions between options of the same level are not problems for the reader: the options are built
    nevertheless, and `check` reports the contradictions.

    Attributes:
        given: The keyword arguments.
        problems: The problems.
    """

    def __init__(self, given: Mapping[str, object]) -> None:
        self.given, self.problems = dict(given), Problems()

    def drop_unknown(self, owner: str, known: Known) -> None:
        """Remove the keywords that are not in `known`; each is a problem of `owner`."""
        for problem in problems_in(refuse_unknown, self.given, known, f"{owner} has no option"):
            self.problems.wrong(problem)
        self.given = {name: value for name, value in self.given.items() if name in known}

    def read(self, options: type[OptionsT]) -> OptionsT:
        """Return an object of the class `options`; wrong values are problems, and are replaced by defaults."""
        names = options.declarations()
        built = self.problems.build(options, {name: value for name, value in self.given.items() if name in names})
        assert built is not None, f"{options.__name__} has an option without a default"
        return built

    def choose(self, kind: type[KindT], kinds: Sequence[type[KindT]], *choices: str) -> KindT:
        """Build options of class `kind`; each given keyword that only other `kinds` have is a problem.

        Args:
            kind: The chosen kind.
            kinds: All kinds of the level.
            choices: Names of the options that choose the kind.
        """
        options = self.read(kind)
        self.problems.add(misplaced(self.given, kind, kinds, choices))
        return options

    def refuse(self, level: str, names: Iterable[str]) -> None:
        """Add a problem if a keyword in `names` was given in addition to an object with the options of `level`."""
        if both := [name for name in names if name in self.given]:
            self.problems.add([Problem(
                f"{', '.join(both)} and {level}= are two forms of the same settings",
                f"give {both[0]} as an option of {level}, or leave {level} out", tuple(both))])

    def with_execution(self, options: OptionsOfSubclass, level: str) -> OptionsOfSubclass:
        """Return `options`, with a default for `{level}_execution`: "Parallel" for several workers, "Central" for one.

        If a given `{level}_execution` contradicts the number of workers, a problem is added.
        """
        name, count = f"{level}_execution", options.num_workers
        execution = getattr(options, name)
        if execution is None:
            return options.replaced(**{name: PARALLEL if count > 1 else CENTRAL})
        found = problems_in(check_execution, level, execution, count)
        self.problems.add(replace(problem, options=(name, f"num_{level}_workers")) for problem in found)
        return options

    def finish(self, options: KindT, level: str) -> KindT:
        """Return `options` as `with_execution` does; raise one error if there are problems or contradictions."""
        options = self.with_execution(options, level)
        self.problems.add(options.contradictions())
        self.problems.raise_all()
        return options


def numbers_problems(collection: Collection, gradients: GWorkerSetOptions) -> list[Problem]:
    """Return a problem if `num_col_workers` is a tuple that does not have a number for each gradient worker."""
    numbers = collection.num_col_workers
    if not isinstance(numbers, tuple) or len(numbers) == gradients.num_grad_workers:
        return []
    return [Problem(
        f"num_col_workers has {len(numbers)} numbers for {gradients.num_grad_workers} gradient workers, got {numbers}",
        "give one for each", ("num_col_workers", "num_grad_workers"))]


def collection_kind(reader: KeywordReader) -> type[Collection]:
    """Return the kind of collection that the keywords in `reader` select; add any problem to `reader.problems`."""
    pattern = reader.read(CollectionPattern)
    is_asynchronous = pattern.col_communication is ASYNC
    if reader.given.get("num_replay_workers") is None:
        reader.given.pop("num_replay_workers", None)
        return AsynchronousCollection if is_asynchronous else SynchronousCollection
    if not is_asynchronous:
        reader.problems.add([Problem(
            "num_replay_workers needs col_communication='asynchronous', because shards are filled during learning",
            "give that, or leave num_replay_workers out", ("num_replay_workers", "col_communication"))])
    return ReplayCollection


def collection_of(given: Mapping[str, object]) -> Collection:
    """Build the options of collection from keywords.

    Raises:
        ConfigError: An option is unknown, has an invalid value, or would have no effect. The message lists all
            problems.
    """
    known = {name for kind in (CollectionPattern, *COLLECTION_KINDS) for name in kind.declarations()}
    reader = KeywordReader(given)
    reader.drop_unknown("GWorkerSet", {name: ("scheme", name) for name in known})
    return reader.finish(_chosen_collection(reader), "col")


def _chosen_collection(reader: KeywordReader) -> Collection:
    return reader.choose(collection_kind(reader), COLLECTION_KINDS, "col_communication", "num_replay_workers")


def gradient_kind(reader: KeywordReader) -> type[GradientKind]:
    """Return the class of gradient options that the keywords in `reader` select; add problems to `reader.problems`."""
    pattern = reader.read(GradientPattern)
    is_asynchronous = pattern.grad_communication is ASYNC
    if pattern.distribute_gradients and is_asynchronous:
        reader.problems.add([Problem(
            "distribute_gradients=True contradicts grad_communication='asynchronous': gradient workers that average "
            "among themselves wait for each other", "leave one of the two out",
            ("distribute_gradients", "grad_communication"))])
    if pattern.distribute_gradients:
        return DecentralizedGradients
    return AsynchronousGradients if is_asynchronous else SynchronousGradients


def gradients_of(given: Mapping[str, object], options: GWorkerSetOptions) -> GradientKind:
    """Return the options of gradients: `options`, merged with the keywords in `given`, which take precedence.

    The keywords also select the class of the returned object: synchronous, asynchronous or decentralized gradients.

    Raises:
        ConfigError: An option has a wrong value or no effect. The message lists all problems.
    """
    known = {name for kind in (GradientPattern, *GRADIENT_KINDS) for name in kind.declarations()}
    reader = KeywordReader({**as_keywords(options), **{name: value for name, value in given.items() if name in known}})
    return reader.finish(_chosen_gradients(reader), "grad")


def _chosen_gradients(reader: KeywordReader) -> GradientKind:
    return reader.choose(gradient_kind(reader), GRADIENT_KINDS, "grad_communication", "distribute_gradients")


def _runtime_kind(reader: KeywordReader, name: str | None, is_remote: bool, is_replay: bool) -> type[RuntimeKind]:
    default = "ray" if is_remote else "threads"
    if name is not None and name not in RUNTIME_KINDS:
        reader.problems.wrong(Problem(f"runtime must be one of {list(RUNTIME_KINDS)} or None, got {name!r}",
                                      options=("runtime",)))
        name = None
    if not is_replay:
        return RUNTIME_KINDS[name or default]
    if name not in (None, "simulated"):
        reader.problems.add([Problem(
            "a replay always runs in the simulated runtime, even if the recorded run used another one",
            f"leave out runtime={name!r}", ("runtime", "replay"))])
    names = ("schedule_seed", "costs", "placement", "address")
    reader.problems.add(
        Problem(f"{option} would be ignored: the replayed record determines the order of events",
                f"leave {option} out", (option, "replay"))
        for option in names if reader.given.pop(option, None))
    return Simulated


def _names_of(kinds: Sequence[type[Options]]) -> list[str]:
    return list(dict.fromkeys(name for kind in kinds for name in kind.declarations()))
