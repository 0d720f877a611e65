"""Store collected transitions, and draw the batches from which algorithms learn."""

from pytorchrl.agent.storages.base import Storage
from pytorchrl.agent.storages.groups import GroupBuffer
from pytorchrl.agent.storages.on_policy import GAEBuffer, VanillaOnPolicyBuffer
from pytorchrl.agent.storages.per import PERBuffer
from pytorchrl.agent.storages.replay import ReplayBuffer
from pytorchrl.agent.storages.rollout_sequences import RolloutSequenceBuffer
from pytorchrl.agent.storages.sequences import SequenceBuffer, UniformSequenceBuffer
from pytorchrl.agent.storages.trees import MinTree, SumTree
from pytorchrl.agent.storages.vtrace import VTraceBuffer
from pytorchrl.support.work import Work

__all__ = [
    "GAEBuffer", "GroupBuffer", "MinTree", "PERBuffer", "ReplayBuffer", "RolloutSequenceBuffer", "SequenceBuffer",
    "Storage", "SumTree", "UniformSequenceBuffer", "VTraceBuffer", "VanillaOnPolicyBuffer",
]

WORK = Work("storage")
