"""Test environments with several agents: acting agents, last observations, and the returns of each policy."""

from __future__ import annotations

import csv
import sys

import gymnasium as gym
import numpy as np
import pytest

from pytorchrl import MultiAgentVecEnv
from pytorchrl.envs.testing import ChangingAgents, MatchingGame
from pytorchrl.errors import CallOrderError, ConfigError, EnvError, NonFiniteDataError, StoppedError

LIVES = ((0, 6), (0, 3), (2, 6))
POLICY_OF = {"agent_0": "early", "agent_1": "shared", "agent_2": "shared"}


def make(num_envs=2, env_fn=ChangingAgents, policy_of=POLICY_OF, mode="train", **options):
    factory = MultiAgentVecEnv.create_factory(
        env_fn, options.pop("env_kwargs", None), num_envs, policy_of=policy_of, **options)
    return factory(seed=3, mode=mode)


def actions_of(envs):
    return {policy: np.zeros(envs.num_envs * k, np.int64) for policy, k in (("early", 1), ("shared", 2))}


def test_factory_has_agents_and_spaces():
    factory = MultiAgentVecEnv.create_factory(ChangingAgents, vec_env_size=4, policy_of=POLICY_OF)
    assert factory.agents == {"early": ("agent_0",), "shared": ("agent_1", "agent_2")}
    assert factory.policies == ("early", "shared")
    assert factory.num_envs == 4
    assert factory.observation_space["shared"]["obs"].shape == (4,)
    assert factory.action_space["early"] == gym.spaces.Discrete(3)
    assert set(factory(seed=0).reset()[1].values()) == {None}


def test_one_policy_acts_for_all_agents_by_default():
    assert MultiAgentVecEnv.create_factory(ChangingAgents).agents == {"shared": ("agent_0", "agent_1", "agent_2")}


def test_policy_of_accepts_shared_and_independent():
    def agents(policy_of):
        return MultiAgentVecEnv.create_factory(MatchingGame, policy_of=policy_of).agents
    assert agents("shared") == agents(None) == {"shared": ("agent_0", "agent_1")}
    assert agents("independent") == {"agent_0": ("agent_0",), "agent_1": ("agent_1",)}


@pytest.mark.parametrize("truncate", [False, True])
def test_steps_are_valid_if_the_agent_acts(truncate):
    """Compare three episodes of six steps with the results that follow from the lifetimes of the agents."""
    envs = make(env_kwargs={"lives": LIVES, "truncate": truncate})
    obs, mask = envs.reset()
    assert mask == {"early": None, "shared": None}
    seeds = obs["early"]["obs"][:, 0].copy()
    for number in range(18):
        episode, t = divmod(number, 6)
        step = envs.step(actions_of(envs))
        for policy, agents in (("early", (0,)), ("shared", (1, 2))):
            part, finals = step.parts[policy], []
            for env in range(2):
                for place, agent in enumerate(agents):
                    column, (begin, end) = env * len(agents) + place, LIVES[agent]
                    acts, ends = begin <= t < end, t + 1 == end
                    assert part.valid[column] == acts
                    assert part.reward[column] == (100 * agent + t + 1 if acts else 0)
                    assert part.terminated[column] == (ends and not truncate)
                    assert part.truncated[column] == (ends and truncate)
                    if ends:
                        finals.append((column, [seeds[env], episode, t + 1, agent]))
                    following, there = (episode, t + 1) if t < 5 else (episode + 1, 0), begin <= (t + 1) % 6 < end
                    if there:
                        assert part.obs["obs"][column].tolist() == [seeds[env], *following, agent]
                    assert part.first[column] == (there and (t + 1) % 6 == begin)
            assert sorted(part.final_index.tolist()) == [column for column, _ in sorted(finals)]
            for column, expected in finals:
                assert part.final_obs["obs"][part.final_index.tolist().index(column)].tolist() == expected
        # An env step ends an episode when no agent remains.
        assert len(step.episodes) == (2 if t == 5 else 0)
        for found in step.episodes:
            returns = [sum(100 * agent + t + 1 for t in range(*LIVES[agent])) for agent in range(3)]
            assert found.env_return == sum(returns)
            assert found.length == 6
            assert found.policy_returns == {"early": returns[0], "shared": (returns[1] + returns[2]) / 2}
            assert found.terminated is not truncate
    envs.close()


