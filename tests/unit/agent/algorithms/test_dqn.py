"""Test the exploration of DQN: scheduled and requested values of epsilon, epsilon per collector, and noisy networks."""

from __future__ import annotations


import numpy as np
import pytest
import torch

from pytorchrl.agent.algorithms import ladder_epsilon
from pytorchrl.agent.schedules import linear
from pytorchrl.errors import ConfigError
from tests.unit.agent.algorithms.replay_agents import OBS, ROWS, act, assert_explores, make, update


def test_epsilon_follows_env_steps_and_is_the_share_of_random_actions():
    algorithm = make("dqn", start_steps=0, initial_epsilon=0.8, final_epsilon=0.2, epsilon_steps=1000)
    greedy = act(algorithm, deterministic=True)
    for env_steps, epsilon in ((0, 0.8), (500, 0.5), (1000, 0.2), (5000, 0.2)):
        algorithm.follow_schedules(env_steps, 10**6)
        update(algorithm, 0)
        assert algorithm.parameters["epsilon"] == pytest.approx(epsilon)
        differs = act(algorithm, 500).reshape(-1, 6) != greedy
        assert differs.mean() == pytest.approx(0.75 * epsilon, abs=0.04)


@pytest.mark.parametrize("masked", [None, False, True], ids=["NumPy", "torch", "torch with masks"])
def test_each_environment_explores_by_itself(masked):
    """Check the actions of six environments; without masks, NumPy chooses the actions of a small network."""
    algorithm = make("dqn", start_steps=0, initial_epsilon=0.8, final_epsilon=0.8)
    allowed = np.ones((len(ROWS), 4), bool)
    if masked:
        allowed[np.arange(6), [0, 1, 2, 3, 0, 1]] = False
    mask = None if masked is None else allowed
    greedy = algorithm.acting_step(OBS, {}, ROWS, deterministic=True, mask=mask).action
    actions = np.stack([algorithm.acting_step(OBS, {}, ROWS, mask=mask).action for _ in range(1000)])
    assert_explores(actions, greedy, 0.8, allowed)


def test_each_environment_starts_with_its_own_random_actions():
    algorithm = make("dqn", start_steps=10**6)
    actions = act(algorithm, 1000).reshape(-1, 6)
    assert_explores(actions, actions[0], 1.0, np.ones((6, 4), bool))


def test_epsilon_can_be_set_from_outside():
    algorithm = make("dqn", start_steps=0)
    algorithm.update_algorithm_parameter("epsilon", 0.0)
    algorithm.follow_schedules(10, 100)
    assert np.array_equal(act(algorithm), act(algorithm, deterministic=True))
    algorithm.update_algorithm_parameter("epsilon", linear(0.5, 0.0))
    algorithm.follow_schedules(50, 100)
    assert algorithm.parameters["epsilon"] == 0.25
    algorithm.update_algorithm_parameter("epsilon", [(0, 0.5), (100, 0.1)])
    algorithm.follow_schedules(50, 1000)
    assert algorithm.parameters["epsilon"] == 0.3
    with pytest.raises(ConfigError, match="epsilon cannot become a function while training"):
        algorithm.update_algorithm_parameter("epsilon", lambda progress_remaining: 0.1)
    for wrong in (1.5, [(0, 0.5), (100, 1.5)]):
        with pytest.raises(ConfigError, match="from 0 to 1"):
            algorithm.update_algorithm_parameter("epsilon", wrong)
    with pytest.raises(KeyError):
        algorithm.update_algorithm_parameter("polyak", 0.5)


def test_ladder_of_epsilon_has_known_values():
    def ladder(count):
        return [ladder_epsilon(index, count) for index in range(count)]

    assert ladder(4) == pytest.approx([0.4, 0.047156, 0.005559, 0.000655], abs=1e-6)
    assert ladder(8) == pytest.approx([0.4, 0.16, 0.064, 0.0256, 0.01024, 0.004096, 0.001638, 0.000655], abs=1e-6)
    assert ladder(1) == [0.4]
    with pytest.raises(ConfigError, match="from 0 to 3, got 4"):
        ladder_epsilon(4, 4)


def test_received_weights_do_not_change_epsilon_per_worker():
    algorithm = make("dqn", start_steps=0, epsilon_per_worker=True)
    algorithm.take_place(7, 8)
    algorithm.follow_schedules(0, 100)
    greedy = act(algorithm, deterministic=True)
    assert (act(algorithm, 200).reshape(-1, 6) != greedy).mean() < 0.01
    algorithm.take_place(0, 8)
    assert (act(algorithm, 300).reshape(-1, 6) != greedy).mean() == pytest.approx(0.3, abs=0.04)
    plain = make("dqn", start_steps=0)
    plain.take_place(7, 8)
    assert (act(plain, 300).reshape(-1, 6) != greedy).mean() == pytest.approx(0.75, abs=0.04)


def test_noisy_network_uses_noise_unless_deterministic():
    algorithm = make("noisy_dqn", start_steps=0, initial_epsilon=0.0, final_epsilon=0.0)
    scores = [algorithm.actor.get_q_scores({"obs": torch.as_tensor(OBS["obs"])}, generator=algorithm.generator)
              for _ in range(2)]
    assert not torch.equal(*scores)
    assert len({tuple(act(algorithm)) for _ in range(50)}) > 1
    assert len({tuple(act(algorithm, deterministic=True)) for _ in range(50)}) == 1


def test_an_unused_epsilon_cannot_be_set():
    with pytest.raises(KeyError, match="epsilon is fixed"):
        make("dqn", epsilon_per_worker=True).update_algorithm_parameter("epsilon", 0.1)
