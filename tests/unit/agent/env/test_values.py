"""Test the checks of what environments return after the first step: values, forms, masks, infos, and spaces' seeds."""

import csv

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from pytorchrl import MultiAgentVecEnv
from pytorchrl.agent.env import VecEnv
from pytorchrl.agent.env.values import ValueCheck
from pytorchrl.envs.testing import MatchingGame
from pytorchrl.errors import EnvError

BOX = spaces.Box(-1, 1, (2,))
MIXED = spaces.Dict({"image": spaces.Box(0, 255, (2,), np.uint8), "which": spaces.Discrete(3)})
GOOD = {"image": np.array([1, 2], np.uint8), "which": 1}


class Scripted(gym.Env):
    """Environment that returns the values of a script, one for each reset or step, and then the last one for ever."""

    action_space = spaces.Discrete(2)

    def __init__(self, space, script, infos=({},), length=99):
        self.observation_space, self.script, self.infos, self.length = space, script, infos, length

    def result(self):
        return self.script[min(self.t, len(self.script) - 1)], dict(self.infos[min(self.t, len(self.infos) - 1)])

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return self.result()

    def step(self, action):
        self.t += 1
        obs, info = self.result()
        return obs, 1.0, self.t == self.length, False, info


def make(*args, num_envs=2, backend="sync", **options):
    return VecEnv.create_factory(lambda: Scripted(*args), vec_env_size=num_envs, backend=backend, **options)(seed=1)


def play(envs, num_steps=4):
    found = [envs.reset()]
    found += [envs.step(np.zeros(envs.num_envs, np.int64)) for _ in range(num_steps)]
    envs.close()
    return found


def test_later_observations_of_another_form_are_refused():
    for row, (space, good, bad, match) in {
        "float64 for uint8": (MIXED, GOOD, GOOD | {"image": np.array([300.7, -1.0])}, "image: expected uint8"),
        "int64 for uint8": (MIXED, GOOD, GOOD | {"image": np.array([300, -1])}, "image: expected uint8"),
        "one number for two": (
            MIXED, GOOD, GOOD | {"image": np.array([7], np.uint8)}, r"uint8 \(2,\), got uint8 \(1,\)"),
        "float for a category": (MIXED, GOOD, GOOD | {"which": 1.7}, "which: expected int64"),
        "a key less": (MIXED, GOOD, {"which": 1}, r"expected a dict with \['image', 'which'\]"),
        "shorter list": (BOX, [1.0, 0.0], [1.0], r"expected float32 \(2,\), got float64 \(1,\)"),
        "nested tuple": (spaces.Tuple((BOX, spaces.Tuple((BOX,)))), (np.zeros(2), (np.zeros(2),)),
                         (np.zeros(2), (np.zeros(3),)), r"observation/1/0: expected float32 \(2,\)"),
    }.items():
        with pytest.raises(EnvError, match=f"env 0: step: .*{match}"):
            pytest.fail(f"{row}: {play(make(space, [good, good, bad]))}")


def test_later_flags_of_another_kind_are_refused():
    class Numbers(Scripted):
        def step(self, action):
            obs, reward, _, _, info = super().step(action)
            return obs, reward, False if self.t < 3 else None, False, info

    envs = VecEnv.create_factory(lambda: Numbers(BOX, [np.zeros(2, np.float32)]))(seed=1)
    with pytest.raises(EnvError, match="expected a bool as terminated"):
        play(envs)


def test_categories_and_flags_outside_their_space_are_refused():
    for space, good, bad, match in (
            (spaces.Discrete(4), 0, 4, r"'obs' has the value 4, which is not in Discrete\(4\)"),
            (spaces.Discrete(4), 0, -1, "the value -1"),
            (spaces.Discrete(4, start=-2), -2, 2, "the value 2, .* counted from -2"),
            (spaces.MultiDiscrete([2, 3]), np.array([1, 2]), np.array([0, 5]), r"the value 5 at \[1\]"),
            (spaces.MultiDiscrete([2, 3], start=[1, 0]), np.array([2, 2]), np.array([0, 2]), r"the value 0 at \[0\]"),
            (spaces.MultiBinary(2), np.array([1, 0], np.int8), np.array([1, -3], np.int8), r"the value -3 at \[1\]"),
            (spaces.Dict({"a": BOX, "b": spaces.Discrete(2)}), {"a": np.zeros(2, np.float32), "b": 1},
             {"a": np.zeros(2, np.float32), "b": 2}, "leaf 'b' has the value 2")):
        play(make(space, [good]))
        with pytest.raises(EnvError, match=f"GWorker 0/CWorker 0, env 0: .*{match}"):
            play(make(space, [good, good, bad]))
        with pytest.raises(EnvError, match=match):  # at the end of an episode, which is followed by a good observation
            play(make(space, [good, good, bad], ({},), 2))
        with pytest.raises(EnvError, match=match):
            make(space, [bad]).reset()


