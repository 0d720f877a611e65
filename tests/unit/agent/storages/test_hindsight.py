"""Test hindsight experience replay against a slow reference that lists the goals of each episode."""

from __future__ import annotations

import dataclasses
import io

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from pytorchrl.agent.data import RolloutData
from pytorchrl.agent.storages import PERBuffer, ReplayBuffer, RolloutSequenceBuffer, SequenceBuffer
from pytorchrl.agent.storages.hindsight import STRATEGIES
from pytorchrl.errors import ConfigError, ContractError

GAMMA = 0.9


def reward_of(achieved, desired, info):
    """Return rewards (N,) that tell achieved from desired goals, and one pair of goals from another."""
    assert info == {}
    achieved, desired = (goal.reshape(len(goal), -1).astype(np.float64) for goal in (achieved, desired))
    return achieved[:, 0] + 2.0 * desired[:, 1] - (achieved * desired)[:, 2]


class Ends:
    """Terminations that equal the stored ones for original goals, and depend on the values of other goals."""

    def __init__(self):
        self.stored = {}

    def __call__(self, achieved, desired, info):
        return np.array([self.stored[pair] if (pair := (a.tobytes(), d.tobytes())) in self.stored else a[0] > d[1]
                         for a, d in zip(achieved, desired, strict=True)])


def with_goals(collector, rollout, ends):
    """Return a rollout of a `Collector` whose observations are achieved goals; each environment keeps one goal.

    The rows in `collector.made` change in the same way, and `ends` is told the terminations.
    """
    obs, reward, num_steps = rollout.obs["obs"], rollout.reward.clone(), rollout.num_steps
    goals = [np.full(obs.shape[2:], e + 1, collector.obs[0].dtype) for e in range(rollout.num_envs)]
    for e, goal in enumerate(goals):
        for t, row in enumerate([row for row in collector.made[e] if row is not None][-num_steps:]):
            for part in (row.obs, row.next_obs):
                part.update(achieved_goal=part["obs"], desired_goal=goal)
            row.reward = reward[t, e] = float(reward_of(row.next_obs["obs"][None], goal[None], {})[0])
            ends.stored[row.next_obs["obs"].tobytes(), goal.tobytes()] = row.terminated
    desired = torch.from_numpy(np.stack(goals))
    final = rollout.final_obs and {"achieved_goal": rollout.final_obs["obs"],
                                   "desired_goal": desired[rollout.final_index[:, 1]]}
    return dataclasses.replace(rollout, reward=reward, final_obs={**rollout.final_obs, **final}, obs={
        **rollout.obs, "achieved_goal": obs, "desired_goal": desired.expand(num_steps + 1, *desired.shape)})


class Reference:
    """The goals that a transition may get, from a `PlainReplay`, by loops over the rows of its environment."""

    def __init__(self, plain):
        self.plain, self.resident = plain, plain.resident

    def goals(self, row, strategy):
        """Return the goals of a row's finished episode, in order of time; [] if the episode is not finished."""
        made, at, head = self.plain.streams[row.action]
        last = at
        while not (made[last].terminated or made[last].truncated):
            last += 1
            if last == head or made[last] is None or not made[last].valid or made[last].is_first:
                return []
        first = at
        while not made[first].is_first and self.is_before(made[first - 1]):
            first -= 1
        first = {"future": at, "final": last, "episode": first}[strategy]
        return [made[i].next_obs["achieved_goal"] for i in range(first, last + 1)]

    def is_before(self, row):
        return (row is not None and row.action in self.resident and row.valid
                and not (row.terminated or row.truncated))

    def target(self, row, goal, n_step, ends):
        """Return the n-step return, the discount and the next observation of a row with a new goal."""
        made, at, head = self.plain.streams[row.action]
        total, m = 0.0, 0
        while True:
            last = made[at + m]
            pair = last.next_obs["achieved_goal"][None], goal[None], {}
            total += GAMMA**m * reward_of(*pair)[0]
            m += 1
            terminated = last.terminated if ends is None else bool(ends(*pair)[0])
            following = made[at + m] if at + m < head else None
            if (m == n_step or terminated or last.terminated or last.truncated or following is None
                    or not following.valid):
                return total, 0.0 if terminated else GAMMA**m, last.next_obs


