"""Check with a copier that copies as late as possible that batches reach a device complete, in order and unchanged."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pytorchrl import (
    ASYNC,
    DQN,
    IMPALA,
    PPO,
    R2D2,
    SAC,
    GAEBuffer,
    OffPolicyActor,
    OnPolicyActor,
    PERBuffer,
    QActor,
    ReplayBuffer,
    Scheme,
    SequenceBuffer,
    VecEnv,
    VTraceBuffer,
)
from pytorchrl.agent.data import ReplayBatch, RolloutData, map_tensors
from pytorchrl.scheme.gradients.loader import Loader
from pytorchrl.scheme.gradients.staging import Staging, staging_for
from pytorchrl.scheme.gradients.train_batch import QueuedRollout, TrainBatch
from pytorchrl.scheme.transport.messages import Rollout, RolloutHeader


class LateCopy:
    """A copy that happens when it is waited for."""

    def __init__(self, buffer, number, events):
        self.buffer, self.number, self.events = buffer, number, events
        self.copied = None

    def wait(self):
        if self.copied is None:
            self.copied = self.buffer.clone()
            self.events.append(("done", self.number))

    def take(self):
        assert self.copied is not None, "the copy is used before it is complete"
        assert self.buffer is not None, "the copy is taken twice"
        self.events.append(("take", self.number))
        copied, self.buffer, self.copied = self.copied, None, False
        return copied


class LateCopier:
    """Copier whose copies happen as late as possible; it records the order of events."""

    def __init__(self):
        self.events, self.num_started = [], 0

    def allocate(self, num_bytes):
        return torch.full((num_bytes,), 0xAB, dtype=torch.uint8)

    def start(self, buffer):
        self.num_started += 1
        self.events.append(("start", self.num_started))
        return LateCopy(buffer, self.num_started, self.events)


@pytest.fixture
def copier():
    return LateCopier()


@pytest.fixture
def staging(copier):
    return Staging(copier, lambda: 0.0)


def batch_of(seed, size=3):
    """Return a batch with tensors of various dtypes, shapes and strides."""
    rng = torch.Generator().manual_seed(seed)

    def floats(*shape):
        return torch.randn(*shape, generator=rng)
    images = torch.randint(0, 256, (size, 5, 7), generator=rng, dtype=torch.uint8)
    return ReplayBatch(
        obs={"image": images, "double": floats(size, 2).double(), "none": torch.zeros(size, 0)},
        action=torch.randint(0, 9, (size,), generator=rng), ret=floats(2, size)[1], discount=floats(size, 2)[:, 0],
        next_obs={"image": images.transpose(1, 2), "double": floats(2, size).double().T, "none": torch.zeros(0)},
        weight=floats(()), ids=torch.arange(size), mask=floats(size, 3) > 0, num_samples=size)


def assert_equal(found, expected):
    """Check that two batches have equal values of equal types, and share no memory."""
    def leaves(batch):
        tensors = []
        map_tensors(batch, tensors.append)
        return tensors
    for own, wanted in zip(leaves(found), leaves(expected), strict=True):
        assert (own.dtype, own.shape) == (wanted.dtype, wanted.shape)
        assert torch.equal(own, wanted)
        assert not own.numel() or own.data_ptr() != wanted.data_ptr()
    for field in ("num_samples", "next_mask", "last"):
        assert getattr(found, field) == getattr(expected, field)


def test_staged_data_equal_the_original(staging):
    assert_equal(staging.on_device(batch_of(0)), batch_of(0))


def test_all_tensors_of_a_batch_are_copied_at_once(staging, copier):
    staging.on_device(batch_of(0))
    assert copier.num_started == 1


def test_later_changes_of_host_memory_have_no_effect(staging):
    batch = batch_of(0)
    staged = staging.start(batch)
    batch.obs["image"].zero_()
    assert_equal(staged.get(), batch_of(0))


def test_a_buffer_is_overwritten_only_after_its_copy(staging, copier):
    staged = [staging.start(batch_of(seed, size)) for seed, size in enumerate((3, 5, 3, 4, 9))]
    assert copier.events == [("start", 1), ("start", 2), ("done", 1), ("start", 3), ("done", 2), ("start", 4),
                             ("done", 3), ("start", 5)]
    for seed, (size, own) in enumerate(zip((3, 5, 3, 4, 9), staged, strict=True)):
        assert_equal(own.get(), batch_of(seed, size))


def test_the_next_batch_is_on_its_way_while_a_batch_is_used(staging, copier):
    batches, used = [batch_of(seed) for seed in range(4)], []
    for batch in staging.ahead(iter(batches)):
        copier.events.append("given")
        used.append(staging.on_device(batch))
    for found, batch in zip(used, batches, strict=True):
        assert_equal(found, batch)
    assert copier.num_started == 4  # none is copied twice
    for number in range(1, 4):
        assert copier.events.index(("start", number + 1)) < copier.events.index(("take", number))


def test_skipped_batches_do_not_confuse_later_ones(staging):
    batches = [batch_of(seed) for seed in range(6)]
    for number, batch in enumerate(staging.ahead(iter(batches))):
        if number % 3 == 1:
            assert_equal(staging.on_device(batch), batches[number])
    assert_equal(staging.on_device(batches[0]), batches[0])


def test_a_batch_that_changes_after_its_use_is_copied_again(staging):
    for batch in staging.ahead(iter([batch_of(0)])):
        staging.on_device(batch)
        batch.obs["image"].zero_()
        assert_equal(staging.on_device(batch), batch)


def test_tensors_on_the_device_are_left_there(staging, copier):
    """Check a batch that is partly on another device; the device "meta" stands in for a GPU."""
    there = torch.zeros(3, device="meta")
    batch = dataclasses.replace(batch_of(0), ret=there)
    found = staging.on_device(batch)
    assert found.ret is there
    assert torch.equal(found.ids, batch.ids)
    all_there = map_tensors(batch, lambda leaf: leaf.to("meta"))
    assert staging.on_device(all_there) is all_there
    assert list(staging.ahead(iter([all_there]))) == [all_there]
    assert copier.num_started == 1


def test_loading_and_waiting_are_timed(copier):
    now = [0.0]
    staging = Staging(copier, lambda: now[0])
    start = copier.start

    def slow_start(buffer):
        now[0] += 2.0
        copy = start(buffer)
        wait = copy.wait

        def slow_wait():
            now[0] += 0.5
            wait()
        copy.wait = slow_wait
        return copy
    copier.start = slow_start
    for batch in staging.ahead(iter([batch_of(0), batch_of(1)])):
        staging.on_device(batch)
    assert staging.watch.take() == {"load": (2, 4.0), "load_wait": (2, 1.0)}


def test_only_cuda_devices_have_a_staging():
    assert staging_for(torch.device("cpu"), lambda: 0.0) is None
    assert staging_for(torch.device("meta"), lambda: 0.0) is None


# Train batches in the sample queue


def rollout_of(seed):
    """Return a rollout as another process sends it."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(2, 1)).astype(np.float32)
    flags = np.zeros((2, 1), bool)
    data = RolloutData(
        obs={"obs": rng.integers(0, 255, (3, 1, 4), dtype=np.uint8)}, done=np.zeros((3, 1), bool), rhs={}, mask=None,
        action=np.zeros((2, 1), np.int64), reward=rows, terminated=flags, truncated=flags, valid=~flags,
        final_index=np.zeros((0, 2), np.int64), final_obs={"obs": np.zeros((0, 4), np.uint8)})
    return Rollout(data, RolloutHeader(num_env_steps=2, size=2, collected_steps=2, weights_version=seed, worker=1,
                                       sequence=seed + 1))


