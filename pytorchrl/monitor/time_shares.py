"""Find the bottleneck of a run, given the seconds that each part of its work takes.

`metrics()["time_s"]` has the seconds of each part by level: collection, gradients and update. If two levels take turns,
updates wait for both, so the parts of both are compared. If two levels run concurrently, updates wait for the slower
level, so only its parts are compared.

This module imports no torch, so that a program that only reads the files of a run starts quickly.
"""

from __future__ import annotations

from collections.abc import Mapping

from pytorchrl.errors import ArgumentError
from pytorchrl.support.untyped import OptionValue

TimeS = Mapping[str, Mapping[str, float]]
ValuesByName = Mapping[str, OptionValue]
"""Values of options, or of metrics, by name."""

# If two levels run concurrently, the lower can be the bottleneck only if the upper's waiting share exceeds this value.
_MIN_WAIT_SHARE = 0.1

DESCRIPTIONS: Mapping[str, str] = {
    "collection/environment": "stepping environments",
    "collection/inference": "choosing actions",
    "collection/store": "storing steps and checking rollouts",
    "collection/encode": "encoding rollouts",
    "collection/decode": "loading new weights into collection workers",
    "collection/send": "requests and rollouts in transit",
    "collection/idle": "collection workers without a request",
    "gradients/wait": "waiting for batches from replay",
    "gradients/decode": "decoding rollouts and weights in gradient workers",
    "gradients/copy": "preparing batches: returns, advantages, copies",
    "gradients/grad": "computing gradients",
    "gradients/average": "averaging among gradient workers, including the wait for the slowest",
    "gradients/apply": "applying updates in each gradient worker",
    "gradients/encode": "encoding gradients",
    "gradients/send": "weights and gradients in transit",
    "gradients/idle": "gradient workers that wait for other gradient workers",
    "update/decode": "decoding gradients and taking their mean",
    "update/apply": "applying updates",
    "update/push": "copying and publishing new weights",
    "update/idle": "your own program between two steps",
}
"""Part -> description of its work."""


def is_async(options: ValuesByName) -> bool:
    """Return whether collection continues while gradients are computed."""
    return bool(options.get("col_communication") == "asynchronous")  # importing `ASYNC` would import torch


def grads_are_free(options: ValuesByName) -> bool:
    """Return whether gradient workers continue without waiting for an update."""
    return bool(options.get("grad_communication") == "asynchronous" and options.get("grad_execution") == "Parallel")


def bottleneck(time_s: TimeS, options: ValuesByName) -> tuple[str, float, str]:
    """Return the part of the work that limits a run, its share of the time, and a sentence that states both.

    Args:
        time_s: Seconds by level and part.
        options: The settings in force.

    Returns:
        "level/part", such as "collection/environment"; the share of this part, in [0, 1]; and the sentence, which also
        names the time to which the share refers.

    Raises:
        ArgumentError: No update has been made yet.
    """
    candidates = critical_parts(time_s, options)
    part = max(candidates, key=lambda name: candidates[name])
    sentence = f"{candidates[part]:.0%} of {time_description(candidates)} is {DESCRIPTIONS[part]} ({part})"
    return part, candidates[part], sentence


def critical_parts(time_s: TimeS, options: ValuesByName) -> dict[str, float]:
    """Return the parts of the work that may be the bottleneck, and each part's share of its level's time.

    The levels are, from top to bottom: update, gradients, collection. Each level waits for the next lower one:

    - If the two levels take turns, the parts of both are returned. The lower level's share "idle" is then replaced by
      max(0, wait - busy): the upper level's share "wait" minus the lower level's busy share, which is 1 - idle.
    - If the two levels run concurrently, only the parts of the slower level are returned. The lower level is the slower
      one if the upper level's waiting share is greater than both 0.1 and the lower level's idle share.
    - With replay shards, "gradients/wait", the wait for batches, is returned in place of the parts of collection.

    Args:
        time_s: Seconds by level and part.
        options: All options in force.

    Raises:
        ArgumentError: No update has been made.
    """
    share = shares(time_s)
    if not share["update"]:
        raise ArgumentError("time_s is empty: no update has been made yet; train first")
    found = _own(share["update"], "update") | {"update/idle": share["update"]["idle"]}
    levels = (("update", "gradients", grads_are_free(options)), ("gradients", "collection", is_async(options)))
    for above, level, is_free in levels:
        wait, idle = share[above]["wait"], share[level]["idle"]
        if level == "collection" and options.get("num_replay_workers"):
            return found | {"gradients/wait": wait}
        if is_free:
            if not _is_held_up(wait, idle):
                return found
            found.clear()
        else:
            idle = max(0.0, wait - (1.0 - idle))
        found |= _own(share[level], level) | {f"{level}/idle": idle}
    return found


def _own(parts: Mapping[str, float], level: str) -> dict[str, float]:
    return {f"{level}/{part}": share for part, share in parts.items() if part not in ("wait", "idle")}


def _is_held_up(wait: float, idle_below: float) -> bool:
    return wait > max(_MIN_WAIT_SHARE, idle_below)


def time_description(candidates: Mapping[str, float]) -> str:
    """Return a phrase that says of which time the shares are fractions, such as "the time of gradient workers".

    Args:
        candidates: The shares by "level/part", as returned by `critical_parts`.
    """
    levels = {part.split("/")[0] for part in candidates}
    if "update" in levels:
        return "the time from update to update"
    if "gradients" in levels:
        return "the time of gradient workers"
    return "the time of collection workers, for which learning waits,"


def shares(time_s: TimeS) -> dict[str, dict[str, float]]:
    """Return the fraction of each level's time that each of its parts took, e.g. {"collection": {"store": 0.2, ...}}.

    A level that took no time gets an empty dictionary.
    """
    totals = {level: sum(parts.values()) for level, parts in time_s.items()}
    return {level: {part: seconds / totals[level] for part, seconds in parts.items()} if totals[level] > 0 else {}
            for level, parts in time_s.items()}
