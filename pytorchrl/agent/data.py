"""Define the data that the parts of an agent exchange.

T = steps of a rollout, E = environments, B = samples of a batch. In a rollout, the first axis of an array is time and
the second axis is environments; there is no trailing axis of length 1. Observations are flat dictionaries from the name
of a leaf, such as `"camera/left"`, to its values; the only leaf of a space that is not nested is called `"obs"`. Each
leaf keeps its dtype, so images stay uint8.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from pytorchrl.support.display import Displayed, Row, figure, wrapped
from pytorchrl.support.untyped import BatchOfKind, FieldValue, MetricsDict, Numeric, Payload

OBS_LEAF = "obs"
"""Name of the only leaf of an observation space that is neither a Dict nor a Tuple."""

PREVIOUS = "q/previous"
"""Key of `rhs` for an additional input of the memory, (E, n + 1): the previous action, one of n, and its reward."""

VERSION = "version"
"""Key of `RolloutData.other`; see `RolloutData.versions`."""

Obs = dict[str, Tensor]
Arrays = dict[str, np.ndarray]

LossParameters = Mapping[str, Numeric]
"""The current values of updatable options, by name: floats, or scalar tensors in a compiled loss."""

ValuesOf = Callable[[Obs, Obs, Tensor, Tensor | None], Tensor]
"""A function of B rows of observations, memory states, starts of episodes and masks, or None, that returns (B,)."""

Evaluate = Callable[[ValuesOf, Obs, Obs, Tensor], Tensor]
"""A function that applies a `ValuesOf` to rows on any device, in parts that fit into memory."""


class DataKind(Enum):
    """The kind of data that an algorithm learns from or a storage provides; in an agent, the two kinds must be equal.

    Earlier members need fresher data; the last two members accept data of any age.
    """

    ROLLOUTS = "rollouts with advantages"
    OLDER_ROLLOUTS = "rollouts of older policies with V-trace targets"
    GROUPS = "groups of episodes with the same start"
    TRANSITIONS = "single transitions of any policy"
    SEQUENCES = "sequences of steps of any policy"

    @property
    def is_kept(self) -> bool:
        """Whether storages of this kind are replay buffers: they keep data for repeated draws, and evict the oldest."""
        return self in (DataKind.TRANSITIONS, DataKind.SEQUENCES)

    @property
    def tolerated_lag(self) -> float | None:
        """Largest mean policy lag, in train batches, that hardly harms learning; None for data of any age.

        PPO learns as well from data that are one train batch old, and less from data that are four train batches old;
        V-trace targets correct for a multiple of this.
        """
        return {DataKind.ROLLOUTS: 2.0, DataKind.OLDER_ROLLOUTS: 8.0}.get(self)


def show_reward(rhs: Arrays, reward: np.ndarray) -> None:
    """Write a step's rewards (E,) into the memory states `rhs` if the memory takes the previous reward as an input."""
    if PREVIOUS in rhs:
        rhs[PREVIOUS][:, -1] = reward


D = TypeVar("D")


def map_tensors(data: D, function: Callable[[Payload], Payload]) -> D:
    """Return a copy with `function` applied to each tensor or array in nested dataclasses, dicts, lists and tuples."""
    if isinstance(data, dict):
        return {key: map_tensors(value, function) for key, value in data.items()}  # type: ignore[return-value]
    if isinstance(data, list):
        return [map_tensors(value, function) for value in data]  # type: ignore[return-value]
    if isinstance(data, tuple) and type(data) is tuple:  # named tuples are returned unchanged
        return tuple(map_tensors(value, function) for value in data)  # type: ignore[return-value]
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
    time_s: float
    """Seconds since the environments were created."""
    env_index: int
    """Index of the environment in its vector of environments."""
    terminated: bool
    """Whether the environment ended the episode; otherwise it was truncated, for example by a time limit."""
    policy_returns: dict[str, float] | None = None
    """With several agents, the mean return of each policy's agents; `env_return` is then the sum over agents."""
    is_approximated: bool = False
    """Whether the last observation was unknown, so that another one takes its place in the value after a truncation."""