def test_masks_of_absent_agents_allow_everything():
    envs = make(env_kwargs={"masks": True})
    _, mask = envs.reset()
    assert mask["early"].tolist() == [[False, True, True]] * 2
    assert mask["shared"].tolist() == [[False, True, True], [True, True, True]] * 2  # agent_2 appears at t = 2
    step = envs.step(actions_of(envs))
    assert step.mask["early"].tolist() == [[True, False, True]] * 2
    step = envs.step(actions_of(envs))
    assert step.mask["shared"].tolist() == [[True, True, False]] * 4
    step = envs.step(actions_of(envs))  # the last step of agent_1
    assert step.mask["shared"].tolist() == [[True, True, True], [False, True, True]] * 2
    assert step.parts["shared"].final_mask.tolist() == [[False, True, True]] * 2
    assert step.parts["early"].final_mask is None


class Unclosable(ChangingAgents):
    """An environment whose `close` raises an exception."""

    def close(self):
        raise ZeroDivisionError("in close")


def test_an_error_in_close_is_only_logged(caplog):
    make(env_fn=Unclosable).close()
    for index in (0, 1):
        assert f"GWorker 0/CWorker 0, env {index}: close raised ZeroDivisionError\nTraceback" in caplog.text


class MaskedByObservation(ChangingAgents):
    """Environment with action masks in its observations."""

    def observation_space(self, agent):
        return gym.spaces.Dict({"obs": super().observation_space(agent), "action_mask": gym.spaces.MultiBinary(3)})

    def _observe(self, agents):
        allowed = (np.arange(3) != self._t % 3).astype(np.int8)
        return {agent: {"obs": obs, "action_mask": allowed} for agent, obs in super()._observe(agents).items()}


def test_masks_of_agents_that_appear_later_exist_from_the_start():
    """Check that the reset returns a mask even for agent_2, which appears later.

    Storages allocate memory for masks after the reset.
    """
    envs = make(env_fn=MaskedByObservation, policy_of="independent")
    _, mask = envs.reset()
    assert mask["agent_2"].tolist() == [[True, True, True]] * 2
    act = {f"agent_{index}": np.zeros(2, np.int64) for index in range(3)}
    envs.step(act)
    step = envs.step(act)
    assert step.mask["agent_2"].tolist() == [[True, True, False]] * 2
    step = envs.step(act)  # the last step of agent_1
    assert step.parts["agent_1"].final_mask.tolist() == [[False, True, True]] * 2


def test_masks_that_first_appear_in_later_infos_are_refused():
    envs = make(policy_of="independent", env_kwargs={"masks": True})
    envs.reset()
    act = {f"agent_{index}": np.zeros(2, np.int64) for index in range(3)}
    envs.step(act)
    with pytest.raises(EnvError, match="put 'action_mask' into the observation space"):
        envs.step(act)


class Stranger(ChangingAgents):
    """Environment in which an undeclared agent appears."""

    def step(self, actions):
        results = super().step({agent: action for agent, action in actions.items() if agent != "stranger"})
        self.agents = [*self.agents, "stranger"]
        results[0]["stranger"] = results[0]["agent_0"]
        return results


class Numbered(ChangingAgents):
    """Environment whose agents are identified by integers."""

    def __init__(self):
        super().__init__()
        self.possible_agents = [0, 1, 2]


def test_undeclared_agents_are_reported():
    envs = make(env_fn=Stranger)
    envs.reset()
    with pytest.raises(EnvError, match=r"env 0: \['stranger'\] are not among possible_agents"):
        envs.step(actions_of(envs))


def test_agents_whose_name_is_not_a_string_are_refused():
    with pytest.raises(ConfigError, match="names of agents must be strings, got 0"):
        MultiAgentVecEnv.create_factory(Numbered)


