"""Tests of the devices of gradient workers and collection workers.

Workers use the requested device, or an error lists the devices that exist; no worker silently uses the CPU instead.
"""

from __future__ import annotations

from pytorchrl.scheme.options.collection import AsynchronousCollection
from dataclasses import replace
from pytorchrl.scheme.base.worker import Context

import pickle
import threading

import pytest

from pytorchrl import ASYNC, SYNC
from pytorchrl.errors import ConfigError, DeviceError
from pytorchrl.runtime import CPU_RESOURCES, DEFAULT_RESOURCES, ThreadRuntime
from pytorchrl.scheme.collection.c_worker import CWorker
from pytorchrl.scheme.collection.c_worker_set import CWorkerSet
from pytorchrl.scheme.devices import check_device
from pytorchrl.scheme.gradients.placement import Placement
from pytorchrl.scheme.options.settings import Settings

pytestmark = pytest.mark.cpu("the defaults of the device options")

GRADS, COLLECTORS = {"num_grad_workers": 2}, {"num_col_workers": 2}
THREAD = {"col_communication": ASYNC}
BOTH = {**GRADS, **COLLECTORS}
QUARTER, NO_GPU = {"num_gpus": 0.25}, {"num_cpus": 1}


@pytest.fixture
def see_gpus(monkeypatch):
    """Return a function that makes torch report `count` GPUs, the last of which is the current device."""
    def see(count):
        monkeypatch.setattr("torch.cuda.device_count", lambda: count)
        monkeypatch.setattr("torch.cuda.current_device", lambda: count - 1)
        monkeypatch.setattr("torch.backends.cuda.is_built", lambda: True)
    return see


# Names of devices within a process


@pytest.mark.parametrize(("count", "gpus", "device", "found"), [
    (0, None, None, "cpu"), (0, None, "cpu", "cpu"), (2, None, None, "cpu"), (2, [1], "cpu", "cpu"),
    (2, [], "cpu", "cpu"),
    (2, None, "cuda", "cuda:1"),  # the current device
    (2, None, "cuda:0", "cuda:0"), (2, None, "cuda:1", "cuda:1"),
    (1, [0], "cuda", "cuda:0"), (1, [0], "cuda:0", "cuda:0"), (2, [0, 1], "cuda:1", "cuda:1"),
    (4, [2, 3], "cuda", "cuda:2"), (4, [2, 3], "cuda:3", "cuda:3"),  # Ray assigned two of four GPUs
])
def test_device_names_are_resolved(see_gpus, count, gpus, device, found):
    see_gpus(count)
    assert check_device(device, gpus) == found
    assert check_device(found, gpus) == found


def test_workers_take_turns_among_gpus_that_nobody_assigned(see_gpus):
    see_gpus(2)
    assert [check_device("cuda", number=number) for number in range(5)] == [
        "cuda:0", "cuda:1", "cuda:0", "cuda:1", "cuda:0"]
    assert {check_device(device, gpus, number=1) for device, gpus in (("cuda:0", None), ("cuda", [0, 1]))} == {"cuda:0"}
    assert check_device("cpu", number=1) == check_device(None, number=1) == "cpu"


@pytest.mark.parametrize(("count", "gpus", "device", "message"), [
    (0, None, "cuda", r"\['cpu'\], got 'cuda'; give one of these"),
    (2, None, "cuda:2", r"\['cpu', 'cuda:0', 'cuda:1'\], got 'cuda:2'; give one of these"),
    (4, [2], "cuda:1", r"\['cpu', 'cuda:2'\], got 'cuda:1'; the list has only the GPUs that Ray assigned to this "
                       r"worker: 'cuda' is the first"),
    (4, [], "cuda", r"\['cpu'\], got 'cuda'; the list .* num_gpus in the worker's resources requests more"),
    *((2, None, device, f"got {device!r}") for device in ("gpu", "", 0, "cuda:01", "CUDA:0", 1.5)),
], ids=str)
def test_missing_devices_are_refused(see_gpus, count, gpus, device, message):
    see_gpus(count)
    with pytest.raises(DeviceError, match=f"col_device must be one of the devices visible to torch, .*{message}"):
        check_device(device, gpus, "col_device")


