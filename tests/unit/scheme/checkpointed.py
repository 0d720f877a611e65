"""Agents and settings for tests of checkpoints, and functions that compare checkpoints."""

from __future__ import annotations

import io

import torch

from pytorchrl import (
    A2C,
    APPO,
    DDPG,
    DQN,
    IMPALA,
    MPO,
    PPO,
    PQN,
    R2D2,
    SAC,
    TD3,
    GAEBuffer,
    MultiAgentVecEnv,
    OffPolicyActor,
    OnPolicyActor,
    PERBuffer,
    QActor,
    ReplayBuffer,
    RolloutSequenceBuffer,
    SequenceBuffer,
    VecEnv,
    VTraceBuffer,
    cosine,
    linear,
    multi_agent,
)
from pytorchrl.agent.storages import UniformSequenceBuffer
from pytorchrl.envs.testing import ChangingAgents

REPLAY = {"start_steps": 16, "update_every": 8, "num_updates": 4, "mini_batch_size": 8}


def on_policy(algo, storage, env="CartPole-v1", **actor):
    envs = VecEnv.create_factory(env, None, 2)
    return algo, OnPolicyActor.create_factory(envs.observation_space, envs.action_space, hidden_sizes=(8,),
                                              **actor), storage, envs


def continuous(algo, env="Pendulum-v1", storage=None, max_episode_steps=None, **actor):
    envs = VecEnv.create_factory(env, None, 2, max_episode_steps=max_episode_steps)
    actor = OffPolicyActor.create_factory(envs.observation_space, envs.action_space, hidden_sizes=(8,), **actor)
    return algo, actor, storage or ReplayBuffer.create_factory(100, rollout_size=4), envs


def q_learning(algo, storage, **actor):
    envs = VecEnv.create_factory("CartPole-v1", None, 2)
    return algo, QActor.create_factory(envs.observation_space, envs.action_space, hidden_sizes=(8,),
                                       **actor), storage, envs


def several_policies(algo, actor, storage):
    envs = MultiAgentVecEnv.create_factory(ChangingAgents, None, 2,
                                           policy_of={"agent_0": "early", "agent_1": "late", "agent_2": "late"})
    return *multi_agent(envs, algo, lambda obs, action: actor.create_factory(obs, action, hidden_sizes=(8,)),
                        storage), envs


