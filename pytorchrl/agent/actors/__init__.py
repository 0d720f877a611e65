"""Actors: networks that act and are trained, with what they are made of."""

from pytorchrl.agent.actors.extractors import CNN, MLP, DictNet, Embedding
from pytorchrl.agent.actors.on_policy_actor import OnPolicyActor
from pytorchrl.agent.actors.resnets import FixupCNN, ImpalaCNN

__all__ = ["CNN", "MLP", "DictNet", "Embedding", "FixupCNN", "ImpalaCNN", "OnPolicyActor"]
