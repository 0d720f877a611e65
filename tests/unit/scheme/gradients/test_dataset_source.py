"""Tests of schemes that learn from a data set: nothing is collected, and the ledger stays empty."""

from __future__ import annotations

import dataclasses

import gymnasium as gym
import numpy as np
import pytest

from pytorchrl import (
    ASYNC,
    DQN,
    PPO,
    SAC,
    GAEBuffer,
    Learner,
    OffPolicyActor,
    OnPolicyActor,
    PERBuffer,
    QActor,
    ReplayBuffer,
    Scheme,
    VecEnv,
    linear,
)
from pytorchrl.agent.actors import ValueActor
from pytorchrl.agent.algorithms import BC, IQL
from pytorchrl.agent.storages.sequences import UniformSequenceBuffer
from pytorchrl.errors import ConfigError
from pytorchrl.play.dataset import _write_npz
from tests.unit.agent.test_dataset import Reach, make_data

GRADIENTS = {
    "central": {}, "thread": {"grad_communication": ASYNC}, "parallel": {"num_grad_workers": 2},
    "asynchronous": {"num_grad_workers": 2, "grad_communication": ASYNC},
    "decentralized": {"num_grad_workers": 2, "distribute_gradients": True}}
SMALL = {"hidden_sizes": (4,)}


class Choose(Reach):
    """The environment with discrete actions."""

    action_space = gym.spaces.Discrete(3)

    def step(self, action):
        return super().step(np.array([action, 1.0, 1.0]))


@pytest.fixture
def data(tmp_path):
    _write_npz(make_data(lengths=(5, 4, 6), ends="tut"), tmp_path / "data.npz")
    return tmp_path / "data.npz"


@pytest.fixture
def discrete(tmp_path):
    _write_npz(make_data(gym.spaces.Discrete(3), lengths=(5, 4, 6), ends="tut"), tmp_path / "discrete.npz")
    return tmp_path / "discrete.npz"


def parts_of(algorithm=SAC, actor_class=OffPolicyActor, env=Reach, storage=None, actor=None, **options):
    envs = VecEnv.create_factory(env, vec_env_size=2)
    actor = actor_class.create_factory(envs.observation_space, envs.action_space, **SMALL, **(actor or {}))
    algorithm = algorithm.create_factory(**{"mini_batch_size": 4, **options})
    return algorithm, actor, storage or ReplayBuffer.create_factory(20, rollout_size=4), envs, envs


def with_memory():
    storage = UniformSequenceBuffer.create_factory(64, length=4, burn_in=0, period=4, rollout_size=4)
    return parts_of(actor={"recurrent_net": "gru", "recurrent_size": 4}, storage=storage)


@pytest.mark.parametrize(("kind", "runtime"), [
    *[(kind, runtime) for kind in GRADIENTS for runtime in ("simulated", "threads")], ("parallel", "processes")])
def test_every_pattern_of_gradients_learns_from_a_data_set(kind, runtime, data):
    scheme = Scheme(*parts_of(actor={"normalize_obs": True}), dataset=data, seed=1, runtime=runtime,
                    **GRADIENTS[kind])
    with Learner(scheme, target_steps=12, progress=False, eval_every=6, eval_episodes=1) as learner:
        learner.train()
        moments = scheme.acting_state()["obs_moments.0.mean"]
        assert learner.env_steps == learner.updates >= 12
        ledger = learner.ledger
        assert learner.get_metrics()["evaluation"]["episodes"] == 1
        assert learner.return_mean is None
    assert {name: count for name, count in ledger.items() if name not in ("consumed", "dropped")} == dict.fromkeys(
        ("collected", "in_flight", "queued", "consumed_unique", "resident", "evicted"), 0)
    assert set(ledger["dropped"].values()) == {0}
    expected = make_data(lengths=(5, 4, 6), ends="tut").observations["obs"].astype(np.float32).mean(0)
    np.testing.assert_allclose(moments.numpy(), expected, atol=1e-6)


def test_dataset(data):
    """Check that no environment is built for training, and that batches contain the steps of the data set."""
    built = []

    class Counted(Reach):
        def __init__(self):
            built.append(self)

    scheme = Scheme(*parts_of(env=Counted), dataset=data, seed=1)
    built.clear()
    scheme.start()
    storage = scheme.update_worker.local_worker.storage
    assert storage.counters["inserted"] == 0  # the data set is read by the first update
    for _ in range(250):
        scheme.step()
    assert storage.counters["inserted"] == storage.counters["resident"] == 15
    assert storage.counters["sampled"] >= 1000
    scheme.stop()
    assert built == []


