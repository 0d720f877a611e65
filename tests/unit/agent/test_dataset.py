"""Tests of the conversion of data sets to transitions, against plain loops, and of data that do not fit."""

from __future__ import annotations

import dataclasses
import functools

import gymnasium as gym
import numpy as np
import pytest
import torch

from pytorchrl import DQN, SAC, OffPolicyActor, PERBuffer, QActor, ReplayBuffer, VecEnv
from pytorchrl.agent.dataset import Dataset, joined, read_dataset, rollout_of
from pytorchrl.errors import CheckpointError, ConfigError
from pytorchrl.play.dataset import _write_npz
from tests.unit.learner.small_agents import Mixed

BOX = gym.spaces.Box(np.array([-2.0, 0.0, 1.0], np.float32), np.array([2.0, 5.0, 1.0], np.float32))


class Reach(gym.Env):
    """An environment with float64 observations and a Box of actions, one of which is constant."""

    observation_space, action_space = gym.spaces.Box(-9.0, 9.0, (3,), np.float64), BOX

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 3
        return self.np_random.normal(size=3), {}

    def step(self, action):
        self.left -= 1
        return self.np_random.normal(size=3), float(action[0]), self.left == 0, False, {}


def make_data(space=BOX, lengths=(3, 1, 2), ends="ttu", seed=0):
    """Return random steps; `ends` states how each episode ends: t (termination), u (truncation) or b (both)."""
    rng, count, num = np.random.default_rng(seed), sum(lengths), len(lengths)
    last = np.cumsum(lengths) - 1
    terminations, truncations = np.zeros(count, bool), np.zeros(count, bool)
    for end, index in zip(ends, last, strict=True):
        terminations[index], truncations[index] = end in "tb", end in "ub"
    space.seed(seed)
    return Dataset(
        {"obs": rng.normal(size=(count, 3))}, {"obs": rng.normal(size=(num, 3))},
        np.array([space.sample() for _ in range(count)]), rng.normal(size=count), terminations, truncations,
        np.array(lengths), np.full(num, -1))


def storage_of(envs, storage=ReplayBuffer, **options):
    is_discrete = isinstance(envs.action_space, gym.spaces.Discrete)
    cls, actor_class = (DQN, QActor) if is_discrete else (SAC, OffPolicyActor)
    actor = actor_class.create_factory(envs.observation_space, envs.action_space, hidden_sizes=(4,))(
        device="cpu", seed=0)
    algorithm = cls.create_factory(gamma=0.9)(device="cpu", actor=actor, seed=0)
    return storage.create_factory(**{"size": 100, "rollout_size": 4, **options})(
        device="cpu", actor=actor, algorithm=algorithm, num_envs=1, seed=0)


def batch_of_all_rows(storage, data, envs):
    """Insert the data, and return a batch with each transition once, in order."""
    storage.insert_data_slice([rollout_of(data, envs, storage.actor.from_env)])
    rows = np.arange(len(data.rewards))
    assert storage.drawable_rows().tolist() == rows.tolist()
    assert storage.counters["inserted"] == len(rows)
    return storage._batch(storage.ring, rows, np.ones(len(rows)))


