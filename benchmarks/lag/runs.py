"""One run of the lag study: train a decoder on a token task, or an agent on a control task, at a fixed policy lag.

The simulated runtime makes the lag exact and each run repeatable: a run is a function of its settings, and its result
contains a checksum of the final parameters.
"""

from __future__ import annotations

import time
import zlib
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from base import TASKS, CountingDecoder, actor_factory, path_of
from diagnostics import Diagnostics

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
from pytorchrl.agent.algorithms.corrections import CORRECTIONS, Bounds, Corrected, Steps, correction

GROUPS, GROUP, SCORED = 24, 8, 512
PUBLISHED = ("none", "ppo", "gspo", "cispo", "tis", "mis", "icepop", "ipo", "decoupled", "a3po", "m2po",
             "tis_sequence", "mis_sequence")


WAITING = {"num_col_workers": 1, "col_communication": ASYNC, "on_policy_lag": "wait", "runtime": "simulated",
           "costs": {"step": 1e-6, "grad": 1e-2}}
"""Settings with which the learner is the bottleneck, so that the lag of all data is its bound."""
TAIL_COSTS = {"step": 0.02, "grad": 0.1}
"""Simulated seconds of a token of all sequences, and of a gradient."""


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

    every: ClassVar[int] = 5
    """Distance, in train batches, of the updates whose diagnostics are written."""
    is_exact: ClassVar[bool] = False
    """Whether log-probabilities are compared with exact ones; see `Diagnostics`."""

    def scheme(self, folder: Path) -> Scheme:
        """Return the worker tree: one worker that generates, and a learner that uses its data `lag` batches later."""
        return self._scheme(folder, bool(self.mode), {}, WAITING)

    def _scheme(self, folder: Path, keeps_going: bool, storage: dict[str, Any], tree: dict[str, Any]) -> Scheme:
        task, kwargs = TASKS[self.task]
        envs = TokenEnv.create_factory(task, kwargs, GROUPS * GROUP, group_size=GROUP, waits=not keeps_going)
        return Scheme(
            GRPO.create_factory(correction=self.correction, num_epochs=self.epochs, lr=self.lr,
                                on_new_weights=self.mode or "finish"),
            actor_factory(self.task, str(path_of(self.task, folder))), GroupBuffer.create_factory(**storage), envs,
            seed=self.seed, queue_size=max(1, self.lag), max_policy_lag=self.lag * self.epochs, **tree)

    def run(self, folder: Path) -> dict[str, Any]:
        """Train, and return the results: the score of the final weights, the curve, and diagnostics."""
        start, scheme = time.process_time(), self.scheme(folder)
        CountingDecoder.num_recomputed = 0
        algorithm = scheme.start().local_worker.algo
        exact = GRPO.create_factory()(device="cpu", actor=actor_factory(self.task)(device="cpu", seed=0), seed=0)
        diagnostics = Diagnostics(algorithm, exact if self.is_exact else None)
        diagnostics.keep()
        while scheme.version < self.batches * self.epochs:
            scheme.step()
            diagnostics.keep()
        metrics = scheme.metrics()
        result = score(algorithm, self.task, self.seed)
        checksum = zlib.crc32(scheme.acting_state()["all"].numpy().tobytes())
        ledger, rows = scheme.stop(), diagnostics.rows
        return {
            **asdict(self), **result, "checksum": checksum,
            "lag_mean": {cause: round(lag["mean"], 3) for cause, lag in metrics["step_lag"].items()},
            "lag_max": metrics["step_lag"]["first_use"]["max"],
            "tokens": ledger["collected"], "trained": ledger["consumed_unique"],
            "recomputed": CountingDecoder.num_recomputed,
            "trained_per_s": round(metrics["unique_consumed_steps_per_s"], 1),
            "dropped": {reason: steps for reason, steps in ledger["dropped"].items() if steps},
            "prompts": dict(sorted(diagnostics.prompts.items())), "errors": diagnostics.errors(),
            "cpu_s": round(time.process_time() - start, 2),
            "updates": {name: [float(f"{row[name]:.3g}") for row in rows[::self.epochs * self.every]]
                        for name in rows[0]}}


@dataclass(frozen=True)
class CollapseRun(TokenRun):
    """Settings of a run whose learning rate may be too high for its lag."""

    every = 2


@correction("recomputed", "as trainers that lose mu compute it", needs_proximal=True, clip_param=0.2)
def recomputed(steps: Steps, bounds: Bounds) -> Corrected:
    """Clip pi / p around the proximal policy as PPO does, and take it for the behavior policy: no weight p / mu."""
    assert steps.proximal is not None
    return CORRECTIONS["ppo"].function(
        Steps.of(steps.logp, steps.proximal, steps.advantage, steps.valid), bounds)


@dataclass(frozen=True)
class ProximalRun(TokenRun):
    """Settings of a run with four passes over each train batch, whose weights are compared with exact ones."""

    epochs: int = 4
    is_exact = True


@dataclass(frozen=True)
class GenerationRun(TokenRun):
    """Settings of a run in which weights change within sequences."""

    task: str = "copy"
    is_exact = True


@dataclass(frozen=True)
class TailRun(TokenRun):
    """Settings of a run with lengths of a heavy tail, in which generation and learning take about equally long.

    Attributes:
        policy: What happens to sequences that take long: "wait" (all sequences of a rollout wait for the longest),
            "keep" (they go on, and leave when their group is complete), "oldest" (they go on, and groups leave in the
            order in which they started), "drop" (they go on, and groups that are too old are dropped), or "cancel".
    """

    task: str = "copy"
    policy: str = "wait"

    def scheme(self, folder: Path) -> Scheme:
        """Return the worker tree; see `TokenRun.scheme`."""
        storage = {"oldest": {"order": "started"}, "cancel": {"cancels_unfinished": True}}.get(self.policy, {})
        tree = {**WAITING, "costs": TAIL_COSTS, "on_policy_lag": "drop" if self.policy == "drop" else "wait"}
        return self._scheme(folder, self.policy != "wait", storage, tree)


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


def score(algorithm: GRPO, task: str, seed: int) -> dict[str, Any]:
    """Return the mean reward and the share of right answers of `SCORED` sampled answers, also by length of the prompt.

    The entry `by_length` has a pair for each length: the number of prompts, and that of right answers.
    """
    kind, kwargs = TASKS[task]
    envs = TokenEnv.create_factory(kind, kwargs, SCORED)(mode="test", seed=seed)
    obs, _ = envs.reset()
    rhs = {name: part.numpy() for name, part in algorithm.actor.initial_states(SCORED).items()}
    first, found, lengths = np.ones(SCORED, bool), dict[int, float](), np.ones(SCORED, int)
    while len(found) < SCORED:
        acting = algorithm.acting_step(obs, rhs, first)
        step = envs.step(acting.clipped_action)
        for episode in step.episodes:
            found.setdefault(episode.env_index, episode.env_return)
        lengths += ~step.valid & [row not in found for row in range(SCORED)]
        obs, rhs, first = step.obs, acting.rhs, step.first
    returns = np.array([found[row] for row in range(SCORED)])
    by_length = {int(length): [int((lengths == length).sum()), int((returns[lengths == length] > 1.0).sum())]
                 for length in np.unique(lengths)}
    return {"reward": round(float(returns.mean()), 4), "right": round(float((returns > 1.0).mean()), 4),
            "by_length": by_length}
