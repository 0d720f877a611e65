"""Check the settings of a whole scheme, and what it returns: settings, metrics, episodes, parameters and a saved model.
"""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pytorchrl import A2C, ASYNC, SYNC, OnPolicyActor, VecEnv, linear
from pytorchrl.envs.testing import CountingEnv
from pytorchrl.scheme.options.settings import known_keywords
from pytorchrl.scheme.scheme import _stop


def _parameters_after(scheme, num_updates):
    for _ in range(num_updates):
        scheme.step()
    return scheme.acting_state()["all"]


@pytest.mark.parametrize("num_col_workers", [1, 2])
def test_num_threads(make_scheme, num_col_workers):
    seen = set()

    class ThreadsSeen(CountingEnv):
        def step(self, action):
            seen.add(torch.get_num_threads())
            return super().step(action)
    scheme = make_scheme(ThreadsSeen, num_threads=2, num_col_workers=num_col_workers)
    seen.clear()  # discard the number of threads that the probe used
    scheme.step()
    assert seen == {2}
    assert torch.get_num_threads() == 2
    scheme.stop()
    assert torch.get_num_threads() == 1


def test_device_reaches_actor_and_algorithm(make_scheme, monkeypatch):
    """Check that every actor receives the device; on a machine with one device, nothing else can be checked."""
    seen = []

    class Watched(OnPolicyActor):
        def __init__(self, options, *, device, seed):
            seen.append(device)
            super().__init__(options, device=device, seed=seed)
    envs = VecEnv.create_factory(CountingEnv)
    actor = Watched.create_factory(envs.observation_space, envs.action_space)
    make_scheme(envs=envs, actor=actor, device="cpu").start()
    assert [str(device) for device in seen] == ["cpu"]
    seen.clear()
    make_scheme(envs=envs, actor=actor, device="cpu", num_col_workers=2).start()
    assert [str(device) for device in seen] == ["cpu"] * 3


def test_seed(make_scheme):
    drawn = {make_scheme(seed=None).seed for _ in range(3)}
    assert len(drawn) == 3
    assert all(isinstance(seed, int) for seed in drawn)
    scheme = make_scheme(seed=5)
    assert scheme.seed == scheme.settings["seed"] == 5
    again = make_scheme(seed=make_scheme(seed=None).seed)
    assert torch.equal(_parameters_after(make_scheme(seed=again.seed), 2), _parameters_after(again, 2))


def test_workers_run_on_the_given_runtime(make_scheme):
    """Check the names of workers with `runtime="threads"`; the integration tests check Ray."""
    scheme = make_scheme(num_col_workers=2, runtime="threads")
    scheme.start()
    names = {thread.name for thread in threading.enumerate()}
    assert {"GWorker 0/CWorker 1", "GWorker 0/CWorker 2"} <= names
    assert scheme.settings["runtime"] == "threads"


def test_settings_are_complete_and_json(make_scheme):
    scheme = make_scheme(num_col_workers=2, col_communication=ASYNC, queue_size=3)
    settings = json.loads(json.dumps(scheme.settings))
    options = set(known_keywords())
    assert set(settings) == options
    assert settings["col_communication"] == "asynchronous"
    assert settings["grad_communication"] == SYNC == "synchronous"
    text = str(scheme)
    assert all(f"{name}=" in text for name in options)
    assert "queue_size=3" in text
    assert "  algorithm    PPO(" in text


def test_metrics_are_json_and_count(make_scheme):
    scheme = make_scheme(num_col_workers=2)
    for _ in range(4):
        scheme.step()
    metrics = json.loads(json.dumps(scheme.metrics()))
    assert metrics["updates"] == metrics["grads_received"] == scheme.version == 4
    assert metrics["rollouts"] == 2  # the four updates (2 epochs x 2 batches) use one round of two rollouts
    assert set(metrics["policy_lag"]) == {"mean", "max", "p50", "p90"}
    assert set(metrics["time_s"]) == {"collection", "gradients", "update"}
    assert scheme.env_steps == scheme.ledger()["collected"] == 2 * 2 * 8
    json.dumps(scheme.stop())