@dataclass(frozen=True, repr=False)
class Evaluation(Displayed):
    """The result of an evaluation: raw returns and lengths of the requested number of episodes.

    Printing it shows the number of episodes, and the mean and the standard deviation of their returns.
    """

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

    def __repr__(self) -> str:
        """Return text with the mean and the standard deviation of the returns, and the number of episodes."""
        items = [f"return_mean={figure(self.return_mean)}", f"return_std={figure(self.return_std)}",
                 f"episodes={len(self.returns)}"]
        items += [f"{policy}={figure(float(np.mean(values)))}" for policy, values in self.policy_returns.items()]
        return wrapped("Evaluation(", items, ")")

    def _rows(self) -> list[Row]:
        means = [(policy, float(np.mean(values))) for policy, values in self.policy_returns.items()]
        return [("return", [f"{figure(self.return_mean)} ± {figure(self.return_std)} (mean, standard deviation)"]),
                ("lowest, highest", [figure(min(self.returns)), figure(max(self.returns))]),
                ("by policy", [f"{policy} {figure(mean)}" for policy, mean in means]),
                ("episodes", [f"{len(self.returns)}"]),
                ("length", [f"{figure(float(np.mean(self.lengths)))} env steps (mean)"])]

    def metrics(self) -> MetricsDict:
        """Return the evaluation's entries in the learner's metrics."""
        policies = {policy: {"return_mean": float(np.mean(values))} for policy, values in self.policy_returns.items()}
        return {**({"policies": policies} if policies else {}), "version": self.version, "episodes": len(self.returns),
                "return_mean": self.return_mean, "return_std": self.return_std,
                "length_mean": float(np.mean(self.lengths))}


class Step(NamedTuple):
    """The result of one step of a vector of E environments; arrays are valid until the next step.

    It is a named tuple, like `ActingStep`, because a frozen dataclass takes twice as long to build in every step.
    """

    obs: dict[str, np.ndarray]
    """Next observations, leaf -> (E, ...); after a reset in the same step, the first observation of the new episode."""
    reward: np.ndarray
    """(E,) float32, rewards, transformed by `reward_transform`."""
    terminated: np.ndarray
    """(E,) bool; a step that both terminates and truncates an episode counts as terminated only."""
    truncated: np.ndarray
    """(E,) bool; whether the episode was cut off, for example by a time limit."""
    valid: np.ndarray
    """(E,) bool; false for a step that is not a transition, such as a reset in Gymnasium's autoreset mode NEXT_STEP."""
    first: np.ndarray
    """(E,) bool; whether `obs` is the first observation of an episode; if so, memory is reset before it."""
    final_index: np.ndarray
    """(K,) int64, indices of the environments whose episode ended with an observation that is not in `obs`."""
    final_obs: dict[str, np.ndarray]
    """The last observations of the environments in `final_index`, leaf -> (K, ...)."""
    mask: np.ndarray | None
    """(E, n) bool, actions that are allowed after `obs`; None if the environment has no masks."""
    episodes: list[Episode]
    """Episodes that ended in this step."""
    final_mask: np.ndarray | None = None
    """(K, n) bool, actions that are allowed after `final_obs`; None if all are allowed or there are no masks."""
    waiting: np.ndarray | None = None
    """(E,) bool; whether an agent waits for its turn after this step; None if no agent has waited so far."""


class TensorStep(NamedTuple):
    """The result of one step of E environments on a device, as tensors; see `Step` for the fields not described here.

    Nothing in it depends on values that the host would have to read: the last observations of episodes are those of all
    environments, and matter where `ended` is true.
    """

    obs: Obs
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    valid: Tensor
    first: Tensor
    final_obs: Obs
    """The last observations of episodes, leaf -> (E, ...); empty if they are in `obs`."""
    ended: Tensor
    """(E,) bool, whether the episode ended in this step."""
    episode_return: Tensor
    """(E,) float64, the sum of the raw rewards of the running or ended episode."""
    episode_length: Tensor
    """(E,) int64, the number of its valid steps."""
    approximated: Tensor
    """(E,) bool, whether the episode was cut off and its last observation is unknown; see `Episode`."""
    episodes: tuple[()] = ()
    """Always empty: the host learns once a rollout which episodes have ended."""


class ActingStep(NamedTuple):
    """The decisions of an algorithm for E environments, as NumPy arrays."""

    action: np.ndarray
    """(E, ...) int64 or float32, as drawn from the distribution; these actions are stored."""
    clipped_action: np.ndarray
    """(E, ...), the actions that the environments receive, for example clipped to the bounds of the action space."""
    rhs: Arrays
    """The memory (E, H) of each network after this observation, by name."""
    other: Arrays
    """Additional values (E, ...) to store with the transition, by name."""


class TensorActing(NamedTuple):
    """The decisions of an algorithm for E environments on a device, as tensors; see `ActingStep`."""

    action: Tensor
    clipped_action: Tensor
    rhs: Obs
    other: Obs


