"""Wrong calls of token tasks, each with the calls that its error asks for; see `test_remedies.py`."""

from __future__ import annotations

import json

import numpy as np
import torch

import pytorchrl as prl
from pytorchrl.agent.algorithms.corrections import correction
from pytorchrl.envs.tasks import Copy, SortDigits
from pytorchrl.play.audit import audit, read_rows
from tests.unit.packaging.remedied_calls import BOX, TWO, envs_of


def token_envs(vec_env_size=8, **options):
    return prl.TokenEnv.create_factory(SortDigits, {}, vec_env_size, **{"group_size": 4, **options})


def tokens_parts(actor=None, storage=None, algorithm=None):
    """Return the algorithm, the actor and the storage of a token task."""
    envs = token_envs()
    return (prl.GRPO.create_factory(**(algorithm or {})), prl.DecoderActor.create_factory(
        envs.observation_space, envs.action_space, **{"context": 9, **(actor or {})}),
        prl.GroupBuffer.create_factory(**(storage or {})))


def tokens(microbatch_size=None, envs=None, **options):
    """Make one update on a token task."""
    built = prl.Scheme(*tokens_parts(**options), token_envs(**(envs or {})), seed=1, microbatch_size=microbatch_size)
    try:
        built.step()
    finally:
        built.stop()


class Causal(torch.nn.Module):
    """A model of tokens."""

    def __init__(self, num_tokens, context):
        super().__init__()
        self.embed, self.net = torch.nn.Embedding(num_tokens, 8), torch.nn.GRU(8, num_tokens, batch_first=True)

    def forward(self, tokens):
        return self.net(self.embed(tokens))[0]


class Bidirectional(Causal):
    """A model that is not causal."""

    def forward(self, tokens):
        return super().forward(tokens.flip(1)).flip(1)


MODULE = {"module": Causal}


def with_values():
    """Make one update of PPO on a token task, with a model of tokens of the user's."""
    envs = token_envs()
    actor = prl.DecoderActor.create_factory(envs.observation_space, envs.action_space, context=9, **MODULE)
    built = prl.Scheme(prl.PPO.create_factory(), actor, prl.GAEBuffer.create_factory(12), envs, seed=1)
    try:
        built.step()
    finally:
        built.stop()


def infer_centrally(inference="central", **storage):
    """Make one update with two workers whose sequences may be cancelled."""
    built = prl.Scheme(*tokens_parts(storage=storage), token_envs(), seed=1, num_col_workers=2, runtime="simulated",
                       col_communication="async", inference=inference)
    try:
        built.step()
    finally:
        built.stop()


def masked(storage):
    """Start the rows of a storage with action masks."""
    actor = prl.DecoderActor.create_factory(TWO, TWO, width=8)(device="cpu", seed=1)
    algorithm = prl.GRPO.create_factory()(device="cpu", actor=actor, seed=1)
    rows = storage(device="cpu", actor=actor, algorithm=algorithm, num_envs=2, seed=1)
    rows.start({"obs": np.zeros(2, np.int64)}, np.ones((2, 2), bool))


def audited(folder, *rows):
    """Read rows that were logged."""
    path = folder / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return read_rows(path)


def token_calls(folder):
    """Return tuples: a wrong call, and the calls for which its error asks."""
    row = {"trainer_logprobs": [-1.0], "inference_logprobs": [-1.0], "advantages": 1.0}
    return [
        (with_values, lambda: tokens(actor=MODULE)),
        (lambda: tokens(actor=MODULE, algorithm={"on_new_weights": "keep"}), lambda: tokens(actor=MODULE),
         lambda: tokens(actor=MODULE, algorithm={"on_new_weights": "recompute"}),
         lambda: tokens(algorithm={"on_new_weights": "keep"})),
        (lambda: tokens(actor={"module": Causal(11, 9)}), lambda: tokens(actor=MODULE)),
        (lambda: tokens(actor={"module": lambda: Causal(11, 9)}), lambda: tokens(actor=MODULE)),
        (lambda: tokens(actor={"module": Bidirectional}), lambda: tokens(actor=MODULE)),
        (lambda: audited(folder), lambda: audited(folder, row)),
        (lambda: audited(folder, {**row, "log_probs": [-1.0]}), lambda: audited(folder, row)),
        (lambda: infer_centrally(cancels_unfinished=True), infer_centrally,
         lambda: infer_centrally("worker", cancels_unfinished=True)),
        (lambda: tokens(actor={"context": 6}), lambda: tokens(actor={"context": 9})),
        (lambda: prl.DecoderActor.create_factory(BOX, TWO),
         lambda: prl.DecoderActor.create_factory(token_envs().observation_space, token_envs().action_space)),
        (lambda: prl.GRPO.create_factory(mini_batch_size=8), lambda: prl.GRPO.create_factory(num_mini_batch=8)),
        (lambda: prl.PPO.create_factory(correction="gspo"), lambda: prl.PPO.create_factory(correction="tis"),
         lambda: prl.GRPO.create_factory(correction="gspo")),
        (lambda: tokens(envs={"vec_env_size": 6}), lambda: tokens(envs={"vec_env_size": 8}),
         lambda: tokens(envs={"vec_env_size": 6, "waits": False})),
        (lambda: tokens(storage={"group_size": 8}), lambda: tokens(storage={"group_size": 4})),
        (lambda: tokens(algorithm={"correction": "m2po"}, microbatch_size=9),
         lambda: tokens(algorithm={"correction": "m2po"})),
        (lambda: audit(audited(folder, {**row, "mask": [0]})), lambda: audit(audited(folder, {**row, "mask": [1]}))),
        (lambda: correction("wide", clip_param=0.4), lambda: tokens(algorithm={"clip_param": 0.4})),
        (lambda: Copy(tail=0.01), lambda: Copy(tail=0.1)),
        (lambda: prl.Scheme(*tokens_parts(), train_envs_factory=envs_of()), tokens),
        (lambda: masked(prl.GroupBuffer.create_factory(1, group_size=2)),
         lambda: masked(prl.GAEBuffer.create_factory(4))),
    ]
