"""One run of the lag study: train a decoder on a token task, or an agent on a control task, at a fixed policy lag.

The simulated runtime makes the lag exact and each run repeatable: a run is a function of its settings, and its result
contains a checksum of the final parameters.
"""

from __future__ import annotations

import time
import zlib
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from base import TASKS, actor_factory, path_of

from pytorchrl import (
    APPO,
    ASYNC,
    GRPO,
    PPO,
    GAEBuffer,
    GroupBuffer,
    OnPolicyActor,
    Scheme,
    TokenEnv,
    VecEnv,
    VTraceBuffer,
)

GROUPS, GROUP, SCORED = 24, 8, 512
CORRECTIONS = ("none", "ppo", "gspo", "cispo", "tis", "mis", "icepop", "ipo", "decoupled", "a3po", "m2po")


WAITING = {"num_col_workers": 1, "col_communication": ASYNC, "on_policy_lag": "wait", "runtime": "simulated",
           "costs": {"step": 1e-4, "grad": 1.0}}
"""Settings with which the learner is the bottleneck, so that the lag of all data is its bound."""


@dataclass(frozen=True)
class Settings:
    """Settings of a run; a subclass adds its own, and `run`.

    Attributes:
        correction: Name of the correction.
        lag: Number of train batches between the collection and the first use of all data.
        seed: Seed of the run.
    """

    correction: str
    lag: int
    seed: int
    task: str = ""

    @property
    def id(self) -> str:
        """The settings that differ from their defaults, as a name."""
        changed = [f"{field.name}={getattr(self, field.name):g}" if isinstance(getattr(self, field.name), float)
                   else f"{field.name}={getattr(self, field.name)}" for field in fields(self)
                   if field.name not in ("correction", "lag", "seed") and getattr(self, field.name) != field.default]
        return "/".join([type(self).__name__, self.correction, f"lag={self.lag}", *changed, f"seed={self.seed}"])

    def run(self, folder: Path) -> dict[str, Any]:
        """Train, and return the results; `folder` contains the base decoders."""
        raise NotImplementedError


@dataclass(frozen=True)
class TokenRun(Settings):
    """Settings of a run on a token task.

    Attributes:
        lr: Learning rate.
        batches: Number of train batches.
        task: Key of `TASKS`.
        epochs: Updates from each train batch.
        mode: Value of `on_new_weights`, with sequences that do not wait; "" lets them wait.
    """

    lr: float = 1e-3
    batches: int = 100
    task: str = "sort"
    epochs: int = 2
    mode: str = ""

    def scheme(self, folder: Path) -> Scheme:
        """Return the worker tree: one worker that generates, and a learner that uses its data `lag` batches later."""
        task, kwargs = TASKS[self.task]
        envs = TokenEnv.create_factory(task, kwargs, GROUPS * GROUP, group_size=GROUP, waits=not self.mode)
        return Scheme(
            GRPO.create_factory(correction=self.correction, num_epochs=self.epochs, lr=self.lr,
                                on_new_weights=self.mode or "finish"),
            actor_factory(self.task, str(path_of(self.task, folder))), GroupBuffer.create_factory(), envs,
            seed=self.seed, queue_size=max(1, self.lag), max_policy_lag=self.lag * self.epochs, **WAITING)

    def run(self, folder: Path) -> dict[str, Any]:
        """Train, and return the results: the score of the final weights, the curve, and diagnostics."""
        start, scheme = time.process_time(), self.scheme(folder)
        algorithm = scheme.start().local_worker.algo
        diagnostics = Diagnostics(algorithm)
        while scheme.version < self.batches * self.epochs:
            scheme.step()
        metrics = scheme.metrics()
        reward, right = score(algorithm, self.task, self.seed)
        checksum = zlib.crc32(scheme.acting_state()["all"].numpy().tobytes())
        ledger, rows = scheme.stop(), diagnostics.rows
        return {
            **asdict(self), "reward": round(reward, 4), "right": round(right, 4), "checksum": checksum,
            "lag_mean": {cause: round(lag["mean"], 3) for cause, lag in metrics["step_lag"].items()},
            "tokens": ledger["collected"], "dropped": sum(ledger["dropped"].values()),
            "cpu_s": round(time.process_time() - start, 2),
            "updates": {name: [float(f"{row[name]:.3g}") for row in rows[::self.epochs]] for name in rows[0]}}


