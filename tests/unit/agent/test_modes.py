"""Test the rule for dropout and batch normalization: networks act in evaluation mode, and learn in one stated mode."""

from __future__ import annotations

import warnings

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

import pytorchrl
from pytorchrl.agent.seeding import Stream, derive_seed
from pytorchrl.callbacks import SaveBestModel
from pytorchrl.envs.testing import MatchingGame
from pytorchrl.errors import ConfigError
from pytorchrl.files.tensors import acting_state_of, read_sealed

ALL = {"target_steps": 96, "num_envs": 2, "seed": 1, "progress": False, "hidden_sizes": (8,)}
ON_POLICY = ALL | {"num_steps": 8, "num_epochs": 1, "num_mini_batch": 2}
REPLAY = ALL | {"start_steps": 24, "mini_batch_size": 8, "update_every": 4, "num_updates": 1}


class Steps(gym.Env):
    """Episodes of eight random observations, in which each reward depends on the observation and the action."""

    observation_space = gym.spaces.Box(-9, 9, (3,))

    def __init__(self, is_continuous=False):
        self.action_space = gym.spaces.Box(-1, 1, (1,)) if is_continuous else gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.look(), {}

    def look(self):
        self.obs = self.np_random.normal(3, 2, 3).clip(-9, 9).astype(np.float32)
        return self.obs

    def step(self, action):
        self.t += 1
        reward = float(self.obs[0] * np.sum(action) + self.obs[1])
        return self.look(), reward, False, self.t == 8, {}


class Net(nn.Module):
    """A feature extractor with dropout and batch normalization."""

    def __init__(self, space):
        super().__init__()
        self.out_features = 6
        inputs = int(space.n) if isinstance(space, gym.spaces.Discrete) else space.shape[0]
        self.layers = nn.Sequential(nn.Linear(inputs, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.5))

    def forward(self, x):
        x = x if x.is_floating_point() else nn.functional.one_hot(x.long(), self.layers[0].in_features).float()
        return self.layers(x.flatten(0, -2)).view(*x.shape[:-1], 6)


def seeds_of_evaluation(agent, seed):
    """Return the seeds of the two environments of an evaluation."""
    return agent.agent.play_envs(mode="test", seed=derive_seed(seed, Stream.EVALUATION, 1)).seeds[:2]


@pytest.mark.parametrize(("algorithm", "options"), [
    ("ppo", ON_POLICY), ("ppo", ON_POLICY | {"recurrent_net": "gru"}), ("dqn", REPLAY),
    ("sac", REPLAY | {"env_kwargs": {"is_continuous": True}}),
    ("td3", REPLAY | {"env_kwargs": {"is_continuous": True}}),
    ("ppo", ON_POLICY | {"num_col_workers": 2, "runtime": "simulated"}),
    ("appo", ALL | {"num_steps": 8, "num_col_workers": 2, "col_communication": "asynchronous", "runtime": "simulated",
                    "inference": "central"}),
    ("dqn", REPLAY | {"num_col_workers": 2, "col_communication": "asynchronous", "runtime": "simulated"}),
    ("dqn", REPLAY | {"num_col_workers": 2, "runtime": "threads"}),
    ("r2d2", REPLAY | {"num_steps": 8, "recurrent_net": "gru", "length": 8, "burn_in": 0, "period": 8}),
    pytest.param("ppo", ON_POLICY | {"num_col_workers": 2, "runtime": "processes"}, marks=pytest.mark.thorough),
    pytest.param("sac", REPLAY | {"env_kwargs": {"is_continuous": True}, "num_col_workers": 2, "runtime": "processes"},
                 marks=pytest.mark.thorough),
    *(pytest.param(algorithm, options | {"num_col_workers": 2, "runtime": "ray"},
                   marks=[pytest.mark.ray, pytest.mark.thorough])
      for algorithm, options in (("ppo", ON_POLICY), ("dqn", REPLAY))),
], ids=lambda value: value if isinstance(value, str) else "-".join(map(str, list(value.values())[8:])))
@pytest.mark.filterwarnings("ignore:.*stay in evaluation mode")
def test_evaluate_and_act_and_the_exported_policy_agree(algorithm, options, request):
    if options.get("runtime") == "ray":
        request.getfixturevalue("shared_ray")
    options = {"env_kwargs": {"is_continuous": False}, **options}
    agent = pytorchrl.train(algorithm, Steps, feature_extractor=Net, **options)
    recurrent = "recurrent_net" in options
    first = agent.evaluate(2, seed=5).returns
    assert agent.evaluate(2, seed=5).returns == first, "the same episodes have the same returns"
    policy = agent.policy
    for seed, expected in zip(seeds_of_evaluation(agent, 5), first, strict=True):
        env, total, memory, state, over = Steps(**options["env_kwargs"]), 0.0, None, None, False
        obs, _ = env.reset(seed=seed)
        while not over:
            action = agent.act(obs, memory=memory)
            exported = policy(torch.from_numpy(obs)[None], *([state] if recurrent else []))
            if recurrent:
                (action, memory), (exported, state) = action, exported
            np.testing.assert_allclose(exported[0].detach().numpy(), action, atol=1e-5)
            obs, reward, _, over, _ = env.step(action)
            total += reward
        assert total == pytest.approx(expected, abs=1e-4)
    moments = {name: value for name, value in policy.state_dict().items() if "running_mean" in name}
    assert moments
    learns = algorithm in ("dqn", "r2d2", "sac", "td3")
    assert all(bool(value.any()) == learns for value in moments.values()), "moments travel with the weights"


