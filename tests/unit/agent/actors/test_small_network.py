"""Compare the NumPy implementation of small networks with the torch implementation."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch

from pytorchrl.agent.actors import QActor
from pytorchrl.agent.actors.small_network import SmallNetwork
from pytorchrl.agent.algorithms import DQN

SPACE = gym.spaces.Box(-np.inf, np.inf, (5,), np.float32)
OPTIONS = {"start_steps": 0, "initial_epsilon": 0.5, "epsilon_steps": 10**6}


def make(actor=QActor, cls=DQN, **options):
    built = actor.create_factory(SPACE, gym.spaces.Discrete(3), **options)(seed=3)
    return cls.create_factory(**OPTIONS)(actor=built, seed=4)


def observations(num=6, seed=0):
    return {"obs": np.random.default_rng(seed).standard_normal((num, 5), np.float32)}


def act(algorithm, obs, deterministic=False, mask=None):
    return algorithm.acting_step(obs, {}, np.zeros(len(obs["obs"]), np.bool_), deterministic, mask).action


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("hidden", [(), (8,), (64, 32)])
def test_outputs_equal_those_of_torch_also_after_an_update(hidden, activation):
    algorithm = make(hidden_sizes=hidden, activation=activation)
    q = algorithm.actor.q
    network = SmallNetwork(q.trunk, q.advantage_head, activation)
    for seed in range(3):
        obs = observations(seed=seed)
        with torch.inference_mode():
            expected = q({"obs": torch.from_numpy(obs["obs"])}).numpy()
        np.testing.assert_allclose(network(obs["obs"]), expected, rtol=1e-5, atol=1e-6)
        algorithm.apply_gradients([torch.randn(len(algorithm.groups["q"]))])


def test_torch_computes_normalized_layers():
    assert make(norm="layer")._small_network is None


@pytest.mark.parametrize("deterministic", [False, True])
def test_dqn_chooses_the_same_actions_with_the_same_random_numbers(deterministic):
    small, plain = make(), make()
    plain._small_network = None
    for seed in range(30):
        obs = observations(small._small_network.max_rows, seed)
        np.testing.assert_array_equal(act(small, obs, deterministic), act(plain, obs, deterministic))
    assert torch.equal(small.generator.get_state(), plain.generator.get_state())


def test_masks_and_many_rows_use_torch():
    algorithm, calls = make(), []
    network = algorithm._small_network

    class Spy:
        max_rows = network.max_rows

        def __call__(self, values):
            calls.append(len(values))
            return network(values)
    algorithm._small_network = Spy()
    act(algorithm, observations(4), deterministic=True)
    act(algorithm, observations(network.max_rows + 1), deterministic=True)
    allowed = np.tile(np.array([False, True, False]), (4, 1))
    assert act(algorithm, observations(4), True, allowed).tolist() == [1] * 4
    assert calls == [4]


class OwnChoice(QActor):
    """Chooses the action with the lowest value."""

    def act(self, obs, mask=None, generator=None):
        return self.get_q_scores(obs, None, mask, generator).argmin(-1)


@pytest.mark.parametrize("options", [{"dueling": True}, {"noisy": True}, {"activation": "elu"}, {"actor": OwnChoice}],
                         ids=["dueling", "noisy", "elu", "own"])
def test_unsupported_networks_use_torch(options):
    assert make(**options)._small_network is None


class OwnExploration(DQN):
    """Always chooses action 2."""

    def choose(self, obs, done, deterministic, mask):
        return torch.full((len(done),), 2)


def test_a_subclass_that_chooses_actions_itself_uses_torch():
    algorithm = make(cls=OwnExploration)
    assert act(algorithm, observations(4), deterministic=False).tolist() == [2] * 4
