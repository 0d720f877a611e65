"""Check that a scheme rejects an agent with invalid parts before anything is started."""

from __future__ import annotations

import functools
import re
import threading
import warnings

import gymnasium as gym
import numpy as np
import pytest

from pytorchrl import (
    A2C,
    APPO,
    ASYNC,
    DQN,
    PPO,
    GAEBuffer,
    OnPolicyActor,
    QActor,
    ReplayBuffer,
    Scheme,
    VecEnv,
    VTraceBuffer,
)
from pytorchrl.envs.testing import CountingEnv
from pytorchrl.errors import ConfigError, FactoryError, FactorySerializationError, SpaceError

NAN = float("nan")


@pytest.fixture(scope="module")
def parts():
    envs = VecEnv.create_factory(CountingEnv, vec_env_size=2)
    return (PPO.create_factory(), OnPolicyActor.create_factory(envs.observation_space, envs.action_space),
            GAEBuffer.create_factory(8), envs)


@pytest.fixture(autouse=True)
def nothing_starts():
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) == before


@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize("wrong", [None, 3, lambda **context: None, PPO], ids=["none", "number", "lambda", "class"])
def test_anything_but_a_factory_is_refused(parts, index, wrong):
    given = list(parts)
    given[index] = wrong
    name = ("algo_factory", "actor_factory", "storage_factory", "train_envs_factory")[index]
    with pytest.raises(FactoryError, match=rf"{name} must be a factory such as \w+\.create_factory\("):
        Scheme(*given)


def test_parts_in_the_wrong_order_are_refused(parts):
    algo, actor, storage, envs = parts
    with pytest.raises(ConfigError):
        Scheme(actor, algo, storage, envs)


def test_different_spaces_of_training_and_test_envs_are_refused(parts):
    other = VecEnv.create_factory("CartPole-v1")
    with pytest.raises(SpaceError, match=r"observation_space differs.*training.*test"):
        Scheme(*parts, other)
    fewer = VecEnv.create_factory(CountingEnv, {"num_actions": 3})
    with pytest.raises(SpaceError, match="action_space differs"):
        Scheme(*parts, fewer)


def test_an_actor_for_other_environments_is_refused(parts):
    """Check that the error is raised when the scheme is built, not later by a matrix product with mismatched shapes."""
    other = VecEnv.create_factory("Acrobot-v1")
    actor = OnPolicyActor.create_factory(other.observation_space, other.action_space)
    with pytest.raises(SpaceError, match=r"actor_factory.*train_envs_factory"):
        Scheme(parts[0], actor, parts[2], parts[3])


def test_more_mini_batches_than_samples_are_refused(parts):
    _, actor, storage, envs = parts
    with pytest.raises(ConfigError, match=r"batch 32 = 2 .*x 2 .*x 8 .*num_mini_batch 33"):
        Scheme(PPO.create_factory(num_mini_batch=33), actor, storage, envs, num_col_workers=2)
    Scheme(PPO.create_factory(num_mini_batch=32), actor, storage, envs, num_col_workers=2)
    Scheme(PPO.create_factory(num_mini_batch=33), actor, storage, envs, num_col_workers=2, train_batch_size=33)


@pytest.mark.parametrize("options", [{"lr": NAN}, {"gamma": -0.1}, {"gamma": 1.1}, {"lr": "fast"}, {"clip_param": 0.0},
                                     {"num_mini_batch": 0}, {"num_epochs": 0}, {"lrr": 1.0}], ids=str)
