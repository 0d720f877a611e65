"""Decide by a rule whether to compile the losses of a run, for `compile="auto"`.

Compilation takes seconds once, and makes each update faster by about the time that Python takes to call the operations
of an update. This time depends on the algorithm, and hardly on the widths of its networks, because matrix products take
equally long in compiled losses. The rule only counts updates, and never measures times, so equal runs choose alike.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from pytorchrl.agent.actors.extractors import is_image
from pytorchrl.agent.algorithms.precision import BatchShape
from pytorchrl.agent.fit import check_fit
from pytorchrl.errors import ConfigError

if TYPE_CHECKING:
    from pytorchrl.agent.factories import Agent, AlgorithmFactory

_BREAK_EVEN = {"PPO": 22_000, "A2C": 26_000, "IMPALA": 31_000, "APPO": 20_000, "DQN": 35_000, "DDPG": 17_000,
               "TD3": 20_000, "SAC": 12_000, "MPO": 8_000}
"""Number of updates with which compiled losses take as much processor time as others, by the algorithm's class.

The numbers come from the measurements in docs/benchmarks/compilation.md. Algorithms that are not in the table are
not compiled.
"""


def is_worth_compiling(agent: Agent, shape: Callable[[], BatchShape], target_steps: int) -> bool:
    """Return whether compilation saves more time in a run than it takes.

    The result is False for losses, networks and machines for which this is not known: those of users, images, actors
    with memory, and machines without a C++ compiler.

    Args:
        agent: An agent with one policy.
        shape: Function that returns the shape of the batches from which gradients are computed.
        target_steps: Env steps of the whole experiment.
    """
    algorithm, actor = agent.algo_factory, agent.actor_factory
    break_even = _BREAK_EVEN.get(algorithm.cls.__name__)
    if break_even is None or not all(map(_is_ours, (algorithm.cls, actor.cls))):
        return False
    if num_updates(algorithm, shape(), target_steps) <= break_even:
        return False
    extractor = getattr(actor.options, "feature_extractor", None)
    has_memory = bool(actor.cls.has_memory(actor.options))
    if has_memory or callable(extractor) or any(map(is_image, agent.train_envs_factory.observation_space.values())):
        return False
    try:
        check_fit(algorithm.with_options(compile=True), actor, agent.storage_factory)
    except ConfigError:
        return False
    return has_compiler()


def num_updates(algorithm: AlgorithmFactory, shape: BatchShape, target_steps: int) -> int:
    """Return the approximate number of updates of a run of an algorithm of this package."""
    options = algorithm.options
    if algorithm.cls.learns_from.is_kept:
        return max(0, target_steps - options.start_steps) // options.update_every * options.num_updates
    return int(target_steps * options.num_epochs // (shape.columns * shape.length))


def has_compiler() -> bool:
    """Return whether this machine has Linux, a C++ compiler and the headers of Python, which compiled losses need."""
    headers = Path(sysconfig.get_path("include"), "Python.h")
    return (sys.platform == "linux" and shutil.which(os.environ.get("CXX") or "g++") is not None and headers.exists())


def _is_ours(cls: type) -> bool:
    return cls.__module__.split(".")[0] == __name__.split(".")[0]
