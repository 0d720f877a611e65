"""Compare V-trace with plain loops in float64; test the storage that computes targets with the learner's weights."""

from __future__ import annotations

import functools

import gymnasium as gym
import numpy as np
import pytest
import torch

from pytorchrl.agent.actors import OnPolicyActor
from pytorchrl.agent.algorithms import APPO, IMPALA, PPO
from pytorchrl.agent.data import RolloutData, Step
from pytorchrl.agent.fit import check_fit
from pytorchrl.agent.storages import GAEBuffer, VTraceBuffer
from pytorchrl.agent.storages import returns
from pytorchrl.agent.storages.returns import gae
from pytorchrl.errors import ConfigError
from tests.conftest import seeds

vtrace = functools.partial(returns.vtrace, rho_bar=1.0, c_bar=1.0, vtrace_lambda=1.0)
GRU = {"recurrent_net": "gru", "recurrent_size": 5}
LSTM_SHARED = {"recurrent_net": "lstm", "recurrent_size": 5, "shared_policy_value_network": True}


def rollout_of(reward, ratio, terminated=None, truncated=None, valid=None, final_index=None):
    """Return a rollout, and the learned policy's log-probabilities, which make the importance ratios equal `ratio`."""
    reward = torch.as_tensor(np.asarray(reward), dtype=torch.float32)
    shape = reward.shape
    flags = [torch.as_tensor(np.zeros(shape, bool) if flag is None else np.asarray(flag))
             for flag in (terminated, truncated)]
    generator = torch.Generator().manual_seed(0)
    logp = -torch.rand(shape, generator=generator)
    rollout = RolloutData(
        obs={}, done=torch.zeros(shape[0] + 1, shape[1], dtype=torch.bool), rhs={}, mask=None,
        action=torch.zeros(shape, dtype=torch.int64), reward=reward, terminated=flags[0], truncated=flags[1],
        valid=torch.as_tensor(np.ones(shape, bool) if valid is None else valid),
        final_index=torch.zeros(0, 2, dtype=torch.int64) if final_index is None else final_index, final_obs={},
        other={"logp": logp})
    return rollout, logp + torch.as_tensor(np.asarray(ratio)).log().float()


def random_case(seed, ends=True):
    """Return a rollout with random ends, gaps and ratios; log-probabilities of the learned policy; and values."""
    rng = np.random.default_rng(seed)
    shape = (int(rng.integers(1, 21)), int(rng.integers(1, 5)))
    terminated = (rng.random(shape) < 0.2) & ends
    truncated = (rng.random(shape) < 0.2) & ~terminated & ends
    has_final = (terminated | truncated) & (rng.random(shape) < 0.5)
    index = torch.as_tensor(np.argwhere(has_final))
    rollout, logp = rollout_of(rng.normal(size=shape), np.exp(rng.normal(size=shape)), terminated, truncated,
                               (rng.random(shape) < 0.9) | (not ends), index)
    value = torch.as_tensor(rng.normal(size=(shape[0] + 1, shape[1])), dtype=torch.float32)
    return rng, rollout, logp, value, torch.as_tensor(rng.normal(size=len(index)), dtype=torch.float32)


def defining_sum(rollout, logp, value, final_value, gamma, rho_bar, c_bar, lam):
    """Return the V-trace target v and the advantage of each transition, as explicit sums over later transitions."""
    finals = {tuple(pair): float(v) for pair, v in zip(rollout.final_index.tolist(), final_value, strict=True)}
    num_steps, num_envs = rollout.reward.shape
    v, advantage = value[:-1].double().numpy().copy(), np.zeros((num_steps, num_envs))
    ratio = (logp.double() - rollout.other["logp"].double()).exp().numpy()

    def following(t, e):
        return 0.0 if rollout.terminated[t, e] else finals.get((t, e), float(value[t + 1, e]))

    def is_end(t, e):
        return bool(rollout.terminated[t, e] or rollout.truncated[t, e])

    for e in range(num_envs):
        for t in range(num_steps):
            factor = 1.0
            for k in range(t, num_steps):
                if not rollout.valid[k, e]:
                    break
                delta = float(rollout.reward[k, e]) + gamma * following(k, e) - float(value[k, e])
                v[t, e] += factor * min(rho_bar, ratio[k, e]) * delta
                if is_end(k, e):
                    break
                factor *= gamma * lam * min(c_bar, ratio[k, e])
        for t in range(num_steps):
            if rollout.valid[t, e]:
                goes_on = t + 1 < num_steps and not is_end(t, e)
                following_v = v[t + 1, e] if goes_on else following(t, e)
                advantage[t, e] = min(rho_bar, ratio[t, e]) * (
                    float(rollout.reward[t, e]) + gamma * following_v - float(value[t, e]))
    return advantage, v


