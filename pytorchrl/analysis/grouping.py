"""Group runs by the settings in which they differ, and name each group after what the user changed."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence

from pytorchrl.analysis.runs import Run
from pytorchrl.errors import ConfigError

# Settings that a scheme or a preset derives from others. They name a group only if the user gave them, or if no other
# setting tells its runs apart.
_DERIVED = frozenset(("col_execution", "grad_execution", "runtime", "col_in_flight", "queue_size", "min_replay_ratio",
                      "max_replay_ratio"))
# Derived settings that stand among those of `train`, because they come from the preset.
_OF_PRESETS = frozenset(("min_replay_ratio", "max_replay_ratio"))
# The settings that together make one word such as "async" and a number: (word before, number, communication).
_WORKERS = (("", "num_col_workers", "col_communication"), ("grad ", "num_grad_workers", "grad_communication"),
            ("replay ", "num_replay_workers", ""))
_SHORT = {"synchronous": "sync", "asynchronous": "async"}
_MOST_LISTED = 30


def group_runs(runs: Sequence[Run], by: Sequence[str] | None = None) -> dict[str, list[Run]]:
    """Group runs by algorithm and by the settings in which they differ; the keys are labels such as "ppo lr=0.001".

    Labels are short: "async" or "sync" and a multiplication sign stand for the collection workers and their number, the
    same words after "grad" for gradient workers, "replay" for replay shards, and "envs=8" for `num_envs=8`. A label
    shows only settings that were given to `train` or come from its preset, not those that follow from others.

    Runs on different environments can be in the same group. To find the settings in which runs differ, only runs of the
    same algorithm on the same environment are compared, because presets depend on both.

    Args:
        runs: The runs.
        by: Names of the settings by which to group; None: all settings in which runs differ.

    Raises:
        ConfigError: `by` names a setting that no run has.
    """
    names = ["algorithm", *differing(runs)] if by is None else list(by)
    _check(names if by is not None else (), runs)
    found: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        found.setdefault(_values(run, names), []).append(run)
    labels = [_label(some, names, is_asked=by is not None) for some in found.values()]
    if len(set(labels)) < len(labels):  # only settings that nobody gave tell some groups apart
        labels = [_label(some, names, is_asked=True) for some in found.values()]
    groups: dict[str, list[Run]] = {}
    for label, some in zip(labels, found.values(), strict=True):
        groups.setdefault(label, []).extend(some)
    return groups


def _check(names: Sequence[str], runs: Sequence[Run]) -> None:
    known = set().union(*(run.settings for run in runs))
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3)
            listed = sorted(known) if len(known) <= _MOST_LISTED else near
            advice = f"; the settings are {', '.join(listed)}" if listed == sorted(known) else (
                f"; did you mean {' or '.join(near)}?" if near else f"; {len(known)} settings stand in run.json")
            raise ConfigError(f"no run has the setting {name!r}{advice}")


def differing(runs: Sequence[Run]) -> list[str]:
    """Return the names of the settings in which runs of the same algorithm and environment differ."""
    alike: dict[tuple[object, str], list[Run]] = {}
    for run in runs:
        alike.setdefault((run.settings.get("algorithm"), run.task), []).append(run)
    return sorted(set().union(*map(_differing_alike, alike.values())))


def _differing_alike(runs: Sequence[Run]) -> list[str]:
    composed = any(not run.given for run in runs)
    given = set().union(*(run.given for run in runs))
    names = sorted(set().union(*(run.settings for run in runs)) if composed else given)
    names = [name for name in names if len({_values(run, [name]) for run in runs}) > 1]
    sure = [name for name in names if name not in _DERIVED or (name in given and name not in _OF_PRESETS)]
    for name in names:
        if name not in sure and len({_values(run, [*sure, name]) for run in runs}) > len(
                {_values(run, sure) for run in runs}):
            sure.append(name)
    return sure


def _values(run: Run, names: Sequence[str]) -> tuple[str, ...]:
    return tuple(json.dumps(run.settings.get(name), sort_keys=True, default=str) for name in names)


def _label(runs: Sequence[Run], names: Sequence[str], *, is_asked: bool) -> str:
    """Return the label of a group, whose runs have equal values of the settings `names`.

    Args:
        runs: The runs of the group.
        names: The settings by which the runs are grouped.
        is_asked: Whether the user asked for these settings, so that the label shows defaults, too, and no others.
    """
    settings = runs[0].settings
    shown = {name: settings.get(name) for name in names if name == "algorithm" or (
        is_asked and settings.get(name) is not None) or any(
        name in (run.given or run.settings) for run in runs)}
    if not is_asked:  # a number is shown with its communication, and the communication with its number
        for _, count, communication in _WORKERS:
            if communication and (count in shown or communication in shown):
                shown |= {name: settings.get(name) for name in (count, communication)}
    words = [str(shown.pop("algorithm"))] if shown.get("algorithm") is not None else []
    shown.pop("algorithm", None)
    words += _workers(shown)
    words += [f"{name.removeprefix('num_')}={short(value)}" for name, value in shown.items()]
    return " ".join(words) or "runs"


def _workers(shown: dict[str, object]) -> list[str]:
    """Take the settings of workers out of `shown`, and return them in words such as "async" with a number."""
    words = []
    for prefix, count, communication in _WORKERS:
        number, how = shown.pop(count, None), shown.pop(communication, None)
        parts = [_SHORT.get(str(how), str(how))] if how is not None else []
        parts += [f"\N{MULTIPLICATION SIGN}{number}"] if number is not None else []
        words += [prefix + " ".join(parts)] if parts else []
    return words


def short(value: object) -> str:
    """Return the value of a setting, as `run.json` describes it, as a short text such as "linear:0.001:0"."""
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list):
        return ",".join(map(short, value)) or "empty"
    if isinstance(value, Mapping):
        if isinstance(parts := value.get("schedule"), list):
            return ":".join(map(short, parts))
        if isinstance(name := value.get("__code__"), str):
            return name.rpartition(":")[2]
        return json.dumps(dict(value), sort_keys=True, default=str)
    return str(value)
