"""Test agents that take turns: an agent whose action mask allows no action is absent in that step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces

import pytorchrl
from pytorchrl import MultiAgentVecEnv
from pytorchrl.agent.data import RolloutData
from pytorchrl.agent.multi.turns import in_turns
from pytorchrl.errors import ConfigError, EnvError

TINY = {"num_envs": 2, "num_steps": 16, "target_steps": 64, "seed": 1, "progress": False, "hidden_sizes": (8,)}


def random_rollout(rng, num_steps, count):
    """Return a rollout of agents that wait at random, and whether each agent waits after each step."""
    waits = rng.random(count) < 0.5
    shape = num_steps, count
    valid, terminated, truncated, waiting = (np.zeros(shape, bool) for _ in range(4))
    done = np.zeros((num_steps + 1, count), bool)
    finals = []
    for t in range(num_steps):
        valid[t] = ~waits
        ends = rng.random(count)
        terminated[t], truncated[t] = ends < 0.1, ends > 0.9
        over = terminated[t] | truncated[t]
        finals += [(t, c) for c in np.flatnonzero(over)]
        waiting[t] = rng.random(count) < 0.6
        waits, done[t + 1] = waiting[t], over
    obs = np.arange((num_steps + 1) * count, dtype=np.float32).reshape(-1, count, 1)
    return RolloutData(
        obs={"obs": torch.from_numpy(obs)}, done=torch.from_numpy(done), rhs={}, mask=None,
        action=torch.from_numpy(obs[:-1, :, 0].astype(np.int64)),
        reward=torch.from_numpy(rng.normal(size=shape)).float(),
        terminated=torch.from_numpy(terminated), truncated=torch.from_numpy(truncated), valid=torch.from_numpy(valid),
        final_index=torch.tensor(finals, dtype=torch.int64).reshape(-1, 2),
        final_obs={"obs": 1e4 + torch.arange(len(finals), dtype=torch.float32)[:, None]},
        other={"logp": -torch.from_numpy(obs[:-1, :, 0])}), waiting


def transitions_of(rollout):
    """Return (observation, action, logp, reward, terminated, truncated, next observation) of each column's steps."""
    last = {tuple(pair): float(obs) for pair, obs in zip(
        rollout.final_index.tolist(), rollout.final_obs["obs"], strict=True)}
    obs = rollout.obs["obs"][:, :, 0].tolist()
    return [[(obs[t][c], int(rollout.action[t, c]), float(rollout.other["logp"][t, c]),
              pytest.approx(float(rollout.reward[t, c]), abs=1e-5), bool(rollout.terminated[t, c]),
              bool(rollout.truncated[t, c]), last.get((t, c), obs[t + 1][c]))
             for t in range(rollout.num_steps) if rollout.valid[t, c]] for c in range(rollout.num_envs)]


def brute_force(rollout, waiting):
    last = {tuple(pair): float(obs) for pair, obs in zip(
        rollout.final_index.tolist(), rollout.final_obs["obs"], strict=True)}
    found = []
    for c in range(rollout.num_envs):
        found.append([])
        for t in np.flatnonzero(rollout.valid[:, c].numpy()).tolist():
            for end in range(t, rollout.num_steps):
                over = bool(rollout.terminated[end, c]), bool(rollout.truncated[end, c])
                if any(over) or not waiting[end, c]:
                    following = last[end, c] if any(over) else float(rollout.obs["obs"][end + 1, c])
                    found[-1].append((float(rollout.obs["obs"][t, c]), int(rollout.action[t, c]),
                                      float(rollout.other["logp"][t, c]), float(rollout.reward[t:end + 1, c].sum()),
                                      *over, following))
                    break
    return found


def test_transitions_from_turn_to_turn_equal_brute_force():
    rng = np.random.default_rng(0)
    for num_steps in (4, 7, 30):
        for _ in range(40):
            rollout, waiting = random_rollout(rng, num_steps, 3)
            found = in_turns(rollout, waiting)
            assert transitions_of(found) == brute_force(rollout, waiting)
            for c in range(3):
                rows = np.flatnonzero(found.valid[:, c].numpy())
                assert rows.tolist() == list(range(len(rows))), "turns follow each other"
                ends = (found.terminated | found.truncated)[:, c].numpy()
                assert (found.done[1:, c].numpy()[ends & found.valid[:, c].numpy()][:-1]).all()


