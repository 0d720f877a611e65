"""The base class of replay algorithms, with random actions at the start, regular updates and target networks.

E = environments, B = transitions of a batch, P = scalars of a group's parameter vector.
"""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from collections.abc import Hashable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import ClassVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from pytorchrl.agent.algorithms.base import ActOnDevice, Algorithm
from pytorchrl.agent.algorithms.compiled import CompiledLosses, ReadNames, ReadOptions
from pytorchrl.agent.algorithms.precision import BatchShape, PrecisionOptions, example_rows, precision
from pytorchrl.agent.contracts import check_choice, check_losses, check_target_groups, overrides
from pytorchrl.agent.data import (
    PREVIOUS,
    ActingStep,
    Arrays,
    BatchStorage,
    DataKind,
    Obs,
    ReplayBatch,
    RolloutData,
    SequenceBatch,
    TensorActing,
)
from pytorchrl.agent.flat import FlatParameters
from pytorchrl.agent.noise import NoiseRecorder, NoiseSource
from pytorchrl.agent.options import option
from pytorchrl.agent.schedules import linear
from pytorchrl.agent.seeding import Stream, derive_seed, torch_generator
from pytorchrl.agent.transfers import on_host
from pytorchrl.errors import ConfigError, NonFiniteUpdateError, Problem
from pytorchrl.support.untyped import StateDict

Losses = tuple[dict[str, Tensor], dict[str, Tensor], Tensor]
"""The result of `ReplayAlgorithm.losses`."""

START = "random_actions"
"""Name of the parameter that decreases from 1 to 0 over the start steps; actions are random while it is above 0."""

UPDATE_EVERY_HELP = "Number of env steps after which num_updates updates are made."
NUM_UPDATES_HELP = "Number of updates that are made every update_every env steps."
POLYAK_HELP = "Weight of a target network's old parameters in each of its updates; 0 copies the online network."
TARGET_UPDATE_INTERVAL_HELP = "Number of updates of the trained networks per update of the target networks."


