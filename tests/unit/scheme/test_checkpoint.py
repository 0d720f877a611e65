"""`Scheme.checkpoint` and `resume`: a run that is resumed is the run that went on, bit for bit, with an exact account."""

from __future__ import annotations

import functools
import io

import gymnasium as gym
import numpy as np
import pytest
import torch

from pytorchrl import (
    A2C,
    APPO,
    ASYNC,
    DDPG,
    DQN,
    IMPALA,
    PPO,
    R2D2,
    SAC,
    TD3,
    GAEBuffer,
    MultiAgentVecEnv,
    OffPolicyActor,
    OnPolicyActor,
    PERBuffer,
    QActor,
    ReplayBuffer,
    Scheme,
    RolloutSequenceBuffer,
    SequenceBuffer,
    VecEnv,
    VTraceBuffer,
    cosine,
    linear,
    multi_agent,
)
from pytorchrl.agent.synthetic import synthetic_agent
from pytorchrl.envs.testing import ComingAndGoing
from pytorchrl.errors import CheckpointError, ConfigError, StoppedError, WorkerDiedError
from pytorchrl.scheme.gradients.g_worker import GWorker
from pytorchrl.scheme.replay.r_worker import RWorker

REPLAY = {"start_steps": 16, "update_every": 8, "num_updates": 4, "mini_batch_size": 8}


def on_policy(algo, storage, env="CartPole-v1", **actor):
    envs = VecEnv.create_factory(env, None, 2)
    return algo, OnPolicyActor.create_factory(envs.observation_space, envs.action_space, hidden_sizes=(8,), **actor), storage, envs


def continuous(algo, **actor):
    envs = VecEnv.create_factory("Pendulum-v1", None, 2)
    actor = OffPolicyActor.create_factory(envs.observation_space, envs.action_space, hidden_sizes=(8,), **actor)
    return algo, actor, ReplayBuffer.create_factory(100, rollout_size=4), envs


def q_learning(algo, storage, **actor):
    envs = VecEnv.create_factory("CartPole-v1", None, 2)
    return algo, QActor.create_factory(envs.observation_space, envs.action_space, hidden_sizes=(8,), **actor), storage, envs


def several_policies(algo, actor, storage):
    envs = MultiAgentVecEnv.create_factory(ComingAndGoing, None, 2, policy_of={"agent_0": "early", "agent_1": "late", "agent_2": "late"})
    return *multi_agent(envs, algo, lambda obs, action: actor.create_factory(obs, action, hidden_sizes=(8,)), storage), envs


AGENTS = {
    "ppo, normalised": lambda: on_policy(
        PPO.create_factory(num_epochs=2, num_mini_batch=2, lr=linear(1e-3, 0.0), advantage_normalization="batch"),
        GAEBuffer.create_factory(8), normalize_obs=True, normalize_reward=True),
    "ppo, gru": lambda: on_policy(
        PPO.create_factory(num_epochs=2, num_mini_batch=2), GAEBuffer.create_factory(8), recurrent_net="gru", recurrent_size=5),
    "ppo, target_kl": lambda: on_policy(PPO.create_factory(num_epochs=4, num_mini_batch=2, target_kl=1e-6), GAEBuffer.create_factory(8)),
    "a2c, continuous": lambda: on_policy(A2C.create_factory(optimizer="rmsprop", lr=[(0, 1e-3), (100, 2e-3)]), GAEBuffer.create_factory(5), "Pendulum-v1"),
    "impala": lambda: on_policy(IMPALA.create_factory(lr=lambda remaining: 1e-3 * remaining), VTraceBuffer.create_factory(size=8)),
    "appo": lambda: on_policy(APPO.create_factory(num_epochs=2), VTraceBuffer.create_factory(size=8)),
    "dqn, noisy": lambda: q_learning(
        DQN.create_factory(**REPLAY, target_update_interval=3), ReplayBuffer.create_factory(24, rollout_size=4), noisy=True),
    "dqn, prioritised": lambda: q_learning(
        DQN.create_factory(**REPLAY, polyak=0.9, epsilon_steps=200), PERBuffer.create_factory(30, rollout_size=4, n_step=3, beta=cosine(0.4, 1.0))),
    "r2d2": lambda: q_learning(
        R2D2.create_factory(**REPLAY), SequenceBuffer.create_factory(200, rollout_size=4, length=4, burn_in=2, period=2),
        recurrent_net="gru", recurrent_size=5),
    "r2d2, whole rollouts": lambda: q_learning(
        R2D2.create_factory(**REPLAY), RolloutSequenceBuffer.create_factory(60, rollout_size=4, n_step=2), recurrent_net="gru",
        recurrent_size=5),
    "ddpg, drifting noise": lambda: continuous(DDPG.create_factory(**REPLAY, noise="ou"), policy="deterministic"),
    "td3": lambda: continuous(TD3.create_factory(**REPLAY, optimizer=torch.optim.NAdam), policy="deterministic", num_critics=2),
    "sac": lambda: continuous(SAC.create_factory(**REPLAY, lr_alpha=1e-2, optimizer="adamw", weight_decay=0.1), normalize_obs=True),
    "two policies, ppo": lambda: several_policies(
        PPO.create_factory(num_epochs=2, num_mini_batch=2), OnPolicyActor, GAEBuffer.create_factory(6)),
    "two policies, dqn": lambda: several_policies(DQN.create_factory(**REPLAY), QActor, PERBuffer.create_factory(100, rollout_size=6)),
}

