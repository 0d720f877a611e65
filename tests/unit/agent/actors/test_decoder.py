"""Test the decoder: compared with torch's layers, cached steps compared with full passes, and options."""

from __future__ import annotations

import pytest
import torch
from gymnasium.spaces import Box, Discrete
from torch import nn

from pytorchrl.agent.actors import DecoderActor
from pytorchrl.errors import ConfigError, ContractError, NonFiniteDataError, SpaceError

TOKENS, CONTEXT, WIDTH, HEADS = 7, 10, 16, 4
CLOSE = {"rtol": 0.0, "atol": 5e-6}


def actor_of(**options):
    space = Discrete(TOKENS)
    settings = {"context": CONTEXT, "width": WIDTH, "num_heads": HEADS, "num_layers": 2} | options
    actor = DecoderActor.create_factory(space, space, **settings)(device="cpu", seed=1)
    with torch.no_grad():  # weights that are not small, so that wrong inputs show in the outputs
        for index, parameter in enumerate(actor.parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index)) * 0.3)
    return actor


def torch_features(decoder, tokens):
    """Return the features (B, L, D) of tokens (B, L), computed with the layers of torch."""
    x = decoder.tokens(tokens) + decoder.positions(torch.arange(tokens.shape[1]))
    mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
    for block in decoder.blocks:
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
        attention = layer.self_attn
        pairs = ((attention.in_proj_weight, block.inputs.weight), (attention.in_proj_bias, block.inputs.bias),
                 (attention.out_proj.weight, block.output.weight), (attention.out_proj.bias, block.output.bias),
                 (layer.linear1.weight, block.mlp[0].weight), (layer.linear1.bias, block.mlp[0].bias),
                 (layer.linear2.weight, block.mlp[2].weight), (layer.linear2.bias, block.mlp[2].bias),
                 (layer.norm1.weight, block.norms[0].weight), (layer.norm1.bias, block.norms[0].bias),
                 (layer.norm2.weight, block.norms[1].weight), (layer.norm2.bias, block.norms[1].bias))
        for target, source in pairs:
            target.data.copy_(source)
        x = layer(x, src_mask=mask, is_causal=True)
    return decoder.norm(x)


def tokens_of(length, rows, seed=0):
    return torch.randint(TOKENS, (length, rows), generator=torch.Generator().manual_seed(seed))


def stepped(actor, tokens, done, rhs):
    """Return the features of all steps, computed one step at a time, and the memory at the end."""
    outputs = []
    for row, first in zip(tokens, done, strict=True):
        features, rhs = actor.policy_features({"obs": row}, rhs, first)
        outputs.append(features)
    return torch.stack(outputs), rhs


@torch.no_grad()
def test_the_decoder_equals_the_layers_of_torch():
    actor, tokens = actor_of(), tokens_of(CONTEXT, 3)
    done = torch.zeros(CONTEXT, 3, dtype=torch.bool)
    done[0] = True
    features, _ = actor.policy_features({"obs": tokens}, {}, done)
    torch.testing.assert_close(features, torch_features(actor.decoder, tokens.T).transpose(0, 1), **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0], ids=["one sequence", "several sequences", "single tokens"])
@pytest.mark.parametrize("before", [0, 3], ids=["no memory", "memory"])
def test_cached_steps_equal_a_full_pass(share, before):
    actor, rows, length = actor_of(), 5, 6
    tokens = tokens_of(before + length, rows)
    done = torch.rand(before + length, rows, generator=torch.Generator().manual_seed(3)) < share
    done[0] = True
    known, rhs = stepped(actor, tokens[:before], done[:before], actor.initial_states(rows)) if before else (
        None, actor.initial_states(rows))
    full, _ = actor.policy_features({"obs": tokens[before:]}, rhs if before else {}, done[before:])
    steps, _ = stepped(actor, tokens[before:], done[before:], rhs)
    torch.testing.assert_close(steps, full, **CLOSE)
    if before:  # the tokens before the first row matter unless a sequence begins there
        other, _ = actor.policy_features({"obs": tokens[before:]}, actor.initial_states(rows), done[before:])
        assert torch.allclose(other[0], full[0], **CLOSE) == bool(done[before].all())
        whole, _ = actor.policy_features({"obs": tokens}, {}, done)
        torch.testing.assert_close(torch.cat((known, steps)), whole, **CLOSE)


@torch.no_grad()
def test_a_step_changes_neither_its_memory_nor_other_rows():
    actor, tokens = actor_of(), tokens_of(4, 3)
    done = torch.zeros(4, 3, dtype=torch.bool)
    _, rhs = stepped(actor, tokens[:3], done[:3], actor.initial_states(3))
    before = {name: part.clone() for name, part in rhs.items()}
    features, _ = actor.policy_features({"obs": tokens[3]}, rhs, done[3])
    assert all(torch.equal(part, before[name]) for name, part in rhs.items())
    own, _ = actor.policy_features({"obs": tokens[3, :1]}, {name: part[:1] for name, part in rhs.items()}, done[3, :1])
    torch.testing.assert_close(own, features[:1], **CLOSE)


