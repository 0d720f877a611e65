"""Storages for on-policy algorithms; each sample is drawn once per epoch. T = steps, E = environments."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from pytorchrl.agent.contracts import check_estimate, check_rollout
from pytorchrl.agent.data import Batch, DataKind, Evaluate, Obs, RolloutData, ValuesOf
from pytorchrl.agent.moments import mean_and_std
from pytorchrl.agent.options import AgentOptions, option
from pytorchrl.agent.options import Options as BaseOptions
from pytorchrl.agent.recursion import as_values
from pytorchrl.agent.storages.base import Storage, StorageActor
from pytorchrl.agent.storages.returns import Estimates, gae
from pytorchrl.agent.storages.samples import Samples, sequences, single_steps
from pytorchrl.agent.transfers import on_device
from pytorchrl.support.untyped import OptionsOfSubclass

_REWARD_CLIP = 10.0
"""Largest absolute value of a normalized reward."""


class OnPolicyStorageActor(StorageActor, Protocol):
    """The members of an actor that on-policy storages use."""

    options: OptionsOfSubclass
    is_recurrent: bool

    def reward_scale(self) -> float:
        """Return the factor that normalizes rewards."""


class IntrinsicReward(Protocol):
    """An intrinsic reward of an on-policy algorithm; see `RND`, which is one."""

    sample_values: tuple[str, ...]

    def prepare(self, rollouts: Sequence[RolloutData], sources: Sequence[Hashable], generator: torch.Generator,
                evaluate: Evaluate) -> None:
        """Add intrinsic rewards and values to new rollouts."""

    def advantages(self, rollout: RolloutData, extrinsic: np.ndarray | Tensor, gae_lambda: float,
                   parameters: Mapping[str, float], recompute: Evaluate | None) -> np.ndarray | Tensor:
        """Return the weighted sum of extrinsic and intrinsic advantages, (T, E)."""


class RolloutLearner(Protocol):
    """The methods and attributes that a storage needs from an on-policy algorithm; see `OnPolicyAlgorithm`."""

    gamma: float
    num_mini_batch: int
    mini_batch_size: int | None
    advantage_normalization: str
    recompute_advantages: bool

    parameters: dict[str, float]

    def compute_values(self, rollout: RolloutData) -> tuple[Tensor, Tensor]:
        """Return the values of a rollout's observations, (T + 1, E), and of the K observations in `final_obs`, (K,)."""

    def evaluate_rows(self, values_of: ValuesOf, obs: Obs, rhs: Obs, done: Tensor) -> Tensor:
        """Return the results of a function of rows; see `OnPolicyAlgorithm.evaluate_rows`."""


