"""Test training in vectors of environments in the forms of simulators of robots, and in wrapped and given ones."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import math
import re
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from pytorchrl import PPO, ConfigError, GAEBuffer, OnPolicyActor, Scheme, VecEnv, train
from pytorchrl.errors import EnvError, NonFiniteDataError
from tests.unit.agent.env.tensors import stand_ins

TINY = {"num_steps": 16, "num_epochs": 1, "num_mini_batch": 1, "target_steps": 192, "progress": False, "seed": 3,
        "hidden_sizes": (8,)}


def weights_of(env, **options):
    """Return the weights after training in 4 environments."""
    return train("ppo", env, **{**TINY, **options}).acting_state["all"]


@functools.cache
def expected_weights():
    """The weights after training in arrays of NumPy, in a vector environment of Gymnasium."""
    return weights_of(functools.partial(stand_ins.TensorVector, device=None), num_envs=4)


# Kinds with the same steps, so that the weights are the same, too.
SAME = {
    "Gymnasium, tensors": stand_ins.TensorVector,
    "Gymnasium, tensors, without resets": lambda num_envs=4: stand_ins.TensorVector(num_envs, AutoresetMode.DISABLED),
    "ManiSkill": stand_ins.ManiSkillForm,
    "Isaac Lab, mjlab": stand_ins.FiveResults,
    "Isaac Lab, made by Gymnasium": lambda: gym.make("Walk-v0", num_envs=4, disable_env_checker=True),
    "a given object": stand_ins.FiveResults(4),
    "a given vector environment": stand_ins.TensorVector(4),
    "a function without num_envs": lambda: stand_ins.FiveResults(4),
    "arrays of NumPy, as mjbatch": functools.partial(stand_ins.FiveResults, device=None),
    "results in the same memory": functools.partial(stand_ins.FiveResults, in_place=True),
    "results in the same memory, which a reset changes": lambda num_envs=4: stand_ins.TensorVector(
        num_envs, AutoresetMode.DISABLED, in_place=True),
    "arrays in the same memory": functools.partial(stand_ins.FiveResults, in_place=True, device=None),
    "Genesis": stand_ins.FourResults,
}


@pytest.fixture(autouse=True)
def _registered():
    gym.register("Walk-v0", entry_point=stand_ins.AsEnv)
    yield
    del gym.registry["Walk-v0"]


@pytest.mark.parametrize("kind", SAME)
def test_all_forms_of_the_same_environments_train_to_the_same_weights(kind):
    env = SAME[kind]
    has_size = callable(env) and "num_envs" in inspect.signature(env).parameters
    assert weights_of(env, **({"num_envs": 4} if has_size else {})).equal(expected_weights())


@pytest.mark.parametrize("make", [
    "Walk-v0", lambda num_envs=4: stand_ins.TensorVector(num_envs, AutoresetMode.NEXT_STEP), stand_ins.Groups,
    stand_ins.RslRl,
    lambda num_envs: gym.make_vec("CartPole-v1", num_envs), functools.partial(gym.make_vec, "CartPole-v1"),
    lambda num_envs: gym.make_vec("CartPole-v1", num_envs, "vector_entry_point"),
    lambda: gym.make_vec("CartPole-v1", 4, "sync"),
])
def test_other_kinds_train(make):
    assert torch.isfinite(weights_of(make)).all()


def test_wrappers_of_gymnasium_that_return_tensors_train():
    pytest.importorskip("array_api_compat")
    wrappers = gym.wrappers.vector
    assert weights_of(lambda: wrappers.NumpyToTorch(
        stand_ins.TensorVector(4, device=None))).equal(expected_weights())
    assert weights_of(lambda: wrappers.ArrayConversion(
        stand_ins.TensorVector(4, device=None), np, torch)).equal(expected_weights())
    single = weights_of(lambda: gym.wrappers.NumpyToTorch(gym.make("CartPole-v1")), num_envs=4, backend="sync")
    assert single.equal(weights_of(lambda: gym.make("CartPole-v1"), num_envs=4, backend="sync"))


PENDULUM = """<mujoco><worldbody><body><joint name="hinge" axis="0 1 0"/><geom size="0.1" pos="0 0 -1"/></body>
</worldbody><actuator><motor joint="hinge"/></actuator></mujoco>"""


class Simulations:
    """Pendulums that mjbatch steps; observations are views of its memory, or copies of it."""

    num_actions = 1

    def __init__(self, num_envs, copies):
        mujoco, mjbatch = pytest.importorskip("mujoco"), pytest.importorskip("mjbatch")
        self.num_envs, self.copies, self.counts = num_envs, copies, np.zeros(num_envs, int)
        self.batch = mjbatch.Batch(mujoco.MjModel.from_xml_string(PENDULUM), num_envs, 1)
        self.place, self.speed, self.force = (self.batch.bind(name, np.float32) for name in ("qpos", "qvel", "ctrl"))

    def reset(self, seed=None):
        if seed is not None:
            self.random = np.random.default_rng(seed)
        self.begin(np.arange(self.num_envs))
        return self.obs()

    def begin(self, rows):
        self.counts[rows] = self.speed[rows] = 0
        self.place[rows] = self.random.uniform(-1, 1, (len(rows), 1))

    def obs(self):
        obs = {"place": self.place, "speed": self.speed}
        return {name: part.copy() for name, part in obs.items()} if self.copies else obs

    def step(self, actions):
        self.force[:] = actions
        self.batch.step()
        self.counts += 1
        cut = self.counts >= 10
        extras = {"final_obs": {"place": self.place.copy(), "speed": self.speed.copy()}}
        reward = self.place[:, 0].copy()
        self.begin(cut.nonzero()[0])
        return self.obs(), reward, cut & False, cut, extras


def test_views_of_the_memory_of_mjbatch_train_as_copies_do():
    first, second = (weights_of(functools.partial(Simulations, copies=copies), num_envs=4) for copies in (False, True))
    assert first.equal(second)


def test_a_scheme_trains_in_a_given_vector_but_not_with_several_workers():
    remedy = re.escape("give a function that takes num_envs, such as lambda num_envs: MyEnvs(num_envs)")
    envs = VecEnv.create_factory(stand_ins.FiveResults(4))
    assert envs.num_envs == 4
    parts = (PPO.create_factory(num_mini_batch=1), OnPolicyActor.create_factory(
        envs.observation_space, envs.action_space), GAEBuffer.create_factory(8), envs)
    scheme = Scheme(*parts, seed=1)
    scheme.step()
    scheme.stop()
    with pytest.raises(ConfigError, match=f"training and evaluation cannot share.*{remedy}"):
        Scheme(*parts, envs)
    for options in ({"num_col_workers": 2}, {"num_grad_workers": 2}, {"eval_every": 16}, {"backend": "sync"}):
        with pytest.raises(ConfigError, match=remedy):
            train("ppo", stand_ins.FiveResults(4), **{**TINY, **options})
    with pytest.raises(ConfigError, match="has 4 environments; set 4, or leave vec_env_size out"):
        train("ppo", stand_ins.FiveResults(4), num_envs=3, **TINY)


@pytest.mark.parametrize(("options", "message"), [
    ({"backend": "async"}, "leave backend out, or give a function that builds one environment"),
    ({"frame_stack": 2}, "give a function that builds one environment"),
    ({"max_episode_steps": 5}, "set its own limit, and return the episodes that it cuts off as truncated"),
    ({"env_timeout_s": 5}, "give a function that builds one environment"),
])
def test_options_of_single_environments_are_refused_with_a_remedy(options, message):
    with pytest.raises(ConfigError, match=message):
        VecEnv.create_factory(lambda: stand_ins.FiveResults(4), **options)


def test_the_time_limit_of_gymnasium_is_refused():
    made = gym.make("Walk-v0", num_envs=4, max_episode_steps=5, disable_env_checker=True)
    for env in (made, lambda: made):
        with pytest.raises(ConfigError, match=r"TimeLimit counts the steps of one env.*register the id without"):
            VecEnv.create_factory(env)


def test_spaces_are_read_off_the_first_observations():
    class Bare(stand_ins.Groups):
        def __init__(self, num_envs):
            super().__init__(num_envs)
            del self.single_observation_space, self.single_action_space

        def step(self, actions):
            return super().step((actions[:, 0] > 0).long())

    factory = VecEnv.create_factory(Bare, vec_env_size=3)
    assert factory.observation_space == {"policy": spaces.Box(-np.inf, np.inf, (3,), np.float32)}
    assert factory.action_space == spaces.Box(-np.inf, np.inf, (2,), np.float32)
    weights_of(Bare)


def test_a_reset_that_fails_while_spaces_are_read_is_an_error_of_the_environment():
    class Fails(stand_ins.FiveResults):
        single_observation_space = property(lambda self: None, lambda self, value: None)

        def reset(self, seed=None):
            raise ZeroDivisionError("of the simulator")

    with pytest.raises(EnvError, match="GWorker 0/CWorker 0: reset raised: ZeroDivisionError: of the simulator"):
        VecEnv.create_factory(Fails)


def test_an_episode_that_is_cut_off_needs_its_last_observation_or_is_counted():
    with pytest.raises(EnvError, match="set truncation='approximate', which takes the value of the state before"):
        weights_of(stand_ins.NoFinal)
    factory = VecEnv.create_factory(stand_ins.NoFinal, vec_env_size=4, truncation="approximate")
    env = factory(seed=1)
    before, _ = env.reset()
    num_cut = 0
    for _ in range(40):
        before = {name: leaf.copy() for name, leaf in before.items()}
        step = env.step(np.zeros(4, np.int64))
        for row, index in enumerate(step.final_index):
            assert step.truncated[index]
            assert np.array_equal(step.final_obs["obs"][row], before["obs"][index])
        assert all(episode.is_approximated for episode in step.episodes)
        num_cut += len(step.episodes)
        before = step.obs
    assert num_cut == 4 * (40 // stand_ins.LIMIT)


def test_approximated_episodes_are_a_statistic_of_the_run(tmp_path, caplog):
    def counts_of(kind, directory, **options):
        train("ppo", kind, num_envs=4, log_dir=directory, **TINY, **options)
        cut = sum("truncated" in line for path in directory.rglob("*.csv") for line in path.read_text().splitlines())
        metrics = json.loads((directory / "metrics.jsonl").read_text().splitlines()[-1])
        return metrics["scheme"]["episodes_approximated"], cut

    counted, cut = counts_of(stand_ins.NoFinal, tmp_path / "approximate", truncation="approximate")
    assert counted == cut > 0
    assert any("the statistic episodes_approximated counts" in text for text in caplog.messages)
    assert counts_of(stand_ins.FiveResults, tmp_path / "exact")[0] == 0


def test_seeds_determine_the_episodes_in_each_way_to_set_them(caplog):
    class Silent(stand_ins.FiveResults):
        seed = None

        def reset(self):
            self.begin()
            return self.obs("obs")

    def first_obs(kind, seed):
        env = VecEnv.create_factory(kind, vec_env_size=4)(seed=seed)
        first = env.reset()[0]["obs"].copy()
        assert not np.array_equal(first, env.reset()[0]["obs"])  # only the first reset is seeded
        return first

    for kind in (stand_ins.FiveResults, stand_ins.FourResults):
        assert np.array_equal(first_obs(kind, 1), first_obs(kind, 1))
        assert not np.array_equal(first_obs(kind, 1), first_obs(kind, 2))
    assert not caplog.messages
    first_obs(Silent, 1)
    assert "Silent takes no seed, neither in reset(seed=) nor by seed(), so that a run with the same seed may" in (
        caplog.text)


def changed(**parts):
    """Return five results of which some are replaced by the result of a function of their value."""
    class Changed(stand_ins.FiveResults):
        num_steps = 0

        def step(self, actions):
            self.num_steps += 1
            names = ("obs", "reward", "terminated", "truncated", "extras")
            results = dict(zip(names, super().step(actions), strict=True))
            if self.num_steps > 3:
                results |= {name: change(results[name]) for name, change in parts.items() if name in results}
            results = tuple(results.values())
            return parts["all"](results) if "all" in parts else results

    return Changed


class NoActions(stand_ins.FiveResults):
    num_actions = None

    def __init__(self, num_envs):
        super().__init__(num_envs)
        del self.single_action_space


class ActionsOfAll(NoActions):
    def __init__(self, num_envs):
        super().__init__(num_envs)
        self.action_space = spaces.Box(-1, 1, (num_envs, 2), np.float32)


@dataclasses.dataclass
class ForeignBox:
    """A space of another library, such as mjlab's."""

    shape: tuple
    low: float = -math.inf
    high: float = math.inf
    dtype: str = "float32"


