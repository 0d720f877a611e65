"""Test the replacement of environments that raise, and its effects on learners and on other environments."""

from __future__ import annotations

import csv
import functools
import itertools
import multiprocessing
import traceback

import numpy as np
import pytest
import torch

from pytorchrl.agent.actors.normalizers import discounted_sums
from pytorchrl.agent.data import ActingStep
from pytorchrl.agent.env import VecEnv
from pytorchrl.agent.env.restarts import RESTARTS, EnvFault, RememberingEnv, RestartingEnv, Restarts
from pytorchrl.agent.storages.returns import gae
from pytorchrl.agent.storages.rollout_rows import RolloutRows
from pytorchrl.envs.testing import CountingEnv, FaultyEnv, RaisingEnv
from pytorchrl.errors import EnvError
from tests.unit.agent.env.planned_faults import MODES, NUM_ENVS, Walk, Planned, planned, play


def seen_by(rows, index):
    """Return the results of one environment as plain numbers, one list per row."""
    found = []
    for obs, mask, step in rows:
        row = [leaf[index].tolist() for leaf in obs.values()] + [None if mask is None else mask[index].tolist()]
        if step is not None:
            finals = np.flatnonzero(step.final_index == index)
            row += [float(step.reward[index]), *(bool(array[index]) for array in (
                step.terminated, step.truncated, step.valid, step.first)),
                [leaf[k].tolist() for k in finals for leaf in step.final_obs.values()],
                [(e.env_return, e.length, e.terminated) for e in step.episodes if e.env_index == index]]
        found.append(row)
    return found


@MODES
@pytest.mark.parametrize("kind", ["box", "dict", "info_mask"])
@pytest.mark.parametrize("reset_too", [False, True])
def test_a_fault_does_not_affect_other_environments(autoreset, kind, reset_too):
    plan = {(2, "step", 17), *({(3, "reset", 1)} if reset_too else ())}
    clean, _ = planned((), Walk, {"kind": kind}, autoreset=autoreset)
    faulty, _ = planned(plan, Walk, {"kind": kind}, autoreset=autoreset)
    expected, found = play(clean, 60), play(faulty, 60)
    assert faulty.num_restarts == 1 + reset_too
    for index in range(NUM_ENVS):
        is_same = seen_by(found, index) == seen_by(expected, index)
        assert is_same == (index not in ((1, 2) if reset_too else (1,)))


@MODES
@pytest.mark.parametrize("kind", ["box", "dict", "info_mask"])
def test_a_fault_truncates_the_episode_at_the_last_valid_observation(autoreset, kind):
    env, _ = planned({(2, "step", 4)}, Walk, {"kind": kind}, autoreset=autoreset, on_env_error="restart")
    rows = play(env, 12)
    at = next(t for t, (_, _, step) in enumerate(rows) if step is not None and env.num_restarts and not step.valid[1]
              and step.truncated[1])
    last, (obs, _, hole) = rows[at - 1][0], rows[at]
    assert (hole.terminated[1], hole.truncated[1], hole.valid[1], hole.reward[1]) == (False, True, False, 0.0)
    assert not [episode for episode in hole.episodes if episode.env_index == 1]
    if autoreset == "same_step":
        assert hole.first[1]
        row = hole.final_index.tolist().index(1)
        shown = {name: leaf[row] for name, leaf in hole.final_obs.items()}
        new = obs
    else:
        shown = {name: leaf[1] for name, leaf in obs.items()}
        new, _, reset_step = rows[at + 1]
        assert (reset_step.first[1], reset_step.valid[1], reset_step.truncated[1]) == (True, False, False)
    for name, leaf in last.items():
        np.testing.assert_array_equal(shown[name], leaf[1])
        assert np.any(new[name][1] != leaf[1]) or name == "count"


def rollout_of(rows):
    """Return the rollout that a storage records from the results of `play`."""
    storage = RolloutRows(len(rows) - 1, NUM_ENVS, {})
    storage.start(*rows[0][:2])
    action = np.zeros(NUM_ENVS, np.int64)
    for obs, mask, step in rows[1:]:
        storage.insert(ActingStep(action, action, {}, {}), step._replace(obs=obs, mask=mask))
    return storage.take(copy=True)


