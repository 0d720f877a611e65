"""Tests of the parts of the Ray runtime that do not need Ray."""

from __future__ import annotations

import pickle
import signal
import sys
from types import SimpleNamespace

import pytest

from pytorchrl.errors import InsufficientResourcesError
from pytorchrl.runtime import CPU_RESOURCES, DEFAULT_RESOURCES, Future, Handle
from pytorchrl.runtime.ray.connection import Connection
from pytorchrl.runtime.ray.runtime import RayRuntime
from pytorchrl.runtime.ray.start import without_handlers_of
from pytorchrl.runtime.ray.resource_fitting import largest_share


def test_ray_installs_no_sigterm_handler_while_it_starts():
    """Check that Ray's SIGTERM handler is not installed.

    It would end the process with exit code 15 or 1, or with a crash in native code.
    """
    found = signal.getsignal(signal.SIGTERM)
    utils = SimpleNamespace(set_sigterm_handler=lambda handler: signal.signal(signal.SIGTERM, handler))
    theirs = utils.set_sigterm_handler
    with without_handlers_of(SimpleNamespace(_private=SimpleNamespace(utils=utils))):
        utils.set_sigterm_handler(signal.SIG_IGN)
        assert signal.getsignal(signal.SIGTERM) == found
    assert utils.set_sigterm_handler is theirs


@pytest.fixture
def on():
    """Return a function that makes a runtime on a cluster with the given nodes; by default, all resources are free."""
    def make(*nodes, spare=None, placement=None):
        runtime = RayRuntime(RayRuntime.Options(placement=placement))
        total = {key: sum(node.get(key, 0.0) for node in nodes) for key in {key for node in nodes for key in node}}
        runtime._ray = SimpleNamespace(
            nodes=lambda: [{"Alive": True,
                            "Resources": node} for node in nodes] + [{"Alive": False, "Resources": {"CPU": 99.0}}],
            available_resources=lambda: {**total, **(spare or {})})
        return runtime
    return make


def node(cpus, gpus=0.0, **more):
    return {"CPU": cpus, "memory": 64.0 * 2**30, "object_store_memory": 2.0**30, **({"GPU": gpus} if gpus else {}),
            **more}


def cpus_of(runtime, count):
    [fitted] = runtime.fit_resources([("collection workers", count, CPU_RESOURCES)])
    return fitted["num_cpus"]


@pytest.mark.parametrize(("cpus", "count", "each"), [
    ((8.0,), 4, 1.0), ((8.0,), 16, 0.5), ((2.0,), 3, 0.666),
    ((4.0, 4.0, 4.0), 6, 1.0), ((4.0, 4.0, 4.0), 12, 0.666), ((4.0, 4.0), 8, 0.5),
    ((1.0, 4.0, 4.0), 6, 0.8),  # one worker fits on the small node and five on a large node
    ((0.0, 4.0, 4.0), 4, 1.0),  # the head node has no CPUs
], ids=str)
def test_default_requests_fit_without_the_largest_node(on, cpus, count, each):
    amount = cpus_of(on(*map(node, cpus)), count)
    assert amount == pytest.approx(each)
    left = sorted(cpus)[:-1] or cpus
    assert sum(int(number / amount + 1e-9) for number in left) >= count


def test_a_node_with_most_of_the_cpus_is_counted(on):
    """Check that the largest node is counted if the other node is small; otherwise, 60 workers would share 4 CPUs."""
    assert cpus_of(on(node(4.0), node(64.0)), 60) == 1.0


def test_default_requests_shrink_to_the_free_resources(on):
    assert cpus_of(on(node(8.0), spare={"CPU": 2.0}), 4) == 0.5


def test_memory_of_a_head_node_without_cpus_is_not_counted(on):
    """Check that six workers fit on the smaller of the two nodes with CPUs; the head node is ignored."""
    small = 24.0 * 2**30
    runtime = on({"memory": small}, node(4.0, memory=small), node(4.0, memory=1.01 * small))
    [fitted] = runtime.fit_resources([("collection workers", 6, CPU_RESOURCES)])
    assert 6 * fitted["memory"] <= small
    assert 6 * fitted["num_cpus"] <= 4.0


def test_the_only_gpu_is_shared_although_its_node_may_be_lost(on):
    [fitted] = on(node(4.0, 1.0), node(4.0)).fit_resources([("gradient workers", 10, DEFAULT_RESOURCES)])
    assert fitted["num_gpus"] == 0.1


