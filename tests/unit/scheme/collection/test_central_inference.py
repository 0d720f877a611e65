"""Tests of central inference: workers step environments, and one actor chooses the actions of all of them."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from pytorchrl import (
    ASYNC,
    DDPG,
    DQN,
    IMPALA,
    PARALLEL,
    PPO,
    SAC,
    GAEBuffer,
    MultiAgentVecEnv,
    OffPolicyActor,
    OnPolicyActor,
    PERBuffer,
    QActor,
    ReplayBuffer,
    Scheme,
    VecEnv,
    VTraceBuffer,
    multi_agent,
)
from pytorchrl.agent.seeding import Stream, derive_seed
from pytorchrl.envs.testing import ChangingAgents, CountingEnv, FaultyEnv
from pytorchrl.errors import ConfigError, EnvError, WorkerLostError
from pytorchrl.scheme.collection import central_inference
from pytorchrl.scheme.collection.central_inference import _Stream
from pytorchrl.scheme.collection.c_worker import RolloutBuilder
from pytorchrl.scheme.gradients.sample_queue import SampleQueue

CENTRAL = {"col_communication": ASYNC, "inference": "central"}
THREE = {**CENTRAL, "num_col_workers": 3}


@pytest.fixture
def rollouts_of(monkeypatch):
    """Return a function that runs a scheme and returns copies of its rollouts, by worker.

    The run ends after `updates` updates, but not before `num_workers` workers have delivered a rollout.
    """
    seen = {}
    put = SampleQueue.put

    def watch(queue, rollouts):
        for rollout in rollouts:
            seen.setdefault(rollout.header.worker, []).append(rollout)
        put(queue, rollouts)
    monkeypatch.setattr(SampleQueue, "put", watch)

    def run(scheme, updates=8, num_workers=1):
        seen.clear()
        while scheme.version < updates or len(seen) < num_workers:
            scheme.step()
        scheme.stop()
        return {worker: list(rollouts) for worker, rollouts in seen.items()}
    return run


@pytest.mark.parametrize("runtime", ["threads", "simulated"])
@pytest.mark.parametrize("batch", [1, 2, 3, None])
def test_each_environment_executes_the_actions_chosen_for_it(make_scheme, rollouts_of, runtime, batch):
    """Check that the steps of each worker are complete, in order, and belong to the stored actions.

    An observation of `CountingEnv` contains the seed, the episode, the step and the previous action.
    """
    rollouts = rollouts_of(make_scheme(**THREE, inference_batch=batch, runtime=runtime), num_workers=3)
    assert sorted(rollouts) == [1, 2, 3]
    seeds_seen = set()
    for own in rollouts.values():
        obs = np.concatenate([rollout.data.obs["obs"][:-1] for rollout in own])
        action = np.concatenate([rollout.data.action for rollout in own])
        done = np.concatenate([rollout.data.done[:-1] for rollout in own])
        reward = np.concatenate([rollout.data.reward for rollout in own])
        steps = np.arange(len(obs))
        for env in range(obs.shape[1]):
            assert (reward[:, env] == 1 + steps).all()
            assert (obs[:, env, 2] == steps % 10).all()
            assert (obs[:, env, 1] == steps // 10).all()
            assert (done[:, env] == (steps % 10 == 0)).all()
            inside = ~done[1:, env]
            assert (obs[1:, env, 3] == action[:-1, env])[inside].all()
            seeds_seen.add(float(obs[0, env, 0]))
        assert [rollout.header.sequence for rollout in own] == list(range(1, len(own) + 1))
    assert len(seeds_seen) == 6  # three workers with two environments each


def one_worker_agent(name):
    """Return an agent whose weights do not change during a run, because its learning rate is tiny."""
    envs = VecEnv.create_factory(CountingEnv, None, 2)
    spaces = envs.observation_space, envs.action_space
    options = {"memory": {"recurrent_net": "gru", "recurrent_size": 4}, "plain": {},
               "normalizers": {"normalize_obs": True, "normalize_reward": True}}[name]
    return (IMPALA.create_factory(lr=1e-9), OnPolicyActor.create_factory(*spaces, hidden_sizes=(8,), **options),
            VTraceBuffer.create_factory(8), envs)


@pytest.mark.cpu("the learner's device chooses the actions only with central inference")
@pytest.mark.parametrize("name", ["plain", "memory", "normalizers"])
def test_one_worker_collects_the_same_with_either_inference(rollouts_of, name):
    found = []
    for inference in ("worker", "central"):
        scheme = Scheme(
            *one_worker_agent(name), seed=3, runtime="simulated", broadcast_interval=10**6, num_col_workers=1,
            col_execution=PARALLEL, col_communication=ASYNC, inference=inference)
        found.append(rollouts_of(scheme, updates=5)[1][:5])
    for alone, together in zip(*found, strict=True):
        assert arrays_of(alone).keys() == arrays_of(together).keys()
        for column, array in arrays_of(alone).items():
            np.testing.assert_array_equal(array, arrays_of(together)[column], err_msg=column)
        one, other = alone.header, together.header
        assert [episode[:2] for episode in one.episodes] == [episode[:2] for episode in other.episodes]
        assert one.moments.keys() == other.moments.keys()
        for field in ("num_env_steps", "collected_steps", "weights_version", "num_steps", "size", "sequence",
                      "preempted"):
            assert getattr(one, field) == getattr(other, field)


def largest_error_of_log_probabilities(rollouts_of, **settings):
    """Return the largest difference of stored log-probabilities from those of each row's own observation and action."""
    envs = VecEnv.create_factory("CartPole-v1", vec_env_size=2)
    parts = (IMPALA.create_factory(lr=1e-9), OnPolicyActor.create_factory(
        envs.observation_space, envs.action_space, policy_gain=10.0), VTraceBuffer.create_factory(8), envs)
    actor, largest = parts[1](device="cpu", seed=derive_seed(3, Stream.INIT)), 0.0
    rollouts = rollouts_of(
        Scheme(*parts, seed=3, runtime="simulated", broadcast_interval=10**6, **THREE, **settings), 6, num_workers=3)
    with torch.no_grad():
        for rollout in (rollout for own in rollouts.values() for rollout in own):
            data = rollout.data
            obs = torch.as_tensor(np.array(data.obs["obs"][:-1])).flatten(0, 1)
            logp = actor.evaluate_actions({"obs": obs}, {}, None, torch.as_tensor(np.array(data.action)).flatten())[0]
            largest = max(largest, float(np.abs(logp.numpy() - data.other["logp"].ravel()).max()))
    return largest


