"""Inject failures according to a plan that states which worker fails, how and when.

An example of a plan:

kill col.3 @ step 400; hang grad.1 30s; delay col.* 2s p=0.01; nan grad.0 @ update 5; kill GWorker 2/CWorker 1 @ step 10
"""

from __future__ import annotations

import fnmatch
import math
import random
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from pytorchrl.errors import ConfigError, InjectedFault

ACTIONS = ("kill", "hang", "delay", "raise", "nan")
POINTS = {"col": ("step",), "grad": ("grad", "update"), "shard": ("add", "sample", "priorities")}
"""For each kind of worker, the points of its work at which faults can happen; the first point is the default."""

_SYNTAX = re.compile(
    r"(?P<action>\w+)\s+(?P<target>GWorker [\d*?]+(?:/[CR]Worker [\d*?]+)?|[\w.*?]+)(?:\s+(?P<seconds>[0-9.]+)s)?"
    r"(?:\s*@\s*(?P<point>\w+)\s+(?P<count>\d+))?(?:\s+p=(?P<probability>[0-9.eE+-]+))?")
_NAME = re.compile(r"GWorker (?P<parent>[\d*?]+)(?:/(?P<kind>[CR])Worker (?P<index>[\d*?]+))?")
_HELP = ("a fault is ACTION TARGET [Ns] [@ POINT COUNT] [p=PROBABILITY], such as 'kill col.3 @ step 400' or "
         "'delay col.* 2s p=0.01'")


class FaultHost(Protocol):
    """The methods that faults need from a runtime."""

    def sleep(self, seconds: float) -> None:
        """Block the calling worker for `seconds` seconds."""

    def die(self, worker: str) -> None:
        """Kill the calling worker, as a crash would."""


@dataclass(frozen=True)
class Fault:
    """A failure to inject into the workers that match its target; see `FaultPlan` for targets.

    A worker counts how often it reaches `point`, for example how often its environments have taken a step.

    Without a `probability`, a fault happens once in each worker: when the worker reaches the point for the `count`-th
    time (None: the first time). It does not happen in replacements of the worker. There is one exception: a `delay`
    without a `count` happens every time, in replacements, too.

    With a `probability`, a random draw decides whether the fault happens. If `count` is None, there is a draw each time
    that a worker or its replacement reaches the point; otherwise, there is a draw only at the `count`-th time.
    """

    action: str
    target: str
    seconds: float
    point: str
    count: int | None
    probability: float | None
    text: str
    """The fault as it was given."""

    def happens(self, count: int, incarnation: int, rng: random.Random) -> bool:
        """Return whether the fault happens when a worker reaches the fault's point for the `count`-th time."""
        if self.probability is not None:
            return (self.count is None or count == self.count) and rng.random() < self.probability
        if self.action == "delay" and self.count is None:
            return True
        return incarnation == 0 and count == (self.count or 1)


class FaultPlan:
    """All faults of a run.

    The target of a fault is the name of a worker, such as `GWorker 2/CWorker 1` or `GWorker 1/RWorker 2`, or a short
    form. `col.I` is collection worker I of every gradient worker, and `col.J.I` is collection worker I of gradient
    worker J. `shard.I` and `shard.J.I` name replay shards in the same way, and `grad.J` is gradient worker J. `*` and
    `?` are wildcards. Index 0 is the local worker.

    A fault happens at a point of the worker's work, and the worker counts how often it reaches the point. Collection
    workers count the steps of their vector of environments (`step`). Gradient workers count computed gradients (`grad`)
    and applied updates (`update`). Shards count calls (`add`, `sample` and `priorities`). The action `nan` makes a
    gradient non-finite at `grad` or `update`.

    Args:
        text: Faults separated by `;`.
        seed: Seed that determines when faults that have a probability occur.

    Raises:
        ConfigError: The text is not a valid plan; the message states the reason and the syntax.
    """

    def __init__(self, text: str, seed: int) -> None:
        self.text, self._seed = text, seed
        self.faults = [parse_fault(part) for part in text.split(";") if part.strip()]
        if not self.faults:
            raise ConfigError(f"faults is empty; {_HELP}; None injects nothing")

    @property
    def kills(self) -> bool:
        """Whether any fault kills a worker."""
        return any(fault.action == "kill" for fault in self.faults)

    def impossible(self, reached: Iterable[tuple[str, str]]) -> list[str]:
        """Return the texts of the faults that can never happen.

        Args:
            reached: The name of each worker of the run, with each point that the worker may reach.
        """
        places = {(name, point) for worker, point in reached for name in _addresses(worker)[1]}
        return [fault.text for fault in self.faults
                if not any(point == fault.point and fnmatch.fnmatchcase(name, fault.target) for name, point in places)]

    def __reduce__(self) -> tuple[type[FaultPlan], tuple[str, int]]:
        return FaultPlan, (self.text, self._seed)

    def points(self, worker: str, incarnation: int, host: FaultHost) -> Callable[[str], bool] | None:
        """Return the function that injects faults into a worker; None if no fault targets the worker.

        The worker calls the function with the name of a point of its work (see `POINTS`) when it reaches the point,
        such as "step" after each step of its environments.

        Args:
            worker: Name of the worker, such as "GWorker 1/CWorker 3".
            incarnation: Number of earlier workers at the same place in the tree.
            host: Runtime of the worker.

        Returns:
            A function that returns whether to corrupt the worker's current result.
        """
        kind, names = _addresses(worker)
        chosen = [fault for fault in self.faults if any(fnmatch.fnmatchcase(name, fault.target) for name in names)]
        if not chosen:
            return None
        rng = random.Random(f"faults {self._seed} {worker} {incarnation}")
        counts = dict.fromkeys(POINTS[kind], 0)

        def point(name: str) -> bool:
            counts[name] += 1
            is_corrupt = False
            for fault in chosen:
                if fault.point == name and fault.happens(counts[name], incarnation, rng):
                    is_corrupt |= _inject(fault, worker, f"{name} {counts[name]}", host)
            return is_corrupt

        return point