def check_batch(batch, reference, strategy, n_step, ends):
    """Compare each transition of a batch with the reference; return how many have a goal of a finished episode."""
    finished = 0
    for b, action in enumerate(batch.action.tolist()):
        row = reference.resident[action]
        goal, allowed = batch.obs["desired_goal"][b].numpy(), reference.goals(row, strategy)
        if allowed:
            assert any(np.array_equal(goal, other) for other in allowed)
            ret, discount, next_obs = reference.target(row, goal, n_step, ends)
            finished += 1
        else:
            assert np.array_equal(goal, row.obs["desired_goal"])
            ret, discount, next_obs, _, _ = reference.plain.window(row, n_step, GAMMA)
        np.testing.assert_allclose(float(batch.ret[b]), ret, rtol=1e-5, atol=1e-4)
        np.testing.assert_allclose(float(batch.discount[b]), discount, rtol=1e-6)
        for found, obs in ((batch.obs, row.obs), (batch.next_obs, next_obs)):
            assert found.keys() == obs.keys()
            for name, leaf in found.items():
                assert np.array_equal(leaf[b].numpy(), goal if name == "desired_goal" else obs[name])
    return finished


def saved_and_loaded(storage, build):
    """Return a storage with the state of another, which has been written to a file."""
    file = io.BytesIO()
    torch.save(storage.state_dict(), file)
    file.seek(0)
    other = build()
    other.load_state_dict(torch.load(file, weights_only=False))
    return other


@pytest.mark.every(3)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("frames", "same_step", "n_step"), [(0, True, 1), (0, False, 3), (0, True, 4), (3, True, 2)])
@pytest.mark.parametrize("cls", [ReplayBuffer, PERBuffer])
def test_goals_are_those_of_the_reference(
        cls, strategy, frames, same_step, n_step, build_replay, make_collector, make_plain_replay):
    """Compare batches of two collectors whose rollouts arrive in random order, while the ring wraps several times.

    A second storage, which is loaded from the state of the first before each draw, draws the same batch.
    """
    rng = np.random.default_rng([n_step, frames, same_step])
    collectors = [make_collector(seed=s, num_envs=2 + s, num_steps=6, same_step=same_step, num_frames=frames,
                                 p_end=0.2, p_life=0.05, p_cut=0.1, first_number=s * 10**6) for s in range(2)]
    for capacity, num_turns in ((29, 30), (80, 20)):
        ends = Ends()
        given = None if frames else ends
        build = lambda: build_replay(  # noqa: E731
            cls, capacity, gamma=GAMMA, n_step=n_step, stacked_frames=frames or None, relabel=strategy,  # noqa: B023
            relabel_share=1.0, goal_reward=reward_of, goal_terminated=given)  # noqa: B023
        storage, plain, finished = build(), make_plain_replay(capacity), 0
        for _ in range(num_turns):
            source, steps = int(rng.integers(2)), int(rng.integers(1, 7))
            rollout = with_goals(collectors[source], collectors[source].collect(steps), ends)
            storage.insert_data_slice([rollout], sources=[source])
            plain.insert(collectors[source], steps)
            if not storage.num_items:
                continue
            loaded = saved_and_loaded(storage, build)
            batch, same = storage.sample(24), loaded.sample(24)
            for name, leaf in batch.obs.items():
                assert torch.equal(leaf, same.obs[name])
            assert torch.equal(batch.ret, same.ret)
            finished += check_batch(batch, Reference(plain), strategy, n_step, given)
            if rng.random() < 0.3:
                storage = loaded
        assert finished > 5 * num_turns


