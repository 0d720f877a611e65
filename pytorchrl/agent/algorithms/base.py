"""What every on-policy algorithm shares: acting, flat gradients, the optimiser step, schedules and states.

T = steps of a rollout, E = environments, B = samples of a batch, P = scalars of the parameter vector.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pytorchrl.agent.actors.small_policy import SmallPolicy
from pytorchrl.agent.algorithms.compiled import CompiledGradient
from pytorchrl.agent.algorithms.optimizers import OPTIMIZERS, FlatOptimizer
from pytorchrl.agent.data import ActingStep, Arrays, Batch, Obs, RolloutData
from pytorchrl.agent.flat import FlatParameters
from pytorchrl.agent.options import Factory, Schedule, build_options, option
from pytorchrl.agent.options import Options as BaseOptions
from pytorchrl.agent.seeding import Stream, derive_seed, torch_generator
from pytorchrl.errors import ConfigError, NonFiniteUpdateError, WeightsError

if TYPE_CHECKING:
    from typing_extensions import Self

    from pytorchrl.agent.actors import OnPolicyActor

_CHUNK_BYTES = 2**25
"""Observations, counted as float32, that go through the network at once when a rollout is finished."""


class Recorded(NamedTuple):
    """What a loss needs of a batch besides the actor's evaluation, each (B,) or (L, B)."""

    logp: Tensor
    value: Tensor
    ret: Tensor
    advantage: Tensor
    valid: Tensor | None

    def means(self, samples: list[Tensor]) -> Tensor:
        """(k,) means of k measures over valid samples, from k tensors (B,) or (L, B)."""
        stacked = torch.stack(samples)
        if self.valid is None:
            return stacked.flatten(1).mean(1)
        return torch.where(self.valid, stacked, 0.0).flatten(1).sum(1) / self.valid.sum()

    def normalized_advantage(self) -> Tensor:
        """(A - mean) / (std + 1e-8) over valid samples, with the sample standard deviation; of one sample it is 0."""
        if self.valid is None:
            mean = self.advantage.mean()
            squares, others = (self.advantage - mean).square().sum(), max(self.advantage.numel() - 1, 1)
        else:
            mean = self.means([self.advantage])
            squares = torch.where(self.valid, self.advantage - mean, 0.0).square().sum()
            others = (self.valid.sum() - 1).clamp(min=1)  # type: ignore[assignment]
        std = (squares / others).sqrt()
        return (self.advantage - mean) / (std + 1e-8)


