"""Test valid and invalid combinations of actors, algorithms and storages for several policies."""

from __future__ import annotations


import pytest

from pytorchrl import (
    DQN, PPO, GAEBuffer, MultiAgentVecEnv, OnPolicyActor, QActor, ReplayBuffer, VecEnv,
    VTraceBuffer, multi_agent,
)
from pytorchrl.agent.data import DataKind
from pytorchrl.envs.testing import ChangingAgents, CountingEnv, MatchingGame
from pytorchrl.errors import ConfigError

LIVES = ((0, 6), (0, 3), (2, 6))


def ppo(**options):
    return PPO.create_factory(**options)


def by_agent(*actors):
    envs = MultiAgentVecEnv.create_factory(MatchingGame, policy_of=lambda agent: agent)
    return {policy: cls.create_factory(envs.observation_space[policy], envs.action_space[policy])
            for policy, cls in zip(envs.policies, actors, strict=True)}


@pytest.mark.parametrize(("arguments", "message"), [
    ({"algorithms": {"agent_0": ppo()}}, "algorithms must be a factory for each of the policies"),
    ({"algorithms": {"agent_0": ppo(), "agent_1": ppo(num_epochs=9)}}, "num_epochs must be the same for all policies"),
    ({"algorithms": ppo(target_kl=0.1)}, "target_kl=0.1 of policy 'agent_0'"),
    ({"algorithms": DQN.create_factory()},
     r"policy 'agent_0': DQN learns from single transitions .*; storages for DQN: .*\bPERBuffer\b"),
    ({"storages": {"agent_0": GAEBuffer.create_factory(8), "agent_1": GAEBuffer.create_factory(9)}},
     "size of the storages must be the same"),
    ({"algorithms": {"agent_0": ppo(), "agent_1": DQN.create_factory()}, "actors": by_agent(OnPolicyActor, QActor),
      "storages": {"agent_0": GAEBuffer.create_factory(8), "agent_1": ReplayBuffer.create_factory(80)}},
     "either all storages must be replay storages, or none"),
    ({"storages": VTraceBuffer.create_factory(8)},
     "policy 'agent_0': PPO learns from rollouts with advantages, but VTraceBuffer provides"),
    ({"actors": by_agent(OnPolicyActor, QActor)},
     r"policy 'agent_1': PPO cannot train QActor; actors for PPO: .*\bOnPolicyActor"),
    ({"trainable": ["agent_2"]}, r"trainable has \['agent_2'\]"),
    ({"trainable": []}, "trainable is empty"),
    ({"envs": VecEnv.create_factory(CountingEnv)}, "envs must be a factory such as MultiAgentVecEnv"),
    ({"actors": {"agent_0": None, "agent_1": None}}, "actors must be a factory for each"),
])
def test_incompatible_parts_are_refused(arguments, message):
    envs = MultiAgentVecEnv.create_factory(MatchingGame, policy_of=lambda agent: agent)
    given = {"envs": envs, "algorithms": ppo(), "actors": OnPolicyActor.create_factory,
             "storages": GAEBuffer.create_factory(8)}
    with pytest.raises(ConfigError, match=message):
        multi_agent(**{**given, **arguments})


class OtherReplay(GAEBuffer):
    provides = DataKind.TRANSITIONS


def test_unsupported_replay_storages_are_refused():
    envs = MultiAgentVecEnv.create_factory(MatchingGame)
    with pytest.raises(ConfigError, match="supports ReplayBuffer and PERBuffer, got OtherReplay"):
        multi_agent(envs, DQN.create_factory(), QActor.create_factory, OtherReplay.create_factory(8))


def test_policies_with_equal_spaces_may_share_an_actor_factory():
    envs = MultiAgentVecEnv.create_factory(ChangingAgents, policy_of={"agent_0": "a", "agent_1": "b", "agent_2": "b"})
    actor = OnPolicyActor.create_factory(envs.observation_space["a"], envs.action_space["a"])
    _, actors, _ = multi_agent(envs, ppo(), actor, GAEBuffer.create_factory(8))
    assert actors.options.policies == {"a": actor, "b": actor}