def test_only_workers_that_request_gpus_share_them(on):
    """Check that collection workers on the CPU leave both GPUs to the gradient workers and may run on any node."""
    runtime = on(node(8.0, 2.0), node(8.0))
    grad, col, _ = runtime.fit_resources(requests(DEFAULT_RESOURCES, CPU_RESOURCES, num_groups=20, per_group=4))
    assert grad["num_gpus"] == 0.1
    assert "num_gpus" not in col
    grad, *_ = runtime.fit_resources(requests(DEFAULT_RESOURCES, CPU_RESOURCES))
    assert grad["num_gpus"] == 0.2


@pytest.mark.parametrize(("gpus", "spare", "present"), [
    (0.0, None, "the cluster has 0, of which 0 are free"),
    (1.0, {"GPU": 0.0}, "the cluster has 1, of which 0 are free")])
def test_workers_on_a_gpu_are_refused_without_a_free_gpu(on, gpus, spare, present):
    runtime = on(node(8.0, gpus), spare=spare)
    with pytest.raises(InsufficientResourcesError,
                       match=f"2 gradient workers each need a share of a GPU, but {present}"):
        runtime.fit_resources(requests(DEFAULT_RESOURCES, CPU_RESOURCES))
    # No worker needs a GPU.
    runtime.fit_resources([("gradient workers", 0, DEFAULT_RESOURCES), ("collection workers", 2, CPU_RESOURCES)])


def test_a_missing_gpu_is_detected_before_ray_starts(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr(RayRuntime, "_starts_a_local_ray", lambda self: True)
    with pytest.raises(InsufficientResourcesError,
                       match=r"6 collection workers each need a share of a GPU.*this machine has none"):
        RayRuntime().fit_resources(requests(CPU_RESOURCES, DEFAULT_RESOURCES))


@pytest.mark.parametrize(("actor", "given", "seen", "visible", "own"), [
    # The driver may use all GPUs that torch sees.
    (None, [], 4, None, None),
    ("ab", [], 0, "", []), ("ab", [3], 1, "3", [0]), ("ab", ["GPU-7"], 1, "GPU-7", [0]),
    ("ab", [1, 0], 2, "1,0", [0, 1]),
    ("ab", [0], 0, "0", []),  # torch was built without CUDA
    # In the next three cases, Ray does not hide the GPUs of other workers.
    ("ab", [], 8, None, []), ("ab", [3, 2], 8, None, [2, 3]), ("ab", ["5"], 2, "4,5", [1]),
])
def test_the_gpus_of_a_worker_are_those_assigned_by_ray(monkeypatch, actor, given, seen, visible, own):
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(
        is_initialized=lambda: True, get_runtime_context=lambda: SimpleNamespace(get_actor_id=lambda: actor),
        get_gpu_ids=lambda: given))
    monkeypatch.setattr("torch.cuda.device_count", lambda: seen)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert RayRuntime().own_gpus() == own


def test_no_gpus_are_assigned_without_ray(monkeypatch):
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    assert RayRuntime().own_gpus() is None


def test_explicit_requests_do_not_shrink(on):
    runtime = on(node(4.0, simulator=2.0), node(4.0))
    asked = {"num_cpus": 2, "simulator": 1}
    assert runtime.fit_resources([("collection workers", 2, asked)]) == [asked]
    with pytest.raises(InsufficientResourcesError,
                       match="5 collection workers request num_cpus=2 each, 10 together; the largest"):
        runtime.fit_resources([("collection workers", 5, {"num_cpus": 2})])


@pytest.mark.parametrize("free", [[3.0], [1.0, 4.0, 4.0], [0.0, 2.5], [7.0, 1.0, 1.0, 1.0]], ids=str)
@pytest.mark.parametrize("count", [1, 2, 5, 17])
def test_a_share_is_the_largest_that_fits_all_workers(free, count):
    share = largest_share(free, count)
    assert sum(int(amount / share + 1e-9) for amount in free) >= count
    assert sum(int(amount / (1.001 * share)) for amount in free) < count


def test_the_share_of_no_resources_is_zero():
    assert largest_share([0.0, 0.0], 3) == largest_share([], 3) == 0.0


def requests(grad, col, num_groups=2, per_group=3, shards=None):
    return [("gradient workers", num_groups, grad), ("collection workers", num_groups * per_group, col),
            ("replay shards", 0 if shards is None else 2 * num_groups, shards or {"num_cpus": 0})]