def test_episodes_are_returned_once(make_scheme):
    scheme = make_scheme(CountingEnv, {"episode_length": 4}, num_envs=2, size=8)
    scheme.step()
    episodes = scheme.episodes()
    assert len(episodes) == 4
    assert {episode.length for episode in episodes} == {4}
    assert sorted(episode.env_return for episode in episodes) == [10, 10, 26, 26]
    assert scheme.episodes() == []


@pytest.mark.parametrize("settings", [
    {}, {"num_col_workers": 2}, {"num_grad_workers": 2}, {"num_grad_workers": 2, "distribute_gradients": True},
    {"num_grad_workers": 2, "grad_communication": ASYNC}, {"grad_communication": ASYNC}],
    ids=["central", "collectors", "gradients", "decentralized", "asynchronous", "thread"])
def test_update_algorithm_parameter_reaches_every_worker(make_scheme, settings):
    scheme = make_scheme(algo=A2C.create_factory(lr=1e-3), **settings)
    scheme.step()
    with pytest.raises(KeyError, match="lr"):
        scheme.update_algorithm_parameter("typo", 1)
    scheme.update_algorithm_parameter("entropy_coef", 0.25)
    scheme.update_algorithm_parameter("lr", 0.0)
    for _ in range(6):
        scheme.step()
    before = scheme.acting_state()["all"]
    scheme.step()
    assert torch.equal(scheme.acting_state()["all"], before)  # parameters do not change if lr is 0
    algorithms = [handle.native.worker.algo for handle in scheme.update_worker.remote_workers]
    # An asynchronous worker receives the new value with its next request, which a busy machine may delay by many
    # updates.
    for _ in range(5000):
        if all(algo.parameters["entropy_coef"] == 0.25
               for algo in algorithms) or settings.get("grad_communication") is not ASYNC:
            break
        scheme.step()
    assert [algo.parameters["entropy_coef"] for algo in algorithms] == [0.25] * len(algorithms)


def test_schedules_follow_collected_steps(make_scheme):
    scheme = make_scheme(algo=A2C.create_factory(lr=linear(1e-2, 0.0)), num_envs=2, size=8)
    scheme.start(160)
    rates = [scheme.step()["lr"] for _ in range(12)]
    np.testing.assert_allclose(rates, [1e-2 * max(0.0, 1 - 16 * n / 160) for n in range(12)])


@pytest.mark.filterwarnings("ignore:queue_size=16 lets rollouts wait")
def test_schedules_follow_used_steps_and_not_queued_ones(make_scheme):
    """Check the learning rates if collection is far ahead of a slow learner.

    Each train batch is a rollout of 16 steps.
    """
    scheme = make_scheme(algo=A2C.create_factory(lr=linear(1e-2, 0.0)), num_envs=2, size=8, num_col_workers=2,
                         col_communication=ASYNC, queue_size=16,
                         runtime="simulated", costs={"grad": 1.0})
    scheme.start(160)
    rates = [scheme.step()["lr"] for _ in range(8)]
    np.testing.assert_allclose(rates, [1e-2 * (1 - 16 * n / 160) for n in range(8)])
    assert scheme.ledger()["collected"] > 2 * 8 * 16


def test_save_model(make_scheme, tmp_path):
    scheme = make_scheme()
    for _ in range(3):
        scheme.step()
    path = scheme.save_model(str(tmp_path / "model.pt"))
    saved = torch.load(path, weights_only=True)
    assert saved["version"] == 3
    assert torch.equal(saved["acting_state"]["all"], scheme.acting_state()["all"])


def test_an_error_in_the_end_of_a_dropped_scheme_is_logged_and_its_runtime_is_closed(caplog):
    closed = []

    def stop():
        raise RuntimeError("a rank is gone")
    _stop(SimpleNamespace(stop=stop), SimpleNamespace(close=lambda: closed.append(True)))
    assert "could not be stopped in order" in caplog.text
    assert "a rank is gone" in caplog.text
    assert closed == [True]
