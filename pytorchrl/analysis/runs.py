"""Read runs from their directories, and read their scores."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from pytorchrl.analysis.aggregates import Array, area_under_curve
from pytorchrl.errors import ConfigError
from pytorchrl.files.atomic import parse_value, read_bytes, read_json
from pytorchrl.files.reading import mapping, number, problem_of_records, read_object
from pytorchrl.files.run_directory import (
    CHECKPOINTS,
    METRICS_FILE,
    MODEL_NAME,
    RESULT_FILE,
    RUN_FILE,
    check_description,
    no_run,
)
from pytorchrl.support.display import Displayed, Row, shortened, wrapped

# Runs that differ only in these settings belong to the same group: the seed, and settings without effect on training.
_IGNORED = {"seed", "log_dir", "progress", "tensorboard", "resume", "overwrite", "record", "replay", "checkpoint_every",
            "checkpoint_on_exit", "grace_s", "keep_checkpoints", "keep_best_checkpoint", "keep_checkpoint_every",
            "log_every", "log_every_s", "eval_every", "eval_episodes", "eval_timeout_s"}
_LARGEST_RECORDS = 512 << 20
SCORES = ("last", "area")


@dataclasses.dataclass(frozen=True, repr=False)
class Run(Displayed):
    """The description of a run. Printing it shows everything but the settings.

    Attributes:
        path: Directory of the run.
        task: Id of the environment.
        seed: Seed of the run; None if it is unknown.
        settings: Value of each setting that may affect training, by name; the seed and the environment are left out.
        given: Names of the settings that the user or the preset gave to `train`; all other settings have their
            defaults, or follow from these. Empty if the run was composed in Python.
    """

    path: Path
    task: str
    seed: int | None
    settings: Mapping[str, object]
    given: frozenset[str] = frozenset()

    def __repr__(self) -> str:
        """Return one line that names the directory, the algorithm, the environment and the seed."""
        shown = {"algorithm": self.settings.get("algorithm"), "env": self.task, "seed": self.seed}
        return wrapped("Run(", [f"{str(self.path)!r}", *(
            shortened(f"{name}={value!r}") for name, value in shown.items() if value is not None)], ")")

    def _rows(self) -> list[Row]:
        algorithm = self.settings.get("algorithm")
        return [("directory", [str(self.path)]), ("algorithm", [] if algorithm is None else [str(algorithm)]),
                ("env", [self.task]), ("seed", [] if self.seed is None else [str(self.seed)])]


@dataclasses.dataclass(frozen=True)
class Scores:
    """The scores of a group of runs.

    Attributes:
        values: Array of shape (runs, tasks).
        tasks: The tasks, sorted.
        seeds: For each task, the seeds of its runs, in the order of the rows of `values`.
        at: For each task, the position (such as a number of env steps) at which the runs of all groups are scored.
        ends: For each task, the positions where the shortest and the longest run of all groups end.
    """

    values: Array
    tasks: tuple[str, ...]
    seeds: tuple[tuple[int | None, ...], ...]
    at: tuple[float, ...]
    ends: tuple[tuple[float, float], ...]

    def is_paired_with(self, other: Scores) -> bool:
        """Return whether both groups have the same seeds on each task; False if a seed is unknown or occurs twice."""
        return self.seeds == other.seeds and all(None not in seeds and len(set(seeds)) == len(seeds)
                                                 for seeds in self.seeds)


def read_run(run_dir: Path) -> Run:
    """Return the description of the run in a directory.

    A directory that contains `metrics.jsonl`, but no other file of a run, is accepted as a run without settings.

    Raises:
        ConfigError: The directory contains no run.
    """
    path = run_dir / RUN_FILE
    others = (run_dir / name for name in (RUN_FILE, RESULT_FILE, CHECKPOINTS, f"{MODEL_NAME}.pt"))
    if (run_dir / METRICS_FILE).is_file() and not any(map(os.path.lexists, others)):
        return Run(run_dir, "env", None, {})
    try:
        found = mapping(read_json(path))
        check_description(found)
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(no_run(run_dir, RUN_FILE)) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error}") from error
    recipe, scheme = mapping(found.get("recipe")), mapping(found.get("scheme"))
    given = mapping(recipe.get("options"))
    own = {**given, **{name: recipe.get(name) for name in ("algorithm", "env")}} if recipe else {}
    settings = {**_settings_of_parts(mapping(found.get("agent"))), **scheme, **own}
    seed, task = found.get("seed"), settings.pop("env", None)
    return Run(run_dir, "env" if task is None else str(task), seed if isinstance(seed, int) else None,
               {name: value for name, value in settings.items() if name not in _IGNORED},
               frozenset(given) - _IGNORED)


def _settings_of_parts(agent: Mapping[str, object]) -> dict[str, object]:
    """Return the options of all parts of an agent, the name of its algorithm, and its environment."""
    settings: dict[str, object] = {}
    for part in agent.values():
        settings |= mapping(mapping(part).get("options"))
    env = settings.pop("env_fn", None)
    name = str(mapping(agent.get("algo_factory")).get("__factory__", "")).rpartition(":")[2]
    return {**settings, "algorithm": name.lower(), "env": mapping(env).get("__code__", env) if env else None}


def read_scores(
    groups: Mapping[str, Sequence[Run]], *, x: str = "env_steps", y: str = "return_mean", score: str = "last",
    at: float | None = None,
) -> dict[str, Scores]:
    """Return the scores of groups of runs.

    All runs on a task are scored at the same position, by default at the end of the shortest of these runs.

    Args:
        groups: The runs of each group, by label.
        x: Name of the number in the records that gives the position, such as "env_steps".
        y: Name of the number in the records that gives the value, such as "return_mean".
        score: "last": the value at the position, interpolated between records; "area": the mean of the value up to the
            position, see `area_under_curve`.
        at: The position at which all runs are scored; None: the default.

    Raises:
        ConfigError: Groups have different tasks, tasks of a group have different numbers of runs, runs have no records,
            or a run ends before `at` or has its first record after it.
    """
    if score not in SCORES:
        raise ConfigError(f"score must be one of {', '.join(SCORES)}; got {score!r}")
    by_task = {label: _by_task(label, runs) for label, runs in groups.items()}
    first, *others = by_task
    for label in others:
        if by_task[label].keys() != by_task[first].keys():
            raise ConfigError(f"the groups must have the same tasks; {first!r} has {', '.join(by_task[first])}, and "
                              f"{label!r} has {', '.join(by_task[label])}; leave out the other tasks")
    tasks = tuple(by_task[first])
    columns: dict[str, list[list[float]]] = {label: [] for label in by_task}
    scored_at: list[float] = []
    ends: list[tuple[float, float]] = []
    for task in tasks:
        curves = {label: [read_curve(run.path, x, y) for run in found[task]] for label, found in by_task.items()}
        positions = [xs for some in curves.values() for xs, _ in some]
        shortest, longest = min(xs[-1] for xs in positions), max(xs[-1] for xs in positions)
        if at is not None and at > shortest:
            raise ConfigError(f"a run on {task} ends at {shortest:,.0f} {x}, before {at:,.0f}")
        end = shortest if at is None else at
        if (start := max(xs[0] for xs in positions)) > end:
            raise ConfigError(f"the first record of a run on {task} is at {start:,.0f} {x}, after {end:,.0f}")
        scored_at.append(end)
        ends.append((shortest, longest))
        for label, some in curves.items():
            columns[label].append([_score(xs, ys, score, end) for xs, ys in some])
    return {label: Scores(
        np.array(columns[label]).T, tasks, tuple(tuple(run.seed for run in found[task]) for task in tasks),
        tuple(scored_at), tuple(ends)) for label, found in by_task.items()}


def _by_task(label: str, runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Return the group's runs by task, sorted by seed; raise `ConfigError` if tasks have different numbers of runs."""
    found: dict[str, list[Run]] = {}
    for run in sorted(runs, key=lambda run: (run.task, run.seed is None, run.seed or 0, str(run.path))):
        found.setdefault(run.task, []).append(run)
    if len({len(some) for some in found.values()}) > 1:
        counts = ", ".join(f"{task}: {len(some)}" for task, some in found.items())
        raise ConfigError(f"{label!r} has different numbers of runs on its tasks ({counts}); leave out runs, or train "
                          "the missing ones")
    return found


