"""Check environments on a GPU: nothing but one block is read by the host, and results equal those of copied steps."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from pytorchrl import ASYNC, Scheme, VecEnv
from pytorchrl.agent.actors.normalizers import discounted_sums
from pytorchrl.agent.data import HostRows, RolloutData
from pytorchrl.agent.env.tensors import vec_env
from pytorchrl.agent.env.tensors.vec_env import TensorVecEnv, class_for
from pytorchrl.agent.storages.returns import gae, vtrace
from pytorchrl.errors import EnvError, NonFiniteDataError
from pytorchrl.training.composition import compose
from tests.emulated_gpu.streams import NAME
from tests.emulated_gpu.tensor_task import TensorTask
from tests.emulated_gpu.waits import Waits
from tests.unit.scheme.conftest import PATTERNS, check_ledger

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda:0")
CONTINUOUS = functools.partial(TensorTask, device="cuda:0")
DISCRETE = functools.partial(TensorTask, device="cuda:0", is_discrete=True)
REPLAY = {"start_steps": 20, "update_every": 4, "num_updates": 2, "mini_batch_size": 16}
RAW = {"normalize_obs": False, "normalize_reward": False}
AGENTS = {
    "ppo": ("ppo", CONTINUOUS, {"num_steps": 8, "normalize_obs": True, "normalize_reward": True}),
    "ppo discrete": ("ppo", DISCRETE, {"num_steps": 8, **RAW}),
    "ppo with memory": ("ppo", CONTINUOUS, {"num_steps": 8, "recurrent_net": "gru", "num_mini_batch": 2, **RAW}),
    "a2c": ("a2c", DISCRETE, {"num_steps": 8}),
    "impala": ("impala", CONTINUOUS, {"num_steps": 8, **RAW}),
    "appo": ("appo", DISCRETE, {"num_steps": 8}),
    "dqn": ("dqn", DISCRETE, {**REPLAY, "n_step": 3}),
    "dqn with priorities": ("dqn", DISCRETE, {**REPLAY, "prioritized": True}),
    "r2d2": ("r2d2", DISCRETE, {"start_steps": 20}),
    "ddpg": ("ddpg", CONTINUOUS, REPLAY),
    "td3": ("td3", CONTINUOUS, {**REPLAY, "n_step": 2}),
    "sac": ("sac", CONTINUOUS, REPLAY),
    "sac with memory": ("sac", CONTINUOUS, {**REPLAY, "recurrent_net": "gru", "length": 4, "burn_in": 2, "period": 2}),
}


def scheme_of(name, **options):
    """Return a scheme that has not started."""
    algorithm, task, own = AGENTS[name]
    agent, settings, _ = compose(algorithm, task, {"num_envs": 4, **own, "target_steps": 10_000, **options})
    return Scheme(agent.algo_factory, agent.actor_factory, agent.storage_factory, agent.train_envs_factory,
                  **{"device": "cuda:0", "seed": 1, "runtime": "simulated", **settings})


def stepped(scheme, version):
    while scheme.version < version:
        scheme.step()
    return scheme


def weights_of(scheme):
    state = scheme.update_worker.local_worker.get_weights().state
    return {name: torch.as_tensor(tensor) for name, tensor in state.items()}


def assert_equal(first, second):
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


def collector_of(scheme):
    return scheme.update_worker.local_worker.local_worker


@pytest.fixture
def schemes(request):
    """Return a function that builds and starts a scheme, which is stopped after the test."""
    made = []

    def make(name, **options):
        scheme = scheme_of(name, **options)
        made.append(scheme)
        return scheme
    yield make
    for scheme in made:
        scheme.stop()


@pytest.mark.parametrize("name", list(AGENTS))
def test_runs_equal_those_with_copies_of_every_step(schemes, name, monkeypatch):
    """Compare weights bit for bit, and the accounts of all steps and episodes."""
    direct = stepped(schemes(name), 6)
    monkeypatch.setattr(vec_env, "reason_for_host", lambda *envs: "this test wants it")
    copied = stepped(schemes(name), 6)
    assert_equal(weights_of(direct), weights_of(copied))
    assert direct.ledger() == copied.ledger()


@pytest.mark.parametrize("name", ["ppo discrete", "ppo with memory", "impala", "dqn", "sac"])
def test_the_host_reads_a_rollout_once(schemes, name):
    scheme = stepped(schemes(name), 2)
    worker = collector_of(scheme)
    assert isinstance(worker.envs, TensorVecEnv)
    with Waits() as waits:
        rollout = worker.collect()
    assert (waits.reads, waits.writes) == (1, 0), waits.names
    assert rollout.data.obs["point"].device == GPU
    assert rollout.header.num_env_steps == rollout.data.num_valid()


def test_a_normalizer_reads_its_moments_once(schemes):
    worker = collector_of(stepped(schemes("ppo", normalize_reward=False), 2))
    with Waits() as waits:
        worker.collect()
    assert waits.reads == 1 + len(worker.actor.obs_moments), waits.names


@pytest.mark.parametrize("name", ["ppo", "dqn", "sac", "ppo with memory"])
def test_a_run_resumes_bit_for_bit(schemes, name):
    """A resumed run starts new episodes, so two runs resume from one checkpoint, one of them after a detour."""
    checkpoint = stepped(schemes(name), 4).checkpoint()
    resumed = []
    for _ in range(2):
        scheme = schemes(name)
        scheme.resume(checkpoint)
        resumed.append(stepped(scheme, 8))
    assert_equal(*map(weights_of, resumed))
    assert resumed[0].ledger() == resumed[1].ledger()


def test_replay_on_a_device_is_saved_and_loaded(schemes):
    """Batches drawn after loading equal those drawn without."""
    storage, other = (collector_of(stepped(schemes("dqn"), 4)).storage for _ in range(2))
    other.reset()
    other.load_state_dict(storage.state_dict())
    first, second = storage.sample(64), other.sample(64)
    assert {leaf.device for leaf in first.next_obs.values()} == {GPU}
    for name in ("obs", "next_obs"):
        assert_equal(getattr(first, name), getattr(second, name))
    assert torch.equal(first.ret, second.ret)


def test_observations_of_replay_never_leave_the_device(schemes):
    scheme = stepped(schemes("sac"), 4)
    worker = scheme.update_worker.local_worker
    with Waits() as waits:
        batch = worker.storage.sample(16)
    assert {leaf.device for leaf in (*batch.obs.values(), *batch.next_obs.values())} == {GPU}
    assert waits.reads == 0, waits.names


def rollout_on(device, rng, *, next_step):
    """Return a random rollout; the random numbers are the same for each device."""
    num_steps, num_envs = 9, 5
    ended = rng.random((num_steps, num_envs)) < 0.3
    terminated = ended & (rng.random(ended.shape) < 0.5)
    valid = np.ones_like(ended)
    if next_step:
        valid[1:] = ~ended[:-1]
    index = np.argwhere(ended)[:0 if next_step else None]
    values = {"reward": rng.standard_normal(ended.shape), "logp": rng.standard_normal(ended.shape)}
    tensors = {name: torch.as_tensor(array, dtype=torch.float32).to(device) for name, array in values.items()}

    def flags(array):
        return torch.as_tensor(array).to(device)
    return RolloutData(
        obs={}, done=flags(np.ones((num_steps + 1, num_envs), bool)), rhs={}, mask=None, action=tensors["reward"],
        reward=tensors["reward"], terminated=flags(terminated), truncated=flags(ended & ~terminated),
        valid=flags(valid), final_index=flags(index), final_obs={}, other={"logp": tensors["logp"]},
        host=None if device == "cpu" else HostRows(
            *[np.zeros(0)] * 5, valid=valid, final_index=index, is_sound=True, number=1, episodes=[]))


@pytest.mark.parametrize("next_step", [False, True])
@pytest.mark.parametrize("formula", ["gae", "vtrace", "discounted sums"])
def test_formulas_give_the_same_on_both_devices(formula, next_step):
    for seed in range(20):
        results = []
        for device in ("cpu", "cuda:0"):
            rng = np.random.default_rng(seed)
            rollout = rollout_on(device, rng, next_step=next_step)
            num_steps, num_envs = rollout.reward.shape
            logp, value, final, running = (
                torch.as_tensor(rng.standard_normal(shape), dtype=torch.float32).to(device) for shape in (
                    (num_steps, num_envs), (num_steps + 1, num_envs), (len(rollout.final_index),), (num_envs,)))
            if formula == "gae":
                found = gae(rollout, value, final, 0.97, 0.9)
            elif formula == "vtrace":
                found = vtrace(rollout, logp, value, final, 0.97, rho_bar=1.2, c_bar=1.0, vtrace_lambda=0.9)
            else:
                running = running.double() if device != "cpu" else running.double().numpy()
                found = discounted_sums(rollout, 0.97, running), running
            results.append([torch.as_tensor(part).cpu() for part in found])
        for ours, theirs in zip(*results, strict=True):
            if formula == "vtrace":  # NumPy and torch round exp differently
                assert torch.allclose(ours, theirs, rtol=1e-6, atol=1e-6)
            else:
                assert torch.equal(ours, theirs)


class Wrong(TensorTask):
    """Breaks the contract in one way."""

    def __init__(self, num_envs, way):
        super().__init__(num_envs)
        self.way, self.num_steps = way, 0

    def step(self, action):
        obs, reward, terminated, truncated, extras = super().step(action)
        self.num_steps += 1
        if self.way == "nan":
            obs["point"][1, 0] = torch.nan if self.num_steps == 3 else 0.0
        elif self.way == "device":
            obs = {**obs, "point": obs["point"].cpu()}
        elif self.way == "rows":
            obs = {**obs, "point": obs["point"][:2]}
        elif self.way == "flags":
            terminated = terminated.unsqueeze(1)
        elif self.way == "floats":
            reward = reward.long()
        elif self.way == "leaf":
            obs = {"point": obs["point"]}
        return obs, reward, terminated, truncated, extras


@pytest.mark.parametrize(("way", "text"), [
    ("nan", "obs|point is nan"), ("device", "expected 'point' as a tensor on cuda:0, got .* on cpu"),
    ("rows", r"expected 'point' of shape \(4, 2\), got \(2, 2\)"), ("flags", r"expected terminated .* \(4,\)"),
    ("floats", "expected reward as floats"), ("leaf", "no leaf 'time'"),
])
def test_wrong_results_are_named(way, text):
    agent, settings, _ = compose("ppo", functools.partial(Wrong, way="none"), {
        "num_envs": 4, "num_steps": 8, "target_steps": 10_000, "device": "cuda:0"})
    options = agent.train_envs_factory.with_options(env_kwargs={"way": way})
    scheme = Scheme(agent.algo_factory, agent.actor_factory, agent.storage_factory, options, **settings, seed=1)
    with pytest.raises((EnvError, NonFiniteDataError), match=text):
        stepped(scheme, 1)
    scheme.stop()


@pytest.mark.parametrize("truncation", ["exact", "approximate"])
def test_unknown_ends_are_refused_or_counted(truncation):
    task = functools.partial(CONTINUOUS, has_final=False)
    agent, settings, _ = compose("ppo", task, {
        "num_envs": 4, "num_steps": 8, "target_steps": 10_000, "device": "cuda:0", "truncation": truncation, **RAW})
    scheme = Scheme(agent.algo_factory, agent.actor_factory, agent.storage_factory, agent.train_envs_factory,
                    **settings, seed=1)
    if truncation == "exact":
        with pytest.raises(EnvError, match="truncation='approximate'"):
            stepped(scheme, 4)
    else:
        worker = collector_of(stepped(scheme, 4))
        with Waits() as waits:
            episodes = worker.collect().header.episodes
        assert waits.reads == 1, waits.names
        assert {(episode.terminated, episode.is_approximated) for episode in episodes} == {(True, False), (False, True)}
    scheme.stop()


def test_options_that_need_the_host_are_named(caplog):
    factory = VecEnv.create_factory(CONTINUOUS, vec_env_size=4, reward_transform=np.tanh)
    assert class_for(factory, GPU) is None
    assert "reward_transform is a function of arrays" in caplog.text
    assert class_for(VecEnv.create_factory(CONTINUOUS, vec_env_size=4), GPU) is TensorVecEnv


@pytest.mark.parametrize("runtime", ["threads", "simulated"])
@pytest.mark.parametrize("name", ["ppo", "sac"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_all_patterns_count_every_step(schemes, pattern, name, runtime):
    has_actors = pattern["num_col_workers"] > 1 or pattern["col_communication"] is ASYNC
    devices = {"grad_device": "cuda:0"} if pattern["num_grad_workers"] > 1 else {}
    devices |= {"col_device": "cuda:0"} if has_actors else {}
    scheme = stepped(schemes(name, **pattern, **devices, runtime=runtime), 6)
    scheme.stop()
    check_ledger(scheme)
    assert all(tensor.isfinite().all() for tensor in weights_of(scheme).values())


@pytest.mark.parametrize("name", ["ppo discrete", "dqn"])
def test_no_step_is_lost_with_a_killed_process(schemes, monkeypatch, name):
    if torch.cuda.get_device_name(0) == NAME:  # the processes of workers need the same devices
        folders = [str(Path(__file__).with_name("child")), os.environ.get("PYTHONPATH")]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, folders)))
    scheme = schemes(name, runtime="processes", num_col_workers=2, col_device="cuda:0", on_worker_failure="restart",
                     faults="kill col.1 @ step 12")
    while scheme.version < 4 or not scheme.metrics()["workers_restarted"]:
        scheme.step()
        check_ledger(scheme)
    scheme.stop()
    check_ledger(scheme)
    assert all(tensor.isfinite().all() for tensor in weights_of(scheme).values())


def test_decentralized_gradients_equal_those_with_copies(schemes, monkeypatch):
    pattern = {"num_grad_workers": 2, "distribute_gradients": True, "grad_device": "cuda:0"}
    direct = stepped(schemes("ppo discrete", **pattern), 6)
    monkeypatch.setattr(vec_env, "reason_for_host", lambda *envs: "this test wants it")
    copied = stepped(schemes("ppo discrete", **pattern), 6)
    assert_equal(weights_of(direct), weights_of(copied))
    assert check_ledger(direct) == check_ledger(copied)
