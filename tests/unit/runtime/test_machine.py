"""Tests that workers which need more memory than the machine has are refused before Ray starts.

The error states both the needed and the available memory.
"""

from __future__ import annotations

import os
import sys

import pytest

from pytorchrl import ASYNC, DQN, PPO, GAEBuffer, OnPolicyActor, QActor, ReplayBuffer, Scheme, VecEnv
from pytorchrl.cli import main
from pytorchrl.errors import InsufficientResourcesError, StartError
from pytorchrl.runtime import CPU_RESOURCES
from pytorchrl.support.cores import usable_cores
from pytorchrl.runtime.machine import WORKER_BYTES, Machine, check_machine, this_machine
from pytorchrl.runtime.ray.runtime import RayRuntime

ROOM_FOR_TEN = Machine(num_cpus=2, num_gpus=0, memory_bytes=10 * WORKER_BYTES + 1)


def requests(num_grad, num_col, num_replay_workers):
    return [("gradient workers", num_grad, CPU_RESOURCES), ("collection workers", num_col, CPU_RESOURCES),
            ("replay shards", num_replay_workers, {"num_cpus": 0})]


@pytest.mark.parametrize("counts", [(0, 0, 0), (0, 10, 0), (2, 8, 0), (2, 4, 4), (0, 0, 10)])
def test_workers_that_fit_into_memory_are_allowed_with_few_cores(counts):
    check_machine(requests(*counts), ROOM_FOR_TEN)


@pytest.mark.parametrize(("counts", "wanted"), [
    ((0, 11, 0), "11 collection workers were"), ((11, 0, 0), "11 gradient workers were"),
    ((3, 6, 2), "3 gradient workers and 6 collection workers and 2 replay shards were")])
def test_workers_of_all_kinds_count_together(counts, wanted):
    with pytest.raises(InsufficientResourcesError) as caught:
        check_machine(requests(*counts), ROOM_FOR_TEN)
    text = str(caught.value)
    assert text.startswith(f"{wanted} requested, each a process of 180 MB or more, together 2 GB; "
                           "this machine has 1.8 GB of memory, enough for 10, and 2 CPU cores; use fewer "
                           "workers")
    assert "address of a cluster" in text
    check_machine(requests(*(min(count, 3) for count in counts)), ROOM_FOR_TEN)


@pytest.fixture
def no_ray(monkeypatch):
    """Make any import of Ray fail, unset the address of the cluster, and fake the resources of this machine."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    # Connecting to a cluster may change environment variables, so the test uses a copy of them.
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr("pytorchrl.runtime.ray.runtime.this_machine", lambda: ROOM_FOR_TEN)
    monkeypatch.setattr(RayRuntime, "_starts_a_local_ray", lambda self: self.options.address is None)


def on_policy_agent():
    envs = VecEnv.create_factory("CartPole-v1", vec_env_size=1)
    return PPO.create_factory(), OnPolicyActor.create_factory(envs.observation_space,
                                                              envs.action_space), GAEBuffer.create_factory(8), envs


def replay_agent():
    envs = VecEnv.create_factory("CartPole-v1", vec_env_size=1)
    return DQN.create_factory(), QActor.create_factory(envs.observation_space,
                                                       envs.action_space), ReplayBuffer.create_factory(100_000), envs


@pytest.mark.parametrize(("agent", "settings", "wanted"), [
    (on_policy_agent, {"num_col_workers": 500}, "500 collection workers were"),
    (on_policy_agent, {"num_col_workers": 500, "col_worker_resources": {"num_cpus": 0.001}},
     "500 collection workers were"),
    (on_policy_agent, {"num_col_workers": 4, "num_grad_workers": 3},
     "3 gradient workers and 12 collection workers were"),
    (replay_agent, {"num_col_workers": 6, "num_replay_workers": 6, "col_communication": ASYNC},
     "6 collection workers and 6 replay shards were"),
])
def test_a_scheme_refuses_too_many_workers_before_ray_starts(no_ray, agent, settings, wanted):
    scheme = Scheme(*agent(), seed=1, **settings)
    with pytest.raises(InsufficientResourcesError, match=wanted):
        scheme.start()
    scheme.stop()


def test_memory_of_a_cluster_is_checked_only_after_connecting(no_ray):
    scheme = Scheme(*on_policy_agent(), seed=1, num_col_workers=500, address="10.255.255.1:6379")
    with pytest.raises(StartError, match="needs Ray"):  # only Ray knows the memory of the cluster
        scheme.start()
    scheme.stop()


def test_the_memory_check_ignores_workers_that_are_threads(no_ray):
    scheme = Scheme(*on_policy_agent(), seed=1, num_col_workers=11, runtime="threads")
    scheme.step()
    scheme.stop()


def test_the_command_line_refuses_too_many_workers_without_a_traceback(no_ray, capsys, tmp_path):
    code = main(["train", "ppo", "--env", "CartPole-v1", "--num-col-workers", "500", "--log-dir", str(tmp_path / "run"),
                 "--no-progress"])
    captured = capsys.readouterr()
    assert (code, captured.out) == (2, "")
    assert captured.err.startswith("pytorchrl: error: 500 collection workers were requested")
    assert len(captured.err.splitlines()) == 1
    assert not (tmp_path / "run" / "run.json").exists()


def test_the_limit_of_a_container_counts(tmp_path):
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    none, unlimited, small, large = (tmp_path / name for name in ("none", "unlimited", "small", "large"))
    unlimited.write_text("max\n")
    small.write_text("4096000000\n")
    large.write_text(f"{2**62}\n")
    assert this_machine([]).memory_bytes == this_machine([str(none), str(unlimited),
                                                          str(large)]).memory_bytes == physical
    assert this_machine([str(none), str(small)]).memory_bytes == min(physical, 4_096_000_000)
    assert 1 <= this_machine().num_cpus == usable_cores() <= os.cpu_count()
