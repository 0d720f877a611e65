"""The base class of environments written in torch; a subclass consists of the dynamics of one task."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Hashable
from typing import ClassVar

import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from torch import Tensor
from typing_extensions import override

TensorObservation = Tensor | dict[str, Tensor]
"""The observations of N environments, (N, ...)."""
Extras = dict[str, TensorObservation]
"""Further results of a step."""
_StepResult = tuple[TensorObservation, Tensor, Tensor, Tensor, Extras]


class TensorEnv(VectorEnv[TensorObservation, Tensor, Tensor]):
    """N environments that are stepped at once, with tensors of one device.

    The state of all environments is one tensor (N, S). A subclass defines the spaces of one environment, `start`,
    `dynamics` and `observe`. These functions must not read tensors on the host: they contain no `if` on a tensor, no
    `item()` and no indices of booleans. Hence a step can be recorded into a CUDA graph if the graph has the state of
    `generator`, and `transition`, the part of a step that draws no random numbers, can be compiled as a whole.

    An environment is reset in the step that ends its episode. The entry "final_obs" of the extras contains the
    observations of all environments before the resets.

    Args:
        num_envs: Number of environments, N.
        device: Device of all tensors.
        max_episode_steps: Number of steps after which an episode is truncated; None: episodes are not truncated.
        compiled: Whether `transition` is compiled at the first step, which takes seconds. On a CPU, a step of 64
            CartPoles then takes 18 to 25 us instead of 110 to 180 us. Numbers are constants of the compiled code:
            setting an attribute compiles again, but changing an element of a list or dictionary has no effect.

    Attributes:
        device: Device of all tensors.
        state: The state of all environments, (N, S) float32.
        generator: Source of all random numbers, on the device; `reset` seeds it.
        is_compiled: As given.
    """

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012 - as gymnasium declares it
    is_recordable = True
    """Whether `step` can be recorded into a CUDA graph; see `pytorchrl.agent.env.tensors.recording`."""
    num_draws: ClassVar[int]
    """Number of random numbers that the first state of an episode needs."""
    _graphs: dict[Hashable, Callable[..., _StepResult]]
    """The compiled `transition` for each layout of actions."""

    def __init__(
        self, num_envs: int = 1, *, device: str | torch.device = "cpu", max_episode_steps: int | None = None,
        compiled: bool = False,
    ) -> None:
        self.num_envs, self._limit = num_envs, max_episode_steps
        # The spaces of a class are copied, because each space has a random generator of its own.
        self.single_observation_space = copy.deepcopy(self.single_observation_space)
        self.single_action_space = copy.deepcopy(self.single_action_space)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.generator = torch.Generator(device)
        self.generator.seed()
        self.device = self.generator.device
        self.state = self.start(self._draw())
        self._num_steps = torch.zeros(num_envs, dtype=torch.int64, device=self.device)
        self.is_compiled = compiled

    def __setattr__(self, name: str, value: object) -> None:
        """Set an attribute; if it is not a tensor, which graphs read in each call, discard the compiled graphs."""
        super().__setattr__(name, value)
        if not isinstance(value, Tensor):
            self.__dict__["_graphs"] = {}

    def __getstate__(self) -> dict[str, object]:
        """Return the attributes without the graphs, which belong to this object: a copy compiles graphs of its own."""
        return {**self.__dict__, "_graphs": {}}

    @abstractmethod
    def start(self, draws: Tensor) -> Tensor:
        """Return the first states of episodes, (N, S), given random numbers in [0, 1), (N, `num_draws`)."""

    @abstractmethod
    def dynamics(self, state: Tensor, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the next states (N, S), the rewards (N,) and the flags of terminations (N,), as new tensors."""

    def observe(self, state: Tensor) -> TensorObservation:
        """Return the observations of states (N, S); by default, an observation is the state."""
        return state

    @override
    def reset(
        self, *, seed: int | None = None, options: dict[str, object] | None = None,
    ) -> tuple[TensorObservation, Extras]:
        """Start new episodes in all environments."""
        if seed is not None:
            self.generator.manual_seed(seed)
        state = self.start(self._draw())
        self.state.copy_(state)
        self._num_steps.zero_()
        return self.observe(state), {}

    @override
    def step(self, actions: Tensor) -> _StepResult:
        """Step all environments; those whose episode ends return the first observation of the next episode."""
        draws = self._draw()
        if not self.is_compiled:
            return self.transition(actions, draws)
        layout = actions.dtype, actions.shape, actions.stride(), actions.device
        if layout not in self._graphs:
            self._graphs[layout] = self._compile(actions, draws)
        return self._graphs[layout](actions, draws)

    @torch.no_grad()
    def transition(self, actions: Tensor, draws: Tensor) -> _StepResult:
        """Step all environments like `step`, given the random numbers from which new episodes start."""
        state, reward, terminated = self.dynamics(self.state, actions)
        self._num_steps.add_(1)
        truncated = torch.zeros_like(terminated) if self._limit is None else self._num_steps >= self._limit
        ended = terminated | truncated
        final_obs = self.observe(state)
        state = torch.where(ended.unsqueeze(1), self.start(draws), state)
        # A recorded graph reads the state at the same address in each replay, so the state is changed in place.
        self.state.copy_(state)
        self._num_steps.masked_fill_(ended, 0)
        return self.observe(state), reward, terminated, truncated, {"final_obs": final_obs}

    def _compile(self, *args: Tensor) -> Callable[..., _StepResult]:
        """Return `transition`, compiled for arguments with the layout of `args`."""
        from pytorchrl.agent.algorithms.compiled import compile_graph

        def transition(actions: Tensor, draws: Tensor) -> _StepResult:
            return self.transition(actions, draws)
        return compile_graph(transition, self.device, [], *args)

    def _draw(self) -> Tensor:
        return torch.rand(self.num_envs, self.num_draws, generator=self.generator, device=self.device)
