"""Algorithms: from batches to gradients, from gradients to better weights."""

from pytorchrl.agent.algorithms.a2c import A2C
from pytorchrl.agent.algorithms.base import Algorithm
from pytorchrl.agent.algorithms.on_policy import OnPolicyAlgorithm, Recorded
from pytorchrl.agent.algorithms.ppo import PPO

__all__ = ["A2C", "PPO", "Algorithm", "OnPolicyAlgorithm", "Recorded"]