def test_a_group_has_the_total_resources_of_its_workers(on):
    runtime = on(node(8.0, 1.0), node(8.0, 1.0), placement="colocate")
    runtime.fit_resources(requests({"num_cpus": 2, "num_gpus": 0.5, "object_store_memory": 1}, {"num_cpus": 1},
                                   shards={"num_cpus": 0.5}))
    assert runtime._bundle == {"CPU": 2 + 3 * 1 + 2 * 0.5, "GPU": 0.5}


def test_groups_of_default_requests_fit_on_one_node_of_two(on):
    runtime = on(node(8.0), node(8.0), placement="colocate")
    grad, col, _ = runtime.fit_resources(requests(CPU_RESOURCES, CPU_RESOURCES))
    assert grad == col
    assert grad["num_cpus"] == 1.0
    assert runtime._bundle["CPU"] == 4.0
    grad, *_ = runtime.fit_resources(requests(CPU_RESOURCES, CPU_RESOURCES, per_group=7))
    assert grad["num_cpus"] == 0.5


def test_a_group_without_requests_still_has_a_bundle(on):
    runtime = on(node(8.0), placement="colocate")
    runtime.fit_resources(requests({"num_cpus": 0}, {"num_cpus": 0}))
    assert 0 < runtime._bundle["CPU"] < 0.01


def test_groups_that_fit_on_no_node_are_refused(on):
    runtime = on(node(6.0), node(3.0), placement="colocate")
    with pytest.raises(InsufficientResourcesError) as caught:
        runtime.fit_resources(requests({"num_cpus": 1}, {"num_cpus": 1}))
    for part in ("1 gradient workers and 3 collection workers", "CPU=4, 2 times", "CPU=6; CPU=3", "enough for 1"):
        assert part in str(caught.value)


class FakeGroup(SimpleNamespace):
    is_placed = False

    def wait(self, timeout):
        return self.is_placed


@pytest.fixture
def with_groups():
    """Return a function that makes a runtime with a fake Ray, which records the options of actors and groups."""
    def make(inside=None, **options):
        runtime = RayRuntime(RayRuntime.Options(**options))
        made = []

        def placement_group(bundles, strategy):
            made.append((bundles, strategy))
            return FakeGroup(number=len(made))

        def strategy_of(group, index, placement_group_capture_child_tasks):
            assert index == 0
            assert placement_group_capture_child_tasks
            return group.number
        actors = []

        def start(**chosen):
            actors.append(chosen)
            return SimpleNamespace(remote=lambda *_: _Actor())
        runtime._ray = SimpleNamespace(
            util=SimpleNamespace(
                placement_group=placement_group, get_current_placement_group=lambda: inside,
                scheduling_strategies=SimpleNamespace(PlacementGroupSchedulingStrategy=strategy_of)),
            wait=lambda references, timeout: (references, []) if references[0] else ([], references))
        runtime._host = SimpleNamespace(options=start)
        return runtime, made, actors
    return make


class _Actor:
    has_come_up = False

    @property
    def up(self):
        return SimpleNamespace(remote=lambda: self.has_come_up)


def start(runtime, name, **resources):
    return runtime.start_actor(object, {}, name=name, resources=resources)


def test_each_gradient_worker_has_its_own_placement_group(with_groups):
    runtime, made, actors = with_groups(placement="colocate")
    runtime._bundle = {"CPU": 4.0}
    for name in ("GWorker 1", "GWorker 2", "GWorker 1", "Evaluator"):
        start(runtime, name, num_cpus=1)
    assert made == [([{"CPU": 4.0}], "STRICT_PACK")] * 2
    # A replacement gets the placement group of the worker that it replaces.
    assert [chosen["scheduling_strategy"] for chosen in actors] == [1, 2, 1, "SPREAD"]


def test_child_workers_go_into_the_placement_group_of_their_parent(with_groups):
    runtime, _, actors = with_groups(inside=FakeGroup(number=7), placement="colocate")
    start(runtime, "GWorker 2/CWorker 1", num_cpus=1)
    assert actors[0]["scheduling_strategy"] == 7
    assert pickle.loads(
        pickle.dumps(RayRuntime(RayRuntime.Options(placement="colocate")))).options.placement == "colocate"


