"""Actors (the networks that act and are trained) and the feature extractors from which actors are built."""

from pytorchrl.agent.actors.base import Actor
from pytorchrl.agent.actors.blocks import DictNet, Simba
from pytorchrl.agent.actors.decoder import DecoderActor
from pytorchrl.agent.actors.extractors import CNN, MLP, Embedding
from pytorchrl.agent.actors.off_policy_actor import OffPolicyActor
from pytorchrl.agent.actors.on_policy_actor import OnPolicyActor
from pytorchrl.agent.actors.q_actor import QActor
from pytorchrl.agent.actors.resnets import FixupCNN, ImpalaCNN
from pytorchrl.agent.actors.value_actor import ValueActor
from pytorchrl.support.work import Work

__all__ = [
    "CNN", "MLP", "Actor", "DecoderActor", "DictNet", "Embedding", "FixupCNN", "ImpalaCNN", "OffPolicyActor",
    "OnPolicyActor", "QActor", "Simba", "ValueActor",
]

WORK = Work("network")