class ReplayAlgorithm(Algorithm):
    """The base class of algorithms that learn from transitions of any policy.

    In the first `start_steps` env steps of the whole experiment, actions are uniformly random. Collectors act randomly
    while the scheduled parameter `random_actions` is above 0. This parameter is sent with the weights, and reaches 0
    when all collectors together have taken `start_steps` steps. Learning starts when `start_steps` transitions have
    been inserted into the storage.

    Target networks are copies of networks of the actor. They change only in `apply_gradients`.

    Attributes:
        start_steps, update_every, num_updates, mini_batch_size: Values of these options.
        num_updates_made: Number of updates that `apply_gradients` has made.
        targets: The target network of each parameter group that has one.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(PrecisionOptions, Algorithm.Options):
        """Options of all algorithms that learn from replay."""

        max_grad_norm: float | None = option(
            None, help="Largest global norm of a group's gradient; None means no limit.", low=0.0, exclusive=True,
            updatable=True)
        start_steps: int = option(
            10_000, help="Number of env steps, over the whole experiment, before the first update; their actions are "
                         "uniformly random.", low=0)
        update_every: int = option(50, help=UPDATE_EVERY_HELP, low=1)
        num_updates: int = option(50, help=NUM_UPDATES_HELP, low=1)
        mini_batch_size: int = option(256, help="Transitions per batch.", low=1)
        polyak: float = option(0.995, help=POLYAK_HELP, low=0.0, high=1.0)
        target_update_interval: int = option(1, help=TARGET_UPDATE_INTERVAL_HELP, low=1)

        def contradictions(self) -> Iterator[Problem]:
            """Refuse a `polyak` of 1, with which target networks would never change."""
            yield from super().contradictions()
            if self.polyak == 1.0:
                yield Problem("polyak must be below 1, got 1.0, which would never move the target networks",
                              "give 0.995", ("polyak",))

    learns_from = DataKind.TRANSITIONS
    actor_options: ClassVar[Mapping[str, tuple[object, ...]]] = {"recurrent_net": (None,), "distribution": (None,)}
    target_groups: ClassVar[tuple[str, ...]]
    """Parameter groups that have a target network."""

    def __init__(self, options: ReplayAlgorithm.Options, *, actor: nn.Module, seed: int, device: str = "cpu") -> None:
        """Build the algorithm; see `Algorithm` for the arguments."""
        super().__init__(options, actor=actor, seed=seed, device=device)
        self._has_memory = bool(getattr(self.actor, "is_recurrent", False))
        if self._has_memory:
            self.learns_from = DataKind.SEQUENCES
        # Losses draw noise from a separate generator, because another thread may be acting with `self.generator`.
        self.update_generator = torch_generator(derive_seed(seed, Stream.BATCHES), self.device)
        networks = self.actor.networks()
        self.targets: dict[str, nn.Module] = {}
        check_target_groups(self, networks)
        for name in self.groups_with_targets():
            self.targets[name] = copy.deepcopy(networks[name]).requires_grad_(False)
        self._target_vectors = {
            name: FlatParameters(dict(target.named_parameters())) for name, target in self.targets.items()}
        self._target_buffers = {
            name: [key for key, _ in target.named_buffers()] for name, target in self.targets.items()}
        self.start_steps: int = options.start_steps
        self.update_every: int = options.update_every
        self.num_updates: int = options.num_updates
        self.mini_batch_size: int = options.mini_batch_size
        self.num_updates_made = 0
        self._is_choice_checked = self._is_loss_checked = False
        self._needed: tuple[str, ...] | None = None  # see `needs`; None: all groups
        self._compiled = CompiledLosses(
            self._losses_with_noise, {name: group.params for name, group in self.groups.items()},
            [self.actor, *self.targets.values()],
            has_memory=self._has_memory) if options.is_compiled else None
        self._twin: ReplayAlgorithm | None = None  # shallow copy of `self`; the copy's `losses` are compiled
        self._names: list[str] = []  # names of the latest losses and measures
        # Maps the key of a batch and of the groups to update to the shapes of the noise that the losses draw for such a
        # batch, and to the names of the losses and measures.
        self._plans: dict[Hashable, tuple[list[torch.Size], list[str]]] = {}
        self._set_parameter(START, linear(1.0, 0.0, self.start_steps) if self.start_steps else 0.0)

    @override
    def trained_parameters(self) -> dict[str, dict[str, nn.Parameter]]:
        """Return one group for each network of the actor."""
        return {name: dict(network.named_parameters()) for name, network in self.actor.networks().items()}

    def groups_with_targets(self) -> tuple[str, ...]:
        """Return the parameter groups that have a target network; by default, `target_groups`."""
        return self.target_groups

    # Acting

    @abstractmethod
    def choose(self, obs: Obs, done: Tensor, deterministic: bool, mask: Tensor | None) -> Tensor:
        """Choose actions with the current weights; random numbers come from `self.generator`.

        Args:
            obs: Leaf -> (E, ...), as environments return them; `actor.normalize` converts them to inputs of networks.
                For an actor with memory, the result of `actor.remember`.
            done: (E,) bool, whether an observation is the first of its episode.
            deterministic: Whether to choose the best actions instead of exploring.
            mask: (E, n) bool, true where an action is allowed, or None.

        Returns:
            Actions (E, ...) as they are stored, in float32 for a Box and int64 otherwise. The actor's `to_env` converts
            them to actions of the environments.
        """

    def choose_small(self, obs: Arrays, deterministic: bool) -> ActingStep | None:
        """Choose the same actions as `choose`, but in NumPy, which is faster for small networks.

        Args:
            obs: Leaf -> (E, ...), as environments return them.
            deterministic: Whether to choose the best actions instead of exploring.

        Returns:
            The result of `acting_step`. None if NumPy cannot compute the network, or if the network or E is too large
            for NumPy to be faster.
        """
        return None

    def acting_step(
        self, obs: Arrays, rhs: Arrays, done: np.ndarray, deterministic: bool = False, mask: np.ndarray | None = None,
    ) -> ActingStep:
        """Choose the actions of E environments; see `Algorithm`. In the result, `other` is empty.

        The memory processes each observation, even if the action is random.
        """
        is_random = self.parameters[START] > 0 and not deterministic
        if mask is None and not is_random and (chosen := self.choose_small(obs, deterministic)) is not None:
            return chosen
        with torch.inference_mode():
            allowed, states = None if mask is None else self._on_device(mask), dict[str, Tensor]()
            if self._has_memory or not is_random:
                starts, seen = self._on_device(done), {name: self._on_device(leaf) for name, leaf in obs.items()}
                if self._has_memory:
                    seen, states = self.actor.remember(
                        seen, {name: self._on_device(state) for name, state in rhs.items()}, starts)
            if is_random:
                action = self.random_actions(len(done), allowed)
            else:
                action = self.choose(seen, starts, deterministic, allowed)
                if not self._is_choice_checked:
                    check_choice(self, action, len(done))
                    self._is_choice_checked = True
            action, clipped_action, *rows = on_host(action, self.actor.to_env(action), *states.values())
        return ActingStep(action.numpy(), clipped_action.numpy(),
                          {name: row.numpy() for name, row in zip(states, rows, strict=True)}, {})

    def _act_on_device(self, obs: Obs, rhs: Obs, done: Tensor) -> TensorActing:
        states: Obs = {}
        if self._has_memory:
            obs, states = self.actor.remember(obs, rhs, done)
        if self.parameters[START] > 0:
            action = self.random_actions(len(done), None)
        else:
            action = self.choose(obs, done, False, None)
        return TensorActing(action, self.actor.to_env(action), states, {})

    @property
    @override
    def act_on_device(self) -> ActOnDevice | None:
        return None if overrides(self, ReplayAlgorithm, "acting_step") else self._act_on_device

    def random_actions(self, num_envs: int, mask: Tensor | None) -> Tensor:
        """Draw actions (E, ...) uniformly from those that `mask` (E, n) allows; see `ReplayActor`."""
        actions: Tensor = self.actor.random_actions(num_envs, mask, self.generator)
        return actions

    def finish_rollout(self, rollout: RolloutData) -> None:
        """Add nothing to the rollout, because values are computed during learning."""

    # Learning

    def batches(  # type: ignore[override] # batches contain transitions
        self, storage: BatchStorage,
    ) -> Iterator[ReplayBatch]:
        """Return `num_updates` batches for every `update_every` transitions inserted since the previous call.

        The first `start_steps` transitions do not count. If the number of new transitions is not a multiple of
        `update_every`, the remainder counts in the next call. The number of updates per transition is therefore the
        same for rollouts of any size.
        """
        inserted = storage.counters["inserted"]
        due = self._num_stages(inserted) - self._num_stages(storage.num_learned_from)
        storage.num_learned_from = inserted
        if not due:
            return iter(())
        return storage.generate_batches(num_mini_batch=due * self.num_updates, mini_batch_size=self.mini_batch_size)

    def _num_stages(self, num_transitions: int) -> int:
        """Return how many blocks of `num_updates` updates are due in total after `num_transitions` insertions."""
        return max(0, num_transitions - self.start_steps) // self.update_every

    @abstractmethod
    def losses(self, batch: ReplayBatch) -> Losses:
        """Compute the losses of a batch; a subclass may add to the losses and measures of its base class.

        Args:
            batch: B transitions, with importance weights that correct for priorities.

        Returns:
            Three values. The first maps a group to its scalar loss, which is minimized over the parameters of that
            group alone and has its own autograd graph. The second maps a name to a measure: an additional scalar
            without gradient, which `info` reports under that name. The third contains the absolute TD errors (B,)
            without gradient, for priorities.
        """

    def needs(self, group: str) -> bool:
        """Return whether the current update changes `group`; if not, `losses` may return any number for this group.

        Losses thereby omit computations, for example of the policy with the option `policy_delay`.
        """
        return self._needed is None or group in self._needed

    def td_errors(self, batch: ReplayBatch) -> Tensor:
        """Return the absolute TD errors (B,) of a batch, without gradient."""
        with torch.no_grad(), self._precision():
            return self.losses(batch)[2]

    @override
    def compute_gradients(  # type: ignore[override] # batches contain transitions
        self, batch: ReplayBatch,
    ) -> tuple[list[Tensor], dict[str, float | Tensor]]:
        """Compute the gradients of the losses of all groups.

        An update may leave some groups unchanged: for example, TD3 delays the updates of the policy. If each gradient
        is applied before the next one is computed (`applies_at_once`), this method skips the groups that the next
        update does not change. The losses of these groups are not reported, and their gradients are zero.

        Returns:
            A gradient (P,) for each group, and a dictionary. The dictionary contains the losses and measures as
            numbers, and `errors`: the absolute TD errors (B,) float32 on the CPU, from which priorities are computed.

        Raises:
            ConfigError: `compile=True`, but this machine cannot compile, or the actor has memory and is on the CPU.
            ContractError: `losses` of a subclass returned values of the wrong type or shape; only the first batch is
                checked.
        """
        due = tuple([name for name in self.groups if not self.applies_at_once or self.is_due(name)])
        if self._compiled is not None and _plan_key(batch, due) not in self._plans:
            # Discard the result: a resumed run has no plans yet, but must compute the same gradients.
            state = self.update_generator.get_state()
            with self.mode.learning(self.update_generator):
                self._uncompiled_gradients(batch, due)
            self.update_generator.set_state(state)
            self.mode.undo()
        with self.mode.learning(self.update_generator):
            gradients, measured, errors = self._uncompiled_gradients(batch, due) if self._compiled is None \
                else self._compiled_gradients(self._compiled, batch, due)
        errors, measured = on_host(errors, measured)
        numbers = measured.tolist()
        values, norms = numbers[:len(self._names)], numbers[len(self._names):]
        if not all(map(math.isfinite, values)):
            gradients, norms = [torch.full_like(gradient, math.nan) for gradient in gradients], [math.nan] * len(norms)
            self.mode.undo()
        self._gradients = gradients
        self._keep_norms(gradients, norms)
        return gradients, {**dict(zip(self._names, values, strict=True)), "errors": errors}

    def example_batch(self, shape: BatchShape) -> ReplayBatch | SequenceBatch:
        """Return a batch of zeros with random actions and without burn-in, to measure the time of a gradient."""
        count = shape.columns
        if self._has_memory:
            return self._example_sequences(count, shape.length)
        obs, zeros = example_rows(self.actor.example_obs(), count), torch.zeros(count, device=self.device)
        return ReplayBatch(
            obs=obs, action=self.random_actions(count, None), ret=zeros, discount=zeros + self.gamma, next_obs=obs,
            weight=zeros + 1, ids=torch.arange(count), num_samples=count)

    def _example_sequences(self, count: int, length: int) -> SequenceBatch:
        def rows(row: Tensor, number: int = length) -> Tensor:
            return row.expand(number, *row.shape)

        states, zeros = self.actor.initial_states(count), torch.zeros(count, device=self.device)
        previous = states.pop(PREVIOUS, None)
        return SequenceBatch(
            obs={name: rows(leaf, length + 1) for name, leaf in example_rows(self.actor.example_obs(), count).items()},
            done=rows(zeros > 0, length + 1), rhs=states, action=rows(self.random_actions(count, None)),
            ret=rows(zeros), discount=rows(zeros + self.gamma),
            next_row=torch.arange(1, length + 1, device=self.device)[:, None].expand(length, count),
            valid=rows(zeros == 0), weight=zeros + 1, ids=torch.arange(count), burn_in=0,
            previous=None if previous is None else rows(previous, length + 1), num_samples=count * length)

    def _uncompiled_gradients(self, batch: ReplayBatch, due: tuple[str, ...]) -> tuple[list[Tensor], Tensor, Tensor]:
        """Compute the gradients of the losses of the groups in `due`.

        Returns:
            Three values: the gradients of all groups, zero for each group that is not in `due`; a vector of the losses
            of the groups in `due`, followed by the measures and by the norms of the gradients; and the TD errors.
        """
        for group in self.groups.values():
            group.zero_grad()
        recorder = None if self._compiled is None else NoiseRecorder(self.update_generator)
        self._needed = due if self._is_loss_checked else None
        try:
            with self._precision():
                found = self.losses(batch) if recorder is None else self._recorded_losses(batch, recorder)
        finally:
            self._needed = None
        if not self._is_loss_checked:
            check_losses(self, found, batch)
            self._is_loss_checked = True
        losses, measures, errors = found
        losses = {name: loss for name, loss in losses.items() if name in due}
        self._names = [*("loss" if name == "q" else f"loss_{name}" for name in losses), *measures]
        if recorder is not None:
            self._plans[_plan_key(batch, due)] = recorder.shapes, self._names
        for name, loss in losses.items():
            torch.autograd.backward(loss, inputs=self.groups[name].trained)
        gradients = [group.grad for group in self.groups.values()]
        norms = [torch.linalg.vector_norm(gradient) for gradient in gradients]
        return gradients, torch.stack([*losses.values(), *measures.values(), *norms]), errors.detach()

    def _compiled_gradients(
        self, compiled: CompiledLosses, batch: ReplayBatch, due: tuple[str, ...],
    ) -> tuple[list[Tensor], Tensor, Tensor]:
        """Return the same values as `_uncompiled_gradients`."""
        shapes, self._names = self._plans[_plan_key(batch, due)]
        draws = [torch.empty(shape, device=self.device).normal_(generator=self.update_generator) for shape in shapes]
        if self._twin is None:
            self._twin = copy.copy(self)
        self._twin._needed = due
        return compiled(batch, draws, due)

    def _recorded_losses(self, batch: ReplayBatch, recorder: NoiseRecorder) -> Losses:
        """Return the losses, and record the shape of each noise tensor that they draw.

        In later calls, the compiled losses receive noise of these shapes as inputs. The recorder replaces the random
        generator in a shallow copy of this object, because another thread may be using the object itself.

        Raises:
            ConfigError: The losses cannot be compiled, because they draw noise without `standard_normal`, or because
                they read updatable options. The graph would never see later values of such options.
        """
        twin, names = copy.copy(self), set[str]()
        twin.parameters = cast("dict[str, float]", ReadNames(self.parameters, names))
        twin.options = ReadOptions(self.options, names)
        twin.update_generator = cast("torch.Generator", recorder)
        try:
            found = twin.losses(batch)
        except TypeError as error:
            if "Generator" not in str(error):
                raise
            raise ConfigError(f"{type(self).__name__} cannot be compiled, because its losses draw noise from "
                              f"update_generator directly ({str(error).splitlines()[0]}); use "
                              "pytorchrl.agent.noise.standard_normal, or set compile=False") from error
        if read := sorted(names & {*self.parameters, *self.updatable}):
            raise ConfigError(f"{type(self).__name__} cannot be compiled, because its losses read updatable options "
                              f"({', '.join(read)}), which would be constant in the graph; set compile=False")
        return found

    def _losses_with_noise(self, batch: ReplayBatch, noise: NoiseSource) -> Losses:
        """Return the losses of a batch, computed with noise from `noise` instead of from the random generator."""
        assert self._twin is not None
        self._twin.update_generator = cast("torch.Generator", noise)
        with self._precision():
            return self._twin.losses(batch)

    def _precision(self) -> AbstractContextManager[object]:
        return precision(self.device, self.options.is_mixed)

    def _on_device(self, array: np.ndarray) -> Tensor:
        # without waiting for the device, like `on_device`
        return torch.from_numpy(array).to(self.device, non_blocking=True)

    @override
    def apply_gradients(self, gradients: list[Tensor] | None = None) -> dict[str, float]:
        """Update the weights and, every `target_update_interval` updates, the target networks."""
        try:
            info = super().apply_gradients(gradients)
        except NonFiniteUpdateError:
            self.mode.undo()
            raise
        self.mode.updated()
        self.num_updates_made += 1
        if self.num_updates_made % self.options.target_update_interval == 0:
            self._move_targets()
        return info

    def _move_targets(self) -> None:
        """Set target parameters to polyak * target + (1 - polyak) * network, and copy the buffers of the modules."""
        polyak, networks = self.options.polyak, self.actor.networks()
        for name, vector in self._target_vectors.items():
            if polyak == 0:
                vector.data.copy_(self.groups[name].data)
            else:
                vector.data.lerp_(self.groups[name].data, 1 - polyak)
            for key in self._target_buffers[name]:
                self.targets[name].get_buffer(key).copy_(networks[name].get_buffer(key))

    # States

    @override
    def reseed(self, seed: int) -> None:
        super().reseed(seed)
        self.update_generator.manual_seed(derive_seed(seed, Stream.BATCHES))

    @override
    def state_dict(self) -> StateDict:
        """Return the state, including the number of updates and the state of `update_generator`."""
        return {
            **super().state_dict(), "num_updates_made": self.num_updates_made,
            "update_generator": self.update_generator.get_state()}

    @override
    def load_state_dict(self, state: StateDict) -> None:
        super().load_state_dict(state)
        self.num_updates_made = state["num_updates_made"]
        self.update_generator.set_state(state["update_generator"])

    # Helpers

    @override
    def acting_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name in self.actor.acting_networks():
            yield name, self.groups[name].data
        yield from self.actor.state_buffers().items()

    @override
    def _learning_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of the learning state, such as critics and target networks."""
        acting = self.actor.acting_networks()
        for name, group in self.groups.items():
            if name not in acting:
                yield name, group.data
        for name, target in self.targets.items():
            yield f"target_{name}", self._target_vectors[name].data
            for key in self._target_buffers[name]:
                yield f"target_{name}.{key}", target.get_buffer(key)


def _plan_key(batch: ReplayBatch, due: tuple[str, ...]) -> Hashable:
    """Return what the noise of losses depends on: the shapes of the batch, and the groups to update."""
    return batch.ret.shape, *[leaf.shape for leaf in batch.obs.values()], due