@dataclass(frozen=True)
class ControlRun(Settings):
    """Settings of a run on CartPole; the correction "vtrace" is APPO's, with the loss of PPO.

    Attributes:
        steps: Number of env steps.
    """

    steps: int = 40_000

    def run(self, folder: Path) -> dict[str, Any]:
        """Train, and return the results: the mean return of the last 100 training episodes."""
        start, updates = time.process_time(), 8
        is_vtrace = self.correction == "vtrace"
        envs = VecEnv.create_factory("CartPole-v1", vec_env_size=8)
        options = {"gamma": 0.98, "entropy_coef": 0.0, "lr": 1e-3, "num_epochs": 4, "num_mini_batch": 2,
                   "correction": "ppo" if is_vtrace else self.correction}
        algorithm = (APPO if is_vtrace else PPO).create_factory(**options)
        storage = VTraceBuffer.create_factory(32) if is_vtrace else GAEBuffer.create_factory(32, gae_lambda=0.9)
        actor = OnPolicyActor.create_factory(envs.observation_space, envs.action_space)
        scheme = Scheme(algorithm, actor, storage, envs, seed=self.seed, queue_size=max(1, self.lag),
                        max_policy_lag=self.lag * updates, **WAITING)
        returns: list[float] = []
        while len(returns) < 1 or scheme.ledger()["collected"] < self.steps:
            scheme.step()
            returns += [episode.env_return for episode in scheme.update_worker.statistics.take_episodes()]
        metrics = scheme.metrics()
        checksum = zlib.crc32(scheme.acting_state()["all"].numpy().tobytes())
        scheme.stop()
        score_ = float(np.mean(returns[-100:]))
        return {**asdict(self), "right": round(score_, 2), "checksum": checksum,
                "lag_mean": {cause: round(lag["mean"], 3) for cause, lag in metrics["step_lag"].items()},
                "cpu_s": round(time.process_time() - start, 2)}


class Diagnostics:
    """Numbers of each update that might warn of a collapse."""

    def __init__(self, algorithm: GRPO) -> None:
        self.rows: list[dict[str, float]] = []
        self._algorithm, self._compute = algorithm, algorithm.compute_gradients
        self._last: torch.Tensor | None = None
        algorithm.compute_gradients = self._recording  # type: ignore[method-assign]

    def _recording(self, batch: Any) -> Any:
        gradients, info = self._compute(batch)
        gradient, = gradients
        cosine = 0.0 if self._last is None else float(torch.cosine_similarity(gradient, self._last, 0))
        self._last = gradient.clone()
        self.rows.append({
            "return": float(batch.ret[0].mean()), "kl": info["kl"], "entropy": info["entropy"],
            "clipped": info["clip_fraction"], "cosine": cosine, "ess": info["effective_sample_size"]})
        return gradients, info


def score(algorithm: GRPO, task: str, seed: int) -> tuple[float, float]:
    """Return the mean reward, and the share of right answers, of `SCORED` sampled answers."""
    kind, kwargs = TASKS[task]
    envs = TokenEnv.create_factory(kind, kwargs, SCORED)(mode="test", seed=seed)
    obs, _ = envs.reset()
    rhs = {name: part.numpy() for name, part in algorithm.actor.initial_states(SCORED).items()}
    first, found = np.ones(SCORED, bool), dict[int, float]()
    while len(found) < SCORED:
        acting = algorithm.acting_step(obs, rhs, first)
        step = envs.step(acting.clipped_action)
        for episode in step.episodes:
            found.setdefault(episode.env_index, episode.env_return)
        obs, rhs, first = step.obs, acting.rhs, step.first
    returns = np.array(list(found.values()))
    return float(returns.mean()), float((returns > 1.0).mean())
