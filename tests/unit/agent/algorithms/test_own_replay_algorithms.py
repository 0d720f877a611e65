"""Test user-defined replay algorithms, and the errors that invalid algorithms raise."""

from __future__ import annotations

from dataclasses import dataclass

import gymnasium as gym
import numpy as np
import pytest
import torch

from pytorchrl import DQN, SAC, OffPolicyActor, QActor
from pytorchrl.agent.algorithms import ReplayAlgorithm
from pytorchrl.agent.data import ReplayBatch
from pytorchrl.agent.options import option
from pytorchrl.agent.schedules import Schedule
from pytorchrl.errors import ContractError

SPACE = gym.spaces.Box(-1, 1, (4,), np.float32)
SIZE = 16


def make(cls, actor=QActor, space=None, **options):
    space = space or gym.spaces.Discrete(3)
    made = actor.create_factory(SPACE, space, hidden_sizes=(8,))(seed=0)
    return cls.create_factory(**options)(actor=made, seed=0)


def batch_of(seed=0):
    rng = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(shape, generator=rng)  # noqa: E731
    return ReplayBatch(
        obs={"obs": normal(SIZE, 4)}, action=torch.randint(3, (SIZE,), generator=rng), ret=normal(SIZE),
        discount=torch.full((SIZE,), 0.9), next_obs={"obs": normal(SIZE, 4)}, weight=torch.rand(SIZE, generator=rng),
        ids=torch.arange(SIZE), num_samples=SIZE)


class ExpectedSarsa(DQN):
    """DQN whose target uses the expected Q-value of the next state under the epsilon-greedy policy."""

    def target_values(self, batch):
        scores = self.targets["q"](self.actor.normalize(batch.next_obs))
        epsilon = self.parameters["epsilon"]
        return batch.ret + batch.discount * ((1 - epsilon) * scores.amax(-1) + epsilon * scores.mean(-1))


def test_dqn_learns_the_target_of_a_subclass():
    algorithm, batch = make(ExpectedSarsa, loss="mse", initial_epsilon=0.3), batch_of()
    gradients, info = algorithm.compute_gradients(batch)
    scores = algorithm.actor.q(batch.next_obs).detach()
    target = batch.ret + 0.9 * (0.7 * scores.max(-1).values + 0.3 * scores.mean(-1))
    q = algorithm.actor.q(batch.obs)[torch.arange(SIZE), batch.action]
    loss = (batch.weight * (q - target) ** 2).mean()
    expected = torch.autograd.grad(loss, algorithm.groups["q"].params)
    torch.testing.assert_close(gradients[0], torch.cat([part.reshape(-1) for part in expected]))
    torch.testing.assert_close(info["errors"], (q - target).abs().detach())
    assert info["loss"] == pytest.approx(float(loss.detach()))


@pytest.mark.parametrize(("base", "actor"), [(DQN, QActor), (SAC, OffPolicyActor)])
def test_an_additional_loss_term_is_added_and_reported(base, actor):
    """Check that a conservative Q-learning term is added to the loss, and that `info` contains its mean."""
    class Conservative(base):
        @dataclass(frozen=True, kw_only=True)
        class Options(base.Options):
            cql_alpha: float = option(0.5, help="Weight.", low=0.0, updatable=True)

        def losses(self, batch):
            losses, measures, errors = super().losses(batch)
            scores = self.actor.get_q_scores(batch.obs).view(-1, SIZE, 3)
            gap = scores.logsumexp(-1) - scores[:, torch.arange(SIZE), batch.action]
            losses["q"] = losses["q"] + self.parameters["cql_alpha"] * gap.mean()
            return losses, {**measures, "cql": gap.mean().detach()}, errors

    plain, own, batch = make(base, actor), make(Conservative, actor), batch_of()
    expected = [gradient.clone() for gradient in plain.compute_gradients(batch)[0]]
    gradients, info = own.compute_gradients(batch)
    scores = own.actor.get_q_scores(batch.obs).view(-1, SIZE, 3)
    gap = (scores.exp().sum(-1).log() - scores[:, torch.arange(SIZE), batch.action]).mean()
    parts = torch.autograd.grad(0.5 * gap, own.groups["q"].params)
    expected[0] += torch.cat([part.reshape(-1) for part in parts])
    for gradient, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-6)
    assert info["cql"] == pytest.approx(float(gap.detach()), rel=1e-5)