@dataclass(frozen=True, slots=True)
class HostRows:
    """The parts of a rollout on a device that the host needs, copied in one transfer; see `RolloutData`."""

    done: np.ndarray
    action: np.ndarray
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    valid: np.ndarray
    final_index: np.ndarray
    is_sound: bool
    """Whether all observations, last observations and rewards are finite, and all categories are in their spaces."""
    number: int
    """Number of the collector's rollout: the one that continues it has the next number, and a reset skips a number."""
    episodes: list[Episode]
    """The episodes that ended in the rollout; `time_s` is the time at the end of the rollout."""


@dataclass(frozen=True, slots=True)
class RolloutData:
    """The transitions of one rollout, on the CPU or, if `host` is not None, on a device.

    `finish_rollout` of an algorithm adds entries to `other`.

    K is the number of transitions whose next observation is in `final_obs`, because the next row of `obs` contains the
    first observation of a new episode instead.
    """

    obs: Obs
    """Observations, leaf -> (T+1, E, ...); row T follows the last transition."""
    done: Tensor
    """(T+1, E) bool; whether o_t is the first observation of an episode; if so, memory is reset before it."""
    rhs: Obs
    """The memory (T+1, E, H) float32 of each network before o_t, by name; empty for actors without memory."""
    mask: Tensor | None
    """(T+1, E, n) bool, true where an action is allowed; None without masks."""
    action: Tensor
    """(T, E, ...) int64 or float32, actions as drawn from the distribution."""
    reward: Tensor
    """(T, E) float32, rewards, transformed by `reward_transform`."""
    terminated: Tensor
    """(T, E) bool; whether the environment ended the episode."""
    truncated: Tensor
    """(T, E) bool; whether the episode was cut off, for example by a time limit."""
    valid: Tensor
    """(T, E) bool; false for steps that are not transitions; see `Step.valid`."""
    final_index: Tensor
    """(K, 2) int64, pairs (t, e) of the transitions whose next observation is in `final_obs` instead of row t+1."""
    final_obs: Obs
    """The next observations of the transitions in `final_index`, leaf -> (K, ...)."""
    other: Obs = field(default_factory=dict)
    """Values that the algorithm stored or computed, such as `logp` (T, E), `value` (T+1, E) and `final_value` (K,)."""
    final_mask: Tensor | None = None
    """(K, n) bool, actions that are allowed after `final_obs`; None without masks."""
    host: HostRows | None = None
    """For a rollout on a device, its parts that the host needs; None for a rollout on the CPU."""

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
        """T * E, the number of steps that the rollout adds to a train batch; invalid steps count, too."""
        return self.num_steps * self.num_envs

    @property
    def parts(self) -> Mapping[str, RolloutData]:
        """The transitions of each policy, by its name; a single policy has the name `""`."""
        return {"": self}

    @property
    def versions(self) -> Tensor | None:
        """(T, E) int32, the version of the weights that chose each action; None if all are that of the rollout."""
        return self.other.get(VERSION)

    def num_valid(self) -> int:
        """Return the number of env steps, that is, of valid transitions."""
        valid = self.valid if self.host is None else self.host.valid
        valid = valid.numpy() if isinstance(valid, Tensor) else valid
        return int(np.count_nonzero(valid))  # faster than the sum of a small tensor

    def next_observations(self, leaf: str) -> Tensor:
        """Return the next observation of each transition, (T, E, ...), which may be the last one of an episode."""
        rows = self.obs[leaf][1:].clone()
        if len(self.final_index):
            rows[self.final_index.unbind(1)] = self.final_obs[leaf]
        return rows

    def map(self, function: Callable[[Payload], object]) -> RolloutData:
        """Return a copy with `function` applied to every tensor, array or encoded array (`Packed`)."""
        def apply(value: object) -> FieldValue:
            if value is None:
                return None
            return {k: function(v) for k, v in value.items()} if isinstance(value, dict) else function(value)
        return RolloutData(host=self.host, **{
            f.name: apply(getattr(self, f.name)) for f in dataclasses.fields(self) if f.name != "host"})

    def to_numpy(self) -> RolloutData:
        """Return the rollout as NumPy arrays, which share memory with tensors on the CPU; others are copied."""
        if self.host is None:
            return self.map(lambda tensor: tensor.numpy())
        return dataclasses.replace(self.map(lambda tensor: tensor.cpu().numpy()), host=None)


class Evaluated(NamedTuple):
    """The differentiable outputs of an on-policy actor for a batch: (B, ...), or (L, B, ...) for sequences."""

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
    """(B, F) float32, input of the value head; the same tensor as `features` if policy and value share a network."""


