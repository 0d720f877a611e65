import numpy as np
import pytest

from pytorchrl.agent.env.common import env_seeds, is_training_mode, open_monitor, reward_function
from pytorchrl.errors import ConfigError, EnvError

REWARDS = np.array([-3.0, 0.0, 0.5], np.float32)


@pytest.mark.parametrize(("transform", "seen"), [
    ("sign", [-1.0, 0.0, 1.0]), ("clip", [-1.0, 0.0, 0.5]), (2, [-6.0, 0.0, 1.0]), (0.5, [-1.5, 0.0, 0.25])])
def test_rewards_are_transformed_for_learners(transform, seen):
    changed = reward_function(transform)(REWARDS)
    assert changed.dtype == np.float32
    assert changed.tolist() == seen


def test_reward_function_is_none_without_a_transform():
    assert reward_function(None) is None


def test_environments_have_different_reproducible_31_bit_seeds():
    places = [(training, (grad, col, incarnation)) for training in (True, False) for grad in (0, 1) for col in (0, 1)
              for incarnation in (0, 1)]
    seeds = [seed for training, path in places for seed in env_seeds(7, training, path, 3)]
    assert len(set(seeds)) == len(seeds) == 48
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert env_seeds(7, True, (0, 1, 0), 3) == env_seeds(7, True, (0, 1, 0), 3)
    assert env_seeds(None, True, (0, 0, 0), 1) != env_seeds(None, True, (0, 0, 0), 1)


def test_mode_is_train_or_test():
    assert (is_training_mode("train"), is_training_mode("test")) == (True, False)
    with pytest.raises(ConfigError, match="mode must be 'train' or 'test', got 'play'"):
        is_training_mode("play")


def test_monitor_files_are_named_by_mode_and_worker(tmp_path):
    assert open_monitor(None, "train", 0, 0) is None
    open_monitor(str(tmp_path), "test", 1, 12, ("x",)).close()
    assert (tmp_path / "monitor_test_GWorker_1_CWorker_12.csv").read_text() == "r,l,t,env,ended,x\n"


def test_a_function_of_rewards_must_return_one_number_for_each_environment():
    found = reward_function(lambda rewards: rewards.clip(0, 1))(REWARDS)
    assert found.tolist() == np.clip(REWARDS, 0, 1).tolist()
    for wrong in (np.sum, lambda rewards: rewards[:1], lambda rewards: list(map(str, rewards)), lambda rewards: None):
        with pytest.raises(EnvError, match="one reward for each environment, got"):
            reward_function(wrong)(REWARDS)