@pytest.mark.parametrize("batch", [2, 3])
def test_log_probabilities_of_every_row_belong_to_its_observation(rollouts_of, monkeypatch, batch):
    """Check the identity of decisions with V-trace, whose storages keep log-probabilities instead of values."""
    assert largest_error_of_log_probabilities(rollouts_of, inference_batch=batch) < 1e-5
    right = central_inference._split
    monkeypatch.setattr(central_inference, "_split", lambda value, number: right(value, number)[::-1])
    assert largest_error_of_log_probabilities(rollouts_of, inference_batch=batch) > 1e-3, "decisions of wrong workers"


def arrays_of(rollout):
    """Return all arrays of a rollout by column."""
    data = rollout.data
    return {**{f"obs/{leaf}": array for leaf, array in data.obs.items()},
            **{f"rhs/{net}": array for net, array in data.rhs.items()}, **data.other,
            **{name: getattr(data, name) for name in ("done", "action", "reward", "terminated", "truncated", "valid")}}


def step_until(scheme, updates):
    while scheme.version < updates:
        scheme.step()


def run_in_balance(scheme, check_ledger, updates):
    """Run a scheme and check its ledger after each step; return the final ledger."""
    while scheme.version < updates:
        scheme.step()
        check_ledger(scheme)
    final = scheme.stop()
    assert check_ledger(scheme) == final
    assert final["in_flight"] == final["queued"] == 0
    return final


def test_dqn_learns_with_central_inference(check_ledger):
    envs = VecEnv.create_factory(CountingEnv, None, 2)
    scheme = Scheme(
        DQN.create_factory(start_steps=20, mini_batch_size=8),
        QActor.create_factory(envs.observation_space, envs.action_space, hidden_sizes=(8,)),
        ReplayBuffer.create_factory(500, rollout_size=8), envs, seed=1, runtime="threads", **THREE)
    final = run_in_balance(scheme, check_ledger, 30)
    assert final["resident"] + final["evicted"] > 0


def test_priorities_of_continuous_actions_are_computed_by_the_actor(check_ledger):
    envs = VecEnv.create_factory("Pendulum-v1", vec_env_size=2)
    scheme = Scheme(
        SAC.create_factory(start_steps=20, mini_batch_size=8),
        OffPolicyActor.create_factory(
            envs.observation_space, envs.action_space, hidden_sizes=(8,), policy="stochastic"),
        PERBuffer.create_factory(500, rollout_size=8), envs, seed=1, runtime="simulated", num_replay_workers=2,
        initial_priority="worker", **THREE)
    assert run_in_balance(scheme, check_ledger, 20)["resident"] > 0


