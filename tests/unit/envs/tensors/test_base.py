"""Tests of what all environments written in torch have in common: resets, seeds, devices, and no reads by the host."""

from __future__ import annotations

import functools
import pickle

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

import pytorchrl as prl
from pytorchrl import VecEnv
from pytorchrl.envs.classic import _IN_TORCH
from pytorchrl.envs.tensors.base import TensorEnv
from pytorchrl.errors import ConfigError
from tests.unit.envs.tensors.host_reads import HostReadError, no_host_reads

IDS = [f"pytorchrl/Torch{name}" for name in _IN_TORCH]
NUM_ENVS = 6
GPU = pytest.param("cuda:0", marks=pytest.mark.gpu)


class Drift(TensorEnv):
    """A point that drifts with a speed, pushed by the action."""

    single_observation_space = spaces.Box(-9, 9, (1,), np.float32)
    single_action_space = spaces.Box(-9, 9, (1,), np.float32)
    num_draws = 1
    speed = 1.0

    def start(self, draws):
        return draws

    def dynamics(self, state, actions):
        state = (state + self.speed + actions.float()).float()
        return state, state[:, 0], state[:, 0] > 30


def build(env_id, num_envs=NUM_ENVS, **options):
    return gym.make_vec(env_id, num_envs=num_envs, **options)


def actions_for(env, generator):
    """Return random actions of the environments, on their device."""
    space = env.single_action_space
    if isinstance(space, gym.spaces.Discrete):
        actions = torch.randint(int(space.n), (env.num_envs,), generator=generator)
    else:
        actions = torch.rand(env.num_envs, *space.shape, generator=generator) * 2.0 - 1.0
    return actions.to(env.unwrapped.device)


def tensors_in(value):
    """Return the tensors of nested results of a step, in a fixed order."""
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value
    return [tensor for part in parts for tensor in tensors_in(part)]


def assert_equal(one, other, **tolerance):
    torch.testing.assert_close(
        [tensor.cpu() for tensor in tensors_in(one)], [tensor.cpu() for tensor in tensors_in(other)],
        **{"rtol": 0.0, "atol": 0.0} | tolerance)


def are_different(one, other):
    return any(not torch.equal(mine, its) for mine, its in zip(tensors_in(one), tensors_in(other), strict=True))


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("env_id", IDS)
def test_results_are_tensors_of_the_spaces_and_the_device(env_id, device):
    env = build(env_id, device=device)
    assert env.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    obs, extras = env.reset(seed=1)
    assert extras == {}
    draws = torch.Generator().manual_seed(1)
    for _ in range(5):
        read = {name: part.cpu().numpy() for name, part in obs.items()} if isinstance(obs, dict) else obs.cpu().numpy()
        assert env.observation_space.contains(read)
        obs, reward, terminated, truncated, extras = env.step(actions_for(env, draws))
        assert reward.shape == terminated.shape == truncated.shape == (NUM_ENVS,)
        assert (reward.dtype, terminated.dtype, truncated.dtype) == (torch.float32, torch.bool, torch.bool)
        assert {tensor.device for tensor in tensors_in((obs, reward, terminated, truncated, extras))} == {
            torch.device(device)} == {env.device}


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("env_id", IDS)
def test_the_host_reads_nothing_in_a_step(env_id, device):
    env = build(env_id, device=device, max_episode_steps=30)
    env.reset(seed=1)
    draws = torch.Generator().manual_seed(1)
    actions = [actions_for(env, draws) for _ in range(200)]
    with no_host_reads():
        results = [env.step(action)[2:4] for action in actions]
    assert any(flags.any() for flags in tensors_in(results))


@pytest.mark.parametrize("read", [
    lambda x: x.sum().item(), lambda x: bool(x.any()), lambda x: x[x > 0],
    lambda x: x.index_put_((x > 0,), x.sum()), lambda x: x.masked_select(x > 0), lambda x: x.numpy(),
    lambda x: x.tolist(), lambda x: x.cpu(), lambda x: torch.equal(x, x + 1.0),
    lambda x: x.nonzero(), lambda x: float(x.sum())])
def test_a_read_by_the_host_is_found(read):
    with pytest.raises(HostReadError), no_host_reads():
        read(torch.ones(3))


