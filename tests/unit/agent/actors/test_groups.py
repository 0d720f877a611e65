"""Tests of `obs_groups`: the policy depends only on the leaves of its group, and critics only on those of theirs."""

from __future__ import annotations

import functools
import json

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

import pytorchrl as prl
from pytorchrl.agent.actors import OffPolicyActor, OnPolicyActor, QActor
from pytorchrl.agent.actors.trunk import Trunk
from pytorchrl.cli import main
from pytorchrl.errors import CheckpointError, ConfigError
from pytorchrl.training.training import make_learner

BOX = functools.partial(spaces.Box, -1.0, 1.0, dtype=np.float32)
SPACE = spaces.Dict({
    "sensors": BOX((3,)), "hidden": spaces.Dict({"place": BOX((2,)), "kind": spaces.Discrete(3)}),
    "command": spaces.Tuple((BOX((2,)), spaces.MultiBinary(2)))})
GROUPS = {"actor": ["sensors", "command/0"], "critic": ["hidden", "sensors"]}
ONLY_ACTOR, ONLY_CRITIC, BOTH = ["command/0"], ["hidden/place", "hidden/kind"], ["sensors"]
ON_POLICY = ["ppo", "a2c", "impala", "appo"]
OFF_POLICY = ["sac", "td3", "ddpg"]
SMALL = {"num_envs": 8, "num_steps": 16, "hidden_sizes": (8,), "progress": False, "tensorboard": False, "seed": 3,
         "target_steps": 400}


