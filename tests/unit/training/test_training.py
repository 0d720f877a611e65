"""Tests of `train` and `load`, and of how options reach the parts of an agent."""

from __future__ import annotations

import dataclasses
import functools
import json
import threading

import gymnasium as gym
import numpy as np
import pytest
import torch

import pytorchrl
from pytorchrl.training import composition
from pytorchrl.training import presets
from pytorchrl.analysis import read_run
from pytorchrl.agent.declarations import without_numpy
from pytorchrl.agent.algorithms.registry import registered, registration_of
from pytorchrl.training.composition import compose, option_specs
from pytorchrl.envs.suites import suite_of
from pytorchrl.envs.testing import CountingEnv
from pytorchrl.errors import CheckpointError, ConfigError
from pytorchrl.files.atomic import read_json
from pytorchrl.files.tensors import read_sealed, save
from pytorchrl.training.training import load, train

TINY = {"num_envs": 2, "num_steps": 32, "num_epochs": 1, "num_mini_batch": 2, "target_steps": 64, "progress": False,
        "tensorboard": False, "seed": 3}

# For each option of the agent's parts, a value that differs from the preset and from the default.
OTHER = {
    "lr": 0.5, "optimizer": "sgd", "adam_eps": 1e-3, "adam_beta1": 0.5, "rmsprop_eps": 1e-3, "rmsprop_decay": 0.5,
    "max_grad_norm": 3.0, "weight_decay": 0.5, "momentum": 0.5,
    "gamma": 0.5, "num_epochs": 3, "num_mini_batch": 2, "mini_batch_size": 100, "value_loss_coef": 0.7,
    "entropy_coef": 0.3,
    "advantage_normalization": "batch", "compile": True, "mixed_precision": True, "clip_param": 0.7,
    "correction": "none", "max_weight": 3.0, "min_weight": 0.4, "max_shift": 0.2, "max_moment": 0.1,
    "use_clipped_value_loss": True, "clip_param_vf": 0.6, "target_kl": 0.3, "recompute_advantages": True,
    "intrinsic_reward": "rnd", "gamma_intrinsic": 0.7, "int_adv_coef": 0.3, "ext_adv_coef": 0.4,
    "predictor_proportion": 0.6,
    "dual_clip": 4.0, "num_steps": 17, "sequence_length": 5, "gae_lambda": 0.33, "feature_extractor": "mlp",
    "hidden_sizes": (7,), "block": "simba", "activation": "relu", "recurrent_net": "gru", "recurrent_size": 9,
    "shared_policy_value_network": True, "policy_gain": 0.5, "log_std_init": -1.0, "normalize_obs": True,
    "normalize_reward": True,
    "checkpoint": "model.pt", "env_kwargs": {"sutton_barto_reward": True}, "test_env_kwargs": {"a": 1},
    "num_envs": 3, "backend": "sync", "autoreset": "next_step", "truncation": "approximate", "max_episode_steps": 11,
    "frame_stack": 2,
    "wrappers": (gym.wrappers.RescaleAction,), "reward_transform": "sign", "end_on_life_loss": True,
    "info_keywords": ("lives",), "on_env_error": "restart", "max_env_restarts": 7, "keep_float64": True,
    "env_timeout_s": 30.0,
}
NEEDED = {"max_env_restarts": {"on_env_error": "restart"}, "clip_param_vf": {"use_clipped_value_loss": True},
          "rmsprop_eps": {"optimizer": "rmsprop"}, "rmsprop_decay": {"optimizer": "rmsprop"},
          "weight_decay": {"optimizer": "adamw"}, "momentum": {"optimizer": "sgd"},
          "recurrent_size": {"recurrent_net": "gru"}, "max_weight": {"correction": "tis"},
          "min_weight": {"correction": "icepop"}, "max_shift": {"correction": "ipo"},
          "max_moment": {"correction": "m2po"},
          **{name: {"intrinsic_reward": "rnd"}
             for name in ("gamma_intrinsic", "int_adv_coef", "ext_adv_coef", "predictor_proportion")}}
PARTS = {"algorithm": "algo_factory", "storage": "storage_factory", "actor": "actor_factory",
         "environments": "train_envs_factory"}


