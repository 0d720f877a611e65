"""Test named variants of algorithms, such as "redq": names, options, help and files of runs."""

from __future__ import annotations

import json

import gymnasium as gym
import numpy as np
import pytest

import pytorchrl
from pytorchrl import SAC
from pytorchrl.agent.algorithms import algorithm
from pytorchrl.agent.algorithms.registry import names, registered, registration_of
from pytorchrl.agent.algorithms.variants import VARIANTS
from pytorchrl.agent.storages import PERBuffer, ReplayBuffer
from pytorchrl.cli import main
from pytorchrl.cli.train import parse
from pytorchrl.errors import ConfigError
from pytorchrl.training.composition import compose, option_specs
from pytorchrl.training.configuration import load_config
from pytorchrl.training.presets import preset
from pytorchrl.training.training import make_learner

TINY = {"target_steps": 40, "start_steps": 30, "mini_batch_size": 4, "hidden_sizes": (4,), "num_critics": 3,
        "num_updates": 2, "progress": False, "seed": 1}


def chosen(name, **options):
    """Return the options of the algorithm and of the actor that `train` builds."""
    agent, *_ = compose(name, "Pendulum-v1", options)
    return {**vars(agent.algo_factory.options), **vars(agent.actor_factory.options)}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_is_an_algorithm_with_options(name):
    variant = VARIANTS[name]
    assert name not in registered()
    assert variant.options.keys() <= option_specs(variant.algorithm).keys()
    found = registration_of(name)
    base = registration_of(variant.algorithm)
    assert (found.algorithm, found.actor, found.storage, found.name) == (
        base.algorithm, base.actor, base.storage, base.name)
    assert (found.label, found.reference, found.options) == (name, name, variant.options)
    assert (base.label, base.options) == (variant.algorithm, {})


def test_options_of_a_variant_override_the_preset_and_those_of_the_user_override_both():
    assert (chosen("sac")["num_updates"], chosen("sac")["hidden_sizes"]) == (1, (64, 64))
    found = chosen("redq")
    assert (found["num_critics"], found["critic_subset"]) == (10, 2)
    assert (found["num_updates"], found["policy_delay"]) == (20, 20)
    assert found["hidden_sizes"] == (64, 64)
    given = chosen("redq", num_updates=5, hidden_sizes=(8,))
    assert (given["num_critics"], given["num_updates"], given["hidden_sizes"]) == (10, 5, (8,))
    with pytest.raises(ConfigError, match=r"critic_subset must be at most the number of critics, num_critics=1, got 2"):
        pytorchrl.train("redq", "Pendulum-v1", num_critics=1)
    with pytest.raises(ConfigError, match="gama"):
        pytorchrl.train("redq", "Pendulum-v1", gama=0.9)


def test_variants_of_dqn_have_the_range_of_returns_of_a_suite():
    def parts(name, **options):
        agent, *_ = compose(name, "CartPole-v1", options)
        return agent.algo_factory.options, agent.actor_factory.options, agent.storage_factory

    def atoms(name, **options):
        actor = parts(name, **options)[1]
        return actor.distribution, actor.num_atoms, actor.v_min, actor.v_max

    assert atoms("c51") == atoms("rainbow") == ("categorical", 101, -100.0, 100.0)
    assert atoms("dqn", distribution="categorical") == atoms("c51")
    assert atoms("c51", v_max=500.0, num_atoms=51) == ("categorical", 51, -100.0, 500.0)
    assert atoms("qrdqn") == atoms("c51", distribution="quantile") == ("quantile", 10, -10.0, 10.0)
    assert atoms("dqn") == (None, None, -10.0, 10.0)
    algorithm, actor, storage = parts("rainbow")
    assert (algorithm.double, actor.dueling, actor.noisy, storage.options.n_step) == (True, True, True, 3)
    assert (storage.cls, algorithm.initial_epsilon, algorithm.final_epsilon) == (PERBuffer, 0.0, 0.0)
    assert [preset("dqn", "atari", registration_of(name).options)["lr"] for name in ("c51", "qrdqn", "rainbow")] == [
        2.5e-4, 5e-5, 6.25e-5]
    assert "v_min" not in preset("dqn", "classic", {})
    assert parts("qrdqn")[0].max_grad_norm is None  # the losses of all quantiles are added