AGENTS = {
    "ppo, normalized": lambda: on_policy(
        PPO.create_factory(num_epochs=2, num_mini_batch=2, lr=linear(1e-3, 0.0), advantage_normalization="batch"),
        GAEBuffer.create_factory(8), normalize_obs=True, normalize_reward=True),
    "ppo, gru": lambda: on_policy(
        PPO.create_factory(num_epochs=2, num_mini_batch=2), GAEBuffer.create_factory(8), recurrent_net="gru",
        recurrent_size=5),
    "ppo, intrinsic reward": lambda: on_policy(
        PPO.create_factory(num_epochs=2, num_mini_batch=2, intrinsic_reward="rnd", predictor_proportion=0.5),
        GAEBuffer.create_factory(8)),
    "ppo, target_kl": lambda: on_policy(PPO.create_factory(num_epochs=4, num_mini_batch=2, target_kl=1e-6),
                                        GAEBuffer.create_factory(8)),
    "a2c, continuous": lambda: on_policy(A2C.create_factory(optimizer="rmsprop", lr=[(0, 1e-3), (100, 2e-3)]),
                                         GAEBuffer.create_factory(5), "Pendulum-v1"),
    "impala": lambda: on_policy(IMPALA.create_factory(lr=lambda remaining: 1e-3 * remaining),
                                VTraceBuffer.create_factory(size=8)),
    "appo": lambda: on_policy(APPO.create_factory(num_epochs=2), VTraceBuffer.create_factory(size=8)),
    "dqn, noisy": lambda: q_learning(
        DQN.create_factory(**REPLAY, target_update_interval=3), ReplayBuffer.create_factory(24, rollout_size=4),
        noisy=True),
    "dqn, prioritised": lambda: q_learning(
        DQN.create_factory(**REPLAY, polyak=0.9, epsilon_steps=200),
        PERBuffer.create_factory(30, rollout_size=4, n_step=3, beta=cosine(0.4, 1.0))),
    "pqn": lambda: q_learning(PQN.create_factory(num_epochs=2, num_mini_batch=2, epsilon_steps=200),
                              GAEBuffer.create_factory(8), norm="layer", normalize_obs=True),
    "r2d2": lambda: q_learning(
        R2D2.create_factory(**REPLAY),
        SequenceBuffer.create_factory(200, rollout_size=4, length=4, burn_in=2, period=2),
        recurrent_net="gru", recurrent_size=5),
    "r2d2, whole rollouts": lambda: q_learning(
        R2D2.create_factory(**REPLAY), RolloutSequenceBuffer.create_factory(60, rollout_size=4, n_step=2),
        recurrent_net="gru",
        recurrent_size=5),
    "ddpg, drifting noise": lambda: continuous(DDPG.create_factory(**REPLAY, noise="ou"), policy="deterministic"),
    "td3": lambda: continuous(TD3.create_factory(**REPLAY, optimizer=torch.optim.NAdam), policy="deterministic",
                              num_critics=2),
    "sac": lambda: continuous(SAC.create_factory(**REPLAY, lr_alpha=1e-2, optimizer="adamw", weight_decay=0.1),
                              normalize_obs=True, block="simba"),
    "sac, gru": lambda: continuous(
        SAC.create_factory(**REPLAY), storage=UniformSequenceBuffer.create_factory(
            200, rollout_size=4, length=4, burn_in=2, period=2), recurrent_net="gru", recurrent_size=5),
    "td3, lstm, prioritised": lambda: continuous(
        TD3.create_factory(**REPLAY), storage=SequenceBuffer.create_factory(
            200, rollout_size=4, length=4, burn_in=2, period=2, n_step=2), policy="deterministic", recurrent_net="lstm",
        recurrent_size=5),
    "td3, hindsight": lambda: continuous(
        TD3.create_factory(**REPLAY), "pytorchrl/TorchPointMaze-v0",
        PERBuffer.create_factory(30, rollout_size=4, n_step=2, relabel="episode"), 7, policy="deterministic",
        num_critics=2),
    "mpo": lambda: continuous(MPO.create_factory(**REPLAY, lr_dual=0.1, target_update_interval=3), policy="gaussian"),
    "two policies, ppo": lambda: several_policies(
        PPO.create_factory(num_epochs=2, num_mini_batch=2), OnPolicyActor, GAEBuffer.create_factory(6)),
    "two policies, dqn": lambda: several_policies(DQN.create_factory(**REPLAY), QActor,
                                                  PERBuffer.create_factory(100, rollout_size=6)),
}
SYNCHRONOUS = {
    "central": {},
    "2 collectors": {"num_col_workers": 2},
    "2 gradient workers": {"num_grad_workers": 2},
    "2 of each": {"num_col_workers": 2, "num_grad_workers": 2},
    "ranks": {"num_grad_workers": 2, "distribute_gradients": True},
}


def through_a_file(checkpoint):
    """Save the checkpoint, load it again with `weights_only=True` (no code is executed), and return it."""
    file = io.BytesIO()
    torch.save(checkpoint, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def go_on(scheme, count):
    """Make `count` updates, continue until the current train batch is used up, and return the infos."""
    infos = [scheme.step() for _ in range(count)]
    while not scheme.is_between_train_batches:
        infos.append(scheme.step())
    return infos


def flat(value, name=""):
    """Flatten a nested state into one dictionary of numbers, strings and tensors, with paths as keys."""
    if isinstance(value, dict):
        return {key: item for own, part in value.items() for key, item in flat(part, f"{name}/{own}").items()}
    if isinstance(value, (list, tuple)):
        return {key: item for own, part in enumerate(value) for key, item in flat(part, f"{name}/{own}").items()}
    return {name: value}


def differences(one, other):
    """Return the paths of the entries whose values in the two states are not equal bit for bit."""
    one, other = flat(one), flat(other)
    assert one.keys() == other.keys()
    return [name for name, value in one.items() if not (
        torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name])]
