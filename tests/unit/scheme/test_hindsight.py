"""Test hindsight experience replay in schemes: functions of rewards, shards, runtimes, and refusals."""

from __future__ import annotations

import functools

import gymnasium as gym
import numpy as np
import pytest

from pytorchrl import (
    ASYNC,
    DDPG,
    DQN,
    SAC,
    TD3,
    MultiAgentVecEnv,
    OffPolicyActor,
    PERBuffer,
    QActor,
    ReplayBuffer,
    Scheme,
    VecEnv,
    load,
    multi_agent,
    train,
)
from pytorchrl.envs.tensors.maze import TorchPointMaze
from pytorchrl.envs.testing import ChangingAgents
from pytorchrl.errors import ConfigError, ContractError
from pytorchrl.scheme.replay.r_worker import RWorker

MAZE = "pytorchrl/TorchPointMaze-v0"


class Line(gym.Env):
    """A position in [0, 4] that actions move by -1, 0 or 1 toward a goal; the reward is `scale` there, otherwise 0."""

    def __init__(self, scale=1.0, limit=5):
        goal = gym.spaces.Box(0.0, 4.0, (1,), np.float32)
        self.observation_space = gym.spaces.Dict({
            "nested": gym.spaces.Dict({"position": goal}), "achieved_goal": goal, "desired_goal": goal})
        self.action_space = gym.spaces.Discrete(3)
        self.scale, self.limit = scale, limit

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.position, self.goal = self.np_random.integers(0, 5, (2, 1)).astype(np.float32)
        self.steps = 0
        return self.seen(), {}

    def step(self, action):
        self.position = np.clip(self.position + action - 1, 0.0, 4.0).astype(np.float32)
        self.steps += 1
        reward = float(self.compute_reward(self.position, self.goal, {}))
        return self.seen(), reward, False, self.steps >= self.limit, {}

    def compute_reward(self, achieved_goal, desired_goal, info):
        return self.scale * (np.abs(achieved_goal - desired_goal).sum(-1) < 0.5)

    def seen(self):
        return {"nested": {"position": self.position}, "achieved_goal": self.position, "desired_goal": self.goal}


class OldLine(Line):
    """An environment whose function works for single goals only."""

    def compute_reward(self, achieved_goal, desired_goal, info):
        return float(np.linalg.norm(achieved_goal - desired_goal) < 0.5)


class InfoLine(Line):
    """An environment whose reward depends on info."""

    def compute_reward(self, achieved_goal, desired_goal, info):
        return self.scale * info["factor"] * (np.abs(achieved_goal - desired_goal).sum(-1) < 0.5)

    def step(self, action):
        self.compute_reward = lambda achieved, desired, info: Line.compute_reward(self, achieved, desired, info)
        return super().step(action)


class WithoutGoals(gym.ObservationWrapper):
    """A wrapper that hides the goals."""

    def __init__(self, env):
        super().__init__(env)
        self.observation_space = env.observation_space["achieved_goal"]

    def observation(self, observation):
        return observation["achieved_goal"]


class WithoutFunction(gym.Env):
    """An environment with goals whose rewards cannot be computed outside of it."""

    def __init__(self):
        self.line = Line()
        self.observation_space, self.action_space = self.line.observation_space, self.line.action_space

    def reset(self, *, seed=None, options=None):
        return self.line.reset(seed=seed)

    def step(self, action):
        return self.line.step(action)


class Scaled(gym.RewardWrapper):
    """A wrapper that changes rewards, but not `compute_reward`."""

    def reward(self, reward):
        return 10.0 * reward + 3.0


class ScaledAlike(Scaled):
    """A wrapper that changes both."""

    def compute_reward(self, achieved_goal, desired_goal, info):
        return self.reward(self.env.get_wrapper_attr("compute_reward")(achieved_goal, desired_goal, info))


REPLAY = {"start_steps": 16, "update_every": 8, "num_updates": 2, "mini_batch_size": 16}


def agent_on(env=Line, cls=ReplayBuffer, size=200, of_envs=None, **storage):
    """Return a DQN agent with new goals on `Line` or another environment."""
    envs = VecEnv.create_factory(env, vec_env_size=2, **of_envs or {})
    actor = QActor.create_factory(envs.observation_space, envs.action_space, hidden_sizes=(8,))
    options = {"relabel": "future", "rollout_size": 4} | storage
    return DQN.create_factory(**REPLAY), actor, cls.create_factory(size, **options), envs


@pytest.fixture
def batches(monkeypatch):
    """Return the list of all batches that storages of this process draw."""
    found, sample = [], ReplayBuffer.sample

    @functools.wraps(sample)
    def watched(storage, batch_size):
        batch = sample(storage, batch_size)
        if batch is not None:
            found.append(batch)
        return batch
    monkeypatch.setattr(ReplayBuffer, "sample", watched)
    return found


