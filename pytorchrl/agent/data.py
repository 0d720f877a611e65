"""What passes between the parts of an agent. T = steps of a rollout, E = environments, B = samples of a batch.

Time comes first, environment second; there is no trailing axis of one. Observations are flat dictionaries of leaves
(`"camera/left"`; the single leaf of a plain space is called `"obs"`) in their own dtypes: images stay uint8.
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
"""Name of the only leaf of an observation space that is not a Dict or Tuple."""

PREVIOUS = "q/previous"
"""Name in `rhs` of what a memory is shown of the step before: (E, n + 1), its action one-hot, then its reward."""

Obs = dict[str, Tensor]
Arrays = dict[str, np.ndarray]


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
    """Write rewards (E,) into the states that acting left, before what comes next is acted on."""
    if PREVIOUS in rhs:
        rhs[PREVIOUS][:, -1] = reward


D = TypeVar("D")


def map_tensors(data: D, function: Callable[[Any], Any]) -> D:
    """A copy with `function` applied to every tensor or array, in dataclasses, dictionaries and lists of whatever depth."""
    if isinstance(data, dict):
        return {key: map_tensors(part, function) for key, part in data.items()}  # type: ignore[return-value]
    if isinstance(data, list):
        return [map_tensors(part, function) for part in data]  # type: ignore[return-value]
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        return dataclasses.replace(data, **{
            field.name: map_tensors(getattr(data, field.name), function) for field in dataclasses.fields(data)})
    return function(data) if isinstance(data, (Tensor, np.ndarray)) else data


class Episode(NamedTuple):
    """One finished episode of raw rewards."""

    env_return: float
    """Sum of raw rewards over valid steps."""
    length: int
    """Number of valid steps."""
    seconds: float
    """Seconds since the environments were created."""
    env_index: int
    """Environment within its vector."""
    terminated: bool
    """Whether it ended by itself (else a time limit cut it)."""
    policy_returns: dict[str, float] | None = None
    """Of several agents, by policy: the mean over its agents of their own returns; `env_return` sums over all agents."""


@dataclass(slots=True)
class Step:
    """What one step of a vector of E environments returns; arrays are valid until the next step."""

    obs: dict[str, np.ndarray]
    """Leaf -> (E, ...): what the policy sees next; after an end under SAME_STEP, the new episode's first."""
    reward: np.ndarray
    """(E,) float32, transformed for the learner."""
    terminated: np.ndarray
    """(E,) bool; where both are set, termination wins and `truncated` is false."""
    truncated: np.ndarray
    """(E,) bool."""
    valid: np.ndarray
    """(E,) bool; false where no transition was made (the reset step of NEXT_STEP)."""
    first: np.ndarray
    """(E,) bool; whether `obs` is the first observation of an episode: memory is reset before it."""
    final_index: np.ndarray
    """(K,) int64, environments whose true last observation `obs` does not show."""
    final_obs: dict[str, np.ndarray]
    """Leaf -> (K, ...), those observations."""
    mask: np.ndarray | None
    """(E, n) bool, allowed actions in `obs`, if the environment gives them."""
    episodes: list[Episode]
    """Episodes that ended in this step."""
    final_mask: np.ndarray | None = None
    """(K, n) bool, allowed actions in `final_obs`; None: all, or the environment gives no masks."""


class ActingStep(NamedTuple):
    """What an algorithm decides for E environments at once; in NumPy, as environments speak."""

    action: np.ndarray
    """(E, ...) as the distribution drew it; int64 or float32. This is stored."""
    clipped_action: np.ndarray
    """What goes to the environment."""
    rhs: Arrays
    """net -> (E, H): memory after this observation."""
    other: Arrays
    """Further rows to store with the transition, by name, each (E, ...)."""


