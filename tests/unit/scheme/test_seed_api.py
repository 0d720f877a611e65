"""The public names, signatures, defaults and attributes of `pytorchrl.scheme.gradients`, from a table of its own."""

from __future__ import annotations

import importlib
import inspect
import queue
import threading

import pytest
import torch

from pytorchrl import (
    DQN, PPO, R2D2, SAC, GAEBuffer, OffPolicyActor, OnPolicyActor, PERBuffer, QActor, ReplayBuffer, SequenceBuffer,
    VecEnv)
from pytorchrl.envs.testing import CountingEnv
from pytorchrl.errors import ConfigError, WeightsError
from pytorchrl.scheme import CWorkerSet
from pytorchrl.scheme.gradients.g_worker import GWorker

_RESOURCES = {"memory": 5368709120, "num_cpus": 1, "num_gpus": 0.2, "object_store_memory": 2147483648}
NO_DEFAULT = inspect.Parameter.empty

G_WORKER, G_WORKER_SET = "pytorchrl.scheme.gradients.g_worker", "pytorchrl.scheme.gradients.g_worker_set"

BASES = [
    (G_WORKER, "CollectorThread", "threading", "Thread"),
    (G_WORKER, "GWorker", "pytorchrl.scheme.base.worker", "Worker"),
    (G_WORKER_SET, "GWorkerSet", "pytorchrl.scheme.base.worker_set", "WorkerSet"),
]

SIGNATURES = [
    (G_WORKER, "CollectorThread.__init__", [
        ("index_worker", NO_DEFAULT), ("local_worker", NO_DEFAULT), ("remote_workers", NO_DEFAULT),
        ("col_fraction_workers", 1.0), ("col_communication", "synchronous"), ("col_execution", "Central"),
        ("broadcast_interval", 1)]),
    (G_WORKER, "CollectorThread.broadcast_new_weights", []),
    (G_WORKER, "CollectorThread.run", []),
    (G_WORKER, "CollectorThread.should_broadcast", []),
    (G_WORKER, "CollectorThread.step", []),
    (G_WORKER, "GWorker.__init__", [
        ("index_worker", NO_DEFAULT), ("col_workers_factory", NO_DEFAULT), ("col_communication", "synchronous"),
        ("compress_grads_to_send", False), ("col_execution", "Central"), ("col_fraction_workers", 1.0),
        ("initial_weights", None), ("device", None)]),
    (G_WORKER, "GWorker.apply_gradients", [("gradients", None)]),
    (G_WORKER, "GWorker.compute_gradients", [("batch", NO_DEFAULT), ("distribute_gradients", NO_DEFAULT)]),
    (G_WORKER, "GWorker.get_data", []),
    (G_WORKER, "GWorker.get_grads", [("distribute_gradients", False)]),
    (G_WORKER, "GWorker.save_model", [("fname", NO_DEFAULT)]),
    (G_WORKER, "GWorker.set_weights", [("actor_weights", NO_DEFAULT)]),
    (G_WORKER, "GWorker.step", [("distribute_gradients", False)]),
    (G_WORKER, "GWorker.stop", []),
    (G_WORKER, "GWorker.update_algorithm_parameter", [
        ("parameter_name", NO_DEFAULT), ("new_parameter_value", NO_DEFAULT)]),
    (G_WORKER_SET, "GWorkerSet.__init__", [
        ("num_workers", NO_DEFAULT), ("index_parent", NO_DEFAULT), ("local_device", NO_DEFAULT),
        ("col_execution", NO_DEFAULT), ("col_communication", NO_DEFAULT), ("col_workers_factory", NO_DEFAULT),
        ("col_fraction_workers", NO_DEFAULT), ("grad_worker_resources", NO_DEFAULT),
        ("compress_grads_to_send", False)]),
    (G_WORKER_SET, "GWorkerSet.create_factory", [
        ("num_workers", NO_DEFAULT), ("col_workers_factory", NO_DEFAULT), ("col_fraction_workers", 1.0),
        ("col_execution", "Central"), ("col_communication", "synchronous"), ("compress_grads_to_send", False),
        ("grad_worker_resources", _RESOURCES)]),
]


def _find(module, path):
    found = importlib.import_module(module)
    for name in path.split("."):
        found = inspect.getattr_static(found, name)
    return found


@pytest.mark.parametrize(("module", "name", "base_module", "base"), BASES)
def test_bases(module, name, base_module, base):
    assert issubclass(_find(module, name), _find(base_module, base))


@pytest.mark.parametrize(("module", "path", "expected"), SIGNATURES, ids=[row[1] for row in SIGNATURES])
def test_signature(module, path, expected):
    function = _find(module, path)
    if path.endswith("create_factory"):
        assert isinstance(function, classmethod)
        function = function.__func__
    parameters = list(inspect.signature(function).parameters.values())[1:]  # without self or cls
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [(p.name, p.default) for p in positional] == expected
    # What this library adds can neither be given by position nor be required.
    for extra in (p for p in parameters if p not in positional):
        assert extra.kind is extra.VAR_KEYWORD or (extra.kind is extra.KEYWORD_ONLY and extra.default is not NO_DEFAULT)


