"""Compare R2D2 with a step-by-step computation; test its value rescaling and the memory of its actor."""

from __future__ import annotations

import copy
import dataclasses
import math

import gymnasium as gym
import numpy as np
import pytest
import torch

from pytorchrl.agent.actors import OffPolicyActor, QActor
from pytorchrl.agent.algorithms import DQN, R2D2, SAC
from pytorchrl.agent.algorithms.r2d2 import rescale, unrescale
from pytorchrl.agent.data import PREVIOUS, SequenceBatch
from pytorchrl.agent.fit import check_fit
from pytorchrl.agent.storages import PERBuffer, ReplayBuffer, SequenceBuffer
from pytorchrl.errors import ConfigError, NonFiniteDataError
from tests.unit.agent.algorithms.replay_agents import assert_explores
from tests.unit.agent.algorithms.test_replay_losses import with_other_targets

SPACE = gym.spaces.Box(-1, 1, (3,), np.float32)
NUM_ACTIONS, WARM, LENGTH, N_STEP, COUNT = 4, 3, 5, 2, 6
ROWS = WARM + LENGTH + N_STEP


@pytest.mark.parametrize(("x", "h"), [
    (0.0, 0.0), (1.0, math.sqrt(2) - 1 + 1e-3), (3.0, 1.003), (-8.0, -2.008), (99.0, 9.099),
    (1e6, math.sqrt(1e6 + 1) - 1 + 1e3)])