@pytest.mark.parametrize("env_id", IDS)
def test_a_seed_determines_all_steps_and_every_environment_differs(env_id):
    def run(env, seed):
        draws, found = torch.Generator().manual_seed(1), [env.reset(seed=seed)[0]]
        return found + [env.step(actions_for(env, draws)) for _ in range(40)]

    env = build(env_id, max_episode_steps=10)
    first = run(env, 3)
    assert_equal(first, run(env, 3))
    assert_equal(first, run(build(env_id, max_episode_steps=10), 3))
    state = env.start(torch.rand(NUM_ENVS, env.num_draws))
    assert env.num_draws == 1 or len(state.unique(dim=0)) == NUM_ENVS
    for seed in (4, None):  # without a seed, the random numbers continue
        assert are_different(first, run(env, seed))


def test_a_new_environment_has_its_own_random_numbers():
    one, other = build(IDS[0]), build(IDS[0])
    assert not torch.equal(one.reset()[0], other.reset()[0])
    assert one.single_action_space is not other.single_action_space


@pytest.mark.parametrize("env_id", IDS)
def test_an_episode_is_cut_after_its_limit_and_the_last_observation_is_kept(env_id):
    """Compare with an environment that is never reset: until the first end, both take the same steps."""
    limit = 7
    cut, free = build(env_id, max_episode_steps=limit), build(env_id, max_episode_steps=10**6)
    cut.reset(seed=2)
    free.reset(seed=2)
    draws = torch.Generator().manual_seed(2)
    for step in range(1, limit + 1):
        actions = actions_for(cut, draws)
        obs, reward, terminated, truncated, extras = cut.step(actions)
        expected = free.step(actions)
        assert not terminated.any()
        assert truncated.tolist() == [step == limit] * NUM_ENVS
        assert_equal((extras["final_obs"], reward), expected[:2])
        if step < limit:
            assert_equal(obs, expected[0])
    started = cut.state.clone()
    assert_equal(obs, cut.observe(started))
    assert are_different(obs, expected[0])
    assert not cut.step(actions)[3].any()  # the steps are counted anew


@pytest.mark.parametrize("env_id", IDS)
def test_later_steps_do_not_change_earlier_results(env_id):
    env = build(env_id, max_episode_steps=5)
    results = [env.reset(seed=1)]
    copies = [[tensor.clone() for tensor in tensors_in(results[0])]]
    draws = torch.Generator().manual_seed(1)
    for _ in range(20):
        results.append(env.step(actions_for(env, draws)))
        copies.append([tensor.clone() for tensor in tensors_in(results[-1])])
    assert_equal(results, copies)


def test_actions_with_gradients_leave_no_graph():
    env = build("pytorchrl/TorchPendulum-v1")
    env.reset(seed=1)
    result = env.step(torch.zeros(NUM_ENVS, 1, requires_grad=True))
    assert not any(tensor.requires_grad for tensor in [*tensors_in(result), env.state])


@pytest.mark.compiled
@pytest.mark.parametrize("env_id", IDS)
def test_a_step_without_its_random_numbers_compiles_as_a_whole(env_id, monkeypatch):
    compile_whole, made = torch.compile, []

    def compile_eager(function, fullgraph, dynamic, options):
        made.append((fullgraph, dynamic))
        graph = compile_whole(function, fullgraph=fullgraph, dynamic=dynamic, backend="eager")
        return functools.partial(graph)  # without `aot_compile`, because eager kernels cannot be saved
    monkeypatch.setattr(torch, "compile", compile_eager)
    plain, compiled = (build(env_id, max_episode_steps=5, compiled=is_compiled) for is_compiled in (False, True))
    assert_equal(plain.reset(seed=1), compiled.reset(seed=1))
    draws = torch.Generator().manual_seed(1)
    for _ in range(12):
        actions = actions_for(plain, draws)
        assert_equal(plain.step(actions), compiled.step(actions))
    assert set(made) == {(True, False)}


