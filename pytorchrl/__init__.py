"""Deep reinforcement learning: an agent of four parts, and a scheme that decides where each operation runs.

Importing the package starts nothing. Public names are loaded on first use, so that the command line can respond, and
handle Ctrl-C, before torch is imported.
"""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING

__version__ = "0.2.0.dev0"
"""The version of the library."""

if TYPE_CHECKING:
    from pytorchrl.agent.actors import DecoderActor, OffPolicyActor, OnPolicyActor, QActor
    from pytorchrl.agent.algorithms import A2C, APPO, DDPG, DQN, GRPO, IMPALA, MPO, PPO, PQN, R2D2, SAC, TD3
    from pytorchrl.agent.env import VecEnv
    from pytorchrl.agent.env.tokens import TokenEnv
    from pytorchrl.agent.multi import MultiAgentVecEnv, multi_agent
    from pytorchrl.agent.options import Factory
    from pytorchrl.agent.schedules import Schedule, cosine, exponential, linear, piecewise
    from pytorchrl.agent.storages import (
        GAEBuffer,
        GroupBuffer,
        PERBuffer,
        ReplayBuffer,
        RolloutSequenceBuffer,
        SequenceBuffer,
        VanillaOnPolicyBuffer,
        VTraceBuffer,
    )
    from pytorchrl.errors import ConfigError, PyTorchRLError
    from pytorchrl.learner.learner import Learner
    from pytorchrl.scheme import ASYNC, CENTRAL, PARALLEL, SYNC, Scheme
    from pytorchrl.training.training import TrainedAgent, load, train

_HOMES = {
    "pytorchrl.agent.actors": ("DecoderActor", "OffPolicyActor", "OnPolicyActor", "QActor"),
    "pytorchrl.agent.algorithms": (
        "A2C", "APPO", "DDPG", "DQN", "GRPO", "IMPALA", "MPO", "PPO", "PQN", "R2D2", "SAC", "TD3"),
    "pytorchrl.agent.env": ("VecEnv",),
    "pytorchrl.agent.env.tokens": ("TokenEnv",),
    "pytorchrl.agent.multi": ("MultiAgentVecEnv", "multi_agent"),
    "pytorchrl.agent.options": ("Factory",),
    "pytorchrl.agent.schedules": ("Schedule", "cosine", "exponential", "linear", "piecewise"),
    "pytorchrl.agent.storages": (
        "GAEBuffer", "GroupBuffer", "PERBuffer", "ReplayBuffer", "RolloutSequenceBuffer", "SequenceBuffer",
        "VTraceBuffer", "VanillaOnPolicyBuffer"),
    "pytorchrl.errors": ("ConfigError", "PyTorchRLError"),
    "pytorchrl.learner.learner": ("Learner",),
    "pytorchrl.scheme": ("ASYNC", "CENTRAL", "PARALLEL", "SYNC", "Scheme"),
    "pytorchrl.training.training": ("TrainedAgent", "load", "train"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}
# Former name -> the public name that replaces it, and the version that deprecated the former name.
_DEPRECATED: dict[str, tuple[str, str]] = {}

__all__ = [  # noqa: RUF022 - names are sorted without regard to case, as readers look them up
    "__version__", "A2C", "APPO", "ASYNC", "CENTRAL", "ConfigError", "cosine", "DDPG", "DecoderActor", "DQN",
    "exponential", "Factory", "GAEBuffer", "GroupBuffer", "GRPO", "IMPALA", "Learner", "linear", "load", "MPO",
    "multi_agent", "MultiAgentVecEnv", "OffPolicyActor", "OnPolicyActor", "PARALLEL", "PERBuffer", "piecewise", "PPO",
    "PQN", "PyTorchRLError", "QActor", "R2D2", "ReplayBuffer", "RolloutSequenceBuffer", "SAC", "Schedule", "Scheme",
    "SequenceBuffer", "SYNC", "TD3", "TokenEnv", "train", "TrainedAgent", "VanillaOnPolicyBuffer",
    "VecEnv", "VTraceBuffer",
]


def __getattr__(name: str) -> object:
    """Load a public name from its module and store it in this module; warn if the name is deprecated."""
    if name in _DEPRECATED:
        new, since = _DEPRECATED[name]
        warnings.warn(f"pytorchrl.{name} is deprecated since version {since}; use pytorchrl.{new}",
                      DeprecationWarning, stacklevel=2)
        return globals()[new] if new in globals() else __getattr__(new)
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'pytorchrl' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
