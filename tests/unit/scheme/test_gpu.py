"""Check on a GPU that every algorithm learns, gradients equal those of the CPU, and saved state is on the CPU."""

from __future__ import annotations

import dataclasses
import math
import re
import threading

import gymnasium
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pytorchrl import (
    A2C,
    APPO,
    ASYNC,
    DDPG,
    DQN,
    IMPALA,
    PPO,
    R2D2,
    SAC,
    TD3,
    GAEBuffer,
    OffPolicyActor,
    OnPolicyActor,
    PERBuffer,
    QActor,
    Scheme,
    SequenceBuffer,
    VecEnv,
    VTraceBuffer,
)
from pytorchrl.agent.data import map_tensors
from pytorchrl.runtime.collective import NcclCollective, join_ranks, propose_address
from pytorchrl.scheme.counters import WorkerCounters
from pytorchrl.scheme.gradients.microbatch import differentiate
from pytorchrl.scheme.gradients.process_group import GradientGroup
from pytorchrl.scheme.gradients.staging import staging_for

pytestmark = pytest.mark.gpu

GPU = "cuda:0"
REPLAY = {"start_steps": 20, "mini_batch_size": 8}
SHARDS = {"num_col_workers": 2, "num_replay_workers": 2, "col_communication": ASYNC}
ON_POLICY = {"ppo": (PPO, GAEBuffer, {"num_epochs": 2, "num_mini_batch": 2}), "a2c": (A2C, GAEBuffer, {}),
             "impala": (IMPALA, VTraceBuffer, {}),
             "appo": (APPO, VTraceBuffer, {"target_network": True, "num_mini_batch": 2})}
OFF_POLICY = {"dqn": DQN, "c51": DQN, "r2d2": R2D2, "sac": SAC, "tqc": SAC, "ddpg": DDPG, "td3": TD3}
DISCRETE = ("dqn", "c51", "r2d2")


def agent_of(name, **actor):
    """Return the factories of a small agent."""
    if name in ON_POLICY:
        algorithm, storage, options = ON_POLICY[name]
        envs = VecEnv.create_factory("Pendulum-v1", vec_env_size=2)
        return (algorithm.create_factory(**options), OnPolicyActor.create_factory(
            envs.observation_space, envs.action_space, hidden_sizes=(8,), normalize_obs=True, **actor),
            storage.create_factory(16), envs)
    envs = VecEnv.create_factory("CartPole-v1" if name in DISCRETE else "Pendulum-v1", vec_env_size=2)
    kind = QActor if name in DISCRETE else OffPolicyActor
    options = {"r2d2": {"recurrent_net": "lstm", "recurrent_size": 8}, "ddpg": {"policy": "deterministic"},
               "td3": {"policy": "deterministic"}, "c51": {"distribution": "categorical"},
               "tqc": {"distribution": "quantile", "num_atoms": 9}}
    storage = PERBuffer.create_factory(size=400, rollout_size=10) if name != "r2d2" else SequenceBuffer.create_factory(
        size=400, rollout_size=10, length=10, burn_in=2, period=5)
    return (OFF_POLICY[name].create_factory(**REPLAY),
            kind.create_factory(envs.observation_space, envs.action_space, hidden_sizes=(8,), **options.get(name, {})),
            storage, envs)


@pytest.fixture
def run():
    """Return a function that makes a scheme and runs some updates; all schemes are stopped after the test."""
    schemes = []

    def make(agent, num_updates=6, **settings):
        scheme = Scheme(*agent, **{"runtime": "simulated", "seed": 1} | settings)
        schemes.append(scheme)
        while scheme.version < num_updates:
            scheme.step()
        return scheme
    yield make
    for scheme in schemes:
        ledger = scheme.stop()
        assert ledger["in_flight"] == ledger["queued"] == 0


def tensors_in(state):
    """Return all tensors in nested dictionaries."""
    if isinstance(state, dict):
        return [tensor for part in state.values() for tensor in tensors_in(part)]
    return [state] if isinstance(state, torch.Tensor) else []


