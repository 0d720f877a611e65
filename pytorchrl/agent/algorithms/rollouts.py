"""The base class of algorithms that learn from rollouts: values, passes over minibatches, and weighted terms of a loss.

T = steps in a rollout, E = environments, B = samples in a batch, L = steps in a sequence (for actors with memory).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from typing_extensions import override

from pytorchrl.agent.algorithms.base import Algorithm
from pytorchrl.agent.algorithms.compiled import CompiledGradient, Constants
from pytorchrl.agent.algorithms.precision import PrecisionOptions, precision
from pytorchrl.agent.algorithms.rnd import RND
from pytorchrl.agent.contracts import check_first_batch, check_per_sample, check_terms, check_weights
from pytorchrl.agent.data import Batch, BatchStorage, DataKind, LossParameters, Obs, RolloutData, ValuesOf
from pytorchrl.agent.names import checked_names
from pytorchrl.agent.options import Factory, option
from pytorchrl.agent.schedules import Schedule
from pytorchrl.agent.transfers import on_device, on_host
from pytorchrl.errors import ConfigError
from pytorchrl.support.tracebacks import brief_errors

if TYPE_CHECKING:
    from typing_extensions import Self

NUM_MINI_BATCH_HELP = "Number of minibatches per pass over a rollout; there is one update per minibatch."

_CHUNK_BYTES = 2**25
"""Maximum size in bytes of the observations, as float32, in one forward pass that computes values."""
_CACHE_ROWS = 4096
"""Maximum number of rows in such a pass on a CPU. The layers of a small network then stay in the processor's cache: the
values of 131,072 observations of CartPole take 16 ms instead of 49 ms, and 70 MB less memory."""


StepsFunction = Callable[[Obs, Obs, Tensor, Tensor, "Tensor | None"], tuple[Tensor, ...]]
"""A function of consecutive steps; see `RolloutAlgorithm.evaluate_steps`."""


class RolloutAlgorithm(Algorithm):
    """The base class of algorithms that learn from whole rollouts of their newest policy.

    The loss is the sum of weight * mean(term) over named terms; each mean is taken over the valid samples of a batch. A
    subclass acts, finishes rollouts, and defines `loss_weights`, `_evaluate_loss` and `_values_of`.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(PrecisionOptions, Algorithm.Options):
        """Options of every algorithm that learns from rollouts."""

        lr: float | Schedule = option(3e-4, help="Learning rate.", low=0.0, updatable=True)
        num_epochs: int = option(4, help="Passes over each rollout.", low=1)
        num_mini_batch: int = option(4, help=NUM_MINI_BATCH_HELP, low=1)
        mini_batch_size: int | None = option(
            None, low=1, help="Largest number of steps per minibatch, instead of num_mini_batch; a pass is split into "
                              "as few minibatches as possible, of nearly equal size.")

    learns_from = DataKind.ROLLOUTS
    info_names: tuple[str, ...]
    """Names of the values in `info`: "loss", the terms and the measures; empty before the first batch."""
    recompute_advantages: bool = False
    intrinsic: RND | None = None
    """The intrinsic reward, which the storage adds to advantages; None if there is none."""

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

    def __init__(self, options: RolloutAlgorithm.Options, *, actor: nn.Module, seed: int, device: str = "cpu") -> None:
        """Build the algorithm; see `Algorithm` for the arguments."""
        super().__init__(options, actor=actor, seed=seed, device=device)
        (self._flat,) = self.groups.values()
        self._compiled = CompiledGradient(
            self._evaluate_loss, self._flat.params, self.actor, self.device, self.prepare_batch,
            has_memory=self.actor.is_recurrent) if options.is_compiled else None
        self._weights = Constants(self.device)
        self.info_names = ()
        self._term_names: tuple[str, ...] = ()
        self.num_epochs: int = options.num_epochs
        self.num_mini_batch: int = options.num_mini_batch
        # If `mini_batch_size` is not None, the storage derives `num_mini_batch` from it.
        self.mini_batch_size: int | None = options.mini_batch_size

    # Values

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
            rollout.done[start:].flatten(0, 1),
            None if rollout.mask is None else rollout.mask[start:].flatten(0, 1)).view(-1, num_envs)
        value = rows if known is None else torch.cat([known, rows])
        if not len(rollout.final_index):
            return value, value.new_zeros(0)
        # Row t + 1 of `rhs` is the memory after o_t, even if step t ended the episode: the memory is reset only when a
        # network processes the first observation of the next episode.
        t, e = rollout.final_index.unbind(1)
        return value, self.evaluate_rows(
            self._values_of, rollout.final_obs, {name: state[t + 1, e] for name, state in rollout.rhs.items()},
            torch.zeros(len(t), dtype=torch.bool, device=t.device), rollout.final_mask)

    @abstractmethod
    def _values_of(self, obs: Obs, rhs: Obs, done: Tensor, mask: Tensor | None) -> Tensor:
        """Return the values (B,) float32 of observations on the algorithm's device; gradients are disabled."""

    def evaluate_rows(
        self, values_of: ValuesOf, obs: Obs, rhs: Obs, done: Tensor, mask: Tensor | None = None,
    ) -> Tensor:
        """Return the results (B,) of a function of B rows on the device of `done`, in chunks to limit memory usage.

        Args:
            values_of: Function of the other arguments on the algorithm's device. It is called without gradients.
            obs: Observations, leaf -> (B, ...).
            rhs: The memory (B, H) of each network before these observations, by name.
            done: (B,) bool, whether an observation is the first of its episode.
            mask: (B, n) bool, true where an action is allowed, or None.
        """
        size, values, home = rows_at_once(obs, self.device), [], done.device
        with torch.no_grad(), self._precision():
            for start in range(0, len(done), size):
                rows = slice(start, start + size)
                chunk = ({k: v[rows] for k, v in obs.items()}, {k: v[rows] for k, v in rhs.items()}, done[rows],
                         None if mask is None else mask[rows])
                if self.device.type != "cpu":
                    chunk = self._to_device(*chunk)
                values.append(values_of(*chunk).to(home))
        return values[0] if len(values) == 1 else torch.cat(values)

    def evaluate_steps(
        self, rollout: RolloutData, function: StepsFunction, sequence_length: int | None = None, name: str = "",
    ) -> list[Tensor]:
        """Return the results of a function of the steps of a rollout, without gradients, (T, E) float32 each.

        For actors with memory, each sequence is unrolled from the stored memory state of its first step, exactly as in
        the loss.

        Args:
            rollout: T steps of E environments.
            function: Function of L consecutive steps on the algorithm's device: observations (L, E, ...) by leaf,
                memory (E, H) by network, starts of episodes (L, E), actions (L, E, ...), and masks (L, E, n) or None.
            sequence_length: Steps per sequence, for actors with memory; None means the whole rollout.
            name: Name of the function, for errors.
        """
        length = rows_at_once(rollout.obs, self.device, rollout.done.shape[1])
        if self.actor.is_recurrent:
            length = sequence_length or rollout.num_steps
        found: list[tuple[Tensor, ...]] = []
        with torch.no_grad(), self._precision():
            for start in range(0, rollout.num_steps, length):
                steps = slice(start, min(start + length, rollout.num_steps))
                inputs = self._to_device(
                    {name: leaf[steps] for name, leaf in rollout.obs.items()},
                    {name: state[start] for name, state in rollout.rhs.items()},
                    rollout.done[steps], None if rollout.mask is None else rollout.mask[steps])
                results = function(*inputs[:3], on_device(rollout.action[steps], self.device), inputs[3])
                for result in results:
                    check_per_sample(self, f"{name}()", result, rollout.reward[steps])
                found.append(tuple(result.float() for result in results))
        joined = [torch.cat(parts) for parts in zip(*found, strict=True)]
        return list(on_host(*joined)) if rollout.host is None else joined

    # Learning

    @property
    def sample_values(self) -> tuple[str, ...]:
        """Names of the entries of `RolloutData.other` that become entries of `Batch.other`."""
        return () if self.intrinsic is None else self.intrinsic.sample_values

    def prepare_rollout(self, rollout: RolloutData, sequence_length: int | None = None) -> None:
        """Add values to a rollout that depend on the weights before the first update with it; by default, none."""

    def batches(self, storage: BatchStorage) -> Iterator[Batch]:
        """Return the batches of all epochs; in each epoch, every sample is in exactly one batch."""
        batches = storage.generate_batches(num_mini_batch=self.num_mini_batch, num_epochs=self.num_epochs)
        return batches if self.info_names else check_first_batch(storage, batches)

    @abstractmethod
    def loss_weights(self, parameters: Mapping[str, float]) -> dict[str, float]:
        """Return the weight of each term in the loss; a subclass adds the weights of its own terms.

        Args:
            parameters: Current value of each updatable option, by name.
        """

    @abstractmethod
    def _evaluate_loss(self, batch: Batch, parameters: LossParameters, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the loss of a batch, as `_weighted_sum` returns it."""

    def _weighted_sum(
        self, returned: tuple[dict[str, Tensor], dict[str, Tensor]], like: Tensor, batch: Batch, weights: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return the loss (), and a vector with one value for each of `info_names`, without gradient.

        Args:
            returned: Terms and measures: two dictionaries of tensors with the shape of `like`, by name.
            like: A differentiable tensor with one number for each sample of the batch.
            batch: The batch.
            weights: (k,) float32 weights of the terms, in the order of `loss_weights`.
        """
        if not self.info_names:
            self._term_names, measure_names = check_terms(self, returned, like, self.loss_weights(self.parameters))
            self.info_names = ("loss", *self._term_names, *measure_names)
        terms, measures = returned
        means = batch.means([terms[name] for name in self._term_names])
        loss = torch.dot(means, weights)
        measured = [loss.detach().unsqueeze(0), means.detach()]
        return loss, torch.cat([*measured, batch.means(list(measures.values()))] if measures else measured)

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

    # Helpers

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
