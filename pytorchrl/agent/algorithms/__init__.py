"""Algorithms: from batches to gradients, from gradients to better weights."""

from pytorchrl.agent.algorithms.a2c import A2C
from pytorchrl.agent.algorithms.appo import APPO
from pytorchrl.agent.algorithms.base import Algorithm
from pytorchrl.agent.algorithms.impala import IMPALA
from pytorchrl.agent.algorithms.on_policy import OnPolicyAlgorithm, Recorded
from pytorchrl.agent.algorithms.ppo import PPO
from pytorchrl.agent.algorithms.vtrace import VTraceAlgorithm

__all__ = ["A2C", "APPO", "IMPALA", "PPO", "Algorithm", "OnPolicyAlgorithm", "Recorded", "VTraceAlgorithm"]