def run(agent, num_updates=6, scheme=Scheme, **settings):
    """Make updates and stop."""
    built = scheme(*agent, **{"seed": 1} | settings)
    try:
        while built.version < num_updates:
            built.step()
    finally:
        built.stop()
    return built


def check_rewards(batches, scale=1.0, offset=0.0):
    """Check that the one-step rewards of batches of `Line` belong to the goals; return the share of reached goals."""
    reached = []
    for batch in batches:
        achieved, goal = batch.next_obs["achieved_goal"], batch.obs["desired_goal"]
        assert (goal == batch.next_obs["desired_goal"]).all()
        assert (batch.obs["nested/position"] == batch.obs["achieved_goal"]).all()
        assert ((goal >= 0.0) & (goal <= 4.0)).all()
        near = (achieved - goal).abs().sum(-1) < 0.5
        assert np.allclose(batch.ret.numpy(), scale * near.numpy() + offset)
        reached += near.tolist()
    return np.mean(reached)


PATTERNS = {
    "central": {}, "2 gradient workers": {"num_grad_workers": 2, "runtime": "threads"},
    "asynchronous": {"num_col_workers": 2, "col_communication": ASYNC, "runtime": "threads"},
    "all asynchronous": {"num_col_workers": 2, "col_communication": ASYNC, "num_grad_workers": 2,
                         "grad_communication": ASYNC, "runtime": "threads"},
    "simulated": {"num_col_workers": 2, "col_communication": ASYNC, "runtime": "simulated"},
}


@pytest.mark.parametrize("settings", PATTERNS.values(), ids=PATTERNS)
@pytest.mark.parametrize("cls", [ReplayBuffer, PERBuffer])
def test_rewards_are_those_of_the_environment_in_every_pattern(batches, cls, settings):
    run(agent_on(functools.partial(Line, 2.0), cls), **settings)
    assert check_rewards(batches, 2.0) > 0.3


def test_one_step_episodes_always_succeed(batches):
    run(agent_on(functools.partial(Line, limit=1), relabel_share=1.0))
    assert check_rewards(batches) == 1.0
    del batches[:]
    run(agent_on(functools.partial(Line, limit=1), relabel_share=0.1))
    assert check_rewards(batches) < 0.5


@pytest.mark.parametrize("runtime", ["simulated", "threads"])
def test_shards_receive_all_rollouts_of_a_worker(batches, monkeypatch, runtime):
    """Episodes of 5 steps span rollouts of 4 steps, which all go to the same shard."""
    sources, add = {}, RWorker.add

    @functools.wraps(add)
    def watched(worker, rollout, version):
        sources.setdefault(rollout.header.source, set()).add(worker.index_worker)
        return add(worker, rollout, version)
    monkeypatch.setattr(RWorker, "add", watched)
    scheme = run(agent_on(cls=PERBuffer, relabel_share=1.0), scheme=Scheme.apex, runtime=runtime, num_col_workers=3,
                 num_replay_workers=2, learning_starts=60, train_batch_size=16, max_replay_ratio=4.0, num_updates=8)
    assert scheme.settings["routing"] == "by_stream"
    assert len(sources) == 3
    assert all(len(shards) == 1 for shards in sources.values())
    assert check_rewards(batches) > 0.4


@pytest.mark.parametrize("settings", [
    {"num_col_workers": 2, "col_communication": ASYNC}, {"num_grad_workers": 2},
    {"num_col_workers": 2, "col_communication": ASYNC, "num_replay_workers": 2, "learning_starts": 40,
     "train_batch_size": 16}])
def test_processes(settings):
    run(agent_on(), runtime="processes", **settings)


@pytest.mark.parametrize("algo", [SAC, TD3, DDPG])
def test_every_algorithm_of_continuous_actions_learns_from_new_goals(batches, algo):
    envs = VecEnv.create_factory(MAZE, vec_env_size=4, max_episode_steps=6)
    options = {} if algo is SAC else {"policy": "deterministic"}
    actor = OffPolicyActor.create_factory(envs.observation_space, envs.action_space, hidden_sizes=(8,), **options)
    storage = ReplayBuffer.create_factory(400, rollout_size=4, relabel="future", relabel_share=1.0,
                                          goal_terminated=TorchPointMaze.compute_terminated)
    run((algo.create_factory(**REPLAY), actor, storage, envs))
    reached = np.concatenate([batch.ret.numpy() == 1.0 for batch in batches])
    assert reached.mean() > 0.5
    assert np.array_equal(np.concatenate([batch.discount.numpy() == 0.0 for batch in batches]), reached)