@pytest.mark.compiled
def test_compiled_steps_follow_the_layout_of_actions_and_changed_attributes():
    plain, compiled = (Drift(NUM_ENVS, max_episode_steps=5, compiled=is_compiled) for is_compiled in (False, True))
    assert_equal(plain.reset(seed=1), compiled.reset(seed=1))
    actions = torch.arange(2.0 * NUM_ENVS).view(NUM_ENVS, 2)
    for action in (actions[:, :1], actions[:, :1].contiguous(), actions[:, :1].int(), actions[:, :1].double()):
        assert_equal(plain.step(action), compiled.step(action))
    plain.speed = compiled.speed = 3.0
    assert_equal(plain.step(actions[:, :1]), compiled.step(actions[:, :1]))
    plain.state, compiled.state = torch.ones(NUM_ENVS, 1), torch.ones(NUM_ENVS, 1)
    assert_equal(plain.step(actions[:, :1]), compiled.step(actions[:, :1]))
    copied = pickle.loads(pickle.dumps(compiled))
    expected = copied.step(actions[:, :1])  # changes nothing in the original
    assert_equal(compiled.step(actions[:, :1]), expected)


@pytest.mark.parametrize("device", [GPU])
@pytest.mark.parametrize("env_id", IDS)
def test_steps_on_a_gpu_equal_those_on_the_cpu(env_id, device):
    """The states are made equal before each step, because rounding differs between devices."""
    host, env = build(env_id, max_episode_steps=20), build(env_id, max_episode_steps=20, device=device)
    host.reset(seed=1)
    env.reset(seed=1)
    draws = torch.Generator().manual_seed(1)
    for _ in range(60):
        env.state.copy_(host.state)
        actions, numbers = actions_for(host, draws), torch.rand(NUM_ENVS, host.num_draws, generator=draws)
        assert_equal(host.transition(actions, numbers), env.transition(actions.to(device), numbers.to(device)),
                     rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("device", [GPU])
@pytest.mark.parametrize("env_id", IDS)
def test_a_recorded_step_replays_as_the_step(env_id, device):
    plain, recorded = (build(env_id, max_episode_steps=9, device=device) for _ in range(2))
    actions = torch.zeros_like(actions_for(plain, torch.Generator()))
    recorded.reset(seed=1)
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):  # a recording needs operations that have run before
        recorded.step(actions)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(recorded.generator)
    with torch.cuda.graph(graph, stream=stream):
        result = recorded.step(actions)
    plain.reset(seed=1)
    recorded.reset(seed=1)
    draws = torch.Generator().manual_seed(1)
    for _ in range(40):
        actions.copy_(actions_for(plain, draws))
        graph.replay()
        assert_equal(plain.step(actions), result, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("algorithm", "env_id", "options"), [
    ("ppo", "pytorchrl/TorchAcrobot-v1", {}), ("ppo", "pytorchrl/TorchPointMaze-v0", {"num_envs": 64}),
    ("ppo", "pytorchrl/TorchCartPole-v1", {"num_col_workers": 2, "runtime": "threads"}),
    ("ppo", "pytorchrl/TorchRecall-v0", {"recurrent_net": "gru", "env_kwargs": {"delay": 3}}),
    ("dqn", "pytorchrl/TorchMountainCar-v0", {"start_steps": 100}),
    ("sac", "pytorchrl/TorchPointMaze-v0", {"start_steps": 100, "env_kwargs": {"is_dense": True}}),
    ("sac", "pytorchrl/TorchMountainCarContinuous-v0", {"start_steps": 100, "num_envs": 4})])
def test_agents_train_by_the_id(algorithm, env_id, options, tmp_path):
    options = {"num_envs": 8, "num_steps": 8, "target_steps": 300, "seed": 1, "progress": False} | options
    agent = prl.train(algorithm, env_id, log_dir=tmp_path, **options)
    assert agent.summary["env_steps"] >= 300
    assert agent.summary["updates"] > 0
    assert len(prl.load(tmp_path).evaluate(3, seed=1).returns) == 3


def test_ppo_learns_cartpole():
    agent = prl.train("ppo", "pytorchrl/TorchCartPole-v1", target_steps=50_000, seed=1, progress=False)
    assert agent.evaluate(20).return_mean >= 400


@pytest.mark.parametrize("options", [{"backend": "sync"}, {"backend": "async"}, {"frame_stack": 2}])
def test_options_that_need_single_environments_are_refused(options):
    with pytest.raises(ConfigError, match="only builds a vector environment"):
        VecEnv.create_factory(IDS[0], vec_env_size=4, **options)


def test_the_mode_of_resets_may_be_named():
    assert VecEnv.create_factory(IDS[0], vec_env_size=4, autoreset="same_step").num_envs == 4
    with pytest.raises(ConfigError, match="autoreset='next_step'"):
        VecEnv.create_factory(IDS[0], vec_env_size=4, autoreset="next_step")
