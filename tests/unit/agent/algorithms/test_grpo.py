"""Test GRPO: loss and gradient compared with a loop, options, and the updates from a rollout."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from pytorchrl import Scheme
from pytorchrl.agent.actors import DecoderActor
from pytorchrl.agent.algorithms import GRPO
from pytorchrl.agent.env.tokens import TokenEnv
from pytorchrl.agent.storages import GroupBuffer
from pytorchrl.envs.tasks import Copy, SortDigits
from pytorchrl.errors import ConfigError

GROUP = 4


class ShortCopy(Copy):
    """Texts of at most three digits, whose answers have different lengths."""

    def __init__(self):
        super().__init__(3)


def scheme_of(storage=None, actor=None, task=SortDigits, waits=True, **options):
    envs = TokenEnv.create_factory(task, {}, 3 * GROUP, group_size=GROUP, waits=waits)
    network = {"context": 9, "width": 8} | (actor or {})
    return Scheme(
        GRPO.create_factory(**options),
        DecoderActor.create_factory(envs.observation_space, envs.action_space, **network),
        GroupBuffer.create_factory(**{"size": 3, "group_size": GROUP} | (storage or {})), envs, seed=1)


def params_after(num_steps=6, **settings):
    scheme = scheme_of(**settings)
    for _ in range(num_steps):
        scheme.step()
    params = scheme.acting_state()["all"]
    scheme.stop()
    return params


# Maps each option to (other settings that the option needs to have an effect, a non-default value).
CHANGES = {
    "lr": ({}, 1e-2), "optimizer": ({}, "sgd"), "adam_eps": ({}, 1e-2), "adam_beta1": ({}, 0.5),
    "rmsprop_eps": ({"optimizer": "rmsprop"}, 1e-2), "rmsprop_decay": ({"optimizer": "rmsprop"}, 0.5),
    "weight_decay": ({"optimizer": "adamw"}, 0.5), "momentum": ({"optimizer": "sgd"}, 0.5),
    "max_grad_norm": ({"optimizer": "sgd"}, 1e-3), "num_epochs": ({}, 2), "num_mini_batch": ({}, 2),
    "gamma": ({}, 0.5), "entropy_coef": ({}, 0.5), "mixed_precision": ({}, True),
    "clip_param": ({"lr": 1e-1, "num_epochs": 3}, 0.01),
    "correction": ({"lr": 1e-1, "num_epochs": 3}, "none"),
    "max_weight": ({"lr": 1e-1, "num_epochs": 3, "correction": "tis"}, 1.0001),
    "min_weight": ({"lr": 1e-1, "num_epochs": 3, "correction": "icepop"}, 0.999),
    "max_shift": ({"lr": 1e-1, "num_epochs": 3, "correction": "ipo"}, 1e-6),
    "max_moment": ({"lr": 1e-1, "num_epochs": 3, "correction": "m2po"}, 1e-9),
    "on_new_weights": ({"lr": 1e-1, "waits": False, "task": ShortCopy}, "keep"),
}
ELSEWHERE = {"compile", "mini_batch_size"}  # tested separately, and refused


def test_table_of_changes_names_every_option():
    assert {field.name for field in dataclasses.fields(GRPO.Options)} == CHANGES.keys() | ELSEWHERE


@pytest.mark.parametrize("name", CHANGES)
def test_every_option_changes_training(name):
    base, value = CHANGES[name]
    plain, changed = params_after(**base), params_after(**{**base, name: value})
    assert plain.isfinite().all()
    assert not torch.equal(plain, changed)


@pytest.mark.parametrize("options", [{"size": 2}, {"scale_advantages": False}])
def test_every_option_of_the_storage_changes_training(options):
    assert not torch.equal(params_after(), params_after(storage=options))


def test_wrong_options_are_refused():
    with pytest.raises(ConfigError, match="needs correction=icepop"):
        GRPO.create_factory(min_weight=0.5)
    with pytest.raises(ConfigError, match="both set how a pass is split"):
        GRPO.create_factory(num_mini_batch=2, mini_batch_size=8)
    with pytest.raises(ConfigError, match="give num_mini_batch instead"):
        GRPO.create_factory(mini_batch_size=8)
