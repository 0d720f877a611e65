"""The trunk of an actor, which computes the input of its heads: a feature extractor and, optionally, a memory."""

from __future__ import annotations

import difflib
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from pytorchrl.agent.actors.blocks import BLOCKS, DictNet, vector_network
from pytorchrl.agent.actors.extractors import CNN, encoded_size, image_shape, is_image, num_features
from pytorchrl.agent.actors.memory import DEFAULT_SIZES, MEMORIES, Memory
from pytorchrl.agent.actors.resnets import FixupCNN, ImpalaCNN
from pytorchrl.agent.data import OBS_LEAF, Obs
from pytorchrl.agent.env.images import MIN_IMAGE_SIZE
from pytorchrl.agent.env.spaces import flatten_action_space, flatten_space
from pytorchrl.agent.options import Factory, Options, option
from pytorchrl.agent.seeding import global_draws
from pytorchrl.errors import ConfigError, Problem, SpaceError
from pytorchrl.support.untyped import OptionValue

LeafSpaces = Mapping[str, gym.Space[object]]

_IMAGE_EXTRACTORS: dict[str, type[CNN] | type[ImpalaCNN]] = {"cnn": CNN, "impala": ImpalaCNN, "fixup": FixupCNN}
_EXTRACTORS = ("auto", "mlp", *_IMAGE_EXTRACTORS)
# Most weights of a layer for a space, 8.6 GB in float32.
_MOST_WEIGHTS = 2**31


@dataclass(frozen=True, kw_only=True)
class TrunkOptions(Options):
    """Options of all actors with one policy; a subclass adds `hidden_sizes` and `activation`."""

    observation_space: OptionValue = option(  # checked and replaced by `flatten_space`
        help="A gymnasium space, or a mapping leaf -> space, as environment factories return it.")
    action_space: OptionValue = option(help="Space of the actions.")  # replaced by `flatten_action_space`
    feature_extractor: str | Callable[..., object] = option(
        "auto", help="auto (cnn for images of at least 36 x 36 pixels, impala for smaller images, otherwise mlp), mlp, "
        "cnn, impala or fixup; or a callable that takes a space (a dictionary of spaces if there are several leaves) "
        "and returns a module with out_features.")
    block: str = option(
        "mlp", help="Kind of the networks over vectors: mlp (fully connected layers), or simba (residual blocks with "
        "layer norm and ReLU, one for each element of hidden_sizes, which must all be the width).", choices=BLOCKS)
    normalize_obs: bool = option(
        False, help="Normalize observations, except images, by their running mean and standard deviation.")
    checkpoint: str | None = option(
        None, help="Saved model from which the acting networks and normalizers are initialized.")

    def __post_init__(self) -> None:
        """Flatten the spaces; refuse unsupported spaces, and an extractor that does not fit the observations."""
        super().__post_init__()
        object.__setattr__(self, "observation_space", flatten_space(self.observation_space))
        # Networks number actions from 0; the environments add the `start` of the space.
        object.__setattr__(self, "action_space", flatten_action_space(self.action_space))
        check_extractor(self.feature_extractor, self.observation_space)
        if sizes := getattr(self, "hidden_sizes", ()):
            _check_sizes(self.feature_extractor, self.observation_space, self.action_space, sizes)

    def contradictions(self) -> Iterator[Problem]:
        """Refuse residual blocks of different widths, with an activation of their own, or where no network has them."""
        yield from super().contradictions()
        if self.block != "simba":
            return
        for name in ("hidden_sizes", "critic_hidden_sizes"):
            sizes: tuple[int, ...] | None = getattr(self, name, None)
            if sizes is not None and len(set(sizes)) != 1:
                yield Problem(f"block='simba' needs equal {name}, one for each residual block, got {sizes}",
                              f"give {name}={(max(sizes, default=256),) * max(1, len(sizes))}, or leave block out",
                              ("block", name))
        if getattr(self, "activation", None) != "relu":
            yield from self._without_effect(("activation",), "block='mlp', because residual blocks have ReLU", "block")
        if not self._has_vector_networks():
            yield Problem("block='simba' needs a network over vectors, but the only extractor is one for an image or "
                          "one of your own", "leave block out", ("block", "feature_extractor"))

    def _has_vector_networks(self) -> bool:
        """Return whether a network over vectors processes a leaf, or the features of several leaves."""
        spaces = flatten_space(self.observation_space)
        return isinstance(self.feature_extractor, str) and (
            len(spaces) > 1 or bool(_vector_leaves(self.feature_extractor, spaces)))


