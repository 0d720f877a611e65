"""Algorithms, which choose actions, compute gradients from batches and update weights."""

from pytorchrl.agent.algorithms.a2c import A2C
from pytorchrl.agent.algorithms.appo import APPO
from pytorchrl.agent.algorithms.base import Algorithm
from pytorchrl.agent.algorithms.bc import BC
from pytorchrl.agent.algorithms.ddpg import DDPG, TD3
from pytorchrl.agent.algorithms.dqn import DQN
from pytorchrl.agent.algorithms.epsilon import ladder_epsilon
from pytorchrl.agent.algorithms.grpo import GRPO
from pytorchrl.agent.algorithms.impala import IMPALA
from pytorchrl.agent.algorithms.iql import IQL
from pytorchrl.agent.algorithms.mpo import MPO
from pytorchrl.agent.algorithms.on_policy import OnPolicyAlgorithm
from pytorchrl.agent.algorithms.ppo import PPO
from pytorchrl.agent.algorithms.pqn import PQN
from pytorchrl.agent.algorithms.r2d2 import R2D2
from pytorchrl.agent.algorithms.registry import algorithm
from pytorchrl.agent.algorithms.replay import ReplayAlgorithm
from pytorchrl.agent.algorithms.sac import SAC
from pytorchrl.agent.algorithms.vtrace import VTraceAlgorithm
from pytorchrl.support.work import Work

__all__ = [
    "A2C", "APPO", "BC", "DDPG", "DQN", "GRPO", "IMPALA", "IQL", "MPO", "PPO", "PQN", "R2D2", "SAC", "TD3", "Algorithm",
    "OnPolicyAlgorithm", "ReplayAlgorithm", "VTraceAlgorithm", "algorithm", "ladder_epsilon",
]

WORK = Work(calls="network", methods={
    "choose": "network", "finish_rollout": "network", "compute_values": "network", "_evaluate_loss": "network",
    "loss": "network", "losses": "network", "td_errors": "network", "apply_gradients": "optimizer"})