def _score(xs: Sequence[float], ys: Sequence[float], score: str, end: float) -> float:
    if score == "area" and len(xs) > 1:
        return area_under_curve(xs, ys, end)
    return float(np.interp(end, xs, ys))


def read_curve(run_dir: Path, x: str, y: str) -> tuple[list[float], list[float]]:
    """Return two columns of numbers from a run's records, skipping records that lack one of the two numbers.

    Args:
        run_dir: Directory of the run.
        x: Name of a number, with `/` between levels, such as "algorithm/loss".
        y: Name of the other number.

    Raises:
        ConfigError: There are no records, or no record has both numbers.
    """
    path = run_dir / METRICS_FILE
    try:
        content = read_bytes(path, _LARGEST_RECORDS)
    except FileNotFoundError:
        raise ConfigError(no_run(run_dir, METRICS_FILE)) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error}") from error
    *lines, incomplete = content.split(b"\n")  # a killed run may leave an incomplete last line
    content = content.removesuffix(incomplete)
    result = read_object(run_dir / RESULT_FILE)
    if problem := problem_of_records(result, len(content), hashlib.sha256(content).hexdigest()):
        raise ConfigError(f"{str(path)!r} {problem}; delete {RESULT_FILE} to use the records that it has")
    points, names = [], set()
    for place, line in enumerate(lines, start=1):
        try:
            record = parse_value(line, METRICS_FILE)
        except ValueError:
            raise ConfigError(f"{path}:{place} is not JSON") from None
        names.update(_names(record))
        point = number(record, *x.split("/")), number(record, *y.split("/"))
        if None not in point:
            points.append(point)
    if not points:
        raise ConfigError(f"{path} has no record with {x!r} and {y!r}{_advice(y, names)}")
    return [x for x, _ in points if x is not None], [y for _, y in points if y is not None]


def _advice(y: str, names: set[str]) -> str:
    """Return what to do if no record has the number `y`, given the names of all numbers."""
    if y == "return_mean" and names:
        return (", because no episode has ended; if episodes of this environment do not end by themselves, train with "
                "max_episode_steps")
    found = difflib.get_close_matches(y, names, n=3, cutoff=0.4) or sorted(name for name in names if "/" not in name)
    return f"; it has {', '.join(found) or 'nothing'}{' and others' if len(found) < len(names) else ''}"


def _names(record: object, prefix: str = "") -> list[str]:
    if not isinstance(record, dict):
        return []
    found: list[str] = []
    for key, value in record.items():
        found += _names(value, f"{prefix}{key}/") if isinstance(value, dict) else [f"{prefix}{key}"]
    return found
