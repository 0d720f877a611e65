"""Explore epsilon-greedily: the options, the schedule and the actions of algorithms that learn values of actions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from pytorchrl.agent.actors.q_actor import QActor
from pytorchrl.agent.actors.replay_actor import DiscreteQNet
from pytorchrl.agent.actors.small_network import SmallNetwork, normalized
from pytorchrl.agent.algorithms.base import Algorithm
from pytorchrl.agent.contracts import overrides
from pytorchrl.agent.data import OBS_LEAF, ActingStep, Arrays, Obs
from pytorchrl.agent.options import Options, option
from pytorchrl.agent.schedules import Schedule, as_schedule, linear
from pytorchrl.agent.seeding import UniformDraws
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


@dataclass(frozen=True, kw_only=True)
class EpsilonOptions(Options):
    """Options of algorithms that explore epsilon-greedily."""

    initial_epsilon: float = option(
        1.0, help="Initial probability of a random action.", low=0.0, high=1.0)
    final_epsilon: float = option(
        0.05, help="Probability of a random action after epsilon_steps.", low=0.0, high=1.0)
    epsilon_steps: int = option(
        100_000, help="Env steps of the whole experiment over which epsilon changes linearly.", low=1)
    test_epsilon: float = option(0.0, help="Probability of a random action in evaluation.", low=0.0, high=1.0)
    epsilon_per_worker: bool = option(False, help=EPSILON_PER_WORKER_HELP)

    def contradictions(self) -> Iterator[Problem]:
        """Refuse options for a shared epsilon if `epsilon_per_worker` gives each collector its own epsilon."""
        yield from super().contradictions()
        if self.epsilon_per_worker:
            yield from self._without_effect(
                ("initial_epsilon", "final_epsilon", "epsilon_steps"), "epsilon_per_worker=False",
                "epsilon_per_worker")


class EpsilonGreedy(Algorithm):
    """An algorithm that trains a `QActor`, and takes a random action with probability epsilon, else the best action.

    Unless `epsilon_per_worker` is set, epsilon follows a schedule over the env steps of the whole experiment. To
    replace the schedule, call `update_algorithm_parameter` with the name "epsilon".
    """

    actor: QActor
    random_actions: Callable[[int, Tensor | None], Tensor]

    def __init__(self, options: Algorithm.Options, *, actor: nn.Module, seed: int, device: str = "cpu") -> None:
        """Build the algorithm; see `Algorithm` for the arguments."""
        super().__init__(options, actor=actor, seed=seed, device=device)
        given = self.options
        self._set_parameter(_EPSILON, linear(given.initial_epsilon, given.final_epsilon, given.epsilon_steps))
        self._ladder_epsilon: float | None = ladder_epsilon(0, 1) if given.epsilon_per_worker else None
        self._small_network = self._make_small_network()
        self._means_in_numpy = self.actor.estimate.means_in_numpy

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

    def choose(self, obs: Obs, done: Tensor, deterministic: bool, mask: Tensor | None) -> Tensor:
        """Choose actions (E,) int64 for the observations of E environments.

        Args:
            obs: Leaf -> (E, ...), as environments return them.
            done: (E,) bool, whether an observation is the first of its episode.
            deterministic: Whether `test_epsilon` is the probability of a random action, without the noise of a network.
            mask: (E, n) bool, true where an action is allowed, or None.
        """
        generator = None if deterministic else self.generator
        return self._explore(len(done), deterministic, mask, lambda: self.actor.act(obs, mask, generator))

    def choose_small(self, obs: Arrays, deterministic: bool) -> ActingStep | None:
        """Choose actions in NumPy, or return None if `choose` must be used; see `choose` for the arguments."""
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
        library = next(cls for cls in type(self).__mro__ if cls.__module__.startswith("pytorchrl."))
        if (self.device.type != "cpu"
                or overrides(actor, QActor, "act", "get_q_scores", "to_env", "normalize", "random_actions")
                or overrides(self, library, "choose", "acting_step", "random_actions")
                or type(q) is not DiscreteQNet or q.value_head is not None
                or not SmallNetwork.supports(q.trunk, q.advantage_head, actor.options.activation)):
            return None
        return SmallNetwork(q.trunk, q.advantage_head, actor.options.activation)
