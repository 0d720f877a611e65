"""Test `GroupBuffer`: groups compared with plain lists, advantages with a loop, padding, and exact counts of steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium.spaces import Discrete

from pytorchrl.agent.actors import DecoderActor
from pytorchrl.agent.algorithms import GRPO
from pytorchrl.agent.data import ActingStep
from pytorchrl.agent.env.tokens import TokenEnv
from pytorchrl.agent.storages import GroupBuffer
from pytorchrl.envs.tasks import Copy, SortDigits
from pytorchrl.errors import CallOrderError, ConfigError, EnvError

GROUP, NUM_ENVS = 3, 6


def storage_of(envs, size=2, **options):
    actor = DecoderActor.create_factory(envs.observation_space, envs.action_space, context=16, width=8)(
        device="cpu", seed=1)
    algorithm = GRPO.create_factory()(device="cpu", actor=actor, seed=1)
    return GroupBuffer.create_factory(size, **{"group_size": GROUP} | options)(
        device="cpu", actor=actor, algorithm=algorithm, num_envs=envs.num_envs, seed=1)


def collect(collection, num_steps):
    for _ in range(num_steps):
        collection.step()


class Collection:
    """Random tokens in a vector of sequences, which are stored and, independently, written to a list."""

    def __init__(self, waits=False, size=2, seed=0, task=(Copy, {"longest": 6}), **options):
        self.envs_factory = TokenEnv.create_factory(
            *task, NUM_ENVS, group_size=options.pop("env_group_size", GROUP), waits=waits)
        self.storage = storage_of(self.envs_factory, size, **options)
        self.envs = self.envs_factory(seed=1)
        self.rng, self.num_steps, self.log = np.random.default_rng(seed), 0, []
        self.running = [None] * NUM_ENVS
        self.storage.start(*self.envs.reset())

    def step(self):
        """Take one step; log each sequence in the order in which they start: [row, tokens, logp, rewards, is over]."""
        obs, rhs, first, mask = self.storage.current()
        assert mask is None
        tokens = obs["obs"].copy()
        action = self.rng.choice([3, 10], size=NUM_ENVS)  # a digit, or the end of the answer
        logp = self.rng.standard_normal(NUM_ENVS).astype(np.float32)
        version = np.full(NUM_ENVS, self.num_steps, np.int32)
        step = self.envs.step(action)
        self.storage.insert_transition(
            ActingStep(action, action, rhs, {"logp": logp, "version": version}), step)
        for row in range(NUM_ENVS):
            waits = first[row] and step.first[row] and not step.valid[row]
            if first[row] and not waits:
                self.running[row] = [row, [], False]
                self.log.append(self.running[row])
            if not waits:
                self.running[row][1].append(
                    (tokens[row], action[row], logp[row], self.num_steps, step.reward[row], step.valid[row]))
                self.running[row][2] = bool(step.terminated[row] or step.truncated[row])
        self.num_steps += 1

    def groups(self):
        """Return the complete groups, in the order in which they became complete, as lists of sequences."""
        groups = [self.log[start:start + GROUP] for start in range(0, len(self.log), GROUP)]
        done = [group for group in groups if len(group) == GROUP and all(sequence[2] for sequence in group)]
        # A group is complete at its latest step; among those of the same step, the one with the last row comes last.
        return sorted(done, key=lambda group: max((sequence[1][-1][3], sequence[0]) for sequence in group))


def check(rollout, groups):
    """Compare a rollout with logged groups."""
    sequences = [sequence for group in groups for sequence in group]
    assert rollout.num_envs == len(sequences)
    assert rollout.num_steps == max(len(rows) for _, rows, _ in sequences)
    for column, (_, rows, _) in enumerate(sequences):
        for t, (token, action, logp, number, reward, valid) in enumerate(rows):
            assert rollout.obs["obs"][t, column] == token
            assert rollout.action[t, column] == action
            assert rollout.other["logp"][t, column] == logp
            assert rollout.other["version"][t, column] == number
            assert rollout.reward[t, column] == reward
            assert rollout.valid[t, column] == valid
            assert rollout.done[t, column] == (t == 0)
        ended = rollout.terminated[:, column] | rollout.truncated[:, column]
        assert ended.nonzero().flatten().tolist() == [len(rows) - 1]
        assert not rollout.valid[len(rows):, column].any()
        assert not rollout.reward[len(rows):, column].any()
    assert rollout.num_valid() == sum(row[-1] for _, rows, _ in sequences for row in rows)


@pytest.mark.parametrize("waits", [True, False])
def test_rollouts_contain_whole_groups(waits):
    collection, taken = Collection(waits=waits), 0
    for _ in range(12):
        while not collection.storage.full:
            collection.step()
        rollout = collection.storage.get_all_buffer_data()
        check(rollout, collection.groups()[taken:taken + 2])
        taken += 2
        logged = sum(bool(row[-1]) for _, rows, _ in collection.log for row in rows)
        delivered = sum(bool(row[-1]) for group in collection.groups()[:taken] for _, rows, _ in group for row in rows)
        assert collection.storage.num_unfinished == logged - delivered
        assert waits <= (collection.storage.num_unfinished == 0)
    assert taken == 24
    lengths = {len(rows) for _, rows, _ in collection.log}
    assert len(lengths) > 4


def test_a_group_waits_for_its_last_member_while_others_leave():
    collection = Collection(size=1)
    order = []
    for _ in range(20):
        while not collection.storage.full:
            collection.step()
        collection.storage.get_all_buffer_data()
        group = collection.groups()[len(order)]
        order.append(collection.log.index(group[0]) // GROUP)
    assert order != sorted(order)


def test_groups_leave_in_the_order_in_which_they_started():
    collection, taken = Collection(order="started"), 0
    overtaken = 0
    for _ in range(12):
        while not collection.storage.full:
            collection.step()
        in_order = sorted(collection.groups(), key=lambda group: collection.log.index(group[0]))
        overtaken += len(in_order) > taken + 2
        check(collection.storage.get_all_buffer_data(), in_order[taken:taken + 2])
        assert collection.log.index(in_order[taken][0]) == taken * GROUP
        taken += 2
    assert overtaken > 0


def test_a_preempted_rollout_contains_the_complete_groups_only():
    collection = Collection(size=50)
    for _ in range(40):
        collection.step()
    found = collection.groups()
    assert 0 < len(found) < 50
    assert collection.storage.num_steps == 40
    check(collection.storage.get_all_buffer_data(), found)
    assert collection.storage.num_steps == 0
    empty = collection.storage.get_all_buffer_data()
    assert empty.num_steps == empty.num_valid() == 0


def test_a_reset_discards_all_sequences():
    collection = Collection(size=50)
    for _ in range(30):
        collection.step()
    assert collection.storage.num_unfinished > 0
    collection.storage.start(*collection.envs.reset())
    assert collection.storage.num_unfinished == 0
    collection.log, collection.running = [], [None] * NUM_ENVS
    for _ in range(30):
        collection.step()
    check(collection.storage.get_all_buffer_data(), collection.groups())


def test_groups_are_numbered_anew_after_a_reset():
    collection = Collection(order="started", size=1)
    for _ in range(3):
        while not collection.storage.full:
            collection.step()
        collection.storage.get_all_buffer_data()
    collection.storage.start(*collection.envs.reset())
    collection.log, collection.running = [], [None] * NUM_ENVS
    for _ in range(60):
        collection.step()
    assert collection.storage.full
    check(collection.storage.get_all_buffer_data(), [collection.log[:GROUP]])


def rollouts_of(*seeds):
    found = []
    for seed in seeds:
        collection = Collection(seed=seed)
        while not collection.storage.full:
            collection.step()
        found.append(collection.storage.get_all_buffer_data())
        collection.storage.algorithm.finish_rollout(found[-1])
    return found


@pytest.mark.parametrize("scale", [True, False])
def test_advantages_are_relative_to_the_group(scale):
    rollout, = rollouts_of(4)
    rollout.reward[rollout.terminated | rollout.truncated] = torch.tensor([0.0, 0.25, 1.0, 2.0, 0.0, 0.1])
    storage = storage_of(Collection().envs_factory, scale_advantages=scale)
    advantage, returns = storage.estimate(rollout)
    totals = [sum(float(rollout.reward[t, column]) for t in range(rollout.num_steps)) for column in range(2 * GROUP)]
    assert len(set(totals)) > 4
    for column in range(2 * GROUP):
        group = totals[column // GROUP * GROUP:][:GROUP]
        mean = sum(group) / GROUP
        std = (sum((value - mean) ** 2 for value in group) / (GROUP - 1)) ** 0.5
        expected = (totals[column] - mean) / (std + 1e-4 if scale else 1.0)
        assert advantage[:, column] == pytest.approx(expected, abs=1e-6)
        assert returns[:, column] == pytest.approx(totals[column])


@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize("reward", [0.0, 0.1, 0.35, 1e6 / 3])
def test_a_group_with_equal_returns_has_no_advantage(reward, scale):
    rollout, = rollouts_of(4)
    rollout.reward.zero_()
    rollout.reward[rollout.terminated | rollout.truncated] = reward
    advantage, returns = storage_of(Collection().envs_factory, scale_advantages=scale).estimate(rollout)
    assert not advantage.any()
    assert returns == pytest.approx(reward)


def test_batches_contain_each_sequence_once_per_epoch():
    rollouts = rollouts_of(1, 2)
    storage = storage_of(Collection().envs_factory)
    storage.insert_from(rollouts, ["a", "b"])
    storage.before_gradients()
    tokens = sum(rollout.num_valid() for rollout in rollouts)
    batches = list(storage.generate_batches(num_mini_batch=3, num_epochs=2))
    assert [batch.valid.shape[1] for batch in batches] == [4] * 6
    assert [batch.last for batch in batches] == [False] * 5 + [True]
    assert sum(batch.num_samples for batch in batches) == 2 * tokens
    assert sum(batch.num_new_samples for batch in batches) == tokens
    for epoch in (batches[:3], batches[3:]):
        drawn = sorted(float(batch.logp[batch.valid[:, column], column].sum()) for batch in epoch
                       for column in range(4))
        stored = sorted(float(rollout.other["logp"][rollout.valid[:, column], column].sum()) for rollout in rollouts
                        for column in range(rollout.num_envs))
        assert drawn == pytest.approx(stored)
    for batch in batches:
        assert batch.done[0].all()
        assert batch.other == {}


def test_wrong_uses_are_refused():
    for task in ((Copy, {"longest": 6}), (SortDigits, {"num_digits": 3})):  # prompts of different and of equal lengths
        collection = Collection(env_group_size=2, waits=True, task=task)
        with pytest.raises(EnvError, match="the 3 episodes of a group must begin with the same observations"):
            collect(collection, 60)
    storage = storage_of(Collection().envs_factory)
    with pytest.raises(CallOrderError, match="insert a transition first"):
        storage.get_all_buffer_data()
    with pytest.raises(ConfigError, match="does not store action masks"):
        storage.start({"obs": np.zeros(NUM_ENVS, np.int64)}, np.ones((NUM_ENVS, 2), bool))
    with pytest.raises(ConfigError, match="group_size must be a whole number >= 2"):
        GroupBuffer.create_factory(1, group_size=1)


def test_rows_grow_with_the_longest_sequence():
    space = Discrete(3)
    actor = DecoderActor.create_factory(space, space, context=256, width=8)(device="cpu", seed=1)

    class Long(Copy):
        def __init__(self):
            super().__init__(100)

        def prompt(self, rng):
            return [1] * 100 + [11]

    envs = TokenEnv.create_factory(Long, {}, 2, group_size=2)
    algorithm = GRPO.create_factory()(device="cpu", actor=actor, seed=1)
    storage = GroupBuffer.create_factory(1, group_size=2)(
        device="cpu", actor=actor, algorithm=algorithm, num_envs=2, seed=1)
    env = envs(seed=1)
    storage.start(*env.reset())
    while not storage.full:
        action = np.ones(2, np.int64)
        storage.insert_transition(ActingStep(action, action, storage.current()[1], {
            "logp": np.zeros(2, np.float32), "version": np.zeros(2, np.int32)}), env.step(action))
    rollout = storage.get_all_buffer_data()
    assert rollout.num_steps == 201
    assert torch.equal(rollout.obs["obs"][:101, 0], torch.tensor([1] * 100 + [11]))
    assert rollout.reward[-1].tolist() == [pytest.approx(100 / 101)] * 2
