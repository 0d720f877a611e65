"""Build agents with several policies, without a scheme."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest
import torch

from pytorchrl import PPO, GAEBuffer, MultiAgentVecEnv, OnPolicyActor, multi_agent
from pytorchrl.envs.testing import ChangingAgents

POLICY_OF = {"agent_0": "early", "agent_1": "shared", "agent_2": "shared"}


@pytest.fixture
def make_agent():
    """Return a function that builds an agent for `ChangingAgents`; `agent.collect()` returns a rollout."""
    def make(algorithms=None, actors=None, storages=None, *, num_envs=2, env_kwargs=None, seed=1, size=8, **options):
        torch.set_num_threads(1)
        envs = MultiAgentVecEnv.create_factory(ChangingAgents, env_kwargs, num_envs, policy_of=POLICY_OF)
        algo, actor, storage = multi_agent(
            envs, algorithms or PPO.create_factory(num_epochs=1, num_mini_batch=1),
            actors or functools.partial(OnPolicyActor.create_factory, hidden_sizes=(8,)),
            storages or GAEBuffer.create_factory(size), **options)
        agent = SimpleNamespace(envs=envs(seed=seed))
        agent.actor = actor(device="cpu", seed=seed)
        agent.algo = algo(device="cpu", actor=agent.actor, seed=seed)
        agent.storage = storage(device="cpu", actor=agent.actor, algorithm=agent.algo, num_envs=num_envs, seed=seed)
        agent.storage.start(*agent.envs.reset())

        def collect():
            while not agent.storage.full:
                acting = agent.algo.acting_step(*agent.storage.current()[:3], mask=agent.storage.current()[3])
                agent.storage.insert_transition(acting, agent.envs.step(acting.clipped_action))
            rollout = agent.storage.get_all_buffer_data()
            agent.algo.finish_rollout(rollout)
            return rollout
        agent.collect = collect
        return agent
    return make