def test_rescaling_on_golden_values(x, h):
    assert float(rescale(torch.tensor(x, dtype=torch.float64))) == pytest.approx(h, rel=1e-12, abs=1e-15)
    assert float(unrescale(torch.tensor(h, dtype=torch.float64))) == pytest.approx(x, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
def test_inverse_rescaling_restores_values(dtype, error):
    """Check that each of the two functions inverts the other.

    This also holds for small float32 values, for which rounding makes the published formula inaccurate.
    """
    size = torch.logspace(-6, 6, 200, dtype=dtype)
    x = torch.cat([-size, torch.zeros(1, dtype=dtype), size])
    torch.testing.assert_close(unrescale(rescale(x)), x, rtol=error, atol=0.0)
    torch.testing.assert_close(rescale(unrescale(x)), x, rtol=error, atol=0.0)


def test_the_inverse_is_the_published_formula():
    x, eps = torch.linspace(-50, 50, 101, dtype=torch.float64), 1e-3
    published = torch.sign(x) * ((((1 + 4 * eps * (x.abs() + 1 + eps)).sqrt() - 1) / (2 * eps)) ** 2 - 1)
    torch.testing.assert_close(unrescale(x), published, rtol=1e-9, atol=1e-10)


def make(net="gru", actor=None, seed=2, **options):
    """Return an algorithm whose target network differs from the online network."""
    built = QActor.create_factory(SPACE, gym.spaces.Discrete(NUM_ACTIONS), **{
        "hidden_sizes": (5,), "recurrent_net": net, "recurrent_size": 6, "dueling": True, **(actor or {})})(seed=seed)
    return with_other_targets(R2D2.create_factory(**{"start_steps": 0, **options})(actor=built, seed=5))


def make_batch(algorithm, burn_in=WARM, masked=False, seed=3):
    """Return random sequences: complete sequences, sequences with a shorter burn-in, and padded sequences."""
    rng = np.random.default_rng(seed)
    rows = burn_in + LENGTH + N_STEP
    num_steps = rng.integers(1, N_STEP + 1, (LENGTH, COUNT))
    valid = np.ones((LENGTH, COUNT), bool)
    for b, steps in enumerate((LENGTH, 1, 3, LENGTH, 2, 4)):
        valid[steps:, b] = False
        num_steps[:, b] = np.minimum(num_steps[:, b], np.maximum(1, steps - np.arange(LENGTH)))
    done = np.zeros((rows, COUNT), bool)
    if burn_in:
        done[0, 0] = done[1, 1] = done[burn_in, 2] = True
    discount = rng.random((LENGTH, COUNT)) * (rng.random((LENGTH, COUNT)) > 0.2)
    mask = rng.random((rows, COUNT, NUM_ACTIONS)) < 0.6
    mask[..., 1] |= ~mask.any(-1)
    floats = {"ret": 3 * rng.normal(size=(LENGTH, COUNT)), "discount": discount, "weight": rng.random(COUNT)}
    state = {name: torch.as_tensor(rng.normal(size=(COUNT, zeros.shape[1])).astype(np.float32))
             for name, zeros in algorithm.actor.initial_states(1).items()}
    shows_previous = state.pop(PREVIOUS, None) is not None
    return SequenceBatch(
        obs={"obs": torch.as_tensor(rng.normal(size=(rows, COUNT, 3)).astype(np.float32))}, done=torch.as_tensor(done),
        rhs=state,
        action=torch.as_tensor(rng.integers(0, NUM_ACTIONS, (LENGTH, COUNT))),
        next_row=torch.as_tensor(burn_in + np.arange(LENGTH)[:, None] + num_steps), valid=torch.as_tensor(valid),
        ids=torch.arange(COUNT), burn_in=burn_in, mask=torch.as_tensor(mask) if masked else None,
        num_samples=int(valid.sum()),
        previous=torch.as_tensor(rng.normal(size=(rows, COUNT, NUM_ACTIONS + 1)).astype(np.float32)) if shows_previous
        else None,
        **{name: torch.as_tensor(value.astype(np.float32)) for name, value in floats.items()})


def step_by_step(net, batch, b):
    """Return the Q-values of every row of sequence b, computed step by step, without gradients through the burn-in."""
    state = batch.rhs["q"][b:b + 1]
    found = []
    for row in range(len(batch.done)):
        mask = None if batch.mask is None else batch.mask[row, b:b + 1]
        if row == batch.burn_in:
            state = state.detach()
        previous = None if batch.previous is None else batch.previous[row, b:b + 1]
        q, state = net.unroll({"obs": batch.obs["obs"][row, b:b + 1]}, state, batch.done[row, b:b + 1], mask, None,
                              previous)
        found.append(q[0])
    return found


def brute_force(algorithm, batch):
    """Return the loss, the absolute errors and the gradient of the loss, computed by plain loops."""
    options = algorithm.options
    net, target_net = (copy.deepcopy(part).requires_grad_(part is algorithm.actor.q)
                       for part in (algorithm.actor.q, algorithm.targets["q"]))
    h = rescale if options.value_rescaling else lambda x: x
    inverse = unrescale if options.value_rescaling else lambda x: x
    total, count, errors = torch.zeros(()), 0, np.zeros((LENGTH, COUNT))
    for b in range(COUNT):
        online, target = step_by_step(net, batch, b), step_by_step(target_net, batch, b)
        for t in range(LENGTH):
            if not batch.valid[t, b]:
                continue
            row = int(batch.next_row[t, b])
            choosing = (online if options.double else target)[row].tolist()
            allowed = range(NUM_ACTIONS) if batch.mask is None else [a for a in range(NUM_ACTIONS)
                                                                     if batch.mask[row, b, a]]
            best = max(allowed, key=lambda action, choosing=choosing: choosing[action])
            value = inverse(target[row][best].detach())
            y = h(float(batch.ret[t, b]) + float(batch.discount[t, b]) * value)
            delta = y - online[batch.burn_in + t][batch.action[t, b]]
            size = delta.abs()
            loss = delta**2 / 2 if options.loss == "mse" or float(size.detach()) <= 1 else size - 0.5
            total, count = total + float(batch.weight[b]) * loss, count + 1
            errors[t, b] = float(size.detach())
    (total / count).backward()
    return float(total.detach() / count), errors, torch.cat([p.grad.reshape(-1) for p in net.parameters()])


@pytest.mark.every(3)
@pytest.mark.parametrize("net", ["gru", "lstm"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("options", [
    {}, {"double": False}, {"value_rescaling": False}, {"loss": "huber"}, {"actor": {"prev_action_reward": True}}],
    ids=str)
def test_loss_gradient_and_errors_match_a_step_by_step_computation(net, masked, options):
    algorithm = make(net, **options)
    for burn_in in (WARM, 0):
        batch = make_batch(algorithm, burn_in, masked)
        expected_loss, expected_errors, expected_gradient = brute_force(algorithm, batch)
        (gradient,), info = algorithm.compute_gradients(batch)
        assert info["loss"] == pytest.approx(expected_loss, rel=1e-5)
        np.testing.assert_allclose(info["errors"], expected_errors, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-4, atol=1e-6)


def test_steps_outside_of_a_sequence_do_not_affect_the_gradient():
    algorithm = make()
    batch = make_batch(algorithm)
    batch.done[:] = False
    batch.done[1] = True
    batch.valid[:] = torch.arange(LENGTH)[:, None] < 3
    batch.next_row.clamp_(max=WARM + 3)
    first, info = algorithm.compute_gradients(batch)
    first = first[0].clone()
    batch.obs["obs"][0], batch.rhs["q"][:] = 7.0, 5.0
    batch.obs["obs"][WARM + 4:], batch.ret[3:] = -9.0, 100.0
    second, other = algorithm.compute_gradients(batch)
    assert torch.equal(first, second[0])
    assert torch.equal(info["errors"], other["errors"])


def test_a_stored_state_affects_the_gradient():
    algorithm = make()
    batch = make_batch(algorithm)
    first = algorithm.compute_gradients(batch)[0][0].clone()
    batch.rhs["q"] += 1.0
    assert not torch.equal(first, algorithm.compute_gradients(batch)[0][0])


def rows_of(count=COUNT, seed=0):
    return {"obs": np.random.default_rng(seed).normal(size=(count, 3)).astype(np.float32)}


@pytest.mark.parametrize("net", ["gru", "lstm"])
def test_the_memory_sees_every_observation_for_any_choice_of_actions(net):
    """Check that memory states equal those of an unrolled sequence, whether actions are random or greedy."""
    states = []
    for options in ({"start_steps": 100}, {"epsilon_per_worker": False, "final_epsilon": 1.0},
                    {"epsilon_per_worker": False, "initial_epsilon": 0.0, "final_epsilon": 0.0}):
        algorithm = make(net, **options)
        rhs = {name: state.numpy() for name, state in algorithm.actor.initial_states(COUNT).items()}
        done = np.ones(COUNT, bool)
        for t in range(6):
            acting = algorithm.acting_step(rows_of(seed=t), rhs, done)
            rhs, done = acting.rhs, np.arange(COUNT) == t
        states.append(rhs["q"])
    assert np.array_equal(states[0], states[1])
    assert np.array_equal(states[0], states[2])
    obs = {"obs": torch.as_tensor(np.stack([rows_of(seed=t)["obs"] for t in range(6)]))}
    done = torch.ones(6, COUNT, dtype=torch.bool)
    done[1:] = torch.arange(COUNT) == torch.arange(5)[:, None]
    with torch.no_grad():
        scores, after = algorithm.actor.unroll(obs, algorithm.actor.initial_states(COUNT), done)
    np.testing.assert_allclose(after["q"], states[0], atol=1e-6)
    assert acting.action.tolist() == scores[-1].argmax(-1).tolist()


def test_acting_keeps_its_input_and_obeys_the_mask():
    algorithm = make(initial_epsilon=0.5, final_epsilon=0.5, epsilon_per_worker=False)
    rhs = {"q": np.ones((COUNT, 6), np.float32)}
    mask = np.zeros((COUNT, NUM_ACTIONS), bool)
    mask[np.arange(COUNT), np.arange(COUNT) % NUM_ACTIONS] = True
    for _ in range(5):
        assert algorithm.acting_step(rows_of(), rhs, np.zeros(COUNT, bool), mask=mask).action.tolist() == [
            e % NUM_ACTIONS for e in range(COUNT)]
    assert (rhs["q"] == 1.0).all()
    with pytest.raises(NonFiniteDataError):
        algorithm.acting_step(rows_of(), rhs, np.zeros(COUNT, bool), mask=np.zeros_like(mask))


def test_deterministic_actions_are_greedy_even_with_noisy_networks():
    algorithm = make(actor={"noisy": True}, start_steps=1000, test_epsilon=0.0)
    rhs, done = {"q": np.ones((COUNT, 6), np.float32)}, np.zeros(COUNT, bool)
    with torch.no_grad():
        for parameter in algorithm.actor.q.parameters():  # enlarge weights, so that noise would change actions
            parameter.mul_(3.0)
    scores, _ = algorithm.actor.unroll(
        {"obs": torch.as_tensor(rows_of()["obs"])}, {"q": torch.ones(COUNT, 6)}, torch.zeros(COUNT, dtype=torch.bool))
    best = scores.argmax(-1).tolist()
    before = algorithm.generator.get_state()
    for _ in range(20):
        assert algorithm.acting_step(rows_of(), rhs, done, deterministic=True).action.tolist() == best
    assert torch.equal(algorithm.generator.get_state(), before)
    drawn = [algorithm.acting_step(rows_of(), rhs, done).action.tolist() for _ in range(20)]
    assert any(actions != best for actions in drawn)


def test_epsilon_depends_on_the_collector_and_is_zero_in_evaluation():
    algorithm = make()
    algorithm.take_place(0, 1)
    rhs, done = {"q": np.zeros((1, 6), np.float32)}, np.ones(1, bool)
    greedy = algorithm.acting_step(rows_of(1), rhs, done, deterministic=True).action[0]
    share = np.mean([algorithm.acting_step(rows_of(1), rhs, done).action[0] == greedy for _ in range(2000)])
    assert share == pytest.approx(1 - 0.4 * 3 / 4, abs=0.05)


@pytest.mark.parametrize("start_steps", [0, 10**6])
def test_each_environment_explores_by_itself_within_its_mask(start_steps):
    algorithm = make(initial_epsilon=0.8, final_epsilon=0.8, epsilon_per_worker=False, start_steps=start_steps)
    allowed = np.ones((COUNT, NUM_ACTIONS), bool)
    allowed[np.arange(COUNT), np.arange(COUNT) % NUM_ACTIONS] = False
    rhs, done = {"q": np.ones((COUNT, 6), np.float32)}, np.zeros(COUNT, bool)
    greedy = algorithm.acting_step(rows_of(), rhs, done, deterministic=True, mask=allowed).action
    actions = np.stack([algorithm.acting_step(rows_of(), rhs, done, mask=allowed).action for _ in range(600)])
    assert_explores(actions, greedy, 1.0 if start_steps else 0.8, allowed)


def test_target_networks_change_only_at_their_interval():
    algorithm = make(target_update_interval=3)
    batch = make_batch(algorithm)
    before = copy.deepcopy(algorithm.targets["q"].state_dict())
    for update in range(1, 4):
        algorithm.apply_gradients(algorithm.compute_gradients(batch)[0])
        same = all(torch.equal(value, before[name]) for name, value in algorithm.targets["q"].state_dict().items())
        assert same == (update < 3)
    assert all(torch.equal(a, b) for a, b in zip(
        algorithm.targets["q"].parameters(), algorithm.actor.q.parameters(), strict=True))


def test_noise_and_normalized_observations_affect_the_loss():
    plain, noisy = make(), make(actor={"noisy": True})
    batch = make_batch(plain)
    assert plain.compute_gradients(batch)[1]["loss"] == plain.compute_gradients(batch)[1]["loss"]
    assert noisy.compute_gradients(batch)[1]["loss"] != noisy.compute_gradients(batch)[1]["loss"]
    normalized = make(actor={"normalize_obs": True})
    normalized.actor.merge_moments({"obs/obs": (torch.tensor(9.0), torch.full((3,), 2.0), torch.full((3,), 80.0))})
    assert normalized.compute_gradients(batch)[1]["loss"] != plain.compute_gradients(batch)[1]["loss"]


def test_a_restored_state_gives_equal_gradients():
    one, other = make(), make(seed=8)
    batch = make_batch(one)
    one.apply_gradients(one.compute_gradients(batch)[0])
    other.load_state_dict(one.state_dict())
    assert torch.equal(one.compute_gradients(batch)[0][0], other.compute_gradients(batch)[0][0])


def test_defaults_match_the_paper():
    options = R2D2.create_factory().options
    expected = {"lr": 1e-4, "adam_eps": 1e-3, "gamma": 0.997, "mini_batch_size": 64, "polyak": 0.0,
                "target_update_interval": 2500,
                "value_rescaling": True, "max_grad_norm": 80.0, "epsilon_per_worker": True, "double": True}
    assert {name: getattr(options, name) for name in expected} == expected


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(R2D2.Options)])
def test_every_option_is_tested_for_dqn_or_here(name):
    assert name in {field.name for field in dataclasses.fields(DQN.Options)} | {"value_rescaling"}


def test_algorithms_storages_and_actors_that_do_not_fit_are_refused():
    discrete = gym.spaces.Discrete(NUM_ACTIONS)
    plain, recurrent = (QActor.create_factory(SPACE, discrete, recurrent_net=net) for net in (None, "gru"))
    with pytest.raises(ConfigError, match=r"R2D2 needs QActor with recurrent_net='gru' or 'lstm', got "
                                          r"recurrent_net=None; .*: .*DQN"):
        R2D2.create_factory()(actor=plain(seed=1), seed=1)
    with pytest.raises(ConfigError, match=r"DQN needs QActor with recurrent_net=None, got recurrent_net='gru'; "
                                          r"algorithms for this QActor: .*R2D2"):
        DQN.create_factory()(actor=recurrent(seed=1), seed=1)
    policy = OffPolicyActor.create_factory(SPACE, discrete)
    for cls in (ReplayBuffer, PERBuffer):
        with pytest.raises(ConfigError, match=f"R2D2 learns from sequences .*, but {cls.__name__} provides single .*"
                                              "for R2D2: .*SequenceBuffer"):
            check_fit(R2D2.create_factory(), recurrent, cls.create_factory(100))
        check_fit(DQN.create_factory(), plain, cls.create_factory(100))
    with pytest.raises(ConfigError, match=r"SAC learns from single .*, but SequenceBuffer provides seq.*; storages for "
                                          r"SAC: .*PERBuffer.*Repl"):
        check_fit(SAC.create_factory(), policy, SequenceBuffer.create_factory(1000))
    with pytest.raises(ConfigError, match="recurrent_size=8 needs recurrent_net"):
        QActor.create_factory(SPACE, discrete, recurrent_size=8)
    assert OffPolicyActor.create_factory(SPACE, discrete)(seed=1).initial_states(3) == {}


def test_memories_have_orthogonal_weights_and_the_requested_sizes():
    actor = make("lstm").actor
    assert actor.is_recurrent
    assert actor.initial_states(5)["q"].shape == (5, 12)
    weight = actor.q.trunk.memory.recurrence.weight
    torch.testing.assert_close(weight.T @ weight, torch.eye(6), rtol=0.0, atol=1e-5)
    assert not actor.q.trunk.memory.recurrence.bias.any()


@pytest.mark.parametrize("net", ["gru", "lstm"])
def test_mixed_precision_supports_memory(net):
    plain, mixed = make(net), make(net, mixed_precision=True)
    (expected, _), (gradients, info) = (
        algorithm.compute_gradients(make_batch(algorithm)) for algorithm in (plain, mixed))
    assert info["errors"].dtype == gradients[0].dtype == torch.float32
    assert not torch.equal(gradients[0], expected[0])
    assert float(torch.linalg.vector_norm(gradients[0] - expected[0])) < 0.05 * float(torch.linalg.vector_norm(
        expected[0]))
