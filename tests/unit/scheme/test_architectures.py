"""Tests of named architectures: their settings, and which changes to these settings are allowed or rejected."""

from __future__ import annotations

import json

import re

import pytest

from pytorchrl import ASYNC, DQN, PPO, R2D2, SYNC, A2C, PERBuffer, QActor, Scheme, SequenceBuffer, VecEnv, train
from pytorchrl.agent.data import DataKind
from pytorchrl.agent.synthetic import SyntheticAlgorithm, synthetic_agent
from pytorchrl.cli import main
from pytorchrl.envs.testing import CountingEnv
from pytorchrl.errors import ConfigError, FactoryError
from pytorchrl.scheme.architectures import PRESETS, Preset


@pytest.fixture
def named():
    """Return a function that makes the scheme of a named architecture."""
    def make(name, agent=None, **settings):
        if agent is None:
            agent = small_r2d2() if name == "r2d2" else synthetic_agent(4, capacity=1000 if name == "apex" else None)
        return getattr(Scheme, name)(*agent, **({"runtime": "simulated", "seed": 1} | settings))
    return make


def small_r2d2():
    """Return the factories of a small R2D2 agent, with environments that count their steps."""
    envs = VecEnv.create_factory(CountingEnv)
    return (R2D2.create_factory(start_steps=20), QActor.create_factory(
        envs.observation_space, envs.action_space, hidden_sizes=(4,), recurrent_net="gru", recurrent_size=4),
        SequenceBuffer.create_factory(400, rollout_size=4, length=4, burn_in=2, period=2, n_step=2), envs)


def test_a3c_is_an_ordinary_scheme_with_these_settings(named):
    scheme = named("a3c")
    assert type(scheme) is Scheme
    assert scheme.settings == Scheme(*synthetic_agent(4), runtime="simulated", seed=1, num_grad_workers=2,
                                     grad_communication=ASYNC, updates_per_step=100).settings
    assert scheme.settings["lag_policy"] == "apply"
    scheme.step()
    assert scheme.version == 100
    scheme.stop()


def test_ddppo(named):
    scheme = named("ddppo")
    settings = scheme.settings
    assert [settings[name] for name in ("num_grad_workers", "num_col_workers", "distribute_gradients",
                                        "col_fraction_workers",
                                        "fraction_samples", "grad_communication")] == [2, 1, True, 0.6, 0.25, SYNC]
    scheme.step()
    assert scheme.version == 1
    scheme.stop()


@pytest.mark.parametrize("name", PRESETS)
def test_printing_shows_every_setting(named, name):
    text = " ".join(str(named(name)).split())
    for setting, value in named(name).settings.items():
        assert f"{setting}={value!r}" in text


@pytest.mark.parametrize("name", PRESETS)
def test_settings_of_an_architecture_can_be_changed(named, name):
    scheme = named(name)
    assert {*PRESETS[name].defaults, *PRESETS[name].fixed, *PRESETS[name].least} <= set(scheme.settings)
    assert named(name, num_col_workers=3, worker_timeout_s=7.0).settings["num_col_workers"] == 3
    assert named(name, worker_timeout_s=7.0).settings["worker_timeout_s"] == 7.0


@pytest.mark.parametrize("name", ["impala", "appo", "apex", "r2d2"])
def test_one_learner_is_asynchronous_and_several_are_synchronous(named, name):
    assert named(name).settings["grad_communication"] == "asynchronous"
    assert named(name, num_grad_workers=2).settings["grad_communication"] == "synchronous"
    assert named(name, num_grad_workers=2, grad_communication=ASYNC).settings["grad_communication"] == "asynchronous"


@pytest.mark.parametrize("name", ["impala", "appo", "apex", "r2d2", "rapid"])
def test_architectures_make_updates(named, name):
    scheme = named(name, train_batch_size=8)
    while scheme.version < 3:
        scheme.step()
    scheme.stop()


