"""Test the seed tree: streams differ by position and purpose, and are reproducible."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from pytorchrl.agent.seeding import Stream, UniformDraws, check_seed, derive_seed, torch_generator
from pytorchrl.errors import ConfigError


def test_every_position_and_stream_has_a_different_seed():
    places = itertools.product(Stream, range(3), range(4), range(2))
    seeds = [derive_seed(7, stream, *path) for stream, *path in places]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_the_same_position_has_the_same_seed():
    assert derive_seed(1, Stream.ENV, 2, 3) == derive_seed(1, Stream.ENV, 2, 3) != derive_seed(2, Stream.ENV, 2, 3)


@pytest.mark.parametrize("seed", [-1, 2**63, "42", 1.0, True, None])
def test_bad_seed_raises(seed):
    with pytest.raises(ConfigError, match="seed must be a whole number"):
        check_seed(seed)


def test_torch_generator_does_not_change_the_global_one():
    before = torch.get_rng_state()
    first, second = (torch.rand(3, generator=torch_generator(5)) for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(("dtype", "block"), [(torch.float32, 256), (torch.float64, 100)])
def test_draws_in_blocks_equal_separate_draws(dtype, block):
    generator, separate = torch_generator(5), torch_generator(5)
    draws = UniformDraws(generator, dtype, block)
    for number, count in enumerate([1, 3, 20, 0, 200, 31, 32, 33, 500, 1] * 5):
        drawn = draws.take(count)
        np.testing.assert_array_equal(drawn, torch.rand(count, dtype=dtype, generator=separate).numpy(), strict=True)
        if number % 7 == 6:
            draws.rewind()
            assert torch.equal(generator.get_state(), separate.get_state())
            assert torch.equal(torch.rand(2, generator=generator), torch.rand(2, generator=separate))
