"""Data that the parts of an agent exchange. T = steps of a rollout, E = environments, B = samples of a batch.

The first axis is time, the second one environments, without a trailing axis of length 1. Observations are flat
dictionaries of leaves (`"camera/left"`; the leaf of a plain space is called `"obs"`) with their own dtypes: images stay
uint8.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

OBS_LEAF = "obs"
"""Name of the only leaf of an observation space that is neither a Dict nor a Tuple."""

PREVIOUS = "q/previous"
"""Name in `rhs` of the input of a memory from the previous step: (E, n + 1), its action one-hot, then its reward."""

Obs = dict[str, Tensor]
Arrays = dict[str, np.ndarray]
State = dict[str, Any]
"""A saved state: tensors, arrays, plain values and containers of them, in a layout of the class that saved it."""

Parameters = Mapping[str, Any]
"""Name -> current value of an updatable option: a float, or in a compiled loss a tensor ()."""


class DataKind(Enum):
    """The kind of data that an algorithm learns from and a storage provides; both must be the same.

    The members are ordered from data that must be fresh to data of any age.
    """

    ROLLOUTS = "rollouts with advantages"
    OLDER_ROLLOUTS = "rollouts of older policies with V-trace targets"
    TRANSITIONS = "single transitions of any policy"
    SEQUENCES = "sequences of steps of any policy"

    @property
    def is_kept(self) -> bool:
        """Whether the storage is a replay, which keeps transitions for repeated draws until newer ones replace them."""
        return self in (DataKind.TRANSITIONS, DataKind.SEQUENCES)


def show_reward(rhs: Arrays, reward: np.ndarray) -> None:
    """Write the rewards of a step, (E,), into the states from which the next actions are chosen."""
    if PREVIOUS in rhs:
        rhs[PREVIOUS][:, -1] = reward


D = TypeVar("D")


def map_tensors(data: D, function: Callable[[Any], Any]) -> D:  # from a tensor or array to any value
    """Return a copy with `function` applied to every tensor or array in nested dataclasses, dictionaries and lists."""
    if isinstance(data, dict):
        return {key: map_tensors(value, function) for key, value in data.items()}  # type: ignore[return-value]
    if isinstance(data, list):
        return [map_tensors(value, function) for value in data]  # type: ignore[return-value]
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        return dataclasses.replace(data, **{
            field.name: map_tensors(getattr(data, field.name), function) for field in dataclasses.fields(data)})
    return function(data) if isinstance(data, (Tensor, np.ndarray)) else data


class Episode(NamedTuple):
    """A finished episode."""

    env_return: float
    """Sum of the raw rewards over valid steps."""
    length: int
    """Number of valid steps."""
    seconds: float
    """Seconds since the environments were created."""
    env_index: int
    """Index of the environment in its vector."""
    terminated: bool
    """Whether the environment ended the episode; otherwise it was truncated, for example by a time limit."""
    policy_returns: dict[str, float] | None = None
    """For several agents, policy -> mean of the returns of its agents; `env_return` sums over all agents."""


@dataclass(slots=True)
class Step:
    """The result of one step of a vector of E environments; arrays are valid until the next step."""

    obs: dict[str, np.ndarray]
    """Leaf -> (E, ...), the next observations; after an end under SAME_STEP, the first of the new episode."""
    reward: np.ndarray
    """(E,) float32, transformed for the learner."""
    terminated: np.ndarray
    """(E,) bool; where both are set, termination wins and `truncated` is false."""
    truncated: np.ndarray
    """(E,) bool."""
    valid: np.ndarray
    """(E,) bool; false for a step that is no transition, such as the reset step of NEXT_STEP."""
    first: np.ndarray
    """(E,) bool; whether `obs` is the first observation of an episode, before which memory is reset."""
    final_index: np.ndarray
    """(K,) int64, environments whose last observation is not in `obs`."""
    final_obs: dict[str, np.ndarray]
    """Leaf -> (K, ...), the last observations of those environments."""
    mask: np.ndarray | None
    """(E, n) bool, actions allowed after `obs`; None if the environment has no masks."""
    episodes: list[Episode]
    """Episodes that ended in this step."""
    final_mask: np.ndarray | None = None
    """(K, n) bool, actions allowed after `final_obs`; None if all are, or if the environment has no masks."""


class ActingStep(NamedTuple):
    """The decisions of an algorithm for E environments, as NumPy arrays."""

    action: np.ndarray
    """(E, ...) int64 or float32, as drawn from the distribution; these actions are stored."""
    clipped_action: np.ndarray
    """(E, ...), the actions for the environments."""
    rhs: Arrays
    """Network -> (E, H), the memory after this observation."""
    other: Arrays
    """Name -> (E, ...), further values to store with the transition."""


@dataclass(slots=True)
class RolloutData:
    """The transitions of one rollout, on the CPU; K transitions end episodes whose last observation is not in `obs`."""

    obs: Obs
    """Leaf -> (T+1, E, ...); row T follows the last transition."""
    done: Tensor
    """(T+1, E) bool; whether o_t is the first of an episode, before which memory is reset."""
    rhs: Obs
    """Network -> (T+1, E, H) float32, the state before o_t; empty for actors without memory."""
    mask: Tensor | None
    """(T+1, E, n) bool."""
    action: Tensor
    """(T, E, ...) int64 or float32."""
    reward: Tensor
    """(T, E) float32."""
    terminated: Tensor
    """(T, E) bool."""
    truncated: Tensor
    """(T, E) bool."""
    valid: Tensor
    """(T, E) bool."""
    final_index: Tensor
    """(K, 2) int64 pairs (t, e), transitions whose next observation is in `final_obs` instead of row t+1."""
    final_obs: Obs
    """Leaf -> (K, ...), the last observations of those episodes."""
    other: Obs = field(default_factory=dict)
    """Values that the algorithm stored or computed, such as `logp` (T, E), `value` (T+1, E) and `final_value` (K,)."""
    final_mask: Tensor | None = None
    """(K, n) bool, actions allowed after `final_obs`; None without masks."""

    @property
    def num_steps(self) -> int:
        """T, the number of steps."""
        return self.reward.shape[0]

    @property
    def num_envs(self) -> int:
        """E, the number of environments."""
        return self.reward.shape[1]

    @property
    def size(self) -> int:
        """T · E, the share of the rollout in a batch of rollouts, including steps in which an environment was reset."""
        return self.num_steps * self.num_envs

    @property
    def parts(self) -> Mapping[str, RolloutData]:
        """Policy -> its transitions; the policy of an agent with only one is called `""`."""
        return {"": self}

    def num_valid(self) -> int:
        """Return the number of env steps, which are the valid transitions."""
        return int(self.valid.sum())

    def map(self, function: Callable[[Any], object]) -> RolloutData:  # of a tensor, an array or its packed form
        """Return a copy with `function` applied to every tensor, array or packed array."""
        def apply(value: object) -> Any:  # the type of the field
            if value is None:
                return None
            return {k: function(v) for k, v in value.items()} if isinstance(value, dict) else function(value)
        return RolloutData(**{f.name: apply(getattr(self, f.name)) for f in dataclasses.fields(self)})

    def to_numpy(self) -> RolloutData:
        """Return the same memory as NumPy arrays, which cross processes with one copy."""
        return self.map(lambda tensor: tensor.numpy())


class Evaluated(NamedTuple):
    """The outputs of an on-policy actor for a batch, with gradient: (B, ...), or (L, B, ...) for sequences."""

    logp: Tensor
    """(B,) float32, log-probabilities of the recorded actions under the current policy."""
    entropy: Tensor
    """(B,) float32, entropies of the current policy."""
    value: Tensor
    """(B,) float32, value estimates with the current weights."""
    dist_params: Tensor
    """(B, P), parameters of the policy's distribution."""
    features: Tensor | None = None
    """(B, F) float32, input of the policy head; None for an actor without such features."""
    value_features: Tensor | None = None
    """(B, F) float32, input of the value head; the tensor `features` if policy and value share a network."""