@pytest.mark.parametrize("name", [
    # `policies` needs an environment with several agents, and `obs_groups` needs observations with several leaves.
    name for name, spec in option_specs("ppo").items() if spec.part in PARTS
    and name not in ("policies", "obs_groups")])
def test_every_option_reaches_its_part(monkeypatch, name):
    spec = option_specs("ppo")[name]
    value = OTHER[name]
    assert value != presets.preset("ppo", "classic").get(name, spec.default)
    envs = compose("ppo", "CartPole-v1", {})[0].train_envs_factory
    # To save time, the options of an existing factory are replaced; a new factory would build an environment.
    monkeypatch.setattr("pytorchrl.training.composition.make_factory", lambda _env, **options: dataclasses.replace(
        envs, options=dataclasses.replace(envs.options, **options)))
    agent = compose("ppo", "CartPole-v1", {**NEEDED.get(name, {}), name: value})[0]
    assert getattr(getattr(agent, PARTS[spec.part]).options, spec.own_name) == value
    if spec.part == "environments" and name != "num_envs":
        assert getattr(agent.test_envs_factory.options, spec.own_name) == value


def as_numpy(value):
    """Return the equal value of NumPy for a boolean, a number or a tuple of numbers; None for any other value."""
    if isinstance(value, (bool, int, float)):
        return np.array(value)[()]
    return np.array(value) if isinstance(value, tuple) and value and all(map(as_numpy, value)) else None


def test_every_option_accepts_the_numbers_of_numpy():
    tried = set()
    for algorithm in registered():
        for name, spec in option_specs(algorithm).items():
            value = OTHER.get(name, spec.default)
            given = as_numpy(value)
            if given is not None:
                stored = without_numpy(spec.hint, given)
                stored = tuple(stored) if isinstance(value, tuple) else stored
                assert (stored, type(stored)) == (value, type(value)), name
                tried.add(name)
    assert len(tried) > 80


def test_a_run_with_numbers_of_numpy_equals_the_run_with_numbers_of_python(tmp_path):
    options = {**TINY, "hidden_sizes": (8, 8), "lr": 0.5, "normalize_obs": True}
    given = {name: as_numpy(value) for name, value in options.items()}
    train("ppo", "CartPole-v1", log_dir=tmp_path / "python", **options)
    agent = train("ppo", "CartPole-v1", log_dir=tmp_path / "numpy", **given)
    assert isinstance(agent.summary["env_steps"], int)
    assert agent.evaluate(np.int64(1), seed=np.int64(3)).returns
    one, other = ({**read_json(tmp_path / run / "run.json"), "started": None} for run in ("python", "numpy"))
    assert {name: value for name, value in one.items() if value != other[name]}.keys() <= {"recipe"}
    for run in (one, other):
        assert run["recipe"]["options"].pop("log_dir").startswith(str(tmp_path))
    assert one["recipe"] == other["recipe"]


def test_preset_options_without_effect_are_ignored():
    agent = compose("dqn", "CartPole-v1", {"epsilon_per_worker": True})[0]
    assert agent.algo_factory.options.epsilon_steps == 100_000  # the default of the algorithm
    with pytest.raises(ConfigError, match="epsilon_steps needs epsilon_per_worker=False"):
        compose("dqn", "CartPole-v1", {"epsilon_per_worker": True, "epsilon_steps": 10_000})


def test_options_reach_scheme_and_learner(tmp_path):
    from pytorchrl.training.training import make_learner
    learner, _ = make_learner("a2c", "CartPole-v1", **{
        **TINY, "num_mini_batch": 1, "num_col_workers": 2, "col_communication": "asynchronous", "queue_size": 3,
        "eval_every": 50, "log_dir": str(tmp_path), "num_threads": 2})
    settings = learner.scheme.settings
    assert (settings["num_col_workers"], settings["col_communication"], settings["queue_size"]) == (
        2, "asynchronous", 3)
    assert (settings["seed"], settings["num_threads"], settings["col_execution"]) == (3, 2, "Parallel")
    assert (learner.options.eval_every, learner.target_steps, learner.log_dir) == (50, 64, tmp_path)


