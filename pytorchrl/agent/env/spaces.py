"""Convert spaces and observations to flat dictionaries of leaves."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from gymnasium import spaces

from pytorchrl.agent.data import OBS_LEAF
from pytorchrl.agent.env.aliases import MASK_LEAF, AnySpace, Observation
from pytorchrl.agent.env.images import channels_first, has_channels_last
from pytorchrl.agent.env.values import ValueCheck
from pytorchrl.errors import ConfigError, SpaceError
from pytorchrl.support.untyped import EnvValue

INTEGER_BOX = (
    "declare whole numbers as Discrete or MultiDiscrete, or round the numbers of a Box of floats in a wrapper: "
    "gymnasium.wrappers.TransformAction(env, lambda action: numpy.rint(action).astype(env.action_space.dtype), "
    "gymnasium.spaces.Box(env.action_space.low, env.action_space.high, dtype=numpy.float32))")
"""Remedy for a Box of whole numbers as the action space."""

LEAF_SPACES: tuple[type[AnySpace], ...] = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
"""Types of spaces that are supported for actions, and for the leaves of observations."""

Path = tuple[object, ...]
"""Keys (of any type) and indices that lead to a leaf of a nested space."""
Conversion = Callable[[np.ndarray], np.ndarray]


def flatten_space(
    space: AnySpace | Mapping[str, AnySpace], *, keep_float64: bool = False,
) -> dict[str, AnySpace]:
    """Return the space of each leaf for observations of `space`, in the form that actors and storages receive.

    Nested names are joined (`"camera/left"`); the leaf of a plain space is called `"obs"`. float64 becomes float32,
    images (H, W, C) become (C, H, W), and Discrete and MultiDiscrete count from 0. A leaf `action_mask` is removed,
    because networks do not receive masks as input. Flattening a flattened space changes nothing.

    float64 stays float64 if `keep_float64` is true, or if `space` is a dictionary of leaves instead of a `Space`. Such
    a dictionary comes from an environment factory, which has already chosen the dtypes.

    A leaf is an image (H, W, C) if it has three axes, C is 1, 3 or 4, and H is not 1, 3 or 4.
    The values of an image are unsigned bytes, or floats whose bounds are 0 and 1 everywhere. An image of floats must
    also be at least 16 pixels high and wide.

    Raises:
        SpaceError: A leaf is not a Box, Discrete, MultiDiscrete or MultiBinary, a leaf has no elements, or there are no
            leaves.
    """
    keep_float64 = keep_float64 or not isinstance(space, spaces.Space)
    leaves: dict[str, AnySpace] = {}
    for path, leaf in _walk(space, ()):
        name = _name(path)
        if name in leaves:
            raise SpaceError(f"two leaves of the observation space are called {name!r}; rename one of them, and use "
                             "no '/' in its name")
        if path[-1:] != (MASK_LEAF,):
            _refuse_empty(leaf, f"observation leaf {name!r}", "a wrapper can drop it")
            leaves[name] = _learner_space(leaf, keep_float64)
    if not leaves:
        raise SpaceError(f"the observation space {space} has no leaves other than {MASK_LEAF!r}")
    return leaves


def part_of_space(space: AnySpace, leaves: Container[str], path: Path = ()) -> AnySpace | None:
    """Return the space without the entries of dictionaries that contain none of the `leaves` and no `action_mask`.

    A Tuple stays whole if it contains one of the leaves, because its items have no names. If nothing is left, return
    None.
    """
    if isinstance(space, spaces.Dict):
        parts = {key: part for key, child in space.spaces.items()
                 if (part := part_of_space(child, leaves, (*path, key))) is not None}
        return spaces.Dict(parts) if parts else None
    found = [own for own, _ in _walk(space, path)]
    return space if any(own[-1:] == (MASK_LEAF,) or _name(own) in leaves for own in found) else None


def part_of_observation(part: AnySpace, whole: AnySpace, observation: Observation) -> Observation:
    """Return an observation of the space `whole` without the entries that the space `part` of it lacks."""
    if not isinstance(part, spaces.Dict) or not isinstance(whole, spaces.Dict) or not isinstance(observation, Mapping):
        return observation
    return {key: part_of_observation(part[key], whole[key], value) if key in part.spaces else value
            for key, value in observation.items() if key in part.spaces or key not in whole.spaces}


def flatten_action_space(space: AnySpace) -> AnySpace:
    """Return the action space as actors receive it: Discrete and MultiDiscrete count from 0.

    Raises:
        SpaceError: The space is not a Box, Discrete, MultiDiscrete or MultiBinary, or its actions have no elements.
    """
    if not isinstance(space, LEAF_SPACES):
        raise SpaceError(
            f"the action space is {space}; allowed are Box, Discrete, MultiDiscrete and MultiBinary; "
            "a wrapper can flatten other spaces")
    _refuse_empty(space, "the action space", "there would be nothing to decide")
    return space if isinstance(space, spaces.Box) else _learner_space(space)


def action_start(space: AnySpace) -> np.ndarray | None:
    """Return the offset `start` of a Discrete or MultiDiscrete space, int64 () or (n,); None if it is absent or 0."""
    if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)) and np.any(space.start):
        return np.asarray(space.start, dtype=np.int64)
    return None


@dataclass(frozen=True)
class RawSpaces:
    """The spaces of one environment as the environment declares them, before they are flattened."""

    observation: AnySpace
    action: AnySpace
    keep_float64: bool = False
    """Whether float64 leaves stay float64; otherwise they become float32."""
    has_mask_in_info: bool = False
    """Whether `info` contains the mask of allowed actions, and observations do not."""


@dataclass(frozen=True)
class LeafReading:
    """The conversion of one leaf of an observation to the form that actors receive."""

    path: Path
    """Keys and indices that lead to the leaf; empty for an observation that is a single array."""
    name: str
    start: np.ndarray | None
    """Offset that is subtracted, so that Discrete and MultiDiscrete count from 0; None for other leaves."""
    is_narrowed: bool
    """Whether float64 becomes float32."""
    has_channels_last: bool
    """Whether the leaf is an image (H, W, C), which becomes (C, H, W)."""

    @property
    def is_unchanged(self) -> bool:
        """Whether the leaf needs no conversion."""
        return self.start is None and not self.is_narrowed and not self.has_channels_last


class ObservationReader:
    """Converts observations of one space to leaves; copies only leaves whose values or dtypes change.

    If a vector environment may return other dtypes than it declares, its first observations must be passed to `adapt`.

    Args:
        space: Observation space of a single environment.
        keep_float64: Whether float64 leaves stay float64; otherwise they become float32.
    """

    def __init__(self, space: AnySpace, keep_float64: bool = False) -> None:
        self.raw_space, self.keep_float64 = space, keep_float64
        self.space = flatten_space(space, keep_float64=keep_float64)
        self.readings: list[LeafReading] = []
        """The conversion of each leaf."""
        self.mask_path: Path | None = None
        """Keys and indices that lead to the leaf `action_mask`; None if the space has no such leaf."""
        for path, leaf in _walk(space, ()):
            if path[-1:] == (MASK_LEAF,):
                self.mask_path = path
            else:
                self.readings.append(_reading(path, leaf, keep_float64))
        self._leaves: list[tuple[Path, str, Conversion | None]] = [
            (leaf.path, leaf.name, _conversion(leaf)) for leaf in self.readings]
        is_single = isinstance(space, LEAF_SPACES)
        self._convert_single = self._leaves[0][2] if is_single else None
        self.is_plain = is_single and self._convert_single is None
        """Whether `read` returns `{"obs": observations}` without any conversion."""
        self.has_mask = self.mask_path is not None

    def value_check(self) -> ValueCheck:
        """Return a new check of the values of leaves."""
        return ValueCheck(self.space, {leaf.name: leaf.start for leaf in self.readings if leaf.start is not None})

    def read(self, observations: Observation) -> dict[str, np.ndarray]:
        """Return the batched observations of a vector environment as leaves: each leaf is an array (E, ...)."""
        if self.is_plain:
            return {OBS_LEAF: observations}
        if self._convert_single is not None:
            return {OBS_LEAF: self._convert_single(observations)}
        leaves = {}
        for path, name, convert in self._leaves:
            array = part_at(observations, path)
            leaves[name] = array if convert is None else convert(array)
        return leaves

    def adapt(self, observations: Observation) -> None:
        """From now on, cast the leaves whose dtypes in batched `observations` differ from those of `space`.

        Single environments need no casts, because their observations are written to arrays of the declared dtypes.
        """
        for index, (name, array) in enumerate(self.read(observations).items()):
            path, _, convert = self._leaves[index]
            dtype = self.space[name].dtype
            if np.asarray(array).dtype != dtype:
                self._leaves[index] = path, name, functools.partial(_cast, convert, dtype)
                self.is_plain, self._convert_single = False, None

    def read_rows(self, rows: Sequence[Observation]) -> dict[str, np.ndarray]:
        """Return K observations of single environments as leaves: each leaf becomes an array (K, ...)."""
        leaves = {}
        for path, name, convert in self._leaves:
            array = np.array([part_at(row, path) for row in rows])
            dtype = self.space[name].dtype
            array = array if convert is None else convert(array)
            leaves[name] = array if array.dtype == dtype else array.astype(dtype)
        return leaves

    @property
    def recorded(self) -> dict[str, AnySpace]:
        """The space of each leaf, by name, as the environment declares it; without the leaf `action_mask`."""
        return {leaf.name: part_at(self.raw_space, leaf.path) for leaf in self.readings}

    def read_recorded(self, leaves: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return N recorded observations, leaf -> (N, ...) as the environment returned them, as actors receive them."""
        return {name: np.asarray(leaves[name] if convert is None else convert(leaves[name]), self.space[name].dtype)
                for _, name, convert in self._leaves}

    def all_allowed(self, space: AnySpace, count: int) -> np.ndarray | None:
        """Return `count` masks that allow all actions, (count, n) bool; None if `space` has no leaf `action_mask`."""
        if self.mask_path is None:
            return None
        return np.ones((count, *(part_at(space, self.mask_path).shape or ())), dtype=np.bool_)

    def mask(self, observations: Observation) -> np.ndarray | None:
        """Return the leaf `action_mask` of batched observations, (E, n) bool; None if the space has no such leaf."""
        if self.mask_path is None:
            return None
        return mask_flags(part_at(observations, self.mask_path))

    def mask_rows(self, rows: Sequence[Observation]) -> np.ndarray | None:
        """Return the leaf `action_mask` of K single observations, (K, n) bool; None if the space has no such leaf."""
        return None if self.mask_path is None else mask_flags([part_at(row, self.mask_path) for row in rows])