@MODES
@pytest.mark.parametrize("cut_at", [1, 4, 5, 19])
def test_advantages_across_a_cut_equal_brute_force(autoreset, cut_at):
    """Compare advantages with their definition, for episodes that a fault cuts short.

    A cut episode bootstraps from the last observation before the fault.
    """
    gamma, lam, num_steps = 0.9, 0.8, 20
    env, _ = planned({(2, "step", cut_at), (4, "step", 3)}, Walk, autoreset=autoreset)
    rows = play(env, num_steps)
    assert env.num_restarts >= 1
    data = rollout_of(rows)

    def value_of(place):
        return np.float32(np.sin(place[..., 0]) + place[..., 1])
    value = torch.from_numpy(value_of(data.obs["obs"].numpy()))
    final_value = torch.from_numpy(value_of(data.final_obs["obs"].numpy()))
    found, returns = gae(data, value, final_value, gamma, lam)
    for e in range(NUM_ENVS):
        for episode, bootstrap in episodes_of(rows, e):
            values = [float(value[t, e]) for t in episode]
            rewards = [float(data.reward[t, e]) for t in episode]
            following = [*values[1:], float(value_of(bootstrap)) if bootstrap is not None else 0.0]
            for k, t in enumerate(episode):
                expected = sum((gamma * lam) ** (j - k) * (rewards[j] + gamma * following[j] - values[j])
                               for j in range(k, len(episode)))
                assert found[t, e] == pytest.approx(expected, rel=1e-4, abs=1e-4)
                assert returns[t, e] == pytest.approx(expected + values[k], rel=1e-4, abs=1e-4)
    sums = discounted_sums(data, gamma, np.zeros(NUM_ENVS))
    for e in range(NUM_ENVS):
        for episode, _ in episodes_of(rows, e):
            first_reward = float(data.reward[episode[0], e])
            assert sums[episode[0], e] == first_reward, "the sum must not include the previous episode"
    assert not found[~data.valid.numpy()].any()
    assert int(data.valid.sum()) == data.num_valid() < num_steps * NUM_ENVS


def episodes_of(rows, e):
    """Yield (valid transitions, observation to bootstrap from or None) for each episode of environment e."""
    episode = []
    for t in range(len(rows) - 1):
        step = rows[t + 1][2]
        if not step.valid[e]:
            if episode:  # after a fault, bootstrap from the observation before the failed step
                yield episode, rows[t][0]["obs"][e]
            episode = []
            continue
        episode.append(t)
        if step.terminated[e] or step.truncated[e]:
            finals = np.flatnonzero(step.final_index == e)
            last = step.final_obs["obs"][finals[0]] if len(finals) else rows[t + 1][0]["obs"][e]
            yield episode, None if step.terminated[e] else last
            episode = []
    if episode:
        yield episode, rows[-1][0]["obs"][e]


def at_random(env_fn=Walk, num_envs=NUM_ENVS, probability=0.05, **options):
    return VecEnv.create_factory(env_fn, None, num_envs, wrappers=(functools.partial(
        RaisingEnv, probability=probability),), on_env_error="restart", max_env_restarts=10_000, **options)


@MODES
def test_the_same_seed_gives_the_same_faults_and_the_same_run(autoreset):
    runs = []
    for _ in range(2):
        env = at_random(autoreset=autoreset)(seed=3)
        rows = play(env, 200)
        assert env.num_restarts > 20
        runs.append([seen_by(rows, index) for index in range(NUM_ENVS)])
    assert runs[0] == runs[1]


@MODES
def test_faults_have_equal_effects_in_processes_and_leave_none(autoreset, caplog):
    before = set(multiprocessing.active_children())
    runs = []
    for backend in ("sync", "async"):
        caplog.clear()
        env = at_random(CountingEnv, 2, backend=backend, autoreset=autoreset)(seed=3)
        rows = play(env, 100)
        assert env.num_restarts == len(caplog.records) > 5
        assert "raised at random" in caplog.text
        assert 'raise RuntimeError("raised at random")' in caplog.text, "the log must contain the traceback"
        runs.append(([seen_by(rows, index) for index in range(2)], env.num_restarts))
        env.close()
    assert runs[0] == runs[1]
    assert set(multiprocessing.active_children()) == before


def test_a_traceback_is_logged_once_for_each_place(caplog):
    restarts = Restarts(9)
    for place, text in [("step", "1"), ("step", "2"), ("reset", "2"), ("step", "3"), ("reset", "4")]:
        restarts.spend(EnvFault(f"env 0: {text}", f"  File in {place}\nKeyError: {text}"), None)
    assert ["  File in" in message for message in caplog.messages] == [True, False, True, False, False]
    assert [message[:8] for message in caplog.messages] == [f"env 0: {text}" for text in "12234"]