@pytest.mark.parametrize(("options", "message"), [
    ({"num_stps": 5}, "no option 'num_stps'; did you mean 'num_steps'"),
    ({"num_stps": 5, "lrr": 1}, "num_stps.*\n.*lrr"),
    ({"lr": -1}, "lr must be a number >= 0"),
    ({"lr": "1e-3"}, "lr must be a number >= 0.0 or a schedule, got '1e-3'"),
    ({"num_envs": True}, "^num_envs must be a whole number"),
    ({"num_envs": 0}, "^num_envs must be a whole number >= 1"),
    ({"num_steps": 0}, "^num_steps must be a whole number >= 1"),
    ({"size": 2}, "did you mean 'num_steps'"),
    ({"vec_env_size": 2}, "did you mean 'num_envs'"),
    ({"learning_rate": 0.1}, "did you mean 'lr'"),
    ({"info_keywords": ("lives",)}, "info_keywords needs a log_dir"),
    ({"target_steps": -5}, "target_steps"),
    ({"num_col_workers": 1.5}, "num_col_workers"),
    ({"activation": torch.nn.ReLU}, r"activation must be one of \['tanh', 'relu', .*; did you mean 'relu'\?"),
    ({"recurrent_net": True}, r"recurrent_net must be one of \[None, 'gru', 'lstm'\], got True"),
    ({"seed": "42"}, "seed"),
    ({"device": 0}, "device"),
    ({"log_dir": 5}, "log_dir"),
])
def test_wrong_options_are_refused_before_anything_starts(options, message):
    with pytest.raises(ConfigError, match=message):
        train("ppo", "CartPole-v1", **{**TINY, **options})


@pytest.mark.parametrize(("algorithm", "options", "message"), [
    ("dqn", {"replay_size": 0}, "^replay_size must be a whole number >= 1, got 0"),
    ("dqn", {"num_steps": 0}, "^num_steps must be a whole number >= 1, got 0"),
    ("dqn", {"prioritized": True, "priority_epsilon": -1.0}, "^priority_epsilon must be"),
    ("impala", {"num_steps": 0}, "^num_steps must be a whole number >= 1, got 0"),
])
def test_errors_name_options_of_storages_as_the_user_does(algorithm, options, message):
    with pytest.raises(ConfigError, match=message):
        train(algorithm, "CartPole-v1", target_steps=64, progress=False, **options)


class LivesEnv(CountingEnv):
    """An environment that reports seven remaining lives in each info."""

    def step(self, action):
        *rest, info = super().step(action)
        return *rest, {**info, "lives": 7}


def test_monitor_files_contain_episodes_and_requested_keywords(tmp_path):
    agent = train("ppo", LivesEnv, **TINY, log_dir=tmp_path / "run", info_keywords=("lives",))
    agent.evaluate(2)  # episodes of this evaluation are not written to the monitor file
    (path,) = (tmp_path / "run").glob("*.csv")
    columns, *rows = path.read_text().splitlines()
    assert (path.name, columns) == ("monitor_train_GWorker_0_CWorker_0.csv", "r,l,t,env,ended,lives")
    assert len(rows) == agent.summary["return_episodes"] > 0
    assert {row.split(",")[-1] for row in rows} == {"7"}


def test_unknown_algorithm_suggests_the_nearest_name():
    with pytest.raises(ConfigError, match="did you mean 'ppo'"):
        train("pppo", "CartPole-v1")


@pytest.mark.parametrize(("algorithm", "suite"), presets.registered())
def test_presets_hold_known_options_and_a_target(algorithm, suite):
    settings = presets.registered()[algorithm, suite]
    assert set(settings) <= set(option_specs(algorithm))
    if algorithm == "bc":  # learns from a data set
        assert {"target_steps", "lr"} <= set(settings)
        return
    if algorithm == "grpo":  # its rollouts consist of groups
        assert settings["num_envs"] % settings["group_size"] == 0
        return
    assert {"target_steps", "num_envs", "num_steps"} <= set(settings)
    parts = {part: {} for part in ("learner", "environments", "actor", "algorithm", "storage", "scheme")}
    for name, value in settings.items():
        spec = option_specs(algorithm)[name]
        parts[spec.part][spec.own_name] = value
    options = registration_of(algorithm).algorithm.create_factory(**parts["algorithm"]).options
    composition.storage_factory(registration_of(algorithm), parts["storage"])
    if "start_steps" in settings:
        assert settings["num_envs"] * settings["num_steps"] == options.update_every
    else:
        assert settings["num_envs"] * settings["num_steps"] % options.num_mini_batch == 0