def test_tqc_has_five_quantile_critics():
    found = chosen("tqc")
    assert (found["distribution"], found["num_critics"], found["num_atoms"], found["drop_atoms"]) == (
        "quantile", 5, 25, 2)


def test_the_directory_of_a_run_names_the_variant_and_all_options(tmp_path):
    agent = pytorchrl.train("redq", "Pendulum-v1", log_dir=f"{tmp_path}/", checkpoint_every=20, **TINY)
    assert agent.log_dir.name == "redq-Pendulum-v1-1"
    recipe = json.loads((agent.log_dir / "run.json").read_text())["recipe"]
    assert recipe["algorithm"] == "redq"
    assert recipe["options"].items() >= {"critic_subset": 2, "policy_delay": 20, "num_critics": 3}.items()
    assert "critic_subset" not in recipe["given"]
    assert pytorchrl.load(agent.log_dir).act([0.1, 0.2, 0.3]) == agent.act([0.1, 0.2, 0.3])
    again = pytorchrl.train(**{**load_config(agent.log_dir / "run.json"), "checkpoint_every": None})
    assert all((again.acting_state[name] == tensor).all() for name, tensor in agent.acting_state.items())


@pytest.mark.parametrize("name", ["redq", "droq", "crossq", "tqc", "rainbow", "qrdqn"])
def test_a_run_of_a_variant_resumes_bit_for_bit(name, tmp_path):
    options = {**TINY, "target_steps": 60, "checkpoint_every": 40}
    options |= {"critic_hidden_sizes": (5,)} if name == "crossq" else {}
    env, obs = "Pendulum-v1", [0.1, 0.2, 0.3]
    if VARIANTS[name].algorithm == "dqn":
        env, obs = "CartPole-v1", [0.1, 0.2, 0.3, 0.4]
        del options["num_critics"]
    whole = pytorchrl.train(name, env, log_dir=tmp_path / "whole", **options)
    with make_learner(name, env, log_dir=tmp_path / "parts", **options)[0] as learner:
        while learner.env_steps < 50:
            learner.step()
    resumed = pytorchrl.train(name, env, log_dir=tmp_path / "parts", resume=True, **options)
    assert pytorchrl.load(tmp_path / "parts").act(obs) == whole.act(obs)
    assert all((resumed.acting_state[name] == tensor).all() for name, tensor in whole.acting_state.items())


@pytest.mark.parametrize("settings", [
    {"num_col_workers": 2, "col_communication": "async"}, {"num_grad_workers": 2, "grad_communication": "async"},
    {"num_grad_workers": 2, "distribute_gradients": True},
    {"num_col_workers": 2, "col_communication": "async", "num_replay_workers": 2}], ids=str)
@pytest.mark.parametrize("name", ["c51", "qrdqn", "rainbow", "tqc"])
def test_distributions_train_in_every_kind_of_scheme(name, settings):
    env = "Pendulum-v1" if name == "tqc" else "CartPole-v1"
    agent = pytorchrl.train(name, env, **settings, target_steps=200, start_steps=40, num_steps=4, mini_batch_size=4,
                            update_every=4, num_updates=1, hidden_sizes=(4,), num_atoms=7, seed=1, progress=False,
                            runtime="simulated")
    assert agent.summary["updates"] > 0
    assert all(tensor.isfinite().all() for tensor in agent.acting_state.values())