ACTOR_GROUP, CRITIC_GROUP = "actor", "critic"
"""The groups of leaves that the policy and the critics see."""


@dataclass(frozen=True, kw_only=True)
class GroupOptions(TrunkOptions):
    """Options of actors whose policy and critics may see different leaves of an observation."""

    obs_groups: Mapping[str, Sequence[str]] | None = option(
        None, help="Leaves that the policy sees (\"actor\") and that critics see (\"critic\"), such as {\"actor\": "
                   "[\"sensors\"]}; the name of a Dict means all leaves in it, and a group that is left out has all "
                   "leaves.")

    def __post_init__(self) -> None:
        """Check the groups, and store their names as tuples."""
        super().__post_init__()
        if self.obs_groups is not None:
            check_groups(self.obs_groups, self.observation_space)
            object.__setattr__(self, "obs_groups", {group: tuple(names) for group, names in self.obs_groups.items()})

    def group(self, name: str) -> LeafSpaces:
        """Return the spaces of the leaves in the group `name`, which is "actor" or "critic"."""
        names = (self.obs_groups or {}).get(name)
        spaces: LeafSpaces = self.observation_space
        return spaces if names is None else {
            leaf: space for leaf, space in spaces.items() if any(_is_in(leaf, own) for own in names)}


def check_groups(groups: Mapping[str, Sequence[str]], spaces: LeafSpaces) -> None:
    """Raise `ConfigError` if groups are empty or unknown, or name leaves that the observations do not have."""
    leaves, allowed = list(spaces), [ACTOR_GROUP, CRITIC_GROUP]
    if len(leaves) == 1:
        raise ConfigError(f"obs_groups needs observations with several leaves (a Dict or Tuple space), got {leaves}; "
                          "leave it out, or return a Dict with one entry for each part of the observation")
    if not groups or (unknown := [group for group in groups if group not in allowed]):
        raise ConfigError(f"obs_groups must have the keys {allowed} or one of them, got {unknown if groups else {}}; "
                          "the policy sees the leaves of 'actor', and critics those of 'critic'")
    for group, names in groups.items():
        if not names:
            raise ConfigError(f"obs_groups[{group!r}] must name at least one of the leaves {leaves}, got none; leave "
                              f"{group!r} out for all leaves")
        for name in names:
            if not any(_is_in(leaf, name) for leaf in leaves):
                near = difflib.get_close_matches(name, leaves, n=1)
                raise ConfigError(f"obs_groups[{group!r}] names {name!r}, but the leaves of an observation are "
                                  f"{leaves}" + (f"; did you mean {near[0]!r}?" if near else ""))


def _is_in(leaf: str, name: str) -> bool:
    return leaf == name or leaf.startswith(f"{name}/")


@dataclass(frozen=True, kw_only=True)
class MemoryOptions(Options):
    """Options of actors that may have memory."""

    recurrent_net: str | None = option(None, help="Memory after the extractor.", choices=(None, *MEMORIES))
    recurrent_size: int | None = option(
        None, help="Units of the memory; None means 256 for gru and 512 for lstm.", low=1)

    def contradictions(self) -> Iterator[Problem]:
        """Refuse the size of a memory that does not exist."""
        yield from super().contradictions()
        if self.recurrent_size is not None and self.recurrent_net is None:
            yield Problem(f"recurrent_size={self.recurrent_size} needs recurrent_net='gru' or 'lstm', got None",
                          options=("recurrent_size", "recurrent_net"))


class NetworkOptions(Protocol):
    """The options from which an actor's trunk is built."""

    @property
    def observation_space(self) -> LeafSpaces:
        """Mapping from each leaf to its space."""

    @property
    def feature_extractor(self) -> str | Callable[..., object]:
        """Name of an extractor, or a callable that takes a space and returns a module."""

    @property
    def normalize_obs(self) -> bool:
        """Whether observations are normalized, except images."""

    @property
    def hidden_sizes(self) -> tuple[int, ...]:
        """Units of each fully connected layer."""

    @property
    def activation(self) -> str:
        """Name of the activation function: a key of `ACTIVATIONS`."""

    @property
    def block(self) -> str:
        """Kind of the networks over vectors: one of `BLOCKS`."""

    @property
    def recurrent_net(self) -> str | None:
        """Name of the memory: a key of `MEMORIES`, or None for no memory."""

    @property
    def recurrent_size(self) -> int | None:
        """Number of units of the memory; None means the default size in `DEFAULT_SIZES`."""


