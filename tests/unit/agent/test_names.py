"""Tests of unknown options: errors translate option names of other libraries, and suggest only similar names."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path

import pytest

import pytorchrl
from pytorchrl import (
    DQN,
    IMPALA,
    PPO,
    R2D2,
    GAEBuffer,
    Learner,
    MultiAgentVecEnv,
    OnPolicyActor,
    ReplayBuffer,
    Scheme,
    SequenceBuffer,
    VecEnv,
    train,
)
from pytorchrl.agent.names import checked_names, options_of, suggestion
from pytorchrl.agent import names_elsewhere
from pytorchrl.agent.names_elsewhere import HOMES, elsewhere, libraries, of_other_libraries
from pytorchrl.cli import main
from pytorchrl.agent.algorithms.registry import names, registered
from pytorchrl.training.composition import known_names, option_specs
from pytorchrl.errors import ConfigError
from pytorchrl.scheme.architectures import PRESETS
from pytorchrl.scheme.options.settings import known_keywords

ELSEWHERE = elsewhere()
PART_NAMES = ("PPO", "A2C", "IMPALA", "APPO", "DQN", "DDPG", "TD3", "SAC", "R2D2", "OnPolicyActor", "OffPolicyActor",
              "QActor", "GAEBuffer",
              "VanillaOnPolicyBuffer", "VTraceBuffer", "ReplayBuffer", "PERBuffer", "SequenceBuffer", "VecEnv",
              "MultiAgentVecEnv", "Learner")
PARTS = [getattr(pytorchrl, name) for name in PART_NAMES]
SCHEME_OPTIONS = {*known_keywords(), *inspect.signature(Scheme).parameters} - {"settings"}
PLACES = ({place for part in PARTS for place in options_of(part).values()} | {("scheme",
                                                                               name) for name in SCHEME_OPTIONS}
          | {place for algorithm in registered() for place in known_names(algorithm).values()})
# Names of options in RLlib's documentation -> names of the same options here.
DOCUMENTS = {
    "grads_per_step": "updates_per_step", "buffer_size": "size", "num_replay_buffer_shards": "num_replay_workers",
    "prioritized_replay": "prioritized", "prioritized_replay_alpha": "alpha", "prioritized_replay_beta": "beta",
    "prioritized_replay_eps": "epsilon", "sample_batch_size": "size",
    "num_sgd_iter": "num_passes", "learner_queue_size": "queue_size", "learner_queue_timeout": "queue_timeout_s",
}


@pytest.fixture(scope="module")
def agent():
    envs = VecEnv.create_factory("CartPole-v1")
    return (PPO.create_factory(), OnPolicyActor.create_factory(envs.observation_space, envs.action_space),
            GAEBuffer.create_factory(8), envs)


def message_of(function, *arguments, **options):
    with pytest.raises(ConfigError) as caught:
        function(*arguments, **options)
    return str(caught.value)


def test_each_name_stands_in_one_section():
    def unique(pairs):
        names = [name for name, _ in pairs]
        assert sorted(names) == sorted(set(names))
        return dict(pairs)
    sections = json.loads(Path(names_elsewhere.__file__).with_suffix(".json").read_text(encoding="utf-8"),
                          object_pairs_hook=unique)
    assert len(ELSEWHERE) == sum(map(len, sections.values())) == sum(map(len, libraries().values())) > 300


def test_every_translated_name_is_an_option_or_has_a_note():
    for name, translations in ELSEWHERE.items():
        for here in translations:
            assert here.at or here.note, name
            assert set(here.options) <= PLACES, name
            assert {home for home, _ in here.options} <= set(HOMES), name


def test_notes_mention_only_existing_options():
    specs = [spec for algorithm in registered() for spec in option_specs(algorithm).values()]
    values = {choice for spec in specs for choice in spec.choices or ()}
    names = {name for _,
             name in PLACES} | {name for algorithm in registered() for name in option_specs(algorithm)} | values
    for name, meanings in ELSEWHERE.items():
        for word in re.findall("`([^`]+)`", " ".join(here.note for here in meanings)):
            assert word in names | set(pytorchrl.__all__) or word.startswith("pytorchrl "), name


@pytest.mark.parametrize("part", PARTS, ids=PART_NAMES)
def test_a_part_translates_every_name_to_an_option_and_its_owner(part, agent):
    given = {
        "actor": {"observation_space": agent[3].observation_space, "action_space": agent[3].action_space},
        "replay": {"size": 10}, "rollouts": {"size": 10}, "environments": {"env_fn": "CartPole-v1"}, "algorithm": {},
        "learner": {},
    }[part.home]
    for name in ELSEWHERE:
        if name in options_of(part) or (part is Learner and name in inspect.signature(Learner).parameters):
            continue
        message = message_of(Learner, None, 1, **{name: 1}) if part is Learner else message_of(part.create_factory,
                                                                                               **given, **{name: 1})
        assert message.startswith(f"{part.__name__} has no option {name!r}; "), message
        places = set(options_of(part).values())
        own = [here for here in ELSEWHERE[name]
               if (set(here.options) <= places if here.needs_all else set(here.options) & places) and here.at]
        if own:
            suggested = message.split("; did you mean ")[1]
            meant = [option for home, option in own[0].options if (home, option) in places]
            assert all(repr(option) in suggested for option in meant), message
        else:
            assert "did you mean" not in message, message


@pytest.mark.parametrize("preset", [None, *PRESETS])
def test_a_scheme_translates_every_name(agent, preset):
    make = Scheme if preset is None else getattr(Scheme, preset)
    algorithm = {"impala": IMPALA, "appo": IMPALA, "rapid": IMPALA, "apex": DQN, "r2d2": R2D2}.get(preset, PPO)
    agent = (algorithm.create_factory(), agent[1], SequenceBuffer.create_factory(10) if preset == "r2d2" else agent[2],
             agent[3])
    names = [name for name in ELSEWHERE if name not in SCHEME_OPTIONS]
    message = message_of(make, *agent, **dict.fromkeys(names, 1))
    for name in names:
        # The agent's parts do not fit every architecture, which the message says on other lines.
        (line,) = [line for line in message.splitlines()
                   if line.removeprefix("- ").startswith(f"Scheme has no option {name!r}; ")]
        has_one = any(home == "scheme" for here in ELSEWHERE[name] for home, _ in here.options)
        assert ("did you mean" in line) is has_one, line


@pytest.mark.parametrize("algorithm", ["ppo", "impala", "dqn", "sac", "r2d2"])
def test_train_translates_every_name(algorithm):
    known, problems = known_names(algorithm), []
    for name in of_other_libraries():
        if name in known:
            continue
        hint = suggestion(name, known)
        meant = re.findall("'([^']+)'", hint.split("; did you mean ")[1]) if "did you mean" in hint else []
        if not hint or not set(meant) <= set(known):
            problems.append((name, hint))
    assert problems == []


@pytest.mark.parametrize(("name", "meant"), DOCUMENTS.items())
def test_documented_names_are_translated_everywhere(capsys, agent, name, meant):
    assert repr(meant) in message_of(Scheme, *agent, **{name: 1})
    flat = {"size": "replay_size", "epsilon": "priority_epsilon"}.get(meant, meant)
    flat = "num_steps" if name == "sample_batch_size" else flat
    assert f"there is no option {name!r}; did you mean" in message_of(train, "dqn", "CartPole-v1", **{name: 1})
    assert repr(flat) in message_of(train, "dqn", "CartPole-v1", **{name: 1})
    flag = "--" + name.replace("_", "-")
    assert main(["train", "dqn", "--env", "CartPole-v1", flag, "1"]) == 2
    error = capsys.readouterr().err
    assert f"unknown flag '{flag}'; did you mean --" in error
    assert "--" + flat.replace("_", "-") in error


@pytest.mark.parametrize(("algorithm", "name", "message"), [
    ("ppo", "learning_rate", "did you mean 'lr'?"), ("sac", "learning_rate", "did you mean 'lr_q' and 'lr_pi'?"),
    ("sac", "lr", "did you mean 'lr_q' and 'lr_pi'?"),
    ("sac", "tau", "did you mean 'polyak' (polyak = 1 - tau)?"),
    ("ppo", "tau", "in this package, use 'polyak' of another algorithm (polyak = 1 - tau)"),
    ("dqn", "buffer_size", "did you mean 'replay_size'?"), ("impala", "buffer_size", "did you mean 'replay_size'?"),
    ("ppo", "buffer_size", "in this package, use 'size' of the replay storage or"), ("dqn", "size", "did you mean "
                                                                                            "'replay_size'?"),
    ("impala", "size", "did you mean 'num_steps' or 'replay_size'?"), ("dqn", "batch_size", "did you mean "
                                                                                            "'mini_batch_size'?"),
    ("dqn", "train_freq", "did you mean 'update_every' (counts env steps of all environments)?"),
    ("sac", "gradient_steps", "did you mean 'num_updates'?"), ("ppo", "total_timesteps", "did you mean "
                                                                                         "'target_steps'?"),
    ("ppo", "num_env_runners", "did you mean 'num_col_workers' ("), ("ppo", "n_envs", "did you mean 'num_envs' ("),
    ("ppo", "n_steps", "did you mean 'num_steps' ("), ("dqn", "n_steps", "did you mean 'n_step' or 'num_steps' ("),
    ("ppo", "vf_coef", "did you mean 'value_loss_coef' (weight of half the mean squared error)?"),
    ("sac", "ent_coef", "did you mean 'initial_alpha' (learn_alpha=False keeps it constant)?"),
    ("ppo", "net_arch", "did you mean 'hidden_sizes'?"), ("ppo", "verbose", "did you mean 'progress' ("),
    ("ppo", "policy_kwargs", "its entries are options themselves: hidden_sizes for net_arch"),
    ("ppo", "frame_skip", "environments and their wrappers skip frames, see env_kwargs and wrappers"),
    ("ppo", "track", "did you mean 'callbacks' (with WandbLog or MlflowLog"), ("ppo", "lambda", "did you mean "
                                                                                             "'gae_lambda'?"),
    ("impala", "lambda_", "did you mean 'vtrace_lambda'?"), ("dqn", "epsilon", "did you mean 'initial_epsilon' or "
                                                                               "'priority_epsilon' ("),
    ("sac", "alpha", "alpha would be ignored: transitions are drawn uniformly; add prioritized=True; did you mean "
                     "'initial_alpha' ("),
    ("dqn", "alpha", "alpha would be ignored: transitions are drawn uniformly; add prioritized=True"),
    ("ppo", "encoder", "did you mean 'feature_extractor' (a function of a space that builds a network)?"),
    ("ppo", "actor", "; feature_extractor and hidden_sizes change its networks; an actor of your own is the actor_f"),
    ("sac", "learning_starts", "; give start_steps of the algorithm instead"),
])
def test_train_suggests_the_option_for_a_name(algorithm, name, message):
    env = "Pendulum-v1" if algorithm == "sac" else "CartPole-v1"
    assert message in message_of(train, algorithm, env, **{name: 1})


def test_all_unknown_names_are_reported_at_once(agent):
    message = message_of(Scheme, *agent, tau=1, buffer_size=2)
    assert message.splitlines() == [
        "2 problems:",
        "- Scheme has no option 'tau'; in this package, use 'polyak' of the algorithm (polyak = 1 - tau)",
        "- Scheme has no option 'buffer_size'; did you mean 'size'?"]


@pytest.mark.parametrize(("call", "message"), [
    (lambda agent: Scheme(*agent, num_col_wrkers=2), "Scheme has no option 'num_col_wrkers'; did you mean "
                                                     "'num_col_workers'?"),
    (lambda agent: Scheme.a3c(*agent, num_grad_worker=2), "Scheme has no option 'num_grad_worker'; did you mean "
                                                          "'num_grad_workers'?"),
    (lambda agent: Scheme(*agent, actor=2), "an actor of your own is the actor_factory of Scheme"),
    (lambda agent: Scheme(*agent[:3]), "Scheme needs train_envs_factory"),
    (lambda agent: Learner(None, total_timesteps=1), "Learner has no option 'total_timesteps'; did you mean "
                                                     "'target_steps'?"),
    (lambda agent: Learner(None), "Learner needs target_steps"),
    (lambda agent: PPO.create_factory(n_steps=1),
     "PPO has no option 'n_steps'; in this package, use 'size' of the storage of rollouts (steps of each environment)"),
    (lambda agent: train("PPO", "CartPole-v1"),
     f"algorithm must be one of {names()}, a class or 'module:Class', got 'PPO'; did you mean 'ppo'?"),
    (lambda agent: train(GAEBuffer, "CartPole-v1"), "algorithm must be a class that derives from Algorithm, "
     "got <class 'pytorchrl.agent.storages.on_policy.GAEBuffer'>"),
    (lambda agent: train("td3", "CartPole-v1"),
     "TD3 needs Box actions, got Discrete(2); algorithms for such Discrete actions: "),
    (lambda agent: train("dqn", "Pendulum-v1"), "DQN needs Discrete actions, got Box(-2.0, 2.0, (1,), float32); "
     "algorithms for such Box actions: "),
    (lambda agent: ReplayBuffer.create_factory(buffer_size=10), "ReplayBuffer has no option 'buffer_size'; did you "
                                                                "mean 'size'?"),
    (lambda agent: ReplayBuffer.create_factory(), "ReplayBuffer needs size"),
    (lambda agent: GAEBuffer.create_factory(num_steps=8), "GAEBuffer has no option 'num_steps'; did you mean 'size' "
                                                          "(steps of each environment)?"),
    (lambda agent: VecEnv.create_factory(env_id="CartPole-v1"), "VecEnv has no option 'env_id'; did you mean "
                                                                "'env_fn'?"),
    (lambda agent: VecEnv.create_factory("CartPole-v1", num_envs=2), "did you mean 'vec_env_size' (environments of "
                                                                     "each collection worker)?"),
    (lambda agent: MultiAgentVecEnv.create_factory(num_envs=2), "MultiAgentVecEnv has no option 'num_envs'; did you "
                                                                "mean 'vec_env_size' ("),
    (lambda agent: OnPolicyActor.create_factory(net_arch=(8,)), "OnPolicyActor has no option 'net_arch'; did you mean "
                                                                "'hidden_sizes'?"),
    (lambda agent: PPO.create_factory(learning_rate=1), "PPO has no option 'learning_rate'; did you mean 'lr'?"),
])
def test_owners_suggest_the_option_and_report_missing_ones(agent, call, message):
    assert message in message_of(call, agent)


@pytest.mark.parametrize("name", ["config_file", "zzz", "console", "printer", "agent", "col", "lr_", "dropout", "num"])
def test_dissimilar_names_get_no_suggestion(name):
    assert suggestion(name, {"col_in_flight": ("scheme", "col_in_flight"), "num_steps": ("rollouts", "size"),
                             "lr": ("algorithm", "lr")}) == (
        "; did you mean 'lr'?" if name == "lr_" else "")


def test_a_checked_constructor_keeps_its_signature_and_its_other_errors():
    parameters = inspect.signature(Scheme).parameters
    assert list(parameters)[:2] == ["algo_factory", "actor_factory"]
    assert parameters["test_envs_factory"].default is None
    assert parameters["settings"].annotation == "Unpack[SchemeKeywords]"

    class Owner:
        home = "scheme"

        @checked_names
        def __init__(self, first, *, second=2):
            self.both = first, second
            if second == 3:
                raise TypeError("its own")

    assert Owner(1).both == (1, 2)
    assert Owner(first=1, second=4).both == (1, 4)
    assert message_of(Owner, 1, 2) == (
        "Owner takes only first without a name, got 2; write the name of each option, as in second=...")
    assert message_of(Owner, 1, first=2) == "Owner got first twice, without a name and by name"
    with pytest.raises(TypeError, match="its own"):
        Owner(1, second=3)
    shown = message_of(Owner, 1, secnd=2)  # codespell:ignore secnd
    assert shown == "Owner has no option 'secnd'; did you mean 'second'?"  # codespell:ignore secnd
    assert message_of(Owner) == "Owner needs first"


@pytest.mark.parametrize(("call", "message"), [
    (lambda: PPO.create_factory(0.1), "PPO takes options by name only, got 0.1"),
    (lambda: DQN.create_factory(0.1, 2), r"DQN takes options by name only, got 0\.1, 2"),
    (lambda: GAEBuffer.create_factory(64, 0.5), r"GAEBuffer takes only size without a name, got 0\.5"),
])
def test_options_without_a_name_are_refused(call, message):
    with pytest.raises(ConfigError, match=rf"^{message}; write the name of each option, as in \w+=\.\.\.$"):
        call()