@pytest.mark.parametrize("algorithm", [name for name in registered() if name != "bc"])  # see test_dataset_runs
def test_every_algorithm_trains_from_its_preset_with_the_storage_that_fits(algorithm):
    is_continuous = algorithm in ("ddpg", "td3", "sac", "mpo")
    early = {"start_steps": 150} if algorithm in ("dqn", "ddpg", "td3", "sac", "mpo", "r2d2") else {}
    env = "Pendulum-v1" if is_continuous else "tokens/SortDigits" if algorithm == "grpo" else "CartPole-v1"
    agent = train(algorithm, env, target_steps=300, progress=False, seed=1, **early)
    assert agent.summary["updates"] >= 1
    assert agent.agent.storage_factory.cls is {
        "ppo": pytorchrl.GAEBuffer, "a2c": pytorchrl.GAEBuffer, "pqn": pytorchrl.GAEBuffer,
        "impala": pytorchrl.VTraceBuffer, "appo": pytorchrl.VTraceBuffer, "r2d2": pytorchrl.SequenceBuffer,
        "grpo": pytorchrl.GroupBuffer}.get(
            algorithm, pytorchrl.ReplayBuffer)


def test_the_preset_of_mpo_fits_discrete_actions():
    agent = train("mpo", "CartPole-v1", target_steps=100, start_steps=50, progress=False, seed=1)
    assert agent.summary["updates"] == 50
    assert agent.agent.actor_factory.options.policy == "stochastic"
    assert compose("mpo", "Pendulum-v1", {})[0].actor_factory.options.policy == "gaussian"
    with pytest.raises(ConfigError, match="policy='gaussian' needs a Box"):
        train("mpo", "CartPole-v1", policy="gaussian", target_steps=100, progress=False)


def test_replay_is_uniform_unless_priorities_are_requested():
    options = {"target_steps": 200, "start_steps": 100, "progress": False}
    agent = train("dqn", "CartPole-v1", prioritized=True, alpha=0.5, **options)
    assert agent.agent.storage_factory.cls is pytorchrl.PERBuffer
    assert agent.agent.storage_factory.options.alpha == 0.5
    with pytest.raises(ConfigError, match="alpha, priority_epsilon would be ignored: transitions are drawn uniformly; "
                                          "add prioritized=True"):
        train("dqn", "CartPole-v1", alpha=0.5, priority_epsilon=0.1, **options)
    with pytest.raises(ConfigError, match="prioritized must be True or False, got 1"):
        train("dqn", "CartPole-v1", prioritized=1, **options)


def test_storage_options_are_those_of_the_algorithms_storage():
    assert {"rho_bar", "c_bar", "vtrace_lambda"} <= set(option_specs("impala"))
    assert "gae_lambda" not in option_specs("appo")
    with pytest.raises(ConfigError, match="no option 'rho_bar'"):
        train("ppo", "CartPole-v1", **{**TINY, "rho_bar": 2.0})
    agent, _, _ = compose("impala", "CartPole-v1", {"rho_bar": 2.0})
    assert agent.storage_factory.options.rho_bar == 2.0


@pytest.mark.parametrize(("env", "suite"), [
    ("CartPole-v1", "classic"), ("HalfCheetah-v5", "mujoco"), ("LunarLander-v3", "box2d"), ("ALE/Pong-v5", "atari"),
    ("ale_py:ALE/Pong-v5", "atari"), ("FrozenLake-v1", "classic"), ("nothing-v0", None), (lambda: None, None),
])
def test_suite_of_an_environment(env, suite):
    found = suite_of(env)
    assert (None if found is None else found.name) == suite


def test_train_returns_an_agent_that_plays_and_saves(tmp_path):
    agent = train("ppo", "CartPole-v1", **TINY)
    assert isinstance(agent, pytorchrl.TrainedAgent)
    assert agent.summary["updates"] >= 2
    assert agent.return_mean == agent.summary["return_mean"]
    evaluation = agent.evaluate(5)
    assert len(evaluation.returns) == len(evaluation.lengths) == 5
    assert agent.evaluate(5) == evaluation
    assert agent.evaluate(5, seed=9) != evaluation
    path = agent.save(tmp_path / "model.pt")
    other = train("ppo", "CartPole-v1", **{**TINY, "target_steps": 0, "seed": 8, "checkpoint": path})
    assert torch.equal(other.acting_state["all"], agent.acting_state["all"])


