"""Wrong calls of the package, each with the calls that its error asks for; see `test_remedies.py`."""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass, replace
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from torch import nn

import pytorchrl as prl
from pytorchrl import analysis
from pytorchrl.agent.actors.distributions import check_mask
from pytorchrl.agent.algorithms import Algorithm
from pytorchrl.agent.options import Options, option
from pytorchrl.agent.schedules import cosine, exponential, linear
from pytorchrl.analysis.curves import on_grid
from pytorchrl.envs import make_factory
from pytorchrl.envs.testing import CountingEnv, MatchingGame
from pytorchrl.errors import PyTorchRLError
from pytorchrl.monitor.board import Board
from pytorchrl.scheme import CWorkerSet, GWorkerSet, SynchronousCollection
from pytorchrl.scheme.transport.codecs import register_codec
from pytorchrl.training.configuration import load_config, load_sweep
from tests.unit.learner.small_agents import agent_of

TINY = {"num_envs": 2, "num_steps": 16, "num_epochs": 1, "num_mini_batch": 1, "target_steps": 32, "progress": False,
        "seed": 1, "hidden_sizes": (4,)}
CARTPOLE, NAME = "CartPole-v1", "tests.unit.packaging.remedied_envs"
BOX, TWO = spaces.Box(-1.0, 1.0, (2,), np.float32), spaces.Discrete(2)
ZEROS = np.zeros(2, np.float32)


class Plain(gym.Env):
    """Environment whose results are class attributes."""

    observation_space, action_space = BOX, TWO
    first, result = (ZEROS, {}), (ZEROS, 0.0, False, False, {})

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.first

    def step(self, action):
        return self.result


def play(env_fn=Plain, options=None, **attributes):
    """Build environments with these attributes, and take two steps."""
    if attributes:
        env_fn = type("Own", (env_fn,), attributes)
    envs = prl.VecEnv.create_factory(env_fn, vec_env_size=2, **(options or {}))(seed=1)
    try:
        envs.reset()
        for _ in range(2):
            envs.step(np.zeros(envs.action_shape, envs.action_space.dtype))
    finally:
        envs.close()


def of_space(space, value):
    """Play in an environment with this observation space, which returns this observation."""
    play(observation_space=space, first=(value, {}), result=(value, 0.0, False, False, {}))


def with_mask(space, mask):
    """Play in an environment with these actions, which returns this mask."""
    info = {"action_mask": mask}
    play(action_space=space, first=(ZEROS, info), result=(ZEROS, 0.0, False, False, info))


def game(env_fn=MatchingGame, **options):
    envs = prl.MultiAgentVecEnv.create_factory(env_fn, vec_env_size=1, **options)(seed=1)
    try:
        envs.reset()
        for _ in range(2):
            envs.step({policy: np.zeros(2, np.int64) for policy in envs.observation_space})
    finally:
        envs.close()


class NoReward(MatchingGame):
    """Game whose `step` returns no reward for an agent that acted."""

    def step(self, actions):
        obs, rewards, *rest = super().step(actions)
        return obs, {"agent_0": rewards["agent_0"]}, *rest


@functools.cache
def envs_of(env=CountingEnv, size=2):
    return prl.VecEnv.create_factory(env, vec_env_size=size)


def actor_of(envs=None, cls=prl.OnPolicyActor, **options):
    envs = envs or envs_of()
    return cls.create_factory(envs.observation_space, envs.action_space, **{"hidden_sizes": (4,), **options})


def scheme(**options):
    """Build a scheme; parts have the names of its arguments."""
    given = {"algo_factory": prl.PPO.create_factory(num_mini_batch=1), "actor_factory": actor_of(),
             "storage_factory": prl.GAEBuffer.create_factory(8), "train_envs_factory": envs_of(), "seed": 1}
    return prl.Scheme(**{**given, **options})


def run(function, **options):
    """Call a function with a started scheme, and stop it."""
    built = scheme(**options)
    try:
        built.start()
        function(built)
    finally:
        built.stop()


def at_worker(function):
    """Call a function with the gradient worker of a started scheme."""
    run(lambda built: function(built.update_worker.local_worker))


Q_PARTS = {"algo_factory": prl.DQN.create_factory(start_steps=4, mini_batch_size=2),
           "storage_factory": prl.ReplayBuffer.create_factory(1000, rollout_size=8)}


