"""Agents with several policies; the actor, the algorithm and the storage contain one object for each policy."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytorchrl.agent.multi.compose import multi_agent
    from pytorchrl.agent.multi.env import MultiAgentVecEnv

__all__ = ["MultiAgentVecEnv", "multi_agent"]

_HOMES = {"MultiAgentVecEnv": "env", "multi_agent": "compose"}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
