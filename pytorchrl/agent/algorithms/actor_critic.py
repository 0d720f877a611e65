"""The base class of SAC, TD3 and DDPG, with the options of their ensemble of critics.

B = transitions of a batch, n = discrete actions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from pytorchrl.agent.actors.critic_layers import CriticLayers
from pytorchrl.agent.actors.off_policy_actor import OffPolicyActor, critic_scores
from pytorchrl.agent.actors.return_distributions import DISTRIBUTIONS, QUANTILE, value_estimate
from pytorchrl.agent.algorithms.replay import ReplayAlgorithm
from pytorchrl.agent.data import Obs
from pytorchrl.agent.modes import DROPOUT, NORMALIZATION
from pytorchrl.agent.noise import standard_normal
from pytorchrl.agent.options import AgentOptions, option
from pytorchrl.errors import Problem

POLICY_DELAY_HELP = "Number of updates of the critics per update of the policy"


class OffPolicyActorCritic(ReplayAlgorithm):
    """The base class of algorithms that learn a policy and several critics, the parameter groups `pi` and `q`.

    By default, the target uses the smallest value of all target critics. With `critic_subset`, it uses the smallest
    value of a random subset of them, and the policy maximizes the mean value of all critics: Chen et al. 2021 (REDQ),
<<<<<<< HEAD
    algorithm 1. Without `target_networks`, targets are computed with the trained networks: Bhatt et al. 2024 (CrossQ),
    figure 2.

    If the critics learn distributions of the return, the target is the distribution of the critic with the smallest
    mean (categorical), or consists of the atoms of all critics without the `drop_atoms` largest ones per critic
    (quantile), and the policy maximizes the mean of all atoms: Kuznetsov et al. 2020 (TQC), equations 9 to 13.
