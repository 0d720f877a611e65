"""Test which preset applies to which environments, and that the run says so."""

from __future__ import annotations

import functools
import re

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete

from pytorchrl.agent.option_values.text import to_python
from pytorchrl.agent.schedules import Schedule, linear
from pytorchrl.envs.testing import CountingEnv, MatchingGame
from pytorchrl.errors import ConfigError
from pytorchrl.support.code import Code
from pytorchrl.training import presets
from pytorchrl.training.composition import compose, compose_parts, option_specs
from pytorchrl.training.training import make_learner, train
from tests.conftest import ROOT

VECTOR, GOAL = Box(-10, 10, (3,), np.float64), Box(-1, 1, (2,), np.float64)
IMAGE, CHANNELS_FIRST = Box(0, 255, (40, 44, 3), np.uint8), Box(0, 255, (3, 40, 44), np.uint8)
TORQUES, BUTTONS = Box(-1, 1, (2,), np.float32), Discrete(3)


class Any(gym.Env):
    """An environment with any spaces, and episodes of ten steps."""

    built = 0

    def __init__(self, observation_space, action_space):
        self.observation_space, self.action_space = observation_space, action_space
        type(self).built += 1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._steps = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        self._steps += 1
        return self.observation_space.sample(), 0.5, self._steps == 10, False, {}


def env_with(observation_space, action_space):
    return functools.partial(Any, observation_space, action_space)


SPACES = [  # kind of environments, observations, actions
    ("continuous", VECTOR, TORQUES),
    ("continuous", Dict(observation=VECTOR, desired_goal=GOAL, achieved_goal=GOAL), TORQUES),
    ("images", IMAGE, BUTTONS),
    ("images", CHANNELS_FIRST, BUTTONS),
    ("images", IMAGE, TORQUES),
    ("images", Dict(camera=IMAGE, speed=VECTOR), TORQUES),
    ("vectors", VECTOR, BUTTONS),
    ("vectors", Discrete(5), BUTTONS),
    ("vectors", VECTOR, MultiDiscrete([2, 3])),
    ("vectors", Box(0, 255, (3, 4, 5), np.uint8), BUTTONS),  # too small to be an image
]


def test_the_kind_of_an_environment_follows_from_its_spaces():
    for kind, observations, actions in SPACES:
        found = compose_parts("ppo", env_with(observations, actions), {})
        assert (found.preset, found.problems.found) == (kind, []), (observations, actions)
        assert {name: found.options[name] for name in presets.preset("ppo", kind)} == presets.preset("ppo", kind)
        assert found.agent.train_envs_factory.num_envs == presets.preset("ppo", kind)["num_envs"]


def test_environments_that_people_bring_do_not_get_the_options_of_cartpole():
    continuous = compose("ppo", env_with(VECTOR, TORQUES), {})
    assert (continuous[0].algo_factory.options.gamma, continuous[0].storage_factory.options.gae_lambda) == (0.99, 0.95)
    assert continuous[0].algo_factory.options.lr == linear(3e-4, 0.0)
    assert continuous[0].actor_factory.options.normalize_obs
    assert continuous[2]["target_steps"] == 1_000_000
    for name in ("sac", "td3"):
        agent, _, learner = compose(name, env_with(VECTOR, TORQUES), {})
        assert (agent.algo_factory.options.gamma, agent.algo_factory.options.mini_batch_size) == (0.99, 256)
        assert (agent.storage_factory.options.size, learner["target_steps"]) == (1_000_000, 1_000_000)
        assert agent.actor_factory.options.hidden_sizes == (256, 256)
    agent, _, learner = compose("ppo", env_with(IMAGE, BUTTONS), {})
    assert (agent.algo_factory.options.clip_param, learner["target_steps"]) == (0.1, 1_000_000)
    assert agent.train_envs_factory.options.reward_transform is None
    assert not agent.train_envs_factory.options.end_on_life_loss
    assert compose("ppo", env_with(VECTOR, BUTTONS), {})[2]["target_steps"] == 200_000
    assert compose("ppo", CountingEnv, {})[0].algo_factory.options.gamma == 0.99


def test_rates_of_kinds_fall_over_the_run_on_policy_only_and_nothing_is_tuned_for_a_suite():
    of_atari = {"backend", "reward_transform", "end_on_life_loss"}
    on_policy = {"ppo", "a2c", "impala", "appo", "pqn"}
    for (algorithm, suite), options in presets.registered().items():
        if suite in presets.KINDS:
            schedules = {name: value for name, value in options.items() if isinstance(value, Schedule)}
            assert set(schedules) == ({"lr"} if algorithm in on_policy else set()), (algorithm, suite)
            for rate in schedules.values():  # the end is that of the run, however long it is
                assert [rate.value(steps, 70) / rate.values[0] for steps in (0, 35, 70)] == [1.0, 0.5, 0.0]
            assert options.get("normalize_obs", False) == (algorithm in on_policy), (algorithm, suite)
            assert options.get("normalize_reward", False) == (algorithm in on_policy and suite == "continuous")
            assert not of_atari & set(options), (algorithm, suite)
            assert options["target_steps"] == (200_000 if suite == "vectors" else 1_000_000)
    kinds = {algorithm: {suite for name, suite in presets.registered() if name == algorithm and suite in presets.KINDS}
             for algorithm in ("ppo", "a2c", "impala", "appo", "dqn", "pqn", "r2d2", "sac", "td3", "ddpg", "mpo")}
    assert {name for name, found in kinds.items() if found == set(presets.KINDS)} == {
        "ppo", "a2c", "impala", "appo", "sac"}
    assert kinds["dqn"] == kinds["pqn"] == kinds["r2d2"] == {"images", "vectors"}
    assert kinds["td3"] == kinds["ddpg"] == {"images", "continuous"}
    assert kinds["mpo"] == {"continuous"}