def test_the_last_observation_of_a_process_is_a_copy():
    """Check that the last observation is unchanged if the environment overwrites its array and then raises."""
    wrap = functools.partial(Planned, plan={(0, "step", 1)}, log=[], copies=itertools.count())
    env = RememberingEnv(RestartingEnv(wrap(Walk()), "env 0", lambda: wrap(Walk()), Restarts(3, logs=False)))
    env.reset(seed=0)
    last = env.step(0)[0].copy()
    observation, reward, terminated, truncated, _ = env.step(0)
    assert (observation.tolist(), reward, terminated, truncated) == (last.tolist(), 0.0, False, True)
    _, info = env.reset()
    (fault,) = info[RESTARTS]
    assert "env 0: step raised after 2 steps, seed 0: RuntimeError: planned" in fault.message
    assert RESTARTS not in env.reset()[1]


@MODES
def test_too_many_faults_in_processes_are_an_error_with_the_traceback(autoreset):
    before = set(multiprocessing.active_children())
    env = VecEnv.create_factory(FaultyEnv, {"fault": "step", "at": 3}, 2, backend="async", autoreset=autoreset,
                                on_env_error="restart")(seed=3)
    with pytest.raises(EnvError, match=r"faulty step; not restarted, .* 3 times") as caught:
        play(env, 30)
    assert 'raise RuntimeError("faulty step")' in "".join(traceback.format_exception(caught.value))
    env.close()
    assert set(multiprocessing.active_children()) == before


def test_statistics_and_monitor_exclude_episodes_cut_by_a_fault(tmp_path):
    """Check the episodes of an environment that raises in step 8; each episode has 5 steps.

    The fault ends the second episode after 2 steps, and these steps are discarded.
    """
    env, _ = planned({(1, "step", 7)}, CountingEnv, {"episode_length": 5}, num_envs=1, autoreset="same_step",
                     log_dir=str(tmp_path))
    rows = play(env, 18)
    episodes = [episode for _, _, step in rows[1:] for episode in step.episodes]
    assert [(episode.env_return, episode.length) for episode in episodes] == [(15.0, 5), (15.0, 5), (40.0, 5)]
    assert sum(int(step.valid.sum()) for _, _, step in rows[1:]) == 17
    env.close()
    (path,) = tmp_path.glob("*.csv")
    with path.open(newline="") as file:
        assert [(row["r"], row["l"]) for row in csv.DictReader(file)] == [("15.0", "5"), ("15.0", "5"), ("40.0", "5")]


@MODES
@pytest.mark.parametrize("kind", ["dict", "info_mask"])
@pytest.mark.parametrize("num_envs", [1, 3])
def test_action_masks_stay_correct_after_a_fault(autoreset, kind, num_envs):
    env, _ = planned({(1, "step", 4)}, Walk, {"kind": kind}, num_envs=num_envs, autoreset=autoreset)
    rows = play(env, 12)
    assert env.num_restarts == 1
    for obs, mask, step in rows:
        for e in range(num_envs):
            is_next = autoreset == "next_step" and step is not None
            if is_next and step.terminated[e]:
                assert mask[e].all()
            elif is_next and step.truncated[e] and kind == "info_mask":
                assert mask[e].sum() in (1, 3)  # there is no mask after a fault, so all 3 actions are allowed
            elif kind == "dict":
                assert mask[e].tolist() == [obs["count"][e] % 3 == k for k in range(3)]
            else:
                assert mask[e].sum() == 1


@MODES
@pytest.mark.parametrize("num_envs", [1, 3])
def test_a_fault_does_not_count_as_a_lost_life(autoreset, num_envs):
    env, _ = planned({(1, "step", 1)}, Walk, num_envs=num_envs, autoreset=autoreset, end_on_life_loss=True)
    hole = play(env, 3)[2][2]
    assert env.num_restarts == 1
    assert (hole.terminated[0], hole.truncated[0], hole.valid[0]) == (False, True, False)
    assert any(step.terminated.any() for _, _, step in play(env, 8)[1:])


@pytest.mark.parametrize("seed", [3, 4])
def test_each_restart_has_its_own_seed(seed):
    """Check that each restart uses a new seed, and that the seed of the factory determines all of them."""
    def seeds():
        found = []

        class Recorded(CountingEnv):
            def reset(self, *, seed=None, options=None):
                found.append(seed)
                return super().reset(seed=seed, options=options)

            def step(self, action):
                raise RuntimeError("planned")
        env = VecEnv.create_factory(Recorded, None, 1, backend="sync", on_env_error="restart")(seed=seed)
        found.clear()
        env.reset()
        for _ in range(3):
            env.step(np.zeros(1, np.int64))
        env.close()
        return [each for each in found if each is not None]
    found = seeds()
    assert len(set(found)) == len(found) >= 3
    assert seeds() == found
