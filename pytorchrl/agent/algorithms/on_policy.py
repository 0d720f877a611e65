"""The base class of on-policy algorithms: acting, value estimates, and a loss that is a weighted sum of named terms.

T = steps in a rollout, E = environments, B = samples in a batch, L = steps in a sequence (for actors with memory).
"""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from pytorchrl.agent.actors.on_policy_actor import OnPolicyActor
from pytorchrl.agent.actors.small_network import SmallNetwork
from pytorchrl.agent.actors.small_policy import SmallPolicy, small_value
from pytorchrl.agent.algorithms.base import ActOnDevice, Algorithm
from pytorchrl.agent.algorithms.compiled import CompiledGradient, Constants
from pytorchrl.agent.algorithms.precision import BatchShape, PrecisionOptions, example_rows, precision
from pytorchrl.agent.algorithms.rnd import RND
from pytorchrl.agent.contracts import check_evaluated, check_first_batch, check_terms, check_weights, overrides
from pytorchrl.agent.cuda_graphs import recorded
from pytorchrl.agent.data import (
    OBS_LEAF,
    ActingStep,
    Arrays,
    Batch,
    BatchStorage,
    DataKind,
    Evaluated,
    LossParameters,
    Obs,
    RolloutData,
    TensorActing,
    ValuesOf,
)
from pytorchrl.agent.names import checked_names
from pytorchrl.agent.options import Factory, option
from pytorchrl.agent.schedules import Schedule
from pytorchrl.agent.transfers import on_device, on_host
from pytorchrl.errors import ConfigError
from pytorchrl.support.tracebacks import brief_errors
from pytorchrl.support.untyped import Forwarded, StateDict

if TYPE_CHECKING:
    from typing_extensions import Self

NUM_MINI_BATCH_HELP = "Number of minibatches per pass over a rollout; there is one update per minibatch."
ADVANTAGE_NORMALIZATION_HELP = "Samples over which advantages are normalized."


_CHUNK_BYTES = 2**25
"""Maximum size in bytes of the observations, as float32, in one forward pass that computes values."""
_CACHE_ROWS = 4096
"""Maximum number of rows in such a pass on a CPU. The layers of a small network then stay in the processor's cache: the
values of 131,072 observations of CartPole take 16 ms instead of 49 ms, and 70 MB less memory."""