@pytest.mark.parametrize(("name", "settings", "message"), [
    ("microbatch", {"num_grad_workers": 2}, "microbatch means num_grad_workers=1, got 2"),
    ("impala", {"col_communication": SYNC}, "impala means col_communication='asynchronous', got 'synchronous'"),
    ("rapid", {"num_grad_workers": 1}, "every learner is a gradient worker"),
    ("r2d2", {"routing": "round_robin"}, "r2d2 means routing='by_stream', got 'round_robin'"),
    ("r2d2", {"num_replay_workers": 0}, "replay is stored in shards: num_replay_workers=0 is too small"),
    ("apex", {"num_replay_workers": 0}, "replay is stored in shards: num_replay_workers=0 is too small"),
])
def test_settings_that_contradict_an_architecture_are_refused(named, name, settings, message):
    with pytest.raises(ConfigError, match=message):
        named(name, **settings)


def test_r2d2_is_apex_with_sequences():
    """Check that r2d2 is apex with a shorter queue, and with all steps of a collector sent to the same shard."""
    scheme = Scheme.r2d2(*small_r2d2(), seed=1)
    apex = Scheme.apex(*synthetic_agent(4, capacity=1000), seed=1, learning_starts=20, train_batch_size=64)
    differing = {name for name, value in scheme.settings.items() if apex.settings[name] != value}
    assert differing == {"queue_size", "routing"}
    assert [scheme.settings[name] for name in ("queue_size", "routing")] == [4, "by_stream"]
    _, actor, _, envs = small_r2d2()
    with pytest.raises(ConfigError, match=r"r2d2 provides sequences of steps .*, but DQN learns from single .*; "
                                          r"algorithms for r2d2: .*R2D2"):
        Scheme.r2d2(DQN.create_factory(), actor, PERBuffer.create_factory(1000), envs)


@pytest.mark.parametrize(("algo", "nearest"), [(A2C, "IMPALA"), (PPO, "APPO")])
@pytest.mark.parametrize("name", ["impala", "appo", "apex", "rapid"])
def test_on_policy_algorithms_are_refused_if_data_are_old(named, name, algo, nearest):
    _, actor, storage, envs = synthetic_agent(4)
    with pytest.raises(ConfigError, match=f"{name} collects with policies that are older than the learner's, but "
                                          f"{algo.__name__} has no correction for this policy lag; use {nearest}, the "
                                          "nearest algorithm with a correction\n"):
        named(name, (algo.create_factory(), actor, storage, envs))


def test_fixed_settings_may_be_given_explicitly(named):
    assert named("a3c", grad_communication="asynchronous").settings == named("a3c").settings


@pytest.mark.parametrize(("name", "settings", "message"), [
    ("a3c", {"num_grad_workers": 1},
     "asynchronous gradients need a remote worker, but with num_grad_workers=1 there is none"),
    ("a3c", {"grad_communication": SYNC}, "a3c means grad_communication='asynchronous', got 'synchronous'"),
    ("a3c", {"col_communication": ASYNC, "distribute_gradients": True},
     "col_communication='synchronous', got 'asynchronous'; .*\n- .* distribute_gradients=False, got True; leave"),
    ("a3c", {"num_grad_workers": 4, "aggregate": 5}, r"aggregate must be from 1 to num_grad_workers \(4\), got 5"),
    ("a3c", {"lag_policy": "drop"}, "lag_policy='drop' needs max_grad_lag, got None"),
    ("a3c", {"updates_per_step": 0}, "updates_per_step must be a whole number >= 1, got 0"),
    ("a3c", {"num_grad_workers": True}, "num_grad_workers must be a whole number >= 1, got True|need a remote worker"),
    ("ddppo", {"num_grad_workers": 1}, "ranks average gradients among themselves"),
    ("ddppo", {"distribute_gradients": False}, "ddppo means distribute_gradients=True, got False"),
    ("ddppo", {"aggregate": 2}, "aggregate=2: only with grad_communication='asynchronous'"),
])
def test_settings_that_contradict_a3c_or_ddppo_are_refused(named, name, settings, message):
    with pytest.raises(ConfigError, match=message):
        named(name, **settings)


def test_an_unknown_keyword_is_an_error_of_the_call(named):
    with pytest.raises(ConfigError, match="Scheme has no option 'num_workers'; did you mean 'num_col_workers' or "
                                          "'num_grad_workers'"):
        named("a3c", num_workers=2)


def test_a_part_that_is_not_a_factory_is_refused_as_by_any_scheme(named):
    _, *others = synthetic_agent(4)
    with pytest.raises(FactoryError, match="algo_factory"):
        named("a3c", agent=("ppo", *others))


