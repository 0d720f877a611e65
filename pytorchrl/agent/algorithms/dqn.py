"""Deep Q-learning (Mnih et al. 2015), double (van Hasselt et al. 2016) and distributional (Bellemare et al. 2017)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor, nn
from typing_extensions import override

from pytorchrl.agent.actors.q_actor import QActor, best_action
from pytorchrl.agent.actors.replay_actor import DiscreteQNet
from pytorchrl.agent.actors.return_distributions import DISTRIBUTIONS
from pytorchrl.agent.actors.small_network import SmallNetwork, normalized
from pytorchrl.agent.algorithms.registry import algorithm
from pytorchrl.agent.algorithms.replay import (
    NUM_UPDATES_HELP,
    POLYAK_HELP,
    TARGET_UPDATE_INTERVAL_HELP,
    UPDATE_EVERY_HELP,
    ReplayAlgorithm,
)
from pytorchrl.agent.contracts import check_per_sample, overrides
from pytorchrl.agent.data import OBS_LEAF, ActingStep, Arrays, Obs, ReplayBatch
from pytorchrl.agent.options import AgentOptions, option
from pytorchrl.agent.schedules import Schedule, as_schedule, linear
from pytorchrl.agent.seeding import UniformDraws
from pytorchrl.agent.storages import PERBuffer, ReplayBuffer
from pytorchrl.agent.updatable import refuse_function
from pytorchrl.errors import ConfigError, Problem, UnknownParameterError

EPSILON_PER_WORKER_HELP = (
    "Give each collector its own constant epsilon: 0.4 for the first collector, smaller for each later one.")
_EPSILON = "epsilon"


def ladder_epsilon(index: int, num_collectors: int) -> float:
    """Return the epsilon of collector i of N: 0.4^(1 + 7 i / (N - 1)), or 0.4 if N = 1.

    The formula is from Horgan et al. 2018 (Ape-X), section 4.

    Args:
        index: i, from 0 to N - 1.
        num_collectors: N.

    Raises:
        ConfigError: The index is not in the range from 0 to N - 1.
    """
    if not 0 <= index < num_collectors:
        raise ConfigError(f"the index of a collector must be from 0 to {num_collectors - 1}, got {index}")
    return float(0.4 ** (1 + 7 * index / max(1, num_collectors - 1)))


def _is_probability(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1


@algorithm("dqn", storage=ReplayBuffer, prioritized_storage=PERBuffer)
class DQN(ReplayAlgorithm):
    """Q-learning: the actor learns the values of actions, and acts epsilon-greedily.

    The TD error is delta = R + DISC * Q_target(o', a*) - Q(o, a), with the n-step return R and the discount DISC from
    the storage. The action a* is argmax_a Q(o', a) if the option `double` is set, and otherwise argmax_a
    Q_target(o', a). The loss is the mean of w * l(delta), with the weights w from the storage and the function l that
    the option `loss` selects.

    If the actor has the option `distribution`, it learns the distribution of the return instead of Q, the mean: the
    target is the distribution of R + DISC * Z_target(o', a*), and `return_distributions` defines the loss of a sample,
    which also takes the place of |delta| for priorities.

    Unless `epsilon_per_worker` is set, epsilon follows a schedule over the env steps of the whole experiment. To
    replace the schedule, call `update_algorithm_parameter` with the name "epsilon".
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(ReplayAlgorithm.Options):
        """Options of `DQN`; dueling and noisy networks are options of the actor."""

        lr: float | Schedule = option(1e-4, help="Learning rate.", low=0.0, updatable=True)
        double: bool = option(True, help="Choose the target's action with the online network, not the target network.")
        loss: str = option(
            "huber", help="Loss of a TD error: huber (quadratic up to 1, linear beyond) or mse.",
            choices=("huber", "mse"))
        initial_epsilon: float = option(
            1.0, help="Initial probability of a random action.", low=0.0, high=1.0)
        final_epsilon: float = option(
            0.05, help="Probability of a random action after epsilon_steps.", low=0.0, high=1.0)
        epsilon_steps: int = option(
            100_000, help="Env steps of the whole experiment over which epsilon changes linearly.", low=1)
        test_epsilon: float = option(0.0, help="Probability of a random action in evaluation.", low=0.0, high=1.0)
        epsilon_per_worker: bool = option(False, help=EPSILON_PER_WORKER_HELP)
        update_every: int = option(4, help=UPDATE_EVERY_HELP, low=1)
        num_updates: int = option(1, help=NUM_UPDATES_HELP, low=1)
        mini_batch_size: int = option(32, help="Transitions per batch.", low=1)
        polyak: float = option(0.0, help=POLYAK_HELP, low=0.0, high=1.0)
        target_update_interval: int = option(1000, help=TARGET_UPDATE_INTERVAL_HELP, low=1)
        max_grad_norm: float | None = option(
            10.0, help="Largest global norm of a gradient; None means no limit.", low=0.0, exclusive=True,
            updatable=True)

        def contradictions(self) -> Iterator[Problem]:
            """Refuse options for a shared epsilon if `epsilon_per_worker` gives each collector its own epsilon."""
            yield from super().contradictions()
            if self.epsilon_per_worker:
                yield from self._without_effect(
                    ("initial_epsilon", "final_epsilon", "epsilon_steps"), "epsilon_per_worker=False",
                    "epsilon_per_worker")

    actor_class: ClassVar[type[nn.Module]] = QActor
    actor_options: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **ReplayAlgorithm.actor_options, "distribution": DISTRIBUTIONS}
    target_groups: ClassVar[tuple[str, ...]] = ("q",)
    actor: QActor

    @classmethod
    def contradiction(cls, agent: AgentOptions) -> str | None:
        """Refuse a `loss` of TD errors if the actor learns a distribution, which has a loss of its own."""
        kind = getattr(agent.actor, "distribution", None)
        if kind is not None and agent.algorithm is not None and "loss" in agent.algorithm.changed():
            return (f"loss={agent.algorithm.loss!r} needs an actor with distribution=None, got distribution={kind!r}, "
                    "which has a loss of its own; leave loss or distribution out")
        return super().contradiction(agent)

    def __init__(self, options: DQN.Options, *, actor: QActor, seed: int, device: str = "cpu") -> None:
        """Build the algorithm; see `Algorithm` for the arguments."""
        super().__init__(options, actor=actor, seed=seed, device=device)
        self._set_parameter(_EPSILON, linear(options.initial_epsilon, options.final_epsilon, options.epsilon_steps))
        self._ladder_epsilon: float | None = ladder_epsilon(0, 1) if options.epsilon_per_worker else None
        self._small_network = self._make_small_network()
        self._means_in_numpy = actor.estimate.means_in_numpy
        self._loss: Callable[[Tensor, Tensor], Tensor] = functools.partial(
            F.huber_loss if options.loss == "huber" else F.mse_loss, reduction="none")
        if actor.estimate.num_atoms is not None:
            self._loss = actor.estimate.loss

    @override
    def take_place(self, index: int, num_collectors: int) -> None:
        """Use the constant epsilon of collector `index` if `epsilon_per_worker` is set.

        Raises:
            ConfigError: The index is not in the range from 0 to `num_collectors` - 1.
        """
        epsilon = ladder_epsilon(index, num_collectors)
        if self.options.epsilon_per_worker:
            self._ladder_epsilon = epsilon

    def update_algorithm_parameter(self, name: str, value: object) -> None:
        """Set an option or `epsilon` to a number, a `Schedule` or a list of points (env step, value).

        Raises:
            UnknownParameterError: `epsilon` is fixed, because `epsilon_per_worker` is true.
            ConfigError: The value is not allowed for the option.
        """
        if name != _EPSILON:
            super().update_algorithm_parameter(name, value)
            return
        if self._ladder_epsilon is not None:
            raise UnknownParameterError(
                "epsilon is fixed, because with epsilon_per_worker=True each collector has its own")
        epsilon = as_schedule(value, _EPSILON, 0.0, 1.0, exclusive=False)
        refuse_function(epsilon)
        numbers = epsilon.values if isinstance(epsilon, Schedule) else (epsilon,)
        if not all(_is_probability(number) for number in numbers):
            raise ConfigError(f"epsilon must be a number from 0 to 1, or a schedule of such numbers, got {epsilon!r}")
        assert isinstance(epsilon, (Schedule, int, float))
        self._set_parameter(_EPSILON, epsilon)

    # Acting

    @property
    def generator(self) -> torch.Generator:
        """Generator of the random numbers for actions."""
        return self._uniform.generator

    @generator.setter
    def generator(self, generator: torch.Generator) -> None:
        self._uniform = UniformDraws(generator)

    @override
    def choose(self, obs: Obs, done: Tensor, deterministic: bool, mask: Tensor | None) -> Tensor:
        generator = None if deterministic else self.generator
        return self._explore(len(done), deterministic, mask, lambda: self.actor.act(obs, mask, generator))

    @override
    def choose_small(self, obs: Arrays, deterministic: bool) -> ActingStep | None:
        """Choose actions in NumPy, or return None if `choose` must be used."""
        small, inputs = self._small_network, obs.get(OBS_LEAF)
        if small is None or inputs is None or len(inputs) > small.max_rows:
            return None
        num_envs, epsilon = len(inputs), self._epsilon(deterministic)
        draws = self._uniform.take(num_envs) if epsilon else None
        # In most steps, no environment explores. For few numbers, `min` is faster than a comparison of arrays.
        if draws is None or min(draws.tolist()) >= epsilon:
            action = self._best(small, inputs)
            return ActingStep(action, action, {}, {})
        explores = draws < epsilon
        action = self._uniform.take(num_envs * self.actor.num_actions).reshape(num_envs, -1).argmax(-1)
        if not explores.all():
            action = np.where(explores, action, self._best(small, inputs))
        return ActingStep(action, action, {}, {})

    def _best(self, small: SmallNetwork, inputs: np.ndarray) -> np.ndarray:
        """Return the actions (E,) with the largest values, for observations (E, ...)."""
        values = normalized(self.actor, inputs)
        if len(values) == 1:  # NumPy adds two vectors faster than a vector and a matrix
            return self._means_in_numpy(small(values[0])).argmax(-1, keepdims=True)
        return self._means_in_numpy(small(values)).argmax(-1)

    def _explore(self, num_envs: int, deterministic: bool, mask: Tensor | None, greedy: Callable[[], Tensor]) -> Tensor:
        """Return the actions (E,) of `greedy`, each replaced by a random action with probability epsilon.

        On the CPU, `greedy` is not called if all actions are random, and no random action is drawn if none is. A GPU
        computes both, because the program would wait for it to know.
        """
        epsilon = self._epsilon(deterministic)
        if epsilon == 0:
            return greedy()
        explores = torch.rand(num_envs, generator=self.generator, device=self.device) < epsilon
        if explores.is_cpu and not bool(explores.any()):
            return greedy()
        random = self.random_actions(num_envs, mask)
        return random if explores.is_cpu and bool(explores.all()) else torch.where(explores, random, greedy())

    def _epsilon(self, deterministic: bool) -> float:
        if deterministic:
            epsilon: float = self.options.test_epsilon
            return epsilon
        return self.parameters[_EPSILON] if self._ladder_epsilon is None else self._ladder_epsilon

    def _make_small_network(self) -> SmallNetwork | None:
        """Return a `SmallNetwork` that computes the Q network in NumPy; None if only torch can compute it."""
        actor, q = self.actor, self.actor.q
        if (self.device.type != "cpu"
                or overrides(actor, QActor, "act", "get_q_scores", "to_env", "normalize", "random_actions")
                or overrides(self, DQN, "choose", "acting_step", "random_actions")
                or type(q) is not DiscreteQNet or q.value_head is not None
                or not SmallNetwork.supports(q.trunk, q.advantage_head, actor.options.activation)):
            return None
        return SmallNetwork(q.trunk, q.advantage_head, actor.options.activation)

    # Learning

    def target_values(self, batch: ReplayBatch) -> Tensor:
        """Return the targets (B,) float32 for the values of the batch's actions; gradients are disabled.

        If the actor learns distributions with k atoms, the targets are (B, k), as `actor.estimate.target` returns them.
        A subclass may define other targets. `batch.ret` and `batch.discount` cover up to n steps, `self.targets["q"]`
        is the target network, and `actor.normalize` converts observations to inputs of the networks.
        """
        actor, generator = self.actor, self.update_generator
        next_obs, estimate = actor.normalize(batch.next_obs), actor.estimate
        outputs: Tensor = self.targets["q"](next_obs, batch.next_mask, generator)
        choosing = actor.q(next_obs, batch.next_mask, generator) if self.options.double else outputs
        best = best_action(estimate.mean(choosing), batch.next_mask)
        return estimate.target(estimate.of_action(outputs, best), batch.ret, batch.discount)

    @override
    def losses(self, batch: ReplayBatch) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
        with torch.no_grad():
            target = self.target_values(batch)
        actor, estimate = self.actor, self.actor.estimate
        outputs = estimate.of_action(actor.q(actor.normalize(batch.obs), batch.mask, self.update_generator),
                                     batch.action)
        if not self._is_loss_checked:
            check_per_sample(self, "target_values()", target, outputs,
                             "one number" if estimate.num_atoms is None else "the atoms of a distribution")
        loss = self._loss(outputs, target)
        score = estimate.mean(outputs.detach())
        return {"q": (batch.weight * loss).mean()}, {"q": score.mean()}, estimate.errors(
            outputs.detach(), target, loss.detach())