class Algorithm(ABC):
    """An on-policy algorithm; subclasses give the loss and its options."""

    @dataclass(frozen=True, kw_only=True)
    class Options(BaseOptions):
        """Options of every on-policy algorithm."""

        lr: float | Schedule = option(3e-4, help="Learning rate.", low=0.0, updatable=True)
        optimizer: str = option("adam", help="Kind of optimiser.", choices=OPTIMIZERS)
        adam_eps: float = option(1e-5, help="Epsilon outside Adam's root.", low=0.0, exclusive=True)
        rmsprop_eps: float = option(1e-5, help="Epsilon of RMSProp.", low=0.0, exclusive=True)
        rmsprop_decay: float = option(0.99, help="Decay of RMSProp's mean square.", low=0.0, high=1.0)
        max_grad_norm: float | None = option(
            0.5, help="Largest global norm of a gradient, None for no limit.", low=0.0, exclusive=True, updatable=True)
        gamma: float = option(0.99, help="Discount.", low=0.0, high=1.0)
        num_epochs: int = option(4, help="Passes over each rollout.", low=1)
        num_mini_batch: int = option(4, help="Parts of a pass, one update each.", low=1)
        value_loss_coef: float = option(0.5, help="Weight of the value loss.", low=0.0, updatable=True)
        entropy_coef: float | Schedule = option(0.01, help="Weight of the entropy bonus.", low=0.0, updatable=True)
        advantage_normalization: str = option(
            "minibatch", help="Over which samples advantages are normalised.", choices=("minibatch", "batch", "none"))
        compile: bool = option(False, help="Compile loss and gradient into one kernel graph (slow first update).")
        mixed_precision: bool = option(False, help="Run networks in bfloat16; parameters stay float32.")

    off_policyness: ClassVar[str] = "on"
    info_names: ClassVar[tuple[str, ...]]
    """Names of what `loss` measures: the loss, its three terms, and what `terms` adds."""
    recompute_advantages: bool = False

    @classmethod
    def create_factory(cls, **options: Any) -> Factory[Self]:
        """A factory of this algorithm; raises `ConfigError` for a wrong option."""
        return Factory(cls, build_options(cls, options))

    def __init__(self, options: Any, *, actor: OnPolicyActor, seed: int, device: str = "cpu") -> None:
        """Use `create_factory`.

        Args:
            options: Checked options.
            actor: The actor whose parameters it moves.
            seed: Of the actions drawn.
            device: Where the actor lives.

        Raises:
            ConfigError: `compile` with an actor that has memory.
        """
        if options.compile and actor.is_recurrent:
            raise ConfigError(
                "compile=True needs an actor without memory, whose graph does not grow with the length of a sequence; "
                "set compile=False or recurrent_net=None")
        self.options = options
        self.actor, self.device = actor, torch.device(device)
        self.generator = torch_generator(derive_seed(seed, Stream.ACTING), self.device)
        self.groups = {"all": FlatParameters(dict(actor.named_parameters()))}
        self._flat = self.groups["all"]
        self._optimizer = FlatOptimizer(
            options.optimizer, self._flat.data, adam_eps=options.adam_eps, rmsprop_eps=options.rmsprop_eps,
            rmsprop_decay=options.rmsprop_decay)
        self._gradient = self._flat.grad
        self._small_policy: SmallPolicy | None = None
        if self.device.type == "cpu" and not options.mixed_precision and SmallPolicy.suits(actor):
            # Not before the parameters lie where they stay.
            self._small_policy = SmallPolicy(actor)
        self._compiled = CompiledGradient(self._evaluate_loss, self._flat.params) if options.compile else None
        self.gamma: float = options.gamma
        self.num_epochs: int = options.num_epochs
        self.num_mini_batch: int = options.num_mini_batch
        self.advantage_normalization: str = options.advantage_normalization
        self.schedules: dict[str, Schedule] = {}
        self.parameters: dict[str, float] = {}
        for name in self._updatable():
            self._set_parameter(name, getattr(options, name))

    # Acting

    def acting_step(
        self, obs: Arrays, rhs: Arrays, done: np.ndarray, deterministic: bool = False, mask: np.ndarray | None = None,
    ) -> ActingStep:
        """Decide for E environments.

        Args:
            obs: Leaf -> (E, ...), only read.
            rhs: Network -> (E, H), the memory before these observations.
            done: (E,) bool, whether an observation is the first of its episode.
            deterministic: Take the most likely action instead of drawing one.
            mask: (E, n) bool, true where an action is allowed.

        Returns:
            Actions, the memory after, and in `other` what `finish_rollout` turns into log-probabilities and values.
        """
        small = self._small_policy
        if small is not None and mask is None and (step := small.act(obs, deterministic, self.generator)) is not None:
            return step
        with torch.inference_mode(), self._precision():
            inputs = self._to_device(
                {name: torch.from_numpy(leaf) for name, leaf in obs.items()},
                {name: torch.from_numpy(state) for name, state in rhs.items()},
                torch.from_numpy(done), None if mask is None else torch.from_numpy(mask))
            action, clipped_action, dist_params, value, states = self.actor.act(
                *inputs[:3], deterministic, inputs[3], self.generator)
        other = {"dist_params": dist_params} if value is None else {"dist_params": dist_params, "value": value}
        return ActingStep(
            action.cpu().numpy(), clipped_action.cpu().numpy(),
            {name: state.float().cpu().numpy() for name, state in states.items()},
            {name: row.cpu().numpy() for name, row in other.items()})

    def finish_rollout(self, rollout: RolloutData) -> None:
        """Add `logp` (T, E), `value` (T + 1, E) and `final_value` (K,), by the weights that acted; all in few passes.

        To be called once a rollout, in the collector, before its weights change.
        """
        dist_params = rollout.other.pop("dist_params").flatten(0, 1)
        num_steps, num_envs = rollout.reward.shape
        with torch.no_grad():
            mask = None if rollout.mask is None else rollout.mask[:num_steps].flatten(0, 1)
            logp = self.actor.log_prob_from_params(dist_params, rollout.action.flatten(0, 1), mask)
        rollout.other["logp"] = logp.view(num_steps, num_envs)
        rollout.other["value"], rollout.other["final_value"] = self.compute_values(rollout, rollout.other.get("value"))

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
            weights: (3,) weights of policy loss, value loss and entropy.
        """
        terms, measures = self.terms(logp, entropy, value, recorded, parameters)
        means = recorded.means(terms)
        loss = torch.dot(means, weights)
        measured = [loss.detach().unsqueeze(0), means.detach()]
        return loss, torch.cat([*measured, recorded.means(measures)] if measures else measured)

    def compute_gradients(self, batch: Batch) -> tuple[list[Tensor], dict[str, float]]:
        """The gradient of the mean loss over a batch's valid samples; changes nothing.

        Returns:
            One flat gradient per group, (P,) float32, valid until the next call; and the loss and its parts. If the
            loss is not finite, the gradient is NaN throughout: it alone, or a mean that it went into, then tells that
            no step is to be made.

        Raises:
            ConfigError: `compile` is on, but this machine cannot.
        """
        weights = torch.tensor(
            [1.0, self.parameters["value_loss_coef"], -self.parameters["entropy_coef"]], device=self.device)
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
        self._gradient = gradient
        return [gradient], info

    def apply_gradients(self, gradients: list[Tensor] | None = None) -> dict[str, float]:
        """Clip by the global norm of each group and make one optimiser step.

        Args:
            gradients: One (P,) gradient per group, averaged over workers and only read; None takes those of the last
                `compute_gradients`.

        Returns:
            `grad_norm`, before clipping, and `lr`.

        Raises:
            NonFiniteUpdateError: A gradient holds NaN or infinity; nothing was changed.
        """
        gradient = self._gradient if gradients is None else gradients[0]
        self._flat.check(gradient)
        gradient = gradient.to(self._flat.data.device)  # from workers it comes on the CPU
        norm = float(torch.linalg.vector_norm(gradient))
        if not math.isfinite(norm):
            raise NonFiniteUpdateError(f"the norm of the gradient is {norm}; the update was not made")
        limit = self.parameters.get("max_grad_norm", math.inf)
        scale = 1.0 if norm <= limit else limit / (norm + 1e-6)
        self._optimizer.step(self._flat.data, gradient, self.parameters["lr"], scale)
        return {"grad_norm": norm, "lr": self.parameters["lr"]}

    # Parameters that change while training

    def update_algorithm_parameter(self, name: str, value: Any) -> None:
        """Set an option that may change while training; a number ends its schedule, a `Schedule` starts one.

        Raises:
            KeyError: There is no such option, or it is fixed.
            ConfigError: The value is not allowed; nothing was changed.
        """
        if name not in self._updatable():
            raise KeyError(f"{type(self).__name__} cannot update {name!r}; it can {', '.join(self._updatable())}")
        self.options = dataclasses.replace(self.options, **{name: value})
        self._set_parameter(name, value)

    def follow_schedules(self, env_steps: int, target_steps: int) -> dict[str, float]:
        """Set each scheduled parameter to its value after `env_steps` of the whole experiment; returns those set."""
        values = {name: schedule.value(env_steps, target_steps) for name, schedule in self.schedules.items()}
        self.parameters = {**self.parameters, **values}
        return values

    # States

    def acting_state(self) -> dict[str, Tensor]:
        """Copies of what acting needs: the parameter vector `all` and the actor's buffers, on the CPU."""
        return {name: tensor.detach().cpu().clone() for name, tensor in self._acting_tensors()}

    def load_acting_state(self, state: Mapping[str, Tensor]) -> None:
        """Copy an `acting_state()` over the actor; no optimiser, schedule or generator moves.

        Raises:
            WeightsError: Names or shapes do not fit; nothing was changed.
        """
        mine = dict(self._acting_tensors())
        if mine.keys() != state.keys():
            raise WeightsError(f"acting state has {sorted(state)}, this actor needs {sorted(mine)}")
        for name, tensor in mine.items():
            if tensor.shape != state[name].shape:
                raise WeightsError(
                    f"{name} of the acting state has shape {tuple(state[name].shape)}, this actor needs "
                    f"{tuple(tensor.shape)}; both sides must build the same actor")
        with torch.no_grad():
            for name, tensor in mine.items():
                tensor.copy_(state[name])

    def gradient_state(self) -> dict[str, Any]:
        """What computing gradients needs: the `acting` state and the `parameters` in force."""
        return {"acting": self.acting_state(), "parameters": dict(self.parameters)}

    def load_gradient_state(self, state: Mapping[str, Any]) -> None:
        """Copy a `gradient_state()`; raises `WeightsError` where it does not fit."""
        self.load_acting_state(state["acting"])
        self.parameters = dict(state["parameters"])

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on exactly: the `gradient` state, optimiser moments and the acting generator."""
        return {
            "gradient": self.gradient_state(),
            "schedules": {name: dataclasses.asdict(schedule) for name, schedule in self.schedules.items()},
            "optimizer": self._optimizer.state_dict(),
            "generator": self.generator.get_state(),
            "noise": torch.zeros(0) if self._small_policy is None else self._small_policy.noise,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict()`; raises `WeightsError` where it does not fit."""
        self.load_gradient_state(state["gradient"])
        self.schedules = {name: Schedule(**schedule) for name, schedule in state["schedules"].items()}
        self._optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"])
        if self._small_policy is not None:
            self._small_policy.noise = state["noise"]

    # Helpers

    def _evaluate_loss(self, batch: Batch, parameters: Mapping[str, Any], weights: Tensor) -> tuple[Tensor, Tensor]:
        with self._precision():
            logp, entropy, value = self.actor.evaluate(batch.obs, batch.rhs, batch.done, batch.action, batch.mask)
        recorded = Recorded(batch.logp, batch.value, batch.ret, batch.advantage, batch.valid)
        return self.loss(logp, entropy, value, recorded, parameters, weights)

    def _updatable(self) -> list[str]:
        return [field.name for field in dataclasses.fields(self.options) if field.metadata.get("updatable")]

    def _set_parameter(self, name: str, value: float | Schedule | None) -> None:
        # New dictionaries, so that a thread that reads the old ones never sees half a change.
        schedules = {other: schedule for other, schedule in self.schedules.items() if other != name}
        parameters = {other: number for other, number in self.parameters.items() if other != name}
        if isinstance(value, Schedule):
            schedules[name], parameters[name] = value, value.start
        elif value is not None:
            parameters[name] = float(value)
        self.schedules, self.parameters = schedules, parameters

    def _acting_tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield "all", self._flat.data
        yield from self.actor.state_buffers().items()

    def _values(self, obs: Obs, rhs: Obs, done: Tensor) -> Tensor:
        """(B,) values in chunks that bound the memory, on the CPU."""
        row_bytes = sum(4 * leaf[0].numel() for leaf in obs.values())
        size = max(1, _CHUNK_BYTES // row_bytes)
        values = []
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