def test_the_check_of_categories_agrees_with_gymnasium():
    generator = np.random.default_rng(0)
    for space in (spaces.Discrete(5), spaces.MultiDiscrete([3, 4], dtype=np.int32), spaces.MultiBinary((2, 2))):
        for _ in range(200):
            value = generator.integers(-2, 6, space.shape).astype(space.dtype)
            problem = ValueCheck({"x": space}).problem({"x": value[None]})
            assert (problem is None) == bool(space.contains(value)), (space, value, problem)


def test_numbers_outside_a_box_are_logged_once_for_each_leaf(caplog):
    space = spaces.Dict({"a": BOX, "b": spaces.Box(0, 5, (1,)), "c": spaces.Box(0, 255, (1,), np.uint8),
                         "d": spaces.Box(-np.inf, np.inf, (1,))})
    value = {"a": np.array([0, 1.5], np.float32), "b": np.array([-1], np.float32), "c": np.array([255], np.uint8),
             "d": np.array([1e9], np.float32)}
    play(make(space, [value]))
    found = [record.getMessage() for record in caplog.records if "outside its bounds" in record.getMessage()]
    assert [text.split(";")[0] for text in found] == [
        "observation leaf 'a' has the value 1.5, outside its bounds -1 to 1",
        "observation leaf 'b' has the value -1, outside its bounds 0 to 5"]


def test_boxes_are_checked_in_the_first_steps_and_then_in_some():
    check = ValueCheck({"x": BOX})
    due = []
    for step in range(1, 1000):
        if step >= check.due:
            due.append(step)
            assert check.check({"x": np.zeros((3, 2), np.float32)}, step) is None
    assert due == [*range(1, 501), 600, 700, 800, 900]
    assert ValueCheck({"x": spaces.Box(-np.inf, np.inf, (2,))}).due == np.inf


def test_masks_of_another_form_are_refused():
    zeros = np.zeros(2, np.float32)
    for row, (mask, match) in {
        "length": (np.array([True, False, True]), r"must have 2 flags.*Discrete\(2\), got the shape \(3,\)"),
        "list of the wrong length": ([1], r"must have 2 flags.*got the shape \(1,\)"),
        "a number": (1, r"must have 2 flags.*got the shape \(\)"),
        "values": (np.array([0.5, -3.0]), r"must contain flags"),
        "negative": (np.array([-1, 1]), "must contain flags"),
        "logits": (np.array([0.0, -np.inf]), "must contain flags"),
        "indices": (np.array([0, 5]), "must contain flags"), "texts": (np.array(["a", "b"]), "must contain flags"),
    }.items():
        with pytest.raises(EnvError, match=f"'action_mask' {match}"):
            pytest.fail(f"{row}: {play(make(BOX, [zeros], ({'action_mask': mask},)))}")
    for good in (np.array([1, 0], np.int8), [True, False], np.array([1.0, 0.0]), (1, 0)):
        found = play(make(BOX, [zeros], ({"action_mask": good},)))
        assert found[0][1].tolist() == found[2].mask.tolist() == [[True, False]] * 2
    leaf = spaces.Dict({"x": BOX, "action_mask": spaces.Box(0, 9, (3,), np.int8)})
    with pytest.raises(EnvError, match="must have 2 flags"):
        play(make(leaf, [{"x": zeros, "action_mask": np.ones(3, np.int8)}]))


def test_masks_of_different_lengths_are_refused():
    masks = iter([[1, 1], [1, 1], [1, 1, 1]])

    class Env(Scripted):
        def __init__(self):
            super().__init__(BOX, [np.zeros(2, np.float32)], ({"action_mask": next(masks)},))

    with pytest.raises(EnvError, match=r"different shapes, \[\(2,\), \(3,\)\]"):
        play(VecEnv.create_factory(Env, vec_env_size=2)(seed=1))


def test_the_method_action_masks_is_read():
    class Method(Scripted):
        def action_masks(self):
            return [self.t % 2 == 0, True]

    envs = VecEnv.create_factory(lambda: Method(BOX, [np.zeros(2, np.float32)], ({},), 3), vec_env_size=2)(seed=1)
    assert envs.reset()[1].tolist() == [[True, True]] * 2
    assert [envs.step(np.zeros(2, np.int64)).mask[0, 0] for _ in range(4)] == [False, True, True, False]
    assert envs.raw_spaces.has_mask_in_info


