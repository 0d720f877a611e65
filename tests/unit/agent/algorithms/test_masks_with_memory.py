"""Test action masks together with memory, in on-policy algorithms and in R2D2."""

from __future__ import annotations

import pytest
import torch

from pytorchrl import train
from pytorchrl.agent.algorithms import A2C, APPO, IMPALA, PPO, R2D2
from tests.unit.agent.algorithms.conftest import MadeUpSteps, build_parts, collect_rollout
from tests.unit.envs.memory_tasks import MaskedRecall

ON_POLICY = {"ppo": PPO, "a2c": A2C, "impala": IMPALA, "appo": APPO}


def batches_of(cls, net, length, next_step, num_batches=2):
    parts = build_parts(cls, num_envs=6, size=12, actor={"recurrent_net": net, "recurrent_size": 5},
                        storage={"sequence_length": length})
    rollout = collect_rollout(parts, MadeUpSteps(6, masked=True, next_step=next_step))
    parts.storage.insert_data_slice([rollout])
    parts.storage.before_gradients()
    return parts, rollout, list(parts.storage.generate_batches(num_batches))


@pytest.mark.every(3)
@pytest.mark.parametrize("next_step", [False, True])
@pytest.mark.parametrize("length", [None, 5])
@pytest.mark.parametrize("net", ["gru", "lstm"])
@pytest.mark.parametrize("cls", ON_POLICY.values())
def test_forbidden_actions_have_probability_0_in_every_step_of_a_sequence(cls, net, length, next_step):
    parts, rollout, batches = batches_of(cls, net, length, next_step)
    assert not rollout.mask.all()
    for batch in batches:
        assert batch.mask.shape == (*batch.action.shape, 2)
        probabilities = torch.stack([
            parts.actor.evaluate(batch.obs, batch.rhs, batch.done, torch.full_like(batch.action, action),
                                 batch.mask)[0].exp() for action in range(2)], -1)
        assert not probabilities[~batch.mask].any()
        torch.testing.assert_close(probabilities.sum(-1), torch.ones(batch.action.shape))
        allowed = batch.mask.gather(-1, batch.action.unsqueeze(-1)).squeeze(-1)
        assert allowed[batch.valid].all()


@pytest.mark.every(3)
@pytest.mark.parametrize("next_step", [False, True])
@pytest.mark.parametrize("length", [None, 5])
@pytest.mark.parametrize("net", ["gru", "lstm"])
@pytest.mark.parametrize("cls", ON_POLICY.values())
def test_the_ratio_of_masked_sequences_is_1_before_the_first_update(cls, net, length, next_step):
    """Check that a sequence unrolled from its stored memory gives the probabilities with which its actions were drawn.

    The entropies must be those of the allowed actions, too: a step that allows one action has none.
    """
    parts, _, batches = batches_of(cls, net, length, next_step)
    for batch in batches:
        logp, entropy, _ = parts.actor.evaluate(batch.obs, batch.rhs, batch.done, batch.action, batch.mask)
        ratio = (logp - batch.logp).exp()
        torch.testing.assert_close(ratio[batch.valid], torch.ones(batch.num_samples), rtol=0.0, atol=1e-6)
        is_forced = batch.valid & (batch.mask.sum(-1) == 1)
        assert is_forced.any()
        assert not entropy[is_forced].any()
        assert (entropy[batch.valid & ~is_forced] > 0).all()


SMALL = {"env_kwargs": {"num_cues": 4, "delay": 3}, "hidden_sizes": (6,), "recurrent_size": 5, "seed": 2,
         "progress": False}
REPLAY = {"num_envs": 2, "num_steps": 4, "replay_size": 64, "start_steps": 16, "update_every": 8, "num_updates": 1,
          "mini_batch_size": 6, "length": 3, "burn_in": 2, "period": 1, "n_step": 2, "dueling": True}


@pytest.mark.parametrize("kind", ["sequence", "batch"])
def test_targets_of_r2d2_choose_among_the_actions_that_the_environment_allows(monkeypatch, kind):
    """Compare the targets with those computed by loops, from the masks that the environment has returned.

    The observations show neither the mask nor the step, so each is found by a number that the environment adds.
    """
    masks, batches = {}, []

    class Numbered(MaskedRecall):
        def _observation(self, shown):
            obs = super()._observation(shown)
            self.count = getattr(self, "count", self.np_random.integers(2**20)) + 1
            obs[0] += self.count  # the network sees large numbers, so its values differ much between steps
            return obs

        def _draw_mask(self):
            mask = super()._draw_mask()
            masks[self.count] = mask.copy()
            return mask

    found = R2D2._targets

    def recorded(self, batch, scores, next_scores):
        targets = found(self, batch, scores, next_scores)
        batches.append((batch, scores.detach().clone(), next_scores.clone(), targets))
        return targets

    monkeypatch.setattr(R2D2, "_targets", recorded)
    options = {name: value for name, value in REPLAY.items() if kind == "sequence" or name not in (
        "length", "burn_in", "period")}
    train("r2d2", Numbered, target_steps=48, recurrent_net="gru", value_rescaling=False, kind=None if kind == "sequence"
          else "batch", **SMALL, **options)
    assert len(batches) >= 4
    choices = 0
    for batch, scores, next_scores, targets in batches:
        for t, b in batch.valid.nonzero().tolist():
            row = int(batch.next_row[t, b])
            own, at = masks[round(float(batch.obs["obs"][row, b, 0]))], row - batch.burn_in
            best = max((a for a in range(4) if own[a]), key=lambda a: float(scores[at, b, a]))
            choices += int(scores[at, b].argmax()) != best
            expected = float(batch.ret[t, b]) + float(batch.discount[t, b]) * float(next_scores[at, b, best])
            assert float(targets[t, b]) == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert choices > 20  # the mask has changed the action of the target