class VanillaOnPolicyBuffer(Storage):
    """Storage of rollouts with bootstrapped Monte Carlo returns, which equal those of GAE with lambda = 1."""

    @dataclass(frozen=True, kw_only=True)
    class Options(BaseOptions):
        """Options of `VanillaOnPolicyBuffer`."""

        size: int = option(help="Steps per environment in a rollout, T.", low=1)
        sequence_length: int | None = option(
            None, help="Steps per training sequence, for actors with memory; None uses whole rollouts.", low=1)

    provides = DataKind.ROLLOUTS
    options: Options
    actor: OnPolicyStorageActor
    algorithm: RolloutLearner

    def __init__(
        self, options: Options, *, actor: OnPolicyStorageActor, algorithm: RolloutLearner, num_envs: int, seed: int,
        device: str = "cpu",
    ) -> None:
        """Build the storage from checked options; users call `create_factory` instead.

        Args:
            options: Checked options.
            actor: The actor of this worker.
            algorithm: The algorithm of this worker.
            num_envs: E, the number of environments of the collector that fills the storage.
            seed: Seed of the random order of samples.
            device: Device of the batches.
        """
        super().__init__(options, actor=actor, algorithm=algorithm, num_envs=num_envs, seed=seed, device=device)
        self.plan_batches(1)
        self._rollouts: list[RolloutData] = []
        self._sources: list[Hashable] = []
        self._samples: Samples | None = None
        self._normalized = False
        self._counters = {"inserted": 0, "sampled": 0}

    @property
    @override
    def keeps_tensors(self) -> bool:
        return True

    @property
    def gae_lambda(self) -> float:
        """Lambda of the advantage estimate."""
        return 1.0

    @property
    def sequence_length(self) -> int | None:
        """Steps per training sequence, for actors with memory; None means whole rollouts."""
        return self.options.sequence_length

    def plan_batches(self, num_rollouts: int) -> None:
        """Compute and set the algorithm's `num_mini_batch`, if the algorithm has a `mini_batch_size`.

        The number is computed for `num_rollouts` full rollouts. Shorter rollouts are divided into the same number of
        minibatches, because workers that average their gradients must make the same number of updates.
        """
        wanted = getattr(self.algorithm, "mini_batch_size", None)
        if wanted is None:
            return
        length, size = 1, self.options.size
        if self.actor.is_recurrent:  # only whole sequences are drawn
            length = min(self.options.sequence_length or size, size)
        count = num_rollouts * self.num_envs * -(-size // length)
        self.algorithm.num_mini_batch = -(-count // (wanted // length))

    def insert_data_slice(self, rollouts: list[RolloutData]) -> None:
        """Replace the stored rollouts with `rollouts`, which may have any lengths.

        The algorithm's `finish_rollout` must have processed the rollouts before.
        """
        self._rollouts = [rollout for rollout in rollouts if rollout.num_steps]
        self._sources = list(range(len(self._rollouts)))
        self._samples = None

    @override
    def insert_from(self, rollouts: Sequence[RolloutData], sources: Sequence[Hashable]) -> None:
        """Replace the stored rollouts, as `insert_data_slice` does; `sources` has the collector of each rollout."""
        self.insert_data_slice(list(rollouts))
        self._sources = [source for rollout, source in zip(rollouts, sources, strict=True) if rollout.num_steps]

    def before_gradients(self) -> None:
        """Compute returns and advantages of each rollout, and prepare the samples for `generate_batches`."""
        self._samples, self._normalized = None, False
        if not self._rollouts:
            return
        if (intrinsic := self._intrinsic) is not None:
            intrinsic.prepare(self._rollouts, self._sources, self.generator, self.algorithm.evaluate_rows)
        self._samples = self._lay_out(recompute=False)
        self._counters["inserted"] += self._samples.num_valid

    def advantage_moments(self) -> tuple[int, float, float]:
        """Return the count, the mean and the sum of squared deviations of the advantages of valid samples."""
        if self._samples is None or not self._samples.num_valid:
            return 0, 0.0, 0.0
        values = self._samples.advantage[self._samples.valid].double()
        mean = values.mean()
        return len(values), float(mean), float((values - mean).square().sum())

    def normalize_advantages(self, mean: float, std: float) -> None:
        """Replace each advantage A with (A - mean) / (std + 1e-8); `mean_and_std` computes the arguments."""
        self._normalized = True
        if self._samples is not None:
            self._samples.advantage = (self._samples.advantage - mean) / (std + 1e-8)

    def generate_batches(
        self, num_mini_batch: int, mini_batch_size: int | None = None, num_epochs: int = 1
    ) -> Iterator[Batch]:
        """Draw every sample or sequence once per epoch, in minibatches whose sizes differ by at most one.

        If the algorithm's `advantage_normalization` is "batch" and `normalize_advantages` was not called, this method
        normalizes the advantages over all stored samples.

        Args:
            num_mini_batch: Number of minibatches per epoch; limited to the number of samples or sequences.
            mini_batch_size: Largest size of a minibatch; overrides `num_mini_batch`.
            num_epochs: Number of passes over the samples.
        """
        samples = self._samples
        if samples is None or not samples.num_valid:
            return
        if self.algorithm.advantage_normalization == "batch" and not self._normalized:
            self.normalize_advantages(*mean_and_std([self.advantage_moments()]))
        count = len(samples.index)
        num_parts = -(-count // mini_batch_size) if mini_batch_size else min(num_mini_batch, count)
        for epoch in range(num_epochs):
            if epoch and self.algorithm.recompute_advantages:
                samples = self._samples = self._lay_out(recompute=True)
            order = samples.index[on_device(torch.randperm(count, generator=self.generator), self.device)]
            for batch in samples.batches(order, num_parts, is_first=not epoch, is_last=epoch == num_epochs - 1):
                self._counters["sampled"] += batch.num_samples
                yield batch

    def reset(self) -> None:
        """Discard the stored rollouts."""
        self._rollouts, self._samples = [], None

    @property
    def counters(self) -> dict[str, int]:
        """Numbers of valid transitions that were `inserted` and `sampled` so far, and that are `resident` now."""
        return {**self._counters, "resident": sum(rollout.num_valid() for rollout in self._rollouts)}

    def estimate(self, rollout: RolloutData, recompute: bool = False) -> Estimates:
        """Compute advantages and returns; a subclass may override this method.

        Args:
            rollout: T steps of E environments.
            recompute: Whether to compute values with the current weights instead of using the stored values.

        Returns:
            Advantages and returns, (T, E) float32 NumPy arrays or, for a rollout on a device, tensors there; entries
            of invalid steps are ignored.
        """
        value, final_value = self.values_of(rollout, recompute)
        return gae(rollout, value, final_value, self.algorithm.gamma, self.gae_lambda, self.rewards_of(rollout))

    def values_of(self, rollout: RolloutData, recompute: bool = False) -> tuple[Tensor, Tensor]:
        """Return the float32 values of a rollout's observations, (T + 1, E), and of its K final observations, (K,).

        Args:
            rollout: T steps of E environments.
            recompute: Whether to compute values with the current weights instead of using the stored values.
        """
        if recompute:
            return self.algorithm.compute_values(rollout)
        return rollout.other["value"], rollout.other["final_value"]

    def rewards_of(self, rollout: RolloutData) -> np.ndarray:
        """Return the rewards for learning, (T, E) float32, normalized if the actor normalizes rewards.

        For a rollout on a device, the result is a tensor there; see `as_values`.
        """
        reward = as_values(rollout.reward)
        if getattr(self.actor.options, "normalize_reward", None):
            reward = (reward * self.actor.reward_scale()).clip(-_REWARD_CLIP, _REWARD_CLIP)
        return reward

    @property
    def _intrinsic(self) -> IntrinsicReward | None:
        found: IntrinsicReward | None = getattr(self.algorithm, "intrinsic", None)  # a user's algorithm may lack it
        return found

    def _lay_out(self, recompute: bool) -> Samples:
        """Return the samples with their advantages and returns; see `estimate` for `recompute`."""
        needed = ("logp", "value", "final_value") if self.provides is DataKind.ROLLOUTS else ("logp",)
        estimates = []
        for rollout in self._rollouts:
            check_rollout(self.algorithm, rollout, needed)
            if not recompute and hasattr(self.algorithm, "prepare_rollout"):
                self.algorithm.prepare_rollout(rollout, self.sequence_length)
            estimates.append(self.estimate(rollout, recompute))
            check_estimate(self, estimates[-1], rollout.reward.shape)
        advantages, returns = map(list, zip(*estimates, strict=True))
        algorithm, intrinsic = self.algorithm, self._intrinsic
        others = getattr(algorithm, "sample_values", ())  # a user's algorithm may lack it
        if intrinsic is not None:
            evaluate = algorithm.evaluate_rows if recompute else None
            advantages = [
                intrinsic.advantages(rollout, advantage, self.gae_lambda, algorithm.parameters, evaluate)
                for rollout, advantage in zip(self._rollouts, advantages, strict=True)]
        if self.actor.is_recurrent:
            samples = sequences(self._rollouts, advantages, returns, self.sequence_length, others)
        else:
            samples = single_steps(self._rollouts, advantages, returns, others)
        return samples if self.device.type == "cpu" else samples.to(self.device)

    @classmethod
    @override
    def contradiction(cls, agent: AgentOptions) -> str | None:
        """Return a message if options contradict each other, otherwise None.

        If the actor has memory, a rollout must contain at least one sequence for each minibatch.
        """
        size, length = agent.storage.size, agent.storage.sequence_length
        if length is not None and agent.has_memory is False:
            return f"sequence_length={length} needs an actor with memory; set the actor's recurrent_net"
        if not agent.has_memory:
            return super().contradiction(agent)
        length = min(length or size, size)
        wanted, num_parts = (getattr(agent.algorithm, name, None) for name in ("mini_batch_size", "num_mini_batch"))
        if wanted is not None and wanted < length:  # only whole sequences are drawn
            return (f"mini_batch_size={wanted} is less than a sequence, which has {length} steps; set sequence_length "
                    f"to {wanted} or less, or mini_batch_size to {length} or more")
        count = math.inf if agent.num_envs is None or wanted is not None else agent.num_envs * -(-size // length)
        if num_parts is not None and count < num_parts:
            return (f"{agent.num_envs} environments yield {count} sequences per rollout, which is fewer than "
                    f"num_mini_batch={num_parts}; set sequence_length below {size}, use more environments, or lower "
                    "num_mini_batch")
        return super().contradiction(agent)


class GAEBuffer(VanillaOnPolicyBuffer):
    """Storage of rollouts with generalized advantage estimates (GAE)."""

    @dataclass(frozen=True, kw_only=True)
    class Options(VanillaOnPolicyBuffer.Options):
        """Options of `GAEBuffer`."""

        gae_lambda: float = option(0.95, help="Bias-variance trade-off of the advantage.", low=0.0, high=1.0)

    options: Options

    @property
    def gae_lambda(self) -> float:
        """Lambda of the advantage estimate."""
        return self.options.gae_lambda