class Numbered(Scripted):
    """Environment of which every second one returns `full` in its last step, and all others return `rest`."""

    made = 0

    def __init__(self, full, rest, first=None):
        super().__init__(BOX, [np.zeros(2, np.float32)], (rest if first is None else first, rest, rest, full), 3)
        if Numbered.made % 2:
            self.infos = (*self.infos[:3], rest)
        Numbered.made += 1


@pytest.mark.parametrize("autoreset", ["same_step", "next_step"])
@pytest.mark.parametrize("backend", ["sync", "vector"])
def test_monitor_leaves_keywords_that_an_info_lacks_empty(tmp_path, autoreset, backend):
    Numbered.made = 1
    single = lambda: Numbered({"score": np.float32(7.5), "more": {"x": 1}, "list": np.array([1, 2])}, {})  # noqa: E731
    mode = AutoresetMode.SAME_STEP if autoreset == "same_step" else AutoresetMode.NEXT_STEP
    env_fn = single if backend == "sync" else lambda num_envs: gym.vector.SyncVectorEnv(
        [single] * num_envs, autoreset_mode=mode)
    envs = VecEnv.create_factory(env_fn, vec_env_size=2, log_dir=str(tmp_path), backend=backend, autoreset=autoreset,
                                 info_keywords=("score", "more", "list"))(seed=1)
    play(envs, 3)
    rows = list(csv.DictReader(next(tmp_path.glob("*.csv")).read_text().splitlines()))
    assert sorted([row[key] for key in ("score", "more", "list")] for row in rows) == [
        ["", "", ""], ["7.5", '{"x": 1}', "[1, 2]"]]


@pytest.mark.parametrize("autoreset", ["same_step", "next_step"])
def test_lives_that_an_info_lacks_are_no_termination(autoreset):
    infos = ({"lives": 3}, {"lives": 3}, {})
    made = iter([infos[:1], infos[:1], infos])

    class Env(Scripted):
        def __init__(self):
            super().__init__(BOX, [np.zeros(2, np.float32)], next(made), 3)

    envs = VecEnv.create_factory(Env, vec_env_size=2, end_on_life_loss=True, autoreset=autoreset)(seed=1)
    with pytest.raises(EnvError, match=r"step 2: end_on_life_loss needs info\['lives'\].*environments \[1\]"):
        play(envs)


@pytest.mark.parametrize("autoreset", ["same_step", "next_step"])
def test_the_last_step_of_an_episode_may_lack_lives(autoreset):
    infos = ({"lives": 3}, {"lives": 3}, {"lives": 2}, {})
    envs = make(BOX, [np.zeros(2, np.float32)], infos, 3, end_on_life_loss=True, autoreset=autoreset)
    ended = [step.terminated[0] for step in play(envs, 7)[1:]]
    assert ended == ([False, True, True, False, True, True, False] if autoreset == "same_step" else
                     [False, True, True, False, False, True, True])


class Native(VectorEnv):
    """Vector environment whose results are converted by a function; read-only arrays stand for those of JAX."""

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012 - as Gymnasium's class

    def __init__(self, num_envs, convert, after=0):
        self.num_envs, self.convert, self.after, self.t = num_envs, convert, after, 0
        self.single_observation_space, self.single_action_space = BOX, spaces.Discrete(2)
        self.observation_space = batch_space(BOX, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed=None, options=None):
        return self.out(np.zeros((self.num_envs, 2), np.float32)), {}

    def out(self, array):
        return array if self.t < self.after else self.convert(array)

    def step(self, actions):
        self.t += 1
        none = np.zeros(self.num_envs, np.bool_)
        return (self.out(np.zeros((self.num_envs, 2), np.float32)), self.out(np.ones(self.num_envs, np.float32)),
                self.out(none), self.out(none), {})


@pytest.mark.parametrize("after", [0, 1, 3])
def test_results_of_vector_environments_that_are_no_arrays_are_refused(after):
    for convert, match in (
            (list, "must return NumPy arrays, got a builtins.list"),
            (lambda array: array.astype(np.float16), "expected terminated|expected float32|kind 'b'"),
            (lambda array: array[:1], r"expected .*\(2, 2\), got")):
        with pytest.raises(EnvError, match=match):
            play(VecEnv.create_factory(
                lambda num_envs, convert=convert: Native(num_envs, convert, after), vec_env_size=2)(seed=1))


