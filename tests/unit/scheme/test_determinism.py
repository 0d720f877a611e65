"""Check that, in synchronous schemes, runs with the same seed end with the same parameters bit for bit."""

from __future__ import annotations

import pytest
import torch

from pytorchrl.envs.testing import CountingEnv

_SCHEMES = {
    "central": {},
    "2 collectors": {"num_col_workers": 2},
    "2 gradient workers": {"num_grad_workers": 2},
    "2 of each": {"num_col_workers": 2, "num_grad_workers": 2},
    "decentralized": {"num_grad_workers": 2, "distribute_gradients": True},
}


def _parameters_after(scheme, num_updates=10):
    for _ in range(num_updates):
        scheme.step()
    assert scheme.version == num_updates
    state = scheme.acting_state()["all"]
    scheme.stop()
    return state


@pytest.mark.parametrize("settings", _SCHEMES.values(), ids=_SCHEMES.keys())
def test_equal_seeds_give_equal_parameters(make_scheme, settings):
    first, second, other = (
        _parameters_after(make_scheme(CountingEnv, {"episode_length": 5}, seed=seed, **settings))
        for seed in (3, 3, 4))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


def test_global_generators_are_neither_read_nor_changed(make_scheme):
    """Check that a scheme neither reads nor changes the global random generators of a program."""
    import random

    import numpy as np

    states = []
    for number in (0, 1):
        random.seed(number)
        np.random.seed(number)  # noqa: NPY002 - the test is about the global generator
        torch.manual_seed(number)
        before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002
        states.append(_parameters_after(make_scheme("CartPole-v1", num_col_workers=2)))
        after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002
        assert before == after
    assert torch.equal(*states)