def test_workers_are_spread_by_default_even_if_the_driver_is_in_a_group(with_groups):
    runtime, made, actors = with_groups(inside=FakeGroup(number=7))
    start(runtime, "GWorker 1", num_cpus=1)
    assert actors[0]["scheduling_strategy"] == "SPREAD"
    assert not made


@pytest.mark.parametrize(("free", "lacks"), [
    ([{"CPU": 0.5}, {"CPU": 1.0}],
     "it requests CPU=2, sim=1, but the 2 nodes have only CPU=0.5, sim=0; CPU=1, sim=0 free"),
    ([{"CPU": 0.5}, {"CPU": 2.0, "sim": 1.0}], ""),
])
def test_a_pending_worker_lacks_resources_if_it_fits_on_no_node(with_groups, free, lacks):
    runtime, *_ = with_groups()
    handle = start(runtime, "GWorker 0/CWorker 1", num_cpus=2, sim=1, object_store_memory=10)
    runtime._ray._private = SimpleNamespace(state=SimpleNamespace(
        available_resources_per_node=lambda: dict(enumerate(free))))
    assert isinstance(handle, Handle)
    assert runtime.lacks_room(handle) == lacks


def test_a_gradient_worker_may_lack_resources_for_its_group(with_groups):
    runtime, *_ = with_groups(placement="colocate")
    runtime._bundle = {"CPU": 4.0}
    handle = start(runtime, "GWorker 1", num_cpus=1)
    runtime._ray._private = SimpleNamespace(
        state=SimpleNamespace(available_resources_per_node=lambda: {1: {"CPU": 3.0}}))
    assert runtime.lacks_room(handle) == "it requests CPU=4, but the 1 nodes have only CPU=3 free"
    runtime._groups["GWorker 1"].is_placed = True  # the group already has its resources
    assert runtime.lacks_room(handle) == ""


def test_a_running_worker_lacks_no_resources(with_groups, monkeypatch):
    monkeypatch.setattr(_Actor, "has_come_up", True)
    runtime, *_ = with_groups()
    assert runtime.lacks_room(start(runtime, "GWorker 0/CWorker 1", num_cpus=2)) == ""


@pytest.mark.parametrize("has_joined", [False, True])
def test_closing_removes_groups_and_disconnects_only_own_connections(with_groups, has_joined):
    runtime, *_ = with_groups(placement="colocate")
    runtime._bundle = {"CPU": 4.0}
    for name in ("GWorker 1", "GWorker 2"):
        start(runtime, name, num_cpus=1)
    done = []
    runtime._ray.kill = lambda actor, no_restart: done.append("kill")
    runtime._ray.shutdown = lambda: done.append("leave")
    runtime._ray.util.remove_placement_group = lambda group: done.append(group.number)
    runtime._connection = Connection() if has_joined else None
    runtime.close()
    runtime.close()
    assert done == ["kill", "kill", 1, 2, *["leave"] * has_joined]


class Arriving:
    """A fake `ray.wait`: the i-th call with a timeout above 0 makes the first `counts[i]` references ready."""

    def __init__(self, *counts):
        self._counts, self._ready = list(counts), 0

    def wait(self, references, num_returns, timeout, fetch_local):
        if timeout:
            self._ready = self._counts.pop(0)
        return references[:min(self._ready, num_returns)], references[min(self._ready, num_returns):]


@pytest.mark.parametrize(("counts", "told"), [
    ((1, 3, 4), ["started 0 of 4 collection workers ...", "started 1 of 4 collection workers ...",
                 "started 3 of 4 collection workers ...", "started 4 of 4 collection workers"]),
    # The other two workers do not start in time.
    ((2, 2), ["started 0 of 4 collection workers ...", "started 2 of 4 collection workers ..."]),
], ids=str)
def test_workers_are_announced_as_they_start(counts, told):
    runtime, said = RayRuntime(), []
    runtime._ray, runtime.announce = Arriving(*counts), said.append
    runtime.get_all = lambda futures, timeout_s: [future.native for future in futures]
    futures = [Future(f"CWorker {index}", index) for index in range(4)]
    assert runtime.get_started("collection workers", futures, 60.0) == [0, 1, 2, 3]
    assert said == told


def test_without_a_listener_nothing_is_announced():
    runtime = RayRuntime()
    runtime._ray = Arriving(1)
    runtime.get_all = lambda futures, timeout_s: list(futures)
    assert runtime.get_started("gradient workers", [Future("GWorker 1", 1)], 60.0)
    assert pickle.loads(pickle.dumps(runtime)).announce is None