class Race:
    """Game in which agents take turns: each turn adds the action to a sum, and reaching 5 or more wins.

    An observation is (the sum, the agent's number). The winner receives 1, and all others -1, while they wait.
    """

    def __init__(self, num_agents=2, masks_in_info=False, render_mode=None):
        self.possible_agents = [f"player_{index}" for index in range(num_agents)]
        self.masks_in_info = masks_in_info

    def observation_space(self, agent):
        space = spaces.Box(0, 9, (2,))
        return space if self.masks_in_info else spaces.Dict(
            {"observation": space, "action_mask": spaces.MultiBinary(3)})

    def action_space(self, agent):
        return spaces.Discrete(3)

    def result(self):
        masks = {agent: np.array([0, 1, 1] if agent == self.turn else [0, 0, 0], np.int8)
                 for agent in self.possible_agents}
        obs = {agent: np.array([self.sum, number], np.float32) for number, agent in enumerate(self.possible_agents)}
        if self.masks_in_info:
            return obs, {agent: {"action_mask": mask} for agent, mask in masks.items()}
        return ({agent: {"observation": obs[agent], "action_mask": masks[agent]} for agent in obs},
                {agent: {} for agent in obs})

    @property
    def turn(self):
        return self.possible_agents[self.t % len(self.possible_agents)]

    def reset(self, seed=None, options=None):
        self.t = self.sum = 0
        self.agents = list(self.possible_agents)
        return self.result()

    def step(self, actions):
        mover = self.turn
        assert actions[mover] in (1, 2)
        self.sum += int(actions[mover])
        self.t += 1
        over = self.sum >= 5
        rewards = {agent: (1.0 if agent == mover else -1.0) * over for agent in self.agents}
        ended, no = dict.fromkeys(self.agents, over), dict.fromkeys(self.agents, False)
        obs, infos = self.result()
        self.agents = [] if over else self.agents
        return obs, rewards, ended, no, infos

    def close(self):
        pass


@pytest.mark.parametrize("masks_in_info", [False, True])
def test_an_agent_that_may_not_act_is_absent_in_that_step(masks_in_info):
    envs = MultiAgentVecEnv.create_factory(Race, {"masks_in_info": masks_in_info}, 1)(seed=1)
    _, mask = envs.reset()
    assert mask["shared"].tolist() == [[False, True, True], [True] * 3]
    steps = [envs.step({"shared": np.array([2, 2])}).parts["shared"] for _ in range(3)]
    assert [step.valid.tolist() for step in steps] == [[True, False], [False, True], [True, False]]
    assert [step.waiting.tolist() for step in steps] == [[True, False], [False, True], [False, True]]
    assert steps[-1].reward.tolist() == [1.0, -1.0]
    assert steps[-1].terminated.tolist() == [True, True]


@pytest.mark.parametrize(("algorithm", "policies", "options"), [
    ("ppo", "shared", {}), ("ppo", "independent", {}), ("dqn", "shared", {"start_steps": 20, "mini_batch_size": 8}),
    ("sac", "shared", {"start_steps": 20, "mini_batch_size": 8}),
    ("appo", "shared", {"num_col_workers": 2, "col_communication": "asynchronous", "runtime": "simulated"}),
], ids=["ppo", "two policies", "dqn", "sac", "appo"])
def test_games_with_turns_train_and_play(algorithm, policies, options):
    agent = pytorchrl.train(algorithm, Race, policies=policies, **TINY, **options)
    assert set(agent.evaluate(4).lengths) <= {3, 4, 5}
    env = Race()
    obs, _ = env.reset()
    assert list(agent.act(obs)) == ["player_0"], "only the agent whose turn it is acts"


def test_ppo_wins_the_race_by_self_play():
    """Check that the policy finds the moves that win: 2 with a sum of 3, and 2 with 0, after which each move loses."""
    agent = pytorchrl.train("ppo", Race, policies="shared", num_envs=8, num_steps=32, target_steps=6_000, seed=1,
                            lr=5e-3, progress=False, hidden_sizes=(32,), entropy_coef=0.01)
    mask = np.array([0, 1, 1], np.int8)
    moves = {total: int(agent.act({"player_0": {"observation": np.array([total, 0], np.float32), "action_mask": mask}})[
        "player_0"]) for total in (0, 3)}
    assert moves == {0: 2, 3: 2}


def test_turns_that_cannot_be_learned_are_refused():
    for options, match in (({"recurrent_net": "gru"}, "must not have memory.*set recurrent_net=None"),
                           ({"num_steps": 2}, "rollouts must have at least 4 steps, got 2; raise num_steps")):
        with pytest.raises(ConfigError, match=match):
            pytorchrl.train("ppo", Race, policies="shared", **{**TINY, "num_mini_batch": 1, **options})

    class Boxes(Race):
        def action_space(self, agent):
            return spaces.MultiDiscrete([3])

    with pytest.raises(EnvError, match="only agents with a Discrete action space may wait"):
        MultiAgentVecEnv.create_factory(Boxes)(seed=1)


@pytest.mark.parametrize(("game", "policies"), [
    ("tictactoe_v3", "shared"), ("tictactoe_v3", "independent"), ("connect_four_v3", "shared")])
def test_games_of_pettingzoo_train_by_the_remedy_of_the_error(game, policies):
    """Check that the module is refused, and that the environment which the error asks for trains."""
    pytest.importorskip("pettingzoo")
    module = pytest.importorskip(f"pettingzoo.classic.{game}", reason="its games need pygame", exc_type=ImportError)
    from pettingzoo.utils.conversions import turn_based_aec_to_parallel

    for refused in (module.__name__, module.env):
        with pytest.raises(ConfigError, match=r"turn-based API; pass a function that returns pettingzoo.utils."
                                              r"conversions.turn_based_aec_to_parallel\(env\), and policies='shared'"):
            pytorchrl.train("ppo", refused, policies="shared", **TINY)
    with pytest.raises(ConfigError, match="several agents that take turns: pass a function that returns"):
        pytorchrl.train("ppo", module.env, **TINY)
    agent = pytorchrl.train("ppo", lambda: turn_based_aec_to_parallel(module.env()), policies=policies, **TINY)
    assert min(agent.evaluate(2).lengths) >= 5
