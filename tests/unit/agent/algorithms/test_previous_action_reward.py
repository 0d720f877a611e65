"""Test a memory that receives the previous action and reward, during acting, replay and evaluation."""

from __future__ import annotations

import itertools

import gymnasium as gym
import numpy as np
import pytest
import torch

from pytorchrl import R2D2, QActor, RolloutSequenceBuffer, SequenceBuffer, VecEnv, train
from pytorchrl.agent.data import PREVIOUS
from pytorchrl.errors import ConfigError
from pytorchrl.scheme.supervision.evaluation import Evaluator
from pytorchrl.scheme.transport.messages import Weights

NUM_ACTIONS = 3
LENGTH, BURN_IN, N_STEP = 4, 3, 2


class Noise(gym.Env):
    """Environment with unique random observations and random rewards, whose episodes terminate at random."""

    observation_space, action_space = gym.spaces.Box(-9, 9, (2,), np.float32), gym.spaces.Discrete(NUM_ACTIONS)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._observe(), {}

    def step(self, action):
        return self._observe(), 3 * self.np_random.normal(), self.np_random.random() < 0.05, False, {}

    def _observe(self):
        return self.np_random.uniform(-1, 1, 2).astype(np.float32)


def parts(net="gru", seed=1, **options):
    """Return the actor and the algorithm."""
    actor = QActor.create_factory(Noise.observation_space, Noise.action_space, **{
        "hidden_sizes": (5,), "recurrent_net": net, "recurrent_size": 6, "dueling": True, "prev_action_reward": True,
        **options})
    built = actor(seed=seed)
    return built, R2D2.create_factory(start_steps=10, initial_epsilon=0.5, final_epsilon=0.5,
                                      epsilon_per_worker=False)(actor=built, seed=2)


def reference(actor, episode):
    """Return (Q-values, previous action and reward) of each observation, computed one step at a time.

    `episode` is a list of (observation, action, reward), which ends with (last observation, None, None)
    unless the episode is unfinished.
    """
    state, previous, found = actor.initial_states(1)["q"], torch.zeros(1, NUM_ACTIONS + 1), []
    for obs, action, reward in episode:
        with torch.no_grad():
            values, rhs = actor.unroll({"obs": torch.as_tensor(obs[None])}, {"q": state, PREVIOUS: previous},
                                       torch.zeros(1, dtype=torch.bool))
        found.append((values[0].numpy(), previous[0].numpy()))
        state, previous = rhs["q"], torch.zeros(1, NUM_ACTIONS + 1)
        if action is not None:
            previous[0, action], previous[0, -1] = 1.0, reward
    return found


def collect(algorithm, envs, storage, num_rollouts):
    """Insert rollouts of two environments into the storage; return their episodes in the format of `reference`."""
    storage.start(*envs.reset())
    running, episodes = [[], []], []
    for _ in range(num_rollouts):
        while not storage.full:
            obs, rhs, done, mask = storage.current()
            shown = obs["obs"].copy()
            running = [[] if done[e] else running[e] for e in range(2)]
            acting = algorithm.acting_step(obs, rhs, done, mask=mask)
            step = envs.step(acting.clipped_action)
            finals = dict(zip(step.final_index.tolist(), step.final_obs.get("obs", []), strict=True))
            for e in np.flatnonzero(step.valid):
                running[e].append((shown[e], int(acting.action[e]), float(step.reward[e])))
                if step.terminated[e] or step.truncated[e]:
                    episodes.append([*running[e], (finals.get(e, step.obs["obs"][e]).copy(), None, None)])
            storage.insert_transition(acting, step)
        storage.insert_data_slice([storage.get_all_buffer_data()])
    envs.close()
    return [*episodes, *running]


def expected_at(batch, rows, columns, expected):
    """Return the results of `reference`, (N, n) and (N, n + 1), for N observations of a batch.

    `expected` contains the results of `reference` for each observation, by the bytes of the observation.
    """
    found = [expected[obs.tobytes()] for obs in batch.obs["obs"].numpy()[rows, columns]]
    return tuple(np.stack(each) for each in zip(*found, strict=True))


