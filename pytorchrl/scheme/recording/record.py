"""Write and read the file that records a run.

Each line is a JSON object with a checksum; see `pytorchrl.files.lines`. The first line describes the run, and
the last line states how the run ended. If the run was killed, the last line is missing. The lines in between are
written after updates, at most four per second. Each of them contains the entries that were added to the workers'
journals since the previous line, as `{"parts": [[worker, incarnation, events, turns], ...]}`; see
`pytorchrl.runtime.journal.Section`.
"""

from __future__ import annotations

import contextlib
import json
import operator
import os
import platform
import struct
import time
import zlib
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from pytorchrl.agent.algorithms.precision import choices_of
from pytorchrl.agent.option_values.text import to_python
from pytorchrl.agent.options import Factory, PartFactory
from pytorchrl.errors import ConfigError
from pytorchrl.files.atomic import read_bytes
from pytorchrl.files.lines import check_sealed, seal
from pytorchrl.runtime import Event, Section, WorkersPart
from pytorchrl.scheme.devices import kinds_of
from pytorchrl.scheme.options.run import RecordOptions
from pytorchrl.support.terminal import get_logger
from pytorchrl.support.untyped import Json

FORMAT = "pytorchrl record 1"
_LARGEST_BYTES = 512 << 20

# Writing at every update would make short updates two percent slower: each write releases Python's global interpreter
# lock, and must wait to get it back while other threads run.
_WRITE_INTERVAL_S = 0.25

logger = get_logger(__name__)

_to_json = json.JSONEncoder(separators=(",", ":")).encode

DRIVER = "UWorker"
"""Name of the worker that records an event for every update."""

# Settings that affect where and how fast a run executes, but not its results.
_NOT_COMPARED = {"runtime", "address", "placement", "schedule_seed", "costs", "record", "replay", "keep_bad_batches",
                 "check_data", "queue_timeout_s", "on_starved", "worker_timeout_s", "col_worker_resources",
                 "grad_worker_resources"}


def differences(old_settings: Mapping[str, object], settings: Mapping[str, object],
                old_agent: Mapping[str, Mapping[str, str]],
                agent: Mapping[str, object], also_free: Container[str] = ()) -> list[str]:
    """Return the differences between a saved run and a scheme that would repeat or continue it.

    Settings that only affect where and how fast a run executes may differ, also the number of a GPU.

    Args:
        old_settings: Settings of the saved scheme.
        settings: Settings of the current scheme.
        old_agent: Descriptions of the saved agent's parts; see `describe`.
        agent: Factories of the current agent's parts, by name.
        also_free: Further settings that may differ.
    """
    kinds, old_kinds = kinds_of(settings), kinds_of(old_settings)
    problems = [f"{name} was {old_settings.get(name)!r}, now it is {value!r}"
                for name, value in settings.items()
                if name not in _NOT_COMPARED and name not in also_free and old_settings.get(name) != value
                and (name not in kinds or kinds[name] != old_kinds[name])]
    for part, options in describe(agent).items():
        old = old_agent.get(part, {})
        problems += [f"{part}: {name} was {old.get(name)}, now it is {options.get(name)}"
                     for name in {**old, **options} if old.get(name) != options.get(name)]
    return problems


def checksum_of(info: Mapping[str, float]) -> int:
    """Return the CRC-32 of the exact values of an update's statistics.

    The statistics include the norm of the gradient, so updates with different gradients usually have different
    checksums.
    """
    return zlib.crc32(struct.pack(f"{len(info)}d", *(info[name] for name in sorted(info))))


class RecordWriter:
    """Writer of a record. If the run is killed, only the latest events are missing from the record.

    Args:
        path: Path of the file, which must not exist yet.
        settings: Settings of the scheme.
        agent: Factory of each part of the agent, by name.
        target_steps: Number of env steps at which schedules end.

    Raises:
        ConfigError: The file exists, or cannot be written.
    """

    def __init__(self, path: str, settings: Mapping[str, object], agent: Mapping[str, object],
                 target_steps: int) -> None:
        self._path, self._next_write, self._checksum = path, 0.0, ""
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "x", encoding="utf-8")  # noqa: SIM115 - closed by `close`
        except OSError as error:
            if os.path.lexists(path):
                raise ConfigError(
                    f"record {path!r} already exists; choose another name, or delete the file") from None
            raise ConfigError(f"record {path!r} cannot be written: {error}") from error
        algorithm = agent.get("algo_factory")
        self._write({"format": FORMAT, "settings": settings, "agent": describe(agent), "target_steps": target_steps,
                     "choices": choices_of(algorithm) if isinstance(algorithm, Factory) else {},
                     "machine": _machine()})

    @property
    def is_due(self) -> bool:
        """Whether `add` should be called now; to save time, `add` is not called after every update."""
        return time.monotonic() >= self._next_write

    def add(self, parts: Iterable[WorkersPart]) -> None:
        """Write the events that workers have recorded since the last call."""
        noted: dict[tuple[str, int], Section] = {}
        for worker, incarnation, part in parts:
            whole = noted.setdefault((worker, incarnation), Section([], []))
            whole.events.extend(part.events)
            whole.turns.extend(part.turns)
        self._write({"parts": [[*place, *part] for place, part in noted.items() if part.events or part.turns]})
        self._next_write = time.monotonic() + _WRITE_INTERVAL_S

    def close(self, failed: bool, checksum: int | None) -> None:
        """Write how the run ended, and the checksum of the parameters if it is known; close the file."""
        self._write({"end": "failed" if failed else "stopped", "checksum": checksum})
        with contextlib.suppress(OSError):  # the error was logged when writing failed
            self._file.close()

    def discard(self) -> None:
        """Delete the record of a run that failed to start."""
        self._file.close()
        Path(self._path).unlink(missing_ok=True)

    def _write(self, value: Mapping[str, object]) -> None:
        if self._file.closed:
            return
        line, self._checksum = seal(_to_json(value), self._checksum)
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as error:  # training continues without the record
            logger.warning("the record %r ends here, because it cannot be written: %s", self._path, error)
            with contextlib.suppress(OSError):
                self._file.close()


