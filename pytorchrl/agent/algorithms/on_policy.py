"""What on-policy algorithms share: acting, the values of a rollout, and a loss made of three terms.

T = steps of a rollout, E = environments, B = samples of a batch, P = scalars of the parameter vector.
"""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pytorchrl.agent.actors.small_policy import SmallPolicy
from pytorchrl.agent.algorithms.base import Algorithm
from pytorchrl.agent.algorithms.compiled import CompiledGradient
from pytorchrl.agent.algorithms.constants import Constants
from pytorchrl.agent.data import ActingStep, Arrays, Batch, Obs, RolloutData
from pytorchrl.agent.options import option
from pytorchrl.agent.schedules import Schedule
from pytorchrl.errors import ConfigError

if TYPE_CHECKING:
    from pytorchrl.agent.actors import OnPolicyActor
    from pytorchrl.agent.storages.base import Storage

_CHUNK_BYTES = 2**25
"""Observations, counted as float32, that go through the network at once when a rollout is finished."""


class Recorded(NamedTuple):
    """What a loss needs of a batch besides the actor's evaluation, each (B,) or (L, B)."""

    logp: Tensor
    value: Tensor
    ret: Tensor
    advantage: Tensor
    valid: Tensor | None
    is_normalized: bool = False
    """Whether `advantage` was normalised over a larger batch, of which this is a part."""
    kl: Tensor | None = None
    """KL divergence of the present policy from a reference that the algorithm keeps, with gradient."""

    def means(self, samples: list[Tensor]) -> Tensor:
        """(k,) means of k measures over valid samples, from k tensors (B,) or (L, B)."""
        stacked = torch.stack(samples)
        if self.valid is None:
            return stacked.flatten(1).mean(1)
        return torch.where(self.valid, stacked, 0.0).flatten(1).sum(1) / self.valid.sum()

    def normalized_advantage(self) -> Tensor:
        """(A - mean) / (std + 1e-8) over valid samples, with the sample standard deviation; of one sample it is 0.

        What was normalised before is left as it is.
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


class OnPolicyAlgorithm(Algorithm):
    """An on-policy algorithm; subclasses give the loss and its options."""

    @dataclass(frozen=True, kw_only=True)
    class Options(Algorithm.Options):
        """Options of every on-policy algorithm."""

        lr: float | Schedule = option(3e-4, help="Learning rate.", low=0.0, updatable=True)
        num_epochs: int = option(4, help="Passes over each rollout.", low=1)
        num_mini_batch: int = option(4, help="Parts of a pass, one update each.", low=1)
        value_loss_coef: float = option(0.5, help="Weight of the value loss.", low=0.0, updatable=True)
        entropy_coef: float | Schedule = option(0.01, help="Weight of the entropy bonus.", low=0.0, updatable=True)
        advantage_normalization: str = option(
            "minibatch", help="Over which samples advantages are normalised.", choices=("minibatch", "batch", "none"))
        compile: bool = option(False, help="Compile loss and gradient into one kernel graph (slow first update).")
        mixed_precision: bool = option(False, help="Run networks in bfloat16; parameters stay float32.")

    off_policyness: ClassVar[str] = "on"
    stores_values: ClassVar[bool] = True
    """Whether rollouts come with the values of the weights that acted."""
    info_names: ClassVar[tuple[str, ...]]
    """Names of what `loss` measures: the loss, its three terms, and what `terms` adds."""
    recompute_advantages: bool = False
    actor: OnPolicyActor

    def __init__(self, options: Any, *, actor: OnPolicyActor, seed: int, device: str = "cpu") -> None:
        """Use `create_factory`; arguments as of `Algorithm`.

        Raises:
            ConfigError: `compile` with an actor that has memory.
        """
        if options.compile and actor.is_recurrent:
            raise ConfigError(
                "compile=True needs an actor without memory, whose graph does not grow with the length of a sequence; "
                "set compile=False or recurrent_net=None")
        super().__init__(options, actor=actor, seed=seed, device=device)
        self._flat = self.groups["all"]
        self._small_policy: SmallPolicy | None = None
        if self.device.type == "cpu" and not options.mixed_precision and SmallPolicy.suits(actor):
            # Not before the parameters lie where they stay.
            self._small_policy = SmallPolicy(actor)
        self._compiled = CompiledGradient(self._evaluate_loss, self._flat.params, self.device) if options.compile else None
        self._weights = Constants(self.device)
        # Only who does without values says so: actors of one's own need not know the argument.
        self._act_options: dict[str, Any] = {} if self.stores_values else {"with_value": False}
        self.num_epochs: int = options.num_epochs
        self.num_mini_batch: int = options.num_mini_batch
        self.advantage_normalization = options.advantage_normalization

    # Acting

    def acting_step(
        self, obs: Arrays, rhs: Arrays, done: np.ndarray, deterministic: bool = False, mask: np.ndarray | None = None,
    ) -> ActingStep:
        """See `Algorithm`; `other` holds what `finish_rollout` turns into log-probabilities and values."""
        small = self._small_policy
        if small is not None and mask is None and (step := small.act(obs, deterministic, self.generator)) is not None:
            return step
        with torch.inference_mode(), self._precision():
            inputs = self._to_device(
                {name: torch.from_numpy(leaf) for name, leaf in obs.items()},
                {name: torch.from_numpy(state) for name, state in rhs.items()},
                torch.from_numpy(done), None if mask is None else torch.from_numpy(mask))
            action, clipped_action, dist_params, value, states = self.actor.act(
                *inputs[:3], deterministic, inputs[3], self.generator, **self._act_options)
        other = {"dist_params": dist_params} if value is None else {"dist_params": dist_params, "value": value}
        return ActingStep(
            action.cpu().numpy(), clipped_action.cpu().numpy(),
            {name: state.float().cpu().numpy() for name, state in states.items()},
            {name: row.cpu().numpy() for name, row in other.items()})

    def finish_rollout(self, rollout: RolloutData) -> None:
        """Add `logp` (T, E), `value` (T + 1, E) and `final_value` (K,), by the weights that acted; all in few passes.

        Values are left out if not `stores_values`. To be called once a rollout, in the collector, before its weights
        change.
        """
        dist_params = rollout.other.pop("dist_params").flatten(0, 1)
        num_steps, num_envs = rollout.reward.shape
        with torch.no_grad():
            mask = None if rollout.mask is None else rollout.mask[:num_steps].flatten(0, 1)
            logp = self.actor.log_prob_from_params(dist_params, rollout.action.flatten(0, 1), mask)
        rollout.other["logp"] = logp.view(num_steps, num_envs)
        if self.stores_values:
            rollout.other["value"], rollout.other["final_value"] = self.compute_values(
                rollout, rollout.other.get("value"))

    def compute_values(self, rollout: RolloutData, known: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """V of every observation of a rollout with the present weights, without gradient.

        Args:
            rollout: T steps of E environments.
            known: (T, E) values of all rows but the last, if there are.

        Returns:
            (T + 1, E) and, for its final observations, (K,); float32 on the CPU.
        """
        num_steps, num_envs = rollout.reward.shape
        start = 0 if known is None else num_steps
        rows = self._values(
            {name: leaf[start:].flatten(0, 1) for name, leaf in rollout.obs.items()},
            {name: state[start:].flatten(0, 1) for name, state in rollout.rhs.items()},
            rollout.done[start:].flatten(0, 1)).view(-1, num_envs)
        value = rows if known is None else torch.cat([known, rows])
        if not len(rollout.final_index):
            return value, torch.zeros(0)
        # The state after o_t is stored as the one before o_{t+1}, where it is zeroed only when it is used.
        t, e = rollout.final_index.unbind(1)
        return value, self._values(
            rollout.final_obs, {name: state[t + 1, e] for name, state in rollout.rhs.items()},
            torch.zeros(len(t), dtype=torch.bool))

    # Learning

    def batches(self, storage: Storage) -> Iterator[Batch]:
        """Every sample once an epoch."""
        return storage.generate_batches(num_mini_batch=self.num_mini_batch, num_epochs=self.num_epochs)

    @abstractmethod
    def terms(
        self, logp: Tensor, entropy: Tensor, value: Tensor, recorded: Recorded, parameters: Mapping[str, Any]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """What the loss is made of, sample by sample.

        Args:
            logp: (B,) or (L, B) log-probability of the recorded actions by the present policy.
            entropy: Its entropy.
            value: Its value.
            recorded: What was recorded or computed before.
            parameters: Values in force, floats or tensors without axes.

        Returns:
            Policy loss, value loss and entropy; and further measures without gradient. Each like `logp`.
        """

    def loss(
        self, logp: Tensor, entropy: Tensor, value: Tensor, recorded: Recorded, parameters: Mapping[str, Any],
        weights: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """The loss, and a vector of what `info_names` says; arguments as of `terms`.

        Args:
            logp: See `terms`.
            entropy: See `terms`.
            value: See `terms`.
            recorded: See `terms`.
            parameters: See `terms`.
            weights: (3,) weights of policy loss, value loss and entropy; more where `terms` gives more.
        """
        terms, measures = self.terms(logp, entropy, value, recorded, parameters)
        means = recorded.means(terms)
        loss = torch.dot(means, weights)
        measured = [loss.detach().unsqueeze(0), means.detach()]
        return loss, torch.cat([*measured, recorded.means(measures)] if measures else measured)

    def prepare_batch(self, batch: Batch) -> Batch:
        """See `Algorithm`; advantages are normalised where they are so by "minibatch"."""
        if self.advantage_normalization != "minibatch":
            return batch
        advantage = self._recorded(batch).normalized_advantage()
        return dataclasses.replace(batch, advantage=advantage, is_normalized=True)

    def compute_gradients(self, batch: Batch) -> tuple[list[Tensor], dict[str, float]]:
        """See `Algorithm`.

        Raises:
            ConfigError: `compile` is on, but this machine cannot.
        """
        weights = self._weights.of(*self._loss_weights())
        if self._compiled is not None:
            gradient, measured = self._compiled(batch, self.parameters, weights)
        else:
            self._flat.zero_grad()
            loss, measured = self._evaluate_loss(batch, self.parameters, weights)
            loss.backward()  # type: ignore[no-untyped-call]
            gradient = self._flat.grad
        info = dict(zip(self.info_names, measured.tolist(), strict=True))
        if not math.isfinite(info["loss"]):
            gradient = torch.full_like(gradient, math.nan)
        self._gradients = gradients = [gradient]
        return gradients, info

    # States

    def reseed(self, seed: int) -> None:
        """See `Algorithm`."""
        super().reseed(seed)
        if self._small_policy is not None:
            self._small_policy.noise = torch.zeros(0)  # what was drawn ahead

    def state_dict(self) -> dict[str, Any]:
        """See `Algorithm`; with the noise that was drawn ahead."""
        noise = torch.zeros(0) if self._small_policy is None else self._small_policy.noise
        return {**super().state_dict(), "noise": noise}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Algorithm`."""
        super().load_state_dict(state)
        if self._small_policy is not None:
            self._small_policy.noise = state["noise"]

    # Helpers

    def _loss_weights(self) -> list[float]:
        """The weights of the loss's terms that are in force."""
        return [1.0, self.parameters["value_loss_coef"], -self.parameters["entropy_coef"]]

    def _evaluate_loss(self, batch: Batch, parameters: Mapping[str, Any], weights: Tensor) -> tuple[Tensor, Tensor]:
        with self._precision():
            logp, entropy, value = self.actor.evaluate(batch.obs, batch.rhs, batch.done, batch.action, batch.mask)
        return self.loss(logp, entropy, value, self._recorded(batch), parameters, weights)

    @staticmethod
    def _recorded(batch: Batch) -> Recorded:
        return Recorded(batch.logp, batch.value, batch.ret, batch.advantage, batch.valid, batch.is_normalized)

    def _values(self, obs: Obs, rhs: Obs, done: Tensor) -> Tensor:
        """(B,) values in chunks that bound the memory, on the CPU."""
        size, values = rows_at_once(obs), []
        with torch.no_grad(), self._precision():
            for start in range(0, len(done), size):
                part = slice(start, start + size)
                chunk = ({k: v[part] for k, v in obs.items()}, {k: v[part] for k, v in rhs.items()}, done[part], None)
                if self.device.type != "cpu":
                    chunk = self._to_device(*chunk)
                values.append(self.actor.get_value(*chunk[:3])[0]["value"].float().cpu())
        return values[0] if len(values) == 1 else torch.cat(values)

    def _precision(self) -> AbstractContextManager[object]:
        if self.options.mixed_precision:
            return torch.autocast(self.device.type, torch.bfloat16)
        return nullcontext()  # a switched-off autocast would cost as much as a small layer

    def _to_device(self, obs: Obs, rhs: Obs, done: Tensor, mask: Tensor | None) -> tuple[Obs, Obs, Tensor, Any]:
        return (
            {name: leaf.to(self.device) for name, leaf in obs.items()},
            {name: state.to(self.device) for name, state in rhs.items()},
            done.to(self.device), None if mask is None else mask.to(self.device))


def rows_at_once(obs: Obs) -> int:
    """How many rows of observations, leaf -> (rows, ...), may go through a network at once."""
    return max(1, _CHUNK_BYTES // sum(4 * leaf[0].numel() for leaf in obs.values()))
