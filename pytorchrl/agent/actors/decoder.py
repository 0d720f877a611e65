"""A decoder (causal transformer) as the network of an actor, whose memory is a cache of keys and values.

B = sequences, L = steps, C = `context`, the largest length of a sequence, D = `width`, N = layers, H = heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import gymnasium as gym
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor, nn
from typing_extensions import override

from pytorchrl.agent.actors.extractors import linear
from pytorchrl.agent.actors.on_policy_actor import OnPolicyActor
from pytorchrl.agent.data import OBS_LEAF, Obs
from pytorchrl.agent.env.guard import describe
from pytorchrl.agent.env.spaces import flatten_action_space, flatten_space
from pytorchrl.agent.options import Options as BaseOptions
from pytorchrl.agent.options import option
from pytorchrl.errors import ContractError, NonFiniteDataError, Problem, SpaceError
from pytorchrl.support.tracebacks import USER_ERRORS, reraise_of_signal
from pytorchrl.support.untyped import OptionValue

CACHE, LENGTH, TOKENS, VERSION = "cache", "length", "tokens", "version"
"""Names of the parts of the memory: keys and values; the number of tokens so far, and these tokens; and 1 + the version
of the weights that computed the newest keys and values, or 0 before the first token."""

_EMBEDDING_STD, _HEAD_GAIN = 0.02, 0.01


class DecoderBlock(nn.Module):
    """A layer of a decoder: attention to earlier tokens, then a network over each token, with layer norm before both.

    Args:
        width: D, the number of features of a token.
        num_heads: Number of heads of the attention.
    """

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.inputs, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values (..., num_heads, D / num_heads) of features (..., D)."""
        query, key, value = self.inputs(self.norms[0](x)).unflatten(-1, (3, self.num_heads, -1)).unbind(-3)
        return query, key, value

    def rest(self, x: Tensor, attended: Tensor) -> Tensor:
        """Return the output (..., D) of the layer, given its input (..., D) and the attended values (..., D)."""
        x = x + self.output(attended)
        return x + self.mlp(self.norms[1](x))