def test_the_command_line_knows_variants(capsys, tmp_path):
    given = parse("train", "Train", ["redq", "Pendulum-v1", "--num-updates", "3"])
    assert (given.algorithm, given.env, given.num_updates) == ("redq", "Pendulum-v1", 3)
    assert main(["train", "redq", "Pendulum-v1", "--help-all"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "redq (Chen et al. 2021), which is sac with --num-critics 10 --critic- subset 2" in shown
    assert "--critic-subset none|INT" in shown
    assert "all critics [2]" in shown
    file = tmp_path / "run.toml"
    assert main(["train", "redq", "Pendulum-v1", "--dry-run", "--save-config", str(file)]) == 0
    written = file.read_text()
    assert written.startswith('algorithm = "redq"')
    assert "critic_subset = 2" in written
    assert "num_updates = 20" in written


def test_crossq_omits_what_presets_set_for_target_networks():
    atari = preset("sac", "atari")
    assert {"polyak", "target_update_interval"} <= atari.keys()
    assert atari.items() - preset("sac", "atari", VARIANTS["crossq"].options).items() == {
        ("polyak", 0.0), ("target_update_interval", 2000)}
    found = chosen("crossq")
    assert (found["target_networks"], found["critic_norm"], found["adam_beta1"]) == (False, "batch", 0.5)


def test_batch_renormalization_is_refused_where_workers_would_learn_different_moments():
    with pytest.raises(ConfigError, match=r"BatchRenorm in the actor learn moments .* parallel gradient workers"):
        pytorchrl.train("crossq", "Pendulum-v1", num_grad_workers=2, runtime="simulated", **TINY)


@pytest.mark.parametrize("options", [
    {}, {"prioritized": True, "n_step": 3}, {"num_col_workers": 2, "col_communication": "async"},
    {"num_col_workers": 2, "runtime": "threads"},
    {"num_replay_workers": 2, "num_col_workers": 2, "col_communication": "async"}],
    ids=["central", "prioritized", "async", "threads", "shards"])
@pytest.mark.parametrize("name", ["redq", "droq", "crossq"])
def test_variants_train_in_schemes_of_every_kind(name, options):
    own = {"critic_hidden_sizes": (5,)} if name == "crossq" else {}
    options = {"runtime": "simulated", **options} if options else options
    agent = pytorchrl.train(name, "Pendulum-v1", **{**TINY, **own, **options})
    assert agent.summary["updates"] > 2
    assert all(bool(tensor.isfinite().all()) for tensor in agent.acting_state.values())


class Camera(gym.Env):
    """Episodes of four steps with an image and a vector."""

    observation_space = gym.spaces.Dict({
        "image": gym.spaces.Box(0, 255, (1, 36, 36), np.uint8), "state": gym.spaces.Box(-1, 1, (3,), np.float32)})
    action_space = gym.spaces.Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.look(), {}

    def look(self):
        return {"image": self.np_random.integers(0, 256, (1, 36, 36), np.uint8),
                "state": self.np_random.uniform(-1, 1, 3).astype(np.float32)}

    def step(self, action):
        self.t += 1
        return self.look(), float(action.sum()), self.t == 4, False, {}


@pytest.mark.parametrize("name", ["redq", "droq", "crossq"])
def test_variants_learn_from_images_and_groups_of_observations(name):
    own = {"critic_hidden_sizes": (5,)} if name == "crossq" else {}
    agent = pytorchrl.train(name, Camera, obs_groups={"actor": ["image"]}, num_envs=1, num_steps=1,
                            **{**TINY, **own, "target_steps": 34})
    assert agent.summary["updates"] >= 1
    assert all(bool(tensor.isfinite().all()) for tensor in agent.acting_state.values())


def test_names_of_variants_are_suggested_and_taken():
    assert names()[:len(registered())] == list(registered())
    assert set(names()) == registered().keys() | VARIANTS.keys()
    with pytest.raises(ConfigError, match=r"'redq'.*did you mean 'redq'\?"):
        registration_of("reqd")
    with pytest.raises(ConfigError, match=r"@algorithm\('redq'\).*a variant of sac already has this name"):
        algorithm("redq", storage=ReplayBuffer)(type("Own", (SAC,), {}))