@pytest.mark.every(3)
@pytest.mark.parametrize("net", ["gru", "lstm"])
@pytest.mark.parametrize("autoreset", ["same_step", "next_step"])
@pytest.mark.parametrize("transform", [None, "sign"])
def test_values_of_windows_equal_those_of_whole_episodes(net, autoreset, transform):
    actor, algorithm = parts(net)
    envs = VecEnv.create_factory(Noise, vec_env_size=2, autoreset=autoreset, max_episode_steps=17,
                                 reward_transform=transform)(seed=3)
    factory = SequenceBuffer.create_factory(
        200, rollout_size=5, length=LENGTH, burn_in=BURN_IN, period=2, n_step=N_STEP)
    storage = factory(actor=actor, algorithm=algorithm, num_envs=2, seed=4, device="cpu")
    expected = {}
    for episode in collect(algorithm, envs, storage, 20):
        for (obs, _, _), of_row in zip(episode, reference(actor, episode), strict=True):
            expected[obs.tobytes()] = of_row
    batch = storage.sample(300)
    assert (batch.burn_in, PREVIOUS in batch.rhs) == (BURN_IN, False)
    with torch.no_grad():
        values, _ = actor.q.unroll(batch.obs, batch.rhs["q"], batch.done, None, None, batch.previous)
    seen = []
    for b in range(300):
        trained = np.flatnonzero(batch.valid[:, b])
        last = int(batch.next_row[trained, b].max()) if batch.discount[trained[-1], b] else BURN_IN + trained[-1]
        seen += [(row, b) for row in range(last + 1)]
    rows, columns = np.array(seen).T
    wanted_values, wanted_previous = expected_at(batch, rows, columns, expected)
    np.testing.assert_array_equal(batch.previous.numpy()[rows, columns], wanted_previous)
    after = rows >= BURN_IN
    np.testing.assert_allclose(values.numpy()[rows[after], columns[after]], wanted_values[after], atol=1e-5)
    assert int((~batch.done.any(0)).sum()) > 50  # many sequences begin within an episode
    assert int((batch.discount > 0).sum()) > 500


@pytest.mark.parametrize("net", ["gru", "lstm"])
@pytest.mark.parametrize("autoreset", ["same_step", "next_step"])
def test_values_of_rollouts_equal_those_of_whole_episodes(net, autoreset):
    actor, algorithm = parts(net)
    envs = VecEnv.create_factory(Noise, vec_env_size=2, autoreset=autoreset, max_episode_steps=7)(seed=3)
    storage = RolloutSequenceBuffer.create_factory(400, rollout_size=10, n_step=N_STEP)(
        actor=actor, algorithm=algorithm, num_envs=2, seed=4, device="cpu")
    expected = {}
    for episode in collect(algorithm, envs, storage, 15):
        for (obs, _, _), of_row in zip(episode, reference(actor, episode), strict=True):
            expected[obs.tobytes()] = of_row
    batch = storage.sample(60)
    with torch.no_grad():
        values, _ = actor.q.unroll(batch.obs, batch.rhs["q"], batch.done, None, None, batch.previous)
    num_resets, num_finals, seen = 0, 0, []
    for b in np.flatnonzero(batch.ids < 14 * 20):  # exclude the last rollout, whose next steps are unknown
        for row in np.flatnonzero(batch.valid[:, b]):
            to = int(batch.next_row[row, b])
            seen += [(at, b) for at in ((row, to) if batch.discount[row, b] else (row,))]
            num_resets += bool(row and batch.done[row, b])
            num_finals += not batch.valid[min(to, len(batch.valid) - 1), b]
    rows, columns = np.array(seen).T
    wanted_values, wanted_previous = expected_at(batch, rows, columns, expected)
    shown = batch.previous.masked_fill(batch.done[..., None], 0.0).numpy()
    np.testing.assert_array_equal(shown[rows, columns], wanted_previous)
    np.testing.assert_allclose(values.numpy()[rows, columns], wanted_values, atol=1e-5)
    assert num_resets > 50
    assert num_finals > 50


