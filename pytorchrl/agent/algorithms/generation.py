"""Generation of sequences while weights change: which weights draw the next token, with which keys and values."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from pytorchrl.agent.actors.decoder import LENGTH, VERSION, DecoderActor
from pytorchrl.agent.data import Obs, TensorActing

ON_NEW_WEIGHTS = ("finish", "keep", "recompute")

Act = Callable[[DecoderActor, Obs, Obs, Tensor, Tensor | None], TensorActing]
"""A function of an actor, observations, memory, starts of episodes and masks that chooses actions."""


class Generation:
    """Chooses tokens with the weights that `on_new_weights` selects for each row.

    - "finish": a sequence is finished with the weights with which it started, which are kept until then.
    - "keep": new weights are used at once, together with the keys and values that older weights have computed.
    - "recompute": new weights are used at once, and they compute the keys and values of the earlier tokens again.

    Args:
        actor: The actor, whose weights change.
        on_new_weights: One of `ON_NEW_WEIGHTS`.

    Attributes:
        tokens_recomputed: Number of tokens whose keys and values were computed again.
    """

    def __init__(self, actor: DecoderActor, on_new_weights: str) -> None:
        self._actor, self._mode = actor, on_new_weights
        self._kept: dict[int, dict[str, Tensor]] = {}
        self._actors: dict[int, DecoderActor] = {}  # with kept weights that were needed
        self._running: Counter[int] = Counter()  # number of running sequences by the version with which they started
        self.tokens_recomputed = 0

    def keep(self, version: int) -> None:
        """Keep a copy of the current weights, whose version is given, if sequences still need them."""
        if self._mode == "finish" and self._running[version]:
            self._kept[version] = {name: part.clone() for name, part in self._actor.state_dict().items()}

    def _actor_of(self, version: int) -> DecoderActor:
        """Return an actor with kept weights; most are never needed, so it is built at its first use."""
        if version not in self._actors:
            self._actors[version] = copy.deepcopy(self._actor)
            self._actors[version].load_state_dict(self._kept[version])
        return self._actors[version]

    def choose(
        self, act: Act, obs: Obs, rhs: Obs, done: Tensor, mask: Tensor | None, version: int,
    ) -> tuple[TensorActing, Tensor]:
        """Choose tokens for E rows.

        Args:
            act: Function that chooses with an actor.
            obs: Observations, leaf -> (E, ...).
            rhs: Memory (E, H) by name.
            done: (E,) bool, whether a row is the first of its episode.
            mask: (E, n) bool, or None.
            version: Version of the current weights.

        Returns:
            The choice, and the version of the weights with which each token was drawn, (E,) int32.
        """
        known = rhs[VERSION].squeeze(1).long() - 1
        versions = torch.full_like(known, version)
        if self._mode == "finish":
            versions = torch.where(done, versions, known)
            self._count(known[done].tolist(), int(done.sum()), version)
        elif self._mode == "recompute" and bool((is_old := (known != version) & ~done).any()):
            rhs = {name: part.clone() for name, part in rhs.items()}
            for name, part in self._actor.recomputed({name: part[is_old] for name, part in rhs.items()}).items():
                rhs[name][is_old] = part
            self.tokens_recomputed += int(rhs[LENGTH][is_old].sum())
        found = sorted(set(versions.tolist()))
        if found == [version]:
            step = act(self._actor, obs, rhs, done, mask)
        else:
            step = _joined(
                [(rows, act(self._actor if own == version else self._actor_of(own), _rows(obs, rows), _rows(rhs, rows),
                            done[rows], None if mask is None else mask[rows]))
                 for own in found for rows in [(versions == own).nonzero().squeeze(1)]], len(done))
        return step._replace(rhs={**step.rhs, VERSION: (versions + 1.0).unsqueeze(1)}), versions.int()

    def _count(self, ended: list[int], num_started: int, version: int) -> None:
        self._running.subtract(number for number in ended if number >= 0)
        self._running[version] += num_started
        for number in [number for number, count in self._running.items() if count <= 0 and number != version]:
            del self._running[number]
            self._kept.pop(number, None)
            self._actors.pop(number, None)


def _rows(values: Obs, rows: Tensor) -> Obs:
    return {name: value[rows] for name, value in values.items()}


def _joined(parts: list[tuple[Tensor, TensorActing]], num_rows: int) -> TensorActing:
    """Return the choices for all rows, given those for disjoint parts of them."""
    order = torch.cat([rows for rows, _ in parts]).argsort()
    assert len(order) == num_rows

    def join(values: list[Tensor]) -> Tensor:
        return torch.cat(values)[order]

    first = parts[0][1]
    return TensorActing(
        join([step.action for _, step in parts]), join([step.clipped_action for _, step in parts]),
        {name: join([step.rhs[name] for _, step in parts]) for name in first.rhs},
        {name: join([step.other[name] for _, step in parts]) for name in first.other})