def test_a_monitor_needs_a_folder():
    with pytest.raises(ConfigError, match="log_dir must be a folder"):
        make(log_dir="")


def test_a_limit_truncates_all_agents():
    envs = make(1, env_kwargs={"lives": LIVES}, max_episode_steps=2)
    envs.reset()
    envs.step(actions_of(envs))
    step = envs.step(actions_of(envs))
    assert step.parts["early"].truncated.tolist() == [True]
    assert step.parts["shared"].truncated.tolist() == [True, False]  # agent_2 has not acted yet
    assert [(e.length, e.terminated) for e in step.episodes] == [(2, False)]
    assert step.parts["early"].final_obs["obs"][0, 2] == 2
    assert step.obs["early"]["obs"][0, 1:3].tolist() == [1, 0]


def test_calls_before_reset_and_after_close_are_refused():
    env = make()
    with pytest.raises(CallOrderError, match=r"CWorker 0: step\(\) was called before reset\(\); call reset\(\) first"):
        env.step(actions_of(env))
    env.reset()
    env.step(actions_of(env))
    env.close()
    for name, call in (("step", lambda: env.step(actions_of(env))), ("reset", env.reset)):
        with pytest.raises(StoppedError, match=rf"CWorker 0: {name}\(\) was called after close\(\); build new env"):
            call()
    env.close()


def test_only_the_first_reset_is_seeded_and_test_seeds_differ():
    def seeds(envs):
        return envs.reset()[0]["early"]["obs"][:, 0].tolist()
    assert seeds(make()) == seeds(make())
    assert seeds(make()) != seeds(make(mode="test"))
    assert len(set(seeds(make(4)))) == 4


def test_rewards_are_transformed_for_the_learner_only(tmp_path):
    for mode, expected in (("train", [1.0]), ("test", [5.0])):
        envs = make(1, env_kwargs={"lives": ((0, 6), (0, 5), (0, 2))}, reward_transform="clip", mode=mode,
                    log_dir=str(tmp_path))
        envs.reset()
        for _ in range(5):
            step = envs.step(actions_of(envs))
        assert step.parts["early"].reward.tolist() == expected
        step = envs.step(actions_of(envs))
        assert step.episodes[0].policy_returns["early"] == 21.0
        envs.close()
        envs.close()
    with open(tmp_path / "monitor_train_GWorker_0_CWorker_0.csv", newline="", encoding="utf-8") as file:
        (row,) = csv.DictReader(file)
    assert float(row["r/early"]) == 21.0
    assert float(row["r"]) == 21.0 + 515.0 + 403.0
    assert row["l"] == "6"


def test_test_env_kwargs_and_wrappers():
    made = []

    def wrapper(env):
        made.append(env)
        return env
    envs = make(1, policy_of=lambda agent: agent, env_fn=MatchingGame, env_kwargs={"episode_length": 3},
                test_env_kwargs={"episode_length": 5}, wrappers=(wrapper,), mode="test")
    envs.reset()
    lengths = [episode.length for _ in range(10) for episode in envs.step(
        {policy: np.zeros(1, np.int64) for policy in ("agent_0", "agent_1")}).episodes]
    assert lengths == [5, 5]
    assert len(made) == 3  # one is probed for its agents, one is probed for its spaces, and one is stepped


class StartingAtOne(MatchingGame):
    def action_space(self, agent):
        return gym.spaces.Discrete(3, start=1)

    def step(self, actions):
        self.seen = actions
        return super().step(actions)


def test_actions_are_offset_by_the_start_of_their_space():
    envs = make(1, env_fn=StartingAtOne, policy_of=None)
    envs.reset()
    envs.step({"shared": np.array([0, 2])})
    assert envs.environments[0].seen == {"agent_0": 1, "agent_1": 3}
    assert envs.action_space["shared"] == gym.spaces.Discrete(3)