SYNCHRONOUS = {
    "central": {},
    "2 collectors": {"num_col_workers": 2},
    "2 gradient workers": {"num_grad_workers": 2},
    "2 of each": {"num_col_workers": 2, "num_grad_workers": 2},
    "ranks": {"num_grad_workers": 2, "distribute_gradients": True},
}


@pytest.fixture
def make():
    """A function from an agent's name and settings to a scheme; all are stopped after the test."""
    schemes = []

    def make_(agent="ppo, normalised", test_envs=None, **settings):
        schemes.append(Scheme(*AGENTS[agent](), test_envs, **{"runtime": "threads", "seed": 1} | settings))
        return schemes[-1]
    yield make_
    for scheme in schemes:
        scheme.stop()


def through_a_file(checkpoint):
    """As it comes back from a file of which nothing is executed."""
    file = io.BytesIO()
    torch.save(checkpoint, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def go_on(scheme, count):
    """Make so many updates, and on until data are used up, as a learner does."""
    infos = [scheme.step() for _ in range(count)]
    while not scheme.is_between_items:
        infos.append(scheme.step())
    return infos


def flat(value, name=""):
    """Name -> number, text or tensor, of a nested state."""
    if isinstance(value, dict):
        return {key: item for own, part in value.items() for key, item in flat(part, f"{name}/{own}").items()}
    if isinstance(value, (list, tuple)):
        return {key: item for own, part in enumerate(value) for key, item in flat(part, f"{name}/{own}").items()}
    return {name: value}


def differences(one, other):
    """Names of what is not equal, bit for bit."""
    one, other = flat(one), flat(other)
    assert one.keys() == other.keys()
    return [name for name, value in one.items() if not (
        torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name])]


@pytest.mark.parametrize("settings", SYNCHRONOUS.values(), ids=SYNCHRONOUS.keys())
@pytest.mark.parametrize("agent", AGENTS)
def test_what_is_resumed_is_what_went_on(make, check_ledger, agent, settings):
    straight = make(agent, **settings)
    straight.start(target_steps=600)
    go_on(straight, 9)
    checkpoint = through_a_file(straight.checkpoint())
    resumed = make(agent, **settings)
    resumed.resume(checkpoint)
    resumed.start(target_steps=600)
    assert (resumed.version, resumed.ledger()) == (straight.version, straight.ledger())
    assert check_ledger(resumed)["in_flight"] == 0
    # Not only parameters: all statistics on the way, and another whole checkpoint, with optimisers, replay and account.
    np.testing.assert_equal(go_on(resumed, 9), go_on(straight, 9))
    assert resumed.metrics()["policy_lag"] == straight.metrics()["policy_lag"]
    assert differences(straight.checkpoint(), resumed.checkpoint()) == []
    assert check_ledger(resumed) == check_ledger(straight)
    assert resumed.stop() == straight.stop()