@pytest.mark.parametrize("storage", [ReplayBuffer, PERBuffer])
@pytest.mark.parametrize("n_step", [1, 2])
def test_transitions_of_a_data_set_are_those_of_its_steps(n_step, storage):
    """Check each transition against a loop; a step that is terminated and truncated counts as terminated."""
    data, envs = make_data(lengths=(3, 1, 2, 2), ends="tutb"), VecEnv.create_factory(Reach)
    batch = batch_of_all_rows(storage_of(envs, storage, n_step=n_step), data, envs)
    low, high = BOX.low.astype(np.float64), BOX.high.astype(np.float64)
    ends = set((data.starts + data.lengths - 1).tolist())
    following = data.next_observations()
    for i in range(len(data.rewards)):
        ret, discount, last = data.rewards[i], 0.9, i
        if n_step == 2 and i not in ends:
            ret, discount, last = ret + 0.9 * data.rewards[i + 1], 0.81, i + 1
        scaled = [2 * (a - lo) / (hi - lo) - 1 if hi > lo else 0.0
                  for a, lo, hi in zip(data.actions[i], low, high, strict=True)]
        np.testing.assert_allclose(batch.action[i], scaled, atol=1e-6)
        np.testing.assert_array_equal(batch.obs["obs"][i], data.observations["obs"][i].astype(np.float32))
        np.testing.assert_array_equal(batch.next_obs["obs"][i], following[last].astype(np.float32))
        assert float(batch.ret[i]) == pytest.approx(ret, rel=1e-6)
        assert float(batch.discount[i]) == pytest.approx(0.0 if data.terminations[last] else discount)
    actor = storage_of(envs).actor
    np.testing.assert_allclose(actor.to_env(batch.action), data.actions, atol=1e-6)
    rollout = rollout_of(data, envs, actor.from_env)
    assert not bool((rollout.terminated & rollout.truncated).any())


def test_nested_observations_masks_and_offsets_are_converted():
    """Check that leaves, masks and actions are converted as `VecEnv` converts those of the environment."""
    env, rows, finals, actions, lengths = Mixed(), [], [], [], []
    for seed in range(2):
        obs, _ = env.reset(seed=seed)
        for _ in range(8):
            rows.append(obs)
            actions.append(5 + int(np.flatnonzero(obs["action_mask"])[0]))
            obs, *_ = env.step(actions[-1])
        finals.append(obs)
        lengths.append(8)
    leaves = ["picture", "body/place", "body/mode", "body/flags", "body/counts", "action_mask"]

    def stacked(found):
        return {leaf: np.stack([functools.reduce(lambda part, key: part[key], leaf.split("/"), one) for one in found])
                for leaf in leaves}

    ended = np.arange(16) % 8 == 7
    data = Dataset(stacked(rows), stacked(finals), np.array(actions), np.ones(16), ended, np.zeros(16, bool),
                   np.array(lengths), np.full(2, -1))
    envs = VecEnv.create_factory(Mixed)
    batch = batch_of_all_rows(storage_of(envs), data, envs)
    assert batch.action.tolist() == [action - 5 for action in actions]
    following = [*rows[1:8], finals[0], *rows[9:], finals[1]]
    for obs, mask, given in ((batch.obs, batch.mask, rows), (batch.next_obs, batch.next_mask, following)):
        assert obs.keys() == envs.observation_space.keys()
        for i, row in enumerate(given):
            np.testing.assert_array_equal(obs["picture"][i], np.moveaxis(row["picture"], -1, 0))
            np.testing.assert_array_equal(obs["body/place"][i], row["body"]["place"].astype(np.float32))
            assert int(obs["body/mode"][i]) == row["body"]["mode"] - 2
            assert obs["body/counts"][i].tolist() == (row["body"]["counts"] - [1, 4]).tolist()
            assert mask[i].tolist() == row["action_mask"].astype(bool).tolist()


def test_rewards_are_transformed_as_in_training():
    data = make_data()
    envs = VecEnv.create_factory(Reach, reward_transform="sign")
    batch = batch_of_all_rows(storage_of(envs), data, envs)
    assert batch.ret.tolist() == np.sign(data.rewards).tolist()