def episodes(lengths, num_envs=1, first=0.0, is_over=True):
    """Return a rollout of one environment with episodes of these lengths; goal t is achieved by step t, from `first`.

    The last episode is truncated if `is_over`; the others are, too. The goal of all episodes is -1.
    """
    count, ends = sum(lengths), np.cumsum(lengths) - 1
    ends = ends if is_over else ends[:-1]
    achieved = torch.arange(count + 1, dtype=torch.float32)[:, None, None] + first - 0.5
    truncated, done = torch.zeros(count, 1, dtype=torch.bool), torch.zeros(count + 1, 1, dtype=torch.bool)
    truncated[ends], done[[0, *(ends + 1)]] = True, True
    desired = torch.full_like(achieved, -1.0)
    finals = torch.as_tensor(ends, dtype=torch.float32)[:, None] + first + 0.25
    flags = torch.zeros(count, 1, dtype=torch.bool)
    return RolloutData(
        obs={"achieved_goal": achieved, "desired_goal": desired}, done=done, rhs={}, mask=None,
        action=torch.arange(count)[:, None] + int(first), reward=torch.zeros(count, 1), terminated=flags,
        truncated=truncated, valid=~flags,
        final_index=torch.stack([torch.as_tensor(ends), torch.zeros(len(ends), dtype=torch.int64)], 1),
        final_obs={"achieved_goal": finals, "desired_goal": torch.full_like(finals, -1.0)})


def is_reached(achieved, desired, info):
    """Return 1 for each goal that is reached exactly, else 0, (N,)."""
    return (achieved == desired).all(-1)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_goals_are_uniform_and_their_share_is_the_given_one(strategy, build_replay):
    storage = build_replay(ReplayBuffer, 64, relabel=strategy, relabel_share=0.75, goal_reward=is_reached)
    storage.insert_data_slice([episodes([6, 1, 5, 3], is_over=False)])
    batch = storage.sample(60_000)
    action, goal = batch.action.numpy(), batch.obs["desired_goal"][:, 0].numpy()
    new = goal != -1.0
    assert not new[action >= 12].any()  # the last episode is not finished
    assert abs(new[action < 12].mean() - 0.75) < 0.01
    # The achieved goals after the steps; the last step of an episode leads to its final observation.
    after = {t: t + 0.25 if t in (5, 6, 11) else t + 0.5 for t in range(12)}
    for t in range(12):
        first, last = next((a, b) for a, b in ((0, 5), (6, 6), (7, 11)) if a <= t <= b)
        allowed = {"future": range(t, last + 1), "final": [last], "episode": range(first, last + 1)}[strategy]
        drawn = goal[new & (action == t)]
        counts = [int((drawn == np.float32(after[i])).sum()) for i in allowed]
        assert sum(counts) == len(drawn)
        assert len(counts) == 1 or chisquare(counts).pvalue > 1e-3
    reached = batch.ret.numpy() == 1.0
    own = np.isclose(goal, [after.get(t, -9.0) for t in action])
    assert np.array_equal(reached, new & own)
    assert own[new & (action == 6)].all()


def test_one_step_episodes_always_succeed(build_replay):
    storage = build_replay(ReplayBuffer, 8, relabel="future", relabel_share=1.0, goal_reward=is_reached,
                           goal_terminated=is_reached)
    for first in (0.0, 10.0, 20.0):
        storage.insert_data_slice([episodes([1] * 5, first=first)])
    batch = storage.sample(50)
    assert batch.ret.tolist() == [1.0] * 50
    assert batch.discount.tolist() == [0.0] * 50


