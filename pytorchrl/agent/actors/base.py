"""The base class of actors, and `load_checkpoint`, which copies a saved model into an actor."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Protocol

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from pytorchrl.agent.actors.extractors import MLP, is_image, module_list
from pytorchrl.agent.actors.normalizers import RunningMoments, moments
from pytorchrl.agent.contracts import NUM_EXAMPLES, reading
from pytorchrl.agent.data import Obs, RolloutData
from pytorchrl.agent.env.spaces import LEAF_SPACES, flatten_action_space
from pytorchrl.agent.fit import check_action_space
from pytorchrl.agent.moments import Moments
from pytorchrl.agent.names import checked_names
from pytorchrl.agent.options import Factory, Options, Part, build_options
from pytorchrl.agent.seeding import Stream, derive_seed, global_draws, torch_generator
from pytorchrl.errors import CheckpointError, ConfigError
from pytorchrl.files.tensors import acting_state_of, read_sealed
from pytorchrl.support.tracebacks import brief_errors
from pytorchrl.support.untyped import OptionsOfSubclass

if TYPE_CHECKING:
    from typing_extensions import Self

_REWARD = "reward"


class Loadable(Protocol):
    """An actor into which `load_checkpoint` can copy a saved model."""

    def acting_networks(self) -> dict[str, nn.Module]:
        """Return the networks that act, by parameter group."""

    def state_buffers(self) -> dict[str, Tensor]:
        """Return the buffers of the saved state by name, without copying them."""


class Actor(Part, nn.Module, ABC):
    """The base class of actors. A subclass builds its networks in `build_networks`.

    Attributes:
        options: Checked options.
        device: Device of the networks.
        is_recurrent: Whether the actor has memory between observations.
        seed: Seed of the initial weights, which is the same in all workers.
        obs_moments: Running moments of the observations that are normalized.
        reward_moments: Running moments of discounted returns, or None if rewards are not normalized.
    """

    home: ClassVar[str] = "actor"
    action_spaces: ClassVar[tuple[type[gym.Space[object]], ...]] = LEAF_SPACES
    """Kinds of action space that the actor supports; see also `action_space_problem`."""
    network_options: ClassVar[tuple[str, ...]] = ("feature_extractor", "hidden_sizes", "activation", "block")
    """Options that only `build_networks` reads. A subclass's `build_networks` must read each option that is set."""
    is_recurrent = False

    @classmethod
    @brief_errors
    @checked_names
    def create_factory(
        cls, observation_space: object, action_space: gym.Space[object], **options: object,
    ) -> Factory[Self]:
        """Return a factory of this actor; `options` are fields of the class's `Options`.

        Raises:
            ConfigError: An option is unknown or has an invalid value.
            SpaceError: The actor does not support a space; the message names the leaf.
        """
        check_action_space(cls, flatten_action_space(action_space))
        spaces = {"observation_space": observation_space, "action_space": action_space}
        return Factory(cls, build_options(cls, {**spaces, **options}))

    @classmethod
    def action_space_problem(cls, space: gym.Space[object]) -> str | None:
        """Return None if the actor supports `space`; otherwise, describe what it needs, such as "a Box of floats"."""
        if not isinstance(space, cls.action_spaces):
            return f"{' or '.join(kind.__name__ for kind in cls.action_spaces)} actions"
        if isinstance(space, gym.spaces.Box) and not np.issubdtype(space.dtype, np.floating):
            return "a Box of floats"
        return None

    def __init__(self, options: Options, device: str | torch.device) -> None:
        """Store the arguments. A subclass then sets the attributes that its networks need and calls `build`."""
        super().__init__()
        self.options: OptionsOfSubclass = options
        self.device = torch.device(device)
        self._buffer_names: list[str] | None = None  # see `state_buffers`

    @classmethod
    def has_memory(cls, options: Options) -> bool | None:
        """Return whether an actor with these options has memory.

        Return None for a subclass that overrides `build_networks`, because the options do not determine whether the
        networks that it builds have memory.
        """
        is_own = not cls.build_networks.__module__.startswith("pytorchrl.")
        return None if is_own else getattr(options, "recurrent_net", None) is not None

    @abstractmethod
    def build_networks(self, generator: torch.Generator) -> None:
        """Build all networks and set them as attributes; a subclass defines this method.

        All attributes that are modules or parameters are saved, and sent to workers. Algorithms with a single parameter
        group, such as PPO, also train all of them. The attributes that `__init__` sets, such as `options`, can be used
        here.

        Args:
            generator: CPU generator for initial weights. PyTorch's own layers draw from the global generator instead,
                which is seeded from the actor's seed during this call.
        """

    def check_networks(self) -> None:
        """Run the networks once on all-zero observations, and check their outputs; the base class does nothing.

        Raises:
            ContractError: A network returns a value of the wrong type or shape.
        """

    def example_obs(self) -> Obs:
        """Return `NUM_EXAMPLES` normalized all-zero observations on the actor's device."""
        return self.normalize({
            leaf: torch.from_numpy(np.zeros((NUM_EXAMPLES, *(space.shape or ())), _dtype_of(space))).to(self.device)
            for leaf, space in self.options.observation_space.items()})

    def build(self, seed: int) -> None:
        """Build the networks and normalizers, load the checkpoint if one is given, and move the actor to its device.

        The `__init__` of a subclass calls this method once, after setting the attributes that the networks need.

        Args:
            seed: Seed of the initial weights.

        Raises:
            CheckpointError: The checkpoint cannot be read or contains a different network.
            ConfigError: The `build_networks` of a subclass does not read an option that was set.
            ContractError: A network of a subclass returns a value of the wrong type or shape.
        """
        self.seed = seed
        generator = torch_generator(seed)  # a CPU generator, so that initial weights are equal on all devices
        with global_draws(torch_generator(derive_seed(seed, Stream.INIT))), reading(self, self.network_options):
            self.build_networks(generator)
        for module in self.modules():
            if isinstance(module, MLP):
                module.look_up_weights(once=True)
        normalized = _normalized_leaves(self.options.observation_space) if self.options.normalize_obs else {}
        # Normalizers are stored in a list, because leaf names may contain dots, which PyTorch forbids in module names.
        self._normalized = {leaf: index for index, leaf in enumerate(normalized)}
        self._wide = [leaf for leaf, space in self.options.observation_space.items()
                      if space.dtype == np.float64 and leaf not in normalized]
        self.obs_moments = module_list(RunningMoments(tuple(space.shape or ())) for space in normalized.values())
        self.reward_moments = RunningMoments(()) if getattr(self.options, "normalize_reward", None) else None
        if self.options.checkpoint is not None:
            load_checkpoint(self, self.options.checkpoint)
        self.to(self.device)
        if not type(self).__module__.startswith("pytorchrl."):
            modes = [(module, module.training) for module in self.modules()]
            self.eval()  # turn off dropout, and keep batch norm from updating its running mean
            with torch.no_grad():
                self.check_networks()
            for module, mode in modes:  # train() would also switch modules that were in eval mode
                module.training = mode

    def acting_networks(self) -> dict[str, nn.Module]:
        """Return the networks that act, by parameter group; by default, the whole actor as group `all`."""
        return {"all": self}

    def from_env(self, action: Tensor) -> Tensor:
        """Convert actions (N, ...) of an environment, such as those of a data set, to stored actions."""
        return action

    def initial_states(self, num_envs: int) -> Obs:
        """Return the memory of each network at the start of an episode, by the name of the network.

        The memory is a tensor of zeros with one row for each environment. The default is {}: no network has memory.
        """
        return {}

    def policy_states(self, num_envs: int) -> Obs:
        """Return the part of `initial_states` on which actions depend; by default, all of it."""
        return self.initial_states(num_envs)

    def best_actions(self, obs: Obs, rhs: Obs, mask: Tensor | None) -> tuple[Tensor, Obs]:
        """Return the best actions for the environments; `torch.export` can trace this method.

        Args:
            obs: Mapping from leaf to (B, ...), not normalized.
            rhs: The memory before these observations, as in `policy_states`; zeros at the start of an episode.
            mask: (B, n) bool, true where an action is allowed; each row must allow an action.

        Returns:
            Actions (B, ...), where discrete actions count from 0, and the memory after these observations.

        Raises:
            ConfigError: The class of the actor does not define this method.
        """
        name = type(self).__name__
        raise ConfigError(f"{name} has no best_actions(obs, rhs, mask), which chooses the actions of a policy outside "
                          f"of training; define it in {name}")

    def keep_policy(self) -> None:
        """Remove the networks that only learning needs, and make the remaining networks traceable by `torch.export`.

        Networks that a subclass builds in its own `build_networks` are kept. Afterwards, only `best_actions` and
        `policy_states` may be called.
        """
        self.reward_moments = None
        for module in self.modules():
            if isinstance(module, MLP):
                module.look_up_weights()

    def state_buffers(self) -> dict[str, Tensor]:
        """Return the buffers of the saved state (such as those of normalizers) by name, without copying them.

        The first call stores the names of the buffers, because looking them up is slow. Networks must therefore
        register their buffers before this call, for example in `build_networks`.
        """
        if self._buffer_names is None:
            self._buffer_names = [name for name, value in self.state_dict(keep_vars=True).items()
                                  if not isinstance(value, nn.Parameter)]
        return {name: self.get_buffer(name) for name in self._buffer_names}

    def moments_of(self, rollout: RolloutData, discounted_returns: Tensor | None = None) -> dict[str, Moments]:
        """Return the moments of a rollout's valid steps; `merge_moments` adds them to the normalizers.

        Args:
            rollout: The rollout; each observation o_t with a valid transition is counted once.
            discounted_returns: (T, E) discounted returns G for the reward normalizer: G <- gamma * G + r, reset to 0
                after an episode ends.

        Returns:
            (count, mean, M2) on the CPU for each normalizer, by name, where M2 is the sum of squared deviations from
            the mean; empty if nothing is normalized.

        Raises:
            ConfigError: Rewards are normalized, but `discounted_returns` is None.
        """
        valid = rollout.valid
        found = {f"obs/{leaf}": moments(rollout.obs[leaf][:-1][valid]) for leaf in self._normalized}
        if self.reward_moments is not None:
            if discounted_returns is None:
                raise ConfigError("normalize_reward=True needs discounted_returns, got None; `Algorithm.moments_of` "
                                  "computes them")
            found[_REWARD] = moments(discounted_returns[valid])
        return found

    def merge_moments(self, found: Mapping[str, Moments]) -> None:
        """Merge the moments of one rollout, from `moments_of`, into the running moments; others are ignored.

        Call this method exactly once for each rollout. Always merge the rollouts of several workers in the same order,
        because the order affects rounding.
        """
        for leaf, index in self._normalized.items():
            if (name := f"obs/{leaf}") in found:
                self.obs_moments[index].merge(found[name])
        if self.reward_moments is not None and _REWARD in found:
            self.reward_moments.merge(found[_REWARD])

    def reward_scale(self) -> float:
        """Return the factor that scales rewards before they are clipped to [-10, 10]; 1.0 without normalization."""
        return 1.0 if self.reward_moments is None else float(self.reward_moments.scale)

    def normalize(self, obs: Obs) -> Obs:
        """Convert observations from the environments to inputs of the networks.

        If `normalize_obs` is set, all leaves of Box spaces except images are normalized. Float64 is converted to
        float32. If no leaf changes, the result is `obs` itself. A policy that is used outside of training may lack the
        leaves that only critics see.
        """
        if not self._normalized and not self._wide:
            return obs
        narrow = {leaf: obs[leaf].float() for leaf in self._wide if leaf in obs}
        normalized = {
            leaf: self.obs_moments[i].normalize(obs[leaf])
            for leaf, i in self._normalized.items() if leaf in obs}
        return {**obs, **narrow, **normalized}


