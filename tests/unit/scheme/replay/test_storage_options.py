"""Check that a scheme's options for the replay storage override the storage's own options, in all shards and for the
learner."""

from __future__ import annotations

import json

import pytest

from pytorchrl import DQN, PERBuffer, QActor, ReplayBuffer, Scheme, SequenceBuffer, VecEnv, linear
from pytorchrl.agent.storages import UniformSequenceBuffer
from pytorchrl.envs.testing import CountingEnv
from pytorchrl.errors import ConfigError
from pytorchrl.scheme.replay.storage_options import with_options


@pytest.fixture
def make_apex():
    """Return a function that makes Ape-X with a small DQN agent in the simulated runtime."""
    schemes = []

    def make(storage=PERBuffer, **settings):
        envs = VecEnv.create_factory(CountingEnv, {"episode_length": 5}, 2)
        schemes.append(Scheme.apex(
            DQN.create_factory(start_steps=0, mini_batch_size=8, epsilon_per_worker=True),
            QActor.create_factory(envs.observation_space, envs.action_space, hidden_sizes=(8,)),
            storage.create_factory(400, rollout_size=7), envs,
            **{"seed": 1, "runtime": "simulated", "num_replay_workers": 2} | settings))
        return schemes[-1]
    yield make
    for scheme in schemes:
        scheme.stop()


def storages(scheme):
    """Make five updates, and return the storages of all shards."""
    while scheme.version < 5:
        scheme.step()
    return [handle.native.worker._storage
            for handle in scheme.update_worker.local_worker.replay_workers.remote_workers()]


@pytest.mark.parametrize(("name", "value"), [("alpha", 0.9), ("beta", 0.7), ("epsilon", 0.5), ("stratified", True)])
def test_scheme_options_override_those_of_the_storage(make_apex, name, value):
    scheme = make_apex(**{name: value})
    assert scheme.settings[name] == value
    for storage in storages(scheme):
        assert getattr(storage.options, name) == value != getattr(PERBuffer.Options(size=1), name)
    assert getattr(scheme.update_worker.local_worker.storage.options, name) == value


@pytest.mark.every(3)
@pytest.mark.parametrize("settings", [
    {}, {"num_grad_workers": 2, "grad_communication": "asynchronous"},
    {"num_grad_workers": 2, "grad_communication": "synchronous"},
    {"num_grad_workers": 2, "grad_communication": "synchronous", "distribute_gradients": True}],
    ids=["one", "asynchronous", "synchronous", "ranks"])
@pytest.mark.parametrize("beta", [linear(0.4, 1.0), [(0, 0.4), (2000, 1.0)], lambda remaining: 1.0 - 0.6 * remaining],
                         ids=["linear", "points", "function"])
def test_a_schedule_of_beta_affects_sampling(make_apex, settings, beta):
    scheme = make_apex(beta=beta, **settings)
    assert scheme.settings["beta"] == str(scheme.agent.storage_factory.options.beta)
    json.dumps(scheme.settings)
    scheme.start(2000)
    while scheme.version < 8:
        scheme.step()
    worker = scheme.update_worker.local_worker
    learners = [handle.native.worker for handle in scheme.update_worker.remote_workers] if settings else [worker]
    betas = {handle.native.worker._storage.parameters["beta"]
             for learner in learners for handle in learner.replay_workers.remote_workers()}
    assert all(0.4 < beta < 1.0 for beta in betas)


def test_size_is_the_total_of_all_shards(make_apex):
    assert [storage.options.size for storage in storages(make_apex(size=101))] == [51, 50]
    with pytest.raises(ConfigError, match="size 20 divided among 2 shards is only 10 per shard"):
        make_apex(size=20)


def test_prioritized_changes_the_storage(make_apex):
    assert {type(storage) for storage in storages(make_apex(prioritized=False))} == {ReplayBuffer}
    scheme = make_apex(ReplayBuffer, prioritized=True, alpha=0.3)
    assert scheme.settings["initial_priority"] == "worker"
    assert {(type(storage), storage.options.alpha,
             storage.options.rollout_size) for storage in storages(scheme)} == {(PERBuffer, 0.3, 7)}


@pytest.mark.parametrize(("storage", "other"), [(ReplayBuffer, PERBuffer), (UniformSequenceBuffer, SequenceBuffer)])
def test_prioritized_chooses_between_two_forms_of_a_storage(storage, other):
    factory = storage.create_factory(500, rollout_size=3, n_step=2)
    found = with_options(factory, {"prioritized": True})
    assert (found.cls, found.options.rollout_size, found.options.n_step) == (other, 3, 2)
    assert with_options(found, {"prioritized": False}) == factory


@pytest.mark.parametrize(("storage", "settings", "text"), [
    (PERBuffer, {"alpha": 0.0}, r"alpha must be a number > 0.0, got 0\.0"),
    (PERBuffer, {"beta": float("inf")}, "beta must be finite"),
    (PERBuffer, {"prioritized": 1}, "prioritized must be True, False or None, got 1"),
    (ReplayBuffer, {"alpha": 0.5}, "alpha would be ignored: ReplayBuffer has no such option"),
    (PERBuffer, {"prioritized": False, "beta": 0.5}, "beta would be ignored: ReplayBuffer has no such option"),
    (PERBuffer, {"num_replay_workers": None, "alpha": 0.5},
     "replay is stored in shards|alpha=0.5: only with num_replay_workers; change that, or leave alpha out"),
])
def test_wrong_or_unused_options_are_refused(make_apex, storage, settings, text):
    with pytest.raises(ConfigError, match=text):
        make_apex(storage, **settings)