@pytest.mark.parametrize("after", [0, 1, 3])
def test_tensors_are_accepted_at_any_time(after):
    for step in play(VecEnv.create_factory(
            lambda num_envs: Native(num_envs, torch.as_tensor, after), vec_env_size=2)(seed=1))[1:]:
        assert isinstance(step.obs["obs"], np.ndarray)
        assert step.reward.tolist() == [1, 1]


@pytest.mark.parametrize("after", [0, 1, 3])
def test_read_only_results_of_vector_environments_are_copied(after):
    def frozen(array):
        array = array.copy()
        array.flags.writeable = False
        return array

    envs = VecEnv.create_factory(lambda num_envs: Native(num_envs, frozen, after), vec_env_size=2)(seed=1)
    for step in play(envs)[1:]:
        assert step.obs["obs"].flags.writeable
        for array in (step.reward, step.terminated, step.truncated):
            assert array.flags.writeable


class ChangedAt(Native):
    """Native vector environment of which a single result, at the third step, is converted."""

    def __init__(self, num_envs, index, convert):
        super().__init__(num_envs, convert, after=100)
        self.index = index

    def step(self, actions):
        result = [*super().step(actions)]
        if self.t == 3:
            result[self.index] = self.convert(result[self.index])
        return tuple(result)


@pytest.mark.parametrize("index", range(4))
def test_each_later_result_of_a_vector_environment_is_checked(index):
    def frozen(array):
        array.flags.writeable = False
        return array

    def play_with(convert):
        return play(VecEnv.create_factory(
            lambda num_envs: ChangedAt(num_envs, index, convert), vec_env_size=2)(seed=1))

    for convert, match in ((list, "builtins.list"), (lambda array: array[:1], r"expected .*2.*, got"),
                           (lambda array: array.astype("U1"), "expected .*, got")):
        with pytest.raises(EnvError, match=match):
            play_with(convert)
    for convert in (frozen, lambda array: array.view(np.memmap)):
        for step in play_with(convert)[1:]:
            assert step.obs["obs"].flags.writeable
            for array, value in ((step.reward, 1), (step.terminated, False), (step.truncated, False)):
                assert array.flags.writeable
                assert array.tolist() == [value, value]


class Sampling(Scripted):
    """Environment that draws its observations and rewards from its own spaces."""

    observation_space = spaces.Box(-5, 5, (2,))

    def __init__(self):
        pass

    def reset(self, *, seed=None, options=None):
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), float(self.action_space.sample()), False, False, {}


class OwnSpaces(Sampling):
    """Environment with spaces that it does not share with others."""

    def __init__(self):
        self.observation_space = spaces.Box(-5, 5, (2,))


@pytest.mark.parametrize(("env", "wrappers"), [
    (Sampling, ()), (Sampling, (lambda env: gym.wrappers.TransformReward(env, abs),)),
    (lambda num_envs: gym.vector.SyncVectorEnv([OwnSpaces] * num_envs), ()),
    (lambda num_envs: gym.wrappers.vector.ClipReward(
        gym.vector.SyncVectorEnv([OwnSpaces] * num_envs), max_reward=9), ()),
], ids=["bare", "wrapped", "vector", "wrapped vector"])
def test_environments_that_draw_from_their_spaces_are_seeded(env, wrappers):
    def draws(seed):
        envs = VecEnv.create_factory(env, vec_env_size=2, wrappers=wrappers)(seed=seed)
        found = play(envs)
        return np.stack([found[0][0]["obs"].copy(), *(step.obs["obs"].copy() for step in found[1:])])

    assert np.array_equal(draws(1), draws(1))
    assert not np.array_equal(draws(1), draws(2))
    assert not np.array_equal(draws(1)[:, 0], draws(1)[:, 1]), "environments of one class draw different numbers"


class WrongGame(MatchingGame):
    """Game in which a result of an agent has another form from the second step on, or in the last step."""

    def __init__(self, wrong, value, at):
        super().__init__()
        self.wrong, self.value, self.at = wrong, value, at

    def step(self, actions):
        results = super().step(actions)
        if self._t == self.at:
            results[["obs", "reward", "terminated", "truncated", "info"].index(self.wrong)]["agent_1"] = self.value
        return results