def mask_flags(given: Iterable[object], action_space: AnySpace | None = None) -> np.ndarray:
    """Return the masks of K observations as flags, (K, n) bool.

    Args:
        given: An array (K, n), or a sequence of K arrays or lists with n flags each.
        action_space: The space of actions, which has n actions; None: n is not checked.

    Raises:
        ConfigError: The masks have another length, or contain values other than 0 and 1.
    """
    if isinstance(given, np.ndarray) and given.dtype != object:
        mask = given
    else:
        rows = [_mask_row(row) for row in given]
        if len(shapes := {row.shape for row in rows}) > 1:
            raise ConfigError(f"'{MASK_LEAF}' has different shapes, {sorted(shapes)}; return one flag for each action, "
                             "also for actions that are never allowed")
        mask = np.stack(rows)
    number = None
    if isinstance(action_space, spaces.Discrete):
        number = int(action_space.n)
    elif isinstance(action_space, spaces.MultiDiscrete):
        number = int(np.sum(action_space.nvec))
    if mask.ndim != 2 or number not in (None, mask.shape[1]):
        needed = "one axis" if number is None else f"{number} flags, because the action space is {action_space}"
        raise ConfigError(f"'{MASK_LEAF}' must have {needed}, got the shape {mask.shape[1:]}; return a bool array with "
                         "one flag for each action")
    if mask.dtype == np.bool_:
        return mask
    # A negative number becomes a large unsigned one.
    if mask.dtype.kind in "iu" and int(mask.view(f"u{mask.dtype.itemsize}").max(initial=0)) <= 1:
        return mask.astype(np.bool_)
    if mask.dtype.kind != "f" or not np.isin(mask, (0, 1)).all():
        raise ConfigError(f"'{MASK_LEAF}' must contain flags, 1 where an action is allowed and 0 elsewhere, got "
                         f"{mask[0].tolist()} ({mask.dtype}); return a bool array")
    return mask.astype(np.bool_)


