"""Find the bottleneck of a run, and advise which option to change.

The bottleneck comes from `pytorchrl.monitor.time_shares`, which computes it from the seconds that each part of the work
takes. This module adds the advice for each part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch

from pytorchrl.monitor.time_shares import TimeS, ValuesByName, bottleneck, grads_are_free, is_async, shares
from pytorchrl.scheme import PARALLEL, Scheme
from pytorchrl.scheme.options.settings import default_of_keyword
from pytorchrl.support.cores import usable_cores
from pytorchrl.support.untyped import MetricsDict, OptionValue

_Condition = Callable[[ValuesByName], bool]

# Smallest rollout, in bytes, for which compression saves time.
_LARGE_ROLLOUT = 1e6
# Options that start more processes.
_PROCESSES = ("num_col_workers", "num_grad_workers", "num_replay_workers")


@dataclass(frozen=True, slots=True)
class Tip:
    """Advice about one part of the work at a level (collection, gradients or update).

    Attributes:
        part: "level/part", such as "collection/environment".
        option: Name of the option to change, in `pytorchrl.train` and on the command line.
        advice: Instruction to change the option; `{flag}` is the option's flag, and `{value}` its current value.
        when: Function that takes the options in force, and returns whether the tip applies. If several tips for one
            part apply, the first of them is used.
    """

    part: str
    option: str
    advice: str
    when: _Condition = lambda options: True


def _in_force(options: ValuesByName, name: str) -> OptionValue:
    return options.get(name, default_of_keyword(name))


def _has_free_cores(options: ValuesByName) -> bool:
    num_collectors = max(1, _in_force(options, "num_col_workers")) * max(1, _in_force(options, "num_grad_workers"))
    return bool(num_collectors < options["cores"])


def _can_distribute(options: ValuesByName) -> bool:
    return not options.get("distribute_gradients") and not grads_are_free(options)


def _can_aggregate(options: ValuesByName) -> bool:
    return grads_are_free(options) and bool(_in_force(options, "aggregate") < _in_force(options, "num_grad_workers"))


def _is_on(name: str) -> _Condition:
    return lambda options: bool(options.get(name))


def _is_off(name: str) -> _Condition:
    return lambda options: options.get(name) is False


def _can_compile(options: ValuesByName) -> bool:
    return options.get("compile") is False and not options.get("recurrent_net")


def _above(name: str, limit: int) -> _Condition:
    return lambda options: (options.get(name) or 0) > limit


def _fewer_updates(part: str) -> tuple[Tip, ...]:
    return (
        Tip(part, "num_mini_batch", "fewer and larger batches make fewer updates: lower {flag}, now {value}",
            lambda options: _above("num_mini_batch", 1)(options) and not options.get("mini_batch_size")),
        Tip(part, "mini_batch_size", "fewer and larger batches make fewer updates: raise {flag}, now {value}",
            lambda options: bool(options.get("mini_batch_size") and "num_mini_batch" in options)),
        Tip(part, "num_epochs", "fewer passes make fewer updates: lower {flag}, now {value}", _above("num_epochs", 1)),
        Tip(part, "num_envs", "more data per update makes fewer updates: raise {flag}, now {value}"),
    )


TIPS: tuple[Tip, ...] = (
    Tip("collection/environment", "num_col_workers",
        "let more processes step environments in parallel: raise {flag}, now {value}", _has_free_cores),
    Tip("collection/environment", "backend",
        "if one is available, use a native vector environment, which steps many environments at the cost of a few: "
        "{flag} vector or envpool, now {value}",
        lambda options: options.get("backend") in ("auto", "sync")),
    Tip("collection/environment", "num_col_workers", "use more processes on more cores: raise {flag}, now {value}"),
    Tip("collection/inference", "num_envs",
        "let one pass of the network serve more environments: raise {flag}, now {value}"),
    Tip("collection/store", "num_envs", "let more environments share the work of a step: raise {flag}, now {value}"),
    Tip("collection/encode", "compress_data_to_send", "compression costs more than it saves here: {flag} no",
        _is_on("compress_data_to_send")),
    Tip("collection/encode", "num_col_workers", "let more processes encode in parallel: raise {flag}, now {value}"),
    Tip("collection/decode", "broadcast_interval", "send workers new weights less often: raise {flag}, now {value}",
        is_async),
    Tip("collection/decode", "num_steps", "longer rollouts need new weights less often: raise {flag}, now {value}"),
    Tip("collection/send", "compress_data_to_send", "rollouts are large and not compressed: {flag}",
        lambda options: not options.get("compress_data_to_send") and options["rollout_bytes"] >= _LARGE_ROLLOUT),
    Tip("collection/send", "num_steps", "longer rollouts need fewer messages: raise {flag}, now {value}"),
    Tip("collection/idle", "max_policy_lag",
        "workers wait so that rollouts do not become too old: raise {flag}, now {value}",
        lambda options: is_async(options) and options.get("on_policy_lag") == "wait"),
    Tip("collection/idle", "col_in_flight", "send the next requests earlier: raise {flag}, now {value}", is_async),
    Tip("collection/idle", "col_fraction_workers",
        "do not wait for the slowest workers: {flag} 0.75 stops them, and --col-communication asynchronous replaces "
        "rounds",
        lambda options: _in_force(options, "col_fraction_workers") == 1.0),
    Tip("collection/idle", "col_communication",
        "let workers continue without waiting for each other: {flag} asynchronous"),
    Tip("gradients/wait", "max_replay_ratio", "learning waits for data to keep {flag}, now {value}: raise it",
        lambda options: options.get("max_replay_ratio") is not None),
    Tip("gradients/wait", "num_replay_workers", "let more shards sample in parallel: raise {flag}, now {value}"),
    Tip("gradients/decode", "compress_data_to_send", "compression costs more than it saves here: {flag} no",
        _is_on("compress_data_to_send")),
    Tip("gradients/decode", "num_grad_workers", "let more processes decode in parallel: raise {flag}, now {value}"),
    Tip("gradients/copy", "recompute_advantages", "values are recomputed before each epoch: {flag} no",
        _is_on("recompute_advantages")),
    Tip("gradients/copy", "num_grad_workers",
        "let more processes prepare batches in parallel: raise {flag}, now {value}"),
    Tip("gradients/grad", "device", "a GPU is idle: {flag} cuda:0",
        lambda options: options["gpus"] and options.get("device") in (None, "cpu")),
    Tip("gradients/grad", "compile", "compile losses and gradients, which pays off in long runs: {flag}",
        _can_compile),
    Tip("gradients/grad", "num_grad_workers",
        "let more processes compute gradients in parallel: raise {flag}, now {value}",
        _has_free_cores),
    Tip("gradients/grad", "mixed_precision", "run networks in bfloat16 where that is faster: {flag} auto",
        _is_off("mixed_precision")),
    Tip("gradients/grad", "num_epochs", "fewer passes over each rollout: lower {flag}, now {value}",
        _above("num_epochs", 1)),
    Tip("gradients/grad", "num_grad_workers", "use more processes on more cores: raise {flag}, now {value}"),
    Tip("gradients/average", "col_fraction_workers",
        "do not wait for the ranks with the slowest environments: {flag} 0.75 stops their collection",
        lambda options: not is_async(options) and _in_force(options, "col_fraction_workers") == 1.0),
    *_fewer_updates("gradients/average"),
    *_fewer_updates("gradients/apply"),
    Tip("gradients/encode", "compress_grads_to_send", "compression costs more than it saves here: {flag} no",
        _is_on("compress_grads_to_send")),
    *_fewer_updates("gradients/encode"),
    Tip("gradients/send", "distribute_gradients", "let gradient workers average among themselves: {flag}",
        _can_distribute),
    *_fewer_updates("gradients/send"),
    Tip("gradients/idle", "grad_communication", "let each gradient be applied when it arrives: {flag} asynchronous",
        lambda options: options.get("grad_execution") == PARALLEL and _can_distribute(options)),
    *_fewer_updates("gradients/idle"),
    Tip("update/decode", "compress_grads_to_send", "compression costs more than it saves here: {flag} no",
        _is_on("compress_grads_to_send")),
    Tip("update/decode", "distribute_gradients", "let gradient workers average among themselves: {flag}",
        _can_distribute),
    *_fewer_updates("update/decode"),
    Tip("update/apply", "aggregate", "make one update of several gradients: raise {flag}, now {value}",
        _can_aggregate),
    *_fewer_updates("update/apply"),
    Tip("update/push", "aggregate", "make one update of several gradients: raise {flag}, now {value}",
        _can_aggregate),
    Tip("update/push", "distribute_gradients", "let gradient workers keep their own weights: {flag}", _can_distribute),
    *_fewer_updates("update/push"),
    Tip("update/idle", "updates_per_step",
        "make more updates before your program continues: raise {flag}, now {value}"),
)
"""The tips of each part, in order of decreasing effect; the last tip of each part always applies."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The bottleneck of a run.

    Attributes:
        part: "level/part", such as "collection/environment".
        share: Time of the part divided by a total time, in [0, 1]; `sentence` names this total time.
        sentence: The bottleneck as a sentence for the user.
        option: Name of the option to change.
        advice: Instruction to change the option.
    """

    part: str
    share: float
    sentence: str
    option: str
    advice: str


def explain(
    metrics: ValuesByName, options: ValuesByName | None = None, *, cores: int | None = None, gpus: int | None = None,
) -> Finding:
    """Return the bottleneck of a run and the option to change.

    Args:
        metrics: The result of `Scheme.metrics()`, or of `between` for two such results.
        options: All options in force (see `options_of`); None: the scheme is assumed to be synchronous and central.
        cores: CPU cores of all machines; None: the cores that this process may use.
        gpus: GPUs of all machines; None: the GPUs of this machine.

    Raises:
        ValueError: No update has been made yet.
    """
    rollouts = metrics.get("rollouts") or 1
    known = {
        **(options or {}), "cores": cores or usable_cores(),
        "gpus": torch.cuda.device_count() if gpus is None else gpus,
        "rollout_bytes": metrics.get("bytes_in", 0) / rollouts,
    }
    part, share, sentence = bottleneck(metrics["time_s"], known)
    tip = next(tip for tip in TIPS if tip.part == part and tip.when(known))
    advice = tip.advice.format(flag="--" + tip.option.replace("_", "-"), value=known.get(tip.option))
    if tip.option in _PROCESSES and not _has_free_cores(known):
        advice += f" (on a machine with more cores: all {known['cores']} that this process may use are busy)"
    return Finding(part, share, sentence, tip.option, advice)


def between(before: ValuesByName, after: ValuesByName) -> MetricsDict:
    """Return the metrics that `explain` needs for the time between two calls of `Scheme.metrics()`."""
    counts = {name: after[name] - before[name] for name in ("updates", "rollouts", "bytes_in")}
    time_s = {level: {part: max(0.0, seconds - before["time_s"][level][part]) for part, seconds in parts.items()}
              for level, parts in after["time_s"].items()}
    return {**counts, "time_s": time_s}


def options_of(scheme: Scheme) -> dict[str, OptionValue]:
    """Return the options of a scheme and of its agent for `explain`: option name -> value."""
    algorithm, envs = scheme.agent.algo_factory.options, scheme.agent.train_envs_factory.options
    storage, actor = scheme.agent.storage_factory.options, scheme.agent.actor_factory.options
    return {
        **scheme.settings, **{field.name: getattr(algorithm, field.name) for field in dataclasses.fields(algorithm)},
        "recurrent_net": getattr(actor, "recurrent_net", None),
        "num_envs": envs.vec_env_size, "backend": getattr(envs, "backend", None),
        "num_steps": getattr(storage, "rollout_size", getattr(storage, "size", None)),
    }


def table(time_s: TimeS) -> str:
    """Return the time of a run as a table: the seconds and the share of each part of the work, level by level.

    Parts that took 0 s are omitted.
    """
    share = shares(time_s)
    elapsed = sum(time_s["update"].values())
    lines = ["level       workers  part            seconds   share"]
    for level, parts in time_s.items():
        first = f"{level:<12}{round(sum(parts.values()) / elapsed) if elapsed else 0:>7}"
        for part, seconds in parts.items():
            if seconds > 0:
                lines.append(f"{first:<19}  {part:<12}{seconds:>11.2f}{share[level][part]:>8.1%}")
                first = ""
    return "\n".join(lines)