@dataclass(slots=True)
class RolloutData:
    """The transitions of one rollout, on the CPU."""

    obs: Obs
    """Leaf -> (T+1, E, ...); row T closes the rollout."""
    done: Tensor
    """(T+1, E) bool: o_t is the first of an episode, memory is reset before it."""
    rhs: Obs
    """net -> (T+1, E, H) float32, the state before o_t; empty for actors without memory."""
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
    """(K, 2) int64 pairs (t, e): transitions whose next observation is `final_obs`, not row t+1."""
    final_obs: Obs
    """Leaf -> (K, ...)."""
    other: Obs = field(default_factory=dict)
    """What the algorithm stored or computed, by name, e.g. `logp` (T, E), `value` (T+1, E), `final_value` (K,)."""
    final_mask: Tensor | None = None
    """(K, n) bool, allowed actions in `final_obs`, where there are masks."""

    @property
    def num_steps(self) -> int:
        """T."""
        return self.reward.shape[0]

    @property
    def num_envs(self) -> int:
        """E."""
        return self.reward.shape[1]

    @property
    def size(self) -> int:
        """T · E: what it adds to a batch of rollouts, with the steps in which an environment was reset."""
        return self.num_steps * self.num_envs

    @property
    def parts(self) -> Mapping[str, RolloutData]:
        """Policy -> its transitions; those of one policy alone are all in `""`."""
        return {"": self}

    def num_valid(self) -> int:
        """Number of env steps in it: its valid transitions."""
        return int(self.valid.sum())

    def map(self, function: Any) -> RolloutData:
        """A copy with `function` applied to every tensor (or array)."""
        def apply(value: Any) -> Any:
            if value is None:
                return None
            return {k: function(v) for k, v in value.items()} if isinstance(value, dict) else function(value)
        return RolloutData(**{f.name: apply(getattr(self, f.name)) for f in dataclasses.fields(self)})

    def to_numpy(self) -> RolloutData:
        """The same memory as numpy arrays, which cross processes with one copy."""
        return self.map(lambda tensor: tensor.numpy())


class Evaluated(NamedTuple):
    """The outputs of an on-policy actor for a batch, with gradient: (B, ...), or (L, B, ...) for sequences."""

    logp: Tensor
    """(B,) float32 log-probability of the recorded actions under the current policy."""
    entropy: Tensor
    """(B,) float32 entropy of the current policy."""
    value: Tensor
    """(B,) float32 value estimate with the current weights."""
    dist_params: Tensor
    """(B, P) parameters of the policy's distribution."""
    features: Tensor | None = None
    """(B, F) float32 input of the policy head; None for an actor that has no such features."""
    value_features: Tensor | None = None
    """(B, F) float32 input of the value head; the same tensor as `features` if policy and value share a network."""