class Greedy(ReplayAlgorithm):
    """An algorithm that defines only the required members."""

    @dataclass(frozen=True, kw_only=True)
    class Options(ReplayAlgorithm.Options):
        lr: float | Schedule = option(1e-3, help="Learning rate.", low=0.0, updatable=True)

    actor_class, target_groups = QActor, ("q",)

    def choose(self, obs, done, deterministic, mask):
        return self.actor.act(obs, mask)

    def losses(self, batch):
        error = self.actor.get_q_scores(batch.obs, batch.action) - batch.ret
        return {"q": error.square().mean()}, {"error": error.mean().detach()}, error.detach().abs()


def test_defining_choose_and_losses_is_enough():
    algorithm, batch = make(Greedy, start_steps=4), batch_of()
    done = np.zeros(500, bool)
    obs = {"obs": np.zeros((500, 4), np.float32)}
    counts = np.bincount(algorithm.acting_step(obs, {}, done).action)
    assert counts.min() > 100  # actions are uniformly random before `start_steps`
    algorithm.follow_schedules(4, 1000)
    assert len(set(algorithm.acting_step(obs, {}, done).action.tolist())) == 1
    losses = []
    for _ in range(50):
        _, info = algorithm.compute_gradients(batch)
        algorithm.apply_gradients()
        losses.append(info["loss"])
    assert losses[-1] < 0.9 * losses[0]


def returning(losses=lambda found: found, measures=lambda found: found, errors=lambda found: found,
              whole=lambda found: found):
    class MyDQN(DQN):
        def losses(self, batch):
            first, second, third = super().losses(batch)
            return whole((losses(first), measures(second), errors(third)))
    return MyDQN


MISTAKES = {
    "no triple": (returning(whole=lambda found: found[0]), r"MyDQN.losses\(\) returned a dict; expected three values"),
    "a tensor": (returning(losses=lambda found: found["q"]),
                 r"a tensor of shape \(\) and dtype float32 and a dict; expected three"),
    "an unknown group": (returning(losses=lambda found: {**found, "mine": found["q"]}),
                         r"losses of the groups \['mine', 'q'\]; expected a loss for groups of "
                         r"`trained_parameters\(\)`, which are \['q'\]"),
    "one loss a sample": (returning(losses=lambda found: {"q": found["q"].expand(SIZE)}),
                          r"'q' as a tensor of shape \(16,\)"),
    "no gradient": (returning(losses=lambda found: {"q": found["q"].detach()}), "'q' without a gradient"),
    "a measure a sample": (returning(measures=lambda found: {"mine": torch.zeros(SIZE)}),
                           r"'mine' as a tensor of shape \(16,\)"),
    "a measure that is no tensor": (returning(measures=lambda found: {"mine": 1.5}), "'mine' as 1.5"),
    "a taken name": (returning(measures=lambda found: {"loss": found["q"]}),
                     "measures named loss; expected names other than errors, loss, loss_"),
    "a mean of errors": (returning(errors=torch.mean), r"'errors' as a tensor of shape \(\) .*expected a tensor of "
                                                       r"shape \(16,\)"),
}


@pytest.mark.parametrize(("cls", "message"), MISTAKES.values(), ids=MISTAKES.keys())
def test_contract_violations_are_reported(cls, message):
    with pytest.raises(ContractError, match=message):
        make(cls).compute_gradients(batch_of())


def test_targets_of_unknown_groups_are_reported():
    with pytest.raises(ContractError, match=r"MyDQN.target_groups names 'Q'; expected groups of QActor.networks\(\), "
                                            r"which are \['q'\]"):
        make(type("MyDQN", (DQN,), {"target_groups": ("Q",)}))


@pytest.mark.parametrize("target", [torch.zeros(SIZE, 1), torch.zeros(()), torch.zeros(SIZE, dtype=torch.int64), None])
def test_a_wrong_target_is_reported(target):
    cls = type("MyDQN", (DQN,), {"target_values": lambda self, batch: target})
    with pytest.raises(ContractError, match=r"MyDQN.target_values\(\) returned .*; expected a tensor of shape \(16,\)"):
        make(cls).compute_gradients(batch_of())


@pytest.mark.parametrize("action", [None, torch.zeros(2, dtype=torch.int64), np.zeros(5, np.int64)])
def test_a_wrong_result_of_choose_is_reported(action):
    cls = type("MyDQN", (Greedy,), {"choose": lambda self, *args: action})
    with pytest.raises(ContractError, match=r"MyDQN.choose\(\) returned .*; expected a tensor of shape \(5, ...\)"):
        make(cls, start_steps=0).acting_step({"obs": np.zeros((5, 4), np.float32)}, {}, np.zeros(5, bool))


def test_a_missing_method_is_reported():
    with pytest.raises(ContractError, match="Mine does not define choose, losses; define every method that "
                                            "ReplayAlgorithm declares abstract"):
        type("Mine", (ReplayAlgorithm,), {}).create_factory()
