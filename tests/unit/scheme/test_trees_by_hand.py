"""Check worker trees that are built by hand: their ledgers are exact, and wrong trees are rejected before anything
starts."""

from __future__ import annotations

import itertools
import threading

import pytest

from pytorchrl import (
    ASYNC, CENTRAL, DQN, PARALLEL, PPO, SYNC, GAEBuffer, Learner, OnPolicyActor, PERBuffer, QActor, Scheme, VecEnv,
    linear)
from pytorchrl.envs.testing import CountingEnv
from pytorchrl.errors import ConfigError, FactoryError
from pytorchrl.scheme import CWorkerSet, GWorkerSet, RWorkerSet
from pytorchrl.scheme.gradients.g_worker import GWorker
from pytorchrl.scheme.updates.u_worker import UWorker

ENVS = VecEnv.create_factory(CountingEnv, vec_env_size=2)
SPACES = (ENVS.observation_space, ENVS.action_space)
AGENT = (PPO.create_factory(num_epochs=2, num_mini_batch=2), OnPolicyActor.create_factory(*SPACES, hidden_sizes=(8,)),
         GAEBuffer.create_factory(8), ENVS)
Q_AGENT = (DQN.create_factory(mini_batch_size=8, start_steps=16), QActor.create_factory(*SPACES, hidden_sizes=(8,)),
           PERBuffer.create_factory(400))


def collection(number=1, agent=AGENT, **options):
    return CWorkerSet.create_factory(number, *agent, **options)


def is_exact(ledger):
    places = ("in_flight", "queued", "consumed_unique", "resident", "evicted")
    return ledger["collected"] == sum(ledger[place] for place in places) + sum(ledger["dropped"].values()) > 0


@pytest.mark.every(3)
@pytest.mark.parametrize("runtime", ["threads", "simulated"])
@pytest.mark.parametrize("shape", [*itertools.product((CENTRAL, PARALLEL), (SYNC, ASYNC), (CENTRAL, PARALLEL),
                                                      (SYNC, ASYNC))],
                         ids="-".join)
def test_the_ledger_of_every_pattern_is_exact(shape, runtime):
    col_execution, col_communication, grad_execution, grad_communication = shape
    gradients = GWorkerSet.create_factory(
        2 if grad_execution is PARALLEL else 1, collection(2 if col_execution is PARALLEL else 1),
        col_execution=col_execution, col_communication=col_communication)
    scheme = Scheme.from_factory(
        gradients, grad_execution=grad_execution, grad_communication=grad_communication, runtime=runtime, seed=1)
    for _ in range(3):
        scheme.step()
    assert is_exact(scheme.stop())


@pytest.mark.parametrize("runtime", ["threads", "simulated"])
def test_other_trees_have_exact_ledgers_too(runtime):
    decentralized = Scheme.from_factory(
        GWorkerSet.create_factory(2, collection()), grad_execution=PARALLEL, distribute_gradients=True, runtime=runtime,
        seed=1)
    shards = RWorkerSet.create_factory(2, *Q_AGENT, routing="least_loaded")
    apex = Scheme.from_factory(GWorkerSet.create_factory(
        1, collection(2, (*Q_AGENT, ENVS), initial_priority="worker"), col_execution=PARALLEL, col_communication=ASYNC,
        replay_workers_factory=shards), grad_communication=ASYNC, runtime=runtime, seed=1)
    uneven = Scheme.from_factory(
        GWorkerSet.create_factory(2, collection((1, 3)), col_execution=PARALLEL), grad_execution=PARALLEL,
        runtime=runtime, seed=1)
    single = Scheme.from_factory(
        GWorkerSet.create_factory(1, collection(1), col_execution=PARALLEL), grad_execution=PARALLEL, runtime=runtime,
        seed=1)
    for scheme in (decentralized, apex, uneven, single):
        for _ in range(3):
            scheme.step()
        assert is_exact(scheme.stop())


def test_a_learner_drives_a_tree_and_resumes_it(tmp_path):
    def make():
        gradients = GWorkerSet.create_factory(1, collection(2), col_execution=PARALLEL)
        return Scheme.from_factory(gradients, ENVS, runtime="threads", seed=1)

    def train(directory, target_steps):
        with Learner(make(), target_steps=target_steps, log_dir=str(directory), checkpoint_every=64, resume=True,
                     progress=False) as learner:
            learner.train()
            assert len(learner.evaluate(num_episodes=2).returns) == 2
            return learner.scheme.acting_state()
    train(tmp_path / "halves", 128)
    resumed, whole = train(tmp_path / "halves", 256), train(tmp_path / "whole", 256)
    assert all((resumed[key] == value).all() for key, value in whole.items())


def test_each_level_works_without_the_levels_above_it():
    collectors = collection()(0)
    assert len(collectors.remote_workers()) == 0
    collectors.stop()
    workers = GWorkerSet.create_factory(1, collection())()
    worker = workers.local_worker()
    gradients, info = worker.step()
    worker.apply_gradients(gradients)
    assert worker.actor_version == 1
    assert "loss" in info or info
    worker.stop()
    update_worker = UWorker(GWorkerSet.create_factory(2, collection()), grad_execution=PARALLEL)
    update_worker.step()
    assert update_worker.stop().consumed_unique > 0


def test_factories_print_and_compare():
    assert collection(2) == collection(2)
    assert collection(2) != collection(3)
    assert repr(collection(2)).startswith("CWorkerSet.create_factory(2, PPO.create_factory(")


# Wrong trees