def test_a_directory_contains_the_episodes_of_its_files(tmp_path):
    parts = [make_data(seed=seed, lengths=(2, 3), ends="tu") for seed in range(3)]
    for name, part in zip("bca", parts, strict=True):
        _write_npz(part, tmp_path / f"{name}.npz")
    data = read_dataset(tmp_path)
    expected = [parts[2], parts[0], parts[1]]  # in the order of their names
    np.testing.assert_array_equal(data.rewards, np.concatenate([part.rewards for part in expected]))
    np.testing.assert_array_equal(
        data.final_observations["obs"], np.concatenate([part.final_observations["obs"] for part in expected]))
    assert data.lengths.tolist() == [2, 3] * 3
    with pytest.raises(ConfigError, match="must have the same leaves, shapes and dtypes to be read together"):
        joined([parts[0], make_data(gym.spaces.Discrete(3))])
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"contains no file \*\.npz"):
        read_dataset(tmp_path / "empty")


def replaced(**values):
    return dataclasses.replace(make_data(), **values)


@pytest.mark.parametrize(("data", "text"), [
    (lambda: make_data(gym.spaces.Discrete(3)), r"discrete actions of the shape \(\), but the environment has Box"),
    (lambda: replaced(actions=np.zeros((6, 2), np.float32)), r"continuous actions of the shape \(2,\)"),
    (lambda: replaced(actions=np.tile(np.array([2.1, 1.0, 1.0], np.float32), (6, 1))),
     r"action \[0, 0\] of the data set is 2\.09.*not in Box.*clip the actions"),
    (lambda: replaced(observations={"obs": np.zeros((6, 4))}, final_observations={"obs": np.zeros((3, 4))}),
     r"observations 'obs' of the data set have the shape \(4,\) and the dtype float64"),
    (lambda: replaced(observations={"obs": np.zeros((6, 3), int)}, final_observations={"obs": np.zeros((3, 3), int)}),
     "the dtype int64, but the environment has Box"),
    (lambda: replaced(observations={"eye": np.zeros((6, 3))}, final_observations={"eye": np.zeros((3, 3))}),
     r"has the observations \['eye'\], but those of the environment are \['obs'\]; record it in an environment with"),
    (lambda: replaced(rewards=np.full(6, np.nan)), r"rewards must be finite, got nan at \[0\]"),
])
def test_data_that_do_not_fit_are_refused(data, text):
    envs = VecEnv.create_factory(Reach)
    with pytest.raises(ConfigError, match=text):
        rollout_of(data(), envs, lambda action: action)


def test_categories_outside_their_space_are_refused():
    class Places(Reach):
        observation_space, action_space = gym.spaces.Discrete(500), gym.spaces.Discrete(6)

        def reset(self, **options):
            return 0, super().reset(**options)[1]

    envs = VecEnv.create_factory(Places)
    data = dataclasses.replace(
        make_data(gym.spaces.Discrete(6)), observations={"obs": np.array([1, 2, 500, 3, 4, 5])},
        final_observations={"obs": np.array([1, 2, 3])})
    with pytest.raises(ConfigError, match="step 2 of the data set: observation leaf 'obs' has the value 500"):
        rollout_of(data, envs, lambda action: action)
    wrong = dataclasses.replace(data, observations={"obs": np.arange(6)}, actions=np.array([0, 1, 6, 0, 0, 0]))
    with pytest.raises(ConfigError, match=r"action \[2\] of the data set is 6, which is not in Discrete\(6\)"):
        rollout_of(wrong, envs, lambda action: action)


@pytest.mark.parametrize(("space", "wrong"), [
    (gym.spaces.MultiDiscrete([2, 3], start=[0, 4]), [0, 7]), (gym.spaces.MultiBinary(2), [2, 0])])
def test_other_discrete_actions_are_checked_and_count_from_0(space, wrong):
    class Other(Reach):
        action_space = space

    envs, data = VecEnv.create_factory(Other), make_data(space)
    found = rollout_of(data, envs, lambda action: action)
    start = getattr(space, "start", np.zeros(2, int))
    assert found.action[:, 0].tolist() == (data.actions - start).tolist()
    assert found.action.dtype == torch.int64
    data.actions[1] = wrong
    with pytest.raises(ConfigError, match=r"action \[1, .* of the data set is"):
        rollout_of(data, envs, lambda action: action)