def assert_learned_on(scheme, device):
    worker = scheme.update_worker.local_worker
    assert {str(group.data.device) for group in worker.algo.groups.values()} == {device}
    assert all(torch.isfinite(tensor).all() for tensor in scheme.acting_state().values() if tensor.is_floating_point())
    assert {tensor.device.type for tensor in tensors_in(worker.whole_state().algorithm)} == {"cpu"}
    assert scheme.metrics()["updates_skipped_nan"] == 0


@pytest.mark.parametrize("name", [*ON_POLICY, *OFF_POLICY])
@pytest.mark.parametrize("settings",
                         [{}, {"col_communication": ASYNC, "col_device": GPU},
                          {"num_col_workers": 2, "col_device": GPU}], ids=str)
def test_every_algorithm_learns_on_a_gpu(run, name, settings):
    assert_learned_on(run(agent_of(name), device=GPU, **settings), GPU)


@pytest.mark.parametrize("name", ON_POLICY)
def test_an_actor_with_memory_learns_on_a_gpu(run, name):
    assert_learned_on(run(agent_of(name, recurrent_net="gru", recurrent_size=8), device=GPU), GPU)


@pytest.mark.parametrize("name", ["dqn", "r2d2", "sac"])
def test_batches_of_shards_go_to_the_gpu(run, name):
    assert_learned_on(run(agent_of(name), device=GPU, **SHARDS), GPU)


@pytest.mark.parametrize("settings", [{}, {"distribute_gradients": True}, {"grad_communication": ASYNC}], ids=str)
@pytest.mark.parametrize("device", ["cpu", GPU])
def test_gradient_workers_on_a_gpu_serve_a_learner_on_any_device(run, settings, device):
    assert_learned_on(run(agent_of("ppo"), num_grad_workers=2, grad_device=GPU, device=device, **settings), device)


@pytest.mark.parametrize("name", ["ppo", "impala", "dqn", "sac", "td3"])
@pytest.mark.parametrize("options", [{"mixed_precision": True}, {"compile": True},
                                     {"compile": True, "mixed_precision": True}], ids=str)
def test_mixed_precision_and_compilation_work_on_a_gpu(run, name, options):
    algorithm, *others = agent_of(name)
    algorithm = dataclasses.replace(algorithm, options=dataclasses.replace(algorithm.options, **options))
    assert_learned_on(run((algorithm, *others), num_updates=12, device=GPU), GPU)


def test_mixed_precision_works_with_memory_on_a_gpu(run):
    _, *others = agent_of("r2d2")
    assert_learned_on(run((R2D2.create_factory(**REPLAY, mixed_precision=True), *others), device=GPU), GPU)


def made(compile_, seed=0):
    """Return PPO with an actor on the GPU."""
    _, actor_factory, _, _ = agent_of("ppo")
    actor = actor_factory(device=GPU, seed=seed)
    return PPO.create_factory(compile=compile_)(device=GPU, actor=actor, seed=seed)


def test_recorded_gradients_and_actions_equal_others(run, caplog):
    """Check that kernels in CUDA graphs compute with the current weights and inputs, and that recording succeeds."""
    worker = run(agent_of("ppo"), num_updates=2).update_worker.local_worker
    worker.get_data()
    batch = map_tensors(worker.batch, lambda leaf: leaf.to(GPU))
    plain, compiled = made(False), made(True)
    obs = {name: leaf.cpu().numpy() for name, leaf in batch.obs.items()}
    done = batch.done.cpu().numpy()
    for number in range(8):
        own = dataclasses.replace(batch, advantage=batch.advantage + number)
        [expected], info = plain.compute_gradients(own)
        [found], found_info = compiled.compute_gradients(own)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
        assert math.isclose(found_info["loss"], info["loss"], rel_tol=1e-3, abs_tol=1e-5)
        actions = [algorithm.acting_step(obs, {}, done, deterministic=True).action for algorithm in (plain, compiled)]
        np.testing.assert_allclose(actions[1], actions[0], rtol=1e-3, atol=1e-5)
        for algorithm in (plain, compiled):
            algorithm.apply_gradients([expected])
    assert "CUDA graph" not in caplog.text


def test_recorded_actions_are_random():
    algorithm = made(True)
    obs, done = {"obs": np.zeros((2, 3), np.float32)}, np.zeros(2, bool)
    actions = np.stack([algorithm.acting_step(obs, {}, done).action for _ in range(50)])
    assert len(np.unique(actions)) == actions.size
    assert abs(actions.mean()) < 1.0