@pytest.mark.parametrize("at", [2, 8])
@pytest.mark.parametrize(("wrong", "value", "message"), [
    ("obs", np.zeros(1, np.float32), r"observation of agent_1: expected float32 \(6,\), got float32 \(1,\)"),
    ("obs", np.zeros((1, 6), np.float32), r"observation of agent_1: expected float32 \(6,\), got float32 \(1, 6\)"),
    ("obs", "text", "observation of agent_1: expected float32"),
    ("reward", np.zeros(2), r"agent 'agent_1': expected a number as reward, got an array float64 \(2,\)"),
    ("reward", None, "agent 'agent_1': expected a number as reward, got a NoneType"),
    ("terminated", 2, r"agent 'agent_1': expected a bool as terminated, got a int; return bool\(terminated\)"),
    ("truncated", "no", "agent 'agent_1': expected a bool as truncated, got a str"),
    ("info", None, "agent 'agent_1': expected a dict as info, got a NoneType"),
])
def test_later_results_of_agents_of_another_form_are_refused(wrong, value, message, at):
    envs = MultiAgentVecEnv.create_factory(
        WrongGame, {"wrong": wrong, "value": value, "at": at}, vec_env_size=2)(seed=1)
    envs.reset()
    actions = {policy: np.zeros(4, np.int64) for policy in envs.observation_space}
    for _ in range(at - 1):
        envs.step(actions)
    with pytest.raises(EnvError, match=f"env 0: .*{message}"):
        envs.step(actions)


class MaskedGame(MatchingGame):
    """Game with masks in infos, which change after some steps."""

    def __init__(self, first, later):
        super().__init__()
        self.masks, self.steps = (first, later), 0

    def infos(self, agents):
        mask = self.masks[self.steps > 3]
        return {agent: {} if mask is None else {"action_mask": np.array(mask, bool)} for agent in agents}

    def reset(self, seed=None, options=None):
        obs, _ = super().reset(seed=seed)
        return obs, self.infos(obs)

    def step(self, actions):
        self.steps += 1
        obs, *results, _ = super().step(actions)
        return obs, *results, self.infos(obs)


def masked_env(first, later):
    """Return an environment with masks in infos, which change after some steps."""
    infos = [{} if mask is None else {"action_mask": np.array(mask, bool)} for mask in (first, later)]
    return Scripted(spaces.Box(-1, 1, (2,)), [np.zeros(2, np.float32)], (*[infos[0]] * 3, infos[1]))


@pytest.mark.parametrize(("env", "first", "later", "message"), [
    (MaskedGame, [1, 1, 1], None, r"expected info\['action_mask'\] of .* in every step, because the first reset"),
    (MaskedGame, None, [1, 1, 1], "appeared after the first reset, which had none"),
    (MaskedGame, [1, 1, 1], [0, 0, 0], "env 0: in 1,000 steps in a row, the action masks allowed no action of any"),
    (masked_env, [1, 1], None, r"expected info\['action_mask'\] in every step, because the first reset returned it"),
    (masked_env, None, [1, 1], "appeared in a step, but the first reset had none, so masks would be ignored"),
])
def test_masks_that_vanish_appear_or_never_allow_an_action_are_refused(env, first, later, message):
    create = MultiAgentVecEnv.create_factory if env is MaskedGame else VecEnv.create_factory
    envs = create(env, {"first": first, "later": later}, vec_env_size=1)(seed=1)
    envs.reset()
    action = np.zeros(1, np.int64) if env is masked_env else {
        policy: np.zeros(2, np.int64) for policy in envs.observation_space}

    def play():
        for _ in range(1010):
            envs.step(action)
    with pytest.raises(EnvError, match=message):
        play()


def test_agents_that_draw_from_their_spaces_are_seeded_and_their_categories_checked():
    class Game:
        possible_agents = agents = ("a", "b")

        def __init__(self, wrong=False):
            self.spaces, self.wrong = {agent: spaces.Discrete(1000) for agent in self.agents}, wrong

        def observation_space(self, agent):
            return self.spaces[agent]

        def action_space(self, agent):
            return self.spaces[agent]

        def look(self):
            is_wrong = self.wrong and self.t == 2
            return {agent: 1000 if is_wrong else int(self.spaces[agent].sample()) for agent in self.agents}

        def reset(self, seed=None, options=None):
            self.t = 0
            return self.look(), {}

        def step(self, actions):
            self.t += 1
            no = dict.fromkeys(self.agents, False)
            return self.look(), dict.fromkeys(self.agents, 0.0), no, no, {}

        def close(self):
            pass

    def draws(seed, **kwargs):
        envs = MultiAgentVecEnv.create_factory(Game, kwargs, 2)(seed=seed)
        found, actions = [envs.reset()[0]["shared"]["obs"].copy()], {"shared": np.zeros(4, np.int64)}
        return found + [envs.step(actions).parts["shared"].obs["obs"].copy() for _ in range(3)]

    assert np.array_equal(draws(1), draws(1))
    assert not np.array_equal(draws(1), draws(2))
    with pytest.raises(EnvError, match=r"env 0, agent 'a': observation leaf 'obs' has the value 1000"):
        draws(1, wrong=True)
