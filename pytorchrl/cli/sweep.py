"""Execute the runs of a sweep, one after the other."""

from __future__ import annotations

import argparse
import copy
import hashlib
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pytorchrl.agent.option_values.text import to_text
from pytorchrl.cli.output import show, show_stderr
from pytorchrl.errors import CheckpointError, ConfigError
from pytorchrl.files.reading import count, read_object
from pytorchrl.files.run_directory import RESULT_FILE, RUN_FILE
from pytorchrl.support.code import Code
from pytorchrl.training.composition import code_of

_DEFAULT_DIRECTORY = "runs/sweep"
_LONGEST_NAME = 200


def run(given: argparse.Namespace, runs: Sequence[Mapping[str, object]],
        train_once: Callable[[argparse.Namespace], int]) -> int:
    """Execute all runs that have not finished yet, print a table of all runs, and return the exit code.

    An interrupted sweep continues if it is started again: finished runs are skipped, and the interrupted run is resumed
    from its newest checkpoint.

    Args:
        given: The parsed arguments, which are common to all runs.
        runs: For each run, a mapping with the names and values of the options that the sweep varies.
        train_once: Function that executes one run and returns the exit code.

    Raises:
        ConfigError: A swept option is also given as a flag, or one of `overwrite` and `resume` is set.
    """
    if both := [name for name in runs[0] if name in vars(given)]:
        raise ConfigError(f"{', '.join(both)} is swept by the configuration; remove the flag, or the entry of [sweep]")
    if vars(given).pop("overwrite", None) or vars(given).pop("resume", None):
        raise ConfigError("a sweep skips finished runs and resumes the others, so it accepts neither overwrite nor "
                          "resume; use another log_dir for new runs")
    base = Path(vars(given).pop("log_dir", None) or _DEFAULT_DIRECTORY).expanduser()
    if not given.dry_run:
        _check_code(runs)
    places = [base / name for name in _names(given.algorithm, str(given.env), runs)]
    for number, (own, place) in enumerate(zip(runs, places, strict=True), start=1):
        done = finished(place)
        show_stderr(f"run {number} of {len(runs)}: {place}{' (finished earlier)' if done else ''}")
        if done is None and not given.dry_run:
            one = copy.copy(given)
            vars(one).update({**own, "log_dir": os.fspath(place), "resume": True, "sweep": None})
            if code := train_once(one):
                return code
    if not given.dry_run:
        _show_table(places)
    return 0


def _check_code(runs: Sequence[Mapping[str, object]]) -> None:
    """Import the code that the swept options name, so that a wrong name ends the sweep before its first run."""
    named = [(name, item) for own in runs for name, value in own.items()
             for item in (value if isinstance(value, tuple) else (value,)) if isinstance(item, Code)]
    for name, item in named:
        try:
            code_of(item)
        except (CheckpointError, ConfigError) as error:  # noqa: PERF203 - there are few values
            raise ConfigError(f"{name}: {error}") from error


def _names(algorithm: str, env: str, runs: Sequence[Mapping[str, object]]) -> list[str]:
    """Return the names of the runs' directories, such as `ppo-CartPole-v1-lr=0.001-seed=2`.

    If the names of different runs are equal, because characters were replaced or cut off, a hash is appended to them.
    """
    start = [algorithm.rpartition(":")[2], env]
    texts = ["-".join([*start, *(f"{name}={_shown(value)}" for name, value in own.items())]) for own in runs]
    names = [re.sub(r"[^A-Za-z0-9._=-]+", "-", text)[:_LONGEST_NAME] for text in texts]
    counts = Counter(names)
    hashes = [hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8] for text in texts]
    return [name if counts[name] == 1 else f"{name[:_LONGEST_NAME - 9]}-{code}"
            for name, code in zip(names, hashes, strict=True)]


def _shown(value: object) -> object:
    """Return the value of an option as it appears in the name of a directory; code appears by its name."""
    is_code = isinstance(value, tuple) and any(isinstance(item, Code) for item in value)
    return to_text(value) if is_code else value


def finished(place: Path) -> dict[str, float] | None:
    """Return the summary of a run that has reached its `target_steps`; None for any other run."""
    summary, run = read_object(place / RESULT_FILE), read_object(place / RUN_FILE)
    if not (summary and run) or count(summary, "env_steps") < count(run, "target_steps"):
        return None
    return {name: value for name, value in summary.items() if isinstance(value, (int, float))}


def _show_table(places: Sequence[Path]) -> None:
    width = max(len(place.name) for place in places)
    show(f"{'run':<{width}}  mean return  env steps  seconds")
    for place in places:
        summary = finished(place) or {}
        returns = summary.get("return_mean")
        show(f"{place.name:<{width}}  {'' if returns is None else f'{returns:.1f}':>11}  "
             f"{summary.get('env_steps', ''):>9}  {summary.get('seconds', 0.0):>7.1f}")