def train_batch_of(*seeds):
    return TrainBatch([QueuedRollout(rollout_of(seed), 0) for seed in seeds])


def observations(batch):
    return [queued.rollout.data.obs["obs"] for queued in batch.rollouts]


@pytest.fixture
def make_loader(staging):
    """Return a function that makes a loader for a list of waiting train batches; all threads end after the test."""
    loaders = []

    def make(waiting):
        loaders.append(Loader(staging, lambda: waiting[0] if waiting else None, lambda: 0.0))
        return loaders[-1]
    yield make
    for loader in loaders:
        loader.close()


def test_the_loader_decodes_train_batches_and_copies_observations(make_loader, copier):
    waiting = [train_batch_of(0, 1), train_batch_of(2)]
    loader = make_loader(list(waiting))
    loader.load(waiting[0])
    assert copier.events == [("start", 1), ("done", 1), ("take", 1)]
    for seed, (queued, found) in enumerate(zip(waiting[0].rollouts, observations(waiting[0]), strict=True)):
        assert np.array_equal(found.numpy(), rollout_of(seed).data.obs["obs"])
        assert np.array_equal(queued.rollout.data.reward.numpy(), rollout_of(seed).data.reward)
        assert queued.rollout.header.weights_version == seed


def test_a_train_batch_is_loaded_once_even_if_rollouts_are_removed_meanwhile(make_loader, copier):
    batch = train_batch_of(0, 1, 2)
    loader = make_loader([batch])
    for _ in range(2):
        loader.look_ahead()
    batch.rollouts = batch.rollouts[1:]  # the first rollout has become too old
    loader.load(batch)
    assert copier.num_started == 1
    assert [found.tolist() for found in observations(batch)] == [
        rollout_of(seed).data.obs["obs"].tolist() for seed in (1, 2)]


