"""Measure a run: env steps and their rate, episodes, and the algorithm's statistics."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from pytorchrl.learner.reporting import EpisodeWindow, Means, RateWindow
from pytorchrl.learner.targets import Target
from pytorchrl.scheme import Evaluation, Scheme
from pytorchrl.support.untyped import MetricsDict, StateDict

_LAGS = ("mean", "max", "p50", "p90")


class Measurements:
    """The measurements of one run.

    Args:
        scheme: The scheme of the run.
        target: Condition for the end of the run.

    Attributes:
        env_steps: Env steps that have reached the learner: all collected steps except those in flight or queued.
            `count` updates this number.
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
            if "means" in resumed:  # checkpoints of version 0.1.0 lack the means
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

    def metrics(self, evaluation: Evaluation | None, checkpoint: Mapping[str, float] | None) -> MetricsDict:
        """Return all measurements so far; see `Learner.get_metrics`."""
        self.take_episodes()
        scheme = self.of_scheme()
        lag, updates = scheme.pop("policy_lag"), scheme.pop("updates")
        self.count()
        metrics: MetricsDict = {
            "env_steps": self.env_steps, "updates": updates, "seconds": self.seconds,
            "env_steps_per_s": self._rate.rate, "return_mean": self.return_mean,
            "return_episodes": len(self._episodes), "length_mean": self._episodes.length_mean,
            "policy_lag": lag, "ledger": self.ledger, "algorithm": self._means.peek(), "scheme": scheme,
        }
        if self.policy_return_means:
            metrics["policies"] = {
                policy: {"return_mean": mean} for policy, mean in self.policy_return_means.items()}
        if evaluation is not None:
            metrics["evaluation"] = evaluation.metrics()
        if checkpoint is not None:
            metrics["checkpoint"] = dict(checkpoint)
        return metrics

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
            "ledger": self.ledger, "seed": self._scheme.seed, "scheme": self._scheme.settings,
            "log_dir": None if log_dir is None else str(log_dir),
        }

    def status(self, evaluation: Evaluation | None) -> MetricsDict:
        """Return the figures that the progress line shows."""
        metrics = self._scheme.metrics()
        return {
            "env_steps": self.env_steps, "target_steps": self._target.env_steps, "env_steps_per_s": self._rate.rate,
            "return_mean": self.return_mean, "lag": metrics["policy_lag"]["mean"], "workers": metrics["workers"],
            "workers_missing": metrics["workers_missing"],
            "eval_return": None if evaluation is None else evaluation.return_mean,
            "policy_returns": self.policy_return_means,
        }
