"""One run of the lag study: train a decoder on a token task, or an agent on a control task, at a fixed policy lag.

The simulated runtime makes the lag exact and each run repeatable: a run is a function of its settings, and its result
contains a checksum of the final parameters.
"""

from __future__ import annotations

import time
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from base import TASKS, actor_factory

from pytorchrl import ASYNC, Scheme
from pytorchrl.agent.algorithms import GRPO
from pytorchrl.agent.env.tokens import TokenEnv
from pytorchrl.agent.storages import GroupBuffer

GROUPS, GROUP, EPOCHS, SCORED = 24, 8, 2, 512
CORRECTIONS = ("none", "ppo", "gspo", "cispo", "tis", "mis", "icepop", "ipo", "decoupled", "a3po", "m2po")


@dataclass(frozen=True)
class TokenRun:
    """Settings of a run on a token task.

    Attributes:
        correction: Name of the correction.
        lag: Number of train batches between the generation and the first use of all data.
        seed: Seed of the run.
        lr: Learning rate.
        batches: Number of train batches.
        task: Key of `TASKS`.
    """

    correction: str
    lag: int
    seed: int
    lr: float = 1e-3
    batches: int = 150
    task: str = "sort"

    def scheme(self, base: Path) -> Scheme:
        """Return the worker tree: one worker that generates, and a learner that uses its data `lag` batches later."""
        task, kwargs = TASKS[self.task]
        envs = TokenEnv.create_factory(task, kwargs, GROUPS * GROUP, group_size=GROUP)
        return Scheme(
            GRPO.create_factory(correction=self.correction, num_epochs=EPOCHS, lr=self.lr),
            actor_factory(self.task, str(base)), GroupBuffer.create_factory(GROUPS, group_size=GROUP), envs,
            seed=self.seed, num_col_workers=1, col_communication=ASYNC, queue_size=max(1, self.lag),
            max_policy_lag=self.lag * EPOCHS, on_policy_lag="wait", runtime="simulated",
            costs={"step": 1e-4, "grad": 1.0})


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


def run_tokens(settings: TokenRun, base: Path) -> dict[str, Any]:
    """Train, and return the results: the score of the final weights, the curve, and diagnostics."""
    start, scheme = time.process_time(), settings.scheme(base)
    algorithm = scheme.start().local_worker.algo
    diagnostics = Diagnostics(algorithm)
    while scheme.version < settings.batches * EPOCHS:
        scheme.step()
    metrics = scheme.metrics()
    reward, right = score(algorithm, settings.task, settings.seed)
    checksum = zlib.crc32(scheme.acting_state()["all"].numpy().tobytes())
    scheme.stop()
    rows, every = diagnostics.rows, max(1, len(diagnostics.rows) // 50)
    return {
        **asdict(settings), "reward": round(reward, 4), "right": round(right, 4), "checksum": checksum,
        "lag_mean": round(metrics["step_lag"]["first_use"]["mean"], 3), "cpu_s": round(time.process_time() - start, 2),
        "updates": {name: [round(row[name], 4) for row in rows[::every]] for name in rows[0]}}