def test_actor_version_is_a_property():
    assert isinstance(_find(G_WORKER, "GWorker.actor_version"), property)


@pytest.fixture
def started(make_scheme, one_batch):
    scheme = make_scheme(algo=one_batch, num_col_workers=2)
    scheme.step()
    return scheme.update_worker


def test_attributes_of_collector_thread(started):
    worker = started.local_worker
    collector = worker.collector
    assert collector.stopped is False
    assert collector.index_worker == worker.index_worker == 0
    assert collector.local_worker is worker.local_worker
    assert collector.remote_workers == worker.remote_workers
    assert collector.num_workers == 2
    assert collector.broadcast_interval == 1
    assert collector.num_sent_since_broadcast == 2  # one round since the last push
    assert isinstance(collector, threading.Thread)
    assert collector.queue.maxsize >= 1
    assert collector.queue.empty()
    assert collector.queue.qsize() == 0
    with pytest.raises(queue.Empty):
        collector.queue.get_nowait()


def test_attributes_of_gradient_worker(started):
    worker = started.local_worker
    assert worker.index_worker == 0
    assert worker.iter == 1
    assert worker.actor_version == 1
    assert worker.col_communication == "synchronous"
    assert worker.compress_grads_to_send is False
    assert worker.local_worker is worker.col_workers.local_worker()
    assert worker.remote_workers == worker.col_workers.remote_workers()
    assert type(worker.col_workers).__name__ == "CWorkerSet"
    assert type(worker.local_worker).__name__ == "CWorker"
    assert worker.actor is worker.local_worker.actor
    assert worker.algo is worker.local_worker.algo
    assert worker.storage is worker.local_worker.storage
    assert worker.inqueue is worker.collector.queue


def test_the_queue_of_data_is_one_of_the_standard_librarys(make_scheme):
    """Items can be taken and put by hand; the worker learns from what is in the queue."""
    worker = make_scheme(num_envs=2, size=8).update_worker.local_worker
    inqueue = worker.inqueue
    assert isinstance(inqueue, queue.Queue)
    with pytest.raises(queue.Empty):
        inqueue.get(block=True, timeout=0.01)
    worker.collector.step()
    item = inqueue.get()
    assert item.num_steps == 2 * 8
    while not inqueue.full():
        inqueue.put(item)
    assert inqueue.qsize() == inqueue.maxsize
    for put in (inqueue.put_nowait, lambda item: inqueue.put(item, False)):
        with pytest.raises(queue.Full):
            put(item)
    while inqueue.qsize() > 1:
        assert inqueue.get_nowait() is item
    assert worker.get_data().num_samples > 0
    assert inqueue.empty()
    assert item.uses == 1  # the worker learns from this one


def test_attributes_of_gradient_worker_set(make_scheme):
    scheme = make_scheme(num_grad_workers=2, grad_worker_resources={"num_cpus": 0.5})
    scheme.start()
    workers = scheme.update_worker.grad_workers
    assert workers.worker_class is _find(G_WORKER, "GWorker")
    assert workers.remote_config == {"num_cpus": 0.5}
    assert workers.num_workers == 2
    assert len(workers.remote_workers()) == 2
    assert {"col_workers_factory", "col_communication", "col_execution", "col_fraction_workers",
            "compress_grads_to_send"} <= set(workers.worker_params)


def test_workers_can_be_driven_by_hand(make_scheme, tmp_path):
    """The documented methods, called as documented."""
    worker = make_scheme(num_envs=2, size=8).update_worker.local_worker
    before = worker.algo.acting_state()["all"]
    batch = worker.get_data()
    grads, info = worker.compute_gradients(batch, False)
    assert torch.equal(worker.algo.acting_state()["all"], before)
    assert info["loss"] == pytest.approx(info["loss"])
    worker.apply_gradients(grads)
    assert worker.actor_version == 1
    assert not torch.equal(worker.algo.acting_state()["all"], before)
    grads, info = worker.step(distribute_gradients=False)
    assert [grad.dtype for grad in grads] == [torch.float32]
    worker.set_weights({"all": before})
    assert torch.equal(worker.algo.acting_state()["all"], before)
    worker.update_algorithm_parameter("lr", 0.5)
    assert worker.algo.parameters["lr"] == 0.5
    path = worker.save_model(str(tmp_path / "model.pt"))
    assert torch.equal(torch.load(path, weights_only=True)["acting_state"]["all"], before)
    worker.stop()
    assert worker.collector.stopped