def _mask_row(row: EnvValue) -> np.ndarray:
    try:
        return np.asarray(row)
    except ValueError:
        raise ConfigError(f"'{MASK_LEAF}' has parts of different lengths; return one array with a flag for each "
                          "action, those of all components one after the other") from None


def _walk(
    space: AnySpace | Mapping[str, AnySpace], path: Path,
) -> Iterator[tuple[Path, AnySpace]]:
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


def leaf_paths(space: AnySpace) -> list[Path]:
    """Return the keys and indices that lead to each leaf of a space."""
    return [path for path, _ in _walk(space, ())]


def _name(path: Path) -> str:
    return "/".join(map(str, path)) or OBS_LEAF


def part_at(nested: EnvValue, path: Path) -> EnvValue:
    """Return the part of a nested space or observation to which `path` leads."""
    for key in path:
        nested = nested[key]
    return nested


def _refuse_empty(space: AnySpace, what: str, remedy: str) -> None:
    if 0 in (space.shape or ()):
        raise SpaceError(f"{what} is {space}, whose shape {space.shape} has no elements; {remedy}")


def _learner_space(space: AnySpace, keep_float64: bool = False) -> AnySpace:
    if isinstance(space, spaces.Discrete):
        return spaces.Discrete(int(space.n)) if space.start else space
    if isinstance(space, spaces.MultiDiscrete):
        return spaces.MultiDiscrete(space.nvec) if np.any(space.start) else space
    if not isinstance(space, spaces.Box):
        return space
    if has_channels_last(space):
        space = channels_first(space)
    if space.dtype == np.float64 and not keep_float64:
        # Bounds that exceed the range of float32 become infinite on purpose.
        with np.errstate(over="ignore"):
            return spaces.Box(space.low.astype(np.float32), space.high.astype(np.float32), dtype=np.float32)
    return space