@pytest.mark.parametrize("settings", SYNCHRONOUS.values(), ids=SYNCHRONOUS.keys())
def test_in_the_middle_of_data_the_rest_is_given_up_by_both(make, check_ledger, settings):
    straight, resumed = make(**settings), make(**settings)
    straight.start(600)
    go_on(straight, 4)
    straight.step()  # the first of four updates from this data
    assert not straight.is_between_items
    resumed.resume(through_a_file(straight.checkpoint()))
    resumed.start(600)
    assert straight.is_between_items
    np.testing.assert_equal(go_on(resumed, 5), go_on(straight, 5))
    assert differences(straight.checkpoint(), resumed.checkpoint()) == []
    assert check_ledger(resumed) == check_ledger(straight)


def test_draws_after_a_checkpoint_are_others(make):
    """Else the comparison above would hold of runs that repeat themselves, too."""
    scheme = make("sac")
    scheme.start(600)
    go_on(scheme, 9)
    first, second = scheme.checkpoint(), scheme.checkpoint()
    changed = differences(first, second)
    assert "/part" in changed
    assert any("generator" in name for name in changed)
    assert not any("optimizers" in name or "acting" in name for name in changed)


def test_every_pattern_goes_on_with_an_exact_account(check_ledger, pattern):
    schemes = [Scheme(*synthetic_agent(size=4, num_epochs=2, num_mini_batch=2), runtime="simulated", seed=1, **pattern)
               for _ in range(2)]
    first, second = schemes
    try:
        for _ in range(7):
            first.step()
        second.resume(through_a_file(first.checkpoint()))
        second.start()
        assert second.version == first.version
        assert check_ledger(second) == check_ledger(first)
        before = second.ledger()
        for _ in range(5):
            second.step()
        after = second.stop()
        assert after["collected"] > before["collected"]
        assert after["consumed_unique"] > before["consumed_unique"]
        assert after["collected"] == after["consumed_unique"] + sum(after["dropped"].values())
    finally:
        for scheme in schemes:
            scheme.stop()


@pytest.mark.parametrize("num_replay_workers", [1, 3])
@pytest.mark.parametrize("agent", ["dqn, prioritised", "impala", "two policies, dqn"])
def test_shards_go_on_with_what_they_hold(check_ledger, agent, num_replay_workers):
    def make():
        return Scheme.apex(*AGENTS[agent](), runtime="simulated", seed=1, num_replay_workers=num_replay_workers, size=300,
                           learning_starts=40, max_replay_ratio=2.0, train_batch_size=8, max_weight_sync_delay=16)
    first, second = make(), make()
    try:
        for _ in range(30):
            first.step()
        checkpoint = through_a_file(first.checkpoint())
        second.resume(checkpoint)
        second.start()
        held = [worker.update_worker.local_worker.shards for worker in (first, second)]
        assert [state.resident for state in held[1].states] == [state.resident for state in held[0].states]
        assert [state.mass for state in held[1].states] == [state.mass for state in held[0].states]
        assert [shards.trained for shards in held] == [first.ledger()["consumed"]] * 2
        assert [shards.added for shards in held] == [first.ledger()["collected"]] * 2  # so learning does not wait to start again
        assert check_ledger(second) == check_ledger(first)
        assert second.ledger()["resident"] == sum(state.resident for state in held[1].states) > 0
        for _ in range(30):
            second.step()
        ledger = check_ledger(second)
        assert ledger["consumed"] <= 2.0 * (ledger["collected"] - 40)  # the ratio counts on from where it was
        final = second.stop()
        assert final["collected"] == final["resident"] + final["evicted"] + sum(final["dropped"].values())
    finally:
        first.stop()
        second.stop()


def test_remainders_of_lossy_gradients_are_kept(make):
    settings = {"num_grad_workers": 2, "compress_grads_to_send": "topk"}
    scheme = make(**settings)
    scheme.start(600)
    go_on(scheme, 5)
    checkpoint = through_a_file(scheme.checkpoint())
    kept = [worker["remainders"][0] for worker in checkpoint["state"]["workers"]]
    assert all(remainder.abs().sum() > 0 for remainder in kept)
    assert not torch.equal(*kept)
    without = through_a_file(checkpoint)
    for worker in without["state"]["workers"]:
        worker["remainders"] = {}
    ends = []
    for state in (checkpoint, without):
        resumed = make(**settings)
        resumed.resume(state)
        resumed.start(600)
        go_on(resumed, 5)
        ends.append(resumed.acting_state()["all"])
    go_on(scheme, 5)
    assert torch.equal(ends[0], scheme.acting_state()["all"])
    assert not torch.equal(ends[1], ends[0])


