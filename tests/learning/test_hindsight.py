"""Tests that hindsight experience replay reaches goals that are rarely reached without it."""

from __future__ import annotations

import functools
import importlib.util

import numpy as np
import pytest

from pytorchrl import train
from tests.conftest import ROOT

BITS = 9
OPTIONS = {
    "num_envs": 8, "num_steps": 2, "replay_size": 100_000, "start_steps": 500, "update_every": 16, "num_updates": 4,
    "mini_batch_size": 128, "hidden_sizes": (256,), "lr": 1e-3, "gamma": 0.98, "polyak": 0.95,
    "target_update_interval": 1, "initial_epsilon": 0.3, "final_epsilon": 0.05, "epsilon_steps": 6_000,
    "target_steps": 12_000}


@pytest.fixture
def bit_flipping():
    """Return the class of environments of the example."""
    spec = importlib.util.spec_from_file_location("bit_flipping", ROOT / "examples" / "bit_flipping.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.BitFlipping


def share_of_reached_goals(bit_flipping, **options):
    agent = train("dqn", functools.partial(bit_flipping, BITS), seed=1, progress=False, **OPTIONS, **options)
    games = agent.evaluate(200)
    return np.mean(np.array(games.returns) > -np.array(games.lengths))


@pytest.mark.learning
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("options", [
    {"relabel": "future"}, {"relabel": "final", "goal_terminated": None}, {"relabel": "future", "n_step": 2},
    {"relabel": "future", "prioritized": True}], ids=lambda options: "-".join(map(str, options.values())))
def test_bits_are_flipped_with_hindsight(bit_flipping, options):
    assert share_of_reached_goals(bit_flipping, **{"goal_terminated": bit_flipping.compute_terminated} | options) > 0.9


@pytest.mark.learning
@pytest.mark.timeout(1800)
def test_bits_are_not_flipped_without_hindsight(bit_flipping):
    assert share_of_reached_goals(bit_flipping) < 0.2
