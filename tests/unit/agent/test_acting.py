"""Tests of `TrainedAgent.act` and `TrainedAgent.policy`: both choose the actions with which evaluations play."""

from __future__ import annotations

import dataclasses

import gymnasium as gym
import numpy as np
import pytest
import torch

import pytorchrl as prl
from pytorchrl.agent.acting import Acting, PolicyParts
from pytorchrl.agent.policy import Policy
from pytorchrl.errors import ConfigError
from tests.unit.learner.small_agents import AGENTS, TINY, agent_of, make_env, observations

SINGLE = [name for name in AGENTS if name != "independent"]


def batch_of(obs):
    """Return one observation as a batch of tensors."""
    if isinstance(obs, dict):
        return {key: batch_of(value) for key, value in obs.items()}
    return torch.as_tensor(np.asarray(obs))[None]


@pytest.mark.parametrize("name", SINGLE)
def test_policy_chooses_the_actions_of_act(name):
    agent, env = agent_of(name), make_env(name)
    policy, chosen = agent.policy, set()
    for seed in (1, 2, 3):
        env.action_space.seed(seed)
        (obs, info), memory, own = env.reset(seed=seed), None, None
        for _ in range(30):
            mask = info.get("action_mask")
            action = agent.act(obs, memory, mask=mask)
            found = policy(batch_of(obs), own, None if mask is None else torch.as_tensor(mask)[None])
            if policy.has_memory:
                (action, memory), (found, own) = action, found
            assert found.shape == (1, *env.action_space.shape)
            np.testing.assert_allclose(found[0], action, atol=1e-6)
            assert env.action_space.contains(action)
            chosen.add(str(action))
            if name == "c51":  # its actions lead to observations for which it chooses the same action
                action = env.action_space.sample()
            obs, reward, terminated, truncated, info = env.step(action)
            if name == "r2d2":  # the reward is an input of the memory
                memory["q/previous"][:, -1] = own["q/previous"][:, -1] = reward
            if terminated or truncated:
                break
    assert len(chosen) > 1


@pytest.mark.parametrize("name", ["ppo", "ppo-gru", "ppo-mixed", "ppo-masked", "ppo-masked-gru", "sac", "sac-gru"])
def test_act_plays_the_episodes_of_evaluate(name):
    agent = agent_of(name)
    played = []

    def record(env):
        """Wrap an environment in one that replaces the actions by those of `act`."""
        return Replaced(env, agent, played)

    factory = agent.agent.test_envs_factory
    options = factory.options
    envs = type(factory)(factory.cls, type(options)(**{
        **vars(options), "vec_env_size": 1, "backend": "sync", "wrappers": (record,)}),
        observation_space=factory.observation_space, action_space=factory.action_space)
    evaluation = agent.evaluate(2, envs=envs)
    assert len(played) == sum(evaluation.lengths) > 10
    assert all(np.allclose(own, given, atol=1e-6) for own, given in played)


class Replaced(gym.Wrapper):
    """A wrapper that appends the action of `act`, and the action that it receives, to a list."""

    def __init__(self, env, agent, played):
        super().__init__(env)
        self.agent, self.played = agent, played

    def reset(self, **options):
        self.obs, self.info = self.env.reset(**options)
        self.memory = None
        return self.obs, self.info

    def step(self, action):
        own = self.agent.act(self.obs, self.memory, mask=self.info.get("action_mask"))
        if self.agent.policy.has_memory:
            own, self.memory = own
        self.played.append((own, action))
        self.obs, *result, self.info = self.env.step(action)
        return (self.obs, *result, self.info)


def test_masks_are_obeyed():
    agent = agent_of("ppo-masked")
    obs = np.zeros(4, np.float32)
    assert [int(agent.act(obs, mask=mask)) for mask in ([True, False], [False, True])] == [0, 1]
    with pytest.raises(ConfigError, match=r"environment returns masks in info.*; pass mask=info\['action_mask'\]"):
        agent.act(obs)
    with pytest.raises(ConfigError, match=r"wrong mask; 'action_mask' must have 2 flags.*got the shape \(3,\)"):
        agent.act(obs, mask=[True, False, True])
    with pytest.raises(ConfigError, match=r"environment returns masks in info.*; pass mask=, \(B, n\) bool"):
        agent.policy(torch.zeros(2, 4))
    both = agent.policy(torch.zeros(2, 4), mask=torch.tensor([[True, False], [False, True]]))
    assert both.tolist() == [0, 1]


def test_sampled_actions_use_the_exploration_after_its_annealing():
    made = agent_of("dqn")
    algo = prl.DQN.create_factory(initial_epsilon=1.0, final_epsilon=0.0, start_steps=1000, test_epsilon=1.0)
    agent = prl.TrainedAgent(agent=dataclasses.replace(made.agent, algo_factory=algo), acting_state=made.acting_state,
                             seed=3)
    for obs in observations(make_env("dqn"))[:5]:
        assert {int(agent.act(obs, deterministic=how)) for how in (True, *[False] * 10)} == {int(agent.act(obs))}


def test_act_samples_actions_only_if_it_is_asked_to():
    agent = agent_of("ppo")
    obs = np.zeros(4, np.float32)
    assert {int(agent.act(obs, deterministic=False)) for _ in range(60)} == {0, 1}
    assert len({int(agent.act(obs)) for _ in range(60)}) == 1