def test_the_seed_of_the_checkpoint_is_taken_over_unless_another_is_given(make):
    scheme = make(seed=None)
    go_on(scheme, 3)
    checkpoint = scheme.checkpoint()
    resumed = make(seed=None)
    resumed.resume(checkpoint)
    assert resumed.seed == scheme.seed == resumed.settings["seed"]
    with pytest.raises(CheckpointError, match=f"seed was {scheme.seed}, now it is 5"):
        make(seed=5).resume(checkpoint)


def test_another_agent_is_refused_with_all_differences(make):
    scheme = make()
    go_on(scheme, 3)
    checkpoint = scheme.checkpoint()
    with pytest.raises(CheckpointError, match=r"num_col_workers was 1, now it is 2.*algo_factory: class was PPO, now it is A2C"):
        make("a2c, continuous", num_col_workers=2).resume(checkpoint)


def test_where_it_runs_may_differ(make):
    straight = make(num_col_workers=2)
    straight.start(600)
    go_on(straight, 4)
    checkpoint = straight.checkpoint()
    elsewhere = make(num_col_workers=2, runtime="simulated", on_worker_failure="raise", worker_timeout_s=5.0,
                     test_envs=VecEnv.create_factory("CartPole-v1"))
    elsewhere.resume(checkpoint)
    elsewhere.start(600)
    go_on(straight, 4)
    go_on(elsewhere, 4)
    assert torch.equal(straight.acting_state()["all"], elsewhere.acting_state()["all"])


def test_what_cannot_be_resumed_is_refused(make, tmp_path):
    scheme = make()
    go_on(scheme, 2)
    checkpoint = scheme.checkpoint()
    with pytest.raises(ConfigError, match="has not been started"):
        scheme.resume(checkpoint)
    with pytest.raises(ConfigError, match="leave record and replay out"):
        make(record=str(tmp_path / "record")).resume(checkpoint)
    with pytest.raises(CheckpointError, match="its format is 'pytorchrl checkpoint 0'"):
        make().resume({**checkpoint, "format": "pytorchrl checkpoint 0"})
    with pytest.raises(ConfigError, match="timeout_s"):
        scheme.checkpoint(timeout_s=0)
    scheme.stop()
    with pytest.raises(StoppedError, match="make checkpoints before"):
        scheme.checkpoint()
    recorded = make(record=str(tmp_path / "record"))
    go_on(recorded, 1)
    with pytest.raises(ConfigError, match="recorded or replayed"):
        recorded.checkpoint()


class Remembering(gym.Env):
    """Its observation and reward are how many episodes the object has begun; and it tells who was built and closed."""

    observation_space, action_space = gym.spaces.Box(0.0, 100.0, (2,)), gym.spaces.Discrete(2)
    seeds: list[int | None] = []  # noqa: RUF012 - read by the test
    open = 0

    def __init__(self):
        type(self).open += 1
        self.episodes = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.seeds.append(seed)
        self.episodes += 1
        return np.full(2, self.episodes, np.float32), {}

    def step(self, action):
        return np.full(2, self.episodes, np.float32), float(self.episodes), self.np_random.random() < 0.3, False, {}

    def close(self):
        type(self).open -= 1


def test_environments_are_others_with_other_seeds():
    envs = VecEnv.create_factory(Remembering, None, 2)
    actor = OnPolicyActor.create_factory(envs.observation_space, envs.action_space, hidden_sizes=(4,))

    def make():
        return Scheme(A2C.create_factory(), actor, GAEBuffer.create_factory(8), envs, seed=1)
    scheme, other = make(), make()
    Remembering.seeds.clear()  # those of probes
    for _ in range(3):
        scheme.step()
    other.resume(scheme.checkpoint())
    for _ in range(3):
        scheme.step()
        other.step()
    assert torch.equal(other.acting_state()["all"], scheme.acting_state()["all"])
    given = [seed for seed in Remembering.seeds if seed is not None]
    assert len(given) == 6  # two before, two after, and the same two elsewhere
    assert len(set(given)) == 4
    scheme.stop()
    other.stop()
    assert Remembering.open == 0