def test_values_depend_on_the_previous_step_within_an_episode():
    actor, _ = parts()
    obs, no, yes = {"obs": torch.ones(1, 2)}, torch.zeros(1, dtype=torch.bool), torch.ones(1, dtype=torch.bool)
    shown = [torch.zeros(1, NUM_ACTIONS + 1) for _ in range(3)]
    shown[1][0, 0], shown[2][0, -1] = 1.0, 1.0
    with torch.no_grad():
        later, first = ([actor.unroll(obs, {"q": torch.zeros(1, 6), PREVIOUS: previous}, done)[0] for previous in shown]
                        for done in (no, yes))
    assert not torch.equal(later[0], later[1])
    assert not torch.equal(later[0], later[2])
    assert torch.equal(first[0], first[1])
    assert torch.equal(first[0], first[2])
    assert torch.equal(first[0], later[0])


def test_memory_sees_no_actions_or_rewards_without_the_option():
    actor, algorithm = parts(prev_action_reward=False)
    assert set(actor.initial_states(2)) == {"q"}
    acting = algorithm.acting_step({"obs": np.zeros((2, 2), np.float32)}, {"q": np.zeros((2, 6), np.float32)},
                                   np.ones(2, bool))
    assert set(acting.rhs) == {"q"}
    assert actor.q.trunk.memory.inputs.in_features == 5
    assert parts()[0].q.trunk.memory.inputs.in_features == 5 + NUM_ACTIONS + 1


def test_the_option_requires_a_memory_and_its_inputs():
    with pytest.raises(ConfigError, match="prev_action_reward=True needs recurrent_net"):
        QActor.create_factory(Noise.observation_space, Noise.action_space, prev_action_reward=True)
    with pytest.raises(ConfigError, match="needs the previous action and reward"):
        parts()[0].unroll({"obs": torch.ones(1, 2)}, {"q": torch.zeros(1, 6)}, torch.zeros(1, dtype=torch.bool))


@pytest.mark.parametrize(("transform", "seen"), [(None, 5.0), ("sign", 1.0)])
def test_evaluation_shows_the_memory_rewards_as_in_training(monkeypatch, transform, seen):
    class Five(Noise):
        def step(self, action):
            return self._observe(), 5.0, False, False, {}
    shown, act = [], R2D2.acting_step

    def acting_step(self, obs, rhs, done, deterministic=False, mask=None):
        found = act(self, obs, rhs, done, deterministic, mask)
        shown.append((rhs[PREVIOUS].copy(), found.action.copy()))
        return found
    monkeypatch.setattr(R2D2, "acting_step", acting_step)
    envs = VecEnv.create_factory(Five, vec_env_size=2, max_episode_steps=4, reward_transform=transform)
    actor = QActor.create_factory(envs.observation_space, envs.action_space, recurrent_net="gru",
                                  prev_action_reward=True)
    built = actor(seed=1)
    state = {name: tensor.numpy() for name, tensor in R2D2.create_factory()(actor=built, seed=1).acting_state().items()}
    evaluation = Evaluator(0, algo_factory=R2D2.create_factory(), actor_factory=actor, test_envs_factory=envs,
                           seed=1).evaluate(
        Weights(0, state), 2)
    assert evaluation.returns == (20.0, 20.0)
    assert not shown[0][0].any()
    for (_, action), (previous, _) in itertools.pairwise(shown):
        assert previous[:, :-1].argmax(-1).tolist() == action.tolist()
        assert previous[:, :-1].sum(-1).tolist() == [1.0, 1.0]
        assert previous[:, -1].tolist() == [seen, seen]


@pytest.mark.parametrize("preset", [None, "r2d2"])
def test_schemes_train_and_evaluate_with_the_option(preset):
    agent = train("r2d2", "CartPole-v1", prev_action_reward=True, preset=preset, runtime="simulated", seed=1,
                  target_steps=600,
                  start_steps=300, progress=False, hidden_sizes=(8,), recurrent_size=8)
    assert agent.summary["updates"] >= 1
    assert len(agent.evaluate(2).returns) == 2
