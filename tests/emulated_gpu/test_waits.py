"""Check how often updates and actions wait for a GPU, and how many operations they launch.

On the CPU, the same tests check that no update or action reads a single number of a tensor, which would wait on a GPU.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from pytorchrl import Scheme
from pytorchrl.agent.data import map_tensors
from pytorchrl.agent.schedules import linear
from pytorchrl.training.composition import compose
from tests.emulated_gpu.waits import Waits
from tests.unit.scheme.test_gpu import GPU, OFF_POLICY, ON_POLICY, agent_of

ON_GPU = pytest.mark.gpu
NAMES = [*ON_POLICY, *OFF_POLICY]
NUM_ENVS = 4
# Largest number of launched operations: of an update, of a compiled update, of an action. It was 10 to 20 % less with
# torch 2.13. On the emulated GPU, the recorded kernels of a compiled update are one operation.
LAUNCHED = {"ppo": (140, 20, 20), "a2c": (100, 20, 20), "impala": (100, 20, 20), "appo": (190, 20, 20),
            "dqn": (52, 18, 16), "r2d2": (1000, None, 34), "sac": (220, 30, 23), "ddpg": (120, 24, 21),
            "td3": (125, 25, 21), "c51": (85, 18, 20), "tqc": (235, 30, 23)}
# Largest number of operations that acting, a step of TorchCartPole, and storing it launch.
LAUNCHED_IN_A_STEP = {False: (9, 50, 4), True: (6, 2, 4)}
_batches = {}


def batch_of(name):
    """Return a batch of the algorithm, collected on the CPU."""
    if name not in _batches:
        scheme = Scheme(*agent_of(name), runtime="simulated", seed=1)
        while scheme.version < 2:
            scheme.step()
        worker = scheme.update_worker.local_worker
        worker.get_data()
        _batches[name] = worker.batch
        scheme.stop()
    return _batches[name]


def parts_of(name, device, **options):
    """Return functions that make one update and choose actions, after both have been done a few times."""
    factory, actor_factory, _, envs = agent_of(name)
    if name not in ON_POLICY:
        options["start_steps"] = 0
    if options.get("compile") and name == "appo":
        options["target_network"] = False
    factory = dataclasses.replace(factory, options=dataclasses.replace(factory.options, **options))
    actor = actor_factory(device=device, seed=0)
    algorithm = factory(device=device, actor=actor, seed=0)
    algorithm.applies_at_once = True
    algorithm._small_policy = algorithm._small = algorithm._small_network = None  # act with torch on the CPU, too
    batch = map_tensors(batch_of(name), lambda leaf: leaf.to(device))
    obs = {"obs": np.random.default_rng(0).standard_normal(
        (NUM_ENVS, *envs.observation_space["obs"].shape)).astype(np.float32)}
    rhs = {key: state.cpu().numpy() for key, state in actor.initial_states(NUM_ENVS).items()} \
        if hasattr(actor, "initial_states") else {}
    steps = iter(range(1, 1000))

    def update():
        algorithm.follow_schedules(next(steps), 1000)
        gradients, _ = algorithm.compute_gradients(batch)
        algorithm.norms_of(gradients)  # as in the check for gradients that are not finite
        algorithm.apply_gradients()

    def act():
        algorithm.acting_step(obs, rhs, np.zeros(NUM_ENVS, bool))
    for _ in range(8):  # the kernels of a graph are recorded in its fourth call, and TD3 has two graphs
        update()
        act()
    return update, act


def counted(function, device):
    with Waits(torch.device(device).type) as waits:
        function()
    return waits


@pytest.mark.parametrize(("device", "name", "is_compiled"), [
    *[("cpu", name, False) for name in NAMES],
    *[pytest.param(GPU, name, is_compiled, marks=ON_GPU) for name in NAMES for is_compiled in (False, True)
      if not (is_compiled and name == "r2d2")]])
def test_an_update_and_an_action_wait_once(device, name, is_compiled):
    """Check numbers of waits, and that numbers of operations did not grow: a GPU needs microseconds for each."""
    update, act = parts_of(name, device, **({"compile": True} if is_compiled else {}))
    num_waits = 0 if device == "cpu" else 1
    largest = LAUNCHED[name]
    for _ in range(2):  # TD3 updates its policy in every second update
        found = counted(update, device)
        assert (found.reads, found.writes) == (num_waits, 0), found.names
        assert found.launched <= largest[is_compiled], found.names
    if device == "cpu" and name in ("dqn", "c51", "r2d2"):
        return  # on the CPU, they look whether an environment explores at all
    found = counted(act, device)
    assert (found.reads, found.writes) == (num_waits, 0), found.names
    assert found.launched <= largest[2], found.names


@pytest.mark.parametrize("device", [pytest.param(GPU, marks=ON_GPU)])
@pytest.mark.parametrize("epsilon", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("name", ["dqn", "r2d2"])
def test_exploration_does_not_wait(device, name, epsilon):
    _, act = parts_of(name, device, **({"initial_epsilon": epsilon, "final_epsilon": epsilon} if name == "dqn" else {}))
    for _ in range(8):
        found = counted(act, device)
        assert (found.reads, found.writes) == (1, 0), found.names


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("option", ["lr", "entropy_coef", "clip_param"])
@pytest.mark.parametrize("device", [pytest.param(GPU, marks=ON_GPU)])
def test_schedules_do_not_wait(device, option, is_compiled):
    update, _ = parts_of("ppo", device, compile=is_compiled, **{option: linear(0.1, 0.01)})
    found = counted(update, device)
    assert (found.reads, found.writes) == (1, 0), found.names
    assert found.launched <= LAUNCHED["ppo"][is_compiled] + (option != "lr"), found.names  # one copies the new value


@pytest.mark.parametrize("name", ["ppo", "impala", "sac", "dqn"])
@pytest.mark.parametrize("device", [pytest.param(GPU, marks=ON_GPU)])
def test_no_copy_to_the_gpu_waits_in_a_run(device, name):
    with Waits() as waits:
        scheme = Scheme(*agent_of(name), runtime="simulated", seed=1, device=device)
        while scheme.version < 4:
            scheme.step()
        waits.names.clear()
        while scheme.version < 8:
            scheme.step()
        scheme.stop()
    assert waits.writes == 0, waits.names


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("device", [pytest.param(GPU, marks=ON_GPU)])
def test_a_step_of_a_collector_launches_few_operations(device, is_compiled):
    agent, settings, _ = compose("ppo", "pytorchrl/TorchCartPole-v1", {
        "env_kwargs": {"device": device}, "num_envs": NUM_ENVS, "num_steps": 16, "target_steps": 10_000,
        "compile": is_compiled, "device": device, "normalize_obs": False, "normalize_reward": False})
    scheme = Scheme(agent.algo_factory, agent.actor_factory, agent.storage_factory, agent.train_envs_factory,
                    **settings, runtime="simulated", seed=1)
    while scheme.version < 2:
        scheme.step()
    worker = scheme.update_worker.local_worker.local_worker

    def waits_of_a_step():
        row, step = worker.storage.current()[:3], []
        acting = worker._choose(*row)
        return [counted(lambda: worker._choose(*row), device),
                counted(lambda: step.append(worker.envs.step(acting.clipped_action)), device),
                counted(lambda: worker.storage.insert_transition(acting, *step), device)]
    with torch.no_grad():
        waits_of_a_step()  # which also begins a rollout
        waits = waits_of_a_step()
    scheme.stop()
    for found, largest in zip(waits, LAUNCHED_IN_A_STEP[is_compiled], strict=True):
        assert (found.reads, found.writes) == (0, 0), found.names
        assert found.launched <= largest, found.names
