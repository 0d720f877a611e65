"""Measure a run, evaluate it while it trains, and decide when it is done and when records are due."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pytorchrl.agent.algorithms.base import Algorithm
from pytorchrl.agent.data import Evaluation
from pytorchrl.agent.fit import learned_kind
from pytorchrl.errors import StoppedError, WorkerLostError
from pytorchrl.learner.reporting import EpisodeWindow, Means, RateWindow, next_multiple
from pytorchrl.monitor.findings import RunFinding, dropped_share, find
from pytorchrl.support.terminal import get_logger
from pytorchrl.support.untyped import MetricsDict, StateDict

if TYPE_CHECKING:
    from pytorchrl.scheme import Scheme

logger = get_logger(__name__)

_EVALUATION_TIMEOUT_S = 600.0
_RECORDS_PER_RUN = 200
_LAGS = ("mean", "max", "p50", "p90")


class Measurements:
    """The measurements of one run.

    Args:
        scheme: The scheme of the run.
        target: Condition for the end of the run.

    Attributes:
        env_steps: Env steps that have reached the learner: all collected steps except those in flight or queued; with
            a data set, the number of updates. `count` updates this number.
        ledger: The scheme's ledger (counts of env steps), which `count` updates, too.
        ended_at: Time of the last update, by `time.perf_counter`.
    """

    def __init__(self, scheme: Scheme, target: Target) -> None:
        self._scheme, self._target = scheme, target
        self.env_steps = 0
        self.ledger: MetricsDict = {}
        self._has_started = False
        self._started_at = self.ended_at = 0.0
        self._means, self._rate, self._episodes = Means(), RateWindow(), EpisodeWindow()

    def start(self, now: float, resumed: StateDict | None) -> None:
        """Start measuring at `now`, or continue from the `state` of the run that is resumed."""
        self._has_started = True
        self._started_at = self.ended_at = now
        if resumed is not None:
            self.count()
            self._started_at -= resumed["seconds"]
            self._episodes.restore(resumed["episodes"])
            self._means.restore(resumed["means"])
        self._rate.add(now, self.env_steps)

    def state(self, now: float) -> StateDict:
        """Return plain values from which `start` can continue the measurements."""
        return {"env_steps": self.env_steps, "seconds": now - self._started_at, "episodes": self._episodes.state(),
                "means": self._means.state()}

    def count(self) -> None:
        """Update `ledger` and `env_steps` from the scheme."""
        self.ledger = self._scheme.ledger()
        self.env_steps = self.ledger["collected"] - self.ledger["in_flight"] - self.ledger["queued"]
        if self._scheme.learns_offline:
            self.env_steps = self._scheme.version
        self._target.count(self.ledger["collected"])

    def add(self, info: Mapping[str, float], now: float) -> None:
        """Add the algorithm's statistics that `Scheme.step` returned at the time `now`."""
        self._means.add(info)
        self.ended_at = now

    def add_rate(self, now: float) -> None:
        """Update the rate of env steps with the current count of env steps."""
        self._rate.add(now, self.env_steps)

    def take_episodes(self) -> None:
        """Fetch from the scheme the training episodes that have ended since the last call."""
        self._episodes.extend(self._scheme.episodes())

    @property
    def seconds(self) -> float:
        """The seconds of training up to the last update, excluding start-up."""
        return self.ended_at - self._started_at

    @property
    def return_mean(self) -> float | None:
        """The mean raw return of the last 100 training episodes; None before an episode has ended."""
        return self._episodes.return_mean

    @property
    def policy_return_means(self) -> dict[str, float]:
        """The mean raw return of each policy over its last 100 training episodes; empty if there is only one policy."""
        return self._episodes.policy_return_means

    def of_scheme(self) -> MetricsDict:
        """Return the scheme's metrics, or zeros before the start, because `Scheme.metrics` would start the scheme."""
        if not self._has_started:
            return {"policy_lag": dict.fromkeys(_LAGS, 0), "updates": 0}
        return dict(self._scheme.metrics())

    def metrics(
        self, evaluation: Evaluation | None, checkpoint: Mapping[str, float] | None, *, counts: bool = True,
    ) -> MetricsDict:
        """Return all measurements so far; see `Learner.get_metrics`.

        Args:
            evaluation: The last evaluation.
            checkpoint: The figures of the last checkpoint.
            counts: Whether to count env steps and take episodes first. If the workers have stopped, a new count would
                contain steps that were dropped because of that.
        """
        if counts:
            self.take_episodes()
        scheme = self.of_scheme()
        lag, updates = scheme.pop("policy_lag"), scheme.pop("updates")
        if counts:
            self.count()
        metrics: MetricsDict = {
            "env_steps": self.env_steps, "updates": updates, "seconds": self.seconds,
            "env_steps_per_s": self._rate.rate, "return_mean": self.return_mean,
            "return_episodes": len(self._episodes), "length_mean": self._episodes.length_mean,
            "return_range": self._episodes.return_range,
            "policy_lag": lag, "ledger": self.ledger, "algorithm": self._means.peek(), "scheme": scheme,
        }
        if (batch_lag := self._batch_lag(lag["mean"])) is not None:
            metrics["batch_lag"] = batch_lag
        if self.policy_return_means:
            metrics["policies"] = {
                policy: {"return_mean": mean} for policy, mean in self.policy_return_means.items()}
        if evaluation is not None:
            metrics["evaluation"] = evaluation.metrics()
        if checkpoint is not None:
            metrics["checkpoint"] = dict(checkpoint)
        return metrics

    def _batch_lag(self, lag: float) -> dict[str, float | None] | None:
        """Return the mean policy lag in train batches, and the largest one that the algorithm tolerates.

        None: the lag cannot be expressed in train batches, see `Scheme.updates_per_train_batch`.
        """
        updates = self._scheme.updates_per_train_batch if self._has_started else None
        return None if updates is None else {
            "mean": lag / updates, "tolerated": learned_kind(self._scheme.agent.algo_factory).tolerated_lag}

    def findings(self, *, has_ended: bool, metrics: Mapping[str, object] | None = None) -> list[RunFinding]:
        """Return what goes wrong in the run, from `metrics`; None: from the present metrics and the last count."""
        if not self._has_started:
            return []
        return find(metrics or self.metrics(None, None, counts=False), self._target.env_steps, has_ended=has_ended)

    def record(self, evaluation: Evaluation | None, checkpoint: Mapping[str, float] | None) -> MetricsDict:
        """Return the metrics to be written as a record, and reset the means of the algorithm's statistics."""
        self._rate.add(time.perf_counter(), self.env_steps)
        return {**self.metrics(evaluation, checkpoint), "algorithm": self._means.take()}

    def summary(self, log_dir: Path | None) -> MetricsDict:
        """Return a summary of the whole run. For current values of `env_steps` and `ledger`, call `count` first."""
        self.take_episodes()
        lag = self.of_scheme()["policy_lag"]
        return {
            "env_steps": self.env_steps, "seconds": self.seconds,
            "env_steps_per_s": self.env_steps / self.seconds if self.seconds > 0 else 0.0,
            "updates": self._scheme.version, "return_mean": self.return_mean, "return_episodes": len(self._episodes),
            **({"policy_return_means": self.policy_return_means} if self.policy_return_means else {}),
            "policy_lag": {name: lag[name] for name in _LAGS},
            "findings": [finding.sentence for finding in self.findings(has_ended=True)],
            "ledger": self.ledger, "seed": self._scheme.seed, "scheme": self._scheme.settings,
            "log_dir": None if log_dir is None else str(log_dir),
        }

    def status(self, evaluation: Evaluation | None, *, has_ended: bool = False) -> MetricsDict:
        """Return the figures that the progress line shows; see `findings` for `has_ended`."""
        metrics = self.metrics(None, None, counts=False)
        scheme = metrics["scheme"]
        return {
            "env_steps": self.env_steps, "target_steps": self._target.env_steps, "env_steps_per_s": self._rate.rate,
            "return_mean": self.return_mean, "lag": metrics["policy_lag"]["mean"],
            "batch_lag": metrics["batch_lag"]["mean"] if "batch_lag" in metrics else None,
            "dropped_share": dropped_share(metrics), "workers": scheme["workers"],
            "workers_missing": scheme["workers_missing"], "envs_restarted": scheme["envs_restarted"],
            "eval_return": None if evaluation is None else evaluation.return_mean,
            "policy_returns": self.policy_return_means,
            "findings": self.findings(has_ended=has_ended, metrics=metrics),
        }