def test_goals_come_from_episodes_that_span_rollouts_and_lost_their_first_steps(build_replay):
    """An episode of 9 steps arrives in three rollouts, and is longer than the ring of 7 rows."""
    storage = build_replay(ReplayBuffer, 7, relabel="episode", relabel_share=1.0, goal_reward=is_reached)
    for first, is_over in ((0, False), (3, False), (6, True)):
        rollout = episodes([3], first=float(first), is_over=is_over)
        rollout.done[0] = first == 0
        storage.insert_data_slice([rollout], sources=["collector"])
        if not is_over:
            assert (storage.sample(50).obs["desired_goal"] == -1.0).all()
    goals = set(storage.sample(400).obs["desired_goal"][:, 0].tolist())
    assert goals == {2.5, 3.5, 4.5, 5.5, 6.5, 7.5, 8.25}
    storage.reset()
    assert storage.sample(4) is None
    storage.insert_data_slice([episodes([2], first=50.0)], sources=["collector"])
    assert set(storage.sample(100).obs["desired_goal"][:, 0].tolist()) == {50.5, 51.25}


def test_recomputed_terminations_end_returns(build_replay):
    """With golden values: n = 3, and an episode of 3 steps, whose reward is 1 at the goal."""
    found = {}
    for ends in (None, is_reached):
        storage = build_replay(ReplayBuffer, 3, gamma=0.5, n_step=3, relabel="future", relabel_share=1.0,
                               goal_reward=is_reached, goal_terminated=ends)
        storage.insert_data_slice([episodes([3])])
        batch = storage.sample(300)
        found[ends] = {(action, goal): (ret, discount) for action, goal, ret, discount in zip(
            batch.action.tolist(), batch.obs["desired_goal"][:, 0].tolist(), batch.ret.tolist(),
            batch.discount.tolist(), strict=True)}
    assert found[None] == {(0, 0.5): (1.0, 0.125), (0, 1.5): (0.5, 0.125), (0, 2.25): (0.25, 0.125),
                           (1, 1.5): (1.0, 0.25), (1, 2.25): (0.5, 0.25), (2, 2.25): (1.0, 0.5)}
    assert found[is_reached] == {key: (ret, 0.0) for key, (ret, _) in found[None].items()}


def test_priorities_of_collectors_are_those_of_the_original_goals(build_replay):
    """Collectors compute TD errors from the transitions as they were."""
    storage = build_replay(PERBuffer, 8, relabel="future", relabel_share=1.0, goal_reward=is_reached)
    seen = []
    storage.algorithm.td_errors = lambda batch: seen.append(batch) or batch.ret.abs() + 1.0
    rollout = episodes([2, 2])
    storage.add_errors(rollout)
    assert (seen[0].obs["desired_goal"] == -1.0).all()
    storage.insert_data_slice([rollout])
    batch = storage.sample(6)
    assert (batch.obs["desired_goal"] != -1.0).all()
    storage.after_gradients(batch, {"errors": np.full(6, 4.0)})
    assert storage.priority_sums.get(batch.ids.numpy()).max() > 2.0


@pytest.mark.parametrize(("function", "text"), [
    (lambda achieved, desired, info: float((achieved == desired).all()), "one number for each of N goals"),
    (lambda achieved, desired, info: np.full((len(achieved), 1), 0.0), r"expected an array of shape \(9,\)"),
    (lambda achieved, desired, info: np.array(["reached"] * len(achieved)), "one number for each of N goals"),
    (lambda achieved, desired, info: 5.0 * is_reached(desired, achieved, info) + 2.0, "goal_reward returned 2 for"),
])
def test_wrong_functions_are_refused_when_the_first_batch_is_drawn(function, text, build_replay):
    storage = build_replay(ReplayBuffer, 20, relabel="future", goal_reward=function)
    storage.insert_data_slice([episodes([3, 4])])
    with pytest.raises(ContractError, match=text):
        storage.sample(9)


