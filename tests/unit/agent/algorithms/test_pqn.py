"""Test PQN: lambda-returns compared with a plain loop, loss and gradient, exploration, masks, compilation."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch

from pytorchrl import DQN, PPO, PQN, GAEBuffer, QActor, ReplayBuffer, Scheme, VecEnv, load
from pytorchrl import train as train_agent
from pytorchrl.agent.data import Step
from pytorchrl.errors import ConfigError, NonFiniteUpdateError, SpaceError, UnknownParameterError

GAMMA, LAMBDA = 0.9, 0.7
Q = {"actor_class": QActor, "storage": {"gae_lambda": LAMBDA}, "gamma": GAMMA}


class LinearQ(torch.nn.Module):
    """Q(o, a) = w_a o, so that gradients have a closed form."""

    def __init__(self, weight):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(weight))

    def forward(self, obs, mask=None, generator=None):
        return obs["obs"] @ self.weight.T


class LinearActor(QActor):
    """The values of two actions are two components of the observation."""

    def build_networks(self, generator):
        self.is_recurrent = False
        self.q = LinearQ([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])


def expected_targets(parts, rollout):
    """Return the lambda-returns of the valid steps, one environment and step at a time, in float64."""
    def value(obs, mask):
        with torch.no_grad():
            scores = parts.actor.get_q_scores({"obs": obs[None]}, None, None if mask is None else mask[None])[0]
        return max(float(q) for a, q in enumerate(scores) if mask is None or mask[a])

    def mask_of(masks, *at):
        return None if masks is None else masks[at]
    finals = {tuple(at): value(obs, mask_of(rollout.final_mask, k)) for k, (at, obs) in enumerate(zip(
        rollout.final_index.tolist(), rollout.final_obs["obs"], strict=True))}
    targets = np.full(rollout.reward.shape, np.nan)
    for e in range(rollout.num_envs):
        for t in reversed(range(rollout.num_steps)):
            if not rollout.valid[t, e]:
                continue
            reward, after = float(rollout.reward[t, e]), finals.get((t, e))
            if after is None:
                after = value(rollout.obs["obs"][t + 1, e], mask_of(rollout.mask, t + 1, e))
            if rollout.terminated[t, e]:
                targets[t, e] = reward
            elif rollout.truncated[t, e] or t == rollout.num_steps - 1:
                targets[t, e] = reward + GAMMA * after
            else:
                targets[t, e] = reward + GAMMA * (LAMBDA * targets[t + 1, e] + (1 - LAMBDA) * after)
    return targets


def targets_of(parts, rollout):
    """Return the targets in the batches, in an array like the rewards; actions and rewards identify the samples."""
    parts.storage.insert_data_slice([rollout])
    parts.storage.before_gradients()
    batch = next(parts.storage.generate_batches(1))
    found = {tuple(obs.tolist()): float(ret) for obs, ret in zip(batch.obs["obs"], batch.ret, strict=True)}
    rows = rollout.obs["obs"][:-1]
    return np.array([[found.get(tuple(obs.tolist()), np.nan) for obs in row] for row in rows])


@pytest.mark.parametrize("next_step", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("actor", [{}, {"norm": "layer"}, {"dueling": True, "normalize_obs": True}], ids=str)
def test_targets_equal_a_plain_loop(build, collect, made_up_steps, actor, masked, next_step):
    """Check targets of random actions, after which the target still bootstraps from the best action."""
    parts = build(PQN, actor=actor, size=30, **Q)
    steps = made_up_steps(4, masked=masked, next_step=next_step)
    collect(parts, steps)
    rollout = collect(parts, steps)
    expected = expected_targets(parts, rollout)
    assert {bool(flag) for flag in rollout.terminated.flatten()} == {True, False}
    np.testing.assert_allclose(targets_of(parts, rollout), expected, rtol=1e-5, atol=1e-5)
    assert len(rollout.final_index) == (0 if next_step else int((rollout.terminated | rollout.truncated).sum()))


@pytest.mark.parametrize("end", [None, "terminated", "truncated"])
def test_golden_targets(build, end):
    """Check numbers computed by hand: the step before the last bootstraps from its own next observation.

    With V = 2, 3, 4 after the steps (8 for the last observation of an episode), gamma = lambda = 0.5 and rewards of 1,
    R_2 = 1 + 0.5 * 4 = 3, R_1 = 1 + 0.5 * (0.5 * 3 + 0.5 * 3) = 2.5, and R_0 = 1 + 0.5 * (0.5 * 2.5 + 0.5 * 2) = 2.125.
    If step 1 terminates, R_1 = 1 and R_0 = 1.75; if it is truncated, R_1 = 1 + 0.5 * 8 = 5 and R_0 = 2.75.
    """
    parts = build(PQN, num_envs=1, size=3, actor_class=LinearActor, storage={"gae_lambda": 0.5}, gamma=0.5,
                  actor={"hidden_sizes": (256, 256)})

    def obs(best):  # actions with other values were taken, too
        return np.array([[best - 1.0, best, 0.0]], np.float32)
    parts.storage.start({"obs": obs(1.0)})
    for t in range(3):
        acting = parts.algorithm.acting_step(*parts.storage.current()[:3])
        acting.action[:] = 0  # worse than action 1, whose value is nevertheless the bootstrap
        ends = end is not None and t == 1
        flags = {name: np.array([ends and name == end]) for name in ("terminated", "truncated")}
        parts.storage.insert_transition(acting, Step(
            obs={"obs": obs(t + 2.0)}, reward=np.ones(1, np.float32), **flags, valid=np.ones(1, bool),
            first=np.array([ends]), final_index=np.arange(int(ends)), final_obs={"obs": obs(8.0)[:int(ends)]},
            mask=None, episodes=[]))
    rollout = parts.storage.get_all_buffer_data()
    parts.algorithm.finish_rollout(rollout)
    assert targets_of(parts, rollout)[:, 0].tolist() == {
        None: [2.125, 2.5, 3.0], "terminated": [1.75, 1.0, 3.0], "truncated": [2.75, 5.0, 3.0]}[end]
    assert rollout.other["logp"].isnan().all()


def test_loss_and_gradient_equal_the_formula(build, collect, made_up_steps):
    parts = build(PQN, size=30, **{**Q, "actor_class": LinearActor}, actor={"hidden_sizes": (256, 256)})
    rollout = collect(parts, made_up_steps(4))
    parts.storage.insert_data_slice([rollout])
    parts.storage.before_gradients()
    batch = next(parts.storage.generate_batches(1))
    (gradient,), info = parts.algorithm.compute_gradients(batch)
    obs, action = batch.obs["obs"].double().numpy(), batch.action.numpy()
    q = obs[np.arange(len(obs)), action]  # the weights select the first two components
    error = q - batch.ret.double().numpy()
    expected = np.zeros((2, 3))
    for row, a, delta in zip(obs, action, error, strict=True):
        expected[a] += delta * row / len(obs)
    np.testing.assert_allclose(gradient.view(2, 3), expected, rtol=1e-5, atol=1e-6)
    assert info["loss"] == info["td_loss"] == pytest.approx(float((error**2).mean() / 2))
    assert info["q"] == pytest.approx(float(q.mean()))


# Acting


def test_epsilon_is_the_share_of_random_actions_and_follows_its_schedule(build):
    parts = build(PQN, actor_class=QActor, initial_epsilon=1.0, final_epsilon=0.2, epsilon_steps=100,
                  action_space=gym.spaces.Discrete(10), num_envs=2000)
    algorithm, obs = parts.algorithm, {"obs": np.ones((2000, 3), np.float32)}

    def share_of_best(deterministic=False):
        action = algorithm.acting_step(obs, {}, np.zeros(2000, bool), deterministic).action
        return np.bincount(action, minlength=10).max() / 2000
    assert share_of_best() == pytest.approx(0.1, abs=0.03)
    assert share_of_best(deterministic=True) == 1.0
    assert algorithm.follow_schedules(50, 1000) == pytest.approx({"epsilon": 0.6})
    assert share_of_best() == pytest.approx(0.4 + 0.06, abs=0.04)
    algorithm.update_algorithm_parameter("epsilon", 0.0)
    assert share_of_best() == 1.0
    with pytest.raises(UnknownParameterError, match="epsilon is fixed"):
        build(PQN, actor_class=QActor, epsilon_per_worker=True).algorithm.update_algorithm_parameter("epsilon", 0.1)


@pytest.mark.parametrize("epsilon", [0.0, 0.5, 1.0])
def test_forbidden_actions_are_never_taken(build, collect, made_up_steps, epsilon):
    parts = build(PQN, actor_class=QActor, size=40, initial_epsilon=epsilon, final_epsilon=epsilon)
    rollout = collect(parts, made_up_steps(4, masked=True))
    assert rollout.mask[:-1].gather(-1, rollout.action.unsqueeze(-1)).all()
    assert not rollout.mask.all()


def test_actions_are_equal_on_a_device(build):
    obs = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    on_host, there = (build(PQN, actor_class=QActor, actor={"norm": "layer"}, initial_epsilon=0.3).algorithm
                      for _ in range(2))
    expected = on_host.acting_step({"obs": obs.numpy()}, {}, np.zeros(50, bool)).action
    with torch.inference_mode():
        found = there.act_on_device({"obs": obs}, {}, torch.zeros(50, dtype=torch.bool))
    assert torch.equal(found.action, torch.from_numpy(expected))
    assert torch.equal(found.clipped_action, found.action)
    own = type("Own", (PQN,), {"acting_step": lambda self, *args: None})
    assert build(own, actor_class=QActor).algorithm.act_on_device is None


# Learning


def test_compiled_gradients_equal_others(train, traced_only):
    settings = {**Q, "actor": {"norm": "layer"}, "masked": True, "rollouts": 3, "lr": 1e-2}
    plain, infos = train(PQN, compile=False, **settings)
    compiled, compiled_infos = train(PQN, compile=True, **settings)
    torch.testing.assert_close(compiled.algorithm.groups["q"].data, plain.algorithm.groups["q"].data)
    assert compiled_infos[-1] == pytest.approx(infos[-1], rel=1e-4)


@pytest.mark.compiled
@pytest.mark.slow
def test_a_compiler_computes_the_same_gradients(build, collect, made_up_steps):
    settings = {**Q, "actor": {"norm": "layer", "hidden_sizes": (16, 8)}}
    parts, other = build(PQN, compile=True, **settings), build(PQN, compile=False, **settings)
    parts.storage.insert_data_slice([collect(parts, made_up_steps(4, masked=True))])
    parts.storage.before_gradients()
    batch = next(parts.storage.generate_batches(1))
    (found,), info = parts.algorithm.compute_gradients(batch)
    (expected,), plain = other.algorithm.compute_gradients(batch)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert info == pytest.approx(plain, rel=1e-4)


@pytest.mark.slow
def test_a_trained_agent_acts_and_is_exported(tmp_path):
    agent = train_agent("pqn", "CartPole-v1", target_steps=600, seed=1, progress=False, log_dir=str(tmp_path / "run"))
    (file,) = agent.export(tmp_path / "policy.pt2", to="torch", checks=50)  # compares the actions of both
    assert file.path.is_file()
    loaded = load(tmp_path / "run")
    for obs in np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32):
        assert loaded.act(obs) == agent.act(obs)


def test_a_term_of_a_subclass_enters_the_loss(train):
    class Regularized(PQN):
        def terms(self, q, batch, parameters):
            terms, measures = super().terms(q, batch, parameters)
            return {**terms, "size": q.square()}, measures

        def loss_weights(self, parameters):
            return {**super().loss_weights(parameters), "size": 0.1}
    info = train(Regularized, rollouts=1, **Q)[1][0]
    assert info["loss"] == pytest.approx(info["td_loss"] + 0.1 * info["size"])


def test_log_probabilities_cannot_be_used_by_mistake(train):
    own = type("Own", (PQN,), {"terms": lambda self, q, batch, parameters: ({"td_loss": q * batch.logp}, {})})
    with pytest.raises(NonFiniteUpdateError):
        train(own, rollouts=1, **Q)


def test_defaults_are_those_of_the_paper():
    options = PQN.create_factory().options
    assert (options.lr, options.optimizer, options.max_grad_norm, options.num_epochs) == (2.5e-4, "radam", 10.0, 4)


# Refusals


@pytest.mark.parametrize(("actor", "message"), [
    ({"recurrent_net": "gru"}, "PQN needs QActor with recurrent_net=None, got recurrent_net='gru'; .*R2D2"),
    ({"noisy": True}, "PQN needs QActor with noisy=False, got noisy=True; .*DQN")])
def test_memory_and_noise_are_refused(actor, message):
    envs = VecEnv.create_factory("CartPole-v1", vec_env_size=1)
    made = QActor.create_factory(envs.observation_space, envs.action_space, **actor)
    with pytest.raises(ConfigError, match=message):
        Scheme(PQN.create_factory(), made, GAEBuffer.create_factory(size=8), envs)


def test_other_parts_are_refused_by_name():
    envs = VecEnv.create_factory("CartPole-v1", vec_env_size=1)
    actor = QActor.create_factory(envs.observation_space, envs.action_space)
    with pytest.raises(ConfigError, match="PQN learns from rollouts with advantages, but ReplayBuffer provides"):
        Scheme(PQN.create_factory(), actor, ReplayBuffer.create_factory(100), envs)
    with pytest.raises(ConfigError, match="PPO cannot train QActor"):
        Scheme(PPO.create_factory(), actor, GAEBuffer.create_factory(size=8), envs)
    with pytest.raises(ConfigError, match="num_mini_batch=2 and mini_batch_size=8 both set"):
        PQN.create_factory(num_mini_batch=2, mini_batch_size=8)
    with pytest.raises(SpaceError, match="needs Discrete actions"):
        QActor.create_factory(envs.observation_space, gym.spaces.Box(-1, 1, (2,)))
    assert DQN.__name__ == PQN.nearest_with_lag
