"""Check that networks with memory compute the same as one graph as without, and how many operations they launch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from pytorchrl import (
    A2C,
    APPO,
    IMPALA,
    PPO,
    R2D2,
    SAC,
    GAEBuffer,
    OffPolicyActor,
    OnPolicyActor,
    QActor,
    RolloutSequenceBuffer,
    Scheme,
    SequenceBuffer,
    VecEnv,
    VTraceBuffer,
)
from pytorchrl.agent.algorithms.precision import BatchShape
from pytorchrl.agent.storages import UniformSequenceBuffer
from pytorchrl.envs.testing import CountingEnv
from pytorchrl.errors import ConfigError

pytestmark = pytest.mark.gpu

GPU = "cuda:0"
ON_POLICY = {"ppo": (PPO, GAEBuffer, {"num_epochs": 2, "num_mini_batch": 2}), "a2c": (A2C, GAEBuffer, {}),
             "impala": (IMPALA, VTraceBuffer, {}), "appo": (APPO, VTraceBuffer, {"num_mini_batch": 2})}


class MaskEnv(CountingEnv):
    """Environment that forbids action 1 at every third step, and whose episodes have different lengths."""

    num_episodes = 0

    def reset(self, **kwargs):
        self.num_episodes += 1
        return super().reset(**kwargs)[0], self.mask()

    def step(self, action):
        obs, reward, terminated, truncated, _ = super().step(action)
        return obs, reward, terminated or self._t % (5 + self.num_episodes % 4) == 0, truncated, self.mask()

    def mask(self):
        return {"action_mask": np.array([1, self._t % 3 != 0], np.int8)}


def agent_of(name, *, is_compiled, net="gru", env="CartPole-v1", mixed=False, **actor):
    """Return the factories of a small agent with memory."""
    envs = VecEnv.create_factory(env, vec_env_size=4)
    options = {"compile": is_compiled, "mixed_precision": mixed}
    actor = {"hidden_sizes": (8,), "recurrent_net": net, "recurrent_size": 8} | actor
    if name.startswith("r2d2"):
        storage = RolloutSequenceBuffer.create_factory(size=400, rollout_size=12) if name == "r2d2 of rollouts" \
            else SequenceBuffer.create_factory(size=400, rollout_size=10, length=10, burn_in=3, period=5)
        return (R2D2.create_factory(start_steps=60, mini_batch_size=4, target_update_interval=4, **options),
                QActor.create_factory(envs.observation_space, envs.action_space, **actor), storage, envs)
    if name == "sac":
        return (SAC.create_factory(start_steps=60, mini_batch_size=4, update_every=20, num_updates=1, **options),
                OffPolicyActor.create_factory(envs.observation_space, envs.action_space, **actor),
                UniformSequenceBuffer.create_factory(400, rollout_size=10, length=10, burn_in=3, period=5, n_step=2),
                envs)
    algorithm, storage, own = ON_POLICY[name]
    actor_factory = OnPolicyActor.create_factory(envs.observation_space, envs.action_space, **actor)
    return algorithm.create_factory(**own, **options), actor_factory, storage.create_factory(32), envs


def weights_of_run(agent):
    """Return the weights after some updates, and after as many updates with an interruption."""
    found = []
    for interruptions in ((), (7,)):
        scheme = Scheme(*agent, runtime="simulated", seed=1, device=GPU)
        for end in (*interruptions, 14):
            while scheme.version < end:
                scheme.step()
            weights, checkpoint = scheme.acting_state(), scheme.checkpoint()
            scheme.stop()
            scheme = Scheme(*agent, runtime="simulated", seed=1, device=GPU)
            scheme.resume(checkpoint)
        scheme.stop()
        found += [{f"{name} {interruptions}": leaf.cpu() for name, leaf in weights.items()}]
    return found[0] | found[1]


AGENTS = [
    ("ppo", {}), ("ppo", {"net": "lstm", "shared_policy_value_network": False}), ("ppo", {"mixed": True}),
    ("ppo", {"env": MaskEnv}), ("ppo", {"normalize_obs": True, "normalize_reward": True}), ("a2c", {"net": "lstm"}),
    ("impala", {}), ("appo", {}), ("r2d2", {"net": "lstm"}), ("r2d2", {"noisy": True, "dueling": True}),
    ("r2d2", {"prev_action_reward": True}), ("r2d2", {"env": MaskEnv}), ("r2d2", {"mixed": True}),
    ("r2d2 of rollouts", {}), ("sac", {"env": "Pendulum-v1"}), ("sac", {"net": "lstm", "env": MaskEnv}),
    ("sac", {"env": "Pendulum-v1", "mixed": True})]


@pytest.mark.parametrize(("name", "options"), AGENTS, ids=str)
def test_graphs_of_memory_compute_the_same(recordings, caplog, name, options):
    """Check the weights of runs with episodes that end within sequences, one run of which is resumed."""
    expected, found = (weights_of_run(agent_of(name, is_compiled=flag, **options)) for flag in (False, True))
    # Algorithms of replay have no graphs for actions, and PPO none for actions with masks
    assert len(recordings) == 3 * (1 if name.startswith(("r2d2", "sac")) or "env" in options else 2)
    assert "could not be recorded" not in caplog.text
    is_exact = torch.cuda.get_device_name() == "emulated GPU"
    for leaf, values in expected.items():
        torch.testing.assert_close(found[leaf], values, rtol=0 if is_exact else 1e-4, atol=0 if is_exact else 1e-6)


def test_only_the_workers_that_compute_gradients_need_a_gpu(recordings):
    """Check a learner and actors on the CPU, whose algorithms have the same options."""
    scheme = Scheme(*agent_of("ppo", is_compiled=True), runtime="simulated", seed=1, device="cpu", num_grad_workers=2,
                    grad_device=GPU, num_col_workers=2, col_device="cpu")
    while scheme.version < 12:
        scheme.step()
    scheme.stop()
    assert len(recordings) == 2
    with pytest.raises(ConfigError, match="compute gradients on a GPU"):
        Scheme(*agent_of("ppo", is_compiled=True), device=GPU, num_grad_workers=2, grad_device="cpu")


class Launches(TorchDispatchMode):
    """Counts the operations that Python launches; the replay of a graph is one."""

    num = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.num += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["ppo", "r2d2"])
def test_a_graph_of_memory_is_launched_as_a_whole(monkeypatch, name):
    """Check that a gradient of sequences of 20 steps launches few operations, instead of dozens for each step."""
    replay = torch.cuda.CUDAGraph.replay

    def replay_as_one(graph):
        counted.num += 1
        with _disable_current_modes():
            replay(graph)
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", replay_as_one)
    found = []
    for is_compiled in (False, True):
        algorithm_factory, actor_factory, _, _ = agent_of(name, is_compiled=is_compiled)
        algorithm = algorithm_factory(actor=actor_factory(device=GPU, seed=0), device=GPU, seed=0)
        batch = algorithm.example_batch(BatchShape(4, 20))
        batch = type(batch)(**{name: copied(getattr(batch, name)) for name in batch.__slots__})
        for _ in range(6):
            with Launches() as counted:
                algorithm.compute_gradients(batch)
        found.append(counted.num)
    assert found[0] > 1000
    assert found[1] < 60


def copied(value):
    """Return tensors with memory of their own for each number, as storages provide them."""
    if isinstance(value, dict):
        return {name: leaf.contiguous() for name, leaf in value.items()}
    return value.contiguous() if isinstance(value, torch.Tensor) else value


