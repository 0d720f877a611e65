"""Test of the labels of curves."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytorchrl.plotting import labels


@pytest.mark.parametrize(("paths", "expected"), [
    (["runs/ppo"], ["ppo"]), (["runs/ppo", "runs/a2c"], ["ppo", "a2c"]),
    (["runs/ppo/seed1", "runs/a2c/seed1"], ["ppo/seed1", "a2c/seed1"]),
    (["here/ppo/seed1", "there/ppo/seed1", "runs/dqn"], ["here/ppo/seed1", "there/ppo/seed1", "runs/dqn"]),
    (["seed1", "runs/seed1"], ["seed1", "runs/seed1"]), (["runs/ppo", "runs/ppo"], ["ppo", "ppo"])])
def test_curves_have_uniquelabels_with_the_names_of_runs(paths, expected):
    assert labels([Path(path) for path in paths]) == expected
