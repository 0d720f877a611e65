"""The base class of on-policy algorithms with a policy and a value: acting, and a loss of terms that both compute.

T = steps in a rollout, E = environments, B = samples in a batch, L = steps in a sequence (for actors with memory).
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from pytorchrl.agent.actors.on_policy_actor import OnPolicyActor
from pytorchrl.agent.actors.small_network import SmallNetwork
from pytorchrl.agent.actors.small_policy import SmallPolicy, small_value
from pytorchrl.agent.algorithms.base import ActOnDevice
from pytorchrl.agent.algorithms.precision import BatchShape, example_rows
from pytorchrl.agent.algorithms.rollouts import RolloutAlgorithm
from pytorchrl.agent.contracts import check_evaluated, overrides
from pytorchrl.agent.cuda_graphs import recorded
from pytorchrl.agent.data import (
    OBS_LEAF,
    ActingStep,
    Arrays,
    Batch,
    DataKind,
    Evaluated,
    LossParameters,
    Obs,
    RolloutData,
    TensorActing,
)
from pytorchrl.agent.options import option
from pytorchrl.agent.schedules import Schedule
from pytorchrl.agent.transfers import on_host
from pytorchrl.support.untyped import Forwarded, StateDict

ADVANTAGE_NORMALIZATION_HELP = "Samples over which advantages are normalized."


class OnPolicyAlgorithm(RolloutAlgorithm):
    """The base class of on-policy algorithms; a subclass defines its options, `terms` and `loss_weights`.

    The loss is the sum of weight * mean(term) over the named terms; each mean is taken over the valid samples of a
    batch.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(RolloutAlgorithm.Options):
        """Options of every on-policy algorithm."""

        value_loss_coef: float = option(0.5, help="Weight of the value loss.", low=0.0, updatable=True)
        entropy_coef: float | Schedule = option(0.01, help="Weight of the entropy bonus.", low=0.0, updatable=True)
        advantage_normalization: str = option(
            "minibatch", help=ADVANTAGE_NORMALIZATION_HELP, choices=("minibatch", "batch", "none"))

    actor_class: ClassVar[type[nn.Module]] = OnPolicyActor
    actor: OnPolicyActor

    def __init__(
        self, options: OnPolicyAlgorithm.Options, *, actor: OnPolicyActor, seed: int, device: str = "cpu",
    ) -> None:
        """Build the algorithm; see `Algorithm` for the arguments."""
        super().__init__(options, actor=actor, seed=seed, device=device)
        self._small_policy: SmallPolicy | None = None
        self._small_value: SmallNetwork | None = None
        # For V-trace, the learner computes values with its current weights; otherwise, collectors compute the values.
        self._stores_values = self.learns_from is DataKind.ROLLOUTS
        # Small networks share memory with the parameters, so they are built after `super().__init__`, which moves the
        # parameters into `FlatParameters`.
        if self.device.type == "cpu" and not options.is_mixed:
            if SmallPolicy.suits(actor):
                self._small_policy = SmallPolicy(actor, self._stores_values)
            if options.is_compiled:  # otherwise, torch computes the values
                self._small_value = small_value(actor)
        # A user's `act` is not recorded as a CUDA graph, which would not repeat side effects such as counting calls.
        is_recorded = options.is_compiled and self.device.type == "cuda" and not overrides(actor, OnPolicyActor, "act")
        self._recorded_act = recorded(self._act, self.device, self.generator) if is_recorded else None
        # `with_value` is passed only if it is False, because a user's `act` may lack this parameter.
        self._act_options: dict[str, Forwarded] = {} if self._stores_values else {"with_value": False}
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
        if small is not None and mask is None:
            step = small.act(obs, rhs, done, deterministic, self.generator)
            if step is not None:
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

    # Learning

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

    @override
    def loss_weights(self, parameters: Mapping[str, float]) -> dict[str, float]:
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
        return self._weighted_sum(self.terms(evaluated, batch, parameters), evaluated.logp, batch, weights)

    def prepare_batch(self, batch: Batch) -> Batch:
        """Return the batch, with its advantages normalized if the option `advantage_normalization` is "minibatch"."""
        if self.advantage_normalization != "minibatch" or batch.is_normalized:
            return batch
        return dataclasses.replace(batch, advantage=batch.normalized_advantage(), is_normalized=True)

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

    @override
    def _evaluate_loss(self, batch: Batch, parameters: LossParameters, weights: Tensor) -> tuple[Tensor, Tensor]:
        with self._precision():
            evaluated = self.actor.evaluate_all(batch.obs, batch.rhs, batch.done, batch.action, batch.mask)
        if not self.info_names:
            check_evaluated(self.actor, evaluated, batch)
        return self.loss(evaluated, self.prepare_batch(batch), parameters, weights)

    @override
    def _values_of(self, obs: Obs, rhs: Obs, done: Tensor, mask: Tensor | None) -> Tensor:
        if self._small_value is not None:
            return self._small_value.of_rollout(self.actor.normalize(obs)[OBS_LEAF]).squeeze(-1)
        return self.actor.get_value(obs, rhs, done)[0]["value"].float()