@dataclass(frozen=True)
class RunRecord:
    """The contents of the file that records a run."""

    Options = RecordOptions

    path: str
    settings: dict[str, Json]
    agent: dict[str, dict[str, str]]
    target_steps: int
    machine: dict[str, str]
    parts: dict[tuple[str, int], Section]
    """Events by worker and incarnation."""
    failed: bool
    """Whether an error ended the run; a replay raises the error at the same event."""
    checksum: int | None
    """Checksum of the final parameters; None if it is not known."""
    choices: dict[str, dict[str, bool]] = field(default_factory=dict)
    """The values that were chosen for options that were "auto"; see `Agent.choices`."""
    has_end: bool = True
    """Whether the file has its last line, which is missing if the run was killed."""

    @cached_property
    def updates(self) -> int:
        """Number of updates in the record, including skipped updates."""
        part = self.parts.get((DRIVER, 0), Section([], []))
        return sum(event[0] == "update" for event in part.events)

    def is_over(self, updates: int) -> bool:
        """Return whether a replay is complete after this number of updates (made or skipped).

        The result is False if the recorded run failed, because then an error ends the replay.
        """
        return not self.failed and updates >= self.updates

    def check(self, settings: Mapping[str, object], agent: Mapping[str, object]) -> None:
        """Raise `ConfigError` with all differences if the record was made with another scheme or agent."""
        problems = differences(self.settings, settings, self.agent, agent)
        if problems:
            raise ConfigError(f"replay {self.path!r} is from another run: {'; '.join(problems)}; use the settings and "
                              "the agent of that run")

    def check_target(self, target_steps: int) -> None:
        """Raise `ConfigError` if the schedules of the recorded run did not end at `target_steps`."""
        if self.target_steps != target_steps:
            raise ConfigError(f"replay {self.path!r} has target_steps={self.target_steps}, got {target_steps}; give "
                              "the same number")

    def warning(self) -> str:
        """Return a warning if the record is incomplete or a replay may produce different results; otherwise, ""."""
        now = _machine()
        other = [f"{name} {self.machine.get(name)} instead of {now[name]}" for name in now
                 if self.machine.get(name) != now[name]]
        texts = [] if self.has_end else [
            f"the record {self.path!r} has no last line, because its run was killed or the file was cut off; the "
            f"replay ends after {self.updates} updates"]
        if other:
            texts.append(f"the record was made with {', '.join(other)}; results may differ in their last bits")
        return "; ".join(texts)


def read_record(path: str | os.PathLike[str]) -> RunRecord:
    """Read a record; ignore an incomplete last line, which a killed run may leave.

    Raises:
        ConfigError: The file does not exist, is damaged, or is not a record.
    """
    name = os.fspath(path)
    try:
        lines = check_sealed(read_bytes(path, _LARGEST_BYTES))
    except (OSError, ValueError) as error:
        raise ConfigError(f"replay {name!r} cannot be read: {error}") from error
    try:
        head, *rest = map(json.loads, lines)
        if head["format"] != FORMAT:
            raise ConfigError(f"replay {name!r} has the format {head['format']!r}; this version reads {FORMAT!r}")
        end = rest.pop() if rest and "end" in rest[-1] else {}
        parts: dict[tuple[str, int], Section] = {}
        for line in rest:
            for worker, incarnation, events, turns in line["parts"]:
                part = parts.setdefault((worker, incarnation), Section([], []))
                part.events.extend(map(_event, events))
                part.turns.extend(map(operator.index, turns))
        settings, agent, machine = (_mapping(head[key]) for key in ("settings", "agent", "machine"))
        operator.index(settings["seed"])
        return RunRecord(
            name, settings, {part: _mapping(options) for part, options in agent.items()},
            operator.index(head["target_steps"]), machine, parts, failed=end.get("end") == "failed",
            checksum=end.get("checksum"), choices=_mapping(head["choices"]),
            has_end=end.get("end") is not None)
    except ConfigError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"replay {name!r} is not a record of a run: {error!r}") from error


def _event(value: Json) -> Event:
    kind, index, *_ = event = tuple(value)
    if not isinstance(kind, str) or isinstance(index, str) != (kind == "parameter"):
        raise ValueError(f"{value} is not an event")
    return event


def _mapping(value: object) -> dict[str, Json]:
    if not isinstance(value, dict):
        raise TypeError(f"expected a JSON object, got {value!r}")
    return value


def describe(agent: Mapping[str, object]) -> dict[str, dict[str, str]]:
    """Return a description of each factory of the agent, by name of the factory.

    A description maps the names of options to their values as text, without memory addresses, and "class" to the
    name of the class that the factory builds. The option `log_dir` is omitted.
    """
    def texts(factory: PartFactory[object]) -> dict[str, str]:
        options = {name: value for name, value in vars(factory.options).items() if name != "log_dir"}
        return {"class": factory.cls.__name__,
                **{name: to_python(value) for name, value in options.items()}}

    return {name: texts(factory) for name, factory in agent.items() if isinstance(factory, Factory)}


def _machine() -> dict[str, str]:
    from pytorchrl import __version__

    return {"pytorchrl": __version__, "torch": torch.__version__, "numpy": np.__version__,
            "processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"}
