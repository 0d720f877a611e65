"""Derive a tree of seeds from the experiment's seed, so that each generator of each worker has its own stream."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from pytorchrl.errors import ConfigError
from pytorchrl.support.numbers import plain

_GLOBAL_DRAWS = threading.RLock()  # guards the state of torch's global generator
_NO_NUMBERS = np.zeros(0, dtype=np.float32)
_DRAWS = ("generator", "update_generator", "noise")
"""Keys of an algorithm's state whose values determine the algorithm's random numbers."""


class Stream(IntEnum):
    """The purpose of a random generator; `derive_seed` returns a different seed for each purpose."""

    ENV = 0
    ACTING = 1
    BATCHES = 3
    INIT = 4
    EVALUATION = 5
    CONTINUATION = 6
    """All random numbers of an experiment after it has continued from a checkpoint."""
    REPLACEMENT = 7
    """All random numbers of gradient workers that replace lost ones in a resumed run."""


def check_seed(seed: object) -> int:
    """Return `seed` as an `int` if it is a whole number in [0, 2**63), else raise `ConfigError`."""
    number = plain(seed)
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < 2**63:
        raise ConfigError(f"seed must be a whole number from 0 to 2**63 - 1, got {seed!r}")
    return number


def derive_seed(seed: int, stream: Stream, *path: int) -> int:
    """Return a 63-bit seed for one stream of one worker.

    Args:
        seed: The experiment's seed.
        stream: The purpose of the stream.
        path: Numbers that distinguish generators with the same purpose, such as the index of the gradient worker, the
            index and the incarnation of the collection worker, and the index of the environment.

    Examples:
        >>> derive_seed(1, Stream.ENV, 0) == derive_seed(1, Stream.ENV, 0)
        True
        >>> derive_seed(1, Stream.ENV, 0) == derive_seed(1, Stream.ENV, 1)
        False
    """
    sequence = np.random.SeedSequence(seed, spawn_key=(int(stream), *path))
    return int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))


def torch_generator(seed: int, device: str | torch.device = "cpu") -> torch.Generator:
    """Return a new, seeded torch generator, for use in place of torch's global generator."""
    return torch.Generator(device=device).manual_seed(seed)


@contextmanager
def global_draws(generator: torch.Generator) -> Iterator[None]:
    """Give torch's global CPU generator the state of `generator` within a `with` block.

    User code draws initial weights from the global generator, so this block makes them reproducible. Afterwards,
    `generator` continues after the drawn numbers, and the global generator has its previous state. Threads that enter
    such a block at the same time wait for each other.
    """
    with _GLOBAL_DRAWS, torch.random.fork_rng(devices=[]):
        torch.set_rng_state(generator.get_state())
        try:
            yield
        finally:
            generator.set_state(torch.get_rng_state())


class UniformDraws:
    """Uniform random numbers from a CPU generator, drawn in blocks, because each call of torch takes microseconds.

    The numbers are the same as without blocks.
    """

    def __init__(self, generator: torch.Generator, dtype: torch.dtype = torch.float32, block: int = 256) -> None:
        """Draw from `generator`; other code must use or save this generator only through the property `generator`.

        Args:
            generator: A CPU generator.
            dtype: `torch.float32` or `torch.float64`.
            block: Number of numbers in a block; a call of `take` for at least an eighth of them gets its own block.
        """
        self._generator, self._dtype, self._size = generator, dtype, block
        self._block, self._used = _NO_NUMBERS, 0
        self._state_before = generator.get_state()  # the state of the generator before the block

    @property
    def generator(self) -> torch.Generator:
        """The generator, after putting back the numbers that were drawn in advance but are still unused."""
        self.rewind()
        return self._generator

    def take(self, count: int) -> np.ndarray:
        """Return the next `count` numbers in [0, 1), (count,), in the dtype of this object."""
        block, start = self._block, self._used
        if start + count > len(block):
            block, start = self._next_block(count), 0
        self._used = start + count
        return block[start:start + count]

    def rewind(self) -> None:
        """Put the unused numbers back: set the generator to its state directly after the last number taken."""
        if self._used < len(self._block):
            self._generator.set_state(self._state_before)
            torch.rand(self._used, dtype=self._dtype, generator=self._generator)
        self._block, self._used = _NO_NUMBERS, 0

    def _next_block(self, count: int) -> np.ndarray:
        self.rewind()
        self._state_before = self._generator.get_state()
        size = self._size if count < self._size // 8 else count
        self._block = torch.rand(size, dtype=self._dtype, generator=self._generator).numpy()
        return self._block


def with_own_draws(state: object, own: object) -> object:
    """Return a copy of `state` with the random generators and the exploration noise of `own`.

    Use this to load the algorithm state of another worker (`state`) into a worker whose own algorithm state is `own`.
    If the generators were copied, too, both workers would collect the same data.

    Raises:
        TypeError: A value in `state` has a different kind than in `own`, such as a string instead of a number.
    """
    if not isinstance(state, Mapping) or not isinstance(own, Mapping):
        if _kind(own) not in (None, _kind(state)):
            raise TypeError(f"the state of an algorithm has a {type(state).__name__} instead of a {type(own).__name__}")
        return state
    return {name: own[name] if name in _DRAWS else with_own_draws(value, own.get(name))
            for name, value in state.items()}


def _kind(value: object) -> object:
    """Return the kind of a value in the state of an algorithm, such as "number" for int and float.

    Return None for types without a kind; such values are not checked.
    """
    kinds: dict[str, type | tuple[type, ...]] = {
        "flag": bool, "number": (int, float), "text": str, "mapping": Mapping, "tensor": Tensor}
    return next((kind for kind, types in kinds.items() if isinstance(value, types)), None)