@pytest.mark.parametrize("algorithm", ["ppo", "dqn"])
@pytest.mark.filterwarnings("ignore:.*stay in evaluation mode")
def test_several_policies_play_the_same_episodes_twice(algorithm):
    options = ON_POLICY if algorithm == "ppo" else REPLAY
    agent = pytorchrl.train(algorithm, MatchingGame, feature_extractor=Net, policies="independent", **options)
    first = agent.evaluate(2, seed=5).returns
    assert agent.evaluate(2, seed=5).returns == first
    for seed, expected in zip(seeds_of_evaluation(agent, 5), first, strict=True):
        game, total = MatchingGame(), 0.0
        obs, _ = game.reset(seed=seed)
        while game.agents:
            actions = agent.act(obs)
            assert actions == {name: int(agent.policy[name](torch.from_numpy(own)[None])) for name, own in obs.items()}
            obs, rewards, *_ = game.step(actions)
            total += sum(rewards.values())
        assert total == expected


class Evaluated(SaveBestModel):
    """Callback that also keeps the return of the best evaluation."""

    best = -np.inf

    def on_evaluation(self, learner, evaluation):
        super().on_evaluation(learner, evaluation)
        self.best = max(self.best, evaluation.return_mean)


@pytest.mark.parametrize("algorithm", ["ppo", "dqn"])
@pytest.mark.filterwarnings("ignore:.*stay in evaluation mode")
def test_the_best_model_plays_the_episodes_of_its_evaluation(algorithm, tmp_path):
    callback, options = Evaluated(), ON_POLICY if algorithm == "ppo" else REPLAY
    pytorchrl.train(algorithm, Steps, feature_extractor=Net, log_dir=tmp_path, eval_every=96, eval_episodes=2,
                    tensorboard=False, callbacks=[callback], **options)
    state = acting_state_of(read_sealed(tmp_path / "best.pt", "model"), "best")
    assert any("running_mean" in name and value.any() for name, value in state.items()) == (algorithm == "dqn")
    assert pytorchrl.load(tmp_path, model="best").evaluate(2).return_mean == pytest.approx(callback.best, abs=1e-4)


@pytest.mark.thorough
@pytest.mark.parametrize("to", ["torch", "safetensors"])
def test_exported_files_act_in_evaluation_mode(to, tmp_path):
    """The export compares the actions of the file with those of the agent for each observation, and raises."""
    agent = pytorchrl.train("dqn", Steps, feature_extractor=Net, **REPLAY)
    (exported,) = agent.export(tmp_path / "policy", to=to, checks=64)
    assert exported.path.exists()