def save(folder, **options):
    """Save the model of a learner that has evaluated nothing."""
    with prl.Learner(scheme(), target_steps=16, progress=False, log_dir=folder) as learner:
        learner.step()
        learner.save_model(**options)


def in_processes(env_fn):
    return scheme(num_col_workers=2, runtime="processes", train_envs_factory=envs_of(env_fn))


def collectors(**options):
    return CWorkerSet.create_factory(2, *list(scheme().agent.as_dict().values())[:4], **options)


def q_scheme(**options):
    return scheme(**{**Q_PARTS, "actor_factory": actor_of(cls=prl.QActor), **options})


SHARDS = {"col_communication": "asynchronous", "num_replay_workers": 2}


def team_envs():
    return prl.MultiAgentVecEnv.create_factory(MatchingGame, policy_of="independent")


def team(algorithm=None, **options):
    return prl.multi_agent(team_envs(), **{
        "algorithms": algorithm or prl.PPO.create_factory(num_mini_batch=1),
        "actors": prl.OnPolicyActor.create_factory, "storages": prl.GAEBuffer.create_factory(8), **options})


def game_actor(cls):
    return cls.create_factory(MatchingGame().observation_space("agent_0"), spaces.Discrete(3))


def changed_team(name, value):
    """Change a parameter of two policies while they train."""
    built = prl.Scheme(*team(), team_envs(), seed=1)
    try:
        built.start()
        built.update_algorithm_parameter(name, value)
    finally:
        built.stop()


def at_team(function):
    """Call a function with the gradient worker of a started scheme of two policies."""
    built = prl.Scheme(*team(), team_envs(), seed=1)
    try:
        function(built.start().local_worker)
    finally:
        built.stop()


def continued(**options):
    """Load the state of APPO with a target network into one with other options."""
    states = [prl.APPO.create_factory(**own)(device="cpu", actor=actor_of()(device="cpu", seed=0), seed=0)
              for own in ({"target_network": True}, options)]
    states[1].load_state_dict(states[0].state_dict())


def two_boards(folder, port=0):
    """Serve a directory of runs on two ports; `port` is added to that of the first one."""
    with Board(folder) as first, Board(folder, first.server_port if port is None else port):
        pass


class OwnPolicy(prl.QActor):
    """Actor that chooses no action outside of training."""

    best_actions = prl.QActor.__mro__[2].best_actions


def policy_of(cls):
    from pytorchrl.agent.policy import Policy

    policy = Policy(cls.create_factory(BOX, TWO)(), agent_of("ppo").agent.test_envs_factory.raw_spaces)
    return policy(torch.zeros(1, 2))


def act_with(**changes):
    agent = agent_of("ppo")
    envs = agent.agent.play_envs
    agent = prl.training.training.TrainedAgent(
        agent=replace(agent.agent, test_envs_factory=replace(envs, **changes)), acting_state=agent.acting_state, seed=1)
    return agent.act(np.zeros(4, np.float32))


def see_groups(space=None, **options):
    space = spaces.Dict({"near": BOX, "far": BOX}) if space is None else space
    return prl.OnPolicyActor.create_factory(space, TWO, **options)(device="cpu", seed=0)


class Movers:
    """Environments that are stepped at once, with a space of actions under a given name."""

    def __init__(self, num_envs, **named):
        self.num_envs, self.device = num_envs, "cpu"
        vars(self).update({name: spaces.Box(-1, 1, shape, np.float32) for name, shape in named.items()})

    def reset(self, seed=None):
        return torch.zeros(self.num_envs, 3)

    def step(self, actions):
        raise NotImplementedError


class Headed(prl.OnPolicyActor):
    """An actor with a value head of several layers."""

    def build_networks(self, generator):
        super().build_networks(generator)
        self.value_head = torch.nn.Sequential(self.value_head)


def explore(actor):
    return prl.PPO.create_factory(intrinsic_reward="rnd")(actor=actor.create_factory(BOX, TWO)(seed=0), seed=0)


def see_images(extractor):
    images = spaces.Box(0, 1, (3, 20, 20), np.float32)
    return prl.OnPolicyActor.create_factory(images, TWO, feature_extractor=extractor)(device="cpu", seed=0)


