"""Compare rollouts in rows of tensors with those in rows of arrays; the device is the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pytorchrl import VecEnv
from pytorchrl.agent.data import ActingStep, TensorActing
from pytorchrl.agent.env.tensors.vec_env import TensorVecEnv
from pytorchrl.agent.storages.rollout_rows import RolloutRows
from pytorchrl.agent.storages.tensor_rows import TensorRows
from pytorchrl.errors import CallOrderError
from tests.emulated_gpu.tensor_task import TensorTask

SIZE, NUM_ENVS = 9, 4


class Collectors:
    """Rows of arrays and of tensors, filled with the same steps of the same environments."""

    def __init__(self):
        factory = VecEnv.create_factory(lambda num_envs: TensorTask(num_envs, "cpu"), vec_env_size=NUM_ENVS)
        self.envs = factory(seed=3), factory(seed=3, kind=TensorVecEnv)
        memory = {"policy": torch.ones(NUM_ENVS, 2)}
        self.rows = RolloutRows(SIZE, NUM_ENVS, memory), TensorRows(SIZE, memory, factory.observation_space)
        self.rng = np.random.default_rng(0)
        for rows, envs in zip(self.rows, self.envs, strict=True):
            rows.start(*envs.reset())

    def fill(self, count):
        """Take steps; return the episodes that ended, as the environments of arrays report them."""
        episodes = []
        for _ in range(count):
            for ours, theirs in zip(*(rows.current()[:3] for rows in self.rows), strict=True):
                assert np.array_equal(np.asarray(ours), theirs) if not isinstance(ours, dict) else all(
                    np.array_equal(ours[name], theirs[name].numpy()) for name in ours)
            action = self.rng.uniform(-1, 1, self.envs[0].action_shape).astype(np.float32)
            state, noise = (self.rng.standard_normal((NUM_ENVS, 2)).astype(np.float32) for _ in range(2))
            step = self.envs[0].step(action)
            episodes += step.episodes
            self.rows[0].insert(ActingStep(action, action, {"policy": state}, {"noise": noise}), step)
            action, state, noise = map(torch.from_numpy, (action, state, noise))
            self.rows[1].insert(TensorActing(action, action, {"policy": state}, {"noise": noise}),
                                self.envs[1].step(action))
        return episodes


@pytest.mark.parametrize("copy", [False, True])
def test_rollouts_are_equal(copy):
    """Check rollouts of full length and shorter ones, which begin where the previous one ended."""
    both, numbers = Collectors(), []
    for count in (SIZE, 4, SIZE):
        episodes = both.fill(count)
        ours, theirs = (rows.take(copy) for rows in both.rows)
        order = np.lexsort(theirs.final_index.numpy().T[::-1])
        for name in ("obs", "done", "rhs", "action", "reward", "terminated", "truncated", "valid", "other"):
            first, second = getattr(ours, name), getattr(theirs, name)
            for part in first if isinstance(first, dict) else [None]:
                left, right = (leaf if part is None else leaf[part] for leaf in (first, second))
                assert torch.equal(left, right), (name, part)
        assert torch.equal(ours.final_index, theirs.final_index[torch.from_numpy(order)])
        for name, leaf in ours.final_obs.items():
            assert torch.equal(leaf, theirs.final_obs[name][torch.from_numpy(order)])
        host = theirs.host
        assert host.is_sound
        numbers.append(host.number)
        assert [(e.env_return, e.length, e.env_index, e.terminated) for e in host.episodes] == pytest.approx(
            [(e.env_return, e.length, e.env_index, e.terminated) for e in episodes])
        for name in ("done", "action", "reward", "terminated", "truncated", "valid", "final_index"):
            assert np.array_equal(getattr(host, name), getattr(theirs, name).numpy()), name
        assert theirs.num_valid() == ours.num_valid()
    assert np.diff(numbers).tolist() == [1, 1]
    for rows, envs in zip(both.rows, both.envs, strict=True):
        rows.start(*envs.reset())
    both.fill(2)
    assert both.rows[1].take(copy).host.number > numbers[-1] + 1  # it does not continue the previous rollout


@pytest.mark.parametrize("place", ["obs", "reward", "final_obs"])
def test_values_that_are_not_finite_are_noticed(place):
    both = Collectors()
    both.fill(SIZE)
    rows = both.rows[1]
    index = rows.take(copy=True).final_index[0].tolist()
    if place == "obs":
        rows._obs["point"][3, 1, 0] = torch.nan
    elif place == "reward":
        rows._columns["reward"][2, 0] = torch.inf
    else:
        rows._final_obs["point"][tuple(index)] = torch.nan
    rows._taken = False
    assert not rows.take(copy=True).host.is_sound
    if place == "final_obs":  # where no episode ended, nobody uses the last observation
        ended = rows._columns["ended"].nonzero().tolist()
        other = next([t, e] for t in range(SIZE) for e in range(NUM_ENVS) if [t, e] not in ended)
        rows._final_obs["point"][tuple(index)] = 0.0
        rows._final_obs["point"][tuple(other)] = torch.nan
        rows._taken = False
        assert rows.take(copy=True).host.is_sound


def test_the_order_of_calls_is_checked():
    both = Collectors()
    with pytest.raises(CallOrderError, match="before the first transition"):
        both.rows[1].take(copy=False)
    both.fill(SIZE)
    assert both.rows[1].num_steps == SIZE
    with pytest.raises(CallOrderError, match=f"already has {SIZE} steps"):
        both.fill(1)