def test_a_train_batch_that_was_dropped_after_loading_is_replaced(make_loader):
    dropped, taken = train_batch_of(0), train_batch_of(1)
    loader = make_loader([dropped])
    loader.look_ahead()
    loader.load(taken)
    assert observations(taken)[0].tolist() == rollout_of(1).data.obs["obs"].tolist()


def test_an_error_of_the_loader_reaches_the_learner(make_loader):
    broken = train_batch_of(0)
    broken.rollouts[0].rollout.data.obs["obs"] = "no array"
    loader = make_loader([broken])
    loader.look_ahead()
    with pytest.raises(TypeError, match="numpy"):
        loader.load(broken)


# Whole schemes

VECTORS, NUMBERS = "CartPole-v1", "Pendulum-v1"
REPLAY = {"start_steps": 20, "mini_batch_size": 8, "update_every": 10, "num_updates": 4}
AGENTS = {
    "sac": (SAC.create_factory(**REPLAY), OffPolicyActor, ReplayBuffer.create_factory(400, rollout_size=10), NUMBERS),
    "dqn": (DQN.create_factory(**REPLAY), QActor, PERBuffer.create_factory(400, rollout_size=10), VECTORS),
    "r2d2": (R2D2.create_factory(**REPLAY), QActor, SequenceBuffer.create_factory(
        400, rollout_size=10, length=10, burn_in=2, period=5), VECTORS),
    "ppo": (PPO.create_factory(num_epochs=2, num_mini_batch=2), OnPolicyActor, GAEBuffer.create_factory(16), VECTORS),
    "impala": (IMPALA.create_factory(), OnPolicyActor, VTraceBuffer.create_factory(16), VECTORS),
}


@pytest.fixture
def train():
    """Return a function that trains an agent and returns its acting state and metrics."""
    schemes = []

    def run(name, **settings):
        algorithm, actor, storage, env = AGENTS[name]
        envs = VecEnv.create_factory(env, vec_env_size=2)
        options = {"recurrent_net": "lstm", "recurrent_size": 8} if name == "r2d2" else {}
        scheme = Scheme(algorithm, actor.create_factory(
            envs.observation_space, envs.action_space, hidden_sizes=(8,), **options), storage, envs,
            runtime="simulated", seed=1, **settings)
        schemes.append(scheme)
        while scheme.version < 8:
            scheme.step()
        found = scheme.acting_state(), scheme.metrics()
        scheme.stop()
        return found
    yield run
    for scheme in schemes:
        scheme.stop()