def unit_of_steps(settings: Mapping[str, object]) -> str:
    """Return what `env_steps` of a run with these settings counts: "env steps" or, with a data set, "updates"."""
    return "env steps" if settings.get("dataset") is None else "updates"


class Target:
    """Condition for the end of a run: `env_steps` env steps have reached the learner.

    If collection and learning take turns, the run also completes all passes over the last rollout before it ends.

    Args:
        scheme: The scheme of the run.
        env_steps: The number of env steps.
    """

    def __init__(self, scheme: Scheme, env_steps: int) -> None:
        self.env_steps = env_steps
        settings = scheme.settings
        self.takes_turns: bool = not scheme.learns_offline and (
            settings["col_communication"] == settings["grad_communication"] == "synchronous")
        self._passes = _passes_of(scheme)
        self._last_collected: float = float("inf")

    def count(self, collected: int) -> None:
        """Record the number of env steps collected so far.

        The run must learn from all rollouts up to the one that reaches the target. If collection and learning take
        turns, the next rollout begins only after that. So the run is done once more steps are collected than there were
        when the target was reached, and this number of steps is stored.
        """
        if collected >= self.env_steps:
            self._last_collected = min(self._last_collected, collected)

    def is_reached(self, env_steps: int, ledger: MetricsDict, num_skipped: float) -> bool:
        """Return whether the run is done.

        Args:
            env_steps: Env steps that have reached the learner.
            ledger: The scheme's counts of env steps, from which `env_steps` was computed.
            num_skipped: Number of samples whose update was skipped (NaN or infinity). Such samples count as consumed.
        """
        if env_steps < self.env_steps:
            return False
        if not self.takes_turns or self.env_steps == 0:
            return True
        passed, steps = ledger["consumed"] + num_skipped, ledger["consumed_unique"] + ledger["dropped"]["nan"]
        is_used_up = ledger["collected"] == env_steps and passed >= self._passes * steps
        return is_used_up or ledger["collected"] > self._last_collected