def weights_of_gradients(samples: Mapping[str, int], num_gradients: int) -> list[int]:
    """Return the number of valid samples behind each gradient of a batch: the weight of the gradient in a mean.

    Every policy has the same number of gradients: an agent of one policy has one for each group of its algorithm, an
    agent of several policies has one for each policy.

    Args:
        samples: Policy -> number of valid samples, as from `Batch.samples`.
        num_gradients: Number of gradients, those of the first policy first.
    """
    return [count for count in samples.values() for _ in range(num_gradients // len(samples))]


class OnePolicyBatch:
    """The questions that a batch of one policy answers as a `MultiBatch` does."""

    __slots__ = ()
    num_samples: int

    @property
    def samples(self) -> dict[str, int]:
        """Policy -> number of valid samples; the policy of an agent with only one is called `""`."""
        return {"": self.num_samples}


@dataclass(slots=True)
class Batch(OnePolicyBatch):
    """Samples for one gradient: (B, ...) tensors, or (L, B, ...) sequences for actors with memory."""

    obs: Obs
    """Leaf -> (B, ...)."""
    done: Tensor
    """(B,) bool; whether each observation is the first of an episode."""
    rhs: Obs
    """Network -> (B, H), the state before the first row."""
    mask: Tensor | None
    """(B, n) bool, allowed actions."""
    action: Tensor
    """(B, ...)."""
    valid: Tensor | None
    """(B,) bool, or None if all samples are valid."""
    logp: Tensor
    """(B,) float32, log-probabilities of the actions when they were chosen."""
    value: Tensor
    """(B,) float32, value estimates when the actions were chosen."""
    ret: Tensor
    """(B,) float32, returns, the targets of the critic."""
    advantage: Tensor
    """(B,)."""
    num_samples: int = 0
    """Number of valid samples."""
    num_new_samples: int = 0
    """Number of valid samples that no earlier batch used, which the ledger counts as unique."""
    last: bool = False
    """Whether this is the last batch from its rollouts."""
    is_normalized: bool = False
    """Whether `advantage` is already normalized, over this batch or over a larger one that contains it."""

    def means(self, samples: Sequence[Tensor]) -> Tensor:
        """Return the means of k quantities over the valid samples.

        Args:
            samples: k tensors (B,), or (L, B) for sequences.

        Returns:
            (k,) means.
        """
        stacked = torch.stack(list(samples))
        if self.valid is None:
            return stacked.flatten(1).mean(1)
        return torch.where(self.valid, stacked, 0.0).flatten(1).sum(1) / self.valid.sum()

    def normalized_advantage(self) -> Tensor:
        """Return (A - mean) / (std + 1e-8) over the valid samples, with the sample standard deviation.

        The result for a single sample is 0.

        Advantages that are already normalized are returned unchanged.
        """
        if self.is_normalized:
            return self.advantage
        if self.valid is None:
            mean = self.advantage.mean()
            squares, others = (self.advantage - mean).square().sum(), max(self.advantage.numel() - 1, 1)
        else:
            mean = self.means([self.advantage])
            squares = torch.where(self.valid, self.advantage - mean, 0.0).square().sum()
            others = (self.valid.sum() - 1).clamp(min=1)  # type: ignore[assignment]
        std = (squares / others).sqrt()
        return (self.advantage - mean) / (std + 1e-8)


@dataclass(slots=True)
class ReplayBatch(OnePolicyBatch):
    """Transitions drawn from replay for one gradient: (B, ...) tensors."""

    obs: Obs
    """Leaf -> (B, ...), observations o."""
    action: Tensor
    """(B, ...) int64 or float32, actions a, as the algorithm chose them."""
    ret: Tensor
    """(B,) float32, R, the discounted sum of the m <= n rewards after o."""
    discount: Tensor
    """(B,) float32, the factor of a target at `next_obs`: gamma^m, or 0 after a termination."""
    next_obs: Obs
    """Leaf -> (B, ...), the observations after those m steps, also at the end of an episode."""
    weight: Tensor
    """(B,) float32, importance weights, at most 1; 1 without priorities."""
    ids: Tensor
    """(B,) int64, positions in replay with their generation, for updates of priorities."""
    mask: Tensor | None = None
    """(B, n) bool, actions allowed after o."""
    next_mask: Tensor | None = None
    """(B, n) bool, actions allowed after `next_obs`."""
    num_samples: int = 0
    """B, the number of transitions."""
    num_new_samples: int = 0
    """0, because a drawn transition is a copy that also stays in replay, where the ledger counts it."""
    last: bool = False
    """Whether no further batch is drawn before new data arrive."""


@dataclass(slots=True)
class SequenceBatch(OnePolicyBatch):
    """Sequences drawn from replay for one gradient. W = burn-in steps, L = trained steps, n = `n_step` of the storage.

    A sequence has W + L + n observations: those before its trained steps warm the memory up, those after them are what
    targets bootstrap from. Its trained steps are at rows W to W + L - 1. A shorter warm-up begins with an episode,
    `done`; rows before that, and rows after an episode's last observation, repeat what is next to them.

    `SequenceBuffer` draws sequences of one episode each. A sequence of `RolloutSequenceBuffer`, whose W is 0, may
    contain several episodes; the true last observation of an episode is a row between its last step and the next
    episode.
    """

    obs: Obs
    """Leaf -> (W+L+n, B, ...)."""
    done: Tensor
    """(W+L+n, B) bool; whether o_t is the first of an episode, before which memory is reset."""
    rhs: Obs
    """Network -> (B, H), the stored state before row 0."""
    action: Tensor
    """(L, B) int64, actions of the trained steps."""
    ret: Tensor
    """(L, B) float32, R, the discounted sum of the m <= n rewards after o."""
    discount: Tensor
    """(L, B) float32, gamma^m, or 0 after a termination."""
    next_row: Tensor
    """(L, B) int64, rows of the observations after those m steps."""
    valid: Tensor
    """(L, B) bool; false for rows after the end of a sequence, and for the last observation of an episode."""
    weight: Tensor
    """(B,) float32, importance weights, at most 1."""
    ids: Tensor
    """(B,) int64, positions in replay with their generation, for updates of priorities."""
    burn_in: int
    """W, the number of burn-in steps."""
    mask: Tensor | None = None
    """(W+L+n, B, actions) bool, allowed actions."""
    previous: Tensor | None = None
    """(W+L+n, B, actions + 1) float32, see `PREVIOUS`; None if the memory does not use it."""
    num_samples: int = 0
    """Number of valid trained steps."""
    num_new_samples: int = 0
    """0, because a drawn sequence is a copy that also stays in replay, where the ledger counts it."""
    last: bool = False
    """Whether no further batch is drawn before new data arrive."""


class BatchStorage(Protocol):
    """The members of a storage that algorithms use; see `Storage`."""

    num_learned_from: int

    @property
    def counters(self) -> dict[str, int]:
        """Transitions that were `inserted`, are `resident` and were `sampled`."""

    def generate_batches(
        self, num_mini_batch: int, mini_batch_size: int | None = None, num_epochs: int = 1,
    ) -> Iterator[Any]:
        """Return the batches of a storage, of the class that belongs to its kind of data."""