def _dtype_of(space: gym.Space[object]) -> np.dtype[np.generic]:
    """Return the dtype in which storages store an observation leaf of this space."""
    return np.dtype(space.dtype or np.int64)


def _normalized_leaves(observation_space: Mapping[str, gym.Space[object]]) -> dict[str, gym.Space[object]]:
    return {leaf: space for leaf, space in observation_space.items()
            if isinstance(space, gym.spaces.Box) and not is_image(space)}


def load_checkpoint(actor: Loadable, path: str) -> None:
    """Copy the acting state of a saved model into the actor.

    For each acting network, the state contains one vector: all parameters of the network, concatenated. The other
    entries of the state are buffers, by name.

    Raises:
        CheckpointError: The file cannot be read, is damaged, or belongs to an actor with other networks.
    """
    state = acting_state_of(read_sealed(path, "model"), f"model {path!r}")
    networks = {name: list(network.parameters()) for name, network in actor.acting_networks().items()}
    if not all(name in state for name in networks):
        raise CheckpointError(f"checkpoint {path!r} must contain the acting_state of an actor with the networks "
                              f"{', '.join(networks)}; pass a file written by save_model for such an actor")
    for name, parameters in networks.items():
        size = sum(parameter.numel() for parameter in parameters)
        if not state[name].is_floating_point():
            raise CheckpointError(f"checkpoint {path!r} contains parameters {name!r} of the dtype {state[name].dtype}")
        if state[name].shape != (size,):
            raise CheckpointError(
                f"checkpoint {path!r} contains {math.prod(state[name].shape)} parameters, but this actor has {size}; "
                "build it with the spaces and options that the model was trained with")
    buffers = actor.state_buffers()
    if any(name.startswith("obs_moments.") and name not in buffers for name in state):
        raise CheckpointError(f"checkpoint {path!r} was trained with normalized observations, but this actor does not "
                              "normalize them; give the actor normalize_obs=True")
    with torch.no_grad():
        for name, parameters in networks.items():
            nn.utils.vector_to_parameters(state[name].to(parameters[0].device), parameters)
        for name, buffer in buffers.items():
            value = state.get(name)
            if not isinstance(value, Tensor) or value.shape != buffer.shape:
                raise CheckpointError(
                    f"checkpoint {path!r} has no {name} of shape {tuple(buffer.shape)}; give the actor the "
                    "same normalize_obs and normalize_reward as in training")
            buffer.copy_(value)