class AtOnce:
    """An executor without a thread, which runs each task when it is submitted."""

    def __init__(self, *_):
        pass

    def submit(self, task, *args):
        result = task(*args)
        return SimpleNamespace(result=lambda: result)

    def shutdown(self):
        pass


class OnDemand(AtOnce):
    """An executor without a thread, which runs each task when its result is read."""

    def submit(self, task, *args):
        return SimpleNamespace(result=lambda: task(*args))


@pytest.fixture
def stage(monkeypatch):
    """Return a function that adds a staging to the learners made from now on, and returns a list of their copiers.

    Its argument is the executor on which the loader of train batches runs.
    """
    def add(executor):
        copiers = []

        def staging_for(device, now):
            copiers.append(LateCopier())
            return Staging(copiers[-1], now)
        monkeypatch.setattr("pytorchrl.scheme.gradients.assembly.staging_for", staging_for)
        monkeypatch.setattr("pytorchrl.scheme.gradients.loader.ThreadPoolExecutor", executor)
        return copiers
    return add


@pytest.mark.cpu("the learner on the CPU has no copier but that of the test")
@pytest.mark.every(2)
@pytest.mark.parametrize(("name", "settings"), [
    ("sac", {}), ("dqn", {}), ("r2d2", {}),
    ("sac", {"num_col_workers": 2, "num_replay_workers": 2, "col_communication": ASYNC}),
    ("dqn", {"num_col_workers": 2, "num_replay_workers": 2, "col_communication": ASYNC}),
    ("ppo", {"microbatch_size": 5}), ("ppo", {"col_communication": ASYNC}),
    ("ppo", {"num_col_workers": 2, "train_batch_size": 64, "microbatch_size": 32}),
    ("impala", {"num_col_workers": 2, "col_communication": ASYNC}),
    ("impala", {"num_col_workers": 2, "col_communication": ASYNC, "num_passes": 2, "queue_policy": "drop_oldest"}),
    ("impala", {"num_col_workers": 2, "col_communication": ASYNC, "max_policy_lag": 1, "train_batch_size": 64}),
    ("impala", {"num_col_workers": 2, "col_communication": ASYNC, "replay_proportion": 1.0, "replay_slots": 4}),
], ids=str)
def test_staging_does_not_change_results(train, stage, name, settings):
    """Check that the results are equal, wherever train batches are loaded: at the earliest or latest moment, or in a
    thread.

    Virtual time passes while the thread loads, so the time for loading is known only without the thread.
    """
    expected, metrics = train(name, **settings)
    assert metrics["load_time_ms"] is metrics["load_wait_time_ms"] is None
    has_loader = name in ("ppo", "impala") and "col_communication" in settings
    for executor in (AtOnce, OnDemand, ThreadPoolExecutor) if has_loader else (AtOnce,):
        copiers = stage(executor)
        found, metrics = train(name, **settings)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[leaf], expected[leaf]) for leaf in expected)
        assert sum(copier.num_started for copier in copiers) > 3
        assert metrics["load_wait_time_ms"] == 0.0
        assert metrics["load_time_ms"] == 0.0 or executor is ThreadPoolExecutor


def test_the_next_train_batch_is_loaded_while_the_learner_computes(train, stage):
    """Check that after a run, whose queue is always full, one train batch is loaded that the learner has not used."""
    copiers = stage(ThreadPoolExecutor)
    _, metrics = train("impala", num_col_workers=2, col_communication=ASYNC, queue_size=16,
                       costs={"step": 0.01, "grad": 10.0})
    assert metrics["queue_size"] > 0
    [copier] = copiers
    assert [kind for kind, _ in copier.events].count("take") == copier.num_started - 1
