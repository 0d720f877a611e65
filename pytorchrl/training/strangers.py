"""Limit what the run of a stranger can demand: memory, time, and files that are not regular.

The size of `model.pt`, which is read first, limits the network and the environments that `run.json` describes: a small
file can describe a network of any size, but it cannot contain its weights.
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pytorchrl.agent.option_values.descriptions import mapping
from pytorchrl.errors import CheckpointError
from pytorchrl.support.code import IF_TRUSTED

_MOST_VALUES = 10_000
"""Largest number of values in the description of an agent."""
_MOST_ENVS = 1_000
_MOST_STEPS = 1_000_000
"""Largest number of steps of an episode, and largest number in the arguments of environments that counts steps."""
_LARGEST_NUMBER = 10_000
"""Largest whole number in the arguments of environments and wrappers, such as a size or a number of repetitions."""
_FEWEST_FRAMES, _MOST_FRAMES = 16, 1_000
_LARGEST_FILE = 64 << 20
# Initializing a layer needs a few tensors of its size, so the tensors of an agent may be this many times as large as
# those in its model, plus the given number of bytes.
_SIZE_FACTOR, _SIZE_BYTES = 16, 64 << 20
# A layer needs about 15 operations. The model of each policy is a few tensors.
_CALLS_PER_TENSOR, _CALLS = 500, 20_000

Model = Mapping[str, torch.Tensor]
"""The tensors in `model.pt`, by name."""


class BoundedTensors(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch states no types here
    """Within a `with` block, refuse tensors and numbers of operations that do not fit the size of a model.

    Raises:
        CheckpointError: The limit is exceeded.
    """

    def __init__(self, model: Model) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in model.values()}
        self._left = _SIZE_FACTOR * sum(storages.values()) + _SIZE_BYTES
        self._calls = _CALLS_PER_TENSOR * len(model) + _CALLS

    def __torch_dispatch__(
        self, func: Callable[..., object], types: Sequence[type], args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Count the elements of a new tensor before it is allocated, and execute the operation."""
        sizes = [item for item in args if isinstance(item, (list, tuple)) and all(type(size) is int for size in item)]
        if "empty" in str(func) or not any(isinstance(item, torch.Tensor) for item in args):
            self._left -= 4 * max((math.prod(size) for size in sizes), default=0)
        self._calls -= 1
        if min(self._left, self._calls) < 0:
            raise CheckpointError(f"its networks are much larger than its model; {IF_TRUSTED}")
        return func(*args, **(kwargs or {}))


def check_size(description: object) -> None:
    """Raise `CheckpointError` if the description of an agent has too many values to be read quickly."""
    left, stack = _MOST_VALUES, [description]
    while stack:
        value = stack.pop()
        items = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
        left -= len(items)
        if left < 0:
            raise CheckpointError(f"its description has more than {_MOST_VALUES:,} values; {IF_TRUSTED}")
        stack += items


def check_environment(options: Mapping[str, object], model: Model, *, is_played: bool) -> None:
    """Check the options of environments, as `run.json` describes them.

    Args:
        options: The description of the options.
        model: The tensors in `model.pt`.
        is_played: Whether these environments are played; the number of other environments does not matter.

    Raises:
        CheckpointError: An option demands too much memory or time, or names a file that is not regular.
    """
    # Each of the stacked frames needs a weight.
    num_weights = max((tensor.numel() for tensor in model.values()), default=0)
    limits = {"frame_stack": min(max(num_weights, _FEWEST_FRAMES), _MOST_FRAMES), "max_episode_steps": _MOST_STEPS,
              **({"vec_env_size": _MOST_ENVS} if is_played else {})}
    demands: list[tuple[str, object, float]] = [
        (name, options[name], limit) for name, limit in limits.items() if name in options]
    for name in ("env_kwargs", "test_env_kwargs", "wrappers", "env_fn"):
        for key, value in _values(options.get(name), name):
            limit = _MOST_STEPS if "step" in key else math.inf if "seed" in key else _LARGEST_NUMBER
            demands.append((f"{name} {key}" if key != name else name, value, limit))
            if isinstance(value, str):
                _check_file(value)
    for name, value, limit in demands:
        if isinstance(value, int) and abs(value) > limit:
            raise CheckpointError(f"its environments have {name}={value:.3g}, but at most {limit:,} is accepted; "
                                  f"{IF_TRUSTED}")


def _values(value: object, key: str) -> Iterator[tuple[str, object]]:
    """Yield (nearest key, value) for each number and text in a description."""
    if isinstance(value, dict):
        for name, item in mapping(value).items():
            yield from _values(item, str(name))
    elif isinstance(value, list):
        for item in value:
            yield from _values(item, key)
    else:
        yield key, value


def _check_file(path: str) -> None:
    """Raise `CheckpointError` if a text is the path of a pipe, a device or a huge file, which could block a reader."""
    try:
        found = os.stat(os.path.expanduser(path))
    except (OSError, ValueError):  # there is no such file
        return
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)) or found.st_size > _LARGEST_FILE:
        raise CheckpointError(f"its environments read {path!r}, which is not a regular file of at most "
                              f"{_LARGEST_FILE >> 20} MiB; {IF_TRUSTED}")