class Hidden(gym.Env):
    """An environment with a nested observation, whose reward depends on a part that only critics see."""

    observation_space = SPACE

    def __init__(self, is_discrete=True):
        self.action_space = spaces.Discrete(3) if is_discrete else BOX((2,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 8
        return self._observe(), {}

    def step(self, action):
        reward = float(self.place[0]) + float(np.sum(action))
        self.left -= 1
        return self._observe(), reward, self.left == 0, False, {}

    def _observe(self):
        draw = functools.partial(self.np_random.uniform, -1, 1)
        self.place = draw(size=2).astype(np.float32)
        return {"sensors": draw(size=3).astype(np.float32),
                "hidden": {"place": self.place, "kind": np.int64(self.np_random.integers(3))},
                "command": (draw(size=2).astype(np.float32), self.np_random.integers(0, 2, 2, dtype=np.int8))}


CONTINUOUS = functools.partial(Hidden, is_discrete=False)


def rows(space, *lead, seed=0):
    rng = np.random.default_rng(seed)
    return {leaf: torch.as_tensor(rng.normal(size=(*lead, *own.shape)).astype(np.float32)
                                  if own.dtype == np.float32 else rng.integers(0, 2, (*lead, *own.shape)))
            for leaf, own in space.items()}


def changed(obs, leaves, seed=9):
    """Return the observations with other values of some leaves."""
    other = {leaf: 1 - value if value.dtype == torch.int64 else value + torch.rand(
        value.shape, generator=torch.Generator().manual_seed(seed)) for leaf, value in obs.items()}
    return {leaf: other[leaf] if leaf in leaves else value for leaf, value in obs.items()}


def gradients(outputs, parameters):
    grads = torch.autograd.grad(outputs.sum(), parameters, allow_unused=True)
    return [torch.zeros_like(own) if grad is None else grad for own, grad in zip(parameters, grads, strict=True)]


def equal(one, other):
    return all(map(torch.equal, one, other))


@pytest.mark.parametrize("normalize_obs", [False, True])
@pytest.mark.parametrize("recurrent_net", [None, "gru", "lstm"])
def test_a_leaf_affects_only_the_network_that_sees_it(recurrent_net, normalize_obs):
    actor = OnPolicyActor.create_factory(SPACE, spaces.Discrete(3), obs_groups=GROUPS, recurrent_net=recurrent_net,
                                         normalize_obs=normalize_obs, policy_gain=1.0)(device="cpu", seed=1)
    length = () if recurrent_net is None else (4,)
    obs, done = rows(actor.options.observation_space, *length, 5), torch.zeros(*length, 5, dtype=torch.bool)
    rhs, action = actor.initial_states(5), torch.zeros(*length, 5, dtype=torch.int64)

    def outputs(obs):
        evaluated = actor.evaluate_all(obs, rhs, done, action)
        of_policy, of_value = [*actor.policy.parameters(), *actor.policy_head.parameters()], [*actor.value.parameters()]
        return [[evaluated.logp, evaluated.dist_params, *gradients(evaluated.logp, of_policy)],
                [evaluated.value, *gradients(evaluated.value, of_value)]]
    policy, value = outputs(obs)
    for leaves, affects in ((ONLY_CRITIC[:1], "value"), (ONLY_CRITIC[1:], "value"), (ONLY_ACTOR, "policy"),
                            (["command/1"], "nothing"), (BOTH, "both")):
        other_policy, other_value = outputs(changed(obs, leaves))
        assert equal(policy, other_policy) is (affects in ("value", "nothing")), leaves
        assert equal(value, other_value) is (affects in ("policy", "nothing")), leaves
    first = {leaf: value if recurrent_net is None else value[0] for leaf, value in obs.items()}
    with torch.inference_mode():
        drawn = [actor.act(seen, rhs, done.flatten()[:5], generator=torch.Generator().manual_seed(0))[0]
                 for seen in (first, changed(first, ONLY_CRITIC))]
    assert torch.equal(*drawn)


@pytest.mark.parametrize(("action_space", "policy"), [
    (BOX((2,)), "stochastic"), (BOX((2,)), "deterministic"), (spaces.Discrete(3), "stochastic")],
    ids=["gaussian", "deterministic", "discrete"])
def test_a_leaf_affects_only_the_policy_or_the_critics_that_see_it(action_space, policy):
    actor = OffPolicyActor.create_factory(
        SPACE, action_space, policy=policy, obs_groups=GROUPS, normalize_obs=True)(device="cpu", seed=1)
    obs = rows(actor.options.observation_space, 5)
    action = torch.zeros(5, *action_space.shape, dtype=torch.int64 if actor.is_discrete else torch.float32)

    def outputs(obs):
        chosen, scores = actor.policy(actor.normalize(obs)), actor.get_q_scores(obs, action)
        return [[actor.act(obs, True), chosen, *gradients(chosen, [*actor.policy.parameters()])],
                [scores, *gradients(scores, [*actor.critics.parameters()])]]
    of_policy, of_critics = outputs(obs)
    for leaves, affects in ((ONLY_CRITIC, "critics"), (ONLY_ACTOR, "policy"), (BOTH, "both")):
        other_policy, other_critics = outputs(changed(obs, leaves))
        assert equal(of_policy, other_policy) is (affects == "critics"), leaves
        assert equal(of_critics, other_critics) is (affects == "policy"), leaves


@pytest.mark.parametrize(("algorithm", "compile"), [
    *((algorithm, False) for algorithm in (*ON_POLICY, *OFF_POLICY)),
    *(pytest.param(algorithm, True, marks=[pytest.mark.compiled, pytest.mark.slow]) for algorithm in ("ppo", "sac")),
    *(pytest.param(algorithm, True, marks=[pytest.mark.compiled, pytest.mark.thorough])
      for algorithm in ("a2c", "impala", "appo", "td3", "ddpg"))])
def test_every_algorithm_with_a_critic_trains_with_groups(algorithm, compile):
    env = CONTINUOUS if algorithm in OFF_POLICY else Hidden
    options = {} if algorithm in ON_POLICY else {"start_steps": 100, "num_envs": 2, "num_steps": 8}
    agent = prl.train(algorithm, env, compile=compile, obs_groups={"actor": ["sensors"], "critic": ["hidden"]},
                      normalize_obs=True, **{**SMALL, **options})
    assert agent.summary["updates"] > 0
    (parts,) = agent._acting.parts.values()
    actor = parts.build(0).actor
    policy, critic = (actor.policy, actor.value) if algorithm in ON_POLICY else (
        actor.policy.trunk, actor.critics[0].trunk)
    assert (policy._leaves, critic._leaves) == (("sensors",), ("hidden/kind", "hidden/place"))
    assert policy.extractor.layers[0].in_features == 3  # one leaf is processed like a vector: there is no joint network
    assert agent.act({"sensors": np.zeros(3, np.float32)}) is not None


def test_groups_that_are_left_out_have_all_leaves_and_change_no_weights():
    build = functools.partial(OnPolicyActor.create_factory, SPACE, spaces.Discrete(3))
    plain, part = build()(device="cpu", seed=1), build(obs_groups={"critic": ["hidden"]})(device="cpu", seed=1)
    assert equal(plain.policy.parameters(), part.policy.parameters())
    everything = build(obs_groups={"actor": list(plain.options.observation_space)})(device="cpu", seed=1)
    assert equal(plain.parameters(), everything.parameters())


class Recorded(nn.Module):
    """A feature extractor that keeps the spaces and the shapes of the observations that it was given."""

    out_features = 4

    def __init__(self, space):
        super().__init__()
        self.space, self.seen = space, []
        self.layer = nn.LazyLinear(4)

    def forward(self, obs):
        self.seen.append(set(obs) if isinstance(obs, dict) else tuple(obs.shape))
        leaves = obs.values() if isinstance(obs, dict) else [obs]
        return self.layer(torch.cat([leaf.float().reshape(len(leaf), -1) for leaf in leaves], -1))


def test_feature_extractors_of_users_see_only_the_leaves_of_their_group():
    actor = OnPolicyActor.create_factory(
        SPACE, spaces.Discrete(3), obs_groups={"actor": ["sensors"], "critic": ["hidden"]},
        feature_extractor=Recorded, recurrent_net="gru")(device="cpu", seed=1)
    done = torch.zeros(4, 5, dtype=torch.bool)
    actor.evaluate_all(rows(actor.options.observation_space, 4, 5), actor.initial_states(5), done, done.long())
    assert actor.policy.extractor.space == SPACE["sensors"]
    assert set(actor.value.extractor.space) == {"hidden/place", "hidden/kind"}
    assert actor.policy.extractor.seen[-1] == (20, 3)
    assert actor.value.extractor.seen == [{"hidden/place", "hidden/kind"}] * 3


def test_images_are_not_shared_between_groups():
    space = spaces.Dict({"camera": spaces.Box(0, 255, (3, 36, 36), np.uint8), "state": BOX((4,))})
    actor = OnPolicyActor.create_factory(space, spaces.Discrete(3), feature_extractor="cnn", obs_groups={
        "actor": ["camera"], "critic": ["state"]})(device="cpu", seed=1)
    assert not actor.is_shared
    assert (actor.policy.out_features, actor.value.out_features) == (512, 64)
    found = actor.evaluate_all(rows(actor.options.observation_space, 5), {}, None, torch.zeros(5).long())
    assert found.value.shape == (5,)


@pytest.mark.parametrize(("groups", "message"), [
    ({}, r"must have the keys \['actor', 'critic'\] or one of them, got \{\}"),
    ({"policy": ["sensors"]}, r"must have the keys .* got \['policy'\]; the policy sees the leaves of 'actor'"),
    ({"actor": []}, r"obs_groups\['actor'\] must name at least one of the leaves .* leave 'actor' out"),
    ({"critic": ["hidn/place"]}, r"names 'hidn/place', but the leaves .*; did you mean 'hidden/place'"),
    ({"critic": ["hid"]}, r"names 'hid', but the leaves of an observation are \['command/0'"),
    ({"actor": "sensors"}, "obs_groups must be a mapping of strings to sequences of strings"),
    (["sensors"], "obs_groups must be a mapping of strings to sequences of strings")])
@pytest.mark.parametrize("kind", [OnPolicyActor, OffPolicyActor])
def test_wrong_groups_are_refused(kind, groups, message):
    with pytest.raises(ConfigError, match=message):
        kind.create_factory(SPACE, spaces.Discrete(3), obs_groups=groups)


def test_groups_without_an_effect_are_refused():
    with pytest.raises(ConfigError, match=r"needs observations with several leaves .* got \['obs'\]"):
        OnPolicyActor.create_factory(BOX((3,)), spaces.Discrete(3), obs_groups={"actor": ["obs"]})
    with pytest.raises(ConfigError, match="shared_policy_value_network=True contradicts obs_groups"):
        OnPolicyActor.create_factory(SPACE, spaces.Discrete(3), obs_groups=GROUPS, shared_policy_value_network=True)
    with pytest.raises(ConfigError, match=r"QActor has no option 'obs_groups'.*OnPolicyActor and OffPolicyActor"):
        QActor.create_factory(SPACE, spaces.Discrete(3), obs_groups=GROUPS)
    for algorithm in ("dqn", "r2d2"):
        with pytest.raises(ConfigError, match="obs_groups is an option of actors with a critic"):
            prl.train(algorithm, Hidden, obs_groups=GROUPS, **SMALL)


class Ignores(OnPolicyActor):
    """An actor whose networks see all leaves."""

    def build_networks(self, generator):
        self.policy, self.value = Trunk(self.options, generator), Trunk(self.options, generator)
        self.policy_head, self.value_head = nn.Linear(256, self.distribution.num_outputs), nn.Linear(256, 1)


class Reads(Ignores):
    """The same actor with groups."""

    def build_networks(self, generator):
        super().build_networks(generator)
        self.policy = Trunk(self.options, generator, spaces=self.options.group("actor"))


def test_an_actor_of_a_user_must_read_the_groups():
    assert Ignores.create_factory(SPACE, spaces.Discrete(3))(device="cpu", seed=1)
    with pytest.raises(ConfigError, match=r"Ignores.build_networks\(\) does not read obs_groups=.* no effect"):
        Ignores.create_factory(SPACE, spaces.Discrete(3), obs_groups=GROUPS)(device="cpu", seed=1)
    actor = Reads.create_factory(SPACE, spaces.Discrete(3), obs_groups=GROUPS)(device="cpu", seed=1)
    assert actor.policy._leaves == ("command/0", "sensors")


# Runs


OPTIONS = {"ppo": {}, "ppo-lstm": {"recurrent_net": "lstm", "recurrent_size": 5, "num_mini_batch": 2},
           "sac": {"start_steps": 100, "num_steps": 8}}


@functools.cache
def agent_of(name):
    return prl.train(name.partition("-")[0], CONTINUOUS if name == "sac" else Hidden, obs_groups=GROUPS,
                     normalize_obs=True, **{**SMALL, **OPTIONS[name]})


def without_hidden(obs):
    return {key: value for key, value in obs.items() if key != "hidden"}


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("name", ["ppo", "ppo-lstm", "sac"])
def test_act_needs_only_the_leaves_of_the_policy(name, deterministic):
    agent, memories = agent_of(name), [None, None]
    env = CONTINUOUS() if name == "sac" else Hidden()
    obs, _ = env.reset(seed=1)
    for _ in range(5):
        actions = []
        for index, seen in enumerate((obs, without_hidden(obs))):
            agent._acting.players["policy"]._algorithm.reseed(1)
            action = agent.act(seen, memories[index], deterministic=deterministic)
            if name == "ppo-lstm":
                action, memories[index] = action
            actions.append(action)
        np.testing.assert_array_equal(*actions)
        obs = env.step(actions[0])[0]
    batch = {"sensors": torch.zeros(2, 3), "command": (torch.zeros(2, 2), torch.zeros(2, 2, dtype=torch.int8))}
    policy = agent.policy
    assert len(policy(batch)[0] if policy.has_memory else policy(batch)) == 2
    for wrong, message in (({**obs, "other": 0}, "other"), ({"command": obs["command"]}, "sensors")):
        with pytest.raises(ConfigError, match=message):
            agent.act(wrong)
    assert agent.evaluate(2).return_mean == agent.evaluate(2).return_mean


@pytest.mark.parametrize("name", ["ppo", "ppo-lstm", "sac"])
def test_exported_policies_have_no_inputs_for_critics(tmp_path, name):
    agent = agent_of(name)
    (exported,) = agent.export(tmp_path / "policy.pt2", to="torch", checks=40)
    assert exported.num_observations >= 40
    files = {"policy.json": ""}
    torch.export.load(exported.path, extra_files=files)
    description = json.loads(files["policy.json"])
    names = [entry["name"] for entry in description["inputs"]]
    assert [own for own in names if not own.startswith("memory")] == ["command/0", "command/1", "sensors"]
    assert "hidden" not in description["observation_space"]


@pytest.mark.parametrize("name", ["ppo", "ppo-lstm", "sac"])
def test_a_resumed_run_with_groups_equals_the_uninterrupted_one(tmp_path, name):
    make = functools.partial(
        make_learner, name.partition("-")[0], CONTINUOUS if name == "sac" else Hidden, normalize_obs=True,
        obs_groups=GROUPS, checkpoint_every=256, **{**SMALL, **OPTIONS[name], "num_threads": 1, "target_steps": 1_000})
    with make(log_dir=tmp_path / "straight")[0] as learner:
        learner.train()
        straight = learner.scheme.acting_state()
    with make(log_dir=tmp_path / "cut")[0] as learner:
        while learner.env_steps < 700:
            learner.step()
    with make(log_dir=tmp_path / "cut", resume=True)[0] as learner:
        learner.start()
        assert 0 < learner.env_steps < 700
        learner.train()
        resumed = learner.scheme.acting_state()
    assert all(torch.equal(straight[key], resumed[key]) for key in straight)
    agents = [prl.load(tmp_path / run, trust=True) for run in ("straight", "cut")]
    assert agents[0].evaluate(3, seed=1).returns == agents[1].evaluate(3, seed=1).returns


def test_a_saved_model_of_other_groups_is_refused(tmp_path):
    agent = prl.train("ppo", Hidden, obs_groups=GROUPS, log_dir=tmp_path, **SMALL)
    model = str(tmp_path / "model.pt")
    prl.train("ppo", Hidden, obs_groups=GROUPS, checkpoint=model, **SMALL)
    with pytest.raises(CheckpointError, match=r"parameters, but this actor has .* the model was trained with"):
        prl.train("ppo", Hidden, obs_groups={"actor": ["sensors"]}, checkpoint=model, **SMALL)
    assert agent.summary["updates"] > 0


class Simulator:
    """An object with tensors, of the form of rsl_rl, with the groups `policy` and `privileged`."""

    num_envs, device = 4, "cpu"
    action_space = BOX((2,))

    def get_observations(self):
        return {"policy": torch.rand(4, 3), "privileged": torch.rand(4, 2)}

    reset = get_observations

    def step(self, actions):
        ends = torch.rand(4) < 0.1
        return self.get_observations(), actions.sum(-1), ends, {"time_outs": torch.zeros(4, dtype=torch.bool)}


@pytest.mark.parametrize("algorithm", ["ppo", "sac"])
def test_objects_with_tensors_have_groups(algorithm):
    options = {"start_steps": 64, "num_steps": 8} if algorithm == "sac" else {}
    agent = prl.train(algorithm, Simulator(), obs_groups={
        "actor": ["policy"], "critic": ["policy", "privileged"]}, **{**SMALL, **options, "num_envs": 4})
    assert agent.act({"policy": np.zeros(3, np.float32)}).shape == (2,)


def test_files_and_the_command_line_state_groups(tmp_path, capsys):
    groups = {"actor": ["sensors"], "critic": ["sensors", "hidden"]}
    (tmp_path / "run.toml").write_text(
        'algorithm = "ppo"\nenv = "tests.unit.agent.actors.test_groups:Hidden"\n'
        'obs_groups = {actor = ["sensors"], critic = ["sensors", "hidden"]}\n', encoding="utf-8")
    common = ["--num-envs", "2", "--num-steps", "32", "--target-steps", "64", "--seed", "1"]
    for index, start in enumerate((["--config", str(tmp_path / "run.toml"), "--trust"], [
            "ppo", "--env", "tests.unit.agent.actors.test_groups:Hidden", "--obs-groups", json.dumps(groups)])):
        log_dir = tmp_path / str(index)
        assert main(["train", *start, *common, "--log-dir", str(log_dir)]) == 0, capsys.readouterr()
        actor = prl.load(log_dir).agent.actor_factory
        assert actor.options.obs_groups == {group: tuple(names) for group, names in groups.items()}