def _passes_of(scheme: Scheme) -> int:
    """Return the minimum number of passes over a rollout: `num_epochs`; 1 if `target_kl` may stop passes early."""
    options = scheme.agent.algo_factory.options
    if getattr(options, "target_kl", None) is not None:
        return 1
    return getattr(options, "num_epochs", Algorithm.num_epochs)


class Due:
    """The env steps at which the next events (record, evaluation and checkpoint) are due.

    Args:
        target_steps: Env steps of the run.
        log_every: Env steps between two records; None: 200 records per run.
        eval_every: Env steps between two evaluations; None: never.
        checkpoint_every: Env steps between two checkpoints; None: never.
        log_every_s: Longest time between two records in seconds; None: no limit.
        now: Function that returns the time in seconds.
    """

    def __init__(
        self, target_steps: int, log_every: int | None, eval_every: int | None, checkpoint_every: int | None,
        log_every_s: float | None = None, now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log_every_s, self._now = log_every_s or math.inf, now
        self._recorded_at = now()
        self._target_steps, self._eval_every, self._checkpoint_every = target_steps, eval_every, checkpoint_every
        self._record_every = log_every or max(1, target_steps // _RECORDS_PER_RUN)
        self.recorded_steps = 0
        """Env steps at the last record."""
        self.record = float(self._record_every)
        self.evaluation = next_multiple(eval_every, 0)
        self.checkpoint = next_multiple(checkpoint_every, 0)
        self.first = 0.0
        """The smallest number of env steps at which anything is due."""
        self._plan()

    def resume(self, env_steps: int, recorded_steps: int) -> None:
        """Plan the next events of a run that resumes at `env_steps` and whose last record is at `recorded_steps`."""
        self.evaluation = next_multiple(self._eval_every, env_steps)
        self.checkpoint = next_multiple(self._checkpoint_every, env_steps)
        self.after_record(recorded_steps)

    def is_record(self, env_steps: int) -> bool:
        """Return whether a record is due: enough env steps or seconds have passed since the last record."""
        return env_steps >= self.record or (
            env_steps > self.recorded_steps and self._now() - self._recorded_at >= self._log_every_s)

    def after_record(self, env_steps: int) -> None:
        """Plan the next record after a record at `env_steps`."""
        self._recorded_at = self._now()
        self.recorded_steps = env_steps
        self.record = env_steps + float(self._record_every)
        self._plan()

    def after_evaluation(self, env_steps: int) -> None:
        """Plan the next evaluation after an evaluation that was started or skipped at `env_steps`."""
        self.evaluation = next_multiple(self._eval_every, env_steps)
        self._plan()

    def after_checkpoint(self, env_steps: int) -> None:
        """Plan the next checkpoint after a checkpoint at `env_steps`."""
        self.checkpoint = next_multiple(self._checkpoint_every, env_steps)
        self._plan()

    def _plan(self) -> None:
        self.first = min(self.record, self.evaluation, self.checkpoint, self._target_steps)


class EvaluationTimer:
    """Evaluations of one scheme, at most one at a time. A failed evaluation is logged, and training continues.

    Args:
        scheme: The scheme.
        timeout_s: Time limit of an evaluation in seconds. None: `wait` and `play` wait at most ten minutes, and there
            is no other limit.

    Attributes:
        last: The newest result; None before the first evaluation has finished.
    """

    def __init__(self, scheme: Scheme, timeout_s: float | None = None) -> None:
        self._scheme, self._timeout_s = scheme, timeout_s
        self._is_running = False
        self.last: Evaluation | None = None

    @property
    def is_running(self) -> bool:
        """Whether an evaluation was started, and its end has not yet been noticed by `poll` or `wait`."""
        return self._is_running

    def start(self, num_episodes: int) -> None:
        """Start an evaluation that runs while training continues."""
        self._scheme.start_evaluation(num_episodes, self._timeout_s)
        self._is_running = True

    def poll(self) -> bool:
        """Return whether the running evaluation has finished since the last call; if so, its result is in `last`."""
        return self._finish(self._scheme.poll_evaluation)

    def wait(self) -> bool:
        """Wait for the running evaluation, if there is one; return whether there is a new result in `last`."""
        return self._finish(lambda: self._scheme.wait_evaluation(self._timeout_s or _EVALUATION_TIMEOUT_S))

    def play(self, num_episodes: int) -> Evaluation:
        """Evaluate, wait for the result and return it, without changing `last`.

        Raises:
            StoppedError: The scheme was stopped during the evaluation.
        """
        self._scheme.start_evaluation(num_episodes, self._timeout_s)
        evaluation = self._scheme.wait_evaluation(self._timeout_s or _EVALUATION_TIMEOUT_S)
        if evaluation is None:
            raise StoppedError("the scheme was stopped during an evaluation")
        return evaluation

    def keep(self, evaluation: Evaluation) -> None:
        """Store a result in `last`."""
        self._is_running, self.last = False, evaluation

    def _finish(self, find: Callable[[], Evaluation | None]) -> bool:
        evaluation = None
        try:
            evaluation = find() if self._is_running else None
        except Exception as error:
            if isinstance(error, WorkerLostError) and self._scheme.settings["on_worker_failure"] == "raise":
                raise
            self._is_running = False
            logger.warning("an evaluation failed, so there is no result: %s", error)
        if evaluation is None:
            return False
        self.keep(evaluation)
        return True
