"""Tests of `train(..., dataset=...)` and of the command line: runs that learn from a data set are runs like others."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import pytorchrl as prl
from pytorchrl.cli import main
from pytorchrl.envs.testing import MatchingGame
from pytorchrl.errors import ConfigError
from pytorchrl.play.dataset import read_dataset, record_dataset

TINY = {"hidden_sizes": (8,), "progress": False, "tensorboard": False, "seed": 3}


@pytest.fixture(scope="module")
def cartpole(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "cartpole.npz"
    agent = prl.train("ppo", "CartPole-v1", target_steps=64, num_envs=2, num_steps=32, **TINY)
    record_dataset(agent, path, num_episodes=4, deterministic=False)
    return path


@pytest.fixture(scope="module")
def pendulum(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "pendulum.npz"
    agent = prl.train("sac", "Pendulum-v1", target_steps=0, **TINY)
    record_dataset(agent, path, num_episodes=2, deterministic=False)
    return path


def test_a_run_from_a_data_set_has_the_files_of_a_run(cartpole, tmp_path):
    agent = prl.train("bc", "CartPole-v1", dataset=cartpole, target_steps=20, log_dir=tmp_path / "run", log_every=5,
                      eval_every=10, eval_episodes=2, checkpoint_every=10, **TINY)
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["updates"] for record in records] == [record["env_steps"] for record in records]
    assert records[-1]["env_steps"] == agent.summary["updates"] == 20
    assert records[0]["algorithm"]["loss_all"] == pytest.approx(np.log(2), abs=0.05)
    assert records[-1]["evaluation"]["episodes"] == 2
    assert agent.summary["ledger"]["collected"] == 0
    assert agent.summary["findings"] == []
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step*")) == [
        "step-000000000010.pt", "step-000000000020.pt"]
    loaded = prl.load(tmp_path / "run")
    assert loaded.evaluate(3, seed=1).returns == agent.evaluate(3, seed=1).returns
    assert loaded.act(np.zeros(4, np.float32)) in (0, 1)
    assert "20 updates" in str(agent)
    assert agent.agent.storage_factory.options.size == len(read_dataset(cartpole).rewards)


def test_a_run_continues_after_its_end_and_without_its_data_set(cartpole, tmp_path):
    path = tmp_path / "copy.npz"
    path.write_bytes(cartpole.read_bytes())
    options = {**TINY, "dataset": path, "log_dir": tmp_path / "run", "checkpoint_every": 10}
    agent = prl.train("bc", "CartPole-v1", target_steps=10, **options)
    whole = prl.train("bc", "CartPole-v1", target_steps=20, **{**options, "log_dir": tmp_path / "whole"})
    assert agent.train(10).summary["updates"] == 20
    assert all(torch.equal(agent.acting_state[name], value) for name, value in whole.acting_state.items())
    path.unlink()
    assert prl.load(tmp_path / "run").evaluate(1).returns


@pytest.mark.parametrize(("algorithm", "options"), [
    ("bc", {}), ("iql", {}), ("iql", {"prioritized": True}), ("td3", {}), ("td3_bc", {}), ("ddpg", {"bc_alpha": 1.0}),
    ("sac", {"n_step": 3}), ("redq", {"num_critics": 3}), ("iql", {"num_grad_workers": 2, "runtime": "simulated"})])
def test_replay_algorithms_learn_from_a_data_set_without_warnings(algorithm, options, pendulum, recwarn):
    agent = prl.train(algorithm, "Pendulum-v1", dataset=pendulum, target_steps=6, mini_batch_size=16, **TINY, **options)
    assert agent.summary["updates"] == 6
    assert len(agent.evaluate(1).returns) == 1
    assert [str(warning.message) for warning in recwarn] == []


def test_a_loaded_policy_normalizes_with_the_moments_of_the_data_set(pendulum, tmp_path):
    agent = prl.train("td3_bc", "Pendulum-v1", dataset=pendulum, target_steps=4, log_dir=tmp_path / "run", **TINY)
    loaded, obs = prl.load(tmp_path / "run"), read_dataset(pendulum).observations["obs"]
    mean, m2 = (loaded.acting_state[f"obs_moments.0.{name}"].numpy() for name in ("mean", "m2"))
    np.testing.assert_allclose(mean, obs.mean(0), rtol=1e-5)
    np.testing.assert_allclose(m2 / len(obs), obs.astype(np.float64).var(0), rtol=1e-5)
    assert loaded.evaluate(2, seed=1).returns == agent.evaluate(2, seed=1).returns


@pytest.mark.parametrize("algorithm", ["bc", "iql", "dqn", "sac"])
def test_algorithms_of_discrete_actions_learn_from_a_data_set(algorithm, cartpole):
    agent = prl.train(algorithm, "CartPole-v1", dataset=cartpole, target_steps=6, mini_batch_size=16, **TINY)
    assert agent.summary["updates"] == 6


def test_a_data_set_of_minari_gives_the_same_agent(tmp_path, monkeypatch):
    pytest.importorskip("h5py")
    pytest.importorskip("minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    agent = prl.train("ppo", "CartPole-v1", target_steps=64, num_envs=2, num_steps=32, **TINY)
    for name in (str(tmp_path / "data.npz"), "tests/data-v0"):
        record_dataset(agent, name, num_episodes=2, seed=7)
    one, other = (prl.train("bc", "CartPole-v1", dataset=name, target_steps=6, **TINY)
                  for name in (tmp_path / "data.npz", "tests/data-v0"))
    assert all(torch.equal(value, other.acting_state[name]) for name, value in one.acting_state.items())


def test_ppo_continues_from_a_cloned_policy(cartpole, tmp_path):
    """Check that an on-policy actor loads the model of BC: its first policy is the cloned one."""
    cloned = prl.train("bc", "CartPole-v1", dataset=cartpole, target_steps=30, log_dir=tmp_path / "run", **TINY)
    ppo = prl.train("ppo", "CartPole-v1", target_steps=0, checkpoint=str(tmp_path / "run" / "model.pt"), **TINY)
    assert ppo.evaluate(3, seed=5).returns == cloned.evaluate(3, seed=5).returns


def test_options_without_an_effect_are_refused(cartpole):
    for options, text in (({"num_envs": 4}, "num_envs would have no effect"),
                          ({"num_steps": 8}, "num_steps would have no effect"),
                          ({"replay_size": 5}, "size 5 is less than the"),
                          ({"num_col_workers": 2}, "num_col_workers would have no effect"),
                          ({"update_every": 2}, "update_every would have no effect")):
        with pytest.raises(ConfigError, match=text):
            prl.train("dqn", "CartPole-v1", dataset=cartpole, **TINY, **options)
    with pytest.raises(ConfigError, match="BC learns from a data set, but there is none"):
        prl.train("bc", "CartPole-v1", **TINY)
    with pytest.raises(ConfigError, match=r"the shape \(4,\) and the dtype float32, but the environment has Box"):
        prl.train("sac", "Pendulum-v1", dataset=cartpole, **TINY)


def test_what_errors_of_train_ask_for_works(cartpole):
    with pytest.raises(ConfigError, match="num_envs would have no effect"):
        prl.train("dqn", "CartPole-v1", dataset=cartpole, num_envs=4, target_steps=0, **TINY)
    assert prl.train("dqn", "CartPole-v1", dataset=cartpole, target_steps=0, **TINY)
    with pytest.raises(ConfigError, match="there are several policies; leave dataset out"):
        prl.train("dqn", MatchingGame, policies="shared", dataset=cartpole, target_steps=0, **TINY)
    assert prl.train("dqn", MatchingGame, policies="shared", target_steps=0, **TINY)


def test_the_command_line_trains_from_a_data_set(cartpole, tmp_path, capsys):
    arguments = ["train", "bc", "CartPole-v1", "--dataset", str(cartpole), "--target-steps", "8", "--seed", "2",
                 "--hidden-sizes", "8", "--log-dir", str(tmp_path / "run"), "--no-tensorboard"]
    assert main(arguments) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("8 updates in ")
    assert f"8 updates from {cartpole}" in printed.err
    again = ["train", "--config", str(tmp_path / "run" / "run.json"), "--log-dir", str(tmp_path / "again")]
    assert main([*again, "--no-progress", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["updates"] == 8
    one, other = prl.load(tmp_path / "run"), prl.load(tmp_path / "again")
    assert all(torch.equal(value, other.acting_state[name]) for name, value in one.acting_state.items())
    assert main(["train", "bc", "CartPole-v1", "--dataset", str(tmp_path / "none.npz")]) == 2
    assert "No such file" in capsys.readouterr().err
