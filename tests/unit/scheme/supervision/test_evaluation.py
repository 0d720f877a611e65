"""Check that an evaluation plays the required number of episodes in each environment, and resets the memory when an
episode starts."""

from __future__ import annotations

import itertools
import threading

import gymnasium as gym
import numpy as np
import pytest
import torch

from pytorchrl import DQN, PPO, OnPolicyActor, QActor, VecEnv
from pytorchrl.envs.testing import CountingEnv
from pytorchrl.scheme.supervision.evaluation import Evaluator, KeptEnvs
from pytorchrl.scheme.transport.messages import Weights

LENGTHS = (2, 9, 4)


class OwnLength(gym.Env):
    """An environment whose episodes have `LENGTHS[n]` steps with reward n + 1.

    Environments are numbered by n, in the order in which they are built.
    """

    built = itertools.count()
    observation_space = gym.spaces.Box(-1.0, 1.0, (3,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self):
        self._number, self._t = next(self.built) % len(LENGTHS), 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._t = 0
        return np.ones(3, np.float32), {}

    def step(self, action):
        self._t += 1
        return np.ones(3, np.float32), float(self._number + 1), self._t == LENGTHS[self._number], False, {}


@pytest.fixture
def evaluate(monkeypatch):
    """Return a function that evaluates a recurrent agent in environments of `LENGTHS`.

    The function returns the evaluation and, for each step, the `done` flags and the memory states of the actor.
    """
    def evaluate_(num_episodes, autoreset):
        seen, act = [], PPO.acting_step

        def acting_step(self, obs, rhs, done, deterministic=False, mask=None):
            found = act(self, obs, rhs, done, deterministic, mask)
            seen.append((done.copy(), {name: state.copy() for name, state in found.rhs.items()}))
            return found
        envs = VecEnv.create_factory(OwnLength, vec_env_size=len(LENGTHS), backend="sync", autoreset=autoreset)
        actor = OnPolicyActor.create_factory(envs.observation_space, envs.action_space, recurrent_net="gru",
                                             hidden_sizes=(8,))
        algo = PPO.create_factory()
        torch.manual_seed(0)
        state = {name: tensor.numpy() for name, tensor in algo(actor=actor(seed=1), seed=1).acting_state().items()}
        monkeypatch.setattr(PPO, "acting_step", acting_step)
        monkeypatch.setattr(OwnLength, "built", itertools.count())
        evaluator = Evaluator(0, algo_factory=algo, actor_factory=actor, test_envs_factory=envs, seed=1)
        return evaluator.evaluate(Weights(0, state), num_episodes), seen
    return evaluate_


@pytest.mark.parametrize("autoreset", ["same_step", "next_step"])
@pytest.mark.parametrize(("num_episodes", "owed"), [(1, (1, 0, 0)), (5, (2, 2, 1)), (6, (2, 2, 2))])
def test_each_environment_contributes_its_share_of_episodes(evaluate, num_episodes, owed, autoreset):
    evaluation, _ = evaluate(num_episodes, autoreset)
    expected = [length for length, count in zip(LENGTHS, owed, strict=True) for _ in range(count)]
    assert sorted(evaluation.lengths) == sorted(expected)
    assert sorted(evaluation.returns) == sorted(
        length * (number + 1.0) for number,
        (length, count) in enumerate(zip(LENGTHS, owed, strict=True)) for _ in range(count))


@pytest.mark.parametrize(("autoreset", "pause"), [("same_step", 0), ("next_step", 1)])
def test_the_memory_is_reset_only_at_the_start_of_each_episode(evaluate, autoreset, pause):
    """Check that the memory depends only on the number of steps since the latest reset.

    All observations are equal, so nothing else can change the memory.
    """
    _, seen = evaluate(6, autoreset)
    periods = np.array(LENGTHS) + pause  # steps per episode, including the step that resets the environment
    assert len(seen) == 2 * max(periods) - pause
    for t, (done, rhs) in enumerate(seen):
        assert done.tolist() == (t % periods == 0).tolist(), t
        for name, state in rhs.items():
            for env, since in enumerate(t % periods):
                alike = seen[since][1][name][1]  # the memory in environment 1, which has the longest episodes
                assert np.allclose(state[env], alike, atol=1e-6), (t, env, name)
    assert seen[0][1]
    for name in seen[0][1]:
        memories = [rhs[name][1] for _, rhs in seen[:max(LENGTHS)]]
        assert not any(np.allclose(one, other, atol=1e-6) for one, other in itertools.pairwise(memories))


class Counted(gym.Env):
    """An environment of 20 steps; a reward is the action, and the first reward of an episode is a random number."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (3,), np.float32)
    action_space = gym.spaces.Discrete(4)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._t, self._first = 0, float(self.np_random.random())
        return np.full(3, 0.5, np.float32), {}

    def step(self, action):
        self._t += 1
        return np.full(3, 0.5, np.float32), self._first if self._t == 1 else float(action), self._t == 20, False, {}


@pytest.fixture
def counted():
    """Return a function that makes an evaluator of an annealed DQN agent, and weights for it."""
    envs = VecEnv.create_factory(Counted, vec_env_size=2, backend="sync")
    actor = QActor.create_factory(envs.observation_space, envs.action_space, hidden_sizes=(4,))

    def make(seed=1, kept=False, final_epsilon=0.0, weights=1):
        algo = DQN.create_factory(initial_epsilon=1.0, final_epsilon=final_epsilon, start_steps=1000, epsilon_steps=500)
        own = algo(actor=actor(seed=weights), seed=1).acting_state()
        state = {name: tensor.numpy() for name, tensor in own.items()}
        evaluator = Evaluator(0, algo_factory=algo, actor_factory=actor, test_envs_factory=envs, seed=seed,
                              kept=KeptEnvs(envs) if kept else None)
        return lambda **how: evaluator.evaluate(Weights(0, state), 3, **how)
    return make


@pytest.mark.parametrize("kept", [False, True])
def test_each_evaluation_of_a_run_plays_other_episodes(counted, kept):
    evaluate = counted(kept=kept)
    found = [evaluate().returns for _ in range(3)]
    firsts = [value % 1.0 for returns in found for value in returns]  # a random number for each episode
    assert len(set(firsts)) == 9
    again = counted(kept=kept)
    assert [again().returns for _ in range(3)] == found
    assert counted(seed=2, kept=kept)().returns != found[0]


def test_a_stochastic_evaluation_uses_the_exploration_after_its_annealing(counted):
    """Check an agent whose probability of a random action falls from 1 to 0 during training."""
    greedy, sampled = (counted()(deterministic=deterministic).returns for deterministic in (True, False))
    assert sampled == greedy
    assert len({int(value) for value in greedy}) == 1


def test_an_evaluation_plays_with_its_weights_and_samples_with_its_seed(counted):
    def actions(**options):
        """Return the sums of the actions of three episodes, and those of an evaluation with sampled actions."""
        return [[int(value) for value in counted(**options)(deterministic=deterministic).returns]
                for deterministic in (True, False)]
    greedy, sampled = actions(final_epsilon=1.0)
    assert len(set(greedy)) == 1
    assert len(set(sampled)) > 1
    assert actions(final_epsilon=1.0)[1] == sampled != actions(final_epsilon=1.0, seed=2)[1]
    assert len({actions(weights=weights)[0][0] for weights in range(12)}) > 1


def test_evaluation_runs_during_training(make_scheme):
    may_step = threading.Event()

    class Waiting(CountingEnv):
        def step(self, action):
            assert may_step.wait(60)
            return super().step(action)
    envs = VecEnv.create_factory(CountingEnv, {"episode_length": 5}, 2)
    scheme = make_scheme(envs=envs, test_envs=VecEnv.create_factory(Waiting, {"episode_length": 6}, 2))
    scheme.step()
    assert scheme.poll_evaluation() is None
    scheme.start_evaluation(5)
    scheme.step()  # does not wait for the evaluation, which cannot continue yet
    assert scheme.poll_evaluation() is None
    may_step.set()
    evaluation = scheme.wait_evaluation(20.0)
    assert evaluation.version == 1
    assert sorted(evaluation.lengths) == [6] * 5
    assert len(evaluation.returns) == 5
    assert scheme.poll_evaluation() is None
    assert scheme.ledger()["collected"] == scheme.ledger()["consumed_unique"]  # steps of evaluations are not counted