@pytest.mark.parametrize("options", [
    {}, {"recurrent_net": "lstm"}, {"shared_policy_value_network": True}, {"num_col_workers": 2, "runtime": "threads"},
    {"num_col_workers": 2, "runtime": "simulated", "col_communication": "asynchronous", "inference": "central"}],
    ids=lambda options: "-".join(map(str, options.values())) or "central")
def test_without_a_change_of_the_weights_ppo_has_no_divergence(options):
    seen = []

    class Watched(pytorchrl.PPO):
        def compute_gradients(self, batch):
            gradients, info = super().compute_gradients(batch)
            seen.append((info["kl"], info["clip_fraction"]))
            return gradients, info

    with pytest.warns(UserWarning, match="BatchNorm1d in the actor stay in evaluation mode in Watched"):
        pytorchrl.train(Watched, Steps, feature_extractor=Net, lr=0.0, **ON_POLICY, **options)
    assert max(abs(kl) for kl, _ in seen) < 1e-9
    assert not any(clipped for _, clipped in seen)


def test_target_networks_do_not_learn_moments():
    """Check that targets only copy the moments of the trained networks, which learn in each update."""
    counts = []

    class Watched(pytorchrl.SAC):
        def apply_gradients(self, gradients=None):
            found = super().apply_gradients(gradients)
            counts.append([int(next(value for name, value in network.named_buffers() if "num_batches" in name))
                           for network in (self.actor.critics, self.targets["q"])])
            return found

    pytorchrl.train(Watched, Steps, feature_extractor=Net, env_kwargs={"is_continuous": True},
                    target_update_interval=3, **REPLAY)
    passes = counts[0][0]
    assert passes >= 1
    assert counts == [[(i + 1) * passes, (i + 1) // 3 * 3 * passes] for i in range(len(counts))]


@pytest.mark.parametrize("compile", [
    False, pytest.param(True, marks=[pytest.mark.thorough, pytest.mark.compiled])])
def test_a_refused_update_leaves_the_moments_and_dropout_is_reproducible(compile):
    def run(planted):
        seen = []

        class Watched(pytorchrl.DQN):
            def apply_gradients(self, gradients=None):
                before = [value.clone() for value in self.actor.buffers()]
                if planted and len(seen) == 2:
                    seen.append(before)
                    gradients = [torch.full_like(group.data, torch.nan) for group in self.groups.values()]
                try:
                    return super().apply_gradients(gradients)
                finally:
                    seen.append([value.clone() for value in self.actor.buffers()])

        agent = pytorchrl.train(Watched, Steps, feature_extractor=Net, compile=compile, **REPLAY)
        return seen, torch.cat([value.flatten().double() for value in agent.policy.state_dict().values()])

    _seen, weights = run(False)
    assert torch.equal(run(False)[1], weights), "dropout draws from the seed of the run"
    planted, _ = run(True)
    for kept, after in zip(planted[1], planted[3], strict=True):
        assert torch.equal(kept, after)
    assert not all(torch.equal(kept, tried) for kept, tried in zip(planted[1], planted[2], strict=True))


def test_layers_that_would_be_wrong_are_refused_and_frozen_layers_are_no_mistake(tmp_path):
    with pytest.raises(ConfigError, match=r"BatchNorm1d in the actor learn moments .* parallel gradient workers"):
        pytorchrl.train("dqn", Steps, feature_extractor=Net, num_grad_workers=2, runtime="simulated", **REPLAY)
    with pytest.raises(ConfigError, match="record of asynchronous collection could not be replayed"):
        pytorchrl.train("dqn", Steps, feature_extractor=Net, num_col_workers=2, col_communication="asynchronous",
                        runtime="simulated", record=tmp_path / "record.gz", **REPLAY)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a pretrained network in evaluation mode is no mistake
        pytorchrl.train("ppo", Steps, feature_extractor=Frozen, **ON_POLICY)


class Frozen(Net):
    def __init__(self, space):
        super().__init__(space)
        self.eval()