@pytest.mark.parametrize("policies", [("early", "shared", "shared"), ("shared", "shared", "late")])
def test_all_policies_act_for_all_workers(check_ledger, policies):
    policy_of = {f"agent_{index}": policy for index, policy in enumerate(policies)}
    envs = MultiAgentVecEnv.create_factory(ChangingAgents, None, 2, policy_of=policy_of)
    agent = multi_agent(envs, PPO.create_factory(num_epochs=1, num_mini_batch=1),
                        functools.partial(OnPolicyActor.create_factory, hidden_sizes=(8,)), GAEBuffer.create_factory(6))
    scheme = Scheme(*agent, envs, seed=1, runtime="simulated", **THREE)
    run_in_balance(scheme, check_ledger, 10)
    (single,) = {*policies} - {"shared"}
    assert scheme.metrics()["agent_steps/shared"] > scheme.metrics()[f"agent_steps/{single}"] > 0


# Weights


def test_a_rollout_has_the_version_of_its_oldest_weights(make_scheme, rollouts_of, monkeypatch):
    """Check versions, and that the actor takes new weights within rollouts."""
    used = {}
    insert = _Stream.acted

    def watch(stream, acting, version, seconds):
        used.setdefault((id(stream.builder), stream.builder.sequence), []).append(version)
        return insert(stream, acting, version, seconds)
    monkeypatch.setattr(_Stream, "acted", watch)
    kept = []
    build = RolloutBuilder.build

    def note(builder, version, *args, **options):
        kept.append((id(builder), builder.sequence, version))
        return build(builder, version, *args, **options)
    monkeypatch.setattr(RolloutBuilder, "build", note)
    rollouts_of(make_scheme(**THREE, runtime="simulated", costs={"step": 0.1, "grad": 0.05}, queue_size=4),
                updates=30)
    assert len(kept) > 8
    for builder, sequence, version in kept:
        assert version == min(used[builder, sequence]) == used[builder, sequence][0]
    assert any(len(set(versions)) > 1 for versions in used.values())


@pytest.mark.parametrize("interval", [1, 4])
def test_the_actor_takes_weights_after_this_number_of_updates(make_scheme, one_batch, interval):
    scheme = make_scheme(algo=one_batch, **THREE, broadcast_interval=interval, runtime="simulated",
                         costs={"step": 0.1, "grad": 0.01})
    while scheme.version < 40:
        scheme.step()
    metrics = scheme.metrics()
    assert metrics["inference_lag_mean"] < interval
    assert (metrics["inference_lag_mean"] > 0.5) == (interval > 1)
    assert 0 < metrics["weight_pushes"] <= 40 / interval + 1


def test_the_actor_takes_weights_after_this_number_of_env_steps(make_scheme, one_batch):
    scheme = make_scheme(algo=one_batch, **THREE, max_weight_sync_delay=64, runtime="simulated",
                         costs={"step": 0.1, "grad": 0.01})
    while scheme.version < 40:
        scheme.step()
    assert 8 <= scheme.metrics()["weight_pushes"] <= 12  # a rollout, used for one update, has 16 env steps


@pytest.mark.parametrize(("batch", "mean"), [(1, 2), (3, 6), (None, 4)])
def test_statistics_of_batches(make_scheme, batch, mean):
    scheme = make_scheme(**THREE, inference_batch=batch, runtime="simulated", costs={"step": 0.1})
    while scheme.version < 20:
        scheme.step()
    assert scheme.metrics()["inference_batch_mean"] == mean  # each worker has two environments
    assert make_scheme(num_col_workers=2).metrics()["inference_batch_mean"] is None


# Faults, drain and end


@pytest.mark.parametrize("batch", [1, 3, None])
def test_lost_workers_are_replaced(make_scheme, one_batch, check_ledger, batch):
    scheme = make_scheme(
        algo=one_batch, **THREE, inference_batch=batch, runtime="simulated", costs={"step": 0.1, "grad": 0.1},
        faults="kill col.2 @ step 21; kill col.1 @ step 43; hang col.3 @ step 60", worker_timeout_s=5.0)
    final = run_in_balance(scheme, check_ledger, 40)
    assert scheme.metrics()["workers_restarted"] == 3
    assert final["dropped"]["worker_lost"] > 0  # steps of rollouts that were not full yet


def test_the_run_continues_without_a_lost_worker(make_scheme, check_ledger):
    scheme = make_scheme(**THREE, inference_batch=3, runtime="simulated", costs={"step": 0.1, "grad": 0.1},
                         faults="kill col.2 @ step 21", on_worker_failure="ignore")
    run_in_balance(scheme, check_ledger, 40)
    assert scheme.metrics()["workers_missing"] == 1


def test_a_lost_worker_may_end_the_run(make_scheme):
    scheme = make_scheme(**THREE, runtime="simulated", faults="kill col.2 @ step 21", on_worker_failure="raise")
    with pytest.raises(WorkerLostError, match="CWorker 2"):
        step_until(scheme, 100)


