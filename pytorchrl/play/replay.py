"""Make one update of a saved run again, and find the first update in which two runs differ."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pytorchrl.agent.algorithms import Algorithm
from pytorchrl.agent.data import Batch, map_tensors
from pytorchrl.agent.factories import AlgorithmFactory
from pytorchrl.agent.multi.data import SEPARATOR
from pytorchrl.agent.option_values.descriptions import mapping
from pytorchrl.agent.options import Factory
from pytorchrl.errors import ConfigError, NonFiniteUpdateError
from pytorchrl.files.atomic import read_json
from pytorchrl.files.run_directory import CHECKPOINTS, METRICS_FILE, RESULT_FILE, RUN_FILE
from pytorchrl.learner import checkpoints
from pytorchrl.learner.files import legs_of
from pytorchrl.learner.learner import Learner
from pytorchrl.runtime import RUNTIMES, SimulatedRuntime
from pytorchrl.scheme.options.base import ASYNC
from pytorchrl.scheme.supervision.bad_batches import read_bad_batch
from pytorchrl.support.terminal import get_logger
from pytorchrl.training.configuration import load_config
from pytorchrl.training.recipes import build, read
from pytorchrl.training.training import Training, learner_of

if TYPE_CHECKING:
    from typing_extensions import Self

logger = get_logger(__name__)

# Options of a run that have no effect on its updates.
_WITHOUT_EFFECT = ("callbacks", "on_callback_error", "callback_timeout_s", "eval_every", "eval_episodes",
                   "eval_timeout_s", "keep_best_checkpoint", "tensorboard", "progress", "keep_bad_batches", "record")
Stop: TypeAlias = Callable[[Algorithm, Batch], object]
"""A function of an algorithm and a batch that is called before a gradient is computed."""
Compute: TypeAlias = Callable[[], tuple[list[Tensor], dict[str, float]]]
"""A function that computes a gradient and its statistics."""


@dataclass(frozen=True)
class Gradient:
    """A gradient that a worker has computed.

    Attributes:
        batch: The batch from which it was computed.
        parts: The gradient by the names of the parameters; it lacks those of a policy without samples.
        info: The algorithm's statistics.
        origin: The operation that made the first NaN or infinity, and the line that called it; "" if the gradient is
            finite or the place is unknown.
    """

    batch: Batch
    parts: Mapping[str, Tensor]
    info: dict[str, float]
    origin: str = ""


@dataclass
class Update:
    """An update that has been made again.

    Attributes:
        number: The number of the update, from 1.
        gradients: The gradients that workers have computed with the weights before the update.
        applied: The gradient that was applied, by the names of the parameters; empty if the update was skipped.
        before: The parameters before the update, by name.
        after: The parameters after it; empty if the update was skipped.
        info: Statistics of the optimizer, such as `grad_norm` and `lr`.
        error: The error that ended the update; None if there was none.
    """

    number: int
    gradients: list[Gradient] = field(default_factory=list)
    applied: Mapping[str, Tensor] = field(default_factory=dict)
    before: Mapping[str, Tensor] = field(default_factory=dict)
    after: Mapping[str, Tensor] = field(default_factory=dict)
    info: dict[str, float] = field(default_factory=dict)
    error: Exception | None = None

    @property
    def is_finite(self) -> bool:
        """Whether all gradients and parameters of the update are finite."""
        return self.error is None and all(
            not isinstance(value, Tensor) or not value.is_floating_point() or bool(torch.isfinite(value).all())
            for name, value in self.tensors() if not name.startswith("batch"))

    def tensors(self) -> Iterator[tuple[str, object]]:
        """Yield the names and values of tensors, and of a batch's numbers, in the order of cause and effect.

        This order is batch, gradient, parameters.
        """
        for index, gradient in enumerate(self.gradients):
            place = f"batch {index + 1}: " if len(self.gradients) > 1 else "batch: "
            yield from ((f"{place}{name}", value) for name, value in _leaves(gradient.batch))
            yield from ((f"{place.replace('batch', 'gradient')}{name}", value)
                        for name, value in gradient.parts.items())
        yield from ((f"applied gradient: {name}", value) for name, value in self.applied.items())
        yield from ((f"parameter: {name}", value) for name, value in self.after.items())


@dataclass(frozen=True)
class Difference:
    """The first difference of two runs.

    Attributes:
        equal: Numbers of the updates after which both runs have equal checkpoints.
        options: Options whose values differ, as text.
        update: The first update that differs when both are made again; None if there is none.
        tensor: Name of the first tensor that differs in this update.
        values: The first differing values of this tensor, one of each run.
        count: Number of values that differ in this tensor, and their total number.
        state: Name of the first tensor that differs in the first two checkpoints that differ; "" if none differs.
        until: Number of updates at these checkpoints; None if none differs.
        unrepeated: The directories of the runs whose checkpoint is not reached when its updates are made again.
        remade: Number of updates that were made again, in both runs.
    """

    equal: list[int]
    options: list[str]
    update: int | None = None
    tensor: str = ""
    values: tuple[float, float] | None = None
    count: tuple[int, int] = (0, 0)
    state: str = ""
    until: int | None = None
    unrepeated: list[str] = field(default_factory=list)
    remade: int = 0


def replay_update(run_dir: str | os.PathLike[str], number: int, *, trust: bool = False,
                  stop: Stop | None = None) -> Update:
    """Make one update of a run again, in this process.

    The run must repeat exactly: collection and gradients are synchronous, the runtime is simulated, or the run was
    recorded. A synchronous run continues from the newest checkpoint before the update, other runs begin at their start.
    All checkpoints of the run are made again, and it is resumed where it was resumed, because a checkpoint changes a
    run. Files of the run are not changed.

    Args:
        run_dir: Directory of the run.
        number: Number of the update, from 1. For a batch that was kept at version V, the number is V + 1.
        trust: Whether to import code that the run names.
        stop: Function that is called with the algorithm and the batch before each gradient of the update is computed,
            such as a debugger.

    Raises:
        ConfigError: The run ends before this update, or cannot be repeated.
        CheckpointError: The directory contains no run.
    """
    with _Again(run_dir, trust=trust, before=number, until=number, is_watched=True, stop=stop) as again:
        found = again.next_update()
        while found is not None and found.number < number:
            found = again.next_update()
    if found is None:
        raise ConfigError(f"the run in {os.fspath(run_dir)!r} ends after {again.version} updates, so it has no update "
                          f"{number}; choose an update from 1 to {again.version}")
    return found


def replay_batch(run_dir: str | os.PathLike[str], path: str | os.PathLike[str], *, trust: bool = False,
                 stop: Stop | None = None) -> Update:
    """Compute the gradient of a batch again that `keep_bad_batches` has saved.

    Args:
        run_dir: Directory of the run, which describes the agent.
        path: The file of the batch.
        trust: Whether to import code that the run names.
        stop: Function that is called with the algorithm and the batch before the gradient is computed.

    Raises:
        CheckpointError: A file cannot be read, or the batch belongs to another agent.
    """
    run_dir = Path(run_dir).expanduser()
    batch, file = read_bad_batch(Path(path).expanduser())
    agent = build(read(run_dir), run_dir, trust=trust, model=file["gradient_state"]["acting"])
    algo = agent.algo_factory(device="cpu", actor=agent.actor_factory(device="cpu", seed=0), seed=0)
    algo.load_gradient_state(file["gradient_state"])
    algo.version = file["version"]
    if stop is not None:
        stop(algo, batch)
    vectors, info, origin = _traced(lambda: algo.compute_gradients(batch), algo, batch)
    return Update(file["version"] + 1, [Gradient(batch, _parts(algo, vectors), _numbers(info), origin)],
                  before=_parameters(algo))


def first_difference(run_dir: str | os.PathLike[str], other: str | os.PathLike[str], *,
                     trust: bool = False) -> Difference:
    """Find the first update and the first tensor in which two runs differ.

    Checkpoints are compared first. From the last equal one, both runs are then made again side by side.

    Args:
        run_dir: Directory of one run.
        other: Directory of the other run.
        trust: Whether to import code that the runs name.

    Raises:
        ConfigError: A run cannot be repeated.
        CheckpointError: A directory contains no run, or a checkpoint cannot be read.
    """
    places = [Path(run_dir).expanduser(), Path(other).expanduser()]
    options = _different_options(*(load_config(place / RUN_FILE, trust=trust) for place in places))
    found = [_versions(place) for place in places]
    equal: list[int] = []
    until, state = None, ""
    for version in sorted(found[0].keys() & found[1].keys()):
        state = _first_different_tensor(*(_values(own[version]) for own in found))[0]
        if state:
            until = version
            break
        equal.append(version)
    ends = [_last_version(place, own) for place, own in zip(places, found, strict=True)]
    if until is None and min(ends) == max(equal, default=0):
        return Difference(equal, options)
    start, last = max(equal, default=0), min(ends) if until is None else until
    remade = 0
    with contextlib.ExitStack() as stack:
        both = [stack.enter_context(_Again(place, trust=trust, before=start + 1, until=last)) for place in places]
        while both[0].version < last:
            first, second = (again.next_update() for again in both)
            if first is None or second is None:
                break
            remade += 1
            name, values, count = _first_different_tensor(dict(first.tensors()), dict(second.tensors()))
            if name:
                return Difference(equal, options, first.number, name, values, count, state, until, remade=remade)
        unrepeated = [] if until is None else [
            str(place) for place, again, own in zip(places, both, found, strict=True)
            if not again.has_reached(own[until])]
    return Difference(equal, options, state=state, until=until, unrepeated=unrepeated, remade=remade)


class _Again:
    """A run that is made again in this process, update by update; a `with` block ends it.

    Args:
        run_dir: Directory of the run, of which the needed files are copied.
        trust: Whether to import code that the run names.
        before: Number of an update; the run continues from its newest checkpoint before this update.
        until: Number of the last update that is needed.
        is_watched: Whether the operations of this update are checked for NaN.
        stop: Function that is called before gradients of this update are computed, if it is watched.
    """

    def __init__(self, run_dir: str | os.PathLike[str], *, trust: bool, before: int, until: int,
                 is_watched: bool = False, stop: Stop | None = None) -> None:
        self._run_dir = Path(run_dir).expanduser()
        self._trust, self._before, self._stop = trust, before, stop
        self._until, self._watched = until, until if is_watched else None
        self._checkpoints, self._legs = _checkpoints_of(self._run_dir), list[dict[str, int]]()
        self._is_inexact = False
        self._options: dict[str, object] = {}
        self._updates: list[Update] = []
        self._current = Update(0)
        self._learner: Learner | None = None
        self._error: Exception | None = None

    @property
    def version(self) -> int:
        """Number of updates of the run so far, including those before the checkpoint."""
        assert self._learner is not None
        return self._learner.updates

    def __enter__(self) -> Self:
        settings = _settings_of(self._run_dir)
        given = load_config(self._run_dir / RUN_FILE, trust=self._trust)
        self._copy = tempfile.TemporaryDirectory(prefix="pytorchrl-replay-")
        try:
            options = _options_again(settings, given, self._run_dir)
            if "replay" in options:
                options = {name: value for name, value in options.items() if "checkpoint" not in name}
            else:
                # The state of an asynchronous, simulated run lacks the clock, which began anew with each leg.
                start = 0 if _is_asynchronous(settings) else self._copy_checkpoint()
                legs = legs_of(self._run_dir, self._until)
                self._legs = [*[leg for leg in legs if leg["updates"] <= start][-1:],
                              *[leg for leg in legs if leg["updates"] > start]]
                options |= {"resume": True}
            self._options = options
            self._begin_leg()
        except BaseException:
            self._copy.cleanup()
            raise
        return self

    def _begin_leg(self) -> None:
        """Start a new run, or resume it from the newest checkpoint that has been made again."""
        target = {"target_steps": self._legs.pop(0)["target_steps"]} if self._legs else {}
        options = {**self._options, **target, "log_dir": self._copy.name, "progress": False, "tensorboard": False}
        algorithm, env = (cast("str", options.pop(name)) for name in ("algorithm", "env"))
        learner, _ = learner_of(Training(algorithm, env, options))
        scheme = learner.scheme
        scheme.agent = dataclasses.replace(scheme.agent, algo_factory=_watched(scheme.agent.algo_factory, self))
        self._learner = learner
        learner.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        assert self._learner is not None
        with contextlib.suppress(Exception):  # the run is dropped in its middle
            self._learner.stop()
        self._copy.cleanup()

    def _copy_checkpoint(self) -> int:
        """Copy the newest checkpoint before the update `before`, and the records up to it, if there is one.

        Return the number of updates before the checkpoint; 0 without one.
        """
        newest_first = ((_version_of(path), path) for path in checkpoints.paths(self._run_dir / CHECKPOINTS))
        version, path = next(((version, path) for version, path in newest_first if version < self._before), (0, None))
        if path is None:
            return 0
        directory = Path(self._copy.name) / CHECKPOINTS
        directory.mkdir()
        shutil.copy(path, directory)
        if (self._run_dir / METRICS_FILE).exists():
            shutil.copy(self._run_dir / METRICS_FILE, self._copy.name)
        return version

    def next_update(self) -> Update | None:
        """Make the next update, and return it; None if the run has ended."""
        while not self._updates:
            learner = self._learner
            assert learner is not None
            is_over, num_checkpoints = learner.done(), len(learner.checkpoints)
            if self._legs and (is_over or self._is_at_next_leg(learner)) and self._error is None:
                if learner.updates not in {end for _, end in learner.checkpoints}:
                    learner.save_checkpoint()
                learner.stop()
                self._begin_leg()
                continue
            if self._error is not None or is_over:
                return None
            try:
                learner.step()
            except NonFiniteUpdateError as error:
                self._error = error
                self._current.number, self._current.error = learner.updates + 1, error
                self._updates.append(self._current)
            for start, end in (self._checkpoints - Counter(learner.checkpoints)).elements():
                if start == learner.updates:
                    learner.save_checkpoint(uses_queued=end > start)
            if self._watched is not None and len(learner.checkpoints) > num_checkpoints:
                self._warn_if_not_repeated(learner)
        return self._updates.pop(0)

    def _warn_if_not_repeated(self, learner: Learner) -> None:
        """Warn if the run still has the checkpoint that was just made again, and its parameters differ."""
        path = checkpoints.path_of(self._run_dir / CHECKPOINTS, learner.env_steps)
        if not self._is_inexact and path.exists() and not self.has_reached(path):
            self._is_inexact = True
            logger.warning("the run in %r is not repeated exactly: its parameters after %d updates differ from those "
                           "in %s; the machine, a library or the code is another one, or your own code has changed the "
                           "run while it trained", str(self._run_dir), learner.updates, path.name)

    def _is_at_next_leg(self, learner: Learner) -> bool:
        """Return whether the next leg of the run began after as many updates."""
        return bool(self._legs) and learner.updates == self._legs[0]["updates"]

    def has_reached(self, checkpoint: Path) -> bool:
        """Return whether the run, which must stand at this checkpoint's update, has the parameters saved there."""
        assert self._learner is not None
        saved = mapping(mapping(mapping(_state_in(checkpoint)["algorithm"])["gradient"])["acting"])
        own = self._learner.scheme.acting_state()
        return not _first_different_tensor({name: torch.as_tensor(value) for name, value in saved.items()}, own)[0]

    # Called by the algorithms of all workers

    def computing(self, algo: Algorithm, batch: Batch,
                  compute: Compute) -> tuple[list[Tensor], dict[str, float]]:
        """Compute a gradient, and note a copy of it and of its batch."""
        is_watched = self._watched == algo.version + 1
        kept = map_tensors(batch, _copied)
        if is_watched and self._stop is not None:
            self._stop(algo, batch)
        vectors, info, origin = _traced(compute, algo, batch) if is_watched else (*compute(), "")
        self._current.gradients.append(Gradient(kept, _parts(algo, vectors), _numbers(info), origin))
        self._current.before = _parameters(algo)
        return vectors, info

    def applying(self, algo: Algorithm, gradients: list[Tensor] | None,
                 apply: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Apply a gradient, and note a copy of it and of the parameters before and after."""
        number = algo.version + 1
        before = _parameters(algo)
        applied = _parts(algo, algo.last_gradients() if gradients is None else gradients)
        info = apply()
        if self._updates and self._updates[-1].number == number:  # another rank has made the same update
            return info
        after = _parameters(algo)
        update, self._current = self._current, Update(0)
        update.number, update.applied, update.before, update.after, update.info = number, applied, before, after, info
        self._updates.append(update)
        return info


def _watched(factory: AlgorithmFactory, again: _Again) -> AlgorithmFactory:
    """Return a factory of the same algorithm that reports each gradient and each update to `again`."""
    base = factory.cls

    def compute_gradients(self: Algorithm, batch: Batch) -> tuple[list[Tensor], dict[str, float]]:
        return again.computing(self, batch, lambda: base.compute_gradients(self, batch))

    def apply_gradients(self: Algorithm, gradients: list[Tensor] | None = None) -> dict[str, float]:
        return again.applying(self, gradients, lambda: base.apply_gradients(self, gradients))

    own = type(base.__name__, (base,), {
        "compute_gradients": compute_gradients, "apply_gradients": apply_gradients, "__module__": base.__module__,
        "__qualname__": base.__qualname__, "__doc__": base.__doc__})
    return cast("AlgorithmFactory", dataclasses.replace(cast("Factory[Algorithm]", factory), cls=own))


def _settings_of(run_dir: Path) -> Mapping[str, object]:
    """Return the settings of a run's scheme; raise `CheckpointError` if the directory contains no run."""
    read(run_dir)
    return mapping(mapping(read_json(run_dir / RUN_FILE))["scheme"])


def _options_again(settings: Mapping[str, object], given: Mapping[str, object], run_dir: Path) -> dict[str, object]:
    """Return the arguments of `train` with which a run is made again in this process.

    Raises:
        ConfigError: The run depends on the speeds of its workers, and was not recorded.
    """
    options = {name: value for name, value in given.items() if name not in _WITHOUT_EFFECT}
    record = settings.get("record") or settings.get("replay")
    if settings["runtime"] != SimulatedRuntime.name or record:
        of_others = {name for runtime in RUNTIMES.values() for name in runtime.Options.declarations()}
        keep = SimulatedRuntime.Options.declarations()
        options = {name: value for name, value in options.items()
                   if name != "runtime" and (name not in of_others or name in keep)}
    if record:
        if not Path(str(record)).exists():
            raise ConfigError(f"the run in {str(run_dir)!r} was recorded in {record!r}, which is missing; put the file "
                              "back")
        return options | {"replay": record}
    if settings["runtime"] != SimulatedRuntime.name:
        if _is_asynchronous(settings):
            raise ConfigError(f"the run in {str(run_dir)!r} was asynchronous, so it depended on the speeds of its "
                              "workers; train with record=<file> (--record FILE), or with runtime='simulated', to be "
                              "able to make its updates again")
        if settings["num_col_workers"] != 1 or settings["num_grad_workers"] != 1:
            options["runtime"] = SimulatedRuntime.name
    return options


def _is_asynchronous(settings: Mapping[str, object]) -> bool:
    return ASYNC in (settings["col_communication"], settings["grad_communication"])


def _checkpoints_of(run_dir: Path) -> Counter[tuple[int, int]]:
    """Return the numbers of updates at the starts and ends of all checkpoints, also those whose files were removed."""
    newest = next(iter(checkpoints.paths(run_dir / CHECKPOINTS)), None)
    learner = {} if newest is None else mapping(checkpoints.read(newest)["learner"])
    return Counter((start, end) for start, end in cast("list[tuple[int, int]]", learner.get("checkpoints", [])))


def _versions(run_dir: Path) -> dict[int, Path]:
    """Return the checkpoints of a run by their number of updates."""
    return {_version_of(path): path for path in checkpoints.paths(run_dir / CHECKPOINTS)}


def _version_of(checkpoint: Path) -> int:
    """Return the number of updates before a checkpoint."""
    return cast("int", _state_in(checkpoint)["version"])


def _state_in(checkpoint: Path) -> Mapping[str, object]:
    """Return the state of the worker tree in a checkpoint."""
    return mapping(mapping(checkpoints.read(checkpoint)["scheme"])["state"])


def _parts(algo: Algorithm, vectors: Sequence[Tensor | None]) -> dict[str, Tensor]:
    """Return copies of the parts of gradient or parameter vectors, by the names of the parameters.

    With several policies, there is one vector for each policy, which concatenates those of its parameter groups.
    """
    groups = dict(algo.groups)
    if len(vectors) < len(groups):
        whole, vectors = vectors, []
        for policy, vector in zip(getattr(algo, "algorithms", {}), whole, strict=True):
            sizes = [len(group) for name, group in groups.items() if name.startswith(f"{policy}{SEPARATOR}")]
            vectors += [None] * len(sizes) if vector is None else list(torch.split(vector, sizes))
    return {name if len(groups) == 1 else f"{key}.{name}": part.detach().clone()
            for (key, group), vector in zip(groups.items(), vectors, strict=True) if vector is not None
            for name, part in group.split(vector).items()}


def _parameters(algo: Algorithm) -> dict[str, Tensor]:
    """Return copies of the trained parameters by name."""
    return _parts(algo, [group.data for group in algo.groups.values()])


def _numbers(info: Mapping[str, object]) -> dict[str, float]:
    """Return statistics without those that are tensors, such as the errors of samples."""
    return {name: value for name, value in info.items() if isinstance(value, (int, float))}


def _copied(value: Tensor | np.ndarray) -> Tensor | np.ndarray:
    return value.detach().clone() if isinstance(value, Tensor) else value.copy()


def _leaves(value: object, name: str = "") -> Iterator[tuple[str, object]]:
    """Yield the name and the value of each tensor, array, number and text in nested containers."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {own.name: getattr(value, own.name) for own in dataclasses.fields(value)}
    if isinstance(value, (list, tuple)):
        value = dict(enumerate(value))
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _leaves(part, f"{name}.{key}" if name else str(key))
    elif isinstance(value, Tensor) or (value is not None and hasattr(value, "dtype")):
        yield name, torch.as_tensor(value)
    elif value is not None:
        yield name, value


def _values(checkpoint: Path) -> dict[str, object]:
    """Return the values in a checkpoint that a run determines: without times and settings."""
    state = _state_in(checkpoint)
    return dict(_leaves({"algorithm": state["algorithm"], "workers": state["workers"]}))


def _first_different_tensor(
    first: Mapping[str, object], second: Mapping[str, object],
) -> tuple[str, tuple[float, float] | None, tuple[int, int]]:
    """Return the name of the first value that differs in its bits, the first differing numbers, and their count.

    The name is "" if all values are equal; the numbers are None if the values are not tensors of the same shape.
    """
    for name in [*first, *(name for name in second if name not in first)]:
        one, two = first.get(name), second.get(name)
        if not isinstance(one, Tensor) or not isinstance(two, Tensor):
            if type(one) is not type(two) or one != two:
                return name, None, (1, 1)
            continue
        if one.dtype != two.dtype or one.shape != two.shape:
            return name, None, (two.numel(), one.numel())
        bits = [value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).reshape(value.numel(), -1)
                for value in (one, two)] if one.numel() else [torch.empty(0, 1)] * 2
        differing = (bits[0] != bits[1]).any(1).nonzero()[:, 0].tolist()
        if differing:
            at = differing[0]
            return name, tuple(float(value.reshape(-1)[at]) for value in (one, two)), (  # type: ignore[return-value]
                len(differing), one.numel())
    return "", None, (0, 0)


def _different_options(first: Mapping[str, object], second: Mapping[str, object]) -> list[str]:
    """Return the options that differ between two runs, as text."""
    names = [name for name in {**first, **second} if name not in _WITHOUT_EFFECT]
    return [f"{name}: {first.get(name)} and {second.get(name)}" for name in names
            if first.get(name) != second.get(name)]


def _last_version(run_dir: Path, found: Mapping[int, Path]) -> int:
    """Return the number of updates of a run: of its result or, without one, of its newest checkpoint."""
    try:
        return cast("int", mapping(read_json(run_dir / RESULT_FILE))["updates"])
    except (FileNotFoundError, KeyError):
        return max(found, default=0)


# The first operation that makes NaN or infinity


def _traced(compute: Compute, algo: Algorithm,
            batch: Batch) -> tuple[list[Tensor], dict[str, float], str]:
    """Compute a gradient. If it is not finite, compute it again, and find the first operation with such a result."""
    generator = getattr(algo, "generator", None)
    state = None if generator is None else generator.get_state()
    vectors, info = compute()
    if all(vector is None or bool(torch.isfinite(vector).all()) for vector in vectors):
        return vectors, info, ""
    for part, values in (("batch", _leaves(batch)), ("parameters", algo.acting_tensors())):
        for name, value in values:
            if isinstance(value, Tensor) and _has(torch.isnan, value):
                return vectors, info, f"the {part} contain{'s' * (part == 'batch')} NaN in {name!r}"
    if generator is not None:
        generator.set_state(state)
    for test, what in ((torch.isnan, "NaN"), (torch.isinf, "infinity")):
        tracer = _Tracer(test)
        with contextlib.suppress(NonFiniteUpdateError), torch.autograd.set_detect_anomaly(True, check_nan=False), \
                torch.compiler.set_stance("force_eager"), tracer:
            compute()
        if tracer.place:
            return vectors, info, f"the first {what} is the result of {tracer.place}"
    return vectors, info, ""


def _has(test: Callable[[Tensor], Tensor], values: object) -> bool:
    return any(bool(test(value).any()) for _, value in _leaves(values)
               if isinstance(value, Tensor) and value.is_floating_point())


class _Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context in which the first operation is found whose result fails a test that its arguments pass."""

    def __init__(self, test: Callable[[Tensor], Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._test, self.place = test, ""

    def __torch_dispatch__(
        self, func: Callable[..., object], types: object, args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Execute an operation, and note its place if it is the first one."""
        given = dict(kwargs or {})
        is_searched = not self.place and "empty" not in str(func)
        was_fine = is_searched and not _has(self._test, [list(args), given])
        result = func(*args, **given)
        if was_fine and _has(self._test, result):
            self.place = f"{str(func).removeprefix('aten.').partition('.')[0]} in {_place()}"
        return result


def _place() -> str:
    """Return the line outside torch that called the current operation; in a backward pass, its forward operation."""
    node = torch._C._current_autograd_node()
    trace = [] if node is None else cast("dict[str, list[str]]", node.metadata).get("traceback_", [])
    own, library = os.path.abspath(__file__), os.path.dirname(os.path.abspath(torch.__file__))
    if lines := [line for line in trace if library not in line and own not in line]:
        return f"the gradient of {_shortened(lines[-1])}"
    frames = [frame for frame in traceback.extract_stack()
              if not os.path.abspath(frame.filename).startswith(library) and frame.filename != __file__]
    return f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}"


def _shortened(line: str) -> str:
    """Return an entry of a formatted traceback as `file:line: code`."""
    head, _, code = line.strip().partition("\n")
    file, _, rest = head.removeprefix("File ").partition(", line ")
    return f"{file.strip(chr(34))}:{rest.partition(',')[0]}: {code.strip()}"
