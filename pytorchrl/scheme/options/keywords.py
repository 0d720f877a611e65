"""Types of the flat keywords (options as keyword arguments of `Scheme`), for editors and type checkers.

Names, defaults, ranges and help texts are in the `Options` classes; see `pytorchrl.scheme.options`. A test checks
that the types in this module equal the types of the fields of those classes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TypedDict

from pytorchrl.agent.schedules import Schedule
from pytorchrl.errors import Problem
from pytorchrl.scheme.options.base import Communication, Execution
from pytorchrl.scheme.options.run import RuntimeKind
from pytorchrl.support.problems import raise_all


class CollectionKeywords(TypedDict, total=False):
    """Keywords of `CWorkerSet.create_factory`."""

    compress_data_to_send: bool | str
    col_worker_resources: Mapping[str, float]
    col_device: str | None
    col_num_threads: int | None
    inference: str
    inference_batch: int | None
    initial_priority: str


class ReplayKeywords(TypedDict, total=False):
    """Keywords of `RWorkerSet.create_factory`."""

    replay_worker_resources: Mapping[str, float]
    learning_starts: int | None
    add_in_flight: int
    routing: str
    size: int | None
    min_replay_ratio: float | None
    max_replay_ratio: float | None


class GradientKeywords(TypedDict, total=False):
    """Keywords of `GWorkerSet.create_factory` in addition to its explicit parameters."""

    dataset: str | os.PathLike[str] | None
    fraction_samples: float
    on_straggler: str
    col_in_flight: int | None
    broadcast_interval: int
    max_weight_sync_delay: int | None
    queue_size: int | None
    queue_policy: str
    queue_timeout_s: float
    on_starved: str
    minibatch_buffer_size: int
    num_passes: int
    ramp: bool | None
    buffer: str
    replay_proportion: float
    replay_slots: int
    max_policy_lag: int | None
    on_policy_lag: str | None
    train_batch_size: int | None
    microbatch_size: int | None
    prefetch: int | None
    norm_over: str
    check_data: str
    keep_bad_batches: str | os.PathLike[str] | None
    grad_device: str | None


class UpdateKeywords(TypedDict, total=False):
    """Keywords of `Scheme.from_factory`, except `runtime`."""

    grad_execution: Execution | str | None
    grad_communication: Communication | str
    distribute_gradients: bool
    aggregate: int
    max_grad_lag: int | None
    lag_policy: str
    updates_per_step: int
    compress_weights_to_send: bool | str
    device: str | None
    num_threads: int
    deterministic_kernels: bool
    tf32: bool
    seed: int | None
    address: str | None
    placement: str | None
    schedule_seed: int
    costs: Mapping[str, object] | None
    faults: str | None
    on_worker_failure: str
    worker_timeout_s: float
    record: str | os.PathLike[str] | None
    replay: str | os.PathLike[str] | None


# For each function that accepts options: the class of its keywords, and the names of other options that it accepts.
_FACTORIES = {
    "CWorkerSet.create_factory": (CollectionKeywords, ()),
    "RWorkerSet.create_factory": (ReplayKeywords, ("prefetch", "queue_size")),
    "GWorkerSet.create_factory": (GradientKeywords, (
        "col_execution", "col_communication", "col_fraction_workers", "compress_grads_to_send",
        "grad_worker_resources")),
    "Scheme.from_factory": (UpdateKeywords, ()),
}
_COUNTS = {"num_col_workers": "CWorkerSet", "num_replay_workers": "RWorkerSet", "num_grad_workers": "GWorkerSet"}


def refuse_other_levels(function: str, given: Iterable[str]) -> None:
    """Refuse options that belong to another function than the one that received them; name the right function.

    Args:
        function: The function that received the options, a key of `_FACTORIES`.
        given: Names of the options.

    Raises:
        ConfigError: An option is accepted by another function in `_FACTORIES`, but not by `function`; or an option is
            a key of `_COUNTS`, such as `num_col_workers`, which all these functions refuse.
    """
    problems = [f"{name} is the first argument of {_COUNTS[name]}.create_factory, num_workers; give it there"
                for name in given if name in _COUNTS]
    for name in given:
        homes = [home for home, (keywords, more) in _FACTORIES.items() if name in {*keywords.__annotations__, *more}]
        if homes and function not in homes:
            problems.append(f"{function} does not accept {name}; give it to {' or '.join(homes)}")
    raise_all(map(Problem, problems))


class StorageKeywords(TypedDict, total=False):
    """Options that `Scheme` passes on to a replay storage."""

    prioritized: bool | None
    alpha: float | None
    beta: float | Schedule | None
    epsilon: float | None
    stratified: bool | None


class SchemeKeywords(
        CollectionKeywords, ReplayKeywords, GradientKeywords, UpdateKeywords, StorageKeywords, total=False):
    """The flat keywords of `Scheme` (options of all levels), except `runtime`."""

    num_col_workers: int | tuple[int, ...]
    col_execution: Execution | str | None
    col_communication: Communication | str
    col_fraction_workers: float
    num_replay_workers: int | None
    num_grad_workers: int
    compress_grads_to_send: bool | str
    grad_worker_resources: Mapping[str, float]


class ArchitectureKeywords(SchemeKeywords, total=False):
    """Keywords of the constructors of architectures: `Scheme.apex`, `Scheme.impala` and so on."""

    runtime: RuntimeKind | str | None
