"""Test exceeded restart budgets, contract violations (which never cause a restart), and the logs of faults."""

from __future__ import annotations

import functools
import itertools
import pickle
import traceback
from pathlib import Path

import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv

from pytorchrl.agent.env import VecEnv
from pytorchrl.agent.env.restarts import WINDOW
from pytorchrl.envs.testing import CountingEnv, FaultyEnv
from pytorchrl.errors import ConfigError, EnvError
from tests.unit.agent.env.planned_faults import MODES, NUM_ENVS, planned, play


def test_a_restarted_environment_has_another_seed_each_time():
    env = VecEnv.create_factory(FaultyEnv, {"fault": "step", "at": 2}, 2, on_env_error="restart")(seed=3)
    rows = play(env, 3)
    seeds = [obs["obs"][:, 0].tolist() for obs, _, _ in rows]
    assert len({*seeds[0], *seeds[-1]}) == 4
    assert env.num_restarts == 2


def test_rllib_step_that_always_fails_is_an_error_after_a_few_restarts():
    env, log = planned({("step", "always")}, error=lambda: KeyError("permanent"))
    env.reset()
    with pytest.raises(EnvError, match=(
            r"GWorker 0/CWorker 0, env \d: step raised after 1 steps, seed \d+: KeyError: "
            r"'permanent'; not restarted, .*restarted 3 times within its last 1000")) as caught:
        play(env, 5)
    assert isinstance(caught.value.__cause__, KeyError)
    assert caught.traceback[-1].path.name != Path(__file__).name
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
    closed = sorted(copy for copy, call in log if call == "close")
    assert closed == [0, 1, 2, 3, 4], "each copy must be closed exactly once"


def test_a_constructor_that_always_fails_later_is_an_error_after_3_attempts():
    plan = {(copy, "constructor", 0) for copy in range(2, 2000)}
    env, log = planned(plan | {(1, "step", 2)}, CountingEnv, num_envs=1)
    match = r"env 0: the constructor raised: RuntimeError: planned; not restarted, .* 3 times"
    with pytest.raises(EnvError, match=match):
        play(env, 10)
    assert [copy for copy, call in log if call == "constructor"] == [0, 1, 2, 3, 4]
    env.close()
    closed = [copy for copy, call in log if call == "close"]
    assert closed == [0, 1], "closed exactly once, although no replacement was built"


def test_rllib_error_without_arguments_is_reported_not_an_index_error(caplog):
    env, _ = planned({("step", "always")}, error=RuntimeError, num_envs=1)
    with pytest.raises(EnvError, match=r"step raised after 1 steps, seed \d+: RuntimeError: ;") as caught:
        play(env, 10)
    assert caught.value.__cause__.args == ()
    assert len(caplog.records) == 3


class AwkwardError(Exception):
    """Exception that cannot be pickled and whose `__str__` raises."""

    def __init__(self, first, second):
        super().__init__()
        self.lock = (line for line in ())

    def __str__(self):
        raise ValueError("no text")


def test_errors_that_cannot_be_pickled_or_printed_are_handled():
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


def test_each_restart_is_logged_with_place_time_and_reason(caplog):
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
def test_faults_at_the_start_raise_immediately(call):
    with pytest.raises(EnvError, match="planned"):
        play(planned({(2, call, 0)})[0], 1)
    with pytest.raises(EnvError, match="planned"):
        planned({(0, call, 0)})


@MODES
def test_a_fault_in_a_later_reset_loses_no_steps_or_episodes(autoreset):
    kwargs = {"episode_length": 3}
    clean, _ = planned((), CountingEnv, kwargs, autoreset=autoreset)
    faulty, _ = planned({(2, "reset", 1)}, CountingEnv, kwargs, autoreset=autoreset)
    expected, found = play(clean, 11), play(faulty, 11)
    for (_, _, one), (_, _, other) in zip(expected[1:], found[1:], strict=True):
        for name in ("terminated", "truncated", "valid", "first"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
        assert [e[1:2] + e[3:] for e in one.episodes] == [e[1:2] + e[3:] for e in other.episodes]
    assert faulty.num_restarts == 1


def test_a_fault_in_an_explicit_reset_causes_a_restart():
    env, _ = planned({(2, "reset", 1)})
    env.reset()
    env.step(np.zeros(NUM_ENVS, np.int64))
    assert np.isfinite(env.reset()[0]["obs"]).all()
    assert env.num_restarts == 1
    play(env, 5)


@pytest.mark.parametrize("limit", [1, 3])
def test_the_restart_budget_counts_all_environments_within_1000_steps(limit):
    """Check that one fault more than the limit is an error until 1000 steps after the first fault, but not later."""
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
def test_contract_violations_never_cause_a_restart(fault, match):
    env = VecEnv.create_factory(FaultyEnv, {"fault": fault, "at": 3}, 2, on_env_error="restart")(seed=0)
    with pytest.raises(EnvError, match=match):
        play(env, 10)
    assert env.num_restarts == 0


def test_contract_violations_that_raise_never_cause_a_restart():
    env = VecEnv.create_factory(
        FaultyEnv, {"fault": "four_values", "at": 3}, 2, max_episode_steps=100, on_env_error="restart")(seed=0)
    with pytest.raises(EnvError, match=r"values to unpack.*; step must return"):
        play(env, 10)
    assert env.num_restarts == 0


def test_a_restart_with_different_spaces_is_an_error():
    sizes = itertools.chain([2, 2], itertools.repeat(3))
    factory = VecEnv.create_factory(lambda: FaultyEnv("step", at=2, num_actions=next(sizes)), on_env_error="restart")
    with pytest.raises(EnvError, match=r"env 0: expected spaces .*Discrete\(2\) after a restart, got .*Discrete\(3\)"):
        play(factory(seed=0), 5)


def test_an_error_in_close_is_only_logged(caplog):
    env, log = planned({(1, "step", 2), (1, "close", 0)}, CountingEnv, num_envs=1)
    play(env, 5)
    assert "env 0: close raised RuntimeError\nTraceback" in caplog.text
    env.close()
    assert [copy for copy, call in log if call == "close"] == [0, 1, 2]


def test_on_env_error_raise_raises_the_first_fault():
    env, _ = planned({(2, "step", 4)}, CountingEnv, on_env_error="raise")
    with pytest.raises(EnvError, match="env 1: step raised after 5 steps"):
        play(env, 10)
    assert env.num_restarts == 0


class Native(SyncVectorEnv):
    def __init__(self, num_envs):
        super().__init__([functools.partial(FaultyEnv, "step", at=2)] * num_envs)


def test_native_vectors_always_raise_and_refuse_restarts():
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