def test_a_saved_model_that_does_not_fit_is_named_by_its_path(tmp_path):
    train("ppo", "CartPole-v1", hidden_sizes=(4,), log_dir=tmp_path / "first", **TINY)
    model = tmp_path / "first" / "model.pt"
    with pytest.raises(CheckpointError, match=rf"^checkpoint '{model}' contains \d+ parameters, but this actor has"):
        train("ppo", "CartPole-v1", hidden_sizes=(8,), checkpoint=str(model), log_dir=tmp_path / "second", **TINY)


@pytest.mark.parametrize("number", [0, 2.0, True, "3", None])
def test_evaluate_refuses_invalid_numbers_of_episodes(number):
    agent = train("ppo", "CartPole-v1", **{**TINY, "target_steps": 0})
    with pytest.raises(ConfigError, match="num_episodes"):
        agent.evaluate(number)


def test_evaluation_does_not_change_the_number_of_threads():
    agent = train("ppo", "CartPole-v1", **{**TINY, "target_steps": 0})
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        agent.evaluate(1)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def falling(progress_remaining):
    return 1e-3 * progress_remaining


def test_code_for_learning_is_stored_by_name_and_not_needed_to_load(tmp_path):
    agent = train("ppo", "CartPole-v1", log_dir=tmp_path, lr=falling, optimizer=torch.optim.NAdam,
                  clip_param=[(0, 0.3), (50, 0.1)], **TINY)
    kept = json.loads((tmp_path / "run.json").read_text())["recipe"]["options"]
    assert kept["lr"] == {"__code__": f"{__name__}:falling"}
    assert kept["optimizer"] == {"__code__": "torch.optim.nadam:NAdam"}
    loaded = load(tmp_path)
    assert loaded.evaluate(2).returns == agent.evaluate(2).returns
    assert loaded.agent.algo_factory.options.clip_param == agent.agent.algo_factory.options.clip_param


def test_code_without_a_name_is_described_and_not_needed_to_load(tmp_path):
    optimizer = functools.partial(torch.optim.NAdam, betas=(0.8, 0.99))
    agent = train("ppo", "CartPole-v1", log_dir=tmp_path, lr=lambda progress_remaining: 1e-3, optimizer=optimizer,
                  **TINY)
    kept = json.loads((tmp_path / "run.json").read_text())["recipe"]["options"]
    assert kept["lr"]["__code__"].startswith(f"{__name__}:test_code_without_a_name")
    assert kept["optimizer"] == {"__partial__": [
        {"__code__": "torch.optim.nadam:NAdam"}, [], {"betas": {"__tuple__": [0.8, 0.99]}}]}
    assert load(tmp_path).evaluate(2).returns == agent.evaluate(2).returns


@pytest.mark.parametrize("lr", [pytorchrl.linear(1e-3, 1e-4), pytorchrl.cosine(1e-3, 0.0, 50),
                                [(0, 1e-3), (60, 1 / 3)]], ids=str)
def test_load_returns_the_trained_agent(tmp_path, lr):
    options = {**TINY, "lr": lr, "hidden_sizes": (8, 8), "normalize_obs": True}
    agent = train("ppo", "CartPole-v1", log_dir=tmp_path, **options)
    loaded = load(tmp_path)
    assert loaded.agent.algo_factory == agent.agent.algo_factory
    assert loaded.agent.actor_factory.options.hidden_sizes == (8, 8)
    assert all(torch.equal(loaded.acting_state[name], agent.acting_state[name]) for name in agent.acting_state)
    assert loaded.evaluate(3).returns == agent.evaluate(3).returns
    assert loaded.return_mean is None


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("run")
    train("ppo", "CartPole-v1", log_dir=path, **TINY)
    return path


@pytest.fixture
def copied(run_dir, tmp_path):
    for name in ("run.json", "model.pt"):
        (tmp_path / name).write_bytes((run_dir / name).read_bytes())
    return tmp_path


def test_load_finds_a_run_in_the_home_directory(copied, monkeypatch):
    monkeypatch.setenv("HOME", str(copied.parent))
    assert load(f"~/{copied.name}").log_dir == copied