def test_transforms_and_wrappers_change_both_kinds_of_rewards(batches):
    run(agent_on(functools.partial(Line, 3.0), of_envs={"reward_transform": "sign"}))
    assert check_rewards(batches) > 0.3
    del batches[:]
    run(agent_on(of_envs={"wrappers": (ScaledAlike,), "reward_transform": 0.5}))
    assert check_rewards(batches, scale=5.0, offset=1.5) > 0.3
    with pytest.raises(ContractError, match=r"goal_reward returned 0 for .* but the reward of this step was 3"):
        run(agent_on(of_envs={"wrappers": (Scaled,)}))


def test_a_given_function_replaces_that_of_the_environment(batches):
    def reward(achieved, desired, info):
        return 3.0 * (np.abs(achieved - desired)[:, 0] < 0.5)
    run(agent_on(WithoutFunction, goal_reward=reward, of_envs={"reward_transform": 3.0}))
    assert check_rewards(batches, scale=3.0) > 0.3


@pytest.mark.parametrize(("agent", "text"), [
    (lambda: agent_on(WithoutFunction), "has no method compute_reward"),
    (lambda: agent_on("CartPole-v1"), "needs observations that are a Dict with 'achieved_goal' and 'desired_goal'"),
    (lambda: agent_on(of_envs={"wrappers": (WithoutGoals,)}), "needs observations that are a Dict"),
    (lambda: agent_on(OldLine), r"compute_reward must return one number for each of N goals.*axis=-1"),
    (lambda: agent_on(InfoLine), r"goal_reward raised .* an empty info: KeyError: 'factor'; give a function of goals"),
    (lambda: agent_on(goal_terminated=lambda achieved, desired, info: False), "goal_terminated must return one number"),
])
def test_agents_without_rewards_for_other_goals_are_refused_before_anything_starts(agent, text):
    with pytest.raises(ConfigError, match=text):
        Scheme(*agent())


@pytest.mark.parametrize(("wrong", "right"), [
    ({"env": WithoutFunction}, {"env": Line}), ({"env": WithoutFunction}, {"env": WithoutFunction, "goal_reward": 0}),
    ({"env": "CartPole-v1"}, {"env": "CartPole-v1", "relabel": None}), ({"env": OldLine}, {"env": Line}),
    ({"env": InfoLine}, {"env": InfoLine, "goal_reward": 0}),
    ({"env": Line, "of_envs": {"wrappers": (Scaled,)}}, {"env": Line, "of_envs": {"wrappers": (ScaledAlike,)}})])
def test_what_errors_advise_helps(wrong, right):
    given = {name: value if name != "goal_reward" else line_reward for name, value in right.items()}
    with pytest.raises((ConfigError, ContractError)):
        run(agent_on(**wrong))
    run(agent_on(**given))


def test_agents_with_memory_are_refused():
    options = {"num_envs": 2, "target_steps": 60, "hidden_sizes": (8,), "progress": False, **REPLAY}
    with pytest.raises(ConfigError, match="relabel='future' is for single transitions"):
        train("r2d2", Line, relabel="future", **options)
    with pytest.raises(ConfigError, match="relabel='future' is for single transitions"):
        train("r2d2", Line, relabel="future", kind="batch", num_replay_workers=1, **options)


def test_several_policies_are_refused():
    envs = MultiAgentVecEnv.create_factory(ChangingAgents, None, 2)
    parts = {relabel: multi_agent(
        envs, DQN.create_factory(**REPLAY), functools.partial(QActor.create_factory, hidden_sizes=(8,)),
        ReplayBuffer.create_factory(200, rollout_size=4, relabel=relabel)) for relabel in ("future", None)}
    with pytest.raises(ConfigError, match="relabel is for a single policy"):
        Scheme(*parts["future"], envs)
    run((*parts[None], envs))


@pytest.mark.parametrize("routing", ["random", "least_loaded"])
def test_routing_that_splits_episodes_is_refused(routing):
    with pytest.raises(ConfigError, match=r"would split episodes \(relabel\)"):
        Scheme.apex(*agent_on(), runtime="simulated", num_replay_workers=2, routing=routing)


def line_reward(achieved, desired, info):
    """Return the rewards of `Line`."""
    return Line().compute_reward(achieved, desired, info)


@pytest.mark.parametrize("options", [{"goal_reward": line_reward}, {"prioritized": True, "relabel_share": 0.5}])
def test_train_and_load(tmp_path, options):
    """A run can be loaded although a reader may not import the function of rewards, which acting does not need."""
    gym.register("Line-v0", entry_point=Line)
    try:
        agent = train("dqn", "Line-v0", relabel="final", target_steps=60, num_envs=2, hidden_sizes=(8,), seed=1,
                      log_dir=tmp_path / "run", progress=False, **REPLAY, **options)
        again = load(tmp_path / "run")
        assert again.evaluate(3).returns == agent.evaluate(3).returns
        assert again.agent.storage_factory.options.relabel == "final"
        assert again.agent.storage_factory.options.relabel_share == options.get("relabel_share", 0.8)
    finally:
        gym.registry.pop("Line-v0")