def _agents():
    """Return, by name, the factories of agents that learn from each kind of data."""
    envs = VecEnv.create_factory(CountingEnv, vec_env_size=2)
    continuous = VecEnv.create_factory("Pendulum-v1", vec_env_size=2)
    spaces, small = (envs.observation_space, envs.action_space), {"hidden_sizes": (8,)}
    ppo, rollouts = PPO.create_factory(num_epochs=1, num_mini_batch=1), GAEBuffer.create_factory(8)
    replay = {"mini_batch_size": 4, "start_steps": 8}
    return {
        "rollouts": (ppo, OnPolicyActor.create_factory(*spaces, normalize_obs=True, **small), rollouts, envs),
        "memory": (ppo, OnPolicyActor.create_factory(*spaces, recurrent_net="gru", **small), rollouts, envs),
        "transitions": (DQN.create_factory(**replay), QActor.create_factory(*spaces, **small),
                        PERBuffer.create_factory(200), envs),
        "continuous actions": (
            SAC.create_factory(**replay),
            OffPolicyActor.create_factory(continuous.observation_space, continuous.action_space, **small),
            ReplayBuffer.create_factory(200), continuous),
        "sequences": (R2D2.create_factory(**replay), QActor.create_factory(*spaces, recurrent_net="lstm", **small),
                      SequenceBuffer.create_factory(200, length=4, period=4, burn_in=2), envs)}


def _fields(batch):
    return {name: getattr(batch, name) for name in batch.__dataclass_fields__}


def test_gradients_are_computed_from_a_dictionary_of_tensors():
    counts = ("num_samples", "num_new_samples", "last", "is_normalized")
    for name, agent in _agents().items():
        with GWorker(0, CWorkerSet.create_factory(1, *agent)) as worker:
            batch = worker.get_data()
            state = worker.algo.state_dict()  # includes the random generators
            expected, info = worker.compute_gradients(batch, False)
            forms = [_fields(batch), {field: value for field, value in _fields(batch).items()
                                      if field not in counts and value is not None and value != {}}]
            if set(batch.obs) == {"obs"}:
                forms.append({**forms[1], "obs": batch.obs["obs"]})
            for form in forms:
                worker.algo.load_state_dict(state)
                found, again = worker.compute_gradients(form, False)
                assert all(map(torch.equal, found, expected)), name
                assert again["loss"] == info["loss"], name


def test_a_wrong_dictionary_is_refused_with_the_field_and_what_is_allowed():
    agents = _agents()
    cases = [
        ("rollouts", lambda fields: fields.pop("action"), "lacks action; the fields of Batch are obs, done"),
        ("rollouts", lambda fields: fields.update(actions=fields["action"]), "has unknown fields: actions; the fields"),
        ("rollouts", lambda fields: fields.update(action=fields["action"][1:]),
         r"got 'action' as .*\(15,\).*\(16, ...\)"),
        ("rollouts", lambda fields: fields.update(ret=fields["ret"].double()), "got 'ret' as .*float64.*dtype float32"),
        ("rollouts", lambda fields: fields.update(logp=[0.0]), "got 'logp' as .*list"),
        ("transitions", lambda fields: fields.pop("ids"), "lacks ids; the fields of ReplayBatch are"),
        ("sequences", lambda fields: fields.pop("valid"), "lacks valid; the fields of SequenceBatch are")]
    for name, spoil, message in cases:
        with GWorker(0, CWorkerSet.create_factory(1, *agents[name])) as worker:
            fields = _fields(worker.get_data())
            spoil(fields)
            with pytest.raises(ConfigError, match=message):
                worker.compute_gradients(fields, False)


def test_weights_can_be_set_from_the_state_dict_of_the_actor():
    for name, agent in _agents().items():
        with GWorker(0, CWorkerSet.create_factory(1, *agent)) as worker:
            before = {key: value.clone() for key, value in worker.actor.state_dict().items()}
            worker.step()
            worker.apply_gradients()
            with torch.no_grad():
                for group in worker.algo.groups.values():
                    group.data.add_(1.0)
            assert not all(torch.equal(value, before[key]) for key, value in worker.actor.state_dict().items()), name
            worker.set_weights(before)
            assert all(torch.equal(value, before[key]) for key, value in worker.actor.state_dict().items()), name
            parts = [part for group in worker.algo.groups.values() for part in group.split(group.data).items()]
            own = dict(worker.actor.named_parameters())
            # The parameters are still views of the vectors.
            assert all(torch.equal(value, own[key]) for key, value in parts if key in own), name
            key = next(iter(before))
            without = {other: value for other, value in before.items() if other != key}
            for wrong in ({}, {**before, key: before[key][:1]}, without):
                with pytest.raises(WeightsError, match="state of the actor"):
                    worker.set_weights(wrong)


def test_a_model_is_saved_in_a_new_folder(tmp_path):
    with GWorker(0, CWorkerSet.create_factory(1, *_agents()["rollouts"])) as worker:
        path = worker.save_model(str(tmp_path / "runs" / "first" / "model.pt"))
        assert "acting_state" in torch.load(path, weights_only=True)
        (tmp_path / "file").touch()
        with pytest.raises(OSError, match=r"file'$"):
            worker.save_model(str(tmp_path / "file" / "model.pt"))