class Subtracting(MatchingGame):
    def action_space(self, agent):
        return gym.spaces.MultiDiscrete([3, 3])

    def step(self, actions):
        first = {agent: int(action[0]) for agent, action in actions.items()}
        for agent in actions:
            actions[agent] -= 2
        return super().step(first)


def test_environments_that_change_their_actions_do_not_change_those_of_the_caller():
    envs = make(1, Subtracting, "independent")
    envs.reset()
    action = {policy: np.ones((1, 2), np.int64) for policy in envs.observation_space}
    envs.step(action)
    assert all((array == 1).all() for array in action.values())


class Continuous(MatchingGame):
    def action_space(self, agent):
        return gym.spaces.Box(-1.0, 1.0, (2,), np.float32)

    def step(self, actions):
        self.seen = actions
        return super().step(dict.fromkeys(actions, 0))


def test_continuous_actions_are_checked():
    envs = make(1, env_fn=Continuous, policy_of=None)
    envs.reset()
    envs.step({"shared": np.array([[0.5, 0.25], [0.0, 1.0]], np.float32)})
    assert envs.environments[0].seen["agent_1"].tolist() == [0.0, 1.0]
    with pytest.raises(NonFiniteDataError, match="step 1: NaN or infinity in the action of 'agent_1'"):
        envs.step({"shared": np.array([[0.5, 0.25], [0.0, np.nan]], np.float32)})


class Broken(MatchingGame):
    def __init__(self, fault):
        super().__init__()
        self._fault = fault

    def reset(self, seed=None, options=None):
        obs, infos = super().reset(seed, options)
        if self._fault == "nobody":
            self.agents = []
        if self._fault == "shape":
            obs["agent_0"] = obs["agent_0"][:2]
        return obs, infos

    def step(self, actions):
        obs, rewards, *rest = super().step(actions)
        if self._fault == "raise":
            raise RuntimeError("broken step")
        if self._fault == "no reward":
            del rewards["agent_1"]
        if self._fault == "no observation":
            del obs["agent_1"]
        return obs, rewards, *rest


@pytest.mark.parametrize(("fault", "message"), [
    ("nobody", "reset left no agents"), ("shape", "observation of agent_0: expected float32"),
    ("raise", "env 0: step raised at step 0"), ("no reward", "'agent_1' acted"),
    ("no observation", "no observation of")])
def test_broken_environments_are_reported(fault, message):
    with pytest.raises(EnvError, match=message):  # some faults occur in the factory, others in reset or step
        use(Broken, fault)


def use(env_fn, fault):
    envs = make(1, env_fn=env_fn, env_kwargs={"fault": fault}, policy_of=None)
    envs.reset()
    envs.step({"shared": np.zeros(2, np.int64)})


class Unequal(MatchingGame):
    def action_space(self, agent):
        return gym.spaces.Discrete(2 + int(agent[-1]))


class TurnBased(MatchingGame):
    def agent_iter(self):
        return iter(self.agents)


@pytest.mark.parametrize(("arguments", "message"), [
    ({"env_fn": Unequal}, "agents of one policy must have the same action_space.*'independent', or a mapping"),
    ({"env_fn": TurnBased}, "turn-based"),
    ({"env_fn": lambda: gym.make("CartPole-v1")}, "parallel API, got .* without possible_agents"),
    ({"env_fn": "no.such.module"}, "pip install 'pettingzoo"),
    ({"env_fn": "json.decoders"}, r"did you mean 'json\.decoder'\?"),
    ({"env_fn": "math.nothing"}, "pip install 'pettingzoo"),
    ({"env_fn": "json"}, "json has no parallel_env; use"),
    ({"env_fn": 3}, "env_fn must be"),
    ({"policy_of": {"agent_0": "a"}}, "policy_of must map each of .* to a name .* got '' for 'agent_1'"),
    ({"policy_of": lambda agent: "a/b"}, "without '/'"),
    ({"policy_of": {"agent_0": "a", "agent_1": "a", "agent_2": "b"}},
     r"map the agents \['agent_0', 'agent_1'\], got \['agent_2'\]"),
    ({"policy_of": "alone"}, "policy_of must be 'shared', 'independent', a mapping .* got 'alone'"),
    ({"policy_of": 3}, "policy_of must be 'shared', .* got 3"),
    ({"reward_transform": "cut"}, "reward_transform must be"),
    ({"wrappers": (3,)}, "wrappers must be functions"),
    ({"agents": {"a": ("agent_0",)}}, "agents are derived from policy_of"),
    ({"vec_env_sizes": 2}, "did you mean 'vec_env_size'"),
])
def test_bad_input_is_refused_when_the_factory_is_created(arguments, message):
    with pytest.raises(ConfigError, match=message):
        MultiAgentVecEnv.create_factory(**{"env_fn": MatchingGame, **arguments})