def test_batches_are_drawn_uniformly_from_all_steps(data):
    scheme = Scheme(*parts_of(), dataset=data, seed=1)
    worker, seen = scheme.update_worker.local_worker, []
    for _ in range(300):
        seen += worker.get_data().ids.tolist()
        worker.get_grads()
    counts = np.bincount(seen, minlength=15)
    assert counts.min() > 40  # 80 on average
    scheme.stop()


def test_priorities_of_a_data_set_follow_the_errors(data):
    scheme = Scheme(*parts_of(storage=PERBuffer.create_factory(20, rollout_size=4)), dataset=data, seed=1)
    for _ in range(30):
        scheme.step()
    storage = scheme.update_worker.local_worker.storage
    assert len({round(value, 6) for value in storage.priority_sums.get(np.arange(15)).tolist()}) > 5
    scheme.stop()


def test_schedules_follow_the_updates(data):
    scheme = Scheme(*parts_of(lr_pi=linear(1e-3, 0.0)), dataset=data, seed=1)
    with Learner(scheme, target_steps=10, progress=False) as learner:
        rates = [learner.step()["lr_pi"] for _ in range(10)]
    np.testing.assert_allclose(rates, [1e-3 * (1 - i / 10) for i in range(10)], rtol=1e-6)


@pytest.mark.parametrize("prioritized", [False, True])
@pytest.mark.parametrize("kind", ["central", "parallel"])
def test_a_run_from_a_data_set_resumes_bit_for_bit(kind, prioritized, data, tmp_path):
    def learner(target, directory, **options):
        storage = (PERBuffer if prioritized else ReplayBuffer).create_factory(20, rollout_size=4)
        scheme = Scheme(*parts_of(storage=storage), dataset=data, seed=1, runtime="simulated", **GRADIENTS[kind])
        return Learner(scheme, target, tmp_path / directory, progress=False, tensorboard=False, checkpoint_every=6,
                       **options)

    states = []
    with learner(12, "whole") as whole:
        whole.train()
        states.append(whole.scheme.acting_state())
    with learner(6, "parts") as first:
        first.train()
    data.rename(tmp_path / "moved.npz")  # the resumed run has the data in its checkpoint
    data.write_bytes((tmp_path / "moved.npz").read_bytes())
    with learner(12, "parts", resume=True) as second:
        second.train()
        states.append(second.scheme.acting_state())
    assert states[0].keys() == states[1].keys()
    assert all(bool((states[0][name] == states[1][name]).all()) for name in states[0])


def test_a_recorded_run_from_a_data_set_is_replayed(data, tmp_path):
    path, sums = str(tmp_path / "run.jsonl"), []
    for options in ({"record": path}, {"replay": path}):
        scheme = Scheme(*parts_of(), dataset=data, seed=1, num_grad_workers=2, runtime="simulated", **options)
        scheme.start(6)
        for _ in range(6):
            scheme.step()
        sums.append({name: float(value.double().sum()) for name, value in scheme.acting_state().items()})
        scheme.stop()
    assert sums[0] == sums[1]


@pytest.mark.parametrize(("algorithm", "actor", "options"), [
    (SAC, OffPolicyActor, {}), (DQN, QActor, {}), (IQL, ValueActor, {}), (BC, OnPolicyActor, {})])
def test_any_replay_algorithm_learns_from_discrete_data(algorithm, actor, options, discrete):
    scheme = Scheme(*parts_of(algorithm, actor, Choose, **options), dataset=discrete, seed=1)
    for _ in range(5):
        info = scheme.step()
    assert all(np.isfinite(value) for value in info.values())
    scheme.stop()


def test_options_of_collection_are_refused(data):
    for options in ({"num_col_workers": 2}, {"col_execution": "Parallel"}, {"train_batch_size": 8},
                    {"queue_timeout_s": 5.0}, {"microbatch_size": 2}):
        (name,) = options
        with pytest.raises(ConfigError, match=rf"{name} would have no effect, because nothing is collected.*leave out"):
            Scheme(*parts_of(), dataset=data, **options)
    with pytest.raises(ConfigError, match=r"dataset=.*: only with col_communication='synchronous'"):
        Scheme(*parts_of(), dataset=data, col_communication=ASYNC)
    with pytest.raises(ConfigError, match=r"dataset=.*: only with .* without num_replay_workers"):
        Scheme(*parts_of(), dataset=data, col_communication=ASYNC, num_replay_workers=2)


@pytest.mark.parametrize(("options", "text"), [
    ({"start_steps": 10}, "start_steps would have no effect, because nothing is collected"),
    ({"update_every": 7}, "update_every would have no effect, because nothing is collected"),
    ({"num_updates": 7}, "num_updates would have no effect"),
    ({"storage": ReplayBuffer.create_factory(14, rollout_size=4)},
     "size 14 is less than the 15 steps of the dataset; raise size to 15 or more")])