def test_terminations_that_differ_from_the_stored_ones_are_refused(build_replay):
    storage = build_replay(ReplayBuffer, 20, relabel="future", goal_reward=is_reached,
                           goal_terminated=lambda achieved, desired, info: np.ones(len(achieved), bool))
    storage.insert_data_slice([episodes([3, 4])])
    with pytest.raises(ContractError, match=r"goal_terminated returned 1 .* the terminated of this step was 0"):
        storage.sample(9)


def test_options_without_effect_and_other_storages_are_refused(build_replay):
    for name, value in (("relabel_share", 0.5), ("goal_reward", is_reached), ("goal_terminated", is_reached)):
        with pytest.raises(ConfigError, match=f"{name} needs relabel"):
            ReplayBuffer.create_factory(10, **{name: value})
    with pytest.raises(ConfigError, match="must be one of"):
        ReplayBuffer.create_factory(10, relabel="random")
    for cls in (SequenceBuffer, RolloutSequenceBuffer):
        with pytest.raises(ConfigError, match=f"single transitions, but {cls.__name__} provides sequences"):
            build_replay(cls, 1000, relabel="future", goal_reward=is_reached)
    with pytest.raises(ConfigError, match="relabel needs goal_reward here"):
        build_replay(ReplayBuffer, 10, relabel="future")


def test_links_in_a_circle_do_not_hang(build_replay):
    """A damaged file may link a step to an earlier step of its episode."""
    build = lambda: build_replay(ReplayBuffer, 6, relabel="final", relabel_share=1.0, goal_reward=is_reached)  # noqa: E731
    storage, other = build(), build()
    storage.insert_data_slice([episodes([4])])
    state = storage.state_dict()
    assert state["contents"]["ring"]["columns"]["link"][:3].tolist() == [1, 2, 3]
    state["contents"]["ring"]["columns"]["link"][1] = 0
    other.load_state_dict(state)
    batch = other.sample(60)
    goals = dict(zip(batch.action.tolist(), batch.obs["desired_goal"][:, 0].tolist(), strict=True))
    assert goals == {0: -1.0, 1: -1.0, 2: 3.25, 3: 3.25}


def goals_by_source(storage):
    """Return the goals of transitions with actions below 100 and of the others, each as a set."""
    batch = storage.sample(400)
    is_other, goal = batch.action.numpy() >= 100, batch.obs["desired_goal"][:, 0].numpy()
    return set(goal[~is_other].tolist()), set(goal[is_other].tolist())


def test_rows_that_overwrite_an_episode_lend_it_no_goals(build_replay):
    """Overwrite the first steps of an episode, after its end and while it runs, by another collector's steps."""
    build = lambda: build_replay(  # noqa: E731
        ReplayBuffer, 6, relabel="episode", relabel_share=1.0, goal_reward=is_reached)
    finished, running = build(), build()
    finished.insert_data_slice([episodes([4]), episodes([4], first=100.0)], sources=["one", "other"])
    assert goals_by_source(finished) == ({2.5, 3.25}, {100.5, 101.5, 102.5, 103.25})

    running.insert_data_slice([episodes([4], is_over=False)], sources=["one"])
    for first in (100.0, 110.0):
        running.insert_data_slice([episodes([2], first=first)], sources=["other"])
    end = episodes([1], first=4.0)
    end.done[0] = False
    running.insert_data_slice([end], sources=["one"])
    assert goals_by_source(running) == ({3.5, 4.25}, {100.5, 101.25, 110.5, 111.25})

    unfinished = build()
    unfinished.insert_data_slice([episodes([6])], sources=["one"])
    unfinished.insert_data_slice([episodes([3], first=100.0, is_over=False)], sources=["other"])
    assert goals_by_source(unfinished) == ({3.5, 4.5, 5.25}, {-1.0})

    restarted = build()
    restarted.insert_data_slice([episodes([2], is_over=False)], sources=["one"])
    restarted.insert_data_slice([episodes([2], first=100.0)], sources=["one"])
    assert goals_by_source(restarted) == ({-1.0}, {100.5, 101.25})