def test_every_preset_of_a_kind_trains():
    small = {"hidden_sizes": (8,), "target_steps": 40, "num_steps": 10, "num_envs": 1, "progress": False, "seed": 1}
    replay = {"start_steps": 10, "update_every": 10, "num_updates": 1, "replay_size": 200, "mini_batch_size": 8}
    cases = {"continuous": (SPACES[1], SPACES[0]), "images": (SPACES[2], SPACES[5]), "vectors": (SPACES[6], SPACES[6])}
    for algorithm, kind in presets.registered():
        if kind in presets.KINDS and algorithm != "r2d2":
            of_replay = "start_steps" in presets.registered()[algorithm, kind]
            own = replay if of_replay else {"num_epochs": 1, "num_mini_batch": 1}
            _, *spaces = cases[kind][algorithm in ("td3", "ddpg", "sac", "mpo")]
            agent = train(algorithm, env_with(*spaces), **{**small, **own})
            assert agent.summary["updates"] >= 1, (algorithm, kind)


class Lookup(torch.nn.Module):
    """A network that looks up whole numbers in a table."""

    def __init__(self, space):
        super().__init__()
        self.table, self.out_features = torch.nn.Embedding(int(space.high.max()) + 1, 4), 4

    def forward(self, codes):
        assert codes.dtype == torch.uint8
        return self.table(codes.flatten(1).long()).mean(1)


def test_a_network_of_ones_own_gets_the_observations_of_kinds_as_they_are():
    for extractor, given, is_normalized in [("mlp", {}, True), (Lookup, {}, False), (Code("module:name"), {}, False),
                                            (Lookup, {"normalize_obs": True}, True)]:
        chosen = {"feature_extractor": extractor, **given}
        for kind in presets.KINDS:
            found = {**presets.preset("ppo", kind, chosen), **given}
            assert found.get("normalize_obs", False) == is_normalized, (extractor, kind)
    assert presets.preset("ppo", "mujoco", {"feature_extractor": Lookup})["normalize_obs"]
    codes = env_with(Box(0, 9, (3, 4), np.uint8), BUTTONS)
    small = {"target_steps": 40, "num_steps": 10, "num_envs": 1, "num_epochs": 1, "num_mini_batch": 1,
             "progress": False, "seed": 1}
    assert train("ppo", codes, feature_extractor=Lookup, **small).evaluate(1).returns == (5.0,)


def test_one_environment_is_built_to_read_the_spaces():
    before = Any.built
    make_learner("ppo", env_with(VECTOR, BUTTONS), progress=False)
    assert Any.built == before + 1


def test_a_registered_preset_of_a_kind_also_sets_environment_options():
    kept = presets.registered()["a2c", "images"]
    presets.register("a2c", "images", {**kept, "frame_stack": 2})
    try:
        agent, _, _ = compose("a2c", env_with(IMAGE, BUTTONS), {})
        assert agent.train_envs_factory.observation_space["obs"].shape == (6, 40, 44)
        agent, _, _ = compose("a2c", env_with(IMAGE, BUTTONS), {"frame_stack": 3})
        assert agent.train_envs_factory.observation_space["obs"].shape == (9, 40, 44)
    finally:
        presets.register("a2c", "images", kept)


def test_the_images_of_a_suite_for_vectors_have_the_options_of_images():
    assert compose_parts("ppo", "CarRacing-v3", {}).preset == "images"
    assert compose_parts("ppo", "LunarLander-v3", {}).preset == "box2d"


def test_several_agents_have_the_kind_of_their_spaces():
    assert compose_parts("ppo", MatchingGame, {"policies": "shared"}).preset == "vectors"


def test_wrong_options_of_environments_without_a_suite_are_reported_with_those_of_other_parts():
    with pytest.raises(ConfigError, match=r"(?s)num_envs must be .*lr must be .*num_eval_envs must be "):
        train("ppo", env_with(VECTOR, BUTTONS), num_envs=0, lr=-1.0, num_eval_envs=0)


