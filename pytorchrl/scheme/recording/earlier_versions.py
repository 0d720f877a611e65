"""Compare a checkpoint, which an earlier version may have written, with the scheme that resumes from it."""

from __future__ import annotations

from collections.abc import Mapping

from pytorchrl.agent.option_values.descriptions import to_json
from pytorchrl.scheme.options.settings import default_of_keyword, known_keywords
from pytorchrl.scheme.recording.record import differences

# A resumed run may change these settings, in addition to the settings that a replayed run may change.
_FREE_TO_RESUME = frozenset({"faults", "on_worker_failure", "num_col_workers"})


def differences_from(
    saved: Mapping[str, object], settings: Mapping[str, object], saved_agent: Mapping[str, Mapping[str, str]],
    agent: Mapping[str, object], *, any_seed: bool,
) -> list[str]:
    """Return the differences between the run of a checkpoint and the scheme that resumes from it; see `differences`."""
    return differences(
        _complete(saved), settings, saved_agent, agent, _FREE_TO_RESUME | ({"seed"} if any_seed else set()))


def _complete(saved: Mapping[str, object]) -> dict[str, object]:
    """Add to saved settings the defaults of the keywords that did not exist when the settings were saved."""
    complete = {**{name: to_json(default_of_keyword(name)) for name in known_keywords() if name not in saved}, **saved}
    if "inference" not in saved and saved.get("prefetch") == 0:
        complete["prefetch"] = None  # the default was 0 in version 0.1.0, and is None in later versions
    return complete
