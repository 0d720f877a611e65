"""Evaluation on a separate worker, in parallel with training."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from pytorchrl.agent.actors.base import Actor
from pytorchrl.agent.algorithms.base import Algorithm
from pytorchrl.agent.data import PREVIOUS, map_tensors, show_reward
from pytorchrl.agent.env import VecEnv
from pytorchrl.agent.env.common import reward_function
from pytorchrl.agent.options import Factory
from pytorchrl.agent.seeding import Stream, derive_seed
from pytorchrl.scheme.base.worker import Worker
from pytorchrl.scheme.transport.messages import Weights
from pytorchrl.support.tracebacks import stack_of
from pytorchrl.support.untyped import MetricsDict


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation: raw returns and lengths of the requested number of episodes."""

    version: int
    """Version of the weights: the number of updates that produced them."""
    returns: tuple[float, ...]
    lengths: tuple[int, ...]
    policy_returns: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """With several agents: policy -> mean return of its agents, for each episode in which the policy acted."""

    @property
    def return_mean(self) -> float:
        """Mean return."""
        return float(np.mean(self.returns))

    @property
    def return_std(self) -> float:
        """Standard deviation of the returns."""
        return float(np.std(self.returns))

    def metrics(self) -> MetricsDict:
        """Return the evaluation's entries in the learner's metrics."""
        policies = {policy: {"return_mean": float(np.mean(values))} for policy, values in self.policy_returns.items()}
        return {**({"policies": policies} if policies else {}), "version": self.version, "episodes": len(self.returns),
                "return_mean": self.return_mean, "return_std": self.return_std,
                "length_mean": float(np.mean(self.lengths))}


# Number of env steps after which every schedule has reached its final value.
_AFTER_TRAINING = 2**62


class Evaluator(Worker):
    """Worker that plays episodes with given weights and frozen normalizers.

    Args:
        index_worker: Index of the evaluator; an experiment has only one evaluator.
        algo_factory, actor_factory: Factories of the algorithm and the actor.
        test_envs_factory: Factory of the environments.
        seed: Seed of the experiment, from which the seeds of evaluations derive.
        num_threads: Number of torch threads of the worker's process; None leaves the number unchanged.
        device: Device of the actor.
    """

    def __init__(self, index_worker: int, *, algo_factory: Factory[Algorithm], actor_factory: Factory[Actor],
                 test_envs_factory: Factory[VecEnv], seed: int, num_threads: int | None = None,
                 device: str = "cpu") -> None:
        super().__init__(index_worker)
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self._actor = actor_factory(device=device, seed=0)
        self._algo = algo_factory(device=device, actor=self._actor, seed=derive_seed(seed, Stream.EVALUATION, 0))
        self._algo.follow_schedules(_AFTER_TRAINING, 1)  # use the final value of annealed exploration
        self._factory, self._seed, self._threads = test_envs_factory, seed, num_threads or 1
        self._rounds = 0
        self._interrupted = False
        self._thread: threading.Thread | None = None

    def interrupt(self) -> None:
        """Make the running evaluation and every later evaluation end at its next environment step.

        This method may be called while `evaluate` runs.
        """
        self._interrupted = True

    def stack(self) -> str:
        """Return the current call stack of the thread that runs `evaluate`; "" before the first call of `evaluate`."""
        return "" if self._thread is None else stack_of(self._thread)

    def evaluate(self, weights: Weights, num_episodes: int, deterministic: bool = True) -> Evaluation | None:
        """Play `num_episodes` episodes in new environments; return None if interrupted.

        The number of episodes of each environment is fixed in advance. If the first episodes to finish were used
        instead, short episodes would be overrepresented.
        """
        self._thread = threading.current_thread()
        self._algo.load_acting_state(weights.state)
        self._rounds += 1
        envs = self._factory(
            index_grad_worker=0, index_col_worker=0, mode="test", num_threads=self._threads,
            seed=derive_seed(self._seed, Stream.EVALUATION, self._rounds))
        try:
            return self._play(envs, weights.version, num_episodes, deterministic)
        finally:
            envs.close()

    def _play(self, envs: VecEnv, version: int, num_episodes: int, deterministic: bool) -> Evaluation | None:
        num_envs = envs.num_envs
        remaining = np.full(num_envs, num_episodes // num_envs)
        remaining[:num_episodes % num_envs] += 1
        returns: list[float] = []
        lengths: list[int] = []
        policy_returns: dict[str, list[float]] = {}
        obs, mask = envs.reset()
        done = np.ones(num_envs, dtype=bool)
        rhs: Any  # the actor's memory as nested arrays
        rhs = map_tensors(self._actor.initial_states(num_envs), lambda state: state.cpu().numpy())
        with torch.inference_mode():
            while remaining.sum() > 0:
                if self._interrupted:
                    return None
                acting = self._algo.acting_step(obs, rhs, done, deterministic=deterministic, mask=mask)
                rhs = acting.rhs
                step = envs.step(acting.clipped_action)
                obs, mask, done = step.obs, step.mask, step.first
                if PREVIOUS in rhs:  # the memory receives rewards that are transformed as in training
                    transform = reward_function(self._factory.options.reward_transform)
                    show_reward(rhs, step.reward if transform is None else transform(step.reward))
                for episode in step.episodes:
                    if remaining[episode.env_index] > 0:
                        remaining[episode.env_index] -= 1
                        returns.append(episode.env_return)
                        lengths.append(episode.length)
                        for policy, value in (episode.policy_returns or {}).items():
                            policy_returns.setdefault(policy, []).append(value)
        return Evaluation(version, tuple(returns), tuple(lengths),
                          {p: tuple(values) for p, values in policy_returns.items()})