def test_load_refuses_missing_files(copied):
    with pytest.raises(CheckpointError, match="no model"):
        load(copied, model="best")
    (copied / "run.json").unlink()
    with pytest.raises(CheckpointError, match=r"run\.json is missing"):
        load(copied)


@pytest.mark.parametrize("content", [
    b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"format": 1, "recipe": 5, "seed": 1}',
    b'{"format": 1, "recipe": {}, "agent": {}, "seed": -1}', b'{"format": 1, "recipe": {}, "agent": {}, "seed": 1}',
    b'{"format": 1, "recipe": {}, "agent": 5, "seed": 1}', b'{"recipe": {}, "agent": {}, "seed": 1}',
    b'{"format": 1, "recipe": {}, "agent": {"train_envs_factory": []}, "seed": 1}',
    b'{"format": 1, "recipe": {}, "agent": {"train_envs_factory": {"__factory__": "a:B", "options": {}}}, "seed": 1}',
    b'{"format": 1, "recipe": {}, "seed": 1}',
])
def test_load_refuses_an_invalid_run_file(copied, content):
    (copied / "run.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"run\.json|describe|not available"):
        load(copied)


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_files_of_other_formats_are_refused(copied, version):
    run = read_json(copied / "run.json")
    (copied / "run.json").write_text(json.dumps({**run, "format": version}))
    message = rf"it has the format {version!r}, but this version .* up to 1; use the version that wrote it"
    for read, error in ((load, CheckpointError), (read_run, ConfigError)):
        with pytest.raises(error, match=rf"run\.json' .*: {message}"):
            read(copied)
    (copied / "run.json").write_text(json.dumps(run))
    save(copied / "model.pt", {**read_sealed(copied / "model.pt", "model"), "format": version})
    with pytest.raises(CheckpointError, match=rf"model\.pt' cannot be loaded: {message}"):
        load(copied)


class Payload:
    """An object that creates a file when it is unpickled."""

    def __init__(self, canary):
        self.canary = canary

    def __reduce__(self):
        return open, (self.canary, "w")


def test_load_executes_nothing_in_a_model(copied):
    canary = copied / "canary"
    save(copied / "model.pt", {"acting_state": Payload(str(canary))})
    with pytest.raises(CheckpointError, match="cannot be read"):
        load(copied)
    assert not canary.exists()


@pytest.mark.parametrize("content", ["truncated", "empty", "foreign", "other"])
def test_load_refuses_a_damaged_or_foreign_model(copied, content):
    path = copied / "model.pt"
    if content == "truncated":
        path.write_bytes(path.read_bytes()[:1000])
    elif content == "empty":
        path.write_bytes(b"")
    elif content == "foreign":
        save(path, {"format": 1, "weights": torch.zeros(3)})
    else:
        state = torch.load(path, weights_only=True)
        state["acting_state"]["all"] = torch.zeros(3)
        save(path, state)
    with pytest.raises(CheckpointError, match="model"):
        load(copied)


def test_result_file_agrees_with_the_summary(tmp_path):
    agent = train("ppo", "CartPole-v1", log_dir=tmp_path, **TINY)
    result = read_json(tmp_path / "result.json")
    assert result.pop("records")["bytes"] == (tmp_path / "metrics.jsonl").stat().st_size
    assert result == json.loads(json.dumps(agent.summary))


class Limited(CountingEnv):
    """Environment with a required argument, which may be infinite."""

    def __init__(self, limit):
        super().__init__()
        self.limit = limit


def test_arguments_of_environments_may_be_infinite(tmp_path):
    """The default of Gymnasium's Hopper-v5 is healthy_z_range=(0.7, inf)."""
    given = {"limit": (0.7, {"high": np.inf, "low": [-np.inf, np.nan]})}
    train("ppo", Limited, env_kwargs=given, log_dir=tmp_path, **TINY)
    agent = load(tmp_path)
    assert repr(agent.agent.train_envs_factory.options.env_kwargs) == repr(given)
    with pytest.raises(ConfigError, match=r"env_kwargs\['limit'\] cannot be copied") as caught:
        train("ppo", Limited, env_kwargs={"limit": threading.Lock()}, gama=1, **TINY)
    assert "gama" in str(caught.value)  # the error does not say that `limit` is missing
