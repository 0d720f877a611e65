"""The public names, signatures, defaults and attributes of `pytorchrl.scheme.gradients`, from a table of its own."""

from __future__ import annotations

import importlib
import inspect
import queue
import threading

import pytest

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
    import torch

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