def test_spaces_of_other_libraries_are_converted():
    class Foreign(stand_ins.Groups):
        def __init__(self, num_envs):
            super().__init__(num_envs)
            own = self.single_observation_space
            self.single_observation_space = SimpleNamespace(
                spaces={name: ForeignBox(space.shape) for name, space in own.spaces.items()})
            self.single_action_space = ForeignBox((2,), -1.0, 1.0)

    factory = VecEnv.create_factory(Foreign, vec_env_size=4)
    assert factory.observation_space == {"policy": spaces.Box(-np.inf, np.inf, (3,), np.float32)}
    assert factory.action_space == spaces.Box(-1.0, 1.0, (2,), np.float32)


class WholeObservations(stand_ins.FiveResults):
    def __init__(self, num_envs):
        super().__init__(num_envs)
        del self.single_observation_space

    def obs(self, name):
        return super().obs(name).long()


class NewKeys(stand_ins.Groups):
    def step(self, actions):
        obs, *rest = super().step(actions)
        return {"policy": obs["policy"], "more": obs["policy"]}, *rest


META = torch.device("meta")


@pytest.mark.parametrize(("kind", "message"), [
    (changed(obs=lambda obs: obs[:-1]), "observation: expected float32 (4, 3), got float32 (3, 3); correct the"),
    (changed(obs=lambda obs: obs[:, :2]), "observation: expected float32 (4, 3), got float32 (4, 2); correct the"),
    (changed(reward=lambda reward: reward[:, None]), "reward of shape (4,), got float32 (4, 1); return reward[:, 0]"),
    (changed(reward=lambda reward: reward[1:]), "expected reward of shape (4,), got float32 (3,)"),
    (changed(reward=lambda reward: reward > 0), "expected reward as numbers, got bool (4,); return float32"),
    (changed(terminated=lambda ends: ends[:, None]), "terminated of shape (4,), got torch.bool (4, 1); return termi"),
    (changed(terminated=lambda ends: ends.float()), "expected terminated as flags, got torch.float32 (4,); return boo"),
    (changed(truncated=lambda ends: ends.long() * 2 + 2), "expected truncated as flags, got torch.int64 (4,); return"),
    (changed(truncated=lambda ends: bool(ends[0])), "expected truncated of shape (4,), got bool ()"),
    (changed(obs=lambda obs: obs.to(META)), "observations is on meta, but the environments are on cpu; return tensors"),
    (changed(reward=lambda reward: reward.to(META)), "reward is on meta, but the environments are on cpu; return tens"),
    (changed(terminated=lambda ends: ends.to(META)), "terminated is on meta, but the environments are on cpu; return"),
    (changed(obs=lambda obs: obs * np.nan), "env 0: obs is nan at"),
    (changed(reward=lambda reward: reward * np.nan), "env 0: reward is nan at"),
    (changed(all=lambda results: results[:3]), "or (observations, reward, dones, extras), got a tuple of 3"),
    (changed(all=list), "(observations, reward, dones, extras), got a list"),
    (changed(extras=lambda extras: [extras]), "expected a dictionary as extras, got a list; return {}"),
    (changed(extras=lambda extras: {"final_obs": extras["final_obs"][0]}),
     "final_obs: expected float32 (4, 3), got float32 (3,); correct the observation, or the declared space; final_obs "
     "has a row for each environment"),
    (changed(all=lambda results: (results[0], results[0], results[1], results[2], results[4])),
     "with privileged observations in a dictionary"),
    (NoActions, "states no actions: it has neither single_action_space, a space of Gymnasium, nor num_actions"),
    (ActionsOfAll, "action_space is that of all 1 environments"),
    (WholeObservations, "set single_observation_space to a space of Gymnasium, or return floats"),
    (NewKeys, "expected a dict with ['policy'], got ['more', 'policy']"),
])
def test_wrong_environments_are_named_in_the_first_rollout(kind, message):
    with pytest.raises((EnvError, NonFiniteDataError), match=re.escape(message)):
        train("ppo", kind, num_envs=4, **{**TINY, "target_steps": 64})


