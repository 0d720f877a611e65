"""Spaces as flat dictionaries of leaves, and observations read into the same form."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from pytorchrl.agent.data import OBS_LEAF
from pytorchrl.errors import SpaceError

MASK_LEAF = "action_mask"
"""Observation leaf, or entry of `info`, with the actions allowed next; lifted out of the observation."""

LEAF_SPACES: tuple[type[gym.Space[Any]], ...] = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
"""Spaces of an action, and of each leaf of an observation."""
_NUM_CHANNELS = (1, 3, 4)
MIN_IMAGE_SIZE = 16
"""Smallest height and width, in pixels, of an observation that is treated as an image by default."""


def flatten_space(
    space: gym.Space[Any] | Mapping[str, gym.Space[Any]], *, keep_float64: bool = False,
) -> dict[str, gym.Space[Any]]:
    """Leaf -> space, as observations of `space` look to actors and storages.

    Nested names are joined (`"camera/left"`), the leaf of a plain space is called `"obs"`. float64 becomes float32,
    images of unsigned bytes, or of floats from 0 to 1, become (C, H, W), Discrete and MultiDiscrete count from 0. A leaf `action_mask` is left
    out: it is no part of what networks see. Flattening twice gives the same.

    float64 is kept if `keep_float64`, and in a plain dictionary of leaves, whose dtypes an environment factory has already chosen.

    Images of unsigned bytes have three axes, of which the last one is 1, 3 or 4 long and the first one is not; images of floats
    also have bounds of 0 and 1 everywhere, and 16 pixels or more each way.

    Raises:
        SpaceError: A leaf that is neither Box, Discrete, MultiDiscrete nor MultiBinary or has no number, or no leaf at all.
    """
    keep_float64 = keep_float64 or not isinstance(space, gym.Space)
    leaves: dict[str, gym.Space[Any]] = {}
    for path, leaf in _walk(space, ()):
        name = _name(path)
        if name in leaves:
            raise SpaceError(f"two leaves of the observation space are called {name!r}; rename one, without '/'")
        if path[-1:] != (MASK_LEAF,):
            _refuse_empty(leaf, f"observation leaf {name!r}", "a wrapper can drop it")
            leaves[name] = _seen_as(leaf, keep_float64)
    if not leaves:
        raise SpaceError(f"the observation space {space} has no leaf to observe")
    return leaves


def flatten_action_space(space: gym.Space[Any]) -> gym.Space[Any]:
    """The action space as actors see it: Discrete and MultiDiscrete count from 0.

    Raises:
        SpaceError: Neither Box, Discrete, MultiDiscrete nor MultiBinary, or no number in an action.
    """
    if not isinstance(space, LEAF_SPACES):
        raise SpaceError(
            f"the action space is {space}; allowed are Box, Discrete, MultiDiscrete and MultiBinary; "
            "a wrapper can flatten other spaces")
    _refuse_empty(space, "the action space", "there would be nothing to decide")
    return space if isinstance(space, spaces.Box) else _seen_as(space)


def action_start(space: gym.Space[Any]) -> np.ndarray | None:
    """What to add to actions that count from 0, int64 () or (n,); None where nothing is to be added."""
    if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)) and np.any(space.start):
        return np.asarray(space.start, dtype=np.int64)
    return None


class ObservationReader:
    """Reads observations of one space into leaves, copying only where a dtype changes.

    Args:
        space: Observation space of a single environment.
        keep_float64: Whether float64 leaves stay float64; otherwise they become float32.
    """

    def __init__(self, space: gym.Space[Any], keep_float64: bool = False) -> None:
        self.space = flatten_space(space, keep_float64=keep_float64)
        self._leaves: list[tuple[tuple[Any, ...], str, Callable[[np.ndarray], np.ndarray] | None]] = []
        self._mask_path: tuple[Any, ...] | None = None
        for path, leaf in _walk(space, ()):
            if path[-1:] == (MASK_LEAF,):
                self._mask_path = path
            else:
                self._leaves.append((path, _name(path), _conversion(leaf, keep_float64)))
        self.is_plain = isinstance(space, LEAF_SPACES) and self._leaves[0][2] is None
        """Whether `{"obs": observations}` is all there is to do."""
        self.has_mask = self._mask_path is not None

    def read(self, observations: Any) -> dict[str, np.ndarray]:
        """Leaf -> (E, ...) of the batched observations of a vector environment."""
        if self.is_plain:
            return {OBS_LEAF: observations}
        leaves = {}
        for path, name, convert in self._leaves:
            array = _at(observations, path)
            leaves[name] = array if convert is None else convert(array)
        return leaves

    def read_rows(self, rows: Sequence[Any]) -> dict[str, np.ndarray]:
        """Leaf -> (K, ...) of K observations of single environments."""
        leaves = {}
        for path, name, convert in self._leaves:
            array = np.stack([np.asarray(_at(row, path)) for row in rows])
            dtype = self.space[name].dtype
            array = array if convert is None else convert(array)
            leaves[name] = array if array.dtype == dtype else array.astype(dtype)
        return leaves

    def all_allowed(self, space: gym.Space[Any], count: int) -> np.ndarray | None:
        """(count, n) bool, all True: masks of `count` environments before they are known; None if this space has no such leaf."""
        if self._mask_path is None:
            return None
        return np.ones((count, *(_at(space, self._mask_path).shape or ())), dtype=np.bool_)

    def mask(self, observations: Any) -> np.ndarray | None:
        """(E, n) bool, the lifted leaf `action_mask`, if the space has one."""
        if self._mask_path is None:
            return None
        return np.asarray(_at(observations, self._mask_path)).astype(np.bool_)


def _walk(
    space: gym.Space[Any] | Mapping[str, gym.Space[Any]], path: tuple[Any, ...],
) -> Iterator[tuple[tuple[Any, ...], gym.Space[Any]]]:
    if isinstance(space, (spaces.Dict, Mapping)):
        for key, child in space.items():
            yield from _walk(child, (*path, key))
    elif isinstance(space, spaces.Tuple):
        for index, child in enumerate(space.spaces):
            yield from _walk(child, (*path, index))
    elif isinstance(space, LEAF_SPACES):
        yield path, space
    else:
        raise SpaceError(
            f"observation leaf {_name(path)!r} is a {type(space).__name__}; allowed are Box, Discrete, MultiDiscrete, "
            "MultiBinary, and Dict and Tuple of these; a wrapper can encode or drop it")


def _name(path: tuple[Any, ...]) -> str:
    return "/".join(map(str, path)) or OBS_LEAF


def _at(nested: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        nested = nested[key]
    return nested


def _refuse_empty(space: gym.Space[Any], what: str, remedy: str) -> None:
    if 0 in (space.shape or ()):
        raise SpaceError(f"{what} is {space}, whose shape {space.shape} holds no number; {remedy}")


def has_image_values(space: spaces.Box) -> bool:
    """Return whether the values may be pixels: unsigned bytes, or floats whose bounds are 0 and 1 everywhere."""
    return space.dtype == np.uint8 or (
        np.issubdtype(space.dtype, np.floating) and not np.any(space.low) and bool(np.all(space.high == 1)))


def _has_channels_last(space: gym.Space[Any]) -> bool:
    return (
        isinstance(space, spaces.Box) and len(space.shape) == 3
        and space.shape[2] in _NUM_CHANNELS and space.shape[0] not in _NUM_CHANNELS
        and (space.dtype == np.uint8 or min(space.shape[:2]) >= MIN_IMAGE_SIZE) and has_image_values(space)
    )


def _seen_as(space: gym.Space[Any], keep_float64: bool = False) -> gym.Space[Any]:
    if isinstance(space, spaces.Discrete):
        return spaces.Discrete(int(space.n)) if space.start else space
    if isinstance(space, spaces.MultiDiscrete):
        return spaces.MultiDiscrete(space.nvec) if np.any(space.start) else space
    if not isinstance(space, spaces.Box):
        return space
    if _has_channels_last(space):
        space = spaces.Box(np.moveaxis(space.low, -1, 0), np.moveaxis(space.high, -1, 0), dtype=space.dtype)
    if space.dtype == np.float64 and not keep_float64:
        # Bounds beyond float32 become infinite on purpose.
        with np.errstate(over="ignore"):
            return spaces.Box(space.low.astype(np.float32), space.high.astype(np.float32), dtype=np.float32)
    return space


def _conversion(space: gym.Space[Any], keep_float64: bool) -> Callable[[np.ndarray], np.ndarray] | None:
    if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)) and np.any(space.start):
        start = np.asarray(space.start)
        return lambda array: array - start
    is_wide, has_channels_last = space.dtype == np.float64 and not keep_float64, _has_channels_last(space)
    if is_wide and has_channels_last:
        return lambda array: np.moveaxis(array.astype(np.float32), -1, 1)
    if is_wide:
        return lambda array: array.astype(np.float32)
    if has_channels_last:
        return lambda array: np.moveaxis(array, -1, 1)
    return None