def test_a_torch_without_cuda_is_reported(monkeypatch):
    monkeypatch.setattr("torch.backends.cuda.is_built", lambda: False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(DeviceError, match=r"got 'cuda'; this torch \(.*\) was built without CUDA: install"):
        check_device("cuda")
    check_device("cpu")


def test_device_errors_can_be_pickled():
    with pytest.raises(DeviceError) as caught:
        check_device("cuda:97", [])
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


# Devices that a scheme rejects before anything starts


@pytest.mark.parametrize("name", ["grad_device", "col_device"])
@pytest.mark.parametrize("device", ["gpu", 0, "", "cuda:", "cuda:x", "cuda:-1", True], ids=str)
def test_invalid_device_names_are_refused(make_scheme, name, device):
    error = DeviceError if isinstance(device, str) else ConfigError
    with pytest.raises(error, match=f"{name} must be (None, 'cpu', 'cuda' or 'cuda:k'|a string or None), got "):
        make_scheme(**BOTH, runtime="ray", **{name: device})


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:7"])
@pytest.mark.parametrize(("settings", "name"), [
    ({**GRADS, "runtime": "threads"}, "grad_device"), ({**COLLECTORS, "runtime": "simulated"}, "col_device"),
    ({**THREAD, "runtime": None}, "col_device"),
], ids=str)
def test_missing_devices_are_refused_for_workers_on_threads(make_scheme, see_gpus, settings,
                                                            name, device):
    see_gpus(0)
    with pytest.raises(
            DeviceError, match=rf"{name} must be one of the devices visible to torch, \['cpu'\], got '{device}'"):
        make_scheme(**settings, **{name: device})


@pytest.mark.parametrize(("settings", "message"), [
    ({"grad_device": "cpu"}, "grad_device='cpu' is for remote gradient workers; the local one uses the device"),
    ({**COLLECTORS, "grad_device": "cuda"}, "grad_device='cuda' is for remote gradient workers"),
    ({"col_device": "cpu"}, "col_device='cpu' is for collection workers with an actor of their own"),
    ({**GRADS, "col_device": "cuda"}, "col_device='cuda' is for collection workers with an actor of their own"),
    # The device is a GPU, but the resources include no GPU
    ({**COLLECTORS, "col_device": "cuda", "col_worker_resources": NO_GPU},
     "col_device is 'cuda', and col_worker_resources requests no GPU.*num_gpus=0.25, or give col_device='cpu'"),
    ({**GRADS, "grad_device": "cuda:0", "grad_worker_resources": {"num_gpus": 0}},
     "grad_device is 'cuda:0', and grad_worker_resources"),
    ({**GRADS, **THREAD, "col_device": "cuda", "grad_worker_resources": NO_GPU},
     "col_device is 'cuda', and grad_worker_resources requests"),
    # The resources include a GPU, but the device is the CPU
    ({**COLLECTORS, "col_worker_resources": QUARTER},
     "col_worker_resources requests num_gpus=0.25, but collection workers compute on the CPU"),
    ({**COLLECTORS, "col_device": "cpu", "col_worker_resources": QUARTER},
     "give col_device='cuda', or leave num_gpus out"),
    ({**GRADS, "grad_worker_resources": QUARTER},
     "grad_worker_resources requests num_gpus=0.25, but gradient workers compute on the CPU"),
    ({**GRADS, "grad_worker_resources": QUARTER, "runtime": "threads"}, "grad_worker_resources requests num_gpus=0.25"),
    # The index of the GPU is too high for the number of GPUs in the resources
    ({**COLLECTORS, "col_device": "cuda:1"},
     "col_device='cuda:1' is GPU 1, counted from 0, .*asks for num_gpus=0.2; 'cuda' is the first"),
    ({**GRADS, "grad_device": "cuda:2", "grad_worker_resources": {"num_gpus": 2}},
     "grad_device='cuda:2' is GPU 2.*asks for num_gpus=2"),
], ids=str)
def test_contradictory_device_options_are_refused(make_scheme, settings, message):
    with pytest.raises(ConfigError, match=message) as caught:
        make_scheme(**{"runtime": "ray" if len(settings) > 1 else None, **settings})
    assert type(caught.value) is ConfigError


def test_a_learner_on_a_gpu_requires_gpus_for_gradient_workers(make_scheme, see_gpus):
    see_gpus(1)
    with pytest.raises(ConfigError, match=r"grad_device is 'cuda', and grad_worker_resources requests no GPU.*or give "
                                          r"grad_device='cpu'"):
        make_scheme(**GRADS, runtime="ray", device="cuda:0", grad_worker_resources=NO_GPU)
    make_scheme(**GRADS, runtime="ray", device="cuda:0", grad_device="cpu", grad_worker_resources=NO_GPU)


@pytest.mark.parametrize("settings", [
    {**COLLECTORS, "col_device": "cuda"},
    {**COLLECTORS, "col_device": "cuda:1", "col_worker_resources": {"num_gpus": 2}},
    {**COLLECTORS, "col_device": "cpu"},
    {**BOTH, "grad_device": "cuda", "col_device": "cpu", "grad_worker_resources": QUARTER},
    {**GRADS, **THREAD, "col_device": "cuda", "grad_device": "cpu", "grad_worker_resources": QUARTER},
], ids=str)
def test_a_machine_without_a_gpu_may_request_remote_gpus(make_scheme, see_gpus, settings):
    see_gpus(0)
    made = make_scheme(**settings, runtime="ray").settings
    assert {name: made[name] for name in settings if name.endswith("device")} == {
        name: value for name, value in settings.items() if name.endswith("device")}


# Devices and resources that workers receive


@pytest.fixture
def watch(make_scheme, monkeypatch, see_gpus):
    """Return a function that runs a scheme and returns the devices and resources of its workers.

    All workers compute on the CPU, whatever device they receive.
    """
    def run(runtime=ThreadRuntime, **settings):
        devices, asked = {}, {}
        start_actor, lock = runtime.start_actor, threading.Lock()

        def start(self, cls, params, *, name, resources):
            with lock:
                devices[name], asked[name] = params.get("device"), dict(resources)
            return start_actor(self, cls, {**params, "device": "cpu"}, name=name, resources=resources)
        monkeypatch.setattr(runtime, "start_actor", start)
        see_gpus(2)
        scheme = make_scheme(**settings)
        scheme.step()
        scheme.stop()
        return devices, asked
    return run


def named(num_grads, num_cols, grad, col):
    return {**{f"GWorker {index}": grad for index in range(1, num_grads + 1)},
            **{f"GWorker {parent}/CWorker {index}": col
               for parent in range(1, num_grads + 1) for index in range(1, num_cols + 1)}}


@pytest.mark.parametrize("communication", [SYNC, ASYNC])
def test_each_level_has_its_device(watch, communication):
    devices, _ = watch(**BOTH, grad_device="cuda:0", col_device="cuda:1", col_communication=communication)
    assert devices == named(2, 2, "cuda:0", "cuda:1")


def test_col_device_is_the_cpu_by_default(watch):
    assert watch(**BOTH)[0] == named(2, 2, "cpu", "cpu")
    assert watch(**BOTH, grad_device="cuda:0")[0] == named(2, 2, "cuda:0", "cpu")


@pytest.mark.parametrize(("settings", "devices"), [
    # Devices of the learner, of gradient workers, and of collection workers
    ({"num_grad_workers": 3, "grad_device": "cuda"}, ["cpu", "cuda:0", "cuda:1", "cuda:0"]),
    ({"num_grad_workers": 3, "grad_device": "cuda:1"}, ["cpu", "cuda:1", "cuda:1", "cuda:1"]),
    ({"num_grad_workers": 2, "device": "cuda:1"}, ["cuda:1", "cuda:1", "cuda:1"]),
    ({"num_grad_workers": 2, "device": "cuda", "grad_device": "cuda"}, ["cuda:1", "cuda:0", "cuda:1"]),
    ({"num_col_workers": 3, "col_device": "cuda"}, ["cpu", "cuda:0", "cuda:1", "cuda:0"]),
    ({**BOTH, "col_device": "cuda"}, ["cpu"] * 3 + ["cuda:0", "cuda:1"] * 2),
    ({**GRADS, "num_col_workers": (1, 2), "col_device": "cuda"}, ["cpu"] * 3 + ["cuda:0", "cuda:1", "cuda:0"]),
    ({**GRADS, **THREAD, "col_device": "cuda"}, ["cpu"] * 3 + ["cuda:0", "cuda:1"]),
    ({**THREAD, "col_device": "cuda"}, ["cpu", "cuda:1"]),  # the thread acts in the learner's process
    ({**BOTH, **THREAD, "inference": "central", "grad_device": "cuda"},
     ["cpu", "cuda:0", "cuda:0", "cuda:1", "cuda:1"]),  # the actors use the GPUs of their gradient workers
], ids=str)
def test_workers_of_one_machine_share_its_gpus(make_scheme, see_gpus, monkeypatch, settings, devices):
    found = []

    def check(*args):
        found.append(check_device(*args))
        return "cpu"
    monkeypatch.setattr("pytorchrl.scheme.collection.c_worker.check_device", check)
    see_gpus(2)
    make_scheme(**settings).start()
    assert sorted(found) == sorted(devices)


def test_a_collector_thread_has_an_actor_on_col_device(watch):
    assert watch(**THREAD, col_device="cuda:0")[0] == {"GWorker 0/CWorker 0": "cuda:0"}
    assert watch(**THREAD)[0] == {"GWorker 0/CWorker 0": "cpu"}
    assert watch(**GRADS, **THREAD, col_device="cuda")[0] == {
        **named(2, 0, "cpu", ""), **{f"GWorker {parent}/CWorker 0": f"cuda:{parent - 1}" for parent in (1, 2)}}


def test_only_workers_on_a_gpu_request_one_by_default(watch):
    with_gpu, without = dict(DEFAULT_RESOURCES), dict(CPU_RESOURCES)
    assert watch(**BOTH)[1] == named(2, 2, without, without)
    assert watch(**BOTH, grad_device="cuda")[1] == named(2, 2, with_gpu, without)
    assert watch(**BOTH, col_device="cuda")[1] == named(2, 2, without, with_gpu)
    asked = watch(**GRADS, **THREAD, col_device="cuda")[1]
    assert asked["GWorker 1"] == asked["GWorker 2"] == with_gpu  # the collector threads of these workers use a GPU
    assert watch(**COLLECTORS, col_device="cuda", col_worker_resources=QUARTER)[1]["GWorker 0/CWorker 2"] == QUARTER


@pytest.mark.parametrize(("settings", "device"), [
    ({}, "cuda:0"),  # not "cuda:1", the current GPU of this process
    ({"col_device": "cuda:1"}, "cuda:1"),
    ({**GRADS}, "cuda"),
    ({**GRADS, "grad_device": "cpu", "grad_worker_resources": NO_GPU}, "cpu"),
], ids=str)
@pytest.mark.parametrize("runtime", ["ray", "threads"])
def test_central_inference_uses_the_device_of_its_gradient_worker(see_gpus, runtime, settings, device):
    see_gpus(2)
    made, problems = Settings.from_keywords(
        {**COLLECTORS, **THREAD, "inference": "central", "device": "cuda:0", **settings}, runtime=runtime)
    assert problems.found == []
    devices = Placement(made.collection, made.gradients, made.process.device, made.on_ray).devices()
    assert devices["col"] == ("cuda:0" if runtime == "threads" and device == "cuda" else device)


class GivenNone(ThreadRuntime):
    """A runtime that assigns no GPU to its workers, although the machine has GPUs."""

    def own_gpus(self):
        return []


@pytest.mark.parametrize(("index_parent", "settings", "name"), [
    (0, {"local_device": "cuda"}, "device"), (2, {"local_device": "cuda:0"}, "grad_device"),
    (2, {"col_device": "cuda"}, "col_device"),
])
def test_a_gradient_worker_checks_its_assigned_devices(make_scheme, see_gpus, index_parent, settings, name):
    see_gpus(2)
    scheme, settings = make_scheme(), dict(settings)
    agent = (scheme.agent.algo_factory, scheme.agent.actor_factory, scheme.agent.storage_factory)
    factory = CWorkerSet.create_factory(1, *agent, scheme.agent.train_envs_factory)
    if "col_device" in settings:
        factory = replace(factory, options=AsynchronousCollection(col_device=settings.pop("col_device")))
    with pytest.raises(
            DeviceError, match=rf"^{name} must be one of the devices visible to torch, \['cpu'\], got 'cuda"):
        factory(index_parent, runtime=GivenNone(), **settings)


def test_a_collection_worker_checks_its_assigned_devices(make_scheme, see_gpus):
    see_gpus(2)
    agent = make_scheme().agent
    recipe = CWorkerSet.create_factory(
        1, agent.algo_factory, agent.actor_factory, agent.storage_factory, agent.train_envs_factory)
    with pytest.raises(
            DeviceError, match=r"^col_device must be one of the devices visible to torch, \['cpu'\], got 'cuda'"):
        CWorker(1, recipe, device="cuda", context=Context(runtime=GivenNone()))