def weights_of_gradients(samples: Mapping[str, int], num_gradients: int) -> list[int]:
    """Return the number of valid samples behind each gradient of a batch: the weight of the gradient in a mean.

    Every policy has the same number of gradients: an agent of one policy has one for each group of its algorithm, an agent of
    several policies has one for each policy.

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
    """Samples for one gradient: (B, ...) leaves, or (L, B, ...) sequences for actors with memory."""

    obs: Obs
    """Leaf -> (B, ...)."""
    done: Tensor
    """(B,) bool."""
    rhs: Obs
    """net -> (B, H), the state before the first row."""
    mask: Tensor | None
    """(B, n) bool."""
    action: Tensor
    """(B, ...)."""
    valid: Tensor | None
    """(B,) bool, or None if all samples are valid."""
    logp: Tensor
    """(B,) log-probability when acting."""
    value: Tensor
    """(B,) value when acting."""
    ret: Tensor
    """(B,) return, the critic's target."""
    advantage: Tensor
    """(B,)."""
    num_samples: int = 0
    """Valid samples in it."""
    num_new_samples: int = 0
    """Those of them that no earlier batch used (ledger: unique)."""
    last: bool = False
    """Whether the rollouts behind it are used up after this batch."""
    is_normalized: bool = False
    """Whether `advantage` is already normalised, over this batch or a larger one that contains this batch."""

    def means(self, samples: Sequence[Tensor]) -> Tensor:
        """Return the means of k measures over the valid samples.

        Args:
            samples: k tensors (B,), or (L, B) of sequences.

        Returns:
            (k,) means.
        """
        stacked = torch.stack(list(samples))
        if self.valid is None:
            return stacked.flatten(1).mean(1)
        return torch.where(self.valid, stacked, 0.0).flatten(1).sum(1) / self.valid.sum()

    def normalized_advantage(self) -> Tensor:
        """Return (A - mean) / (std + 1e-8) over the valid samples, with the sample standard deviation; 0 for a single sample.

        Advantages that are already normalised are returned unchanged.
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
    """Transitions drawn from replay, for one gradient: (B, ...) leaves."""

    obs: Obs
    """Leaf -> (B, ...), o."""
    action: Tensor
    """(B, ...) int64 or float32, a, as the algorithm chose it."""
    ret: Tensor
    """(B,) float32, R: the sum of m <= n rewards after o, discounted."""
    discount: Tensor
    """(B,) float32: gamma^m, 0 after a termination; what a target at `next_obs` counts."""
    next_obs: Obs
    """Leaf -> (B, ...), the true observation after those m steps, also at an episode's end."""
    weight: Tensor
    """(B,) float32 importance weights, at most 1; 1 without priorities."""
    ids: Tensor
    """(B,) int64, where in replay they are, generation included; for priorities."""
    mask: Tensor | None = None
    """(B, n) bool, allowed actions at o."""
    next_mask: Tensor | None = None
    """(B, n) bool, allowed actions at `next_obs`."""
    num_samples: int = 0
    """Transitions in it, B."""
    num_new_samples: int = 0
    """0: a drawn transition is a copy and stays where it is (ledger: resident)."""
    last: bool = False
    """Whether no further batch is drawn before new data come."""


@dataclass(slots=True)
class SequenceBatch(OnePolicyBatch):
    """Sequences drawn from replay, for one gradient. W = steps of warm-up, L = trained steps, n = `n_step` of the storage.

    A sequence has W + L + n observations: those before its trained steps warm the memory up, those after them are what
    targets bootstrap from. Its trained steps are at rows W to W + L - 1. A shorter warm-up begins with an episode, `done`;
    rows before that, and rows after an episode's last observation, repeat what is next to them.

    `SequenceBuffer` draws sequences of one episode each. A sequence of `RolloutSequenceBuffer`, whose W is 0, may contain several
    episodes; the true last observation of an episode is a row between its last step and the next episode.
    """

    obs: Obs
    """Leaf -> (W+L+n, B, ...)."""
    done: Tensor
    """(W+L+n, B) bool: o_t is the first of an episode, memory is reset before it."""
    rhs: Obs
    """net -> (B, H), the stored state before row 0."""
    action: Tensor
    """(L, B) int64, of the trained steps."""
    ret: Tensor
    """(L, B) float32, R: the sum of m <= n rewards after o, discounted."""
    discount: Tensor
    """(L, B) float32: gamma^m, 0 after a termination."""
    next_row: Tensor
    """(L, B) int64, the row of the observation after those m steps."""
    valid: Tensor
    """(L, B) bool; false where no transition begins: after a sequence's end, and at the last observation of an episode."""
    weight: Tensor
    """(B,) float32 importance weights, at most 1."""
    ids: Tensor
    """(B,) int64, where in replay they are, generation included; for priorities."""
    burn_in: int
    """W."""
    mask: Tensor | None = None
    """(W+L+n, B, actions) bool, allowed actions."""
    previous: Tensor | None = None
    """(W+L+n, B, actions + 1) float32, see `PREVIOUS`, where the actor's memory is shown it."""
    num_samples: int = 0
    """Valid trained steps in it."""
    num_new_samples: int = 0
    """0: what is drawn is a copy and stays where it is (ledger: resident)."""
    last: bool = False
    """Whether no further batch is drawn before new data come."""


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