def own_options(**annotated):
    """Define options of an actor, without a decorator unless `dataclass` is given."""
    decorate = annotated.pop("dataclass", lambda cls: cls)
    fields = {"width": option(3, help="Width."), **annotated}
    own = type("Options", (prl.OnPolicyActor.Options,), fields)
    cls = type("OwnActor", (prl.OnPolicyActor,), {"Options": decorate(own)})
    return cls.create_factory(BOX, TWO)


@dataclass(frozen=True, kw_only=True)
class First(Options):
    """Options with a width of 1."""

    width: int = option(1, help="Width.")


@dataclass(frozen=True, kw_only=True)
class Second(Options):
    """Options with a width of 2."""

    width: int = option(2, help="Width.")


def joined(**fields):
    return dataclass(frozen=True, kw_only=True)(type("Both", (First, Second), fields))


class Reading(prl.OnPolicyActor):
    """Actor that reads no option of its networks."""

    def build_networks(self, generator):
        self.policy_head, self.value_head = nn.Linear(4, 2), nn.Linear(4, 1)

    def policy_features(self, obs, rhs, done):
        return obs["obs"], {}

    value_features = policy_features


class ReadingSizes(Reading):
    """Actor that reads `hidden_sizes`."""

    def build_networks(self, generator):
        assert self.options.hidden_sizes
        super().build_networks(generator)


class Unequal(prl.PPO):
    """PPO with a term of the loss that has no weight."""

    def terms(self, evaluated, batch, parameters):
        terms, measures = super().terms(evaluated, batch, parameters)
        return {**terms, "more": evaluated.value}, measures


class Equal(Unequal):
    """PPO with a weight for its own term."""

    def loss_weights(self, parameters):
        return {**super().loss_weights(parameters), "more": 0.1}


def step_of(algorithm):
    run(prl.Scheme.step, algo_factory=algorithm.create_factory(num_mini_batch=1))


def saved(folder, algorithm="ppo", **options):
    """Return the path of a saved model of an algorithm with these options."""
    path, given = str(folder / "model.pt"), TINY | options
    if algorithm == "dqn":
        given = {"target_steps": 4, "progress": False, "hidden_sizes": (4,)}
    prl.train(algorithm, CountingEnv, **given).save(path)
    return path


def load_into(folder, given, **options):
    return actor_of(checkpoint=saved(folder, **given), **options)(device="cpu", seed=0)


def named(cls, name):
    return prl.algorithm(name, actor=prl.OnPolicyActor, storage=prl.GAEBuffer)(cls)


def rows(values):
    return np.array(values)


class Ragged(Plain):
    """Environment whose mask has another length than that of the environment before it."""

    number = 0

    def reset(self, **options):
        type(self).number += 1
        return ZEROS, {"action_mask": np.ones(2 + type(self).number % 2, bool)}


class Lists(gym.vector.SyncVectorEnv):
    """Vector environment that returns lists."""

    def __init__(self, num_envs):
        super().__init__([CountingEnv] * num_envs)

    def step(self, actions):
        obs, *others = super().step(actions)
        return (self.form(obs), *others)

    form = list


class NumpyLists(Lists):
    """Vector environment that returns arrays."""

    form = staticmethod(np.asarray)


def closed(**options):
    """Step environments that were closed."""
    envs = prl.VecEnv.create_factory(CountingEnv, vec_env_size=1, **options)(seed=1)
    envs.reset()
    envs.close()
    envs.step(np.zeros(1, np.int64))


class NoFinish(prl.PPO):
    """PPO that does not finish its rollouts."""

    def finish_rollout(self, rollout):
        pass


class Finish(prl.PPO):
    """PPO that finishes its rollouts."""

    def finish_rollout(self, rollout):
        super().finish_rollout(rollout)


def recorded(path, **options):
    """Run a scheme on the simulated runtime for a step."""
    run(prl.Scheme.step, num_col_workers=2, runtime="simulated", **options)
    return path


def replayed(path, target_steps=1, **options):
    built = scheme(num_col_workers=2, replay=str(path), **options)
    try:
        built.start(target_steps)
    finally:
        built.stop()


