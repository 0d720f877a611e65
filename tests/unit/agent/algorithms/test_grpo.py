"""Test GRPO: loss and gradient compared with a loop, options, and the updates from a rollout."""

from __future__ import annotations

import copy
import dataclasses
import types

import pytest
import torch
from torch import nn

from pytorchrl import Scheme
from pytorchrl.agent.actors import DecoderActor
from pytorchrl.agent.algorithms import GRPO
from pytorchrl.agent.env.tokens import TokenEnv
from pytorchrl.agent.storages import GroupBuffer
from pytorchrl.envs.tasks import Copy, SortDigits
from pytorchrl.errors import ConfigError, ContractError

GROUP = 4


class ShortCopy(Copy):
    """Texts of at most three digits, whose answers have different lengths."""

    def __init__(self):
        super().__init__(3)


def scheme_of(storage=None, actor=None, task=SortDigits, waits=True, device=None, **options):
    envs = TokenEnv.create_factory(task, {}, 3 * GROUP, group_size=GROUP, waits=waits)
    network = {"context": 9, "width": 8} | (actor or {})
    return Scheme(
        GRPO.create_factory(**options),
        DecoderActor.create_factory(envs.observation_space, envs.action_space, **network),
        GroupBuffer.create_factory(**{"size": 3, "group_size": GROUP} | (storage or {})), envs, seed=1, device=device)


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
    "reference_kl_coef": ({"num_epochs": 2}, 1.0), "clip_param": ({"lr": 1e-1, "num_epochs": 3}, 0.01),
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


@pytest.mark.parametrize("options", [
    {"size": 2}, {"scale_advantages": False}, {"order": "started"}, {"cancels_unfinished": True}], ids=str)
def test_every_option_of_the_storage_changes_training(options):
    base = {"waits": False, "task": ShortCopy}
    assert not torch.equal(params_after(**base), params_after(**base, storage=options))


def test_the_divergence_is_that_from_the_policy_before_training():
    scheme = scheme_of(reference_kl_coef=0.5, lr=1e-2, num_epochs=2)
    algorithm = scheme.start().local_worker.algo
    initial, seen = copy.deepcopy(algorithm.actor), []
    terms = algorithm.terms

    def recording(evaluated, batch, parameters):
        found = terms(evaluated, batch, parameters)
        with torch.no_grad():
            logps = [actor.evaluate_actions(batch.obs, batch.rhs, batch.done, batch.action)[0]
                     for actor in (initial, algorithm.actor)]
        seen.append((found[0]["reference_kl"][batch.valid].detach(), *(logp[batch.valid] for logp in logps)))
        return found

    algorithm.terms = recording
    infos = [scheme.step() for _ in range(6)]
    scheme.stop()
    for (found, reference, logp), info in zip(seen, infos, strict=True):
        expected = (reference - logp).exp() - 1 - (reference - logp)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
        assert info["reference_kl"] == pytest.approx(float(expected.mean()), abs=1e-6)
        assert info["loss"] == pytest.approx(
            info["policy_loss"] - 0.005 * info["entropy"] + 0.5 * info["reference_kl"], abs=1e-6)
    assert infos[0]["reference_kl"] == pytest.approx(0.0, abs=1e-6)
    assert infos[-1]["reference_kl"] > 1e-3


def test_steps_that_are_not_valid_have_no_divergence():
    scheme = scheme_of(reference_kl_coef=0.5, num_epochs=2)
    algorithm = scheme.start().local_worker.algo
    compute, seen = algorithm.compute_gradients, []

    def impossible_padding(batch):
        with torch.no_grad():
            algorithm.actor.policy_head.bias[0] = -120.0
        batch = dataclasses.replace(batch, action=torch.where(batch.valid, batch.action.clamp(min=1), 0))
        gradients, info = compute(batch)
        seen.append(bool(gradients[0].isfinite().all()) and gradients[0].abs().max() > 0)
        return gradients, info

    algorithm.compute_gradients = impossible_padding
    scheme.step()
    scheme.stop()
    assert seen == [True]


