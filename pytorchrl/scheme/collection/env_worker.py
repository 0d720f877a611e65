"""The environment worker, which steps environments with actions that another process computes."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pytorchrl.agent.data import Arrays, Step
from pytorchrl.agent.multi.data import MultiStep
from pytorchrl.scheme.base.worker import Context, Worker
from pytorchrl.scheme.collection.recipe import CWorkerRecipe
from pytorchrl.support.worker_names import collection_worker


@dataclass(frozen=True, slots=True)
class EnvAnswer:
    """The answer of an environment worker to one request."""

    step: Step | MultiStep | None
    """The step; None after a reset."""
    first: tuple[object, object] | None
    """After a reset: the first observations and the masks, as `VecEnv.reset` returns them; otherwise None."""
    seconds: float
    """Seconds that the environments needed."""
    envs_restarted: int
    """Number of restarts so far of environments of this incarnation of the worker, because they raised an error."""
    num_env_steps: int = 0
    """Number of valid env steps."""

    def numbers(self) -> tuple[int, ...]:
        """Return the number of env steps, and a checksum of the rewards and of the next observations.

        In a replayed run, these numbers must be identical to those of the recorded run.
        """
        return self.num_env_steps, functools.reduce(_add_to_checksum, self._arrays(), 0)

    def _arrays(self) -> Iterator[np.ndarray]:
        for step in [] if self.step is None else steps_of(self.step):
            yield step.reward
            yield from step.obs.values()


def steps_of(step: Step | MultiStep) -> list[Step]:
    """Return the steps of all policies as a list; a single `Step` becomes a list of one step."""
    return list(step.parts.values()) if isinstance(step, MultiStep) else [step]


def _add_to_checksum(checksum: int, array: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(array).data, checksum)


class EnvWorker(Worker):
    """A remote worker that steps a vector of environments. It has no actor and no storage.

    Args:
        index_worker: Index in the set of collection workers, from 1.
        recipe: Factories, options and seed, which all collection workers share.
        index_parent: Index of the gradient worker.
        context: Runtime, incarnation and number of threads, which a native vector environment may use, too; None: the
            defaults.
    """

    def __init__(self, index_worker: int, recipe: CWorkerRecipe, index_parent: int = 0, *,
                 context: Context | None = None) -> None:
        super().__init__(index_worker)
        context = context or Context()
        runtime, incarnation = context.runtime, context.incarnation
        self._make_envs = recipe.env_maker((index_parent, index_worker, incarnation), context.num_threads)
        self._envs = self._make_envs(seed=recipe.seed)
        self._envs_restarted = 0  # restarts before the latest `reseed`, which builds new environments
        self._reset_pending, self._is_closed = True, False
        self._now = runtime.now
        self._point = runtime.points(collection_worker(index_parent, index_worker), incarnation)
        self.made_steps = 0

    def step(self, action: np.ndarray | Arrays | None) -> EnvAnswer:
        """Reset all environments in the first call and in the first call after `reseed`; otherwise, step each once.

        Args:
            action: Actions (E, ...) for the E environments. With several policies, a mapping from each policy to its
                actions (C, ...), which have one row for each agent of the policy in each environment. A reset ignores
                this argument.

        Raises:
            EnvError: An environment raised an exception, and is not restarted.
        """
        start = self._now()
        if self._reset_pending:
            first = self._envs.reset()
            self._reset_pending = False
            return EnvAnswer(None, first, self._now() - start, self._num_restarted())
        step: Step | MultiStep = self._envs.step(action)  # type: ignore[arg-type] # the actions of these environments
        if self._point is not None:
            self._point("step")
        # With several policies, each step of an environment is valid, regardless of its number of agents.
        num_env_steps = self._envs.num_envs if isinstance(step, MultiStep) else int(np.count_nonzero(step.valid))
        self.made_steps += num_env_steps
        return EnvAnswer(step, None, self._now() - start, self._num_restarted(), num_env_steps)

    def _num_restarted(self) -> int:
        return self._envs_restarted + self._envs.num_restarts

    def reseed(self, seed: int, incarnation: int) -> None:
        """Replace the environments by new ones, seeded as in a new worker with this seed and incarnation."""
        self._envs_restarted += self._envs.num_restarts
        self._envs.close()
        self._envs = self._make_envs(seed=seed, incarnation=incarnation)
        self._reset_pending = True

    def interrupt(self) -> None:
        """Do nothing, because every request asks for a single step, which ends soon."""

    def close(self) -> tuple[int, int]:
        """Close the environments, if they are open.

        Returns:
            The number of env steps since the worker was built, and the number of these steps that have not been
            returned to the caller (always 0).
        """
        if not self._is_closed:
            self._envs.close()
            self._is_closed = True
        return self.made_steps, 0
