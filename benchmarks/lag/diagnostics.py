"""Numbers of a run of the lag study: possible warnings of a collapse, lengths of prompts, and errors of weights."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from pytorchrl import GRPO
from pytorchrl.agent.data import RolloutData


class Diagnostics:
    """Records numbers of the learner's algorithm.

    Args:
        algorithm: The learner's algorithm, two methods of which are replaced.
        exact: A second algorithm, which computes exact log-probabilities with the parameters of all versions, to
            compare them with those of the rollouts; None: there are no comparisons.

    Attributes:
        rows: Numbers of each update.
        prompts: Number of prompts of the train batches by their number of tokens.
    """

    def __init__(self, algorithm: GRPO, exact: GRPO | None) -> None:
        self.rows: list[dict[str, float]] = []
        self.prompts = Counter[int]()
        self._algorithm, self._exact = algorithm, exact
        self._compute, self._prepare = algorithm.compute_gradients, algorithm.prepare_rollout
        algorithm.compute_gradients = self._recording  # type: ignore[method-assign]
        algorithm.prepare_rollout = self._measuring  # type: ignore[method-assign]
        self._last: Tensor | None = None
        self._kept = dict[int, dict[str, Tensor]]()
        self._sums = Counter[str]()

    def _recording(self, batch: Any) -> Any:
        gradients, info = self._compute(batch)
        gradient, = gradients
        cosine = 0.0 if self._last is None else float(torch.cosine_similarity(gradient, self._last, 0))
        self._last = gradient.clone()
        self.rows.append({
            "return": float(batch.ret[0].mean()), "kl": info["kl"], "entropy": info["entropy"],
            "clipped": info["clip_fraction"], "cosine": cosine, "ess": info["effective_sample_size"]})
        return gradients, info

    def _measuring(self, rollout: RolloutData, sequence_length: int | None = None) -> None:
        self._prepare(rollout, sequence_length)
        self.prompts.update((rollout.valid.int().argmax(0) + 1).tolist())
        if self._exact is not None:
            self._compare(rollout, self._exact)

    def keep(self) -> None:
        """Keep the current parameters, for the comparisons of later rollouts."""
        if self._exact is not None:
            state = self._algorithm.acting_state()
            self._kept.setdefault(self._algorithm.version, {name: part.clone() for name, part in state.items()})

    def _compare(self, rollout: RolloutData, exact: GRPO) -> None:
        """Add up the errors of the log-probabilities, and of the weights, of a rollout's tokens.

        The exact behavior policy of a token has the parameters of the token's version, and the keys and values that
        they compute. The exact weight is that of decoupled PPO: proximal policy over behavior policy.
        """
        assert rollout.versions is not None
        valid, versions = rollout.valid, rollout.versions
        behavior, stored = torch.zeros_like(rollout.reward), rollout.other["logp"]
        for version in versions[valid].unique().tolist():
            exact.load_acting_state(self._kept[version])
            logp, = exact.evaluate_steps(rollout, exact._logp_of, None, "evaluate_actions")
            behavior = torch.where(versions == version, logp, behavior)
        now, = self._algorithm.evaluate_steps(rollout, self._algorithm._logp_of, None, "evaluate_actions")
        lag = (self._algorithm.version - versions).clamp(min=1)
        weight = (now - stored)[valid].exp()
        approximated = ((1.0 - 1.0 / lag) * (now - stored))[valid].exp()
        self._sums.update({
            "tokens": int(valid.sum()), "logp_error": float((stored - behavior)[valid].abs().sum()),
            "weight": float(weight.sum()), "weight_squared": float(weight.square().sum()),
            "a3po_weight": float(approximated.sum()), "a3po_error": float((approximated - weight).abs().sum()),
            "no_weight_error": float((1.0 - weight).abs().sum())})

    def errors(self) -> dict[str, float]:
        """Return means over all tokens; empty if no exact log-probabilities were computed."""
        tokens = self._sums["tokens"]
        return {name: float(f"{total / tokens:.4g}") for name, total in self._sums.items() if name != "tokens"}