def test_a_wrong_option_of_the_algorithm_is_refused(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        PPO.create_factory(**options)


@pytest.mark.parametrize("options", [{"size": 0}, {"size": 8, "gae_lambda": 1.5}, {"size": "8"}], ids=str)
def test_a_wrong_option_of_the_storage_is_refused(options):
    with pytest.raises(ConfigError, match=list(options)[-1]):
        GAEBuffer.create_factory(**options)


def test_too_few_sequences_for_a_recurrent_actor_are_refused(parts):
    _, _, storage, envs = parts
    actor = OnPolicyActor.create_factory(envs.observation_space, envs.action_space, recurrent_net="gru")
    with pytest.raises(ConfigError, match=r"2 sequences.*num_mini_batch=4"):
        Scheme(PPO.create_factory(num_mini_batch=4), actor, storage, envs)


# Sending factories to other processes


def _env_with(thing):
    def make():
        assert thing is not None
        return CountingEnv()
    return make


@pytest.mark.parametrize("settings", [{"num_col_workers": 2}, {"num_grad_workers": 2}], ids=str)
def test_a_factory_holding_a_lock_cannot_be_sent(parts, settings):
    algo, actor, storage, _ = parts
    envs = VecEnv.create_factory(_env_with(threading.Lock()), vec_env_size=2)
    with pytest.raises(FactorySerializationError, match=r"train_envs_factory cannot be sent.*env_fn.*lock"):
        Scheme(algo, actor, storage, envs, **settings)


def test_a_factory_holding_an_open_file_cannot_be_sent(parts, tmp_path):
    algo, actor, storage, envs = parts
    with (tmp_path / "file").open("w") as file:
        tests = VecEnv.create_factory(_env_with(file), vec_env_size=2)
        with pytest.raises(FactorySerializationError, match="test_envs_factory cannot be sent"):
            Scheme(algo, actor, storage, envs, tests, num_col_workers=2)


def test_a_factory_that_is_not_sent_may_hold_anything(parts):
    algo, actor, storage, _ = parts
    envs = VecEnv.create_factory(_env_with(threading.Lock()), vec_env_size=2)
    Scheme(algo, actor, storage, envs)
    Scheme(algo, actor, storage, envs, num_col_workers=2, runtime="threads")


def test_a_large_factory_warns_with_its_size(parts):
    algo, actor, storage, _ = parts
    envs = VecEnv.create_factory(_env_with(bytearray(11 * 2**20)), vec_env_size=2)
    with pytest.warns(UserWarning, match="train_envs_factory is 11 MB"):
        Scheme(algo, actor, storage, envs, num_col_workers=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Scheme(algo, actor, storage, envs)  # no remote workers, so nothing is sent
        Scheme(algo, actor, storage, VecEnv.create_factory(_env_with(bytearray(8)), vec_env_size=2), num_col_workers=2)


@pytest.mark.parametrize(("algo", "storage", "settings", "warns"), [
    (PPO, GAEBuffer, {"queue_size": 5}, True), (A2C, GAEBuffer, {"queue_size": 16}, True),
    (PPO, GAEBuffer, {}, False), (PPO, GAEBuffer, {"queue_size": 4}, False),
    (PPO, GAEBuffer, {"queue_size": 16, "max_policy_lag": 4}, False),
    (PPO, GAEBuffer, {"queue_size": 16, "buffer": "circular"}, False),
    (APPO, VTraceBuffer, {"queue_size": 16}, False),
])
def test_a_long_queue_warns_if_the_algorithm_does_not_correct_for_lag(parts, algo, storage, settings, warns):
    agent = (algo.create_factory(), parts[1], storage.create_factory(8), parts[3])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Scheme(*agent, num_col_workers=2, runtime="threads", col_communication=ASYNC, **settings)
    assert [f"and {algo.__name__} does not correct for their age" in str(warning.message) for warning in caught
            ] == [True] * warns


@pytest.mark.parametrize(("agent", "settings", "expected"), [
    ("ppo", {}, (1, 1, None)), ("ppo", {"queue_size": 3, "col_in_flight": 5}, (3, 5, None)),
    ("ppo", {"max_policy_lag": 3}, (1, 1, "wait")), ("ppo", {"max_policy_lag": 3, "on_policy_lag": "drop"},
                                                     (1, 1, "drop")),
    ("ppo", {"max_policy_lag": 3, "broadcast_interval": 2}, (1, 1, "drop")),
    ("ppo", {"max_policy_lag": 3, "max_weight_sync_delay": 20}, (1, 1, "drop")),
    ("ppo", {"max_policy_lag": 3, "inference": "central"}, (1, None, "drop")),
    ("ppo", {"max_policy_lag": 3, "buffer": "circular"}, (16, 2, "drop")),
    ("appo", {}, (1, 1, None)), ("dqn", {}, (16, 2, None)), ("dqn", {"num_replay_workers": 1}, (16, 2, None)),
    ("dqn", {"num_replay_workers": 1, "queue_size": 3}, (3, 2, None)),
])
def test_defaults_that_depend_on_the_data(parts, agent, settings, expected):
    of_algorithm = {
        "ppo": parts[:3], "appo": (APPO.create_factory(), parts[1], VTraceBuffer.create_factory(8)),
        "dqn": (DQN.create_factory(), QActor.create_factory(parts[3].observation_space, parts[3].action_space),
                ReplayBuffer.create_factory(10_000, rollout_size=4))}
    scheme = Scheme(*of_algorithm[agent], parts[3], num_col_workers=2, runtime="threads", col_communication=ASYNC,
                    **settings)
    assert tuple(scheme.settings[name] for name in ("queue_size", "col_in_flight", "on_policy_lag")) == expected


# Environments


@pytest.mark.parametrize(("make", "message"), [
    (lambda: VecEnv.create_factory("CartPole-v7"), "CartPole-v1"),
    (lambda: VecEnv.create_factory("CartPoel-v1"), "CartPole"),
    (lambda: VecEnv.create_factory(CountingEnv, vec_env_size=0), "vec_env_size"),
], ids=["version", "typo", "none"])
def test_a_wrong_environment_is_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


class Continuous(gym.Env):
    """An environment whose actions have given bounds."""

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self, low, high):
        self.action_space = gym.spaces.Box(np.array(low, np.float64), np.array(high, np.float64), dtype=np.float64)

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return np.zeros(2, np.float32), 0.0, True, False, {}


RESCALED = (functools.partial(gym.wrappers.RescaleAction, min_action=-1.0, max_action=1.0),)


@pytest.mark.parametrize(("low", "high", "options", "warns"), [
    ([-1, -2], [1, 2], {}, None), ([0, -0.4], [1, 0.4], {}, None), ([-3], [30], {}, None),
    ([-np.inf], [np.inf], {}, None),
    ([0], [np.inf], {}, None), ([-1, 1000], [1, 2000], {}, r"actions \[1\] have bounds such as 1000 to 2000.*clipped"),
    ([-5], [-2], {}, "clipped"), ([-1e-3], [1e-3], {}, "clipped"), ([-1000], [1000], {}, "alike"),
    ([-1000], [1000], {"log_std_init": 5.0}, None), ([-5, -1e-3], [-2, 1000], {"wrappers": RESCALED}, None),
], ids=str)
def test_bounds_of_actions_that_the_first_policy_cannot_explore_are_named(low, high, options, warns):
    wrappers = options.pop("wrappers", ())
    envs = VecEnv.create_factory(Continuous, {"low": low, "high": high}, 2, wrappers=wrappers)
    actor = OnPolicyActor.create_factory(envs.observation_space, envs.action_space, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Scheme(PPO.create_factory(), actor, GAEBuffer.create_factory(8), envs)
    texts = [str(one.message) for one in caught if "have bounds" in str(one.message)]
    assert len(texts) == (0 if warns is None else 1)
    assert warns is None or re.search(warns, texts[0])