def _reading(path: Path, space: AnySpace, keep_float64: bool) -> LeafReading:
    return LeafReading(
        path, _name(path), start=action_start(space), is_narrowed=space.dtype == np.float64 and not keep_float64,
        has_channels_last=has_channels_last(space))


_to_float32 = operator.methodcaller("astype", np.dtype(np.float32))


def _conversion(leaf: LeafReading) -> Conversion | None:
    """Return the function that converts the batched observations of a leaf; None if they need no conversion."""
    if leaf.is_unchanged:
        return None
    if leaf.start is None and not leaf.has_channels_last:  # the most common conversion, so it gets a faster function
        return _to_float32
    return functools.partial(_convert, leaf)


def _cast(convert: Conversion | None, dtype: np.dtype[np.generic] | None, array: np.ndarray) -> np.ndarray:
    """Return a leaf (E, ...) as `dtype`, after the conversion `convert`, if there is one."""
    return np.asarray(array if convert is None else convert(array), dtype)


def _convert(leaf: LeafReading, array: np.ndarray) -> np.ndarray:
    """Return a leaf (E, ...) of batched observations in the form that actors receive."""
    if leaf.start is not None:
        array = array - leaf.start
    if leaf.is_narrowed:
        array = array.astype(np.float32)
    return np.moveaxis(array, -1, 1) if leaf.has_channels_last else array