def test_other_numbers_are_converted():
    kind = changed(reward=lambda reward: reward.to(torch.int16), terminated=lambda ends: ends.to(torch.uint8))
    assert weights_of(kind, num_envs=4).equal(expected_weights())
    kind = changed(obs=lambda obs: obs.double(), reward=lambda reward: reward.bfloat16())
    assert weights_of(kind, num_envs=4).equal(expected_weights())


def test_a_vector_environment_of_an_unknown_mode_is_refused_when_it_resets_at_once():
    class Unknown(stand_ins.ManiSkillForm):
        auto_reset = None

    with pytest.raises(EnvError, match=re.escape("metadata = {'autoreset_mode': AutoresetMode.SAME_STEP}")):
        weights_of(Unknown)

    class Never(stand_ins.ManiSkillForm):
        auto_reset = False

    with pytest.raises(ConfigError, match="auto_reset=True"):
        weights_of(Never)


def test_given_vectors_are_left_open_and_evaluated():
    class Closable(stand_ins.FiveResults):
        is_closed = False

        def close(self):
            self.is_closed = True

    env = Closable(4)
    agent = train("ppo", env, **TINY)
    assert agent.summary["env_steps"] >= 192
    assert not env.is_closed
    assert len(agent.evaluate(3).returns) == 3
