"""Predefined environments: one module per suite, and `make_factory`, which finds the suite of an environment id.

Names are imported on first use, so that a process that needs only the module `testing` does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from pytorchrl.support.work import Work

if TYPE_CHECKING:
    from pytorchrl.envs.atari import atari_factory
    from pytorchrl.envs.box2d import box2d_factory
    from pytorchrl.envs.classic import classic_factory
    from pytorchrl.envs.lookup import make_factory
    from pytorchrl.envs.mujoco import mujoco_factory
    from pytorchrl.envs.suites import suite

__all__ = ["atari_factory", "box2d_factory", "classic_factory", "make_factory", "mujoco_factory", "suite"]

WORK = Work("environment")

_HOMES = {"atari_factory": "atari", "box2d_factory": "box2d", "classic_factory": "classic", "make_factory": "lookup",
          "mujoco_factory": "mujoco", "suite": "suites"}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
