"""Read the groups of runs that are given as command-line arguments of `plot` and `compare`."""

from __future__ import annotations

import argparse
import glob
import re
from collections.abc import Sequence
from pathlib import Path

from pytorchrl.analysis import Run, group_runs, read_run
from pytorchrl.analysis.plotting import labels
from pytorchrl.errors import ConfigError
from pytorchrl.files.run_directory import RUN_FILE

HELP = """\
RUNS are directories of runs, in one of two forms:

  runs/a-1 runs/a-2 runs/b*       runs are grouped by algorithm and by the settings in which they differ, except seeds;
                                  --by NAME,... groups by these settings only
  new=runs/a* old='runs/b-[12]'   NAME=PATTERN puts the runs that match the pattern into the group NAME; several
                                  patterns may have the same name
"""
_NAMED = re.compile(r"([A-Za-z0-9][\w.+-]*)=(.+)", re.DOTALL)


def add_group_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments RUNS and `--by`, which `groups_of` turns into groups of runs."""
    parser.add_argument("runs", nargs="+", metavar="RUNS", help="RUN_DIR or NAME=PATTERN, see below")
    parser.add_argument("--by", type=_names, metavar="NAME,...",
                        help="settings by which runs are grouped, or `run` for one group per run [all that differ]")


def groups_of(words: Sequence[str], by: Sequence[str] | None) -> dict[str, list[Run]]:
    """Return the runs of each group, by the label of the group; a run that is named more than once counts once.

    Args:
        words: Command-line arguments, all in the same form: either directories of runs, or NAME=PATTERN.
        by: Settings by which runs are grouped; None: all settings in which the runs differ; ["run"]: one group per run.

    Raises:
        ConfigError: A directory contains no run, the two forms are mixed, or `by` is given with NAME=PATTERN.
    """
    named = [(found[1], found[2]) for word in words if (found := _NAMED.fullmatch(word)) and not Path(word).exists()]
    if not named:
        paths = _paths(words)
        if by == ["run"]:
            return {label: [read_run(path)] for label, path in zip(labels(paths), paths, strict=True)}
        return group_runs([read_run(path) for path in paths], by)
    if len(named) < len(words) or by is not None:
        raise ConfigError("either all runs have the form NAME=PATTERN, without --by, or none; got " + " ".join(words))
    patterns: dict[str, list[str]] = {}
    for name, pattern in named:
        patterns.setdefault(name, []).append(pattern)
    return {name: [read_run(path) for path in _paths(some)] for name, some in patterns.items()}


def _paths(words: Sequence[str]) -> list[Path]:
    """Return the directories that match `words`, which are paths or glob patterns; each directory occurs once."""
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