WRONG = {
    "central collection over a set of four": (
        lambda: GWorkerSet.create_factory(1, collection(4)), ConfigError, "col_execution='Central' contradicts "
                                                                          "num_col_workers=4.*give"),
    "a worker with central collection over a set of four": (
        lambda: GWorker(0, collection(4)), ConfigError,
        "col_execution='Central' contradicts num_col_workers=4.*default in GWorkerSet.create_factory"),
    "central gradients over a set of two": (
        lambda: UWorker(GWorkerSet.create_factory(2, collection())), ConfigError,
        "grad_execution='Central' contradicts num_grad_workers=2.*give"),
    "central gradients over a set of two in a scheme": (
        lambda: Scheme.from_factory(GWorkerSet.create_factory(2, collection()), grad_execution=CENTRAL), ConfigError,
        "grad_execution='Central' contradicts num_grad_workers=2.*give"),
    "an unknown codec": (
        lambda: GWorkerSet.create_factory(2, collection(), compress_grads_to_send="int4"), ConfigError,
        "compress_grads_to_send.*got 'int4'; did you mean 'int8'"),
    "an unknown option": (
        lambda: GWorkerSet.create_factory(2, collection(), queue_siz=3), ConfigError, "no option 'queue_siz'; did you "
                                                                                      "mean 'queue_size'"),
    "an unknown option of collection": (
        lambda: collection(2, compress_data="lz4"), ConfigError,
        "CWorkerSet has no option 'compress_data'; .*compress_data_to_send"),
    "an option of the gradient workers at the collection workers": (
        lambda: collection(2, col_execution=PARALLEL), ConfigError,
        "CWorkerSet.create_factory does not accept col_execution; give it to GWorkerSet.create_factory"),
    "an option of the scheme at the gradient workers": (
        lambda: GWorkerSet.create_factory(2, collection(), grad_execution=PARALLEL), ConfigError,
        "GWorkerSet.create_factory does not accept grad_execution; give it to Scheme.from_factory"),
    "an option of the collection workers at the gradient workers": (
        lambda: GWorkerSet.create_factory(1, collection(), compress_data_to_send="lz4"), ConfigError,
        "does not accept compress_data_to_send; give it to CWorkerSet.create_factory"),
    "an option of the gradient workers at the scheme": (
        lambda: Scheme.from_factory(GWorkerSet.create_factory(1, collection()), queue_size=3), ConfigError,
        "Scheme.from_factory does not accept queue_size; give it to RWorkerSet.create_factory or "
        "GWorkerSet.create_factory"),
    "a number of workers by keyword": (
        lambda: RWorkerSet.create_factory(2, *Q_AGENT, num_replay_workers=3), ConfigError,
        "num_replay_workers is the first argument of RWorkerSet.create_factory"),
    "a wrong resource": (
        lambda: GWorkerSet.create_factory(2, collection(), grad_worker_resources={"num_cpu": 1}), ConfigError,
        "grad_worker_resources has 'num_cpu'; did you mean 'num_cpus'"),
    "an option of the other kind of collection": (
        lambda: GWorkerSet.create_factory(1, collection(), queue_size=3), ConfigError,
        "queue_size=3: only with col_communication='asynchronous'; change that, or leave queue_size out"),
    "replay shards with synchronous collection": (
        lambda: GWorkerSet.create_factory(
            1, collection(1, (*Q_AGENT, ENVS)), replay_workers_factory=RWorkerSet.create_factory(2, *Q_AGENT)),
            ConfigError,
        "num_replay_workers needs col_communication='asynchronous'"),
    "replay shards of another agent": (
        lambda: GWorkerSet.create_factory(
            1, collection(1, (*Q_AGENT, ENVS)), col_communication=ASYNC,
            replay_workers_factory=RWorkerSet.create_factory(2, *Q_AGENT[:2], PERBuffer.create_factory(500))),
            ConfigError,
        "replay_workers_factory and col_workers_factory have different agents; give both the same"),
    "replay shards for data that must be fresh": (
        lambda: Scheme.from_factory(GWorkerSet.create_factory(
            1, collection(), col_communication=ASYNC, replay_workers_factory=RWorkerSet.create_factory(2, *AGENT[:3]))),
            ConfigError,
        "replay cannot use the"),
    "numbers for other gradient workers": (
        lambda: GWorkerSet.create_factory(3, collection((1, 3)), col_execution=PARALLEL), ConfigError,
        "num_col_workers has 2 numbers for 3 gradient workers.*give one for each"),
    "a set in place of a factory": (
        lambda: GWorkerSet.create_factory(2, lambda **context: None), FactoryError, "col_workers_factory must be the "
                                                                                    "result of CWorkerSet"),
    "a factory of another level": (
        lambda: Scheme.from_factory(collection()), ConfigError, "from_factory needs the result of "
                                                                "GWorkerSet.create_factory"),
    "a schedule without an end": (
        lambda: UWorker(GWorkerSet.create_factory(1, collection(1,
                                                                (PPO.create_factory(lr=linear(1e-3, 0.0)),
                                                                 *AGENT[1:])))),
        ConfigError, "lr follows a schedule.*set target_steps"),
    "ranks of one": (
        lambda: Scheme.from_factory(GWorkerSet.create_factory(1, collection()), distribute_gradients=True), ConfigError,
        "distribute_gradients=True needs num_grad_workers >= 2"),
    "no workers": (lambda: collection(0), ConfigError, "num_col_workers must be a whole number >= 1.*got 0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_tree_is_refused_before_anything_starts(name):
    make, error, message = WRONG[name]
    before = set(threading.enumerate())
    with pytest.raises(error, match=message):
        make()
    assert set(threading.enumerate()) == before
