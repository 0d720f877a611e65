"""Change the number of collection workers of a scheme, while it runs and when it resumes from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from pytorchrl.agent.algorithms.precision import Choices
from pytorchrl.agent.factories import Agent
from pytorchrl.errors import CheckpointError, ConfigError
from pytorchrl.scheme.check import check
from pytorchrl.scheme.choices import apply_choices
from pytorchrl.scheme.collection.resizing import NOT_ELASTIC
from pytorchrl.scheme.devices import OPTIONS, kinds_of
from pytorchrl.scheme.gradients.placement import Placement
from pytorchrl.scheme.options.base import CENTRAL, PARALLEL
from pytorchrl.scheme.options.run import Ray
from pytorchrl.scheme.options.settings import Settings
from pytorchrl.scheme.recording.record import differences
from pytorchrl.support.problems import raise_all
from pytorchrl.support.terminal import get_logger

if TYPE_CHECKING:
    from pytorchrl.runtime import Runtime
    from pytorchrl.scheme.updates.u_worker import UWorker

logger = get_logger(__name__)

CHECKPOINT_FORMAT = "pytorchrl checkpoint 1"
# A resumed run may change these settings, in addition to the settings that a replayed run may change.
_FREE_TO_RESUME = frozenset({"faults", "on_worker_failure", "num_col_workers", *OPTIONS})
_EXECUTION = "; col_execution='Parallel' continues a run with remote collection workers with a single one"


def check_resume(checkpoint: Mapping[str, object], settings: Mapping[str, object], agent: Agent, *,
                 any_seed: bool) -> Agent:
    """Check that a checkpoint fits a scheme, and return the agent's parts with the saved choices.

    In the result, options that are "auto" have the values that were chosen in the saved run. The number of collection
    workers and the devices may differ from those of the saved run.

    Args:
        checkpoint: The result of `Scheme.checkpoint`.
        settings: Settings of the scheme that resumes, by name; see `Settings.flat`.
        agent: Factories of the agent's parts, in the scheme that resumes.
        any_seed: Whether the seed may differ from that of the saved run.

    Raises:
        CheckpointError: The checkpoint is from another kind of agent or scheme. The message names all differences.
        ConfigError: The option `record` or `replay` of the scheme is set.
    """
    if settings["record"] is not None or settings["replay"] is not None:
        raise ConfigError("a run that resumes cannot be recorded or replayed; leave record and replay out")
    if checkpoint.get("format") != CHECKPOINT_FORMAT:
        raise CheckpointError(f"not a checkpoint of this version: its format is {checkpoint.get('format')!r}, "
                              f"expected {CHECKPOINT_FORMAT!r}; use the version that wrote it")
    if not isinstance(checkpoint.get("state"), Mapping) or not isinstance(checkpoint.get("part"), int):
        raise CheckpointError("the checkpoint lacks the state of the workers or its own number")
    own = apply_choices(agent, cast("Choices", checkpoint["choices"]))
    parts = {name: part for name, part in own.as_dict().items() if name != "test_envs_factory"}
    saved = cast("Mapping[str, object]", checkpoint["settings"])
    problems = differences(saved, settings, cast("Mapping[str, Mapping[str, str]]", checkpoint["agent"]), parts,
                           _FREE_TO_RESUME | ({"seed"} if any_seed else set()))
    if problems:
        hint = _EXECUTION if (saved.get("col_execution"), settings["col_execution"]) == (PARALLEL, CENTRAL) else ""
        raise CheckpointError(f"the checkpoint is from another run: {'; '.join(problems)}; use its settings{hint}")
    before, now = kinds_of(saved), kinds_of(settings)
    if before != now:
        logger.warning("the run resumes on another kind of device, which rounds differently and draws other random "
                       "numbers, so it does not continue bit for bit: %s",
                       "; ".join(f"{name} was {before[name]!r}, now it is {now[name]!r}"
                                 for name in OPTIONS
                                 if before[name] != now[name] and saved.get(name) != settings.get(name)))
    return own


def resize(settings: Settings, agent: Agent, num_col_workers: int | tuple[int, ...],
           worker: UWorker | None, runtime: Runtime | None) -> Settings:
    """Change the number of collection workers, and return the new settings.

    Args:
        settings: The present settings.
        agent: Factories of the agent's parts.
        num_col_workers: New number of collection workers of each gradient worker, or a tuple with one number for each
            gradient worker.
        worker: The root of the worker tree; None: the tree has not been built.
        runtime: The runtime of the workers; None: the tree has not been built.

    Raises:
        ConfigError: The number is invalid, contradicts other settings, or cannot change in this scheme.
        InsufficientResourcesError: The machines lack resources that the new workers request.
    """
    changed = _resized(settings, agent, num_col_workers)
    if worker is not None and runtime is not None:
        worker.resize(num_col_workers, _resources_of_more(settings, changed, runtime))
    return changed


def _resized(settings: Settings, agent: Agent, num_col_workers: int | tuple[int, ...]) -> Settings:
    if settings.recording.record is not None or settings.recording.replay is not None:
        raise ConfigError("the number of collection workers of a run that is recorded or replayed cannot change, "
                          "because a record does not contain the time of the change; leave record and replay out")
    if not settings.has_parallel_collection:
        raise ConfigError(NOT_ELASTIC)
    changed = replace(settings, collection=replace(settings.collection, num_col_workers=num_col_workers))
    num_grad_workers = settings.gradients.num_grad_workers
    before, after = (sum(each.collection.numbers(num_grad_workers)) for each in (settings, changed))
    if isinstance(settings.runtime, Ray) and settings.runtime.placement == "colocate" and after > before:
        raise ConfigError("placement='colocate' reserves resources at the start, so the number of collection workers "
                          f"can only become smaller: it is {before} in total, got {after}; start with the largest "
                          "number, or leave placement out")
    raise_all(check(agent, changed))
    return changed


def _resources_of_more(settings: Settings, changed: Settings, runtime: Runtime) -> Mapping[str, float] | None:
    """Return the resources to request for each collection worker that `changed` adds; None if it adds no workers.

    On Ray, default requests are reduced if they exceed the free resources of the cluster.
    """
    num_grad_workers = settings.gradients.num_grad_workers
    before, after = (each.collection.numbers(num_grad_workers) for each in (settings, changed))
    num_more = sum(max(0, new - old) for old, new in zip(before, after, strict=True))
    if not num_more:
        return None
    placement = Placement(changed.collection, changed.gradients, changed.process.device, changed.on_ray)
    return runtime.fit_resources([("collection workers", num_more, placement.resources("col"))])[0]