class Causal(nn.Module):
    """A model of tokens that depends on all earlier ones."""

    def __init__(self, num_tokens, context):
        super().__init__()
        self.embed, self.net = nn.Embedding(num_tokens, 8), nn.GRU(8, 16, batch_first=True)
        self.head = nn.Linear(16, num_tokens)

    def forward(self, tokens):
        return self.head(self.net(self.embed(tokens))[0])


class WithLogits(Causal):
    """The same model, which returns an object."""

    def forward(self, tokens):
        return types.SimpleNamespace(logits=super().forward(tokens))


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("module", [Causal, WithLogits])
def test_a_model_of_the_user_draws_tokens_with_the_probabilities_that_it_learns_from(module, waits):
    scheme = scheme_of(actor={"module": module, "width": 32}, task=ShortCopy, waits=waits, on_new_weights="recompute")
    algorithm, ratios = scheme.start().local_worker.algo, []
    compute = algorithm.compute_gradients

    def recording(batch):
        with torch.no_grad():
            logp = algorithm.actor.evaluate_actions(batch.obs, batch.rhs, batch.done, batch.action)[0]
        if waits:  # all tokens have been drawn with the current weights
            ratios.append((logp - batch.logp)[batch.valid].abs().max())
        return compute(batch)

    algorithm.compute_gradients = recording
    before = scheme.acting_state()["all"]
    for _ in range(4):
        scheme.step()
    after = scheme.acting_state()["all"]
    scheme.stop()
    assert all(ratio < 1e-5 for ratio in ratios)
    assert len(ratios) == (4 if waits else 0)
    assert not torch.equal(before, after)


def test_a_language_model_of_transformers_is_a_module():
    transformers = pytest.importorskip("transformers")

    def llama(num_tokens, context):
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(
            vocab_size=num_tokens, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            max_position_embeddings=context))

    scheme = scheme_of(actor={"module": llama, "width": 32})
    for _ in range(3):
        info = scheme.step()
    scheme.stop()
    assert info["entropy"] > 0


def test_wrong_options_are_refused():
    with pytest.raises(ConfigError, match="on_new_weights='keep' needs the keys and values"):
        scheme_of(actor={"module": Causal, "width": 32}, on_new_weights="keep")
    with pytest.raises(ConfigError, match="num_layers needs module=None"):
        scheme_of(actor={"module": Causal, "num_layers": 3, "width": 32})
    with pytest.raises(ContractError, match=r"the module of DecoderActor returned Tensor \(.*\); expected a tensor of"):
        scheme_of(actor={"module": lambda num_tokens, context: nn.Embedding(num_tokens, 3), "width": 32}).step()
    with pytest.raises(ConfigError, match="needs correction=icepop"):
        GRPO.create_factory(min_weight=0.5)
    with pytest.raises(ConfigError, match="both set how a pass is split"):
        GRPO.create_factory(num_mini_batch=2, mini_batch_size=8)
    with pytest.raises(ConfigError, match="give num_mini_batch instead"):
        GRPO.create_factory(mini_batch_size=8)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["finish", "keep", "recompute"])
def test_a_gpu_generates_and_learns_like_the_cpu(mode):
    found = {}
    for device in ("cpu", "cuda"):
        scheme = scheme_of(task=ShortCopy, waits=False, on_new_weights=mode, correction="decoupled",
                           reference_kl_coef=0.1, num_epochs=2, device=device)
        infos = [scheme.step() for _ in range(6)]
        found[device] = infos, scheme.ledger()["consumed_unique"]
        scheme.stop()
    assert found["cuda"][1] > 0
    assert all(info["loss"] == info["loss"] for info in found["cuda"][0])
    assert found["cuda"][0][0]["entropy"] == pytest.approx(found["cpu"][0][0]["entropy"], rel=1e-2)