def parse_fault(text: str) -> Fault:
    """Parse one fault; raise `ConfigError` if the text is not a fault."""
    match = _SYNTAX.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"faults has {text.strip()!r}, which is not a fault; {_HELP}")
    action, target = match["action"], _short(match["target"])
    kind = target.split(".")[0]
    points = POINTS.get(kind, ())
    probability = None if match["probability"] is None else float(match["probability"])
    problems = [problem for wrong, problem in (
        (action not in ACTIONS, f"the action must be one of {list(ACTIONS)}"),
        (not points or not 2 <= target.count(".") + 1 <= (2 if kind == "grad" else 3),
         "the target must be col.I, col.J.I, shard.I, shard.J.I, grad.J or a name such as GWorker 1/CWorker 2"),
        (bool(points) and match["point"] is not None and match["point"] not in points,
         f"{kind} has the points {list(points)}"),
        (match["count"] is not None and int(match["count"]) == 0, "points are counted from 1"),
        (action == "delay" and match["seconds"] is None, "a delay needs a duration, such as 2s"),
        (action not in ("delay", "hang") and match["seconds"] is not None, f"{action} takes no seconds"),
        (action == "nan" and kind != "grad", "nan makes a gradient non-finite; the target must be grad.J"),
        (probability is not None and not 0.0 < probability <= 1.0, "p must be in (0, 1]"),
    ) if wrong]
    if problems:
        raise ConfigError(f"faults has {text.strip()!r}: {'; '.join(problems)}")
    return Fault(action, target, math.inf if match["seconds"] is None else float(match["seconds"]),
                 match["point"] or points[0], None if match["count"] is None else int(match["count"]), probability,
                 text.strip())


def _short(target: str) -> str:
    """Return the short form of a fault's target, such as `col.2.1`; a target that is already short is unchanged."""
    name = _NAME.fullmatch(target)
    if name is None:
        return target
    kind = {"C": "col", "R": "shard", None: "grad"}[name["kind"]]
    return ".".join([kind, name["parent"], *filter(None, [name["index"]])])


def _addresses(worker: str) -> tuple[str, list[str]]:
    """Return the kind of a worker, such as "col", and all short forms of its name, such as "col.1" and "col.2.1"."""
    numbers = re.findall(r"\d+", worker)
    for mark, kind in (("CWorker", "col"), ("RWorker", "shard")):
        if mark in worker:
            return kind, [f"{kind}.{numbers[1]}", f"{kind}.{numbers[0]}.{numbers[1]}"]
    return "grad", [f"grad.{numbers[0]}"]


def _inject(fault: Fault, worker: str, where: str, host: FaultHost) -> bool:
    if fault.action == "kill":
        host.die(worker)
    elif fault.action == "raise":
        raise InjectedFault(f"injected into {worker} at {where}")
    elif fault.action in ("hang", "delay"):
        host.sleep(fault.seconds)
    return fault.action == "nan"
