import numpy as np
import pytest
import torch
from gymnasium import spaces

from pytorchrl.agent.env import VecEnv, check_finite
from pytorchrl.agent.env.guard import observation_problem, step_problem
from pytorchrl.envs.testing import FaultyEnv
from pytorchrl.errors import NonFiniteDataError

BOX = spaces.Box(-1, 1, (2,), np.float32)


def test_observations_are_checked_leaf_by_leaf():
    space = spaces.Dict({"a": BOX, "b": spaces.Tuple((spaces.Discrete(3), spaces.MultiBinary(2)))})
    good = {"a": np.zeros(2, np.float32), "b": (1, np.zeros(2, np.int8))}
    assert observation_problem(space, good) is None
    for bad, match in (
            ({"a": good["a"]}, "expected a dict with ['a', 'b'], got ['a']"),
            (good | {"a": np.zeros(3, np.float32)}, "observation/a: expected float32 (2,), got float32 (3,)"),
            (good | {"b": (1,)}, "observation/b: expected a tuple of 2, got a tuple of 1"),
            (good | {"b": (1.5, good["b"][1])}, "observation/b/0: expected int64 (), got float64 ()")):
        assert match in observation_problem(space, bad)


def test_numbers_are_cast_if_floats_are_declared(caplog):
    caplog.set_level("INFO")
    assert observation_problem(BOX, np.zeros(2, np.float64)) is None
    assert "casting from float64 to float32" in caplog.text
    assert observation_problem(BOX, np.zeros(2, np.int64)) is None
    assert "got float32" in observation_problem(spaces.Box(0, 255, (2,), np.uint8), np.zeros(2, np.float32))


@pytest.mark.parametrize(("result", "match"), [
    ((np.zeros(2, np.float32), 0.0, False, {}), "got a tuple of 4"),
    ((np.zeros(2, np.float32), "1", False, False, {}), "a number as reward"),
    ((np.zeros(2, np.float32), 0.0, 0, False, {}), "a bool as terminated"),
    ((np.zeros(2, np.float32), 0.0, False, None, {}), "a bool as truncated"),
    ((np.zeros(2, np.float32), 0.0, False, False, []), "a dict as info"),
])
def test_malformed_step_results_are_described(result, match):
    assert match in step_problem(BOX, result)
    assert step_problem(BOX, (np.zeros(2, np.float32), np.float32(1), np.bool_(True), False, {})) is None


def test_check_finite_names_worker_environment_and_key():
    leaves = {"obs": np.zeros((5, 3, 2), np.float32), "reward": torch.zeros(4, 3), "action": np.zeros((4, 3), np.int64)}
    check_finite(leaves, "GWorker 0/CWorker 1")
    leaves["reward"][2, 1] = float("nan")
    with pytest.raises(NonFiniteDataError, match=r"GWorker 0/CWorker 1, env 1: reward is nan at \(2, 1\); 1 of 12"):
        check_finite(leaves, "GWorker 0/CWorker 1")
    leaves["reward"][2, 1] = 0.0
    leaves["obs"][4, 2, 1], leaves["obs"][0, 0, 0] = -np.inf, np.inf
    with pytest.raises(NonFiniteDataError, match="env 0: obs is inf"):
        check_finite(leaves, "GWorker 0/CWorker 1")


def test_check_finite_is_not_fooled_by_large_numbers():
    check_finite({"obs": np.full((4, 2), 3e38, np.float32)}, "w")


@pytest.mark.parametrize(("fault", "key"), [("nan_obs", "obs"), ("inf_obs", "obs"), ("nan_reward", "reward")])
def test_check_finite_finds_the_values_of_a_faulty_environment(fault, key):
    env = VecEnv.create_factory(FaultyEnv, {"fault": fault, "at": 2}, 2)(seed=0)
    env.reset()
    steps = [env.step(np.zeros(2, np.int64)) for _ in range(2)]
    check_finite({"obs": steps[1].obs["obs"], "reward": steps[1].reward}, "w", env_axis=0)
    step = env.step(np.zeros(2, np.int64))
    with pytest.raises(NonFiniteDataError, match=f"w, env 0: {key}"):
        check_finite({"obs": step.obs["obs"], "reward": step.reward}, "w", env_axis=0)