def test_resets_are_not_env_steps(check_ledger):
    envs = VecEnv.create_factory(CountingEnv, None, 2, autoreset="next_step")
    scheme = Scheme(
        PPO.create_factory(num_epochs=1, num_mini_batch=1),
        OnPolicyActor.create_factory(envs.observation_space, envs.action_space, hidden_sizes=(8,)),
        GAEBuffer.create_factory(8), envs, seed=1, runtime="simulated", **THREE)
    final = run_in_balance(scheme, check_ledger, 20)
    assert 0 < final["consumed_unique"] < 16 * scheme.metrics()["rollouts"]  # a rollout has 16 rows


def test_an_error_of_an_environment_ends_the_run(make_scheme):
    scheme = make_scheme(FaultyEnv, {"fault": "step", "at": 30}, **THREE)
    with pytest.raises(EnvError):
        step_until(scheme, 1000)


@pytest.mark.parametrize("runtime", ["threads", "simulated"])
def test_a_drain_delivers_unfinished_rollouts_and_collection_goes_on(make_scheme, check_ledger, rollouts_of, runtime):
    scheme = make_scheme(**THREE, runtime=runtime)
    for _ in range(3):
        target = scheme.version + 3
        while scheme.version < target:
            scheme.step()
        ledger = scheme.drain()
        assert ledger["in_flight"] == ledger["queued"] == 0
        check_ledger(scheme)
    run_in_balance(scheme, check_ledger, scheme.version + 5)


def test_a_resumed_run_goes_on(make_scheme, check_ledger):
    scheme = make_scheme(**THREE, runtime="simulated")
    while scheme.version < 10:
        scheme.step()
    state = scheme.checkpoint()
    collected = scheme.stop()["collected"]
    resumed = make_scheme(**THREE, runtime="simulated")
    resumed.resume(state)
    resumed.start()
    assert resumed.version == scheme.version >= 10  # the checkpoint makes updates from data that are queued
    assert run_in_balance(resumed, check_ledger, resumed.version + 10)["collected"] > collected


# Bad settings


@pytest.mark.parametrize(("settings", "text"), [
    ({"inference": "central", "num_col_workers": 3}, "inference='central': only with "
     "col_communication='asynchronous'; give that, or backend='async'"),
    ({**CENTRAL}, "inference='central' needs num_col_workers >= 2"),
    ({**THREE, "col_in_flight": 3}, "col_in_flight=3 is for inference='worker'"),
    ({**THREE, "inference_batch": 4}, r"inference_batch must not exceed .* got 4 > 3"),
    ({**THREE, "inference": "worker", "inference_batch": 2}, "inference_batch needs inference='central'"),
    ({**THREE, "compress_data_to_send": "lz4"}, "contradicts compress_data_to_send"),
    ({**THREE, "compress_weights_to_send": "lz4"}, "compress_weights_to_send contradicts inference='central'"),
    ({**THREE, "max_policy_lag": 3, "on_policy_lag": "wait"}, "on_policy_lag='wait' contradicts inference='central'"),
    ({**THREE, "inference": "here"}, "inference must be one of"),
])
def test_settings_that_contradict_central_inference_are_refused(make_scheme, settings, text):
    with pytest.raises(ConfigError, match=text):
        make_scheme(**settings)


def test_one_actor_has_one_epsilon():
    envs = VecEnv.create_factory(CountingEnv, None, 2)
    with pytest.raises(ConfigError, match="epsilon_per_worker=True contradicts inference='central'"):
        Scheme(DQN.create_factory(epsilon_per_worker=True, mini_batch_size=8),
               QActor.create_factory(envs.observation_space, envs.action_space), ReplayBuffer.create_factory(500), envs,
               **THREE)


def test_noise_that_continues_in_each_environment_is_refused():
    envs = VecEnv.create_factory("Pendulum-v1", None, 2)
    agent = (DDPG.create_factory(noise="ou", mini_batch_size=8),
             OffPolicyActor.create_factory(envs.observation_space, envs.action_space, policy="deterministic"),
             ReplayBuffer.create_factory(500), envs)
    with pytest.raises(ConfigError, match=r"noise='ou' contradicts inference='central'.*give noise='gaussian'"):
        Scheme(*agent, **THREE)
    Scheme(*agent, **{**THREE, "inference": "worker"}).stop()


def test_no_worker_has_two_requests(make_scheme):
    scheme = make_scheme(runtime="simulated", **THREE)
    strategy, found = scheme.start().local_worker.collector.strategy, []
    scheme.runtime.simulation.after_event = lambda: found.append(strategy.invariant())
    while scheme.version < 8:
        scheme.step()
    scheme.runtime.simulation.after_event = None
    assert len(found) > 50
    assert all(found)
    strategy._unstarted = [0, 1, 2]
    strategy._start_workers()  # some workers have a request already
    assert not strategy.invariant()
