"""Environments that raise are replaced: what the learner sees of it, what the others see, and when it ends."""

from __future__ import annotations

import csv
import functools
import itertools
import multiprocessing
import pickle
import traceback

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv

from pytorchrl.agent.actors.normalisers import discounted_sums
from pytorchrl.agent.data import ActingStep
from pytorchrl.agent.env import VecEnv
from pytorchrl.agent.env.restarts import RESTARTS, WINDOW, RememberingEnv, RestartingEnv, Restarts
from pytorchrl.agent.storages.returns import gae
from pytorchrl.agent.storages.rollout_rows import RolloutRows
from pytorchrl.envs.testing import CountingEnv, FaultyEnv, RaisingEnv
from pytorchrl.errors import ConfigError, EnvError

MODES = pytest.mark.parametrize("autoreset", ["same_step", "next_step"])
NUM_ENVS = 4


class Walk(gym.Env):
    """A random walk that ends at random, and keeps its observations in one piece of memory."""

    def __init__(self, kind="box"):
        self._kind = kind
        box = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.observation_space = box if kind in ("box", "info_mask") else spaces.Dict({
            "place": box, "count": spaces.Discrete(100), "action_mask": spaces.MultiBinary(3)})
        self.action_space = spaces.Discrete(3)
        self._place, self._t = np.zeros(2, np.float32), 0

    def _look(self):
        mask = np.zeros(3, np.int8)
        mask[self._t % 3] = 1
        info = {"lives": 3 - self._t // 2, **({"action_mask": mask} if self._kind == "info_mask" else {})}
        return (self._place if self._kind in ("box", "info_mask") else {
            "place": self._place, "count": self._t, "action_mask": mask}), info

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self._random = np.random.default_rng(seed)
        self._t = 0
        self._place[:] = self._random.normal(size=2)
        return self._look()

    def step(self, action):
        self._t += 1
        self._place += self._random.normal(size=2) + float(action)
        observation, info = self._look()
        end = self._random.random()
        return observation, float(self._place[0]), end < 0.1, end > 0.95, info


class Planned(gym.Wrapper):
    """Raises in the steps, resets and closes that a plan names: (number of the copy, "step", number of the call).

    Copy 0 is the factory's probe, 1 to E are the first ones. What was done is in `log`.
    """

    def __init__(self, env, plan, log, copies, error=lambda: RuntimeError("planned")):
        super().__init__(env)
        self._plan, self._log, self._error, self._copy = plan, log, error, next(copies)
        self._calls = {"step": itertools.count(), "reset": itertools.count(), "close": itertools.count()}
        self._maybe_raise("constructor", 0)

    def _maybe_raise(self, call, number):
        self._log.append((self._copy, call))
        if (self._copy, call, number) in self._plan or (self._copy > 0 and (call, "always") in self._plan):
            self._place_is_spoilt()
            raise self._error()

    def _place_is_spoilt(self):
        if isinstance(self.unwrapped, Walk):
            self.unwrapped._place[:] = 1e6  # as if it had raised in the middle of its work

    def reset(self, **kwargs):
        self._maybe_raise("reset", next(self._calls["reset"]))
        return self.env.reset(**kwargs)

    def step(self, action):
        self._maybe_raise("step", next(self._calls["step"]))
        return self.env.step(action)

    def close(self):
        self._maybe_raise("close", next(self._calls["close"]))
        self.env.close()


def planned(plan=(), env_fn=Walk, env_kwargs=None, num_envs=NUM_ENVS, error=lambda: RuntimeError("planned"), **options):
    """A vector environment that fails by plan, and the log of what was done to its copies."""
    log = []
    wrap = functools.partial(Planned, plan=set(plan), log=log, copies=itertools.count(), error=error)
    factory = VecEnv.create_factory(env_fn, env_kwargs, num_envs, wrappers=(wrap,), backend="sync", **options)
    return factory(seed=5), log


def play(env, num_steps):
    """All that a vector environment returns; copies."""
    obs, mask = env.reset()
    rows = [({name: leaf.copy() for name, leaf in obs.items()}, None if mask is None else mask.copy(), None)]
    rng = np.random.default_rng(0)
    for _ in range(num_steps):
        step = env.step(rng.integers(0, 2, env.num_envs))
        rows.append(({name: leaf.copy() for name, leaf in step.obs.items()},
                     None if step.mask is None else step.mask.copy(), step))
    return rows


def seen_by(rows, index):
    """What one environment returned, as plain numbers."""
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
def test_the_other_environments_see_nothing_of_a_fault(autoreset, kind, reset_too):
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
def test_a_fault_cuts_the_episode_at_the_last_good_observation(autoreset, kind):
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
    """A storage's rollout of what `play` returned."""
    storage = RolloutRows(len(rows) - 1, NUM_ENVS, {})
    storage.start(*rows[0][:2])
    action = np.zeros(NUM_ENVS, np.int64)
    for obs, mask, step in rows[1:]:
        step.obs, step.mask = obs, mask
        storage.insert(ActingStep(action, action, {}, {}), step)
    return storage.take(copy=True)


@MODES
@pytest.mark.parametrize("cut_at", [1, 4, 5, 19])
def test_advantages_across_a_cut_equal_brute_force(autoreset, cut_at):
    """By definition: an episode's transitions up to the fault, then the value of the last good observation."""
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
            assert sums[episode[0], e] == float(data.reward[episode[0], e]), "nothing of the episode before"
    assert not found[~data.valid.numpy()].any()
    assert int(data.valid.sum()) == data.num_valid() < num_steps * NUM_ENVS


def episodes_of(rows, e):
    """(rows of its valid transitions, observation to bootstrap from or None) of each episode of environment e."""
    episode = []
    for t in range(len(rows) - 1):
        step = rows[t + 1][2]
        if not step.valid[e]:
            if episode:  # a fault: the last good observation is the one that was acted on
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
def test_faults_in_processes_give_what_they_give_in_one_process_and_leave_none(autoreset, caplog):
    before = set(multiprocessing.active_children())
    runs = []
    for backend in ("sync", "async"):
        caplog.clear()
        env = at_random(CountingEnv, 2, backend=backend, autoreset=autoreset)(seed=3)
        rows = play(env, 100)
        assert env.num_restarts == len(caplog.records) > 5
        assert "raised at random" in caplog.text
        assert 'raise RuntimeError("raised at random")' in caplog.text, "the traceback"
        runs.append(([seen_by(rows, index) for index in range(2)], env.num_restarts))
        env.close()
    assert runs[0] == runs[1]
    assert set(multiprocessing.active_children()) == before


def test_in_a_process_the_last_observation_is_a_copy():
    """The environment spoils its memory when it raises."""
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
    env = VecEnv.create_factory(FaultyEnv, {"fault": "step", "at": 3}, 2, backend="async", autoreset=autoreset)(seed=3)
    with pytest.raises(EnvError, match=r"faulty step; not restarted, .* 3 times") as caught:
        play(env, 30)
    assert 'raise RuntimeError("faulty step")' in "".join(traceback.format_exception(caught.value))
    env.close()
    assert set(multiprocessing.active_children()) == before


def test_a_restarted_environment_has_another_seed_each_time():
    env = VecEnv.create_factory(FaultyEnv, {"fault": "step", "at": 2}, 2)(seed=3)
    rows = play(env, 3)
    seeds = [obs["obs"][:, 0].tolist() for obs, _, _ in rows]
    assert len({*seeds[0], *seeds[-1]}) == 4
    assert env.num_restarts == 2


def test_rllib_step_that_always_fails_is_an_error_after_a_few_restarts_not_retried_for_ever():
    env, log = planned({("step", "always")}, error=lambda: KeyError("permanent"))
    env.reset()
    with pytest.raises(EnvError, match=(
            r"GWorker 0/CWorker 0, env \d: step raised after 1 steps, seed \d+: KeyError: "
            r"'permanent'; not restarted, .*restarted 3 times within its last 1000")) as caught:
        play(env, 5)
    assert isinstance(caught.value.__cause__, KeyError)
    assert caught.traceback[-1].path.name != "test_restarts.py"
    assert "_maybe_raise" in [frame.name for frame in traceback.extract_tb(caught.value.__cause__.__traceback__)]
    assert [entry for entry in log if entry[1] == "constructor"] == [(copy, "constructor") for copy in range(8)]
    env.close()


@MODES
def test_rllib_reset_that_always_fails_is_an_error_after_3_rebuilds_not_996(autoreset):
    plan = {(copy, "reset", 0) for copy in range(2, 2000)}
    env, log = planned(plan | {(1, "step", 2)}, CountingEnv, num_envs=1, autoreset=autoreset)
    match = r"reset raised after 0 steps.*planned; not restarted, .*restarted 3 times"
    with pytest.raises(EnvError, match=match) as caught:
        play(env, 10)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert not isinstance(caught.value.__cause__, RecursionError)
    assert [copy for copy, call in log if call == "constructor"] == [0, 1, 2, 3, 4]
    env.close()
    assert sorted(copy for copy, call in log if call == "close") == [0, 1, 2, 3, 4], "each once"


def test_a_constructor_that_always_fails_later_is_an_error_after_3_attempts():
    plan = {(copy, "constructor", 0) for copy in range(2, 2000)}
    env, log = planned(plan | {(1, "step", 2)}, CountingEnv, num_envs=1)
    match = r"env 0: the constructor raised: RuntimeError: planned; not restarted, .* 3 times"
    with pytest.raises(EnvError, match=match):
        play(env, 10)
    assert [copy for copy, call in log if call == "constructor"] == [0, 1, 2, 3, 4]
    env.close()
    assert [copy for copy, call in log if call == "close"] == [0, 1], "once, though none took its place"


def test_rllib_error_without_arguments_is_reported_not_an_index_error(caplog):
    env, _ = planned({("step", "always")}, error=RuntimeError, num_envs=1)
    with pytest.raises(EnvError, match=r"step raised after 1 steps, seed \d+: RuntimeError: ;") as caught:
        play(env, 10)
    assert caught.value.__cause__.args == ()
    assert len(caplog.records) == 3


class AwkwardError(Exception):
    """Cannot be pickled, and has no text."""

    def __init__(self, first, second):
        super().__init__()
        self.lock = (line for line in ())

    def __str__(self):
        raise ValueError("no text")


def test_errors_that_cannot_be_pickled_or_printed_are_no_trouble():
    with pytest.raises(TypeError):
        pickle.dumps(AwkwardError(1, 2))
    env, _ = planned({(1, "step", 2)}, error=lambda: AwkwardError(1, 2), num_envs=1)
    play(env, 10)
    assert env.num_restarts == 1
    env, _ = planned({("step", "always")}, error=lambda: AwkwardError(1, 2), num_envs=1)
    with pytest.raises(EnvError, match="AwkwardError: its __str__ raised ValueError") as caught:
        play(env, 10)
    pickle.loads(pickle.dumps(caught.value))


def test_long_texts_are_shortened(caplog):
    env, _ = planned({("step", "always")}, error=lambda: RuntimeError("x" * 10**7), num_envs=1)
    with pytest.raises(EnvError) as caught:
        play(env, 10)
    assert len(str(caught.value)) < 3000
    assert max(len(record.getMessage()) for record in caplog.records) < 15_000


def test_each_restart_is_logged_with_where_when_and_why(caplog):
    env, _ = planned({(2, "step", 4)}, CountingEnv, {"episode_length": 50})
    play(env, 10)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    first, *lines = record.getMessage().splitlines()
    seed = env.seeds[1]
    assert first == (f"GWorker 0/CWorker 0, env 1: step raised after 5 steps, seed {seed}: RuntimeError: planned; "
                     "restarted at step 4 of the worker, restart 1 of its environments")
    assert lines[-1] == "RuntimeError: planned"


@pytest.mark.parametrize("call", ["constructor", "reset"])
def test_faults_at_the_start_are_errors_at_once(call):
    with pytest.raises(EnvError, match="planned"):
        play(planned({(2, call, 0)})[0], 1)
    with pytest.raises(EnvError, match="planned"):
        planned({(0, call, 0)})


@MODES
def test_a_fault_in_a_later_reset_makes_no_hole_and_no_episode_is_lost(autoreset):
    kwargs = {"episode_length": 3}
    clean, _ = planned((), CountingEnv, kwargs, autoreset=autoreset)
    faulty, _ = planned({(2, "reset", 1)}, CountingEnv, kwargs, autoreset=autoreset)
    expected, found = play(clean, 11), play(faulty, 11)
    for (_, _, one), (_, _, other) in zip(expected[1:], found[1:], strict=True):
        for name in ("terminated", "truncated", "valid", "first"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
        assert [e[1:2] + e[3:] for e in one.episodes] == [e[1:2] + e[3:] for e in other.episodes]
    assert faulty.num_restarts == 1


def test_a_fault_in_an_explicit_reset_is_a_restart():
    env, _ = planned({(2, "reset", 1)})
    env.reset()
    env.step(np.zeros(NUM_ENVS, np.int64))
    assert np.isfinite(env.reset()[0]["obs"]).all()
    assert env.num_restarts == 1
    play(env, 5)


@pytest.mark.parametrize("limit", [1, 3])
def test_the_budget_is_for_all_environments_within_1000_steps(limit):
    """Faults just outside the window of the last ones are fine, one more inside is not."""
    ok = {(1 + k, "step", 10 * k) for k in range(limit)}
    options = {"on_env_error": "restart", "max_env_restarts": limit}
    env, _ = planned(ok | {(4, "step", WINDOW)}, CountingEnv, **options)
    play(env, WINDOW + 5)
    assert env.num_restarts == limit + 1
    env, _ = planned(ok | {(4, "step", WINDOW - 1)}, CountingEnv, **options)
    match = rf"restarted {limit} times within its last 1000 steps \(max_env_restarts={limit}\)"
    with pytest.raises(EnvError, match=match):
        play(env, WINDOW + 5)
    assert env.num_restarts == limit


@pytest.mark.parametrize(("fault", "match"), [
    ("four_values", "expected .observation, reward"), ("obs_shape", "expected float32"), ("reward_array", "a number"),
])
def test_broken_contracts_are_never_restarted(fault, match):
    env = VecEnv.create_factory(FaultyEnv, {"fault": fault, "at": 3}, 2, on_env_error="restart")(seed=0)
    with pytest.raises(EnvError, match=match):
        play(env, 10)
    assert env.num_restarts == 0


def test_broken_contracts_that_show_as_exceptions_are_never_restarted():
    env = VecEnv.create_factory(
        FaultyEnv, {"fault": "four_values", "at": 3}, 2, max_episode_steps=100, on_env_error="restart")(seed=0)
    with pytest.raises(EnvError, match=r"values to unpack.*; step must return"):
        play(env, 10)
    assert env.num_restarts == 0


def test_a_restart_with_other_spaces_is_an_error():
    sizes = itertools.chain([2, 2], itertools.repeat(3))
    factory = VecEnv.create_factory(lambda: FaultyEnv("step", at=2, num_actions=next(sizes)))
    with pytest.raises(EnvError, match=r"env 0: expected spaces .*Discrete\(2\) after a restart, got .*Discrete\(3\)"):
        play(factory(seed=0), 5)


def test_a_close_that_raises_is_logged_and_goes_no_further(caplog):
    env, log = planned({(1, "step", 2), (1, "close", 0)}, CountingEnv, num_envs=1)
    play(env, 5)
    assert "env 0: close raised as well" in caplog.text
    env.close()
    assert [copy for copy, call in log if call == "close"] == [0, 1, 2]


def test_statistics_and_monitor_leave_out_what_a_fault_cut(tmp_path):
    """Episodes of 5 steps; the second copy raises in its 8th, so 2 steps of its second episode go nowhere."""
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
def test_action_masks_go_on_across_a_cut(autoreset, kind, num_envs):
    env, _ = planned({(1, "step", 4)}, Walk, {"kind": kind}, num_envs=num_envs, autoreset=autoreset)
    rows = play(env, 12)
    assert env.num_restarts == 1
    for obs, mask, step in rows:
        for e in range(num_envs):
            is_next = autoreset == "next_step" and step is not None
            if is_next and step.terminated[e]:
                assert mask[e].all()
            elif is_next and step.truncated[e] and kind == "info_mask":
                assert mask[e].sum() in (1, 3)  # of the environment that raised nobody knows
            elif kind == "dict":
                assert mask[e].tolist() == [obs["count"][e] % 3 == k for k in range(3)]
            else:
                assert mask[e].sum() == 1


@MODES
@pytest.mark.parametrize("num_envs", [1, 3])
def test_a_cut_loses_no_life(autoreset, num_envs):
    env, _ = planned({(1, "step", 1)}, Walk, num_envs=num_envs, autoreset=autoreset, end_on_life_loss=True)
    hole = play(env, 3)[2][2]
    assert env.num_restarts == 1
    assert (hole.terminated[0], hole.truncated[0], hole.valid[0]) == (False, True, False)
    assert any(step.terminated.any() for _, _, step in play(env, 8)[1:])


def test_raise_raises_the_first_fault():
    env, _ = planned({(2, "step", 4)}, CountingEnv, on_env_error="raise")
    with pytest.raises(EnvError, match="env 1: step raised after 5 steps"):
        play(env, 10)
    assert env.num_restarts == 0


class Native(SyncVectorEnv):
    def __init__(self, num_envs):
        super().__init__([functools.partial(FaultyEnv, "step", at=2)] * num_envs)


def test_native_vectors_always_raise_and_say_so_when_asked_to_restart():
    with pytest.raises(EnvError, match="faulty step"):
        play(VecEnv.create_factory(Native, None, 2)(seed=0), 10)
    with pytest.raises(ConfigError, match="on_env_error='restart' need a function that builds one environment"):
        VecEnv.create_factory(Native, None, 2, on_env_error="restart")
    with pytest.raises(ConfigError, match="on_env_error='restart' needs single environments"):
        VecEnv.create_factory("CartPole-v1", None, 2, backend="vector", on_env_error="restart")
    with pytest.raises(ConfigError, match="on_env_error='restart' needs single environments"):
        VecEnv.create_factory("CartPole-v1", None, 2, backend="envpool", on_env_error="restart")
    native, single = (VecEnv.create_factory("CartPole-v1", None, 4, on_env_error=policy)(seed=0)
                      for policy in ("auto", "restart"))
    assert not isinstance(native.vector, SyncVectorEnv)
    assert isinstance(single.vector, SyncVectorEnv)


@pytest.mark.parametrize(("options", "match"), [
    ({"on_env_error": "restrat"}, "on_env_error must be one of .*did you mean 'restart'"),
    ({"on_env_error": None}, "on_env_error"),
    ({"max_env_restarts": 0, "on_env_error": "restart"}, "max_env_restarts must be a whole number >= 1"),
    ({"max_env_restarts": 5}, "max_env_restarts=5 needs on_env_error='restart', got 'auto'"),
    ({"max_env_restarts": 5, "on_env_error": "raise"}, "got 'raise'"),
])
def test_bad_settings_are_refused(options, match):
    with pytest.raises(ConfigError, match=match):
        VecEnv.create_factory(CountingEnv, **options)