def test_a_lost_worker_leaves_no_hole(check_ledger):
    """Asked for its state while it is dead: the others' are saved, and who resumes begins that one anew."""
    agent = synthetic_agent(size=4)
    settings = {"num_grad_workers": 2, "num_col_workers": 2, "col_communication": ASYNC, "grad_communication": ASYNC,
                "runtime": "simulated", "seed": 1}
    scheme = Scheme(*agent, **settings, faults="kill grad.1 @ grad 3; kill col.2 @ step 9")
    for _ in range(8):
        scheme.step()
    checkpoint = through_a_file(scheme.checkpoint())
    resumed = Scheme(*agent, **settings)
    resumed.resume(checkpoint)
    resumed.start()
    assert check_ledger(resumed) == check_ledger(scheme)
    assert check_ledger(resumed)["dropped"]["worker_lost"] > 0
    for _ in range(8):
        resumed.step()
    again = Scheme(*agent, **settings)  # and so does who resumes that
    again.resume(through_a_file(resumed.checkpoint()))
    again.start()
    assert check_ledger(again) == check_ledger(resumed)
    for one in (resumed, again):
        one.step()
        final = one.stop()
        assert final["collected"] == final["consumed_unique"] + sum(final["dropped"].values())
    scheme.stop()


@pytest.mark.parametrize("moment", ["state", "reseed"])
def test_a_worker_that_is_lost_while_a_checkpoint_is_made(check_ledger, monkeypatch, moment):
    """Asked for its state it is in none; after that it is in all of it, though it is lost to the run that goes on."""
    agent = synthetic_agent(size=4)
    settings = {"num_grad_workers": 2, "num_col_workers": 2, "col_communication": ASYNC, "grad_communication": ASYNC,
                "runtime": "simulated", "seed": 1}
    scheme = Scheme(*agent, **settings)
    for _ in range(8):
        scheme.step()
    original = getattr(GWorker, moment)

    @functools.wraps(original)
    def die(worker, *args):
        if worker.index_worker == 1:
            raise WorkerDiedError("GWorker 1 has died")
        return original(worker, *args)
    monkeypatch.setattr(GWorker, moment, die)
    checkpoint = through_a_file(scheme.checkpoint())
    monkeypatch.undo()
    check_ledger(scheme)
    resumed = Scheme(*agent, **settings)
    resumed.resume(checkpoint)
    resumed.start()
    ledger = check_ledger(resumed)
    assert ledger["in_flight"] == ledger["queued"] == 0
    assert (checkpoint["state"]["workers"][0] is None) == (moment == "state")
    if moment == "state":
        assert ledger == check_ledger(scheme)
    resumed.step()
    final = resumed.stop()
    assert final["collected"] == final["consumed_unique"] + sum(final["dropped"].values())
    scheme.stop()


def test_a_shard_that_is_lost_while_a_checkpoint_is_made(check_ledger, monkeypatch):
    def make():
        return Scheme.apex(*AGENTS["dqn, prioritised"](), runtime="simulated", seed=1, num_replay_workers=3, size=300,
                           learning_starts=40, max_replay_ratio=2.0, train_batch_size=8)
    scheme, resumed = make(), make()
    for _ in range(20):
        scheme.step()
    original = RWorker.state

    @functools.wraps(original)
    def die(worker):
        if worker.index_worker == 2:
            raise WorkerDiedError("a shard has died")
        return original(worker)
    monkeypatch.setattr(RWorker, "state", die)
    checkpoint = through_a_file(scheme.checkpoint())
    monkeypatch.undo()
    resumed.resume(checkpoint)
    resumed.start()
    ledger = check_ledger(resumed)
    assert ledger["dropped"]["worker_lost"] > 0
    held = resumed.update_worker.local_worker.shards
    assert ledger["resident"] == sum(state.resident for state in held.states) > 0
    for scheme_ in (scheme, resumed):
        scheme_.step()
        final = scheme_.stop()
        assert final["collected"] == final["resident"] + final["evicted"] + sum(final["dropped"].values())


def test_rates_of_a_resumed_run_are_its_own(make):
    scheme, resumed = make(), make()
    go_on(scheme, 40)
    resumed.resume(through_a_file(scheme.checkpoint()))
    resumed.start()
    assert resumed.metrics()["collected_steps_per_s"] == 0.0
    go_on(resumed, 1)
    metrics = resumed.metrics()
    consumed = metrics["grad_peak_steps_per_s"] * metrics["time_s"]["gradients"]["grad"]
    assert consumed == pytest.approx(resumed.ledger()["consumed"] - scheme.ledger()["consumed"])