class WaitingActor(OnPolicyActor):
    """An actor that waits for the GPU in each action, so that its actions cannot be recorded."""

    def policy_features(self, obs, rhs, done):
        features, states = super().policy_features(obs, rhs, done)
        return (features.clamp(-1, 1) if float(features.abs().max()) > 1e6 else features), states


@pytest.mark.parametrize("is_watched", [True, False])
def test_actions_continue_after_they_could_not_be_recorded(monkeypatch, caplog, is_watched):
    """Check that the thread then uses the same stream as before, even if the recording was begun and failed."""
    _, actor_factory, _, _ = agent_of("ppo")
    actor = dataclasses.replace(actor_factory, cls=WaitingActor)(device=GPU, seed=0)
    algorithm = PPO.create_factory(compile=True)(device=GPU, actor=actor, seed=0)
    if not is_watched:
        monkeypatch.setattr(algorithm._recorded_act, "_is_compiled", True)
    before, seen = torch.cuda.current_stream(), []
    obs, done = {"obs": np.zeros((2, 3), np.float32)}, np.zeros(2, bool)
    for _ in range(8):
        seen.append(algorithm.acting_step(obs, {}, done).action)
        assert torch.cuda.current_stream() == before
    assert len(np.unique(seen)) == 16
    assert caplog.text.count("could not be recorded into a CUDA graph") == 1


STAGED = [("sac", {}), ("dqn", {}), ("r2d2", {}), ("ppo", {"microbatch_size": 5}), ("sac", SHARDS),
          ("impala", {"num_col_workers": 2, "col_communication": ASYNC})]


@pytest.mark.parametrize(("name", "settings"), STAGED, ids=str)
def test_copies_in_advance_do_not_change_results(run, monkeypatch, name, settings):
    staged = run(agent_of(name), num_updates=20, device=GPU, **settings)
    assert staged.metrics()["load_time_ms"] is not None
    monkeypatch.setattr("pytorchrl.scheme.gradients.assembly.staging_for", lambda device, now: None)
    plain = run(agent_of(name), num_updates=20, device=GPU, **settings)
    assert plain.metrics()["load_time_ms"] is None
    for leaf, expected in plain.acting_state().items():
        torch.testing.assert_close(staged.acting_state()[leaf], expected, rtol=1e-4, atol=1e-6)


def test_large_batches_arrive_complete():
    """Check batches so large that the learner could read them before their copies are complete."""
    device, rng = torch.device(GPU), torch.Generator().manual_seed(0)
    staging = staging_for(device, lambda: 0.0)
    batches = [{"obs": torch.randint(0, 256, (1 << 26,), generator=rng, dtype=torch.uint8)} for _ in range(4)]
    for batch in staging.ahead(iter(batches)):
        found = staging.on_device(batch)["obs"]
        assert found.device == device
        assert torch.equal(found.cpu(), batch["obs"])


