"""Implement `pytorchrl profile ALGORITHM --env ID ...`: find the bottleneck of a run."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from pytorchrl.cli.output import show
from pytorchrl.cli.parsing import Parser, positive_seconds
from pytorchrl.cli.train import learner_of, parse, refusing_broken_envs
from pytorchrl.errors import ConfigError
from pytorchrl.learner.learner import Learner
from pytorchrl.learner.reporting import to_json
from pytorchrl.monitor.time_shares import ValuesByName, shares
from pytorchrl.profile import profiling, work_shares
from pytorchrl.support.untyped import MetricsDict

_SECONDS = 20.0
# The warm-up of workers, compilers and caches lasts for the fraction `_WARM_UP` of `--seconds`, and for at least
# `_WARM_UP_UPDATES` updates.
_WARM_UP, _WARM_UP_UPDATES = 0.25, 2


def run(arguments: Sequence[str]) -> int:
    """Train for a few seconds, show where the time went, and return the exit code.

    Raises:
        ConfigError: The configuration contains a sweep, or an option is not valid.
    """
    given = parse("profile", "Profile", arguments, _add_flags)
    seconds = vars(given).pop("seconds")
    if given.sweep is not None:
        raise ConfigError("profile measures a single run, but the configuration contains a sweep; remove [sweep]")
    vars(given).setdefault("progress", False)
    learner = learner_of(given)
    with refusing_broken_envs(learner), learner:
        measured = _measure(learner, seconds)
    _show(measured, learner, as_json=given.json)
    return 0


def _add_flags(parser: Parser) -> None:
    parser.add_argument("--seconds", type=positive_seconds, default=_SECONDS, metavar="NUMBER",
                        help=f"seconds to measure, after a warm-up of a quarter of that time [{_SECONDS:g}]")


def _measure(learner: Learner, seconds: float) -> MetricsDict:
    """Train for `seconds` seconds after the warm-up, even beyond `target_steps`, and return the metrics."""
    learner.start()
    scheme, warm = learner.scheme, time.perf_counter() + _WARM_UP * seconds
    while time.perf_counter() < warm or scheme.version < _WARM_UP_UPDATES:
        learner.step()
    sampler = work_shares.WorkSampler()
    # The work of other processes cannot be sampled, and the work of the simulated runtime takes virtual time.
    is_sampled = scheme.runtime is not None and scheme.runtime.name == "threads" and sampler.is_supported()
    before, start = scheme.metrics() | {"env_steps": scheme.env_steps}, time.perf_counter()
    with sampler if is_sampled else contextlib.nullcontext():
        while time.perf_counter() < start + seconds or scheme.version == before["updates"]:
            learner.step()
    after = scheme.metrics() | {"env_steps": scheme.env_steps}
    elapsed = time.perf_counter() - start
    steps = after["env_steps"] - before["env_steps"]
    return {**profiling.between(before, after), "seconds": elapsed, "env_steps": steps,
            "env_steps_per_s": steps / elapsed, "work_shares": sampler.shares()}


def _show(measured: ValuesByName, learner: Learner, *, as_json: bool) -> None:
    """Print a table and the bottleneck, or one line of JSON with `--json`."""
    finding = profiling.explain(measured, profiling.options_of(learner.scheme))
    if as_json:
        names = ("seconds", "env_steps", "env_steps_per_s", "updates", "time_s", "work_shares")
        show(to_json({
            **{name: measured[name] for name in names}, "shares": shares(measured["time_s"]),
            "bottleneck": finding.part, "share": finding.share, "sentence": finding.sentence, "option": finding.option,
            "advice": finding.advice, "seed": learner.scheme.seed, "scheme": learner.scheme.settings}))
        return
    tables = [profiling.table(measured["time_s"])]
    if measured["work_shares"]:
        tables.append(work_shares.table(measured["work_shares"]))
    show(f"{measured['env_steps']:,} env steps, {measured['updates']:,} updates in {measured['seconds']:.1f} s "
         f"({measured['env_steps_per_s']:,.0f} steps/s)", "", *"\n\n".join(tables).split("\n"), "",
         f"Bottleneck: {finding.sentence}.", f"Try: {finding.advice}.")