class Decoder(nn.Module):
    """Embeddings of tokens and of their positions, then layers of attention (Radford et al. 2019, section 2.3).

    Args:
        num_tokens: Number of different tokens.
        context: C, the largest number of tokens of a sequence.
        num_layers: Number of layers.
        width: D, the number of features of a token.
        num_heads: Number of heads of the attention.
    """

    def __init__(self, num_tokens: int, context: int, num_layers: int, width: int, num_heads: int) -> None:
        super().__init__()
        self.context, self.num_heads, self.out_features = context, num_heads, width
        self.tokens, self.positions = nn.Embedding(num_tokens, width), nn.Embedding(context, width)
        self._blocks = tuple(DecoderBlock(width, num_heads) for _ in range(num_layers))
        self.blocks = nn.ModuleList(self._blocks)
        self.norm = nn.LayerNorm(width)
        self.cache_shape = (num_layers, 2, num_heads, context, width // num_heads)

    def step(self, tokens: Tensor, cache: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        """Append one token to each of B sequences.

        Args:
            tokens: (B,) int64.
            cache: (B, N, 2, H, C, D / H) keys and values of the earlier tokens; not changed.
            length: (B,) int64 numbers of earlier tokens, below C.

        Returns:
            Features (B, D) of the tokens, and the cache that includes them.
        """
        x = self.tokens(tokens) + self.positions(length)
        cache, rows = cache.clone(), torch.arange(len(tokens), device=tokens.device)
        mask = (torch.arange(self.context, device=tokens.device) <= length.unsqueeze(1))[:, None, None]
        for index, block in enumerate(self._blocks):
            query, key, value = block.heads(x)
            cache[rows, index, 0, :, length] = key.to(cache.dtype)  # bfloat16 with mixed precision
            cache[rows, index, 1, :, length] = value.to(cache.dtype)
            keys, values = cache[:, index].unbind(1)
            attended = F.scaled_dot_product_attention(query.unsqueeze(2).to(cache.dtype), keys, values, mask)
            x = block.rest(x, attended.flatten(1))
        return self.norm(x), cache

    def forward(self, tokens: Tensor, done: Tensor, cache: Tensor | None, length: Tensor | None) -> Tensor:
        """Compute the features of L consecutive tokens of B rows, in parallel.

        Args:
            tokens: (L, B) int64.
            done: (L, B) bool, whether a token is the first of its sequence.
            cache: (B, N, 2, H, C, D / H) keys and values of the tokens before the first row; None: there are none.
            length: (B,) int64, numbers of these tokens; None: 0.

        Returns:
            Features (L, B, D) of the tokens, each of which depends on the earlier tokens of its sequence only.
        """
        steps = torch.arange(len(tokens), device=tokens.device).unsqueeze(1)
        is_plain = cache is None and tokens.is_cpu and not bool(done[1:].any())
        if is_plain:
            place, mask = steps.expand_as(tokens), None
        else:
            before = torch.zeros_like(tokens[0]) if length is None else length
            start = torch.where(done, steps, -1).cummax(0).values  # -1: the sequence began before the first row
            place = torch.where(start < 0, before + steps, steps - start)
            mask = ((start.T[:, :, None] == start.T[:, None]) & (steps >= steps.T)).unsqueeze(1)
            if cache is not None:
                is_before = torch.arange(self.context, device=tokens.device) < before.unsqueeze(1)
                mask = torch.cat(((is_before[:, None] & (start.T < 0).unsqueeze(-1)).unsqueeze(1), mask), -1)
        _check(place, self.context)
        x = self.tokens(tokens) + self.positions(place)
        for index, block in enumerate(self._blocks):
            query, key, value = (part.permute(1, 2, 0, 3) for part in block.heads(x))
            if cache is not None:
                key, value = (torch.cat((cache[:, index, number], new), 2) for number, new in enumerate((key, value)))
            attended = F.scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None)
            x = block.rest(x, attended.permute(2, 0, 1, 3).flatten(2))
        return self.norm(x)

    def keys_and_values(self, tokens: Tensor) -> Tensor:
        """Return the cache (B, N, 2, H, C, D / H) of C tokens, (B, C) int64; tokens after the end do no harm."""
        x = self.tokens(tokens) + self.positions.weight
        parts = []
        for block in self._blocks:
            query, key, value = (part.transpose(1, 2) for part in block.heads(x))
            parts.append(torch.stack((key, value), 1))
            attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
            x = block.rest(x, attended.transpose(1, 2).flatten(2))
        return torch.stack(parts, 1)


def _check(place: Tensor, context: int) -> None:
    """Raise `NonFiniteDataError` if a token is beyond the context; a GPU is not asked, but fails itself."""
    if place.is_cpu and int(place.max()) >= context:
        raise NonFiniteDataError(
            f"a sequence has at least {int(place.max()) + 1} tokens, but the decoder's context is {context}; give "
            "DecoderActor a context as large as prompt and answer")


def _built(build: Callable[..., nn.Module], num_tokens: int, context: int) -> nn.Module:
    """Return the model that a user's function builds.

    Raises:
        ContractError: The function raises an exception, or returns no module.
    """
    try:
        found: object = build(num_tokens, context)
    except USER_ERRORS as failure:
        reraise_of_signal(failure)
        raise ContractError(f"module of DecoderActor raised {describe(failure)}; it must accept the number of tokens "
                            f"({num_tokens}) and the context ({context})") from failure
    if not isinstance(found, nn.Module):
        raise ContractError(f"module of DecoderActor must return a torch.nn.Module, got {type(found).__name__}")
    return found


class OwnDecoder(nn.Module):
    """A causal model of the user's, in the place of a `Decoder`; it has no cache, so each step computes all tokens.

    Args:
        module: The model; see the option `module` of `DecoderActor`.
        num_tokens: Number of different tokens.
        context: C, the largest number of tokens of a sequence.
    """

    cache_shape: tuple[int, ...] = (1,)
    """Shape of an unused part of the memory."""

    def __init__(self, module: nn.Module, num_tokens: int, context: int) -> None:
        super().__init__()
        self.module, self.context, self.out_features = module, context, num_tokens
        self._check_is_causal()

    @torch.no_grad()
    def _check_is_causal(self) -> None:
        """Raise `ContractError` if the scores after earlier tokens depend on the last one."""
        was_training = self.module.training
        parameter = next(self.module.parameters(), torch.empty(0))
        tokens = torch.zeros(1, self.context, dtype=torch.int64, device=parameter.device)
        other = tokens.clone()
        other[0, -1] = self.out_features - 1
        self.module.eval()
        before, after = (self.scores(each)[0, :-1] for each in (tokens, other))
        self.module.train(was_training)
        if not torch.allclose(before, after, atol=1e-4, equal_nan=True):
            raise ContractError("the model that module builds is not causal: the last token changes the scores after "
                                "earlier ones; mask the attention to later tokens, or use a model in one direction")

    def scores(self, tokens: Tensor) -> Tensor:
        """Return scores (B, L, num_tokens) float32 of the tokens after each of the tokens (B, L).

        Raises:
            ContractError: The model returns something else.
        """
        found = self.module(tokens)
        found = getattr(found, "logits", found)
        if not isinstance(found, Tensor) or found.shape != (*tokens.shape, self.out_features):
            raise ContractError(
                f"the module of DecoderActor returned {type(found).__name__} {tuple(getattr(found, 'shape', ()))}; "
                f"expected a tensor of scores {(*tokens.shape, self.out_features)}, or an object with logits")
        return found.float()

    def after(self, written: Tensor, length: Tensor) -> Tensor:
        """Return the scores (B, num_tokens) after `length` + 1 of the tokens (B, C)."""
        rows = torch.arange(len(length), device=length.device)
        return self.scores(written[:, :int(length.max()) + 1])[rows, length]

    def forward(self, tokens: Tensor, done: Tensor, cache: Tensor | None, length: Tensor | None) -> Tensor:
        """Return the scores (L, B, num_tokens) after L consecutive tokens of B rows; see `Decoder.forward`.

        Raises:
            ContractError: A row contains several sequences, or continues one.
        """
        if bool(done[1:].any()) or not bool(done[0].all()):
            raise ContractError("a module of DecoderActor learns from whole sequences only; use GroupBuffer")
        return self.scores(tokens.T).transpose(0, 1)


class DecoderActor(OnPolicyActor):
    """A policy over tokens: a decoder, and linear heads for the next token and for the value.

    The memory of the decoder contains the keys and values of the earlier tokens of each sequence, so each acting step
    computes one token.
    """

    network_options: ClassVar[tuple[str, ...]] = ()
    action_spaces: ClassVar[tuple[type[gym.Space[object]], ...]] = (gym.spaces.Discrete,)
    is_recurrent = True
    is_shared = True

    @dataclass(frozen=True, kw_only=True)
    class Options(BaseOptions):
        """Options of `DecoderActor`."""

        observation_space: OptionValue = option(help="Discrete: the tokens.")
        action_space: OptionValue = option(help="Discrete: the tokens.")
        context: int = option(64, help="Largest number of tokens of a sequence: prompt and answer.", low=1)
        num_layers: int = option(2, help="Layers of the decoder.", low=1)
        width: int = option(32, help="Features of a token.", low=1)
        num_heads: int = option(4, help="Heads of the attention; a divisor of the width.", low=1)
        module: Callable[..., nn.Module] | None = option(
            None, help="Function of the number of tokens and of the context that builds a causal model of your own; it "
                       "takes tokens (B, L), and returns scores (B, L, tokens) or an object with `logits`.")
        checkpoint: str | None = option(None, help="Saved model from which the networks are initialized.")

        @property
        def normalize_obs(self) -> bool:
            """Whether observations are normalized: never, because they are tokens."""
            return False

        def __post_init__(self) -> None:
            """Flatten the spaces; refuse other observations than tokens."""
            super().__post_init__()
            object.__setattr__(self, "observation_space", flatten_space(self.observation_space))
            object.__setattr__(self, "action_space", flatten_action_space(self.action_space))
            if list(self.observation_space) != [OBS_LEAF] or not isinstance(
                    self.observation_space[OBS_LEAF], gym.spaces.Discrete):
                raise SpaceError(f"DecoderActor needs Discrete observations, which are tokens, got "
                                 f"{self.observation_space}; use TokenEnv")

        def contradictions(self) -> Iterator[Problem]:
            """Refuse heads of different sizes."""
            yield from super().contradictions()
            if isinstance(self.module, nn.Module):
                yield Problem(
                    f"module must be a function that builds a model, got a model of {type(self.module).__name__}",
                    "give a function of the number of tokens and of the context that returns it", ("module",))
            if self.module is not None:
                yield from self._without_effect(("num_layers", "width", "num_heads"), "module=None", "module")
            if self.width % self.num_heads:
                yield Problem(f"width={self.width} must be a multiple of num_heads={self.num_heads}",
                              options=("width", "num_heads"))

    @classmethod
    @override
    def has_memory(cls, options: BaseOptions) -> bool | None:
        return True

    @override
    def build_networks(self, generator: torch.Generator) -> None:
        options = self.options
        self.value = None
        if options.module is not None:
            num_tokens = self.distribution.num_outputs
            self.decoder: Decoder | OwnDecoder = OwnDecoder(
                _built(options.module, num_tokens, options.context), num_tokens, options.context)
            self.policy_head = nn.Identity()
            self.value_head = linear(num_tokens, 1, 1.0, generator)
            return
        self.decoder = Decoder(int(options.observation_space[OBS_LEAF].n), options.context, options.num_layers,
                               options.width, options.num_heads)
        for module in self.decoder.modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=_EMBEDDING_STD, generator=generator)
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features ** -0.5, generator=generator)
                nn.init.zeros_(module.bias)
        self.policy_head = linear(options.width, self.distribution.num_outputs, _HEAD_GAIN, generator)
        self.value_head = linear(options.width, 1, 1.0, generator)

    @override
    def initial_states(self, num_envs: int) -> Obs:
        """Return the memory of empty sequences: zeros (E, H) for the cache, and for each of the other parts."""
        sizes = {CACHE: math.prod(self.decoder.cache_shape), LENGTH: 1, TOKENS: self.decoder.context, VERSION: 1}
        return {name: torch.zeros(num_envs, size, device=self.device) for name, size in sizes.items()}

    @override
    def policy_states(self, num_envs: int) -> Obs:
        return self.initial_states(num_envs)

    @override
    def policy_features(self, obs: Obs, rhs: Obs, done: Tensor | None) -> tuple[Tensor, Obs]:
        """Compute the features of tokens; see `OnPolicyActor.policy_features`.

        If `rhs` is empty, no row has earlier tokens. The memory after L > 1 rows is not computed.
        """
        tokens, decoder = obs[OBS_LEAF], self.decoder
        cache, length = None, None
        if rhs:
            cache = rhs[CACHE].view(-1, *decoder.cache_shape)
            length = rhs[LENGTH].squeeze(1).long()
        if tokens.dim() == 2:
            assert done is not None
            return decoder.forward(tokens, done, cache, length), {}
        assert cache is not None
        assert length is not None
        length = length if done is None else length.masked_fill(done, 0)
        _check(length, decoder.context)
        written = rhs[TOKENS].clone()
        written[torch.arange(len(tokens), device=tokens.device), length] = tokens.float()
        if isinstance(decoder, OwnDecoder):
            features = decoder.after(written.long(), length)
        else:
            features, cache = decoder.step(tokens, cache, length)
        return features, {CACHE: cache.flatten(1), LENGTH: (length + 1.0).unsqueeze(1), TOKENS: written,
                          VERSION: rhs[VERSION]}

    def recomputed(self, rhs: Obs) -> Obs:
        """Return memory in which all keys and values are those of the current weights."""
        if isinstance(self.decoder, OwnDecoder):
            return rhs
        return {**rhs, CACHE: self.decoder.keys_and_values(rhs[TOKENS].long()).flatten(1)}
