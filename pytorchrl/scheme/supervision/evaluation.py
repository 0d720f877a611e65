"""Run evaluations in parallel with training, one at a time, on a separate worker."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Mapping
from typing import NoReturn

import numpy as np
import torch

from pytorchrl.agent.data import PREVIOUS, Evaluation, map_tensors, show_reward
from pytorchrl.agent.env import EnvFactory, VecEnv, check_finite
from pytorchrl.agent.env.common import reward_function
from pytorchrl.agent.factories import ActorFactory, AlgorithmFactory
from pytorchrl.agent.multi.env import MultiAgentEnvFactory
from pytorchrl.agent.seeding import Stream, derive_seed
from pytorchrl.errors import EnvError, NonFiniteDataError, WorkerDiedError, WorkerLostError
from pytorchrl.runtime import Future, Handle, Runtime
from pytorchrl.scheme.base.worker import Worker
from pytorchrl.scheme.transport.messages import Weights
from pytorchrl.support.terminal import get_logger
from pytorchrl.support.tracebacks import stack_of
from pytorchrl.support.untyped import DataOfAgent

# Number of env steps after which every schedule has reached its final value.
_AFTER_TRAINING = 2**62
_MAX_RETRIES = 2
# Without `max_episode_steps`, an episode of an evaluation that takes this number of steps causes a warning or an error.
_LONG_STEPS, _MOST_STEPS = 50_000, 1_000_000
_WHERE = "evaluation"  # for messages about wrong data
# Seconds to wait for the call stack of a worker that hangs, and again for the worker to end.
_STACK_TIMEOUT_S = 1.0

logger = get_logger(__name__)


class KeptEnvs:
    """Environments that are used by one evaluation after the other.

    They are built again only if the next evaluation needs another number of environments.

    Args:
        factory: Factory of the environments.
    """

    def __init__(self, factory: EnvFactory) -> None:
        self.factory = factory
        self._envs: VecEnv | None = None

    def take(self, num_envs: int, seed: int, num_threads: int) -> VecEnv:
        """Return `num_envs` environments whose next episodes begin like those of new environments with this seed.

        The caller gives them back with `keep`, or closes them. There are more environments if they determine their
        number themselves.
        """
        if self.factory.has_own_size:
            num_envs = self.factory.num_envs
        kept, self._envs = self._envs, None
        if kept is not None and kept.num_envs == num_envs:
            kept.reseed(seed)
            return kept
        if kept is not None:
            kept.close()
        return self.factory.with_options(vec_env_size=num_envs)(
            index_grad_worker=0, index_col_worker=0, mode="test", num_threads=num_threads, seed=seed)

    def keep(self, envs: VecEnv) -> None:
        """Keep environments for the next evaluation."""
        self._envs = envs

    def close(self) -> None:
        """Close the environments; the next evaluation builds new ones."""
        if self._envs is not None:
            self._envs.close()
            self._envs = None


class Evaluator(Worker):
    """Worker that plays episodes with given weights and frozen normalizers.

    Args:
        index_worker: Index of the evaluator; an experiment has only one evaluator.
        algo_factory, actor_factory: Factories of the algorithm and the actor.
        test_envs_factory: Factory of the environments; it states how many of them an evaluation uses at most.
        seed: Seed of the experiment, from which the seeds of evaluations derive.
        num_threads: Number of torch threads of the worker's process; None leaves the number unchanged.
        device: Device of the actor.
        kept: Environments that are kept for later evaluators; None: this evaluator closes them after each evaluation.
    """

    def __init__(self, index_worker: int, *, algo_factory: AlgorithmFactory, actor_factory: ActorFactory,
                 test_envs_factory: EnvFactory, seed: int, num_threads: int | None = None,
                 device: str = "cpu", kept: KeptEnvs | None = None) -> None:
        super().__init__(index_worker)
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self._actor = actor_factory(device=device, seed=0)
        self._algo = algo_factory(device=device, actor=self._actor, seed=derive_seed(seed, Stream.EVALUATION, 0))
        self._algo.follow_schedules(_AFTER_TRAINING, 1)  # use the final value of annealed exploration
        self._factory, self._seed, self._threads = test_envs_factory, seed, num_threads or 1
        self._kept = kept
        self._rounds = 0
        self._interrupted = False
        self._thread: threading.Thread | None = None

    def interrupt(self) -> None:
        """Make the running evaluation and every later evaluation end at its next env step.

        This method may be called while `evaluate` runs.
        """
        self._interrupted = True

    def stack(self) -> str:
        """Return the current call stack of the thread that runs `evaluate`; "" before the first call of `evaluate`."""
        return "" if self._thread is None else stack_of(self._thread)

    def evaluate(self, weights: Weights, num_episodes: int, deterministic: bool = True) -> Evaluation | None:
        """Play `num_episodes` episodes, in at most as many environments; return None if interrupted.

        The number of episodes of each environment is fixed in advance. If the first episodes to finish were used
        instead, short episodes would be overrepresented.

        Raises:
            EnvError: An environment raised an exception, or no episode has ended for a million steps.
            NonFiniteDataError: An observation or the return of an episode is NaN or infinite.
        """
        self._thread = threading.current_thread()
        self._algo.load_acting_state(weights.state)
        self._rounds += 1
        kept = self._kept or KeptEnvs(self._factory)
        envs = kept.take(min(num_episodes, self._factory.num_envs),
                         derive_seed(self._seed, Stream.EVALUATION, self._rounds), self._threads)
        try:
            evaluation = self._play(envs, weights.version, num_episodes, deterministic)
        except BaseException:
            envs.close()
            raise
        if self._kept is None:
            envs.close()
        else:
            kept.keep(envs)
        return evaluation

    def _play(self, envs: VecEnv, version: int, num_episodes: int, deterministic: bool) -> Evaluation | None:
        num_envs = envs.num_envs
        remaining = np.full(num_envs, num_episodes // num_envs)
        remaining[:num_episodes % num_envs] += 1
        returns: list[float] = []
        lengths: list[int] = []
        policy_returns: dict[str, list[float]] = {}
        obs, mask = envs.reset()
        done = np.ones(num_envs, dtype=bool)
        waits = 0  # steps since an episode that counts has ended
        rhs: DataOfAgent
        rhs = map_tensors(self._actor.initial_states(num_envs), lambda state: state.cpu().numpy())
        with torch.inference_mode():
            while remaining.sum() > 0:
                if self._interrupted:
                    return None
                self._check_finite(obs)
                acting = self._algo.acting_step(obs, rhs, done, deterministic=deterministic, mask=mask)
                rhs = acting.rhs
                step = envs.step(acting.clipped_action)
                waits += 1
                if waits in (_LONG_STEPS, _MOST_STEPS):
                    self._check_length(waits)
                obs, mask, done = step.obs, step.mask, step.first
                if PREVIOUS in rhs:  # the memory receives rewards that are transformed as in training
                    transform = reward_function(self._factory.options.reward_transform)
                    show_reward(rhs, step.reward if transform is None else transform(step.reward))
                for episode in step.episodes:
                    if not math.isfinite(episode.env_return):
                        raise NonFiniteDataError(f"{_WHERE}, env {episode.env_index}: the return of an episode is "
                                                 f"{episode.env_return}")
                    if remaining[episode.env_index] > 0:
                        waits = 0
                        remaining[episode.env_index] -= 1
                        returns.append(episode.env_return)
                        lengths.append(episode.length)
                        for policy, value in (episode.policy_returns or {}).items():
                            policy_returns.setdefault(policy, []).append(value)
        return Evaluation(version, tuple(returns), tuple(lengths),
                          {p: tuple(values) for p, values in policy_returns.items()})

    def _check_finite(self, obs: DataOfAgent) -> None:
        for policy, leaves in obs.items() if isinstance(self._factory, MultiAgentEnvFactory) else (("", obs),):
            where = f"{_WHERE}, policy {policy!r}" if policy else _WHERE
            check_finite(leaves, where, env_axis=0, name_of=functools.partial(self._factory.row_name, policy))

    def _check_length(self, steps: int) -> None:
        """Warn of an episode of `_LONG_STEPS` steps, and refuse one of `_MOST_STEPS`, unless episodes are limited."""
        if self._factory.options.max_episode_steps is not None:
            return
        text = f"an evaluation waits for the end of an episode, which has taken {steps:,} steps"
        remedy = "if episodes of this environment do not end by themselves, give max_episode_steps"
        if steps >= _MOST_STEPS:
            raise EnvError(f"{text}; {remedy}")
        logger.warning("%s; %s (the evaluation fails after %s steps)", text, remedy, f"{_MOST_STEPS:,}")


class Evaluations:
    """Runs evaluations, one at a time, on a separate worker.

    Args:
        runtime: The runtime in which the evaluation worker runs.
        parameters: Keyword arguments of `Evaluator`.
        retries: Whether to repeat an evaluation on a new worker, at most twice, if its worker dies. Without retries,
            the death of the worker raises `WorkerLostError`.

    Attributes:
        worker: The evaluation worker; None before the first evaluation.
    """

    def __init__(self, runtime: Runtime, parameters: Mapping[str, object], retries: bool) -> None:
        self._runtime, self._parameters, self._retries = runtime, dict(parameters), retries
        self.worker: Handle[Evaluator] | None = None
        self._running: Future[Evaluation | None] | None = None
        self._request: tuple[Weights, int] | None = None
        self._lost = 0
        self._deadline: float | None = None

    @property
    def weights(self) -> Weights | None:
        """The weights of the newest evaluation, which may still be running; None before the first evaluation."""
        return None if self._request is None else self._request[0]

    def start(self, weights: Weights, num_episodes: int, timeout_s: float | None = None) -> None:
        """Start an evaluation of `weights` with a time limit in seconds; None: no limit."""
        self._request, self._lost = (weights, num_episodes), 0
        self._deadline = None if timeout_s is None else self._runtime.now() + timeout_s
        self._submit()

    def _submit(self) -> None:
        assert self._request is not None
        if self.worker is None:
            self.worker = self._runtime.start_actor(
                Evaluator, self._parameters, name="Evaluator", resources={"num_cpus": 0})
        self._running = self.worker.submit(Evaluator.evaluate, *self._request)

    def poll(self) -> Evaluation | None:
        """Return the evaluation if it has finished, else None. Each evaluation is returned once."""
        if self._running is None:
            return None
        if not self._runtime.wait([self._running], 0.0):
            if self._deadline is not None and self._runtime.now() > self._deadline:
                self._give_up()
            return None
        return self._take(1.0)

    def wait(self, timeout_s: float) -> Evaluation | None:
        """Wait until the running evaluation ends, and return its result.

        Return None if no evaluation is running, or if the evaluation was interrupted.

        Raises:
            WorkerLostError: The evaluation did not end within `timeout_s` seconds or its own time limit, or its worker
                died and no retries are left.
        """
        evaluation = None
        while evaluation is None and self._running is not None:
            left = timeout_s if self._deadline is None else max(0.0, self._deadline - self._runtime.now())
            if not self._runtime.wait([self._running], min(left, timeout_s)):
                self._give_up()
            evaluation = self._take(timeout_s)
        return evaluation

    def _give_up(self) -> NoReturn:
        """End the worker of an evaluation that takes too long, and raise an error with the worker's stack."""
        worker, self.worker, self._running = self.worker, None, None
        assert worker is not None
        stack = self._runtime.outcome(worker.signal(Evaluator.stack), _STACK_TIMEOUT_S)
        self._runtime.kill(worker, _STACK_TIMEOUT_S)
        place = f"in\n{stack.value}" if stack.value else f"not answering ({stack.error or 'it is still starting'})"
        raise WorkerLostError(f"the evaluation has not ended in time; its worker is {place}")

    def _take(self, timeout_s: float) -> Evaluation | None:
        assert self._running is not None
        future, self._running = self._running, None
        outcome = self._runtime.outcome(future, timeout_s)
        if not isinstance(outcome.error, WorkerDiedError):
            return outcome.unwrap()
        self._lost += 1
        if not self._retries or self._lost > _MAX_RETRIES:
            raise WorkerLostError(str(outcome.error)) from outcome.error
        logger.warning("%s; the evaluation restarts on a new worker", outcome.error)
        self.worker = None
        self._submit()
        return None

    def interrupt(self) -> None:
        """Signal the worker to end its evaluation early."""
        if self.worker is not None:
            self.worker.signal(Evaluator.interrupt)
