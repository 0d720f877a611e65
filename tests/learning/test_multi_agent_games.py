"""Tests that policies trained with PPO and DQN play two PettingZoo games better than random policies.

`simple_speaker_listener` has two policies: one sees the goal, and the other can move. `simple_spread` has one policy
for two agents, which have to cover two landmarks. Returns are sums over both agents.
"""

from __future__ import annotations

import functools
import statistics

import numpy as np
import pytest
import torch

from pytorchrl import (
    DQN, PPO, GAEBuffer, Learner, MultiAgentVecEnv, OnPolicyActor, QActor, ReplayBuffer, Scheme, multi_agent,
)

SPEAKER = "mpe2.simple_speaker_listener_v4", {"max_cycles": 25}, lambda agent: agent.split("_")[0]
SPREAD = "mpe2.simple_spread_v3", {"N": 2, "max_cycles": 25}, None
# Algorithm, game, env steps, and a factor. The return of the trained policies must exceed the factor times the return
# of random policies; both returns are negative.
RUNS = {
    "ppo-speaker_listener": ("ppo", SPEAKER, 30_000, 0.65), "dqn-speaker_listener": ("dqn", SPEAKER, 20_000, 0.65),
    "ppo-spread": ("ppo", SPREAD, 40_000, 0.8), "dqn-spread": ("dqn", SPREAD, 20_000, 0.8),
}


def agent_for(algorithm, envs):
    if algorithm == "ppo":
        return multi_agent(
            envs, PPO.create_factory(lr=1e-3, gamma=0.95, num_epochs=8, num_mini_batch=4),
            functools.partial(OnPolicyActor.create_factory, hidden_sizes=(64, 64)), GAEBuffer.create_factory(size=100))
    return multi_agent(
        envs, DQN.create_factory(lr=1e-3, gamma=0.95, start_steps=1000, epsilon_steps=10_000, update_every=8,
                                 mini_batch_size=128,
                                 polyak=0.99, target_update_interval=1),
        functools.partial(QActor.create_factory, hidden_sizes=(64, 64)),
        ReplayBuffer.create_factory(50_000, rollout_size=5))


def random_return(envs, num_episodes=100):
    playing, rng, returns = envs(mode="test", seed=123), np.random.default_rng(0), []
    playing.reset()
    while len(returns) < num_episodes:
        actions = {policy: rng.integers(space.n, size=envs.num_envs * len(envs.agents[policy]))
                   for policy, space in envs.action_space.items()}
        returns += [episode.env_return for episode in playing.step(actions).episodes]
    playing.close()
    return statistics.fmean(returns)


@pytest.mark.learning
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("seed", "settings"), [
    (1, {}), (2, {}), (3, {}), (1, {"num_col_workers": 2, "runtime": "simulated"}),
    pytest.param(1, {"num_col_workers": 2, "runtime": "ray"}, marks=pytest.mark.ray)],
    ids=["1", "2", "3", "simulated", "ray"])
@pytest.mark.parametrize("run", RUNS)
def test_policies_learn_together(run, seed, settings):
    pytest.importorskip("mpe2")
    torch.set_num_threads(1)
    algorithm, (module, kwargs, policy_of), target_steps, share = RUNS[run]
    envs = MultiAgentVecEnv.create_factory(module, kwargs, 8, policy_of=policy_of)
    baseline = random_return(envs)
    with Learner(Scheme(*agent_for(algorithm, envs), envs, envs, seed=seed, **settings), target_steps=target_steps,
                 progress=False) as learner:
        learner.train()
        result = learner.evaluate(100).return_mean
    found = f"random {baseline:.1f}, after {learner.env_steps} env steps {result:.1f}, {learner.seconds:.0f} s"
    print(f"{run}, seed {seed}: {found}")  # noqa: T201
    assert result > share * baseline, (result, baseline)