def weights_of_gradients(samples: Mapping[str, int], num_gradients: int) -> list[int]:
    """Return a weight for each gradient of a batch, for the weighted mean with the gradients of other batches.

    The weight of a gradient is the number of valid samples of its policy. An agent with one policy has one gradient for
    each parameter group; an agent with several policies has one gradient for each policy.

    Args:
        samples: The number of valid samples of each policy, as in `Batch.samples`.
        num_gradients: Number of gradients; with several policies, they have the same order as `samples`.
    """
    return [count for count in samples.values() for _ in range(num_gradients // len(samples))]


class OnePolicyBatch:
    """The interface that batches of one policy share with `MultiBatch`, a batch of several policies."""

    __slots__ = ()
    num_samples: int

    @property
    def samples(self) -> dict[str, int]:
        """The number of valid samples of each policy, by its name; a single policy has the name `""`."""
        return {"": self.num_samples}


@dataclass(frozen=True, slots=True)
class Batch(OnePolicyBatch):
    """Samples for one gradient: (B, ...) tensors, or (L, B, ...) sequences of L steps for actors with memory."""

    obs: Obs
    """Observations, leaf -> (B, ...)."""
    done: Tensor
    """(B,) bool; whether each observation is the first of its episode."""
    rhs: Obs
    """The memory (B, H) of each network before the first row, by name."""
    mask: Tensor | None
    """(B, n) bool, true where an action is allowed."""
    action: Tensor
    """(B, ...) int64 or float32, actions as drawn from the distribution."""
    valid: Tensor | None
    """(B,) bool, or None if all samples are valid."""
    logp: Tensor
    """(B,) float32, log-probabilities of the actions under the policy that chose them."""
    value: Tensor
    """(B,) float32, value estimates with the weights that chose the actions."""
    ret: Tensor
    """(B,) float32, returns, the targets of the critic."""
    advantage: Tensor
    """(B,) float32, advantages."""
    other: Obs = field(default_factory=dict)
    """More values of each sample, by name, (B, ...), such as `RND` adds; see `OnPolicyAlgorithm.intrinsic`."""
    num_samples: int = 0
    """Number of valid samples."""
    num_new_samples: int = 0
    """Number of valid samples that no earlier batch contained; the ledger counts them as unique."""
    last: bool = False
    """Whether this is the last batch from its rollouts."""
    is_normalized: bool = False
    """Whether `advantage` is already normalized, over this batch or over a larger batch that contains it."""

    def split(self, num_parts: int) -> Iterator[Batch]:
        """Yield `num_parts` batches, whose tensors are views of this batch's tensors.

        The sizes of the parts differ by at most 1. This batch must have neither invalid samples nor memory states. If
        it is the last batch, only its last part is.
        """
        def cut(tensor: Tensor) -> tuple[Tensor, ...]:
            return torch.tensor_split(tensor, num_parts)

        obs = zip(*(cut(leaf) for leaf in self.obs.values()), strict=True)
        others = zip(*(cut(leaf) for leaf in self.other.values()), strict=True) if self.other else [()] * num_parts
        masks = (None,) * num_parts if self.mask is None else cut(self.mask)
        rows = zip(cut(self.logp), cut(self.value), cut(self.ret), cut(self.advantage), strict=True)
        parts = zip(obs, cut(self.done), masks, cut(self.action), rows, others, strict=True)
        for left, (leaves, done, mask, action, numbers, other) in zip(reversed(range(num_parts)), parts, strict=True):
            logp, value, ret, advantage = numbers
            yield Batch(dict(zip(self.obs, leaves, strict=True)), done, {}, mask, action, None, logp, value, ret,
                        advantage, dict(zip(self.other, other, strict=True)), len(done),
                        len(done) if self.num_new_samples else 0, self.last and not left, self.is_normalized)

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
        """Return the advantages A as (A - mean) / (std + 1e-8), with the mean and sample std of the valid samples.

        The result for a single sample is 0. Advantages that are already normalized are returned unchanged.
        """
        if self.is_normalized:
            return self.advantage
        if self.valid is None:
            mean = self.advantage.mean()
            squares = (self.advantage - mean).square().sum()
            others: int | Tensor = max(self.advantage.numel() - 1, 1)
        else:
            mean = self.means([self.advantage])
            squares = torch.where(self.valid, self.advantage - mean, 0.0).square().sum()
            others = (self.valid.sum() - 1).clamp(min=1)
        std = (squares / others).sqrt()
        return (self.advantage - mean) / (std + 1e-8)


@dataclass(frozen=True, slots=True)
class ReplayBatch(OnePolicyBatch):
    """Transitions drawn from replay for one gradient: (B, ...) tensors."""

    obs: Obs
    """Observations o, leaf -> (B, ...)."""
    action: Tensor
    """(B, ...) int64 or float32, actions a, as the algorithm chose them."""
    ret: Tensor
    """(B,) float32, R, the discounted sum of the m rewards after o; m is at most `n_step` of the storage."""
    discount: Tensor
    """(B,) float32, the factor of the value at `next_obs` in a target: gamma^m, or 0 after a termination."""
    next_obs: Obs
    """The observations m steps after o, leaf -> (B, ...), including the last observations of episodes."""
    weight: Tensor
    """(B,) float32, importance weights, at most 1; 1 without priorities."""
    ids: Tensor
    """(B,) int64, ids of the drawn items, which identify them when priorities are updated."""
    mask: Tensor | None = None
    """(B, n) bool, actions that are allowed after o."""
    next_mask: Tensor | None = None
    """(B, n) bool, actions that are allowed after `next_obs`."""
    num_samples: int = 0
    """B, the number of transitions."""
    num_new_samples: int = 0
    """Always 0, because drawn transitions are copies; the ledger counts the originals as resident or evicted."""
    last: bool = False
    """Whether this is the last batch before new data arrive."""

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean (...) of values (..., B) over the transitions."""
        return values.mean(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnrolledBatch(ReplayBatch):
    """The L trained steps of B sequences as transitions: the axes (B,) of the fields of `ReplayBatch` are (L, B) here.

    Observations are the outputs of memories; see `ReplayActor.remember`. The weights are (B,), one for each sequence.
    """

    valid: Tensor
    """(L, B) bool; false for padding, which `mean` leaves out."""

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean (...) of values (..., L, B) over the valid steps."""
        return torch.where(self.valid, values, 0.0).sum((-2, -1)) / self.valid.sum()


@dataclass(frozen=True, slots=True)
class SequenceBatch(OnePolicyBatch):
    """Sequences drawn from replay for one gradient.

    W = burn-in steps, L = steps in the loss, n = `n_step` of the storage. A sequence has W + L + n rows of
    observations. The first W rows are the burn-in, which warms up the memory. The loss covers the next L rows. The last
    n rows are used only by targets, which bootstrap from them.

    A sequence of `SequenceBuffer` contains steps of only one episode. If the episode starts within the burn-in, `done`
    marks the first row of the episode, and the rows before it are padding that repeats the first observation. If the
    episode ends early, the rows after its last observation repeat that observation.

    A sequence of `RolloutSequenceBuffer` has no burn-in (W = 0) and may contain several episodes. The last observation
    of each episode has its own row, between the episode's last step and the next episode.
    """

    obs: Obs
    """Observations, leaf -> (W+L+n, B, ...)."""
    done: Tensor
    """(W+L+n, B) bool; whether o_t is the first observation of an episode; if so, memory is reset before it."""
    rhs: Obs
    """The stored memory (B, H) of each network before row 0, by name."""
    action: Tensor
    """(L, B, ...) int64 or float32, actions of the L steps in the loss."""
    ret: Tensor
    """(L, B) float32, R, the discounted sum of the m rewards after o; m is at most `n_step` of the storage."""
    discount: Tensor
    """(L, B) float32, gamma^m, with m as in `ret`, or 0 after a termination."""
    next_row: Tensor
    """(L, B) int64, index of the row m steps after o, with m as in `ret`."""
    valid: Tensor
    """(L, B) bool; false for padding, and for rows that contain the last observation of an episode."""
    weight: Tensor
    """(B,) float32, importance weights, at most 1."""
    ids: Tensor
    """(B,) int64, ids of the drawn items, which identify them when priorities are updated."""
    burn_in: int
    """W, the number of burn-in steps."""
    mask: Tensor | None = None
    """(W+L+n, B, actions) bool, true where an action is allowed."""
    previous: Tensor | None = None
    """(W+L+n, B, actions + 1) float32, see `PREVIOUS`; None if the memory does not have this input."""
    num_samples: int = 0
    """Number of valid steps in the loss."""
    num_new_samples: int = 0
    """Always 0, because drawn sequences are copies; the ledger counts the original steps as resident or evicted."""
    last: bool = False
    """Whether this is the last batch before new data arrive."""


class BatchStorage(Protocol):
    """The members of `Storage` that algorithms use."""

    num_learned_from: int

    @property
    def counters(self) -> dict[str, int]:
        """Numbers of transitions `inserted` so far, `resident` now and `sampled` so far."""

    def generate_batches(
        self, num_mini_batch: int, mini_batch_size: int | None = None, num_epochs: int = 1,
    ) -> Iterator[BatchOfKind]:
        """Return an iterator of batches; their class, such as `ReplayBatch`, depends on the storage's kind of data."""