def test_the_first_lines_say_what_is_trained_with_what_and_where_it_is_saved(capsys, tmp_path):
    train("ppo", env_with(VECTOR, BUTTONS), target_steps=1024, num_epochs=1)
    assert capsys.readouterr().err.splitlines()[0].endswith(
        ": 1,024 env steps, preset 'vectors' (discrete actions, no images), lr=linear(0.001, 0.0)")
    agent = train("ppo", "CartPole-v1", target_steps=1024, num_epochs=1, seed=5, log_dir=tmp_path / "run")
    count = sum(parameter.numel() for parameter in agent.agent.actor_factory(device="cpu", seed=0).parameters())
    assert capsys.readouterr().err.splitlines()[:3] == [
        "ppo on CartPole-v1: 1,024 env steps, preset 'classic', lr=linear(0.001, 0.0)",
        f"saved in {tmp_path / 'run'}", f"seed 5, cpu, 1 worker with 8 environments, {count:,} parameters"]
    train("ppo", "CartPole-v1", target_steps=64, num_epochs=1, num_envs=1, num_steps=32, num_col_workers=2,
          runtime="simulated")
    lines = capsys.readouterr().err.splitlines()
    assert lines[1] == "nothing is saved, because there is no log_dir"
    assert "cpu, 2 collection workers (simulated) with 1 environment each, " in "".join(lines)
    train("ppo", "CartPole-v1", target_steps=1024, num_epochs=1, progress=False)
    assert capsys.readouterr().err == ""


def test_every_algorithm_has_the_option_for_the_number_of_evaluation_environments():
    agent, _, _ = compose("dqn", "CartPole-v1", {"num_eval_envs": 3})
    assert agent.test_envs_factory.num_envs == 3
    assert agent.train_envs_factory.num_envs == 1
    assert option_specs("dqn")["num_eval_envs"].default == 8
    assert compose("dqn", "CartPole-v1", {})[0].test_envs_factory.num_envs == 8


def test_the_last_progress_line_comes_once_and_before_results(capsys):
    learner, _ = make_learner("ppo", "CartPole-v1", target_steps=1024, num_epochs=1)
    with learner:
        learner.train()
        before = capsys.readouterr().err
    assert before.count("100%") == 1
    assert capsys.readouterr().err == ""


def test_the_page_about_presets_lists_the_options_of_each_kind():
    page = (ROOT / "docs" / "presets.md").read_text(encoding="utf-8")
    rows = {(algorithm, kind): options for algorithm, kind, options in re.findall(
        r"^\| `(\w+)` \| (\w+) \| (.+) \|$", page, re.MULTILINE)}
    assert rows == {
        (algorithm, kind): ", ".join(
            f"`{name}={to_python(value)}`" for name, value in options.items() if name != "target_steps")
        for (algorithm, kind), options in presets.registered().items() if kind in presets.KINDS}


def test_shards_use_each_step_as_often_as_replay_without_shards():
    shards = {"num_replay_workers": 2, "num_col_workers": 2, "col_communication": "asynchronous"}
    for algorithm, given, bounds in [
            ("dqn", {}, ()), ("dqn", shards, (32.0, 64.0)), ("dqn", {"preset": "apex"}, (32.0, 64.0)),
            ("dqn", {"preset": "apex", "update_every": 8, "mini_batch_size": 32}, (8.0, 16.0)),
            ("dqn", {"preset": "apex", "num_updates": 1, "train_batch_size": 8}, (2.0, 4.0)),
            ("dqn", {"preset": "apex", "max_replay_ratio": 8.0}, (8.0, 8.0)),
            ("dqn", {"preset": "apex", "max_replay_ratio": None}, (32.0, None)),
            ("dqn", {"preset": "apex", "min_replay_ratio": None}, (None,)),
            ("dqn", {"preset": "impala"}, ()),
            ("r2d2", {"preset": "r2d2"}, (16.0, 32.0)), ("r2d2", {"preset": "r2d2", "kind": "batch"}, (16.0, 32.0)),
            ("appo", {"preset": "apex", "replay_size": 2000}, ())]:
        found = compose_parts(algorithm, "CartPole-v1", given).options
        names = ("min_replay_ratio", "max_replay_ratio")
        assert tuple(found[name] for name in names if name in found) == bounds, (algorithm, given)


def test_a_run_with_shards_makes_as_many_updates_as_without():
    options = {"num_envs": 2, "num_steps": 2, "update_every": 4, "num_updates": 1, "mini_batch_size": 8,
               "start_steps": 40, "replay_size": 1000, "hidden_sizes": (8,), "target_steps": 200, "seed": 1}
    plain = train("dqn", "CartPole-v1", **options, progress=False).summary
    shards = train("dqn", "CartPole-v1", **options, preset="apex", runtime="simulated", progress=False).summary
    assert plain["updates"] == 40
    assert 0.8 * 40 < shards["updates"] < 2.2 * 40


def test_impala_makes_an_update_from_each_rollout_of_small_environments():
    for env, options, size in [
            ("CartPole-v1", {}, None), (env_with(VECTOR, BUTTONS), {}, None), (env_with(IMAGE, BUTTONS), {}, 500),
            ("CartPole-v1", {"train_batch_size": 300}, 300)]:
        scheme = make_learner("impala", env, preset="impala", **options)[0].scheme
        assert scheme.settings["train_batch_size"] == size, (env, options)
    assert make_learner("impala", "CartPole-v1", preset="microbatch")[0].scheme.settings["train_batch_size"] == 10_000