def test_each_policy_samples_with_its_own_seed(monkeypatch):
    seeds, build = [], PolicyParts.build
    monkeypatch.setattr(PolicyParts, "build", lambda parts, seed: seeds.append(seed) or build(parts, seed))
    agent = agent_of("independent")
    for seed in (1, 1, 2):
        Acting(agent.agent, agent.acting_state, seed)
    assert seeds[:2] == seeds[2:4]
    assert len(set(seeds)) == 4


def test_several_policies_are_a_mapping():
    agent = agent_of("independent")
    assert set(agent.policy) == {"speaker_0", "listener_0"}
    module = pytest.importorskip("mpe2.simple_speaker_listener_v4")
    env = module.parallel_env()
    obs, _ = env.reset(seed=1)
    for _ in range(5):
        actions = agent.act(obs)
        assert actions == {name: int(policy(batch_of(obs[name]))) for name, policy in agent.policy.items()}
        obs, *_ = env.step(actions)
    env.close()
    only = agent.act({"listener_0": obs["listener_0"]})
    assert list(only) == ["listener_0"]
    with pytest.raises(ConfigError, match=r"some of the agents \['speaker_0', 'listener_0'\], got \['nobody'\]"):
        agent.act({"nobody": obs["listener_0"]})
    with pytest.raises(ConfigError, match="obs must be a mapping from agents to observations"):
        agent.act(obs["listener_0"])


def test_act_samples_if_asked_to():
    agent = agent_of("ppo")
    obs = np.zeros(4, np.float32)
    assert len({int(agent.act(obs, deterministic=False)) for _ in range(50)}) == 2
    assert len({int(agent.act(obs)) for _ in range(50)}) == 1


def test_a_policy_ignores_the_random_actions_of_evaluations():
    obs = np.zeros(4, np.float32)
    assert len({int(agent_of("dqn").act(obs)) for _ in range(50)}) == 1


def test_a_batch_equals_its_rows():
    policy = agent_of("ppo-lstm").policy
    obs, memory = torch.randn(5, 3), {name: torch.randn(5, state.shape[1])
                                      for name, state in policy.initial_memory(1).items()}
    actions, after = policy(obs, memory)
    for row in range(5):
        own, state = policy(obs[row:row + 1], {name: value[row:row + 1] for name, value in memory.items()})
        torch.testing.assert_close(own[0], actions[row])
        torch.testing.assert_close(state["policy"][0], after["policy"][row])
    assert memory.keys() == after.keys() == {"policy"}  # the memory of the value network is not needed


def test_a_policy_is_a_module_without_the_networks_of_learning():
    for name in ("ppo", "sac", "dqn"):
        policy = agent_of(name).policy
        assert isinstance(policy, torch.nn.Module)
        assert not any(parameter.requires_grad for parameter in policy.parameters())
        assert not any(word in key for key in policy.state_dict() for word in ("critics", "actor.value"))
        storages = {parameter.untyped_storage().data_ptr() for parameter in policy.parameters()}
        assert len(storages) == len(list(policy.parameters()))


def test_a_changed_policy_does_not_change_the_agent():
    agent = prl.train("ppo", "CartPole-v1", target_steps=0, **TINY)
    obs = np.full(4, 0.3, np.float32)
    before = [int(agent.act(scale * obs)) for scale in range(-5, 5)]
    with torch.no_grad():
        for parameter in agent.policy.parameters():
            parameter.neg_()
    assert [int(agent.act(scale * obs)) for scale in range(-5, 5)] == before


def test_an_observation_of_another_form_is_named():
    agent = agent_of("ppo")
    obs, _ = make_env("ppo").reset(seed=1)
    for wrong in (obs[:-1], obs[None], {"obs": obs}, "text"):
        with pytest.raises(ConfigError, match=r"does not fit the observation space; obs: expected float32 \(\d+,\)"):
            agent.act(wrong)
    for number in (np.nan, np.inf, -np.inf):
        with pytest.raises(ConfigError, match=rf"act received .*; env 0: obs is {number} at \(0, 0\); 1 of"):
            agent.act(np.array([number, *obs[1:]], np.float32))
    agent.act(list(obs))  # numbers of another type are converted, as those of environments


def test_missing_memory_is_named():
    policy = agent_of("ppo-gru").policy
    with pytest.raises(ConfigError, match=r"entries of initial_memory\(\), \['policy'\]; policy is missing"):
        policy(torch.zeros(1, 4), {})


def test_an_actor_that_cannot_act_alone_is_named():
    class Own(prl.QActor):
        best_actions = prl.QActor.__mro__[2].best_actions

    actor = Own.create_factory(gym.spaces.Box(-1, 1, (2,), np.float32), gym.spaces.Discrete(2))()
    policy = Policy(actor, agent_of("ppo").agent.test_envs_factory.raw_spaces)
    with pytest.raises(ConfigError, match=r"Own has no best_actions\(obs, rhs, mask\).*; define it in Own"):
        policy(torch.zeros(1, 2))


def test_masks_of_info_are_known_from_the_first_reset():
    assert agent_of("ppo-masked").policy.spaces.has_mask_in_info
    assert not agent_of("ppo-mixed").policy.spaces.has_mask_in_info


def test_an_agent_is_printed_with_its_parts_and_figures(tmp_path):
    agent = prl.train("ppo", "CartPole-v1", target_steps=256, log_dir=tmp_path / "run", **TINY)
    shown = repr(agent)
    assert shown.startswith("TrainedAgent\n  algorithm  ppo\n  env        CartPole-v1\n"), shown
    assert f"  return     {agent.return_mean:.4g} (mean of the last" in shown
    assert str(tmp_path / "run") in "".join(shown.split())
    assert "  return " not in repr(prl.load(tmp_path / "run"))