@pytest.mark.parametrize("seed", seeds(12, 40))
def test_vtrace_equals_its_defining_sum_on_random_rollouts(seed):
    rng, *case = random_case(seed)
    gamma, lam = rng.uniform(0.5, 1.0), rng.uniform(0.0, 1.0)
    c_bar, rho_bar = sorted(rng.uniform(0.5, 2.0, 2))
    expected = defining_sum(*case, gamma, rho_bar, c_bar, lam)
    found = vtrace(*case, gamma, rho_bar=rho_bar, c_bar=c_bar, vtrace_lambda=lam)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == np.float32
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6)


def test_vtrace_golden_values():
    rollout, logp = rollout_of([[1.0], [0.0], [2.0]], [[2.0], [0.5], [1.0]])
    advantage, v = vtrace(rollout, logp, torch.tensor([[0.5], [1.0], [-0.5], [0.25]]), torch.zeros(0), 0.9)
    np.testing.assert_allclose(v[:, 0], [2.351125, 1.50125, 2.225], atol=1e-6)
    np.testing.assert_allclose(advantage[:, 0], [1.851125, 0.50125, 2.725], atol=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_vtrace_without_episode_ends_equals_that_of_rllib(seed):
    """Compare `vtrace` with the formula of `from_importance_weights`, a function of RLlib and DeepMind."""
    _, rollout, logp, value, final_value = random_case(seed, ends=False)
    rho, discount = (logp.double() - rollout.other["logp"].double()).exp().clamp(max=1.0).numpy(), 0.9
    values, bootstrap = value[:-1].double().numpy(), value[-1].double().numpy()
    following = np.concatenate([values[1:], bootstrap[None]])
    deltas = rho * (rollout.reward.double().numpy() + discount * following - values)
    accumulated, minus_values = np.zeros_like(bootstrap), []
    for delta, c in zip(deltas[::-1], rho[::-1], strict=True):
        accumulated = delta + discount * c * accumulated
        minus_values.append(accumulated)
    vs = np.stack(minus_values[::-1]) + values
    following_vs = np.concatenate([vs[1:], bootstrap[None]])
    advantages = rho * (rollout.reward.double().numpy() + discount * following_vs - values)
    found = vtrace(rollout, logp, value, final_value, discount)
    np.testing.assert_allclose(found[0], advantages, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(found[1], vs, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("lam", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("seed", range(5))
def test_targets_of_the_acting_policy_equal_those_of_gae(seed, lam):
    _, rollout, _, value, final_value = random_case(seed)
    _, target = vtrace(rollout, rollout.other["logp"], value, final_value, 0.9, vtrace_lambda=lam)
    _, expected = gae(rollout, value, final_value, 0.9, lam)
    np.testing.assert_allclose(target, expected, rtol=1e-6, atol=1e-6)


def test_targets_stay_finite_for_invalid_steps_and_distant_policies():
    rollout, logp = rollout_of(np.ones((4, 1)), np.ones((4, 1)), valid=np.array([[True], [True], [False], [True]]))
    rollout.other["logp"][2] = torch.nan
    rollout.other["logp"][1], logp[1] = -1e30, 0.0  # the importance ratio overflows to infinity
    rollout.other["logp"][3], logp[3] = 0.0, -1e30
    value = torch.tensor([[0.1], [0.2], [0.3], [0.4], [0.5]])
    advantage, v = vtrace(rollout, logp, value, torch.zeros(0), 0.9)
    assert np.isfinite(advantage).all()
    assert (advantage[2, 0], v[2, 0]) == (0.0, pytest.approx(0.3))
    assert (advantage[3, 0], v[3, 0]) == (0.0, pytest.approx(0.4))
    assert advantage[1, 0] == pytest.approx(1 + 0.9 * 0.3 - 0.2)


# The storage


class MadeUpSteps:
    """Source of random steps of three environments, with terminations and truncations, in SAME_STEP mode."""

    def __init__(self, seed=0, masked=False):
        self.rng, self.masked = np.random.default_rng(seed), masked

    def observe(self, count=3):
        return {"obs": self.rng.normal(size=(count, 3)).astype(np.float32)}

    def mask(self):
        mask = self.rng.random((3, 2)) < 0.6
        mask[:, 0] |= ~mask.any(1)
        return mask if self.masked else None

    def step(self):
        kind = self.rng.random(3)
        terminated, truncated = kind < 0.15, kind > 0.8
        finals = np.flatnonzero(terminated | truncated)
        return Step(
            obs=self.observe(), reward=self.rng.normal(size=3).astype(np.float32), terminated=terminated,
            truncated=truncated, valid=np.ones(3, bool), first=terminated | truncated, final_index=finals,
            final_obs=self.observe(len(finals)), mask=self.mask(), episodes=[])


def parts_of(cls=IMPALA, actor=None, seed=0, size=12, storage=None, action_space=None, **options):
    made_actor = OnPolicyActor.create_factory(
        gym.spaces.Box(-1, 1, (3,), np.float32), action_space or gym.spaces.Discrete(2),
        **{"hidden_sizes": (8,), **(actor or {})})(device="cpu", seed=seed)
    algorithm = cls.create_factory(**options)(actor=made_actor, device="cpu", seed=seed)
    made_storage = VTraceBuffer.create_factory(size=size, **(storage or {}))(
        actor=made_actor, algorithm=algorithm, num_envs=3, device="cpu", seed=seed)
    return made_actor, algorithm, made_storage


def collect(algorithm, storage, masked=False, seed=0):
    steps = MadeUpSteps(seed, masked)
    storage.start(steps.observe(), steps.mask())
    with torch.inference_mode():
        while not storage.full:
            obs, rhs, done, mask = storage.current()
            storage.insert_transition(algorithm.acting_step(obs, rhs, done, mask=mask), steps.step())
    rollout = storage.get_all_buffer_data()
    with torch.no_grad():
        algorithm.finish_rollout(rollout)
    return rollout


def opened(storage, rollout, num_parts=1):
    storage.insert_data_slice([rollout])
    storage.before_gradients()
    return list(storage.generate_batches(num_parts))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("actor", "sequence_length"), [
    ({}, None), ({"shared_policy_value_network": True}, None), (GRU, None), (GRU, 5), (LSTM_SHARED, None),
    (LSTM_SHARED, 5)], ids=str)
def test_learner_and_collector_agree_if_their_weights_are_equal(actor, masked, sequence_length):
    """Check that `evaluate_rollout` returns the recorded log-probabilities and the values of `compute_values`."""
    _, algorithm, storage = parts_of(actor=actor, storage={"sequence_length": sequence_length})
    rollout = collect(algorithm, storage, masked)
    assert len(rollout.final_index) > 3
    logp, value, final_value = algorithm.evaluate_rollout(rollout, sequence_length)
    torch.testing.assert_close(logp, rollout.other["logp"], atol=1e-6, rtol=1e-6)
    expected, expected_final = algorithm.compute_values(rollout)
    torch.testing.assert_close(value, expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(final_value, expected_final, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(("actor", "sequence_length"), [({}, None), (GRU, None), (GRU, 5), (LSTM_SHARED, 5)], ids=str)
def test_evaluation_with_other_weights_unrolls_like_the_loss(actor, sequence_length):
    _, collector, storage = parts_of(actor=actor, storage={"sequence_length": sequence_length})
    rollout = collect(collector, storage)
    made_actor, learner, storage = parts_of(actor=actor, seed=7, storage={"sequence_length": sequence_length})
    (batch,) = opened(storage, rollout)
    logp, _, value = made_actor.evaluate(batch.obs, batch.rhs, batch.done, batch.action, batch.mask)
    found, values, final_value = learner.evaluate_rollout(rollout, sequence_length)
    assert not torch.allclose(found, rollout.other["logp"], atol=1e-3)
    advantage, target = map(torch.from_numpy, vtrace(rollout, found, values, final_value, 0.99))
    # The order of samples in a batch is random, so sorted values are compared.
    valid = slice(None) if batch.valid is None else batch.valid
    for mine, expected in ((logp.detach(), found), (value.detach(), values[:-1]), (batch.value, values[:-1]),
                           (batch.ret, target), (batch.advantage, advantage)):
        torch.testing.assert_close(mine[valid].flatten().sort().values, expected.flatten().sort().values)


@pytest.mark.parametrize(("limit", "value"), [("_CHUNK_BYTES", 5 * 4 * 9), ("_CACHE_ROWS", 4)])
def test_large_rollouts_are_evaluated_in_chunks(monkeypatch, limit, value):
    _, algorithm, storage = parts_of()
    rollout = collect(algorithm, storage)
    whole = algorithm.evaluate_rollout(rollout)
    monkeypatch.setattr(f"pytorchrl.agent.algorithms.rollouts.{limit}", value)
    lengths, evaluate = [], type(algorithm).evaluate_target
    monkeypatch.setattr(type(algorithm), "evaluate_target", lambda algorithm, *args: lengths.append(
        len(args[2])) or evaluate(algorithm, *args))
    for part, expected in zip(algorithm.evaluate_rollout(rollout), whole, strict=True):
        torch.testing.assert_close(part, expected)
    assert 1 <= max(lengths) < rollout.num_steps


@pytest.mark.parametrize("actor", [{}, {"shared_policy_value_network": True}, GRU, LSTM_SHARED], ids=str)
def test_collectors_compute_and_send_no_values(actor, monkeypatch):
    def refuse(*args):
        raise AssertionError("a value was computed")
    monkeypatch.setattr(OnPolicyActor, "_value_of", refuse)
    _, algorithm, storage = parts_of(actor=actor)
    assert collect(algorithm, storage).other.keys() == {"logp"}
    made_actor, ppo, _ = parts_of(actor=actor)
    ppo = PPO.create_factory()(actor=made_actor, device="cpu", seed=0)
    with pytest.raises(AssertionError, match="a value was computed"):
        collect(ppo, storage)


def test_targets_are_computed_once_per_train_batch():
    _, algorithm, storage = parts_of()
    rollout = collect(algorithm, storage)
    storage.insert_data_slice([rollout])
    algorithm.groups["all"].data.mul_(1.5)
    storage.before_gradients()
    _, expected = vtrace(rollout, *algorithm.evaluate_rollout(rollout), 0.99)
    batches = storage.generate_batches(2)
    first = next(batches)
    algorithm.groups["all"].data.mul_(1.5)
    targets = torch.cat([first.ret, *(batch.ret for batch in batches)])
    torch.testing.assert_close(targets.sort().values, torch.from_numpy(expected).flatten().sort().values)


def test_recomputed_targets_use_current_weights_and_first_values():
    _, algorithm, storage = parts_of(APPO, recompute_advantages=True)
    rollout = collect(algorithm, storage)
    storage.insert_data_slice([rollout])
    storage.before_gradients()
    batches = storage.generate_batches(1, num_epochs=2)
    first = next(batches)
    algorithm.groups["all"].data.mul_(1.5)
    second = next(batches)
    assert not torch.allclose(first.ret.sort().values, second.ret.sort().values)
    torch.testing.assert_close(first.value.sort().values, second.value.sort().values)


# Maps each option to (a non-default value, other settings that the option needs to have an effect).
CHANGES = {"rho_bar": (0.5, {}), "c_bar": (0.5, {}), "vtrace_lambda": (0.5, {}), "sequence_length": (5, GRU)}


@pytest.mark.parametrize("name", CHANGES)
def test_every_option_changes_the_targets(name):
    value, actor = CHANGES[name]
    _, collector, storage = parts_of(actor=actor)
    rollout = collect(collector, storage)
    targets = []
    for options in ({}, {name: value}):
        _, _, storage = parts_of(actor=actor, seed=3, storage=options)
        (batch,) = opened(storage, rollout.map(torch.clone))
        targets.append(batch.ret[batch.valid] if batch.valid is not None else batch.ret)
    assert not torch.allclose(targets[0].sort().values, targets[1].sort().values)


def test_rewards_are_normalized_if_the_actor_does_so():
    made_actor, algorithm, storage = parts_of(actor={"normalize_reward": True})
    rollout = collect(algorithm, storage)
    (plain,) = opened(storage, rollout)
    made_actor.merge_moments(made_actor.moments_of(rollout, 100 * rollout.reward))
    (scaled,) = opened(storage, rollout)
    assert float(scaled.advantage.abs().mean()) < float(plain.advantage.abs().mean())


@pytest.mark.parametrize(("options", "message"), [
    ({"size": 0}, "size must be a whole number >= 1"), ({"rho_bar": 0.0}, "rho_bar must be a number > 0"),
    ({"c_bar": -1.0}, "c_bar must be a number > 0"),
    ({"vtrace_lambda": 1.5}, "vtrace_lambda"), ({"gae_lambda": 0.9}, "did you mean"),
])
def test_wrong_options_raise(options, message):
    with pytest.raises(ConfigError, match=message):
        VTraceBuffer.create_factory(**{"size": 5, **options})


def actor_factory():
    return OnPolicyActor.create_factory(gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(2))


@pytest.mark.parametrize(("storage", "algorithm", "message"), [
    (VTraceBuffer, PPO, "PPO learns from rollouts with advantages, but VTraceBuffer provides .*; storages for PPO: "
                        "GAEBuffer"),
    (GAEBuffer, IMPALA, "IMPALA learns from .*, but GAEBuffer provides rollouts with advantages; storages for IMPALA: "
                        "VTraceBuffer")])
def test_storage_that_does_not_fit_the_algorithm_is_refused(storage, algorithm, message):
    with pytest.raises(ConfigError, match=message):
        check_fit(algorithm.create_factory(), actor_factory(), storage.create_factory(size=4))


@pytest.mark.parametrize(("storage", "algorithm"), [(VTraceBuffer, APPO), (GAEBuffer, PPO)])
def test_storage_that_fits_the_algorithm_is_accepted(storage, algorithm):
    check_fit(algorithm.create_factory(), actor_factory(), storage.create_factory(size=4))
