"""Test the target entropy of SAC with action masks."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from tests.unit.agent.algorithms.replay_agents import make, make_batch


def test_target_entropy_is_that_of_allowed_actions():
    """Check that the target entropy depends on the number of allowed actions, here 2 of 4.

    The entropy is at most log 2, so a target for 4 actions would make alpha diverge.
    """
    algorithm = make("discrete_sac", lr_alpha=0.01, initial_alpha=1.0)
    mask = torch.tensor([[True, False, False, True]] * 8)
    batch = dataclasses.replace(make_batch(algorithm), action=torch.zeros(8, dtype=torch.int64), mask=mask,
                                next_mask=mask)
    for _ in range(20):  # the initial policy is nearly uniform, so its entropy is above the target
        algorithm.apply_gradients(algorithm.compute_gradients(batch)[0])
    assert float(algorithm.log_alpha.detach()) < 0
    given = make("discrete_sac", lr_alpha=0.01, target_entropy=1.0)
    for _ in range(20):
        given.apply_gradients(given.compute_gradients(batch)[0])
    assert float(given.log_alpha.detach()) > 0


def test_target_entropy_of_a_row_without_allowed_actions_is_that_of_all():
    """Check that a row without allowed actions is treated as if all actions were allowed.

    Otherwise, the target entropy would contain log 0, which is infinite.
    """
    algorithm = make("discrete_sac", target_entropy_scale=0.5)
    mask = torch.tensor([[True, False, False, True]] * 7 + [[False] * 4])
    batch = dataclasses.replace(make_batch(algorithm), action=torch.zeros(8, dtype=torch.int64), mask=mask,
                                next_mask=mask)
    assert float(algorithm._target_entropy_of(batch)) == pytest.approx(0.5 * (7 * math.log(2) + math.log(4)) / 8)
    gradients, info = algorithm.compute_gradients(batch)
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)
    assert math.isfinite(info["loss_alpha"])


def test_weight_decay_changes_networks_but_not_alpha():
    """Check that AdamW does not draw alpha to 1: log alpha of -2 changes as without decay, the networks do not."""
    plain, decayed = (
        make("sac", optimizer="adamw", weight_decay=decay, initial_alpha=math.exp(-2)) for decay in (0, 10))
    for algorithm in (plain, decayed):
        algorithm.apply_gradients([torch.ones(len(group)) for group in algorithm.groups.values()])
    for name, group in decayed.groups.items():
        assert torch.equal(group.data, plain.groups[name].data) == (name == "alpha")