@pytest.mark.gpu(count=2)
@pytest.mark.skipif(not torch.distributed.is_nccl_available(), reason="torch was built without NCCL")
def test_ranks_with_a_gpu_each_average_with_nccl():
    (address, port), found = propose_address(is_local=True), {}

    def run_rank(rank):
        device = torch.device("cuda", rank)
        group = join_ranks(address, port, rank, 2, 30.0, device=device)
        assert isinstance(group, NcclCollective)
        mean, = GradientGroup(group).mean([torch.full((1000,), float(rank), device=device)], [rank + 1])
        found[rank] = mean.device, mean.cpu()
        barrier.wait(30)
        group.close()
    barrier = threading.Barrier(2)
    threads = [threading.Thread(target=run_rank, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for rank in range(2):
        device, mean = found[rank]
        assert device == torch.device("cuda", rank)
        assert torch.equal(mean, torch.full((1000,), 2 / 3))


@pytest.mark.parametrize("microbatch_size", [None, 8])
@pytest.mark.parametrize("name", ["ppo", "a2c", "impala"])
def test_gradients_equal_those_of_the_cpu(run, name, microbatch_size):
    """Check that CPU and GPU compute the same gradients from the same data and parameters.

    Random numbers differ between devices, so the data are collected on the CPU only.
    """
    scheme = run(agent_of(name), num_updates=2, microbatch_size=microbatch_size)
    worker = scheme.update_worker.local_worker
    algo_factory, actor_factory, _, _ = agent_of(name)
    worker.get_data()
    expected, info = worker.compute_gradients(worker.batch, False)
    actor = actor_factory(device=GPU, seed=0)
    algo = algo_factory(device=GPU, actor=actor, seed=0)
    algo.load_gradient_state(worker.algo.gradient_state())
    [found], found_info = differentiate(algo, worker.batch, microbatch_size, WorkerCounters())
    torch.testing.assert_close(found.cpu(), expected[0].cpu(), rtol=1e-3, atol=1e-5)
    assert math.isclose(found_info["loss"], info["loss"], rel_tol=1e-3, abs_tol=1e-5)


class ImageEnv(gymnasium.Env):
    """An environment with random images and endless episodes; its reward is the action."""

    observation_space, action_space = gymnasium.spaces.Box(0, 255, (4, 36, 36), np.uint8), gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.step(0)[0], {}

    def step(self, action):
        return self.np_random.integers(0, 256, (4, 36, 36), np.uint8), float(action), False, False, {}


@pytest.mark.parametrize("name", ["ppo", "dqn"])
def test_deterministic_kernels_repeat_a_run_on_images(run, monkeypatch, name):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    envs = VecEnv.create_factory(ImageEnv, vec_env_size=2)
    algorithm, actor, storage, _ = agent_of(name)
    actor = actor.cls.create_factory(envs.observation_space, envs.action_space)
    first, second = (run((algorithm, actor, storage, envs), device=GPU, deterministic_kernels=True).acting_state()
                     for _ in range(2))
    assert all(torch.equal(leaf, second[key]) for key, leaf in first.items())


# Operations of GPUs for which torch has no deterministic kernel, according to `torch.use_deterministic_algorithms`.
NOT_DETERMINISTIC = re.compile(
    "aten::(adaptive_.*_backward|_adaptive_.*_backward|avg_pool3d_backward|fractional_max_pool.*|max_unpool.*|"
    "upsample_.*_backward|reflection_pad.*_backward|nll_loss.*|_ctc_loss_backward|_embedding_bag.*|put_?|histc|bincount|"
    "median|grid_sampler_.*_backward|cumsum_?|scatter_reduce_?)")


class Refusing(TorchDispatchMode):
    """Refuses operations on GPUs that torch refuses with deterministic kernels, as an emulated GPU does not."""

    def __torch_dispatch__(self, operation, kinds, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        for tensor in [result, *args]:
            if isinstance(tensor, torch.Tensor) and tensor.is_cuda and (
                    tensor.is_floating_point() or operation._schema.name != "aten::cumsum"):
                assert not NOT_DETERMINISTIC.fullmatch(operation._schema.name), operation
        return result


@pytest.mark.parametrize("name", [*ON_POLICY, *OFF_POLICY])
def test_every_algorithm_has_deterministic_kernels(run, monkeypatch, name):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    memory = {"recurrent_net": "gru", "recurrent_size": 8} if name in ON_POLICY else {}
    with Refusing():
        assert_learned_on(run(agent_of(name, **memory), device=GPU, deterministic_kernels=True), GPU)


def test_operations_without_a_deterministic_kernel_are_found():
    weight = torch.ones(3, device=GPU, requires_grad=True)
    with Refusing():
        (2 * weight).sum().backward()
        with pytest.raises((AssertionError, RuntimeError), match="cumsum"):
            weight.detach().cumsum(0)
        with pytest.raises((AssertionError, RuntimeError), match="upsample"):
            torch.nn.functional.interpolate(weight.view(1, 1, 3), scale_factor=2, mode="linear").sum().backward()


def test_a_gpu_that_torch_lacks_is_reported(run):
    with pytest.raises(ValueError, match=f"got 'cuda:{torch.cuda.device_count()}'; give one of these"):
        run(agent_of("a2c"), device=f"cuda:{torch.cuda.device_count()}")