@pytest.mark.parametrize(("allowed", "algo", "is_refused"), [
    ((DataKind.TRANSITIONS,), A2C.create_factory(), True),
    ((DataKind.OLDER_ROLLOUTS,), SyntheticAlgorithm.create_factory(), False),
    ((DataKind.OLDER_ROLLOUTS, DataKind.TRANSITIONS), A2C.create_factory(), True),
    (tuple(DataKind), A2C.create_factory(), False)])
def test_the_algorithm_must_support_the_kind_of_data(allowed, algo, is_refused):
    preset = Preset(name="replay", fixed={}, defaults={}, kinds=allowed)
    if is_refused:
        text, remedy = f"replay provides {allowed[0].value}, but A2C learns from", "algorithms for replay: "
        if DataKind.OLDER_ROLLOUTS in allowed:
            text, remedy = "replay collects with policies .*, but A2C has no correction", "use IMPALA, the nearest"
        (problem,) = preset.problems(algo, {})
        assert re.search(text, problem.text)
        assert problem.remedy.startswith(remedy)
    else:
        assert preset.problems(algo, {"seed": 1}) == []
        assert preset.settings({"seed": 1}) == {"seed": 1}


# train() and the command line


def test_train_accepts_an_architecture():
    agent = train("a2c", "CartPole-v1", preset="a3c", runtime="simulated", target_steps=500, num_envs=1, num_steps=5,
                  updates_per_step=10, progress=False)
    assert agent.summary["scheme"]["grad_communication"] == "asynchronous"
    assert agent.summary["updates"] >= 100
    assert agent.summary["updates"] % 10 == 0
    with pytest.raises(ConfigError, match=r"preset must be one of .*a3c.*got 'a4c'"):
        train("a2c", "CartPole-v1", preset="a4c")


def test_train_accepts_r2d2_as_algorithm_and_architecture():
    agent = train("r2d2", "pytorchrl/Recall-v0", preset="r2d2", runtime="simulated", target_steps=600, start_steps=200,
                  mini_batch_size=4, num_replay_workers=2, progress=False, seed=1)
    assert agent.summary["updates"] >= 1
    assert agent.summary["scheme"]["routing"] == "by_stream"
    assert agent.agent.actor_factory.options.recurrent_net == "gru"


def test_the_command_line_accepts_r2d2(capsys):
    assert main(["train", "r2d2", "--env", "pytorchrl/Recall-v0", "--preset", "r2d2", "--runtime", "simulated",
                 "--target-steps", "400",
                 "--start-steps", "100", "--mini-batch-size", "4", "--burn-in", "4", "--json", "--no-progress",
                 "--no-tensorboard"]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["scheme"]["queue_size"] == 4
    assert summary["updates"] >= 1


def test_the_command_line_accepts_an_architecture(capsys, tmp_path):
    flags = ["train", "a2c", "--env", "CartPole-v1", "--preset", "a3c"]
    assert main([*flags, "--runtime", "simulated", "--target-steps", "400", "--num-envs", "1", "--num-steps", "5",
                 "--updates-per-step", "4", "--json", "--no-progress", "--no-tensorboard", "--log-dir",
                 str(tmp_path / "a")]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["scheme"]["num_grad_workers"] == 2
    assert summary["updates"] >= 80
    assert summary["updates"] % 4 == 0
    assert json.loads((tmp_path / "a" / "run.json").read_text())["recipe"]["options"]["preset"] == "a3c"
    assert main([*flags, "--help-all"]) == 0
    assert "[100]" in " ".join(capsys.readouterr().out.split()).split("--updates-per-step ")[1].split(" --")[0]
    assert main([*flags[:-1], "a4c"]) == 2
    assert "preset must be one of ['a3c'" in capsys.readouterr().err


def test_apex_with_sequences_names_the_architecture_for_sequences():
    algorithm, actor, _, envs = small_r2d2()
    storage = SequenceBuffer.create_factory(400, rollout_size=4, length=4, burn_in=2, period=2)
    with pytest.raises(ConfigError, match=r"SequenceBuffer samples sequences; use Scheme\.r2d2 \(preset='r2d2'\)"):
        Scheme.apex(algorithm, actor, storage, envs)
    Scheme.r2d2(algorithm, actor, storage, envs, runtime="simulated")
    with pytest.raises(ConfigError, match=r"use Scheme\.r2d2"):
        train("r2d2", "CartPole-v1", preset="apex", target_steps=100)