class Trunk(nn.Module):
    """A feature extractor and an optional memory, which compute the input of a head."""

    def __init__(
        self, options: NetworkOptions, generator: torch.Generator, num_previous: int = 0, *,
        spaces: LeafSpaces | None = None, hidden_sizes: tuple[int, ...] | None = None,
    ) -> None:
        """Build the extractor and, if the options name one, the memory.

        Args:
            options: Options of the actor.
            generator: CPU generator for the initial weights.
            num_previous: Number P of additional inputs of the memory; see the argument `previous` of `forward`.
            spaces: Spaces of the leaves that the trunk processes; None means all leaves. A single leaf out of several
                is processed like an observation that has no other leaves.
            hidden_sizes: Units of each fully connected layer; None means `options.hidden_sizes`.
        """
        super().__init__()
        spaces = options.observation_space if spaces is None else spaces
        self._leaves = tuple(spaces)
        self.is_partial = len(spaces) < len(options.observation_space)
        """Whether there are leaves that the trunk does not process."""
        self._leaf, space = next(iter(spaces.items()))
        if self.is_partial and len(spaces) == 1:
            spaces = {OBS_LEAF: space}
        self.extractor = _build_extractor(
            options, spaces, options.hidden_sizes if hidden_sizes is None else hidden_sizes, generator)
        self.out_features = num_features(self.extractor)
        self.memory: Memory | None = None
        if options.recurrent_net is not None:
            size = options.recurrent_size or DEFAULT_SIZES[options.recurrent_net]
            self.memory = MEMORIES[options.recurrent_net](self.out_features + num_previous, size, generator)
            self.out_features = size
        self._num_previous = num_previous
        self._is_plain = set(spaces) == {OBS_LEAF}
        self._leaf_ndim = len(space.shape or ())
        # A tuple, because looking up a submodule is slow. Only modules of the user may have hooks.
        self._modules_in_order = (self.extractor, self.memory)
        self._is_custom = not isinstance(options.feature_extractor, str)

    def forward(
        self, obs: Obs, state: Tensor | None, done: Tensor | None, previous: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the features of one step or of L steps.

        Args:
            obs: Mapping from leaf to (B, ...) or (L, B, ...), normalized; other leaves than those of the trunk are
                ignored.
            state: (B, H), the memory before the first row; None without memory.
            done: (B,) or (L, B) bool, whether a row is the first of its episode; None without memory.
            previous: (B, P) or (L, B, P), additional inputs of the memory, which are replaced by 0 at the first step of
                an episode.

        Returns:
            Features (B, F) or (L, B, F), and the memory after the last row, (B, H); None without memory.

        Raises:
            ConfigError: An input of the memory is missing.
        """
        extractor, memory = self._modules_in_order
        x = obs[self._leaf]
        lead = x.shape[:2] if x.dim() - self._leaf_ndim == 2 else None
        if lead is not None:
            obs = {leaf: obs[leaf].flatten(0, 1) for leaf in self._leaves}
            x = obs[self._leaf]
        elif self.is_partial:
            obs = {leaf: obs[leaf] for leaf in self._leaves}
        given = x if self._is_plain else obs
        features = extractor(given) if self._is_custom else extractor.forward(given)
        if lead is not None:
            features = features.unflatten(0, lead)
        if memory is None:
            return features, None
        if state is None or done is None:
            raise ConfigError("an actor with memory needs its state and `done` with every observation")
        if self._num_previous:
            if previous is None:
                raise ConfigError("this actor's memory needs the previous action and reward with every observation")
            features = torch.cat((features, previous.masked_fill(done.unsqueeze(-1), 0.0)), -1)
        return memory.forward(features, state, done)

    def encode(self, obs: Obs) -> Tensor:
        """Return the features (..., F) of observations; with memory, those that `obs` contains, see `remembered`.

        Raises:
            ConfigError: The trunk has memory, but `obs` are observations.
        """
        if self.memory is None:
            return self.forward(obs, None, None)[0]
        features = cast("Mapping[Trunk, Tensor]", obs).get(self)
        if features is None:
            raise ConfigError("an actor with memory needs its state and `done` with every observation; call "
                              "remember(obs, rhs, done), and give the networks its result")
        return features


def remembered(features: Mapping[Trunk, Tensor]) -> Obs:
    """Return features of trunks with memory in the form in which networks take observations; see `Trunk.encode`.

    Networks with memory apply their heads to features that have been computed for a whole sequence before. Each network
    finds the features of its own trunk, so a target network cannot be given those of the online network.
    """
    return cast("Obs", features)


def check_extractor(name: str | Callable[..., object], spaces: LeafSpaces) -> None:
    """Check, before any worker is built, that an extractor exists and fits the spaces.

    The extractor `auto` applies fully connected layers to a leaf that has the shape of an image but does not satisfy
    `is_image`. This function warns of such a leaf.

    Raises:
        ConfigError: No extractor has this name.
        SpaceError: The extractor needs images but there are none, or an image is too small for the extractor.
    """
    if not isinstance(name, str):
        return
    if name not in _EXTRACTORS:
        near = difflib.get_close_matches(name, _EXTRACTORS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "; or give a callable that returns a module"
        raise ConfigError(f"feature_extractor must be one of {list(_EXTRACTORS)}, got {name!r}{hint}")
    if name == "auto":
        for leaf, space in spaces.items():
            _warn_of_unlikely_image(leaf, space)
    if name not in _IMAGE_EXTRACTORS:
        return
    images = {leaf: space for leaf, space in spaces.items() if _has_image_axes(space)}
    if not images:
        raise SpaceError(
            f"feature_extractor {name!r} needs an image leaf (C, H, W), got {dict(spaces)}; use 'mlp' or 'auto'")
    for leaf, space in images.items():
        image_shape(space, _IMAGE_EXTRACTORS[name].MIN_SIZE, leaf)


def _check_sizes(
    extractor: str | Callable[..., object], spaces: LeafSpaces, action_space: gym.Space[object], sizes: tuple[int, ...],
) -> None:
    """Raise `SpaceError` if a space has so many values that the layer for them would not fit into memory."""
    leaves = _vector_leaves(extractor, spaces) if isinstance(extractor, str) else {}
    for what, space, size, remedy in (
            *((f"observation leaf {leaf!r}", space, sizes[0], "or give a feature_extractor of your own")
              for leaf, space in leaves.items()),
            ("the action space", action_space, sizes[-1], "or lower hidden_sizes")):
        number = encoded_size(space)
        if (weights := number * size) > _MOST_WEIGHTS:
            raise SpaceError(
                f"{what} is a {type(space).__name__} with {number:,} values for the networks, so their layer would "
                f"have {weights:,} weights, {4 * weights / 1e9:,.0f} GB; at most {_MOST_WEIGHTS:,} are allowed; use a "
                f"wrapper that describes it by fewer values, {remedy}")


def _vector_leaves(extractor: str, spaces: LeafSpaces) -> LeafSpaces:
    """Return the leaves that networks over vectors process."""
    return {leaf: space for leaf, space in spaces.items() if _image_extractor(extractor, space) is None}


def _warn_of_unlikely_image(leaf: str, space: gym.Space[object]) -> None:
    shape = space.shape or ()
    if isinstance(space, gym.spaces.Box) and space.dtype == np.uint8 and len(shape) in (2, 4) and (
            sorted(shape)[-2] >= MIN_IMAGE_SIZE):
        remedy = ("add the axis of channels, with gymnasium.wrappers.ReshapeObservation" if len(shape) == 2 else
                  "stack images with frame_stack, or join their channels in a wrapper")
        warnings.warn(
            f"leaf {leaf!r} has the shape {shape}, but an image has three axes, so it is processed by fully connected "
            f"layers with {math.prod(shape)} inputs; if it is an image, {remedy}; if not, give "
            "feature_extractor='mlp'", stacklevel=2)
    # Check the two longest axes, wherever they are, because an image may have its axes in an unsupported order.
    if _has_image_axes(space) and sorted(space.shape or ())[1] >= MIN_IMAGE_SIZE and not is_image(space):
        assert isinstance(space, gym.spaces.Box)
        warnings.warn(
            f"leaf {leaf!r} has the shape of an image, {space.shape}, but is processed by fully connected layers with "
            f"{math.prod(space.shape)} inputs: for feature_extractor='auto', an image has the shape (C, H, W), or "
            "(H, W, C) with 1, 3 or 4 channels, has at least 16 x 16 pixels, and consists of unsigned bytes, or of "
            f"floats with bounds of 0 and 1; got {space.dtype} from {space.low.min()} to {space.high.max()}; give "
            "feature_extractor='cnn' or 'impala' for an image (C, H, W), or 'mlp' for any other leaf",
            stacklevel=2)


def _image_extractor(extractor: str, space: gym.Space[object]) -> type[CNN] | type[ImpalaCNN] | None:
    """Return the class of the extractor for a leaf; None means fully connected layers."""
    if extractor != "auto":
        return _IMAGE_EXTRACTORS.get(extractor) if _has_image_axes(space) else None
    if not is_image(space):
        return None
    return CNN if min(image_shape(space, 1)[1:]) >= CNN.MIN_SIZE else ImpalaCNN


def _has_image_axes(space: gym.Space[object]) -> bool:
    return isinstance(space, gym.spaces.Box) and len(space.shape) == 3


def _build_extractor(
    options: NetworkOptions, spaces: LeafSpaces, hidden_sizes: tuple[int, ...], generator: torch.Generator,
) -> nn.Module:
    chosen, is_single = options.feature_extractor, set(spaces) == {OBS_LEAF}
    if not isinstance(chosen, str):
        with global_draws(generator):
            return _build_custom(chosen, spaces, options.normalize_obs)

    norm = getattr(options, "norm", None)  # an option of `QActor` only

    def build(space: gym.Space[object]) -> nn.Module:
        extractor = _image_extractor(chosen, space)
        if extractor is None:
            return vector_network(space, hidden_sizes, options.activation, options.block, generator, norm)
        return extractor(space, generator=generator, norm=norm)

    if is_single:
        return build(spaces[OBS_LEAF])
    return DictNet({leaf: build(space) for leaf, space in spaces.items()}, generator=generator, block=options.block,
                   norm=norm)


def _build_custom(build: Callable[..., object], spaces: LeafSpaces, normalize_obs: bool) -> nn.Module:
    """Build an extractor of the user, and try it with one and with two observations.

    The trial also gives lazy layers their sizes. It leaves the modes of the layers, and what they learn, unchanged.
    """
    given: object = spaces[OBS_LEAF] if set(spaces) == {OBS_LEAF} else dict(spaces)
    module = build(space=given) if isinstance(build, Factory) else build(given)
    if not isinstance(module, nn.Module) or not isinstance(getattr(module, "out_features", None), int):
        raise ConfigError(
            f"feature_extractor must return a torch module with an integer attribute out_features, got {module!r}")
    modes = [(layer, layer.training) for layer in module.modules()]
    device = next((tensor.device for tensor in (*module.parameters(), *module.buffers())), torch.device("cpu"))
    module.eval()
    with torch.no_grad():
        for rows in (1, 2):
            _try_extractor(module, {leaf: _example(space, rows, normalize_obs).to(device)
                                    for leaf, space in spaces.items()})
    for layer, mode in modes:
        layer.training = mode
    return module


def _try_extractor(module: nn.Module, obs: dict[str, Tensor]) -> None:
    before = {leaf: rows._version for leaf, rows in obs.items()}
    number, shapes = len(next(iter(obs.values()))), {leaf: tuple(rows.shape) for leaf, rows in obs.items()}
    given = f"{type(module).__name__}, the feature_extractor, was given {shapes}"
    features = module(obs[OBS_LEAF] if set(obs) == {OBS_LEAF} else obs)
    size = num_features(module)
    if not isinstance(features, Tensor) or tuple(features.shape) != (number, size):
        found = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
        raise ConfigError(f"{given} and has out_features={size}, so it must return a tensor of shape "
                          f"{(number, size)}, got {found}")
    if changed := [leaf for leaf, rows in obs.items() if rows._version != before[leaf]]:
        raise ConfigError(f"{given} and changes {', '.join(changed)} in place, which are also stored for learning; "
                          "compute new tensors instead, such as x = x + 1 for x += 1")


def _example(space: gym.Space[object], rows: int, normalize_obs: bool) -> Tensor:
    """Return zeros in the form in which an extractor receives a leaf, (rows, ...)."""
    zeros = torch.from_numpy(np.zeros((rows, *(space.shape or ())), space.dtype))
    is_normalized = normalize_obs and isinstance(space, gym.spaces.Box) and not is_image(space)
    return zeros.float() if is_normalized or zeros.dtype == torch.float64 else zeros