@torch.no_grad()
def test_recomputed_memory_is_that_of_the_current_weights():
    actor, other, tokens = actor_of(), actor_of(), tokens_of(6, 4)
    done = torch.zeros(6, 4, dtype=torch.bool)
    done[2, 1] = True  # rows of different lengths
    for parameter in other.parameters():
        parameter.add_(0.1)
    _, old = stepped(actor, tokens, done, actor.initial_states(4))
    _, new = stepped(other, tokens, done, other.initial_states(4))
    recomputed = other.recomputed(old)
    assert old["length"].flatten().tolist() == [6, 4, 6, 6]
    size = other.decoder.cache_shape
    for row, length in enumerate((6, 4, 6, 6)):
        parts = [memory["cache"][row].view(size)[..., :length, :] for memory in (recomputed, new, old)]
        torch.testing.assert_close(parts[0], parts[1], **CLOSE)
        assert not torch.allclose(parts[0], parts[2], atol=1e-2)


@torch.no_grad()
def test_a_sequence_beyond_the_context_is_refused():
    actor, tokens = actor_of(context=3), tokens_of(4, 2)
    done = torch.zeros(4, 2, dtype=torch.bool)
    with pytest.raises(NonFiniteDataError, match="at least 4 tokens, but the decoder's context is 3; give Decoder"):
        stepped(actor, tokens, done, actor.initial_states(2))
    with pytest.raises(NonFiniteDataError, match="context is 3"):
        actor.policy_features({"obs": tokens}, {}, done)
    assert actor_of(context=4).policy_features({"obs": tokens}, {}, done)[0].shape[:2] == (4, 2)


class Bidirectional(nn.Module):
    """A model that is not causal."""

    def __init__(self, num_tokens, context):
        super().__init__()
        self.embed = nn.Embedding(num_tokens, 4)
        self.net = nn.GRU(4, num_tokens, batch_first=True, bidirectional=True)

    def forward(self, tokens):
        return self.net(self.embed(tokens))[0][..., self.embed.num_embeddings:]


class Causal(Bidirectional):
    """A causal model, with dropout."""

    def forward(self, tokens):
        hidden = self.net(self.embed(tokens))[0].unflatten(-1, (2, -1))[..., 0, :]
        return nn.functional.dropout(hidden, training=self.training)


@pytest.mark.parametrize(("module", "message"), [
    (Bidirectional, "the model that module builds is not causal: the last token changes the scores after earlier"),
    (lambda num_tokens: Causal(num_tokens, 4), r"raised TypeError: .*; it must accept the number of tokens \(5\) and"),
    (lambda num_tokens, context: "model", "module of DecoderActor must return a torch.nn.Module, got str"),
])
def test_models_of_the_users_that_cannot_work_are_refused(module, message):
    space = Discrete(5)
    with pytest.raises(ContractError, match=message):
        DecoderActor.create_factory(space, space, context=4, module=module)(device="cpu", seed=1)
    with pytest.raises(ConfigError, match="module must be a function that builds a model, got a model of Causal"):
        DecoderActor.create_factory(space, space, context=4, module=Causal(5, 4))
    actor = DecoderActor.create_factory(space, space, context=4, module=Causal)(device="cpu", seed=1)
    assert actor.decoder.module.training == actor.training


def test_wrong_options_are_refused():
    with pytest.raises(ConfigError, match="width=10 must be a multiple of num_heads=4"):
        actor_of(width=10)
    with pytest.raises(SpaceError, match="DecoderActor needs Discrete observations"):
        DecoderActor.create_factory(Box(0, 1, (2,)), Discrete(3))
    with pytest.raises(SpaceError, match="DecoderActor needs Discrete actions"):
        DecoderActor.create_factory(Discrete(3), Box(0, 1, (2,)))


@pytest.mark.parametrize(("name", "value"), [("num_layers", 1), ("width", 8), ("num_heads", 2), ("context", 12)])
def test_each_option_changes_the_network(name, value):
    space = Discrete(TOKENS)
    default, changed = (DecoderActor.create_factory(space, space, **options)(device="cpu", seed=1)
                        for options in ({}, {name: value}))
    tokens = tokens_of(5, 2)
    done = torch.zeros(5, 2, dtype=torch.bool)
    outputs = [actor.policy_features({"obs": tokens}, {}, done)[0] for actor in (default, changed)]
    assert outputs[0].shape != outputs[1].shape or not torch.equal(*outputs)
