"""List the options of the scheme by level, for `train`, the command line and the documentation."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass

from pytorchrl.scheme import Scheme
from pytorchrl.scheme.architectures import PRESETS
from pytorchrl.scheme.replay.storage_options import STORAGE_OPTIONS

GROUPS: Mapping[str, str] = {
    "collection": "collection: workers that step environments, and the queue to the learner",
    "replay": "replay: shards between collection workers and the learner",
    "gradients": "gradients: gradient workers and their batches",
    "updates": "updates: how gradients become new weights",
    "runtime": "runtime: processes, devices, seeds and records",
    "supervision": "supervision: lost and hanging workers",
}
"""Level of the scheme -> its title in `--help`."""


@dataclass(frozen=True)
class SchemeOption:
    """One setting of the scheme.

    Attributes:
        name: Its name, the same everywhere.
        group: The level that it belongs to, a key of `GROUPS`.
        hint: Its type.
        default: Its default.
        help: One or two sentences.
        choices: The closed set of allowed values; None: there is no such set.
    """

    name: str
    group: str
    hint: object
    default: object
    help: str
    choices: tuple[object, ...] | None = None


# The parameters that are no settings, and those of the storage, which is made of the same options.
_NOT_OPTIONS = {"algo_factory", "actor_factory", "storage_factory", "train_envs_factory", "test_envs_factory", "prioritized",
                *STORAGE_OPTIONS}
_OF_RUNTIME = ("runtime", "device", "num_threads", "seed", "schedule_seed", "costs", "faults", "address", "placement", "record", "replay")
_OF_UPDATES = ("updates_per_step", "aggregate", "max_grad_lag", "lag_policy", "compress_weights_to_send", "grad_communication",
               "distribute_gradients", "check_ranks_every")
_OF_GRADIENTS = ("num_grad_workers", "train_batch_size", "microbatch_size", "prefetch", "norm_over", "keep_bad_batches",
                 "compress_grads_to_send", "grad_execution", "grad_worker_resources", "grad_device")
_OF_REPLAY = ("num_replay_workers", "replay_worker_resources", "initial_priority", "learning_starts", "add_in_flight", "routing", "kind",
              "min_replay_ratio", "max_replay_ratio", "replay_debug")
_GROUP_OF = {**dict.fromkeys(_OF_RUNTIME, "runtime"), **dict.fromkeys(_OF_UPDATES, "updates"),
             **dict.fromkeys(_OF_GRADIENTS, "gradients"), **dict.fromkeys(_OF_REPLAY, "replay"),
             "on_worker_failure": "supervision", "worker_timeout_s": "supervision"}


def scheme_options() -> list[SchemeOption]:
    """Return the settings of the scheme; `preset`, the name of an architecture, is the first."""
    hints, texts = typing.get_type_hints(Scheme.__init__), documented_arguments(Scheme.__doc__ or "")
    preset = SchemeOption(
        "preset", "collection", typing.Optional[str], None,  # noqa: UP045 - unions of strings are not evaluated here
        "An architecture of the literature, such as `impala` for `Scheme.impala`; its settings hold where nothing else is given.",
        (None, *PRESETS))
    return [preset] + [
        SchemeOption(name, _GROUP_OF.get(name, "collection"), hints[name], parameter.default, texts.get(name, ""))
        for name, parameter in inspect.signature(Scheme).parameters.items() if name not in _NOT_OPTIONS
    ]


def documented_arguments(docstring: str) -> dict[str, str]:
    """Return name -> text from the `Args:` section of a Google-style docstring."""
    section = re.search(r"^Args:\n(.*?)(?:^\S|\Z)", inspect.cleandoc(docstring), re.DOTALL | re.MULTILINE)
    if section is None:
        return {}
    texts: dict[str, str] = {}
    for names, text in re.findall(r"^ {4}([\w, ]+):(.*?)(?=^ {4}\S|\Z)", section.group(1), re.DOTALL | re.MULTILINE):
        for name in names.split(", "):
            texts[name] = " ".join(text.split())
    return texts