class OnPolicyAlgorithm(Algorithm):
    """The base class of on-policy algorithms; a subclass defines its options, `terms` and `loss_weights`.

    The loss is the sum of weight * mean(term) over the named terms; each mean is taken over the valid samples of a
    batch.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(PrecisionOptions, Algorithm.Options):
        """Options of every on-policy algorithm."""

        lr: float | Schedule = option(3e-4, help="Learning rate.", low=0.0, updatable=True)
        num_epochs: int = option(4, help="Passes over each rollout.", low=1)
        num_mini_batch: int = option(4, help=NUM_MINI_BATCH_HELP, low=1)
        mini_batch_size: int | None = option(
            None, low=1, help="Largest number of steps per minibatch, instead of num_mini_batch; a pass is split into "
                              "as few minibatches as possible, of nearly equal size.")
        value_loss_coef: float = option(0.5, help="Weight of the value loss.", low=0.0, updatable=True)
        entropy_coef: float | Schedule = option(0.01, help="Weight of the entropy bonus.", low=0.0, updatable=True)
        advantage_normalization: str = option(
            "minibatch", help=ADVANTAGE_NORMALIZATION_HELP, choices=("minibatch", "batch", "none"))

    learns_from = DataKind.ROLLOUTS
    actor_class: ClassVar[type[nn.Module]] = OnPolicyActor
    info_names: tuple[str, ...]
    """Names of the values in `info`: "loss", the terms and the measures; empty before the first batch."""
    recompute_advantages: bool = False
    intrinsic: RND | None = None
    """The intrinsic reward, which the storage adds to advantages; None if there is none."""
    actor: OnPolicyActor

    @classmethod
    @override
    @brief_errors
    @checked_names
    def create_factory(cls, **options: object) -> Factory[Self]:
        """Return a factory of this algorithm.

        `num_mini_batch` and `mini_batch_size` are mutually exclusive.

        Raises:
            ConfigError: Both options are given, or an option is not valid.
        """
        if options.get("num_mini_batch") is not None and options.get("mini_batch_size") is not None:
            raise ConfigError(f"num_mini_batch={options['num_mini_batch']} and "
                              f"mini_batch_size={options['mini_batch_size']} both set how a pass is split into "
                              "minibatches; give only one")
        return super().create_factory(**options)

    def __init__(
        self, options: OnPolicyAlgorithm.Options, *, actor: OnPolicyActor, seed: int, device: str = "cpu",
    ) -> None:
        """Build the algorithm; see `Algorithm` for the arguments."""
        super().__init__(options, actor=actor, seed=seed, device=device)
        self._flat = self.groups["all"]
        self._small_policy: SmallPolicy | None = None
        self._small_value: SmallNetwork | None = None
        # Small networks share memory with the parameters, so they are built after `super().__init__`, which moves the
        # parameters into `FlatParameters`.
        if self.device.type == "cpu" and not options.is_mixed:
            if SmallPolicy.suits(actor):
                self._small_policy = SmallPolicy(actor)
            if options.is_compiled:  # otherwise, torch computes the values
                self._small_value = small_value(actor)
        self._compiled = CompiledGradient(
            self._evaluate_loss, self._flat.params, self.actor, self.device, self.prepare_batch,
            has_memory=self.actor.is_recurrent) if options.is_compiled else None
        # A user's `act` is not recorded as a CUDA graph, which would not repeat side effects such as counting calls.
        is_recorded = options.is_compiled and self.device.type == "cuda" and not overrides(actor, OnPolicyActor, "act")
        self._recorded_act = recorded(self._act, self.device, self.generator) if is_recorded else None
        self._weights = Constants(self.device)
        self.info_names = ()
        self._term_names: tuple[str, ...] = ()
        # For V-trace, the learner computes values with its current weights; otherwise, collectors compute the values.
        self._stores_values = self.learns_from is DataKind.ROLLOUTS
        # `with_value` is passed only if it is False, because a user's `act` may lack this parameter.
        self._act_options: dict[str, Forwarded] = {} if self._stores_values else {"with_value": False}
        self.num_epochs: int = options.num_epochs
        self.num_mini_batch: int = options.num_mini_batch
        # If `mini_batch_size` is not None, the storage derives `num_mini_batch` from it.
        self.mini_batch_size: int | None = options.mini_batch_size
        self.advantage_normalization = options.advantage_normalization

    # Acting

    @override
    def acting_step(
        self, obs: Arrays, rhs: Arrays, done: np.ndarray, deterministic: bool = False, mask: np.ndarray | None = None,
    ) -> ActingStep:
        """Choose the actions of E environments.

        In the result, `other` contains what `finish_rollout` needs to compute log-probabilities and values.
        """
        small = self._small_policy
        if small is not None and mask is None and (step := small.act(obs, deterministic, self.generator)) is not None:
            return step
        with torch.inference_mode():
            action, clipped_action, states, other = self._choose(
                {name: torch.from_numpy(leaf) for name, leaf in obs.items()},
                {name: torch.from_numpy(state) for name, state in rhs.items()},
                torch.from_numpy(done), None if mask is None else torch.from_numpy(mask), deterministic)
            if not action.is_cpu:
                action, clipped_action, *rows = on_host(action, clipped_action, *states.values(), *other.values())
                states, other = (dict(zip(states, rows, strict=False)),
                                 dict(zip(other, rows[len(states):], strict=True)))
            return ActingStep(
                action.numpy(), clipped_action.numpy(), {name: state.numpy() for name, state in states.items()},
                {name: row.numpy() for name, row in other.items()})

    def _act_on_device(self, obs: Obs, rhs: Obs, done: Tensor) -> TensorActing:
        return self._choose(obs, rhs, done, None, deterministic=False)

    @property
    @override
    def act_on_device(self) -> ActOnDevice | None:
        return None if overrides(self, OnPolicyAlgorithm, "acting_step") else self._act_on_device

    def _choose(
        self, obs: Obs, rhs: Obs, done: Tensor, mask: Tensor | None, deterministic: bool,
    ) -> TensorActing:
        """Return the decisions for E observations in host memory or on the device, as tensors on the device."""
        # A CUDA graph cannot contain the check of a mask, because the check waits for the GPU.
        act = self._act if self._recorded_act is None or mask is not None else self._recorded_act
        action, clipped_action, dist_params, value, states = act(obs, rhs, done, mask, deterministic)
        other = {"dist_params": dist_params} if value is None else {"dist_params": dist_params, "value": value}
        return TensorActing(action, clipped_action, {name: state.float() for name, state in states.items()}, other)

    def _act(
        self, obs: Obs, rhs: Obs, done: Tensor, mask: Tensor | None, deterministic: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Obs]:
        """Return the result of the actor's `act`."""
        with self._precision():
            inputs = self._to_device(obs, rhs, done, mask)
            return self.actor.act(*inputs[:3], deterministic, inputs[3], self.generator, **self._act_options)

    @override
    def finish_rollout(self, rollout: RolloutData) -> None:
        """Add `logp` (T, E), `value` (T + 1, E) and `final_value` (K,) to the rollout.

        These values are computed with the weights that collected the rollout. K is the number of final observations. An
        algorithm that learns from rollouts of older policies adds only `logp`.
        """
        dist_params = rollout.other.pop("dist_params").flatten(0, 1)
        num_steps, num_envs = rollout.reward.shape
        with torch.no_grad():
            mask = None if rollout.mask is None else rollout.mask[:num_steps].flatten(0, 1)
            logp = self.actor.log_prob_from_params(dist_params, rollout.action.flatten(0, 1), mask)
        rollout.other["logp"] = logp.view(num_steps, num_envs)
        if self._stores_values:
            rollout.other["value"], rollout.other["final_value"] = self.compute_values(
                rollout, rollout.other.get("value"))

    def compute_values(self, rollout: RolloutData, known: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Compute the values of all observations of a rollout with the current weights, without gradient.

        Args:
            rollout: T steps of E environments.
            known: Values (T, E) of the first T rows of observations, if the caller has these values; else None.

        Returns:
            Values (T + 1, E) of all rows, and values (K,) of the observations `rollout.final_obs`, float32 on the
            device of the rollout.
        """
        num_steps, num_envs = rollout.reward.shape
        start = 0 if known is None else num_steps
        rows = self.evaluate_rows(
            self._values_of, {name: leaf[start:].flatten(0, 1) for name, leaf in rollout.obs.items()},
            {name: state[start:].flatten(0, 1) for name, state in rollout.rhs.items()},
            rollout.done[start:].flatten(0, 1)).view(-1, num_envs)
        value = rows if known is None else torch.cat([known, rows])
        if not len(rollout.final_index):
            return value, value.new_zeros(0)
        # Row t + 1 of `rhs` is the memory after o_t, even if step t ended the episode: the memory is reset only when a
        # network processes the first observation of the next episode.
        t, e = rollout.final_index.unbind(1)
        return value, self.evaluate_rows(
            self._values_of, rollout.final_obs, {name: state[t + 1, e] for name, state in rollout.rhs.items()},
            torch.zeros(len(t), dtype=torch.bool, device=t.device))

    # Learning

    def batches(self, storage: BatchStorage) -> Iterator[Batch]:
        """Return the batches of all epochs; in each epoch, every sample is in exactly one batch."""
        batches = storage.generate_batches(num_mini_batch=self.num_mini_batch, num_epochs=self.num_epochs)
        return batches if self.info_names else check_first_batch(storage, batches)

    @abstractmethod
    def terms(
        self, evaluated: Evaluated, batch: Batch, parameters: LossParameters,
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Compute the terms of the loss for each sample; a subclass may add its own terms to those of its base class.

        Args:
            evaluated: The actor's differentiable outputs for the batch with the current weights: log-probabilities,
                entropies, values, and the features that feed the heads.
            batch: The samples; advantages are already normalized if `advantage_normalization` is "minibatch".
            parameters: Current value of each updatable option, by name: a float or (with `compile`) a tensor (). Read
                values from this argument and not from `self.parameters`, which is constant in a compiled loss.

        Returns:
            Two dictionaries. The first contains the terms of the loss, with the names of `loss_weights`; the second
            contains additional measures without gradient. Terms and measures are float32 and have one number for each
            sample, (B,) or (L, B), like `evaluated.logp`. The numbers of invalid samples are ignored, but must be
            finite. `info` reports the mean of each term and measure under its name.
        """

    def loss_weights(self, parameters: Mapping[str, float]) -> dict[str, float]:
        """Return the weight of each term in the loss; a subclass adds the weights of its own terms.

        Args:
            parameters: Current value of each updatable option, by name.
        """
        return {"policy_loss": 1.0, "value_loss": parameters["value_loss_coef"], "entropy": -parameters["entropy_coef"]}

    def loss(
        self, evaluated: Evaluated, batch: Batch, parameters: LossParameters, weights: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Compute the loss from `terms`.

        Args:
            evaluated: The actor's outputs for the batch; see `terms`.
            batch: The samples; see `terms`.
            parameters: Current value of each updatable option, by name; see `terms`.
            weights: (k,) float32 weights of the terms, in the order of `loss_weights`.

        Returns:
            The loss (), and a vector without gradient. The vector contains the loss and the means of all terms and
            measures, one value for each of `info_names`.

        Raises:
            ContractError: At the first batch, the result of `terms` does not fit `loss_weights` or the batch.
        """
        returned = self.terms(evaluated, batch, parameters)
        if not self.info_names:
            self._term_names, measure_names = check_terms(self, returned, evaluated.logp,
                                                          self.loss_weights(self.parameters))
            self.info_names = ("loss", *self._term_names, *measure_names)
        terms, measures = returned
        means = batch.means([terms[name] for name in self._term_names])
        loss = torch.dot(means, weights)
        measured = [loss.detach().unsqueeze(0), means.detach()]
        return loss, torch.cat([*measured, batch.means(list(measures.values()))] if measures else measured)

    def prepare_batch(self, batch: Batch) -> Batch:
        """Return the batch, with its advantages normalized if the option `advantage_normalization` is "minibatch"."""
        if self.advantage_normalization != "minibatch" or batch.is_normalized:
            return batch
        return dataclasses.replace(batch, advantage=batch.normalized_advantage(), is_normalized=True)

    @override
    def compute_gradients(self, batch: Batch) -> tuple[list[Tensor], dict[str, float]]:
        """Compute the gradient of the loss over a batch.

        Raises:
            ConfigError: `compile=True`, but this machine cannot compile, or the actor has memory and is on the CPU.
            ContractError: A method of a subclass, of the actor or of the storage returned a value of the wrong type or
                shape; only the first batch is checked.
        """
        named_weights = self.loss_weights(self.parameters)
        if not self.info_names:
            check_weights(self, named_weights)
        weights = self._weights.of(*named_weights.values())
        if self._compiled is not None:
            gradient, measured = self._compiled(batch, self.parameters, weights)
        else:
            self._flat.zero_grad()
            loss, measured = self._evaluate_loss(batch, self.parameters, weights)
            torch.autograd.backward(loss)
            gradient = self._flat.grad
            measured = torch.cat([measured, torch.linalg.vector_norm(gradient, keepdim=True)])
        *numbers, norm = measured.tolist()  # on a GPU, the only wait of an update
        info = dict(zip(self.info_names, numbers, strict=True))
        if not math.isfinite(info["loss"]):
            gradient, norm = torch.full_like(gradient, math.nan), math.nan
        self._gradients = gradients = [gradient]
        self._keep_norms(gradients, [norm])
        return gradients, info

    def example_batch(self, shape: BatchShape) -> Batch:
        """Return a batch for timing `compute_gradients`: all-zero observations, and actions of the current policy."""
        columns, length = shape
        obs, rhs = example_rows(self.actor.example_obs(), columns), self.actor.initial_states(columns)
        done = torch.zeros(columns, dtype=torch.bool, device=self.device)
        with torch.no_grad():
            action, _, dist_params, _, _ = self.actor.act(
                obs, rhs, done, generator=self.generator, **self._act_options)
            logp = self.actor.log_prob_from_params(dist_params.float(), action)
        zeros = torch.zeros(columns, device=self.device)
        if self.actor.is_recurrent:
            obs = {name: leaf.expand(length, *leaf.shape) for name, leaf in obs.items()}
            done, action, logp, zeros = (rows.expand(length, *rows.shape) for rows in (done, action, logp, zeros))
        other = {} if self.intrinsic is None else self.intrinsic.example(obs, zeros)
        return Batch(obs=obs, done=done, rhs=rhs, mask=None, action=action, valid=None, logp=logp, value=zeros,
                     ret=zeros, advantage=zeros, other=other, num_samples=columns * length)

    # States

    @override
    def reseed(self, seed: int) -> None:
        super().reseed(seed)
        if self._small_policy is not None:
            self._small_policy.noise = torch.zeros(0)  # the action noise drawn in advance came from the old seed

    @override
    def state_dict(self) -> StateDict:
        """Return the state, including the noise drawn in advance for the next actions."""
        noise = torch.zeros(0) if self._small_policy is None else self._small_policy.noise
        return {**super().state_dict(), "noise": noise}

    @override
    def load_state_dict(self, state: StateDict) -> None:
        super().load_state_dict(state)
        if self._small_policy is not None:
            self._small_policy.noise = state["noise"]

    # Helpers

    def _evaluate_loss(self, batch: Batch, parameters: LossParameters, weights: Tensor) -> tuple[Tensor, Tensor]:
        with self._precision():
            evaluated = self.actor.evaluate_all(batch.obs, batch.rhs, batch.done, batch.action, batch.mask)
        if not self.info_names:
            check_evaluated(self.actor, evaluated, batch)
        return self.loss(evaluated, self.prepare_batch(batch), parameters, weights)

    def evaluate_rows(self, values_of: ValuesOf, obs: Obs, rhs: Obs, done: Tensor) -> Tensor:
        """Return the results (B,) of a function of B rows on the device of `done`, in chunks to limit memory usage.

        Args:
            values_of: Function of observations, memory states and starts of episodes on the algorithm's device. It is
                called without gradients.
            obs: Observations, leaf -> (B, ...).
            rhs: The memory (B, H) of each network before these observations, by name.
            done: (B,) bool, whether an observation is the first of its episode.
        """
        size, values, home = rows_at_once(obs, self.device), [], done.device
        with torch.no_grad(), self._precision():
            for start in range(0, len(done), size):
                rows = slice(start, start + size)
                chunk = {k: v[rows] for k, v in obs.items()}, {k: v[rows] for k, v in rhs.items()}, done[rows]
                if self.device.type != "cpu":
                    chunk = self._to_device(*chunk, None)[:3]
                values.append(values_of(*chunk).to(home))
        return values[0] if len(values) == 1 else torch.cat(values)

    def _values_of(self, obs: Obs, rhs: Obs, done: Tensor) -> Tensor:
        if self._small_value is not None:
            return self._small_value.of_rollout(self.actor.normalize(obs)[OBS_LEAF]).squeeze(-1)
        return self.actor.get_value(obs, rhs, done)[0]["value"].float()

    def _precision(self) -> AbstractContextManager[object]:
        return precision(self.device, self.options.is_mixed)

    def _to_device(
        self, obs: Obs, rhs: Obs, done: Tensor, mask: Tensor | None,
    ) -> tuple[Obs, Obs, Tensor, Tensor | None]:
        def moved(leaf: Tensor) -> Tensor:
            return on_device(leaf, self.device)
        return ({name: moved(leaf) for name, leaf in obs.items()}, {name: moved(state) for name, state in rhs.items()},
                moved(done), None if mask is None else moved(mask))


def rows_at_once(obs: Obs, device: torch.device, columns: int = 1) -> int:
    """Return the largest number of rows that are evaluated in one pass: as many as fit into `_CHUNK_BYTES`.

    Args:
        obs: Observations by leaf, (rows, ...) or (rows, columns, ...).
        device: Device of the networks. On a CPU, `_CACHE_ROWS` limits the number of observations, too.
        columns: Number of observations in a row.
    """
    size = _CHUNK_BYTES // sum(4 * leaf[0].numel() for leaf in obs.values())
    return max(1, min(size, _CACHE_ROWS // columns) if device.type == "cpu" else size)