def in_two_runs(folder, **options):
    """Build a second learner in a directory that a first one uses."""
    with prl.Learner(scheme(), target_steps=16, progress=False, log_dir=folder) as first:
        first.step()
        with prl.Learner(scheme(), target_steps=16, progress=False, **{"log_dir": folder, **options}) as second:
            second.step()


def learner_that(function, **options):
    with prl.Learner(scheme(), target_steps=16, progress=False, **options) as learner:
        learner.train()
        function(learner)


def train_in(path, **options):
    return prl.train("ppo", CountingEnv, log_dir=path, **TINY, **options)


def toml(folder, text, load=load_config, **options):
    path = folder / "run.toml"
    path.write_text('algorithm = "ppo"\nenv = "CartPole-v1"\n' + text)
    return load(path, **options)


def file_calls(folder):
    """Return calls like those of `calls`, which read and write files in a folder."""
    one, record = folder / "runs" / "one", folder / "record.jsonl"
    train_in(one)
    link, target = folder / "linked", folder / "target.jsonl"
    link.mkdir()
    (link / "metrics.jsonl").symlink_to(target)
    sweep = "[sweep]\nlr = [1e-3, 1e-4]\nseed = [1, 2]\n"
    return [
        (lambda: train_in(one), lambda: train_in(folder / "other"), lambda: train_in(f"{folder}/runs/"),
         lambda: train_in(one, overwrite=True), lambda: train_in(one, resume=True)),
        (lambda: prl.load(one / "run.json"), lambda: prl.load(one)),
        (lambda: prl.load(folder / "runs"), lambda: prl.load(one)),
        (lambda: load_config(one / "run.json"), lambda: load_config(Path(prl.train(
            "ppo", "pytorchrl.envs.testing:CountingEnv", log_dir=folder / "named", **TINY).log_dir, "run.json"))),
        (lambda: train_in(f"{folder}/runs/", resume=True), lambda: train_in(one, resume=True)),
        (lambda: train_in(link), lambda: ((link / "metrics.jsonl").unlink(), train_in(link)),
         lambda: train_in(folder / "unlinked")),
        (lambda: in_two_runs(folder / "used"), lambda: in_two_runs(folder / "used1", log_dir=folder / "used2")),
        (lambda: learner_that(prl.Learner.save_checkpoint),
         lambda: learner_that(prl.Learner.save_checkpoint, log_dir=folder / "checkpointed")),
        (lambda: learner_that(lambda learner: (learner.stop(), learner.step())),
         lambda: learner_that(prl.Learner.stop)),
        (lambda: play(CountingEnv, {"log_dir": folder, "info_keywords": ("x",)})
         or play(CountingEnv, {"log_dir": folder}),
         lambda: play(CountingEnv, {"log_dir": folder / "monitors"}),
         lambda: play(CountingEnv, {"log_dir": folder, "info_keywords": ("x",)})),
        (lambda: two_boards(folder, None), lambda: two_boards(folder)),
        # Models
        (lambda: load_into(folder, {"hidden_sizes": (9,)}, normalize_obs=True),
         lambda: load_into(folder, {}, normalize_obs=True)),
        (lambda: load_into(folder, {}), lambda: load_into(folder, {}, normalize_obs=True)),
        (lambda: load_into(folder, {"normalize_obs": False}, normalize_obs=True),
         lambda: load_into(folder, {"normalize_obs": True}, normalize_obs=True)),
        (lambda: actor_of(cls=prl.QActor, checkpoint=saved(folder))(device="cpu", seed=0),
         lambda: actor_of(cls=prl.QActor, checkpoint=saved(folder, "dqn"))(device="cpu", seed=0)),
        # Records
        (lambda: recorded(record, record=str(record)) and recorded(record, record=str(record)),
         lambda: recorded(record, record=str(folder / "record2.jsonl")),
         lambda: record.unlink() or recorded(record, record=str(record))),
        (lambda: replayed(record, runtime="threads"), lambda: replayed(record)),
        (lambda: replayed(record, 16), lambda: replayed(record, 1)),
        (lambda: replayed(record, schedule_seed=1), lambda: replayed(record)),
        (lambda: replayed(record, col_fraction_workers=0.5), lambda: replayed(record)),
        (lambda: run(lambda built: built.resize(num_col_workers=3), num_col_workers=2, runtime="simulated",
                     record=str(folder / "record3.jsonl")),
         lambda: run(lambda built: built.resize(num_col_workers=3), num_col_workers=2, runtime="simulated")),
        # Configurations
        (lambda: toml(folder, "lr = 1e-3\n" + sweep), lambda: toml(folder, "lr = 1e-3\n"),
         lambda: toml(folder, sweep, load_sweep)),
        (lambda: toml(folder, sweep), lambda: toml(folder, sweep, load_sweep)),
        (lambda: toml(folder, sweep, load_sweep, max_runs=3),
         lambda: toml(folder, sweep.replace(", 2]", "]"), load_sweep, max_runs=3),
         lambda: toml(folder, sweep, load_sweep, max_runs=4)),
    ]


