"""Test which weights draw the tokens of a sequence if weights change while it grows; compared with single sequences."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from gymnasium.spaces import Discrete

from pytorchrl.agent.actors import DecoderActor
from pytorchrl.agent.algorithms import GRPO

TOKENS, ROWS = 6, 5
CLOSE = {"rtol": 0.0, "atol": 1e-5}


class Run:
    """Rows of tokens that an algorithm draws, while the test changes its weights and ends sequences."""

    def __init__(self, mode):
        space = Discrete(TOKENS)
        actor = DecoderActor.create_factory(space, space, context=16, width=8)(device="cpu", seed=1)
        self.algorithm = GRPO.create_factory(on_new_weights=mode)(device="cpu", actor=actor, seed=1)
        self.weights = {}
        self.change(0)
        self.rhs = {name: part.numpy() for name, part in actor.initial_states(ROWS).items()}
        self.tokens = np.arange(ROWS) % TOKENS
        self.done = np.ones(ROWS, bool)
        self.sequences = [[] for _ in range(ROWS)]
        self.ended = []

    def change(self, version):
        """Replace the weights by random ones."""
        generator = torch.Generator().manual_seed(version)
        state = {name: torch.randn(value.shape, generator=generator) * 0.3
                 for name, value in self.algorithm.acting_state().items()}
        self.algorithm.load_acting_state(state)
        self.algorithm.version = version
        self.weights[version] = copy.deepcopy(self.algorithm.actor)

    def step(self, ends=()):
        """Draw one token for each row; the sequences of the rows `ends` end with it."""
        acting = self.algorithm.acting_step({"obs": self.tokens}, self.rhs, self.done)
        for row in range(ROWS):
            if self.done[row]:
                self.sequences[row] = []
            self.sequences[row].append((
                int(self.tokens[row]), int(acting.action[row]), float(acting.other["logp"][row]),
                int(acting.other["version"][row])))
        self.ended += [self.sequences[row] for row in ends]
        self.tokens, self.rhs = acting.action.copy(), acting.rhs
        self.done = np.isin(np.arange(ROWS), ends)


def play(mode, seed=0):
    """Return a run in which weights change and sequences end at random, and its sequences."""
    run, rng = Run(mode), np.random.default_rng(seed)
    version = 0
    for t in range(60):
        if rng.random() < 0.3:
            version += int(rng.integers(1, 3))
            run.change(version)
        lengths = np.array([0 if first else len(rows) for first, rows in zip(run.done, run.sequences, strict=True)])
        run.step(np.flatnonzero((rng.random(ROWS) < 0.15) | (lengths >= 14)).tolist() if t else ())
    return run, run.ended


def logp_of(actor, sequence, upto):
    """Return the log-probability of step `upto` of a sequence, computed by one actor with a full pass."""
    tokens = torch.tensor([[row[0]] for row in sequence[:upto + 1]])
    done = torch.zeros(upto + 1, 1, dtype=torch.bool)
    done[0] = True
    with torch.no_grad():
        actions = torch.tensor([[row[1]] for row in sequence[:upto + 1]])
        return float(actor.evaluate_actions({"obs": tokens}, {}, done, actions)[0][upto, 0])


def test_finish_draws_a_whole_sequence_with_the_weights_of_its_start():
    run, sequences = play("finish")
    assert len(sequences) > 20
    for sequence in sequences:
        version, = {row[3] for row in sequence}
        for t, row in enumerate(sequence):
            assert row[2] == pytest.approx(logp_of(run.weights[version], sequence, t), abs=1e-5)
    generation = run.algorithm._generation
    running = {rows[0][3] for rows in run.sequences}
    assert set(generation._kept) <= running | {run.algorithm.version}  # older weights have been released
    assert len({row[0][3] for row in sequences}) > 5


def test_recompute_draws_each_token_as_if_the_whole_sequence_had_the_newest_weights():
    run, sequences = play("recompute")
    changed = [sequence for sequence in sequences if len({row[3] for row in sequence}) > 1]
    assert len(changed) > 10
    for sequence in changed:
        for t, row in enumerate(sequence):
            assert row[2] == pytest.approx(logp_of(run.weights[row[3]], sequence, t), abs=1e-5)
    assert run.algorithm._generation.tokens_recomputed > 0


def test_keep_uses_the_keys_and_values_that_older_weights_have_computed():
    run, sequences = play("keep")
    changed = [sequence for sequence in sequences if len({row[3] for row in sequence}) > 1]
    assert len(changed) > 10
    differences = []
    for sequence in changed:
        rhs = run.algorithm.actor.initial_states(1)
        for t, (token, action, logp, version) in enumerate(sequence):
            actor = run.weights[version]
            with torch.no_grad():
                found, _, _, rhs = actor.evaluate_actions(
                    {"obs": torch.tensor([token])}, rhs, torch.tensor([t == 0]), torch.tensor([action]))
            assert logp == pytest.approx(float(found), abs=1e-5)
            differences.append(abs(logp - logp_of(actor, sequence, t)))
    assert max(differences) > 0.01  # a full pass with the newest weights finds something else
    assert run.algorithm._generation.tokens_recomputed == 0


@pytest.mark.parametrize("mode", ["finish", "keep", "recompute"])
def test_without_new_weights_all_modes_draw_the_same_tokens(mode):
    run, reference = Run(mode), Run("keep")
    for t in range(10):
        for each in (run, reference):
            each.step([t % ROWS] if t else [])
    assert run.sequences == reference.sequences


def test_weights_are_kept_only_for_running_sequences():
    run = Run("finish")
    run.step()
    run.change(1)
    generation = run.algorithm._generation
    assert set(generation._kept) == {0}
    assert not generation._actors
    run.step()
    assert set(generation._actors) == {0}
    run.step(range(ROWS))
    run.step()
    assert not generation._kept
    assert not generation._actors
    run.change(2)
    run.change(3)  # no sequence has started with version 2
    assert set(run.algorithm._generation._kept) == {1}


def test_choices_depend_on_the_row_and_not_on_the_order_of_versions():
    """The best tokens of rows with different weights equal those of each row alone."""
    run = Run("finish")
    run.step([1, 3])
    run.change(1)
    inputs = {"obs": run.tokens}, run.rhs, run.done
    joint = run.algorithm.acting_step(*inputs, deterministic=True)
    for row in range(ROWS):
        actor = run.weights[1 if run.done[row] else 0]
        with torch.no_grad():
            memory = {name: torch.from_numpy(part[row:row + 1]) * (not run.done[row]) for name, part in run.rhs.items()}
            own, _ = actor.best_actions({"obs": torch.from_numpy(run.tokens[row:row + 1])}, memory, None)
        assert joint.action[row] == int(own)
        assert joint.other["version"][row] == (1 if run.done[row] else 0)