def test_options_that_contradict_a_data_set_are_refused(options, text, data):
    with pytest.raises(ConfigError, match=text):
        Scheme(*parts_of(**options), dataset=data)


def test_data_sets_that_cannot_be_used_are_refused_before_the_start(data, discrete, tmp_path):
    whole = data.read_bytes()
    (tmp_path / "short.npz").write_bytes(whole[:len(whole) // 2])
    (tmp_path / "empty.npz").write_bytes(b"")
    for path, text in (("none.npz", "No such file"), ("short.npz", "is not a readable data set"),
                       ("empty.npz", "is not a readable data set"), ("data.csv", "path must be a file with the suffix"),
                       ("discrete.npz", "discrete actions .* give the environment in which the data set was recorded")):
        with pytest.raises(ConfigError, match=text):
            Scheme(*parts_of(), dataset=tmp_path / path)
    pytest.importorskip("minari")
    with pytest.raises(ConfigError, match=r"none/data' is neither a directory nor an id of Minari"):
        Scheme(*parts_of(), dataset=tmp_path / "none" / "data")
    with pytest.raises(ConfigError, match="dataset must be a file"):
        Scheme(*parts_of(), dataset="")


def test_algorithms_without_replay_cannot_use_a_data_set(data):
    envs = VecEnv.create_factory(Reach)
    actor = OnPolicyActor.create_factory(envs.observation_space, envs.action_space, **SMALL)
    with pytest.raises(ConfigError, match=r"PPO learns from rollouts.*provides single transitions.*use BC, .*SAC"):
        Scheme(PPO.create_factory(), actor, GAEBuffer.create_factory(8), envs, dataset=data)
    with pytest.raises(ConfigError, match=r"BC learns from a data set, but there is none; give dataset=\.\.\."):
        Scheme(BC.create_factory(), actor, ReplayBuffer.create_factory(100), envs)
    with pytest.raises(ConfigError, match="n_step=3 would have no effect, because BC uses no rewards"):
        Scheme(BC.create_factory(), actor, ReplayBuffer.create_factory(100, n_step=3), envs, dataset=data)
    with pytest.raises(ConfigError, match=r"SAC learns from sequences .* leave recurrent_net out"):
        Scheme(*with_memory(), dataset=data)


def test_what_errors_about_data_sets_ask_for_works(data, discrete, tmp_path):
    """Check that each wrong scheme is refused, and that the scheme that its error asks for is accepted."""
    (tmp_path / "short.npz").write_bytes(data.read_bytes()[:1000])
    outside = make_data(lengths=(5, 4, 6), ends="tut")
    outside.actions[2] = [9.0, 1.0, 1.0]
    _write_npz(outside, tmp_path / "outside.npz")
    other = make_data(lengths=(5, 4, 6), ends="tut")
    wide = {leaf: np.repeat(rows, 2, 1) for leaf, rows in other.observations.items()}
    wide_final = {leaf: np.repeat(rows, 2, 1) for leaf, rows in other.final_observations.items()}
    _write_npz(dataclasses.replace(other, observations=wide, final_observations=wide_final), tmp_path / "wide.npz")
    cloning, replay = parts_of(BC, OnPolicyActor), ReplayBuffer.create_factory
    rollouts = (PPO.create_factory(), cloning[1], GAEBuffer.create_factory(8), *cloning[3:])
    for wrong, options, right, remedy in (
            (cloning, {}, cloning, {"dataset": data}),
            (parts_of(BC, OnPolicyActor, storage=replay(20, rollout_size=4, n_step=3)), {"dataset": data}, cloning,
             {"dataset": data}),
            (rollouts, {"dataset": data}, cloning, {"dataset": data}),
            (with_memory(), {"dataset": data}, parts_of(), {"dataset": data}),
            (parts_of(update_every=7), {"dataset": data}, parts_of(), {"dataset": data}),
            (parts_of(), {"dataset": tmp_path / "short.npz"}, parts_of(), {"dataset": data}),
            (parts_of(), {"dataset": discrete}, parts_of(DQN, QActor, Choose), {"dataset": discrete}),
            (parts_of(), {"dataset": tmp_path / "outside.npz"}, parts_of(), {"dataset": data}),
            (parts_of(), {"dataset": tmp_path / "wide.npz"}, parts_of(), {"dataset": data}),
            (parts_of(storage=replay(14, rollout_size=4)), {"dataset": data},
             parts_of(storage=replay(15, rollout_size=4)), {"dataset": data}),
            (parts_of(), {"dataset": data, "num_col_workers": 2}, parts_of(), {"num_col_workers": 2})):
        with pytest.raises(ConfigError):
            Scheme(*wrong, **options)
        Scheme(*right, **remedy)