def calls(folder):
    """Return tuples: a wrong call, and the calls for which its error asks."""
    flat = spaces.Box(0, 255, (20, 20), np.uint8)
    lock = threading.Lock()
    two_leaves = spaces.Dict({"a/b": TWO, "a": spaces.Dict({"b": TWO})})
    values = {"a/b": 0, "a": {"b": 0}}
    return [
        # Results of environments
        (lambda: play(first=ZEROS), lambda: play(first=(ZEROS, {}))),
        (lambda: play(result=(ZEROS, 0.0, False, {})), play),
        (lambda: play(result=(ZEROS, np.zeros(1), False, False, {})),
         lambda: play(result=(ZEROS, float(np.zeros(())), False, False, {}))),
        (lambda: play(result=(ZEROS, 0.0, 1, False, {})), lambda: play(result=(ZEROS, 0.0, bool(1), False, {}))),
        (lambda: of_space(BOX, np.zeros(3, np.float32)), lambda: of_space(BOX, ZEROS),
         lambda: of_space(spaces.Box(-1.0, 1.0, (3,), np.float32), np.zeros(3, np.float32))),
        (lambda: of_space(flat, np.zeros((20, 20), np.float32)),
         lambda: of_space(flat, np.zeros((20, 20), np.float32).astype(np.uint8)),
         lambda: of_space(spaces.Box(0, 255, (20, 20), np.float32), np.zeros((20, 20), np.float32))),
        (lambda: of_space(spaces.Discrete(2), 2), lambda: of_space(spaces.Discrete(2), 1),
         lambda: of_space(spaces.Discrete(3), 2)),
        (lambda: of_space(two_leaves, values), lambda: of_space(spaces.Dict({"a": TWO, "b": TWO}), {"a": 0, "b": 0})),
        (lambda: with_mask(TWO, [1]), lambda: with_mask(TWO, [True, True])),
        (lambda: with_mask(TWO, [5, 1]), lambda: with_mask(TWO, np.array([1, 0], bool))),
        (lambda: play(result=(ZEROS, 0.0, False, False, {"action_mask": [True, True]})),
         lambda: with_mask(TWO, [True, True])),
        (lambda: play(observation_space=None), play),
        (lambda: play(CountingEnv, {"end_on_life_loss": True}), lambda: play(CountingEnv, {"end_on_life_loss": False}),
         lambda: play(Plain, {"end_on_life_loss": True}, first=(ZEROS, {"lives": 3}),
                      result=(ZEROS, 0.0, False, False, {"lives": 3}))),
        (lambda: play(Ragged), lambda: with_mask(TWO, [True, False])),
        (lambda: play(Lists), lambda: play(NumpyLists)),
        (closed, play),
        (lambda: closed(env_timeout_s=60.0), lambda: play(CountingEnv, {"env_timeout_s": 60.0})),
        (lambda: play("Unknown-v0"), lambda: play(CountingEnv),
         lambda: play(f"{NAME}:Known-v0")),
        (lambda: prl.train("ppo", "nowhere:Known-v0", **TINY), lambda: prl.train("ppo", f"{NAME}:Known-v0", **TINY)),
        (lambda: make_factory(CARTPOLE, policy_of="shared"), lambda: make_factory(CARTPOLE)),
        # Options of environments
        (lambda: play(CountingEnv, {"backend": "vector"}), lambda: play(CountingEnv, {"backend": "sync"})),
        (lambda: play(CountingEnv, {"env_kwargs": {"num_actions": 2, "mutex": lock}}),
         lambda: play(CountingEnv, {"env_kwargs": {"num_actions": 2}})),
        (lambda: envs_of(MatchingGame), game,
         lambda: prl.train("ppo", MatchingGame, policies="shared", **TINY)),
        # Order of calls
        (lambda: envs_of()(seed=1).step(np.zeros(2, np.int64)), play),
        (lambda: at_worker(lambda worker: worker.get_grads()),
         lambda: at_worker(lambda worker: (worker.get_data(), worker.get_grads())),
         lambda: at_worker(lambda worker: worker.step())),
        (lambda: at_worker(lambda worker: worker.apply_gradients()),
         lambda: at_worker(lambda worker: (worker.step(), worker.apply_gradients()))),
        (lambda: at_worker(lambda worker: worker.algo.apply_gradients()),
         lambda: at_worker(lambda worker: (worker.step(), worker.algo.apply_gradients()))),
        (lambda: run(lambda built: (built.stop(), built.step())), lambda: run(prl.Scheme.step)),
        (lambda: run(lambda built: (built.stop(), built.checkpoint())),
         lambda: run(lambda built: (built.checkpoint(), built.stop()))),
        (lambda: save(folder / "a", evaluated=True), lambda: save(folder / "b", evaluated=False)),
        (lambda: run(lambda built: built.start_evaluation(1)),
         lambda: run(lambda built: built.start_evaluation(1), test_envs_factory=envs_of())),
        (lambda: prl.Learner(scheme(), target_steps=32, eval_every=16, progress=False),
         lambda: prl.Learner(scheme(test_envs_factory=envs_of()), target_steps=32, eval_every=16, progress=False),
         lambda: prl.Learner(scheme(), target_steps=32, progress=False)),
        (lambda: prl.Learner(scheme(), target_steps=32, progress=False).save_model(),
         lambda: prl.Learner(scheme(), target_steps=32, progress=False, log_dir=folder / "m").save_model()),
        # Schemes
        (lambda: in_processes(lambda: lock and CountingEnv()),
         lambda: in_processes(lambda: threading.Lock() and CountingEnv())),
        (lambda: scheme(actor_factory=actor_of(envs_of("Acrobot-v1"))),
         lambda: scheme(actor_factory=actor_of(envs_of("Acrobot-v1")), train_envs_factory=envs_of("Acrobot-v1"))),
        (lambda: scheme(test_envs_factory=envs_of("Acrobot-v1")), lambda: scheme(test_envs_factory=envs_of())),
        (lambda: scheme(replay_proportion=1.0, replay_slots=2, col_communication="asynchronous", train_batch_size=64),
         lambda: scheme(replay_proportion=1.0, replay_slots=5, col_communication="asynchronous", train_batch_size=64),
         lambda: scheme(replay_proportion=1.0, replay_slots=2, col_communication="asynchronous", train_batch_size=16)),
        (lambda: scheme(**SHARDS), lambda: q_scheme(**SHARDS)),
        (lambda: q_scheme(alpha=0.5, **SHARDS),
         lambda: q_scheme(alpha=0.5, storage_factory=prl.PERBuffer.create_factory(1000, rollout_size=8), **SHARDS)),
        (lambda: q_scheme(alpha=0.5), q_scheme, lambda: q_scheme(prioritized=True, alpha=0.5, **SHARDS)),
        (lambda: prl.Scheme.appo(**scheme().agent.as_dict()), lambda: prl.Scheme.appo(**{
            **scheme().agent.as_dict(), "algo_factory": prl.APPO.create_factory(),
            "storage_factory": prl.VTraceBuffer.create_factory(8)})),
        (lambda: collectors(num_col_workers=3), collectors),
        (lambda: collectors(queue_size=2), lambda: GWorkerSet.create_factory(
            1, collectors(), queue_size=2, col_communication="asynchronous", col_execution="Parallel")),
        (lambda: run(lambda built: built.resize(num_col_workers=2)),
         lambda: run(lambda built: built.resize(num_col_workers=3), num_col_workers=2, runtime="threads")),
        (lambda: register_codec("own1", bytes, bytes, is_lossless=True, has_feedback=True),
         lambda: register_codec("own2", bytes, bytes, is_lossless=True),
         lambda: register_codec("own3", bytes, bytes, is_lossless=False, has_feedback=True)),
        (lambda: run(lambda built: built.resume(built.checkpoint())),
         lambda: run(lambda built: scheme().resume(built.checkpoint()))),
        (lambda: run(lambda built: built.update_algorithm_parameter("lr", abs)),
         lambda: run(lambda built: built.update_algorithm_parameter("lr", linear(1e-3, 0.0))),
         lambda: run(lambda built: built.update_algorithm_parameter("lr", [(0, 1e-3), (1_000_000, 0.0)]))),
        (lambda: scheme(collection=SynchronousCollection(), col_fraction_workers=0.5),
         lambda: scheme(collection=SynchronousCollection(col_fraction_workers=0.5, num_col_workers=2)),
         lambda: scheme(col_fraction_workers=0.5, num_col_workers=2)),
        # Several policies
        (lambda: team({"agent_0": prl.PPO.create_factory(), "agent_1": prl.DQN.create_factory()},
                      actors={"agent_0": game_actor(prl.OnPolicyActor), "agent_1": game_actor(prl.QActor)},
                      storages={"agent_0": prl.GAEBuffer.create_factory(8),
                                "agent_1": prl.ReplayBuffer.create_factory(80)}), team),
        (lambda: team(trainable=[]), lambda: team(trainable=["agent_0"])),
        (lambda: team(prl.PPO.create_factory(target_kl=0.1)), team),
        (lambda: team(prl.PPO.create_factory(intrinsic_reward="rnd")), team),
        (lambda: prl.APPO.create_factory(intrinsic_reward="rnd"),
         lambda: prl.PPO.create_factory(intrinsic_reward="rnd")),
        (lambda: explore(Headed), lambda: explore(prl.OnPolicyActor)),
        (lambda: team(prl.PPO.create_factory(mini_batch_size=4)),
         lambda: team(prl.PPO.create_factory(num_mini_batch=2))),
        (lambda: changed_team("lrr", 1e-3), lambda: changed_team("lr", 1e-3),
         lambda: changed_team("agent_0/lr", 1e-3)),
        (lambda: game("json"), game),
        (lambda: game(MatchingGame()), game),
        (lambda: game(agents={"a": ("agent_0",)}), game),
        (lambda: game(NoReward), game),
        (lambda: prl.Scheme(*team(), envs_of()), lambda: prl.Scheme(*team(), team_envs())),
        (lambda: at_team(lambda worker: worker.compute_gradients({"obs": torch.zeros(1)}, False)),
         lambda: at_team(lambda worker: worker.compute_gradients(worker.get_data(), False))),
        (lambda: make_factory(NAME, frame_stack=2), lambda: make_factory(NAME)),
        # Actors
        (lambda: act_with(raw_spaces=None), act_with),
        (lambda: policy_of(OwnPolicy), lambda: policy_of(prl.QActor)),
        (lambda: load_into(folder, {"hidden_sizes": (4,)}, hidden_size=9),
         lambda: load_into(folder, {}, normalize_obs=True)),
        (lambda: check_mask(torch.tensor([[False, False]])), lambda: check_mask(torch.tensor([[False, True]]))),
        (lambda: prl.OffPolicyActor.create_factory(BOX, BOX)(device="cpu", seed=0).act(
            {"obs": torch.zeros(1, 2)}, mask=torch.ones(1, 2, dtype=torch.bool)),
         lambda: prl.OffPolicyActor.create_factory(BOX, BOX)(device="cpu", seed=0).act({"obs": torch.zeros(1, 2)})),
        (lambda: actor_of(cls=Reading)(device="cpu", seed=0), lambda: actor_of(cls=ReadingSizes)(device="cpu", seed=0)),
        (lambda: prl.OffPolicyActor.create_factory(BOX, TWO, policy="gaussian"),
         lambda: prl.OffPolicyActor.create_factory(BOX, TWO)),
        (lambda: prl.QActor.create_factory(BOX, TWO, norm="layer", hidden_sizes=()),
         lambda: prl.QActor.create_factory(BOX, TWO, hidden_sizes=())),
        (lambda: prl.MPO.create_factory(dual_solver="exact", compile=True),
         lambda: prl.MPO.create_factory(compile=True), lambda: prl.MPO.create_factory(dual_solver="exact")),
        (lambda: prl.MPO.create_factory(sample_action_num=3)(
            actor=prl.OffPolicyActor.create_factory(BOX, TWO)(device="cpu", seed=0), seed=0),
         lambda: prl.MPO.create_factory()(
             actor=prl.OffPolicyActor.create_factory(BOX, TWO)(device="cpu", seed=0), seed=0)),
        (lambda: prl.OnPolicyActor(BOX), lambda: prl.OnPolicyActor.create_factory(BOX, TWO)(device="cpu", seed=0)),
        (lambda: prl.PPO.create_factory(3e-4), lambda: prl.PPO.create_factory(lr=3e-4)),
        (lambda: see_images("cnn"), lambda: see_images("mlp")),
        (lambda: see_groups(obs_groups={"actor": ["near"]}, shared_policy_value_network=True),
         lambda: see_groups(obs_groups={"actor": ["near"]}), lambda: see_groups(shared_policy_value_network=True)),
        (lambda: see_groups(BOX, obs_groups={"actor": ["obs"]}), lambda: see_groups(BOX),
         lambda: see_groups(obs_groups={"actor": ["near"]})),
        (lambda: see_groups(obs_groups={"actor": [], "critic": ["far"]}),
         lambda: see_groups(obs_groups={"critic": ["far"]})),
        (lambda: prl.VecEnv.create_factory(lambda num_envs: Movers(num_envs, action_space=(num_envs, 2))),
         lambda: prl.VecEnv.create_factory(lambda num_envs: Movers(num_envs, single_action_space=(2,)))),
        # Own classes
        (lambda: step_of(Unequal), lambda: step_of(Equal)),
        (lambda: step_of(NoFinish), lambda: step_of(Finish)),
        (lambda: step_of(type("Undeclared", (prl.PPO,), {"learns_from": None})), lambda: step_of(prl.PPO)),
        (lambda: step_of(type("Actorless", (prl.PPO,), {"actor_class": None})),
         lambda: step_of(type("WithActor", (prl.PPO,), {"actor_class": prl.OnPolicyActor}))),
        (joined, lambda: joined(__annotations__={"width": int}, width=option(3, help="Width."))),
        (lambda: own_options(__annotations__={"width": int}),
         lambda: own_options(__annotations__={"width": int}, dataclass=dataclass(frozen=True, kw_only=True))),
        (own_options, lambda: own_options(__annotations__={"width": int},
                                          dataclass=dataclass(frozen=True, kw_only=True))),
        (lambda: prl.train(Algorithm, CountingEnv, **TINY),
         lambda: prl.train(prl.PPO, CountingEnv, **TINY)),
        (continued, lambda: continued(target_network=True)),
        # Storages
        (lambda: prl.SequenceBuffer.create_factory(1000, length=4, period=9),
         lambda: prl.SequenceBuffer.create_factory(1000, length=4, period=4)),
        # Values and analysis
        (lambda: exponential(1e-3, 0.0), lambda: linear(1e-3, 0.0), lambda: cosine(1e-3, 0.0)),
        (lambda: analysis.iqm([[np.nan], [1.0]]), lambda: analysis.iqm([[1.0]])),
        (lambda: analysis.estimate(analysis.difference(analysis.iqm), rows([[1.0], [2.0]]), rows([[1.0]]), paired=True),
         lambda: analysis.estimate(analysis.difference(analysis.iqm), rows([[1.0], [2.0]]), rows([[1.0]]),
                                   paired=False)),
        (lambda: analysis.required_seeds(1e-9, 1.0), lambda: analysis.required_seeds(1.0, 1.0)),
        (lambda: on_grid([([0, 1], [0, 1]), ([5, 6], [0, 1])]), lambda: on_grid([([0, 1], [0, 1])])),
    ]


def error_of(call, *arguments):
    """Make a call; return the text of its error, or None."""
    try:
        call(*arguments)
    except PyTorchRLError as error:
        return str(error)
    return None


def problems_with_calls(found_calls, messages):
    """Make calls; add the errors to `messages`, and return what did not go as expected."""
    found = []
    for wrong, *right in found_calls:
        code = wrong.__code__
        message, place = error_of(wrong), f"{Path(code.co_filename).name}:{code.co_firstlineno}"
        messages.append(message or "")
        if message is None:
            found.append(f"{place}: accepted")
        found += [f"{place}: {message}; what it asks for: {error}" for fix in right if (error := error_of(fix))]
    return found