class Spaceless(MatchingGame):
    def observation_space(self, agent):
        return self.spaces[agent]


def test_an_environment_without_spaces_is_refused():
    match = (r"observation_space\(agent\) of Spaceless raised: AttributeError.*"
             r"must return the gymnasium.Space of each of")
    with pytest.raises(EnvError, match=match):
        MultiAgentVecEnv.create_factory(Spaceless)


@pytest.mark.parametrize(("content", "error", "message"), [
    ("import nothing_like_this", ConfigError, "install the package that contains nothing_like_this"),
    ("from json import nothing_like_this", ConfigError, "pip install 'pettingzoo"),
    ("def env(): pass", ConfigError, "has no parallel_env, because it has PettingZoo's turn-based API"),
    ("nothing_like_this()", EnvError, "importing some_game raised: .*nothing_like_this"),
])
def test_a_module_without_an_environment_constructor_is_refused(tmp_path, monkeypatch, content, error, message):
    (tmp_path / "some_game.py").write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        with pytest.raises(error, match=message):
            MultiAgentVecEnv.create_factory("some_game")
    finally:
        sys.modules.pop("some_game", None)


def test_an_error_in_a_constructor_is_reported_with_its_place():
    with pytest.raises(EnvError, match="constructor raised"):
        MultiAgentVecEnv.create_factory(MatchingGame, {"nothing": 1})


class Half(MatchingGame):
    """Environment that ends at its first step: the first agent is truncated, and the second agent terminates."""

    def step(self, actions):
        obs, rewards, *_, infos = super().step(actions)
        self.agents = []
        return obs, rewards, {"agent_0": False, "agent_1": True}, {"agent_0": True, "agent_1": False}, infos


def test_an_episode_terminates_only_if_all_its_agents_do():
    envs = make(1, env_fn=Half, policy_of=None)
    envs.reset()
    (episode,) = envs.step({"shared": np.zeros(2, np.int64)}).episodes
    assert not episode.terminated


def test_each_episode_has_max_episode_steps_steps():
    envs = make(1, env_fn=MatchingGame, policy_of=None, max_episode_steps=3)
    envs.reset()
    ends = [bool(envs.step({"shared": np.zeros(2, np.int64)}).episodes) for _ in range(9)]
    assert ends == [False, False, True] * 3


def test_a_reward_of_an_agent_that_did_not_act_is_named_once(caplog):
    class Rewards(ChangingAgents):
        def step(self, actions):
            obs, rewards, *rest = super().step(actions)
            return obs, {agent: rewards.get(agent, self.late) for agent in self.possible_agents}, *rest
    for late, num_texts in ((0.0, 0), (-1.0, 1)):
        Rewards.late = late
        envs, caplog.handler.records[:] = make(1, Rewards, env_kwargs={"lives": LIVES}), []
        envs.reset()
        step = [envs.step(actions_of(envs)) for _ in range(6)][-1]
        texts = [record.getMessage() for record in caplog.records]
        assert [("{'agent_2': -1.0}" in text, "did not act" in text) for text in texts] == [(True, True)] * num_texts
        # The return is the sum over the steps in which each agent acts.
        expected = [100 * agent + t + 1 for agent in range(3) for t in range(*LIVES[agent])]
        assert step.episodes[0].env_return == sum(expected)
