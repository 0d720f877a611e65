"""Provide environments with the same interface for all backends.

Names are imported on first use, so that processes that need only the environments do not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from pytorchrl.support.work import Work

if TYPE_CHECKING:
    from pytorchrl.agent.env.guard import check_finite
    from pytorchrl.agent.env.spaces import flatten_action_space, flatten_space
    from pytorchrl.agent.env.vec_env import EnvFactory, VecEnv

__all__ = ["EnvFactory", "VecEnv", "check_finite", "flatten_action_space", "flatten_space"]

WORK = Work("ours", calls="environment")

_HOMES = {"EnvFactory": "vec_env", "VecEnv": "vec_env", "check_finite": "guard", "flatten_action_space": "spaces",
          "flatten_space": "spaces"}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
