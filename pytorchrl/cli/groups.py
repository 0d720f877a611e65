"""Read the arguments that `plot`, `compare` and `report` share: the groups of runs, and how the picture looks."""

from __future__ import annotations

import argparse
import glob
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from pytorchrl.analysis import Run, group_runs, read_run
from pytorchrl.analysis.plotting import Picture, labels
from pytorchrl.errors import ConfigError
from pytorchrl.files.run_directory import RUN_FILE

HELP = """\
RUNS are directories of runs, in one of two forms:

  runs/a-1 runs/b*   runs are grouped by algorithm and by the settings in which
                     they differ, except seeds; --by NAME,... groups by these
                     settings only
  'new net=runs/a*' old=runs/b-[12]
                     NAME=PATTERN puts the runs that match the pattern into the
                     group NAME; several patterns may have the same name
"""
_NAMED = re.compile(r"([^\W_][^/=*?\[\]]*)=(.+)", re.DOTALL)
_UNKNOWN_TASK = "env"


def add_group_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments RUNS and `--by`, which `groups_of` turns into groups of runs."""
    parser.add_argument("runs", nargs="+", metavar="RUNS", help="RUN_DIR or NAME=PATTERN, see below")
    parser.add_argument("--by", type=_names, metavar="NAME,...",
                        help="settings by which runs are grouped, or `run` for one group per run [all that differ]")


def add_picture_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--title` and `--size`, which `picture_of` reads."""
    parser.add_argument("--title", metavar="TEXT", help="text above the picture [the environment]")
    parser.add_argument("--size", type=_size, metavar="WIDTHxHEIGHT",
                        help="size in inches, such as 3.3x2.4 for a column of a paper, without the key of the groups, "
                             "which is added below [by the content]")


def picture_of(given: argparse.Namespace, tasks: Iterable[str], log: str = "") -> Picture:
    """Return title, size and axes of the picture; the title names the tasks unless the user gave another."""
    title = ", ".join(sorted(set(tasks) - {_UNKNOWN_TASK})) if given.title is None else given.title
    return Picture(title, given.size, log)


def _size(text: str) -> tuple[float, float]:
    try:
        width, height = map(float, text.split("x"))
        return Picture(size=(width, height)).size or (width, height)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected WIDTHxHEIGHT in inches, such as 7x4.5; got {text!r}") from None


def groups_of(words: Sequence[str], by: Sequence[str] | None) -> dict[str, list[Run]]:
    """Return the runs of each group, by the label of the group; a run that is named more than once counts once.

    Args:
        words: Command-line arguments, all in the same form: either directories of runs, or NAME=PATTERN.
        by: Settings by which runs are grouped; None: all settings in which the runs differ; ["run"]: one group per run.

    Raises:
        ConfigError: A directory contains no run, the two forms are mixed, or `by` is given with NAME=PATTERN.
    """
    named = _named(words)
    if not named:
        paths = paths_of(words)
        if by == ["run"]:
            return {label: [read_run(path)] for label, path in zip(labels(paths), paths, strict=True)}
        return group_runs([read_run(path) for path in paths], by)
    if len(named) < len(words) or by is not None:
        raise ConfigError("either all runs have the form NAME=PATTERN, without --by, or none; got " + " ".join(words))
    patterns: dict[str, list[str]] = {}
    for name, pattern in named:
        patterns.setdefault(name, []).append(pattern)
    return {name: [read_run(path) for path in paths_of(some)] for name, some in patterns.items()}


def named_groups_of(words: Sequence[str], by: Sequence[str] | None) -> dict[str, list[Path]] | None:
    """Return the directories of each group that the user named or asked for with `by`; None if there are none.

    Raises:
        ConfigError: See `groups_of`.
    """
    if by is None and not _named(words):
        return None
    return {label: [run.path for run in runs] for label, runs in groups_of(words, by).items()}


def _named(words: Sequence[str]) -> list[tuple[str, str]]:
    """Return name and pattern of each argument of the form NAME=PATTERN."""
    return [(found[1], found[2]) for word in words
            if (found := _NAMED.fullmatch(word)) and found[1].isprintable() and not Path(word).exists()]


def paths_of(words: Sequence[str]) -> list[Path]:
    """Return the directories that match `words`, which are paths or glob patterns; each directory occurs once.

    Raises:
        ConfigError: A pattern matches no run.
    """
    found: dict[Path, Path] = {}
    for word in words:
        path = Path(word).expanduser()
        matches = [path]
        if not path.exists():
            matches = sorted(file.parent for file in map(Path, glob.glob(f"{path}/{RUN_FILE}")))
            if not matches and glob.has_magic(word):
                raise ConfigError(f"no run matches {word!r}; a pattern such as 'runs/ppo-*' must match directories of "
                                  "runs")
        for match in matches or [path]:
            found.setdefault(match.resolve(), match)
    return list(found.values())


def _names(text: str) -> list[str]:
    return [name.replace("-", "_") for name in text.split(",") if name]
